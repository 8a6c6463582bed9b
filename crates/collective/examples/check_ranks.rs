//! Checks collectives of real GPUs against what they should give, eager and recorded, and measures
//! them. Each rank is a process:
//!
//! ```text
//! for rank in 0 1; do
//!     LEASEHOLD_RANK=$rank LEASEHOLD_WORLD=2 LEASEHOLD_STORE=tcp://127.0.0.1:29477 \
//!         NCCL_GRAPH_REGISTER=0 NCCL_RUNTIME_CONNECT=0 NCCL_NVLS_ENABLE=0 check_ranks &
//! done
//! wait
//! ```
//! `torchrun --no-python` sets what it needs instead. Rank 0 prints a table; a wrong value ends the
//! program with status 1.

use half::bf16;
use leasehold::{DeviceId, Error, Result, Runtime};
use leasehold_collective::{Comm, CommConfig, Element, Reduce, World};
use std::time::{Duration, Instant};

/// Replays of the longest check.
const REPLAYS: u32 = 100_000;
/// Collectives of a recording.
const CALLS: u32 = 64;

fn main() -> Result<()> {
    let world = World::from_env()?;
    let device = DeviceId::cuda(world.local_rank());
    let runtime = Runtime::open(device)?;
    let begin = Instant::now();
    let config = CommConfig::new("check").timeout(Duration::from_secs(60));
    let comm = world.comm(&runtime, &config)?;
    let made = begin.elapsed();
    let show = |line: String| {
        if world.rank() == 0 {
            println!("{line}");
        }
    };
    show(format!("{} ranks, communicator in {:.0} ms", world.size(), made.as_secs_f64() * 1e3));
    values(&runtime, &comm, &world)?;
    show("values: all collectives are right, eager and recorded".to_owned());
    show(format!("f32: {}", bits::<f32>(&runtime, &comm, &world, |x| x)?));
    show(format!("bf16: {}", bits::<bf16>(&runtime, &comm, &world, bf16::from_f32)?));
    let spent = replays(&runtime, &comm, &world)?;
    show(format!(
        "{REPLAYS} replays of {CALLS} all_reduces, with eager ones between: right, {:.2} us a call",
        spent.as_secs_f64() * 1e6 / f64::from(REPLAYS * CALLS)
    ));
    for bytes in [8 << 10, 64 << 10, 1 << 20, 8 << 20, 1 << 30] {
        show(times(&runtime, &comm, bytes)?);
    }
    comm.barrier(runtime.stream())?;
    runtime.synchronize()?;
    world.barrier("end", Duration::from_secs(30))?;
    let begin = Instant::now();
    drop(comm);
    show(format!("the drop of the communicator: {:.1} us", begin.elapsed().as_secs_f64() * 1e6));
    world.close(Duration::from_secs(30))
}

fn expect(what: &str, got: &[f32], wanted: impl Fn(usize) -> f32) -> Result<()> {
    match got.iter().enumerate().find(|&(i, &x)| x != wanted(i)) {
        None => Ok(()),
        Some((i, x)) => {
            Err(Error::other(format!("{what}: element {i} is {x} instead of {}", wanted(i))))
        }
    }
}

/// Every call once eagerly and once recorded. Small whole numbers, so that all sums are exact.
fn values(runtime: &Runtime, comm: &Comm, world: &World) -> Result<()> {
    let (n, rank, size) = (1000usize, world.rank() as usize, world.size() as usize);
    let own = |of: usize, i: usize| (of * 7 + i % 13) as f32;
    let mine: Vec<f32> = (0..n).map(|i| own(rank, i)).collect();
    let all = |i: usize| (0..size).map(|r| own(r, i)).sum::<f32>();
    let parts: Vec<f32> = (0..n * size).map(|i| own(rank, i)).collect();
    for recorded in [false, true] {
        let src = runtime.upload(&mine)?;
        let wide = runtime.upload(&parts)?;
        let (sum, least) = (runtime.upload(&vec![0f32; n])?, runtime.upload(&vec![0f32; n])?);
        let (gathered, exchanged) =
            (runtime.upload(&vec![0f32; n * size])?, runtime.upload(&vec![0f32; n * size])?);
        let (part, cast) = (runtime.upload(&vec![0f32; n])?, runtime.upload(&mine)?);
        let passed = runtime.upload(&vec![0f32; n])?;
        let (next, before) = ((rank + 1) % size, (rank + size - 1) % size);
        let calls = |stream: &leasehold::Stream| -> Result<()> {
            comm.all_reduce_into(stream, &sum, &src, Reduce::Sum)?;
            comm.all_reduce_into(stream, &least, &src, Reduce::Least)?;
            comm.all_gather(stream, &gathered, &src)?;
            comm.reduce_scatter(stream, &part, &wide, Reduce::Sum)?;
            comm.broadcast(stream, &cast, 0)?;
            comm.all_to_all(stream, &exchanged, &wide)?;
            comm.group(stream, |group| {
                group.send(&src, next as u32)?;
                group.recv(&passed, before as u32)
            })?;
            comm.barrier(stream)
        };
        if recorded {
            let graph = runtime.record_graph(|recording| calls(recording.stream()))?;
            graph.launch_on(runtime.stream())?;
        } else {
            calls(runtime.stream())?;
        }
        let what = if recorded { "recorded" } else { "eager" };
        expect(&format!("{what} all_reduce"), &runtime.to_vec(&sum)?, all)?;
        expect(&format!("{what} least"), &runtime.to_vec(&least)?, |i| own(0, i))?;
        expect(&format!("{what} all_gather"), &runtime.to_vec(&gathered)?, |i| own(i / n, i % n))?;
        expect(&format!("{what} reduce_scatter"), &runtime.to_vec(&part)?, |i| all(rank * n + i))?;
        expect(&format!("{what} broadcast"), &runtime.to_vec(&cast)?, |i| own(0, i))?;
        expect(&format!("{what} all_to_all"), &runtime.to_vec(&exchanged)?, |i| {
            own(i / n, rank * n + i % n)
        })?;
        expect(&format!("{what} send and recv"), &runtime.to_vec(&passed)?, |i| own(before, i))?;
    }
    Ok(())
}

/// Sums of values whose order of addition shows in the last digits, of 4 B to 64 MiB: eager beside
/// recorded, a second call beside the first, and rank 0's beside each rank's. Says which differ.
fn bits<T: Element + PartialEq>(
    runtime: &Runtime,
    comm: &Comm,
    world: &World,
    of: fn(f32) -> T,
) -> Result<String> {
    let seed = u64::from(world.rank()) + 1;
    let value = |i: usize| {
        let mut z = (i as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15)
            ^ seed.wrapping_mul(0xd134_2543_de82_ef95);
        z = (z ^ (z >> 32)).wrapping_mul(0xd6e8_feb8_6659_fd93);
        of(((z >> 40) as f32 / (1 << 23) as f32 - 1.0) * 2f32.powi((z & 15) as i32))
    };
    let stream = runtime.stream();
    let (mut sizes, mut differ) = (0, Vec::new());
    for power in 0..=24 {
        // The second size of each is even to no block, warp or word.
        for n in [1_usize << power, (1 << power) + (1 << power) / 3 + 1] {
            let values: Vec<T> = (0..n).map(value).collect();
            let x = runtime.upload(&values)?;
            let sums = [runtime.zeros::<T>(n)?, runtime.zeros::<T>(n)?, runtime.zeros::<T>(n)?];
            let graph = runtime
                .record_graph(|r| comm.all_reduce_into(r.stream(), &sums[2], &x, Reduce::Sum))?;
            comm.all_reduce_into(stream, &sums[0], &x, Reduce::Sum)?;
            comm.all_reduce_into(stream, &sums[1], &x, Reduce::Sum)?;
            graph.launch_on(stream)?;
            let [first, second, recorded] = [0, 1, 2].map(|i| runtime.to_vec(&sums[i]));
            let first = first?;
            let pairs = [("again", second?), ("recorded", recorded?)];
            comm.broadcast(stream, &sums[1], 0)?;
            let zeroth = ("rank 0's", runtime.to_vec(&sums[1])?);
            let wrong: Vec<_> = pairs
                .into_iter()
                .chain([zeroth])
                .filter(|(_, sum)| *sum != first)
                .map(|(what, _)| what)
                .collect();
            sizes += 1;
            if !wrong.is_empty() {
                differ.push(format!("{n} elements: {}", wrong.join(", ")));
            }
        }
    }
    Ok(if differ.is_empty() {
        format!("sums of {sizes} sizes are equal to the bit: eager, again, recorded, on all ranks")
    } else {
        format!("sums of {} of {sizes} sizes differ: {}", differ.len(), differ.join("; "))
    })
}

/// Replays of a recording of many all_reduces, with an eager one now and then. The average of equal
/// values is that value, so a wrong call of a hundred thousand shows at the end.
fn replays(runtime: &Runtime, comm: &Comm, world: &World) -> Result<Duration> {
    let n = 4096;
    let values: Vec<f32> = (0..n).map(|i| i as f32).collect();
    let (x, count) = (runtime.upload(&values)?, runtime.upload(&[1.0f32])?);
    let graph = runtime.record_graph(|recording| {
        (0..CALLS).try_for_each(|_| comm.all_reduce(recording.stream(), &x, Reduce::Average))
    })?;
    let stream = runtime.stream();
    graph.launch_on(stream)?;
    runtime.synchronize()?;
    world.barrier("replays", Duration::from_secs(30))?;
    let begin = Instant::now();
    for i in 0..REPLAYS {
        graph.launch_on(stream)?;
        if i % 1000 == 0 {
            comm.all_reduce(stream, &x, Reduce::Average)?;
            comm.all_reduce(stream, &count, Reduce::Largest)?;
        }
        if i % 256 == 255 {
            runtime.synchronize()?;
        }
    }
    runtime.synchronize()?;
    let spent = begin.elapsed();
    expect("after the replays", &runtime.to_vec(&x)?, |i| i as f32)?;
    expect("after the eager calls", &runtime.to_vec(&count)?, |_| 1.0)?;
    Ok(spent)
}

/// Medians of the time of an all_reduce in place: eager, with the host's share, and recorded.
fn times(runtime: &Runtime, comm: &Comm, bytes: usize) -> Result<String> {
    let x = runtime.zeros::<f32>(bytes / 4)?;
    let stream = runtime.stream();
    let calls = if bytes > 64 << 20 { 4 } else { CALLS };
    let graph = runtime.record_graph(|recording| {
        (0..calls).try_for_each(|_| comm.all_reduce(recording.stream(), &x, Reduce::Sum))
    })?;
    let (begin, end) = (runtime.create_event()?, runtime.create_event()?);
    let (mut eager, mut host, mut recorded) = (Vec::new(), Vec::new(), Vec::new());
    for _ in 0..if bytes > 64 << 20 { 5 } else { 31 } {
        for graphed in [false, true] {
            comm.barrier(stream)?;
            stream.record(&begin)?;
            let submit = Instant::now();
            if graphed {
                graph.launch_on(stream)?;
            } else {
                for _ in 0..calls {
                    comm.all_reduce(stream, &x, Reduce::Sum)?;
                }
            }
            let submitted = submit.elapsed();
            stream.record(&end)?;
            runtime.synchronize()?;
            let each = end.elapsed_since(&begin)?.as_secs_f64() * 1e6 / f64::from(calls);
            if graphed {
                recorded.push(each);
            } else {
                eager.push(each);
                host.push(submitted.as_secs_f64() * 1e6 / f64::from(calls));
            }
        }
    }
    let median = |mut all: Vec<f64>| {
        all.sort_by(f64::total_cmp);
        all[all.len() / 2]
    };
    let (eager, host, recorded) = (median(eager), median(host), median(recorded));
    let bus = |us: f64| {
        let ranks = f64::from(comm.size());
        2.0 * (ranks - 1.0) / ranks * bytes as f64 / us / 1e3
    };
    Ok(format!(
        "all_reduce of {bytes:>10} bytes: eager {eager:9.2} us (host {host:6.2}), recorded {recorded:9.2} us, {:.0} GB/s on the bus",
        bus(recorded)
    ))
}
