"""The largest batch that fits into a part of the device, by allocator.

    fit.py [--gib N] [--steps N] [ALLOCATOR ...]      default: 20 GiB, 10 steps, all allocators

Each allocator has a process of its own, which looks for the largest batch of GPT-2 small by bisection: training steps with sequences of
changing length (512 to 1,023 tokens), a new model for each size. Needs PyTorch and transformers.
"""

import gc
import os
import random
import subprocess
import sys

ALLOCATORS = {
    "native": "",
    "expandable": "expandable_segments:True",
    "cudaMallocAsync": "backend:cudaMallocAsync",
    "leasehold": "",
    "leasehold, compact": "",
}


def fits(torch, batch, steps):
    from transformers import GPT2Config, GPT2LMHeadModel

    torch.manual_seed(0)
    random.seed(0)
    model = GPT2LMHeadModel(GPT2Config(n_positions=1024)).to("cuda", torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4, foreach=True)
    for _ in range(steps):
        x = torch.randint(0, 50257, (batch, random.randrange(512, 1024)), device="cuda")
        model(input_ids=x, labels=x).loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
    torch.cuda.synchronize()


def child(name, gib, steps):
    import torch

    if name.startswith("leasehold"):
        import leasehold.torch

        leasehold.torch.enable(policy="compact" if "compact" in name else "balanced", budget=f"{gib}GiB")
    else:
        total = torch.cuda.get_device_properties(0).total_memory
        torch.cuda.set_per_process_memory_fraction(gib * 2**30 / total)
    good, bad = 0, 129
    while bad - good > 1:
        batch, failed = (good + bad) // 2 if good else 8, False
        try:
            fits(torch, batch, steps)
        except torch.OutOfMemoryError:
            failed = True
        # What the steps held goes with their frame.
        gc.collect()
        torch.cuda.empty_cache()
        good, bad = (good, batch) if failed else (batch, bad)
        if not good:
            break
    torch.cuda.reset_peak_memory_stats()
    fits(torch, good, steps)
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    print(f"{name}: largest batch {good} in {gib} GiB, allocated {allocated / 2**30:.2f}, reserved {reserved / 2**30:.2f} GiB", flush=True)


def main():
    arguments, options = sys.argv[1:], {"--gib": 20, "--steps": 10}
    if arguments[:1] == ["--child"]:
        return child(arguments[1], int(arguments[2]), int(arguments[3]))
    while arguments and arguments[0] in options:
        options[arguments[0]] = int(arguments[1])
        arguments = arguments[2:]
    for name in arguments or ALLOCATORS:
        command = [sys.executable, os.path.abspath(__file__), "--child", name, str(options["--gib"]), str(options["--steps"])]
        environment = {**os.environ, "PYTORCH_CUDA_ALLOC_CONF": ALLOCATORS[name]}
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        print(done.stdout.strip() or f"FAIL {name}: status {done.returncode}: {done.stderr[-1500:]}", flush=True)


if __name__ == "__main__":
    main()
