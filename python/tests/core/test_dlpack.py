"""DLPack on the CPU: both forms of capsules both ways, requests, refusals, lifetimes."""

from __future__ import annotations

import gc
import struct
import threading
import unittest
from typing import Any

import capsules
import leasehold
from capsules import Consumer, Producer

try:
    import numpy as np
except ImportError:
    np = None

CPU = leasehold.Device("cpu:0")


class Export(unittest.TestCase):
    def test_both_forms(self) -> None:
        b = CPU.zeros((2, 3), "float32")
        b.fill(2.5)
        self.assertEqual(b.__dlpack_device__(), (capsules.CPU, 0))
        for version, versioned in [(None, False), ((0, 8), False), ((1, 0), True), ((2, 1), True)]:
            with self.subTest(version):
                consumer = Consumer(b.__dlpack__(max_version=version))
                self.assertEqual(consumer.versioned, versioned)
                tensor = consumer.tensor
                self.assertEqual((tensor.device_type, tensor.device_id), (capsules.CPU, 0))
                self.assertEqual((tensor.code, tensor.bits, tensor.lanes), (capsules.FLOAT, 32, 1))
                self.assertEqual((consumer.shape, consumer.strides), ([2, 3], [3, 1]))
                self.assertEqual(consumer.bytes(24), b.tobytes())
                if versioned:
                    self.assertEqual((consumer.managed.major, consumer.managed.flags), (1, 0))
                with self.assertRaises(leasehold.ExportError):
                    b.free()
                consumer.delete()
        b.free()

    def test_a_capsule_that_nobody_takes_goes(self) -> None:
        b = CPU.zeros(16)
        for version in (None, (1, 0)):
            capsule = b.__dlpack__(max_version=version)
            with self.assertRaises(leasehold.ExportError):
                b.free()
            del capsule
            gc.collect()
        b.free()

    def test_memory_lives_as_long_as_a_consumer(self) -> None:
        allocator = leasehold.Allocator(CPU)
        b = allocator.zeros(1 << 20)
        b.fill(7)
        consumer = Consumer(b.__dlpack__())
        del b
        gc.collect()
        self.assertEqual(allocator.statistics()["blocks"], 1)
        self.assertEqual(consumer.bytes(1 << 20), b"\7" * (1 << 20))
        # A consumer may be on any thread, without Python.
        thread = threading.Thread(target=consumer.delete)
        thread.start()
        thread.join()
        self.assertEqual(allocator.statistics()["blocks"], 0)

    def test_views_and_types(self) -> None:
        b = CPU.zeros(64)
        consumer = Consumer(b.view("bfloat16", (2, 4), offset=16).__dlpack__())
        tensor = consumer.tensor
        self.assertEqual((tensor.code, tensor.bits), (capsules.BFLOAT, 16))
        self.assertEqual(tensor.data, b.address + 16)
        consumer.delete()
        empty = Consumer(CPU.zeros((3, 0), "int64").__dlpack__())
        self.assertEqual((empty.shape, empty.tensor.data), ([3, 0], None))
        empty.delete()
        scalar = Consumer(CPU.zeros((), "int64").__dlpack__())
        self.assertEqual(scalar.tensor.ndim, 0)
        scalar.delete()

    def test_copies_on_request(self) -> None:
        b = CPU.zeros(4, "int32")
        consumer = Consumer(b.__dlpack__(copy=True, max_version=(1, 0)))
        self.assertEqual(consumer.managed.flags, capsules.IS_COPIED)
        b.fill(1)
        self.assertEqual(consumer.bytes(16), bytes(16))
        b.free()  # the copy has memory of its own
        consumer.delete()
        b = CPU.zeros(4, "int32")
        shared = Consumer(b.__dlpack__(copy=False, dl_device=(capsules.CPU, 0)))
        self.assertEqual(shared.tensor.data, b.address)
        shared.delete()

    def test_what_cannot_be_done_is_refused(self) -> None:
        b = CPU.zeros(4)
        for device in [(capsules.CUDA, 0), (capsules.EXTENSION, 3)]:
            with self.assertRaises(BufferError):
                b.__dlpack__(dl_device=device)
        with self.assertRaises(ValueError):
            b.__dlpack__(stream=1)
        with self.assertRaises(TypeError):
            b.__dlpack__(None)
        b.free()  # no refusal left an export behind
        with self.assertRaises(leasehold.FreedError):
            b.__dlpack__()


class Import(unittest.TestCase):
    contents = struct.pack("<6f", *range(6))

    def test_both_forms(self) -> None:
        for version in (None, (1, 0), (1, 7)):
            for old in (False, True):
                producer = Producer(self.contents, (2, 3), version=version, old_signature=old)
                b = leasehold.from_dlpack(producer)
                self.assertEqual((b.shape, b.strides, b.dtype), ((2, 3), (12, 4), "float32"))
                self.assertEqual((b.device, b.tobytes()), (CPU, self.contents))
                b.fill(1.0)
                self.assertEqual(producer.memory.raw, struct.pack("<6f", *[1.0] * 6))
                self.assertNotIn("stream", producer.asked[0])
                self.assertEqual("max_version" in producer.asked[0], not old)
                self.assertEqual(producer.deleted, 0)
                part = b.view(shape=1)
                del b
                self.assertEqual(producer.deleted, 0)
                del part
                self.assertEqual(producer.deleted, 1)

    def test_a_capsule_is_taken_once(self) -> None:
        producer = Producer(self.contents, (6,))
        capsule = producer.capsule()
        b = leasehold.from_dlpack(capsule)
        with self.assertRaises(ValueError):
            leasehold.from_dlpack(capsule)
        b.free()
        self.assertEqual(producer.deleted, 1)

    def test_strides(self) -> None:
        column = leasehold.from_dlpack(Producer(self.contents, (3, 2), (1, 3)))
        self.assertEqual((column.strides, column.is_contiguous), ((4, 12), False))
        with memoryview(column) as view:
            self.assertEqual(view.tolist(), [[0, 3], [1, 4], [2, 5]])
        backwards = leasehold.from_dlpack(Producer(self.contents, (6,), (-1,), offset=20))
        with memoryview(backwards) as view:
            self.assertEqual(view.tolist(), [5, 4, 3, 2, 1, 0])
        again = leasehold.from_dlpack(backwards)
        with memoryview(again) as view:
            self.assertEqual(view.tolist(), [5, 4, 3, 2, 1, 0])
        same = leasehold.from_dlpack(Producer(self.contents, (4, 2), (0, 1)))
        with memoryview(same) as view:
            self.assertEqual(view.tolist(), [[0, 1]] * 4)
        with self.assertRaises(leasehold.InvalidArgumentError):
            column.view()
        self.assertEqual(backwards.tobytes(), struct.pack("<6f", *range(5, -1, -1)))
        self.assertEqual(column.to("cpu:0").tobytes(), struct.pack("<6f", 0, 3, 1, 4, 2, 5))
        part = Producer(self.contents, (3,), (2,))
        leasehold.from_dlpack(part).fill(7)
        self.assertEqual(part.memory.raw, struct.pack("<6f", 7, 1, 7, 3, 7, 5))
        # The strides of single elements mean nothing.
        for stride in (77, 2**63 - 1, -(2**63)):
            one = leasehold.from_dlpack(Producer(self.contents, (1, 6), (stride, 1)))
            self.assertEqual((one.is_contiguous, one.strides), (True, (24, 4)))
            self.assertEqual(one.tobytes(), self.contents)

    def test_read_only(self) -> None:
        producer = Producer(self.contents, (6,), version=(1, 0), flags=capsules.READ_ONLY)
        b = leasehold.from_dlpack(producer)
        self.assertTrue(b.readonly)
        self.assertEqual(b.tobytes(), self.contents)
        for write in [
            lambda: b.fill(0),
            lambda: b.copy_from(self.contents),
            lambda: b.view("uint8").fill(0),
        ]:
            with self.assertRaises(leasehold.InvalidArgumentError):
                write()
        with memoryview(b) as view:
            self.assertTrue(view.readonly)
        import io

        with self.assertRaises((BufferError, TypeError)):
            io.BytesIO(bytes(24)).readinto(b)
        # The buffer stays read-only for the next consumer. Old consumers have no such flag.
        with self.assertRaises(BufferError):
            b.__dlpack__()
        consumer = Consumer(b.__dlpack__(max_version=(1, 0)))
        self.assertEqual(consumer.managed.flags, capsules.READ_ONLY)
        consumer.delete()
        copied = Consumer(b.__dlpack__(copy=True))
        copied.delete()

    def test_empty_and_scalar(self) -> None:
        empty = Producer(b"", (0, 3), data=0)
        b = leasehold.from_dlpack(empty)
        self.assertEqual((b.shape, b.tobytes()), ((0, 3), b""))
        b.free()
        self.assertEqual(empty.deleted, 1)
        scalar = leasehold.from_dlpack(Producer(self.contents, (), offset=4))
        self.assertEqual((scalar.shape, scalar.tobytes()), ((), self.contents[4:8]))

    def test_what_has_no_name_here_is_refused(self) -> None:
        far = 2**62
        wrong: dict[str, dict[str, Any]] = {
            "lanes": {"shape": (3,), "lanes": 2},
            "kind": {"shape": (6,), "kind": (3, 64)},
            "bits": {"shape": (6,), "kind": (capsules.INT, 4)},
            "negative shape": {"shape": (-1,)},
            "dimensions": {"shape": (1,), "ndim": 100000},
            "negative dimensions": {"shape": (1,), "ndim": -1},
            "large": {"shape": (far, far)},
            "far strides": {"shape": (3, 3), "strides": (far, far)},
            "before memory": {"shape": (3,), "strides": (-far // 8,)},
            "no memory": {"shape": (3,), "data": 0},
            "misaligned": {"shape": (3,), "offset": 2},
            "another version": {"shape": (6,), "version": (2, 0)},
            "another device": {"shape": (6,), "device": (10, 0)},
        }
        for name, settings in wrong.items():
            with self.subTest(name):
                producer = Producer(self.contents, **settings)
                with self.assertRaises((BufferError, ValueError, leasehold.UnsupportedError)):
                    leasehold.from_dlpack(producer)
                with self.assertRaises((BufferError, ValueError, leasehold.UnsupportedError)):
                    leasehold.from_dlpack(producer.capsule())
                # The consumer gave back each tensor that it took, once.
                if "another" not in name:
                    self.assertEqual(producer.deleted, 2)
        with self.assertRaises(leasehold.ArgumentTypeError):
            leasehold.from_dlpack(b"bytes have none")

    def test_devices_and_copies(self) -> None:
        producer = Producer(self.contents, (6,))
        shared = leasehold.from_dlpack(producer, device="cpu:0", copy=False)
        self.assertEqual(shared.address, leasehold.from_dlpack(shared).address)
        copied = leasehold.from_dlpack(producer, copy=True)
        self.assertEqual(producer.deleted, 1)
        shared.fill(0)
        self.assertEqual(copied.tobytes(), self.contents)

    def test_own_memory_comes_back(self) -> None:
        b = CPU.zeros(1 << 10)
        again = leasehold.from_dlpack(b)
        again.fill(5)
        self.assertEqual((again.address, b.tobytes()[-1]), (b.address, 5))
        with self.assertRaises(leasehold.ExportError):
            b.free()
        again.free()
        b.free()

    def test_a_deleter_may_use_the_buffer_that_goes(self) -> None:
        class Loud(Producer):
            def _delete(self, at: int) -> None:
                super()._delete(at)
                b.free()
                with_error.append(b.freed)

        with_error: list[bool] = []
        producer = Loud(self.contents, (6,))
        b = leasehold.from_dlpack(producer)
        b.free()
        self.assertEqual((producer.deleted, with_error), (1, [True]))

    def test_deleters_of_many_threads(self) -> None:
        producers = [Producer(self.contents, (6,)) for _ in range(64)]
        buffers = [leasehold.from_dlpack(p) for p in producers]
        threads = [
            threading.Thread(target=lambda part: [b.free() for b in part], args=(buffers[i::4],))
            for i in range(4)
        ]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        self.assertEqual([p.deleted for p in producers], [1] * 64)


@unittest.skipIf(np is None, "no NumPy")
class NumPy(unittest.TestCase):
    def test_both_ways(self) -> None:
        b = CPU.upload(np.arange(12, dtype=np.float64).reshape(3, 4))
        a = np.from_dlpack(b)
        np.testing.assert_array_equal(a, np.arange(12).reshape(3, 4))
        self.assertEqual(a.ctypes.data, b.address)
        with self.assertRaises(leasehold.ExportError):
            b.free()
        del a
        b.free()
        source = np.arange(12, dtype=np.int16).reshape(3, 4)
        for array in (source, source[:, ::2], source.T, source[::-1]):
            c = leasehold.from_dlpack(array)
            np.testing.assert_array_equal(np.asarray(c), array)
            np.testing.assert_array_equal(np.from_dlpack(c), array)
            self.assertEqual(c.address, array.ctypes.data)

    def test_an_import_keeps_the_array(self) -> None:
        b = leasehold.from_dlpack(np.full(1 << 16, 3, dtype=np.int32))
        gc.collect()
        np.full(1 << 16, 4, dtype=np.int32)
        self.assertEqual(set(b.tobytes()), {0, 3})

    def test_read_only_arrays(self) -> None:
        a = np.arange(4.0)
        a.flags.writeable = False
        try:
            b = leasehold.from_dlpack(a)
        except BufferError:
            self.skipTest("this NumPy exports no read-only array")
        self.assertTrue(b.readonly)
        self.assertFalse(np.asarray(b).flags.writeable)
        self.assertFalse(np.from_dlpack(b).flags.writeable)


if __name__ == "__main__":
    unittest.main()
