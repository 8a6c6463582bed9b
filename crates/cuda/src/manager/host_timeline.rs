//! Host timelines: timelines that the host signals. A host timeline uses no object of the driver.
//!
//! This module must not know how streams wait.

use crate::engine::stream::CudaStream;
use leasehold_hal::engine::host_timeline as shared;
use leasehold_hal::engine::tables::Tables;

/// A host timeline.
pub type HostTimelineState = shared::HostTimelineState<Tables<CudaStream>>;

/// Owns the host timelines of a context.
pub type HostTimelineManager = shared::HostTimelineManager<Tables<CudaStream>>;
