//! Streams of other libraries: the allocator orders reuse without seeing submissions. Random
//! programs run over the simulated driver under its race detector.

use crate::common::*;
use leasehold_alloc::{Allocator, AllocatorConfig, Buffer, Layout, On, Policy};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Result, TimelineSource};
use leasehold_cuda::driver::ops::{
    CopyKind, EventFlags, EventOps, HostFlags, MemoryOps, NativeCopy, NativeEvent, NativeFill,
    NativeStream, StreamOps,
};
use leasehold_cuda::manager::device::DeviceState;
use leasehold_cuda::manager::external::External;
use leasehold_hal::{Backend, Device, DeviceId, MemoryKind};
use leasehold_sim::traces::vouched::Vouched;
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};

/// A device, and a library that uses it without the backend.
struct Library {
    bench: Bench,
    device: Lease<DeviceState>,
}

impl Library {
    fn with(bench: Bench) -> Self {
        let device = bench.backend.manager().devices().open(DeviceId::cuda(0)).unwrap();
        let library = Self { bench, device };
        library.driver().set_current(library.device.primary().native()).unwrap();
        library
    }

    fn new(seed: u64) -> Self {
        Self::with(Bench::new(seed))
    }

    fn driver(&self) -> Vouched<'_> {
        // SAFETY: the simulated driver checks every handle and address.
        unsafe { Vouched::new(&*self.bench.driver) }
    }

    fn stream(&self) -> NativeStream {
        self.bench.driver.stream_create(0).unwrap()
    }

    fn external(&self, stream: NativeStream) -> Arc<External> {
        // SAFETY: the tests end a stream before they destroy it.
        unsafe { self.device.primary().externals().get(stream.0) }.unwrap()
    }

    fn allocator(&self, policy: Policy, budget: u64) -> Allocator {
        let backing = self.device.backing(MemoryKind::Device).unwrap();
        let config = AllocatorConfig { policy, budget, ..AllocatorConfig::default() };
        Allocator::new(backing, config).unwrap()
    }

    fn fill(&self, stream: NativeStream, buffer: &Buffer) {
        let fill = NativeFill { dst: buffer.addr(), count: buffer.len(), value: 7, width: 1 };
        // SAFETY: the simulated driver checks the range when it runs the fill.
        unsafe { self.bench.driver.fill(stream, &fill) }.unwrap();
    }

    /// Lets `later` wait for the work of `earlier`, as the library itself does it.
    fn order(&self, earlier: NativeStream, later: NativeStream) {
        let driver = self.driver();
        let event: NativeEvent = until(|| self.bench.driver.event_create(EventFlags::default()));
        until(|| driver.event_record(event, earlier));
        until(|| driver.stream_wait_event(later, event));
        let _ = driver.event_destroy(event);
    }

    fn close(self) {
        let Self { bench, device } = self;
        drop(device);
        bench.close();
    }
}

/// Makes a call of the other library until it succeeds: its calls fail too under a fault plan.
fn until<T>(mut call: impl FnMut() -> Result<T>) -> T {
    (0..200).find_map(|_| call().ok()).expect("a call that succeeds at last")
}

fn alloc(allocator: &Allocator, stream: &External, bytes: u64) -> Lease<Buffer> {
    allocator.alloc(Layout::new(bytes), On::new(stream)).unwrap()
}

/// Frees a buffer whose work was submitted to its own stream.
fn free(stream: &External, buffer: Lease<Buffer>) {
    let now = stream.now();
    // SAFETY: the calling thread alone has the buffer, and the timepoint stands for all work of the
    // stream so far.
    unsafe { buffer.mark_read(now) };
}

#[test]
fn reuse_on_one_stream_makes_no_driver_call() {
    let library = Library::new(1);
    let allocator = library.allocator(Policy::Balanced, u64::MAX);
    let native = library.stream();
    let stream = library.external(native);
    for bytes in [500, 100_000, 3 << 20, 40 << 20] {
        let first = alloc(&allocator, &stream, bytes);
        let addr = first.addr();
        library.fill(native, &first);
        free(&stream, first);
        let before = library.bench.driver.machine().calls_by_name();
        for _ in 0..10 {
            let again = alloc(&allocator, &stream, bytes);
            assert_eq!(again.addr(), addr);
            free(&stream, again);
        }
        assert_eq!(library.bench.driver.machine().calls_by_name(), before);
        let last = alloc(&allocator, &stream, bytes);
        library.fill(native, &last);
        free(&stream, last);
    }
    // Growths asked how far the stream is.
    assert!(library.bench.calls("cuEventRecord") <= 4);
    stream.wait_host(stream.now().value(), None).unwrap();
    drop(allocator);
    library.device.primary().externals().end(native.0).unwrap();
    library.driver().stream_destroy(native).unwrap();
    drop(stream);
    library.close();
}

#[test]
fn another_stream_waits_for_an_event_that_is_recorded_then() {
    let library = Library::new(2);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let (a, b) = (library.stream(), library.stream());
    let (first, second) = (library.external(a), library.external(b));
    let buffer = alloc(&allocator, &first, 60 << 20);
    library.fill(a, &buffer);
    free(&first, buffer);
    let records = library.bench.calls("cuEventRecord");
    let other = alloc(&allocator, &second, 60 << 20);
    assert!(library.bench.calls("cuEventRecord") > records);
    library.fill(b, &other);
    free(&second, other);
    // Blocks that several streams used wait for all of them.
    let shared = alloc(&allocator, &first, 60 << 20);
    library.fill(a, &shared);
    library.order(a, b);
    library.fill(b, &shared);
    shared.used_on(second.now());
    free(&first, shared);
    let third = library.external(library.stream());
    let next = alloc(&allocator, &third, 60 << 20);
    library.fill(NativeStream(third.native()), &next);
    free(&third, next);
    assert!(allocator.trim(0).is_ok());
    assert_eq!(library.bench.reports(), [""; 0]);
    for stream in [first, second, third] {
        library.device.primary().externals().end(stream.native()).unwrap();
        library.driver().stream_destroy(NativeStream(stream.native())).unwrap();
    }
    drop(allocator);
    library.close();
}

/// As with an allocator whose memory changes streams behind a wait for the whole device.
#[test]
fn memory_changes_streams_behind_the_work_of_all_streams() {
    let library = Library::new(8);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let natives = [library.stream(), library.stream(), library.stream()];
    let [home, user, other] = natives.map(|native| library.external(native));
    let word = library.bench.driver.host_alloc(64, HostFlags::default()).unwrap();
    // Work on a stream that is not named keeps the memory from another stream, and from the driver.
    let buffer = alloc(&allocator, &home, 60 << 20);
    library.fill(natives[0], &buffer);
    library.order(natives[0], natives[1]);
    library.driver().stream_wait_word(natives[1], word, 1).unwrap();
    library.fill(natives[1], &buffer);
    free(&home, buffer);
    library.driver().stream_synchronize(natives[0]).unwrap();
    allocator.trim(0).unwrap();
    assert_eq!(allocator.stats().reserved, 60 << 20);
    let next = alloc(&allocator, &other, 60 << 20);
    library.fill(natives[2], &next);
    free(&other, next);
    // SAFETY: a word of pinned memory.
    unsafe { library.driver().store_word(word, 1) };
    for (native, stream) in natives.into_iter().zip([home, user, other]) {
        library.driver().stream_synchronize(native).unwrap();
        library.device.primary().externals().end(stream.native()).unwrap();
        library.driver().stream_destroy(native).unwrap();
    }
    assert_eq!(library.bench.reports(), [""; 0]);
    library.driver().host_free(word).unwrap();
    drop(allocator);
    library.close();
}

#[test]
fn memory_goes_between_the_backends_streams_and_other_libraries() {
    let library = Library::new(7);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let device = Lease::map(library.device.clone(), |d| d as &dyn Device);
    let own = stream(&device);
    let native = library.stream();
    let external = library.external(native);
    for _ in 0..10 {
        let on = On { timeline: own.timeline(), source: &*own };
        let buffer = allocator.alloc(Layout::new(60 << 20), on).unwrap();
        let value = submit(&own, &[fill(&buffer, 1)]).unwrap();
        // SAFETY: the timepoint is of the submission that was made just now.
        unsafe { buffer.mark_write(own.timeline().at(value)) };
        drop(buffer);
        let buffer = alloc(&allocator, &external, 60 << 20);
        library.fill(native, &buffer);
        free(&external, buffer);
    }
    assert!(allocator.stats().inserted_waits > 0, "{:?}", allocator.stats());
    until(|| own.wait_host(own.timeline().submitted(), None));
    until(|| library.device.primary().externals().end(native.0));
    library.driver().stream_destroy(native).unwrap();
    while allocator.stats().reserved > 0 {
        allocator.trim(0).unwrap();
    }
    drop((allocator, own, device, external));
    library.close();
}

#[test]
fn a_trim_waits_for_nothing_and_gives_back_what_is_over() {
    let library = Library::new(3);
    let allocator = library.allocator(Policy::Balanced, u64::MAX);
    let native = library.stream();
    let stream = library.external(native);
    let buffer = alloc(&allocator, &stream, 32 << 20);
    library.fill(native, &buffer);
    free(&stream, buffer);
    let mut trims = 0;
    while allocator.stats().reserved > 0 {
        allocator.trim(0).unwrap();
        trims += 1;
        assert!(trims < 1000, "{:?}", allocator.stats());
    }
    library.device.primary().externals().end(native.0).unwrap();
    library.driver().stream_destroy(native).unwrap();
    drop((allocator, stream));
    library.close();
}

/// The device is more than a moment behind: granules that the stream may still use are mapped at a
/// second address. The first mapping goes once their old uses are over, and no earlier.
#[test]
fn a_late_stream_gets_its_own_granules_without_waiting_for_them() {
    let library = Library::new(7);
    let allocator = library.allocator(Policy::Compact, u64::MAX);
    let (a, b) = (library.stream(), library.stream());
    let (stream, other) = (library.external(a), library.external(b));
    let driver = library.driver();
    let word = library.bench.driver.host_alloc(64, HostFlags::default()).unwrap();
    let (first, between) =
        (alloc(&allocator, &stream, 16 << 20), alloc(&allocator, &stream, 1 << 20));
    driver.stream_wait_word(a, word, 1).unwrap();
    library.fill(a, &first);
    free(&stream, first);
    let unmaps = library.bench.calls("cuMemUnmap");
    let larger = alloc(&allocator, &stream, 32 << 20);
    let stats = allocator.stats();
    assert_eq!((stats.reserved, stats.remaps), (34 << 20, 1));
    let fill = NativeFill { dst: larger.addr(), count: 32 << 20, value: 9, width: 1 };
    // SAFETY: the simulated driver checks the range when it runs the fill.
    unsafe { driver.fill(a, &fill) }.unwrap();
    // Another stream gets none of it, and a trim leaves the old mapping alone.
    let beside = alloc(&allocator, &other, 16 << 20);
    library.fill(b, &beside);
    free(&other, beside);
    allocator.trim(1 << 30).unwrap();
    assert_eq!(library.bench.calls("cuMemUnmap"), unmaps);
    // SAFETY: a word of pinned memory.
    unsafe { driver.store_word(word, 1) };
    driver.stream_synchronize(a).unwrap();
    // The last write stays, whichever address it went through.
    let copied = library.bench.driver.host_alloc(32 << 20, HostFlags::default()).unwrap();
    let down = NativeCopy::linear(CopyKind::DeviceToHost, copied, larger.addr(), 32 << 20);
    // SAFETY: the simulated driver checks the ranges when it runs the copy.
    unsafe { driver.copy(a, &down) }.unwrap();
    driver.stream_synchronize(a).unwrap();
    driver.host_access(copied, 32 << 20, false);
    // SAFETY: pinned memory of this test, which no work uses any more.
    let bytes = unsafe { std::slice::from_raw_parts(copied as *const u8, 32 << 20) };
    assert!(bytes.iter().all(|&b| b == 9));
    allocator.trim(1 << 30).unwrap();
    assert!(library.bench.calls("cuMemUnmap") >= unmaps + 8, "the old mappings went");
    driver.host_free(copied).unwrap();
    driver.host_free(word).unwrap();
    free(&stream, larger);
    free(&stream, between);
    assert_eq!(library.bench.reports(), [""; 0]);
    for native in [a, b] {
        library.device.primary().externals().end(native.0).unwrap();
        driver.stream_destroy(native).unwrap();
    }
    drop((allocator, stream, other));
    library.close();
}

#[test]
fn a_stream_that_its_owner_ends_leaves_no_memory_behind() {
    let library = Library::new(4);
    let allocator = library.allocator(Policy::Balanced, u64::MAX);
    let externals = library.device.primary().externals().clone();
    for _ in 0..300 {
        let native = library.stream();
        let stream = library.external(native);
        let buffer = alloc(&allocator, &stream, 8 << 20);
        library.fill(native, &buffer);
        free(&stream, buffer);
        externals.end(native.0).unwrap();
        externals.end(native.0).unwrap();
        library.driver().stream_destroy(native).unwrap();
    }
    assert!(allocator.stats().reserved <= 256 << 20, "{:?}", allocator.stats());
    assert!(externals.is_empty());
    // A stream that was destroyed first: the whole context is waited for.
    let native = library.stream();
    let stream = library.external(native);
    let buffer = alloc(&allocator, &stream, 8 << 20);
    library.fill(native, &buffer);
    free(&stream, buffer);
    library.driver().stream_destroy(native).unwrap();
    externals.end(native.0).unwrap();
    assert!(stream.timeline().is_idle());
    drop((allocator, stream, externals));
    library.close();
}

#[test]
fn default_streams_have_their_rules() {
    let library = Library::new(5);
    let allocator = library.allocator(Policy::Balanced, u64::MAX);
    let legacy = library.bench.driver.legacy_stream().unwrap();
    // Both handles of the legacy stream are one stream.
    let stream = library.external(NativeStream(0));
    assert!(Arc::ptr_eq(&stream, &library.external(legacy)));
    let buffer = alloc(&allocator, &stream, 1 << 20);
    library.fill(legacy, &buffer);
    free(&stream, buffer);
    stream.signal().unwrap();

    // A per-thread stream's event is recorded at each free, and its timeline ends with the thread.
    std::thread::scope(|scope| {
        let worker = scope.spawn(|| {
            library.driver().set_current(library.device.primary().native()).unwrap();
            let own = library.bench.driver.per_thread_stream().unwrap();
            let stream = library.external(own);
            let buffer = alloc(&allocator, &stream, 1 << 20);
            library.fill(own, &buffer);
            let records = library.bench.calls("cuEventRecord");
            free(&stream, buffer);
            assert_eq!(library.bench.calls("cuEventRecord"), records + 1);
            assert!(std::thread::scope(|scope| {
                scope.spawn(|| stream.signal().is_err()).join().unwrap()
            }));
            assert_eq!(library.device.primary().externals().len(), 2);
        });
        worker.join().unwrap();
    });
    let mut looks = 0;
    while library.device.primary().externals().len() > 1 {
        looks += 1;
        assert!(looks < 1000, "the thread's stream is still known");
        std::thread::yield_now();
    }
    while allocator.stats().reserved > 0 {
        allocator.trim(0).unwrap();
    }
    drop((allocator, stream));
    library.close();
}

#[test]
fn memory_of_a_stream_in_capture_stays_with_it() {
    let library = Library::new(6);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let (a, b) = (library.stream(), library.stream());
    let (captured, other) = (library.external(a), library.external(b));
    library.driver().capture_begin(a).unwrap();
    let buffer = alloc(&allocator, &captured, 30 << 20);
    library.fill(a, &buffer);
    free(&captured, buffer);
    // The same stream takes it again; another one does not, and breaks nothing.
    let again = alloc(&allocator, &captured, 30 << 20);
    library.fill(a, &again);
    free(&captured, again);
    assert!(allocator.alloc(Layout::new(60 << 20), On::new(&*other)).is_err());
    assert_eq!(allocator.trim(0).unwrap(), 0);
    assert!(captured.signal().is_err());
    let graph = library.driver().capture_end(a).unwrap();
    library.driver().graph_destroy(graph).unwrap();
    let taken = alloc(&allocator, &other, 60 << 20);
    library.fill(b, &taken);
    free(&other, taken);
    for stream in [a, b] {
        library.device.primary().externals().end(stream.0).unwrap();
        library.driver().stream_destroy(stream).unwrap();
    }
    drop((allocator, captured, other));
    library.close();
}

/// A capture that begins between another thread's look at the stream and its event is not broken:
/// nobody asks the event that the capture has.
#[test]
fn captures_begin_while_other_threads_close_epochs() {
    let library = Library::new(14);
    let externals = library.device.primary().externals().clone();
    let native = library.stream();
    let stream = library.external(native);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                externals.any().unwrap().wait_context(std::time::Duration::ZERO).unwrap();
            }
        });
        let broken = (0..1500).find_map(|_| {
            library.driver().capture_begin(native).unwrap();
            (0..3).for_each(|_| std::thread::yield_now());
            library.driver().capture_end(native).map(|g| library.driver().graph_destroy(g)).err()
        });
        over.store(true, Ordering::Relaxed);
        assert!(broken.is_none(), "{broken:?}");
    });
    externals.end(native.0).unwrap();
    library.driver().stream_destroy(native).unwrap();
    drop((stream, externals));
    library.close();
}

/// The device ends with its backend, although a stream of another library has work then: one that
/// its owner has ended, or one that ends with the device.
#[test]
fn a_shutdown_outlasts_the_work_of_other_libraries() {
    for ended in [true, false] {
        let library = Library::new(17);
        // The manager keeps the device until the shutdown.
        library.bench.backend.manager().devices().ensure_alive(DeviceId::cuda(0)).unwrap();
        let word = library.bench.driver.host_alloc(64, HostFlags::default()).unwrap();
        let native = library.stream();
        let stream = library.external(native);
        library.driver().stream_wait_word(native, word, 1).unwrap();
        stream.signal().unwrap();
        if ended {
            library.device.primary().externals().end(native.0).unwrap();
            library.driver().stream_destroy(native).unwrap();
        }
        drop(stream);
        let Library { bench, device } = library;
        drop(device);
        let driver = bench.driver.clone();
        std::thread::scope(|scope| {
            scope.spawn(|| {
                std::thread::sleep(std::time::Duration::from_millis(50));
                // SAFETY: a word of pinned memory, and a driver that checks every handle.
                unsafe { Vouched::new(&*driver).store_word(word, 1) };
            });
            bench.backend.shutdown().unwrap();
            let census = driver.census();
            assert_eq!((census.contexts, census.events), (0, 0), "ended {ended}");
        });
    }
}

/// Allocates a block on a new stream, fills and frees it there, and destroys the stream without a
/// word.
fn use_and_destroy(library: &Library, allocator: &Allocator, bytes: u64) -> Arc<External> {
    let native = library.stream();
    let stream = library.external(native);
    let buffer = alloc(allocator, &stream, bytes);
    library.fill(native, &buffer);
    free(&stream, buffer);
    library.driver().stream_destroy(native).unwrap();
    stream
}

#[test]
fn a_synchronisation_frees_the_memory_of_streams_that_are_gone() {
    let library = Library::new(11);
    let externals = library.device.primary().externals().clone();
    // Two streams, and one alone: its memory lies with what is free for everybody.
    for streams in [2, 1] {
        let allocator = library.allocator(Policy::Balanced, 64 << 20);
        for _ in 0..streams {
            use_and_destroy(&library, &allocator, (64 << 20) / streams);
        }
        assert_eq!(allocator.stats().free_not_ready, 64 << 20);
        externals.whole().unwrap().synchronize_context().unwrap();
        let asked = library.bench.calls("cuStreamIsCapturing");
        let stats = allocator.stats();
        assert_eq!((stats.free_ready, stats.free_not_ready), (64 << 20, 0));
        let native = library.stream();
        let stream = library.external(native);
        let whole = alloc(&allocator, &stream, 64 << 20);
        library.fill(native, &whole);
        free(&stream, whole);
        assert_eq!(library.bench.calls("cuStreamIsCapturing"), asked, "no handle was used");
        externals.end(native.0).unwrap();
        library.driver().stream_destroy(native).unwrap();
        assert_eq!(library.bench.reports(), [""; 0]);
    }
    drop(externals);
    library.close();
}

#[test]
fn an_allocation_waits_for_the_context_before_it_fails() {
    let library = Library::new(12);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let (native, captured) = (library.stream(), library.stream());
    let (stream, known) = (library.external(native), library.external(captured));
    for _ in 0..2 {
        use_and_destroy(&library, &allocator, 32 << 20);
    }
    // A context with a stream in capture is not waited for. The failure says what would help.
    library.driver().capture_begin(captured).unwrap();
    let error = allocator.alloc(Layout::new(60 << 20), On::new(&*stream)).unwrap_err().to_string();
    assert!(error.contains("is gone") && error.contains("leasehold_stream_end"), "{error}");
    let graph = library.driver().capture_end(captured).unwrap();
    library.driver().graph_destroy(graph).unwrap();
    let buffer = alloc(&allocator, &stream, 60 << 20);
    library.fill(native, &buffer);
    free(&stream, buffer);
    assert_eq!(library.bench.reports(), [""; 0]);
    for stream in [native, captured] {
        library.device.primary().externals().end(stream.0).unwrap();
        library.driver().stream_destroy(stream).unwrap();
    }
    drop((allocator, stream, known));
    library.close();
}

#[test]
fn a_synchronisation_leaves_what_a_capture_freed() {
    let library = Library::new(13);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let externals = library.device.primary().externals().clone();
    let (a, b) = (library.stream(), library.stream());
    let (captured, other) = (library.external(a), library.external(b));
    library.driver().capture_begin(a).unwrap();
    let buffer = alloc(&allocator, &captured, 60 << 20);
    library.fill(a, &buffer);
    free(&captured, buffer);
    assert!(captured.timeline().wait(captured.timeline().submitted(), None).is_err());
    assert!(allocator.alloc(Layout::new(60 << 20), On::new(&*other)).is_err());
    externals.any().unwrap().wait_context(std::time::Duration::from_secs(60)).unwrap();
    // The capture goes on. The wait that the caller asks for breaks it.
    let again = alloc(&allocator, &captured, 60 << 20);
    library.fill(a, &again);
    free(&captured, again);
    assert!(externals.whole().unwrap().synchronize_context().is_err());
    assert!(library.driver().capture_end(a).is_err());
    externals.whole().unwrap().synchronize_context().unwrap();
    assert_eq!(allocator.stats().free_not_ready, 0);
    let taken = alloc(&allocator, &other, 60 << 20);
    library.fill(b, &taken);
    free(&other, taken);
    for stream in [a, b] {
        externals.end(stream.0).unwrap();
        library.driver().stream_destroy(stream).unwrap();
    }
    drop((allocator, captured, other, externals));
    library.close();
}

/// The backend's own stream waits on the device, and never for what cannot come.
#[test]
fn a_wait_for_a_stream_that_is_gone_is_refused() {
    let library = Library::new(14);
    let device = Lease::map(library.device.clone(), |d| d as &dyn Device);
    let own = stream(&device);
    let word = library.bench.driver.host_alloc(64, HostFlags::default()).unwrap();
    let native = library.stream();
    let external = library.external(native);
    library.driver().stream_wait_word(native, word, 1).unwrap();
    own.wait(external.now()).unwrap();
    let value = own.timeline().submitted();
    assert!(matches!(
        own.wait_host(value, Some(std::time::Duration::ZERO)),
        Err(Error::Timeout(_))
    ));
    // SAFETY: a word of pinned memory.
    unsafe { library.driver().store_word(word, 1) };
    own.wait_host(value, None).unwrap();

    let gone = external.now();
    library.driver().stream_destroy(native).unwrap();
    let error = own.wait(gone).unwrap_err().to_string();
    assert!(error.contains("is gone") && error.contains("leasehold_stream_end"), "{error}");
    // The stream is as it was, and a thread can wait: for the whole context.
    let limited = gone.timeline().wait(gone.value(), Some(std::time::Duration::from_secs(1)));
    assert!(limited.is_err() && !gone.is_settled());
    gone.timeline().wait(gone.value(), None).unwrap();
    own.wait(gone).unwrap();
    assert!(own.timeline().is_idle() && own.timeline().failure().is_none());
    library.driver().host_free(word).unwrap();
    drop((own, device, external));
    library.close();
}

#[test]
fn a_handle_is_checked_without_the_driver_and_its_work_is_the_contexts() {
    let library = Library::new(15);
    let allocator = library.allocator(Policy::Balanced, 64 << 20);
    let externals = library.device.primary().externals().clone();
    let calls = library.bench.driver.machine().calls_by_name();
    for none in [0, 1, 2, 3, 7, 0xdead0, 1 << 46, u64::MAX] {
        let error = externals.check_handle(none).unwrap_err();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error}");
    }
    assert_eq!(library.bench.driver.machine().calls_by_name(), calls);
    let (native, other) = (library.stream(), library.stream());
    let (home, whole) = (library.external(other), externals.whole().unwrap());
    let buffer = alloc(&allocator, &home, 60 << 20);
    library.fill(other, &buffer);
    externals.check_handle(native.0).unwrap();
    home.timeline().wait(home.now().value(), None).unwrap();
    library.fill(native, &buffer);
    library.driver().stream_destroy(native).unwrap();
    buffer.used_on(whole.now());
    free(&home, buffer);
    assert_eq!(externals.len(), 1);
    assert!(whole.signal().is_err());
    // The memory waits for the context, even on its own stream.
    let again = alloc(&allocator, &home, 60 << 20);
    assert!(allocator.stats().host_waits > 0);
    library.fill(other, &again);
    free(&home, again);
    assert_eq!(library.bench.reports(), [""; 0]);
    externals.end(other.0).unwrap();
    library.driver().stream_destroy(other).unwrap();
    drop((allocator, home, whole, externals));
    library.close();
}

/// Streams have as many events as are kept, and the last is recorded again. A record that fails
/// leaves the epoch that the event closed.
#[test]
fn a_stream_with_all_its_events_may_go() {
    let library = Library::new(16);
    let word = library.bench.driver.host_alloc(64, HostFlags::default()).unwrap();
    let native = library.stream();
    let external = library.external(native);
    library.driver().stream_wait_word(native, word, 1).unwrap();
    for _ in 0..40 {
        external.signal().unwrap();
    }
    let closed = external.timeline().submitted() - 1;
    library.driver().stream_destroy(native).unwrap();
    assert!(external.signal().is_err());
    // SAFETY: a word of pinned memory.
    unsafe { library.driver().store_word(word, 1) };
    external.timeline().wait(closed, Some(std::time::Duration::from_secs(20))).unwrap();
    library.driver().host_free(word).unwrap();
    drop(external);
    library.close();
}

/// A random program of three streams: allocations, fills, uses on other streams, frees, trims, and
/// streams that end. Returns what the race detector and the driver found. `marks`: uses on other
/// streams than the allocation's are marked.
fn play(library: Library, seed: u64, marks: bool) -> Result<Vec<String>> {
    let mut dice = Dice::new(seed);
    let policy = [Policy::Balanced, Policy::Fastest, Policy::Compact][(seed % 3) as usize];
    let allocator = library.allocator(policy, 48 << 20);
    let mut streams: Vec<_> = (0..3).map(|_| library.stream()).collect();
    let mut live: Vec<(Lease<Buffer>, usize, Vec<usize>)> = Vec::new();
    let mut findings = Vec::new();
    let done = (0..150).try_for_each(|_| -> Result<()> {
        let at = dice.below(3) as usize;
        let stream = library.external(streams[at]);
        match dice.below(10) {
            0..=4 => {
                let bytes = [700, 40_000, 900_000, 5 << 20, 14 << 20][dice.below(5) as usize];
                if let Ok(buffer) = allocator.alloc(Layout::new(bytes), On::new(&*stream)) {
                    library.fill(streams[at], &buffer);
                    live.push((buffer, at, Vec::new()));
                }
            }
            5 if !live.is_empty() => {
                let which = dice.below(live.len() as u64) as usize;
                let (buffer, home, others) = &mut live[which];
                if *home != at && !others.contains(&at) {
                    library.order(streams[*home], streams[at]);
                    for &other in &*others {
                        library.order(streams[other], streams[at]);
                    }
                    library.fill(streams[at], buffer);
                    others.push(at);
                }
            }
            6..=8 if !live.is_empty() => {
                let which = dice.below(live.len() as u64) as usize;
                let (buffer, home, others) = live.swap_remove(which);
                for other in others.into_iter().filter(|_| marks) {
                    buffer.used_on(library.external(streams[other]).now());
                }
                free(&library.external(streams[home]), buffer);
            }
            9 if dice.below(8) == 0 && live.iter().all(|l| l.1 != at && !l.2.contains(&at)) => {
                drop(stream);
                until(|| library.device.primary().externals().end(streams[at].0));
                library.driver().stream_destroy(streams[at])?;
                streams[at] = library.stream();
            }
            9 => drop(allocator.trim(dice.below(16) << 20)?),
            _ => {}
        }
        allocator.check().map_err(leasehold_core::Error::state)
    });
    findings.extend(done.err().map(|e| e.to_string()));
    for (buffer, home, others) in live {
        others.into_iter().for_each(|o| buffer.used_on(library.external(streams[o]).now()));
        free(&library.external(streams[home]), buffer);
    }
    let externals = library.device.primary().externals().clone();
    let more = externals.len().checked_sub(4);
    findings.extend(more.map(|_| "more streams than there are".to_owned()));
    for stream in streams {
        until(|| externals.end(stream.0));
        findings.extend(library.driver().stream_destroy(stream).err().map(|e| e.to_string()));
    }
    drop((allocator, externals));
    findings.extend(library.bench.reports());
    Ok(findings)
}

#[test]
fn random_programs_of_other_libraries_show_no_race() {
    for seed in 1..=60 {
        let found = play(Library::new(seed), seed, true).unwrap();
        assert_eq!(found, [""; 0], "seed {seed}");
    }
}

#[test]
fn a_use_on_another_stream_that_is_not_marked_is_found() {
    let found = (1..=60)
        .find(|&seed| !play(Library::new(seed), seed, false).is_ok_and(|found| found.is_empty()));
    assert!(found.is_some());
}

/// A call of the driver that fails at one place, or often, costs memory or an error, and no order.
#[test]
fn a_call_that_fails_leaves_the_order_of_reuse() {
    let names = [
        "cuEventCreate",
        "cuEventRecord",
        "cuEventQuery",
        "cuStreamIsCapturing",
        "cuThreadExchangeStreamCaptureMode",
    ];
    for name in names {
        for (seed, when) in
            [When::At(1), When::At(7), When::Probability(0.3)].into_iter().enumerate()
        {
            for seed in [seed as u64 + 1, seed as u64 + 20] {
                let library = Library::new(seed);
                let driver = library.bench.driver.clone();
                let rule = FaultRule::on(name, when, FaultAction::Fail(304));
                driver.machine().set_faults(FaultPlan::none().with(rule));
                let mut found = play(library, seed, true).unwrap();
                // A trim may report the call that failed.
                found.retain(|text| !text.contains("(304)"));
                assert_eq!(found, [""; 0], "{name} {when:?} {seed}");
            }
        }
    }
}
