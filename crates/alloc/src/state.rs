//! One allocator: what its lock guards, and what lies beside the lock.
//!
//! Every module that knows a whole allocator imports this one; this one imports the parts only.

use crate::checks::DebugChecks;
use crate::config::AllocatorConfig;
use crate::core::Core;
use crate::live::Live;
use crate::lock::Lock;
use crate::reclaimers::Reclaimers;
use crate::supply::{Counter, Supply};
use crate::table::Table;
use crate::thread_cache::ThreadCaches;
use leasehold_core::sync::CachePadded;
use leasehold_core::sync::atomic::{AtomicU32, AtomicU64};
use leasehold_core::{Header, Owner};
use std::ptr::NonNull;

/// One allocator.
#[repr(C)]
pub(crate) struct Inner {
    /// First: a row's header points here.
    pub(crate) owner: Owner,
    pub(crate) refs: AtomicU64,
    pub(crate) table: Table,
    pub(crate) caches: ThreadCaches,
    pub(crate) core: CachePadded<Lock<Core>>,
    pub(crate) supply: Supply,
    pub(crate) config: AllocatorConfig,
    pub(crate) live: Live,
    pub(crate) in_graphs: AtomicU64,
    pub(crate) in_executables: Counter,
    pub(crate) reclaimers: Reclaimers,
    pub(crate) retired: AtomicU32,
    /// The debug checks, and what is done for the trace of each block.
    pub(crate) checks: DebugChecks,
    /// The addresses that were reserved, where there are any.
    pub(crate) reservation: Option<(u64, u64)>,
    /// The largest alignment that there is.
    pub(crate) most_align: u64,
    /// The next of the allocators that are gone but for memory in use.
    pub(crate) next_deferred: Option<Box<Inner>>,
}

/// # Safety
/// - The header belongs to a row of an allocator that is alive.
#[inline]
pub(crate) unsafe fn inner_of(hdr: NonNull<Header>) -> NonNull<Inner> {
    // SAFETY: rows are made with a pointer to the whole of `Inner`, whose first field is the owner.
    unsafe { NonNull::new_unchecked((*hdr.as_ptr()).owner().cast_mut().cast::<Inner>()) }
}
