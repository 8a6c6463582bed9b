//! The runtime in one page: open, copy, a kernel of one's own, time, record, replay.
//!
//! `cargo run --release -p leasehold --example quickstart`

use leasehold::prelude::*;

const TILE: usize = 4096;

/// `y += a * x`, one tile of it. Tiles run on all processors at once.
unsafe fn axpy(args: &CpuArgs<'_>) {
    let from = args.tile()[0] as usize * TILE;
    // SAFETY: binding 0 is only read; each tile writes elements of its own of binding 1.
    let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, from, TILE)) };
    std::iter::zip(y, &x[from..]).for_each(|(y, x)| *y += args.params::<f32>() * x);
}

fn main() -> Result<()> {
    let runtime = Runtime::open(DeviceId::cpu(0))?;
    let (stream, tiles) = (runtime.stream(), 256);
    let x = runtime.upload(&vec![1.0f32; TILE * 256])?;
    let y = runtime.alloc_array::<f32>(x.len())?;
    stream.copy(y.view(), x.view())?;

    let (source, bindings) = (KernelSource::Cpu(axpy), [Access::Read, Access::ReadWrite]);
    let desc = KernelDesc::new("axpy", source, &bindings, KernelCheck::grid_1d());
    // SAFETY: slices check the bounds of the bindings, and each tile writes its own part.
    let axpy = unsafe { KernelBase::new(desc.params_of::<f32>().aligned(4)) }?;
    let (start, end) = (runtime.create_event()?, runtime.create_event()?);
    stream.record(&start)?;
    stream.launch(&axpy, &[x.read(), y.read_write()], &2.0f32, tiles)?;
    stream.record(&end)?;
    println!("axpy of {} elements: {:?}", x.len(), end.elapsed_since(&start)?);

    let graph = runtime.record_graph(|recording| {
        let sum = recording.alloc_array::<f32>(x.len())?; // its memory belongs to the graph
        recording.stream().copy(sum.view(), x.view())?;
        recording.stream().launch(&axpy, &[y.read(), sum.read_write()], &0.5f32, tiles)?;
        recording.stream().copy(y.view(), sum.view())
    })?;
    (0..10).try_for_each(|_| graph.launch().map(drop))?;
    let expect = (0..10).fold(3.0f32, |y, _| 1.0 + 0.5 * y); // y = 1 + y / 2, ten times, from 3 on
    assert!(runtime.to_vec(&y)?.iter().all(|&y| y == expect));
    println!("{} replays of {} operations: y = {expect}", graph.launches(), graph.nodes());
    runtime.close(std::time::Duration::from_secs(10)) // what is pending when `main` returns is lost
}
