//! Data-parallel steps of a small network, with four ranks that are threads on the CPU.
//!
//! ```text
//! cargo run --example ranks --package leasehold-collective
//! ```
//! Each rank has the network's weights and a quarter of the data. A step computes the gradient of
//! the rank's own data, averages it with the others' by one recorded call, and goes downhill. So
//! all ranks have the same weights, to the bit, and learn from all data.

use leasehold::{DeviceId, Error, Result, Runtime};
use leasehold_collective::{CommConfig, Reduce, World};

const RANKS: u32 = 4;
const STEPS: usize = 400;
/// Hidden units of the network: y = Σ v · tanh(w · x + b).
const UNITS: usize = 8;
const RATE: f32 = 0.2;

/// A rank's quarter of the data: points of a sine.
fn data(rank: u32) -> Vec<(f32, f32)> {
    let at = |i: u32| (i * RANKS + rank) as f32 / 8.0 - 2.0;
    (0..8).map(|i| (at(i), at(i).sin())).collect()
}

/// The loss of the weights over some data, and its gradient.
fn loss(weights: &[f32], data: &[(f32, f32)]) -> (f32, Vec<f32>) {
    let (w, b, v) = (&weights[..UNITS], &weights[UNITS..2 * UNITS], &weights[2 * UNITS..]);
    let (mut sum, mut gradient) = (0.0, vec![0.0; weights.len()]);
    let each = 1.0 / data.len() as f32;
    for &(x, y) in data {
        let hidden: Vec<f32> = (0..UNITS).map(|i| (w[i] * x + b[i]).tanh()).collect();
        let error = (0..UNITS).map(|i| v[i] * hidden[i]).sum::<f32>() - y;
        sum += error * error * each;
        for i in 0..UNITS {
            let inner = 2.0 * error * v[i] * (1.0 - hidden[i] * hidden[i]) * each;
            gradient[i] += inner * x;
            gradient[UNITS + i] += inner;
            gradient[2 * UNITS + i] += 2.0 * error * hidden[i] * each;
        }
    }
    (sum, gradient)
}

/// All steps of one rank. Returns its weights, and the losses of all data at the first step and at
/// the last one.
fn train(world: &World) -> Result<(Vec<f32>, [f32; 2])> {
    let runtime = Runtime::open(DeviceId::cpu(0))?.create_stream()?.runtime();
    let comm = world.comm(&runtime, &CommConfig::new("data"))?;
    let own = data(world.rank());
    // Rank 0 chooses the first weights.
    let first: Vec<f32> =
        (0..3 * UNITS as u32).map(|i| ((i * 37 + world.rank()) % 23) as f32 / 23.0 - 0.5).collect();
    let weights = runtime.upload(&first)?;
    comm.broadcast(runtime.stream(), &weights, 0)?;
    let mut weights = runtime.to_vec(&weights)?;
    // The gradient, and the loss behind it.
    let sent = runtime.zeros::<f32>(weights.len() + 1)?;
    let graph = runtime
        .record_graph(|recording| comm.all_reduce(recording.stream(), &sent, Reduce::Average))?;
    let mut losses = [0.0; 2];
    for step in 0..STEPS {
        let (own_loss, mut gradient) = loss(&weights, &own);
        gradient.push(own_loss);
        runtime.stream().upload(sent.as_view().view(), &gradient)?;
        let _ = graph.launch_on(runtime.stream())?;
        let mean = runtime.to_vec(&sent)?;
        for (weight, slope) in weights.iter_mut().zip(&mean) {
            *weight -= RATE * slope;
        }
        losses[usize::from(step > 0)] = mean[weights.len()];
    }
    Ok((weights, losses))
}

fn main() -> Result<()> {
    let ranks: Vec<_> = World::threads(RANKS)?
        .into_iter()
        .map(|world| std::thread::spawn(move || train(&world)))
        .collect();
    let mut all = Vec::new();
    for rank in ranks {
        all.push(rank.join().map_err(|_| Error::other("a rank panicked"))??);
    }
    let (weights, [first, last]) = &all[0];
    let same = |other: &[f32]| other.iter().zip(weights).all(|(a, b)| a.to_bits() == b.to_bits());
    if !all.iter().all(|(other, _)| same(other)) {
        return Err(Error::other("the ranks have other weights"));
    }
    println!("{RANKS} ranks, {STEPS} steps: the loss went from {first:.4} to {last:.4}");
    if last * 10.0 > *first {
        return Err(Error::other("the network has learned nothing"));
    }
    Ok(())
}
