//! Allocators: memory of a device under one policy and one budget.

use crate::arguments;
use crate::buffer;
use crate::device::{self, Device, State};
use crate::errors::{invalid, raise};
use crate::fork::Own;
use crate::stream;
use crate::waits::{LOOK, look};
use leasehold::{Buffer, Error, Lease, Result, Runtime, Stream};
use leasehold_alloc::{Allocator, AllocatorConfig, Layout, On, Policy, Snapshot};
use leasehold_core::sync::Arc;
use leasehold_core::{Timeline, TimelineSource, Timepoint};
use leasehold_hal::MemoryKind;
use pyo3::prelude::*;
use pyo3::types::PyDict;
use serde::Serialize;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

/// The events that an allocator can keep, which have memory from the start.
const MOST_EVENTS: usize = 1 << 24;

/// An allocator and its device.
pub(crate) struct Pool {
    pub(crate) device: Arc<State>,
    pub(crate) allocator: Allocator,
    name: String,
    policy: Policy,
    /// The runtime whose stream the memory is for, if that is not the device's own.
    runtime: Option<Own<Runtime>>,
}

/// A snapshot of an allocator, in the form that `leasehold_snapshot` has for a device with one
/// pool.
#[derive(Serialize)]
struct DeviceSnapshot<'a> {
    device: &'a str,
    budget: u64,
    reserved: u64,
    allocated: u64,
    pools: [PoolSnapshot<'a>; 1],
    /// No stream has a handle of the caller's here.
    streams: BTreeMap<u16, u64>,
}

#[derive(Serialize)]
struct PoolSnapshot<'a> {
    pool: u64,
    name: &'a str,
    suspended: bool,
    memory: Snapshot,
}

impl Pool {
    pub(crate) fn new(
        device: &Arc<State>,
        name: &str,
        policy: Policy,
        budget: u64,
        trace_events: usize,
        runtime: Option<Runtime>,
    ) -> Result<Arc<Self>> {
        device.check_process()?;
        let backing = device.runtime.raw_device().backing(MemoryKind::Device)?;
        let config = AllocatorConfig {
            name: format!("{} {name}", device.name).into(),
            policy,
            budget,
            trace_events,
            ..AllocatorConfig::default()
        };
        let allocator = Allocator::new(backing, config)?;
        let (device, name) = (device.clone(), name.to_owned());
        let pool =
            Arc::new(Self { device, allocator, name, policy, runtime: runtime.map(Own::new) });
        pool.device.note(&pool);
        Ok(pool)
    }

    /// The stream that the memory is for.
    pub(crate) fn stream(&self) -> &Stream {
        self.runtime.as_ref().map_or(self.device.runtime.stream(), |runtime| runtime.stream())
    }

    /// Memory for the stream. If there is none, the device's other allocators give
    /// back what is free. Waits for a limited time for work that uses what is free.
    pub(crate) fn alloc(self: &Arc<Self>, bytes: u64) -> Result<Lease<Buffer>> {
        self.device.check_process()?;
        let own = Impatient(&**self.stream().raw());
        let alloc = || self.allocator.alloc(Layout::new(bytes), On::new(&own));
        let deadline = Instant::now().checked_add(own.0.timeout());
        loop {
            let begin = Instant::now();
            let made = match alloc() {
                Err(Error::OutOfMemory(_)) if self.device.trim_others(self)? > 0 => alloc(),
                other => other,
            };
            match made {
                Err(Error::OutOfMemory(_))
                    if begin.elapsed() >= own.timeout()
                        && deadline.is_none_or(|at| Instant::now() < at) =>
                {
                    look()?;
                }
                other => {
                    return other.map_err(|e| self.device.runtime.info().advised(e, bytes));
                }
            }
        }
    }

    pub(crate) fn snapshot(&self) -> Result<String> {
        let memory = self.allocator.snapshot();
        let snapshot = DeviceSnapshot {
            device: &self.device.name,
            budget: memory.stats.limit,
            reserved: memory.stats.reserved,
            allocated: memory.stats.live_bytes,
            pools: [PoolSnapshot { pool: 0, name: &self.name, suspended: false, memory }],
            streams: BTreeMap::new(),
        };
        serde_json::to_string(&snapshot).map_err(Error::other)
    }
}

/// The stream of an allocation that waits no longer than Ctrl-C may.
struct Impatient<'a>(&'a dyn TimelineSource);

// SAFETY: the stream itself answers, which is such a source.
unsafe impl TimelineSource for Impatient<'_> {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }

    fn signal(&self) -> Result<u64> {
        self.0.signal()
    }

    fn refresh(&self) -> Result<u64> {
        self.0.refresh()
    }

    fn wait(&self, on: Timepoint) -> Result<()> {
        self.0.wait(on)
    }

    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.0.wait_host(value, timeout)
    }

    fn timeout(&self) -> Duration {
        LOOK
    }
}

fn policy(name: &str) -> PyResult<Policy> {
    match name {
        "balanced" => Ok(Policy::Balanced),
        "fastest" => Ok(Policy::Fastest),
        "compact" => Ok(Policy::Compact),
        other => {
            Err(invalid(format!("{other:?} is no policy; known are balanced, fastest, compact")))
        }
    }
}

/// An allocator of a device's memory, with a policy and a budget of its own.
///
/// Memory is for the device's own stream, or for `stream`: what that stream used and what was freed
/// is its again at once, while other streams wait for the work.
#[pyclass(frozen, name = "Allocator", module = "leasehold")]
pub(crate) struct AllocatorObject(pub(crate) Arc<Pool>);

#[pymethods]
impl AllocatorObject {
    #[new]
    #[pyo3(signature = (
        device,
        *,
        policy=None,
        budget=None,
        trace_events=None,
        name=None,
        stream=None,
    ), text_signature = "(device, *, policy='balanced', budget=None, trace_events=0, name='memory', stream=None)")]
    fn new(
        device: &Bound<'_, PyAny>,
        policy: Option<&Bound<'_, PyAny>>,
        budget: Option<&Bound<'_, PyAny>>,
        trace_events: Option<&Bound<'_, PyAny>>,
        name: Option<&Bound<'_, PyAny>>,
        stream: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let policy: Option<String> = arguments::optional(policy, "a policy is a name")?;
        let policy = policy.map_or(Ok(Policy::default()), |name| self::policy(&name))?;
        let name: Option<String> = arguments::optional(name, "a name is a text")?;
        let name = name.as_deref().unwrap_or("memory");
        let events = arguments::optional(trace_events, "trace_events is a number of events")?;
        let events: usize = events.unwrap_or(0);
        if events > MOST_EVENTS {
            return Err(invalid(format!("{events} trace_events; {MOST_EVENTS} is the most")));
        }
        let budget = budget.map_or(Ok(u64::MAX), arguments::budget)?;
        let device = device::state(device)?;
        let runtime = stream.map(|stream| stream::argument(stream)?.lent(&device));
        let made = Pool::new(&device, name, policy, budget, events, runtime.transpose()?);
        made.map(Self).map_err(raise)
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.0.device.clone())
    }

    /// The allocator's name in reports.
    #[getter]
    fn name(&self) -> &str {
        &self.0.name
    }

    /// When free memory is moved instead of taking new: `balanced`, `fastest` or `compact`.
    #[getter]
    fn policy(&self) -> &'static str {
        match self.0.policy {
            Policy::Balanced => "balanced",
            Policy::Fastest => "fastest",
            Policy::Compact => "compact",
        }
    }

    /// The most bytes that are taken from the driver; `None` for no limit.
    #[getter]
    fn budget(&self) -> Option<u64> {
        Some(self.0.allocator.stats().limit).filter(|&limit| limit != u64::MAX)
    }

    #[setter]
    fn set_budget(&self, bytes: &Bound<'_, PyAny>) -> PyResult<()> {
        self.0.allocator.set_budget(arguments::budget(bytes)?);
        Ok(())
    }

    /// A new buffer with unspecified contents. A number without a type is a size in bytes:
    /// `empty(4096)` has the type `uint8`. Any other shape needs a type.
    #[pyo3(signature = (shape, dtype=None))]
    fn empty<'py>(
        &self,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        buffer::empty(&self.0, shape, dtype)
    }

    /// A new buffer of zeros. A number without a type is a size in bytes: `zeros(4096)` has the
    /// type `uint8`. Any other shape needs a type.
    #[pyo3(signature = (shape, dtype=None))]
    fn zeros<'py>(
        &self,
        shape: &Bound<'py, PyAny>,
        dtype: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyAny>> {
        buffer::zeros(&self.0, shape, dtype)
    }

    /// A new buffer with the contents, shape and type of an array.
    fn upload<'py>(&self, array: &Bound<'py, PyAny>) -> PyResult<Bound<'py, PyAny>> {
        buffer::upload(&self.0, array)
    }

    /// Numbers about the memory, by name.
    fn statistics<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyDict>> {
        let s = self.0.allocator.stats();
        let numbers = PyDict::new(py);
        for (name, number) in [
            ("allocated_bytes", s.live_bytes),
            ("allocated_bytes_peak", s.live_peak),
            ("reserved_bytes", s.reserved),
            ("reserved_bytes_peak", s.reserved_peak),
            ("free_ready_bytes", s.free_ready),
            ("free_pending_bytes", s.free_not_ready),
            ("free_cached_bytes", s.free_in_slabs + s.free_in_thread_caches),
            ("unmapped_bytes", s.cached_pieces),
            ("metadata_bytes", s.metadata),
            ("blocks", s.live),
            ("allocations", s.allocations),
            ("failures", s.failed),
            ("growths", s.growths),
            ("remaps", s.remaps),
            ("host_waits", s.host_waits),
            ("stream_waits", s.inserted_waits),
            ("driver_calls", s.driver_calls),
        ] {
            numbers.set_item(name, number)?;
        }
        numbers.set_item("budget_bytes", self.budget())?;
        Ok(numbers)
    }

    /// Begins new peaks from what is allocated and reserved now.
    fn reset_peaks(&self) {
        self.0.allocator.reset_peaks();
    }

    /// The state of the memory: segments, blocks, and the newest events if they are traced.
    fn snapshot<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyAny>> {
        py.import("json")?.call_method1("loads", (self._snapshot_json(py)?,))
    }

    /// The state of the memory as a text, for a report.
    fn _snapshot_json(&self, py: Python<'_>) -> PyResult<String> {
        self.0.device.outside(py, || self.0.snapshot()).map_err(raise)
    }

    /// Gives free memory back to the driver until `keep` bytes lie free. Returns the bytes that
    /// went.
    #[pyo3(signature = (keep=None), text_signature = "($self, keep=0)")]
    fn trim(&self, py: Python<'_>, keep: Option<&Bound<'_, PyAny>>) -> PyResult<u64> {
        let keep = arguments::optional(keep, "keep is a number of bytes")?.unwrap_or(0);
        let trim = || {
            self.0.device.check_process()?;
            self.0.allocator.trim(keep)
        };
        self.0.device.outside(py, trim).map_err(raise)
    }

    fn __repr__(&self) -> String {
        format!("Allocator('{}', policy='{}')", self.0.device.name, self.policy())
    }
}

/// The bytes of a budget, which is a text such as `20GiB`.
#[pyfunction]
pub(crate) fn parse_bytes(text: &str) -> PyResult<u64> {
    arguments::bytes(text)
}

/// The page about a snapshot, which is the text of a JSON object.
#[pyfunction]
pub(crate) fn render(py: Python<'_>, snapshot: &str) -> String {
    py.detach(|| leasehold_report::html(snapshot))
}
