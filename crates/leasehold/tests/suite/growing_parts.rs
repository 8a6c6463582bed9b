//! Growing parts that a kernel binds as one: each grows alone, all or nothing of several, and
//! graphs stay valid.

use crate::common::*;
use leasehold::Growing;
use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{
    Access, Array, BackendKind, Context, DeviceId, Graph, KernelBase, Result, Runtime, Stream, View,
};
use leasehold_cuda::{CudaBackend, CudaConfig, MemorySource};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{
    FaultAction, FaultPlan, FaultRule, KernelBody, KernelRegistry, KernelSpec, MachineConfig,
    ReportKind, SimBackend, When,
};
use std::sync::Arc;

/// Parts of a test.
const PARTS: usize = 4;
/// Values of a block of a part.
const BLOCK: usize = 1024;

/// Tile `[block, part]` writes its number to a block of a part, if the parameter is not 0, and
/// reads it back: NaN for a block that the part's limit cuts.
unsafe fn run_fill(args: &CpuArgs<'_>) {
    let [block, part, _] = args.tile().map(|i| i as usize);
    let (values, len) = args.pointer::<f32>(0);
    let (limits, words) = args.pointer::<u64>(1);
    let count = words / 2;
    // SAFETY: two words for each part, which nobody writes meanwhile.
    let limit = unsafe { *limits.add(part) };
    let from = part * (len / count) + block * BLOCK;
    let number = (10 * part + block + 1) as f32;
    let found = if (4 * (block + 1) * BLOCK) as u64 <= limit {
        // SAFETY: the block lies in the part and below its limit, and is this tile's.
        let own = unsafe { std::slice::from_raw_parts_mut(values.add(from), BLOCK) };
        if args.params::<u32>() != 0 {
            own.fill(number);
        }
        own.iter().sum::<f32>() / BLOCK as f32
    } else {
        f32::NAN
    };
    // SAFETY: each tile has its own place.
    unsafe { args.slice_mut::<f32>(2, part * args.grid()[0] as usize + block, 1) }.fill(found);
}

const BINDINGS: [Access; 3] = [Access::ReadWrite, Access::Read, Access::Write];

/// Names the function of a simulated device.
const PTX: &str = "\
    .version 8.0\n.target sm_75\n.address_size 64\n\
    .visible .entry fill_parts(.param .u64 a, .param .u64 b, .param .u64 c, .param .u32 d)\n\
    { ret; }\n";

fn fill_of(source: KernelSource<'static>) -> KernelBase {
    let desc = KernelDesc::new("fill_parts", source, &BINDINGS, KernelCheck::any());
    base(desc.params_of::<u32>().limited_by(0, 1)).unwrap()
}

fn fill() -> KernelBase {
    fill_of(KernelSource::Cpu(run_fill))
}

/// As [`launch_fill`], with the parameter.
fn launch_parts(
    stream: &Stream,
    kernel: &KernelBase,
    parts: &Growing<u8>,
    out: &Array<f32>,
    write: u32,
) -> Result<()> {
    use leasehold::kernel::Grid;
    let operands = [parts.reservation(Access::ReadWrite), parts.limit(), out.write()];
    let grid = Grid::new([(out.len() / PARTS) as u32, PARTS as u32, 1]);
    stream.launch(kernel, &operands, &write, grid).map(drop)
}

fn launch_fill(stream: &Stream, kernel: &KernelBase, parts: &Growing<u8>, out: &Array<f32>) {
    launch_parts(stream, kernel, parts, out, 1).unwrap();
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
    let parts = Growing::<u8>::with_parts(&runtime, PARTS, 8 << 20).unwrap();
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
    let bytes = |blocks: usize| 4 * BLOCK * blocks;
    expect([0; 4]);
    parts.parts(1..3).grow(stream, bytes(2)).unwrap();
    expect([0, 2, 2, 0]);
    parts.parts(0..4).grow(stream, bytes(1)).unwrap();
    expect([1, 2, 2, 1]);
    parts.parts(3..4).grow(stream, bytes(8)).unwrap();
    parts.parts(0..3).shrink(stream, bytes(1)).unwrap();
    expect([1, 1, 1, 8]);
    assert_eq!(parts.committed(), bytes(11) as u64);
    // The driver has the memory of nobody back, and the launches still know what is there.
    parts.parts(2..4).shrink(stream, 0).unwrap();
    runtime.allocator().trim(0).unwrap();
    expect([1, 1, 0, 0]);
    let clone = parts.clone();
    drop(parts);
    assert_eq!(clone.parts(1..2).len(), bytes(1));
    graph.launch().unwrap();
    // Work that the process leaves behind looks like a leak.
    stream.synchronize().unwrap();
}

#[test]
fn several_parts_grow_together_or_not_at_all() {
    for runtime in [runtime(), cuda()] {
        let (stream, at) = (runtime.stream(), runtime.device());
        let parts = Growing::<u8>::with_parts(&runtime, PARTS, 8 << 20).unwrap();
        parts.parts(1..2).grow(stream, 1000).unwrap();
        let before =
            || (0..PARTS).map(|part| parts.parts(part..part + 1).len()).collect::<Vec<_>>();
        assert_eq!(before(), [0, 1000, 0, 0]);
        runtime.allocator().set_budget(runtime.allocator().stats().reserved + (9 << 20));
        let e = parts.parts(0..4).grow(stream, 6 << 20).expect_err("over the budget");
        assert!(e.is_out_of_memory(), "{at}: {e}");
        assert_eq!(before(), [0, 1000, 0, 0], "{at}");
        // The memory of the first ones lies ready, and goes to whoever needs it.
        assert!(parts.parts(0..1).try_grow(stream, 6 << 20).unwrap(), "{at}");
        assert!(!parts.parts(0..4).try_grow(stream, 6 << 20).unwrap(), "{at}");
        assert_eq!(before(), [6 << 20, 1000, 0, 0], "{at}");
        parts.parts(0..1).shrink(stream, 0).unwrap();
        stream.synchronize().unwrap();
        parts.parts(3..4).grow(stream, 8 << 20).unwrap();
        assert_eq!(before(), [0, 1000, 0, 8 << 20], "{at}");
    }
}

/// CUDA over a simulated driver.
fn cuda() -> Runtime {
    cuda_and_driver().0
}

fn cuda_and_driver() -> (Runtime, Arc<SimDriver>) {
    let kernels = KernelRegistry::new();
    // SAFETY: each launch of the tests has a limit for each part, and a place for each tile.
    let body = unsafe { KernelBody::cpu(run_fill) };
    kernels.register("fill_parts", KernelSpec::new(&BINDINGS, 4, body).limited_by(0, 1));
    let machine = MachineConfig::seed(7).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let config = CudaConfig::default().inline(true);
    let backend = Arc::new(CudaBackend::with_ops(driver.clone(), config).unwrap());
    let context = Context::with_backends(vec![backend]);
    (context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap(), driver)
}

/// Parts of a pool that hold the numbers of their blocks, and a graph that reads them.
struct Pooled {
    runtime: Runtime,
    pool: Pool,
    parts: Growing<u8>,
    kernel: KernelBase,
    out: Array<f32>,
    graph: Graph,
    addr: u64,
}

impl Pooled {
    /// Blocks of each part.
    const BLOCKS: [usize; PARTS] = [2, 0, 8, 5];

    fn new(runtime: &Runtime) -> Self {
        let source = match runtime.device().backend {
            BackendKind::Cpu => KernelSource::Cpu(run_fill),
            _ => KernelSource::Ptx(PTX.into()),
        };
        let (pool, kernel) =
            (Pool::new(runtime, "caches", PoolKind::Suspendable).unwrap(), fill_of(source));
        let parts = pool.growing::<u8>(PARTS, 8 << 20).unwrap();
        let out = runtime.zeros::<f32>(PARTS * 8).unwrap();
        // Recorded without memory.
        let graph =
            runtime.record_graph(|r| launch_parts(r.stream(), &kernel, &parts, &out, 0)).unwrap();
        for (part, blocks) in Self::BLOCKS.into_iter().enumerate() {
            let bytes = 4 * BLOCK * blocks;
            parts.parts(part..part + 1).grow(runtime.stream(), bytes).unwrap();
        }
        launch_fill(runtime.stream(), &kernel, &parts, &out);
        let addr = parts.reservation(Access::Read).view().addr();
        Self { runtime: runtime.clone(), pool, parts, kernel, out, graph, addr }
    }

    fn check(&self) {
        self.graph.launch().unwrap();
        assert_eq!(reached(&self.runtime, &self.out), Self::BLOCKS);
        self.runtime.stream().fill(self.out.view(), 0u8).unwrap();
        launch_parts(self.runtime.stream(), &self.kernel, &self.parts, &self.out, 0).unwrap();
        assert_eq!(reached(&self.runtime, &self.out), Self::BLOCKS);
        assert_eq!(self.parts.reservation(Access::Read).view().addr(), self.addr);
    }
}

#[test]
fn parts_of_a_pool_go_and_come_back_under_a_graph() {
    for runtime in [runtime(), cuda()] {
        let (pooled, stream) = (Pooled::new(&runtime), runtime.stream());
        let Pooled { pool, parts, .. } = &pooled;
        pooled.check();
        let other = pool.growing::<u32>(1, 1 << 20).unwrap();
        other.grow(stream, 1000).unwrap();
        stream.fill(other.view(), 7u32).unwrap();
        let lengths = || [0, 1, 2, 3].map(|part| parts.parts(part..part + 1).len());
        for _ in 0..3 {
            let (before, live) = (lengths(), pool.stats().live);
            assert_eq!(live, PARTS as u64 + 1);
            pool.suspend(Contents::Keep).unwrap();
            assert_eq!(pool.stats().reserved, 0);
            assert_eq!(kind(pooled.graph.launch()), "Suspended");
            let eager = launch_parts(stream, &pooled.kernel, parts, &pooled.out, 1);
            assert_eq!(kind(eager), "Suspended");
            assert_eq!(kind(parts.parts(0..4).grow(stream, 8 << 20)), "Suspended");
            assert_eq!(kind(parts.parts(0..4).try_grow(stream, 8 << 20)), "Suspended");
            assert_eq!(kind(parts.parts(0..4).prepare(8 << 20)), "Suspended");
            assert_eq!(kind(parts.parts(0..4).shrink(stream, 0)), "Suspended");
            assert_eq!(kind(pool.growing::<u8>(2, 100)), "Suspended");
            assert_eq!(lengths(), before);
            pool.resume().unwrap();
            assert_eq!((lengths(), pool.stats().live), (before, live));
            pooled.check();
            assert_eq!(runtime.to_vec(other.as_view()).unwrap(), [7; 1000]);
            // Parts that were longer for a while leave nothing behind.
            parts.parts(0..3).grow(stream, 4 << 20).unwrap();
            for (part, bytes) in before.into_iter().enumerate() {
                parts.parts(part..part + 1).shrink(stream, bytes).unwrap();
            }
        }
        // Parts that nobody has any more take no memory at the resumption.
        pool.suspend(Contents::Keep).unwrap();
        let Pooled { pool, parts, graph, .. } = pooled;
        drop((parts, graph, other));
        pool.resume().unwrap();
        assert_eq!((pool.stats().live, pool.stats().reserved), (0, 0));
    }
}

/// Limits are one copy or fill of the driver for parts side by side, whatever their number is.
#[test]
fn limits_of_parts_side_by_side_are_one_call() {
    let (runtime, driver) = cuda_and_driver();
    let (stream, out) = (runtime.stream(), runtime.zeros::<f32>(PARTS * 8).unwrap());
    let parts = Growing::<u8>::with_parts(&runtime, PARTS, 8 << 20).unwrap();
    let kernel = fill_of(KernelSource::Ptx(PTX.into()));
    let expect = |change: std::ops::Range<usize>, blocks: usize, calls: u64, wanted| {
        let count = || -> u64 {
            let all = driver.machine().calls_by_name().into_iter();
            let writes = |name: &str| name.starts_with("cuMemset") || name.starts_with("cuMemcpy");
            all.filter(|(name, _)| writes(name)).map(|(_, count)| count).sum()
        };
        let (before, bytes) = (count(), 4 * BLOCK * blocks);
        parts.parts(change.clone()).grow(stream, bytes).unwrap();
        parts.parts(change).shrink(stream, bytes).unwrap();
        assert_eq!(count() - before, calls);
        launch_fill(stream, &kernel, &parts, &out);
        assert_eq!(reached(&runtime, &out), wanted);
    };
    expect(0..4, 2, 1, [2, 2, 2, 2]);
    expect(1..3, 3, 1, [2, 3, 3, 2]);
    // Two parts are as long, and those that are not lie apart.
    expect(0..4, 3, 2, [3, 3, 3, 3]);
    expect(2..4, 1, 1, [3, 3, 1, 1]);
    assert!(driver.machine().take_reports().is_empty());
}

/// The driver fails at each of its calls in turn: of a suspension and a resumption, then of a
/// growth of several parts.
#[test]
fn a_failing_call_of_the_driver_loses_no_part() {
    for action in [FaultAction::Fail(1), FaultAction::OutOfMemory] {
        let mut failed = [0; 3];
        for call in 0.. {
            let (mut runtime, driver) = cuda_and_driver();
            let pooled = Pooled::new(&runtime);
            let Pooled { pool, parts, .. } = &pooled;
            let lengths = || [0, 1, 2, 3].map(|part| parts.parts(part..part + 1).len());
            let before = lengths();
            runtime.synchronize().unwrap();
            let start = driver.machine().calls();
            let rule = FaultRule::any(When::At(start + call), action.clone());
            driver.machine().set_faults(FaultPlan::none().with(rule));
            let suspended = pool.suspend(Contents::Keep).map(drop);
            let resumed = if pool.is_suspended() { pool.resume() } else { Ok(()) };
            let grown = match (&suspended, &resumed) {
                (Ok(()), Ok(())) => parts.parts(0..4).grow(runtime.stream(), 8 << 20),
                _ => Ok(()),
            };
            let made = driver.machine().calls() - start;
            driver.machine().set_faults(FaultPlan::none());
            for (result, failed) in [&suspended, &resumed, &grown].into_iter().zip(&mut failed) {
                *failed += u32::from(result.is_err());
            }
            if runtime.stream().failure().is_some() {
                runtime.replace_default_stream().unwrap();
            }
            if pool.is_suspended() {
                assert_eq!(kind(parts.parts(0..1).grow(runtime.stream(), 8 << 20)), "Suspended");
                pool.resume().unwrap();
            }
            if [&suspended, &resumed, &grown].iter().any(|result| result.is_err()) {
                assert_eq!(lengths(), before, "call {call}: {grown:?}");
            }
            for (part, bytes) in before.into_iter().enumerate() {
                parts.parts(part..part + 1).shrink(runtime.stream(), bytes).unwrap();
            }
            Pooled { runtime: runtime.clone(), ..pooled }.check();
            // Some calls are asked for what they say, and their failure is nobody's affair.
            if suspended.is_ok() && resumed.is_ok() && grown.is_ok() && call > made {
                break;
            }
        }
        assert!(failed[0] > 3 && failed[2] > 0, "{failed:?}");
    }
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
    let parts = Growing::<u8>::with_parts(&runtime, PARTS, 8 << 20).unwrap();
    parts.parts(0..1).grow(stream, 4096).unwrap();
    refused(Growing::<u8>::with_parts(&runtime, 0, 5), "0 growing blocks");
    refused(Growing::<u8>::with_parts(&runtime, 3, 0), "want 1 or more");
    refused(Growing::<u8>::with_parts(&runtime, usize::MAX, 1 << 40), "addresses");
    refused(parts.parts(3..5).grow(stream, 1), "parts 3..5 of 4");
    #[expect(clippy::reversed_empty_ranges, reason = "that is the mistake")]
    let reversed = 3..2;
    refused(parts.parts(reversed.clone()).grow(stream, 1), "begin no later");
    refused(parts.parts(reversed).shrink(stream, 0), "begin no later");
    refused(parts.parts(0..1).prepare((8 << 20) + 1), "larger maximum");
    let elsewhere = crate::common::runtime();
    refused(parts.parts(0..1).grow(elsewhere.stream(), 8192), "not a stream of");
    refused(parts.parts(0..1).shrink(elsewhere.stream(), 0), "not a stream of");
    let recorded = runtime.record_graph(|r| {
        assert_eq!(kind(Growing::<u8>::with_parts(r, 1, 10)), "Recording");
        assert_eq!(kind(parts.parts(0..1).grow(r.stream(), 8192)), "Recording");
        assert_eq!(kind(parts.parts(0..1).shrink(r.stream(), 0)), "Recording");
        Ok(())
    });
    drop(recorded);
    // Nothing but a kernel that keeps to the limits reaches the parts.
    let other = Growing::<u8>::with_parts(&runtime, PARTS, 8 << 20).unwrap();
    let out = runtime.zeros::<f32>(4).unwrap();
    let whole = parts.reservation(Access::ReadWrite);
    let wrong = [whole, other.limit(), out.write()];
    refused(launch(stream, &kernel, &wrong, &[0; 4], 1), "bind Growing::limit of the same");
    refused(stream.fill(whole.view().part(..4).unwrap(), 0u8), "has 0 now");
    refused(stream.fill(parts.limit().view(), 0xffu8), "read-only");
    assert_eq!([0, 1, 2, 3].map(|part| parts.parts(part..part + 1).len()), [4096, 0, 0, 0]);
    let mut plain = CudaConfig::default();
    plain.memory = MemorySource::Plain;
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(7))).unwrap();
    let backend = Arc::new(CudaBackend::with_ops(Arc::new(driver), plain).unwrap());
    let context = Context::with_backends(vec![backend]);
    let runtime = context.runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap();
    assert_eq!(kind(Growing::<u8>::with_parts(&runtime, 2, 10)), "Unsupported");
}

/// Tile `[block, part]` writes a word of the launch all over a block, unless the block is shared or
/// has no memory, and says which word it has found at the block's end then. A wrong one writes what
/// is shared.
unsafe fn run_write(args: &CpuArgs<'_>) {
    let [block, part, _] = args.tile().map(|i| i as usize);
    let [word, wrong] = args.params::<[u32; 2]>();
    let (values, len) = args.pointer::<u32>(0);
    let (words, count) = args.pointer::<u64>(1);
    let each = len / (count / 2);
    let [begin, end] = [block, block + 1].map(|block| (4 * block * BLOCK) as u64);
    // SAFETY: two words for each part, which nobody writes meanwhile.
    let [limit, shared] = [part, count / 2 + part].map(|word| unsafe { *words.add(word) });
    let mut found = u32::MAX;
    if end <= limit {
        // SAFETY: the block lies in the part and below its limit, and is this tile's.
        unsafe {
            let own = values.add(part * each + block * BLOCK);
            if begin >= shared || wrong != 0 {
                (0..BLOCK).for_each(|i| own.add(i).write(word));
            }
            found = own.add(BLOCK - 1).read();
        }
    }
    // SAFETY: each tile has its own place.
    unsafe { args.slice_mut::<u32>(2, part * args.grid()[0] as usize + block, 1) }.fill(found);
}

/// Parts on a simulated device, and a kernel that writes all of them.
struct Shares {
    sim: Arc<SimBackend>,
    runtime: Runtime,
    kernel: KernelBase,
    parts: Growing<u8>,
    out: Array<u32>,
}

/// Blocks of a granule of the simulated device.
const GRANULE: usize = (2 << 20) / (4 * BLOCK);

impl Shares {
    fn new() -> Self {
        let registry = KernelRegistry::new();
        let access = [Access::ReadWrite, Access::Read, Access::Write];
        // SAFETY: all launches here have a place for each tile, and words for each part.
        let body = unsafe { KernelBody::cpu(run_write) };
        let spec = KernelSpec::new(&access, 8, body).limited_by(0, 1);
        registry.register("write parts", spec);
        let config = MachineConfig::seed(3).detect(true).kernels(registry);
        let sim = Arc::new(SimBackend::new(config).unwrap());
        let context = Context::with_backends(vec![sim.clone()]);
        let runtime = context.runtime(DeviceId::new(BackendKind::Sim, 0)).unwrap();
        let source = KernelSource::Registered("write parts".into());
        let desc = KernelDesc::new("write parts", source, &access, KernelCheck::any());
        let desc = KernelDesc { params: 8, ..desc.limited_by(0, 1) };
        let parts = Growing::<u8>::with_parts(&runtime, 3, 8 << 20).unwrap();
        let out = runtime.zeros(3 * 4 * GRANULE).unwrap();
        Self { sim, kernel: base(desc).unwrap(), parts, out, runtime }
    }

    /// Launches, and returns the words of each part's granules.
    fn write(&self, word: u32, wrong: u32) -> Vec<Vec<u32>> {
        use leasehold::kernel::Grid;
        let operands =
            [self.parts.reservation(Access::ReadWrite), self.parts.limit(), self.out.write()];
        let grid = Grid::new([4 * GRANULE as u32, 3, 1]);
        self.runtime.stream().launch(&self.kernel, &operands, &[word, wrong], grid).unwrap();
        let found = self.runtime.to_vec(&self.out).unwrap();
        let granules = |part: &[u32]| part.chunks(GRANULE).map(|own| own[0]).collect::<Vec<_>>();
        found.chunks(4 * GRANULE).map(granules).collect()
    }

    fn grow(&self, part: usize, granules: usize) {
        self.parts.parts(part..part + 1).grow(self.runtime.stream(), granules << 21).unwrap();
    }
}

#[test]
fn parts_share_what_neither_writes() {
    const NO: u32 = u32::MAX;
    let s = Shares::new();
    let stream = s.runtime.stream();
    s.grow(0, 3);
    assert_eq!(s.write(7, 0), [[7, 7, 7, NO], [NO; 4], [NO; 4]]);
    let bytes = s.parts.fork_part(stream, 0, 2, (5 << 20) + 1).unwrap();
    assert_eq!(
        (bytes, s.parts.parts(2..3).len(), s.parts.committed()),
        (4 << 20, 4 << 20, 10 << 20)
    );
    assert_eq!([0, 1, 2].map(|part| s.parts.parts(part..part + 1).shared()), [4 << 20, 0, 4 << 20]);
    assert_eq!(s.runtime.allocator().stats().shared_in_growing, 4 << 20);
    assert_eq!(s.write(8, 0), [[7, 7, 8, NO], [NO; 4], [7, 7, NO, NO]]);
    s.grow(2, 4);
    assert_eq!(s.write(9, 0), [[7, 7, 9, NO], [NO; 4], [7, 7, 9, 9]]);
    // The parent ends, and somebody else is in its place.
    s.parts.parts(0..1).shrink(stream, 0).unwrap();
    assert_eq!(s.write(1, 0), [[NO; 4], [NO; 4], [7, 7, 1, 1]]);
    s.grow(0, 4);
    assert_eq!(s.parts.parts(0..1).shared(), 0);
    assert_eq!(s.write(2, 0), [[2; 4], [NO; 4], [7, 7, 2, 2]]);
    s.parts.parts(2..3).shrink(stream, 0).unwrap();
    s.runtime.synchronize().unwrap();
    s.runtime.allocator().trim(0).unwrap();
    s.grow(2, 1);
    assert_eq!(s.write(3, 0), [[3; 4], [NO; 4], [3, NO, NO, NO]]);
    assert_eq!(s.sim.machine().take_reports(), []);
    // A kernel that writes what is shared is found.
    s.parts.fork_part(stream, 0, 1, 4 << 20).unwrap();
    s.write(4, 1);
    let kinds: Vec<_> = s.sim.machine().take_reports().iter().map(|r| r.kind).collect();
    assert!(kinds.contains(&ReportKind::WroteShared), "{kinds:?}");
}

#[test]
fn bad_forks_of_parts_are_refused_and_change_nothing() {
    let s = Shares::new();
    let stream = s.runtime.stream();
    s.grow(0, 2);
    s.grow(1, 1);
    let fork = |from: usize, to: usize, bytes: usize| s.parts.fork_part(stream, from, to, bytes);
    refused(fork(0, 0, 1 << 21), "a fork of itself");
    refused(fork(0, 3, 1 << 21), "parts 3..4 of 3");
    refused(fork(usize::MAX, 1, 0), "of 3");
    refused(fork(0, 1, 1 << 21), "shrink it to 0");
    refused(fork(0, 2, (4 << 20) + 1), "fork what has memory");
    let elsewhere = crate::common::runtime();
    refused(s.parts.fork_part(elsewhere.stream(), 0, 2, 1), "not a stream of");
    drop(s.runtime.record_graph(|r| {
        assert_eq!(kind(s.parts.fork_part(r.stream(), 0, 2, 1 << 21)), "Recording");
        Ok(())
    }));
    assert_eq!(
        [0, 1, 2].map(|part| (
            s.parts.parts(part..part + 1).len(),
            s.parts.parts(part..part + 1).shared()
        )),
        [(4 << 20, 0), (2 << 20, 0), (0, 0)]
    );
    // The host has one address for each byte.
    let parts = Growing::<u8>::with_parts(&elsewhere, 2, 8 << 20).unwrap();
    parts.parts(0..1).grow(elsewhere.stream(), 4 << 20).unwrap();
    assert_eq!(kind(parts.fork_part(elsewhere.stream(), 0, 1, 4 << 20)), "Unsupported");
    assert_eq!(parts.parts(1..2).len(), 0);
}
