//! A device: its memory, its pools, and the blocks that the caller holds.
//!
//! This module must not know the C ABI.

use crate::blocks::{Block, Blocks};
use crate::pool::{Pool, PoolSettings};
use crate::registry::{DEVICE, POOL, Registry};
use crate::source::{Source, Sources};
use crate::status::no_memory;
use leasehold::share::SharedBlock;
use leasehold::{Buffer, Context, Error, Lease, PoolKind, Protection, Result, Runtime};
use leasehold_alloc::{AllocStats, BlockInfo, Budget, Policy, Snapshot};
use leasehold_core::Name;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, RwLock};
use serde::Serialize;
use std::collections::{BTreeMap, HashMap};
use std::os::fd::OwnedFd;
use std::time::Duration;

/// How long an allocation waits for all work of the streams, before it fails.
const MOST_WAIT: Duration = Duration::from_secs(30);

/// The devices and pools that are open.
pub(crate) static DEVICES: Registry<Device> = Registry::new(DEVICE, "device");
pub(crate) static POOLS: Registry<(Arc<Device>, Arc<Pool>)> = Registry::new(POOL, "pool");

/// The settings of a device's memory.
pub(crate) struct Settings {
    pub(crate) policy: Policy,
    pub(crate) budget: u64,
    pub(crate) trace_events: usize,
    /// Other processes may map the main memory.
    pub(crate) shareable: bool,
}

/// Says whether allocations on a stream go to a pool.
pub(crate) type Filter = Box<dyn Fn(u64) -> bool + Send + Sync>;

/// Allocations of the main memory that go to a pool instead.
#[derive(Clone)]
struct Route {
    pool: Arc<Pool>,
    filter: Arc<Filter>,
}

/// Counters of the blocks that callers took and gave back, in all pools together. Bytes are the
/// requested sizes.
#[derive(Default)]
pub(crate) struct Counters {
    pub(crate) allocated: AtomicU64,
    pub(crate) allocated_peak: AtomicU64,
    pub(crate) allocated_total: AtomicU64,
    pub(crate) freed_total: AtomicU64,
    pub(crate) blocks: AtomicU64,
    pub(crate) blocks_peak: AtomicU64,
    pub(crate) allocations: AtomicU64,
    pub(crate) frees: AtomicU64,
    pub(crate) retries: AtomicU64,
    pub(crate) failures: AtomicU64,
}

impl Counters {
    fn took(&self, bytes: u64) {
        let now = self.allocated.fetch_add(bytes, Ordering::Relaxed) + bytes;
        self.allocated_peak.fetch_max(now, Ordering::Relaxed);
        let blocks = self.blocks.fetch_add(1, Ordering::Relaxed) + 1;
        self.blocks_peak.fetch_max(blocks, Ordering::Relaxed);
        self.allocated_total.fetch_add(bytes, Ordering::Relaxed);
        self.allocations.fetch_add(1, Ordering::Relaxed);
    }

    fn gave(&self, bytes: u64) {
        self.allocated.fetch_sub(bytes, Ordering::Relaxed);
        self.blocks.fetch_sub(1, Ordering::Relaxed);
        self.freed_total.fetch_add(bytes, Ordering::Relaxed);
        self.frees.fetch_add(1, Ordering::Relaxed);
    }

    fn reset_peaks(&self) {
        self.allocated_peak.store(self.allocated.load(Ordering::Relaxed), Ordering::Relaxed);
        self.blocks_peak.store(self.blocks.load(Ordering::Relaxed), Ordering::Relaxed);
    }
}

/// A device of the ABI.
pub(crate) struct Device {
    pub(crate) runtime: Runtime,
    pub(crate) sources: Sources,
    pub(crate) budget: Arc<Budget>,
    pub(crate) counters: Counters,
    trace_events: usize,
    main: Arc<Pool>,
    /// All pools that are open, the main memory first. `None` once the device is closed.
    pools: RwLock<Option<Vec<Arc<Pool>>>>,
    routes: RwLock<Vec<Route>>,
    /// Whether there are routes: an allocation asks this first.
    routed: AtomicBool,
    blocks: Blocks,
    /// Blocks of other processes, by address. `None` once the device is closed.
    imports: Mutex<Option<HashMap<u64, Lease<Buffer>>>>,
    /// The number of open runtimes of the device.
    runtimes: AtomicU64,
}

/// A runtime's word that it is open: its device stays open.
pub(crate) struct Opened(Arc<Device>);

impl Drop for Opened {
    fn drop(&mut self) {
        self.0.runtimes.fetch_sub(1, Ordering::Release);
    }
}

/// A snapshot of a pool.
#[derive(Serialize)]
struct PoolSnapshot {
    pool: u64,
    name: String,
    suspended: bool,
    memory: Snapshot,
}

/// A snapshot of a device.
#[derive(Serialize)]
struct DeviceSnapshot {
    device: String,
    budget: u64,
    reserved: u64,
    allocated: u64,
    pools: Vec<PoolSnapshot>,
    /// The caller's stream of each timeline number in the pools.
    streams: BTreeMap<u16, u64>,
}

/// A block in a walk over a device's memory.
pub(crate) struct Visited {
    pub(crate) pool: u64,
    pub(crate) segment: (u64, u64),
    pub(crate) paged: bool,
    pub(crate) block: BlockInfo,
    pub(crate) stream: u64,
}

impl Device {
    pub(crate) fn open(context: &Context, name: &str, settings: Settings) -> Result<Self> {
        let runtime = context.runtime(context.device_id(name)?)?;
        let sources = Sources::new(&runtime)?;
        let budget = Arc::new(Budget::new(settings.budget));
        let main = PoolSettings {
            name: "memory".to_owned(),
            policy: settings.policy,
            trace_events: settings.trace_events,
            kind: settings.shareable.then_some(PoolKind::Shareable),
            movable: true,
        };
        let main = Arc::new(Pool::new(&runtime, &budget, main)?);
        Ok(Self {
            runtime,
            sources,
            budget,
            counters: Counters::default(),
            trace_events: settings.trace_events,
            pools: RwLock::new(Some(vec![main.clone()])),
            main,
            routes: RwLock::default(),
            routed: AtomicBool::new(false),
            blocks: Blocks::new(),
            imports: Mutex::new(Some(HashMap::new())),
            runtimes: AtomicU64::new(0),
        })
    }

    /// Notes that a runtime of the device opens.
    ///
    /// # Errors
    /// `InvalidArgument` once the device is closed.
    pub(crate) fn opened(device: &Arc<Self>) -> Result<Opened> {
        let open = device.pools.read();
        if open.is_none() {
            return Err(Error::invalid("the device was closed meanwhile"));
        }
        device.runtimes.fetch_add(1, Ordering::Relaxed);
        Ok(Opened(device.clone()))
    }

    /// Refuses further blocks, pools and runtimes from now on, if the caller holds none. A call
    /// that another thread began gets an error. Returns whether the device was open.
    ///
    /// # Errors
    /// `LeasesOutstanding`; then nothing has changed.
    pub(crate) fn close(&self) -> Result<bool> {
        let mut open = self.pools.write();
        let Some(pools) = &*open else { return Ok(false) };
        let strong = pools.len() as u64 - 1;
        if strong > 0 {
            return Err(Error::LeasesOutstanding { resource: "pool", strong, weak: 0 });
        }
        let strong = self.runtimes.load(Ordering::Acquire);
        if strong > 0 {
            return Err(Error::LeasesOutstanding { resource: "runtime", strong, weak: 0 });
        }
        let mut imports = self.imports.lock();
        let strong = imports.as_ref().map_or(0, HashMap::len) as u64;
        if strong > 0 {
            return Err(Error::LeasesOutstanding { resource: "imported block", strong, weak: 0 });
        }
        self.blocks.close()?;
        *imports = None;
        *open = None;
        Ok(true)
    }

    /// The pools, the main memory first.
    pub(crate) fn all_pools(&self) -> Vec<Arc<Pool>> {
        self.pools.read().clone().unwrap_or_default()
    }

    /// The stream of a handle.
    ///
    /// # Safety
    /// - As [`Sources::get`].
    unsafe fn source(&self, stream: u64) -> Result<Source> {
        // SAFETY: the caller vouches for the handle.
        unsafe { self.sources.get(&self.runtime, stream) }
    }

    /// Where an allocation of the main memory goes.
    fn route(&self, stream: u64) -> Arc<Pool> {
        if !self.routed.load(Ordering::Acquire) {
            return self.main.clone();
        }
        // A filter is the caller's code, so it runs without the lock.
        let routes = self.routes.read().clone();
        let found = routes.into_iter().find(|route| (route.filter)(stream));
        found.map_or_else(|| self.main.clone(), |route| route.pool)
    }

    /// Allocates a block. `pool`: `None` for the main memory, or where a capture sends it. Returns
    /// 0 for no bytes.
    ///
    /// # Safety
    /// - As [`Sources::get`], for `stream`.
    pub(crate) unsafe fn alloc(
        &self,
        pool: Option<&Arc<Pool>>,
        bytes: u64,
        stream: u64,
    ) -> Result<u64> {
        if bytes == 0 {
            return Ok(0);
        }
        // SAFETY: the caller vouches for the handle.
        let home = unsafe { self.source(stream) }?;
        let pool = pool.cloned().unwrap_or_else(|| self.route(stream));
        // 0: not known.
        let total = self.runtime.info().memory.total;
        let lease = match pool.alloc(bytes, home.on()) {
            Err(Error::OutOfMemory(_)) if bytes <= total || total == 0 => {
                self.pressed(&pool, || pool.alloc(bytes, home.on()))
            }
            other => other,
        };
        let lease = lease.map_err(|e| {
            self.counters.failures.fetch_add(1, Ordering::Relaxed);
            self.runtime.info().advised(e, bytes)
        })?;
        let addr = lease.addr();
        self.counters.took(bytes);
        self.blocks.insert(Block { lease, pool, home, others: Vec::new() })?;
        Ok(addr)
    }

    /// Takes memory for a pool after the others gave back what lies free there: first what is over,
    /// then all, once the streams are done. No lock is held meanwhile.
    #[cold]
    fn pressed<R>(&self, pool: &Arc<Pool>, mut take: impl FnMut() -> Result<R>) -> Result<R> {
        self.counters.retries.fetch_add(1, Ordering::Relaxed);
        self.trim_others(pool)?;
        match take() {
            Err(Error::OutOfMemory(_) | Error::OverBudget { .. }) => {}
            other => return other,
        }
        // Not for the whole context: the driver breaks captures at that, also other threads'. The
        // report comes from the last attempt.
        self.sources.wait(&self.runtime, MOST_WAIT)?;
        self.trim_others(pool)?;
        take()
    }

    fn trim_others(&self, pool: &Arc<Pool>) -> Result<()> {
        let pools = self.all_pools();
        let mut others = pools.iter().filter(|other| other.movable && !Arc::ptr_eq(other, pool));
        others.try_for_each(|other| other.trim(0).map(drop))
    }

    /// Takes memory again for a suspended pool, also what lies free in the main memory and in other
    /// movable pools.
    pub(crate) fn resume(&self, pool: &Arc<Pool>) -> Result<()> {
        match pool.resume(&self.runtime) {
            Err(Error::OutOfMemory(_) | Error::OverBudget { .. }) => {
                self.pressed(pool, || pool.resume(&self.runtime))
            }
            other => other,
        }
    }

    pub(crate) fn free(&self, addr: u64) -> Result<()> {
        if addr == 0 {
            return Ok(());
        }
        let block = self.blocks.remove(addr)?;
        self.counters.gave(block.lease.len());
        block.free();
        Ok(())
    }

    /// A descriptor of a block for another process, and its description.
    ///
    /// # Safety
    /// - As [`leasehold::Pool::export`].
    pub(crate) unsafe fn export(&self, addr: u64) -> Result<(OwnedFd, SharedBlock)> {
        let (segment, bytes) = self.blocks.with(addr, |block| {
            let bytes = block.lease.len();
            block.pool.segment_of(addr, bytes).map(|segment| (segment, bytes))
        })??;
        let block = SharedBlock::of(&self.runtime, &*segment, addr, bytes);
        // SAFETY: the caller vouches for those who get the descriptor.
        Ok((unsafe { segment.descriptor() }?, block))
    }

    /// Maps a block of another process. Returns its address.
    ///
    /// # Safety
    /// - As [`leasehold::share::import`].
    pub(crate) unsafe fn import(&self, descriptor: OwnedFd, block: &SharedBlock) -> Result<u64> {
        let runtime = &self.runtime;
        // SAFETY: the caller's.
        let lease =
            unsafe { leasehold::share::import(runtime, descriptor, block, Protection::ReadWrite) }?;
        let mut imports = self.imports.lock();
        let Some(imports) = &mut *imports else {
            return Err(Error::invalid("the device was closed meanwhile"));
        };
        imports.try_reserve(1).map_err(|_| no_memory("imports", size_of::<Lease<Buffer>>()))?;
        let addr = lease.addr();
        imports.insert(addr, lease);
        Ok(addr)
    }

    /// Unmaps a block of another process.
    pub(crate) fn end_import(&self, addr: u64) -> Result<()> {
        let found = self.imports.lock().as_mut().and_then(|imports| imports.remove(&addr));
        // Without the lock: the end asks the driver.
        match found {
            Some(lease) => {
                drop(lease);
                Ok(())
            }
            None => Err(Error::invalid(format!("{addr:#x} is no block that was imported"))),
        }
    }

    /// Notes that another stream, which may be another device's, uses a block: its reuse waits for
    /// the work that this stream has when the block is freed.
    ///
    /// # Safety
    /// - As [`Sources::get`], for `stream` on the device `of`.
    pub(crate) unsafe fn record_stream(&self, addr: u64, of: &Device, stream: u64) -> Result<()> {
        if addr == 0 {
            return Ok(());
        }
        // SAFETY: the caller vouches for the handle.
        let source = unsafe { of.source(stream) }?;
        self.blocks.with(addr, |block| {
            if !block.home.same(&source) && !block.others.iter().any(|o| o.same(&source)) {
                block.others.push(source);
            }
        })
    }

    /// The block that holds an address.
    pub(crate) fn block_of(&self, addr: u64) -> Result<(u64, u64)> {
        let exact = self.blocks.with(addr, |b| (b.lease.addr(), b.lease.len()));
        exact.or_else(|e| self.blocks.around(addr).ok_or(e))
    }

    pub(crate) fn pool_of(&self, addr: u64) -> Result<u64> {
        self.blocks.with(addr, |b| b.pool.handle)
    }

    pub(crate) fn set_name(&self, addr: u64, name: Name) -> Result<()> {
        self.blocks.with(addr, |b| b.lease.set_name(name))
    }

    /// Gives free memory of the main memory and of movable pools back to the driver, until `keep`
    /// bytes lie free in each.
    pub(crate) fn trim(&self, keep: u64) -> Result<u64> {
        let pools = self.all_pools();
        let mut movable = pools.iter().filter(|pool| pool.movable);
        movable.try_fold(0, |freed, pool| Ok(freed + pool.trim(keep)?))
    }

    pub(crate) fn reset_peaks(&self) {
        self.counters.reset_peaks();
        self.budget.reset_peak();
        self.all_pools().iter().for_each(|pool| pool.allocator.reset_peaks());
    }

    /// The allocators' numbers, summed over the pools.
    pub(crate) fn sums(&self) -> AllocStats {
        let mut sums = AllocStats::default();
        for pool in self.all_pools() {
            let s = pool.allocator.stats();
            sums.free_ready += s.free_ready;
            sums.free_not_ready += s.free_not_ready;
            sums.free_in_slabs += s.free_in_slabs;
            sums.free_in_thread_caches += s.free_in_thread_caches;
            sums.cached_pieces += s.cached_pieces;
            sums.growths += s.growths;
            sums.remaps += s.remaps;
            sums.host_waits += s.host_waits;
            sums.inserted_waits += s.inserted_waits;
            sums.driver_calls += s.driver_calls;
            sums.metadata += s.metadata;
        }
        sums
    }

    /// Makes a pool.
    pub(crate) fn add_pool(
        self: &Arc<Self>,
        name: String,
        policy: Policy,
        (suspendable, movable): (bool, bool),
    ) -> Result<u64> {
        let settings = PoolSettings {
            name,
            policy,
            trace_events: self.trace_events,
            kind: suspendable.then_some(PoolKind::Suspendable),
            movable,
        };
        let pool = Pool::new(&self.runtime, &self.budget, settings)?;
        let mut open = self.pools.write();
        let Some(pools) = &mut *open else {
            return Err(Error::invalid("the device was closed meanwhile"));
        };
        pools.try_reserve(1).map_err(|_| no_memory("pools", size_of::<Arc<Pool>>()))?;
        let (handle, entry) =
            POOLS.add(|handle| Arc::new((self.clone(), Arc::new(pool.named(handle)))))?;
        pools.push(entry.1.clone());
        Ok(handle)
    }

    /// Lets go of a pool that was released. Its blocks stay valid; with the last of them its memory
    /// goes back to the driver, once its streams are done.
    pub(crate) fn remove_pool(&self, pool: &Arc<Pool>) {
        // First, so that no route to it begins any more.
        self.pools.write().iter_mut().for_each(|pools| pools.retain(|p| !Arc::ptr_eq(p, pool)));
        self.end_route(pool);
        // Free memory whose uses are over goes now. An error shows at the next call that needs the
        // driver.
        let _ = pool.trim(0);
    }

    /// Sends allocations of the main memory to a pool, on streams that the filter accepts.
    pub(crate) fn begin_route(&self, pool: &Arc<Pool>, filter: Filter) -> Result<()> {
        let mut routes = self.routes.write();
        if !self.pools.read().iter().flatten().any(|open| Arc::ptr_eq(open, pool)) {
            return Err(POOLS.unknown(pool.handle));
        }
        if routes.iter().any(|route| Arc::ptr_eq(&route.pool, pool)) {
            return Err(Error::state(format!("pool {} takes allocations already", pool.name)));
        }
        routes.try_reserve(1).map_err(|_| no_memory("routes", size_of::<Route>()))?;
        routes.push(Route { pool: pool.clone(), filter: Arc::new(filter) });
        self.routed.store(true, Ordering::Release);
        Ok(())
    }

    /// Ends it. Returns whether the pool took allocations.
    pub(crate) fn end_route(&self, pool: &Arc<Pool>) -> bool {
        let mut routes = self.routes.write();
        let at = routes.iter().position(|route| Arc::ptr_eq(&route.pool, pool));
        let ended = at.map(|at| routes.remove(at));
        self.routed.store(!routes.is_empty(), Ordering::Release);
        drop(routes);
        // A filter is the caller's, so it goes without the lock.
        ended.is_some()
    }

    fn handles(&self, snapshots: &[PoolSnapshot]) -> BTreeMap<u16, u64> {
        let blocks = snapshots.iter().flat_map(|p| &p.memory.segments).flat_map(|s| &s.blocks);
        let events = snapshots.iter().flat_map(|p| &p.memory.events).map(|e| e.stream);
        let mut handles: BTreeMap<u16, u64> =
            blocks.map(|b| b.stream).chain(events).map(|stream| (stream, 0)).collect();
        handles.retain(|&timeline, handle| {
            let found = self.sources.handle_of(&self.runtime, timeline);
            *handle = found.unwrap_or(0);
            found.is_some()
        });
        handles
    }

    fn snapshots(&self) -> Vec<PoolSnapshot> {
        let pools = self.all_pools();
        let of = |pool: &Arc<Pool>| PoolSnapshot {
            pool: pool.handle,
            name: pool.name.clone(),
            suspended: pool.suspended(),
            memory: pool.allocator.snapshot(),
        };
        pools.iter().map(of).collect()
    }

    /// The state of all memory as JSON.
    pub(crate) fn snapshot(&self) -> Result<String> {
        let pools = self.snapshots();
        let snapshot = DeviceSnapshot {
            device: self.runtime.device().to_string(),
            budget: self.budget.limit(),
            reserved: self.budget.reserved(),
            allocated: self.counters.allocated.load(Ordering::Relaxed),
            streams: self.handles(&pools),
            pools,
        };
        serde_json::to_string(&snapshot).map_err(Error::other)
    }

    /// The blocks of all pools, by address within each.
    pub(crate) fn visit(&self, mut f: impl FnMut(Visited)) {
        let pools = self.snapshots();
        let streams = self.handles(&pools);
        for pool in &pools {
            for segment in &pool.memory.segments {
                for &block in &segment.blocks {
                    f(Visited {
                        pool: pool.pool,
                        segment: (segment.addr, segment.bytes),
                        paged: segment.paged,
                        block,
                        stream: streams.get(&block.stream).copied().unwrap_or(0),
                    });
                }
            }
        }
    }
}
