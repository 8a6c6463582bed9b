//! Times of small all_reduces in registered memory, beside ordinary memory: a graph of 64, on each
//! rank of the environment, with a GPU each. The first rank prints a line.
//!
//! ```text
//! torchrun --nproc-per-node 2 --no-python target/release/examples/check_windows
//! ```

use leasehold::{Array, DeviceId, Pool, PoolKind, Result, Runtime};
use leasehold_collective::{Comm, CommConfig, Reduce, World};
use std::time::{Duration, Instant};

const CALLS: u32 = 64;
const WORDS: usize = 2048;
const LAUNCHES: u32 = 300;

/// Microseconds of a call in a graph, and whether the values are right.
fn time(runtime: &Runtime, comm: &Comm, x: &Array<f32>) -> Result<(f64, bool)> {
    let graph = runtime.record_graph(|recording| {
        (0..CALLS).try_for_each(|_| comm.all_reduce(recording.stream(), x, Reduce::Sum))
    })?;
    let mut best = f64::MAX;
    // NCCL's calls in windows are for sums. Sums of nothing stay finite.
    runtime.stream().fill_with(x.as_view(), 0f32)?;
    for _ in 0..5 {
        runtime.stream().synchronize()?;
        let begun = Instant::now();
        (0..LAUNCHES).try_for_each(|_| graph.launch_on(runtime.stream()).map(drop))?;
        runtime.stream().synchronize()?;
        let each = begun.elapsed().as_secs_f64() * 1e6 / f64::from(LAUNCHES * CALLS);
        best = best.min(each);
    }
    runtime.stream().fill_with(x.as_view(), (comm.rank() + 1) as f32)?;
    graph.launch_on(runtime.stream())?;
    let size = comm.size() as f32;
    let sum = size * (size + 1.0) / 2.0 * size.powi(CALLS as i32 - 1);
    Ok((best, runtime.to_vec(x)?.iter().all(|&v| v == sum)))
}

fn main() -> Result<()> {
    let world = World::from_env()?;
    let local = std::env::var("LOCAL_RANK").ok().and_then(|n| n.parse().ok());
    let runtime = Runtime::open(DeviceId::cuda(local.unwrap_or(world.rank())))?;
    let comm = world.comm(&runtime, &CommConfig::new("tp"))?;
    let ordinary = runtime.alloc_array::<f32>(WORDS)?;
    let (plain, right) = time(&runtime, &comm, &ordinary)?;
    let pool = Pool::new(&runtime, "windows", PoolKind::Shareable)?;
    let x = Array::from_buffer(pool.alloc(4 * WORDS as u64)?)?;
    let registration = comm.register(&pool)?;
    let (window, also) = time(&runtime, &comm, &x)?;
    if world.rank() == 0 {
        println!(
            "{}: all_reduce of {} bytes in a graph of {CALLS}: {plain:.2} us, in a window {window:.2} us, {:.2} of the time; {}",
            comm.library(),
            4 * WORDS,
            window / plain,
            if right && also { "values right" } else { "VALUES WRONG" }
        );
    }
    drop((registration, comm));
    world.close(Duration::from_secs(20))
}
