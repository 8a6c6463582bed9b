"""Leasehold as a device of tinygrad.

    LEASEHOLD_DEVICE=sim-cuda:0 DEV=LEASEHOLD python -m leasehold.tinygrad program.py
    LEASEHOLD_DEVICE=sim-cuda:0 DEV=LEASEHOLD pytest -p leasehold.tinygrad

`import leasehold.tinygrad` does the same within a program. `LEASEHOLD_DEVICE` names the device that is
tinygrad's `LEASEHOLD:0`, by default `cuda:0`; `LEASEHOLD:1` is the next one of its kind.

On simulated devices `LEASEHOLD_SEED` picks the order of what nothing orders. Each wait raises what the
race detector found, and with the plug-in each test ends with it.

The sources are those of tinygrad's own CUDA device. What a kernel writes comes from its
stores, so the runtime orders launches and copies itself. A captured program is a recorded graph.
"""

# tinygrad's types are there only where it is installed.
# mypy: disallow-subclassing-any=False, disallow-untyped-calls=False, ignore-missing-imports

from __future__ import annotations

import importlib.util
import os
import runpy
import sys
import types
from typing import Any, Callable, NamedTuple, Sequence

import leasehold
from leasehold._errors import CompileError as _CompileError
from leasehold._errors import InvalidArgumentError, RaceError, UnsupportedError
from leasehold._native import SIMULATED

try:
    from tinygrad.codegen.opt import tc
    from tinygrad.device import Allocator as _Allocator
    from tinygrad.device import Compiled, Compiler, MultiBuffer
    from tinygrad.device import CompileError as _Refused
    from tinygrad.device import Program as _Program
    from tinygrad.dtype import AddrSpace, dtypes
    from tinygrad.engine.jit import GraphRunner
    from tinygrad.helpers import ALLOW_TF32, DEBUG
    from tinygrad.renderer import Renderer
    from tinygrad.renderer.cstyle import CUDARenderer
    from tinygrad.uop.ops import Ops
except ImportError as error:
    raise ImportError(
        f"leasehold.tinygrad needs tinygrad 0.14, which is not installed or another version ({error}): "
        "pip install tinygrad"
    ) from error

__all__ = ["CompileError", "LeaseholdDevice"]

VARIABLE = "LEASEHOLD_DEVICE"
# The first line of a source: what the kernel does with each buffer.
ACCESSES = "// accesses: "


class CompileError(_Refused, _CompileError):
    """A kernel's source does not compile. The text is the compiler's."""


def _raise_races() -> None:
    """Raises what the race detector of simulated devices found since the last call."""
    if SIMULATED and (found := leasehold.races()):
        raise RaceError("\n".join(found))


def pytest_report_header() -> str:
    """The device and the seed, for pytest's first lines."""
    return f"leasehold: {_name(0)}, LEASEHOLD_SEED={os.environ.get('LEASEHOLD_SEED', '1')}"


def pytest_runtest_teardown() -> None:
    """Lets pytest name the test in which work had no order."""
    _raise_races()


def _name(ordinal: int) -> str:
    """The name of the device that is tinygrad's `LEASEHOLD:ordinal`."""
    first = os.environ.get(VARIABLE) or "cuda:0"
    kind, _, number = first.partition(":")
    if kind not in ("cuda", "sim-cuda") or not (number or "0").isdigit():
        raise InvalidArgumentError(
            f"{VARIABLE}={first}: leasehold.tinygrad runs CUDA C on cuda:N and sim-cuda:N; "
            "tinygrad's own CPU device is DEV=CPU"
        )
    return f"{kind}:{int(number or 0) + ordinal}"


def _headers() -> list[str]:
    """The folders of CUDA's headers that are there, as options of the compiler."""
    folders = [os.path.join(os.environ[v], "include") for v in ("CUDA_PATH", "CUDA_HOME") if os.environ.get(v)]
    folders += ["/usr/local/cuda/include", "/opt/cuda/include"]
    packages = importlib.util.find_spec("nvidia")
    for root in (packages and packages.submodule_search_locations) or ():
        folders += [os.path.join(root, part, "include") for part in sorted(os.listdir(root))]
    return [f"-I{folder}" for folder in folders if os.path.isfile(os.path.join(folder, "cuda_fp16.h"))]


class LeaseholdRenderer(CUDARenderer):
    """CUDA C as tinygrad writes it, with the accesses to the buffers in the first line."""

    def __init__(self, target: Any) -> None:
        # The parent's own would ask for NVIDIA's compiler. A program is compiled for its device.
        Renderer.__init__(self, target)
        self.compiler = Compiler()

    @property
    def tensor_cores(self) -> list[Any]:
        # tinygrad leaves out what rounds floats by the names of its own devices.
        cores = tc.get_cuda(self.target.arch)
        return [core for core in cores if core.dtype_in != dtypes.float or ALLOW_TF32]

    def render_kernel(
        self, function_name: str, kernel: Any, bufs: Any, uops: Any, prefix: Any = None
    ) -> str:
        opaque = any(u.op in (Ops.CUSTOM, Ops.CUSTOMI, Ops.CALL) for u in uops)
        # Stores may leave a part of a buffer as it is, and what is only written has no contents before.
        each = [
            "read_write" if opaque or written else "read"
            for _, (buffer, written) in bufs
            if buffer.addrspace != AddrSpace.ALU
        ]
        source: str = super().render_kernel(function_name, kernel, bufs, uops, prefix)
        return f"{ACCESSES}{' '.join(each)}\n{source}"


class LeaseholdAllocator(_Allocator):
    """Buffers of the device. Free memory is kept by the device's own allocator."""

    def _alloc(self, size: int, options: Any) -> leasehold.Buffer:
        if options.external_ptr is not None:
            raise UnsupportedError("LEASEHOLD takes no memory by its address; copy it to the device")
        if options.host:
            raise UnsupportedError("LEASEHOLD has no pinned memory for tinygrad; use the device DEV=CPU")
        memory: leasehold.Allocator = self.dev.memory
        made = memory.zeros(size) if options.zero else memory.empty(size)
        if SIMULATED:
            # For what the race detector tells.
            self.count = getattr(self, "count", -1) + 1
            made.name = f"{self.dev.device} #{self.count}"
        return made

    def _copyin(self, dest: leasehold.Buffer, src: memoryview) -> None:
        src = src.cast("B")
        # The bytes are taken during the call.
        self.dev.stream.upload(dest.view(shape=len(src)), src)

    def _copyout(self, dest: memoryview, src: leasehold.Buffer) -> None:
        dest = dest.cast("B")
        src.view(shape=len(dest)).copy_to(dest)
        _raise_races()

    def _transfer(
        self, dest: leasehold.Buffer, src: leasehold.Buffer, sz: int, src_dev: Any, dest_dev: Any
    ) -> None:
        dest_dev.stream.copy(dest.view(shape=sz), src.view(shape=sz))

    def _offset(self, buf: leasehold.Buffer, size: int, offset: int) -> leasehold.Buffer:
        return buf.view(shape=size, offset=offset)


class LeaseholdProgram(_Program):
    """A kernel, compiled for its device."""

    def __init__(self, dev: LeaseholdDevice, obj: Any, **_: Any) -> None:
        self.dev, self.source = dev, obj.lib.decode()
        if DEBUG >= 5:
            print(self.source)
        first, _, _ = self.source.partition("\n")
        if first.startswith(ACCESSES.strip()):
            accesses = first[len(ACCESSES) :].split()
        else:
            # A source of the program's own says nothing. Numbers alone have no shape.
            accesses = ["read_write" for _, _, _, shape in obj.signature if shape]
        numbers = [
            f"{'u' if dtypes.is_unsigned(dt) else ''}int{8 * dt.itemsize}"
            for _, _, dt, _ in obj.signature[len(accesses) :]
        ]
        self.kernel = leasehold.Kernel(
            obj.name,
            [*accesses, *numbers],
            cuda=self.source,
            options=dev.options,
            overlap="any",
            # tinygrad's kernels stay within the buffers that it gives them.
            trusted=True,
        )
        try:
            self.kernel.prepare(dev.leasehold)
        except _CompileError as error:
            raise CompileError(str(error)) from None

    def __call__(
        self,
        *bufs: leasehold.Buffer,
        global_size: Sequence[int] = (1, 1, 1),
        local_size: Sequence[int] | None = (1, 1, 1),
        vals: Sequence[int] = (),
        wait: bool = False,
        **_: Any,
    ) -> float | None:
        launch = Launch(self.kernel, (*bufs, *vals), tuple(global_size), tuple(local_size or (1, 1, 1)))
        return self.dev.run(lambda: launch.issue(self.dev.stream), wait)


class Launch(NamedTuple):
    """A launch of a kernel: its arguments, its blocks, the threads of a block."""

    kernel: leasehold.Kernel
    args: tuple[Any, ...]
    grid: tuple[int, ...]
    block: tuple[int, ...]

    def issue(self, stream: leasehold.Stream) -> None:
        stream.launch(self.kernel, self.args, grid=self.grid, block=self.block)


class LeaseholdGraph(GraphRunner):
    """A captured program of one device: a recording, which is updated before its launch.

    An update puts one allocation in another's place everywhere. So a program whose inputs are not
    allocations of their own is launched kernel by kernel.
    """

    def __init__(self, linear: Any, input_uops: tuple[Any, ...] = ()) -> None:
        super().__init__(linear, input_uops)
        self.graph: leasehold.Graph | None = None
        self.nodes: list[int] = []
        # What the graph was recorded or updated with last.
        self.numbers: dict[int, tuple[int, ...]] = {}
        self.shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]] = {}
        self.inputs: dict[int, leasehold.Buffer] = {}
        replaced = [(j, p, slot) for j, places in enumerate(self.uop_replace) for p, slot in places]
        self.slots = {slot: self.calls[j][0] for j, _, slot in replaced}
        given = {(j, p) for j, p, _ in replaced}
        calls = enumerate(self.calls)
        fixed = [b.base for j, (_, _, bufs, _) in calls for p, b in enumerate(bufs) if (j, p) not in given]
        self.fixed = {id(b): b for b in fixed}
        # An update cannot tell apart inputs of several devices, and parts of inputs.
        arguments = [u for call in self.linear.src for u in call.src[1:] if u.op is not Ops.PARAM]
        self.fit = all(self.slots[slot] == self.calls[j][0] for j, _, slot in replaced) and not any(
            u.op is Ops.PARAM and u.addrspace != AddrSpace.ALU for a in arguments for u in a.toposort()
        )

    def _launches(self, buffers: list[Any], var_vals: dict[str, int]) -> list[Launch]:
        """The launches with these inputs and numbers."""
        all_launches = []
        for j, ((dev_idx, ast, bufs, _), runtime) in enumerate(zip(self.calls, self.runtimes)):
            bufs = list(bufs)
            for position, slot in self.uop_replace[j]:
                bufs[position] = buffers[slot][dev_idx]
            operands = [bufs[i].ensure_allocated()._buf for i in ast.arg.globals]
            grid, block = self._shape(j, var_vals)
            all_launches.append(Launch(runtime.kernel, (*operands, *self._numbers(j, var_vals)), grid, block))
        return all_launches

    def _numbers(self, j: int, var_vals: dict[str, int]) -> tuple[int, ...]:
        _, ast, _, own = self.calls[j]
        return tuple(ast.arg.vals({**var_vals, **own}))

    def _shape(self, j: int, var_vals: dict[str, int]) -> tuple[tuple[int, ...], tuple[int, ...]]:
        _, ast, _, own = self.calls[j]
        grid, block = ast.arg.launch_dims({**var_vals, **own})
        return tuple(grid), tuple(block or (1, 1, 1))

    def _allocations(self, buffers: list[Any]) -> dict[int, leasehold.Buffer] | None:
        """The inputs' allocations by slot, or None if an update could not tell them apart."""
        if not self.fit:
            return None
        used = {slot: buffers[slot][dev_idx] for slot, dev_idx in self.slots.items()}
        if any(b._base is not None for b in used.values()):
            return None
        bases = {id(b) for b in used.values()}
        if len(bases) < len(used) or not self.fixed.keys().isdisjoint(bases):
            return None
        return {slot: b.ensure_allocated()._buf for slot, b in used.items()}

    def __call__(self, input_uops: tuple[Any, ...], var_vals: dict[str, int], wait: bool = False) -> float | None:
        dev: LeaseholdDevice = self.runtimes[0].dev
        inputs = [u.buffer for u in input_uops]
        buffers = [b.bufs if isinstance(b, MultiBuffer) else _Always(b) for b in inputs]
        allocations = self._allocations(buffers)
        if allocations is None:
            launches = self._launches(buffers, var_vals)
            return dev.run(lambda: [launch.issue(dev.stream) for launch in launches], wait)
        numbers = {j: self._numbers(j, var_vals) for j in self.var_vals_replace}
        shapes = {j: self._shape(j, var_vals) for j in self.launch_dims_replace}
        if self.graph is None or any(shapes[j][1] != block for j, (_, block) in self.shapes.items()):
            self._record(dev, self._launches(buffers, var_vals))
        else:
            self._update(self.graph, numbers, shapes, allocations)
        self.numbers, self.shapes, self.inputs = numbers, shapes, allocations
        graph = self.graph
        assert graph is not None
        return dev.run(lambda: graph.launch(dev.stream), wait)

    def _record(self, dev: LeaseholdDevice, launches: list[Launch]) -> None:
        self.graph, self.nodes = None, []
        with dev.leasehold.record() as stream:
            for launch in launches:
                self.nodes.append(stream.next_node)
                launch.issue(stream)
        self.graph = stream.graph

    def _update(
        self,
        graph: leasehold.Graph,
        numbers: dict[int, tuple[int, ...]],
        shapes: dict[int, tuple[tuple[int, ...], tuple[int, ...]]],
        allocations: dict[int, leasehold.Buffer],
    ) -> None:
        new_numbers = {self.nodes[j]: new for j, new in numbers.items() if new != self.numbers[j]}
        grids = {self.nodes[j]: grid for j, (grid, _) in shapes.items() if grid != self.shapes[j][0]}
        moved = [(self.inputs[slot], new) for slot, new in allocations.items() if new is not self.inputs[slot]]
        if new_numbers or grids or moved:
            graph.update(numbers=new_numbers, grids=grids, buffers=moved)


class _Always:
    """The one buffer of each device."""

    def __init__(self, buffer: Any) -> None:
        self.buffer = buffer

    def __getitem__(self, _: int) -> Any:
        return self.buffer


class LeaseholdDevice(Compiled):
    """tinygrad's device `LEASEHOLD`: a CUDA device of Leasehold's, a simulated one too."""

    def __init__(self, device: str) -> None:
        _, _, ordinal = device.partition(":")
        self.leasehold = leasehold.Device(_name(int(ordinal or 0)))
        self.stream = leasehold.Stream(self.leasehold, name=device)
        # Memory that is freed is the stream's again at once, as tinygrad's own allocator has it.
        self.memory = leasehold.Allocator(self.leasehold, stream=self.stream)
        self.options = _headers()
        capability = self.leasehold.compute_capability
        if capability is None:
            raise UnsupportedError(f"{self.leasehold.name} has no compute capability")
        allocator = LeaseholdAllocator(self)
        arch = "sm_%d%d" % capability
        super().__init__(device, allocator, [LeaseholdRenderer], LeaseholdProgram, LeaseholdGraph, arch=arch)

    def count(self) -> int:
        kind, _, _ = self.leasehold.name.partition(":")
        return sum(name.startswith(f"{kind}:") for name in leasehold.devices())

    def synchronize(self) -> None:
        self.stream.synchronize()
        _raise_races()

    def run(self, issue: Callable[[], object], wait: bool) -> float | None:
        """Gives work to the stream. Returns its seconds on the device if they are waited for."""
        if not wait:
            issue()
            return None
        start, end = (leasehold.Event(self.leasehold, timing=True) for _ in range(2))
        self.stream.record(start)
        issue()
        self.stream.record(end)
        return end.elapsed_since(start)


def _register() -> None:
    """Lets tinygrad find the device by its name."""
    module = types.ModuleType("tinygrad.runtime.ops_leasehold")
    setattr(module, "LeaseholdDevice", LeaseholdDevice)
    sys.modules[module.__name__] = module


if __name__ != "__main__":
    _register()
else:
    # Workers of tinygrad import the classes by the package's name.
    importlib.import_module("leasehold.tinygrad")
    if len(sys.argv) < 2:
        sys.exit("usage: python -m leasehold.tinygrad PROGRAM [ARGUMENT…]")
    del sys.argv[0]
    sys.path[0] = os.path.dirname(os.path.abspath(sys.argv[0]))
    runpy.run_path(sys.argv[0], run_name="__main__")
