//! Many threads, each with streams of its own.

use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::{
    BackendKind, Buffer, Context, Current, DeviceId, Layout, Lease, Result, Runtime, Stream, View,
    ops,
};
use leasehold_sim::{MachineConfig, SimBackend};
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::Duration;

#[test]
fn eight_threads_work_on_streams_of_their_own() {
    let runtime = runtime();
    let kernel = axpy();
    std::thread::scope(|s| {
        for t in 0..8u32 {
            let (runtime, kernel) = (&runtime, &kernel);
            s.spawn(move || {
                let stream = runtime.create_stream().unwrap();
                let _current = stream.enter().unwrap();
                for round in 0..50u32 {
                    let current = Current::get().unwrap();
                    let n = 4 * (1 + (t + round) as usize % 9);
                    let layout = Layout::new(4 * n as u64);
                    let x = current.runtime().alloc_layout(layout).unwrap();
                    let y = current.runtime().alloc_layout(layout).unwrap();
                    stream.fill(x.view(), t as f32).unwrap();
                    stream.fill(y.view(), round as f32).unwrap();
                    launch(
                        &stream,
                        kernel,
                        &[x.read(), y.read_write()],
                        &2.0f32.to_ne_bytes(),
                        n as u32 / 4,
                    )
                    .unwrap();
                    let mut bytes = vec![0u8; 4 * n];
                    stream.download(&mut bytes, y.view()).unwrap();
                    let expect = round as f32 + 2.0 * t as f32;
                    assert!(
                        bytes
                            .chunks(4)
                            .all(|b| f32::from_ne_bytes(b.try_into().unwrap()) == expect)
                    );
                }
            });
        }
    });
    runtime.synchronize().unwrap();
    assert_eq!(runtime.allocator().stats().live_bytes, 0);
}

#[test]
fn buffers_go_from_thread_to_thread() {
    let runtime = runtime();
    let kernel = axpy();
    let one = runtime.upload(&[1.0f32; 64]).unwrap();
    let (to, from) = std::sync::mpsc::sync_channel::<Lease<Buffer>>(4);
    std::thread::scope(|s| {
        let (runtime, kernel, one) = (&runtime, &kernel, &one);
        s.spawn(move || {
            let stream = runtime.create_stream().unwrap();
            for i in 0..100 {
                let x = stream.runtime().alloc(256).unwrap();
                stream.fill(x.view(), i as f32).unwrap();
                to.send(x).unwrap();
            }
        });
        s.spawn(move || {
            let stream = runtime.create_stream().unwrap();
            for (i, x) in from.iter().enumerate() {
                launch(&stream, kernel, &[one.read(), x.read_write()], &1.0f32.to_ne_bytes(), 16)
                    .unwrap();
                let mut bytes = [0u8; 256];
                stream.download(&mut bytes, x.view()).unwrap();
                assert!(
                    bytes
                        .chunks(4)
                        .all(|b| f32::from_ne_bytes(b.try_into().unwrap()) == i as f32 + 1.0)
                );
            }
        });
    });
}

#[test]
fn a_stream_is_waited_for_while_another_thread_submits_to_it() {
    let runtime = runtime();
    let x = runtime.upload(&[0u32]).unwrap();
    std::thread::scope(|s| {
        let submit = s.spawn(|| {
            for i in 0..2000 {
                runtime.stream().fill(x.view(), ops::Pattern::U32(i)).unwrap();
            }
        });
        while !submit.is_finished() {
            runtime.stream().synchronize().unwrap();
        }
    });
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1999]);
}

#[test]
fn streams_are_made_and_dropped_by_many_threads() {
    let runtime = runtime();
    std::thread::scope(|s| {
        for _ in 0..8 {
            s.spawn(|| {
                for i in 0..50u32 {
                    let stream = runtime.create_stream().unwrap();
                    let x = stream.runtime().alloc(64).unwrap();
                    stream.fill(x.view(), ops::Pattern::U32(i)).unwrap();
                    let point = stream.now();
                    drop(stream);
                    // A stream that was dropped runs what it was given.
                    runtime.wait_for(point).unwrap();
                }
            });
        }
    });
    runtime.synchronize().unwrap();
}

/// Of two submissions with a common buffer the second waits for the first, however close they are:
/// the race detector says so.
#[test]
fn work_of_several_threads_with_common_buffers_is_ordered() {
    let sim = SimBackend::new(MachineConfig::seed(1)).unwrap();
    let machine = sim.machine().clone();
    let runtime = Context::with_backends(vec![Arc::new(sim)])
        .runtime(DeviceId::new(BackendKind::Sim, 0))
        .unwrap();
    let buffers = [runtime.upload(&[1u8; 256]).unwrap(), runtime.upload(&[2u8; 256]).unwrap()];
    let copy =
        |stream: &Stream, i: usize| stream.copy(buffers[i % 2].view(), buffers[(i + 1) % 2].view());
    let graphs: [_; 2] =
        std::array::from_fn(|i| runtime.record_graph(|r| copy(r.stream(), i)).unwrap());
    std::thread::scope(|s| {
        for t in 0..4 {
            let (runtime, copy, graphs) = (&runtime, &copy, &graphs);
            s.spawn(move || {
                let stream = runtime.create_stream().unwrap();
                for i in 0..500 {
                    if i % 3 == 0 {
                        graphs[(t + i) % 2].launch_on(&stream).unwrap();
                    } else {
                        copy(&stream, t + i).unwrap();
                    }
                }
            });
        }
    });
    runtime.synchronize().unwrap();
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{} reports, first {:?}", reports.len(), reports[0]);
}

/// A call that runs while its buffers are being submitted gets an error for them, and does not wait
/// for itself.
#[test]
fn a_call_in_the_middle_of_a_submission_is_told_so() {
    let runtime =
        Context::with_backends(vec![Arc::new(SimBackend::new(MachineConfig::seed(1)).unwrap())])
            .runtime(DeviceId::new(BackendKind::Sim, 0))
            .unwrap();
    let (x, y) = (runtime.upload(&[1u32; 4]).unwrap(), runtime.alloc(16).unwrap());
    let (other, same, free) = (runtime.create_stream().unwrap(), x.clone(), y.clone());
    let (tell, hear) = std::sync::mpsc::channel();
    // SAFETY: the call submits to other streams only, by the runtime.
    unsafe {
        runtime
            .stream()
            .foreign_call("nested", &[x.read_write()], move |_, _| {
                tell.send(other.fill(same.view(), 2u8)).unwrap();
                other.fill(free.view(), 3u8)
            })
            .unwrap();
    }
    assert!(matches!(hear.recv().unwrap(), Err(leasehold::Error::Occupied { .. })));
    assert_eq!(runtime.to_vec::<u32>(&x).unwrap(), [1; 4]);
    assert_eq!(runtime.to_vec::<u8>(&y).unwrap(), [3; 16]);
}

/// Functions that go on submitting do not keep a submitter waiting, which has to wait for room and
/// they have not.
#[test]
fn room_comes_beside_host_calls_that_submit_for_ever() {
    fn again(stream: Stream, stop: Arc<AtomicBool>) -> Result<()> {
        let next = stream.clone();
        stream.host_call_once("again", move || {
            if stop.load(Ordering::Relaxed) { Ok(()) } else { again(next, stop) }
        })
    }
    let runtime = Runtime::open(DeviceId::cpu(0)).unwrap();
    let stream = runtime.create_stream().unwrap();
    let stop = Arc::new(AtomicBool::new(false));
    for _ in 0..4 {
        again(stream.clone(), stop.clone()).unwrap();
    }
    // Far more than a stream has room for.
    while stream.now().value() < 40_000 {
        thread::yield_now();
    }
    let (tell, told) = mpsc::channel();
    let submitter = {
        let (runtime, stream) = (runtime.clone(), stream.clone());
        thread::spawn(move || {
            let x = runtime.zeros::<u8>(16).unwrap();
            tell.send(stream.fill(x.view(), 1u8)).unwrap();
        })
    };
    let submitted = told.recv_timeout(Duration::from_secs(20));
    stop.store(true, Ordering::Relaxed);
    submitter.join().unwrap();
    submitted.expect("it waits as long as the functions submit").unwrap();
    stream.synchronize().unwrap();
}
