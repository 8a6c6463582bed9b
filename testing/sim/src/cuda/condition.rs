//! Conditions of graphs: words of the driver's, and the kernel that sets them.
//!
//! The kernel is the one of the CUDA backend, by its name: the loader runs no PTX.
//!
//! # Locks
//! A launch of the kernel runs under the machine's lock and takes the lock of the words, which is a
//! leaf.
//!
//! This module must not know graphs.

use crate::{KernelBody, KernelSpec};
use leasehold_core::Error;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_cuda::driver::condition::SET_CONDITION;
use leasehold_hal::Access;
use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

/// The words of a driver's conditions, by handle, as long as a graph or an executable has them.
#[derive(Debug, Clone, Default)]
pub(super) struct Conditions(Arc<Mutex<BTreeMap<u64, Weak<AtomicU32>>>>);

impl Conditions {
    /// Makes the word of a new condition.
    pub(super) fn create(&self, handle: u64) -> Arc<AtomicU32> {
        let word = Arc::new(AtomicU32::new(0));
        let mut words = self.0.lock();
        words.retain(|_, word| word.strong_count() > 0);
        words.insert(handle, Arc::downgrade(&word));
        word
    }

    /// The kernel of this name, if it is the one that sets conditions.
    pub(super) fn kernel(&self, name: &str) -> Option<KernelSpec> {
        let words = self.clone();
        let set = KernelBody::run(move |launch| {
            let word = words.0.lock().get(&launch.params::<u64>()?).and_then(Weak::upgrade);
            let word = word.ok_or_else(|| Error::state("a condition that is no graph's"))?;
            let (flag, _) = launch.pointer::<u32>(0);
            // SAFETY: the binding is four bytes, which the machine translated for this call.
            word.store(unsafe { flag.read_unaligned() }, Ordering::Release);
            Ok(())
        });
        (name == SET_CONDITION)
            .then(|| KernelSpec::new(&[Access::Read], size_of::<u64>() as u32, set))
    }
}
