//! Times a pair of allocation and free under the workloads of `leasehold_alloc_bench::workload`,
//! over a device without memory.
//!
//! `alloc_workloads [part of a workload's name] [pairs] [threads]`; for a quick look while working on the allocator. The comparison with
//! other allocators is `leasehold bench alloc`.

use leasehold_alloc::{AllocatorConfig, Layout, On};
use leasehold_alloc_bench::FakeBacking;
use leasehold_alloc_bench::VirtualStream;
use leasehold_alloc_bench::workload::{Own, Workload};
use leasehold_core::Result;
use std::sync::Barrier;
use std::sync::mpsc::channel;

fn own(magazines: bool, marks: bool) -> Result<Own> {
    let config = AllocatorConfig { magazines, ..AllocatorConfig::default() };
    Own::new(Box::new(FakeBacking::new(1 << 38)), config, marks)
}

/// Lets so many threads use every shard in turn that none is biased any more. All are there at a
/// time: numbers of threads are given again.
fn share(own: &Own) -> Result<()> {
    let shards = 2 * std::thread::available_parallelism().map_or(4, usize::from).next_power_of_two().clamp(2, 32);
    let end = Barrier::new(24 * shards + 1);
    let (done, next) = channel();
    let mut all: Vec<Result<()>> = Vec::new();
    std::thread::scope(|s| {
        for _ in 0..24 * shards {
            let (done, end) = (done.clone(), &end);
            s.spawn(move || {
                let uses = VirtualStream::new().and_then(|stream| {
                    (0..3).try_for_each(|_| own.allocator().alloc(Layout::new(4 << 10), On::new(&stream)).map(drop))
                });
                let _ = done.send(uses);
                end.wait();
            });
            all.extend(next.recv());
        }
        end.wait();
    });
    all.into_iter().collect()
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let part = args.first().map_or("", String::as_str);
    let pairs = args.get(1).and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    let threads = args.get(2).and_then(|n| n.parse().ok()).unwrap_or(1);
    println!("{:28} {:>9} {:>9} {:>9} {:>9}  ns a pair (median, best)", "", "biased", "shared", "core", "marked");
    for (name, workload) in Workload::all().into_iter().filter(|w| w.0.contains(part)) {
        print!("{name:28}");
        for (magazines, shared, marks) in
            [(true, false, false), (true, true, false), (false, false, false), (true, false, true)]
        {
            let own = own(magazines, marks)?;
            if shared {
                share(&own)?;
            }
            match workload.run(&own, threads, pairs)? {
                Some(s) => print!(" {:5.1}/{:<5.1}", s.ns, s.ns_best),
                None => print!("   no memory"),
            }
        }
        println!();
    }
    Ok(())
}
