//! Untracked hazards: without a fence, a barrier or an event they race, and the detector names
//! them.

use super::bench::{Bench, call, grid};
use leasehold_hal::{Access, Binding};
use leasehold_mps::driver::ops::*;
use leasehold_sim::mps::Effect;

/// Checks that `play` races with each of some seeds, or with none.
fn races(expected: bool, play: impl Fn(&Bench)) -> Vec<String> {
    let mut last = Vec::new();
    for seed in 0..12 {
        let bench = Bench::new(seed);
        play(&bench);
        last = bench.reports();
        assert_eq!(!last.is_empty(), expected, "seed {seed}: {last:?}");
        assert_eq!(bench.broken(), [], "seed {seed}");
    }
    last
}

fn two_encoders(bench: &Bench, fence: bool) {
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let fence = fence.then(|| call!(bench.driver, fence_create(bench.device)).unwrap());
    let buffer = bench.command();
    let first = bench.serial(buffer);
    bench.dispatch(first, pipeline, memory);
    fence.into_iter().for_each(|f| call!(bench.driver, update_fence(first.into(), f)).unwrap());
    bench.end(first);
    let second = bench.serial(buffer);
    fence.into_iter().for_each(|f| call!(bench.driver, wait_fence(second.into(), f)).unwrap());
    bench.dispatch(second, pipeline, memory);
    bench.end(second);
    assert_eq!(bench.run(buffer), None);
    assert_eq!(bench.read(memory), 2);
}

#[test]
fn encoders_of_one_command_buffer_race_without_a_fence() {
    let reports = races(true, |bench| two_encoders(bench, false));
    let text = &reports[0];
    assert!(text.contains("encoder 1") && text.contains("encoder 2"), "{text}");
    assert!(text.contains("dispatch bump"), "{text}");
    races(false, |bench| two_encoders(bench, true));
}

#[test]
fn the_order_of_commits_is_no_order_of_accesses() {
    let play = |wait: bool| {
        move |bench: &Bench| {
            let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
            let first = bench.kernel(pipeline, memory);
            bench.commit(first);
            if wait {
                assert_eq!(bench.finish(first), None);
            }
            let second = bench.kernel(pipeline, memory);
            assert_eq!(bench.run(second), None);
        }
    };
    races(true, play(false));
    // The host that has seen the end orders later commits.
    races(false, play(true));
}

#[test]
fn an_end_that_nobody_has_seen_orders_nothing() {
    races(true, |bench| {
        let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
        let first = bench.kernel(pipeline, memory);
        bench.commit(first);
        bench.release(first);
        bench.driver.machine().run_until_idle();
        let second = bench.kernel(pipeline, memory);
        assert_eq!(bench.run(second), None);
    });
}

#[test]
fn concurrent_dispatches_race_without_a_barrier() {
    let play = |concurrent: bool, barrier: bool| {
        move |bench: &Bench| {
            let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
            let buffer = bench.command();
            let encoder = if concurrent { bench.concurrent(buffer) } else { bench.serial(buffer) };
            bench.dispatch(encoder, pipeline, memory);
            if barrier {
                call!(bench.driver, barrier(encoder)).unwrap();
            }
            bench.dispatch(encoder, pipeline, memory);
            bench.end(encoder);
            assert_eq!(bench.run(buffer), None);
        }
    };
    races(true, play(true, false));
    races(false, play(true, true));
    races(false, play(false, false));
}

#[test]
fn named_parts_of_one_buffer_do_not_race() {
    races(false, |bench| {
        let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
        let addr = call!(bench.driver, buffer_address(memory)).unwrap();
        let buffer = bench.command();
        let encoder = bench.concurrent(buffer);
        call!(bench.driver, set_pipeline(encoder, pipeline)).unwrap();
        for offset in [0, 32] {
            call!(bench.driver, set_buffer(encoder, memory, offset, 0)).unwrap();
            let part =
                Binding { addr: addr + offset, len: 32, native: 0, access: Access::ReadWrite };
            call!(bench.driver, dispatch(encoder, &grid(&[part]))).unwrap();
        }
        bench.end(encoder);
        assert_eq!(bench.run(buffer), None);
    });
}

#[test]
fn the_commands_of_a_blit_encoder_have_no_order() {
    let play = |one: bool| {
        move |bench: &Bench| {
            let memory = bench.buffer(64);
            let fence = call!(bench.driver, fence_create(bench.device)).unwrap();
            let buffer = bench.command();
            let mut encoder = call!(bench.driver, blit_encoder(buffer)).unwrap();
            call!(bench.driver, fill(encoder, (memory, 0), 64, 1)).unwrap();
            if !one {
                call!(bench.driver, update_fence(encoder.into(), fence)).unwrap();
                bench.end(encoder);
                encoder = call!(bench.driver, blit_encoder(buffer)).unwrap();
                call!(bench.driver, wait_fence(encoder.into(), fence)).unwrap();
            }
            call!(bench.driver, copy(encoder, (memory, 0), (memory, 32), 32)).unwrap();
            bench.end(encoder);
            assert_eq!(bench.run(buffer), None);
        }
    };
    races(true, play(true));
    races(false, play(false));
}

/// Two queues touch one memory, ordered by an event or not.
fn two_queues(bench: &Bench, event: Option<AnyEvent>) {
    let other = call!(bench.driver, queue_create(bench.device, 4, "other")).unwrap();
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let first = bench.kernel(pipeline, memory);
    let second = bench.command_of(other);
    if let Some(event) = event {
        call!(bench.driver, encode_signal(first, event, 7)).unwrap();
        call!(bench.driver, encode_wait(second, event, 7)).unwrap();
    }
    let encoder = bench.serial(second);
    bench.dispatch(encoder, pipeline, memory);
    bench.end(encoder);
    // The waiting command buffer may be committed first.
    bench.commit(second);
    bench.commit(first);
    assert_eq!((bench.finish(first), bench.finish(second)), (None, None));
    assert_eq!(bench.read(memory), 2);
}

#[test]
fn an_event_orders_two_queues() {
    races(true, |bench| two_queues(bench, None));
    races(false, |bench| {
        let event = call!(bench.driver, event_create(bench.device)).unwrap();
        two_queues(bench, Some(event.into()));
    });
    races(false, |bench| {
        let event = call!(bench.driver, shared_event_create(bench.device)).unwrap();
        two_queues(bench, Some(event.into()));
        assert_eq!(call!(bench.driver, signaled_value(event)).unwrap(), 7);
    });
}

#[test]
fn a_fence_of_another_queue_orders_nothing() {
    let bench = Bench::new(1);
    let other = call!(bench.driver, queue_create(bench.device, 4, "other")).unwrap();
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let fence = call!(bench.driver, fence_create(bench.device)).unwrap();
    let first = bench.command();
    let encoder = bench.serial(first);
    bench.dispatch(encoder, pipeline, memory);
    call!(bench.driver, update_fence(encoder.into(), fence)).unwrap();
    bench.end(encoder);
    bench.commit(first);
    let second = bench.command_of(other);
    let encoder = bench.serial(second);
    call!(bench.driver, wait_fence(encoder.into(), fence)).unwrap();
    bench.dispatch(encoder, pipeline, memory);
    bench.end(encoder);
    assert_eq!(bench.run(second), None);
    assert_eq!(bench.broken(), [Effect::Undefined]);
    assert!(!bench.reports().is_empty());
}

#[test]
fn a_fence_binds_to_the_last_committed_update() {
    // The fence is reused: each wait is for the update before it.
    races(false, |bench| {
        let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
        let fence = call!(bench.driver, fence_create(bench.device)).unwrap();
        let mut all = Vec::new();
        for _ in 0..3 {
            let buffer = bench.command();
            let encoder = bench.serial(buffer);
            call!(bench.driver, wait_fence(encoder.into(), fence)).unwrap();
            bench.dispatch(encoder, pipeline, memory);
            call!(bench.driver, update_fence(encoder.into(), fence)).unwrap();
            bench.end(encoder);
            bench.commit(buffer);
            all.push(buffer);
        }
        // In-order completion: the last one's end is the end of all.
        assert_eq!(bench.finish(all[2]), None);
        assert_eq!(call!(bench.driver, status(all[0])).unwrap(), Status::Completed);
        assert_eq!(bench.read(memory), 3);
    });
}

#[test]
fn a_signal_comes_after_the_earlier_command_buffers_of_its_queue() {
    races(false, |bench| {
        let other = call!(bench.driver, queue_create(bench.device, 4, "other")).unwrap();
        let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
        let event = call!(bench.driver, event_create(bench.device)).unwrap();
        let work = bench.kernel(pipeline, memory);
        let signal = bench.command();
        call!(bench.driver, encode_signal(signal, event.into(), 1)).unwrap();
        bench.commit(work);
        bench.commit(signal);
        let reader = bench.command_of(other);
        call!(bench.driver, encode_wait(reader, event.into(), 1)).unwrap();
        let encoder = bench.serial(reader);
        bench.dispatch(encoder, pipeline, memory);
        bench.end(encoder);
        assert_eq!(bench.run(reader), None);
        assert_eq!(bench.read(memory), 2);
    });
}

#[test]
fn the_end_of_a_command_buffer_says_nothing_of_later_commits() {
    let bench = Bench::new(1);
    let event = call!(bench.driver, shared_event_create(bench.device)).unwrap();
    // Made first and committed last. It waits for the host.
    let (last, first) = (bench.command(), bench.command());
    call!(bench.driver, encode_wait(last, event.into(), 1)).unwrap();
    bench.commit(first);
    bench.commit(last);
    assert_eq!(bench.finish(first), None);
    let status = call!(bench.driver, status(last)).unwrap();
    assert!(!status.is_over(), "{status:?}");
    call!(bench.driver, set_signaled_value(event, 1)).unwrap();
    assert_eq!(bench.finish(last), None);
    assert_eq!(bench.broken(), []);
}
