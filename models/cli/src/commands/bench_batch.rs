//! `leasehold bench decode --batch N`: several sequences decoded together. Of several numbers each
//! is measured, on the same weights.
//!
//! Before the timing, the results are compared: replayed steps with eager ones, and each sequence
//! with the same sequence alone.
//!
//! With `--join TOKENS`: how long the sequences wait while a prompt joins them.

use crate::commands::arguments::{DecodeArguments, Subject, prompt_of};
use crate::commands::measures::{Bytes, copy_bandwidth};
use crate::commands::run::{Files, fits, load};
use crate::commands::{operators, percentile, print_json};
use crate::failure::Failure;
use crate::system::{Devices, System};
use crate::table::{Table, bytes};
use leasehold_llama::{Batch, DType, Decoder, Mode, Model, Sampling, SequenceId, traffic};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    subject: Subject,
    /// Sequences.
    batch: u32,
    /// Of each sequence.
    tokens: u32,
    repeat: u32,
    weight_bytes: u64,
    eager: Rates,
    graph: Rates,
    /// Time of graph mode relative to eager mode: the median over the pairs of runs.
    graph_by_eager_time: f64,
    bytes_per_step: Bytes,
    /// Those bytes read per second in graph mode.
    gigabytes_per_s: f64,
    /// The bandwidth of a copy on the device, measured in this run: bytes read and written.
    copy_gigabytes_per_s: f64,
    /// The two divided.
    share_of_bandwidth: f64,
    /// The largest difference of a logit from the same sequence alone, relative to the largest
    /// logit there.
    logits_differ_from_alone: f64,
    /// Sequences whose text is that of the sequence alone.
    texts_as_alone: u32,
}

/// The rates of a mode. The first step, which records the graph, is not timed.
#[derive(Debug, Clone, Serialize)]
pub(super) struct Rates {
    /// Of all prompts together, one after the other.
    pub(super) prompt_tokens_per_s: f64,
    /// Of all sequences together.
    pub(super) tokens_per_s: f64,
    /// Of one sequence.
    tokens_per_s_each: f64,
    pub(super) step_ms_p50: f64,
    step_ms_p99: f64,
    /// The tokens before the one that a step computes: the mean of all sequences and timed steps.
    /// Sequences begin one after the other, so the first ones are longer.
    positions: f64,
}

/// The results of a run that are compared.
pub(super) struct Results {
    /// For each sequence its new tokens.
    pub(super) texts: Vec<Vec<u32>>,
    /// For each sequence its logits after the first step, and after the last one.
    pub(super) logits: [Vec<Vec<f32>>; 2],
    /// Steps while a prompt waited.
    pub(super) starting: usize,
}

/// The runs of a measurement.
pub(super) struct Runs<'a> {
    pub(super) model: &'a Model,
    pub(super) prompts: Vec<Vec<u32>>,
    pub(super) tokens: usize,
}

impl Runs<'_> {
    pub(super) fn positions(&self) -> usize {
        // The last token is computed from the one before it, so it needs no position.
        self.prompts[0].len() + self.tokens - 1
    }

    pub(super) fn results(&self, mode: Mode) -> Result<Results, Failure> {
        let count = self.prompts.len();
        let mut batch = Batch::preallocated(self.model, count, self.positions(), mode)?;
        let add = |prompt: &Vec<u32>| batch.add(prompt, Sampling::default());
        let ids = self.prompts.iter().map(add).collect::<leasehold::Result<Vec<_>>>()?;
        let (texts, logits) = (vec![Vec::new(); count], vec![Vec::new(); count]);
        let mut results = Results { texts, logits: [logits.clone(), logits], starting: 0 };
        while !batch.is_empty() {
            results.starting += usize::from(batch.waiting() > 0);
            for (id, drawn) in batch.step()? {
                let Some(at) = ids.iter().position(|of| *of == id) else { continue };
                let text = &mut results.texts[at];
                text.push(drawn?.token);
                if text.len() == 2 {
                    results.logits[0][at] = batch.logits(id)?;
                }
                if text.len() == self.tokens {
                    results.logits[1][at] = batch.logits(id)?;
                    batch.remove(id)?;
                }
            }
        }
        Ok(results)
    }

    /// Compares the modes to the bit.
    fn compare_modes(&self) -> Result<Results, Failure> {
        let (eager, graph) = (self.results(Mode::Eager)?, self.results(Mode::Graph)?);
        let bits = |r: &Results| -> Vec<u32> {
            r.logits.iter().flatten().flatten().map(|l| l.to_bits()).collect()
        };
        if eager.texts != graph.texts || bits(&eager) != bits(&graph) {
            return Err(Failure::new("eager and replayed steps gave different results"));
        }
        Ok(eager)
    }

    /// Compares sequence `at` with the same sequence alone: the largest relative difference of a
    /// logit, and whether the texts are equal.
    fn compare_alone(&self, results: &Results, at: usize) -> Result<(f64, bool), Failure> {
        let mut alone =
            Decoder::new(self.model, self.positions(), self.tokens, Sampling::default())?;
        let text = &results.texts[at];
        let first = alone.prefill(&self.prompts[at])?;
        let mut same = alone.token(0, first)? == text[0];
        let mut worst = 0.0_f64;
        for (i, &token) in text.iter().enumerate().skip(1) {
            // After another token the sequence is another one.
            if !same {
                break;
            }
            let point = alone.step()?;
            if i == 1 {
                worst = worst.max(difference(&results.logits[0][at], &alone.logits()?));
            }
            if i + 1 == text.len() {
                worst = worst.max(difference(&results.logits[1][at], &alone.logits()?));
            }
            same = alone.token(i, point)? == token;
        }
        Ok((worst, same))
    }

    /// Sequences begin one after the other, within so many steps about.
    pub(super) fn timed(&self, mode: Mode, starting: usize) -> Result<Rates, Failure> {
        let (sequences, prompt) = (self.prompts.len(), self.prompts[0].len());
        let room = self.positions() + 4 * starting + 16;
        let room = room.min(self.model.config().context());
        let mut batch = Batch::preallocated(self.model, sequences, room, mode)?;
        let begin = Instant::now();
        for prompt in &self.prompts {
            let id = start(&mut batch, prompt)?;
            batch.remove(id)?;
        }
        let prefill = begin.elapsed();
        for prompt in &self.prompts {
            batch.add(prompt, Sampling::default())?;
        }
        // The last step of these records the graph at the latest.
        let (mut drawn, mut count) = (sequences, 0);
        while count < sequences {
            count = batch.step()?.len();
            drawn += count;
        }
        batch.step()?;
        let (mut steps, begin) = (Vec::with_capacity(self.tokens), Instant::now());
        let mut mark = begin;
        for _ in 2..self.tokens {
            batch.step()?;
            let now = Instant::now();
            steps.push(now - mark);
            mark = now;
        }
        let ms: Vec<f64> = steps.iter().map(|d: &Duration| d.as_secs_f64() * 1e3).collect();
        let each = steps.len() as f64 / begin.elapsed().as_secs_f64();
        Ok(Rates {
            prompt_tokens_per_s: (sequences * prompt) as f64 / prefill.as_secs_f64(),
            tokens_per_s: each * sequences as f64,
            tokens_per_s_each: each,
            step_ms_p50: percentile(&ms, 0.5),
            step_ms_p99: percentile(&ms, 0.99),
            positions: prompt as f64
                + drawn as f64 / sequences as f64
                + (steps.len() as f64 - 1.0) / 2.0,
        })
    }
}

/// Adds a sequence, and steps until it has its first token.
fn start(batch: &mut Batch, prompt: &[u32]) -> Result<SequenceId, Failure> {
    let id = batch.add(prompt, Sampling::default())?;
    let mut begun = false;
    while !begun {
        for (of, drawn) in batch.step()? {
            drawn?;
            begun |= of == id;
        }
    }
    Ok(id)
}

/// The largest difference of two lists of logits relative to the largest of `wanted`; infinite for
/// a NaN.
pub(super) fn difference(found: &[f32], wanted: &[f32]) -> f64 {
    let largest = wanted.iter().fold(f64::MIN_POSITIVE, |max, &w| max.max(f64::from(w).abs()));
    let apart = |(&f, &w): (&f32, &f32)| (f64::from(f) - f64::from(w)).abs();
    let worst = found
        .iter()
        .zip(wanted)
        .map(apart)
        .fold(0.0, |max: f64, d| if d.is_nan() { f64::INFINITY } else { max.max(d) });
    worst / largest
}

/// The most by which a batch's logits may differ from those of a sequence alone. Both round each
/// activation, after sums in another order.
pub(super) fn tolerance(activations: DType) -> f64 {
    match activations {
        DType::F32 => 1e-3,
        DType::F16 => 1e-2,
        DType::Bf16 => 8e-2,
    }
}

fn median(all: &[Rates]) -> Rates {
    let of = |f: fn(&Rates) -> f64| percentile(&all.iter().map(f).collect::<Vec<_>>(), 0.5);
    Rates {
        prompt_tokens_per_s: of(|r| r.prompt_tokens_per_s),
        tokens_per_s: of(|r| r.tokens_per_s),
        tokens_per_s_each: of(|r| r.tokens_per_s_each),
        step_ms_p50: of(|r| r.step_ms_p50),
        step_ms_p99: of(|r| r.step_ms_p99),
        positions: of(|r| r.positions),
    }
}

/// Measures each of these numbers of sequences.
pub(super) fn run(
    a: &DecodeArguments,
    sizes: &[NonZeroU32],
    devices: &dyn Devices,
) -> Result<(), Failure> {
    if a.tokens < 3 {
        return Err(Failure::misuse(
            "--batch: the first step is not timed; ask for 3 --tokens at least".to_owned(),
        ));
    }
    let (files, dtype) = (a.on.read()?, a.on.dtype());
    let system = a.on.open(devices)?;
    let runtime = system.runtime.clone();
    let most = sizes.iter().copied().fold(NonZeroU32::MIN, NonZeroU32::max);
    fits(&files, a.on.prompt as usize, a.tokens, most, dtype, &runtime)?;
    let copy = copy_bandwidth(&runtime, system.is_simulated())?;
    let model = load(&runtime, &files, dtype, a.on.json())?;
    let mut lines = (sizes.len() > 1 && !a.on.json()).then(Lines::default);
    for &sequences in sizes {
        let report = measure(a, &model, &files, sequences, copy, &system)?;
        match &mut lines {
            Some(lines) => lines.print(&report)?,
            None if a.on.json() => print_json(&report)?,
            None => print(&report)?,
        }
    }
    drop(model);
    runtime.synchronize()?;
    system.check()
}

/// Compares the results of so many sequences, and measures them.
fn measure(
    a: &DecodeArguments,
    model: &Model,
    files: &Files,
    sequences: NonZeroU32,
    copy_gigabytes_per_s: f64,
    system: &System,
) -> Result<Report, Failure> {
    let dtype = a.on.dtype();
    let ids = files.config.vocab_size.max(1) as u32;
    let prompts = (0..sequences.get()).map(|s| a.on.prompt_of(s, ids)).collect();
    let runs = Runs { model, prompts, tokens: a.tokens as usize };
    let results = runs.compare_modes()?;
    let (mut differ, mut as_alone) = (0.0_f64, 0);
    for at in 0..runs.prompts.len() {
        let (worst, same) = runs.compare_alone(&results, at)?;
        differ = differ.max(worst);
        as_alone += u32::from(same);
    }
    if differ > tolerance(dtype) {
        return Err(Failure::new(format!(
            "one of {sequences} sequences in the batch gave logits that differ by {differ:.1e} of \
             the largest one from those alone; the limit is {:.1e}",
            tolerance(dtype)
        )));
    }
    let (mut eager, mut graph, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..a.repeat {
        let timed = |mode| runs.timed(mode, results.starting);
        let (e, g) = (timed(Mode::Eager)?, timed(Mode::Graph)?);
        ratios.push(e.tokens_per_s / g.tokens_per_s);
        eager.push(e);
        graph.push(g);
    }
    if a.verbose {
        let alone = Decoder::new(model, runs.positions(), 1, Sampling::default())?;
        let batch = Batch::preallocated(model, runs.prompts.len(), runs.positions(), Mode::Eager)?;
        operators::print(&alone.prompt_operators(a.on.prompt as usize)?, &batch.step_operators())?;
    }
    let (eager, graph) = (median(&eager), median(&graph));
    let read = traffic(&files.config, &files.weights, graph.positions as usize, dtype);
    let bytes_per_step =
        Bytes::new(read.weights, read.cache.saturating_mul(u64::from(sequences.get())));
    let gigabytes_per_s = bytes_per_step.total as f64 * graph.tokens_per_s_each / 1e9;
    Ok(Report {
        subject: a.on.subject(files.name.clone(), system),
        batch: sequences.get(),
        tokens: a.tokens,
        repeat: a.repeat,
        weight_bytes: files.weights.total_bytes(),
        eager,
        graph,
        graph_by_eager_time: percentile(&ratios, 0.5),
        bytes_per_step,
        gigabytes_per_s,
        copy_gigabytes_per_s,
        share_of_bandwidth: gigabytes_per_s / copy_gigabytes_per_s,
        logits_differ_from_alone: differ,
        texts_as_alone: as_alone,
    })
}

/// A table of several numbers of sequences, whose lines appear as they are measured.
#[derive(Default)]
struct Lines {
    begun: bool,
}

impl Lines {
    fn print(&mut self, report: &Report) -> Result<(), Failure> {
        let mut out = std::io::stdout().lock();
        if !std::mem::replace(&mut self.begun, true) {
            writeln!(
                out,
                "sequences    tokens      eager      graph  graph p99         all together  of a copy  differ  as alone"
            )?;
        }
        let Report { eager, graph, .. } = report;
        writeln!(
            out,
            "{:9}  {:8.0}  {:6.3} ms  {:6.3} ms  {:6.3} ms  {:10.0} tokens/s  {:7.1} %  {:.0e}  {:>8}",
            report.batch,
            graph.positions,
            eager.step_ms_p50,
            graph.step_ms_p50,
            graph.step_ms_p99,
            graph.tokens_per_s,
            report.share_of_bandwidth * 100.0,
            report.logits_differ_from_alone,
            report.texts_as_alone
        )?;
        Ok(())
    }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut table = Table::default();
    table.row(["", "prompts", "all together", "each", "step p50", "step p99"]);
    for (name, m) in [("eager", &report.eager), ("graph", &report.graph)] {
        table.row([
            name.to_owned(),
            format!("{:.0} tokens/s", m.prompt_tokens_per_s),
            format!("{:.0} tokens/s", m.tokens_per_s),
            format!("{:.0} tokens/s", m.tokens_per_s_each),
            format!("{:.3} ms", m.step_ms_p50),
            format!("{:.3} ms", m.step_ms_p99),
        ]);
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    writeln!(
        out,
        "{} sequences with prompts of {} tokens, of {:.0} tokens on average; graph takes {:.3} of eager's time",
        report.batch, report.subject.prompt, report.graph.positions, report.graph_by_eager_time
    )?;
    let read = &report.bytes_per_step;
    writeln!(
        out,
        "a step reads {} ({} of weights, {} of KV caches): {:.1} GB/s, {:.1} % of a device copy's \
         {:.1} GB/s",
        bytes(read.total),
        bytes(read.weights),
        bytes(read.kv_cache),
        report.gigabytes_per_s,
        report.share_of_bandwidth * 100.0,
        report.copy_gigabytes_per_s
    )?;
    writeln!(
        out,
        "eager and replayed results are equal to the bit; logits differ from a sequence alone by \
         {:.1e}, {} of {} texts are equal",
        report.logits_differ_from_alone, report.texts_as_alone, report.batch
    )?;
    Ok(())
}

#[derive(Debug, Serialize)]
struct JoinReport {
    #[serde(flatten)]
    subject: Subject,
    /// Sequences that are decoded.
    batch: u32,
    /// Tokens of the prompt that joins.
    join: u32,
    /// Those that are computed together.
    piece: usize,
    repeat: u32,
    /// A step without a prompt that waits: the median.
    step_ms_p50: f64,
    /// The longest of these steps, of all runs.
    longest_step_ms: f64,
    /// The longest time between two steps while the prompt joins, of all runs.
    longest_gap_ms: f64,
    /// The median of these times, and the time that one of a hundred exceeds.
    gap_ms_p50: f64,
    gap_ms_p99: f64,
    /// The longest gap relative to the median step.
    longest_gap_by_step: f64,
    /// Steps from the prompt to its first token: the median of the runs.
    steps_to_first_token: f64,
    /// Time from the prompt to its first token: the median of the runs.
    first_token_ms: f64,
    /// The same prompt while nothing is decoded.
    first_token_alone_ms: f64,
}

/// Measures how long sequences wait while a prompt of so many tokens joins them.
pub(super) fn run_join(
    a: &DecodeArguments,
    join: NonZeroU32,
    devices: &dyn Devices,
) -> Result<(), Failure> {
    let sequences = a.one_batch("--join")?.unwrap_or(NonZeroU32::MIN);
    let (files, dtype) = (a.on.read()?, a.on.dtype());
    let system = a.on.open(devices)?;
    let runtime = system.runtime.clone();
    let (slots, prompt) = (sequences.saturating_add(1), a.on.prompt.max(join.get()) as usize);
    // The sequences are decoded before the prompt joins, and while it is computed.
    let steps = a.tokens.saturating_add(join.get()).saturating_add(1000);
    fits(&files, prompt, steps, slots, dtype, &runtime)?;
    let model = load(&runtime, &files, dtype, a.on.json())?;
    let ids = files.config.vocab_size.max(1) as u32;
    let joining = prompt_of(join.get(), sequences.get(), ids);
    let positions = prompt.saturating_add(steps as usize).min(files.config.context());
    let (mut alone, mut first, mut counts) = (Vec::new(), Vec::new(), Vec::new());
    let (mut plain, mut gaps) = (Vec::new(), Vec::new());
    let mut piece = 0;
    for _ in 0..a.repeat {
        let mut batch = Batch::preallocated(&model, slots.get() as usize, positions, Mode::Graph)?;
        piece = batch.piece(joining.len());
        let ms = |since: Instant| since.elapsed().as_secs_f64() * 1e3;
        let begin = Instant::now();
        let id = start(&mut batch, &joining)?;
        alone.push(ms(begin));
        batch.remove(id)?;
        for sequence in 0..sequences.get() {
            start(&mut batch, &a.on.prompt_of(sequence, ids))?;
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
    let report = JoinReport {
        subject: a.on.subject(files.name, &system),
        batch: sequences.get(),
        join: join.get(),
        piece,
        repeat: a.repeat,
        step_ms_p50,
        longest_step_ms: percentile(&plain, 1.0),
        longest_gap_ms,
        gap_ms_p50: percentile(&gaps, 0.5),
        gap_ms_p99: percentile(&gaps, 0.99),
        longest_gap_by_step: longest_gap_ms / step_ms_p50,
        steps_to_first_token: percentile(&counts, 0.5),
        first_token_ms: percentile(&first, 0.5),
        first_token_alone_ms: percentile(&alone, 0.5),
    };
    if a.on.json() { print_json(&report) } else { print_join(&report) }
}

fn print_join(report: &JoinReport) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} sequences with prompts of {} tokens: a step takes {:.3} ms (median), {:.3} ms at most",
        report.batch, report.subject.prompt, report.step_ms_p50, report.longest_step_ms
    )?;
    writeln!(
        out,
        "while a prompt of {} tokens joins, in pieces of {}: {:.3} ms (median), {:.3} ms (99 %), \
         {:.3} ms at most: {:.2} steps",
        report.join,
        report.piece,
        report.gap_ms_p50,
        report.gap_ms_p99,
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

#[cfg(test)]
mod tests {
    use super::difference;

    #[test]
    fn a_difference_is_relative_to_the_largest_logit() {
        assert_eq!(difference(&[1.0, -8.0], &[1.0, -8.0]), 0.0);
        assert_eq!(difference(&[3.0, -8.0], &[1.0, -8.0]), 0.25);
        assert_eq!(difference(&[f32::NAN, -8.0], &[1.0, -8.0]), f64::INFINITY);
        assert_eq!(difference(&[1.0, -8.0], &[1.0, f32::NAN]), f64::INFINITY);
    }
}
