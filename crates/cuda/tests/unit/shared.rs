//! Tests of the tables that devices share.

use super::*;
use crate::driver::real::RealDriver;

/// The tables over a driver that is not started: they do not call it.
fn shared() -> Shared {
    Shared::new(Arc::new(RealDriver::new()), CudaConfig::default())
}

/// A thread that remembers a range learns of every change, and keeps two tables apart.
#[test]
fn a_place_is_that_of_the_range_that_is_there_now() {
    let (a, b) = (shared(), shared());
    let at = 5 * SPAN;
    for _ in 0..2 {
        for place in [Place::Pinned, Place::Device(3)] {
            a.add_range(at, 100, place);
            for _ in 0..2 {
                assert_eq!(a.place(at, 100), Some(place));
                assert_eq!(a.place(at + 99, 1), Some(place));
                assert_eq!(
                    [a.place(at, 101), a.place(at + 99, 2), a.place(at + 100, 0)],
                    [None; 3]
                );
                assert_eq!([a.place(at - 1, 1), b.place(at, 1)], [None; 2]);
            }
            a.remove_range(at);
            assert_eq!(a.place(at, 100), None);
        }
    }
    // More ranges than a thread remembers, in both tables.
    for i in 0..20 {
        a.add_range(i * SPAN, SPAN, Place::Device(i as u32));
        b.add_range(i * SPAN, SPAN / 2, Place::Pinned);
    }
    for i in (0..20).chain((0..20).rev()) {
        assert_eq!(a.place(i * SPAN + 7, SPAN - 7), Some(Place::Device(i as u32)));
        assert_eq!(b.place(i * SPAN + 7, SPAN / 2 - 7), Some(Place::Pinned));
        assert_eq!(b.place(i * SPAN + SPAN / 2, 1), None);
    }
}
