//! Conversions of flags and kinds to the driver's numbers. [`codes`](crate::driver::codes) has the
//! result codes. No other module translates the driver's numbers.
//!
//! This module must not call the driver.

use crate::driver::ops::{CaptureMode, CopyKind, EventFlags, HostFlags, SourceOrder};
use cudarc::driver::sys;
use leasehold_core::{Error, Result};
use leasehold_hal::ConditionalKind;

/// `CUevent_flags`.
#[must_use]
pub fn event_flags(flags: EventFlags) -> u32 {
    let blocking =
        if flags.blocking { sys::CUevent_flags::CU_EVENT_BLOCKING_SYNC as u32 } else { 0 };
    let timing = if flags.timing { 0 } else { sys::CUevent_flags::CU_EVENT_DISABLE_TIMING as u32 };
    blocking | timing
}

/// Flags of `cuMemHostAlloc`: portable and mapped, so that every context reaches the memory at the
/// same address.
#[must_use]
pub fn host_flags(flags: HostFlags) -> u32 {
    const PORTABLE: u32 = 1;
    const DEVICEMAP: u32 = 2;
    const WRITECOMBINED: u32 = 4;
    PORTABLE | DEVICEMAP | if flags.write_combined { WRITECOMBINED } else { 0 }
}

/// Flags of `cuMemHostRegister`: portable and mapped.
pub const REGISTER_FLAGS: u32 = 3;

/// The memory types of a copy: source, destination.
#[must_use]
pub fn memory_types(kind: CopyKind) -> (sys::CUmemorytype, sys::CUmemorytype) {
    use sys::CUmemorytype::{CU_MEMORYTYPE_DEVICE as DEVICE, CU_MEMORYTYPE_HOST as HOST};
    match kind {
        CopyKind::HostToDevice => (HOST, DEVICE),
        CopyKind::DeviceToHost => (DEVICE, HOST),
        CopyKind::DeviceToDevice => (DEVICE, DEVICE),
    }
}

/// The attributes of all copies of a batch. Locations are hints for managed memory alone.
#[must_use]
pub fn batch_attributes(order: SourceOrder) -> sys::CUmemcpyAttributes {
    use sys::CUmemcpySrcAccessOrder as Native;
    let nowhere =
        sys::CUmemLocation { type_: sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_INVALID, id: 0 };
    sys::CUmemcpyAttributes {
        srcAccessOrder: match order {
            SourceOrder::Stream => Native::CU_MEMCPY_SRC_ACCESS_ORDER_STREAM,
            SourceOrder::Any => Native::CU_MEMCPY_SRC_ACCESS_ORDER_ANY,
        },
        srcLocHint: nowhere,
        dstLocHint: nowhere,
        flags: 0,
    }
}

/// The driver's kind of a conditional node.
///
/// # Errors
/// `Unsupported` for a kind that this backend does not know.
pub fn conditional(kind: ConditionalKind) -> Result<sys::CUgraphConditionalNodeType> {
    match kind {
        ConditionalKind::If => Ok(sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_IF),
        ConditionalKind::While => Ok(sys::CUgraphConditionalNodeType::CU_GRAPH_COND_TYPE_WHILE),
        other => Err(Error::Unsupported(format!("a {} in a CUDA graph", other.name()).into())),
    }
}

/// The driver's number of a capture mode.
pub fn capture_mode(mode: CaptureMode) -> u32 {
    use sys::CUstreamCaptureMode_enum as Native;
    (match mode {
        CaptureMode::Global => Native::CU_STREAM_CAPTURE_MODE_GLOBAL,
        CaptureMode::ThreadLocal => Native::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL,
        CaptureMode::Relaxed => Native::CU_STREAM_CAPTURE_MODE_RELAXED,
    }) as u32
}

/// The capture mode of a number of the driver's.
pub fn capture_mode_of(number: u32) -> Option<CaptureMode> {
    [CaptureMode::Global, CaptureMode::ThreadLocal, CaptureMode::Relaxed]
        .into_iter()
        .find(|&mode| capture_mode(mode) == number)
}
