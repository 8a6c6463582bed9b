//! `leasehold-workbench bench cuda`: the runtime's overhead over the driver's own calls. Both sides
//! use the same bindings in the same process, in alternation.

use crate::commands::open;
use leasehold::kernel::{KernelCheck, KernelDesc, KernelSource};
use leasehold::{
    Access, BackendKind, Buffer, DeviceId, EventFlags, KernelBase, Layout, Lease, Runtime, Stream,
    View,
};
use leasehold_alloc::{Allocator, AllocatorConfig, On};
use leasehold_cli::commands::{percentile, print_json};
use leasehold_cli::failure::Failure;
use leasehold_cli::table::Table;
use leasehold_cuda::driver::ops::{CopyKind, DeviceOps, SourceOrder};
use leasehold_cuda::driver::real::RealDriver;
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::VirtualStream;
use leasehold_sim::traces::figures::{Figure, LARGEST, PIECE, PIECES, RawLoop, places};
use leasehold_sim::traces::kernels::PTX;
use serde::Serialize;
use std::io::Write;
use std::sync::Barrier;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct CudaArguments {
    /// The device's number
    #[arg(long, default_value_t = 0)]
    ordinal: u32,
    /// Samples of each figure
    #[arg(long, default_value_t = 25, value_parser = clap::value_parser!(u32).range(3..=10_000))]
    samples: u32,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    figures: Vec<Pair>,
    allocations: Vec<Threads>,
}

/// Allocation and drop by several threads, each on its own stream.
#[derive(Debug, Serialize)]
struct Threads {
    bytes: u64,
    threads: usize,
    /// Nanoseconds of a pair: of the median thread, the median of the repetitions.
    ns: f64,
    /// The throughput of all threads, relative to the same multiple of one thread's; the median of
    /// the repetitions.
    linear: f64,
    /// The same pair without sharing: each thread has its own allocator without a device. This
    /// shows the machine's limit.
    apart_ns: f64,
    apart_linear: f64,
}

/// Copies of this many bytes and more show their rates. That of a small one is the call's.
const RATES: f64 = 32e6;

/// Pairs of a round, and rounds.
const PAIRS: u32 = 20_000;
const ROUNDS: usize = 15;
/// The number of repetitions over all sizes and thread counts, so that disturbances are spread
/// evenly.
const REPEATS: usize = 5;
const SIZES: [u64; 4] = [512, 64 << 10, 1 << 20, 16 << 20];
const CREWS: [usize; 4] = [1, 2, 4, 8];

/// The median thread's time for a pair among `threads` threads, in nanoseconds. Each thread first
/// prepares its state; then all start together.
fn crew<T, F: FnMut() -> bool>(
    threads: usize,
    make: impl Fn() -> leasehold::Result<T> + Sync,
    pair: impl Fn(T) -> F + Sync,
) -> Result<f64, Failure> {
    let start = Barrier::new(threads);
    let one = || -> leasehold::Result<f64> {
        let made = make();
        start.wait();
        let mut pair = pair(made?);
        let mut times = Vec::new();
        let mut fine = pair();
        for _ in 0..ROUNDS {
            let begin = Instant::now();
            for _ in 0..PAIRS {
                fine &= pair();
            }
            times.push(begin.elapsed().as_nanos() as f64 / f64::from(PAIRS));
        }
        if !fine {
            return Err(leasehold::Error::InvalidState("an allocation failed".into()));
        }
        Ok(percentile(&times, 0.5))
    };
    let times = leasehold_core::threads::run((0..threads).map(|_| one))?
        .into_iter()
        .collect::<leasehold::Result<Vec<f64>>>()?;
    Ok(percentile(&times, 0.5))
}

fn shared(runtime: &Runtime, bytes: u64, threads: usize) -> Result<f64, Failure> {
    let pair = |runtime: Runtime| move || runtime.alloc(bytes).is_ok();
    crew(threads, || runtime.create_stream().map(|stream| stream.runtime()), pair)
}

fn apart(bytes: u64, threads: usize) -> Result<f64, Failure> {
    let make = || {
        let allocator =
            Allocator::new(Box::new(FakeBacking::new(1 << 37)), AllocatorConfig::default())?;
        Ok((allocator, VirtualStream::new()?))
    };
    crew(threads, make, |(allocator, stream)| {
        move || allocator.alloc(Layout::new(bytes), On::new(&stream)).is_ok()
    })
}

fn scaling(runtime: &Runtime) -> Result<Vec<Threads>, Failure> {
    // By size and by threads: a time for each repetition.
    let mut ours = [[[0.0; REPEATS]; CREWS.len()]; SIZES.len()];
    let mut alone = ours;
    for repeat in 0..REPEATS {
        for (i, &bytes) in SIZES.iter().enumerate() {
            for (j, &threads) in CREWS.iter().enumerate() {
                ours[i][j][repeat] = shared(runtime, bytes, threads)?;
                alone[i][j][repeat] = apart(bytes, threads)?;
            }
        }
    }
    let linear = |of: &[[f64; REPEATS]], j: usize| {
        let by: Vec<f64> = of[0].iter().zip(&of[j]).map(|(one, all)| one / all).collect();
        percentile(&by, 0.5)
    };
    let mut all = Vec::new();
    for (i, &bytes) in SIZES.iter().enumerate() {
        for (j, &threads) in CREWS.iter().enumerate() {
            all.push(Threads {
                bytes,
                threads,
                ns: percentile(&ours[i][j], 0.5),
                linear: linear(&ours[i], j),
                apart_ns: percentile(&alone[i][j], 0.5),
                apart_linear: linear(&alone[i], j),
            });
        }
    }
    Ok(all)
}

/// A figure of the runtime with the driver's.
#[derive(Debug, Serialize)]
struct Pair {
    name: String,
    /// Nanoseconds of a call, the median.
    ns: f64,
    /// Nanoseconds until the device has finished, the median.
    total_ns: f64,
    driver: String,
    driver_ns: f64,
    driver_total_ns: f64,
    /// The ratio of the calls.
    ratio: f64,
    /// The ratio until the device has finished.
    total_ratio: f64,
    /// Gigabytes per second until the device has finished. 0 for a call that moves nothing.
    rate: f64,
    driver_rate: f64,
}

impl Pair {
    fn new(ours: Figure, driver: Figure) -> Self {
        Self {
            ratio: ours.host / driver.host,
            total_ratio: ours.total / driver.total,
            rate: ours.gigabytes_per_second(),
            driver_rate: driver.gigabytes_per_second(),
            name: ours.name,
            ns: ours.host,
            total_ns: ours.total,
            driver: driver.name,
            driver_ns: driver.host,
            driver_total_ns: driver.total,
        }
    }
}

/// The runtime's side.
struct Ours {
    runtime: Runtime,
    kernel: KernelBase,
    buffers: [Lease<Buffer>; 3],
}

impl Ours {
    fn new(ordinal: u32) -> Result<Self, Failure> {
        let runtime = open(DeviceId::new(BackendKind::Cuda, ordinal), None)?;
        let roles = [Access::Read, Access::Read, Access::Write];
        let desc =
            KernelDesc::new("nothing", KernelSource::Ptx(PTX.into()), &roles, KernelCheck::any());
        // SAFETY: the entry takes three addresses and accesses none of them.
        let kernel = unsafe { KernelBase::new(desc.entry("trace_nothing")) }?;
        let buffers = [runtime.alloc(4096)?, runtime.alloc(4096)?, runtime.alloc(4096)?];
        for buffer in &buffers {
            runtime.stream().fill(buffer.view(), 0u8)?;
        }
        Ok(Self { runtime, kernel, buffers })
    }

    fn launch(&self, stream: &Stream) -> leasehold::Result<()> {
        let [a, b, out] = &self.buffers;
        stream.launch(&self.kernel, &[a.read(), b.read(), out.write()], &(), (1, 32))
    }

    fn figure(
        &self,
        name: String,
        samples: u32,
        batch: u32,
        bytes: u64,
        call: impl FnMut() -> leasehold::Result<()>,
    ) -> leasehold::Result<Figure> {
        Figure::measure(name, samples, batch, bytes, call, || self.runtime.stream().synchronize())
    }
}

/// Rounds of the loops of graphs.
const LOOP: u32 = 1000;

/// A graph with a loop, in turns with the same graph of the driver's own nodes.
fn loops(ours: &Ours, raw: &RawLoop<'_>, samples: u32) -> Result<Pair, Failure> {
    let runtime = &ours.runtime;
    let desc = KernelDesc::new(
        "down",
        KernelSource::Ptx(PTX.into()),
        &[Access::ReadWrite],
        KernelCheck::any(),
    );
    // SAFETY: the entry takes one address, of a word that it counts down.
    let down = unsafe { KernelBase::new(desc.entry("trace_down")) }?;
    let left = runtime.zeros::<u32>(1)?;
    let graph = runtime.record_graph(|r| {
        r.stream().fill(left.view(), LOOP)?;
        r.stream().record_while(&left, |body| {
            body.stream().launch(&down, &[left.read_write()], &(), (1, 1))
        })
    })?;
    let mut call = || graph.launch().map(drop);
    let mut wait = || runtime.stream().synchronize();
    let [ours, driver] = raw.rounds(LOOP, samples, (&mut call, &mut wait))?;
    Ok(Pair::new(ours, driver))
}

/// Several copies by one call, and one by one, in each direction. The driver's batch reads its
/// sources in the order that the runtime's may: those in host memory at any time.
fn copies(
    ours: &Ours,
    raw: &RawLoop<'_>,
    samples: u32,
    pairs: &mut Vec<Pair>,
) -> Result<(), Failure> {
    let runtime = &ours.runtime;
    let (sparse, dense) = (runtime.alloc(2 * PIECES * PIECE)?, runtime.alloc(PIECES * PIECE)?);
    let pinned = runtime.alloc_pinned(PIECES * PIECE)?;
    runtime.stream().fill(sparse.view(), 1u8)?;
    runtime.stream().copy(pinned.view(), sparse.part(..(PIECES * PIECE) as usize)?)?;
    runtime.synchronize()?;
    for (way, kind, order) in [
        ("up", CopyKind::HostToDevice, SourceOrder::Any),
        ("down", CopyKind::DeviceToHost, SourceOrder::Stream),
        ("within", CopyKind::DeviceToDevice, SourceOrder::Stream),
    ] {
        let pieces = (0..PIECES)
            .map(places)
            .map(|(near, far)| {
                let at = |from: u64| from as usize..(from + PIECE) as usize;
                Ok(match kind {
                    CopyKind::HostToDevice => (sparse.part(at(far))?, pinned.part(at(near))?),
                    CopyKind::DeviceToHost => (pinned.part(at(near))?, sparse.part(at(far))?),
                    CopyKind::DeviceToDevice => (dense.part(at(near))?, sparse.part(at(far))?),
                })
            })
            .collect::<leasehold::Result<Vec<_>>>()?;
        let (name, bytes) = (format!("{PIECES} copies {way} of {PIECE} bytes"), PIECES * PIECE);
        let together = ours.figure(format!("{name}, one call"), samples, 4, bytes, || {
            runtime.stream().copy_batch(&pieces)
        })?;
        if order != SourceOrder::Stream {
            let ordered = raw.copies(kind, Some(SourceOrder::Stream), samples)?;
            pairs.push(Pair::new(together.clone(), ordered));
        }
        pairs.push(Pair::new(together, raw.copies(kind, Some(order), samples)?));
        let single = ours.figure(format!("{name}, one by one"), samples, 4, bytes, || {
            pieces.iter().try_for_each(|&(to, from)| runtime.stream().copy(to, from))
        })?;
        pairs.push(Pair::new(single, raw.copies(kind, None, samples)?));
    }
    Ok(())
}

fn measure(samples: u32, ordinal: u32) -> Result<(Vec<Pair>, Vec<Threads>), Failure> {
    let driver = RealDriver::new();
    driver.init()?;
    let raw = RawLoop::new(&driver, ordinal)?;
    let ours = Ours::new(ordinal)?;
    let runtime = &ours.runtime;
    let mut pairs = Vec::new();

    let launch = ours.figure("launch, three buffers".into(), samples, 256, 0, || {
        ours.launch(runtime.stream())
    })?;
    pairs.push(Pair::new(launch, raw.launch(samples)?));

    for nodes in [1u32, 1000] {
        let graph =
            runtime.record_graph(|r| (0..nodes).try_for_each(|_| ours.launch(r.stream())))?;
        let replay = ours.figure(format!("graph launch, {nodes} nodes"), samples, 4, 0, || {
            graph.launch().map(drop)
        })?;
        pairs.push(Pair::new(replay, raw.graph(nodes, samples)?));
    }

    if driver.device_properties(ordinal)?.conditional_nodes {
        pairs.push(loops(&ours, &raw, samples)?);
    }

    for bytes in [4096u64, 1 << 20, 64 << 20, LARGEST] {
        let device = runtime.alloc(bytes)?;
        let pinned = runtime.alloc_pinned(bytes)?;
        let batch = if bytes > 1 << 20 { 4 } else { 64 };
        runtime.stream().fill(device.view(), 1u8)?;
        for (direction, kind) in
            [("download", CopyKind::DeviceToHost), ("upload", CopyKind::HostToDevice)]
        {
            let figure = ours.figure(
                format!("{direction} {bytes} bytes, pinned"),
                samples,
                batch,
                bytes,
                || match kind {
                    CopyKind::HostToDevice => {
                        runtime.stream().copy_pinned(device.view(), pinned.view())
                    }
                    _ => runtime.stream().copy_pinned(pinned.view(), device.view()),
                },
            )?;
            pairs.push(Pair::new(figure, raw.pinned_copy(kind, bytes, samples)?));
        }
        let mut host = vec![1u8; bytes as usize];
        let batch = if bytes > 1 << 20 { 2 } else { 16 };
        let up =
            ours.figure(format!("upload {bytes} bytes, pageable"), samples, batch, bytes, || {
                runtime.stream().upload(device.view(), &host)
            })?;
        pairs.push(Pair::new(up, raw.pageable_copy(CopyKind::HostToDevice, bytes, samples)?));
        let up = ours.figure(
            format!("upload {bytes} bytes, pageable, and wait"),
            samples,
            batch,
            bytes,
            || runtime.stream().upload_blocking(device.view(), &host),
        )?;
        pairs
            .push(Pair::new(up, raw.pageable_copy_waited(CopyKind::HostToDevice, bytes, samples)?));
        let down = ours.figure(
            format!("download {bytes} bytes, pageable, and wait"),
            samples,
            batch,
            bytes,
            || runtime.stream().download(&mut host, device.view()),
        )?;
        pairs.push(Pair::new(
            down,
            raw.pageable_copy_waited(CopyKind::DeviceToHost, bytes, samples)?,
        ));
    }

    if driver.device_properties(ordinal)?.copy_batch {
        copies(&ours, &raw, samples, &mut pairs)?;
    }

    for bytes in [4096u64, 1 << 20, 64 << 20] {
        let pair =
            ours.figure(format!("allocation and drop, {bytes} bytes"), samples, 64, 0, || {
                runtime.alloc(bytes).map(drop)
            })?;
        pairs.push(Pair::new(pair, raw.alloc_async_pair(bytes, samples)?));
    }
    let plain = ours.figure("allocation and drop, 1048576 bytes".into(), samples, 64, 0, || {
        runtime.alloc(1 << 20).map(drop)
    })?;
    pairs.push(Pair::new(plain, raw.alloc_pair(1 << 20, samples)?));

    let event = runtime.create_event_with(EventFlags::DISABLE_TIMING)?;
    let record =
        ours.figure("event record".into(), samples, 256, 0, || runtime.stream().record(&event))?;
    pairs.push(Pair::new(record, raw.event_record(samples)?));
    let scaling = scaling(runtime)?;
    runtime.synchronize()?;
    Ok((pairs, scaling))
}

pub(crate) fn run(arguments: &CudaArguments) -> Result<(), Failure> {
    let device = format!("cuda:{}", arguments.ordinal);
    let (figures, allocations) =
        measure(arguments.samples, arguments.ordinal).map_err(|e| e.at(&device))?;
    let report = Report { device, figures, allocations };
    if arguments.json {
        return print_json(&report);
    }
    let mut table = Table::default();
    let head = ["", "call", "driver's", "ratio", "until done", "driver's", "ratio"];
    table.head(head.into_iter().chain(["GB/s", "driver's"]));
    for f in &report.figures {
        let bytes = f.rate * f.total_ns;
        let rate = |rate: f64| if bytes < RATES { String::new() } else { format!("{rate:.1}") };
        table.row([
            f.name.clone(),
            format!("{:.0} ns", f.ns),
            format!("{:.0} ns", f.driver_ns),
            format!("{:.2}", f.ratio),
            format!("{:.0} ns", f.total_ns),
            format!("{:.0} ns", f.driver_total_ns),
            format!("{:.2}", f.total_ratio),
            rate(f.rate),
            rate(f.driver_rate),
        ]);
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    let mut table = Table::default();
    table.head([
        "allocation and drop",
        "threads",
        "of each",
        "of linear",
        "nothing shared",
        "of linear",
    ]);
    for t in &report.allocations {
        table.row([
            format!("{} bytes", t.bytes),
            t.threads.to_string(),
            format!("{:.1} ns", t.ns),
            format!("{:.0} %", t.linear * 100.0),
            format!("{:.1} ns", t.apart_ns),
            format!("{:.0} %", t.apart_linear * 100.0),
        ]);
    }
    write!(out, "{table}")?;
    Ok(())
}
