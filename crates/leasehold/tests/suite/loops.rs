//! Loops and branches at the public API: how they are recorded, and what is taken back.

use crate::common::*;
use leasehold::graph::{GraphBudget, GraphRecording};
use leasehold::kernel::CpuArgs;
use leasehold::{
    Access, Array, Error, GraphOperator, KernelSession, Name, Operand, Result, Runtime, Stream,
    View,
};
use std::panic::{AssertUnwindSafe, catch_unwind};

unsafe fn run_take(args: &CpuArgs<'_>) {
    // SAFETY: one tile of one element.
    let x = unsafe { args.slice_mut::<u32>(0, 0, 1) };
    x[0] = x[0].wrapping_sub(args.params());
}

/// `x[0] -= by`.
fn take(on: &Stream, x: &Array<u32>, by: u32) -> Result<()> {
    let kernel = kernel("take", run_take, &[Access::ReadWrite], 4);
    launch(on, &kernel, &[x.read_write()], &by.to_ne_bytes(), 1).map(drop)
}

/// An operator that counts `left` down to zero, and takes one from `x` in each round.
struct CountDown<'a> {
    left: &'a Array<u32>,
    x: &'a Array<u32>,
    fails: bool,
}

impl GraphOperator for CountDown<'_> {
    fn name(&self) -> &str {
        "count down"
    }
    fn accesses(&self) -> Vec<Operand<'_>> {
        vec![self.left.read_write(), self.x.read_write()]
    }
    fn encode(&self, stream: &Stream) -> Result<()> {
        stream.record_while(self.left, |body| {
            take(body.stream(), self.x, 1)?;
            take(body.stream(), self.left, 1)
        })?;
        if self.fails { Err(Error::state("on purpose")) } else { Ok(()) }
    }
}

fn words(runtime: &Runtime) -> [Array<u32>; 2] {
    [3, 100].map(|value| runtime.upload(&[value]).unwrap())
}

#[test]
fn operators_may_have_loops_and_bodies_may_have_operators() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    let rounds = runtime.upload(&[2u32]).unwrap();
    let [good, bad] = [false, true].map(|fails| CountDown { left: &left, x: &x, fails });
    let graph = runtime
        .record_graph(|r| {
            assert_eq!(kind(r.add_graph_operator(&bad)), "InvalidState");
            assert_eq!(r.stream().next_node().map(|n| n.index()), Some(0), "it is taken back");
            r.stream().record_while(&rounds, |body| {
                assert!(body.stream().is_recording() && body.is_graph_recording());
                assert!(body.stream().next_node().is_none() && body.same(r));
                body.stream().fill(left.view(), 5u32)?;
                body.add_graph_operator(&good)?;
                assert_eq!(kind(body.add_graph_operator(&bad)), "InvalidState");
                take(body.stream(), &rounds, 1)
            })?;
            assert_eq!(r.stream().next_node().map(|n| n.index()), Some(1));
            r.add_graph_operator(&good)
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [90]);
    assert_eq!((graph.recorded(), graph.nodes()), (2, 2));
    // The eager operator does the same.
    runtime.stream().fill(left.view(), 7u32).unwrap();
    runtime.add_graph_operator(&good).unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [83]);
}

#[test]
fn an_operator_declares_what_its_loop_touches() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    struct Hides<'a>(CountDown<'a>);
    impl GraphOperator for Hides<'_> {
        fn name(&self) -> &str {
            "hides"
        }
        fn accesses(&self) -> Vec<Operand<'_>> {
            vec![self.0.left.read_write()]
        }
        fn encode(&self, stream: &Stream) -> Result<()> {
            self.0.encode(stream)
        }
    }
    let graph = runtime
        .record_graph(|r| {
            let hides = Hides(CountDown { left: &left, x: &x, fails: false });
            assert_eq!(kind(r.add_graph_operator(&hides)), "InvalidArgument");
            take(r.stream(), &x, 1)
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [99]);
    assert_eq!(runtime.to_vec(&left).unwrap(), [3]);
}

#[test]
fn a_body_that_fails_or_panics_is_taken_back() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    let recording = GraphRecording::begin(&runtime).unwrap();
    let stream = recording.runtime().stream();
    let mut kept = Vec::new();
    let failed = stream.record_while(&left, |body| {
        let t = body.alloc(4)?;
        body.stream().copy(t.view(), x.view())?;
        take(body.stream(), &left, 1)?;
        kept.push((body.clone(), t));
        // So is a body in it, whose error comes out.
        body.stream().record_if(&x, |inner| {
            take(inner.stream(), &x, 1)?;
            kept.push((inner.clone(), inner.alloc(4)?));
            Err(Error::state("on purpose"))
        })
    });
    assert_eq!(kind(failed), "InvalidState");
    let panicked = catch_unwind(AssertUnwindSafe(|| {
        stream.record_if(&left, |body| {
            take(body.stream(), &x, 1)?;
            panic!("in the body")
        })
    }));
    assert!(panicked.is_err());
    for (body, _) in &kept {
        assert!(!body.is_graph_recording() && body.stream().is_recording());
        assert_eq!(kind(body.alloc(4)), "Recording");
        assert_eq!(kind(take(body.stream(), &x, 1)), "Recording");
        assert_eq!(kind(body.stream().record_if(&x, |_| Ok(()))), "Recording");
        assert_eq!(kind(body.stop_graph_recording()), "Recording");
        body.abandon_graph_recording();
    }
    assert_eq!(stream.next_node().map(|n| n.index()), Some(0));
    take(stream, &x, 10).unwrap();
    let graph = recording.stop().unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [90]);
    assert_eq!(runtime.to_vec(&left).unwrap(), [3]);
}

#[test]
fn sessions_and_threads_keep_away_from_bodies() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    let kernel = kernel("take", run_take, &[Access::ReadWrite], 4);
    let graph = runtime
        .record_graph(|r| {
            let open = KernelSession::begin(&kernel, r.stream())?;
            assert_eq!(kind(r.stream().record_if(&left, |_| Ok(()))), "Occupied");
            drop(open);
            r.stream().record_if(&left, |body| {
                let on_body = KernelSession::begin(&kernel, body.stream())?;
                assert_eq!(kind(body.stream().record_if(&x, |_| Ok(()))), "Occupied");
                drop(on_body);
                assert_eq!(kind(KernelSession::begin(&kernel, r.stream())), "Recording");
                std::thread::scope(|s| {
                    let there = s.spawn(|| {
                        let refused = body.stream().record_if(&x, |_| Ok(()));
                        [kind(refused), kind(take(body.stream(), &x, 1))]
                    });
                    assert_eq!(there.join().expect("it only asks"), ["Recording"; 2]);
                });
                assert_eq!(kind(GraphRecording::begin(body)), "Recording");
                take(body.stream(), &x, 1)
            })
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [99]);
}

#[test]
fn memory_of_another_device_or_recording_is_refused() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    let stranger = crate::common::runtime().upload(&[1u32]).unwrap();
    let other = GraphRecording::begin(&runtime).unwrap();
    let unborn = other.runtime().alloc_array::<u32>(1).unwrap();
    let mut leaked = None;
    let graph = runtime
        .record_graph(|r| {
            assert_eq!(kind(r.stream().record_if(&stranger, |_| Ok(()))), "InvalidArgument");
            assert_eq!(kind(r.stream().record_if(&unborn, |_| Ok(()))), "Recording");
            let refused =
                r.stream().record_if(&left, |body| body.stream().copy(x.view(), stranger.view()));
            assert!(refused.is_err());
            // A temporary of the body may be used behind it, and be a flag.
            r.stream().record_if(&left, |body| {
                let t = body.alloc_array::<u32>(1)?;
                body.stream().copy(t.view(), left.view())?;
                leaked = Some(t);
                Ok(())
            })?;
            let t = leaked.take().expect("the body ran");
            r.stream().record_while(&t, |body| {
                take(body.stream(), &x, 1)?;
                take(body.stream(), &t, 1)
            })
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [97]);
    assert_eq!(kind(runtime.stream().record_if(&stranger, |_| Ok(()))), "InvalidArgument");
    assert_eq!(kind(runtime.stream().record_if(&unborn, |_| Ok(()))), "Recording");
}

#[test]
fn a_trap_in_a_body_names_the_launch_and_the_stream_alone_fails() {
    let runtime = runtime();
    let [left, x] = words(&runtime);
    let trap = trap();
    let graph = runtime
        .record_graph(|r| {
            let _scope = Name::new("decode").scope();
            r.stream().record_while(&left, |body| {
                take(body.stream(), &left, 1)?;
                launch(body.stream(), &trap, &[x.read_write()], &[], 1).map(drop)
            })
        })
        .unwrap();
    let stream = runtime.create_stream().unwrap();
    graph.launch_on(&stream).unwrap();
    let text = stream.synchronize_timeout(LONG).unwrap_err().to_string();
    assert!(text.contains("loop \"decode\"") && text.contains("trap"), "{text}");
    let budget = GraphBudget::of(&runtime);
    assert_eq!(budget.stats().bytes, graph.exec_bytes());
    // The context lives.
    let fresh = runtime.upload(&[8u32]).unwrap();
    assert_eq!(runtime.to_vec(&fresh).unwrap(), [8]);
}

/// A branch in `depth` others.
fn nested(
    r: &leasehold::Runtime,
    flag: &leasehold::Array<u32>,
    x: &leasehold::Array<u32>,
    depth: usize,
) -> leasehold::Result<()> {
    match depth {
        0 => r.stream().fill(x.view(), 5u32),
        _ => r.stream().record_if(flag, |body| nested(body, flag, x, depth - 1)),
    }
}

#[test]
fn bodies_are_nested_to_a_limit_that_says_so() {
    let runtime = runtime();
    let (flag, x) = (runtime.upload(&[1u32]).unwrap(), runtime.zeros::<u32>(1).unwrap());
    let graph = runtime.record_graph(|r| nested(r, &flag, &x, 64)).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [5]);
    let refused = runtime.record_graph(|r| nested(r, &flag, &x, 65)).unwrap_err();
    assert_eq!(refused.kind(), "Unsupported");
    assert!(refused.to_string().contains("in 64 others"), "{refused}");
}

#[test]
fn the_outer_runtime_gives_a_recording_up_from_within_a_body() {
    let runtime = runtime();
    let (flag, x) = (runtime.upload(&[1u32]).unwrap(), runtime.zeros::<u32>(1).unwrap());
    let recorded = runtime.record_graph(|r| {
        r.stream().record_if(&flag, |body| {
            body.abandon_graph_recording();
            body.stream().fill(x.view(), 1u32)?; // by the body's own it does nothing
            r.abandon_graph_recording();
            assert_eq!(kind(body.stream().fill(x.view(), 2u32)), "Recording");
            Ok(())
        })
    });
    assert_eq!(kind(recorded), "Recording");
}
