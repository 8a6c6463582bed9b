//! Communicators that begin and end badly: ranks that are lost, late, or in the wrong place.

use crate::{Bench, Over};
use leasehold::{Context, Error, Runtime};
use leasehold_collective::{CommConfig, Reduce, World};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::{FaultAction, FaultRule, MachineConfig, SimBackend, When};
use std::sync::Arc;
use std::time::{Duration, Instant};

#[test]
fn the_others_of_a_lost_rank_name_it_abort_and_go_on_without_it() {
    let machine = MachineConfig::seed(1).timeout(Duration::from_millis(300));
    let bench = Bench::new(Over::Sim, 3, machine);
    bench.run(|r| {
        let comm = r.comm();
        let x = r.runtime.upload(&[r.number() + 1]).unwrap();
        r.runtime.synchronize().unwrap();
        r.barrier("made");
        if r.number() == 1 {
            bench.machine().lose_device(1, "unplugged");
            let e = comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap_err();
            assert!(matches!(e, Error::DeviceLost { .. }), "{e}");
            return;
        }
        comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
        let text = r.runtime.synchronize().unwrap_err().to_string();
        // The machine says so, or another rank has told before.
        let told = "rank 1 is lost: its device is lost";
        assert!(text.contains("rank 1 (sim:1), which is lost") || text.contains(told), "{text}");
        comm.abort(Error::PeerLost { rank: 1, why: "its device is lost".into() }).unwrap();
        let e = comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap_err();
        assert!(matches!(e, Error::PeerLost { rank: 1, .. }), "{e}");
        assert!(matches!(comm.failure(), Some(Error::PeerLost { rank: 1, .. })));
        let rest = comm.shrink(&[1]).unwrap();
        assert_eq!((rest.rank(), rest.size()), (r.number() / 2, 2));
        let runtime = r.runtime.create_stream().unwrap().runtime();
        let y = runtime.upload(&[r.number() + 1]).unwrap();
        rest.all_reduce(runtime.stream(), &y, Reduce::Sum).unwrap();
        assert_eq!(runtime.to_vec(&y).unwrap(), [4]);
    });
}

#[test]
fn an_initialisation_that_never_ends_is_a_timeout_for_the_others() {
    let bench = Bench::new(Over::Sim, 2, MachineConfig::seed(1));
    let hang = FaultRule::on("ncclCommInitRank", When::At(1), FaultAction::Hang);
    bench.machine().add_fault(hang);
    let begun =
        || bench.machine().calls_by_name().iter().any(|(call, _)| call == "ncclCommInitRank");
    let errors = bench.run(|r| {
        // Rank 1 comes second, and has the longer limit. So it hangs, and rank 0 is late.
        let limit = [Duration::from_millis(200), Duration::from_secs(60)][r.number() as usize];
        while r.number() == 1 && !begun() {
            std::thread::yield_now();
        }
        let e = r.world.comm(&r.runtime, &r.config.clone().timeout(limit)).unwrap_err();
        bench.machine().end_hangs();
        e
    });
    let [late, hung] = [&errors[0], &errors[1]];
    assert!(matches!(late, Error::Timeout(_)), "{late}");
    assert!(late.to_string().contains("waits for ranks"), "{late}");
    // The end of the hang, or the failure of rank 0, which it tells just before.
    let told = matches!(hung, Error::PeerLost { rank: 0, .. });
    assert!(told || matches!(hung, Error::InvalidState(why) if why.contains("hang")), "{hung}");
    // The next communicator is made, and both ranks have left the first one.
    bench.run(|r| {
        let x = r.runtime.upload(&[1u8]).unwrap();
        r.comm().all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
        assert_eq!(r.runtime.to_vec(&x).unwrap(), [2]);
    });
}

#[test]
fn an_abort_that_hangs_blocks_its_caller_for_a_while_and_the_communicator_is_over() {
    let bench = Bench::new(Over::Sim, 1, MachineConfig::seed(1));
    bench.run(|r| {
        let comm = r.comm();
        let hang = FaultRule::on("ncclCommAbort", When::Once, FaultAction::Hang);
        bench.machine().add_fault(hang);
        let begun = Instant::now();
        let e = comm.abort(Error::state("enough")).unwrap_err();
        assert!(matches!(e, Error::Timeout(_)) && begun.elapsed() < Duration::from_secs(60), "{e}");
        let x = r.runtime.upload(&[1u8]).unwrap();
        let e = comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap_err();
        assert!(e.to_string().contains("enough"), "{e}");
        bench.machine().end_hangs();
    });
}

#[test]
fn every_abort_waits_for_the_library_whoever_came_first() {
    let bench = Bench::new(Over::Sim, 1, MachineConfig::seed(1));
    bench.run(|r| {
        let comm = r.comm();
        let hang = FaultRule::on("ncclCommAbort", When::Once, FaultAction::Hang);
        bench.machine().add_fault(hang);
        let begun =
            || bench.machine().calls_by_name().iter().any(|(call, _)| call == "ncclCommAbort");
        std::thread::scope(|scope| {
            let first = scope.spawn(|| comm.abort(Error::state("enough")));
            while !begun() {
                std::thread::yield_now();
            }
            let second = scope.spawn(|| comm.abort(Error::state("enough too")));
            std::thread::sleep(Duration::from_millis(100));
            assert!(!first.is_finished() && !second.is_finished(), "the library hangs");
            bench.machine().end_hangs();
            first.join().unwrap().unwrap();
            second.join().unwrap().unwrap();
        });
        assert!(comm.failure().unwrap().to_string().contains("enough"));
    });
}

#[test]
fn an_error_that_the_library_notices_is_the_communicators() {
    let bench = Bench::new(Over::Cuda, 1, MachineConfig::seed(1));
    bench.run(|r| {
        let comm = r.comm();
        assert!(comm.failure().is_none());
        let error = FaultRule::on("ncclCommGetAsyncError", When::Always, FaultAction::Fail(6));
        bench.machine().add_fault(error);
        assert!(matches!(comm.failure(), Some(Error::Driver { code: 6, .. })));
    });
}

/// The error of the second of two ranks, which has this runtime and this library.
fn second_rank(runtime: impl FnOnce() -> Runtime + Send, library: SimCollectives) -> Error {
    let bench = Bench::new(Over::Sim, 2, MachineConfig::seed(1));
    let mut worlds = World::threads(2).unwrap().into_iter();
    let (first, second) = (worlds.next().unwrap(), worlds.next().unwrap());
    let config = |library: SimCollectives| {
        CommConfig::new("tp").ops(Arc::new(library)).timeout(Duration::from_millis(100))
    };
    std::thread::scope(|scope| {
        let own = config(bench.library.clone());
        scope.spawn(move || first.comm(&bench.runtime(0).unwrap(), &own).unwrap_err());
        let second = scope.spawn(move || second.comm(&runtime(), &config(library)).unwrap_err());
        second.join().unwrap()
    })
}

#[test]
fn a_rank_in_the_wrong_place_is_refused() {
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(2)).unwrap());
    let library = SimCollectives::of_sim(&backend);
    let sim =
        move || Context::with_backends(vec![backend]).runtime("sim:0".parse().unwrap()).unwrap();
    let e = second_rank(sim, library.clone());
    assert!(e.to_string().contains("rank 1 of tp has another library than rank 0"), "{e}");
    let cpu = || Runtime::open("cpu:0".parse().unwrap()).unwrap();
    let e = second_rank(cpu, library);
    assert!(matches!(e, Error::Unsupported(_)) && e.to_string().contains("cpu:0"), "{e}");
}

#[test]
fn two_ranks_of_one_device_are_refused() {
    let bench = Bench::new(Over::Sim, 2, MachineConfig::seed(1));
    let worlds = World::threads(2).unwrap();
    let errors: Vec<Error> = std::thread::scope(|scope| {
        let ranks: Vec<_> = worlds
            .into_iter()
            .map(|world| {
                let config = bench.config().timeout(Duration::from_millis(200));
                let runtime = bench.runtime(0).unwrap();
                scope.spawn(move || world.comm(&runtime, &config).unwrap_err())
            })
            .collect();
        ranks.into_iter().map(|rank| rank.join().unwrap()).collect()
    });
    let refused = errors.iter().find(|e| matches!(e, Error::InvalidArgument(_)));
    let text = refused.expect("both ranks have joined").to_string();
    assert!(text.contains("are both on sim:0; give each a device"), "{text}");
}

/// A thread for each of two communicators, also without a line that orders their calls.
#[test]
fn threads_of_a_rank_take_turns_in_the_library() {
    for (over, concurrent) in
        [(Over::Sim, false), (Over::Sim, true), (Over::Cuda, false), (Over::Cuda, true)]
    {
        // With one rank the threads need no order of their own.
        let bench = Bench::new(over, 1, MachineConfig::seed(1));
        bench.run(|r| {
            std::thread::scope(|scope| {
                for name in ["a", "b"] {
                    let config = CommConfig::new(name).concurrent(concurrent);
                    let config = config.ops(Arc::new(bench.library.clone()));
                    let comm = r.world.comm(&r.runtime, &config).unwrap();
                    scope.spawn(move || {
                        let runtime = r.runtime.create_stream().unwrap().runtime();
                        let x = runtime.upload(&[7u64]).unwrap();
                        for _ in 0..200 {
                            comm.all_reduce(runtime.stream(), &x, Reduce::Sum).unwrap();
                        }
                        assert_eq!(runtime.to_vec(&x).unwrap(), [7]);
                    });
                }
            });
        });
        assert_eq!(bench.machine().take_reports(), []);
    }
}

#[test]
fn what_a_rank_does_on_its_own_after_an_abort_is_sound() {
    let bench = Bench::new(Over::Cuda, 2, MachineConfig::seed(3));
    bench.run(|r| {
        let comm = r.comm();
        let x = r.runtime.upload(&vec![1.0f32; 1 << 20]).unwrap();
        comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
        r.runtime.synchronize().unwrap();
        r.barrier("made");
        let alone = || {
            for _ in 0..3 {
                let own = r.runtime.create_stream().unwrap().runtime();
                let y = own.upload(&[7u32; 1000]).unwrap();
                assert_eq!(own.to_vec(&y).unwrap(), [7; 1000]);
            }
        };
        // A call that is over, as nobody on this rank knows yet.
        let done = r.comm();
        done.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
        if r.number() == 1 {
            r.runtime.synchronize().unwrap();
        }
        r.barrier("done");
        let _ = done.abort(Error::other("on purpose"));
        alone();
        if r.number() == 0 {
            comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap();
            // The library takes its time, and the call goes on meanwhile.
            let hang = FaultRule::on("ncclCommAbort", When::Always, FaultAction::Hang);
            bench.machine().add_fault(hang);
            let late = comm.abort(Error::other("on purpose"));
            assert!(matches!(late, Err(Error::Timeout(_))), "{late:?}");
            let ended = r.runtime.stream().synchronize().unwrap_err();
            assert!(ended.to_string().contains("on purpose"), "{ended}");
            alone();
            bench.machine().end_hangs();
            alone();
        }
        r.barrier("over");
    });
}
