"""The allocator through PyTorch's plug-in interface, where no extension can be built.

PyTorch asks a plug-in for memory and nothing else, so the statistics of `torch.cuda` are replaced
by functions here. A failed allocation cannot be told: PyTorch uses the null pointer.
"""

import ctypes
from typing import Any, Dict, List, Optional

import torch

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


class Plugin:
    """The functions of the library, and the devices."""

    def __init__(self, path: str, budget: int, policy: int, device_name: str = "cuda:%d") -> None:
        self.path = path
        self.library = ctypes.CDLL(path)
        self.library.leasehold_last_error.restype = ctypes.c_char_p
        self.options = Options(ctypes.sizeof(Options), budget, policy, 0)
        self.device_name = device_name
        self.devices: Dict[int, ctypes.c_uint64] = {}
        self.base: Dict[int, Stats] = {}
        self.keep: List[Any] = []

    def check(self, status: int) -> None:
        if status != 0:
            raise RuntimeError("leasehold: " + self.library.leasehold_last_error().decode())

    def open(self, ordinal: int) -> None:
        device = ctypes.c_uint64()
        name = (self.device_name % ordinal).encode()
        library = self.library
        self.check(library.leasehold_device_open(name, ctypes.byref(self.options), ctypes.byref(device)))
        self.check(library.leasehold_plugin_set_device(ordinal, device))
        self.devices[ordinal] = device

    def trim(self) -> None:
        for device in self.devices.values():
            self.library.leasehold_device_synchronize(device)
            self.library.leasehold_trim(device, ctypes.c_uint64(0), None)

    def raw(self, ordinal: int) -> Stats:
        stats = Stats(size=ctypes.sizeof(Stats))
        if ordinal in self.devices:
            self.check(self.library.leasehold_stats_get(self.devices[ordinal], ctypes.byref(stats)))
        return stats

    def nested(self, ordinal: int) -> Dict[str, Any]:
        """The statistics as `torch.cuda.memory_stats_as_nested_dict` has them."""
        now, base = self.raw(ordinal), self.base.get(ordinal, Stats())

        def every(current: int, peak: int, allocated: int) -> Dict[str, Dict[str, int]]:
            one = {"current": current, "peak": max(peak, current), "allocated": allocated,
                   "freed": allocated - current}
            none = dict.fromkeys(one, 0)
            return {"all": one, "small_pool": none, "large_pool": dict(one)}

        blocks = every(now.blocks, now.blocks_peak, now.allocations - base.allocations)
        held = every(now.allocated_bytes, now.allocated_bytes_peak,
                     now.allocated_bytes_total - base.allocated_bytes_total)
        reserved = every(now.reserved_bytes, now.reserved_bytes_peak, now.reserved_bytes_peak)
        granules = every(*(value >> 21 for value in
                           (now.reserved_bytes, now.reserved_bytes_peak, now.reserved_bytes_peak)))
        unused = max(now.reserved_bytes - now.allocated_bytes, 0)
        return {
            "allocation": blocks, "active": blocks, "segment": granules,
            "inactive_split": every(0, 0, 0),
            "allocated_bytes": held, "active_bytes": held, "requested_bytes": held,
            "reserved_bytes": reserved, "inactive_split_bytes": every(unused, unused, unused),
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
        self.check(self.library.leasehold_snapshot(self.devices[ordinal], ctypes.byref(text)))
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


def install(path: str, budget: int, policy: int) -> None:
    """Makes the plug-in PyTorch's allocator, and replaces the statistics of `torch.cuda`."""
    global _plugin
    plugin = Plugin(path, budget, policy)
    allocator = torch.cuda.memory.CUDAPluggableAllocator(
        path, "leasehold_plugin_alloc", "leasehold_plugin_free"
    )
    inner: Any = allocator.allocator()
    trim = ctypes.CFUNCTYPE(None)(plugin.trim)
    plugin.keep += [trim, allocator]
    inner.set_record_stream_fn(ctypes.cast(plugin.library.leasehold_plugin_record_stream, ctypes.c_void_p).value)
    inner.set_reset_fn(ctypes.cast(trim, ctypes.c_void_p).value)
    torch.cuda.memory.change_current_allocator(allocator)
    for ordinal in range(torch.cuda.device_count()):
        plugin.open(ordinal)

    def index(device: Any) -> int:
        return int(torch.cuda._utils._get_device_index(device, optional=True))

    def stats(device: Any = None) -> Dict[str, Any]:
        return plugin.nested(index(device))

    def reset_peaks(device: Any = None) -> None:
        plugin.check(plugin.library.leasehold_stats_reset_peaks(plugin.devices[index(device)]))

    def reset_accumulated(device: Any = None) -> None:
        plugin.base[index(device)] = plugin.raw(index(device))

    def refuse(*_: Any, **__: Any) -> Any:
        raise RuntimeError(
            "leasehold.torch: PyTorch's plug-in interface has no snapshots and no history: use "
            "leasehold.torch.snapshot(), or install a C++ compiler for the extension"
        )

    names = {
        "memory_stats_as_nested_dict": stats,
        "reset_peak_memory_stats": reset_peaks,
        "reset_accumulated_memory_stats": reset_accumulated,
        "memory_snapshot": refuse,
        "_snapshot": refuse,
        "_record_memory_history": refuse,
    }
    for name, function in names.items():
        for module in (torch.cuda, torch.cuda.memory):
            if hasattr(module, name):
                setattr(module, name, function)
    _plugin = plugin
