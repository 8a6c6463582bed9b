//! Tests of the cell of an allocator.

use super::*;
use crate::AllocatorConfig;
use crate::fake::FakeBacking;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};

#[test]
fn one_of_many_callers_makes_it() {
    let (cell, made) = (AllocatorCell::default(), AtomicU32::new(0));
    let make = || {
        made.fetch_add(1, Ordering::Relaxed);
        std::thread::yield_now();
        Allocator::new(Box::new(FakeBacking::new(1 << 20)), AllocatorConfig::default())
    };
    let found: Vec<usize> = std::thread::scope(|scope| {
        let callers: Vec<_> = (0..8)
            .map(|_| scope.spawn(|| std::ptr::from_ref(cell.get_or_make(make).unwrap()) as usize))
            .collect();
        callers.into_iter().map(|c| c.join().unwrap()).collect()
    });
    assert_eq!(made.load(Ordering::Relaxed), 1);
    assert!(found.iter().all(|&at| at == found[0]));
}
