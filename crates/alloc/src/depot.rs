//! The depot: small blocks that full thread caches give away by the list, for the next request of
//! their timeline on any thread.
//!
//! This is the depot of Bonwick's magazines, and TCMalloc's transfer cache. A list goes in or out
//! in one step, which looks at none of its blocks. So threads that free what others allocate meet
//! at the heap's lock a few times in a hundred operations. Here a *bin* belongs to one timeline at
//! a time, so threads with streams of their own do not meet here either. Another timeline gets a
//! bin that is empty, or that its timeline has not used for a while. Rows in the depot count as
//! kept in thread caches.
//!
//! # Protocol
//! A bin's lock is a leaf. Lists come and go only inside a shard, where no thread may wait: a
//! thread that finds a bin locked does without it. So a flush, which holds all shards, finds all
//! lists here ([`ThreadCaches::flush`](crate::thread_cache::ThreadCaches::flush)).
//!
//! A list is its rows, linked through their headers. The length of a buffer means nothing while
//! nobody holds it. That of a list's first row is the next list of the class, and how many rows
//! this one has.

use crate::buffer::Row;
use crate::layout::{CLASSES, class_size};
use crate::table::{List, link};
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{PackedTimepoint, TimelineId};
use std::ptr;

/// The addend for one row in the word that counts rows and bytes.
const ROW: u64 = 1 << 44;

/// The most rows of a list: they are counted in the bits of an address that alignment leaves.
pub(crate) const MOST_ROWS: u16 = align_of::<Row>() as u16 - 1;

/// Lists of other timelines in a row for which a bin is given up.
const MOST_REFUSED: u32 = 8;

/// Lists of rows for each of some timelines.
pub(crate) struct Depot {
    bins: Box<[Bin]>,
    /// Bytes that a bin keeps at most.
    most: u64,
}

// Aligned to pages: processors fetch lines of a page in advance.
#[repr(align(4096))]
struct Bin {
    /// Rows and bytes in one word ([`ROW`]). Written under the lock.
    kept: AtomicU64,
    lists: Mutex<Lists>,
}

struct Lists {
    timeline: TimelineId,
    /// Lists of other timelines that were refused since this timeline was here.
    refused: u32,
    /// The first row of the top list of each class.
    tops: [*const Row; CLASSES],
}

// SAFETY: rows are `Sync` and outlive the depot.
unsafe impl Send for Lists {}

impl Depot {
    /// A depot of so many bins (a power of two), each of which keeps at most `most` bytes.
    pub(crate) fn new(bins: usize, most: u64) -> Self {
        let lists = || Lists {
            timeline: PackedTimepoint::NEVER.timeline_id(),
            refused: 0,
            tops: [ptr::null(); CLASSES],
        };
        let bin = |_| Bin { kept: AtomicU64::new(0), lists: Mutex::new(lists()) };
        Self { bins: (0..bins).map(bin).collect(), most }
    }

    #[inline]
    fn bin(&self, timeline: TimelineId) -> Option<&Bin> {
        self.bins.get(usize::from(timeline.get()) & self.bins.len().wrapping_sub(1))
    }

    /// Whether there may be blocks of a timeline. A plain load.
    #[inline]
    pub(crate) fn may_have(&self, timeline: TimelineId) -> bool {
        self.bin(timeline).is_some_and(|b| b.kept.load(Ordering::Relaxed) != 0)
    }

    /// Whether there is anything.
    pub(crate) fn any(&self) -> bool {
        self.bins.iter().any(|b| b.kept.load(Ordering::Relaxed) != 0)
    }

    /// Rows and bytes.
    pub(crate) fn kept(&self) -> (u64, u64) {
        self.bins
            .iter()
            .map(|b| b.kept.load(Ordering::Relaxed))
            .fold((0, 0), |(r, b), k| (r + k / ROW, b + k % ROW))
    }

    /// Keeps a list of rows of a class, freed on `timeline`: its first row, which is linked to the
    /// next, and how many there are. `false`:
    /// there is no room, or somebody is at it. Rows that another timeline has left in the bin may
    /// go into `left`. Inside a shard only.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive.
    pub(crate) unsafe fn push(
        &self,
        timeline: TimelineId,
        class: usize,
        (first, rows): (&Row, u16),
        left: &mut List,
    ) -> bool {
        debug_assert!(rows <= MOST_ROWS);
        let Some(bin) = self.bin(timeline) else { return false };
        let Some(mut lists) = bin.lists.try_lock() else { return false };
        let mut kept = bin.kept.load(Ordering::Relaxed);
        if lists.timeline != timeline {
            lists.refused += 1;
            if kept != 0 && lists.refused < MOST_REFUSED {
                return false;
            }
            // SAFETY: the caller keeps the table of all rows in the bin alive.
            unsafe { lists.drain(left) };
            (lists.timeline, kept) = (timeline, 0);
            bin.kept.store(0, Ordering::Relaxed);
        }
        lists.refused = 0;
        let add = u64::from(rows) * (ROW + class_size(class));
        if (kept + add) % ROW > self.most {
            return false;
        }
        let under = std::mem::replace(&mut lists.tops[class], first);
        first.buffer.set_len((under.expose_provenance() | usize::from(rows)) as u64);
        bin.kept.store(kept + add, Ordering::Relaxed);
        true
    }

    /// A list of a class that was freed on `timeline`: its first row, and how many there are.
    /// Inside a shard only.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive for `'a`.
    pub(crate) unsafe fn pop<'a>(
        &self,
        timeline: TimelineId,
        class: usize,
    ) -> Option<(&'a Row, u16)> {
        let bin = self.bin(timeline)?;
        let mut lists = bin.lists.try_lock()?;
        if lists.timeline != timeline {
            return None;
        }
        lists.refused = 0;
        // SAFETY: the caller keeps the table of all rows in the bin alive for `'a`.
        let (first, rows) = unsafe { lists.take_top(class) }?;
        let kept = bin.kept.load(Ordering::Relaxed);
        bin.kept.store(kept - u64::from(rows) * (ROW + class_size(class)), Ordering::Relaxed);
        Some((first, rows))
    }

    /// Moves everything into the list.
    ///
    /// # Safety
    /// - The table whose rows were put here is alive.
    pub(crate) unsafe fn drain(&self, list: &mut List) {
        for bin in self.bins.iter().filter(|b| b.kept.load(Ordering::Relaxed) != 0) {
            // SAFETY: the caller keeps the table of all rows in the depot alive.
            unsafe { bin.lists.lock().drain(list) };
            bin.kept.store(0, Ordering::Relaxed);
        }
    }
}

impl Lists {
    /// # Safety
    /// - The table whose rows these are is alive for `'a`.
    unsafe fn take_top<'a>(&mut self, class: usize) -> Option<(&'a Row, u16)> {
        // SAFETY: a top is null or a row that was pushed, whose table the caller keeps alive for
        // `'a`.
        let first = unsafe { self.tops[class].as_ref() }?;
        let word = first.buffer.len() as usize;
        let rows = word & usize::from(MOST_ROWS);
        self.tops[class] = ptr::with_exposed_provenance(word & !usize::from(MOST_ROWS));
        Some((first, rows as u16))
    }

    /// Moves all rows into the list.
    ///
    /// # Safety
    /// - The table whose rows these are is alive.
    #[cold]
    unsafe fn drain(&mut self, list: &mut List) {
        for class in 0..CLASSES {
            // SAFETY: the caller keeps the table of these rows alive.
            while let Some((first, rows)) = unsafe { self.take_top(class) } {
                let mut at = ptr::from_ref(first);
                for _ in 0..rows {
                    // SAFETY: the links of a list name rows of the same table, which the caller
                    // keeps alive.
                    let Some(row) = (unsafe { at.as_ref() }) else { break };
                    at = link(row);
                    list.push(row);
                }
            }
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/depot.rs"]
mod tests;
