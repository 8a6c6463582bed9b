//! The crate's own tensor type: elements in host memory with a shape.
//!
//! The type serves tests, examples and the pool's own checks. The manager treats it like any other
//! tensor, but knows its key and destructor without a hook. Tensors over device buffers and their
//! exchange by DLPack are planned as further kinds. The entry's flag in the object table
//! distinguishes the kinds, never the tensor's bytes.
//!
//! This module must not know who has a tensor.

use std::alloc::{self, Layout};
use std::ffi::c_void;

use crate::pool::{OpaqueTensor, TensorKey};

/// The maximum number of dimensions.
pub(crate) const MAX_DIMS: usize = 8;
/// The alignment of the elements: a cache line.
const ALIGN: usize = 64;

/// The header of a tensor of this crate.
#[repr(C, align(64))]
pub(crate) struct HostTensor {
    pub(crate) key: TensorKey,
    pub(crate) dims: usize,
    pub(crate) shape: [i64; MAX_DIMS],
}

/// The layout of the block: header and elements. `None` for a size beyond the address space.
pub(crate) fn layout(key: TensorKey) -> Option<Layout> {
    let bytes = usize::try_from(key.bytes()).ok()?.checked_add(size_of::<HostTensor>())?;
    Layout::from_size_align(bytes, ALIGN).ok()
}

const _: () =
    assert!(align_of::<HostTensor>() == ALIGN && size_of::<HostTensor>().is_multiple_of(ALIGN));

/// The key of a tensor of this crate.
///
/// # Safety
/// - [`allocate`] and [`write_header`] made `tensor`, which is not destroyed.
pub(crate) unsafe fn key(tensor: *mut OpaqueTensor) -> TensorKey {
    // SAFETY: by the caller's promise the tensor starts with this header.
    unsafe { (*tensor.cast::<HostTensor>()).key }
}

/// Destroys a tensor of this crate.
///
/// # Safety
/// - [`allocate`] and [`write_header`] made `tensor`, which is not destroyed yet.
/// - No other code uses it any more.
pub(crate) unsafe extern "C" fn destroy(tensor: *mut OpaqueTensor) {
    // SAFETY: by the caller's promise the tensor exists and starts with its header.
    if let Some(layout) = layout(unsafe { key(tensor) }) {
        // SAFETY: `allocate` made the block with this layout.
        unsafe { alloc::dealloc(tensor.cast(), layout) };
    }
}

/// Larger tensors are refused without a call of the allocator.
const MAX_ALLOCATION: u64 = 1 << 40;

/// A block for a tensor; null without memory.
pub(crate) fn allocate(layout: Layout) -> *mut OpaqueTensor {
    if layout.size() as u64 > MAX_ALLOCATION || layout.size() == 0 {
        return std::ptr::null_mut();
    }
    // SAFETY: the layout has a size.
    unsafe { alloc::alloc(layout) }.cast()
}

/// Writes the header of a tensor, at most [`MAX_DIMS`] dimensions of it.
///
/// # Safety
/// - [`allocate`] made the block with a [`layout`], and no other code uses it.
pub(crate) unsafe fn write_header(tensor: *mut OpaqueTensor, key: TensorKey, dims: &[i64]) {
    let mut shape = [0; MAX_DIMS];
    let count = dims.len().min(MAX_DIMS);
    shape[..count].copy_from_slice(&dims[..count]);
    // SAFETY: by the caller's promise the block starts with room for the header.
    unsafe { tensor.cast::<HostTensor>().write(HostTensor { key, dims: count, shape }) };
}

/// The elements of a tensor of this crate.
pub(crate) fn data(tensor: *mut OpaqueTensor) -> *mut c_void {
    tensor.wrapping_byte_add(size_of::<HostTensor>()).cast()
}
