//! Ranks that call several communicators in different orders, and ranks that do not.
//!
//! The tests of `leasehold-sim` have this module too, with ranks on simulated devices.

use crate::common::{Rank, ranks_that_wait, ranks_with};
use leasehold::{Array, Error, Graph, Result, Stream};
use leasehold_collective::{Check, Comm, CommConfig, Reduce};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(40);

fn config() -> CommConfig {
    CommConfig::new("tp").timeout(LIMIT)
}

/// Two communicators of all ranks, and a stream and memory for the calls of each.
struct Two {
    comms: [Comm; 2],
    streams: [Stream; 2],
    arrays: [Array<f32>; 2],
}

impl Two {
    fn of(r: &Rank) -> Result<Self> {
        Self::checked(r, Check::Recordings)
    }

    fn checked(r: &Rank, check: Check) -> Result<Self> {
        let config = |name| r.config(name).timeout(LIMIT).check(check);
        let made = |name| r.world.comm(&r.runtime, &config(name));
        Ok(Self {
            comms: [made("a")?, made("b")?],
            streams: [r.runtime.create_stream()?, r.runtime.create_stream()?],
            arrays: [r.runtime.upload(&[1.0; 64])?, r.runtime.upload(&[2.0; 64])?],
        })
    }

    /// Sums by both communicators, each on its stream or all on one.
    fn sum(&self, order: [usize; 2], one: Option<&Stream>) -> Result<()> {
        order.into_iter().try_for_each(|i| {
            let stream = one.unwrap_or(&self.streams[i]);
            self.comms[i].all_reduce(stream, &self.arrays[i], Reduce::Sum)
        })
    }
}

/// The failure of a communicator, which comes long before the limit.
fn failure(comm: &Comm, begun: Instant) -> Error {
    loop {
        if let Some(cause) = comm.failure() {
            return cause;
        }
        assert!(begun.elapsed() < LIMIT / 2, "nothing ends the wait");
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[track_caller]
fn contains(error: &Error, words: &[&str]) {
    let text = error.to_string();
    assert!(words.iter().all(|word| text.contains(word)), "{words:?}: {text}");
}

/// The place of the orders, which differ by rank.
fn order(r: &Rank) -> [usize; 2] {
    if r.me() == 0 { [0, 1] } else { [1, 0] }
}

#[test]
fn two_communicators_in_opposite_order_are_a_dead_lock_that_is_named() {
    let errors = ranks_that_wait(2, &config(), |r| {
        let (two, begun) = (Two::of(r)?, Instant::now());
        two.sum(order(r), None)?;
        let errors = [0, 1].map(|i| failure(&two.comms[i], begun));
        for stream in &two.streams {
            contains(&stream.synchronize().unwrap_err(), &["dead-lock"]);
        }
        // The runtime goes on, as do its other communicators.
        let x = r.runtime.upload(&[1u32; 8])?;
        r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?;
        assert_eq!(r.runtime.to_vec(&x)?, [2; 8]);
        Ok(errors)
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        let chain = "rank 0 waits in a #0 all_reduce 64 f32 Sum for rank 1, which waits in b #0 all_reduce 64 f32 Sum for rank 0";
        contains(&error, &["dead-lock", "in one order", "in one communicator", chain]);
    }
}

/// A communicator of this rank and the next one, and one of the rank before and this one.
fn pairs(r: &Rank, comm: &Comm) -> Result<[Comm; 2]> {
    let me = r.me();
    let mut pairs = Vec::new();
    for i in 0..3 {
        let inside = me == i || me == (i + 1) % 3;
        pairs.push(comm.split(inside.then_some(i), 0)?);
    }
    Ok([me, (me + 2) % 3].map(|i| pairs[i as usize].clone().expect("a member")))
}

#[test]
fn three_ranks_that_wait_in_a_ring_are_a_dead_lock_that_is_named() {
    let errors = ranks_that_wait(3, &config(), |r| {
        let [own, before] = pairs(r, &r.comm)?;
        let x = r.runtime.upload(&[1.0f32; 8])?;
        let (y, begun) = (r.runtime.upload(&[1.0f32; 8])?, Instant::now());
        own.all_reduce(&r.runtime.create_stream()?, &x, Reduce::Sum)?;
        before.all_reduce(&r.runtime.create_stream()?, &y, Reduce::Sum)?;
        Ok([failure(&own, begun), failure(&before, begun)])
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        contains(
            &error,
            &[
                "rank 0 waits in tp.0 #0 all_reduce 8 f32 Sum for rank 1, which waits in tp.1 #0 all_reduce 8 f32 Sum for rank 2, which waits in tp.2 #0 all_reduce 8 f32 Sum for rank 0",
            ],
        );
    }
}

#[test]
fn a_send_and_a_sum_in_opposite_order_are_a_dead_lock_that_is_named() {
    let errors = ranks_that_wait(2, &config(), |r| {
        let (two, begun) = (Two::of(r)?, Instant::now());
        let ([a, b], [first, second]) = (&two.comms, &two.streams);
        if r.me() == 0 {
            a.send(first, &two.arrays[0], 1)?;
            b.all_reduce(second, &two.arrays[1], Reduce::Sum)?;
        } else {
            b.all_reduce(second, &two.arrays[1], Reduce::Sum)?;
            a.recv(first, &two.arrays[0], 0)?;
        }
        Ok([failure(a, begun), failure(b, begun)])
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        contains(
            &error,
            &["rank 0 waits in a #0 send 64 f32 to 1 for rank 1, which waits in b #0"],
        );
    }
}

#[test]
fn graphs_that_are_launched_in_opposite_order_are_a_dead_lock_that_is_named() {
    let errors = ranks_that_wait(2, &config(), |r| {
        let two = Two::of(r)?;
        let graph = |i: usize| {
            r.runtime.record_graph(|rec| {
                two.comms[i].all_reduce(rec.stream(), &two.arrays[i], Reduce::Sum)
            })
        };
        let (graphs, begun) = ([graph(0)?, graph(1)?], Instant::now());
        for i in order(r) {
            graphs[i].launch_on(&two.streams[i])?;
        }
        Ok([0, 1].map(|i| failure(&two.comms[i], begun)))
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        let chain = "rank 0 waits in launch 0 of graphs with calls of a for rank 1, which waits in launch 0 of graphs with calls of b for rank 0";
        contains(&error, &["dead-lock", chain]);
    }
}

/// A graph of a rank of three: sums by the pairs' communicators, `rounds` times.
fn ring(r: &Rank, order: [&Comm; 2], rounds: usize) -> Result<Graph> {
    let (x, y) = (r.runtime.upload(&[1.0f32; 8])?, r.runtime.upload(&[1.0f32; 8])?);
    r.runtime.record_graph(|rec| {
        for _ in 0..rounds {
            order[0].all_reduce(rec.stream(), &x, Reduce::Largest)?;
            order[1].all_reduce(rec.stream(), &y, Reduce::Largest)?;
        }
        Ok(())
    })
}

#[test]
fn graphs_whose_pairs_wait_in_a_ring_are_a_dead_lock_that_is_named() {
    let errors = ranks_that_wait(3, &config(), |r| {
        let [own, before] = pairs(r, &r.comm)?;
        let (graph, begun) = (ring(r, [&own, &before], 3)?, Instant::now());
        graph.launch_on(r.runtime.stream())?;
        Ok([failure(&own, begun), failure(&before, begun)])
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        let chain = "rank 0 waits in tp.0 recorded #0 all_reduce 8 f32 Largest of launch 0 for rank 1, which waits in tp.1 recorded #0 all_reduce 8 f32 Largest of launch 0 for rank 2, which waits in tp.2 recorded #0 all_reduce 8 f32 Largest of launch 0 for rank 0";
        contains(&error, &["dead-lock", "in one order", "in one communicator", chain]);
    }
}

#[test]
fn graphs_whose_pairs_come_in_one_order_are_no_dead_lock() {
    let results = ranks_with(3, &config(), |r| {
        let [own, before] = pairs(r, &r.comm)?;
        // All ranks have the pairs in the order of their numbers.
        let order = if r.me() == 0 { [&own, &before] } else { [&before, &own] };
        let graph = ring(r, order, 3)?;
        for step in 0..9 {
            // A rank is late for longer than a look takes, each in turn.
            if step % 3 == r.me() {
                std::thread::sleep(Duration::from_millis(150));
            }
            graph.launch_on(r.runtime.stream())?;
        }
        r.runtime.stream().synchronize()?;
        r.world.barrier("over", LIMIT)?;
        Ok(own.failure().or(before.failure()))
    });
    for result in results {
        assert!(result.as_ref().is_ok_and(Option::is_none), "{result:?}");
    }
}

#[test]
fn checked_calls_in_opposite_order_are_a_dead_lock_that_is_named() {
    let errors = ranks_with(2, &config(), |r| {
        let (two, begun) = (Two::checked(r, Check::Each)?, Instant::now());
        let errors = order(r).map(|i| two.sum([i, i], None).err());
        assert!(begun.elapsed() < LIMIT / 2, "at its limit");
        r.world.barrier("over", LIMIT)?;
        Ok(errors)
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        let chain = "rank 0 waits in a #0 all_reduce 64 f32 Sum for rank 1, which waits in b #0 all_reduce 64 f32 Sum for rank 0";
        contains(&error.expect("a failure"), &["dead-lock", "in one order", chain]);
    }
}

#[test]
fn checked_calls_in_a_ring_are_a_dead_lock_that_is_named() {
    let errors = ranks_with(3, &config(), |r| {
        let checked = r.config("each").timeout(LIMIT).check(Check::Each);
        let [own, before] = pairs(r, &r.world.comm(&r.runtime, &checked)?)?;
        let (x, begun) = (r.runtime.upload(&[1.0f32; 8])?, Instant::now());
        let errors = [own, before].map(|pair| {
            let called = pair.all_reduce(r.runtime.stream(), &x, Reduce::Sum);
            called.err().unwrap_or_else(|| failure(&pair, begun))
        });
        assert!(begun.elapsed() < LIMIT / 2, "at its limit");
        r.world.barrier("over", LIMIT)?;
        Ok(errors)
    });
    for error in errors.into_iter().flat_map(Result::unwrap) {
        let chain = "rank 0 waits in each.0 #0 all_reduce 8 f32 Sum for rank 1, which waits in each.1 #0 all_reduce 8 f32 Sum for rank 2, which waits in each.2 #0";
        contains(&error, &["dead-lock", chain]);
    }
}

#[test]
fn recordings_with_two_communicators_in_opposite_order_are_named_before_a_launch() {
    let errors = ranks_with(3, &config(), |r| {
        let two = Two::of(r)?;
        let record = |order| r.runtime.record_graph(|rec| two.sum(order, Some(rec.stream())));
        let (begun, order) = (Instant::now(), if r.me() == 1 { [1, 0] } else { [0, 1] });
        let error = record(order).err();
        assert!(begun.elapsed() < LIMIT / 2, "at its limit");
        // The communicators go on.
        record([0, 1])?.launch_on(r.runtime.stream())?;
        assert_eq!(r.runtime.to_vec(&two.arrays[1])?, [6.0; 64]);
        Ok(error)
    });
    for error in errors {
        let error = error.unwrap().expect("a graph");
        assert!(matches!(error, Error::Mismatch(_)), "{error:?}");
        let ranks = [
            "a #0 all_reduce 64 f32 Sum before b #0",
            "rank 1 b #0 all_reduce 64 f32 Sum before a #0",
        ];
        contains(&error, &ranks);
    }
}

#[test]
fn communicators_with_orders_of_their_own_are_recorded_in_any() {
    let results = ranks_with(2, &config(), |r| {
        let mut two = Two::of(r)?;
        let own = |name| r.world.comm(&r.runtime, &r.config(name).concurrent(true));
        two.comms = [own("c")?, own("d")?];
        r.runtime.record_graph(|rec| two.sum(order(r), Some(rec.stream()))).map(drop)
    });
    results.into_iter().for_each(|result| result.unwrap());
}

#[test]
fn ranks_that_are_late_and_call_in_one_order_are_no_dead_lock() {
    late_in_one_order(Check::Recordings);
}

#[test]
fn ranks_whose_checked_calls_are_late_and_in_one_order_are_no_dead_lock() {
    late_in_one_order(Check::Each);
}

fn late_in_one_order(check: Check) {
    let results = ranks_with(3, &config(), |r| {
        let two = Two::checked(r, check)?;
        let pair = r.comm.split((r.me() != 1).then_some(0), 0)?;
        let mut x = 1 + r.me();
        for step in 0..24u64 {
            // Each rank is late at times, for longer than a look takes.
            x = x.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            if x >> 29 == 0 {
                std::thread::sleep(Duration::from_millis(150));
            }
            two.sum(if step % 2 == 0 { [0, 1] } else { [1, 0] }, None)?;
            if let Some(pair) = &pair {
                pair.broadcast(&two.streams[0], &two.arrays[0], step as u32 / 8 % 2)?;
            }
            if step % 4 == 3 {
                two.streams.iter().try_for_each(Stream::synchronize)?;
            }
        }
        two.streams.iter().try_for_each(Stream::synchronize)?;
        r.world.barrier("over", LIMIT)?;
        Ok(two.comms.iter().chain(&pair).find_map(Comm::failure))
    });
    for result in results {
        assert!(result.as_ref().is_ok_and(Option::is_none), "{result:?}");
    }
}
