//! Streams: queues with a timeline, recycled with their worker.
//!
//! If a stream without a holder is idle and has not failed, its queue and its sleeping worker serve
//! the next request. A stream with pending work goes to the retire list, because the end of a
//! worker may block briefly.
//!
//! This module must not know what streams run.

use crate::driver::pool::TilePool;
use crate::driver::queue::Queue;
use leasehold_core::sync::Arc;
use leasehold_core::{Result, Tagged, Timeline, tags};
use leasehold_hal::engine::stream_pool::{PooledStream, StreamPool};
use std::fmt;
use std::marker::PhantomPinned;

/// A stream: its queue.
pub struct StreamState {
    pub(crate) queue: Queue,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl StreamState {
    /// The stream's timeline.
    #[inline]
    pub fn timeline(&self) -> &'static Timeline {
        self.queue.timeline()
    }
}

impl Tagged for StreamState {
    type Tag = tags::Stream;
}

impl PooledStream for StreamState {
    type Key = ();

    fn key(&self) {}

    fn timeline(&self) -> &'static Timeline {
        Self::timeline(self)
    }
}

impl fmt::Debug for StreamState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "StreamState({:?})", self.timeline())
    }
}

/// Owns the streams of a device.
pub type StreamManager = StreamPool<StreamState>;

/// A manager of at most `limit` streams.
pub(crate) fn manager(pool: Arc<TilePool>, limit: u32) -> Result<StreamManager> {
    let make =
        move |(): &()| Ok(StreamState { queue: Queue::new(pool.clone())?, _place: PhantomPinned });
    StreamPool::new(limit, Box::new(make))
}
