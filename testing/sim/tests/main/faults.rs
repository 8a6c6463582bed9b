//! Faults on demand: each call at each index, and the state that stays sound.

use crate::{config, copy, fill, launch, machine, peek};
use leasehold_core::{Error, Result};
use leasehold_sim::{
    Command, FaultAction, FaultPlan, FaultRule, FillCall, GRANULARITY, Machine, Node, Transfer,
    When,
};

/// A program that calls nearly every function, returns all resources, and computes a result.
fn program(m: &Machine) -> Result<Vec<u8>> {
    let mut undo: Vec<Box<dyn FnOnce()>> = Vec::new();
    let result = (|| {
        let q = m.queue_create(0)?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.queue_destroy(q)
        }));
        let at = m.alloc(0, 64)?;
        undo.push(Box::new({
            let m = m.clone();
            move || {
                _ = m.device_synchronize(0, None);
                _ = m.free(at)
            }
        }));
        let host = m.host_alloc(64)?;
        undo.push(Box::new({
            let m = m.clone();
            move || {
                _ = m.device_synchronize(0, None);
                _ = m.host_free(host)
            }
        }));
        let range = m.reserve(GRANULARITY, 0)?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.release(range, GRANULARITY)
        }));
        let piece = m.create(0, GRANULARITY)?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.destroy(piece)
        }));
        m.map(range, piece)?;
        undo.push(Box::new({
            let m = m.clone();
            move || {
                _ = m.device_synchronize(0, None);
                _ = m.unmap(range, GRANULARITY)
            }
        }));
        m.set_access(0, range, GRANULARITY)?;
        let e = m.event_create(0, true)?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.event_destroy(e)
        }));
        m.enqueue(q, Command::Fill(FillCall::linear(at, 64, 3, 1)))?;
        m.enqueue(q, Command::Copy(Transfer::linear(at, range, 64)))?;
        m.enqueue(q, Command::Record(e))?;
        let g = m.graph_create()?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.graph_destroy(g)
        }));
        let bump = m.graph_add(g, Node::Kernel(launch(m, "bump", &[(range, 64)], &[1])), &[])?;
        m.graph_add(g, Node::Copy(Transfer::linear(range, host, 64)), &[bump])?;
        let exec = m.instantiate(0, g)?;
        undo.push(Box::new({
            let m = m.clone();
            move || _ = m.exec_destroy(exec)
        }));
        m.enqueue(q, Command::Launch(exec))?;
        m.event_synchronize(e, None)?;
        m.queue_synchronize(q, None)?;
        Ok(peek(m, host, 64))
    })();
    // The cleanup must work after any failure, so the faults end before it.
    m.set_faults(FaultPlan::none());
    undo.into_iter().rev().for_each(|f| f());
    result
}

#[test]
fn every_call_can_fail_and_nothing_is_left_over() {
    let m = machine(1);
    assert_eq!(program(&m).unwrap(), [4; 64]);
    let calls = m.calls_by_name();
    let in_all = calls.iter().map(|c| c.1).sum::<u64>();
    assert_eq!(in_all, m.calls());
    assert!(in_all > 20);
    for action in [FaultAction::OutOfMemory, FaultAction::Fail(42)] {
        let mut failed = 0;
        for k in 0..in_all {
            let m = Machine::new(
                config(k)
                    .faults(FaultPlan::none().with(FaultRule::any(When::At(k), action.clone()))),
            )
            .unwrap();
            match program(&m) {
                Err(Error::OutOfMemory(_)) if action == FaultAction::OutOfMemory => failed += 1,
                Err(Error::Driver { code: 42, .. }) if action == FaultAction::Fail(42) => {
                    failed += 1
                }
                Err(e) => panic!("call {k}: {e}"),
                // Calls of the cleanup do not fail any more.
                Ok(bytes) => assert_eq!(bytes, [4; 64]),
            }
            assert!(m.memory_in_use().is_nothing(), "call {k}: {:?}", m.memory_in_use());
            let objects = m.objects();
            assert_eq!(
                (objects.queues, objects.events, objects.graphs, objects.execs),
                (0, 0, 0, 0),
                "call {k}"
            );
            assert_eq!(m.take_reports(), [], "call {k}");
            // The machine works as before.
            assert_eq!(program(&m).unwrap(), [4; 64], "call {k}");
        }
        assert!(failed > 15, "only {failed} calls failed");
    }
}

#[test]
fn a_device_that_is_lost_at_any_call_stays_lost_and_nobody_hangs() {
    let calls = {
        let m = machine(1);
        program(&m).unwrap();
        m.calls()
    };
    for k in 0..calls {
        let m =
            Machine::new(config(k).faults(
                FaultPlan::none().with(FaultRule::any(When::At(k), FaultAction::DeviceLost)),
            ))
            .unwrap();
        if let Err(e) = program(&m) {
            assert_eq!(e.kind(), "DeviceLost", "call {k}");
            assert!(e.to_string().contains(&format!("call {k} ")), "call {k}: {e}");
            assert_eq!(m.queue_create(0).unwrap_err().to_string(), e.to_string());
        }
    }
}

#[test]
fn calls_are_counted_by_name_and_rules_apply_to_one() {
    let m = machine(2);
    m.set_faults(FaultPlan::none().with(FaultRule::on(
        "alloc",
        When::At(2),
        FaultAction::OutOfMemory,
    )));
    m.queue_create(0).unwrap();
    let results: Vec<bool> = (0..5).map(|_| m.alloc(0, 64).is_ok()).collect();
    assert_eq!(results, [true, true, false, true, true]);
    assert_eq!(m.calls(), 6);
    assert_eq!(m.calls_by_name(), [("alloc".to_owned(), 5), ("queue_create".to_owned(), 1)]);
    m.set_faults(FaultPlan::none().with(FaultRule::on(
        "alloc",
        When::From(6),
        FaultAction::Fail(7),
    )));
    let results: Vec<bool> = (0..3).map(|_| m.alloc(0, 64).is_ok()).collect();
    assert_eq!(results, [true, false, false]);
    m.set_faults(
        FaultPlan::none().with(FaultRule::any(When::Probability(0.5), FaultAction::Fail(7))),
    );
    let passed = (0..1000).filter(|_| m.alloc(0, 64).is_ok()).count();
    assert!((400..600).contains(&passed), "{passed} of 1,000");
    m.set_faults(FaultPlan::none().with(FaultRule::any(When::Always, FaultAction::Fail(7))));
    assert!(m.alloc(0, 64).is_err() && m.queue_create(0).is_err());
}

#[test]
fn a_layer_above_counts_its_own_calls_in_the_same_plan() {
    let m = Machine::new(config(3).count_calls(false)).unwrap();
    m.set_faults(FaultPlan::none().with(FaultRule::on(
        "cuMemAlloc",
        When::At(1),
        FaultAction::OutOfMemory,
    )));
    m.note(0, "cuMemAlloc").unwrap();
    m.alloc(0, 64).unwrap();
    assert_eq!(m.note(0, "cuMemAlloc").unwrap_err().kind(), "OutOfMemory");
    assert_eq!(m.calls(), 2);
    m.set_faults(FaultPlan::none().with(FaultRule::any(When::Always, FaultAction::DeviceLost)));
    assert_eq!(m.note(0, "cuCtxSynchronize").unwrap_err().kind(), "DeviceLost");
    assert_eq!(m.alloc(0, 64).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn delayed_and_reordered_commands_let_others_overtake_and_are_not_lost() {
    for action in [FaultAction::Delay(50), FaultAction::Reorder] {
        for seed in 0..20 {
            let m = machine(seed);
            let (a, b) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
            let (x, y) = (m.alloc(0, 8).unwrap(), m.alloc(0, 8).unwrap());
            let e = m.event_create(0, true).unwrap();
            let first = m.calls();
            m.set_faults(FaultPlan::none().with(FaultRule::any(When::At(first), action.clone())));
            fill(&m, a, x, 8, 1);
            m.enqueue(a, Command::Record(e)).unwrap();
            for i in 0..20 {
                fill(&m, b, y, 8, i);
            }
            while peek(&m, y, 1) != [19] {
                assert!(m.step());
            }
            assert_eq!(peek(&m, x, 1), [0], "{action:?}, seed {seed}: it was not held back");
            m.device_synchronize(0, None).unwrap();
            assert_eq!(peek(&m, x, 1), [1]);
        }
    }
}

#[test]
fn a_late_callback_is_late_and_holds_up_its_own_queue_only() {
    let m = machine(4);
    let (a, b, at) =
        (m.queue_create(0).unwrap(), m.queue_create(0).unwrap(), m.alloc(0, 16).unwrap());
    m.set_faults(FaultPlan::none().with(FaultRule::on(
        "enqueue",
        When::At(0),
        FaultAction::LateCallback(100),
    )));
    m.enqueue(a, Command::Host { name: "late".into(), call: Box::new(|| {}), always: false })
        .unwrap();
    fill(&m, a, at, 8, 1);
    for i in 1..10 {
        fill(&m, b, at + 8, 8, i);
        m.queue_synchronize(b, None).unwrap();
    }
    assert_eq!(peek(&m, at, 1), [0]);
    m.queue_synchronize(a, None).unwrap();
    assert_eq!(peek(&m, at, 1), [1]);
}

#[test]
fn a_lost_device_drops_what_was_pending_and_lets_others_go() {
    let m = Machine::new(config(5).devices(2, 1 << 20)).unwrap();
    let (a, b) = (m.queue_create(0).unwrap(), m.queue_create(1).unwrap());
    let (e, at) = (m.event_create(0, false).unwrap(), m.alloc(1, 8).unwrap());
    let alive = leasehold_core::sync::Arc::new(());
    let held = alive.clone();
    let call = Box::new(move || drop(held));
    m.enqueue(a, Command::Host { name: "never".into(), call, always: true }).unwrap();
    m.enqueue(a, Command::Record(e)).unwrap();
    m.enqueue(b, Command::WaitEvent(e)).unwrap();
    fill(&m, b, at, 8, 1);
    m.lose_device(0, "pulled out");
    assert_eq!(leasehold_core::sync::Arc::strong_count(&alive), 1, "the closure was kept");
    m.queue_synchronize(b, None).unwrap();
    assert_eq!(peek(&m, at, 8), [1; 8]);
    let e = m.queue_synchronize(a, None).unwrap_err();
    assert!(e.to_string().contains("pulled out"), "{e}");
    copy(&m, b, at, at, 0);
}
