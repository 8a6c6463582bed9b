//! The runtime's side.

use super::side::{Call, LIMIT, Life, NODES, SMALL, Side, floats, neighbours};
use leasehold::{Array, Context, DeviceId, Result, View};
use leasehold_cli::ranks::Rank;
use leasehold_collective::bench::wait_for_retired;
use leasehold_collective::{Comm, CommConfig, Reduce};
use std::time::Instant;

/// The runtime's side.
pub(super) struct Ours<'a> {
    rank: &'a Rank,
    context: &'a Context,
    config: CommConfig,
    comm: Comm,
    memory: Array<f32>,
}

impl<'a> Ours<'a> {
    pub(super) fn new(rank: &'a Rank, context: &'a Context, bytes: u64) -> Result<Self> {
        let config = rank.config("bench").timeout(LIMIT);
        let comm = rank.world.comm(&rank.runtime, &config)?;
        let memory = rank.runtime.zeros(floats(bytes))?;
        Ok(Self { rank, context, config, comm, memory })
    }

    /// The library that makes the calls.
    pub(super) fn library(&self) -> &str {
        self.comm.library()
    }
}

impl Side for Ours<'_> {
    fn all_reduce(&self, bytes: u64) -> Result<()> {
        let part = self.memory.slice(..floats(bytes));
        self.comm.all_reduce(self.rank.runtime.stream(), part, Reduce::Sum)
    }

    fn exchange(&self, bytes: u64) -> Result<()> {
        let (next, before) = neighbours(self.comm.rank(), self.comm.size());
        let (from, half) = (floats(bytes), self.memory.len() / 2);
        self.comm.group(self.rank.runtime.stream(), |group| {
            group.send(self.memory.slice(..from), next)?;
            group.recv(self.memory.slice(half..half + from), before)
        })
    }

    fn graph(&self, bytes: u64) -> Result<Call<'_>> {
        let part = self.memory.slice(..floats(bytes));
        let graph = self.rank.runtime.record_graph(|recording| {
            let stream = recording.stream();
            (0..NODES).try_for_each(|_| self.comm.all_reduce(stream, part, Reduce::Sum))
        })?;
        Ok(Box::new(move || graph.launch_on(self.rank.runtime.stream()).map(drop)))
    }

    fn peer(&self, ordinal: u32, bytes: u64) -> Result<Call<'_>> {
        let device = DeviceId::new(self.rank.runtime.device().backend, ordinal);
        let other = self.context.runtime(device)?;
        let memory = other.zeros::<f32>(floats(bytes))?;
        other.synchronize()?;
        let part = self.memory.slice(..floats(bytes));
        Ok(Box::new(move || {
            // The memory is of a runtime that is open.
            let _open = &other;
            self.rank.runtime.stream().copy(memory.view(), part.view())
        }))
    }

    fn life(&self) -> Result<Life> {
        // As the library alone: it makes the connections of sends at the first send.
        let config = self.config.clone().sends(false);
        let begin = Instant::now();
        let comm = self.rank.world.comm(&self.rank.runtime, &config)?;
        let made = begin.elapsed();
        let part = self.memory.slice(..floats(SMALL));
        comm.all_reduce(self.rank.runtime.stream(), part, Reduce::Sum)?;
        self.wait()?;
        let begin = Instant::now();
        drop(comm);
        let dropped = begin.elapsed();
        wait_for_retired(LIMIT)?;
        Ok(Life {
            made: made.as_secs_f64(),
            given_back: begin.elapsed().as_secs_f64(),
            dropped: Some(dropped.as_secs_f64()),
        })
    }

    fn wait(&self) -> Result<()> {
        self.rank.runtime.stream().synchronize()
    }
}
