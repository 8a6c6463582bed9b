//! Executable graphs.
//!
//! This module must not know which operations a graph has.

use crate::kernel::Binding;
use leasehold_core::{Result, Tagged, tags};
use std::any::Any;
use std::fmt;

/// A change of one node of a graph.
#[derive(Debug, Clone, Copy)]
pub struct NodePatch<'a> {
    /// The node's index in the plan.
    pub node: u32,
    /// New bindings of a dispatch, as many as before.
    pub bindings: Option<&'a [Binding]>,
    /// New parameters of a dispatch, of the same size.
    pub params: Option<&'a [u8]>,
    /// A new grid of a dispatch.
    pub grid: Option<[u32; 3]>,
}

/// An executable graph, which [`Op::Graph`](crate::Op::Graph) launches.
///
/// # Safety
/// - A launch runs the operations of the plan, in an order that its dependencies allow, and
///   accesses only their memory.
/// - [`native`](Self::native) is this graph's word, constant, and valid as long as the graph is
///   held.
pub unsafe trait GraphExec: Any + Send + Sync {
    /// The number of nodes. Constant; does not block.
    fn nodes(&self) -> usize;

    /// Bytes of host and device memory that the graph holds beside its buffers, as far as known.
    /// Does not block.
    fn bytes(&self) -> u64;

    /// Changes nodes in place, for later launches. Either all patches take effect or none. May
    /// block on the driver.
    ///
    /// # Errors
    /// `TopologyChanged` if the driver cannot update in place (the caller instantiates again);
    /// `InvalidArgument` for a node that does not exist or is not a dispatch.
    ///
    /// # Safety
    /// - No launch of this exec is in flight, and no other thread launches or updates during the
    ///   call.
    /// - The plan's dependencies and early reads stay right. At a launch the changed operations
    ///   meet the contract of [`Stream::submit`](crate::Stream::submit).
    unsafe fn update(&self, patches: &[NodePatch<'_>]) -> Result<()>;

    /// The backend's object: the word by which a stream finds the graph that an
    /// [`Op::Graph`](crate::Op::Graph) launches. A wrapper returns the inner graph's word, while
    /// the operation leases the wrapper. So a stream must use this word and never a downcast of the
    /// lease.
    fn native(&self) -> u64;
}

impl Tagged for dyn GraphExec {
    type Tag = tags::Graph;
}

impl fmt::Debug for dyn GraphExec {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphExec({} nodes)", self.nodes())
    }
}
