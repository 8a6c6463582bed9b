//! Checks of single operations that need only the operation and the device's limits.
//!
//! [`Op::check`] is the check of every backend before it submits anything. The validation layer
//! also checks accesses, alignment, memory and objects.
//!
//! This module must not know which memory or which objects exist.

use crate::conditional::Conditional;
use crate::info::Limits;
use crate::kernel::{Binding, Pipeline};
use crate::op::{Copy2d, Dispatch, Fill, Op};
use leasehold_core::{Error, Result, Timeline, Timepoint};

impl Op<'_> {
    /// Checks the operation before it is submitted to `timeline`, on a device whose kernels may
    /// take `most_shared` bytes of shared memory. Backends call this for each operation, so that
    /// all refuse the same mistakes in the same words.
    ///
    /// # Errors
    /// `InvalidArgument` for a wrong number of bindings or bytes of parameters, too much shared
    /// memory, a copy without gaps that overlaps itself, a fill that is not made of whole patterns
    /// of 1, 2 or 4 bytes, and a wait for a value of the same stream that was not submitted;
    /// `Unsupported` for a loop or branch outside a plan.
    #[inline]
    pub fn check(&self, timeline: &Timeline, most_shared: u32) -> Result<()> {
        match self {
            Op::Dispatch(d)
                if d.bindings.len() != d.pipeline.bindings.len()
                    || d.params.len() != d.pipeline.params as usize
                    || d.shared > most_shared =>
            {
                dispatch_slow(d, most_shared)
            }
            Op::Copy(c) if c.rows == 1 && c.width != 0 && c.src.abs_diff(c.dst) < c.width => {
                Err(overlapping(c))
            }
            Op::Fill(f)
                if !matches!(f.width, 1 | 2 | 4) || !f.bytes.is_multiple_of(u64::from(f.width)) =>
            {
                fill(f)
            }
            Op::Wait(on)
                if on.timeline_id() == timeline.id() && on.value() > timeline.submitted() =>
            {
                Err(waits_for_itself(*on))
            }
            Op::Conditional(c) => Err(outside_a_plan(c)),
            _ => Ok(()),
        }
    }
}

/// The refusal of a loop or branch that is submitted by itself.
#[cold]
fn outside_a_plan(conditional: &Conditional) -> Error {
    Error::Unsupported(
        format!("a {conditional} by itself; make it a node of a plan, and submit the graph").into(),
    )
}

#[cold]
fn dispatch_slow(d: &Dispatch<'_>, most_shared: u32) -> Result<()> {
    number_of_bindings(d.pipeline, d.bindings)?;
    params(d.pipeline, d.params)?;
    shared_fits(d.pipeline, d.shared, most_shared)
}

/// The refusal of a wait that would never end.
#[cold]
pub(crate) fn waits_for_itself(on: Timepoint) -> Error {
    Error::invalid(format!("{on:?} is not submitted yet: the stream would wait for itself"))
}

#[cold]
fn overlapping(c: &Copy2d) -> Error {
    Error::invalid(format!(
        "the copy of {} bytes from {:#x} to {:#x} overlaps itself",
        c.width * c.rows,
        c.src,
        c.dst
    ))
}

fn number_of_bindings(pipeline: &Pipeline, bindings: &[Binding]) -> Result<()> {
    if bindings.len() != pipeline.bindings.len() {
        return Err(Error::invalid(format!(
            "kernel {} takes {} bindings, not {}",
            pipeline.name,
            pipeline.bindings.len(),
            bindings.len()
        )));
    }
    Ok(())
}

fn shared_fits(pipeline: &Pipeline, shared: u32, limit: u32) -> Result<()> {
    if shared > limit {
        return Err(Error::invalid(format!(
            "kernel {} is launched with {shared} bytes of shared memory; the limit is {limit}",
            pipeline.name
        )));
    }
    Ok(())
}

/// A range of device memory that an operation accesses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Range {
    pub(crate) addr: u64,
    pub(crate) len: u64,
    pub(crate) native: u64,
    /// The range may lie in a peer's memory.
    pub(crate) peer: bool,
}

impl From<&Binding> for Range {
    fn from(b: &Binding) -> Self {
        Range { addr: b.addr, len: b.len, native: b.native, peer: false }
    }
}

/// The ranges of a dispatch's bindings, in their order. One with a limit has no byte that must have
/// memory.
pub(crate) fn ranges<'b>(
    pipeline: &'b Pipeline,
    bindings: &'b [Binding],
) -> impl Iterator<Item = Range> + 'b {
    bindings.iter().enumerate().map(|(i, binding)| {
        let range = Range::from(binding);
        match pipeline.limited >> i & 1 {
            0 => range,
            _ => Range { len: 0, ..range },
        }
    })
}

/// Checks grid, block and shared memory against the limits. A grid with a zero runs nothing and is
/// valid.
pub(crate) fn shape(
    limits: &Limits,
    pipeline: &Pipeline,
    grid: [u32; 3],
    block: [u32; 3],
    shared: u32,
) -> Result<()> {
    grid_fits(limits, grid)?;
    if block.contains(&0) {
        return Err(Error::invalid(format!(
            "a block of {block:?} threads has none; use 1 where nothing is meant"
        )));
    }
    let threads = block.iter().fold(1u64, |n, &b| n.saturating_mul(u64::from(b)));
    let most = u64::from(limits.block_threads.min(pipeline.block_threads));
    if block.iter().zip(&limits.block).any(|(b, l)| b > l) || threads > most {
        return Err(Error::invalid(format!(
            "a block of {block:?} is {threads} threads; the limits are {:?} and {most} in all",
            limits.block
        )));
    }
    shared_fits(pipeline, shared, limits.shared)
}

/// Checks the grid against the limits.
pub(crate) fn grid_fits(limits: &Limits, grid: [u32; 3]) -> Result<()> {
    if grid.iter().zip(&limits.grid).any(|(g, l)| g > l) {
        return Err(Error::invalid(format!("a grid of {grid:?}; the limit is {:?}", limits.grid)));
    }
    Ok(())
}

/// Checks number, roles and alignment of bindings.
pub(crate) fn bindings(limits: &Limits, pipeline: &Pipeline, bindings: &[Binding]) -> Result<()> {
    number_of_bindings(pipeline, bindings)?;
    for (i, (b, &declared)) in bindings.iter().zip(&pipeline.bindings).enumerate() {
        if (declared.reads() && !b.access.reads()) || (declared.writes() && !b.access.writes()) {
            return Err(Error::invalid(format!(
                "binding {i} is bound as {}; kernel {} declares it as {declared}",
                b.access, pipeline.name
            )));
        }
        if b.len != 0 && !b.addr.is_multiple_of(limits.binding_alignment.max(1)) {
            return Err(Error::invalid(format!(
                "binding {i} at {:#x} is not aligned to {} bytes",
                b.addr, limits.binding_alignment
            )));
        }
    }
    Ok(())
}

/// Checks the size of the parameters.
pub(crate) fn params(pipeline: &Pipeline, params: &[u8]) -> Result<()> {
    if params.len() != pipeline.params as usize {
        return Err(Error::invalid(format!(
            "kernel {} takes {} bytes of parameters, not {}",
            pipeline.name,
            pipeline.params,
            params.len()
        )));
    }
    Ok(())
}

/// Checks pattern and alignment of a fill.
pub(crate) fn fill(f: &Fill) -> Result<()> {
    if !matches!(f.width, 1 | 2 | 4) {
        return Err(Error::invalid(format!(
            "the pattern of a fill has {} bytes; use 1, 2 or 4",
            f.width
        )));
    }
    if f.width < 4 && f.pattern >> (8 * f.width) != 0 {
        return Err(Error::invalid(format!(
            "pattern {:#x} does not fit in {} bytes",
            f.pattern, f.width
        )));
    }
    let width = u64::from(f.width);
    if !f.dst.is_multiple_of(width) || !f.bytes.is_multiple_of(width) {
        return Err(Error::invalid(format!(
            "the fill of {} bytes at {:#x} is not made of whole, aligned patterns of {width} bytes",
            f.bytes, f.dst
        )));
    }
    Ok(())
}

/// Checks the pitches of a copy, and that it does not overlap itself.
pub(crate) fn copy(c: &Copy2d) -> Result<()> {
    if c.rows == 0 || c.width == 0 {
        return Ok(());
    }
    if c.rows > 1 && c.dst_pitch < c.width {
        return Err(Error::invalid(format!(
            "rows of {} bytes at a pitch of {} overlap",
            c.width, c.dst_pitch
        )));
    }
    for (at, pitch) in [(c.src, c.src_pitch), (c.dst, c.dst_pitch)] {
        let end = (c.rows - 1)
            .checked_mul(pitch)
            .and_then(|e| e.checked_add(c.width))
            .and_then(|e| e.checked_add(at));
        if end.is_none() {
            return Err(Error::invalid("the copy wraps the address space"));
        }
    }
    if overlaps(c) {
        return Err(overlapping(c));
    }
    Ok(())
}

/// Returns whether a byte is both read and written. The rows of both sides are sorted, so one walk
/// over both suffices.
fn overlaps(c: &Copy2d) -> bool {
    let (src_end, dst_end) = (c.src + c.extent(c.src_pitch), c.dst + c.extent(c.dst_pitch));
    if src_end <= c.dst || dst_end <= c.src {
        return false;
    }
    let (mut i, mut j) = (0, 0);
    while i < c.rows && j < c.rows {
        let (s, d) = (c.src + i * c.src_pitch, c.dst + j * c.dst_pitch);
        if s + c.width <= d {
            i += 1;
        } else if d + c.width <= s {
            j += 1;
        } else {
            return true;
        }
    }
    false
}

#[cfg(test)]
#[path = "../tests/unit/check.rs"]
mod tests;
