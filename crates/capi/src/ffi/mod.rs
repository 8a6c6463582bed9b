//! The functions of the headers `leasehold.h` and `leasehold_runtime.h`, which document them for C.
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
mod buffer;
mod call;
mod comm;
pub(crate) mod convert;
mod device;
mod error;
mod event;
mod graph;
mod kernel;
mod memory;
mod operand;
mod point;
mod pool;
mod runtime;
mod share;
mod stream;
mod timeline;
mod trace;
mod transfer;
mod world;

pub use crate::callback::LeaseholdRelease;
pub use block::*;
pub use buffer::*;
pub use call::*;
pub use comm::*;
pub use device::*;
pub use error::*;
pub use event::*;
pub use graph::*;
pub use kernel::*;
pub use memory::*;
pub use operand::*;
pub use point::*;
pub use pool::*;
pub use runtime::*;
pub use share::*;
pub use stream::*;
pub use timeline::*;
pub use trace::*;
pub use transfer::*;
pub use world::*;

pub(crate) use device::{DEVICE_DEFAULTS, close, open, policy};
