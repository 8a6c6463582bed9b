//! Retired payloads: devices or contexts without a lease, until they may end.
//!
//! The end of a device blocks: the driver waits for its work, memory goes back, threads are joined.
//! So the drop of the last lease only puts the payload on this list. A payload ends once none of
//! its resources is held and none of its work is pending. Until then, streams, buffers and graphs
//! that outlive their device keep all that they need. Their drops never end the payload.
//!
//! While the list is not empty, a thread of the backend serves it. Without threads (`inline`), the
//! next call that opens, collects or shuts down serves the list. If work waits for a host timeline
//! that is never signalled, its payload stays on the list. Nothing waits for such a payload, not
//! even the end of the process.
//!
//! This module must not know devices.

use crate::engine::driver::DriverStream;
use crate::engine::stream::StreamCore;
use leasehold_core::Result;
use leasehold_core::sync::thread;
use leasehold_core::sync::{Arc, Condvar, Mutex};
use std::fmt;
use std::time::Duration;

/// The least and the longest time between two checks of payloads that are not over.
const NAP: (Duration, Duration) = (Duration::from_micros(100), Duration::from_millis(20));

/// Streams that dropped leases left behind. Their work goes on.
#[must_use]
pub struct LeftBehind(Vec<Box<dyn FnOnce() + Send>>);

impl LeftBehind {
    /// The streams that [`Engine::left_behind`](crate::engine::Engine::left_behind) returned.
    pub fn new<N: DriverStream>(streams: Vec<Arc<StreamCore<N>>>) -> Self {
        let run_down = |stream: Arc<StreamCore<N>>| Box::new(move || stream.run_down()) as _;
        Self(streams.into_iter().map(run_down).collect())
    }

    /// Runs the streams down. Blocks on their work, unless the host holds it back. The caller holds
    /// no lock.
    pub(crate) fn run_down(self) {
        self.0.into_iter().for_each(|stream| stream());
    }
}

impl fmt::Debug for LeftBehind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "LeftBehind({} streams)", self.0.len())
    }
}

/// A device or a context: a payload that owns streams and other resources.
pub trait StreamOwner {
    /// Refuses while a resource of the payload is in use or has pending work.
    ///
    /// # Errors
    /// `LeasesOutstanding`.
    fn outstanding(&self) -> Result<()>;

    /// The payload's streams that dropped leases left behind.
    fn left_behind(&self) -> LeftBehind;
}

/// A payload whose end blocks.
pub trait Retiring: StreamOwner + Send + 'static {
    /// Whether the payload, which has no lease, may end. Queries the driver, and does not block.
    fn ending(&self) -> Ending;
}

/// When a payload without a lease may end.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Now.
    Now,
    /// Once work of other libraries' streams is over. No lease counts it, and it goes on by itself.
    AfterOthers,
    /// Later.
    Later,
}

/// The rule of [`Retired::settle`] for work that streams of other libraries have.
#[derive(Clone, Copy, Debug)]
pub enum Others {
    /// It waits for the work.
    Await,
    /// It waits for nothing.
    Leave,
}

/// The findings of one look at the list.
struct Sweep {
    /// The number of payloads that ended.
    ended: usize,
    /// The number of payloads that did not.
    left: usize,
    /// One of these awaits work of other libraries' streams.
    awaits_others: bool,
}

struct List<T> {
    waiting: Vec<T>,
    /// The number of payloads that a thread has taken out to check or to end them.
    taken: usize,
    /// A thread serves the list.
    running: bool,
    /// The number of callers that serve the list themselves, so that no thread is needed.
    attended: usize,
}

/// The payloads of a backend that wait for their end.
pub struct Retired<T: Retiring> {
    name: &'static str,
    list: Mutex<List<T>>,
    changed: Condvar,
    inline: bool,
}

impl<T: Retiring> Retired<T> {
    /// Makes an empty list. `name` is that of the thread. `inline`: the list uses no thread.
    #[must_use]
    pub fn new(name: &'static str, inline: bool) -> Arc<Self> {
        let list = List { waiting: Vec::new(), taken: 0, running: false, attended: 0 };
        Arc::new(Self { name, list: Mutex::new(list), changed: Condvar::new(), inline })
    }

    /// Retires a payload. Never blocks and makes no driver call. Any thread may call it.
    pub fn retire(self: &Arc<Self>, payload: T) {
        let mut list = self.list.lock();
        list.waiting.push(payload);
        self.attend(&mut list);
    }

    /// Starts a thread for the list if the list needs one.
    fn attend(self: &Arc<Self>, list: &mut List<T>) {
        if self.inline || list.running || list.attended > 0 || list.waiting.is_empty() {
            return;
        }
        let retired = self.clone();
        match thread::Builder::new().name(self.name.to_owned()).spawn(move || retired.run()) {
            Ok(_) => list.running = true,
            // The next call that may block ends the payloads that are over.
            Err(error) => tracing::warn!(%error, "no thread that ends devices in the background"),
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

    /// Ends the payloads that are over, and returns their number. Blocks on the driver, never on a
    /// payload that is not over.
    pub fn reclaim(&self) -> usize {
        self.sweep().ended
    }

    /// As [`reclaim`](Self::reclaim).
    fn sweep(&self) -> Sweep {
        let mut taken = Taken { retired: self, payloads: Vec::new(), count: 0 };
        {
            let mut list = self.list.lock();
            taken.payloads = std::mem::take(&mut list.waiting);
            taken.count = taken.payloads.len();
            list.taken += taken.count;
        }
        let mut awaits_others = false;
        let is_over = |payload: &mut T| {
            let ending = payload.ending();
            awaits_others |= ending == Ending::AfterOthers;
            ending == Ending::Now
        };
        let over: Vec<_> = taken.payloads.extract_if(.., is_over).collect();
        let ended = over.len();
        drop(over);
        Sweep { ended, left: taken.payloads.len(), awaits_others }
    }

    /// Ends the payloads that are over, and checks that none is left. Blocks on the driver.
    /// `others` says whether it also blocks on the work of other libraries' streams, or leaves a
    /// payload that awaits such work to the background.
    ///
    /// # Errors
    /// `LeasesOutstanding` for the first payload with a resource in use or with pending work.
    pub fn settle(&self, others: Others) -> Result<()> {
        let mut nap = NAP.0;
        loop {
            let sweep = self.sweep();
            let mut list = self.list.lock();
            let elsewhere = list.taken > 0 || list.waiting.len() > sweep.left;
            while list.taken > 0 {
                // Another thread is ending payloads.
                self.changed.wait(&mut list);
            }
            list.waiting.iter().try_for_each(T::outstanding)?;
            let is_done = list.waiting.is_empty() || !(elsewhere || sweep.awaits_others);
            if is_done || matches!(others, Others::Leave) {
                return Ok(());
            }
            if !elsewhere {
                self.changed.wait_for(&mut list, nap);
                nap = (nap * 2).min(NAP.1);
            }
        }
    }

    /// Runs `calls`, which retire payloads, and ends those payloads at once: the caller may block.
    ///
    /// # Errors
    /// An error of `calls`, or as [`settle`](Self::settle).
    pub fn settling(
        self: &Arc<Self>,
        others: Others,
        calls: impl FnOnce() -> Result<()>,
    ) -> Result<()> {
        let attending = Attending::new(self);
        calls()?;
        self.settle(others)?;
        drop(attending);
        Ok(())
    }

    /// Runs `look` for each retired payload. Waits for a thread that is ending payloads: the list
    /// lacks those that the thread has taken.
    pub fn each(&self, mut look: impl FnMut(&T)) {
        let mut list = self.list.lock();
        while list.taken > 0 {
            self.changed.wait(&mut list);
        }
        list.waiting.iter().for_each(&mut look);
    }
}

/// While this guard lives, no thread is started for the list.
struct Attending<'a, T: Retiring>(&'a Arc<Retired<T>>);

impl<'a, T: Retiring> Attending<'a, T> {
    fn new(retired: &'a Arc<Retired<T>>) -> Self {
        retired.list.lock().attended += 1;
        Self(retired)
    }
}

impl<T: Retiring> Drop for Attending<'_, T> {
    fn drop(&mut self) {
        let mut list = self.0.list.lock();
        list.attended -= 1;
        self.0.attend(&mut list);
    }
}

/// Contexts that were taken out of the list. The drop puts the remaining ones back.
struct Taken<'a, T: Retiring> {
    retired: &'a Retired<T>,
    payloads: Vec<T>,
    count: usize,
}

impl<T: Retiring> Drop for Taken<'_, T> {
    fn drop(&mut self) {
        let mut list = self.retired.list.lock();
        list.waiting.append(&mut self.payloads);
        list.taken -= self.count;
        self.retired.changed.notify_all();
    }
}

impl<T: Retiring> fmt::Debug for Retired<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Retired({})", self.list.lock().waiting.len())
    }
}
