//! The instances of a graph: while launches of one are pending, another is changed.
//!
//! One instance is current: a launch runs it. An update changes the current instance if its
//! launches are over; else it changes an idle one, which becomes current; else it makes one. All
//! have the same operations and dependencies. An instance that is not current may lack the changes
//! since it was put aside, and notes which nodes they were of.
//!
//! A graph may have no instance: the manager took them back ([`executables`](super::executables)).

use crate::graph::executables::{Executable, Made};
use leasehold_core::{Error, Lease, PackedTimepoint, Result, Timepoint};
use leasehold_hal::{GraphExec, NodePatch, Op, Plan};
use std::mem;

/// How many instances a graph has beside the current one.
const OTHERS: usize = 3;

/// An instance that is not current.
struct Other {
    executable: Executable,
    /// The nodes of the recording that changed since it was put aside.
    behind: Vec<bool>,
}

/// All instances of a graph.
#[derive(Default)]
pub(super) struct Instances {
    current: Option<Executable>,
    others: Vec<Other>,
}

/// The outcome of a change.
pub(super) enum Change {
    /// The instances are changed, or will be what the plan says once there are any.
    Done,
    /// It takes another set of instances.
    TakesOthers,
    /// It takes an instance more, for which there is room after this launch or a moment later.
    After(Option<Timepoint>),
}

fn is_idle(last: PackedTimepoint) -> bool {
    last.timepoint().is_none_or(Timepoint::has_passed)
}

impl Instances {
    /// The executable graph that a launch runs.
    #[inline]
    pub(super) fn current(&mut self) -> Option<&mut Executable> {
        self.current.as_mut()
    }

    /// Returns whether there is none.
    pub(super) fn is_empty(&self) -> bool {
        self.current.is_none()
    }

    /// Sets the first one.
    pub(super) fn put(&mut self, executable: Executable) {
        self.current = Some(executable);
    }

    /// Gives all up.
    pub(super) fn take(&mut self) -> Vec<Executable> {
        let others = mem::take(&mut self.others).into_iter().map(|other| other.executable);
        self.current.take().into_iter().chain(others).collect()
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        let others = self.others.iter().map(|other| &other.executable);
        self.current.iter().chain(others).map(Executable::bytes).sum()
    }

    /// The launch that an update must wait for: none unless all instances are busy and there are no
    /// more to be made.
    pub(super) fn obstacle(&self) -> Option<Timepoint> {
        let idle = self.current.as_ref().is_none_or(|c| is_idle(c.last()))
            || self.others.len() < OTHERS
            || self.others.iter().any(|o| is_idle(o.executable.last()));
        if idle { None } else { self.others.first()?.executable.last().timepoint() }
    }

    /// Makes the changed nodes what they are in `plan`, in an instance that is idle, and that the
    /// current one. Without instances there is nothing to be done.
    ///
    /// # Errors
    /// The error of `make`, which instantiates the plan; the driver's own. Nothing has changed
    /// then.
    ///
    /// # Safety
    /// - [`obstacle`](Self::obstacle) found none, and no other thread launches or updates since
    ///   then.
    /// - The plan has the operations and dependencies of all instances but for parameters, grids
    ///   and bindings of the changed nodes, and is as [`GraphExec::update`] wants it.
    pub(super) unsafe fn change(
        &mut self,
        plan: &Plan,
        redundant: &[bool],
        changed: &[bool],
        make: impl FnOnce() -> Result<Made>,
    ) -> Result<Change> {
        if patches(plan, redundant, changed).is_none() {
            return Ok(Change::TakesOthers);
        }
        let Some(current) = &self.current else { return Ok(Change::Done) };
        if is_idle(current.last()) {
            // SAFETY: by the caller's contract; its launches are over.
            if !unsafe { patch(current.exec(), plan, redundant, changed) }? {
                return Ok(Change::TakesOthers);
            }
        } else if let Some(at) = self.others.iter().position(|o| is_idle(o.executable.last())) {
            let other = &self.others[at];
            let all: Vec<bool> =
                std::iter::zip(&other.behind, changed).map(|(a, b)| *a | *b).collect();
            // SAFETY: by the caller's contract; its launches are over, and no other instance is
            // touched.
            if !unsafe { patch(other.executable.exec(), plan, redundant, &all) }? {
                return Ok(Change::TakesOthers);
            }
            let other = self.others.remove(at);
            self.put_aside(other.executable, changed.len());
        } else {
            match make()? {
                Made::Now(executable) => self.put_aside(executable, changed.len()),
                Made::After(after) => {
                    let own = self.current.as_ref().and_then(|c| c.last().timepoint());
                    return Ok(Change::After(own.or(after)));
                }
            }
        }
        for other in &mut self.others {
            other.behind.iter_mut().zip(changed).for_each(|(behind, changed)| *behind |= *changed);
        }
        Ok(Change::Done)
    }

    /// Makes an instance the current one, and the current one another.
    fn put_aside(&mut self, executable: Executable, nodes: usize) {
        if let Some(executable) = self.current.replace(executable) {
            self.others.push(Other { executable, behind: vec![false; nodes] });
        }
    }
}

/// Changes nodes of an instance. False when the driver cannot do it in place.
///
/// # Errors
/// The driver's own.
///
/// # Safety
/// - As [`GraphExec::update`].
unsafe fn patch(
    exec: &Lease<dyn GraphExec>,
    plan: &Plan,
    redundant: &[bool],
    changed: &[bool],
) -> Result<bool> {
    let Some(patches) = patches(plan, redundant, changed) else { return Ok(false) };
    // SAFETY: by the caller's contract.
    match unsafe { exec.update(&patches) } {
        Ok(()) => Ok(true),
        Err(Error::TopologyChanged(_)) => Ok(false),
        Err(e) => Err(e),
    }
}

/// The changed launches, by their place in the plan; `None` when something else changed as well.
fn patches<'a>(plan: &'a Plan, redundant: &[bool], changed: &[bool]) -> Option<Vec<NodePatch<'a>>> {
    let places = changed
        .iter()
        .zip(redundant)
        .filter(|(_, redundant)| !**redundant)
        .map(|(changed, _)| *changed);
    let mut patches = Vec::new();
    for (at, _) in places.enumerate().filter(|(_, changed)| *changed) {
        let Some(Op::Dispatch(d)) = plan.ops.get(at) else { return None };
        patches.push(NodePatch {
            node: at as u32,
            bindings: Some(d.bindings),
            params: Some(d.params),
            grid: Some(d.grid),
        });
    }
    Some(patches)
}
