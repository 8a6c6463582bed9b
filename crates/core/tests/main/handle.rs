//! The contract Handle.

use crate::support::*;
use leasehold_core::*;

#[test]
fn is_64_bits_and_so_is_an_option_of_it() {
    assert_eq!(size_of::<StreamHandle>(), 8);
    assert_eq!(size_of::<Option<StreamHandle>>(), 8);
    const fn free_to_travel<T: Send + Sync + Copy + 'static>() {}
    // For any tag: a handle is only a name.
    const { free_to_travel::<Handle<*const u8>>() };
}

#[test]
fn carries_index_and_generation_over_a_c_border() {
    let (pool, _) = pool(config());
    let lease = pool.acquire(&want(1)).unwrap();
    let handle = lease.handle();
    let bits = handle.to_bits().get();
    assert_eq!(bits, u64::from(handle.generation()) << 32 | u64::from(handle.index()));
    assert_eq!(Handle::from_bits(bits), Some(handle));
    // No pool uses generation zero.
    assert_eq!(BufferHandle::from_bits(0), None);
    assert_eq!(BufferHandle::from_bits(u64::from(u32::MAX)), None);
    assert_eq!(
        format!("{handle:?}"),
        format!("Buffer#{}.{:08x}", handle.index(), handle.generation())
    );
}

#[test]
fn nonsense_is_stale_in_every_pool() {
    let (pool, _) = pool(PoolConfig { initial: 5, ..config() });
    let live = pool.acquire(&want(1)).unwrap();
    for index in [0, 1, 4, 5, 6, 63, 0xff_fffe, 0xff_ffff, 0x100_0000, u32::MAX] {
        for generation in [1, 2, 0x8000_0000, u32::MAX] {
            let handle = Handle::from_bits(u64::from(generation) << 32 | u64::from(index)).unwrap();
            if handle != live.handle() {
                assert!(!pool.is_alive(handle));
                assert_eq!(kind(pool.lease(handle)), "StaleHandle");
            }
        }
    }
}

#[test]
fn is_valid_only_in_the_pool_that_made_it() {
    let pools: Vec<_> = (0..40).map(|_| pool(config()).0).collect();
    let leases: Vec<_> = pools.iter().map(|p| p.acquire(&want(1)).unwrap()).collect();
    for (i, pool) in pools.iter().enumerate() {
        for (j, lease) in leases.iter().enumerate() {
            assert_eq!(lease.handle().index(), 0, "the same slot in every pool");
            assert_eq!(pool.is_alive(lease.handle()), i == j);
            assert_eq!(kind(pool.lease(lease.handle())), if i == j { "Ok" } else { "StaleHandle" });
        }
    }
}

#[test]
fn is_stale_once_its_resource_was_given_back_and_never_names_the_next_one() {
    both(|config| {
        let (pool, _) = pool(config);
        let first = pool.acquire(&want(1)).unwrap();
        let old = first.handle();
        assert!(pool.is_alive(old));
        assert!(pool.lease(old).unwrap().same(&first));
        drop(first);
        assert!(!pool.is_alive(old));
        let second = pool.acquire(&want(1)).unwrap();
        assert_eq!(second.handle().index(), old.index(), "the slot is used again");
        assert_ne!(second.handle(), old);
        assert!(!pool.is_alive(old));
        let error = pool.lease(old).unwrap_err();
        assert!(matches!(error, Error::StaleHandle { resource: "item", .. }), "{error}");
        assert!(error.to_string().contains(&format!("{old:?}")), "{error}");
    });
}

/// Every former generation of a slot stays stale, over 2^16 uses of the slot.
#[test]
fn stays_stale_after_many_generations() {
    let (pool, _) = pool(PoolConfig { block: 1, ..config() });
    let mut old = Vec::new();
    for use_of_slot in 0..(1u32 << 16) + 10 {
        let lease = pool.acquire(&want(1)).unwrap();
        if use_of_slot.is_power_of_two() || use_of_slot < 4 {
            old.push(lease.handle());
        }
        assert_eq!(lease.handle().index(), 0);
        drop(lease);
        if use_of_slot == 1 << 8 || use_of_slot == 1 << 16 {
            let now = pool.acquire(&want(1)).unwrap();
            for &handle in &old {
                assert!(!pool.is_alive(handle), "after {use_of_slot} uses");
                assert_eq!(kind(pool.lease(handle)), "StaleHandle");
            }
            assert!(pool.is_alive(now.handle()));
        }
    }
}

/// With few generations all of them wear out: no generation recurs, and each slot is retired after
/// its payload was destroyed.
#[test]
fn wears_its_slot_out() {
    both(|config| {
        let (pool, log) = pool(PoolConfig { block: 1, generations: 5, ..config });
        let mut seen = std::collections::HashSet::new();
        for round in 0..20u64 {
            let lease = pool.acquire(&want(1)).unwrap();
            assert!(seen.insert(lease.handle()), "a handle came twice");
            drop(lease);
            let stats = pool.stats();
            assert_eq!(stats.retired, (round + 1) / 5);
            assert_eq!(
                log.alive(),
                u64::from((round + 1) % 5 != 0),
                "a worn slot's payload is destroyed at once"
            );
            assert_eq!(stats.created + stats.recycled, round + 1);
        }
        for handle in seen {
            assert!(!pool.is_alive(handle));
        }
        pool.shutdown().expect("retired slots hold nothing up");
    });
}
