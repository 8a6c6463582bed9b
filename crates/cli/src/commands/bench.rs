//! `leasehold bench`: measurements of the runtime. These programs print figures; they are not tests
//! that fail for slowness.

use crate::commands::bench_alloc::{self, AllocArguments};
use crate::commands::bench_copy::{self, CopyArguments};
#[cfg(feature = "cuda")]
use crate::commands::bench_cuda;
use crate::commands::run::{Activations, Files, ModeReport, fits, load, parse_device};
use crate::commands::{open_measured, percentile, print_json};
use crate::failure::Failure;
use crate::table::Table;
use leasehold::DeviceId;
use leasehold_llama::{Mode, Request, Sampling, generate};
use serde::Serialize;
use std::io::Write;
use std::path::PathBuf;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The allocator beside its peers: workloads and replays
    Alloc(AllocArguments),
    /// Downloads and uploads beside a plain copy, by size and by where the host's memory begins
    Copy(CopyArguments),
    /// Handles and leases beside `Arc`
    Lease(JsonOnly),
    /// Enqueue, completion and wake-up of a CPU stream
    Stream(Common),
    /// Replay of a graph of no-ops on the CPU
    Graph(GraphArguments),
    /// Launches, graphs, copies, allocations and events on CUDA beside the driver's own calls
    #[cfg(feature = "cuda")]
    Cuda(bench_cuda::CudaArguments),
    /// Tokens per second of a model, eager and as a graph, in turns
    Decode(DecodeArguments),
    /// The memory manager for compiled code beside the plain design
    Memory(Common),
}

#[derive(Debug, clap::Args)]
struct JsonOnly {
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct Common {
    /// Threads
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, clap::Args)]
struct GraphArguments {
    #[command(flatten)]
    common: Common,
    /// Nodes of the graph
    #[arg(long, default_value_t = 1000, value_parser = clap::value_parser!(u32).range(1..=1_000_000))]
    nodes: u32,
}

#[derive(Debug, clap::Args)]
struct DecodeArguments {
    #[command(flatten)]
    common: Common,
    /// A Hugging Face directory; the bundled model when left out
    #[arg(long, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The device
    #[arg(long, default_value = "cpu:0", value_parser = parse_device)]
    device: DeviceId,
    /// Runs over a simulated driver, with the race detector on: shows that the measurement works
    /// there, and its figures say nothing of a device
    #[arg(long)]
    sim: bool,
    /// New tokens of a run
    #[arg(long, default_value_t = 64, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Runs of each mode
    #[arg(long, default_value_t = 11, value_parser = clap::value_parser!(u32).range(1..))]
    repeat: u32,
    /// The element type of activations and KV cache
    #[arg(long, value_enum, default_value_t = Activations::F32)]
    dtype: Activations,
}

/// Samples of a stream or graph measurement.
const ROUNDS: usize = 101;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Alloc(a) => bench_alloc::run(a),
        What::Copy(a) => bench_copy::run(a),
        What::Lease(a) => lease(a),
        What::Stream(a) => {
            let report = leasehold_cpu::bench::stream(a.threads.map(usize::from), ROUNDS)?;
            print(&report, a.json)
        }
        What::Graph(a) => {
            let threads = a.common.threads.map_or(1, usize::from);
            let report = leasehold_cpu::bench::graph(threads, a.nodes as usize, ROUNDS)?;
            print(&report, a.common.json)
        }
        #[cfg(feature = "cuda")]
        What::Cuda(a) => bench_cuda::run(a),
        What::Decode(a) => decode(a),
        What::Memory(a) => {
            let options = match a.threads {
                Some(threads) => leasehold_memory::bench::Options {
                    threads: usize::from(threads),
                    ..Default::default()
                },
                None => leasehold_memory::bench::Options::default(),
            };
            let report = leasehold_memory::bench::run(options)?;
            if a.json {
                return print_json(&report);
            }
            writeln!(std::io::stdout().lock(), "{report}")?;
            Ok(())
        }
    }
}

#[derive(Debug, Serialize)]
struct LeaseReport {
    figures: Vec<LeaseFigure>,
}

#[derive(Debug, Serialize)]
struct LeaseFigure {
    name: &'static str,
    ns: f64,
    /// The operation of the comparison; empty without one.
    peer: &'static str,
    peer_ns: f64,
    /// Median of the rounds' ratios.
    ratio: f64,
    /// The limit of the ratio (or, without a peer, of the time).
    limit: f64,
    within: bool,
}

fn lease(a: &JsonOnly) -> Result<(), Failure> {
    let figures: Vec<LeaseFigure> = leasehold_core::bench::run()?
        .into_iter()
        .map(|f| LeaseFigure {
            within: f.holds(),
            name: f.name,
            ns: f.ns,
            peer: f.peer,
            peer_ns: f.peer_ns,
            ratio: f.ratio,
            limit: f.limit,
        })
        .collect();
    if a.json {
        return print_json(&LeaseReport { figures });
    }
    let mut table = Table::default();
    table.row(["", "ns", "peer's ns", "ratio", "limit", "peer"]);
    for f in &figures {
        table.row([
            f.name.to_owned(),
            format!("{:.1}", f.ns),
            if f.peer.is_empty() { String::new() } else { format!("{:.1}", f.peer_ns) },
            if f.peer.is_empty() { String::new() } else { format!("{:.2}", f.ratio) },
            format!("{:.2}", f.limit),
            f.peer.to_owned(),
        ]);
    }
    write!(std::io::stdout().lock(), "{table}")?;
    Ok(())
}

/// Prints a flat report: one JSON object, or a row for each figure.
fn print(report: &impl Serialize, json: bool) -> Result<(), Failure> {
    if json {
        return print_json(report);
    }
    let value = serde_json::to_value(report)?;
    let mut table = Table::default();
    if let serde_json::Value::Object(figures) = &value {
        for (name, figure) in figures {
            let text = match figure.as_f64() {
                Some(x) if figure.is_f64() => format!("{x:.2}"),
                _ => figure.to_string(),
            };
            table.row([name.clone(), text]);
        }
    }
    write!(std::io::stdout().lock(), "{table}")?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct DecodeReport {
    model: String,
    device: String,
    /// The figures say nothing of a device.
    simulated: bool,
    threads: Option<u16>,
    tokens: u32,
    repeat: u32,
    weight_bytes: u64,
    eager: ModeReport,
    graph: ModeReport,
    /// Time of graph mode relative to eager mode: the median over the pairs of runs.
    graph_by_eager_time: f64,
    /// Weight bytes read per second in graph mode.
    gigabytes_per_s: f64,
}

fn median_report(all: &[ModeReport]) -> ModeReport {
    let median =
        |f: fn(&ModeReport) -> f64| percentile(&all.iter().map(f).collect::<Vec<_>>(), 0.5);
    ModeReport {
        prefill_ms: median(|r| r.prefill_ms),
        decode_tokens_per_s: median(|r| r.decode_tokens_per_s),
        token_ms_p50: median(|r| r.token_ms_p50),
        token_ms_p99: median(|r| r.token_ms_p99),
    }
}

fn decode(a: &DecodeArguments) -> Result<(), Failure> {
    let files = Files::read(a.model.as_deref(), false)?;
    let system = open_measured(a.device, a.common.threads.map(usize::from), a.sim)?;
    let runtime = system.runtime.clone();
    fits(&files, 2, a.tokens, a.dtype.into(), &runtime)?;
    let model = load(&runtime, &files, a.dtype.into(), a.common.json)?;
    // Every model has the first ids of the vocabulary.
    let last = files.config.vocab_size.saturating_sub(1) as u32;
    let prompt: Vec<u32> = [316, 221].iter().map(|&id: &u32| id.min(last)).collect();
    let once = |mode| -> Result<ModeReport, Failure> {
        let request = Request {
            prompt: &prompt,
            tokens: a.tokens as usize,
            mode,
            sampling: Sampling::default(),
            stop_at: &[],
        };
        Ok(ModeReport::from(&generate(&model, &request, &mut |_| Ok(()))?))
    };
    once(Mode::Eager)?;
    let (mut eager, mut graph, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..a.repeat {
        let (e, g) = (once(Mode::Eager)?, once(Mode::Graph)?);
        ratios.push(e.decode_tokens_per_s / g.decode_tokens_per_s);
        eager.push(e);
        graph.push(g);
    }
    drop(model);
    runtime.synchronize()?;
    system.check()?;
    let graph = median_report(&graph);
    let weight_bytes = files.weights.total_bytes();
    let report = DecodeReport {
        model: files.name,
        device: a.device.to_string(),
        simulated: a.sim,
        threads: a.common.threads,
        tokens: a.tokens,
        repeat: a.repeat,
        weight_bytes,
        eager: median_report(&eager),
        gigabytes_per_s: weight_bytes as f64 * graph.decode_tokens_per_s / 1e9,
        graph,
        graph_by_eager_time: percentile(&ratios, 0.5),
    };
    if a.common.json {
        return print_json(&report);
    }
    let mut table = Table::default();
    table.row(["", "prefill", "decode", "token p50", "token p99"]);
    for (name, m) in [("eager", &report.eager), ("graph", &report.graph)] {
        table.row([
            name.to_owned(),
            format!("{:.2} ms", m.prefill_ms),
            format!("{:.0} tokens/s", m.decode_tokens_per_s),
            format!("{:.3} ms", m.token_ms_p50),
            format!("{:.3} ms", m.token_ms_p99),
        ]);
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    writeln!(
        out,
        "graph takes {:.3} of eager's time; weights are read at {:.1} GB/s",
        report.graph_by_eager_time, report.gigabytes_per_s
    )?;
    Ok(())
}
