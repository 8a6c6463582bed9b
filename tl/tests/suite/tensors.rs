//! Tensors of these tests: a box of the number of elements, which the pool reads as the key.

use leasehold_memory::{Config, MemoryManager, OpaqueTensor, TensorInfo};

unsafe extern "C" fn destroy(tensor: *mut OpaqueTensor) {
    // SAFETY: `create` made the tensor.
    drop(unsafe { Box::from_raw(tensor.cast::<u64>()) });
}

unsafe extern "C" fn describe(tensor: *const OpaqueTensor, info: *mut TensorInfo) -> i32 {
    // SAFETY: `create` made the tensor, and the manager passes a struct to fill in.
    unsafe {
        let num_elements = *tensor.cast::<u64>();
        *info = TensorInfo { num_elements, dtype_id: 0, device_id: 0 };
    }
    1
}

/// A manager of such tensors.
pub fn manager(config: Config) -> MemoryManager {
    let m = MemoryManager::with_config(config);
    // SAFETY: all tensors of this manager come from `create`.
    unsafe {
        m.set_tensor_destructor(Some(destroy));
        m.set_tensor_describer(Some(describe));
    }
    m
}

/// A tensor, from the pool if it has one, registered in the current scope.
pub fn create(m: &MemoryManager, elements: usize) -> *mut OpaqueTensor {
    let new = || Box::into_raw(Box::new(elements as u64)).cast();
    let tensor = m.pool_acquire(elements, 0, 0).unwrap_or_else(new);
    // SAFETY: a tensor of this module, which no other code destroys.
    unsafe { m.register_tensor(tensor) };
    tensor
}
