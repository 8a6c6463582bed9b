"""Buffers on a simulated CUDA device, whose race detector sees work that is not in order.

They need a build with the feature `sim`.
"""

from __future__ import annotations

import ctypes
import gc
import random
import subprocess
import sys
import threading
import unittest
from typing import Any, Callable

import capsules
import leasehold
from capsules import Consumer
from leasehold import _native

SIZE = 1 << 16


def library() -> Any:
    lib = ctypes.CDLL(leasehold.library_path())
    lib.leasehold_last_error.restype = ctypes.c_char_p
    lib.leasehold_text_free.argtypes = [ctypes.c_void_p]
    word, handle = ctypes.c_size_t, ctypes.c_uint64
    lib.leasehold_sim_stream.argtypes = [handle, ctypes.c_int, ctypes.POINTER(word)]
    lib.leasehold_sim_fill.argtypes = [handle, word, ctypes.c_void_p, ctypes.c_uint8, word]
    lib.leasehold_sim_read.argtypes = [handle, word, ctypes.c_void_p, ctypes.c_void_p, word]
    lib.leasehold_sim_stream_destroy.argtypes = [handle, word]
    lib.leasehold_sim_order.argtypes = [handle, word, word]
    lib.leasehold_sim_capture.argtypes = [handle, word, ctypes.c_int]
    lib.leasehold_sim_races.argtypes = [ctypes.POINTER(ctypes.c_void_p)]
    return lib


class Stream:
    """A stream of another library on the simulated device, by the C ABI."""

    _lib: Any = None
    _device = ctypes.c_uint64()

    def __init__(self, kind: int = 0) -> None:
        if Stream._lib is None:
            Stream._lib = library()
            self._do(
                Stream._lib.leasehold_device_open(b"sim-cuda:0", None, ctypes.byref(self._device))
            )
        handle = ctypes.c_size_t()
        self._do(self._lib.leasehold_sim_stream(self._device, kind, ctypes.byref(handle)))
        self.handle = handle.value

    def _do(self, status: int) -> None:
        if status != 0:
            raise AssertionError(self._lib.leasehold_last_error().decode())

    def fill(self, address: int, byte: int, size: int) -> None:
        self._do(self._lib.leasehold_sim_fill(self._device, self.handle, address, byte, size))

    def read(self, address: int, size: int) -> bytes:
        out = ctypes.create_string_buffer(size)
        self._do(self._lib.leasehold_sim_read(self._device, self.handle, out, address, size))
        return out.raw

    def destroy(self) -> None:
        self._do(self._lib.leasehold_sim_stream_destroy(self._device, self.handle))

    def before(self, later: int) -> None:
        """Lets later work of another stream wait for this one's."""
        self._do(self._lib.leasehold_sim_order(self._device, self.handle, later))

    def capture(self, begin: bool) -> None:
        self._do(self._lib.leasehold_sim_capture(self._device, self.handle, int(begin)))

    def races(self) -> str:
        text = ctypes.c_void_p()
        self._do(self._lib.leasehold_sim_races(ctypes.byref(text)))
        found = ctypes.string_at(text.value or 0).decode()
        self._lib.leasehold_text_free(text)
        return found


class Told(Stream):
    """A stream by its handle."""

    def __init__(self, handle: int) -> None:
        self.handle = handle


def in_time(work: Callable[[], None], seconds: float = 60) -> None:
    """Runs work that must not hang, on a thread of its own."""
    failures: list[BaseException] = []

    def run() -> None:
        try:
            work()
        except BaseException as e:
            failures.append(e)

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    thread.join(seconds)
    if thread.is_alive():
        raise AssertionError("the work hangs")
    if failures:
        raise failures[0]


@unittest.skipUnless(_native.SIMULATED, "this build has no simulated devices")
class Simulated(unittest.TestCase):
    def setUp(self) -> None:
        self.device = leasehold.Device("sim-cuda:0")
        self.stream = Stream()

    def tearDown(self) -> None:
        gc.collect()
        self.device.synchronize()
        self.assertEqual(self.stream.races(), "")

    def test_the_compute_capability(self) -> None:
        self.assertEqual(self.device.compute_capability, (9, 0))
        self.assertIsNone(leasehold.Device("cpu:0").compute_capability)

    def test_contents(self) -> None:
        data = random.Random(1).randbytes(3 << 20)
        b = self.device.upload(data)
        self.assertEqual(b.tobytes(), data)
        out = bytearray(len(data))
        b.copy_to(out)
        self.assertEqual(out, data)
        for dtype, value in [("uint8", 3), ("int16", -2), ("float32", 0.5), ("int64", -7), ("complex128", 1j)]:
            view = b.view(dtype)
            view.fill(value)
            host = leasehold.Device("cpu:0").empty(view.shape, dtype)
            host.fill(value)
            self.assertEqual(b.tobytes()[: view.nbytes], host.tobytes())
        other = leasehold.Device("sim-cuda:1").zeros(b.nbytes)
        other.copy_from(b)
        self.assertEqual(other.tobytes(), b.tobytes())
        on_host = other.to("cpu:0")
        self.assertEqual((on_host.device.name, on_host.tobytes()), ("cpu:0", b.tobytes()))
        b.copy_from(leasehold.Device("cpu:0").zeros(b.nbytes))
        self.assertEqual(b.tobytes(), bytes(b.nbytes))
        with self.assertRaises(BufferError):
            memoryview(b)
        self.assertEqual(self.device.zeros((3, 0), "float32").tobytes(), b"")

    def test_copies_longer_than_a_piece(self) -> None:
        data = random.Random(2).randbytes(150 << 20)
        b = self.device.upload(data)
        self.assertEqual(b.tobytes(), data)

    def test_a_consumer_comes_after_our_work_and_we_after_its(self) -> None:
        b = self.device.empty(SIZE)
        self.assertEqual(b.__dlpack_device__(), (capsules.EXTENSION, 0))
        b.fill(1)
        consumer = Consumer(b.__dlpack__(stream=self.stream.handle, max_version=(1, 0)))
        self.assertEqual(self.stream.read(consumer.tensor.data, SIZE), b"\1" * SIZE)
        for byte in range(2, 20):
            self.stream.fill(consumer.tensor.data, byte, SIZE)
            self.assertEqual(b.tobytes(), bytes([byte]) * SIZE)
            self.stream.fill(consumer.tensor.data, byte, SIZE)
            b.fill(byte + 100)
            self.assertEqual(self.stream.read(consumer.tensor.data, SIZE), bytes([byte + 100]) * SIZE)
        consumer.delete()

    def test_memory_waits_for_its_consumers(self) -> None:
        allocator = leasehold.Allocator(self.device, budget=4 << 20)
        streams = [self.stream, Stream(), Stream(1)]
        for i in range(60):
            b = allocator.empty(2 << 20)
            b.fill(i)
            consumers = [
                Consumer(b.__dlpack__(stream=None if s.handle == streams[2].handle else s.handle))
                for s in streams[: 1 + i % 3]
            ]
            self.stream.fill(consumers[0].tensor.data, 255, 2 << 20)
            del b
            for consumer in consumers:
                consumer.delete()
        self.device.synchronize()
        self.assertEqual(allocator.statistics()["blocks"], 0)

    def test_a_consumer_without_order_is_waited_for(self) -> None:
        allocator = leasehold.Allocator(self.device, budget=4 << 20)
        for i in range(10):
            b = allocator.empty(3 << 20)
            b.synchronize()
            consumer = Consumer(b.__dlpack__(stream=-1))
            self.stream.fill(consumer.tensor.data, i, 3 << 20)
            consumer.delete()
            del b
            allocator.empty(3 << 20).fill(1)

    def test_the_race_detector_sees_what_is_not_ordered(self) -> None:
        b = self.device.empty(SIZE)
        consumer = Consumer(b.__dlpack__(stream=-1))
        b.fill(1)
        self.stream.fill(consumer.tensor.data, 2, SIZE)
        self.device.synchronize()
        self.assertIn("unordered accesses", self.stream.races())
        consumer.delete()

    def test_streams_of_the_protocol(self) -> None:
        b = self.device.zeros(SIZE)
        self.assertEqual([Stream(1).handle, Stream(2).handle], [1, 2])
        for stream in (None, 1, 2, -1):
            Consumer(b.__dlpack__(stream=stream)).delete()
        for stream in (0, -2):
            with self.assertRaises(ValueError):
                b.__dlpack__(stream=stream)

    def test_a_number_that_is_no_stream_is_refused(self) -> None:
        b = self.device.zeros(SIZE)
        numbers = [3, 7, 0xDEAD0, 1 << 46, (1 << 63) - 8, 1 << 63, (1 << 64) - 8, 1 << 64, -3]
        for pending in (True, False):
            for number in numbers:
                with self.subTest(number, pending=pending):
                    with self.assertRaises(leasehold.InvalidArgumentError):
                        b.__dlpack__(stream=number)
            b.synchronize()
        in_time(lambda: self.assertEqual(b.tobytes(), bytes(SIZE)))
        b.free()

    def test_a_stream_may_go_before_its_tensor(self) -> None:
        def work() -> None:
            for reads in range(3):
                b = self.device.zeros(SIZE)
                stream = Stream()
                consumer = Consumer(b.__dlpack__(stream=stream.handle))
                stream.fill(consumer.tensor.data, 5, SIZE)
                stream.destroy()
                if reads > 0:
                    self.assertEqual(b.tobytes(), b"\5" * SIZE)
                if reads > 1:
                    b.fill(7)
                consumer.delete()
                if reads == 0:
                    self.assertEqual(b.tobytes(), b"\5" * SIZE)
                b.free()
            self.assertEqual(self.device.zeros(SIZE).tobytes(), bytes(SIZE))
            self.device.synchronize(timeout=30)

        in_time(work)

    def test_the_memory_of_streams_that_are_gone_comes_back(self) -> None:
        def work() -> None:
            allocator = leasehold.Allocator(self.device, budget=8 << 20)
            for i in range(40):
                b = allocator.empty(3 << 20)
                b.fill(i)
                stream = Stream()
                consumer = Consumer(b.__dlpack__(stream=stream.handle))
                stream.fill(consumer.tensor.data, i, 3 << 20)
                consumer.delete()
                stream.destroy()
                del b
            self.assertGreater(allocator.statistics()["free_pending_bytes"] or 0, 0)
            self.device.synchronize()
            self.assertEqual(allocator.statistics()["free_pending_bytes"], 0)
            allocator.trim()
            self.assertEqual(allocator.statistics()["reserved_bytes"], 0)

        in_time(work)

    def test_a_synchronisation_leaves_nothing_pending(self) -> None:
        allocator = leasehold.Allocator(self.device)
        for stream in (None, -1, 2):
            b = allocator.zeros(3 << 20)
            Consumer(b.__dlpack__(stream=stream)).delete()
            del b
            self.device.synchronize()
            self.assertEqual(allocator.statistics()["free_pending_bytes"], 0)

    def test_default_streams_need_no_introduction(self) -> None:
        code = """
import leasehold
device = leasehold.Device("sim-cuda:0")
for stream in (2, 1, None):
    b = device.zeros(4096)
    capsule = b.__dlpack__(stream=stream)
    b.fill(3)
    del capsule
    assert b.tobytes() == bytes([3]) * 4096
device.synchronize()
"""
        subprocess.run([sys.executable, "-c", code], check=True, timeout=60)

    def test_the_default_streams_of_threads_are_told_apart(self) -> None:
        for kind in (2, 0):
            for _ in range(20):
                b = self.device.zeros(1 << 20)
                self.two_threads_fill(b, kind)
                b.fill(3)
                self.assertEqual(b.tobytes(), b"\3" * (1 << 20))
                b.free()
                c = self.device.zeros(1 << 20)
                c.fill(9)
                self.assertEqual(c.tobytes(), b"\11" * (1 << 20))
                self.assertEqual(self.stream.races(), "")

    def two_threads_fill(self, b: leasehold.Buffer, kind: int) -> None:
        """Two threads fill a half each, on a stream of this kind of their own."""
        together = [threading.Barrier(2, timeout=30) for _ in range(3)]
        exported = threading.Event()
        failures: list[BaseException] = []

        def go(i: int) -> None:
            try:
                stream = Stream(kind)
                if i == 1:
                    exported.wait(30)
                consumer = Consumer(b.__dlpack__(stream=stream.handle))
                exported.set()
                together[0].wait()
                stream.fill(consumer.tensor.data + i * (1 << 19), 7, 1 << 19)
                together[1].wait()
                consumer.delete()
                together[2].wait()
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=go, args=(i,)) for i in range(2)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_a_tensor_may_be_dropped_by_another_thread(self) -> None:
        def work() -> None:
            b = self.device.zeros(SIZE)
            made, used, over = threading.Event(), threading.Event(), threading.Event()
            consumers: list[Consumer] = []

            def go() -> None:
                stream = Stream(2)
                consumers.append(Consumer(b.__dlpack__(stream=2)))
                stream.fill(consumers[0].tensor.data, 6, SIZE)
                made.set()
                used.wait(30)
                stream.fill(consumers[0].tensor.data, 8, SIZE)
                over.set()
                dropped.wait(30)

            dropped = threading.Event()
            thread = threading.Thread(target=go)
            thread.start()
            made.wait(30)
            # The stream has no name here, so the whole device is waited for.
            self.assertEqual(b.tobytes(), b"\6" * SIZE)
            used.set()
            over.wait(30)
            consumers.pop().delete()
            self.assertEqual(b.tobytes(), b"\10" * SIZE)
            b.free()
            dropped.set()
            thread.join()

        in_time(work)

    def test_an_import_is_in_order_with_its_owner_on_two_devices(self) -> None:
        other, size = leasehold.Device("sim-cuda:1"), 1 << 20
        for _ in range(60):
            x = self.device.empty(size)
            x.fill(1)
            y = leasehold.from_dlpack(x)
            z = y.to(other)
            x.fill(2)
            # The other way: into the import.
            w = other.empty(size)
            w.fill(4)
            y.copy_from(w)
            w.fill(5)
            self.assertEqual((z.tobytes(), x.tobytes()), (b"\1" * size, b"\4" * size))
            # From an import into another one.
            v = leasehold.from_dlpack(w)
            v.copy_from(y)
            x.fill(7)
            self.assertEqual((w.tobytes(), y.tobytes()), (b"\4" * size, b"\7" * size))
            self.assertEqual(self.stream.races(), "")

    def test_a_foreign_owner_is_in_order_with_all_that_use_its_memory(self) -> None:
        own, kind = Stream(), (capsules.UINT, 8)

        class Owner(capsules.Producer):
            """Another library, which orders its stream with the one that it is told."""

            def __dlpack__(self, **arguments: Any) -> Any:
                self.told = arguments["stream"]
                own.before(self.told)
                return super().__dlpack__(**arguments)

        other = leasehold.Device("sim-cuda:1")
        memory = self.device.zeros(SIZE)
        memory.synchronize()
        for i in range(30):
            owner = Owner(b"", [SIZE], kind=kind, device=(capsules.EXTENSION, 0), data=memory.address)
            own.fill(memory.address, 5, SIZE)
            shared = leasehold.from_dlpack(owner)
            if i % 3 == 0:
                # A further consumer, whose stream the owner never hears of.
                consumer = Consumer(shared.__dlpack__(stream=None if i % 2 else self.stream.handle))
                further = Stream(1) if i % 2 else self.stream
                further.fill(memory.address, 6, SIZE)
                consumer.delete()
            elif i % 3 == 1:
                copy = shared.to(other)
            else:
                source = other.zeros(SIZE)
                source.fill(6)
                shared.copy_from(source)
            # The told stream as the owner's next work finds it.
            event = Stream()
            Told(owner.told).before(event.handle)
            event.fill(memory.address, 7, SIZE)
            event.before(own.handle)
            if i % 3 == 1:
                self.assertEqual(copy.tobytes(), b"\5" * SIZE)
            self.assertEqual(own.read(memory.address, SIZE), b"\7" * SIZE)
            self.assertEqual(self.stream.races(), "")
            del shared
            self.assertEqual(owner.deleted, 1)

    def test_threads_do_all_of_it_at_once(self) -> None:
        box = [self.device.zeros(4096) for _ in range(8)]

        def go(seed: int) -> None:
            number = random.Random(seed)
            for _ in range(120):
                i = number.randrange(8)
                b = box[i]
                try:
                    step = number.randrange(8)
                    if step == 0:
                        box[i] = self.device.zeros(number.choice([16, 4096, 1 << 20]))
                    elif step == 1:
                        b.free()
                    elif step == 2:
                        b.fill(number.randrange(256))
                    elif step == 3:
                        b.tobytes()
                    elif step == 4:
                        box[number.randrange(8)].copy_from(b)
                    elif step == 5:
                        capsule = b.__dlpack__(stream=number.choice([-1, 1, 2]))
                        leasehold.from_dlpack(capsule).fill(9)
                    elif step == 6:
                        self.device.allocator.trim()
                    else:
                        b.to("cpu:0").tobytes()
                except (leasehold.InvalidArgumentError, leasehold.ExportError, leasehold.FreedError):
                    pass

        failures: list[BaseException] = []

        def guarded(seed: int) -> None:
            try:
                go(seed)
            except BaseException as e:
                failures.append(e)

        def work() -> None:
            threads = [threading.Thread(target=guarded, args=(i,), daemon=True) for i in range(12)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            box.clear()

        in_time(work, 240)
        self.assertEqual(failures, [])
        self.device.synchronize()
        # Nothing orders what is exported without an order.
        self.stream.races()

    def test_an_export_leaves_a_capture_alone(self) -> None:
        """A captured stream waits for no work outside of the capture, and here there is none."""
        b = self.device.zeros(SIZE)
        b.synchronize()
        self.stream.capture(True)
        try:
            consumer = Consumer(b.__dlpack__(stream=self.stream.handle))
            self.stream.fill(consumer.tensor.data, 1, SIZE)
        finally:
            self.stream.capture(False)
        consumer.delete()
        self.assertEqual(b.tobytes(), bytes(SIZE))
        b.free()

    def test_our_own_memory_comes_back(self) -> None:
        b = self.device.zeros(SIZE)
        again = leasehold.from_dlpack(b)
        self.assertEqual((again.device, again.address), (self.device, b.address))
        for i in range(1, 20):
            again.fill(i)
            self.assertEqual(b.tobytes(), bytes([i]) * SIZE)
            b.fill(i + 100)
            self.assertEqual(again.tobytes(), bytes([i + 100]) * SIZE)
        again.free()
        b.free()

    def test_copies_to_the_host_by_dlpack(self) -> None:
        b = self.device.empty(16, "int32")
        b.fill(9)
        consumer = Consumer(b.__dlpack__(dl_device=(capsules.CPU, 0), max_version=(1, 0)))
        self.assertEqual(consumer.managed.flags, capsules.IS_COPIED)
        self.assertEqual(consumer.tensor.device_type, capsules.CPU)
        self.assertEqual(consumer.bytes(64), b.tobytes())
        consumer.delete()
        with self.assertRaises(BufferError):
            b.__dlpack__(dl_device=(capsules.CPU, 0), copy=False)
        self.assertEqual(leasehold.from_dlpack(b, device="cpu:0").tobytes(), b.tobytes())
        with self.assertRaises(ValueError):
            leasehold.from_dlpack(b, device="cpu:0", copy=False)

    def test_the_array_interface_keeps_the_memory(self) -> None:
        allocator = leasehold.Allocator(self.device)
        b = allocator.zeros((4, 4), "float32")
        interface = b.__cuda_array_interface__
        self.assertEqual((interface["version"], interface["stream"]), (3, None))
        self.assertEqual((interface["shape"], interface["typestr"]), ((4, 4), "<f4"))
        self.assertEqual(interface["data"], (b.address, False))
        with self.assertRaises(leasehold.ExportError):
            b.free()
        del b
        self.assertEqual(allocator.statistics()["blocks"], 0)
        for none in (self.device.zeros(1, "bfloat16"), leasehold.Device("cpu:0").zeros(1)):
            self.assertFalse(hasattr(none, "__cuda_array_interface__"))

    def test_a_forked_child_is_refused(self) -> None:
        import os

        b = self.device.zeros(SIZE)
        child = os.fork()
        if child == 0:
            refused = 0
            for use in [
                lambda: b.fill(1),
                lambda: b.tobytes(),
                lambda: b.synchronize(),
                lambda: b.__dlpack__(stream=1),
                lambda: b.__cuda_array_interface__,
                lambda: self.device.zeros(1),
                lambda: self.device.synchronize(),
                lambda: self.device.memory_info(),
                lambda: leasehold.Allocator("sim-cuda:0"),
            ]:
                try:
                    use()
                except leasehold.InvalidStateError as error:
                    refused += "fork" in str(error)
            b.free()
            host = leasehold.Device("cpu:0").zeros(4)
            host.fill(1)
            os._exit(0 if refused == 9 and host.tobytes() == b"\1" * 4 else 1)
        self.assertEqual(os.waitpid(child, 0)[1], 0)
        self.assertEqual(b.tobytes(), bytes(SIZE))

    def test_memory_for_a_stream_is_its_again_at_once(self) -> None:
        def reserved(stream: leasehold.Stream | None) -> int:
            work = stream or leasehold.Stream(self.device)
            allocator = leasehold.Allocator(self.device, stream=stream)
            for byte in range(6):
                b = allocator.empty(8 << 20)
                work.fill(b, byte)
                # Freed while the fill is pending.
                c = b.to("cpu:0") if byte == 5 else None
                b.free()
            assert c is not None
            self.assertEqual(c.tobytes(), b"\5" * (8 << 20))
            # Another stream that uses the memory comes after the work of this one.
            again = allocator.empty(8 << 20)
            other = leasehold.Stream(self.device)
            other.fill(again, 9)
            self.assertEqual(again.tobytes(), b"\11" * (8 << 20))
            self.assertEqual(leasehold.races(), [])
            return allocator.statistics()["reserved_bytes_peak"] or 0

        stream = leasehold.Stream(self.device)
        self.assertEqual(reserved(stream), 8 << 20)
        self.assertGreater(reserved(None), 8 << 20)
        with self.device.record() as recording:
            for wrong in (recording, leasehold.Stream("cpu:0")):
                with self.assertRaises(leasehold.InvalidArgumentError):
                    leasehold.Allocator(self.device, stream=wrong)

    def test_other_allocators_make_room(self) -> None:
        other = leasehold.Allocator(self.device)
        held = [other.empty(256 << 20) for _ in range(3)]
        del held
        self.device.synchronize()
        self.assertGreaterEqual(other.statistics()["reserved_bytes"] or 0, 768 << 20)
        self.assertEqual(self.device.zeros(700 << 20).nbytes, 700 << 20)
        with self.assertRaises(leasehold.OutOfMemoryError) as raised:
            self.device.empty(5 << 30)
        self.assertIn("sim-cuda:0", str(raised.exception))
        self.assertIn(" in all: split it, or use a larger device", str(raised.exception))
        self.device.allocator.trim()

    def test_random_programs_of_threads(self) -> None:
        allocator = leasehold.Allocator(self.device, budget=8 << 20)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            random_number = random.Random(seed)
            own = Stream()
            held: list[tuple[leasehold.Buffer, list[Consumer], int]] = []
            try:
                for _ in range(150):
                    step = random_number.randrange(6)
                    if step == 0 or not held:
                        if len(held) == 6:
                            continue
                        b = allocator.empty(random_number.choice([100, 4096, 70000, 300000]))
                        byte = random_number.randrange(256)
                        b.fill(byte)
                        held.append((b, [], byte))
                        continue
                    at = random_number.randrange(len(held))
                    b, consumers, byte = held[at]
                    if step == 1:
                        consumers.append(Consumer(b.__dlpack__(stream=own.handle)))
                    elif step == 2 and consumers:
                        byte = random_number.randrange(256)
                        own.fill(consumers[0].tensor.data, byte, b.nbytes)
                        held[at] = (b, consumers, byte)
                    elif step == 3:
                        self.assertEqual(b.tobytes(), bytes([byte]) * b.nbytes)
                    elif step == 4 and consumers:
                        consumers.pop().delete()
                    elif step == 5:
                        held.pop(at)
                        for consumer in consumers:
                            consumer.delete()
            except BaseException as e:
                failures.append(e)
            for _, consumers, _ in held:
                for consumer in consumers:
                    consumer.delete()

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])


if __name__ == "__main__":
    unittest.main()
