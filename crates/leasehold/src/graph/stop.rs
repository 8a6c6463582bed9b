//! Checks of recordings that other crates make when a recording stops, and before each launch.
//!
//! This module must not know what is checked.

use leasehold_core::sync::Arc;
use leasehold_core::{Result, Timepoint};
use std::any::Any;

/// A description of a part of a recording, for a check.
pub type Note = Arc<dyn Any + Send + Sync>;

/// A check that a recording must pass before it becomes a graph.
/// [`Stream::note`](crate::Stream::note) leaves notes for it in the recording.
pub trait StopCheck: Send + Sync {
    /// Looks at the notes that were left for this check, in their order. Called once, by the thread
    /// that stops the recording, without a lock; may block. Returns what is to be asked and told
    /// of the graph's launches, if anything.
    ///
    /// # Errors
    /// The reason why there is no graph. The recording is over then.
    fn check(&self, notes: &[Note]) -> Result<Option<Arc<dyn LaunchCheck>>>;
}

/// A check that a graph asks before each launch, and tells afterwards. The graph keeps the check,
/// which must not hold the graph or its runtime.
pub trait LaunchCheck: Send + Sync {
    /// Called by the launching thread before the launch, without a lock. Must not block.
    ///
    /// # Errors
    /// The reason why the graph is not launched.
    fn before(&self) -> Result<()>;

    /// Called by the launching thread once the launch is submitted, without a lock. Must not block.
    fn launched(&self, at: Timepoint);
}

/// A note, and the check that it is for.
pub(crate) struct Noted {
    pub(crate) check: Arc<dyn StopCheck>,
    pub(crate) note: Note,
}

/// Makes the checks, in the order of their first notes. Returns those of the launches.
pub(crate) fn check(mut noted: Vec<Noted>) -> Result<Vec<Arc<dyn LaunchCheck>>> {
    let mut launches = Vec::new();
    while let Some(first) = noted.first() {
        let check = first.check.clone();
        let same = |n: &Noted| Arc::ptr_eq(&n.check, &check);
        let notes: Vec<Note> = noted.iter().filter(|n| same(n)).map(|n| n.note.clone()).collect();
        noted.retain(|n| !same(n));
        launches.extend(check.check(&notes)?);
    }
    Ok(launches)
}
