//! Graphs within a budget: what executables take of a device's memory, and what comes back.
//!
//! `cargo run --release -p leasehold --features cuda --example graph_budget -- cuda:0`
//!
//! The further arguments are the number of graphs (64) and of nodes of each (500).

use leasehold::graph::GraphBudget;
use leasehold::kernel::{KernelCheck, KernelDesc, KernelSource};
use leasehold::prelude::*;
use std::time::Instant;

/// Adds one to each of 64 words.
const ADD_ONE: &str = r"
.version 7.0
.target sm_70
.address_size 64
.visible .entry add_one(.param .u64 words) {
    .reg .b32 %r<3>;
    .reg .b64 %p<4>;
    ld.param.u64 %p0, [words];
    cvta.to.global.u64 %p1, %p0;
    mov.u32 %r0, %tid.x;
    mul.wide.u32 %p2, %r0, 4;
    add.s64 %p3, %p1, %p2;
    ld.global.u32 %r1, [%p3];
    add.s32 %r2, %r1, 1;
    st.global.u32 [%p3], %r2;
    ret;
}
";
const WORDS: usize = 64;

unsafe fn add_one(args: &CpuArgs<'_>) {
    // SAFETY: the only tile has the only binding.
    unsafe { args.slice_mut::<u32>(0, 0, WORDS) }.iter_mut().for_each(|word| *word += 1);
}

fn kernel() -> Result<KernelBase> {
    let check = KernelCheck::new(|launch| {
        if (launch.grid, launch.block) != ([1; 3], [WORDS as u32, 1, 1]) {
            return Err(Error::invalid("one block of 64 threads"));
        }
        launch.want(0, WORDS as u64 * 4)
    });
    let describe =
        |source| KernelDesc::new("add_one", source, &[Access::ReadWrite], check.clone()).aligned(4);
    let cuda = KernelSource::Ptx(ADD_ONE.into());
    // SAFETY: a launch that the check accepts changes 64 words, each by a thread of its own.
    unsafe { KernelBase::with_sources(vec![describe(cuda), describe(KernelSource::Cpu(add_one))]) }
}

fn mib(bytes: u64) -> f64 {
    bytes as f64 / f64::from(1 << 20)
}

/// The median and the 99th percentile of some calls, in microseconds.
fn timed(name: &str, count: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut times = Vec::with_capacity(count);
    for i in 0..count {
        let begun = Instant::now();
        call(i)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    println!("{name:52} {:9.1} us, p99 {:9.1}", times[count / 2], times[count * 99 / 100]);
    Ok(())
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceId = arguments.next().unwrap_or_else(|| "cpu:0".into()).parse()?;
    let mut number = |default| arguments.next().and_then(|n| n.parse().ok()).unwrap_or(default);
    let (count, nodes): (usize, usize) = (number(64), number(500));
    let runtime = Runtime::open(device)?;
    let (stream, budget) = (runtime.stream(), GraphBudget::of(&runtime));
    let free = || runtime.raw_device().memory_info().map(|info| info.free);
    let add_one = kernel()?;
    let words: Vec<_> = (0..count).map(|_| runtime.zeros::<u32>(WORDS)).collect::<Result<_>>()?;
    let grid = Grid::from((1, WORDS as u32));
    let record = |words: &Array<u32>| {
        runtime.record_graph(|r| {
            let operands = [words.read_write()];
            (0..nodes).try_for_each(|_| r.stream().launch(&add_one, &operands, &(), grid).map(drop))
        })
    };
    // The driver has made what it makes once.
    record(&words[0])?.launch()?;
    stream.synchronize()?;
    let mut launched = vec![0u32; count];
    launched[0] = 1;

    let before = free()?;
    let graphs: Vec<_> = words.iter().map(record).collect::<Result<_>>()?;
    let peak = free()?;
    let launch = |i: usize, launched: &mut [u32]| -> Result<()> {
        launched[i] += 1;
        graphs[i].launch().map(drop)
    };
    (0..count).try_for_each(|i| launch(i, &mut launched))?;
    stream.synchronize()?;
    let (there, used) = (budget.stats(), before.saturating_sub(free()?));
    println!("{device}: {count} graphs of {nodes} launches");
    println!("free before                  {:9.1} MiB", mib(before));
    println!("free with all executables    {:9.1} MiB", mib(peak));
    println!("so they take                 {:9.1} MiB", mib(used));
    println!(
        "counted                      {:9.1} MiB, {} bytes a node",
        mib(there.bytes),
        there.bytes / (count * nodes) as u64
    );
    timed("launch of a graph, without a budget", 400, |i| {
        if i % 20 == 0 {
            stream.synchronize()?;
        }
        launch(0, &mut launched)
    })?;

    stream.synchronize()?;
    let taken = budget.take_idle();
    let after = free()?;
    println!(
        "taken back                   {:9.1} MiB counted, {:.1} MiB free again, {:.1} MiB stay with the driver",
        mib(taken),
        mib(after.saturating_sub(before - used)),
        mib(before.saturating_sub(after))
    );
    assert_eq!(budget.stats().executables, 0);

    budget.set_limit(there.bytes / 4);
    launch(0, &mut launched)?;
    timed("launch of a graph that stays, within the budget", 400, |i| {
        if i % 20 == 0 {
            stream.synchronize()?;
        }
        launch(0, &mut launched)
    })?;
    let mut least = u64::MAX;
    timed("launch that makes its executable again", 2 * count, |i| {
        let made = launch(i % count, &mut launched);
        least = least.min(free()?);
        made
    })?;
    let stats = budget.stats();
    println!(
        "free at the least            {:9.1} MiB, with a budget of {:.1} MiB",
        mib(least),
        mib(stats.limit)
    );
    println!("{stats:?}");
    assert!(stats.bytes <= stats.limit && stats.thrashing);
    stream.synchronize()?;
    for (words, launches) in words.iter().zip(launched) {
        assert_eq!(runtime.to_vec(words)?, [launches * nodes as u32; WORDS]);
    }
    drop(graphs);
    println!("free without graphs          {:9.1} MiB", mib(free()?));
    Ok(())
}
