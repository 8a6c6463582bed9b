//! Runtimes of devices, and waiting for points.

use super::convert::{answer, check_out, give, limit, list};
use super::operand::room;
use super::point::LeaseholdPoint;
use crate::device::DEVICES;
use crate::kinds::{HeldStream, OpenRuntime, RUNTIMES, STREAMS};
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::{Error, Result};
use std::ffi::{c_char, c_int};
use std::time::Duration;

/// The device has graphs.
pub const LEASEHOLD_FEATURE_GRAPHS: u32 = 1;
/// Streams run functions of the host.
pub const LEASEHOLD_FEATURE_HOST_CALLS: u32 = 2;
/// Streams run library calls that take the native stream.
pub const LEASEHOLD_FEATURE_FOREIGN_CALLS: u32 = 4;
/// Streams wait for host timelines.
pub const LEASEHOLD_FEATURE_HOST_TIMELINES: u32 = 8;
/// Events keep times.
pub const LEASEHOLD_FEATURE_TIMESTAMPS: u32 = 16;
/// The host reads and writes device memory at its address.
pub const LEASEHOLD_FEATURE_HOST_VISIBLE: u32 = 32;

/// A runtime.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdRuntimeInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// Bytes of buffers that are held.
    pub allocated_bytes: u64,
    /// Bytes that the runtime's allocator took from the driver.
    pub reserved_bytes: u64,
    /// `LEASEHOLD_FEATURE_*`.
    pub features: u32,
    /// Threads of a block at most.
    pub block_threads: u32,
    /// Bytes of shared memory of a block at most.
    pub shared_bytes: u32,
    /// 0.
    pub reserved: u32,
    /// The device, as `cuda:0`.
    pub device: [c_char; 32],
}

/// Opens the runtime of a device.
///
/// # Safety
/// - `runtime` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_runtime_open(device: u64, runtime: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(runtime, "the runtime's place")?;
        let opened = RUNTIMES.add(OpenRuntime::new(&DEVICES.get(device)?)?)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(runtime, opened, "the runtime's place") }
    })
}

/// Waits for all work of a runtime's device, and closes the runtime.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_runtime_close(runtime: u64, timeout_ns: u64) -> c_int {
    ffi_guard_release(|| {
        let open = RUNTIMES.get(runtime)?;
        let over = wait_for_device(&open, timeout_ns);
        if let Err(Error::Timeout(_)) = over {
            return over;
        }
        // The device is idle. This writes a trace that the environment asked for.
        let closed = open.runtime.clone().close(Duration::ZERO);
        drop(open);
        RUNTIMES.release(runtime).and(over).and(closed)
    })
}

/// Waits for all work of a device, and lets go of what only waited for that.
fn wait_for_device(open: &OpenRuntime, timeout_ns: u64) -> Result<()> {
    let over = match limit(timeout_ns) {
        Some(limit) => open.runtime.synchronize_timeout(limit),
        None => open.runtime.synchronize(),
    };
    open.runtime.allocator().drain();
    over
}

/// Blocks until all work of all streams of a runtime is over.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_runtime_synchronize(runtime: u64, timeout_ns: u64) -> c_int {
    ffi_guard(|| wait_for_device(&*RUNTIMES.get(runtime)?, timeout_ns))
}

/// Describes a runtime.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_runtime_describe(
    runtime: u64,
    info: *mut LeaseholdRuntimeInfo,
) -> c_int {
    ffi_guard(|| {
        let open = RUNTIMES.get(runtime)?;
        let (about, stats) = (open.runtime.raw_device(), open.runtime.allocator().stats());
        let mut device = [0; 32];
        let name = open.runtime.device().to_string();
        // The last byte stays 0.
        device.iter_mut().zip(name.bytes().take(31)).for_each(|(to, byte)| *to = byte as c_char);
        let caps = about.caps();
        let features = [
            (caps.graphs, LEASEHOLD_FEATURE_GRAPHS),
            (caps.host_calls, LEASEHOLD_FEATURE_HOST_CALLS),
            (caps.foreign_calls, LEASEHOLD_FEATURE_FOREIGN_CALLS),
            (caps.host_timelines, LEASEHOLD_FEATURE_HOST_TIMELINES),
            (caps.timestamps, LEASEHOLD_FEATURE_TIMESTAMPS),
            (caps.host_visible, LEASEHOLD_FEATURE_HOST_VISIBLE),
        ];
        let found = LeaseholdRuntimeInfo {
            size: 0,
            allocated_bytes: stats.live,
            reserved_bytes: stats.reserved,
            features: features.iter().filter(|f| f.0).map(|f| f.1).sum(),
            block_threads: about.limits().block_threads,
            shared_bytes: about.limits().shared,
            reserved: 0,
            device,
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// The device's default stream.
///
/// # Safety
/// - `stream` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_runtime_stream(runtime: u64, stream: *mut u64) -> c_int {
    ffi_guard(|| {
        check_out(stream, "the stream's place")?;
        let held = HeldStream::live(RUNTIMES.get(runtime)?.runtime.stream());
        // SAFETY: the caller says that it can be written.
        unsafe { give(stream, STREAMS.add(held)?, "the stream's place") }
    })
}

/// Blocks until points are over.
///
/// # Safety
/// - `points` is null, or points to `count` points.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_wait_all(
    runtime: u64,
    points: *const LeaseholdPoint,
    count: usize,
    timeout_ns: u64,
) -> c_int {
    ffi_guard(|| {
        let open = RUNTIMES.get(runtime)?;
        // SAFETY: the caller vouches for the list.
        let given = unsafe { list(points, count, "points")? };
        let mut checked = room(count)?;
        for point in given {
            checked.push(point.check()?);
        }
        let mut pending = room(count)?;
        pending.extend(checked.iter().filter_map(|checked| checked.point));
        match limit(timeout_ns) {
            Some(limit) => open.runtime.wait_for_timeout(pending, limit),
            None => open.runtime.wait_for(pending),
        }
    })
}

/// Blocks until one of several points is over, and says which.
///
/// # Safety
/// - `points` is null, or points to `count` points; `which` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_wait_any(
    runtime: u64,
    points: *const LeaseholdPoint,
    count: usize,
    timeout_ns: u64,
    which: *mut usize,
) -> c_int {
    ffi_guard(|| {
        check_out(which, "the place of the answer")?;
        let open = RUNTIMES.get(runtime)?;
        // SAFETY: the caller vouches for the list.
        let given = unsafe { list(points, count, "points")? };
        let mut checked = room(count)?;
        for point in given {
            checked.push(point.check()?);
        }
        let over = checked.iter().position(|checked| checked.point.is_none());
        let mut pending = room(count)?;
        pending.extend(checked.iter().filter_map(|checked| checked.point));
        let limit = limit(timeout_ns).unwrap_or(Duration::MAX);
        let found = match over {
            Some(at) => at,
            None => open.runtime.wait_for_any(&pending, limit)?,
        };
        // SAFETY: the caller says that it can be written.
        unsafe { give(which, found, "the place of the answer") }
    })
}
