//! Embedding: rows of a table by token id.

use leasehold::kernel::CpuArgs;

use super::rope::extent;
use super::row;
use super::simd::Simd;
use super::tile::{
    Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, write,
};

/// The number of elements of a tile's rows together.
const TILE: usize = 4096;

params! {
    /// Parameters of [`Embedding`].
    pub struct EmbeddingParams {
        /// Rows of the output: ids.
        pub m: u32,
        /// Rows of the table.
        pub vocabulary: u32,
        /// Elements of a row.
        pub k: u32,
        /// Elements from one row of the output to the next.
        pub ldy: u32,
        /// Element type of the table.
        pub table: u32,
        /// Element type of the output.
        pub y: u32,
    }
}

/// `y[i] = table[ids[i]]` with i32 ids. An id that is negative or outside the table gives a row of
/// NaN.
pub struct Embedding;

fn rows_per_tile(k: usize) -> usize {
    (TILE / k).max(1)
}

impl Kernel for Embedding {
    const NAME: &'static str = "embedding";
    const OPERANDS: &'static [Operand] = &[read("ids"), read("table"), write("y")];
    type Params = EmbeddingParams;

    fn plan(p: &EmbeddingParams) -> Result<Launch, Refusal> {
        let (m, k) = (positive("the number of rows", p.m)?, positive("the width", p.k)?);
        let vocabulary = positive("the size of the table", p.vocabulary)?;
        let table = (vocabulary * k, dtype("the table", p.table)?.bytes());
        let y = (extent(m, k, p.ldy)?, dtype("the output", p.y)?.bytes());
        Launch::new([m.div_ceil(rows_per_tile(k)), 1, 1], &[(m, 4), table, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &EmbeddingParams, t: &CpuArgs<'_>) {
        const CHUNK: usize = 256;
        let (k, elem) = (p.k as usize, accepted(p.y));
        let step = rows_per_tile(k);
        let first = t.tile()[0] as usize * step;
        let mut buffer = std::mem::MaybeUninit::<[f32; CHUNK]>::uninit();
        let buffer = buffer.as_mut_ptr().cast::<f32>();
        for m in first..(first + step).min(p.m as usize) {
            // SAFETY: `plan` asked for the ids, the table and the rows; the id is checked.
            unsafe {
                let y = ptr::<u8>(t, 2).add(m * p.ldy as usize * elem.bytes());
                let id = ptr::<i32>(t, 0).add(m).read();
                let Some(id) = usize::try_from(id).ok().filter(|&id| id < p.vocabulary as usize)
                else {
                    row::poison(elem, y, k);
                    continue;
                };
                for at in (0..k).step_by(CHUNK) {
                    let n = CHUNK.min(k - at);
                    row::widen(s, (accepted(p.table), ptr(t, 1), id * k + at), buffer, n, 1.0);
                    row::narrow(s, buffer, (elem, y, at), n);
                }
            }
        }
    }
}
