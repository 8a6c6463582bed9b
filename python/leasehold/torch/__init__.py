"""Leasehold as PyTorch's allocator of CUDA memory.

One line before the first use of CUDA::

    import leasehold.torch
    leasehold.torch.enable()

or no line at all: `python -m leasehold.torch script.py`. Memory of one part of a program, which can
be given back and taken again at the same addresses, under any allocator of PyTorch's::

    with leasehold.torch.region("weights"):
        model = Model().cuda()
    leasehold.torch.suspend("weights")
    leasehold.torch.resume("weights")
"""

import contextlib
import os
import threading
import warnings
from typing import Any, Dict, Iterator, Optional, Union

try:
    import torch
except ImportError as error:
    raise ImportError(
        "leasehold.torch needs PyTorch with CUDA, which is not installed: pip install torch"
    ) from error

from leasehold import _report
from leasehold._errors import InvalidArgumentError, InvalidStateError, UnavailableError
from leasehold._library import path as _library_path
from leasehold._native import parse_bytes

from leasehold.torch import _build, _plugin, _settings
from leasehold.torch._build import BuildError

__all__ = [
    "BuildError",
    "enable",
    "enabled",
    "region",
    "region_pool",
    "resume",
    "snapshot",
    "statistics",
    "suspend",
]

POLICIES = {"balanced": 0, "fastest": 1, "compact": 2}
Budget = Union[None, int, str]

_lock = threading.RLock()
_options: Optional[Dict[str, Any]] = None
_regions: Dict[str, Any] = {}
_pools: Dict[Any, Any] = {}


def _bytes(budget: Budget) -> int:
    """A budget in bytes; 0 for none."""
    if budget is None:
        return 0
    number = parse_bytes(budget) if isinstance(budget, str) else int(budget)
    if not 0 < number < 1 << 64:
        raise InvalidArgumentError("a budget of %d bytes" % number)
    return number


def _policy(name: str) -> int:
    if name not in POLICIES:
        raise InvalidArgumentError("a policy is one of %s; this is %r" % (", ".join(POLICIES), name))
    return POLICIES[name]


def _need_cuda() -> None:
    if torch.version.cuda is None:
        raise UnavailableError("leasehold.torch: this PyTorch (%s) has no CUDA" % torch.__version__)
    if torch.cuda._is_in_bad_fork():
        raise InvalidStateError(
            "leasehold.torch: a process that was made by fork() cannot use CUDA: use the start "
            'method "spawn"'
        )
    if torch.cuda.device_count() == 0:
        raise UnavailableError("leasehold.torch: no CUDA device was found on this machine")


def _need_unused() -> int:
    """Checks that PyTorch's allocator holds no memory. Returns the devices, 0 before CUDA starts."""
    if not torch.cuda.is_initialized():
        return 0
    count = int(torch.cuda.device_count())
    for device in range(count):
        held = torch.cuda.memory_reserved(device)
        if held != 0:
            raise InvalidStateError(
                "leasehold.torch.enable() comes too late: PyTorch's own allocator holds %d bytes "
                "of cuda:%d already. Call it before the first CUDA tensor is made, or start the "
                "program by: python -m leasehold.torch script.py" % (held, device)
            )
    return count


def enable(
    policy: str = "balanced",
    budget: Budget = None,
    *,
    plugin: Optional[bool] = None,
    shareable: bool = False,
) -> None:
    """Makes Leasehold PyTorch's allocator of CUDA memory, for the rest of the process.

    It comes before the first CUDA tensor. A second call with the same options does nothing. The
    first call on a machine builds an extension, which takes about half a minute;
    `python -m leasehold.torch build` does so ahead of time. Settings of PyTorch's allocator in the
    environment that mean nothing here are named in a warning.

    Args:
        policy: `"balanced"`, `"fastest"` or `"compact"`: when free memory is moved to where it is
            needed, instead of taking new memory. `"compact"` takes the least memory.
        budget: The most bytes of each device, as a number or a text such as `"20GiB"`. None for no
            limit.
        plugin: True for PyTorch's plug-in interface, which needs no compiler and has less
            (`docs/how-to/pytorch.md` has the table). None takes it, with a warning, only where the
            extension cannot be built. False never takes it.
        shareable: True lets `torch.multiprocessing` send CUDA tensors to other processes, which
            see the same memory. Memory then comes in whole segments, which are never moved: more
            of it may lie unused. The plug-in interface cannot do it.

    Raises:
        UnavailableError: there is no CUDA.
        InvalidStateError: it comes too late, or other options were given before.
        BuildError: the extension cannot be built, and `plugin` is False.
        InvalidArgumentError: an option is wrong.
    """
    global _options
    wanted = {"policy": policy, "budget": budget, "shareable": shareable}
    if shareable and plugin:
        raise InvalidArgumentError("PyTorch's plug-in interface shares no tensors: leave plugin out")
    number, limit = _policy(policy), _bytes(budget)
    with _lock:
        if _options is not None:
            if _options == wanted:
                return
            raise InvalidStateError(
                "leasehold.torch was enabled with other options already: %r" % (_options,)
            )
        _need_cuda()
        devices = _need_unused()
        extension = None
        if shareable:
            plugin = False
        if not plugin:
            try:
                extension = _build.load()
            except BuildError as error:
                if plugin is False:
                    raise
                warnings.warn(
                    "leasehold.torch uses PyTorch's plug-in interface, which has no captured "
                    "graphs, snapshots or regions: %s" % error,
                    RuntimeWarning,
                    stacklevel=2,
                )
        fraction = _settings.read(extension is not None)
        if extension is not None:
            extension.install(_library_path(), limit, number, devices, shareable)
            for device in range(torch.cuda.device_count()):
                extension.set_fraction(device, fraction)
            if shareable:
                from leasehold.torch import _share

                _share.install(wanted)
        else:
            _plugin.install(_library_path(), limit, number)
        _options = wanted
        _report.set_default(snapshot)


def enabled() -> bool:
    """Whether Leasehold is PyTorch's allocator in this process."""
    return _options is not None


def _device(device: Any) -> int:
    if device is None:
        return int(torch.cuda.current_device())
    if isinstance(device, int):
        return device
    index = torch.device(device).index
    return int(torch.cuda.current_device() if index is None else index)


def statistics(device: Any = None) -> Dict[str, int]:
    """Returns Leasehold's own numbers of a device (`leasehold_stats`); empty before its first use."""
    if _plugin.installed():
        return _plugin.statistics(_device(device))
    found: Dict[str, int] = _build.load().statistics(_device(device))
    return found


def snapshot(device: Any = None) -> str:
    """Returns the state of all memory of a device as JSON, for `leasehold.report`."""
    if _plugin.installed():
        return _plugin.snapshot(_device(device))
    text: str = _build.load().snapshot(_device(device))
    return text


def _region(name: str, policy: str) -> Any:
    with _lock:
        if _plugin.installed():
            raise UnavailableError(
                "leasehold.torch: regions need the extension, which could not be built here: "
                "install a C++ compiler, or leave PyTorch's own allocator in place"
            )
        if name not in _regions:
            extension = _build.load()
            extension.prepare(_library_path())
            _regions[name] = extension.Region(name, _policy(policy))
        return _regions[name]


def region_pool(name: str, *, policy: str = "balanced", device: Any = None) -> Any:
    """Returns a region's `torch.cuda.MemPool` on a device: for `torch.cuda.graph(graph, pool=pool.id)`.

    The memory of a graph that is captured so is the region's, and goes and comes with it.

    Args:
        name: The region.
        policy: As for `enable`; the first use of the name decides.
        device: The device; None for the current one.

    Raises:
        UnavailableError: there is no CUDA, or the plug-in interface is on.
        InvalidStateError: the region is suspended.
    """
    _need_cuda()
    found = _region(name, policy)
    if found.suspended():
        raise InvalidStateError("leasehold.torch: region %r is suspended: resume it first" % name)
    index = _device(device)
    with _lock:
        pool = _pools.get((name, index))
        if pool is None:
            with torch.cuda.device(index):
                pool = _pools[(name, index)] = torch.cuda.MemPool(found)
    return pool


@contextlib.contextmanager
def region(name: str, *, policy: str = "balanced", device: Any = None) -> Iterator[None]:
    """Within this context the calling thread's CUDA memory comes from a region with this name.

    It works under every allocator of PyTorch's, whether `enable` was called or not. The same name
    is the same region. A region's memory stays where it is, so captured graphs may use it.

    Arguments and errors are those of `region_pool`.
    """
    pool = region_pool(name, policy=policy, device=device)
    with torch.cuda.use_mem_pool(pool, _device(device)):
        yield


def _known(name: str) -> Any:
    found = _regions.get(name)
    if found is None:
        raise KeyError("leasehold.torch: no region %r" % name)
    return found


def suspend(name: str, *, keep: bool = True) -> int:
    """Gives all memory of a region back to its devices, and keeps the addresses.

    Waits for all work of the devices. Until `resume`, no work may use the region's tensors; reading
    one is an illegal access, after which the process must end.

    Args:
        name: The region.
        keep: True keeps the contents in pinned host memory. False drops them.

    Returns:
        The bytes that went back.

    Raises:
        KeyError: no such region.
        RuntimeError: it is suspended already, or there is not enough host memory.
    """
    return int(_known(name).suspend(keep))


def resume(name: str) -> None:
    """Takes a region's memory again at the same addresses, with the contents that were kept.

    Where memory is short, what lies free is taken back first: Leasehold's other memory, and what
    PyTorch's own allocator has cached. Then the call waits for the device's work.

    Raises:
        KeyError: no such region.
        torch.OutOfMemoryError: live tensors leave too little memory. The region is still suspended,
            with its contents and addresses, and may be resumed later.
        RuntimeError: it is not suspended.
    """
    found = _known(name)
    try:
        found.resume()
    except torch.OutOfMemoryError:
        if enabled():
            raise
        torch.cuda.empty_cache()
        found.resume()
