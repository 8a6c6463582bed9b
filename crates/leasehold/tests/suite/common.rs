//! A runtime, a few kernels, and bounded waits.

use leasehold::kernel::{
    CpuArgs, CpuFn, KernelCheck, KernelDesc, KernelSource, session_ops, session_sync_ops,
};
use leasehold::{
    Access, Context, DeviceId, Error, HostTimeline, KernelBase, KernelSession, Operand, Result,
    Timepoint,
};
use leasehold::{Runtime, Stream};
use std::sync::Arc;
use std::time::Duration;

/// A wait that takes this long is a hang.
pub const LONG: Duration = Duration::from_secs(20);

/// A context that nobody shares. With `LEASEHOLD_VALIDATED` set every submission is checked on its
/// way to the backend.
pub fn context() -> Context {
    if std::env::var_os("LEASEHOLD_VALIDATED").is_none() {
        return Context::new();
    }
    let checked = leasehold::backend::Validated::new(leasehold::cpu::CpuBackend::new())
        .expect("it only wraps");
    Context::with_backends(vec![Arc::new(checked)])
}

/// A runtime that nobody shares.
pub fn runtime() -> Runtime {
    context().runtime(DeviceId::cpu(0)).expect("the CPU is always there")
}

/// Runs the test `name` in a process of its own. Returns `true` there, and `false` here.
pub fn alone(name: &str) -> bool {
    const MARK: &str = "LEASEHOLD_TEST_ALONE";
    if std::env::var_os(MARK).is_some() {
        return true;
    }
    let output = std::process::Command::new(std::env::current_exe().unwrap())
        .args([name, "--exact", "--nocapture"])
        .env(MARK, "1")
        .output()
        .unwrap();
    let said = String::from_utf8_lossy(&output.stdout);
    assert!(output.status.success() && said.contains("1 passed"), "{output:?}");
    false
}

pub fn kernel(name: &'static str, run: CpuFn, bindings: &[Access], params: u32) -> KernelBase {
    base(desc(name, run, bindings, params)).expect("a kernel within the limits")
}

pub fn desc(
    name: &'static str,
    run: CpuFn,
    bindings: &[Access],
    params: u32,
) -> KernelDesc<'static> {
    KernelDesc {
        params,
        ..KernelDesc::new(name, KernelSource::Cpu(run), bindings, KernelCheck::grid_1d()).aligned(4)
    }
}

/// The kernels of these tests reach their bindings through `slice` and `slice_mut`, which check
/// bounds, or have a check of their own.
pub fn base(desc: KernelDesc<'static>) -> Result<KernelBase> {
    // SAFETY: they touch their bindings alone, as declared; most divide by the grid's one
    // dimension, which is all that the check accepts.
    unsafe { KernelBase::new(desc) }
}

/// Elements of a tile.
pub const TILE: usize = 4;

unsafe fn run_axpy(args: &CpuArgs<'_>) {
    let from = args.tile()[0] as usize * TILE;
    // SAFETY: each tile has `TILE` elements of its own; `x` is only read.
    let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, from, TILE)) };
    let a: f32 = args.params();
    y.iter_mut().zip(&x[from..]).for_each(|(y, x)| *y += a * x);
}

/// `y += a * x`, a tile of four elements a block.
pub fn axpy() -> KernelBase {
    kernel("axpy", run_axpy, &[Access::Read, Access::ReadWrite], 4)
}

unsafe fn run_iota(args: &CpuArgs<'_>) {
    let from = args.tile()[0] as usize * TILE;
    // SAFETY: each tile has `TILE` elements of its own.
    let y = unsafe { args.slice_mut::<u32>(0, from, TILE) };
    let first: u32 = args.params();
    y.iter_mut().enumerate().for_each(|(i, y)| *y = first + (from + i) as u32);
}

/// `y[i] = first + i`.
pub fn iota() -> KernelBase {
    kernel("iota", run_iota, &[Access::Write], 4)
}

unsafe fn run_trap(_: &CpuArgs<'_>) {
    panic!("a kernel that traps");
}

/// Panics.
pub fn trap() -> KernelBase {
    kernel("trap", run_trap, &[Access::ReadWrite], 0)
}

/// One launch, step by step.
pub fn launch(
    stream: &Stream,
    kernel: &KernelBase,
    operands: &[Operand<'_>],
    params: &[u8],
    blocks: u32,
) -> Result<Option<Timepoint>> {
    let session = KernelSession::begin(kernel, stream)?;
    let session = session_sync_ops::wait(session, operands)?;
    let session = session_ops::bind(session)?;
    let session = session_ops::params_bytes(session, params)?;
    let session = session_ops::dispatch_1d(session, blocks, 1)?;
    session_sync_ops::update_tokens(session).finish()
}

/// Holds a stream back until the host timeline is signalled, and returns the host timeline and the
/// value.
pub fn hold(stream: &Stream) -> (HostTimeline, Timepoint) {
    let host_timeline =
        stream.runtime().create_host_timeline().expect("the CPU has host timelines");
    let point = host_timeline.next();
    stream.wait(point).expect("a stream waits for its host timeline");
    (host_timeline, point)
}

pub fn open((host_timeline, point): (HostTimeline, Timepoint)) {
    host_timeline.signal(point.value()).expect("a host timeline that nobody failed");
}

/// Poisons a stream.
pub fn poison(stream: &Stream) {
    stream.host_call("fails", || Err(Error::state("on purpose"))).expect("it is accepted");
    assert!(stream.synchronize_timeout(LONG).is_err());
}

#[track_caller]
pub fn kind<T>(result: Result<T>) -> &'static str {
    match result {
        Ok(_) => "ok",
        Err(e) => e.kind(),
    }
}
