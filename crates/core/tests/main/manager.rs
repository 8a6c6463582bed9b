//! The contract Manager: life cycle, keyed singletons, release, stores of a fixed size.

use crate::support::*;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::*;

#[test]
fn unconfigured_configured_shut_down() {
    let manager = PoolManager::<Items, u32>::default();
    assert!(!manager.is_configured());
    assert_eq!(kind(manager.acquire(&want(1))), "InvalidState");
    assert_eq!(kind(manager.acquire_unique(&want(1))), "InvalidState");
    assert_eq!(kind(manager.get_or_create(&1, &want(1))), "InvalidState");
    assert_eq!(kind(manager.pool()), "InvalidState");
    assert!(manager.get(&1).is_none());
    assert_eq!(manager.stats(), PoolStats::default());
    assert_eq!(manager.trim(0), 0);
    manager.shutdown().expect("nothing to end");

    // All-or-nothing: a refused configuration leaves the manager unchanged.
    assert_eq!(
        kind(manager.configure(Items::default(), PoolConfig { block: 0, ..config() })),
        "InvalidArgument"
    );
    assert!(!manager.is_configured());
    manager.configure(Items::default(), PoolConfig { initial: 0, ..config() }).unwrap();
    assert!(manager.is_configured());
    assert_eq!(kind(manager.configure(Items::default(), config())), "InvalidState");
    let lease = manager.acquire(&want(1)).unwrap();
    assert!(manager.is_alive(lease.handle()) && manager.lease(lease.handle()).is_ok());
    drop(lease);

    manager.shutdown().unwrap();
    manager.shutdown().unwrap();
    assert_eq!(kind(manager.acquire(&want(1))), "InvalidState");
    assert_eq!(kind(manager.get_or_create(&1, &want(1))), "InvalidState");
    assert_eq!(kind(manager.configure(Items::default(), config())), "InvalidState");
    assert!(format!("{manager:?}").contains("item"));
}

#[test]
fn the_same_key_gives_the_same_resource_until_shutdown() {
    let (manager, log) = manager(config());
    let a = manager.get_or_create(&1, &want(1)).unwrap();
    let b = manager.get_or_create(&1, &want(1)).unwrap();
    let c = manager.get_or_create(&2, &want(1)).unwrap();
    assert!(a.same(&b) && !a.same(&c));
    assert!(manager.get(&1).unwrap().same(&a) && manager.get(&3).is_none());
    let handle = a.handle();
    drop((a, b));
    assert!(manager.is_alive(handle), "the manager's own lease keeps it");
    let error = manager.shutdown().unwrap_err();
    assert!(matches!(error, Error::LeasesOutstanding { strong: 1, weak: 0, .. }), "{error}");
    assert!(manager.get_or_create(&1, &want(1)).unwrap().handle() == handle, "nothing has changed");
    assert_eq!(log.counts(), (2, 0, 0));
    drop(c);
    manager.shutdown().unwrap();
    assert_eq!(log.alive(), 0);
    assert!(!manager.is_alive(handle) && manager.get(&1).is_none());
}

/// Regression: a new key was served with the idle resource of another key.
#[test]
fn a_new_key_never_gets_the_idle_resource_of_another() {
    let (manager, log) = manager(config());
    let handle = manager.get_or_create(&1, &want(1)).unwrap().handle();
    manager.release(handle).unwrap();
    assert_eq!((manager.stats().idle, log.counts().0), (1, 1));
    assert_eq!(manager.get_or_create(&2, &want(1)).unwrap().number, 1);
}

#[test]
fn release_gives_up_only_the_managers_own_lease() {
    let (manager, log) = manager(config());
    let held = manager.get_or_create(&1, &want(1)).unwrap();
    manager.release(held.handle()).unwrap();
    assert_eq!(kind(manager.release(held.handle())), "StaleHandle");
    assert_eq!(held.strong_count(), 1);
    assert!(manager.get(&1).unwrap().same(&held));
    // While a holder exists, the resource stays the one of its key.
    let again = manager.get_or_create(&1, &want(1)).unwrap();
    assert!(again.same(&held));
    assert_eq!(again.strong_count(), 3, "the manager has its own again");
    manager.release(held.handle()).unwrap();
    drop(again);
    // Regression: if the holder had exclusive access, a second resource was created.
    let unique = held.try_unique().unwrap();
    assert_eq!(kind(manager.get_or_create(&1, &want(1))), "Occupied");
    assert!(manager.get(&1).is_none());
    drop(unique);
    assert_eq!(log.counts(), (1, 1, 0));
    assert!(manager.get(&1).is_none());
    assert_eq!(manager.get_or_create(&1, &want(1)).unwrap().number, 1);
    let other = manager.acquire(&want(1)).unwrap();
    assert_eq!(kind(manager.release(other.handle())), "StaleHandle", "no key has it");
}

#[test]
fn a_found_resource_belongs_to_its_holders_until_the_manager_keeps_it() {
    let (manager, _) = manager(config());
    let first = manager.find_or_create(&1, &want(1)).unwrap();
    let second = manager.find_or_create(&1, &want(1)).unwrap();
    assert!(first.same(&second));
    assert_eq!((first.strong_count(), manager.keys(), manager.in_use()), (2, 1, 1));
    drop((first, second));
    assert!(manager.get(&1).is_none());
    assert_eq!(manager.keys(), 0);
    // Keys of the past do not gather.
    for key in 0..1000 {
        drop(manager.find_or_create(&key, &want(1)).unwrap());
    }
    assert_eq!(manager.keys(), 0);
    // A manager that keeps the resource goes on, whoever finds it.
    let found = manager.find_or_create(&1, &want(1)).unwrap();
    assert!(!manager.keeps(found.handle()));
    let kept = manager.get_or_create(&1, &want(1)).unwrap();
    assert!(kept.same(&found));
    let handle = kept.handle();
    drop((found, kept));
    assert!(manager.is_alive(handle) && manager.keeps(handle));
    drop(manager.find_or_create(&1, &want(1)).unwrap());
    manager.release(handle).unwrap();
    assert!(!manager.is_alive(handle) && !manager.keeps(handle));
}

#[test]
fn a_failed_creation_is_forgotten() {
    let (manager, log) = manager(config());
    log.set(|l| &l.fail_create, true);
    assert_eq!(kind(manager.get_or_create(&1, &want(1))), "Unavailable");
    log.set(|l| &l.fail_create, false);
    log.set(|l| &l.panic_create, true);
    panics(|| drop(manager.get_or_create(&1, &want(1))));
    log.set(|l| &l.panic_create, false);
    assert!(manager.get(&1).is_none());
    assert_eq!(manager.get_or_create(&1, &want(1)).unwrap().number, 0);
    manager.shutdown().unwrap();
}

#[test]
fn a_creation_that_asks_for_its_own_key_is_refused() {
    let (manager, _) = manager(config());
    let inner = Mutex::new(None);
    let ask = |_| *inner.lock() = Some(kind(manager.get_or_create(&1, &want(1))));
    let lease = manager.get_or_create(&1, &Want { during: Some(&ask), ..want(1) }).unwrap();
    assert_eq!(*inner.lock(), Some("InvalidState"));
    // Another key is fine.
    let ask = |_| *inner.lock() = Some(kind(manager.get_or_create(&1, &want(1))));
    let other = manager.get_or_create(&2, &Want { during: Some(&ask), ..want(1) }).unwrap();
    assert_eq!(*inner.lock(), Some("Ok"));
    assert!(!lease.same(&other));
}

#[test]
fn a_shutdown_during_a_creation_counts_it_as_held() {
    let (manager, _) = manager(config());
    let seen = Mutex::new(None);
    let shut = |_| *seen.lock() = Some(manager.shutdown());
    let lease = manager.get_or_create(&1, &Want { during: Some(&shut), ..want(1) }).unwrap();
    assert!(matches!(*seen.lock(), Some(Err(Error::LeasesOutstanding { strong: 1, weak: 0, .. }))));
    drop(lease);
    manager.shutdown().unwrap();
}

#[test]
fn nothing_of_the_resource_runs_under_a_lock() {
    struct Reentrant {
        manager: std::sync::Weak<PoolManager<Reentrant, u32>>,
    }
    struct Thing(u32);
    impl Tagged for Thing {
        type Tag = tags::Event;
    }
    impl Reentrant {
        /// Takes the locks of the manager and its pool.
        fn touch(&self) {
            let manager = self.manager.upgrade().expect("the test holds it");
            drop(manager.get(&77));
            assert_eq!(
                kind(manager.release(EventHandle::from_bits(1 << 32).unwrap())),
                "StaleHandle"
            );
            let _ = manager.pool().map(SlotPool::is_shut_down);
            let _ = manager.stats();
            let _ = manager.get_or_create(&99, &99).map(drop);
            let _ = manager.shutdown();
        }
    }
    impl Resource for Reentrant {
        type Payload = Thing;
        type Request<'a> = u32;
        const NAME: &'static str = "thing";
        fn create(&self, _: EventHandle, key: &u32) -> Result<Thing> {
            if *key != 99 {
                self.touch();
            }
            Ok(Thing(*key))
        }
        fn fits(&self, _: &mut Thing, _: &u32) -> bool {
            self.touch();
            true
        }
        fn recycle(&self, thing: &mut Thing) -> Recycle {
            self.touch();
            if thing.0 == 0 { Recycle::Destroy } else { Recycle::Keep }
        }
        fn destroy(&self, _: Thing) {
            self.touch();
        }
    }
    let manager = Arc::new(PoolManager::new());
    manager
        .configure(
            Reentrant { manager: Arc::downgrade(&manager) },
            PoolConfig { block: 1, ..config() },
        )
        .unwrap();
    for key in 0..4 {
        drop(manager.acquire(&key));
        let handle = manager.get_or_create(&key, &key).map(|l| l.handle());
        if key % 2 == 0 {
            let _ = handle.and_then(|h| manager.release(h));
        }
    }
    manager.trim(0);
    while manager.shutdown().is_err() {}
    assert_eq!(manager.stats().idle + manager.stats().live, 0);
}

#[test]
fn a_store_creates_lazily_once_and_by_index() {
    let items = Items::default();
    let log = items.log.clone();
    let store = FixedSlotStore::new(items, 3).unwrap();
    assert!(Arc::ptr_eq(&store.resource().unwrap().log, &log));
    assert_eq!((store.len(), store.is_empty(), log.counts().0), (3, false, 0));
    assert!(store.existing(Index::new(2)).is_none());
    let two = store.ensure_alive(Index::new(2), &want(2)).unwrap();
    assert_eq!(store.ensure_alive(Index::new(2), &want(2)).unwrap(), two);
    let zero = store.ensure_alive(Index::new(0), &want(0)).unwrap();
    // The pool chooses the slot, the caller the index.
    assert_eq!((store.lease(two).unwrap().size, store.lease(zero).unwrap().size), (2, 0));
    assert_eq!(store.existing(Index::new(2)).unwrap().handle(), two);
    assert_eq!(kind(store.ensure_alive(Index::new(3), &want(3))), "NotFound");
    assert_eq!(store.stats().created, 2);

    let held = store.get(Index::new(2), &want(2)).unwrap();
    store.release(two).unwrap();
    assert!(store.is_alive(two), "other holders are untouched");
    drop(held);
    assert!(!store.is_alive(two));
    let anew = store.ensure_alive(Index::new(2), &want(2)).unwrap();
    assert_ne!(anew, two);
    let one = store.ensure_alive(Index::new(1), &want(1)).expect("the idle one makes room");
    assert_eq!(store.lease(one).unwrap().size, 1);
    store.shutdown().unwrap();
    store.shutdown().unwrap();
    assert_eq!(log.alive(), 0);
    assert_eq!(kind(store.get(Index::new(0), &want(0))), "InvalidState");

    let none = FixedSlotStore::new(Items::default(), 0).unwrap();
    assert!(none.is_empty());
    assert_eq!(kind(none.get(Index::new(0), &want(0))), "NotFound");
    assert_eq!(kind(FixedSlotStore::<Items>::default().get(Index::new(0), &want(0))), "NotFound");
    assert_eq!(kind(FixedSlotStore::<Items>::default().resource().map(drop)), "InvalidState");
    assert_eq!(kind(FixedSlotStore::new(Items::default(), u32::MAX)), "InvalidArgument");
}
