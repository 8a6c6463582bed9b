//! The settings of an allocator, and the numbers that it reports about itself.

use crate::budget::Budget;
use crate::buffer::HostKind;
use crate::debug::DebugOptions;
use leasehold_core::Text;
use leasehold_core::sync::Arc;

/// When free granules are moved to where they are needed instead of taking new memory. Needs a
/// backing with virtual memory management.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum Policy {
    /// While it costs less than one remapping (about 50 µs) per 1,000 allocations and frees on
    /// average; not within a budget, up to which memory may be taken.
    #[default]
    Balanced,
    /// Only when there is no other memory left; and new memory comes in pieces of a sixteenth of
    /// what is there, 256 MiB at most, which are fewer calls of the driver but seldom fit
    /// elsewhere.
    Fastest,
    /// Always, also if the host must wait for them, 8 ms at most; and new memory comes in single
    /// granules.
    Compact,
}

/// Remappings of granules that an allocator may spend while it warms up.
pub(crate) const CREDIT: u64 = 64;
/// One more remapping for every so many granules in hand.
pub(crate) const GRANULES_PER_REMAP: u64 = 4;
/// One more for so many operations.
pub(crate) const OPERATIONS_PER_REMAP: u64 = 1_000;

/// When free granules are moved instead of taking new ones.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Moves {
    /// Only when there is no other memory left.
    Never,
    /// As long as it is rare: [`CREDIT`] remappings, and more with granules and operations.
    Credit,
    /// Whenever they suffice.
    Always,
}

/// How memory is taken from the driver: what a [`Policy`] means.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Growth {
    /// When free granules are moved instead.
    pub(crate) moves: Moves,
    /// Before growing, the host waits for memory whose last use is at most this many values ahead
    /// on its timeline.
    pub(crate) near: Option<u64>,
    /// New pieces are one part in so many of what is reserved. The driver takes as long for each,
    /// whatever its size, but small ones fit elsewhere later.
    piece_share: u64,
    /// The largest piece.
    piece_most: u64,
    /// Growth takes one part in so many of what is reserved, at least.
    least_share: u64,
}

impl Growth {
    /// The bytes of a new piece, a power of two.
    pub(crate) fn piece(&self, reserved: u64) -> u64 {
        let part = (reserved / self.piece_share).max(1);
        (1u64 << part.ilog2()).min(self.piece_most)
    }

    /// The least bytes that are taken at once.
    pub(crate) fn least(&self, reserved: u64) -> u64 {
        reserved / self.least_share
    }
}

impl Policy {
    /// The policy in numbers. `budgeted`: there is a budget, up to which memory is the caller's to
    /// use. Then much is taken at once, so that a workload that repeats comes to rest.
    pub(crate) const fn growth(self, budgeted: bool) -> Growth {
        let least_share = if budgeted { 32 } else { u64::MAX };
        match self {
            Policy::Balanced => Growth {
                moves: if budgeted { Moves::Never } else { Moves::Credit },
                near: if budgeted { None } else { Some(256) },
                piece_share: 128,
                piece_most: 32 << 20,
                least_share,
            },
            Policy::Fastest => Growth {
                moves: Moves::Never,
                near: None,
                piece_share: 16,
                piece_most: 256 << 20,
                least_share,
            },
            Policy::Compact => Growth {
                moves: Moves::Always,
                near: Some(u64::MAX - 1),
                piece_share: u64::MAX,
                piece_most: 1,
                least_share: u64::MAX,
            },
        }
    }
}

/// The use that an allocation may make of free memory that another stream may still be using.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Hash)]
pub enum CrossStream {
    /// Nothing: it waits on the host until the memory is ready, and only when there is no other.
    Never,
    /// Take it when it is ready; when there is no other memory, let the stream wait for it on the
    /// device.
    #[default]
    IfReady,
    /// Let the stream wait for it on the device before taking new memory from the driver.
    InsertWait,
}

/// The settings of an allocator. All have defaults.
#[derive(Debug, Clone)]
pub struct AllocatorConfig {
    /// The name of the memory in reports: `cpu:0 device memory`.
    /// Default: `memory`.
    pub name: Text,
    /// The kind of host memory of its buffers.
    /// Default: [`HostKind::None`].
    pub host_kind: HostKind,
    /// Moving granules.
    /// Default: [`Policy::Balanced`].
    pub policy: Policy,
    /// Memory under free blocks stays where it is mapped, until a trim: for addresses that a
    /// captured graph uses at each launch, also after their blocks were freed. Free granules are
    /// then never moved, whatever the policy. Default: `false`.
    pub immovable: bool,
    /// Memory that other streams may still be using.
    /// Default: [`CrossStream::IfReady`].
    pub cross_stream: CrossStream,
    /// The most bytes that are taken from the driver. Hard: never exceeded, at no instant.
    /// Default: `u64::MAX`, no limit.
    pub budget: u64,
    /// A budget that other allocators take from too. Hard as well.
    /// Default: `None`.
    pub shared_budget: Option<Arc<Budget>>,
    /// Thread caches in front of the lock. None with [`Policy::Compact`].
    /// Default: `true`.
    pub thread_caches: bool,
    /// The debug checks, which look for wrong uses of memory. All off.
    /// Default: none.
    pub debug: DebugOptions,
    /// Entries of the ring of trace events, of 48 bytes of host memory each; 2^24 at most, and 0
    /// switches it off. With it, every request goes through the lock.
    /// Default: 0.
    pub trace_events: usize,
}

impl Default for AllocatorConfig {
    fn default() -> Self {
        Self {
            name: Text::Borrowed("memory"),
            host_kind: HostKind::None,
            policy: Policy::default(),
            immovable: false,
            cross_stream: CrossStream::default(),
            budget: u64::MAX,
            shared_budget: None,
            thread_caches: true,
            debug: DebugOptions::default(),
            trace_events: 0,
        }
    }
}

/// The state of an allocator in numbers. Bytes unless it says otherwise.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
#[non_exhaustive]
pub struct AllocStats {
    /// Buffers that leases hold.
    pub live: u64,
    /// Their bytes, as asked for; without imported memory.
    pub live_bytes: u64,
    /// The most that `live_bytes` was. It may be low by 2 MiB per shard of the thread caches, and
    /// by large blocks that other threads took from their caches at the same time.
    pub live_peak: u64,
    /// Bytes taken from the driver.
    pub reserved: u64,
    /// The most that `reserved` was. Exact.
    pub reserved_peak: u64,
    /// Imported buffers that leases hold.
    pub imported: u64,
    /// Their bytes.
    pub imported_bytes: u64,
    /// Free bytes that are ready for everybody.
    pub free_ready: u64,
    /// Free bytes whose last use may still go on.
    pub free_not_ready: u64,
    /// Free bytes in slab runs.
    pub free_in_slabs: u64,
    /// Free bytes in thread caches and the depot.
    pub free_in_thread_caches: u64,
    /// Physical memory in hand that is mapped nowhere.
    pub cached_pieces: u64,
    /// Memory that is mapped in growing blocks beyond their lengths, and in those that nobody
    /// holds.
    pub idle_in_growing: u64,
    /// Bytes that forks of growing blocks have without memory of their own. `live_bytes` counts
    /// them with each block, `reserved` does not.
    pub shared_in_growing: u64,
    /// Bytes that the driver would not take back.
    pub quarantined: u64,
    /// Bytes of freed blocks that the debug checks keep from reuse.
    pub held_back: u64,
    /// Wrong uses of memory that the debug checks found (count).
    pub findings: u64,
    /// Bytes that graph arenas hold.
    pub in_graphs: u64,
    /// Bytes that executables of graphs take beside `reserved`, as their manager said.
    pub in_executables: u64,
    /// Blocks that were taken, ever (count).
    pub allocations: u64,
    /// Those that a thread cache served (count).
    pub thread_cache_hits: u64,
    /// Growths (count).
    pub growths: u64,
    /// Remappings of free granules (count).
    pub remaps: u64,
    /// Waits of the host for a stream (count).
    pub host_waits: u64,
    /// Waits that were inserted into a stream (count).
    pub inserted_waits: u64,
    /// Requests that failed (count).
    pub failed: u64,
    /// Dropped imports whose last use is still pending (count).
    pub retired: u64,
    /// Calls of the driver, as the backing counts them.
    pub driver_calls: u64,
    /// Host memory of the allocator's own tables.
    pub metadata: u64,
    /// The budget; `u64::MAX` when there is none.
    pub limit: u64,
}
