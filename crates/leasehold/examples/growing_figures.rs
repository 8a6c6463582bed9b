//! Figures of memory that grows in parts: a growth on the host, a step whose memory is mapped
//! ahead, and a pool of parts that leaves the device and comes back.
//!
//! `cargo run --release -p leasehold --features cuda --example growing_figures -- cuda:0 16384`
//!
//! The second argument is the size of the pool in MiB: 64 without it. The third one, `--sim`, takes
//! a simulated CUDA driver: its times mean nothing, and the calls are the same.

mod timed;

use leasehold::kernel::{Grid, KernelCheck, KernelDesc, KernelSource};
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::prelude::*;
use leasehold::{Context, Growing};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelBody, KernelRegistry, KernelSpec, MachineConfig};
use std::sync::Arc;
use std::sync::mpsc::channel;
use std::time::{Duration, Instant};
use timed::timed;

const PARTS: usize = 16;
/// Growths of one part, and steps of all.
const GROWTHS: usize = 64;
const STEPS: usize = 24;

const BINDINGS: [Access; 3] = [Access::ReadWrite, Access::Read, Access::Write];

/// Of each part: writes `value` to its first word unless that is 0, and gives the word. All ones
/// for a part without memory.
const FIRST_WORDS: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry first_words(.param .u64 memory, .param .u64 limits, .param .u64 out,
                            .param .u64 each, .param .u32 value, .param .u32 none) {
    .reg .pred %q<3>;
    .reg .b32 %r<5>;
    .reg .b64 %p<10>;
    ld.param.u64 %p0, [memory];
    ld.param.u64 %p1, [limits];
    ld.param.u64 %p2, [out];
    ld.param.u64 %p3, [each];
    ld.param.u32 %r0, [value];
    cvta.to.global.u64 %p0, %p0;
    cvta.to.global.u64 %p1, %p1;
    cvta.to.global.u64 %p2, %p2;
    mov.u32 %r1, %tid.x;
    mul.wide.u32 %p4, %r1, 8;
    add.s64 %p4, %p1, %p4;
    ld.global.u64 %p5, [%p4];
    mov.u32 %r2, -1;
    setp.lt.u64 %q0, %p5, 4;
    @%q0 bra found;
    cvt.u64.u32 %p6, %r1;
    mul.lo.u64 %p6, %p6, %p3;
    add.s64 %p6, %p0, %p6;
    setp.eq.u32 %q1, %r0, 0;
    @%q1 bra written;
    add.u32 %r3, %r0, %r1;
    st.global.u32 [%p6], %r3;
written:
    ld.global.u32 %r2, [%p6];
found:
    mul.wide.u32 %p7, %r1, 4;
    add.s64 %p7, %p2, %p7;
    st.global.u32 [%p7], %r2;
    ret;
}
";

unsafe fn first_words(args: &CpuArgs<'_>) {
    let (all, limits) = (args.pointer::<u32>(0).0, args.pointer::<u64>(1).0);
    let [each, value] = args.params::<[u64; 2]>();
    // SAFETY: the only tile has the only output.
    let out = unsafe { args.slice_mut::<u32>(2, 0, PARTS) };
    for (part, out) in out.iter_mut().enumerate() {
        *out = u32::MAX;
        // SAFETY: there is a limit for each part, which nobody writes meanwhile. A word below it
        // has memory.
        unsafe {
            if *limits.add(part) >= 4 {
                let word = all.add(part * each as usize / 4);
                if value as u32 != 0 {
                    *word = value as u32 + part as u32;
                }
                *out = *word;
            }
        }
    }
}

fn kernel() -> Result<KernelBase> {
    let check = KernelCheck::new(|launch| {
        let [each, _] = launch.params::<[u64; 2]>()?;
        let parts = PARTS as u64;
        if (launch.grid, launch.block) != ([1; 3], [PARTS as u32, 1, 1]) || each % 4 != 0 {
            return Err(Error::invalid("one block, a thread for each part, and whole words"));
        }
        launch.want(0, each.saturating_mul(parts))?;
        launch.want(1, 8 * parts)?;
        launch.want(2, 4 * parts)
    });
    let describe = |source| {
        let desc = KernelDesc::new("first_words", source, &BINDINGS, check.clone());
        desc.params_of::<[u64; 2]>().aligned(4).limited_by(0, 1)
    };
    let cuda = KernelSource::Ptx(FIRST_WORDS.into());
    // SAFETY: a launch that the check accepts touches a word of each part that has memory, each by
    // a thread of its own.
    unsafe {
        KernelBase::with_sources(vec![describe(cuda), describe(KernelSource::Cpu(first_words))])
    }
}

/// A launch over all parts.
fn look(
    stream: &Stream,
    kernel: &KernelBase,
    parts: &Growing<u8>,
    out: &Array<u32>,
    value: u64,
) -> Result<()> {
    let operands = [parts.reservation(Access::ReadWrite), parts.limit(), out.write()];
    let grid = Grid::new([1, 1, 1]).threads([PARTS as u32, 1, 1]);
    stream.launch(kernel, &operands, &[parts.most() as u64, value], grid).map(drop)
}

/// CUDA over a simulated driver.
fn simulated(device: DeviceId) -> Result<Runtime> {
    let kernels = KernelRegistry::new();
    // SAFETY: the kernel's check accepts launches with a limit and an output for each part.
    let body = unsafe { KernelBody::cpu(first_words) };
    kernels.register("first_words", KernelSpec::new(&BINDINGS, 16, body).limited_by(0, 1));
    let driver = SimDriver::new(SimDriverConfig::new(MachineConfig::seed(1).kernels(kernels)))?;
    let backend = CudaBackend::with_ops(Arc::new(driver), CudaConfig::default())?;
    Context::with_backends(vec![Arc::new(backend)]).runtime(device)
}

fn seconds(mut call: impl FnMut() -> Result<()>) -> Result<f64> {
    let begun = Instant::now();
    call()?;
    Ok(begun.elapsed().as_secs_f64())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device = arguments.next().unwrap_or_else(|| "cpu:0".into()).parse()?;
    let mib: u64 = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(64);
    let runtime = match arguments.next().as_deref() {
        Some("--sim") => simulated(device)?,
        _ => Runtime::open(device)?,
    };
    let (stream, granule) = (runtime.stream(), runtime.allocator().caps().granule as usize);
    println!("{device}, granules of {} KiB, {PARTS} parts", granule >> 10);

    // A growth of one part by a granule.
    let parts = Growing::<u8>::with_parts(&runtime, PARTS, (GROWTHS + 1) * granule)?;
    let bytes = |i: usize| (i + 1) * granule;
    timed("grow by a new granule", GROWTHS, |i| parts.parts(0..1).grow(stream, bytes(i)))?;
    parts.parts(0..1).shrink(stream, 0)?;
    timed("grow by a granule that lies ready", GROWTHS, |i| {
        parts.parts(0..1).grow(stream, bytes(i))
    })?;
    parts.parts(0..1).shrink(stream, 0)?;
    stream.synchronize()?;
    runtime.allocator().trim(0)?;

    // A step of all parts, beside a thread that maps the granules after the next ones.
    let (ask, asked) = channel();
    let helper = {
        let parts = parts.clone();
        std::thread::spawn(move || {
            asked.iter().try_for_each(|bytes| parts.parts(0..PARTS).prepare(bytes))
        })
    };
    parts.parts(0..PARTS).prepare(bytes(0))?;
    let mut late = 0;
    let mut times = Vec::new();
    for i in 0..STEPS {
        let begun = Instant::now();
        let ready = parts.parts(0..PARTS).try_grow(stream, bytes(i))?;
        // (A helper that has failed says so at its end.)
        let _ = ask.send(bytes(i + 1));
        if ready {
            times.push(begun.elapsed().as_secs_f64() * 1e6);
        } else {
            late += 1;
        }
        std::thread::sleep(Duration::from_millis(8));
    }
    drop(ask);
    helper.join().map_err(|_| Error::state("the thread that maps ahead"))??;
    times.sort_by(f64::total_cmp);
    let half = times.get(times.len() / 2).copied().unwrap_or(f64::NAN);
    println!("step of {PARTS} parts, mapped ahead: {half:.1} us, {late} of {STEPS} came too early");
    drop(parts);
    runtime.allocator().trim(0)?;

    // A pool of parts leaves the device and comes back, under a graph.
    let pool = Pool::new(&runtime, "caches", PoolKind::Suspendable)?;
    let each = ((mib as usize) << 20) / PARTS;
    let (parts, kernel) = (pool.growing::<u8>(PARTS, each)?, kernel()?);
    let out = runtime.zeros::<u32>(PARTS)?;
    let graph = runtime.record_graph(|r| look(r.stream(), &kernel, &parts, &out, 0))?;
    parts.parts(0..PARTS).grow(stream, parts.most())?;
    look(stream, &kernel, &parts, &out, 1000)?;
    // The first suspension pins the host memory.
    let mut best = [f64::INFINITY; 4];
    for round in 0..4 {
        let times =
            [seconds(|| pool.suspend(Contents::Keep).map(drop))?, seconds(|| pool.resume())?];
        graph.launch()?;
        let want: Vec<u32> = (1000..1000 + PARTS as u32).collect();
        assert_eq!(runtime.to_vec(&out)?, want, "a graph from before the suspension");
        if round > 0 {
            (best[0], best[1]) = (best[0].min(times[0]), best[1].min(times[1]));
        }
    }
    drop((graph, parts, pool));
    let bytes = (each.next_multiple_of(granule) * PARTS) as u64;
    let (memory, pinned) = (runtime.alloc(bytes)?, runtime.alloc_pinned(bytes)?);
    stream.fill(memory.view(), 7u8)?;
    stream.synchronize()?;
    for _ in 0..3 {
        for (time, to, from) in [(2, &pinned, &memory), (3, &memory, &pinned)] {
            let copied = seconds(|| {
                stream.copy(to.view(), from.view())?;
                stream.synchronize()
            })?;
            best[time] = best[time].min(copied);
        }
    }
    let gib = bytes as f64 / f64::from(1 << 30);
    let [away, back, down, up] = best;
    println!("{gib:.2} GiB in parts: given back in {away:.3} s, taken again in {back:.3} s");
    println!("a plain copy to pinned memory {down:.3} s, and back {up:.3} s");
    println!("ratio {:.3}", (away + back) / (down + up));
    runtime.close(Duration::from_secs(10))
}
