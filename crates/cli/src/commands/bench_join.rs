//! `leasehold bench decode --batch N --join TOKENS`: how long sequences wait while a prompt joins.

use crate::commands::bench::{DecodeArguments, decode_files, prompt_of};
use crate::commands::bench_batch::start;
use crate::commands::run::{fits, load};
use crate::commands::{open_measured, percentile, print_json};
use crate::failure::Failure;
use leasehold_llama::{Batch, DType, Mode, Sampling};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::Instant;

#[derive(Debug, Serialize)]
struct Report {
    model: String,
    device: String,
    /// The figures say nothing of a device.
    simulated: bool,
    threads: Option<u16>,
    /// Sequences that are decoded.
    batch: u32,
    /// Tokens of their prompts.
    prompt: u32,
    /// Tokens of the prompt that joins.
    join: u32,
    /// Those that are computed together.
    piece: usize,
    /// Of the random weights.
    seed: Option<u64>,
    repeat: u32,
    /// A step without a prompt that waits: the median.
    step_ms_p50: f64,
    /// The longest time between two steps while the prompt joins, of all runs.
    longest_gap_ms: f64,
    /// The median of these times.
    gap_ms_p50: f64,
    /// The longest gap relative to the median step.
    longest_gap_by_step: f64,
    /// Steps from the prompt to its first token: the median of the runs.
    steps_to_first_token: f64,
    /// Time from the prompt to its first token: the median of the runs.
    first_token_ms: f64,
    /// The same prompt while nothing is decoded.
    first_token_alone_ms: f64,
}

pub(super) fn run(
    a: &DecodeArguments,
    sequences: NonZeroU32,
    join: NonZeroU32,
) -> Result<(), Failure> {
    let (files, dtype) = (decode_files(a)?, DType::from(a.dtype));
    let system = open_measured(a.device, a.common.threads.map(usize::from), a.sim)?;
    let runtime = system.runtime.clone();
    let (slots, prompt) = (sequences.saturating_add(1), a.prompt.max(join.get()) as usize);
    // The sequences are decoded before the prompt joins, and while it is computed.
    let steps = a.tokens.saturating_add(join.get()).saturating_add(1000);
    fits(&files, prompt, steps, slots, dtype, &runtime)?;
    let model = load(&runtime, &files, dtype, a.common.json)?;
    let ids = files.config.vocab_size.max(1) as u32;
    let joining = prompt_of(join.get(), sequences.get(), ids);
    let positions = prompt.saturating_add(steps as usize).min(files.config.context());
    let (mut alone, mut first, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    let (mut plain, mut gaps) = (Vec::new(), Vec::new());
    let mut piece = 0;
    for _ in 0..a.repeat {
        let mut batch = Batch::new(&model, slots.get() as usize, positions, Mode::Graph)?;
        piece = batch.piece(joining.len());
        let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
        let begin = Instant::now();
        let id = start(&mut batch, &joining)?;
        alone.push(ms(begin));
        batch.remove(id)?;
        for sequence in 0..sequences.get() {
            start(&mut batch, &a.prompt_of(sequence, ids))?;
        }
        let step = |batch: &mut Batch| -> Result<(f64, usize), Failure> {
            let begin = Instant::now();
            let tokens = batch.step()?.len();
            Ok((ms(begin), tokens))
        };
        step(&mut batch)?;
        for _ in 0..a.tokens {
            plain.push(step(&mut batch)?.0);
        }
        let begin = Instant::now();
        batch.add(&joining, Sampling::default())?;
        for count in 1.. {
            let (gap, tokens) = step(&mut batch)?;
            gaps.push(gap);
            if tokens == slots.get() as usize {
                first.push(ms(begin));
                counts.push(f64::from(count));
                break;
            }
        }
    }
    drop(model);
    runtime.synchronize()?;
    system.check()?;
    let (step_ms_p50, longest_gap_ms) = (percentile(&plain, 0.5), percentile(&gaps, 1.0));
    let report = Report {
        model: files.name,
        device: a.device.to_string(),
        simulated: a.sim,
        threads: a.common.threads,
        batch: sequences.get(),
        prompt: a.prompt,
        join: join.get(),
        piece,
        seed: a.random_weights.then_some(a.seed),
        repeat: a.repeat,
        step_ms_p50,
        longest_gap_ms,
        gap_ms_p50: percentile(&gaps, 0.5),
        longest_gap_by_step: longest_gap_ms / step_ms_p50,
        steps_to_first_token: percentile(&counts, 0.5),
        first_token_ms: percentile(&first, 0.5),
        first_token_alone_ms: percentile(&alone, 0.5),
    };
    if a.common.json { print_json(&report) } else { print(&report) }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} sequences with prompts of {} tokens: a step takes {:.3} ms (median)",
        report.batch, report.prompt, report.step_ms_p50
    )?;
    writeln!(
        out,
        "while a prompt of {} tokens joins, in pieces of {}: {:.3} ms (median), {:.3} ms at most: \
         {:.2} steps",
        report.join,
        report.piece,
        report.gap_ms_p50,
        report.longest_gap_ms,
        report.longest_gap_by_step
    )?;
    writeln!(
        out,
        "its first token comes after {:.0} ms and {:.0} steps; after {:.0} ms where nothing is decoded",
        report.first_token_ms, report.steps_to_first_token, report.first_token_alone_ms
    )?;
    Ok(())
}
