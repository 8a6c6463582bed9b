//! The budget of a device's graphs, as programs see it.

use crate::graph::executables::GraphStats;
use crate::runtime::{Runtime, RuntimeInner};
use leasehold_core::sync::Arc;
use std::fmt;

/// The budget for the executables of a runtime's graphs.
///
/// A graph's executable is the driver's form of it, and takes memory beside the graph's buffers:
/// on CUDA device memory, by nodes and branches. The budget is the most bytes that all executables
/// of the device may take. There is none at first, and the bytes are counted all the same. The
/// driver may keep memory that it took once for later executables, so a limit comes best before the
/// graphs.
///
/// If a graph needs room, executables of idle graphs are taken back: of the graph whose last launch
/// is the longest ago first. Such a graph loses nothing but the executable, and its next launch
/// makes that again. So a launch may instantiate, and may block until launches of other graphs are
/// over. A launch must not wait in this way for work that only its own thread can set going, for
/// example by a host timeline.
///
/// A graph with calls of a collective keeps its executable, since other ranks would have to make
/// theirs again too.
///
/// Clones, and values of the same runtime, are the same budget. Any thread may use it.
///
/// ```
/// use leasehold::graph::GraphBudget;
/// use leasehold::{DeviceId, Runtime, View};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let x = runtime.zeros::<u32>(4)?;
/// let graph = runtime.record_graph(|r| r.stream().fill(x.view(), 7u32))?;
///
/// let budget = GraphBudget::of(&runtime);
/// assert_eq!(budget.stats().bytes, graph.exec_bytes());
/// budget.set_limit(16 << 20);
///
/// budget.take_idle(); // for example before other graphs are recorded
/// assert_eq!((budget.stats().bytes, graph.exec_bytes()), (0, 0));
/// graph.launch()?; // makes the executable again
/// assert_eq!(runtime.to_vec(&x)?, [7; 4]);
/// assert_eq!(budget.stats().made_again, 1);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct GraphBudget(Arc<RuntimeInner>);

impl GraphBudget {
    /// The budget of a runtime's device.
    #[must_use]
    pub fn of(runtime: &Runtime) -> Self {
        Self(runtime.inner.clone())
    }

    /// Sets the most bytes that executables may take; `u64::MAX` for no budget. Executables of idle
    /// graphs that it does not hold are taken back at once. Those of running graphs stay until room
    /// is needed. Does not wait for launches.
    pub fn set_limit(&self, bytes: u64) {
        self.0.executables.set_limit(bytes);
    }

    /// Takes the executables of all idle graphs back, and returns their bytes. Does not wait for
    /// launches: a graph is idle once its last launch is known to be over.
    #[doc(alias = "cuDeviceGraphMemTrim")]
    pub fn take_idle(&self) -> u64 {
        self.0.executables.take_idle()
    }

    /// The executables in numbers.
    #[must_use]
    pub fn stats(&self) -> GraphStats {
        self.0.executables.stats()
    }
}

impl fmt::Debug for GraphBudget {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphBudget({}, {:?})", self.0.id(), self.stats())
    }
}
