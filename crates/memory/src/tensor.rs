//! The crate's own tensor type: elements in host memory with a shape.
//!
//! The type serves tests, examples and the pool's own checks. The manager treats it like any other
//! tensor, but knows its key and destructor without a hook. Tensors over device buffers and their
//! exchange by DLPack are planned as further kinds. The entry's flag in the object table
//! distinguishes the kinds, never the tensor's bytes.

use std::alloc::{self, Layout};
use std::ffi::c_void;

use crate::local::Local;
use crate::misuse::Misuse;
use crate::pool::{DeviceTypeId, ElementTypeId, OpaqueTensor, TensorKey};
use crate::record::About;
use crate::table::{EntryState, HOST, Kind};

/// The maximum number of dimensions.
pub(crate) const MAX_DIMS: usize = 8;
/// The alignment of the elements: a cache line.
const ALIGN: usize = 64;

#[repr(C, align(64))]
struct HostTensor {
    key: TensorKey,
    dims: usize,
    shape: [i64; MAX_DIMS],
}

/// Header and elements are one block.
fn layout(key: TensorKey) -> Option<Layout> {
    let bytes = usize::try_from(key.bytes()).ok()?.checked_add(size_of::<HostTensor>())?;
    Layout::from_size_align(bytes, ALIGN).ok()
}

const _: () =
    assert!(align_of::<HostTensor>() == ALIGN && size_of::<HostTensor>().is_multiple_of(ALIGN));

/// The key of a tensor of this crate.
///
/// # Safety
/// - [`Local::create_tensor`] made `tensor`, which is not destroyed.
pub(crate) unsafe fn key(tensor: *mut OpaqueTensor) -> TensorKey {
    // SAFETY: by the caller's promise the tensor starts with this header.
    unsafe { (*tensor.cast::<HostTensor>()).key }
}

/// Destroys a tensor of this crate.
///
/// # Safety
/// - [`Local::create_tensor`] made `tensor`, which is not destroyed yet. No other code uses it any
///   more.
pub(crate) unsafe extern "C" fn destroy(tensor: *mut OpaqueTensor) {
    // SAFETY: by the caller's promise the tensor exists and starts with its header.
    if let Some(layout) = layout(unsafe { key(tensor) }) {
        // SAFETY: the block was allocated by `create_tensor` with this layout.
        unsafe { alloc::dealloc(tensor.cast(), layout) };
    }
}

impl Local {
    /// A tensor in host memory, from the pool if possible, registered in the current scope. Its
    /// elements are unspecified. `None`, and a counted misuse, for an impossible shape or id.
    pub(crate) fn create_tensor(&self, shape: &[i64], dtype_id: u8) -> Option<*mut OpaqueTensor> {
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
        // The library must know the size of its own tensors.
        let key = elements.and_then(|n| {
            TensorKey::from_ids(n, ElementTypeId::from_id(dtype_id)? as u8, DeviceTypeId::Cpu as u8)
        });
        let Some((key, layout)) =
            key.and_then(|k| Some((k, layout(k)?))).filter(|_| shape.len() <= MAX_DIMS)
        else {
            self.misuse(Misuse::TensorKey, 0, i64::from(dtype_id));
            return None;
        };
        let key = TensorKey { host: true, ..key };
        let tensor = self.shared.pool_acquire(key, self.me).unwrap_or_else(|| {
            if layout.size() as u64 > MAX_ALLOCATION {
                return std::ptr::null_mut();
            }
            // SAFETY: the layout has a size: the header's at least.
            unsafe { alloc::alloc(layout) }.cast()
        });
        if tensor.is_null() {
            self.misuse(Misuse::OutOfMemory, 0, layout.size() as i64);
            return None;
        }
        let mut dims = [0; MAX_DIMS];
        dims[..shape.len()].copy_from_slice(shape);
        // SAFETY: the block belongs to this call and starts with room for the header.
        unsafe {
            tensor.cast::<HostTensor>().write(HostTensor { key, dims: shape.len(), shape: dims })
        };
        let about = About { size: key.bytes(), flags: HOST, ..About::kind(Kind::Tensor) };
        self.register(tensor.expose_provenance(), about);
        Some(tensor)
    }

    /// Reads the header of a live tensor of this crate. `None`, and a counted misuse, for any other
    /// address.
    fn host_tensor<R>(
        &self,
        tensor: *const OpaqueTensor,
        read: impl FnOnce(&HostTensor) -> R,
    ) -> Option<R> {
        if !tensor.is_null() {
            let mut shard = self.shared.table.lock(tensor.addr(), self.me);
            if shard
                .find(tensor.addr())
                .is_some_and(|e| e.flags & HOST != 0 && e.state == EntryState::Live)
            {
                // SAFETY: by its entry this is a tensor of this crate, and it cannot die while its
                // shard is locked.
                return Some(read(unsafe { &*tensor.cast::<HostTensor>() }));
            }
        }
        self.misuse(Misuse::NotATensor, tensor.addr(), 0);
        None
    }

    /// Number of dimensions.
    pub(crate) fn tensor_dims(&self, tensor: *const OpaqueTensor) -> Option<usize> {
        self.host_tensor(tensor, |t| t.dims)
    }

    /// The extent of one dimension; `None` beyond the last.
    pub(crate) fn tensor_extent(&self, tensor: *const OpaqueTensor, dim: usize) -> Option<i64> {
        self.host_tensor(tensor, |t| t.shape[..t.dims].get(dim).copied())?
    }

    /// The element type.
    pub(crate) fn tensor_dtype(&self, tensor: *const OpaqueTensor) -> Option<ElementTypeId> {
        self.host_tensor(tensor, |t| ElementTypeId::from_id(t.key.dtype))?
    }

    /// Number of elements.
    pub(crate) fn tensor_elements(&self, tensor: *const OpaqueTensor) -> Option<u64> {
        self.host_tensor(tensor, |t| t.key.num_elements)
    }

    /// The elements.
    pub(crate) fn tensor_data(&self, tensor: *mut OpaqueTensor) -> Option<*mut c_void> {
        self.host_tensor(tensor, |_| ())?;
        Some(tensor.wrapping_byte_add(size_of::<HostTensor>()).cast())
    }
}

/// Larger tensors are refused without a call of the allocator.
const MAX_ALLOCATION: u64 = 1 << 40;
