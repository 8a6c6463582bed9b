"""train.py with PyTorch's own allocator and with leasehold.torch, in turns, one process after the other.

    enable.py [--seconds N] [--steps N] [gpt2] [llama1b]

Begins no run that would end after N seconds (100), by what the slowest took so far. Native and Leasehold's runs are interleaved,
since the host may be shared. The last runs have a budget of 1.05 times the most that the program had allocated.
"""

import os
import re
import subprocess
import sys
import time


def main():
    arguments, seconds, steps = sys.argv[1:], 100.0, 40
    while arguments and arguments[0].startswith("--"):
        name, value = arguments.pop(0), arguments.pop(0)
        if name == "--seconds":
            seconds = float(value)
        else:
            steps = int(value)
    models = arguments or ["gpt2", "llama1b"]
    train = os.path.join(os.path.dirname(os.path.abspath(__file__)), "train.py")
    native, ours, compact = [], ["enable"], ["enable", "compact"]
    expandable = {"PYTORCH_CUDA_ALLOC_CONF": "expandable_segments:True"}
    turns = [(m, a, {}) for m in models for a in (native, ours)]
    turns += [(m, a, {}) for m in models for a in (ours, native)]
    asynchronous = {"PYTORCH_CUDA_ALLOC_CONF": "backend:cudaMallocAsync"}
    turns += [(m, native, expandable) for m in models] + [(m, compact, {}) for m in models]
    turns += [(m, native, asynchronous) for m in models] + [(m, None, {}) for m in models]
    start, slowest, most = time.monotonic(), 0.0, {}
    for model, allocator, environment in turns:
        if allocator is None:
            allocator = [*ours, "balanced", str(int(1.05 * most.get(model, 0)))]
            print(f"with a budget of {int(allocator[-1]) / 2**30:.2f} GiB:", flush=True)
        begun = time.monotonic()
        left = seconds - (begun - start)
        if left < slowest * 1.1:
            print(f"left out: {model} {allocator} {environment}", flush=True)
            continue
        command = [sys.executable, train, model, str(steps), *allocator]
        try:
            done = subprocess.run(command, env={**os.environ, **environment}, timeout=left, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
            print(done.stdout.strip(), flush=True)
            if allocator == ours and (found := re.search(r"\((\d+) bytes\)", done.stdout)):
                most[model] = max(most.get(model, 0), int(found.group(1)))
            if done.returncode != 0:
                print(f"FAIL {model} {allocator}: status {done.returncode}: {done.stderr[-1500:]}", flush=True)
        except subprocess.TimeoutExpired:
            print(f"FAIL {model} {allocator}: longer than {left:.0f} s", flush=True)
        slowest = max(slowest, time.monotonic() - begun)
        print(f"at {time.monotonic() - start:.0f} s", flush=True)


if __name__ == "__main__":
    main()
