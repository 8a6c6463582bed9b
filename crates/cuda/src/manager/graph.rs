//! Graphs: instantiated plans.
//!
//! This module must not know how plans are made.

use crate::engine::core::Streams;
use crate::engine::program::Program;
use leasehold_core::sync::Arc;
use leasehold_core::{
    Error, Handle, Lease, PoolConfig, PoolManager, PoolStats, Recycle, Resource, Result, Tagged,
    tags,
};
use leasehold_hal::Plan;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomPinned;

/// An instantiated plan.
#[doc(alias = "Graph")]
pub struct GraphState {
    pub(crate) program: Box<Program>,
    /// The payload belongs to its pool: safe code cannot swap it with another payload.
    _place: PhantomPinned,
}

impl Tagged for GraphState {
    type Tag = tags::Graph;
}

impl fmt::Debug for GraphState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.program.fmt(f)
    }
}

struct Graphs(Arc<Streams>);

impl Resource for Graphs {
    type Payload = GraphState;
    type Request<'a> = Cell<Option<Plan>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, plan: &Cell<Option<Plan>>) -> Result<GraphState> {
        let plan = plan.take().ok_or_else(|| Error::state("a plan is instantiated once"))?;
        Ok(GraphState { program: Box::new(Program::new(&self.0, plan)?), _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut GraphState) -> Recycle {
        Recycle::Destroy
    }
}

/// Owns the graphs of a context.
#[doc(alias = "CudaGraphManager")]
#[derive(Debug)]
pub struct GraphManager {
    manager: PoolManager<Graphs>,
    core: Arc<Streams>,
}

impl GraphManager {
    pub(crate) fn new(core: &Arc<Streams>) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Graphs(core.clone()), PoolConfig::default())?;
        Ok(Self { manager, core: core.clone() })
    }

    /// Instantiates a plan. May block on the driver.
    ///
    /// # Errors
    /// As [`Program::new`].
    ///
    /// # Safety
    /// - As `hal::Device::instantiate`.
    pub(crate) unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<GraphState>> {
        self.manager.acquire(&Cell::new(Some(plan))).map_err(|e| self.core.settle(e))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the manager down.
    ///
    /// # Errors
    /// `LeasesOutstanding`. After the error nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
