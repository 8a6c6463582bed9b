//! Meetings of ranks: the machines, communicators and values that the tests of all kinds use.

mod dead_locks;
mod misuse;
mod order;
mod values;

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
