//! Beginnings and ends: parts, aborts, ranks that go.

use crate::common::{config, ranks, ranks_with, runtime, worlds};
use leasehold::{Context, DeviceId, Error, Result};
use leasehold_collective::{CommConfig, Presence, Reduce, TcpStore, World};
use std::time::{Duration, Instant};

#[test]
fn a_communicator_splits_by_colour_and_key() {
    ranks(6, |r| {
        // Odd and even ranks, from the last one on; rank 5 takes no part.
        let me = r.me();
        let color = (me != 5).then_some(me % 2);
        let part = r.comm.split(color, -(me as i32))?;
        let Some(part) = part else {
            assert_eq!(me, 5);
            return Ok(());
        };
        let members: &[u32] = if me % 2 == 0 { &[4, 2, 0] } else { &[3, 1] };
        assert_eq!(part.size() as usize, members.len());
        assert_eq!(members[part.rank() as usize], me);
        assert_eq!(part.name(), format!("tp.{}", me % 2));
        let (x, y) = (r.runtime.upload(&[me])?, r.runtime.zeros::<u32>(members.len())?);
        part.all_gather(r.runtime.stream(), &y, &x)?;
        assert_eq!(r.runtime.to_vec(&y)?, members);
        // A part of a part, and the whole still works for those that have it.
        let alone = part.split(Some(part.rank()), 0)?.unwrap();
        assert_eq!((alone.rank(), alone.size()), (0, 1));
        alone.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&x)?, [me]);
        Ok(())
    });
}

#[test]
fn the_others_go_on_without_a_rank_that_is_gone() {
    let sums = worlds(4, |world| -> Result<Option<Vec<u32>>> {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, &config())?;
        if world.rank() == 2 {
            return Ok(None); // drops its communicator and its world
        }
        let x = runtime.upload(&[world.rank()])?;
        let begun = Instant::now();
        // Another rank may have found it before.
        let called = comm.all_reduce(runtime.stream(), &x, Reduce::Sum);
        let lost = called.and_then(|()| runtime.stream().synchronize()).unwrap_err();
        assert!(matches!(lost, Error::PeerLost { rank: 2, .. }), "{lost}");
        assert!(begun.elapsed() < Duration::from_secs(10), "long before the limit");
        assert!(matches!(comm.failure(), Some(Error::PeerLost { rank: 2, .. })));

        let smaller = comm.shrink(&[2])?;
        assert_eq!((smaller.size(), comm.size()), (3, 4));
        let stream = runtime.create_stream()?;
        let x = stream.runtime().upload(&[world.rank()])?;
        smaller.all_reduce(&stream, &x, Reduce::Sum)?;
        assert!(comm.shrink(&[world.rank()]).is_err(), "it is not among those that stay");
        stream.runtime().to_vec(&x).map(Some)
    });
    for sum in sums {
        assert!(sum.unwrap().is_none_or(|sum| sum == [4]));
    }
}

#[test]
fn a_world_that_is_gone_is_lost_to_whoever_waits_for_it() {
    let errors = worlds(2, |world| {
        if world.rank() == 1 {
            return None;
        }
        let begun = Instant::now();
        let error =
            world.comm(&runtime().unwrap(), &config().timeout(Duration::from_secs(4))).err();
        assert_eq!(world.presence(1).unwrap(), Presence::Gone);
        Some((error.unwrap(), begun.elapsed()))
    });
    let (error, _) = errors[0].as_ref().unwrap();
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    // The rank that waits for rank 0 sees it at once.
    let errors = worlds(2, |world| {
        if world.rank() == 0 {
            return None;
        }
        let begun = Instant::now();
        let error = world.comm(&runtime().unwrap(), &config()).err();
        Some((error.unwrap(), begun.elapsed()))
    });
    let (error, waited) = errors[1].as_ref().unwrap();
    assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
    assert!(*waited < Duration::from_secs(10));
}

#[test]
fn after_an_abort_calls_fail_with_its_cause_on_all_ranks() {
    ranks(2, |r| {
        let x = r.runtime.upload(&[1u32])?;
        r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?;
        r.runtime.stream().synchronize()?;
        if r.me() == 0 {
            // The other rank waits in a call.
            std::thread::sleep(Duration::from_millis(100));
            r.comm.abort(Error::other("on purpose"))?;
            r.comm.abort(Error::other("too late"))?;
            let error = r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).unwrap_err();
            assert_eq!(error.to_string(), "on purpose");
            // The stream had no part in it.
            assert_eq!(r.runtime.to_vec(&x)?, [2]);
        } else {
            let called = r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum);
            let error = called.and_then(|()| r.runtime.stream().synchronize()).unwrap_err();
            assert!(matches!(error, Error::PeerLost { rank: 0, .. }), "{error}");
            assert!(error.to_string().contains("on purpose"), "{error}");
            assert!(r.comm.barrier(&r.runtime.create_stream()?).is_err());
        }
        assert!(r.comm.failure().is_some());
        Ok(())
    });
}

#[test]
fn a_graph_keeps_its_communicator_and_a_drop_does_not_wait() {
    ranks(2, |r| {
        let x = r.runtime.upload(&[1u32])?;
        let comm = r.world.comm(&r.runtime, &CommConfig::new("short"))?;
        let graph = r
            .runtime
            .record_graph(|recording| comm.all_reduce(recording.stream(), &x, Reduce::Sum))?;
        let begun = Instant::now();
        drop(comm);
        assert!(begun.elapsed() < Duration::from_secs(1));
        for _ in 0..3 {
            graph.launch_on(r.runtime.stream())?;
        }
        assert_eq!(r.runtime.to_vec(&x)?, [8]);
        Ok(())
    });
}

#[test]
fn worlds_end_together_and_the_store_ends_last() {
    let done = worlds(2, |world| {
        let runtime = runtime()?;
        drop(world.comm(&runtime, &config())?);
        world.close(Duration::from_secs(30))
    });
    done.into_iter().for_each(|done| done.unwrap());
    let server = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let at = server.address().to_string();
    std::thread::scope(|scope| {
        for rank in 1..4 {
            let at = &at;
            scope.spawn(move || {
                let store = TcpStore::connect(at, None, Duration::from_secs(30)).unwrap();
                let world = World::with_store(rank, 4, store).unwrap();
                std::thread::sleep(Duration::from_millis(20 * u64::from(rank)));
                world.close(Duration::from_secs(30)).unwrap();
            });
        }
        let zero = World::with_store(0, 4, server).unwrap();
        zero.close(Duration::from_secs(30)).unwrap();
    });
    // A rank that does not end is missed.
    let mut two = World::threads(2).unwrap();
    let late = two.remove(0).close(Duration::from_millis(50)).unwrap_err().to_string();
    assert!(late.contains("1 of 2 have come"), "{late}");
}

#[test]
fn communicators_of_one_name_are_several() {
    ranks(2, |r| {
        let again = r.world.comm(&r.runtime, &config())?;
        let concurrent = r.world.comm(&r.runtime, &config().concurrent(true))?;
        let x = r.runtime.upload(&[1u32])?;
        for comm in [&again, &r.comm, &concurrent] {
            comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?;
        }
        assert_eq!(r.runtime.to_vec(&x)?, [8]);
        assert!(r.comm.library().contains("host"));
        assert!(format!("{:?} {:?}", r.comm, r.world).contains("rank"));
        Ok(())
    });
}

#[test]
fn ranks_that_send_to_each_other_without_a_group_are_named() {
    let short = CommConfig::new("tp").timeout(Duration::from_secs(1));
    let results = ranks_with(2, &short, |r| {
        let (x, y) = (r.runtime.upload(&[1u32])?, r.runtime.zeros::<u32>(1)?);
        let other = 1 - r.me();
        r.comm.send(r.runtime.stream(), &x, other)?;
        r.comm.recv(r.runtime.stream(), &y, other)?;
        Ok(r.runtime.stream().synchronize().unwrap_err())
    });
    for error in results {
        let error = error.unwrap();
        assert!(matches!(error, Error::Timeout(_)), "{error}");
        assert!(error.to_string().contains("waits in send 1 u32 to"), "{error}");
    }
}

#[test]
fn a_call_may_be_the_last_holder_of_everything() {
    for recorded in [false, true] {
        let weak = worlds(2, |world| {
            let context = Context::new();
            let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
            let comm = world.comm(&runtime, &config()).unwrap();
            let x = runtime.upload(&[1u32; 1000]).unwrap();
            let graph = runtime
                .record_graph(|recording| comm.all_reduce(recording.stream(), &x, Reduce::Sum));
            let buffer = x.downgrade();
            if recorded {
                graph.unwrap().launch().unwrap();
            } else {
                drop(graph);
                comm.all_reduce(runtime.stream(), &x, Reduce::Sum).unwrap();
            }
            buffer // and all else is dropped while the call waits or runs
        });
        let until = Instant::now() + Duration::from_secs(30);
        while weak.iter().any(|buffer| buffer.upgrade().is_some()) {
            assert!(Instant::now() < until, "something keeps the memory, recorded: {recorded}");
            std::thread::sleep(Duration::from_millis(2));
        }
    }
}

#[test]
fn a_runtime_ends_after_graphs_with_calls() {
    ranks(1, |_| {
        let context = Context::new();
        let world = World::threads(1)?.remove(0);
        let runtime = context.runtime(DeviceId::cpu(0))?;
        let ended = runtime.extension(|_| Ok(()))?;
        let comm = world.comm(&runtime, &config())?;
        let x = runtime.upload(&[1u32])?;
        let graph = runtime
            .record_graph(|recording| comm.all_reduce(recording.stream(), &x, Reduce::Sum))?;
        graph.launch()?;
        assert_eq!(runtime.to_vec(&x)?, [1]);
        drop((comm, x, runtime, world));
        drop((graph, context));
        let until = Instant::now() + Duration::from_secs(30);
        // The extension's slot goes with the runtime.
        while std::sync::Arc::strong_count(&ended) != 1 {
            assert!(Instant::now() < until, "a graph with a call keeps its runtime");
            std::thread::sleep(Duration::from_millis(2));
        }
        Ok(())
    });
}

#[test]
fn a_communicator_is_given_back_after_its_last_call() {
    use leasehold::backend::sync::Arc;
    use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
    use leasehold_collective::driver::{Call, Place};
    use leasehold_collective::{CollectiveOps, Communicator};

    /// A library that notices when its communicator is given back.
    struct Ops(Arc<AtomicBool>);
    struct Part(Arc<AtomicBool>);

    impl CollectiveOps for Ops {
        fn name(&self) -> &str {
            "notices"
        }
        fn unique_id(&self) -> Result<Vec<u8>> {
            Ok(Vec::new())
        }
        fn init(&self, _place: &Place) -> Result<Arc<dyn Communicator>> {
            Ok(Arc::new(Part(self.0.clone())))
        }
    }
    impl Communicator for Part {
        unsafe fn enqueue(&self, _stream: u64, _calls: &[Call<'_>]) -> Result<()> {
            assert!(!self.0.load(Ordering::Acquire), "it was given back before");
            Ok(())
        }
        fn abort(&self, _cause: Error) {}
        fn destroy(&self) -> Result<()> {
            self.0.store(true, Ordering::Release);
            Ok(())
        }
    }

    let given_back = Arc::new(AtomicBool::new(false));
    let world = World::threads(1).unwrap().remove(0);
    let runtime = runtime().unwrap();
    let config = config().ops(Arc::new(Ops(given_back.clone())));
    let comm = world.comm(&runtime, &config).unwrap();
    let gate = runtime.create_host_timeline().unwrap();
    comm.barrier(runtime.stream()).unwrap();
    runtime.stream().wait(gate.next()).unwrap();
    comm.barrier(runtime.stream()).unwrap();
    drop(comm);
    std::thread::sleep(Duration::from_millis(30));
    assert!(!given_back.load(Ordering::Acquire));
    gate.signal(gate.value() + 1).unwrap();
    runtime.stream().synchronize().unwrap();
    world.close(Duration::from_secs(30)).unwrap();
    assert!(given_back.load(Ordering::Acquire));
}
