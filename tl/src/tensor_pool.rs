//! A tensor pool with a destructor, for Rust programs: it destroys what leaves it for ever.
//!
//! This module must not know how the pool chooses.

#[cfg(not(loom))]
use crate::global;
use crate::pool::{OpaqueTensor, Pool, PoolLimits, PoolOutcome, TensorDestructor, TensorKey};

/// Dead tensors kept for reuse. For a worked example see [`TensorPool::release`].
#[derive(Debug)]
pub struct TensorPool {
    pool: Pool,
    /// `None`: the process's tensor destructor at the time of a destruction.
    destructor: Option<TensorDestructor>,
}

impl Default for TensorPool {
    fn default() -> Self {
        Self::new()
    }
}

impl TensorPool {
    /// An empty pool with the default limits. The tensor destructor of the process
    /// (`tl_mem_set_tensor_destructor`) destroys its tensors. Without one at that time they are
    /// lost, and a misuse is counted.
    pub fn new() -> Self {
        Self { pool: Pool::new(PoolLimits::default()), destructor: None }
    }

    /// An empty pool whose tensors `destructor` destroys.
    pub fn with_destructor(limits: PoolLimits, destructor: TensorDestructor) -> Self {
        Self { pool: Pool::new(limits), destructor: Some(destructor) }
    }

    /// Removes and returns the tensor of this key that was released last. `None` if the pool has
    /// none.
    pub fn acquire(
        &mut self,
        num_elements: usize,
        dtype_id: u8,
        device_id: u8,
    ) -> Option<*mut OpaqueTensor> {
        self.pool.acquire_key(TensorKey::from_ids(num_elements as u64, dtype_id, device_id)?)
    }

    /// Gives `ptr` to the pool. If this exceeds the limits, tensors of the least recently used keys
    /// are destroyed.
    ///
    /// ```
    /// use leasehold_memory::{OpaqueTensor, PoolLimits, PoolOutcome, TensorPool};
    /// unsafe extern "C" fn destroy(tensor: *mut OpaqueTensor) {
    ///     // SAFETY: every tensor of this example comes from `Box::into_raw`.
    ///     drop(unsafe { Box::from_raw(tensor.cast::<[f32; 4]>()) });
    /// }
    /// let mut pool = TensorPool::with_destructor(PoolLimits::default(), destroy);
    /// let tensor: *mut OpaqueTensor = Box::into_raw(Box::new([0f32; 4])).cast();
    /// // SAFETY: the tensor is ours and `destroy` may destroy it.
    /// unsafe {
    ///     assert_eq!(pool.release(tensor, 4, 0, 0), PoolOutcome::Pooled);
    ///     assert_eq!(pool.release(tensor, 4, 3, 0), PoolOutcome::Duplicate);
    /// }
    /// assert_eq!(pool.total_count(), 1);
    /// assert_eq!(pool.acquire(4, 0, 0), Some(tensor));
    /// assert_eq!(pool.acquire(4, 0, 0), None);
    /// # unsafe { destroy(tensor) };
    /// ```
    ///
    /// # Safety
    /// - The caller owns `ptr`, and gives it up if the outcome is [`PoolOutcome::Pooled`].
    /// - The pool's destructor may be called with it, on any thread that holds the pool.
    /// - It has the stated number of elements, dtype and device.
    pub unsafe fn release(
        &mut self,
        ptr: *mut OpaqueTensor,
        num_elements: usize,
        dtype_id: u8,
        device_id: u8,
    ) -> PoolOutcome {
        let Some(key) = TensorKey::from_ids(num_elements as u64, dtype_id, device_id) else {
            return PoolOutcome::Full;
        };
        let outcome = self.pool.release_key(ptr, key);
        while let Some((tensor, _)) = self.pool.excess() {
            self.destroy(tensor);
        }
        outcome
    }

    /// Destroys tensors, of the least recently used keys first, until at most `bytes` remain.
    /// Returns the freed bytes.
    pub fn trim(&mut self, bytes: u64) -> u64 {
        let before = self.pool.total_bytes();
        while let Some((tensor, _)) = self.pool.shrink(bytes) {
            self.destroy(tensor);
        }
        before - self.pool.total_bytes()
    }

    /// Destroys every tensor.
    pub fn clear(&mut self) {
        self.trim(0);
    }

    /// Number of tensors.
    pub fn total_count(&self) -> usize {
        self.pool.total_count()
    }

    /// Bytes of all tensors' elements.
    pub fn total_bytes(&self) -> u64 {
        self.pool.total_bytes()
    }

    /// Number of keys that the pool remembers, with or without a tensor.
    pub fn key_count(&self) -> usize {
        self.pool.key_count()
    }

    /// The limits in force.
    pub fn limits(&self) -> PoolLimits {
        self.pool.limits()
    }

    /// Sets new limits; they take effect with the next release or trim.
    pub fn set_limits(&mut self, limits: PoolLimits) {
        self.pool.set_limits(limits);
    }

    fn destroy(&self, tensor: *mut OpaqueTensor) {
        match self.destructor {
            // SAFETY: the releaser gave the tensor up and allowed its destruction by this
            // destructor.
            Some(destructor) => unsafe { destructor(tensor) },
            // SAFETY: the releaser gave the tensor up and allowed its destruction by the process's
            // destructor.
            #[cfg(not(loom))]
            None => unsafe { global::destroy_tensor(tensor) },
            #[cfg(loom)]
            None => {}
        }
    }
}

impl Drop for TensorPool {
    fn drop(&mut self) {
        self.clear();
    }
}
