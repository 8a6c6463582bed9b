//! Memory that goes and comes back with its contents: the copies of a suspension.
//!
//! This module must not know whose memory it is.

use crate::runtime::Runtime;
use crate::view::View;
use leasehold_alloc::{Buffer, SuspendableBacking};
use leasehold_core::{Error, Lease, Result};

/// The contents of a part of the memory.
#[derive(Debug)]
struct Saved {
    /// The ranges that were kept, address and bytes, in order.
    ranges: Vec<(u64, u64)>,
    /// Their copy, from the first one's beginning to the last one's end.
    copy: Lease<Buffer>,
}

/// The memory of an allocator over a [`SuspendableBacking`], with what a suspension keeps of it.
///
/// A suspension copies the contents to pinned host memory, part by part, and a resumption copies
/// them back. For pools of one's own; [`SuspendablePool`](super::SuspendablePool) is one that safe
/// programs use.
#[derive(Debug)]
pub struct SuspendableMemory {
    backing: SuspendableBacking,
    saved: Vec<Saved>,
}

impl SuspendableMemory {
    /// All contents, for [`suspend`](Self::suspend).
    pub const ALL: &[(u64, u64)] = &[(0, u64::MAX)];

    /// The memory of the allocator that has this backing.
    #[must_use]
    pub fn new(backing: SuspendableBacking) -> Self {
        Self { backing, saved: Vec::new() }
    }

    /// Whether the memory is away.
    #[must_use]
    pub fn is_suspended(&self) -> bool {
        self.backing.is_suspended()
    }

    /// Bytes of pinned host memory that hold contents.
    #[must_use]
    pub fn saved_bytes(&self) -> u64 {
        self.saved.iter().map(|saved| saved.copy.len()).sum()
    }

    /// Gives all memory back to the device, and keeps the addresses. `keep`: the ranges whose
    /// contents are kept, address and bytes, in order and apart; the runtime's stream copies them.
    /// Returns the bytes that went. Blocks until the copies are over, and on the driver.
    ///
    /// # Errors
    /// `InvalidState` if the memory is away already; `OutOfMemory` without host memory for the
    /// contents; the error of a copy; the driver's own. The memory is as before then. If a part had
    /// gone and does not come back, the memory stays away with these contents kept:
    /// [`is_suspended`](Self::is_suspended) says so.
    ///
    /// # Safety
    /// - The memory is of the runtime's device, and all work that uses it is over.
    /// - No work uses it until [`resume`](Self::resume) has returned `Ok`.
    pub unsafe fn suspend(&mut self, runtime: &Runtime, keep: &[(u64, u64)]) -> Result<u64> {
        if self.is_suspended() {
            return Err(Error::state("the memory is suspended already"));
        }
        let saved = &mut self.saved;
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
        let freed = unsafe { self.backing.suspend(save, finish) };
        if freed.is_err() {
            // Copies that began may still read the memory. Their failure is told already.
            let _ = runtime.stream().synchronize();
            if self.is_suspended() {
                // The parts that went come back with their contents, or the memory stays away.
                let _ = self.resume(runtime);
            } else {
                self.saved.clear();
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
        let saved = &self.saved;
        let restore = |at: u64, bytes: u64| {
            saved.iter().try_for_each(|Saved { ranges, copy }| {
                common(ranges, at, bytes).try_for_each(|(from, bytes)| {
                    let memory = import(runtime, from, bytes)?;
                    let kept = copy.view().narrowed(from - ranges[0].0, bytes);
                    runtime.stream().copy(memory.view(), kept)
                })
            })
        };
        self.backing.resume(restore, || runtime.stream().synchronize())?;
        self.saved.clear();
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
