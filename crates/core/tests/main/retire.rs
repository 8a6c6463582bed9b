//! Retire lists.

use crate::support::panics;
use leasehold_core::RetireList;

#[test]
fn ends_what_is_due_in_order_and_keeps_the_rest() {
    let list = RetireList::new();
    assert!(list.is_empty());
    (0..10).for_each(|n| list.push(n));
    assert_eq!(list.len(), 10);
    let mut ended = Vec::new();
    assert_eq!(list.drain(|n| n % 2 == 0, |n| ended.push(n)), 5);
    assert_eq!(ended, [0, 2, 4, 6, 8]);
    assert_eq!(list.len(), 5);
    assert_eq!(list.take_all(), [1, 3, 5, 7, 9]);
    assert!(list.is_empty());
    assert_eq!(list.drain(|_| true, |_| unreachable!()), 0);
}

#[test]
fn an_end_may_push() {
    let list = RetireList::new();
    list.push(1);
    assert_eq!(list.drain(|_| true, |n| list.push(n + 1)), 1);
    assert_eq!(list.take_all(), [2]);
}

#[test]
fn a_panic_loses_only_what_was_in_hand() {
    let list = RetireList::new();
    (0..5).for_each(|n| list.push(n));
    panics(|| {
        list.drain(|_| true, |n| assert_ne!(n, 1, "told to"));
    });
    assert_eq!(list.len(), 3);
    panics(|| {
        list.drain(
            |n| {
                assert_ne!(*n, 3, "told to");
                true
            },
            |_| (),
        );
    });
    let mut left = list.take_all();
    left.sort_unstable();
    assert_eq!(left, [2, 3, 4]);
}
