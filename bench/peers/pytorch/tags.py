"""Memory that sleeps by tag, on a GPU: `leasehold.torch.sleep` under PyTorch's own allocator and under Leasehold's.

    tags.py [--enable]

Weights that are kept, a cache that is dropped and a captured graph sleep and wake, also while memory is short. Prints a
line for each check. Needs PyTorch with CUDA, and the package `leasehold` on the path.
"""

import gc
import sys

import torch

import leasehold.torch

if "--enable" in sys.argv:
    leasehold.torch.enable(plugin=False)

from leasehold.torch.sleep import Backend, allocator, memory_saver  # noqa: E402

MIB = 1 << 20


def free():
    torch.cuda.synchronize()
    return torch.cuda.mem_get_info()[0]


def check(text, condition):
    print("%s: %s" % ("ok" if condition else "FAILED", text), flush=True)
    if not condition:
        raise SystemExit(1)


def saver():
    with memory_saver.region("weights", enable_cpu_backup=True):
        weights = torch.arange(256 * MIB, device="cuda", dtype=torch.int32).view(16384, -1)
    with memory_saver.region("cache"):
        cache = torch.zeros(2048 * MIB, device="cuda", dtype=torch.uint8)
    x = torch.full((1024, 1024), 0.5, device="cuda")
    side = torch.cuda.Stream()
    with torch.cuda.stream(side):
        (x @ x).sum().item()
    graph = torch.cuda.CUDAGraph()
    with memory_saver.cuda_graph(graph, tag="graphs"):
        y = ((x @ x) + weights[0, 0]).repeat(64, 1)
    graph.replay()
    first = y.clone()
    addresses = [t.data_ptr() for t in (weights, cache, y)]
    gc.collect()
    torch.cuda.empty_cache()
    base, levels = free(), []
    for cycle in range(10):
        memory_saver.pause()
        memory_saver.pause()
        asleep = free()
        memory_saver.resume()
        cache.fill_(cycle)
        graph.replay()
        same = bool((weights.view(-1)[:: 1 << 16] == torch.arange(0, 256 * MIB, 1 << 16, device="cuda")).all())
        if not (same and torch.equal(y, first)):
            check("contents of cycle %d" % cycle, False)
        torch.cuda.empty_cache()
        levels.append((asleep - base, free() - base))
    given, back = levels[-1]
    grown = levels[1][1] - back
    check("%d MiB given back; the last eight of ten cycles take %d MiB more" % (given // MIB, grown // MIB),
          given > 3200 * MIB and grown <= 2 * MIB)
    check("the graph's memory sleeps too, and it replays the same bits after each cycle", torch.equal(y, first))
    check("addresses are the same", addresses == [t.data_ptr() for t in (weights, cache, y)])
    # Memory is short: what was woken sleeps again, and nothing is lost.
    memory_saver.pause()
    guest = torch.empty(free() - 1536 * MIB, device="cuda", dtype=torch.uint8)
    left = free()
    try:
        memory_saver.resume()
        check("a wake without room fails", False)
    except torch.OutOfMemoryError as error:
        check("a wake without room fails: %s" % str(error).split("\n")[0][:90], True)
    # The memory that PyTorch's allocator had cached is free too.
    check("all of it sleeps again", free() >= left - 2 * MIB)
    del guest
    torch.cuda.empty_cache()
    memory_saver.resume()
    graph.replay()
    whole = bool((weights.view(-1) == torch.arange(256 * MIB, device="cuda", dtype=torch.int32)).all())
    check("every weight is there", whole and torch.equal(y, first))


def vllm():
    backend = Backend()
    check("supported", Backend.is_supported() and allocator.get_current_usage() == 0)
    with allocator.use_memory_pool(tag="weights"):
        weights = torch.arange(64 * MIB, device="cuda", dtype=torch.int32)
    with allocator.use_memory_pool(tag="kv_cache"):
        cache = torch.ones(1024 * MIB, device="cuda", dtype=torch.uint8)
    usage, base = allocator.get_current_usage(), free()
    check("usage: %d MiB" % (usage // MIB), 1280 * MIB <= usage < 1400 * MIB)
    backend.suspend(1)
    check("level 1 gives %d MiB back" % ((free() - base) // MIB), free() - base >= 1280 * MIB)
    backend.resume(["weights"])
    check("weights alone", backend.state() == "SUSPENDED" and int(weights[12345].item()) == 12345)
    backend.resume(["kv_cache"])
    cache.fill_(3)
    check("running", backend.state() == "RUNNING" and int(cache[-1].item()) == 3)
    backend.suspend(2)
    backend.resume()
    weights.fill_(1)
    check("level 2", backend.state() == "RUNNING" and abs(free() - base) < 64 * MIB)


print("PyTorch %s, %s, %s" % (torch.__version__, torch.cuda.get_device_name(), "enabled" if leasehold.torch.enabled() else "PyTorch's allocator"))
saver()
vllm()
