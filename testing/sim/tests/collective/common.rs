//! The ranks that `random` plays on: those of a bench, in turn over each backend.

use crate::{Bench, Over};
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::{Result, Runtime};
use leasehold_collective::{Comm, CommConfig, World};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::{MachineConfig, Report, ReportKind};
use std::sync::Arc;

/// A rank of a test: its world, a runtime, and a communicator.
pub struct Rank {
    pub world: World,
    pub runtime: Runtime,
    pub comm: Comm,
    library: SimCollectives,
}

impl Rank {
    pub fn me(&self) -> u32 {
        self.world.rank()
    }

    /// The configuration of another communicator.
    pub fn config(&self, name: &str) -> CommConfig {
        CommConfig::new(name).ops(Arc::new(self.library.clone()))
    }
}

/// Runs a function as each rank of a world. No race may be found.
pub fn ranks_with<T: Send>(
    size: u32,
    config: &CommConfig,
    rank: impl Fn(&Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let (results, reports) = reported(size, config, rank);
    assert_eq!(reports, []);
    results
}

/// As [`ranks_with`], for ranks that wait for each other, which the machine may report.
pub fn ranks_that_wait<T: Send>(
    size: u32,
    config: &CommConfig,
    rank: impl Fn(&Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    let (results, reports) = reported(size, config, rank);
    assert!(reports.iter().all(|report| report.kind == ReportKind::DeadLock), "{reports:?}");
    results
}

fn reported<T: Send>(
    size: u32,
    config: &CommConfig,
    rank: impl Fn(&Rank) -> Result<T> + Sync,
) -> (Vec<Result<T>>, Vec<Report>) {
    static SEED: AtomicU64 = AtomicU64::new(0);
    let seed = SEED.fetch_add(1, Ordering::Relaxed);
    let over = [Over::Sim, Over::Cuda][(seed % 2) as usize];
    let bench = Bench::new(over, size, MachineConfig::seed(seed));
    let results = bench.run(|r| {
        let library = bench.library.clone();
        let config = config.clone().ops(Arc::new(library.clone()));
        let comm = r.world.comm(&r.runtime, &config)?;
        let (world, runtime) = (r.world.clone(), r.runtime.clone());
        rank(&Rank { world, runtime, comm, library })
    });
    (results, bench.machine().take_reports())
}
