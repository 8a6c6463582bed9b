//! The machine: memory, queues, events, words, semaphores, graphs, host functions, time.

use crate::{config, copy, fill, launch, machine, peek};
use leasehold_core::Error;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_sim::{
    Command, DEVICE_BASE, FaultScope, FillCall, GRANULARITY, KernelBody, Machine, MachineConfig,
    Node, NodeUpdate, PartitionId, Stepping, Transfer,
};
use std::time::Duration;

#[test]
fn enqueuing_never_executes() {
    let m = Machine::new(config(1).stepping(Stepping::Manual)).unwrap();
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 64).unwrap());
    fill(&m, q, at, 64, 9);
    assert_eq!(peek(&m, at, 64), [0; 64]);
    let e = m.queue_synchronize(q, Some(Duration::from_millis(2))).unwrap_err();
    assert_eq!(e.kind(), "Timeout");
    assert!(m.step());
    assert!(!m.step());
    m.queue_synchronize(q, Some(Duration::ZERO)).unwrap();
    assert_eq!(peek(&m, at, 64), [9; 64]);
}

#[test]
fn device_addresses_are_no_addresses_of_the_host() {
    let m = machine(1);
    assert!(m.alloc(0, 1).unwrap() >= DEVICE_BASE);
    assert!(m.reserve(GRANULARITY, 0).unwrap() >= DEVICE_BASE);
    assert!(m.host_alloc(1).unwrap() < DEVICE_BASE);
}

#[test]
fn fills_and_copies_with_pitches() {
    let m = machine(2);
    let (q, a, b) =
        (m.queue_create(0).unwrap(), m.alloc(0, 256).unwrap(), m.alloc(0, 256).unwrap());
    fill(&m, q, a, 256, 0);
    fill(&m, q, b, 256, 0xee);
    let part = FillCall { dst: a + 2, pitch: 16, width: 6, rows: 3, pattern: 0xbbaa, unit: 2 };
    m.enqueue(q, Command::Fill(part)).unwrap();
    let c = Transfer::rows((a, 16), (b + 1, 10), 8, 3);
    m.enqueue(q, Command::Copy(c)).unwrap();
    m.queue_synchronize(q, None).unwrap();
    let mut expected = vec![0xee; 256];
    for row in 0..3 {
        expected[1 + row * 10..9 + row * 10]
            .copy_from_slice(&[0, 0, 0xaa, 0xbb, 0xaa, 0xbb, 0xaa, 0xbb]);
    }
    assert_eq!(peek(&m, b, 256), expected);
    m.enqueue(q, Command::Fill(FillCall::linear(a, 8, 0x0102_0304, 4))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, a, 8), [4, 3, 2, 1, 4, 3, 2, 1]);
    for bad in [
        FillCall::linear(a + 1, 8, 1, 2),
        FillCall::linear(a, 7, 1, 2),
        FillCall::linear(a, 9, 1, 3),
    ] {
        assert_eq!(m.enqueue(q, Command::Fill(bad)).unwrap_err().kind(), "InvalidArgument");
    }
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_piece_is_one_memory_wherever_it_is_mapped() {
    let m = machine(3);
    let q = m.queue_create(0).unwrap();
    let at = m.reserve(4 * GRANULARITY, 0).unwrap();
    let (x, y) = (m.create(0, GRANULARITY).unwrap(), m.create(0, GRANULARITY).unwrap());
    assert_eq!(m.device_memory(0).unwrap().0, 2 * GRANULARITY);
    m.map(at, x).unwrap();
    m.map(at + GRANULARITY, y).unwrap();
    m.map(at + 2 * GRANULARITY, x).unwrap();
    m.set_access(0, at, 3 * GRANULARITY).unwrap();
    // A range over both pieces, and the first piece again through its second address.
    fill(&m, q, at + GRANULARITY - 16, 32, 7);
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, at + 3 * GRANULARITY - 16, 16), [7; 16]);
    // A piece that was mapped elsewhere keeps its contents.
    m.unmap(at, 2 * GRANULARITY).unwrap();
    m.map(at, y).unwrap();
    m.set_access(0, at, GRANULARITY).unwrap();
    assert_eq!(peek(&m, at, 16), [7; 16]);
    assert!(m.peek(at + GRANULARITY, &mut [0]).is_err(), "an unmapped range is readable");
    assert_eq!(m.release(at, 4 * GRANULARITY).unwrap_err().kind(), "InvalidArgument");
    // Destroyed while it is mapped, a piece is freed with its last mapping.
    m.destroy(x).unwrap();
    assert_eq!(m.memory_in_use().pieces, 2);
    m.unmap(at + 2 * GRANULARITY, GRANULARITY).unwrap();
    m.unmap(at, GRANULARITY).unwrap();
    m.destroy(y).unwrap();
    m.release(at, 4 * GRANULARITY).unwrap();
    assert!(m.memory_in_use().is_nothing(), "{:?}", m.memory_in_use());
    assert_eq!(m.take_reports(), []);
}

#[test]
fn mappings_are_refused_where_they_do_not_fit() {
    let m = machine(3);
    let at = m.reserve(2 * GRANULARITY, 0).unwrap();
    let x = m.create(0, GRANULARITY).unwrap();
    for bad in [at + 4096, at + 2 * GRANULARITY, at - GRANULARITY, 0] {
        assert_eq!(m.map(bad, x).unwrap_err().kind(), "InvalidArgument");
    }
    m.map(at, x).unwrap();
    assert_eq!(m.map(at, x).unwrap_err().kind(), "InvalidArgument");
    assert_eq!(m.unmap(at, 2 * GRANULARITY).unwrap_err().kind(), "InvalidArgument");
    assert_eq!(m.create(0, 4096).unwrap_err().kind(), "InvalidArgument");
    assert_eq!(m.reserve(4096, 0).unwrap_err().kind(), "InvalidArgument");
    // Without access no command reaches the piece.
    let q = m.queue_create(0).unwrap();
    fill(&m, q, at, 64, 1);
    assert_eq!(m.queue_synchronize(q, None).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn memory_runs_out_and_comes_back() {
    let m = Machine::new(config(0).devices(2, 8 << 20)).unwrap();
    let a = m.alloc(0, 5 << 20).unwrap();
    assert_eq!(m.alloc(0, 4 << 20).unwrap_err().kind(), "OutOfMemory");
    assert_eq!(m.create(0, 4 << 20).unwrap_err().kind(), "OutOfMemory");
    let other = m.alloc(1, 8 << 20).unwrap();
    m.free(a).unwrap();
    assert_eq!(m.free(a).unwrap_err().kind(), "InvalidArgument");
    m.free(m.alloc(0, 8 << 20).unwrap()).unwrap();
    m.free(other).unwrap();
    assert!(m.memory_in_use().is_nothing());
    for _ in 0..1000 {
        m.free(m.alloc(0, 3 << 20).unwrap()).unwrap();
    }
}

#[test]
fn peers_are_reached_by_copies_at_once_and_by_kernels_once_enabled() {
    let m = Machine::new(config(4).devices(2, 1 << 20)).unwrap();
    let (q, near, far) =
        (m.queue_create(0).unwrap(), m.alloc(0, 64).unwrap(), m.alloc(1, 64).unwrap());
    fill(&m, q, near, 64, 3);
    copy(&m, q, near, far, 64);
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, far, 64), [3; 64]);
    assert!(m.enable_peer(0, 1).unwrap());
    assert!(!m.enable_peer(0, 1).unwrap());
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(far, 64)], &[1]))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, far, 64), [4; 64]);
    assert!(m.disable_peer(0, 1).unwrap());
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(far, 64)], &[1]))).unwrap();
    let e = m.queue_synchronize(q, None).unwrap_err();
    assert!(matches!(&e, Error::DeviceLost { cause } if cause.contains("no access")), "{e}");
    // The other device is not affected.
    m.device_synchronize(1, None).unwrap();
    let there = m.queue_create(1).unwrap();
    fill(&m, there, far, 64, 1);
    m.queue_synchronize(there, None).unwrap();
}

#[test]
fn pinned_and_registered_memory_has_one_address() {
    let m = machine(5);
    let q = m.queue_create(0).unwrap();
    let at = m.host_alloc(4096).unwrap();
    m.enqueue(q, Command::Fill(FillCall::linear(at, 4096, 4, 1))).unwrap();
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(at, 4096)], &[1]))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    // SAFETY: pinned memory of the machine, which no command uses now.
    assert_eq!(unsafe { *(at as *const [u8; 4096]) }, [5; 4096]);
    let mut own = vec![1u8; 1000];
    let own_at = own.as_mut_ptr() as u64;
    // SAFETY: the vector lives to the end, and is read only while no command uses it.
    unsafe { m.host_register(own_at, 1000) }.unwrap();
    assert!(m.is_pinned(own_at + 10, 990) && !m.is_pinned(own_at + 10, 991));
    // SAFETY: the call is refused, because a part of the range is registered.
    assert_eq!(unsafe { m.host_register(own_at + 999, 8) }.unwrap_err().kind(), "InvalidState");
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(own_at, 1000)], &[1]))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    m.host_unregister(own_at).unwrap();
    assert_eq!(own, [2; 1000]);
    m.host_free(at).unwrap();
    assert!(m.memory_in_use().is_nothing());
    assert_eq!(m.take_reports(), []);
    // A kernel has no access to pageable memory.
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(own_at, 1000)], &[1]))).unwrap();
    assert_eq!(m.queue_synchronize(q, None).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn a_wait_binds_to_the_record_before_it() {
    for seed in 0..50 {
        let m = machine(seed);
        let (a, b, c) =
            (m.queue_create(0).unwrap(), m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
        let (word, at) = (m.host_alloc(8).unwrap(), m.alloc(0, 64).unwrap());
        let event = m.event_create(0, false).unwrap();
        assert!(m.event_query(event).unwrap(), "an event that was never recorded");
        m.enqueue(a, Command::WaitValue { addr: word, value: 1 }).unwrap();
        fill(&m, a, at, 64, 1);
        m.enqueue(a, Command::Record(event)).unwrap();
        m.enqueue(b, Command::WaitEvent(event)).unwrap();
        m.enqueue(c, Command::Record(event)).unwrap();
        fill(&m, b, at, 64, 2);
        m.event_synchronize(event, None).unwrap();
        assert!(!m.queue_query(b).unwrap(), "the second record released a wait for the first");
        m.host_store(word, 1).unwrap();
        m.device_synchronize(0, None).unwrap();
        assert_eq!(peek(&m, at, 64), [2; 64]);
        assert_eq!(m.take_reports(), []);
    }
}

#[test]
fn words_and_semaphores_wait_for_at_least_a_value() {
    let m = machine(6);
    let (a, b) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let (word, at) = (m.alloc(0, 8).unwrap(), m.alloc(0, 8).unwrap());
    m.enqueue(a, Command::WaitValue { addr: word, value: 5 }).unwrap();
    fill(&m, a, at, 8, 1);
    let s = m.semaphore_create(0).unwrap();
    m.enqueue(a, Command::Signal(s, 3)).unwrap();
    m.enqueue(b, Command::WaitSemaphore(s, 2)).unwrap();
    fill(&m, b, at, 8, 2);
    m.run_until_idle();
    assert_eq!(peek(&m, at, 8), [0; 8]);
    m.host_store(word, 4).unwrap();
    m.run_until_idle();
    assert_eq!(m.semaphore_value(s).unwrap(), 0);
    m.host_store(word, 7).unwrap();
    m.semaphore_wait(s, 3, None).unwrap();
    m.queue_synchronize(b, None).unwrap();
    assert_eq!(peek(&m, at, 8), [2; 8]);
    m.enqueue(b, Command::WriteValue { addr: word, value: 9 }).unwrap();
    m.queue_synchronize(b, None).unwrap();
    assert_eq!(m.host_load(word).unwrap(), 9);
    assert_eq!(m.take_reports(), []);
    // A failed semaphore fails the waits for more than its value.
    m.enqueue(b, Command::WaitSemaphore(s, 3)).unwrap();
    m.enqueue(b, Command::WaitSemaphore(s, 4)).unwrap();
    m.semaphore_fail(s, Error::state("the cause")).unwrap();
    let e = m.queue_synchronize(b, None).unwrap_err();
    assert!(e.to_string().contains("the cause"), "{e}");
    assert!(m.enqueue(b, Command::Empty).is_err(), "a failed queue takes work");
    m.enqueue(a, Command::Empty).unwrap();
}

/// A thread that runs everything must not wait for another thread's host function. The other thread
/// does the rest, although its own step is over.
#[test]
fn work_behind_a_host_function_of_another_thread_runs_when_everything_is_to_run() {
    let m = machine(7);
    let q = m.queue_create(0).unwrap();
    let at = m.alloc(0, 64).unwrap();
    let (begun, begins) = std::sync::mpsc::channel();
    let (release, released) = std::sync::mpsc::channel();
    let call = Box::new(move || {
        begun.send(()).unwrap();
        released.recv().unwrap();
    });
    m.enqueue(q, Command::Host { name: "waits".into(), call, always: false }).unwrap();
    fill(&m, q, at, 64, 1);
    std::thread::scope(|s| {
        s.spawn(|| assert!(m.step()));
        begins.recv().unwrap();
        assert_eq!(m.run_until_idle(), 0);
        release.send(()).unwrap();
    });
    assert_eq!(peek(&m, at, 64), [1; 64]);
}

#[test]
fn host_functions_run_without_the_lock_in_their_turn() {
    let m = machine(7);
    let (q, other) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let at = m.alloc(0, 64).unwrap();
    let seen = Arc::new(Mutex::new(Vec::new()));
    fill(&m, q, at, 64, 1);
    let (inner, log) = (m.clone(), seen.clone());
    let call = Box::new(move || {
        log.lock().push(peek(&inner, at, 1)[0]);
        // A host function may enqueue, and wait for another queue, but not for its own.
        fill(&inner, other, at, 64, 2);
        inner.queue_synchronize(other, None).unwrap();
        log.lock().push(peek(&inner, at, 1)[0]);
        assert_eq!(inner.queue_synchronize(q, None).unwrap_err().kind(), "InvalidState");
    });
    m.enqueue(q, Command::Host { name: "looks".into(), call, always: false }).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(*seen.lock(), [1, 2]);
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_host_function_that_panics_fails_its_queue_and_those_called_always_are_called() {
    let m = machine(8);
    let (q, other) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let calls = Arc::new(AtomicU32::new(0));
    m.enqueue(
        q,
        Command::Host {
            name: "panics".into(),
            call: Box::new(|| panic!("to be caught")),
            always: false,
        },
    )
    .unwrap();
    for always in [false, true] {
        let calls = calls.clone();
        let call = Box::new(move || _ = calls.fetch_add(1, Ordering::Relaxed));
        m.enqueue(q, Command::Host { name: "counts".into(), call, always }).unwrap();
    }
    let e = m.queue_synchronize(q, None).unwrap_err();
    assert!(e.to_string().contains("to be caught") && e.to_string().contains("panics"), "{e}");
    assert_eq!(calls.load(Ordering::Relaxed), 1);
    m.enqueue(other, Command::Empty).unwrap();
    m.queue_synchronize(other, None).unwrap();
}

#[test]
fn a_trap_ends_the_device_or_the_queue() {
    for scope in [FaultScope::Device, FaultScope::Queue] {
        let m = Machine::new(config(9).fault_scope(scope)).unwrap();
        let (q, other) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
        let (event, at) = (m.event_create(0, true).unwrap(), m.alloc(0, 8).unwrap());
        m.enqueue(q, Command::Kernel(launch(&m, "trap", &[], &[]))).unwrap();
        fill(&m, q, at, 8, 1);
        m.enqueue(q, Command::Record(event)).unwrap();
        let e = m.queue_synchronize(q, None).unwrap_err();
        assert!(e.to_string().contains("dispatch trap"), "{e}");
        assert!(m.queue_failure(q).unwrap().unwrap().operation.name.contains("trap"));
        match scope {
            FaultScope::Device => {
                assert_eq!(e.kind(), "DeviceLost");
                assert_eq!(m.enqueue(other, Command::Empty).unwrap_err().kind(), "DeviceLost");
                assert_eq!(m.alloc(0, 8).unwrap_err().kind(), "DeviceLost");
            }
            FaultScope::Queue => {
                assert_eq!(e.kind(), "Fault");
                m.enqueue(other, Command::Empty).unwrap();
                m.queue_synchronize(other, None).unwrap();
                assert_eq!(
                    m.event_time(event).unwrap(),
                    None,
                    "a record that did not run has a time"
                );
                assert!(m.event_query(event).unwrap(), "who waits for the event hangs");
            }
        }
        assert_eq!(peek(&m, at, 8), [0; 8], "what came after the trap ran");
    }
}

#[test]
fn an_illegal_address_loses_the_device_with_its_cause() {
    let m = machine(10);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 4096).unwrap());
    fill(&m, q, at + 4000, 97, 1);
    let e = m.queue_synchronize(q, None).unwrap_err();
    assert!(matches!(&e, Error::DeviceLost { cause } if cause.contains("illegal address")), "{e}");
    assert_eq!(m.device_status(0).unwrap_err().to_string(), e.to_string());
}

#[test]
fn a_kernel_that_polls_lets_others_go_on() {
    for seed in 0..20 {
        let m = machine(seed);
        let (a, b, at) =
            (m.queue_create(0).unwrap(), m.queue_create(0).unwrap(), m.host_alloc(8).unwrap());
        m.enqueue(a, Command::Kernel(launch(&m, "until", &[(at, 1)], &[]))).unwrap();
        assert!(!m.queue_query(a).unwrap());
        fill(&m, b, at, 1, 1);
        m.queue_synchronize(a, None).unwrap();
    }
}

#[test]
fn a_dead_lock_is_an_error_that_says_who_waits_for_what() {
    let m = machine(11);
    let (a, b) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let (x, y) = (m.semaphore_create(0).unwrap(), m.semaphore_create(0).unwrap());
    m.submit(a, vec![Command::WaitSemaphore(x, 1), Command::Signal(y, 1)]).unwrap();
    m.submit(b, vec![Command::WaitSemaphore(y, 1), Command::Signal(x, 1)]).unwrap();
    let e = m.queue_synchronize(a, None).unwrap_err();
    assert_eq!(e.kind(), "InvalidState");
    let text = e.to_string();
    assert!(
        text.contains("dead-lock")
            && text.contains(&format!(
                "queue {}, submission 0, waits for semaphore {} to go from 0 to 1",
                a.0, x.0
            ))
            && text.contains(&format!("queue {}, ", b.0))
            && !text.contains("Some("),
        "{text}"
    );
    m.semaphore_signal(x, 1).unwrap();
    m.device_synchronize(0, None).unwrap();
}

#[test]
fn another_thread_may_end_a_wait() {
    let m = Machine::new(config(12).timeout(Duration::from_secs(10))).unwrap();
    let (q, word) = (m.queue_create(0).unwrap(), m.host_alloc(8).unwrap());
    m.enqueue(q, Command::WaitValue { addr: word, value: 1 }).unwrap();
    let e = m.queue_synchronize(q, Some(Duration::from_millis(2))).unwrap_err();
    assert_eq!(e.kind(), "Timeout");
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| m.queue_synchronize(q, None));
        std::thread::sleep(Duration::from_millis(5));
        m.host_store(word, 1).unwrap();
        waiter.join().unwrap().unwrap();
    });
    // The waiting thread may also be the only one that steps.
    let m = Machine::new(config(12).stepping(Stepping::Manual)).unwrap();
    let q = m.queue_create(0).unwrap();
    m.enqueue(q, Command::Empty).unwrap();
    std::thread::scope(|scope| {
        let waiter = scope.spawn(|| m.queue_synchronize(q, None));
        std::thread::sleep(Duration::from_millis(5));
        assert!(m.step());
        waiter.join().unwrap().unwrap();
    });
}

#[test]
fn time_is_virtual_and_grows_with_work() {
    let m = machine(13);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 1 << 20).unwrap());
    let (start, end) = (m.event_create(0, true).unwrap(), m.event_create(0, true).unwrap());
    let mut last = 0;
    for fills in [0, 1, 10] {
        m.enqueue(q, Command::Record(start)).unwrap();
        (0..fills).for_each(|_| fill(&m, q, at, 1 << 20, 1));
        m.enqueue(q, Command::Record(end)).unwrap();
        m.queue_synchronize(q, None).unwrap();
        let took = m.event_time(end).unwrap().unwrap() - m.event_time(start).unwrap().unwrap();
        assert!(fills == 0 || took > last, "{fills} fills took {took} ns, fewer {last}");
        last = took;
    }
    let plain = m.event_create(0, false).unwrap();
    assert_eq!(m.event_time(plain).unwrap_err().kind(), "InvalidArgument");
    m.event_reset(end).unwrap();
    assert_eq!(m.event_time(end).unwrap(), None);
}

#[test]
fn a_graph_runs_in_an_order_that_its_edges_allow_and_updates_change_later_launches() {
    let mut orders = std::collections::BTreeSet::new();
    for seed in 0..40 {
        let m = machine(seed);
        let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 64).unwrap());
        let log = Arc::new(Mutex::new(Vec::new()));
        let note = |name: &'static str| {
            let log = log.clone();
            Node::Host { name: name.into(), call: Arc::new(move |_| log.lock().push(name)) }
        };
        let child = m.graph_create().unwrap();
        m.graph_add(child, note("inner one"), &[]).unwrap();
        m.graph_add(child, note("inner two"), &[]).unwrap();
        let g = m.graph_create().unwrap();
        let root = m.graph_add(g, Node::Fill(FillCall::linear(at, 64, 1, 1)), &[]).unwrap();
        let left = m.graph_add(g, note("left"), &[root]).unwrap();
        let inner = m.graph_add(g, Node::Child(child), &[root]).unwrap();
        let bump = m
            .graph_add(g, Node::Kernel(launch(&m, "bump", &[(at, 64)], &[1])), &[left, inner])
            .unwrap();
        m.graph_add(g, note("last"), &[bump]).unwrap();
        let exec = m.instantiate(0, g).unwrap();
        assert_eq!((m.graph_len(g).unwrap(), m.exec_len(exec).unwrap()), (5, 6));
        m.enqueue(q, Command::Launch(exec)).unwrap();
        // The launch keeps its parameters from the time of the enqueue.
        let other = NodeUpdate::Kernel(launch(&m, "bump", &[(at, 32)], &[5]));
        m.exec_update(exec, &[(bump, other)]).unwrap();
        m.queue_synchronize(q, None).unwrap();
        assert_eq!(peek(&m, at, 64), [2; 64]);
        let order = std::mem::take(&mut *log.lock());
        assert_eq!((order.len(), order[3]), (4, "last"), "{order:?}");
        orders.insert(order);
        m.enqueue(q, Command::Launch(exec)).unwrap();
        m.exec_destroy(exec).unwrap();
        m.graph_destroy(g).unwrap();
        m.queue_synchronize(q, None).unwrap();
        assert_eq!(peek(&m, at, 64), [[6; 32], [1; 32]].concat());
        assert_eq!(m.take_reports(), []);
    }
    assert_eq!(orders.len(), 6, "not all orders of three nodes were tried: {orders:?}");
}

#[test]
fn graphs_record_events_and_refuse_wrong_updates() {
    let m = machine(14);
    let (q, other) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let (event, at) = (m.event_create(0, true).unwrap(), m.alloc(0, 8).unwrap());
    let g = m.graph_create().unwrap();
    let set = m.graph_add(g, Node::Fill(FillCall::linear(at, 8, 1, 1)), &[]).unwrap();
    let record = m.graph_add(g, Node::Record(event), &[set]).unwrap();
    let exec = m.instantiate(0, g).unwrap();
    m.enqueue(q, Command::Launch(exec)).unwrap();
    m.enqueue(other, Command::WaitEvent(event)).unwrap();
    fill(&m, other, at, 8, 2);
    m.device_synchronize(0, None).unwrap();
    assert_eq!(peek(&m, at, 8), [2; 8]);
    assert!(m.event_time(event).unwrap().is_some());
    let wrong = NodeUpdate::Copy(Transfer::linear(at, at, 0));
    assert_eq!(m.exec_update(exec, &[(set, wrong.clone())]).unwrap_err().kind(), "InvalidArgument");
    assert_eq!(m.exec_update(exec, &[(record, wrong)]).unwrap_err().kind(), "InvalidArgument");
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_capture_takes_commands_into_a_graph() {
    let m = machine(15);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 8).unwrap());
    m.capture_begin(q).unwrap();
    fill(&m, q, at, 8, 1);
    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(at, 8)], &[1]))).unwrap();
    let call = Command::Host { name: "not here".into(), call: Box::new(|| {}), always: false };
    assert_eq!(m.enqueue(q, call).unwrap_err().kind(), "InvalidState");
    let g = m.capture_end(q).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!((m.graph_len(g).unwrap(), peek(&m, at, 8)), (2, vec![0; 8]));
    let exec = m.instantiate(0, g).unwrap();
    m.enqueue(q, Command::Launch(exec)).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, at, 8), [2; 8]);
    assert_eq!(m.capture_end(q).unwrap_err().kind(), "InvalidState");
}

#[test]
fn memory_in_a_queues_order() {
    let m = machine(16);
    let q = m.queue_create(0).unwrap();
    for value in 1..20 {
        let at = m.alloc_async(q, 1 << 20).unwrap();
        fill(&m, q, at, 1 << 20, value);
        m.free_async(q, at).unwrap();
    }
    m.queue_synchronize(q, None).unwrap();
    assert!(m.memory_in_use().is_nothing());
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_queue_that_is_given_up_finishes_and_its_agent_is_used_again() {
    let m = machine(17);
    let at = m.alloc(0, 8).unwrap();
    for value in 0..100u8 {
        let q = m.queue_create(0).unwrap();
        fill(&m, q, at, 8, value);
        m.queue_destroy(q).unwrap();
        assert_eq!(m.enqueue(q, Command::Empty).unwrap_err().kind(), "NotFound");
        m.device_synchronize(0, None).unwrap();
        assert_eq!(peek(&m, at, 8), [value; 8]);
    }
    assert_eq!(m.objects().queues, 0);
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_submission_is_all_or_nothing() {
    let m = machine(18);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 8).unwrap());
    let good = || Command::Fill(FillCall::linear(at, 8, 1, 1));
    let bad = Command::Fill(FillCall::linear(at, 7, 1, 2));
    assert_eq!(m.submit(q, vec![good(), bad]).unwrap_err().kind(), "InvalidArgument");
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(peek(&m, at, 8), [0; 8]);
}

#[test]
fn a_cpu_kernel_runs_over_all_tiles() {
    unsafe fn number(args: &leasehold_hal::CpuArgs<'_>) {
        let [gx, gy, _] = args.grid();
        let i = args.tile()[0] + gx * (args.tile()[1] + gy * args.tile()[2]);
        assert_eq!((args.shared().1, (args.shared().0 as usize) % 64), (100, 0));
        // SAFETY: each tile has its own element.
        unsafe { args.slice_mut::<u32>(0, i as usize, 1) }.fill(i + args.params::<u32>());
    }
    let m = machine(19);
    let spec = leasehold_sim::KernelSpec::new(
        &[leasehold_hal::Access::Write],
        4,
        // SAFETY: the one launch below has an element for each of its tiles.
        unsafe { KernelBody::cpu(number) },
    );
    m.kernels().register("number", spec);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 96).unwrap());
    let mut call = launch(&m, "number", &[(at, 96)], &7u32.to_le_bytes()).grid([2, 3, 4]);
    call.shared = 100;
    m.enqueue(q, Command::Kernel(call)).unwrap();
    m.queue_synchronize(q, None).unwrap();
    let expected: Vec<u8> = (7..31u32).flat_map(u32::to_le_bytes).collect();
    assert_eq!(peek(&m, at, 96), expected);
}

#[test]
fn a_machine_of_no_devices_is_refused() {
    assert_eq!(
        Machine::new(MachineConfig::seed(0).devices(0, 1)).unwrap_err().kind(),
        "InvalidArgument"
    );
    assert_eq!(
        Machine::new(MachineConfig::seed(0).devices(1025, 1)).unwrap_err().kind(),
        "InvalidArgument"
    );
    assert_eq!(machine(0).queue_create(1).unwrap_err().kind(), "NotFound");
}

#[test]
fn devices_beyond_the_first_64_have_peers_and_access_of_their_own() {
    let m = Machine::new(MachineConfig::seed(3).devices(200, 1 << 22)).unwrap();
    assert!(m.enable_peer(199, 135).unwrap() && !m.enable_peer(199, 135).unwrap());
    assert!(m.enable_peer(199, 7).unwrap() && m.enable_peer(135, 199).unwrap());
    assert!(m.disable_peer(199, 135).unwrap() && !m.disable_peer(199, 135).unwrap());
    assert!(m.disable_peer(199, 7).unwrap() && m.disable_peer(135, 199).unwrap());
}

#[test]
fn new_memory_can_be_poisoned() {
    let m = Machine::new(config(20).poison(0xa5)).unwrap();
    let (at, range) = (m.alloc(0, 64).unwrap(), m.reserve(GRANULARITY, 0).unwrap());
    assert_eq!(peek(&m, at, 64), [0xa5; 64]);
    let piece = m.create(0, GRANULARITY).unwrap();
    let q = m.queue_create(0).unwrap();
    for value in [0xa5, 1] {
        m.map(range, piece).unwrap();
        m.set_access(0, range, GRANULARITY).unwrap();
        assert_eq!(peek(&m, range, 64), [value; 64]);
        fill(&m, q, range, 64, 1);
        m.queue_synchronize(q, None).unwrap();
        m.unmap(range, GRANULARITY).unwrap();
    }
}

#[test]
fn what_concerns_no_device_goes_on_when_one_is_lost() {
    let m = Machine::new(config(21).devices(2, 1 << 22)).unwrap();
    let piece = m.create(1, GRANULARITY).unwrap();
    m.lose_device(0, "gone");
    let range = m.reserve(GRANULARITY, 0).unwrap();
    m.map(range, piece).unwrap();
    m.set_access(1, range, GRANULARITY).unwrap();
    m.host_free(m.host_alloc(64).unwrap()).unwrap();
    let (q, e) = (m.queue_create(1).unwrap(), m.event_create(1, false).unwrap());
    m.enqueue(q, Command::Record(e)).unwrap();
    m.event_synchronize(e, None).unwrap();
    assert_eq!(m.event_create(0, false).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn eight_threads_share_a_machine() {
    let m = Machine::new(config(22).timeout(Duration::from_secs(10))).unwrap();
    let calls = Arc::new(AtomicU32::new(0));
    std::thread::scope(|scope| {
        for thread in 0..8u8 {
            let (m, calls) = (m.clone(), calls.clone());
            scope.spawn(move || {
                let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 4096).unwrap());
                for round in 0..50u8 {
                    let value = thread.wrapping_mul(50).wrapping_add(round);
                    fill(&m, q, at, 4096, value);
                    m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(at, 4096)], &[1]))).unwrap();
                    let calls = calls.clone();
                    let call = Box::new(move || _ = calls.fetch_add(1, Ordering::Relaxed));
                    m.enqueue(q, Command::Host { name: "counts".into(), call, always: false })
                        .unwrap();
                    m.queue_synchronize(q, None).unwrap();
                    assert_eq!(peek(&m, at, 4096), vec![value.wrapping_add(1); 4096]);
                }
                m.free(at).unwrap();
                m.queue_destroy(q).unwrap();
            });
        }
    });
    assert_eq!(calls.load(Ordering::Relaxed), 400);
    assert!(m.memory_in_use().is_nothing());
    assert_eq!(m.take_reports(), []);
}

#[test]
fn host_memory_that_nobody_vouches_for_is_an_illegal_address() {
    let own = [7u8; 64];
    // The fault loses the device, as on a real one.
    let refused = |command: &dyn Fn(u64) -> Command| {
        let m = machine(1);
        let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 64).unwrap());
        m.enqueue(q, command(at)).unwrap();
        let error = m.queue_synchronize(q, None).unwrap_err();
        assert!(error.to_string().contains("illegal address"), "{error}");
    };
    // Memory of the process, and addresses without memory: the machine cannot distinguish them.
    for address in [own.as_ptr() as u64, 0xdead_beef_0000, 8] {
        refused(&|at| Command::Copy(Transfer::linear(address, at, 64)));
        refused(&|at| Command::Copy(Transfer::linear(at, address, 64)));
        refused(&|_| Command::Fill(FillCall::linear(address, 8, 1, 1)));
        let (m, mut bytes) = (machine(1), [0u8; 8]);
        assert!(m.peek(address, &mut bytes).is_err() && m.poke(address, &bytes).is_err());
        assert!(m.host_store(address & !7, 1).is_err());
    }
    assert_eq!(own, [7; 64]);
}

#[test]
fn a_queue_that_requires_failed_work_fails_and_skips_its_signals() {
    let m = machine(4);
    let queue = || m.queue_create(0).unwrap();
    let (first, requires, waits) = (queue(), queue(), queue());
    let event = m.event_create(0, false).unwrap();
    let semaphores = [m.semaphore_create(0).unwrap(), m.semaphore_create(0).unwrap()];
    let fail = Box::new(|| Some(Err(Error::state("on purpose"))));
    let until = Command::Until { name: "failure", ready: fail };
    m.submit(first, vec![until, Command::Record(event)]).unwrap();
    let signal = |i: usize| Command::SignalOnSuccess(semaphores[i], 1);
    m.submit(requires, vec![Command::RequireEvent(event), signal(0)]).unwrap();
    m.submit(waits, vec![Command::WaitEvent(event), signal(1)]).unwrap();
    m.run_until_idle();
    assert!(m.queue_failure(requires).unwrap().is_some());
    assert!(m.queue_failure(waits).unwrap().is_none());
    assert_eq!(semaphores.map(|s| m.semaphore_value(s).unwrap()), [0, 1]);
    // A skipped signal leaves the semaphore sound.
    m.semaphore_signal(semaphores[0], 1).unwrap();
    assert_eq!(m.semaphore_value(semaphores[0]).unwrap(), 1);
}

#[test]
fn ranges_at_the_end_of_the_address_space_are_ranges() {
    let m = machine(1);
    for addr in [u64::MAX, u64::MAX - 7, 1 << 63, DEVICE_BASE - 1, DEVICE_BASE] {
        for bytes in [0, 1, 8, u64::MAX - 7, u64::MAX] {
            m.host_read(addr, bytes);
            m.host_write(addr, bytes);
            m.host_gone(addr, bytes);
            let _ = (m.is_pinned(addr, bytes), m.owner(addr));
        }
        let refused = m.peek(addr, &mut [0; 8]).is_err() && m.poke(addr, &[0; 8]).is_err();
        assert!(refused, "{addr:#x}");
        let _ = (m.peek(addr, &mut []), m.poke(addr, &[]));
    }
    let _ = m.take_reports();
}

#[test]
fn a_wait_is_patient_while_other_threads_make_steps() {
    let m = Machine::new(config(23).timeout(Duration::from_millis(150))).unwrap();
    let [a, b] = [0, 0].map(|device| m.queue_create(device).unwrap());
    let (word, at) = (m.host_alloc(8).unwrap(), m.alloc(0, 64).unwrap());
    m.enqueue(a, Command::WaitValue { addr: word, value: 1 }).unwrap();
    std::thread::scope(|s| {
        let waiting = s.spawn(|| m.queue_synchronize(a, None));
        for _ in 0..20 {
            fill(&m, b, at, 64, 1);
            m.queue_synchronize(b, None).unwrap();
            std::thread::sleep(Duration::from_millis(30));
        }
        m.host_store(word, 1).unwrap();
        waiting.join().unwrap().unwrap();
    });
}

/// The virtual nanoseconds of a short kernel, beside a long one on another queue if one is asked
/// for. Both have the partitions of their queues.
fn latency(m: &Machine, [short, long]: [Option<PartitionId>; 2], beside: bool) -> u64 {
    let queue = |on| m.queue_create_on(0, on).unwrap();
    let (a, b, at) = (queue(long), queue(short), m.alloc(0, 128).unwrap());
    let bump = |at| launch(m, "bump", &[(at, 64)], &[1]);
    if beside {
        m.enqueue(a, Command::Kernel(bump(at).grid([64_000, 1, 1]))).unwrap();
        assert!(m.step());
    }
    let [start, end] = [0; 2].map(|_| m.event_create(0, true).unwrap());
    m.enqueue(b, Command::Record(start)).unwrap();
    m.enqueue(b, Command::Kernel(bump(at + 64).grid([4, 1, 1]))).unwrap();
    m.enqueue(b, Command::Record(end)).unwrap();
    m.run_until_idle();
    let time = |event| m.event_time(event).unwrap().unwrap();
    time(end) - time(start)
}

/// Two partitions: 4 of the 16 units, and the rest.
fn divided(m: &Machine) -> [PartitionId; 2] {
    [0..4, 4..16].map(|units| m.partition_create(0, units).unwrap())
}

#[test]
fn a_partition_keeps_its_units_from_other_work() {
    for seed in 0..20 {
        let manual = || Machine::new(config(seed).stepping(Stepping::Manual)).unwrap();
        let [alone, beside] = [false, true].map(|beside| latency(&manual(), [None; 2], beside));
        // The long kernel takes more than 64 microseconds, on all units.
        assert!(beside > 60_000 && alone < 3_000, "{alone} and {beside} without partitions");
        let on = |beside| {
            let m = manual();
            latency(&m, divided(&m).map(Some), beside)
        };
        let (alone, beside) = (on(false), on(true));
        assert!(beside <= alone + 64, "{alone} and {beside} on partitions");
    }
}

#[test]
fn fewer_units_take_longer() {
    let m = Machine::new(config(1).stepping(Stepping::Manual)).unwrap();
    let [few, more] = divided(&m);
    let time = |on| {
        let (q, at) = (m.queue_create_on(0, on).unwrap(), m.alloc(0, 64).unwrap());
        let [start, end] = [0; 2].map(|_| m.event_create(0, true).unwrap());
        m.enqueue(q, Command::Record(start)).unwrap();
        let kernel = launch(&m, "bump", &[(at, 64)], &[1]).grid([1600, 1, 1]);
        m.enqueue(q, Command::Kernel(kernel)).unwrap();
        m.enqueue(q, Command::Record(end)).unwrap();
        m.run_until_idle();
        let time = |event| m.event_time(event).unwrap().unwrap();
        // Each kernel comes once the units are free.
        time(end) - time(start)
    };
    let (four, twelve) = (time(Some(few)), time(Some(more)));
    assert!(four > 2 * twelve, "{four} on 4 units, {twelve} on 12");
}

#[test]
fn a_partition_that_is_destroyed_under_work_fails_it() {
    let m = Machine::new(config(1).stepping(Stepping::Manual)).unwrap();
    let [gone, kept] = divided(&m);
    let at = m.alloc(0, 64).unwrap();
    let on = |partition| {
        let q = m.queue_create_on(0, Some(partition)).unwrap();
        m.enqueue(q, Command::Kernel(launch(&m, "bump", &[(at, 64)], &[1]))).unwrap();
        q
    };
    let (lost, sound) = (on(gone), on(kept));
    assert_eq!(m.objects().partitions, 2);
    m.partition_destroy(gone).unwrap();
    m.run_until_idle();
    let failure = m.queue_failure(lost).unwrap().unwrap();
    assert!(failure.cause.to_string().contains("under its work"), "{failure:?}");
    assert!(m.queue_failure(sound).unwrap().is_none());
    assert_eq!(peek(&m, at, 64), [1; 64], "one of the two has run");
    assert_eq!(m.queue_create_on(0, Some(gone)).unwrap_err().kind(), "NotFound");
    assert_eq!(m.partition_destroy(gone).unwrap_err().kind(), "NotFound");
    for units in [3..3, 15..17] {
        assert_eq!(m.partition_create(0, units).unwrap_err().kind(), "InvalidArgument");
    }
    assert_eq!(Machine::new(config(1).units(0)).unwrap_err().kind(), "InvalidArgument");
}
