//! Workloads that any allocator can be put under, so that Leasehold's and its peers are measured by
//! the same code.
//!
//! A [`Subject`] allocates and frees; a [`Workload`] says in which pattern; [`Workload::run`] times
//! it. Times are of a pair: one allocation and one free. Each thread has its own stream, runs the
//! pattern in slices, and every slice is timed as a whole, so that the clock is read rarely; the
//! median over the slices leaves out what else the machine was doing.
//!
//! Must not know which allocators there are.

use crate::Dice;
use crate::memory::virtual_stream::VirtualStream;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, Buffer, Layout, On};
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Lease, Result, threads};
use std::ops::RangeInclusive;
use std::sync::mpsc::sync_channel;
use std::time::Instant;

/// An allocator under measurement.
pub trait Subject: Sync {
    /// The block that an allocation gives; [`free`](Self::free) takes it back.
    type Block: Send;
    /// The object that a thread allocates on: a stream, a pool of its own, nothing.
    type Stream: Send;

    /// A stream for one thread.
    ///
    /// # Errors
    /// The reason why the subject cannot make a stream.
    fn stream(&self) -> Result<Self::Stream>;

    /// Allocates `size` bytes. `None`: there is no memory; the workload then ends without a figure.
    fn alloc(&self, on: &Self::Stream, size: u64) -> Option<Self::Block>;

    /// Gives a block back; `on` is the stream of the thread that does it, not always the one that
    /// allocated.
    fn free(&self, on: &Self::Stream, block: Self::Block);
}

/// A pattern of allocations and frees.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Workload {
    /// Allocate, free, allocate, free.
    PingPong {
        /// Bytes.
        size: u64,
    },
    /// Allocate so many, then free them in the order of allocation.
    Batch {
        /// Bytes.
        size: u64,
        /// Blocks.
        count: usize,
    },
    /// With so many live: free a random one, allocate another of a random size.
    Random {
        /// Live blocks.
        live: usize,
        /// The smallest size in bytes.
        least: u64,
        /// The largest size in bytes; sizes are uniform in between.
        most: u64,
    },
    /// One thread allocates, another frees. A pair of threads for each thread asked for.
    ProducerConsumer {
        /// Bytes.
        size: u64,
    },
}

/// The cost of a workload.
#[derive(Debug, Clone, Copy, Default, PartialEq)]
#[cfg_attr(feature = "serde", derive(serde::Serialize))]
pub struct Sample {
    /// Pairs, all threads.
    pub pairs: u64,
    /// Nanoseconds a pair took its thread: the median over slices and threads.
    pub ns: f64,
    /// The fastest slice.
    pub ns_best: f64,
    /// Millions of pairs per second, all threads together.
    pub mega_pairs: f64,
}

/// Slices of which the median is taken, per thread.
const SLICES: usize = 25;

impl Workload {
    /// The workloads of the allocator's design, in the order of its report.
    #[must_use]
    pub fn all() -> Vec<(&'static str, Workload)> {
        const SMALL: u64 = 32 << 10;
        const MIXED: u64 = 4 << 20;
        // Too large for a slab.
        const LARGE: u64 = (64 << 10) + 1;
        vec![
            ("ping-pong 4 KiB", Workload::PingPong { size: 4 << 10 }),
            ("ping-pong 1 MiB", Workload::PingPong { size: 1 << 20 }),
            ("batch of 32 x 4 KiB", Workload::Batch { size: 4 << 10, count: 32 }),
            ("batch of 1000 x 64 KiB", Workload::Batch { size: 64 << 10, count: 1000 }),
            ("small, 64 live", Workload::Random { live: 64, least: 1, most: SMALL }),
            ("small, 1000 live", Workload::Random { live: 1_000, least: 1, most: SMALL }),
            ("small, 10000 live", Workload::Random { live: 10_000, least: 1, most: SMALL }),
            ("small, 100000 live", Workload::Random { live: 100_000, least: 1, most: SMALL }),
            ("mixed, 64 live", Workload::Random { live: 64, least: 1, most: MIXED }),
            ("mixed, 1000 live", Workload::Random { live: 1_000, least: 1, most: MIXED }),
            ("mixed, 10000 live", Workload::Random { live: 10_000, least: 1, most: MIXED }),
            ("mixed, 100000 live", Workload::Random { live: 100_000, least: 1, most: MIXED }),
            ("large, 64 live", Workload::Random { live: 64, least: LARGE, most: MIXED }),
            ("large, 1000 live", Workload::Random { live: 1_000, least: LARGE, most: MIXED }),
            ("producer-consumer 4 KiB", Workload::ProducerConsumer { size: 4 << 10 }),
        ]
    }

    /// Bytes that lie live at one time at most, per thread: what a device must have for it,
    /// fragmentation apart. Saturates.
    #[must_use]
    pub fn live_bytes(self) -> u64 {
        match self {
            Workload::PingPong { size } => size,
            Workload::Batch { size, count } => size.saturating_mul(count as u64),
            Workload::Random { live, least, most } => {
                let mean = least.midpoint(most).saturating_add(1);
                mean.saturating_mul(live as u64).saturating_add(most)
            }
            Workload::ProducerConsumer { size } => size.saturating_mul(IN_FLIGHT as u64 + 2),
        }
    }

    /// Refuses a workload that means nothing.
    fn check(self) -> Result<()> {
        match self {
            Workload::Batch { count: 0, .. } => Err(Error::invalid("a batch of no blocks")),
            Workload::Random { live: 0, .. } => Err(Error::invalid("a random block of none")),
            Workload::Random { least, most, .. } if least > most || most == u64::MAX => {
                Err(Error::invalid(format!("random sizes from {least} to {most}")))
            }
            _ => Ok(()),
        }
    }

    /// Runs it on `threads` threads, about `pairs` pairs each. `None`: an allocation failed.
    ///
    /// # Errors
    /// `InvalidArgument` for a batch or a random workload without blocks, or random sizes that are
    /// no range below 2^64; as [`Subject::stream`].
    pub fn run<S: Subject>(
        self,
        subject: &S,
        threads: usize,
        pairs: u64,
    ) -> Result<Option<Sample>> {
        self.check()?;
        let failed = AtomicBool::new(false);
        let threads = threads.max(1);
        let mut slices: Vec<f64> = Vec::new();
        let mut timed = 0u64;
        let mut count = |(n, ns): (u64, f64)| {
            slices.push(ns / n as f64);
            timed += n;
        };
        if threads == 1 {
            self.one(subject, pairs, 0, &failed)?.into_iter().for_each(count);
        } else {
            let failed = &failed;
            let all = threads::run(
                (0..threads).map(|t| move || self.one(subject, pairs, t as u64, failed)),
            )?;
            for one in all {
                one?.into_iter().for_each(&mut count);
            }
        }
        if failed.load(Ordering::Relaxed) || slices.is_empty() {
            return Ok(None);
        }
        slices.sort_by(f64::total_cmp);
        let ns = slices[slices.len() / 2];
        let mega_pairs = threads as f64 * 1e3 / ns;
        Ok(Some(Sample { pairs: timed, ns, ns_best: slices[0], mega_pairs }))
    }

    /// One thread's part: pairs and nanoseconds of each slice.
    fn one<S: Subject>(
        self,
        s: &S,
        pairs: u64,
        seed: u64,
        failed: &AtomicBool,
    ) -> Result<Vec<(u64, f64)>> {
        let stream = s.stream()?;
        let done = match self {
            Workload::PingPong { size } => ping_pong(s, &stream, size, pairs),
            Workload::Batch { size, count } => batch(s, &stream, size, count, pairs),
            Workload::Random { live, least, most } => {
                random(s, &stream, live, least..=most, pairs, seed)
            }
            Workload::ProducerConsumer { size } => {
                let other = s.stream()?;
                produce(s, &stream, other, size, pairs)?
            }
        };
        Ok(done.unwrap_or_else(|| {
            failed.store(true, Ordering::Relaxed);
            Vec::new()
        }))
    }
}

/// Times `SLICES` slices of `f(n)`, which does `n` pairs, after one that is not counted.
fn slices(pairs: u64, mut f: impl FnMut(u64) -> Option<()>) -> Option<Vec<(u64, f64)>> {
    let n = (pairs / SLICES as u64).max(1);
    f(n)?;
    let mut out = Vec::with_capacity(SLICES);
    for _ in 0..SLICES {
        let begin = Instant::now();
        f(n)?;
        out.push((n, begin.elapsed().as_nanos() as f64));
    }
    Some(out)
}

type Slices = Option<Vec<(u64, f64)>>;

fn ping_pong<S: Subject>(s: &S, on: &S::Stream, size: u64, pairs: u64) -> Slices {
    slices(pairs, |n| {
        for _ in 0..n {
            let block = s.alloc(on, std::hint::black_box(size))?;
            s.free(on, std::hint::black_box(block));
        }
        Some(())
    })
}

fn batch<S: Subject>(s: &S, on: &S::Stream, size: u64, count: usize, pairs: u64) -> Slices {
    // The slice that is not counted makes the room.
    let mut held = Vec::new();
    let done = slices(pairs.div_ceil(count as u64), |n| {
        for _ in 0..n {
            for _ in 0..count {
                held.push(s.alloc(on, std::hint::black_box(size))?);
            }
            held.drain(..).for_each(|block| s.free(on, block));
        }
        Some(())
    });
    held.into_iter().for_each(|block| s.free(on, block));
    Some(done?.into_iter().map(|(n, t)| (n * count as u64, t)).collect())
}

fn random<S: Subject>(
    s: &S,
    on: &S::Stream,
    live: usize,
    sizes: RangeInclusive<u64>,
    pairs: u64,
    seed: u64,
) -> Slices {
    let mut dice = Dice::new(seed + 1);
    let (least, span) = (*sizes.start(), sizes.end() - sizes.start() + 1);
    let mut held: Vec<Option<S::Block>> = Vec::new();
    let filled = (0..live).try_for_each(|_| {
        held.push(Some(s.alloc(on, least + dice.below(span))?));
        Some(())
    });
    // Every block has been replaced once on average before the first slice counts.
    let done = filled.and_then(|()| {
        let mut replace = |n: u64| {
            for _ in 0..n {
                let at = dice.below(live as u64) as usize;
                if let Some(old) = held[at].take() {
                    s.free(on, old);
                }
                held[at] = Some(s.alloc(on, least + dice.below(span))?);
            }
            Some(())
        };
        replace(live as u64)?;
        slices(pairs, replace)
    });
    held.into_iter().flatten().for_each(|block| s.free(on, block));
    done
}

/// Blocks on their way from the producer to the consumer.
const IN_FLIGHT: usize = 256;
/// Blocks that travel together, so that the channel is not what is measured.
const PARCEL: usize = 32;

fn produce<S: Subject>(
    s: &S,
    on: &S::Stream,
    other: S::Stream,
    size: u64,
    pairs: u64,
) -> Result<Slices> {
    std::thread::scope(|scope| {
        let (send, receive) = sync_channel::<Vec<S::Block>>(IN_FLIGHT / PARCEL);
        let (back, empties) = sync_channel::<Vec<S::Block>>(IN_FLIGHT / PARCEL + 2);
        let consumer = threads::spawn_scoped(scope, move || {
            for mut parcel in receive {
                parcel.drain(..).for_each(|block| s.free(&other, block));
                // The producer may have gone; then nobody needs the empty parcel.
                let _ = back.try_send(parcel);
            }
        })?;
        let done = slices(pairs.div_ceil(PARCEL as u64), |n| {
            for _ in 0..n {
                let mut parcel = empties.try_recv().unwrap_or_else(|_| Vec::with_capacity(PARCEL));
                for _ in 0..PARCEL {
                    parcel.push(s.alloc(on, std::hint::black_box(size))?);
                }
                send.send(parcel).ok()?;
            }
            Some(())
        });
        drop(send);
        if let Err(panic) = consumer.join() {
            std::panic::resume_unwind(panic);
        }
        Ok(done.map(|done| done.into_iter().map(|(n, t)| (n * PARCEL as u64, t)).collect()))
    })
}

/// Leasehold's allocator as a subject. Streams are virtual: idle, so that what is freed is ready at
/// once.
///
/// It has an allocator of its own, since virtual streams say of all work that it is over.
#[derive(Debug)]
pub struct Own {
    allocator: Allocator,
    marks: bool,
}

impl Own {
    /// A new allocator. With `marks` a write is marked on every block, as a user would: then memory
    /// is in use until its stream is done.
    ///
    /// # Errors
    /// As [`Allocator::new`].
    pub fn new(backing: Box<dyn Backing>, config: AllocatorConfig, marks: bool) -> Result<Self> {
        Ok(Self { allocator: Allocator::new(backing, config)?, marks })
    }

    /// The allocator.
    #[must_use]
    pub fn allocator(&self) -> &Allocator {
        &self.allocator
    }
}

/// How far a marked stream runs ahead of its completion.
const LAG: u64 = 32;

impl Subject for Own {
    type Block = Lease<Buffer>;
    type Stream = VirtualStream;

    fn stream(&self) -> Result<VirtualStream> {
        VirtualStream::new()
    }

    #[inline]
    fn alloc(&self, on: &VirtualStream, size: u64) -> Option<Lease<Buffer>> {
        let buffer = self.allocator.alloc(Layout::new(size), On::new(on)).ok()?;
        if self.marks {
            let point = on.submit().ok()?;
            // SAFETY: the streams are virtual: nothing ever uses the memory.
            unsafe { buffer.mark_write(point) };
            on.complete(point.value().saturating_sub(LAG));
        }
        Some(buffer)
    }

    #[inline]
    fn free(&self, _: &VirtualStream, block: Lease<Buffer>) {
        drop(block);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory::fake::FakeBacking;

    #[test]
    fn every_workload_gives_back_what_it_took() {
        for marks in [false, true] {
            let own =
                Own::new(Box::new(FakeBacking::new(1 << 38)), AllocatorConfig::default(), marks)
                    .expect("an allocator");
            for (name, workload) in Workload::all() {
                let workload = match workload {
                    Workload::Random { live, least, most } => {
                        Workload::Random { live: live.min(200), least, most }
                    }
                    other => other,
                };
                for threads in [1, 2] {
                    let sample = workload.run(&own, threads, 2_000).expect("streams").expect(name);
                    assert!(sample.ns > 0.0 && sample.pairs > 0, "{name}: {sample:?}");
                    assert_eq!(own.allocator.stats().live, 0, "{name}");
                }
            }
        }
    }

    #[test]
    fn a_workload_that_runs_out_of_memory_has_no_figure() {
        let config = AllocatorConfig { budget: 8 << 20, ..AllocatorConfig::default() };
        let own =
            Own::new(Box::new(FakeBacking::new(1 << 30)), config, false).expect("an allocator");
        let sample = Workload::Random { live: 64, least: 1, most: 4 << 20 }
            .run(&own, 1, 100)
            .expect("streams");
        assert_eq!(sample, None);
        assert_eq!(own.allocator.stats().live, 0);
    }
}
