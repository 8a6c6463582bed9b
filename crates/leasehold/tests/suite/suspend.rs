//! Pools whose memory goes and comes back at the same addresses.

use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{
    BackendKind, Buffer, Context, DeviceId, Error, Lease, Result, Runtime, Stream, View,
};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, MachineConfig, SimBackend, When};
use std::sync::Arc;

const BYTES: u64 = 3 << 20;
const WORDS: usize = BYTES as usize / 4;

/// CUDA over a simulated driver.
fn cuda(config: CudaConfig) -> (Runtime, Arc<SimDriver>) {
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(7))).unwrap();
    let driver = Arc::new(driver);
    let backend = Arc::new(CudaBackend::with_ops(driver.clone(), config).unwrap());
    let context = Context::with_backends(vec![backend]);
    (context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap(), driver)
}

/// Devices with virtual memory.
fn runtimes() -> Vec<Runtime> {
    let sim = Arc::new(SimBackend::new(MachineConfig::seed(6)).unwrap());
    let sim = Context::with_backends(vec![sim]).runtime(DeviceId::new(BackendKind::Sim, 0));
    vec![runtime(), sim.unwrap(), cuda(CudaConfig::default()).0]
}

/// Words that tell each place from every other.
fn words(first: u32) -> Vec<u32> {
    (0..WORDS as u32).map(|i| first.wrapping_add(i.wrapping_mul(2_654_435_761))).collect()
}

fn written(pool: &Pool, runtime: &Runtime, first: u32) -> Lease<Buffer> {
    let buffer = pool.alloc(BYTES).unwrap();
    runtime.stream().upload_blocking(buffer.view(), &words(first)).unwrap();
    buffer
}

#[test]
fn contents_come_back_at_the_same_addresses_and_graphs_stay_valid() {
    for runtime in runtimes() {
        let at = runtime.device();
        let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
        let [x, y] = [1, 2].map(|first| written(&pool, &runtime, first));
        let (own, out) = (runtime.alloc(BYTES).unwrap(), runtime.alloc(2 * BYTES).unwrap());
        runtime.stream().fill(own.view(), 9u8).unwrap();
        let graph = runtime
            .record_graph(|r| {
                r.stream().copy(out.part(..BYTES as usize)?, x.view())?;
                r.stream().copy(out.part(BYTES as usize..)?, y.view())
            })
            .unwrap();
        let addresses = (x.addr(), y.addr());
        let before = pool.stats();
        assert_eq!((before.live, before.live_bytes, before.saved), (2, 2 * BYTES, 0), "{at}");
        assert!(before.reserved >= 2 * BYTES);
        for round in 0..if at.backend == BackendKind::Cpu { 100 } else { 5 } {
            let freed = pool.suspend(Contents::Keep).unwrap();
            assert!(freed >= 2 * BYTES, "{at}: {freed}");
            let away = pool.stats();
            assert!(pool.is_suspended());
            assert_eq!((away.reserved, away.live), (0, 2), "{at}");
            assert!(away.saved >= 2 * BYTES, "{at}: {away:?}");
            assert_eq!(kind(graph.launch()), "Suspended", "{at}");
            assert_eq!(kind(pool.suspend(Contents::Keep)), "InvalidState", "{at}");
            // Other work goes on.
            runtime.stream().fill(out.view(), round as u32).unwrap();
            pool.resume().unwrap();
            assert_eq!(kind(pool.resume()), "InvalidState", "{at}");
            assert_eq!((x.addr(), y.addr()), addresses, "{at}");
            graph.launch().unwrap();
            if round % 25 == 0 || round == 4 {
                let all: Vec<u32> = runtime.to_vec(&out).unwrap();
                assert!(all[..WORDS] == words(1) && all[WORDS..] == words(2), "{at}, {round}");
            }
        }
        assert!(runtime.to_vec::<u32>(&x).unwrap() == words(1), "{at}");
        let after = pool.stats();
        assert_eq!((after.live, after.saved), (2, 0), "{at}");
        drop((graph, x, y));
        pool.suspend(Contents::Keep).unwrap();
        let empty = pool.stats();
        assert_eq!((empty.live, empty.reserved, empty.saved), (0, 0, 0), "{at}: {empty:?}");
        pool.resume().unwrap();
        assert!(runtime.to_vec::<u8>(&own).unwrap().iter().all(|&b| b == 9), "{at}");
    }
}

/// Each way to use a buffer, by its name.
fn uses(
    runtime: &Runtime,
    stream: &Stream,
    away: &Lease<Buffer>,
    other: &Lease<Buffer>,
) -> Vec<(&'static str, Result<()>)> {
    let pinned = runtime.alloc_pinned(BYTES).unwrap();
    let mut bytes = vec![0u8; BYTES as usize];
    let half = BYTES as usize / 2;
    let mut all = vec![
        ("fill", stream.fill(away.view(), 1u8)),
        ("fill of a part", stream.fill(away.part(..16).unwrap(), 1u8)),
        ("fill_with", {
            let values = away.view().values::<[u32; 3]>().unwrap();
            stream.fill_with(values, [1, 2, 3])
        }),
        ("copy to", stream.copy(away.view(), other.view())),
        ("copy from", stream.copy(other.view(), away.view())),
        ("copy within", stream.copy(away.part(..half).unwrap(), away.part(half..).unwrap())),
        ("copy_pinned to", stream.copy_pinned(away.view(), pinned.view())),
        ("copy_pinned from", stream.copy_pinned(pinned.view(), away.view())),
        ("upload", stream.upload(away.view(), &bytes)),
        ("upload of a few", stream.upload(away.part(..4).unwrap(), &bytes[..4])),
        ("upload_owned", stream.upload_owned(away.view(), bytes.clone())),
        ("upload_blocking", stream.upload_blocking(away.view(), &bytes)),
        ("download", stream.download(&mut bytes, away.view())),
        ("to_vec", runtime.to_vec::<u8>(away).map(drop)),
        ("another lease", {
            let found = runtime.allocator().lease(away.handle()).unwrap();
            stream.fill(found.view(), 1u8)
        }),
    ];
    if runtime.raw_device().caps().host_visible {
        // SAFETY: nobody submits work, and nothing is suspended, while the bytes are looked at.
        all.push(("map_read", unsafe { stream.map_read(away.view()) }.map(drop)));
        // SAFETY: as above.
        all.push(("map_write", unsafe { stream.map_write(away.view()) }.map(drop)));
    }
    all
}

#[test]
fn every_use_of_a_suspended_buffer_is_refused_by_name_and_works_again() {
    for runtime in runtimes() {
        let at = runtime.device();
        let pool = Pool::new(&runtime, "idle weights", PoolKind::Suspendable).unwrap();
        let x = written(&pool, &runtime, 5);
        let other = runtime.alloc(BYTES).unwrap();
        runtime.stream().fill(other.view(), 3u8).unwrap();
        let second = runtime.create_stream().unwrap();
        pool.suspend(Contents::Keep).unwrap();
        for stream in [runtime.stream(), &second] {
            for (name, result) in uses(&runtime, stream, &x, &other) {
                let text = result.expect_err(name).to_string();
                assert!(
                    text.contains("pool idle weights is suspended") && text.contains("resume it"),
                    "{at}, {name}: {text}"
                );
            }
            assert!(stream.failure().is_none(), "{at}");
        }
        assert_eq!(kind(pool.alloc(16)), "Suspended", "{at}");
        assert!(runtime.to_vec::<u8>(&other).unwrap().iter().all(|&b| b == 3), "{at}");
        let record = || runtime.record_graph(|r| r.stream().copy(other.view(), x.view()));
        assert_eq!(kind(record()), "Suspended", "{at}");
        pool.resume().unwrap();
        let graph = record().unwrap();
        pool.suspend(Contents::Keep).unwrap();
        assert_eq!(kind(graph.launch_on(&second)), "Suspended", "{at}");
        let update = leasehold::GraphUpdate::new().buffer(&other, &x);
        assert_eq!(kind(graph.update(&update)), "Suspended", "{at}");
        pool.resume().unwrap();
        graph.launch_on(&second).unwrap();
        assert!(runtime.to_vec::<u32>(&other).unwrap() == words(5), "{at}");
        for stream in [runtime.stream(), &second] {
            for (name, result) in uses(&runtime, stream, &x, &other) {
                assert!(result.is_ok(), "{at}, {name}: {result:?}");
            }
        }
        assert_eq!(pool.alloc(16).map(|b| b.len()).unwrap(), 16);
        assert!(pool.alloc(0).unwrap().is_empty());
    }
}

#[test]
fn kernels_and_copies_from_another_device_are_refused_too() {
    let sim = Arc::new(SimBackend::new(MachineConfig::seed(6)).unwrap());
    let cpu = Arc::new(leasehold::cpu::CpuBackend::new());
    let context = Context::with_backends(vec![cpu, sim]);
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let sim = context.runtime(DeviceId::new(BackendKind::Sim, 0)).unwrap();
    let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
    let (x, y) = (pool.alloc(64).unwrap(), runtime.upload(&[1.0f32; 16]).unwrap());
    runtime.stream().fill(x.view(), 2.0f32).unwrap();
    let there = sim.upload(&[7.0f32; 16]).unwrap();
    let kernel = axpy();
    let run = || {
        let params = 1.0f32.to_ne_bytes();
        launch(runtime.stream(), &kernel, &[x.read(), y.read_write()], &params, 4)
    };
    run().unwrap();
    pool.suspend(Contents::Keep).unwrap();
    assert_eq!(kind(run()), "Suspended");
    assert_eq!(kind(sim.stream().copy(there.view(), x.view())), "Suspended");
    assert_eq!(kind(runtime.stream().copy(there.view(), x.view())), "Suspended");
    assert_eq!(kind(sim.stream().copy(x.view(), there.view())), "Suspended");
    assert!(sim.stream().failure().is_none() && runtime.stream().failure().is_none());
    assert_eq!(sim.to_vec(&there).unwrap(), [7.0; 16]);
    pool.resume().unwrap();
    run().unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [5.0; 16]);
    sim.stream().copy(there.view(), x.view()).unwrap();
    assert_eq!(sim.to_vec(&there).unwrap(), [2.0; 16]);
}

#[test]
fn discarded_contents_cost_no_host_memory() {
    for runtime in runtimes() {
        let pool = Pool::new(&runtime, "cache", PoolKind::Suspendable).unwrap();
        let x = written(&pool, &runtime, 1);
        pool.suspend(Contents::Discard).unwrap();
        assert_eq!((pool.stats().saved, pool.stats().reserved), (0, 0));
        pool.resume().unwrap();
        runtime.stream().upload(x.view(), &words(4)).unwrap();
        assert!(runtime.to_vec::<u32>(&x).unwrap() == words(4));
    }
}

#[test]
fn a_suspension_waits_for_work_that_was_submitted_before() {
    let runtime = runtime();
    let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
    let x = written(&pool, &runtime, 1);
    let other = runtime.create_stream().unwrap();
    let dropped = written(&pool, &runtime, 2);
    let held = hold(&other);
    other.fill(x.view(), 8u8).unwrap();
    other.fill(dropped.view(), 8u8).unwrap();
    drop(dropped);
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        let suspending = s.spawn(|| {
            pool.suspend(Contents::Keep).unwrap();
            over.store(true, Ordering::Release);
        });
        // Later work is refused as soon as the suspension has begun.
        while kind(runtime.stream().fill(x.part(..4).unwrap(), 8u8)) != "Suspended" {
            std::thread::yield_now();
        }
        std::thread::sleep(std::time::Duration::from_millis(50));
        assert!(!over.load(Ordering::Acquire), "it waits");
        open(held);
        suspending.join().unwrap();
    });
    pool.resume().unwrap();
    assert!(runtime.to_vec::<u8>(&x).unwrap().iter().all(|&b| b == 8));
    assert_eq!(pool.stats().live, 1);
}

/// A kernel launch counts in a buffer of the pool. None is lost, and none comes too late.
#[test]
fn a_thread_that_launches_while_another_suspends_loses_nothing() {
    let runtime = runtime();
    let pool = Pool::new(&runtime, "counters", PoolKind::Suspendable).unwrap();
    let counters = pool.alloc(64).unwrap();
    let ones = runtime.upload(&[1.0f32; 16]).unwrap();
    runtime.stream().fill(counters.view(), 0.0f32).unwrap();
    let kernel = axpy();
    let params = 1.0f32.to_ne_bytes();
    let operands = || [ones.read(), counters.read_write()];
    let graph = runtime
        .record_graph(|r| launch(r.stream(), &kernel, &operands(), &params, 4).map(drop))
        .unwrap();
    let (stop, done, refused) = (AtomicBool::new(false), AtomicU32::new(0), AtomicU32::new(0));
    std::thread::scope(|s| {
        for by_graph in [true, false] {
            let (runtime, kernel, graph) = (&runtime, &kernel, &graph);
            let (stop, done, refused, operands) = (&stop, &done, &refused, &operands);
            s.spawn(move || {
                let stream = runtime.create_stream().unwrap();
                while !stop.load(Ordering::Relaxed) {
                    let launched = match by_graph {
                        true => graph.launch_on(&stream).map(drop),
                        false => launch(&stream, kernel, &operands(), &params, 4).map(drop),
                    };
                    match launched {
                        Ok(()) => done.fetch_add(1, Ordering::Relaxed),
                        Err(Error::Suspended(_)) => refused.fetch_add(1, Ordering::Relaxed),
                        Err(e) => panic!("{e}"),
                    };
                }
                stream.synchronize().unwrap();
            });
        }
        for _ in 0..100 {
            pool.suspend(Contents::Keep).unwrap();
            let seen = refused.load(Ordering::Relaxed);
            while refused.load(Ordering::Relaxed) == seen {
                std::thread::yield_now();
            }
            pool.resume().unwrap();
            let seen = done.load(Ordering::Relaxed);
            while done.load(Ordering::Relaxed) == seen {
                std::thread::yield_now();
            }
        }
        stop.store(true, Ordering::Relaxed);
    });
    let done = done.load(Ordering::Relaxed);
    assert!(done < 1 << 24, "{done} are too many for f32");
    assert_eq!(runtime.to_vec::<f32>(&counters).unwrap(), [done as f32; 16]);
}

/// A buffer that is held exclusively, or that no handle leads to, could be used later without a
/// look at its record. The pool is not suspended then.
#[test]
fn a_pool_with_a_buffer_out_of_reach_is_not_suspended() {
    let runtime = runtime();
    let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
    let (x, y) = (written(&pool, &runtime, 1), pool.alloc(64).unwrap());
    let unique = y.try_unique().unwrap();
    let text = pool.suspend(Contents::Keep).unwrap_err().to_string();
    assert!(text.contains("1 buffers of pool weights"), "{text}");
    runtime.stream().fill(x.view(), 1u8).unwrap();
    let unlisted = unique.share_unlisted();
    assert_eq!(kind(pool.suspend(Contents::Keep)), "InvalidState");
    assert!(!pool.is_suspended());
    runtime.stream().fill(unlisted.view(), 1u8).unwrap();
    runtime.stream().fill(x.view(), 1u8).unwrap();
    drop(unlisted);
    pool.suspend(Contents::Keep).unwrap();
    assert!(x.try_unique().is_err(), "the pool holds it too");
    pool.resume().unwrap();
}

#[test]
fn buffers_and_pools_may_be_dropped_while_suspended() {
    for runtime in runtimes() {
        let at = runtime.device();
        let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
        let [x, y] = [1, 2].map(|first| written(&pool, &runtime, first));
        let imported = runtime.allocator().stats().imported;
        pool.suspend(Contents::Keep).unwrap();
        drop(x);
        pool.resume().unwrap();
        assert_eq!(pool.stats().live, 1, "{at}");
        assert!(pool.stats().reserved < 2 * BYTES, "{at}: it takes no memory for what is gone");
        assert!(runtime.to_vec::<u32>(&y).unwrap() == words(2), "{at}");
        pool.suspend(Contents::Keep).unwrap();
        drop(pool);
        assert_eq!(kind(runtime.stream().fill(y.view(), 1u8)), "Suspended", "{at}");
        assert_eq!(kind(runtime.to_vec::<u8>(&y)), "Suspended", "{at}");
        let clone = y.clone();
        drop(y);
        assert_eq!(kind(runtime.stream().fill(clone.view(), 1u8)), "Suspended", "{at}");
        drop(clone);
        assert_eq!(runtime.allocator().stats().imported, imported - 2, "{at}");
        // The rows of the dropped buffers serve others, whose records nobody locks.
        let pool = Pool::new(&runtime, "later", PoolKind::Suspendable).unwrap();
        for first in 0..4 {
            let x = written(&pool, &runtime, first);
            assert!(runtime.to_vec::<u32>(&x).unwrap() == words(first), "{at}");
        }
        let x = written(&pool, &runtime, 1);
        pool.suspend(Contents::Keep).unwrap();
        drop((runtime, pool));
        drop(x);
    }
}

#[test]
fn a_resumption_that_finds_no_memory_can_be_repeated() {
    for runtime in runtimes() {
        let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
        let x = written(&pool, &runtime, 1);
        let needed = pool.stats().reserved;
        pool.suspend(Contents::Keep).unwrap();
        pool.set_limit(needed - 1);
        for _ in 0..3 {
            assert_eq!(kind(pool.resume()), "OverBudget");
            assert!(pool.is_suspended() && pool.stats().reserved == 0);
            assert_eq!(kind(runtime.to_vec::<u8>(&x)), "Suspended");
        }
        pool.set_limit(needed);
        pool.resume().unwrap();
        assert!(runtime.to_vec::<u32>(&x).unwrap() == words(1));
    }
}

/// The driver fails at each of its calls in turn. Whatever happens, the contents are there again
/// once it does not, and the pool says whether it is suspended.
#[test]
fn a_failing_call_of_the_driver_loses_nothing() {
    for action in [FaultAction::Fail(1), FaultAction::OutOfMemory] {
        let (mut failed, mut stayed_away, mut call) = ([0, 0], 0, 0);
        loop {
            let (mut runtime, driver) = cuda(CudaConfig::default().inline(true));
            let pool = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap();
            let [x, y] = [1, 2].map(|first: u32| {
                let buffer = pool.alloc(4096).unwrap();
                runtime.stream().upload_blocking(buffer.view(), &[first; 1024]).unwrap();
                buffer
            });
            let start = driver.machine().calls();
            let rule = FaultRule::any(When::At(start + call), action.clone());
            let before = pool.stats();
            driver.machine().set_faults(FaultPlan::none().with(rule));
            let suspended = pool.suspend(Contents::Keep).map(drop);
            let resumed = if pool.is_suspended() { pool.resume() } else { Ok(()) };
            let made = driver.machine().calls() - start;
            driver.machine().set_faults(FaultPlan::none());
            for (result, failed) in [&suspended, &resumed].into_iter().zip(&mut failed) {
                *failed += u32::from(result.is_err());
            }
            if runtime.stream().failure().is_some() {
                runtime.replace_default_stream().unwrap();
            }
            if pool.is_suspended() {
                stayed_away += 1;
                assert_eq!(kind(runtime.to_vec::<u8>(&x)), "Suspended", "call {call}");
                pool.resume().unwrap();
            }
            for (buffer, first) in [(&x, 1), (&y, 2)] {
                let bytes = runtime.to_vec::<u32>(buffer).unwrap();
                assert!(bytes == [first; 1024], "call {call}: {suspended:?}, {resumed:?}");
            }
            assert_eq!(pool.stats().live, before.live);
            pool.suspend(Contents::Keep).unwrap();
            pool.resume().unwrap();
            call += 1;
            // Some calls are asked for what they say, and their failure is nobody's affair.
            if suspended.is_ok() && resumed.is_ok() && call > made {
                break;
            }
        }
        assert!(failed[0] > 3, "{failed:?}");
        // A resumption asks for memory twice, so it survives one refusal.
        let fails = matches!(action, FaultAction::Fail(_));
        assert_eq!(failed[1] > 3 && stayed_away > 2, fails, "{failed:?}, {stayed_away}");
    }
}

#[test]
fn memory_without_addresses_of_its_own_is_not_supported() {
    let mut config = SimDriverConfig::new(MachineConfig::seed(7));
    config.vmm = false;
    let backend = leasehold_sim::cuda::backend(config, CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    let runtime = context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap();
    let text = Pool::new(&runtime, "weights", PoolKind::Suspendable).unwrap_err().to_string();
    assert!(text.contains("cuda:0 cannot be suspended"), "{text}");
}
