//! Keyed creation by many threads at once.

use crate::support::*;
use leasehold_core::sync::atomic::{AtomicU32, Ordering::SeqCst};
use leasehold_core::*;
use std::sync::Barrier;
use std::time::Duration;

const THREADS: usize = 16;

/// Runs `f` on 16 threads that start together.
fn together<T: Send>(f: impl Fn(usize) -> T + Sync) -> Vec<T> {
    let start = Barrier::new(THREADS);
    std::thread::scope(|s| {
        let run = |i| {
            start.wait();
            f(i)
        };
        let threads: Vec<_> = (0..THREADS).map(|i| s.spawn(move || run(i))).collect();
        threads.into_iter().map(|t| t.join().unwrap()).collect()
    })
}

#[test]
fn sixteen_threads_create_a_key_once() {
    for _ in 0..20 {
        let (manager, log) = manager(config());
        let slow = |_| std::thread::sleep(Duration::from_micros(200));
        let leases = together(|_| {
            manager.get_or_create(&1, &Want { during: Some(&slow), ..want(1) }).unwrap()
        });
        assert!(leases.windows(2).all(|w| w[0].same(&w[1])));
        assert_eq!(log.counts().0, 1);
        assert_eq!(leases[0].strong_count() as usize, THREADS + 1, "waiting left no lease behind");
    }
}

#[test]
fn keys_are_created_beside_each_other() {
    let (manager, log) = manager(config());
    // Every creation waits until all sixteen run: with a lock around creation this would never end.
    let all = Barrier::new(THREADS);
    let meet = |_| {
        all.wait();
    };
    let leases = together(|i| {
        manager.get_or_create(&(i as u32), &Want { during: Some(&meet), ..want(1) }).unwrap()
    });
    assert_eq!(log.counts().0 as usize, THREADS);
    drop(leases);
    manager.shutdown().unwrap();
}

#[test]
fn waiters_share_a_failure_and_the_next_call_tries_again() {
    for panics in [false, true] {
        let (manager, log) = manager(config());
        let attempts = AtomicU32::new(0);
        let waiting = |_| {
            attempts.fetch_add(1, SeqCst);
            std::thread::sleep(Duration::from_millis(100));
        };
        log.set(|l| if panics { &l.panic_create } else { &l.fail_create }, true);
        let outcomes = together(|_| {
            let request = Want { during: Some(&waiting), ..want(1) };
            std::panic::catch_unwind(std::panic::AssertUnwindSafe(|| {
                kind(manager.get_or_create(&1, &request))
            }))
            .unwrap_or("panicked")
        });
        let shared = if panics { "InvalidState" } else { "Unavailable" };
        let own = outcomes.iter().filter(|&&o| o == "panicked").count() as u32;
        assert!(outcomes.iter().all(|&o| o == shared || o == "panicked"), "{outcomes:?}");
        if panics {
            assert_eq!(own, attempts.load(SeqCst));
        }
        // Sixteen threads start together, and each attempt takes 100 ms: on any machine most of
        // them wait.
        assert!(attempts.load(SeqCst) < THREADS as u32 / 2, "{attempts:?}");
        log.set(|l| if panics { &l.panic_create } else { &l.fail_create }, false);
        assert_eq!(kind(manager.get_or_create(&1, &want(1))), "Ok");
        manager.shutdown().unwrap();
    }
}

/// Two creations that request each other's key would wait for ever; one of them is refused.
#[test]
fn creations_that_wait_for_each_other_are_refused() {
    let (manager, _) = manager(config());
    let both = Barrier::new(2);
    let create = |mine: u32, other: u32| {
        let inner = sync::Mutex::new("");
        let ask = |_| {
            both.wait();
            *inner.lock() = kind(manager.get_or_create(&other, &want(1)));
        };
        drop(manager.get_or_create(&mine, &Want { during: Some(&ask), ..want(1) }).unwrap());
        inner.into_inner()
    };
    let seen = std::thread::scope(|s| {
        let a = s.spawn(|| create(1, 2));
        let b = s.spawn(|| create(2, 1));
        [a.join().unwrap(), b.join().unwrap()]
    });
    let mut sorted = seen;
    sorted.sort_unstable();
    assert_eq!(sorted, ["InvalidState", "Ok"]);
}

/// Regression: a shutdown took the ready leases out of the map during its decision, and a second
/// resource was created for the key.
#[test]
fn a_refused_shutdown_beside_get_or_create_makes_no_second_one() {
    let (manager, log) = manager(config());
    let held = manager.get_or_create(&1, &want(1)).unwrap();
    together(|i| {
        for _ in 0..200 {
            if i % 4 == 0 {
                assert_eq!(kind(manager.shutdown()), "LeasesOutstanding");
            } else {
                assert!(manager.get_or_create(&1, &want(1)).unwrap().same(&held));
                assert!(manager.lease(held.handle()).unwrap().same(&held));
            }
        }
    });
    assert_eq!(log.counts(), (1, 0, 0));
}

#[test]
fn shutdown_beside_get_or_create_and_release() {
    for _ in 0..20 {
        let (manager, log) = manager(config());
        together(|i| {
            for key in 0..50 {
                let key = key % 5;
                match manager.get_or_create(&key, &want(1)) {
                    Ok(lease) if i % 3 == 0 => drop(manager.release(lease.handle())),
                    Ok(_) => {}
                    Err(e) => assert_eq!(e.kind(), "InvalidState"),
                }
                if i == 1 && key == 4 {
                    let _ = manager.shutdown();
                }
            }
        });
        manager.shutdown().unwrap();
        assert_eq!(log.alive(), 0);
    }
}
