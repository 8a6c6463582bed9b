//! Devices: one state for each in the process, shared by all Python objects that name it.

use crate::allocator::{AllocatorObject, Pool};
use crate::arguments;
use crate::buffer;
use crate::errors::raise;
use crate::fork;
use crate::stream::StreamObject;
use crate::waits::{is_interrupt, until};
use leasehold::cuda::{self, ExternalManager, ExternalStream};
use leasehold::{BackendKind, Context, DeviceId, Error, Result, Runtime, Stream};
use leasehold_alloc::Policy;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{TimelineSource, Timepoint};
use pyo3::prelude::*;
use std::collections::BTreeMap;
use std::sync::{OnceLock, Weak};

/// The open devices by name. They stay open until the process ends.
static OPEN: Mutex<BTreeMap<String, Arc<State>>> = Mutex::new(BTreeMap::new());

/// DLPack's numbers of devices (`DLDeviceType`).
pub(crate) const DL_CPU: i32 = 1;
pub(crate) const DL_CUDA: i32 = 2;
pub(crate) const DL_CUDA_HOST: i32 = 3;
/// A device that nobody else knows: a simulated one.
pub(crate) const DL_EXTENSION: i32 = 12;
pub(crate) const DL_CUDA_MANAGED: i32 = 13;

/// The handle of the calling thread's default stream, the last one that names a default stream.
const PER_THREAD: u64 = 2;

/// An open device.
pub(crate) struct State {
    pub(crate) name: String,
    pub(crate) runtime: Runtime,
    /// Whether its memory is the host's.
    pub(crate) host: bool,
    simulated: bool,
    /// The process that opened it: a driver's state and the threads of streams do not survive a
    /// fork.
    generation: u32,
    /// Whether streams of the device were given work by a `Stream`.
    streams: AtomicBool,
    main: OnceLock<Arc<Pool>>,
    pools: Mutex<Vec<Weak<Pool>>>,
}

/// The context of a device's name, and its name there.
fn context(name: &str) -> Result<(&'static Context, &str)> {
    #[cfg(feature = "sim")]
    if let Some(rest) = name.strip_prefix("sim-") {
        return Ok((leasehold_capi_sim::context()?, rest));
    }
    if name.starts_with("sim-") {
        return Err(Error::Unavailable("this build has no simulated devices".into()));
    }
    Ok((Context::global(), name))
}

impl State {
    /// The device of a name. Blocks on the driver's start.
    pub(crate) fn open(name: &str) -> Result<Arc<Self>> {
        let (context, plain) = context(name)?;
        let simulated = plain.len() < name.len();
        let kinds: &[BackendKind] = match simulated {
            true => &[BackendKind::Cuda],
            false => &[BackendKind::Cpu, BackendKind::Cuda],
        };
        let id = DeviceId::parse_among(plain, kinds).map_err(|_| {
            let known =
                if cfg!(feature = "sim") { "cpu:0, cuda:0, sim-cuda:0" } else { "cpu:0, cuda:0" };
            Error::invalid(format!("{name:?} is no device; the first of each kind are {known}"))
        })?;
        let name = format!("{}{id}", if simulated { "sim-" } else { "" });
        if let Some(open) = OPEN.lock().get(&name) {
            return Ok(open.clone());
        }
        let host = id.backend == BackendKind::Cpu;
        let made = Arc::new(Self {
            runtime: context.runtime(id)?,
            name: name.clone(),
            host,
            simulated,
            generation: fork::generation(),
            streams: AtomicBool::new(false),
            main: OnceLock::new(),
            pools: Mutex::default(),
        });
        // If another thread was faster, its device stays.
        Ok(OPEN.lock().entry(name).or_insert(made).clone())
    }

    /// As [`open`](Self::open), without the interpreter's lock unless the device is open.
    pub(crate) fn named(py: Python<'_>, name: &str) -> Result<Arc<Self>> {
        let open = OPEN.lock().get(name).cloned();
        open.map_or_else(|| py.detach(|| Self::open(name)), Ok)
    }

    /// Runs a call that may wait for the device, without the interpreter's lock. Calls of a host's
    /// device without streams wait for nothing and keep the lock: so no thread is inside one as the
    /// process forks, and a child finds no lock of the runtime taken.
    pub(crate) fn outside<R: Send>(&self, py: Python<'_>, call: impl FnOnce() -> R + Send) -> R {
        if self.is_quiet() { call() } else { py.detach(call) }
    }

    /// Whether it is the host's device, and nothing was given to a stream of it.
    fn is_quiet(&self) -> bool {
        self.host && !self.streams.load(Ordering::Acquire)
    }

    /// Notes that streams of the device are given work.
    ///
    /// # Errors
    /// `InvalidState` in a child of the process that opened the device: streams have threads.
    pub(crate) fn use_streams(&self) -> Result<()> {
        self.streams.store(true, Ordering::Release);
        self.check_process()
    }

    /// Names a stream, also for what a simulated device tells.
    pub(crate) fn name_stream(&self, stream: &Stream, name: String) -> Result<()> {
        #[cfg(feature = "sim")]
        if self.simulated && stream.native() != 0 {
            leasehold_capi_sim::name_stream(stream.native(), &name)?;
        }
        stream.set_name(name);
        Ok(())
    }

    /// Whether a stream is the device's own, on which buffers work.
    pub(crate) fn is_own(&self, stream: &Stream) -> bool {
        stream.same(self.runtime.stream())
    }

    pub(crate) fn host(py: Python<'_>) -> Result<Arc<Self>> {
        Self::named(py, "cpu:0")
    }

    pub(crate) fn ordinal(&self) -> i32 {
        self.runtime.device().ordinal as i32
    }

    /// The device as DLPack numbers it.
    pub(crate) fn dlpack(&self) -> (i32, i32) {
        let kind = match (self.host, self.simulated) {
            (true, _) => DL_CPU,
            (false, false) => DL_CUDA,
            (false, true) => DL_EXTENSION,
        };
        (kind, self.ordinal())
    }

    /// The device of DLPack's numbers.
    pub(crate) fn of_dlpack(py: Python<'_>, kind: i32, ordinal: i32) -> Result<Arc<Self>> {
        match kind {
            DL_CPU | DL_CUDA_HOST => Self::host(py),
            DL_CUDA | DL_CUDA_MANAGED => Self::named(py, &format!("cuda:{ordinal}")),
            DL_EXTENSION if cfg!(feature = "sim") => {
                Self::named(py, &format!("sim-cuda:{ordinal}"))
            }
            other => Err(Error::Unsupported(
                format!("DLPack's device type {other} (device {ordinal}) is unknown here").into(),
            )),
        }
    }

    /// Whether the process is a child of the one that opened the device, unless nothing but host
    /// memory was used.
    pub(crate) fn is_forked(&self) -> bool {
        !self.is_quiet() && self.generation != fork::generation()
    }

    /// # Errors
    /// `InvalidState` in a child of the process that opened the device.
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() {
            return Err(Error::state(format!(
                "{} was used before a fork; start workers with the method \"spawn\"",
                self.name
            )));
        }
        Ok(())
    }

    /// Lets the stream of a consumer begin after what the device's stream has now and after
    /// timepoints. Returns what stands for the stream's work from then on. Blocks on that work if
    /// the stream is neither a default one nor the device's own: nobody can vouch for the handle,
    /// so the driver does not get it.
    ///
    /// # Errors
    /// `InvalidArgument` for a number that cannot be a stream of this process.
    pub(crate) fn admit(&self, handle: u64, points: &[Timepoint]) -> Result<Arc<ExternalStream>> {
        let order = |stream: &ExternalStream| {
            self.order_before(self.runtime.stream(), stream)?;
            points.iter().try_for_each(|&point| self.order_one_before(stream, point))
        };
        if handle == cuda::raw_stream(self.runtime.stream())? {
            let stream = self.told()?;
            order(&stream)?;
            return Ok(stream);
        }
        if handle <= PER_THREAD {
            // SAFETY: default streams exist as long as the device.
            let stream = unsafe { cuda::external_stream(&self.runtime, handle) }?;
            order(&stream)?;
            return Ok(stream);
        }
        self.externals()?.check_handle(handle)?;
        let raw = self.runtime.stream().raw();
        if !raw.timeline().is_idle() {
            self.wait_for(raw.timeline().at(raw.signal()?))?;
        }
        self.wait_for(points)?;
        self.whole()
    }

    fn externals(&self) -> Result<&Arc<ExternalManager>> {
        let device = leasehold::cuda::device_state(&self.runtime);
        let device = device.ok_or_else(|| Error::invalid("the device has no streams"))?;
        Ok(device.primary().externals())
    }

    /// The stand-in for streams of the device whose handles may not be used.
    pub(crate) fn whole(&self) -> Result<Arc<ExternalStream>> {
        self.externals()?.whole()
    }

    /// The device's own stream, as other libraries are told of it.
    pub(crate) fn told(&self) -> Result<Arc<ExternalStream>> {
        let own = cuda::raw_stream(self.runtime.stream())?;
        // SAFETY: a stream of the device, which exists as long as this state: until the process
        // ends.
        unsafe { cuda::external_stream(&self.runtime, own) }
    }

    /// Lets later work of another library's stream wait for what a stream of the device has now.
    /// Blocks if that is held back for now.
    pub(crate) fn order_before(&self, stream: &Stream, other: &ExternalStream) -> Result<()> {
        let raw = stream.raw();
        if raw.timeline().is_idle() {
            return Ok(());
        }
        let point = raw.timeline().at(raw.signal()?);
        self.order_one_before(other, point)
    }

    /// As [`order_before`](Self::order_before), for one timepoint.
    pub(crate) fn order_one_before(&self, other: &ExternalStream, point: Timepoint) -> Result<()> {
        match other.wait(point) {
            // The stream cannot wait for it on the device: the host does.
            Err(Error::Unsupported(_)) => self.wait_for(point),
            other => other,
        }
    }

    /// Lets later work of a stream come after a timepoint. Blocks if the device cannot wait for it.
    pub(crate) fn order_after(&self, stream: &Stream, point: Timepoint) -> Result<()> {
        stream.wait(point).or_else(|_| self.wait_for(point))
    }

    /// Waits on the host until timepoints are over.
    pub(crate) fn wait_for(&self, points: impl AsRef<[Timepoint]>) -> Result<()> {
        let points = points.as_ref();
        match until(None, |limit| self.runtime.wait_for_timeout(points, limit)) {
            // Of an unknown stream only the driver knows, whose wait has no limit.
            Err(Error::InvalidState(_)) => self.runtime.wait_for(points),
            over => over,
        }
    }

    /// Waits for all work of the device, also on streams that are unknown here. Ctrl-C does not end
    /// the wait.
    pub(crate) fn synchronize_all(&self) -> Result<()> {
        if self.host {
            return if self.is_quiet() { Ok(()) } else { self.runtime.synchronize() };
        }
        let own = self.runtime.synchronize();
        self.whole()?.synchronize_context()?;
        own
    }

    /// The device's default allocator.
    pub(crate) fn main(self: &Arc<Self>) -> Result<Arc<Pool>> {
        if let Some(main) = self.main.get() {
            return Ok(main.clone());
        }
        let made = Pool::new(self, "memory", Policy::default(), u64::MAX, 0, None)?;
        // If another thread was faster, its allocator stays.
        Ok(self.main.get_or_init(|| made).clone())
    }

    pub(crate) fn note(&self, pool: &Arc<Pool>) {
        let mut pools = self.pools.lock();
        pools.retain(|pool| pool.strong_count() > 0);
        pools.push(Arc::downgrade(pool));
    }

    /// Gives the free memory of the device's other allocators back to the driver. Returns the bytes
    /// that went.
    pub(crate) fn trim_others(&self, but: &Arc<Pool>) -> Result<u64> {
        let pools: Vec<_> = self.pools.lock().iter().filter_map(Weak::upgrade).collect();
        let mut others = pools.iter().filter(|pool| !Arc::ptr_eq(pool, but));
        others.try_fold(0, |freed, pool| Ok(freed + pool.allocator.trim(0)?))
    }
}

/// A device: `Device("cuda:0")`, `Device("cpu:0")`.
#[pyclass(frozen, name = "Device", module = "leasehold")]
pub(crate) struct Device(pub(crate) Arc<State>);

/// The state of a device that a Python object names: a `Device` or a name.
pub(crate) fn state(of: &Bound<'_, PyAny>) -> PyResult<Arc<State>> {
    if let Ok(device) = of.cast::<Device>() {
        return Ok(device.get().0.clone());
    }
    let name: String = arguments::value(of, "a device is a Device or its name")?;
    State::named(of.py(), &name).map_err(raise)
}

#[pymethods]
impl Device {
    #[new]
    fn new(device: &Bound<'_, PyAny>) -> PyResult<Self> {
        state(device).map(Self)
    }

    /// The name: `cuda:0`.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// The product's name.
    #[getter]
    fn product(&self) -> &str {
        &self.0.runtime.info().name
    }

    /// The compute capability: `(9, 0)`. `None` where the product has none, as on the CPU.
    #[getter]
    fn compute_capability(&self) -> Option<(u32, u32)> {
        let info = self.0.runtime.info();
        // The most specific architecture is the first one.
        let digits = info.arch.first()?.strip_prefix("cuda/sm_")?;
        let (major, minor) = digits.split_at_checked(digits.len().checked_sub(1)?)?;
        Some((major.parse().ok()?, minor.parse().ok()?))
    }

    /// The device's number among those of its kind.
    #[getter]
    fn index(&self) -> i32 {
        self.0.ordinal()
    }

    /// Bytes that no process uses, and all bytes.
    fn memory_info(&self, py: Python<'_>) -> PyResult<(u64, u64)> {
        let memory = self.0.outside(py, || {
            self.0.check_process()?;
            self.0.runtime.raw_device().memory_info()
        });
        memory.map(|memory| (memory.free, memory.total)).map_err(raise)
    }

    /// The allocator of buffers that are made by the device.
    #[getter]
    fn allocator(&self, py: Python<'_>) -> PyResult<AllocatorObject> {
        let main = self.0.outside(py, || self.0.main()).map_err(raise)?;
        Ok(AllocatorObject(main))
    }

    /// Waits for all work of the device, for a limited time if one is given.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = arguments::timeout(timeout)?;
        let wait = || {
            self.0.check_process()?;
            if self.0.is_quiet() {
                return Ok(());
            }
            let own = until(timeout, |limit| self.0.runtime.synchronize_timeout(limit));
            if timeout.is_some() || own.as_ref().is_err_and(is_interrupt) {
                return own;
            }
            // Work of streams that are unknown here is left.
            self.0.synchronize_all()
        };
        self.0.outside(py, wait).map_err(raise)
    }

    /// Begins a recording: `with device.record() as stream:`. What the stream is given in the block
    /// is noted and not run, and the block's end makes `stream.graph` of it. Only the thread that
    /// began it may use it. An exception in the block gives the recording up.
    fn record(&self, py: Python<'_>) -> PyResult<StreamObject> {
        py.detach(|| StreamObject::begin(&self.0)).map_err(raise)
    }

    /// A new buffer with unspecified contents. A number without a type is a size in bytes:
    /// `empty(4096)` has the type `uint8`. Any other shape needs a type.
    #[pyo3(signature = (shape, dtype=None))]
    fn empty<'py>(
        &self,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        buffer::empty(&main(shape.py(), &self.0)?, shape, dtype)
    }

    /// A new buffer of zeros. A number without a type is a size in bytes: `zeros(4096)` has the
    /// type `uint8`. Any other shape needs a type.
    #[pyo3(signature = (shape, dtype=None))]
    fn zeros<'py>(
        &self,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        buffer::zeros(&main(shape.py(), &self.0)?, shape, dtype)
    }

    /// A new buffer with the contents, shape and type of an array.
    fn upload<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        buffer::upload(&main(array.py(), &self.0)?, array)
    }

    fn __eq__(&self, other: &Bound<'_, PyAny>) -> bool {
        other.cast::<Device>().is_ok_and(|other| other.get().0.name == self.0.name)
    }

    fn __hash__(&self) -> u64 {
        use std::hash::{DefaultHasher, Hash, Hasher};
        let mut hasher = DefaultHasher::new();
        self.0.name.hash(&mut hasher);
        hasher.finish()
    }

    fn __repr__(&self) -> String {
        format!("Device('{}')", self.0.name)
    }
}

fn main(py: Python<'_>, state: &Arc<State>) -> PyResult<Arc<Pool>> {
    state.outside(py, || state.main()).map_err(raise)
}

/// The names of the devices that are there. Opens none of them.
#[pyfunction]
pub(crate) fn devices(py: Python<'_>) -> Vec<String> {
    py.detach(|| {
        let of = |prefix: &str, context: &Context| {
            let mut ids: Vec<_> = context.devices().iter().map(|device| device.id).collect();
            ids.retain(|id| matches!(id.backend, BackendKind::Cpu | BackendKind::Cuda));
            ids.iter().map(|id| format!("{prefix}{id}")).collect::<Vec<_>>()
        };
        let found = of("", Context::global());
        #[cfg(feature = "sim")]
        if let Ok(simulated) = leasehold_capi_sim::context() {
            return [found, of("sim-", simulated)].concat();
        }
        found
    })
}

/// The devices that this process has opened.
#[pyfunction]
pub(crate) fn opened() -> Vec<Device> {
    OPEN.lock().values().cloned().map(Device).collect()
}

/// Reports of the simulated devices' race detector since the last call. Each has a text with the
/// buffer's name. Its flag tells a race from a read of memory that nobody wrote.
#[pyfunction]
pub(crate) fn reports(py: Python<'_>) -> Vec<(bool, String)> {
    #[cfg(feature = "sim")]
    let found = py.detach(|| {
        use leasehold_capi_sim::{Report, ReportKind};
        let reports = leasehold_capi_sim::take_reports();
        if reports.is_empty() {
            return Vec::new();
        }
        let devices: Vec<_> = OPEN.lock().values().filter(|d| d.simulated).cloned().collect();
        let of = |device: Arc<State>| -> Vec<Arc<Pool>> {
            let others: Vec<_> = device.pools.lock().iter().filter_map(Weak::upgrade).collect();
            [device.main.get().cloned().into_iter().collect(), others].concat()
        };
        let pools: Vec<_> = devices.into_iter().flat_map(of).collect();
        let described = |report: &Report| {
            let holds = |pool: &&Arc<Pool>| {
                pool.allocator.holding(report.addr, report.bytes.min(1), 0).is_some()
            };
            let memory = pools.iter().find(holds).map(|pool| &pool.allocator);
            (report.kind != ReportKind::NeverWritten, leasehold_capi_sim::describe(report, memory))
        };
        reports.iter().map(described).collect()
    });
    #[cfg(not(feature = "sim"))]
    let found = py.detach(Vec::new);
    found
}
