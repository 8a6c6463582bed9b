//! The instances of a graph: while launches of one are pending, another is changed.
//!
//! One instance is current: a launch runs it. An update changes the current instance if its
//! launches are over; else it changes an idle one, which becomes current; else it makes one. All
//! have the same operations and dependencies. An instance that is not current may lack the changes
//! since it was put aside, and notes which nodes they were of.

use leasehold_core::{Error, Lease, PackedTimepoint, Result, Timepoint};
use leasehold_hal::{GraphExec, NodePatch, Op, Plan};

/// How many instances a graph has beside the current one.
const OTHERS: usize = 3;

/// An instance that is not current.
struct Other {
    exec: Lease<dyn GraphExec>,
    /// Its last launch.
    last: PackedTimepoint,
    /// The nodes of the recording that changed since it was put aside.
    behind: Vec<bool>,
}

/// All instances of a graph.
pub(super) struct Instances {
    exec: Lease<dyn GraphExec>,
    /// The last launch of the current one.
    last: PackedTimepoint,
    others: Vec<Other>,
}

fn is_idle(last: PackedTimepoint) -> bool {
    last.timepoint().is_none_or(Timepoint::has_passed)
}

impl Instances {
    pub(super) fn new(exec: Lease<dyn GraphExec>) -> Self {
        Self { exec, last: PackedTimepoint::NEVER, others: Vec::new() }
    }

    /// The executable graph that a launch runs.
    #[inline]
    pub(super) fn current(&self) -> &Lease<dyn GraphExec> {
        &self.exec
    }

    /// Notes a launch of the current one.
    #[inline]
    pub(super) fn launched(&mut self, at: Timepoint) {
        self.last = at.into();
    }

    /// Bytes of all.
    pub(super) fn bytes(&self) -> u64 {
        self.exec.bytes() + self.others.iter().map(|other| other.exec.bytes()).sum::<u64>()
    }

    /// The launch that an update must wait for: none unless all instances are busy and there are no
    /// more to be made.
    pub(super) fn obstacle(&self) -> Option<Timepoint> {
        let idle = is_idle(self.last)
            || self.others.len() < OTHERS
            || self.others.iter().any(|o| is_idle(o.last));
        if idle { None } else { self.others.first()?.last.timepoint() }
    }

    /// Makes the changed nodes what they are in `plan`, in an instance that is idle, and that the
    /// current one. False when that takes another set of instances.
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
        make: impl FnOnce() -> Result<Lease<dyn GraphExec>>,
    ) -> Result<bool> {
        if patches(plan, redundant, changed).is_none() {
            return Ok(false);
        }
        if is_idle(self.last) {
            // SAFETY: by the caller's contract; its launches are over.
            if !unsafe { patch(&self.exec, plan, redundant, changed) }? {
                return Ok(false);
            }
        } else if let Some(at) = self.others.iter().position(|o| is_idle(o.last)) {
            let other = &self.others[at];
            let all: Vec<bool> =
                std::iter::zip(&other.behind, changed).map(|(a, b)| *a | *b).collect();
            // SAFETY: by the caller's contract; its launches are over, and no other instance is
            // touched.
            if !unsafe { patch(&other.exec, plan, redundant, &all) }? {
                return Ok(false);
            }
            let Other { exec, last, .. } = self.others.remove(at);
            self.put_aside(exec, last, changed.len());
        } else {
            let exec = make()?;
            self.put_aside(exec, PackedTimepoint::NEVER, changed.len());
        }
        for other in &mut self.others {
            other.behind.iter_mut().zip(changed).for_each(|(behind, changed)| *behind |= *changed);
        }
        Ok(true)
    }

    /// Makes an instance the current one, and the current one another.
    fn put_aside(&mut self, exec: Lease<dyn GraphExec>, last: PackedTimepoint, nodes: usize) {
        let (exec, last) =
            (std::mem::replace(&mut self.exec, exec), std::mem::replace(&mut self.last, last));
        self.others.push(Other { exec, last, behind: vec![false; nodes] });
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
