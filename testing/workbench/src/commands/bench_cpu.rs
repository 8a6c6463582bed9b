//! `leasehold-workbench bench stream` and `graph`: measurements of the CPU's streams and graphs.
//!
//! Each function opens a backend of its own, and runs for well under a second. Results are medians
//! over batches: other work on the machine disturbs single batches, not the median.

use leasehold_core::sync::{spin_loop, thread};
use leasehold_core::{Lease, Result};
use leasehold_cpu::{CpuBackend, CpuConfig};
use leasehold_hal::{
    Access, Backend, Binding, CpuArgs, Device, DeviceId, Dispatch, KernelCheck, KernelDesc,
    KernelSource, Op, OpList, Pipeline, Plan, Stream, StreamDesc,
};
use serde::Serialize;
use std::time::{Duration, Instant};

/// The costs of a stream.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct StreamReport {
    /// Nanoseconds to enqueue a no-op while the worker runs earlier no-ops: median over batches.
    pub(crate) enqueue_ns: f64,
    /// Nanoseconds to enqueue a no-op while a wait holds the worker back.
    pub(crate) enqueue_held_ns: f64,
    /// Microseconds from the call to the observed completion of a no-op, on a stream that was busy
    /// just before: median.
    pub(crate) warm_completion_us: f64,
    /// Microseconds as in `warm_completion_us`: 99th percentile.
    pub(crate) warm_completion_p99_us: f64,
    /// Microseconds as in `warm_completion_us`, on a stream whose worker sleeps: median.
    pub(crate) parked_wake_us: f64,
    /// Microseconds for a no-op and a blocking wait for it, on a warm stream: median.
    pub(crate) submit_and_wait_us: f64,
}

/// The costs of a replay.
#[derive(Debug, Clone, Serialize)]
pub(crate) struct GraphReport {
    /// The most threads of a kernel.
    pub(crate) threads: u32,
    /// Nodes of each graph.
    pub(crate) nodes: usize,
    /// Nanoseconds per node if each node waits for its predecessor: median.
    pub(crate) chain_ns_per_node: f64,
    /// Nanoseconds per node if no node waits for another: median.
    pub(crate) wide_ns_per_node: f64,
    /// Nanoseconds per operation if the same no-ops are submitted one by one: median.
    pub(crate) eager_ns_per_node: f64,
    /// Nanoseconds per node to instantiate the chain.
    pub(crate) instantiate_ns_per_node: f64,
}

/// A tile that does nothing.
///
/// # Safety
/// - None.
unsafe fn nothing(_: &CpuArgs<'_>) {}

fn no_op(device: &dyn Device) -> Result<Lease<Pipeline>> {
    let source = KernelSource::Cpu(nothing);
    device.pipeline(
        &KernelDesc::new("no-op", source, &[Access::ReadWrite], KernelCheck::any())
            .entry("nothing"),
    )
}

fn dispatch<'a>(pipeline: &'a Lease<Pipeline>, binding: &'a Binding) -> Op<'a> {
    Op::Dispatch(Dispatch {
        pipeline,
        grid: [1; 3],
        block: [1; 3],
        shared: 0,
        bindings: std::slice::from_ref(binding),
        params: &[],
    })
}

fn binding(addr: u64) -> Binding {
    Binding { addr, len: 4, native: 0, access: Access::ReadWrite }
}

fn median(mut samples: Vec<f64>) -> f64 {
    percentile(&mut samples, 0.5)
}

fn percentile(samples: &mut [f64], p: f64) -> f64 {
    samples.sort_by(f64::total_cmp);
    samples.get(((samples.len() as f64 - 1.0) * p).round() as usize).copied().unwrap_or(f64::NAN)
}

fn until(stream: &dyn Stream, value: u64) {
    let mut spins = 0u32;
    while stream.timeline().completed() < value {
        spins += 1;
        // Such a wait is far longer than any measured one: the worker has no processor.
        if spins.is_multiple_of(1 << 14) { thread::yield_now() } else { spin_loop() }
    }
}

/// Measures a stream with `threads` threads (`None`: the default), over `rounds` batches or
/// samples.
///
/// # Errors
/// Those of the backend.
pub(crate) fn stream(threads: Option<usize>, rounds: usize) -> Result<StreamReport> {
    const BATCH: usize = 1000;
    let backend =
        CpuBackend::with_config(threads.map_or_else(CpuConfig::default, CpuConfig::threads))?;
    let device = backend.open(DeviceId::cpu(0))?;
    let stream = device.stream(&StreamDesc::default())?;
    let pipeline = no_op(&*device)?;
    let binding = binding(0);
    let op = [dispatch(&pipeline, &binding)];
    // SAFETY: the kernel touches nothing.
    let submit = || unsafe { stream.submit(&op) };
    let timed = |before: &dyn Fn(), after: &dyn Fn(u64)| -> Result<f64> {
        before();
        let start = Instant::now();
        let value = submit()?;
        after(value);
        Ok(start.elapsed().as_nanos() as f64 / 1e3)
    };
    let batch = || -> Result<(f64, u64)> {
        let start = Instant::now();
        let mut last = 0;
        for _ in 0..BATCH {
            last = submit()?;
        }
        Ok((start.elapsed().as_nanos() as f64 / BATCH as f64, last))
    };
    stream.wait_host(batch()?.1, None)?;
    let mut running = Vec::new();
    let mut held = Vec::new();
    for _ in 0..rounds {
        let (nanos, last) = batch()?;
        running.push(nanos);
        stream.wait_host(last, None)?;
        let host_timeline = device.host_timeline()?;
        let opens = host_timeline.timeline().completed() + 1;
        stream.wait(host_timeline.timeline().at(opens))?;
        let (nanos, last) = batch()?;
        held.push(nanos);
        host_timeline.signal_host(opens)?;
        stream.wait_host(last, None)?;
    }
    let mut warm = Vec::new();
    let mut waited = Vec::new();
    for _ in 0..rounds * 100 {
        warm.push(timed(&|| (), &|v| until(&*stream, v))?);
    }
    for _ in 0..rounds * 100 {
        // A wait that fails would have failed in the loops before.
        waited.push(timed(&|| (), &|v| drop(stream.wait_host(v, None)))?);
    }
    let asleep = backend.manager().devices().open(DeviceId::cpu(0))?.config().spin * 4
        + Duration::from_millis(1);
    let parked: Result<Vec<f64>> =
        (0..rounds).map(|_| timed(&|| thread::sleep(asleep), &|v| until(&*stream, v))).collect();
    Ok(StreamReport {
        enqueue_ns: median(running),
        enqueue_held_ns: median(held),
        warm_completion_p99_us: percentile(&mut warm, 0.99),
        warm_completion_us: median(warm),
        parked_wake_us: median(parked?),
        submit_and_wait_us: median(waited),
    })
}

/// Measures the replay of graphs of `nodes` no-ops with `threads` threads, over `rounds` launches.
///
/// # Errors
/// Those of the backend.
pub(crate) fn graph(threads: usize, nodes: usize, rounds: usize) -> Result<GraphReport> {
    let backend = CpuBackend::with_config(CpuConfig::threads(threads))?;
    let device = backend.open(DeviceId::cpu(0))?;
    let stream = device.stream(&StreamDesc::default())?;
    let pipeline = no_op(&*device)?;
    let plan = |apart: u64| {
        let mut ops = OpList::new();
        for i in 0..nodes as u64 {
            ops.push(&dispatch(&pipeline, &binding(0x1000 + i * apart)));
        }
        Plan::new(ops)
    };
    let replay = |plan: Plan| -> Result<f64> {
        // SAFETY: the pipeline is this device's, and its kernel touches nothing.
        let exec = unsafe { device.instantiate(plan) }?;
        let op = [Op::Graph(&exec)];
        let mut samples = Vec::new();
        for _ in 0..rounds + 1 {
            let start = Instant::now();
            // SAFETY: the kernels touch nothing, and the graph belongs to the device.
            until(&*stream, unsafe { stream.submit(&op) }?);
            samples.push(start.elapsed().as_nanos() as f64 / nodes as f64);
        }
        samples.remove(0);
        Ok(median(samples))
    };
    let chain = plan(0);
    let start = Instant::now();
    // SAFETY: the pipeline is this device's, and the graph is never launched.
    drop(unsafe { device.instantiate(chain) }?);
    let instantiate = start.elapsed().as_nanos() as f64 / nodes as f64;
    let (chain, wide) = (replay(plan(0))?, replay(plan(64))?);
    let binding = binding(0x1000);
    let op = [dispatch(&pipeline, &binding)];
    let mut eager = Vec::new();
    for _ in 0..rounds {
        let start = Instant::now();
        let mut last = 0;
        for _ in 0..nodes {
            // SAFETY: the kernel touches nothing.
            last = unsafe { stream.submit(&op) }?;
        }
        until(&*stream, last);
        eager.push(start.elapsed().as_nanos() as f64 / nodes as f64);
    }
    Ok(GraphReport {
        threads: threads as u32,
        nodes,
        chain_ns_per_node: chain,
        wide_ns_per_node: wide,
        eager_ns_per_node: median(eager),
        instantiate_ns_per_node: instantiate,
    })
}
