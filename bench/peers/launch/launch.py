"""What a launch costs from Python: the host's time for each of many launches of a kernel that does nothing,
with three buffers and two numbers, beside the same by C (`launch.c`), CuPy, cuda.core and PyTorch.

    python launch.py [DEVICE] [--c LIBRARY]

Each figure is the best of several rounds. A round gives less work than a queue holds, and waits for it
outside the time.
"""

from __future__ import annotations

import ctypes
import sys
import time
from collections.abc import Callable

import leasehold

ROUNDS, LAUNCHES, COUNT = 25, 400, 256

SOURCE = """
extern "C" __global__ void nothing(const float* x, const float* y, float* z, float a, unsigned n) {}
"""


def best(launch: Callable[[], object], wait: Callable[[], object]) -> float:
    """Microseconds of a launch."""
    times = []
    for _ in range(ROUNDS):
        begin = time.perf_counter()
        for _ in range(LAUNCHES):
            launch()
        times.append(time.perf_counter() - begin)
        wait()
    return min(times) / LAUNCHES * 1e6


def show(name: str, microseconds: float) -> None:
    print(f"{name:46} {microseconds:7.2f} µs")


def ours(device: leasehold.Device) -> None:
    kinds = ["read", "read", "write", "float32", "uint32"]
    kernel = leasehold.Kernel("nothing", kinds, cuda=SOURCE, trusted=True)
    x, y, z = (device.zeros(COUNT, "float32") for _ in range(3))
    stream = leasehold.Stream(device)
    launch, args = stream.launch, [x, y, z, 1.0, COUNT]
    launch(kernel, args, grid=1, block=32)
    show("leasehold: stream.launch", best(lambda: launch(kernel, args, grid=1, block=32), stream.synchronize))
    with device.record() as recording:
        for _ in range(10):
            recording.launch(kernel, args, grid=1, block=32)
    graph = recording.graph
    show("leasehold: graph of 10 launches", best(lambda: graph.launch(stream), stream.synchronize))
    show("leasehold: stream.fill", best(lambda: stream.fill(z, 1.0), stream.synchronize))


def cupy() -> None:
    import cupy

    kernel = cupy.RawKernel(SOURCE, "nothing")
    x, y, z = (cupy.zeros(COUNT, cupy.float32) for _ in range(3))
    args = (x, y, z, cupy.float32(1.0), cupy.uint32(COUNT))
    kernel((1,), (32,), args)
    show("CuPy: RawKernel", best(lambda: kernel((1,), (32,), args), cupy.cuda.Device().synchronize))


def cuda_core() -> None:
    import cuda.core as core
    import numpy

    if not hasattr(core, "Device"):
        # Before version 1.
        import cuda.core.experimental as core

    device = core.Device()
    device.set_current()
    stream = device.create_stream()
    arch = "sm_" + "".join(str(n) for n in device.compute_capability)
    program = core.Program(SOURCE, code_type="c++", options=core.ProgramOptions(arch=arch))
    kernel = program.compile("cubin").get_kernel("nothing")
    buffers = [device.allocate(COUNT * 4, stream=stream) for _ in range(3)]
    config = core.LaunchConfig(grid=1, block=32)
    a, n = numpy.float32(1.0), numpy.uint32(COUNT)
    launch = lambda: core.launch(stream, config, kernel, *buffers, a, n)
    launch()
    show("cuda.core: launch", best(launch, stream.sync))


def torch() -> None:
    import torch

    x, y, z = (torch.zeros(COUNT, device="cuda") for _ in range(3))
    show("PyTorch: torch.add with out=", best(lambda: torch.add(x, y, out=z), torch.cuda.synchronize))


def main() -> None:
    arguments = sys.argv[1:]
    library = None
    if "--c" in arguments:
        at = arguments.index("--c")
        library = arguments[at + 1]
        del arguments[at : at + 2]
    name = arguments[0] if arguments else "cuda:0"
    device = leasehold.Device(name)
    print(f"{name}: {device.product}, {ROUNDS} rounds of {LAUNCHES} launches")
    if library:
        measure = ctypes.CDLL(library).measure
        measure.restype = ctypes.c_double
        path = leasehold.library_path().encode()
        show("leasehold by C: leasehold_stream_launch", measure(path, name.encode()))
    ours(device)
    if name.startswith("sim"):
        return
    for other in (cupy, cuda_core, torch):
        try:
            other()
        except Exception as error:
            print(f"{other.__name__}: {type(error).__name__}: {str(error)[:200]}")


if __name__ == "__main__":
    main()
