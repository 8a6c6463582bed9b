//! The runtime in one page: open a device, allocate, copy, launch a kernel of one's own, time it with events, record, replay.
//!
//! `cargo run --release -p leasehold --example quickstart`

use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
use leasehold::{Access, Context, DeviceId, Error, KernelBase, Result, View};
use std::time::Duration;

/// Elements that one tile (a block of the grid) computes.
const TILE: usize = 4096;

/// `y += a * x`, one tile of it. Tiles run on all processors at once.
unsafe fn axpy(args: &CpuArgs<'_>) {
    let from = args.tile()[0] as usize * TILE;
    // SAFETY: binding 0 is only read; each tile writes elements of its own of binding 1.
    let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, from, TILE)) };
    let a: f32 = args.params();
    for (y, x) in y.iter_mut().zip(&x[from..]) {
        *y += a * x;
    }
}

fn main() -> Result<()> {
    let context = Context::new();
    let runtime = context.runtime(DeviceId::cpu(0))?;
    println!("{}", runtime.info());

    // Buffers are leases: cloned and dropped like `Rc`, freed with the last one.
    let n = 256 * TILE;
    let x = runtime.upload(&vec![1.0f32; n])?;
    let y = runtime.alloc(4 * n as u64)?;
    runtime.stream().copy(y.view(), x.view())?;

    // Launching is safe, since each launch is checked: whoever defines a kernel says which launches it can run.
    let check = KernelCheck::new(|launch| match launch.grid {
        [tiles, 1, 1] => (0..2).try_for_each(|i| launch.want(i, u64::from(tiles) * 4 * TILE as u64)),
        _ => Err(Error::invalid("axpy takes a grid of one dimension")),
    });
    let roles = [Access::Read, Access::ReadWrite];
    let desc = KernelDesc::new("axpy", KernelSource::Cpu(axpy), &roles, check).params_of::<f32>().aligned(4);
    // SAFETY: the launches that the check accepts touch floats of the two bindings, each of y's in one tile.
    let kernel = unsafe { KernelBase::new(desc) }?;
    let tiles = (n / TILE) as u32;

    // Everything above is asynchronous; events tell when the device got there.
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    runtime.stream().record(&start)?;
    runtime.stream().launch(&kernel, &[x.read(), y.read_write()], &2.0f32, tiles)?;
    runtime.stream().record(&end)?;
    println!("axpy of {n} elements: {:.3?}", end.elapsed_since(&start)?);
    assert_eq!(runtime.download::<f32>(&y.part(..16)?)?, [3.0; 4]);

    // The same calls, recorded once and replayed. The temporary's memory belongs to the graph.
    let graph = runtime.record_graph(|runtime| {
        let sum = runtime.alloc(4 * n as u64)?;
        runtime.stream().copy(sum.view(), x.view())?;
        runtime.stream().launch(&kernel, &[y.read(), sum.read_write()], &0.5f32, tiles)?;
        runtime.stream().copy(y.view(), sum.view())
    })?;
    runtime.stream().record(&start)?;
    for _ in 0..10 {
        graph.launch()?;
    }
    runtime.stream().record(&end)?;
    println!("{} replays of {} operations: {:.3?}", graph.launches(), graph.nodes(), end.elapsed_since(&start)?);

    // y = 1 + y / 2, ten times, from 3 on.
    let expect = (0..10).fold(3.0f32, |y, _| 1.0 + 0.5 * y);
    let got = runtime.download::<f32>(&y)?;
    assert!(got.iter().all(|&y| y == expect), "{} instead of {expect}", got[0]);
    println!("y = {expect}");
    // Nothing waits for work that is pending when `main` returns; this does.
    runtime.close(Duration::from_secs(10))
}
