//! How much memory an allocator holds over time under the pattern of the benchmark sh8bench, over a
//! device without memory.
//!
//! `alloc_soak [threads] [seconds] [largest block] [blocks a thread]`. Each thread allocates small
//! blocks more often than large ones, round after round; a moving fifth of its blocks survives each
//! round, and the rest is freed from both ends. The program prints live and reserved memory in
//! equal steps of time, so that growth without an end shows.

use leasehold_alloc::{Allocator, AllocatorConfig, Layout, On};
use leasehold_core::Result;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::VirtualStream;
use std::time::{Duration, Instant};

/// Sizes of a cycle: each base size, its halves, and how often each is asked for.
fn sizes(largest: u64) -> Vec<u64> {
    let mut all = Vec::new();
    let mut base = 1u64;
    while base < largest {
        let mut size = base;
        while size > 0 {
            let times = if size < 100 {
                250
            } else if size < 1000 {
                50
            } else if size < 10_000 {
                10
            } else {
                1
            };
            all.extend(std::iter::repeat_n(size, times));
            size /= 2;
        }
        base = base * 3 / 2 + 1;
    }
    all
}

fn work(
    allocator: &Allocator,
    sizes: &[u64],
    slots: usize,
    stop: &AtomicBool,
    operations: &AtomicU64,
) -> Result<()> {
    let stream = VirtualStream::new()?;
    let mut blocks: Vec<Option<leasehold_core::Lease<leasehold_alloc::Buffer>>> =
        (0..slots).map(|_| None).collect();
    let range = slots / 5;
    let (mut keep_from, mut keep_to, mut at) = (slots, slots, 0);
    let mut done = 0u64;
    for &size in sizes.iter().cycle() {
        if at == keep_from {
            at = keep_to;
        }
        if at >= slots {
            if stop.load(Ordering::Relaxed) {
                break;
            }
            keep_from += range;
            if keep_from >= slots {
                keep_from = 0;
            }
            keep_to = (keep_from + range).min(slots);
            blocks[..keep_from].iter_mut().for_each(|b| *b = None);
            blocks[keep_to..].iter_mut().rev().for_each(|b| *b = None);
            at = if keep_from == 0 { keep_to } else { 0 };
            operations.fetch_add(std::mem::take(&mut done), Ordering::Relaxed);
        }
        blocks[at] = Some(allocator.alloc(Layout::new(size), On::new(&stream))?);
        at += 1;
        done += 1;
    }
    Ok(())
}

fn main() -> Result<()> {
    let args: Vec<u64> = std::env::args().skip(1).filter_map(|a| a.parse().ok()).collect();
    let arg = |i: usize, default: u64| args.get(i).copied().unwrap_or(default);
    let (threads, seconds, largest, slots) =
        (arg(0, 8), arg(1, 60), arg(2, 1 << 16), arg(3, 20_000));
    let allocator =
        Allocator::new(Box::new(FakeBacking::new(1 << 38)), AllocatorConfig::default())?;
    let sizes = sizes(largest);
    let (stop, operations) = (AtomicBool::new(false), AtomicU64::new(0));
    std::thread::scope(|s| -> Result<()> {
        let all: Vec<_> = (0..threads)
            .map(|_| s.spawn(|| work(&allocator, &sizes, slots as usize, &stop, &operations)))
            .collect();
        let begin = Instant::now();
        println!(
            "{:>8} {:>12} {:>9} {:>9} {:>9} {:>6} {:>10} {:>10} {:>8}",
            "s", "operations", "live MiB", "peak", "reserved", "ratio", "caches", "slabs", "free"
        );
        for step in 1..=20u32 {
            let until = Duration::from_secs(seconds) * step / 20;
            std::thread::sleep(until.saturating_sub(begin.elapsed()));
            let stats = allocator.stats();
            let mib = |b: u64| b as f64 / f64::from(1 << 20);
            println!(
                "{:>8.1} {:>12} {:>9.1} {:>9.1} {:>9.1} {:>6.2} {:>10.1} {:>10.1} {:>8.1}",
                begin.elapsed().as_secs_f64(),
                operations.load(Ordering::Relaxed),
                mib(stats.live_bytes),
                mib(stats.live_peak),
                mib(stats.reserved),
                stats.reserved as f64 / stats.live_peak.max(1) as f64,
                mib(stats.free_in_thread_caches),
                mib(stats.free_in_slabs),
                mib(stats.free_ready),
            );
        }
        stop.store(true, Ordering::Relaxed);
        all.into_iter().try_for_each(|t| t.join().unwrap_or(Ok(())))
    })
}
