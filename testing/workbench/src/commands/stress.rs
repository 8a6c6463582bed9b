//! `leasehold-workbench stress`: random programs on a device, against a model.
//!
//! This module must not know what a program does.

use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::{Context, DeviceId};
use leasehold_cli::commands::print_json;
use leasehold_cli::failure::Failure;
use leasehold_cli::host;
use leasehold_cli::style::{Tone, paint};
use leasehold_stress::{Border, Options, Report, Target, stress};
use std::io::Write;
use std::process::ExitCode;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device to try
    #[arg(long, value_name = "ID", default_value = "cpu:0")]
    device: DeviceId,
    /// Tries the backend over the simulated device instead of the vendor's driver
    #[arg(long)]
    sim: bool,
    /// The first seed: the same seed gives the same program
    #[arg(long, value_name = "S", default_value_t = 0)]
    seed: u64,
    /// Programs, of this and the following seeds
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u64,
    /// Steps of each program [default: 10000, with --ranks 300]
    #[arg(long, value_name = "N")]
    ops: Option<u32>,
    /// Threads of each program
    #[arg(long, value_name = "T", default_value_t = 8, value_parser = clap::value_parser!(u8).range(1..=64))]
    threads: u8,
    /// Programs of so many ranks: threads with a device each, and collectives between them
    #[arg(long, value_name = "R", conflicts_with = "threads", value_parser = clap::value_parser!(u8).range(1..=64))]
    ranks: Option<u8>,
    /// The functions that the steps call: Rust's safe API, or the C ABI where it has the function
    #[arg(long, value_name = "BORDER", value_enum, default_value_t = Through::Rust, conflicts_with = "ranks")]
    through: Through,
    /// Makes calls of a simulated driver fail, come late or in another order; of ranks, none fails
    #[arg(long)]
    faults: bool,
    /// Seconds without progress after which a program hangs
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    timeout: u32,
    /// Seconds for the reduction of a failing program
    #[arg(long, value_name = "SECONDS", default_value_t = 60)]
    shrink: u32,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// The functions that the steps call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Through {
    Rust,
    C,
}

/// Bytes of host memory for a step of a program, with its plan and the contents that it expects.
const STEP: u64 = 1 << 10;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    let device = arguments.device;
    let target = Target::new(device, arguments.sim)
        .map_err(|e| Failure::misuse(format!("{device}: {e}")))?;
    if arguments.faults && !target.simulated {
        return Err(Failure::misuse(format!(
            "--faults: nothing makes calls of {device} fail; sim:0 and cuda:0 --sim can"
        )));
    }
    let ops = arguments.ops.unwrap_or(if arguments.ranks.is_some() { 300 } else { 10_000 });
    let program = format!("a program of {ops} steps");
    let step = STEP * u64::from(arguments.ranks.unwrap_or(1));
    host::needs(&program, u64::from(ops) * step, "ask for fewer with --ops")?;
    if arguments.ranks.is_some() {
        target.has_collectives().map_err(|e| Failure::misuse(format!("--ranks: {e}")))?;
    }
    if !target.simulated {
        Context::new().runtime(device).map_err(|e| Failure::from(e).at(device))?;
    }
    let mut options = Options::new(target);
    options.seed = arguments.seed;
    options.seeds = arguments.seeds;
    options.ops = ops;
    options.threads = arguments.threads;
    options.ranks = arguments.ranks;
    options.border = match arguments.through {
        Through::Rust => Border::Rust,
        Through::C => Border::C,
    };
    options.faults = arguments.faults;
    options.timeout = Duration::from_secs(arguments.timeout.into());
    options.shrink = Duration::from_secs(arguments.shrink.into());
    let report = tried(&options);
    let unable = report.unable.as_deref().map(|why| Failure::new(format!("{device}: {why}")));
    if let Some(unable) = unable {
        // Failures that came before are told too.
        if !report.failures.is_empty() {
            print(arguments, &report)?;
        }
        return Err(unable);
    }
    print(arguments, &report)?;
    Ok(if report.failures.is_empty() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// The time between two lines about progress.
const SPOKEN: Duration = Duration::from_secs(10);

/// Progress in lines, for standard errors that are no terminals and show no bar.
struct Lines {
    of: u64,
    done: u64,
    failed: u64,
    /// The time of the next line that no failure asks for.
    next: Instant,
}

impl Lines {
    fn new(of: u64, now: Instant) -> Self {
        Self { of, done: 0, failed: 0, next: now + SPOKEN }
    }

    /// The line that is due when a program has ended.
    fn ended(&mut self, now: Instant, failed: bool) -> Option<String> {
        self.done += 1;
        self.failed += u64::from(failed);
        if now < self.next || self.done == self.of {
            return None;
        }
        self.next = now + SPOKEN;
        Some(format!("{} of {} seeds, {} failed", self.done, self.of, self.failed))
    }
}

/// Runs the programs with a progress bar, or with lines about progress.
fn tried(options: &Options) -> Report {
    let mut lines = Lines::new(options.seeds, Instant::now());
    let bar = ProgressBar::new(options.seeds);
    if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {wide_msg}") {
        bar.set_style(style);
    }
    let report = stress(options, |seed, failure| {
        bar.inc(1);
        let told = failure.map(|failure| format!("seed {seed} failed: {}", failure.what));
        let due = lines.ended(Instant::now(), failure.is_some());
        if !bar.is_hidden() {
            told.into_iter().for_each(|told| bar.println(told));
            return;
        }
        for line in told.into_iter().chain(due) {
            // Without standard error, nobody wants to know.
            let _ = writeln!(std::io::stderr(), "{line}");
        }
    });
    bar.finish_and_clear();
    report
}

fn print(arguments: &Arguments, report: &Report) -> Result<(), Failure> {
    if arguments.json { print_json(report) } else { show(report) }
}

fn show(report: &Report) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    for failure in &report.failures {
        writeln!(out, "seed {}: {}", failure.seed, failure.what)?;
        failure.threads.iter().try_for_each(|thread| writeln!(out, "  {thread}"))?;
        writeln!(out, "as a test of {} steps:\n\n{}", failure.steps, failure.test)?;
    }
    let Report { device, simulated, seeds, ops, threads, ranks, seconds, .. } = report;
    let on = ranks.map_or_else(|| format!("{threads} threads"), |n| format!("{n} ranks"));
    let (over, rate) =
        (if *simulated { " (simulated)" } else { "" }, (*seeds as f64) * f64::from(*ops) / seconds);
    let failed = format!("{} failed", report.failures.len());
    let tone = if report.failures.is_empty() { Tone::Good } else { Tone::Bad };
    let failed = paint(tone, &failed);
    writeln!(
        out,
        "{device}{over}: {seeds} seeds of {ops} steps on {on} in {seconds:.1} s ({rate:.0} steps/s): {failed}"
    )?;
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_line_about_progress_is_due_after_some_time_and_not_at_the_end() {
        let begin = Instant::now();
        let at = |seconds| begin + Duration::from_secs(seconds);
        let mut lines = Lines::new(5, begin);
        assert_eq!(lines.ended(at(1), true), None);
        assert_eq!(lines.ended(at(10), false).unwrap(), "2 of 5 seeds, 1 failed");
        assert_eq!(lines.ended(at(11), false), None);
        assert_eq!(lines.ended(at(25), true).unwrap(), "4 of 5 seeds, 2 failed");
        assert_eq!(lines.ended(at(99), false), None, "the result says all");
    }
}
