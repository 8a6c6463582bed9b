//! The workloads of `leasehold-workbench bench alloc` on cubecl's memory management, beside
//! Leasehold's allocator, in one process and in turns.
//!
//! cubecl's `MemoryManagement` is what a server owns for a stream; a server reaches it alone, so
//! here it lies under a mutex that nobody contends for with one thread. Its storage hands out ids
//! and does nothing else; Leasehold's backing hands out addresses and does nothing else. A cubecl
//! handle is freed by dropping it; the memory management notices at a later reservation, which is
//! part of what it costs.
//!
//!     cargo run --release -- [--pairs N] [--rounds N] [--threads N] [--workload TEXT]
//!
//! Prints a JSON line per workload.

use cubecl_ir::MemoryDeviceProperties;
use cubecl_server::memory_management::{
    ErrorGraph, ManagedMemoryHandle, MemoryAllocationMode, MemoryConfiguration, MemoryManagement,
    MemoryManagementOptions, PageUpdate,
};
use cubecl_server::server::IoError;
use cubecl_server::storage::{ComputeStorage, StorageHandle, StorageId, StorageUtilization};
use leasehold_alloc::AllocatorConfig;
use leasehold_core::sync::Mutex;
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::workload::{Own, Subject, Workload};
use std::collections::HashMap;
use std::io::Write;

/// Bytes of the device: what both sides are told.
const DEVICE: u64 = 1 << 38;
/// Blocks that a pool which looks at every page may have live within a benchmark's time.
const MOST_LIVE: usize = 10_000;
/// Nanoseconds that a round of one side may take, about.
const ROUND: f64 = 100e6;

/// A storage that does nothing but count.
#[derive(Default)]
struct Nothing {
    sizes: HashMap<StorageId, u64>,
    allocated: u64,
}

impl ComputeStorage for Nothing {
    type Resource = ();

    fn alignment(&self) -> usize {
        256
    }

    fn get(&mut self, _: &StorageHandle) -> Result<(), IoError> {
        Ok(())
    }

    fn alloc(&mut self, size: u64) -> Result<StorageHandle, IoError> {
        let id = StorageId::new();
        self.sizes.insert(id, size);
        self.allocated += size;
        Ok(StorageHandle::new(id, StorageUtilization { offset: 0, size }))
    }

    fn dealloc(&mut self, id: StorageId) {
        self.allocated -= self.sizes.remove(&id).unwrap_or(0);
    }

    fn flush(&mut self) {}

    fn bytes_allocated(&self) -> u64 {
        self.allocated
    }
}

struct Cubecl(Mutex<(MemoryManagement<Nothing>, ErrorGraph)>);

impl Cubecl {
    fn new() -> Self {
        let properties = MemoryDeviceProperties::new(DEVICE / 4, 256);
        let memory = MemoryManagement::from_configuration(
            Nothing::default(),
            &properties,
            MemoryConfiguration::default(),
            std::sync::Arc::default(),
            MemoryManagementOptions::new("bench").mode(MemoryAllocationMode::Auto),
        );
        Self(Mutex::new((memory, ErrorGraph::default())))
    }
}

impl Subject for Cubecl {
    type Block = ManagedMemoryHandle;
    type Stream = ();

    fn stream(&self) -> leasehold_core::Result<()> {
        Ok(())
    }

    fn alloc(&self, (): &(), size: u64) -> Option<ManagedMemoryHandle> {
        let (memory, failures) = &mut *self.0.lock();
        memory.reserve(size, PageUpdate::Allow, failures).ok()
    }

    fn free(&self, (): &(), block: ManagedMemoryHandle) {
        drop(block);
    }
}

struct Options {
    pairs: u64,
    rounds: usize,
    threads: usize,
    workload: String,
}

fn options() -> Result<Options, String> {
    let mut o = Options { pairs: 100_000, rounds: 5, threads: 1, workload: String::new() };
    let mut words = std::env::args().skip(1);
    while let Some(word) = words.next() {
        let value = words.next().ok_or(format!("{word}: a value is missing"))?;
        let number =
            || value.parse::<u64>().ok().filter(|&n| n > 0).ok_or(format!("{word} {value}: want a number above 0"));
        match word.as_str() {
            "--pairs" => o.pairs = number()?,
            "--rounds" => o.rounds = number()? as usize,
            "--threads" => o.threads = number()? as usize,
            "--workload" => o.workload = value,
            _ => return Err(format!("{word}: want --pairs, --rounds, --threads or --workload")),
        }
    }
    Ok(o)
}

fn median(mut values: Vec<f64>) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

fn run() -> Result<(), Box<dyn std::error::Error>> {
    let o = options()?;
    let mut out = std::io::stdout().lock();
    for (name, workload) in Workload::all().into_iter().filter(|w| w.0.contains(&o.workload)) {
        if matches!(workload, Workload::Random { live, .. } if live > MOST_LIVE) {
            continue;
        }
        let own = Own::new(Box::new(FakeBacking::new(DEVICE)), AllocatorConfig::default(), false)?;
        let cubecl = Cubecl::new();
        // As many pairs as fit into a round, by the slower side.
        let probe = workload.run(&cubecl, o.threads, 200)?.ok_or(format!("{name}: cubecl has no memory"))?;
        let pairs = ((ROUND / probe.ns.max(1.0)) as u64).clamp(200, o.pairs.max(200));
        let (mut ours, mut theirs, mut ratios) = (Vec::new(), Vec::new(), Vec::new());
        for _ in 0..o.rounds {
            let a = workload.run(&own, o.threads, pairs)?.ok_or(format!("{name}: no memory"))?;
            let b = workload.run(&cubecl, o.threads, pairs)?.ok_or(format!("{name}: cubecl has no memory"))?;
            ours.push(a.ns);
            theirs.push(b.ns);
            ratios.push(b.ns / a.ns);
        }
        writeln!(
            out,
            "{{\"workload\":\"{name}\",\"threads\":{},\"pairs\":{pairs},\"rounds\":{},\"leasehold_ns\":{:.2},\"cubecl_ns\":{:.2},\"slower\":{:.2}}}",
            o.threads,
            o.rounds,
            median(ours),
            median(theirs),
            median(ratios),
        )?;
    }
    Ok(())
}

fn main() -> std::process::ExitCode {
    // Nobody is left to tell when standard error is gone too.
    match run() {
        Ok(()) => std::process::ExitCode::SUCCESS,
        Err(e) => {
            let _ = writeln!(std::io::stderr(), "leasehold-peer-cubecl: {e}");
            std::process::ExitCode::FAILURE
        }
    }
}
