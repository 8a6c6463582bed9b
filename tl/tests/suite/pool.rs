//! The tensor pool, alone and behind the manager.

use std::cell::RefCell;

use leasehold_memory::{
    Config, MemoryManager, OpaqueTensor, PoolLimits, PoolOutcome, TensorInfo, TensorPool,
};
use proptest::prelude::*;

use crate::tensors;

thread_local! {
    static GONE: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

unsafe extern "C" fn gone(tensor: *mut OpaqueTensor) {
    GONE.with_borrow_mut(|g| g.push(tensor.addr()));
}

fn tensor(n: usize) -> *mut OpaqueTensor {
    std::ptr::without_provenance_mut(n)
}

fn release(pool: &mut TensorPool, t: usize, n: usize, dtype: u8, device: u8) -> PoolOutcome {
    // SAFETY: `gone` only records the address.
    unsafe { pool.release(tensor(t), n, dtype, device) }
}

#[test]
fn last_in_first_out_by_key_and_duplicates_under_any_key() {
    let mut pool =
        TensorPool::with_destructor(PoolLimits { per_key: 2, ..PoolLimits::default() }, gone);
    assert_eq!(release(&mut pool, 1, 8, 0, 0), PoolOutcome::Pooled);
    assert_eq!(release(&mut pool, 2, 8, 0, 0), PoolOutcome::Pooled);
    assert_eq!(release(&mut pool, 3, 8, 0, 0), PoolOutcome::Full);
    assert_eq!(release(&mut pool, 1, 8, 0, 0), PoolOutcome::Duplicate);
    assert_eq!(release(&mut pool, 1, 9, 1, 2), PoolOutcome::Duplicate);
    for (dtype, device, bytes) in [(7, 0, 64), (0, 3, 32), (255, 255, 64)] {
        assert_eq!(
            release(&mut pool, 5, 8, dtype, device),
            PoolOutcome::Pooled,
            "the caller's own ids are keys too"
        );
        assert_eq!((pool.acquire(8, 6, device), pool.total_bytes()), (None, 64 + bytes));
        assert_eq!(pool.acquire(8, dtype, device), Some(tensor(5)));
    }
    assert_eq!((pool.total_count(), pool.total_bytes(), pool.key_count()), (2, 64, 4));
    assert_eq!(pool.acquire(8, 0, 1), None);
    assert_eq!(
        (pool.acquire(8, 0, 0), pool.acquire(8, 0, 0), pool.acquire(8, 0, 0)),
        (Some(tensor(2)), Some(tensor(1)), None)
    );
    assert_eq!(release(&mut pool, 1, usize::MAX, 1, 0), PoolOutcome::Full);
}

#[test]
fn the_keys_used_longest_ago_go_first() {
    let mut pool =
        TensorPool::with_destructor(PoolLimits { per_key: 8, keys: 3, bytes: 100 }, gone);
    for (t, n) in [(1, 10), (2, 20), (3, 30)] {
        assert_eq!(release(&mut pool, t, n, 4, 0), PoolOutcome::Pooled);
    }
    // Key 10 is used again, so key 20 is now the least recently used.
    assert_eq!(pool.acquire(10, 4, 0), Some(tensor(1)));
    assert_eq!(release(&mut pool, 1, 10, 4, 0), PoolOutcome::Pooled);
    assert_eq!(release(&mut pool, 4, 55, 4, 0), PoolOutcome::Pooled);
    assert_eq!(GONE.take(), [2]);
    assert_eq!(release(&mut pool, 5, 101, 4, 0), PoolOutcome::Full, "larger than the budget");
    assert_eq!(pool.trim(70), 30);
    assert_eq!((GONE.take(), pool.total_bytes()), (vec![3], 65));
    pool.clear();
    assert_eq!((pool.total_count(), pool.total_bytes(), pool.key_count()), (0, 0, 0));
}

/// Regression of the plain design: the count stayed constant while memory grew by gigabytes.
#[test]
fn a_growing_cache_leaves_a_bounded_pool() {
    let m = tensors::manager(Config::default());
    m.enter_scope();
    let mut cache = tensors::create(&m, 1);
    m.unregister(cache.cast());
    for step in 1..=2000 {
        m.enter_scope();
        let next = tensors::create(&m, step * 1024);
        m.unregister(next.cast());
        m.release_ptr(cache.cast());
        m.exit_scope();
        cache = next;
    }
    m.release_ptr(cache.cast());
    m.exit_scope();
    let stats = m.stats();
    let limits = PoolLimits::default();
    assert!(
        stats.pooled_bytes <= limits.bytes && stats.peak_pooled_bytes <= limits.bytes,
        "{stats:?}"
    );
    assert!(stats.pooled_tensors as usize <= limits.keys, "{stats:?}");
    let before = stats.pooled_bytes;
    assert_eq!(m.pool_trim(before / 2) + m.stats().pooled_bytes, before);
    assert!(m.pool_trim(0) > 0);
    assert_eq!((m.stats().pooled_bytes, m.pool_count(), m.object_count()), (0, 0, 0));
}

#[test]
fn a_described_tensor_comes_back_from_the_pool_and_a_strange_one_does_not() {
    unsafe extern "C" fn describe(_: *const OpaqueTensor, info: *mut TensorInfo) -> i32 {
        // SAFETY: the manager passes a struct to fill in.
        unsafe { *info = TensorInfo { num_elements: 4, dtype_id: 0, device_id: 1 } };
        1
    }
    let m = MemoryManager::new();
    // SAFETY: both hooks do not access the memory.
    unsafe {
        m.set_tensor_destructor(Some(gone));
        m.set_tensor_describer(Some(describe));
    }
    m.enter_scope();
    // SAFETY: the hooks do not access the memory.
    unsafe { m.register_tensor(tensor(4096)) };
    m.exit_scope();
    assert_eq!((m.pool_count(), m.refcount_count()), (1, 0));
    // A pooled tensor that is registered again leaves the pool.
    m.enter_scope();
    // SAFETY: the hooks do not access the memory.
    unsafe { m.register_tensor(tensor(4096)) };
    assert_eq!((m.pool_count(), m.refcount_count()), (0, 1));
    m.exit_scope();
    assert_eq!(m.pool_acquire(4, 0, 0), None);
    assert_eq!(m.pool_acquire(4, 0, 1), Some(tensor(4096)));
    assert_eq!((m.pool_acquire(4, 0, 1), m.object_count()), (None, 0));
    assert!(GONE.take().is_empty());
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]
    #[test]
    fn behaves_like_a_naive_pool(ops in prop::collection::vec((0u8..3, 1usize..30, 1usize..6), 1..200)) {
        let limits = PoolLimits { per_key: 3, keys: 4, bytes: 40 };
        let mut pool = TensorPool::with_destructor(limits, gone);
        // Keys from the least to the most recently used one, each with its tensors.
        let mut model: Vec<(usize, Vec<usize>)> = Vec::new();
        GONE.take();
        for (op, t, n) in ops {
            let at = model.iter().position(|k| k.0 == n);
            if let Some(at) = at.filter(|_| op == 0 || !model.iter().any(|k| k.1.contains(&t))) {
                let key = model.remove(at);
                model.push(key);
            }
            if op == 0 {
                let expected = model.iter_mut().find(|k| k.0 == n).and_then(|k| k.1.pop());
                prop_assert_eq!(pool.acquire(n, 4, 0), expected.map(tensor));
            } else {
                let expected = if model.iter().any(|k| k.1.contains(&t)) {
                    PoolOutcome::Duplicate
                } else {
                    if !model.iter().any(|k| k.0 == n) {
                        model.push((n, Vec::new()));
                    }
                    let key = model.last_mut().unwrap();
                    if key.1.len() == limits.per_key {
                        PoolOutcome::Full
                    } else {
                        key.1.push(t);
                        PoolOutcome::Pooled
                    }
                };
                let mut evicted = Vec::new();
                if expected == PoolOutcome::Pooled {
                    while model.len() > limits.keys {
                        evicted.extend(model.remove(0).1);
                    }
                    let bytes = |m: &[(usize, Vec<usize>)]| m.iter().map(|k| k.0 * k.1.len()).sum::<usize>();
                    while bytes(&model) > limits.bytes as usize {
                        evicted.extend(model[0].1.pop());
                        if model[0].1.is_empty() {
                            model.remove(0);
                        }
                    }
                }
                prop_assert_eq!(release(&mut pool, t, n, 4, 0), expected);
                let mut seen = GONE.take();
                seen.sort_unstable();
                evicted.sort_unstable();
                prop_assert_eq!(seen, evicted);
            }
            prop_assert_eq!(pool.total_count(), model.iter().map(|k| k.1.len()).sum::<usize>());
            prop_assert_eq!(pool.total_bytes() as usize, model.iter().map(|k| k.0 * k.1.len()).sum::<usize>());
        }
        pool.clear();
        GONE.take();
    }
}

/// A pool without a destructor uses the process's. Without that one too, its tensors are lost, and
/// a misuse is counted.
#[test]
fn a_pool_of_strange_tensors_uses_the_destructor_of_the_process() {
    use leasehold_core::sync::atomic::{AtomicUsize, Ordering::Relaxed};
    use leasehold_memory::{Misuse, Stats, ffi};
    static DESTROYED: AtomicUsize = AtomicUsize::new(0);
    unsafe extern "C" fn destroy(tensor: *mut OpaqueTensor) {
        DESTROYED.fetch_add(tensor.addr(), Relaxed);
    }
    fn lost() -> u64 {
        let mut stats = Stats { size: size_of::<Stats>() as u64, ..Stats::default() };
        // SAFETY: the struct has the size that it states.
        unsafe { ffi::tl_mem_stats(&raw mut stats) };
        stats.misuses[Misuse::NoDestructor as usize]
    }
    let mut pool = TensorPool::new();
    assert_eq!(release(&mut pool, 64, 4, 9, 9), PoolOutcome::Pooled);
    let before = lost();
    pool.clear();
    assert_eq!((lost() - before, pool.total_count()), (1, 0));
    // SAFETY: `destroy` does not access the memory, and no other test of this process has foreign
    // tensors.
    unsafe { ffi::tl_mem_set_tensor_destructor(Some(destroy)) };
    assert_eq!(release(&mut pool, 128, 4, 9, 9), PoolOutcome::Pooled);
    drop(pool);
    assert_eq!(DESTROYED.load(Relaxed), 128);
    // SAFETY: removing the hook is always allowed.
    unsafe { ffi::tl_mem_set_tensor_destructor(None) };
}
