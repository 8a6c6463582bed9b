//! Panics: no slot is lost, no drop of a lease panics, and no half-made resource is used.

use crate::support::*;
use leasehold_core::*;

#[test]
fn a_thousand_failed_creations_lose_no_slot() {
    let (pool, log) = pool(PoolConfig { initial: 2, max_live: Some(2), ..config() });
    log.set(|l| &l.fail_create, true);
    for _ in 0..1000 {
        assert_eq!(kind(pool.acquire(&want(1))), "Unavailable");
    }
    log.set(|l| &l.fail_create, false);
    log.set(|l| &l.panic_create, true);
    for _ in 0..50 {
        panics(|| drop(pool.acquire(&want(1))));
    }
    log.set(|l| &l.panic_create, false);
    let two = (pool.acquire(&want(1)).unwrap(), pool.acquire(&want(1)).unwrap());
    assert!(two.0.handle().index() < 2 && two.1.handle().index() < 2, "the pool did not grow");
    assert_eq!(pool.stats(), PoolStats { created: 2, live: 2, peak: 2, ..PoolStats::default() });
    drop(two);
    pool.shutdown().unwrap();
}

#[test]
fn a_panic_in_recycle_retires_the_slot_and_the_drop_goes_on() {
    both(|config| {
        let (pool, log) = pool(config);
        let lease = pool.acquire(&want(1)).unwrap();
        let old = lease.handle();
        log.set(|l| &l.panic_recycle, true);
        drop(lease);
        log.set(|l| &l.panic_recycle, false);
        assert_eq!(
            pool.stats(),
            PoolStats { created: 1, peak: 1, retired: 1, ..PoolStats::default() }
        );
        assert_eq!(log.alive(), 0, "the payload was ended all the same");
        assert!(!pool.is_alive(old));
        assert_ne!(pool.acquire(&want(1)).unwrap().handle().index(), old.index());
        pool.shutdown().expect("a retired slot is not held");
    });
}

#[test]
fn a_panic_in_destroy_retires_the_slot_and_the_drop_goes_on() {
    both(|config| {
        let (pool, log) = pool(config);
        log.set(|l| &l.destroy_at_once, true);
        let lease = pool.acquire(&want(1)).unwrap();
        log.set(|l| &l.panic_destroy, true);
        drop(lease);
        assert_eq!(pool.stats().retired, 1);
        log.set(|l| &l.destroy_at_once, false);
        drop((pool.acquire(&want(1)).unwrap(), pool.acquire(&want(1)).unwrap()));
        assert_eq!(pool.trim(0), 2);
        assert_eq!(
            pool.stats(),
            PoolStats { created: 3, peak: 2, retired: 3, ..PoolStats::default() }
        );
        drop(pool.acquire(&want(1)).unwrap());
        pool.shutdown().unwrap();
        assert_eq!(log.alive(), 0);
    });
}

/// Regression: `fits` ran without a guard, so a panic lost the slot, and every later shutdown
/// failed.
#[test]
fn a_panic_in_fits_retires_the_slot() {
    both(|config| {
        let (pool, log) = pool(config);
        drop((0..3).map(|_| pool.acquire(&want(1)).unwrap()).collect::<Vec<_>>());
        log.set(|l| &l.panic_fits, true);
        panics(|| drop(pool.acquire(&want(1))));
        log.set(|l| &l.panic_fits, false);
        let stats = pool.stats();
        assert_eq!((stats.retired, stats.idle, log.alive()), (1, 2, 2));
        pool.shutdown().unwrap();
    });
}

#[test]
fn leases_drop_during_unwinding() {
    let (pool, log) = pool(config());
    log.set(|l| &l.panic_recycle, true);
    let lease = pool.acquire(&want(1)).unwrap();
    panics(move || {
        let _held = lease;
        panic!("the holder's own");
    });
    assert_eq!(pool.stats().retired, 1);
}

/// A panic value whose own drop panics.
#[test]
fn not_even_the_thrown_value_makes_a_drop_panic() {
    struct Bomb;
    impl Drop for Bomb {
        fn drop(&mut self) {
            std::panic::panic_any("the thrown value's drop");
        }
    }
    struct Thrower;
    struct Thing;
    impl Tagged for Thing {
        type Tag = tags::Event;
    }
    impl Resource for Thrower {
        type Payload = Thing;
        type Request<'a> = ();
        const NAME: &'static str = "thing";
        fn create(&self, _: EventHandle, (): &()) -> Result<Thing> {
            Ok(Thing)
        }
        fn recycle(&self, _: &mut Thing) -> Recycle {
            std::panic::panic_any(Bomb)
        }
    }
    impl Drop for Thrower {
        fn drop(&mut self) {
            panic!("the traits type's drop");
        }
    }
    let pool = SlotPool::new(Thrower, PoolConfig::default()).unwrap();
    let (a, b) = (pool.acquire(&()).unwrap(), pool.acquire(&()).unwrap());
    drop(a);
    assert_eq!(pool.stats().retired, 1);
    drop(pool);
    // Frees the pool, and so drops the resource type.
    drop(b);
}
