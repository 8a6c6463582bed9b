"""Training steps in PyTorch with batches of changing length: step time and peak memory, as a line of JSON.

    train.py gpt2|llama1b STEPS [--policy P [--budget BYTES] [--plugin]] [--kernels]

With a policy, PyTorch's memory is Leasehold's, through the extension or through PyTorch's plug-in interface. Without one it is PyTorch's
own, as PYTORCH_CUDA_ALLOC_CONF chooses. The first ten steps are outside the time. With --kernels, four more steps show how long the
device works in a step. Needs PyTorch and transformers.
"""

import argparse
import json
import os
import random
import time

import torch
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

WARM = 10


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


def kernels(step, count):
    """Milliseconds of device work in a step."""
    random.seed(1)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profile:
        for _ in range(count):
            step()
    on_device = (e for e in profile.events() if e.device_type == torch.autograd.DeviceType.CUDA)
    return sum(e.time_range.elapsed_us() for e in on_device) / count / 1e3


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", choices=["gpt2", "llama1b"])
    parser.add_argument("steps", type=int)
    parser.add_argument("--policy", choices=["balanced", "fastest", "compact"])
    parser.add_argument("--budget", type=int)
    parser.add_argument("--plugin", action="store_true")
    parser.add_argument("--kernels", action="store_true")
    options = parser.parse_args()
    if options.steps <= WARM or not options.policy and (options.budget or options.plugin):
        parser.error(f"more than {WARM} steps, and a policy for Leasehold's options")
    allocator = os.environ.get("PYTORCH_CUDA_ALLOC_CONF") or "native"
    if options.policy:
        import leasehold.torch

        leasehold.torch.enable(policy=options.policy, budget=options.budget, plugin=options.plugin)
        allocator = f"leasehold, {options.policy}" + (", plug-in" if options.plugin else "")
    torch.manual_seed(0)
    random.seed(0)
    torch.set_float32_matmul_precision("high")
    # On the device: a processor takes 20 s for the numbers of the larger model.
    torch.set_default_dtype(torch.bfloat16)
    with torch.device("cuda"):
        model, vocabulary, sizes = model_of(options.model)
    torch.set_default_dtype(torch.float32)
    model = model.to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    lowest, times, losses = torch.cuda.mem_get_info()[0], [], []

    def step():
        x = torch.randint(0, vocabulary, sizes(), device="cuda")
        loss = model(input_ids=x, labels=x).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.item()

    for _ in range(options.steps):
        torch.cuda.synchronize()
        start = time.perf_counter()
        losses.append(step())
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
        lowest = min(lowest, torch.cuda.mem_get_info()[0])
    times = times[WARM:]
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    line = {
        "model": options.model,
        "allocator": allocator,
        "budget": options.budget,
        "device": torch.cuda.get_device_name(0),
        "steps": options.steps,
        "step_ms_mean": 1e3 * sum(times) / len(times),
        "step_ms_median": 1e3 * sorted(times)[len(times) // 2],
        "step_ms": [round(1e3 * t, 2) for t in times],
        "allocated": allocated,
        "reserved": reserved,
        "device_used": torch.cuda.get_device_properties(0).total_memory - lowest,
        "loss": losses[-1],
        "losses": sum(losses),
    }
    if options.kernels:
        line["kernels_ms"] = kernels(step, 4)
    if options.policy:
        line["leasehold"] = leasehold.torch.statistics(0)
    print(json.dumps(line), flush=True)


if __name__ == "__main__":
    main()
