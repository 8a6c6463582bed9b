//! Graphs: instantiated plans.
//!
//! This module must not know how plans are made.

use crate::driver::graph::Program;
use leasehold_core::{Error, Fate, Handle, Lease, PoolConfig, PoolManager, PoolStats, Resource, Result, Tagged, tags};
use leasehold_hal::Plan;
use std::cell::Cell;
use std::fmt;
use std::marker::PhantomPinned;

/// An instantiated plan.
#[doc(alias = "Graph")]
pub struct GraphState {
    pub(crate) program: Box<Program>,
    /// Its manager's: nobody swaps it with another one.
    _place: PhantomPinned,
}

impl Tagged for GraphState {
    type Tag = tags::Graph;
}

impl fmt::Debug for GraphState {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "GraphState({} nodes)", self.program.nodes())
    }
}

struct Graphs;

impl Resource for Graphs {
    type Payload = GraphState;
    type Request<'a> = Cell<Option<Plan>>;
    const NAME: &'static str = "graph";

    fn create(&self, _: Handle<tags::Graph>, plan: &Cell<Option<Plan>>) -> Result<GraphState> {
        let plan = plan.take().ok_or_else(|| Error::state("a plan is instantiated once"))?;
        Ok(GraphState { program: Box::new(Program::new(plan)?), _place: PhantomPinned })
    }

    fn recycle(&self, _: &mut GraphState) -> Fate {
        Fate::Destroy
    }
}

/// Owns the graphs of a device.
#[derive(Debug)]
pub struct GraphManager {
    manager: PoolManager<Graphs>,
}

impl GraphManager {
    pub(crate) fn new() -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(Graphs, PoolConfig::default())?;
        Ok(Self { manager })
    }

    /// Makes a plan ready to be launched.
    ///
    /// # Errors
    /// `InvalidArgument` for a plan whose nodes are in no order that respects its dependencies.
    pub fn instantiate(&self, plan: Plan) -> Result<Lease<GraphState>> {
        self.manager.acquire(&Cell::new(Some(plan)))
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Ends the manager.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}
