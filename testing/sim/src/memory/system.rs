//! The process's own heap: what an allocation costs where no device is concerned. The memory is
//! never touched.

use crate::memory::workload::Subject;
use leasehold_core::Result;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use std::alloc::Layout;

const ALIGN: usize = 256;

/// The global allocator of the program, `malloc` unless it says otherwise.
pub struct System {
    budget: u64,
    live: AtomicU64,
    peak: AtomicU64,
}

/// A block of [`System`].
#[derive(Debug)]
#[must_use]
pub struct Block {
    at: *mut u8,
    layout: Layout,
    bytes: u64,
}

// SAFETY: the block owns its memory, which the heap takes back from any thread.
unsafe impl Send for Block {}

impl System {
    /// The heap, with the requested bytes counted as reserved; at most `budget` of them. The bytes
    /// that a block takes beyond its size are the global allocator's secret.
    #[must_use]
    pub fn counting(budget: u64) -> Self {
        Self { budget, live: AtomicU64::new(0), peak: AtomicU64::new(0) }
    }

    /// The most bytes that the heap gave at one time.
    #[must_use]
    pub fn reserved_peak(&self) -> u64 {
        self.peak.load(Ordering::Relaxed)
    }
}

impl Subject for System {
    type Block = Block;
    type Stream = ();

    fn stream(&self) -> Result<()> {
        Ok(())
    }

    fn alloc(&self, (): &(), size: u64) -> Option<Block> {
        let layout = Layout::from_size_align(usize::try_from(size.max(1)).ok()?, ALIGN).ok()?;
        // SAFETY: the layout has a size.
        let at = unsafe { std::alloc::alloc(layout) };
        if at.is_null() {
            return None;
        }
        let block = Block { at, layout, bytes: layout.size() as u64 };
        let live = self.live.fetch_add(block.bytes, Ordering::Relaxed) + block.bytes;
        if live > self.budget {
            self.free(&(), block);
            return None;
        }
        self.peak.fetch_max(live, Ordering::Relaxed);
        Some(block)
    }

    fn free(&self, (): &(), block: Block) {
        self.live.fetch_sub(block.bytes, Ordering::Relaxed);
        // SAFETY: given by `alloc` with this layout.
        unsafe { std::alloc::dealloc(block.at, block.layout) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::workload::Workload;

    #[test]
    fn the_heap_counts_what_it_gives_and_bears_the_workloads() {
        let s = System::counting(1 << 20);
        let a = s.alloc(&(), 1000).expect("memory");
        assert!(s.reserved_peak() >= 1000);
        assert!(s.alloc(&(), 1 << 20).is_none(), "over its budget");
        s.free(&(), a);
        for (what, workload) in Workload::all() {
            if matches!(workload, Workload::Random { live, .. } if live > 1000) {
                continue;
            }
            for threads in [1, 2] {
                let sample = workload.run(&System::counting(u64::MAX), threads, 1000);
                assert!(sample.expect("streams").is_some(), "{what}");
            }
        }
    }
}
