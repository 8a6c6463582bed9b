//! Products of bf16 on the tiles of AMX.
//!
//! A tile register has 16 rows of 64 bytes. One instruction multiplies 16 rows of 32 activations by
//! 32 weights of 16 outputs, and adds to 16 by 16 sums. It takes the weights in pairs: for each two
//! columns the words of all 16 outputs. So a block of weights is transposed first, word by word.
//! Rows of activations are read in place; what is left beside whole blocks is copied with zeros.
//!
//! This file must not know any kernel.

use std::arch::asm;
use std::arch::x86_64::*;
use std::mem::MaybeUninit;

use half::bf16;

use super::dots::{BLOCK, Dots};
use super::simd::{Amx, Simd};

/// Columns of a step: the row of a tile.
const STEP: usize = 32;
/// Steps whose weights are transposed at a time.
const STEPS: usize = 16;
/// Columns of so many steps.
const KC: usize = STEPS * STEP;

/// The shapes of the tile registers, as `ldtilecfg` reads them.
#[repr(C, align(64))]
struct Shapes {
    palette: u8,
    start: u8,
    reserved: [u8; 14],
    row_bytes: [u16; 16],
    rows: [u8; 16],
}

/// All eight registers whole.
static WHOLE: Shapes = Shapes {
    palette: 1,
    start: 0,
    reserved: [0; 14],
    row_bytes: [64, 64, 64, 64, 64, 64, 64, 64, 0, 0, 0, 0, 0, 0, 0, 0],
    rows: [16, 16, 16, 16, 16, 16, 16, 16, 0, 0, 0, 0, 0, 0, 0, 0],
};

/// Two tiles of transposed weights for each step: 16 pairs of columns by 16 outputs.
#[repr(C, align(64))]
struct Weights([[[u32; 256]; 2]; STEPS]);

/// A copy of the rows of a block.
#[repr(C, align(64))]
struct Rows([[bf16; KC]; BLOCK]);

/// The products of `d`. A block of [`BLOCK`] outputs by [`BLOCK`] rows of activations takes two
/// tiles of each.
///
/// # Safety
/// - The conditions of [`Dots::new`]. The level is available, and the caller is compiled for it.
#[inline(always)]
pub(super) unsafe fn multiply(d: &Dots) {
    let mut weights = MaybeUninit::<Weights>::uninit();
    let weights = weights.as_mut_ptr();
    let mut copy = MaybeUninit::<Rows>::uninit();
    let copy = copy.as_mut_ptr();
    let blocks = d.m.div_ceil(BLOCK);
    // SAFETY: the caller vouches for the operands. `Dots::new` requires room for the sums of whole
    // blocks, which begin as zero.
    unsafe {
        for m in 0..blocks * BLOCK {
            d.out.add(m * d.ldo).write_bytes(0, BLOCK);
        }
        for at in (0..d.k).step_by(KC) {
            let columns = KC.min(d.k - at);
            let steps = columns.div_ceil(STEP);
            for step in 0..steps {
                let left = columns - step * STEP;
                for half in 0..2 {
                    let first = half * 16;
                    let rows = d.rows.saturating_sub(first).min(16);
                    let w = d.w.wrapping_add(first * d.ldw + at + step * STEP);
                    transpose((w, d.ldw), rows, left, &raw mut (*weights).0[step][half]);
                }
            }
            // Blocks that can be read in place.
            let whole = if columns.is_multiple_of(STEP) { d.m / BLOCK } else { 0 };
            if whole > 0 {
                blocks_of((d.x.add(at), d.ldx), whole, weights, steps, (d.out, d.ldo));
            }
            for block in whole..blocks {
                let m0 = block * BLOCK;
                for m in 0..BLOCK {
                    let to = (&raw mut (*copy).0[m]).cast::<bf16>();
                    let n = if m0 + m < d.m { columns } else { 0 };
                    if n > 0 {
                        to.copy_from_nonoverlapping(d.x.add((m0 + m) * d.ldx + at), n);
                    }
                    to.add(n).write_bytes(0, steps * STEP - n);
                }
                let out = (d.out.add(m0 * d.ldo), d.ldo);
                blocks_of((copy.cast(), KC), 1, weights, steps, out);
            }
        }
    }
}

/// Adds the products of `blocks` times 32 rows of `x` with 32 outputs of `steps` steps.
#[inline(always)]
unsafe fn blocks_of(
    (x, ldx): (*const bf16, usize),
    blocks: usize,
    weights: *const Weights,
    steps: usize,
    (out, ldo): (*mut f32, usize),
) {
    // SAFETY: the caller vouches for whole blocks of both operands and of the sums, and for the
    // instructions. No code of the compiler's uses the tiles, which are given back at the end. The
    // pointers stay within the operands, but for the last increments, which are not used.
    unsafe {
        asm!(
            "ldtilecfg [{i}]",
            "2:",
            "tileloadd tmm0, [{c0} + {ldo}]",
            "tileloadd tmm1, [{c0} + {ldo} + 64]",
            "tileloadd tmm2, [{c1} + {ldo}]",
            "tileloadd tmm3, [{c1} + {ldo} + 64]",
            "mov {i}, {steps}",
            "3:",
            "tileloadd tmm6, [{w} + {row}]",
            "tileloadd tmm4, [{x0} + {ldx}]",
            "tdpbf16ps tmm0, tmm4, tmm6",
            "tileloadd tmm7, [{w} + {row} + 1024]",
            "tdpbf16ps tmm1, tmm4, tmm7",
            "tileloadd tmm5, [{x1} + {ldx}]",
            "tdpbf16ps tmm2, tmm5, tmm6",
            "tdpbf16ps tmm3, tmm5, tmm7",
            "add {x0}, 64",
            "add {x1}, 64",
            "add {w}, 2048",
            "dec {i}",
            "jnz 3b",
            "tilestored [{c0} + {ldo}], tmm0",
            "tilestored [{c0} + {ldo} + 64], tmm1",
            "tilestored [{c1} + {ldo}], tmm2",
            "tilestored [{c1} + {ldo} + 64], tmm3",
            // Back to the first weights, and 32 rows on.
            "mov {i}, {steps}",
            "shl {i}, 6",
            "sub {x0}, {i}",
            "sub {x1}, {i}",
            "shl {i}, 5",
            "sub {w}, {i}",
            "mov {i}, {ldx}",
            "shl {i}, 5",
            "add {x0}, {i}",
            "add {x1}, {i}",
            "mov {i}, {ldo}",
            "shl {i}, 5",
            "add {c0}, {i}",
            "add {c1}, {i}",
            "dec {blocks}",
            "jnz 2b",
            "tilerelease",
            i = inout(reg) &raw const WHOLE => _,
            x0 = inout(reg) x => _,
            x1 = inout(reg) x.add(16 * ldx) => _,
            ldx = in(reg) 2 * ldx,
            w = inout(reg) weights => _,
            row = in(reg) 64_usize,
            c0 = inout(reg) out => _,
            c1 = inout(reg) out.add(16 * ldo) => _,
            ldo = in(reg) 4 * ldo,
            steps = in(reg) steps,
            blocks = inout(reg) blocks => _,
            out("tmm0") _, out("tmm1") _, out("tmm2") _, out("tmm3") _,
            out("tmm4") _, out("tmm5") _, out("tmm6") _, out("tmm7") _,
            options(nostack),
        );
    }
}

/// The first `columns` of 32 weights in each of `rows` rows (at most 16), as a tile: row `p` has
/// the columns `2 p` and `2 p + 1` of all rows. What is missing is zero.
#[inline(always)]
unsafe fn transpose(
    (w, ldw): (*const bf16, usize),
    rows: usize,
    columns: usize,
    to: *mut [u32; 256],
) {
    // SAFETY: the caller vouches for the weights, of which the masks leave the missing ones out,
    // for the tile, and for the instructions.
    unsafe {
        let mask = if columns >= STEP { u32::MAX } else { (1 << columns) - 1 };
        let s = Amx::assume();
        let mut v = s.square();
        for r in 0..16 {
            if r < rows {
                let words = _mm512_maskz_loadu_epi16(mask, w.add(r * ldw).cast());
                v[r] = _mm512_castsi512_ps(words);
            }
        }
        let v = s.transpose(v);
        for p in 0..16 {
            s.store(to.cast::<f32>().add(16 * p), v[p]);
        }
    }
}
