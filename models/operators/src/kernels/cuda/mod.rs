//! CUDA kernels: sources, the PTX and machine code compiled from them, and the geometry of
//! launches.
//!
//! | file | what |
//! |---|---|
//! | `common.cuh` | parameters, element types, sums over a block; prepended to each of the others |
//! | `tensor.cuh` | instructions and fragments of tensor cores; prepended to files that use them |
//! | `bulk.cuh` | flags and copies of Hopper devices; prepended to the files for these alone |
//! | `decode.cuh` | parts of a context, rotated rows; prepended to the files of such attention |
//! | `*.cu` | the kernels, a family in each file |
//! | `images.rs` | the output of `ci/ptx.sh`; CI compiles again and compares |
//!
//! A CUDA kernel has the name, the operands and the parameters of the CPU kernel ([`KernelSpec`]),
//! whose checks run before every launch. This module adds only the number of blocks and threads of
//! a launch, and the limits of 32-bit indices.
//!
//! The sources declare shared memory, within the size that every device offers for a block. Where a
//! kernel for some devices needs more, its launches add it. Sums are f32, only counters are atomic,
//! and each element is computed in a fixed order. So a result depends on the parameters alone.
//!
//! This module must not know the driver.

mod images;

use super::blocks::{
    Blocks, LONG_BLOCKS, MAX_Y, THREADS, WARP, draw, from_bytes, heads_down, kernel_list, row_of,
    width,
};
use super::cpu::attention::{Attention, AttentionParams, DecodeAttention};
use super::cpu::elem::DType;
use super::cpu::linear::{self, Linear, Linear3, LinearAdd, LinearGated, LinearParams};
use super::cpu::sampling::{Argmax, NextToken, NextTokenParams, RowParams};
use super::cpu::tile::{Kernel, KernelSpec, Params, Refusal};
use leasehold::kernel::{Cubin, Grid, KernelSource, MapElement, Swizzle, TensorMap};
use std::borrow::Cow;

/// Text that is prepended to the source of every module.
pub const COMMON: &str = include_str!("common.cuh");
/// Text that follows [`COMMON`] in the modules of [`TENSOR_KERNELS`].
pub const TENSOR: &str = include_str!("tensor.cuh");
/// Text that follows [`TENSOR`] in the modules for Hopper devices.
pub const BULK: &str = include_str!("bulk.cuh");
/// Text that follows those in the modules with attention for a row of each of several sequences.
pub const DECODE: &str = include_str!("decode.cuh");

/// A file of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// The file's name.
    pub name: &'static str,
    /// CUDA C++; [`COMMON`] goes before it.
    pub source: &'static str,
    /// The output of the run-time compiler for the lowest architecture that has the instructions;
    /// drivers translate it for every later one. Empty if one architecture alone has them.
    pub ptx: &'static str,
    /// Machine code, for the architectures from 8.0 on or for the one that has the instructions:
    /// nothing is compiled on these devices.
    pub cubins: &'static [Cubin<'static>],
}

impl Module {
    /// The module as the source of a kernel.
    #[must_use]
    pub fn kernel_source(&self) -> KernelSource<'static> {
        KernelSource::Cubins { images: self.cubins, ptx: self.ptx.into() }
    }
}

macro_rules! modules {
    ($($(#[$meta:meta])* $module:ident = $name:ident for $($image:ident ($major:literal, $minor:literal))*;)*) => {
        $($(#[$meta])* pub static $module: Module = Module {
            name: concat!(stringify!($name), ".cu"),
            source: include_str!(concat!(stringify!($name), ".cu")),
            ptx: images::$name::PTX,
            // SAFETY: the images are the compiler's output; CI compiles the source again and
            // compares.
            cubins: unsafe {
                &[$(Cubin::new(
                    ($major, $minor),
                    Cow::Borrowed(images::$name::$image),
                )),*]
            },
        };)*
        /// Every file.
        pub static MODULES: &[&Module] = &[$(&$module),*];
    };
}

modules! {
    /// Matrix products.
    LINEAR = linear for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Root-mean-square normalisation.
    NORM = norm for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Rotary embedding and appending to caches.
    ROPE = rope for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Attention.
    ATTENTION = attention for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Matrix products of several rows on tensor cores, for devices from compute capability 8.0 on.
    LINEAR_TILES = linear_tiles for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Matrix products of 2 to 64 rows by tensor maps, for devices of compute capability 9.0.
    LINEAR_BOXES = linear_boxes for SM_90 (9, 0);
    /// Matrix products of one long row, for devices of compute capability 9.0.
    LINEAR_ROW = linear_row for SM_90 (9, 0);
    /// Attention for a row of each of several sequences on tensor cores, for devices from compute
    /// capability 8.0 on.
    ATTENTION_DECODE = attention_decode for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Attention of many rows on tensor cores, for devices from compute capability 8.0 on.
    ATTENTION_TILES = attention_tiles for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Attention of many rows by products of warpgroups, for devices of compute capability 9.0.
    ATTENTION_WARPGROUPS = attention_warpgroups for SM_90 (9, 0);
    /// Rows of a table.
    EMBEDDING = embedding for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Element by element, fills and copies.
    ELEMENTWISE = elementwise for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Sampling: from logits to the next token.
    SAMPLING = sampling for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
    /// Checks of values.
    CHECK = check for SM_80 (8, 0) SM_90 (9, 0) SM_100 (10, 0) SM_120 (12, 0);
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
    /// The architecture names of the devices that run it.
    pub archs: &'static [&'static str],
    takes: fn(&[u8]) -> bool,
    geometry: fn(&[u8]) -> Result<Grid, Refusal>,
    maps: Option<Maps>,
}

/// The tensor maps that a kernel takes in front of its parameters.
#[derive(Debug, Clone, Copy)]
struct Maps {
    /// The operand of each.
    operands: &'static [u32],
    make: fn(&[u8]) -> Vec<TensorMap>,
}

impl CudaSpec {
    /// The kernel called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|spec| spec.name == name)
    }

    /// Every kernel, those for some devices too.
    pub fn all() -> impl Iterator<Item = &'static Self> {
        KERNELS.iter().chain(TENSOR_KERNELS)
    }

    /// Blocks and threads of a launch with parameters that the CPU kernel's `plan` has accepted.
    ///
    /// # Errors
    /// The reason, if the parameters exceed the limits of a launch.
    pub fn geometry(&self, params: &[u8]) -> Result<Grid, Refusal> {
        let why = |why| format!("kernel {} on CUDA: {why}", self.entry).into();
        (self.geometry)(params).map_err(why)
    }

    /// Whether this is the kernel to launch for parameters that the CPU kernel's `plan` has
    /// accepted. The kernels for all devices take all of them.
    #[must_use]
    pub fn takes(&self, params: &[u8]) -> bool {
        (self.takes)(params)
    }

    /// The operands that the kernel, of signature `spec`, can read before it waits, bit `i` for
    /// operand `i`: the weights of a product on tensor cores (`has` in the sources).
    #[must_use]
    pub fn early_reads(&self, spec: &KernelSpec) -> u32 {
        if ![&LINEAR_TILES, &LINEAR_BOXES, &LINEAR_ROW]
            .iter()
            .any(|&m| std::ptr::eq(self.module, m))
        {
            return 0;
        }
        let weights = spec.operands.iter().enumerate().filter(|(_, o)| o.name.contains("weight"));
        weights.fold(0, |all, (i, _)| all | 1 << i)
    }

    /// The operands of the kernel's tensor maps, in the order of the maps.
    #[must_use]
    pub fn mapped(&self) -> &'static [u32] {
        self.maps.map_or(&[], |maps| maps.operands)
    }

    /// The bytes of a launch with parameters that the kernel takes: its tensor maps, and they.
    #[must_use]
    pub fn launched(&self, params: &[u8]) -> Vec<u8> {
        let maps = self.maps.map_or_else(Vec::new, |maps| (maps.make)(params));
        [bytemuck::cast_slice(&maps), params].concat()
    }

    /// The parameters in the bytes of a launch.
    ///
    /// # Errors
    /// If the bytes are too few.
    pub fn params_in<'a>(&self, launched: &'a [u8]) -> Result<&'a [u8], Refusal> {
        let maps = self.mapped().len() * TensorMap::BYTES as usize;
        launched
            .get(maps..)
            .ok_or_else(|| format!("kernel {}: tensor maps are missing", self.entry).into())
    }

    const fn of<K: Blocks>(module: &'static Module) -> Self {
        let name = K::NAME;
        Self {
            name,
            entry: name,
            module,
            archs: &[CUDA],
            takes: |_| true,
            geometry: |params| K::cuda(&from_bytes(params)?),
            maps: None,
        }
    }
}

/// Every kernel.
pub static KERNELS: &[CudaSpec] = kernel_list!(CudaSpec);

/// The architecture name of the kernels for all CUDA devices: machine code, and PTX for devices
/// without.
pub const CUDA: &str = "cuda";
/// The architecture names of CUDA devices with tensor cores that read bf16 and add in f32: the
/// first of each generation, of which the list of a device's names has its own.
const GENERATIONS: &[&str] =
    &["cuda/sm_80", "cuda/sm_90", "cuda/sm_100", "cuda/sm_110", "cuda/sm_120"];
/// The architecture name of the devices whose warpgroups multiply, and where a cluster of blocks
/// shares a row.
const HOPPER: &[&str] = &["cuda/sm_90"];

/// Kernels for some parameters on devices with tensor cores, preferred to those of [`KERNELS`], and
/// each to those behind it.
pub static TENSOR_KERNELS: &[CudaSpec] = &[
    warpgroups::<128, 2>("attention_warpgroups"),
    warpgroups::<64, 3>("attention_warpgroups_64"),
    CudaSpec {
        name: Attention::NAME,
        entry: "attention_tiles",
        module: &ATTENTION_TILES,
        archs: GENERATIONS,
        takes: |params| AttentionParams::from_bytes(params).is_some_and(|p| tiled(&p)),
        geometry: |params| attention_tiles(&from_bytes(params)?, TILE_QUERIES, TILE_THREADS),
        maps: None,
    },
    decode_rows::<64>("decode_attention_64"),
    decode_rows::<128>("decode_attention_128"),
    CudaSpec {
        name: DecodeAttention::NAME,
        entry: "decode_attention_bf16",
        module: &ATTENTION,
        archs: GENERATIONS,
        takes: |params| {
            let bf16 = |p: AttentionParams| [p.x, p.cache] == [DType::Bf16 as u32; 2];
            AttentionParams::from_bytes(params).is_some_and(bf16)
        },
        geometry: |params| DecodeAttention::cuda(&from_bytes(params)?),
        maps: None,
    },
    product_row::<Linear, 1>("linear_row"),
    product_row::<LinearAdd, 1>("linear_add_row"),
    product_row::<Linear3, 1>("linear3_row"),
    product_row::<LinearGated, 2>("linear_gated_row"),
    product_boxes::<Linear, 1>("linear_boxes", &[0, 2]),
    product_boxes::<LinearAdd, 1>("linear_add_boxes", &[0, 2]),
    product_boxes::<Linear3, 1>("linear3_boxes", &[0, 2, 5, 8]),
    product_boxes::<LinearGated, 2>("linear_gated_boxes", &[0, 2, 4]),
    product_tiles::<Linear, 1>("linear_tiles"),
    product_tiles::<LinearAdd, 1>("linear_add_tiles"),
    product_tiles::<Linear3, 1>("linear3_tiles"),
    product_tiles::<LinearGated, 2>("linear_gated_tiles"),
    CudaSpec {
        name: NextToken::NAME,
        entry: "next_token_cluster",
        module: &SAMPLING,
        archs: HOPPER,
        takes: |params| {
            NextTokenParams::from_bytes(params).is_some_and(|p| for_clusters(p.rows, p.n))
        },
        geometry: |params| Ok(clusters(draw(&from_bytes(params)?)?)),
        maps: None,
    },
    CudaSpec {
        name: Argmax::NAME,
        entry: "argmax_cluster",
        module: &SAMPLING,
        archs: HOPPER,
        takes: |params| RowParams::from_bytes(params).is_some_and(|p| for_clusters(p.rows, p.n)),
        geometry: |params| Ok(clusters(row_of(&from_bytes(params)?)?)),
        maps: None,
    },
];

/// Blocks of a cluster (`BLOCKS` in the source).
const CLUSTER: u32 = 8;
/// Threads of a block of a cluster.
pub(super) const CLUSTER_THREADS: u32 = 512;
/// The fewest elements of a row, and the most rows, for which clusters are faster than blocks. More
/// clusters than twice as many rows do not run at a time.
const CLUSTER_ROW: u32 = 16_384;
const CLUSTER_ROWS: u32 = 16;

/// Whether clusters take rows of sampling, and are faster.
fn for_clusters(rows: u32, n: u32) -> bool {
    rows <= CLUSTER_ROWS && n >= CLUSTER_ROW
}

/// The geometry with a cluster for each block of another one.
fn clusters(Grid { blocks: [rows, ..], .. }: Grid) -> Grid {
    Grid::new([rows * CLUSTER, 1, 1]).threads([CLUSTER_THREADS, 1, 1])
}

/// Threads of a block on tensor cores (`THREADS` in the source).
pub(super) const TILE_THREADS: u32 = 128;
/// Rows of queries of a block on tensor cores (`QUERIES` in the source).
const TILE_QUERIES: u32 = 128;
/// Threads of a warpgroup (`GROUP` in the source).
pub(super) const WARPGROUP: u32 = 4 * WARP;
/// Rows of queries that a warpgroup computes (`GROUP_QUERIES` in the source).
pub(super) const WARPGROUP_QUERIES: u32 = 64;
/// Positions of a tile of the kernels for warpgroups (`ROWS` in the source).
pub(super) const WARPGROUP_ROWS: u32 = 128;
/// Tiles of keys, and of values, of a block of warpgroups (`STAGES` in the source).
pub(super) const WARPGROUP_STAGES: u32 = 2;
/// The fewest rows of queries for tensor cores: those of a fragment.
const TILE_ROWS: u32 = 16;

/// The geometry with a block for each head of `queries` rows.
fn attention_tiles(p: &AttentionParams, queries: u32, threads: u32) -> Result<Grid, Refusal> {
    width(p.m.into())?;
    Ok(Grid::new([p.m.div_ceil(queries), heads_down(p)?, 1]).threads([threads, 1, 1]))
}

/// Attention by warpgroups, with heads of `DIM` elements, `GROUPS` of them behind one that copies.
const fn warpgroups<const DIM: u32, const GROUPS: u32>(entry: &'static str) -> CudaSpec {
    CudaSpec {
        name: Attention::NAME,
        entry,
        module: &ATTENTION_WARPGROUPS,
        archs: HOPPER,
        takes: |params| {
            AttentionParams::from_bytes(params).is_some_and(|p| tiled(&p) && p.head_dim == DIM)
        },
        geometry: |params| {
            let queries = GROUPS * WARPGROUP_QUERIES;
            let elements = (queries + 2 * WARPGROUP_STAGES * WARPGROUP_ROWS) * DIM;
            // A tile has two flags: it is full, it is free.
            let flags = 2 * 2 * WARPGROUP_STAGES * size_of::<u64>() as u32;
            let shared = elements * size_of::<u16>() as u32 + flags;
            let threads = (GROUPS + 1) * WARPGROUP;
            Ok(attention_tiles(&from_bytes(params)?, queries, threads)?.shared(shared))
        },
        maps: None,
    }
}

/// Whether attention over tiles takes these parameters, and is the faster one.
fn tiled(p: &AttentionParams) -> bool {
    p.x == p.cache
        && is_half(p.x)
        && p.m >= TILE_ROWS
        && [64, 80, 96, 128].contains(&p.head_dim)
        && p.scale > 0.0
        && p.scale < f32::INFINITY
}

/// Attention for a row of each of several sequences on tensor cores, with heads of `DIM` elements.
const fn decode_rows<const DIM: u32>(entry: &'static str) -> CudaSpec {
    CudaSpec {
        name: DecodeAttention::NAME,
        entry,
        module: &ATTENTION_DECODE,
        archs: GENERATIONS,
        takes: |params| {
            AttentionParams::from_bytes(params).is_some_and(|p| {
                // Few rows of short contexts are as fast one by one. Their number must not decide,
                // so that their bits are the same in all small batches.
                let pays = p.m > DECODE_FEW || (p.m > 1 && p.split().0 > DECODE_PARTS);
                pays && p.x == p.cache && is_half(p.x) && p.head_dim == DIM
            })
        },
        geometry: |params| {
            let p: AttentionParams = from_bytes(params)?;
            let (parts, _) = p.split();
            let blocks = (p.heads / p.kv_heads.max(1)).div_ceil(DECODE_HEADS);
            let (lists, down) = (p.m.div_ceil(DECODE_ROWS), p.kv_heads);
            let deep = u64::from(lists) * u64::from(blocks);
            if u64::from(down).max(deep) > MAX_Y {
                return Err(
                    format!("{down} heads of keys, {deep} lists; the limit is {MAX_Y}").into()
                );
            }
            let most = u64::from(p.m.min(DECODE_ROWS)) * u64::from(parts);
            // Those that run at a time on 132 processors.
            let places = 132 * if DIM == 64 { 4 } else { 3 };
            let across = (places / (u64::from(down) * deep)).clamp(1, most.max(1));
            let grid = [across as u32, down, deep as u32];
            Ok(Grid::new(grid).threads([TILE_THREADS, 1, 1]))
        },
        maps: None,
    }
}

/// Query heads of a block of [`decode_rows`], and rows of a list of its parts (`HEADS` and `ROWS`
/// in the source).
pub(super) const DECODE_HEADS: u32 = 8;
pub(super) const DECODE_ROWS: u32 = 512;
/// The most rows for which the length of the caches decides, and the parts of the longest caches
/// that leave the rows to a kernel with a block for each part.
const DECODE_FEW: u32 = 16;
const DECODE_PARTS: u32 = 4;

fn is_half(dtype: u32) -> bool {
    [DType::Bf16 as u32, DType::F16 as u32].contains(&dtype)
}

/// The maximum number of rows of x for which products on tensor cores stream the weights, and the
/// most rows of weights of a block (`STREAMED` and `STREAM` in the source).
pub(crate) const STREAMED: u32 = 2 * FRAGMENT;
/// Rows of x of a fragment of tensor cores.
pub(super) const FRAGMENT: u32 = 16;
pub(super) const STREAM: u32 = 32;
/// Rows of x and of weights of a tile of a larger product, which are as many as the threads of a
/// block in x.
const SMALL_TILE: u32 = 64;
const LARGE_TILE: u32 = 128;
/// The fewest blocks that keep the largest devices busy. Where large tiles would be fewer, tiles
/// are small.
const MANY_TILES: u64 = 128;

/// The product `K` on tensor cores, each of whose outputs has `MATRICES` rows of weights.
const fn product_tiles<K: Kernel<Params = LinearParams>, const MATRICES: u32>(
    entry: &'static str,
) -> CudaSpec {
    CudaSpec {
        name: K::NAME,
        entry,
        module: &LINEAR_TILES,
        archs: GENERATIONS,
        takes: |params| LinearParams::from_bytes(params).is_some_and(|p| multiplied(&p)),
        geometry: |params| product_blocks(&from_bytes(params)?, MATRICES),
        maps: None,
    }
}

fn product_blocks(p: &LinearParams, matrices: u32) -> Result<Grid, Refusal> {
    [p.k, p.m].iter().chain(&p.n).try_for_each(|&n| width(n.into()))?;
    let across =
        |side: u32| -> u64 { p.n.iter().map(|&n| u64::from(n.div_ceil(side / matrices))).sum() };
    if p.m <= STREAMED {
        // Blocks of all rows would leave processors of the largest devices idle.
        let rows = if across(STREAM) < MANY_TILES { STREAM / 2 } else { STREAM };
        let blocks = across(rows).min(LONG_BLOCKS.into()) as u32;
        return Ok(Grid::new([blocks, 1, 1]).threads([rows, THREADS / rows, 1]));
    }
    let large = u64::from(p.m.div_ceil(LARGE_TILE)) * across(LARGE_TILE) >= MANY_TILES;
    let side = if large && p.m > SMALL_TILE { LARGE_TILE } else { SMALL_TILE };
    let blocks = across(side);
    if blocks > MAX_Y {
        return Err(format!("{blocks} blocks of outputs; the limit is {MAX_Y}").into());
    }
    let grid = [p.m.div_ceil(side), blocks as u32, 1];
    Ok(Grid::new(grid).threads([side, THREADS / side, 1]))
}

/// Bytes of shared memory of a block of [`product_row`]: more than a third of a processor's, and at
/// most half. So two blocks fill a processor, and three never meet.
const ROW_SHARED: std::ops::RangeInclusive<u32> = 76 << 10..=113 << 10;
/// The shortest row of [`product_row`].
const ROW_LEAST: u32 = 2048;
/// The most elements of its weights. Larger matrices are no faster with it.
const ROW_MOST: u64 = 1 << 26;
/// Warps of a block of it that multiply, those that do not, and the pieces of its ring (`Shared`
/// and `COPIERS` in the source).
const ROW_WARPS: u32 = 8;
const ROW_OTHERS: u32 = 3;
const ROW_PIECES: u32 = 5;

/// The product `K` of one long row, whose weights pass through shared memory. An output has
/// `MATRICES` rows of weights.
const fn product_row<K: Kernel<Params = LinearParams>, const MATRICES: u32>(
    entry: &'static str,
) -> CudaSpec {
    CudaSpec {
        name: K::NAME,
        entry,
        module: &LINEAR_ROW,
        archs: HOPPER,
        takes: |params| {
            LinearParams::from_bytes(params).is_some_and(|p| {
                p.m == 1
                    && [p.x, p.w] == [DType::Bf16 as u32; 2]
                    && p.k.is_multiple_of(8)
                    && p.k >= ROW_LEAST
                    && outputs(&p) * u64::from(MATRICES) * u64::from(p.k) <= ROW_MOST
                    && row_shared(&p) <= *ROW_SHARED.end()
            })
        },
        geometry: |params| {
            let p: LinearParams = from_bytes(params)?;
            let blocks = outputs(&p).min(LONG_BLOCKS.into()) as u32;
            let shared = row_shared(&p).max(*ROW_SHARED.start());
            let threads = (ROW_WARPS + ROW_OTHERS) * WARP;
            Ok(Grid::new([blocks, 1, 1]).threads([threads, 1, 1]).shared(shared))
        },
        maps: None,
    }
}

/// The most rows of x of [`product_boxes`], and of those that it multiplies with all matrices.
const BOX_ROWS: u32 = 64;
const BOX_FEW: u32 = 32;
/// The most elements of weights for more rows, and the longest row of x that more blocks than
/// processors read. Beyond these a vendor's library is faster.
const BOX_ELEMENTS: u64 = 1 << 25;
const BOX_SHORT: u32 = 2048;
/// The columns of a box (`BOX` in the source).
const BOX: u32 = 64;
/// Warps of a block of it (`THREADS` in the source).
const BOX_WARPS: u32 = 9;
/// Outputs beyond which a block of one matrix has more rows of weights (`MANY` in the source).
const BOX_MANY: u32 = 16_384;
/// Blocks that have a processor each (`PROCESSORS` in the source), and bytes of shared memory of
/// such a block and of one of two blocks on a processor: the ring, and what aligns it.
const BOX_PROCESSORS: u32 = 132;
const BOX_SHARED: [u32; 2] = [217 << 10, 109 << 10];

/// The product `K` of 2 to 64 rows, whose weights and rows pass through shared memory as boxes of
/// tensor maps. An output has `MATRICES` rows of weights; `operands` are x and all weights.
const fn product_boxes<K: Kernel<Params = LinearParams>, const MATRICES: u32>(
    entry: &'static str,
    operands: &'static [u32],
) -> CudaSpec {
    CudaSpec {
        name: K::NAME,
        entry,
        module: &LINEAR_BOXES,
        archs: HOPPER,
        takes: |params| {
            LinearParams::from_bytes(params).is_some_and(|p| {
                let elements = outputs(&p) * u64::from(MATRICES) * u64::from(p.k);
                let alone = box_blocks::<K, MATRICES>(&p) <= BOX_PROCESSORS.into();
                // Each block reads all rows of x.
                let few =
                    p.m <= BOX_FEW || (elements <= BOX_ELEMENTS && (p.k <= BOX_SHORT || alone));
                multiplied(&p)
                    && p.x == DType::Bf16 as u32
                    && p.m <= BOX_ROWS
                    && p.k.is_multiple_of(BOX)
                    && few
            })
        },
        geometry: |params| {
            let p: LinearParams = from_bytes(params)?;
            let blocks = box_blocks::<K, MATRICES>(&p);
            [p.k.into(), blocks].into_iter().try_for_each(width)?;
            let shared = BOX_SHARED[usize::from(blocks > BOX_PROCESSORS.into())];
            Ok(Grid::new([blocks as u32, 1, 1]).threads([BOX_WARPS * WARP, 1, 1]).shared(shared))
        },
        maps: Some(Maps {
            operands,
            make: |params| {
                let Some(p) = LinearParams::from_bytes(params) else { return Vec::new() };
                let (rows, depth) = boxes::<K, MATRICES>(&p);
                let map = |n: u32, ld: u32, rows: u32| {
                    let sizes = [BOX, n, p.k / BOX].map(u64::from);
                    let line = u64::from(BOX) * 2;
                    TensorMap::new(MapElement::Bf16, &sizes, &[BOX, rows, depth])
                        .strides(&[u64::from(ld) * 2, line])
                        .swizzle(Swizzle::B128)
                        .l2_promotion(256)
                };
                let x = map(p.m, p.ldx, p.m.next_multiple_of(8).next_power_of_two());
                let weights = p.n.iter().filter(|&&n| n > 0).map(|&n| map(n, p.k, rows / MATRICES));
                let each = weights.flat_map(|map| std::iter::repeat_n(map, MATRICES as usize));
                std::iter::once(x).chain(each).collect()
            },
        }),
    }
}

/// Blocks of a launch of [`product_boxes`].
fn box_blocks<K: Kernel, const MATRICES: u32>(p: &LinearParams) -> u64 {
    let rows = boxes::<K, MATRICES>(p).0 / MATRICES;
    p.n.iter().map(|&n| u64::from(n.div_ceil(rows))).sum()
}

/// Rows of weights of a block of [`product_boxes`], and boxes of a stage.
fn boxes<K: Kernel, const MATRICES: u32>(p: &LinearParams) -> (u32, u32) {
    let many = K::NAME == Linear::NAME && p.n[0] > BOX_MANY;
    if many || MATRICES == 2 { (64, 2) } else { (16, 4) }
}

/// The outputs of all matrices.
fn outputs(p: &LinearParams) -> u64 {
    p.n.iter().map(|&n| u64::from(n)).sum()
}

/// Bytes of shared memory that a block of [`product_row`] uses (`Shared` in the source): the ring
/// and its flags, the flags and sums of four groups, and x in bf16. A norm has x twice.
fn row_shared(p: &LinearParams) -> u32 {
    let piece = 8 * (1024 + 16) * 2 + 16;
    let sums = 4 * (16 + ROW_WARPS * 16 * 4) + 16 + ROW_WARPS * 4;
    let rows = if p.flags & linear::NORM == 0 { 1 } else { 2 };
    (ROW_PIECES * piece + sums).saturating_add(p.k.div_ceil(32).saturating_mul(64 * rows))
}

/// Whether products on tensor cores take these parameters.
fn multiplied(p: &LinearParams) -> bool {
    p.x == p.w
        && is_half(p.x)
        && (p.y == p.x || p.y == DType::F32 as u32)
        && p.m >= 2
        && p.flags & linear::NORM == 0
        && p.k.is_multiple_of(8)
        && p.ldx.is_multiple_of(8)
}

#[cfg(test)]
mod tests;
