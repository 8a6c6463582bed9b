//! Random programs of all ranks, beside a sequential model.
//!
//! All ranks play the same steps: calls on any of their streams, eager or recorded, between work of
//! their own on the same memory. The runtime derives every order from the accesses.
//!
//! The tests of `leasehold-sim` have this module too, with ranks on simulated devices.

use crate::common::{Rank, ranks_with};
use leasehold::{Array, Result, Runtime, Stream, View};
use leasehold_collective::{CommConfig, Reduce};
use std::time::Duration;

const ARRAYS: usize = 4;
const STREAMS: usize = 3;
/// Elements of each rank's part of an array.
const PART: usize = 5;

struct Random(u64);

impl Random {
    fn below(&mut self, n: usize) -> usize {
        self.0 =
            self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) as usize % n
    }
}

#[derive(Debug, Clone, Copy)]
enum What {
    /// A rank's own work: fills with a number that differs by rank, or copies.
    Fill(usize, u32),
    Copy(usize, usize),
    AllReduce(usize, Reduce),
    AllReduceInto(usize, usize, Reduce),
    /// Of the own part of one array, into another one.
    AllGather(usize, usize),
    /// Into the own part.
    ReduceScatter(usize, usize, Reduce),
    Broadcast(usize, u32),
    Reduce(usize, Reduce, u32),
    AllToAll(usize, usize),
    /// To the next rank, from the one before.
    Shift(usize, usize),
    Barrier,
}

/// A step: on one of the streams, by one of two communicators.
#[derive(Debug, Clone, Copy)]
struct Step {
    what: What,
    stream: usize,
    second: bool,
}

fn step(random: &mut Random, size: u32) -> Step {
    let a = random.below(ARRAYS);
    let b = (a + 1 + random.below(ARRAYS - 1)) % ARRAYS;
    let root = random.below(size as usize) as u32;
    let how = [Reduce::Sum, Reduce::Product, Reduce::Least, Reduce::Largest][random.below(4)];
    let what = match random.below(11) {
        0 => What::Fill(a, random.below(100) as u32),
        1 => What::Copy(a, b),
        2 => What::AllReduce(a, how),
        3 => What::AllReduceInto(a, b, how),
        4 => What::AllGather(a, b),
        5 => What::ReduceScatter(a, b, how),
        6 => What::Broadcast(a, root),
        7 => What::Reduce(a, how, root),
        8 => What::AllToAll(a, b),
        9 if size > 1 => What::Shift(a, b),
        _ => What::Barrier,
    };
    Step { what, stream: random.below(STREAMS), second: random.below(2) == 1 }
}

/// The effect of a step on all ranks' arrays.
fn model(what: What, arrays: &mut [Vec<Vec<u32>>]) {
    let size = arrays.len();
    let join = |how, x: u32, y: u32| match how {
        Reduce::Sum => x.wrapping_add(y),
        Reduce::Product => x.wrapping_mul(y),
        Reduce::Least => x.min(y),
        _ => x.max(y),
    };
    let reduced = |all: &[Vec<Vec<u32>>], at: usize, how| -> Vec<u32> {
        let columns = 0..all[0][at].len();
        columns
            .map(|i| all.iter().map(|r| r[at][i]).reduce(|x, y| join(how, x, y)).unwrap())
            .collect()
    };
    let own = |rank: usize| rank * PART..(rank + 1) * PART;
    let old = arrays.to_vec();
    for (rank, mine) in arrays.iter_mut().enumerate() {
        match what {
            What::Fill(a, x) => mine[a].fill(x + rank as u32),
            What::Copy(a, b) => mine[a] = old[rank][b].clone(),
            What::AllReduce(a, how) => mine[a] = reduced(&old, a, how),
            What::AllReduceInto(a, b, how) => mine[a] = reduced(&old, b, how),
            What::AllGather(a, b) => {
                mine[a] = (0..size).flat_map(|r| old[r][b][own(r)].to_vec()).collect();
            }
            What::ReduceScatter(a, b, how) => {
                mine[a][own(rank)].copy_from_slice(&reduced(&old, b, how)[own(rank)]);
            }
            What::Broadcast(a, root) => mine[a] = old[root as usize][a].clone(),
            What::Reduce(a, how, root) if root as usize == rank => mine[a] = reduced(&old, a, how),
            What::AllToAll(a, b) => {
                mine[a] = (0..size).flat_map(|r| old[r][b][own(rank)].to_vec()).collect();
            }
            What::Shift(a, b) => mine[a] = old[(rank + size - 1) % size][b].clone(),
            What::Reduce(..) | What::Barrier => {}
        }
    }
}

struct Player<'a> {
    rank: &'a Rank,
    second: leasehold_collective::Comm,
    arrays: Vec<Array<u32>>,
    streams: Vec<Stream>,
}

impl Player<'_> {
    fn play(&self, step: Step, streams: &[Stream]) -> Result<()> {
        let (me, size) = (self.rank.me(), self.rank.world.size());
        let (x, stream) = (&self.arrays, &streams[step.stream]);
        let comm = if step.second { &self.second } else { &self.rank.comm };
        let own = me as usize * PART..(me as usize + 1) * PART;
        match step.what {
            What::Fill(a, number) => stream.fill(x[a].view(), number + me),
            What::Copy(a, b) => stream.copy(x[a].view(), x[b].view()),
            What::AllReduce(a, how) => comm.all_reduce(stream, &x[a], how),
            What::AllReduceInto(a, b, how) => comm.all_reduce_into(stream, &x[a], &x[b], how),
            What::AllGather(a, b) => comm.all_gather(stream, &x[a], x[b].slice(own)),
            What::ReduceScatter(a, b, how) => {
                comm.reduce_scatter(stream, x[a].slice(own), &x[b], how)
            }
            What::Broadcast(a, root) => comm.broadcast(stream, &x[a], root),
            What::Reduce(a, how, root) => comm.reduce(stream, &x[a], how, root),
            What::AllToAll(a, b) => comm.all_to_all(stream, &x[a], &x[b]),
            What::Shift(a, b) => comm.group(stream, |g| {
                g.send(&x[b], (me + 1) % size)?;
                g.recv(&x[a], (me + size - 1) % size)
            }),
            What::Barrier => comm.barrier(stream),
        }
    }

    /// Plays steps as a graph, which is launched twice.
    fn record(&self, steps: &[Step]) -> Result<()> {
        let graph = self.rank.runtime.record_graph(|recording: &Runtime| {
            let streams: Vec<Stream> =
                (0..STREAMS).map(|_| recording.create_stream()).collect::<Result<_>>()?;
            steps.iter().try_for_each(|step| self.play(*step, &streams))
        })?;
        graph.launch_on(&self.streams[0])?;
        graph.launch_on(&self.streams[1]).map(drop)
    }
}

fn program(seed: u64) {
    let mut random = Random(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15));
    let size = 1 + random.below(5) as u32;
    let sections: Vec<(bool, Vec<Step>)> = (0..4)
        .map(|_| {
            let recorded = random.below(2) == 1;
            let steps = 1 + random.below(12);
            (recorded, (0..steps).map(|_| step(&mut random, size)).collect())
        })
        .collect();
    let first = |rank: u32| -> Vec<Vec<u32>> {
        let len = PART * size as usize;
        (0..ARRAYS).map(|a| (0..len).map(|i| (i + a) as u32 * 7 + rank * 1000).collect()).collect()
    };
    let mut expected: Vec<_> = (0..size).map(first).collect();
    for (recorded, steps) in &sections {
        for _ in 0..=usize::from(*recorded) {
            steps.iter().for_each(|step| model(step.what, &mut expected));
        }
    }
    let config = CommConfig::new("one").timeout(Duration::from_secs(30));
    let got = ranks_with(size, &config, |r| {
        let second = r.world.comm(&r.runtime, &r.config("two"))?;
        let arrays = first(r.me()).iter().map(|x| r.runtime.upload(x)).collect::<Result<_>>()?;
        let streams = (0..STREAMS).map(|_| r.runtime.create_stream()).collect::<Result<_>>()?;
        let player = Player { rank: r, second, arrays, streams };
        for (recorded, steps) in &sections {
            match recorded {
                true => player.record(steps)?,
                false => steps.iter().try_for_each(|s| player.play(*s, &player.streams))?,
            }
        }
        player.arrays.iter().map(|x| r.runtime.to_vec(x)).collect::<Result<Vec<_>>>()
    });
    for (rank, got) in got.into_iter().enumerate() {
        let got = got.unwrap_or_else(|e| panic!("seed {seed}: rank {rank}: {e}\n{sections:#?}"));
        assert_eq!(got, expected[rank], "seed {seed}: rank {rank} of {size}\n{sections:#?}");
    }
}

#[test]
fn random_programs_compute_as_the_model_does() {
    (0..60).for_each(program);
}
