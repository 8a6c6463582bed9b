//! Shutdown and the destruction of pools.

use crate::support::*;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering::SeqCst};
use leasehold_core::*;

fn outstanding(result: Result<()>) -> (u64, u64) {
    match result {
        Err(Error::LeasesOutstanding { resource: "item", strong, weak }) => (strong, weak),
        other => panic!("expected outstanding leases, got {other:?}"),
    }
}

#[test]
fn shutdown_with_leases_out_says_how_many_and_changes_nothing() {
    both(|config| {
        let (pool, log) = pool(PoolConfig { max_live: Some(5), ..config });
        let a = pool.acquire(&want(1)).unwrap();
        let b = pool.acquire_unique(&want(1)).unwrap();
        let weak = a.downgrade();
        drop(pool.acquire(&want(9)).unwrap());
        let before = (pool.stats(), log.counts());
        assert_eq!(outstanding(pool.shutdown()), (2, 1));
        assert_eq!(outstanding(pool.shutdown()), (2, 1));
        assert!(!pool.is_shut_down());
        assert_eq!((pool.stats(), log.counts()), before);
        assert!(pool.lease(a.handle()).is_ok() && weak.upgrade().is_some());
        assert_eq!(pool.acquire(&want(9)).unwrap().number, 2, "the idle one still serves");
        drop((a, b));
        assert_eq!(outstanding(pool.shutdown()), (0, 1), "a weak lease counts, too");
        drop(weak);
        pool.shutdown().unwrap();
        assert_eq!(log.alive(), 0);
    });
}

#[test]
fn after_shutdown_nothing_is_lent_and_a_second_one_is_ok() {
    both(|config| {
        let (pool, log) = pool(config);
        let handle = {
            let lease = pool.acquire(&want(1)).unwrap();
            lease.handle()
        };
        pool.shutdown().unwrap();
        pool.shutdown().unwrap();
        assert!(pool.is_shut_down());
        assert_eq!(log.alive(), 0);
        assert_eq!(kind(pool.acquire(&want(1))), "InvalidState");
        assert_eq!(kind(pool.acquire_unique(&want(1))), "InvalidState");
        assert_eq!(kind(pool.acquire_new(&want(1))), "InvalidState");
        assert_eq!(kind(pool.lease(handle)), "StaleHandle");
        assert!(!pool.is_alive(handle));
        assert_eq!(pool.trim(0), 0);
        assert_eq!(log.counts().0, 1);
    });
}

#[test]
fn own_leases_do_not_count_and_nobody_gets_hold_of_them_afterwards() {
    both(|config| {
        let (pool, log) = pool(config);
        let own = [pool.acquire(&want(1)).unwrap(), pool.acquire(&want(1)).unwrap()];
        let handle = own[0].handle();
        let other = pool.lease(handle).unwrap();
        assert_eq!(outstanding(pool.shutdown_with(&own)), (1, 0));
        assert!(pool.lease(own[1].handle()).is_ok(), "thawed");
        drop(other);
        pool.shutdown_with(&own).unwrap();
        // Regression: a look-up between the decision and the end got a lease on a resource that was
        // about to be destroyed.
        assert_eq!(kind(pool.lease(handle)), "StaleHandle");
        assert_eq!(log.alive(), 2);
        drop(own);
        assert_eq!(log.alive(), 0, "ended, not idle in a pool that is down");
    });
}

#[test]
fn leases_of_another_pool_are_no_leases_of_ones_own() {
    both(|config| {
        let (mine, _) = pool(config.clone());
        let (other, _) = pool(config);
        let held = mine.acquire(&want(1)).unwrap();
        let theirs = [other.acquire(&want(1)).unwrap()];
        let handle = theirs[0].handle();
        assert_eq!(outstanding(mine.shutdown_with(&theirs)), (1, 0));
        drop(held);
        mine.shutdown_with(&theirs).unwrap();
        // Regression: another pool's lease stayed frozen, so looking it up never ended.
        assert!(other.lease(handle).is_ok());
    });
}

#[test]
fn leases_may_outlive_the_pool() {
    both(|config| {
        let (pool, log) = pool(config);
        drop(pool.acquire(&want(9)).unwrap());
        let mut unique = pool.acquire_unique(&want(10)).unwrap();
        let lease = pool.acquire(&want(1)).unwrap();
        let weak = lease.downgrade();
        drop(pool);
        assert_eq!(log.alive(), 2, "the idle one went with its pool");
        unique.text = "still mine".into();
        let unique = unique.share();
        assert_eq!(&*unique.text, "still mine");
        assert!(weak.upgrade().unwrap().same(&lease));
        drop(lease);
        assert!(weak.upgrade().is_none());
        drop(unique);
        assert_eq!(log.alive(), 0, "a resource without a pool does not wait for requests");
        drop(weak);
    });
}

/// The last lease frees the pool, including its resource type, on any thread.
#[test]
fn the_last_lease_frees_the_pool() {
    both(|config| {
        for round in 0..200 {
            let (pool, log) = pool(config.clone());
            let leases: Vec<_> = (0..3).map(|_| pool.acquire(&want(1)).unwrap()).collect();
            let weak = leases[0].downgrade();
            std::thread::scope(|s| {
                for lease in leases {
                    s.spawn(move || drop(lease));
                }
                s.spawn(move || drop(weak));
                if round % 2 == 0 {
                    s.spawn(move || drop(pool));
                } else {
                    drop(pool);
                }
            });
            // The resource type held one count of the log, each payload another.
            assert_eq!(Arc::strong_count(&log), 1);
            assert_eq!(log.alive(), 0);
        }
    });
}

#[test]
fn a_worn_or_retired_slot_does_not_keep_an_orphaned_pool() {
    let (pool, log) = pool(PoolConfig { generations: 1, ..config() });
    let (a, b) = (pool.acquire(&want(1)).unwrap(), pool.acquire(&want(1)).unwrap());
    drop(a);
    drop(pool);
    log.set(|l| &l.panic_recycle, true);
    drop(b);
    assert_eq!((log.alive(), Arc::strong_count(&log)), (0, 1));
}

/// Acquires and releases continue while shutdowns decide: no lease is lost, and none is given after
/// the end.
#[test]
fn shutdown_beside_acquire_and_release() {
    both(|config| {
        for _ in 0..20 {
            let (pool, log) = pool(PoolConfig { max_live: Some(4), ..config.clone() });
            let stop = AtomicBool::new(false);
            std::thread::scope(|s| {
                let workers: Vec<_> = (0..3)
                    .map(|_| {
                        s.spawn(|| {
                            let mut served = 0u32;
                            while !stop.load(SeqCst) {
                                match pool.acquire(&want(1)) {
                                    Ok(lease) => {
                                        assert!(pool.is_alive(lease.handle()));
                                        served += 1;
                                    }
                                    Err(e) => {
                                        assert_eq!(e.kind(), "InvalidState");
                                        return served;
                                    }
                                }
                                if served.is_multiple_of(8) {
                                    std::thread::yield_now();
                                }
                            }
                            served
                        })
                    })
                    .collect();
                let mut refused = 0;
                while let Err(e) = pool.shutdown() {
                    assert_eq!(e.kind(), "LeasesOutstanding");
                    refused += 1;
                    if refused > 2000 {
                        stop.store(true, SeqCst);
                    }
                    std::thread::yield_now();
                }
                for worker in workers {
                    worker.join().unwrap();
                }
            });
            assert_eq!(log.alive(), 0);
            assert_eq!(pool.stats().idle + pool.stats().live, 0);
        }
    });
}

#[test]
fn a_life_is_configured_once_ended_once_and_never_again() {
    let life = LifeCycle::new();
    assert!(!life.is_configured());
    let failed = life.configure("thing", || Err(Error::invalid("no")));
    assert_eq!(failed.unwrap_err().kind(), "InvalidArgument");
    // All-or-nothing: tried again after a failure, and after a panic.
    let panicked = std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
        life.configure("thing", || panic!("wanted"))
    }));
    assert!(panicked.is_err() && !life.is_configured());
    life.configure("thing", || {
        // No lock is held during the call.
        assert!(!life.is_configured());
        Ok(())
    })
    .unwrap();
    assert!(life.is_configured());
    assert_eq!(life.configure("thing", || unreachable!()).unwrap_err().kind(), "InvalidState");
    let refused =
        life.shutdown(|| Err(Error::LeasesOutstanding { resource: "item", strong: 1, weak: 0 }));
    assert_eq!(outstanding(refused), (1, 0));
    assert!(life.is_configured(), "nothing has changed");
    life.shutdown(|| Ok(())).unwrap();
    life.shutdown(|| unreachable!()).unwrap();
    let again = life.configure("thing", || unreachable!()).unwrap_err();
    assert!(again.kind() == "InvalidState" && again.to_string().contains("shut down"), "{again}");
    let never = LifeCycle::new();
    never.shutdown(|| unreachable!()).unwrap();
    assert_eq!(never.configure("thing", || unreachable!()).unwrap_err().kind(), "InvalidState");
}

#[test]
fn who_comes_while_a_life_changes_waits_for_the_outcome_and_can_look_at_once() {
    use std::sync::mpsc::channel;
    let life = LifeCycle::new();
    let (begun, began) = channel();
    let (go, gone) = channel();
    std::thread::scope(|scope| {
        let life = &life;
        let first = scope.spawn(move || {
            life.configure("thing", || {
                begun.send(()).unwrap();
                gone.recv().unwrap();
                Ok(())
            })
        });
        began.recv().unwrap();
        // The other thread is inside the call, and holds no lock that this one needs.
        assert!(!life.is_configured());
        assert_eq!(format!("{life:?}"), "changing");
        let second = scope.spawn(|| life.configure("thing", || unreachable!()));
        go.send(()).unwrap();
        first.join().unwrap().unwrap();
        assert_eq!(second.join().unwrap().unwrap_err().kind(), "InvalidState");
    });
}
