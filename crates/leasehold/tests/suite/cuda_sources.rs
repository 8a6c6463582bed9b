//! Kernels in CUDA C++ on simulated CUDA: the emulator compiles and runs their sources.

use leasehold::Growing;
use leasehold::cuda::CudaConfig;
use leasehold::kernel::{Grid, KernelCheck, KernelDesc, KernelSource};
use leasehold::prelude::*;
use leasehold::{Access, Context, Error};
use leasehold_cuda::CudaBackend;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};
use std::sync::Arc;

/// Simulated CUDA with its driver.
fn simulated(registry: KernelRegistry, reverse: bool) -> (Runtime, Arc<SimDriver>) {
    let mut config = SimDriverConfig::new(MachineConfig::seed(5).kernels(registry));
    config.reverse = reverse;
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let cuda = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(cuda)]);
    (context.runtime(DeviceId::cuda(0)).unwrap(), driver)
}

/// A kernel of a source, for tests that launch it as its source allows.
fn kernel(entry: &'static str, source: &'static str, access: &[Access], params: u32) -> KernelBase {
    kernel_of(
        entry,
        KernelSource::CudaC { source: source.into(), options: vec![].into() },
        access,
        params,
    )
}

fn kernel_of(
    entry: &'static str,
    source: KernelSource<'static>,
    access: &[Access],
    params: u32,
) -> KernelBase {
    let mut desc = KernelDesc::new(entry, source, access, KernelCheck::any());
    desc.params = params;
    // SAFETY: the tests' launches stay within their bindings, or are refused by the emulator.
    unsafe { KernelBase::new(desc) }.unwrap()
}

/// Makes a kernel ready. `false` without g++.
fn ready(kernel: &KernelBase, runtime: &Runtime) -> bool {
    match kernel.prepare(runtime) {
        Err(Error::Unavailable(why))
            if std::env::var_os("LEASEHOLD_NO_EMULATION").is_some()
                || std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none() =>
        {
            assert!(
                why.contains("install g++") && why.contains("register functions named"),
                "{why}"
            );
            eprintln!("skipped: {why}");
            false
        }
        ready => {
            ready.unwrap();
            true
        }
    }
}

const AXPY: &str =
    "extern \"C\" __global__ void axpy(float* y, const float* x, float a, unsigned n) {
    unsigned i = blockIdx.x * blockDim.x + threadIdx.x;
    if (i < n) y[i] = fmaf(a, x[i], y[i]);
}";

#[test]
fn a_source_runs_eagerly_and_in_a_graph() {
    for reverse in [false, true] {
        let (runtime, driver) = simulated(KernelRegistry::new(), reverse);
        let axpy = kernel("axpy", AXPY, &[Access::ReadWrite, Access::Read], 8);
        if !ready(&axpy, &runtime) {
            return;
        }
        let x = runtime.upload(&[1.0_f32; 1000]).unwrap();
        let y = runtime.upload(&[3.0_f32; 1000]).unwrap();
        let params = [2.0_f32.to_bits(), 1000];
        let grid = Grid::from((8, 128));
        let launch =
            |stream: &Stream| stream.launch(&axpy, &[y.read_write(), x.read()], &params, grid);
        // The runtime derives the order between the streams from the accesses.
        let other = runtime.create_stream().unwrap();
        launch(runtime.stream()).unwrap();
        launch(&other).unwrap();
        let graph = runtime.record_graph(|recording| launch(recording.stream())).unwrap();
        graph.launch().unwrap();
        graph.launch().unwrap();
        assert_eq!(runtime.to_vec(&y).unwrap(), [11.0; 1000]);
        assert!(driver.machine().take_reports().is_empty());
    }
}

#[test]
fn an_access_outside_of_a_binding_loses_the_device_with_its_line() {
    let (runtime, _driver) = simulated(KernelRegistry::new(), false);
    let axpy = kernel("axpy", AXPY, &[Access::ReadWrite, Access::Read], 8);
    if !ready(&axpy, &runtime) {
        return;
    }
    let x = runtime.upload(&[1.0_f32; 100]).unwrap();
    let y = runtime.upload(&[1.0_f32; 128]).unwrap();
    let params = [1.0_f32.to_bits(), 101];
    runtime.stream().launch(&axpy, &[y.read_write(), x.read()], &params, (1, 128)).unwrap();
    let why = runtime.to_vec(&y).unwrap_err().to_string();
    assert!(
        why.contains("axpy:3: illegal address: it reads 4 bytes")
            && why.contains(
                "0 bytes behind the end of binding 1, which has 400 bytes (thread 100,0,0"
            )
            && why.contains("CUDA_ERROR_ILLEGAL_ADDRESS"),
        "{why}"
    );
}

#[test]
fn a_declaration_that_differs_from_the_source_is_refused() {
    let (runtime, _driver) = simulated(KernelRegistry::new(), false);
    let fine = kernel("axpy", AXPY, &[Access::ReadWrite, Access::Read], 8);
    if !ready(&fine, &runtime) {
        return;
    }
    for (access, params) in [(&[Access::Read; 3][..], 8), (&[Access::Read; 2], 16)] {
        // A runtime of its own, because a kernel has one declaration there.
        let (runtime, _driver) = simulated(KernelRegistry::new(), false);
        let why = kernel("axpy", AXPY, access, params).prepare(&runtime).unwrap_err();
        assert!(matches!(why, Error::InvalidArgument(_)), "{why}");
    }
    // Eight bytes of parameters may be an address for a device; here they are none.
    let (other, _driver) = simulated(KernelRegistry::new(), false);
    let x = other.zeros::<f32>(1).unwrap();
    let one = kernel("axpy", AXPY, &[Access::ReadWrite], 16);
    let why = other.stream().launch(&one, &[x.read_write()], &[0_u64, 1 << 32], 1).unwrap_err();
    assert!(why.to_string().contains("a launch with 1 bindings, the function takes 2"), "{why}");
    let late = "extern \"C\" __global__ void late(int n, float* x) { x[0] = n; }";
    let why = kernel("late", late, &[Access::Write], 4).prepare(&runtime).unwrap_err();
    assert!(why.to_string().contains("parameter 1 is a pointer behind another parameter"), "{why}");
    let why = kernel("other", AXPY, &[Access::Write], 4).prepare(&runtime).unwrap_err();
    assert!(matches!(why, Error::NotFound(_)), "{why}");
    let why = kernel("f", "\n__global__ void f() { g(); }", &[], 0).prepare(&runtime).unwrap_err();
    assert!(
        matches!(why, Error::Compile { .. }) && why.to_string().contains("f:2: error: "),
        "{why}"
    );
    let why = kernel("f", "__global__ void f() { asm(\"exit;\"); }", &[], 0)
        .prepare(&runtime)
        .unwrap_err();
    assert!(why.to_string().contains("f:1: error: not emulated: inline PTX (asm)"), "{why}");
}

#[test]
fn ptx_without_a_registered_function_names_the_cure() {
    let (runtime, _driver) = simulated(KernelRegistry::new(), false);
    let ptx = ".version 9.0\n.target sm_75\n.visible .entry f() { ret; }";
    let why = kernel_of("f", KernelSource::Ptx(ptx.into()), &[], 0).prepare(&runtime).unwrap_err();
    assert!(why.to_string().contains("give the kernel's source (KernelSource::CudaC)"), "{why}");
}

#[test]
fn a_registered_function_takes_the_place_of_a_source() {
    let registry = KernelRegistry::new();
    let body = KernelBody::run(|launch| {
        let (y, n) = launch.pointer::<f32>(0);
        // SAFETY: the machine has translated the binding.
        (0..n).for_each(|i| unsafe { y.add(i).write(-1.0) });
        Ok(())
    });
    let access = [Access::ReadWrite, Access::Read];
    registry.register("axpy", KernelSpec::new(&access, 8, body));
    let (runtime, _driver) = simulated(registry, false);
    let axpy = kernel("axpy", AXPY, &access, 8);
    let x = runtime.upload(&[1.0_f32; 8]).unwrap();
    let y = runtime.upload(&[1.0_f32; 8]).unwrap();
    runtime.stream().launch(&axpy, &[y.read_write(), x.read()], &[0_u32, 8], 1).unwrap();
    assert_eq!(runtime.to_vec(&y).unwrap(), [-1.0; 8]);
}

#[test]
fn variables_of_a_source_are_the_modules_own() {
    let source = "__device__ int count = 5;
extern \"C\" __global__ void next(int* x) { x[0] = ++count; }";
    for _ in 0..2 {
        let (runtime, _driver) = simulated(KernelRegistry::new(), false);
        let next = kernel("next", source, &[Access::Write], 0);
        if !ready(&next, &runtime) {
            return;
        }
        let x = runtime.zeros::<i32>(1).unwrap();
        for want in [6, 7] {
            runtime.stream().launch(&next, &[x.write()], &(), 1).unwrap();
            assert_eq!(runtime.to_vec(&x).unwrap(), [want]);
        }
    }
}

const APPEND: &str =
    "extern \"C\" __global__ void append(float* values, const unsigned long long* limit, float* sum, unsigned at) {
    if ((at + 1) * 4ull > limit[0]) { *sum = -1.0f; return; }
    values[at] = at + 1.0f;
    float all = 0.0f;
    for (unsigned i = 0; i <= at; ++i) all += values[i];
    *sum = all;
}";

#[test]
fn a_source_reaches_as_far_as_growing_memory_has_grown() {
    let (runtime, driver) = simulated(KernelRegistry::new(), false);
    let bindings = [Access::ReadWrite, Access::Read, Access::Write];
    let source = KernelSource::CudaC { source: APPEND.into(), options: vec![].into() };
    let mut desc = KernelDesc::new("append", source, &bindings, KernelCheck::any());
    desc.params = 4;
    // SAFETY: the kernel keeps to the limit.
    let append = unsafe { KernelBase::new(desc.limited_by(0, 1)) }.unwrap();
    if !ready(&append, &runtime) {
        return;
    }
    let stream = runtime.stream();
    let values = Growing::<f32>::new(&runtime, 64 << 20).unwrap();
    let sum = runtime.zeros::<f32>(1).unwrap();
    let at = |at: u32, stream: &Stream| {
        let operands = [values.reservation(Access::ReadWrite), values.limit(), sum.write()];
        stream.launch(&append, &operands, &at, (1, 1))
    };
    values.grow(stream, 2).unwrap();
    for (i, all) in [(0, 1.0), (1, 3.0)] {
        at(i, stream).unwrap();
        assert_eq!(runtime.to_vec(&sum).unwrap(), [all]);
    }
    let graph = runtime.record_graph(|r| at(2, r.stream())).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&sum).unwrap(), [-1.0], "beyond the limit");
    values.grow(stream, 3).unwrap();
    graph.launch().unwrap();
    assert_eq!(runtime.to_vec(&sum).unwrap(), [6.0], "the same graph after a growth");
    assert_eq!(runtime.to_vec(values.as_view()).unwrap(), [1.0, 2.0, 3.0]);
    assert!(driver.machine().take_reports().is_empty());
}
