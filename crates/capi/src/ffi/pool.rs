//! Pools.

use super::convert::{check_out, give, text};
use super::device::{LEASEHOLD_POLICY_BALANCED, policy};
use crate::device::{DEVICES, Device, POOLS};
use crate::pool::Pool;
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::{Error, Result};
use leasehold_core::sync::Arc;
use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

/// The pool can be suspended.
pub const LEASEHOLD_POOL_SUSPENDABLE: u32 = 1;
/// Memory under free blocks of the pool may be moved and taken back: no captured graph uses it.
pub const LEASEHOLD_POOL_MOVABLE: u32 = 2;
/// The contents are kept in pinned host memory.
pub const LEASEHOLD_SUSPEND_KEEP: u32 = 1;

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

/// Says whether allocations on a stream go to a pool. Any thread may call it.
pub type LeaseholdFilter = unsafe extern "C" fn(context: *mut c_void, stream: usize) -> c_int;

fn pool(handle: u64) -> Result<(Arc<Device>, Arc<Pool>)> {
    let entry = POOLS.get(handle)?;
    Ok((entry.0.clone(), entry.1.clone()))
}

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
        let options = unsafe { super::convert::options(options, defaults, "options")? };
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
/// - As [`leasehold_malloc`](super::leasehold_malloc).
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
