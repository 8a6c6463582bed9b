//! Runs a built `leasehold` on the prompts of a golden file and compares its output: token ids
//! exactly, the logits after the prompt within the file's tolerance, both modes, at several thread
//! counts.
//!
//! ```text
//! cargo build --release
//! cargo run --release -p leasehold-cli --example check_golden -- \
//!     target/release/leasehold models/llama/demo-model/golden.json
//! ```
//!
//! Further arguments: `threads=1,2,3,4`, `model=DIR` for another model than the bundled one,
//! `device=cuda:0` for another device than the CPU (then without threads), `sim=SEED` for a
//! simulated driver under it. The program must not know how the command works; it knows its
//! arguments, its output and its exit status.

mod checks;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Command, ExitCode};

/// The maximum size of a golden file in bytes.
const MOST: u64 = 1 << 30;
/// The maximum difference of a logit from its golden value: weights are stored in bf16, and the
/// golden values are computed in float64.
const ABSOLUTE: f64 = 2e-2;
/// The maximum root mean square of the differences, relative to that of the golden logits.
const RELATIVE_RMS: f64 = 1e-3;

struct Job {
    binary: PathBuf,
    golden: Value,
    model: Option<String>,
    /// A device other than the CPU.
    device: Option<String>,
    /// The seed of a simulated driver.
    sim: Option<String>,
    threads: Vec<u16>,
}

/// The largest deviation from the golden logits, over all runs.
#[derive(Default)]
struct Worst {
    absolute: f64,
    relative_rms: f64,
}

fn main() -> ExitCode {
    checks::end(parse().and_then(|job| check(&job)))
}

fn parse() -> Result<Job, String> {
    let mut arguments = std::env::args().skip(1);
    let usage = "usage: check_golden BINARY GOLDEN.json [model=DIR] [threads=1,2,3,4] [device=ID] [sim=SEED]";
    let (Some(binary), Some(golden)) = (arguments.next(), arguments.next()) else {
        return Err(usage.into());
    };
    let bytes = leasehold_input::read(Path::new(&golden), MOST).map_err(|e| e.to_string())?;
    let text = String::from_utf8(bytes).map_err(|e| format!("{golden}: {e}"))?;
    let golden: Value = serde_json::from_str(&text).map_err(|e| format!("{golden}: {e}"))?;
    let mut job = Job {
        binary: binary.into(),
        golden,
        model: None,
        device: None,
        sim: None,
        threads: vec![1, 2, 3, 4],
    };
    for argument in arguments {
        match argument.split_once('=') {
            Some(("model", dir)) => job.model = Some(dir.into()),
            Some(("threads", list)) => {
                job.threads =
                    list.split(',').map(str::parse).collect::<Result<_, _>>().map_err(|_| usage)?;
            }
            Some(("device", id)) => job.device = Some(id.into()),
            Some(("sim", seed)) => job.sim = Some(seed.into()),
            _ => return Err(usage.into()),
        }
    }
    if job.device.is_some() {
        job.threads = vec![1];
    }
    Ok(job)
}

fn check(job: &Job) -> Result<String, String> {
    let cases = job.golden["cases"]
        .as_array()
        .filter(|c| !c.is_empty())
        .ok_or("the golden file has no cases")?;
    let mut worst = Worst::default();
    let mut runs = 0;
    for (i, case) in cases.iter().enumerate() {
        let mut first: Option<Value> = None;
        for &threads in &job.threads {
            for mode in ["both", "eager", "graph"] {
                let what = format!("case {i}, {threads} threads, mode {mode}");
                let report =
                    run(job, case, threads, mode).map_err(|why| format!("{what}: {why}"))?;
                compare(case, &report, mode, &mut worst).map_err(|why| format!("{what}: {why}"))?;
                // The mode and the number of threads must not change a single bit.
                match &first {
                    None => first = Some(report["last_logits"].clone()),
                    Some(first) if *first != report["last_logits"] => {
                        return Err(format!(
                            "{what}: the logits are not those of the first run to the bit"
                        ));
                    }
                    Some(_) => {}
                }
                runs += 1;
            }
        }
    }
    Ok(format!(
        "{runs} runs of {} prompts: ids are golden, logits within {:.1e} absolute and {:.1e} relative RMS",
        cases.len(),
        worst.absolute,
        worst.relative_rms
    ))
}

/// The case's greedy tokens; the field's name contains their number.
fn greedy(case: &Value) -> Result<&Value, String> {
    let fields = case.as_object().ok_or("a case is no object")?;
    fields
        .iter()
        .find(|(name, _)| name.starts_with("greedy_"))
        .map(|(_, ids)| ids)
        .ok_or("no greedy tokens".into())
}

fn run(job: &Job, case: &Value, threads: u16, mode: &str) -> Result<Value, String> {
    let ids = |v: &Value| v.as_array().map(|a| a.iter().map(Value::to_string).collect::<Vec<_>>());
    let prompt = ids(&case["prompt_ids"]).ok_or("the case has no prompt_ids")?.join(",");
    let tokens = greedy(case)?.as_array().map_or(0, Vec::len).to_string();
    let mut command = Command::new(&job.binary);
    command.args([
        "run",
        "--json",
        "--logits",
        "--prompt-ids",
        &prompt,
        "--tokens",
        &tokens,
        "--mode",
        mode,
    ]);
    match &job.device {
        Some(device) => command.args(["--device", device]),
        None => command.args(["--threads", &threads.to_string()]),
    };
    if let Some(seed) = &job.sim {
        command.args(["--sim", "--sim-seed", seed]);
    }
    if let Some(model) = &job.model {
        command.args(["--model", model]);
    }
    let report = checks::json(&mut command)?;
    // A user's model may have no tokenizer.
    if job.model.is_none() && !report["text"].is_string() {
        return Err("no text".into());
    }
    Ok(report)
}

fn compare(case: &Value, report: &Value, mode: &str, worst: &mut Worst) -> Result<(), String> {
    let (golden, got) = (greedy(case)?, &report["output_ids"]);
    if golden != got {
        return Err(format!("output_ids are {got}, golden {golden}"));
    }
    if report["prompt_ids"] != case["prompt_ids"] {
        return Err(format!("prompt_ids are {}", report["prompt_ids"]));
    }
    if mode == "both" && report["modes_agree"] != true {
        return Err(format!("modes_agree is {}", report["modes_agree"]));
    }
    for mode in ["eager", "graph"].into_iter().filter(|m| mode == "both" || mode == *m) {
        let speed = report["modes"][mode]["decode_tokens_per_s"].as_f64();
        if !speed.is_some_and(|s| s > 0.0) {
            return Err(format!("modes.{mode}.decode_tokens_per_s is {speed:?}"));
        }
    }
    if mode == "graph" && report["memory"]["driver_allocations_in_decode"] != 0 {
        let count = &report["memory"]["driver_allocations_in_decode"];
        return Err(format!("{count} driver allocations while decoding"));
    }
    let numbers = |v: &Value| {
        v.as_array().and_then(|a| a.iter().map(Value::as_f64).collect::<Option<Vec<_>>>())
    };
    let golden = numbers(&case["last_logits"]).ok_or("the case has no last_logits")?;
    let got =
        numbers(&report["last_logits"]).ok_or("no last_logits, or not all of them are numbers")?;
    if golden.len() != got.len() {
        return Err(format!("{} logits, golden {}", got.len(), golden.len()));
    }
    let square = |values: &mut dyn Iterator<Item = f64>| values.map(|v| v * v).sum::<f64>();
    let largest = golden.iter().zip(&got).map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
    let rms = (square(&mut golden.iter().zip(&got).map(|(a, b)| a - b))
        / square(&mut golden.iter().copied()))
    .sqrt();
    if largest > ABSOLUTE || rms > RELATIVE_RMS {
        return Err(format!("logits differ by {largest:.2e} absolute and {rms:.2e} relative RMS"));
    }
    worst.absolute = worst.absolute.max(largest);
    worst.relative_rms = worst.relative_rms.max(rms);
    Ok(())
}
