//! The report of an allocation that failed: where the memory is, who holds it, what was tried and what to do.

use crate::allocator::Inner;
use crate::buffer::{IMPORTED, REGION};
use crate::config::CrossStream;
use crate::layout::{Layout, UNIT_SHIFT};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, OutOfMemory, Text};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// Release tags that a report names.
const MOST_TAGS: usize = 5;
/// Streams that it names.
const MOST_LINES: usize = 4;

impl Inner {
    /// Why `layout` was not allocated. `refused`: the budget stood in the way.
    #[cold]
    pub(crate) fn report(&self, layout: Layout, notes: Vec<Text>, refused: bool) -> Error {
        let mut report = OutOfMemory::new(self.config.name.clone(), layout.size);
        let mut places: Vec<(Text, u64)> = Vec::new();
        {
            let core = self.core.lock();
            let (ready, pending) = core.store.free_bytes();
            report.free_ready = ready;
            report.free_not_ready = pending;
            report.largest_free = u64::from(core.store.heap.largest_free()) << UNIT_SHIFT;
            report.live = self.counters.live_bytes.load(Ordering::Relaxed);
            let res = &core.store.heap.res;
            let cached = res.cached.iter().map(|&p| res.bytes(res.pieces[p as usize].granules)).sum();
            places.push(("free slots of slabs".into(), core.store.slabs.bytes().1));
            places.push(("in hand, mapped nowhere".into(), cached));
            places.push(("lost to the driver".into(), res.quarantined));
            let mut lines: Vec<(u64, u16)> = core.store.heap.pending_by_line().collect();
            lines.sort_unstable_by_key(|&l| Reverse(l));
            for (bytes, line) in lines.into_iter().take(MOST_LINES) {
                places.push((format!("free once line {line} is done").into(), bytes));
            }
        }
        let (_, kept, _, drift) = self.front.stats();
        report.live = report.live.wrapping_add_signed(drift);
        places.push(("in magazines".into(), kept));
        places.push(("held back by debug aids".into(), self.watch.as_ref().map_or(0, |w| w.numbers().0)));
        report.reserved = self.budget.committed();
        report.in_graphs = self.counters.in_graphs.load(Ordering::Relaxed);
        report.limit = self.budget.limit();

        let mut tags: BTreeMap<u32, (u64, u64)> = BTreeMap::new();
        self.for_each_live(|_, flags, b| {
            if flags & (IMPORTED | REGION) == 0 {
                let sum = tags.entry(b.tag).or_default();
                *sum = (sum.0 + b.len, sum.1 + 1);
            }
        });
        let mut tags: Vec<_> = tags.into_iter().map(|(tag, (bytes, n))| (bytes, n, tag)).collect();
        tags.sort_unstable_by_key(|&t| Reverse(t));
        for (bytes, n, tag) in tags.into_iter().take(MOST_TAGS) {
            places.push((format!("live with tag {tag} ({n} buffers)").into(), bytes));
        }
        places.retain(|p| p.1 > 0);
        places.sort_by_key(|p| Reverse(p.1));
        report.places = places;

        report.notes = notes;
        let room = self.budget.room();
        if refused || report.limit != u64::MAX && room < layout.size {
            report.notes.push("the budget allows no more: raise it, or free something".into());
        }
        if report.free_ready >= layout.size {
            report.notes.push("enough is free, but in pieces that live blocks hold apart".into());
        }
        if self.config.cross_stream == CrossStream::Never && report.free_not_ready >= layout.size {
            let note = "memory of other streams may not be waited for on the device (CrossStream::Never)";
            report.notes.push(note.into());
        }
        report.into()
    }
}
