//! The engine: execution of streams on a CUDA device, and the state that streams share.
//!
//! | module | content |
//! |---|---|
//! | [`context`] | a context and its entry: made current before, restored after; the first loss |
//! | [`shared`] | tables of all devices: signallers of timelines, waiting streams, ranges |
//! | [`core`] | the state that all streams of a context share |
//! | [`words`] | completion words in pinned memory |
//! | [`events`] | the pool of native events |
//! | [`stream`] | submission, completion, waiting |
//! | [`deferred`] | submissions that the host holds back, and how the engine resumes them |
//! | [`host`] | the host's part of completion: staging copies, keeps, timestamps |
//! | `staging_copy` | copies from pinned memory to the caller's memory |
//! | [`program`] | instantiated plans |
//! | [`watcher`] | threads for streams that no caller waits for |
//!
//! # Locks
//! A stream's lock is held across driver calls. Under a stream's lock, a thread takes only the
//! locks of [`shared`]'s tables and of the stream's queue of actions. No thread holds the locks of
//! two streams. User code (host calls, foreign calls, destructors of keeps) runs without any lock.
//!
//! This module must not know managers.

pub mod core;
pub mod deferred;
pub mod driver_context;
pub mod events;
pub mod host;
pub mod program;
pub mod shared;
mod staging_copy;
pub mod stream;
pub mod watcher;
pub mod words;
