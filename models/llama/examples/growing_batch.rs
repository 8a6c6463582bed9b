//! A batch whose caches grow beside one whose caches have the memory of the longest texts: equal
//! texts, then memory and the time of a step.
//!
//! ```sh
//! cargo run --release -p leasehold-llama --example growing_batch
//! cargo run --release -p leasehold-llama --features leasehold/cuda,leasehold-operators/cuda \
//!     --example growing_batch -- cuda:0 CONFIG.json ROWS TOKENS POSITIONS STEPS [COMMON]
//! ```
//!
//! Without arguments it decodes a small model on the CPU. With a config the weights are random.
//! COMMON tokens are those that all prompts begin with, a power of two: they are a piece of each
//! prompt, and growing caches have them once.

mod shape;

use leasehold::Runtime;
use leasehold_llama::{Batch, CacheBytes, Mode, Model, Sampling};
use shape::Shape;
use std::time::Instant;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// A model of large heads, so that the CPU maps a granule for 128 positions.
/// Sequences of a batch, and the tokens of each prompt.
struct Plan {
    rows: usize,
    tokens: usize,
    /// Of these, the first ones that all prompts have.
    common: usize,
    steps: usize,
}

struct Run {
    /// The text of each sequence.
    texts: Vec<Vec<u32>>,
    /// The times of steps in milliseconds, in rising order.
    times: Vec<f64>,
    /// The driver's calls for memory in the second half of the steps.
    calls: u64,
    /// At the end.
    bytes: CacheBytes,
}

/// Whether two runs have equal texts, as far as both go. (How many steps a prompt takes is a matter
/// of time.)
fn alike(a: &Run, b: &Run) -> bool {
    a.texts.iter().zip(&b.texts).all(|(a, b)| a.iter().zip(b).all(|(a, b)| a == b))
}

fn decode(batch: &mut Batch, plan: &Plan, words: u32) -> Result<Run> {
    let prompt = |row: usize| -> Vec<u32> {
        let own = |i: usize| if i < plan.common { 0 } else { row * 13 };
        (0..plan.tokens).map(|i| (i * 7 + own(i)) as u32 % words).collect()
    };
    let mut texts = vec![Vec::new(); plan.rows];
    let mut ids = Vec::new();
    for row in 0..plan.rows {
        ids.push(batch.add(&prompt(row), Sampling::default())?);
        // The others find its beginning computed.
        while plan.common > 0 && row == 0 && texts[0].is_empty() {
            for (_, drawn) in batch.step()? {
                texts[0].push(drawn?.token);
            }
        }
    }
    let mut times = Vec::new();
    let memory = |batch: &Batch| batch.model().runtime().allocator().stats().driver_calls;
    let mut calls = 0;
    while times.len() < plan.steps {
        let full = batch.waiting() == 0 && texts.iter().all(|text: &Vec<u32>| text.len() > 1);
        if times.len() == plan.steps / 2 {
            calls = memory(batch);
        }
        let begun = Instant::now();
        let drawn = batch.step()?;
        if full {
            times.push(begun.elapsed().as_secs_f64() * 1e3);
        }
        for (id, drawn) in drawn {
            if let Some(row) = ids.iter().position(|of| *of == id) {
                texts[row].push(drawn?.token);
            }
        }
    }
    let (calls, bytes) = (memory(batch) - calls, batch.cache_bytes());
    for id in ids {
        batch.remove(id)?;
    }
    times.sort_by(f64::total_cmp);
    Ok(Run { texts, times, calls, bytes })
}

fn main() -> Result<()> {
    let shape = Shape::of_arguments()?;
    let number = |i: usize, or: usize| shape.number(i, or);
    let (rows, tokens, common) = (number(2, 3)?, number(3, 120)?, number(6, 0)?);
    let plan = Plan { rows, tokens, common, steps: number(5, 16)? };
    // (Sequences are decoded while the prompts of later ones are computed.)
    let positions = number(4, 1000)?;
    let Shape { device, config, weights, dtype, .. } = shape;
    let runtime = Runtime::open(device)?;
    let model = Model::load(&runtime, &config, &weights, dtype, &mut |_, _| {})?;
    let words = config.vocab_size as u32;
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    println!(
        "{device}: {} sequences, {} + {} of {positions} tokens",
        plan.rows, plan.tokens, plan.steps
    );
    let mut rounds = Vec::new();
    for round in 0..4 {
        let grows = round % 2 == 1;
        let mut batch = match grows {
            true => Batch::new(&model, plan.rows, positions, Mode::Graph)?,
            false => Batch::preallocated(&model, plan.rows, positions, Mode::Graph)?,
        };
        if common > 0 {
            batch.set_piece(common)?;
        }
        let name = if grows { "growing" } else { "fixed" };
        // The second texts find the memory of the first ones.
        for text in ["new", "ready"] {
            let run = decode(&mut batch, &plan, words)?;
            let [half, most] = [50, 99].map(|share| run.times[run.times.len() * share / 100]);
            println!(
                "{name:8} {text:6} step {half:.3} ms, p99 {most:.3}; {} calls of the driver; caches {:.0} of {:.0} MiB, {:.0} of them in common, for {} tokens each",
                run.calls,
                mib(run.bytes.committed - run.bytes.shared + run.bytes.shared / plan.rows as u64),
                mib(run.bytes.most),
                mib(run.bytes.shared / plan.rows as u64),
                plan.tokens + run.texts.iter().map(Vec::len).sum::<usize>() / plan.rows
            );
            rounds.push((run, half));
        }
    }
    if rounds.iter().any(|(run, _)| !alike(run, &rounds[0].0)) {
        return Err("growing and fixed caches gave different texts".into());
    }
    // Two runs of fixed caches, then two of growing ones, and so on.
    let sum = |grows: usize| -> f64 {
        let of = rounds.chunks(2).skip(grows).step_by(2).flatten();
        of.map(|(_, half)| half).sum()
    };
    let ratio = sum(1) / sum(0);
    println!("equal texts; a step of growing caches takes {ratio:.4} times one of fixed caches");
    Ok(())
}
