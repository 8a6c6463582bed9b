//! The allocator core: places blocks in memory that a [`Backing`] supplies, on streams that a
//! `TimelineSource` orders. It knows no driver and no device.
//!
//! Three types to know: an [`Allocator`] serves requests for one kind of memory of one device, a
//! [`Buffer`] is what its leases show, and a [`Backing`] is where it takes memory from. The example
//! of [`Allocator`] has all three. [`AllocatorConfig`] has the settings and their defaults.
//!
//! ```
//! use leasehold_alloc::{AllocatorConfig, Policy};
//! let config = AllocatorConfig { policy: Policy::Compact, ..AllocatorConfig::default() };
//! assert_eq!(config.budget, u64::MAX);
//! ```
//!
//! It must not dereference the memory that it manages, or know scopes, frames or tensors. Memory
//! comes from a [`Backing`], order from timelines and timepoints. A block is a row of the block
//! table, and that row is the control block of its `Lease<Buffer>`.
//!
//! Names: a *row* is the control block (descriptor) of a buffer, in the block table. A *span* is a
//! range of addresses. An *extent* is a part of a span, free or used, as in jemalloc. A *slot* is
//! one of the equal blocks of a slab's *run*, which is an extent. A *placement* names one of the
//! two. A *free list* is of a stream, or of all. A *piece* is physical memory of some *granules*,
//! the unit of mapping.
//!
//! - Leases (`allocator`, `paths`, `blocks`, `rows`, `imports`, `buffer`, `table`): rows at stable
//!   addresses, the record of each buffer's last uses, drops on any thread.
//! - Parts (`state`, `core`, `supply`, `live`, `reclaimers`): the state under the lock, the backing
//!   with the budget and the trace, and counts.
//! - Thread caches (`thread_cache`, `depot`): just-freed blocks in front of the heap's lock, with a
//!   lock word for each shard (Bonwick's magazines and depot).
//! - Heap (`store`, `slab`, `heap`, `index`, `extent`): slabs up to 64 KiB, first fit above, free
//!   lists for each stream.
//! - Physical memory (`residency`, `old_mappings`, `plan`, `budget`): which granules are backed,
//!   moving them to where they are needed, the hard budget.
//! - Slow path (`fallback`, `growth`, `trim`, `oom`): what is tried, in order, before an error;
//!   taking memory and giving it back.
//! - Growing blocks (`growing`, `ranges`): addresses for a maximum, memory for what is used.
//! - The end (`destroy`): an allocator that nobody holds, at once or deferred.
//! - Suspension (`suspend`): all memory of an allocator goes back to the driver, and comes back at
//!   the same addresses.
//! - Graphs (`arena`, `planner`): symbolic buffers while recording, packed by liveness.
//! - Observers (`checks`, `debug`, `trace`, `snapshot`): checks around the allocator, the trace
//!   ring, snapshots.
//!
//! # The longest way
//! An allocation that needs new memory has ten steps. Each is one function:
//!
//! 1. `Inner::alloc` (`paths.rs`) asks the thread cache for a small block.
//! 2. `Inner::alloc_large` (`paths.rs`) asks it for a large one, and checks the layout.
//! 3. `Inner::alloc_in_core` (`blocks.rs`) takes the lock, and asks the slabs or the heap's free
//!    lists.
//! 4. `Inner::alloc_slow` (`fallback.rs`) checks the device and the budget, and reports a
//!    failure.
//! 5. `Inner::attempts` (`fallback.rs`) makes the attempts in order; growth is the fourth.
//! 6. `Inner::grow` (`growth.rs`) asks for a plan, and waits a moment where that spares memory.
//! 7. `Heap::plan` (`plan.rs`) chooses addresses and what backs them: pieces in hand, pieces
//!    under free memory, new ones. It takes the budget.
//! 8. `Supply::run` (`supply.rs`) makes the plan's driver calls, without the lock.
//! 9. `Heap::finish` (`plan.rs`) writes down how they ended, and cuts the block.
//! 10. The block goes back to step 3, and `Core::row_of` (`core.rs`) gives it a row, which makes
//!     the lease.
//!
//! # Locks
//! The allocator's lock is a leaf, and it is not held across a call of a backing, a timeline, a
//! reclaimer or a foreign destructor. An arena's lock is taken before it, never after.

mod allocator;
mod arena;
mod backing;
mod blocks;
mod budget;
mod buffer;
#[cfg(feature = "check")]
#[path = "../tests/check/mod.rs"]
mod check;
mod checks;
mod config;
mod core;
mod debug;
mod depot;
mod destroy;
mod extent;
mod fallback;
mod growing;
mod growth;
mod heap;
mod host;
mod imports;
mod index;
mod layout;
mod live;
mod lock;
#[cfg(all(test, loom))]
#[path = "../tests/unit/models.rs"]
mod models;
mod old_mappings;
mod oom;
mod paths;
mod plan;
mod planner;
mod ranges;
mod reclaimers;
mod residency;
mod rows;
mod slab;
mod snapshot;
mod state;
mod store;
mod stream;
mod supply;
mod suspend;
mod table;
mod thread_cache;
mod trace;
mod trim;

// Tests of private parts need memory without a device too, and the crate that has it is built over
// this one's other build.
#[cfg(test)]
extern crate self as leasehold_alloc;
#[cfg(test)]
#[path = "../../../testing/sim/src/memory/fake.rs"]
pub mod fake;
#[cfg(all(test, not(loom)))]
#[path = "../../../testing/sim/src/memory/virtual_stream.rs"]
pub mod virtual_stream;

pub use allocator::{Allocator, AllocatorCell};
pub use arena::{Bindings, GraphArena, LaunchGuard, Lifetime};
pub use backing::*;
pub use budget::Budget;
pub use buffer::{Buffer, HostKind, SYMBOLIC};
pub use config::*;
pub use debug::{DebugOptions, Finding, FindingKind, POISON_FREED, POISON_FRESH, RED_ZONE};
pub use imports::Protection;
pub use layout::*;
pub use reclaimers::Reclaimer;
pub use snapshot::{
    BlockInfo, BlockState, Holding, LeakReport, LiveBuffer, Segment, Snapshot, TagTotal,
};
pub use stream::On;
pub use suspend::SuspendableBacking;
pub use trace::{EventKind, TraceEvent};
