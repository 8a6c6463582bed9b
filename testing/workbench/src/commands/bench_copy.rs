//! `leasehold-workbench bench copy`: downloads and uploads against a plain host copy, by size and
//! by the alignment of the host's memory.
//!
//! A processor may copy at a tenth of its speed for some differences of addresses modulo a page.
//! The C library puts large blocks at one of these differences. So each size is measured at several
//! offsets; all methods alternate in each round.

use crate::devices::Simulator;
use leasehold::{DeviceId, View};
use leasehold_cli::commands::run::parse_device;
use leasehold_cli::commands::{percentile, print_json};
use leasehold_cli::failure::Failure;
use leasehold_cli::system::{Devices, Request};
use leasehold_cli::table::{self, Table};
use serde::Serialize;
use std::io::Write;
use std::time::Instant;

#[derive(Debug, clap::Args)]
pub(crate) struct CopyArguments {
    /// The device
    #[arg(long, default_value = "cpu:0", value_parser = parse_device)]
    device: DeviceId,
    /// Runs over a simulated driver, with the race detector on: shows that the measurement works
    /// there, and its figures say nothing of a device
    #[arg(long)]
    sim: bool,
    /// Threads, on the CPU
    #[arg(long, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// KiB of a copy, several with commas
    #[arg(long, value_delimiter = ',', default_values_t = [64, 1 << 10, 4 << 10, 64 << 10],
        value_parser = clap::value_parser!(u32).range(1..=4 << 20))]
    kib: Vec<u32>,
    /// Rounds
    #[arg(long, default_value_t = 15, value_parser = clap::value_parser!(u32).range(1..=10_000))]
    rounds: u32,
    /// Prints one JSON object
    #[arg(long)]
    json: bool,
}

/// The distance of the host's memory from the device's, modulo a page.
const OFFSETS: [usize; 7] = [0, 1, 16, 32, 64, 128, 2048];
const PAGE: usize = 4096;
/// The minimum number of bytes that a measurement copies.
const BATCH: usize = 4 << 20;

#[derive(Debug, Serialize)]
struct Report {
    device: String,
    /// The figures say nothing of a device.
    simulated: bool,
    threads: Option<u16>,
    figures: Vec<Figure>,
    fresh: Vec<Fresh>,
}

/// Gigabytes per second at one size and offset, medians over the rounds.
#[derive(Debug, Serialize)]
struct Figure {
    bytes: usize,
    offset: usize,
    download: f64,
    upload: f64,
    /// `copy_from_slice` between two blocks with the same distance.
    plain: f64,
    /// The median of the rounds' ratios of the download's time to the plain copy's.
    download_by_plain: f64,
}

/// A download into a new vector, and into a reused one, in gigabytes per second.
#[derive(Debug, Serialize)]
struct Fresh {
    bytes: usize,
    new: f64,
    again: f64,
}

/// Host memory whose start can be chosen.
struct Block(Vec<u8>);

impl Block {
    /// Memory for `bytes` bytes, all of it touched.
    fn new(bytes: usize) -> Self {
        Self(vec![1; bytes + 2 * PAGE])
    }

    /// The bytes that start `offset` after `address`, modulo a page.
    fn after(&mut self, address: usize, offset: usize, bytes: usize) -> &mut [u8] {
        let skip = (address + offset).wrapping_sub(self.0.as_ptr().addr()) % PAGE;
        &mut self.0[skip..skip + bytes]
    }
}

/// Seconds of one call, measured over calls that copy [`BATCH`] bytes.
fn seconds(
    bytes: usize,
    mut call: impl FnMut() -> leasehold::Result<()>,
) -> leasehold::Result<f64> {
    let times = (BATCH / bytes).max(1);
    let begin = Instant::now();
    (0..times).try_for_each(|_| call())?;
    Ok(begin.elapsed().as_secs_f64() / times as f64)
}

fn speed(bytes: usize, seconds: &[f64]) -> f64 {
    bytes as f64 / percentile(seconds, 0.5) / 1e9
}

pub(crate) fn run(a: &CopyArguments) -> Result<(), Failure> {
    let request = Request::new(a.device, a.threads.map(usize::from));
    let system = Simulator::new(a.sim).open(&request)?;
    let runtime = system.runtime.clone();
    let (mut figures, mut fresh) = (Vec::new(), Vec::new());
    for bytes in a.kib.iter().map(|&k| k as usize * 1024) {
        let device = runtime.alloc(bytes as u64)?;
        let (mut host, mut twin) = (Block::new(bytes), Block::new(bytes));
        // If the host has no access to device memory, a device block starts at a page, which serves
        // as the reference.
        let address = device.addr() as usize;
        runtime.stream().upload_blocking(device.view(), host.after(address, 0, bytes))?;
        let mut times = vec![[const { Vec::new() }; 3]; OFFSETS.len()];
        let (mut new, mut again) = (Vec::new(), Vec::new());
        let mut vector: Vec<u8> = runtime.to_vec(&device)?;
        for _ in 0..a.rounds {
            for (offset, [down, up, plain]) in OFFSETS.iter().zip(&mut times) {
                let to = host.after(address, *offset, bytes);
                down.push(seconds(bytes, || runtime.stream().download(to, device.view()))?);
                up.push(seconds(bytes, || runtime.stream().upload_blocking(device.view(), to))?);
                let from = &*twin.after(address, 0, bytes);
                plain.push(seconds(bytes, || {
                    to.copy_from_slice(std::hint::black_box(from));
                    std::hint::black_box(&to);
                    Ok(())
                })?);
            }
            new.push(seconds(bytes, || runtime.to_vec::<u8>(&device).map(drop))?);
            again.push(seconds(bytes, || {
                runtime.stream().download_into(&mut vector, device.view())
            })?);
        }
        for (offset, [down, up, plain]) in OFFSETS.iter().zip(&times) {
            let ratios: Vec<f64> =
                down.iter().zip(plain).map(|(down, plain)| down / plain).collect();
            figures.push(Figure {
                bytes,
                offset: *offset,
                download: speed(bytes, down),
                upload: speed(bytes, up),
                plain: speed(bytes, plain),
                download_by_plain: percentile(&ratios, 0.5),
            });
        }
        fresh.push(Fresh { bytes, new: speed(bytes, &new), again: speed(bytes, &again) });
    }
    runtime.synchronize()?;
    system.check()?;
    let report = Report {
        device: a.device.to_string(),
        simulated: system.is_simulated(),
        threads: a.threads,
        figures,
        fresh,
    };
    if a.json { print_json(&report) } else { print(&report) }
}

fn print(report: &Report) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    let mut all = Table::default();
    all.row([
        "GB/s",
        "offset",
        "download",
        "upload",
        "copy_from_slice",
        "download's time by plain",
    ]);
    for f in &report.figures {
        let [download, upload, plain] = [f.download, f.upload, f.plain].map(|v| format!("{v:.1}"));
        let ratio = format!("{:.2}", f.download_by_plain);
        all.row([
            table::bytes(f.bytes as u64),
            f.offset.to_string(),
            download,
            upload,
            plain,
            ratio,
        ]);
    }
    writeln!(out, "{all}")?;
    let mut all = Table::default();
    all.row(["GB/s", "download into a new vector", "into one used again"]);
    for f in &report.fresh {
        all.row([table::bytes(f.bytes as u64), format!("{:.1}", f.new), format!("{:.1}", f.again)]);
    }
    write!(out, "{all}")?;
    Ok(())
}
