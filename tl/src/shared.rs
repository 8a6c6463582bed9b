//! The shared state of a manager's threads: the object table, the tensor pool, hooks, limits and
//! totals.
//!
//! This module must not know scopes or frames. Lock order: none of these locks is taken while
//! another one is held, and no callback runs under one.

use std::ffi::c_void;
use std::mem;
use std::ops::Deref;
use std::ptr::{self, NonNull};

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};

use crate::dead::Dead;
use crate::env;
use crate::heap::{NoMemory, Owned};
use crate::lock::SpinLock;
use crate::log::Log;
use crate::misuse::MISUSE_COUNT;
use crate::pool::{OpaqueTensor, PoolLimits, TensorDestructor, TensorKey};
use crate::pools::Pools;
use crate::table::{EntryState, Table};

/// Fills in a tensor's key (elements, dtype id, device id) and returns non-zero. Returns 0 for a
/// tensor that must not be pooled. See
/// [`MemoryManager::set_tensor_describer`](crate::MemoryManager::set_tensor_describer).
pub type TensorDescriber = unsafe extern "C" fn(*const OpaqueTensor, *mut TensorInfo) -> i32;
/// Destroys an object registered with `register_custom`.
pub type CustomDestructor = unsafe extern "C" fn(*mut c_void);
/// Runs when a scope opens; the returned value is kept for the hook that runs when it closes.
pub type ScopeEnterHook = extern "C" fn() -> u64;
/// Runs after a scope's records were released, with the value that its opening returned.
pub type ScopeExitHook = extern "C" fn(u64);

/// A tensor's key in the form of the C ABI.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[repr(C)]
pub struct TensorInfo {
    /// Number of elements.
    pub num_elements: u64,
    /// dtype id: F32 0, F64 1, I64 2, U32 3, U8 4, F16 5, BF16 6.
    pub dtype_id: u8,
    /// Device id: CPU 0, CUDA 1, Metal 2.
    pub device_id: u8,
}

const _: () = assert!(size_of::<TensorInfo>() == 16);

/// The configuration of a manager.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Bytes of dead tensors that wait for the end of the scope in which they died; 0 turns the
    /// quarantine off.
    /// Default: 64 MiB.
    pub quarantine_bytes: u64,
    /// Limits of the tensor pool.
    /// Default: [`PoolLimits::default`].
    pub pool: PoolLimits,
}

impl Default for Config {
    /// 64 MiB of quarantine, the default [`PoolLimits`].
    fn default() -> Self {
        Self { quarantine_bytes: 64 << 20, pool: PoolLimits::default() }
    }
}

impl Config {
    /// The defaults, with `TL_MEM_QUARANTINE_BYTES` and `TL_MEM_POOL_BYTES` applied.
    pub fn from_env() -> Self {
        let mut config = Self::default();
        config.quarantine_bytes =
            env::number(c"TL_MEM_QUARANTINE_BYTES").unwrap_or(config.quarantine_bytes);
        config.pool.bytes = env::number(c"TL_MEM_POOL_BYTES").unwrap_or(config.pool.bytes);
        config
    }
}

/// `Shared::flags`: the log is on.
pub(crate) const LOG: u32 = 1;
/// `Shared::flags`: scope hooks are set.
pub(crate) const HOOKS: u32 = 2;
/// `Shared::flags`: ended threads have left objects to destroy.
pub(crate) const ORPHANS: u32 = 4;

/// The figures of one thread. Only this thread writes them (plain loads and stores); any thread
/// reads them.
#[derive(Debug, Default)]
pub(crate) struct Published {
    pub(crate) misuses: [AtomicU64; MISUSE_COUNT],
    pub(crate) slot_buffers: AtomicU64,
    pub(crate) slot_bytes: AtomicU64,
    pub(crate) deferred_buffers: AtomicU64,
    pub(crate) deferred_bytes: AtomicU64,
    pub(crate) peak_slot_bytes: AtomicU64,
}

/// Adds to a figure that only this thread writes.
pub(crate) fn bump(figure: &AtomicU64, by: i64) -> u64 {
    let now = figure.load(Relaxed).wrapping_add_signed(by);
    figure.store(now, Relaxed);
    now
}

/// The address of a thread's figures. It stays valid and in the list until the thread leaves under
/// the list's lock.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct FiguresAddress(NonNull<Published>);

// SAFETY: the pointer leads to atomics, which live as long as this is in the list.
unsafe impl Send for FiguresAddress {}

impl FiguresAddress {
    fn read<R>(&self, read: impl FnOnce(&Published) -> R) -> R {
        // SAFETY: the place is in the list, whose lock the caller holds.
        read(unsafe { self.0.as_ref() })
    }
}

#[derive(Debug, Default)]
struct Threads {
    present: Vec<FiguresAddress>,
    /// Misuses of ended threads.
    past: [u64; MISUSE_COUNT],
    /// Objects that ended threads have left for destruction by other threads.
    orphans: Vec<Dead>,
}

impl Threads {
    fn leave(&mut self, place: FiguresAddress) {
        self.present.retain(|p| *p != place);
        place.read(|p| {
            for (past, now) in self.past.iter_mut().zip(&p.misuses) {
                *past += now.load(Relaxed);
            }
        });
    }
}

/// The shared state of a manager; see the module's documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) flags: AtomicU32,
    pub(crate) table: Table,
    pub(crate) pools: Pools,
    scope_enter: AtomicPtr<()>,
    scope_exit: AtomicPtr<()>,
    tensor_destructor: AtomicPtr<()>,
    tensor_describer: AtomicPtr<()>,
    pub(crate) quarantine_budget: u64,
    pub(crate) quarantined: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
    peak_quarantined_bytes: AtomicU64,
    peak_pooled_bytes: AtomicU64,
    live: AtomicI64,
    peak_live: AtomicI64,
    live_bytes: AtomicI64,
    peak_live_bytes: AtomicI64,
    threads: SpinLock<Threads>,
    pub(crate) log: Option<Log>,
}

/// Ids of threads, unique in the process, so that no two attachments ever share one.
fn next_thread() -> u32 {
    #[cfg(not(loom))]
    static NEXT: AtomicU32 = AtomicU32::new(1);
    #[cfg(not(loom))]
    let next = &NEXT;
    // Loom's atomics cannot be made in constants.
    #[cfg(loom)]
    static NEXT: leasehold_core::sync::OnceLock<AtomicU32> = leasehold_core::sync::OnceLock::new();
    #[cfg(loom)]
    let next = NEXT.get_or_init(|| AtomicU32::new(1));
    loop {
        let id = next.fetch_add(1, Relaxed);
        if id != 0 && id != u32::MAX {
            return id;
        }
    }
}

/// A reference to a manager's shared state: counted, or to the process's manager, which is never
/// freed.
#[derive(Debug)]
pub(crate) struct SharedRef {
    at: NonNull<Shared>,
    _counted: Option<Arc<Shared>>,
}

// SAFETY: this is a shared reference to a `Sync` value, and keeps that value alive.
unsafe impl Send for SharedRef {}

impl SharedRef {
    pub(crate) fn counted(shared: Arc<Shared>) -> Self {
        Self { at: NonNull::from(&*shared), _counted: Some(shared) }
    }

    #[cfg(not(loom))]
    pub(crate) fn global(shared: &'static Shared) -> Self {
        Self { at: NonNull::from(shared), _counted: None }
    }
}

impl Clone for SharedRef {
    fn clone(&self) -> Self {
        Self { at: self.at, _counted: self._counted.clone() }
    }
}

impl Deref for SharedRef {
    type Target = Shared;

    #[inline(always)]
    fn deref(&self) -> &Shared {
        // SAFETY: the count beside the pointer keeps counted state alive. The process's state is
        // never freed.
        unsafe { self.at.as_ref() }
    }
}

impl Shared {
    pub(crate) fn new(config: Config, log: Option<Log>) -> Result<Self, NoMemory> {
        Ok(Self {
            flags: AtomicU32::new(if log.is_some() { LOG } else { 0 }),
            table: Table::new()?,
            pools: Pools::new(config.pool)?,
            scope_enter: AtomicPtr::new(ptr::null_mut()),
            scope_exit: AtomicPtr::new(ptr::null_mut()),
            tensor_destructor: AtomicPtr::new(ptr::null_mut()),
            tensor_describer: AtomicPtr::new(ptr::null_mut()),
            quarantine_budget: config.quarantine_bytes,
            quarantined: AtomicU64::new(0),
            quarantined_bytes: AtomicU64::new(0),
            peak_quarantined_bytes: AtomicU64::new(0),
            peak_pooled_bytes: AtomicU64::new(0),
            live: AtomicI64::new(0),
            peak_live: AtomicI64::new(0),
            live_bytes: AtomicI64::new(0),
            peak_live_bytes: AtomicI64::new(0),
            threads: SpinLock::new(Threads::default()),
            log,
        })
    }

    /// Adds a thread (or a further attachment of a thread): returns its id and the place of its
    /// figures.
    pub(crate) fn join(&self) -> Result<(u32, Owned<Published>), NoMemory> {
        let published = Owned::new(Published::default())?;
        let mut threads = self.threads.lock();
        threads.present.try_reserve(1).map_err(|_| NoMemory)?;
        threads.present.push(FiguresAddress(published.address()));
        Ok((next_thread(), published))
    }

    pub(crate) fn leave(&self, published: &Owned<Published>) {
        self.threads.lock().leave(FiguresAddress(published.address()));
    }

    /// Leaves an object for destruction by another thread; `false` without memory.
    pub(crate) fn add_orphan(&self, dead: Dead) -> bool {
        let mut threads = self.threads.lock();
        let room = threads.orphans.try_reserve(1).is_ok();
        if room {
            threads.orphans.push(dead);
            self.flags.fetch_or(ORPHANS, Relaxed);
        }
        room
    }

    /// Takes an object that an ended thread has left.
    pub(crate) fn take_orphan(&self) -> Option<Dead> {
        let mut threads = self.threads.lock();
        let dead = threads.orphans.pop();
        if threads.orphans.is_empty() {
            threads.orphans = Vec::new();
            self.flags.fetch_and(!ORPHANS, Relaxed);
        }
        dead
    }

    /// The sum of the figures of all threads.
    pub(crate) fn published(&self) -> crate::stats::Stats {
        let threads = self.threads.lock();
        let mut stats = crate::stats::Stats { misuses: threads.past, ..Default::default() };
        stats.threads = threads.present.len() as u64;
        for place in &threads.present {
            place.read(|p| {
                for (sum, n) in stats.misuses.iter_mut().zip(&p.misuses) {
                    *sum += n.load(Relaxed);
                }
                stats.slot_buffers += p.slot_buffers.load(Relaxed);
                stats.slot_bytes += p.slot_bytes.load(Relaxed);
                stats.deferred_buffers += p.deferred_buffers.load(Relaxed);
                stats.deferred_bytes += p.deferred_bytes.load(Relaxed);
                stats.peak_slot_bytes += p.peak_slot_bytes.load(Relaxed);
            });
        }
        drop(threads);
        let totals = self.table.totals();
        (stats.live_objects, stats.live_tensors, stats.live_bytes) =
            (totals.live, totals.tensors, totals.bytes);
        stats.peak_live_objects = self.peak_live.load(Relaxed).max(totals.live as i64) as u64;
        stats.peak_live_bytes = self.peak_live_bytes.load(Relaxed).max(totals.bytes as i64) as u64;
        stats.quarantined_tensors = self.quarantined.load(Relaxed);
        stats.quarantined_bytes = self.quarantined_bytes.load(Relaxed);
        stats.peak_quarantined_bytes = self.peak_quarantined_bytes.load(Relaxed);
        stats.pooled_tensors = self.pools.tensors();
        stats.pooled_bytes = self.pools.bytes();
        stats.peak_pooled_bytes = self.peak_pooled_bytes.load(Relaxed);
        stats
    }

    /// Adds a thread's batch of new and destroyed objects: the net change, and the highest
    /// value since the last batch.
    pub(crate) fn add_live(&self, net: i64, highest: i64) {
        let before = self.live.fetch_add(net, Relaxed);
        self.peak_live.fetch_max(before + highest, Relaxed);
    }

    pub(crate) fn add_live_bytes(&self, by: i64) {
        let now = self.live_bytes.fetch_add(by, Relaxed).wrapping_add(by);
        if by > 0 {
            self.peak_live_bytes.fetch_max(now, Relaxed);
        }
    }

    pub(crate) fn quarantine(&self, bytes: u64) -> u64 {
        self.quarantined.fetch_add(1, Relaxed);
        let now = self.quarantined_bytes.fetch_add(bytes, Relaxed) + bytes;
        self.peak_quarantined_bytes.fetch_max(now, Relaxed);
        now
    }

    pub(crate) fn unquarantine(&self, bytes: u64) {
        self.quarantined.fetch_sub(1, Relaxed);
        self.quarantined_bytes.fetch_sub(bytes, Relaxed);
    }

    /// Updates the peak with the pool's present bytes.
    pub(crate) fn note_pooled(&self, bytes: u64) {
        if bytes > self.peak_pooled_bytes.load(Relaxed) {
            self.peak_pooled_bytes.fetch_max(bytes, Relaxed);
        }
    }

    /// Takes a tensor out of the pool for use. From then on the table does not know it.
    pub(crate) fn pool_acquire(&self, key: TensorKey, me: u32) -> Option<*mut OpaqueTensor> {
        let tensor = self.pools.acquire(key, me)?;
        let mut shard = self.table.lock(tensor.addr());
        if let Some(i) = shard.position(tensor.addr())
            && shard.at(i).state == EntryState::Pooled
        {
            shard.remove_at(i);
        }
        Some(tensor)
    }

    // ---- forks. The forking thread holds all locks, so that the child finds a consistent state.

    /// Takes all locks before a fork.
    #[cfg(not(loom))]
    pub(crate) fn hold(&self) {
        self.table.hold();
        self.pools.hold();
        crate::names::interner().hold();
        self.threads.hold();
    }

    /// Releases all locks after a fork, in both processes.
    #[cfg(not(loom))]
    pub(crate) fn let_go(&self) {
        self.table.let_go();
        self.pools.let_go();
        crate::names::interner().let_go();
        self.threads.let_go();
    }

    /// Runs in the child: removes all threads except the one with `published`. The objects of the
    /// others stay alive.
    #[cfg(not(loom))]
    pub(crate) fn only(&self, published: Option<NonNull<Published>>) {
        let mut threads = self.threads.lock();
        let others =
            |threads: &Threads| threads.present.iter().copied().find(|p| Some(p.0) != published);
        while let Some(gone) = others(&threads) {
            threads.leave(gone);
        }
    }

    pub(crate) fn set_scope_hooks(&self, hooks: Option<(ScopeEnterHook, ScopeExitHook)>) {
        if let Some((enter, exit)) = hooks {
            self.scope_exit.store(exit as *mut (), Release);
            self.scope_enter.store(enter as *mut (), Release);
            self.flags.fetch_or(HOOKS, Release);
        } else {
            self.flags.fetch_and(!HOOKS, Release);
        }
    }

    pub(crate) fn scope_hooks(&self) -> Option<(ScopeEnterHook, ScopeExitHook)> {
        if self.flags.load(Acquire) & HOOKS == 0 {
            return None;
        }
        let (enter, exit) = (self.scope_enter.load(Acquire), self.scope_exit.load(Acquire));
        if enter.is_null() || exit.is_null() {
            return None;
        }
        // SAFETY: `set_scope_hooks` stored both words from functions of these types.
        Some(unsafe {
            (
                mem::transmute::<*mut (), ScopeEnterHook>(enter),
                mem::transmute::<*mut (), ScopeExitHook>(exit),
            )
        })
    }

    pub(crate) fn set_tensor_destructor(&self, hook: Option<TensorDestructor>) {
        self.tensor_destructor.store(hook.map_or(ptr::null_mut(), |f| f as *mut ()), Release);
    }

    pub(crate) fn tensor_destructor(&self) -> Option<TensorDestructor> {
        let hook = self.tensor_destructor.load(Acquire);
        // SAFETY: `set_tensor_destructor` stored a non-null word from a function of this type.
        (!hook.is_null()).then(|| unsafe { mem::transmute::<*mut (), TensorDestructor>(hook) })
    }

    pub(crate) fn set_tensor_describer(&self, hook: Option<TensorDescriber>) {
        self.tensor_describer.store(hook.map_or(ptr::null_mut(), |f| f as *mut ()), Release);
    }

    pub(crate) fn tensor_describer(&self) -> Option<TensorDescriber> {
        let hook = self.tensor_describer.load(Acquire);
        // SAFETY: `set_tensor_describer` stored a non-null word from a function of this type.
        (!hook.is_null()).then(|| unsafe { mem::transmute::<*mut (), TensorDescriber>(hook) })
    }
}

impl Drop for Shared {
    /// Destroys the pool's tensors. All threads have left, so no race is possible.
    fn drop(&mut self) {
        let me = next_thread();
        let hook = self.tensor_destructor();
        while let Some((tensor, _)) = self.pools.shrink(0, me) {
            if let Some(hook) = hook {
                // SAFETY: the pool owned the tensor. The tensor's maker provided the hook.
                unsafe { hook(tensor) };
            }
        }
    }
}
