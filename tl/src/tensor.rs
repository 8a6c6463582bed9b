//! Tensors of this crate in the current scope: creation, and reads by address.
//!
//! This module must not know what the block of a tensor holds beside its header.

use std::ffi::c_void;

use crate::host_tensor::{self, HostTensor, MAX_DIMS};
use crate::local::Local;
use crate::misuse::Misuse;
use crate::pool::{DeviceTypeId, ElementTypeId, OpaqueTensor, TensorKey};
use crate::record::About;
use crate::table::{EntryState, HOST, Kind};

impl Local {
    /// A tensor in host memory, from the pool if possible, registered in the current scope. Its
    /// elements are unspecified. `None`, and a counted misuse, for an impossible shape or id.
    pub(crate) fn create_tensor(&self, shape: &[i64], dtype_id: u8) -> Option<*mut OpaqueTensor> {
        let elements = shape.iter().try_fold(1u64, |n, &d| n.checked_mul(u64::try_from(d).ok()?));
        // The library must know the size of its own tensors.
        let key = elements.and_then(|n| {
            TensorKey::from_ids(n, ElementTypeId::from_id(dtype_id)? as u8, DeviceTypeId::Cpu as u8)
        });
        let Some((key, layout)) = key
            .and_then(|k| Some((k, host_tensor::layout(k)?)))
            .filter(|_| shape.len() <= MAX_DIMS)
        else {
            self.misuse(Misuse::TensorKey, 0, i64::from(dtype_id));
            return None;
        };
        let key = TensorKey { host: true, ..key };
        let tensor =
            self.shared.pool_acquire(key, self.me).unwrap_or_else(|| host_tensor::allocate(layout));
        if tensor.is_null() {
            self.misuse(Misuse::OutOfMemory, 0, layout.size() as i64);
            return None;
        }
        // SAFETY: the block belongs to this call.
        unsafe { host_tensor::write_header(tensor, key, shape) };
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
            let mut shard = self.shared.table.lock(tensor.addr());
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
        Some(host_tensor::data(tensor))
    }
}
