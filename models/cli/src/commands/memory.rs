//! Options of a command for the device's memory: records and debug checks.

use crate::failure::Failure;
use crate::output::Outputs;
use leasehold::backend::{Allocator, DebugOptions, Snapshot};
use leasehold_report::{memory_viz, trace};
use serde::Serialize;
use std::env::VarError;
use std::ffi::OsStr;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::time::{SystemTime, UNIX_EPOCH};

/// The environment variable in place of `--memory-debug`.
const VARIABLE: &str = "LEASEHOLD_MEMORY_DEBUG";

/// The options that name output files.
const TRACE: &str = "--memory-trace";
const SNAPSHOT: &str = "--memory-snapshot";
pub const REPORT: &str = "--report";

/// The debug checks of a command.
#[derive(Debug, Default, clap::Args)]
pub struct DebugArguments {
    /// Looks for wrong uses of memory: some of poison, red-zone[=BYTES], quarantine[=BYTES], guard,
    /// pass-through, all, separated by commas; also from LEASEHOLD_MEMORY_DEBUG
    #[arg(long, value_name = "CHECKS", value_parser = parse_debug_checks)]
    memory_debug: Option<DebugOptions>,
}

impl DebugArguments {
    /// The checks, from the environment if the command line has none.
    pub fn debug_checks(&self) -> Result<DebugOptions, Failure> {
        Ok(match (self.memory_debug, std::env::var(VARIABLE)) {
            (Some(debug), _) => debug,
            (None, Ok(text)) if !text.is_empty() => {
                text.parse().map_err(|e| Failure::misuse(format!("{VARIABLE}: {e}")))?
            }
            (None, Err(VarError::NotUnicode(text))) => {
                let text = text.to_string_lossy();
                return Err(Failure::misuse(format!(
                    "{VARIABLE}: `{text}` is no UTF-8; name debug checks, or unset it"
                )));
            }
            _ => DebugOptions::default(),
        })
    }
}

#[derive(Debug, Default, clap::Args)]
pub struct MemoryArguments {
    #[command(flatten)]
    debug: DebugArguments,
    /// Writes every allocation and free into a trace that `leasehold-workbench replay` plays;
    /// compressed if its name ends in .gz
    #[arg(long, value_name = "FILE")]
    memory_trace: Option<PathBuf>,
    /// Writes a snapshot of the memory at the end: for PyTorch's memory_viz, or as JSON if its name
    /// ends in .json
    #[arg(long, value_name = "FILE")]
    memory_snapshot: Option<PathBuf>,
    /// Writes a page about the memory at the end, one HTML file: bytes over time, the largest
    /// holders at the peak, fragmentation, events
    #[arg(long, value_name = "FILE")]
    report: Option<PathBuf>,
    /// The maximum number of events in trace, snapshot and report, the newest ones
    #[arg(long, value_name = "N", default_value_t = 1 << 18, value_parser = clap::value_parser!(u32).range(1..=1 << 26))]
    memory_events: u32,
}

fn parse_debug_checks(text: &str) -> Result<DebugOptions, String> {
    text.parse().map_err(|e: leasehold::Error| e.to_string())
}

/// The settings for the construction of an allocator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct AllocatorOptions {
    pub debug: DebugOptions,
    pub trace_events: usize,
}

impl MemoryArguments {
    /// The options that name output files, with the files.
    pub fn files(&self) -> [(&'static str, Option<&Path>); 3] {
        [
            (TRACE, self.memory_trace.as_deref()),
            (SNAPSHOT, self.memory_snapshot.as_deref()),
            (REPORT, self.report.as_deref()),
        ]
    }

    /// The settings for the construction of the allocator, including those of the environment.
    pub fn options(&self) -> Result<AllocatorOptions, Failure> {
        let debug = self.debug.debug_checks()?;
        let records = self.files().iter().any(|(_, path)| path.is_some());
        Ok(AllocatorOptions {
            debug,
            trace_events: if records { self.memory_events as usize } else { 0 },
        })
    }

    /// The findings of the debug checks, at a time when no holders should be left. Always `Ok`
    /// without checks.
    pub fn verdict(&self, allocator: &Allocator) -> Result<(), Failure> {
        if !allocator.config().debug.any() {
            return Ok(());
        }
        allocator.trim(0)?;
        let (findings, leaks) = (allocator.findings(), allocator.leak_report());
        let number = allocator.stats().findings;
        match findings.first() {
            Some(first) if number == 1 => Err(Failure::new(format!("memory: {first}"))),
            Some(first) => {
                Err(Failure::new(format!("memory: {first}; and {} more findings", number - 1)))
            }
            None if !leaks.is_empty() => Err(Failure::new(format!("memory: leaked: {leaks}"))),
            None => Ok(()),
        }
    }
}

/// Writes the files about a memory that are asked for. `device`: its name in a report.
pub fn write(outputs: &Outputs, allocator: &Allocator, device: &str) -> Result<(), Failure> {
    if [TRACE, SNAPSHOT, REPORT].iter().all(|option| outputs.path(option).is_none()) {
        return Ok(());
    }
    let snapshot = allocator.snapshot();
    let ends_in = |option, end| {
        outputs.path(option).and_then(Path::extension).is_some_and(|e: &OsStr| e == end)
    };
    outputs.write(TRACE, |file| {
        if ends_in(TRACE, "gz") {
            trace::write_gzip(&snapshot, file)
        } else {
            trace::write(&snapshot, file)
        }
    })?;
    outputs.write(SNAPSHOT, |file| {
        if !ends_in(SNAPSHOT, "json") {
            return memory_viz::write(&snapshot, file);
        }
        serde_json::to_writer(file, &snapshot)
            .map_err(|e| leasehold::Error::Unavailable(e.to_string().into()))
    })?;
    write_report(outputs, device, &snapshot)
}

/// Writes the page about a memory, if it is asked for. `device` is its title.
pub fn write_report(outputs: &Outputs, device: &str, snapshot: &Snapshot) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Pool<'a> {
        memory: &'a Snapshot,
    }
    #[derive(Serialize)]
    struct Device<'a> {
        device: &'a str,
        command: String,
        made: Option<u64>,
        pools: [Pool<'a>; 1],
    }
    outputs.write(REPORT, |file| {
        let mut words = std::env::args_os();
        let program = words.next().map(PathBuf::from);
        let program = program.as_deref().and_then(Path::file_stem).map(OsStr::to_owned);
        let words = program.into_iter().chain(words);
        let words = words.map(|word| word.to_string_lossy().into_owned());
        let command = words.collect::<Vec<_>>().join(" ");
        let made = SystemTime::now().duration_since(UNIX_EPOCH).ok().map(|since| since.as_secs());
        let device = Device { device, command, made, pools: [Pool { memory: snapshot }] };
        let cannot = |e: String| leasehold::Error::Unavailable(e.into());
        let text = serde_json::to_string(&device).map_err(|e| cannot(e.to_string()))?;
        let page = leasehold_report::html(&text);
        file.write_all(page.as_bytes()).map_err(|e| cannot(e.to_string()))
    })
}
