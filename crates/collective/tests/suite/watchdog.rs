//! Ranks that are lost, stopped, late or wrong, over a library that notices nothing of it.

use crate::common::{Killed, config, process, runtime, worlds};
use leasehold::backend::sync::{Arc, Condvar, Mutex};
use leasehold::{Error, Result, Runtime};
use leasehold_collective::driver::{Call, Place};
use leasehold_collective::{
    CollectiveOps, Comm, CommConfig, Communicator, FileStore, Reduce, TcpStore, World,
};
use std::process::Command;
use std::time::{Duration, Instant};

/// A library as bad as NCCL: a call ends at once and does nothing, or it never ends. An abort ends
/// it without an error.
#[derive(Clone, Copy)]
struct Blind {
    hangs: bool,
    /// The rank whose calls fail.
    fails: Option<u32>,
}

struct Part {
    hangs: bool,
    fails: bool,
    aborted: Mutex<bool>,
    changed: Condvar,
}

impl CollectiveOps for Blind {
    fn name(&self) -> &str {
        "blind"
    }
    /// A call that hangs must not hold up those of other ranks and tests.
    fn takes_turns(&self) -> bool {
        false
    }
    fn unique_id(&self) -> Result<Vec<u8>> {
        Ok(Vec::new())
    }
    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>> {
        let (aborted, changed) = (Mutex::new(false), Condvar::new());
        let fails = self.fails == Some(place.rank);
        Ok(Arc::new(Part { hangs: self.hangs, fails, aborted, changed }))
    }
}

impl Communicator for Part {
    unsafe fn enqueue(&self, _stream: u64, _calls: &[Call<'_>]) -> Result<()> {
        if self.fails {
            return Err(Error::Unsupported("not on this device".into()));
        }
        let mut aborted = self.aborted.lock();
        while self.hangs && !*aborted {
            self.changed.wait(&mut aborted);
        }
        Ok(())
    }
    fn abort(&self, _cause: Error) {
        *self.aborted.lock() = true;
        self.changed.notify_all();
    }
}

fn blind(hangs: bool) -> CommConfig {
    config().ops(Arc::new(Blind { hangs, fails: None }))
}

/// The failure of a communicator, once it has one.
fn failure(comm: &Comm) -> Error {
    let until = Instant::now() + Duration::from_secs(30);
    loop {
        if let Some(cause) = comm.failure() {
            return cause;
        }
        assert!(Instant::now() < until, "the communicator has no failure");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn a_thread_that_panics_is_named_and_what_depends_on_it_ends() {
    std::panic::set_hook(Box::new(|_| {}));
    let worlds = World::threads(3).unwrap();
    let ranks: Vec<_> = worlds
        .into_iter()
        .map(|world| {
            std::thread::spawn(move || -> Result<(Error, Error)> {
                let runtime = runtime()?;
                let comm = world.comm(&runtime, &blind(true))?;
                let (x, free) = (runtime.upload(&[1u32; 8])?, runtime.create_stream()?);
                if world.rank() == 1 {
                    panic!("on purpose");
                }
                comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
                // It would never end.
                let lost = runtime.stream().synchronize().err();
                let own = free.runtime().upload(&[7u32])?;
                assert_eq!(free.runtime().to_vec(&own)?, [7], "work that depends on nobody");
                let failure = failure(&comm);
                Ok((lost.unwrap_or_else(|| failure.clone()), failure))
            })
        })
        .collect();
    for (rank, thread) in ranks.into_iter().enumerate() {
        match thread.join() {
            Ok(errors) => {
                let (stream, comm) = errors.unwrap();
                for error in [stream, comm] {
                    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{rank}: {error}");
                }
            }
            Err(_) => assert_eq!(rank, 1),
        }
    }
}

#[test]
fn a_call_that_fails_on_one_rank_ends_the_others() {
    let ops = Arc::new(Blind { hangs: true, fails: Some(1) });
    let errors = worlds(3, |world| -> Result<Error> {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, &config().ops(ops.clone()))?;
        let x = runtime.upload(&[1u32; 8])?;
        // It may have heard of the failure already.
        let _ = comm.all_reduce(runtime.stream(), &x, Reduce::Sum);
        let failure = failure(&comm);
        world.barrier("seen", Duration::from_secs(30))?;
        Ok(failure)
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap();
        assert!(error.to_string().contains("not on this device"), "{error}");
        assert_eq!(matches!(error, Error::PeerLost { rank: 1, .. }), rank != 1, "{error}");
    }
}

#[test]
fn an_abort_reaches_the_other_ranks_and_their_graphs() {
    let errors = worlds(3, |world| -> Result<Error> {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, &blind(false))?;
        let x = runtime.upload(&[1u32; 8])?;
        let graph = runtime
            .record_graph(|recording| comm.all_reduce(recording.stream(), &x, Reduce::Sum))?;
        graph.launch_on(runtime.stream())?;
        runtime.stream().synchronize()?;
        world.barrier("launched", Duration::from_secs(30))?;
        if world.rank() == 2 {
            comm.abort(Error::other("enough"))?;
        }
        let failure = failure(&comm);
        let refused = graph.launch_on(runtime.stream()).unwrap_err();
        assert_eq!(refused.to_string(), failure.to_string());
        assert_eq!(graph.launches(), 1);
        assert_eq!(runtime.to_vec(&x)?.len(), 8, "the stream works");
        world.barrier("seen", Duration::from_secs(30))?;
        Ok(failure)
    });
    for (rank, error) in errors.into_iter().enumerate() {
        let error = error.unwrap();
        assert!(error.to_string().contains("enough"), "{error}");
        assert_eq!(matches!(error, Error::PeerLost { rank: 2, .. }), rank != 2, "{error}");
    }
}

#[test]
fn eager_calls_that_differ_are_named_although_the_library_takes_them() {
    let errors = worlds(4, |world| -> Result<Error> {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, &blind(false))?;
        let x = runtime.upload(&[1u32; 8])?;
        for step in 0..40 {
            let wrong = step == 17 && world.rank() == 2;
            let view = if wrong { x.slice(..4) } else { x.slice(..) };
            comm.all_reduce(runtime.stream(), view, Reduce::Sum)?;
        }
        let failure = failure(&comm);
        world.barrier("seen", Duration::from_secs(30))?;
        Ok(failure)
    });
    let mut named = 0;
    for error in errors {
        let text = error.unwrap().to_string();
        named += usize::from(text.contains("#17") && text.contains("rank 2 all_reduce 4 u32 Sum"));
    }
    assert_eq!(named, 4);
}

#[test]
fn calls_that_agree_are_no_mismatch_however_late_a_rank_is() {
    let sound = worlds(2, |world| -> Result<bool> {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, &blind(false))?;
        let x = runtime.upload(&[1u32; 8])?;
        for step in 0..1500 {
            // More calls than are kept, and one rank is behind at times.
            if step % 500 == 0 && world.rank() == 1 {
                std::thread::sleep(Duration::from_millis(150));
            }
            comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
        }
        std::thread::sleep(Duration::from_millis(250));
        world.barrier("done", Duration::from_secs(30))?;
        Ok(comm.failure().is_none())
    });
    sound.into_iter().for_each(|sound| assert!(sound.unwrap()));
}

#[test]
fn a_rank_that_does_not_call_is_found_at_the_limit_with_what_it_waits_for() {
    let errors = worlds(2, |world| -> Result<Option<Error>> {
        let runtime = runtime()?;
        let short = blind(true).timeout(Duration::from_millis(400));
        let comm = world.comm(&runtime, &short)?;
        let x = runtime.upload(&[1u32; 8])?;
        if world.rank() == 0 {
            let begun = Instant::now();
            comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
            let cause = failure(&comm);
            let took = begun.elapsed();
            assert!(took >= Duration::from_millis(395), "before its limit: {took:?}");
            assert!(took < Duration::from_secs(2), "long after its limit: {took:?}");
            world.barrier("over", Duration::from_secs(30))?;
            return Ok(Some(cause));
        }
        // Its call waits for a value that nobody signals meanwhile.
        let gate = runtime.create_host_timeline()?;
        runtime.stream().set_name("slow");
        runtime.stream().wait(gate.next())?;
        comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
        world.barrier("over", Duration::from_secs(30))?;
        gate.signal(gate.value() + 1)?;
        Ok(None)
    });
    let text = errors[0].as_ref().unwrap().as_ref().unwrap().to_string();
    for words in [
        "tp #0 all_reduce 8 u32 Sum: rank 0 has waited for the other ranks for 400ms",
        "rank 1: tp: 1 calls",
        "slow value",
        "which nobody has submitted or signalled",
    ] {
        assert!(text.contains(words), "{words}: {text}");
    }
}

#[test]
fn a_dead_lock_is_named_over_each_store() {
    const LONG: Duration = Duration::from_secs(60);
    let (folder, server) = (tempfile::tempdir().unwrap(), TcpStore::serve("127.0.0.1:0", None));
    let server = server.unwrap();
    let client = TcpStore::connect(&server.address().to_string(), None, LONG).unwrap();
    let open = |rank| World::with_store(rank, 2, FileStore::open(folder.path())?);
    let rank = |world: World| -> Result<_> {
        let runtime = runtime()?;
        let comm = |name| world.comm(&runtime, &CommConfig::new(name).timeout(LONG));
        let (mut comms, x) = ([comm("a")?, comm("b")?], runtime.upload(&[1u32; 8])?);
        comms.rotate_left(world.rank() as usize);
        comms.iter().try_for_each(|c| c.all_reduce(&runtime.create_stream()?, &x, Reduce::Sum))?;
        let errors = comms.each_ref().map(failure);
        world.barrier("over", LONG).map(|()| (errors, world))
    };
    let over = [World::with_store(0, 2, server), World::with_store(1, 2, client)];
    for worlds in [over, [open(0), open(1)]] {
        // The server goes with its world, which is here until both ranks are over.
        let told = std::thread::scope(|scope| {
            let ranks = worlds.map(|world| scope.spawn(|| rank(world.unwrap())));
            ranks.map(|rank| rank.join().unwrap().unwrap())
        });
        let chain = "rank 0 waits in a #0 all_reduce 8 u32 Sum for rank 1, which waits in b #0";
        let errors = || told.iter().flat_map(|(errors, _)| errors).map(Error::to_string);
        assert!(errors().all(|e| e.contains(chain)), "{:?}", errors().collect::<Vec<_>>());
    }
}

#[test]
fn time_in_which_a_call_waits_for_its_own_rank_is_no_limit() {
    let sound = worlds(2, |world| -> Result<bool> {
        let runtime = runtime()?;
        let short = blind(false).timeout(Duration::from_millis(200));
        let comm = world.comm(&runtime, &short)?;
        let x = runtime.upload(&[1u32; 8])?;
        let gate = runtime.create_host_timeline()?;
        runtime.stream().wait(gate.next())?;
        comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
        std::thread::sleep(Duration::from_millis(700));
        gate.signal(gate.value() + 1)?;
        runtime.stream().synchronize()?;
        world.barrier("over", Duration::from_secs(30))?;
        Ok(comm.failure().is_none())
    });
    sound.into_iter().for_each(|sound| assert!(sound.unwrap()));
}

/// The part of the next test's child: it makes a communicator, and stays.
#[test]
fn child() {
    let world = match World::from_env() {
        Err(Error::NotFound(_)) => return, // nobody's child
        world => world.unwrap(),
    };
    let comm = made(&world).unwrap().1;
    std::thread::sleep(Duration::from_secs(120));
    drop(comm);
}

fn made(world: &World) -> Result<(Runtime, Comm)> {
    let runtime = runtime()?;
    let comm = world.comm(&runtime, &blind(true))?;
    world.barrier("made", Duration::from_secs(60))?;
    Ok((runtime, comm))
}

/// The part of the next test's child: it asks for a communicator that it cannot have, and ends.
#[test]
fn child_without_a_library() {
    let world = match World::from_env() {
        Err(Error::NotFound(_)) => return, // nobody's child
        world => world.unwrap(),
    };
    let error = world.comm(&runtime().unwrap(), &config()).err().unwrap();
    assert!(error.to_string().contains("threads of one process"), "{error}");
}

#[test]
fn a_process_that_cannot_make_its_part_keeps_nobody_waiting() {
    let server = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let store = format!("tcp://{}", server.address());
    let _child = process("watchdog::child_without_a_library", ["1", "2"], &store, None);
    let world = World::with_store(0, 2, server).unwrap();
    let patient = config().timeout(Duration::from_secs(3600));
    let error = world.comm(&runtime().unwrap(), &patient).err().unwrap();
    assert!(matches!(error, Error::PeerLost { rank: 1, .. }), "{error}");
    let text = error.to_string();
    assert!(text.contains("threads of one process") || text.contains("gone"), "{text}");
}

#[test]
#[cfg(target_os = "linux")]
fn a_process_that_is_stopped_does_not_answer_and_one_that_is_killed_is_lost() {
    let server = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let place = format!("tcp://{}", server.address());
    let child = |rank| process("watchdog::child", [rank, "3"], &place, None);
    let mut children = [child("1"), child("2")];
    let world = World::with_store(0, 3, server).unwrap();
    let (runtime, comm) = made(&world).unwrap();
    let signal = |signal: &str, child: &Killed| {
        let id = child.0.id().to_string();
        assert!(Command::new("kill").args([signal, &id]).status().unwrap().success());
    };
    signal("-STOP", &children[1]);
    // The system stops a process a little later than it says.
    let stat = format!("/proc/{}/stat", children[1].0.id());
    while !std::fs::read_to_string(&stat).unwrap().contains(") T ") {
        std::thread::sleep(Duration::from_millis(1));
    }
    let report = world.report(Duration::from_secs(2)).unwrap();
    assert!(report.contains("rank 0: tp: no eager call; nothing is unfinished"), "{report}");
    assert!(report.contains("rank 1: tp: no eager call"), "{report}");
    assert!(report.contains("rank 2: it does not answer"), "{report}");
    signal("-CONT", &children[1]);
    let report = world.report(Duration::from_secs(30)).unwrap();
    assert!(report.contains("rank 2: tp: no eager call"), "nothing is lost: {report}");
    assert!(comm.failure().is_none());

    let x = runtime.upload(&[1u32; 8]).unwrap();
    comm.all_reduce(runtime.stream(), &x, Reduce::Sum).unwrap();
    children[0].0.kill().unwrap();
    let cause = failure(&comm);
    assert!(matches!(cause, Error::PeerLost { rank: 1, .. }), "{cause}");
    let ended = runtime.stream().synchronize_timeout(Duration::from_secs(30));
    assert!(!matches!(ended, Err(Error::Timeout(_))), "the call goes on");
    // The runtime's other streams work on.
    let other = runtime.create_stream().unwrap().runtime();
    assert_eq!(other.to_vec(&other.upload(&[5u32]).unwrap()).unwrap(), [5]);
}
