"""Arguments that are wrong, too large, or lie: each is an error of the package's own."""

from __future__ import annotations

import collections.abc
import inspect
import math
import operator
import unittest
from typing import Any, Callable
from unittest import mock

import leasehold
from leasehold import _native

CPU = leasehold.Device("cpu:0")


class Wide(int):
    """A number that gives other bytes than it has."""

    def to_bytes(self, *_: Any, **__: Any) -> bytes:
        return b"A" * (1 << 22)

    def __index__(self) -> int:
        return self

    def bit_length(self) -> int:
        return 1


class Long(collections.abc.Sequence):  # type: ignore[type-arg]
    """A sequence whose length is a lie."""

    def __init__(self, length: int, item: int = 1) -> None:
        self.length, self.item = length, item

    def __len__(self) -> int:
        return self.length

    def __getitem__(self, at: Any) -> Any:
        return self.item


class Raises:
    def __index__(self) -> int:
        raise ZeroDivisionError

    __float__ = __index__
    __iter__ = __index__


class Numbers(unittest.TestCase):
    def test_fills_that_fit(self) -> None:
        for dtype, value in [("uint8", 255), ("int8", -128), ("int16", 32767), ("uint32", 2**32 - 1)]:
            b = CPU.empty(2, dtype)
            b.fill(value)
            self.assertEqual(memoryview(b).tolist(), [value] * 2)
        for dtype, infinity in [("float32", -math.inf), ("float64", math.inf)]:
            b = CPU.empty(1, dtype)
            b.fill(infinity)
            self.assertEqual(memoryview(b).tolist(), [infinity])
            b.fill(math.nan)
            self.assertTrue(math.isnan(memoryview(b)[0]))
        truth = CPU.empty(2, "bool")
        for value in (True, False, 1, 0, 1.0):
            truth.fill(value)
            self.assertEqual(memoryview(truth).tolist(), [bool(value)] * 2)

    def test_fills_that_do_not_fit(self) -> None:
        wrong: dict[str, list[Any]] = {
            "bool": [2, -1, 0.5, "x", None, [1]],
            "uint8": [300, 256, -1, 1.5, 2**70, -(2**70), "1", b"1", None, 1j],
            "int8": [128, -129, 1.0],
            "int64": [2**63, -(2**63) - 1, math.nan],
            "uint64": [2**64, -1, math.inf],
            "float16": [70000.0, -1e300, 10**400, 1j, "1", None],
            "bfloat16": [1e39, 1j],
            "float32": [1e39, -1e39, 10**400, 1 + 0j, [1.0]],
            "float64": [10**400, 1j, object()],
            "complex64": [1e39, 1e39j, "1", None, 10**400],
            "complex128": [10**400, object()],
            "float8_e4m3fn": [1.0],
        }
        for dtype, values in wrong.items():
            b = CPU.zeros(3, dtype)
            for value in values:
                with self.subTest(dtype, value=value), self.assertRaises(leasehold.InvalidArgumentError):
                    b.fill(value)
            self.assertEqual(b.tobytes(), bytes(b.nbytes))

    def test_bytes_of_a_number_are_its_own(self) -> None:
        for dtype in ("int8", "int32", "uint64"):
            b = CPU.zeros(2, dtype)
            guard = CPU.zeros(1 << 16)
            with mock.patch.object(operator, "index", lambda value: value):
                b.fill(Wide(1))
            self.assertEqual(memoryview(b).tolist(), [1, 1])
            self.assertEqual(guard.tobytes(), bytes(1 << 16))

    def test_an_error_of_the_value_passes(self) -> None:
        for use in [
            lambda: CPU.zeros(1, "int8").fill(Raises()),
            lambda: CPU.zeros(1, "float32").fill(Raises()),
            lambda: CPU.zeros(Raises()),
            lambda: CPU.zeros((1, Raises())),
            lambda: CPU.allocator.trim(Raises()),
        ]:
            with self.assertRaises(ZeroDivisionError):
                use()

    def test_numbers_out_of_range(self) -> None:
        b = CPU.zeros(8)
        far = [-1, 2**64, 2**200, -(2**200), 1.5, "8", b"8", [8], object()]
        uses: dict[str, Callable[[Any], Any]] = {
            "offset": lambda n: b.view(offset=n),
            "keep": lambda n: CPU.allocator.trim(n),
            "trace_events": lambda n: leasehold.Allocator(CPU, trace_events=n),
            "budget": lambda n: leasehold.Allocator(CPU, budget=n if n != "8" else "8 QiB"),
            "set budget": lambda n: setattr(leasehold.Allocator(CPU), "budget", n if n != "8" else "-8"),
            "stream": lambda n: b.__dlpack__(stream=n if n != -1 else 2**63),
            "max_version": lambda n: b.__dlpack__(max_version=n),
            "versions": lambda n: b.__dlpack__(max_version=(n, n)),
            "dl_device": lambda n: b.__dlpack__(dl_device=(n, 1)),
            "device": lambda n: leasehold.Device(n),
            "name": lambda n: setattr(b, "name", n if n != "8" else "\ud800"),
            "pool": lambda n: leasehold.Allocator(CPU, name=n if n != "8" else "\ud800"),
            "policy": lambda n: leasehold.Allocator(CPU, policy=n),
        }
        for what, use in uses.items():
            for number in far:
                with self.subTest(what, number=number), self.assertRaises(leasehold.Error):
                    use(number)
        b.free()

    def test_many_events_are_refused(self) -> None:
        for events in (1 << 25, 1 << 40, 1 << 60, (1 << 64) - 1):
            with self.assertRaises(leasehold.InvalidArgumentError):
                leasehold.Allocator(CPU, trace_events=events)

    def test_timeouts(self) -> None:
        for timeout in (0, 0.0, 1, 1e18, 1.8e19):
            CPU.synchronize(timeout=timeout)
        for timeout in (-1.0, -1, math.nan, math.inf, -math.inf, 1e300, 10**400, "1", 1j, [1]):
            with self.assertRaises(leasehold.InvalidArgumentError):
                CPU.synchronize(timeout=timeout)  # type: ignore[arg-type]

    def test_budgets_in_words(self) -> None:
        for text, number in [
            ("1GiB", 1 << 30),
            (" 1.5 gib ", 3 << 29),
            ("64 MiB", 64 << 20),
            ("100", 100),
            ("7B", 7),
            ("2KB", 2000),
            ("18446744073709551614", 2**64 - 2),
            ("0.5TiB", 1 << 39),
        ]:
            allocator = leasehold.Allocator(CPU, budget=text)
            self.assertEqual(allocator.budget, number)
            allocator.budget = None
            self.assertIsNone(allocator.budget)
            allocator.budget = text
            self.assertEqual(allocator.budget, number)
        for wrong in ("", "GiB", "-1", "1..5", "1 QiB", "1e3", "nan", "9" * 400, "20000000TiB", "٣"):
            with self.assertRaises(leasehold.InvalidArgumentError):
                leasehold.Allocator(CPU, budget=wrong)


class Shapes(unittest.TestCase):
    def test_lengths_that_lie(self) -> None:
        def forever() -> Any:
            while True:
                yield 1

        for shape in [range(1 << 40), range(1 << 62), Long(1 << 40), Long((1 << 63) - 1), Long(0), forever()]:
            for use in (
                lambda s: CPU.empty(s, "int8"),
                lambda s: CPU.allocator.zeros(s, "int8"),
                lambda s: CPU.empty(8).view(shape=s),
            ):
                with self.assertRaises(leasehold.InvalidArgumentError):
                    use(shape)

    def test_what_is_no_shape(self) -> None:
        for shape in ["12", 1.5, None, (1, None), (1, "2"), ((1,),), (2**70,), 2**70, -1, (3, -2), object()]:
            with self.subTest(shape), self.assertRaises(leasehold.InvalidArgumentError):
                CPU.empty(shape)  # type: ignore[arg-type]

    def test_any_sequence_of_numbers(self) -> None:
        for shape in [(2, 3), [2, 3], range(2, 4), iter([2, 3])]:
            self.assertEqual(CPU.empty(shape, "int8").shape, (2, 3))  # type: ignore[arg-type]
        self.assertEqual(CPU.empty(Wide(5)).shape, (5,))

    def test_a_shape_needs_a_type_and_a_size_in_bytes_none(self) -> None:
        allocator = leasehold.Allocator(CPU)
        for make in (CPU.empty, CPU.zeros, allocator.empty, allocator.zeros):
            b = make(5)
            self.assertEqual((b.dtype, b.shape, b.nbytes), ("uint8", (5,), 5))
            self.assertEqual(make((2, 2), "float32").nbytes, 16)
            for shape in ((2, 2), [2], ()):
                with self.assertRaisesRegex(TypeError, "name one, such as \"float32\""):
                    make(shape)  # type: ignore[call-overload]


class Classes(unittest.TestCase):
    def test_errors_are_pythons_own_too(self) -> None:
        for name in leasehold.__all__:
            value = getattr(leasehold, name)
            if inspect.isclass(value) and issubclass(value, BaseException):
                self.assertTrue(issubclass(value, leasehold.Error), name)
                self.assertEqual(value.__module__, "leasehold", "the name in tracebacks")
        self.assertTrue(issubclass(leasehold.ArgumentTypeError, TypeError))
        self.assertTrue(issubclass(leasehold.ArgumentTypeError, leasehold.InvalidArgumentError))

    def test_devices_that_are_none(self) -> None:
        for name in ("gpu", "mps:0", "sim:0", "null:0", "", "\0", ":", "cpu:x", "cpu:-1", "cpu:4294967296"):
            with self.assertRaises(leasehold.InvalidArgumentError):
                leasehold.Device(name)
        with self.assertRaises(leasehold.InvalidArgumentError) as raised:
            leasehold.Device("gpu")
        self.assertIn("cpu:0, cuda:0", str(raised.exception))
        for other in ("mps", "null", "cuda:0, cpu:0"):
            self.assertNotIn(other, str(raised.exception))
        self.assertEqual("sim-cuda:0" in str(raised.exception), _native.SIMULATED)
        if _native.SIMULATED:
            with self.assertRaisesRegex(leasehold.InvalidArgumentError, "sim-cuda:0"):
                leasehold.Device("sim-gpu")

    def test_reports_of_nothing(self) -> None:
        loop: dict[str, Any] = {}
        loop["loop"] = loop
        for source in (object(), {"a": object()}, {1j: 1}, "\ud800", loop, b"{}"):
            with self.assertRaises(leasehold.InvalidArgumentError):
                leasehold.report("never.html", source)  # type: ignore[arg-type]

    def test_the_class_of_a_buffer_stays(self) -> None:
        base: Any = leasehold.Buffer.__mro__[1]
        b = CPU.zeros(1 << 12)
        view = memoryview(b)
        classes = [base, type("Empty", (base,), {"__slots__": ()}), type("Other", (base,), {})]
        for other in classes:
            for change in (
                lambda: setattr(b, "__class__", other),
                lambda: object.__dict__["__class__"].__set__(b, other),
            ):
                with self.assertRaises(TypeError):
                    change()
        self.assertIs(type(b), leasehold.Buffer)
        view.release()
        b.free()
        for _ in range(1000):
            CPU.zeros(16)


if __name__ == "__main__":
    unittest.main()
