//! `leasehold-workbench bench alloc`: the allocator and its peers, in one process and in
//! alternation.
//!
//! Every allocator runs every workload of [`Workload`] in the same code. Rounds alternate between
//! the allocators, so that disturbances affect all equally; figures are medians over the rounds.

use crate::commands::open;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{Buffer, DeviceId, Lease, Runtime};
use leasehold_alloc::AllocatorConfig;
use leasehold_cli::commands::run::parse_device;
use leasehold_cli::commands::{percentile, print_json};
use leasehold_cli::failure::Failure;
use leasehold_cli::host;
use leasehold_cli::table::Table;
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::replay::{Options, replay_virtual};
use leasehold_sim::memory::trace::{RESNET50_TRAIN, Trace};
use leasehold_sim::memory::workload::{Own, Sample, Subject, Workload};
use serde::Serialize;
use std::alloc::GlobalAlloc;
use std::collections::BTreeMap;
use std::io::Write;
use std::path::PathBuf;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct AllocArguments {
    /// Numbers of threads, separated by commas; one, and as many as the machine has, when left out
    #[arg(long, value_delimiter = ',', value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<Vec<u16>>,
    /// Only workloads whose name contains this
    #[arg(long, value_name = "TEXT")]
    workload: Option<String>,
    /// Rounds of which the median is taken
    #[arg(long, default_value_t = 5, value_parser = clap::value_parser!(u32).range(1..=1000))]
    rounds: u32,
    /// The most pairs of a round; fewer where a pair takes long
    #[arg(long, default_value_t = 100_000, value_parser = clap::value_parser!(u64).range(100..=100_000_000))]
    pairs: u64,
    /// A trace to replay, beside the one that is part of the program
    #[arg(long, value_name = "FILE")]
    trace: Vec<PathBuf>,
    /// The device whose memory `Runtime::alloc` gives
    #[arg(long, default_value = "cpu:0", value_parser = parse_device)]
    device: DeviceId,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// The origin of an allocator.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase")]
enum Kind {
    Own,
    Peer,
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    threads: Vec<usize>,
    rounds: u32,
    workloads: Vec<Figure>,
    replays: Vec<ReplayFigure>,
    /// The plain allocator's time of a pair with this number of live blocks, relative to its time
    /// with 64.
    growth: BTreeMap<&'static str, BTreeMap<&'static str, f64>>,
    /// The plain allocator's pairs per second with the maximum number of threads, relative to one
    /// thread.
    speedup: BTreeMap<&'static str, f64>,
}

#[derive(Debug, Serialize)]
struct Figure {
    workload: &'static str,
    threads: usize,
    allocator: &'static str,
    kind: Kind,
    /// Nanoseconds of a pair: one allocation and one free. `null` if the allocator cannot run this
    /// workload here.
    ns: Option<f64>,
    ns_best: Option<f64>,
    mega_pairs: Option<f64>,
    /// The time relative to the plain allocator's: the median over the rounds.
    slower: Option<f64>,
}

#[derive(Debug, Serialize)]
struct ReplayFigure {
    trace: String,
    ns_per_op: f64,
    /// Peak reserved bytes relative to peak requested bytes.
    ratio: f64,
}

/// An allocator that is ready for workloads.
trait Runs {
    fn run(
        &self,
        workload: Workload,
        threads: usize,
        pairs: u64,
    ) -> leasehold::Result<Option<Sample>>;
}

struct Ready<S>(S);

impl<S: Subject> Runs for Ready<S> {
    fn run(
        &self,
        workload: Workload,
        threads: usize,
        pairs: u64,
    ) -> leasehold::Result<Option<Sample>> {
        workload.run(&self.0, threads, pairs)
    }
}

/// An allocator of the report: its constructor, and its limits.
struct Contender {
    name: &'static str,
    kind: Kind,
    make: fn(DeviceId) -> Result<Box<dyn Runs>, Failure>,
    /// The maximum number of live bytes over all threads, because a host heap touches every block.
    most_bytes: u64,
}

const DEVICE: u64 = 1 << 40;

fn own(marks: bool) -> Result<Box<dyn Runs>, Failure> {
    let fake = Box::new(FakeBacking::new(DEVICE));
    Ok(Box::new(Ready(Own::new(fake, AllocatorConfig::default(), marks)?)))
}

/// All allocators, with the memory for `Runtime::alloc` and for heaps of this process.
fn contenders(Room { device_bytes, heap_bytes }: Room) -> Vec<Contender> {
    let whole =
        Contender { name: "leasehold", kind: Kind::Own, make: |_| own(false), most_bytes: DEVICE };
    vec![
        Contender { name: "leasehold, uses marked", make: |_| own(true), ..whole },
        Contender {
            name: "leasehold, Runtime::alloc",
            make: |device| Ok(Box::new(Ready(Whole(open(device, None)?)))),
            most_bytes: device_bytes,
            ..whole
        },
        Contender {
            name: "system allocator",
            kind: Kind::Peer,
            make: |_| Ok(Box::new(Ready(Heap(std::alloc::System)))),
            most_bytes: heap_bytes,
        },
        #[cfg(feature = "mimalloc")]
        Contender {
            name: "mimalloc",
            kind: Kind::Peer,
            make: |_| Ok(Box::new(Ready(Heap(mimalloc::MiMalloc)))),
            most_bytes: heap_bytes,
        },
        whole,
    ]
}

/// The memory for the live blocks of workloads.
#[derive(Debug, Clone, Copy)]
struct Room {
    /// In the memory of the device.
    device_bytes: u64,
    /// In a heap of this process.
    heap_bytes: u64,
}

impl Room {
    /// Half of the memory that is free now.
    fn now(device: DeviceId) -> Result<Room, Failure> {
        Ok(Room {
            device_bytes: open(device, None)?.info().memory.free / 2,
            heap_bytes: host::available()? / 2,
        })
    }
}

/// The complete path: a runtime on a device.
struct Whole(Runtime);

impl Subject for Whole {
    type Block = Lease<Buffer>;
    /// The runtime of a stream.
    type Stream = Runtime;

    fn stream(&self) -> leasehold::Result<Runtime> {
        self.0.create_stream().map(|stream| stream.runtime())
    }

    #[inline]
    fn alloc(&self, on: &Runtime, size: u64) -> Option<Lease<Buffer>> {
        on.alloc(size).ok()
    }

    #[inline]
    fn free(&self, _: &Runtime, block: Lease<Buffer>) {
        drop(block);
    }
}

/// A heap of the process. Its blocks have `malloc`'s alignment, for which it is fastest.
struct Heap<A>(A);

struct HeapBlock(*mut u8, std::alloc::Layout);

// SAFETY: the block owns its memory, which the heap takes back from any thread.
unsafe impl Send for HeapBlock {}

impl<A: GlobalAlloc + Sync> Subject for Heap<A> {
    type Block = HeapBlock;
    type Stream = ();

    fn stream(&self) -> leasehold::Result<()> {
        Ok(())
    }

    #[inline]
    fn alloc(&self, (): &(), size: u64) -> Option<HeapBlock> {
        let layout =
            std::alloc::Layout::from_size_align(usize::try_from(size.max(1)).ok()?, 16).ok()?;
        // SAFETY: the layout has a size.
        let at = unsafe { self.0.alloc(layout) };
        (!at.is_null()).then_some(HeapBlock(at, layout))
    }

    #[inline]
    fn free(&self, (): &(), HeapBlock(at, layout): HeapBlock) {
        // SAFETY: `alloc` returned the block with this layout.
        unsafe { self.0.dealloc(at, layout) };
    }
}

impl Contender {
    fn bears(&self, workload: Workload, threads: usize) -> bool {
        workload.live_bytes().saturating_mul(threads as u64) / 4 * 5 <= self.most_bytes
    }
}

/// The approximate time of a round of one allocator, in nanoseconds.
const ROUND: f64 = 40e6;
/// The maximum time to fill the memory of a workload, in nanoseconds, estimated from the time of a
/// pair.
const HOPELESS: f64 = 0.5e9;
/// If a trial takes this long, the trial is the measurement.
const LONG: Duration = Duration::from_secs(4);

fn median(values: &[f64]) -> f64 {
    percentile(values, 0.5)
}

pub(crate) fn run(a: &AllocArguments) -> Result<(), Failure> {
    let most = std::thread::available_parallelism().map_or(1, usize::from);
    let mut threads: Vec<usize> = a
        .threads
        .as_ref()
        .map_or_else(|| vec![1, most], |t| t.iter().map(|&n| usize::from(n)).collect());
    threads.sort_unstable();
    threads.dedup();
    let workloads: Vec<_> = Workload::all()
        .into_iter()
        .filter(|w| a.workload.as_ref().is_none_or(|part| w.0.contains(part)))
        .collect();
    if workloads.is_empty() {
        let names: Vec<_> = Workload::all().iter().map(|w| w.0).collect();
        let wanted = a.workload.as_deref().unwrap_or_default();
        return Err(Failure::misuse(format!("--workload {wanted}: none of {}", names.join(", "))));
    }
    let mut traces = Vec::new();
    if a.workload.is_none() {
        traces
            .push(("resnet50_train".to_owned(), Trace::read(RESNET50_TRAIN, "the bundled trace")?));
    }
    for path in &a.trace {
        traces.push((path.display().to_string(), Trace::open(path)?));
    }

    let bar = ProgressBar::new((threads.len() * workloads.len() + traces.len()) as u64);
    if a.json {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {msg}") {
        bar.set_style(style);
    }
    let room = Room::now(a.device)?;
    let mut figures = Vec::new();
    for &n in &threads {
        for &(name, workload) in &workloads {
            bar.set_message(name);
            cell(name, workload, n, a, room, &mut figures)?;
            bar.inc(1);
        }
    }
    let mut replays = Vec::new();
    for (name, trace) in &traces {
        bar.set_message(name.clone());
        replays.push(replay(name, trace, a.rounds)?);
        bar.inc(1);
    }
    bar.finish_and_clear();
    let report = Report {
        device: a.device.to_string(),
        growth: growth(&figures),
        speedup: speedup(&figures),
        threads,
        rounds: a.rounds,
        workloads: figures,
        replays,
    };
    if a.json { print_json(&report) } else { print(&report) }
}

/// Returns whether an allocator was so slow with fewer live blocks that this workload would take
/// too long.
fn too_slow(allocator: &str, workload: Workload, threads: usize, figures: &[Figure]) -> bool {
    let Workload::Random { live, least, most } = workload else { return false };
    let fewer: Vec<&str> = Workload::all()
        .into_iter()
        .filter(|(_, w)| matches!(*w, Workload::Random { live: l, least: s, most: m } if l < live && (s, m) == (least, most)))
        .map(|(name, _)| name)
        .collect();
    figures.iter().any(|f| {
        f.allocator == allocator
            && f.threads == threads
            && fewer.contains(&f.workload)
            && f.ns.is_none_or(|ns| ns * live as f64 > HOPELESS)
    })
}

/// Runs one workload on all allocators, in alternation.
fn cell(
    name: &'static str,
    workload: Workload,
    threads: usize,
    a: &AllocArguments,
    room: Room,
    out: &mut Vec<Figure>,
) -> Result<(), Failure> {
    let mut all = Vec::new();
    // The plain allocator is last in the list and first in the table.
    for contender in contenders(room).into_iter().rev() {
        let fit =
            contender.bears(workload, threads) && !too_slow(contender.name, workload, threads, out);
        let mut ready = if fit { Some((contender.make)(a.device)?) } else { None };
        let (mut pairs, mut samples) = (0, Vec::<Sample>::new());
        if let Some(subject) = &ready {
            let began = Instant::now();
            match subject.run(workload, threads, 500)? {
                // Filling the memory takes most of the time in every round: one sample is enough.
                Some(sample) if began.elapsed() > LONG => {
                    samples.push(sample);
                    ready = None;
                }
                Some(sample) => {
                    pairs = ((ROUND / sample.ns.max(1.0)) as u64).clamp(500, a.pairs.max(500))
                }
                None => ready = None,
            }
        }
        all.push((contender, ready, pairs, samples));
    }
    for _ in 0..a.rounds {
        for (_, ready, pairs, samples) in &mut all {
            if let Some(subject) = ready
                && let Some(sample) = subject.run(workload, threads, *pairs)?
            {
                samples.push(sample);
            }
        }
    }
    let plain: Vec<f64> = all.first().map_or_else(Vec::new, |c| c.3.iter().map(|s| s.ns).collect());
    for (contender, _, _, samples) in &all {
        let of = |f: fn(&Sample) -> f64| {
            let values: Vec<f64> = samples.iter().map(f).collect();
            (!values.is_empty()).then(|| median(&values))
        };
        let ratios: Vec<f64> = samples.iter().zip(&plain).map(|(s, own)| s.ns / own).collect();
        out.push(Figure {
            workload: name,
            threads,
            allocator: contender.name,
            kind: contender.kind,
            ns: of(|s| s.ns),
            ns_best: of(|s| s.ns_best),
            mega_pairs: of(|s| s.mega_pairs),
            slower: (!ratios.is_empty()).then(|| median(&ratios)),
        });
    }
    Ok(())
}

/// Replays a trace on Leasehold's allocator: real peers are in `bench/peers`.
fn replay(name: &str, trace: &Trace, rounds: u32) -> Result<ReplayFigure, Failure> {
    let reports = (0..rounds).map(|_| replay_virtual(trace, &Options::default()));
    let reports = reports.collect::<leasehold::Result<Vec<_>>>()?;
    let ns: Vec<f64> = reports.iter().map(|r| r.ns_per_op.mean).collect();
    let ratio = reports.last().map_or(0.0, |r| r.ratio);
    Ok(ReplayFigure { trace: name.to_owned(), ns_per_op: median(&ns), ratio })
}

fn plain(figures: &[Figure]) -> impl Iterator<Item = (&Figure, f64)> {
    figures.iter().filter(|f| f.allocator == "leasehold").filter_map(|f| Some((f, f.ns?)))
}

fn growth(figures: &[Figure]) -> BTreeMap<&'static str, BTreeMap<&'static str, f64>> {
    let mut out: BTreeMap<_, BTreeMap<_, _>> = BTreeMap::new();
    for (f, ns) in plain(figures).filter(|(f, _)| f.threads == 1) {
        let Some((sizes, live)) =
            f.workload.split_once(", ").filter(|(_, live)| live.ends_with(" live"))
        else {
            continue;
        };
        let base = plain(figures)
            .find(|(b, _)| b.threads == 1 && b.workload == format!("{sizes}, 64 live"));
        if let Some((_, base)) = base {
            out.entry(sizes).or_default().insert(live, ns / base);
        }
    }
    out
}

fn speedup(figures: &[Figure]) -> BTreeMap<&'static str, f64> {
    let mut out = BTreeMap::new();
    for (f, _) in plain(figures).filter(|(f, _)| f.threads == 1) {
        let most = plain(figures)
            .filter(|(m, _)| m.workload == f.workload && m.threads > 1)
            .max_by_key(|m| m.0.threads);
        if let Some((m, _)) = most
            && let (Some(many), Some(one)) = (m.mega_pairs, f.mega_pairs)
        {
            out.insert(f.workload, many / one);
        }
    }
    out
}

fn print(r: &Report) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let mut names: Vec<&str> = Vec::new();
    for f in &r.workloads {
        if !names.contains(&f.allocator) {
            names.push(f.allocator);
        }
    }
    for (i, name) in names.iter().enumerate() {
        writeln!(out, "{}: {name}", i + 1)?;
    }
    writeln!(out, "Runtime::alloc is on {}", r.device)?;
    for &threads in &r.threads {
        let many = if threads == 1 { "" } else { "s" };
        writeln!(out, "\nns a pair, {threads} thread{many}; in brackets: by the time of 1")?;
        let mut table = Table::default();
        table.row(std::iter::once(String::new()).chain((1..=names.len()).map(|i| i.to_string())));
        let here: Vec<_> = r.workloads.iter().filter(|f| f.threads == threads).collect();
        for row in here.chunk_by(|a, b| a.workload == b.workload) {
            let cell = |f: &&Figure| match (f.ns, f.slower) {
                (Some(ns), Some(slower)) if f.allocator != "leasehold" => {
                    format!("{ns:.0} ({slower:.1})")
                }
                (Some(ns), _) => format!("{ns:.0}"),
                _ => "-".to_owned(),
            };
            table.row(std::iter::once(row[0].workload.to_owned()).chain(row.iter().map(cell)));
        }
        write!(out, "{table}")?;
    }
    if !r.speedup.is_empty() {
        writeln!(
            out,
            "\npairs per second with {} threads, by one's",
            r.threads.last().copied().unwrap_or(1)
        )?;
        let mut table = Table::default();
        r.speedup.iter().for_each(|(w, x)| table.row([(*w).to_owned(), format!("{x:.2}")]));
        write!(out, "{table}")?;
    }
    if !r.replays.is_empty() {
        writeln!(out)?;
        let mut table = Table::default();
        table.row(["replay", "ns per operation", "reserved by requested"]);
        for f in &r.replays {
            table.row([f.trace.clone(), format!("{:.0}", f.ns_per_op), format!("{:.3}", f.ratio)]);
        }
        write!(out, "{table}")?;
    }
    Ok(())
}
