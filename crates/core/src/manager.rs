//! Managers: pools with a life cycle, keyed singletons, and stores of a fixed number of things.
//!
//! # Life cycle
//! unconfigured → configured → shut down. `configure` is all-or-nothing. `shutdown` decides first, destroys afterwards, and is `Ok`
//! the second time.
//!
//! # Keyed creation
//! The map's lock is held only to look up and to leave an *attempt*. Who finds an attempt waits on that attempt, never on the map,
//! and shares its outcome. A failure is forgotten. A creation that asks for its own key gets `InvalidState`.
//!
//! This module must not know what it manages.

use crate::error::{Error, Result};
use crate::handle::Handle;
use crate::lease::{Lease, UniqueLease};
use crate::pool::{PoolConfig, PoolStats, Resource, SlotPool, TagOf};
use crate::sync::{Arc, Condvar, Mutex, OnceLock, thread};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

/// Somebody is creating the resource of a key.
struct Attempt<T> {
    outcome: Mutex<Option<Result<T>>>,
    done: Condvar,
    by: thread::ThreadId,
}

enum Entry<R: Resource> {
    Pending(Arc<Attempt<Lease<R::Payload>>>),
    Ready(Lease<R::Payload>),
    /// The manager gave up its own lease; others may still hold the resource.
    Released(Handle<TagOf<R>>),
}

/// A pool of resources with a life cycle, and one resource per key where a caller names it by a key.
///
/// `K` is the key of keyed singletons; `()` where there are none.
pub struct PoolManager<R: Resource, K = ()> {
    pool: OnceLock<SlotPool<R>>,
    configuring: Mutex<()>,
    keyed: Mutex<HashMap<K, Entry<R>>>,
}

impl<R: Resource, K: Eq + Hash + Clone> Default for PoolManager<R, K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Resource, K: Eq + Hash + Clone> PoolManager<R, K> {
    /// A manager that must be configured before it lends anything.
    pub fn new() -> Self {
        Self { pool: OnceLock::new(), configuring: Mutex::new(()), keyed: Mutex::new(HashMap::new()) }
    }

    /// Makes the manager ready. All-or-nothing: a refused configuration changes nothing.
    ///
    /// # Errors
    /// `InvalidArgument` for what [`PoolConfig::validate`] refuses; `InvalidState` when it is configured already.
    pub fn configure(&self, resource: R, config: PoolConfig) -> Result<()> {
        config.validate()?;
        let _guard = self.configuring.lock();
        if self.pool.get().is_some() {
            return Err(Error::state(format!("the {} manager is configured already", R::NAME)));
        }
        let pool = SlotPool::new(resource, config)?;
        self.pool.set(pool).map_err(|_| Error::state(format!("the {} manager is configured already", R::NAME)))
    }

    /// Whether [`configure`](Self::configure) has succeeded.
    pub fn is_configured(&self) -> bool {
        self.pool.get().is_some()
    }

    /// The pool.
    ///
    /// # Errors
    /// `InvalidState` before `configure`.
    #[inline]
    pub fn pool(&self) -> Result<&SlotPool<R>> {
        self.pool.get().ok_or_else(|| Error::state(format!("the {} manager is not configured", R::NAME)))
    }

    /// Takes a resource; see [`SlotPool::acquire`].
    ///
    /// # Errors
    /// As [`SlotPool::acquire`]; `InvalidState` before `configure` and after `shutdown`.
    #[inline]
    pub fn acquire(&self, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        self.pool()?.acquire(request)
    }

    /// Takes a resource for oneself; see [`SlotPool::acquire_unique`].
    ///
    /// # Errors
    /// As [`acquire`](Self::acquire).
    pub fn acquire_unique(&self, request: &R::Request<'_>) -> Result<UniqueLease<R::Payload>> {
        self.pool()?.acquire_unique(request)
    }

    /// A lease on the handle's resource; see [`SlotPool::lease`].
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`; `InvalidState` before `configure`.
    #[inline]
    pub fn lease(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        self.pool()?.lease(handle)
    }

    /// Whether the handle's resource was alive: one load.
    #[inline]
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        self.pool.get().is_some_and(|p| p.is_alive(handle))
    }

    /// The one resource of `key`; it is created once, even by many threads at once, and lives until it is released and dropped
    /// or the manager is shut down. Waits while another thread creates it.
    ///
    /// # Errors
    /// What `create` says (shared by all who waited, and forgotten: the next call tries again); `InvalidState` when a creation
    /// asks for its own key.
    pub fn get_or_create(&self, key: &K, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let pool = self.pool()?;
        let attempt = {
            let mut keyed = self.keyed.lock();
            match keyed.get(key) {
                Some(Entry::Ready(lease)) => return Ok(lease.clone()),
                Some(Entry::Pending(attempt)) => {
                    let attempt = attempt.clone();
                    drop(keyed);
                    return Self::join(&attempt);
                }
                Some(Entry::Released(handle)) => {
                    // Somebody may still hold it: then it is the one of this key.
                    if let Ok(lease) = pool.lease(*handle) {
                        keyed.insert(key.clone(), Entry::Ready(lease.clone()));
                        return Ok(lease);
                    }
                }
                None => {}
            }
            let attempt =
                Arc::new(Attempt { outcome: Mutex::new(None), done: Condvar::new(), by: thread::current().id() });
            keyed.insert(key.clone(), Entry::Pending(attempt.clone()));
            attempt
        };
        let mut finish = Finish { manager: self, key, attempt: &attempt, outcome: None };
        finish.outcome = Some(pool.acquire(request));
        finish.outcome.clone().unwrap_or_else(|| Err(Error::state("creation without an outcome")))
    }

    fn join(attempt: &Attempt<Lease<R::Payload>>) -> Result<Lease<R::Payload>> {
        if attempt.by == thread::current().id() {
            return Err(Error::state(format!("the creation of a {} asks for its own key", R::NAME)));
        }
        let mut outcome = attempt.outcome.lock();
        loop {
            if let Some(outcome) = &*outcome {
                return outcome.clone();
            }
            attempt.done.wait(&mut outcome);
        }
    }

    /// The resource of `key` if it exists.
    pub fn get(&self, key: &K) -> Option<Lease<R::Payload>> {
        match self.keyed.lock().get(key) {
            Some(Entry::Ready(lease)) => Some(lease.clone()),
            _ => None,
        }
    }

    /// Gives up the manager's own lease on a keyed resource; other holders are untouched, and while there are any, the key
    /// still finds it.
    ///
    /// # Errors
    /// `StaleHandle` when no key of this manager has that resource.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        let mut keyed = self.keyed.lock();
        for entry in keyed.values_mut() {
            if let Entry::Ready(lease) = entry
                && lease.handle() == handle
            {
                let own = std::mem::replace(entry, Entry::Released(handle));
                drop(keyed);
                // Outside the lock: this may end the resource.
                drop(own);
                return Ok(());
            }
        }
        Err(Error::stale(R::NAME, handle))
    }

    /// Destroys idle resources until at most `keep` are left; says how many.
    pub fn trim(&self, keep: u64) -> u64 {
        self.pool.get().map_or(0, |p| p.trim(keep))
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.pool.get().map(SlotPool::stats).unwrap_or_default()
    }

    /// Ends the manager; see [`SlotPool::shutdown_with`]. A manager that was never configured has nothing to end.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then. `InvalidState` while a keyed creation is in progress.
    pub fn shutdown(&self) -> Result<()> {
        let Some(pool) = self.pool.get() else { return Ok(()) };
        let own: Vec<_> = {
            let mut keyed = self.keyed.lock();
            if keyed.values().any(|e| matches!(e, Entry::Pending(_))) {
                return Err(Error::state(format!("a {} is being created", R::NAME)));
            }
            // The map's leases themselves are taken, not clones: the pool wants each held once.
            keyed
                .iter_mut()
                .filter_map(|(key, entry)| match std::mem::replace(entry, Entry::Released(never())) {
                    Entry::Ready(lease) => Some((key.clone(), lease)),
                    _ => None,
                })
                .collect()
        };
        let (keys, leases): (Vec<_>, Vec<_>) = own.into_iter().unzip();
        match pool.shutdown_with(&leases) {
            Ok(()) => {
                self.keyed.lock().clear();
                drop(leases);
                Ok(())
            }
            Err(e) => {
                let mut keyed = self.keyed.lock();
                for (key, lease) in keys.into_iter().zip(leases) {
                    keyed.insert(key, Entry::Ready(lease));
                }
                Err(e)
            }
        }
    }
}

/// A handle that no pool makes.
fn never<T: ?Sized>() -> Handle<T> {
    Handle::new(u32::MAX, u32::MAX)
}

/// Publishes an attempt's outcome, also when the creation panics.
struct Finish<'a, R: Resource, K: Eq + Hash + Clone> {
    manager: &'a PoolManager<R, K>,
    key: &'a K,
    attempt: &'a Attempt<Lease<R::Payload>>,
    outcome: Option<Result<Lease<R::Payload>>>,
}

impl<R: Resource, K: Eq + Hash + Clone> Drop for Finish<'_, R, K> {
    fn drop(&mut self) {
        let outcome =
            self.outcome.take().unwrap_or_else(|| Err(Error::state(format!("the creation of a {} panicked", R::NAME))));
        {
            let mut keyed = self.manager.keyed.lock();
            match &outcome {
                Ok(lease) => drop(keyed.insert(self.key.clone(), Entry::Ready(lease.clone()))),
                Err(_) => drop(keyed.remove(self.key)),
            }
        }
        *self.attempt.outcome.lock() = Some(outcome);
        self.attempt.done.notify_all();
    }
}

impl<R: Resource, K> fmt::Debug for PoolManager<R, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolManager").field("resource", &R::NAME).field("pool", &self.pool.get()).finish()
    }
}

/// A store for things whose number and indexes are known beforehand, such as the devices of a machine. Each is created lazily,
/// once, and named by its index.
pub struct FixedSlotStore<R: Resource> {
    count: u32,
    manager: PoolManager<R, u32>,
}

impl<R: Resource> Default for FixedSlotStore<R> {
    fn default() -> Self {
        Self { count: 0, manager: PoolManager::new() }
    }
}

impl<R: Resource> FixedSlotStore<R> {
    /// A store of `count` things that `resource` makes.
    ///
    /// # Errors
    /// `OutOfMemory` when the slots cannot be made.
    pub fn new(resource: R, count: u32) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(
            resource,
            PoolConfig { block: count.max(1), max_live: Some(count.max(1)), ..PoolConfig::default() },
        )?;
        Ok(Self { count, manager })
    }

    /// How many there are.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Creates the thing at `index` unless it is alive, and returns its handle.
    ///
    /// # Errors
    /// `NotFound` for an index out of range; what `create` says.
    pub fn ensure_alive(&self, index: u32, request: &R::Request<'_>) -> Result<Handle<TagOf<R>>> {
        self.get(index, request).map(|lease| lease.handle())
    }

    /// A lease on the thing at `index`, which is created unless it is alive.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn get(&self, index: u32, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        if index >= self.count {
            return Err(Error::NotFound(format!("{} {index}: there are {}", R::NAME, self.count).into()));
        }
        self.manager.get_or_create(&index, request)
    }

    /// The thing at `index` if it was created.
    pub fn existing(&self, index: u32) -> Option<Lease<R::Payload>> {
        self.manager.get(&index)
    }

    /// A lease on the handle's thing.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "get_state")]
    pub fn lease(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        self.manager.lease(handle)
    }

    /// Whether the handle's thing was alive: one load.
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        self.manager.is_alive(handle)
    }

    /// Gives up the store's own lease; other holders are untouched.
    ///
    /// # Errors
    /// `StaleHandle`.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        self.manager.release(handle)
    }

    /// What the pool under the store did so far.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Ends the store.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}

impl<R: Resource> fmt::Debug for FixedSlotStore<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedSlotStore").field("count", &self.count).field("manager", &self.manager).finish()
    }
}
