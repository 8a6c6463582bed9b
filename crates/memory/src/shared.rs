//! What all threads of one manager share: the object table, the tensor pool, hooks, limits and totals.
//!
//! It must not know scopes or frames. Lock order: none of these locks is taken while another is held, and no callback runs
//! under one.

use std::ffi::c_void;
use std::mem;
use std::ptr;

use leasehold_core::sync::atomic::{AtomicI64, AtomicPtr, AtomicU32, AtomicU64, Ordering::*};
use leasehold_core::sync::{Arc, Mutex};

use crate::env;
use crate::log::Log;
use crate::misuse::MISUSE_COUNT;
use crate::pool::{OpaqueTensor, PoolLimits, TensorDestructor, TensorKey, TensorPool};
use crate::table::{State, Table};

/// Fills in a tensor's key (elements, dtype id, device id) and returns non-zero, or returns 0 for a tensor that is not to be
/// pooled. See [`MemoryManager::set_tensor_describer`](crate::MemoryManager::set_tensor_describer).
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

/// How a manager is set up.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Config {
    /// Bytes of dead tensors that wait for the end of the scope in which they died; 0 turns the quarantine off.
    pub quarantine_bytes: u64,
    /// Limits of the tensor pool.
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
        config.quarantine_bytes = env::number(c"TL_MEM_QUARANTINE_BYTES").unwrap_or(config.quarantine_bytes);
        config.pool.bytes = env::number(c"TL_MEM_POOL_BYTES").unwrap_or(config.pool.bytes);
        config
    }
}

/// `Shared::flags`: write a line for every event.
pub(crate) const LOG: u32 = 1;
/// `Shared::flags`: scope hooks are set.
pub(crate) const HOOKS: u32 = 2;

/// What one thread publishes: written by that thread only (plain loads and stores), read by anybody.
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

#[derive(Debug, Default)]
struct Threads {
    present: Vec<Arc<Published>>,
    /// Misuses of threads that have ended.
    past: [u64; MISUSE_COUNT],
}

/// See the module's documentation.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) flags: AtomicU32,
    pub(crate) table: Table,
    pool: Mutex<TensorPool>,
    scope_enter: AtomicPtr<()>,
    scope_exit: AtomicPtr<()>,
    tensor_destructor: AtomicPtr<()>,
    tensor_describer: AtomicPtr<()>,
    pub(crate) quarantine_budget: AtomicU64,
    pub(crate) quarantined: AtomicU64,
    pub(crate) quarantined_bytes: AtomicU64,
    peak_quarantined_bytes: AtomicU64,
    peak_pooled_bytes: AtomicU64,
    live: AtomicI64,
    peak_live: AtomicI64,
    live_bytes: AtomicI64,
    peak_live_bytes: AtomicI64,
    threads: Mutex<Threads>,
    pub(crate) log: Option<Log>,
}

/// Ids of threads, process-wide, so that no two attachments ever share one.
fn next_thread() -> u32 {
    static NEXT: leasehold_core::sync::OnceLock<AtomicU32> = leasehold_core::sync::OnceLock::new();
    let next = NEXT.get_or_init(|| AtomicU32::new(1));
    loop {
        let id = next.fetch_add(1, Relaxed);
        if id != 0 && id != u32::MAX {
            return id;
        }
    }
}

impl Shared {
    pub(crate) fn new(config: Config, log: Option<Log>) -> Self {
        Self {
            flags: AtomicU32::new(if log.is_some() { LOG } else { 0 }),
            table: Table::new(),
            pool: Mutex::new(TensorPool::with_destructor(config.pool, crate::tensor::destroy)),
            scope_enter: AtomicPtr::new(ptr::null_mut()),
            scope_exit: AtomicPtr::new(ptr::null_mut()),
            tensor_destructor: AtomicPtr::new(ptr::null_mut()),
            tensor_describer: AtomicPtr::new(ptr::null_mut()),
            quarantine_budget: AtomicU64::new(config.quarantine_bytes),
            quarantined: AtomicU64::new(0),
            quarantined_bytes: AtomicU64::new(0),
            peak_quarantined_bytes: AtomicU64::new(0),
            peak_pooled_bytes: AtomicU64::new(0),
            live: AtomicI64::new(0),
            peak_live: AtomicI64::new(0),
            live_bytes: AtomicI64::new(0),
            peak_live_bytes: AtomicI64::new(0),
            threads: Mutex::new(Threads::default()),
            log,
        }
    }

    /// A new thread (or a further attachment of one): its id and the place where it publishes.
    pub(crate) fn join(&self) -> (u32, Arc<Published>) {
        let published = Arc::new(Published::default());
        self.threads.lock().present.push(Arc::clone(&published));
        (next_thread(), published)
    }

    pub(crate) fn leave(&self, published: &Arc<Published>) {
        let mut threads = self.threads.lock();
        threads.present.retain(|p| !Arc::ptr_eq(p, published));
        for (past, now) in threads.past.iter_mut().zip(&published.misuses) {
            *past += now.load(Relaxed);
        }
    }

    /// Adds up what all threads publish.
    pub(crate) fn published(&self) -> crate::stats::Stats {
        let threads = self.threads.lock();
        let mut stats = crate::stats::Stats { misuses: threads.past, ..Default::default() };
        stats.threads = threads.present.len() as u64;
        for p in &threads.present {
            for (sum, n) in stats.misuses.iter_mut().zip(&p.misuses) {
                *sum += n.load(Relaxed);
            }
            stats.slot_buffers += p.slot_buffers.load(Relaxed);
            stats.slot_bytes += p.slot_bytes.load(Relaxed);
            stats.deferred_buffers += p.deferred_buffers.load(Relaxed);
            stats.deferred_bytes += p.deferred_bytes.load(Relaxed);
            stats.peak_slot_bytes += p.peak_slot_bytes.load(Relaxed);
        }
        drop(threads);
        let totals = self.table.totals();
        (stats.live_objects, stats.live_tensors, stats.live_bytes) = (totals.live, totals.tensors, totals.bytes);
        stats.peak_live_objects = self.peak_live.load(Relaxed).max(totals.live as i64) as u64;
        stats.peak_live_bytes = self.peak_live_bytes.load(Relaxed).max(totals.bytes as i64) as u64;
        stats.quarantined_tensors = self.quarantined.load(Relaxed);
        stats.quarantined_bytes = self.quarantined_bytes.load(Relaxed);
        stats.peak_quarantined_bytes = self.peak_quarantined_bytes.load(Relaxed);
        let pool = self.pool.lock();
        stats.pooled_tensors = pool.total_count() as u64;
        stats.pooled_bytes = pool.total_bytes();
        stats.peak_pooled_bytes = self.peak_pooled_bytes.load(Relaxed);
        stats
    }

    /// One thread's batch of births and deaths: the net change, and the highest value since the last batch.
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

    /// Runs `f` on the pool under its lock; `f` must not call out.
    pub(crate) fn with_pool<R>(&self, f: impl FnOnce(&mut TensorPool) -> R) -> R {
        let mut pool = self.pool.lock();
        let result = f(&mut pool);
        let bytes = pool.total_bytes();
        if bytes > self.peak_pooled_bytes.load(Relaxed) {
            self.peak_pooled_bytes.store(bytes, Relaxed);
        }
        result
    }

    /// Takes a tensor out of the pool for use; from then on the table does not know it.
    pub(crate) fn pool_acquire(&self, key: TensorKey, me: u32) -> Option<*mut OpaqueTensor> {
        let tensor = self.with_pool(|pool| pool.acquire_key(key))?;
        let mut shard = self.table.lock(tensor.addr(), me);
        if let Some(i) = shard.position(tensor.addr())
            && shard.at(i).state == State::Pooled
        {
            shard.remove_at(i);
        }
        Some(tensor)
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
        // SAFETY: both words were stored by `set_scope_hooks` from functions of these types.
        Some(unsafe {
            (mem::transmute::<*mut (), ScopeEnterHook>(enter), mem::transmute::<*mut (), ScopeExitHook>(exit))
        })
    }

    pub(crate) fn set_tensor_destructor(&self, hook: Option<TensorDestructor>) {
        self.tensor_destructor.store(hook.map_or(ptr::null_mut(), |f| f as *mut ()), Release);
    }

    pub(crate) fn tensor_destructor(&self) -> Option<TensorDestructor> {
        let hook = self.tensor_destructor.load(Acquire);
        // SAFETY: a non-null word was stored by `set_tensor_destructor` from a function of this type.
        (!hook.is_null()).then(|| unsafe { mem::transmute::<*mut (), TensorDestructor>(hook) })
    }

    pub(crate) fn set_tensor_describer(&self, hook: Option<TensorDescriber>) {
        self.tensor_describer.store(hook.map_or(ptr::null_mut(), |f| f as *mut ()), Release);
    }

    pub(crate) fn tensor_describer(&self) -> Option<TensorDescriber> {
        let hook = self.tensor_describer.load(Acquire);
        // SAFETY: a non-null word was stored by `set_tensor_describer` from a function of this type.
        (!hook.is_null()).then(|| unsafe { mem::transmute::<*mut (), TensorDescriber>(hook) })
    }
}

impl Drop for Shared {
    /// Destroys what the pool still holds; every thread has left, so there is nobody to race with.
    fn drop(&mut self) {
        let mut pooled = Vec::new();
        self.with_pool(|pool| pool.trim_into(0, &mut pooled));
        let hook = self.tensor_destructor();
        for tensor in pooled {
            let host = {
                let mut shard = self.table.lock(tensor.addr(), next_thread());
                shard.find(tensor.addr()).is_some_and(|e| e.flags & crate::table::HOST != 0)
            };
            match hook {
                // SAFETY: the pool owned the tensor, and it was made by `lh_tensor_create`.
                _ if host => unsafe { crate::tensor::destroy(tensor) },
                // SAFETY: the pool owned the tensor; the hook is what its maker provided for tensors.
                Some(hook) => unsafe { hook(tensor) },
                None => {}
            }
        }
    }
}
