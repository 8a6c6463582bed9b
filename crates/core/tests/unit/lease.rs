//! Tests of leases over an owner that counts.

use super::*;
use crate::sync::atomic::AtomicU32;
use crate::tags;
use std::any::Any;

#[derive(Debug)]
struct Thing;
impl Tagged for Thing {
    type Tag = tags::Event;
}

/// An owner that only counts the drops of last leases.
#[repr(C)]
struct Counting {
    owner: Owner,
    ended: AtomicU32,
}

unsafe fn last(hdr: NonNull<Header>) {
    // SAFETY: the headers of this test belong to a `Counting` that outlives them.
    unsafe { (*hdr.as_ref().owner().cast::<Counting>()).ended.fetch_add(1, Ordering::Relaxed) };
}

unsafe fn weak(_: NonNull<Header>, _: i32) {}

static OPS: OwnerOps = OwnerOps { name: "thing", last, weak };

/// Runs `f` with a lease on a resource with `strong` leases. Returns the number of last drops.
fn with_strong(strong: u64, f: impl FnOnce(Lease<Thing>, &Header)) -> u32 {
    let owner = Counting { owner: Owner { ops: &OPS }, ended: AtomicU32::new(0) };
    let header = Header::new((&raw const owner).cast(), 0, 9);
    header.state.store(9 << GENERATION_SHIFT | FINDABLE | strong, Ordering::Relaxed);
    // SAFETY: one of the counts is this lease's; a `Thing` has no bytes.
    let lease = unsafe { Lease::from_raw(NonNull::from(&header), NonNull::dangling()) };
    f(lease, &header);
    owner.ended.load(Ordering::Relaxed)
}

#[test]
fn far_below_overflow_the_slot_is_pinned_and_leaks() {
    for how in ["clone", "handle", "map"] {
        let ended = with_strong(PIN_AT, |lease, header| {
            match how {
                "clone" => drop(lease.clone()),
                "handle" => {
                    header.try_acquire(9).expect("alive");
                    // SAFETY: the count that was just taken, pinned or not, is the lease's.
                    drop(unsafe { Lease::<Thing>::from_raw(lease.hdr, lease.val) });
                }
                _ => drop(Lease::map(lease.clone(), |t| t as &(dyn Any + Send + Sync)).clone()),
            }
            assert_ne!(header.state.load(Ordering::Relaxed) & PINNED, 0, "{how}");
            // From now on no drop takes the count to zero.
            for _ in 0..1000 {
                // SAFETY: the header outlives the lease; a pinned count cannot run out.
                drop(unsafe { Lease::<Thing>::from_raw(lease.hdr, lease.val) });
            }
            let leases: Vec<_> = (0..1000).map(|_| lease.clone()).collect();
            drop(leases);
            let strong = u64::from(header.strong());
            assert!((PIN_AT - 1..PIN_AT + 2002).contains(&strong), "{how}: {strong}");
            assert!(header.is_alive(9) && header.try_acquire(8) == Err(AcquireError::Stale));
            assert!(lease.try_unique().is_err(), "nobody knows who else holds it");
        });
        assert_eq!(ended, 0);
    }
}

#[test]
fn below_the_pin_the_count_is_exact() {
    let ended = with_strong(1, |lease, header| {
        drop((lease.clone(), lease.clone()));
        assert_eq!(header.strong(), 1);
        drop(lease);
        assert_eq!(header.strong(), 0);
    });
    assert_eq!(ended, 1);
}

#[test]
fn a_frozen_header_is_not_leased_and_thaws() {
    with_strong(1, |lease, header| {
        assert!(header.try_freeze() && !header.try_freeze());
        assert_eq!(header.try_acquire(9), Err(AcquireError::Frozen));
        assert_eq!(header.try_acquire(8), Err(AcquireError::Stale));
        let lease = lease.try_unique().expect_err("frozen");
        header.unfreeze();
        assert!(header.try_acquire(9).is_ok() && !header.try_freeze(), "somebody else holds it");
        drop(lease);
    });
}
