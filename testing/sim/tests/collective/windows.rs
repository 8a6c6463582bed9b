//! Registered memory: when calls use it, and what is refused.

use crate::{Bench, Over};
use leasehold::{Array, Buffer, Error, GraphUpdate, Lease, Pool, PoolKind, View};
use leasehold_collective::Reduce;
use leasehold_collective::driver::{CollectiveOps, Place};
use leasehold_sim::{MachineConfig, ReportKind};
use std::time::Duration;

fn array(pool: &Pool, words: usize) -> Array<u32> {
    Array::from_buffer(pool.alloc(4 * words as u64).unwrap()).unwrap()
}

/// Waits until what a drop began on another thread is over.
fn soon(done: impl Fn() -> bool) {
    for _ in 0..2000 {
        if done() {
            return;
        }
        std::thread::sleep(Duration::from_millis(5));
    }
    panic!("it did not happen");
}

#[test]
fn recorded_small_calls_use_windows_and_all_others_do_not() {
    for over in [Over::Sim, Over::Cuda] {
        let bench = Bench::new(over, 3, MachineConfig::seed(4));
        bench.run(|r| {
            let (comm, pool) =
                (r.comm(), Pool::new(&r.runtime, "shared", PoolKind::Shareable).unwrap());
            let me = r.number();
            let (x, large) = (array(&pool, 1024), array(&pool, 5000));
            let (own, all) = (array(&pool, 4), array(&pool, 12));
            let ordinary = r.runtime.upload(&[me; 8]).unwrap();
            let registration = comm.register(&pool).unwrap();
            assert_eq!(registration.bytes(), pool.stats().reserved);
            r.barrier("registered");
            let before = bench.library.windowed();
            r.barrier("counted");
            let put = |x: &Array<u32>, by: u32| {
                r.runtime.stream().fill(x.view(), by).unwrap();
            };
            // Eager calls, large ones and ordinary memory go as ever.
            put(&x, me);
            comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
            assert_eq!(r.runtime.to_vec(&x).unwrap(), [3; 1024]);
            let graph = r
                .runtime
                .record_graph(|recording| {
                    comm.all_reduce(recording.stream(), &large, Reduce::Sum)?;
                    comm.all_reduce(recording.stream(), &ordinary, Reduce::Sum)
                })
                .unwrap();
            put(&large, me + 1);
            graph.launch_on(r.runtime.stream()).unwrap();
            assert_eq!(r.runtime.to_vec(&large).unwrap(), [6; 5000]);
            assert_eq!(r.runtime.to_vec(&ordinary).unwrap(), [3; 8]);
            r.barrier("plain");
            assert_eq!(bench.library.windowed(), before, "{over:?}");
            r.barrier("none");
            // Small ones of recordings are in windows, in place and not.
            let graph = r
                .runtime
                .record_graph(|recording| {
                    comm.all_reduce(recording.stream(), &x, Reduce::Sum)?;
                    comm.all_gather(recording.stream(), &all, &own)
                })
                .unwrap();
            for round in 1..4 {
                put(&x, round * (me + 1));
                put(&own, round + me);
                graph.launch_on(r.runtime.stream()).unwrap();
                assert_eq!(r.runtime.to_vec(&x).unwrap(), [6 * round; 1024], "{over:?}");
                let gathered: Vec<u32> = (0..12).map(|i| round + i / 4).collect();
                assert_eq!(r.runtime.to_vec(&all).unwrap(), gathered, "{over:?}");
            }
            r.barrier("windows");
            assert!(bench.library.windowed() >= before + 6, "{over:?}");
            // A graph keeps the windows after the registration and the pool.
            drop((registration, pool));
            put(&x, 1);
            graph.launch_on(r.runtime.stream()).unwrap();
            assert_eq!(r.runtime.to_vec(&x).unwrap(), [3; 1024], "{over:?}");
        });
        assert_eq!(bench.machine().take_reports(), [], "{over:?}");
    }
}

/// One rank's buffer lies elsewhere: the library must not be told of windows on any rank.
#[test]
fn calls_whose_offsets_differ_between_ranks_use_no_window() {
    let bench = Bench::new(Over::Cuda, 2, MachineConfig::seed(5));
    bench.run(|r| {
        let (comm, pool) =
            (r.comm(), Pool::new(&r.runtime, "shared", PoolKind::Shareable).unwrap());
        let x = array(&pool, 200);
        let _registration = comm.register(&pool).unwrap();
        let other = r.runtime.upload(&[1u32; 100]).unwrap();
        let at = r.number() as usize;
        for differing in [true, false] {
            let graph = r.runtime.record_graph(|recording| {
                let part = if differing { x.slice(at..at + 100) } else { x.slice(..100) };
                match (differing, at) {
                    (true, 1) => comm.all_reduce(recording.stream(), &other, Reduce::Sum),
                    _ => comm.all_reduce(recording.stream(), part, Reduce::Sum),
                }
            });
            let graph = graph.unwrap();
            r.runtime.stream().fill(x.view(), 1u32).unwrap();
            graph.launch_on(r.runtime.stream()).unwrap();
            let sum = if differing && at == 1 {
                r.runtime.to_vec(&other).unwrap()
            } else {
                r.runtime.to_vec(x.slice(..100)).unwrap()
            };
            assert_eq!(sum, [2; 100]);
            r.barrier(if differing { "plain" } else { "windows" });
            assert_eq!(bench.library.windowed() > 0, !differing);
            r.barrier(if differing { "seen" } else { "end" });
        }
    });
    assert_eq!(bench.machine().take_reports(), []);
}

/// The other ranks' calls stay as they were compared, so one rank's graph cannot go elsewhere: not
/// to ordinary memory, not to another place in a window, and not to its own source.
#[test]
fn an_update_cannot_move_a_call_in_windows() {
    for (over, update) in
        [Over::Sim, Over::Cuda].into_iter().flat_map(|o| [0, 1, 2].map(|u| (o, u)))
    {
        // A refused call ends the communicator, since it is missing on one rank.
        let bench = Bench::new(over, 2, MachineConfig::seed(9));
        bench.run(|r| {
            let pool = Pool::new(&r.runtime, "shared", PoolKind::Shareable).unwrap();
            let [x, y, z] = [(); 3].map(|()| array(&pool, 100));
            let ordinary = r.runtime.upload(&[1u32; 100]).unwrap();
            let comm = r.comm();
            let _registration = comm.register(&pool).unwrap();
            let graph = r.runtime.record_graph(|recording| {
                comm.all_reduce_into(recording.stream(), &y, &x, Reduce::Sum)
            });
            let graph = graph.unwrap();
            r.barrier("recorded");
            let update = match update {
                0 => GraphUpdate::new().buffer(&x, &ordinary),
                1 => GraphUpdate::new().buffer(&y, &z),
                _ => GraphUpdate::new().buffer(&x, &y).buffer(&y, &x),
            };
            // CUDA asks the library again as the graph is updated, the simulated backend later.
            let launched = graph
                .update(&update)
                .and_then(|_| graph.launch_on(r.runtime.stream()))
                .and_then(|_| r.runtime.stream().synchronize_timeout(Duration::from_secs(20)));
            let refused = launched.unwrap_err().to_string();
            assert!(refused.contains("record it anew"), "{over:?}: {refused}");
            r.barrier("tried");
        });
    }
}

#[test]
fn a_registration_gives_back_its_windows_before_the_memory() {
    for over in [Over::Sim, Over::Cuda] {
        let bench = Bench::new(over, 2, MachineConfig::seed(6));
        let program = || {
            bench.run(|r| {
                let (comm, pool) =
                    (r.comm(), Pool::new(&r.runtime, "shared", PoolKind::Shareable).unwrap());
                let x = array(&pool, 10);
                let registration = comm.register(&pool).unwrap();
                // A second one, of what the pool got since.
                let y = Array::<u32>::from_buffer(pool.alloc(40 << 20).unwrap()).unwrap();
                let second = comm.register(&pool).unwrap();
                assert!(second.bytes() > registration.bytes());
                drop((x, y, pool, registration));
                r.barrier("dropped");
                drop((second, comm));
                r.world.clone().close(Duration::from_secs(60)).unwrap();
            });
        };
        // Four segments of two ranks, twice in use: what stays is the devices' own.
        program();
        soon(|| bench.machine().memory_in_use().device.iter().all(|&used| used <= 8 << 20));
        assert_eq!(bench.machine().take_reports(), [], "{over:?}");
    }
}

#[test]
fn what_cannot_be_registered_is_refused_on_all_ranks() {
    let bench = Bench::new(Over::Sim, 2, MachineConfig::seed(7));
    bench.run(|r| {
        let comm = r.comm();
        let pool = Pool::new(&r.runtime, "shared", PoolKind::Shareable).unwrap();
        let e = comm.register(&pool).unwrap_err();
        assert!(e.to_string().contains("no memory to register yet"), "{e}");
        // Other sizes on other ranks.
        let _x = pool.alloc((1 + 40 * u64::from(r.number())) << 20).unwrap();
        let e = comm.register(&pool).unwrap_err();
        assert!(matches!(&e, Error::InvalidArgument(_)), "{e}");
        assert!(e.to_string().contains("allocate the same sizes on all ranks"), "{e}");
        // The memory of another device.
        let other = bench.runtime(1 - r.number()).unwrap();
        let strange = Pool::new(&other, "strange", PoolKind::Shareable).unwrap();
        let e = comm.register(&strange).unwrap_err();
        assert!(e.to_string().contains("is not memory of"), "{e}");
        // One rank's refusal is the others' error, and the next registration is of all.
        let own = Pool::new(&r.runtime, "own", PoolKind::Shareable).unwrap();
        let _y = own.alloc(1 << 20).unwrap();
        let e = comm.register(if r.number() == 1 { &strange } else { &own }).unwrap_err();
        assert!(e.to_string().contains("is not memory of"), "{e}");
        assert_eq!(e.to_string().contains("rank 1: "), r.number() == 0, "{e}");
        drop(comm.register(&own).unwrap());
    });
}

/// The machine finds misuse that the layer above never makes.
#[test]
fn windows_over_other_memory_and_memory_that_goes_first_are_reported() {
    let bench = Bench::new(Over::Sim, 1, MachineConfig::seed(8));
    let runtime = bench.runtime(0).unwrap();
    let library = &bench.library;
    let place = Place {
        name: "t".into(),
        rank: 0,
        size: 1,
        id: library.unique_id().unwrap().into(),
        runtime: runtime.clone(),
        sends: true,
        limit: Duration::from_secs(10),
    };
    let part = library.init(&place).unwrap();
    let misused = |words: &str| {
        let reports = bench.machine().take_reports();
        assert!(reports.iter().all(|r| r.kind == ReportKind::Misuse), "{reports:?}");
        assert!(reports.iter().any(|r| r.to_string().contains(words)), "{words}: {reports:?}");
    };
    let ordinary: Lease<Buffer> = runtime.alloc(4 << 20).unwrap();
    // SAFETY: the simulated library refuses it.
    let e = unsafe { part.register(ordinary.addr(), ordinary.len()) }.unwrap_err();
    assert!(e.to_string().contains("shareable memory"), "{e}");
    misused("not one segment of shareable memory");
    let segment = runtime.raw_device().sharing().unwrap().create(4 << 20).unwrap();
    // SAFETY: a whole segment, which goes too early: the simulated machine says so.
    let window = unsafe { part.register(segment.addr(), segment.bytes()) }.unwrap();
    drop(segment);
    part.deregister(window).unwrap();
    misused("went before its window");
    assert!(part.deregister(window).is_err());
    misused("which there is not");
}
