//! The comparison of recordings: what all ranks' recordings must pass before one is launched.
//!
//! A call that is recorded leaves a note in the recording. When it stops, each rank tells the
//! others a hash of its communicators' calls, and waits for theirs. Ranks that share communicators
//! also compare the order of calls across these. A launch of the graph costs nothing.

use crate::inner::{Core, Launched, Launches};
use crate::members::Comparison;
use crate::signature::{Class, List, Signature};
use leasehold::Result;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, OnceLock};
use leasehold::graph::{LaunchCheck, Note, StopCheck};
use std::sync::Weak;

/// A recorded call.
pub(crate) struct Recorded {
    /// The recording keeps the call, which keeps the communicator.
    pub(crate) core: Weak<Core>,
    /// The [place] of its submission.
    pub(crate) at: u64,
    pub(crate) signature: Signature,
}

/// The next place of a submission among those of all recordings of the process.
pub(crate) fn place() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(1);
    NEXT.fetch_add(1, Ordering::Relaxed)
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
        let recording = calls.iter().map(|call| call.at).min().unwrap_or_default();
        let mut all: Vec<(Arc<Core>, Arc<List>)> = Vec::new();
        for call in &calls {
            if all.iter().any(|(core, _)| Weak::ptr_eq(&Arc::downgrade(core), &call.core)) {
                continue;
            }
            let Some(core) = call.core.upgrade() else { continue };
            let own = calls.iter().filter(|c| Weak::ptr_eq(&c.core, &call.core));
            let own: Vec<_> = own.map(|c| (c.at, &c.signature)).collect();
            all.push((core, Arc::new(List::of_recording(recording, &own))));
        }
        // All are told before any is waited for: ranks may have used the communicators in other
        // orders.
        let begun: Vec<_> = all
            .iter()
            .map(|(core, list)| core.members.begin_comparison(list))
            .collect::<Result<_>>()?;
        std::iter::zip(&begun, &all)
            .try_for_each(|(comparison, (_, list))| comparison.end(list))?;
        compare_orders(&begun, &all)?;
        let several = all.len() > 1;
        let launched = |(core, list): (Arc<Core>, Arc<List>)| Launched {
            core: Arc::downgrade(&core),
            of_all: list.calls().any(|(_, class, ..)| class == Class::All),
            list: several.then(|| list.clone()),
        };
        Ok(Some(Arc::new(Launches(all.into_iter().map(launched).collect()))))
    }
}

/// Compares the order of calls with each rank that shares communicators of one order with this one.
fn compare_orders(begun: &[Comparison<'_>], all: &[(Arc<Core>, Arc<List>)]) -> Result<()> {
    let mut tokens: Vec<u64> = all.iter().map(|(core, _)| core.token).collect();
    tokens.sort_unstable();
    tokens.dedup();
    for token in tokens {
        let of_token = || std::iter::zip(begun, all).filter(|(_, (core, _))| core.token == token);
        let mut ranks: Vec<u32> =
            of_token().flat_map(|(_, (core, _))| core.members.ranks.iter().copied()).collect();
        ranks.sort_unstable();
        ranks.dedup();
        for rank in ranks {
            let place = |core: &Core| core.members.ranks.iter().position(|&r| r == rank);
            let shared: Vec<_> = of_token()
                .filter_map(|(begun, (core, ours))| {
                    let other = place(core)? as u32;
                    (other != core.members.rank).then_some((begun, core, ours, other))
                })
                .collect();
            let [(_, first, ..), _, ..] = &shared[..] else { continue };
            let own = first.members.ranks[first.members.rank as usize];
            let theirs: Vec<List> = shared
                .iter()
                .map(|(begun, _, _, other)| begun.list_of(*other))
                .collect::<Result<_>>()?;
            let lists: Vec<_> = std::iter::zip(&shared, &theirs)
                .map(|((_, core, ours, other), theirs)| {
                    (&*core.members.name, [core.members.rank, *other], [&***ours, theirs])
                })
                .collect();
            if let Some(opposite) = List::opposite_orders([own, rank], &lists) {
                return Err(opposite);
            }
        }
    }
    Ok(())
}
