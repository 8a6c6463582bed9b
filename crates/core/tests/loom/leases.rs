//! Models of the control word: clones, handles, weak leases, unique leases, claims.

use crate::support::*;
use leasehold_core::sync::{Arc, UnsafeCell};
use leasehold_core::{Handle, Lease};

/// A new resource is findable, so every drop is a read-modify-write. A recycled one is not, so its
/// last drop is a plain store.
#[test]
fn clone_and_drop_beside_drop() {
    for recycled in [false, true] {
        explore(
            "clone_and_drop_beside_drop",
            7,
            &["the other was last", "this was last"],
            move |seen| {
                let (pool, alive) = pool(config(false), !recycled);
                if recycled {
                    drop(ok(pool.acquire(&())));
                }
                let a = ok(pool.acquire(&()));
                let b = a.clone();
                let theirs = move || {
                    let c = b.clone();
                    drop(b);
                    c.read();
                };
                let note = seen.clone();
                side_by_side(theirs, move || {
                    a.read();
                    note.note(if a.strong_count() == 1 {
                        "this was last"
                    } else {
                        "the other was last"
                    });
                });
                assert_eq!(existing(&alive), usize::from(recycled));
                assert_eq!(pool.stats().live, 0);
            },
        );
    }
}

/// A resource whose handle was never requested cannot be found, not even by a guessed handle.
#[test]
fn a_guess_finds_nothing() {
    explore("a_guess_finds_nothing", 7, &["dropped", "not yet"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        drop(ok(pool.acquire(&())));
        let lease = ok(pool.acquire(&()));
        let guess = Handle::from_bits(2 << 32).expect("a model's second generation is 2");
        assert!(pool.is_alive(guess));
        side_by_side(
            move || drop(lease),
            || {
                assert!(pool.lease(guess).is_err());
                seen.note(if pool.is_alive(guess) { "not yet" } else { "dropped" });
            },
        );
        assert_eq!(pool.stats().idle, 1);
    });
}

#[test]
fn handle_beside_last_drop() {
    explore("handle_beside_last_drop", 7, &["leased", "stale", "was last"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let lease = ok(pool.acquire(&()));
        let handle = lease.handle();
        let mine = || match pool.lease(handle) {
            Ok(lease) => {
                lease.read();
                seen.note("leased");
                if lease.strong_count() == 1 {
                    seen.note("was last");
                }
            }
            Err(e) => {
                assert_eq!(e.kind(), "StaleHandle");
                seen.note("stale");
            }
        };
        side_by_side(move || drop(lease), mine);
        assert!(!pool.is_alive(handle));
    });
}

/// The slot is reused at once: the old handle must not lease the new resource.
#[test]
fn handle_beside_reuse() {
    explore("handle_beside_reuse", 5, &["leased", "stale"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let lease = ok(pool.acquire(&()));
        let handle = lease.handle();
        let there = pool.clone();
        let theirs = move || {
            drop(lease);
            let mut again = ok(there.acquire_unique(&()));
            again.write();
            let again = again.share();
            assert_ne!(again.handle(), handle);
            again.read();
        };
        side_by_side(theirs, || match pool.lease(handle) {
            Ok(lease) => {
                assert_eq!(lease.handle(), handle);
                lease.read();
                seen.note("leased");
            }
            Err(_) => seen.note("stale"),
        });
    });
}

#[test]
fn unique_beside_handle() {
    explore("unique_beside_handle", 7, &["occupied", "leased", "unique", "shared"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let lease = ok(pool.acquire(&()));
        let handle = lease.handle();
        let note = seen.clone();
        let theirs = move || match lease.try_unique() {
            Ok(mut unique) => {
                unique.write();
                note.note("unique");
                unique.share()
            }
            Err(lease) => {
                lease.read();
                note.note("shared");
                lease
            }
        };
        let (lease, ()) = side_by_side(theirs, || match pool.lease(handle) {
            Ok(lease) => {
                lease.read();
                seen.note("leased");
            }
            Err(e) => {
                assert_eq!(e.kind(), "Occupied");
                seen.note("occupied");
            }
        });
        drop(lease);
    });
}

/// A unique lease is dropped as such: its plain stores race with the CAS of a handle.
#[test]
fn drop_of_unique_beside_handle() {
    explore("drop_of_unique_beside_handle", 7, &["Occupied", "StaleHandle"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let mut unique = ok(pool.acquire_unique(&()));
        unique.write();
        let handle = unique.handle();
        side_by_side(
            move || drop(unique),
            || seen.note(pool.lease(handle).err().expect("never shared").kind()),
        );
        ok(pool.acquire_unique(&())).write();
    });
}

#[test]
fn weak_upgrade_beside_last_drop() {
    explore("weak_upgrade_beside_last_drop", 7, &["upgraded", "gone"], |seen| {
        let (pool, alive) = pool(config(false), true);
        let lease = ok(pool.acquire(&()));
        let weak = lease.downgrade();
        side_by_side(
            move || drop(lease),
            || match weak.upgrade() {
                Some(lease) => {
                    lease.read();
                    seen.note("upgraded");
                }
                None => seen.note("gone"),
            },
        );
        assert!(weak.upgrade().is_none());
        assert_eq!(existing(&alive), 0);
    });
}

#[test]
fn one_claim_at_a_time() {
    explore("one_claim_at_a_time", 7, &["claimed", "occupied"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let a = ok(pool.acquire(&()));
        let b = a.clone();
        // The data that a claim guards, in a cell that loom checks.
        let turn = Arc::new(UnsafeCell::new(0));
        let there = turn.clone();
        let theirs = move || {
            if let Ok(claim) = b.claim() {
                // SAFETY: the claim gives exclusive access; loom checks it.
                there.with_mut(|p| unsafe { *p += 1 });
                drop(claim);
            }
        };
        side_by_side(theirs, || match a.claim() {
            Ok(_claim) => {
                // SAFETY: the claim gives exclusive access; loom checks it.
                turn.with_mut(|p| unsafe { *p += 1 });
                seen.note("claimed");
            }
            Err(e) => {
                assert_eq!(e.kind(), "Occupied");
                seen.note("occupied");
            }
        });
    });
}

/// A map forbids a unique lease, whichever comes first.
#[test]
fn map_beside_try_unique() {
    explore("map_beside_try_unique", 7, &["held", "mapped"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        let a = ok(pool.acquire(&()));
        let b = a.clone();
        let theirs = move || {
            let inside = Lease::map(b, |item| item);
            let weak = inside.downgrade();
            drop(inside);
            weak
        };
        let (weak, a) = side_by_side(theirs, || {
            let a = a.try_unique().err().expect("it was mapped, or is still held");
            seen.note(if a.strong_count() == 1 { "mapped" } else { "held" });
            a
        });
        assert!(weak.upgrade().is_some());
        assert!(a.try_unique().is_err(), "mapped");
        assert!(weak.upgrade().is_none());
    });
}

/// A handle is known, by the creation or by a guess, before its resource can be found.
#[test]
fn a_handle_that_is_known_early() {
    explore(
        "a_handle_that_is_known_early",
        6,
        &["leased new", "leased recycled", "stale"],
        |seen| {
            let (pool, _alive) = pool(config(false), false);
            let there = pool.clone();
            let theirs = move || {
                drop(ok(there.acquire(&())));
                let mut again = ok(there.acquire_unique(&()));
                again.write();
                let again = again.share();
                again.handle();
                again
            };
            let first = Handle::from_bits(1 << 32).expect("a model's first generation is 1");
            let second = Handle::from_bits(2 << 32).expect("and its second 2");
            let (lease, ()) = side_by_side(theirs, || {
                for (handle, found) in [(first, "leased new"), (second, "leased recycled")] {
                    match pool.lease(handle) {
                        Ok(lease) => {
                            lease.read();
                            seen.note(found);
                        }
                        Err(_) => seen.note("stale"),
                    }
                }
            });
            drop(lease);
        },
    );
}

/// The sole lease of an unfindable resource is dropped without a read-modify-write; after a request
/// for the handle it is not.
#[test]
fn a_lease_that_becomes_findable() {
    explore("a_lease_that_becomes_findable", 5, &["leased", "stale"], |seen| {
        let (pool, _alive) = pool(config(false), false);
        drop(ok(pool.acquire(&())));
        let lease = ok(pool.acquire(&()));
        let clone = lease.clone();
        // The last of two holders, either of them, may be the sole holder.
        let theirs = move || {
            clone.read();
            let handle = clone.handle();
            drop(clone);
            handle
        };
        let (handle, ()) = side_by_side(theirs, || drop(lease));
        assert!(!pool.is_alive(handle));
        let lease = ok(pool.acquire(&()));
        let handle = lease.handle();
        side_by_side(
            move || drop(lease),
            || match pool.lease(handle) {
                Ok(lease) => {
                    lease.read();
                    seen.note("leased");
                }
                Err(_) => seen.note("stale"),
            },
        );
    });
}
