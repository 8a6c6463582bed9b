//! State that the threads of a context share: the list of streams in need of attention, the host
//! calls that are due, and the flags by which the threads start and end.
//!
//! This module must not know what a stream is, nor what the threads do with one.

use crate::DeviceId;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::thread::{JoinHandle, Thread};
use leasehold_core::sync::{Arc, Condvar, Mutex, OnceLock};
use std::collections::VecDeque;
use std::fmt;
use std::time::Duration;

/// Wakes the completion thread. The driver's callbacks may call it.
#[derive(Clone, Default)]
pub(crate) struct Waker(pub(crate) Arc<OnceLock<Thread>>);

impl Waker {
    /// Wakes the completion thread.
    pub(crate) fn wake(&self) {
        if let Some(thread) = self.0.get() {
            thread.unpark();
        }
    }
}

pub(crate) struct List<S> {
    pub(crate) streams: Vec<Arc<S>>,
    pub(crate) thread: Option<JoinHandle<()>>,
    pub(crate) started: bool,
}

pub(crate) struct Calls<S, J> {
    pub(crate) tasks: VecDeque<(Arc<S>, J)>,
    pub(crate) idle: u32,
    pub(crate) threads: u32,
    pub(crate) handles: Vec<JoinHandle<()>>,
}

/// The threads of a context and their work.
pub(crate) struct Threads<S, J> {
    pub(crate) id: DeviceId,
    pub(crate) inline: bool,
    pub(crate) interval: Duration,
    pub(crate) list: Mutex<List<S>>,
    pub(crate) waker: Waker,
    pub(crate) calls: Mutex<Calls<S, J>>,
    pub(crate) bell: Condvar,
    pub(crate) closing: AtomicBool,
}

impl<S, J> Threads<S, J> {
    /// Makes the state without threads. `interval`: the time between queries of the device.
    pub(crate) fn new(id: DeviceId, inline: bool, interval: Duration) -> Arc<Self> {
        Arc::new(Self {
            id,
            inline,
            interval,
            list: Mutex::new(List { streams: Vec::new(), thread: None, started: false }),
            waker: Waker::default(),
            calls: Mutex::new(Calls {
                tasks: VecDeque::new(),
                idle: 0,
                threads: 0,
                handles: Vec::new(),
            }),
            bell: Condvar::new(),
            closing: AtomicBool::new(false),
        })
    }

    /// Whether there are no threads.
    #[inline]
    pub(crate) fn is_inline(&self) -> bool {
        self.inline
    }

    /// A handle that wakes the completion thread.
    pub(crate) fn waker(&self) -> Waker {
        self.waker.clone()
    }

    /// The completion thread's thread, for a test that waits for its end.
    #[cfg(test)]
    pub(crate) fn take_thread(&self) -> Option<JoinHandle<()>> {
        self.list.lock().thread.take()
    }

    /// Tells the threads to end when they have no more work. Does not block.
    pub(crate) fn close(&self) {
        self.closing.store(true, Ordering::Release);
        // The lock orders this after the check of the flag: a thread that saw the flag unset now
        // waits on the bell.
        drop(self.calls.lock());
        self.bell.notify_all();
        self.waker.wake();
    }
}

impl<S, J> fmt::Debug for Threads<S, J> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Threads")
            .field("id", &self.id)
            .field("inline", &self.inline)
            .field("streams", &self.list.lock().streams.len())
            .finish_non_exhaustive()
    }
}
