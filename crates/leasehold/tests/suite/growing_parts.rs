//! Growing parts that a kernel binds as one: each grows alone, all or nothing of several, and
//! graphs stay valid.

use crate::common::*;
use leasehold::growing::GrowingParts;
use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
use leasehold::{
    Access, Array, BackendKind, Context, DeviceId, KernelBase, Result, Runtime, Stream, View,
};
use leasehold_cuda::{CudaBackend, CudaConfig, MemorySource};
use leasehold_cuda_sim::{SimDriver, SimDriverConfig};
use leasehold_sim::MachineConfig;
use std::sync::Arc;

/// Parts of a test.
const PARTS: usize = 4;
/// Values of a block of a part.
const BLOCK: usize = 1024;

/// Tile `[block, part]` writes its number to a block of a part and reads it back: NaN for a block
/// that the part's limit cuts.
unsafe fn run_fill(args: &CpuArgs<'_>) {
    let [block, part, _] = args.tile().map(|i| i as usize);
    let (values, len) = args.pointer::<f32>(0);
    let (limits, count) = args.pointer::<u64>(1);
    // SAFETY: a limit for each part, which nobody writes meanwhile.
    let limit = unsafe { *limits.add(part) };
    let from = part * (len / count) + block * BLOCK;
    let number = (10 * part + block + 1) as f32;
    let found = if (4 * (block + 1) * BLOCK) as u64 <= limit {
        // SAFETY: the block lies in the part and below its limit, and is this tile's.
        let own = unsafe { std::slice::from_raw_parts_mut(values.add(from), BLOCK) };
        own.fill(number);
        own.iter().sum::<f32>() / BLOCK as f32
    } else {
        f32::NAN
    };
    // SAFETY: each tile has its own place.
    unsafe { args.slice_mut::<f32>(2, part * args.grid()[0] as usize + block, 1) }.fill(found);
}

fn fill() -> KernelBase {
    let bindings = [Access::ReadWrite, Access::Read, Access::Write];
    let source = KernelSource::Cpu(run_fill);
    base(KernelDesc::new("fill parts", source, &bindings, KernelCheck::any()).limited_by(0, 1))
        .unwrap()
}

fn launch_fill(stream: &Stream, kernel: &KernelBase, parts: &GrowingParts, out: &Array<f32>) {
    use leasehold::kernel::Grid;
    let operands = [parts.reservation(Access::ReadWrite), parts.limits(), out.write()];
    let blocks = (out.len() / PARTS) as u32;
    stream.launch(kernel, &operands, &[0u8; 0][..], Grid::new([blocks, PARTS as u32, 1])).unwrap();
}

/// The blocks of each part that the kernel reached.
fn reached(runtime: &Runtime, out: &Array<f32>) -> Vec<usize> {
    let out = runtime.to_vec(out).unwrap();
    let blocks = out.len() / PARTS;
    out.chunks(blocks)
        .enumerate()
        .map(|(part, found)| {
            let full = found.iter().take_while(|v| !v.is_nan()).count();
            let wanted = (0..full).map(|block| (10 * part + block + 1) as f32);
            assert!(wanted.eq(found[..full].iter().copied()), "part {part}: {found:?}");
            assert!(found[full..].iter().all(|v| v.is_nan()), "part {part}: {found:?}");
            full
        })
        .collect()
}

#[test]
fn a_recorded_launch_reaches_what_each_part_has() {
    let runtime = runtime();
    let (stream, kernel) = (runtime.stream(), fill());
    let parts = GrowingParts::new(&runtime, PARTS, 8 << 20).unwrap();
    let out = runtime.zeros::<f32>(PARTS * 8).unwrap();
    let graph = runtime
        .record_graph(|r| {
            launch_fill(r.stream(), &kernel, &parts, &out);
            Ok(())
        })
        .unwrap();
    let expect = |wanted: [usize; PARTS]| {
        graph.launch().unwrap();
        assert_eq!(reached(&runtime, &out), wanted);
        stream.fill(out.view(), 0u8).unwrap();
        launch_fill(stream, &kernel, &parts, &out);
        assert_eq!(reached(&runtime, &out), wanted);
    };
    let bytes = |blocks: usize| (4 * BLOCK * blocks) as u64;
    expect([0; 4]);
    parts.grow(stream, 1..3, bytes(2)).unwrap();
    expect([0, 2, 2, 0]);
    parts.grow(stream, 0..4, bytes(1)).unwrap();
    expect([1, 2, 2, 1]);
    parts.grow(stream, 3..4, bytes(8)).unwrap();
    parts.shrink(stream, 0..3, bytes(1)).unwrap();
    expect([1, 1, 1, 8]);
    assert_eq!(parts.committed(), bytes(11));
    // The driver has the memory of nobody back, and the launches still know what is there.
    parts.shrink(stream, 2..4, 0).unwrap();
    runtime.allocator().trim(0).unwrap();
    expect([1, 1, 0, 0]);
    let clone = parts.clone();
    drop(parts);
    assert_eq!(clone.len(1), bytes(1));
    graph.launch().unwrap();
}

#[test]
fn several_parts_grow_together_or_not_at_all() {
    for runtime in [runtime(), cuda()] {
        let (stream, at) = (runtime.stream(), runtime.device());
        let parts = GrowingParts::new(&runtime, PARTS, 8 << 20).unwrap();
        parts.grow(stream, 1..2, 1000).unwrap();
        let before = || (0..PARTS).map(|part| parts.len(part)).collect::<Vec<_>>();
        assert_eq!(before(), [0, 1000, 0, 0]);
        runtime.allocator().set_budget(runtime.allocator().stats().reserved + (9 << 20));
        let e = parts.grow(stream, 0..4, 6 << 20).expect_err("over the budget");
        assert!(e.is_out_of_memory(), "{at}: {e}");
        assert_eq!(before(), [0, 1000, 0, 0], "{at}");
        // The memory of the first ones lies ready, and goes to whoever needs it.
        assert!(parts.try_grow(stream, 0..1, 6 << 20).unwrap(), "{at}");
        assert!(!parts.try_grow(stream, 0..4, 6 << 20).unwrap(), "{at}");
        assert_eq!(before(), [6 << 20, 1000, 0, 0], "{at}");
        parts.shrink(stream, 0..1, 0).unwrap();
        stream.synchronize().unwrap();
        parts.grow(stream, 3..4, 8 << 20).unwrap();
        assert_eq!(before(), [0, 1000, 0, 8 << 20], "{at}");
    }
}

/// CUDA over a simulated driver.
fn cuda() -> Runtime {
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(7))).unwrap();
    let config = CudaConfig::default();
    let backend = Arc::new(CudaBackend::with_ops(Arc::new(driver), config).unwrap());
    Context::with_backends(vec![backend]).runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap()
}

/// The call fails, with this in its text.
#[track_caller]
fn refused<T>(result: Result<T>, text: &str) {
    let e = result.map(drop).expect_err(text);
    assert!(e.to_string().contains(text), "{e}");
}

#[test]
fn bad_use_of_parts_is_refused_and_changes_nothing() {
    let runtime = runtime();
    let (stream, kernel) = (runtime.stream(), fill());
    let parts = GrowingParts::new(&runtime, PARTS, 8 << 20).unwrap();
    parts.grow(stream, 0..1, 4096).unwrap();
    refused(GrowingParts::new(&runtime, 0, 5), "0 growing blocks");
    refused(GrowingParts::new(&runtime, 3, 0), "want 1 or more");
    refused(GrowingParts::new(&runtime, usize::MAX, 1 << 40), "addresses");
    refused(parts.grow(stream, 3..5, 1), "parts 3..5 of 4");
    #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
    let reversed = 3..2;
    refused(parts.grow(stream, reversed.clone(), 1), "begin no later");
    refused(parts.shrink(stream, reversed, 0), "begin no later");
    refused(parts.prepare(0..1, (8 << 20) + 1), "larger maximum");
    let elsewhere = crate::common::runtime();
    refused(parts.grow(elsewhere.stream(), 0..1, 8192), "not a stream of");
    refused(parts.shrink(elsewhere.stream(), 0..1, 0), "not a stream of");
    let recorded = runtime.record_graph(|r| {
        assert_eq!(kind(GrowingParts::new(r, 1, 10)), "Recording");
        assert_eq!(kind(parts.grow(r.stream(), 0..1, 8192)), "Recording");
        assert_eq!(kind(parts.shrink(r.stream(), 0..1, 0)), "Recording");
        Ok(())
    });
    drop(recorded);
    // Nothing but a kernel that keeps to the limits reaches the parts.
    let other = GrowingParts::new(&runtime, PARTS, 8 << 20).unwrap();
    let out = runtime.zeros::<f32>(4).unwrap();
    let whole = parts.reservation(Access::ReadWrite);
    let wrong = [whole, other.limits(), out.write()];
    refused(launch(stream, &kernel, &wrong, &[], 1), "bind Growing::limit of the same");
    refused(stream.fill(whole.view().part(..4).unwrap(), 0u8), "has 0 now");
    refused(stream.fill(parts.limits().view(), 0xffu8), "read-only");
    assert_eq!([0, 1, 2, 3].map(|part| parts.len(part)), [4096, 0, 0, 0]);
    let mut plain = CudaConfig::default();
    plain.memory = MemorySource::Plain;
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(7))).unwrap();
    let backend = Arc::new(CudaBackend::with_ops(Arc::new(driver), plain).unwrap());
    let context = Context::with_backends(vec![backend]);
    let runtime = context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap();
    assert_eq!(kind(GrowingParts::new(&runtime, 1, 10)), "Unsupported");
}
