//! Options of a command for the device's memory: records and debug aids.

use crate::failure::Failure;
use leasehold_alloc::{Allocator, DebugAids, Snapshot};
use leasehold_alloc_bench::memory_viz;
use leasehold_alloc_bench::trace::Trace;
use serde::Serialize;
use std::env::VarError;
use std::fs::{self, File};
use std::io::{self, BufWriter, Write};
use std::path::{Path, PathBuf};

/// The environment variable in place of `--memory-debug`.
const VARIABLE: &str = "LEASEHOLD_MEMORY_DEBUG";

/// The debug aids of a command.
#[derive(Debug, Default, clap::Args)]
pub(crate) struct AidsArguments {
    /// Looks for wrong uses of memory: some of poison, red-zone[=BYTES], quarantine[=BYTES], guard,
    /// pass-through, all, separated by commas; also from LEASEHOLD_MEMORY_DEBUG
    #[arg(long, value_name = "AIDS", value_parser = parse_aids)]
    memory_debug: Option<DebugAids>,
}

impl AidsArguments {
    /// The aids, from the environment if the command line has none.
    pub(crate) fn aids(&self) -> Result<DebugAids, Failure> {
        Ok(match (self.memory_debug, std::env::var(VARIABLE)) {
            (Some(aids), _) => aids,
            (None, Ok(text)) if !text.is_empty() => {
                text.parse().map_err(|e| Failure::misuse(format!("{VARIABLE}: {e}")))?
            }
            (None, Err(VarError::NotUnicode(text))) => {
                let text = text.to_string_lossy();
                return Err(Failure::misuse(format!(
                    "{VARIABLE}: `{text}` is no UTF-8; name debug aids, or unset it"
                )));
            }
            _ => DebugAids::default(),
        })
    }
}

#[derive(Debug, Default, clap::Args)]
pub(crate) struct MemoryArguments {
    #[command(flatten)]
    aids: AidsArguments,
    /// Writes every allocation and free into a trace that `leasehold replay` plays; compressed if
    /// its name ends in .gz
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

fn parse_aids(text: &str) -> Result<DebugAids, String> {
    text.parse().map_err(|e: leasehold::Error| e.to_string())
}

/// The settings for the construction of an allocator.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub(crate) struct Wishes {
    pub(crate) debug: DebugAids,
    pub(crate) trace_events: usize,
}

impl MemoryArguments {
    /// The files that are asked for, with their options.
    fn files(&self) -> impl Iterator<Item = (&'static str, &Path)> {
        let all = [
            ("--memory-trace", &self.memory_trace),
            ("--memory-snapshot", &self.memory_snapshot),
            ("--report", &self.report),
        ];
        all.into_iter().filter_map(|(option, path)| Some((option, path.as_deref()?)))
    }

    /// Checks that the files can be written, and the file of `--trace`, before any data exists.
    /// Leaves no file behind.
    pub(crate) fn probe(&self, trace: Option<&Path>) -> Result<(), Failure> {
        let files: Vec<_> = self.files().chain(trace.map(|path| ("--trace", path))).collect();
        for (i, (option, path)) in files.iter().enumerate() {
            if let Some((twin, _)) = files[i + 1..].iter().find(|f| place(f.1) == place(path))
                && !other(path)
            {
                let path = path.display();
                return Err(Failure::misuse(format!(
                    "{path} is given for {option} and {twin}; name two files"
                )));
            }
            probe(path)?;
        }
        Ok(())
    }

    /// The settings for the construction of the allocator, including those of the environment.
    pub(crate) fn wishes(&self) -> Result<Wishes, Failure> {
        let debug = self.aids.aids()?;
        let records = self.files().next().is_some();
        Ok(Wishes { debug, trace_events: if records { self.memory_events as usize } else { 0 } })
    }

    /// Writes the requested files. `device`: its name in a report.
    pub(crate) fn write(&self, allocator: &Allocator, device: &str) -> Result<(), Failure> {
        if self.files().next().is_none() {
            return Ok(());
        }
        let snapshot = allocator.snapshot();
        if let Some(path) = &self.memory_trace {
            let trace = Trace::recorded(&snapshot);
            let packed = path.extension().is_some_and(|e| e == "gz");
            create(path, |file| if packed { trace.write_gzip(file) } else { trace.write(file) })?;
        }
        if let Some(path) = &self.memory_snapshot {
            let json = path.extension().is_some_and(|e| e == "json");
            create(path, |file| {
                if !json {
                    return memory_viz::write(&snapshot, file);
                }
                serde_json::to_writer(file, &snapshot)
                    .map_err(|e| leasehold::Error::Unavailable(e.to_string().into()))
            })?;
        }
        self.report.as_ref().map_or(Ok(()), |path| write_report(path, device, &snapshot))
    }

    /// The findings of the debug aids, at a time when no holders should be left. Always `Ok`
    /// without aids.
    pub(crate) fn verdict(&self, allocator: &Allocator) -> Result<(), Failure> {
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

/// Checks that a file can be written. Leaves none behind.
pub(crate) fn probe(path: &Path) -> Result<(), Failure> {
    if other(path) {
        let opened = File::options().write(true).open(path);
        opened.map_err(|e| Failure::new(format!("{}: {e}", path.display())))?;
    } else {
        drop(Draft::begin(path)?);
    }
    Ok(())
}

/// Writes the page about a memory. `device` is its title.
pub(crate) fn write_report(path: &Path, device: &str, snapshot: &Snapshot) -> Result<(), Failure> {
    #[derive(Serialize)]
    struct Pool<'a> {
        memory: &'a Snapshot,
    }
    #[derive(Serialize)]
    struct Device<'a> {
        device: &'a str,
        pools: [Pool<'a>; 1],
    }
    let device = Device { device, pools: [Pool { memory: snapshot }] };
    let page = leasehold_report::html(&serde_json::to_string(&device)?);
    create(path, |file| {
        let written = file.write_all(page.as_bytes());
        written.map_err(|e| leasehold::Error::Unavailable(e.to_string().into()))
    })
}

/// The file of a path, with links resolved.
fn place(path: &Path) -> PathBuf {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name().unwrap_or_default();
    fs::canonicalize(path).unwrap_or_else(|_| {
        fs::canonicalize(parent).unwrap_or_else(|_| parent.to_owned()).join(name)
    })
}

/// Returns whether the path is a device or a pipe: such a file is written to, not replaced.
fn other(path: &Path) -> bool {
    fs::metadata(path).is_ok_and(|m| !m.is_file() && !m.is_dir())
}

/// A file under a temporary name until it is complete. If it is dropped before that, it is removed.
struct Draft {
    beside: PathBuf,
    place: PathBuf,
}

impl Draft {
    fn begin(path: &Path) -> Result<(Draft, File), Failure> {
        let cannot = |e: io::Error| Failure::new(format!("{}: {e}", path.display()));
        let place = place(path);
        if place.is_dir() {
            return Err(cannot(io::ErrorKind::IsADirectory.into()));
        }
        let mut name = place.file_name().unwrap_or_default().to_owned();
        name.push(format!(".{}.part", std::process::id()));
        let beside = place.with_file_name(name);
        let file = File::options().write(true).create_new(true).open(&beside).map_err(cannot)?;
        Ok((Draft { beside, place }, file))
    }

    fn finish(self) -> io::Result<()> {
        // After the rename the drop finds no file.
        fs::rename(&self.beside, &self.place)
    }
}

impl Drop for Draft {
    fn drop(&mut self) {
        // The removal fails after a rename. A process that could make the file can remove it.
        let _ = fs::remove_file(&self.beside);
    }
}

/// Writes a file completely or not at all.
pub(crate) fn create(
    path: &Path,
    fill: impl FnOnce(&mut BufWriter<File>) -> leasehold::Result<()>,
) -> Result<(), Failure> {
    let cannot = |e: io::Error| Failure::new(format!("{}: {e}", path.display()));
    let (draft, file) = if other(path) {
        (None, File::options().write(true).open(path).map_err(cannot)?)
    } else {
        let (draft, file) = Draft::begin(path)?;
        (Some(draft), file)
    };
    let mut file = BufWriter::new(file);
    fill(&mut file).map_err(|e| Failure::from(e).at(path.display()))?;
    file.flush().map_err(cannot)?;
    draft.map_or(Ok(()), Draft::finish).map_err(cannot)
}
