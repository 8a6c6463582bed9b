"""Training steps in PyTorch with batches of changing length: step time and peak memory, by allocator.

    train.py gpt2|llama1b STEPS [liballocator.so | enable [POLICY [BUDGET]]]

With the path of libleasehold_capi.so, PyTorch's memory is Leasehold's, through CUDAPluggableAllocator. With `enable`, it is Leasehold's
through the extension of the package `leasehold`, with at most BUDGET bytes of the device. Without either, it is PyTorch's own, as PYTORCH_CUDA_ALLOC_CONF chooses. The first ten steps are outside the time. Needs PyTorch and transformers.
"""

import ctypes
import os
import random
import sys
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

NAMES = """allocated allocated_peak allocated_total freed_total blocks blocks_peak allocations frees reserved reserved_peak budget
free_ready free_pending free_cached unmapped retries failures growths remaps host_waits stream_waits driver_calls pools metadata""".split()


class Stats(ctypes.Structure):
    """leasehold_stats of leasehold.h."""

    _fields_ = [("size", ctypes.c_size_t)] + [(name, ctypes.c_uint64) for name in NAMES]


class Leasehold:
    """Leasehold as PyTorch's allocator. Made before the first use of CUDA."""

    def __init__(self, path):
        self.lib, self.device = ctypes.CDLL(path), ctypes.c_uint64()
        self.lib.leasehold_last_error.restype = ctypes.c_char_p
        self.check(self.lib.leasehold_device_open(b"cuda:0", None, ctypes.byref(self.device)))
        self.check(self.lib.leasehold_plugin_set_device(0, self.device))
        plugin = torch.cuda.memory.CUDAPluggableAllocator(path, "leasehold_plugin_alloc", "leasehold_plugin_free")
        record = ctypes.cast(self.lib.leasehold_plugin_record_stream, ctypes.c_void_p).value
        plugin.allocator().set_record_stream_fn(record)
        torch.cuda.memory.change_current_allocator(plugin)

    def check(self, status):
        if status != 0:
            raise RuntimeError(self.lib.leasehold_last_error().decode())

    def stats(self):
        stats = Stats(size=ctypes.sizeof(Stats))
        self.check(self.lib.leasehold_stats_get(self.device, ctypes.byref(stats)))
        return stats


def model_of(name):
    """The model, its vocabulary, and a function that draws the sizes of a batch."""
    if name == "gpt2":
        sizes = lambda: (random.choice([4, 8, 12, 16]), random.randrange(128, 1024))
        return GPT2LMHeadModel(GPT2Config(n_positions=2048)), 50257, sizes
    config = LlamaConfig(
        vocab_size=32000,
        hidden_size=2048,
        intermediate_size=8192,
        num_hidden_layers=16,
        num_attention_heads=32,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=4096,
    )
    return LlamaForCausalLM(config), 32000, lambda: (random.choice([1, 2, 4]), random.randrange(256, 3000))


def main():
    name, steps = sys.argv[1], int(sys.argv[2])
    leasehold, policy = None, sys.argv[4] if len(sys.argv) > 4 else "balanced"
    budget = int(sys.argv[5]) if len(sys.argv) > 5 else None
    extension = sys.argv[3:4] == ["enable"]
    if extension:
        import leasehold.torch as package

        package.enable(policy=policy, budget=budget)
    elif len(sys.argv) > 3:
        leasehold = Leasehold(os.path.abspath(sys.argv[3]))
    torch.manual_seed(0)
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    model, vocabulary, sizes = model_of(name)
    model = model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    lowest, times, loss, losses = torch.cuda.mem_get_info()[0], [], None, []
    for _ in range(steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        x = torch.randint(0, vocabulary, sizes(), device="cuda")
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        loss = loss.item()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        losses.append(loss)
        lowest = min(lowest, torch.cuda.mem_get_info()[0])
    times = times[10:]
    if leasehold:
        stats = leasehold.stats()
        allocator, allocated, reserved = "leasehold", stats.allocated_peak, stats.reserved_peak
    else:
        native = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native"
        allocator = "leasehold.torch, " + policy if extension else native
        allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    used = torch.cuda.get_device_properties(0).total_memory - lowest
    median = sorted(times)[len(times) // 2] if times else 0.0
    print(
        f"{name} {allocator}: step {1e3 * sum(times) / max(len(times), 1):.1f} ms on average, {1e3 * median:.1f} the median, allocated {allocated / 2**30:.2f} GiB ({allocated} bytes), "
        f"reserved {reserved / 2**30:.2f} ({reserved / allocated:.3f}), device used {used / 2**30:.2f} GiB, loss {loss:.6f}, "
        f"all losses {sum(losses):.6f}",
        flush=True,
    )
    if extension:
        print(package.statistics(0))
    if leasehold:
        print({key: getattr(stats, key) for key in ("allocations", "driver_calls", "host_waits", "growths", "remaps", "failures")})


if __name__ == "__main__":
    main()
