//! Collectives beside other work: on streams, in graphs, and over several communicators.

use crate::case::{Case, Need, Outcome, check, check_eq};
use crate::cases::kernels::launch;
use crate::env::Env;
use crate::factory::TestKernel;
use crate::model::{own, reduced};
use crate::ranks::{Rank, ranks, together};
use leasehold::{GraphUpdate, View};
use leasehold_collective::{Comm, Reduce};

const CALLS: &[Need] = &[Need::ForeignCalls];
const GATED: &[Need] = &[Need::ForeignCalls, Need::HostTimelines];
const GRAPHS: &[Need] = &[Need::ForeignCalls, Need::Graphs];
const KERNELS: &[Need] = &[Need::ForeignCalls, Need::Kernel(TestKernel::Fill)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(180, "collective barrier holds all streams until all have come", GATED, barrier)
        .replayed(),
    Case::runtime(
        181,
        "collective calls run between the kernels of their stream",
        KERNELS,
        kernels,
    )
    .replayed(),
    Case::runtime(182, "collective calls wait for other streams' work", GATED, before),
    Case::runtime(183, "work on other streams waits for collective calls", GATED, after),
    Case::runtime(184, "collective calls run in the order of their submission", CALLS, chain)
        .replayed(),
    Case::runtime(185, "collective calls of two streams have one order", CALLS, two_streams),
    Case::runtime(186, "collective calls of two communicators do not mix", CALLS, two_comms)
        .replayed(),
    Case::runtime(187, "a collective communicator splits by colour and key", CALLS, split)
        .replayed(),
    Case::runtime(188, "a collective communicator shrinks by a rank", CALLS, shrink).replayed(),
    Case::runtime(189, "collective replays equal eager calls to the bit", GRAPHS, replays),
    Case::runtime(190, "an update of a graph reaches its collective calls", GRAPHS, update),
    Case::runtime(191, "collective calls take a graph's temporaries", GRAPHS, temporaries),
    Case::runtime(192, "a freed operand stays until its collective call is over", GATED, freed),
    Case::runtime(193, "a collective communicator is dropped while it is used", GATED, dropped)
        .replayed(),
];

/// Elements of the cases' memory.
const N: usize = 64;

fn barrier(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        // The last rank's stream comes late.
        let gate = if r.me() == r.size() - 1 { Some(r.gate(r.stream())?) } else { None };
        r.make(|stream| comm.barrier(stream))?;
        let passed = r.stream().now();
        r.meet("called")?;
        let early = r.stays_open(passed, "a barrier");
        r.meet("looked")?;
        drop(gate);
        r.drain(r.stream())?;
        early
    })
}

fn kernels(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let kernel = TestKernel::base(env.desc(TestKernel::Fill)?)?;
        let (x, y) = (r.runtime.zeros::<u32>(N)?, r.runtime.zeros::<u32>(N)?);
        r.make(|stream| {
            launch(&stream.runtime(), &kernel, &x, r.me() + 1)?;
            comm.all_reduce(stream, &x, Reduce::Sum)?;
            stream.copy(y.view(), x.view())?;
            launch(&stream.runtime(), &kernel, &x, 9)?;
            Ok(())
        })?;
        r.holds("a sum of what kernels wrote", &y, &[r.size() * (r.size() + 1) / 2; N])?;
        r.holds("what a kernel wrote after a sum", &x, &[9; N])
    })
}

fn before(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (x, other) = (r.runtime.zeros::<u32>(N)?, r.runtime.create_stream()?);
        let gate = r.gate(&other)?;
        other.fill(x.view(), r.me() + 1)?;
        comm.all_reduce(r.stream(), &x, Reduce::Sum)?;
        let early = r.stays_open(r.stream().now(), "a call before the fill of its memory");
        gate.open();
        r.holds("a sum of another stream's fill", &x, &[r.size() * (r.size() + 1) / 2; N])?;
        early
    })
}

fn after(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (x, y) = (r.runtime.upload(&own::<u32>(r.me(), 0, N))?, r.runtime.zeros::<u32>(N)?);
        let other = r.runtime.create_stream()?;
        let gate = r.gate(r.stream())?;
        comm.all_reduce(r.stream(), &x, Reduce::Sum)?;
        other.copy(y.view(), x.view())?;
        let early = r.stays_open(other.now(), "a copy of what a call has not written");
        gate.open();
        r.drain(&other)?;
        r.holds("another stream's copy of a sum", &y, &reduced(r.size(), Reduce::Sum, 0, N))?;
        early
    })
}

fn chain(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let whole = N * r.size() as usize;
        let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
        let (y, z) = (r.runtime.zeros::<u32>(whole)?, r.runtime.zeros::<u32>(N)?);
        r.make(|stream| {
            comm.all_reduce(stream, &x, Reduce::Sum)?;
            comm.all_gather(stream, &y, &x)?;
            comm.reduce_scatter(stream, &z, &y, Reduce::Largest)?;
            comm.all_reduce(stream, &z, Reduce::Sum)
        })?;
        let sum: Vec<u32> = reduced(r.size(), Reduce::Sum, 0, N);
        r.holds("the first of a chain", &x, &sum)?;
        let scaled: Vec<u32> = sum.iter().map(|x| x * r.size()).collect();
        r.holds("the last of a chain", &z, &scaled)
    })
}

fn two_streams(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (one, two) = (r.runtime.create_stream()?, r.runtime.create_stream()?);
        let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
        let y = r.runtime.upload(&own::<u32>(r.me(), N, N))?;
        for _ in 0..env.rounds(50) {
            comm.all_reduce(&one, &x, Reduce::Largest)?;
            comm.broadcast(&two, &y, 0)?;
            comm.barrier(&one)?;
        }
        r.drain(&one)?;
        r.drain(&two)?;
        r.holds("the first stream's reductions", &x, &reduced(r.size(), Reduce::Largest, 0, N))?;
        r.holds("the second stream's broadcasts", &y, &own(0, N, N))
    })
}

fn two_comms(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (one, two) = (comm, r.world.comm(&r.runtime, &r.config("pp"))?);
        let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
        let y = r.runtime.upload(&own::<u32>(r.me(), N, N))?;
        r.make(|stream| {
            for _ in 0..3 {
                one.all_reduce(stream, &x, Reduce::Largest)?;
                two.all_reduce(stream, &y, Reduce::Least)?;
            }
            Ok(())
        })?;
        r.holds("one communicator's reductions", &x, &reduced(r.size(), Reduce::Largest, 0, N))?;
        r.holds("another one's reductions", &y, &reduced(r.size(), Reduce::Least, N, N))
    })
}

/// Checks that a communicator has these ranks of the case, in this order.
fn consists_of(r: &Rank<'_>, comm: &Comm, members: &[u32]) -> Outcome {
    check_eq!(comm.size() as usize, members.len(), "the number of ranks");
    check_eq!(members[comm.rank() as usize], r.me(), "the place of this rank");
    let runtime = r.runtime.create_stream()?.runtime();
    let (x, y) = (runtime.upload(&[r.me()])?, r.runtime.zeros::<u32>(members.len())?);
    r.make(|stream| comm.all_gather(stream, &y, &x))?;
    r.holds("the ranks of the communicator", &y, members)
}

fn split(env: &Env) -> Outcome {
    together(env, 4, |r, comm| {
        // Even and odd ranks, the last one first.
        let color = r.me() % 2;
        let members: Vec<u32> = (0..r.size()).filter(|rank| rank % 2 == color).rev().collect();
        let part = comm.split(Some(color), -(r.me() as i32))?;
        check!(part.is_some(), "a rank with a colour has no part");
        part.map_or(Ok(()), |part| consists_of(r, &part, &members))?;
        // Without the first rank.
        let rest: Vec<u32> = (1..r.size()).collect();
        let part = comm.split((r.me() > 0).then_some(0), 0)?;
        check_eq!(part.is_some(), r.me() > 0, "a part of a rank without a colour");
        part.map_or(Ok(()), |part| consists_of(r, &part, &rest))
    })
}

fn shrink(env: &Env) -> Outcome {
    together(env, 4, |r, comm| {
        let lost = r.size() - 2;
        if r.me() == lost {
            check!(comm.shrink(&[lost]).is_err(), "a rank that goes has shrunk");
            return r.meet("shrunk");
        }
        let stay: Vec<u32> = (0..r.size()).filter(|&rank| rank != lost).collect();
        consists_of(r, &comm.shrink(&[lost])?, &stay)?;
        r.meet("shrunk")
    })
}

/// Numbers whose sums depend on their order and their rounding.
fn uneven(rank: u32) -> Vec<f64> {
    (0..N as u32).map(|i| 1.0 / f64::from(7 * rank + 3 * i + 1)).collect()
}

fn replays(env: &Env) -> Outcome {
    let sums = ranks(env, 3, |r| {
        let comm = r.comm()?;
        let (x, y) = (r.runtime.upload(&uneven(r.me()))?, r.runtime.upload(&uneven(r.me()))?);
        let graph = r
            .runtime
            .record_graph(|recording| comm.all_reduce(recording.stream(), &x, Reduce::Sum))?;
        for _ in 0..100 {
            let _ = graph.launch_on(r.stream())?;
        }
        for _ in 0..100 {
            comm.all_reduce(r.stream(), &y, Reduce::Sum)?;
        }
        let eager = r.read(&y)?;
        r.holds("100 replays", &x, &eager)?;
        Ok(eager)
    })?;
    check!(sums.iter().all(|sum| *sum == sums[0]), "the ranks have other sums: {sums:?}");
    let grown = sums[0][0] > 1e9;
    check!(grown, "100 sums of two ranks and more gave {}", sums[0][0]);
    Ok(())
}

fn update(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
        let (other, y) = (r.runtime.upload(&own::<u32>(r.me(), N, N))?, r.runtime.zeros::<u32>(N)?);
        let graph = r.runtime.record_graph(|recording| {
            comm.all_reduce_into(recording.stream(), &y, &x, Reduce::Sum)
        })?;
        let _ = graph.launch_on(r.stream())?;
        r.holds("a graph before its update", &y, &reduced(r.size(), Reduce::Sum, 0, N))?;
        let _ = graph.update(&GraphUpdate::new().buffer(&x, &other))?;
        let _ = graph.launch_on(r.stream())?;
        r.holds("a graph after its update", &y, &reduced(r.size(), Reduce::Sum, N, N))
    })
}

fn temporaries(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (x, y) = (r.runtime.zeros::<u32>(N)?, r.runtime.zeros::<u32>(N)?);
        let graph = r.runtime.record_graph(|recording| {
            let scratch = recording.alloc_array::<u32>(N)?;
            recording.stream().copy(scratch.view(), x.view())?;
            comm.all_reduce(recording.stream(), &scratch, Reduce::Sum)?;
            recording.stream().copy(y.view(), scratch.view())
        })?;
        for round in 1..4 {
            r.stream().fill(x.view(), round)?;
            let _ = graph.launch_on(r.stream())?;
            r.holds("a sum in a temporary", &y, &[round * r.size(); N])?;
        }
        Ok(())
    })
}

fn freed(env: &Env) -> Outcome {
    together(env, 3, |r, comm| {
        let (x, y) = (r.runtime.upload(&own::<u32>(r.me(), 0, N))?, r.runtime.zeros::<u32>(N)?);
        r.drain(r.stream())?;
        let gate = r.gate(r.stream())?;
        comm.all_reduce_into(r.stream(), &y, &x, Reduce::Sum)?;
        drop(x);
        // Memory of the same size, on another stream that waits for nothing.
        let other = r.runtime.create_stream()?.runtime();
        let noise: Vec<_> =
            (0..4).map(|_| other.upload(&[99u32; N])).collect::<leasehold::Result<_>>()?;
        r.drain(other.stream())?;
        gate.open();
        r.holds("a sum of freed memory", &y, &reduced(r.size(), Reduce::Sum, 0, N))?;
        noise.iter().try_for_each(|memory| r.holds("other memory", memory, &[99; N]))
    })
}

fn dropped(env: &Env) -> Outcome {
    ranks(env, 3, |r| {
        let comm = r.comm()?;
        let x = r.runtime.upload(&own::<u32>(r.me(), 0, N))?;
        let gate = r.gate(r.stream())?;
        r.make(|stream| comm.all_reduce(stream, &x, Reduce::Sum))?;
        drop(comm);
        let early = r.stays_open(r.stream().now(), "a call of a dropped communicator");
        gate.open();
        r.holds("a sum of a dropped communicator", &x, &reduced(r.size(), Reduce::Sum, 0, N))?;
        early
    })
    .map(drop)
}
