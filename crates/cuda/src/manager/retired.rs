//! Contexts that nobody leases any more, until they may end.
//!
//! The end of a context blocks: the driver waits for its work, memory goes back, threads are
//! joined. So the drop of the last lease only leaves the context here. It ends once nothing of it
//! is held and no work of it is pending: until then streams, buffers and graphs that outlive their
//! device keep all that they need, and no drop of theirs ends it.
//!
//! A thread of the backend's looks after the list while there is something on it. Without threads
//! (`inline`) the next call that opens, collects or shuts down does. Work that waits for a gate
//! which nobody raises keeps its context here; nothing waits for that, also not the end of the
//! process.
//!
//! This module must not know devices.

use super::context::ContextState;
use leasehold_core::Result;
use leasehold_core::sync::thread;
use leasehold_core::sync::{Arc, Condvar, Mutex};
use std::fmt;
use std::time::Duration;

/// Between looks at contexts that are not over, at least and at most.
const NAP: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));

#[derive(Default)]
struct List {
    waiting: Vec<ContextState>,
    /// Contexts that were taken out: somebody asks whether they are over, or ends them.
    taken: usize,
    /// A thread looks after the list.
    running: bool,
    /// Somebody else looks after the list now.
    attended: usize,
}

/// The contexts of a backend that wait for their end.
pub(crate) struct Retired {
    list: Mutex<List>,
    changed: Condvar,
    inline: bool,
}

impl Retired {
    /// Without contexts. `inline`: no thread.
    pub(crate) fn new(inline: bool) -> Arc<Self> {
        Arc::new(Self { list: Mutex::new(List::default()), changed: Condvar::new(), inline })
    }

    /// Leaves a context. Never blocks, makes no driver call; any thread.
    pub(crate) fn push(self: &Arc<Self>, context: ContextState) {
        let mut list = self.list.lock();
        list.waiting.push(context);
        self.attend(&mut list);
    }

    /// Sees to it that a thread looks after the list.
    fn attend(self: &Arc<Self>, list: &mut List) {
        if self.inline || list.running || list.attended > 0 || list.waiting.is_empty() {
            return;
        }
        let retired = self.clone();
        match thread::Builder::new().name("lh-cuda-end".to_owned()).spawn(move || retired.run()) {
            Ok(_) => list.running = true,
            // The next call that may block ends what is over.
            Err(error) => tracing::warn!(%error, "no thread that ends contexts in the background"),
        }
    }

    /// The thread's life: until the list is empty.
    fn run(self: Arc<Self>) {
        let mut nap = NAP.0;
        loop {
            if self.reclaim() > 0 {
                nap = NAP.0;
            }
            let mut list = self.list.lock();
            if list.waiting.is_empty() && list.taken == 0 {
                list.running = false;
                return;
            }
            self.changed.wait_for(&mut list, nap);
            nap = (nap * 2).min(NAP.1);
        }
    }

    /// Ends what is over; says how many ended. Blocks on the driver, never on what is not over.
    pub(crate) fn reclaim(&self) -> usize {
        let mut taken = Taken { retired: self, contexts: Vec::new(), count: 0 };
        {
            let mut list = self.list.lock();
            taken.contexts = std::mem::take(&mut list.waiting);
            taken.count = taken.contexts.len();
            list.taken += taken.count;
        }
        let over: Vec<_> = taken.contexts.extract_if(.., |context| context.is_over()).collect();
        let ended = over.len();
        drop(over);
        ended
    }

    /// Ends what is over, and says what is not, if anything. Blocks on the driver.
    ///
    /// # Errors
    /// `LeasesOutstanding` for the first context of which something is held or pending.
    pub(crate) fn settle(&self) -> Result<()> {
        self.reclaim();
        let mut list = self.list.lock();
        while list.taken > 0 {
            // Another thread ends contexts.
            self.changed.wait(&mut list);
        }
        list.waiting.iter().try_for_each(ContextState::retired_outstanding)
    }

    /// Runs `calls`, which leave contexts here, and ends those at once: the caller may block.
    ///
    /// # Errors
    /// What `calls` say; as [`settle`](Self::settle).
    pub(crate) fn settling(self: &Arc<Self>, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let attending = Attending::new(self);
        calls()?;
        self.settle()?;
        drop(attending);
        Ok(())
    }

    /// Runs `look` over the contexts that wait.
    pub(crate) fn each(&self, mut look: impl FnMut(&ContextState)) {
        self.list.lock().waiting.iter().for_each(&mut look);
    }
}

/// While it lives, no thread is started for the list.
struct Attending<'a>(&'a Arc<Retired>);

impl<'a> Attending<'a> {
    fn new(retired: &'a Arc<Retired>) -> Self {
        retired.list.lock().attended += 1;
        Self(retired)
    }
}

impl Drop for Attending<'_> {
    fn drop(&mut self) {
        let mut list = self.0.list.lock();
        list.attended -= 1;
        self.0.attend(&mut list);
    }
}

/// Contexts that were taken out of the list; those that are left go back.
struct Taken<'a> {
    retired: &'a Retired,
    contexts: Vec<ContextState>,
    count: usize,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        let mut list = self.retired.list.lock();
        list.waiting.append(&mut self.contexts);
        list.taken -= self.count;
        self.retired.changed.notify_all();
    }
}

impl fmt::Debug for Retired {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Retired({})", self.list.lock().waiting.len())
    }
}
