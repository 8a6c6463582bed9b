//! Loops and branches of graphs: rounds that the detector tells apart, and loops without an end.

use crate::{bind, config, fill, launch, machine, peek};
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_hal::{Access, ConditionalKind};
use leasehold_sim::{
    Command, Condition, EventId, FillCall, GraphId, Kernel, KernelBody, KernelCall, KernelSpec,
    Machine, Node, NodeId, QueueId, ReportKind,
};

/// Bytes of each range of these tests.
const BYTES: u64 = 64;

/// A machine with a queue, and memory of zeros: a flag and two ranges.
struct Bench {
    machine: Machine,
    queue: QueueId,
    flag: u64,
    x: u64,
    y: u64,
}

impl Bench {
    fn new(machine: Machine) -> Self {
        let queue = machine.queue_create(0).unwrap();
        let [flag, x, y] = [0; 3].map(|_| machine.alloc(0, BYTES).unwrap());
        let new = Self { machine, queue, flag, x, y };
        [flag, x, y].into_iter().for_each(|at| fill(&new.machine, queue, at, BYTES, 0));
        new
    }

    /// Adds to each byte of a range.
    fn bump(&self, at: u64, bytes: u64, by: u8) -> Node {
        Node::Kernel(launch(&self.machine, "bump", &[(at, bytes)], &[by]))
    }

    fn graph(&self, nodes: &[(Node, &[u32])]) -> GraphId {
        let graph = self.machine.graph_create().unwrap();
        for (node, deps) in nodes {
            let deps: Vec<_> = deps.iter().map(|&d| NodeId(d)).collect();
            self.machine.graph_add(graph, node.clone(), &deps).unwrap();
        }
        graph
    }

    fn conditional(&self, kind: ConditionalKind, nodes: &[(Node, &[u32])]) -> Node {
        let condition = Condition::Flag(self.flag);
        Node::Conditional { kind, name: "the loop".into(), condition, body: self.graph(nodes) }
    }

    /// Sets the flag and launches the graph once.
    fn run(&self, flag: u8, nodes: &[(Node, &[u32])]) {
        fill(&self.machine, self.queue, self.flag, 1, flag);
        let exec = self.machine.instantiate(0, self.graph(nodes)).unwrap();
        self.machine.enqueue(self.queue, Command::Launch(exec)).unwrap();
        self.machine.run_until_idle();
    }

    /// The first byte of a range.
    fn byte(&self, at: u64) -> u8 {
        peek(&self.machine, at, 1)[0]
    }

    fn raced(&self) -> bool {
        self.machine.take_reports().iter().any(|r| r.kind == ReportKind::Unordered)
    }
}

#[test]
fn rounds_follow_each_other_and_the_nodes_around_them() {
    for seed in 0..30 {
        let b = Bench::new(machine(seed));
        // In a body without edges, both ends come before the next round.
        let inner = [(b.bump(b.x, BYTES, 1), &[][..]), (b.bump(b.flag, 1, 255), &[])];
        let around = [
            (b.bump(b.x, BYTES, 7), &[][..]),
            (b.conditional(ConditionalKind::While, &inner), &[0]),
            (b.bump(b.x, BYTES, 100), &[1]),
            (b.conditional(ConditionalKind::If, &[(b.bump(b.x, BYTES, 50), &[])]), &[2]),
        ];
        b.run(20, &around);
        assert_eq!((b.byte(b.x), b.byte(b.flag)), (127, 0), "seed {seed}");
        assert_eq!(b.machine.take_reports(), [], "seed {seed}");
    }
}

#[test]
fn a_node_beside_a_loop_races_with_its_body() {
    for seed in 0..30 {
        let b = Bench::new(machine(seed));
        let inner = [(b.bump(b.x, BYTES, 1), &[][..]), (b.bump(b.flag, 1, 255), &[])];
        let while_x = b.conditional(ConditionalKind::While, &inner);
        b.run(3, &[(while_x.clone(), &[]), (b.bump(b.y, BYTES, 1), &[])]);
        assert_eq!(b.machine.take_reports(), [], "other memory, seed {seed}");
        b.run(3, &[(while_x.clone(), &[]), (b.bump(b.x, BYTES, 1), &[])]);
        assert!(b.raced(), "the body's memory, seed {seed}");
        b.run(3, &[(while_x, &[]), (b.bump(b.flag, 1, 0), &[])]);
        assert!(b.raced(), "the flag, seed {seed}");
    }
}

#[test]
fn nodes_of_one_body_race_within_a_round() {
    for seed in 0..30 {
        let b = Bench::new(machine(seed));
        let inner = [
            (b.bump(b.x, BYTES, 1), &[][..]),
            (b.bump(b.x, BYTES, 1), &[]),
            (b.bump(b.flag, 1, 255), &[]),
        ];
        b.run(1, &[(b.conditional(ConditionalKind::While, &inner), &[])]);
        assert!(b.raced(), "seed {seed}");
    }
}

#[test]
fn a_loop_in_a_loop_begins_anew_in_each_round() {
    for seed in 0..30 {
        let b = Bench::new(machine(seed));
        let [outer, rounds] = [b.flag, b.y];
        let mut inner = b.conditional(
            ConditionalKind::While,
            &[(b.bump(b.x, BYTES, 1), &[]), (b.bump(rounds, 1, 255), &[0])],
        );
        if let Node::Conditional { condition, .. } = &mut inner {
            *condition = Condition::Flag(rounds);
        }
        let three = Node::Fill(FillCall::linear(rounds, 1, 3, 1));
        let body = [(three, &[][..]), (inner, &[0]), (b.bump(outer, 1, 255), &[])];
        b.run(5, &[(b.conditional(ConditionalKind::While, &body), &[])]);
        assert_eq!(b.byte(b.x), 15, "seed {seed}");
        assert_eq!(b.machine.take_reports(), [], "seed {seed}");
    }
}

#[test]
fn a_loop_without_an_end_is_named() {
    let b = Bench::new(Machine::new(config(1).loop_bound(10)).unwrap());
    let body = [(b.bump(b.x, BYTES, 1), &[][..]), (b.bump(b.flag, 1, 0), &[])];
    b.run(1, &[(b.conditional(ConditionalKind::While, &body), &[])]);
    let failure = b.machine.queue_failure(b.queue).unwrap().expect("the loop has no end");
    let text = failure.cause.to_string();
    for part in ["the loop", "10 times", "loop_bound"] {
        assert!(text.contains(part), "{part} is not in: {text}");
    }
    assert!(b.byte(b.x) <= 10);
    // As many rounds as that are no fault.
    let b = Bench::new(Machine::new(config(1).loop_bound(10)).unwrap());
    let body = [(b.bump(b.x, BYTES, 1), &[][..]), (b.bump(b.flag, 1, 255), &[])];
    b.run(10, &[(b.conditional(ConditionalKind::While, &body), &[])]);
    assert_eq!(b.byte(b.x), 10);
}

#[test]
fn a_word_of_the_driver_decides_too() {
    let b = Bench::new(machine(3));
    let word = Arc::new(AtomicU32::new(0));
    let (set, flag) = (word.clone(), bind(b.flag, 4, Access::Read));
    let run = KernelBody::run(move |launch| {
        // SAFETY: the machine checked the binding.
        set.store(unsafe { launch.pointer::<u32>(0).0.read_unaligned() }, Ordering::Release);
        Ok(())
    });
    let spec = KernelSpec::new(&[Access::Read], 0, run);
    let kernel = Arc::new(Kernel { name: "set the condition".into(), spec });
    let set = Node::Kernel(KernelCall::new(kernel, vec![flag], Vec::new()));
    let body = b.graph(&[
        (b.bump(b.x, BYTES, 1), &[]),
        (b.bump(b.flag, 1, 255), &[]),
        (set.clone(), &[1]),
    ]);
    let (kind, condition) = (ConditionalKind::While, Condition::Cell(word));
    let part = Node::Conditional { kind, name: "part".into(), condition, body };
    b.run(4, &[(set, &[]), (part, &[0])]);
    assert_eq!(b.byte(b.x), 4);
    assert_eq!(b.machine.take_reports(), []);
}

#[test]
fn a_body_that_cannot_run_again_is_refused() {
    let b = Bench::new(machine(4));
    let event: EventId = b.machine.event_create(0, false).unwrap();
    for node in [Node::Record(event), Node::WaitEvent(event)] {
        let part = b.conditional(ConditionalKind::If, &[(node, &[])]);
        let graph = b.graph(&[(part, &[])]);
        let refused = b.machine.instantiate(0, graph).unwrap_err();
        assert!(matches!(refused, Error::Unsupported(_)), "{refused}");
    }
}

#[test]
fn a_body_belongs_to_its_graph() {
    let b = Bench::new(machine(5));
    let part = b.conditional(ConditionalKind::While, &[(b.bump(b.x, BYTES, 1), &[])]);
    let Node::Conditional { body, .. } = part else { unreachable!() };
    let graph = b.graph(&[(part.clone(), &[])]);
    // Its nodes are those of the time when an executable graph is made.
    b.machine.graph_add(body, b.bump(b.flag, 1, 255), &[NodeId(0)]).unwrap();
    let exec = b.machine.instantiate(0, graph).unwrap();
    assert_eq!(b.machine.exec_len(exec).unwrap(), 4, "head, two nodes, end");
    let itself = b.machine.graph_add(body, part, &[]).unwrap_err();
    assert!(matches!(itself, Error::InvalidArgument(_)), "{itself}");
    b.machine.graph_destroy(graph).unwrap();
    assert!(matches!(b.machine.graph_destroy(body), Err(Error::NotFound(_))));
    b.machine.exec_destroy(exec).unwrap();
}

#[test]
fn a_graph_may_begin_with_an_empty_child() {
    let b = Bench::new(machine(6));
    let child = b.graph(&[]);
    let graph = b.graph(&[(Node::Child(child), &[]), (b.bump(b.x, BYTES, 1), &[0])]);
    let exec = b.machine.instantiate(0, graph).unwrap();
    assert_eq!(b.machine.exec_len(exec).unwrap(), 1);
    b.machine.exec_destroy(exec).unwrap();
}
