//! The comparison of recordings: what all ranks' recordings must pass before one is launched.
//!
//! A call that is recorded leaves a note in the recording. When it stops, each rank tells the
//! others a hash of its communicators' calls, and waits for theirs. A launch of the graph costs
//! nothing.

use crate::inner::{Core, Launches};
use crate::signature::{List, Signature};
use leasehold::Result;
use leasehold::backend::sync::{Arc, OnceLock};
use leasehold::graph::{LaunchCheck, Note, StopCheck};
use std::sync::Weak;

/// A recorded call.
pub(crate) struct Recorded {
    /// The recording keeps the call, which keeps the communicator.
    pub(crate) core: Weak<Core>,
    pub(crate) signature: Signature,
}

struct RecordingCheck;

/// The check of all recordings of the process.
pub(crate) fn check() -> &'static Arc<dyn StopCheck> {
    static CHECK: OnceLock<Arc<dyn StopCheck>> = OnceLock::new();
    CHECK.get_or_init(|| Arc::new(RecordingCheck))
}

impl StopCheck for RecordingCheck {
    fn check(&self, notes: &[Note]) -> Result<Option<Arc<dyn LaunchCheck>>> {
        let calls: Vec<&Recorded> = notes.iter().filter_map(|n| n.downcast_ref()).collect();
        let mut all: Vec<(Arc<Core>, List)> = Vec::new();
        for call in &calls {
            if all.iter().any(|(core, _)| Weak::ptr_eq(&Arc::downgrade(core), &call.core)) {
                continue;
            }
            let Some(core) = call.core.upgrade() else { continue };
            let own = calls.iter().filter(|c| Weak::ptr_eq(&c.core, &call.core));
            all.push((core, List::of_recording(own.map(|c| &c.signature))));
        }
        // All are told before any is waited for: ranks may have used the communicators in other
        // orders.
        let begun: Vec<_> = all
            .iter()
            .map(|(core, list)| core.members.begin_comparison(list))
            .collect::<Result<_>>()?;
        std::iter::zip(begun, &all).try_for_each(|(comparison, (_, list))| comparison.end(list))?;
        let cores = all.iter().map(|(core, _)| Arc::downgrade(core)).collect();
        Ok(Some(Arc::new(Launches(cores))))
    }
}
