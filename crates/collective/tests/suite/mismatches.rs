//! Programs whose ranks differ, as raw libraries let them run into wrong numbers or a hang.

use crate::common::{Rank, config, ranks, ranks_with};
use half::bf16;
use leasehold::{Array, Error, Name, Result, Stream, View};
use leasehold_collective::{Check, CommConfig, Reduce};
use std::time::{Duration, Instant};

/// Memory of a rank, of 1.0 each.
struct Memory {
    x: Array<f32>,
    y: Array<f32>,
    half: Array<bf16>,
    gathered: Array<f32>,
}

const N: usize = 1 << 12;

fn memory(r: &Rank) -> Result<Memory> {
    Ok(Memory {
        x: r.runtime.upload(&[1.0; N])?,
        y: r.runtime.upload(&[1.0; N])?,
        half: r.runtime.upload(&[bf16::ONE; N])?,
        gathered: r.runtime.zeros(2 * N)?,
    })
}

type Program = fn(&Rank, &Memory, &Stream) -> Result<()>;

/// A wrong program of two ranks, and what the error says of each.
const WRONG: [(&str, Program, Program, [&str; 2]); 6] = [
    (
        "counts",
        |r, m, s| r.comm.all_reduce(s, m.x.slice(..N / 2), Reduce::Sum),
        |r, m, s| r.comm.all_reduce(s, &m.x, Reduce::Sum),
        ["rank 0 all_reduce 2048 f32 Sum (left)", "rank 1 all_reduce 4096 f32 Sum (right)"],
    ),
    (
        "types",
        |r, m, s| r.comm.all_reduce(s, &m.half, Reduce::Sum),
        |r, m, s| r.comm.all_reduce(s, &m.x, Reduce::Sum),
        ["rank 0 all_reduce 4096 bf16 Sum (left)", "rank 1 all_reduce 4096 f32 Sum (right)"],
    ),
    (
        "reductions",
        |r, m, s| r.comm.all_reduce(s, &m.x, Reduce::Largest),
        |r, m, s| r.comm.all_reduce(s, &m.x, Reduce::Sum),
        ["rank 0 all_reduce 4096 f32 Largest (left)", "rank 1 all_reduce 4096 f32 Sum (right)"],
    ),
    (
        "roots",
        |r, m, s| r.comm.broadcast(s, &m.x, 0),
        |r, m, s| r.comm.broadcast(s, &m.x, 1),
        ["rank 0 broadcast 4096 f32 root 0 (left)", "rank 1 broadcast 4096 f32 root 1 (right)"],
    ),
    (
        "order",
        |r, m, s| {
            r.comm.all_gather(s, &m.gathered, &m.y)?;
            r.comm.all_reduce(s, &m.x, Reduce::Sum)
        },
        |r, m, s| {
            r.comm.all_reduce(s, &m.x, Reduce::Sum)?;
            r.comm.all_gather(s, &m.gathered, &m.y)
        },
        ["rank 0 all_gather 4096 f32 (left)", "rank 1 all_reduce 4096 f32 Sum (right)"],
    ),
    (
        "calls",
        |r, m, s| r.comm.broadcast(s, &m.x, 0),
        |r, m, s| r.comm.all_reduce(s, &m.x, Reduce::Sum),
        ["rank 0 broadcast 4096 f32 root 0 (left)", "rank 1 all_reduce 4096 f32 Sum (right)"],
    ),
];

/// A rank's side of a program, within a scope that says which.
fn side(r: &Rank, programs: [Program; 2], memory: &Memory, stream: &Stream) -> Result<()> {
    let me = r.me() as usize % 2;
    let _scope = Name::new(["left", "right"][me]).scope();
    programs[me](r, memory, stream)
}

#[track_caller]
fn named(what: &str, error: &Error, calls: &[&str]) {
    assert!(matches!(error, Error::Mismatch(_)), "{what}: {error:?}");
    let text = error.to_string();
    assert!(calls.iter().all(|call| text.contains(call)), "{what}: {text}");
    assert!(text.contains("tp"), "{what}: {text}");
}

#[test]
fn recordings_that_differ_are_named_before_a_launch() {
    for (what, left, right, calls) in WRONG {
        let errors = ranks(2, |r| {
            let m = memory(r)?;
            let begun = Instant::now();
            let graph = r.runtime.record_graph(|recording| {
                r.comm.barrier(recording.stream())?; // alike
                side(r, [left, right], &m, recording.stream())
            });
            assert!(begun.elapsed() < Duration::from_secs(10), "{what}: without a limit");
            // Eager calls before and after go on.
            r.comm.all_reduce(r.runtime.stream(), &m.y, Reduce::Sum)?;
            assert_eq!(r.runtime.to_vec(&m.y)?, [2.0; N]);
            Ok(graph.err().unwrap())
        });
        for error in errors {
            named(what, &error, &calls);
            assert!(error.to_string().contains("tp recorded #1"), "{what}: {error}");
        }
    }
}

#[test]
fn eager_calls_that_differ_are_named_where_they_meet() {
    for (what, left, right, calls) in WRONG {
        let errors = ranks(2, |r| {
            let m = memory(r)?;
            let _ = side(r, [left, right], &m, r.runtime.stream());
            let error = r.runtime.stream().synchronize().unwrap_err();
            // The communicator is over, by the same cause.
            named(what, &r.comm.failure().unwrap(), &calls);
            named(what, &r.comm.barrier(&r.runtime.create_stream()?).unwrap_err(), &calls);
            Ok(error)
        });
        errors.iter().for_each(|error| named(what, error, &calls));
    }
}

#[test]
fn each_eager_call_is_compared_before_it_is_submitted() {
    for (what, left, right, calls) in WRONG {
        let results = ranks_with(2, &config().check(Check::Each), |r| {
            let m = memory(r)?;
            r.comm.all_reduce(r.runtime.stream(), &m.y, Reduce::Sum)?;
            let error = side(r, [left, right], &m, r.runtime.stream()).unwrap_err();
            // Nothing of it was submitted, so the stream is sound.
            assert_eq!(r.runtime.to_vec(&m.y)?, [2.0; N]);
            Ok(error)
        });
        for error in results {
            named(what, &error.unwrap(), &calls);
        }
    }
}

#[test]
fn calls_that_are_alike_pass_every_check() {
    let results = ranks_with(3, &config().check(Check::Each), |r| {
        let x = r.runtime.upload(&[1u32; 8])?;
        let stream = r.runtime.stream();
        for _ in 0..3 {
            r.comm.all_reduce(stream, &x, Reduce::Largest)?;
            match r.me() {
                0 => r.comm.send(stream, &x, 2)?,
                2 => r.comm.recv(stream, &x, 0)?,
                _ => {}
            }
            let (y, z) = (r.runtime.zeros::<u32>(8)?, r.runtime.zeros::<u32>(24)?);
            r.comm.group(stream, |g| {
                g.all_reduce_into(&y, &x, Reduce::Largest)?;
                g.all_gather(&z, &x)
            })?;
        }
        r.runtime.to_vec(&x)
    });
    results.into_iter().for_each(|x| assert_eq!(x.unwrap(), [1; 8]));
}

#[test]
fn buffers_that_are_swapped_are_no_mismatch() {
    ranks(2, |r| {
        let m = memory(r)?;
        let (first, second) = if r.me() == 0 { (&m.x, &m.y) } else { (&m.y, &m.x) };
        let run = |stream: &Stream| {
            r.comm.all_reduce(stream, first, Reduce::Sum)?;
            r.comm.all_reduce(stream, second, Reduce::Sum)
        };
        run(r.runtime.stream())?;
        let graph = r.runtime.record_graph(|recording| run(recording.stream()))?;
        graph.launch_on(r.runtime.stream())?;
        assert_eq!(r.runtime.to_vec(&m.x)?, [4.0; N]);
        assert_eq!(r.runtime.to_vec(&m.y)?, [4.0; N]);
        Ok(())
    });
}

#[test]
fn a_send_of_another_count_than_its_receive_is_named() {
    for recorded in [false, true] {
        let errors = ranks(2, |r| {
            let m = memory(r)?;
            let run = |stream: &Stream| match r.me() {
                0 => r.comm.send(stream, &m.x, 1),
                _ => r.comm.recv(stream, m.x.slice(1..), 0),
            };
            if recorded {
                return Ok(r.runtime.record_graph(|g| run(g.stream())).err().unwrap());
            }
            run(r.runtime.stream())?;
            Ok(r.runtime.stream().synchronize().unwrap_err())
        });
        for error in errors {
            named("send", &error, &["rank 0 send 4096 f32 to 1", "rank 1 recv 4095 f32 from 0"]);
        }
    }
}

#[test]
fn a_rank_among_eight_that_differs_is_named_on_all() {
    let errors = ranks(8, |r| {
        let x = r.runtime.upload(&[1.0f32; 64])?;
        let count = if r.me() == 5 { 63 } else { 64 };
        r.comm.all_reduce(r.runtime.stream(), x.slice(..count), Reduce::Sum)?;
        Ok(r.runtime.stream().synchronize().unwrap_err())
    });
    for error in errors {
        // The other rank is the first one whose call is there.
        named("eight", &error, &[" all_reduce 64 f32 Sum", "rank 5 all_reduce 63 f32 Sum"]);
    }
}

#[test]
fn a_call_that_one_rank_alone_records_is_named() {
    let errors = ranks(3, |r| {
        let x = r.runtime.upload(&[1.0f32; 8])?;
        let graph = r.runtime.record_graph(|recording| {
            r.comm.barrier(recording.stream())?;
            if r.me() == 1 {
                r.comm.all_reduce(recording.stream(), &x, Reduce::Sum)?;
            }
            Ok(())
        });
        Ok(graph.err())
    });
    for (rank, error) in errors.iter().enumerate() {
        // Ranks 0 and 2 agree with each other, and not with rank 1.
        let error = error.as_ref().unwrap();
        let other = if rank == 2 { 2 } else { 0 };
        let none = format!("rank {other} has no such call any more");
        named("alone", error, &["rank 1 all_reduce 8 f32 Sum", &none]);
    }
}

#[test]
fn calls_that_were_undone_in_a_recording_are_not_compared() {
    struct Fails<'a>(&'a Rank, &'a Array<f32>);
    impl leasehold::GraphOperator for Fails<'_> {
        fn name(&self) -> &str {
            "fails"
        }
        fn accesses(&self) -> Vec<leasehold::Operand<'_>> {
            vec![self.1.read_write()]
        }
        fn encode(&self, stream: &Stream) -> Result<()> {
            self.0.comm.all_reduce(stream, self.1, Reduce::Sum)?;
            Err(Error::other("on purpose"))
        }
    }
    ranks(2, |r| {
        let x = r.runtime.upload(&[1.0f32; 8])?;
        let graph = r.runtime.record_graph(|recording| {
            if r.me() == 0 {
                recording.add_graph_operator(&Fails(r, &x)).unwrap_err();
            }
            r.comm.all_reduce(recording.stream(), &x, Reduce::Sum)
        })?;
        graph.launch_on(r.runtime.stream())?;
        assert_eq!(r.runtime.to_vec(&x)?, [2.0; 8]);
        Ok(())
    });
}

#[test]
fn ranks_that_wait_for_each_other_in_different_calls_are_named_at_the_limit() {
    let short = CommConfig::new("tp").timeout(Duration::from_secs(1));
    let results = ranks_with(2, &short, |r| {
        let x = r.runtime.upload(&[1.0f32; 8])?;
        r.comm.barrier(r.runtime.stream())?;
        match r.me() {
            0 => r.comm.recv(r.runtime.stream(), &x, 1)?,
            _ => r.comm.all_reduce(r.runtime.stream(), &x, Reduce::Sum)?,
        }
        Ok(r.runtime.stream().synchronize().unwrap_err())
    });
    for error in results {
        let error = error.unwrap();
        named(
            "limit",
            &error,
            &["rank 1 all_reduce 8 f32 Sum", "rank 0 has no such call any more"],
        );
    }
}
