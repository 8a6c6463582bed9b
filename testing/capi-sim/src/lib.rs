//! The C ABI of [`leasehold_capi`] with devices of a simulated CUDA driver, for tests of programs
//! without a GPU: `sim-cuda:0` and `sim-cuda:1`, or as many as `LEASEHOLD_SIM_DEVICES` in the
//! environment says, and functions `leasehold_sim_*` that make streams
//! and give them work. The header `leasehold.h` declares them with `LEASEHOLD_SIM`.
//!
//! `LEASEHOLD_SEED` picks the order of what nothing orders: of commands, and of a kernel's blocks
//! and threads, which odd seeds run forwards and even ones backwards. `LEASEHOLD_FAULTS` names
//! calls of the driver that fail ([`FaultPlan`]).
//!
//! The driver is one per process. Its race detector finds work that uses memory too early.
//!
//! The libraries have names of their own, `libleasehold_capi_sim`. They have all functions of the
//! C ABI. In Rust, [`context`] makes the devices known.

use leasehold::{Backend, Context, Error, Result, Runtime, cuda};
use leasehold_alloc::Allocator;
use leasehold_capi::extend::{self, ffi_guard};
use leasehold_collective::driver::CollectiveOps;
use leasehold_core::sync::{Arc, OnceLock};
use leasehold_cuda::driver::ops::{
    CaptureMode, ContextOps, CudaSlowOps, EventFlags, EventOps, GraphOps, NativeContext,
    NativeFill, NativeStream, StreamOps,
};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{FaultPlan, MachineConfig};
use std::ffi::{CStr, c_char, c_int, c_void};

pub use leasehold_sim::{Report, ReportKind};

/// Bytes of each simulated device.
const MEMORY: u64 = 1 << 30;

/// The number of simulated devices: 2, or what the environment says.
///
/// # Errors
/// `InvalidArgument` for what is no number from 1 to 16.
fn count() -> Result<u32> {
    let Some(text) = std::env::var_os("LEASEHOLD_SIM_DEVICES") else { return Ok(2) };
    let count = text.to_str().and_then(|text| text.parse().ok());
    count.filter(|count| (1..=16).contains(count)).ok_or_else(|| {
        Error::invalid(format!(
            "LEASEHOLD_SIM_DEVICES={text:?} is no number of devices from 1 to 16"
        ))
    })
}

/// The seed of a process whose environment says nothing.
const SEED: u64 = 1;

/// The seed: 1, or what the environment says.
///
/// # Errors
/// `InvalidArgument` for what is no number.
fn seed() -> Result<u64> {
    let Some(text) = std::env::var_os("LEASEHOLD_SEED") else { return Ok(SEED) };
    text.to_str().and_then(|text| text.parse().ok()).ok_or_else(|| {
        Error::invalid(format!("LEASEHOLD_SEED={text:?} is no number from 0 to 2^64 - 1"))
    })
}

/// The faults: none, or what the environment says.
///
/// # Errors
/// `InvalidArgument` for what is no list of faults.
fn faults() -> Result<FaultPlan> {
    let text = std::env::var_os("LEASEHOLD_FAULTS").unwrap_or_default();
    match text.to_string_lossy().parse() {
        Err(Error::InvalidArgument(why)) => {
            Err(Error::invalid(format!("LEASEHOLD_FAULTS={text:?}: {why}")))
        }
        plan => plan,
    }
}

struct Simulation {
    driver: Arc<SimDriver>,
    context: Context,
    collectives: Arc<SimCollectives>,
}

static ONE: OnceLock<Result<Simulation>> = OnceLock::new();

fn simulation() -> Result<&'static Simulation> {
    let made = ONE.get_or_init(|| {
        let seed = seed()?;
        let mut machine = MachineConfig::seed(seed).devices(count()?, MEMORY).faults(faults()?);
        machine.hint = Some(hint(seed).into());
        let mut config = SimDriverConfig::new(machine);
        config.reverse = seed.is_multiple_of(2);
        let driver = Arc::new(SimDriver::new(config)?);
        let collectives = Arc::new(SimCollectives::of_cuda(&driver));
        let ops: Arc<dyn CudaSlowOps> = driver.clone();
        let backend = CudaBackend::with_ops(ops, CudaConfig::default())?;
        let context = Context::with_backends(vec![Arc::new(backend) as Arc<dyn Backend>]);
        Ok(Simulation { driver, context, collectives })
    });
    made.as_ref().map_err(Clone::clone)
}

/// The way to have an order again.
fn hint(seed: u64) -> String {
    format!("LEASEHOLD_SEED={seed} gives this order again")
}

/// Takes what the race detector found since the last call.
#[must_use]
pub fn take_reports() -> Vec<Report> {
    // No device was opened if there is no driver yet.
    ONE.get()
        .and_then(|made| made.as_ref().ok())
        .map_or_else(Vec::new, |simulation| simulation.driver.machine().take_reports())
}

/// Names a stream of a simulated device, by its handle, in faults and reports.
///
/// # Errors
/// `InvalidArgument` for a handle of no stream.
pub fn name_stream(stream: u64, name: &str) -> Result<()> {
    simulation()?.driver.name_stream(NativeStream(stream), name)
}

/// A report as text, with the buffer of `memory` that has its address, and how its order comes
/// again.
#[must_use]
pub fn describe(report: &Report, memory: Option<&Allocator>) -> String {
    let text = memory.map_or_else(|| report.to_string(), |memory| report.describe(memory));
    format!("{text}; {}", hint(seed().unwrap_or(SEED)))
}

/// Makes the devices known when the library is loaded: a program's first call may open one.
#[used]
#[cfg_attr(target_vendor = "apple", unsafe(link_section = "__DATA,__mod_init_func"))]
#[cfg_attr(
    any(target_os = "linux", target_os = "android", target_os = "freebsd"),
    unsafe(link_section = ".init_array")
)]
static LOADED: extern "C" fn() = {
    extern "C" fn loaded() {
        extend::simulate(context);
        extend::simulate_collectives(collectives);
    }
    loaded
};

/// The context of the simulated devices, which Rust calls `cuda:0` and `cuda:1`.
///
/// # Errors
/// Those of the driver's start.
pub fn context() -> Result<&'static Context> {
    extend::simulate(context);
    extend::simulate_collectives(collectives);
    Ok(&simulation()?.context)
}

/// The library of collectives of the simulated devices.
fn collectives(runtime: &Runtime) -> Result<Option<Arc<dyn CollectiveOps>>> {
    // A runtime of the simulated driver has started it.
    let Some(Ok(simulation)) = ONE.get() else { return Ok(None) };
    let ours = runtime.context().same(&simulation.context);
    Ok(ours.then(|| simulation.collectives.clone() as Arc<dyn CollectiveOps>))
}

/// The simulated driver, with a device's context current on this thread.
fn driver(device: u64) -> Result<&'static SimDriver> {
    let runtime = extend::runtime(device)?;
    let simulation = simulation()?;
    if !runtime.context().same(&simulation.context) {
        return Err(Error::invalid("the device is not simulated"));
    }
    let context = NativeContext(cuda::raw_context(&runtime)?);
    // SAFETY: the runtime holds its context, and the simulated driver refuses one that is gone.
    unsafe { simulation.driver.set_current(context) }?;
    Ok(&simulation.driver)
}

/// Makes a stream. `kind`: 0 for a new one, 1 for the legacy default stream, 2 for the calling
/// thread's.
///
/// # Safety
/// - `stream` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_sim_stream(
    device: u64,
    kind: c_int,
    stream: *mut usize,
) -> c_int {
    ffi_guard(|| {
        let driver = driver(device)?;
        let made = match kind {
            0 => driver.stream_create(0)?,
            1 => driver.legacy_stream()?,
            2 => driver.per_thread_stream()?,
            other => return Err(Error::invalid(format!("{other} is no kind of stream"))),
        };
        if stream.is_null() {
            return Err(Error::invalid("the stream's place is null"));
        }
        // SAFETY: the caller says that it can be written.
        unsafe { stream.write(made.0 as usize) };
        Ok(())
    })
}

/// Destroys a stream.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_sim_stream_destroy(device: u64, stream: usize) -> c_int {
    // SAFETY: the simulated driver refuses a stream that is not there.
    ffi_guard(|| unsafe { driver(device)?.stream_destroy(NativeStream(stream as u64)) })
}

/// Fills memory with a byte, on a stream.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_sim_fill(
    device: u64,
    stream: usize,
    at: *mut c_void,
    byte: u8,
    bytes: usize,
) -> c_int {
    ffi_guard(|| {
        let fill = NativeFill { dst: at as u64, count: bytes as u64, value: byte.into(), width: 1 };
        // SAFETY: the simulated driver checks the range, and its race detector the order.
        unsafe { driver(device)?.fill(NativeStream(stream as u64), &fill) }
    })
}

/// Copies memory of the device to the host, and waits.
///
/// # Safety
/// - `to` has room for `bytes`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_sim_read(
    device: u64,
    stream: usize,
    to: *mut c_void,
    from: *const c_void,
    bytes: usize,
) -> c_int {
    use leasehold_cuda::driver::ops::{CopyKind, NativeCopy};
    ffi_guard(|| {
        let driver = driver(device)?;
        let copy = NativeCopy::linear(CopyKind::DeviceToHost, to as u64, from as u64, bytes as u64);
        let stream = NativeStream(stream as u64);
        // SAFETY: the caller vouches for the host's side, which is used until the wait below; the
        // simulated driver checks the device's.
        unsafe { driver.copy(stream, &copy) }?;
        // SAFETY: the simulated driver refuses a stream that is not there.
        unsafe { driver.stream_synchronize(stream) }
    })
}

/// Lets later work of one stream wait for the work of another.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_sim_order(device: u64, earlier: usize, later: usize) -> c_int {
    ffi_guard(|| {
        let driver = driver(device)?;
        let event = driver.event_create(EventFlags::default())?;
        // SAFETY: the event was made here and is destroyed once; the simulated driver refuses
        // streams that are not there.
        unsafe {
            let ordered = driver
                .event_record(event, NativeStream(earlier as u64))
                .and_then(|()| driver.stream_wait_event(NativeStream(later as u64), event));
            ordered.and(driver.event_destroy(event))
        }
    })
}

/// Begins (1) or ends (0) a capture of a stream; the graph of an ended one is dropped. 2 begins one
/// that forbids calls to all threads, as PyTorch does.
#[unsafe(no_mangle)]
pub extern "C" fn leasehold_sim_capture(device: u64, stream: usize, begin: c_int) -> c_int {
    ffi_guard(|| {
        let (driver, stream) = (driver(device)?, NativeStream(stream as u64));
        // SAFETY: the simulated driver refuses streams that are not there; the graph was just made.
        unsafe {
            match begin {
                0 => driver.capture_end(stream).and_then(|graph| driver.graph_destroy(graph)),
                2 => driver.capture_begin_in(stream, CaptureMode::Global),
                _ => driver.capture_begin(stream),
            }
        }
    })
}

/// The races that were found since the last call, one a line; an empty text for none. Freed by
/// `leasehold_text_free`.
///
/// # Safety
/// - `text` can be written.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_sim_races(text: *mut *mut c_char) -> c_int {
    ffi_guard(|| {
        let lines: Vec<String> = take_reports().iter().map(|r| describe(r, None)).collect();
        if text.is_null() {
            return Err(Error::invalid("the text's place is null"));
        }
        // SAFETY: the caller says that it can be written.
        unsafe { text.write(extend::owned(lines.join("\n"))?) };
        Ok(())
    })
}

/// How many calls of the driver with this name were made so far, in the whole process.
///
/// # Safety
/// - `name` is a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn leasehold_sim_calls(name: *const c_char) -> u64 {
    let mut count = 0;
    ffi_guard(|| {
        if name.is_null() {
            return Err(Error::invalid("the name is null"));
        }
        // SAFETY: the caller vouches for the C string.
        let name = unsafe { CStr::from_ptr(name) }.to_bytes();
        let calls = simulation()?.driver.machine().calls_by_name();
        count = calls.into_iter().find(|c| c.0.as_bytes() == name).map_or(0, |c| c.1);
        Ok(())
    });
    count
}
