//! The memory of a driver that executables take, over the simulated CUDA driver.

use leasehold::cuda::CudaConfig;
use leasehold::graph::{GraphBudget, NodeId};
use leasehold::{Array, Context, DeviceId, Error, Graph, GraphUpdate, Runtime, View};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::SimDriverConfig;
use std::sync::Arc;

fn runtime(seed: u64) -> Runtime {
    let config = SimDriverConfig::new(MachineConfig::seed(seed).devices(1, 64 << 20));
    let backend = leasehold_sim::cuda::backend(config, CudaConfig::default()).unwrap();
    Context::with_backends(vec![Arc::new(backend)]).runtime(DeviceId::cuda(0)).unwrap()
}

/// The driver's memory beside the allocator's.
fn beside(runtime: &Runtime) -> u64 {
    let info = runtime.raw_device().memory_info().unwrap();
    info.total - info.free - runtime.allocator().stats().reserved
}

fn record(runtime: &Runtime, nodes: u32) -> (Graph, Array<u32>) {
    let out = runtime.zeros::<u32>(64).unwrap();
    let fill = |r: &Runtime| {
        (0..nodes).try_for_each(|i| {
            let at = i as usize % 64;
            r.stream().fill(out.slice(at..=at).view(), i + 1)
        })
    };
    (runtime.record_graph(fill).unwrap(), out)
}

#[test]
fn the_drivers_memory_stays_within_the_budget_and_comes_back() {
    for seed in 0..if std::env::var_os("LEASEHOLD_LONG").is_some() { 20 } else { 5 } {
        let runtime = runtime(seed);
        let budget = GraphBudget::of(&runtime);
        let (first, _) = record(&runtime, 200);
        let (none, one) = (budget.stats().bytes, first.exec_bytes());
        assert_eq!(none, one);
        drop(first);
        let before = beside(&runtime);
        budget.set_limit(4 * one);
        let graphs: Vec<_> = (0..16).map(|_| record(&runtime, 200)).collect();
        for round in 0..40usize {
            let (graph, _) = &graphs[(round * 7 + seed as usize) % 16];
            graph.launch().unwrap();
            let taken = beside(&runtime) - before;
            assert!(taken > 0 && taken <= 4 * one, "seed {seed}: {taken} of {}", 4 * one);
        }
        runtime.synchronize().unwrap();
        assert!(budget.take_idle() > 0);
        assert_eq!(beside(&runtime), before, "seed {seed}");
        let (graph, out) = &graphs[3];
        graph.launch().unwrap();
        let values = runtime.to_vec(out).unwrap();
        assert_eq!(values[..8], [193, 194, 195, 196, 197, 198, 199, 200], "seed {seed}");
    }
}

#[test]
fn an_update_that_needs_another_executable_gives_the_old_one_back_first() {
    let runtime = runtime(1);
    let budget = GraphBudget::of(&runtime);
    let (graph, out) = record(&runtime, 100);
    let other = runtime.zeros::<u32>(64).unwrap();
    // The room of one.
    budget.set_limit(graph.exec_bytes());
    graph.launch().unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(out.buffer(), other.buffer())).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&other).unwrap(), runtime.to_vec(&out).unwrap());
    assert_eq!(budget.stats().peak, graph.exec_bytes());
    // An executable that does not fit leaves the graph as it was.
    budget.set_limit(1);
    let refused = graph.update(&GraphUpdate::new().buffer(other.buffer(), out.buffer()));
    assert!(matches!(refused, Err(Error::OverBudget { .. })), "{refused:?}");
    budget.set_limit(u64::MAX);
    runtime.stream().fill(other.view(), 0u32).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&other).unwrap(), runtime.to_vec(&out).unwrap());
    let wrong = graph.update(&GraphUpdate::new().grid(NodeId::new(0), [1; 3]));
    assert!(matches!(wrong, Err(Error::InvalidArgument(_))), "{wrong:?}");
}

#[test]
fn a_report_of_missing_memory_names_the_executables() {
    let runtime = runtime(0);
    let (graph, _) = record(&runtime, 300);
    let _most = runtime.alloc(40 << 20).unwrap();
    let text = runtime.alloc(40 << 20).unwrap_err().to_string();
    let said = format!("executables of graphs take {} bytes", graph.exec_bytes());
    assert!(text.contains(&said), "{text}");
}
