//! Rules whose breach ends the process with Metal. The simulated driver records the breach.

use super::bench::{Bench, call, config, grid};
use leasehold_core::Error;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_mps::driver::ops::*;
use leasehold_sim::Stepping;
use leasehold_sim::mps::Effect;

#[test]
fn an_encoder_must_end_before_it_is_released() {
    let bench = Bench::new(1);
    let buffer = bench.command();
    let encoder = bench.serial(buffer);
    bench.release(encoder);
    let rules = bench.driver.take_broken_rules();
    assert_eq!(rules.len(), 1);
    assert_eq!(rules[0].effect, Effect::Abort);
    let text = rules[0].to_string();
    assert!(text.contains("end the process") && text.contains("without endEncoding"), "{text}");
    let again = bench.serial(buffer);
    bench.release(buffer);
    assert_eq!(bench.broken(), [Effect::Abort]);
    bench.release(again);
    assert_eq!(bench.broken(), [Effect::Abort]);
}

#[test]
fn a_command_buffer_has_one_open_encoder_and_one_commit() {
    let bench = Bench::new(1);
    let driver = &bench.driver;
    let event = call!(driver, event_create(bench.device)).unwrap();
    let buffer = bench.command();
    let encoder = bench.serial(buffer);
    bench.refused(Effect::Abort, call!(driver, blit_encoder(buffer)));
    bench.refused(Effect::Abort, call!(driver, encode_wait(buffer, event.into(), 1)));
    bench.refused(Effect::Abort, call!(driver, encode_signal(buffer, event.into(), 1)));
    bench.refused(Effect::Abort, call!(driver, commit(buffer)));
    call!(driver, end_encoding(encoder.into())).unwrap();
    bench.refused(Effect::Abort, call!(driver, end_encoding(encoder.into())));
    bench.refused(Effect::Abort, call!(driver, barrier(encoder)));
    bench.release(encoder);
    assert_eq!(bench.run(buffer), None);
    bench.refused(Effect::Abort, call!(driver, commit(buffer)));
    bench.refused(Effect::Abort, call!(driver, blit_encoder(buffer)));
    bench.refused(Effect::Abort, call!(driver, encode_signal(buffer, event.into(), 1)));
    bench.refused(Effect::Abort, call!(driver, on_completed(buffer, Box::new(|_| {}))));
    bench.release(buffer);
    assert_eq!(bench.broken(), []);
}

#[test]
fn a_dispatch_is_checked() {
    let bench = Bench::new(1);
    let driver = &bench.driver;
    let (bump, set, memory) = (bench.pipeline("bump"), bench.pipeline("set"), bench.buffer(64));
    let buffer = bench.command();
    let e = bench.serial(buffer);
    bench.refused(Effect::Abort, call!(driver, dispatch(e, &grid(&[]))));
    call!(driver, set_pipeline(e, bump)).unwrap();
    // Nothing is bound.
    bench.refused(Effect::Abort, call!(driver, dispatch(e, &grid(&[]))));
    bench.refused(Effect::Abort, call!(driver, set_buffer(e, memory, 64, 0)));
    bench.refused(Effect::Abort, call!(driver, set_buffer(e, memory, 0, 31)));
    call!(driver, set_buffer(e, memory, 0, 0)).unwrap();
    let zero = Dispatch { groups: [0, 1, 1], ..grid(&[]) };
    bench.refused(Effect::Abort, call!(driver, dispatch(e, &zero)));
    let many = Dispatch { threads: [1024, 2, 1], ..grid(&[]) };
    bench.refused(Effect::Abort, call!(driver, dispatch(e, &many)));
    call!(driver, dispatch(e, &grid(&[]))).unwrap();
    call!(driver, set_pipeline(e, set)).unwrap();
    // The parameters are missing.
    bench.refused(Effect::Abort, call!(driver, dispatch(e, &grid(&[]))));
    for bytes in [0, 4097] {
        let refused = call!(driver, set_bytes(e, &vec![0; bytes], 1));
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    }
    call!(driver, set_bytes(e, &9_u32.to_le_bytes(), 1)).unwrap();
    call!(driver, dispatch(e, &grid(&[]))).unwrap();
    bench.refused(Effect::Abort, call!(driver, set_threadgroup_memory(e, 17, 0)));
    bench.refused(Effect::Abort, call!(driver, set_threadgroup_memory(e, 64 << 10, 0)));
    bench.refused(Effect::Abort, call!(driver, pop_group(e.into())));
    call!(driver, push_group(e.into(), "group")).unwrap();
    call!(driver, pop_group(e.into())).unwrap();
    bench.end(e);
    assert_eq!(bench.run(buffer), None);
    assert_eq!(bench.read(memory), 9);
}

#[test]
fn blits_stay_within_their_buffers() {
    let bench = Bench::new(1);
    let (driver, a, b) = (&bench.driver, bench.buffer(64), bench.buffer(32));
    let buffer = bench.command();
    let e = call!(driver, blit_encoder(buffer)).unwrap();
    bench.refused(Effect::Abort, call!(driver, copy(e, (a, 0), (b, 0), 64)));
    bench.refused(Effect::Abort, call!(driver, copy(e, (a, 60), (b, 0), 8)));
    bench.refused(Effect::Abort, call!(driver, copy(e, (a, 2), (b, 0), 8)));
    bench.refused(Effect::Abort, call!(driver, fill(e, (b, 32), 4, 0)));
    bench.refused(Effect::Abort, call!(driver, fill(e, (b, 0), 0, 0)));
    call!(driver, fill(e, (b, u64::MAX), 4, 0)).unwrap_err();
    assert_eq!(bench.broken(), [Effect::Abort]);
    bench.end(e);
    assert_eq!(bench.run(buffer), None);
}

#[test]
fn a_fence_is_waited_for_before_it_is_updated() {
    let bench = Bench::new(1);
    let fence = call!(bench.driver, fence_create(bench.device)).unwrap();
    let encoder = bench.serial(bench.command());
    call!(bench.driver, update_fence(encoder.into(), fence)).unwrap();
    bench.refused(Effect::Abort, call!(bench.driver, wait_fence(encoder.into(), fence)));
    bench.end(encoder);
}

#[test]
fn a_queue_bounds_its_uncompleted_command_buffers() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let queue = call!(driver, queue_create(bench.device, 2, "small")).unwrap();
    let pipeline = bench.pipeline("bump");
    let fill = || {
        let buffer = bench.command_of(queue);
        let encoder = bench.serial(buffer);
        bench.dispatch(encoder, pipeline, memory);
        bench.end(encoder);
        buffer
    };
    let (first, second) = (fill(), fill());
    // Both are uncommitted: the caller would wait for itself.
    let desc = CommandBufferDesc::default();
    bench.refused(Effect::DeadLock, call!(driver, command_buffer(queue, desc)));
    bench.commit(first);
    bench.commit(second);
    assert_eq!(driver.machine().steps(), 0);
    // The call waits until the first one is over.
    let third = fill();
    assert!(driver.machine().steps() > 0);
    assert_eq!(call!(driver, status(first)).unwrap(), Status::Completed);
    assert_eq!(bench.run(third), None);
    // An abandoned command buffer does not count.
    for _ in 0..5 {
        bench.release(bench.command_of(queue));
    }
    assert_eq!(bench.broken(), []);
}

#[test]
fn a_full_queue_blocks_until_another_thread_lets_it_go_on() {
    let mut config = config(3);
    config.machine = config.machine.stepping(Stepping::Manual);
    let bench = Bench::with(config);
    let queue = call!(bench.driver, queue_create(bench.device, 1, "small")).unwrap();
    let event = call!(bench.driver, shared_event_create(bench.device)).unwrap();
    let first = bench.command_of(queue);
    call!(bench.driver, encode_wait(first, event.into(), 1)).unwrap();
    bench.commit(first);
    let made = Arc::new(AtomicBool::new(false));
    let maker = {
        let (driver, made) = (bench.driver.clone(), made.clone());
        std::thread::spawn(move || {
            let second = call!(driver, command_buffer(queue, CommandBufferDesc::default()));
            made.store(true, Ordering::Release);
            second.unwrap()
        })
    };
    // No step is possible, because the first one waits for the host.
    for _ in 0..20 {
        bench.driver.machine().step();
        std::thread::sleep(std::time::Duration::from_millis(1));
    }
    assert!(!made.load(Ordering::Acquire));
    call!(bench.driver, set_signaled_value(event, 1)).unwrap();
    while !made.load(Ordering::Acquire) {
        bench.driver.machine().step();
        std::thread::yield_now();
    }
    bench.release(maker.join().unwrap());
}

#[test]
fn a_process_has_a_limited_number_of_queues() {
    let mut config = config(1);
    config.queues = 3;
    let bench = Bench::with(config);
    let made: Vec<_> =
        (0..2).map(|_| call!(bench.driver, queue_create(bench.device, 1, "q")).unwrap()).collect();
    let refused = call!(bench.driver, queue_create(bench.device, 1, "q"));
    assert!(matches!(refused, Err(Error::Driver { code: 0, .. })), "{refused:?}");
    bench.release(made[0]);
    call!(bench.driver, queue_create(bench.device, 1, "q")).unwrap();
}

#[test]
fn a_handler_neither_submits_nor_waits() {
    let bench = Bench::new(1);
    let buffer = bench.command();
    let ready = bench.command();
    let (driver, queue) = (bench.driver.clone(), bench.queue);
    let handler = Box::new(move |_: &Completion| {
        call!(driver, command_buffer(queue, CommandBufferDesc::default())).unwrap_err();
        call!(driver, commit(ready)).unwrap_err();
        call!(driver, wait_completed(ready)).unwrap_err();
    });
    call!(bench.driver, on_completed(buffer, handler)).unwrap();
    assert_eq!(bench.run(buffer), None);
    assert_eq!(bench.broken(), [Effect::DeadLock; 3]);
    // A panic of a handler stops at Metal.
    let buffer = bench.command();
    call!(bench.driver, on_completed(buffer, Box::new(|_| panic!("on purpose")))).unwrap();
    assert_eq!(bench.run(buffer), None);
    bench.refused(Effect::DeadLock, call!(bench.driver, wait_completed(ready)));
}

#[test]
fn a_released_handle_is_unknown() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    bench.release(memory);
    assert!(matches!(call!(driver, buffer_length(memory)), Err(Error::NotFound(_))));
    bench.release(memory);
    assert_eq!(bench.broken(), [Effect::Undefined]);
    let encoder = bench.serial(bench.command());
    assert!(matches!(call!(driver, set_buffer(encoder, memory, 0, 0)), Err(Error::NotFound(_))));
    bench.end(encoder);
}
