//! The pool of a device's streams: idle streams without a failure are lent again.
//!
//! A stream that is dropped with work pending goes to the retire list, and serves again once its
//! work is over. A failed stream is destroyed. The pool keeps the timelines of all streams that
//! exist, and whether each has a holder.
//!
//! This module must not know what streams run.

use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Budgeted, Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result,
    RetireList, StreamHandle, Tagged, Timeline, VALUE_LIMIT, tags,
};
use std::fmt;
use std::hash::Hash;

/// A stream in a pool.
pub trait PooledStream: Tagged<Tag = tags::Stream> + Send + Sync + 'static {
    /// The property that a request names: a priority and a partition, or `()`.
    type Key: Clone + Eq + Hash + Send + Sync + 'static;

    /// The stream's property.
    fn key(&self) -> Self::Key;

    /// The stream's timeline.
    fn timeline(&self) -> &'static Timeline;

    /// Whether the pool can lend the stream again.
    fn is_sound(&self) -> bool {
        is_sound(self.timeline())
    }

    /// The last holder dropped the stream: its work continues without calls. Returns whether the
    /// pool can lend the stream again at once. Must not block.
    fn let_go(&self) -> bool {
        self.is_sound()
    }

    /// Whether the stream may be destroyed by the thread that drops the last lease: its destruction
    /// does not block. Otherwise the stream goes to the retire list.
    fn ends_at_once(&self) -> bool {
        false
    }
}

/// Whether a timeline can serve another holder of its stream: its work is over, it has not failed
/// and has half of its values left.
#[must_use]
pub fn is_sound(timeline: &Timeline) -> bool {
    timeline.is_idle() && !timeline.failed(VALUE_LIMIT) && timeline.submitted() < VALUE_LIMIT / 2
}

/// Makes streams. May block on the driver.
pub type MakeStream<T> = Box<dyn Fn(&<T as PooledStream>::Key) -> Result<T> + Send + Sync>;

/// The streams that exist, including the retired ones.
struct Common<T> {
    retired: RetireList<T>,
    /// The timelines of the streams, and whether each stream has a holder.
    timelines: Mutex<Vec<(&'static Timeline, bool)>>,
}

impl<T: PooledStream> Common<T> {
    fn forget(&self, stream: T) {
        let id = stream.timeline().id();
        self.timelines.lock().retain(|(l, _)| l.id() != id);
        drop(stream);
    }

    fn set_held(&self, stream: &T, held: bool) {
        let id = stream.timeline().id();
        let mut timelines = self.timelines.lock();
        timelines.iter_mut().filter(|(l, _)| l.id() == id).for_each(|(_, h)| *h = held);
    }
}

struct Streams<T: PooledStream> {
    make: MakeStream<T>,
    common: Arc<Common<T>>,
    limit: u32,
}

impl<T: PooledStream> Streams<T> {
    fn check_room(&self, used: usize) -> Result<()> {
        let (used, limit) = (used as u64, u64::from(self.limit));
        if used < limit {
            return Ok(());
        }
        Err(Error::OverBudget { unit: Budgeted::Streams, requested: 1, used, limit })
    }
}

impl<T: PooledStream> Resource for Streams<T> {
    type Payload = T;
    type Request<'a> = T::Key;
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, key: &T::Key) -> Result<T> {
        let mut again = None;
        self.common.retired.drain(
            |s| s.timeline().is_idle(),
            |s| {
                if again.is_none() && s.is_sound() && s.key() == *key {
                    again = Some(s);
                } else {
                    self.common.forget(s);
                }
            },
        );
        if let Some(stream) = again {
            self.common.set_held(&stream, true);
            return Ok(stream);
        }
        let used = self.common.timelines.lock().len();
        self.check_room(used)?;
        let stream = (self.make)(key)?;
        // Another thread may have made a stream meanwhile.
        let mut timelines = self.common.timelines.lock();
        self.check_room(timelines.len())?;
        timelines.push((stream.timeline(), true));
        drop(timelines);
        Ok(stream)
    }

    fn fits(&self, idle: &mut T, key: &T::Key) -> bool {
        idle.key() == *key
    }

    fn recycle(&self, stream: &mut T) -> Recycle {
        let idle = stream.timeline().is_idle();
        if !idle {
            // A failure from now on is reported to no caller.
            self.common.set_held(stream, false);
        }
        if !stream.let_go() {
            return Recycle::Destroy;
        }
        if !idle {
            self.common.set_held(stream, true);
        }
        Recycle::Keep
    }

    fn destroy(&self, stream: T) {
        if stream.ends_at_once() {
            self.common.forget(stream);
        } else {
            self.common.set_held(&stream, false);
            self.common.retired.push(stream);
        }
    }
}

/// Owns the streams of a device or context.
pub struct StreamPool<T: PooledStream> {
    manager: PoolManager<Streams<T>, T::Key>,
    common: Arc<Common<T>>,
}

impl<T: PooledStream> StreamPool<T> {
    /// A pool of at most `limit` streams at a time, including the retired ones.
    ///
    /// # Errors
    /// `OutOfMemory`.
    pub fn new(limit: u32, make: MakeStream<T>) -> Result<Self> {
        let common =
            Arc::new(Common { retired: RetireList::new(), timelines: Mutex::new(Vec::new()) });
        let manager = PoolManager::new();
        manager.configure(
            Streams { make, common: common.clone(), limit },
            PoolConfig { block: 16, ..PoolConfig::default() },
        )?;
        Ok(Self { manager, common })
    }

    /// Acquires a stream: an idle one, or a new one.
    ///
    /// # Errors
    /// `OverBudget` beyond the limit of streams; `OutOfMemory` without free timelines; the
    /// driver's.
    pub fn acquire(&self, key: T::Key) -> Result<Lease<T>> {
        self.collect();
        self.manager.acquire(&key)
    }

    /// The pool's own stream with this property. The call makes the stream unless it is alive. The
    /// pool keeps the stream until its [release](Self::release).
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    #[doc(alias = "ensureAlive")]
    pub fn ensure_alive(&self, key: T::Key) -> Result<StreamHandle> {
        self.collect();
        self.manager.get_or_create(&key, &key).map(|stream| stream.handle())
    }

    /// Drops the pool's own lease on a stream. Other holders keep theirs. Never blocks: pending
    /// work continues.
    ///
    /// # Errors
    /// `StaleHandle` for a stream that the pool does not keep.
    pub fn release(&self, stream: StreamHandle) -> Result<()> {
        self.manager.release(stream)
    }

    /// Destroys retired streams that are idle and cannot be lent again. If none is retired, the
    /// call is one load.
    pub fn collect(&self) {
        self.common
            .retired
            .drain(|s| s.timeline().is_idle() && !s.is_sound(), |s| self.common.forget(s));
    }

    /// A lease on the handle's stream.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "getState")]
    pub fn get_state(&self, stream: StreamHandle) -> Result<Lease<T>> {
        self.manager.lease(stream)
    }

    /// Whether the handle's stream is alive: one load.
    pub fn is_alive(&self, stream: StreamHandle) -> bool {
        self.manager.is_alive(stream)
    }

    /// Destroys idle streams until at most `keep` are left. Returns the number of destroyed
    /// streams. May block briefly.
    pub fn trim(&self, keep: u64) -> u64 {
        let ended = self.manager.trim(keep);
        self.common.retired.drain(|s| s.timeline().is_idle(), |s| self.common.forget(s));
        ended
    }

    /// The number of streams that were dropped with pending work or after a failure, and still
    /// exist.
    pub fn retired(&self) -> usize {
        self.common.retired.len()
    }

    /// The timelines of all streams that exist.
    pub fn timelines(&self) -> Vec<&'static Timeline> {
        self.common.timelines.lock().iter().map(|&(timeline, _)| timeline).collect()
    }

    /// Whether the stream of a timeline has a holder. A failure of a stream without a holder is
    /// reported to no caller.
    pub fn is_held(&self, timeline: &Timeline) -> bool {
        self.common.timelines.lock().iter().any(|(l, held)| l.id() == timeline.id() && *held)
    }

    /// The number of streams with a holder beside the pool.
    pub fn in_use(&self) -> u64 {
        self.manager.in_use()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the pool down. Streams with pending work end without the pool.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.end_retired();
        Ok(())
    }

    fn end_retired(&self) {
        self.common.retired.take_all().into_iter().for_each(|s| self.common.forget(s));
    }
}

impl<T: PooledStream> Drop for StreamPool<T> {
    fn drop(&mut self) {
        self.end_retired();
    }
}

impl<T: PooledStream> fmt::Debug for StreamPool<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamPool")
            .field("streams", &self.manager.stats())
            .field("retired", &self.common.retired)
            .finish()
    }
}
