"""The allocator through PyTorch's plug-in interface, where no extension can be built.

PyTorch asks a plug-in for memory and nothing else, so the statistics of `torch.cuda` are replaced
by functions here. A failed allocation calls a function of PyTorch that throws a `RuntimeError`:
without that PyTorch would use the null pointer.
"""

import ctypes
import os
from typing import Any, Dict, List, Optional

import torch

from leasehold._errors import InvalidStateError, UnavailableError, UnsupportedError

NUMBERS = """allocated_bytes allocated_bytes_peak allocated_bytes_total freed_bytes_total blocks blocks_peak allocations frees
reserved_bytes reserved_bytes_peak budget_bytes free_ready_bytes free_pending_bytes free_cached_bytes unmapped_bytes retries
failures growths remaps host_waits stream_waits driver_calls pools metadata_bytes""".split()


class Stats(ctypes.Structure):
    """leasehold_stats of leasehold.h."""

    _fields_ = [("size", ctypes.c_size_t)] + [(name, ctypes.c_uint64) for name in NUMBERS]


class Options(ctypes.Structure):
    """leasehold_device_options of leasehold.h."""

    _fields_ = [
        ("size", ctypes.c_size_t),
        ("budget", ctypes.c_uint64),
        ("policy", ctypes.c_uint32),
        ("trace_events", ctypes.c_uint32),
    ]


class Reserved:
    """Reserved bytes over time: what came and what went, as far as somebody looked."""

    def __init__(self) -> None:
        self.current = self.allocated = self.freed = 0

    def follow(self, current: int) -> None:
        if current > self.current:
            self.allocated += current - self.current
        else:
            self.freed += self.current - current
        self.current = current


class Plugin:
    """The functions of the library, and what was seen of the devices."""

    def __init__(self, path: str, budget: int, policy: int) -> None:
        self.library = ctypes.CDLL(path)
        self.library.leasehold_last_error.restype = ctypes.c_char_p
        self.budget = budget
        self.base: Dict[int, Stats] = {}
        self.reserved: Dict[int, Reserved] = {}
        self.keep: List[Any] = []
        options = Options(ctypes.sizeof(Options), budget, policy, 0)
        self.check(self.library.leasehold_plugin_set_options(ctypes.byref(options)))

    def address(self, name: str) -> int:
        """The address of a function of the library."""
        return ctypes.cast(getattr(self.library, name), ctypes.c_void_p).value or 0

    def check(self, status: int) -> None:
        if status != 0:
            raise InvalidStateError("leasehold: " + self.library.leasehold_last_error().decode())

    def device(self, ordinal: int, open: bool = False) -> Optional[ctypes.c_uint64]:
        """A device that was used, or is opened now."""
        found = ctypes.c_uint64()
        self.check(self.library.leasehold_plugin_get_device(ordinal, int(open), ctypes.byref(found)))
        return found if found.value else None

    def trim(self) -> None:
        for ordinal in range(torch.cuda.device_count()):
            device = self.device(ordinal)
            if device is not None:
                self.check(self.library.leasehold_device_synchronize(device))
                self.check(self.library.leasehold_trim(device, ctypes.c_uint64(0), None))

    def set_fraction(self, fraction: float, ordinal: int) -> None:
        """Bounds a device's memory by a part of it, and by the budget."""
        budget = self.budget
        if fraction < 1:
            part = max(int(fraction * int(torch.cuda.mem_get_info(ordinal)[1])), 1)
            budget = min(part, budget) if budget else part
        device = self.device(ordinal, open=True)
        self.check(self.library.leasehold_set_budget(device, ctypes.c_uint64(budget)))

    def raw(self, ordinal: int) -> Stats:
        stats = Stats(size=ctypes.sizeof(Stats))
        device = self.device(ordinal)
        if device is not None:
            self.check(self.library.leasehold_stats_get(device, ctypes.byref(stats)))
        return stats

    def reset_peaks(self, ordinal: int) -> None:
        device = self.device(ordinal)
        if device is not None:
            self.check(self.library.leasehold_stats_reset_peaks(device))

    def reset_accumulated(self, ordinal: int) -> None:
        now = self.base[ordinal] = self.raw(ordinal)
        reserved = self.reserved[ordinal] = Reserved()
        reserved.current = now.reserved_bytes

    def nested(self, ordinal: int) -> Dict[str, Any]:
        """The statistics as `torch.cuda.memory_stats_as_nested_dict` has them."""
        now, base = self.raw(ordinal), self.base.get(ordinal, Stats())
        seen = self.reserved.setdefault(ordinal, Reserved())
        seen.follow(now.reserved_bytes)

        def every(current: int, peak: int, allocated: int, freed: int) -> Dict[str, Dict[str, int]]:
            one = {"current": current, "peak": max(peak, current), "allocated": allocated,
                   "freed": freed}
            return {"all": one, "small_pool": dict.fromkeys(one, 0), "large_pool": dict(one)}

        blocks = every(now.blocks, now.blocks_peak, now.allocations - base.allocations,
                       now.frees - base.frees)
        held = every(now.allocated_bytes, now.allocated_bytes_peak,
                     now.allocated_bytes_total - base.allocated_bytes_total,
                     now.freed_bytes_total - base.freed_bytes_total)
        numbers = (now.reserved_bytes, now.reserved_bytes_peak, seen.allocated, seen.freed)
        granules = every(*((bytes + (2 << 20) - 1) >> 21 for bytes in numbers))
        unused = max(now.reserved_bytes - now.allocated_bytes, 0)
        return {
            "allocation": blocks, "active": blocks, "segment": granules,
            "inactive_split": every(0, 0, 0, 0),
            "allocated_bytes": held, "active_bytes": held, "requested_bytes": held,
            "reserved_bytes": every(*numbers),
            "inactive_split_bytes": every(unused, unused, unused, 0),
            "num_alloc_retries": now.retries - base.retries,
            "num_ooms": now.failures - base.failures,
            "num_sync_all_streams": now.host_waits - base.host_waits,
            "num_device_alloc": now.growths - base.growths,
            "num_device_free": 0,
            "max_split_size": -1,
            "oversize_allocations": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
            "oversize_segments": {"current": 0, "peak": 0, "allocated": 0, "freed": 0},
        }

    def snapshot(self, ordinal: int) -> str:
        text = ctypes.c_void_p()
        device = self.device(ordinal, open=True)
        self.check(self.library.leasehold_snapshot(device, ctypes.byref(text)))
        copy = ctypes.string_at(text.value or 0).decode()
        self.library.leasehold_text_free(text)
        return copy


_plugin: Optional[Plugin] = None


def installed() -> bool:
    """Whether the plug-in interface is on."""
    return _plugin is not None


def statistics(ordinal: int) -> Dict[str, int]:
    """Returns Leasehold's own numbers of a device."""
    assert _plugin is not None
    stats = _plugin.raw(ordinal)
    return {name: getattr(stats, name) for name in NUMBERS}


def snapshot(ordinal: int) -> str:
    """Returns the state of all memory of a device as JSON."""
    assert _plugin is not None
    return _plugin.snapshot(ordinal)


def _thrower() -> Optional[int]:
    """The address of PyTorch's function that throws a `RuntimeError` with a text."""
    library = os.path.join(os.path.dirname(torch.__file__), "lib", "libc10.so")
    try:
        function = ctypes.CDLL(library)._ZN3c106detail14torchCheckFailEPKcS2_jS2_
    except (OSError, AttributeError):
        return None
    return ctypes.cast(function, ctypes.c_void_p).value


def install(path: str, budget: int, policy: int) -> None:
    """Makes the plug-in PyTorch's allocator, and replaces the statistics of `torch.cuda`.

    Raises:
        RuntimeError: this PyTorch cannot be told of a failed allocation.
    """
    global _plugin
    plugin = Plugin(path, budget, policy)
    throw = _thrower()
    if throw is None:
        raise UnavailableError(
            "leasehold.torch: this PyTorch (%s) has no function that tells it of a failed "
            "allocation: install a C++ compiler for the extension" % torch.__version__
        )
    plugin.check(plugin.library.leasehold_plugin_set_raise(ctypes.c_void_p(throw)))
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        path, "leasehold_plugin_alloc", "leasehold_plugin_free"
    )
    trim = ctypes.CFUNCTYPE(None)(plugin.trim)
    fraction = ctypes.CFUNCTYPE(None, ctypes.c_double, ctypes.c_int)(plugin.set_fraction)
    plugin.keep += [trim, fraction, allocator]
    inner: Any = allocator.allocator()
    inner.set_record_stream_fn(plugin.address("leasehold_plugin_record_stream"))
    inner.set_begin_allocate_to_pool(plugin.address("leasehold_plugin_refuse_pool"))
    inner.set_reset_fn(ctypes.cast(trim, ctypes.c_void_p).value)
    inner.set_memory_fraction_fn(ctypes.cast(fraction, ctypes.c_void_p).value)
    torch.cuda.memory.change_current_allocator(allocator)

    def index(device: Any) -> int:
        return int(torch.cuda._utils._get_device_index(device, optional=True))

    def refuse(*_: Any, **__: Any) -> Any:
        raise UnsupportedError(
            "leasehold.torch: PyTorch's plug-in interface has no snapshots and no history: use "
            "leasehold.torch.snapshot(), or install a C++ compiler for the extension"
        )

    def refuse_capture(*_: Any, **__: Any) -> Any:
        # Before PyTorch prepares its generators and streams, which it would not undo.
        raise UnsupportedError(
            "leasehold.torch: PyTorch's plug-in interface has no private pools, which captured "
            "graphs need: install a C++ compiler for the extension"
        )

    names = {
        "memory_stats_as_nested_dict": lambda device=None: plugin.nested(index(device)),
        "reset_peak_memory_stats": lambda device=None: plugin.reset_peaks(index(device)),
        "reset_accumulated_memory_stats": lambda device=None: plugin.reset_accumulated(index(device)),
        "memory_snapshot": refuse,
        "_snapshot": refuse,
        "_record_memory_history": refuse,
    }
    for name, function in names.items():
        for module in (torch.cuda, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, function)
    setattr(torch.cuda.graphs.CUDAGraph, "capture_begin", refuse_capture)
    setattr(torch.cuda.graphs.graph, "__enter__", refuse_capture)
    _plugin = plugin
