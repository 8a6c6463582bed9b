"""PyTorch's features over Leasehold's allocator: one line for each.

    check.py --list | [--seconds N] [FEATURE ...]

Each feature runs in a process of its own, with a time limit, so that the failure of one leaves the others. Needs
PyTorch with CUDA, and the package `leasehold` on the path.
"""

import gc
import importlib.util
import json
import os
import random
import subprocess
import sys
import time

HERE = os.path.dirname(os.path.abspath(__file__))
MIB = 1 << 20
GIB = 1 << 30


def expect(condition, text):
    if not condition:
        raise AssertionError(text)


def statistics(torch, lt):
    before = torch.cuda.memory_allocated()
    x = torch.ones(64 * MIB, device="cuda", dtype=torch.uint8)
    expect(torch.cuda.memory_allocated() - before == 64 * MIB, "memory_allocated")
    expect(torch.cuda.memory_reserved() >= 64 * MIB, "memory_reserved")
    del x
    expect(torch.cuda.memory_allocated() == before, "memory_allocated after a free")
    expect(torch.cuda.max_memory_allocated() >= 64 * MIB, "max_memory_allocated")
    torch.cuda.reset_peak_memory_stats()
    expect(torch.cuda.max_memory_allocated() < 64 * MIB, "reset_peak_memory_stats")
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    expect(torch.cuda.memory_reserved() < 64 * MIB, "empty_cache left %d" % torch.cuda.memory_reserved())
    stats = torch.cuda.memory_stats()
    torch.cuda.reset_accumulated_memory_stats()
    try:
        accelerator = torch.accelerator.memory_allocated() if hasattr(torch.accelerator, "memory_allocated") else "absent"
    except RuntimeError as error:
        accelerator = str(error).splitlines()[0][:60]
    return f"{len(stats)} numbers, backend {torch.cuda.get_allocator_backend()}, torch.accelerator: {accelerator}"


def snapshot(torch, lt):
    torch.cuda.memory._record_memory_history(max_entries=1000)
    x = [torch.ones(3 * MIB + i, device="cuda", dtype=torch.uint8) for i in range(5)]
    found = torch.cuda.memory._snapshot()
    live = [b for s in found["segments"] for b in s["blocks"] if b["state"] == "active_allocated"]
    expect(len(live) >= 5, "%d live blocks" % len(live))
    framed = sum(1 for b in live if b.get("frames"))
    expect(framed >= 5, "%d blocks with frames" % framed)
    sizes = all(sum(b["size"] for b in s["blocks"]) == s["total_size"] for s in found["segments"])
    expect(sizes, "the blocks of a segment do not fill it")
    events = found["device_traces"][0]
    mapped = sum(e["size"] for e in events if e["action"] == "segment_map")
    expect(mapped == sum(s["total_size"] for s in found["segments"]), f"the history tells of {mapped} bytes of segments")
    # The viewer plays the history backwards, to a time without memory.
    spec = importlib.util.spec_from_file_location("memory_viz", os.path.join(HERE, "..", "..", "..", "ci", "memory_viz.py"))
    viewer = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(viewer)
    viewer.play_backwards({"segments": found["segments"], "allocator_settings": {"events_lost": 0}}, events)
    path = os.path.join(os.environ.get("OUT", "."), "snapshot.pickle")
    torch.cuda.memory._dump_snapshot(path)
    torch.cuda.memory._record_memory_history(enabled=None)
    del x
    return f"{len(found['segments'])} segments of {mapped >> 20} MiB, {len(events)} events, {framed} blocks with frames"


def summary(torch, lt):
    x = torch.ones(MIB, device="cuda")
    text = torch.cuda.memory_summary()
    expect("Allocated memory" in text, text[:200])
    del x
    return f"{len(text)} characters; leasehold: {len(lt.snapshot())} of JSON"


def record_stream(torch, lt):
    side, wrong = torch.cuda.Stream(), 0
    slow = torch.randn(3000, 3000, device="cuda")
    for i in range(20):
        x = torch.full((8 * MIB,), float(i), device="cuda")
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            for _ in range(10):
                slow @ slow
            total = x.sum()
        x.record_stream(side)
        del x
        y = torch.full((8 * MIB,), -1.0, device="cuda")
        torch.cuda.synchronize()
        wrong += total.item() != i * 8 * MIB
        del y
    expect(wrong == 0, f"{wrong} sums are wrong")
    return "20 blocks in use by another stream while they were freed"


def graph(torch, lt):
    x = torch.randn(512, 512, device="cuda")
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        for _ in range(3):
            (x @ x).relu().sum()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    with torch.cuda.graph(g):
        t = x @ x
        y = t.relu() + 1
        del t
    for i in range(5):
        x.copy_(torch.randn(512, 512, device="cuda"))
        garbage = [torch.full((MIB,), 7.0, device="cuda") for _ in range(8)]
        g.replay()
        torch.cuda.synchronize()
        expect(torch.equal(y, (x @ x).relu() + 1), f"replay {i} differs")
        del garbage
    segments = [s for s in torch.cuda.memory_snapshot() if tuple(s["segment_pool_id"]) != (0, 0)]
    return f"5 replays equal; {len(segments)} segments of private pools"


def private_pool(torch, lt):
    x = torch.randn(MIB, device="cuda")
    torch.cuda.synchronize()
    handle = torch.cuda.graph_pool_handle()
    graphs, outputs = [], []
    for i in range(4):
        g = torch.cuda.CUDAGraph()
        with torch.cuda.graph(g, pool=handle):
            t = x * (i + 1)
            outputs.append(t.sin())
            del t
        graphs.append(g)
    held = torch.cuda.memory_reserved()
    for i, g in enumerate(graphs):
        g.replay()
        torch.cuda.synchronize()
        expect(torch.equal(outputs[i], (x * (i + 1)).sin()), f"graph {i} differs")
    del g, graphs, outputs
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.empty_cache()
    after = torch.cuda.memory_reserved()
    expect(after < held, f"reserved {held} before and {after} after")
    return f"4 graphs share a pool; reserved {held >> 20} MiB, {after >> 20} after they went"


def mem_pool(torch, lt):
    pool = torch.cuda.MemPool()
    with torch.cuda.use_mem_pool(pool):
        x = torch.full((4 * MIB,), 3.0, device="cuda")
    y = torch.full((4 * MIB,), 4.0, device="cuda")
    expect(x.sum().item() == 12 * MIB and y.sum().item() == 16 * MIB, "contents")
    found = pool.snapshot()
    expect(sum(s["allocated_size"] for s in found) >= 16 * MIB, "the pool's snapshot")
    del x
    del pool
    return f"{len(found)} segments"


def cudnn_benchmark(torch, lt):
    torch.backends.cudnn.benchmark = True
    torch.backends.cudnn.allow_tf32 = False
    conv = torch.nn.Conv2d(16, 32, 3, padding=1).cuda()
    x = torch.randn(8, 16, 64, 64, device="cuda")
    y = conv(x)
    y.sum().backward()
    z = torch.nn.functional.conv2d(x.cpu(), conv.weight.cpu(), conv.bias.cpu(), padding=1)
    error = (y.cpu() - z).abs().max().item()
    expect(error < 1e-3, f"the error is {error}")
    return f"largest error {error:.1e}"


def out_of_memory(torch, lt):
    x = torch.full((MIB,), 5.0, device="cuda")
    seen = []
    torch._C._cuda_attach_out_of_memory_observer(lambda *a: seen.append(a))
    for _ in range(3):
        try:
            torch.empty(1 << 42, device="cuda", dtype=torch.uint8)
            raise AssertionError("4 TiB were there")
        except torch.OutOfMemoryError as error:
            text = str(error)
    expect("CUDA out of memory" in text, text[:200])
    y = (x * 2).sum().item()
    expect(y == 10 * MIB, "the context after it")
    return f"caught 3 times, observers called {len(seen)}, report of {len(text)} characters: {text.splitlines()[1][:120]!r}"


def budget(torch, lt):
    held = []
    try:
        for _ in range(100):
            held.append(torch.empty(64 * MIB, device="cuda", dtype=torch.uint8))
        raise AssertionError("no limit")
    except RuntimeError as error:
        # The plug-in interface has this class only.
        expect("out of memory" in str(error), str(error)[:200])
    reserved = torch.cuda.memory_reserved()
    expect(reserved <= GIB and len(held) >= 15, f"{reserved} reserved, {len(held)} blocks")
    del held[::2]
    more = torch.empty(200 * MIB, device="cuda", dtype=torch.uint8).fill_(3)
    low, high = torch.aminmax(more)
    expect((low.item(), high.item()) == (3, 3), "contents of a block over moved granules")
    torch.cuda.set_per_process_memory_fraction(0.9)
    return f"{len(held) * 2} blocks of 64 MiB in 1 GiB, then 200 MiB over every second one; reserved {torch.cuda.memory_reserved() >> 20} MiB"


def other_process(torch, lt):
    """torch.multiprocessing asks for a handle of the memory."""
    x = torch.ones(1000, device="cuda")
    try:
        torch.multiprocessing.reductions.reduce_tensor(x)
        raise AssertionError("a tensor was shared")
    except RuntimeError as error:
        text = str(error).splitlines()[0]
        expect("share_memory_" in text, text)
    expect(x.sum().item() == 1000, "the tensor after it")
    return text


def region(torch, lt):
    size = 2 * GIB
    with lt.region("weights"):
        w = torch.empty(size // 4, device="cuda").normal_()
        x = torch.randn(256, 1024, device="cuda")
    views = w.view(-1, 1024)
    at, total = w.data_ptr(), w.double().sum().item()
    torch.cuda.synchronize()
    g = torch.cuda.CUDAGraph()
    stream = torch.cuda.Stream()
    with torch.cuda.stream(stream):
        x @ views[:2048].T
    torch.cuda.synchronize()
    with torch.cuda.graph(g):
        y = x @ views[:2048].T
    g.replay()
    torch.cuda.synchronize()
    before = y.clone()
    torch.cuda.synchronize()
    free0 = torch.cuda.mem_get_info()[0]
    t0 = time.perf_counter()
    freed = lt.suspend("weights")
    t1 = time.perf_counter()
    free1 = torch.cuda.mem_get_info()[0]
    t2 = time.perf_counter()
    lt.resume("weights")
    t3 = time.perf_counter()
    y.zero_()
    g.replay()
    torch.cuda.synchronize()
    expect(w.data_ptr() == at and w.double().sum().item() == total, "contents")
    expect(torch.equal(before, y), "the graph's replay differs")
    pinned = torch.empty(size // 4, pin_memory=True)
    pinned.copy_(w)
    torch.cuda.synchronize()
    t4 = time.perf_counter()
    pinned.copy_(w, non_blocking=True)
    torch.cuda.synchronize()
    t5 = time.perf_counter()
    w.copy_(pinned, non_blocking=True)
    torch.cuda.synchronize()
    t6 = time.perf_counter()
    w.fill_(2.0)
    dropped = lt.suspend("weights", keep=False)
    lt.resume("weights")
    w.fill_(1.0)
    expect(w.double().sum().item() == size // 4, "contents after a suspension without them")
    return (f"{freed >> 20} MiB freed, device {(free1 - free0) >> 20} MiB; suspend {1e3 * (t1 - t0):.0f} ms beside {1e3 * (t5 - t4):.0f} of a copy, "
            f"resume {1e3 * (t3 - t2):.0f} beside {1e3 * (t6 - t5):.0f}; without contents {dropped >> 20} MiB")


def fork_loader(torch, lt):
    held = torch.ones(MIB, device="cuda")

    class Data(torch.utils.data.Dataset):
        def __len__(self):
            return 64

        def __getitem__(self, i):
            return torch.full((1000,), float(i))

    loader = torch.utils.data.DataLoader(Data(), batch_size=8, num_workers=2, pin_memory=True, multiprocessing_context="fork")
    total = 0.0
    for _ in range(2):
        total += sum(batch.cuda(non_blocking=True).sum().item() for batch in loader)
    expect(total == 2 * 1000 * 64 * 63 / 2, f"the sum is {total}")
    expect(held.sum().item() == MIB, "the parent's memory")
    return "2 workers, 2 passes"


def peers_of_streams(torch, lt):
    """Autograd's threads and streams."""
    streams = [torch.cuda.Stream() for _ in range(4)]
    weights = torch.randn(1024, 1024, device="cuda", requires_grad=True)
    for i in range(20):
        with torch.cuda.stream(streams[i % 4]):
            streams[i % 4].wait_stream(torch.cuda.default_stream())
            loss = (torch.randn(256, 1024, device="cuda") @ weights).relu().sum()
            loss.backward()
        torch.cuda.synchronize()
        expect(torch.isfinite(weights.grad).all().item(), "gradient")
        weights.grad = None
    return "20 backward passes on 4 streams"


def differs(torch, x, value, home):
    """Whether an element of `x` is not `value`. The values are read on the stream that computes them."""
    with torch.cuda.stream(home):
        low, high = torch.aminmax(x)
        return (low.item(), high.item()) != (value, value)


def program(torch, seed, captures=True):
    """One random program. Returns how many contents differ."""
    dice = random.Random(seed)
    main = torch.cuda.current_stream()
    streams = [main] + [torch.cuda.Stream() for _ in range(3)]
    live, graphs, wrong = [], [], 0
    for step in range(dice.randrange(20, 60)):
        what = dice.randrange(12)
        if what < 5 or not live:
            stream, value = dice.choice(streams), dice.randrange(1, 100)
            size = dice.choice([1, 100, 5000, 100_000, 500_000, 3_000_000])
            with torch.cuda.stream(stream):
                live.append((torch.full((size,), value, device="cuda", dtype=torch.int32), value, stream))
        elif what < 7:
            x, value, home = dice.choice(live)
            other = dice.choice(streams)
            other.wait_stream(home)
            with torch.cuda.stream(other):
                y = x + 1
            x.record_stream(other)
            live.append((y, value + 1, other))
        elif what < 11:
            x, value, home = live.pop(dice.randrange(len(live)))
            if dice.random() < 0.5:
                wrong += differs(torch, x, value, home)
            del x
        elif captures and len(graphs) < 2:
            torch.cuda.synchronize()
            value, size = dice.randrange(1, 100), dice.choice([1000, 200_000])
            source = torch.full((size,), value, device="cuda", dtype=torch.int32)
            torch.cuda.synchronize()
            # torch.cuda.graph collects garbage, which takes longer than the program.
            g = torch.cuda.CUDAGraph()
            with torch.cuda.stream(streams[1]):
                g.capture_begin()
                t = source * 2
                u = t + 1
                del t
                g.capture_end()
            torch.cuda.synchronize()
            graphs.append((g, source, u, value))
        for g, source, u, value in graphs:
            if dice.random() < 0.2:
                g.replay()
                wrong += not bool((u == value * 2 + 1).all().item())
    for x, value, home in live:
        wrong += differs(torch, x, value, home)
    torch.cuda.synchronize()
    return wrong


def random_programs(torch, lt, captures=True):
    seconds, done, wrong, start = float(os.environ.get("CHECK_SECONDS", "20")), 0, 0, time.perf_counter()
    while done < 1000 and time.perf_counter() - start < seconds:
        wrong += program(torch, done, captures)
        done += 1
    expect(wrong == 0, f"{wrong} contents differ in {done} programs")
    return f"{done} programs in {time.perf_counter() - start:.1f} s, no difference"


def distributed(torch, lt):
    """DistributedDataParallel over NCCL with one process: its buckets and streams."""
    import tempfile

    import torch.distributed as dist

    with tempfile.NamedTemporaryFile() as file:
        dist.init_process_group("nccl", init_method="file://" + file.name + ".init", rank=0, world_size=1)
        torch.manual_seed(0)
        layers = [torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)]
        plain = torch.nn.Sequential(*layers).cuda()
        parallel = torch.nn.parallel.DistributedDataParallel(plain, device_ids=[0], bucket_cap_mb=1)
        for i in range(10):
            x = torch.randn(64, 1024, device="cuda")
            plain(x).square().mean().backward()
            expected = [p.grad.clone() for p in plain.parameters()]
            plain.zero_grad(set_to_none=True)
            parallel(x).square().mean().backward()
            same = all(torch.equal(p.grad, g) for p, g in zip(plain.parameters(), expected))
            expect(same, f"gradients of step {i}")
            plain.zero_grad(set_to_none=True)
            total = torch.ones(5 * MIB, device="cuda")
            work = dist.all_reduce(total, async_op=True)
            del total
            work.wait()
        dist.destroy_process_group()
    return "10 steps, gradients equal to those without it"


def compile_reduce_overhead(torch, lt):
    def step(t):
        return (t @ t).relu() + 1

    f = torch.compile(step, mode="reduce-overhead")
    torch.set_float32_matmul_precision("highest")
    for i in range(6):
        x = torch.randn(256, 256, device="cuda")
        torch.compiler.cudagraph_mark_step_begin()
        y = f(f(x).clone()).clone()
        error = ((y - step(step(x))).abs().max() / y.abs().max()).item()
        expect(error < 1e-3, f"call {i}: error {error}")
    for size in (128, 384):
        x = torch.randn(size, size, device="cuda")
        for _ in range(3):
            torch.compiler.cudagraph_mark_step_begin()
            y = f(x).clone()
        expect(((y - step(x)).abs().max() / y.abs().max()).item() < 1e-3, "another size")
    return "3 sizes"


def plugin_training(torch, lt):
    """Steps of a small network with the statistics that a program prints."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(1024, 4096), torch.nn.ReLU(), torch.nn.Linear(4096, 1024)).cuda()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    losses = []
    for i in range(30):
        x = torch.randn(64 + 37 * (i % 5), 1024, device="cuda")
        loss = (model(x) - x).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        losses.append(loss.item())
    expect(losses[-1] < losses[0], f"the loss went from {losses[0]} to {losses[-1]}")
    allocated, reserved = torch.cuda.max_memory_allocated(), torch.cuda.max_memory_reserved()
    expect(0 < allocated <= reserved, f"{allocated} allocated, {reserved} reserved")
    expect("Allocated memory" in torch.cuda.memory_summary(), "memory_summary")
    return f"30 steps, loss {losses[0]:.3f} to {losses[-1]:.3f}; {allocated >> 20} MiB allocated, {reserved >> 20} reserved"


def plugin_out_of_memory(torch, lt):
    x = torch.full((MIB,), 5.0, device="cuda")
    for _ in range(3):
        try:
            torch.empty(1 << 42, device="cuda", dtype=torch.uint8)
            raise AssertionError("4 TiB were there")
        except RuntimeError as error:
            text = str(error)
            expect("out of memory" in text, text[:200])
    expect((x * 2).sum().item() == 10 * MIB, "the context after it")
    expect(torch.cuda.memory_stats()["num_ooms"] == 3, "num_ooms")
    return f"caught 3 times: {text.splitlines()[0][:160]!r}"


def plugin_refusals(torch, lt):
    """What the interface cannot do is an error, and the program goes on."""

    def capture():
        with torch.cuda.graph(torch.cuda.CUDAGraph()):
            torch.ones(1000, device="cuda")

    def pool():
        with torch.cuda.use_mem_pool(torch.cuda.MemPool()):
            torch.ones(1000, device="cuda")

    def region():
        with lt.region("weights"):
            pass

    x, texts = torch.ones(1000, device="cuda"), []
    for function in (capture, pool, region, torch.cuda.memory_snapshot, torch.cuda.memory._record_memory_history):
        try:
            function()
            raise AssertionError(f"{function.__name__} was not refused")
        except RuntimeError as error:
            texts.append(f"{function.__name__}: {str(error).splitlines()[0][:120]}")
            # PyTorch itself refuses a pool.
            expect("leasehold" in texts[-1] or function is pool, texts[-1])
        expect(x.sum().item() == 1000, f"after {function.__name__}")
        expect(torch.isfinite(torch.randn(1000, device="cuda")).all().item(), f"random numbers after {function.__name__}")
    return "; ".join(texts)


PLUGIN = {"plugin": True}

# Name: function, time limit in seconds, options of enable() (None: PyTorch's own allocator).
CHECKS = {
    "statistics": (statistics, 40, {}),
    "graph": (graph, 40, {}),
    "region": (region, 60, {}),
    "region, native": (region, 60, None),
    "out of memory": (out_of_memory, 40, {}),
    "record_stream": (record_stream, 40, {}),
    "private pool": (private_pool, 40, {}),
    "budget": (budget, 40, {"budget": "1GiB"}),
    "snapshot": (snapshot, 40, {}),
    "summary": (summary, 40, {}),
    "other process": (other_process, 40, {}),
    "MemPool": (mem_pool, 40, {}),
    "cudnn.benchmark": (cudnn_benchmark, 40, {}),
    "fork DataLoader": (fork_loader, 40, {}),
    "streams and autograd": (peers_of_streams, 40, {}),
    "random programs": (random_programs, 90, {}),
    "random programs, native": (random_programs, 90, None),
    "DistributedDataParallel": (distributed, 60, {}),
    "reduce-overhead": (compile_reduce_overhead, 60, {}),
    "plug-in, training": (plugin_training, 40, PLUGIN),
    "plug-in, statistics": (statistics, 40, PLUGIN),
    "plug-in, out of memory": (plugin_out_of_memory, 40, PLUGIN),
    "plug-in, budget": (budget, 40, {**PLUGIN, "budget": "1GiB"}),
    "plug-in, refusals": (plugin_refusals, 40, PLUGIN),
    "plug-in, record_stream": (record_stream, 40, PLUGIN),
    "plug-in, fork DataLoader": (fork_loader, 40, PLUGIN),
    "plug-in, streams and autograd": (peers_of_streams, 40, PLUGIN),
    "plug-in, random programs": (lambda torch, lt: random_programs(torch, lt, captures=False), 60, PLUGIN),
}


def child(name):
    import torch
    import leasehold.torch as lt

    function, _, options = CHECKS[name]
    if options is not None:
        lt.enable(**options)
    start = time.perf_counter()
    text = function(torch, lt)
    print(json.dumps([text, time.perf_counter() - start]), flush=True)
    # What still goes wrong at the end of the process shows in its status.


def run(name, started):
    """Starts a check's process."""
    return subprocess.Popen([sys.executable, os.path.abspath(__file__), "--child", name], stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True), started


def main():
    arguments = sys.argv[1:]
    if arguments[:1] == ["--child"]:
        return child(arguments[1])
    if arguments == ["--list"]:
        return print("\n".join(CHECKS))
    if arguments[:1] == ["--seconds"]:
        os.environ["CHECK_SECONDS"] = arguments[1]
        arguments = arguments[2:]
    names, failed = arguments or list(CHECKS), 0
    # Most of a check's time is the import of PyTorch, so several run at once. Those that are timed run alone.
    alone = [n for n in names if n.startswith("region")]
    waiting = [n for n in names if n not in alone]
    running = {}
    while waiting or running or alone:
        while waiting and len(running) < 4:
            name = waiting.pop(0)
            running[name] = run(name, time.monotonic())
        if not waiting and not running and alone:
            name = alone.pop(0)
            running[name] = run(name, time.monotonic())
        for name, (process, started) in list(running.items()):
            limit = CHECKS[name][1]
            try:
                output, _ = process.communicate(timeout=0.05)
            except subprocess.TimeoutExpired:
                if time.monotonic() - started < limit:
                    continue
                process.kill()
                output = (process.communicate()[0] or "") + f"\nlonger than {limit} s"
            del running[name]
            lines = [line for line in output.strip().splitlines() if line]
            answers = [line for line in lines if line.startswith('["')]
            if process.returncode == 0 and answers:
                text, seconds = json.loads(answers[-1])
                print(f"ok    {name}: {text} ({seconds:.1f} s)", flush=True)
            else:
                failed += 1
                print(f"FAIL  {name}: status {process.returncode}: " + " | ".join(lines[-25:])[-2500:], flush=True)
    print(f"{len(names) - failed} of {len(names)} work", flush=True)
    return failed


if __name__ == "__main__":
    sys.exit(main())
