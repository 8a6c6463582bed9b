//! The steps of a plan's launch: segments that the driver runs, and the operations between them.
//!
//! A driver cannot run a host call that may call the driver, nor wait for work that the host holds
//! back. So a plan is split at such operations. The nodes between two of them are a *segment*, and
//! the stream goes from step to step. Host calls and waits are barriers of a plan, so the split
//! loses no parallelism. A cut at any place keeps the order of a plan: later nodes run later.
//!
//! This module must not know how a segment runs.

use crate::{Copy2d, ForeignCall, HostCall, Op, Plan};
use leasehold_core::{Result, Timepoint};
use std::ops::Range;

/// The next step of a graph's launch.
#[derive(Debug, Clone)]
pub(crate) enum Step {
    /// A segment: the nodes that are one launch of the driver.
    Run(u32),
    /// A host call.
    Call(HostCall),
    /// A wait.
    Wait(Timepoint),
    /// A library's call.
    Foreign(Box<ForeignCall>),
    /// A copy that takes more than one driver call.
    Copy(Copy2d),
}

/// The steps of a plan's launch.
#[derive(Debug)]
pub struct Steps(Box<[Step]>);

impl Steps {
    /// Splits a plan. Returns the steps, and the nodes of each segment. `apart` says which copies
    /// and library calls cannot be nodes of a segment.
    ///
    /// # Errors
    /// As [`Plan::check`].
    pub fn of(plan: &Plan, apart: impl Fn(&Op<'_>) -> bool) -> Result<(Self, Vec<Range<usize>>)> {
        plan.check()?;
        let (mut parts, mut segments) = (Vec::new(), Vec::<Range<usize>>::new());
        let mut open = false;
        for (i, op) in plan.ops.iter().enumerate() {
            let part = match op {
                Op::Host(call) => Step::Call(call.clone()),
                Op::Wait(point) => Step::Wait(point),
                Op::Foreign(call) if apart(&op) => Step::Foreign(Box::new(call.clone())),
                Op::Copy(copy) if apart(&op) => Step::Copy(copy),
                _ => {
                    match segments.last_mut() {
                        Some(segment) if open => segment.end = i + 1,
                        _ => {
                            parts.push(Step::Run(segments.len() as u32));
                            segments.push(i..i + 1);
                        }
                    }
                    open = true;
                    continue;
                }
            };
            open = false;
            parts.push(part);
        }
        Ok((Self(parts.into()), segments))
    }

    /// Whether a launch does nothing.
    #[inline]
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    /// Bytes of host memory.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        size_of_val(&*self.0) as u64
    }

    /// Whether a launch is at most one segment.
    #[inline]
    #[must_use]
    pub fn is_plain(&self) -> bool {
        matches!(&*self.0, [] | [Step::Run(_)])
    }

    /// Step number `i` of a launch.
    pub(crate) fn step(&self, i: usize) -> Option<Step> {
        self.0.get(i).cloned()
    }

    /// Calls `f` with the timepoints that a launch waits for.
    pub(crate) fn for_each_wait(&self, mut f: impl FnMut(Timepoint)) {
        for step in &self.0 {
            if let Step::Wait(point) = step {
                f(*point);
            }
        }
    }
}
