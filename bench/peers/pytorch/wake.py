"""A region sleeps and wakes in a loop, while the rest of the device is full.

    wake.py [--rounds N] [--share S] [--budget B] native|balanced|compact

Each round: the region's memory goes, others fill the device, and free what they had without returning it; the region wakes up at the
same addresses with its contents. Then it wakes up while others hold the device: that is an error, after which nothing is lost. The
region has the share S of the device (default: 0.3). `native` is PyTorch's own allocator, the others are Leasehold's policies.
"""

import argparse
import json
import random
import time

import torch

import leasehold.torch as lt

MIB = 1 << 20


def fill_device():
    """Tensors of changing sizes until the device or the budget has no more."""
    held, sizes = [], [size * MIB for size in (3, 40, 200, 700, 1500)]
    while sizes:
        try:
            held.append(torch.full((random.choice(sizes),), 7, dtype=torch.uint8, device="cuda"))
        except torch.OutOfMemoryError:
            sizes.pop()
    return held


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("allocator", choices=["native", "balanced", "compact"])
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--share", type=float, default=0.3)
    parser.add_argument("--budget")
    options = parser.parse_args()
    random.seed(0)
    if options.allocator != "native":
        lt.enable(policy=options.allocator, budget=options.budget)
    total = lt._bytes(options.budget) if options.budget else torch.cuda.mem_get_info()[1]
    count = int(total * options.share) // (64 * MIB)
    with lt.region("weights"):
        weights = [torch.full((16 * MIB,), i, dtype=torch.int32, device="cuda") for i in range(count)]
    at = [t.data_ptr() for t in weights]

    def check():
        assert [t.data_ptr() for t in weights] == at
        bad = [i for i, t in enumerate(weights) if not bool((t == i).all())]
        assert not bad, bad

    slept, woke, most = [], [], 0
    for turn in range(options.rounds):
        begin = time.perf_counter()
        lt.suspend("weights")
        slept.append(time.perf_counter() - begin)
        others = fill_device()
        most = max(most, sum(t.nbytes for t in others))
        if turn % 2 == 0:
            torch.cuda.synchronize()
        del others
        begin = time.perf_counter()
        lt.resume("weights")
        woke.append(time.perf_counter() - begin)
        check()
    lt.suspend("weights")
    others = fill_device()
    try:
        lt.resume("weights")
        raise AssertionError("it woke up without memory")
    except torch.OutOfMemoryError as error:
        refused = str(error)
    # The comparison takes memory.
    del others[:16]
    assert all(bool((t == 7).all()) for t in others[-8:])
    del others
    lt.resume("weights")
    check()
    middle = len(slept) // 2
    print(json.dumps({
        "allocator": options.allocator, "budget": options.budget, "rounds": options.rounds, "region": 64 * MIB * count, "others": most,
        "suspend_s": round(sorted(slept)[middle], 3), "resume_s": round(sorted(woke)[middle], 3), "refused": refused[:200],
    }))


if __name__ == "__main__":
    main()
