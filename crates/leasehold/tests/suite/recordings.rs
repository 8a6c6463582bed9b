//! Calls that may and may not happen while a thread records, and the undoing of recordings.

use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::backend::sync::{Arc, Mutex};
use leasehold::graph::{GraphRecording, LaunchCheck, NodeId, Note, StopCheck};
use leasehold::infini::InfiniRuntime;
use leasehold::kernel::{session_ops, session_sync_ops};
use leasehold::{
    Buffer, Error, GraphOperator, KernelSession, Lease, Operand, Result, Runtime, Stream,
    Timepoint, View, ops,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::time::Duration;

/// How many operations this thread has recorded in a runtime's recording.
fn recorded(runtime: &Runtime) -> Option<u32> {
    runtime.stream().next_node().map(NodeId::index)
}

type Encode<'a> = Box<dyn Fn(&Stream) -> Result<()> + 'a>;

/// An operator made of closures.
struct Op<'a> {
    accesses: Vec<Operand<'a>>,
    encode: Encode<'a>,
}

impl<'a> Op<'a> {
    fn new(accesses: &[Operand<'a>], encode: impl Fn(&Stream) -> Result<()> + 'a) -> Self {
        Self { accesses: accesses.to_vec(), encode: Box::new(encode) }
    }
}

impl GraphOperator for Op<'_> {
    fn name(&self) -> &str {
        "a test's"
    }
    fn accesses(&self) -> Vec<Operand<'_>> {
        self.accesses.clone()
    }
    fn encode(&self, stream: &Stream) -> Result<()> {
        (self.encode)(stream)
    }
}

#[test]
fn what_asks_or_waits_is_refused_and_the_recording_goes_on() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let point = runtime.stream().now();
    let finished = runtime.record_graph(|_| Ok(())).unwrap();
    let graph = runtime
        .record_graph(|r| {
            let zero = Duration::ZERO;
            let refused = [
                kind(r.stream().synchronize()),
                kind(r.synchronize()),
                kind(r.stream().query()),
                kind(r.stream().synchronize_timeout(zero)),
                kind(r.wait_for(point)),
                kind(r.wait_for_timeout([], zero)),
                kind(r.wait_for_any(&[point], zero)),
                kind(r.to_vec::<u32>(&x)),
                kind(r.alloc_pinned(4)),
                kind(r.stream().upload_blocking(x.view(), &[0u32; 4])),
                kind(r.memcpy_d2d(x.part(..4)?, x.part(8..12)?, false)),
                // SAFETY: nothing is read.
                kind(unsafe { r.stream().map_read(x.view()) }),
                // SAFETY: nothing is written.
                kind(unsafe { r.stream().map_write(x.view()) }),
                kind(r.stream().host_call_once("once", || Ok(()))),
                kind(r.start_graph_recording()),
                kind(r.record_graph(|_| Ok(()))),
                kind(finished.launch_on(r.stream())),
                kind(r.clone().replace_default_stream()),
                kind(r.clone().close(Duration::ZERO)),
            ];
            assert_eq!(refused, ["Recording"; 19]);
            assert_eq!(recorded(r), Some(0), "none of it was recorded");
            r.stream().fill(x.view(), 6u32)
        })
        .unwrap();
    assert_eq!(recorded(&runtime), None);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [6; 4]);
}

#[test]
fn what_names_no_recording_works_while_one_is_made() {
    let runtime = runtime();
    let mut host = runtime.alloc_pinned_array::<u32>(4).unwrap();
    let (x, event) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.create_event().unwrap());
    runtime.stream().record(&event).unwrap();
    let mut fill = runtime.record_graph(|r| r.stream().fill(x.view(), 6u32)).unwrap();
    let graph = runtime
        .record_graph(|r| {
            event.synchronize()?;
            assert!(event.query()?);
            assert_eq!(event.elapsed_since(&event)?, Duration::ZERO);
            host.map()?[0] = 3;
            fill.launch()?;
            let _ = fill.update(&leasehold::GraphUpdate::new())?;
            fill = runtime.record_graph(|inner| inner.stream().fill(x.view(), 8u32))?;
            assert_eq!(runtime.to_vec::<u32>(&x)?, [6; 4], "a launch is no part of it");
            r.stream().fill(x.part(..4)?, 7u32)
        })
        .unwrap();
    assert_eq!((graph.recorded(), host.map().unwrap()[0]), (1, 3));
    fill.launch().unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [7, 8, 8, 8]);
}

#[test]
fn a_recording_is_a_value_and_everything_else_is_eager() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let (old, mut left) = (runtime.create_stream().unwrap(), None);
    let graph = runtime
        .record_graph(|r| {
            // What was there before runs at once, and has memory of its own.
            assert!(!runtime.is_graph_recording() && !runtime.stream().is_recording());
            assert!(!runtime.alloc(16)?.is_symbolic() && !old.runtime().alloc(16)?.is_symbolic());
            old.fill(x.view(), 2u32)?;
            runtime.stream().fill(x.part(..4)?, 3u32)?;
            assert_eq!(runtime.to_vec::<u32>(&x)?, [3, 2, 2, 2]);
            // A buffer of the recording has no address there.
            let t = r.alloc(16)?;
            let error = old.copy(x.view(), t.view()).unwrap_err();
            // Whatever it is: the error names the recording and never an address. That a part is
            // misaligned makes no difference.
            let values = t.view();
            for error in [
                Some(error),
                launch(&old, &iota(), &[t.write()], &[0; 4], 1).err(),
                launch(&old, &iota(), &[t.part(1..)?.write()], &[0; 4], 1).err(),
                old.fill(values, 1u32).err(),
                old.upload(values, &[0u8; 16]).err(),
                old.upload_blocking(values, &[0u8; 16]).err(),
                old.upload_owned(values, vec![0u8; 16]).err(),
                old.download(&mut [0u8; 16], values).err(),
                old.copy(x.view(), values).err(),
                runtime.to_vec::<u32>(&t).err(),
            ] {
                let error = error.expect("work on a buffer without an address");
                let text = error.to_string();
                assert_eq!(error.kind(), "Recording", "{text}");
                assert!(text.contains("a buffer of a recording") && !text.contains("0x"), "{text}");
            }
            // The recording is in the runtime, its streams and what is made of them.
            let new = r.create_stream()?;
            for stream in [r.stream(), &new, new.runtime().stream(), &r.clone().stream().clone()] {
                assert!(stream.is_recording() && stream.runtime().is_graph_recording());
                stream.copy(t.view(), x.view())?;
            }
            assert!(r.same(&runtime) && !r.stream().same(runtime.stream()));
            assert!(new.runtime().stream().same(&new) && !r.stream().same(&new));
            assert_eq!(recorded(r), Some(4));
            left = Some((r.clone(), new));
            r.stream().copy(x.part(4..8)?, t.part(..4)?)
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [3, 3, 2, 2]);
    // What is left of it says that it is over.
    let (left, stream) = left.unwrap();
    assert!(!left.is_graph_recording() && recorded(&left).is_none());
    for error in [
        kind(left.alloc(16)),
        kind(stream.fill(x.view(), 9u32)),
        kind(stream.wait(runtime.stream().now())),
        kind(launch(&stream, &iota(), &[x.write()], &[0; 4], 1)),
        kind(left.stop_graph_recording()),
        kind(left.add_graph_operator(&Op::new(&[], |_| Ok(())))),
    ] {
        assert_eq!(error, "Recording");
    }
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [3, 3, 2, 2]);
}

#[test]
fn a_recording_is_used_by_the_thread_that_began_it() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let graph = runtime
        .record_graph(|r| {
            r.stream().fill(x.part(..4)?, 5u32)?;
            std::thread::scope(|s| {
                let there = || {
                    let refused = [
                        kind(r.alloc(16)),
                        kind(r.stream().fill(x.view(), 9u32)),
                        kind(launch(r.stream(), &iota(), &[x.write()], &[0; 4], 1)),
                        kind(r.stop_graph_recording()),
                        kind(r.add_graph_operator(&Op::new(&[], |_| Ok(())))),
                    ];
                    assert_eq!(refused, ["Recording"; 5]);
                    r.abandon_graph_recording();
                    assert!(r.is_graph_recording());
                    // The runtime that it is of is everybody's.
                    runtime.stream().fill(x.part(4..8).unwrap(), 6u32).unwrap();
                };
                s.spawn(there).join().unwrap();
            });
            assert_eq!(recorded(r), Some(1));
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [5, 6, 1, 1]);
}

#[test]
fn a_thread_has_several_recordings_which_any_thread_may_give_up() {
    let runtime = runtime();
    let x = runtime.zeros::<u32>(4).unwrap();
    let [first, second, third] = [(); 3].map(|()| GraphRecording::begin(&runtime).unwrap());
    first.runtime().stream().fill(x.view(), 1u32).unwrap();
    second.runtime().stream().fill(x.view(), 2u32).unwrap();
    let (held, lent) = (Arc::new(()), third.runtime().clone());
    let kept = held.clone();
    let call = move || {
        let _ = &kept;
        Ok(())
    };
    lent.stream().host_call("holds something", call).unwrap();
    // Another thread can neither use nor stop a recording. Both go on then.
    std::thread::scope(|scope| {
        let elsewhere = || {
            let refused = first.stop().unwrap_err();
            assert!(matches!(refused, Error::Recording { .. }), "{refused}");
            assert!(second.runtime().stream().fill(x.view(), 3u32).is_err());
            drop(third);
        };
        scope.spawn(elsewhere);
    });
    assert_eq!(Arc::strong_count(&held), 1, "what was recorded is gone");
    assert!(lent.stream().fill(x.view(), 4u32).is_err());
    let (first, second) = (first.stop().unwrap(), second.stop().unwrap());
    second.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [2; 4]);
    first.launch().unwrap();
    assert_eq!(runtime.to_vec(&x).unwrap(), [1; 4]);
}

#[test]
fn the_four_names_agree_on_what_a_thread_has_started() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let op = Op::new(&[x.read(), y.write()], |stream| {
        let t = stream.runtime().alloc(16)?;
        stream.copy(t.view(), x.view())?;
        stream.copy(y.view(), t.view())
    });
    assert_eq!(kind(runtime.stop_graph_recording()), "Recording");
    runtime.start_graph_recording().unwrap();
    assert_eq!(kind(runtime.start_graph_recording()), "Recording");
    runtime.add_graph_operator(&op).unwrap();
    // A recording by a call is another one, and leaves this one alone.
    let other = runtime.record_graph(|r| r.add_graph_operator(&op)).unwrap();
    assert_eq!(other.recorded(), 2);
    assert!(runtime.is_graph_recording());
    assert_eq!(recorded(&runtime), None, "this runtime itself does not record");
    let graph = runtime.stop_graph_recording().unwrap();
    assert!(!runtime.is_graph_recording());
    assert_eq!((graph.recorded(), runtime.to_vec::<u32>(&y).unwrap()), (2, vec![0; 4]));
    runtime.add_graph_operator(&op).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [1; 4], "it runs at once");
    // What is stopped within the call is over for the call.
    let mut stopped = None;
    let over = runtime.record_graph(|r| {
        r.add_graph_operator(&op)?;
        stopped = Some(r.stop_graph_recording()?);
        Ok(())
    });
    assert_eq!((kind(over), stopped.unwrap().recorded()), ("Recording", 2));
    // By the runtime that records, the thread's record of it goes as well.
    let recording = runtime.start_graph_recording().unwrap();
    recording.add_graph_operator(&op).unwrap();
    assert_eq!(recording.stop_graph_recording().unwrap().recorded(), 2);
    assert!(!runtime.is_graph_recording());
    runtime.start_graph_recording().unwrap().abandon_graph_recording();
    assert!(!runtime.is_graph_recording());
}

#[test]
fn code_that_takes_its_stream_from_the_current_context_is_recorded_where_that_is_set() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let library = || leasehold::Current::get()?.stream().fill(x.view(), 4u32);
    let graph = runtime
        .record_graph(|r| {
            let _current = r.enter()?;
            library()
        })
        .unwrap();
    assert_eq!(graph.recorded(), 1);
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1; 4]);
}

#[test]
fn an_extension_that_is_made_in_a_recording_gets_memory_of_its_own() {
    struct Workspace(Lease<Buffer>);
    let runtime = runtime();
    let failed = runtime.record_graph(|r| {
        let made = r.extension(|plain| {
            assert!(!plain.is_graph_recording());
            plain.alloc(64).map(Workspace)
        })?;
        assert!(!made.0.is_symbolic());
        Err(Error::state("on purpose"))
    });
    assert_eq!(kind(failed), "InvalidState");
    let kept = runtime.extension(|_| -> Result<Workspace> { unreachable!() }).unwrap();
    runtime.stream().fill(kept.0.view(), 1u8).unwrap();
}

#[test]
fn what_a_failed_operator_drops_may_record() {
    /// Records as it goes.
    struct Late(Runtime, Lease<Buffer>);
    impl Drop for Late {
        fn drop(&mut self) {
            self.0.stream().fill(self.1.view(), 9u32).unwrap();
        }
    }
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            let t = r.alloc(16)?;
            r.stream().fill(t.view(), 5u32)?;
            let failing = Op::new(&[], |stream| {
                let late = Late(r.clone(), y.buffer().clone());
                stream.host_call("holds", move || {
                    let _ = &late;
                    Ok(())
                })?;
                Err(Error::state("on purpose"))
            });
            assert_eq!(kind(r.add_graph_operator(&failing)), "InvalidState");
            assert_eq!(recorded(r), Some(2), "what it dropped was recorded");
            r.stream().copy(x.view(), t.view())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [5; 4]);
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [9; 4]);
}

#[test]
fn other_threads_are_not_affected() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32; 4]).unwrap();
    let recording = runtime.start_graph_recording().unwrap();
    recording.stream().fill(x.view(), 1u32).unwrap();
    std::thread::scope(|s| {
        s.spawn(|| {
            assert!(!runtime.is_graph_recording());
            assert_eq!(kind(runtime.stop_graph_recording()), "Recording");
            let y = runtime.alloc(16).unwrap();
            assert!(!y.is_symbolic());
            runtime.stream().fill(y.view(), 2u32).unwrap();
            assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [2; 4]);
            assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [0; 4]);
            // Another thread may record as well.
            let graph = runtime.record_graph(|r| r.stream().fill(y.view(), 3u32)).unwrap();
            graph.launch().unwrap();
            assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [3; 4]);
        });
    });
    assert!(runtime.is_graph_recording());
    let graph = runtime.stop_graph_recording().unwrap();
    assert_eq!(graph.recorded(), 1);
}

#[test]
fn one_thread_records_on_two_devices_and_works_on_a_third() {
    let (a, b, c) = (runtime(), runtime(), runtime());
    let kernel = iota();
    let x = [&a, &b, &c].map(|r| r.upload(&[0u32; 4]).unwrap());
    let run = |r: &Runtime, x: &Lease<Buffer>, first: u32| {
        launch(r.stream(), &kernel, &[x.write()], &first.to_ne_bytes(), 1)
    };
    let (to_a, to_b) = (a.start_graph_recording().unwrap(), b.start_graph_recording().unwrap());
    assert!(run(&to_a, &x[0], 10).unwrap().is_none());
    assert!(run(&to_b, &x[1], 20).unwrap().is_none());
    assert!(run(&c, &x[2], 30).unwrap().is_some());
    // A session open on one recording does not occupy the other.
    let session = KernelSession::begin(&kernel, to_a.stream()).unwrap();
    run(&to_b, &x[1], 21).unwrap();
    assert_eq!(kind(run(&to_a, &x[0], 11)), "Occupied");
    assert_eq!(kind(a.stop_graph_recording()), "Occupied");
    drop(session);
    let (ga, gb) = (a.stop_graph_recording().unwrap(), b.stop_graph_recording().unwrap());
    assert_eq!((ga.recorded(), gb.recorded()), (1, 2));
    ga.launch().unwrap();
    gb.launch().unwrap();
    assert_eq!(a.to_vec::<u32>(&x[0]).unwrap(), [10, 11, 12, 13]);
    assert_eq!(b.to_vec::<u32>(&x[1]).unwrap(), [21, 22, 23, 24]);
    assert_eq!(c.to_vec::<u32>(&x[2]).unwrap(), [30, 31, 32, 33]);
}

#[test]
fn an_abandoned_recording_rolls_back() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let live = runtime.allocator().stats().live_bytes;
    let strong = x.strong_count();
    let check = |how: &str| {
        assert!(!runtime.is_graph_recording(), "{how}");
        assert_eq!(x.strong_count(), strong, "{how}: nothing is retained");
        assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1; 4], "{how}: nothing ran");
        assert_eq!(runtime.allocator().stats().live_bytes, live, "{how}");
        runtime.record_graph(|_| Ok(())).unwrap();
    };
    let record = |r: &Runtime| -> Result<()> {
        let t = r.alloc(1 << 20)?;
        r.stream().copy(t.part(..16)?, x.view())?;
        r.stream().fill(x.view(), 9u32)
    };
    record(&runtime.start_graph_recording().unwrap()).unwrap();
    runtime.abandon_graph_recording();
    check("abandoned by hand");
    runtime.abandon_graph_recording();

    let failed = runtime.record_graph(|r| {
        record(r)?;
        Err(Error::state("on purpose"))
    });
    assert_eq!(kind(failed), "InvalidState");
    check("the closure failed");

    let panicked = catch_unwind(AssertUnwindSafe(|| {
        runtime.record_graph(|r| {
            record(r).unwrap();
            panic!("on purpose")
        })
    }));
    assert!(panicked.is_err());
    check("the closure panicked");

    std::thread::scope(|s| {
        let ends = s.spawn(|| {
            record(&runtime.start_graph_recording().unwrap()).unwrap();
        });
        // The scope itself does not wait for a thread's own destructors.
        ends.join().unwrap();
    });
    check("the thread ended");
}

#[test]
fn a_thread_that_ends_while_it_records_may_be_the_runtimes_last_holder() {
    let x = std::thread::spawn(|| {
        // Dropped by the recording, at the thread's end; its destructor looks for a recording.
        struct Nosy(Runtime);
        impl Drop for Nosy {
            fn drop(&mut self) {
                assert!(!self.0.alloc(16).unwrap().is_symbolic());
            }
        }
        let (runtime, other) = (runtime(), runtime());
        let x = runtime.upload(&[1u32; 4]).unwrap();
        let nosy = Nosy(other);
        runtime
            .start_graph_recording()
            .unwrap()
            .stream()
            .host_call("holds", move || {
                let _ = &nosy;
                Ok(())
            })
            .unwrap();
        x
    })
    .join()
    .expect("the thread's end must not panic");
    assert_eq!(x.len(), 4);
}

#[test]
fn a_buffer_of_a_recording_belongs_to_it() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let recording = runtime.start_graph_recording().unwrap();
    let t = recording.alloc(16).unwrap();
    assert!(t.is_symbolic());
    std::thread::scope(|s| {
        s.spawn(|| {
            // Eagerly, or in another recording: it has no address there.
            assert_eq!(kind(runtime.stream().copy(x.view(), t.view())), "Recording");
            assert_eq!(kind(runtime.to_vec::<u32>(&t)), "Recording");
            assert_eq!(
                kind(launch(runtime.stream(), &iota(), &[t.write()], &[0; 4], 1)),
                "Recording"
            );
            let graph = runtime
                .record_graph(|r| {
                    assert_eq!(kind(r.stream().copy(x.view(), t.view())), "Recording");
                    assert_eq!(
                        kind(launch(r.stream(), &iota(), &[t.write()], &[0; 4], 1)),
                        "Recording"
                    );
                    Ok(())
                })
                .unwrap();
            assert_eq!(graph.recorded(), 0);
        });
    });
    // Also when this thread records elsewhere.
    let other = crate::common::runtime();
    runtime.abandon_graph_recording();
    let _elsewhere = other.start_graph_recording().unwrap();
    assert_eq!(kind(runtime.stream().copy(x.view(), t.view())), "Recording");
    assert_eq!(kind(launch(runtime.stream(), &iota(), &[t.write()], &[0; 4], 1)), "Recording");
    other.abandon_graph_recording();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1; 4]);
}

#[test]
fn a_session_stays_where_it_was_begun() {
    let runtime = runtime();
    let kernel = iota();
    let x = runtime.upload(&[0u32; 4]).unwrap();
    let finish = |session| -> Result<Option<leasehold::Timepoint>> {
        let session = session_sync_ops::wait(session, &[x.write()])?;
        let session = session_ops::bind(session)?;
        let session = session_ops::params(session, &5u32)?;
        session_sync_ops::update_tokens(session_ops::dispatch_1d(session, 1, 1)?).finish()
    };
    // Begun eagerly, finished while the thread records: it runs.
    let session = KernelSession::begin(&kernel, runtime.stream()).unwrap();
    let first = runtime.start_graph_recording().unwrap();
    assert!(finish(session).unwrap().is_some());
    assert_eq!(recorded(&first), Some(0));
    // Begun in a recording that is gone: it is refused, and never runs on the stream.
    let session = KernelSession::begin(&kernel, first.stream()).unwrap();
    runtime.abandon_graph_recording();
    let before = runtime.stream().now();
    assert_eq!(kind(finish(session)), "Recording");
    assert_eq!(runtime.stream().now(), before);
    // Nor in the next recording.
    let second = runtime.start_graph_recording().unwrap();
    let session = KernelSession::begin(&kernel, second.stream()).unwrap();
    runtime.abandon_graph_recording();
    let _third = runtime.start_graph_recording().unwrap();
    assert_eq!(kind(finish(session)), "Recording");
    assert_eq!(runtime.stop_graph_recording().unwrap().recorded(), 0);
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [5, 6, 7, 8]);
}

#[test]
fn a_session_forgotten_in_a_recording_ends_that_recording_only() {
    let runtime = runtime();
    let kernel = iota();
    let x = runtime.upload(&[0u32; 4]).unwrap();
    let failed = runtime.record_graph(|r| {
        std::mem::forget(KernelSession::begin(&kernel, r.stream())?);
        Ok(())
    });
    assert_eq!(kind(failed), "Occupied");
    assert!(!runtime.is_graph_recording(), "a recording that cannot be stopped is given up");
    let graph = runtime
        .record_graph(|r| {
            launch(r.stream(), &kernel, &[x.write()], &1u32.to_ne_bytes(), 1).map(drop)
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1, 2, 3, 4]);
}

#[test]
fn an_operator_runs_eagerly_or_is_recorded_by_the_same_code() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[2u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let op = Op::new(&[x.read(), y.write()], |stream| {
        let t = stream.runtime().alloc(16)?;
        stream.copy(t.view(), x.view())?;
        stream.fill(t.part(..4)?, 7u32)?;
        stream.copy(y.view(), t.view())
    });
    runtime.add_graph_operator(&op).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [7, 2, 2, 2]);
    runtime.stream().fill(y.view(), 0u8).unwrap();
    let graph = runtime.record_graph(|r| r.add_graph_operator(&op)).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [0; 4]);
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [7, 2, 2, 2]);
    let stream = runtime.create_stream().unwrap();
    op.encode(&stream).unwrap();
    stream.synchronize().unwrap();
}

#[test]
fn an_operator_that_fails_in_the_middle_leaves_no_trace() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let (z, event) = (runtime.upload(&[8u32; 4]).unwrap(), runtime.create_event().unwrap());
    let failing = Op::new(&[x.read_write(), z.read_write()], |stream| {
        let r = stream.runtime();
        stream.fill(x.view(), 66u32)?; // so far x was only read
        stream.fill(z.view(), 66u32)?;
        r.stream().record(&event)?;
        stream.wait(r.create_host_timeline()?.next())?;
        Err(Error::state("on purpose"))
    });
    let panicking = Op::new(&[z.read_write()], |stream| {
        stream.fill(z.view(), 77u32)?;
        panic!("on purpose")
    });
    let graph = runtime
        .record_graph(|r| {
            r.stream().copy(y.view(), x.view())?;
            assert_eq!(kind(r.add_graph_operator(&failing)), "InvalidState");
            assert!(catch_unwind(AssertUnwindSafe(|| r.add_graph_operator(&panicking))).is_err());
            assert_eq!(recorded(r), Some(1));
            r.stream().fill(y.part(..4)?, 5u32)
        })
        .unwrap();
    assert_eq!(z.strong_count(), 1, "what only the failed operators used is not retained");
    let point = graph.launch().unwrap();
    runtime.wait_for(point).unwrap();
    assert_eq!(event.serial(), 0);
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [5, 1, 1, 1]);
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1; 4]);
    // x is read by the graph, not written: reading it elsewhere does not wait for a launch.
    let held = hold(runtime.stream());
    graph.launch().unwrap();
    let other = runtime.create_stream().unwrap();
    let elsewhere = other.runtime().alloc(16).unwrap();
    other.copy(elsewhere.view(), x.view()).unwrap();
    other.synchronize_timeout(LONG).unwrap();
    open(held);
}

#[test]
fn an_operator_that_fails_leaves_an_event_its_record_before() {
    let runtime = runtime();
    let (start, event) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    let failing = Op::new(&[], |stream| {
        stream.record(&event)?;
        Err(Error::state("on purpose"))
    });
    let graph = runtime
        .record_graph(|r| {
            r.stream().record(&start)?;
            r.stream().record(&event)?;
            assert_eq!(kind(r.add_graph_operator(&failing)), "InvalidState");
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    event.elapsed_since(&start).unwrap();
}

#[test]
fn an_operator_must_declare_what_it_touches() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let copy = |accesses: &[Operand<'_>]| {
        let op = Op::new(accesses, |stream| stream.copy(y.view(), x.view()));
        let graph = runtime.record_graph(|r| {
            let result = r.add_graph_operator(&op);
            assert_eq!(recorded(r), Some(u32::from(result.is_ok())));
            result
        });
        kind(graph)
    };
    assert_eq!(copy(&[x.read(), y.write()]), "ok");
    assert_eq!(copy(&[x.read_write(), y.read_write()]), "ok");
    assert_eq!(copy(&[y.write()]), "InvalidArgument");
    assert_eq!(copy(&[x.read(), y.read()]), "InvalidArgument");
    // A temporary of somebody else's must be declared as well, one of its own need not.
    runtime
        .record_graph(|r| {
            let t = r.alloc(16)?;
            r.stream().copy(t.view(), x.view())?;
            let op = Op::new(&[y.write()], |stream| stream.copy(y.view(), t.view()));
            assert_eq!(kind(r.add_graph_operator(&op)), "InvalidArgument");
            let op = Op::new(&[y.write(), t.read()], |stream| {
                let own = stream.runtime().alloc(16)?;
                stream.copy(own.view(), t.view())?;
                stream.copy(y.view(), own.view())
            });
            r.add_graph_operator(&op)
        })
        .unwrap();
}

#[test]
fn operators_may_be_made_of_operators() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let inner = Op::new(&[x.read(), y.write()], |stream| stream.copy(y.view(), x.view()));
    let broken = Op::new(&[x.read_write()], |stream| {
        stream.fill(x.view(), 0u8)?;
        Err(Error::state("on purpose"))
    });
    let outer = Op::new(&[x.read(), y.write()], |stream| {
        assert!(stream.runtime().add_graph_operator(&broken).is_err());
        stream.runtime().add_graph_operator(&inner)
    });
    let careless = Op::new(&[y.write()], |stream| stream.runtime().add_graph_operator(&inner));
    let meddling = Op::new(&[], |stream| stream.runtime().stop_graph_recording().map(drop));
    let graph = runtime
        .record_graph(|r| {
            r.add_graph_operator(&outer)?;
            assert_eq!(kind(r.add_graph_operator(&careless)), "InvalidArgument");
            assert_eq!(kind(r.add_graph_operator(&meddling)), "Recording");
            assert_eq!(recorded(r), Some(1));
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [1; 4]);
}

/// A check that keeps the numbers that it was told, and refuses one.
struct Numbers {
    seen: Mutex<Vec<Vec<u32>>>,
    refused: u32,
    /// What the launches of the graphs that pass ask, if anything.
    launches: Option<Arc<Launches>>,
}

/// A check of launches, which allows some and keeps where they were submitted.
struct Launches {
    allowed: AtomicU32,
    at: Mutex<Vec<Timepoint>>,
}

impl LaunchCheck for Launches {
    fn before(&self) -> Result<()> {
        match self.allowed.load(Ordering::Relaxed) {
            0 => Err(Error::other("no launch is left")),
            left => {
                self.allowed.store(left - 1, Ordering::Relaxed);
                Ok(())
            }
        }
    }

    fn launched(&self, at: Timepoint) {
        self.at.lock().push(at);
    }
}

impl StopCheck for Numbers {
    fn check(&self, notes: &[Note]) -> Result<Option<Arc<dyn LaunchCheck>>> {
        let numbers: Vec<u32> = notes.iter().filter_map(|n| n.downcast_ref().copied()).collect();
        let refused = numbers.contains(&self.refused);
        self.seen.lock().push(numbers);
        if refused {
            return Err(Error::other("the check's own reason"));
        }
        Ok(self.launches.clone().map(|launches| launches as Arc<dyn LaunchCheck>))
    }
}

#[test]
fn a_recording_must_pass_the_checks_that_it_has_notes_for() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let numbers = |refused| Arc::new(Numbers { seen: Mutex::default(), refused, launches: None });
    let (one, two) = (numbers(99), numbers(7));
    let checks: [Arc<dyn StopCheck>; 2] = [one.clone(), two.clone()];
    let note = |stream: &Stream, check: usize, number: u32| -> Result<()> {
        stream.fill(x.view(), number)?;
        stream.note(&checks[check], Arc::new(number))
    };
    assert_eq!(kind(runtime.stream().note(&checks[0], Arc::new(0u32))), "Recording");
    let failing = Op::new(&[x.read_write()], |stream| {
        note(stream, 0, 50)?;
        Err(Error::state("on purpose"))
    });
    let working = Op::new(&[x.read_write()], |stream| note(stream, 0, 3));
    let graph = runtime
        .record_graph(|r| {
            note(r.stream(), 0, 1)?;
            note(r.stream(), 1, 2)?;
            assert_eq!(kind(r.add_graph_operator(&failing)), "InvalidState");
            r.add_graph_operator(&working)?;
            note(&r.create_stream()?, 0, 4)
        })
        .unwrap();
    // Each check once, with its own notes in order; what was undone left none.
    assert_eq!(
        (one.seen.lock().clone(), two.seen.lock().clone()),
        (vec![vec![1, 3, 4]], vec![vec![2]])
    );
    graph.launch().unwrap();
    assert_eq!(one.seen.lock().len(), 1, "a launch is not checked");

    let mut kept = None;
    let refused = runtime.record_graph(|r| {
        kept = Some(r.clone());
        note(r.stream(), 1, 7)
    });
    assert_eq!(refused.unwrap_err().to_string(), "the check's own reason");
    let late = kept.unwrap().stream().note(&checks[1], Arc::new(8u32));
    assert_eq!(kind(late), "Recording", "the recording is over");
    let _ = runtime.record_graph(|r| {
        note(r.stream(), 1, 9)?;
        Err(Error::other("given up"))
    });
    assert_eq!(two.seen.lock().len(), 2, "what is given up is not checked");
    assert_eq!(runtime.to_vec(&x).unwrap(), [4; 4]);
}

#[test]
fn a_graph_asks_its_checks_before_each_launch() {
    let runtime = runtime();
    let x = runtime.upload(&[1u32; 4]).unwrap();
    let launches = Arc::new(Launches { allowed: AtomicU32::new(2), at: Mutex::default() });
    let numbers = Numbers { seen: Mutex::default(), refused: 99, launches: Some(launches.clone()) };
    let check: Arc<dyn StopCheck> = Arc::new(numbers);
    let graph = runtime
        .record_graph(|r| {
            r.stream().fill(x.view(), 2u32)?;
            r.stream().note(&check, Arc::new(1u32))
        })
        .unwrap();
    let first = graph.launch().unwrap();
    let other = runtime.create_stream().unwrap();
    let second = graph.launch_on(&other).unwrap();
    assert_eq!(*launches.at.lock(), [first, second]);
    runtime.stream().fill(x.view(), 3u32).unwrap();
    for launch in [graph.launch(), graph.launch_on(&other)] {
        assert_eq!(launch.unwrap_err().to_string(), "no launch is left");
    }
    assert_eq!(graph.launches(), 2);
    assert_eq!(runtime.to_vec(&x).unwrap(), [3; 4], "nothing was launched, and the streams work");
}

#[test]
fn host_bytes_are_taken_when_they_are_recorded() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32; 4]).unwrap();
    let mut values = vec![4u32; 4];
    let graph = runtime.record_graph(|r| r.stream().upload(x.view(), &values)).unwrap();
    values.fill(0);
    for _ in 0..3 {
        runtime.stream().fill(x.view(), 0u8).unwrap();
        graph.launch().unwrap();
        assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [4; 4]);
    }
}

#[test]
fn memory_freed_while_recording_does_not_go_to_the_pool() {
    let runtime = runtime();
    let (y, seen) = (runtime.upload(&[0u32; 4]).unwrap(), runtime.allocator().stats());
    let graph = runtime
        .record_graph(|r| {
            for i in 0..8 {
                let t = r.alloc(16)?;
                r.stream().fill(t.view(), ops::Pattern::U32(i))?;
                r.stream().copy(y.view(), t.view())?;
            }
            assert_eq!(
                runtime.allocator().stats().live_bytes,
                seen.live_bytes,
                "a recording takes no memory"
            );
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [7; 4]);
}

#[test]
fn a_dropped_runtime_lives_as_long_as_its_graph() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32; 4]).unwrap();
    let graph = runtime.record_graph(|r| r.stream().fill(x.view(), 3u32)).unwrap();
    drop(runtime);
    graph.launch().unwrap();
    let clone = graph.clone();
    drop(graph);
    let point = clone.launch().unwrap();
    point.timeline().wait(point.value(), Some(LONG)).unwrap();
    assert_eq!(clone.launches(), 2);
}
