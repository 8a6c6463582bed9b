"""Copies of random arrays, of any type, shape, strides and byte order, beside NumPy's own."""

from __future__ import annotations

import unittest
from typing import Any

import leasehold
import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from leasehold import _native
from strategies import NUMPYS, TYPES, bits, budget, layouts, names, number, place, random_array, seeds, shapes

DEVICES = ["cpu:0", *(["sim-cuda:0"] if _native.SIMULATED else [])]


@st.composite
def cases(draw: st.DrawFn) -> Any:
    name, shape, seed = draw(names), draw(shapes), draw(seeds)
    values = random_array(seed, shape, name)
    return name, values, draw(layouts(len(shape))), draw(layouts(len(shape)))


class Copies(unittest.TestCase):
    @budget(0.4, 600)
    @given(case=cases(), device=st.sampled_from(DEVICES))
    def test_there_and_back(self, case: Any, device: str) -> None:
        name, values, layout, other = case
        source, target = place(values, layout), place(np.zeros_like(values), other)
        target_base = target.base if target.base is not None else target
        before = bits(source)
        buffer = leasehold.Device(device).upload(source)
        self.assertEqual((buffer.dtype, buffer.shape), (name, source.shape))
        self.assertEqual(buffer.tobytes(), bits(values))
        buffer.copy_to(target)
        self.assertEqual(bits(target), bits(values))
        # Nothing beside the elements was written.
        target[...] = np.zeros_like(target)
        self.assertFalse(np.asarray(target_base).view(np.uint8).any())
        again = leasehold.Device(device).zeros(values.shape, name)
        again.copy_from(source)
        self.assertEqual(again.tobytes(), bits(values))
        flat = leasehold.Device(device).zeros(values.size, name)
        flat.copy_from(source)
        self.assertEqual(flat.tobytes(), bits(values))
        self.assertEqual(bits(source), before)
        if device == "cpu:0" and name in NUMPYS:
            shared = np.asarray(buffer)
            self.assertEqual((shared.shape, shared.dtype), (values.shape, values.dtype))
            self.assertEqual(bits(shared), bits(values))

    @budget(0.2, 300)
    @given(case=cases(), seed=seeds)
    def test_buffers_with_gaps(self, case: Any, seed: int) -> None:
        name, values, layout, other = case
        turn, _, _ = layout
        if name not in NUMPYS or name == "bool":
            return
        # DLPack knows no other byte order and no odd address.
        source = place(values, (turn, 0, False))
        buffer = leasehold.from_dlpack(source)
        self.assertEqual(buffer.tobytes(), bits(values))
        for copied in (buffer.to("cpu:0"), leasehold.Device("cpu:0").upload(buffer)):
            self.assertEqual((copied.is_contiguous, copied.tobytes()), (True, bits(values)))
        target = place(np.zeros_like(values), other)
        buffer.copy_to(target)
        self.assertEqual(bits(target), bits(values))
        fresh = random_array(seed, values.shape, name)
        buffer.copy_from(place(fresh, other))
        self.assertEqual(bits(source), bits(fresh))
        value = number(name, seed)
        buffer.fill(value)
        self.assertEqual(bits(source), bits(np.full_like(fresh, value)))
        base = source.base if source.base is not None else source
        source[...] = np.zeros_like(source)
        self.assertFalse(np.asarray(base).view(np.uint8).any())

    @budget(0.1, 200)
    @given(case=cases(), flips=st.lists(st.booleans(), min_size=4, max_size=4), turned=st.booleans())
    def test_ends_in_one_memory(self, case: Any, flips: list[bool], turned: bool) -> None:
        name, values, _, _ = case
        if name not in NUMPYS:
            return
        for into in (False, True):
            buffer = leasehold.Device("cpu:0").upload(values)
            shared = np.asarray(buffer)
            steps = (slice(None, None, -1 if flip else 1) for flip in flips[: shared.ndim])
            part = shared[(..., *steps)]
            if turned and len(set(shared.shape)) == 1:
                part = part.T
            expected = part.copy()
            if into:
                buffer.copy_to(part)
                expected = values
                self.assertEqual(bits(part), bits(expected))
            else:
                buffer.copy_from(part)
                self.assertEqual(buffer.tobytes(), bits(expected))

    @budget(0.1, 200)
    @given(
        a=st.tuples(names, shapes),
        b=st.tuples(names, shapes),
        device=st.sampled_from(DEVICES),
        layout=st.data(),
    )
    def test_what_fits(self, a: Any, b: Any, device: str, layout: Any) -> None:
        """Whether a copy is made or refused, by types and shapes."""
        (name, shape), (other, other_shape) = a, b
        buffer = leasehold.Device(device).zeros(shape, name)
        values = random_array(1, other_shape, other)
        source = place(values, (*layout.draw(layouts(len(other_shape)))[:2], False))
        fits = (
            (name == other or "uint8" in (name, other))
            and buffer.nbytes == values.nbytes
            and (shape == other_shape or 1 in (len(shape), len(other_shape)))
        )
        try:
            buffer.copy_from(source)
            self.assertTrue(fits, (a, b))
            self.assertEqual(buffer.tobytes(), bits(values))
        except leasehold.InvalidArgumentError as error:
            self.assertFalse(fits, (a, b))
            self.assertIn(name, str(error))
            self.assertEqual(buffer.tobytes(), bytes(buffer.nbytes))


if __name__ == "__main__":
    unittest.main()
