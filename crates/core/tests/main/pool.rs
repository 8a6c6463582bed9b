//! Slot pools: growth, addresses, requests, budgets, statistics.

use crate::support::*;
use leasehold_core::*;

#[test]
fn refuses_a_configuration_that_cannot_work() {
    for (what, bad) in [
        ("block of zero", PoolConfig { block: 0, ..config() }),
        ("block beyond the index", PoolConfig { block: 1 << 24, ..config() }),
        ("initial beyond the index", PoolConfig { initial: 1 << 24, ..config() }),
        ("no generations", PoolConfig { generations: 0, ..config() }),
        ("no resources", PoolConfig { max_live: Some(0), ..config() }),
    ] {
        assert_eq!(kind(SlotPool::new(Items::default(), bad)), "InvalidArgument", "{what}");
    }
    let (pool, log) = pool(PoolConfig { initial: 100, ..config() });
    assert_eq!(log.counts(), (0, 0, 0), "slots are made, resources are not");
    assert_eq!(pool.stats(), PoolStats::default());
}

#[test]
fn addresses_are_stable_while_the_pool_grows() {
    let (pool, _) = pool(PoolConfig { block: 1, ..config() });
    let leases: Vec<_> = (0..1000).map(|_| pool.acquire(&want(1)).unwrap()).collect();
    let at: Vec<_> = leases.iter().map(|l| std::ptr::from_ref(&**l)).collect();
    let more: Vec<_> = (0..5000).map(|_| pool.acquire(&want(1)).unwrap()).collect();
    for (i, lease) in leases.iter().enumerate() {
        assert_eq!(at[i], std::ptr::from_ref(&**lease));
        assert_eq!(lease.number, i as u64);
        assert_eq!(std::ptr::from_ref(&*pool.lease(lease.handle()).unwrap()), at[i]);
    }
    drop((leases, more));
    assert_eq!(pool.stats().idle, 6000);
}

#[test]
fn an_idle_resource_serves_only_what_it_fits() {
    both(|config| {
        let (pool, log) = pool(config);
        let small = pool.acquire(&want(1)).unwrap();
        let large = pool.acquire(&want(100)).unwrap();
        drop((small, large));
        assert_eq!(pool.acquire(&want(50)).unwrap().size, 100);
        let (a, b) = (pool.acquire(&want(50)).unwrap(), pool.acquire(&want(50)).unwrap());
        assert_eq!((a.size, b.size), (100, 50));
        let c = pool.acquire(&want(1)).unwrap();
        assert_eq!(c.size, 1);
        assert_eq!(log.counts().0, 3);
    });
}

#[test]
fn max_live_bounds_what_exists_and_idle_ones_make_room() {
    both(|config| {
        let (pool, log) = pool(PoolConfig { max_live: Some(2), ..config });
        let a = pool.acquire(&want(1)).unwrap();
        let b = pool.acquire(&want(1)).unwrap();
        let error = pool.acquire(&want(1)).unwrap_err();
        assert!(
            matches!(error, Error::OverBudget { requested: 1, used: 2, limit: 2, .. }),
            "{error}"
        );
        assert_eq!(kind(pool.acquire_unique(&want(1))), "OverBudget");
        drop(a);
        let c = pool.acquire(&want(1000)).expect("the idle one is too small and makes room");
        assert_eq!((log.alive(), log.counts().2), (2, 1));
        drop((b, c));
        log.set(|l| &l.fail_create, true);
        assert_eq!(kind(pool.acquire_new(&want(1))), "Unavailable");
        log.set(|l| &l.fail_create, false);
        let two = (pool.acquire_new(&want(1)).unwrap(), pool.acquire_new(&want(1)).unwrap());
        assert_eq!(
            kind(pool.acquire(&want(1))),
            "OverBudget",
            "a failed creation gave its reservation back"
        );
        drop(two);
    });
}

#[test]
fn acquire_new_leaves_idle_ones_alone() {
    let (pool, _) = pool(config());
    drop(pool.acquire(&want(1)).unwrap());
    let new = pool.acquire_new(&want(1)).unwrap();
    assert_eq!(new.number, 1);
    assert_eq!(pool.stats().idle, 1);
}

#[test]
fn trim_destroys_what_is_idle() {
    both(|config| {
        let (pool, log) = pool(config);
        let kept = pool.acquire(&want(1)).unwrap();
        drop((0..9).map(|_| pool.acquire(&want(1)).unwrap()).collect::<Vec<_>>());
        assert_eq!(pool.stats().idle, 9);
        assert_eq!(pool.trim(4), 5);
        assert_eq!((pool.stats().idle, log.alive()), (4, 5));
        assert_eq!(pool.trim(0), 4);
        assert_eq!(pool.trim(0), 0);
        assert_eq!(log.alive(), 1);
        assert_eq!(kept.number, 0);
        drop(pool.acquire(&want(1)).unwrap());
    });
}

#[test]
fn answers_created_live_recycled_and_peak() {
    both(|config| {
        let (pool, log) = pool(config);
        let a = pool.acquire(&want(1)).unwrap();
        let b = pool.acquire(&want(1)).unwrap();
        drop(a);
        let c = pool.acquire(&want(1)).unwrap();
        let weak = c.downgrade();
        log.set(|l| &l.fail_create, true);
        assert_eq!(kind(pool.acquire(&want(1))), "Unavailable");
        log.set(|l| &l.fail_create, false);
        let expected =
            PoolStats { created: 2, live: 2, recycled: 1, peak: 2, idle: 0, retired: 0, weak: 1 };
        assert_eq!(pool.stats(), expected);
        drop((b, c, weak));
        assert_eq!(pool.trim(0), 2);
        drop(pool.acquire(&want(1)).unwrap());
        let expected =
            PoolStats { created: 3, live: 0, recycled: 1, peak: 2, idle: 1, retired: 0, weak: 0 };
        assert_eq!(pool.stats(), expected);
        assert!(format!("{pool:?}").contains("item"));
    });
}

#[test]
fn a_creation_may_acquire_from_its_own_pool() {
    let (pool, _) = pool(config());
    let inner = |_| drop(pool.acquire(&want(2)).unwrap());
    let outer = pool.acquire(&Want { during: Some(&inner), ..want(5) }).unwrap();
    assert_eq!(outer.size, 5);
    assert_eq!(pool.stats().idle, 1);
}

#[test]
fn a_handle_told_by_a_creation_lives_once_the_lease_does() {
    let (pool, log) = pool(config());
    let told = leasehold_core::sync::Mutex::new(None);
    let tell = |handle| {
        *told.lock() = Some(handle);
        assert!(!pool.is_alive(handle));
    };
    let lease = pool.acquire(&Want { during: Some(&tell), ..want(1) }).unwrap();
    assert_eq!(*told.lock(), Some(lease.handle()));
    log.set(|l| &l.fail_create, true);
    assert!(pool.acquire(&Want { during: Some(&tell), ..want(1) }).is_err());
    log.set(|l| &l.fail_create, false);
    let of_failed = told.lock().unwrap();
    let next = pool.acquire(&want(1)).unwrap();
    assert_eq!(next.handle().index(), of_failed.index());
    assert!(!pool.is_alive(of_failed), "the handle of a creation that failed never comes alive");
}

#[test]
fn many_threads_never_share_what_is_exclusive() {
    both(|config| {
        let (pool, log) = pool(PoolConfig { max_live: Some(8), ..config });
        let held = [const { sync::atomic::AtomicBool::new(false) }; 64];
        std::thread::scope(|s| {
            for _ in 0..8 {
                s.spawn(|| {
                    for _ in 0..2000 {
                        let mut lease =
                            pool.acquire_unique(&want(1)).expect("eight threads, eight resources");
                        let mine = &held[lease.number as usize];
                        assert!(!mine.swap(true, sync::atomic::Ordering::SeqCst));
                        lease.text = "x".into();
                        mine.store(false, sync::atomic::Ordering::SeqCst);
                    }
                });
            }
        });
        assert!(log.counts().0 <= 8, "idle resources were used again");
        let stats = pool.stats();
        assert_eq!(stats.created + stats.recycled, 16_000);
        assert!(stats.peak <= 8);
    });
}
