//! `leasehold replay`: plays an allocation trace against the allocator and reports what it cost.

use crate::commands::print_json;
use crate::failure::Failure;
use crate::table::{Table, bytes};
use clap::ValueEnum;
use indicatif::ProgressBar;
use leasehold_alloc::Policy;
use leasehold_alloc::replay::{Options, Report, find_min_budget, replay_virtual};
use leasehold_alloc::trace::Trace;
use std::io::Write;
use std::path::PathBuf;
use std::time::Duration;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The trace: `t_us,op,id,size,stream`, plain or compressed with gzip
    trace: PathBuf,
    /// Where the memory comes from; `virtual` maps nothing, so that large traces run on small machines
    #[arg(long, value_enum, default_value_t = On::Virtual)]
    device: On,
    /// A limit, as a multiple of the trace's peak
    #[arg(long, value_parser = parse_budget)]
    budget: Option<f64>,
    /// Looks for the smallest limit with which the trace completes
    #[arg(long)]
    find_min_budget: bool,
    /// Threads that each play a copy on streams of their own
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// How many times the trace is played
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,
    /// When free memory is moved rather than new memory taken
    #[arg(long, value_enum, default_value_t = PolicyName::Balanced)]
    policy: PolicyName,
    /// Operations after which a stream's work completes
    #[arg(long, default_value_t = 32)]
    lag: u64,
    /// Times each operation, for the percentiles
    #[arg(long)]
    timed: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum On {
    Virtual,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum PolicyName {
    Balanced,
    Fastest,
    Compact,
}

impl From<PolicyName> for Policy {
    fn from(p: PolicyName) -> Self {
        match p {
            PolicyName::Balanced => Policy::Balanced,
            PolicyName::Fastest => Policy::Fastest,
            PolicyName::Compact => Policy::Compact,
        }
    }
}

fn parse_budget(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(b) if b.is_finite() && b > 0.0 => Ok(b),
        _ => Err("a budget is a number above 0, a multiple of the trace's peak".to_owned()),
    }
}

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let On::Virtual = arguments.device;
    let spinner = ProgressBar::new_spinner();
    spinner.enable_steady_tick(Duration::from_millis(200));
    spinner.set_message("reading the trace");
    let trace = Trace::open(&arguments.trace)?;
    let options = Options {
        policy: arguments.policy.into(),
        budget: arguments.budget,
        repeat: arguments.repeat,
        threads: arguments.threads,
        lag: arguments.lag,
        timed: arguments.timed,
        ..Options::default()
    };
    spinner.set_message(format!("replaying {} events", trace.events.len()));
    let mut report = replay_virtual(&trace, &options)?;
    if arguments.find_min_budget {
        spinner.set_message("looking for the smallest budget");
        report.min_budget = find_min_budget(&trace, &options)?;
    }
    spinner.finish_and_clear();
    if arguments.json { print_json(&report) } else { print(&report) }
}

fn print(r: &Report) -> Result<(), Failure> {
    let mut table = Table::words();
    table.row(["events".to_owned(), r.events.to_string()]);
    table.row(["peak requested".to_owned(), bytes(r.peak_requested)]);
    table.row(["peak reserved".to_owned(), format!("{} ({:.4} of requested)", bytes(r.peak_reserved), r.ratio)]);
    if r.min_budget > 0.0 {
        table.row(["smallest budget".to_owned(), format!("{:.4}", r.min_budget)]);
    }
    table.row(["ns per operation".to_owned(), format!("{:.1}", r.ns_per_op.mean)]);
    if r.ns_per_op.p50 > 0.0 {
        table.row([
            "p50, p99, p99.9".to_owned(),
            format!("{:.0}, {:.0}, {:.0}", r.ns_per_op.p50, r.ns_per_op.p99, r.ns_per_op.p999),
        ]);
    }
    table.row([
        "driver calls".to_owned(),
        format!("{} ({} in the last repetition)", r.driver_calls.total, r.driver_calls.steady),
    ]);
    table.row(["remaps, host waits".to_owned(), format!("{}, {}", r.remaps, r.host_waits)]);
    table.row(["failed".to_owned(), r.failed.to_string()]);
    write!(std::io::stdout().lock(), "{table}")?;
    Ok(())
}
