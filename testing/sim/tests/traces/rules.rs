//! The simulated driver's own rules: strict checks, faults by call name, leaks.

use leasehold_core::Error;
use leasehold_cuda::driver::ops::{
    ContextOps, CopyKind, CudaSlowOps, DeviceOps, EventFlags, EventOps, GraphOps, HostFlags,
    Launch, MemoryOps, ModuleOps, NativeContext, NativeCopy, NativeFill, Progress, StreamOps,
};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::traces::kernels::{self, Arguments};
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, GRANULARITY, MachineConfig, ReportKind, When,
};

fn driver(devices: u32) -> SimDriver {
    let machine = MachineConfig::seed(3).devices(devices, 64 << 20);
    kernels::register(&machine.kernels);
    let driver = SimDriver::new(SimDriverConfig::new(machine)).unwrap();
    driver.init().unwrap();
    driver
}

/// A driver with the primary context of device 0 current.
fn opened() -> SimDriver {
    let driver = driver(1);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(driver.primary_retain(0).unwrap()) }.unwrap();
    driver
}

fn code(result: leasehold_core::Result<impl std::fmt::Debug>) -> i32 {
    match result {
        Err(Error::Driver { code, .. }) => code,
        other => panic!("no code of the driver's: {other:?}"),
    }
}

#[test]
fn an_objects_context_must_be_current() {
    let driver = driver(2);
    let (here, there) = (driver.primary_retain(0).unwrap(), driver.primary_retain(1).unwrap());
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(here) }.unwrap();
    let (stream, event) =
        (driver.stream_create(0).unwrap(), driver.event_create(EventFlags::default()).unwrap());
    let at = driver.alloc(64).unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(there) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.stream_query(stream) }), 201);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.event_query(event) }), 201);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.stream_destroy(stream) }), 201);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.free(at) }), 1);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(NativeContext::NULL) }.unwrap();
    assert_eq!(code(driver.alloc(64)), 201);
}

#[test]
fn what_is_left_in_a_context_is_a_leak() {
    let driver = opened();
    driver.stream_create(0).unwrap();
    driver.alloc(64).unwrap();
    driver.host_alloc(64, HostFlags::default()).unwrap();
    assert!(driver.take_leaks().is_empty());
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(NativeContext::NULL) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.primary_release(0) }.unwrap();
    assert_eq!(driver.take_leaks(), ["1 streams", "1 allocations", "1 pinned ranges"]);
    assert!(driver.census().is_nothing());
    assert!(driver.machine().memory_in_use().is_nothing());
}

#[test]
fn each_call_can_be_failed_by_its_name() {
    let driver = opened();
    let plan =
        |call: &str, action| FaultPlan::none().with(FaultRule::on(call, When::Always, action));
    driver.machine().set_faults(plan("cuMemAlloc", FaultAction::OutOfMemory));
    assert!(
        matches!(driver.alloc(64), Err(Error::OutOfMemory(report)) if report.requested == 0 && report.site == "cuMemAlloc")
    );
    driver.machine().set_faults(plan("cuStreamCreateWithPriority", FaultAction::Fail(999)));
    assert_eq!(code(driver.stream_create(0)), 999);
    // A call that destroys an object does so even if it reports a failure.
    driver.machine().set_faults(FaultPlan::none());
    let stream = driver.stream_create(0).unwrap();
    driver.machine().set_faults(plan("cuStreamDestroy", FaultAction::Fail(999)));
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.stream_destroy(stream) }), 999);
    assert_eq!(driver.census().streams, 0);
    // A sticky code loses the device, and becomes the first cause.
    driver.machine().set_faults(plan("cuMemAlloc", FaultAction::Fail(700)));
    let Err(Error::DeviceLost { cause }) = driver.alloc(64) else { panic!("not lost") };
    assert!(cause.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"), "{cause}");
    driver.machine().set_faults(FaultPlan::none());
    let Err(Error::DeviceLost { cause: again }) = driver.stream_create(0) else {
        panic!("not lost")
    };
    assert_eq!(cause, again);
}

#[test]
fn a_call_loses_the_device_of_its_context_and_no_other() {
    // SAFETY: the simulated driver looks every handle and address up, and refuses what it does not
    // know.
    let enter = |driver: &SimDriver, context| unsafe { driver.set_current(context) };
    for call in ["cuCtxGetCurrent", "cuCtxSetCurrent", "cuCtxDestroy"] {
        let driver = driver(2);
        let (here, there) = (driver.primary_retain(0).unwrap(), driver.context_create(1).unwrap());
        enter(&driver, if call == "cuCtxGetCurrent" { there } else { here }).unwrap();
        let lose = FaultRule::on(call, When::Always, FaultAction::DeviceLost);
        driver.machine().set_faults(FaultPlan::none().with(lose));
        match call {
            "cuCtxGetCurrent" => assert_eq!(driver.current().unwrap(), there),
            "cuCtxSetCurrent" => enter(&driver, there).unwrap(),
            // SAFETY: the simulated driver looks every handle and address up, and refuses what it
            // does not know.
            _ => unsafe { driver.context_destroy(there) }.unwrap(),
        }
        assert_eq!(
            [0, 1].map(|d| driver.machine().device_status(d).is_ok()),
            [true, false],
            "{call}"
        );
    }
}

#[test]
fn a_call_that_concerns_a_lost_device_tells_of_no_loss_of_its_own() {
    let driver = driver(2);
    let there = driver.primary_retain(1).unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses what it does not
    // know.
    unsafe { driver.set_current(there) }.unwrap();
    let (at, piece) = (
        driver.address_reserve(GRANULARITY, 0).unwrap(),
        driver.memory_create(1, GRANULARITY).unwrap(),
    );
    // SAFETY: the simulated driver looks every handle and address up, and refuses what it does not
    // know.
    unsafe { driver.map(at, GRANULARITY, piece) }.unwrap();
    driver.machine().lose_device(0, "gone");
    // SAFETY: the simulated driver looks every handle and address up, and refuses what it does not
    // know.
    let admit = |who: &[u32]| unsafe { driver.set_access(at, GRANULARITY, who) };
    assert_eq!(code(admit(&[1, 0])), 719);
    admit(&[1]).unwrap();
    driver.memory_info().unwrap();
}

#[test]
fn the_argument_buffer_must_agree_with_the_bindings() {
    let driver = opened();
    let module = driver.module_load(kernels::PTX.as_bytes()).unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    let store = unsafe { driver.module_function(module, "trace_store", &[]) }.unwrap();
    let (stream, at) = (driver.stream_create(0).unwrap(), driver.alloc(64).unwrap());
    let arguments = Arguments::store(at, 1, 2, 3);
    let good = arguments.launch(store, 1, 1);
    let mut wrong = good.args.to_vec();
    wrong[0] ^= 8;
    // SAFETY: the driver refuses the launch before anything runs.
    let refused = unsafe { driver.launch(stream, &Launch { args: &wrong, ..good }) };
    assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    let long: Vec<u8> = good.args.iter().copied().chain([0; 4]).collect();
    for (args, refusal) in [(&good.args[..good.args.len() - 1], 1), (&long, 701)] {
        // SAFETY: the driver refuses the launch before anything runs.
        assert_eq!(code(unsafe { driver.launch(stream, &Launch { args, ..good }) }), refusal);
    }
    // SAFETY: the memory lives.
    unsafe { driver.launch(stream, &good).unwrap() };
}

#[test]
fn races_are_reported_with_words_and_events_as_edges() {
    let driver = opened();
    let (a, b) = (driver.stream_create(0).unwrap(), driver.stream_create(0).unwrap());
    let event = driver.event_create(EventFlags::default()).unwrap();
    let at = driver.alloc(64).unwrap();
    let fill = |value| NativeFill { dst: at, value, width: 4, count: 4 };
    // SAFETY: the memory lives.
    unsafe { driver.fill(a, &fill(1)).unwrap() };
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.event_record(event, a) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.stream_wait_event(b, event) }.unwrap();
    // SAFETY: the memory lives.
    unsafe { driver.fill(b, &fill(2)).unwrap() };
    driver.context_synchronize().unwrap();
    assert!(driver.machine().take_reports().is_empty());
    // SAFETY: the memory lives.
    unsafe { driver.fill(a, &fill(3)).unwrap() };
    // SAFETY: the memory lives.
    unsafe { driver.fill(b, &fill(4)).unwrap() };
    driver.context_synchronize().unwrap();
    let reports = driver.machine().take_reports();
    assert_eq!(reports.len(), 1, "{reports:?}");
    assert_eq!(reports[0].kind, ReportKind::Unordered);
}

#[test]
fn a_completion_word_lets_the_host_know() {
    let driver = opened();
    let stream = driver.stream_create(0).unwrap();
    let (word, data) =
        (driver.host_alloc(64, HostFlags::default()).unwrap(), driver.alloc(64).unwrap());
    // SAFETY: the memory lives.
    unsafe {
        driver.fill(stream, &NativeFill { dst: data, value: 1, width: 4, count: 16 }).unwrap()
    };
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.stream_write_word(stream, word, 5) }.unwrap();
    // SAFETY: a word of pinned memory.
    while unsafe { driver.load_word(word) } < 5 {}
    // The host knows now that the fill is over, so the free is no use after free.
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.free(data) }.unwrap();
    assert!(driver.machine().take_reports().is_empty());
    assert_eq!(driver.poll_interval(), std::time::Duration::ZERO);
}

#[test]
fn pageable_uploads_take_their_bytes_along() {
    let driver = opened();
    let stream = driver.stream_create(0).unwrap();
    let (device, words) =
        (driver.alloc(1 << 20).unwrap(), driver.host_alloc(4096, HostFlags::default()).unwrap());
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.stream_wait_word(stream, words, 1) }.unwrap();
    let mut source = vec![7_u8; 1 << 20];
    let up = NativeCopy::linear(CopyKind::HostToDevice, device, source.as_ptr() as u64, 1 << 20);
    // SAFETY: the command holds a copy of the bytes.
    unsafe { driver.copy(stream, &up).unwrap() };
    source.fill(0);
    drop(source);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(unsafe { driver.stream_query(stream) }.unwrap(), Progress::Pending);
    // SAFETY: a word of pinned memory.
    unsafe { driver.store_word(words, 1) };
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.stream_synchronize(stream) }.unwrap();
    let mut seen = vec![0_u8; 1 << 20];
    // SAFETY: the call only reads memory, while nothing runs.
    unsafe { driver.machine().drive() }.peek(device, &mut seen).unwrap();
    assert!(seen.iter().all(|&b| b == 7));
    assert!(driver.machine().take_reports().is_empty());
}

#[test]
fn what_a_driver_lacks_is_not_supported() {
    let mut config = SimDriverConfig::default();
    (config.vmm, config.memory_pools, config.stream_words, config.peers) =
        (false, false, false, false);
    let driver = SimDriver::new(config).unwrap();
    driver.init().unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.set_current(driver.primary_retain(0).unwrap()) }.unwrap();
    let stream = driver.stream_create(0).unwrap();
    let word = driver.host_alloc(8, HostFlags::default()).unwrap();
    assert_eq!(code(driver.granularity(0)), 801);
    assert_eq!(code(driver.address_reserve(2 << 20, 0)), 801);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.alloc_async(64, stream) }), 801);
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert_eq!(code(unsafe { driver.stream_write_word(stream, word, 1) }), 801);
    let properties = driver.device_properties(0).unwrap();
    assert!(!properties.vmm && !properties.memory_pools && !properties.stream_words);
}

#[test]
fn compiled_names_need_registered_code() {
    let driver = opened();
    let source = "extern \"C\" __global__ void trace_nothing(int* a, int* b, int* c) {} __global__ void unknown() {}";
    let ptx = driver.compile(source, "k.cu", &[], (9, 0)).unwrap();
    let module = driver.module_load(&ptx).unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert!(unsafe { driver.module_function(module, "trace_nothing", &[]) }.is_ok());
    for missing in ["unknown", "nowhere"] {
        // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
        let found = unsafe { driver.module_function(module, missing, &[]) };
        assert!(matches!(&found, Err(Error::NotFound(why)) if why.contains(missing)), "{found:?}");
    }
    assert!(matches!(driver.compile("int x;", "k.cu", &[], (9, 0)), Err(Error::Compile { .. })));
}

#[test]
fn a_host_function_of_a_lost_device_is_never_called() {
    let driver = opened();
    let (stream, graph) = (driver.stream_create(0).unwrap(), driver.graph_create().unwrap());
    let called = std::sync::Arc::new(());
    let inside = called.clone();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.host_function(stream, Box::new(move || panic!("called with {inside:?}"))) }
        .unwrap();
    driver.machine().lose_device(0, "for the test");
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert!(matches!(unsafe { driver.stream_synchronize(stream) }, Err(Error::DeviceLost { .. })));
    // The driver dropped the function without a call, and freed what it held.
    assert_eq!(std::sync::Arc::strong_count(&called), 1);
    // A call that destroys an object does so on a lost device too. Graphs belong to the driver
    // alone, so their calls do not report the loss.
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    unsafe { driver.graph_destroy(graph) }.unwrap();
    // SAFETY: the simulated driver looks every handle and address up, and refuses unknown ones.
    assert!(matches!(unsafe { driver.stream_destroy(stream) }, Err(Error::DeviceLost { .. })));
    assert_eq!((driver.census().graphs, driver.census().streams), (0, 0));
}
