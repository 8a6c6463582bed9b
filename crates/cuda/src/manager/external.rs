//! External streams by handle: one timeline for each stream of another library that uses this
//! device's memory.
//!
//! This module must not know when epochs are closed.

use crate::driver::ops::NativeStream;
use crate::engine::core::Core;
pub use crate::engine::external::External;
use crate::engine::external::PER_THREAD;
use leasehold_core::sync::thread::{self, ThreadId};
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Result, TimelineId};
use std::cell::RefCell;
use std::collections::HashMap;
use std::fmt;
use std::sync::Weak;

/// A handle, and for the per-thread default stream the thread.
type Key = (u64, Option<ThreadId>);

/// The external streams of a context.
pub struct ExternalManager {
    core: Arc<Core>,
    streams: RwLock<HashMap<Key, Arc<External>>>,
    /// Streams that were ended and whose work goes on.
    ended: Mutex<Vec<Arc<External>>>,
    /// The timeline that stands for all streams, once it was asked for.
    whole: Mutex<Option<Arc<External>>>,
}

/// The managers in which this thread has a per-thread default stream.
struct Threads(RefCell<Vec<Weak<ExternalManager>>>);

thread_local! {
    static THREADS: Threads = const { Threads(RefCell::new(Vec::new())) };
}

impl Drop for Threads {
    fn drop(&mut self) {
        for manager in self.0.take() {
            if let Some(manager) = manager.upgrade()
                && let Err(error) = manager.end(PER_THREAD)
            {
                tracing::debug!(%error, "the default stream of a thread could not be ended");
            }
        }
    }
}

impl ExternalManager {
    pub(crate) fn new(core: Arc<Core>) -> Arc<Self> {
        let (streams, ended, whole) = (RwLock::default(), Mutex::default(), Mutex::default());
        Arc::new(Self { core, streams, ended, whole })
    }

    fn key(native: u64) -> Key {
        match native {
            // The legacy default stream has two handles.
            0 => (1, None),
            PER_THREAD => (PER_THREAD, Some(thread::current().id())),
            native => (native, None),
        }
    }

    /// The stream of a handle. The first call makes its timeline; no call makes a driver call.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines.
    ///
    /// # Safety
    /// - `native` is a stream of the device's primary context, or 0, 1 or 2 for a default stream.
    ///   The caller destroys it after [`end`](Self::end) only.
    pub unsafe fn get(self: &Arc<Self>, native: u64) -> Result<Arc<External>> {
        let key = Self::key(native);
        if let Some(stream) = self.streams.read().get(&key) {
            return Ok(stream.clone());
        }
        self.reap();
        // SAFETY: the caller vouches for the handle.
        let made = unsafe { External::new(self.core.clone(), native) }?;
        let stream = self.streams.write().entry(key).or_insert_with(|| made.clone()).clone();
        if !Arc::ptr_eq(&stream, &made) {
            // Another thread was faster. No mark refers to this timeline.
            made.end_unused();
        } else if native == PER_THREAD {
            let manager = Arc::downgrade(self);
            // A thread that is ending already ends the stream with the device.
            let _ = THREADS.try_with(|threads| threads.0.borrow_mut().push(manager));
        }
        Ok(stream)
    }

    /// Ends a stream, before its owner destroys it. The handle may mean another stream afterwards.
    /// A handle that was never used here is `Ok`.
    ///
    /// # Errors
    /// `InvalidState` for a stream in capture; the driver's. Then the stream is as it was.
    pub fn end(&self, native: u64) -> Result<()> {
        let key = Self::key(native);
        let Some(stream) = self.streams.read().get(&key).cloned() else { return Ok(()) };
        stream.end()?;
        let removed = self.streams.write().remove(&key);
        self.ended.lock().extend(removed);
        self.reap();
        Ok(())
    }

    /// Checks that a number from another library may be a stream's handle. The driver is not asked:
    /// it reads through a handle, and need not survive a wrong one. A number that passes may still
    /// be no stream. Does not block.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that cannot be a stream of this process; also for the default
    /// streams' 0, 1 and 2.
    pub fn check_handle(&self, native: u64) -> Result<()> {
        if native <= PER_THREAD || !self.core.context.ops().may_be_stream(NativeStream(native)) {
            return Err(Error::invalid(format!(
                "{native:#x} is no stream of this process; give the handle of a stream that lives, \
                 1 for the legacy default stream or 2 for the thread's own"
            )));
        }
        Ok(())
    }

    /// The timeline that stands for all streams of the context: for work on streams whose handles
    /// may be used no more. Its epochs are over after a wait for the whole context
    /// ([`External::synchronize_context`]). No stream can wait for them: a thread does.
    ///
    /// # Errors
    /// `OutOfMemory` without timelines.
    pub fn whole(&self) -> Result<Arc<External>> {
        let mut whole = self.whole.lock();
        if let Some(whole) = &*whole {
            return Ok(whole.clone());
        }
        let made = External::whole(self.core.clone())?;
        Ok(whole.insert(made).clone())
    }

    /// A stream that is known here, through which a thread waits for all of them
    /// ([`External::wait_context`]). `None` while there is none.
    #[must_use]
    pub fn any(&self) -> Option<Arc<External>> {
        let lives = self.streams.read().values().next().cloned();
        let ended = || self.ended.lock().first().cloned();
        lives.or_else(ended).or_else(|| self.whole.lock().clone())
    }

    /// The handle of the stream with this timeline, if it was not ended.
    #[must_use]
    pub fn handle_of(&self, timeline: TimelineId) -> Option<u64> {
        let streams = self.streams.read();
        streams.values().find(|s| s.timeline().id() == timeline).map(|s| s.native())
    }

    /// How many streams have a timeline here.
    #[must_use]
    pub fn len(&self) -> usize {
        self.streams.read().len()
    }

    /// Whether no stream has a timeline here.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Lets go of ended streams whose work is over. Returns whether one has work, as far as the
    /// driver says.
    fn reap(&self) -> bool {
        let mut looked = std::mem::take(&mut *self.ended.lock());
        let mut have_work = false;
        looked.retain(|stream| {
            let over = stream.is_over();
            have_work |= matches!(over, Ok(false));
            !over.unwrap_or(false)
        });
        self.ended.lock().append(&mut looked);
        have_work
    }

    /// Ends all streams that can be, and lets go of those whose work is over. Returns whether one
    /// of them has work. Does not block.
    pub(crate) fn settle(&self) -> bool {
        let handles: Vec<Key> = self.streams.read().keys().copied().collect();
        for key in handles {
            let Some(stream) = self.streams.read().get(&key).cloned() else { continue };
            if stream.end().is_ok() {
                let removed = self.streams.write().remove(&key);
                self.ended.lock().extend(removed);
            }
        }
        self.reap()
    }

    /// Lets go of all streams. Blocks until the context's work is over, if streams of it have work.
    pub(crate) fn shutdown(&self) {
        let streams = std::mem::take(&mut *self.streams.write());
        let ended = std::mem::take(&mut *self.ended.lock());
        let whole = self.whole.lock().take();
        drop((streams, ended, whole));
    }
}

impl fmt::Debug for ExternalManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("ExternalManager")
            .field("streams", &self.len())
            .field("ended", &self.ended.lock().len())
            .finish()
    }
}
