//! The division of a launch into blocks of threads, for devices whose blocks have warps of 32
//! threads: CUDA's blocks and warps are Metal's threadgroups and SIMD-groups.
//!
//! This module must not know sources.

use super::cpu::attention::{Attention, AttentionParams, DecodeAttention};
use super::cpu::check::NotFinite;
use super::cpu::elem::DType;
use super::cpu::elementwise::{
    Add, Cast, Copy2d, CopyParams, ElementwiseParams, Fill, Mul, SiluMul,
};
use super::cpu::embedding::Embedding;
use super::cpu::linear::{FEW, Linear, Linear3, LinearAdd, LinearGated, LinearParams};
use super::cpu::norm::{AddRmsNorm, NormParams, RmsNorm};
use super::cpu::rope::{CacheAppend, Rope, RopeAppend, RopeParams};
use super::cpu::sampling::{
    Advance, Argmax, NextToken, NextTokenParams, Penalise, RowParams, Softmax,
};
use super::cpu::tile::{Kernel, Params, Refusal};
use leasehold::kernel::Grid;

/// A kernel whose launches have blocks of threads.
pub(super) trait Blocks: Kernel {
    /// Blocks and threads.
    fn geometry(p: &Self::Params) -> Result<Grid, Refusal>;

    /// Blocks and threads on CUDA.
    fn cuda(p: &Self::Params) -> Result<Grid, Refusal> {
        Self::geometry(p)
    }
}

/// Parameters from their bytes.
pub(super) fn from_bytes<P: Params>(params: &[u8]) -> Result<P, Refusal> {
    P::from_bytes(params).ok_or_else(|| "parameters of another size".into())
}

/// The entries of all kernels, each made by `of` with the module that contains the kernel. The
/// modules are the caller's.
macro_rules! kernel_list {
    ($spec:ident) => {{
        use $crate::kernels::cpu::attention::{Attention, DecodeAttention};
        use $crate::kernels::cpu::check::NotFinite;
        use $crate::kernels::cpu::elementwise::{Add, Cast, Copy2d, Fill, Mul, SiluMul};
        use $crate::kernels::cpu::embedding::Embedding;
        use $crate::kernels::cpu::linear::{Linear, Linear3, LinearAdd, LinearGated};
        use $crate::kernels::cpu::norm::{AddRmsNorm, RmsNorm};
        use $crate::kernels::cpu::rope::{CacheAppend, Rope, RopeAppend};
        use $crate::kernels::cpu::sampling::{Advance, Argmax, NextToken, Penalise, Softmax};
        &[
            $spec::of::<Linear>(&LINEAR),
            $spec::of::<LinearAdd>(&LINEAR),
            $spec::of::<Linear3>(&LINEAR),
            $spec::of::<LinearGated>(&LINEAR),
            $spec::of::<RmsNorm>(&NORM),
            $spec::of::<AddRmsNorm>(&NORM),
            $spec::of::<Rope>(&ROPE),
            $spec::of::<CacheAppend>(&ROPE),
            $spec::of::<RopeAppend>(&ROPE),
            $spec::of::<Attention>(&ATTENTION),
            $spec::of::<DecodeAttention>(&ATTENTION),
            $spec::of::<Embedding>(&EMBEDDING),
            $spec::of::<Add>(&ELEMENTWISE),
            $spec::of::<Mul>(&ELEMENTWISE),
            $spec::of::<SiluMul>(&ELEMENTWISE),
            $spec::of::<Cast>(&ELEMENTWISE),
            $spec::of::<Fill>(&ELEMENTWISE),
            $spec::of::<Copy2d>(&ELEMENTWISE),
            $spec::of::<Softmax>(&SAMPLING),
            $spec::of::<Argmax>(&SAMPLING),
            $spec::of::<Advance>(&SAMPLING),
            $spec::of::<NextToken>(&SAMPLING),
            $spec::of::<Penalise>(&SAMPLING),
            $spec::of::<NotFinite>(&CHECK),
        ]
    }};
}
pub(super) use kernel_list;

/// Threads of a block of most kernels.
pub(super) const THREADS: u32 = 256;
/// Threads of a warp.
pub(super) const WARP: u32 = 32;
/// The maximum number of blocks of a launch whose blocks take several pieces of work: a few for
/// each place on the largest devices.
pub(super) const BLOCKS: u64 = 4096;
/// The maximum number of blocks of a product of few rows: four for each of 132 processors, the
/// number that run at a time. Each prepares x once.
pub(super) const STREAM_BLOCKS: u64 = 528;
/// The maximum number of blocks of a product of one long row: two for each of 132 processors, the
/// number that run at a time.
pub(super) const LONG_BLOCKS: u32 = 264;
/// The fewest elements of a long row (`8 * THREADS` in the source).
pub(super) const LONG_ROW: u32 = 8 * THREADS;
/// The maximum number of blocks in y, and in z.
pub(super) const MAX_Y: u64 = 65_535;
/// Indices along a row have 32 bits and may exceed the end by a block's width.
pub(super) const MAX_WIDTH: u64 = 1 << 31;
/// Rows of queries of a block (`ROWS` in the source).
pub(super) const QUERY_ROWS: u32 = 4;
/// Rows and outputs of a tile of a matrix product (`TILE` in the source).
pub(super) const TILE: u32 = 64;
/// Elements or units of a row that a block processes at once (`PIECE` in the source).
pub(super) const PIECE: u64 = 4 * THREADS as u64;
/// The maximum number of threads of a block that draws a token.
pub(super) const DRAW_THREADS: u32 = 1024;
/// A thread that draws a token counts in 16 bits.
pub(super) const MAX_LOGITS: u64 = 1 << 26;

/// Checks the width of a row.
pub(super) fn width(width: u64) -> Result<(), Refusal> {
    if width > MAX_WIDTH {
        Err(format!("rows of {width} elements; the limit is {MAX_WIDTH}").into())
    } else {
        Ok(())
    }
}

/// The geometry with a block for each row.
pub(super) fn rows(rows: u32, wide: u64) -> Result<Grid, Refusal> {
    width(wide)?;
    if u64::from(rows) >= MAX_WIDTH {
        return Err(format!("{rows} rows; there are fewer than {MAX_WIDTH} blocks").into());
    }
    Ok(Grid::new([rows, 1, 1]).threads([THREADS, 1, 1]))
}

/// The geometry of blocks that share `pieces` pieces of work; at least one block.
pub(super) fn shared(pieces: u64) -> Grid {
    Grid::new([pieces.clamp(1, BLOCKS) as u32, 1, 1]).threads([THREADS, 1, 1])
}

/// Pieces of `rows` rows of `wide` elements.
pub(super) fn pieces(rows: u32, wide: u64) -> Result<Grid, Refusal> {
    width(wide)?;
    Ok(shared(u64::from(rows) * wide.div_ceil(PIECE)))
}

/// The geometry of a product: for few rows a warp for each output, for many rows a block for each
/// tile.
pub(super) fn product(p: &LinearParams) -> Result<Grid, Refusal> {
    width(p.k.into())?;
    p.n.iter().try_for_each(|&n| width(n.into()))?;
    if p.m as usize <= FEW {
        let warps = THREADS / WARP;
        let outputs: u64 = p.n.iter().map(|&n| u64::from(n)).sum();
        let blocks = outputs.div_ceil(warps.into()).clamp(1, STREAM_BLOCKS) as u32;
        return Ok(Grid::new([blocks, 1, 1]).threads([WARP, warps, 1]));
    }
    let across: u64 = p.n.iter().map(|&n| u64::from(n.div_ceil(TILE))).sum();
    let down = u64::from(p.m.div_ceil(TILE));
    if down > MAX_Y {
        return Err(format!("{} rows; the limit is {}", p.m, MAX_Y * u64::from(TILE)).into());
    }
    Ok(Grid::new([across as u32, down as u32, 1]).threads([THREADS / 16, 16, 1]))
}

/// The geometry of a product on CUDA: as [`product`], but for one long row, whose blocks hold x in
/// their registers and stream through consecutive rows of weights.
pub(super) fn cuda_product(p: &LinearParams) -> Result<Grid, Refusal> {
    let mut geometry = product(p)?;
    if p.m == 1 && p.x == p.w && p.w != DType::F32 as u32 && p.k >= LONG_ROW {
        geometry.blocks[0] = geometry.blocks[0].min(LONG_BLOCKS);
    }
    Ok(geometry)
}

/// The elements of the heads of a row.
pub(super) fn heads(p: &RopeParams) -> u64 {
    u64::from(p.heads.max(p.kv_heads)) * u64::from(p.head_dim)
}

/// The geometry of blocks that draw a token, one for each row.
pub(super) fn draw(p: &NextTokenParams) -> Result<Grid, Refusal> {
    if u64::from(p.n) > MAX_LOGITS {
        return Err(format!("{} logits; the limit is {MAX_LOGITS}", p.n).into());
    }
    let threads = p.n.next_multiple_of(THREADS).clamp(THREADS, DRAW_THREADS);
    Ok(rows(p.rows, p.n.into())?.threads([threads, 1, 1]))
}

/// Blocks in y or z: one for each of `n`.
fn across(n: u64, what: &str) -> Result<u32, Refusal> {
    u32::try_from(n)
        .ok()
        .filter(|_| n <= MAX_Y)
        .ok_or_else(|| format!("{n} {what}; the limit is {MAX_Y}").into())
}

/// The blocks in y: one for each head.
pub(super) fn heads_down(p: &AttentionParams) -> Result<u32, Refusal> {
    across(p.heads.into(), "heads")
}

/// The geometry of attention for a row of each of several sequences: a block for each head of a
/// row.
pub(super) fn decode(p: &AttentionParams) -> Result<Grid, Refusal> {
    let heads = rows(p.heads, p.head_dim.into())?;
    Ok(Grid { blocks: [heads.blocks[0], across(p.m.into(), "rows")?, 1], ..heads })
}

/// The geometry of that attention with a split context: the parts of the context, and for each row
/// blocks of the query heads that share keys and values.
pub(super) fn parts(p: &AttentionParams) -> Result<Grid, Refusal> {
    let (parts, blocks) = p.split();
    let down = across(p.kv_heads.into(), "heads of keys")?;
    let deep =
        across(u64::from(p.m) * u64::from(blocks), "rows, times blocks of heads of a group")?;
    Ok(Grid::new([parts, down, deep]).threads([THREADS, 1, 1]))
}

macro_rules! kernels {
    ($($kernel:ty, |$p:ident| $geometry:expr $(, cuda: $cuda:path)?;)*) => {
        $(impl Blocks for $kernel {
            fn geometry($p: &Self::Params) -> Result<Grid, Refusal> {
                $geometry
            }
            $(fn cuda(p: &Self::Params) -> Result<Grid, Refusal> {
                $cuda(p)
            })?
        })*
    };
}

kernels! {
    Linear, |p| product(p), cuda: cuda_product;
    LinearAdd, |p| product(p), cuda: cuda_product;
    Linear3, |p| product(p), cuda: cuda_product;
    LinearGated, |p| product(p), cuda: cuda_product;
    RmsNorm, |p| normed(p);
    AddRmsNorm, |p| normed(p);
    Rope, |p| rows(p.m, heads(p));
    CacheAppend, |p| rows(p.m, heads(p));
    RopeAppend, |p| rows(p.m, heads(p));
    Attention, |p| {
        let per_block = if p.m == 1 { 1 } else { QUERY_ROWS };
        let down = heads_down(p)?;
        Ok(Grid::new([p.m.div_ceil(per_block), down, 1]).threads([THREADS, 1, 1]))
    };
    DecodeAttention, |p| decode(p), cuda: parts;
    Embedding, |p| rows(p.m, p.k.into());
    Add, |p| elements(p), cuda: elements_by_eight;
    Mul, |p| elements(p), cuda: elements_by_eight;
    SiluMul, |p| elements(p), cuda: elements_by_eight;
    Cast, |p| elements(p);
    Fill, |p| Ok(shared((u64::from(p.bytes[0]) | (u64::from(p.bytes[1]) << 32)).div_ceil(16 * PIECE)));
    Copy2d, |p| units(p);
    Softmax, |p| row_of(p);
    Argmax, |p| row_of(p);
    Advance, |p| Ok(rows(p.rows, 1)?.threads([WARP, 1, 1]));
    NextToken, |p| draw(p);
    Penalise, |p| row_of(p);
    NotFinite, |p| Ok(Grid::new([p.parts(), 1, 1]).threads([THREADS, 1, 1]));
}

pub(super) fn normed(p: &NormParams) -> Result<Grid, Refusal> {
    rows(p.rows, p.k.into())
}

pub(super) fn row_of(p: &RowParams) -> Result<Grid, Refusal> {
    rows(p.rows, p.n.into())
}

pub(super) fn elements(p: &ElementwiseParams) -> Result<Grid, Refusal> {
    pieces(p.rows, p.k.into())
}

/// The geometry of threads with eight elements each, where [`elements`] has four.
fn elements_by_eight(p: &ElementwiseParams) -> Result<Grid, Refusal> {
    width(p.k.into())?;
    let pieces = u64::from(p.rows) * u64::from(p.k.div_ceil(PIECE as u32));
    Ok(shared(pieces.div_ceil(2)))
}

/// The geometry of a copy: enough blocks for its 16-byte units. Rows that are copied in smaller
/// units give each block more work.
pub(super) fn units(p: &CopyParams) -> Result<Grid, Refusal> {
    width(p.bytes.into())?;
    pieces(p.rows, u64::from(p.bytes).div_ceil(16))
}
