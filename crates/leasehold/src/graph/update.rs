//! Updates of graphs: other parameters, grids and buffers for the launches that come later.
//!
//! An update derives the plan of the changed recording. If the dependencies are the same, it
//! changes an instance in place; else the graph's old executables go, and another one is made. It
//! waits, if it does, without the state.

use crate::graph::exec::{ExecState, Graph, Inner, NodeId, plan_of};
use crate::graph::executables::{Demand, Executable, Made, Occasion, Seen};
use crate::graph::instances::Change;
use crate::graph::optimise::{moved, redundant};
use crate::graph::recording::{Outside, Ruled};
use crate::runtime::check_writable;
use crate::stream::check_all_present;
use crate::view::View;
use bytemuck::NoUninit;
use leasehold_alloc::Buffer;
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::{LaunchInfo, Op, OpList};

/// The way in which an update changed the graph.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
#[must_use]
pub enum UpdateOutcome {
    /// The graph was changed in place, or in another instance while launches are pending.
    InPlace,
    /// The dependencies (or what the driver can change) did not allow that: the graph was
    /// instantiated anew.
    Reinstantiated,
}

/// The outcome of an attempt to update a graph.
enum Tried {
    Done(UpdateOutcome),
    /// These executables go first.
    Without(Vec<Executable>),
    /// This launch must be over first, or a moment pass.
    After(Option<Timepoint>),
}

/// New parameters, a new grid, or both.
type NodeChange = (NodeId, Option<Vec<u8>>, Option<[u32; 3]>);

/// Changes to a graph.
#[derive(Debug, Default)]
#[must_use = "an update does nothing until it is given to Graph::update"]
pub struct GraphUpdate<'a> {
    nodes: Vec<NodeChange>,
    buffers: Vec<(&'a Lease<Buffer>, &'a Lease<Buffer>)>,
}

impl<'a> GraphUpdate<'a> {
    /// No changes yet.
    pub fn new() -> Self {
        Self::default()
    }

    /// New parameters of a launch, of the size that its kernel declares.
    pub fn params<T: NoUninit>(self, node: NodeId, params: &T) -> Self {
        self.params_bytes(node, bytemuck::bytes_of(params))
    }

    /// New parameters of a launch as bytes, as many as its kernel declares.
    pub fn params_bytes(mut self, node: NodeId, params: &[u8]) -> Self {
        self.nodes.push((node, Some(params.to_vec()), None));
        self
    }

    /// A new grid of a launch. With a zero in it the launch does nothing.
    pub fn grid(mut self, node: NodeId, grid: [u32; 3]) -> Self {
        self.nodes.push((node, None, Some(grid)));
        self
    }

    /// Another buffer in the place of one that the graph uses, wherever it uses it. At least as
    /// long.
    pub fn buffer(mut self, old: &'a Lease<Buffer>, new: &'a Lease<Buffer>) -> Self {
        self.buffers.push((old, new));
        self
    }
}

impl Graph {
    /// Changes parameters, grids and buffers for the launches that come later. All-or-nothing.
    ///
    /// Launches that are pending keep what they were launched with, and the call does not wait for
    /// them: the change is made in another instance of the graph. A graph has up to four. While all
    /// are busy, the call blocks until one is over.
    ///
    /// The graph is then what recording with the new values would have given. A change that alters
    /// which operations depend on which (a buffer that now meets another), which are redundant, or
    /// what a kernel may read early, instantiates the graph anew, and says so; so does one of a
    /// copy's or fill's buffer. The old executable goes before the new one comes. If that fails,
    /// the graph is as it was, and its next launch makes the executable again.
    ///
    /// # Errors
    /// `InvalidArgument` for a node that is no launch, another size of parameters, a grid beyond
    /// the device's limits, a buffer that the graph does not use, or one that is too small or
    /// another device's; `Unsupported` for a growing buffer; what a kernel's check says of a launch
    /// as it is with the changes, and bindings that overlap then; `Suspended` for a buffer of a
    /// suspended pool; `InvalidState` in a host call of the graph itself while all of its instances
    /// are busy.
    pub fn update(&self, update: &GraphUpdate<'_>) -> Result<UpdateOutcome> {
        let mut others = false;
        loop {
            match self.try_update(update, others)? {
                Tried::Done(outcome) => return Ok(outcome),
                // Without the lock: what goes may be anybody's closure.
                Tried::Without(old) => {
                    drop(old);
                    others = true;
                }
                Tried::After(after) => self.0.runtime.wait_over_or_moment(after)?,
            }
        }
    }

    /// Updates the graph, unless something must go or be over first. `others`: its executables have
    /// gone already.
    fn try_update(&self, update: &GraphUpdate<'_>, others: bool) -> Result<Tried> {
        let inner = &*self.0;
        // Declared before the state, so dropped without it.
        let mut seen = Seen::default();
        let mut state = inner.state.lock();
        if let Some(busy) = state.instances.obstacle() {
            return Ok(Tried::After(Some(busy)));
        }
        // A driver looks at the addresses.
        let new = update.buffers.iter().map(|(_, new)| &***new);
        check_all_present(state.outside.iter().map(|o| &*o.lease).chain(new))?;
        let mut recorded = state.recorded.clone();
        let mut changed = vec![false; recorded.len()];
        let swaps = inner.stand_ins(&state.outside, update)?;
        let ranges: Vec<_> = std::iter::zip(&state.outside, &swaps)
            .filter_map(|(o, new)| {
                new.map(|new| (o.lease.addr(), o.lease.len(), new.addr(), new.native()))
            })
            .collect();
        if !ranges.is_empty() {
            recorded = moved(recorded, &ranges, &mut changed);
        }
        inner.change_nodes(&mut recorded, &update.nodes, &mut changed)?;
        inner.check_launches(&recorded, &changed)?;
        let redundant = redundant(&recorded);
        let plan = plan_of(&recorded, &redundant, &inner.partitions);
        let same = !others
            && redundant == state.redundant
            && plan.pred == state.plan.pred
            && plan.pred_at == state.plan.pred_at
            && plan.early == state.plan.early;
        // SAFETY: the same operations as when the graph was built, with buffers and parameters that
        // were checked alike, and dependencies derived anew.
        let instantiate = || unsafe { inner.runtime.device.instantiate(plan.clone()) };
        let mut demand =
            Demand { nodes: plan.total(), known: state.known, occasion: Occasion::New };
        let executables = &inner.runtime.executables;
        let change = if same {
            // SAFETY: an instance that is idle was waited for above, and the lock of the state
            // keeps launches and updates out. The plan that was derived anew has the same
            // dependencies, and buffers and parameters were checked as when they were recorded.
            unsafe {
                state.instances.change(&plan, &redundant, &changed, || {
                    executables.make(&mut demand, &mut seen, instantiate)
                })
            }?
        } else {
            Change::TakesOthers
        };
        let outcome = match change {
            Change::Done => UpdateOutcome::InPlace,
            Change::After(after) => {
                state.known = demand.known;
                return Ok(Tried::After(after));
            }
            // Launches that are pending hold their instances by themselves.
            Change::TakesOthers if !state.instances.is_empty() => {
                return Ok(Tried::Without(state.instances.take()));
            }
            Change::TakesOthers => {
                demand.known = None;
                match executables.make(&mut demand, &mut seen, instantiate)? {
                    Made::Now(executable) => state.instances.put(executable),
                    Made::After(after) => return Ok(Tried::After(after)),
                }
                UpdateOutcome::Reinstantiated
            }
        };
        let old = (
            std::mem::replace(&mut state.recorded, recorded),
            std::mem::replace(&mut state.plan, plan),
        );
        state.redundant = redundant;
        state.names = None;
        state.known = demand.known;
        let old_outside = state.swap_outside(&swaps);
        drop(state);
        // Without the lock: what goes may be anybody's closure.
        drop((old, old_outside));
        Ok(Tried::Done(outcome))
    }
}

impl Inner {
    /// The buffer that takes the place of each that a graph uses from outside, checked against it.
    fn stand_ins<'u>(
        &self,
        outside: &[Outside],
        update: &GraphUpdate<'u>,
    ) -> Result<Vec<Option<&'u Lease<Buffer>>>> {
        let mut swaps: Vec<Option<&Lease<Buffer>>> = vec![None; outside.len()];
        for (old, new) in &update.buffers {
            let Some(at) = outside.iter().position(|o| o.lease.same(old)) else {
                return Err(Error::invalid(
                    "the graph does not use the buffer that is to be replaced; name one that was recorded and is not a temporary",
                ));
            };
            self.runtime.check_stand_in(old, new)?;
            // (What users only read may be a growing buffer's limit.)
            let limit = old.is_read_only() && !old.is_imported();
            if old.is_growing() || new.is_growing() || limit {
                return Err(Error::Unsupported(
                    "a growing buffer or its limit cannot be replaced in a graph, or replace another buffer; grow it, since its address stays, or record the graph anew".into(),
                ));
            }
            if outside[at].writes {
                check_writable(&new.write())?;
            }
            self.runtime.refuse_symbolic(&[new.read()])?;
            if new.len() < old.len() {
                return Err(Error::invalid(format!(
                    "a buffer of {} bytes cannot stand in for one of {}; give one that is as large at least",
                    new.len(),
                    old.len()
                )));
            }
            swaps[at] = Some(new);
        }
        Ok(swaps)
    }

    /// Gives nodes the parameters and grids of an update.
    fn change_nodes(
        &self,
        recorded: &mut OpList,
        nodes: &[NodeChange],
        changed: &mut [bool],
    ) -> Result<()> {
        let limits = &self.runtime.limits;
        for (node, params, grid) in nodes {
            if let Some(grid) = grid
                && (0..3).any(|i| grid[i] > limits.grid[i])
            {
                return Err(Error::invalid(format!(
                    "grid {grid:?} of node {}; the limit is {:?}: launch fewer blocks",
                    node.0, limits.grid
                )));
            }
            if let Some(Op::Conditional(inside)) = recorded.get(node.0 as usize) {
                return Err(Error::Unsupported(
                    format!(
                        "node {} is a {inside}: its launches cannot be changed; let them read a buffer, or record the graph anew",
                        node.0
                    )
                    .into(),
                ));
            }
            recorded.patch(node.0 as usize, None, params.as_deref(), *grid)?;
            changed[node.0 as usize] = true;
        }
        Ok(())
    }

    /// Asks the kernels about the launches that an update changed, as they are now.
    fn check_launches(&self, recorded: &OpList, changed: &[bool]) -> Result<()> {
        for ruled in self.rules.iter().filter(|ruled| changed[ruled.node as usize]) {
            let Ruled { node, rules, .. } = ruled;
            if let Some(Op::Dispatch(d)) = ruled.op(recorded) {
                let shape = (d.grid, d.block, d.shared);
                rules
                    .check_bindings(d.bindings)
                    .and_then(|()| {
                        rules.check_launch(&LaunchInfo::new(shape, d.params, d.bindings))
                    })
                    .map_err(|e| match e {
                        Error::InvalidArgument(why) => {
                            Error::invalid(format!("node {node}: {why}"))
                        }
                        other => other,
                    })?;
            }
        }
        Ok(())
    }
}

impl ExecState {
    /// Puts the new buffers in the places of the old ones, and returns those. Two that became one
    /// are one from then on.
    fn swap_outside(&mut self, swaps: &[Option<&Lease<Buffer>>]) -> Vec<Outside> {
        let mut new: Vec<Outside> = std::iter::zip(&self.outside, swaps)
            .map(|(o, new)| {
                let lease = new.unwrap_or(&o.lease).clone();
                // If the new buffer is longer, the graph uses a part of it, and the rest stays.
                let reads = o.reads || lease.len() > o.lease.len();
                Outside { lease, reads, writes: o.writes, end: o.end, written: o.written }
            })
            .collect();
        new.sort_by_key(|o| o.lease.handle());
        new.dedup_by(|gone, stays| {
            let same = gone.lease.same(&stays.lease);
            if same {
                // The order of the two uses is not known: the former contents may be read.
                stays.reads |= gone.reads || gone.writes && stays.writes;
                stays.writes |= gone.writes;
                stays.end = stays.end.max(gone.end);
            }
            same
        });
        std::mem::replace(&mut self.outside, new)
    }
}
