//! Growing memory on a device: caches of sequences that share one pool, checked and timed.
//!
//! `cargo run --release -p leasehold --features cuda --example growing_memory -- cuda:0`
//!
//! The second argument divides the sizes: 1 is 32 slots of at most 1 GiB, with 1,000 tokens of
//! 128 KiB each.

mod timed;

use leasehold::Growing;
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::prelude::*;
use std::time::Instant;
use timed::timed;

const SLOTS: usize = 32;
/// Values of a token.
const TOKEN: usize = (128 << 10) / 4;

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device = arguments.next().unwrap_or_else(|| "cpu:0".into()).parse()?;
    let scale = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(64);
    let (positions, tokens) = (8192 / scale, 1000 / scale);
    let runtime = Runtime::open(device)?;
    let stream = runtime.stream();
    let memory = runtime.allocator();
    let granule = memory.caps().granule as usize / 4;
    println!(
        "{device}, granules of {} KiB, growing: {}",
        granule >> 8,
        runtime.raw_device().caps().growing
    );

    // One pool: slots cost what their texts need.
    let slots: Vec<_> = (0..SLOTS)
        .map(|_| Growing::<u32>::new(&runtime, positions * TOKEN))
        .collect::<Result<_>>()?;
    let ends = runtime.zeros::<u32>(SLOTS)?;
    for slot in &slots {
        slot.grow(stream, TOKEN)?;
    }
    let graph = runtime.record_graph(|r| {
        slots.iter().enumerate().try_for_each(|(i, slot)| {
            r.stream().copy(ends.slice(i..=i).view(), slot.slice(TOKEN - 1..TOKEN).view())
        })
    })?;
    for (i, slot) in slots.iter().enumerate() {
        slot.grow(stream, tokens * TOKEN)?;
        stream.fill(slot.view(), i as u32)?;
    }
    graph.launch()?;
    let want: Vec<u32> = (0..SLOTS as u32).collect();
    assert_eq!(runtime.to_vec(&ends)?, want, "a graph from before the growths");
    let reserved = memory.stats().reserved as f64 / f64::from(1 << 30);
    let fixed = (SLOTS * positions * TOKEN * 4) as f64 / f64::from(1 << 30);
    println!(
        "{SLOTS} slots of {tokens} of {positions} tokens: {reserved:.2} GiB; fixed slots {fixed:.2} GiB"
    );

    // Growth by itself.
    let one = Growing::<u32>::new(&runtime, 256 * granule)?;
    timed("grow by a granule of new memory", 64, |i| one.grow(stream, (i + 1) * granule))?;
    timed("shrink by a granule", 64, |i| one.shrink(stream, (63 - i) * granule))?;
    timed("try_grow by a granule that is mapped", 64, |i| {
        assert!(one.try_grow(stream, (i + 1) * granule)?);
        Ok(())
    })?;
    for granules in [1, 8, 32] {
        stream.synchronize()?;
        let round = |_| {
            let fresh = Growing::<u32>::new(&runtime, (64 + granules) * granule)?;
            fresh.prepare(granules * granule)?;
            drop(fresh);
            memory.trim(0).map(drop)
        };
        timed(&format!("new, prepare {granules}, drop, give back to the driver"), 20, round)?;
    }
    timed("new, grow by 32 granules, drop: parked", 50, |_| {
        Growing::<u32>::new(&runtime, 77 * granule)?.grow(stream, 32 * granule)
    })?;

    // Steps: a token for each slot, mapped ahead by another thread.
    let step = |token: usize| -> Result<()> {
        for slot in &slots {
            if !slot.try_grow(stream, (tokens + token + 1) * TOKEN)? {
                slot.grow(stream, (tokens + token + 1) * TOKEN)?;
            }
        }
        graph.launch().map(drop)
    };
    let most = (positions - tokens).min(400);
    slots.iter().try_for_each(|slot| slot.prepare((tokens + most) * TOKEN))?;
    let calls = memory.stats().driver_calls;
    timed("step of 32 slots, mapped ahead", most, step)?;
    stream.synchronize()?;
    println!(
        "calls of the driver for memory in {most} steps: {}",
        memory.stats().driver_calls - calls
    );
    timed("the same launch alone", most, |_| graph.launch().map(drop))?;
    assert_eq!(runtime.to_vec(&ends)?, want, "after the steps");

    // All of it goes to one buffer of the heap and comes back, under the live graph.
    for slot in &slots {
        slot.shrink(stream, TOKEN)?;
    }
    stream.synchronize()?;
    let idle = memory.stats().idle_in_growing;
    let begun = Instant::now();
    memory.trim(0)?;
    let given = begun.elapsed();
    let begun = Instant::now();
    for slot in &slots {
        slot.grow(stream, tokens * TOKEN)?;
    }
    let gib = idle as f64 / f64::from(1 << 30);
    println!("{gib:.2} GiB given back in {given:.1?}, as much taken in {:.1?}", begun.elapsed());
    graph.launch()?;
    assert_eq!(runtime.to_vec(&ends)?, want, "after memory went and came back");
    drop((graph, slots));

    // A pool that leaves the device with its caches.
    if let Ok(pool) = Pool::new(&runtime, "caches", PoolKind::Suspendable) {
        let cache = pool.growing::<u32>(1, positions * TOKEN)?;
        cache.grow(stream, tokens * TOKEN)?;
        stream.fill(cache.view(), 7u32)?;
        let last = runtime.zeros::<u32>(1)?;
        let copy = |r: &Runtime| {
            r.stream().copy(last.view(), cache.slice(tokens * TOKEN - 1..tokens * TOKEN).view())
        };
        let graph = runtime.record_graph(copy)?;
        timed("suspend and resume a cache", 10, |i| {
            pool.suspend(Contents::Keep)?;
            pool.resume()?;
            cache.grow(stream, (tokens + i) * TOKEN)
        })?;
        graph.launch()?;
        assert_eq!(runtime.to_vec(&last)?, [7], "after suspensions");
    }
    println!("all values right");
    runtime.close(std::time::Duration::from_secs(10))
}
