//! Valid programs against a sequential interpreter, and determinism.

use crate::{copy, fill, kernels, launch, peek};
use leasehold_sim::{Command, EventId, Machine, MachineConfig, QueueId, Ran, Report};
use proptest::prelude::*;

const BUFFERS: usize = 4;
const BYTES: u64 = 64;
const QUEUES: usize = 3;

/// A step of a program. Buffers and queues are numbers.
#[derive(Debug, Clone)]
enum Step {
    Fill {
        queue: usize,
        buffer: usize,
        at: u64,
        bytes: u64,
        value: u8,
    },
    Copy {
        queue: usize,
        from: usize,
        to: usize,
        bytes: u64,
    },
    Bump {
        queue: usize,
        buffer: usize,
        by: u8,
    },
    Add {
        queue: usize,
        a: usize,
        b: usize,
        out: usize,
    },
    /// The host waits for a queue.
    Sync {
        queue: usize,
    },
    /// The host queries a queue.
    Query {
        queue: usize,
    },
}

fn step() -> impl Strategy<Value = Step> {
    let q = 0..QUEUES;
    let b = 0..BUFFERS;
    prop_oneof![
        (q.clone(), b.clone(), 0..BYTES, 0..BYTES, any::<u8>()).prop_map(
            |(queue, buffer, at, n, value)| Step::Fill {
                queue,
                buffer,
                at,
                bytes: n.min(BYTES - at),
                value
            }
        ),
        (q.clone(), b.clone(), b.clone(), 1..=BYTES)
            .prop_map(|(queue, from, to, bytes)| Step::Copy { queue, from, to, bytes }),
        (q.clone(), b.clone(), any::<u8>()).prop_map(|(queue, buffer, by)| Step::Bump {
            queue,
            buffer,
            by
        }),
        (q.clone(), b.clone(), b.clone(), b).prop_map(|(queue, a, b, out)| Step::Add {
            queue,
            a,
            b,
            out
        }),
        q.clone().prop_map(|queue| Step::Sync { queue }),
        q.prop_map(|queue| Step::Query { queue }),
    ]
}

impl Step {
    /// The buffers that the step uses, and whether it writes them.
    fn uses(&self) -> Vec<(usize, bool)> {
        match *self {
            Step::Fill { buffer, .. } | Step::Bump { buffer, .. } => vec![(buffer, true)],
            Step::Copy { from, to, .. } => vec![(from, false), (to, true)],
            Step::Add { a, b, out, .. } => vec![(a, false), (b, false), (out, true)],
            Step::Sync { .. } | Step::Query { .. } => vec![],
        }
    }

    fn queue(&self) -> usize {
        match *self {
            Step::Fill { queue, .. }
            | Step::Copy { queue, .. }
            | Step::Bump { queue, .. }
            | Step::Add { queue, .. }
            | Step::Sync { queue }
            | Step::Query { queue } => queue,
        }
    }
}

type Memory = [[u8; BYTES as usize]; BUFFERS];

fn interpret(program: &[Step]) -> Memory {
    let mut memory = [[0u8; BYTES as usize]; BUFFERS];
    for step in program {
        match *step {
            Step::Fill { buffer, at, bytes, value, .. } => {
                memory[buffer][at as usize..(at + bytes) as usize].fill(value);
            }
            Step::Copy { from, to, bytes, .. } => {
                let source = memory[from];
                memory[to][..bytes as usize].copy_from_slice(&source[..bytes as usize]);
            }
            Step::Bump { buffer, by, .. } => {
                memory[buffer].iter_mut().for_each(|x| *x = x.wrapping_add(by))
            }
            Step::Add { a, b, out, .. } => {
                let (a, b) = (memory[a], memory[b]);
                memory[out].iter_mut().enumerate().for_each(|(i, x)| *x = a[i].wrapping_add(b[i]));
            }
            Step::Sync { .. } | Step::Query { .. } => {}
        }
    }
    memory
}

/// The last uses of a buffer, each as a queue and an event that was recorded after it.
#[derive(Default, Clone)]
struct Uses {
    write: Option<(usize, EventId)>,
    reads: Vec<(usize, EventId)>,
}

/// Runs a program with exactly the waits that its hazards require (all but the `leave_out`th of
/// them).
fn execute(
    program: &[Step],
    seed: u64,
    leave_out: Option<usize>,
) -> (Memory, Vec<Report>, Vec<Ran>, usize) {
    let config =
        MachineConfig::seed(seed).kernels(kernels()).trace(true).timeout(std::time::Duration::ZERO);
    let m = Machine::new(config).unwrap();
    let queues: Vec<QueueId> = (0..QUEUES).map(|_| m.queue_create(0).unwrap()).collect();
    let buffers: Vec<u64> = (0..BUFFERS).map(|_| m.alloc(0, BYTES).unwrap()).collect();
    buffers.iter().for_each(|&b| fill(&m, queues[0], b, BYTES, 0));
    m.queue_synchronize(queues[0], None).unwrap();
    let mut uses = vec![Uses::default(); BUFFERS];
    let mut waits = 0;
    for step in program {
        let (queue, touched) = (queues[step.queue()], step.uses());
        for &(buffer, writes) in &touched {
            let u = &uses[buffer];
            let reads = u.reads.iter().filter(|_| writes);
            for (_, event) in u.write.iter().chain(reads).filter(|w| w.0 != step.queue()) {
                if leave_out != Some(waits) {
                    m.enqueue(queue, Command::WaitEvent(*event)).unwrap();
                }
                waits += 1;
            }
        }
        match *step {
            Step::Fill { buffer, at, bytes, value, .. } => {
                fill(&m, queue, buffers[buffer] + at, bytes, value)
            }
            Step::Copy { from, to, bytes, .. } => {
                copy(&m, queue, buffers[from], buffers[to], bytes)
            }
            Step::Bump { buffer, by, .. } => {
                m.enqueue(
                    queue,
                    Command::Kernel(launch(&m, "bump", &[(buffers[buffer], BYTES)], &[by])),
                )
                .unwrap();
            }
            Step::Add { a, b, out, .. } => {
                let ranges = [a, b, out].map(|i| (buffers[i], BYTES));
                m.enqueue(queue, Command::Kernel(launch(&m, "add", &ranges, &[]))).unwrap();
            }
            Step::Sync { .. } => m.queue_synchronize(queue, None).unwrap(),
            Step::Query { .. } => drop(m.queue_query(queue).unwrap()),
        }
        if !touched.is_empty() {
            let event = m.event_create(0, false).unwrap();
            m.enqueue(queue, Command::Record(event)).unwrap();
            for (buffer, writes) in touched {
                if writes {
                    uses[buffer] = Uses { write: Some((step.queue(), event)), reads: Vec::new() };
                } else {
                    uses[buffer].reads.push((step.queue(), event));
                }
            }
        }
    }
    m.device_synchronize(0, None).unwrap();
    let memory = std::array::from_fn(|i| peek(&m, buffers[i], BYTES as usize).try_into().unwrap());
    (memory, m.take_reports(), m.take_trace(), waits)
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 96, ..ProptestConfig::default() })]

    #[test]
    fn a_legal_program_computes_what_the_interpreter_does_and_is_never_reported(
        program in proptest::collection::vec(step(), 0..40),
        seed in any::<u64>(),
    ) {
        let expected = interpret(&program);
        for seed in [seed, seed.wrapping_add(1), seed.wrapping_add(2)] {
            let (memory, reports, _, _) = execute(&program, seed, None);
            prop_assert_eq!(memory, expected);
            prop_assert_eq!(reports, vec![]);
        }
    }

    #[test]
    fn the_same_seed_runs_the_same_way(program in proptest::collection::vec(step(), 0..40), seed in any::<u64>()) {
        let (memory, _, trace, _) = execute(&program, seed, None);
        let (again, _, second, _) = execute(&program, seed, None);
        prop_assert_eq!(memory, again);
        prop_assert_eq!(trace, second);
    }
}

#[test]
fn a_program_that_gives_another_result_without_one_of_its_waits_is_reported() {
    // A chain over three queues, in which each wait is necessary.
    let program: Vec<Step> = (0..12)
        .map(|i| match i % 3 {
            0 => Step::Bump { queue: 0, buffer: 0, by: 1 },
            1 => Step::Add { queue: 1, a: 0, b: 0, out: 1 },
            _ => Step::Copy { queue: 2, from: 1, to: 0, bytes: BYTES },
        })
        .collect();
    let expected = interpret(&program);
    let waits = execute(&program, 0, None).3;
    let (mut wrong, mut reported) = (0, 0);
    for left_out in 0..waits {
        for seed in 0..50 {
            let (memory, reports, _, _) = execute(&program, seed, Some(left_out));
            if memory != expected {
                wrong += 1;
                assert!(
                    !reports.is_empty(),
                    "wait {left_out}, seed {seed}: a wrong result without a report"
                );
            }
            reported += u32::from(!reports.is_empty());
        }
    }
    assert!(wrong > 0 && reported > 0, "{wrong} wrong results, {reported} reports");
}

#[test]
fn different_seeds_run_in_different_orders() {
    let program: Vec<Step> = (0..12)
        .map(|i| Step::Fill {
            queue: i % QUEUES,
            buffer: i % QUEUES,
            at: 0,
            bytes: 8,
            value: i as u8,
        })
        .collect();
    let traces: Vec<String> =
        (0..20).map(|seed| format!("{:?}", execute(&program, seed, None).2)).collect();
    let mut distinct = traces.clone();
    distinct.sort();
    distinct.dedup();
    assert!(distinct.len() > 15, "{} of 20 orders", distinct.len());
}
