"""What the random programs are made of: types, shapes, and arrays at any strides and byte orders."""

from __future__ import annotations

import os
from typing import Any, Optional

import numpy as np
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st

try:
    import ml_dtypes
except ImportError:
    ml_dtypes = None

_examples = os.environ.get("LEASEHOLD_EXAMPLES")


def budget(share: float, examples: int, **more: Any) -> settings:
    """A share of the examples of the environment; else so many, the same each time."""
    count = max(1, int(int(_examples) * share)) if _examples else examples
    return settings(
        max_examples=count,
        derandomize=_examples is None,
        database=None,
        deadline=None,
        print_blob=True,
        suppress_health_check=list(HealthCheck),
        **more,
    )


# By the package's name: NumPy's type of the elements, whose bytes are the same.
TYPES: dict[str, np.dtype[Any]] = {
    name: np.dtype(name)
    for name in (
        ["bool", "int8", "int16", "int32", "int64", "uint8", "uint16", "uint32", "uint64"]
        + ["float16", "float32", "float64", "complex64", "complex128"]
    )
}
if ml_dtypes is not None:
    for _name in ("bfloat16", "float8_e4m3fn", "float8_e5m2"):
        TYPES[_name] = np.dtype(getattr(ml_dtypes, _name))

# Types that NumPy lends by the buffer protocol.
NUMPYS = [name for name in TYPES if not name.startswith(("bfloat", "float8"))]

names = st.sampled_from(sorted(TYPES))
shapes = st.lists(st.integers(0, 4), max_size=4).map(tuple)
seeds = st.integers(0, 1 << 32)


def random_array(seed: int, shape: tuple[int, ...], name: str) -> np.ndarray[Any, Any]:
    """Elements of random bits."""
    dtype = TYPES[name]
    count = int(np.prod(shape, dtype=np.int64))
    raw = np.random.default_rng(seed).integers(0, 256, count * dtype.itemsize, dtype=np.uint8)
    if name == "bool":
        raw &= 1
    return raw.view(dtype).reshape(shape)


@st.composite
def turns(draw: st.DrawFn, ndim: int) -> list[Any]:
    """Ways to lay an array of so many dimensions: each is a function that lays it in memory."""
    axes = draw(st.permutations(range(ndim)))
    steps = [draw(st.sampled_from([1, 1, -1, 2, -2, 3])) for _ in range(ndim)]
    pads = [draw(st.integers(0, 2)) for _ in range(ndim)]
    return [axes, steps, pads]


def laid(shape: tuple[int, ...], dtype: np.dtype[Any], turn: list[Any], shift: int) -> Any:
    """An array of zeros of this shape, with the strides of a turn, `shift` bytes from alignment."""
    axes, steps, pads = turn
    extents = [max(0, (n - 1) * abs(step) + 1 if n else 0) + pad for n, step, pad in zip(shape, steps, pads)]
    order = [extents[axis] for axis in axes]
    count = int(np.prod(order, dtype=np.int64))
    raw = np.zeros(count * dtype.itemsize + shift, np.uint8)
    base = raw[shift:].view(dtype).reshape(order).transpose(np.argsort(axes))
    where: list[Any] = []
    for n, step in zip(shape, steps):
        if n == 0:
            where.append(slice(0, 0))
        elif step > 0:
            where.append(slice(0, (n - 1) * step + 1, step))
        else:
            where.append(slice((n - 1) * -step, None, step))
    array = base[tuple(where)] if shape else base
    assert array.shape == shape, (array.shape, shape, turn)
    return array


@st.composite
def layouts(draw: st.DrawFn, ndim: int) -> tuple[list[Any], int, bool]:
    """A turn, a shift from alignment, and whether the bytes have the other order."""
    return draw(turns(ndim)), draw(st.sampled_from([0, 0, 1, 4])), draw(st.booleans())


def place(values: np.ndarray[Any, Any], layout: tuple[list[Any], int, bool]) -> np.ndarray[Any, Any]:
    """The same elements in a layout."""
    turn, shift, swapped = layout
    dtype = values.dtype
    if swapped and dtype.kind in "iufc" and dtype.type.__module__ == "numpy":
        dtype = dtype.newbyteorder()
    array = laid(values.shape, dtype, turn, shift)
    if array.dtype == values.dtype:
        array[...] = values
    else:
        # Bits, not numbers: a signalling NaN stays one.
        array[...] = values.byteswap().view(dtype)
    return array


def bits(array: np.ndarray[Any, Any]) -> bytes:
    """The bytes of the elements in this machine's order, the last dimension fastest."""
    if not array.dtype.isnative:
        array = array.byteswap().view(array.dtype.newbyteorder())
    return array.tobytes()


def number(name: str, seed: int) -> Optional[Any]:
    """A number that fits a type, if numbers are turned into it."""
    if name.startswith("float8"):
        return None
    if name == "bool":
        return bool(seed & 1)
    dtype = TYPES[name]
    if dtype.kind in "iu":
        limits = np.iinfo(dtype)
        return int(limits.min) + seed % (int(limits.max) - int(limits.min) + 1)
    real = (seed % 4001 - 2000) / 8
    return complex(real, -real / 2) if dtype.kind == "c" else real
