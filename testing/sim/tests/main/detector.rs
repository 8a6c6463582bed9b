//! The race detector: it finds each planted defect, and reports nothing without one.

use crate::{config, copy, fill, launch, machine, peek};
use leasehold_hal::Access;
use leasehold_sim::{
    Command, FillCall, GRANULARITY, KernelBody, KernelSpec, Machine, MachineConfig, Node, NodeId,
    POISON, QueueId, Report, ReportKind, Stepping,
};

const N: u64 = 256;

/// Two queues, and a buffer that both use.
fn two(seed: u64) -> (Machine, QueueId, QueueId, u64) {
    let m = machine(seed);
    let (a, b) = (m.queue_create(0).unwrap(), m.queue_create(0).unwrap());
    let at = m.alloc(0, N).unwrap();
    (m, a, b, at)
}

fn only(reports: Vec<Report>, kind: ReportKind) -> Report {
    assert!(!reports.is_empty(), "{kind:?} was not found");
    assert!(reports.iter().all(|r| r.kind == kind), "{reports:?}");
    reports.into_iter().next().unwrap()
}

#[test]
fn accesses_without_an_order_are_found_whoever_ran_first() {
    for seed in 0..50 {
        let (m, a, b, at) = two(seed);
        fill(&m, a, at, N, 1);
        m.enqueue(b, Command::Kernel(launch(&m, "bump", &[(at + 8, 16)], &[1]))).unwrap();
        m.run_until_idle();
        let reports = m.take_reports();
        let report = reports.iter().find(|r| r.kind == ReportKind::Unordered).expect("no report");
        assert_eq!((report.addr, report.bytes), (at + 8, 16));
        let (first, second) = (report.first.clone().unwrap(), report.second.clone());
        let mut both = [
            (first.queue.unwrap(), first.name.to_string()),
            (second.queue.unwrap(), second.name.to_string()),
        ];
        both.sort();
        assert_eq!(both, [(a.0, "fill".to_owned()), (b.0, "dispatch bump".to_owned())]);
        assert_eq!((first.index, second.index), (0, 0));
    }
}

#[test]
fn two_reads_need_no_order_and_disjoint_ranges_neither() {
    for seed in 0..50 {
        let (m, a, b, at) = two(seed);
        let out = m.alloc(0, 2 * N).unwrap();
        fill(&m, a, at, N, 1);
        m.queue_synchronize(a, None).unwrap();
        copy(&m, a, at, out, N);
        copy(&m, b, at, out + N, N);
        m.device_synchronize(0, None).unwrap();
        assert_eq!(m.take_reports(), []);
    }
}

/// Orders the first queue's past work before the second one's future work.
type Edge = fn(&Machine, QueueId, QueueId);

/// Each way to order a write on one queue before a read on another.
fn edges() -> Vec<(&'static str, Edge)> {
    vec![
        ("an event", |m, a, b| {
            let e = m.event_create(0, false).unwrap();
            m.enqueue(a, Command::Record(e)).unwrap();
            m.enqueue(b, Command::WaitEvent(e)).unwrap();
        }),
        ("a word", |m, a, b| {
            let w = m.host_alloc(8).unwrap();
            m.enqueue(a, Command::WriteValue { addr: w, value: 1 }).unwrap();
            m.enqueue(b, Command::WaitValue { addr: w, value: 1 }).unwrap();
        }),
        ("a semaphore", |m, a, b| {
            let s = m.semaphore_create(0).unwrap();
            m.enqueue(a, Command::Signal(s, 1)).unwrap();
            m.enqueue(b, Command::WaitSemaphore(s, 1)).unwrap();
        }),
        ("the host's wait for a queue", |m, a, _| m.queue_synchronize(a, None).unwrap()),
        ("the host's wait for an event", |m, a, _| {
            let e = m.event_create(0, false).unwrap();
            m.enqueue(a, Command::Record(e)).unwrap();
            m.event_synchronize(e, None).unwrap();
        }),
        ("the host's look at a word", |m, a, _| {
            let w = m.host_alloc(8).unwrap();
            m.enqueue(a, Command::WriteValue { addr: w, value: 1 }).unwrap();
            while m.host_load(w).unwrap() == 0 {}
        }),
        ("a callback that enqueues", |m, a, b| {
            let w = m.host_alloc(8).unwrap();
            m.enqueue(b, Command::WaitValue { addr: w, value: 1 }).unwrap();
            let inner = m.clone();
            let call = Box::new(move || inner.host_store(w, 1).unwrap());
            m.enqueue(a, Command::Host { name: "back".into(), call, always: false }).unwrap();
        }),
        ("another queue in between", |m, a, b| {
            let (c, e, f) = (
                m.queue_create(0).unwrap(),
                m.event_create(0, false).unwrap(),
                m.event_create(0, false).unwrap(),
            );
            m.enqueue(a, Command::Record(e)).unwrap();
            m.enqueue(c, Command::WaitEvent(e)).unwrap();
            m.enqueue(c, Command::Record(f)).unwrap();
            m.enqueue(b, Command::WaitEvent(f)).unwrap();
        }),
    ]
}

#[test]
fn every_edge_makes_an_order_over_200_seeds() {
    for (name, edge) in edges() {
        for seed in 0..200 {
            let (m, a, b, at) = two(seed);
            let out = m.alloc(0, N).unwrap();
            fill(&m, a, at, N, 1);
            edge(&m, a, b);
            copy(&m, b, at, out, N);
            m.device_synchronize(0, None).unwrap();
            assert_eq!(m.take_reports(), [], "{name}, seed {seed}");
        }
    }
}

#[test]
fn an_edge_that_points_the_wrong_way_makes_none() {
    let found = (0..50).filter(|&seed| {
        let (m, a, b, at) = two(seed);
        let e = m.event_create(0, false).unwrap();
        // The record comes before the write that it should cover.
        m.enqueue(a, Command::Record(e)).unwrap();
        fill(&m, a, at, N, 1);
        m.enqueue(b, Command::WaitEvent(e)).unwrap();
        fill(&m, b, at, N, 2);
        m.device_synchronize(0, None).unwrap();
        m.take_reports().iter().any(|r| r.kind == ReportKind::Unordered)
    });
    assert_eq!(found.count(), 50);
}

#[test]
fn the_host_races_with_what_is_pending() {
    let m = Machine::new(config(1).stepping(Stepping::Manual)).unwrap();
    let (q, at, host) =
        (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), m.host_alloc(N).unwrap());
    m.host_write(host, N);
    copy(&m, q, host, at, N);
    m.host_write(host, 8);
    m.run_until_idle();
    let report = only(m.take_reports(), ReportKind::Unordered);
    assert_eq!((report.addr, report.bytes), (host, 8));
    assert_eq!(report.first.unwrap().name.as_ref(), "host write");
    // After a wait there is an order.
    m.queue_synchronize(q, None).unwrap();
    m.host_write(host, N);
    assert_eq!(m.take_reports(), []);
    // A read of a queue's output, without an order.
    copy(&m, q, at, host, N);
    m.run_until_idle();
    m.host_read(host, 1);
    only(m.take_reports(), ReportKind::Unordered);
}

#[test]
fn memory_that_is_freed_while_a_command_is_pending() {
    let m = Machine::new(config(2).stepping(Stepping::Manual)).unwrap();
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    fill(&m, q, at, N, 1);
    m.free(at).unwrap();
    let report = only(m.take_reports(), ReportKind::UseAfterFree);
    let first = report.first.unwrap();
    assert_eq!((first.name.as_ref(), first.queue, first.index), ("fill", Some(q.0), 0));
    m.run_until_idle();
    only(m.take_reports(), ReportKind::UseAfterFree);
    assert_eq!(m.device_status(0).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn memory_that_is_lent_again_while_a_command_is_pending() {
    let m = Machine::new(config(3).stepping(Stepping::Manual)).unwrap();
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    fill(&m, q, at, N, 1);
    m.free(at).unwrap();
    assert_eq!(
        m.alloc(0, N).unwrap(),
        at,
        "the machine does not lend the address again; the test must be another"
    );
    let _ = m.take_reports();
    m.run_until_idle();
    only(m.take_reports(), ReportKind::UseAfterFree);
    m.device_status(0).unwrap();
}

#[test]
fn memory_that_is_freed_although_nothing_says_that_its_use_is_over() {
    let m = Machine::new(config(4).stepping(Stepping::Manual)).unwrap();
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    fill(&m, q, at, N, 1);
    m.run_until_idle();
    // The work is over, but the host has not asked.
    m.free(at).unwrap();
    only(m.take_reports(), ReportKind::UseAfterFree);
    let at = m.alloc(0, N).unwrap();
    fill(&m, q, at, N, 1);
    m.run_until_idle();
    m.queue_synchronize(q, None).unwrap();
    m.free(at).unwrap();
    assert_eq!(m.take_reports(), []);
}

#[test]
fn a_mapping_that_changes_under_a_pending_command() {
    let m = Machine::new(config(5).stepping(Stepping::Manual)).unwrap();
    let (q, at) = (m.queue_create(0).unwrap(), m.reserve(GRANULARITY, 0).unwrap());
    let (x, y) = (m.create(0, GRANULARITY).unwrap(), m.create(0, GRANULARITY).unwrap());
    m.map(at, x).unwrap();
    m.set_access(0, at, GRANULARITY).unwrap();
    fill(&m, q, at, N, 1);
    m.unmap(at, GRANULARITY).unwrap();
    m.map(at, y).unwrap();
    m.set_access(0, at, GRANULARITY).unwrap();
    only(m.take_reports(), ReportKind::UseAfterFree);
    m.run_until_idle();
    only(m.take_reports(), ReportKind::UseAfterFree);
}

#[test]
fn of_two_mappings_of_memory_one_goes_while_the_other_is_used() {
    for runs in [false, true] {
        let m = Machine::new(config(7).stepping(Stepping::Manual)).unwrap();
        let (q, x) = (m.queue_create(0).unwrap(), m.create(0, GRANULARITY).unwrap());
        let [one, other] = [(); 2].map(|()| {
            let at = m.reserve(GRANULARITY, 0).unwrap();
            m.map(at, x).unwrap();
            m.set_access(0, at, GRANULARITY).unwrap();
            at
        });
        fill(&m, q, one, N, 1);
        if runs {
            m.run_until_idle();
        }
        // Pending, or over without the host's knowledge, but not through these addresses.
        m.unmap(other, GRANULARITY).unwrap();
        assert_eq!(m.take_reports(), []);
        m.unmap(one, GRANULARITY).unwrap();
        only(m.take_reports(), ReportKind::UseAfterFree);
    }
}

#[test]
fn a_stale_address_in_a_graph() {
    let m = machine(6);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    let g = m.graph_create().unwrap();
    m.graph_add(g, Node::Fill(FillCall::linear(at, N, 1, 1)), &[]).unwrap();
    let exec = m.instantiate(0, g).unwrap();
    m.enqueue(q, Command::Launch(exec)).unwrap();
    m.queue_synchronize(q, None).unwrap();
    m.free(at).unwrap();
    m.enqueue(q, Command::Launch(exec)).unwrap();
    assert_eq!(m.queue_synchronize(q, None).unwrap_err().kind(), "DeviceLost");
}

#[test]
fn frees_in_a_queues_order_want_the_others_to_be_over() {
    let mut found = 0;
    for seed in 0..50 {
        let (m, a, b, _) = two(seed);
        let at = m.alloc_async(a, N).unwrap();
        fill(&m, a, at, N, 1);
        let e = m.event_create(0, false).unwrap();
        m.enqueue(a, Command::Record(e)).unwrap();
        m.enqueue(b, Command::WaitEvent(e)).unwrap();
        fill(&m, b, at, N, 2);
        // The freeing queue does not wait for the other one.
        m.free_async(a, at).unwrap();
        m.run_until_idle();
        found += u32::from(m.take_reports().iter().any(|r| r.kind == ReportKind::UseAfterFree));
    }
    assert_eq!(found, 50);
}

#[test]
fn the_beginning_of_memory_in_a_queues_order_comes_before_its_use() {
    for seed in 0..50 {
        let (m, a, b, _) = two(seed);
        let at = m.alloc_async(a, N).unwrap();
        fill(&m, b, at, N, 1);
        m.run_until_idle();
        only(m.take_reports(), ReportKind::Unordered);
    }
}

#[test]
fn reads_of_memory_that_nobody_wrote() {
    let m = machine(7);
    let (q, at, out) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), m.alloc(0, N).unwrap());
    copy(&m, q, at, out, N);
    m.queue_synchronize(q, None).unwrap();
    let report = only(m.take_reports(), ReportKind::NeverWritten);
    assert_eq!((report.bytes, report.second.name.as_ref()), (N, "copy"));
    // A copy needs every byte to be written, a kernel at least one.
    let at = m.alloc(0, N).unwrap();
    fill(&m, q, at, N - 1, 1);
    m.enqueue(q, Command::Kernel(launch(&m, "sum", &[(at, N), (out, 1)], &[]))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(m.take_reports(), []);
    copy(&m, q, at, out, N);
    m.queue_synchronize(q, None).unwrap();
    assert_eq!(only(m.take_reports(), ReportKind::NeverWritten).bytes, 1);
    // Memory that was freed and reused counts as unwritten.
    m.free(at).unwrap();
    let at = m.alloc(0, N).unwrap();
    m.enqueue(q, Command::Kernel(launch(&m, "sum", &[(at, N), (out, 1)], &[]))).unwrap();
    m.queue_synchronize(q, None).unwrap();
    only(m.take_reports(), ReportKind::NeverWritten);
}

/// The executed work of a lost device is over, and its pending work never runs.
#[test]
fn memory_that_a_lost_device_used_may_go() {
    let m = Machine::new(config(9).stepping(Stepping::Manual)).unwrap();
    let (q, at, host) =
        (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), m.host_alloc(N).unwrap());
    copy(&m, q, host, at, N);
    m.run_until_idle();
    copy(&m, q, host, at, N);
    m.lose_device(0, "gone");
    m.host_free(host).unwrap();
    assert_eq!(m.take_reports(), []);
}

/// The queue's work was over, but the host did not know it when the queue and then the device were
/// lost.
#[test]
fn memory_that_a_queue_used_before_it_and_its_device_went_may_go() {
    let m = Machine::new(config(9).stepping(Stepping::Manual)).unwrap();
    let (q, at, host) =
        (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), m.host_alloc(N).unwrap());
    copy(&m, q, host, at, N);
    m.run_until_idle();
    m.queue_destroy(q).unwrap();
    m.lose_device(0, "gone");
    m.host_free(host).unwrap();
    assert_eq!(m.take_reports(), []);
}

#[test]
fn host_memory_that_goes_while_a_copy_is_pending() {
    let ends: [fn(&Machine, u64); 3] = [
        |m, at| m.host_free(at).unwrap(),
        |m, at| {
            m.host_gone(at, N);
            m.host_free(at).unwrap();
        },
        |m, at| m.host_free(at).unwrap(),
    ];
    for end in ends {
        let m = Machine::new(config(8).stepping(Stepping::Manual)).unwrap();
        let (q, at, host) =
            (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), m.host_alloc(N).unwrap());
        copy(&m, q, host, at, N);
        end(&m, host);
        let report = only(m.take_reports(), ReportKind::HostGone);
        assert_eq!(report.first.unwrap().name.as_ref(), "copy");
    }
    let m = Machine::new(config(8).stepping(Stepping::Manual)).unwrap();
    let (q, at, own) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap(), vec![0u8; N as usize]);
    // SAFETY: the vector lives to the end. The copy that would read it never runs.
    unsafe { m.host_register(own.as_ptr() as u64, N) }.unwrap();
    copy(&m, q, own.as_ptr() as u64, at, N);
    m.host_unregister(own.as_ptr() as u64).unwrap();
    only(m.take_reports(), ReportKind::HostGone);
    m.run_until_idle();
    m.queue_synchronize(q, None).unwrap();
    let _ = m.take_reports();
    // Pageable memory may end after its copy.
    copy(&m, q, own.as_ptr() as u64, at, N);
    m.run_until_idle();
    m.queue_synchronize(q, None).unwrap();
    m.host_gone(own.as_ptr() as u64, N);
    assert_eq!(m.take_reports(), []);
}

/// Fills, bumps and sums with the dependencies `deps`; returns the reports.
fn graph(seed: u64, ordered: bool) -> Vec<Report> {
    let (m, q, _, at) = two(seed);
    let out = m.alloc(0, 2).unwrap();
    let g = m.graph_create().unwrap();
    let add = |node: Node, deps: &[NodeId]| m.graph_add(g, node, deps).unwrap();
    let root = add(Node::Fill(FillCall::linear(at, N, 1, 1)), &[]);
    let bump = add(Node::Kernel(launch(&m, "bump", &[(at, N)], &[1])), &[root]);
    let after = if ordered { bump } else { root };
    let one = add(Node::Kernel(launch(&m, "sum", &[(at, N), (out, 1)], &[])), &[after]);
    let two = add(Node::Kernel(launch(&m, "sum", &[(at, N), (out + 1, 1)], &[])), &[bump]);
    add(Node::Fill(FillCall::linear(at, N, 0, 1)), &[one, two, bump]);
    let exec = m.instantiate(0, g).unwrap();
    for _ in 0..3 {
        m.enqueue(q, Command::Launch(exec)).unwrap();
    }
    m.queue_synchronize(q, None).unwrap();
    m.take_reports()
}

#[test]
fn nodes_of_a_graph_are_ordered_by_its_edges_alone() {
    for seed in 0..50 {
        assert_eq!(graph(seed, true), []);
        let report = only(graph(seed, false), ReportKind::Unordered);
        assert!(report.first.unwrap().node.is_some() && report.second.node.is_some());
    }
}

#[test]
fn it_can_be_switched_off() {
    let m = Machine::new(MachineConfig::seed(0).detect(false)).unwrap();
    let (a, b, at) =
        (m.queue_create(0).unwrap(), m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    fill(&m, a, at, N, 1);
    fill(&m, b, at, N, 2);
    m.device_synchronize(0, None).unwrap();
    assert_eq!(m.take_reports(), []);
}

#[test]
fn what_it_remembers_stays_bounded() {
    let m = machine(9);
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, 1 << 20).unwrap());
    for round in 0..20_000u64 {
        fill(&m, q, at + round * 32 % (1 << 20), 8, 1);
        if round % 64 == 0 {
            m.queue_synchronize(q, None).unwrap();
        }
    }
    m.queue_synchronize(q, None).unwrap();
    let text = format!("{m:?}");
    let segments: usize =
        text.split("segments: ").nth(1).unwrap().split(',').next().unwrap().parse().unwrap();
    assert!(segments < 40_000, "{segments} segments");
    assert_eq!(m.take_reports(), []);
}

/// A machine with kernels that violate their declarations, and memory of 64 bytes of 7.
fn liar() -> (Machine, QueueId, u64) {
    let m = machine(77);
    let store = KernelBody::run(|launch| {
        let (at, n) = launch.pointer::<u8>(0);
        // SAFETY: the machine checked the binding.
        unsafe { at.add(n / 2).write_bytes(9, 3) };
        Ok(())
    });
    m.kernels().register("stores", KernelSpec::new(&[Access::Read], 0, store));
    let bump = KernelBody::run(|launch| {
        let (at, n) = launch.pointer::<u8>(0);
        // SAFETY: the machine checked the binding.
        (0..n).for_each(|i| unsafe { *at.add(i) = (*at.add(i)).wrapping_add(1) });
        Ok(())
    });
    m.kernels().register("accumulates", KernelSpec::new(&[Access::Write], 0, bump.clone()));
    m.kernels()
        .register("accumulates in rows", KernelSpec::new(&[Access::Write], 0, bump).leaving_gaps());
    let (q, at) = (m.queue_create(0).unwrap(), m.alloc(0, N).unwrap());
    fill(&m, q, at, N, 7);
    (m, q, at)
}

fn run_on(m: &Machine, q: QueueId, kernel: &str, at: u64, params: &[u8]) {
    m.enqueue(q, Command::Kernel(launch(m, kernel, &[(at, N)], params))).unwrap();
    m.queue_synchronize(q, None).unwrap();
}

#[test]
fn a_kernel_that_writes_what_it_declares_to_read_is_reported() {
    let (m, q, at) = liar();
    m.queue_set_name(q, "copies").unwrap();
    run_on(&m, q, "stores", at, &[]);
    let report = only(m.take_reports(), ReportKind::WroteReadOnly);
    assert_eq!((report.binding, report.addr, report.bytes), (Some((0, N / 2)), at + N / 2, 3));
    let text = report.to_string();
    assert!(
        text.contains("dispatch stores (copies, submission ") && text.contains("binding 0 at byte"),
        "{text}"
    );
}

#[test]
fn a_kernel_that_reads_what_it_declares_to_write_finds_poison() {
    let (m, q, at) = liar();
    run_on(&m, q, "accumulates", at, &[]);
    let more = |than: u8| [than.wrapping_add(1); N as usize];
    assert_eq!(
        peek(&m, at, N as usize),
        more(POISON),
        "one more than the poison, not than what was there"
    );
    // Bytes that the kernel declares to leave unchanged are unchanged.
    fill(&m, q, at, N, 7);
    run_on(&m, q, "accumulates in rows", at, &[]);
    assert_eq!(peek(&m, at, N as usize), more(7));
    // A machine with its own poison uses it; a machine without the detector uses none.
    for (config, expected) in [(config(77).poison(0x11), 0x11), (config(77).detect(false), 7)] {
        let other = Machine::new(config.kernels(m.kernels().clone())).unwrap();
        let (q, at) = (other.queue_create(0).unwrap(), other.alloc(0, N).unwrap());
        fill(&other, q, at, N, 7);
        run_on(&other, q, "accumulates", at, &[]);
        assert_eq!(peek(&other, at, N as usize), more(expected));
    }
    // With the right declaration the kernel reads the former contents.
    fill(&m, q, at, N, 7);
    run_on(&m, q, "bump", at, &[1]);
    assert_eq!(peek(&m, at, N as usize), [8; N as usize]);
}

#[test]
fn a_report_names_the_queues_and_the_wait_that_is_missing() {
    let found = (0..20).any(|seed| {
        let (m, a, b, at) = two(seed);
        m.queue_set_name(a, "producer").unwrap();
        m.queue_report_as(b, "consumer", 100).unwrap();
        m.submit_as(b, 101, vec![Command::Empty]).unwrap();
        fill(&m, a, at, N, 1);
        m.submit_as(b, 102, vec![Command::Fill(FillCall::linear(at, N, 2, 1))]).unwrap();
        m.device_synchronize(0, None).unwrap();
        let text = only(m.take_reports(), ReportKind::Unordered).to_string();
        assert!(
            text.contains("(consumer, submission 2)") && text.contains("(producer, submission"),
            "{text}"
        );
        text.ends_with("; no wait of consumer for producer")
    });
    assert!(found, "the consumer never came second");
}
