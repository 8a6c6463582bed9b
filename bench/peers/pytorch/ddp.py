"""A step of DistributedDataParallel on all devices over NCCL, with PyTorch's own allocator and with Leasehold's.

    ddp.py [--steps N]

The gradients of both are compared bit by bit. Needs PyTorch and two devices or more.
"""

import os
import subprocess
import sys
import tempfile


def child(allocator, steps, rank, world, file):
    import torch
    import torch.distributed as dist

    if allocator == "leasehold":
        import leasehold.torch

        leasehold.torch.enable()
    torch.cuda.set_device(rank)
    dist.init_process_group("nccl", init_method="file://" + file, rank=rank, world_size=world, device_id=torch.device("cuda", rank))
    torch.manual_seed(0)
    torch.use_deterministic_algorithms(True)
    layers = [m for _ in range(4) for m in (torch.nn.Linear(2048, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, 2048))]
    model = torch.nn.parallel.DistributedDataParallel(torch.nn.Sequential(*layers).cuda(), device_ids=[rank])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    torch.manual_seed(rank + 1)
    for step in range(steps):
        x = torch.randn(64 + 16 * (step % 5), 2048, device="cuda")
        model(x).square().mean().backward()
        optimizer.step()
        total = sum(p.grad.double().abs().sum() for p in model.parameters()).item()
        optimizer.zero_grad(set_to_none=True)
    weights = sum(p.double().abs().sum() for p in model.parameters()).item()
    ratio = torch.cuda.max_memory_reserved() / torch.cuda.max_memory_allocated()
    print(f"rank {rank} {allocator}: gradients {total!r} weights {weights!r} reserved by allocated {ratio:.3f}", flush=True)
    dist.destroy_process_group()


def run(allocator, steps, world):
    with tempfile.TemporaryDirectory() as folder:
        file = os.path.join(folder, "meeting")
        command = [sys.executable, os.path.abspath(__file__), "--child", allocator, str(steps)]
        ranks = [
            subprocess.Popen([*command, str(rank), str(world), file], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
            for rank in range(world)
        ]
        outputs = [rank.communicate(timeout=120)[0] for rank in ranks]
    lines = [[line for line in output.splitlines() if line.startswith("rank ")] for output in outputs]
    if any(rank.returncode != 0 for rank in ranks) or not all(lines):
        print("\n".join(output[-1500:] for output in outputs))
        sys.exit(1)
    for line in lines:
        print(line[-1], flush=True)
    return [line[-1].split(": ")[1].split(" reserved")[0] for line in lines]


def main():
    if sys.argv[1:2] == ["--child"]:
        return child(sys.argv[2], int(sys.argv[3]), int(sys.argv[4]), int(sys.argv[5]), sys.argv[6])
    steps = int(sys.argv[2]) if sys.argv[1:2] == ["--steps"] else 10
    import torch

    world = torch.cuda.device_count()
    native, again, ours = (run(allocator, steps, world) for allocator in ("native", "native", "leasehold"))
    print(f"{world} devices, {steps} steps: native {'repeats' if native == again else 'DOES NOT REPEAT'} itself, "
          f"leasehold {'is equal' if native == ours else 'DIFFERS'}")
    return native != ours


if __name__ == "__main__":
    sys.exit(main())
