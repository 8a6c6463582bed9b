//! `leasehold-workbench bench`: measurements of the runtime. They print figures, and are no tests
//! that fail for slowness.

use crate::commands::bench_alloc::{self, AllocArguments};
use crate::commands::bench_collective::{self, CollectiveArguments};
use crate::commands::bench_copy::{self, CopyArguments};
use crate::commands::bench_cpu;
#[cfg(feature = "cuda")]
use crate::commands::bench_cuda;
use crate::commands::leases;
use crate::devices::Simulator;
use crate::examples;
use leasehold_cli::commands::bench::{self, Common, DecodeArguments, SuspendArguments};
use leasehold_cli::commands::print_json;
use leasehold_cli::failure::Failure;
use leasehold_cli::style::Tone;
use leasehold_cli::table::Table;
use serde::Serialize;
use std::io::Write;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    #[command(subcommand)]
    what: What,
}

#[derive(Debug, clap::Subcommand)]
enum What {
    /// The allocator beside its peers: workloads and replays
    #[command(after_help = examples::BENCH_ALLOC)]
    Alloc(AllocArguments),
    /// Downloads and uploads beside a plain copy, by size and by where the host's memory begins
    #[command(after_help = examples::BENCH_COPY)]
    Copy(CopyArguments),
    /// Handles and leases beside `Arc`
    #[command(after_help = examples::BENCH_LEASE)]
    Lease(JsonOnly),
    /// Enqueue, completion and wake-up of a CPU stream
    #[command(after_help = examples::BENCH_STREAM)]
    Stream(Common),
    /// Replay of a graph of no-ops on the CPU
    #[command(after_help = examples::BENCH_GRAPH)]
    Graph(GraphArguments),
    /// Launches, graphs, copies, allocations and events on CUDA beside the driver's own calls
    #[cfg(feature = "cuda")]
    #[command(after_help = examples::BENCH_CUDA)]
    Cuda(bench_cuda::CudaArguments),
    /// Collectives between ranks beside NCCL's own calls, eager and in graphs
    #[command(after_help = examples::BENCH_COLLECTIVE)]
    Collective(CollectiveArguments),
    /// Tokens per second of a model, eager and as a graph, in turns
    #[command(after_help = examples::BENCH_DECODE)]
    Decode(Measured<DecodeArguments>),
    /// A model whose weights leave the device and come back: times, and the text after each round
    #[command(after_help = examples::BENCH_SUSPEND)]
    Suspend(Measured<SuspendArguments>),
    /// The memory manager for compiled code beside the plain design
    #[command(after_help = examples::BENCH_MEMORY)]
    Memory(Common),
}

/// A measurement of the user's command, also on simulated devices.
#[derive(Debug, clap::Args)]
struct Measured<A: clap::Args> {
    #[command(flatten)]
    of: A,
    /// Runs over a simulated driver, with the race detector on: shows that the measurement works
    /// there, and its figures say nothing of a device
    #[arg(long)]
    sim: bool,
}

#[derive(Debug, clap::Args)]
struct JsonOnly {
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

/// Samples of a stream or graph measurement.
const ROUNDS: usize = 101;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    match &arguments.what {
        What::Alloc(a) => bench_alloc::run(a),
        What::Copy(a) => bench_copy::run(a),
        What::Lease(a) => lease(a),
        What::Stream(a) => {
            let report = bench_cpu::stream(a.threads.map(usize::from), ROUNDS)?;
            print(&report, a.json)
        }
        What::Graph(a) => {
            let threads = a.common.threads.map_or(1, usize::from);
            let report = bench_cpu::graph(threads, a.nodes as usize, ROUNDS)?;
            print(&report, a.common.json)
        }
        #[cfg(feature = "cuda")]
        What::Cuda(a) => bench_cuda::run(a),
        What::Collective(a) => bench_collective::run(a),
        What::Decode(a) => bench::decode(&a.of, &Simulator::new(a.sim)),
        What::Suspend(a) => bench::suspend(&a.of, &Simulator::new(a.sim)),
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
    let figures: Vec<LeaseFigure> = leases::run()?
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
    table.head(["", "ns", "peer's ns", "ratio", "limit", "", "peer"]);
    for f in &figures {
        let (tone, mark) = if f.within { (None, "") } else { (Some(Tone::Bad), "BEYOND") };
        table.toned(
            tone,
            [
                f.name.to_owned(),
                format!("{:.1}", f.ns),
                if f.peer.is_empty() { String::new() } else { format!("{:.1}", f.peer_ns) },
                if f.peer.is_empty() { String::new() } else { format!("{:.2}", f.ratio) },
                format!("{:.2}", f.limit),
                mark.to_owned(),
                f.peer.to_owned(),
            ],
        );
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    let beyond = figures.iter().filter(|f| !f.within).count();
    if beyond > 0 {
        let of = figures.len();
        writeln!(
            out,
            "{beyond} of {of} figures beyond their limit; repeat on an idle machine, in a release build"
        )?;
    }
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
