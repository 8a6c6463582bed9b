//! The timeline of a token: a trace of the runtime while it computes one, launch by launch.

use crate::failure::Failure;
use crate::output::Outputs;
use leasehold::Trace;
use leasehold_llama::{Config, Decoder, Model, Sampling};

/// Tokens that are computed before the one that is measured: kernels are compiled, caches are warm.
const WARM_UP: usize = 3;

/// The option that names the file.
pub(crate) const TIMELINE: &str = "--trace";

/// Refuses a model whose context is too short for a timeline.
pub(crate) fn check(config: &Config) -> Result<(), Failure> {
    let (context, least) = (config.context(), WARM_UP + 2);
    if context < least {
        return Err(Failure::misuse(format!(
            "{TIMELINE} needs {least} positions, and the model's context is {context}"
        )));
    }
    Ok(())
}

/// Computes a prompt and some tokens, and writes the timeline of the last one.
pub(crate) fn write(outputs: &Outputs, model: &Model, prompt: &[u32]) -> Result<(), Failure> {
    // A prompt that fills the model's context leaves no room for tokens.
    let room = model.config().context().saturating_sub(WARM_UP + 1).max(1);
    let prompt = &prompt[..prompt.len().min(room)];
    let sampling = Sampling::default();
    let mut decoder = Decoder::new(model, prompt.len() + WARM_UP + 1, WARM_UP + 2, sampling)?;
    decoder.prefill(prompt)?;
    for _ in 0..WARM_UP {
        decoder.step()?;
    }
    let runtime = model.runtime();
    runtime.synchronize()?;
    let trace = Trace::start(runtime)?;
    decoder.step()?;
    runtime.synchronize()?;
    let events = trace.stop();
    outputs.write(TIMELINE, |file| events.write(file))
}
