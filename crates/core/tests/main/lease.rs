//! The contract Lease: shared, exclusive, claimed and weak holds.

use crate::support::*;
use leasehold_core::*;

#[test]
fn counts_its_clones_and_gives_back_at_zero() {
    both(|config| {
        let (pool, log) = pool(config);
        let a = pool.acquire(&want(1)).unwrap();
        let b = a.clone();
        let c = pool.lease(a.handle()).unwrap();
        assert_eq!(a.strong_count(), 3);
        assert!(a.same(&b) && b.same(&c));
        assert_eq!(a.number, c.number);
        drop((a, b));
        assert_eq!(log.counts(), (1, 0, 0));
        drop(c);
        assert_eq!(log.counts(), (1, 1, 0), "recycled, not destroyed");
        let again = pool.acquire(&want(1)).unwrap();
        assert_eq!(again.number, 0, "the same resource serves the next request");
        assert_eq!(log.counts(), (1, 1, 0));
    });
}

#[test]
fn at_zero_the_traits_type_decides() {
    both(|config| {
        let (pool, log) = pool(config);
        log.set(|l| &l.destroy_at_once, true);
        drop(pool.acquire(&want(1)).unwrap());
        assert_eq!(log.counts(), (1, 1, 1));
        assert_eq!(pool.acquire(&want(1)).unwrap().number, 1);
    });
}

#[test]
fn unique_is_the_sole_holder_with_mut() {
    both(|config| {
        let (pool, _) = pool(config);
        let mut unique = pool.acquire_unique(&want(1)).unwrap();
        unique.text = "mine".into();
        let handle = unique.handle();
        assert!(pool.is_alive(handle));
        let error = pool.lease(handle).unwrap_err();
        assert!(matches!(error, Error::Occupied { resource: "item" }), "{error}");
        assert_eq!(pool.stats().live, 1);

        let shared = unique.share();
        assert_eq!(&*shared.text, "mine");
        assert!(pool.lease(handle).unwrap().same(&shared));

        let weak = shared.downgrade();
        let mut unique = shared.try_unique().expect("the only one");
        assert!(weak.upgrade().is_none());
        assert_eq!(kind(weak.try_upgrade()), "Occupied");
        unique.text = "again".into();
        drop(unique);
        assert_eq!(kind(weak.try_upgrade()), "StaleHandle");
        assert!(!pool.is_alive(handle));
        assert_eq!(pool.stats().idle, 1);
    });
}

#[test]
fn only_clones_lead_to_what_was_shared_unlisted() {
    both(|config| {
        let (pool, _) = pool(config);
        let unique = pool.acquire_unique(&want(1)).unwrap();
        let handle = unique.handle();
        let lease = unique.share_unlisted();
        let (clone, weak) = (lease.clone(), lease.downgrade());
        assert!(clone.same(&lease) && lease.strong_count() == 2 && pool.is_alive(handle));
        assert_eq!(lease.handle(), handle);
        for _ in 0..2 {
            assert_eq!(kind(pool.lease(handle)), "Occupied");
            assert_eq!(kind(weak.try_upgrade()), "Occupied");
        }
        drop(lease);
        assert_eq!(kind(pool.lease(handle)), "Occupied");
        // The last one alone may have it listed again.
        let listed = clone.try_unique().expect("the only one").share();
        assert!(pool.lease(handle).unwrap().same(&listed));
        assert_eq!(kind(listed.clone().unlisted()), "Occupied", "somebody else has it too");
        let unlisted = listed.unlisted().unwrap();
        assert_eq!(kind(pool.lease(handle)), "Occupied");
        drop(unlisted);
        assert_eq!(
            (kind(pool.lease(handle)), kind(weak.try_upgrade())),
            ("StaleHandle", "StaleHandle")
        );
        // The slot's next generation is found.
        let next = pool.acquire(&want(1)).unwrap();
        assert!(pool.lease(next.handle()).is_ok());
    });
}

#[test]
fn unique_is_refused_while_others_hold_or_claim() {
    let (pool, _) = pool(config());
    let a = pool.acquire(&want(1)).unwrap();
    let b = a.clone();
    let a = a.try_unique().expect_err("b holds it");
    drop(b);
    let claim = a.claim().unwrap();
    let a = a.try_unique().expect_err("claimed");
    drop(claim);
    let unique = a.try_unique().expect("free now");
    drop(unique);
}

/// Regression: a mapped lease made unique gave `&mut` to shared data, and a weak lease of a mapped
/// one outlived the data.
#[test]
fn mapped_leases_never_become_unique() {
    static ELSEWHERE: u64 = 7;
    let (pool, _) = pool(config());
    let lease = pool.acquire(&want(1)).unwrap();
    let text = Lease::map(lease.clone(), |item| &*item.text);
    assert_eq!(&*text, "item 0");
    assert!(text.same(&lease));
    let size = Lease::map(lease.clone(), |_| &ELSEWHERE);
    drop((lease, text));
    let size = size.try_unique().expect_err("a static is nobody's");

    let lease = pool.acquire(&want(1)).unwrap();
    let inside = Lease::map(lease.clone(), |item| &item.text);
    let weak = inside.downgrade();
    drop(inside);
    let lease = lease.try_unique().expect_err("a weak lease may still point inside");
    assert_eq!(&**weak.upgrade().unwrap(), "item 1");
    drop((lease, size));
    assert!(weak.upgrade().is_none());
    // The next generation starts without the mark.
    drop(pool.acquire(&want(1)).unwrap().try_unique().expect("never mapped"));
}

#[test]
fn a_map_that_panics_gives_the_lease_back() {
    let (pool, _) = pool(config());
    let lease = pool.acquire(&want(1)).unwrap();
    panics(|| drop(Lease::map(lease, |_| -> &u64 { panic!("told to") })));
    assert_eq!(pool.stats().live, 0);
}

#[test]
fn one_claim_at_a_time_beside_any_number_of_leases() {
    let (pool, _) = pool(config());
    let a = pool.acquire(&want(1)).unwrap();
    let b = a.clone();
    let claim = a.claim().unwrap();
    let error = b.claim().unwrap_err();
    assert!(matches!(error, Error::Occupied { resource: "item" }), "{error}");
    let by_handle = pool.lease(a.handle()).unwrap();
    assert_eq!(kind(by_handle.claim()), "Occupied");
    assert_eq!(claim.number, by_handle.number);
    assert!(claim.lease().same(&a));
    drop(claim);
    let claim = b.claim().unwrap();
    // A claim is a hold itself.
    let handle = b.handle();
    drop((a, b, by_handle));
    assert!(pool.is_alive(handle));
    drop(claim);
    assert!(!pool.is_alive(handle));
    assert!(pool.acquire(&want(1)).unwrap().claim().is_ok(), "the next generation is unclaimed");
}

#[test]
fn weak_pins_no_payload() {
    both(|config| {
        let (pool, log) = pool(config);
        log.set(|l| &l.destroy_at_once, true);
        let lease = pool.acquire(&want(1)).unwrap();
        let weak = lease.downgrade();
        let other = weak.clone();
        assert_eq!(pool.stats().weak, 2);
        assert!(weak.upgrade().unwrap().same(&lease));
        drop(lease);
        assert_eq!(log.alive(), 0, "the weak lease pins nothing");
        assert!(weak.upgrade().is_none());
        assert_eq!(kind(other.try_upgrade()), "StaleHandle");
        // The next resource in the slot is another one.
        let next = pool.acquire(&want(1)).unwrap();
        assert!(weak.upgrade().is_none());
        drop((weak, other, next));
        assert_eq!(pool.stats().weak, 0);
    });
}

#[test]
fn weak_pins_the_memory_of_its_pool() {
    let (pool, log) = pool(config());
    let lease = pool.acquire(&want(1)).unwrap();
    let weak = lease.downgrade();
    drop(lease);
    drop(pool);
    assert_eq!(log.alive(), 0);
    let clone = weak.clone();
    assert!(weak.upgrade().is_none());
    drop(weak);
    assert_eq!(kind(clone.try_upgrade()), "StaleHandle");
}

#[test]
fn keeps_its_parents_alive_and_an_idle_one_does_not() {
    both(|config| {
        let (devices, device_log) = pool(config.clone());
        let (heaps, heap_log) = pool(config.clone());
        let (buffers, buffer_log) = pool(config);
        let device = devices.acquire(&want(1)).unwrap();
        let heap = heaps.acquire(&Want { parent: Some(device.clone()), ..want(1) }).unwrap();
        let buffer = buffers.acquire(&Want { parent: Some(heap.clone()), ..want(1) }).unwrap();
        let handles = (device.handle(), heap.handle());
        // The pools themselves are dropped too, in the worst order.
        drop((device, heap));
        assert!(devices.is_alive(handles.0) && heaps.is_alive(handles.1));
        drop((devices, heaps));
        assert_eq!(device_log.alive() + heap_log.alive() + buffer_log.alive(), 3);
        drop(buffer);
        assert_eq!(buffer_log.alive(), 1, "idle in its pool, which lives");
        assert_eq!(device_log.alive() + heap_log.alive(), 0, "an idle resource pins no parent");
    });
}

#[test]
fn can_be_dropped_on_any_thread() {
    both(|config| {
        let (pool, log) = pool(config);
        let lease = pool.acquire(&want(1)).unwrap();
        let weak = lease.downgrade();
        std::thread::spawn(move || {
            assert_eq!(lease.number, 0);
            drop((weak, lease));
        })
        .join()
        .unwrap();
        assert_eq!(log.counts(), (1, 1, 0));
        assert_eq!(pool.acquire(&want(1)).unwrap().number, 0);
    });
}

/// Compile-time: which types are `Send` and `Sync`.
#[test]
fn everything_public_is_send_and_sync() {
    const fn travels<T: Send + Sync>() {}
    const {
        travels::<Lease<Item>>();
        travels::<Lease<dyn std::fmt::Debug + Send + Sync>>();
        travels::<UniqueLease<Item>>();
        travels::<WeakLease<Item>>();
        travels::<Claim<Item>>();
        travels::<SlotPool<Items>>();
        travels::<PoolManager<Items, String>>();
        travels::<FixedSlotStore<Items>>();
        travels::<RetireList<Box<u8>>>();
        travels::<Timeline>();
        travels::<TimelineOwner>();
        travels::<Timepoint>();
        travels::<PackedTimepoint>();
        travels::<Error>();
    }
}
