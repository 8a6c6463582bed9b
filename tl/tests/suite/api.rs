//! The rows of the semantics table, through the Rust API.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr;

use leasehold_memory::workload::{new_vector, push};
use leasehold_memory::{Config, Kind, MemoryManager, Misuse, OpaqueTensor};

use crate::tensors;

thread_local! {
    static DESTROYED: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// Destroys an object from `object`, and records its number.
pub unsafe extern "C" fn note(ptr: *mut c_void) {
    // SAFETY: objects are boxes of their number.
    let number = unsafe { Box::from_raw(ptr.cast::<usize>()) };
    DESTROYED.with_borrow_mut(|d| d.push(*number));
}

unsafe extern "C" fn note_tensor(ptr: *mut OpaqueTensor) {
    // SAFETY: the tensors of these tests are objects from `object`.
    unsafe { note(ptr.cast()) };
}

fn object(number: usize) -> *mut c_void {
    Box::into_raw(Box::new(number)).cast()
}

fn destroyed() -> Vec<usize> {
    DESTROYED.take()
}

/// A registered object with a number.
fn add(m: &mut MemoryManager, number: usize) -> *mut c_void {
    let o = object(number);
    // SAFETY: only `note` destroys the object.
    unsafe { m.register_custom(o, note) };
    o
}

fn with_tensors(config: Config) -> MemoryManager {
    let m = MemoryManager::with_config(config);
    // SAFETY: all tensors of these tests come from `object`.
    unsafe { m.set_tensor_destructor(Some(note_tensor)) };
    m
}

#[test]
fn a_scope_releases_its_records_newest_first_and_what_has_other_counts_survives() {
    let mut m = MemoryManager::new();
    assert_eq!(m.scope_depth(), 1);
    m.enter_scope();
    let kept = add(&mut m, 1);
    add(&mut m, 2);
    add(&mut m, 3);
    m.acquire_ptr(kept);
    m.exit_scope();
    assert_eq!(destroyed(), [3, 2]);
    assert!(m.release_ptr(kept));
    assert_eq!(destroyed(), [1]);
    m.exit_scope();
    assert_eq!((m.scope_depth(), m.misuses(Misuse::ExitScope)), (1, 1));
}

#[test]
fn registering_again_counts_and_records_again() {
    let mut m = MemoryManager::new();
    m.enter_scope();
    let o = add(&mut m, 1);
    m.enter_scope();
    m.register_ptr(o);
    m.register_ptr(o);
    m.exit_scope();
    assert!(destroyed().is_empty() && m.is_registered(o));
    m.exit_scope();
    assert_eq!(destroyed(), [1]);
    m.register_ptr(ptr::without_provenance_mut(0x40));
    assert_eq!(m.misuses(Misuse::RegisterUnknown), 1);
}

#[test]
fn the_first_kind_stays_and_an_untyped_entry_takes_one() {
    let m = with_tensors(Config::default());
    let o = object(1);
    m.acquire_ptr(o);
    assert_eq!(m.leak_report().groups[0].kind, Kind::Untyped);
    m.enter_scope();
    // SAFETY: a tensor of these tests.
    unsafe { m.register_tensor(o.cast()) };
    assert_eq!((m.leak_report().groups[0].kind, m.refcount_count()), (Kind::Tensor, 1));
    // SAFETY: the kind does not change, so it is never freed as a struct.
    unsafe { m.register_struct(o) };
    assert_eq!(m.misuses(Misuse::KindMismatch), 1);
    m.exit_scope();
    assert!(destroyed().is_empty());
    assert!(m.release_ptr(o));
    drop(m);
    assert_eq!(destroyed(), [1]);
}

#[test]
fn the_last_release_of_an_untyped_entry_frees_nothing() {
    let m = MemoryManager::new();
    let mut local = 5u64;
    let p = (&raw mut local).cast::<c_void>();
    m.acquire_ptr(p);
    m.acquire_ptr(p);
    assert!(m.release_ptr(p) && m.release_ptr(p) && !m.release_ptr(p));
    assert_eq!((m.object_count(), m.misuses(Misuse::ReleaseUnknown), local), (0, 1, 5));
    m.inc_ref(p);
    assert!(!m.dec_ref(p) && m.dec_ref(p) && m.dec_ref(p) && !m.dec_ref(ptr::null_mut()));
}

#[test]
fn unregister_hands_the_count_to_the_caller() {
    let mut m = MemoryManager::new();
    m.enter_scope();
    let o = add(&mut m, 1);
    m.enter_scope();
    // The Rust method uses only the current scope; the C rule uses the nearest scope with a record.
    m.unregister(o);
    assert!(m.is_registered(o));
    m.unregister_nearest(o);
    assert!(!m.is_registered(o));
    m.exit_scope();
    m.exit_scope();
    assert!(destroyed().is_empty());
    assert!(m.release_ptr(o));
    assert_eq!((destroyed(), m.misuses(Misuse::NotRegistered)), (vec![1], 1));
}

#[test]
fn promote_moves_one_scope_out_and_keeps_the_order() {
    let mut m = MemoryManager::new();
    m.enter_scope();
    add(&mut m, 1);
    m.enter_scope();
    add(&mut m, 2);
    let o = add(&mut m, 3);
    add(&mut m, 4);
    m.register_ptr(o);
    m.promote(o);
    m.exit_scope();
    assert_eq!(destroyed(), [4, 2]);
    m.promote(ptr::without_provenance_mut(0x40));
    add(&mut m, 5);
    m.exit_scope();
    assert_eq!((destroyed(), m.misuses(Misuse::NotRegistered)), (vec![5, 3, 1], 1));
}

/// Regression of the plain design: a stale record freed the next object at the same address.
#[test]
fn a_record_of_a_dead_object_does_not_touch_its_successor() {
    let m = MemoryManager::new();
    m.enter_scope();
    m.enter_scope();
    thread_local!(static BLOCK: Cell<[u64; 2]> = const { Cell::new([0; 2]) });
    unsafe extern "C" fn count(_: *mut c_void) {
        BLOCK.set([BLOCK.get()[0] + 1, 0]);
    }
    let address = BLOCK.with(|b| b.as_ptr().cast::<c_void>());
    // SAFETY: `count` does not access the memory.
    unsafe { m.register_custom(address, count) };
    m.release_ptr(address);
    assert_eq!(BLOCK.get()[0], 1);
    // SAFETY: `count` does not access the memory. The second object has the first one's address.
    unsafe { m.register_custom(address, count) };
    m.unregister(address);
    m.exit_scope();
    assert_eq!((BLOCK.get()[0], m.object_count()), (1, 1), "b lives");
    m.exit_scope();
    assert!(m.release_ptr(address));
    assert_eq!(BLOCK.get()[0], 2);
}

#[test]
fn a_tensor_released_twice_around_a_reuse_is_safe_only_with_quarantine() {
    for (bytes, survives) in [(64 << 20, true), (0, false)] {
        let m = tensors::manager(Config { quarantine_bytes: bytes, ..Config::default() });
        m.enter_scope();
        let a = tensors::create(&m, 4);
        assert!(m.release_ptr(a.cast()));
        let b = tensors::create(&m, 4);
        assert_eq!(a == b, !survives, "without quarantine the pool hands the same tensor out");
        m.release_ptr(a.cast());
        assert_eq!(m.is_registered(b.cast()), survives);
        m.exit_scope();
        assert_eq!((m.refcount_count(), m.scope_depth()), (0, 1));
    }
}

#[test]
fn a_dead_tensor_that_is_registered_again_in_time_is_revived() {
    let m = with_tensors(Config::default());
    m.enter_scope();
    let t = object(1);
    // SAFETY: a tensor of these tests.
    unsafe { m.register_tensor(t.cast()) };
    m.enter_scope();
    m.release_ptr(t);
    assert_eq!((m.refcount_count(), m.stats().quarantined_tensors), (0, 1));
    m.acquire_ptr(t);
    m.release_ptr(t);
    assert_eq!(m.misuses(Misuse::UseOfDead), 2);
    // SAFETY: the tensor was not destroyed.
    unsafe { m.register_tensor(t.cast()) };
    m.promote(t);
    m.exit_scope();
    assert!(
        destroyed().is_empty() && m.refcount_count() == 1 && m.misuses(Misuse::RegisterDead) == 1
    );
    m.exit_scope();
    assert_eq!((destroyed(), m.stats().quarantined_bytes), (vec![1], 0));
}

#[test]
fn the_quarantine_keeps_within_its_budget_and_lets_the_oldest_go_first() {
    let m = with_tensors(Config { quarantine_bytes: 3 * 4096, ..Config::default() });
    m.enter_scope();
    for i in 0..5 {
        let t = object(i);
        // SAFETY: a tensor of these tests.
        unsafe { m.register_tensor(t.cast()) };
        m.release_ptr(t);
    }
    // The size is unknown: each tensor counts as 4 KiB.
    assert_eq!((destroyed(), m.stats().quarantined_tensors), (vec![0, 1], 3));
    m.exit_scope();
    assert_eq!(m.stats().peak_quarantined_bytes, 4 * 4096);
    let mut rest = destroyed();
    rest.sort_unstable();
    assert_eq!(rest, [2, 3, 4]);
}

#[test]
fn frames_close_what_was_left_open_and_extra_exits_do_nothing() {
    let mut m = MemoryManager::new();
    m.function_enter(1);
    m.enter_scope();
    m.enter_scope();
    add(&mut m, 1);
    m.function_exit();
    assert_eq!((destroyed(), m.scope_depth(), m.misuses(Misuse::ScopeRepaired)), (vec![1], 1, 2));
    m.function_exit();
    assert_eq!(m.misuses(Misuse::FunctionExit), 1);
    m.function_enter(2);
    m.exit_scope();
    assert_eq!(
        (m.scope_depth(), m.misuses(Misuse::ExitScope)),
        (2, 1),
        "a function's own scope ends with it"
    );
    assert!(
        m.get_buffer(2, 1).is_null()
            && m.get_buffer(0, usize::MAX).is_null()
            && !m.get_buffer(0, 0).is_null()
    );
    m.function_exit();
    assert!(m.get_buffer(0, 1).is_null());
    m.function_enter(usize::MAX);
    assert!(m.get_buffer(0, 1).is_null());
    m.function_exit();
    let counted =
        [Misuse::SlotIndex, Misuse::Size, Misuse::NoFrame, Misuse::SlotCount].map(|x| m.misuses(x));
    assert_eq!(counted, [2, 1, 1, 1]);
}

/// Regression of the plain design: a slot that grew by one retained O(n²) bytes.
#[test]
fn a_slot_that_grows_by_one_retains_a_multiple_of_its_size() {
    let m = MemoryManager::new();
    m.function_enter(1);
    let first = m.get_buffer(0, 8).cast::<u64>();
    // SAFETY: the buffer has 8 bytes.
    unsafe { first.write(77) };
    for size in 9..20_000 {
        assert!(!m.get_buffer(0, size).is_null());
    }
    let stats = m.stats();
    assert!(stats.slot_bytes + stats.deferred_bytes < 4 * 20_000, "{stats:?}");
    // SAFETY: outgrown buffers stay until the frame ends.
    assert_eq!(unsafe { first.read() }, 77);
    m.function_exit();
    let stats = m.stats();
    assert_eq!(
        (stats.slot_bytes, stats.deferred_bytes, stats.slot_buffers, stats.deferred_buffers),
        (0, 0, 0, 0)
    );
}

#[test]
fn marks_close_what_error_returns_left_open() {
    let mut m = MemoryManager::new();
    m.enter_scope();
    let mark = m.mark();
    for i in 0..3 {
        m.function_enter(1);
        m.enter_scope();
        add(&mut m, i);
    }
    m.unwind(mark);
    assert_eq!((m.scope_depth(), destroyed()), (2, vec![2, 1, 0]));
    m.exit_scope();
    m.unwind(mark);
    m.unwind(-1);
    assert_eq!((m.scope_depth(), m.misuses(Misuse::Mark)), (1, 2));
}

#[test]
fn two_hundred_thousand_nested_vectors_are_released() {
    let mut m = MemoryManager::new();
    m.enter_scope();
    let mut inner: *mut c_void = add(&mut m, 9);
    m.unregister(inner);
    for _ in 0..200_000 {
        let vec = new_vector();
        // SAFETY: new vectors; the element's count moves to the vector.
        unsafe {
            push(vec, inner);
            m.register_vec_ptr(vec.cast());
        }
        m.unregister(vec.cast());
        inner = vec.cast();
    }
    assert_eq!(m.object_count(), 200_001);
    assert!(m.release_ptr(inner));
    assert_eq!((m.object_count(), destroyed()), (0, vec![9]));
}

/// Objects whose destructors release the next one: iterative too.
#[test]
fn a_long_chain_of_destructors_needs_no_stack() {
    thread_local!(static MANAGER: Cell<*mut MemoryManager> = const { Cell::new(ptr::null_mut()) });
    unsafe extern "C" fn free_node(node: *mut c_void) {
        // SAFETY: nodes are boxes of the next node's address.
        let next = unsafe { Box::from_raw(node.cast::<*mut c_void>()) };
        // SAFETY: set below, for as long as nodes are destroyed. The manager allows calls from
        // destructors.
        unsafe { (*MANAGER.get()).release_ptr(*next) };
    }
    let mut m = MemoryManager::new();
    let mut next: *mut c_void = ptr::null_mut();
    for _ in 0..200_000 {
        let node = Box::into_raw(Box::new(next)).cast();
        // SAFETY: `free_node` destroys the node.
        unsafe { m.register_custom(node, free_node) };
        m.unregister(node);
        next = node;
    }
    MANAGER.set(&raw mut m);
    // SAFETY: all uses go through this pointer, which stays valid to the end of the test.
    unsafe {
        (*MANAGER.get()).release_ptr(next);
        assert_eq!((*MANAGER.get()).object_count(), 0);
    }
}

#[test]
fn a_vector_that_holds_itself_is_reported_as_a_leak() {
    let m = MemoryManager::new();
    m.enter_scope();
    let vec = new_vector();
    // SAFETY: a new vector, which gets a count of itself.
    unsafe {
        m.register_vec_ptr(vec.cast());
        push(vec, vec.cast());
    }
    m.acquire_ptr(vec.cast());
    m.exit_scope();
    let report = m.leak_report();
    assert_eq!((report.objects(), report.groups[0].kind), (1, Kind::VecPtr));
    assert!(report.to_string().contains("1 x VecPtr name=- bytes=0"), "{report}");
    // SAFETY: the vector is alive and belongs to this test. The write breaks the cycle, for the
    // leak checker.
    unsafe { (*vec).len = 0 };
    assert!(m.release_ptr(vec.cast()));
}

#[test]
fn leaks_are_reported_by_name() {
    let m = MemoryManager::new();
    let mut all = Vec::new();
    for (name, n) in [(c"List", 2), (c"Node", 3), (c"Leaf", 1)] {
        for _ in 0..n {
            // SAFETY: a new block that no other code frees.
            all.push(unsafe { libc::malloc(32) });
            // SAFETY: the block is new, and only the manager frees it.
            unsafe { m.register_struct_named(all[all.len() - 1], name, 32) };
        }
    }
    let report = m.leak_report();
    let groups: Vec<_> =
        report.groups.iter().map(|g| (g.name.as_str(), g.objects, g.bytes)).collect();
    assert_eq!(groups, [("Node", 3, 96), ("List", 2, 64), ("Leaf", 1, 32)]);
    assert_eq!((m.stats().live_bytes, m.stats().peak_live_bytes), (192, 192));
    drop(m);
}

#[test]
fn a_destructor_can_neither_close_what_it_found_open_nor_leave_its_own_behind() {
    thread_local!(static MANAGER: Cell<*mut MemoryManager> = const { Cell::new(ptr::null_mut()) });
    unsafe extern "C" fn meddle(_: *mut c_void) {
        // SAFETY: set below. The manager allows calls from destructors.
        let m = unsafe { &mut *MANAGER.get() };
        m.exit_scope();
        m.exit_scope();
        m.function_exit();
        assert!(m.get_buffer(0, 8).is_null(), "the frame is the interrupted function's");
        m.unwind(1);
        m.function_enter(1);
        m.enter_scope();
    }
    let mut m = MemoryManager::new();
    let mut dummy = 0u8;
    m.function_enter(1);
    m.enter_scope();
    // SAFETY: `meddle` does not access the memory.
    unsafe { m.register_custom((&raw mut dummy).cast(), meddle) };
    MANAGER.set(&raw mut m);
    // SAFETY: the pointer was set above and stays valid to the end of the test.
    let m = unsafe { &mut *MANAGER.get() };
    m.exit_scope();
    assert_eq!(m.scope_depth(), 2);
    let counted = [Misuse::ExitScope, Misuse::FunctionExit, Misuse::Mark, Misuse::FrameRepaired]
        .map(|x| m.misuses(x));
    assert_eq!(counted, [2, 1, 1, 1]);
    m.function_exit();
    assert_eq!(m.scope_depth(), 1);
}

#[test]
fn peaks_and_counts() {
    let mut m = MemoryManager::new();
    for round in 0..3 {
        m.enter_scope();
        for i in 0..1000 {
            add(&mut m, i);
        }
        assert_eq!(m.stats().live_objects, 1000, "round {round}");
        m.exit_scope();
        assert_eq!(destroyed().len(), 1000);
    }
    let stats = m.stats();
    assert_eq!((stats.live_objects, stats.peak_live_objects, stats.threads), (0, 1000, 1));
    assert_eq!(stats.total_misuses(), 0);
    assert!(m.last_error().is_none());
}
