//! Kernels and helper functions of the tests.

use leasehold_alloc::{Layout, On};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Lease, Result, Timepoint};
use leasehold_cpu::{CpuBackend, CpuConfig};
use leasehold_hal::{
    Access, Backend, Binding, CpuArgs, CpuFn, Device, DeviceId, Dispatch, KernelCheck, KernelDesc,
    KernelSource, MemoryKind, Op, Pipeline, Stream, StreamDesc,
};
use stats_alloc::{INSTRUMENTED_SYSTEM, StatsAlloc};
use std::alloc::System;
use std::time::Duration;

/// A limit that is long enough for every machine. A wait that reaches it hangs.
pub const LONG: Option<Duration> = Some(Duration::from_secs(30));

pub struct Rig {
    pub stream: Lease<dyn Stream>,
    pub device: Lease<dyn Device>,
    pub backend: CpuBackend,
}

pub fn rig(threads: usize) -> Rig {
    rig_with(CpuConfig::threads(threads))
}

pub fn rig_with(config: CpuConfig) -> Rig {
    let backend = CpuBackend::with_config(config).expect("a backend");
    let device = backend.open(DeviceId::cpu(0)).expect("a device");
    let stream = device.stream(&StreamDesc::default()).expect("a stream");
    Rig { stream, device, backend }
}

impl Rig {
    pub fn another(&self) -> Lease<dyn Stream> {
        self.device.stream(&StreamDesc::default()).expect("a stream")
    }

    pub fn kernel(
        &self,
        name: &'static str,
        run: CpuFn,
        bindings: &[Access],
        params: u32,
    ) -> Lease<Pipeline> {
        self.device.pipeline(&desc(name, run, bindings, params)).expect("a pipeline")
    }

    pub fn buffer(&self, bytes: u64) -> Lease<leasehold_alloc::Buffer> {
        let memory = self.device.memory(MemoryKind::Device).expect("memory");
        memory
            .alloc(
                Layout::new(bytes),
                On { timeline: self.stream.timeline(), source: &*self.stream },
            )
            .expect("a buffer")
    }
}

pub fn desc<'a>(name: &'a str, run: CpuFn, bindings: &'a [Access], params: u32) -> KernelDesc<'a> {
    // Backends do not call the check: the submitter vouches.
    KernelDesc {
        params,
        ..KernelDesc::new(name, KernelSource::Cpu(run), bindings, KernelCheck::any()).entry("run")
    }
}

/// Submits operations and returns the timepoint.
pub fn submit(stream: &Lease<dyn Stream>, ops: &[Op<'_>]) -> Result<Timepoint> {
    // SAFETY: each test keeps its memory until it has waited, and declares the accesses of its
    // kernels.
    unsafe { stream.submit(ops) }.map(|v| stream.timeline().at(v))
}

pub fn finish(stream: &Lease<dyn Stream>) -> Result<()> {
    stream.wait_host(stream.timeline().submitted(), LONG)
}

pub fn launch<'a>(
    pipeline: &'a Lease<Pipeline>,
    tiles: u32,
    bindings: &'a [Binding],
    params: &'a [u8],
) -> Op<'a> {
    Op::Dispatch(Dispatch {
        pipeline,
        grid: [tiles, 1, 1],
        block: [1; 3],
        shared: 0,
        bindings,
        params,
    })
}

/// A binding of values in this process.
pub fn on<T>(values: &[T], access: Access) -> Binding {
    Binding { addr: values.as_ptr() as u64, len: size_of_val(values) as u64, native: 0, access }
}

/// A cell that kernels and the test share.
pub fn cell() -> Box<[AtomicU64; 1]> {
    Box::new([AtomicU64::new(0)])
}

/// Adds one to binding 0, an atomic counter, for each tile.
///
/// # Safety
/// - Binding 0 holds an `AtomicU64`.
pub unsafe fn count(args: &CpuArgs<'_>) {
    // SAFETY: binding 0 holds an `AtomicU64` (the contract of this function).
    unsafe { &*args.pointer::<AtomicU64>(0).0 }.fetch_add(1, Ordering::Relaxed);
}

/// Multiplies binding 0, a plain integer, by ten and adds the parameter. The digits show the order
/// of launches.
///
/// # Safety
/// - Binding 0 holds a `u64` that nothing else touches.
pub unsafe fn digit(args: &CpuArgs<'_>) {
    // SAFETY: binding 0 holds a `u64` without other users (the contract of this function), and the
    // launch has one tile.
    let at = unsafe { args.slice_mut::<u64>(0, 0, 1) };
    at[0] = at[0].wrapping_mul(10).wrapping_add(u64::from(args.params::<u32>()));
}

/// Waits until the first counter of binding 0 is not zero, then adds one to the second.
///
/// # Safety
/// - Binding 0 holds two `AtomicU64`s.
pub unsafe fn spin_until_flag(args: &CpuArgs<'_>) {
    let at = args.pointer::<AtomicU64>(0).0;
    // SAFETY: binding 0 holds two `AtomicU64`s (the contract of this function).
    let (flag, done) = unsafe { (&*at, &*at.add(1)) };
    while flag.load(Ordering::Acquire) == 0 {
        std::thread::yield_now();
    }
    done.fetch_add(1, Ordering::AcqRel);
}

/// Panics in the tile whose number is the parameter.
///
/// # Safety
/// - None.
pub unsafe fn trap(args: &CpuArgs<'_>) {
    assert!(args.tile()[0] != args.params::<u32>(), "the trap in tile {}", args.tile()[0]);
}

/// Writes a sum of many terms per tile, through scratch memory. The order of the terms changes the
/// last bit.
///
/// # Safety
/// - Binding 0 holds one `f32` for each tile.
pub unsafe fn sums(args: &CpuArgs<'_>) {
    let i = args.tile()[0] as usize;
    assert_eq!(args.shared().0 as usize % 64, 0, "scratch memory is aligned");
    // SAFETY: the dispatch asks for 1,024 bytes of scratch memory.
    let scratch = unsafe { std::slice::from_raw_parts_mut(args.shared().0.cast::<f32>(), 256) };
    for (k, s) in scratch.iter_mut().enumerate() {
        *s = (i as f32 + 1.0) / (k as f32 * 0.37 + 1.0);
    }
    // The product is subnormal, so it is zero on every thread.
    let tiny = std::hint::black_box(1e-30f32) * std::hint::black_box(1e-12f32);
    let sum = scratch.iter().fold(0.0f32, |a, b| a * 0.999 + b) + tiny * 1e30;
    // SAFETY: binding 0 holds one `f32` for each tile (the contract of this function), and each
    // tile takes its own.
    let own = unsafe { args.slice_mut::<f32>(0, i, 1) };
    own[0] = sum;
}

/// Runs the test `name` alone in a child process, because other tests of this process run at the
/// same time. Returns `true` in the child, and `false` in the parent.
pub fn alone(name: &str) -> bool {
    const MARK: &str = "LEASEHOLD_TEST_ALONE";
    if std::env::var(MARK).is_ok_and(|n| n == name) {
        return true;
    }
    let run = std::process::Command::new(std::env::current_exe().expect("this program"))
        .args([name, "--exact", "--nocapture", "--test-threads", "1"])
        .env(MARK, name)
        .output()
        .expect("a child process");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    assert!(run.status.success(), "{}{}", text(&run.stdout), text(&run.stderr));
    assert!(text(&run.stdout).contains("1 passed"), "no test of this name: {name}");
    false
}

#[global_allocator]
static ALLOCATOR: &StatsAlloc<System> = &INSTRUMENTED_SYSTEM;

/// The number of allocations of this process so far.
pub fn allocations() -> usize {
    ALLOCATOR.stats().allocations
}

/// The processor time of this process so far.
pub fn cpu_time() -> Duration {
    let mut now = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the call writes one timespec.
    assert_eq!(unsafe { libc::clock_gettime(libc::CLOCK_PROCESS_CPUTIME_ID, &raw mut now) }, 0);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}
