//! Recording, planning, replay.

use crate::common::*;
use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::{Buffer, Event, Graph, Layout, Lease, Result, Runtime, Stream, View, ops};
use std::sync::Arc;
use std::time::Duration;

const N: usize = 64;

struct Work {
    axpy: leasehold::KernelBase,
    iota: leasehold::KernelBase,
    x: leasehold::Array<f32>,
    y: leasehold::Array<f32>,
}

impl Work {
    fn new(runtime: &Runtime) -> Self {
        let x: Vec<f32> = (0..N).map(|i| 0.1 + i as f32).collect();
        Self {
            axpy: axpy(),
            iota: iota(),
            x: runtime.upload(&x).unwrap(),
            y: runtime.upload(&[0.3f32; N]).unwrap(),
        }
    }

    /// `y = y + x/3`, then twice more by way of temporaries.
    fn run(&self, stream: &Stream) -> Result<()> {
        let bytes = 4 * N as u64;
        let third = (1.0f32 / 3.0).to_ne_bytes();
        let blocks = N as u32 / 4;
        launch(stream, &self.axpy, &[self.x.read(), self.y.read_write()], &third, blocks)?;
        for _ in 0..2 {
            let t = stream.runtime().alloc(bytes)?;
            stream.copy(t.view(), self.y.view())?;
            launch(stream, &self.axpy, &[self.x.read(), t.read_write()], &third, blocks)?;
            stream.copy(self.y.view(), t.view())?;
        }
        Ok(())
    }
}

#[test]
fn replay_equals_eager_to_the_bit_a_hundred_times() {
    let runtime = runtime();
    let (eager, replayed) = (Work::new(&runtime), Work::new(&runtime));
    let graph = runtime.record_graph(|r| replayed.run(r.stream())).unwrap();
    let bits = |b: &Lease<Buffer>| runtime.to_vec::<u32>(b).unwrap();
    assert_eq!(bits(&replayed.y), [0.3f32.to_bits(); N], "nothing runs while recording");
    for _ in 0..100 {
        eager.run(runtime.stream()).unwrap();
        graph.launch().unwrap();
        assert_eq!(bits(&eager.y), bits(&replayed.y));
    }
    assert_eq!((graph.launches(), graph.recorded(), graph.nodes()), (100, 7, 7));
}

#[test]
fn an_empty_recording_is_a_graph_that_does_nothing() {
    let runtime = runtime();
    let graph = runtime.record_graph(|_| Ok(())).unwrap();
    let point = graph.launch().unwrap();
    runtime.wait_for(point).unwrap();
    assert_eq!((graph.nodes(), graph.arena_bytes()), (0, 0));
}

#[test]
fn temporaries_are_packed_by_liveness() {
    let runtime = runtime();
    let work = Work::new(&runtime);
    let bytes = 1u64 << 20;
    let graph = runtime
        .record_graph(|r| {
            let mut last = r.alloc(bytes)?;
            launch(r.stream(), &work.iota, &[last.write()], &0u32.to_ne_bytes(), 1)?;
            for _ in 0..15 {
                let next = r.alloc(bytes)?;
                r.stream().copy(next.view(), last.view())?;
                last = next;
            }
            r.stream().copy(work.y.part(..16)?, last.part(..16)?)
        })
        .unwrap();
    // Two live at a time; rounded up to what the driver gives.
    assert!(
        graph.arena_bytes() < 4 * bytes + (4 << 20),
        "{} of {}",
        graph.arena_bytes(),
        16 * bytes
    );
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(work.y.part(..16).unwrap()).unwrap(), [0, 1, 2, 3]);
    let live = runtime.allocator().stats().live_bytes;
    drop(graph);
    runtime.synchronize().unwrap();
    assert!(runtime.allocator().stats().live_bytes < live, "the graph's memory goes with it");
}

#[test]
fn the_addresses_of_temporaries_are_aligned_as_asked() {
    let runtime = runtime();
    // So that the next block lies just anywhere.
    let _odd: Vec<_> = (0..3).map(|_| runtime.alloc(70_000).unwrap()).collect();
    for align in [256u64, 4096, 1 << 16, 1 << 20] {
        let mut held = Vec::new();
        runtime
            .record_graph(|r| {
                for i in 1..4 {
                    let t = r.stream().runtime().alloc_layout(Layout::aligned(100 * i, align))?;
                    assert!(t.is_symbolic());
                    r.stream().fill(t.view(), 1u8)?;
                    held.push(t);
                }
                Ok(())
            })
            .unwrap();
        for t in &held {
            assert!(
                !t.is_symbolic() && t.addr() % align == 0,
                "{:#x} is not aligned to {align}",
                t.addr()
            );
        }
    }
}

#[test]
fn a_temporary_that_is_still_held_has_an_address_and_its_uses_are_ordered() {
    let runtime = runtime();
    let (x, other) = (runtime.upload(&[1u32; 1024]).unwrap(), runtime.create_stream().unwrap());
    let mut kept = None;
    let graph = runtime
        .record_graph(|r| {
            let t = r.alloc(4096)?;
            r.stream().copy(t.view(), x.view())?;
            kept = Some(t);
            Ok(())
        })
        .unwrap();
    let t = kept.unwrap();
    runtime.synchronize().unwrap();
    for round in 0..50u32 {
        runtime.stream().fill(x.view(), ops::Pattern::U32(round)).unwrap();
        graph.launch().unwrap();
        // On another stream: ordered by the buffer's own record.
        let mut bytes = vec![0u8; 4096];
        other.download(&mut bytes, t.view()).unwrap();
        assert!(bytes.chunks(4).all(|b| u32::from_ne_bytes(b.try_into().unwrap()) == round));
    }
    // The lease keeps the memory, the graph need not.
    drop(graph);
    assert_eq!(runtime.to_vec::<u32>(&t).unwrap(), [49; 1024]);
}

#[test]
fn the_graph_waits_for_the_former_use_of_its_memory() {
    // Memory that was freed on the default stream while work was pending becomes the arena. The
    // graph is launched on another stream.
    let runtime = runtime();
    let (other, out) = (runtime.create_stream().unwrap(), runtime.upload(&[0u32; 1024]).unwrap());
    for _ in 0..20 {
        let held = hold(runtime.stream());
        let old = runtime.alloc(4096).unwrap();
        runtime.stream().fill(old.view(), 0xdeadu32).unwrap();
        drop(old);
        let graph = runtime
            .record_graph(|r| {
                let t = r.alloc(4096)?;
                r.stream().fill(t.view(), 7u32)?;
                r.stream().host_call("nap", || {
                    std::thread::sleep(Duration::from_micros(300));
                    Ok(())
                })?;
                r.stream().copy(out.view(), t.view())
            })
            .unwrap();
        let point = graph.launch_on(&other).unwrap();
        open(held);
        runtime.wait_for(point).unwrap();
        assert_eq!(runtime.to_vec::<u32>(&out).unwrap(), [7; 1024]);
    }
}

#[test]
fn what_repeats_is_left_out() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32; 16]).unwrap(), runtime.upload(&[0u32; 16]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            let s = r.stream();
            s.copy(y.view(), x.view())?;
            s.copy(y.view(), x.view())?;
            s.fill(x.part(..4)?, 5u32)?;
            s.copy(y.view(), x.view())?;
            s.fill(x.part(..4)?, 5u32)
        })
        .unwrap();
    assert_eq!((graph.recorded(), graph.nodes()), (5, 3));
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap()[..2], [5, 1]);
}

#[test]
fn temporaries_that_share_an_address_are_not_taken_for_repeats() {
    let runtime = runtime();
    let (out, work) = (runtime.upload(&[0u32; 8]).unwrap(), iota());
    let graph = runtime
        .record_graph(|r| {
            for first in [10u32, 20] {
                // The same memory both times.
                let t = r.alloc(16)?;
                launch(r.stream(), &work, &[t.write()], &first.to_ne_bytes(), 1)?;
                r.stream().copy(out.part(..16)?, t.view())?;
                r.stream()
                    .copy(
                        out.part(
                            (first as usize - 10) / 10 * 16..(first as usize - 10) / 10 * 16 + 16,
                        )?,
                        out.part(..16)?,
                    )
                    .or_else(|e| if first == 10 { Ok(()) } else { Err(e) })?;
            }
            Ok(())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&out).unwrap(), [20, 21, 22, 23, 20, 21, 22, 23]);
}

#[test]
fn branches_without_a_common_buffer_do_not_wait_for_each_other() {
    let runtime = runtime();
    let buffers: Vec<_> = (0..4).map(|_| runtime.upload(&[0u32; 64]).unwrap()).collect();
    let out = runtime.alloc(256).unwrap();
    let work = iota();
    let graph = runtime
        .record_graph(|r| {
            for (i, b) in buffers.iter().enumerate() {
                launch(r.stream(), &work, &[b.write()], &(i as u32).to_ne_bytes(), 16)?;
            }
            for (i, b) in buffers.iter().enumerate() {
                r.stream().copy(out.part(64 * i..64 * i + 64)?, b.part(..64)?)?;
            }
            Ok(())
        })
        .unwrap();
    let nodes = graph.describe();
    assert!(nodes[..4].iter().all(|n| n.1.is_empty()), "{nodes:?}");
    assert!((0..4).all(|i| nodes[4 + i].1 == [i as u32]), "{nodes:?}");
    assert_eq!(nodes[0].0, "dispatch iota");
    for _ in 0..40 {
        graph.launch().unwrap();
        let got = runtime.to_vec::<u32>(&out).unwrap();
        assert!((0..64).all(|i| got[i] == (i / 16 + i % 16) as u32), "{got:?}");
    }
}

#[test]
fn two_threads_launch_one_graph_on_two_streams() {
    let runtime = runtime();
    let x = runtime.upload(&[0.0f32; 16]).unwrap();
    let one = runtime.upload(&[1.0f32; 16]).unwrap();
    let kernel = axpy();
    let graph = runtime
        .record_graph(|r| {
            let t = r.alloc(64)?;
            r.stream().copy(t.view(), x.view())?;
            launch(r.stream(), &kernel, &[one.read(), t.read_write()], &1.0f32.to_ne_bytes(), 4)?;
            r.stream().copy(x.view(), t.view())
        })
        .unwrap();
    runtime.synchronize().unwrap();
    std::thread::scope(|s| {
        for _ in 0..2 {
            s.spawn(|| {
                let stream = runtime.create_stream().unwrap();
                for _ in 0..200 {
                    graph.launch_on(&stream).unwrap();
                }
                stream.synchronize_timeout(LONG).unwrap();
            });
        }
    });
    assert_eq!(graph.launches(), 400);
    assert_eq!(runtime.to_vec::<f32>(&x).unwrap(), [400.0; 16], "serialised on the last launch");
}

#[test]
fn a_graph_is_ordered_with_the_eager_work_around_it() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[0u32; 256]).unwrap(), runtime.upload(&[0u32; 256]).unwrap());
    let graph = runtime.record_graph(|r| r.stream().copy(y.view(), x.view())).unwrap();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    runtime.synchronize().unwrap();
    for round in 1..100u32 {
        a.fill(x.view(), ops::Pattern::U32(round)).unwrap();
        graph.launch_on(&b).unwrap();
        // Overwrites what the graph reads.
        a.fill(x.view(), 0u32).unwrap();
        let got = runtime.to_vec::<u32>(&y).unwrap();
        assert!(got.iter().all(|&v| v == round), "round {round}: {:?}", &got[..4]);
    }
}

#[test]
fn dropping_a_graph_while_it_runs_loses_nothing() {
    let runtime = runtime();
    let out = runtime.upload(&[0u32; 1024]).unwrap();
    let ran = Arc::new(AtomicU32::new(0));
    for _ in 0..20 {
        let counted = ran.clone();
        let graph = runtime
            .record_graph(|r| {
                let t = r.alloc(4096)?;
                let staged = r.upload(&[3u32; 1024])?;
                r.stream().copy(t.view(), staged.view())?;
                r.stream().host_call("counts", move || {
                    counted.fetch_add(1, Ordering::Relaxed);
                    std::thread::sleep(Duration::from_micros(200));
                    Ok(())
                })?;
                r.stream().copy(out.view(), t.view())
            })
            .unwrap();
        graph.launch().unwrap();
        drop(graph);
        // The next allocation must not get the graph's memory.
        let next = runtime.alloc(4096).unwrap();
        runtime.stream().fill(next.view(), 9u32).unwrap();
        assert_eq!(runtime.to_vec::<u32>(&out).unwrap(), [3; 1024]);
    }
    assert_eq!(ran.load(Ordering::Relaxed), 20);
    assert_eq!(Arc::strong_count(&ran), 1, "and then lets go of everything");
}

#[test]
fn recorded_events_are_recorded_by_each_launch() {
    let runtime = runtime();
    let (start, end) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    let graph = runtime
        .record_graph(|r| {
            r.stream().record(&start)?;
            r.stream().host_call("nap", || {
                std::thread::sleep(Duration::from_millis(1));
                Ok(())
            })?;
            r.stream().record(&end)?;
            r.stream().wait_event(&end)
        })
        .unwrap();
    assert!(end.timepoint().is_err(), "recording records nothing");
    for launches in 1..4 {
        graph.launch().unwrap();
        assert!(end.elapsed_since(&start).unwrap() >= Duration::from_micros(900));
        assert_eq!(end.serial(), launches);
    }
}

#[test]
fn a_graphs_record_of_an_event_keeps_its_time_from_other_records() {
    let runtime = runtime();
    let other = runtime.create_stream().unwrap();
    let (start, event) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    runtime.stream().record(&start).unwrap();
    let [a, b] = [(); 2].map(|()| runtime.record_graph(|r| r.stream().record(&event)).unwrap());
    let elapsed = || event.elapsed_since(&start).unwrap();
    let over = |p| runtime.wait_for(p).unwrap();

    // The first record is a graph's and held back; the second is eager, or another graph's.
    for second in [None, Some(&b)] {
        let held = hold(runtime.stream());
        let first = a.launch().unwrap();
        match second {
            None => other.record(&event).unwrap(),
            Some(graph) => drop(graph.launch_on(&other).unwrap()),
        }
        let time = elapsed();
        std::thread::sleep(Duration::from_millis(1));
        open(held);
        over(first);
        assert_eq!(elapsed(), time);
    }

    // The first is eager and held back, the second a graph's.
    let held = hold(runtime.stream());
    runtime.stream().record(&event).unwrap();
    let first = event.timepoint().unwrap();
    a.launch_on(&other).unwrap();
    let time = elapsed();
    std::thread::sleep(Duration::from_millis(1));
    open(held);
    over(first);
    assert_eq!(elapsed(), time);
    // The time outlives the graph.
    drop((a, b));
    assert_eq!(elapsed(), time);
}

/// A graph that records one event, sleeps on the host, and records the other.
fn around_a_nap(runtime: &Runtime, [before, after]: [&Lease<Event>; 2], nap: Duration) -> Graph {
    let record = |r: &Runtime| {
        r.stream().record(before)?;
        r.stream().host_call("nap", move || {
            std::thread::sleep(nap);
            Ok(())
        })?;
        r.stream().record(after)
    };
    runtime.record_graph(record).unwrap()
}

#[test]
fn of_two_pending_launches_an_event_has_the_later_ones_time() {
    let runtime = runtime();
    let (start, event) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    // Twice, as a loop would: the second is the record.
    let graph = around_a_nap(&runtime, [&event, &event], Duration::from_millis(1));
    let held = hold(runtime.stream());
    runtime.stream().record(&start).unwrap();
    graph.launch().unwrap();
    graph.launch().unwrap();
    assert_eq!(event.serial(), 2, "a launch records an event once");
    open(held);
    assert!(event.elapsed_since(&start).unwrap() >= Duration::from_micros(1900));
}

#[test]
fn elapsed_is_of_one_launch_while_another_thread_launches() {
    let runtime = runtime();
    let (start, end) = (runtime.create_event().unwrap(), runtime.create_event().unwrap());
    let graph = around_a_nap(&runtime, [&start, &end], Duration::from_micros(50));
    let mut last = graph.launch().unwrap();
    let of_one_launch =
        |time: Duration| assert!(time >= Duration::from_micros(45), "of two launches: {time:?}");
    for pending in [false, true] {
        let done = AtomicU32::new(0);
        std::thread::scope(|s| {
            s.spawn(|| {
                while done.load(Ordering::Relaxed) == 0 {
                    let next = graph.launch().unwrap();
                    runtime.wait_for(if pending { last } else { next }).unwrap();
                    last = next;
                }
            });
            let times: Vec<_> = (0..200).map(|_| end.elapsed_since(&start)).collect();
            done.store(1, Ordering::Relaxed);
            // A time between two launches without a pause is there, unless this thread had no
            // processor meanwhile. If a launch pends at all times, there may be none.
            assert!(pending || times.iter().any(Result::is_ok), "no time was read");
            for time in times {
                match time {
                    Ok(time) => of_one_launch(time),
                    Err(e) => assert_eq!(e.kind(), "InvalidState", "{e}"),
                }
            }
        });
    }
    of_one_launch(end.elapsed_since(&start).unwrap());
}

#[test]
fn a_graph_that_failed_can_be_launched_again_on_another_stream() {
    let runtime = runtime();
    let (fail, y) = (Arc::new(AtomicU32::new(1)), runtime.upload(&[0u32]).unwrap());
    let flag = fail.clone();
    let graph = runtime
        .record_graph(|r| {
            r.stream().host_call("may fail", move || match flag.load(Ordering::Relaxed) {
                0 => Ok(()),
                _ => Err(leasehold::Error::state("on purpose")),
            })?;
            r.stream().fill(y.view(), 5u32)
        })
        .unwrap();
    let (a, b) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
    graph.launch_on(&a).unwrap();
    let error = a.synchronize_timeout(LONG).unwrap_err().to_string();
    assert!(error.contains("node 0") && error.contains("may fail"), "{error}");
    assert_eq!(kind(graph.launch_on(&a)), "Fault");
    fail.store(0, Ordering::Relaxed);
    let point = graph.launch_on(&b).unwrap();
    runtime.wait_for(point).unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [5]);
}

#[test]
fn library_calls_in_a_graph_learn_where_their_temporaries_lie() {
    let runtime = runtime();
    let (x, y) = (runtime.upload(&[1u32, 2, 3, 4]).unwrap(), runtime.upload(&[0u32; 4]).unwrap());
    let graph = runtime
        .record_graph(|r| {
            let t = r.alloc(16)?;
            r.stream().copy(t.view(), x.view())?;
            let double = |_: u64, bindings: &[leasehold::backend::Binding]| {
                for i in 0..4 {
                    // SAFETY: within the operand.
                    unsafe { *(bindings[0].addr as *mut u32).add(i) *= 2 };
                }
                Ok(())
            };
            // SAFETY: it touches its operand alone.
            unsafe { r.stream().foreign_call("double", &[t.read_write()], double) }?;
            r.stream().copy(y.view(), t.view())
        })
        .unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [2, 4, 6, 8]);
    // And where others lie after an update.
    let z = runtime.upload(&[10u32; 4]).unwrap();
    let _ = graph.update(&leasehold::GraphUpdate::new().buffer(&x, &z)).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<u32>(&y).unwrap(), [20; 4]);
}

#[test]
fn a_graph_of_thousands_of_nodes() {
    let runtime = runtime();
    let x = runtime.upload(&[0.0f32; 16]).unwrap();
    let one = runtime.upload(&[1.0f32; 16]).unwrap();
    let kernel = axpy();
    let graph = runtime
        .record_graph(|r| {
            (0..4096).try_for_each(|_| {
                launch(r.stream(), &kernel, &[one.read(), x.read_write()], &1.0f32.to_ne_bytes(), 4)
                    .map(drop)
            })
        })
        .unwrap();
    assert_eq!(graph.nodes(), 4096);
    assert!(graph.exec_bytes() < 4 << 20, "{}", graph.exec_bytes());
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec::<f32>(&x).unwrap(), [4096.0; 16]);
}

/// Work on a buffer of the recording was submitted before the buffer's last lease went. A launch
/// comes after that work.
#[test]
fn a_launch_waits_for_work_on_a_recorded_buffer_that_was_dropped() {
    use leasehold_sim::{MachineConfig, SimBackend};
    const BYTES: usize = 1 << 20;
    let sim = Arc::new(SimBackend::new(MachineConfig::seed(1).detect(true)).unwrap());
    let context = leasehold::Context::with_backends(vec![sim.clone()]);
    for runtime in [context.runtime("sim:0".parse().unwrap()).unwrap(), runtime()] {
        let out = runtime.zeros::<u8>(BYTES).unwrap();
        let mut recorded = None;
        let graph = runtime
            .record_graph(|runtime| {
                let temporary = runtime.alloc_array::<u8>(BYTES)?;
                runtime.stream().fill(temporary.view(), 1u8)?;
                runtime.stream().copy(out.view(), temporary.view())?;
                recorded = Some(temporary);
                Ok(())
            })
            .unwrap();
        runtime.synchronize().unwrap();
        let other = runtime.create_stream().unwrap();
        let host_timeline = runtime.create_host_timeline().unwrap();
        let go = host_timeline.next();
        other.wait(go).unwrap();
        other.fill(recorded.as_ref().unwrap().view(), 0xeeu8).unwrap();
        drop(recorded);
        let launched = graph.launch().unwrap();
        assert!(!launched.is_settled(), "the work before it is held");
        std::thread::sleep(Duration::from_millis(50));
        let _ = runtime.stream().query();
        assert!(!launched.is_settled(), "the work before it is held");
        host_timeline.signal(go.value()).unwrap();
        runtime.synchronize().unwrap();
        assert_eq!(runtime.to_vec(&out).unwrap()[..4], [1; 4]);
        // The uses are over: later launches wait for nothing of them.
        for _ in 0..3 {
            graph.launch().unwrap();
        }
        runtime.synchronize().unwrap();
    }
    assert_eq!(sim.machine().take_reports(), []);
}
