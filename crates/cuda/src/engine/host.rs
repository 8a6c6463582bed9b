//! The host's part of operations: bytes to copy on, timestamps to mark as written, graphs that ran.
//!
//! This module must not know when a host part is due.

use super::program::Program;
use crate::driver::ops::CudaSlowOps;
use leasehold_alloc::Buffer;
use leasehold_core::{Lease, UniqueLease, host_copy};
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::op::KeepAlive;
use leasehold_hal::{GraphExec, TimestampQuery};

/// The host's part of an operation.
pub enum HostAction {
    /// Bytes to copy from pinned memory to their destination.
    CopyOut {
        /// The pinned memory with the bytes.
        staging: UniqueLease<Buffer>,
        /// The destination.
        dst: HostAddress,
        /// The number of bytes.
        bytes: u64,
        /// Keeps the destination alive.
        keep: Option<KeepAlive>,
    },
    /// A timestamp, which the device has written by now.
    Timestamp(Lease<TimestampQuery>),
    /// A segment of a graph that ran.
    Graph {
        /// The graph.
        exec: Lease<dyn GraphExec>,
        /// The segment's number.
        segment: u32,
    },
}

impl HostAction {
    /// Runs the action. Unless the stream is sound, only resources are given back.
    pub(crate) fn run(self, sound: bool, ops: &dyn CudaSlowOps) {
        match self {
            HostAction::CopyOut { staging, dst, bytes, keep } => {
                if sound {
                    // SAFETY: the device is done with the copy. The submitter vouches for the
                    // destination until the value is over, and the value is published after this.
                    unsafe { copy_out(&staging, dst, bytes, ops) };
                }
                drop(keep);
            }
            HostAction::Timestamp(timestamp) => {
                if sound {
                    timestamp.set(1);
                }
            }
            HostAction::Graph { exec, segment } => {
                if sound {
                    // SAFETY: graphs of a submission belong to this device (the submitter's
                    // promise), so `native` is the address of a program.
                    unsafe { Program::of(&exec) }.finish_host_part(segment, ops);
                }
            }
        }
    }
}

/// Copies bytes from pinned memory to their destination.
///
/// # Safety
/// - `staging` is pinned memory of at least `bytes` bytes, which the device has written and is done
///   with.
/// - `dst` may be written, and no other thread uses it meanwhile.
pub(crate) unsafe fn copy_out(
    staging: &UniqueLease<Buffer>,
    dst: HostAddress,
    bytes: u64,
    ops: &dyn CudaSlowOps,
) {
    ops.host_access(staging.addr(), bytes, false);
    // SAFETY: the caller vouches for both sides, which are `bytes` long.
    unsafe { host_copy::copy(staging.addr() as *const u8, dst.0, bytes as usize) };
}
