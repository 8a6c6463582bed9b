//! A simulated CUDA driver: CUDA's rules over a simulated machine. The machine moves real bytes,
//! and advances only when a caller queries or waits.
//!
//! # Additions to the machine
//! The simulated driver adds counted primary contexts, a current context per thread, and handles
//! that belong to a context. It adds capture with its forbidden calls, peers, registration, the
//! limits of launches, and sticky errors. Each call is counted under the name of the driver's
//! function, and a fault plan may fail it ([`FaultPlan`](crate::FaultPlan)).
//!
//! # Stricter rules than the driver's
//! * An object's context must be current, as [`leasehold_cuda::driver::ops`] demands. The driver
//!   often does not check.
//! * Use of a destroyed handle is an error. For the driver it is undefined behaviour.
//! * The argument buffer of a launch must agree with its bindings, and hold all parameters.
//! * Mappings end with their reservation, and only a mapped range can be unmapped.
//! * A call from a host function is refused (800). The driver may also hang.
//! * Objects that still exist when their context ends are recorded as leaks.
//!
//! # Kernels
//! A kernel is a function of the machine's registry ([`crate::KernelRegistry`]) with the
//! entry's name, or else a source in CUDA C++: the emulator ([`leasehold_emulator`]) compiles it
//! with g++, and runs it block by block. PTX and machine code without registered functions are
//! refused, with an error that asks for the source. What the emulator finds in a kernel fails its
//! launch, as a fault of a device does: the device is lost, and errors name the line.
//!
//! * Checked: each access lies in the bindings, in shared memory or in variables of the source, and
//!   the binding is declared for it. Barriers and shuffles are reached by all that they wait for.
//!   Threads of a launch that access the same byte are ordered, if one of them changes it.
//! * Checked with the machine's detector, by the declared accesses: races between launches.
//! * Not checked: what one order of blocks and threads does not reach.
//!   [`SimDriverConfig::reverse`] turns the order around, so run both.
//! * A pointer of a kernel is a binding, and the pointers come first. A device address that reaches
//!   a kernel in another way, such as in a structure, is no address of the host.
//! * A kernel is the process's own code. What the checks do not see, such as an endless loop or a
//!   recursion without end, happens to the process.
//!
//! A test of a library with kernels needs this crate as its one development dependency, beside
//! `leasehold`, both with the feature `cuda`; `examples/kernel_without_gpu.rs` of the repository is
//! such a program.
//!
//! ```
//! use leasehold_cuda::CudaConfig;
//! use leasehold_sim::cuda::{SimDriverConfig, backend};
//! use leasehold_hal::{Access, Backend, KernelCheck, KernelDesc, KernelSource};
//! let cuda = backend(SimDriverConfig::default(), CudaConfig::default())?;
//! let device = cuda.open("cuda:0".parse()?)?;
//! let source = KernelSource::CudaC {
//!     source: r#"extern "C" __global__ void twice(float* x) { x[threadIdx.x] *= 2.0f; }"#.into(),
//!     options: vec![].into(),
//! };
//! let desc = KernelDesc::new("twice", source, &[Access::ReadWrite], KernelCheck::any());
//! match device.pipeline(&desc) {
//!     Err(leasehold_core::Error::Unavailable(why)) => assert!(why.contains("g++")),
//!     pipeline => drop(pipeline?),
//! }
//! # Ok::<(), leasehold_core::Error>(())
//! ```
//!
//! # Teardown calls that fail
//! A call that destroys an object does so even if the fault plan fails the call. The driver, too,
//! reports failures of earlier work at such calls.
//!
//! # Locks
//! One lock guards the tables. A thread may hold it while the machine takes its own locks: commands
//! are enqueued under it, so that they keep their order. No thread holds it while the machine steps
//! (waits, queries and reads of words) or while an error is translated.
//!
//! This module must not know managers.

mod capture;
mod condition;
mod graph;
mod memory;
mod module;
mod partition;
mod stream;
mod tables;

use crate::{Machine, MachineConfig, Monitor, Stepping};
use condition::Conditions;
use leasehold_core::panics::quietly;
use leasehold_core::sync::thread::{self, ThreadId};
use leasehold_core::sync::{Mutex, MutexGuard, OnceLock};
use leasehold_core::{Error, ForkGuard, Result};
use leasehold_cuda::driver::codes::{self, code};
use leasehold_cuda::driver::ops::{
    CaptureMode, ContextOps, CudaSlowOps, DeviceOps, DeviceProperties, NativeContext, NativeStream,
};
use leasehold_cuda::{CudaBackend, CudaConfig};
use std::cell::Cell;
use std::sync::Arc;
use std::time::Duration;
use tables::{Context, Tables};

thread_local! {
    /// Whether this thread runs a host function.
    static CALLED: Cell<bool> = const { Cell::new(false) };
}

/// The oldest driver with streams on partitions.
const PARTITIONS: i32 = 12050;

/// The major compute capability from which on blocks can be in clusters.
const CLUSTERS: u32 = 9;

/// The multiprocessors of a device.
const MULTIPROCESSORS: u32 = 132;

/// The features of the simulated driver and its devices.
#[derive(Debug, Clone)]
#[non_exhaustive]
pub struct SimDriverConfig {
    /// The simulated machine. Its own calls are not counted; the driver's are.
    /// Default: [`MachineConfig::default`].
    pub machine: MachineConfig,
    /// The driver's version.
    /// Default: 13000.
    pub version: i32,
    /// Major and minor compute capability.
    /// Default: (9, 0).
    pub compute_capability: (u32, u32),
    /// The devices support virtual memory management.
    /// Default: `true`.
    pub vmm: bool,
    /// The devices support stream-ordered memory pools.
    /// Default: `true`.
    pub memory_pools: bool,
    /// Streams can write and await words.
    /// Default: `true`.
    pub stream_words: bool,
    /// One call copies several ranges (12.8 and newer).
    /// Default: `true`.
    pub copy_batch: bool,
    /// Graphs have conditional nodes (12.4 and newer).
    /// Default: `true`.
    pub conditional_nodes: bool,
    /// All blocks of a launch can be made to run at the same time.
    /// Default: `true`.
    pub cooperative_launch: bool,
    /// Devices can reach one another's memory.
    /// Default: `true`.
    pub peers: bool,
    /// The driver reports the parameters of functions (12.4 and newer).
    /// Default: `true`.
    pub param_info: bool,
    /// Blocks and threads of emulated kernels run from the last to the first.
    /// Default: `false`.
    pub reverse: bool,
}

impl Default for SimDriverConfig {
    fn default() -> Self {
        Self {
            machine: MachineConfig::default(),
            version: 13000,
            compute_capability: (9, 0),
            vmm: true,
            memory_pools: true,
            stream_words: true,
            copy_batch: true,
            conditional_nodes: true,
            cooperative_launch: true,
            peers: true,
            param_info: true,
            reverse: false,
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
/// As [`CudaBackend::with_ops`], or an error of the simulated machine.
pub fn backend(machine: SimDriverConfig, config: CudaConfig) -> Result<CudaBackend> {
    CudaBackend::with_ops(Arc::new(SimDriver::new(machine)?), config)
}

/// The number of objects that exist, for leak checks.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Census {
    /// Contexts; each primary context counts once.
    pub contexts: usize,
    /// Retains of primary contexts, summed over the devices.
    pub retained: usize,
    /// Streams.
    pub streams: usize,
    /// Events.
    pub events: usize,
    /// Modules.
    pub modules: usize,
    /// Graphs.
    pub graphs: usize,
    /// Executable graphs.
    pub execs: usize,
    /// Partitions.
    pub partitions: usize,
    /// Allocations of device memory.
    pub allocations: usize,
    /// Physical pieces that were not released.
    pub pieces: usize,
    /// Ranges of addresses.
    pub reservations: usize,
    /// Allocations of pinned memory.
    pub pinned: usize,
    /// Registered ranges.
    pub registered: usize,
}

impl Census {
    /// Whether no object exists.
    #[must_use]
    pub fn is_nothing(&self) -> bool {
        *self == Self::default()
    }
}

/// The simulated driver. One object stands for one process's driver, which all managers share.
///
/// ```
/// use leasehold_cuda::driver::ops::{ContextOps, DeviceOps, MemoryOps};
/// use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
/// let driver = SimDriver::new(SimDriverConfig::default())?;
/// driver.init()?;
/// let context = driver.primary_retain(0)?;
/// // SAFETY: this driver made the context, and nothing else uses it.
/// unsafe { driver.set_current(context)? };
/// let at = driver.alloc(1024)?;
/// // SAFETY: this driver allocated the memory, and nothing else uses it.
/// unsafe { driver.free(at)? };
/// // SAFETY: the context was retained once, and nothing else uses it.
/// unsafe { driver.primary_release(0)? };
/// assert!(driver.census().is_nothing() && driver.take_leaks().is_empty());
/// # Ok::<(), leasehold_core::Error>(())
/// ```
pub struct SimDriver {
    machine: Machine,
    config: SimDriverConfig,
    tables: Mutex<Tables>,
    conditions: Conditions,
    fork_guard: OnceLock<ForkGuard>,
}

/// The current context at the start of a call.
#[derive(Debug, Clone, Copy)]
struct Scope {
    context: u64,
    device: u32,
}

impl SimDriver {
    /// A driver over a new machine.
    ///
    /// # Errors
    /// Those of [`Machine::new`].
    pub fn new(mut config: SimDriverConfig) -> Result<Self> {
        config.machine = config.machine.count_calls(false).units(MULTIPROCESSORS);
        let machine = Machine::new(config.machine.clone())?;
        for device in 0..config.machine.devices {
            machine.device_set_name(device, &format!("cuda:{device}"))?;
        }
        Ok(Self {
            tables: Mutex::new(Tables::new(config.machine.devices)),
            machine,
            config,
            conditions: Conditions::default(),
            fork_guard: OnceLock::new(),
        })
    }

    /// The simulated machine, for observers of its faults, reports and time.
    #[must_use]
    pub fn machine(&self) -> &Monitor {
        &self.machine
    }

    /// Names a stream in faults and reports.
    ///
    /// # Errors
    /// `InvalidArgument` for a handle of no stream.
    pub fn name_stream(&self, stream: NativeStream, name: &str) -> Result<()> {
        let queue = self.tables.lock().streams.get(&stream.0).map(|stream| stream.queue);
        let queue = queue.ok_or_else(|| Error::invalid("no stream has this handle"))?;
        self.machine.queue_set_name(queue, name)
    }

    /// The objects that exist now.
    #[must_use]
    pub fn census(&self) -> Census {
        self.tables.lock().census()
    }

    /// The objects that still existed when their context ended, since the last call.
    #[must_use]
    pub fn take_leaks(&self) -> Vec<String> {
        std::mem::take(&mut self.tables.lock().leaks)
    }

    /// The legacy default stream of the current context, which the first use makes: the handle 1.
    /// The stream is an ordinary one here: the driver's implicit order with other streams only
    /// hides mistakes.
    ///
    /// # Errors
    /// Without a current context, or without memory.
    pub fn legacy_stream(&self) -> Result<NativeStream> {
        self.special_stream(None).map(|()| NativeStream(1))
    }

    /// The default stream of the calling thread in the current context, which the first use makes:
    /// the handle 2.
    ///
    /// # Errors
    /// Without a current context, or without memory.
    pub fn per_thread_stream(&self) -> Result<NativeStream> {
        self.special_stream(Some(thread::current().id())).map(|()| NativeStream(2))
    }

    fn special_stream(&self, thread: Option<ThreadId>) -> Result<()> {
        let scope = self.enter("cuStreamQuery")?;
        self.default_stream(scope, thread)
    }

    /// Makes the default stream that a handle means, unless it is there.
    fn ensure_default(&self, scope: Scope, stream: NativeStream) -> Result<()> {
        match stream.0 {
            0 | 1 => self.default_stream(scope, None),
            2 => self.default_stream(scope, Some(thread::current().id())),
            _ => Ok(()),
        }
    }

    fn default_stream(&self, scope: Scope, thread: Option<ThreadId>) -> Result<()> {
        let mut tables = self.lock();
        if tables.special.contains_key(&(scope.context, thread)) {
            return Ok(());
        }
        let queue = self.machine.queue_create(scope.device)?;
        let handle = tables.handle();
        let stream = tables::Stream { context: scope.context, queue, partition: 0 };
        tables.streams.insert(handle, stream);
        tables.special.insert((scope.context, thread), handle);
        Ok(())
    }

    fn lock(&self) -> MutexGuard<'_, Tables> {
        self.tables.lock()
    }

    /// Whether the machine is stepped by hand, so that a wait inside a call would never end.
    fn stepped_by_hand(&self) -> bool {
        self.machine.config().stepping == Stepping::Manual
    }

    /// Checks the process, as the first step of every call.
    fn begin(&self) -> Result<()> {
        codes::check_process(*self.fork_guard.get().ok_or_else(codes::not_started)?)
    }

    /// Whether the driver has partitions.
    fn has_partitions(&self) -> bool {
        self.config.version >= PARTITIONS
    }

    /// Begins a call about a context, or about the thread's current one. It need not be current. A
    /// lost device does not fail the call. Returns the context; null, where the thread has none.
    fn enter_about(
        &self,
        api: &'static str,
        context: Option<NativeContext>,
    ) -> Result<NativeContext> {
        let (context, device) = {
            let tables = self.lock();
            let current = || tables.current.get(&thread::current().id()).copied();
            let context = context.filter(|c| !c.is_null()).map(|c| c.0).or_else(current);
            let device = context.and_then(|c| tables.contexts.get(&c)).map_or(0, |c| c.device);
            (NativeContext(context.unwrap_or(0)), device)
        };
        self.enter_plain(api, device)?;
        Ok(context)
    }

    /// Begins a call that needs no context. A lost device does not fail the call.
    fn enter_plain(&self, api: &'static str, device: u32) -> Result<()> {
        self.begin()?;
        if CALLED.get() {
            return Err(refuse(api, code::NOT_PERMITTED));
        }
        match self.machine.note(device.min(self.config.machine.devices - 1), api) {
            Ok(()) | Err(Error::DeviceLost { .. }) => Ok(()),
            Err(e) => Err(self.told(api, device, 0, e)),
        }
    }

    /// Begins a call that needs a current context.
    fn enter(&self, api: &'static str) -> Result<Scope> {
        let scope = self.current_scope(api)?;
        self.noted(api, scope)?;
        Ok(scope)
    }

    /// Begins a call that destroys an object. The call reports the fault plan's failure after it
    /// destroyed the object.
    fn enter_teardown(&self, api: &'static str) -> Result<(Scope, Result<()>)> {
        let scope = self.current_scope(api)?;
        Ok((scope, self.noted(api, scope)))
    }

    /// Begins a call that needs a current context, even a lost one.
    fn enter_despite_loss(&self, api: &'static str) -> Result<(Scope, Result<()>)> {
        let scope = self.current_scope(api)?;
        let lost = self.machine.device_status(scope.device).is_err();
        let told = self.noted(api, scope);
        Ok((scope, if lost { Ok(()) } else { told }))
    }

    /// Refuses a lost device. Such a device gets no new contexts in this process.
    fn check_alive(&self, api: &'static str, ordinal: u32) -> Result<()> {
        self.machine.device_status(ordinal).map_err(|e| self.told(api, ordinal, 0, e))
    }

    fn noted(&self, api: &'static str, scope: Scope) -> Result<()> {
        self.machine.note(scope.device, api).map_err(|e| self.told(api, scope.device, 0, e))
    }

    fn current_scope(&self, api: &'static str) -> Result<Scope> {
        self.begin()?;
        if CALLED.get() {
            return Err(refuse(api, code::NOT_PERMITTED));
        }
        let tables = self.lock();
        let current = tables.current.get(&thread::current().id()).copied();
        let context = current.ok_or_else(|| refuse(api, code::INVALID_CONTEXT))?;
        match tables.contexts.get(&context) {
            Some(found) => Ok(Scope { context, device: found.device }),
            None => Err(refuse(api, code::CONTEXT_IS_DESTROYED)),
        }
    }

    /// Translates an error of the machine to the driver's error.
    fn told(&self, api: &'static str, device: u32, bytes: u64, error: Error) -> Error {
        match error {
            Error::OutOfMemory(_) => {
                codes::error(api, code::OUT_OF_MEMORY, codes::name_or_number(2), bytes)
            }
            Error::InvalidArgument(why) => {
                tracing::debug!(api, %why, "refused");
                refuse(api, code::INVALID_VALUE)
            }
            Error::NotFound(why) => {
                tracing::debug!(api, %why, "refused");
                refuse(api, code::INVALID_HANDLE)
            }
            Error::Driver { api: "sim", code, name } if codes::is_sticky(code) => {
                let why = format!("{name}: {} ({code})", codes::name_or_number(code));
                self.machine.lose_device(device, &why);
                self.lost(api, device, &why)
            }
            Error::Driver { api: "sim", code, .. } => {
                codes::error(api, code, codes::name_or_number(code), bytes)
            }
            Error::DeviceLost { cause } => self.lost(api, device, &cause),
            Error::Fault(fault) => self.lost(api, device, &fault.to_string()),
            other => other,
        }
    }

    /// The error of a lost device. The first cause is kept. If this device is not lost, the call
    /// concerns another device that is, and the error is a plain code.
    fn lost(&self, api: &'static str, device: u32, why: &str) -> Error {
        let code = sticky_code(why);
        if self.machine.device_status(device).is_ok() {
            return refuse(api, code);
        }
        let mut tables = self.lock();
        let cause = tables.causes.entry(device).or_insert_with(|| {
            format!("{}: {why}", codes::cause(api, code, &codes::name_or_number(code))).into()
        });
        Error::DeviceLost { cause: cause.clone() }
    }

    /// Waits until a context's work is over, or can never be over.
    fn drain(&self, device: u32) {
        if !self.stepped_by_hand() {
            // A failure is reported at the next query.
            let _ = self.machine.device_synchronize(device, None);
        }
    }

    /// Ends a context and all objects in it.
    fn end_context(&self, context: u64) {
        let device = self.lock().contexts.get(&context).map(|c| c.device);
        if let Some(device) = device {
            self.drain(device);
            self.lock().end_context(&self.machine, context);
        }
    }

    fn check_ordinal(&self, api: &'static str, ordinal: u32) -> Result<()> {
        if ordinal < self.config.machine.devices {
            Ok(())
        } else {
            Err(refuse(api, code::INVALID_DEVICE))
        }
    }
}

/// A refusal with a code of the driver.
#[cold]
fn refuse(api: &'static str, code: i32) -> Error {
    codes::error(api, code, codes::name_or_number(code), 0)
}

/// The device's code for a fault of the machine. The fault's text determines the code; otherwise
/// the code is an unspecific failure.
fn sticky_code(why: &str) -> i32 {
    if why.contains("illegal address") {
        return code::ILLEGAL_ADDRESS;
    }
    let numbers = why.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse().ok());
    let named = |&code: &i32| codes::is_sticky(code) && why.contains(&format!("({code})"));
    numbers.into_iter().find(named).unwrap_or(code::LAUNCH_FAILED)
}

/// Calls a host function as the driver does. The function must not call the driver, and its panic
/// stops here.
fn call_back(call: impl FnOnce()) {
    let outer = CALLED.replace(true);
    let panicked = quietly(call).is_none();
    CALLED.set(outer);
    if panicked {
        tracing::error!("a host function on a simulated CUDA stream panicked");
    }
}

impl std::fmt::Debug for SimDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "SimDriver({} devices)", self.config.machine.devices)
    }
}

impl DeviceOps for SimDriver {
    fn init(&self) -> Result<()> {
        codes::check_process(*self.fork_guard.get_or_init(ForkGuard::here))?;
        self.enter_plain("cuInit", 0).map_err(|e| match e {
            Error::Driver { code, name, .. } => codes::unavailable(code, &name),
            other => other,
        })
    }

    fn driver_version(&self) -> Result<i32> {
        self.enter_plain("cuDriverGetVersion", 0)?;
        Ok(self.config.version)
    }

    fn device_count(&self) -> Result<u32> {
        self.enter_plain("cuDeviceGetCount", 0)?;
        Ok(self.config.machine.devices)
    }

    fn device_properties(&self, ordinal: u32) -> Result<DeviceProperties> {
        self.enter_plain("cuDeviceGetAttribute", ordinal)?;
        self.check_ordinal("cuDeviceGet", ordinal)?;
        let mut uuid = *b"leasehold sim 00";
        uuid[14] = b'0' + (ordinal / 10) as u8;
        uuid[15] = b'0' + (ordinal % 10) as u8;
        Ok(DeviceProperties {
            name: format!("Simulated CUDA device {ordinal}"),
            uuid,
            pci: format!("0000:{:02x}:00.0", ordinal + 1),
            compute_capability: self.config.compute_capability,
            vendor: false,
            multiprocessors: self.config.machine.units,
            memory: self.config.machine.memory,
            l2: 60 << 20,
            numa_node: None,
            block_threads: memory::BLOCK_THREADS,
            block: memory::BLOCK,
            grid: memory::GRID,
            shared: memory::SHARED,
            shared_optin: memory::SHARED_OPTIN,
            warp: 32,
            concurrent_kernels: true,
            vmm: self.config.vmm,
            memory_pools: self.config.memory_pools,
            stream_words: self.config.stream_words,
            copy_batch: self.config.copy_batch,
            conditional_nodes: self.config.conditional_nodes,
            unified_addressing: true,
            fd_handles: self.config.vmm,
            fabric_handles: false,
            rdma: false,
            clusters: self.config.compute_capability.0 >= CLUSTERS,
            cooperative_launch: self.config.cooperative_launch,
            green_contexts: self.has_partitions(),
        })
    }

    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool> {
        self.enter_plain("cuDeviceCanAccessPeer", device)?;
        self.check_ordinal("cuDeviceGet", device)?;
        self.check_ordinal("cuDeviceGet", peer)?;
        Ok(self.config.peers && device != peer)
    }
}

impl ContextOps for SimDriver {
    fn primary_retain(&self, ordinal: u32) -> Result<NativeContext> {
        self.enter_plain("cuDevicePrimaryCtxRetain", ordinal)?;
        self.check_ordinal("cuDeviceGet", ordinal)?;
        self.check_alive("cuDevicePrimaryCtxRetain", ordinal)?;
        let mut tables = self.lock();
        let known = tables.primaries[ordinal as usize].0;
        let context = known.unwrap_or_else(|| tables.new_context(ordinal));
        let primary = &mut tables.primaries[ordinal as usize];
        *primary = (Some(context), primary.1 + 1);
        Ok(NativeContext(context))
    }

    unsafe fn primary_release(&self, ordinal: u32) -> Result<()> {
        let told = self.enter_plain("cuDevicePrimaryCtxRelease", ordinal);
        if matches!(told, Err(Error::InvalidState(_))) {
            return told;
        }
        self.check_ordinal("cuDeviceGet", ordinal)?;
        let ended = {
            let mut tables = self.lock();
            let (context, count) = tables.primaries[ordinal as usize];
            let Some(context) = context else {
                return Err(refuse("cuDevicePrimaryCtxRelease", code::INVALID_CONTEXT));
            };
            let left = count - 1;
            tables.primaries[ordinal as usize] = (Some(context).filter(|_| left > 0), left);
            (left == 0).then_some(context)
        };
        if let Some(context) = ended {
            self.end_context(context);
        }
        told
    }

    fn context_create(&self, ordinal: u32) -> Result<NativeContext> {
        self.enter_plain("cuCtxCreate", ordinal)?;
        self.check_ordinal("cuDeviceGet", ordinal)?;
        self.check_alive("cuCtxCreate", ordinal)?;
        Ok(NativeContext(self.lock().new_context(ordinal)))
    }

    unsafe fn context_destroy(&self, context: NativeContext) -> Result<()> {
        let told = self.enter_about("cuCtxDestroy", Some(context)).map(|_| ());
        if matches!(told, Err(Error::InvalidState(_))) {
            return told;
        }
        if context.is_null() {
            return Err(refuse("cuCtxDestroy", code::INVALID_VALUE));
        }
        {
            let mut tables = self.lock();
            let primary = tables.primaries.iter().any(|p| p.0 == Some(context.0));
            if primary || !tables.contexts.contains_key(&context.0) {
                return Err(refuse("cuCtxDestroy", code::INVALID_CONTEXT));
            }
            // As with the driver: if the context is current on this thread, no context is current
            // afterwards.
            let thread = thread::current().id();
            if tables.current.get(&thread) == Some(&context.0) {
                tables.current.remove(&thread);
            }
        }
        self.end_context(context.0);
        told
    }

    fn current(&self) -> Result<NativeContext> {
        self.enter_about("cuCtxGetCurrent", None)
    }

    unsafe fn set_current(&self, context: NativeContext) -> Result<()> {
        self.enter_about("cuCtxSetCurrent", Some(context))?;
        let mut tables = self.lock();
        let thread = thread::current().id();
        if context.is_null() {
            tables.current.remove(&thread);
        } else if tables.contexts.contains_key(&context.0) {
            tables.current.insert(thread, context.0);
        } else {
            return Err(refuse("cuCtxSetCurrent", code::INVALID_CONTEXT));
        }
        Ok(())
    }

    unsafe fn enable_peer(&self, peer: NativeContext) -> Result<()> {
        const API: &str = "cuCtxEnablePeerAccess";
        let scope = self.enter(API)?;
        let mut tables = self.lock();
        let to = tables.contexts.get(&peer.0).map(|c| c.device);
        let to = to.ok_or_else(|| refuse(API, code::INVALID_CONTEXT))?;
        if to == scope.device || !self.config.peers {
            return Err(refuse(API, code::PEER_ACCESS_UNSUPPORTED));
        }
        let Some(Context { peers, .. }) = tables.contexts.get_mut(&scope.context) else {
            return Ok(());
        };
        // Already enabled is the driver's code 704, which is no error here.
        let new = peers.insert(peer.0, to).is_none();
        drop(tables);
        if new {
            self.machine
                .enable_peer(scope.device, to)
                .map_err(|e| self.told(API, scope.device, 0, e))?;
        }
        Ok(())
    }

    unsafe fn disable_peer(&self, peer: NativeContext) -> Result<()> {
        const API: &str = "cuCtxDisablePeerAccess";
        let scope = self.enter(API)?;
        let mut tables = self.lock();
        if !tables.contexts.contains_key(&peer.0) {
            return Err(refuse(API, code::INVALID_CONTEXT));
        }
        // Not enabled is the driver's code 705, which is no error here.
        tables.disable_peer(&self.machine, scope.context, peer.0);
        Ok(())
    }

    fn context_synchronize(&self) -> Result<()> {
        const API: &str = "cuCtxSynchronize";
        let scope = self.enter(API)?;
        {
            let mut tables = self.lock();
            tables.forbidden_in_capture(API)?;
            // A context is not synchronised while a stream of it is captured, whatever the mode.
            if tables.break_captures(scope.context) {
                return Err(refuse(API, code::STREAM_CAPTURE_UNSUPPORTED));
            }
        }
        // The machine knows devices, not contexts. So the call also waits for the work of other
        // contexts of this device.
        self.machine
            .device_synchronize(scope.device, None)
            .map_err(|e| self.told(API, scope.device, 0, e))
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        self.enter_plain("cuThreadExchangeStreamCaptureMode", 0)?;
        let mut tables = self.lock();
        let thread = thread::current().id();
        let former = match mode {
            // The mode of a thread that never set one.
            CaptureMode::Global => tables.capture_modes.remove(&thread),
            mode => tables.capture_modes.insert(thread, mode),
        };
        Ok(former.unwrap_or_default())
    }

    fn priority_range(&self) -> Result<(i32, i32)> {
        self.enter("cuCtxGetStreamPriorityRange")?;
        Ok((0, -5))
    }
}

// SAFETY: the machine maps memory for as long as it is lent. Work is over once the machine has run
// it. Writes of words are commands of the machine's queues, which run in order.
unsafe impl CudaSlowOps for SimDriver {
    fn poll_interval(&self) -> Duration {
        Duration::ZERO
    }

    fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        compute_capability: (u32, u32),
    ) -> Result<Vec<u8>> {
        // The compiler uses no device, so a lost device does not fail the call.
        match self.machine.note(0, "nvrtcCompileProgram") {
            Ok(()) | Err(Error::DeviceLost { .. }) => {
                let kernels = self.machine.kernels();
                module::compile(source, name, options, compute_capability, kernels)
            }
            Err(e) => Err(self.told("nvrtcCompileProgram", 0, 0, e)),
        }
    }

    fn compiler(&self) -> String {
        "simulated 1.0".to_owned()
    }
}

/// The text of a cause.
type Cause = Arc<str>;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_cause_tells_its_code() {
        assert_eq!(
            sticky_code(
                "dispatch f failed: illegal address 0x10: nothing is mapped there (4 bytes)"
            ),
            700
        );
        assert_eq!(sticky_code("driver: f failed with CUDA_ERROR_ILLEGAL_INSTRUCTION (715)"), 715);
        assert_eq!(sticky_code("driver: f failed with CUDA_ERROR_INVALID_VALUE (1)"), 719);
        assert_eq!(sticky_code("injected into call 715 (cuMemAlloc)"), 719);
    }
}
