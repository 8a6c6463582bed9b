"""Streams, events, kernels, graphs, and what `await` does with them: on the CPU, and on a simulated
CUDA device in a build with the feature `sim`."""

from __future__ import annotations

import array
import asyncio
import contextlib
import ctypes
import gc
import os
import pathlib
import random
import signal
import subprocess
import sys
import tempfile
import threading
import time
import unittest
import weakref
from collections.abc import Callable
from typing import Any

import leasehold
from leasehold import _native

TILE = 256

SOURCE = """
#include "leasehold_runtime.h"
#include <string.h>

/* y += a * x, by tiles of 256. */
void saxpy(const leasehold_tile *tile) {
    const float *x = (const float *)(uintptr_t)tile->bindings[0].address;
    float *y = (float *)(uintptr_t)tile->bindings[1].address;
    struct { float a; uint32_t count; } p;
    uint32_t i = tile->tile[0] * 256, end = i + 256;
    memcpy(&p, tile->params, sizeof p);
    for (; i < end && i < p.count; i++) y[i] += p.a * x[i];
}

/* Writes its parameters, as a struct of C lies, to the first bytes of the buffer. */
void numbers(const leasehold_tile *tile) {
    memcpy((void *)(uintptr_t)tile->bindings[0].address, tile->params, tile->params_bytes);
}
"""

CUDA = """
extern "C" __global__ void saxpy(const float* x, float* y, float a, unsigned count) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < count) y[i] += a * x[i];
}
struct Numbers { signed char a; double b; short c; };
extern "C" __global__ void numbers(Numbers* out, Numbers given) { *out = given; }
"""


# A kernel with a tensor map, and kernels that CUDA alone has.
MAPPED = """
struct __align__(64) Map { unsigned words[32]; };
extern "C" __global__ void numbers(unsigned* out, const __grid_constant__ Map map, unsigned n) {
    out[0] = n;
}
"""
TOGETHER = """
extern "C" __global__ void pairs(unsigned* out) {
    __shared__ unsigned row;
    row = blockIdx.y;
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
    unsigned other = 1 - __clusterRelativeBlockRank();
    out[blockIdx.x + 2 * blockIdx.y] = *(unsigned*)__cluster_map_shared_rank(&row, other);
    __cluster_barrier_arrive();
    __cluster_barrier_wait();
}
extern "C" __global__ void crew(unsigned* arrived) {
    if (threadIdx.x + threadIdx.y != 0) return;
    atomicAdd(arrived, 1u);
    while (*(volatile unsigned*)arrived < gridDim.x) { }
}
extern "C" __global__ void early(const float* x, float* y, double a, float b, unsigned early) {
    asm volatile("griddepcontrol.wait;" ::: "memory");
    *y = a + b * *x + 100 * early;
}
"""


class Numbers(ctypes.Structure):
    _fields_ = [("a", ctypes.c_int8), ("b", ctypes.c_double), ("c", ctypes.c_int16)]


def compiled() -> ctypes.CDLL:
    folder = tempfile.TemporaryDirectory()
    source = pathlib.Path(folder.name, "kernels.c")
    source.write_text(SOURCE)
    library = source.with_suffix(".so")
    include = f"-I{leasehold.include_path()}"
    command = ["cc", "-O1", "-shared", "-fPIC", include, str(source), "-o", str(library)]
    subprocess.run(command, check=True)
    loaded = ctypes.CDLL(str(library))
    # It is mapped: the file may go.
    folder.cleanup()
    return loaded


class Runtime:
    """The tests, for a device that a subclass names."""

    NAME: str
    library: ctypes.CDLL
    device: leasehold.Device
    saxpy: leasehold.Kernel

    @classmethod
    def setUpClass(cls) -> None:
        Runtime.library = getattr(Runtime, "library", None) or compiled()
        cls.device = leasehold.Device(cls.NAME)
        kinds = ["read", "read_write", "float32", "uint32"]
        cls.saxpy = leasehold.Kernel(
            "saxpy", kinds, cuda=CUDA, cpu=cls.library.saxpy, trusted=True
        )

    def floats(self, value: float, count: int = 1000) -> leasehold.Buffer:
        buffer = self.device.empty(count, "float32")
        buffer.fill(value)
        return buffer

    def values(self, buffer: leasehold.Buffer) -> set[float]:
        return set(memoryview(buffer.tobytes()).cast("f"))

    def launch(self, stream: leasehold.Stream, x: Any, y: Any, a: float) -> None:
        count = x.size
        stream.launch(self.saxpy, [x, y, a, count], grid=-(-count // TILE), block=TILE)

    def blocked(self, stream: leasehold.Stream) -> threading.Event:
        """Stops a stream until the event is set."""
        go = threading.Event()
        stream.host_call(lambda: go.wait(30) and None)
        return go

    # ---- streams and kernels

    def test_a_kernel_runs_and_the_buffers_order_streams(self) -> None:
        x, y = self.floats(2.0), self.floats(1.0)
        one, other = leasehold.Stream(self.device, name="one"), leasehold.Stream(self.NAME)
        self.assertEqual((one.name, other.name, one.device), ("one", None, self.device))
        for stream in (one, other, one, other):
            self.launch(stream, x, y, 3.0)
        self.assertEqual(self.values(y), {25.0})
        one.fill(x, 1.0)
        other.copy(y, x)
        other.synchronize()
        self.assertTrue(other.query())
        self.assertEqual(self.values(y), {1.0})

    def test_the_numbers_lie_as_in_a_struct(self) -> None:
        kernel = leasehold.Kernel(
            "numbers",
            ("write", "int8", "float64", "int16"),
            cuda=CUDA,
            cpu=self.library.numbers,
            trusted=True,
        )
        self.assertEqual(kernel.args, ("write", "int8", "float64", "int16"))
        out = self.device.empty(ctypes.sizeof(Numbers))
        with leasehold.Stream(self.device) as stream:
            stream.launch(kernel, (out, -3, 0.5, 700), grid=1)
        got = Numbers.from_buffer_copy(out.tobytes())
        self.assertEqual((got.a, got.b, got.c), (-3, 0.5, 700))

    def test_views_are_operands(self) -> None:
        x, y = self.floats(1.0, 512), self.floats(0.0, 512)
        with leasehold.Stream(self.device) as stream:
            self.launch(stream, x.view(shape=256), y.view(shape=256, offset=1024), 2.0)
        self.assertEqual(list(memoryview(y.tobytes()).cast("f")), [0.0] * 256 + [2.0] * 256)

    def test_a_kernel_needs_the_callers_word(self) -> None:
        for trusted in ({}, {"trusted": False}, {"trusted": None}, {"trusted": 1}):
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "trusted=True"):
                leasehold.Kernel("k", ["read"], cpu=self.library.saxpy, **trusted)

    def test_kernels_that_are_none(self) -> None:
        make = lambda *a, **k: leasehold.Kernel(*a, trusted=True, **k)
        for text, call in {
            "has no code": lambda: make("k", ["read"]),
            "takes its buffers first": lambda: make("k", ["int32", "read"], cpu=8),
            "no kind of argument": lambda: make("k", ["reads"], cpu=8),
            "list or a tuple": lambda: make("k", "read", cpu=8),
            "address is 0": lambda: make("k", ["read"], cpu=0),
            "function of ctypes": lambda: make("k", ["read"], cpu="saxpy"),
            "rule of overlaps": lambda: make("k", ["read"], cpu=8, overlap="some"),
            "align": lambda: make("k", ["read"], cpu=8, alignment=3),
            "name": lambda: make("", ["read"], cpu=8),
            "bindings": lambda: make("k", ["read"] * 31, cpu=8),
            "a tensor map behind": lambda: make("k", ["read", "int32", "tensor_map:0"], cpu=8),
            "no kind of argument; ": lambda: make("k", ["read", "tensor_map:x"], cpu=8),
            "no tensor map of binding 1": lambda: make("k", ["read", "tensor_map:1"], cpu=8),
            r"cluster of \[17, 1, 1\]": lambda: make("k", ["read"], cpu=8, cluster=17),
            "cannot read early": lambda: make("k", ["read"], cpu=8, reading_early=[0]),
            "cannot read 1 early": lambda: make(
                "k", ["read"], cpu=8, dependent_launch=True, reading_early=[1]
            ),
        }.items():
            with self.subTest(text), self.assertRaisesRegex(leasehold.InvalidArgumentError, text):
                call()

    def test_tensor_maps_that_are_none(self) -> None:
        make = leasehold.TensorMap
        for text, call in {
            "no elements of type int8": lambda: make("int8", [64], [64]),
            "tensorRank": lambda: make("float32", [64, 2], [64]),
            "more than 5 dimensions": lambda: make("float32", [64] * 6, [4] * 6),
            "boxDim": lambda: make("float32", [64], [3]),
            "globalStrides": lambda: make("float32", [64, 2], [64, 2], strides=[260]),
            "elementStrides": lambda: make("float32", [64], [64], steps=[9]),
            "no swizzle of 48": lambda: make("float32", [64], [64], swizzle=48),
            "no slices of 8": lambda: make("float32", [64], [64], interleave=8),
            "L2 promotion": lambda: make("float32", [64], [64], l2_promotion=1),
            "oobFill": lambda: make("uint32", [64], [64], fill_nan=True),
        }.items():
            with self.subTest(text), self.assertRaisesRegex(leasehold.InvalidArgumentError, text):
                call()
        for name in ("float16", "bfloat16", "tfloat32", "float32_ftz"):
            more = {"steps": [1, 1], "swizzle": 128, "l2_promotion": 256, "fill_nan": True}
            made = repr(make(name, [64, 2], [8, 2], **more))
            self.assertRegex(made, r"^TensorMap\(.*, strides \[(128|256)\], box \[8, 2\]\)$")

    def test_a_tensor_map_is_a_part_of_a_kernels_numbers(self) -> None:
        kinds = ["write", "tensor_map:0", "uint32"]
        kernel = leasehold.Kernel(
            "numbers", kinds, cpu=self.library.numbers, cuda=MAPPED, trusted=True
        )
        self.assertEqual(kernel.args, ("write", "tensor_map:0", "uint32"))
        out = self.device.zeros(64, "uint32")
        stream = leasehold.Stream(self.device)
        good = leasehold.TensorMap("uint32", [16, 4], [8, 4])
        stream.launch(kernel, [out, good, 7], grid=1)
        words = list(memoryview(out.tobytes()).cast("I"))
        # The CPU gets the description itself, and CUDA a form of its own.
        self.assertEqual(words[32] if self.NAME == "cpu:0" else words[0], 7)
        long = leasehold.TensorMap("uint32", [16, 5], [8, 4])
        with self.assertRaisesRegex(leasehold.InvalidArgumentError, "takes 320 bytes"):
            stream.launch(kernel, [out, long, 7], grid=1)
        with self.assertRaisesRegex(leasehold.ArgumentTypeError, "a TensorMap of its buffer 0"):
            stream.launch(kernel, [out, 7, 7], grid=1)
        stream.synchronize()

    def test_clusters_and_cooperative_launches(self) -> None:
        for more in ({"cluster": (1, 2)}, {"cooperative": True}):
            here = leasehold.Kernel(
                "alone", ["read"], cpu=self.library.saxpy, trusted=True, **more
            )
            with self.assertRaises(leasehold.UnsupportedError):
                here.prepare(self.device)
        if self.NAME == "cpu:0":
            with self.assertRaises(leasehold.UnsupportedError):
                self.saxpy.resident_blocks(self.device)
            return
        out = self.device.zeros(8, "uint32")
        stream = leasehold.Stream(self.device)
        pairs = leasehold.Kernel("pairs", ["write"], cuda=TOGETHER, cluster=(1, 2), trusted=True)
        stream.launch(pairs, [out], grid=(2, 4))
        self.assertEqual(list(memoryview(out.tobytes()).cast("I")), [1, 1, 0, 0, 3, 3, 2, 2])
        with self.assertRaisesRegex(leasehold.InvalidArgumentError, "not made of clusters"):
            stream.launch(pairs, [out], grid=(2, 3))
        crew = leasehold.Kernel(
            "crew", ["read_write"], cuda=TOGETHER, cooperative=True, trusted=True
        )
        most = crew.resident_blocks(self.device, block=(4, 2))
        large = crew.resident_blocks(self.device, block=1024, shared_bytes=1 << 15)
        self.assertGreater(most, large)
        stream.fill(out, 0)
        stream.launch(crew, [out], grid=5, block=(4, 2))
        self.assertEqual(list(memoryview(out.tobytes()).cast("I"))[0], 5)
        with self.assertRaisesRegex(leasehold.InvalidArgumentError, f"runs {most} of 8 threads"):
            stream.launch(crew, [out], grid=most + 1, block=(4, 2))

    def test_a_kernel_reads_early_what_its_graph_does_not_write(self) -> None:
        if self.NAME == "cpu:0":
            return
        kinds = ["read", "write", "float64", "float32"]
        early = leasehold.Kernel(
            "early", kinds, cuda=TOGETHER, dependent_launch=True, reading_early=[0], trusted=True
        )
        x, y = self.floats(2.0, 1), self.floats(0.0, 1)
        stream = leasehold.Stream(self.device)
        stream.launch(early, [x, y, 1.0, 3.0], grid=1)
        self.assertEqual(self.values(y), {7.0})
        for writes, wanted in ((False, 107.0), (True, 13.0)):
            with self.device.record() as recorded:
                if writes:
                    recorded.fill(x, 4.0)
                recorded.launch(early, [x, y, 1.0, 3.0], grid=1)
            recorded.graph.launch(stream)
            self.assertEqual(self.values(y), {wanted})

    def test_a_source_that_does_not_compile(self) -> None:
        if self.NAME == "cpu:0":
            kernel = leasehold.Kernel("k", ["read"], cuda=CUDA, trusted=True)
            with self.assertRaises(leasehold.UnsupportedError):
                kernel.prepare(self.device)
            return
        kernel = leasehold.Kernel("k", ["read"], cuda="a syntax error", trusted=True)
        with self.assertRaisesRegex(leasehold.CompileError, "error"):
            kernel.prepare(self.device)
        x = self.floats(1.0)
        with self.assertRaises(leasehold.CompileError):
            leasehold.Stream(self.device).launch(kernel, [x], grid=1)

    def test_launches_that_are_refused_leave_the_stream_as_it_was(self) -> None:
        stream = leasehold.Stream(self.device)
        x, y = self.floats(1.0), self.floats(1.0)
        freed = self.floats(1.0)
        freed.free()
        k, good = self.saxpy, [x, y, 1.0, 1000]
        refused = leasehold.InvalidArgumentError
        for error, call in [
            (refused, lambda: stream.launch(k, [x, y, 1.0], grid=1)),
            (refused, lambda: stream.launch(k, [x, 1.0, y, 1], grid=1)),
            (refused, lambda: stream.launch(k, [bytes(8), y, 1.0, 1], grid=1)),
            (refused, lambda: stream.launch(k, 5, grid=1)),
            (refused, lambda: stream.launch("k", good, grid=1)),
            (refused, lambda: stream.launch(k, [x, y, "1", 1], grid=1)),
            (refused, lambda: stream.launch(k, [x, y, 1.0, -1], grid=1)),
            (refused, lambda: stream.launch(k, [x, x, 1.0, 1], grid=1)),
            (refused, lambda: stream.launch(k, good, grid=-1)),
            (refused, lambda: stream.launch(k, good, grid=(1, 1, 1, 1))),
            (refused, lambda: stream.launch(k, good, grid=1, block=1 << 20)),
            (leasehold.FreedError, lambda: stream.launch(k, [freed, y, 1.0, 1], grid=1)),
            (TypeError, lambda: stream.launch(k, good)),
            (refused, lambda: stream.copy(x, self.floats(1.0, 3))),
            (refused, lambda: stream.copy(x, b"1")),
            (refused, lambda: stream.fill(x, "1")),
            (refused, lambda: stream.upload(x, b"1")),
            (refused, lambda: stream.wait(5)),
            (refused, lambda: stream.record(5)),
            (refused, lambda: stream.host_call(5)),
            (refused, lambda: stream.synchronize("soon")),
            (refused, lambda: leasehold.Stream("gpu")),
            (refused, lambda: leasehold.Stream(self.device, priority="high")),
            (leasehold.InvalidStateError, lambda: stream.graph),
            (leasehold.InvalidStateError, lambda: stream.next_node),
        ]:
            with self.subTest(), self.assertRaises(error):
                call()
        stream.launch(k, good, grid=4, block=TILE)
        stream.synchronize()
        self.assertEqual(self.values(y), {2.0})

    def test_a_buffer_of_another_device_is_refused(self) -> None:
        other = leasehold.Device("sim-cuda:1" if _native.SIMULATED else "cpu:0")
        if other == self.device:
            self.skipTest("there is no other device")
        x, y = other.zeros(4, "float32"), self.floats(0.0, 4)
        with self.assertRaises(leasehold.InvalidArgumentError):
            leasehold.Stream(self.device).launch(self.saxpy, [x, y, 1.0, 4], grid=1)

    def test_copies_between_devices(self) -> None:
        # The simulated driver knows no other backend's memory.
        other = leasehold.Device("sim-cuda:1" if self.NAME != "cpu:0" else "cpu:0")
        x, y = self.floats(3.0), other.zeros(1000, "float32")
        with leasehold.Stream(self.device) as stream:
            stream.copy(y, x)
        self.assertEqual(self.values(y), {3.0})
        y.fill(4.0)
        with leasehold.Stream(self.device) as stream:
            stream.copy(x, y)
        self.assertEqual(self.values(x), {4.0})

    def test_uploads_and_fills_of_all_widths(self) -> None:
        with leasehold.Stream(self.device) as stream:
            for dtype in ("uint8", "int16", "float32", "float64", "complex128"):
                buffer = self.device.empty(7, dtype)
                stream.fill(buffer, 1)
                want = self.device.empty(7, dtype)
                want.fill(1)
                self.assertEqual(buffer.tobytes(), want.tobytes())
                source = bytearray(os.urandom(buffer.nbytes))
                taken = bytes(source)
                stream.upload(buffer, source)
                source[:] = bytes(len(source))
                self.assertEqual(buffer.tobytes(), taken)

    def test_an_empty_buffer_is_an_operand(self) -> None:
        empty = self.device.empty(0, "float32")
        with leasehold.Stream(self.device) as stream:
            stream.fill(empty, 1.0)
            stream.copy(empty, self.device.empty(0, "float32"))
            stream.upload(empty, b"")
        self.assertEqual(asyncio.run(self.downloaded(empty)), b"")

    # ---- the host beside streams

    def test_the_host_waits_for_streams(self) -> None:
        x, y = self.floats(1.0), self.floats(0.0)
        stream = leasehold.Stream(self.device)
        go = self.blocked(stream)
        self.launch(stream, x, y, 5.0)
        self.assertFalse(stream.query())
        threading.Timer(0.05, go.set).start()
        self.assertEqual(self.values(y), {5.0})
        go = self.blocked(stream)
        self.launch(stream, x, y, 1.0)
        threading.Timer(0.05, go.set).start()
        x.fill(9.0)
        self.assertEqual(self.values(y), {6.0})
        self.launch(stream, x, y, 1.0)
        self.assertEqual(self.values(y), {15.0})

    def test_every_way_to_the_bytes_waits(self) -> None:
        ways: list[Any] = [
            lambda b: b.tobytes(),
            lambda b: b.to("cpu:0").tobytes(),
            lambda b: self.device.upload(b).tobytes(),
            lambda b: self.copied(b),
        ]
        if self.NAME == "cpu:0":
            ways += [
                lambda b: bytes(memoryview(b).cast("B")),
                lambda b: leasehold.from_dlpack(b).tobytes(),
            ]
        for way in ways:
            buffer = self.floats(0.0, 64)
            stream = leasehold.Stream(self.device)
            go = self.blocked(stream)
            stream.fill(buffer, 1.0)
            threading.Timer(0.02, go.set).start()
            self.assertEqual(set(memoryview(way(buffer)).cast("f")), {1.0})

    def copied(self, buffer: leasehold.Buffer) -> bytes:
        target = bytearray(buffer.nbytes)
        buffer.copy_to(memoryview(target).cast("f"))
        return bytes(target)

    def test_memory_that_work_uses_is_not_reused(self) -> None:
        stream = leasehold.Stream(self.device)
        for _ in range(8):
            go = self.blocked(stream)
            old = self.floats(1.0, 4096)
            stream.fill(old, 7.0)
            old.free()
            threading.Timer(0.01, go.set).start()
            new = [self.floats(0.0, 4096) for _ in range(4)]
            stream.synchronize()
            for buffer in new:
                self.assertEqual(self.values(buffer), {0.0})

    def test_a_wait_lets_the_host_call_have_the_interpreter(self) -> None:
        x = self.floats(1.0)
        for wait in (
            lambda s: s.synchronize(),
            lambda s: s.record().synchronize(),
            lambda s: x.synchronize(),
            lambda s: x.tobytes(),
            lambda s: x.fill(1.0),
            lambda s: x.copy_from(bytes(4000)),
            lambda s: s.download(x).result(),
        ):
            stream = leasehold.Stream(self.device)
            ran: list[int] = []
            for i in range(3):
                stream.host_call(lambda i=i: (time.sleep(0.005), ran.append(i)) and None)
                stream.fill(x, 1.0)
            wait(stream)
            stream.synchronize()
            self.assertEqual(ran, [0, 1, 2])

    def test_a_time_limit_and_a_signal_end_a_wait(self) -> None:
        stream = leasehold.Stream(self.device)
        event = leasehold.Event(self.device)
        go = self.blocked(stream)
        stream.record(event)
        for wait in (stream.synchronize, event.synchronize):
            with self.assertRaises(leasehold.TimeoutError):
                wait(timeout=0.01)

        class Interrupted(Exception):
            pass

        def interrupt(*_: Any) -> None:
            raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with self.assertRaises(Interrupted):
                stream.synchronize()
        finally:
            signal.signal(signal.SIGALRM, before)
            go.set()
        stream.synchronize()

    def interrupted(self, wait: Callable[[], object]) -> None:
        """Checks that a signal ends a wait long before the wait is over."""

        class Interrupted(Exception):
            pass

        def interrupt(*_: Any) -> None:
            raise Interrupted

        before = signal.signal(signal.SIGALRM, interrupt)
        begin = time.monotonic()
        try:
            signal.setitimer(signal.ITIMER_REAL, 0.05)
            with self.assertRaises(Interrupted):
                wait()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            signal.signal(signal.SIGALRM, before)
        self.assertLess(time.monotonic() - begin, 10.0)

    def test_a_signal_ends_the_waits_of_buffers_events_and_devices(self) -> None:
        x, other = self.floats(1.0, 16), self.floats(2.0, 16)
        imported = leasehold.from_dlpack(self.floats(1.0, 16))
        start, end = (leasehold.Event(self.device, timing=True) for _ in range(2))
        stream = leasehold.Stream(self.device)
        stream.record(start)
        go = self.blocked(stream)
        stream.fill(x, 3.0)
        stream.record(end)
        waits: dict[str, Callable[[], object]] = {
            "tobytes": x.tobytes,
            "synchronize": x.synchronize,
            "fill": lambda: x.fill(4.0),
            "copy_to": lambda: x.copy_to(bytearray(64)),
            "copy_from": lambda: x.copy_from(bytes(64)),
            "copy": lambda: other.copy_from(x),
            "to": lambda: x.to("cpu:0"),
            "device": self.device.synchronize,
            "elapsed": lambda: end.elapsed_since(start),
        }
        if self.NAME == "cpu:0":
            waits["memoryview"] = lambda: memoryview(x)
            stream.fill(imported, 3.0)
            waits["free"] = imported.free
        else:
            # The owner's stream is to wait for the work, which only the host can do.
            waits["stream"] = lambda: stream.fill(imported, 3.0)
        for name, wait in waits.items():
            with self.subTest(name):
                self.interrupted(wait)
        self.assertFalse(imported.freed)
        go.set()
        stream.synchronize()
        # What was given up was not done.
        self.assertEqual((self.values(x), self.values(other)), ({3.0}, {2.0}))

    def test_a_signal_ends_the_wait_for_memory(self) -> None:
        size = 48 << 20
        allocator = leasehold.Allocator(self.device, budget="64MiB")
        x = allocator.empty(size)
        stream = leasehold.Stream(self.device)
        go = self.blocked(stream)
        stream.fill(x, 1)
        del x
        self.interrupted(lambda: allocator.empty(size))
        begin = time.monotonic()
        with self.assertRaises(leasehold.OutOfMemoryError):
            allocator.empty(1 << 40)
        self.assertLess(time.monotonic() - begin, 10.0)
        threading.Timer(0.3, go.set).start()
        self.assertEqual(allocator.empty(size).nbytes, size)

    # ---- host calls

    def test_an_exception_fails_the_stream_and_no_other(self) -> None:
        x, y = self.floats(1.0), self.floats(1.0)

        def fail(what: str) -> None:
            raise ValueError(what)

        stream, sound = leasehold.Stream(self.device), leasehold.Stream(self.device)
        later: list[int] = []
        go = self.blocked(stream)
        stream.host_call(fail, "boom")
        stream.host_call(later.append, 1)
        go.set()
        with self.assertRaisesRegex(leasehold.FailedError, "fail.*raised ValueError: boom"):
            stream.synchronize()
        for call in (
            stream.query,
            lambda: self.launch(stream, x, y, 1.0),
            lambda: stream.host_call(later.append, 1),
            stream.__enter__().__exit__,
        ):
            with self.assertRaisesRegex(leasehold.FailedError, "boom"):
                call()
        self.launch(sound, x, y, 1.0)
        sound.synchronize()
        self.assertEqual((self.values(y), later), ({2.0}, []))

    def test_what_failed_work_was_to_write_is_handed_on(self) -> None:
        x = self.floats(1.0)
        stream = leasehold.Stream(self.device)
        go = threading.Event()

        def fail() -> None:
            go.wait(30)
            raise KeyboardInterrupt

        stream.host_call(fail)
        stream.fill(x, 2.0)
        go.set()
        with self.assertRaisesRegex(leasehold.FailedError, "KeyboardInterrupt"):
            stream.synchronize()
        with self.assertRaises(leasehold.FailedError):
            x.tobytes()
        with leasehold.Stream(self.device) as other:
            other.fill(x, 3.0)
        self.assertEqual(self.values(x), {3.0})
        # The device's own stream is as it was.
        self.assertEqual(self.values(self.floats(4.0)), {4.0})

    def test_an_overwrite_of_all_elements_makes_a_failed_buffer_sound(self) -> None:
        def broken(dtype: str = "float32") -> leasehold.Buffer:
            x = self.device.zeros(1000, dtype)
            stream = leasehold.Stream(self.device)
            go = self.blocked(stream)
            stream.host_call(lambda: 1 / 0)
            stream.fill(x, 9.0)
            go.set()
            with self.assertRaises(leasehold.FailedError):
                stream.synchronize()
            return x

        source = array.array("f", [2.0] * 1000)
        other = self.device.upload(source)
        for overwrite in (
            lambda x: x.fill(2.0),
            lambda x: x.copy_from(source),
            lambda x: x.copy_from(other),
            lambda x: other.copy_to(x),
            lambda x: x.view().copy_from(bytes(source)),
        ):
            x = broken()
            part = x.view("float32", 500)
            for refused in (
                x.tobytes,
                lambda: part.fill(2.0),
                lambda: part.copy_from(source[: 500]),
                lambda: x.copy_from(x),
            ):
                with self.assertRaisesRegex(leasehold.FailedError, "ZeroDivisionError"):
                    refused()
            overwrite(x)
            self.assertEqual(self.values(x), {2.0})
            with leasehold.Stream(self.device) as stream:
                stream.fill(part, 2.0)
        # A number of eight bytes is several operations of a device.
        x = broken("float64")
        x.fill(3.0)
        self.assertEqual(x.tobytes(), array.array("d", [3.0] * 1000).tobytes())

    def test_a_host_call_may_call_back(self) -> None:
        x = self.floats(0.0)
        stream, other = leasehold.Stream(self.device), leasehold.Stream(self.device)
        stream.host_call(lambda: other.fill(x, 3.0))
        stream.synchronize()
        self.assertEqual(self.values(x), {3.0})

        def waits() -> None:
            stream.synchronize(timeout=0.2)

        stream.host_call(waits)
        with self.assertRaisesRegex(leasehold.FailedError, "Error"):
            stream.synchronize()

    # ---- events

    def test_events(self) -> None:
        one, other = leasehold.Stream(self.device), leasehold.Stream(self.device)
        start, end = (leasehold.Event(self.device, timing=True) for _ in range(2))
        self.assertTrue(start.query() and start.timing)
        go = self.blocked(one)
        self.assertIs(one.record(start), start)
        ran: list[int] = []
        other.wait(start)
        other.host_call(ran.append, 1)
        other.wait(one)
        self.assertFalse(start.query())
        time.sleep(0.01)
        self.assertEqual(ran, [])
        go.set()
        other.record(end)
        end.synchronize()
        self.assertEqual(ran, [1])
        self.assertGreaterEqual(end.elapsed_since(start), 0.0)
        with self.assertRaisesRegex(leasehold.InvalidStateError, r"Event\(device, timing=True\)"):
            end.elapsed_since(one.record())
        with self.assertRaisesRegex(leasehold.InvalidStateError, r"Stream\.record"):
            end.elapsed_since(leasehold.Event(self.device, timing=True))
        with self.assertRaises(leasehold.InvalidArgumentError):
            end.elapsed_since(5)

    def test_errors_name_what_python_has(self) -> None:
        def said(call: Callable[[], object]) -> str:
            with self.assertRaises(leasehold.Error) as raised:
                call()
            text = str(raised.exception)
            self.assertNotIn("::", text)
            return text

        for timing, cure in ((False, "Event(device, timing=True)"), (True, "Stream.record")):
            start, end = (leasehold.Event(self.device, timing=timing) for _ in range(2))
            self.assertIn(cure, said(lambda: end.elapsed_since(start)))
        # Code that the device does not run.
        ptx = ".version 7.0\n.target sm_80\n.address_size 64\n.visible .entry k(.param .u64 x) { ret; }"
        kernel = leasehold.Kernel("k", ["read"], ptx=ptx, trusted=True)
        cure = "(cpu=)" if self.NAME == "cpu:0" else "(cuda=)"
        self.assertIn(cure, said(lambda: kernel.prepare(self.device)))

    # ---- graphs

    def recorded(self) -> tuple[Any, Any, int, leasehold.Graph]:
        x, y = self.floats(2.0), self.floats(0.0)
        with self.device.record() as stream:
            stream.fill(y, 1.0)
            node = stream.next_node
            self.launch(stream, x, y, 3.0)
        self.assertEqual(self.values(y), {0.0})
        return x, y, node, stream.graph

    def test_a_graph_is_what_was_recorded(self) -> None:
        x, y, node, graph = self.recorded()
        one, other = leasehold.Stream(self.device), leasehold.Stream(self.device)
        graph.launch(one)
        self.assertEqual(self.values(y), {7.0})
        x.fill(1.0)
        graph.launch(other)
        self.assertEqual(self.values(y), {4.0})
        self.assertEqual(graph.launches, 2)
        self.assertEqual([after for _, after in graph.nodes], [[], [0]])

        graph.update(numbers={node: [10.0, 1000]})
        graph.launch(one)
        self.assertEqual(self.values(y), {11.0})
        graph.update(grids={node: 0})
        graph.launch(one)
        self.assertEqual(self.values(y), {1.0})
        new = self.floats(5.0)
        graph.update(grids={node: (4,)}, buffers=[(x, new)])
        x.free()
        graph.launch(one)
        self.assertEqual(self.values(y), {51.0})

    def test_a_graph_keeps_its_memory(self) -> None:
        x, y, _, graph = self.recorded()
        x.free()
        z = [self.floats(9.0) for _ in range(8)]
        with leasehold.Stream(self.device) as stream:
            graph.launch(stream)
            copy = self.floats(0.0)
            stream.copy(copy, y)
        y.free()
        self.assertEqual(self.values(copy), {7.0})
        self.assertTrue(all(self.values(buffer) == {9.0} for buffer in z))

    def test_the_memory_of_a_graph_comes_back_with_it(self) -> None:
        allocator = leasehold.Allocator(self.device)
        x = allocator.zeros(1 << 16)
        with self.device.record() as stream:
            stream.fill(x, 7)
        graph = stream.graph
        del stream
        x.free()
        with leasehold.Stream(self.device) as launches:
            graph.launch(launches)
        self.assertEqual(allocator.statistics()["allocated_bytes"], 1 << 16)
        del graph
        gc.collect()
        self.assertEqual(allocator.statistics()["allocated_bytes"], 0)

    def check_that_a_launch_writes_nothing_else(self, graph: leasehold.Graph, size: int) -> None:
        """The buffers of the graph are gone: what is allocated now must not be their memory."""
        gc.collect()
        others = [self.device.zeros(size) for _ in range(64)]
        with leasehold.Stream(self.device) as stream:
            graph.launch(stream)
        self.assertTrue(all(other.tobytes() == bytes(size) for other in others))

    def test_a_thread_that_may_not_end_a_recording_takes_nothing_from_it(self) -> None:
        size, interval = 1 << 16, sys.getswitchinterval()
        sys.setswitchinterval(1e-5)
        self.addCleanup(sys.setswitchinterval, interval)
        for _ in range(25):
            stop = threading.Event()

            def intrude(stream: leasehold.Stream) -> None:
                while not stop.is_set():
                    with self.assertRaisesRegex(leasehold.InvalidStateError, "thread"):
                        stream.__exit__(None, None, None)

            with self.device.record() as stream:
                intruder = threading.Thread(target=intrude, args=(stream,))
                intruder.start()
                for _ in range(40):
                    x = self.device.zeros(size)
                    stream.fill(x, 0x41)
                    del x
                stop.set()
                intruder.join()
            self.check_that_a_launch_writes_nothing_else(stream.graph, size)

    def test_updates_at_once_leave_a_graph_what_it_uses(self) -> None:
        size = 1 << 16
        for _ in range(5):
            a, b = self.device.zeros(size), self.device.zeros(size)
            with self.device.record() as stream:
                stream.fill(a, 0x42)
            graph = stream.graph
            end = time.monotonic() + 0.2

            def swap(old: leasehold.Buffer, new: leasehold.Buffer) -> None:
                while time.monotonic() < end:
                    with contextlib.suppress(leasehold.InvalidArgumentError):
                        graph.update(buffers=[(old, new)])

            pairs = [(a, b), (b, a)] * 2
            threads = [threading.Thread(target=swap, args=pair) for pair in pairs]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            del a, b, pairs, threads, thread
            self.check_that_a_launch_writes_nothing_else(graph, size)

    def test_elements_are_not_touched_where_work_on_them_is_recorded(self) -> None:
        x, y, other = self.floats(1.0), self.floats(2.0), self.floats(3.0)
        with self.device.record() as stream:
            self.assertEqual(self.values(x), {1.0})
            stream.copy(y, x)
            for touch in (
                y.tobytes,
                lambda: y.fill(5.0),
                lambda: y.copy_to(bytearray(y.nbytes)),
                lambda: y.copy_from(bytes(y.nbytes)),
                lambda: other.copy_from(y.view()),
                lambda: y.to("cpu:0"),
                y.download_async,
                y.__dlpack__,
                lambda: stream.upload(other, y),
            ):
                with self.assertRaisesRegex(leasehold.InvalidStateError, "records"):
                    touch()
            if self.NAME == "cpu:0":
                with self.assertRaisesRegex(leasehold.InvalidStateError, "records"):
                    memoryview(y)
            # What is not recorded, other threads and other streams go on.
            self.assertEqual(self.values(other), {3.0})
            read: list[set[float]] = []
            thread = threading.Thread(target=lambda: read.append(self.values(y)))
            thread.start()
            thread.join()
            self.assertEqual(read, [{2.0}])
        with leasehold.Stream(self.device) as launches:
            self.assertEqual(self.values(y), {2.0})
            stream.graph.launch(launches)
        self.assertEqual(self.values(y), {1.0})
        with self.assertRaises(ZeroDivisionError):
            with self.device.record() as stream:
                stream.copy(y, x)
                1 / 0
        self.assertEqual(self.values(y), {1.0})

    def test_host_calls_run_at_each_launch(self) -> None:
        ran: list[int] = []
        with self.device.record() as stream:
            stream.host_call(ran.append, 1)
        self.assertEqual(ran, [])
        with leasehold.Stream(self.device) as launches:
            for _ in range(3):
                stream.graph.launch(launches)
        self.assertEqual(ran, [1, 1, 1])

    def test_recordings_that_go_wrong(self) -> None:
        x, y = self.floats(1.0), self.floats(1.0)
        with self.assertRaisesRegex(ValueError, "mine"):
            with self.device.record() as stream:
                self.launch(stream, x, y, 1.0)
                raise ValueError("mine")
        with self.assertRaises(leasehold.InvalidStateError):
            stream.graph
        state = leasehold.InvalidStateError
        with self.device.record() as stream:
            for call in (
                stream.synchronize,
                stream.query,
                lambda: stream.graph,
                lambda: stream.download(x),
                lambda: stream.__await__(),
                lambda: leasehold.Stream(self.device).wait(stream),
            ):
                with self.assertRaises(state):
                    call()
            failed: list[BaseException] = []

            def elsewhere() -> None:
                try:
                    stream.fill(x, 5.0)
                except state as error:
                    failed.append(error)

            thread = threading.Thread(target=elsewhere)
            thread.start()
            thread.join()
            self.assertEqual(len(failed), 1)
            with self.assertRaises(leasehold.InvalidArgumentError):
                stream.launch(self.saxpy, [x, y], grid=1)
            stream.fill(x, 2.0)
        with self.assertRaises(state):
            stream.fill(x, 5.0)
        with self.assertRaises(state):
            stream.__enter__()
        graph = stream.graph
        for call in (
            lambda: graph.update(numbers={0: [1.0]}),
            lambda: graph.update(numbers={9: [1.0]}),
            lambda: graph.update(numbers=5),
            lambda: graph.update(grids={"x": 1}),
            lambda: graph.update(buffers=[(x, x.view("uint8", offset=4))]),
            lambda: graph.update(buffers=[(y, x)]),
            lambda: graph.update(buffers=[x]),
            lambda: graph.launch(5),
        ):
            with self.assertRaises(leasehold.InvalidArgumentError):
                call()
        with leasehold.Stream(self.device) as launches:
            graph.launch(launches)
        self.assertEqual(self.values(x), {2.0})

    def test_a_recording_that_is_dropped(self) -> None:
        x = self.floats(1.0)
        stream = self.device.record()
        stream.fill(x, 2.0)
        thread = threading.Thread(target=lambda held: held.clear(), args=([stream],))
        del stream
        thread.start()
        thread.join()
        self.assertEqual(self.values(x), {1.0})

    # ---- asyncio

    async def downloaded(self, buffer: leasehold.Buffer) -> bytes:
        return await buffer.download_async()

    def test_awaiting_does_not_block_the_loop(self) -> None:
        async def main() -> None:
            stream = leasehold.Stream(self.device)
            x = self.floats(1.0)
            for wait in (
                lambda: stream,
                lambda: stream.record(),
                lambda: x.download_async(),
                lambda: x.download_async(stream),
            ):
                go = self.blocked(stream)
                stream.fill(x, 2.0)
                what = wait()

                async def awaits() -> Any:
                    return await what

                task = asyncio.ensure_future(awaits())
                for _ in range(3):
                    await asyncio.sleep(0.001)
                    self.assertFalse(task.done())
                go.set()
                result = await task
                self.assertIn(result, (None, x.tobytes()))
                # An object that is over is so at once.
                self.assertEqual(await what, result)

        asyncio.run(main())

    def test_a_failure_is_raised_by_await(self) -> None:
        async def main() -> None:
            def fail() -> None:
                raise ValueError("boom")

            stream, x = leasehold.Stream(self.device), self.floats(1.0)
            go = self.blocked(stream)
            stream.host_call(fail)
            stream.fill(x, 1.0)
            download = x.download_async()
            go.set()
            for what in (stream, stream, download, download):
                with self.assertRaisesRegex(leasehold.FailedError, "boom"):
                    await what

        asyncio.run(main())

    def test_a_cancelled_await_loses_nothing(self) -> None:
        async def main() -> None:
            stream, x = leasehold.Stream(self.device), self.floats(1.0)
            go = self.blocked(stream)
            stream.fill(x, 2.0)
            download = x.download_async()
            for what in (stream, download):

                async def awaits() -> Any:
                    return await what

                with self.assertRaises(asyncio.TimeoutError):
                    await asyncio.wait_for(awaits(), 0.005)
            go.set()
            await stream
            self.assertEqual(await download, x.tobytes())

        asyncio.run(main())

    def test_a_closed_loop_is_told_nothing(self) -> None:
        stream = leasehold.Stream(self.device)
        go = self.blocked(stream)
        loop = asyncio.new_event_loop()

        async def begin() -> None:
            async def awaits() -> None:
                await stream

            task = asyncio.ensure_future(awaits())
            await asyncio.sleep(0)
            task.cancel()

        loop.run_until_complete(begin())
        loop.close()
        go.set()
        stream.synchronize()

    def test_many_awaits_at_once(self) -> None:
        async def main() -> None:
            buffers = [self.floats(float(i), 16) for i in range(50)]
            got = await asyncio.gather(*(self.downloaded(buffer) for buffer in buffers))
            self.assertEqual([memoryview(b).cast("f")[3] for b in got], list(range(50)))

        asyncio.run(main())

    # ---- threads

    def test_threads_share_streams_and_buffers(self) -> None:
        x, y = self.floats(1.0, TILE), self.floats(0.0, TILE)
        streams = [leasehold.Stream(self.device) for _ in range(2)]
        failed: list[BaseException] = []

        def work(i: int) -> None:
            try:
                for j in range(25):
                    self.launch(streams[(i + j) % 2], x, y, 1.0)
                    if j % 8 == i:
                        y.tobytes()
                        streams[i % 2].host_call(lambda: None)
            except BaseException as error:
                failed.append(error)

        threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failed, [])
        self.assertEqual(self.values(y), {100.0})


    # ---- all of it together

    def test_random_programs_give_what_they_give_one_by_one(self) -> None:
        for seed in range(30):
            with self.subTest(seed=seed):
                self.play(random.Random(seed))

    def play(self, r: random.Random) -> None:
        """A program on several streams, beside the same on numbers: each buffer has one value."""
        count = 600
        streams = [leasehold.Stream(self.device) for _ in range(3)]
        values = [float(i) for i in range(4)]
        buffers = [self.floats(value, count) for value in values]
        graphs: list[tuple[leasehold.Graph, list[Any], list[leasehold.Buffer]]] = []

        def step(stream: leasehold.Stream, what: list[Any], on: list[leasehold.Buffer]) -> None:
            kind, i, j, a = what
            if kind == "fill":
                stream.fill(on[i], a)
            elif kind == "upload":
                stream.upload(on[i], array.array("f", [a] * count))
            elif kind == "copy":
                stream.copy(on[i], on[j])
            elif kind == "launch":
                self.launch(stream, on[j], on[i], a)
            else:
                stream.host_call(int)

        def model(what: list[Any]) -> None:
            kind, i, j, a = what
            if kind in ("fill", "upload"):
                values[i] = a
            elif kind == "copy":
                values[i] = values[j]
            elif kind == "launch":
                values[i] += a * values[j]

        def one(r: random.Random) -> list[Any]:
            i, j = r.sample(range(4), 2)
            return [r.choice(["fill", "upload", "copy", "launch", "call"]), i, j, float(r.randrange(3))]

        for _ in range(40):
            stream, choice = r.choice(streams), r.random()
            if choice < 0.6:
                what = one(r)
                step(stream, what, buffers)
                model(what)
            elif choice < 0.7:
                parts = [one(r) for _ in range(4)]
                with self.device.record() as recording:
                    for what in parts:
                        step(recording, what, buffers)
                graphs.append((recording.graph, parts, list(buffers)))
            elif choice < 0.8 and graphs:
                graph, parts, of = r.choice(graphs)
                if all(a is b for a, b in zip(of, buffers)):
                    graph.launch(stream)
                    for what in parts:
                        model(what)
            elif choice < 0.85:
                # The old memory may still be used; the new one must not be the same meanwhile.
                i = r.randrange(4)
                buffers[i].free()
                values[i] = 7.0
                buffers[i] = self.floats(7.0, count)
            else:
                i = r.randrange(4)
                self.assertEqual(self.values(buffers[i]), {values[i]})
        for buffer, value in zip(buffers, values):
            self.assertEqual(self.values(buffer), {value})
        for stream in streams:
            stream.synchronize()


class OnTheCpu(Runtime, unittest.TestCase):
    NAME = "cpu:0"

    def test_an_imported_array_lives_until_the_work_is_over(self) -> None:
        source = self.floats(0.0, 1024)
        alive = weakref.ref(source)
        imported = leasehold.from_dlpack(source)
        del source
        stream = leasehold.Stream(self.device)
        go = self.blocked(stream)
        stream.fill(imported, 2.0)
        kept = leasehold.Stream(self.device)
        copy = self.floats(0.0, 1024)
        kept.copy(copy, imported)
        threading.Timer(0.05, go.set).start()
        # The end of the import waits, since its owner gets the memory back with it.
        del imported
        self.assertTrue(go.is_set())
        self.assertEqual(self.values(copy), {2.0})
        gc.collect()
        self.assertIsNone(alive())

    def test_a_python_function_may_be_a_kernel(self) -> None:
        ran: list[int] = []
        function = ctypes.CFUNCTYPE(None, ctypes.c_void_p)(lambda tile: ran.append(1))
        kernel = leasehold.Kernel("mine", ["read"], cpu=function, trusted=True)
        x = self.floats(1.0)
        stream = leasehold.Stream(self.device)
        # The kernel keeps the function.
        del function
        gc.collect()
        stream.launch(kernel, [x], grid=3)
        del kernel
        stream.synchronize()
        self.assertEqual(ran, [1, 1, 1])


@unittest.skipUnless(_native.SIMULATED, "a build without simulated devices")
class OnASimulatedDevice(Runtime, unittest.TestCase):
    NAME = "sim-cuda:0"

    def tearDown(self) -> None:
        """The simulated device's race detector has seen no work that uses memory too early."""
        text = ctypes.c_void_p()
        library = ctypes.CDLL(leasehold.library_path())
        self.assertEqual(library.leasehold_sim_races(ctypes.byref(text)), 0)
        found = ctypes.string_at(text.value).decode() if text.value else ""
        library.leasehold_text_free(text)
        self.assertEqual(found.strip(), "")

    def test_the_handle_is_the_drivers(self) -> None:
        self.assertNotEqual(leasehold.Stream(self.device).native, 0)


if __name__ == "__main__":
    unittest.main()
