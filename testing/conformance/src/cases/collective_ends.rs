//! Collectives that go wrong: ranks that differ, that do not come, and communicators that end.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, failed};
use crate::env::Env;
use crate::model::{own, reduced};
use crate::ranks::{Rank, ranks, together};
use half::bf16;
use leasehold::{Array, Error, Name, Result, Stream, View};
use leasehold_collective::{Check, Comm, Reduce};
use std::time::{Duration, Instant};

const CALLS: &[Need] = &[Need::ForeignCalls];
const GRAPHS: &[Need] = &[Need::ForeignCalls, Need::Graphs];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(194, "collective recordings of other counts are named", GRAPHS, counts),
    Case::runtime(195, "collective recordings of other types are named", GRAPHS, types),
    Case::runtime(196, "collective recordings of other reductions are named", GRAPHS, reductions),
    Case::runtime(197, "collective recordings of other roots are named", GRAPHS, roots),
    Case::runtime(198, "collective recordings in another order are named", GRAPHS, order),
    Case::runtime(199, "collective recordings of other calls are named", GRAPHS, calls),
    Case::runtime(200, "collective recordings with swapped buffers pass", GRAPHS, swapped),
    Case::runtime(201, "a collective send of another count is named", GRAPHS, sends),
    Case::runtime(202, "a collective call that one rank records is named", GRAPHS, one_rank),
    Case::runtime(203, "collective eager calls are compared on demand", CALLS, each),
    Case::runtime(204, "a rank that makes no collective communicator is named", CALLS, never_joins),
    Case::runtime(205, "a rank that stops no collective recording is named", GRAPHS, never_stops),
    Case::runtime(206, "a collective abort ends its calls and nothing else", CALLS, abort),
    Case::runtime(207, "a collective abort fails what depends on its calls", CALLS, dependents),
    Case::runtime(208, "a collective communicator shrinks after an abort", CALLS, after_abort),
    Case::runtime(209, "a graph with calls of a collective that ended is refused", GRAPHS, graphs),
];

/// Elements of the cases' memory.
const N: usize = 64;
/// The limit for a rank that does not come.
const SHORT: Duration = Duration::from_millis(200);

/// Memory of a rank of a wrong program, of ones.
struct Memory {
    x: Array<f32>,
    y: Array<f32>,
    half: Array<bf16>,
    gathered: Array<f32>,
}

impl Memory {
    fn new(r: &Rank<'_>) -> Result<Self> {
        Ok(Self {
            x: r.runtime.upload(&[1.0; N])?,
            y: r.runtime.upload(&[1.0; N])?,
            half: r.runtime.upload(&[bf16::ONE; N])?,
            gathered: r.runtime.zeros(2 * N)?,
        })
    }
}

/// The calls of a rank of a program.
type Program = fn(&Comm, &Stream, &Memory) -> Result<()>;

fn sum(comm: &Comm, stream: &Stream, m: &Memory) -> Result<()> {
    comm.all_reduce(stream, &m.x, Reduce::Sum)
}

fn gather(comm: &Comm, stream: &Stream, m: &Memory) -> Result<()> {
    comm.all_gather(stream, &m.gathered, &m.y)
}

/// Fails the case unless the error names both ranks' calls.
fn named(error: &Error, calls: [&str; 2]) -> Outcome {
    let text = error.to_string();
    check!(matches!(error, Error::Mismatch(_)), "{} is no mismatch: {text}", error.kind());
    for (rank, call) in calls.into_iter().enumerate() {
        check!(text.contains(&format!("rank {rank} {call}")), "{call} of rank {rank}: {text}");
    }
    check!(text.contains("tp"), "the communicator: {text}");
    Ok(())
}

/// Checks that a recording whose ranks call this is refused as it stops, by name.
fn differ(env: &Env, programs: [Program; 2], calls: [&str; 2]) -> Outcome {
    together(env, 2, |r, comm| {
        let m = Memory::new(r)?;
        let stopped = r.runtime.record_graph(|recording| {
            comm.barrier(recording.stream())?; // alike
            let _scope = Name::new(["left", "right"][r.me() as usize]).scope();
            programs[r.me() as usize](comm, recording.stream(), &m)
        });
        match stopped {
            Err(error) => named(&error, calls)?,
            Ok(_) => return failed("recordings that differ passed"),
        }
        r.holds("memory of calls that were not launched", &m.x, &[1.0; N])?;
        // Eager calls go on.
        sum(comm, r.stream(), &m)?;
        r.holds("a sum after the recording", &m.x, &[2.0; N])
    })
}

fn counts(env: &Env) -> Outcome {
    let half: Program = |comm, stream, m| comm.all_reduce(stream, m.x.slice(..N / 2), Reduce::Sum);
    differ(env, [half, sum], ["all_reduce 32 f32 Sum (left)", "all_reduce 64 f32 Sum (right)"])
}

fn types(env: &Env) -> Outcome {
    let short: Program = |comm, stream, m| comm.all_reduce(stream, &m.half, Reduce::Sum);
    differ(env, [short, sum], ["all_reduce 64 bf16 Sum (left)", "all_reduce 64 f32 Sum (right)"])
}

fn reductions(env: &Env) -> Outcome {
    let most: Program = |comm, stream, m| comm.all_reduce(stream, &m.x, Reduce::Largest);
    differ(env, [most, sum], ["all_reduce 64 f32 Largest (left)", "all_reduce 64 f32 Sum (right)"])
}

fn roots(env: &Env) -> Outcome {
    let own: Program = |comm, stream, m| comm.broadcast(stream, &m.x, comm.rank());
    differ(env, [own, own], ["broadcast 64 f32 root 0 (left)", "broadcast 64 f32 root 1 (right)"])
}

fn order(env: &Env) -> Outcome {
    let one: Program = |comm, stream, m| {
        gather(comm, stream, m)?;
        sum(comm, stream, m)
    };
    let other: Program = |comm, stream, m| {
        sum(comm, stream, m)?;
        gather(comm, stream, m)
    };
    differ(env, [one, other], ["all_gather 64 f32 (left)", "all_reduce 64 f32 Sum (right)"])
}

fn calls(env: &Env) -> Outcome {
    let first: Program = |comm, stream, m| comm.broadcast(stream, &m.x, 0);
    differ(env, [first, sum], ["broadcast 64 f32 root 0 (left)", "all_reduce 64 f32 Sum (right)"])
}

fn sends(env: &Env) -> Outcome {
    let send: Program = |comm, stream, m| comm.send(stream, &m.y, 1);
    let recv: Program = |comm, stream, m| comm.recv(stream, m.y.slice(1..), 0);
    differ(env, [send, recv], ["send 64 f32 to 1 (left)", "recv 63 f32 from 0 (right)"])
}

fn one_rank(env: &Env) -> Outcome {
    let none: Program = |_, _, _| Ok(());
    differ(env, [none, sum], ["has no such call any more", "all_reduce 64 f32 Sum (right)"])
}

fn swapped(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        let m = Memory::new(r)?;
        let (first, second) = if r.me() == 0 { (&m.x, &m.y) } else { (&m.y, &m.x) };
        let graph = r.runtime.record_graph(|recording| {
            comm.all_reduce(recording.stream(), first, Reduce::Sum)?;
            comm.all_reduce(recording.stream(), second, Reduce::Sum)
        })?;
        let _ = graph.launch_on(r.stream())?;
        r.holds("one of two buffers", &m.x, &[2.0; N])?;
        r.holds("the other one", &m.y, &[2.0; N])
    })
}

fn each(env: &Env) -> Outcome {
    ranks(env, 2, |r| {
        let comm = r.world.comm(&r.runtime, &r.config("tp").check(Check::Each))?;
        let m = Memory::new(r)?;
        sum(&comm, r.stream(), &m)?;
        let wrong = match r.me() {
            0 => comm.all_reduce(r.stream(), m.y.slice(1..), Reduce::Sum),
            _ => comm.all_reduce(r.stream(), &m.y, Reduce::Sum),
        };
        match wrong {
            Err(error) => named(&error, ["all_reduce 63 f32 Sum", "all_reduce 64 f32 Sum"])?,
            Ok(()) => return failed("calls that differ passed"),
        }
        r.holds("the call before", &m.x, &[2.0; N])?;
        r.holds("memory of a call that was not submitted", &m.y, &[1.0; N])
    })
    .map(drop)
}

/// Fails the case unless the error is a timeout that names a rank, and came in time.
fn late(result: Result<()>, rank: u32, begun: Instant) -> Outcome {
    let error = expect_error(result, "Timeout", "a wait for a rank that does not come")?;
    let text = error.to_string();
    let names = [format!("rank {rank}"), format!("ranks {rank}")];
    check!(names.iter().any(|name| text.contains(name)), "rank {rank} is not in: {text}");
    check!(begun.elapsed() > SHORT / 2, "the limit was {SHORT:?}, not {:?}", begun.elapsed());
    Ok(())
}

fn never_joins(env: &Env) -> Outcome {
    ranks(env, 3, |r| {
        let last = r.size() - 1;
        let begun = Instant::now();
        if r.me() != last {
            let config = r.config("tp").timeout(SHORT);
            let joined = r.world.comm(&r.runtime, &config);
            // Another rank may have been later than the last one.
            late(joined.map(drop), last, begun)?;
        }
        r.meet("late")
    })
    .map(drop)
}

fn never_stops(env: &Env) -> Outcome {
    ranks(env, 3, |r| {
        let comm = r.world.comm(&r.runtime, &r.config("tp").timeout(SHORT))?;
        let (m, last) = (Memory::new(r)?, r.size() - 1);
        r.meet("made")?;
        if r.me() != last {
            let begun = Instant::now();
            let stopped = r.runtime.record_graph(|recording| sum(&comm, recording.stream(), &m));
            late(stopped.map(drop), last, begun)?;
            r.holds("memory of a recording that failed", &m.x, &[1.0; N])?;
        }
        r.meet("late")
    })
    .map(drop)
}

/// A communicator whose calls wait longer than the case waits.
fn patient(r: &Rank<'_>) -> Outcome<Comm> {
    Ok(r.world.comm(&r.runtime, &r.config("tp").timeout(r.env.timeout() * 4))?)
}

fn abort(env: &Env) -> Outcome {
    ranks(env, 2, |r| {
        let comm = patient(r)?;
        let m = Memory::new(r)?;
        let other = r.runtime.create_stream()?.runtime();
        r.drain(r.stream())?;
        r.meet("made")?;
        if r.me() == 0 {
            sum(&comm, r.stream(), &m)?;
            r.stays_open(r.stream().now(), "a call that the other rank has not made")?;
            let free = other.upload(&own::<u32>(3, 0, N))?;
            comm.abort(Error::other("on purpose"))?;
            comm.abort(Error::other("too late"))?;
            for _ in 0..2 {
                let e = expect_error(sum(&comm, other.stream(), &m), "Other", "a call afterwards")?;
                check_eq!(e.to_string(), "on purpose", "the first cause");
            }
            check!(comm.failure().is_some(), "a communicator that was aborted has no failure");
            // The memory of the call is the library's affair, but its stream goes on or fails.
            let ended = r.stream().synchronize_timeout(env.timeout());
            check!(!matches!(ended, Err(Error::Timeout(_))), "the call goes on: {ended:?}");
            r.drain(other.stream())?;
            check_eq!(other.to_vec(&free)?, own::<u32>(3, 0, N), "independent work");
        }
        r.meet("aborted")?;
        r.holds("memory that no call was about", &m.y, &[1.0; N]).or_else(|stop| match r.me() {
            // The stream of the call may have failed.
            0 => Ok(()),
            _ => Err(stop),
        })
    })
    .map(drop)
}

fn dependents(env: &Env) -> Outcome {
    ranks(env, 2, |r| {
        let comm = patient(r)?;
        let m = Memory::new(r)?;
        let [other, third, free] = [(); 3].map(|()| r.runtime.create_stream());
        let (other, third, free) = (other?, third?, free?);
        r.drain(r.stream())?;
        r.meet("made")?;
        if r.me() == 0 {
            sum(&comm, r.stream(), &m)?;
            other.copy(m.y.view(), m.x.view())?;
            third.copy(m.gathered.slice(..N).view(), m.y.view())?;
            r.stays_open(third.now(), "a copy of a copy of what a call has not written")?;
            let apart = free.runtime().upload(&own::<u32>(3, 0, N))?;
            comm.abort(Error::other("on purpose"))?;
            check_eq!(free.runtime().to_vec(&apart)?, own::<u32>(3, 0, N), "independent work");
            for (what, stream) in [
                ("the call's stream", r.stream()),
                ("the copy's stream", &other),
                ("the second copy's stream", &third),
            ] {
                match stream.synchronize_timeout(env.timeout()) {
                    Err(e) if e.to_string().contains("on purpose") => {}
                    ended => return failed(format!("{what} ended with {ended:?}")),
                }
            }
        }
        r.meet("aborted")?;
        if r.me() == 1 {
            // The rank has heard of it: its own call would complete with anything otherwise.
            let called = sum(&comm, r.stream(), &m);
            match called.and_then(|()| r.stream().synchronize_timeout(env.timeout())) {
                Err(Error::PeerLost { rank: 0, .. }) => {}
                ended => return failed(format!("the other rank's call ended with {ended:?}")),
            }
        }
        r.meet("over")
    })
    .map(drop)
}

fn graphs(env: &Env) -> Outcome {
    together(env, 2, |r, comm| {
        let (m, other) = (Memory::new(r)?, r.world.comm(&r.runtime, &r.config("other"))?);
        let graph = r.runtime.record_graph(|recording| {
            sum(comm, recording.stream(), &m)?;
            other.barrier(recording.stream())
        })?;
        let _ = graph.launch_on(r.stream())?;
        r.holds("a sum of a graph", &m.x, &[2.0; N])?;
        r.meet("launched")?;
        other.abort(Error::other("on purpose"))?;
        let refused = expect_error(graph.launch_on(r.stream()), "Other", "a launch afterwards");
        // The other rank may have been first.
        refused.map(drop).or_else(|stop| match other.failure() {
            Some(Error::PeerLost { .. }) => Ok(()),
            _ => Err(stop),
        })?;
        check_eq!(graph.launches(), 1, "launches of the graph");
        r.holds("memory of a graph that was not launched", &m.x, &[2.0; N])?;
        // The communicator that has not ended goes on.
        sum(comm, r.stream(), &m)?;
        r.holds("a sum of the other communicator", &m.x, &[4.0; N])
    })
}

fn after_abort(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let last = r.size() - 1;
        comm.abort(Error::other("on purpose"))?;
        r.meet("aborted")?;
        check!(comm.failure().is_some(), "a communicator that was aborted has no failure");
        if r.me() != last {
            let rest = comm.shrink(&[last])?;
            check_eq!((rest.rank(), rest.size()), (r.me(), last), "the place in what is left");
            let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
            rest.all_reduce(r.stream(), &x, Reduce::Sum)?;
            r.holds("a sum without the last rank", &x, &reduced(last, Reduce::Sum, 0, N))?;
        }
        r.meet("over")
    })
}
