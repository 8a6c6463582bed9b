//! Wrong programs: calls that do not fit, dead-locks, races, and use against the rules.

use crate::{Bench, Over, Rank};
use half::bf16;
use leasehold::{Array, Error, Result, Stream, View};
use leasehold_collective::{Comm, CommConfig, Reduce};
use leasehold_sim::{Command, FillCall, MachineConfig, OnMismatch, ReportKind};
use std::sync::Arc;
use std::time::Duration;

/// Elements of the wrong programs' buffers.
const N: usize = 512;

/// The calls of a rank of a wrong program.
type Calls = fn(&Comm, &Stream, &Memory) -> Result<()>;

/// The memory of a rank of a wrong program: ones.
struct Memory {
    x: Array<f32>,
    narrow: Array<bf16>,
    all: Array<f32>,
}

impl Memory {
    fn new(r: &Rank) -> Self {
        Self {
            x: r.runtime.upload(&[1f32; N]).unwrap(),
            narrow: r.runtime.upload(&[bf16::ONE; N]).unwrap(),
            all: r.runtime.upload(&[0f32; 2 * N]).unwrap(),
        }
    }
}

/// The programs that NCCL runs without an error, or for ever. Each has the text of both calls.
fn programs() -> Vec<([Calls; 2], [&'static str; 2])> {
    fn sum(comm: &Comm, stream: &Stream, m: &Memory) -> Result<()> {
        comm.all_reduce(stream, &m.x, Reduce::Sum)
    }
    fn gather(comm: &Comm, stream: &Stream, m: &Memory) -> Result<()> {
        comm.all_gather(stream, &m.all, &m.x)
    }
    vec![
        (
            [|c, s, m| c.all_reduce(s, m.x.slice(0..N / 2), Reduce::Sum), sum],
            ["all_reduce 256 f32 Sum", "all_reduce 512 f32 Sum"],
        ),
        (
            [|c, s, m| c.all_reduce(s, &m.narrow, Reduce::Sum), sum],
            ["all_reduce 512 bf16 Sum", "all_reduce 512 f32 Sum"],
        ),
        (
            [|c, s, m| c.all_reduce(s, &m.x, Reduce::Largest), sum],
            ["all_reduce 512 f32 Largest", "all_reduce 512 f32 Sum"],
        ),
        (
            [|c, s, m| c.broadcast(s, &m.x, 0), |c, s, m| c.broadcast(s, &m.x, 1)],
            ["broadcast 512 f32 root 0", "broadcast 512 f32 root 1"],
        ),
        (
            [
                |c, s, m| gather(c, s, m).and_then(|()| sum(c, s, m)),
                |c, s, m| sum(c, s, m).and_then(|()| gather(c, s, m)),
            ],
            ["all_gather 512 f32", "all_reduce 512 f32 Sum"],
        ),
        (
            [|c, s, m| c.broadcast(s, &m.x, 0), sum],
            ["broadcast 512 f32 root 0", "all_reduce 512 f32 Sum"],
        ),
    ]
}

fn is_mismatch(error: &Error, texts: [&str; 2]) {
    assert!(matches!(error, Error::Mismatch(_)), "{error}");
    let shown = error.to_string();
    assert!(shown.contains("tp"), "{shown}");
    for (rank, text) in texts.into_iter().enumerate() {
        let at = shown.find(&format!("rank {rank} ")).expect("no rank");
        assert!(shown[at..].contains(text), "{text} of rank {rank} is not in: {shown}");
    }
}

/// Runs a wrong program eagerly until the machine finds the mistake, and returns the errors of both
/// ranks. On a busy processor the watchdog of the ranks may be the first to find it.
fn eager(over: Over, calls: [Calls; 2], texts: [&str; 2]) -> Vec<Error> {
    for _ in 0..50 {
        let bench = Bench::new(over, 2, MachineConfig::seed(1));
        let errors = bench.run(|r| {
            let (comm, m) = (r.comm(), Memory::new(r));
            // The stream may have failed already.
            let called = calls[r.number() as usize](&comm, r.runtime.stream(), &m);
            called.and_then(|()| r.runtime.to_vec(&m.x)).unwrap_err()
        });
        let reports = bench.machine().take_reports();
        assert!(reports.len() <= 1, "{reports:?}");
        assert!(reports.iter().all(|r| r.kind == ReportKind::Mismatch), "{reports:?}");
        let (told, lost): (Vec<&Error>, Vec<&Error>) =
            errors.iter().partition(|e| matches!(e, Error::Mismatch(_)));
        told.iter().for_each(|e| is_mismatch(e, texts));
        if !reports.is_empty() && (over == Over::Sim || lost.len() == errors.len()) {
            return errors;
        }
    }
    panic!("the machine never finds {texts:?}");
}

#[test]
fn eager_calls_that_do_not_fit_fail_both_ranks_by_name() {
    for (calls, texts) in programs() {
        eager(Over::Sim, calls, texts).iter().for_each(|e| is_mismatch(e, texts));
        for error in eager(Over::Cuda, calls, texts) {
            let shown = error.to_string();
            assert!(shown.contains("device lost"), "{shown}");
            assert!(texts.iter().all(|text| shown.contains(text)), "{shown}");
        }
    }
}

#[test]
fn recorded_calls_that_do_not_fit_are_named_before_the_first_launch() {
    for over in [Over::Sim, Over::Cuda] {
        for (calls, texts) in programs() {
            let bench = Bench::new(over, 2, MachineConfig::seed(1).on_mismatch(OnMismatch::AsNccl));
            let errors = bench.run(|r| {
                let (comm, m) = (r.comm(), Memory::new(r));
                let call = calls[r.number() as usize];
                let graph = r.runtime.record_graph(|rec| call(&comm, rec.stream(), &m));
                // Nothing ran.
                assert_eq!(r.runtime.to_vec(&m.x).unwrap(), [1.0; N]);
                graph.map(drop).unwrap_err()
            });
            errors.iter().for_each(|e| is_mismatch(e, texts));
            assert_eq!(bench.machine().take_reports(), []);
        }
    }
}

#[test]
fn swapped_buffers_of_the_same_calls_fit() {
    for over in [Over::Sim, Over::Cuda] {
        let bench = Bench::new(over, 2, MachineConfig::seed(1));
        bench.run(|r| {
            let (comm, a, b) = (r.comm(), Memory::new(r), Memory::new(r));
            let (first, second) = if r.number() == 0 { (&a, &b) } else { (&b, &a) };
            let graph = r.runtime.record_graph(|rec| {
                comm.all_reduce(rec.stream(), &first.x, Reduce::Sum)?;
                comm.all_reduce(rec.stream(), &second.x, Reduce::Sum)
            });
            graph.unwrap().launch().unwrap();
            assert_eq!(r.runtime.to_vec(&a.x).unwrap(), [2.0; N]);
            assert_eq!(r.runtime.to_vec(&b.x).unwrap(), [2.0; N]);
        });
        assert_eq!(bench.machine().take_reports(), []);
    }
}

/// Two communicators on a stream each, which all ranks call in one order. Returns what the machine
/// waits for at the end, if a rank waits in vain.
fn two_communicators(over: Over, seed: u64, concurrent: bool) -> (Option<String>, Bench) {
    let bench = Bench::new(over, 2, MachineConfig::seed(seed));
    let waits = bench.run(|r| {
        let config = |name| {
            let config = CommConfig::new(name).concurrent(concurrent);
            config.ops(Arc::new(bench.library.clone()))
        };
        let [tp, dp] = ["tp", "dp"].map(|name| r.world.comm(&r.runtime, &config(name)).unwrap());
        let other = r.runtime.create_stream().unwrap();
        let (a, b) = (Memory::new(r), Memory::new(r));
        r.runtime.synchronize().unwrap();
        r.barrier("made");
        tp.all_reduce(r.runtime.stream(), &a.x, Reduce::Sum).unwrap();
        dp.all_reduce(&other, &b.x, Reduce::Sum).unwrap();
        // Until all have called, no rank waits, so the seed alone picks the order.
        r.barrier("called");
        // Without a dead-lock it takes milliseconds.
        let limit = Duration::from_millis(if concurrent { 300 } else { 60_000 });
        let mut streams = [r.runtime.stream(), &other].into_iter();
        let result = streams.try_for_each(|stream| stream.synchronize_timeout(limit));
        r.barrier("waited");
        let waits = result.is_err().then(|| bench.machine().waits());
        r.barrier("asked");
        // Nothing that is dropped may wait for ever.
        [&tp, &dp].into_iter().for_each(|comm| comm.abort(Error::state("the test ends")).unwrap());
        waits
    });
    (waits.into_iter().flatten().next(), bench)
}

#[test]
fn two_communicators_without_a_token_dead_lock_and_the_cycle_is_named() {
    for (over, device) in [(Over::Sim, "sim"), (Over::Cuda, "cuda")] {
        let mut found = 0;
        for seed in 0..12 {
            let (waits, bench) = two_communicators(over, seed, true);
            let reports = bench.machine().take_reports();
            let Some(waits) = waits else {
                assert_eq!(reports, []);
                continue;
            };
            found += 1;
            let cycle = |one: &str, other: &str| {
                waits.contains(&format!("{device}:0 {one}#0 waits for {device}:1, whose slot {other}#0 holds, which waits for {device}:0"))
            };
            assert!(cycle("tp", "dp") || cycle("dp", "tp"), "{waits}");
            assert_eq!(reports[0].kind, ReportKind::DeadLock);
        }
        assert!(found > 0, "{over:?}");
    }
}

#[test]
fn a_wait_without_a_limit_ends_in_a_dead_lock_after_the_machines_timeout() {
    let machine = MachineConfig::seed(1).timeout(Duration::from_millis(300));
    let bench = Bench::new(Over::Sim, 2, machine);
    bench.run(|r| {
        let (comm, m) = (r.comm(), Memory::new(r));
        r.barrier("made");
        if r.number() == 0 {
            comm.all_reduce(r.runtime.stream(), &m.x, Reduce::Sum).unwrap();
            let text = r.runtime.synchronize().unwrap_err().to_string();
            let part = "rank 1 (sim:1), which has begun 0 calls and not this one";
            assert!(text.contains("dead-lock") && text.contains(part), "{text}");
            comm.abort(Error::state("the test ends")).unwrap();
        }
        r.barrier("over");
    });
}

#[test]
fn the_order_token_orders_two_communicators() {
    for over in [Over::Sim, Over::Cuda] {
        for seed in 0..12 {
            let (waits, bench) = two_communicators(over, seed, false);
            assert_eq!(waits, None);
            assert_eq!(bench.machine().take_reports(), []);
        }
    }
}

#[test]
fn memory_that_another_queue_writes_without_an_order_is_reported() {
    for over in [Over::Sim, Over::Cuda] {
        for seed in 0..4 {
            let bench = Bench::new(over, 2, MachineConfig::seed(seed));
            bench.run(|r| {
                let (comm, m) = (r.comm(), Memory::new(r));
                r.runtime.synchronize().unwrap();
                if r.number() == 0 {
                    // SAFETY: the queue is this test's own; that it writes the buffer without an
                    // order is what is tested.
                    let machine = unsafe { bench.machine().drive() };
                    let queue = machine.queue_create(0).unwrap();
                    let at = m.x.view().buffer().addr();
                    machine.enqueue(queue, Command::Fill(FillCall::linear(at, 64, 7, 1))).unwrap();
                }
                comm.all_reduce(r.runtime.stream(), &m.x, Reduce::Sum).unwrap();
                r.runtime.synchronize().unwrap();
            });
            bench.machine().run_until_idle();
            let reports = bench.machine().take_reports();
            assert!(!reports.is_empty(), "{over:?}, seed {seed}");
            for report in reports {
                assert_eq!(report.kind, ReportKind::Unordered, "{report}");
                let text = report.to_string();
                assert!(text.contains("tp#0 all_reduce 512 f32 Sum"), "{text}");
            }
        }
    }
}
