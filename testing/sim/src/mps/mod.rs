//! A simulated Metal driver: Metal's rules over a simulated machine. The machine moves real bytes,
//! and advances only when a caller queries or waits.
//!
//! ```
//! use leasehold_core::Index;
//! use leasehold_core::sync::Arc;
//! use leasehold_hal::{BackendKind, DeviceId};
//! use leasehold_mps::{MpsConfig, MpsExecutionManager};
//! use leasehold_sim::mps::{SimDriver, SimDriverConfig};
//! let driver = Arc::new(SimDriver::new(SimDriverConfig::default())?);
//! let manager = MpsExecutionManager::new();
//! manager.configure(driver.clone(), MpsConfig::default())?;
//! let device = manager.devices().open(DeviceId::new(BackendKind::Mps, 0))?;
//! let queue = device.command_queues().acquire(Index::new(0))?;
//! assert!(manager.shutdown().is_err(), "leases are held");
//! drop((queue, device));
//! manager.shutdown()?;
//! assert!(driver.census().is_nothing());
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! # Order
//! Untracked memory really races. Each encoder of a command buffer runs on a queue of the machine
//! of its own, and so does each dispatch that another one of its encoder may overlap. Only fences
//! (within one queue), barriers, serial encoders and events order them. The machine's race detector
//! names unordered accesses. The `work` module says how a command buffer becomes commands.
//!
//! # Errors
//! An error of the work skips the signals of its command buffer, and shows at completion only.
//! Memory beyond the device's shows there too: allocations succeed up to four times the device's
//! memory, and a command buffer fails if its working set does not fit. A fault of the fault plan
//! that hits `commit` becomes such an error. Metal's setters cannot fail, so a fault that hits one
//! has no effect.
//!
//! # Broken rules
//! Where Metal ends the process, the driver records a [`BrokenRule`], and the call returns an
//! error. Examples are an encoder that is released before `endEncoding`, and a commit with an open
//! encoder.
//!
//! # Stricter rules than Metal's
//! * Use of a released handle is an error. For Metal it is undefined behaviour.
//! * An object that an uncompleted command buffer without retained references uses must not be
//!   released.
//! * The commands of one blit encoder have no order.
//! * A fence has an effect within one queue only.
//! * A handler must not submit and must not wait.
//! * The parts of buffers that a dispatch touches must lie in the bound buffers.
//!
//! # Locks
//! One lock guards the tables. A thread may hold it while the machine takes its own locks. No
//! thread holds it while the machine steps (waits and queries).
//!
//! This module must not know managers.

mod builtin;
mod command;
mod encoder;
mod indirect;
mod library;
mod memory;
mod sync;
mod tables;
mod work;

use crate::{FaultScope, Machine, MachineConfig, Monitor};
use leasehold_core::panics::quietly;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, MutexGuard};
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{
    DeviceOps, DeviceProperties, MpsSlowOps, NativeDevice, NativeObject, ObjectOps,
};
use leasehold_mps::{MpsBackend, MpsConfig};
use std::cell::Cell;
use std::fmt;
use std::time::Duration;
use tables::{Object, Tables};

pub use tables::Census;

thread_local! {
    /// Whether this thread runs a handler.
    static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// The features of the simulated driver and its devices.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SimDriverConfig {
    /// The simulated machine; [`MachineConfig::default`] by default. Its own calls are not counted;
    /// the driver's are.
    pub machine: MachineConfig,
    /// The architecture's name; `applegpu_g15s` by default. `None` stands for a null property, as
    /// on a virtual machine.
    pub architecture: Option<String>,
    /// The newest Apple family of the devices; 9 by default.
    pub apple_family: u32,
    /// The devices are those of a virtual machine; false by default.
    pub paravirtual: bool,
    /// Residency sets exist; true by default.
    pub residency_sets: bool,
    /// The devices sample timestamps at the boundaries of a pass; true by default.
    pub stage_counters: bool,
    /// The most queues of the process; 512 by default.
    pub queues: u32,
}

impl Default for SimDriverConfig {
    fn default() -> Self {
        Self {
            machine: MachineConfig::default(),
            architecture: Some("applegpu_g15s".to_owned()),
            apple_family: 9,
            paravirtual: false,
            residency_sets: true,
            stage_counters: true,
            queues: 512,
        }
    }
}

impl SimDriverConfig {
    /// A driver with all features, over this machine.
    #[must_use]
    pub fn new(machine: MachineConfig) -> Self {
        Self { machine, ..Self::default() }
    }
}

/// A backend over a simulated driver.
///
/// # Errors
/// As [`MpsBackend::with_ops`], or an error of the simulated machine.
pub fn backend(machine: SimDriverConfig, config: MpsConfig) -> Result<MpsBackend> {
    MpsBackend::with_ops(Arc::new(SimDriver::new(machine)?), config)
}

/// The effect that a broken rule has with Metal.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Effect {
    /// An assertion ends the process.
    Abort,
    /// The behaviour is undefined.
    Undefined,
    /// The caller waits for itself.
    DeadLock,
}

/// A broken rule of Metal.
#[derive(Debug, Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct BrokenRule {
    /// The effect.
    pub effect: Effect,
    /// The call and the rule.
    pub text: String,
}

impl fmt::Display for BrokenRule {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let effect = match self.effect {
            Effect::Abort => "Metal would end the process",
            Effect::Undefined => "undefined behaviour",
            Effect::DeadLock => "dead-lock",
        };
        write!(f, "{effect}: {}", self.text)
    }
}

/// The code of the error that a broken rule returns.
pub const BROKEN_RULE: i32 = -1;

struct Inner {
    machine: Machine,
    config: SimDriverConfig,
    /// Bytes of memory of each device.
    physical: u64,
    tables: Mutex<Tables>,
    calls: AtomicU64,
}

/// The simulated driver. One object stands for one process's Metal, which all managers share.
///
/// ```
/// use leasehold_mps::driver::ops::{DeviceOps, MemoryOps, MemoryOptions, ObjectOps};
/// use leasehold_sim::mps::{SimDriver, SimDriverConfig};
/// let driver = SimDriver::new(SimDriverConfig::default())?;
/// let device = driver.devices()?[0];
/// // SAFETY: the handles are live, and each is released once.
/// unsafe {
///     let buffer = driver.buffer_create(device, 1024, MemoryOptions::default())?;
///     assert!(driver.buffer_contents(buffer)?.is_some());
///     driver.release(buffer.into());
///     driver.release(device.into());
/// }
/// assert!(driver.census().is_nothing() && driver.take_broken_rules().is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
pub struct SimDriver(Arc<Inner>);

impl SimDriver {
    /// A driver over a new machine.
    ///
    /// # Errors
    /// Those of [`Machine::new`].
    pub fn new(config: SimDriverConfig) -> Result<Self> {
        builtin::register(&config.machine.kernels);
        let physical = config.machine.memory;
        let mut machine = config.machine.clone().count_calls(false).fault_scope(FaultScope::Queue);
        // Allocations beyond the device's memory succeed, as with Metal.
        machine.memory = physical.saturating_mul(memory::OVERCOMMIT);
        machine.pinned = machine.memory.saturating_mul(u64::from(machine.devices));
        Ok(Self(Arc::new(Inner {
            machine: Machine::new(machine)?,
            config,
            physical,
            tables: Mutex::new(Tables::default()),
            calls: AtomicU64::new(0),
        })))
    }

    /// The simulated machine, for observers of its faults, reports and time.
    #[must_use]
    pub fn machine(&self) -> &Monitor {
        &self.0.machine
    }

    /// The objects that exist now.
    #[must_use]
    pub fn census(&self) -> Census {
        self.lock().census()
    }

    /// The broken rules since the last call.
    #[must_use]
    pub fn take_broken_rules(&self) -> Vec<BrokenRule> {
        std::mem::take(&mut self.lock().broken)
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.0.tables.lock()
    }

    /// Begins a call that can fail: counts it, and fails it if the fault plan demands it or the
    /// device is lost.
    fn enter(&self, api: &'static str, device: u32) -> Result<()> {
        self.0.calls.fetch_add(1, Ordering::Relaxed);
        self.0.machine.note(device, api).map_err(|e| told(api, e))
    }

    /// Begins a call that Metal cannot fail.
    fn count(&self, api: &'static str, device: u32) {
        // A fault that is due here has no effect: the method returns nothing.
        let _ = self.enter(api, device);
    }

    /// The device of an object, 0 for an unknown object.
    fn device_of(&self, object: impl Into<NativeObject>) -> u32 {
        self.lock().device_of(object.into().number())
    }
}

/// The driver's error for an error of the machine.
fn told(api: &'static str, error: Error) -> Error {
    match error {
        Error::Driver { api: "sim", code, name } => Error::Driver { api, code, name },
        other => other,
    }
}

/// Records a broken rule, and makes the error of its call.
#[cold]
fn broken(tables: &mut Tables, effect: Effect, text: impl Into<String>) -> Error {
    let rule = BrokenRule { effect, text: text.into() };
    let name = rule.to_string().into_boxed_str();
    tables.broken.push(rule);
    Error::Driver { api: "Metal", code: BROKEN_RULE, name }
}

/// Calls a handler as Metal does. Its panic stops here.
fn call_back(call: impl FnOnce()) {
    let outer = CALLED.replace(true);
    let panicked = quietly(call).is_none();
    CALLED.set(outer);
    if panicked {
        tracing::error!("a handler of the simulated Metal panicked");
    }
}

/// Refuses a call that a handler must not make.
fn outside_handler(tables: &mut Tables, api: &str) -> Result<()> {
    if CALLED.get() {
        return Err(broken(tables, Effect::DeadLock, format!("{api} in a handler")));
    }
    Ok(())
}

impl fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let devices = self.0.config.machine.devices;
        write!(f, "SimDriver({devices} devices, {} calls)", self.driver_calls())
    }
}

impl ObjectOps for SimDriver {
    unsafe fn release(&self, object: NativeObject) {
        self.count("release", self.device_of(object));
        let removed = self.lock().release(&self.0.machine, object);
        // Memory is freed after the lock is released.
        drop(removed);
    }
}

impl DeviceOps for SimDriver {
    fn devices(&self) -> Result<Vec<NativeDevice>> {
        self.enter("MTLCopyAllDevices", 0)?;
        let mut tables = self.lock();
        let all = 0..self.0.config.machine.devices;
        Ok(all.map(|ordinal| NativeDevice(tables.add(Object::Device(ordinal)))).collect())
    }

    unsafe fn device_properties(&self, device: NativeDevice) -> Result<DeviceProperties> {
        let ordinal = self.lock().device(device)?;
        self.enter("name", ordinal)?;
        let config = &self.0.config;
        let name = if config.paravirtual {
            "Apple Paravirtual device".to_owned()
        } else {
            format!("Simulated Metal device {ordinal}")
        };
        Ok(DeviceProperties {
            name,
            registry_id: 0x1_0000_0000 + u64::from(ordinal),
            architecture: config.architecture.clone(),
            apple_family: config.apple_family,
            mac_family: 2,
            common_family: 3,
            metal_family: 3,
            unified_memory: true,
            recommended_working_set: self.0.physical / 4 * 3,
            max_buffer: self.0.physical,
            max_threads: [1024; 3],
            max_threadgroup_memory: memory::THREADGROUP_MEMORY,
            peer_group: 0,
            low_power: false,
            headless: ordinal != 0,
            residency_sets: config.residency_sets,
            stage_counters: config.stage_counters,
        })
    }

    unsafe fn allocated_size(&self, device: NativeDevice) -> Result<u64> {
        let ordinal = self.lock().device(device)?;
        self.enter("currentAllocatedSize", ordinal)?;
        Ok(self.lock().allocated(ordinal))
    }

    unsafe fn sample_timestamps(&self, device: NativeDevice) -> Result<(u64, u64)> {
        let ordinal = self.lock().device(device)?;
        self.enter("sampleTimestamps", ordinal)?;
        let now = self.0.machine.now();
        Ok((now, now))
    }
}

// SAFETY: the machine maps memory for as long as it is lent. Work is over once the machine has run
// it. Signals are commands of the machine's queues, which come after the work before them.
unsafe impl MpsSlowOps for SimDriver {
    fn driver_calls(&self) -> u64 {
        self.0.calls.load(Ordering::Relaxed)
    }

    fn poll_interval(&self) -> Duration {
        Duration::ZERO
    }
}
