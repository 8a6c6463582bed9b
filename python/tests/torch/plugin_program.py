"""A program over the plug-in interface, with the stand-in for PyTorch and a simulated device.

    plugin_program.py LIBRARY
"""

import ctypes
import sys

import torch

library = ctypes.CDLL(sys.argv[1])
MIB = 1 << 20


def check(status):
    assert status == 0, library.leasehold_last_error()


def refused(function, *arguments):
    try:
        function(*arguments)
    except RuntimeError as error:
        return str(error)
    raise AssertionError("no error")


library.leasehold_last_error.restype = ctypes.c_char_p
device, stream = ctypes.c_uint64(), ctypes.c_size_t()
check(library.leasehold_device_open(b"sim-cuda:0", None, ctypes.byref(device)))
check(library.leasehold_set_budget(device, ctypes.c_uint64(64 * MIB)))
check(library.leasehold_plugin_set_device(0, device))
check(library.leasehold_sim_stream(device, 0, ctypes.byref(stream)))

import leasehold.torch as lt  # noqa: E402

lt.enable(budget="64MiB", plugin=True)
memory = torch.cuda.memory


def now(name, part="current"):
    return torch.cuda.memory_stats_as_nested_dict(0)[name]["all"][part]


# The statistics follow the blocks, and begin anew after a reset.
blocks = [memory.malloc(size, stream.value) for size in (1000, 3 * MIB, 20 * MIB)]
assert now("allocation") == 3 and now("allocated_bytes") == 1000 + 23 * MIB
assert now("reserved_bytes") >= now("allocated_bytes")
assert now("segment") == now("reserved_bytes") // (2 * MIB)
torch.cuda.reset_accumulated_memory_stats(0)
for name in ("allocation", "allocated_bytes", "reserved_bytes"):
    assert (now(name, "allocated"), now(name, "freed")) == (0, 0), name
memory.free(blocks.pop(), 20 * MIB, stream.value)
assert (now("allocated_bytes", "freed"), now("allocation", "freed")) == (20 * MIB, 1)
assert now("allocated_bytes", "peak") == 1000 + 23 * MIB
torch.cuda.reset_peak_memory_stats(0)
assert now("allocated_bytes", "peak") == 1000 + 3 * MIB

# A failed allocation is an error with a report, and the next one works.
for _ in range(3):
    text = refused(memory.malloc, 65 * MIB, stream.value)
    assert text.startswith("CUDA out of memory. "), text
assert torch.cuda.memory_stats_as_nested_dict(0)["num_ooms"] == 3
blocks.append(memory.malloc(20 * MIB, stream.value))

# What the interface does not have is refused.
graphs = torch.cuda.graphs
for function in (memory.begin_pool, graphs.CUDAGraph().capture_begin, graphs.graph().__enter__):
    assert "private pools" in refused(function), function
for name in ("memory_snapshot", "_record_memory_history"):
    assert "no snapshots" in refused(getattr(memory, name)), name
assert "regions need the extension" in refused(lt.region("weights").__enter__)
assert '"pools"' in lt.snapshot(0) and lt.statistics(0)["blocks"] == 3

# A part of the device bounds the memory, and the budget stays.
memory.set_per_process_memory_fraction(0.03)
assert lt.statistics(0)["budget_bytes"] == int(0.03 * (1 << 30))
assert "CUDA out of memory" in refused(memory.malloc, 31 * MIB, stream.value)
memory.set_per_process_memory_fraction(1.0)
assert lt.statistics(0)["budget_bytes"] == 64 * MIB

for block, size in zip(blocks, (1000, 3 * MIB, 20 * MIB)):
    memory.free(block, size, stream.value)
memory.empty_cache()
assert now("reserved_bytes") == 0 and now("reserved_bytes", "freed") > 0
check(library.leasehold_plugin_set_raise(None))
check(library.leasehold_plugin_set_device(0, ctypes.c_uint64(0)))
check(library.leasehold_stream_end(device, stream))
check(library.leasehold_device_close(device))
print("ok")
