//! Steps of a batch on a simulated device whose kernels compute nothing, for `ci/instructions.sh`
//! to count the instructions of a step.
//!
//! `PROGRAM batch_step_SEQUENCES TIMES`: so many steps of so many sequences. Only their
//! instructions are counted, by valgrind's tool callgrind with `--instr-atstart=no`.

use leasehold::{Context, Error, Result};
use leasehold_llama::{Batch, Config, DType, Mode, Model, Sampling, Weights};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

/// Steps until all sequences have begun, and then: at most so many.
const POSITIONS: usize = 400;

fn model(context: &Context) -> Result<Model> {
    let config = serde_json::json!({"model_type": "llama", "hidden_act": "silu", "vocab_size": 40,
        "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": POSITIONS, "tie_word_embeddings": false});
    let config = Config::from_slice(config.to_string().as_bytes(), "a small model")?;
    let weights = Weights::random(&config, DType::F32, 3)?;
    let runtime = context.runtime("sim:0".parse()?)?;
    Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {})
}

/// Has callgrind begin or end to count. A program without valgrind does nothing here.
fn count(begins: bool) {
    let request: [usize; 6] = [if begins { 0x4354_0004 } else { 0x4354_0005 }, 0, 0, 0, 0, 0];
    // SAFETY: the instructions by which a program speaks with valgrind. They turn a register by its
    // own width and exchange one with itself, and valgrind reads the request.
    #[cfg(target_arch = "x86_64")]
    unsafe {
        std::arch::asm!(
            "rol rdi, 3", "rol rdi, 13", "rol rdi, 61", "rol rdi, 51", "xchg rbx, rbx",
            in("rax") request.as_ptr(), inout("rdx") 0usize => _,
        );
    }
    std::hint::black_box(request);
}

/// Makes so many steps of sequences that have all begun.
fn decode(sequences: usize, steps: usize) -> Result<()> {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate_without_results(&kernels)?;
    let machine = MachineConfig::seed(1).devices(1, 1 << 30).kernels(kernels);
    let context = Context::with_backends(vec![Arc::new(SimBackend::new(machine)?)]);
    let model = model(&context)?;
    let mut batch = Batch::preallocated(&model, sequences, POSITIONS, Mode::Graph)?;
    for _ in 0..sequences {
        batch.add(&[1], Sampling::default())?;
    }
    while batch.step()?.len() < sequences {}
    count(true);
    let full = (0..steps).all(|_| batch.step().is_ok_and(|drawn| drawn.len() == sequences));
    count(false);
    if full { Ok(()) } else { Err(Error::state("a step without some of its tokens")) }
}

fn main() -> Result<()> {
    let mut arguments = std::env::args().skip(1);
    let name = arguments.next().unwrap_or_default();
    let sequences = name.strip_prefix("batch_step_").and_then(|n| n.parse().ok());
    match (sequences, arguments.next().and_then(|n| n.parse().ok())) {
        (Some(sequences @ 1..), Some(steps)) => decode(sequences, steps),
        _ => Err(Error::invalid("usage: PROGRAM batch_step_SEQUENCES TIMES")),
    }
}
