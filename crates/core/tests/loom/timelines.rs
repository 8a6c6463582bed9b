//! Models of timelines: no wake-up is lost, and a failed value never looks settled.

use crate::support::*;
use leasehold_core::sync::{Arc, UnsafeCell, thread};
use leasehold_core::*;

/// A lost wake-up is a deadlock, which loom reports. Writes before the completion are visible after
/// it.
#[test]
fn wait_beside_complete() {
    explore("wait_beside_complete", 8, &["had to wait", "complete at once"], |seen| {
        let owner = Arc::new(TimelineOwner::for_model(1));
        let timeline = owner.timeline();
        ok(owner.advance());
        let written = Arc::new(UnsafeCell::new(0));
        let (there, result) = (owner.clone(), written.clone());
        let theirs = move || {
            // SAFETY: before the completion only the worker accesses it; loom checks this.
            result.with_mut(|p| unsafe { *p = 7 });
            there.complete(1);
        };
        // SAFETY: after the completion no thread writes; loom checks this.
        let read = || written.with(|p| assert_eq!(unsafe { *p }, 7));
        side_by_side(theirs, || {
            if ok(timeline.check(1)) {
                seen.note("complete at once");
                read();
            } else {
                seen.note("had to wait");
            }
            ok(timeline.wait(1, None));
            read();
        });
    });
}

#[test]
fn two_waiters_beside_complete() {
    explore("two_waiters_beside_complete", 4, &["had to wait"], |seen| {
        let owner = Arc::new(TimelineOwner::for_model(1));
        let timeline = owner.timeline();
        ok(owner.advance());
        let waiter = || {
            let seen = seen.clone();
            thread::spawn(move || {
                if !ok(timeline.check(1)) {
                    seen.note("had to wait");
                }
                ok(timeline.wait(1, None));
            })
        };
        let waiters = [waiter(), waiter()];
        owner.complete(1);
        for waiter in waiters {
            waiter.join().unwrap();
        }
    });
}

#[test]
fn wait_beside_poison() {
    explore("wait_beside_poison", 7, &["had to wait", "failed at once"], |seen| {
        let owner = Arc::new(TimelineOwner::for_model(1));
        let timeline = owner.timeline();
        ok(owner.advance());
        let there = owner.clone();
        side_by_side(
            move || there.poison(1, Error::state("told to")),
            || {
                seen.note(if timeline.check(1).is_err() {
                    "failed at once"
                } else {
                    "had to wait"
                });
                let error = timeline.wait(1, None).expect_err("it failed");
                assert_eq!(
                    error.to_string(),
                    "invalid state: told to",
                    "the cause is there before the mark"
                );
            },
        );
    });
}

/// Poison, then complete: a thread that sees the completion sees the failure.
#[test]
fn what_failed_never_looks_settled() {
    explore("what_failed_never_looks_settled", 5, &["complete", "pending", "failed"], |seen| {
        let owner = Arc::new(TimelineOwner::for_model(1));
        let timeline = owner.timeline();
        ok(owner.advance());
        let there = owner.clone();
        let theirs = move || {
            there.poison(1, Error::state("told to"));
            there.complete(1);
        };
        side_by_side(theirs, || {
            assert!(!timeline.is_settled(1));
            match timeline.check(1) {
                Ok(complete) => {
                    assert!(!complete, "complete and not failed");
                    seen.note("pending");
                }
                Err(_) => seen.note("failed"),
            }
            if timeline.completed() == 1 {
                seen.note("complete");
            }
        });
        assert!(!timeline.is_settled(1) && timeline.check(1).is_err());
    });
}

/// A failed timeline gets its next owner while another thread reads an old timepoint. The old
/// timepoint never looks settled, and the new work never failed.
#[test]
fn an_old_failure_beside_the_next_owner() {
    explore("an_old_failure_beside_the_next_owner", 5, &["before", "after"], |seen| {
        let owner = TimelineOwner::for_model(1);
        let timeline = owner.timeline();
        ok(owner.advance());
        owner.poison(1, Error::state("told to"));
        owner.complete(1);
        let theirs = move || {
            let next = owner.lend_again();
            let value = ok(next.advance());
            next.complete(value);
            assert!(timeline.is_settled(value) && timeline.failure().is_none());
        };
        side_by_side(theirs, || {
            seen.note(if timeline.submitted() == 1 { "before" } else { "after" });
            assert!(!timeline.is_settled(1) && timeline.check(1).is_err() && timeline.failed(1));
        });
        assert!(!timeline.is_settled(1) && timeline.is_settled(timeline.submitted()));
    });
}
