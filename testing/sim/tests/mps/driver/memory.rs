//! Heaps, buffers, missing memory and residency.

use super::bench::{Bench, call, config, grid};
use leasehold_core::Error;
use leasehold_hal::Access;
use leasehold_mps::driver::ops::*;
use leasehold_sim::mps::Effect;

fn is_nil<T: std::fmt::Debug>(result: leasehold_core::Result<T>) {
    assert!(matches!(result, Err(Error::OutOfMemory(_))), "{result:?}");
}

#[test]
fn buffers_of_no_bytes_are_nil() {
    let bench = Bench::new(1);
    let (driver, options) = (&bench.driver, MemoryOptions::default());
    is_nil(call!(driver, buffer_create(bench.device, 0, options)));
    is_nil(call!(driver, buffer_create(bench.device, (64 << 20) + 1, options)));
    let desc = HeapDesc { size: 4096, options, placement: false };
    let heap = call!(driver, heap_create(bench.device, &desc)).unwrap();
    is_nil(call!(driver, heap_buffer(heap, 0, options, None)));
    is_nil(call!(driver, heap_create(bench.device, &HeapDesc { size: 0, ..desc })));
    assert_eq!(bench.broken(), []);
}

#[test]
fn missing_memory_shows_at_completion_only() {
    let bench = Bench::new(1);
    let pipeline = bench.pipeline("bump");
    let size = 40 << 20;
    // Both fit into the address space, and each fits alone.
    let (a, b) = (bench.buffer(size), bench.buffer(size));
    assert_eq!(call!(bench.driver, allocated_size(bench.device)).unwrap(), 2 * size);
    let small = |memory| {
        let buffer = bench.command();
        let encoder = call!(bench.driver, blit_encoder(buffer)).unwrap();
        call!(bench.driver, fill(encoder, (memory, 0), 4, 1)).unwrap();
        bench.end(encoder);
        buffer
    };
    assert_eq!(bench.run(small(a)), None);
    assert_eq!(bench.run(small(b)), None);
    let event = call!(bench.driver, shared_event_create(bench.device)).unwrap();
    let both = bench.command();
    let encoder = bench.serial(both);
    bench.dispatch(encoder, pipeline, a);
    bench.dispatch(encoder, pipeline, b);
    bench.end(encoder);
    call!(bench.driver, encode_signal(both, event.into(), 1)).unwrap();
    assert_eq!(bench.run(both).unwrap().0, code::OUT_OF_MEMORY);
    assert_eq!(call!(bench.driver, signaled_value(event)).unwrap(), 0);
    // No part of the work ran.
    assert_eq!((bench.read(a), bench.read(b)), (0x0101_0101, 0x0101_0101));
}

#[test]
fn a_heap_places_its_buffers() {
    let bench = Bench::new(1);
    let (driver, options) = (&bench.driver, MemoryOptions::default());
    let desc = HeapDesc { size: 1 << 20, options, placement: true };
    let heap = call!(driver, heap_create(bench.device, &desc)).unwrap();
    let fit = call!(driver, heap_buffer_size(bench.device, 1000, options)).unwrap();
    assert_eq!(fit, SizeAlign { size: 1024, align: 256 });
    let whole = call!(driver, heap_buffer(heap, 1 << 20, options, Some(0))).unwrap();
    let part = call!(driver, heap_buffer(heap, 1024, options, Some(4096))).unwrap();
    let at = |b| call!(driver, buffer_address(b)).unwrap();
    assert_eq!(at(part), at(whole) + 4096);
    is_nil(call!(driver, heap_buffer(heap, 1024, options, Some(1 << 20))));
    bench.refused(Effect::Abort, call!(driver, heap_buffer(heap, 1024, options, Some(100))));
    bench.refused(Effect::Abort, call!(driver, heap_buffer(heap, 1024, options, None)));
    let private = MemoryOptions { storage: Storage::Private, ..options };
    bench.refused(Effect::Abort, call!(driver, heap_buffer(heap, 1024, private, Some(0))));
    // A buffer keeps its heap's memory.
    bench.release(heap);
    assert_eq!(bench.run(bench.kernel(bench.pipeline("bump"), part)), None);
    assert_eq!(bench.read(part), 1);
    bench.release(part);
    bench.release(whole);
    assert!(driver.machine().memory_in_use().is_nothing());
}

#[test]
fn the_driver_places_buffers_of_an_automatic_heap() {
    let bench = Bench::new(1);
    let (driver, options) = (&bench.driver, MemoryOptions::default());
    let desc = HeapDesc { size: 4096, options, placement: false };
    let heap = call!(driver, heap_create(bench.device, &desc)).unwrap();
    let make = |bytes| call!(driver, heap_buffer(heap, bytes, options, None));
    let (a, b) = (make(1000).unwrap(), make(2000).unwrap());
    assert_eq!(call!(driver, heap_used(heap)).unwrap(), 1024 + 2048);
    assert_eq!(call!(driver, heap_available(heap, 256)).unwrap(), 1024);
    is_nil(make(2000));
    bench.release(a);
    make(1024).unwrap();
    is_nil(make(1025));
    bench.release(b);
    make(1025).unwrap();
}

#[test]
fn private_memory_has_no_contents_and_wrapped_memory_is_the_hosts() {
    let bench = Bench::new(1);
    let (driver, private) = (&bench.driver, bench.private(64));
    assert_eq!(call!(driver, buffer_contents(private)).unwrap(), None);
    let pages = vec![0_u8; 3 * 4096];
    let at = (pages.as_ptr().expose_provenance() as u64).next_multiple_of(4096);
    let unaligned = call!(driver, buffer_wrap(bench.device, at + 4, 4096));
    assert!(matches!(unaligned, Err(Error::InvalidArgument(_))));
    let wrapped = call!(driver, buffer_wrap(bench.device, at, 4096)).unwrap();
    assert_eq!(call!(driver, buffer_contents(wrapped)).unwrap(), Some(at));
    let buffer = bench.command();
    let encoder = call!(driver, blit_encoder(buffer)).unwrap();
    call!(driver, fill(encoder, (wrapped, 0), 64, 7)).unwrap();
    bench.end(encoder);
    assert_eq!(bench.run(buffer), None);
    bench.release(wrapped);
    let first = std::hint::black_box(&pages)[(at - pages.as_ptr() as u64) as usize];
    assert_eq!(first, 7);
}

/// An indirect command buffer of two commands on one buffer.
fn indirect(bench: &Bench, memory: NativeBuffer, barrier: bool) -> NativeIndirect {
    let desc = PipelineDesc { indirect: true, ..PipelineDesc::default() };
    let pipeline = bench.pipeline_as("bump", &desc);
    let indirect = call!(bench.driver, indirect_create(bench.device, 2, 1)).unwrap();
    for index in 0..2 {
        let buffers = &[(memory, 0)];
        let dispatch = grid(&[]);
        let barrier = barrier && index == 1;
        let command = IndirectCommand { pipeline, buffers, dispatch, barrier };
        call!(bench.driver, indirect_set(indirect, index, &command)).unwrap();
    }
    indirect
}

#[test]
fn indirect_commands_need_residency_and_barriers() {
    let bench = Bench::new(1);
    let (driver, memory) = (&bench.driver, bench.buffer(64));
    let commands = indirect(&bench, memory, true);
    let play = |resident: bool, commands| {
        let buffer = bench.command();
        let encoder = bench.concurrent(buffer);
        if resident {
            call!(driver, use_buffer(encoder, memory, Usage::ReadWrite)).unwrap();
        }
        call!(driver, execute_indirect(encoder, commands, 0..2)).unwrap();
        bench.end(encoder);
        bench.run(buffer)
    };
    assert_eq!(play(false, commands).unwrap().0, code::PAGE_FAULT);
    assert_eq!(play(true, commands), None);
    assert_eq!((bench.read(memory), bench.reports()), (2, vec![]));
    assert_eq!(play(true, indirect(&bench, memory, false)), None);
    assert!(!bench.reports().is_empty());
    // A set makes resident once it is committed and attached.
    let set = call!(driver, residency_create(bench.device, 4)).unwrap();
    call!(driver, residency_add(set, Allocation::Buffer(memory))).unwrap();
    call!(driver, queue_add_set(bench.queue, set)).unwrap();
    assert_eq!(play(false, commands).unwrap().0, code::PAGE_FAULT);
    call!(driver, residency_commit(set)).unwrap();
    call!(driver, residency_request(set)).unwrap();
    assert_eq!(play(false, commands), None);
    call!(driver, residency_remove(set, Allocation::Buffer(memory))).unwrap();
    call!(driver, residency_commit(set)).unwrap();
    assert_eq!(play(false, commands).unwrap().0, code::PAGE_FAULT);
    call!(driver, indirect_reset(commands, 0..1)).unwrap();
    let encoder = bench.concurrent(bench.command());
    let unset = call!(driver, execute_indirect(encoder, commands, 0..2));
    bench.refused(Effect::Undefined, unset);
    bench.end(encoder);
    let plain = bench.pipeline("bump");
    let command = IndirectCommand {
        pipeline: plain,
        buffers: &[(memory, 0)],
        dispatch: grid(&[]),
        barrier: false,
    };
    bench.refused(Effect::Abort, call!(driver, indirect_set(commands, 0, &command)));
}

#[test]
fn a_queue_has_32_residency_sets_at_most() {
    let bench = Bench::new(1);
    for i in 0..33 {
        let set = call!(bench.driver, residency_create(bench.device, 1)).unwrap();
        let added = call!(bench.driver, queue_add_set(bench.queue, set));
        if i < 32 {
            added.unwrap();
            if i == 0 {
                call!(bench.driver, queue_remove_set(bench.queue, set)).unwrap();
                call!(bench.driver, queue_add_set(bench.queue, set)).unwrap();
            }
        } else {
            bench.refused(Effect::Abort, added);
        }
    }
    let mut config = config(1);
    config.residency_sets = false;
    let old = Bench::with(config);
    let refused = call!(old.driver, residency_create(old.device, 1));
    assert!(matches!(refused, Err(Error::Unsupported(_))));
}

#[test]
fn a_part_of_a_buffer_must_be_bound_where_it_is() {
    let bench = Bench::new(1);
    let (pipeline, memory) = (bench.pipeline("bump"), bench.buffer(64));
    let addr = call!(bench.driver, buffer_address(memory)).unwrap();
    let encoder = bench.serial(bench.command());
    call!(bench.driver, set_pipeline(encoder, pipeline)).unwrap();
    call!(bench.driver, set_buffer(encoder, memory, 0, 0)).unwrap();
    for (at, len) in [(addr + 4, 4), (addr, 65), (addr - 4, 4)] {
        let part = leasehold_hal::Binding { addr: at, len, native: 0, access: Access::ReadWrite };
        bench.refused(Effect::Abort, call!(bench.driver, dispatch(encoder, &grid(&[part]))));
    }
    bench.end(encoder);
}
