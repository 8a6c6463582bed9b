//! Arguments of CPU kernels: the view of one tile.
//!
//! This module must not know which code runs tiles.

use super::Binding;
use super::params::FromParams;
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

/// The entry of a CPU kernel with the calling convention of C: as a [`CpuFn`], with the arguments
/// in a struct. It returns, and does not unwind.
///
/// # Safety
/// - As for a [`CpuFn`]. The struct and what it points to are valid during the call.
pub type CpuCFn = unsafe extern "C" fn(*const CpuTile);

/// The arguments of one tile for a function of C: [`CpuArgs`] as plain fields.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct CpuTile {
    /// The index of the tile.
    pub tile: [u32; 3],
    /// The number of tiles in each direction.
    pub grid: [u32; 3],
    /// The block size of the dispatch; a hint on the CPU.
    pub block: [u32; 3],
    /// Bytes at `shared`.
    pub shared_bytes: u32,
    /// Scratch memory of this tile alone, uninitialised and aligned to 64.
    pub shared: *mut u8,
    /// The bindings.
    pub bindings: *const Binding,
    /// How many bindings there are.
    pub binding_count: usize,
    /// The parameters.
    pub params: *const u8,
    /// Bytes of the parameters.
    pub params_bytes: usize,
}

impl CpuTile {
    /// The same arguments for a function of C, valid as long as these are.
    #[inline]
    #[must_use]
    pub fn of(args: &CpuArgs<'_>) -> Self {
        Self {
            tile: args.tile,
            grid: args.grid,
            block: args.block,
            shared_bytes: args.shared_len,
            shared: args.shared,
            bindings: args.bindings.as_ptr(),
            binding_count: args.bindings.len(),
            params: args.params.as_ptr(),
            params_bytes: args.params.len(),
        }
    }
}

/// The arguments of one tile of a CPU kernel.
///
/// Only a backend makes them. A kernel reads its parameters with [`params`](Self::params), and its
/// memory with [`slice`](Self::slice) and [`slice_mut`](Self::slice_mut). These check bounds and
/// alignment and panic on a violation.
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

// SAFETY: the one raw pointer is the tile's scratch memory, which no method here dereferences. Its
// users dereference it in unsafe code.
unsafe impl Send for CpuArgs<'_> {}
// SAFETY: no method writes through a shared reference. The scratch pointer is only returned.
unsafe impl Sync for CpuArgs<'_> {}

impl<'a> CpuArgs<'a> {
    /// The arguments of tile `[0, 0, 0]` of a launch; [`set_tile`](Self::set_tile) selects other
    /// tiles.
    ///
    /// # Safety
    /// - Each binding lies in memory that is valid for its access as long as a kernel uses the
    ///   arguments.
    /// - `shared` points to `shared_len` bytes, aligned to 64, that no other code accesses
    ///   meanwhile; or `shared_len` is 0.
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

    /// Selects another tile.
    #[inline]
    pub fn set_tile(&mut self, tile: [u32; 3]) {
        self.tile = tile;
    }

    /// The index of the tile.
    #[inline]
    #[must_use]
    pub fn tile(&self) -> [u32; 3] {
        self.tile
    }

    /// The number of tiles in each direction.
    #[inline]
    #[must_use]
    pub fn grid(&self) -> [u32; 3] {
        self.grid
    }

    /// The block size of the dispatch; a hint on the CPU.
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
    /// If the sizes differ; sessions check the size before a launch.
    #[inline]
    #[must_use]
    pub fn params<T: FromParams>(&self) -> T {
        if self.params.len() != size_of::<T>() {
            wrong_params::<T>(self.params.len());
        }
        bytemuck::pod_read_unaligned(self.params)
    }

    /// Binding `i` as a slice for reading, rounded down to whole elements; empty for zero-sized
    /// elements.
    ///
    /// # Safety
    /// - The kernel declares that it reads binding `i`, and no tile writes the binding meanwhile.
    ///
    /// # Panics
    /// If binding `i` does not exist or is not aligned for `T`; the stream is poisoned then. A
    /// kernel that declares the alignment of its bindings never meets the second case.
    #[inline]
    #[must_use]
    pub unsafe fn slice<T: AnyBitPattern>(&self, i: usize) -> &'a [T] {
        let (at, len) = self.aligned::<T>(i);
        if len == 0 {
            return &[];
        }
        // SAFETY: the binding is valid for reads (`new`), no code writes it (this function's
        // contract), and any bytes are a `T`. `aligned` has checked the alignment and counted the
        // whole elements.
        unsafe { std::slice::from_raw_parts(at, len) }
    }

    /// Binding `i` as a raw pointer, and its number of whole elements. Several tiles share the
    /// binding; each writes its own part.
    #[inline]
    #[must_use]
    pub fn pointer<T>(&self, i: usize) -> (*mut T, usize) {
        let b = &self.bindings[i];
        (
            std::ptr::with_exposed_provenance_mut(b.addr as usize),
            (b.len as usize).checked_div(size_of::<T>()).unwrap_or(0),
        )
    }

    /// Elements `from..from + count` of binding `i`, for writing.
    ///
    /// # Safety
    /// - The kernel declares that it writes binding `i`, and only this tile accesses these
    ///   elements.
    ///
    /// # Panics
    /// If the range does not lie in the binding, or the binding is not aligned for `T`; the stream
    /// is poisoned then.
    #[inline]
    #[must_use]
    pub unsafe fn slice_mut<T: Pod>(&self, i: usize, from: usize, count: usize) -> &'a mut [T] {
        let (at, len) = self.aligned::<T>(i);
        if from > len || count > len - from {
            beyond(i, len, from, count);
        }
        if count == 0 {
            return &mut [];
        }
        // SAFETY: the binding is valid for writes (`new`), only this tile accesses the elements
        // (this function's contract), and any bytes are a `T`. Bounds and alignment were checked.
        unsafe { std::slice::from_raw_parts_mut(at.add(from), count) }
    }

    /// Like [`pointer`](Self::pointer), with a check of the alignment, for memory that becomes a
    /// reference.
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
fn beyond(i: usize, len: usize, from: usize, count: usize) -> ! {
    panic!("binding {i} has {len} elements, not {from}..{}", from.saturating_add(count))
}

#[cold]
#[inline(never)]
fn misaligned<T>(i: usize, addr: usize) -> ! {
    panic!(
        "binding {i} at {addr:#x} is not aligned to the {} bytes of {}",
        align_of::<T>(),
        type_name::<T>()
    )
}

#[cold]
#[inline(never)]
fn wrong_params<T>(len: usize) -> ! {
    panic!("{len} bytes of parameters are no {}, which has {}", type_name::<T>(), size_of::<T>())
}
