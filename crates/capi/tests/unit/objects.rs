//! Tests of the table of objects.

use super::*;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::AtomicU64;

struct Number(Arc<AtomicU64>);

impl Drop for Number {
    fn drop(&mut self) {
        self.0.fetch_add(1, Ordering::Relaxed);
    }
}

impl Kind for Number {
    const NAME: &'static str = "number";
    const NUMBER: u8 = 0x77;
}

#[test]
fn an_object_ends_once_with_its_last_caller() {
    static NUMBERS: Objects<Number> = Objects::new();
    let ended = Arc::new(AtomicU64::new(0));
    let handle = NUMBERS.add(Number(ended.clone())).unwrap();
    NUMBERS.retain(handle).unwrap();
    NUMBERS.release(handle).unwrap();
    let used = NUMBERS.get(handle).unwrap();
    NUMBERS.release(handle).unwrap();
    assert!(NUMBERS.get(handle).is_err() && NUMBERS.retain(handle).is_err());
    assert!(NUMBERS.release(handle).is_err());
    assert_eq!(ended.load(Ordering::Relaxed), 0, "a call uses it");
    drop(used);
    assert_eq!(ended.load(Ordering::Relaxed), 1);
    for forged in [0, 1, handle ^ 1, handle ^ 1 << 24, handle ^ 1 << 40, !handle, u64::MAX] {
        assert!(NUMBERS.get(forged).is_err(), "{forged:#x}");
    }
}

#[test]
fn of_threads_that_release_an_object_as_many_succeed_as_hold_it() {
    static NUMBERS: Objects<Number> = Objects::new();
    for round in 0..2000 {
        let ended = Arc::new(AtomicU64::new(0));
        let handle = NUMBERS.add(Number(ended.clone())).unwrap();
        if round % 2 == 1 {
            NUMBERS.retain(handle).unwrap();
        }
        let released = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for _ in 0..3 {
                scope.spawn(|| {
                    let gone = NUMBERS.release(handle).is_ok();
                    released.fetch_add(u64::from(gone), Ordering::Relaxed);
                });
            }
        });
        assert_eq!(released.into_inner(), 1 + round % 2);
        assert_eq!(ended.load(Ordering::Relaxed), 1);
    }
}
