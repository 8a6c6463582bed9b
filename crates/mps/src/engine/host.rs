//! The host's part of operations: bytes to copy on, timestamps to read, memory to give back.
//!
//! This module must not know when a host part is due.

use super::core::Core;
use leasehold_alloc::Buffer;
use leasehold_core::{Lease, UniqueLease, host_copy};
use leasehold_hal::engine::payload::graph_of;
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::op::KeepAlive;
use leasehold_hal::{GraphExec, TimestampQuery};

/// The host's part of an operation.
pub enum HostAction {
    /// Staging memory that an upload read.
    Uploaded(UniqueLease<Buffer>),
    /// Bytes to copy from staging memory to their destination.
    CopyOut {
        /// The staging memory with the bytes.
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
    pub(crate) fn run(self, core: &Core, sound: bool) {
        match self {
            HostAction::Uploaded(staging) => drop(staging),
            HostAction::CopyOut { staging, dst, bytes, keep } => {
                if sound {
                    // SAFETY: the device is done with the copy into the staging memory. The
                    // submitter vouches for the destination until the value is over, and the value
                    // is published after this.
                    unsafe { copy_out(&staging, dst, bytes) };
                }
                drop((staging, keep));
            }
            HostAction::Timestamp(timestamp) => {
                if sound {
                    written(core, &timestamp);
                }
            }
            HostAction::Graph { exec, segment } => {
                if sound {
                    // SAFETY: graphs of a submission belong to this device (the submitter's
                    // promise).
                    unsafe { graph_of::<super::stream::MpsStream>(&exec) }
                        .finish_host_part(core, segment);
                }
            }
        }
    }
}

/// Reads the time of a timestamp whose pass is over. A sample that failed leaves none.
pub(crate) fn written(core: &Core, timestamp: &TimestampQuery) {
    if let Some(time) = core.samples.time(timestamp.native()) {
        timestamp.set(time);
    }
}

/// Copies bytes to staging memory.
///
/// # Safety
/// - `src` may be read, and no thread writes it meanwhile.
/// - `staging` has at least `bytes` bytes, and no work uses them.
pub(crate) unsafe fn stage(src: *const u8, staging: &Buffer, bytes: u64) {
    let to = std::ptr::with_exposed_provenance_mut::<u8>(staging.addr() as usize);
    // SAFETY: staging memory is shared storage, whose address is the host's. The caller vouches for
    // both sides.
    unsafe { host_copy::copy(src, to, bytes as usize) };
}

/// Copies bytes from staging memory to their destination.
///
/// # Safety
/// - `staging` has at least `bytes` bytes, which the device has written and is done with.
/// - `dst` may be written, and no other thread uses it meanwhile.
pub(crate) unsafe fn copy_out(staging: &Buffer, dst: HostAddress, bytes: u64) {
    let from = std::ptr::with_exposed_provenance::<u8>(staging.addr() as usize);
    // SAFETY: staging memory is shared storage, whose address is the host's. The caller vouches for
    // both sides.
    unsafe { host_copy::copy(from, dst.0, bytes as usize) };
}
