//! Tests of the registry.

use super::*;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};

/// Threads remove what one of them added last. Another object may come into a place between
/// two removals of one handle.
#[test]
fn a_handle_is_removed_once_and_never_another_ones_object() {
    let registry = Registry::<(u64, AtomicBool)>::new(0xa, "number");
    let add = || registry.add(|handle| Arc::new((handle, AtomicBool::new(false)))).unwrap().0;
    let newest = AtomicU64::new(add());
    std::thread::scope(|scope| {
        for _ in 0..4 {
            scope.spawn(|| {
                for _ in 0..200_000 {
                    let handle = newest.load(Ordering::Acquire);
                    if let Ok(object) = registry.remove(handle) {
                        assert_eq!(object.0, handle);
                        assert!(!object.1.swap(true, Ordering::Relaxed), "removed twice");
                        newest.store(add(), Ordering::Release);
                    }
                }
            });
        }
    });
    registry.remove(newest.into_inner()).unwrap();
}
