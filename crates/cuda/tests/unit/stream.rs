//! Tests of host functions and times.

use super::*;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use std::sync::Arc;

#[test]
fn the_trampoline_stops_a_panic() {
    let runs = Arc::new(AtomicU32::new(0));
    let counted = runs.clone();
    let good: HostFunction = Box::new(move || {
        counted.fetch_add(1, Ordering::Relaxed);
    });
    let bad: HostFunction = Box::new(|| std::panic::resume_unwind(Box::new("quiet")));
    for call in [good, bad] {
        // SAFETY: the test takes the driver's place and uses each box once.
        unsafe { run_once(Box::into_raw(Box::new(call)).cast()) };
    }
    assert_eq!(runs.load(Ordering::Relaxed), 1);
    assert_eq!(Arc::strong_count(&runs), 1);
}

#[test]
fn milliseconds_become_nanoseconds() {
    assert_eq!(nanoseconds(0.0005), 500);
    assert_eq!(nanoseconds(1.25), 1_250_000);
    assert_eq!(nanoseconds(-0.5), -500_000);
}
