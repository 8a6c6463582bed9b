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

use crate::device::{DEVICES, Device, POOLS, Settings};
use crate::extend;
use crate::pool::Pool;
use crate::status::{self, ffi_guard, ffi_guard_release};
use leasehold::{Context, Error, Name, Result};
use leasehold_alloc::{BlockState, Policy};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, Condvar, Mutex};
use std::ffi::{CStr, CString, c_char, c_int, c_void};
use std::mem::size_of;
use std::time::Instant;

/// Free granules are moved while that is rare.
pub const LEASEHOLD_POLICY_BALANCED: u32 = 0;
/// Free granules are moved only if there is no other memory.
pub const LEASEHOLD_POLICY_FASTEST: u32 = 1;
/// Free granules are always moved.
pub const LEASEHOLD_POLICY_COMPACT: u32 = 2;
/// Other processes may map blocks of the device's main memory.
pub const LEASEHOLD_DEVICE_SHAREABLE: u32 = 1;
/// Bytes of the description of an exported block.
pub const LEASEHOLD_SHARED_BYTES: usize = 128;
/// The pool can be suspended.
pub const LEASEHOLD_POOL_SUSPENDABLE: u32 = 1;
/// Memory under free blocks of the pool may be moved and taken back: no captured graph uses it.
pub const LEASEHOLD_POOL_MOVABLE: u32 = 2;
/// The contents are kept in pinned host memory.
pub const LEASEHOLD_SUSPEND_KEEP: u32 = 1;
/// The version of the ABI: a function or field more is a higher number.
pub const LEASEHOLD_ABI_VERSION: u32 = 2;

/// The settings of a device's memory.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdDeviceOptions {
    /// `sizeof` this struct.
    pub size: usize,
    /// The most bytes that all pools together take from the driver; 0 for no limit.
    pub budget: u64,
    /// When free granules are moved: `LEASEHOLD_POLICY_*`.
    pub policy: u32,
    /// Events that snapshots remember, for each pool; 0 for none.
    pub trace_events: u32,
    /// `LEASEHOLD_DEVICE_*`.
    pub flags: u32,
}

/// The settings of a pool.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdPoolOptions {
    /// `sizeof` this struct.
    pub size: usize,
    /// The pool's name in reports, or null.
    pub name: *const c_char,
    /// `LEASEHOLD_POLICY_*`.
    pub policy: u32,
    /// `LEASEHOLD_POOL_*`.
    pub flags: u32,
}

/// A device.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdDeviceInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// Bytes of the device's memory.
    pub total_bytes: u64,
    /// Bytes that no process uses.
    pub free_bytes: u64,
    /// Streams of the caller that are known here.
    pub streams: u64,
    /// The product's name.
    pub name: [c_char; 128],
}

/// Numbers about a device's memory, all pools together. Bytes of blocks are as asked for.
#[repr(C)]
#[derive(Debug, Clone, Copy, Default)]
pub struct LeaseholdStats {
    /// `sizeof` this struct.
    pub size: usize,
    /// Bytes of blocks that the caller holds.
    pub allocated_bytes: u64,
    /// The most that they were.
    pub allocated_bytes_peak: u64,
    /// Bytes of all blocks that the caller ever got.
    pub allocated_bytes_total: u64,
    /// Bytes of all blocks that the caller freed.
    pub freed_bytes_total: u64,
    /// Blocks that the caller holds.
    pub blocks: u64,
    /// The most that they were.
    pub blocks_peak: u64,
    /// Blocks that the caller ever got.
    pub allocations: u64,
    /// Blocks that the caller freed.
    pub frees: u64,
    /// Bytes taken from the driver.
    pub reserved_bytes: u64,
    /// The most that they were.
    pub reserved_bytes_peak: u64,
    /// The budget; the largest number for none.
    pub budget_bytes: u64,
    /// Free bytes that every stream can have.
    pub free_ready_bytes: u64,
    /// Free bytes that a stream may still use.
    pub free_pending_bytes: u64,
    /// Free bytes in thread caches and slabs.
    pub free_cached_bytes: u64,
    /// Physical memory in hand that is mapped nowhere.
    pub unmapped_bytes: u64,
    /// Allocations that were tried again after pools gave memory back.
    pub retries: u64,
    /// Allocations that failed.
    pub failures: u64,
    /// Times that memory was taken from the driver.
    pub growths: u64,
    /// Times that free granules were moved.
    pub remaps: u64,
    /// Waits of the host for a stream.
    pub host_waits: u64,
    /// Waits of a stream for another one's memory.
    pub stream_waits: u64,
    /// Calls of the driver for memory.
    pub driver_calls: u64,
    /// Pools, the main memory included.
    pub pools: u64,
    /// Bytes of host memory for tables.
    pub metadata_bytes: u64,
}

/// The caller holds the block.
pub const LEASEHOLD_BLOCK_LIVE: u32 = 0;
/// The block is free for every stream.
pub const LEASEHOLD_BLOCK_FREE: u32 = 1;
/// The block is free, and a stream may still use it.
pub const LEASEHOLD_BLOCK_PENDING: u32 = 2;
/// The block is free in a thread cache, or on its way there.
pub const LEASEHOLD_BLOCK_CACHED: u32 = 3;
/// The block is neither: it is being moved, is held back or was lost.
pub const LEASEHOLD_BLOCK_OTHER: u32 = 4;

/// A block of a device's memory, in a walk over all of it.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdBlock {
    /// `sizeof` this struct.
    pub size: usize,
    /// The pool, or 0 for the main memory.
    pub pool: u64,
    /// The first address of the range with memory that the block lies in.
    pub segment_address: u64,
    /// Bytes of that range.
    pub segment_bytes: u64,
    /// The block's first address.
    pub address: u64,
    /// The block's bytes, rounding included.
    pub bytes: u64,
    /// Bytes as asked for; 0 unless the block is live.
    pub requested_bytes: u64,
    /// The stream that it was allocated on or that may still use it; 0 if unknown.
    pub stream: usize,
    /// `LEASEHOLD_BLOCK_*`.
    pub state: u32,
    /// 1 if the segment is made of granules that are mapped one by one.
    pub expandable: u32,
}

/// Says whether allocations on a stream go to a pool. Any thread may call it.
pub type LeaseholdFilter = unsafe extern "C" fn(context: *mut c_void, stream: usize) -> c_int;
/// Is called with each block.
pub type LeaseholdVisitor =
    unsafe extern "C" fn(context: *mut c_void, block: *const LeaseholdBlock);

// ---- helpers

/// Reads a text of the caller's.
///
/// # Safety
/// - `text` is null or a C string that lives as long as the result.
pub(crate) unsafe fn text<'a>(text: *const c_char, what: &str) -> Result<&'a str> {
    if text.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller vouches for the C string.
    let text = unsafe { CStr::from_ptr(text) };
    text.to_str().map_err(|_| Error::invalid(format!("{what} is no UTF-8")))
}

pub(crate) fn policy(number: u32) -> Result<Policy> {
    match number {
        LEASEHOLD_POLICY_BALANCED => Ok(Policy::Balanced),
        LEASEHOLD_POLICY_FASTEST => Ok(Policy::Fastest),
        LEASEHOLD_POLICY_COMPACT => Ok(Policy::Compact),
        other => Err(Error::invalid(format!("{other} is no policy"))),
    }
}

/// Reads a struct of the caller's, which may be shorter than today's. `default` fills the rest.
///
/// # Safety
/// - `from` is null, or points to a struct that begins with its size.
pub(crate) unsafe fn options<T: Copy>(from: *const T, default: T, what: &str) -> Result<T> {
    if from.is_null() {
        return Ok(default);
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { from.cast::<usize>().read() };
    if size < size_of::<usize>() * 2 {
        return Err(Error::invalid(format!("{what}: a size of {size} bytes")));
    }
    let mut read = default;
    // SAFETY: the caller's struct has `size` bytes, and this one as many as its type.
    unsafe {
        std::ptr::copy_nonoverlapping(
            from.cast::<u8>(),
            (&raw mut read).cast::<u8>(),
            size.min(size_of::<T>()),
        );
    }
    Ok(read)
}

/// Writes a struct to the caller's, which may be shorter than today's. Its size field stays.
///
/// # Safety
/// - `to` is null, or points to a struct that begins with its size and can be written.
unsafe fn answer<T: Copy>(to: *mut T, value: &T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the struct begins with its size.
    let size = unsafe { to.cast::<usize>().read() };
    let head = size_of::<usize>();
    if size < head * 2 {
        return Err(Error::invalid(format!("{what}: a size of {size} bytes")));
    }
    // SAFETY: the caller's struct has `size` bytes, and this one as many as its type.
    unsafe {
        std::ptr::copy_nonoverlapping(
            std::ptr::from_ref(value).cast::<u8>().add(head),
            to.cast::<u8>().add(head),
            size.min(size_of::<T>()) - head,
        );
    }
    Ok(())
}

/// Writes an answer through a pointer.
///
/// # Safety
/// - `to` is null or can be written.
pub(crate) unsafe fn give<T>(to: *mut T, value: T, what: &str) -> Result<()> {
    if to.is_null() {
        return Err(Error::invalid(format!("{what} is null")));
    }
    // SAFETY: the caller says that it can be written.
    unsafe { to.write(value) };
    Ok(())
}

pub(crate) fn check_out<T>(to: *mut T, what: &str) -> Result<()> {
    if to.is_null() { Err(Error::invalid(format!("{what} is null"))) } else { Ok(()) }
}

fn pool(handle: u64) -> Result<(Arc<Device>, Arc<Pool>)> {
    let entry = POOLS.get(handle)?;
    Ok((entry.0.clone(), entry.1.clone()))
}

/// A text for the caller, freed by [`leasehold_text_free`].
pub(crate) fn owned(text: String) -> Result<*mut c_char> {
    CString::new(text).map(CString::into_raw).map_err(|_| Error::state("a text with a zero byte"))
}

/// The context of a device's name, and the name there.
fn context(name: &str) -> Result<(&'static Context, String)> {
    if let Some(rest) = name.strip_prefix("sim-") {
        return Ok((extend::simulated()?, rest.to_owned()));
    }
    Ok((Context::global(), name.to_owned()))
}

pub(crate) fn open(name: &str, options: LeaseholdDeviceOptions) -> Result<u64> {
    status::watch_forks()?;
    if options.flags & !LEASEHOLD_DEVICE_SHAREABLE != 0 {
        return Err(Error::invalid(format!("{:#x}: unknown flags of a device", options.flags)));
    }
    let (context, name) = context(name)?;
    let settings = Settings {
        policy: policy(options.policy)?,
        budget: if options.budget == 0 { u64::MAX } else { options.budget },
        trace_events: options.trace_events as usize,
        shareable: options.flags & LEASEHOLD_DEVICE_SHAREABLE != 0,
    };
    let device = Arc::new(Device::open(context, &name, settings)?);
    Ok(DEVICES.add(|_| device)?.0)
}

pub(crate) fn close(device: u64) -> Result<()> {
    // Of two threads that close it, one finds it open.
    if !DEVICES.get(device)?.close()? {
        return Err(DEVICES.unknown(device));
    }
    DEVICES.remove(device).map(drop)
}

pub(crate) const DEVICE_DEFAULTS: LeaseholdDeviceOptions = LeaseholdDeviceOptions {
    size: size_of::<LeaseholdDeviceOptions>(),
    budget: 0,
    policy: LEASEHOLD_POLICY_BALANCED,
    trace_events: 0,
    flags: 0,
};

// ---- errors

/// The version of the ABI of this library.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_abi_version() -> u32 {
    LEASEHOLD_ABI_VERSION
}

/// The text of the calling thread's last failure, until its next one.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_last_error() -> *const c_char {
    status::last()
}

/// Writes the text of the calling thread's last failure, cut to fit, and a zero byte. Returns the
/// length of the full text, without the zero byte.
///
/// # Safety
/// - `buffer` is null or has `size` bytes that can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_error_text(buffer: *mut c_char, size: usize) -> usize {
    // SAFETY: the text is this thread's until its next failure, which is not in this function.
    let text = unsafe { CStr::from_ptr(status::last()) };
    let full = text.to_str().unwrap_or("");
    if !buffer.is_null() && size > 0 {
        // A letter of several bytes is not cut.
        let mut cut = full.len().min(size - 1);
        while !full.is_char_boundary(cut) {
            cut -= 1;
        }
        // SAFETY: the caller vouches for the buffer, in which the text and its end have room.
        unsafe {
            std::ptr::copy_nonoverlapping(full.as_ptr().cast(), buffer, cut);
            buffer.add(cut).write(0);
        }
    }
    full.len()
}

/// Frees a text that a function returned. Null is no error.
///
/// # Safety
/// - `text` is null, or came from this library and is freed once.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_text_free(text: *mut c_char) {
    if !text.is_null() {
        // SAFETY: the text came from `owned` and is freed once.
        drop(unsafe { CString::from_raw(text) });
    }
}

// ---- devices

/// Opens a device.
///
/// # Safety
/// - `name` is a C string; `options` is null or a struct that begins with its size; `device` can be
///   written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_device_open(
    name: *const c_char,
    options: *const LeaseholdDeviceOptions,
    device: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(device, "the device's place")?;
        // SAFETY: the caller vouches for the C string.
        let name = unsafe { text(name, "the device's name")? };
        // SAFETY: the caller vouches for the struct.
        let options = unsafe { self::options(options, DEVICE_DEFAULTS, "options")? };
        let handle = open(name, options)?;
        register_thread();
        // SAFETY: the caller says that it can be written.
        unsafe { give(device, handle, "the device's place") }
    })
}

/// Lets this thread wait for a lock once, while there is memory: the first wait registers a
/// destructor with the C library, which ends the process if it has no memory for that.
fn register_thread() {
    let lock = Mutex::new(());
    let _ = Condvar::new().wait_until(&mut lock.lock(), Instant::now());
}

/// Closes a device.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_device_close(device: u64) -> c_int {
    ffi_guard_release(|| close(device))
}

/// Describes a device.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_device_describe(
    device: u64,
    info: *mut LeaseholdDeviceInfo,
) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        let memory = device.runtime.raw_device().memory_info()?;
        let mut name = [0; 128];
        let text = device.runtime.info().name.as_bytes();
        // The last byte stays 0.
        name.iter_mut().zip(text.iter().take(127)).for_each(|(to, &byte)| *to = byte as c_char);
        let streams = leasehold::cuda::device_state(&device.runtime)
            .map_or(0, |d| d.primary().externals().len() as u64);
        let found = LeaseholdDeviceInfo {
            size: 0,
            total_bytes: memory.total,
            free_bytes: memory.free,
            streams,
            name,
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// Blocks until all work of the device's primary context is over.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_device_synchronize(device: u64) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        device.sources.synchronize(&device.runtime)
    })
}

/// Lets a device use the memory of another one.
///
/// # Safety
/// - `allowed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_device_enable_peer(
    device: u64,
    owner: u64,
    allowed: *mut c_int,
) -> c_int {
    ffi_guard(|| {
        let (device, owner) = (DEVICES.get(device)?, DEVICES.get(owner)?);
        let reached = device.runtime.raw_device().peer_access(owner.runtime.device())?;
        if !allowed.is_null() {
            // SAFETY: the caller says that it can be written.
            return unsafe { give(allowed, c_int::from(reached), "allowed") };
        }
        let why = || Error::Unsupported("the devices cannot reach each other's memory".into());
        reached.then_some(()).ok_or_else(why)
    })
}

// ---- blocks

/// Allocates a block of a device's memory for a stream.
///
/// # Safety
/// - `stream` is a stream of the device, as the header says; `block` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_malloc(
    device: u64,
    bytes: usize,
    stream: usize,
    block: *mut *mut c_void,
) -> c_int {
    ffi_guard(|| {
        check_out(block, "the block's place")?;
        // SAFETY: the caller vouches for the stream.
        let addr = unsafe { DEVICES.get(device)?.alloc(None, bytes as u64, stream as u64) }?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(block, addr as *mut c_void, "the block's place") }
    })
}

/// Frees a block.
///
/// # Safety
/// - All work that uses the block was submitted to the stream of its allocation and to the streams
///   that were recorded for it. No later work uses it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_free(device: u64, block: *mut c_void) -> c_int {
    ffi_guard_release(|| DEVICES.get(device)?.free(block as u64))
}

/// Notes that another stream uses a block.
///
/// # Safety
/// - `stream` is a stream of the device, as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_stream(
    device: u64,
    block: *mut c_void,
    stream: usize,
) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        // SAFETY: the caller vouches for the stream.
        unsafe { device.record_stream(block as u64, &device, stream as u64) }
    })
}

/// Notes that a stream of another device uses a block.
///
/// # Safety
/// - `stream` is a stream of the device `peer`, as the header says.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_record_peer_stream(
    device: u64,
    block: *mut c_void,
    peer: u64,
    stream: usize,
) -> c_int {
    ffi_guard(|| {
        let (device, peer) = (DEVICES.get(device)?, DEVICES.get(peer)?);
        // SAFETY: the caller vouches for the stream.
        unsafe { device.record_stream(block as u64, &peer, stream as u64) }
    })
}

/// Ends a stream, before its owner destroys it.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stream_end(device: u64, stream: usize) -> c_int {
    ffi_guard_release(|| {
        let device = DEVICES.get(device)?;
        device.sources.end(&device.runtime, stream as u64)
    })
}

/// Finds the block that holds an address.
///
/// # Safety
/// - `base`, `bytes` and `pool` are null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_find(
    device: u64,
    address: *const c_void,
    base: *mut *mut c_void,
    bytes: *mut usize,
    pool: *mut u64,
) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        let (addr, len) = device.block_of(address as u64)?;
        let of = device.pool_of(addr)?;
        // SAFETY: the caller says that they are null or can be written.
        unsafe {
            if !base.is_null() {
                base.write(addr as *mut c_void);
            }
            if !bytes.is_null() {
                bytes.write(len as usize);
            }
            if !pool.is_null() {
                pool.write(of);
            }
        }
        Ok(())
    })
}

/// Names a block in reports and snapshots.
///
/// # Safety
/// - `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_block_set_name(
    device: u64,
    block: *mut c_void,
    name: *const c_char,
) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the C string.
        let name = unsafe { text(name, "the name")? };
        DEVICES.get(device)?.set_name(block as u64, Name::new(name))
    })
}

// ---- the memory as a whole

/// Gives free memory of all pools back to the driver.
///
/// # Safety
/// - `freed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_trim(device: u64, keep: u64, freed: *mut u64) -> c_int {
    ffi_guard_release(|| {
        let bytes = DEVICES.get(device)?.trim(keep)?;
        // SAFETY: the caller says that it is null or can be written.
        if freed.is_null() { Ok(()) } else { unsafe { give(freed, bytes, "freed") } }
    })
}

/// Sets the most bytes that all pools together take from the driver; 0 for no limit.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_set_budget(device: u64, bytes: u64) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        device.budget.set_limit(if bytes == 0 { u64::MAX } else { bytes });
        Ok(())
    })
}

/// The numbers of a device's memory.
///
/// # Safety
/// - `stats` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_stats_get(device: u64, stats: *mut LeaseholdStats) -> c_int {
    ffi_guard(|| {
        let device = DEVICES.get(device)?;
        let (c, s) = (&device.counters, device.sums());
        let now = |of: &leasehold_core::sync::atomic::AtomicU64| of.load(Ordering::Relaxed);
        let found = LeaseholdStats {
            size: 0,
            allocated_bytes: now(&c.allocated),
            allocated_bytes_peak: now(&c.allocated_peak),
            allocated_bytes_total: now(&c.allocated_total),
            freed_bytes_total: now(&c.freed_total),
            blocks: now(&c.blocks),
            blocks_peak: now(&c.blocks_peak),
            allocations: now(&c.allocations),
            frees: now(&c.frees),
            reserved_bytes: device.budget.reserved(),
            reserved_bytes_peak: device.budget.peak(),
            budget_bytes: device.budget.limit(),
            free_ready_bytes: s.free_ready,
            free_pending_bytes: s.free_not_ready,
            free_cached_bytes: s.free_in_slabs + s.free_in_thread_caches,
            unmapped_bytes: s.cached_pieces,
            retries: now(&c.retries),
            failures: now(&c.failures),
            growths: s.growths,
            remaps: s.remaps,
            host_waits: s.host_waits,
            stream_waits: s.inserted_waits,
            driver_calls: s.driver_calls,
            pools: device.all_pools().len() as u64,
            metadata_bytes: s.metadata,
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(stats, &found, "stats") }
    })
}

/// The largest free range of a device's memory that has memory behind it.
///
/// # Safety
/// - `bytes` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_largest_free(device: u64, bytes: *mut u64) -> c_int {
    ffi_guard(|| {
        let pools = DEVICES.get(device)?.all_pools();
        let usable = pools.iter().filter(|pool| !pool.suspended());
        let largest = usable.map(|pool| pool.allocator.largest_free()).max().unwrap_or(0);
        // SAFETY: the caller says that it can be written.
        unsafe { give(bytes, largest, "bytes") }
    })
}

/// Begins new peaks from what is allocated and reserved now.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_stats_reset_peaks(device: u64) -> c_int {
    ffi_guard(|| {
        DEVICES.get(device)?.reset_peaks();
        Ok(())
    })
}

/// The state of all memory as JSON.
///
/// # Safety
/// - `json` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_snapshot(device: u64, json: *mut *mut c_char) -> c_int {
    ffi_guard(|| {
        check_out(json, "the text's place")?;
        let text = owned(DEVICES.get(device)?.snapshot()?)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(json, text, "the text's place") }
    })
}

/// A page about all memory: one HTML file.
///
/// # Safety
/// - `html` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_report(device: u64, html: *mut *mut c_char) -> c_int {
    ffi_guard(|| {
        check_out(html, "the text's place")?;
        let snapshot = DEVICES.get(device)?.snapshot()?;
        let text = owned(::leasehold_report::html(&snapshot))?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(html, text, "the text's place") }
    })
}

/// Calls a function with each block of all pools.
///
/// # Safety
/// - `visitor` returns, and may be called with `context`. It calls no function of this library for
///   the same device that changes its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_visit_blocks(
    device: u64,
    visitor: Option<LeaseholdVisitor>,
    context: *mut c_void,
) -> c_int {
    ffi_guard(|| {
        let visitor = visitor.ok_or_else(|| Error::invalid("the visitor is null"))?;
        DEVICES.get(device)?.visit(|found| {
            let block = LeaseholdBlock {
                size: size_of::<LeaseholdBlock>(),
                pool: found.pool,
                segment_address: found.segment.0,
                segment_bytes: found.segment.1,
                address: found.block.addr,
                bytes: found.block.bytes,
                requested_bytes: found.block.requested,
                stream: found.stream as usize,
                state: match found.block.state {
                    BlockState::Live => LEASEHOLD_BLOCK_LIVE,
                    BlockState::Ready => LEASEHOLD_BLOCK_FREE,
                    BlockState::Pending => LEASEHOLD_BLOCK_PENDING,
                    BlockState::Cached => LEASEHOLD_BLOCK_CACHED,
                    _ => LEASEHOLD_BLOCK_OTHER,
                },
                expandable: u32::from(found.paged),
            };
            // SAFETY: the caller vouches for the function and its context.
            unsafe { visitor(context, &raw const block) };
        });
        Ok(())
    })
}

// ---- pools

/// Makes a pool.
///
/// # Safety
/// - `options` is null or a struct that begins with its size, whose name is null or a C string;
///   `pool` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_pool_create(
    device: u64,
    options: *const LeaseholdPoolOptions,
    pool: *mut u64,
) -> c_int {
    ffi_guard(|| {
        check_out(pool, "the pool's place")?;
        let defaults = LeaseholdPoolOptions {
            size: size_of::<LeaseholdPoolOptions>(),
            name: std::ptr::null(),
            policy: LEASEHOLD_POLICY_BALANCED,
            flags: 0,
        };
        // SAFETY: the caller vouches for the struct.
        let options = unsafe { self::options(options, defaults, "options")? };
        const FLAGS: u32 = LEASEHOLD_POOL_SUSPENDABLE | LEASEHOLD_POOL_MOVABLE;
        if options.flags & !FLAGS != 0 {
            return Err(Error::invalid(format!("{:#x}: unknown flags of a pool", options.flags)));
        }
        let name = if options.name.is_null() {
            "pool"
        } else {
            // SAFETY: the caller vouches for the C string.
            unsafe { text(options.name, "the name")? }
        };
        let has = |flag| options.flags & flag != 0;
        let kind = (has(LEASEHOLD_POOL_SUSPENDABLE), has(LEASEHOLD_POOL_MOVABLE));
        let policy = policy(options.policy)?;
        let device = DEVICES.get(device)?;
        let handle = device.add_pool(name.to_owned(), policy, kind)?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(pool, handle, "the pool's place") }
    })
}

/// Lets go of a pool. Its blocks stay valid.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_pool_release(pool: u64) -> c_int {
    ffi_guard_release(|| {
        let entry = POOLS.get(pool)?;
        // Of two threads that release it, one finds it open.
        if !entry.1.release()? {
            return Err(POOLS.unknown(pool));
        }
        entry.0.remove_pool(&entry.1);
        POOLS.remove(pool).map(drop)
    })
}

/// Allocates a block of a pool.
///
/// # Safety
/// - As [`leasehold_malloc`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_pool_malloc(
    pool: u64,
    bytes: usize,
    stream: usize,
    block: *mut *mut c_void,
) -> c_int {
    ffi_guard(|| {
        check_out(block, "the block's place")?;
        let (device, pool) = self::pool(pool)?;
        // SAFETY: the caller vouches for the stream.
        let addr = unsafe { device.alloc(Some(&pool), bytes as u64, stream as u64) }?;
        // SAFETY: the caller says that it can be written.
        unsafe { give(block, addr as *mut c_void, "the block's place") }
    })
}

/// Sends allocations of the main memory to a pool, on streams that a filter accepts.
///
/// # Safety
/// - `filter` is null or may be called with `context` by any thread until
///   [`leasehold_pool_end`] or [`leasehold_pool_release`] has returned and no allocation that began
///   earlier is under way.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_pool_begin(
    pool: u64,
    filter: Option<LeaseholdFilter>,
    context: *mut c_void,
) -> c_int {
    /// The caller's context of a filter.
    struct Context(*mut c_void);
    // SAFETY: the caller of `leasehold_pool_begin` lets any thread call the filter with it.
    unsafe impl Send for Context {}
    // SAFETY: the caller of `leasehold_pool_begin` lets several threads call the filter with it.
    unsafe impl Sync for Context {}
    impl Context {
        fn get(&self) -> *mut c_void {
            self.0
        }
    }
    ffi_guard(|| {
        let (device, pool) = self::pool(pool)?;
        let context = Context(context);
        device.begin_route(
            &pool,
            Box::new(move |stream| match filter {
                // SAFETY: the caller vouches for the filter and its context.
                Some(filter) => unsafe { filter(context.get(), stream as usize) != 0 },
                None => true,
            }),
        )
    })
}

/// Ends what [`leasehold_pool_begin`] began.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_pool_end(pool: u64) -> c_int {
    ffi_guard_release(|| {
        let (device, pool) = self::pool(pool)?;
        if device.end_route(&pool) {
            Ok(())
        } else {
            Err(Error::state("the pool takes no allocations of the main memory"))
        }
    })
}

/// Gives free memory of a pool back to the driver.
///
/// # Safety
/// - `freed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_pool_trim(pool: u64, keep: u64, freed: *mut u64) -> c_int {
    ffi_guard_release(|| {
        let bytes = self::pool(pool)?.1.trim(keep)?;
        // SAFETY: the caller says that it is null or can be written.
        if freed.is_null() { Ok(()) } else { unsafe { give(freed, bytes, "freed") } }
    })
}

/// Gives all memory of a pool back to the device, and keeps the addresses.
///
/// # Safety
/// - No work that uses the pool's blocks is submitted until [`leasehold_pool_resume`] has
///   succeeded; `freed` is null or can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_pool_suspend(pool: u64, flags: u32, freed: *mut u64) -> c_int {
    ffi_guard(|| {
        if flags & !LEASEHOLD_SUSPEND_KEEP != 0 {
            return Err(Error::invalid(format!("{flags:#x}: unknown flags of a suspension")));
        }
        let (device, pool) = self::pool(pool)?;
        let keep = flags & LEASEHOLD_SUSPEND_KEEP != 0;
        // SAFETY: the caller vouches for later work.
        let bytes = unsafe { pool.suspend(&device.runtime, &device.sources, keep) }?;
        // SAFETY: the caller says that it is null or can be written.
        if freed.is_null() { Ok(()) } else { unsafe { give(freed, bytes, "freed") } }
    })
}

/// Takes memory again at the same addresses, with the contents that were kept.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_pool_resume(pool: u64) -> c_int {
    ffi_guard(|| {
        let (device, pool) = self::pool(pool)?;
        device.resume(&pool)
    })
}
