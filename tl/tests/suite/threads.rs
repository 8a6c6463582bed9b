//! Threads: each has its own scopes; shared counts are correct; scopes that a thread leaves open
//! are closed.

use std::ffi::c_void;

use leasehold_core::sync::atomic::{AtomicU64, Ordering::Relaxed};
use leasehold_core::sync::{Arc, thread};
use leasehold_memory::MemoryManager;
use leasehold_memory::ffi::*;

/// An object that knows its owner, and records a destruction by another thread.
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

/// Regression of the plain design: another thread's `exit_scope` freed a thread's objects.
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
                        // SAFETY: `destroy` matches the object.
                        unsafe {
                            tl_mem_register_custom(owned(&strange, &destroyed), Some(destroy))
                        };
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
            // SAFETY: `destroy` matches the object.
            unsafe { tl_mem_register_custom(owned(&counts.0, &counts.1), Some(destroy)) };
        }
    })
    .join()
    .unwrap();
    // An ending thread calls no function of the program. Other threads run the destructors.
    for _ in 0..1000 {
        tl_mem_enter_scope();
        tl_mem_exit_scope();
        if destroyed.load(Relaxed) == 5 {
            break;
        }
        thread::sleep(std::time::Duration::from_millis(1));
    }
    assert_eq!((strange.load(Relaxed), destroyed.load(Relaxed)), (5, 5));
}

/// The state of a POSIX key's destructor.
#[cfg(unix)]
struct Late {
    key: libc::pthread_key_t,
    rounds: u32,
    object: *mut c_void,
    gone: Arc<AtomicU64>,
}

#[cfg(unix)]
unsafe extern "C" fn late(state: *mut c_void) {
    // SAFETY: the value of the key is a box of this type.
    let mut state = unsafe { Box::from_raw(state.cast::<Late>()) };
    let gone = tl_get_scope_depth() == 0;
    state.gone.fetch_add(if gone { 1000 } else { 1 }, Relaxed);
    tl_mem_enter_scope();
    tl_mem_function_enter(2);
    assert_eq!(tl_mem_get_buffer(0, 8).is_null(), gone);
    tl_mem_function_exit();
    tl_mem_exit_scope();
    tl_mem_unwind(tl_mem_mark());
    tl_mem_close_thread();
    // SAFETY: null registers nothing.
    unsafe { tl_mem_register_struct(std::ptr::null_mut()) };
    state.rounds += 1;
    if state.rounds == 3 {
        // Reference counts still work.
        tl_ptr_release(state.object);
    } else {
        let key = state.key;
        // SAFETY: the key exists; its destructor is called again in the next round.
        unsafe { libc::pthread_setspecific(key, Box::into_raw(state).cast()) };
    }
}

#[test]
#[cfg(unix)]
fn calls_from_later_destructors_of_the_thread_are_safe() {
    /// (The thread has no name any more, so this function does not ask for it.)
    unsafe extern "C" fn count(destroyed: *mut c_void) {
        // SAFETY: the object is a counter that its owner gave away.
        unsafe { Arc::from_raw(destroyed.cast::<AtomicU64>().cast_const()) }.fetch_add(1, Relaxed);
    }
    let (gone, destroyed) = counters();
    let (g, d) = (Arc::clone(&gone), Arc::clone(&destroyed));
    thread::spawn(move || {
        let object = Arc::into_raw(d).cast_mut().cast();
        // SAFETY: `count` matches the object.
        unsafe { tl_mem_register_custom(object, Some(count)) };
        tl_mem_unregister(object);
        let mut key = 0;
        // SAFETY: the destructor gets the value that is set here.
        unsafe {
            libc::pthread_key_create(&raw mut key, Some(late));
            let state = Late { key, rounds: 0, object, gone: g };
            libc::pthread_setspecific(key, Box::into_raw(Box::new(state)).cast());
        }
    })
    .join()
    .unwrap();
    assert!(gone.load(Relaxed) >= 2000, "it was called after the thread had detached");
    assert_eq!(destroyed.load(Relaxed), 1);
}

/// Rust code sees objects that compiled code registered in the same scopes, and vice versa.
#[test]
fn the_manager_behind_the_c_functions_is_a_memory_manager() {
    let (strange, destroyed) = counters();
    tl_mem_enter_scope();
    let (a, b) = (owned(&strange, &destroyed), owned(&strange, &destroyed));
    // SAFETY: `destroy` matches the object.
    unsafe { tl_mem_register_custom(a, Some(destroy)) };
    let seen = MemoryManager::with_global(|m| {
        // SAFETY: `destroy` matches the object.
        unsafe { m.register_custom(b, destroy) };
        m.acquire_ptr(a);
        let other = m.attach();
        assert!(!other.is_registered(a), "scopes are an attachment's own");
        other.acquire_ptr(b);
        assert!(other.release_ptr(b));
        (m.is_registered(a), m.scope_depth(), tl_mem_is_registered(b))
    });
    assert_eq!(seen, Some((true, 2, 1)));
    tl_ptr_release(a);
    tl_mem_exit_scope();
    assert_eq!((destroyed.load(Relaxed), strange.load(Relaxed)), (2, 0));
}

#[test]
fn shared_objects_are_counted_right_by_all_threads_and_destroyed_once() {
    let (strange, destroyed) = counters();
    let m = MemoryManager::new();
    let objects: Vec<usize> =
        (0..8).map(|_| owned(&strange, &destroyed).expose_provenance()).collect();
    for &o in &objects {
        // SAFETY: `destroy` matches the object.
        unsafe { m.register_custom(std::ptr::with_exposed_provenance_mut(o), destroy) };
    }
    let handles: Vec<_> = (0..4)
        .map(|t| {
            let (m, objects) = (m.attach(), objects.clone());
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
