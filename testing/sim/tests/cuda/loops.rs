//! Loops and branches of graphs, as nodes of the driver.

use crate::common::*;
use leasehold_alloc::Buffer;
use leasehold_conformance::TestKernel;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{
    Access, Binding, Conditional, ConditionalKind, Device, Fill, GraphExec, Op, OpList, Plan,
};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

/// Bytes of the buffers.
const BYTES: u64 = 1024;

fn list(ops: &[Op<'_>]) -> OpList {
    let mut list = OpList::new();
    for op in ops {
        list.push(op);
    }
    list
}

/// A node under the first word of a buffer.
fn under(kind: ConditionalKind, flag: &Lease<Buffer>, body: &[Op<'_>]) -> Result<Conditional> {
    Conditional::new(kind, None, Binding { len: 4, ..bind(flag, Access::Read) }, list(body))
}

fn graph(device: &Lease<dyn Device>, ops: &[Op<'_>]) -> Result<Lease<dyn GraphExec>> {
    // SAFETY: the plan's pipelines and graphs are this device's, and each test keeps its memory
    // until the last launch is over.
    unsafe { device.instantiate(Plan::new(list(ops))) }
}

/// Wherever a call fails, the graph is refused and nothing is left. The next one works.
#[test]
fn a_call_that_fails_leaves_nothing() {
    let calls = [
        ("cuGraphConditionalHandleCreate", 2),
        ("cuGraphAddNode", 2),
        ("cuModuleLoadDataEx", 1),
        ("cuModuleGetFunction", 1),
        ("cuGraphAddKernelNode", 3),
        ("cuGraphAddMemsetNode", 2),
        ("cuGraphInstantiate", 1),
    ];
    for (name, count) in calls {
        for k in 0..count {
            let bench = Bench::new(80);
            let device = bench.open(0);
            let s = stream(&device);
            let [flag, x] = [0; 2].map(|_| buffer(&device, &s, BYTES));
            let inner = under(ConditionalKind::If, &flag, &[fill(&x, 7)]).unwrap();
            let body = [Op::Conditional(&inner), fill(&flag, 0)];
            let outer = under(ConditionalKind::While, &flag, &body).unwrap();
            let rule = FaultRule::on(name, When::At(k), FaultAction::Fail(1));
            bench.driver.machine().set_faults(FaultPlan::none().with(rule));
            let before = bench.driver.census();
            let refused = graph(&device, &[Op::Conditional(&outer)]).unwrap_err();
            assert!(refused.to_string().contains(name), "{name} {k}: {refused}");
            bench.driver.machine().set_faults(FaultPlan::none());
            let left = bench.driver.census();
            assert_eq!((left.graphs, left.execs), (before.graphs, before.execs), "{name} {k}");
            let made = graph(&device, &[Op::Conditional(&outer)]).unwrap();
            submit(&s, &[fill(&x, 1), fill(&flag, 1), Op::Graph(&made)]).unwrap();
            assert_eq!(read(&s, &x), [7; BYTES as usize], "{name} {k}");
            submit(&s, &[fill(&x, 1), Op::Graph(&made)]).unwrap();
            assert_eq!(read(&s, &x), [1; BYTES as usize], "the flag is 0");
            drop((made, flag, x, s, device));
            bench.close();
        }
    }
}

/// The kernel that sets conditions is loaded once, at the first graph that needs it. On devices
/// whose kernels can wait, it begins early behind a kernel that is the end of a body.
#[test]
fn the_kernel_of_conditions_is_loaded_once_and_waits_itself() {
    for (major, edges) in [(8, 0), (9, 1)] {
        let mut config = driver_config(81);
        config.compute_capability = (major, 0);
        let bench = Bench::with(config, inline());
        let device = bench.open(0);
        let s = stream(&device);
        let [flag, x] = [0; 2].map(|_| buffer(&device, &s, BYTES));
        let kernel = device.pipeline(&TestKernel::Fill.for_cuda()).unwrap();
        let (out, zero) = ([bind(&flag, Access::Write)], 0_u32.to_le_bytes());
        let loads = bench.calls("cuModuleLoadDataEx");
        let launch = || dispatch(&kernel, &out, &zero);
        for (end, body, edges) in [
            ("a kernel", [fill(&flag, 3), launch()], edges),
            ("a fill", [launch(), fill(&flag, 0)], 0),
            ("a kernel beside a fill", [fill(&x, 5), launch()], 0),
        ] {
            let part = under(ConditionalKind::While, &flag, &body).unwrap();
            let before = bench.calls("cuGraphAddDependencies");
            let made = graph(&device, &[Op::Conditional(&part)]).unwrap();
            assert_eq!(bench.calls("cuGraphAddDependencies") - before, edges, "{end}");
            submit(&s, &[fill(&flag, 1), Op::Graph(&made)]).unwrap();
            assert_eq!(read(&s, &flag), [0; BYTES as usize], "{end}");
        }
        assert_eq!(bench.calls("cuModuleLoadDataEx") - loads, 1);
        drop((kernel, flag, x, s, device));
        bench.close();
    }
}

#[test]
fn an_older_driver_has_no_loops() {
    let mut config = driver_config(82);
    config.conditional_nodes = false;
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    assert!(!device.caps().conditionals);
    let s = stream(&device);
    let flag = buffer(&device, &s, BYTES);
    let part = under(ConditionalKind::While, &flag, &[fill(&flag, 0)]).unwrap();
    let refused = graph(&device, &[Op::Conditional(&part)]).unwrap_err();
    assert!(
        matches!(&refused, Error::Unsupported(why) if why.contains("conditional")),
        "{refused}"
    );
    drop((flag, s, device));
    bench.close();
}

/// The driver takes no graph with a loop as a child. So its nodes are added one by one, between
/// what comes before and after.
#[test]
fn a_graph_with_a_loop_can_be_in_a_graph() {
    for seed in 0..10 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let s = stream(&device);
        let [flag, x, y, z] = [0; 4].map(|_| buffer(&device, &s, BYTES));
        let stamp = device.timestamp().unwrap();
        let part = under(ConditionalKind::While, &flag, &[copy(&x, &y), fill(&flag, 0)]).unwrap();
        let ops = [fill(&z, 9), Op::Conditional(&part), Op::WriteTimestamp(&stamp)];
        let child = graph(&device, &ops).unwrap();
        let ops = [fill(&x, 3), fill(&flag, 1), Op::Graph(&child), copy(&y, &x), copy(&z, &flag)];
        let outer = graph(&device, &ops).unwrap();
        let v = submit(&s, &[fill(&y, 1), fill(&z, 1), Op::Graph(&outer)]).unwrap();
        wait(&s, v).unwrap();
        assert_eq!([&x, &y, &z, &flag].map(|b| read(&s, b)[0]), [3, 3, 9, 9]);
        assert!(stamp.get().is_some(), "the child's timestamp");
        assert_eq!(bench.reports(), Vec::<String>::new());
        drop((child, outer, stamp, flag, x, y, z, s, device));
        bench.close();
    }
}

#[test]
fn what_the_driver_takes_in_several_calls_is_no_node_of_a_body() {
    let mut config = driver_config(83);
    config.peers = false;
    let bench = Bench::with(config, inline());
    let (zero, one) = (bench.open(0), bench.open(1));
    let (a, b) = (stream(&zero), stream(&one));
    let (flag, from, to) =
        (buffer(&zero, &a, BYTES), buffer(&zero, &a, BYTES), buffer(&one, &b, BYTES));
    let part = under(ConditionalKind::If, &flag, &[copy(&from, &to)]).unwrap();
    let refused = graph(&zero, &[Op::Conditional(&part)]).unwrap_err();
    assert!(
        matches!(&refused, Error::Unsupported(why) if why.contains("body of a branch")),
        "{refused}"
    );
    drop((flag, from, to, a, b, zero, one));
    bench.close();
}

#[test]
fn a_loop_without_an_end_is_a_fault_of_the_device() {
    let mut config = driver_config(84);
    config.machine = config.machine.loop_bound(50);
    let bench = Bench::with(config, inline());
    let device = bench.open(0);
    let s = stream(&device);
    let flag = buffer(&device, &s, BYTES);
    let again = Op::Fill(Fill { dst: flag.addr(), native: 0, bytes: 4, pattern: 1, width: 4 });
    let part = under(ConditionalKind::While, &flag, &[again]).unwrap();
    let made = graph(&device, &[Op::Conditional(&part)]).unwrap();
    let value = submit(&s, &[fill(&flag, 1), Op::Graph(&made)]).unwrap();
    let fault = wait(&s, value).unwrap_err();
    assert!(matches!(fault, Error::DeviceLost { .. }), "{fault}");
    assert!(fault.to_string().contains("50 times"), "{fault}");
    drop((made, flag, s, device));
}
