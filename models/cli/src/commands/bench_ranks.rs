//! `leasehold bench decode --ranks N`: a model that is divided over ranks, beside the same model on
//! one rank.
//!
//! Rank 0 has the whole model too, on its own device. The two take turns: while rank 0 measures the
//! whole model, the others wait at the store, and use no device. All runs are replayed graphs.
//! Before the timing, the logits of the two are compared. If rank 0's device does not hold the
//! whole model beside its part, the ranks are measured alone.

use crate::commands::arguments::{DecodeArguments, Subject};
use crate::commands::bench_batch::{Runs, difference, tolerance};
use crate::commands::run::{Files, ModeReport, fits, load, load_part};
use crate::commands::{operators, percentile, print_json};
use crate::failure::Failure;
use crate::ranks::{self, Plan, Rank};
use crate::system::Devices;
use crate::table::{Table, bytes};
use leasehold_llama::{Batch, Decoder, Mode, Model, Part, Request, Sampling, generate};
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::Duration;

/// How long ranks wait while rank 0 measures the whole model.
const TURN: Duration = Duration::from_secs(1800);

#[derive(Debug, Serialize)]
struct Report {
    #[serde(flatten)]
    subject: Subject,
    ranks: u32,
    /// The library that makes the ranks' calls.
    library: String,
    /// Sequences that are decoded together; `null` for one through the decoder of a single one.
    batch: Option<NonZeroU32>,
    tokens: u32,
    repeat: u32,
    weight_bytes: u64,
    /// Those of a rank.
    part_bytes: u64,
    all_ranks: Rates,
    /// `null` if one rank's device does not hold the model.
    #[serde(flatten)]
    beside: Beside,
}

/// All ranks beside one.
#[derive(Debug, Default, Serialize)]
struct Beside {
    one_rank: Option<Rates>,
    /// Decoded tokens per second of all ranks over those of one: the median of the pairs of runs.
    ratio: Option<f64>,
    /// The same of prompts.
    prompt_ratio: Option<f64>,
    /// The largest difference of a logit from one rank's, relative to the largest logit there.
    logits_differ_from_one_rank: Option<f64>,
    /// Sequences whose logits were compared: those that drew the same first token on one rank.
    sequences_compared: Option<usize>,
}

#[derive(Debug, Clone, Serialize)]
struct Rates {
    prompt_tokens_per_s: f64,
    /// Of all sequences together.
    tokens_per_s: f64,
    step_ms_p50: f64,
}

/// The measurement, on one rank's model and on all ranks'.
struct Bench<'a> {
    arguments: &'a DecodeArguments,
    batch: Option<NonZeroU32>,
    files: &'a Files,
}

/// The figures of a rank.
struct Measured {
    library: String,
    one_rank: Vec<Rates>,
    all_ranks: Vec<Rates>,
    /// How far logits differ from one rank's, and the sequences that were compared; `None` without
    /// the whole model.
    compared: Option<(f64, usize)>,
}

/// The first logits of a sequence.
struct First {
    /// The token that was drawn before, in a batch.
    token: Option<u32>,
    logits: Vec<f32>,
}

impl Bench<'_> {
    fn prompts(&self) -> Vec<Vec<u32>> {
        let ids = self.files.config.vocab_size.max(1) as u32;
        let sequences = self.batch.map_or(1, NonZeroU32::get);
        (0..sequences).map(|s| self.arguments.on.prompt_of(s, ids)).collect()
    }

    /// Warms a model. Returns its first logits, and what its timed runs need. Logits of a batch are
    /// those after the first token, which comes with them.
    fn begin<'m>(&self, model: &'m Model) -> Result<(Vec<First>, Runs<'m>, usize), Failure> {
        let runs = Runs { model, prompts: self.prompts(), tokens: self.arguments.tokens as usize };
        if self.batch.is_none() {
            let logits = self.text(&runs)?.0;
            return Ok((vec![First { token: None, logits }], runs, 0));
        }
        let results = runs.results(Mode::Graph)?;
        let [first, _] = results.logits;
        let tokens = results.texts.iter().map(|text| text.first().copied());
        let first = tokens.zip(first).map(|(token, logits)| First { token, logits }).collect();
        Ok((first, runs, results.starting))
    }

    /// One sequence: its logits after the prompt, and its times.
    fn text(&self, runs: &Runs<'_>) -> Result<(Vec<f32>, ModeReport), Failure> {
        let request = Request {
            prompt: &runs.prompts[0],
            tokens: runs.tokens,
            mode: Mode::Graph,
            sampling: Sampling::default(),
            stop_at: &[],
            check: false,
        };
        let text = generate(runs.model, &request, &mut |_| Ok(()))?;
        let report = ModeReport::from(&text);
        Ok((text.last_logits, report))
    }

    fn timed(&self, runs: &Runs<'_>, starting: usize) -> Result<Rates, Failure> {
        if self.batch.is_some() {
            let rates = runs.timed(Mode::Graph, starting)?;
            return Ok(Rates {
                prompt_tokens_per_s: rates.prompt_tokens_per_s,
                tokens_per_s: rates.tokens_per_s,
                step_ms_p50: rates.step_ms_p50,
            });
        }
        let report = self.text(runs)?.1;
        Ok(Rates {
            prompt_tokens_per_s: f64::from(self.arguments.on.prompt) * 1e3 / report.prefill_ms,
            tokens_per_s: report.decode_tokens_per_s,
            step_ms_p50: report.token_ms_p50,
        })
    }

    /// Returns whether the device of a rank, which has its part, holds the whole model too.
    fn holds_both(&self, rank: &Rank) -> Result<bool, Failure> {
        let device = rank.runtime.raw_device();
        let free = device.memory_info()?.free;
        // Caches, activations and workspaces take a fraction of the weights.
        let need = self.files.weights.total_bytes();
        let need = need.saturating_add(need / 16);
        Ok(device.caps().host_visible || need <= free)
    }

    fn rank(&self, rank: &Rank) -> Result<Measured, Failure> {
        let (a, world) = (self.arguments, &rank.world);
        let comm = world.comm(&rank.runtime, &rank.config("tp").sends(false))?;
        let part = load_part(&comm, self.files, a.on.dtype(), true)?;
        let whole = match world.rank() {
            0 if self.holds_both(rank)? => {
                Some(load(&rank.runtime, self.files, a.on.dtype(), a.on.json()).map_err(|e| {
                    e.at("the whole model, which is measured on rank 0 beside its part")
                })?)
            }
            _ => None,
        };
        let whole = whole.as_ref().map(|model| self.begin(model)).transpose()?;
        world.barrier("begin", TURN)?;
        let (logits, runs, starting) = self.begin(&part)?;
        let mut measured = Measured {
            library: comm.library().to_owned(),
            one_rank: Vec::new(),
            all_ranks: Vec::new(),
            compared: None,
        };
        if let Some((wanted, ..)) = &whole {
            // After another token other logits are right. Two tokens may be as likely to the last
            // digit of the type.
            let pairs =
                logits.iter().zip(wanted).filter(|(found, wanted)| found.token == wanted.token);
            let count = pairs.clone().count();
            let differ = pairs
                .map(|(found, wanted)| difference(&found.logits, &wanted.logits))
                .fold(0.0, f64::max);
            measured.compared = Some((differ, count));
        }
        for turn in 0..a.repeat {
            if let Some((_, runs, starting)) = &whole {
                measured.one_rank.push(self.timed(runs, *starting)?);
            }
            world.barrier(&format!("turn/{turn}"), TURN)?;
            measured.all_ranks.push(self.timed(&runs, starting)?);
        }
        if a.verbose && world.rank() == 0 {
            let alone = Decoder::new(&part, runs.positions(), 1, Sampling::default())?;
            let step = match self.batch {
                None => alone.step_operators(),
                Some(_) => {
                    Batch::preallocated(&part, runs.prompts.len(), runs.positions(), Mode::Eager)?
                        .step_operators()
                }
            };
            operators::print(&alone.prompt_operators(a.on.prompt as usize)?, &step)?;
        }
        rank.runtime.synchronize()?;
        Ok(measured)
    }
}

fn median(all: &[Rates]) -> Rates {
    let of = |f: fn(&Rates) -> f64| percentile(&all.iter().map(f).collect::<Vec<_>>(), 0.5);
    Rates {
        prompt_tokens_per_s: of(|r| r.prompt_tokens_per_s),
        tokens_per_s: of(|r| r.tokens_per_s),
        step_ms_p50: of(|r| r.step_ms_p50),
    }
}

/// The median of the pairs' ratios.
fn ratio(measured: &Measured, of: fn(&Rates) -> f64) -> f64 {
    let pairs = measured.all_ranks.iter().zip(&measured.one_rank);
    percentile(&pairs.map(|(all, one)| of(all) / of(one)).collect::<Vec<_>>(), 0.5)
}

/// All ranks beside one, where that was measured.
///
/// # Errors
/// If the two gave other logits, or none that can be compared.
fn beside(measured: &Measured, ranks: u32, limit: f64) -> Result<Beside, Failure> {
    let Some((differ, compared)) = measured.compared else { return Ok(Beside::default()) };
    if compared == 0 {
        return Err(Failure::new(format!(
            "no sequence drew the same first token on {ranks} ranks as on one; compare one sequence, without --batch"
        )));
    }
    if differ > limit {
        return Err(Failure::new(format!(
            "{ranks} ranks gave logits that differ by {differ:.1e} of the largest one from those of \
             one rank; the limit is {limit:.1e}"
        )));
    }
    Ok(Beside {
        one_rank: Some(median(&measured.one_rank)),
        ratio: Some(ratio(measured, |r| r.tokens_per_s)),
        prompt_ratio: Some(ratio(measured, |r| r.prompt_tokens_per_s)),
        logits_differ_from_one_rank: Some(differ),
        sequences_compared: Some(compared),
    })
}

pub(super) fn run(a: &DecodeArguments, plan: Plan, devices: &dyn Devices) -> Result<(), Failure> {
    if a.join.is_some() {
        return Err(Failure::misuse("--join is measured on one rank; leave it or --ranks out"));
    }
    let batch = a.one_batch("--ranks")?;
    if batch.is_some() && a.tokens < 3 {
        return Err(Failure::misuse(
            "--batch: the first step is not timed; ask for 3 --tokens at least",
        ));
    }
    let count = plan.ranks();
    let files = match plan {
        // Copies read, or make, the weights themselves.
        Plan::Copies(_) => return a.ranks.copies(count),
        _ => a.on.read()?,
    };
    let part = Part::new(0, count)?;
    part.config(&files.config).map_err(|e| Failure::misuse(e.to_string()).at(&files.name))?;
    let (device, number) = plan.devices(a.on.device());
    let system = a.on.open_from(devices, device, number)?;
    let sequences = batch.unwrap_or(NonZeroU32::MIN);
    fits(&files, a.on.prompt as usize, a.tokens, sequences, a.on.dtype(), &system.runtime)?;
    let bench = Bench { arguments: a, batch, files: &files };
    let (shows, mut member) = (plan.shows(), None);
    let measured = match plan {
        Plan::Member(world) => {
            member = Some(world.clone());
            let named = format!("rank {}", world.rank());
            bench.rank(&Rank::member(world, &system)).map_err(|failure| failure.at(named))?
        }
        _ => {
            let mut all = ranks::threads(&system, count, |rank| bench.rank(rank))?;
            system.check()?;
            all.swap_remove(0)
        }
    };
    if let Some(world) = member {
        world.close(ranks::END)?;
    }
    if !shows {
        return Ok(());
    }
    let beside = beside(&measured, count, tolerance(a.on.dtype()))?;
    let report = Report {
        subject: a.on.subject(files.name.clone(), &system),
        ranks: count,
        batch,
        tokens: a.tokens,
        repeat: a.repeat,
        weight_bytes: files.weights.total_bytes(),
        part_bytes: part.bytes(&files.config, &files.weights)?,
        all_ranks: median(&measured.all_ranks),
        beside,
        library: measured.library,
    };
    if a.on.json() { print_json(&report) } else { print(&report) }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut table = Table::default();
    table.head(["", "prompts", "decode", "step p50"]);
    let one = report.beside.one_rank.as_ref().map(|rates| ("1 rank".to_owned(), rates));
    let all = (format!("{} ranks", report.ranks), &report.all_ranks);
    for (name, rates) in one.into_iter().chain([all]) {
        table.row([
            name,
            format!("{:.0} tokens/s", rates.prompt_tokens_per_s),
            format!("{:.0} tokens/s", rates.tokens_per_s),
            format!("{:.3} ms", rates.step_ms_p50),
        ]);
    }
    let mut out = std::io::stdout().lock();
    write!(out, "{table}")?;
    write!(out, "{} ranks by {}: ", report.ranks, report.library)?;
    match (report.beside.ratio, report.beside.prompt_ratio) {
        (Some(ratio), Some(prompts)) => writeln!(
            out,
            "{ratio:.2} times as many tokens/s as one rank, {prompts:.2} times in prompts of {} tokens",
            report.subject.prompt
        )?,
        _ => writeln!(
            out,
            "prompts of {} tokens; the first rank's device does not hold the whole model",
            report.subject.prompt
        )?,
    }
    write!(
        out,
        "the first rank has {} of {} of weights",
        bytes(report.part_bytes),
        bytes(report.weight_bytes)
    )?;
    if let (Some(compared), Some(differ)) =
        (report.beside.sequences_compared, report.beside.logits_differ_from_one_rank)
    {
        write!(
            out,
            "; logits of {compared} of {} sequences differ from one rank's by {differ:.1e}",
            report.batch.map_or(1, NonZeroU32::get)
        )?;
    }
    writeln!(out)?;
    Ok(())
}
