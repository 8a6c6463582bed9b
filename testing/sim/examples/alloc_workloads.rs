//! Times a pair of allocation and free under the workloads of `leasehold_sim::memory::workload`,
//! over a device without memory.
//!
//! `alloc_workloads [part of a workload's name] [pairs] [threads]`; for a quick look while working
//! on the allocator. The comparison with other allocators is `leasehold-workbench bench alloc`.

use leasehold_alloc::AllocatorConfig;
use leasehold_core::Result;
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::workload::{Own, Workload};

fn own(thread_caches: bool, marks: bool) -> Result<Own> {
    let config = AllocatorConfig { thread_caches, ..AllocatorConfig::default() };
    Own::new(Box::new(FakeBacking::new(1 << 38)), config, marks)
}

fn main() -> Result<()> {
    let args: Vec<String> = std::env::args().skip(1).collect();
    let part = args.first().map_or("", String::as_str);
    let pairs = args.get(1).and_then(|n| n.parse().ok()).unwrap_or(1_000_000);
    let threads = args.get(2).and_then(|n| n.parse().ok()).unwrap_or(1);
    println!(
        "{:28} {:>11} {:>11} {:>11}  ns a pair (median, best)",
        "", "cached", "core", "marked"
    );
    for (name, workload) in Workload::all().into_iter().filter(|w| w.0.contains(part)) {
        print!("{name:28}");
        for (thread_caches, marks) in [(true, false), (false, false), (true, true)] {
            let own = own(thread_caches, marks)?;
            match workload.run(&own, threads, pairs)? {
                Some(s) => print!(" {:5.1}/{:<5.1}", s.ns, s.ns_best),
                None => print!("   no memory"),
            }
        }
        println!();
    }
    Ok(())
}
