//! The state of one allocator: what its lock guards, and what lies beside the lock.
//!
//! Every other module that knows an allocator imports this one; this one imports the parts only. It
//! must not know how blocks come and go.
//!
//! The lock guards the heap, the rows that are vacant, deferred and retired. It is never held
//! across a call of the backing, of a timeline, of a reclaimer or of a foreign destructor.

use crate::backing::{Backing, BackingCaps};
use crate::budget::Budget;
use crate::buffer::{Buffer, HostKind};
use crate::config::AllocatorConfig;
use crate::counters::Counters;
use crate::host;
use crate::lock::Lock;
use crate::ranges::Ranges;
use crate::store::Store;
use crate::table::{Table, Vacant};
use crate::thread_cache::ThreadCaches;
use crate::watch::Watch;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, AtomicU64};
use leasehold_core::sync::{Arc, CachePadded, Mutex, OnceLock};
use leasehold_core::{Error, Header, Owner, PackedTimepoint, Result, Timeline, TimelineSource};
use std::any::Any;
use std::ptr::NonNull;

/// An object that must outlast a buffer.
pub(crate) enum Keep {
    /// The owner of imported memory: it outlasts the last use, too.
    Import(#[expect(dead_code, reason = "held for its drop")] Box<dyn Any + Send + Sync>),
    /// The memory of an arena that a member lies in.
    Member(Box<dyn ArenaMemory>),
    /// The place of a growing block.
    Growing(u32),
}

/// The memory of an arena, for its members.
pub(crate) trait ArenaMemory: Send + Sync {
    /// The last lease of `member` was dropped: its uses are the memory's from now on.
    fn take_uses(&self, member: &Buffer);
}

/// The stream that asks.
#[derive(Clone, Copy)]
pub struct On<'a> {
    /// The stream's timeline. A hit touches nothing else.
    pub timeline: &'static Timeline,
    /// The stream itself, for the slow path: its signals and waits.
    pub source: &'a dyn TimelineSource,
}

impl<'a> On<'a> {
    /// The stream of a timeline.
    pub fn new(source: &'a dyn TimelineSource) -> Self {
        Self { timeline: source.timeline(), source }
    }
}

/// Something that can free memory when there is none: a pool above, a cache.
///
/// It is called without any lock of the allocator and may free, not allocate. It returns how many
/// bytes it freed, as far as it knows; zero ends its turn. One that panics is not called again.
pub type Reclaimer = Box<dyn Fn(u64) -> u64 + Send + Sync>;

/// The state that the lock guards.
pub(crate) struct Core {
    pub(crate) store: Store,
    /// The growing blocks.
    pub(crate) ranges: Ranges,
    pub(crate) vacant: Vacant,
    /// The keeper is gone; what comes back counts down `refs`.
    pub(crate) orphan: bool,
    /// The objects that buffers keep alive, by row.
    pub(crate) keeps: Vec<Option<Keep>>,
    /// Rows whose blocks several timelines may still be using.
    pub(crate) deferred: Deferred,
    /// Rows whose keeps wait for their last use to be over.
    pub(crate) retired: Deferred,
    pub(crate) imported: u64,
    pub(crate) imported_bytes: u64,
    pub(crate) allocations: u64,
    /// Remappings of granules so far.
    pub(crate) remaps: u64,
}

/// Deferred rows that one allocation looks at.
pub(crate) const DEFERRED_AT_ONCE: u32 = 4;

/// One allocator.
#[repr(C)]
pub(crate) struct Inner {
    /// First: a row's header points here.
    pub(crate) owner: Owner,
    pub(crate) refs: AtomicU64,
    pub(crate) table: Table,
    pub(crate) caches: ThreadCaches,
    pub(crate) core: CachePadded<Lock<Core>>,
    pub(crate) backing: Box<dyn Backing>,
    pub(crate) caps: BackingCaps,
    pub(crate) config: AllocatorConfig,
    pub(crate) budget: Budget,
    pub(crate) counters: Counters,
    pub(crate) reclaimers: Mutex<Vec<(i32, Arc<Reclaimer>)>>,
    pub(crate) retired: AtomicU32,
    /// A growing block was made: there may be idle memory in one.
    pub(crate) grows: AtomicBool,
    /// Debug aids and the trace ring, where there are any.
    pub(crate) watch: Option<Box<Watch>>,
    /// The flags of ordinary rows.
    pub(crate) row_flags: u32,
    /// The addresses that were reserved, where there are any.
    pub(crate) reservation: Option<(u64, u64)>,
    /// The largest alignment that there is.
    pub(crate) most_align: u64,
    /// The loss of the device that the backing reported. Calls that need the driver fail with it.
    pub(crate) lost: OnceLock<Error>,
    /// The next of the allocators that are gone but for memory in use.
    pub(crate) next_deferred: Option<Box<Inner>>,
}

/// A list of rows that are freed but still in use by a stream, through their headers.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Deferred {
    pub(crate) first: u32,
    pub(crate) last: u32,
}

/// No row.
pub(crate) const NONE: u32 = u32::MAX;

impl Deferred {
    pub(crate) const NONE: Deferred = Deferred { first: NONE, last: NONE };

    #[inline]
    pub(crate) fn any(self) -> bool {
        self.first != NONE
    }
}

impl Core {
    /// Keeps something alive until nobody holds the row and its last use is over. Returns what the
    /// row has kept so far, to be dropped without the lock. Wants [`room`](Self::room_to_keep) for
    /// it.
    pub(crate) fn keep(&mut self, row: u32, keep: Keep) -> Option<Keep> {
        self.keeps.get_mut(row as usize).and_then(|k| k.replace(keep))
    }

    /// Nobody holds the row, and its last use is over. Returns what it has kept, to be dropped
    /// without the lock.
    pub(crate) fn end_keep(&mut self, row: u32) -> Option<Keep> {
        let keep = self.keeps.get_mut(row as usize).and_then(Option::take);
        if let Some(Keep::Growing(at)) = keep {
            self.ranges.park(at);
        }
        keep
    }

    /// Makes room for what a row keeps.
    ///
    /// # Errors
    /// `OutOfMemory` for host memory.
    pub(crate) fn room_to_keep(&mut self, row: u32) -> Result<()> {
        let rows = row as usize + 1;
        if self.keeps.len() < rows {
            let more = rows - self.keeps.len();
            host::room(&mut self.keeps, more)?;
            self.keeps.resize_with(rows, || None);
        }
        Ok(())
    }
}

/// # Safety
/// - The header belongs to a row of an allocator that is alive.
#[inline]
pub(crate) unsafe fn inner_of(hdr: NonNull<Header>) -> NonNull<Inner> {
    // SAFETY: rows are made with a pointer to the whole of `Inner`, whose first field is the owner.
    unsafe { NonNull::new_unchecked((*hdr.as_ptr()).owner().cast_mut().cast::<Inner>()) }
}

pub(crate) fn kind_bits(kind: HostKind) -> u32 {
    match kind {
        HostKind::None => 0,
        HostKind::Pinned => 1,
        HostKind::Pageable => 2,
    }
}

/// Every use of a buffer that may still go on.
pub(crate) fn uses(buffer: &Buffer) -> Vec<PackedTimepoint> {
    let mut timepoints = Vec::new();
    buffer.for_each_use(|s| {
        if !s.has_passed() {
            timepoints.push(s);
        }
    });
    timepoints
}
