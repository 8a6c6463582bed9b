//! Managers: pools with a life cycle, keyed singletons, and stores of a fixed number of things.
//!
//! # Life cycle
//! unconfigured → configured → shut down. `configure` is all-or-nothing. `shutdown` decides first, destroys afterwards, and is `Ok`
//! the second time.
//!
//! # Keyed creation
//! The map's lock is held only to look up and to leave an *attempt*. Who finds an attempt waits on that attempt, never on the map,
//! and shares its outcome. A failure is forgotten. Before a thread waits it leaves a note of what it waits for; if following the
//! notes leads back to itself, the creation asks (perhaps through other threads) for its own key, and gets `InvalidState`.
//!
//! # Locks
//! In this order: the map, an attempt's outcome or the pool's life cycle, the pool's growth. A shutdown holds the map while the pool
//! decides, so that nobody finds a lease of the manager's, or creates a second one, meanwhile. No lock is held while something of the
//! resource's runs, and none while a lease is dropped.
//!
//! This module must not know what it manages.

use crate::error::{Error, Result};
use crate::handle::{Handle, Index};
use crate::lease::{Lease, UniqueLease};
use crate::pool::{PoolConfig, PoolStats, Resource, SlotPool, TagOf, Verdict};
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

type AttemptOf<R> = Arc<Attempt<Lease<<R as Resource>::Payload>>>;

enum Entry<R: Resource> {
    Pending(AttemptOf<R>),
    Ready(Lease<R::Payload>),
    /// The manager gave up its own lease; others may still hold the resource.
    Released(Handle<TagOf<R>>),
}

struct Keyed<R: Resource, K> {
    entries: HashMap<K, Entry<R>>,
    /// What each waiting thread waits for.
    waiting: HashMap<thread::ThreadId, AttemptOf<R>>,
}

impl<R: Resource, K> Keyed<R, K> {
    /// Whether `attempt` waits, perhaps through other threads, for the calling one.
    fn waits_for_me(&self, attempt: &AttemptOf<R>, me: thread::ThreadId) -> bool {
        let mut attempt = attempt;
        // A note whose attempt has an outcome belongs to a thread that is about to go on.
        while attempt.outcome.lock().is_none() {
            if attempt.by == me {
                return true;
            }
            let Some(next) = self.waiting.get(&attempt.by) else { return false };
            attempt = next;
        }
        false
    }
}

/// A pool of resources with a life cycle, and one resource per key where a caller names it by a key.
///
/// `K` is the key of keyed singletons; `()` where there are none.
pub struct PoolManager<R: Resource, K = ()> {
    pool: OnceLock<SlotPool<R>>,
    configuring: Mutex<()>,
    keyed: Mutex<Keyed<R, K>>,
}

impl<R: Resource, K: Eq + Hash + Clone> Default for PoolManager<R, K> {
    fn default() -> Self {
        Self::new()
    }
}

impl<R: Resource, K: Eq + Hash + Clone> PoolManager<R, K> {
    /// A manager that must be configured before it lends anything.
    pub fn new() -> Self {
        let keyed = Keyed { entries: HashMap::new(), waiting: HashMap::new() };
        Self { pool: OnceLock::new(), configuring: Mutex::new(()), keyed: Mutex::new(keyed) }
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
    /// or the manager is shut down. Waits while another thread creates it. A new key always gets a new resource, never one that is
    /// idle: that one belonged to another key.
    ///
    /// # Errors
    /// What `create` says (shared by all who waited, and forgotten: the next call tries again); `InvalidState` when a creation
    /// asks for its own key, also by way of other threads that wait for each other, and when it panicked; `Occupied` while somebody
    /// holds the resource, which the manager has released, exclusively.
    pub fn get_or_create(&self, key: &K, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let pool = self.pool()?;
        let me = thread::current().id();
        let attempt = {
            let mut keyed = self.keyed.lock();
            match keyed.entries.get(key) {
                Some(Entry::Ready(lease)) => return Ok(lease.clone()),
                Some(Entry::Pending(attempt)) => {
                    let attempt = attempt.clone();
                    if keyed.waits_for_me(&attempt, me) {
                        return Err(Error::state(format!("the creation of a {} asks for its own key", R::NAME)));
                    }
                    keyed.waiting.insert(me, attempt.clone());
                    drop(keyed);
                    return self.join(&attempt, me);
                }
                Some(Entry::Released(handle)) => match pool.lease(*handle) {
                    // Somebody still holds it: then it is the one of this key.
                    Ok(lease) => {
                        keyed.entries.insert(key.clone(), Entry::Ready(lease.clone()));
                        return Ok(lease);
                    }
                    Err(occupied @ Error::Occupied { .. }) => return Err(occupied),
                    Err(_) => {}
                },
                None => {}
            }
            let attempt = Arc::new(Attempt { outcome: Mutex::new(None), done: Condvar::new(), by: me });
            keyed.entries.insert(key.clone(), Entry::Pending(attempt.clone()));
            attempt
        };
        let mut finish = Finish { manager: self, key, attempt: &attempt, outcome: None };
        let outcome = pool.acquire_new(request);
        finish.outcome = Some(outcome.clone());
        outcome
    }

    /// Waits for the outcome of another thread's attempt.
    fn join(&self, attempt: &AttemptOf<R>, me: thread::ThreadId) -> Result<Lease<R::Payload>> {
        let outcome = {
            let mut outcome = attempt.outcome.lock();
            loop {
                if let Some(outcome) = &*outcome {
                    break outcome.clone();
                }
                attempt.done.wait(&mut outcome);
            }
        };
        let note = self.keyed.lock().waiting.remove(&me);
        // Outside the lock: it may be the last to know the attempt's lease.
        drop(note);
        outcome
    }

    /// The resource of `key` if it exists.
    pub fn get(&self, key: &K) -> Option<Lease<R::Payload>> {
        match self.keyed.lock().entries.get(key)? {
            Entry::Ready(lease) => Some(lease.clone()),
            Entry::Released(handle) => self.lease(*handle).ok(),
            Entry::Pending(_) => None,
        }
    }

    /// Gives up the manager's own lease on a keyed resource; other holders are untouched, and while there are any, the key
    /// still finds it.
    ///
    /// # Errors
    /// `StaleHandle` when no key of this manager has that resource.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        let mut keyed = self.keyed.lock();
        // Keys whose resource is gone are forgotten here, so that the map does not grow with what was once released.
        keyed.entries.retain(|_, entry| !matches!(entry, Entry::Released(old) if !self.is_alive(*old)));
        let found = keyed.entries.values_mut().find(|e| matches!(e, Entry::Ready(own) if own.handle() == handle));
        let Some(entry) = found else { return Err(Error::stale(R::NAME, handle)) };
        let own = std::mem::replace(entry, Entry::Released(handle));
        drop(keyed);
        // Outside the lock: this may end the resource.
        drop(own);
        Ok(())
    }

    /// How many resources somebody beside the manager holds (a snapshot): all that are alive but the keyed ones that the
    /// manager alone keeps.
    pub fn in_use(&self) -> u64 {
        let kept = {
            let keyed = self.keyed.lock();
            let alone = |e: &&Entry<R>| matches!(e, Entry::Ready(lease) if lease.strong_count() == 1);
            keyed.entries.values().filter(alone).count() as u64
        };
        self.stats().live.saturating_sub(kept)
    }

    /// Destroys idle resources until at most `keep` are left; says how many.
    pub fn trim(&self, keep: u64) -> u64 {
        self.pool.get().map_or(0, |p| p.trim(keep))
    }

    /// What the pool did so far.
    pub fn stats(&self) -> PoolStats {
        self.pool.get().map(SlotPool::stats).unwrap_or_default()
    }

    /// Ends the manager: nobody but the manager itself may hold anything. All is decided before anything is destroyed, and
    /// destroyed without a lock. A second shutdown is `Ok`; a manager that was never configured has nothing to end.
    ///
    /// # Errors
    /// `LeasesOutstanding`; nothing has changed then. A creation in progress counts as a lease.
    pub fn shutdown(&self) -> Result<()> {
        let Some(pool) = self.pool.get() else { return Ok(()) };
        let ended: Vec<_> = {
            let mut keyed = self.keyed.lock();
            let own = keyed.entries.values().filter_map(|entry| match entry {
                Entry::Ready(lease) => Some(lease),
                Entry::Pending(_) | Entry::Released(_) => None,
            });
            if pool.decide(own)? == Verdict::WasDown {
                return Ok(());
            }
            // An attempt that has not come to its creation yet will be refused by the pool, and removes its entry itself.
            keyed.entries.extract_if(|_, entry| !matches!(entry, Entry::Pending(_))).collect()
        };
        pool.destroy_all_idle();
        drop(ended);
        Ok(())
    }
}

/// Publishes an attempt's outcome, also when the creation panics.
struct Finish<'a, R: Resource, K: Eq + Hash + Clone> {
    manager: &'a PoolManager<R, K>,
    key: &'a K,
    attempt: &'a AttemptOf<R>,
    outcome: Option<Result<Lease<R::Payload>>>,
}

impl<R: Resource, K: Eq + Hash + Clone> Drop for Finish<'_, R, K> {
    fn drop(&mut self) {
        let outcome =
            self.outcome.take().unwrap_or_else(|| Err(Error::state(format!("the creation of a {} panicked", R::NAME))));
        {
            let mut keyed = self.manager.keyed.lock();
            match &outcome {
                Ok(lease) => drop(keyed.entries.insert(self.key.clone(), Entry::Ready(lease.clone()))),
                Err(_) => drop(keyed.entries.remove(self.key)),
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
/// once, and named by its index, which is the store's key. The slot where it lives, and so [`Handle::index`], may be another one
/// after a thing was ended and made again; who has a handle and wants the thing's number asks the thing.
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
    /// `InvalidArgument` for more than 2^24 - 1 things.
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
    pub fn ensure_alive(&self, index: Index<TagOf<R>>, request: &R::Request<'_>) -> Result<Handle<TagOf<R>>> {
        self.get(index, request).map(|lease| lease.handle())
    }

    /// A lease on the thing at `index`, which is created unless it is alive.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn get(&self, index: Index<TagOf<R>>, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        let index = index.get();
        if index >= self.count {
            return Err(Error::NotFound(format!("{} {index}: there are {}", R::NAME, self.count).into()));
        }
        self.manager.get_or_create(&index, request)
    }

    /// The thing at `index` if it was created.
    pub fn existing(&self, index: Index<TagOf<R>>) -> Option<Lease<R::Payload>> {
        self.manager.get(&index.get())
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
