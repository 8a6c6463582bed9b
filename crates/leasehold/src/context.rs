//! Contexts: who owns the runtimes, and which one a thread uses now.
//!
//! The only table of backends is here. A thread's *current* context is a light bundle of
//! references; it is set for a while by a guard that restores the former one, and no other call
//! touches it.

pub use crate::runtime::inner::Context;

use crate::runtime::{Runtime, RuntimeInner, Table};
use crate::stream::Stream;
use crate::trace;
use leasehold_alloc::Allocator;
use leasehold_core::sync::{Arc, Mutex, RwLock};
use leasehold_core::{Error, Result};
use leasehold_hal::{Backend, BackendKind, Device, DeviceId, DeviceInfo, Former};
use std::cell::{Cell, RefCell};
use std::collections::HashMap;
use std::fmt;
use std::sync::OnceLock;

/// The report on one backend: its kind, and its devices or the reason why it has none.
#[derive(Debug)]
pub struct BackendReport {
    /// Which backend.
    pub kind: BackendKind,
    /// Its devices, or why there are none.
    pub devices: Result<Vec<DeviceInfo>>,
}

/// Backends that this build knows of but has not got, and why.
fn absent() -> Vec<(BackendKind, &'static str)> {
    let mut absent = Vec::new();
    if !cfg!(feature = "cpu") {
        absent.push((
            BackendKind::Cpu,
            "this build has no CPU backend; build with the feature `cpu`",
        ));
    }
    if !cfg!(feature = "cuda") {
        absent.push((
            BackendKind::Cuda,
            "this build has no CUDA backend; build with the feature `cuda`",
        ));
    }
    if !cfg!(feature = "mps") {
        absent.push((
            BackendKind::Mps,
            "this build has no Metal backend; build with the feature `mps`",
        ));
    }
    absent
}

/// The backends of this build: the only place that names them.
fn registered() -> Vec<Arc<dyn Backend>> {
    Vec::from([
        #[cfg(feature = "cpu")]
        (Arc::new(leasehold_cpu::CpuBackend::new()) as Arc<dyn Backend>),
        #[cfg(feature = "cuda")]
        (Arc::new(leasehold_cuda::CudaBackend::new()) as Arc<dyn Backend>),
        #[cfg(feature = "mps")]
        (Arc::new(leasehold_mps::MpsBackend::new()) as Arc<dyn Backend>),
    ])
}

impl Default for Context {
    fn default() -> Self {
        Self::new()
    }
}

impl Context {
    /// A context of its own, with the backends of this build. Finds no devices yet and cannot fail.
    #[must_use]
    pub fn new() -> Self {
        Self::with_backends(registered())
    }

    /// A context with the caller's backends: a configured one, a wrapped one, one of somebody
    /// else's.
    #[must_use]
    pub fn with_backends(backends: Vec<Arc<dyn Backend>>) -> Self {
        Self(Arc::new(Table { backends, runtimes: Mutex::new(HashMap::new()) }))
    }

    /// The context that the process shares.
    pub fn global() -> &'static Context {
        static GLOBAL: OnceLock<Context> = OnceLock::new();
        GLOBAL.get_or_init(Context::new)
    }

    /// Every backend known to the build, found or not, with the reason. May block on drivers'
    /// starts.
    #[must_use]
    pub fn backends(&self) -> Vec<BackendReport> {
        let mut reports: Vec<_> = self
            .0
            .backends
            .iter()
            .map(|b| BackendReport { kind: b.kind(), devices: b.devices() })
            .collect();
        for (kind, why) in absent() {
            if reports.iter().all(|r| r.kind != kind) {
                reports.push(BackendReport { kind, devices: Err(Error::Unavailable(why.into())) });
            }
        }
        reports
    }

    /// The backend of this kind, if the context has it.
    #[must_use]
    pub fn backend(&self, kind: BackendKind) -> Option<Arc<dyn Backend>> {
        self.0.backends.iter().find(|b| b.kind() == kind).cloned()
    }

    /// The devices that are there.
    #[must_use]
    pub fn devices(&self) -> Vec<DeviceInfo> {
        self.0.backends.iter().filter_map(|b| b.devices().ok()).flatten().collect()
    }

    /// The device that a name means here: `cpu:0`, `cuda`, and the names of backends of somebody
    /// else's that this context was made with ([`BackendKind::Other`]). The printed form of a
    /// [`DeviceId`] of the context is read as that device again. The result does not say whether
    /// the device is there.
    ///
    /// # Errors
    /// `InvalidArgument` for another backend, or an ordinal that is no number.
    pub fn device_id(&self, name: &str) -> Result<DeviceId> {
        let own: Vec<_> = self.0.backends.iter().map(|b| b.kind()).collect();
        // A device that only other contexts have is named too; `runtime` says why it is not here.
        DeviceId::parse_among(name, &own).or_else(|e| name.parse().map_err(|_| e))
    }

    /// The runtime of a device: one per device, made when first asked for, shared by all who ask.
    /// May block on the driver.
    ///
    /// # Errors
    /// `NotFound` or `Unavailable` for a device or backend that is not there; the driver's own. A
    /// failure leaks nothing.
    pub fn runtime(&self, device: DeviceId) -> Result<Runtime> {
        let place = self.0.runtimes.lock().entry(device).or_default().clone();
        let _making = place.making.lock();
        if let Some(inner) = place.open() {
            return Ok(Runtime::from_inner(inner));
        }
        let Some(backend) = self.0.backends.iter().find(|b| b.kind() == device.backend) else {
            let why = absent().into_iter().find(|(k, _)| *k == device.backend).map_or(
                "this context has no such backend; make one with it (Context::with_backends)",
                |a| a.1,
            );
            return Err(Error::Unavailable(format!("{device}: {why}").into()));
        };
        let inner = RuntimeInner::open(self.clone(), &**backend, device).map_err(|e| match e {
            // A manager knows its devices by number.
            Error::NotFound(why) if !why.contains(&device.to_string()) => {
                let why = match &*backend.devices().unwrap_or_default() {
                    all if all.iter().any(|info| info.id == device) => why,
                    [one] => format!("{} is the only device here", one.id).into(),
                    [one, .., last] => format!("{} to {} are here", one.id, last.id).into(),
                    [] => why,
                };
                Error::NotFound(format!("{device}: {why}").into())
            }
            e => e,
        })?;
        let inner = Arc::new(inner);
        trace::begin_if_asked(&inner)?;
        *place.open.lock() = Arc::downgrade(&inner);
        Ok(Runtime::from_inner(inner))
    }

    /// Ends the backends' managers, one after the other.
    ///
    /// # Errors
    /// `LeasesOutstanding` while a runtime, a buffer or anything else is held (the process's
    /// [default](Current::set_process_default) holds its runtime too); nothing of that backend has
    /// changed then, and the call may be repeated.
    pub fn shutdown(&self) -> Result<()> {
        self.0.backends.iter().try_for_each(|b| b.shutdown())
    }

    /// Returns whether both are the same context.
    #[must_use]
    pub fn same(&self, other: &Context) -> bool {
        Arc::ptr_eq(&self.0, &other.0)
    }
}

impl fmt::Debug for Context {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.0.backends.iter().map(|b| b.kind())).finish()
    }
}

thread_local! {
    /// The contexts that the thread's guards set, by guard, the current one last.
    static CURRENT: RefCell<Vec<(u64, Current)>> = const { RefCell::new(Vec::new()) };
    static NEXT_GUARD: Cell<u64> = const { Cell::new(0) };
    /// The state that each driver had current before the thread's first guard of one of the
    /// driver's devices.
    static BEFORE: RefCell<Vec<(Context, BackendKind, Former)>> = const { RefCell::new(Vec::new()) };
}

static PROCESS_DEFAULT: RwLock<Option<Current>> = RwLock::new(None);

/// The current context of a thread: runtime, stream, and through them backend, device, managers and
/// allocator.
#[doc(alias = "CurrentState")]
#[derive(Debug, Clone)]
pub struct Current {
    runtime: Runtime,
    stream: Stream,
}

impl Current {
    /// The calling thread's current context, or the process default where one was set.
    ///
    /// # Errors
    /// `InvalidState` on a thread that has neither: nothing is inherited.
    pub fn get() -> Result<Current> {
        let own = CURRENT.try_with(|c| c.borrow().last().map(|c| c.1.clone())).unwrap_or(None);
        own.or_else(|| PROCESS_DEFAULT.read().clone()).ok_or_else(|| {
            Error::state(
                "this thread has no current context; set one with Runtime::enter or Stream::enter, or a default for the process",
            )
        })
    }

    /// Sets what threads without a context of their own get; `None` takes it back. It keeps the
    /// runtime alive until then. Of a recording's runtime it takes the one that does not record.
    pub fn set_process_default(runtime: Option<&Runtime>) {
        let new = runtime.map(|r| {
            let runtime = r.unrecorded();
            Current { stream: runtime.stream().clone(), runtime }
        });
        let old = std::mem::replace(&mut *PROCESS_DEFAULT.write(), new);
        drop(old);
    }

    /// The runtime.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.runtime
    }

    /// The stream.
    #[must_use]
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device.
    #[must_use]
    pub fn device(&self) -> &dyn Device {
        &**self.runtime.raw_device()
    }

    /// The device's allocator, for temporaries.
    #[must_use]
    pub fn allocator(&self) -> &Allocator {
        self.runtime.allocator()
    }

    /// The backend that the device is of.
    #[must_use]
    pub fn backend(&self) -> Option<Arc<dyn Backend>> {
        self.runtime.context().backend(self.runtime.device().backend)
    }

    /// Returns whether both are of one driver.
    fn shares_driver(&self, other: &Current) -> bool {
        self.runtime.device().backend == other.runtime.device().backend
            && self.runtime.context().same(other.runtime.context())
    }
}

/// Contexts and runtimes.
impl Runtime {
    /// The runtime of a device in the context that the process shares.
    ///
    /// # Errors
    /// As [`Context::runtime`].
    pub fn open(device: DeviceId) -> Result<Self> {
        Context::global().runtime(device)
    }

    /// The context that it was opened in.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.inner.context
    }

    /// Makes this runtime and its stream the thread's current context until the guard is
    /// dropped.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    #[doc(alias("set_context", "setCurrent"))]
    pub fn enter(&self) -> Result<ContextGuard> {
        self.stream().enter()
    }
}

impl Stream {
    /// Makes the stream and its runtime the thread's current context until the guard is dropped:
    /// [`Current::get`](crate::Current::get) returns them then, and the driver has the device
    /// current.
    ///
    /// # Errors
    /// `DeviceLost`; the driver's own.
    pub fn enter(&self) -> Result<ContextGuard> {
        ContextGuard::enter(&self.runtime(), self)
    }
}

/// Restores the thread's former context when dropped, the driver's notion of it too.
///
/// Guards may be dropped in any order: the current context is that of the latest guard that is
/// left. When the last guard of a driver's devices goes, the driver has current again what it had
/// before the first.
#[derive(Debug)]
#[must_use = "the former context is restored at once when the guard is dropped"]
pub struct ContextGuard {
    id: u64,
    /// A guard belongs to the thread that made it.
    _thread: std::marker::PhantomData<*const ()>,
}

impl ContextGuard {
    pub(crate) fn enter(runtime: &Runtime, stream: &Stream) -> Result<Self> {
        let new = Current { runtime: runtime.clone(), stream: stream.clone() };
        let ending = |_| Error::state("this thread is ending; it has no current context any more");
        let first = CURRENT
            .try_with(|c| !c.borrow().iter().any(|c| c.1.shares_driver(&new)))
            .map_err(ending)?;
        let device = runtime.raw_device();
        let before = if first { Some(device.current()?) } else { None };
        device.make_current()?;
        if let Some(before) = before {
            let entry = (runtime.context().clone(), runtime.device().backend, before);
            BEFORE.try_with(|b| b.borrow_mut().push(entry)).map_err(ending)?;
        }
        let id = NEXT_GUARD.replace(NEXT_GUARD.get() + 1);
        CURRENT.try_with(|c| c.borrow_mut().push((id, new))).map_err(ending)?;
        Ok(Self { id, _thread: std::marker::PhantomData })
    }
}

impl Drop for ContextGuard {
    fn drop(&mut self) {
        let ours = CURRENT.try_with(|c| {
            let mut all = c.borrow_mut();
            let at = all.iter().position(|c| c.0 == self.id)?;
            let ours = all.remove(at).1;
            // Of the same driver: the latest that is left, and whether it was ours that counted.
            let left = all.iter().rposition(|c| c.1.shares_driver(&ours));
            let latest = left.map(|left| (all[left].1.clone(), left < at));
            Some((ours, latest))
        });
        let Ok(Some((ours, latest))) = ours else { return };
        // The driver's notion follows; where that fails the next call on the device reports it.
        match &latest {
            Some((former, true)) => drop(former.runtime.raw_device().make_current()),
            Some((_, false)) => {}
            None => {
                let before = BEFORE.try_with(|b| {
                    let mut all = b.borrow_mut();
                    let (context, kind) = (ours.runtime.context(), ours.runtime.device().backend);
                    let at = all.iter().position(|(c, k, _)| *k == kind && c.same(context))?;
                    Some(all.remove(at))
                });
                if let Ok(Some((_, _, before))) = before {
                    before.restore();
                }
            }
        }
        // Without the borrows: it may be the runtime's last.
        drop((ours, latest));
    }
}
