//! Graph arenas: memory for what is allocated while recording, owned by the graph.
//!
//! While a recording runs its buffers are *symbolic*: they have a name with [`SYMBOLIC`] set and no
//! memory. When the recording stops, the recorder reports when each was used; the arena packs them
//! by liveness, takes memory once, and binds the addresses. From then on these addresses are
//! neither lent, moved nor given back until the arena and all buffers bound to it are gone.
//! Allocations outside the recording, on whatever thread, never meet an arena.
//!
//! An arena gives buffers until it is sealed, and is launched from then on. Its state is behind one
//! lock, which is held neither across a driver call nor together with the allocator's lock.

use crate::allocator::Allocator;
use crate::buffer::{ARENA, Buffer, REGION, Row, SYMBOLIC};
use crate::core::{ArenaMemory, Keep};
use crate::layout::{Layout, SIZE_LIMIT, UNIT};
use crate::planner::{Interval, plan};
use crate::state::Inner;
use crate::stream::On;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{BufferHandle, Error, Lease, PackedTimepoint, Result, Timepoint, UniqueLease};
use std::fmt;

/// When a symbolic buffer is used, in positions of the recorded list.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Lifetime {
    /// The buffer's symbolic address.
    pub symbol: u64,
    /// The first operation that uses it.
    pub first: u32,
    /// The last operation that uses it.
    pub last: u32,
    /// Its contents are wanted after the list. Implied while a lease on it lives.
    pub live_at_end: bool,
}

/// The addresses that symbols got.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Bindings {
    /// (symbol, bytes, address), sorted by symbol.
    ranges: Vec<(u64, u64, u64)>,
    /// The native object that spans the memory, else 0.
    pub native: u64,
    /// Bytes of memory that the plan takes.
    pub bytes: u64,
}

impl Bindings {
    /// The real address of a symbolic one, which may lie inside a buffer. `None` for an address
    /// that names nothing here.
    #[must_use]
    pub fn resolve(&self, symbolic: u64) -> Option<u64> {
        let at = self.ranges.partition_point(|r| r.0 <= symbolic).checked_sub(1)?;
        let (symbol, bytes, addr) = self.ranges[at];
        (symbolic - symbol < bytes.max(1)).then(|| addr + (symbolic - symbol))
    }
}

struct Member {
    symbol: u64,
    layout: Layout,
    handle: BufferHandle,
}

/// Memory of sealed arenas: one block of the allocator.
struct Region {
    /// The sole lease: the memory is the arena's alone, also for holders of guessed handles.
    block: UniqueLease<Buffer>,
    allocator: Allocator,
}

impl ArenaMemory for Arc<Region> {
    fn take_uses(&self, member: &Buffer) {
        member.for_each_use(|p| {
            if let Some(p) = p.timepoint().filter(|p| !p.has_passed()) {
                self.block.used_on(p);
            }
        });
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        self.block.set_flag(REGION, false);
        self.allocator.inner().in_graphs.fetch_sub(self.block.len(), Ordering::Relaxed);
    }
}

#[derive(Default)]
struct Plan {
    members: Vec<Member>,
    /// Addresses are bound, and the graph may be launched.
    sealed: bool,
    /// Where the memory is.
    region: Option<Arc<Region>>,
}

impl Plan {
    fn expect_open(&self) -> Result<()> {
        if self.sealed {
            Err(Error::state("the arena is sealed; record a new graph"))
        } else {
            Ok(())
        }
    }
}

struct Shared {
    allocator: Allocator,
    plan: Mutex<Plan>,
    /// Regions of graphs that never run at the same time as this one's.
    group: Arc<Mutex<Vec<Arc<Region>>>>,
}

/// The memory of one recorded graph. Clones are the same arena; the last drop gives everything
/// back, except what buffers still hold. Buffers of an arena that is dropped unsealed never get
/// memory.
#[derive(Clone)]
#[doc(alias("pin mode", "set_pin_mode"))]
pub struct GraphArena(Arc<Shared>);

/// The memory of a sealed arena, for one launch of its graph. Holds it while it lives.
#[must_use]
pub struct LaunchGuard<'a> {
    allocator: &'a Allocator,
    region: Option<Arc<Region>>,
}

impl LaunchGuard<'_> {
    /// Calls `f` with each use of the memory that may go on: earlier launches, and work on freed
    /// members.
    #[inline(always)] // a launch of a graph is its one caller
    pub fn for_each_use(&self, f: impl FnMut(PackedTimepoint)) {
        if let Some(region) = &self.region {
            region.block.for_each_use(f);
        }
    }

    /// Returns whether a member whose last lease was dropped is freed: its uses are among those of
    /// the memory from then on. Until then `f` is called with each of the member's uses.
    pub fn is_freed(&self, member: BufferHandle, f: impl FnMut(PackedTimepoint)) -> bool {
        let inner = self.allocator.inner();
        // Under the lock no member is freed, and no row is given to another buffer.
        let core = inner.core.lock();
        let index = member.index();
        let kept = core.keeps.get(index as usize).is_some_and(Option::is_some);
        // A held row belongs to a later buffer.
        let dropped = |row: &&Row| kept && row.header.strong() == 0;
        let Some(row) = inner.table.get(index).filter(dropped) else { return true };
        row.buffer.for_each_use(f);
        false
    }

    /// The launch was submitted at `p`: the memory is in use until then.
    pub fn launched(&self, p: Timepoint) {
        if let Some(region) = &self.region {
            region.block.used_on(p);
        }
    }
}

#[cfg(not(loom))]
static NEXT_SYMBOL: AtomicU64 = AtomicU64::new(UNIT);
#[cfg(loom)]
leasehold_core::sync::lazy_static! {
    static ref NEXT_SYMBOL: AtomicU64 = AtomicU64::new(UNIT);
}

impl Allocator {
    /// An arena for a new recording.
    ///
    /// # Errors
    /// None at present; the result leaves room for backends that must ask their driver.
    pub fn arena(&self) -> Result<GraphArena> {
        Ok(GraphArena::new(self.clone(), Arc::new(Mutex::new(Vec::new()))))
    }
}

impl GraphArena {
    fn new(allocator: Allocator, group: Arc<Mutex<Vec<Arc<Region>>>>) -> Self {
        Self(Arc::new(Shared { allocator, plan: Mutex::default(), group }))
    }

    /// An arena for another graph that never runs at the same time as this one's: both use the same
    /// memory, as far as it reaches. Seal the largest first.
    ///
    /// # Safety
    /// - No launch of a graph of either arena runs beside one of the other's, and no buffer of one
    ///   is used while the other's runs.
    pub unsafe fn share(&self) -> GraphArena {
        GraphArena::new(self.0.allocator.clone(), self.0.group.clone())
    }

    /// Bytes of memory that the arena holds.
    pub fn bytes(&self) -> u64 {
        self.0.plan.lock().region.as_ref().map_or(0, |r| r.block.len())
    }

    /// A symbolic buffer for the recording.
    ///
    /// # Errors
    /// `InvalidState` once the arena is sealed; `InvalidArgument`; `OutOfMemory`.
    pub fn alloc(&self, layout: Layout) -> Result<Lease<Buffer>> {
        let layout = layout.check()?;
        if layout.size > SIZE_LIMIT {
            return Err(self.0.allocator.inner().refuse(layout));
        }
        let mut plan = self.0.plan.lock();
        plan.expect_open()?;
        let room =
            layout.size.max(1).next_multiple_of(layout.align.max(UNIT)) + layout.align.max(UNIT);
        let symbol = NEXT_SYMBOL.fetch_add(room, Ordering::Relaxed).next_multiple_of(layout.align)
            | SYMBOLIC;
        let inner = self.0.allocator.inner();
        let row = inner.table.take(&mut inner.core.lock().vacant)?;
        inner.table.fill_special(row, (symbol, 0), layout.size, None, ARENA);
        let lease = row.first_lease();
        plan.members.push(Member { symbol, layout, handle: lease.handle() });
        Ok(lease)
    }

    /// Packs the symbolic buffers, takes memory once, and gives every buffer that is still held its
    /// address: what a recorder does when it stops.
    ///
    /// # Errors
    /// `InvalidState` once the arena is sealed; `InvalidArgument` for a symbol of somebody else or
    /// a malformed lifetime; `OutOfMemory`: the arena is not sealed, and may be later.
    ///
    /// # Safety
    /// - `lifetimes` are true: the list uses no symbol outside of its lifetimes. Buffers whose
    ///   lifetimes do not meet share memory.
    pub unsafe fn seal(&self, lifetimes: &[Lifetime], on: On<'_>) -> Result<Bindings> {
        let (symbols, intervals, alive) = {
            let plan = self.0.plan.lock();
            plan.expect_open()?;
            self.intervals(&plan, lifetimes)?
        };
        let (offsets, bytes) = plan(&intervals)?;
        let align = intervals.iter().map(|i| i.align).max().unwrap_or(crate::layout::MIN_ALIGN);
        let region = self.region(bytes, align, on)?;
        let mut plan = self.0.plan.lock();
        plan.expect_open()?;
        let (base, native) = region.as_ref().map_or((0, 0), |r| (r.block.addr(), r.block.native()));
        let place = |(i, symbol): (usize, u64)| {
            let size = intervals[i].size;
            (symbol, size, if size == 0 { 0 } else { base + offsets[i] })
        };
        let mut ranges: Vec<_> = symbols.into_iter().enumerate().map(place).collect();
        ranges.sort_unstable();
        let bindings = Bindings { ranges, native, bytes };
        if let Some(region) = &region {
            // All of them before any is bound: a member that is not bound may keep the region for
            // nothing until it is dropped.
            for lease in &alive {
                keep_for(self.0.allocator.inner(), lease, region.clone())?;
            }
        }
        for lease in alive {
            let addr = bindings.resolve(lease.addr()).filter(|_| region.is_some());
            lease.bind(addr.unwrap_or(0), addr.map_or(0, |_| native));
        }
        (plan.region, plan.sealed) = (region, true);
        Ok(bindings)
    }

    /// The memory, for a launch of the graph.
    ///
    /// # Errors
    /// `InvalidState` unless sealed.
    pub fn launch(&self) -> Result<LaunchGuard<'_>> {
        let plan = self.0.plan.lock();
        if !plan.sealed {
            return Err(Error::state("a launch of an arena that is not sealed"));
        }
        Ok(LaunchGuard { allocator: &self.0.allocator, region: plan.region.clone() })
    }

    /// The symbols to pack, with their intervals, and leases on the members that are still held.
    #[expect(clippy::type_complexity, reason = "three parallel lists, used once")]
    fn intervals(
        &self,
        plan: &Plan,
        lifetimes: &[Lifetime],
    ) -> Result<(Vec<u64>, Vec<Interval>, Vec<Lease<Buffer>>)> {
        let mut used: Vec<Lifetime> = lifetimes.to_vec();
        used.sort_unstable_by_key(|l| l.symbol);
        if let Some(l) = used
            .iter()
            .find(|l| plan.members.binary_search_by_key(&l.symbol, |m| m.symbol).is_err())
        {
            let symbol = l.symbol;
            return Err(Error::invalid(format!("symbol {symbol:#x} is not of this arena")));
        }
        let (mut intervals, mut symbols, mut alive) = (Vec::new(), Vec::new(), Vec::new());
        for m in &plan.members {
            let held = self.0.allocator.lease(m.handle).ok();
            let at = used.partition_point(|l| l.symbol < m.symbol);
            let of = used[at..].iter().take_while(|l| l.symbol == m.symbol);
            let mut first = of.clone().map(|l| l.first).min();
            let mut last = of.map(|l| if l.live_at_end { u32::MAX } else { l.last }).max();
            if held.is_some() {
                (first, last) = (first.or(Some(0)), Some(u32::MAX));
            }
            if let (Some(first), Some(last)) = (first, last) {
                let align = m.layout.align.max(crate::layout::MIN_ALIGN);
                intervals.push(Interval { size: m.layout.size, align, first, last });
                symbols.push(m.symbol);
            }
            alive.extend(held);
        }
        Ok((symbols, intervals, alive))
    }

    /// Memory of `bytes` that graphs of this group may use in turns, aligned as the most demanding
    /// member.
    fn region(&self, bytes: u64, align: u64, on: On<'_>) -> Result<Option<Arc<Region>>> {
        if bytes == 0 {
            return Ok(None);
        }
        let fits =
            |r: &&Arc<Region>| r.block.len() >= bytes && r.block.addr().is_multiple_of(align);
        let found = self.0.group.lock().iter().find(fits).cloned();
        if found.is_some() {
            return Ok(found);
        }
        let granule = self.0.allocator.caps().granule;
        let layout = if bytes >= granule {
            Layout::aligned(bytes.next_multiple_of(granule), granule.max(align))
        } else {
            Layout::aligned(bytes, align)
        };
        let block = self.0.allocator.alloc_unique(layout, on)?;
        block.set_flag(REGION, true);
        self.0.allocator.inner().in_graphs.fetch_add(block.len(), Ordering::Relaxed);
        let region = Arc::new(Region { block, allocator: self.0.allocator.clone() });
        self.0.group.lock().push(region.clone());
        Ok(Some(region))
    }
}

impl Drop for Shared {
    /// Gives up the group's regions that no arena of it uses. One by one: it takes no host memory,
    /// and frees without the lock.
    fn drop(&mut self) {
        drop(self.plan.get_mut().region.take());
        loop {
            let mut group = self.group.lock();
            let Some(i) = group.iter().position(|r| Arc::strong_count(r) == 1) else { return };
            let gone = group.swap_remove(i);
            drop(group);
            drop(gone);
        }
    }
}

impl fmt::Debug for GraphArena {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let plan = self.0.plan.lock();
        let (state, members) = (if plan.sealed { "sealed" } else { "open" }, plan.members.len());
        write!(f, "GraphArena({state}, {members} members)")
    }
}

/// Keeps the memory alive until nobody holds the member of an arena.
fn keep_for(inner: &Inner, lease: &Lease<Buffer>, region: Arc<Region>) -> Result<()> {
    let keep = Keep::Member(Box::new(region));
    let before = {
        let mut core = inner.core.lock();
        core.room_to_keep(lease.header().index())?;
        core.keep(lease.header().index(), keep)
    };
    // It may free a block: without the lock.
    drop(before);
    Ok(())
}
