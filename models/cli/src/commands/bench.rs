//! `leasehold bench`: measurements of the runtime. These programs print figures; they are not tests
//! that fail for slowness.

use crate::commands::arguments::{Common, DecodeArguments, Subject};
use crate::commands::bench_alloc::{self, AllocArguments};
use crate::commands::bench_batch;
use crate::commands::bench_collective::{self, CollectiveArguments};
use crate::commands::bench_copy::{self, CopyArguments};
#[cfg(feature = "cuda")]
use crate::commands::bench_cuda;
use crate::commands::bench_ranks;
use crate::commands::bench_suspend::{self, SuspendArguments};
use crate::commands::measures::{Bytes, copy_bandwidth};
use crate::commands::run::{ModeReport, fits, load};
use crate::commands::{operators, percentile, print_json};
use crate::examples;
use crate::failure::Failure;
use crate::ranks::Plan;
use crate::style::Tone;
use crate::table::{Table, bytes};
use leasehold::{GraphOperator, Runtime, View};
use leasehold_llama::{DType, Decoder, Mode, Request, Sampling, generate, operations, traffic};
use leasehold_operators::{Library, Tensor, ops};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::Instant;

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
    Decode(DecodeArguments),
    /// A model whose weights leave the device and come back: times, and the text after each round
    #[command(after_help = examples::BENCH_SUSPEND)]
    Suspend(SuspendArguments),
    /// The memory manager for compiled code beside the plain design
    #[command(after_help = examples::BENCH_MEMORY)]
    Memory(Common),
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
        What::Collective(a) => bench_collective::run(a),
        What::Decode(a) => {
            let plan = a.ranks.plan(a.on.device(), a.on.is_simulated())?;
            match (plan, a.batch, a.join) {
                (Plan::Alone, Some(sequences), Some(prompt)) => {
                    bench_batch::run_join(a, sequences, prompt)
                }
                (Plan::Alone, Some(sequences), None) => bench_batch::run(a, sequences),
                (Plan::Alone, None, _) => decode(a),
                (plan, ..) => bench_ranks::run(a, plan),
            }
        }
        What::Suspend(a) => bench_suspend::run(a),
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

#[derive(Debug, Serialize)]
struct DecodeReport {
    #[serde(flatten)]
    subject: Subject,
    tokens: u32,
    repeat: u32,
    weight_bytes: u64,
    eager: ModeReport,
    graph: ModeReport,
    /// Tokens of the prompt per second, up to the first new token: of the faster mode.
    prompt_tokens_per_s: f64,
    /// Products and sums of the prompt per second, in 10¹².
    prompt_teraflops: f64,
    /// Those of a large product of matrices, measured in this run.
    product_teraflops: f64,
    /// The two divided.
    share_of_products: f64,
    /// Time of graph mode relative to eager mode: the median over the pairs of runs.
    graph_by_eager_time: f64,
    bytes_per_token: Bytes,
    /// Those bytes read per second in graph mode.
    gigabytes_per_s: f64,
    /// The bandwidth of a copy on the device, measured in this run: bytes read and written.
    copy_gigabytes_per_s: f64,
    /// The two divided.
    share_of_bandwidth: f64,
}

/// The rate of a product of large square matrices, products and sums in 10¹² per second: the best
/// of some rounds.
fn product_rate(runtime: &Runtime, dtype: DType, simulated: bool) -> Result<f64, Failure> {
    let small = simulated || runtime.raw_device().caps().host_visible;
    let side = if small { 256 } else { 8192 };
    let library = Library::of(runtime)?;
    let tensor = || Tensor::alloc(runtime, dtype, side, side);
    let (x, weight, y) = (tensor()?, tensor()?, tensor()?);
    let stream = runtime.stream();
    // Numbers of both signs from a half to one, in every type: a device computes faster with zeros.
    let mut state = 1u32;
    let words = x.bytes() as usize / size_of::<u32>();
    let numbers: Vec<u32> = (0..words)
        .map(|_| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            state & 0x807f_807f | 0x3f00_3f00
        })
        .collect();
    for operand in [&x, &weight] {
        stream.upload(operand.view(), &numbers)?;
    }
    let to = ops::Projection { weight: &weight, bias: None, y: &y };
    let product = ops::linear(&library, &x, None, to)?;
    let mut best = f64::INFINITY;
    // The first round loads and compiles.
    for _ in 0..=5 {
        let begin = Instant::now();
        product.encode(stream)?;
        stream.synchronize()?;
        best = best.min(begin.elapsed().as_secs_f64());
    }
    Ok(2.0 * f64::from(side).powi(3) / best / 1e12)
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
    let files = a.on.read()?;
    let system = a.on.open()?;
    let runtime = system.runtime.clone();
    fits(&files, a.on.prompt as usize, a.tokens, NonZeroU32::MIN, a.on.dtype(), &runtime)?;
    let copy_gigabytes_per_s = copy_bandwidth(&runtime, a.on.sim)?;
    let product_teraflops = product_rate(&runtime, a.on.dtype(), a.on.sim)?;
    let model = load(&runtime, &files, a.on.dtype(), a.on.json())?;
    let prompt = a.on.prompt_of(0, files.config.vocab_size.max(1) as u32);
    let once = |mode| -> Result<ModeReport, Failure> {
        let request = Request {
            prompt: &prompt,
            tokens: a.tokens as usize,
            mode,
            sampling: Sampling::default(),
            stop_at: &[],
            check: false,
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
    if a.verbose {
        let positions = a.on.prompt as usize + a.tokens as usize - 1;
        let decoder = Decoder::new(&model, positions, 1, Sampling::default())?;
        let prompt = decoder.prompt_operators(a.on.prompt as usize)?;
        operators::print(&prompt, &decoder.step_operators())?;
    }
    drop(model);
    runtime.synchronize()?;
    system.check()?;
    let (eager, graph) = (median_report(&eager), median_report(&graph));
    let weight_bytes = files.weights.total_bytes();
    // The first new token is the prompt's; the others see one more position each.
    let positions = (a.on.prompt + a.tokens / 2) as usize;
    let read = traffic(&files.config, &files.weights, positions, a.on.dtype());
    let bytes_per_token = Bytes::new(read.weights, read.cache);
    let gigabytes_per_s = bytes_per_token.total as f64 * graph.decode_tokens_per_s / 1e9;
    let prefill_ms = eager.prefill_ms.min(graph.prefill_ms);
    let prompt_operations = operations(&files.config, a.on.prompt as usize);
    let prompt_teraflops = prompt_operations / prefill_ms / 1e9;
    let report = DecodeReport {
        subject: a.on.subject(files.name),
        tokens: a.tokens,
        repeat: a.repeat,
        weight_bytes,
        prompt_tokens_per_s: f64::from(a.on.prompt) * 1e3 / prefill_ms,
        prompt_teraflops,
        product_teraflops,
        share_of_products: prompt_teraflops / product_teraflops,
        eager,
        graph,
        graph_by_eager_time: percentile(&ratios, 0.5),
        bytes_per_token,
        gigabytes_per_s,
        copy_gigabytes_per_s,
        share_of_bandwidth: gigabytes_per_s / copy_gigabytes_per_s,
    };
    if a.on.json() {
        return print_json(&report);
    }
    let mut table = Table::default();
    table.head(["", "prefill", "decode", "token p50", "token p99"]);
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
        "prompt of {} tokens: {:.0} tokens/s, {:.3} TFLOP/s, {:.1} % of a large product's {:.3}",
        report.subject.prompt,
        report.prompt_tokens_per_s,
        report.prompt_teraflops,
        report.share_of_products * 100.0,
        report.product_teraflops
    )?;
    writeln!(out, "graph takes {:.3} of eager's time", report.graph_by_eager_time)?;
    let read = &report.bytes_per_token;
    writeln!(
        out,
        "a token reads {} ({} of weights, {} of KV cache): {:.1} GB/s, {:.1} % of a device copy's \
         {:.1} GB/s",
        bytes(read.total),
        bytes(read.weights),
        bytes(read.kv_cache),
        report.gigabytes_per_s,
        report.share_of_bandwidth * 100.0,
        report.copy_gigabytes_per_s
    )?;
    Ok(())
}
