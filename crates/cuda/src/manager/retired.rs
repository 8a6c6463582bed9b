//! Retired contexts: contexts without a lease, until they may end.
//!
//! The end of a context blocks: the driver waits for its work, memory goes back, threads are
//! joined. So the drop of the last lease only puts the context on this list. A context ends once
//! none of its resources is held and none of its work is pending. Until then, streams, buffers and
//! graphs that outlive their device keep all that they need. Their drops never end the context.
//!
//! While the list is not empty, a thread of the backend serves it. Without threads (`inline`), the
//! next call that opens, collects or shuts down serves the list. If work waits for a host timeline
//! that is never signalled, its context stays on the list. Nothing waits for such a context, not
//! even the end of the process.
//!
//! This module must not know devices.

use super::context::ContextState;
use leasehold_core::Result;
use leasehold_core::sync::thread;
use leasehold_core::sync::{Arc, Condvar, Mutex};
use std::fmt;
use std::time::Duration;

/// The least and the longest time between two checks of contexts that are not over.
const NAP: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));

#[derive(Default)]
struct List {
    waiting: Vec<ContextState>,
    /// The number of contexts that a thread has taken out to check or to end them.
    taken: usize,
    /// A thread serves the list.
    running: bool,
    /// The number of callers that serve the list themselves, so that no thread is needed.
    attended: usize,
}

/// The contexts of a backend that wait for their end.
pub(crate) struct Retired {
    list: Mutex<List>,
    changed: Condvar,
    inline: bool,
}

impl Retired {
    /// Makes an empty list. `inline`: the list uses no thread.
    pub(crate) fn new(inline: bool) -> Arc<Self> {
        Arc::new(Self { list: Mutex::new(List::default()), changed: Condvar::new(), inline })
    }

    /// Retires a context. Never blocks and makes no driver call. Any thread may call it.
    pub(crate) fn push(self: &Arc<Self>, context: ContextState) {
        let mut list = self.list.lock();
        list.waiting.push(context);
        self.attend(&mut list);
    }

    /// Starts a thread for the list if the list needs one.
    fn attend(self: &Arc<Self>, list: &mut List) {
        if self.inline || list.running || list.attended > 0 || list.waiting.is_empty() {
            return;
        }
        let retired = self.clone();
        match thread::Builder::new().name("lh-cuda-end".to_owned()).spawn(move || retired.run()) {
            Ok(_) => list.running = true,
            // The next call that may block ends the contexts that are over.
            Err(error) => tracing::warn!(%error, "no thread that ends contexts in the background"),
        }
    }

    /// The thread's main loop. The thread ends when the list is empty.
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

    /// Ends the contexts that are over, and returns their number. Blocks on the driver, never on a
    /// context that is not over.
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

    /// Ends the contexts that are over, and checks that none is left. Blocks on the driver.
    ///
    /// # Errors
    /// `LeasesOutstanding` for the first context with a resource in use or with pending work.
    pub(crate) fn settle(&self) -> Result<()> {
        self.reclaim();
        let mut list = self.list.lock();
        while list.taken > 0 {
            // Another thread is ending contexts.
            self.changed.wait(&mut list);
        }
        list.waiting.iter().try_for_each(ContextState::retired_outstanding)
    }

    /// Runs `calls`, which retire contexts, and ends those contexts at once: the caller may block.
    ///
    /// # Errors
    /// An error of `calls`, or as [`settle`](Self::settle).
    pub(crate) fn settling(self: &Arc<Self>, calls: impl FnOnce() -> Result<()>) -> Result<()> {
        let attending = Attending::new(self);
        calls()?;
        self.settle()?;
        drop(attending);
        Ok(())
    }

    /// Runs `look` for each retired context. Waits for a thread that is ending contexts: the list
    /// lacks those that the thread has taken.
    pub(crate) fn each(&self, mut look: impl FnMut(&ContextState)) {
        let mut list = self.list.lock();
        while list.taken > 0 {
            self.changed.wait(&mut list);
        }
        list.waiting.iter().for_each(&mut look);
    }
}

/// While this guard lives, no thread is started for the list.
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

/// Contexts that were taken out of the list. The drop puts the remaining ones back.
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
