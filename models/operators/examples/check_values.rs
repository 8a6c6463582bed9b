//! A check of a recorded step: the launch with a NaN is named, the next stream works, and what the
//! check costs.
//!
//! `cargo run --release -p leasehold-operators --features cuda --example check_values -- cuda:0`
//!
//! The second argument is the number of values of a step.

use leasehold::{Array, DeviceId, Error, Graph, Result, Runtime, View};
use leasehold_operators::{Checks, DType, Library, Tensor, ops};
use std::time::Instant;

/// A step that doubles values, with or without a check of its results.
fn step(runtime: &Runtime, x: &Array<f32>, checks: bool) -> Result<Graph> {
    let row = |array: &Array<f32>| Tensor::new(array, DType::F32, 1, array.len() as u32);
    let y = runtime.zeros::<f32>(x.len())?;
    let double = ops::add(&*Library::of(runtime)?, &row(x)?, &row(x)?, &row(&y)?)?;
    runtime.record_graph(|r| {
        r.add_graph_operator(&double)?;
        if checks { r.stream().check_finite(y.view(), DType::F32, "doubled") } else { Ok(()) }
    })
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let device: DeviceId = arguments.next().unwrap_or_else(|| "cpu:0".into()).parse()?;
    let count = arguments.next().and_then(|n| n.parse().ok()).unwrap_or(128_000);
    let runtime = Runtime::open(device)?;
    let x = runtime.upload(&vec![0.25f32; count])?;
    let (plain, checked) = (step(&runtime, &x, false)?, step(&runtime, &x, true)?);
    runtime.synchronize()?;

    for (what, graph) in [("without a check", &plain), ("with a check", &checked)] {
        let stream = runtime.create_stream()?;
        let mut micros: Vec<f64> = Vec::new();
        for _ in 0..210 {
            let start = Instant::now();
            graph.launch_on(&stream)?;
            stream.synchronize()?;
            micros.push(start.elapsed().as_secs_f64() * 1e6);
        }
        let micros = &mut micros[10..];
        micros.sort_by(f64::total_cmp);
        println!("{device}: {count} values, a step {what}: {:.1} µs", micros[micros.len() / 2]);
    }

    // A NaN before the third launch.
    let stream = runtime.create_stream()?;
    let mut launches = 0;
    let failed = loop {
        launches += 1;
        if launches == 3 {
            stream.fill(x.slice(count / 2..=count / 2).view(), f32::NAN)?;
        }
        let launched = checked.launch_on(&stream).and_then(|_| stream.synchronize());
        if let Err(error) = launched {
            break error;
        }
    };
    println!("launch {launches}: {failed}");
    assert!(matches!(&failed, Error::Check(found) if found.index == count as u64 / 2));
    assert_eq!(launches, 3, "the launch that has the NaN");

    let next = runtime.create_stream()?;
    next.fill(x.view(), 1.0f32)?;
    checked.launch_on(&next)?;
    next.synchronize()?;
    println!("the next stream works");
    Ok(())
}
