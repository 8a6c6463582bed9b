//! [`RealDriver`]: the vendor's driver, loaded at run time.
//!
//! # The path of a call
//! `RealDriver::call` first checks that the driver was started, and that this process is not a fork
//! of the one that started it. Then it makes the call and translates the code. If a code says that
//! the context is lost, the driver object keeps it with the current context. This code is the first
//! cause, which every later failure in that context reports.
//!
//! # Features without use
//! The real driver never uses managed memory, multicast objects, `cuDevicePrimaryCtxReset` or the
//! legacy stream.
//!
//! This module must not know managers.

mod graph;
mod library;
mod memory;
mod module;
mod partition;
mod plausible;
mod stream;
mod words;

use super::nvrtc;
use super::ops::{
    CaptureMode, ContextOps, CudaSlowOps, DeviceOps, DeviceProperties, NativeContext,
};
use crate::conv;
use crate::driver::codes::{self, code};
use cudarc::driver::sys::{CUcontext, CUdevice, CUdevice_attribute_enum as Attribute, CUuuid};
use leasehold_core::sync::{Mutex, OnceLock};
use leasehold_core::{Error, ForkGuard, Result};
use leasehold_input::{CompileCache, Key};
use library::Functions;
use std::collections::HashMap;
use std::ffi::{CStr, c_char, c_int};
use std::ptr;
use std::sync::Arc;
use std::time::Duration;

/// Calls a function of the driver by its name, and converts a failure to an [`Error`].
macro_rules! drive {
    ($driver:expr, $name:ident($($arg:expr),* $(,)?)) => {
        drive!($driver, for 0, $name($($arg),*))
    };
    // `bytes`: the requested size, for the report of exhausted memory.
    ($driver:expr, for $bytes:expr, $name:ident($($arg:expr),* $(,)?)) => {
        // SAFETY: the table holds the driver's function of this name and type. Pointers for results
        // are to locals of the caller of this macro. The caller of the trait's method vouches for
        // handles and addresses, and the driver checks some of them.
        $driver.call(stringify!($name), $bytes, |f| unsafe { (f.$name)($($arg),*) })
    };
}
use drive;

/// The vendor's driver.
///
/// Making the object does not load the driver; [`init`](DeviceOps::init) does. Several objects may
/// exist: they share the process's one driver.
#[doc(alias("CudaSlowOpsImpl", "cuda_slow_ops"))]
pub struct RealDriver {
    loaded: OnceLock<Loaded>,
    lost: Mutex<Lost>,
    cache: CompileCache,
}

/// The state of a started driver.
struct Loaded {
    functions: Functions,
    fork_guard: ForkGuard,
}

/// Lost contexts, with the causes of their loss.
#[derive(Default)]
struct Lost {
    causes: HashMap<u64, Arc<str>>,
    /// Primary contexts by ordinal. The end of a context removes its cause.
    primaries: HashMap<u32, u64>,
}

impl Default for RealDriver {
    fn default() -> Self {
        Self::new()
    }
}

impl RealDriver {
    /// Makes a driver that is not started. The directory of [`CompileCache::from_env`] caches
    /// compiled kernels.
    #[must_use]
    pub fn new() -> Self {
        Self::with_cache(CompileCache::from_env())
    }

    /// Makes a driver that is not started, with this cache of compiled kernels.
    #[must_use]
    pub fn with_cache(cache: CompileCache) -> Self {
        Self { loaded: OnceLock::new(), lost: Mutex::new(Lost::default()), cache }
    }

    /// The started driver.
    #[inline]
    fn loaded(&self) -> Result<&Loaded> {
        let loaded = self.loaded.get().ok_or_else(codes::not_started)?;
        codes::check_process(loaded.fork_guard)?;
        Ok(loaded)
    }

    /// Makes a call and returns its code.
    #[inline]
    fn code(&self, make: impl FnOnce(&Functions) -> c_int) -> Result<i32> {
        let loaded = self.loaded()?;
        Ok(make(&loaded.functions))
    }

    /// Makes a call, and converts a code other than success to an error.
    #[inline]
    fn call(
        &self,
        api: &'static str,
        bytes: u64,
        make: impl FnOnce(&Functions) -> c_int,
    ) -> Result<()> {
        match self.code(make)? {
            0 => Ok(()),
            code => Err(self.failed(api, code, bytes)),
        }
    }

    /// The error for a code.
    #[cold]
    fn failed(&self, api: &'static str, code: i32, bytes: u64) -> Error {
        // The calls below would say words of their own.
        let words = words::take(api, code);
        let name = self.name(code);
        let name = words.map_or(name.clone(), |words| format!("{name}: {words}").into());
        let sticky = codes::is_sticky(code);
        if sticky || !self.lost.lock().causes.is_empty() {
            let context = self.current_raw() as u64;
            if sticky && context == 0 {
                // Without a current context no cause is kept: the driver repeats the code, and
                // other failures have other causes.
                return Error::DeviceLost { cause: codes::cause(api, code, &name) };
            }
            let known = self.lost.lock().causes.get(&context).cloned();
            if code != code::NOT_READY
                && let Some(cause) = known
            {
                return Error::DeviceLost { cause };
            }
            if sticky && self.is_dead() {
                let mut lost = self.lost.lock();
                let cause =
                    lost.causes.entry(context).or_insert_with(|| codes::cause(api, code, &name));
                return Error::DeviceLost { cause: cause.clone() };
            }
        }
        codes::error(api, code, name, bytes)
    }

    /// Whether the current context is lost. A call that concerns two contexts may report the other
    /// one's loss.
    fn is_dead(&self) -> bool {
        let (mut free, mut total) = (0, 0);
        let told = drive_code(self, |f| {
            // SAFETY: the pointers are to locals.
            unsafe { (f.cuMemGetInfo_v2)(&raw mut free, &raw mut total) }
        });
        told.is_some_and(codes::is_sticky)
    }

    /// The driver's name for a code.
    fn name(&self, code: i32) -> Box<str> {
        // The bindings' function takes their enum, which must not hold a code that the bindings do
        // not know.
        if let Some(name) = codes::name(code) {
            return name.into();
        }
        let Some(loaded) = self.loaded.get() else { return codes::name_or_number(code) };
        loaded.functions.error_name(code).unwrap_or_else(|| codes::name_or_number(code))
    }

    /// The context that is current on this thread. Null if no context is current or the driver does
    /// not tell.
    fn current_raw(&self) -> CUcontext {
        let mut context: CUcontext = ptr::null_mut();
        let told = drive_code(self, |f| {
            // SAFETY: the pointer is to a local.
            unsafe { (f.cuCtxGetCurrent)(&raw mut context) }
        });
        if told == Some(0) { context } else { ptr::null_mut() }
    }

    fn device(&self, ordinal: u32) -> Result<CUdevice> {
        let mut device: CUdevice = 0;
        drive!(self, cuDeviceGet(&raw mut device, ordinal as c_int))?;
        Ok(device)
    }

    fn attribute(&self, device: CUdevice, attribute: Attribute) -> Result<i32> {
        let mut value = 0;
        drive!(self, cuDeviceGetAttribute(&raw mut value, attribute, device))?;
        Ok(value)
    }

    /// An attribute that older drivers do not know: `None` from such a driver.
    fn attribute_if_known(&self, device: CUdevice, attribute: Attribute) -> Option<i32> {
        let mut value = 0;
        // SAFETY: the pointer is to a local.
        let code = drive_code(self, |f| unsafe {
            (f.cuDeviceGetAttribute)(&raw mut value, attribute, device)
        });
        (code == Some(0)).then_some(value)
    }

    fn positive(&self, device: CUdevice, attribute: Attribute) -> Result<u32> {
        Ok(self.attribute(device, attribute)?.max(0) as u32)
    }

    fn flag(&self, device: CUdevice, attribute: Attribute) -> bool {
        self.attribute_if_known(device, attribute) == Some(1)
    }
}

/// The code of a call, if the driver is started.
fn drive_code(driver: &RealDriver, make: impl FnOnce(&Functions) -> c_int) -> Option<i32> {
    driver.code(make).ok()
}

/// The text that the driver wrote into a buffer.
fn text(buffer: &[u8]) -> String {
    CStr::from_bytes_until_nul(buffer).map(|s| plausible::text(s.to_bytes())).unwrap_or_default()
}

impl std::fmt::Debug for RealDriver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let started = if self.loaded.get().is_some() { "started" } else { "not started" };
        write!(f, "RealDriver({started})")
    }
}

impl DeviceOps for RealDriver {
    fn init(&self) -> Result<()> {
        if let Some(loaded) = self.loaded.get() {
            return codes::check_process(loaded.fork_guard);
        }
        let functions = Functions::load()?;
        let mut version = 0;
        // SAFETY: the pointer is to a local. The driver allows this call before `cuInit`.
        let told = unsafe { (functions.cuDriverGetVersion)(&raw mut version) };
        if told == 0 && version < library::OLDEST {
            return Err(Error::Unavailable(
                format!(
                    "CUDA: the driver supports {}.{}; {}.{} is the oldest that will do",
                    version / 1000,
                    version % 1000 / 10,
                    library::OLDEST / 1000,
                    library::OLDEST % 1000 / 10
                )
                .into(),
            ));
        }
        // SAFETY: `cuInit` takes 0 only.
        match unsafe { (functions.cuInit)(0) } {
            0 => {}
            code => {
                let name =
                    functions.error_name(code).unwrap_or_else(|| codes::name_or_number(code));
                return Err(codes::unavailable(code, &name));
            }
        }
        // Once in a process: the driver calls each function that was registered.
        static HEARS: OnceLock<()> = OnceLock::new();
        if let Some(register) = functions.cuLogsRegisterCallback {
            HEARS.get_or_init(|| {
                let mut handle = ptr::null_mut();
                // SAFETY: the function is of the type that the driver calls, and uses no data. A
                // driver that refuses it leaves its words unheard.
                unsafe { register(words::hear, ptr::null_mut(), &raw mut handle) };
            });
        }
        // Another thread may have been faster. Both found the same functions.
        let _ = self.loaded.set(Loaded { functions, fork_guard: ForkGuard::here() });
        Ok(())
    }

    fn driver_version(&self) -> Result<i32> {
        let mut version = 0;
        drive!(self, cuDriverGetVersion(&raw mut version))?;
        Ok(version)
    }

    fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        drive!(self, cuDeviceGetCount(&raw mut count))?;
        plausible::count("cuDeviceGetCount", count)
    }

    fn device_properties(&self, ordinal: u32) -> Result<DeviceProperties> {
        let device = self.device(ordinal)?;
        let mut buffer = [0_u8; 256];
        drive!(
            self,
            cuDeviceGetName(buffer.as_mut_ptr().cast::<c_char>(), buffer.len() as c_int, device)
        )?;
        let name = text(&buffer);
        buffer.fill(0);
        drive!(
            self,
            cuDeviceGetPCIBusId(
                buffer.as_mut_ptr().cast::<c_char>(),
                buffer.len() as c_int,
                device
            )
        )?;
        let pci = text(&buffer).to_ascii_lowercase();
        let mut uuid = CUuuid { bytes: [0; 16] };
        drive!(self, cuDeviceGetUuid_v2(&raw mut uuid, device))?;
        let mut memory = 0_usize;
        drive!(self, cuDeviceTotalMem_v2(&raw mut memory, device))?;
        use Attribute::{
            CU_DEVICE_ATTRIBUTE_CAN_USE_64_BIT_STREAM_MEM_OPS as STREAM_WORDS,
            CU_DEVICE_ATTRIBUTE_CLUSTER_LAUNCH as CLUSTERS,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR as MAJOR,
            CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR as MINOR,
            CU_DEVICE_ATTRIBUTE_CONCURRENT_KERNELS as CONCURRENT,
            CU_DEVICE_ATTRIBUTE_COOPERATIVE_LAUNCH as COOPERATIVE,
            CU_DEVICE_ATTRIBUTE_GPU_DIRECT_RDMA_WITH_CUDA_VMM_SUPPORTED as RDMA,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED as FABRIC,
            CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED as FD,
            CU_DEVICE_ATTRIBUTE_HOST_NUMA_ID as NUMA, CU_DEVICE_ATTRIBUTE_L2_CACHE_SIZE as L2,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_X as BLOCK_X,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Y as BLOCK_Y,
            CU_DEVICE_ATTRIBUTE_MAX_BLOCK_DIM_Z as BLOCK_Z,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_X as GRID_X,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Y as GRID_Y,
            CU_DEVICE_ATTRIBUTE_MAX_GRID_DIM_Z as GRID_Z,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK as SHARED,
            CU_DEVICE_ATTRIBUTE_MAX_SHARED_MEMORY_PER_BLOCK_OPTIN as SHARED_OPTIN,
            CU_DEVICE_ATTRIBUTE_MAX_THREADS_PER_BLOCK as THREADS,
            CU_DEVICE_ATTRIBUTE_MEMORY_POOLS_SUPPORTED as POOLS,
            CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT as MULTIPROCESSORS,
            CU_DEVICE_ATTRIBUTE_UNIFIED_ADDRESSING as UNIFIED,
            CU_DEVICE_ATTRIBUTE_VIRTUAL_ADDRESS_MANAGEMENT_SUPPORTED as VMM,
            CU_DEVICE_ATTRIBUTE_WARP_SIZE as WARP,
        };
        Ok(DeviceProperties {
            name,
            uuid: uuid.bytes.map(|b| b as u8),
            pci,
            compute_capability: (self.positive(device, MAJOR)?, self.positive(device, MINOR)?),
            vendor: true,
            multiprocessors: self.positive(device, MULTIPROCESSORS)?,
            memory: memory as u64,
            l2: u64::from(self.positive(device, L2)?),
            numa_node: self
                .attribute_if_known(device, NUMA)
                .and_then(|node| u32::try_from(node).ok()),
            block_threads: self.positive(device, THREADS)?,
            block: [
                self.positive(device, BLOCK_X)?,
                self.positive(device, BLOCK_Y)?,
                self.positive(device, BLOCK_Z)?,
            ],
            grid: [
                self.positive(device, GRID_X)?,
                self.positive(device, GRID_Y)?,
                self.positive(device, GRID_Z)?,
            ],
            shared: self.positive(device, SHARED)?,
            shared_optin: self.positive(device, SHARED_OPTIN)?,
            warp: self.positive(device, WARP)?,
            concurrent_kernels: self.flag(device, CONCURRENT),
            vmm: self.flag(device, VMM),
            memory_pools: self.flag(device, POOLS),
            stream_words: self.flag(device, STREAM_WORDS),
            copy_batch: self.loaded()?.functions.has_copy_batch(),
            conditional_nodes: self.loaded()?.functions.has_conditional_nodes()
                && self.driver_version()? >= 12040,
            unified_addressing: self.flag(device, UNIFIED),
            fd_handles: self.flag(device, FD),
            fabric_handles: self.flag(device, FABRIC),
            rdma: self.flag(device, RDMA),
            clusters: self.flag(device, CLUSTERS),
            cooperative_launch: self.flag(device, COOPERATIVE),
            green_contexts: self.loaded()?.functions.has_partitions(),
        })
    }

    fn can_access_peer(&self, device: u32, peer: u32) -> Result<bool> {
        let (device, peer) = (self.device(device)?, self.device(peer)?);
        let mut can = 0;
        drive!(self, cuDeviceCanAccessPeer(&raw mut can, device, peer))?;
        Ok(can != 0)
    }
}

impl ContextOps for RealDriver {
    fn primary_retain(&self, ordinal: u32) -> Result<NativeContext> {
        let device = self.device(ordinal)?;
        let mut context: CUcontext = ptr::null_mut();
        drive!(self, cuDevicePrimaryCtxRetain(&raw mut context, device))?;
        plausible::object("cuDevicePrimaryCtxRetain", context)?;
        self.lost.lock().primaries.insert(ordinal, context as u64);
        Ok(NativeContext(context as u64))
    }

    unsafe fn primary_release(&self, ordinal: u32) -> Result<()> {
        let device = self.device(ordinal)?;
        let released = drive!(self, cuDevicePrimaryCtxRelease_v2(device));
        let (mut flags, mut active) = (0, 0);
        let asked =
            drive!(self, cuDevicePrimaryCtxGetState(device, &raw mut flags, &raw mut active));
        if asked.is_ok() && active == 0 {
            let mut lost = self.lost.lock();
            if let Some(context) = lost.primaries.remove(&ordinal) {
                lost.causes.remove(&context);
            }
        }
        released
    }

    fn context_create(&self, ordinal: u32) -> Result<NativeContext> {
        let device = self.device(ordinal)?;
        let mut context: CUcontext = ptr::null_mut();
        self.call("cuCtxCreate", 0, |f| match (f.cuCtxCreate_v4, f.cuCtxCreate_v2) {
            // SAFETY: the pointer is to a local; no parameters, no flags.
            (Some(create), _) => unsafe { create(&raw mut context, ptr::null_mut(), 0, device) },
            // SAFETY: the pointer is to a local; no flags.
            (None, Some(create)) => unsafe { create(&raw mut context, 0, device) },
            (None, None) => code::NOT_SUPPORTED,
        })?;
        let mut popped: CUcontext = ptr::null_mut();
        drive!(self, cuCtxPopCurrent_v2(&raw mut popped))?;
        plausible::object("cuCtxCreate", context).map(NativeContext)
    }

    unsafe fn context_destroy(&self, context: NativeContext) -> Result<()> {
        let destroyed = drive!(self, cuCtxDestroy_v2(context.0 as CUcontext));
        self.lost.lock().causes.remove(&context.0);
        destroyed
    }

    fn current(&self) -> Result<NativeContext> {
        let mut context: CUcontext = ptr::null_mut();
        drive!(self, cuCtxGetCurrent(&raw mut context))?;
        Ok(NativeContext(context as u64))
    }

    unsafe fn set_current(&self, context: NativeContext) -> Result<()> {
        drive!(self, cuCtxSetCurrent(context.0 as CUcontext))
    }

    unsafe fn enable_peer(&self, peer: NativeContext) -> Result<()> {
        // SAFETY: the driver checks the context.
        match self.code(|f| unsafe { (f.cuCtxEnablePeerAccess)(peer.0 as CUcontext, 0) })? {
            0 | code::PEER_ACCESS_ALREADY_ENABLED => Ok(()),
            code => Err(self.failed("cuCtxEnablePeerAccess", code, 0)),
        }
    }

    unsafe fn disable_peer(&self, peer: NativeContext) -> Result<()> {
        // SAFETY: the driver checks the context.
        match self.code(|f| unsafe { (f.cuCtxDisablePeerAccess)(peer.0 as CUcontext) })? {
            0 | code::PEER_ACCESS_NOT_ENABLED => Ok(()),
            code => Err(self.failed("cuCtxDisablePeerAccess", code, 0)),
        }
    }

    fn context_synchronize(&self) -> Result<()> {
        drive!(self, cuCtxSynchronize())
    }

    fn exchange_capture_mode(&self, mode: CaptureMode) -> Result<CaptureMode> {
        // A plain integer, because the driver writes the former mode here.
        let mut word = conv::capture_mode(mode);
        drive!(self, cuThreadExchangeStreamCaptureMode((&raw mut word).cast()))?;
        conv::capture_mode_of(word).ok_or_else(|| {
            Error::Unavailable(format!("CUDA: the driver's capture mode {word}").into())
        })
    }

    fn priority_range(&self) -> Result<(i32, i32)> {
        let (mut lowest, mut highest) = (0, 0);
        drive!(self, cuCtxGetStreamPriorityRange(&raw mut lowest, &raw mut highest))?;
        Ok((lowest, highest))
    }
}

// SAFETY: each method makes the vendor's call that its documentation names, and rejects answers
// that fail `plausible`'s checks.
unsafe impl CudaSlowOps for RealDriver {
    fn poll_interval(&self) -> Duration {
        Duration::from_micros(20)
    }

    fn compile(
        &self,
        source: &str,
        name: &str,
        options: &[String],
        compute_capability: (u32, u32),
    ) -> Result<Vec<u8>> {
        let compiler = nvrtc::Compiler::load()?;
        let architecture = compiler.architecture(compute_capability)?;
        let driver = self.driver_version().unwrap_or(0);
        let version = compiler.version();
        let key =
            Key { source, name, options, architecture: &architecture, compiler: &version, driver };
        self.cache.get_or_compile(&key, || compiler.compile(source, name, options, &architecture))
    }

    fn compiler(&self) -> String {
        nvrtc::Compiler::load().map_or_else(|_| "none".to_owned(), |compiler| compiler.version())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn without_a_driver_everything_says_so() {
        let driver = RealDriver::new();
        // The driver is not started yet, on every machine.
        assert!(matches!(driver.device_count(), Err(Error::InvalidState(_))));
        match driver.init() {
            Ok(()) => assert!(driver.driver_version().unwrap() >= library::OLDEST),
            Err(Error::Unavailable(why)) => assert!(why.contains("CUDA"), "{why}"),
            Err(other) => panic!("{other}"),
        }
    }
}
