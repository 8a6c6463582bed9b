//! Buffers of a runtime: taken, and wrapped around memory of the caller's.

use super::convert::{answer, check_out, give, text};
use crate::callback::{Callback, LeaseholdRelease};
use crate::kinds::{BUFFERS, HeldBuffer, RUNTIMES, STREAMS};
use crate::status::{ffi_guard, ffi_guard_release};
use leasehold::{Buffer, Error, HostKind, Lease, Name, Protection, Result, Runtime};
use std::ffi::{c_char, c_int, c_void};
use std::mem::size_of;

/// The buffer is memory of the caller's.
pub const LEASEHOLD_BUFFER_WRAPPED: u32 = 1;
/// Nothing may write the buffer.
pub const LEASEHOLD_BUFFER_READ_ONLY: u32 = 2;
/// The buffer is pinned host memory.
pub const LEASEHOLD_BUFFER_PINNED: u32 = 4;
/// The buffer is host memory that is not pinned.
pub const LEASEHOLD_BUFFER_PAGEABLE: u32 = 8;
/// The buffer belongs to a recording that goes on, and has no address yet.
pub const LEASEHOLD_BUFFER_RECORDED: u32 = 16;

/// Memory of the caller's that becomes a buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdWrapDesc {
    /// `sizeof` this struct.
    pub size: usize,
    /// The address on the device.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Metal's spanning buffer; 0 elsewhere.
    pub native: u64,
    /// 0 or [`LEASEHOLD_BUFFER_READ_ONLY`].
    pub flags: u32,
    /// 0.
    pub reserved: u32,
    /// Is called once, when nothing uses the memory any more; or null.
    pub release: Option<LeaseholdRelease>,
    /// For `release`.
    pub context: *mut c_void,
}

/// A buffer.
#[repr(C)]
#[derive(Debug, Clone, Copy)]
pub struct LeaseholdBufferInfo {
    /// `sizeof` this struct.
    pub size: usize,
    /// The address on the device; 0 for an empty buffer, and for one without an address yet.
    pub address: u64,
    /// Bytes.
    pub bytes: u64,
    /// Metal's spanning buffer; 0 elsewhere.
    pub native: u64,
    /// `LEASEHOLD_BUFFER_*`.
    pub flags: u32,
    /// 0.
    pub reserved: u32,
}

/// Adds a buffer and gives its handle.
///
/// # Safety
/// - `buffer` is null or can be written.
unsafe fn add(
    stream: u64,
    buffer: *mut u64,
    make: impl FnOnce(&Runtime) -> Result<Lease<Buffer>>,
) -> Result<()> {
    check_out(buffer, "the buffer's place")?;
    let made = make(&STREAMS.get(stream)?.runtime)?;
    // SAFETY: the caller says that it can be written.
    unsafe { give(buffer, BUFFERS.add(HeldBuffer(made))?, "the buffer's place") }
}

/// Allocates device memory for first use on a stream.
///
/// # Safety
/// - `buffer` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_buffer_alloc(
    stream: u64,
    bytes: u64,
    buffer: *mut u64,
) -> c_int {
    // SAFETY: by the contract.
    ffi_guard(|| unsafe { add(stream, buffer, |runtime| runtime.alloc(bytes)) })
}

/// Allocates pinned host memory.
///
/// # Safety
/// - `buffer` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_buffer_alloc_pinned(
    stream: u64,
    bytes: u64,
    buffer: *mut u64,
) -> c_int {
    // SAFETY: by the contract.
    ffi_guard(|| unsafe { add(stream, buffer, |runtime| runtime.alloc_pinned(bytes)) })
}

/// Makes a buffer of memory of the caller's.
///
/// # Safety
/// - `desc` is a struct that begins with its size, and `buffer` can be written.
/// - The memory is there, to be used by the runtime's device as `flags` says, until `release` is
///   called. Until then nobody writes it but through this buffer; unless it is read-only, nobody
///   else reads it either.
/// - Any thread may call `release` with `context`. It returns.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_buffer_wrap(
    runtime: u64,
    desc: *const LeaseholdWrapDesc,
    buffer: *mut u64,
) -> c_int {
    const NOTHING: LeaseholdWrapDesc = LeaseholdWrapDesc {
        size: size_of::<LeaseholdWrapDesc>(),
        address: 0,
        bytes: 0,
        native: 0,
        flags: 0,
        reserved: 0,
        release: None,
        context: std::ptr::null_mut(),
    };
    ffi_guard(|| {
        check_out(buffer, "the buffer's place")?;
        // SAFETY: the caller vouches for the struct.
        let desc = unsafe { super::convert::options(desc, NOTHING, "desc")? };
        if desc.flags & !LEASEHOLD_BUFFER_READ_ONLY != 0 || desc.reserved != 0 {
            return Err(Error::invalid(format!("{:#x}: unknown flags of a buffer", desc.flags)));
        }
        if desc.address == 0 || desc.bytes == 0 {
            return Err(Error::invalid("no memory to wrap: its address or its size is 0"));
        }
        let protection = match desc.flags & LEASEHOLD_BUFFER_READ_ONLY {
            0 => Protection::ReadWrite,
            _ => Protection::ReadOnly,
        };
        let open = RUNTIMES.get(runtime)?;
        // SAFETY: the caller vouches for the function and its context.
        let callback = unsafe { Callback::new(desc.context, desc.release) };
        let keep = Box::new(callback.clone());
        let allocator = open.runtime.allocator();
        // SAFETY: the caller vouches for the memory until `callback` ends.
        let lease =
            unsafe { allocator.import(desc.address, desc.bytes, desc.native, protection, keep) }?;
        let handle = BUFFERS.add(HeldBuffer(lease))?;
        callback.keep();
        // SAFETY: the caller says that it can be written.
        unsafe { give(buffer, handle, "the buffer's place") }
    })
}

/// Adds a holder of a buffer.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_buffer_retain(buffer: u64) -> c_int {
    ffi_guard(|| BUFFERS.retain(buffer))
}

/// Lets go of a buffer.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_buffer_release(buffer: u64) -> c_int {
    ffi_guard_release(|| BUFFERS.release(buffer))
}

/// Describes a buffer.
///
/// # Safety
/// - `info` is a struct that begins with its size and can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_buffer_describe(
    buffer: u64,
    info: *mut LeaseholdBufferInfo,
) -> c_int {
    ffi_guard(|| {
        let held = BUFFERS.get(buffer)?;
        let lease = &held.0;
        let flags = [
            (lease.is_imported(), LEASEHOLD_BUFFER_WRAPPED),
            (lease.is_read_only(), LEASEHOLD_BUFFER_READ_ONLY),
            (lease.host_kind() == HostKind::Pinned, LEASEHOLD_BUFFER_PINNED),
            (lease.host_kind() == HostKind::Pageable, LEASEHOLD_BUFFER_PAGEABLE),
            (lease.is_symbolic(), LEASEHOLD_BUFFER_RECORDED),
        ];
        let found = LeaseholdBufferInfo {
            size: 0,
            address: if lease.is_symbolic() { 0 } else { lease.addr() },
            bytes: lease.len(),
            native: lease.native(),
            flags: flags.iter().filter(|f| f.0).map(|f| f.1).sum(),
            reserved: 0,
        };
        // SAFETY: the caller vouches for the struct.
        unsafe { answer(info, &found, "info") }
    })
}

/// Names a buffer in reports and snapshots.
///
/// # Safety
/// - `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_buffer_set_name(buffer: u64, name: *const c_char) -> c_int {
    ffi_guard(|| {
        // SAFETY: the caller vouches for the C string.
        let name = Name::new(unsafe { text(name, "the name")? });
        BUFFERS.get(buffer)?.0.set_name(name);
        Ok(())
    })
}
