//! The allocator at its public API: against a model, through failures of the driver, on recorded
//! traces, and once per defect that other allocators of this kind have had.

mod arena;
mod debug;
mod depot;
mod external;
mod faults;
mod host_memory;
mod model;
mod observe;
mod oom;
mod properties;
mod regressions;
mod suspend;
mod traces;
mod workloads;

use leasehold_alloc::{Allocator, AllocatorConfig, Buffer, Layout, On};
use leasehold_alloc_bench::FakeBacking;
use leasehold_alloc_bench::VirtualStream;
use leasehold_core::{Lease, Result, Timepoint};

const MIB: u64 = 1 << 20;

/// An allocator over a fake device, and a stream.
struct Bench {
    fake: FakeBacking,
    allocator: Allocator,
    stream: VirtualStream,
}

impl Bench {
    fn new(physical: u64) -> Self {
        Self::with(FakeBacking::new(physical), AllocatorConfig::default())
    }

    fn with(fake: FakeBacking, config: AllocatorConfig) -> Self {
        let allocator = Allocator::new(Box::new(fake.clone()), config)
            .expect("an allocator over a fake backing");
        Self { fake, allocator, stream: VirtualStream::new().expect("a timeline") }
    }

    fn alloc(&self, size: u64) -> Result<Lease<Buffer>> {
        self.allocator.alloc(Layout::new(size), On::new(&self.stream))
    }

    /// Allocates, and fails the test if that fails.
    fn take(&self, size: u64) -> Lease<Buffer> {
        self.alloc(size).expect("an allocation that must succeed")
    }

    /// Frees a new block while work of another stream uses it. Returns the block's address and the
    /// work's end.
    fn freed_in_use(&self, other: &VirtualStream, size: u64) -> (u64, Timepoint) {
        let x = self.allocator.alloc(Layout::new(size), On::new(other)).expect("a block");
        let end = other.submit().expect("a value");
        // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
        unsafe { x.mark_write(end) };
        (x.addr(), end)
    }

    /// Invariants of the allocator and of its use of the backing.
    fn check(&self) {
        self.allocator.check().expect("the invariants");
        assert_eq!(self.fake.violations(), Vec::<String>::new());
    }
}
