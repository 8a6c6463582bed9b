"""Random programs of buffers, views, exports, frees, threads and streams, against a model.

The model of memory is a NumPy array of bytes, and that of a buffer is a view of it. A program runs
its steps on several threads, one after the other. Consumers' streams exist on simulated devices.
"""

from __future__ import annotations

import gc
import os
import sys
import threading
import unittest
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Callable, Optional

sys.path.insert(0, os.path.join(os.path.dirname(os.path.abspath(__file__)), os.pardir, "core"))

import leasehold
import numpy as np
import test_simulated
from capsules import Consumer
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule, run_state_machine_as_test
from leasehold import _native
from strategies import NUMPYS, TYPES, bits, budget, laid, layouts, number, place, random_array, seeds

THREADS = ThreadPoolExecutor(3)
SIMULATED = ["sim-cuda:0", "sim-cuda:1"] if _native.SIMULATED else []
ALLOCATORS = {
    device: leasehold.Allocator(device, budget="64MiB") for device in ["cpu:0", *SIMULATED]
}
picks = st.integers(0, 1 << 20)
# Few types and shapes, so that buffers fit each other.
names = st.sampled_from(
    [name for name in ("uint8", "int16", "float32", "complex64", "bool", "bfloat16") if name in TYPES]
)
shapes = st.sampled_from([(4, 4), (16,), (2, 2, 4), (8,), (4,), (2, 2), (3,), (), (0,), (2, 0, 3)])


class Memory:
    """The model of a buffer's memory."""

    def __init__(self, device: str, raw: np.ndarray[Any, Any]) -> None:
        self.device, self.raw = device, raw
        self.freed, self.exports = False, 0
        # Whether device memory is used by imports; if not, by consumers' streams. No import hears of them.
        self.imported = False
        # The consumer's stream that used it last. Its work comes before another consumer's: they order themselves.
        self.last: Optional[test_simulated.Stream] = None


class Held:
    """A buffer, and the view of the model's memory that it must be."""

    def __init__(self, buffer: leasehold.Buffer, name: str, memory: Memory, view: np.ndarray[Any, Any]) -> None:
        self.buffer, self.name, self.memory, self.view = buffer, name, memory, view

    @property
    def is_dense(self) -> bool:
        return self.view.flags.c_contiguous


class Export:
    """An array, a view of memory or a tensor that another library made of a buffer."""

    def __init__(self, of: Held, what: Any, stream: Optional[test_simulated.Stream] = None) -> None:
        self.memory, self.view, self.name, self.what, self.stream = of.memory, of.view, of.name, what, stream


def model_of(raw: np.ndarray[Any, Any], name: str, shape: tuple[int, ...], offset: int) -> np.ndarray[Any, Any]:
    count = int(np.prod(shape, dtype=np.int64))
    dtype = TYPES[name]
    return raw[offset : offset + count * dtype.itemsize].view(dtype).reshape(shape)


class Programs(RuleBasedStateMachine):
    streams: list[test_simulated.Stream] = []

    def __init__(self) -> None:
        super().__init__()
        self.held: list[Held] = []
        self.exports: list[Export] = []
        self.turn = 0

    def do(self, step: Callable[[], Any]) -> Any:
        """Runs a step on one thread after the other."""
        self.turn += 1
        return step() if self.turn % 2 else THREADS.submit(step).result()

    def pick(self, at: int) -> Held:
        return self.held[at % len(self.held)]

    def refused(self, error: type[BaseException], step: Callable[[], Any]) -> None:
        try:
            self.do(step)
        except error:
            return
        raise AssertionError(f"no {error.__name__}")

    def keep(self, buffer: leasehold.Buffer, device: str, values: np.ndarray[Any, Any], name: str) -> None:
        raw = np.frombuffer(bits(values), np.uint8).copy()
        view = model_of(raw, name, values.shape, 0)
        self.held.append(Held(buffer, name, Memory(device, raw), view))
        del self.held[:-12]

    # ---- buffers come

    @rule(device=st.sampled_from(["cpu:0", *SIMULATED]), shape=shapes, name=names)
    def zeros(self, device: str, shape: tuple[int, ...], name: str) -> None:
        buffer = self.do(lambda: leasehold.Device(device).zeros(shape, name))
        self.keep(buffer, device, np.zeros(shape, TYPES[name]), name)

    @rule(device=st.sampled_from(["cpu:0", *SIMULATED]), shape=shapes, name=names, seed=seeds, data=st.data())
    def upload(self, device: str, shape: tuple[int, ...], name: str, seed: int, data: Any) -> None:
        values = random_array(seed, shape, name)
        source = place(values, data.draw(layouts(len(shape))))
        buffer = self.do(lambda: leasehold.Device(device).upload(source))
        source[...] = np.zeros_like(source)  # the bytes were taken
        self.keep(buffer, device, values, name)

    @rule(shape=shapes, name=st.sampled_from(["uint8", "int16", "float32"]), seed=seeds, data=st.data())
    def of_another_library(self, shape: tuple[int, ...], name: str, seed: int, data: Any) -> None:
        turn, _, _ = data.draw(layouts(len(shape)))
        ours, model = (laid(shape, TYPES[name], turn, 0) for _ in range(2))
        for array in (ours, model):
            array[...] = random_array(seed, shape, name)
        buffer = self.do(lambda: leasehold.from_dlpack(ours))
        self.held.append(Held(buffer, name, Memory("cpu:0", model), model))

    @precondition(lambda self: self.held)
    @rule(at=picks, name=names, shape=st.none() | shapes, offset=st.integers(0, 40))
    def view(self, at: int, name: str, shape: Optional[tuple[int, ...]], offset: int) -> None:
        of = self.pick(at)
        step = lambda: of.buffer.view(name, shape, offset=offset)  # noqa: E731
        if of.memory.freed:
            return self.refused(leasehold.FreedError, step)
        size, nbytes = TYPES[name].itemsize, of.view.nbytes
        left = nbytes - offset
        count = left // size if shape is None else int(np.prod(shape, dtype=np.int64))
        begin = of.view.__array_interface__["data"][0] - of.memory.raw.__array_interface__["data"][0] if nbytes else 0
        valid = of.is_dense and left >= 0 and (shape is not None or left % size == 0) and count * size <= left
        if not valid:
            return self.refused(leasehold.InvalidArgumentError, step)
        if (begin + offset) % size or not nbytes:
            return None  # refused by where the memory's beginning lies, which the model does not know
        flat = of.view.reshape(-1).view(np.uint8)
        dims = (count,) if shape is None else shape
        view = model_of(flat, name, dims, offset)
        try:
            buffer = self.do(step)
        except leasehold.InvalidArgumentError as error:
            # A part of a buffer may begin anywhere in its memory.
            assert "do not begin" in str(error), error
            return None
        self.held.append(Held(buffer, name, of.memory, view))
        return None

    # ---- contents change

    @precondition(lambda self: self.held)
    @rule(at=picks, seed=seeds)
    def fill(self, at: int, seed: int) -> None:
        of = self.pick(at)
        value = number(of.name, seed)
        if value is None:
            return self.refused(leasehold.InvalidArgumentError, lambda: of.buffer.fill(1))
        if of.memory.freed:
            return self.refused(leasehold.FreedError, lambda: of.buffer.fill(value))
        self.do(lambda: of.buffer.fill(value))
        of.view[...] = value
        return None

    @precondition(lambda self: self.held)
    @rule(at=picks, seed=seeds, data=st.data())
    def copy_from_an_array(self, at: int, seed: int, data: Any) -> None:
        of = self.pick(at)
        values = random_array(seed, of.view.shape, of.name)
        source = place(values, data.draw(layouts(values.ndim)))
        if of.memory.freed:
            return self.refused(leasehold.FreedError, lambda: of.buffer.copy_from(source))
        self.do(lambda: of.buffer.copy_from(source))
        of.view[...] = values
        return None

    @precondition(lambda self: self.held)
    @rule(to=picks, at=picks, backwards=st.booleans())
    def copy_a_buffer(self, to: int, at: int, backwards: bool) -> None:
        target, source = self.pick(to), self.pick(at)
        if backwards:
            step = lambda: source.buffer.copy_to(target.buffer)  # noqa: E731
        else:
            step = lambda: target.buffer.copy_from(source.buffer)  # noqa: E731
        if target.memory.freed or source.memory.freed:
            return self.refused(leasehold.FreedError, step)
        shapes_fit = target.view.shape == source.view.shape or 1 in (target.view.ndim, source.view.ndim)
        types_fit = target.name == source.name or "uint8" in (target.name, source.name)
        if not (shapes_fit and types_fit and target.view.nbytes == source.view.nbytes):
            return self.refused(leasehold.InvalidArgumentError, step)
        taken = np.frombuffer(source.view.tobytes(), target.view.dtype)
        try:
            self.do(step)
        except leasehold.InvalidArgumentError as error:
            # A device copies no range onto itself.
            shares = target.memory is source.memory and target.memory.device != "cpu:0"
            assert shares and "overlap" in str(error), error
            return None
        target.view[...] = taken.reshape(target.view.shape)
        return None

    # ---- contents are seen

    @precondition(lambda self: self.held)
    @rule(at=picks, data=st.data())
    def copy_to_an_array(self, at: int, data: Any) -> None:
        of = self.pick(at)
        target = place(np.zeros_like(of.view), data.draw(layouts(of.view.ndim)))
        if of.memory.freed:
            return self.refused(leasehold.FreedError, lambda: of.buffer.copy_to(target))
        self.do(lambda: of.buffer.copy_to(target))
        assert bits(target) == of.view.tobytes()
        return None

    @precondition(lambda self: self.held)
    @rule(at=picks, device=st.sampled_from(["cpu:0", *SIMULATED]))
    def copy_to_a_device(self, at: int, device: str) -> None:
        of = self.pick(at)
        if of.memory.freed:
            return self.refused(leasehold.FreedError, lambda: of.buffer.to(device))
        copied = self.do(lambda: of.buffer.to(device))
        assert (copied.shape, copied.dtype) == (of.view.shape, of.name)
        self.keep(copied, device, of.view, of.name)
        return None

    @precondition(lambda self: self.held)
    @rule(at=picks)
    def tobytes(self, at: int) -> None:
        of = self.pick(at)
        if of.memory.freed:
            return self.refused(leasehold.FreedError, of.buffer.tobytes)
        assert self.do(of.buffer.tobytes) == of.view.tobytes()
        return None

    # ---- exports

    @precondition(lambda self: self.held and len(self.exports) < 8)
    @rule(at=picks, how=st.sampled_from(["asarray", "dlpack", "memoryview", "again"]), stream=st.integers(0, 3))
    def export(self, at: int, how: str, stream: int) -> None:
        before = len(self.exports)
        self.make_an_export(self.pick(at), how, stream)
        if len(self.exports) > before:
            self.write(self.exports[-1], at)

    def make_an_export(self, of: Held, how: str, stream: int) -> None:
        make: Any
        if of.memory.device != "cpu:0":
            if how == "memoryview" or how == "asarray":
                make = memoryview if how == "memoryview" else np.asarray
                wrong = leasehold.FreedError if of.memory.freed else leasehold.ExportError
                return self.refused(wrong, lambda: make(of.buffer))
            return self.export_on_a_stream(of, how, stream)
        make = {"asarray": np.asarray, "dlpack": np.from_dlpack, "memoryview": memoryview}
        make["again"] = leasehold.from_dlpack
        step = lambda: make[how](of.buffer)  # noqa: E731
        if of.memory.freed:
            return self.refused(leasehold.FreedError, step)
        if of.name not in NUMPYS and how != "again":
            return self.refused((BufferError, RuntimeError), step)  # type: ignore[arg-type]
        self.exports.append(Export(of, self.do(step)))
        of.memory.exports += 1
        return None

    def export_on_a_stream(self, of: Held, how: str, stream: int) -> None:
        if of.memory.freed:
            return self.refused(leasehold.FreedError, lambda: of.buffer.__dlpack__(stream=1))
        if of.memory.exports == 0:
            # The streams are the first device's.
            of.memory.imported = how == "again" or of.memory.device != "sim-cuda:0"
        if of.memory.imported:
            self.exports.append(Export(of, self.do(lambda: leasehold.from_dlpack(of.buffer))))
            of.memory.exports += 1
            return None
        while len(self.streams) < 4:
            self.streams.append(test_simulated.Stream())
        theirs = self.streams[stream]
        tensor = self.do(lambda: Consumer(of.buffer.__dlpack__(stream=theirs.handle)))
        self.exports.append(Export(of, tensor, theirs))
        of.memory.exports += 1
        return None

    @precondition(lambda self: self.exports)
    @rule(at=picks, seed=seeds, writes=st.booleans())
    def use_an_export(self, at: int, seed: int, writes: bool) -> None:
        export = self.exports[at % len(self.exports)]
        if writes:
            self.write(export, seed)
        self.read(export)

    def take_turn(self, export: Export) -> None:
        """Lets the stream wait for another consumer that used the memory last, and still has it."""
        last, stream = export.memory.last, export.stream
        if stream is not None and last is not None and last is not stream:
            self.do(lambda: last.before(stream.handle))
        export.memory.last = stream

    def write(self, export: Export, seed: int) -> None:
        view, stream = export.view, export.stream
        value = number(export.name, seed)
        if not view.size or value is None:
            return
        if stream is not None:
            byte = seed % (2 if export.name == "bool" else 256)
            address, size = export.what.tensor.data, view.nbytes
            self.take_turn(export)
            self.do(lambda: stream.fill(address, byte, size))
            view.reshape(-1).view(np.uint8)[...] = byte
            return
        if isinstance(export.what, leasehold.Buffer):
            self.do(lambda: export.what.fill(value))
        else:
            array = np.asarray(export.what)
            if not array.flags.writeable:
                return  # NumPy before 2.1 writes to no tensor of DLPack
            array[...] = value
        view[...] = value

    def read(self, export: Export) -> None:
        view, stream = export.view, export.stream
        if stream is not None:
            if view.size:
                address, size = export.what.tensor.data, view.nbytes
                self.take_turn(export)
                assert self.do(lambda: stream.read(address, size)) == view.tobytes()
        elif isinstance(export.what, leasehold.Buffer):
            assert self.do(export.what.tobytes) == view.tobytes()
        else:
            found = np.asarray(export.what)
            assert found.shape == view.shape and found.tobytes() == view.tobytes()

    @precondition(lambda self: self.exports)
    @rule(at=picks)
    def end_an_export(self, at: int) -> None:
        export = self.exports.pop(at % len(self.exports))
        export.memory.exports -= 1
        what, export.what = export.what, None
        if isinstance(what, Consumer):
            self.do(what.delete)
            if not any(e.memory is export.memory and e.stream is export.stream for e in self.exports):
                # From here on the buffer knows of the stream's work.
                export.memory.last = None if export.memory.last is export.stream else export.memory.last
        elif isinstance(what, memoryview):
            what.release()
        elif isinstance(what, leasehold.Buffer):
            self.do(what.free)

    # ---- buffers go

    @precondition(lambda self: self.held)
    @rule(at=picks, rarely=st.integers(0, 3))
    def free(self, at: int, rarely: int) -> None:
        of = self.pick(at)
        if rarely:
            return
        if of.memory.exports and not of.memory.freed:
            self.refused(leasehold.ExportError, of.buffer.free)
            assert not of.buffer.freed
        else:
            self.do(of.buffer.free)
            of.memory.freed = True
            assert of.buffer.freed

    @precondition(lambda self: self.held)
    @rule(at=picks)
    def forget(self, at: int) -> None:
        self.held.pop(at % len(self.held))

    @invariant()
    def buffers_describe_themselves(self) -> None:
        for of in self.held:
            b = of.buffer
            assert (b.shape, b.dtype, b.nbytes) == (of.view.shape, of.name, of.view.nbytes)
            assert b.freed == of.memory.freed

    def teardown(self) -> None:
        for of in self.held:
            if not of.memory.freed:
                assert of.buffer.tobytes() == of.view.tobytes()
        for export in self.exports:
            if isinstance(export.what, Consumer):
                export.what.delete()
        self.exports.clear()
        self.held.clear()
        if SIMULATED and self.streams:
            for device in SIMULATED:
                leasehold.Device(device).synchronize()
            races = self.streams[0].races()
            assert not races, races


class Model(unittest.TestCase):
    def test_programs(self) -> None:
        run_state_machine_as_test(Programs, settings=budget(0.15, 250, stateful_step_count=40))
        gc.collect()

    @budget(0.05, 40)
    @given(
        programs=st.lists(st.lists(st.tuples(st.integers(0, 7), seeds), max_size=25), min_size=2, max_size=4),
        device=st.sampled_from(["cpu:0", *SIMULATED[:1]]),
    )
    def test_threads(self, programs: Any, device: str) -> None:
        """Threads with buffers of their own, and one that all of them use and free."""
        allocator = ALLOCATORS[device]
        before = allocator.statistics()["blocks"]
        shared = [allocator.zeros(256)]
        failures: list[BaseException] = []
        together = threading.Barrier(len(programs))

        def work(program: Any) -> None:
            try:
                own: list[tuple[leasehold.Buffer, np.ndarray[Any, Any]]] = []
                together.wait()
                for step, seed in program:
                    if step < 2 or not own:
                        values = random_array(seed, (seed % 3000,), "uint16")
                        own.append((allocator.upload(values[::-1]), values[::-1].copy()))
                        continue
                    at = seed % len(own)
                    buffer, values = own[at]
                    if step == 2:
                        assert buffer.tobytes() == values.tobytes()
                    elif step == 3:
                        buffer.fill(seed % 65536)
                        values[...] = seed % 65536
                    elif step == 4:
                        assert leasehold.from_dlpack(buffer).tobytes() == values.tobytes()
                    elif step == 5:
                        buffer.free()
                        own.pop(at)
                    else:
                        use(shared[0], step, seed)
                for buffer, values in own:
                    assert buffer.tobytes() == values.tobytes()
            except BaseException as error:
                failures.append(error)

        def use(buffer: leasehold.Buffer, step: int, seed: int) -> None:
            try:
                if step == 6:
                    buffer.fill(seed % 256)
                    found = set(buffer.tobytes())
                    # A fill of another thread comes before or after, never in between.
                    assert len(found) == 1, found
                elif seed % 3:
                    leasehold.from_dlpack(buffer).copy_to(bytearray(256))
                else:
                    buffer.free()
                    shared[0] = allocator.zeros(256)
            except (leasehold.FreedError, leasehold.ExportError):
                pass

        threads = [threading.Thread(target=work, args=(program,)) for program in programs]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if failures:
            raise failures[0]
        shared.clear()
        if device != "cpu:0":
            leasehold.Device(device).synchronize()
        self.assertEqual(allocator.statistics()["blocks"], before)


if __name__ == "__main__":
    unittest.main()
