//! Copies of device memory to the host that nobody waits for yet.

use crate::arguments;
use crate::device::State;
use crate::errors::raise;
use crate::fork::Own;
use crate::memory::{Block, Giving};
use crate::stream::{awaited, on_complete};
use crate::waits::within;
use leasehold::{Access, PinnedArray, Result, Stream, View};
use leasehold_core::Timepoint;
use leasehold_core::sync::{Arc, Mutex};
use pyo3::prelude::*;
use pyo3::types::PyBytes;
use std::time::Duration;

/// A copy of a buffer's bytes to the host that was begun: `await` gives the bytes, any number of
/// times.
#[pyclass(frozen, weakref, name = "Download", module = "leasehold")]
pub(crate) struct Download {
    device: Arc<State>,
    stream: Own<Stream>,
    point: Timepoint,
    bytes: Own<Mutex<PinnedArray<u8>>>,
}

impl Download {
    pub(crate) fn begin(
        py: Python<'_>,
        device: &Arc<State>,
        stream: &Stream,
        block: Arc<Block>,
        range: (u64, u64),
    ) -> PyResult<Self> {
        let blocks = [block];
        let begin = || {
            let bytes = device.runtime.alloc_pinned_array::<u8>(range.1 as usize)?;
            let copy = || stream.copy(bytes.view(), blocks[0].operand(range, Access::Read)?.view());
            Block::ordered(&blocks, device, stream, copy)?;
            let (point, stream) = (stream.now(), Own::new(stream.clone()));
            Ok(Self { device: device.clone(), stream, point, bytes: Own::new(Mutex::new(bytes)) })
        };
        let giving = Giving::begin(py, &blocks);
        let begun = py.detach(begin);
        drop(giving);
        begun.map_err(raise)
    }

    fn over(&self, limit: Duration) -> Result<()> {
        self.device.check_process()?;
        self.device.runtime.wait_for_timeout(self.point, limit)
    }
}

#[pymethods]
impl Download {
    /// The bytes. Waits for the copy, for `timeout` seconds if that is given.
    #[pyo3(signature = (timeout=None))]
    fn result<'py>(
        &self,
        py: Python<'py>,
        timeout: Option<&Bound<'py, PyAny>>,
    ) -> PyResult<Bound<'py, PyBytes>> {
        let timeout = arguments::timeout(timeout)?;
        within(py, timeout, |limit| self.over(limit))?;
        self._result(py)
    }

    fn __await__<'py>(slf: &Bound<'py, Self>) -> PyResult<Bound<'py, PyAny>> {
        awaited(slf.as_any(), true)
    }

    /// Calls a function with `None` once the copy is over, or with the failure.
    fn _on_complete(&self, py: Python<'_>, function: Py<PyAny>) -> PyResult<()> {
        self.device.check_process().map_err(raise)?;
        on_complete(py, &self.stream, function);
        Ok(())
    }

    /// The bytes of a copy that is over.
    fn _result<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyBytes>> {
        self.over(Duration::ZERO).map_err(raise)?;
        let mut bytes = self.bytes.lock();
        Ok(PyBytes::new(py, bytes.map().map_err(raise)?.as_ref()))
    }
}
