"""Buffers on the CPU: contents, shapes, views, the buffer protocol, lifetimes, errors."""

from __future__ import annotations

import gc
import threading
import unittest
import weakref

import leasehold
from leasehold import _report

try:
    import numpy as np
except ImportError:
    np = None

CPU = leasehold.Device("cpu:0")


class Devices(unittest.TestCase):
    def test_a_device_is_known_by_its_name(self) -> None:
        self.assertIn("cpu:0", leasehold.devices())
        self.assertEqual(CPU, leasehold.Device("cpu"))
        self.assertEqual(hash(CPU), hash(leasehold.Device(CPU)))
        self.assertEqual((CPU.name, CPU.index, repr(CPU)), ("cpu:0", 0, "Device('cpu:0')"))
        free, total = CPU.memory_info()
        self.assertLess(0, free)
        self.assertLessEqual(free, total)
        CPU.synchronize()
        CPU.synchronize(timeout=1.0)

    def test_what_is_not_there_says_so(self) -> None:
        with self.assertRaises(leasehold.UnavailableError):
            leasehold.Device("cpu:99")
        with self.assertRaises(leasehold.InvalidArgumentError):
            leasehold.Device("toaster:0")
        with self.assertRaises(leasehold.Error):
            leasehold.Device("sim:0")
        with self.assertRaises(ValueError):
            CPU.synchronize(timeout=-1.0)


class Contents(unittest.TestCase):
    def test_a_buffer_describes_itself(self) -> None:
        b = CPU.zeros((2, 3, 4), "int16")
        self.assertEqual((b.shape, b.strides, b.dtype), ((2, 3, 4), (24, 8, 2), "int16"))
        self.assertEqual((b.ndim, b.size, b.itemsize, b.nbytes, len(b)), (3, 24, 2, 48, 2))
        self.assertEqual((b.device, b.readonly, b.freed, b.is_contiguous), (CPU, False, False, True))
        self.assertEqual(b.address % 256, 0)
        self.assertEqual(repr(b), "Buffer([2, 3, 4], int16, 'cpu:0')")
        self.assertEqual(b.tobytes(), bytes(48))
        self.assertEqual(CPU.empty(10).dtype, "uint8")
        with self.assertRaises(TypeError):
            len(CPU.empty(()))

    def test_fills_by_type(self) -> None:
        import struct

        cases = [
            ("bool", True, b"\1"),
            ("int8", -1, b"\xff"),
            ("uint16", 0x1234, b"\x34\x12"),
            ("int32", -2, struct.pack("<i", -2)),
            ("uint64", 2**64 - 1, b"\xff" * 8),
            ("float16", 1.5, struct.pack("<e", 1.5)),
            ("bfloat16", 1.5, b"\xc0\x3f"),
            ("float32", 0.1, struct.pack("<f", 0.1)),
            ("float64", 0.1, struct.pack("<d", 0.1)),
            ("complex64", 1 + 2j, struct.pack("<ff", 1, 2)),
            ("complex128", 3, struct.pack("<dd", 3, 0)),
        ]
        for dtype, value, element in cases:
            with self.subTest(dtype):
                b = CPU.empty(5, dtype)
                b.fill(value)
                self.assertEqual(b.tobytes(), element * 5)
        with self.assertRaises(leasehold.InvalidArgumentError):
            CPU.empty(1, "float8_e4m3fn").fill(1.0)

    def test_copies(self) -> None:
        b = CPU.empty(8)
        b.copy_from(b"abcdefgh")
        out = bytearray(8)
        b.copy_to(out)
        self.assertEqual((out, b.tobytes()), (b"abcdefgh", b"abcdefgh"))
        other = CPU.empty((2, 4), "uint8")
        other.copy_from(b)
        self.assertEqual(other.tobytes(), b"abcdefgh")
        b.fill(0)
        other.copy_to(b)
        self.assertEqual(b.tobytes(), b"abcdefgh")
        self.assertEqual(other.to("cpu:0").tobytes(), b"abcdefgh")
        # Within one memory, overlapping.
        b.view(shape=4, offset=2).copy_from(b.view(shape=4))
        self.assertEqual(b.tobytes(), b"ababcdgh")

    def test_wrong_copies_are_refused(self) -> None:
        b = CPU.empty(8)
        with self.assertRaises(ValueError):
            b.copy_from(b"too short")
        with self.assertRaises(leasehold.InvalidArgumentError):
            b.copy_to(b"cannot b")
        with self.assertRaises(ValueError):
            CPU.empty(2, "float32").copy_from(CPU.empty(2, "int32"))
        with self.assertRaises(TypeError):
            b.copy_from(3)

    def test_views_share_memory(self) -> None:
        b = CPU.zeros(16)
        words = b.view("uint32")
        self.assertEqual(words.shape, (4,))
        words.view(shape=1, offset=4).fill(0x01020304)
        self.assertEqual(b.tobytes()[4:8], b"\4\3\2\1")
        self.assertEqual(words.view(shape=(2, 2)).shape, (2, 2))
        for wrong in [
            lambda: b.view("uint32", offset=2),
            lambda: b.view(shape=17),
            lambda: b.view(offset=17),
            lambda: b.view("float64", offset=1),
            lambda: CPU.zeros(3).view("uint16"),
            lambda: b.view("uint63"),
            lambda: b.view(shape=-1),
        ]:
            with self.assertRaises(leasehold.InvalidArgumentError):
                wrong()

    def test_nothing_is_a_buffer_too(self) -> None:
        for shape in (0, (0,), (3, 0, 2)):
            b = CPU.zeros(shape, "float32")
            self.assertEqual((b.nbytes, b.tobytes()), (0, b""))
            b.fill(1.0)
            b.copy_from(b"")
            self.assertEqual(memoryview(b).nbytes, 0)
        b = CPU.empty((), "float64")
        self.assertEqual((b.nbytes, b.shape), (8, ()))

    def test_too_large(self) -> None:
        for shape in [2**62, (2**40, 2**40), (0, 2**62, 2**62), (1,) * 65]:
            with self.assertRaises((leasehold.InvalidArgumentError, MemoryError)):
                CPU.empty(shape, "float64")


class HostProtocol(unittest.TestCase):
    def test_memory_is_shared(self) -> None:
        b = CPU.zeros((2, 3), "int32")
        with memoryview(b) as view:
            self.assertEqual((view.shape, view.strides, view.format), ((2, 3), (12, 4), "i"))
            self.assertFalse(view.readonly)
            view[1, 2] = 7
        self.assertEqual(b.tobytes()[-4:], b"\7\0\0\0")
        # Requests without strides, and without a shape.
        self.assertEqual(bytes(b), b.tobytes())
        with memoryview(b).cast("B") as flat:
            self.assertEqual(flat.nbytes, 24)
        import io

        self.assertEqual(io.BytesIO(bytes(24)).readinto(b), 24)
        self.assertEqual(b.tobytes(), bytes(24))

    def test_types_without_a_format_are_refused(self) -> None:
        b = CPU.zeros(4, "bfloat16")
        with self.assertRaises(BufferError):
            memoryview(b)
        self.assertEqual(memoryview(b.view("uint16")).format, "H")

    def test_an_export_keeps_the_memory(self) -> None:
        b = CPU.zeros(1 << 20)
        view = memoryview(b)
        with self.assertRaises(BufferError):
            b.free()
        with self.assertRaises(leasehold.ExportError):
            with b:
                pass
        del b
        gc.collect()
        view[5] = 1
        self.assertEqual(view[5], 1)

    def test_an_export_of_a_view_counts(self) -> None:
        b = CPU.zeros(16)
        view = memoryview(b.view("uint32"))
        with self.assertRaises(leasehold.ExportError):
            b.free()
        view.release()
        b.free()


class Lifetimes(unittest.TestCase):
    def test_freed_memory_is_out_of_reach(self) -> None:
        with CPU.zeros(64) as b:
            part = b.view(shape=8)
        self.assertTrue(b.freed and part.freed)
        self.assertEqual(repr(b), "Buffer([64], uint8, 'cpu:0', freed)")
        for use in [
            lambda: b.tobytes(),
            lambda: b.fill(0),
            lambda: part.copy_from(b"12345678"),
            lambda: memoryview(part),
            lambda: b.address,
            lambda: b.__dlpack__(),
            lambda: b.view(),
            lambda: b.__enter__(),
            lambda: CPU.zeros(64).copy_from(b),
            lambda: CPU.upload(b),
        ]:
            with self.assertRaises(leasehold.FreedError):
                use()
        b.free()  # a second time does nothing

    def test_memory_goes_with_the_last_reference(self) -> None:
        allocator = leasehold.Allocator("cpu:0")
        b = allocator.zeros(1 << 20)
        part = b.view(shape=8)
        gone = weakref.ref(b)
        del b
        self.assertIsNone(gone())
        self.assertEqual(allocator.statistics()["blocks"], 1)
        del part
        self.assertEqual(allocator.statistics()["blocks"], 0)

    def test_a_buffer_outlives_its_allocator(self) -> None:
        b = leasehold.Allocator("cpu:0").zeros(1 << 20)
        gc.collect()
        b.fill(3)
        self.assertEqual(b.tobytes()[-1], 3)

    def test_buffers_are_made_by_devices_only(self) -> None:
        for arguments in [(), (1,), (b"",)]:
            with self.assertRaises(TypeError):
                leasehold.Buffer(*arguments)

    def test_threads_share_buffers(self) -> None:
        shared = CPU.zeros(1 << 12)
        failures: list[BaseException] = []

        def work(seed: int) -> None:
            try:
                for i in range(300):
                    own = CPU.empty(1 << (4 + (i + seed) % 12))
                    own.fill(seed)
                    self.assertEqual(own.tobytes(), bytes([seed]) * own.nbytes)
                    shared.copy_from(bytes([seed]) * shared.nbytes)
                    self.assertEqual(len(set(shared.tobytes())), 1)
                    if i % 3:
                        own.free()
            except BaseException as e:
                failures.append(e)

        threads = [threading.Thread(target=work, args=(seed,)) for seed in range(1, 5)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual(failures, [])

    def test_frees_and_exports_of_two_threads(self) -> None:
        for _ in range(200):
            b = CPU.zeros(1 << 12)
            outcome: list[object] = []

            def export() -> None:
                try:
                    outcome.append(memoryview(b))
                except leasehold.FreedError as e:
                    outcome.append(e)

            thread = threading.Thread(target=export)
            thread.start()
            try:
                b.free()
            except leasehold.ExportError:
                pass
            thread.join()
            if isinstance(outcome[0], memoryview):
                self.assertFalse(b.freed)
                self.assertEqual(outcome[0][0], 0)


class Allocators(unittest.TestCase):
    def test_a_budget_is_kept(self) -> None:
        allocator = leasehold.Allocator(CPU, policy="compact", budget=4 << 20, name="small")
        self.assertEqual((allocator.policy, allocator.budget, allocator.device), ("compact", 4 << 20, CPU))
        kept = allocator.zeros(3 << 20)
        with self.assertRaises(MemoryError) as raised:
            allocator.empty(3 << 20)
        self.assertIsInstance(raised.exception, leasehold.OutOfMemoryError)
        self.assertRegex(str(raised.exception), "budget|small")
        statistics = allocator.statistics()
        # It tries again if other allocators of the device had memory to give back.
        self.assertIn(statistics["failures"], (1, 2))
        self.assertLessEqual(statistics["reserved_bytes_peak"] or 0, 4 << 20)
        allocator.budget = None
        self.assertIsNone(allocator.budget)
        more = allocator.zeros(3 << 20)
        self.assertEqual(allocator.statistics()["allocated_bytes"], kept.nbytes + more.nbytes)

    def test_trim_gives_back(self) -> None:
        allocator = leasehold.Allocator(CPU)
        allocator.zeros(8 << 20).free()
        before = allocator.statistics()["reserved_bytes"] or 0
        freed = allocator.trim()
        self.assertGreaterEqual(before, 8 << 20)
        self.assertEqual(allocator.statistics()["reserved_bytes"], before - freed)
        allocator.reset_peaks()
        self.assertEqual(allocator.statistics()["reserved_bytes_peak"], before - freed)

    def test_snapshots_have_names_and_events(self) -> None:
        allocator = leasehold.Allocator(CPU, trace_events=64)
        weights = allocator.zeros(1 << 20)
        weights.name = "weights"
        self.assertEqual(weights.name, "weights")
        snapshot = allocator.snapshot()
        self.assertEqual((snapshot["device"], snapshot["allocated"]), ("cpu:0", 1 << 20))
        memory = snapshot["pools"][0]["memory"]
        self.assertIn("weights", memory["names"].values())
        self.assertTrue(memory["events"])
        blocks = [b for s in memory["segments"] for b in s["blocks"]]
        self.assertEqual(sum(b["requested"] for b in blocks), 1 << 20)

    def test_wrong_settings(self) -> None:
        with self.assertRaises(ValueError):
            leasehold.Allocator(CPU, policy="hasty")


class Reports(unittest.TestCase):
    def test_a_report_is_one_page(self) -> None:
        import pathlib
        import tempfile

        allocator = leasehold.Allocator(CPU, trace_events=1000)
        held = allocator.zeros(1 << 20)
        held.name = "activations"
        with tempfile.TemporaryDirectory() as folder:
            path = pathlib.Path(folder) / "report.html"
            for source in (allocator, allocator.snapshot(), allocator._snapshot_json()):
                leasehold.report(path, source)
                page = path.read_text(encoding="utf-8")
                self.assertTrue(page.startswith("<!DOCTYPE html>"))
                self.assertIn("activations", page)
            leasehold.report(path, CPU)
            self.assertIn("cpu:0", path.read_text(encoding="utf-8"))
            # Without a source the report is about the memory that `leasehold.torch` named.
            _report.set_default(allocator._snapshot_json)
            try:
                leasehold.report(path)
            finally:
                _report.set_default(None)
            self.assertIn("activations", path.read_text(encoding="utf-8"))


@unittest.skipIf(np is None, "no NumPy")
class NumPy(unittest.TestCase):
    def test_arrays_share_memory(self) -> None:
        b = CPU.zeros((3, 4), "float32")
        a = np.asarray(b)
        self.assertEqual((a.shape, a.dtype, a.flags.writeable), ((3, 4), np.float32, True))
        a[1, 2] = 5
        self.assertEqual(np.asarray(b)[1, 2], 5)
        del a

    def test_uploads_keep_shape_and_type(self) -> None:
        names = ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
        names += ["float16", "float32", "float64", "complex64", "complex128"]
        for name in names:
            a = np.arange(12).reshape(3, 4).astype(name)
            b = CPU.upload(a)
            self.assertEqual((b.shape, b.dtype), ((3, 4), name))
            np.testing.assert_array_equal(np.asarray(b), a)
            self.assertEqual(CPU.empty(3, a.dtype).dtype, name)
            self.assertEqual(CPU.empty(3, a.dtype.type).dtype, name)
            out = np.zeros_like(a)
            b.copy_to(out)
            np.testing.assert_array_equal(out, a)


if __name__ == "__main__":
    unittest.main()
