//! Queues, libraries, pipelines, heaps, buffers, events and fences.

use super::bench::*;
use leasehold_core::{Error, Index};
use leasehold_mps::MpsConfig;
use leasehold_mps::driver::ops::{CompileOptions, HeapDesc, MemoryOptions, PipelineDesc, Storage};
use leasehold_mps::manager::event::EventKind;

const NEW_QUEUE: &str = "newCommandQueueWithMaxCommandBufferCount";

#[test]
fn a_queue_is_never_created_twice() {
    let bench = Bench::with(MpsConfig::default().queues(2));
    let device = bench.open();
    let queues = device.command_queues();
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..16).map(|i| scope.spawn(move || queues.acquire(Index::new(i % 2)))).collect();
        let leases: Vec<_> = threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
        for (i, lease) in leases.iter().enumerate() {
            assert!(lease.same(&leases[i % 2]) && lease.index().get() == i as u32 % 2);
        }
    });
    assert_eq!((bench.calls(NEW_QUEUE), queues.stats().created, queues.count()), (2, 2, 2));
    assert!(matches!(queues.acquire(Index::new(2)), Err(Error::NotFound(_))));
    let handle = queues.ensure_alive(Index::new(0)).unwrap();
    let held = queues.get_state(handle).unwrap();
    queues.release(handle).unwrap();
    // A holder remains, so the index still has this queue.
    assert_eq!(queues.ensure_alive(Index::new(0)).unwrap(), handle);
    queues.release(handle).unwrap();
    drop(held);
    assert!(!queues.is_alive(handle));
    assert_ne!(queues.ensure_alive(Index::new(0)).unwrap(), handle);
    assert_eq!(bench.calls(NEW_QUEUE), 3);
    drop(device);
    bench.close();
}

#[test]
fn a_queue_has_one_turn_and_any_number_of_leases() {
    let bench = Bench::new();
    let device = bench.open();
    let (a, b) = (
        device.command_queues().acquire(Index::new(0)).unwrap(),
        device.command_queues().acquire(Index::new(0)).unwrap(),
    );
    let encoding = a.claim().unwrap();
    assert!(matches!(b.claim(), Err(Error::Occupied { .. })));
    drop(encoding);
    drop(b.claim().unwrap());
    drop((a, b, device));
    bench.close();
}

#[test]
fn a_library_is_made_once_and_reused() {
    let bench = Bench::new();
    let device = bench.open();
    let libraries = device.libraries();
    // The device has a library of its own.
    let before = bench.calls("newLibraryWithSource");
    std::thread::scope(|scope| {
        let threads: Vec<_> =
            (0..8).map(|_| scope.spawn(|| libraries.ensure_alive(SOURCE, &options()))).collect();
        let handles: Vec<_> = threads.into_iter().map(|t| t.join().unwrap().unwrap()).collect();
        assert!(handles.iter().all(|handle| *handle == handles[0]));
    });
    assert_eq!(bench.calls("newLibraryWithSource"), before + 1);
    let fast = CompileOptions { fast_math: true, ..options() };
    let (own, other) =
        (libraries.acquire(SOURCE, &options()).unwrap(), libraries.acquire(SOURCE, &fast).unwrap());
    assert!(!own.same(&other), "other options are another library");
    assert_eq!(own.function_names().unwrap(), ["bump"]);
    // A failure is not kept.
    for _ in 0..2 {
        let refused = libraries.acquire("#error no", &options());
        assert!(matches!(refused, Err(Error::Compile { .. })), "{refused:?}");
    }
    assert_eq!(bench.calls("newLibraryWithSource"), before + 4);
    assert_eq!(refused(bench.manager.shutdown()), "library");
    drop((own, other, device));
    bench.close();
}

#[test]
fn a_pipeline_belongs_to_its_library_and_device() {
    let bench = Bench::new();
    let device = bench.open();
    let libraries = device.libraries();
    let library = libraries.acquire(SOURCE, &options()).unwrap();
    let first = libraries.pipeline(&library, "bump", &plain()).unwrap();
    let again = libraries.pipeline(&library, "bump", &plain()).unwrap();
    assert!(first.same(&again) && first.library().same(&library) && first.function() == "bump");
    assert_eq!(first.info().simd_width, 32);
    let small = PipelineDesc { max_threads: 32, ..plain() };
    let small = libraries.pipeline(&library, "bump", &small).unwrap();
    assert!(!small.same(&first) && small.info().max_threads == 32);
    let missing = libraries.pipeline(&library, "none", &plain());
    assert!(matches!(missing, Err(Error::NotFound(_))), "{missing:?}");
    let other = bench.manager.devices().open(mps(1)).unwrap();
    let foreign = other.libraries().pipeline(&library, "bump", &plain());
    assert!(matches!(foreign, Err(Error::InvalidArgument(_))), "{foreign:?}");
    // No function outlives its pipeline's creation.
    assert_eq!(bench.driver.census().functions, 0);
    // A pipeline holds its library.
    let handle = library.handle();
    libraries.release(handle).unwrap();
    drop(library);
    assert!(libraries.is_alive(handle));
    let pipelines = libraries.pipelines();
    let (a, b) = (first.handle(), small.handle());
    drop((first, again, small));
    pipelines.release(a).unwrap();
    assert!(libraries.is_alive(handle));
    pipelines.release(b).unwrap();
    assert!(!libraries.is_alive(handle), "its last pipeline is gone");
    drop((device, other));
    bench.close();
}

#[test]
fn a_device_has_any_number_of_heaps() {
    let bench = Bench::new();
    let device = bench.open();
    let heaps = device.heaps();
    let many: Vec<_> = (0..5).map(|_| heaps.acquire(&HEAP).unwrap()).collect();
    assert_eq!(bench.driver.census().heaps, 5);
    let kept = heaps.ensure_alive(Index::new(0), &HEAP).unwrap();
    assert_eq!(heaps.ensure_alive(Index::new(0), &HEAP).unwrap(), kept);
    assert_ne!(heaps.ensure_alive(Index::new(1), &HEAP).unwrap(), kept);
    drop(many);
    // Idle heaps are reissued for the same size and options only.
    let again = heaps.acquire(&HEAP).unwrap();
    let larger = heaps.acquire(&HeapDesc { size: 2 << 20, ..HEAP }).unwrap();
    assert_eq!((bench.calls("newHeapWithDescriptor"), larger.desc().size), (8, 2 << 20));
    drop((again, larger));
    assert!(heaps.trim(0) >= 5);
    assert_eq!(bench.driver.census().heaps, 2);
    assert!(matches!(heaps.acquire(&HeapDesc { size: 0, ..HEAP }), Err(Error::InvalidArgument(_))));
    drop(device);
    bench.close();
}

#[test]
fn a_buffer_holds_its_heap() {
    let bench = Bench::new();
    let device = bench.open();
    let (heaps, buffers) = (device.heaps(), device.buffers());
    let heap = heaps.acquire(&HEAP).unwrap();
    let a = buffers.place(&heap, 1000, Some(0)).unwrap();
    let b = buffers.place(&heap, 1000, Some(4096)).unwrap();
    assert_eq!((b.addr() - a.addr(), a.len(), heap.used().unwrap()), (4096, 1000, 2048));
    assert!(a.heap().unwrap().same(&heap) && a.contents().is_some());
    for (bytes, offset) in [
        (0, Some(0)),
        (1000, None),
        (1000, Some(100)),
        (1000, Some(1 << 20)),
        (1000, Some(u64::MAX - 255)),
        (1 << 40, Some(0)),
    ] {
        let refused = buffers.place(&heap, bytes, offset);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{bytes} at {offset:?}");
    }
    let other = bench.manager.devices().open(mps(1)).unwrap();
    let foreign = other.buffers().place(&heap, 1000, Some(0));
    assert!(matches!(foreign, Err(Error::InvalidArgument(_))), "{foreign:?}");
    let handle = heap.handle();
    drop(heap);
    assert_eq!(heaps.stats().live, 1);
    drop(a);
    assert!(heaps.is_alive(handle), "the other buffer holds it");
    drop(b);
    assert!(!heaps.is_alive(handle));
    assert_eq!(bench.driver.census().buffers, 0, "no idle buffer keeps a heap");
    // The driver places the buffers of an automatic heap.
    let heap = heaps.acquire(&HeapDesc { placement: false, size: 4096, ..HEAP }).unwrap();
    let a = buffers.place(&heap, 3000, None).unwrap();
    assert!(matches!(buffers.place(&heap, 3000, None), Err(Error::OutOfMemory(_))));
    drop((heap, a, device, other));
    bench.close();
}

#[test]
fn buffers_are_many_and_reissued() {
    let bench = Bench::new();
    let device = bench.open();
    let buffers = device.buffers();
    let shared = MemoryOptions::default();
    let private = MemoryOptions { storage: Storage::Private, ..shared };
    let many: Vec<_> = (0..10).map(|_| buffers.acquire(4096, shared).unwrap()).collect();
    let handle = many[0].handle();
    assert_eq!((buffers.stats().live, bench.driver.census().buffers), (10, 10));
    drop(many);
    assert!(!buffers.is_alive(handle));
    let made = bench.calls("newBufferWithLength:options");
    let again = buffers.acquire(4096, shared).unwrap();
    assert_eq!(bench.calls("newBufferWithLength:options"), made);
    let other = buffers.acquire(4096, private).unwrap();
    assert_eq!((other.contents(), other.options().storage), (None, Storage::Private));
    assert_eq!(bench.calls("newBufferWithLength:options"), made + 1);
    for bytes in [0, u64::MAX] {
        assert!(matches!(buffers.acquire(bytes, shared), Err(Error::InvalidArgument(_))));
    }
    let kept = buffers.ensure_alive(64, shared).unwrap();
    assert_eq!(buffers.ensure_alive(64, shared).unwrap(), kept);
    drop((again, other, device));
    bench.close();
}

#[test]
fn events_and_fences_are_many_and_reissued() {
    let bench = Bench::new();
    let device = bench.open();
    let (events, fences) = (device.events(), device.fences());
    let shared = events.acquire(EventKind::Shared).unwrap();
    let own = events.acquire(EventKind::Device).unwrap();
    assert_eq!((shared.next_value(), shared.next_value(), own.next_value()), (1, 2, 1));
    let native = shared.native();
    drop(shared);
    let again = events.acquire(EventKind::Shared).unwrap();
    assert_eq!(again.native(), native, "the idle event");
    assert_eq!((again.issued(), again.next_value()), (2, 3), "its values go on");
    assert_eq!(bench.driver.census().events, 2);
    let kept = events.ensure_alive(EventKind::Device).unwrap();
    assert_eq!(events.ensure_alive(EventKind::Device).unwrap(), kept);
    assert_eq!(events.get_state(kept).unwrap().kind(), EventKind::Device);
    let many: Vec<_> = (0..100).map(|_| fences.acquire().unwrap()).collect();
    drop(many);
    let many: Vec<_> = (0..100).map(|_| fences.acquire().unwrap()).collect();
    assert_eq!((fences.stats().created, bench.driver.census().fences), (100, 100));
    drop(many);
    assert_eq!(fences.trim(10), 90);
    let kept = fences.ensure_alive().unwrap();
    fences.release(kept).unwrap();
    assert!(!fences.is_alive(kept));
    assert_eq!(fences.release(kept).unwrap_err().kind(), "StaleHandle");
    drop((own, again, device));
    bench.close();
}
