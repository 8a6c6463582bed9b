//! Graphs: work that was recorded once and is launched as a whole.

use crate::buffer::Base;
use crate::device::{Device, State};
use crate::errors::{Class, invalid, raise};
use crate::fork::Own;
use crate::kernel::{directions, items};
use crate::memory::Block;
use crate::stream::{Launches, argument, node};
use leasehold::graph::{NodeId, UpdateOutcome};
use leasehold::{Graph, GraphUpdate};
use leasehold_core::sync::{Arc, Mutex};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyList};

/// A recorded graph. A block `with device.record() as stream:` makes it, as `stream.graph`.
///
/// The graph keeps the memory of the buffers that were recorded, also if they are freed.
///
/// Examples
/// --------
/// >>> import leasehold
/// >>> device = leasehold.Device("cpu:0")
/// >>> x = device.zeros(4, "int32")
/// >>> with device.record() as stream:
/// ...     stream.fill(x, 7)
/// >>> with leasehold.Stream(device) as stream_of_launches:
/// ...     stream.graph.launch(stream_of_launches)
/// >>> memoryview(x).tolist()
/// [7, 7, 7, 7]
#[pyclass(frozen, weakref, name = "Graph", module = "leasehold")]
pub(crate) struct GraphObject {
    device: Arc<State>,
    graph: Own<Graph>,
    launches: Launches,
    /// The memory that launches use, for their order with uses that are not the runtime's.
    blocks: Mutex<Vec<Arc<Block>>>,
    /// One update at a time: the list above changes with the graph.
    update: Mutex<()>,
}

impl GraphObject {
    pub(crate) fn new(
        device: &Arc<State>,
        graph: Graph,
        mut blocks: Vec<Arc<Block>>,
        launches: Launches,
    ) -> Self {
        blocks.sort_by_key(|block| Arc::as_ptr(block) as usize);
        blocks.dedup_by(|a, b| Arc::ptr_eq(a, b));
        Self {
            device: device.clone(),
            graph: Own::new(graph),
            launches,
            blocks: Mutex::new(blocks),
            update: Mutex::new(()),
        }
    }
}

#[pymethods]
impl GraphObject {
    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.device.clone())
    }

    /// The operations that a launch runs, with the places of those that each waits for.
    #[getter]
    fn nodes<'py>(&self, py: Python<'py>) -> PyResult<Bound<'py, PyList>> {
        PyList::new(py, self.graph.describe())
    }

    /// The number of launches so far.
    #[getter]
    fn launches(&self) -> u64 {
        self.graph.launches()
    }

    /// Launches the graph on a stream of its device, as one operation there.
    fn launch(&self, stream: &Bound<'_, PyAny>) -> PyResult<()> {
        let py = stream.py();
        let stream = argument(stream)?;
        let blocks = self.blocks.lock().clone();
        stream.submit(py, &blocks, None, |stream| self.graph.launch_on(stream).map(drop))
    }

    /// Changes later launches: all of the changes, or after an error none. Launches that are
    /// pending keep what they have. Returns whether the graph was instantiated anew.
    ///
    /// Parameters
    /// ----------
    /// numbers
    ///     By the number of a launch (`Stream.next_node`): all numbers of its kernel.
    /// grids
    ///     By the number of a launch: its new grid.
    /// buffers
    ///     Pairs of a buffer that the graph uses, and the one in its place everywhere. They are
    ///     whole allocations, and the new one has as many bytes at least.
    #[pyo3(signature = (*, numbers=None, grids=None, buffers=None))]
    fn update(
        &self,
        py: Python<'_>,
        numbers: Option<&Bound<'_, PyAny>>,
        grids: Option<&Bound<'_, PyAny>>,
        buffers: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<bool> {
        let (mut params, mut shapes, mut pairs) = (Vec::new(), Vec::new(), Vec::new());
        for (at, given) in entries(numbers, "numbers")? {
            let at = node(&at)?;
            let signature = self
                .launches
                .get(&at)
                .ok_or_else(|| invalid(format!("operation {at} of the recording is no launch")))?;
            params
                .push((NodeId::new(at), signature.params(&items(&given, "a launch's numbers")?)?));
        }
        for (at, grid) in entries(grids, "grids")? {
            shapes.push((NodeId::new(node(&at)?), directions(&grid, "a grid")?));
        }
        if let Some(buffers) = buffers {
            for pair in items(buffers, "buffers")? {
                let pair = items(&pair, "a pair of buffers")?;
                let [from, to] = &pair[..] else {
                    return Err(invalid("buffers are pairs: one that the graph uses, and the new"));
                };
                pairs.push((whole(from)?, whole(to)?));
            }
        }
        let changed = py.detach(|| {
            self.device.check_process()?;
            let mut update = GraphUpdate::new();
            for (at, bytes) in &params {
                update = update.params_bytes(*at, bytes);
            }
            for (at, grid) in shapes {
                update = update.grid(at, grid);
            }
            for (from, to) in &pairs {
                update = update.buffer(from.stream_buffer()?, to.stream_buffer()?);
            }
            let turn = self.update.lock();
            // The new memory comes first: a launch may come at once.
            let before = self.blocks.lock().clone();
            let added = pairs.iter().map(|(_, new)| new.clone());
            *self.blocks.lock() = before.iter().cloned().chain(added.clone()).collect();
            let updated = self.graph.update(&update);
            let is_replaced =
                |block: &Arc<Block>| pairs.iter().any(|(old, _)| Arc::ptr_eq(old, block));
            let after = match updated {
                Ok(_) => before.iter().filter(|b| !is_replaced(b)).cloned().chain(added).collect(),
                Err(_) => before.clone(),
            };
            let between = std::mem::replace(&mut *self.blocks.lock(), after);
            drop(turn);
            // Without a lock: the end of memory may wait for its uses.
            drop((before, between));
            updated
        });
        Ok(changed.map_err(raise)? == UpdateOutcome::Reinstantiated)
    }

    fn __repr__(&self) -> String {
        format!("Graph('{}', {} operations)", self.device.name, self.graph.nodes())
    }
}

/// The entries of a dictionary, or none.
fn entries<'py>(
    of: Option<&Bound<'py, PyAny>>,
    what: &str,
) -> PyResult<Vec<(Bound<'py, PyAny>, Bound<'py, PyAny>)>> {
    let Some(of) = of else { return Ok(Vec::new()) };
    let refuse =
        |_| Class::ArgumentType.error(format!("{what} are a dictionary by the number of a launch"));
    Ok(of.cast::<PyDict>().map_err(refuse)?.iter().collect())
}

/// The memory of a buffer that is a whole allocation.
fn whole(of: &Bound<'_, PyAny>) -> PyResult<Arc<Block>> {
    let refuse = |_| Class::ArgumentType.error("a graph's buffers are leasehold.Buffer objects");
    let (block, range) = of.cast::<Base>().map_err(refuse)?.get().range()?;
    if range != (0, block.len()) {
        return Err(invalid("a view of a buffer; an update replaces whole allocations"));
    }
    Ok(block)
}
