//! Memory that grows in place: values stay where they are, graphs stay valid, and what lies beyond
//! the end is refused.

use crate::common::*;
use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{
    Access, Array, BackendKind, Context, DeviceId, Error, GraphUpdate, Growing, KernelBase, Result,
    Runtime, Stream, View,
};
use leasehold_cuda::{CudaBackend, CudaConfig, MemorySource};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, SimBackend};
use std::sync::Arc;

/// CUDA over a simulated driver.
fn cuda(config: CudaConfig) -> Runtime {
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(7))).unwrap();
    let backend = Arc::new(CudaBackend::with_ops(Arc::new(driver), config).unwrap());
    Context::with_backends(vec![backend]).runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap()
}

/// Devices with virtual memory, and one without.
fn runtimes() -> Vec<Runtime> {
    let sim = Arc::new(SimBackend::new(MachineConfig::seed(6)).unwrap());
    let sim = Context::with_backends(vec![sim]).runtime(DeviceId::new(BackendKind::Sim, 0));
    let mut plain = CudaConfig::default();
    plain.memory = MemorySource::Plain;
    vec![runtime(), sim.unwrap(), cuda(CudaConfig::default()), cuda(plain)]
}

/// Words that tell each place from every other.
fn words(from: usize, to: usize) -> Vec<u32> {
    (from as u32..to as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ 77).collect()
}

/// Sums of 1,024 values of a growing buffer each: NaN for a block that the limit cuts.
unsafe fn run_sums(args: &CpuArgs<'_>) {
    let block = args.tile()[0] as usize;
    let (values, len) = args.pointer::<f32>(0);
    // SAFETY: the limit is 8 bytes, which nobody writes meanwhile.
    let limit = unsafe { *args.pointer::<u64>(1).0 };
    let end = (block + 1) * 1024;
    let sum = if end <= len && (end * 4) as u64 <= limit {
        // SAFETY: the values lie in the binding and below the limit.
        (block * 1024..end).map(|i| unsafe { *values.add(i) }).sum()
    } else {
        f32::NAN
    };
    // SAFETY: each tile has its own sum.
    unsafe { args.slice_mut::<f32>(2, block, 1) }.fill(sum);
}

/// The call fails, with this in its text.
#[track_caller]
fn refused<T>(result: Result<T>, text: &str) {
    let e = result.map(drop).expect_err(text);
    assert!(e.to_string().contains(text), "{e}");
}

fn sums() -> KernelBase {
    let bindings = [Access::Read, Access::Read, Access::Write];
    let source = KernelSource::Cpu(run_sums);
    base(KernelDesc::new("sums", source, &bindings, KernelCheck::grid_1d()).limited_by(0, 1))
        .unwrap()
}

#[test]
fn values_stay_and_the_address_too() {
    for runtime in runtimes() {
        let (stream, at) = (runtime.stream(), runtime.device());
        let most = 24 << 20;
        let cache = Growing::<u32>::new(&runtime, most).unwrap();
        let (addr, mut len) = (cache.view().addr(), 0);
        let whole = !runtime.raw_device().caps().growing;
        for more in [1, 1000, 300_000, 700_000, 1 << 20, 3 << 20] {
            cache.grow(stream, len + more).unwrap();
            let part = cache.slice(len..);
            stream.upload(part.view(), &words(len, len + more)).unwrap();
            len += more;
            assert_eq!((cache.len(), cache.view().addr()), (len, addr), "{at}");
            assert!(runtime.to_vec(cache.as_view()).unwrap() == words(0, len), "{at}, {len}");
            let reserved = runtime.allocator().stats().reserved;
            assert_eq!(whole, reserved > 4 * most as u64, "{at}: {reserved}");
        }
        cache.shrink(stream, 1000).unwrap();
        cache.grow(stream, 5000).unwrap();
        assert!(runtime.to_vec(cache.slice(..1000)).unwrap() == words(0, 1000), "{at}");
        cache.grow(stream, 4000).unwrap();
        assert_eq!(cache.len(), 5000, "{at}: a growth never shortens");
    }
}

#[test]
fn graphs_stay_valid_through_growths_and_suspensions() {
    for runtime in runtimes() {
        let at = runtime.device();
        let stream = runtime.stream();
        let pool = Pool::new(&runtime, "caches", PoolKind::Suspendable).ok();
        let cache = match &pool {
            Some(pool) => pool.growing::<u32>(1, 8 << 20).unwrap(),
            None => Growing::new(&runtime, 8 << 20).unwrap(),
        };
        cache.grow(stream, 1024).unwrap();
        stream.upload(cache.view(), &words(0, 1024)).unwrap();
        let out = runtime.zeros::<u32>(1024).unwrap();
        let graph =
            runtime.record_graph(|r| r.stream().copy(out.view(), cache.slice(..1024).view()));
        let graph = graph.unwrap();
        for round in 0..if at.backend == BackendKind::Cpu { 1000 } else { 60 } {
            let len = 1024 + round * 7919 % (8 << 20);
            match round % 3 {
                0 => cache.grow(stream, len.min(8 << 20)).unwrap(),
                1 => cache.shrink(stream, 1024.max(len / 2)).unwrap(),
                _ => cache.grow(stream, 8 << 20).unwrap(),
            }
            if let Some(pool) = pool.as_ref().filter(|_| round % 20 == 7) {
                pool.suspend(Contents::Keep).unwrap();
                let before = cache.len();
                assert_eq!(kind(graph.launch()), "Suspended", "{at}");
                assert_eq!(kind(cache.grow(stream, 8 << 20)), "Suspended", "{at}");
                assert_eq!(kind(cache.shrink(stream, 0)), "Suspended", "{at}");
                assert_eq!(kind(cache.prepare(8 << 20)), "Suspended", "{at}");
                assert_eq!(kind(pool.growing::<u32>(1, 1)), "Suspended", "{at}");
                assert_eq!(cache.len(), before, "{at}");
                pool.resume().unwrap();
            }
            stream.fill(out.view(), 0u8).unwrap();
            graph.launch().unwrap();
            if round % 50 < 2 {
                assert!(runtime.to_vec(&out).unwrap() == words(0, 1024), "{at}, {round}");
            }
        }
        assert!(runtime.to_vec(&out).unwrap() == words(0, 1024), "{at}");
    }
}

#[test]
fn work_beyond_the_end_is_refused() {
    for runtime in runtimes() {
        let (stream, at) = (runtime.stream(), runtime.device());
        let cache = Growing::<u32>::new(&runtime, 4 << 20).unwrap();
        cache.grow(stream, 2 << 20).unwrap();
        let out = runtime.zeros::<u32>(100).unwrap();
        let (low, high) = (cache.slice(..100).view(), cache.slice(1 << 20..(1 << 20) + 100).view());
        stream.fill(cache.view(), 5u8).unwrap();
        let graphs = [low, high]
            .map(|part| runtime.record_graph(|r| r.stream().copy(out.view(), part)).unwrap());
        cache.shrink(stream, 100).unwrap();
        let refused: [Result<()>; 5] = [
            stream.copy(out.view(), high),
            stream.fill(high, 1u8),
            stream.upload(high, &[1u32; 100]),
            stream.download(&mut [0u32; 100], high),
            graphs[1].launch().map(drop),
        ];
        for e in refused {
            let e = e.expect_err("bytes without memory");
            assert!(e.to_string().contains("growing buffer that has 400 now"), "{at}: {e}");
        }
        graphs[0].launch().unwrap();
        assert_eq!(runtime.to_vec(&out).unwrap(), [0x0505_0505; 100], "{at}");
        cache.grow(stream, 2 << 20).unwrap();
        stream.fill(cache.view(), 6u8).unwrap();
        graphs[1].launch().unwrap();
        assert_eq!(runtime.to_vec(&out).unwrap(), [0x0606_0606; 100], "{at}");
    }
}

#[test]
fn a_kernel_that_keeps_to_the_limit_sees_later_memory() {
    let runtime = runtime();
    let (stream, kernel) = (runtime.stream(), sums());
    let cache = Growing::<f32>::new(&runtime, 64 * 1024).unwrap();
    let out = runtime.zeros::<f32>(64).unwrap();
    let run = |stream: &Stream, out: &Array<f32>| {
        let operands = [cache.reservation(Access::Read), cache.limit(), out.write()];
        launch(stream, &kernel, &operands, &[], 64).map(drop)
    };
    let graph = runtime.record_graph(|r| run(r.stream(), &out)).unwrap();
    let expect = |full: usize| {
        let eager = runtime.zeros::<f32>(64).unwrap();
        run(stream, &eager).unwrap();
        graph.launch().unwrap();
        let [eager, out] = [&eager, &out].map(|a| runtime.to_vec(a).unwrap());
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&eager), bits(&out), "eager and replayed");
        let (sums, rest) = out.split_at(full);
        assert!(sums.iter().all(|&s| s == 1024.0) && rest.iter().all(|s| s.is_nan()), "{out:?}");
    };
    expect(0);
    for blocks in [1usize, 7, 8, 40, 64] {
        let from = cache.len();
        cache.grow(stream, blocks * 1024).unwrap();
        stream.fill_with(cache.slice(from..), 1.0).unwrap();
        expect(blocks);
    }
    cache.grow(stream, 64 * 1024).unwrap();
    cache.shrink(stream, 10 * 1024 + 5).unwrap();
    expect(10);
    cache.shrink(stream, 0).unwrap();
    runtime.allocator().trim(0).unwrap();
    expect(0);
}

#[test]
fn a_reservation_is_for_kernels_that_keep_to_its_own_limit() {
    let runtime = runtime();
    let (stream, kernel) = (runtime.stream(), sums());
    let [cache, other] = [(); 2].map(|()| Growing::<f32>::new(&runtime, 1 << 20).unwrap());
    cache.grow(stream, 2048).unwrap();
    let out = runtime.zeros::<f32>(4).unwrap();
    let word = runtime.upload(&[u64::MAX]).unwrap();
    let whole = cache.reservation(Access::Read);
    for wrong in [other.limit(), word.read(), cache.slice(..2).read()] {
        let operands = [whole, wrong, out.write()];
        refused(launch(stream, &kernel, &operands, &[], 2), "bind Growing::limit of the same");
    }
    let plain = axpy();
    let operands = [whole, out.read_write()];
    refused(launch(stream, &plain, &operands, &[0; 4], 1), "declares no limit");
    let from = whole.view().part(..16).unwrap();
    stream.copy(out.view(), from).expect("this part has memory");
    refused(stream.copy(cache.view(), whole.view().part(8192..16384).unwrap()), "has 8192 now");
    // Nobody but the runtime writes the limit, or puts another word in its place.
    let limit = cache.limit().view().narrowed(0, 8);
    refused(stream.fill(limit, 0xffu8), "read-only");
    refused(stream.upload(limit, &[u64::MAX]), "read-only");
    refused(stream.copy(limit, word.view()), "read-only");
    let operands = [whole, cache.limit(), out.write()];
    let graph =
        runtime.record_graph(|r| launch(r.stream(), &kernel, &operands, &[], 4).map(drop)).unwrap();
    let array = runtime.zeros::<f32>(1 << 20).unwrap();
    for (old, new) in [
        (limit.buffer(), word.buffer()),
        (cache.view().buffer(), array.buffer()),
        (out.buffer(), cache.view().buffer()),
    ] {
        let e = graph.update(&GraphUpdate::new().buffer(old, new)).expect_err("a growing buffer");
        assert!(matches!(e, Error::Unsupported(_)), "{e}");
    }
    graph.launch().unwrap();
}

#[test]
fn bad_use_is_refused_and_changes_nothing() {
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let stream = runtime.stream();
    assert_eq!(kind(Growing::<u32>::new(&runtime, 0)), "InvalidArgument");
    assert_eq!(kind(Growing::<()>::new(&runtime, 5)), "InvalidArgument");
    assert_eq!(kind(Growing::<u64>::new(&runtime, usize::MAX)), "InvalidArgument");
    let cache = Growing::<u32>::new(&runtime, 8 << 20).unwrap();
    cache.grow(stream, 1000).unwrap();
    stream.fill(cache.view(), 3u8).unwrap();
    let same = || {
        assert_eq!(runtime.to_vec(cache.as_view()).unwrap(), [0x0303_0303; 1000]);
    };
    assert_eq!(kind(cache.grow(stream, (8 << 20) + 1)), "InvalidArgument");
    let elsewhere = crate::common::runtime();
    assert_eq!(kind(cache.grow(elsewhere.stream(), 2000)), "InvalidArgument");
    assert_eq!(kind(cache.shrink(elsewhere.stream(), 0)), "InvalidArgument");
    same();
    let recorded = runtime.record_graph(|r| {
        assert_eq!(kind(Growing::<u32>::new(r, 10)), "Recording");
        assert_eq!(kind(cache.grow(r.stream(), 2000)), "Recording");
        assert_eq!(kind(cache.shrink(r.stream(), 0)), "Recording");
        r.stream().fill(cache.view(), 3u8)
    });
    recorded.unwrap().launch().unwrap();
    same();
    let used = runtime.allocator().stats().reserved;
    runtime.allocator().set_budget(used + (2 << 20));
    let e = cache.grow(stream, 8 << 20).expect_err("over the budget");
    assert!(e.is_out_of_memory() || matches!(e, Error::OverBudget { .. }), "{e}");
    same();
    runtime.allocator().set_budget(u64::MAX);
    // A stream that has failed cannot write the limit.
    let bad = runtime.create_stream().unwrap();
    let x = runtime.zeros::<f32>(4).unwrap();
    launch(&bad, &trap(), &[x.read_write()], &[], 1).unwrap();
    bad.synchronize().expect_err("the trap");
    cache.grow(&bad, 2000).expect_err("a failed stream");
    cache.shrink(&bad, 10).expect_err("a failed stream");
    same();
    cache.grow(stream, 2000).unwrap();
    assert_eq!(cache.len(), 2000);
}

#[test]
fn a_steady_state_calls_no_driver_for_memory() {
    for runtime in runtimes() {
        let (stream, at) = (runtime.stream(), runtime.device());
        let mut calls = 0;
        for round in 0..12 {
            let slots: Vec<_> =
                (0..3).map(|_| Growing::<u32>::new(&runtime, 4 << 20).unwrap()).collect();
            for slot in &slots {
                slot.prepare(1 << 20).unwrap();
                for len in [1000, 1 << 18, 1 << 20] {
                    assert!(slot.try_grow(stream, len).unwrap(), "{at}");
                }
                stream.fill(slot.slice(..1000).view(), round as u32).unwrap();
                assert_eq!(runtime.to_vec(slot.slice(..2)).unwrap(), [round as u32; 2], "{at}");
            }
            drop(slots);
            runtime.stream().synchronize().unwrap();
            let now = runtime.allocator().stats().driver_calls;
            assert!(round < 2 || now == calls, "{at}, {round}: {} calls", now - calls);
            calls = now;
        }
    }
}

#[test]
fn threads_grow_shrink_and_launch_beside_each_other() {
    for runtime in runtimes() {
        let cache = Growing::<u32>::new(&runtime, 4 << 20).unwrap();
        cache.grow(runtime.stream(), 1024).unwrap();
        runtime.stream().upload(cache.view(), &words(0, 1024)).unwrap();
        std::thread::scope(|s| {
            for thread in 0..2usize {
                let (runtime, cache) = (&runtime, cache.clone());
                s.spawn(move || {
                    let stream = runtime.create_stream().unwrap();
                    for i in 0..60usize {
                        let len = 1024 + (i * 131_071 + thread * 65_537) % (3 << 20);
                        match cache.grow(&stream, len) {
                            Ok(()) | Err(Error::Occupied { .. }) => {}
                            Err(e) => panic!("{e}"),
                        }
                        cache.shrink(&stream, 1024.max(len / 3)).unwrap();
                        runtime.allocator().trim(0).unwrap();
                    }
                });
            }
            let (runtime, cache) = (&runtime, cache.clone());
            s.spawn(move || {
                let stream = runtime.create_stream().unwrap();
                let out = runtime.zeros::<u32>(1024).unwrap();
                for _ in 0..100 {
                    // Another thread may shrink the cache between the view and the fill.
                    match stream.fill(cache.slice(1024..).view(), 9u8) {
                        Ok(()) => {}
                        Err(e) => assert!(e.to_string().contains("growing buffer"), "{e}"),
                    }
                    stream.copy(out.view(), cache.slice(..1024).view()).unwrap();
                }
                assert!(runtime.to_vec(&out).unwrap() == words(0, 1024));
            });
        });
        runtime.synchronize().unwrap();
        assert!(runtime.to_vec(cache.slice(..1024)).unwrap() == words(0, 1024));
    }
}

/// Devices whose memory may have several addresses.
fn forking() -> [Runtime; 2] {
    let mut all = runtimes();
    all.truncate(3);
    let [_, sim, cuda]: [Runtime; 3] = all.try_into().unwrap();
    [sim, cuda]
}

#[test]
fn a_fork_and_its_parent_go_on_apart() {
    for runtime in forking() {
        let (stream, at) = (runtime.stream(), runtime.device());
        let other = runtime.create_stream().unwrap();
        let granule = runtime.allocator().caps().granule as usize / 4;
        let parent = Growing::<u32>::new(&runtime, 8 * granule).unwrap();
        let len = 3 * granule + 100;
        parent.grow(stream, len).unwrap();
        stream.upload(parent.view(), &words(0, len)).unwrap();
        let used = runtime.allocator().stats().reserved;
        // On another stream than the values were written on.
        let fork = parent.fork(&other, len - 7).unwrap();
        assert_eq!((fork.len(), fork.most()), (len - 7, 8 * granule), "{at}");
        assert_eq!((fork.shared(), parent.shared()), (3 * granule, 3 * granule), "{at}");
        let s = runtime.allocator().stats();
        assert_eq!(s.shared_in_growing, 12 * granule as u64, "{at}");
        assert!(s.reserved <= used + 4 * granule as u64, "{at}: one granule is new");
        assert_eq!(runtime.to_vec(fork.as_view()).unwrap(), words(0, len - 7), "{at}");
        // Both go on.
        for (growing, from, word) in [(&parent, len, 5u32), (&fork, len - 7, 6)] {
            growing.grow(stream, 5 * granule).unwrap();
            stream.fill(growing.slice(from..).view(), word).unwrap();
        }
        stream.fill(fork.slice(3 * granule..len - 7).view(), 8u32).unwrap();
        let mut wanted = words(0, len);
        wanted.resize(5 * granule, 5);
        assert_eq!(runtime.to_vec(parent.as_view()).unwrap(), wanted, "{at}");
        wanted.truncate(3 * granule);
        wanted.resize(len - 7, 8);
        wanted.resize(5 * granule, 6);
        assert_eq!(runtime.to_vec(fork.as_view()).unwrap(), wanted, "{at}");
        // A fork of a fork, which outlives both.
        let last = fork.fork(stream, 2 * granule).unwrap();
        drop((parent, fork));
        stream.synchronize().unwrap();
        runtime.allocator().trim(0).unwrap();
        assert_eq!(runtime.to_vec(last.as_view()).unwrap(), words(0, 2 * granule), "{at}");
        assert_eq!(runtime.allocator().stats().shared_in_growing, 0, "{at}");
        // The last one may not write it, until it has memory of its own there.
        refused(stream.fill(last.view(), 0u8), "shared with its forks");
        last.shrink(stream, 0).unwrap();
        last.grow(stream, granule).unwrap();
        stream.fill(last.view(), 3u32).unwrap();
        assert_eq!(runtime.to_vec(last.as_view()).unwrap(), vec![3; granule], "{at}");
    }
}

#[test]
fn shared_bytes_are_written_by_nobody() {
    for runtime in forking() {
        let stream = runtime.stream();
        let granule = runtime.allocator().caps().granule as usize / 4;
        let parent = Growing::<u32>::new(&runtime, 4 * granule).unwrap();
        parent.grow(stream, 3 * granule).unwrap();
        stream.upload(parent.view(), &words(0, 3 * granule)).unwrap();
        let graph = runtime
            .record_graph(|r| r.stream().fill(parent.slice(granule..2 * granule).view(), 0u8))
            .unwrap();
        let old = parent.slice(..8).view();
        let fork = parent.fork(stream, 2 * granule).unwrap();
        let plain = runtime.zeros::<u32>(8).unwrap();
        for growing in [&parent, &fork] {
            let view = growing.slice(2 * granule - 8..2 * granule).view();
            refused(stream.fill(view, 0u8), "shared with its forks");
            refused(stream.upload(view, &[0u32; 8]), "shared with its forks");
            refused(stream.copy(view, plain.view()), "shared with its forks");
            let recorded = runtime.record_graph(|r| r.stream().fill(view, 0u8)).unwrap();
            refused(recorded.launch(), "shared with its forks");
            stream.copy(plain.view(), view).unwrap();
        }
        refused(stream.fill(old, 0u8), "shared with its forks");
        refused(graph.launch(), "shared with its forks");
        stream.fill(parent.slice(2 * granule..).view(), 1u8).unwrap();
        for growing in [&parent, &fork] {
            let found = runtime.to_vec(growing.slice(..2 * granule)).unwrap();
            assert_eq!(found, words(0, 2 * granule));
        }
    }
}

#[test]
fn bad_forks_are_refused_and_change_nothing() {
    for runtime in runtimes() {
        let (stream, at) = (runtime.stream(), runtime.device());
        let growing = Growing::<u32>::new(&runtime, 2 << 20).unwrap();
        growing.grow(stream, 1 << 20).unwrap();
        refused(growing.fork(stream, (1 << 20) + 1), "fork what has memory");
        let elsewhere = crate::common::runtime();
        refused(growing.fork(elsewhere.stream(), 1), "not a stream of");
        drop(runtime.record_graph(|r| {
            assert_eq!(kind(growing.fork(r.stream(), 1)), "Recording", "{at}");
            Ok(())
        }));
        let forks = runtime.raw_device().caps().forks;
        assert_eq!(
            forks,
            runtime.allocator().caps().aliases && runtime.raw_device().caps().growing
        );
        if !forks {
            assert_eq!(kind(growing.fork(stream, 1 << 20)), "Unsupported", "{at}");
        }
        if let Ok(pool) = Pool::new(&runtime, "caches", PoolKind::Suspendable) {
            let growing = pool.growing::<u32>(1, 2 << 20).unwrap();
            growing.grow(stream, 1 << 20).unwrap();
            assert_eq!(kind(growing.fork(stream, 1 << 20)), "Unsupported", "{at}");
        }
        assert_eq!(runtime.allocator().stats().shared_in_growing, 0, "{at}");
        stream.fill(growing.view(), 0u8).unwrap();
    }
}
