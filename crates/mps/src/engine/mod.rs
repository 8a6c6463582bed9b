//! The execution of work: streams over the command queues, and graphs.
//!
//! - [`core`]: the state that all streams of a device share.
//! - [`stream`]: a stream: an open command buffer, its encoder, and the policy of commits.
//! - `in_flight`: the command buffers of a stream that were committed, in their order.
//! - `outcome`: the outcomes of command buffers, and what the host does for those that fail.
//! - `permit`, `room`: the bound of uncompleted command buffers of a queue.
//! - `host`: the host's part of operations.
//! - `program`: instantiated plans, encoded anew for each launch.
//! - `samples`: timestamps of the device.
//!
//! The engine that all backends share gives the operations, holds back what waits for the host, and
//! publishes values.
//!
//! This module must not know the traits of `hal`'s devices.

pub mod core;
pub(crate) mod host;
pub(crate) mod in_flight;
pub(crate) mod outcome;
pub(crate) mod permit;
pub(crate) mod program;
pub(crate) mod room;
pub(crate) mod samples;
pub mod stream;
