"""Operators of decoders, on a stream: products, norms, activations, softmax.

The operands are Buffers of one or two dimensions without gaps, of `float32`, `bfloat16` or `float16`
(which of them may meet is each operator's); one dimension is a row. A row of `x` is a token. `out` is
written and returned; without one it is a new Buffer of the stream's device. No call waits. In a
recording the operator is noted.

    y = ops.linear(stream, ops.rms_norm(stream, x, weight), matrix)
"""

from __future__ import annotations

from typing import Optional

from leasehold._errors import ArgumentTypeError
from leasehold._native import Buffer, Device, Stream, run_operator

__all__ = [
    "add",
    "add_rms_norm",
    "argmax",
    "cast",
    "embedding",
    "linear",
    "linear_add",
    "mul",
    "rms_norm",
    "silu_mul",
    "softmax",
]


def _new(stream: Stream, of: Buffer) -> Device:
    """The device of a new result, once the arguments that say what it is are known to be right."""
    if not isinstance(stream, Stream):
        raise ArgumentTypeError(f"a stream is a leasehold.Stream, not {type(stream)}")
    if not isinstance(of, Buffer):
        raise ArgumentTypeError(f"an operator takes Buffers, not {type(of)}; Device.upload makes one")
    return stream.device


def _like(stream: Stream, of: Buffer, out: Optional[Buffer]) -> Buffer:
    return _new(stream, of).empty(of.shape, of.dtype) if out is None else out


def _columns(of: Buffer, at: int) -> int:
    if not isinstance(of, Buffer) or of.ndim != 2:
        raise ArgumentTypeError("a matrix is a Buffer of two dimensions")
    return of.shape[at]


def add(stream: Stream, a: Buffer, b: Buffer, *, out: Buffer | None = None) -> Buffer:
    """`out = a + b`, element by element.

    Examples
    --------
    >>> import leasehold
    >>> from leasehold import ops
    >>> device = leasehold.Device("cpu:0")
    >>> x = device.empty(3, "float32")
    >>> stream = leasehold.Stream(device)
    >>> stream.fill(x, 1.5)
    >>> memoryview(ops.add(stream, x, x)).tolist()
    [3.0, 3.0, 3.0]
    """
    out = _like(stream, a, out)
    run_operator(stream, "add", [a, b, out], None)
    return out


def mul(stream: Stream, a: Buffer, b: Buffer, *, out: Buffer | None = None) -> Buffer:
    """`out = a * b`, element by element."""
    out = _like(stream, a, out)
    run_operator(stream, "mul", [a, b, out], None)
    return out


def silu_mul(stream: Stream, a: Buffer, b: Buffer, *, out: Buffer | None = None) -> Buffer:
    """`out = silu(a) * b`, element by element; `silu(a)` is `a / (1 + exp(-a))`."""
    out = _like(stream, a, out)
    run_operator(stream, "silu_mul", [a, b, out], None)
    return out


def cast(stream: Stream, x: Buffer, out: Buffer) -> Buffer:
    """`out = x` in the type of `out`, rounded to the nearest."""
    if not isinstance(out, Buffer):
        raise ArgumentTypeError("out is a Buffer of the wanted type; Device.empty(x.shape, dtype) makes one")
    run_operator(stream, "cast", [x, out], None)
    return out


def softmax(stream: Stream, x: Buffer, *, out: Buffer | None = None) -> Buffer:
    """The softmax of each row. A row with a NaN or +inf, or of -inf only, is all NaN."""
    out = _like(stream, x, out)
    run_operator(stream, "softmax", [x, out], None)
    return out


def argmax(stream: Stream, x: Buffer, *, out: Buffer | None = None) -> Buffer:
    """The place of each row's largest element, as `int32`: of equal ones the first, -1 for all NaN."""
    if out is None:
        out = _new(stream, x).empty(x.shape[0] if x.ndim == 2 else 1, "int32")
    run_operator(stream, "argmax", [x, out], None)
    return out


def embedding(stream: Stream, ids: Buffer, table: Buffer, *, out: Buffer | None = None) -> Buffer:
    """`out[i] = table[ids[i]]`; `ids` are `int32`. An id outside the table gives a row of NaN."""
    if out is None:
        out = _new(stream, ids).empty((ids.size, _columns(table, 1)), table.dtype)
    run_operator(stream, "embedding", [ids, table, out], None)
    return out


def rms_norm(
    stream: Stream, x: Buffer, weight: Buffer, *, eps: float = 1e-6, out: Buffer | None = None
) -> Buffer:
    """`out = x / sqrt(mean(x * x) + eps) * weight`, row by row."""
    out = _like(stream, x, out)
    run_operator(stream, "rms_norm", [x, weight, out], eps)
    return out


def add_rms_norm(
    stream: Stream,
    h: Buffer,
    delta: Buffer,
    weight: Buffer,
    *,
    eps: float = 1e-6,
    out: Buffer | None = None,
) -> Buffer:
    """`h += delta`, then `out = rms_norm(h)`."""
    out = _like(stream, h, out)
    run_operator(stream, "add_rms_norm", [h, delta, weight, out], eps)
    return out


def linear(
    stream: Stream,
    x: Buffer,
    weight: Buffer,
    bias: Buffer | None = None,
    *,
    out: Buffer | None = None,
) -> Buffer:
    """`out = x @ weight.T + bias`. Weights are [outputs, inputs], as in Hugging Face's files."""
    if out is None:
        device = _new(stream, x)
        rows = x.shape[:1] if x.ndim == 2 else ()
        out = device.empty((*rows, _columns(weight, 0)), x.dtype)
    run_operator(stream, "linear", [x, weight, bias, out], None)
    return out


def linear_add(
    stream: Stream, x: Buffer, weight: Buffer, out: Buffer, bias: Buffer | None = None
) -> Buffer:
    """`out += x @ weight.T + bias`."""
    run_operator(stream, "linear_add", [x, weight, bias, out], None)
    return out
