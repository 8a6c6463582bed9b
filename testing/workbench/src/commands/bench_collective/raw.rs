//! The library alone.

use super::side::{Call, LIMIT, Life, NODES, SMALL, Side, floats, neighbours};
use leasehold::Result;
use leasehold_collective::World;
use leasehold_collective::bench::RawNccl;
use leasehold_collective::driver::{CollectiveOps, Nccl};
use leasehold_cuda::driver::ops::CudaSlowOps;
use leasehold_sim::traces::raw_stream::RawStream;
use std::cell::Cell;
use std::time::Instant;

pub(super) struct Raw<'a> {
    world: &'a World,
    comm: RawNccl,
    stream: RawStream<'a>,
    bytes: u64,
    /// Communicators that were made.
    made: Cell<u32>,
}

/// A communicator of all ranks, whose id goes through the store.
fn make(world: &World, number: u32) -> Result<RawNccl> {
    let key = format!("bench/raw/{number}");
    let id = if world.rank() == 0 {
        let id = Nccl::load()?.unique_id()?;
        world.store().set(&key, &id)?;
        id
    } else {
        world.store().get(&key, LIMIT)?
    };
    RawNccl::init(&id, world.size(), world.rank())
}

impl<'a> Raw<'a> {
    /// Makes the raw side of a rank, whose device's context stays current on this thread.
    pub(super) fn new(
        driver: &'a dyn CudaSlowOps,
        ordinal: u32,
        world: &'a World,
        bytes: u64,
    ) -> Result<Self> {
        let stream = RawStream::new(driver, ordinal, bytes)?;
        Ok(Self { world, comm: make(world, 0)?, stream, bytes, made: Cell::new(0) })
    }

    /// A sum of a communicator, on the side's stream.
    fn sum(&self, comm: &RawNccl, bytes: u64) -> Result<()> {
        let (stream, at) = (self.stream.word(), self.stream.memory());
        // SAFETY: the memory has as many bytes, and lives as long as the stream, whose drop
        // waits for its work. Calls of a rank come from one thread. Who destroys the
        // communicator has waited, and no graph of its calls is left.
        unsafe { comm.all_reduce(stream, at, floats(bytes.min(self.bytes))) }
    }

    /// Gives the communicator back. The graphs of the side are gone, since they borrow it.
    pub(super) fn end(self) -> Result<()> {
        self.stream.synchronize()?;
        self.comm.destroy()
    }
}

impl Side for Raw<'_> {
    fn all_reduce(&self, bytes: u64) -> Result<()> {
        self.sum(&self.comm, bytes)
    }

    fn exchange(&self, bytes: u64) -> Result<()> {
        let (next, before) = neighbours(self.world.rank(), self.world.size());
        let (bytes, src) = (bytes.min(self.bytes / 2), self.stream.memory());
        let to = src + self.bytes / 2;
        // SAFETY: as for a sum; the two halves of the memory do not overlap.
        unsafe { self.comm.exchange(self.stream.word(), (src, next), (to, before), floats(bytes)) }
    }

    fn graph(&self, bytes: u64) -> Result<Call<'_>> {
        let calls = || (0..NODES).try_for_each(|_| self.all_reduce(bytes));
        let graph = self.stream.capture(calls)?;
        Ok(Box::new(move || graph.launch()))
    }

    fn peer(&self, ordinal: u32, bytes: u64) -> Result<Call<'_>> {
        let peer = self.stream.peer(ordinal)?;
        Ok(Box::new(move || peer.copy(bytes)))
    }

    fn life(&self) -> Result<Life> {
        let number = self.made.get() + 1;
        self.made.set(number);
        let begin = Instant::now();
        let comm = make(self.world, number)?;
        let made = begin.elapsed();
        self.sum(&comm, SMALL)?;
        self.wait()?;
        let begin = Instant::now();
        comm.destroy()?;
        let given_back = begin.elapsed().as_secs_f64();
        Ok(Life { made: made.as_secs_f64(), given_back, dropped: None })
    }

    fn wait(&self) -> Result<()> {
        self.stream.synchronize()
    }
}
