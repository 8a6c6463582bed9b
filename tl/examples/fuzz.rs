//! `cargo run --release -p leasehold-memory --features bench --example fuzz`, with `--calls N`,
//! `--seed S` or `--threads T` after `--`.
use leasehold_core::sync::thread;
use leasehold_memory::workload::fuzz;

fn main() {
    let (mut calls, mut seed, mut threads) = (1_000_000u64, 1u64, 1u64);
    let mut args = std::env::args().skip(1);
    while let (Some(name), Some(value)) = (args.next(), args.next().and_then(|v| v.parse().ok())) {
        match name.as_str() {
            "--calls" => calls = value,
            "--seed" => seed = value,
            "--threads" => threads = value.max(1),
            _ => std::process::exit(2),
        }
    }
    let handles: Vec<_> = (0..threads)
        .map(|t| thread::spawn(move || fuzz::fuzz(seed + t, calls / threads)))
        .collect();
    let mut made = 0;
    for handle in handles {
        match handle.join() {
            Ok(summary) => made += summary.calls,
            Err(_) => std::process::exit(1),
        }
    }
    fuzz::finish();
    println!("{made} calls from seed {seed} on {threads} threads: no crash, nothing left open");
}
