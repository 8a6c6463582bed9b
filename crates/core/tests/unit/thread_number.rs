//! Tests of the numbers of threads.

use super::*;
use std::sync::Barrier;
use std::thread;

#[test]
fn the_lowest_number_is_given_again() {
    let numbers = Numbers::new();
    let most = AGAIN + 2;
    assert!((1..=most).all(|n| numbers.take() == n));
    for n in [most, 200, 64, 65, 1] {
        numbers.put(n);
    }
    assert_eq!(
        [(); 5].map(|()| numbers.take()),
        [1, 64, 65, 200, most + 1],
        "not those beyond the bits"
    );
    numbers.next.store(NOBODY - 2, Ordering::Relaxed);
    assert_eq!([(); 3].map(|()| numbers.take()), [NOBODY - 1, NOBODY, NOBODY]);
}

/// Each thread had a number of its own for ever, so that threads that come and go never met
/// what those before them had left.
#[test]
fn threads_in_turn_have_few_numbers_and_those_at_a_time_their_own() {
    let most = (0..200).map(|_| thread::spawn(thread_number).join().expect("a thread")).max();
    // (Other tests run meanwhile.)
    assert!(most.is_some_and(|n| n <= 128), "{most:?} after 200 threads in turn");
    let here = thread_number();
    let all = Barrier::new(20);
    let mut there: Vec<u32> = thread::scope(|s| {
        let one = || {
            let number = thread_number();
            all.wait();
            assert_eq!(thread_number(), number);
            number
        };
        let threads: Vec<_> = (0..20).map(|_| s.spawn(one)).collect();
        threads.into_iter().map(|t| t.join().expect("a thread")).collect()
    });
    there.push(here);
    there.sort_unstable();
    there.dedup();
    assert_eq!((there.len(), thread_number()), (21, here));
}
