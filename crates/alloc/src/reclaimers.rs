//! Reclaimers: what callers registered to free memory when there is none.

use leasehold_core::Result;
use leasehold_core::sync::{Arc, Mutex};
use std::panic::AssertUnwindSafe;

/// Something that can free memory when there is none: a pool above, a cache.
///
/// It is called without any lock of the allocator and may free, not allocate. It returns how many
/// bytes it freed, as far as it knows; zero ends its turn. One that panics is not called again.
pub type Reclaimer = Box<dyn Fn(u64) -> u64 + Send + Sync>;

/// Calls of one reclaimer for one request.
const MOST_CALLS: u32 = 64;

/// The reclaimers of one allocator, in the order of their priorities.
#[derive(Default)]
pub(crate) struct Reclaimers(Mutex<Vec<(i32, Arc<Reclaimer>)>>);

impl Reclaimers {
    pub(crate) fn add(&self, priority: i32, reclaimer: Reclaimer) {
        let mut list = self.0.lock();
        list.push((priority, Arc::new(reclaimer)));
        list.sort_by_key(|r| r.0);
    }

    /// Calls the reclaimers in their order for `bytes`, and `retry` after each call, until that
    /// gives something. `retry` is told whether the reclaimer panicked.
    ///
    /// # Errors
    /// Those of `retry`.
    pub(crate) fn each<T>(
        &self,
        bytes: u64,
        mut retry: impl FnMut(bool) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let mut next = 0;
        loop {
            let Some(reclaimer) = self.0.lock().get(next).map(|r| r.1.clone()) else {
                return Ok(None);
            };
            next += 1;
            for _ in 0..MOST_CALLS {
                let freed = std::panic::catch_unwind(AssertUnwindSafe(|| reclaimer(bytes))).ok();
                if freed.is_none() {
                    self.0.lock().retain(|r| !Arc::ptr_eq(&r.1, &reclaimer));
                    next -= 1;
                }
                if let Some(found) = retry(freed.is_none())? {
                    return Ok(Some(found));
                }
                if freed.unwrap_or(0) == 0 {
                    break;
                }
            }
        }
    }
}
