//! `leasehold-workbench replay`: replays an allocation trace on the allocator, or on the process's
//! heap, and reports the costs.

use crate::commands::open;
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::{DeviceId, MemoryKind, Runtime};
use leasehold_alloc::{Backing, Policy};
use leasehold_cli::commands::memory::{REPORT, write_report};
use leasehold_cli::commands::print_json;
use leasehold_cli::commands::run::parse_device as parse_id;
use leasehold_cli::failure::Failure;
use leasehold_cli::output::{Inputs, Outputs};
use leasehold_cli::table::{Table, bytes};
use leasehold_sim::memory::replay::{
    Options, Player, Progress, Report, events_to_play, measure, recorded_replay, virtual_device,
};
use leasehold_sim::memory::trace::Recording;
use std::io::Write;
use std::path::{Path, PathBuf};

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The trace: text of `t_us,op,id,size,stream`, or a pickle of PyTorch's
    /// `torch.cuda.memory._dump_snapshot`, each plain or compressed with gzip; `-` reads standard
    /// input
    trace: PathBuf,
    /// The device of PyTorch's snapshot whose history is replayed; the one with the most events
    /// when left out
    #[arg(long, value_name = "N")]
    snapshot_device: Option<usize>,
    /// The source of the memory; `virtual` maps nothing, so that large traces run on small machines
    #[arg(long, default_value = "virtual", value_parser = parse_device)]
    device: On,
    /// A limit, as a multiple of the trace's peak, times the threads
    #[arg(long, value_parser = parse_budget)]
    budget: Option<f64>,
    /// Searches the smallest limit with which the trace completes; with policy `compact` unless
    /// `--policy` says otherwise
    #[arg(long)]
    find_min_budget: bool,
    /// Threads that each replay a copy on their own streams
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=64))]
    threads: u32,
    /// Number of replays of the trace; memory that is live at its end is freed in between
    #[arg(long, default_value_t = 1, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    repeat: u32,
    /// Another allocator instead of this one: the process's heap
    #[arg(long, value_enum, conflicts_with = "policy")]
    peer: Option<Peer>,
    /// When free memory is moved rather than new memory taken; `balanced` when left out
    #[arg(long, value_enum)]
    policy: Option<PolicyName>,
    /// Operations after which a stream's work completes
    #[arg(long, default_value_t = 32, value_parser = clap::value_parser!(u64).range(0..=1_000_000))]
    lag: u64,
    /// Writes a page about the memory of one more replay, one HTML file: bytes over time, largest
    /// holders at the peak, fragmentation, events
    #[arg(long, value_name = "FILE", conflicts_with = "peer")]
    report: Option<PathBuf>,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum On {
    Virtual,
    Device(DeviceId),
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
enum Peer {
    System,
}

impl From<Peer> for Player {
    fn from(p: Peer) -> Self {
        match p {
            Peer::System => Player::System,
        }
    }
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

fn parse_device(text: &str) -> Result<On, String> {
    if text == "virtual" {
        return Ok(On::Virtual);
    }
    parse_id(text).map(On::Device).map_err(|why| format!("{why}, or `virtual`"))
}

fn parse_budget(text: &str) -> Result<f64, String> {
    match text.parse::<f64>() {
        Ok(b) if b.is_finite() && b > 0.0 => Ok(b),
        _ => Err("a budget is a number above 0, a multiple of the trace's peak".to_owned()),
    }
}

/// Traces with fewer events end before a progress bar is useful.
const LONG: u64 = 200_000;

/// The most events that a report keeps.
const MOST_RECORDED: usize = 1 << 21;

pub(crate) fn run(arguments: &Arguments) -> Result<(), Failure> {
    let runtime = match arguments.device {
        On::Virtual => None,
        On::Device(device)
            if arguments.peer == Some(Peer::System)
                && device.backend != leasehold::BackendKind::Cpu =>
        {
            return Err(Failure::misuse(format!(
                "--peer system is the host's memory, not {device}'s"
            )));
        }
        On::Device(device) => Some(open(device, None)?),
    };
    let standard = arguments.trace == Path::new("-");
    let inputs = Inputs::default();
    let inputs = if standard { inputs.standard() } else { inputs.file(&arguments.trace) };
    let outputs = Outputs::open(&[(REPORT, arguments.report.as_deref())], &inputs)?;
    let spinner = ProgressBar::new_spinner();
    spinner.set_message("reading the trace");
    spinner.tick();
    let recording = if standard {
        let input = std::io::stdin().lock();
        Recording::read(input, "standard input", arguments.snapshot_device)?
    } else {
        Recording::open(&arguments.trace, arguments.snapshot_device)?
    };
    spinner.finish_and_clear();
    let trace = recording.trace;
    if let Some(left_out) = &recording.left_out {
        // A closed standard error is no failure of the replay.
        let _ = writeln!(std::io::stderr(), "{left_out}; another one: --snapshot-device");
    }
    let granule = backing(runtime.as_ref())?.caps().granule;
    let options = Options {
        player: arguments.peer.map_or(Player::Own, Player::from),
        policy: arguments.policy.map_or(Policy::Balanced, Policy::from),
        budget: arguments.budget,
        repeat: arguments.repeat,
        threads: arguments.threads,
        lag: arguments.lag,
        ..Options::default()
    };
    let events = events_to_play(&trace, &options, arguments.find_min_budget, granule)?;
    let bar = if events > LONG { ProgressBar::new(events) } else { ProgressBar::hidden() };
    if let Ok(style) = ProgressStyle::with_template(
        "replaying {bar:32} {human_pos}/{human_len} events, {eta} left",
    ) {
        bar.set_style(style);
    }
    let tick = bar.clone();
    let options = Options { progress: Some(Progress::new(move |n| tick.inc(n))), ..options };
    let min_budget =
        arguments.find_min_budget.then(|| arguments.policy.map_or(Policy::Compact, Policy::from));
    let report = measure(&trace, &options, min_budget, &|| backing(runtime.as_ref()))?;
    bar.finish_and_clear();
    if arguments.report.is_some() {
        // A growth, a move or a wait is an event too; most allocations make none.
        let events = (2 * trace.events.len() + 4096).min(MOST_RECORDED);
        let options = Options { progress: None, ..options };
        let snapshot = recorded_replay(&trace, &options, backing(runtime.as_ref())?, events)?;
        let name = arguments.trace.file_name().unwrap_or(arguments.trace.as_os_str());
        write_report(&outputs, &format!("a replay of {}", name.display()), &snapshot)?;
    }
    if arguments.json { print_json(&report) } else { print(&report) }
}

fn backing(runtime: Option<&Runtime>) -> leasehold::Result<Box<dyn Backing>> {
    match runtime {
        None => virtual_device(),
        Some(runtime) => runtime.raw_device().backing(MemoryKind::Device),
    }
}

fn print(r: &Report) -> Result<(), Failure> {
    let mut table = Table::words();
    table.row(["events".to_owned(), r.events.to_string()]);
    table.row(["peak requested".to_owned(), bytes(r.peak_requested)]);
    table.row([
        "peak reserved".to_owned(),
        format!("{} ({:.4} of requested)", bytes(r.peak_reserved), r.ratio),
    ]);
    if let Some(least) = r.min_budget {
        table.row(["smallest budget".to_owned(), format!("{least:.4} of requested")]);
    }
    table.row([
        "ns per operation".to_owned(),
        format!("{:.1} ({:.1} in the last repetition)", r.ns_per_op.mean, r.ns_per_op.steady),
    ]);
    let times = format!("{:.0}, {:.0}, {:.0}", r.ns_per_op.p50, r.ns_per_op.p99, r.ns_per_op.p999);
    table.row(["p50, p99, p99.9".to_owned(), times]);
    table.row([
        "driver calls".to_owned(),
        format!("{} ({} in the last repetition)", r.driver_calls.total, r.driver_calls.steady),
    ]);
    table.row(["remaps, host waits".to_owned(), format!("{}, {}", r.remaps, r.host_waits)]);
    table.row(["failed".to_owned(), r.failed.to_string()]);
    write!(std::io::stdout().lock(), "{table}")?;
    Ok(())
}
