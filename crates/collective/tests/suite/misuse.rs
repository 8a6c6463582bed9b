//! Wrong use by one rank, which loses nothing.

use crate::common::{config, ranks, runtime, worlds};
use leasehold::{Context, DeviceId, Error, Name, Result};
use leasehold_collective::driver::{Communicator, Host, Place};
use leasehold_collective::{
    Check, CollectiveOps, CommConfig, Presence, Reduce, Store, ThreadStore, World,
};
use std::sync::Arc;
use std::time::Duration;

/// A wait that takes this long is a hang.
const LONG: Duration = Duration::from_secs(60);

#[track_caller]
fn says<T>(result: Result<T>, words: &[&str]) {
    let Err(error) = result else { panic!("no error, but one with {words:?}") };
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{text}, and not {words:?}");
}

#[test]
fn wrong_arguments_are_refused_and_do_not_count() {
    ranks(2, |r| {
        let (comm, stream) = (&r.comm, r.runtime.stream());
        let (x, y) = (r.runtime.upload(&[1u32; 8])?, r.runtime.zeros::<u32>(8)?);
        if r.me() == 0 {
            // Only one rank is wrong, and the other one's calls still belong to its later ones.
            says(comm.all_reduce(stream, &x, Reduce::Average), &["average of u32", "divide"]);
            says(comm.all_reduce_into(stream, &y, x.slice(1..), Reduce::Sum), &["7 elements", "8"]);
            says(comm.all_gather(stream, &y, &x), &["all_gather", "8 elements", "2 ranks"]);
            says(comm.reduce_scatter(stream, &y, &x, Reduce::Sum), &["reduce_scatter"]);
            says(comm.all_to_all(stream, y.slice(..7), x.slice(..7)), &["all_to_all", "not 7"]);
            says(comm.broadcast(stream, &x, 2), &["root is 2", "ranks 0 to 1"]);
            says(comm.reduce(stream, &x, Reduce::Sum, 7), &["root is 7"]);
            says(comm.send(stream, &x, 9), &["other rank is 9"]);
            says(comm.recv(stream, &x, 0), &["this one", "Stream::copy"]);
            says(
                comm.all_reduce_into(stream, x.slice(..4), x.slice(2..6), Reduce::Sum),
                &["0..16", "8..24", "overlap"],
            );
            says(
                comm.group(stream, |g| {
                    g.send(&x, 1)?;
                    g.recv(x.slice(7..), 1)
                }),
                &["send", "overlap"],
            );
            let odd = leasehold::View::part(&x, 1..9)?.values::<u32>()?;
            says(comm.all_reduce(stream, odd, Reduce::Sum), &["byte 1", "aligned to u32"]);
            says(comm.group(stream, |_| Err(Error::other("on purpose"))), &["on purpose"]);
        }
        comm.all_reduce(stream, &x, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&x)?, [2; 8]);
        Ok(())
    });
}

#[test]
fn streams_and_memory_of_another_device_are_refused() {
    ranks(1, |r| {
        let context = Context::new();
        let other = context.runtime(DeviceId::cpu(0))?;
        let (x, own) = (other.upload(&[1u32])?, r.runtime.upload(&[1u32])?);
        says(r.comm.all_reduce(other.stream(), &x, Reduce::Sum), &["not of cpu:0", "tp"]);
        assert!(r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum).is_err());
        r.comm.all_reduce(r.runtime.stream(), &own, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&own)?, [1]);
        Ok(())
    });
}

#[test]
fn an_operand_that_is_dropped_after_the_call_stays_until_it_is_over() {
    ranks(2, |r| {
        let (mut sums, stream) = (Vec::new(), r.runtime.stream());
        let gate = r.runtime.create_host_timeline()?;
        stream.wait(gate.next())?;
        let sum = r.runtime.zeros::<u64>(1024)?;
        for turn in 0..8u64 {
            let x = r.runtime.upload(&[turn; 1024])?;
            r.comm.all_reduce_into(stream, &sum, &x, Reduce::Sum)?;
            drop(x);
            // The memory is for whoever comes next on this stream, after the call.
            sums.push(r.runtime.upload(&[99u64; 1024])?);
        }
        gate.signal(gate.value() + 1)?;
        assert_eq!(r.runtime.to_vec(&sum)?, [14; 1024]);
        Ok(())
    });
}

#[test]
fn a_communicator_cannot_be_made_while_recording_and_needs_a_name() {
    ranks(1, |r| {
        r.runtime.record_graph(|recording| {
            says(r.world.comm(recording, &config()), &["while recording"]);
            recording.stream().host_call("nothing", || Ok(()))
        })?;
        for name in ["", "a/b", "a b", "a#1", &"x".repeat(65)] {
            assert!(r.world.comm(&r.runtime, &CommConfig::new(name)).is_err(), "{name:?}");
        }
        Ok(())
    });
}

#[test]
fn a_rank_that_never_comes_is_named() {
    let errors = worlds(3, |world| {
        if world.rank() == 2 {
            // It is there and does something else.
            world.store().wait(&["done/0", "done/1"], LONG).unwrap();
            return None;
        }
        let short = CommConfig::new("late").timeout(Duration::from_millis(500));
        let error = world.comm(&runtime().unwrap(), &short).err();
        world.store().set(&format!("done/{}", world.rank()), b"").unwrap();
        error
    });
    for error in errors.iter().take(2) {
        let Some(Error::Timeout(text)) = error else { panic!("{error:?}") };
        assert!(text.contains("late") && text.contains("rank"), "{text}");
    }
    assert!(errors[0].as_ref().unwrap().to_string().contains("rank 2"), "{errors:?}");
}

#[test]
fn a_rank_that_does_not_make_a_call_is_named_and_its_own_work_is_not_lost() {
    let short = CommConfig::new("tp").timeout(Duration::from_secs(1));
    let results = crate::common::ranks_with(3, &short, |r| {
        let (x, kept) = (r.runtime.upload(&[1u32; 4])?, r.runtime.upload(&[5u32])?);
        r.runtime.stream().synchronize()?;
        if r.me() == 1 {
            r.world.store().wait(&["done/0", "done/2"], LONG)?;
            assert_eq!(r.runtime.to_vec(&kept)?, [5]);
            return Ok(None);
        }
        r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?;
        let error = r.runtime.stream().synchronize().unwrap_err();
        // Independent work is there on another stream.
        let other = r.runtime.create_stream()?.runtime();
        assert_eq!(other.to_vec(&kept)?, [5]);
        assert!(other.to_vec(&x).is_err());
        r.world.store().set(&format!("done/{}", r.me()), b"")?;
        Ok(Some(error))
    });
    for (rank, result) in results.into_iter().enumerate() {
        if rank != 1 {
            let Ok(Some(Error::Timeout(text))) = result else { panic!("{result:?}") };
            assert!(text.contains("rank 1 has not come") && text.contains("tp #0"), "{text}");
        }
    }
}

#[test]
fn a_rank_that_does_not_stop_its_recording_is_named() {
    let short = CommConfig::new("tp").timeout(Duration::from_secs(1));
    let results = crate::common::ranks_with(2, &short, |r| {
        let x = r.runtime.upload(&[1u32; 4])?;
        if r.me() == 1 {
            r.world.store().wait(&["done"], LONG)?;
            return Ok(String::new());
        }
        let graph = r
            .runtime
            .record_graph(|recording| r.comm.all_reduce(recording.stream(), &x, Reduce::Sum));
        r.world.store().set("done", b"")?;
        Ok(graph.err().unwrap().to_string())
    });
    let text = results[0].as_ref().unwrap();
    let words = ["timeout", "rank 1: it is there", "stopped no recording with calls of tp"];
    assert!(words.iter().all(|word| text.contains(word)), "{text}");
}

#[test]
fn a_communicator_without_connections_for_sends_refuses_them_and_makes_the_other_calls() {
    ranks(2, |r| {
        let comm = r.world.comm(&r.runtime, &r.config("sums").sends(false))?;
        let (x, y) = (r.runtime.upload(&[1u32, 2])?, r.runtime.upload(&[0u32, 0])?);
        let (stream, other) = (r.runtime.stream(), 1 - r.me());
        let words = ["sums", "CommConfig::sends(true)"];
        says(comm.send(stream, &x, other), &words);
        says(comm.recv(stream, &x, other), &words);
        says(comm.all_to_all(stream, &y, &x), &words);
        let group = comm.group(stream, |g| {
            g.all_reduce(&x, Reduce::Sum)?;
            g.send(&y, other)
        });
        says(group, &words);
        says(comm.split(Some(0), 0)?.unwrap().send(stream, &x, other), &words);
        comm.all_reduce(stream, &x, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&x)?, [2, 4], "nothing else was made");
        Ok(())
    });
}

#[test]
fn host_threads_of_another_process_are_refused() {
    let place = Place {
        name: Name::new("tp"),
        rank: 1,
        size: 2,
        id: [0xffu8; 12].as_slice().into(),
        runtime: runtime().unwrap(),
        limit: Duration::from_secs(60),
        sends: true,
    };
    let words = ["rank 1", "threads of one process", "World::threads"];
    says(Host.init(&place), &words);
}

#[test]
fn ranks_with_other_libraries_are_told() {
    struct Other;
    impl CollectiveOps for Other {
        fn name(&self) -> &str {
            "another 1.2"
        }
        fn unique_id(&self) -> Result<Vec<u8>> {
            Err(Error::Unavailable("the library is not there".into()))
        }
        fn init(&self, _place: &Place) -> Result<Arc<dyn Communicator>> {
            Err(Error::other("not reached"))
        }
    }
    let make = |world: &World, other: bool| {
        let ops = CommConfig::new("mixed").timeout(Duration::from_millis(300));
        let config = if other { ops.ops(Arc::new(Other)) } else { ops };
        world.comm(&runtime().unwrap(), &config).err().unwrap().to_string()
    };
    let errors = worlds(2, |world| make(&world, world.rank() == 1));
    // Told, not waited for.
    assert!(
        errors[0].contains("rank 1 is lost: it could not make its part of mixed"),
        "{errors:?}"
    );
    assert!(errors[0].contains("rank 1 has another 1.2"), "{errors:?}");
    assert!(
        errors[1].contains("rank 0 has host threads, and rank 1 has another 1.2"),
        "{errors:?}"
    );
    // The rank that has no library tells the others.
    let errors = worlds(2, |world| make(&world, world.rank() == 0));
    assert!(errors[0].contains("library is not there"), "{errors:?}");
    assert!(errors[1].contains("rank 0 is lost") && errors[1].contains("library is not there"));
}

/// A store that gives each part of a communicator the whole's id, and whose events take time.
#[derive(Debug)]
struct Odd(ThreadStore);

impl Store for Odd {
    fn place(&self) -> String {
        self.0.place()
    }
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.0.set(key, value)?;
        if key.starts_with("event/") {
            std::thread::sleep(Duration::from_millis(100));
        }
        Ok(())
    }
    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.0.get(if key.ends_with("/s0c0/id/0") { "comm/one/1/id/0" } else { key }, limit)
    }
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.0.add(key, by)
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.0.remove(key)
    }
    fn enter(&self, rank: u32) -> Result<()> {
        self.0.enter(rank)
    }
    fn presence(&self, rank: u32) -> Result<Presence> {
        self.0.presence(rank)
    }
}

#[test]
fn a_wrong_id_leads_to_no_communicator_of_another_size() {
    let short = CommConfig::new("one").timeout(Duration::from_millis(500));
    let store = ThreadStore::new();
    let part = |rank: u32| -> Result<String> {
        let world = World::with_store(rank, 3, Odd(store.share()))?;
        let runtime = runtime()?;
        let whole = world.comm(&runtime, &short)?;
        let part = whole.split((rank != 2).then_some(0), 0);
        world.barrier("end", Duration::from_secs(60))?;
        Ok(part.map_or_else(|e| e.to_string(), |part| format!("{}", part.is_some())))
    };
    let said: Vec<String> = std::thread::scope(|scope| {
        let part = &part;
        let threads: Vec<_> = (0..3).map(|rank| scope.spawn(move || part(rank))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert!(said[0].contains("rank 1 is lost: it could not make its part"), "{said:?}");
    assert!(said[1].contains("rank 1 of 2 has the id of a communicator of 3"), "{said:?}");
    assert_eq!(said[2], "false");
}

#[test]
fn a_dead_lock_ends_its_communicators_at_once() {
    let store = ThreadStore::new();
    let rank = |rank: u32| -> Result<Vec<String>> {
        let world = World::with_store(rank, 2, Odd(store.share()))?;
        let runtime = runtime()?;
        let config = |name| CommConfig::new(name).check(Check::Each);
        let [a, b] = [world.comm(&runtime, &config("a"))?, world.comm(&runtime, &config("b"))?];
        let x = [runtime.upload(&[1u32; 8])?, runtime.upload(&[2u32; 8])?];
        // The call that comes second goes on where the first one alone has ended.
        let order = if rank == 0 { [(&a, &x[0]), (&b, &x[1])] } else { [(&b, &x[1]), (&a, &x[0])] };
        let said = order.map(|(comm, x)| {
            let called = comm.all_reduce(runtime.stream(), x, Reduce::Sum);
            called.map_or_else(|e| e.to_string(), |()| "a sum".to_owned())
        });
        world.barrier("end", Duration::from_secs(60))?;
        Ok(said.to_vec())
    };
    let said: Vec<String> = std::thread::scope(|scope| {
        let rank = &rank;
        let threads: Vec<_> = (0..2).map(|me| scope.spawn(move || rank(me))).collect();
        threads.into_iter().flat_map(|thread| thread.join().unwrap().unwrap()).collect()
    });
    assert!(said.iter().all(|said| said.contains("dead-lock")), "{said:?}");
}

#[test]
fn calls_of_a_device_are_made_one_at_a_time_if_the_library_asks_for_it() {
    use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, Ordering};
    use leasehold_collective::driver::Call;

    /// A library that notices two threads in it.
    #[derive(Default)]
    struct Narrow {
        inside: AtomicBool,
        calls: AtomicU32,
    }
    struct Part(Arc<Narrow>);

    impl Communicator for Part {
        unsafe fn enqueue(&self, _stream: u64, calls: &[Call<'_>]) -> Result<()> {
            if self.0.inside.swap(true, Ordering::AcqRel) {
                return Err(Error::other("two threads at a time"));
            }
            std::thread::sleep(Duration::from_millis(2));
            self.0.calls.fetch_add(calls.len() as u32, Ordering::Relaxed);
            self.0.inside.store(false, Ordering::Release);
            Ok(())
        }
        fn abort(&self, _cause: Error) {}
    }

    struct Ops(Arc<Narrow>);
    impl CollectiveOps for Ops {
        fn name(&self) -> &str {
            "narrow"
        }
        fn unique_id(&self) -> Result<Vec<u8>> {
            Ok(vec![1])
        }
        fn init(&self, _place: &Place) -> Result<Arc<dyn Communicator>> {
            Ok(Arc::new(Part(self.0.clone())))
        }
    }

    let library = Arc::new(Narrow::default());
    let config = CommConfig::new("narrow").ops(Arc::new(Ops(library.clone()))).concurrent(true);
    let world = World::threads(1).unwrap().remove(0);
    let runtime = runtime().unwrap();
    let streams: Vec<_> = (0..4).map(|_| runtime.create_stream().unwrap()).collect();
    let comms: Vec<_> = streams.iter().map(|_| world.comm(&runtime, &config).unwrap()).collect();
    for _ in 0..5 {
        for (stream, comm) in std::iter::zip(&streams, &comms) {
            comm.barrier(stream).unwrap();
        }
    }
    streams.iter().for_each(|stream| stream.synchronize().unwrap());
    assert_eq!(library.calls.load(Ordering::Relaxed), 20);
}
