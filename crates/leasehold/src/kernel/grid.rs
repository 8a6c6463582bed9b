//! The shape of a launch, and the plain data that it is given.
//!
//! This module must not know sessions or streams.

use bytemuck::NoUninit;

/// How many blocks of how many threads a launch has.
///
/// A CPU kernel runs once for each block (a tile, there); threads and shared memory mean nothing to
/// it. A number is a grid of one dimension with one thread a block.
///
/// ```
/// use leasehold::kernel::Grid;
/// assert_eq!(Grid::from(8), Grid::new([8, 1, 1]));
/// let grid = Grid::new([8, 8, 1]).threads([32, 4, 1]).shared(1024);
/// assert_eq!((grid.blocks, grid.threads, grid.shared), ([8, 8, 1], [32, 4, 1], 1024));
/// ```
#[doc(alias("gridDim", "blockDim", "threadsPerThreadgroup", "workgroup"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub struct Grid {
    /// Blocks in each dimension. A launch with a zero among them does nothing.
    pub blocks: [u32; 3],
    /// Threads of a block in each dimension; 1 by default.
    pub threads: [u32; 3],
    /// Bytes of shared memory of a block beside what the kernel declares; 0 by default.
    pub shared: u32,
}

impl Grid {
    /// Blocks of one thread, without shared memory.
    pub const fn new(blocks: [u32; 3]) -> Self {
        Self { blocks, threads: [1; 3], shared: 0 }
    }

    /// With blocks of as many threads.
    pub const fn threads(mut self, threads: [u32; 3]) -> Self {
        self.threads = threads;
        self
    }

    /// With as many bytes of shared memory for each block.
    pub const fn shared(mut self, bytes: u32) -> Self {
        self.shared = bytes;
        self
    }
}

impl From<u32> for Grid {
    #[inline]
    fn from(blocks: u32) -> Self {
        Self::new([blocks, 1, 1])
    }
}

impl From<[u32; 3]> for Grid {
    #[inline]
    fn from(blocks: [u32; 3]) -> Self {
        Self::new(blocks)
    }
}

/// Blocks, and threads of a block.
impl From<(u32, u32)> for Grid {
    #[inline]
    fn from((blocks, threads): (u32, u32)) -> Self {
        Self::new([blocks, 1, 1]).threads([threads, 1, 1])
    }
}

/// Blocks, and threads of a block.
impl From<([u32; 3], [u32; 3])> for Grid {
    #[inline]
    fn from((blocks, threads): ([u32; 3], [u32; 3])) -> Self {
        Self::new(blocks).threads(threads)
    }
}

/// The parameters of a launch: one value of plain data (`()` for none), or bytes.
///
/// A tuple is none: Rust says nothing about where its members lie. A `#[repr(C)]` struct that
/// derives [`bytemuck::NoUninit`] is one.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the parameters of a launch",
    label = "not made of bytes alone",
    note = "give one `#[repr(C)]` struct with `#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]` (crate `bytemuck`, feature `derive`), a number, an array or `()`; a tuple has no defined layout"
)]
pub trait Params {
    /// The bytes that the kernel is given.
    fn bytes(&self) -> &[u8];
}

#[diagnostic::do_not_recommend]
impl<T: NoUninit> Params for T {
    #[inline]
    fn bytes(&self) -> &[u8] {
        bytemuck::bytes_of(self)
    }
}

impl Params for [u8] {
    #[inline]
    fn bytes(&self) -> &[u8] {
        self
    }
}
