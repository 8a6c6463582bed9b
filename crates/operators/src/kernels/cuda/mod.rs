//! CUDA kernels: sources, the PTX compiled from them, and the geometry of launches.
//!
//! | file | what |
//! |---|---|
//! | `common.cuh` | parameters, element types, sums over a block; prepended to each of the others |
//! | `*.cu` | the kernels, a family in each file |
//! | `ptx/*.ptx` | the output of `ci/ptx.sh`; CI compiles the sources again and compares |
//!
//! A CUDA kernel has the name, the operands and the parameters of the CPU kernel
//! ([`KernelSpec`](super::cpu::tile::KernelSpec)), whose checks run before every launch. This
//! module adds only the number of blocks and threads of a launch, and the limits of 32-bit indices.
//!
//! The sources declare shared memory, within the size that every device offers for a block. Sums
//! are f32, no operation is atomic, and each element is computed in a fixed order. So a result
//! depends on the parameters alone.
//!
//! This module must not know the driver.

use super::Geometry;
use super::cpu::attention::{Attention, AttentionParams, DecodeAttention};
use super::cpu::elem::DType;
use super::cpu::elementwise::{
    Add, Cast, Copy2d, CopyParams, ElementwiseParams, Fill, Mul, SiluMul,
};
use super::cpu::embedding::Embedding;
use super::cpu::linear::{FEW, Linear, Linear3, LinearAdd, LinearGated, LinearParams};
use super::cpu::norm::{AddRmsNorm, NormParams, RmsNorm};
use super::cpu::rope::{CacheAppend, Rope, RopeAppend, RopeParams};
use super::cpu::sampling::{Advance, Argmax, NextToken, RowParams, Sample, SampleParams, Softmax};
use super::cpu::tile::{Kernel, Params, Refusal};

/// Text that is prepended to the source of every module.
pub const COMMON: &str = include_str!("common.cuh");

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// The file's name.
    pub name: &'static str,
    /// CUDA C++; [`COMMON`] goes before it.
    pub source: &'static str,
    /// The output of the run-time compiler for the lowest architecture that has the instructions;
    /// drivers translate it for every later one.
    pub ptx: &'static str,
}

macro_rules! modules {
    ($($(#[$meta:meta])* $module:ident = $name:literal;)*) => {
        $($(#[$meta])* pub static $module: Module = Module {
            name: concat!($name, ".cu"),
            source: include_str!(concat!($name, ".cu")),
            ptx: include_str!(concat!("ptx/", $name, ".ptx")),
        };)*
        /// Every file.
        pub static MODULES: &[&Module] = &[$(&$module),*];
    };
}

modules! {
    /// Matrix products.
    LINEAR = "linear";
    /// Root-mean-square normalisation.
    NORM = "norm";
    /// Rotary embedding and appending to caches.
    ROPE = "rope";
    /// Attention.
    ATTENTION = "attention";
    /// Attention of many rows on tensor cores, for devices from compute capability 8.0 on.
    ATTENTION_TILES = "attention_tiles";
    /// Rows of a table.
    EMBEDDING = "embedding";
    /// Element by element, fills and copies.
    ELEMENTWISE = "elementwise";
    /// Sampling: from logits to the next token.
    SAMPLING = "sampling";
}

/// The registry entry of a CUDA kernel.
#[derive(Debug, Clone, Copy)]
pub struct CudaSpec {
    /// The CPU kernel's name.
    pub name: &'static str,
    /// The entry in the module: the name, if it is the kernel for all devices.
    pub entry: &'static str,
    /// The module that contains the kernel.
    pub module: &'static Module,
    takes: fn(&[u8]) -> bool,
    geometry: fn(&[u8]) -> Result<Geometry, Refusal>,
}

impl CudaSpec {
    /// The kernel called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|spec| spec.name == name)
    }

    /// Blocks and threads of a launch with parameters that the CPU kernel's `plan` has accepted.
    ///
    /// # Errors
    /// The reason, if the parameters exceed the limits of a launch.
    pub fn geometry(&self, params: &[u8]) -> Result<Geometry, Refusal> {
        (self.geometry)(params)
    }

    /// Whether this is the kernel to launch for parameters that the CPU kernel's `plan` has
    /// accepted. The kernels for all devices take all of them.
    #[must_use]
    pub fn takes(&self, params: &[u8]) -> bool {
        (self.takes)(params)
    }

    const fn of<K: CudaKernel>() -> Self {
        let (name, module) = (K::NAME, K::MODULE);
        Self { name, entry: name, module, takes: |_| true, geometry: geometry::<K> }
    }
}

fn geometry<K: CudaKernel>(params: &[u8]) -> Result<Geometry, Refusal> {
    let params = K::Params::from_bytes(params).ok_or("parameters of another size")?;
    K::geometry(&params).map_err(|why| format!("kernel {} on CUDA: {why}", K::NAME).into())
}

/// Every kernel.
pub static KERNELS: &[CudaSpec] = &[
    CudaSpec::of::<Linear>(),
    CudaSpec::of::<LinearAdd>(),
    CudaSpec::of::<Linear3>(),
    CudaSpec::of::<LinearGated>(),
    CudaSpec::of::<RmsNorm>(),
    CudaSpec::of::<AddRmsNorm>(),
    CudaSpec::of::<Rope>(),
    CudaSpec::of::<CacheAppend>(),
    CudaSpec::of::<RopeAppend>(),
    CudaSpec::of::<Attention>(),
    CudaSpec::of::<DecodeAttention>(),
    CudaSpec::of::<Embedding>(),
    CudaSpec::of::<Add>(),
    CudaSpec::of::<Mul>(),
    CudaSpec::of::<SiluMul>(),
    CudaSpec::of::<Cast>(),
    CudaSpec::of::<Fill>(),
    CudaSpec::of::<Copy2d>(),
    CudaSpec::of::<Softmax>(),
    CudaSpec::of::<Argmax>(),
    CudaSpec::of::<Sample>(),
    CudaSpec::of::<Advance>(),
    CudaSpec::of::<NextToken>(),
];

/// Kernels for some parameters on devices with tensor cores, preferred to those of [`KERNELS`].
pub static TENSOR_KERNELS: &[CudaSpec] = &[CudaSpec {
    name: Attention::NAME,
    entry: "attention_tiles",
    module: &ATTENTION_TILES,
    takes: |params| AttentionParams::from_bytes(params).is_some_and(|p| tiled(&p)),
    geometry: |params| {
        let p = AttentionParams::from_bytes(params).ok_or("parameters of another size")?;
        width(p.m.into())?;
        let down = heads_down(&p)?;
        Ok(Geometry { grid: [p.m.div_ceil(TILE_QUERIES), down, 1], block: [THREADS, 1, 1] })
    },
}];

/// Whether attention over tiles takes these parameters, and is the faster one.
fn tiled(p: &AttentionParams) -> bool {
    let halves = p.x == p.cache && [DType::Bf16 as u32, DType::F16 as u32].contains(&p.x);
    halves && p.m >= TILE_ROWS && [64, 80, 96, 128].contains(&p.head_dim)
}

/// The blocks in y: one for each head.
fn heads_down(p: &AttentionParams) -> Result<u32, Refusal> {
    if u64::from(p.heads) > MAX_Y {
        return Err(format!("{} heads; the limit is {MAX_Y}", p.heads).into());
    }
    Ok(p.heads)
}

/// The properties of a CUDA kernel beside those of its CPU counterpart.
trait CudaKernel: Kernel {
    /// The module that contains the kernel.
    const MODULE: &'static Module;

    /// Blocks and threads.
    fn geometry(p: &Self::Params) -> Result<Geometry, Refusal>;
}

/// Threads of a block of most kernels.
const THREADS: u32 = 256;
/// Threads of a warp.
const WARP: u32 = 32;
/// The maximum number of blocks of a launch whose blocks take several pieces of work: a few for
/// each place on the largest devices.
const BLOCKS: u64 = 1024;
/// The maximum number of blocks in y.
const MAX_Y: u64 = 65_535;
/// Indices along a row have 32 bits and may exceed the end by a block's width.
const MAX_WIDTH: u64 = 1 << 31;
/// Rows of queries of a block (`ROWS` in the source).
const QUERY_ROWS: u32 = 4;
/// Rows of queries of a block on tensor cores (`QUERIES` in the source).
const TILE_QUERIES: u32 = 128;
/// The fewest rows of queries for tensor cores: those of a warp's tile.
const TILE_ROWS: u32 = 16;
/// Rows and outputs of a tile of a matrix product (`TILE` in the source).
const TILE: u32 = 64;
/// Elements or units of a row that a block processes at once (`PIECE` in the source).
const PIECE: u64 = 4 * THREADS as u64;
/// The maximum number of threads of a block that draws a token.
const DRAW_THREADS: u32 = 1024;
/// A thread that draws a token counts in 16 bits.
const MAX_LOGITS: u64 = 1 << 26;

/// Checks the width of a row.
fn width(width: u64) -> Result<(), Refusal> {
    if width > MAX_WIDTH {
        Err(format!("rows of {width} elements; the limit is {MAX_WIDTH}").into())
    } else {
        Ok(())
    }
}

/// The geometry with a block for each row.
fn rows(rows: u32, wide: u64) -> Result<Geometry, Refusal> {
    width(wide)?;
    if u64::from(rows) >= MAX_WIDTH {
        return Err(format!("{rows} rows; there are fewer than {MAX_WIDTH} blocks").into());
    }
    Ok(Geometry { grid: [rows, 1, 1], block: [THREADS, 1, 1] })
}

/// The geometry of blocks that share `pieces` pieces of work; at least one block.
fn shared(pieces: u64) -> Geometry {
    Geometry { grid: [pieces.clamp(1, BLOCKS) as u32, 1, 1], block: [THREADS, 1, 1] }
}

/// Pieces of `rows` rows of `wide` elements.
fn pieces(rows: u32, wide: u64) -> Result<Geometry, Refusal> {
    width(wide)?;
    Ok(shared(u64::from(rows) * wide.div_ceil(PIECE)))
}

/// The geometry of a product: for few rows a warp for each output, for many rows a block for each
/// tile.
fn product(p: &LinearParams) -> Result<Geometry, Refusal> {
    width(p.k.into())?;
    p.n.iter().try_for_each(|&n| width(n.into()))?;
    if p.m as usize <= FEW {
        let warps = THREADS / WARP;
        let outputs: u64 = p.n.iter().map(|&n| u64::from(n)).sum();
        let blocks = outputs.div_ceil(warps.into()).clamp(1, BLOCKS) as u32;
        return Ok(Geometry { grid: [blocks, 1, 1], block: [WARP, warps, 1] });
    }
    let across: u64 = p.n.iter().map(|&n| u64::from(n.div_ceil(TILE))).sum();
    let down = u64::from(p.m.div_ceil(TILE));
    if down > MAX_Y {
        return Err(format!("{} rows; the limit is {}", p.m, MAX_Y * u64::from(TILE)).into());
    }
    Ok(Geometry { grid: [across as u32, down as u32, 1], block: [THREADS / 16, 16, 1] })
}

/// The elements of the heads of a row.
fn heads(p: &RopeParams) -> u64 {
    u64::from(p.heads.max(p.kv_heads)) * u64::from(p.head_dim)
}

/// The geometry of one block that draws a token.
fn draw(p: &SampleParams) -> Result<Geometry, Refusal> {
    if u64::from(p.n) > MAX_LOGITS {
        return Err(format!("{} logits; the limit is {MAX_LOGITS}", p.n).into());
    }
    let threads = p.n.next_multiple_of(THREADS).clamp(THREADS, DRAW_THREADS);
    Ok(Geometry { grid: [1, 1, 1], block: [threads, 1, 1] })
}

macro_rules! kernels {
    ($($kernel:ty, $module:ident, |$p:ident| $geometry:expr;)*) => {
        $(impl CudaKernel for $kernel {
            const MODULE: &'static Module = &$module;
            fn geometry($p: &Self::Params) -> Result<Geometry, Refusal> {
                $geometry
            }
        })*
    };
}

kernels! {
    Linear, LINEAR, |p| product(p);
    LinearAdd, LINEAR, |p| product(p);
    Linear3, LINEAR, |p| product(p);
    LinearGated, LINEAR, |p| product(p);
    RmsNorm, NORM, |p| normed(p);
    AddRmsNorm, NORM, |p| normed(p);
    Rope, ROPE, |p| rows(p.m, heads(p));
    CacheAppend, ROPE, |p| rows(p.m, heads(p));
    RopeAppend, ROPE, |p| rows(p.m, heads(p));
    Attention, ATTENTION, |p| {
        let per_block = if p.m == 1 { 1 } else { QUERY_ROWS };
        let down = heads_down(p)?;
        Ok(Geometry { grid: [p.m.div_ceil(per_block), down, 1], block: [THREADS, 1, 1] })
    };
    DecodeAttention, ATTENTION, |p| rows(p.heads, p.head_dim.into());
    Embedding, EMBEDDING, |p| rows(p.m, p.k.into());
    Add, ELEMENTWISE, |p| elements(p);
    Mul, ELEMENTWISE, |p| elements(p);
    SiluMul, ELEMENTWISE, |p| elements(p);
    Cast, ELEMENTWISE, |p| elements(p);
    Fill, ELEMENTWISE, |p| Ok(shared((u64::from(p.bytes[0]) | (u64::from(p.bytes[1]) << 32)).div_ceil(16 * PIECE)));
    Copy2d, ELEMENTWISE, |p| units(p);
    Softmax, SAMPLING, |p| row_of(p);
    Argmax, SAMPLING, |p| row_of(p);
    Sample, SAMPLING, |p| draw(p);
    Advance, SAMPLING, |_p| Ok(Geometry { grid: [1, 1, 1], block: [WARP, 1, 1] });
    NextToken, SAMPLING, |p| draw(p);
}

fn normed(p: &NormParams) -> Result<Geometry, Refusal> {
    rows(p.rows, p.k.into())
}

fn row_of(p: &RowParams) -> Result<Geometry, Refusal> {
    rows(p.rows, p.n.into())
}

fn elements(p: &ElementwiseParams) -> Result<Geometry, Refusal> {
    pieces(p.rows, p.k.into())
}

/// The geometry of a copy: enough blocks for its 16-byte units. Rows that are copied in smaller
/// units give each block more work.
fn units(p: &CopyParams) -> Result<Geometry, Refusal> {
    width(p.bytes.into())?;
    pieces(p.rows, u64::from(p.bytes).div_ceil(16))
}

#[cfg(test)]
mod tests;
