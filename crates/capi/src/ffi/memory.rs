//! A device's memory as a whole: limits, numbers, reports, a walk over its blocks.

use super::convert::{answer, check_out, give, owned};
use crate::device::DEVICES;
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::Error;
use leasehold_alloc::BlockState;
use leasehold_core::sync::atomic::Ordering;
use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

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

/// Is called with each block.
pub type LeaseholdVisitor =
    unsafe extern "C" fn(context: *mut c_void, block: *const LeaseholdBlock);

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
