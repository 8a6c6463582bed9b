"""The report: one HTML file about a device's memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from typing import Any, Union

from leasehold._errors import ArgumentTypeError, InvalidArgumentError
from leasehold._native import Allocator, Device, opened, render

Source = Union[Allocator, Device, Mapping[str, Any], str]

# The source of reports that name none, as JSON: `leasehold.torch` sets it while it is enabled.
_default: Callable[[], str] | None = None


def set_default(source: Callable[[], str] | None) -> None:
    """Sets what a report is about that names no source; `None` takes it back."""
    global _default
    _default = source


def _text(source: Source | None) -> str:
    if source is None:
        if _default is not None:
            return _default()
        devices = opened()
        if len(devices) != 1:
            names = ", ".join(device.name for device in devices) or "none"
            raise InvalidArgumentError(f"name the device of the report; open are: {names}")
        source = devices[0]
    if isinstance(source, Device):
        source = source.allocator
    if isinstance(source, Allocator):
        return source._snapshot_json()
    try:
        text = source if isinstance(source, str) else json.dumps(source)
        text.encode()
    except TypeError as error:
        raise ArgumentTypeError(f"the source of a report is no snapshot: {error}") from error
    except ValueError as error:
        raise InvalidArgumentError(f"the source of a report is no snapshot: {error}") from error
    return text


def report(path: str | os.PathLike[str], source: Source | None = None) -> None:
    """Writes one HTML file about memory, which needs no network to be looked at.

    `source` is an `Allocator`, a `Device` (its own allocator is meant), or a snapshot: what
    `Allocator.snapshot` returns, or the JSON of `leasehold_snapshot`. Without one it is PyTorch's
    memory while `leasehold.torch` is enabled, else the one device that is open. Curves over time
    need an allocator that was made with `trace_events`.
    """
    page = render(_text(source))
    with open(path, "w", encoding="utf-8") as file:
        file.write(page)
