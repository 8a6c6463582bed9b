//! The timeline of a token: the kernels on the device and their submissions by the host, as JSON
//! trace events for ui.perfetto.dev.

use crate::failure::Failure;
use crate::output::Outputs;
use leasehold_llama::{Config, Decoder, Model, OperatorTime, Sampling};
use serde_json::{Value, json};
use std::ops::Range;
use std::time::Duration;

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
    let times = decoder.timed_step()?;
    let device = model.runtime().device().to_string();
    let trace = trace(&device, &model.runtime().info().name, prompt.len() + WARM_UP, &times);
    outputs.write(TIMELINE, |file| {
        serde_json::to_writer(file, &trace)
            .map_err(|e| leasehold::Error::Unavailable(e.to_string().into()))
    })
}

/// Process ids of the trace, which order its tracks.
const DEVICE: u32 = 1;
const HOST: u32 = 2;

/// The trace of a token at a position.
fn trace(device: &str, product: &str, position: usize, times: &[OperatorTime]) -> Value {
    let us = |t: Duration| t.as_nanos() as f64 / 1e3;
    let span = |pid: u32, name: &str, category: &str, time: &Range<Duration>, args: Value| {
        json!({"ph": "X", "pid": pid, "tid": 1, "name": name, "cat": category, "ts": us(time.start),
            "dur": us(time.end.saturating_sub(time.start)), "args": args})
    };
    let label = |pid: u32, what: &str, name: String| json!({"ph": "M", "pid": pid, "tid": 1, "name": what, "args": {"name": name}});
    let mut events = vec![
        label(DEVICE, "process_name", format!("{device} ({product})")),
        label(DEVICE, "thread_name", "kernels".to_owned()),
        label(HOST, "process_name", "host".to_owned()),
        label(HOST, "thread_name", "submissions".to_owned()),
    ];
    let (mut busy, mut last) = (Duration::ZERO, Duration::ZERO);
    for (i, t) in times.iter().enumerate() {
        let gap = t.ran.start.saturating_sub(last);
        busy += t.ran.end.saturating_sub(t.ran.start);
        last = last.max(t.ran.end);
        let args = json!({"launch": i, "tiles": t.tiles, "gap_before_us": us(gap)});
        events.push(span(DEVICE, t.name, "kernel", &t.ran, args));
        events.push(span(HOST, t.name, "submission", &t.submitted, json!({"launch": i})));
    }
    json!({
        "displayTimeUnit": "ns",
        "otherData": {
            "position": position,
            "launches": times.len(),
            "token_us": us(last),
            "busy_us": us(busy),
            "gaps_us": us(last.saturating_sub(busy)),
            "clocks": "device and host begin at 0 each, with the first launch; they are not compared",
        },
        "traceEvents": events,
    })
}
