//! The comparison of recordings: what all ranks' recordings must pass before one is launched.
//!
//! A call that is recorded leaves a note in the recording. When it stops, each rank tells the
//! others a hash of its communicators' calls, and waits for theirs. A launch of the graph costs
//! nothing.

use crate::members::Members;
use crate::signature::{List, Signature};
use leasehold::Result;
use leasehold::backend::sync::{Arc, OnceLock};
use leasehold::graph::{Note, StopCheck};

/// A recorded call.
pub(crate) struct Recorded {
    pub(crate) members: Arc<Members>,
    pub(crate) signature: Signature,
}

struct RecordingCheck;

/// The check of all recordings of the process.
pub(crate) fn check() -> &'static Arc<dyn StopCheck> {
    static CHECK: OnceLock<Arc<dyn StopCheck>> = OnceLock::new();
    CHECK.get_or_init(|| Arc::new(RecordingCheck))
}

impl StopCheck for RecordingCheck {
    fn check(&self, notes: &[Note]) -> Result<()> {
        let calls: Vec<&Recorded> = notes.iter().filter_map(|n| n.downcast_ref()).collect();
        let mut all: Vec<(&Arc<Members>, List)> = Vec::new();
        for call in &calls {
            if !all.iter().any(|(members, _)| Arc::ptr_eq(members, &call.members)) {
                let own = calls.iter().filter(|c| Arc::ptr_eq(&c.members, &call.members));
                all.push((&call.members, List::of_recording(own.map(|c| &c.signature))));
            }
        }
        // All are told before any is waited for: ranks may have used the communicators in other
        // orders.
        let begun: Vec<_> = all
            .iter()
            .map(|(members, list)| members.begin_comparison(list))
            .collect::<Result<_>>()?;
        std::iter::zip(begun, &all).try_for_each(|(comparison, (_, list))| comparison.end(list))
    }
}
