//! Wrong programs, aborts, arguments that cannot be, and the beginning of communicators.

use super::*;

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
    let exec = r.m.instantiate(0, r.m.capture_end(r.queues[0]).unwrap()).unwrap();
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
    let exec = r.m.instantiate(0, r.m.capture_end(r.queues[0]).unwrap()).unwrap();
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
        (join("tp", 1025, 1024, 1), "rank 1024 of 1025"),
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
    let m = Machine::new(config(1).devices(3, 1 << 20).timeout(Duration::from_secs(10))).unwrap();
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
