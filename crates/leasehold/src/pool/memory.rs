//! The memory of a pool: what goes and comes back with its contents, or what others may map.
//!
//! This module must not know whose memory it is.

use super::segments::Segments;
use crate::runtime::Runtime;
use crate::view::View;
use leasehold_alloc::{Allocator, AllocatorConfig, Buffer, SuspendableBacking};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{MemoryKind, SharedSegment};

/// The use of a pool's memory. It cannot be both: what others have mapped cannot leave the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum PoolKind {
    /// The memory can leave the device as a whole, and comes back at the same addresses.
    Suspendable,
    /// Other processes may map the memory, and libraries of collectives. It comes in segments.
    /// Each has one native handle, never moves, and goes back to the device only while nobody has
    /// exported or registered it.
    Shareable,
}

/// The contents of a part of the memory.
#[derive(Debug)]
struct Saved {
    /// The ranges that were kept, address and bytes, in order.
    ranges: Vec<(u64, u64)>,
    /// Their copy, from the first one's beginning to the last one's end.
    copy: Lease<Buffer>,
}

/// The memory of an allocator, suspendable or shareable. A suspension copies the contents to pinned
/// host memory, part by part, and a resumption copies them back.
///
/// For pools of one's own; [`Pool`](super::Pool) is one that safe programs use.
#[derive(Debug)]
pub struct PoolMemory(Kind);

#[derive(Debug)]
enum Kind {
    Suspendable { backing: SuspendableBacking, saved: Vec<Saved> },
    Shareable(Segments),
}

impl PoolMemory {
    /// All contents, for [`suspend`](Self::suspend).
    pub const ALL: &[(u64, u64)] = &[(0, u64::MAX)];

    /// An allocator over memory of the runtime's device, and that memory. A suspension gives back
    /// to the allocator's shared budget.
    ///
    /// # Errors
    /// `Unsupported` for suspendable memory on a device without addresses of its own: Metal's, and
    /// a CUDA driver's without virtual memory management. `Unsupported` for shareable memory on a
    /// device whose memory other processes cannot map
    /// ([`Caps::shareable`](crate::backend::Caps::shareable)): Metal's, the host's except on Linux,
    /// and a CUDA driver's without descriptors. The driver's own.
    pub fn new(
        runtime: &Runtime,
        kind: PoolKind,
        config: AllocatorConfig,
    ) -> Result<(Self, Allocator)> {
        if kind == PoolKind::Shareable {
            let segments = Segments::new(runtime)?;
            let allocator = Allocator::new(Box::new(segments.clone()), config)?;
            return Ok((Self(Kind::Shareable(segments)), allocator));
        }
        let no_addresses = |why: &str| {
            Error::Unsupported(
                format!(
                    "the memory of {} cannot be suspended: {why}; drop the buffers and make them \
                     again instead",
                    runtime.device()
                )
                .into(),
            )
        };
        let backing = runtime.raw_device().backing(MemoryKind::Device)?;
        let backing = match SuspendableBacking::new(backing, config.shared_budget.clone()) {
            Err(Error::Unsupported(why)) => return Err(no_addresses(&why)),
            made => made?,
        };
        let allocator = Allocator::new(Box::new(backing.clone()), config)?;
        if !backing.has_addresses() {
            return Err(no_addresses("the driver has no addresses to reserve"));
        }
        Ok((Self(Kind::Suspendable { backing, saved: Vec::new() }), allocator))
    }

    /// Whether the memory is away.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        matches!(&self.0, Kind::Suspendable { backing, .. } if backing.is_suspended())
    }

    /// Bytes of pinned host memory that hold contents.
    pub(crate) fn saved_bytes(&self) -> u64 {
        match &self.0 {
            Kind::Suspendable { saved, .. } => saved.iter().map(|saved| saved.copy.len()).sum(),
            Kind::Shareable(_) => 0,
        }
    }

    /// The segments of shareable memory, in the order in which they were made.
    pub(crate) fn segments(&self) -> Vec<Arc<dyn SharedSegment>> {
        match &self.0 {
            Kind::Suspendable { .. } => Vec::new(),
            Kind::Shareable(segments) => segments.all(),
        }
    }

    /// The segment of shareable memory that holds all of a range.
    #[must_use]
    pub fn segment_of(&self, addr: u64, bytes: u64) -> Option<Arc<dyn SharedSegment>> {
        match &self.0 {
            Kind::Suspendable { .. } => None,
            Kind::Shareable(segments) => segments.holding(addr, bytes),
        }
    }

    /// Gives all memory back to the device, and keeps the addresses. `keep`: the ranges whose
    /// contents are kept, address and bytes, in order and apart; the runtime's stream copies them.
    /// Returns the bytes that went. Blocks until the copies are over, and on the driver.
    ///
    /// # Errors
    /// `Unsupported` for shareable memory; `InvalidState` if the memory is away already;
    /// `OutOfMemory` without host memory for the contents; the error of a copy; the driver's own.
    /// The memory is as before then. If a part had gone and does not come back, the memory stays
    /// away with these contents kept: [`is_suspended`](Self::is_suspended) says so.
    ///
    /// # Safety
    /// - The memory is of the runtime's device, and all work that uses it is over.
    /// - No work uses it until [`resume`](Self::resume) has returned `Ok`.
    pub unsafe fn suspend(&mut self, runtime: &Runtime, keep: &[(u64, u64)]) -> Result<u64> {
        let Kind::Suspendable { backing, saved } = &mut self.0 else {
            return Err(Error::Unsupported(
                "shareable memory cannot be suspended: what others have mapped cannot leave".into(),
            ));
        };
        if backing.is_suspended() {
            return Err(Error::state("the memory is suspended already"));
        }
        saved.clear();
        let save = |at, bytes| {
            let ranges: Vec<_> = common(keep, at, bytes).collect();
            let (Some(&(first, _)), Some(&(last, tail))) = (ranges.first(), ranges.last()) else {
                return Ok(None);
            };
            let copy = runtime.alloc_pinned(last + tail - first)?.unlisted()?;
            for &(from, bytes) in &ranges {
                let memory = import(runtime, from, bytes)?;
                let kept = copy.view().narrowed(from - first, bytes);
                runtime.stream().copy(kept, memory.view())?;
            }
            Ok(Some((Saved { ranges, copy }, runtime.stream().now())))
        };
        let finish = |copied| {
            if let Some((copy, point)) = copied {
                runtime.wait_for([point])?;
                saved.push(copy);
            }
            Ok(())
        };
        // SAFETY: the caller vouches for all work but these copies.
        let freed = unsafe { backing.suspend(save, finish) };
        if freed.is_err() {
            // Copies that began may still read the memory. Their failure is told already.
            let _ = runtime.stream().synchronize();
            if backing.is_suspended() {
                // The parts that went come back with their contents, or the memory stays away.
                let _ = self.resume(runtime);
            } else {
                saved.clear();
            }
        }
        freed
    }

    /// Takes memory again at the same addresses, with the contents that were kept. Blocks until
    /// they are there, and on the driver.
    ///
    /// # Errors
    /// `InvalidState` if the memory is not away; `OverBudget`; `OutOfMemory`; the error of a copy;
    /// the driver's own. The memory is still away then, and the call may be repeated.
    pub fn resume(&mut self, runtime: &Runtime) -> Result<()> {
        let Kind::Suspendable { backing, saved } = &mut self.0 else {
            return Err(Error::state("shareable memory is not suspended"));
        };
        let kept = &*saved;
        let restore = |at: u64, bytes: u64| {
            kept.iter().try_for_each(|Saved { ranges, copy }| {
                common(ranges, at, bytes).try_for_each(|(from, bytes)| {
                    let memory = import(runtime, from, bytes)?;
                    let kept = copy.view().narrowed(from - ranges[0].0, bytes);
                    runtime.stream().copy(memory.view(), kept)
                })
            })
        };
        backing.resume(restore, || runtime.stream().synchronize())?;
        saved.clear();
        Ok(())
    }
}

/// The parts of ranges that lie in another one, in order.
fn common(ranges: &[(u64, u64)], at: u64, bytes: u64) -> impl Iterator<Item = (u64, u64)> {
    ranges.iter().filter_map(move |&(from, len)| {
        let begin = from.max(at);
        let end = from.saturating_add(len).min(at + bytes);
        (begin < end).then(|| (begin, end - begin))
    })
}

/// A range of the memory as a buffer, for a copy that is over before the range changes. Nobody else
/// finds it: its lease would outlast the memory.
fn import(runtime: &Runtime, at: u64, bytes: u64) -> Result<Lease<Buffer>> {
    // SAFETY: the range has memory of this device, which only the calling suspension or resumption
    // uses until its copy is over.
    unsafe { runtime.allocator().import_unlisted(at, bytes, 0, Box::new(())) }
}
