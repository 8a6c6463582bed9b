//! The permits of a queue: one for each uncompleted command buffer.
//!
//! This module must not know command buffers.

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use std::fmt;

/// A number of permits.
pub(crate) struct Permits {
    most: u32,
    used: Arc<AtomicU32>,
}

/// The permit for one command buffer. The drop gives it back.
pub(crate) struct Permit(Arc<AtomicU32>);

impl Permits {
    pub(crate) fn new(most: u32) -> Self {
        Self { most, used: Arc::new(AtomicU32::new(0)) }
    }

    /// Takes a permit, if one is free.
    pub(crate) fn take(&self) -> Option<Permit> {
        let next = |used: u32| (used < self.most).then_some(used + 1);
        let taken = self.used.fetch_update(Ordering::AcqRel, Ordering::Acquire, next);
        taken.is_ok().then(|| Permit(self.used.clone()))
    }

    /// Whether no permit is free.
    pub(crate) fn is_full(&self) -> bool {
        self.used.load(Ordering::Acquire) >= self.most
    }
}

impl Drop for Permit {
    fn drop(&mut self) {
        self.0.fetch_sub(1, Ordering::AcqRel);
    }
}

impl fmt::Debug for Permits {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} of {}", self.used.load(Ordering::Relaxed), self.most)
    }
}
