//! [`RealDriver`]: Metal itself, over `objc2-metal`.
//!
//! # Handles
//! A handle is the address of an Objective-C object, with one reference that the handle stands for.
//! `give` makes a handle of a retained object, and `at!` borrows the object of a live handle.
//!
//! # Autorelease pools
//! Metal's getters return autoreleased objects. Each entry opens a pool of its own
//! (`RealDriver::enter`), and so does each handler, because a thread of Metal may have none.
//! Without a pool such objects stay until their thread ends.
//!
//! # Threads
//! `objc2-metal` declares devices, queues, libraries, functions, pipelines, events and fences
//! `Send` and `Sync`. Command buffers, encoders, buffers, heaps, residency sets and sample buffers
//! are neither, because two threads must not change one of them at the same time. Metal lets them
//! move between threads. A handle is a number, so this module needs no `unsafe impl Send`: the
//! methods' contracts ask for one thread at a time.
//!
//! # Versions of the system
//! Selectors that older systems lack are sent only if the object responds to them.
//!
//! No Apple device has run this module; the compiler and clippy have checked it for
//! `aarch64-apple-darwin`. `ci/apple.sh messages` compares its messages with those expected.
//!
//! This module must not know managers.

mod command;
mod encoder;
mod indirect;
mod library;
mod memory;
mod sync;

use super::ops::{DeviceOps, DeviceProperties, MpsSlowOps, NativeDevice, NativeObject, ObjectOps};
use leasehold_core::sync::OnceLock;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result};
use objc2::rc::{Retained, autoreleasepool};
use objc2::runtime::{NSObject, NSObjectProtocol, ProtocolObject};
use objc2::{Message, msg_send, sel};
use objc2_foundation::NSError;
use objc2_metal::{
    MTLArchitecture, MTLCopyAllDevices, MTLCounterSamplingPoint, MTLCreateSystemDefaultDevice,
    MTLDevice, MTLGPUFamily, MTLSharedEventListener,
};
use std::fmt;
use std::ptr::NonNull;
use std::time::Duration;

// Without CoreGraphics a program without a window gets no default device.
#[cfg_attr(target_vendor = "apple", link(name = "CoreGraphics", kind = "framework"))]
unsafe extern "C" {}

/// The object of a live handle.
macro_rules! at {
    ($handle:expr => $protocol:ident) => {{
        let address: u64 = $handle.0;
        // SAFETY: the handle is live and of this protocol, by the contract of the calling method.
        unsafe { $crate::driver::real::borrow::<dyn $protocol>(address) }
    }};
}
use at;

/// Metal of this process.
pub struct RealDriver {
    calls: AtomicU64,
    /// Calls the handlers of shared events, on a dispatch queue of its own.
    listener: OnceLock<Retained<MTLSharedEventListener>>,
}

impl RealDriver {
    /// The driver. Makes no call.
    #[must_use]
    pub fn new() -> Self {
        Self { calls: AtomicU64::new(0), listener: OnceLock::new() }
    }

    /// Runs a call in an autorelease pool of its own, and counts it.
    fn enter<T>(&self, call: impl FnOnce() -> T) -> T {
        self.calls.fetch_add(1, Ordering::Relaxed);
        autoreleasepool(|_| call())
    }

    fn listener(&self) -> &MTLSharedEventListener {
        self.listener.get_or_init(MTLSharedEventListener::new)
    }
}

impl Default for RealDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl fmt::Debug for RealDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RealDriver({} calls)", self.driver_calls())
    }
}

/// The object at a handle's address.
///
/// # Safety
/// - `address` is a live handle of this protocol, and stays live for `'a`.
unsafe fn borrow<'a, T: ?Sized>(address: u64) -> &'a ProtocolObject<T> {
    let object = std::ptr::with_exposed_provenance::<ProtocolObject<T>>(address as usize);
    // SAFETY: by this function's contract the object lives and implements the protocol.
    unsafe { &*object }
}

/// Makes a handle's number of a retained object. The reference belongs to the handle.
fn give<T: Message>(object: Retained<T>) -> u64 {
    Retained::into_raw(object).expose_provenance() as u64
}

/// Makes a handle's number of a nullable result.
///
/// # Errors
/// `Driver` for nil.
fn give_some<T: Message>(api: &'static str, object: Option<Retained<T>>) -> Result<u64> {
    object.map(give).ok_or_else(|| Error::Driver { api, code: 0, name: "nil".into() })
}

/// The error of an `NSError`.
fn failed(api: &'static str, error: &NSError) -> Error {
    let text = error.localizedDescription().to_string();
    Error::Driver { api, code: code_of(error), name: text.into_boxed_str() }
}

fn code_of(error: &NSError) -> i32 {
    i32::try_from(error.code()).unwrap_or(i32::MAX)
}

/// Nanoseconds of a time in seconds.
fn nanos(seconds: f64) -> u64 {
    // A cast of a float saturates.
    (seconds * 1e9) as u64
}

/// An integer of the driver, at most `u32::MAX`.
fn small(number: usize) -> u32 {
    u32::try_from(number).unwrap_or(u32::MAX)
}

/// The newest of consecutive families that the device supports, 0 for none.
fn newest(device: &ProtocolObject<dyn MTLDevice>, families: &[(u32, MTLGPUFamily)]) -> u32 {
    let supported = families.iter().filter(|(_, family)| device.supportsFamily(*family));
    supported.map(|(number, _)| *number).max().unwrap_or(0)
}

/// The architecture's name. The property is null on virtual machines, and missing before macOS 14;
/// the typed getter would panic.
fn architecture(device: &ProtocolObject<dyn MTLDevice>) -> Option<String> {
    if !device.respondsToSelector(sel!(architecture)) {
        return None;
    }
    // SAFETY: the selector has this signature, except that the result may be nil.
    let architecture: Option<Retained<MTLArchitecture>> =
        unsafe { msg_send![device, architecture] };
    architecture.map(|a| a.name().to_string())
}

impl ObjectOps for RealDriver {
    unsafe fn release(&self, object: NativeObject) {
        let address = std::ptr::with_exposed_provenance_mut::<NSObject>(object.number() as usize);
        self.enter(|| {
            // SAFETY: the handle is live and owns one reference, which ends here (the caller's
            // promise). Every object of Metal is an `NSObject`.
            drop(unsafe { Retained::from_raw(address) });
        });
    }
}

impl DeviceOps for RealDriver {
    fn devices(&self) -> Result<Vec<NativeDevice>> {
        self.enter(|| {
            let mut all = MTLCopyAllDevices().to_vec();
            if all.is_empty() {
                all.extend(MTLCreateSystemDefaultDevice());
            }
            if all.is_empty() {
                return Err(Error::Unavailable("Metal: this system has no device".into()));
            }
            Ok(all.into_iter().map(|device| NativeDevice(give(device))).collect())
        })
    }

    unsafe fn device_properties(&self, device: NativeDevice) -> Result<DeviceProperties> {
        self.enter(|| {
            let device = at!(device => MTLDevice);
            let threads = device.maxThreadsPerThreadgroup();
            Ok(DeviceProperties {
                name: device.name().to_string(),
                registry_id: device.registryID(),
                architecture: architecture(device),
                apple_family: newest(
                    device,
                    &[
                        (1, MTLGPUFamily::Apple1),
                        (2, MTLGPUFamily::Apple2),
                        (3, MTLGPUFamily::Apple3),
                        (4, MTLGPUFamily::Apple4),
                        (5, MTLGPUFamily::Apple5),
                        (6, MTLGPUFamily::Apple6),
                        (7, MTLGPUFamily::Apple7),
                        (8, MTLGPUFamily::Apple8),
                        (9, MTLGPUFamily::Apple9),
                        (10, MTLGPUFamily::Apple10),
                    ],
                ),
                mac_family: newest(device, &[(2, MTLGPUFamily::Mac2)]),
                common_family: newest(
                    device,
                    &[
                        (1, MTLGPUFamily::Common1),
                        (2, MTLGPUFamily::Common2),
                        (3, MTLGPUFamily::Common3),
                    ],
                ),
                metal_family: newest(
                    device,
                    &[(3, MTLGPUFamily::Metal3), (4, MTLGPUFamily::Metal4)],
                ),
                unified_memory: device.hasUnifiedMemory(),
                recommended_working_set: device.recommendedMaxWorkingSetSize(),
                max_buffer: device.maxBufferLength() as u64,
                max_threads: [threads.width, threads.height, threads.depth].map(small),
                max_threadgroup_memory: small(device.maxThreadgroupMemoryLength()),
                peer_group: device.peerGroupID(),
                low_power: device.isLowPower(),
                headless: device.isHeadless(),
                residency_sets: device
                    .respondsToSelector(sel!(newResidencySetWithDescriptor:error:)),
                stage_counters: device
                    .supportsCounterSampling(MTLCounterSamplingPoint::AtStageBoundary),
            })
        })
    }

    unsafe fn allocated_size(&self, device: NativeDevice) -> Result<u64> {
        self.enter(|| Ok(at!(device => MTLDevice).currentAllocatedSize() as u64))
    }

    unsafe fn sample_timestamps(&self, device: NativeDevice) -> Result<(u64, u64)> {
        self.enter(|| {
            let (mut host, mut own) = (0, 0);
            let device = at!(device => MTLDevice);
            // SAFETY: both pointers are to integers of this frame.
            unsafe {
                device.sampleTimestamps_gpuTimestamp(
                    NonNull::from(&mut host),
                    NonNull::from(&mut own),
                );
            }
            Ok((host, own))
        })
    }
}

// SAFETY: each method is one call of Metal, whose answers it returns. Metal reports a command
// buffer as over after its work, and signals an event after the work before the signal.
unsafe impl MpsSlowOps for RealDriver {
    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }

    fn poll_interval(&self) -> Duration {
        Duration::from_micros(50)
    }
}
