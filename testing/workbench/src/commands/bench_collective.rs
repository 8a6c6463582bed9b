//! `leasehold-workbench bench collective`: calls of a communicator over the library's own.
//!
//! On CUDA the ranks are processes: copies of this command, or those of a launcher. With
//! `--beside raw` each process makes the same calls of NCCL alone: by NCCL's own functions, with a
//! stream, memory and captured graphs of the driver alone. The two sides take turns, and the raw
//! one begins. The first turn warms both and does not count. Both run on one thread, on which the
//! raw side keeps the device's context current.
//!
//! The raw calls are in `leasehold_collective::bench`, because that crate alone loads NCCL. Both
//! sides call through the same table of functions. The raw stream is a loop of the driver's
//! (`leasehold_sim::traces`), as in `bench cuda`.

mod ours;
#[cfg(feature = "cuda")]
mod raw;
mod side;

use self::ours::Ours;
use self::side::{LIMIT, NODES, SMALL, Side};
use crate::devices::Simulator;
use leasehold::{BackendKind, Context, DeviceId, Result};
use leasehold_cli::commands::run::parse_device;
use leasehold_cli::commands::{percentile, print_json};
use leasehold_cli::failure::Failure;
use leasehold_cli::ranks::{self, Plan, Rank, RankArguments};
use leasehold_cli::style::Tone;
use leasehold_cli::system::{Devices, Request, System};
use leasehold_cli::table::Table;
#[cfg(feature = "cuda")]
use leasehold_collective::bench::wait_for_retired;
use serde::Serialize;
use std::io::Write;
use std::num::NonZeroU32;
use std::time::{Duration, Instant};

#[derive(Debug, clap::Args)]
pub(crate) struct CollectiveArguments {
    /// The first rank's device. On CUDA rank N has the Nth device after it, and is a process of its
    /// own; on the CPU and simulated devices the ranks are threads
    #[arg(long, default_value = DEVICE, value_parser = parse_device)]
    device: DeviceId,
    /// Ranks; 2, or those of the launcher, when left out
    #[arg(long, value_name = "N", value_parser = clap::value_parser!(u32).range(2..=64))]
    ranks: Option<u32>,
    /// Also measures the library alone, in the same processes and in turns: `raw` is NCCL's own
    /// calls
    #[arg(long, value_enum, value_name = "PEER")]
    beside: Option<Beside>,
    /// Turns of each figure, after one that does not count
    #[arg(long, value_name = "N", default_value_t = 7, value_parser = clap::value_parser!(u32).range(1..=1000))]
    turns: u32,
    /// Runs over a simulated driver, with the race detector on: shows that the measurement works
    /// there, and its figures say nothing of a device
    #[arg(long)]
    sim: bool,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// The default device: where the figures have bounds.
const DEVICE: &str = if cfg!(feature = "cuda") { "cuda:0" } else { "cpu:0" };

#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
enum Beside {
    Raw,
}

/// Calls of a sample that are made before the time begins, so that all ranks begin together.
const AHEAD: u32 = 10;

/// How much is measured.
struct Sizes {
    /// Bytes of the calls in graphs.
    graphs: &'static [u64],
    /// Bytes of the largest call, and of the memory.
    large: u64,
    /// Eager calls of a sample, launches of a graph, and large calls.
    calls: u32,
    launches: u32,
    large_calls: u32,
    /// The figures have bounds.
    bounded: bool,
}

impl Sizes {
    fn of(device: DeviceId, sim: bool) -> Self {
        match device.backend {
            BackendKind::Cuda if !sim => Self {
                graphs: &[SMALL, 64 << 10, 1 << 20, 8 << 20],
                large: 1 << 30,
                calls: 400,
                launches: 40,
                large_calls: 20,
                bounded: true,
            },
            BackendKind::Cpu => Self {
                graphs: &[SMALL, 64 << 10, 1 << 20],
                large: 16 << 20,
                calls: 20,
                launches: 1,
                large_calls: 2,
                bounded: false,
            },
            _ => Self {
                graphs: &[SMALL, 64 << 10],
                large: 1 << 20,
                calls: 4,
                launches: 1,
                large_calls: 1,
                bounded: false,
            },
        }
    }
}

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    /// The figures say nothing of a device.
    simulated: bool,
    ranks: u32,
    /// The library of collectives, with its version.
    library: String,
    beside: Option<Beside>,
    turns: u32,
    figures: Vec<Figure>,
}

/// A figure of rank 0, with the raw library's.
#[derive(Debug, Serialize)]
struct Figure {
    name: String,
    unit: &'static str,
    /// The median of the turns.
    value: f64,
    raw: Option<f64>,
    /// The median of the turns' own ratios to the raw figure.
    ratio: Option<f64>,
    /// The bound of the ratio; without a raw figure that of the figure itself.
    at_most: Option<f64>,
    at_least: Option<f64>,
    within: Option<bool>,
}

/// The limit of a figure.
#[derive(Clone, Copy)]
enum Bound {
    /// A time, at most so often the raw library's.
    Times(f64),
    /// A rate, at least so much of the raw library's.
    Share(f64),
    /// A figure without a raw one.
    AtMost(f64),
}

/// A figure before it is measured.
struct Head {
    name: String,
    unit: &'static str,
    bound: Bound,
}

impl Head {
    fn new(name: impl Into<String>, unit: &'static str, bound: Bound) -> Self {
        Self { name: name.into(), unit, bound }
    }

    /// The figure of some turns. `raw` has none without such a side.
    fn figure(self, ours: &[f64], raw: &[f64], bounded: bool) -> Figure {
        let median = |all: &[f64]| percentile(all, 0.5);
        let ratios: Vec<f64> = std::iter::zip(ours, raw).map(|(ours, raw)| ours / raw).collect();
        let (value, ratio) = (median(ours), (!ratios.is_empty()).then(|| median(&ratios)));
        let (of, at_most, at_least) = match self.bound {
            _ if !bounded => (None, None, None),
            Bound::Times(most) => (ratio, Some(most), None),
            Bound::Share(least) => (ratio, None, Some(least)),
            Bound::AtMost(most) => (Some(value), Some(most), None),
        };
        // A bound of a ratio says nothing without one.
        let bounds = of.is_some();
        Figure {
            name: self.name,
            unit: self.unit,
            value,
            raw: (!raw.is_empty()).then(|| median(raw)),
            ratio,
            at_most: at_most.filter(|_| bounds),
            at_least: at_least.filter(|_| bounds),
            within: of.map(|of| {
                at_most.is_none_or(|most| of <= most) && at_least.is_none_or(|least| of >= least)
            }),
        }
    }
}

/// The figures of a rank, and what they are taken with.
struct Bench<'a> {
    rank: &'a Rank,
    context: &'a Context,
    sizes: &'a Sizes,
    turns: u32,
    /// The raw side, if there is one, and the runtime's last.
    sides: &'a [&'a dyn Side],
    meetings: u32,
    figures: Vec<Figure>,
}

impl Bench<'_> {
    /// Waits for the other ranks on the host.
    fn meet(&mut self) -> Result<()> {
        self.meetings += 1;
        self.rank.world.barrier(&format!("bench/{}", self.meetings), LIMIT)
    }

    /// Takes a sample of each side in each turn: a value for each figure. The ranks meet before
    /// each sample, unless this rank is `alone`.
    fn row(
        &mut self,
        alone: bool,
        heads: Vec<Head>,
        mut sample: impl FnMut(usize, &dyn Side) -> Result<Vec<f64>>,
    ) -> Result<()> {
        let mut taken = vec![Vec::new(); self.sides.len()];
        for turn in 0..=self.turns {
            for (at, side) in self.sides.iter().enumerate() {
                if !alone {
                    self.meet()?;
                }
                let values = sample(at, *side)?;
                if turn > 0 {
                    taken[at].push(values);
                }
            }
        }
        for (n, head) in heads.into_iter().enumerate() {
            // A side may have no value of a figure.
            let of = |side: &[Vec<f64>]| -> Vec<f64> {
                side.iter().filter_map(|values| values.get(n).copied()).collect()
            };
            let raw = if self.sides.len() > 1 { of(&taken[0]) } else { Vec::new() };
            let ours = of(&taken[self.sides.len() - 1]);
            self.figures.push(head.figure(&ours, &raw, self.sizes.bounded));
        }
        Ok(())
    }

    /// All figures.
    fn all(&mut self) -> Result<()> {
        let (sizes, sides, size) = (self.sizes, self.sides, f64::from(self.rank.world.size()));
        let small = format!("all_reduce {}, eager", named(SMALL));
        let heads = vec![
            Head::new(small.clone(), "us", Bound::Times(1.05)),
            Head::new(small + ", host", "us", Bound::Times(1.05)),
        ];
        self.row(false, heads, |_, side| {
            let times = timed(side, sizes.calls, &|| side.all_reduce(SMALL))?;
            Ok(vec![times.total * 1e6, times.host * 1e6])
        })?;
        for &bytes in sizes.graphs {
            let graphs = sides.iter().map(|side| side.graph(bytes)).collect::<Result<Vec<_>>>()?;
            let name = format!("all_reduce {}, in a graph of {NODES}", named(bytes));
            self.row(false, vec![Head::new(name, "us", Bound::Times(1.02))], |at, side| {
                let launch = timed(side, sizes.launches, &graphs[at])?.total;
                Ok(vec![launch * 1e6 / f64::from(NODES)])
            })?;
        }
        let name = format!("all_reduce {}, on the bus", named(sizes.large));
        self.row(false, vec![Head::new(name, "GB/s", Bound::Share(0.99))], |_, side| {
            let times = timed(side, sizes.large_calls, &|| side.all_reduce(sizes.large))?;
            let moved = 2.0 * (size - 1.0) / size * sizes.large as f64;
            Ok(vec![moved / times.total / 1e9])
        })?;
        let name = format!("send and recv {} in a group", named(SMALL));
        self.row(false, vec![Head::new(name, "us", Bound::Times(1.05))], |_, side| {
            Ok(vec![timed(side, sizes.calls, &|| side.exchange(SMALL))?.total * 1e6])
        })?;
        self.peers()?;
        let heads = vec![
            Head::new("communicator made", "ms", Bound::Times(1.1)),
            Head::new("communicator given back", "ms", Bound::Times(1.1)),
            Head::new("communicator dropped", "us", Bound::AtMost(10.0)),
        ];
        self.row(false, heads, |_, side| {
            let life = side.life()?;
            let dropped = life.dropped.map(|dropped| dropped * 1e6);
            Ok([life.made * 1e3, life.given_back * 1e3].into_iter().chain(dropped).collect())
        })?;
        self.meet()
    }

    /// Copies to another device, by rank 0, if its process sees one. The other ranks wait.
    fn peers(&mut self) -> Result<()> {
        self.meet()?;
        let (sizes, sides) = (self.sizes, self.sides);
        let own = self.rank.runtime.device();
        let other = (self.rank.world.rank() == 0)
            .then(|| self.context.backend(own.backend))
            .flatten()
            .and_then(|backend| backend.devices().ok())
            .and_then(|all| all.into_iter().find(|device| device.id != own));
        if let Some(other) = other {
            let large =
                Head::new(format!("peer copy {}", named(sizes.large)), "GB/s", Bound::Share(0.99));
            let small = Head::new(format!("peer copy {}", named(SMALL)), "us", Bound::Times(1.05));
            let copies = |bytes| {
                let of = sides.iter().map(|side| side.peer(other.id.ordinal, bytes));
                of.collect::<Result<Vec<_>>>()
            };
            let calls = copies(sizes.large)?;
            self.row(true, vec![large], |at, side| {
                let times = timed(side, sizes.large_calls, &calls[at])?;
                Ok(vec![sizes.large as f64 / times.total / 1e9])
            })?;
            let calls = copies(SMALL)?;
            self.row(true, vec![small], |at, side| {
                Ok(vec![timed(side, sizes.calls, &calls[at])?.total * 1e6])
            })?;
        }
        self.meet()
    }
}

/// Seconds of a call.
struct Times {
    /// Of the calls alone.
    host: f64,
    /// Until the device has finished.
    total: f64,
}

/// Makes calls of a side. Some that are waited for come first: so all ranks begin together.
fn timed(side: &dyn Side, calls: u32, call: &dyn Fn() -> Result<()>) -> Result<Times> {
    (0..calls.min(AHEAD)).try_for_each(|_| call())?;
    side.wait()?;
    let begin = Instant::now();
    (0..calls).try_for_each(|_| call())?;
    let host = begin.elapsed();
    side.wait()?;
    let total = begin.elapsed();
    let each = |time: Duration| time.as_secs_f64() / f64::from(calls);
    Ok(Times { host: each(host), total: each(total) })
}

/// A whole number of bytes with its unit.
fn named(bytes: u64) -> String {
    match bytes.trailing_zeros() {
        30.. => format!("{} GiB", bytes >> 30),
        20.. => format!("{} MiB", bytes >> 20),
        _ => format!("{} KiB", bytes >> 10),
    }
}

impl CollectiveArguments {
    /// Whether the devices are no hardware.
    fn simulated(&self) -> bool {
        self.sim || self.device.backend == BackendKind::Sim
    }

    /// How the ranks run: two of them, if neither the user nor a launcher says how many.
    fn plan(&self) -> Result<Plan, Failure> {
        let of = |ranks: Option<u32>| {
            let ranks = RankArguments::of(ranks.and_then(NonZeroU32::new));
            ranks.plan(self.device, self.simulated())
        };
        match of(self.ranks)? {
            Plan::Alone => of(Some(2)),
            plan => Ok(plan),
        }
    }

    /// The figures of a rank, with a raw side if that was asked for.
    fn measured(
        &self,
        rank: &Rank,
        context: &Context,
        sizes: &Sizes,
        raw: Option<&dyn Side>,
    ) -> Result<Report> {
        let ours = Ours::new(rank, context, sizes.large)?;
        let sides: Vec<&dyn Side> = raw.into_iter().chain([&ours as &dyn Side]).collect();
        let mut bench = Bench {
            rank,
            context,
            sizes,
            turns: self.turns,
            sides: &sides,
            meetings: 0,
            figures: Vec::new(),
        };
        bench.all()?;
        Ok(Report {
            device: self.device.to_string(),
            simulated: self.simulated(),
            ranks: rank.world.size(),
            library: ours.library().to_owned(),
            beside: self.beside,
            turns: self.turns,
            figures: bench.figures,
        })
    }

    /// This process as a rank of several, on a real device.
    fn member(&self, rank: &Rank, system: &System, sizes: &Sizes) -> Result<Report> {
        #[cfg(feature = "cuda")]
        if self.beside.is_some() {
            use leasehold_cuda::driver::ops::DeviceOps;
            let driver = leasehold_cuda::driver::real::RealDriver::new();
            driver.init()?;
            let ordinal = system.device().ordinal;
            let raw = raw::Raw::new(&driver, ordinal, &rank.world, sizes.large)?;
            let report = self.measured(rank, &system.context, sizes, Some(&raw))?;
            // The library is not to end two communicators of a device at a time.
            wait_for_retired(LIMIT)?;
            raw.end()?;
            return Ok(report);
        }
        self.measured(rank, &system.context, sizes, None)
    }
}

pub(crate) fn run(a: &CollectiveArguments) -> Result<(), Failure> {
    let sizes = Sizes::of(a.device, a.sim);
    if a.beside.is_some() && !sizes.bounded {
        return Err(Failure::misuse(format!(
            "--beside raw: {} has no NCCL; leave it out, or take real cuda devices",
            if a.sim { "a simulated driver".to_owned() } else { a.device.to_string() }
        )));
    }
    let plan = a.plan()?;
    let (device, devices) = plan.devices(a.device);
    let opened = || Simulator::new(a.sim).open(&Request { devices, ..Request::new(device, None) });
    let report = match plan {
        Plan::Alone => return Err(Failure::misuse("--ranks: two ranks or more are needed")),
        Plan::Copies(ranks) => return RankArguments::of(None).copies(ranks),
        Plan::Threads(ranks) => {
            let system = opened()?;
            let mut all = ranks::threads(&system, ranks, |rank| {
                Ok(a.measured(rank, &system.context, &sizes, None)?)
            })?;
            system.check()?;
            all.swap_remove(0)
        }
        Plan::Member(world) => {
            let named = |failure: Failure| failure.at(format!("rank {}", world.rank()));
            let system = opened().map_err(named)?;
            let rank = Rank::member(world.clone(), &system);
            let report = a.member(&rank, &system, &sizes).map_err(|e| named(Failure::from(e)))?;
            drop((rank, system));
            let first = world.rank() == 0;
            world.close(LIMIT)?;
            if !first {
                return Ok(());
            }
            report
        }
    };
    if a.json { print_json(&report) } else { print(&report) }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(
        out,
        "{} ranks, the first on {}{}, {}: medians of {} turns",
        report.ranks,
        report.device,
        if report.simulated { " (simulated)" } else { "" },
        report.library,
        report.turns
    )?;
    let mut table = Table::default();
    let beside = report.beside.is_some();
    let bounded = report.figures.iter().any(|f| f.within.is_some());
    let mut head = vec!["", "here"];
    head.extend(if beside { &["raw", "ratio"][..] } else { &[] });
    head.extend(if bounded { &["bound", ""][..] } else { &[] });
    table.head(head);
    for f in &report.figures {
        let number = |value: f64| format!("{value:.2} {}", f.unit);
        let mut row = vec![f.name.clone(), number(f.value)];
        if beside {
            row.push(f.raw.map_or(String::new(), number));
            row.push(f.ratio.map_or(String::new(), |ratio| format!("{ratio:.3}")));
        }
        let bound = match (f.at_most, f.at_least) {
            (Some(most), _) => format!("<= {most:.2}"),
            (_, Some(least)) => format!(">= {least:.2}"),
            _ => String::new(),
        };
        let (tone, mark) = match f.within {
            Some(false) => (Some(Tone::Bad), "BEYOND"),
            Some(true) => (None, "within"),
            None => (None, ""),
        };
        if bounded {
            row.extend([bound, mark.to_owned()]);
        }
        table.toned(tone, row);
    }
    write!(out, "{table}")?;
    Ok(())
}

#[cfg(test)]
mod tests;
