//! External timelines that free memory waits for.
//!
//! Their owners do not see submissions, so nothing but a question makes them progress.

use crate::core::Core;
use crate::host;
use crate::lock::Lock;
use crate::table::Table;
use leasehold_core::{PackedTimepoint, Timeline, TimelineId, Timepoint};
use std::time::Duration;

/// Asks the external timelines that free memory waits for how far they are. Without external
/// timelines the call does nothing. Called without the lock: it calls the driver.
#[cold]
pub(crate) fn ask_external(core: &Lock<Core>, table: &Table) {
    if !Timeline::any_external() {
        return;
    }
    let mut timelines: Vec<TimelineId> = Vec::new();
    let mut note = |id: TimelineId| {
        if id.get() != 0 && !timelines.contains(&id) {
            // A timeline without host memory for its entry is asked by a later call.
            host::push(&mut timelines, id);
        }
    };
    {
        let core = core.lock();
        let heap = &core.store.heap;
        heap.pending_by_timeline().for_each(|(_, timeline)| note(timeline));
        // A use that is over is not asked for: its stream may be gone.
        let mut pending = |s: PackedTimepoint| {
            if !s.has_passed() {
                note(s.timeline_id());
            }
        };
        heap.waiting(|_, s| pending(s));
        heap.old_mappings.timepoints().for_each(&mut pending);
        core.store.slabs.pending(|_, s| pending(s));
        for list in [core.deferred, core.retired] {
            list.each(table, |row| row.buffer.for_each_use(&mut pending));
        }
    }
    for id in timelines {
        let point = PackedTimepoint::from_bits(u64::from(id.get()) << 48 | 1).timepoint();
        if let Some(timeline) = point.map(Timepoint::timeline).filter(|t| t.is_external()) {
            // The timeline shows the result of this wait.
            let _ = timeline.wait(timeline.submitted(), Some(Duration::ZERO));
        }
    }
}
