//! The values of calls, against a model.

use super::*;

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
