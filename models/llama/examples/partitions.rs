//! The time of a token while prompts of another sequence are computed beside it: on streams of the
//! whole device, and on partitions of its multiprocessors.
//!
//! ```sh
//! cargo run --release -p leasehold-llama --example partitions
//! cargo run --release -p leasehold-llama --features leasehold/cuda,leasehold-operators/cuda \
//!     --example partitions -- cuda:0 CONFIG.json SMS STEPS PROMPT
//! ```
//!
//! Without arguments it decodes a small model on the CPU, which has no partitions and says so. With
//! a config the weights are random. SMS are the multiprocessors for the tokens; the prompts get the
//! rest.

mod shape;

use leasehold::PartitionSize::{Rest, Sms};
use leasehold::backend::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use leasehold::{Divide, Error, Lease, Partition, Runtime, StreamDesc};
use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
use shape::Shape;
use std::time::Instant;

type Result<T, E = Box<dyn std::error::Error>> = std::result::Result<T, E>;

/// The tokens of the prompt whose sequence is decoded.
const BEGIN: usize = 16;

struct Case {
    runtime: Runtime,
    config: Config,
    weights: Weights,
    dtype: DType,
    steps: usize,
    prompt: usize,
}

struct Run {
    tokens: Vec<u32>,
    /// The times of tokens in milliseconds, in rising order.
    times: Vec<f64>,
    /// The prompts that were computed meanwhile.
    prompts: usize,
    /// The time of a prompt in milliseconds.
    each: f64,
}

impl Case {
    /// A decoder whose work goes to a stream of its own.
    fn decoder(&self, on: &StreamDesc, positions: usize) -> Result<(Model, Decoder)> {
        let runtime = self.runtime.create_stream_with(on)?.runtime();
        let model = Model::load(&runtime, &self.config, &self.weights, self.dtype, &mut |_, _| {})?;
        let decoder = Decoder::new(&model, positions, 1, Sampling::default())?;
        Ok((model, decoder))
    }

    fn prompt(&self, tokens: usize) -> Vec<u32> {
        (0..tokens).map(|i| (i * 7) as u32 % self.config.vocab_size as u32).collect()
    }

    /// Decodes on one stream, and computes prompts on another one meanwhile if there is one.
    fn run(&self, on: &StreamDesc, beside: Option<&StreamDesc>) -> Result<Run> {
        let (_model, mut decoder) = self.decoder(on, BEGIN + self.steps + 1)?;
        let other = beside.map(|on| self.decoder(on, self.prompt)).transpose()?;
        let long = self.prompt(self.prompt);
        let mut point = decoder.prefill(&self.prompt(BEGIN))?;
        let mut tokens = vec![decoder.token(0, point)?];
        let graph = decoder.record()?;
        let (over, prompts) = (AtomicBool::new(false), AtomicUsize::new(0));
        let mut times = Vec::with_capacity(self.steps);
        let each = std::thread::scope(|scope| -> Result<f64> {
            let prefill = other.map(|(_model, mut decoder)| {
                let (over, prompts) = (&over, &prompts);
                scope.spawn(move || -> leasehold::Result<f64> {
                    let begun = Instant::now();
                    while !over.load(Ordering::Relaxed) {
                        let point = decoder.prefill(&long)?;
                        decoder.token(0, point)?;
                        prompts.fetch_add(1, Ordering::Relaxed);
                    }
                    let done = prompts.load(Ordering::Relaxed).max(1);
                    Ok(begun.elapsed().as_secs_f64() * 1e3 / done as f64)
                })
            });
            // The first prompt warms the kernels of prompts up.
            while prefill.as_ref().is_some_and(|thread| !thread.is_finished())
                && prompts.load(Ordering::Relaxed) == 0
            {
                std::thread::yield_now();
            }
            let decoded = (|| -> Result<()> {
                for step in 1..=self.steps {
                    let begun = Instant::now();
                    point = decoder.launch(&graph)?;
                    tokens.push(decoder.token(step, point)?);
                    times.push(begun.elapsed().as_secs_f64() * 1e3);
                }
                Ok(())
            })();
            over.store(true, Ordering::Relaxed);
            let each = prefill.map(|thread| {
                thread
                    .join()
                    .unwrap_or_else(|_| Err(Error::other("the thread of prompts panicked")))
            });
            decoded?;
            Ok(each.transpose()?.unwrap_or(0.0))
        })?;
        times.sort_by(f64::total_cmp);
        Ok(Run { tokens, times, prompts: prompts.load(Ordering::Relaxed), each })
    }
}

fn main() -> Result<()> {
    let shape = Shape::of_arguments()?;
    let (sms, steps) = (shape.number(2, 24)? as u32, shape.number(3, 100)?);
    let prompt = shape.number(4, 200)?;
    let Shape { device, config, weights, dtype, .. } = shape;
    let runtime = Runtime::open(device)?;
    let case = Case { runtime, config, weights, dtype, steps, prompt };
    let units = case.runtime.info().units;
    println!("{device} of {units} units: {steps} tokens beside prompts of {prompt}");
    let mut first: Option<Run> = None;
    let mut say = |name: &str, run: Run| -> Result<()> {
        let [half, most] = [50, 99].map(|share| run.times[(run.times.len() - 1) * share / 100]);
        let alone = first.as_ref().map_or(&run, |first| first);
        let than = most / alone.times[(alone.times.len() - 1) * 99 / 100];
        let last = run.times.last().copied().unwrap_or_default();
        println!(
            "{name:36} token {half:.3} ms, p99 {most:.3} ({than:.2} x alone), longest {last:.3}; {} prompts of {:.1} ms",
            run.prompts, run.each
        );
        if run.tokens != alone.tokens {
            return Err("the tokens differ from those without prompts beside".into());
        }
        first.get_or_insert(run);
        Ok(())
    };
    let (plain, urgent) = (StreamDesc::default(), StreamDesc::priority(i32::MAX));
    say("alone, whole device", case.run(&plain, None)?)?;
    say("beside prompts, whole device", case.run(&plain, Some(&plain))?)?;
    say("beside prompts, urgent stream", case.run(&urgent, Some(&plain))?)?;
    let made: Vec<Lease<Partition>> = match case.runtime.partition(&[Sms(sms), Rest]) {
        Err(Error::Unsupported(why)) => {
            println!("{why}");
            return Ok(());
        }
        made => made?,
    };
    let [few, rest] = [StreamDesc::on(&made[0]), StreamDesc::on(&made[1])];
    let sizes = format!("{} + {} units", made[0].units(), made[1].units());
    say(&format!("alone, {sizes}"), case.run(&few, None)?)?;
    say(&format!("beside prompts, {sizes}"), case.run(&few, Some(&rest))?)?;
    Ok(())
}
