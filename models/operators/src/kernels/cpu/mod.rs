//! The kernels of the CPU backend.
//!
//! | file | what |
//! |---|---|
//! | `tile` | the definition of a kernel: operands, parameters, grid, tile function |
//! | `isa`, `simd` | levels of instructions; vectors |
//! | `elem`, `row`, `math`, `dot` | element types; loops over a row; `exp`; the inner product |
//! | `block` | products of many rows in f32 |
//! | `amx` | products of bf16 on the tiles of AMX |
//! | `cache` | the place of keys and values in the memory of a cache |
//! | `linear`, `norm`, `rope`, `attention`, `embedding`, `elementwise` | the kernels |
//! | `sampling`, `check` | the kernels that choose tokens; the one that checks values |
//!
//! Floating point is IEEE with denormals. The order of a sum depends on the number of lanes of a
//! level and on no other property of the machine. Results of one level are bit-identical for any
//! number of threads; results of two levels differ by rounding.

#![expect(
    clippy::needless_range_loop,
    reason = "register blocks are indexed in step; iterators would hide which lanes meet"
)]

#[cfg(target_arch = "x86_64")]
mod amx;
pub mod attention;
mod block;
pub mod cache;
pub mod check;
pub mod dot;
mod dots;
pub mod elem;
pub mod elementwise;
pub mod embedding;
mod input;
pub mod isa;
pub mod linear;
pub mod math;
pub mod norm;
pub mod rope;
pub mod row;
pub mod sampling;
pub mod simd;
pub mod stream;
pub mod tile;

use tile::KernelSpec;

/// Every kernel.
pub static KERNELS: &[KernelSpec] = &[
    KernelSpec::of::<linear::Linear>(),
    KernelSpec::of::<linear::LinearAdd>(),
    KernelSpec::of::<linear::Linear3>(),
    KernelSpec::of::<linear::LinearGated>(),
    KernelSpec::of::<norm::RmsNorm>(),
    KernelSpec::of::<norm::AddRmsNorm>(),
    KernelSpec::of::<rope::Rope>(),
    KernelSpec::of::<rope::CacheAppend>(),
    KernelSpec::of::<rope::RopeAppend>(),
    KernelSpec::of::<attention::Attention>(),
    KernelSpec::of::<attention::DecodeAttention>(),
    KernelSpec::of::<embedding::Embedding>(),
    KernelSpec::of::<elementwise::Add>(),
    KernelSpec::of::<elementwise::Mul>(),
    KernelSpec::of::<elementwise::SiluMul>(),
    KernelSpec::of::<elementwise::Cast>(),
    KernelSpec::of::<elementwise::Fill>(),
    KernelSpec::of::<elementwise::Copy2d>(),
    KernelSpec::of::<sampling::Softmax>(),
    KernelSpec::of::<sampling::Argmax>(),
    KernelSpec::of::<sampling::Advance>(),
    KernelSpec::of::<sampling::NextToken>(),
    KernelSpec::of::<sampling::Penalise>(),
    KernelSpec::of::<check::NotFinite>(),
];

impl KernelSpec {
    /// The kernel called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|spec| spec.name == name)
    }
}
