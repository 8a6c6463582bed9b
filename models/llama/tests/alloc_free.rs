//! From the submission of a step to its token no allocation happens: neither on the heap, by any
//! thread, nor from the system.

use leasehold::{Context, DeviceId};
use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
use stats_alloc::{INSTRUMENTED_SYSTEM, Stats, StatsAlloc};
use std::alloc::System;
use std::path::Path;

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

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
    let before = ALLOCATOR.stats();
    for i in 8..40 {
        point = decoder.launch(&graph).unwrap();
        decoder.token(i, point).unwrap();
    }
    let calls = ALLOCATOR.stats() - before;
    assert_eq!(calls, Stats::default(), "heap calls in 32 tokens");
    assert_eq!(runtime.allocator().stats().driver_calls, driver, "calls to the system's memory");
    assert_eq!(maps(), regions, "regions of the address space");
}
