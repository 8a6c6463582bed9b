//! Checks of recordings that other crates make when a recording stops.
//!
//! This module must not know what is checked.

use leasehold_core::Result;
use leasehold_core::sync::Arc;
use std::any::Any;

/// A description of a part of a recording, for a check.
pub type Note = Arc<dyn Any + Send + Sync>;

/// A check that a recording must pass before it becomes a graph.
/// [`Stream::note`](crate::Stream::note) leaves notes for it in the recording.
pub trait StopCheck: Send + Sync {
    /// Looks at the notes that were left for this check, in their order. Called once, by the thread
    /// that stops the recording, without a lock; may block.
    ///
    /// # Errors
    /// The reason why there is no graph. The recording is over then.
    fn check(&self, notes: &[Note]) -> Result<()>;
}

/// A note, and the check that it is for.
pub(crate) struct Noted {
    /// The operations that were recorded before it.
    pub(crate) ops: usize,
    pub(crate) check: Arc<dyn StopCheck>,
    pub(crate) note: Note,
}

/// Makes the checks, in the order of their first notes.
pub(crate) fn check(mut noted: Vec<Noted>) -> Result<()> {
    while let Some(first) = noted.first() {
        let check = first.check.clone();
        let same = |n: &Noted| Arc::ptr_eq(&n.check, &check);
        let notes: Vec<Note> = noted.iter().filter(|n| same(n)).map(|n| n.note.clone()).collect();
        noted.retain(|n| !same(n));
        check.check(&notes)?;
    }
    Ok(())
}
