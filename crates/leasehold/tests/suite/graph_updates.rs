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
        .record_graph(|r| {
            launch(r.stream(), &kernel, &[x.read(), y.read_write()], &a.to_ne_bytes(), 4).map(drop)
        })
        .unwrap();
    (graph, [x, y])
}

#[test]
fn parameters_buffers_and_grids_change_in_place() {
    let runtime = runtime();
    let (graph, [x, y]) = add(&runtime, 1.0);
    let node = NodeId::new(0);
    graph.launch().unwrap();
    assert_eq!(
        graph.update(&GraphUpdate::new().params(node, &10.0f32)).unwrap(),
        UpdateOutcome::InPlace
    );
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [11.0; 16]);
    assert_eq!(
        graph.update(&GraphUpdate::new().grid(node, [2, 1, 1])).unwrap(),
        UpdateOutcome::InPlace
    );
    graph.launch().unwrap();
    let got = runtime.to_vec::<f32>(&y).unwrap();
    assert_eq!((got[7], got[8]), (21.0, 11.0));
    let (x2, y2) = (runtime.upload(&[5.0f32; 16]).unwrap(), runtime.upload(&[0.0f32; 20]).unwrap());
    let update = GraphUpdate::new()
        .buffer(&x, &x2)
        .buffer(&y, &y2)
        .params(node, &2.0f32)
        .grid(node, [4, 1, 1]);
    assert_eq!(graph.update(&update).unwrap(), UpdateOutcome::InPlace);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y2).unwrap()[..17], [&[10.0; 16][..], &[0.0]].concat());
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap()[0], 21.0, "the old one is left alone");
    assert_eq!((x.strong_count(), y.strong_count()), (1, 1), "and is not kept");
    assert_eq!(graph.update(&GraphUpdate::new()).unwrap(), UpdateOutcome::InPlace);
    // An empty grid and back.
    assert_eq!(
        graph.update(&GraphUpdate::new().grid(node, [0, 1, 1])).unwrap(),
        UpdateOutcome::InPlace
    );
    graph.launch().unwrap();
    assert_eq!(
        graph.update(&GraphUpdate::new().grid(node, [1, 1, 1])).unwrap(),
        UpdateOutcome::InPlace
    );
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y2).unwrap()[..5], [20.0, 20.0, 20.0, 20.0, 10.0]);
}

#[test]
fn a_buffer_that_meets_another_changes_the_dependencies() {
    let runtime = runtime();
    let kernel = iota();
    let (a, b, out) = (
        runtime.alloc(16).unwrap(),
        runtime.alloc(16).unwrap(),
        runtime.upload(&[0u32; 4]).unwrap(),
    );
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &kernel, &[a.write()], &1u32.to_ne_bytes(), 1)?;
            launch(r.stream(), &kernel, &[b.write()], &2u32.to_ne_bytes(), 1)?;
            r.stream().copy(out.view(), b.view())
        })
        .unwrap();
    assert!(graph.describe()[1].1.is_empty());
    assert_eq!(
        graph.update(&GraphUpdate::new().buffer(&a, &b)).unwrap(),
        UpdateOutcome::Reinstantiated
    );
    assert_eq!(graph.describe()[1].1, [0]);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&out).unwrap(), [2, 3, 4, 5]);
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
    assert_eq!(
        graph.update(&GraphUpdate::new().buffer(&x, &y)).unwrap(),
        UpdateOutcome::Reinstantiated
    );
    assert_eq!(graph.describe()[1].1, [0], "the launch writes what the copy reads");
    runtime.synchronize().unwrap();
    let held = hold(runtime.stream());
    graph.launch().unwrap();
    let other = runtime.create_stream().unwrap();
    let elsewhere = other.runtime().alloc(16).unwrap();
    other.copy(elsewhere.view(), y.view()).unwrap();
    assert_eq!(kind(other.synchronize_timeout(Duration::from_millis(3))), "Timeout");
    open(held);
    other.synchronize_timeout(LONG).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&elsewhere).unwrap(), [1, 2, 3, 4]);
    assert_eq!(runtime.to_vec::<u32>(&out).unwrap(), [0; 4]);
}

#[test]
fn what_was_redundant_may_be_needed_after_an_update() {
    let runtime = runtime();
    let kernel = iota();
    let (x, y, z) = (
        runtime.upload(&[0u32; 4]).unwrap(),
        runtime.alloc(16).unwrap(),
        runtime.upload(&[0u32; 4]).unwrap(),
    );
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
    assert_eq!(
        graph.update(&GraphUpdate::new().buffer(&y, &x)).unwrap(),
        UpdateOutcome::Reinstantiated
    );
    assert_eq!(graph.nodes(), 4);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&z).unwrap(), [9; 4]);
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
            node = r.stream().next_node();
            launch(r.stream(), &kernel, &[y.write()], &1u32.to_ne_bytes(), 1).map(drop)
        })
        .unwrap();
    let node = node.unwrap();
    assert_eq!((node.index(), graph.nodes()), (2, 2));
    assert_eq!(
        graph.update(&GraphUpdate::new().params(node, &7u32)).unwrap(),
        UpdateOutcome::InPlace
    );
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [7, 8, 9, 10]);
}

#[test]
fn an_update_is_all_or_nothing() {
    let runtime = runtime();
    let (graph, [x, y]) = add(&runtime, 1.0);
    let node = NodeId::new(0);
    let (small, other) =
        (runtime.upload(&[9.0f32; 8]).unwrap(), runtime.upload(&[9.0f32; 16]).unwrap());
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
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [1.0; 16]);
    let _ = graph.update(&good()).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&y).unwrap(), [901.0; 16]);
}

#[test]
fn parameters_change_from_launch_to_launch_without_waiting() {
    let runtime = runtime();
    let (graph, [x, y]) = add(&runtime, 1.0);
    let held = hold(runtime.stream());
    // Each pending launch keeps its parameters: 1, 10, 100 and 1000 times x.
    let first = graph.launch().unwrap();
    for a in [10.0f32, 100.0, 1000.0] {
        let updated = graph.update(&GraphUpdate::new().params(NodeId::new(0), &a)).unwrap();
        assert_eq!(updated, UpdateOutcome::InPlace);
        graph.launch().unwrap();
    }
    assert!(!first.is_settled());
    // A fifth instance is not made: this waits for the first launch.
    std::thread::scope(|s| {
        s.spawn(|| {
            std::thread::sleep(Duration::from_millis(10));
            open(held);
        });
        let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &0.5f32)).unwrap();
        assert!(first.has_passed());
    });
    assert_eq!(runtime.to_vec(&y).unwrap(), [1111.0; 16]);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [1111.5; 16]);
    // Instances that were put aside have all changes since, of other nodes and buffers too.
    let other = runtime.upload(&[2.0f32; 16]).unwrap();
    let held = hold(runtime.stream());
    graph.launch().unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(&x, &other)).unwrap();
    for a in [1.0f32, 2.0] {
        let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &a)).unwrap();
        graph.launch().unwrap();
    }
    open(held);
    assert_eq!(runtime.to_vec(&y).unwrap(), [1112.0 + 2.0 + 4.0; 16]);
}

#[test]
fn a_graph_leaves_a_default_stream_that_failed() {
    let mut runtime = runtime();
    let (graph, [_, y]) = add(&runtime, 1.0);
    let mut clone = runtime.clone();
    poison(runtime.stream());
    assert_eq!(kind(graph.launch()), "Fault");
    runtime.replace_default_stream().unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [1.0; 16]);
    // A clone takes what another one was given.
    assert!(clone.stream().failure().is_some() && !clone.stream().same(runtime.stream()));
    clone.replace_default_stream().unwrap();
    assert!(
        clone.stream().same(runtime.stream()) && runtime.clone().stream().same(runtime.stream())
    );
    let again = runtime.context().runtime(runtime.device()).unwrap();
    assert!(again.stream().same(runtime.stream()));
    // Failure after failure: no stream of the device's, and no timeline, is used up.
    for _ in 0..600 {
        runtime.stream().host_call("fails", || Err(leasehold::Error::other("on purpose"))).unwrap();
        assert!(runtime.stream().synchronize().is_err());
        runtime.replace_default_stream().unwrap();
    }
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [2.0; 16]);
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
    assert!(stream.synchronize().is_err());
    assert_eq!(
        graph.update(&GraphUpdate::new().grid(NodeId::new(0), [0, 1, 1])).unwrap(),
        UpdateOutcome::InPlace
    );
    // The fill overwrites the buffer that the failed launch wrote.
    runtime.stream().fill(x.view(), 0u8).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [1, 2, 3, 4]);
}

/// The graph wrote all of the old buffer, and writes a part of the new one. The rest still has the
/// failure.
#[test]
fn a_failure_in_a_longer_buffer_reaches_the_graph_that_writes_a_part_of_it() {
    let runtime = runtime();
    let (old, long) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.upload(&[1u32; 8]).unwrap());
    let graph = runtime.record_graph(|r| r.stream().fill(old.view(), 3u32)).unwrap();
    let (failing, stream) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    runtime.synchronize().unwrap();
    launch(&failing, &trap(), &[long.read_write()], &[], 1).unwrap();
    assert!(failing.synchronize().is_err());
    assert_eq!(
        graph.update(&GraphUpdate::new().buffer(&old, &long)).unwrap(),
        UpdateOutcome::Reinstantiated
    );
    let launched = graph.launch_on(&stream).and_then(|_| stream.synchronize());
    assert!(launched.is_err(), "the rest of the buffer is as the failed launch left it");
    assert!(runtime.to_vec::<u32>(&long).is_err());
}

#[test]
fn pinned_memory_of_a_recorded_copy_can_be_replaced() {
    let runtime = runtime();
    let (a, b) = (runtime.alloc_pinned(16).unwrap(), runtime.alloc_pinned(16).unwrap());
    let x = runtime.alloc(16).unwrap();
    // SAFETY: nobody else touches them.
    unsafe {
        runtime.stream().map_write(a.view()).unwrap().fill(1);
        runtime.stream().map_write(b.view()).unwrap().fill(2);
    }
    let graph = runtime.record_graph(|r| r.stream().copy_pinned(x.view(), a.view())).unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(&a, &b)).unwrap();
    assert_eq!(a.strong_count(), 1);
    drop(a);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u8>(&x).unwrap(), [2; 16]);
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
                let _ =
                    graph.update(&GraphUpdate::new().params(NodeId::new(0), &(i as f32))).unwrap();
            }
        });
    });
    let _ = graph.update(&GraphUpdate::new().params(NodeId::new(0), &0.0f32)).unwrap();
    graph.launch().unwrap();
    let got = runtime.to_vec::<f32>(&y).unwrap();
    assert!(got.iter().all(|&v| v == got[0]), "no launch saw half an update");
}
