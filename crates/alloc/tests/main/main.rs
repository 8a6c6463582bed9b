//! The allocator at its public API: against a model, through failures of the driver, on recorded
//! traces, and once per defect that other allocators of this kind have had.

mod arena;
mod debug;
mod depot;
mod external;
mod faults;
mod growing;
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
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::VirtualStream;

const MIB: u64 = 1 << 20;

/// A stream for which a wait of the host ends with an error, before the work is over.
fn unreachable_stream(error: fn() -> Error) -> VirtualStream {
    let stream = VirtualStream::new().expect("a timeline");
    stream.on_wait(Some(std::sync::Arc::new(move |_, _| Err(error()))));
    stream
}

/// A stream whose device is behind the host: a wait of the host ends before the work.
fn late_stream() -> VirtualStream {
    unreachable_stream(|| Error::Timeout("the stream is late".into()))
}

/// Frees a block that work of a stream uses until the value that this returns.
fn free_in_use(stream: &VirtualStream, block: Lease<Buffer>) -> u64 {
    let end = stream.submit().expect("a value");
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { block.mark_read(end) };
    end.value()
}

/// Waits until an allocator that nobody holds has given everything back to its device. Its streams
/// are done. Any allocator's call destroys it: this one's, or that of another test, which may be at
/// it now.
#[track_caller]
fn given_back(fake: &FakeBacking) {
    drain_until(|| fake.outstanding() == (0, 0, 0, 0));
    assert_eq!(fake.outstanding(), (0, 0, 0, 0));
}

/// Calls an allocator until something is so, for ten seconds at most.
fn drain_until(so: impl Fn() -> bool) {
    let (other, begun) = (Bench::new(4 * MIB), std::time::Instant::now());
    loop {
        other.allocator.drain();
        if so() || begun.elapsed().as_secs() >= 10 {
            return;
        }
        std::thread::yield_now();
    }
}

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
