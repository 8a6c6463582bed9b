//! Changing graphs after they were recorded.

use crate::common::*;
use leasehold::graph::{NodeId, UpdateOutcome};
use leasehold::{Graph, GraphUpdate, Runtime, View};
use std::time::Duration;

fn add(runtime: &Runtime, a: f32) -> (Graph, [leasehold::Array<f32>; 2]) {
    let x = runtime.upload(&[1.0f32; 16]).unwrap();
    let y = runtime.upload(&[0.0f32; 16]).unwrap();
    let kernel = axpy();
    let graph = runtime
        .record_graph(|r| launch(r.stream(), &kernel, &[x.read(), y.read_write()], &a.to_ne_bytes(), 4).map(drop))
        .unwrap();
    (graph, [x, y])
}

#[test]
fn parameters_buffers_and_grids_change_in_place() {
    let runtime = runtime();
    let (graph, [x, y]) = add(&runtime, 1.0);
    let node = NodeId::new(0);
    graph.launch().unwrap();
    assert_eq!(graph.update(&GraphUpdate::new().params(node, &10.0f32)).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<f32>(&y).unwrap(), [11.0; 16]);
    assert_eq!(graph.update(&GraphUpdate::new().grid(node, [2, 1, 1])).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    let got = runtime.download::<f32>(&y).unwrap();
    assert_eq!((got[7], got[8]), (21.0, 11.0));
    let (x2, y2) = (runtime.upload(&[5.0f32; 16]).unwrap(), runtime.upload(&[0.0f32; 20]).unwrap());
    let update = GraphUpdate::new().buffer(&x, &x2).buffer(&y, &y2).params(node, &2.0f32).grid(node, [4, 1, 1]);
    assert_eq!(graph.update(&update).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<f32>(&y2).unwrap()[..17], [&[10.0; 16][..], &[0.0]].concat());
    assert_eq!(runtime.download::<f32>(&y).unwrap()[0], 21.0, "the old one is left alone");
    assert_eq!((x.strong_count(), y.strong_count()), (1, 1), "and is not kept");
    assert_eq!(graph.update(&GraphUpdate::new()).unwrap(), UpdateOutcome::InPlace);
    // An empty grid and back.
    assert_eq!(graph.update(&GraphUpdate::new().grid(node, [0, 1, 1])).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(graph.update(&GraphUpdate::new().grid(node, [1, 1, 1])).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<f32>(&y2).unwrap()[..5], [20.0, 20.0, 20.0, 20.0, 10.0]);
}

#[test]
fn a_buffer_that_meets_another_changes_the_dependencies() {
    let runtime = runtime();
    let kernel = iota();
    let (a, b, out) = (runtime.alloc(16).unwrap(), runtime.alloc(16).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &kernel, &[a.write()], &1u32.to_ne_bytes(), 1)?;
            launch(r.stream(), &kernel, &[b.write()], &2u32.to_ne_bytes(), 1)?;
            r.stream().copy(out.view(), b.view())
        })
        .unwrap();
    assert!(graph.describe()[1].1.is_empty());
    assert_eq!(graph.update(&GraphUpdate::new().buffer(&a, &b)).unwrap(), UpdateOutcome::Reinstantiated);
    assert_eq!(graph.describe()[1].1, [0]);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u32>(&out).unwrap(), [2, 3, 4, 5]);
    // The merged buffer is still known to be written: who reads it elsewhere waits.
    let other = runtime.create_stream().unwrap();
    let held = hold(runtime.stream());
    graph.launch().unwrap();
    let mut bytes = [0u8; 16];
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(5));
            open(held);
        });
        other.download(&mut bytes, b.view()).unwrap();
        assert!(runtime.stream().query().unwrap());
    });
}

#[test]
fn a_buffer_that_was_only_read_is_written_once_it_stands_for_both() {
    let runtime = runtime();
    let kernel = iota();
    let [x, y, out] = [0, 1, 2].map(|_| runtime.upload(&[0u32; 4]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            r.stream().copy(out.view(), x.view())?;
            launch(r.stream(), &kernel, &[y.write()], &1u32.to_ne_bytes(), 1).map(drop)
        })
        .unwrap();
    assert_eq!(graph.update(&GraphUpdate::new().buffer(&x, &y)).unwrap(), UpdateOutcome::Reinstantiated);
    assert_eq!(graph.describe()[1].1, [0], "the launch writes what the copy reads");
    runtime.synchronize().unwrap();
    let held = hold(runtime.stream());
    graph.launch().unwrap();
    let other = runtime.create_stream().unwrap();
    let elsewhere = other.alloc(16).unwrap();
    other.copy(elsewhere.view(), y.view()).unwrap();
    assert_eq!(kind(other.synchronize_timeout(Some(Duration::from_millis(3)))), "Timeout");
    open(held);
    other.synchronize_timeout(LONG).unwrap();
    assert_eq!(runtime.download::<u32>(&elsewhere).unwrap(), [1, 2, 3, 4]);
    assert_eq!(runtime.download::<u32>(&out).unwrap(), [0; 4]);
}

#[test]
fn what_was_redundant_may_be_needed_after_an_update() {
    let runtime = runtime();
    let kernel = iota();
    let (x, y, z) =
        (runtime.upload(&[0u32; 4]).unwrap(), runtime.alloc(16).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            r.stream().fill(x.view(), 9u32)?;
            launch(r.stream(), &kernel, &[y.write()], &1u32.to_ne_bytes(), 1)?;
            r.stream().fill(x.view(), 9u32)?;
            r.stream().copy(z.view(), x.view())
        })
        .unwrap();
    assert_eq!((graph.recorded(), graph.nodes()), (4, 3));
    graph.launch().unwrap();
    // The launch writes between the fills from now on.
    assert_eq!(graph.update(&GraphUpdate::new().buffer(&y, &x)).unwrap(), UpdateOutcome::Reinstantiated);
    assert_eq!(graph.nodes(), 4);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u32>(&z).unwrap(), [9; 4]);
}

#[test]
fn nodes_are_named_by_their_place_in_the_recording() {
    let runtime = runtime();
    let kernel = iota();
    let (x, y) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let mut node = None;
    let graph = runtime
        .record_graph(|r| {
            r.stream().fill(x.view(), 1u32)?;
            r.stream().fill(x.view(), 1u32)?; // left out
            node = r.recorded_nodes().map(NodeId::new);
            launch(r.stream(), &kernel, &[y.write()], &1u32.to_ne_bytes(), 1).map(drop)
        })
        .unwrap();
    let node = node.unwrap();
    assert_eq!((node.index(), graph.nodes()), (2, 2));
    assert_eq!(graph.update(&GraphUpdate::new().params(node, &7u32)).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u32>(&y).unwrap(), [7, 8, 9, 10]);
}

#[test]
fn an_update_is_all_or_nothing() {
    let runtime = runtime();
    let (graph, [x, y]) = add(&runtime, 1.0);
    let node = NodeId::new(0);
    let (small, other) = (runtime.upload(&[9.0f32; 8]).unwrap(), runtime.upload(&[9.0f32; 16]).unwrap());
    let foreign = crate::common::runtime().upload(&[9.0f32; 16]).unwrap();
    let good = || GraphUpdate::new().buffer(&x, &other).params(node, &100.0f32);
    let bad = [
        good().params(NodeId::new(1), &1.0f32),
        good().params(node, &[1.0f32; 2]),
        good().grid(node, [1, 70_000, 1]),
        good().buffer(&y, &small),
        good().buffer(&small, &other),
        good().buffer(&y, &foreign),
    ];
    for update in &bad {
        assert_eq!(kind(graph.update(update)), "InvalidArgument", "{update:?}");
    }
    assert_eq!(other.strong_count(), 1);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<f32>(&y).unwrap(), [1.0; 16]);
    let _ = graph.update(&good()).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.download::<f32>(&y).unwrap(), [901.0; 16]);
}

#[test]
fn an_update_waits_for_the_launch_that_runs() {
    let runtime = runtime();
    let (graph, [_, y]) = add(&runtime, 1.0);
    let held = hold(runtime.stream());
    let point = graph.launch().unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            open(held);
        });
        let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &50.0f32)).unwrap();
        assert!(point.is_settled());
    });
    assert_eq!(runtime.download::<f32>(&y).unwrap(), [1.0; 16]);
}

#[test]
fn a_graph_whose_launch_failed_can_be_updated() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let (bad, good) = (trap(), iota());
    let stream = runtime.create_stream().unwrap();
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &bad, &[x.read_write()], &[], 1)?;
            launch(r.stream(), &good, &[y.write()], &1u32.to_ne_bytes(), 1).map(drop)
        })
        .unwrap();
    graph.launch_on(&stream).unwrap();
    assert_eq!(graph.update(&GraphUpdate::new().grid(NodeId::new(0), [0, 1, 1])).unwrap(), UpdateOutcome::InPlace);
    // What the failed launch wrote is made anew.
    runtime.stream().fill(x.view(), 0u8).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u32>(&y).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn pinned_memory_of_a_recorded_copy_can_be_replaced() {
    let runtime = runtime();
    let (a, b) = (runtime.alloc_pinned(16).unwrap(), runtime.alloc_pinned(16).unwrap());
    let x = runtime.alloc(16).unwrap();
    // SAFETY: nobody else touches them.
    unsafe {
        runtime.map_write(a.view()).unwrap().fill(1);
        runtime.map_write(b.view()).unwrap().fill(2);
    }
    let graph = runtime.record_graph(|r| r.stream().copy_pinned(x.view(), a.view())).unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(&a, &b)).unwrap();
    assert_eq!(a.strong_count(), 1);
    drop(a);
    graph.launch().unwrap();
    assert_eq!(runtime.download::<u8>(&x).unwrap(), [2; 16]);
}

#[test]
fn threads_launch_and_update_at_the_same_time() {
    let runtime = runtime();
    let (graph, [_, y]) = add(&runtime, 0.0);
    std::thread::scope(|s| {
        s.spawn(|| {
            for _ in 0..200 {
                graph.launch().unwrap();
            }
        });
        s.spawn(|| {
            for i in 0..50 {
                let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &(i as f32))).unwrap();
            }
        });
    });
    let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &0.0f32)).unwrap();
    graph.launch().unwrap();
    let got = runtime.download::<f32>(&y).unwrap();
    assert!(got.iter().all(|&v| v == got[0]), "no launch saw half an update");
}
