"""tinygrad's programs on simulated CUDA devices. They need tinygrad and a build with the feature `sim`."""

from __future__ import annotations

import importlib.util
import os
import shutil
import subprocess
import sys
import tempfile
import unittest
from typing import Any
from unittest import mock

import leasehold
from leasehold import _native

HAS_TINYGRAD = importlib.util.find_spec("tinygrad") is not None
WHY = "tinygrad is not installed" if not HAS_TINYGRAD else "this build has no simulated devices"
if HAS_TINYGRAD and _native.SIMULATED:
    os.environ["LEASEHOLD_DEVICE"] = "sim-cuda:0"
    os.environ["DEV"] = "LEASEHOLD"
    import leasehold.tinygrad as device_of_tinygrad
    from tinygrad import Context, Device, Tensor, TinyJit, Variable, dtypes
    from tinygrad.device import BufferSpec, TinyELF
    from tinygrad.engine.realize import graph_cache, runtime_cache


def run(*arguments: str, **environment: str) -> subprocess.CompletedProcess[str]:
    """Runs Python in a process of its own."""
    return subprocess.run(
        [sys.executable, *arguments], env={**os.environ, **environment}, capture_output=True, text=True, timeout=300
    )


class Import(unittest.TestCase):
    def test_an_import_without_tinygrad_says_what_is_missing(self) -> None:
        code = "import sys; sys.modules['tinygrad'] = None; import leasehold.tinygrad"
        said = run("-c", code)
        self.assertIn("ImportError: leasehold.tinygrad needs tinygrad", said.stderr)
        self.assertIn("pip install tinygrad", said.stderr)

    def test_the_package_alone_does_not_import_it(self) -> None:
        said = run("-c", "import leasehold, sys; print('tinygrad' in sys.modules)")
        self.assertEqual(said.stdout, "False\n", said.stderr)


@unittest.skipUnless(HAS_TINYGRAD and _native.SIMULATED, WHY)
class OnSimulated(unittest.TestCase):
    def setUp(self) -> None:
        self.device = Device["LEASEHOLD"]

    def elf(self, source: str, *kinds: str) -> Any:
        """A program whose source says nothing of accesses: buffers, then numbers."""
        shapes = {"buffer": (16,), "number": ()}
        signature = tuple((None, i, dtypes.int, shapes[kind]) for i, kind in enumerate(kinds))
        return TinyELF(source.encode(), "k", self.device.renderer.target, signature)

    def filled(self, count: int) -> Any:
        buffer = self.device.allocator.alloc(4 * count)
        self.device.allocator._copyin(buffer, memoryview(bytes(4 * count)))
        return buffer

    def read(self, buffer: Any) -> list[int]:
        out = memoryview(bytearray(buffer.nbytes))
        self.device.allocator._copyout(out, buffer)
        return out.cast("i").tolist()

    def test_the_device(self) -> None:
        self.assertEqual((self.device.leasehold.name, self.device.arch), ("sim-cuda:0", "sm_90"))
        self.assertEqual((self.device.count(), Device["LEASEHOLD:1"].leasehold.name), (2, "sim-cuda:1"))
        with self.assertRaises(leasehold.UnavailableError):
            device_of_tinygrad.LeaseholdDevice("LEASEHOLD:7")
        for name in ("cpu:0", "sim-cuda:x", "tpu", "mps:0"):
            with mock.patch.dict(os.environ, LEASEHOLD_DEVICE=name):
                with self.assertRaisesRegex(leasehold.InvalidArgumentError, f"LEASEHOLD_DEVICE={name}"):
                    device_of_tinygrad.LeaseholdDevice("LEASEHOLD")

    def test_values_of_each_type(self) -> None:
        for dtype in (dtypes.float, dtypes.half, dtypes.bfloat16, dtypes.fp8e4m3, dtypes.fp8e5m2, dtypes.double):
            x = Tensor([0.5, -1.5, 3.0, 448.0]).cast(dtype).realize()
            self.assertEqual((x * 2 - x).cast(dtypes.float).tolist(), [0.5, -1.5, 3.0, 448.0], dtype)
        for dtype in (dtypes.int8, dtypes.uint8, dtypes.int16, dtypes.uint32, dtypes.int64, dtypes.bool):
            x = Tensor([0, 1, 1]).cast(dtype).realize()
            self.assertEqual((x + x).cast(dtypes.int).tolist()[0], 0, dtype)

    def test_products_on_tensor_cores(self) -> None:
        def matrix(dtype: Any, by: int) -> Any:
            # Whole numbers, so that sums are exact.
            return Tensor([[(64 * i + j) * by % 7 - 3 for j in range(64)] for i in range(64)]).cast(dtype).realize()

        # Products of floats are rounded there, so they ask for it.
        for dtype, rounded in ((dtypes.half, 0), (dtypes.bfloat16, 0), (dtypes.float, 0), (dtypes.float, 1)):
            a, b = matrix(dtype, 5), matrix(dtype, 3)
            got: list[Any] = []
            with Context(ALLOW_TF32=rounded):
                programs = self.programs(lambda: got.extend(a.matmul(b, dtype=dtypes.float).tolist()))
            on_cores = any("mma.sync" in program.source for program in programs)
            self.assertEqual(on_cores, dtype != dtypes.float or rounded == 1, dtype)
            rows, columns = a.cast(dtypes.float).tolist(), list(zip(*b.cast(dtypes.float).tolist()))
            want = [[sum(x * y for x, y in zip(row, column)) for column in columns] for row in rows]
            self.assertEqual(got, want, dtype)

    def programs(self, work: Any) -> Any:
        """The programs of the device that some work needs and that were not there."""
        before = set(runtime_cache)
        work()
        new = [runtime_cache[key] for key in runtime_cache.keys() - before]
        return [program for program in new if isinstance(program, device_of_tinygrad.LeaseholdProgram)]

    def test_accesses_come_from_stores(self) -> None:
        def accesses(work: Any) -> Any:
            return {program.kernel.args for program in self.programs(work)}

        x, y = Tensor([1.0, 2, 3, 4, 5]).realize(), Tensor([1.0, 2, 3, 4, 6]).realize()
        self.assertEqual(accesses(lambda: (x + y + 11).realize()), {("read_write", "read", "read")})
        self.assertEqual(accesses(lambda: x.assign(x * 5 + 1).realize()), {("read_write",)})
        i = Variable("i", 1, 10).bind(3)
        self.assertEqual(accesses(lambda: (y * i).realize()), {("read_write", "read", "int32")})
        program = self.device.runtime(self.elf('extern "C" __global__ void k(int* x, int n) { x[0] = n; }', "buffer", "number"))
        self.assertEqual(program.kernel.args, ("read_write", "int32"))

    def test_a_store_leaves_the_rest_of_a_buffer(self) -> None:
        x = Tensor([1, 2, 3, 4, 5, 6]).realize()
        x[2:4] = Tensor([7, 8])
        self.assertEqual(x.tolist(), [1, 2, 7, 8, 5, 6])

    def test_nothing_is_copied_beyond_a_buffer(self) -> None:
        allocator, memory = self.device.allocator, self.filled(4)
        part = allocator._offset(memory, 4, 8)
        allocator._copyin(part, memoryview(b"\1\0\0\0"))
        self.assertEqual(self.read(memory), [0, 0, 1, 0])
        for wrong in (
            lambda: allocator._copyin(part, memoryview(bytes(8))),
            lambda: allocator._copyout(memoryview(bytearray(8)), part),
            lambda: allocator._transfer(part, memory, 8, self.device, self.device),
            lambda: allocator._offset(memory, 8, 12),
        ):
            with self.assertRaises(leasehold.InvalidArgumentError):
                wrong()
        self.assertEqual(self.read(memory), [0, 0, 1, 0])
        for options in (BufferSpec(external_ptr=4096), BufferSpec(host=True)):
            with self.assertRaises(MemoryError) as raised:
                allocator.alloc(16, options)
            self.assertIsInstance(raised.exception.__cause__, leasehold.UnsupportedError)
        with self.assertRaises(MemoryError):
            allocator.alloc(1 << 40)
        self.assertEqual(self.read(allocator.alloc(16, BufferSpec(zero=True))), [0] * 4)

    def test_copies_between_devices(self) -> None:
        x = Tensor(list(range(1000))).realize()
        y = (x.to("LEASEHOLD:1") + 1).realize()
        self.assertEqual(y.to("LEASEHOLD").tolist(), list(range(1, 1001)))
        x.shard_(("LEASEHOLD", "LEASEHOLD:1"), axis=0)
        self.assertEqual((x + x).sum().item(), 2 * 999 * 500)

    def test_the_number_of_devices(self) -> None:
        program = "import leasehold; print(leasehold.Device('sim-cuda:3').name, leasehold.devices()[-4:])"
        said = run("-c", program, LEASEHOLD_SIM_DEVICES="4")
        self.assertEqual(said.stdout, "sim-cuda:3 ['sim-cuda:0', 'sim-cuda:1', 'sim-cuda:2', 'sim-cuda:3']\n", said.stderr)
        for wrong in ("0", "17", "two", ""):
            said = run("-c", "import leasehold; leasehold.Device('sim-cuda:0')", LEASEHOLD_SIM_DEVICES=wrong)
            self.assertIn("no number of devices from 1 to 16", said.stderr)

    def graphs(self) -> Any:
        return [g for g in graph_cache.values() if isinstance(g, device_of_tinygrad.LeaseholdGraph)]

    def test_a_captured_program_is_a_graph_with_updates(self) -> None:
        @TinyJit
        def step(x: Any, y: Any) -> Any:
            z = (x + 1).contiguous().realize()
            return (z * y).realize()

        before = self.graphs()
        xs = [Tensor([float(i), 2.0]).realize() for i in range(3)]
        for n in range(9):
            # The two inputs change places and memory.
            x, y = xs[n % 3], xs[(n + 1 + n % 2) % 3]
            want = [(a + 1) * b for a, b in zip(x.tolist(), y.tolist())]
            self.assertEqual(step(x, y).tolist(), want, n)
        (graph,) = [g for g in self.graphs() if g not in before]
        self.assertEqual(graph.graph.launches, 8)

    def test_an_input_that_the_program_also_holds_is_no_update(self) -> None:
        weight = Tensor([2.0, 3.0]).realize()

        @TinyJit
        def step(x: Any) -> Any:
            z = (x + weight).contiguous().realize()
            return (z * weight).realize()

        before = self.graphs()
        for n in range(8):
            x = weight if n % 3 == 2 else Tensor([float(n), 1.0]).realize()
            want = [(a + w) * w for a, w in zip(x.tolist(), (2.0, 3.0))]
            self.assertEqual(step(x).tolist(), want, n)
        (graph,) = [g for g in self.graphs() if g not in before]
        self.assertEqual(graph.graph.launches, 5)

    def test_numbers_and_grids_of_a_graph_change(self) -> None:
        @TinyJit
        def step(x: Any) -> Any:
            z = (x * 2).contiguous().realize()
            return z.sum(axis=0).contiguous().realize()

        for n in (3, 5, 2, 9, 9, 1, 8):
            size = Variable("n", 1, 10).bind(n)
            x = Tensor([[1.0] * 300] * 10).realize()
            self.assertEqual(step(x[:size]).tolist(), [2.0 * n] * 300, n)

    def test_a_wrong_source_is_refused_with_its_line(self) -> None:
        for body, why in (
            ("\n\n  x[0] = nonesuch;", "k:3: error: "),
            ('\n  asm("membar.gl;");', "k:2: error: not emulated: inline PTX"),
        ):
            with self.assertRaises(device_of_tinygrad.CompileError) as raised:
                self.device.runtime(self.elf('extern "C" __global__ void k(int* x) {' + body + "}", "buffer"))
            self.assertIn(why, str(raised.exception))

    def test_a_fault_is_told_with_its_line(self) -> None:
        """The device is lost with it, as a GPU is. So each has a process of its own."""
        program = """
import leasehold.tinygrad, sys
from tinygrad import Device, dtypes
from tinygrad.device import TinyELF
device = Device["LEASEHOLD"]
elf = TinyELF(sys.argv[1].encode(), "k", device.renderer.target, ((None, 0, dtypes.int, (16,)),))
memory = device.allocator.alloc(64)
device.allocator._copyin(memory, memoryview(bytes(64)))
device.runtime(elf)(memory, local_size=(int(sys.argv[2]), 1, 1))
device.synchronize()
"""
        kernel = 'extern "C" __global__ void k(int* x) {\n'
        for body, threads, why in (
            ("x[threadIdx.x] = x[(threadIdx.x + 1) % 16];}", "16", r"k:2: race: it \w+s binding 0 at byte \d+, which thread"),
            ("\nx[threadIdx.x] = 1;}", "17", "k:3: illegal address: .* 0 bytes behind the end of binding 0, which has 64 bytes"),
        ):
            said = run("-c", program, kernel + body, threads)
            self.assertRegex(said.stderr, "DeviceLostError: .*" + why)

    def test_mistakes_in_the_renderer_are_told(self) -> None:
        program = """
import leasehold.tinygrad, sys
from tinygrad import Tensor
renderer = leasehold.tinygrad.LeaseholdRenderer
render_kernel = renderer.render_kernel
exec(sys.argv[1])
x = Tensor([float(i % 7) for i in range(4096)]).realize()
print((x.sum() if sys.argv[2] == "sum" else x + 1).realize().tolist())
"""
        beyond = "renderer.code_for_workitem = {**renderer.code_for_workitem, 'g': lambda x: '(blockIdx.x + 1)'}"
        access = "renderer.render_kernel = lambda *a: render_kernel(*a).replace('read_write', 'read', 1)"
        for mistake, work, why in (
            ("pass", "sum", None),
            ("renderer.barrier = ''", "sum", "race: it .* shared memory that thread .* without a barrier"),
            (beyond, "add", r"illegal address: it |it writes binding \d at byte \d+, which the launch binds to be read only"),
            (access, "sum", "it writes binding 0 at byte 0, which the launch binds to be read only"),
        ):
            said = run("-c", program, mistake, work)
            if why is None:
                self.assertEqual(said.stdout, "12285.0\n", said.stderr)
            else:
                self.assertRegex(said.stderr, r"DeviceLostError: .*:\d+: (" + why + ")", mistake)

    def test_a_missing_dependency_in_a_graph_is_told(self) -> None:
        """The device orders a graph's kernels by their accesses, so the driver forgets what it was told."""
        program = """
import leasehold.tinygrad
from tinygrad import Tensor, TinyJit
@TinyJit
def step(x):
    y = (x + 1).contiguous().realize()
    return (y.flip(0) * 2).contiguous().realize()
for n in range(4):
    print(step(Tensor([float(n), 1.0, 2.0]).realize()).tolist())
"""
        said = run("-c", program)
        self.assertEqual(said.stdout.splitlines()[-1:], ["[6.0, 4.0, 8.0]"], said.stderr)
        for seed in "1", "2", "77":
            said = run("-c", program, LEASEHOLD_SEED=seed, LEASEHOLD_FAULTS="cuGraphAddKernelNode@1=unordered")
            self.assertRegex(
                said.stderr,
                r"leasehold.RaceError: unordered accesses: 12 bytes at 0x\w+: dispatch E\w* \(LEASEHOLD, submission \d+, node 0\) "
                r"and dispatch E\w* \(LEASEHOLD, submission \d+, node [01]\); node 1 does not wait for node 0 .* with name \"LEASEHOLD #\d+\".*"
                f"; LEASEHOLD_SEED={seed} gives this order again",
            )

    def test_a_read_of_what_nobody_wrote_is_a_warning(self) -> None:
        program = "import leasehold.tinygrad; from tinygrad import Tensor; (Tensor.empty(64) + 1).realize().tolist()"
        said = run("-c", program)
        self.assertIn("RuntimeWarning: read of memory that nobody wrote: 256 bytes", said.stderr)
        self.assertEqual(run("-W", "error::RuntimeWarning", "-c", program).returncode, 1)

    def test_a_fault_names_the_parameter_and_the_seed(self) -> None:
        program = """
import leasehold
device = leasehold.Device("sim-cuda:0")
x = device.zeros(16, "int32")
source = 'extern "C" __global__ void k(const float* y, int* values) {\\n    values[threadIdx.x] = 1;\\n}'
leasehold.Stream(device, name="work").launch(leasehold.Kernel("k", ["read", "read_write"], cuda=source, trusted=True), (x.view("float32"), x), grid=1, block=17)
device.synchronize()
"""
        said = run("-c", program.replace("(x.view", "(device.zeros(4, 'float32').view"), LEASEHOLD_SEED="4")
        self.assertRegex(said.stderr, r"work.*k:2: illegal address: .* binding 1, .*; binding 1 is values; LEASEHOLD_SEED=4 gives")

    def test_a_compiler_that_hardens_and_output_of_a_kernel(self) -> None:
        program = """
import leasehold
device = leasehold.Device("sim-cuda:0")
x = device.zeros(64, "int32")
source = 'extern "C" __global__ void k(int* x) { x[threadIdx.x] += 1; __syncthreads(); if (threadIdx.x == 3) printf("%d of %s;", x[5], "k"); }'
stream = leasehold.Stream(device)
stream.launch(leasehold.Kernel("k", ["read_write"], cuda=source, trusted=True), (x,), grid=1, block=64)
stream.synchronize()
"""
        with tempfile.TemporaryDirectory() as folder:
            # As that of Ubuntu does.
            compiler = os.path.join(folder, "g++")
            with open(compiler, "w") as file:
                file.write(f'#!/bin/sh\nexec {shutil.which("g++")} -D_FORTIFY_SOURCE=2 "$@"\n')
            os.chmod(compiler, 0o755)
            said = run("-c", program, PATH=f"{folder}:{os.environ['PATH']}", LEASEHOLD_CACHE_DIR="")
        self.assertEqual((said.returncode, said.stdout), (0, "1 of k;"), said.stderr)

    def test_a_wrong_seed_is_refused(self) -> None:
        for wrong in ("", "-1", "one", str(1 << 64)):
            said = run("-c", "import leasehold; leasehold.Device('sim-cuda:0')", LEASEHOLD_SEED=wrong)
            self.assertIn(f'InvalidArgumentError: invalid argument: LEASEHOLD_SEED="{wrong}" is no number', said.stderr)

    def test_faults_on_demand(self) -> None:
        program = "import leasehold.tinygrad; from tinygrad import Tensor; print((Tensor([1, 2]) + 1).tolist())"
        for faults, why in (
            ("", ""),
            ("cuMemCreate@999=out-of-memory", ""),
            ("cuMemCreate=out-of-memory,cuMemAllocAsync=out-of-memory,cuMemAlloc=out-of-memory", "OutOfMemoryError"),
            ("cuLaunchKernel@0=device-lost", r"DeviceLostError: .*injected into call \d+ \(cuLaunchKernel"),
            ("cuLaunchKernel=nothing", r'InvalidArgumentError: invalid argument: LEASEHOLD_FAULTS="cuLaunchKernel=nothing": "cuLaunchKernel=nothing" is no fault; say CALL@N=EFFECT'),
        ):
            said = run("-c", program, LEASEHOLD_FAULTS=faults)
            if why:
                self.assertRegex(said.stderr, why, faults)
            else:
                self.assertEqual(said.stdout, "[2, 3]\n", said.stderr)

    def test_a_launch_tells_its_time(self) -> None:
        source = 'extern "C" __global__ void k(int* x, int n) { x[blockIdx.x] += n; }'
        program, memory = self.device.runtime(self.elf(source, "buffer", "number")), self.filled(4)
        time = program(memory, global_size=(4, 1, 1), vals=(7,), wait=True)
        self.assertGreater(time, 0)
        self.assertEqual(self.read(memory), [7] * 4)
        with self.assertRaises(leasehold.InvalidArgumentError):
            program(memory, memory, global_size=(4, 1, 1), vals=(7,))

    def test_a_program_runs_by_the_module(self) -> None:
        with tempfile.TemporaryDirectory() as folder:
            program = os.path.join(folder, "program.py")
            with open(program, "w") as file:
                file.write("import sys\nfrom tinygrad import Context, Device, Tensor\nif __name__ == '__main__':\n")
                file.write("    print(Device.DEFAULT, sys.argv[1:], (Tensor([1, 2]) + 1).tolist())\n")
            said = run("-m", "leasehold.tinygrad", program, "a", DEV="LEASEHOLD", LEASEHOLD_DEVICE="sim-cuda:0")
            self.assertEqual(said.stdout, "LEASEHOLD ['a'] [2, 3]\n", said.stderr)
        said = run("-m", "leasehold.tinygrad")
        self.assertIn("usage: python -m leasehold.tinygrad PROGRAM", said.stderr)


if __name__ == "__main__":
    unittest.main()
