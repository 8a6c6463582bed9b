//! The report of an allocation that failed: where the memory is, who holds it, what was tried and
//! what to do.

use crate::buffer::{IMPORTED, REGION};
use crate::config::CrossStream;
use crate::host;
use crate::layout::{Layout, SIZE_LIMIT, UNIT_SHIFT};
use crate::state::Inner;
use crate::store::Need;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Name, OutOfMemory, Result, ShownTag, Text, TimelineId};
use std::cmp::Reverse;
use std::collections::HashMap;
use std::fmt;

/// Release tags that a report names.
const MOST_TAGS: usize = 5;
/// Streams that it names.
const MOST_STREAMS: usize = 4;

/// The attempts that were made, for the report.
#[derive(Default)]
pub(crate) struct AttemptLog {
    notes: Vec<Text>,
    pub(crate) refused: bool,
}

impl AttemptLog {
    /// Notes what the driver said last.
    ///
    /// # Errors
    /// `DeviceLost`, if it said that.
    pub(crate) fn driver(&mut self, said: Error) -> Result<()> {
        const DRIVER: &str = "the driver: ";
        self.notes.retain(|note| !note.starts_with(DRIVER));
        self.note(format_args!("{DRIVER}{said}"));
        if matches!(said, Error::DeviceLost { .. }) { Err(said) } else { Ok(()) }
    }

    pub(crate) fn note(&mut self, what: fmt::Arguments<'_>) {
        if self.notes.len() < 16
            && let Some(text) = host::text(what)
            && !self.notes.contains(&text)
        {
            host::push(&mut self.notes, text);
        }
    }
}

impl Inner {
    /// Where errors say that memory lacks.
    fn site(&self) -> Text {
        host::text(format_args!("{}", self.config.name)).unwrap_or(Text::Borrowed("an allocator"))
    }

    /// An allocation that can never succeed.
    #[cold]
    pub(crate) fn refuse(&self, layout: Layout) -> Error {
        self.supply.failed.add(1);
        if layout.size <= SIZE_LIMIT && Need::of(layout.size, 1).is_some() {
            let what = host::text(format_args!(
                "an alignment of {} in {}",
                layout.align, self.config.name
            ));
            return Error::Unsupported(
                what.unwrap_or(Text::Borrowed("an alignment as large as this")),
            );
        }
        let mut report = OutOfMemory::new(self.site(), layout.size);
        host::push(&mut report.notes, "larger than any device's memory: ask for less".into());
        report.into()
    }

    /// Why `layout` was not allocated.
    #[cold]
    pub(crate) fn report(&self, layout: Layout, log: AttemptLog) -> Error {
        let supply = &self.supply;
        let mut report = OutOfMemory::new(self.site(), layout.size);
        let mut places: Vec<(Text, u64)> = Vec::new();
        // A place is left out if there is no host memory for its text or entry.
        let mut place = |what: fmt::Arguments<'_>, bytes: u64| {
            if bytes > 0
                && let Some(text) = host::text(what)
            {
                host::push(&mut places, (text, bytes));
            }
        };
        {
            let core = self.core.lock();
            let (ready, pending) = core.free_bytes(&self.table);
            report.free_ready = ready;
            report.free_not_ready = pending;
            report.largest_free = u64::from(core.store.heap.largest_free()) << UNIT_SHIFT;
            place(format_args!("free slots of slabs"), core.store.slabs.bytes().1);
            place(
                format_args!("mapped in growing blocks beyond their ends"),
                core.ranges.idle_bytes(),
            );
            place(format_args!("in hand, mapped nowhere"), core.store.heap.res.cached_bytes());
            place(
                format_args!("lost to the driver"),
                core.store.heap.res.quarantined + supply.kept_by_driver.get(),
            );
            let mut pending: Vec<(u64, TimelineId)> = Vec::new();
            core.store.heap.pending_by_timeline().for_each(|p| _ = host::push(&mut pending, p));
            pending.sort_unstable_by_key(|&(bytes, timeline)| Reverse((bytes, timeline.get())));
            for (bytes, timeline) in pending.into_iter().take(MOST_STREAMS) {
                place(format_args!("free once {timeline} is done"), bytes);
            }
        }
        report.live = self.live.bytes(&self.caches);
        place(format_args!("in thread caches"), self.caches.stats().1);
        place(format_args!("held back by debug checks"), self.checks.numbers().0);
        report.reserved = supply.budget.committed();
        report.in_graphs = self.in_graphs.load(Ordering::Relaxed);
        report.limit = supply.budget.limit();

        let mut sums: HashMap<u32, (u64, u64)> = HashMap::new();
        self.table.for_each_live(|row, _| {
            let b = &row.buffer;
            if b.flags() & (IMPORTED | REGION) == 0 {
                if let Some((bytes, n)) = sums.get_mut(&b.tag()) {
                    (*bytes, *n) = (*bytes + b.len(), *n + 1);
                } else if sums.try_reserve(1).is_ok() {
                    sums.insert(b.tag(), (b.len(), 1));
                }
            }
        });
        let mut tags: Vec<(u32, u64, u64)> = Vec::new();
        for (tag, (bytes, n)) in sums {
            host::push(&mut tags, (tag, bytes, n));
        }
        tags.sort_unstable_by_key(|&(tag, bytes, n)| Reverse((bytes, n, tag)));
        for (tag, bytes, n) in tags.into_iter().take(MOST_TAGS) {
            place(format_args!("live with {} ({n} buffers)", ShownTag(tag)), bytes);
        }
        places.sort_unstable_by_key(|p| Reverse(p.1));
        report.places = places;

        report.notes = log.notes;
        let mut note = |what: fmt::Arguments<'_>| host::note(&mut report.notes, what);
        if let Some(scope) = Name::current() {
            note(format_args!("requested in scope {scope}"));
        }
        let room = supply.budget.room();
        if log.refused || report.limit != u64::MAX && room < layout.size {
            note(format_args!("the budget allows no more: raise it, or free something"));
        } else {
            note(format_args!(
                "the device has no more: free something, ask for less, or end other programs that \
                 use it"
            ));
        }
        let executables = self.in_executables.get();
        if executables > 0 {
            note(format_args!("executables of graphs take {executables} bytes beside this memory"));
        }
        if report.free_ready >= layout.size {
            note(format_args!("enough is free, but in pieces that live blocks hold apart"));
        }
        if self.config.cross_stream == CrossStream::Never && report.free_not_ready >= layout.size {
            note(format_args!(
                "memory of other streams may not be waited for on the device (CrossStream::Never)"
            ));
        }
        report.into()
    }
}
