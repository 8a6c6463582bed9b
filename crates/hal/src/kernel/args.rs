//! What one tile of a CPU kernel is given.
//!
//! This module must not know who runs tiles.

use super::Binding;
use bytemuck::{AnyBitPattern, Pod};
use std::any::type_name;

/// The entry of a CPU kernel: runs one tile (one block of the grid). Tiles of one dispatch run in
/// any order and at the same time on several threads; a panic poisons the stream.
///
/// # Safety
/// - The bindings lie in memory that is valid for their accesses while the tile runs.
/// - The kernel's [`KernelCheck`](super::KernelCheck) has accepted the launch that the tile belongs
///   to.
pub type CpuFn = unsafe fn(&CpuArgs<'_>);

/// What one tile of a CPU kernel is given.
///
/// Only a backend makes one. A kernel reads its parameters with [`params`](Self::params), and its
/// memory with [`slice`](Self::slice) and [`slice_mut`](Self::slice_mut), which check bounds and
/// alignment and panic beyond them.
#[derive(Debug, Clone, Copy)]
pub struct CpuArgs<'a> {
    tile: [u32; 3],
    grid: [u32; 3],
    block: [u32; 3],
    bindings: &'a [Binding],
    params: &'a [u8],
    shared: *mut u8,
    shared_len: u32,
}

// SAFETY: the one raw pointer is the tile's scratch memory, which nothing here dereferences; who
// uses it does so in unsafe code.
unsafe impl Send for CpuArgs<'_> {}
// SAFETY: no method writes through a shared reference; the scratch pointer is only handed out.
unsafe impl Sync for CpuArgs<'_> {}

impl<'a> CpuArgs<'a> {
    /// The arguments of tile `[0, 0, 0]` of a launch; [`set_tile`](Self::set_tile) goes on to the
    /// others.
    ///
    /// # Safety
    /// - Each binding lies in memory that is valid for its access as long as a kernel uses the
    ///   arguments.
    /// - `shared` points to `shared_len` bytes, aligned to 64, that nobody else touches meanwhile;
    ///   or `shared_len` is 0.
    #[inline]
    #[must_use]
    pub unsafe fn new(
        (grid, block): ([u32; 3], [u32; 3]),
        bindings: &'a [Binding],
        params: &'a [u8],
        (shared, shared_len): (*mut u8, u32),
    ) -> Self {
        Self { tile: [0; 3], grid, block, bindings, params, shared, shared_len }
    }

    /// Goes on to another tile.
    #[inline]
    pub fn set_tile(&mut self, tile: [u32; 3]) {
        self.tile = tile;
    }

    /// Which tile.
    #[inline]
    #[must_use]
    pub fn tile(&self) -> [u32; 3] {
        self.tile
    }

    /// How many tiles in each direction.
    #[inline]
    #[must_use]
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// The block size that the dispatch asked for; a hint on the CPU.
    #[inline]
    #[must_use]
    pub fn block(&self) -> [u32; 3] {
        self.block
    }

    /// The bindings.
    #[inline]
    #[must_use]
    pub fn bindings(&self) -> &'a [Binding] {
        self.bindings
    }

    /// Scratch memory of this tile alone, uninitialised and aligned to 64, and its bytes.
    #[inline]
    #[must_use]
    pub fn shared(&self) -> (*mut u8, u32) {
        (self.shared, self.shared_len)
    }

    /// The parameters' bytes.
    #[inline]
    #[must_use]
    pub fn params_bytes(&self) -> &'a [u8] {
        self.params
    }

    /// The parameters as a plain struct.
    ///
    /// # Panics
    /// When the sizes differ; sessions check that before a launch.
    #[inline]
    #[must_use]
    pub fn params<T: AnyBitPattern>(&self) -> T {
        if self.params.len() != size_of::<T>() {
            wrong_params::<T>(self.params.len());
        }
        bytemuck::pod_read_unaligned(self.params)
    }

    /// Binding `i` as a slice to read, rounded down to whole elements; empty for elements without
    /// size.
    ///
    /// # Safety
    /// - The kernel declares that it reads binding `i`, and no tile writes it meanwhile.
    ///
    /// # Panics
    /// When there is no binding `i`, or it is not aligned for `T`; the stream is poisoned then. A
    /// kernel that declares the alignment of its bindings never meets the latter.
    #[inline]
    #[must_use]
    pub unsafe fn slice<T: AnyBitPattern>(&self, i: usize) -> &'a [T] {
        let (at, len) = self.aligned::<T>(i);
        if len == 0 {
            return &[];
        }
        // SAFETY: the binding is valid for reads (`new`), nobody writes it (this function's
        // contract), any bytes are a `T`, and `aligned` has checked the alignment and counted the
        // whole elements.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Binding `i` as a raw pointer, and the number of whole elements: several tiles share it, each
    /// writes its own part.
    #[inline]
    #[must_use]
    pub fn pointer<T>(&self, i: usize) -> (*mut T, usize) {
        let b = &self.bindings[i];
        (
            std::ptr::with_exposed_provenance_mut(b.addr as usize),
            (b.len as usize).checked_div(size_of::<T>()).unwrap_or(0),
        )
    }

    /// Elements `from..from + count` of binding `i`, to write.
    ///
    /// # Safety
    /// - The kernel declares that it writes binding `i`, and this tile alone touches these
    ///   elements.
    ///
    /// # Panics
    /// When the range does not lie in the binding, or the binding is not aligned for `T`; the
    /// stream is poisoned then.
    #[inline]
    #[must_use]
    pub unsafe fn slice_mut<T: Pod>(&self, i: usize, from: usize, count: usize) -> &'a mut [T] {
        let (at, len) = self.aligned::<T>(i);
        assert!(from <= len && count <= len - from, "binding {i} has {len} elements, not {from}..{from}+{count}");
        if count == 0 {
            return &mut [];
        }
        // SAFETY: the binding is valid for writes (`new`), the elements are this tile's alone (this
        // function's contract), any bytes are a `T`, and bounds and alignment were checked.
        unsafe { std::slice::from_raw_parts_mut(at.add(from), count) }
    }

    /// As [`pointer`](Self::pointer), for memory that is going to be a reference.
    #[inline]
    fn aligned<T>(&self, i: usize) -> (*mut T, usize) {
        let (at, len) = self.pointer::<T>(i);
        if len != 0 && !at.is_aligned() {
            misaligned::<T>(i, at.addr());
        }
        (at, len)
    }
}

#[cold]
#[inline(never)]
fn misaligned<T>(i: usize, addr: usize) -> ! {
    panic!("binding {i} at {addr:#x} is not aligned to the {} bytes of {}", align_of::<T>(), type_name::<T>())
}

#[cold]
#[inline(never)]
fn wrong_params<T>(len: usize) -> ! {
    panic!("{len} bytes of parameters are no {}, which has {}", type_name::<T>(), size_of::<T>())
}
