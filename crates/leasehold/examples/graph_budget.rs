//! Graphs within a budget: what executables take of a device's memory, and what a budget changes.
//!
//! `cargo run --release -p leasehold --features cuda --example graph_budget -- cuda:0`
//!
//! The further arguments are the number of graphs (64), of launches of each (500), of chains that
//! these make (1), and a budget in MiB (none). Run it with a budget and without to compare: a
//! driver may keep what it took once.

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
    let (count, nodes, chains): (usize, usize, usize) = (number(64), number(500), number(1));
    let limit = number(usize::MAX) as u64;
    let runtime = Runtime::open(device)?;
    let (stream, budget) = (runtime.stream(), GraphBudget::of(&runtime));
    let free = || runtime.raw_device().memory_info().map(|info| info.free);
    let add_one = kernel()?;
    let words: Vec<_> =
        (0..count).map(|_| runtime.zeros::<u32>(chains * WORDS)).collect::<Result<_>>()?;
    let grid = Grid::from((1, WORDS as u32));
    let record = |words: &Array<u32>, nodes: usize| {
        runtime.record_graph(|r| {
            (0..nodes).try_for_each(|i| {
                let at = i % chains * WORDS;
                let operands = [words.slice(at..at + WORDS).read_write()];
                r.stream().launch(&add_one, &operands, &(), grid).map(drop)
            })
        })
    };
    // The driver makes some things once.
    record(&words[0], 0)?.launch()?;
    stream.launch(&add_one, &[words[0].slice(..WORDS).read_write()], &(), grid)?;
    stream.fill(words[0].view(), 0u32)?;
    stream.synchronize()?;

    if limit < u64::MAX >> 20 {
        budget.set_limit(limit << 20);
    }
    let (before, begun) = (free()?, Instant::now());
    let graphs: Vec<_> = words.iter().map(|words| record(words, nodes)).collect::<Result<_>>()?;
    let recorded = begun.elapsed();
    let mut launched = vec![0u32; count];
    let launch = |i: usize, launched: &mut [u32]| -> Result<()> {
        launched[i] += 1;
        graphs[i].launch().map(drop)
    };
    let mut least = free()?;
    for i in 0..2 * count {
        launch(i % count, &mut launched)?;
        least = least.min(free()?);
    }
    stream.synchronize()?;
    let stats = budget.stats();
    println!(
        "{device}: {count} graphs of {nodes} launches in {chains} chains, recorded in {recorded:.1?}"
    );
    println!("free before               {:9.1} MiB", mib(before));
    println!("free at the least         {:9.1} MiB", mib(least));
    println!("so executables take       {:9.1} MiB", mib(before.saturating_sub(least)));
    println!("counted at the most       {:9.1} MiB", mib(stats.peak));
    println!("{stats:?}");
    assert!(stats.bytes <= stats.limit);

    // A graph that stays, beside the others that are idle.
    timed("launch of a graph that stays", 400, |i| {
        if i % 20 == 0 {
            stream.synchronize()?;
        }
        launch(0, &mut launched)
    })?;
    timed("launch of a graph of all in turn", 2 * count, |i| launch(i % count, &mut launched))?;

    stream.synchronize()?;
    let (taken, last) = (budget.take_idle(), free()?);
    assert_eq!(budget.stats().executables, 0);
    println!("taken back                {:9.1} MiB as counted", mib(taken));
    println!("free then                 {:9.1} MiB", mib(last));
    // The driver has it for the executables that come now.
    let rounds = if limit < u64::MAX >> 20 { 1 } else { count };
    (0..rounds).try_for_each(|i| launch(i, &mut launched))?;
    stream.synchronize()?;
    println!("{rounds:3} made again take       {:9.1} MiB more", mib(last.saturating_sub(free()?)));

    for (words, launches) in words.iter().zip(launched) {
        for (chain, got) in runtime.to_vec(words)?.chunks(WORDS).enumerate() {
            let each = (nodes - chain).div_ceil(chains) as u32;
            assert_eq!(got, [launches * each; WORDS]);
        }
    }
    drop(graphs);
    assert_eq!(budget.stats().bytes, 0);
    println!("free without graphs       {:9.1} MiB", mib(free()?));
    Ok(())
}
