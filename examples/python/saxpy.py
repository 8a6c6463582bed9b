"""A kernel of one's own: y += a * x, in C for the CPU and in CUDA C++ for a GPU.

    python saxpy.py [cpu:0 | cuda:0 | ...]

Needs a C compiler (`cc`) for the CPU, NVRTC for a GPU.
"""

from __future__ import annotations

import ctypes
import pathlib
import subprocess
import sys
import tempfile

import leasehold

COUNT, TILE, THREADS = 1 << 20, 4096, 256

# A tile on the CPU has TILE elements. Tiles run at the same time, each on elements of its own.
C = """
#include "leasehold_runtime.h"
#include <string.h>

void saxpy(const leasehold_tile *tile) {
    const float *x = (const float *)(uintptr_t)tile->bindings[0].address;
    float *y = (float *)(uintptr_t)tile->bindings[1].address;
    struct { float a; uint32_t count; } p;
    uint32_t i = tile->tile[0] * 4096, end = i + 4096;
    memcpy(&p, tile->params, sizeof p);
    for (; i < end && i < p.count; i++) y[i] += p.a * x[i];
}
"""

CUDA = """
extern "C" __global__ void saxpy(const float* x, float* y, float a, unsigned count) {
    unsigned end = (blockIdx.x + 1) * 4096;
    for (unsigned i = blockIdx.x * 4096 + threadIdx.x; i < end && i < count; i += blockDim.x)
        y[i] += a * x[i];
}
"""


def compiled(source: str) -> ctypes.CDLL:
    """Compiles C to a library, and loads it."""
    with tempfile.TemporaryDirectory() as folder:
        file = pathlib.Path(folder, "saxpy.c")
        file.write_text(source)
        library = file.with_suffix(".so")
        include = f"-I{leasehold.include_path()}"
        subprocess.run(["cc", "-O3", "-shared", "-fPIC", include, file, "-o", library], check=True)
        return ctypes.CDLL(str(library))


def main(name: str = "cpu:0") -> None:
    device = leasehold.Device(name)
    # Nobody checks the code: with `trusted` we vouch that it stays within its buffers.
    saxpy = leasehold.Kernel(
        "saxpy",
        ["read", "read_write", "float32", "uint32"],
        cpu=compiled(C).saxpy if name.startswith("cpu") else None,
        cuda=CUDA,
        trusted=True,
    )
    x, y = device.empty(COUNT, "float32"), device.zeros(COUNT, "float32")
    copies, compute = leasehold.Stream(device), leasehold.Stream(device)

    # No call waits, and nobody says what comes after what: the launch reads x.
    copies.fill(x, 1.5)
    compute.launch(saxpy, [x, y, 2.0, COUNT], grid=COUNT // TILE, block=THREADS)

    # The same launch, recorded once and launched ten times.
    with device.record() as recording:
        recording.launch(saxpy, [x, y, 2.0, COUNT], grid=COUNT // TILE, block=THREADS)
    for _ in range(10):
        recording.graph.launch(compute)
    compute.host_call(print, "eleven launches are over")

    values = memoryview(y.tobytes()).cast("f")
    assert set(values) == {33.0}, values[0]
    print(f"{name}: {COUNT} times {values[0]}")


if __name__ == "__main__":
    main(*sys.argv[1:])
