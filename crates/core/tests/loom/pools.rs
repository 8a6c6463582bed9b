//! Models of lists, cells, shutdown, and the destruction of a pool.

use crate::support::*;
use leasehold_core::sync::Arc;
use leasehold_core::*;

/// Two threads acquire, write and release: one may get the other's released slot, but never at the
/// same time.
fn acquire_and_release(thread_cells: bool) -> impl Fn(&Seen) + Send + Sync {
    move |seen| {
        let (pool, alive) = pool(PoolConfig { initial: 2, ..config(thread_cells) }, false);
        drop(ok(pool.acquire(&())));
        let turn = |pool: &SlotPool<Items>| {
            let mut item = ok(pool.acquire_unique(&()));
            item.write();
            let shared = item.share();
            shared.read();
            shared.handle()
        };
        let there = pool.clone();
        let (theirs, mine) = side_by_side(move || turn(&there), || turn(&pool));
        assert_ne!(mine, theirs);
        let n = existing(&alive);
        seen.note(if n == 1 { "one after the other" } else { "both at once" });
        assert_eq!(pool.stats().idle as usize, n);
        ok(pool.shutdown());
        assert_eq!(existing(&alive), 0);
    }
}

#[test]
fn acquire_and_release_on_lists() {
    let expected = ["one after the other", "both at once"];
    explore("acquire_and_release_on_lists", 4, &expected, acquire_and_release(false));
}

#[test]
fn acquire_and_release_through_cells() {
    let expected = ["one after the other", "both at once"];
    explore("acquire_and_release_through_cells", 4, &expected, acquire_and_release(true));
}

/// Two threads pop while a third slot returns: the tag distinguishes a changed list from an equal
/// one.
#[test]
fn a_list_that_was_popped_and_pushed_is_another_one() {
    explore("a_list_that_was_popped_and_pushed_is_another_one", 5, &["three", "two"], |seen| {
        let (pool, alive) = pool(PoolConfig { initial: 3, ..config(false) }, false);
        let (a, b) = (ok(pool.acquire(&())), ok(pool.acquire(&())));
        drop(b);
        drop(a);
        let there = pool.clone();
        let theirs = move || {
            // Pop the first, pop the second, push the first: the head is the same slot, but its
            // link differs.
            let a = ok(there.acquire_unique(&()));
            let mut b = ok(there.acquire_unique(&()));
            drop(a);
            b.write();
            b
        };
        let (mut theirs, mut mine) = side_by_side(theirs, || ok(pool.acquire_unique(&())));
        mine.write();
        theirs.write();
        assert_ne!(mine.handle().index(), theirs.handle().index());
        seen.note(if existing(&alive) == 3 { "three" } else { "two" });
    });
}

/// The pool's owner and the last lease are dropped concurrently: one of them frees the pool, once.
/// Loom reports leaks.
fn end_of_the_pool(thread_cells: bool, with_weak: bool) -> impl Fn(&Seen) + Send + Sync {
    move |seen| {
        let (pool, alive) = pool(config(thread_cells), false);
        let lease = ok(pool.acquire(&()));
        let weak = with_weak.then(|| lease.downgrade());
        assert_eq!(Arc::strong_count(&alive), 3);
        let theirs = move || {
            lease.read();
            drop(lease);
            drop(weak);
        };
        side_by_side(theirs, || {
            drop(pool);
            seen.note(match Arc::strong_count(&alive) {
                1 => "all was gone",
                2 => "the payload went first",
                _ => "the lease went later",
            });
        });
        assert_eq!(Arc::strong_count(&alive), 1, "payload and pool are gone");
    }
}

#[test]
fn the_owner_goes_beside_the_last_lease() {
    for thread_cells in [false, true] {
        let expected = ["all was gone", "the payload went first", "the lease went later"];
        explore(
            "the_owner_goes_beside_the_last_lease",
            5,
            &expected,
            end_of_the_pool(thread_cells, false),
        );
    }
}

#[test]
fn the_owner_goes_beside_the_last_weak_lease() {
    let expected = ["all was gone", "the payload went first", "the lease went later"];
    explore(
        "the_owner_goes_beside_the_last_weak_lease",
        5,
        &expected,
        end_of_the_pool(false, true),
    );
}

/// A weak lease is cloned while the owner counts the remaining leases.
#[test]
fn the_owner_goes_beside_a_clone_of_a_weak_lease() {
    explore("the_owner_goes_beside_a_clone_of_a_weak_lease", 6, &["freed", "pinned"], |seen| {
        let (pool, alive) = pool(config(false), false);
        let weak = ok(pool.acquire(&())).downgrade();
        let theirs = move || {
            let clone = weak.clone();
            drop(weak);
            // The memory of the pool still exists.
            assert!(clone.upgrade().is_none());
        };
        side_by_side(theirs, || {
            drop(pool);
            seen.note(if Arc::strong_count(&alive) == 1 { "freed" } else { "pinned" });
        });
        assert_eq!(Arc::strong_count(&alive), 1);
    });
}

/// A shutdown runs beside a thread that acquires and releases: it ends the pool or changes nothing.
fn shutdown_beside_use(thread_cells: bool, initially_idle: bool) -> impl Fn(&Seen) + Send + Sync {
    move |seen| {
        let (pool, alive) = pool(config(thread_cells), false);
        if initially_idle {
            drop(ok(pool.acquire(&())));
        }
        let there = pool.clone();
        let note = seen.clone();
        let theirs = move || match there.acquire_unique(&()) {
            Ok(mut item) => {
                item.write();
                note.note("served");
            }
            Err(e) => {
                assert_eq!(e.kind(), "InvalidState");
                note.note("refused");
            }
        };
        side_by_side(theirs, || match pool.shutdown() {
            Ok(()) => seen.note("ended"),
            Err(e) => {
                assert!(matches!(e, Error::LeasesOutstanding { strong: 1, weak: 0, .. }));
                seen.note("outstanding");
            }
        });
        ok(pool.shutdown());
        assert_eq!(existing(&alive), 0, "nothing is left in a list, a cell or a hand");
        assert!(pool.acquire(&()).is_err());
    }
}

#[test]
fn shutdown_beside_acquire_and_release() {
    for idle in [false, true] {
        let expected = ["served", "refused", "ended", "outstanding"];
        explore(
            "shutdown_beside_acquire_and_release",
            4,
            &expected,
            shutdown_beside_use(false, idle),
        );
    }
}

#[test]
fn shutdown_beside_thread_cells() {
    let expected = ["served", "refused", "ended", "outstanding"];
    explore("shutdown_beside_thread_cells", 4, &expected, shutdown_beside_use(true, true));
}

/// A lease that was held when the shutdown began returns through a cell meanwhile.
#[test]
fn last_drop_beside_shutdown() {
    for thread_cells in [false, true] {
        explore("last_drop_beside_shutdown", 5, &["ended", "outstanding"], move |seen| {
            let (pool, alive) = pool(config(thread_cells), false);
            let lease = ok(pool.acquire(&()));
            let shut = || seen.note(if pool.shutdown().is_ok() { "ended" } else { "outstanding" });
            side_by_side(move || drop(lease), shut);
            ok(pool.shutdown());
            assert_eq!(existing(&alive), 0);
        });
    }
}

/// A weak lease is made from a lease that is dropped at once: a shutdown sees one of the two.
#[test]
fn shutdown_sees_a_lease_or_its_weak_one() {
    explore("shutdown_sees_a_lease_or_its_weak_one", 5, &["strong", "weak"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let own = [ok(pool.acquire(&()))];
        let other = own[0].clone();
        let theirs = move || {
            let weak = other.downgrade();
            drop(other);
            weak
        };
        let (weak, ()) = side_by_side(theirs, || match pool.shutdown_with(&own) {
            Err(Error::LeasesOutstanding { strong: 1, .. }) => seen.note("strong"),
            Err(Error::LeasesOutstanding { strong: 0, weak: 1, .. }) => seen.note("weak"),
            _ => panic!("one of them was there all the time"),
        });
        drop(weak);
        ok(pool.shutdown_with(&own));
    });
}
