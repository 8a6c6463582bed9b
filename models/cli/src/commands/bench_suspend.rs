//! `leasehold bench suspend`: a model whose weights leave the device and come back, in rounds.
//!
//! After each round it generates the same text, by a graph that was recorded once before.

use crate::commands::arguments::{ModelArguments, Subject};
use crate::commands::run::{fits, load_suspendable};
use crate::commands::{percentile, print_json};
use crate::failure::Failure;
use crate::system::Devices;
use crate::table::{Table, bytes};
use leasehold::{Graph, Runtime};
use leasehold_llama::{Decoder, Model, Sampling};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub struct SuspendArguments {
    #[command(flatten)]
    on: ModelArguments,
    /// New tokens after each round
    #[arg(long, default_value_t = 16, value_parser = clap::value_parser!(u32).range(2..))]
    tokens: u32,
    /// Suspensions and resumptions
    #[arg(long, default_value_t = 100, value_parser = clap::value_parser!(u32).range(1..))]
    rounds: u32,
}

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    subject: Subject,
    tokens: u32,
    rounds: u32,
    /// Device memory of the weights, which goes and comes back.
    bytes: u64,
    suspend: Times,
    resume: Times,
    /// Free memory of the device, as the driver says: before the rounds, and the least that it was
    /// while the weights were away.
    free_before: u64,
    free_suspended: u64,
    /// The same after the rounds.
    free_after: u64,
    /// A text that differs ends the command with an error.
    texts_equal: u32,
}

/// The first round makes the pinned memory, and is not one of the others.
#[derive(Debug, Serialize)]
struct Times {
    first_ms: f64,
    ms_p50: f64,
    ms_p99: f64,
    /// At the median.
    gigabytes_per_s: f64,
}

impl Times {
    fn of(all: &[Duration], bytes: u64) -> Self {
        let ms: Vec<f64> = all.iter().map(|d| d.as_secs_f64() * 1e3).collect();
        let later = if ms.len() > 1 { &ms[1..] } else { &ms[..] };
        let median = percentile(later, 0.5);
        Self {
            first_ms: ms[0],
            ms_p50: median,
            ms_p99: percentile(later, 0.99),
            gigabytes_per_s: bytes as f64 / 1e6 / median,
        }
    }
}

/// The sequence that each round generates anew.
struct Sequence {
    decoder: Decoder,
    graph: Graph,
    prompt: Vec<u32>,
    tokens: usize,
}

impl Sequence {
    fn new(model: &Model, prompt: Vec<u32>, tokens: usize) -> Result<Self, Failure> {
        // The last token is computed from the one before it, so it needs no position.
        let positions = prompt.len() + tokens - 1;
        let decoder = Decoder::new(model, positions, tokens, Sampling::default())?;
        let graph = decoder.record()?;
        Ok(Self { decoder, graph, prompt, tokens })
    }

    fn text(&mut self) -> Result<Vec<u32>, Failure> {
        let mut point = self.decoder.prefill(&self.prompt)?;
        for _ in 1..self.tokens {
            point = self.decoder.launch(&self.graph)?;
        }
        let token = |i| self.decoder.token(i, point);
        Ok((0..self.tokens).map(token).collect::<leasehold::Result<_>>()?)
    }
}

fn free(runtime: &Runtime) -> Result<u64, Failure> {
    Ok(runtime.raw_device().memory_info()?.free)
}

/// Runs the measurement.
pub fn run(a: &SuspendArguments, devices: &dyn Devices) -> Result<(), Failure> {
    let files = a.on.read()?;
    let system = a.on.open(devices)?;
    let runtime = system.runtime.clone();
    let dtype = a.on.dtype();
    fits(&files, a.on.prompt as usize, a.tokens, NonZeroU32::MIN, dtype, &runtime)?;
    let model = load_suspendable(&runtime, &files, dtype, a.on.json())?;
    let (name, ids) = (files.name.clone(), files.config.vocab_size.max(1) as u32);
    // The host needs memory for the contents.
    drop(files);
    let prompt = a.on.prompt_of(0, ids);
    let mut sequence = Sequence::new(&model, prompt, a.tokens as usize)?;
    let wanted = sequence.text()?;
    let held = model.weights_stats().map_or(0, |stats| stats.reserved);
    let free_before = free(&runtime)?;
    let (mut suspend, mut resume, mut free_suspended) = (Vec::new(), Vec::new(), u64::MAX);
    for round in 1..=a.rounds {
        let begin = Instant::now();
        model.suspend()?;
        suspend.push(begin.elapsed());
        free_suspended = free_suspended.min(free(&runtime)?);
        let begin = Instant::now();
        model.resume()?;
        resume.push(begin.elapsed());
        if sequence.text()? != wanted {
            return Err(Failure::new(format!("round {round} gave another text than before")));
        }
    }
    let free_after = free(&runtime)?;
    drop((sequence, model));
    runtime.synchronize()?;
    system.check()?;
    let report = Report {
        subject: a.on.subject(name, &system),
        tokens: a.tokens,
        rounds: a.rounds,
        bytes: held,
        suspend: Times::of(&suspend, held),
        resume: Times::of(&resume, held),
        free_before,
        free_suspended,
        free_after,
        texts_equal: a.rounds,
    };
    if a.on.json() { print_json(&report) } else { print(&report) }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut table = Table::default();
    table.row(["", "first", "p50", "p99", "rate"]);
    for (name, t) in [("suspend", &report.suspend), ("resume", &report.resume)] {
        table.row([
            name.to_owned(),
            format!("{:.1} ms", t.first_ms),
            format!("{:.1} ms", t.ms_p50),
            format!("{:.1} ms", t.ms_p99),
            format!("{:.1} GB/s", t.gigabytes_per_s),
        ]);
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    writeln!(
        out,
        "{} of weights; free on the device: {} before, {} while suspended, {} after",
        bytes(report.bytes),
        bytes(report.free_before),
        bytes(report.free_suspended),
        bytes(report.free_after)
    )?;
    writeln!(
        out,
        "{} of {} texts are equal, by one graph that was recorded before",
        report.texts_equal, report.rounds
    )?;
    Ok(())
}
