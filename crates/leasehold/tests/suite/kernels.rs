//! Bases, sessions and the registry.

use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold::graph::{NodeId, UpdateOutcome};
use leasehold::kernel::{
    CpuArgs, KernelCheck, KernelDesc, KernelSource, Launch, Overlap, Registry, session_ops,
    session_sync_ops,
};
use leasehold::{
    Access, DeviceId, GraphUpdate, Grid, KernelBase, KernelSession, Operand, Runtime, View,
};
use std::sync::Arc;
use std::time::Duration;

fn ones() -> [u8; 4] {
    1.0f32.to_ne_bytes()
}

#[test]
fn several_launches_are_one_submission_or_none() {
    let runtime = runtime();
    let (kernel, stream) = (axpy(), runtime.stream());
    let (x, y) = (runtime.upload(&[1.0f32; 16]).unwrap(), runtime.zeros::<f32>(16).unwrap());
    let (operands, before) = ([x.read(), y.read_write()], stream.now().value());
    let grid = Grid::from((16 / TILE) as u32);
    let launch = Launch { kernel: &kernel, operands: &operands, params: &ones(), grid };
    let refused = Launch { params: &[0; 3], ..launch };
    assert_eq!(kind(stream.launch_many(&[launch, refused])), "InvalidArgument");
    stream.launch_many(&[]).unwrap();
    assert_eq!(stream.now().value(), before);
    stream.launch_many(&[launch; 3]).unwrap();
    assert_eq!(stream.now().value(), before + 1);
    assert_eq!(runtime.to_vec(&y).unwrap(), [3.0; 16]);
}

#[test]
fn a_session_launches_what_it_staged_as_one_submission() {
    let runtime = runtime();
    let kernel = axpy();
    let x = runtime.upload(&[1.0f32; 16]).unwrap();
    let y = runtime.upload(&[0.0f32; 16]).unwrap();
    let before = runtime.stream().now().value();
    let operands = [x.read(), y.read_write()];
    let mut session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
    for a in [1.0f32, 2.0, 4.0] {
        let waited = session_sync_ops::wait(session, &operands).unwrap();
        let bound = session_ops::bind(waited).unwrap();
        let ready = session_ops::params(bound, &a).unwrap();
        let staged = session_ops::dispatch_3d(ready, [4, 1, 1], [1, 1, 1], 0).unwrap();
        session = session_sync_ops::update_tokens(staged).kernel(&kernel).unwrap();
    }
    let waited = session_sync_ops::wait(session, &operands).unwrap();
    let bound = session_ops::bind(waited).unwrap();
    let ready = session_ops::params(bound, &8.0f32).unwrap();
    let staged = session_ops::dispatch_1d(ready, 4, 1).unwrap();
    let point = session_sync_ops::update_tokens(staged).finish().unwrap().unwrap();
    assert_eq!(point.value(), before + 1);
    runtime.wait_for(point).unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [15.0; 16]);
}

#[test]
fn dropping_a_session_at_any_step_discards_it() {
    let runtime = runtime();
    let kernel = axpy();
    let x = runtime.upload(&[1.0f32; 16]).unwrap();
    let y = runtime.upload(&[3.0f32; 16]).unwrap();
    let operands = [x.read(), y.read_write()];
    let before = runtime.stream().now();
    for step in 0..6 {
        let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
        if step == 0 {
            continue;
        }
        let session = session_sync_ops::wait(session, &operands).unwrap();
        if step == 1 {
            continue;
        }
        let session = session_ops::bind(session).unwrap();
        if step == 2 {
            continue;
        }
        let session = session_ops::params(session, &1.0f32).unwrap();
        if step == 3 {
            continue;
        }
        let session = session_ops::dispatch_1d(session, 4, 1).unwrap();
        if step == 4 {
            continue;
        }
        drop(session_sync_ops::update_tokens(session));
    }
    assert_eq!(runtime.stream().now(), before, "nothing reached the driver");
    launch(runtime.stream(), &kernel, &operands, &ones(), 4).unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [4.0; 16]);
}

#[test]
fn while_a_session_is_open_its_stream_is_occupied_for_its_own_thread_only() {
    let runtime = runtime();
    let kernel = axpy();
    let other = runtime.create_stream().unwrap();
    let x = runtime.upload(&[1.0f32; 16]).unwrap();
    let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
    let error = KernelSession::begin(&kernel, runtime.stream()).unwrap_err();
    assert_eq!(error.kind(), "Occupied");
    assert!(error.to_string().contains("this very thread"), "{error}");
    assert_eq!(kind(runtime.stream().fill(x.view(), 0u8)), "Occupied");
    let event = runtime.create_event().unwrap();
    assert_eq!(kind(runtime.stream().record(&event)), "Occupied");
    assert_eq!(kind(KernelSession::try_begin(&kernel, runtime.stream())), "Occupied");
    other.fill(x.view(), 0u8).unwrap();
    drop(KernelSession::begin(&kernel, &other).unwrap());
    runtime.stream().synchronize().unwrap();
    let _more = runtime.alloc(16).unwrap();
    // Other threads wait for their turn, or say so if they are asked not to.
    let went_in = AtomicBool::new(false);
    std::thread::scope(|s| {
        let waiter = s.spawn(|| {
            runtime.stream().fill(x.view(), 7u8).unwrap();
            went_in.store(true, Ordering::Release);
        });
        s.spawn(|| {
            let error = KernelSession::try_begin(&kernel, runtime.stream()).unwrap_err();
            assert_eq!(error.kind(), "Occupied");
            assert!(error.to_string().contains("another thread"), "{error}");
        })
        .join()
        .unwrap();
        std::thread::sleep(Duration::from_millis(20));
        assert!(!went_in.load(Ordering::Acquire), "a fill beside an open session");
        drop(session);
        waiter.join().unwrap();
    });
    drop(KernelSession::try_begin(&kernel, runtime.stream()).unwrap());
    assert_eq!(runtime.to_vec::<u8>(x.view()).unwrap(), [7; 64]);
}

#[test]
fn a_forgotten_session_leaves_its_stream_occupied_and_hurts_nobody() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    {
        let kernel = axpy();
        let x = runtime.upload(&[1.0f32; 16]).unwrap();
        let operands = [x.read(), x.read_write()];
        let session = KernelSession::begin(&kernel, &stream).unwrap();
        std::mem::forget(session_sync_ops::wait(session, &operands).unwrap());
    }
    assert_eq!(kind(KernelSession::begin(&axpy(), &stream)), "Occupied");
    stream.synchronize().unwrap();
    drop(stream);
    runtime.synchronize().unwrap();
}

#[test]
fn wrong_operands_and_parameters_are_named() {
    let runtime = runtime();
    let kernel = axpy();
    let x = runtime.upload(&[1.0f32; 16]).unwrap();
    let y = runtime.upload(&[1.0f32; 16]).unwrap();
    let right = [x.read(), y.read_write()];
    let bind = |operands: &[Operand<'_>]| {
        let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
        let session = session_sync_ops::wait(session, operands).unwrap();
        session_ops::bind(session).map_or_else(|e| e.to_string(), |_| "ok".to_owned())
    };
    assert_eq!(bind(&right), "ok");
    assert!(bind(&right[..1]).contains("takes 2 bindings, not 1"));
    assert!(
        bind(&[x.read(), y.write()]).contains("binding 1 is declared ReadWrite but bound as Write")
    );
    assert!(
        bind(&[x.read_write(), y.read_write()])
            .contains("binding 0 is declared Read but bound as ReadWrite")
    );
    assert!(
        bind(&[x.read(), y.read()]).contains("binding 1 is declared ReadWrite but bound as Read")
    );
    for bytes in [&[][..], &[0; 3], &[0; 8]] {
        assert_eq!(kind(launch(runtime.stream(), &kernel, &right, bytes, 4)), "InvalidArgument");
    }
    let strange = crate::common::runtime().upload(&[1.0f32; 16]).unwrap();
    assert_eq!(
        kind(launch(runtime.stream(), &kernel, &[strange.read(), y.read_write()], &ones(), 4)),
        "InvalidArgument"
    );
    // After all of these the stream works.
    launch(runtime.stream(), &kernel, &right, &ones(), 4).unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [2.0; 16]);
}

#[test]
fn grids_and_blocks_are_within_the_limits() {
    let runtime = runtime();
    let kernel = kernel("nothing", |_| {}, &[], 0);
    let shape = |grid: [u32; 3], block: [u32; 3], shared: u32| {
        let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
        let session = session_sync_ops::wait(session, &[]).unwrap();
        let session = session_ops::bind(session).unwrap();
        let session = session_ops::no_params(session).unwrap();
        let result = session_ops::dispatch_3d(session, grid, block, shared);
        result.and_then(|s| session_sync_ops::update_tokens(s).finish())
    };
    assert_eq!(kind(shape([1, 1, 1], [1, 1, 1], 0)), "ok");
    assert_eq!(kind(shape([1, 70_000, 1], [1, 1, 1], 0)), "InvalidArgument");
    assert_eq!(kind(shape([1, 1, 1], [0, 1, 1], 0)), "InvalidArgument");
    assert_eq!(kind(shape([1, 1, 1], [1024, 2, 1], 0)), "InvalidArgument");
    assert_eq!(kind(shape([1, 1, 1], [1, 1, 65], 0)), "InvalidArgument");
    assert_eq!(kind(shape([1, 1, 1], [1, 1, 1], u32::MAX)), "InvalidArgument");
    let before = runtime.stream().now().value();
    assert_eq!(
        shape([0, 1, 1], [1, 1, 1], 0).unwrap().unwrap().value(),
        before + 1,
        "an empty grid still counts"
    );
    runtime.stream().synchronize().unwrap();
}

#[test]
fn a_kernel_is_within_the_limits_of_every_backend() {
    let many = |n| base(desc("many", |_| {}, &vec![Access::Read; n], 0));
    assert!(many(30).is_ok());
    assert_eq!(kind(many(31)), "InvalidArgument");
    assert!(base(desc("large", |_| {}, &[], 4096)).is_ok());
    assert_eq!(kind(base(desc("large", |_| {}, &[], 4097))), "InvalidArgument");
    assert_eq!(kind(sources(vec![])), "InvalidArgument");
}

#[test]
fn thirty_bindings_and_four_kilobytes_of_parameters_arrive() {
    unsafe fn sums(args: &CpuArgs<'_>) {
        let params: [u32; 1024] = args.params();
        // SAFETY: the inputs are only read; the last binding is this tile's alone.
        let inputs: u32 = (0..29).map(|i| unsafe { args.slice::<u32>(i) }[0]).sum();
        // SAFETY: as above.
        let sum = unsafe { args.slice_mut::<u32>(29, 0, 1) };
        sum[0] = inputs + params.iter().sum::<u32>();
    }
    let runtime = runtime();
    let mut roles = vec![Access::Read; 29];
    roles.push(Access::Write);
    let kernel = kernel("sums", sums, &roles, 4096);
    let buffers: Vec<_> = (0..30u32).map(|i| runtime.upload(&[i]).unwrap()).collect();
    let operands: Vec<_> = buffers.iter().zip(&roles).map(|(b, &r)| b.view().with(r)).collect();
    let params: Vec<u8> = (0..1024u32).flat_map(u32::to_ne_bytes).collect();
    launch(runtime.stream(), &kernel, &operands, &params, 1).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&buffers[29]).unwrap(), [28 * 29 / 2 + 1023 * 1024 / 2]);
}

#[test]
fn a_session_waits_for_other_streams_on_the_device() {
    let runtime = runtime();
    let kernel = axpy();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    let x = runtime.upload(&[0.0f32; 16]).unwrap();
    let y = runtime.upload(&[0.0f32; 16]).unwrap();
    runtime.synchronize().unwrap();
    let held = hold(&a);
    a.fill(x.view(), 5.0).unwrap();
    let point = launch(&b, &kernel, &[x.read(), y.read_write()], &ones(), 4).unwrap().unwrap();
    assert!(!b.query().unwrap(), "it waits");
    // A write after the read waits for the reader.
    a.fill(x.view(), 7.0).unwrap();
    open(held);
    runtime.wait_for(point).unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [5.0; 16]);
    assert_eq!(runtime.to_vec::<f32>(&x).unwrap(), [7.0; 16]);
}

#[test]
fn a_base_serves_many_devices_and_is_emptied_by_their_end() {
    let kernel = axpy();
    // More runtimes than a block of the cache has cells.
    let runtimes: Vec<_> = (0..6).map(|_| runtime()).collect();
    for _ in 0..2 {
        for runtime in &runtimes {
            let x = runtime.upload(&[1.0f32; 4]).unwrap();
            let y = runtime.upload(&[1.0f32; 4]).unwrap();
            launch(runtime.stream(), &kernel, &[x.read(), y.read_write()], &ones(), 1).unwrap();
            assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [2.0; 4]);
        }
    }
    drop(runtimes);
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    kernel.prepare(&runtime).unwrap();
    drop(runtime);
    context.shutdown().expect("a kernel that outlives the runtime holds nothing of it");
}

#[test]
fn sixteen_threads_make_a_kernel_ready_once() {
    let runtime = runtime();
    let kernel = axpy();
    std::thread::scope(|s| {
        for _ in 0..16 {
            s.spawn(|| kernel.prepare(&runtime).unwrap());
        }
    });
    let pools = runtime.pools();
    assert_eq!(pools.iter().find(|p| p.0 == "pipeline").unwrap().1.created, 1);
}

/// Of functions that do nothing.
fn sources(descs: Vec<KernelDesc<'static>>) -> leasehold::Result<KernelBase> {
    // SAFETY: the functions touch nothing, and no device takes the texts.
    unsafe { KernelBase::with_sources(descs) }
}

/// A function that does nothing.
fn register(registry: &Registry, arch: &str, desc: KernelDesc<'static>) -> leasehold::Result<()> {
    // SAFETY: the function touches nothing.
    unsafe { registry.register(arch, desc) }
}

#[test]
fn a_device_takes_the_first_source_that_it_can() {
    let ptx = KernelDesc { source: KernelSource::Ptx("".into()), ..desc("d", |_| {}, &[], 0) };
    let runtime = runtime();
    let only = base(ptx.clone()).unwrap();
    assert_eq!(kind(only.prepare(&runtime)), "Unsupported");
    assert_eq!(kind(KernelSession::begin(&only, runtime.stream())), "Unsupported");
    assert!(
        KernelSession::begin(&axpy(), runtime.stream()).is_ok(),
        "a begin that failed gave the stream back"
    );
    let both = sources(vec![
        ptx.clone(),
        KernelDesc { check: ptx.check.clone(), ..desc("d", |_| {}, &[], 0) },
    ])
    .unwrap();
    both.prepare(&runtime).unwrap();
    let unlike = sources(vec![
        ptx.clone(),
        KernelDesc { check: ptx.check.clone(), ..desc("d", |_| {}, &[Access::Read], 0) },
    ]);
    assert_eq!(kind(unlike), "InvalidArgument");
}

#[test]
fn a_name_resolves_to_the_most_specific_architecture() {
    fn check(registered: &[&str], arch: &[&str], expect: &str) {
        let registry = Registry::new();
        for (i, arch) in registered.iter().enumerate() {
            register(&registry, arch, desc("k", |_| {}, &[], i as u32)).unwrap();
        }
        let mut info = leasehold::DeviceInfo::new(DeviceId::cpu(0), "a test");
        info.arch = arch.iter().map(|a| (*a).to_owned()).collect();
        let found = registry.resolve("k", &info);
        match found {
            Ok(base) => {
                // The parameters' size says which one it is.
                let runtime = runtime();
                let size = registered.iter().position(|r| *r == expect).unwrap();
                let params = &[0u8; 8][..size];
                runtime.stream().launch(&base, &[], params, 1).unwrap();
                assert!(runtime.stream().launch(&base, &[], &[0u8; 8], 1).is_err());
            }
            Err(e) => assert_eq!(e.kind(), expect),
        }
    }
    check(&["cpu", "cpu/v3", "cpu/v4"], &["cpu/v4", "cpu/v3", "cpu"], "cpu/v4");
    check(&["cpu", "cpu/v3"], &["cpu/v4", "cpu/v3", "cpu"], "cpu/v3");
    check(&["cpu"], &["cpu/v4", "cpu/v3", "cpu"], "cpu");
    check(&["cuda/sm_90"], &["cpu/v4", "cpu"], "Unsupported");
    check(&[], &["cpu"], "NotFound");
    let registry = Registry::new();
    register(&registry, "cpu", desc("k", |_| {}, &[], 0)).unwrap();
    assert_eq!(kind(register(&registry, "cpu", desc("k", |_| {}, &[], 4))), "InvalidArgument");
    assert_eq!(format!("{registry:?}"), "[\"k\"]");
    assert!(registry.resolve("k", runtime().info()).is_ok());
}

#[test]
fn threads_that_launch_on_one_stream_take_turns() {
    let runtime = runtime();
    let kernel = axpy();
    for (threads, launches) in [(2, 500), (8, 500), (4, 20_000)] {
        let x = runtime.upload(&[1.0f32; 4]).unwrap();
        let y = runtime.upload(&[0.0f32; 4]).unwrap();
        std::thread::scope(|s| {
            for _ in 0..threads {
                s.spawn(|| {
                    for _ in 0..launches {
                        launch(runtime.stream(), &kernel, &[x.read(), y.read_write()], &ones(), 1)
                            .unwrap();
                    }
                });
            }
        });
        assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [(threads * launches) as f32; 4]);
    }
}

#[test]
fn a_graph_is_launched_by_many_threads_on_one_stream_and_updated_meanwhile() {
    let runtime = runtime();
    let kernel = axpy();
    let x = runtime.upload(&[1.0f32; 4]).unwrap();
    let y = runtime.upload(&[0.0f32; 4]).unwrap();
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &kernel, &[x.read(), y.read_write()], &ones(), 1).map(drop)
        })
        .unwrap();
    std::thread::scope(|s| {
        for _ in 0..4 {
            s.spawn(|| {
                for _ in 0..200 {
                    graph.launch().unwrap();
                    launch(runtime.stream(), &kernel, &[x.read(), y.read_write()], &ones(), 1)
                        .unwrap();
                }
            });
        }
        for _ in 0..20 {
            _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &1.0f32)).unwrap();
        }
    });
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [1600.0; 4]);
}

/// A kernel of two words and two bindings whose check wants `rows` floats of each, and counts how
/// often it is asked.
fn checked(asked: &Arc<AtomicU32>) -> KernelDesc<'static> {
    unsafe fn scale(args: &CpuArgs<'_>) {
        let [rows, by]: [u32; 2] = args.params();
        let ((x, _), (y, _)) = (args.pointer::<f32>(0), args.pointer::<f32>(1));
        if args.tile() == [0; 3] {
            // SAFETY: one tile alone touches anything, and both bindings have so many rows, as the
            // check sees to.
            (0..rows as usize).for_each(|i| unsafe { y.add(i).write(x.add(i).read() * by as f32) });
        }
    }
    let asked = asked.clone();
    let check = KernelCheck::new(move |launch| {
        asked.fetch_add(1, Ordering::Relaxed);
        let [rows, _] = launch.params::<[u32; 2]>()?;
        (0..2).try_for_each(|i| launch.want(i, u64::from(rows) * 4))
    });
    KernelDesc::new("scale", KernelSource::Cpu(scale), &[Access::Read, Access::Write], check)
        .params_of::<[u32; 2]>()
        .aligned(4)
}

fn words(rows: u32, by: u32) -> Vec<u8> {
    [rows, by].iter().flat_map(|w| w.to_ne_bytes()).collect()
}

#[test]
fn every_launch_recording_and_update_asks_the_kernel() {
    let (runtime, asked) = (runtime(), Arc::new(AtomicU32::new(0)));
    let kernel = base(checked(&asked)).unwrap();
    let x = runtime.upload(&[2.0f32; 16]).unwrap();
    let y = runtime.upload(&[0.0f32; 16]).unwrap();
    let operands = [x.read(), y.write()];
    let count = || asked.swap(0, Ordering::Relaxed);
    launch(runtime.stream(), &kernel, &operands, &words(16, 3), 1).unwrap();
    assert_eq!(count(), 1);
    let refused = launch(runtime.stream(), &kernel, &operands, &words(17, 3), 1).unwrap_err();
    assert_eq!((count(), refused.kind()), (1, "InvalidArgument"));
    assert!(refused.to_string().contains("kernel scale: binding 0 has 64 bytes"), "{refused}");
    // A grid with a zero runs nothing.
    launch(runtime.stream(), &kernel, &operands, &words(17, 3), 0).unwrap();
    assert_eq!(count(), 0);
    let record = |rows| {
        runtime
            .record_graph(|r| launch(r.stream(), &kernel, &operands, &words(rows, 5), 1).map(drop))
    };
    assert_eq!(kind(record(17)), "InvalidArgument");
    let graph = record(16).unwrap();
    assert_eq!(count(), 2);
    let node = NodeId::new(0);
    assert_eq!(
        kind(graph.update(&GraphUpdate::new().params(node, &[1u32 << 20, 7]))),
        "InvalidArgument"
    );
    assert_eq!(
        graph.update(&GraphUpdate::new().params(node, &[8u32, 7])).unwrap(),
        UpdateOutcome::InPlace
    );
    assert_eq!(count(), 2);
    graph.launch().unwrap();
    let got = runtime.to_vec::<f32>(&y).unwrap();
    assert_eq!((got[7], got[8]), (14.0, 6.0), "what was refused has changed nothing");
    // The bindings of now count: a longer one has room for what the old one had not.
    let (x2, y2) = (runtime.upload(&[1.0f32; 32]).unwrap(), runtime.upload(&[0.0f32; 32]).unwrap());
    let longer = |rows: u32| {
        graph.update(&GraphUpdate::new().buffer(&x, &x2).buffer(&y, &y2).params(node, &[rows, 1]))
    };
    assert_eq!(kind(longer(33)), "InvalidArgument");
    assert!(longer(16).is_ok());
    runtime.stream().synchronize().expect("nothing poisoned the stream");
}

#[test]
fn operands_that_overlap_are_refused_unless_the_kernel_says_that_they_may() {
    let (runtime, asked) = (runtime(), Arc::new(AtomicU32::new(0)));
    let of = |overlap| base(checked(&asked).overlapping(overlap)).unwrap();
    let (refused, in_place, any) = (of(Overlap::Refused), of(Overlap::InPlace), of(Overlap::Any));
    let x = runtime.upload(&[1.0f32; 64]).unwrap();
    let run = |on: &Runtime, kernel: &KernelBase, a: (usize, usize), b: (usize, usize)| {
        let operands =
            [x.part(a.0..a.0 + a.1).unwrap().read(), x.part(b.0..b.0 + b.1).unwrap().write()];
        launch(on.stream(), kernel, &operands, &words(1, 1), 1)
    };
    let (same, part, beside) = (((0, 64), (0, 64)), ((0, 64), (60, 64)), ((0, 64), (64, 64)));
    let error = run(&runtime, &refused, same.0, same.1).unwrap_err();
    assert!(
        error.to_string().contains("binding 0 (read) and binding 1 (written) overlap"),
        "{error}"
    );
    let all = |kernel: &KernelBase| {
        [same, part, beside].map(|(a, b)| run(&runtime, kernel, a, b).is_ok())
    };
    assert_eq!(all(&refused), [false, false, true]);
    assert_eq!(all(&in_place), [true, false, true]);
    assert_eq!(all(&any), [true, true, true]);
    let empty = [x.part(128..128).unwrap().read(), x.part(64..192).unwrap().write()];
    launch(runtime.stream(), &refused, &empty, &words(0, 1), 1)
        .expect("an empty part shares no byte");
    let recorded = runtime.record_graph(|r| run(r, &refused, part.0, part.1).map(drop));
    assert_eq!(kind(recorded), "InvalidArgument");
    let temporary = runtime.record_graph(|r| {
        let t = r.alloc(256)?;
        launch(r.stream(), &refused, &[t.read(), t.write()], &words(1, 1), 1).map(drop)
    });
    assert_eq!(kind(temporary), "InvalidArgument");
    let y = runtime.upload(&[0.0f32; 64]).unwrap();
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &refused, &[x.read(), y.write()], &words(1, 1), 1).map(drop)
        })
        .unwrap();
    assert_eq!(kind(graph.update(&GraphUpdate::new().buffer(&y, &x))), "InvalidArgument");
    runtime.stream().synchronize().unwrap();
}

#[test]
fn a_misaligned_binding_is_refused_when_it_is_bound() {
    let (runtime, asked) = (runtime(), Arc::new(AtomicU32::new(0)));
    let kernel = base(checked(&asked)).unwrap();
    let (x, y) = (runtime.upload(&[0u8; 64]).unwrap(), runtime.upload(&[0u8; 64]).unwrap());
    let odd = y.part(2..34).unwrap();
    let error =
        launch(runtime.stream(), &kernel, &[x.read(), odd.write()], &words(1, 1), 1).unwrap_err();
    assert_eq!(error.kind(), "InvalidArgument");
    let text = error.to_string();
    assert_eq!(
        text,
        "invalid argument: kernel scale: binding 1 (written, 32 bytes) is not aligned to 4 bytes; \
         begin it at a multiple of 4"
    );
    launch(runtime.stream(), &kernel, &[x.read(), y.write()], &words(1, 1), 1)
        .expect("the stream is as it was");
    runtime.stream().synchronize().unwrap();
}

#[test]
fn a_kernel_without_an_entry_or_with_checks_that_differ_is_refused() {
    let asked = Arc::new(AtomicU32::new(0));
    assert_eq!(kind(base(checked(&asked).entry(""))), "InvalidArgument");
    let (a, b) = (checked(&asked), checked(&asked));
    assert_eq!(kind(sources(vec![a.clone(), b])), "InvalidArgument");
    assert!(sources(vec![a.clone(), a.clone().entry("other")]).is_ok(), "clones of one check");
    assert_eq!(kind(sources(vec![a.clone(), a.clone().aligned(8)])), "InvalidArgument");
    assert_eq!(kind(sources(vec![a.clone(), a.overlapping(Overlap::Any)])), "InvalidArgument");
}

#[test]
fn plain_data_of_any_crate_goes_to_the_device_and_back() {
    #[derive(
        Clone, Copy, PartialEq, Debug, leasehold::bytemuck::Pod, leasehold::bytemuck::Zeroable,
    )]
    #[bytemuck(crate = "leasehold::bytemuck")]
    #[repr(C)]
    struct Pair(u32, f32);
    let runtime = runtime();
    let pairs = [Pair(1, 0.5), Pair(2, -1.0)];
    assert_eq!(runtime.to_vec::<Pair>(&runtime.upload(&pairs).unwrap()).unwrap(), pairs);
    let kernel = kernel("nothing", |_| {}, &[], 0);
    let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
    let session = session_sync_ops::wait(session, &[]).unwrap();
    let session = session_ops::params(session_ops::bind(session).unwrap(), &()).unwrap();
    session_sync_ops::update_tokens(session_ops::dispatch_1d(session, 1, 1).unwrap())
        .finish()
        .unwrap();
}

#[test]
fn one_call_launches_with_any_plain_parameters_and_shapes() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let (x, y) = (runtime.upload(&[1.0f32; 16]).unwrap(), runtime.upload(&[1.0f32; 16]).unwrap());
    let operands = [x.read(), y.read_write()];
    let kernel = axpy();
    stream.launch(&kernel, &operands, &2.0f32, 4).unwrap();
    stream.launch(&kernel, &operands, &[2.0f32], (4, 1)).unwrap();
    stream.launch(&kernel, &operands, &2.0f32.to_ne_bytes()[..], [4, 1, 1]).unwrap();
    stream
        .launch(&kernel, &operands, &2.0f32, Grid::new([4, 1, 1]).threads([1, 1, 1]).shared(64))
        .unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [9.0; 16]);
    assert_eq!(
        kind(stream.launch(&kernel, &operands, &(), 4)),
        "InvalidArgument",
        "it has parameters"
    );
    assert_eq!(kind(stream.launch(&kernel, &operands[..1], &2.0f32, 4)), "InvalidArgument");
    assert_eq!(
        kind(stream.launch(&kernel, &operands, &2.0f32, (4, 0))),
        "InvalidArgument",
        "no threads"
    );
    // An open session of this thread would wait for itself.
    let session = KernelSession::begin(&kernel, &stream).unwrap();
    assert_eq!(kind(stream.launch(&kernel, &operands, &2.0f32, 4)), "Occupied");
    drop(session);
    // The same call, recorded.
    let graph =
        runtime.record_graph(|r| r.stream().launch(&kernel, &operands, &1.0f32, 4)).unwrap();
    assert_eq!((graph.nodes(), runtime.to_vec::<f32>(&y).unwrap()), (1, vec![9.0; 16]));
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [10.0; 16]);
}
