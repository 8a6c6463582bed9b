//! Streams: queues with a timeline, recycled with their worker.
//!
//! If a stream without a holder is idle and has not failed, its queue and its sleeping worker serve
//! the next request. A stream with pending work goes to the retire list, and serves again once its
//! work is over. A failed stream is destroyed.
//!
//! This module must not know what streams run.

use super::host_timeline::HostTimelineWaits;
use crate::driver::pool::TilePool;
use crate::driver::queue::Queue;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result,
    RetireList, Tagged, Timeline, VALUE_LIMIT, tags,
};
use std::fmt;
use std::marker::PhantomPinned;

/// A stream: its queue.
pub struct StreamState {
    pub(crate) queue: Queue,
    waits: Arc<HostTimelineWaits>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl StreamState {
    /// The stream's timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.queue.timeline()
    }

    pub(crate) fn waits(&self) -> &HostTimelineWaits {
        &self.waits
    }

    /// Whether the pool can lend the stream again.
    fn is_sound(&self) -> bool {
        let timeline = self.timeline();
        timeline.is_idle()
            && !timeline.failed(VALUE_LIMIT)
            && timeline.submitted() < VALUE_LIMIT / 2
    }
}

impl Tagged for StreamState {
    type Tag = tags::Stream;
}

impl fmt::Debug for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamState({:?})", self.timeline())
    }
}

struct Common {
    retired: RetireList<StreamState>,
    /// The timelines of all streams that exist, including the retired ones, and whether each stream
    /// has a holder.
    timelines: Mutex<Vec<(&'static Timeline, bool)>>,
}

impl Common {
    fn forget(&self, stream: StreamState) {
        let id = stream.timeline().id();
        self.timelines.lock().retain(|(l, _)| l.id() != id);
        drop(stream);
    }
}

struct Streams {
    pool: Arc<TilePool>,
    waits: Arc<HostTimelineWaits>,
    common: Arc<Common>,
    limit: u32,
}

impl Resource for Streams {
    type Payload = StreamState;
    type Request<'a> = ();
    const NAME: &'static str = "stream";

    fn create(&self, _: Handle<tags::Stream>, (): &()) -> Result<StreamState> {
        let mut again = None;
        self.common.retired.drain(
            |s| s.timeline().is_idle(),
            |s| {
                if again.is_none() && s.is_sound() {
                    again = Some(s);
                } else {
                    self.common.forget(s);
                }
            },
        );
        if let Some(stream) = again {
            return Ok(stream);
        }
        let room = |used: usize| match used as u64 {
            used if used < u64::from(self.limit) => Ok(()),
            used => Err(Error::OverBudget {
                unit: leasehold_core::Budgeted::Streams,
                requested: 1,
                used,
                limit: u64::from(self.limit),
            }),
        };
        room(self.common.timelines.lock().len())?;
        let stream = StreamState {
            queue: Queue::new(self.pool.clone())?,
            waits: self.waits.clone(),
            _place: PhantomPinned,
        };
        // Another thread may have made a stream meanwhile.
        let mut timelines = self.common.timelines.lock();
        room(timelines.len())?;
        timelines.push((stream.timeline(), true));
        drop(timelines);
        Ok(stream)
    }

    fn recycle(&self, stream: &mut StreamState) -> Recycle {
        if stream.is_sound() { Recycle::Keep } else { Recycle::Destroy }
    }

    fn destroy(&self, stream: StreamState) {
        let id = stream.timeline().id();
        self.common
            .timelines
            .lock()
            .iter_mut()
            .filter(|(l, _)| l.id() == id)
            .for_each(|(_, held)| *held = false);
        // Ending a worker may block briefly, and work may be pending.
        self.common.retired.push(stream);
    }
}

/// Owns the streams of a device.
pub struct StreamManager {
    manager: PoolManager<Streams>,
    common: Arc<Common>,
    pool: Arc<TilePool>,
}

impl StreamManager {
    pub(crate) fn new(
        pool: Arc<TilePool>,
        waits: Arc<HostTimelineWaits>,
        limit: u32,
    ) -> Result<Self> {
        let common =
            Arc::new(Common { retired: RetireList::new(), timelines: Mutex::new(Vec::new()) });
        let manager = PoolManager::new();
        manager.configure(
            Streams { pool: pool.clone(), waits, common: common.clone(), limit },
            PoolConfig { block: 16, ..PoolConfig::default() },
        )?;
        Ok(Self { manager, common, pool })
    }

    /// Acquires a stream: an idle one, or a new one.
    ///
    /// # Errors
    /// `OverBudget` beyond the limit of streams; `OutOfMemory` without free timelines.
    pub fn acquire(&self) -> Result<Lease<StreamState>> {
        self.collect();
        self.manager.acquire(&())
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
    pub fn lease(&self, stream: Handle<tags::Stream>) -> Result<Lease<StreamState>> {
        self.manager.lease(stream)
    }

    /// Whether the handle's stream is alive: one load.
    pub fn is_alive(&self, stream: Handle<tags::Stream>) -> bool {
        self.manager.is_alive(stream)
    }

    /// Destroys idle streams and ends their workers until at most `keep` are left. Returns the
    /// number of destroyed streams. May block briefly.
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

    /// The timelines of all streams that exist, and whether each stream has a holder.
    pub fn timelines(&self) -> Vec<(&'static Timeline, bool)> {
        self.common.timelines.lock().clone()
    }

    /// Checks that this process is the one that opened the device.
    ///
    /// # Errors
    /// `InvalidState` in a forked child of that process.
    pub fn check_process(&self) -> Result<()> {
        self.pool.check_process()
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down. Streams with pending work finish it without the manager.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()?;
        self.common.retired.take_all().into_iter().for_each(|s| self.common.forget(s));
        Ok(())
    }
}

impl fmt::Debug for StreamManager {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("StreamManager")
            .field("streams", &self.manager)
            .field("retired", &self.common.retired)
            .finish()
    }
}
