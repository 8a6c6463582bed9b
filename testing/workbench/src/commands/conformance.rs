//! `leasehold-workbench conformance`: runs the conformance suite on a device.
//!
//! This module must not know what a case does. Only [`factory`] knows backends.

#[cfg(feature = "sim")]
use crate::devices::SEED;
#[cfg(feature = "sim")]
use crate::factories;
#[cfg(feature = "sim")]
use crate::simulated::no_debug_checks;
use indicatif::{ProgressBar, ProgressStyle};
use leasehold::backend::DebugOptions;
use leasehold::backend::{Backend, KernelDesc};
use leasehold::cpu::{CpuBackend, CpuConfig};
use leasehold::{BackendKind, Context, DeviceId};
#[cfg(feature = "sim")]
use leasehold_cli::commands::memory::AllocatorOptions;
use leasehold_cli::commands::memory::DebugArguments;
use leasehold_cli::commands::print_json;
use leasehold_cli::failure::Failure;
use leasehold_cli::host;
use leasehold_cli::style::{Tone, paint};
use leasehold_conformance::{
    Case, CaseResult, ELSEWHERE, Expectation, Expectations, Factory, Filter, Home, Isolation,
    Progress, Ranks, Report, Status, Suite, Tag, TestKernel, Variant, Wrap, answer, run_with,
};
use leasehold_input::{printable, shown};
use serde::Serialize;
use std::collections::BTreeMap;
use std::io::Write;
use std::process::{Command, ExitCode};
use std::sync::Arc;

#[derive(Debug, clap::Args)]
pub(crate) struct Arguments {
    /// The device to try
    #[arg(long, value_name = "ID", default_value = "cpu:0")]
    device: DeviceId,
    /// Tries the backend over the simulated device instead of the vendor's driver
    #[arg(long)]
    sim: bool,
    /// Only these cases: numbers, ranges of numbers and parts of sentences, separated by commas
    #[arg(long, value_name = "CASES", value_delimiter = ',')]
    filter: Vec<String>,
    /// Only cases with this tag: `sanitizer` (cases for a run under compute-sanitizer, with
    /// --memory-debug pass-through)
    #[arg(long, value_name = "TAG", value_parser = parse_tag)]
    tag: Option<Tag>,
    #[command(flatten)]
    memory: DebugArguments,
    /// Runs each case under the validating wrapper, too
    #[arg(long)]
    validated: bool,
    /// Runs repetitions in full instead of a tenth of them
    #[arg(long)]
    thorough: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
    /// Runs one case for another process
    #[arg(long, value_name = "CASE", hide = true)]
    isolated: Option<String>,
}

fn parse_tag(text: &str) -> Result<Tag, String> {
    text.parse().map_err(|e: leasehold::Error| e.to_string())
}

/// The CPU backend under test, with these debug checks.
struct Cpu(DebugOptions);

impl Cpu {
    fn make(&self, config: CpuConfig) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(CpuBackend::with_config(config.debug(self.0))?))
    }
}

impl Factory for Cpu {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        self.make(CpuConfig::default())
    }

    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_cpu())
    }

    fn one_worker(&self) -> leasehold::Result<Arc<dyn Backend>> {
        self.make(CpuConfig::threads(1))
    }

    fn peer(&self) -> Option<leasehold::Result<Arc<dyn Backend>>> {
        Some(self.backend())
    }

    fn ranks(&self, most: u32) -> Option<leasehold::Result<Ranks>> {
        Some(self.backend().and_then(|backend| Ranks::on_cpu(backend, most)))
    }

    fn expectations(&self) -> Expectations {
        Expectations {
            unsupported: &[
                Expectation { case: 3, reason: "there is always a processor" },
                Expectation {
                    case: 101,
                    reason: "a library call in a graph runs when the graph does",
                },
            ],
            expected_failure: &[],
        }
    }
}

/// The factory of a device's backend.
fn factory(device: DeviceId, sim: bool, debug: DebugOptions) -> Result<Arc<dyn Factory>, Failure> {
    match (device.backend, sim) {
        (BackendKind::Cpu, false) => Ok(Arc::new(Cpu(debug))),
        (BackendKind::Cpu, true) => {
            Err(Failure::misuse("--sim: the CPU has no driver to simulate"))
        }
        #[cfg(feature = "cuda")]
        (BackendKind::Cuda, false) => Ok(Arc::new(factories::Cuda(debug))),
        #[cfg(feature = "cuda")]
        (BackendKind::Cuda, true) => Ok(Arc::new(factories::SimulatedCuda { seed: SEED, debug })),
        #[cfg(feature = "mps")]
        (BackendKind::Mps, false) => Ok(Arc::new(factories::Mps(debug))),
        #[cfg(feature = "mps")]
        (BackendKind::Mps, true) => Ok(Arc::new(factories::SimulatedMps { seed: SEED, debug })),
        #[cfg(feature = "sim")]
        (BackendKind::Sim, _) => {
            no_debug_checks(device, AllocatorOptions { debug, ..AllocatorOptions::default() })?;
            Ok(Arc::new(factories::Simulated(SEED)))
        }
        (other, _) => {
            let reports = Context::new().backends();
            let why = reports.into_iter().find(|r| r.kind == other).and_then(|r| r.devices.err());
            Err(match why {
                Some(why) => Failure::from(why).at(device),
                None => {
                    Failure::new(format!("{device}: this build has no factory for {other} devices"))
                }
            })
        }
    }
}

/// The numbers of the cases that the terms of `--filter` name; none without terms.
fn numbers(terms: &[String]) -> Result<Vec<u16>, Failure> {
    let suite = Suite::new();
    let mut all = Vec::new();
    for term in terms.iter().map(|t| t.trim()) {
        let range = term.split_once('-').unwrap_or((term, term));
        let before = all.len();
        match (range.0.parse::<u16>(), range.1.parse::<u16>()) {
            (Ok(from), Ok(to)) => {
                all.extend(
                    suite.cases().iter().map(|c| c.number).filter(|n| (from..=to).contains(n)),
                );
                if let Some(home) = ELSEWHERE.iter().find(|e| from == e.number && to == e.number) {
                    return Err(Failure::misuse(format!(
                        "--filter {term}: no case; {}",
                        at_home(home.home)
                    )));
                }
            }
            _ if !term.is_empty() => {
                all.extend(
                    suite.cases().iter().filter(|c| c.name.contains(term)).map(|c| c.number),
                );
            }
            _ => {}
        }
        if all.len() == before {
            return Err(Failure::misuse(format!("--filter {term}: no such case")));
        }
    }
    Ok(all)
}

fn at_home(home: Home) -> String {
    match home {
        Home::Missing(why) => why.to_owned(),
        Home::Tests { file, .. } => format!("tried in {file}"),
        Home::Measured(by) => format!("measured by {by}"),
        _ => "elsewhere".to_owned(),
    }
}

/// Silences panics: kernels and host calls panic on purpose, on threads of the backend and the
/// suite.
fn quiet() {
    let loud = std::panic::take_hook();
    let main = std::thread::current().id();
    std::panic::set_hook(Box::new(move |info| {
        if std::thread::current().id() == main {
            loud(info);
        }
    }));
}

/// The address space of the cases on the CPU, threads included.
const ADDRESSES: u64 = 1800 << 20;

pub(crate) fn run(arguments: &Arguments) -> Result<ExitCode, Failure> {
    host::needs_addresses("the suite", ADDRESSES)?;
    let debug = arguments.memory.debug_checks()?;
    let factory = factory(arguments.device, arguments.sim, debug)?;
    let mut filter = Filter {
        device: Some(arguments.device),
        numbers: numbers(&arguments.filter)?,
        tag: arguments.tag,
        wrap: (!arguments.validated).then_some(Wrap::Plain),
        thorough: arguments.thorough,
        ..Filter::default()
    };
    if let Some(case) = &arguments.isolated {
        quiet();
        return Ok(answer(factory, case, &filter));
    }
    let backend = factory.backend().map_err(|e| Failure::from(e).at(arguments.device))?;
    let devices = backend.devices().map_err(|e| Failure::from(e).at(arguments.device))?;
    drop(backend);
    let Some(device) = devices.into_iter().find(|d| d.id == arguments.device) else {
        return Err(Failure::new(format!("{}: there is no such device", arguments.device)));
    };
    filter.isolation = Some(isolation(arguments, debug)?);
    quiet();
    let report = tried(factory, &filter, !arguments.json)?;
    if arguments.json {
        print_json(&Told::new(device.id, device.name, arguments.sim, debug, &report))?;
    } else {
        show(&device.to_string(), &report)?;
    }
    Ok(if report.ok() { ExitCode::SUCCESS } else { ExitCode::FAILURE })
}

/// Cases that need a process of their own get this command again.
fn isolation(arguments: &Arguments, debug: DebugOptions) -> Result<Isolation, Failure> {
    let program =
        std::env::current_exe().map_err(|e| Failure::new(format!("where this command is: {e}")))?;
    let (device, sim, thorough) = (arguments.device.to_string(), arguments.sim, arguments.thorough);
    Ok(Isolation::new(move |case| {
        let mut command = Command::new(&program);
        command.args(["conformance", "--device", &device, "--isolated", case]);
        command.args(sim.then_some("--sim")).args(thorough.then_some("--thorough"));
        if debug.any() {
            command.args(["--memory-debug", &debug.to_string()]);
        }
        command
    }))
}

/// Lines about cases, each written as its case ends. A case that ends the process leaves the lines
/// before it, and its own name: on the progress bar, or without a bar as the begin of a line.
struct Lines {
    bar: ProgressBar,
    /// Whether the lines go to the standard output.
    shown: bool,
    /// The runs of the present case.
    runs: Vec<CaseResult>,
    /// The first error of the output.
    outcome: std::io::Result<()>,
}

impl Lines {
    fn new(shown: bool) -> Self {
        let bar = ProgressBar::new(0);
        if let Ok(style) = ProgressStyle::with_template("{bar:32} {pos}/{len} {wide_msg}") {
            bar.set_style(style);
        }
        Self { bar, shown, runs: Vec::new(), outcome: Ok(()) }
    }

    fn write(&mut self, text: &str) {
        if self.shown && self.outcome.is_ok() {
            self.outcome = self.bar.suspend(|| {
                let mut out = std::io::stdout().lock();
                out.write_all(text.as_bytes())?;
                out.flush()
            });
        }
    }

    fn begins(&mut self, case: &Case, variant: Variant, done: usize, of: usize) {
        if self.runs.first().is_some_and(|r| r.case != case.number) {
            self.end_case();
        }
        if self.bar.is_hidden() && self.runs.is_empty() {
            self.write(&begin_of_line(case.number, case.name));
        }
        self.bar.set_length(of as u64);
        self.bar.set_position(done as u64);
        self.bar.set_message(format!("{} {} [{}]", case.number, case.name, variant.name()));
    }

    /// Writes the line of the present case: its outcome, or the outcome of each variant if they
    /// differ.
    fn end_case(&mut self) {
        let runs = std::mem::take(&mut self.runs);
        let Some(first) = runs.first() else { return };
        let same = runs.iter().all(|r| r.status == first.status);
        let told = |r: &CaseResult, variant: &str| {
            let (word, tone, why) = told(&r.status);
            let word = paint(tone, word);
            let why = why.lines().next().unwrap_or_default();
            let colon = if why.is_empty() { "" } else { ": " };
            format!("{word} [{variant}]{colon}{}", printable(why))
        };
        let outcome = match (same, runs.len()) {
            (true, 1) => told(first, &first.variant),
            (true, n) => told(first, &format!("all {n}")),
            (false, _) => {
                let each: Vec<_> = runs.iter().map(|r| told(r, &r.variant)).collect();
                each.join(", ")
            }
        };
        let begin = if self.bar.is_hidden() {
            String::new()
        } else {
            begin_of_line(first.case, first.name)
        };
        self.write(&format!("{begin}{outcome}\n"));
    }
}

fn begin_of_line(number: u16, name: &str) -> String {
    format!("{number:<4} {name} ... ")
}

/// A status in words, and its reason.
fn told(status: &Status) -> (&'static str, Tone, &str) {
    match status {
        Status::Passed => ("passed", Tone::Good, ""),
        Status::Failed(why) => ("FAILED", Tone::Bad, why),
        Status::Skipped(why) => ("skipped", Tone::Pale, why),
        Status::ExpectedFailure(why) => ("fails as expected", Tone::Pale, why),
        Status::UnexpectedPass(why) => ("PASSED UNEXPECTEDLY", Tone::Bad, why),
    }
}

/// Runs the cases. Writes a line for each unless the report is an object.
fn tried(factory: Arc<dyn Factory>, filter: &Filter, shown: bool) -> Result<Report, Failure> {
    let mut lines = Lines::new(shown);
    let report = run_with(factory, filter, |progress| match progress {
        Progress::Begins { case, variant, done, of } => lines.begins(case, variant, done, of),
        Progress::Over(result) => {
            if let Status::Failed(why) | Status::UnexpectedPass(why) = &result.status {
                let why = printable(why);
                lines.bar.println(format!(
                    "{} {} [{}] failed: {why}",
                    result.case, result.name, result.variant
                ));
            }
            lines.runs.push(result.clone());
        }
        _ => {}
    });
    lines.end_case();
    lines.bar.finish_and_clear();
    lines.outcome?;
    Ok(report)
}

/// The fields of the JSON object.
#[derive(Serialize)]
struct Told<'a> {
    device: String,
    name: String,
    simulated: bool,
    /// The debug checks for memory; empty without any.
    memory_debug: String,
    ok: bool,
    passed: usize,
    failed: usize,
    skipped: usize,
    runs: &'a [CaseResult],
    /// Numbers that are not cases, with the places of their tests.
    elsewhere: BTreeMap<u16, String>,
}

impl<'a> Told<'a> {
    fn new(
        device: DeviceId,
        name: String,
        simulated: bool,
        debug: DebugOptions,
        report: &'a Report,
    ) -> Self {
        let [passed, failed, skipped] = counts(report);
        let elsewhere = ELSEWHERE.iter().map(|e| (e.number, at_home(e.home))).collect();
        Self {
            device: device.to_string(),
            name,
            simulated,
            memory_debug: debug.to_string(),
            ok: report.ok(),
            passed,
            failed,
            skipped,
            runs: &report.results,
            elsewhere,
        }
    }
}

/// The numbers of runs that passed (or failed as expected), failed, and were skipped.
fn counts(report: &Report) -> [usize; 3] {
    let mut counts = [0; 3];
    for r in &report.results {
        counts[match r.status {
            Status::Passed | Status::ExpectedFailure(_) => 0,
            Status::Failed(_) | Status::UnexpectedPass(_) => 1,
            Status::Skipped(_) => 2,
        }] += 1;
    }
    counts
}

/// Prints the sum of all cases.
fn show(device: &str, report: &Report) -> Result<(), Failure> {
    let mut cases: Vec<u16> = report.results.iter().map(|r| r.case).collect();
    cases.dedup();
    let [passed, failed, skipped] = counts(report);
    let failed = format!("{failed} failed");
    let failed = if report.ok() { failed.as_str().into() } else { paint(Tone::Bad, &failed) };
    writeln!(
        std::io::stdout().lock(),
        "{}: {} cases in {} runs: {passed} passed, {failed}, {skipped} skipped",
        shown(device),
        cases.len(),
        report.results.len()
    )?;
    Ok(())
}
