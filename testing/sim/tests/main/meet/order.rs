//! Order and virtual time: races, graphs, and programs of all ranks.

use super::*;

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
            let exec = r.m.instantiate(0, r.m.capture_end(r.queues[0]).unwrap()).unwrap();
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
                let exec = r.m.instantiate(0, graph).unwrap();
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
