//! Devices.

use super::convert::{answer, check_out, give, text};
use crate::device::{DEVICES, Device, Settings};
use crate::extend;
use crate::status::{self, ffi_guard, ffi_guard_release};
use leasehold::{Context, Error, Result};
use leasehold_alloc::Policy;
use leasehold_core::sync::{Arc, Condvar, Mutex};
use std::ffi::{c_char, c_int};
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

pub(crate) const DEVICE_DEFAULTS: LeaseholdDeviceOptions = LeaseholdDeviceOptions {
    size: size_of::<LeaseholdDeviceOptions>(),
    budget: 0,
    policy: LEASEHOLD_POLICY_BALANCED,
    trace_events: 0,
    flags: 0,
};

pub(crate) fn policy(number: u32) -> Result<Policy> {
    match number {
        LEASEHOLD_POLICY_BALANCED => Ok(Policy::Balanced),
        LEASEHOLD_POLICY_FASTEST => Ok(Policy::Fastest),
        LEASEHOLD_POLICY_COMPACT => Ok(Policy::Compact),
        other => Err(Error::invalid(format!("{other} is no policy"))),
    }
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
        let options = unsafe { super::convert::options(options, DEVICE_DEFAULTS, "options")? };
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
        device.sources.synchronize(&device.runtime, None)
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
