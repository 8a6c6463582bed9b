//! Instantiated plans. A launch encodes the nodes of a segment anew.
//!
//! The nodes go into the stream's open pass in the plan's order, which satisfies all dependencies.
//! Bytes for memory that the device does not reach go through staging memory that the graph owns.
//! Library calls are steps of their own.
//!
//! This module must not know how an operation is encoded.

use super::core::Core;
use super::host::{self, copy_out, written};
use super::stream::{Encoding, MpsStream, needs_staging};
use leasehold_alloc::Buffer;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, UniqueLease};
use leasehold_hal::engine::driver::{GraphSteps, Instantiate};
use leasehold_hal::engine::payload::graph_of;
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::engine::steps::Steps;
use leasehold_hal::{NodePatch, Op, Plan};
use std::fmt;
use std::ops::Range;

/// A part of a plan that is encoded at once.
struct Segment {
    nodes: Range<usize>,
    /// Staging memory, by node.
    staging: Vec<(usize, UniqueLease<Buffer>)>,
}

impl Segment {
    fn staging(&self, node: usize) -> Option<&UniqueLease<Buffer>> {
        self.staging.iter().find(|(n, _)| *n == node).map(|(_, staging)| staging)
    }
}

/// An instantiated plan.
pub struct Program {
    plan: Mutex<Plan>,
    steps: Steps,
    segments: Vec<Segment>,
    nodes: usize,
}

impl Program {
    /// Whether the graph may be a node of another one.
    fn nested(&self) -> Result<()> {
        if self.steps.is_plain() {
            return Ok(());
        }
        let text = "a graph with host calls, waits or library calls inside a graph";
        Err(Error::Unsupported(text.into()))
    }

    /// Encodes a segment. Returns whether there was anything to encode.
    ///
    /// # Safety
    /// - The graph, and the memory that its nodes touch, may be used until the submission `value`
    ///   is over.
    pub(super) unsafe fn launch(
        &self,
        stream: &MpsStream,
        e: &mut Encoding,
        segment: u32,
        value: u64,
    ) -> Result<bool> {
        let Some(segment) = self.segments.get(segment as usize) else { return Ok(false) };
        let plan = self.plan.lock();
        let mut any = false;
        for node in segment.nodes.clone() {
            let Some(op) = plan.ops.get(node) else { break };
            let staging = segment.staging(node);
            if let (Op::Upload(u), Some(staging)) = (&op, staging) {
                // SAFETY: the plan's maker vouches for the source whenever the graph runs. An
                // earlier launch that still reads the memory reads the same bytes, because nothing
                // writes the source until that launch is over.
                unsafe { host::stage(u.src, staging, u.bytes) };
            }
            // SAFETY: the caller vouches for the nodes' memory, and the graph owns the staging
            // memory.
            any |= unsafe { stream.give(e, &op, staging.map(|s| &**s), value)? };
        }
        Ok(any)
    }

    /// Does the host's part of a segment's launch that is over.
    pub(super) fn finish_host_part(&self, core: &Core, segment: u32) {
        let Some(segment) = self.segments.get(segment as usize) else { return };
        let plan = self.plan.lock();
        for node in segment.nodes.clone() {
            match plan.ops.get(node) {
                Some(Op::Download(d)) => {
                    if let Some(staging) = segment.staging(node) {
                        // SAFETY: the segment ran, so its bytes are in the staging memory. The
                        // plan's maker vouches for the destination whenever the graph runs.
                        unsafe { copy_out(staging, HostAddress(d.dst), d.bytes) };
                    }
                }
                Some(Op::WriteTimestamp(timestamp)) => written(core, timestamp),
                Some(Op::Graph(child)) => {
                    // SAFETY: graphs of a plan belong to this device (the maker's promise).
                    unsafe { graph_of::<MpsStream>(child) }.finish_host_part(core, 0);
                }
                _ => {}
            }
        }
    }
}

impl Instantiate for Program {
    type Device = Core;

    fn instantiate(core: &Arc<Core>, plan: Plan) -> Result<Self> {
        let (steps, ranges) = Steps::of(&plan, |op| matches!(op, Op::Foreign(_)))?;
        let mut segments = Vec::with_capacity(ranges.len());
        for nodes in ranges {
            let mut staging = Vec::new();
            for node in nodes.clone() {
                match plan.ops.get(node) {
                    Some(op @ (Op::Upload(_) | Op::Download(_))) if needs_staging(core, &op) => {
                        let mut bytes = 0;
                        op.for_each_access(|_, len, _| bytes = len);
                        staging.push((node, core.staging.take(bytes)?));
                    }
                    // SAFETY: graphs of a plan belong to this device (the maker's promise).
                    Some(Op::Graph(child)) => unsafe { graph_of::<MpsStream>(child) }.nested()?,
                    Some(Op::Conditional(conditional)) => {
                        return Err(Error::Unsupported(
                            format!("a {conditional}: Metal has no loops and branches in graphs")
                                .into(),
                        ));
                    }
                    _ => {}
                }
            }
            segments.push(Segment { nodes, staging });
        }
        Ok(Self { nodes: plan.len(), plan: Mutex::new(plan), steps, segments })
    }

    fn nodes(&self) -> usize {
        self.nodes
    }

    fn bytes(&self) -> u64 {
        let staging = self.segments.iter().flat_map(|s| &s.staging).map(|(_, s)| s.len());
        let tables = self.segments.len() * size_of::<Segment>() + size_of::<Self>();
        staging.sum::<u64>() + tables as u64 + self.steps.bytes() + self.plan.lock().ops.bytes()
    }

    fn update(&self, patches: &[NodePatch<'_>]) -> Result<()> {
        let mut plan = self.plan.lock();
        // If a node is patched twice, the last patch counts.
        let mut new = plan.ops.clone();
        for p in patches {
            new.patch(p.node as usize, p.bindings, p.params, p.grid)?;
        }
        plan.ops = new;
        Ok(())
    }
}

impl GraphSteps for Program {
    #[inline]
    fn steps(&self) -> &Steps {
        &self.steps
    }
}

impl fmt::Debug for Program {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Program({} nodes, {} segments)", self.nodes, self.segments.len())
    }
}
