//! Models of keyed creation and of the manager's shutdown.

use crate::support::*;
use leasehold_core::sync::Arc;
use leasehold_core::*;

fn manager() -> (Arc<PoolManager<Items, u8>>, Arc<()>) {
    let alive = Arc::new(());
    let manager = PoolManager::new();
    ok(manager.configure(items(&alive, false), config(false)));
    (Arc::new(manager), alive)
}

#[test]
fn a_key_is_created_once() {
    explore("a_key_is_created_once", 4, &["found", "waited or created"], |seen| {
        let (manager, alive) = manager();
        let there = manager.clone();
        let theirs = move || ok(there.get_or_create(&1, &()));
        let (theirs, mine) = side_by_side(theirs, || {
            seen.note(if manager.get(&1).is_some() { "found" } else { "waited or created" });
            ok(manager.get_or_create(&1, &()))
        });
        mine.read();
        assert!(mine.same(&theirs));
        assert_eq!((existing(&alive), mine.strong_count()), (1, 3));
    });
}

#[test]
fn shutdown_beside_get_or_create() {
    explore(
        "shutdown_beside_get_or_create",
        4,
        &["served", "refused", "ended", "outstanding"],
        |seen| {
            let (manager, alive) = manager();
            drop(ok(manager.get_or_create(&1, &())));
            let (there, note) = (manager.clone(), seen.clone());
            let theirs = move || match there.get_or_create(&1, &()) {
                Ok(lease) => {
                    assert!(existing(&alive) == 1, "never a second one");
                    lease.read();
                    note.note("served");
                    drop(lease);
                    alive
                }
                Err(e) => {
                    assert_eq!(e.kind(), "InvalidState");
                    note.note("refused");
                    alive
                }
            };
            let shut =
                || seen.note(if manager.shutdown().is_ok() { "ended" } else { "outstanding" });
            let (alive, ()) = side_by_side(theirs, shut);
            ok(manager.shutdown());
            assert_eq!(existing(&alive), 0);
        },
    );
}

/// A handle of the manager's own lease is looked up while a shutdown freezes the lease.
#[test]
fn handle_beside_shutdown() {
    explore(
        "handle_beside_shutdown",
        4,
        &["served", "StaleHandle", "ended", "outstanding"],
        |seen| {
            let (manager, alive) = manager();
            let handle = ok(manager.get_or_create(&1, &())).handle();
            let (there, note) = (manager.clone(), seen.clone());
            let theirs = move || match there.lease(handle) {
                Ok(lease) => {
                    lease.read();
                    assert!(!ok(there.pool()).is_shut_down(), "ended although somebody holds it");
                    note.note("served");
                }
                Err(e) => note.note(e.kind()),
            };
            side_by_side(theirs, || {
                seen.note(if manager.shutdown().is_ok() { "ended" } else { "outstanding" })
            });
            ok(manager.shutdown());
            assert_eq!(existing(&alive), 0);
        },
    );
}
