//! Single-threaded paths of the allocator.

#[expect(dead_code, reason = "these operations repeat themselves")]
mod program;

use leasehold_alloc::AllocatorConfig;
use leasehold_core::{Error, Result};
use leasehold_sim::Dice;
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::workload::{Own, Subject};

fn own(thread_caches: bool, marks: bool) -> Result<Own> {
    let config = AllocatorConfig { thread_caches, ..AllocatorConfig::default() };
    Own::new(Box::new(FakeBacking::new(1 << 36)), config, marks)
}

fn ping_pong(own: &Own, size: u64, pairs: u64) -> Result<()> {
    let stream = own.stream()?;
    for _ in 0..pairs {
        let block = own.alloc(&stream, size).ok_or_else(|| Error::state("no memory"))?;
        own.free(&stream, block);
    }
    Ok(())
}

fn random(own: &Own, live: usize, most: u64, pairs: u64) -> Result<()> {
    let stream = own.stream()?;
    let mut dice = Dice::new(1);
    let mut next =
        || own.alloc(&stream, 1 + dice.below(most)).ok_or_else(|| Error::state("no memory"));
    let mut held = (0..live).map(|_| next()).collect::<Result<Vec<_>>>()?;
    let mut which = Dice::new(2);
    for _ in 0..pairs {
        let at = which.below(live as u64) as usize;
        own.free(&stream, held.swap_remove(at));
        held.push(next()?);
    }
    Ok(())
}

fn main() -> Result<()> {
    let (name, pairs) = program::arguments()?;
    match name.as_str() {
        "alloc_cached" => ping_pong(&own(true, false)?, 4 << 10, pairs),
        "alloc_cached_marked" => ping_pong(&own(true, true)?, 4 << 10, pairs),
        "alloc_core_slab" => ping_pong(&own(false, false)?, 4 << 10, pairs),
        "alloc_core_large" => ping_pong(&own(false, false)?, 1 << 20, pairs),
        "alloc_core_large_marked" => ping_pong(&own(false, true)?, 1 << 20, pairs),
        "alloc_core_small_1000" => random(&own(false, false)?, 1_000, 32 << 10, pairs),
        "alloc_core_mixed_1000" => random(&own(false, false)?, 1_000, 4 << 20, pairs),
        _ => Err(program::unknown(&name)),
    }
}
