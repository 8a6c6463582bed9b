//! The engine: what a stream is on this device, and what streams share.
//!
//! | module | what |
//! |---|---|
//! | [`door`] | a context and the way into it: made current before, restored after; the first loss |
//! | [`shared`] | what all devices of a backend share: who advances which line, who waits for what, whose memory an address is |
//! | [`core`] | what all streams of a context share |
//! | [`words`] | completion words in pinned memory |
//! | [`events`] | the pool of native events |
//! | [`stream`] | submission, completion, waiting |
//! | [`deferred`] | what the host holds back, and how it goes on |
//! | [`host`] | the host's part of completion: landings, keeps, time stamps |
//! | `landing` | copies from pinned memory to where the caller wants the bytes |
//! | [`program`] | instantiated plans |
//! | [`watcher`] | the threads that do what nobody waits for |
//!
//! # Locks
//! A stream's lock is held across driver calls and is a leaf but for the tables of [`shared`] and the stream's own queue of the host's part.
//! Never are two streams' locks held. User code (host calls, foreign calls, destructors of keeps) runs without any lock.
//!
//! This module must not know managers.

pub mod core;
pub mod deferred;
pub mod door;
pub mod events;
pub mod host;
mod landing;
pub mod program;
pub mod shared;
pub mod stream;
pub mod watcher;
pub mod words;
