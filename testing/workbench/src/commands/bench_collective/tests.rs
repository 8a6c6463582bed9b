//! The turns, the bounds, and the raw side over a simulated driver.

use super::side::{Call, Life};
use super::*;
use leasehold_core::sync::Mutex;

/// Few calls, with bounds.
const FEW: Sizes = Sizes {
    graphs: &[SMALL],
    large: 64 << 10,
    calls: 2,
    launches: 1,
    large_calls: 1,
    bounded: true,
};

#[test]
fn a_time_a_rate_and_a_lone_figure_are_held_to_their_bounds() {
    let of = |bound, ours: &[f64], raw: &[f64]| Head::new("x", "us", bound).figure(ours, raw, true);
    let time = of(Bound::Times(1.05), &[10.0, 11.0, 30.0], &[10.0, 10.0, 10.0]);
    assert_eq!((time.value, time.raw, time.ratio), (11.0, Some(10.0), Some(1.1)));
    assert_eq!((time.at_most, time.at_least, time.within), (Some(1.05), None, Some(false)));
    assert_eq!(of(Bound::Times(1.1), &[11.0], &[10.0]).within, Some(true));
    // The ratio is the median of the turns' own, which a slow machine moves on both sides.
    let slow = of(Bound::Times(1.05), &[10.0, 20.0, 40.0], &[10.0, 20.0, 40.0]);
    assert_eq!((slow.ratio, slow.within), (Some(1.0), Some(true)));
    let rate = of(Bound::Share(0.99), &[98.0], &[100.0]);
    assert_eq!((rate.at_least, rate.within), (Some(0.99), Some(false)));
    assert_eq!(of(Bound::Share(0.99), &[99.5], &[100.0]).within, Some(true));
    let alone = of(Bound::AtMost(10.0), &[9.0], &[]);
    assert_eq!((alone.ratio, alone.within), (None, Some(true)));
    assert_eq!(of(Bound::AtMost(10.0), &[11.0], &[]).within, Some(false));
}

#[test]
fn without_the_raw_side_or_a_device_no_bound_is_said() {
    let head = || Head::new("x", "us", Bound::Times(1.05));
    for figure in [head().figure(&[1.0], &[], true), head().figure(&[1.0], &[1.0], false)] {
        assert_eq!((figure.at_most, figure.at_least, figure.within), (None, None, None));
    }
}

/// A side that notes who it is at each wait and each communicator that it makes.
struct Noted<'a>(Ours<'a>, char, &'a Mutex<String>);

impl Side for Noted<'_> {
    fn all_reduce(&self, bytes: u64) -> Result<()> {
        self.0.all_reduce(bytes)
    }

    fn exchange(&self, bytes: u64) -> Result<()> {
        self.0.exchange(bytes)
    }

    fn graph(&self, bytes: u64) -> Result<Call<'_>> {
        self.0.graph(bytes)
    }

    fn peer(&self, ordinal: u32, bytes: u64) -> Result<Call<'_>> {
        self.0.peer(ordinal, bytes)
    }

    fn life(&self) -> Result<Life> {
        self.2.lock().push(self.1);
        let life = self.0.life()?;
        // The raw library has no drop that does not wait.
        Ok(Life { dropped: life.dropped.filter(|_| self.1 == 'o'), ..life })
    }

    fn wait(&self) -> Result<()> {
        self.2.lock().push(self.1);
        self.0.wait()
    }
}

#[test]
fn two_sides_take_turns_and_every_figure_but_the_drop_has_a_ratio() {
    let sizes = FEW;
    let system = Simulator::new(false).open(&Request::new(DeviceId::cpu(0), None)).unwrap();
    let context = &system.context;
    let all = ranks::threads(&system, 2, |rank| {
        let waits = Mutex::new(String::new());
        let raw = Noted(Ours::new(rank, context, sizes.large)?, 'r', &waits);
        let ours = Noted(Ours::new(rank, context, sizes.large)?, 'o', &waits);
        let sides: [&dyn Side; 2] = [&raw, &ours];
        let (sides, figures) = (&sides[..], Vec::new());
        let mut bench =
            Bench { rank, context, sizes: &sizes, turns: 3, sides, meetings: 0, figures };
        bench.all()?;
        let figures = std::mem::take(&mut bench.figures);
        drop((raw, ours));
        Ok((figures, waits.into_inner()))
    });
    for (figures, waits) in all.unwrap() {
        assert_eq!(figures.len(), 8, "{figures:?}");
        for figure in figures {
            let has = figure.name != "communicator dropped";
            assert_eq!((figure.raw.is_some(), figure.ratio.is_some()), (has, has), "{figure:?}");
            assert!(figure.within.is_some() && figure.value > 0.0, "{figure:?}");
        }
        // Each timed row waits twice a sample, in a turn that warms and three more.
        let timed = "rroo".repeat(4 * 4);
        assert_eq!(waits, timed + &"ro".repeat(4));
    }
}

/// The raw side's own calls are legal and leave nothing: over a simulated driver, and with an
/// imitation of NCCL that a process of its own loads.
#[cfg(all(feature = "cuda", target_os = "linux"))]
#[test]
fn the_raw_side_is_legal_and_leaves_nothing() {
    use leasehold_cuda::driver::ops::DeviceOps;
    use leasehold_sim::MachineConfig;
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
    use std::process::Command;
    const NAME: &str =
        "commands::bench_collective::tests::the_raw_side_is_legal_and_leaves_nothing";
    if std::env::var_os("STUB_LOG").is_none() {
        let folder = tempfile::tempdir().unwrap();
        let library = folder.path().join("libnccl.so.2");
        let source = concat!(
            env!("CARGO_MANIFEST_DIR"),
            "/../../crates/collective/tests/suite/stub_nccl.rs"
        );
        let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
        let mut compiler = Command::new(compiler);
        compiler.args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "nccl"]);
        assert!(compiler.arg(source).arg("-o").arg(&library).status().unwrap().success());
        let log = folder.path().join("log");
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["--exact", NAME, "--nocapture"])
            .envs([("LEASEHOLD_NCCL", &library), ("STUB_LOG", &log)])
            .output()
            .unwrap();
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(output.status.success() && told.contains("1 passed"), "{output:?}");
        return;
    }
    let sizes = FEW;
    let request = Request { devices: 2, ..Request::new(DeviceId::cuda(0), None) };
    let system = Simulator::new(true).open(&request).unwrap();
    let all = ranks::threads(&system, 2, |rank| {
        let machine = MachineConfig::seed(1).devices(2, 1 << 26);
        let driver = SimDriver::new(SimDriverConfig::new(machine))?;
        driver.init()?;
        let a = CollectiveArguments {
            device: DeviceId::cuda(0),
            ranks: None,
            beside: Some(Beside::Raw),
            turns: 1,
            sim: false,
            json: true,
        };
        let report = {
            let raw = raw::Raw::new(&driver, rank.world.rank(), &rank.world, sizes.large)?;
            let report = a.measured(rank, &system.context, &sizes, Some(&raw))?;
            raw.end()?;
            report
        };
        assert!(driver.census().is_nothing() && driver.take_leaks().is_empty());
        assert!(driver.machine().memory_in_use().is_nothing());
        assert!(driver.machine().take_reports().is_empty());
        Ok(report)
    });
    let all = all.unwrap();
    let names: Vec<_> = all[0].figures.iter().map(|figure| &*figure.name).collect();
    assert!(names.contains(&"peer copy 8 KiB"), "{names:?}");
    assert!(all[0].figures.iter().all(|figure| figure.within.is_some()), "{all:?}");
    // A communicator that stays, and one in each turn: made and given back on both ranks. A
    // drop does not wait for that.
    wait_for_retired(LIMIT).unwrap();
    let log = std::fs::read_to_string(std::env::var_os("STUB_LOG").unwrap()).unwrap();
    let calls = |name: &str| log.lines().filter(|line| line.starts_with(name)).count();
    assert_eq!((calls("init 2"), calls("ncclCommDestroy")), (6, 6));
    // A graph of each rank, beside the eager calls.
    assert!(calls("all_reduce") > 2 * NODES as usize);
    assert_eq!(calls("send"), calls("recv"));
}

#[test]
fn sizes_have_the_largest_whole_unit() {
    for (bytes, name) in [(8 << 10, "8 KiB"), (8 << 20, "8 MiB"), (1 << 30, "1 GiB")] {
        assert_eq!(named(bytes), name);
    }
}
