//! Managers: resource pools with a life cycle, keyed singletons, and stores with a fixed number of
//! resources.
//!
//! # Life cycle
//! unconfigured → configured → shut down. `configure` is all-or-nothing. `shutdown` first
//! decides, then destroys. A second `shutdown` returns `Ok`.
//!
//! # Keyed creation
//! A thread that creates the resource of a key first leaves an *attempt* in the map. The thread
//! holds the map's lock only for the look-up and for this entry. A thread that finds an attempt
//! waits on the attempt, not on the map, and shares the attempt's outcome. The manager does not
//! keep a failure.
//!
//! The manager keeps a lease on the resource of a key, or leaves the resource to its holders. A key
//! whose resource is gone leaves the map at a later creation.
//!
//! Before a thread waits, the thread records the attempt that it waits for. If a chain of these
//! records leads back to the calling thread, the creation would wait for its own key. The call then
//! returns `InvalidState`.
//!
//! # Locks
//! The order of locks: the map; an attempt's outcome or the pool's life cycle; the pool's growth. A
//! shutdown holds the map while the pool decides. So no thread finds one of the manager's leases,
//! or creates a second resource, during the decision. No lock is held while a function of the
//! resource runs, and none while a lease is dropped.
//!
//! This module must not know which resources it manages.

use crate::error::{Error, Result};
use crate::handle::{Handle, Index};
use crate::lease::{Lease, UniqueLease};
use crate::pool::{PoolConfig, PoolStats, Resource, ShutdownOutcome, SlotPool, TagOf};
use crate::sync::{Arc, Condvar, Mutex, OnceLock, thread};
use std::collections::HashMap;
use std::fmt;
use std::hash::Hash;

/// A creation of a key's resource that is in progress.
struct Attempt<T> {
    outcome: Mutex<Option<Result<T>>>,
    done: Condvar,
    by: thread::ThreadId,
}

type AttemptOf<R> = Arc<Attempt<Lease<<R as Resource>::Payload>>>;

enum Entry<R: Resource> {
    Pending(AttemptOf<R>),
    Ready(Lease<R::Payload>),
    /// The manager has no lease of its own. Other holders may remain.
    Released(Handle<TagOf<R>>),
}

struct Keyed<R: Resource, K> {
    entries: HashMap<K, Entry<R>>,
    /// The attempt that each waiting thread waits for.
    waiting: HashMap<thread::ThreadId, AttemptOf<R>>,
    /// At this length the map may contain many keys whose resources are gone.
    full: usize,
}

/// Keys that a map has before a creation looks for keys whose resources are gone.
const FEW_KEYS: usize = 16;

impl<R: Resource, K> Keyed<R, K> {
    /// Removes the keys whose resources are gone.
    fn prune(&mut self, is_alive: impl Fn(Handle<TagOf<R>>) -> bool) {
        self.entries.retain(|_, entry| !matches!(entry, Entry::Released(old) if !is_alive(*old)));
        self.full = (2 * self.entries.len()).max(FEW_KEYS);
    }

    /// Returns whether the thread of `attempt` waits, directly or through other threads, for the
    /// calling thread.
    fn waits_for_me(&self, attempt: &AttemptOf<R>, me: thread::ThreadId) -> bool {
        let mut attempt = attempt;
        // If a recorded attempt has an outcome, its waiting thread is about to continue.
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

/// A pool of resources with a life cycle, and at most one resource for each key.
///
/// `K` is the key type of keyed singletons; `()` if the manager has none.
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
        let keyed = Keyed { entries: HashMap::new(), waiting: HashMap::new(), full: FEW_KEYS };
        Self { pool: OnceLock::new(), configuring: Mutex::new(()), keyed: Mutex::new(keyed) }
    }

    /// Configures the manager. All-or-nothing: a refused configuration changes nothing.
    ///
    /// # Errors
    /// `InvalidArgument` if [`PoolConfig::validate`] refuses `config`; `InvalidState` if the
    /// manager is configured already.
    pub fn configure(&self, resource: R, config: PoolConfig) -> Result<()> {
        config.validate()?;
        let _guard = self.configuring.lock();
        if self.pool.get().is_some() {
            return Err(Error::state(format!("the {} manager is configured already", R::NAME)));
        }
        let pool = SlotPool::new(resource, config)?;
        self.pool
            .set(pool)
            .map_err(|_| Error::state(format!("the {} manager is configured already", R::NAME)))
    }

    /// Returns whether [`configure`](Self::configure) has succeeded.
    pub fn is_configured(&self) -> bool {
        self.pool.get().is_some()
    }

    /// The pool.
    ///
    /// # Errors
    /// `InvalidState` before `configure`.
    #[inline]
    pub fn pool(&self) -> Result<&SlotPool<R>> {
        self.pool
            .get()
            .ok_or_else(|| Error::state(format!("the {} manager is not configured", R::NAME)))
    }

    /// Acquires a resource; see [`SlotPool::acquire`].
    ///
    /// # Errors
    /// As [`SlotPool::acquire`]; `InvalidState` before `configure` and after `shutdown`.
    #[inline]
    pub fn acquire(&self, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        self.pool()?.acquire(request)
    }

    /// Acquires a resource exclusively; see [`SlotPool::acquire_unique`].
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

    /// Returns whether the handle's resource is alive. One load.
    #[inline]
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        self.pool.get().is_some_and(|p| p.is_alive(handle))
    }

    /// The one resource of `key`, created if it does not exist.
    ///
    /// Concurrent calls create the resource once; the other threads block until the creation is
    /// over. The resource lives until it is released and dropped, or until the manager is shut
    /// down. A new key always gets a new resource and never an idle one, because an idle one
    /// belonged to another key.
    ///
    /// # Errors
    /// The error of `create`, shared by all threads that waited; the next call tries again.
    /// `InvalidState` if a creation asks for its own key, directly or through other waiting
    /// threads, or if the creation panicked. `Occupied` if the manager has released the resource
    /// and another holder has it exclusively.
    pub fn get_or_create(&self, key: &K, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        self.keyed(key, request, true)
    }

    /// The one resource of `key`, created if it does not exist. As
    /// [`get_or_create`](Self::get_or_create), but the manager keeps no lease of its own: the
    /// resource ends with its last holder. If the manager has kept the resource before, it goes on.
    ///
    /// # Errors
    /// As [`get_or_create`](Self::get_or_create).
    pub fn find_or_create(&self, key: &K, request: &R::Request<'_>) -> Result<Lease<R::Payload>> {
        self.keyed(key, request, false)
    }

    fn keyed(&self, key: &K, request: &R::Request<'_>, keep: bool) -> Result<Lease<R::Payload>> {
        let pool = self.pool()?;
        let me = thread::current().id();
        let attempt = {
            let mut keyed = self.keyed.lock();
            match keyed.entries.get(key) {
                Some(Entry::Ready(lease)) => return Ok(lease.clone()),
                Some(Entry::Pending(attempt)) => {
                    let attempt = attempt.clone();
                    if keyed.waits_for_me(&attempt, me) {
                        return Err(Error::state(format!(
                            "the creation of a {} asks for its own key",
                            R::NAME
                        )));
                    }
                    keyed.waiting.insert(me, attempt.clone());
                    drop(keyed);
                    let lease = self.join(&attempt, me)?;
                    if keep {
                        self.keep(key, &lease);
                    }
                    return Ok(lease);
                }
                Some(Entry::Released(handle)) => match pool.lease(*handle) {
                    // A holder remains, so this resource is still the key's resource.
                    Ok(lease) => {
                        if keep {
                            keyed.entries.insert(key.clone(), Entry::Ready(lease.clone()));
                        }
                        return Ok(lease);
                    }
                    Err(occupied @ Error::Occupied { .. }) => return Err(occupied),
                    Err(_) => {}
                },
                None => {}
            }
            if keyed.entries.len() >= keyed.full {
                keyed.prune(|old| pool.is_alive(old));
            }
            let attempt =
                Arc::new(Attempt { outcome: Mutex::new(None), done: Condvar::new(), by: me });
            keyed.entries.insert(key.clone(), Entry::Pending(attempt.clone()));
            attempt
        };
        let mut finish = Finish { manager: self, key, attempt: &attempt, keep, outcome: None };
        let outcome = pool.acquire_new(request);
        finish.outcome = Some(outcome.clone());
        outcome
    }

    /// Keeps the resource of a key that its holders had alone.
    fn keep(&self, key: &K, lease: &Lease<R::Payload>) {
        if let Some(entry) = self.keyed.lock().entries.get_mut(key)
            && matches!(entry, Entry::Released(handle) if *handle == lease.handle())
        {
            *entry = Entry::Ready(lease.clone());
        }
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
        // Outside the lock: the note may hold the last reference to the attempt's lease.
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

    /// Drops the manager's own lease on a keyed resource. Other holders are not affected; while one
    /// remains, the key still finds the resource.
    ///
    /// # Errors
    /// `StaleHandle` if no key of this manager has that resource.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        let mut keyed = self.keyed.lock();
        keyed.prune(|old| self.is_alive(old));
        let found = keyed
            .entries
            .values_mut()
            .find(|e| matches!(e, Entry::Ready(own) if own.handle() == handle));
        let Some(entry) = found else { return Err(Error::stale(R::NAME, handle)) };
        let own = std::mem::replace(entry, Entry::Released(handle));
        drop(keyed);
        // Outside the lock: this drop may destroy the resource.
        drop(own);
        Ok(())
    }

    /// Returns whether the manager has a lease of its own on a keyed resource.
    pub fn keeps(&self, handle: Handle<TagOf<R>>) -> bool {
        let keyed = self.keyed.lock();
        keyed.entries.values().any(|e| matches!(e, Entry::Ready(own) if own.handle() == handle))
    }

    /// The number of resources with a holder other than the manager (a snapshot). Keyed resources
    /// that only the manager holds do not count.
    pub fn in_use(&self) -> u64 {
        let kept = {
            let keyed = self.keyed.lock();
            let alone =
                |e: &&Entry<R>| matches!(e, Entry::Ready(lease) if lease.strong_count() == 1);
            keyed.entries.values().filter(alone).count() as u64
        };
        self.stats().live.saturating_sub(kept)
    }

    /// The number of keys, without those whose resources are gone.
    pub fn keys(&self) -> usize {
        let mut keyed = self.keyed.lock();
        keyed.prune(|old| self.is_alive(old));
        keyed.entries.len()
    }

    /// Destroys idle resources until at most `keep` are left, and forgets the keys whose resources
    /// are gone. Returns the number destroyed.
    pub fn trim(&self, keep: u64) -> u64 {
        self.keyed.lock().prune(|old| self.is_alive(old));
        self.pool.get().map_or(0, |p| p.trim(keep))
    }

    /// The pool's statistics.
    pub fn stats(&self) -> PoolStats {
        self.pool.get().map(SlotPool::stats).unwrap_or_default()
    }

    /// Shuts the manager down. The manager must be the only holder of its resources.
    ///
    /// The decision comes before any destruction, and destruction runs without a lock. A second
    /// shutdown returns `Ok`, and so does the shutdown of a manager that was never configured.
    ///
    /// # Errors
    /// `LeasesOutstanding` if other holders remain; then nothing has changed. A creation in
    /// progress counts as a lease.
    pub fn shutdown(&self) -> Result<()> {
        let Some(pool) = self.pool.get() else { return Ok(()) };
        let ended: Vec<_> = {
            let mut keyed = self.keyed.lock();
            let own = keyed.entries.values().filter_map(|entry| match entry {
                Entry::Ready(lease) => Some(lease),
                Entry::Pending(_) | Entry::Released(_) => None,
            });
            if pool.decide(own)? == ShutdownOutcome::WasDown {
                return Ok(());
            }
            // The pool will refuse an attempt that has not started its creation; the attempt then
            // removes its own entry.
            keyed.entries.extract_if(|_, entry| !matches!(entry, Entry::Pending(_))).collect()
        };
        pool.destroy_all_idle();
        drop(ended);
        Ok(())
    }
}

/// Publishes an attempt's outcome, also if the creation panics.
struct Finish<'a, R: Resource, K: Eq + Hash + Clone> {
    manager: &'a PoolManager<R, K>,
    key: &'a K,
    attempt: &'a AttemptOf<R>,
    keep: bool,
    outcome: Option<Result<Lease<R::Payload>>>,
}

impl<R: Resource, K: Eq + Hash + Clone> Drop for Finish<'_, R, K> {
    fn drop(&mut self) {
        let outcome = self.outcome.take().unwrap_or_else(|| {
            Err(Error::state(format!("the creation of a {} panicked", R::NAME)))
        });
        {
            let mut keyed = self.manager.keyed.lock();
            match &outcome {
                Ok(lease) => {
                    let entry = match self.keep {
                        true => Entry::Ready(lease.clone()),
                        false => Entry::Released(lease.handle()),
                    };
                    drop(keyed.entries.insert(self.key.clone(), entry));
                }
                Err(_) => drop(keyed.entries.remove(self.key)),
            }
        }
        *self.attempt.outcome.lock() = Some(outcome);
        self.attempt.done.notify_all();
    }
}

impl<R: Resource, K> fmt::Debug for PoolManager<R, K> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("PoolManager")
            .field("resource", &R::NAME)
            .field("pool", &self.pool.get())
            .finish()
    }
}

/// A store for a fixed number of indexed resources, such as the devices of a machine.
///
/// The store creates each resource once, at its first use. The index is the store's key. The slot
/// of a resource, and so [`Handle::index`], may differ from the store's index after the resource
/// was destroyed and created again. The payload itself must therefore keep its index.
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
    /// A store for `count` resources, which `resource` creates.
    ///
    /// # Errors
    /// `InvalidArgument` if `count` exceeds 2^24 - 1.
    pub fn new(resource: R, count: u32) -> Result<Self> {
        let manager = PoolManager::new();
        manager.configure(
            resource,
            PoolConfig {
                block: count.max(1),
                max_live: Some(count.max(1)),
                ..PoolConfig::default()
            },
        )?;
        Ok(Self { count, manager })
    }

    /// The resource type's operations.
    ///
    /// # Errors
    /// `InvalidState` for a store that was made without them, by `default`.
    pub fn resource(&self) -> Result<&R> {
        self.manager.pool().map(SlotPool::resource)
    }

    /// The number of resources.
    pub fn len(&self) -> u32 {
        self.count
    }

    /// Returns whether the store has no resources.
    pub fn is_empty(&self) -> bool {
        self.count == 0
    }

    /// Returns the handle of the resource at `index`; creates the resource unless it is alive.
    ///
    /// # Errors
    /// `NotFound` if the index is out of range; the error of `create`.
    pub fn ensure_alive(
        &self,
        index: Index<TagOf<R>>,
        request: &R::Request<'_>,
    ) -> Result<Handle<TagOf<R>>> {
        self.get(index, request).map(|lease| lease.handle())
    }

    /// A lease on the resource at `index`, which is created unless it is alive.
    ///
    /// # Errors
    /// As [`ensure_alive`](Self::ensure_alive).
    pub fn get(
        &self,
        index: Index<TagOf<R>>,
        request: &R::Request<'_>,
    ) -> Result<Lease<R::Payload>> {
        let index = index.get();
        if index >= self.count {
            return Err(Error::NotFound(
                format!("{} {index}: there are {}", R::NAME, self.count).into(),
            ));
        }
        self.manager.get_or_create(&index, request)
    }

    /// The resource at `index`, if it is alive.
    pub fn existing(&self, index: Index<TagOf<R>>) -> Option<Lease<R::Payload>> {
        self.manager.get(&index.get())
    }

    /// A lease on the handle's resource.
    ///
    /// # Errors
    /// `StaleHandle`, `Occupied`.
    #[doc(alias = "get_state")]
    pub fn lease(&self, handle: Handle<TagOf<R>>) -> Result<Lease<R::Payload>> {
        self.manager.lease(handle)
    }

    /// Returns whether the handle's resource is alive. One load.
    pub fn is_alive(&self, handle: Handle<TagOf<R>>) -> bool {
        self.manager.is_alive(handle)
    }

    /// Drops the store's own lease. Other holders are not affected.
    ///
    /// # Errors
    /// `StaleHandle`.
    pub fn release(&self, handle: Handle<TagOf<R>>) -> Result<()> {
        self.manager.release(handle)
    }

    /// The statistics of the store's pool.
    pub fn stats(&self) -> PoolStats {
        self.manager.stats()
    }

    /// Shuts the store down.
    ///
    /// # Errors
    /// `LeasesOutstanding` if other holders remain; then nothing has changed.
    pub fn shutdown(&self) -> Result<()> {
        self.manager.shutdown()
    }
}

impl<R: Resource> fmt::Debug for FixedSlotStore<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("FixedSlotStore")
            .field("count", &self.count)
            .field("manager", &self.manager)
            .finish()
    }
}
