//! Each call of the driver: the messages that it sends, and the references that it keeps.

use leasehold_core::Error;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, MutexGuard};
use leasehold_mps::driver::ops::*;
use leasehold_mps::driver::real::RealDriver;
use metal_messages::metal;
use metal_messages::runtime::{Id, live, live_blocks, take_messages, take_mistakes};
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

/// The stand-ins are those of the process: one test at a time.
static ONE: Mutex<()> = Mutex::new(());

/// The driver with a device. At its end the objects are those of before.
struct Bench {
    driver: RealDriver,
    device: NativeDevice,
    before: (BTreeMap<&'static str, usize>, usize),
    _one: MutexGuard<'static, ()>,
}

impl Bench {
    fn new() -> Self {
        let one = ONE.lock();
        let driver = RealDriver::new();
        let devices = driver.devices().expect("a device");
        take_messages();
        let mut before = (live(), live_blocks());
        assert_eq!(before.0.remove("MTLDevice"), Some(1), "the list of devices is gone");
        Self { driver, device: devices[0], before, _one: one }
    }

    /// Runs a call, which sends these messages.
    #[track_caller]
    fn sends<T>(&self, wanted: &[&str], call: impl FnOnce(&RealDriver) -> T) -> T {
        let result = call(&self.driver);
        assert_eq!(take_messages(), wanted);
        result
    }

    #[track_caller]
    fn release(&self, objects: &[NativeObject]) {
        for object in objects {
            // SAFETY: the test made the object and uses it no more.
            unsafe { self.driver.release(*object) };
        }
        assert_eq!(take_messages(), [""; 0], "the end of an object is no message");
    }

    #[track_caller]
    fn end(self) {
        self.release(&[self.device.into()]);
        let Self { driver, before, .. } = self;
        drop(driver);
        assert_eq!((live(), live_blocks()), before);
        assert_eq!(take_mistakes(), [""; 0]);
    }
}

fn driver_error<T: std::fmt::Debug>(
    result: leasehold_core::Result<T>,
) -> (&'static str, i32, String) {
    match result {
        Err(Error::Driver { api, code, name }) => (api, code, name.into()),
        other => panic!("{other:?}"),
    }
}

const DISPATCH: Dispatch<'static> =
    Dispatch { groups: [1, 2, 3], threads: [4, 5, 6], bindings: &[] };

#[test]
fn devices() {
    let bench = Bench::new();
    // SAFETY: the device is live.
    let p = unsafe { bench.driver.device_properties(bench.device) }.unwrap();
    let families: Vec<String> =
        take_messages().into_iter().filter(|m| m.contains("Family")).collect();
    assert_eq!(families[0], "MTLDevice supportsFamily: 1001");
    assert_eq!(families.len(), 10 + 1 + 3 + 2);
    assert_eq!((p.apple_family, p.mac_family, p.common_family, p.metal_family), (9, 2, 3, 3));
    assert_eq!((p.name.as_str(), p.registry_id, p.peer_group), ("Stand-in", 42, 3));
    assert_eq!((p.max_threads, p.max_threadgroup_memory), ([1024, 1023, 1022], 32 << 10));
    assert_eq!((p.recommended_working_set, p.max_buffer), (1 << 34, 1 << 33));
    assert_eq!(p.architecture.as_deref(), Some("applegpu_s1"));
    assert!(p.unified_memory && p.headless && !p.low_power && p.residency_sets && p.stage_counters);
    // A virtual machine's device, and an older system's.
    metal::set_nameless(true);
    // SAFETY: the device is live.
    assert_eq!(unsafe { bench.driver.device_properties(bench.device) }.unwrap().architecture, None);
    metal::set_nameless(false);
    metal::set_missing(&["architecture", "newResidencySetWithDescriptor:error:"]);
    take_messages();
    // SAFETY: the device is live.
    let older = unsafe { bench.driver.device_properties(bench.device) }.unwrap();
    assert!(!take_messages().iter().any(|m| m.ends_with("architecture")));
    assert_eq!((older.architecture, older.residency_sets), (None, false));
    // SAFETY: the device is live.
    let set = unsafe { bench.driver.residency_create(bench.device, 1) };
    assert!(matches!(set, Err(Error::Unsupported(_))), "{set:?}");
    metal::set_missing(&[]);
    take_messages();
    // SAFETY: the device is live.
    unsafe {
        let bytes =
            bench.sends(&["MTLDevice currentAllocatedSize"], |d| d.allocated_size(bench.device));
        assert_eq!(bytes.unwrap(), 4096);
        let both = ["MTLDevice sampleTimestamps:gpuTimestamp: pointer pointer"];
        assert_eq!(bench.sends(&both, |d| d.sample_timestamps(bench.device)).unwrap(), (11, 12));
    }
    // A system whose list is empty has its default device, or none.
    metal::LISTED.store(false, Ordering::Relaxed);
    let default = bench.driver.devices().unwrap();
    bench.release(&[default[0].into()]);
    metal::fail_next();
    assert!(matches!(bench.driver.devices(), Err(Error::Unavailable(_))));
    metal::LISTED.store(true, Ordering::Relaxed);
    bench.end();
}

#[test]
fn command_buffers() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let queue = bench
            .sends(
                &[
                    "MTLDevice newCommandQueueWithMaxCommandBufferCount: 64",
                    "MTLCommandQueue setLabel: \"a queue\"",
                ],
                |d| d.queue_create(bench.device, 64, "a queue"),
            )
            .unwrap();
        let made = |retained: &str| {
            [
                format!("MTLCommandBufferDescriptor setRetainedReferences: {retained}"),
                "MTLCommandBufferDescriptor setErrorOptions: 1".to_owned(),
                "MTLCommandQueue commandBufferWithDescriptor: MTLCommandBufferDescriptor"
                    .to_owned(),
            ]
        };
        let desc = CommandBufferDesc { retained: false, encoder_status: true };
        let wanted = made("false");
        let buffer = bench
            .sends(&wanted.each_ref().map(String::as_str), |d| d.command_buffer(queue, desc))
            .unwrap();
        // Without the option it is not set.
        let plain = CommandBufferDesc { retained: true, encoder_status: false };
        let wanted = made("true");
        let other =
            bench.sends(&[&wanted[0], &wanted[2]], |d| d.command_buffer(queue, plain)).unwrap();
        bench.release(&[other.into()]);
        let event = bench.sends(&["MTLDevice newEvent"], |d| d.event_create(bench.device)).unwrap();
        let shared = bench
            .sends(&["MTLDevice newSharedEvent"], |d| d.shared_event_create(bench.device))
            .unwrap();
        bench
            .sends(&["MTLCommandBuffer setLabel: \"work\""], |d| d.buffer_set_label(buffer, "work"))
            .unwrap();
        bench
            .sends(&["MTLCommandBuffer encodeWaitForEvent:value: MTLEvent 3"], |d| {
                d.encode_wait(buffer, event.into(), 3)
            })
            .unwrap();
        bench
            .sends(&["MTLCommandBuffer encodeSignalEvent:value: MTLSharedEvent 4"], |d| {
                d.encode_signal(buffer, shared.into(), 4)
            })
            .unwrap();
        let told: Arc<Mutex<Vec<Completion>>> = Arc::default();
        let tell = told.clone();
        let handler: CompletedHandler = Box::new(move |c| tell.lock().push(c.clone()));
        bench
            .sends(&["MTLCommandBuffer addCompletedHandler: pointer"], |d| {
                d.on_completed(buffer, handler)
            })
            .unwrap();
        bench.sends(&["MTLCommandBuffer commit"], |d| d.commit(buffer)).unwrap();
        for (number, status) in [
            (0, Status::NotEnqueued),
            (1, Status::Enqueued),
            (2, Status::Committed),
            (3, Status::Scheduled),
            (4, Status::Completed),
            (5, Status::Error),
        ] {
            metal::set_status(number);
            assert_eq!(
                bench.sends(&["MTLCommandBuffer status"], |d| d.status(buffer)).unwrap(),
                status
            );
        }
        metal::set_status(3);
        let early = bench.sends(&["MTLCommandBuffer status"], |d| d.completion(buffer));
        assert!(matches!(early, Err(Error::InvalidState(_))), "{early:?}");
        // An error at completion reaches the handler, and the one who asks.
        metal::set_status(5);
        metal::run_block(buffer.0, None);
        let failed = bench.driver.completion(buffer).unwrap();
        assert_eq!(failed.error, Some((7, "a stand-in's error".to_owned())));
        assert_eq!((failed.started, failed.ended), (1_500_000_000, 2_500_000_000));
        assert_eq!(*told.lock(), [failed]);
        metal::set_status(4);
        assert_eq!(bench.driver.completion(buffer).unwrap().error, None);
        take_messages();
        bench
            .sends(&["MTLCommandBuffer waitUntilCompleted"], |d| d.wait_completed(buffer))
            .unwrap();
        // A handler that Metal never calls ends with its command buffer.
        let dropped = Arc::new(AtomicBool::new(false));
        struct Note(Arc<AtomicBool>);
        impl Drop for Note {
            fn drop(&mut self) {
                self.0.store(true, Ordering::Relaxed);
            }
        }
        let note = Note(dropped.clone());
        bench.driver.on_completed(buffer, Box::new(move |_| drop(note))).unwrap();
        take_messages();
        bench.release(&[buffer.into()]);
        assert!(dropped.load(Ordering::Relaxed));
        for nil in ["newCommandQueueWithMaxCommandBufferCount", "commandBufferWithDescriptor"] {
            metal::fail_next();
            let error = if nil.starts_with("new") {
                driver_error(bench.driver.queue_create(bench.device, 1, "none"))
            } else {
                driver_error(bench.driver.command_buffer(queue, plain))
            };
            assert_eq!(error, (nil, 0, "nil".to_owned()));
        }
        take_messages();
        bench.release(&[event.into(), shared.into(), queue.into()]);
    }
    bench.end();
}

#[test]
fn encoders() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let d = &bench.driver;
        let queue = d.queue_create(bench.device, 1, "q").unwrap();
        let buffer = d.command_buffer(queue, CommandBufferDesc::default()).unwrap();
        let (fence, memory) = (
            d.fence_create(bench.device).unwrap(),
            d.buffer_create(bench.device, 8, MemoryOptions::default()).unwrap(),
        );
        let heap = d
            .heap_create(
                bench.device,
                &HeapDesc { size: 1, options: MemoryOptions::default(), placement: true },
            )
            .unwrap();
        let samples = d.samples_create(bench.device, 2).unwrap();
        let library = d.library_from_source(bench.device, "", &CompileOptions::default()).unwrap();
        let function = d.function(library, "f").unwrap();
        let pipeline = d.pipeline_create(bench.device, function, &PipelineDesc::default()).unwrap();
        let indirect = d.indirect_create(bench.device, 4, 2).unwrap();
        take_messages();
        let compute = bench
            .sends(
                &[
                    "MTLComputePassDescriptor computePassDescriptor",
                    "MTLComputePassDescriptor setDispatchType: 1",
                    "MTLComputePassDescriptor sampleBufferAttachments",
                    "MTLComputePassSampleBufferAttachmentDescriptorArray objectAtIndexedSubscript: 0",
                    "MTLComputePassSampleBufferAttachmentDescriptor setSampleBuffer: MTLCounterSampleBuffer",
                    "MTLComputePassSampleBufferAttachmentDescriptor setStartOfEncoderSampleIndex: 8",
                    "MTLComputePassSampleBufferAttachmentDescriptor setEndOfEncoderSampleIndex: 9",
                    "MTLCommandBuffer computeCommandEncoderWithDescriptor: MTLComputePassDescriptor",
                ],
                |d| d.compute_encoder(buffer, &ComputeDesc { concurrent: true, samples: Some((samples, 8, 9)) }),
            )
            .unwrap();
        const E: &str = "MTLComputeCommandEncoder";
        let sent = |message: &str, call: &dyn Fn(&RealDriver) -> leasehold_core::Result<()>| {
            bench.sends(&[&format!("{E} {message}")], call).unwrap();
        };
        sent("waitForFence: MTLFence", &|d| d.wait_fence(compute.into(), fence));
        sent("setComputePipelineState: MTLComputePipelineState", &|d| {
            d.set_pipeline(compute, pipeline)
        });
        sent("setBuffer:offset:atIndex: MTLBuffer 16 3", &|d| d.set_buffer(compute, memory, 16, 3));
        sent("setThreadgroupMemoryLength:atIndex: 48 1", &|d| {
            d.set_threadgroup_memory(compute, 48, 1)
        });
        sent("dispatchThreadgroups:threadsPerThreadgroup: 1x2x3 4x5x6", &|d| {
            d.dispatch(compute, &DISPATCH)
        });
        sent("memoryBarrierWithScope: 1", &|d| d.barrier(compute));
        sent("useResource:usage: MTLBuffer 1", &|d| d.use_buffer(compute, memory, Usage::Read));
        sent("useResource:usage: MTLBuffer 3", &|d| {
            d.use_buffer(compute, memory, Usage::ReadWrite)
        });
        sent("useHeap: MTLHeap", &|d| d.use_heap(compute, heap));
        sent("executeCommandsInBuffer:withRange: MTLIndirectCommandBuffer 1+2", &|d| {
            d.execute_indirect(compute, indirect, 1..3)
        });
        sent("pushDebugGroup: \"group\"", &|d| d.push_group(compute.into(), "group"));
        sent("popDebugGroup", &|d| d.pop_group(compute.into()));
        sent("updateFence: MTLFence", &|d| d.update_fence(compute.into(), fence));
        let bytes = ["MTLComputeCommandEncoder setBytes:length:atIndex: pointer 3 2", "[1, 2, 3]"];
        bench.sends(&bytes, |d| d.set_bytes(compute, &[1, 2, 3], 2)).unwrap();
        for refused in [0, 4097] {
            bench.sends(&[], |d| d.set_bytes(compute, &vec![0; refused], 2)).unwrap_err();
        }
        sent("endEncoding", &|d| d.end_encoding(compute.into()));
        let serial = [
            "MTLComputePassDescriptor computePassDescriptor",
            "MTLComputePassDescriptor setDispatchType: 0",
            "MTLCommandBuffer computeCommandEncoderWithDescriptor: MTLComputePassDescriptor",
        ];
        let plain =
            bench.sends(&serial, |d| d.compute_encoder(buffer, &ComputeDesc::default())).unwrap();
        let blit = bench
            .sends(&["MTLCommandBuffer blitCommandEncoder"], |d| d.blit_encoder(buffer))
            .unwrap();
        for (message, call) in [
            (
                "waitForFence: MTLFence",
                &(|d: &RealDriver| d.wait_fence(blit.into(), fence)) as &dyn Fn(&RealDriver) -> _,
            ),
            (
                "copyFromBuffer:sourceOffset:toBuffer:destinationOffset:size: MTLBuffer 1 MTLBuffer 2 3",
                &|d| d.copy(blit, (memory, 1), (memory, 2), 3),
            ),
            ("fillBuffer:range:value: MTLBuffer 4+5 6", &|d| d.fill(blit, (memory, 4), 5, 6)),
            ("pushDebugGroup: \"b\"", &|d| d.push_group(blit.into(), "b")),
            ("popDebugGroup", &|d| d.pop_group(blit.into())),
            ("updateFence: MTLFence", &|d| d.update_fence(blit.into(), fence)),
            ("endEncoding", &|d| d.end_encoding(blit.into())),
        ] {
            bench.sends(&[&format!("MTLBlitCommandEncoder {message}")], call).unwrap();
        }
        metal::fail_next();
        assert_eq!(
            driver_error(d.compute_encoder(buffer, &ComputeDesc::default())).0,
            "computeCommandEncoderWithDescriptor"
        );
        metal::fail_next();
        assert_eq!(driver_error(d.blit_encoder(buffer)).0, "blitCommandEncoder");
        take_messages();
        bench.release(&[
            compute.into(),
            plain.into(),
            blit.into(),
            indirect.into(),
            pipeline.into(),
            function.into(),
            library.into(),
            samples.into(),
            heap.into(),
            memory.into(),
            fence.into(),
            buffer.into(),
            queue.into(),
        ]);
    }
    bench.end();
}

#[test]
fn libraries() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let options = CompileOptions {
            fast_math: false,
            language: Some((3, 1)),
            macros: vec![("A".to_owned(), "1".to_owned())],
        };
        let compile =
            "MTLDevice newLibraryWithSource:options:error: \"text\" MTLCompileOptions pointer";
        let library = bench
            .sends(
                &[
                    "MTLCompileOptions setMathMode: 0",
                    "MTLCompileOptions setLanguageVersion: 196609",
                    "MTLCompileOptions setPreprocessorMacros: NSDictionary",
                    "\"A\"",
                    "\"1\"",
                    compile,
                ],
                |d| d.library_from_source(bench.device, "text", &options),
            )
            .unwrap();
        // Systems before macOS 15 have another setter.
        metal::set_missing(&["setMathMode:"]);
        let fast = CompileOptions { fast_math: true, ..CompileOptions::default() };
        let older = bench
            .sends(&["MTLCompileOptions setFastMathEnabled: true", compile], |d| {
                d.library_from_source(bench.device, "text", &fast)
            })
            .unwrap();
        metal::set_missing(&[]);
        metal::fail_next();
        match bench.driver.library_from_source(bench.device, "wrong", &fast) {
            Err(Error::Compile { log }) => assert_eq!(&*log, "a stand-in's error"),
            other => panic!("{other:?}"),
        }
        take_messages();
        let from_file =
            ["NSURL some/file.metallib", "MTLDevice newLibraryWithURL:error: NSURL pointer"];
        let file = bench
            .sends(&from_file, |d| {
                d.library_from_file(bench.device, Path::new("some/file.metallib"))
            })
            .unwrap();
        metal::fail_next();
        let missing = bench.driver.library_from_file(bench.device, Path::new("none"));
        assert_eq!(
            driver_error(missing),
            ("newLibraryWithURL", 7, "a stand-in's error".to_owned())
        );
        take_messages();
        let names =
            bench.sends(&["MTLLibrary functionNames"], |d| d.function_names(library)).unwrap();
        assert_eq!(names, ["one", "two"]);
        let function = bench
            .sends(&["MTLLibrary newFunctionWithName: \"one\""], |d| d.function(library, "one"))
            .unwrap();
        metal::fail_next();
        assert!(matches!(bench.driver.function(library, "none"), Err(Error::NotFound(_))));
        take_messages();
        let desc = PipelineDesc { label: "p".to_owned(), indirect: true, max_threads: 128 };
        let make = "MTLDevice newComputePipelineStateWithDescriptor:options:reflection:error: MTLComputePipelineDescriptor 0 null pointer";
        let pipeline = bench
            .sends(
                &[
                    "MTLComputePipelineDescriptor setLabel: \"p\"",
                    "MTLComputePipelineDescriptor setComputeFunction: MTLFunction",
                    "MTLComputePipelineDescriptor setSupportIndirectCommandBuffers: true",
                    "MTLComputePipelineDescriptor setMaxTotalThreadsPerThreadgroup: 128",
                    make,
                ],
                |d| d.pipeline_create(bench.device, function, &desc),
            )
            .unwrap();
        let info = bench.driver.pipeline_info(pipeline).unwrap();
        assert_eq!(info, PipelineInfo { max_threads: 512, simd_width: 32, threadgroup_memory: 64 });
        metal::fail_next();
        assert!(matches!(
            bench.driver.pipeline_create(bench.device, function, &desc),
            Err(Error::Compile { .. })
        ));
        take_messages();
        bench.release(&[
            pipeline.into(),
            function.into(),
            library.into(),
            older.into(),
            file.into(),
        ]);
    }
    bench.end();
}

#[test]
fn memory() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let private =
            MemoryOptions { storage: Storage::Private, tracked: true, write_combined: true };
        let described = |storage: u32, hazards: u32, kind: u32, cache: bool| {
            let mut all = vec![
                "MTLHeapDescriptor setSize: 65536".to_owned(),
                format!("MTLHeapDescriptor setStorageMode: {storage}"),
                format!("MTLHeapDescriptor setHazardTrackingMode: {hazards}"),
            ];
            all.extend(cache.then(|| "MTLHeapDescriptor setCpuCacheMode: 1".to_owned()));
            all.push(format!("MTLHeapDescriptor setType: {kind}"));
            all.push("MTLDevice newHeapWithDescriptor: MTLHeapDescriptor".to_owned());
            all
        };
        let heap = |options, placement, wanted: Vec<String>| {
            let desc = HeapDesc { size: 65536, options, placement };
            let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
            bench.sends(&wanted, |d| d.heap_create(bench.device, &desc)).unwrap()
        };
        let placed = heap(MemoryOptions::default(), true, described(0, 1, 1, false));
        let other = heap(private, false, described(2, 2, 0, true));
        assert_eq!(bench.sends(&["MTLHeap usedSize"], |d| d.heap_used(placed)).unwrap(), 21);
        let largest = ["MTLHeap maxAvailableSizeWithAlignment: 256"];
        assert_eq!(bench.sends(&largest, |d| d.heap_available(placed, 256)).unwrap(), 22);
        // Untracked is 1 << 8, tracked 2 << 8, private 2 << 4, write combined 1.
        let size = ["MTLDevice heapBufferSizeAndAlignWithLength:options: 100 256"];
        let size = bench
            .sends(&size, |d| d.heap_buffer_size(bench.device, 100, MemoryOptions::default()))
            .unwrap();
        assert_eq!(size, SizeAlign { size: 101, align: 256 });
        let at = ["MTLHeap newBufferWithLength:options:offset: 100 256 512"];
        let at = bench
            .sends(&at, |d| d.heap_buffer(placed, 100, MemoryOptions::default(), Some(512)))
            .unwrap();
        let any = ["MTLHeap newBufferWithLength:options: 100 545"];
        let any = bench.sends(&any, |d| d.heap_buffer(other, 100, private, None)).unwrap();
        let own = ["MTLDevice newBufferWithLength:options: 9 545"];
        let own = bench.sends(&own, |d| d.buffer_create(bench.device, 9, private)).unwrap();
        let wrap = [
            "MTLDevice newBufferWithBytesNoCopy:length:options:deallocator: pointer 16384 256 null",
        ];
        let wrapped = bench.sends(&wrap, |d| d.buffer_wrap(bench.device, 1 << 30, 16384)).unwrap();
        for (at, bytes) in [(0, 16384), ((1 << 30) + 1, 16384), (1 << 30, 100), (1 << 30, 0)] {
            bench.sends(&[], |d| d.buffer_wrap(bench.device, at, bytes)).unwrap_err();
        }
        let contents = bench
            .sends(&["MTLBuffer storageMode", "MTLBuffer contents"], |d| d.buffer_contents(own))
            .unwrap();
        assert!(contents.is_some());
        // A private buffer has none.
        Id(own.0 as *mut _).with(|c| c.value = 2);
        assert_eq!(
            bench.sends(&["MTLBuffer storageMode"], |d| d.buffer_contents(own)).unwrap(),
            None
        );
        assert_eq!(
            bench.sends(&["MTLBuffer gpuAddress"], |d| d.buffer_address(own)).unwrap(),
            0x1000
        );
        assert_eq!(bench.sends(&["MTLBuffer length"], |d| d.buffer_length(own)).unwrap(), 77);
        metal::fail_next();
        assert!(
            bench.driver.buffer_create(bench.device, 9, private).unwrap_err().is_out_of_memory()
        );
        metal::fail_next();
        let desc = HeapDesc { size: 65536, options: private, placement: true };
        assert!(bench.driver.heap_create(bench.device, &desc).unwrap_err().is_out_of_memory());
        take_messages();
        bench.release(&[
            at.into(),
            any.into(),
            own.into(),
            wrapped.into(),
            placed.into(),
            other.into(),
        ]);
    }
    bench.end();
}

#[test]
fn events_sets_and_samples() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let event = bench.driver.shared_event_create(bench.device).unwrap();
        take_messages();
        bench
            .sends(&["MTLSharedEvent setSignaledValue: 5"], |d| d.set_signaled_value(event, 5))
            .unwrap();
        assert_eq!(
            bench.sends(&["MTLSharedEvent signaledValue"], |d| d.signaled_value(event)).unwrap(),
            5
        );
        for (value, reached) in [(5, true), (6, false)] {
            let wait = format!("MTLSharedEvent waitUntilSignaledValue:timeoutMS: {value} 250");
            let waited = bench
                .sends(&[&wait], |d| d.wait_signaled(event, value, Duration::from_millis(250)));
            assert_eq!(waited.unwrap(), reached);
        }
        let told = Arc::new(AtomicU64::new(0));
        let tell = told.clone();
        let notify =
            ["MTLSharedEvent notifyListener:atValue:block: MTLSharedEventListener 8 pointer"];
        let handler: SignaledHandler = Box::new(move |value| tell.store(value, Ordering::Relaxed));
        bench.sends(&notify, |d| d.on_signaled(event, 8, handler)).unwrap();
        metal::run_block(event.0, Some(9));
        assert_eq!(told.load(Ordering::Relaxed), 9);
        // A handler that panics does not unwind into Metal.
        bench.driver.on_signaled(event, 9, Box::new(|_| panic!("as planned"))).unwrap();
        metal::run_block(event.0, Some(9));
        take_messages();
        let fence = bench.sends(&["MTLDevice newFence"], |d| d.fence_create(bench.device)).unwrap();
        let set = bench
            .sends(
                &["MTLResidencySetDescriptor setInitialCapacity: 12", "MTLDevice newResidencySetWithDescriptor:error: MTLResidencySetDescriptor pointer"],
                |d| d.residency_create(bench.device, 12),
            )
            .unwrap();
        metal::fail_next();
        let error = driver_error(bench.driver.residency_create(bench.device, 12));
        assert_eq!(error, ("newResidencySetWithDescriptor", 7, "a stand-in's error".to_owned()));
        let queue = bench.driver.queue_create(bench.device, 1, "q").unwrap();
        let buffer = bench.driver.buffer_create(bench.device, 1, MemoryOptions::default()).unwrap();
        let heap = HeapDesc { size: 1, options: MemoryOptions::default(), placement: true };
        let heap = bench.driver.heap_create(bench.device, &heap).unwrap();
        take_messages();
        for (message, call) in [
            (
                "MTLResidencySet addAllocation: MTLBuffer",
                &(|d: &RealDriver| d.residency_add(set, Allocation::Buffer(buffer)))
                    as &dyn Fn(&RealDriver) -> _,
            ),
            ("MTLResidencySet addAllocation: MTLHeap", &|d| {
                d.residency_add(set, Allocation::Heap(heap))
            }),
            ("MTLResidencySet removeAllocation: MTLHeap", &|d| {
                d.residency_remove(set, Allocation::Heap(heap))
            }),
            ("MTLResidencySet commit", &|d| d.residency_commit(set)),
            ("MTLResidencySet requestResidency", &|d| d.residency_request(set)),
            ("MTLCommandQueue addResidencySet: MTLResidencySet", &|d| d.queue_add_set(queue, set)),
            ("MTLCommandQueue removeResidencySet: MTLResidencySet", &|d| {
                d.queue_remove_set(queue, set)
            }),
            ("MTLResidencySet endResidency", &|d| d.residency_end(set)),
        ] {
            bench.sends(&[message], call).unwrap();
        }
        let samples = bench
            .sends(
                &[
                    "MTLDevice counterSets",
                    "MTLCounterSet name",
                    "MTLDevice supportsCounterSampling: 0",
                    "MTLCounterSampleBufferDescriptor setCounterSet: MTLCounterSet",
                    "MTLCounterSampleBufferDescriptor setStorageMode: 0",
                    "MTLCounterSampleBufferDescriptor setSampleCount: 32",
                    "MTLDevice newCounterSampleBufferWithDescriptor:error: MTLCounterSampleBufferDescriptor pointer",
                ],
                |d| d.samples_create(bench.device, 32),
            )
            .unwrap();
        let resolve = ["MTLCounterSampleBuffer resolveCounterRange: 2+2"];
        assert_eq!(bench.sends(&resolve, |d| d.samples_resolve(samples, 2..4)).unwrap(), [5, 6]);
        metal::fail_next();
        assert_eq!(
            driver_error(bench.driver.samples_create(bench.device, 1)).0,
            "newCounterSampleBufferWithDescriptor"
        );
        take_messages();
        bench.release(&[
            samples.into(),
            set.into(),
            queue.into(),
            buffer.into(),
            heap.into(),
            fence.into(),
            event.into(),
        ]);
    }
    bench.end();
}

#[test]
fn indirect_commands_and_captures() {
    let bench = Bench::new();
    // SAFETY: all handles are live, and used as the methods ask.
    unsafe {
        let d = &bench.driver;
        let queue = d.queue_create(bench.device, 1, "q").unwrap();
        let memory = d.buffer_create(bench.device, 8, MemoryOptions::default()).unwrap();
        let library = d.library_from_source(bench.device, "", &CompileOptions::default()).unwrap();
        let function = d.function(library, "f").unwrap();
        let pipeline = d.pipeline_create(bench.device, function, &PipelineDesc::default()).unwrap();
        take_messages();
        let indirect = bench
            .sends(
                &[
                    // A concurrent dispatch is 1 << 5.
                    "MTLIndirectCommandBufferDescriptor setCommandTypes: 32",
                    "MTLIndirectCommandBufferDescriptor setInheritPipelineState: false",
                    "MTLIndirectCommandBufferDescriptor setInheritBuffers: false",
                    "MTLIndirectCommandBufferDescriptor setMaxKernelBufferBindCount: 31",
                    "MTLDevice newIndirectCommandBufferWithDescriptor:maxCommandCount:options: MTLIndirectCommandBufferDescriptor 16384 256",
                ],
                |d| d.indirect_create(bench.device, 16_384, 31),
            )
            .unwrap();
        for (commands, buffers) in [(0, 1), (16_385, 1), (1, 32)] {
            bench.sends(&[], |d| d.indirect_create(bench.device, commands, buffers)).unwrap_err();
        }
        let command = IndirectCommand {
            pipeline,
            buffers: &[(memory, 4), (memory, 8)],
            dispatch: DISPATCH,
            barrier: true,
        };
        bench
            .sends(
                &[
                    "MTLIndirectCommandBuffer indirectComputeCommandAtIndex: 7",
                    "MTLIndirectComputeCommand reset",
                    "MTLIndirectComputeCommand setComputePipelineState: MTLComputePipelineState",
                    "MTLIndirectComputeCommand setKernelBuffer:offset:atIndex: MTLBuffer 4 0",
                    "MTLIndirectComputeCommand setKernelBuffer:offset:atIndex: MTLBuffer 8 1",
                    "MTLIndirectComputeCommand setBarrier",
                    "MTLIndirectComputeCommand concurrentDispatchThreadgroups:threadsPerThreadgroup: 1x2x3 4x5x6",
                ],
                |d| d.indirect_set(indirect, 7, &command),
            )
            .unwrap();
        bench
            .sends(&["MTLIndirectCommandBuffer resetWithRange: 3+4"], |d| {
                d.indirect_reset(indirect, 3..7)
            })
            .unwrap();
        let scope = bench
            .sends(
                &[
                    "MTLCaptureManager sharedCaptureManager",
                    "MTLCaptureManager newCaptureScopeWithCommandQueue: MTLCommandQueue",
                    "MTLCaptureScope setLabel: \"scope\"",
                ],
                |d| d.scope_create(queue, "scope"),
            )
            .unwrap();
        bench.sends(&["MTLCaptureScope beginScope"], |d| d.scope_begin(scope)).unwrap();
        bench.sends(&["MTLCaptureScope endScope"], |d| d.scope_end(scope)).unwrap();
        bench.release(&[
            scope.into(),
            indirect.into(),
            pipeline.into(),
            function.into(),
            library.into(),
            memory.into(),
            queue.into(),
        ]);
    }
    bench.end();
}

/// The count of references is a real one: an object that is kept, or given back twice, is seen.
#[test]
fn a_lost_reference_and_a_second_release_are_seen() {
    let bench = Bench::new();
    // SAFETY: the second release is the mistake that this test plants; the stand-ins find it.
    unsafe {
        let fence = bench.driver.fence_create(bench.device).unwrap();
        assert_eq!(live().get("MTLFence"), Some(&1));
        bench.driver.release(fence.into());
        assert_eq!(live().get("MTLFence"), None);
        assert_eq!(take_mistakes(), [""; 0]);
        bench.driver.release(fence.into());
        assert_eq!(take_mistakes().len(), 1);
    }
    take_messages();
    bench.end();
}
