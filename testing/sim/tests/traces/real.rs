//! The real driver's bindings over an imitation of the vendor's library (`stub_driver.rs`):
//! loading, missing functions, arguments and answers. The test compiles the library. Each case runs
//! in a process of its own, whose loader finds the library first.

use leasehold_core::Error;
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU32, Ordering};
use leasehold_cuda::driver::ops::{
    ContextOps, CopyKind, CudaSlowOps, DeviceOps, EventOps, GraphExecUpdate, GraphOps, Launch,
    MemoryOps, ModuleOps, NativeCondition, NativeContext, NativeCopy, NativeEvent, NativeFunction,
    NativeGraph, NativeGraphExec, NativeNode, NativePartition, NativeStream, Progress, StreamOps,
};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_hal::{ConditionalKind, KernelCheck, KernelDesc, KernelSource, Pipeline};
use leasehold_input::CompileCache;
use leasehold_sim::traces::kernels::Arguments;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::sync::Arc;

/// The variable that names the case in a process that was started for it.
const CASE: &str = "LEASEHOLD_TEST_REAL_DRIVER_CASE";

/// A case: its name, the missing part of the library, the environment, and the check.
type Case = (&'static str, Option<&'static str>, &'static [(&'static str, &'static str)], fn());

const CASES: &[Case] = &[
    ("starts", None, &[], starts),
    ("too old", None, &[("STUB_VERSION", "11080")], || unavailable(&["11.8", "12.0"])),
    ("no device", None, &[("STUB_INIT", "100")], || {
        unavailable(&["CUDA_ERROR_NO_DEVICE (100)", "no device"])
    }),
    ("unknown failure", None, &[("STUB_INIT", "999")], || {
        unavailable(&["CUDA_ERROR_UNKNOWN (999)"])
    }),
    ("a new failure", None, &[("STUB_INIT", "1234")], || {
        unavailable(&["CUDA_ERROR_FROM_TOMORROW (1234)"])
    }),
    ("a function is missing", Some("without_symbols"), &[], || unavailable(&["cuMemAlloc_v2"])),
    ("newer functions are missing", Some("without_optional"), &[], older),
    ("conditions", None, &[], conditions),
    ("errors", None, &[], errors),
    ("a lost context", None, &[], lost),
    ("arguments", None, &[], arguments),
    ("copies in graphs", None, &[], copies_in_graphs),
    ("host functions", None, &[], host_functions),
    ("modules", None, &[], modules),
    ("two thousand million devices", None, &[("STUB_COUNT", "2147483647")], || {
        nothing_to_use(&["2147483647 devices"])
    }),
    ("less than no devices", None, &[("STUB_COUNT", "-1")], less_than_nothing),
    ("an absurd capability", None, &[("STUB_ATTRIBUTE", "2147483647")], || {
        nothing_to_use(&["compute capability"])
    }),
    ("success with nothing", None, &[("STUB_MADE", "0")], || made_nothing(true)),
    ("success with an address that cannot be", None, &[("STUB_MADE", "1")], || made_nothing(false)),
];

/// Damages of a library's file, and the message for each.
type Damage = (&'static str, fn(Vec<u8>) -> Vec<u8>, &'static str);

const DAMAGES: &[Damage] = &[
    ("empty", |_| Vec::new(), "file too short"),
    (
        "text",
        |_| b"not a library at all, but a text that is longer than an ELF header".repeat(2),
        "invalid ELF header",
    ),
    ("another class", |bytes| at(bytes, 4, 1), "ELFCLASS32"),
    (
        "without what it needs",
        |bytes| replaced(bytes, b"libgcc_s.so.1", b"libgone.so.99"),
        "libgone.so.99",
    ),
];

fn at(mut bytes: Vec<u8>, index: usize, value: u8) -> Vec<u8> {
    bytes[index] = value;
    bytes
}

fn replaced(mut bytes: Vec<u8>, from: &[u8], to: &[u8]) -> Vec<u8> {
    assert_eq!(from.len(), to.len());
    let found =
        bytes.windows(from.len()).position(|part| part == from).expect("the library needs it");
    bytes[found..found + to.len()].copy_from_slice(to);
    bytes
}

fn compile(directory: &Path, cfg: Option<&str>) {
    let source = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/traces/stub_driver.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut command = Command::new(compiler);
    command.args([
        "--edition",
        "2024",
        "--crate-type",
        "cdylib",
        "--crate-name",
        "cuda",
        "-A",
        "unexpected_cfgs",
    ]);
    if let Some(cfg) = cfg {
        command.args(["--cfg", cfg]);
    }
    let status =
        command.arg(source).arg("-o").arg(directory.join("libcuda.so.1")).status().unwrap();
    assert!(status.success(), "the library does not compile");
}

#[test]
fn the_real_driver_over_a_library_of_our_own() {
    if let Ok(name) = std::env::var(CASE) {
        let case = CASES.iter().find(|case| case.0 == name).unwrap();
        return case.3();
    }
    let me = std::env::current_exe().unwrap();
    let directories: Vec<_> = [None, Some("without_symbols"), Some("without_optional")]
        .map(|cfg| {
            let directory = tempfile::tempdir().unwrap();
            compile(directory.path(), cfg);
            (cfg, directory)
        })
        .into_iter()
        .collect();
    for (name, cfg, environment, _) in CASES {
        let (_, directory) = directories.iter().find(|d| d.0 == *cfg).unwrap();
        let output = Command::new(&me)
            .args(["the_real_driver_over_a_library_of_our_own", "--nocapture"])
            .env("LD_LIBRARY_PATH", directory.path())
            .env(CASE, name)
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
    }
    let whole = std::fs::read(directories[0].1.path().join("libcuda.so.1")).unwrap();
    for (name, damage, told) in DAMAGES {
        let directory = tempfile::tempdir().unwrap();
        std::fs::write(directory.path().join("libcuda.so.1"), damage(whole.clone())).unwrap();
        let output = Command::new(&me)
            .args(["a_library_that_cannot_be_loaded", "--nocapture"])
            .env("LD_LIBRARY_PATH", directory.path())
            .env(CASE, told)
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
    }
}

/// The test above runs this test in processes that find a damaged library. Otherwise this test
/// checks nothing.
#[test]
fn a_library_that_cannot_be_loaded_is_not_called_missing() {
    if let Ok(told) = std::env::var(CASE) {
        unavailable(&["is there and cannot be loaded", &told]);
    }
}

/// The backend reports the driver's defect, and ends.
fn nothing_to_use(parts: &[&str]) {
    use leasehold_hal::Backend;
    let backend = leasehold_cuda::CudaBackend::new();
    let Err(Error::Unavailable(why)) = backend.devices() else { panic!("not unavailable") };
    assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    assert!(backend.open(leasehold_hal::DeviceId::cuda(0)).is_err());
}

fn less_than_nothing() {
    let driver = started();
    let Err(Error::Driver { api: "cuDeviceGetCount", code: 0, .. }) = driver.device_count() else {
        panic!()
    };
}

/// The library answers "success" with a null object, or with an address that is never mapped.
fn made_nothing(null: bool) {
    let driver = started();
    let refused = |result: leasehold_core::Result<()>| match result {
        Err(Error::Driver { code: 0, name, .. }) => {
            assert!(name.contains("CUDA_SUCCESS, but"), "{name}")
        }
        other => panic!("believed: {other:?}"),
    };
    refused(driver.alloc(4096).map(drop));
    // SAFETY: the library under test uses no handle that it gets.
    refused(unsafe { driver.alloc_async(4096, STREAM) }.map(drop));
    refused(driver.address_reserve(2 << 20, 2 << 20).map(drop));
    refused(driver.host_alloc(4096, leasehold_cuda::driver::ops::HostFlags::default()).map(drop));
    refused(driver.granularity(0).map(drop));
    if null {
        refused(driver.primary_retain(0).map(drop));
        refused(driver.context_create(0).map(drop));
        refused(driver.stream_create(0).map(drop));
        refused(driver.event_create(leasehold_cuda::driver::ops::EventFlags::default()).map(drop));
        refused(driver.graph_create().map(drop));
        // SAFETY: the library under test uses no handle that it gets.
        refused(unsafe { driver.graph_instantiate(NativeGraph(1)) }.map(drop));
        // SAFETY: the library under test uses no handle that it gets.
        refused(unsafe { driver.graph_add_empty(NativeGraph(1), &[]) }.map(drop));
        let module = driver.module_load(b".version 8.0").unwrap();
        // SAFETY: the library under test uses no handle that it gets.
        refused(unsafe { driver.module_function(module, "f", &[]) }.map(drop));
    }
}

fn unavailable(parts: &[&str]) {
    let driver = RealDriver::with_cache(CompileCache::off());
    let Err(Error::Unavailable(why)) = driver.init() else { panic!("not unavailable") };
    assert!(parts.iter().all(|part| why.contains(part)), "{why}");
    // The driver is still not started.
    assert!(matches!(driver.device_count(), Err(Error::InvalidState(_))));
}

fn started() -> RealDriver {
    let driver = RealDriver::with_cache(CompileCache::off());
    driver.init().unwrap();
    driver
}

const STREAM: NativeStream = NativeStream(8);

fn starts() {
    let driver = started();
    driver.init().unwrap();
    assert_eq!(driver.driver_version().unwrap(), 13000);
    assert_eq!(driver.device_count().unwrap(), 2);
    let properties = driver.device_properties(1).unwrap();
    // Each attribute's value is its own number.
    assert_eq!(properties.compute_capability, (75, 76));
    assert_eq!((properties.block_threads, properties.warp, properties.shared_optin), (1, 10, 97));
    assert_eq!(properties.numa_node, None);
    assert!(matches!(
        driver.device_properties(2),
        Err(Error::Driver { code: 101, api: "cuDeviceGet", .. })
    ));
    // The code 704 is no error.
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.enable_peer(NativeContext(1)) }.unwrap();
    // SAFETY: the library under test uses no handle that it gets.
    assert_eq!(unsafe { driver.stream_query(STREAM) }.unwrap(), Progress::Pending);
    // SAFETY: the library under test uses no handle that it gets.
    assert_eq!(unsafe { driver.event_query(NativeEvent(1)) }.unwrap(), Progress::Pending);
    assert!(matches!(
        // SAFETY: the library under test uses no handle that it gets.
        unsafe { driver.event_elapsed(NativeEvent(1), NativeEvent(2)) },
        Err(Error::InvalidState(_))
    ));
    assert!(!driver.context_create(0).unwrap().is_null());
}

fn older() {
    let driver = started();
    assert!(!driver.context_create(0).unwrap().is_null());
    // SAFETY: the library under test uses no handle that it gets.
    assert_eq!(unsafe { driver.function_info(NativeFunction(1)) }.unwrap().params, None);
    // SAFETY: the library under test uses no handle that it gets.
    let elapsed = unsafe { driver.event_elapsed(NativeEvent(1), NativeEvent(2)) };
    assert!(matches!(elapsed, Err(Error::Driver { code: 400, .. })), "{elapsed:?}");
    let module = driver.module_load(b".version 8.0").unwrap();
    // SAFETY: the library under test uses no handle that it gets.
    assert!(unsafe { driver.module_function(module, "f", &[]) }.is_ok());
    assert!(!driver.device_properties(0).unwrap().conditional_nodes);
    // SAFETY: the library under test uses no handle that it gets.
    let refused = unsafe { driver.condition_create(NativeGraph(1)) };
    assert!(
        matches!(&refused, Err(Error::Unsupported(why)) if why.contains("12.4")),
        "{refused:?}"
    );
    let (graph, kind) = (NativeGraph(1), ConditionalKind::While);
    // SAFETY: the library under test uses no handle that it gets.
    let refused = unsafe { driver.graph_add_conditional(graph, &[], NativeCondition(1), kind) };
    assert!(matches!(refused, Err(Error::Unsupported(_))), "{refused:?}");
}

/// The parameters of a conditional node are what the driver's header says, and its answer is the
/// body's place.
fn conditions() {
    let driver = started();
    assert!(driver.device_properties(0).unwrap().conditional_nodes);
    // SAFETY: the library under test uses no handle that it gets.
    let condition = unsafe { driver.condition_create(NativeGraph(7)) }.unwrap();
    assert_eq!(condition, NativeCondition(0x700));
    for (kind, body) in [(ConditionalKind::If, 0x5000), (ConditionalKind::While, 0x5001)] {
        let (graph, after) = (NativeGraph(7), [NativeNode(1), NativeNode(2)]);
        // SAFETY: the library under test uses no handle that it gets.
        let made = unsafe { driver.graph_add_conditional(graph, &after, condition, kind) };
        assert_eq!(made.unwrap(), (NativeNode(0x20000), NativeGraph(body)));
    }
    // SAFETY: the library under test uses no handle that it gets.
    let made = unsafe {
        driver.graph_add_conditional(NativeGraph(7), &[], NativeCondition(2), ConditionalKind::If)
    };
    assert!(matches!(made, Err(Error::Driver { code: 1, .. })), "{made:?}");
}

fn errors() {
    let driver = started();
    let Err(Error::Driver { api, code, name }) = driver.alloc(0) else { panic!() };
    let words = "CUDA_ERROR_INVALID_VALUE: Requested 0 byte allocation";
    assert_eq!((api, code, &*name), ("cuMemAlloc", 1, words));
    let Err(Error::OutOfMemory(report)) = driver.alloc(1 << 41) else { panic!() };
    assert_eq!((report.requested, &*report.site), (1 << 41, "cuMemAlloc"));
    // The driver may have a name for a code that this crate does not know.
    let Err(Error::Driver { code: 1234, name, .. }) = driver.alloc(77) else { panic!() };
    assert_eq!(&*name, "CUDA_ERROR_FROM_TOMORROW");
    let Err(Error::Driver { code: 4321, name, .. }) = driver.alloc(78) else { panic!() };
    assert_eq!(&*name, "CUDA_ERROR_4321");
    assert_eq!(driver.alloc(64).unwrap(), 0x20000);
}

fn lost() {
    let driver = started();
    let (here, there) = (driver.primary_retain(0).unwrap(), driver.primary_retain(1).unwrap());
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.set_current(here) }.unwrap();
    let cause = |result: leasehold_core::Result<()>| match result {
        Err(Error::DeviceLost { cause }) => cause,
        other => panic!("not lost: {other:?}"),
    };
    // SAFETY: the library under test uses no handle that it gets.
    let first = cause(unsafe { driver.stream_synchronize(NativeStream(0xdead)) });
    assert!(
        first.contains("cuStreamSynchronize") && first.contains("CUDA_ERROR_ILLEGAL_ADDRESS (700)"),
        "{first}"
    );
    // The driver returns 719 from now on, but the error holds the first cause.
    assert_eq!(first, cause(driver.alloc(64).map(drop)));
    assert_eq!(first, cause(driver.stream_create(0).map(drop)));
    // Another context is not affected.
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.set_current(there) }.unwrap();
    assert!(driver.alloc(64).is_ok());
    assert!(matches!(driver.alloc(0), Err(Error::Driver { code: 1, .. })));
    // A call there may report the other context's loss. This context is not lost by that.
    assert!(matches!(driver.alloc(79), Err(Error::Driver { code: 700, .. })));
    assert!(matches!(driver.alloc(1 << 41), Err(Error::OutOfMemory(_))));
    // As on an H200, a call without a current context reports the loss too. A call that fails there
    // for another reason reports that reason.
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.set_current(NativeContext::NULL) }.unwrap();
    assert!(cause(driver.alloc(79).map(drop)).contains("(700)"));
    assert!(matches!(driver.alloc(0), Err(Error::Driver { code: 1, .. })));
    // The context is released and no longer active, so a new one has no cause.
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.set_current(here) }.unwrap();
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.primary_release(0) }.unwrap();
    driver.primary_retain(0).unwrap();
    let second = cause(driver.stream_create(0).map(drop));
    assert!(second.contains("(719)"), "{second}");
}

fn arguments() {
    let driver = started();
    let arguments = Arguments::store(0x20000, 7, 3, 2);
    let launch = arguments.launch(NativeFunction(1), 2, 3);
    let read = |bytes: usize| {
        let mut seen = vec![0_u8; bytes];
        let down = NativeCopy::linear(
            CopyKind::DeviceToHost,
            seen.as_mut_ptr() as u64,
            0x20000,
            bytes as u64,
        );
        // SAFETY: the library copies the bytes that it kept.
        unsafe { driver.copy(STREAM, &down).unwrap() };
        seen
    };
    // SAFETY: the library runs no work.
    unsafe { driver.launch(STREAM, &launch).unwrap() };
    assert_eq!(read(launch.args.len()), launch.args);
    let set = |node: u64, launch: &Launch<'_>| {
        let (exec, node) = (NativeGraphExec(1), NativeNode(node));
        // SAFETY: the library runs no work.
        unsafe { driver.exec_set_kernel(exec, node, launch, NativePartition::NULL).unwrap() }
    };
    assert_eq!(set(1, &launch), GraphExecUpdate::InPlace);
    assert_eq!(read(launch.args.len()), launch.args);
    // A cooperative kernel's arguments are a list, of the parameters that the driver reports.
    let check = KernelCheck::new(|_| Ok(()));
    let desc = KernelDesc::new("k", KernelSource::Registered("k".into()), &[], check);
    let kernel = Pipeline::new(&desc.cooperative(), 1, 1);
    assert_eq!(set(1, &Launch { attributes: Some(&kernel), ..launch }), GraphExecUpdate::InPlace);
    assert_eq!(read(12), launch.args[..12]);
    assert_eq!(set(0xbad, &launch), GraphExecUpdate::Refused);
    // Without arguments the launch describes no buffer.
    let none = Arguments::new(&[], &[]);
    // SAFETY: the library runs no work.
    unsafe { driver.launch(STREAM, &none.launch(NativeFunction(1), 1, 1)).unwrap() };
    assert!(read(0).is_empty());
}

/// An H200 refused a node that copies one row of 100 bytes with pitches of 7. Streams take such a
/// copy.
fn copies_in_graphs() {
    let driver = started();
    let kind = CopyKind::DeviceToDevice;
    let rows =
        NativeCopy { src: 3, src_pitch: 64, dst: 4096, dst_pitch: 13, width: 13, rows: 20, kind };
    let one = NativeCopy { src_pitch: 7, dst_pitch: 7, width: 100, rows: 1, ..rows };
    let (graph, exec, node) = (NativeGraph(1), NativeGraphExec(1), NativeNode(1));
    for copy in [rows, one, NativeCopy::linear(kind, 4096, 0, 8)] {
        // SAFETY: the library runs no work.
        unsafe {
            driver.graph_add_copy(graph, &[], &copy).unwrap();
            assert_eq!(driver.exec_set_copy(exec, node, &copy).unwrap(), GraphExecUpdate::InPlace);
        }
    }
    // Rows that overlap are still an error.
    let narrow = NativeCopy { dst_pitch: 12, ..rows };
    // SAFETY: the library runs no work.
    let refused = unsafe { driver.graph_add_copy(graph, &[], &narrow) };
    assert!(matches!(refused, Err(Error::Driver { code: 1, .. })), "{refused:?}");
}

fn host_functions() {
    let driver = started();
    let (held, order) = (Arc::new(()), Arc::new(Mutex::new(Vec::new())));
    let (inside, log) = (held.clone(), order.clone());
    // SAFETY: the library under test uses no handle that it gets.
    unsafe {
        driver.host_function(STREAM, Box::new(move || log.lock().push(Arc::strong_count(&inside))))
    }
    .unwrap();
    assert_eq!(*order.lock(), [2]);
    assert_eq!(Arc::strong_count(&held), 1);
    // The driver refuses the function, so the caller drops it.
    let inside = held.clone();
    // SAFETY: the library under test uses no handle that it gets.
    let refused =
        unsafe { driver.host_function(NativeStream::NULL, Box::new(move || drop(inside))) };
    assert!(matches!(refused, Err(Error::Driver { code: 400, .. })));
    assert_eq!(Arc::strong_count(&held), 1);
    // SAFETY: the library under test uses no handle that it gets.
    unsafe {
        driver.host_function(STREAM, Box::new(|| panic!("this panic stops at the driver's border")))
    }
    .unwrap();
    // A node's function runs at each launch, and is dropped with the executable.
    let (runs, inside) = (Arc::new(AtomicU32::new(0)), held.clone());
    let count = runs.clone();
    let call = move || {
        count.fetch_add(Arc::strong_count(&inside) as u32, Ordering::Relaxed);
    };
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.graph_add_host(NativeGraph(1), &[], Arc::new(call)) }.unwrap();
    for _ in 0..3 {
        // SAFETY: only the host node runs.
        unsafe { driver.exec_launch(NativeGraphExec(1), STREAM).unwrap() };
    }
    assert_eq!(runs.load(Ordering::Relaxed), 6);
    // SAFETY: the library under test uses no handle that it gets.
    unsafe { driver.exec_destroy(NativeGraphExec(1)) }.unwrap();
    assert_eq!(Arc::strong_count(&held), 1);
}

fn modules() {
    let driver = started();
    let Err(Error::Compile { log }) = driver.module_load(b"what") else { panic!() };
    assert_eq!(&*log, "CUDA_ERROR_INVALID_PTX (218): line 1: what is this?");
    assert!(matches!(driver.module_load(b""), Err(Error::Compile { .. })));
    // The driver object adds the missing zero at the end of a text.
    let module = driver.module_load(b".version 8.0").unwrap();
    // SAFETY: the library under test uses no handle that it gets.
    let function = unsafe { driver.module_function(module, "f", &[]) }.unwrap();
    // SAFETY: the library under test uses no handle that it gets.
    let cut = unsafe { driver.module_function(module, "a\0b", &[]) };
    assert!(matches!(cut, Err(Error::NotFound(_))));
    // SAFETY: the library under test uses no handle that it gets.
    let info = unsafe { driver.function_info(function) }.unwrap();
    assert_eq!((info.block_threads, info.registers, info.binary), (100, 104, 106));
    assert_eq!(info.params, Some(vec![(0, 8), (8, 4)]));
    let _: &dyn CudaSlowOps = &driver;
}
