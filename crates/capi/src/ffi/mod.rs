//! The functions of the header `leasehold.h`, which documents them for C.
//!
//! This module translates between C types and the rest of the crate, and must not decide anything.
//!
//! # Rules for all functions
//! - No function panics, unwinds or aborts. A failure is a status, and
//!   [`leasehold_last_error`] has its text.
//! - Any thread may call any function at any time, but not from signal handlers and not from
//!   functions that a driver calls on a stream.
//! - A handle that names nothing is an error. A struct begins with its size, so that a caller that
//!   was compiled with an older header goes on to work.

mod block;
pub(crate) mod convert;
mod device;
mod error;
mod memory;
mod pool;

pub use block::*;
pub use device::*;
pub use error::*;
pub use memory::*;
pub use pool::*;

pub(crate) use device::{DEVICE_DEFAULTS, close, open, policy};
