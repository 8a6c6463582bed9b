"""Uses of the package with NumPy that mypy and pyright check, and that run too."""

from __future__ import annotations

import array
import mmap
from typing import Any

import leasehold
import numpy as np
import numpy.typing as npt


def main() -> None:
    device = leasehold.Device("cpu:0")
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    buffer: leasehold.Buffer = device.upload(numbers)
    buffer.copy_from(numbers.T.reshape(2, 3))
    buffer.copy_to(numbers)
    truths: npt.NDArray[np.bool_] = np.zeros(3, np.bool_)
    anything: npt.NDArray[Any] = np.zeros(3)
    allocator = leasehold.Allocator(device, budget="64MiB")
    allocator.budget = 64 << 20
    for made in (
        device.upload(truths),
        device.upload(np.float32(3)),
        allocator.upload(anything),
        allocator.upload(b"bytes"),
        device.upload(bytearray(3)),
        device.upload(memoryview(b"view")),
        device.upload(array.array("i", [1])),
        device.upload(mmap.mmap(-1, 10)),
        device.upload(buffer),
        device.zeros(np.int64(3), np.float32),
        device.zeros((np.int64(3), 2), np.dtype("f4")),
        leasehold.from_dlpack(anything),
    ):
        assert made.nbytes > 0
    shared: npt.NDArray[Any] = np.asarray(buffer)
    assert shared.shape == np.from_dlpack(buffer).shape


def wrong(device: leasehold.Device) -> None:
    """Each line is an error of types, which the checks would miss as an unused comment."""
    device.upload([1, 2])  # type: ignore[arg-type]
    device.upload("text")  # type: ignore[arg-type]
    device.zeros(3).copy_from(3)  # type: ignore[arg-type]
    device.zeros(3).copy_to(object())  # type: ignore[arg-type]
    device.zeros(3).fill("1")  # type: ignore[arg-type]
    device.zeros("3")  # type: ignore[call-overload]
    device.zeros((2, 3))  # type: ignore[call-overload]
    leasehold.Allocator(device, budget=1.5)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
