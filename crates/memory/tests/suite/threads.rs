//! Threads: each has its own scopes; what they share is counted right; what they leave open is closed.

use std::ffi::c_void;

use leasehold_core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use leasehold_core::sync::{Arc, thread};
use leasehold_memory::MemoryManager;
use leasehold_memory::ffi::*;

/// An object that knows its owner, and notes when another thread destroys it.
struct Owned {
    owner: thread::ThreadId,
    strange: Arc<AtomicU64>,
    destroyed: Arc<AtomicU64>,
}

unsafe extern "C" fn destroy(object: *mut c_void) {
    // SAFETY: registered objects are boxes of this type.
    let object = unsafe { Box::from_raw(object.cast::<Owned>()) };
    object.destroyed.fetch_add(1, Relaxed);
    if object.owner != thread::current().id() {
        object.strange.fetch_add(1, Relaxed);
    }
}

fn owned(strange: &Arc<AtomicU64>, destroyed: &Arc<AtomicU64>) -> *mut c_void {
    let (strange, destroyed) = (Arc::clone(strange), Arc::clone(destroyed));
    Box::into_raw(Box::new(Owned { owner: thread::current().id(), strange, destroyed })).cast()
}

fn counters() -> (Arc<AtomicU64>, Arc<AtomicU64>) {
    (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)))
}

/// Regression of the plain design: another thread's exit_scope freed one's objects.
#[test]
fn no_object_is_freed_by_a_foreign_thread() {
    let (strange, destroyed) = counters();
    let handles: Vec<_> = (0..4)
        .map(|_| {
            let (strange, destroyed) = (Arc::clone(&strange), Arc::clone(&destroyed));
            thread::spawn(move || {
                for i in 0..100_000 {
                    tl_mem_enter_scope();
                    if i % 10 == 0 {
                        // SAFETY: `destroy` fits the object.
                        unsafe { tl_mem_register_custom(owned(&strange, &destroyed), Some(destroy)) };
                    }
                    tl_mem_exit_scope();
                }
                tl_get_scope_depth()
            })
        })
        .collect();
    for handle in handles {
        assert_eq!(handle.join().unwrap(), 1);
    }
    assert_eq!((strange.load(Relaxed), destroyed.load(Relaxed)), (0, 4 * 10_000));
}

#[test]
fn a_thread_that_ends_with_open_scopes_and_frames_releases_them() {
    let (strange, destroyed) = counters();
    let counts = (Arc::clone(&strange), Arc::clone(&destroyed));
    thread::spawn(move || {
        for _ in 0..5 {
            tl_mem_function_enter(3);
            tl_mem_get_buffer(2, 1000);
            tl_mem_enter_scope();
            // SAFETY: `destroy` fits the object.
            unsafe { tl_mem_register_custom(owned(&counts.0, &counts.1), Some(destroy)) };
        }
    })
    .join()
    .unwrap();
    assert_eq!((strange.load(Relaxed), destroyed.load(Relaxed)), (0, 5));
}

#[test]
fn calls_from_later_thread_local_destructors_are_safe() {
    struct Late(Arc<AtomicU64>, *mut c_void);
    impl Drop for Late {
        fn drop(&mut self) {
            let gone = tl_get_scope_depth() == 0;
            // Counting still works, the rest does nothing.
            tl_ptr_release(self.1);
            tl_mem_enter_scope();
            tl_mem_function_enter(2);
            assert_eq!(tl_mem_get_buffer(0, 8).is_null(), gone);
            tl_mem_function_exit();
            tl_mem_exit_scope();
            tl_mem_unwind(tl_mem_mark());
            // SAFETY: null registers nothing.
            unsafe { tl_mem_register_struct(std::ptr::null_mut()) };
            self.0.fetch_add(if gone { 1001 } else { 1 }, Relaxed);
        }
    }
    thread_local!(static LATE: std::cell::RefCell<Option<Late>> = const { std::cell::RefCell::new(None) });
    let (strange, destroyed) = counters();
    let reached = Arc::new(AtomicU64::new(0));
    let (s, d, r) = (Arc::clone(&strange), Arc::clone(&destroyed), Arc::clone(&reached));
    thread::spawn(move || {
        let object = owned(&s, &d);
        // Destructors of thread-locals run in the order of first use or against it, depending on the platform: with the
        // manager first in one thread and second in the other, one of them is late.
        LATE.set(Some(Late(r, object)));
        // SAFETY: `destroy` fits the object.
        unsafe { tl_mem_register_custom(object, Some(destroy)) };
        tl_mem_unregister(object);
    })
    .join()
    .unwrap();
    let (s, d, r) = (Arc::clone(&strange), Arc::clone(&destroyed), Arc::clone(&reached));
    thread::spawn(move || {
        let object = owned(&s, &d);
        // SAFETY: as above.
        unsafe { tl_mem_register_custom(object, Some(destroy)) };
        tl_mem_unregister(object);
        LATE.set(Some(Late(r, object)));
    })
    .join()
    .unwrap();
    let reached = reached.load(Relaxed);
    assert_eq!(reached % 1000, 2, "both ran to their ends");
    assert!(reached > 1000, "one of them was late");
    assert_eq!((destroyed.load(Relaxed), strange.load(Relaxed)), (2, 0));
}

#[test]
fn shared_objects_are_counted_right_by_all_threads_and_destroyed_once() {
    let (strange, destroyed) = counters();
    let mut m = MemoryManager::new();
    let objects: Vec<usize> = (0..8).map(|_| owned(&strange, &destroyed).expose_provenance()).collect();
    for &o in &objects {
        // SAFETY: `destroy` fits the object.
        unsafe { m.register_custom(std::ptr::with_exposed_provenance_mut(o), destroy) };
    }
    let handles: Vec<_> = (0..4)
        .map(|t| {
            let (mut m, objects) = (m.attach(), objects.clone());
            thread::spawn(move || {
                for i in 0..20_000 {
                    let o = std::ptr::with_exposed_provenance_mut(objects[(i * 7 + t) % 8]);
                    m.enter_scope();
                    m.register_ptr(o);
                    m.acquire_ptr(o);
                    m.register_ptr(o);
                    assert!(m.is_registered(o));
                    m.unregister(o);
                    assert!(m.is_registered(o));
                    m.release_ptr(o);
                    m.release_ptr(o);
                    m.exit_scope();
                    assert!(!m.is_registered(o));
                }
            })
        })
        .collect();
    for handle in handles {
        handle.join().unwrap();
    }
    assert_eq!((destroyed.load(Relaxed), m.object_count()), (0, 8));
    assert_eq!(m.leak_report().groups.iter().map(|g| g.counts).sum::<u64>(), 8);
    drop(m);
    assert_eq!(destroyed.load(Relaxed), 8);
}
