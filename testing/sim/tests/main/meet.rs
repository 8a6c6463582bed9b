//! Meetings: values against a model, order, virtual time, wrong programs, dead-locks and faults.

use crate::{config, copy, fill, peek};
use half::{bf16, f16};
use leasehold_core::{Error, Name};
use leasehold_sim::{
    CommCall, CommId, CommJoin, CommOp, Command, Element, FaultAction, FaultRule, Link, Machine,
    Meet, OnMismatch, POISON, QueueId, Reduction, Report, ReportKind, When,
};
use proptest::prelude::*;
use std::time::Duration;

/// Bytes of each buffer.
const ROOM: u64 = 4096;

/// A communicator whose ranks have a device, a queue and two buffers each.
struct Ranks {
    m: Machine,
    comms: Vec<CommId>,
    queues: Vec<QueueId>,
    from: Vec<u64>,
    to: Vec<u64>,
}

fn machine(devices: u32, seed: u64, on_mismatch: OnMismatch) -> Machine {
    Machine::new(config(seed).devices(devices, 16 << 20).on_mismatch(on_mismatch)).unwrap()
}

/// Makes a communicator of all devices of a machine.
fn communicator(m: &Machine, name: &str, devices: &[u32]) -> Vec<CommId> {
    let (key, size) = (m.comm_key(), devices.len() as u32);
    (0..)
        .zip(devices)
        .map(|(rank, &device)| m.comm_join(&CommJoin { key, name, size, rank, device }).unwrap())
        .collect()
}

fn ranks_of(m: Machine) -> Ranks {
    let devices: Vec<u32> = (0..m.config().devices).collect();
    let queues = devices.iter().map(|&d| m.queue_create(d).unwrap()).collect();
    let buffers = || devices.iter().map(|&d| m.alloc(d, ROOM).unwrap()).collect();
    let (from, to) = (buffers(), buffers());
    let comms = communicator(&m, "tp", &devices);
    Ranks { comms, queues, from, to, m }
}

fn ranks(size: u32, seed: u64) -> Ranks {
    ranks_of(machine(size, seed, OnMismatch::Strict))
}

impl Ranks {
    fn size(&self) -> usize {
        self.queues.len()
    }

    /// Writes a buffer, and waits.
    fn put(&self, rank: usize, at: u64, bytes: &[u8]) {
        copy(&self.m, self.queues[rank], bytes.as_ptr() as u64, at, bytes.len() as u64);
        self.m.queue_synchronize(self.queues[rank], None).unwrap();
    }

    /// Gives both buffers of each rank known contents.
    fn prepare(&self, input: impl Fn(usize) -> Vec<u8>) {
        for rank in 0..self.size() {
            self.put(rank, self.to[rank], &[0xee; ROOM as usize]);
            self.put(rank, self.from[rank], &input(rank));
        }
    }

    /// A call between the buffers of a rank.
    fn call(&self, rank: usize, op: CommOp, element: Element, count: u64) -> CommCall {
        CommCall { op, element, count, send: self.from[rank], recv: self.to[rank] }
    }

    fn group(&self, rank: usize, calls: Vec<CommCall>) -> Command {
        Command::Meet(Meet { comm: self.comms[rank], calls })
    }

    fn enqueue(&self, rank: usize, op: CommOp, element: Element, count: u64) {
        let call = self.call(rank, op, element, count);
        self.m.enqueue(self.queues[rank], self.group(rank, vec![call])).unwrap();
    }

    /// Enqueues the call on all ranks.
    fn all(&self, op: CommOp, element: Element, count: u64) {
        (0..self.size()).for_each(|rank| self.enqueue(rank, op, element, count));
    }

    fn synchronize(&self) {
        self.queues.iter().for_each(|&q| self.m.queue_synchronize(q, None).unwrap());
    }

    fn received(&self, rank: usize, bytes: u64) -> Vec<u8> {
        peek(&self.m, self.to[rank], bytes as usize)
    }
}

/// A small number as bytes of a type.
fn number(element: Element, value: f64) -> Vec<u8> {
    let int = (value as i128).to_le_bytes();
    match element {
        Element::F16 => f16::from_f64(value).to_le_bytes().to_vec(),
        Element::Bf16 => bf16::from_f64(value).to_le_bytes().to_vec(),
        Element::F32 => (value as f32).to_le_bytes().to_vec(),
        Element::F64 => value.to_le_bytes().to_vec(),
        integer => int[..integer.bytes() as usize].to_vec(),
    }
}

/// The value of a rank's element: whole, so that sums and products are exact before the rounding to
/// the type.
fn value(rank: usize, i: u64) -> f64 {
    ((rank as u64 * 7 + i * 3) % 5) as f64 + 1.0
}

fn is_float(element: Element) -> bool {
    matches!(element, Element::F16 | Element::Bf16 | Element::F32 | Element::F64)
}

/// The reduction of one element of all ranks. Whole numbers of a few ranks stay below 2^24.
fn reduced(element: Element, reduction: Reduction, values: &[f64]) -> Vec<u8> {
    let sum: f64 = values.iter().sum();
    let all = match reduction {
        Reduction::Sum => sum,
        Reduction::Product => values.iter().product(),
        Reduction::Least => values.iter().copied().fold(f64::INFINITY, f64::min),
        Reduction::Largest => values.iter().copied().fold(0.0, f64::max),
        Reduction::Average if is_float(element) => match element {
            Element::F64 => sum / values.len() as f64,
            _ => f64::from(sum as f32 / values.len() as f32),
        },
        _ => (sum / values.len() as f64).trunc(),
    };
    number(element, all)
}

/// The bytes that a rank receives, by the definition of the call.
fn model(op: CommOp, element: Element, count: u64, rank: usize, size: usize) -> Vec<u8> {
    let all = |i: u64| (0..size).map(|r| value(r, i)).collect::<Vec<f64>>();
    let reduce = |from: u64, reduction| {
        (from..from + count).flat_map(|i| reduced(element, reduction, &all(i))).collect()
    };
    let of =
        |r: usize, from: u64| (from..from + count).flat_map(move |i| number(element, value(r, i)));
    match op {
        CommOp::AllReduce(reduction) => reduce(0, reduction),
        CommOp::ReduceScatter(reduction) => reduce(rank as u64 * count, reduction),
        CommOp::Reduce { reduction, root } if root as usize == rank => reduce(0, reduction),
        CommOp::AllGather => (0..size).flat_map(|r| of(r, 0)).collect(),
        CommOp::AllToAll => (0..size).flat_map(|r| of(r, rank as u64 * count)).collect(),
        CommOp::Broadcast { root } if root as usize != rank => of(root as usize, 0).collect(),
        _ => Vec::new(),
    }
}

fn input(rank: usize, element: Element, count: u64) -> Vec<u8> {
    (0..count).flat_map(|i| number(element, value(rank, i))).collect()
}

/// All calls of all ranks.
fn collectives(size: u32) -> Vec<CommOp> {
    let mut all = vec![CommOp::AllGather, CommOp::AllToAll, CommOp::Barrier];
    for reduction in Reduction::ALL {
        all.extend([CommOp::AllReduce(reduction), CommOp::ReduceScatter(reduction)]);
    }
    for root in 0..size {
        let reduction = Reduction::ALL[root as usize % Reduction::ALL.len()];
        all.extend([CommOp::Broadcast { root }, CommOp::Reduce { reduction, root }]);
    }
    all
}

fn check(r: &Ranks, op: CommOp, element: Element, count: u64) {
    let size = r.size();
    r.prepare(|rank| input(rank, element, count * size as u64));
    r.all(op, element, count);
    r.synchronize();
    for rank in 0..size {
        let mut expected = model(op, element, count, rank, size);
        expected.resize(expected.len() + 16, 0xee);
        assert_eq!(
            r.received(rank, expected.len() as u64),
            expected,
            "{op:?} of {count} {element}, rank {rank} of {size}"
        );
    }
    assert_eq!(r.m.take_reports(), []);
}

#[test]
fn each_call_computes_what_the_model_does() {
    for size in 1..=8 {
        let r = ranks(size, size.into());
        for op in collectives(size) {
            for element in Element::ALL {
                check(&r, op, element, 5);
            }
        }
    }
}

#[test]
fn sixty_four_ranks() {
    let r = ranks(64, 1);
    for op in [
        CommOp::AllReduce(Reduction::Sum),
        CommOp::ReduceScatter(Reduction::Largest),
        CommOp::AllGather,
        CommOp::AllToAll,
        CommOp::Broadcast { root: 63 },
        CommOp::Barrier,
    ] {
        check(&r, op, Element::F32, 3);
    }
}

#[test]
fn a_call_of_no_elements_counts_and_touches_nothing() {
    let r = ranks(3, 1);
    let sum = CommOp::AllReduce(Reduction::Sum);
    r.prepare(|rank| input(rank, Element::I32, 4));
    r.all(sum, Element::I32, 0);
    r.all(sum, Element::I32, 4);
    r.synchronize();
    for rank in 0..3 {
        assert_eq!(r.received(rank, 16), model(sum, Element::I32, 4, rank, 3));
    }
    // A rank without the empty call is off by one from then on.
    (1..3).for_each(|rank| r.enqueue(rank, sum, Element::I32, 0));
    r.all(sum, Element::I32, 4);
    let text = r.m.queue_synchronize(r.queues[0], None).unwrap_err().to_string();
    assert!(
        text.contains("all_reduce 4 i32 Sum") && text.contains("all_reduce 0 i32 Sum"),
        "{text}"
    );
}

#[test]
fn results_may_take_the_place_of_what_is_sent() {
    let r = ranks(4, 1);
    let element = Element::U32;
    for op in [
        CommOp::AllReduce(Reduction::Sum),
        CommOp::AllGather,
        CommOp::ReduceScatter(Reduction::Sum),
        CommOp::Reduce { reduction: Reduction::Sum, root: 2 },
    ] {
        r.prepare(|rank| input(rank, element, 12));
        for rank in 0..4 {
            let part = rank as u64 * 3 * element.bytes();
            let (send, recv, moved) = match op {
                CommOp::AllGather => (r.to[rank] + part, r.to[rank], Some(r.to[rank] + part)),
                CommOp::ReduceScatter(_) => (r.from[rank], r.from[rank] + part, None),
                _ => (r.from[rank], r.from[rank], None),
            };
            if let Some(at) = moved {
                r.put(rank, at, &input(rank, element, 3));
            }
            let call = CommCall { op, element, count: 3, send, recv };
            r.m.enqueue(r.queues[rank], r.group(rank, vec![call])).unwrap();
        }
        r.synchronize();
        for rank in 0..4 {
            let expected = model(op, element, 3, rank, 4);
            let at = match op {
                CommOp::AllGather => r.to[rank],
                CommOp::ReduceScatter(_) => r.from[rank] + rank as u64 * 12,
                _ => r.from[rank],
            };
            assert_eq!(peek(&r.m, at, expected.len()), expected, "{op:?}, rank {rank}");
        }
        assert_eq!(r.m.take_reports(), []);
    }
}

#[test]
fn a_group_exchanges_with_both_neighbours_where_single_calls_wait_for_each_other() {
    for seed in 0..20 {
        let r = ranks(5, seed);
        r.prepare(|rank| input(rank, Element::U8, 8));
        for rank in 0..5 {
            let (to, from) = ((rank as u32 + 1) % 5, (rank as u32 + 4) % 5);
            let calls = vec![
                r.call(rank, CommOp::Send { to }, Element::U8, 8),
                r.call(rank, CommOp::Recv { from }, Element::U8, 8),
            ];
            r.m.enqueue(r.queues[rank], r.group(rank, calls)).unwrap();
        }
        r.synchronize();
        for rank in 0..5 {
            assert_eq!(r.received(rank, 8), input((rank + 4) % 5, Element::U8, 8));
        }
        assert_eq!(r.m.take_reports(), []);
        // One after the other, each rank sends first, and none receives.
        for rank in 0..5u32 {
            let (to, from) = ((rank + 1) % 5, (rank + 4) % 5);
            r.enqueue(rank as usize, CommOp::Send { to }, Element::U8, 8);
            r.enqueue(rank as usize, CommOp::Recv { from }, Element::U8, 8);
        }
        let text = r.m.queue_synchronize(r.queues[0], None).unwrap_err().to_string();
        assert!(text.contains("dead-lock") && text.contains("whose slot tp#1 holds"), "{text}");
        assert!(r.m.take_reports().iter().any(|r| r.kind == ReportKind::DeadLock));
    }
}

#[test]
fn transfers_of_a_pair_meet_in_their_order() {
    let r = ranks(3, 4);
    r.prepare(|rank| vec![rank as u8 + 1; 8]);
    // Rank 2 receives from rank 0, although rank 1 sends first.
    r.enqueue(1, CommOp::Send { to: 2 }, Element::U8, 4);
    r.m.run_until_idle();
    r.enqueue(2, CommOp::Recv { from: 0 }, Element::U8, 4);
    r.enqueue(0, CommOp::Send { to: 2 }, Element::U8, 4);
    r.m.queue_synchronize(r.queues[2], None).unwrap();
    assert_eq!(r.received(2, 4), [1; 4]);
    r.enqueue(2, CommOp::Recv { from: 1 }, Element::U8, 4);
    r.synchronize();
    assert_eq!(r.received(2, 4), [2; 4]);
    assert_eq!(r.m.take_reports(), []);
}

/// Writes a word of pinned memory on one queue, runs the call, and reads the word on the other.
fn crossed(op: CommOp, from: usize, to: usize, seed: u64) -> Vec<Report> {
    let r = ranks(2, seed);
    r.prepare(|rank| input(rank, Element::F32, 8));
    let shared = r.m.host_alloc(64).unwrap();
    fill(&r.m, r.queues[from], shared, 64, 1);
    r.all(op, Element::F32, 4);
    copy(&r.m, r.queues[to], shared, r.from[to] + 512, 64);
    r.synchronize();
    r.m.take_reports()
}

#[test]
fn a_rank_comes_after_those_whose_data_it_gets_and_after_no_other() {
    for seed in 0..50 {
        for op in [CommOp::AllReduce(Reduction::Sum), CommOp::AllGather, CommOp::Barrier] {
            assert_eq!(crossed(op, 0, 1, seed), [], "{op:?}");
            assert_eq!(crossed(op, 1, 0, seed), [], "{op:?}");
        }
        let root = CommOp::Broadcast { root: 0 };
        assert_eq!(crossed(root, 0, 1, seed), []);
        let reports = crossed(root, 1, 0, seed);
        assert!(reports.iter().any(|r| r.kind == ReportKind::Unordered), "{reports:?}");
        let reduce = CommOp::Reduce { reduction: Reduction::Sum, root: 0 };
        assert_eq!(crossed(reduce, 1, 0, seed), []);
        assert!(!crossed(reduce, 0, 1, seed).is_empty());
    }
}

#[test]
fn memory_of_a_pending_meeting_needs_an_order() {
    for seed in 0..50 {
        let r = ranks(2, seed);
        r.prepare(|rank| input(rank, Element::U8, 64));
        let other = r.m.queue_create(0).unwrap();
        r.enqueue(0, CommOp::AllReduce(Reduction::Sum), Element::U8, 64);
        fill(&r.m, other, r.from[0] + 8, 4, 9);
        // Even if the other rank never comes.
        r.m.run_until_idle();
        let reports = r.m.take_reports();
        let report = reports.iter().find(|r| r.kind == ReportKind::Unordered).expect("no report");
        assert_eq!((report.addr, report.bytes), (r.from[0] + 8, 4));
        assert!(report.to_string().contains("all_reduce 64 u8 Sum"), "{report}");
        r.m.free(r.to[0]).unwrap();
        let reports = r.m.take_reports();
        assert!(reports.iter().all(|r| r.kind == ReportKind::UseAfterFree), "{reports:?}");
        assert!(reports[0].to_string().contains("all_reduce 64 u8 Sum"), "{reports:?}");
        // The call finds that its memory is gone.
        r.enqueue(1, CommOp::AllReduce(Reduction::Sum), Element::U8, 64);
        let text = r.m.queue_synchronize(r.queues[0], None).unwrap_err().to_string();
        assert!(text.contains("nothing is mapped there"), "{text}");
    }
}

#[test]
fn memory_that_is_freed_before_a_call_begins_is_reported() {
    for captured in [false, true] {
        let r = ranks(2, 1);
        r.prepare(|rank| input(rank, Element::U8, 64));
        if captured {
            r.m.capture_begin(r.queues[0]).unwrap();
        }
        r.enqueue(0, CommOp::AllGather, Element::U8, 32);
        if captured {
            let exec = r.m.instantiate(r.m.capture_end(r.queues[0]).unwrap()).unwrap();
            r.m.enqueue(r.queues[0], Command::Launch(exec)).unwrap();
        }
        r.m.free(r.from[0]).unwrap();
        let reports = r.m.take_reports();
        assert_eq!(reports.len(), 1, "{reports:?}");
        assert_eq!(reports[0].kind, ReportKind::UseAfterFree);
        // The memory is another allocation's by the time that the call begins.
        assert_eq!(r.m.alloc(0, ROOM).unwrap(), r.from[0]);
        r.m.run_until_idle();
        let reports = r.m.take_reports();
        let stale = reports.iter().find(|r| r.kind == ReportKind::UseAfterFree);
        assert_eq!(stale.expect("no report").addr, r.from[0]);
    }
}

#[test]
fn what_a_call_has_not_written_yet_is_poison() {
    let r = ranks(2, 3);
    r.prepare(|rank| input(rank, Element::U8, 8));
    r.enqueue(0, CommOp::AllGather, Element::U8, 8);
    r.m.run_until_idle();
    assert_eq!(r.received(0, 17), [vec![POISON; 16], vec![0xee]].concat());
}

#[test]
fn a_call_takes_the_links_time_from_the_last_begin_on() {
    let link = Link { latency: 1_000, bytes: 2 };
    let time = |size: u32, op: CommOp, late: bool| {
        let r = ranks_of(Machine::new(config(1).devices(size, 16 << 20).link(link)).unwrap());
        r.prepare(|_| vec![1; ROOM as usize]);
        let begin = r.m.event_create(size - 1, true).unwrap();
        if late {
            (0..100).for_each(|_| {
                fill(&r.m, r.queues[size as usize - 1], r.from[size as usize - 1], 4096, 1)
            });
        }
        // The last rank's queue has the latest time of all.
        let q = r.queues[size as usize - 1];
        (0..50).for_each(|_| fill(&r.m, q, r.from[size as usize - 1], 64, 1));
        r.m.enqueue(q, Command::Record(begin)).unwrap();
        r.all(op, Element::U8, 1024);
        let ends: Vec<_> = (0..size)
            .map(|d| {
                let end = r.m.event_create(d, true).unwrap();
                r.m.enqueue(r.queues[d as usize], Command::Record(end)).unwrap();
                end
            })
            .collect();
        r.synchronize();
        let at = |e| r.m.event_time(e).unwrap().unwrap();
        ends.into_iter().map(|e| at(e) - at(begin)).collect::<Vec<u64>>()
    };
    for late in [false, true] {
        assert_eq!(time(4, CommOp::AllReduce(Reduction::Sum), late), [1_000 + 2 * 3 * 256 / 2; 4]);
        assert_eq!(time(2, CommOp::AllGather, late), [1_000 + 512; 2]);
        assert_eq!(time(2, CommOp::Broadcast { root: 1 }, late), [1_000 + 512; 2]);
        assert_eq!(time(3, CommOp::Barrier, late), [1_000; 3]);
        assert_eq!(time(1, CommOp::AllReduce(Reduction::Sum), late), [1_000]);
    }
}

#[test]
fn a_graph_meets_at_each_launch_and_computes_the_same() {
    for seed in 0..20 {
        let r = ranks(3, seed);
        let sum = CommOp::AllReduce(Reduction::Sum);
        r.prepare(|rank| input(rank, Element::Bf16, 32));
        r.all(sum, Element::Bf16, 32);
        r.synchronize();
        let eager: Vec<_> = (0..3).map(|rank| r.received(rank, 64)).collect();
        let execs: Vec<_> = (0..3)
            .map(|rank| {
                let q = r.queues[rank];
                r.m.capture_begin(q).unwrap();
                fill(&r.m, q, r.to[rank], 64, 0);
                r.enqueue(rank, sum, Element::Bf16, 32);
                r.enqueue(rank, CommOp::Barrier, Element::U8, 0);
                let graph = r.m.capture_end(q).unwrap();
                let exec = r.m.instantiate(graph).unwrap();
                r.m.graph_destroy(graph).unwrap();
                exec
            })
            .collect();
        for _ in 0..3 {
            (0..3).for_each(|rank| {
                r.m.enqueue(r.queues[rank], Command::Launch(execs[rank])).unwrap();
            });
            r.all(CommOp::Barrier, Element::U8, 0);
        }
        r.synchronize();
        (0..3).for_each(|rank| assert_eq!(r.received(rank, 64), eager[rank]));
        assert_eq!(r.m.take_reports(), []);
    }
}

/// Two communicators of the same devices, each with a queue of its own on each device.
fn two_communicators(size: u32, seed: u64) -> (Ranks, Ranks) {
    let tp = ranks(size, seed);
    let devices: Vec<u32> = (0..size).collect();
    let dp = Ranks {
        comms: communicator(&tp.m, "dp", &devices),
        queues: devices.iter().map(|&d| tp.m.queue_create(d).unwrap()).collect(),
        from: devices.iter().map(|&d| tp.m.alloc(d, ROOM).unwrap()).collect(),
        to: devices.iter().map(|&d| tp.m.alloc(d, ROOM).unwrap()).collect(),
        m: tp.m.clone(),
    };
    (tp, dp)
}

#[test]
fn two_communicators_without_an_order_on_each_device_dead_lock_and_the_cycle_is_named() {
    let mut found = 0;
    for seed in 0..40 {
        let (tp, dp) = two_communicators(2, seed);
        (0..2).for_each(|d| tp.m.device_set_name(d, &format!("cuda:{d}")).unwrap());
        [&tp, &dp].iter().for_each(|r| r.prepare(|rank| input(rank, Element::F32, 8)));
        for r in [&tp, &dp] {
            r.all(CommOp::AllReduce(Reduction::Sum), Element::F32, 8);
        }
        let result = tp.m.queue_synchronize(tp.queues[0], None);
        let reports = tp.m.take_reports();
        let Err(e) = result else {
            assert_eq!(reports, []);
            continue;
        };
        found += 1;
        let text = e.to_string();
        let cycles = [
            "cuda:0 tp#0 waits for cuda:1, whose slot dp#0 holds, which waits for cuda:0",
            "cuda:0 dp#0 waits for cuda:1, whose slot tp#0 holds, which waits for cuda:0",
        ];
        assert!(cycles.iter().any(|c| text.contains(c)), "{text}");
        let report = reports.iter().find(|r| r.kind == ReportKind::DeadLock).expect("no report");
        let text = report.to_string();
        assert!(text.contains("tp#0 all_reduce") && text.contains("dp#0 all_reduce"), "{text}");
    }
    assert!((5..=35).contains(&found), "{found} of 40");
}

#[test]
fn a_cycle_over_three_devices_is_named() {
    let m = machine(3, 1, OnMismatch::Strict);
    let queues: Vec<_> = (0..3).map(|d| m.queue_create(d).unwrap()).collect();
    let barrier = |comm| {
        let call =
            CommCall { op: CommOp::Barrier, element: Element::U8, count: 0, send: 0, recv: 0 };
        Command::Meet(Meet { comm, calls: vec![call] })
    };
    // Each device begins with the communicator that it shares with the next one.
    let comms: Vec<_> =
        (0..3u32).map(|d| communicator(&m, &format!("c{d}"), &[d, (d + 1) % 3])).collect();
    for d in 0..3 {
        m.enqueue(queues[d], barrier(comms[d][0])).unwrap();
        m.enqueue(queues[d], barrier(comms[(d + 2) % 3][1])).unwrap();
    }
    let text = m.queue_synchronize(queues[0], None).unwrap_err().to_string();
    let cycle = "device 0 c0#0 waits for device 1, whose slot c1#0 holds, which waits for device 2, whose slot c2#0 holds, which waits for device 0";
    assert!(text.contains(cycle), "{text}");
    // An abort ends it.
    m.comm_abort(comms[0][0]).unwrap();
    m.queue_synchronize(queues[2], None).unwrap();
}

#[test]
fn an_order_on_each_device_ends_the_dead_lock() {
    for seed in 0..40 {
        let (tp, dp) = two_communicators(4, seed);
        for r in [&tp, &dp] {
            r.prepare(|rank| input(rank, Element::F32, 8));
        }
        for round in 0..4 {
            let (first, second) = if round % 2 == 0 { (&tp, &dp) } else { (&dp, &tp) };
            for rank in 0..4 {
                for (r, after) in [(first, second), (second, first)] {
                    let e = r.m.event_create(rank as u32, false).unwrap();
                    r.enqueue(rank, CommOp::AllReduce(Reduction::Sum), Element::F32, 8);
                    r.m.enqueue(r.queues[rank], Command::Record(e)).unwrap();
                    r.m.enqueue(after.queues[rank], Command::WaitEvent(e)).unwrap();
                }
            }
        }
        tp.synchronize();
        dp.synchronize();
        assert_eq!(tp.m.take_reports(), []);
    }
}

#[test]
fn a_wait_says_which_rank_is_missing_and_why() {
    let wait = |r: &Ranks| r.m.queue_synchronize(r.queues[0], None).unwrap_err().to_string();
    let r = ranks(3, 1);
    r.prepare(|rank| input(rank, Element::F32, 8));
    r.enqueue(0, CommOp::AllGather, Element::F32, 2);
    r.enqueue(2, CommOp::AllGather, Element::F32, 2);
    let text = wait(&r);
    assert!(
        text.contains(
            "tp#0: all_gather 2 f32 waits for rank 1 (device 1), which has begun 0 calls"
        ),
        "{text}"
    );
    r.m.lose_device(1, "unplugged");
    let text = wait(&r);
    assert!(text.contains("rank 1 (device 1), which is lost"), "{text}");
    // The others abort, and go on.
    [0, 2].into_iter().for_each(|rank| r.m.comm_abort(r.comms[rank]).unwrap());
    [0, 2].into_iter().for_each(|rank| r.m.queue_synchronize(r.queues[rank], None).unwrap());
    let left = communicator(&r.m, "tp without 1", &[0, 2]);
    let meet = |rank: usize, comm| {
        let call = r.call(rank, CommOp::AllReduce(Reduction::Sum), Element::F32, 4);
        Command::Meet(Meet { comm, calls: vec![call] })
    };
    r.m.enqueue(r.queues[0], meet(0, left[0])).unwrap();
    r.m.enqueue(r.queues[2], meet(2, left[1])).unwrap();
    [0, 2].into_iter().for_each(|rank| r.m.queue_synchronize(r.queues[rank], None).unwrap());
    let sum: Vec<u8> =
        (0..4).flat_map(|i| number(Element::F32, value(0, i) + value(2, i))).collect();
    assert_eq!((r.received(0, 16), r.received(2, 16)), (sum.clone(), sum));
    assert_eq!(r.m.take_reports(), []);
}

#[test]
fn a_queue_that_fails_withdraws_its_call_and_frees_the_slot() {
    let (tp, dp) = two_communicators(2, 1);
    tp.enqueue(0, CommOp::Barrier, Element::U8, 0);
    tp.m.run_until_idle();
    dp.all(CommOp::Barrier, Element::U8, 0);
    tp.m.run_until_idle();
    assert!(
        tp.m.waits().contains("the slot of device 0, which tp#0 barrier holds"),
        "{}",
        tp.m.waits()
    );
    tp.m.queue_fail(tp.queues[0], Error::state("given up")).unwrap();
    dp.synchronize();
    // The call is gone, so the other rank waits.
    tp.enqueue(1, CommOp::Barrier, Element::U8, 0);
    let text = tp.m.queue_synchronize(tp.queues[1], None).unwrap_err().to_string();
    assert!(text.contains("rank 0 (device 0), which has begun 1 calls and not this one"), "{text}");
}

/// A wrong program: what each of two ranks calls, one after the other.
struct Wrong {
    calls: [Vec<(CommOp, Element, u64)>; 2],
    /// The first and the last four bytes that each rank has after it, as the library leaves them;
    /// `None` for a rank that hangs.
    as_nccl: [Option<[f32; 2]>; 2],
}

/// Elements of the wrong programs' buffers.
const WIDE: u64 = 512;

/// The programs that NCCL was seen to run without an error, with what it left.
fn wrong_programs() -> Vec<Wrong> {
    let (sum, f32) = (CommOp::AllReduce(Reduction::Sum), Element::F32);
    let one = |op, element, count| vec![(op, element, count)];
    vec![
        Wrong {
            calls: [one(sum, f32, WIDE / 2), one(sum, f32, WIDE)],
            as_nccl: [Some([2.0, 1.0]), Some([2.0, 1.0])],
        },
        Wrong {
            calls: [one(sum, Element::Bf16, WIDE), one(sum, f32, WIDE)],
            as_nccl: [None, Some([2.0, 1.0])],
        },
        Wrong {
            calls: [one(CommOp::AllReduce(Reduction::Largest), f32, WIDE), one(sum, f32, WIDE)],
            as_nccl: [Some([1.0, 2.0]), Some([1.0, 2.0])],
        },
        Wrong {
            calls: [0, 1].map(|root| one(CommOp::Broadcast { root }, f32, WIDE)),
            as_nccl: [Some([1.0, 1.0]), Some([1.0, 1.0])],
        },
        Wrong {
            calls: [
                vec![(CommOp::AllGather, f32, WIDE), (sum, f32, WIDE)],
                vec![(sum, f32, WIDE), (CommOp::AllGather, f32, WIDE)],
            ],
            as_nccl: [Some([3.0, 3.0]), Some([2.0, 2.0])],
        },
        Wrong {
            calls: [one(CommOp::Broadcast { root: 0 }, f32, WIDE), one(sum, f32, WIDE)],
            as_nccl: [Some([1.0, 1.0]), None],
        },
    ]
}

/// Runs a wrong program on buffers of ones. Calls but all_gathers are in place.
fn play(wrong: &Wrong, on_mismatch: OnMismatch, seed: u64) -> Ranks {
    let m = machine(2, seed, on_mismatch);
    let r = ranks_of(m);
    let ones: Vec<u8> = (0..WIDE).flat_map(|_| 1f32.to_le_bytes()).collect();
    r.prepare(|_| ones.clone());
    for (rank, calls) in wrong.calls.iter().enumerate() {
        for (i, &(op, element, count)) in calls.iter().enumerate() {
            let _scope = Name::new(&format!("layer {i}")).scope();
            let recv = if op == CommOp::AllGather { r.to[rank] } else { r.from[rank] };
            let call = CommCall { op, element, count, send: r.from[rank], recv };
            // The first call may have failed the queue already.
            let _ = r.m.enqueue(r.queues[rank], r.group(rank, vec![call]));
        }
    }
    r
}

#[test]
fn wrong_programs_fail_with_the_calls_of_both_ranks() {
    for (i, wrong) in wrong_programs().iter().enumerate() {
        for seed in 0..10 {
            let r = play(wrong, OnMismatch::Strict, seed);
            for rank in 0..2 {
                let text = r.m.queue_synchronize(r.queues[rank], None).unwrap_err().to_string();
                for (who, calls) in wrong.calls.iter().enumerate() {
                    let (op, element, count) = calls[0];
                    let shown = r.call(0, op, element, count).to_string();
                    let part = format!("rank {who} on device {who} {shown} (layer 0)");
                    assert!(text.contains(&part), "program {i}: {part} is not in: {text}");
                }
            }
            let reports = r.m.take_reports();
            assert_eq!(reports.len(), 1, "program {i}: {reports:?}");
            assert_eq!(reports[0].kind, ReportKind::Mismatch);
        }
    }
}

#[test]
fn wrong_programs_leave_what_nccl_was_seen_to_leave() {
    for (i, wrong) in wrong_programs().iter().enumerate() {
        for seed in 0..10 {
            let r = play(wrong, OnMismatch::AsNccl, seed);
            for (rank, expected) in wrong.as_nccl.iter().enumerate() {
                let hangs = i == 5 && rank == 1;
                let limit = Duration::from_millis(if hangs { 20 } else { 30_000 });
                let over = r.m.queue_synchronize(r.queues[rank], Some(limit));
                assert_eq!(over.is_err(), hangs, "program {i}, rank {rank}: {over:?}");
                if hangs {
                    let text = over.unwrap_err().to_string();
                    assert!(text.contains("has met calls that do not fit"), "{text}");
                }
                let Some(expected) = expected else { continue };
                let bytes = peek(&r.m, r.from[rank], WIDE as usize * 4);
                let at = |i: usize| f32::from_le_bytes(bytes[i..i + 4].try_into().unwrap());
                let last = bytes.len() - 4;
                assert_eq!([at(0), at(last)], *expected, "program {i}, rank {rank}");
            }
            assert_eq!(r.m.take_reports(), [], "program {i}");
        }
    }
}

#[test]
fn the_same_calls_with_other_buffers_fit() {
    let r = ranks(2, 1);
    r.prepare(|rank| input(rank, Element::F32, 8));
    r.put(1, r.to[1], &input(1, Element::F32, 8));
    let sum = CommOp::AllReduce(Reduction::Sum);
    r.enqueue(0, sum, Element::F32, 8);
    let swapped = CommCall { send: r.to[1], recv: r.from[1], ..r.call(1, sum, Element::F32, 8) };
    r.m.enqueue(r.queues[1], r.group(1, vec![swapped])).unwrap();
    r.synchronize();
    assert_eq!(r.received(0, 32), model(sum, Element::F32, 8, 0, 2));
    assert_eq!(r.m.take_reports(), []);
}

#[test]
fn transfers_that_do_not_fit_fail_both_ranks_and_spare_the_third() {
    let r = ranks(3, 1);
    r.prepare(|rank| input(rank, Element::F32, 8));
    r.enqueue(0, CommOp::Send { to: 1 }, Element::F32, 8);
    r.enqueue(1, CommOp::Recv { from: 0 }, Element::F32, 4);
    r.m.run_until_idle();
    for rank in 0..2 {
        let text = r.m.queue_synchronize(r.queues[rank], None).unwrap_err().to_string();
        assert!(text.contains("send 8 f32 to 1") && text.contains("recv 4 f32 from 0"), "{text}");
    }
    r.m.queue_synchronize(r.queues[2], None).unwrap();
}

/// A launch of the call on one rank, and the call itself on the other.
fn captured_on_one(on_mismatch: OnMismatch) -> Ranks {
    let r = ranks_of(machine(2, 1, on_mismatch));
    r.prepare(|rank| input(rank, Element::F32, 8));
    let sum = CommOp::AllReduce(Reduction::Sum);
    r.m.capture_begin(r.queues[0]).unwrap();
    r.enqueue(0, sum, Element::F32, 8);
    let exec = r.m.instantiate(r.m.capture_end(r.queues[0]).unwrap()).unwrap();
    r.m.enqueue(r.queues[0], Command::Launch(exec)).unwrap();
    r.enqueue(1, sum, Element::F32, 8);
    r
}

#[test]
fn a_capture_on_some_ranks_only_is_named() {
    let r = captured_on_one(OnMismatch::Strict);
    let text = r.m.queue_synchronize(r.queues[1], None).unwrap_err().to_string();
    assert!(text.contains("tp#0: rank 0 on device 0 all_reduce 8 f32 Sum in a graph"), "{text}");
    assert_eq!(r.m.take_reports()[0].kind, ReportKind::Mismatch);
    let r = captured_on_one(OnMismatch::AsNccl);
    for rank in 0..2 {
        let text = r.m.queue_synchronize(r.queues[rank], None).unwrap_err().to_string();
        assert!(text.contains("has met calls that do not fit"), "{text}");
    }
}

#[test]
fn an_abort_ends_calls_without_an_error_and_with_garbage() {
    let r = ranks(2, 1);
    r.prepare(|rank| input(rank, Element::U8, 8));
    r.enqueue(0, CommOp::AllGather, Element::U8, 8);
    r.enqueue(0, CommOp::AllGather, Element::U8, 8);
    r.m.run_until_idle();
    r.m.comm_status(r.comms[0]).unwrap();
    r.m.comm_abort(r.comms[0]).unwrap();
    r.m.comm_abort(r.comms[0]).unwrap();
    r.m.queue_synchronize(r.queues[0], None).unwrap();
    assert_eq!(r.received(0, 16), [POISON; 16]);
    assert_eq!(r.m.take_reports(), []);
    let call = r.call(0, CommOp::AllGather, Element::U8, 8);
    let refused = |e: Error| assert!(e.to_string().contains("rank 0 of tp was aborted"), "{e}");
    refused(r.m.enqueue(r.queues[0], r.group(0, vec![call])).unwrap_err());
    refused(r.m.comm_status(r.comms[0]).unwrap_err());
    assert_eq!(r.m.take_reports()[0].kind, ReportKind::Misuse);
    // The other rank is not told.
    r.enqueue(1, CommOp::AllGather, Element::U8, 8);
    let text = r.m.queue_synchronize(r.queues[1], None).unwrap_err().to_string();
    assert!(text.contains("rank 0 (device 0), which has left"), "{text}");
}

#[test]
fn a_graph_of_an_aborted_rank_is_refused() {
    let r = ranks(1, 1);
    r.prepare(|rank| input(rank, Element::U8, 8));
    r.m.capture_begin(r.queues[0]).unwrap();
    r.enqueue(0, CommOp::AllGather, Element::U8, 8);
    let exec = r.m.instantiate(r.m.capture_end(r.queues[0]).unwrap()).unwrap();
    r.m.enqueue(r.queues[0], Command::Launch(exec)).unwrap();
    r.m.queue_synchronize(r.queues[0], None).unwrap();
    r.m.comm_abort(r.comms[0]).unwrap();
    let e = r.m.enqueue(r.queues[0], Command::Launch(exec)).unwrap_err();
    assert!(e.to_string().contains("rank 0 of tp was aborted"), "{e}");
    assert_eq!(r.m.take_reports()[0].kind, ReportKind::Misuse);
    r.m.comm_destroy(r.comms[0]).unwrap();
    let e = r.m.enqueue(r.queues[0], Command::Launch(exec)).unwrap_err();
    assert!(matches!(e, Error::NotFound(_)), "{e}");
}

#[test]
fn a_rank_with_pending_calls_is_not_destroyed() {
    let r = ranks(2, 1);
    r.enqueue(0, CommOp::Barrier, Element::U8, 0);
    for _ in 0..2 {
        let e = r.m.comm_destroy(r.comms[0]).unwrap_err();
        assert!(e.to_string().contains("rank 0 of tp has pending calls"), "{e}");
        r.m.run_until_idle();
    }
    r.enqueue(1, CommOp::Barrier, Element::U8, 0);
    r.synchronize();
    r.comms.iter().for_each(|&comm| r.m.comm_destroy(comm).unwrap());
    assert!(matches!(r.m.comm_destroy(r.comms[0]), Err(Error::NotFound(_))));
}

#[test]
fn two_threads_in_the_library_are_named() {
    let m = machine(2, 1, OnMismatch::Strict);
    let turn = m.library_enter(0, "all_reduce").unwrap();
    // Each device has a turn of its own.
    drop(m.library_enter(1, "all_reduce").unwrap());
    let other = m.clone();
    let result =
        std::thread::spawn(move || other.library_enter(0, "send").map(drop)).join().unwrap();
    let text = result.unwrap_err().to_string();
    assert!(
        text.contains("device 0")
            && text.contains("send on Thread")
            && text.contains("all_reduce on Thread"),
        "{text}"
    );
    let reports = m.take_reports();
    assert_eq!((reports.len(), reports[0].kind), (1, ReportKind::Misuse));
    drop(turn);
    drop(m.library_enter(0, "send").unwrap());
    assert!(matches!(m.library_enter(2, "send"), Err(Error::NotFound(_))));
}

#[test]
fn bad_arguments_are_refused_by_name() {
    let m = machine(3, 1, OnMismatch::Strict);
    let key = m.comm_key();
    let join = |name, size, rank, device| {
        m.comm_join(&CommJoin { key, name, size, rank, device }).map_err(|e| e.to_string())
    };
    let comm = join("tp", 2, 0, 0).unwrap();
    for (result, part) in [
        (join("tp", 2, 2, 1), "rank 2 of 2 of tp"),
        (join("tp", 2, 0, 1), "rank 0 of tp has joined already"),
        (join("tp", 2, 1, 0), "ranks 0 and 1 of tp are both on device 0"),
        (join("tp", 3, 1, 1), "rank 1 joins tp of 3 ranks; other ranks joined tp of 2"),
        (join("dp", 2, 1, 1), "rank 1 joins dp of 2 ranks"),
        (join("tp", 2, 1, 3), "device 3 of 3"),
        (join("tp", 65, 64, 1), "rank 64 of 65"),
    ] {
        let text = result.unwrap_err();
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 64).unwrap());
    let call = |op, count, send| CommCall { op, element: Element::F32, count, send, recv: at };
    let sum = CommOp::AllReduce(Reduction::Sum);
    for (call, part) in [
        (call(CommOp::Broadcast { root: 2 }, 4, at), "the communicator has 2 ranks, so none is 2"),
        (call(CommOp::Send { to: 7 }, 4, at), "none is 7"),
        (call(sum, 4, at + 2), "not aligned to 4 bytes"),
        (call(sum, u64::MAX / 2, at), "wraps the address space"),
        (call(CommOp::AllGather, 1 << 63, at), "wraps the address space"),
    ] {
        let meet = Command::Meet(Meet { comm, calls: vec![call] });
        let text = m.enqueue(q, meet).unwrap_err().to_string();
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    let other = m.queue_create(1).unwrap();
    let meet = Command::Meet(Meet { comm, calls: vec![call(sum, 4, at)] });
    let text = m.enqueue(other, meet).unwrap_err().to_string();
    assert!(text.contains("rank 0 of tp is on device 0; a queue of device 1"), "{text}");
    // Memory of another device is an illegal address, when the call begins.
    join("tp", 2, 1, 1).unwrap();
    let far = m.alloc(1, 64).unwrap();
    m.enqueue(q, Command::Meet(Meet { comm, calls: vec![call(sum, 4, far)] })).unwrap();
    let text = m.queue_synchronize(q, None).unwrap_err().to_string();
    assert!(text.contains("has no access to memory of device 1"), "{text}");
}

#[test]
fn ranks_wait_for_each_other_to_join_and_a_missing_one_is_named() {
    let m = Machine::new(config(1).devices(3, 1 << 20).patience(Duration::from_secs(10))).unwrap();
    let key = m.comm_key();
    let join =
        |rank| m.comm_join(&CommJoin { key, name: "tp", size: 3, rank, device: rank }).unwrap();
    let first = join(0);
    join(2);
    let q = m.queue_create(0).unwrap();
    let barrier =
        CommCall { op: CommOp::Barrier, element: Element::U8, count: 0, send: 0, recv: 0 };
    m.enqueue(q, Command::Meet(Meet { comm: first, calls: vec![barrier] })).unwrap();
    let e = m.comm_wait(first, Some(Duration::from_millis(5))).unwrap_err();
    assert!(
        matches!(e, Error::Timeout(_))
            && e.to_string().contains("rank 0 of tp waits for ranks 1 to join"),
        "{e}"
    );
    std::thread::scope(|s| {
        let waiting = s.spawn(|| m.comm_wait(first, None));
        join(1);
        waiting.join().unwrap().unwrap();
    });
}

#[test]
fn calls_hang_on_demand_until_the_test_ends_them() {
    let r = ranks(2, 1);
    r.m.add_fault(FaultRule::on("comm_abort", When::Once, FaultAction::Hang));
    std::thread::scope(|s| {
        let abort = s.spawn(|| r.m.comm_abort(r.comms[0]));
        while r.m.calls_by_name().iter().all(|(name, _)| name != "comm_abort") {
            std::thread::yield_now();
        }
        std::thread::sleep(Duration::from_millis(5));
        assert!(!abort.is_finished());
        // The machine goes on meanwhile.
        r.all(CommOp::Barrier, Element::U8, 0);
        r.synchronize();
        r.m.end_hangs();
        let e = abort.join().unwrap().unwrap_err();
        assert!(e.to_string().contains("hang"), "{e}");
    });
    r.m.comm_status(r.comms[0]).unwrap();
    // An error that the library finds by itself.
    r.m.add_fault(FaultRule::on("comm_status", When::Once, FaultAction::Fail(3)));
    assert!(matches!(r.m.comm_status(r.comms[0]), Err(Error::Driver { code: 3, .. })));
    r.m.comm_status(r.comms[0]).unwrap();
}

#[test]
fn a_straggler_and_overtaking_queues_change_no_result() {
    for seed in 0..30 {
        let (tp, dp) = two_communicators(4, seed);
        let sum = CommOp::AllReduce(Reduction::Sum);
        for r in [&tp, &dp] {
            r.prepare(|rank| input(rank, Element::F16, 16));
        }
        let action = if seed % 2 == 0 { FaultAction::Delay(50) } else { FaultAction::Reorder };
        tp.m.add_fault(FaultRule::on("enqueue", When::Probability(0.2), action));
        tp.all(sum, Element::F16, 16);
        tp.all(CommOp::AllToAll, Element::F16, 4);
        tp.synchronize();
        dp.all(sum, Element::F16, 16);
        dp.synchronize();
        for rank in 0..4 {
            assert_eq!(tp.received(rank, 32), model(CommOp::AllToAll, Element::F16, 4, rank, 4));
            assert_eq!(dp.received(rank, 32), model(sum, Element::F16, 16, rank, 4));
        }
        assert_eq!(tp.m.take_reports(), []);
    }
}

#[test]
fn the_same_seed_meets_in_the_same_way() {
    let run = |seed| {
        let m = Machine::new(config(seed).devices(8, 16 << 20).trace(true)).unwrap();
        let r = ranks_of(m);
        r.prepare(|rank| input(rank, Element::F32, 8));
        for _ in 0..3 {
            r.all(CommOp::AllReduce(Reduction::Sum), Element::F32, 8);
        }
        r.synchronize();
        r.m.take_trace()
    };
    assert_eq!(run(5), run(5));
    assert_ne!(run(5), run(6));
}

/// A step of a program that all ranks run: a collective of one of two communicators, whose queues
/// wait for each other.
#[derive(Debug, Clone, Copy)]
struct Collective {
    second: bool,
    op: CommOp,
    element: Element,
    count: u64,
}

fn collective(size: u32) -> impl Strategy<Value = Collective> {
    let op = proptest::sample::select(collectives(size));
    let element = proptest::sample::select(&Element::ALL[..]);
    (any::<bool>(), op, element, 0..9u64).prop_map(|(second, op, element, count)| Collective {
        second,
        op,
        element,
        count,
    })
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 64, ..ProptestConfig::default() })]

    /// With an order on each device, ranks may enqueue at any time and meet as the model says.
    #[test]
    fn a_legal_program_of_all_ranks_computes_what_the_model_does(
        (size, program) in (1..6u32).prop_flat_map(|size| {
            (Just(size), proptest::collection::vec(collective(size), 1..12))
        }),
        seed in any::<u64>(),
    ) {
        let (tp, dp) = two_communicators(size, seed);
        for r in [&tp, &dp] {
            r.prepare(|_| vec![0xee; ROOM as usize]);
        }
        // The seed picks the rank that enqueues its next step.
        let mut next = vec![0; size as usize];
        let mut bits = seed;
        let mut expected = vec![vec![]; size as usize];
        while next.iter().any(|&at| at < program.len()) {
            bits = bits.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
            let rank = (bits >> 33) as usize % size as usize;
            let Some(step) = program.get(next[rank]) else { continue };
            next[rank] += 1;
            let (r, other) = if step.second { (&dp, &tp) } else { (&tp, &dp) };
            let bytes = input(rank, step.element, step.count * u64::from(size));
            let host = r.m.host_alloc(ROOM).unwrap();
            r.m.poke(host, &bytes).unwrap();
            r.m.host_write(host, ROOM);
            let q = r.queues[rank];
            copy(&r.m, q, host, r.from[rank], bytes.len() as u64);
            r.enqueue(rank, step.op, step.element, step.count);
            let result = model(step.op, step.element, step.count, rank, size as usize);
            let out = r.m.host_alloc(ROOM).unwrap();
            copy(&r.m, q, r.to[rank], out, result.len() as u64);
            expected[rank].push((out, result));
            let e = r.m.event_create(rank as u32, false).unwrap();
            r.m.enqueue(q, Command::Record(e)).unwrap();
            r.m.enqueue(other.queues[rank], Command::WaitEvent(e)).unwrap();
            if bits >> 62 == 0 {
                r.m.poll();
            }
        }
        tp.synchronize();
        dp.synchronize();
        for (rank, results) in expected.into_iter().enumerate() {
            for (i, (at, result)) in results.into_iter().enumerate() {
                prop_assert_eq!(peek(&tp.m, at, result.len()), result, "rank {}, step {}", rank, i);
            }
        }
        prop_assert_eq!(tp.m.take_reports(), []);
    }
}
