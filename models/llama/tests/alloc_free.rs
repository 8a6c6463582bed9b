//! From the submission of a step to its token no allocation happens: neither on the heap, by any
//! thread, nor from the system.

use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::{Context, DeviceId};
use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
use std::alloc::{GlobalAlloc, Layout, System};
use std::path::Path;

/// An allocator that counts every call of every thread.
struct Counting;

static CALLS: AtomicU64 = AtomicU64::new(0);

// SAFETY: every call is forwarded.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the call is forwarded.
        unsafe { System.alloc(layout) }
    }
    unsafe fn dealloc(&self, at: *mut u8, layout: Layout) {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the call is forwarded.
        unsafe { System.dealloc(at, layout) }
    }
    unsafe fn realloc(&self, at: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        CALLS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the call is forwarded.
        unsafe { System.realloc(at, layout, size) }
    }
}

#[global_allocator]
static GLOBAL: Counting = Counting;

#[test]
fn a_steady_token_allocates_nothing() {
    let dir = Path::new(leasehold_llama::demo_model::FOLDER);
    let config = Config::from_dir(dir).unwrap();
    // SAFETY: a model of the repository, which no test changes.
    let weights = unsafe { Weights::from_dir(dir, &config) }.unwrap();
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
    let mut decoder = Decoder::new(&model, 64, 64, Sampling::default()).unwrap();
    let graph = decoder.record().unwrap();
    let mut point = decoder.prefill(&[316, 221]).unwrap();
    decoder.token(0, point).unwrap();
    for i in 1..8 {
        point = decoder.launch(&graph).unwrap();
        decoder.token(i, point).unwrap();
    }
    let maps = || std::fs::read_to_string("/proc/self/maps").unwrap_or_default().lines().count();
    let (regions, driver) = (maps(), runtime.allocator().stats().driver_calls);
    let before = CALLS.load(Ordering::SeqCst);
    for i in 8..40 {
        point = decoder.launch(&graph).unwrap();
        decoder.token(i, point).unwrap();
    }
    let calls = CALLS.load(Ordering::SeqCst) - before;
    assert_eq!(calls, 0, "heap calls in 32 tokens");
    assert_eq!(runtime.allocator().stats().driver_calls, driver, "calls to the system's memory");
    assert_eq!(maps(), regions, "regions of the address space");
}
