"""Arrays of others as sources and targets of copies: types, orders, gaps, and what is refused."""

from __future__ import annotations

import array
import ctypes
import mmap
import struct
import unittest
from typing import Any

import capsules
import leasehold
from capsules import Producer

try:
    import numpy as np
except ImportError:
    np = None

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

CPU = leasehold.Device("cpu:0")


class Record(ctypes.Structure):
    _fields_ = [("a", ctypes.py_object), ("b", ctypes.c_int)]


class Formats(unittest.TestCase):
    """What the buffer protocol calls elements, without NumPy."""

    def test_numbers_keep_shape_and_type(self) -> None:
        numbers = (ctypes.c_int16 * 3 * 2)((1, 2, 3), (4, 5, 6))
        b = CPU.upload(numbers)
        self.assertEqual((b.shape, b.dtype, b.tobytes()), ((2, 3), "int16", bytes(numbers)))
        target = (ctypes.c_int16 * 3 * 2)()
        b.copy_to(target)
        self.assertEqual(bytes(target), bytes(numbers))
        for code, name in [("b", "int8"), ("I", "uint32"), ("q", "int64"), ("d", "float64")]:
            values = array.array(code, [1, 2, 3])
            self.assertEqual(CPU.upload(values).dtype, name)

    def test_bytes_are_taken(self) -> None:
        with mmap.mmap(-1, 6) as mapped:
            mapped[:] = b"abcdef"
            for source in [
                b"abcdef",
                bytearray(b"abcdef"),
                memoryview(b"abcdef"),
                array.array("B", b"abcdef"),
                ctypes.create_string_buffer(b"abcdef", 6),
                (ctypes.c_ubyte * 6)(*b"abcdef"),
                mapped,
            ]:
                b = CPU.upload(source)
                self.assertEqual((b.dtype, b.shape, b.tobytes()), ("uint8", (6,), b"abcdef"))
                target = CPU.zeros((2, 3), "uint8")
                target.copy_from(source)
                self.assertEqual(target.tobytes(), b"abcdef")

    def test_objects_and_pointers_are_refused(self) -> None:
        none = ctypes.POINTER(ctypes.c_int)
        for source in [
            (ctypes.py_object * 1)(b""),
            (Record * 1)(),
            (ctypes.py_object * 1 * 2)(),
            (none * 1)(),
            (ctypes.c_void_p * 1)(),
            memoryview(bytearray(8)).cast("P"),
            (ctypes.CFUNCTYPE(None) * 1)(),
            (ctypes.c_wchar * 2)("a", "b"),
            (ctypes.c_longdouble * 1)(),
        ]:
            view = memoryview(source)
            raw = CPU.zeros(view.nbytes)
            for use in (CPU.upload, raw.copy_from, raw.copy_to, CPU.allocator.upload):
                with self.assertRaises(TypeError) as raised:
                    use(source)
                self.assertIsInstance(raised.exception, leasehold.ArgumentTypeError)
                self.assertIn(view.format, str(raised.exception))

    def test_other_byte_orders_are_converted(self) -> None:
        other = ctypes.c_int32.__ctype_be__
        source = (other * 3)(1, -2, 3)
        b = CPU.upload(source)
        self.assertEqual(memoryview(b).tolist(), [1, -2, 3])
        b.fill(0)
        b.copy_from(source)
        self.assertEqual(memoryview(b).tolist(), [1, -2, 3])
        target = (other * 3)()
        b.copy_to(target)
        self.assertEqual(list(target), [1, -2, 3])
        # Bytes have no order.
        raw = CPU.zeros(12)
        for use in (raw.copy_from, raw.copy_to):
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "newbyteorder"):
                use(source)

    def test_gaps(self) -> None:
        numbers = memoryview(bytearray(range(24))).cast("B", (4, 6))
        every_second = memoryview(numbers)[::2]
        b = CPU.upload(every_second)
        self.assertEqual((b.shape, b.tobytes()), ((2, 6), bytes([*range(6), *range(12, 18)])))
        backwards = memoryview(bytearray(b"abcdef"))[::-1]
        self.assertEqual(CPU.upload(backwards).tobytes(), b"fedcba")
        six = CPU.upload(b"123456")
        six.copy_to(backwards)
        self.assertEqual(bytes(backwards), b"123456")

    def test_tensors_of_dlpack_are_imported(self) -> None:
        contents = struct.pack("<6f", *range(6))
        tensor = Producer(contents, (3, 2), (1, 3))
        b = CPU.upload(tensor)
        self.assertEqual((b.shape, b.dtype), ((3, 2), "float32"))
        self.assertEqual(b.tobytes(), struct.pack("<6f", 0, 3, 1, 4, 2, 5))
        b.copy_to(Producer(contents, (3, 2)))
        b.fill(9)
        b.copy_to(tensor)
        self.assertEqual(tensor.memory.raw, struct.pack("<6f", *[9] * 6))
        b.copy_from(Producer(contents, (3, 2)))
        self.assertEqual(b.tobytes(), contents)
        # Each copy let the tensor go.
        self.assertEqual(tensor.deleted, 2)
        half = CPU.upload(Producer(contents[:4], (2,), kind=(capsules.BFLOAT, 16)))
        self.assertEqual((half.dtype, half.shape), ("bfloat16", (2,)))
        fixed = Producer(contents, (6,), version=(1, 0), flags=capsules.READ_ONLY)
        with self.assertRaises(leasehold.InvalidArgumentError):
            CPU.zeros(6, "float32").copy_to(fixed)
        for wrong in (Producer(contents, (3,), lanes=2), Producer(contents, (1,), kind=(3, 64))):
            with self.assertRaises(leasehold.Error):
                CPU.upload(wrong)
            self.assertEqual(wrong.deleted, 1)

    def test_array_interfaces(self) -> None:
        class Picture:
            def __init__(self, data: Any, **more: Any) -> None:
                self.__array_interface__ = {"version": 3, "data": data, **more}

        data = bytes(range(12))
        b = CPU.upload(Picture(data, shape=(2, 3), typestr="<u2"))
        self.assertEqual((b.shape, b.dtype, b.tobytes()), ((2, 3), "uint16", data))
        b = CPU.upload(Picture(data, shape=(2, 3), typestr="|u1", strides=(-6, 2), offset=6))
        self.assertEqual(b.tobytes(), bytes([6, 8, 10, 0, 2, 4]))
        target = bytearray(4)
        CPU.upload(memoryview(b"\1\0\2\0").cast("H")).copy_to(Picture(target, shape=(2,), typestr=">u2"))
        self.assertEqual(target, b"\0\1\0\2")
        far = 2**62
        for wrong in [
            {"shape": (13,), "typestr": "|u1"},
            {"shape": (far, 4), "typestr": "|u1"},
            {"shape": (2,), "typestr": "|u1", "strides": (12,)},
            {"shape": (2, 2), "typestr": "|u1", "strides": (far, far)},
            {"shape": (2,), "typestr": "|u1", "strides": (-1,)},
            {"shape": (1,), "typestr": "|u1", "offset": -1},
            {"shape": (1,), "typestr": "|u1", "offset": 12},
            {"shape": (1,), "typestr": "|u1", "offset": 2**63 - 1},
            {"shape": (1,), "typestr": "|u1", "strides": ()},
            {"shape": range(1 << 40), "typestr": "|u1"},
            {"shape": (1,), "typestr": "|O8"},
            {"shape": (1,), "typestr": ""},
            {"shape": (1,), "typestr": "\u00e9u1"},
            {"shape": (1,)},
            {"typestr": "|u1"},
            {"shape": (1,), "typestr": "|u1", "mask": b"1"},
        ]:
            with self.subTest(wrong), self.assertRaises(leasehold.InvalidArgumentError):
                CPU.upload(Picture(data, **wrong))
        # Nobody vouches for an address.
        for address in ((0x41414141, False), None, 0x41414141):
            with self.assertRaises(leasehold.ArgumentTypeError):
                CPU.upload(Picture(address, shape=(8,), typestr="|u1"))
        with self.assertRaises(leasehold.InvalidArgumentError):
            CPU.zeros(12).copy_to(Picture(data, shape=(12,), typestr="|u1"))

    def test_what_lends_nothing_is_refused(self) -> None:
        released = memoryview(b"")
        released.release()
        for wrong in (None, 3, 1.5, "text", [1, 2], object(), released, np):
            for use in (CPU.upload, CPU.zeros(2).copy_from, CPU.zeros(2).copy_to):
                with self.assertRaises(leasehold.ArgumentTypeError):
                    use(wrong)

    def test_an_object_that_breaks_says_so(self) -> None:
        class Broken:
            def __dlpack_device__(self) -> Any:
                raise ZeroDivisionError

            def __dlpack__(self, **_: Any) -> Any:
                raise AssertionError

        with self.assertRaises(ZeroDivisionError):
            CPU.upload(Broken())

    def test_shapes(self) -> None:
        square = CPU.zeros((4, 4), "int16")
        flat = CPU.zeros(16, "int16")
        flat.fill(3)
        square.copy_from(flat)
        self.assertEqual(square.tobytes(), flat.tobytes())
        square.copy_from(bytes(32))
        self.assertEqual(square.tobytes(), bytes(32))
        wrong = [CPU.zeros((2, 8), "int16"), CPU.zeros((4, 8), "uint8"), CPU.zeros((4, 5), "int16")]
        for other in wrong:
            for use in (square.copy_from, square.copy_to, other.copy_from, other.copy_to):
                with self.assertRaises(leasehold.InvalidArgumentError) as raised:
                    use(square if use.__self__ is other else other)
                self.assertIn("(4, 4)", str(raised.exception))
                if other.nbytes != square.nbytes and other.dtype == square.dtype:
                    self.assertIn("Buffer.view", str(raised.exception))
                self.assertIn(str(other.shape), str(raised.exception))


@unittest.skipIf(np is None, "no NumPy")
class NumPy(unittest.TestCase):
    def test_text_is_refused_as_text(self) -> None:
        for text in (np.array(["some", "text"]), np.array([b"some", b"text"])):
            with self.assertRaisesRegex(leasehold.ArgumentTypeError, "they are text: encode it"):
                CPU.upload(text)

    def test_any_strides(self) -> None:
        a = np.arange(2 * 3 * 4, dtype=np.int32).reshape(2, 3, 4)
        records = np.zeros((3, 2), [("pad", "u1"), ("x", "f8")])
        records["x"] = np.arange(6).reshape(3, 2)
        arrays = [
            a.T,
            a.transpose(1, 0, 2),
            np.asfortranarray(a),
            a[:, ::2],
            a[::-1, ::-1, ::-1],
            a[1:, 1:2, ::-3],
            a[..., None].T,
            a[:0],
            a[:, 1:1],
            a[1, 2, 3],
            a[1, 2, 3, ...],
            records["x"],
            records["x"].T,
            a.astype(">i4").T,
            a.astype("complex64").astype(">c8")[:, ::-1],
            np.zeros((1,) * 32, "i2"),
            np.broadcast_to(np.arange(3.0), (4, 3)),
        ]
        for dtype in ("bool", "int8", "float16", "complex128"):
            arrays += [a.astype(dtype).T, a.astype(dtype)[::-1, 1:]]
        for source in arrays:
            native = np.ascontiguousarray(source.astype(source.dtype.newbyteorder("=")))
            native = native.reshape(source.shape)
            b = CPU.upload(source)
            self.assertEqual((b.shape, b.dtype), (source.shape, native.dtype.name))
            self.assertEqual(b.tobytes(), native.tobytes())
            b.view("uint8").fill(0)
            b.copy_from(source)
            self.assertEqual(b.tobytes(), native.tobytes())
            if not isinstance(source, np.ndarray) or not source.flags.writeable:
                continue
            saved, surroundings = source.copy(), source.base
            source[...] = 0
            b.copy_to(source)
            np.testing.assert_array_equal(source, saved)
            del surroundings
        np.testing.assert_array_equal(a, np.arange(24).reshape(2, 3, 4))
        self.assertFalse(records["pad"].any())

    def test_targets_that_cannot_be_written(self) -> None:
        fixed = np.zeros(4, "i4")
        fixed.flags.writeable = False
        base = np.zeros(4, "i4")
        shared = np.lib.stride_tricks.as_strided(base, (4, 4), (0, 4))
        windows = np.lib.stride_tricks.as_strided(base, (2, 3), (4, 4))
        for target in (fixed, fixed[::-1], np.broadcast_to(base, (4, 4)), shared, windows):
            b = CPU.zeros(target.shape, "int32")
            b.fill(1)
            with self.assertRaises(leasehold.InvalidArgumentError):
                b.copy_to(target)
        # As many elements as there are must not be visited, either.
        many = (1 << 20, 1 << 20)
        for strides in ((0, 0), (4, 4)):
            base = np.zeros(1 << 21, "i4")
            large = leasehold.from_dlpack(np.lib.stride_tricks.as_strided(base, many, strides))
            for use in (lambda: large.fill(1), lambda: large.copy_from(large)):
                with self.assertRaises((leasehold.InvalidArgumentError)):
                    use()
            for use in (large.tobytes, lambda: large.to("cpu:0"), lambda: CPU.upload(large)):
                with self.assertRaises(leasehold.OutOfMemoryError):
                    use()
            self.assertFalse(base.any())
        largest = Producer(b"1", ((1 << 63) - 1,), (0,), kind=(capsules.UINT, 8))
        with self.assertRaises(leasehold.OutOfMemoryError):
            leasehold.from_dlpack(largest).tobytes()
        self.assertFalse(fixed.any() or base.any())

    def test_ends_that_share_memory(self) -> None:
        for turn in (lambda a: a.T, lambda a: a[::-1], lambda a: a[::-1, ::-1].T, lambda a: a):
            b = CPU.upload(np.arange(16.0).reshape(4, 4))
            expected = np.asarray(b).copy()
            b.copy_from(turn(np.asarray(b)))
            np.testing.assert_array_equal(np.asarray(b), turn(expected))
            b.copy_from(expected)
            b.copy_to(turn(np.asarray(b)))
            np.testing.assert_array_equal(turn(np.asarray(b)), expected)
        # A buffer with gaps in the memory of another one.
        b = CPU.upload(np.arange(8, dtype="i2"))
        odd = leasehold.from_dlpack(np.asarray(b)[1::2])
        b.view(shape=4).copy_from(odd)
        self.assertEqual(np.asarray(b).tolist(), [1, 3, 5, 7, 4, 5, 6, 7])
        odd.copy_from(b.view(shape=4))
        self.assertEqual(np.asarray(b).tolist(), [1, 1, 5, 3, 4, 5, 6, 7])

    def test_buffers_with_gaps(self) -> None:
        a = np.arange(12.0).reshape(3, 4)
        b = leasehold.from_dlpack(a.T)
        self.assertFalse(b.is_contiguous)
        for copied in (b.to("cpu:0"), CPU.upload(b), leasehold.from_dlpack(a.T, copy=True)):
            self.assertTrue(copied.is_contiguous)
            np.testing.assert_array_equal(np.asarray(copied), a.T)
        self.assertEqual(b.tobytes(), a.T.tobytes())
        out = np.zeros_like(a)
        b.copy_to(out.T)
        np.testing.assert_array_equal(out, a)
        b.copy_from(np.ones((4, 3)))
        self.assertTrue((a == 1).all())
        leasehold.from_dlpack(a[:, ::2]).fill(5)
        self.assertEqual(a.tolist(), [[5, 1, 5, 1]] * 3)

    def test_what_has_no_type_is_refused(self) -> None:
        o = np.array([object()])
        arrays = [
            o,
            np.zeros(2, [("a", "O"), ("b", "i8")]),
            np.zeros(2, [("a", "O", (2,))]),
            np.zeros(2, [("a", "i4"), ("b", "f8")]),
            np.array(["ab", "c"]),
            np.array([b"ab", b"c"]),
            np.zeros(2, "V8"),
            np.zeros(2, "M8[s]"),
            np.zeros(2, "m8[s]"),
            np.zeros(2, np.longdouble),
            np.zeros(2, np.clongdouble),
        ]
        for source in arrays:
            raw = CPU.zeros(source.nbytes)
            for use in (CPU.upload, raw.copy_from, raw.copy_to):
                with self.assertRaises(TypeError) as raised:
                    use(source)
                self.assertIsInstance(raised.exception, leasehold.Error)
        self.assertIsInstance(o[0], object)

    def test_arrays_that_numpy_cannot_have(self) -> None:
        freed = CPU.zeros(3)
        freed.free()
        with self.assertRaises(leasehold.FreedError):
            np.asarray(freed)
        for name, way in [("bfloat16", "uint16"), ("float8_e4m3fn", "uint8"), ("float8_e5m2", "tobytes")]:
            for make in (np.asarray, np.array, CPU.zeros(3, name).__class__.__array__):
                with self.assertRaisesRegex(leasehold.ExportError, way):
                    make(CPU.zeros(3, name))
        b = CPU.upload(np.arange(3.0))
        self.assertEqual(b.__array__("int32").dtype, np.int32)
        self.assertTrue(np.shares_memory(b.__array__(), np.asarray(b)))
        self.assertFalse(np.shares_memory(b.__array__(copy=True), np.asarray(b)))

    @unittest.skipIf(ml_dtypes is None, "no ml_dtypes")
    def test_types_of_ml_dtypes(self) -> None:
        for name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
            a = np.arange(6.0).reshape(2, 3).astype(getattr(ml_dtypes, name))
            for source in (a, a.T, a[:, ::-1]):
                b = CPU.upload(source)
                self.assertEqual((b.dtype, b.shape, b.tobytes()), (name, source.shape, source.tobytes()))
                target = np.zeros((3, 2), a.dtype).T.reshape(source.shape)
                b.copy_to(target)
                self.assertEqual(target.tobytes(), source.tobytes())
                b.copy_from(source)
        with self.assertRaises(TypeError):
            CPU.upload(a.astype(ml_dtypes.int4))

    def test_an_array_may_lie(self) -> None:
        class Lies(np.ndarray):
            shape = property(lambda self: (1 << 40,))  # type: ignore[assignment]
            dtype = property(lambda self: np.dtype("O"))  # type: ignore[assignment]
            nbytes = 1 << 40

            def __len__(self) -> int:
                return -5

            def view(self, *_: Any) -> Any:  # type: ignore[override]
                return np.zeros(1 << 10, "u2")

        a = np.arange(4.0).view(Lies)
        b = CPU.upload(a)
        self.assertEqual((b.shape, b.dtype), ((4,), "float64"))


if __name__ == "__main__":
    unittest.main()
