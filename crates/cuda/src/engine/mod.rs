//! The CUDA part of execution: the driver's streams for `leasehold_hal::engine`, and the state that
//! streams share.
//!
//! | module | content |
//! |---|---|
//! | [`driver_context`] | a context and its entry, made current and restored; the first loss |
//! | [`shared`] | tables of all devices: ranges, grants, names of functions |
//! | [`core`] | the state that all streams of a context share |
//! | [`condition`] | the kernel that sets a condition of a graph |
//! | [`words`] | completion words in pinned memory |
//! | [`events`] | the pool of native events |
//! | [`stream`] | a stream of the driver |
//! | [`external`] | streams of other libraries, whose submissions this backend does not see |
//! | [`host`] | the host's part of operations: bytes to copy on, timestamps |
//! | [`program`] | instantiated plans |
//!
//! This module must not know managers.

pub mod condition;
pub mod core;
pub mod driver_context;
pub mod events;
pub mod external;
pub mod host;
pub mod program;
pub mod shared;
pub mod stream;
pub mod words;
