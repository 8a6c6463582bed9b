//! Events: places in the order of a stream, which others wait for.

use crate::arguments;
use crate::callbacks;
use crate::device::{Device, State, state};
use crate::errors::raise;
use crate::fork::Own;
use crate::stream::{awaited, on_complete};
use crate::waits::{until, within};
use leasehold::{Event, EventFlags, Lease, Result};
use leasehold_core::sync::Arc;
use pyo3::prelude::*;

/// A place in the order of a stream, from `Stream.record`.
///
/// Parameters
/// ----------
/// device
///     The device, or its name.
/// timing
///     Whether the event keeps a time of the device, for `elapsed_since`.
#[pyclass(frozen, weakref, name = "Event", module = "leasehold")]
pub(crate) struct EventObject {
    pub(crate) device: Arc<State>,
    pub(crate) event: Own<Lease<Event>>,
}

impl EventObject {
    pub(crate) fn make(device: &Arc<State>, timing: bool) -> Result<Self> {
        device.use_streams()?;
        let flags = if timing { EventFlags::TIMING } else { EventFlags::DISABLE_TIMING };
        let event = device.runtime.create_event_with(flags)?;
        Ok(Self { device: device.clone(), event: Own::new(event) })
    }

    fn check(&self) -> Result<&Lease<Event>> {
        self.device.check_process()?;
        Ok(&self.event)
    }
}

#[pymethods]
impl EventObject {
    #[new]
    #[pyo3(signature = (device, *, timing=None), text_signature = "(device, *, timing=False)")]
    fn new(device: &Bound<'_, PyAny>, timing: Option<&Bound<'_, PyAny>>) -> PyResult<Self> {
        let timing = arguments::optional(timing, "timing is True or False")?.unwrap_or(false);
        let state = state(device)?;
        device.py().detach(|| Self::make(&state, timing)).map_err(raise)
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.device.clone())
    }

    /// Whether the event keeps a time of the device.
    #[getter]
    fn timing(&self) -> bool {
        self.event.has_timing()
    }

    /// Returns whether all work before the last record is over. Raises the failure of that work. An
    /// event that was never recorded is over.
    fn query(&self, py: Python<'_>) -> PyResult<bool> {
        py.detach(|| self.check()?.query()).map_err(raise)
    }

    /// Waits until all work before the last record is over, for `timeout` seconds if that is given.
    /// Raises the failure of that work.
    #[pyo3(signature = (timeout=None))]
    fn synchronize(&self, py: Python<'_>, timeout: Option<&Bound<'_, PyAny>>) -> PyResult<()> {
        let timeout = arguments::timeout(timeout)?;
        within(py, timeout, |limit| self.check()?.synchronize_timeout(limit))
    }

    /// The device's time from the last record of `start` to that of this event, in seconds. Waits
    /// until both are over. Both have `timing=True`.
    fn elapsed_since(&self, py: Python<'_>, start: &Bound<'_, PyAny>) -> PyResult<f64> {
        let start = start.cast::<EventObject>().map_err(|_| {
            crate::errors::Class::ArgumentType.error("start is an Event with timing=True")
        })?;
        let start = start.get();
        let time = py.detach(|| {
            let (end, start) = (self.check()?, start.check()?);
            if start.has_timing() && end.has_timing() {
                until(None, |limit| start.synchronize_timeout(limit))?;
                until(None, |limit| end.synchronize_timeout(limit))?;
            }
            end.elapsed_since(start)
        });
        time.map(|time| time.as_secs_f64()).map_err(raise)
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        awaited(slf.as_any(), false)
    }

    /// Calls a function with `None` once the last record is over, or with the failure.
    fn _on_complete(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        let begun = py.detach(|| {
            let event = self.check()?;
            let stream = self.device.runtime.create_stream()?;
            stream.wait_event(event)?;
            Ok(stream)
        });
        match begun {
            Ok(stream) => on_complete(py, &stream, function),
            // The record has failed already.
            Err(error) => callbacks::tell(&function, Err(error)),
        }
        Ok(())
    }

    fn __repr__(&self) -> String {
        format!("Event('{}')", self.device.name)
    }
}
