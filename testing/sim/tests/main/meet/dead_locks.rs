//! Calls that wait for each other, and those that wait in vain.

use super::*;

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
