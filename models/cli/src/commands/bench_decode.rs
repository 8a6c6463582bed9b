//! `leasehold bench decode`: one sequence, eager and as a graph, in turns.

use crate::commands::arguments::{DecodeArguments, Subject};
use crate::commands::measures::{Bytes, copy_bandwidth};
use crate::commands::run::{ModeReport, fits, load};
use crate::commands::{operators, percentile, print_json};
use crate::failure::Failure;
use crate::system::Devices;
use crate::table::{Table, bytes};
use leasehold::{GraphOperator, Runtime, View};
use leasehold_llama::{DType, Decoder, Mode, Request, Sampling, generate, operations, traffic};
use leasehold_operators::{Library, Tensor, ops};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::Instant;

#[derive(Debug, Serialize)]
struct Report {
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

pub(super) fn run(a: &DecodeArguments, devices: &dyn Devices) -> Result<(), Failure> {
    let files = a.on.read()?;
    let system = a.on.open(devices)?;
    let runtime = system.runtime.clone();
    fits(&files, a.on.prompt as usize, a.tokens, NonZeroU32::MIN, a.on.dtype(), &runtime)?;
    let copy_gigabytes_per_s = copy_bandwidth(&runtime, system.is_simulated())?;
    let product_teraflops = product_rate(&runtime, a.on.dtype(), system.is_simulated())?;
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
    let report = Report {
        subject: a.on.subject(files.name, &system),
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
    print_table(&report)
}

fn print_table(report: &Report) -> Result<(), Failure> {
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
