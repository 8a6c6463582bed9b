//! The simulated driver gives the answers of the real one.
//!
//! `answers` holds the answers of the vendor's driver, recorded by `examples/driver_trace.rs`:
//! `h200.jsonl` on an H200, and `h100.jsonl`, which has those about conditions, on an H100. Every
//! line of every scenario must be equal to the recorded one.
//! [`STRICTER`] lists the lines where the simulated driver is stricter on purpose, with the
//! reasons.

use leasehold_cuda::driver::ops::{CudaSlowOps, DeviceOps};
use leasehold_sim::MachineConfig;
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::traces::{self, Scenario, kernels};
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::PathBuf;
use std::sync::Arc;

/// Lines in which the simulated driver differs on purpose: scenario, recorded line, simulated line,
/// reason.
const STRICTER: &[(&str, &str, &str, &str)] = &[
    (
        "pinned_memory",
        "aligned to a page: false",
        "aligned to a page: true",
        "its pinned memory lies on pages of its own, so that a device's access beside it faults",
    ),
    (
        "argument_buffers",
        "without the parameter = ok",
        "without the parameter = CUDA_ERROR_INVALID_VALUE",
        "the real kernel reads what happens to be there",
    ),
    (
        "argument_buffers",
        "with half of the parameter = ok",
        "with half of the parameter = CUDA_ERROR_INVALID_VALUE",
        "as above",
    ),
    (
        "argument_buffers",
        "data: [11, 11, 11, 11]",
        "data: [0, 0, 0, 0]",
        "what is refused does not run",
    ),
    (
        "addresses",
        "granularity of device 999 = ok",
        "granularity of device 999 = CUDA_ERROR_INVALID_DEVICE",
        "the real driver does not look at the device",
    ),
    (
        "mapping_misuse",
        "map beyond the end = ok",
        "map beyond the end = CUDA_ERROR_INVALID_VALUE",
        "the real driver's reservations are larger than what was asked for, and nobody knows by how much",
    ),
    (
        "mapping_misuse",
        "unmap more than it = ok",
        "unmap more than it = CUDA_ERROR_INVALID_VALUE",
        "nobody unmaps what is not mapped but by mistake",
    ),
    ("mapping_misuse", "unmap again = ok", "unmap again = CUDA_ERROR_INVALID_VALUE", "as above"),
    (
        "mapping_misuse",
        "ended early: CUDA_ERROR_INVALID_VALUE",
        "(nothing)",
        "on the real driver something is still mapped beyond the end",
    ),
    (
        "condition_updates",
        "a kernel of the body = in place",
        "a kernel of the body = refused",
        "no plan changes the nodes of a body in place",
    ),
    ("condition_updates", "then [0, 2, 10]", "then [0, 3, 10]", "as above"),
];

fn recordings() -> [PathBuf; 2] {
    let at = PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("tests/traces/answers");
    [at.join("h200.jsonl"), at.join("h100.jsonl")]
}

fn simulate(scenario: &Scenario, seed: u64) -> Vec<String> {
    let machine = MachineConfig::seed(seed).devices(2, 256 << 20);
    kernels::register(&machine.kernels);
    let driver = SimDriver::new(SimDriverConfig::new(machine)).unwrap();
    driver.init().unwrap();
    let ops: Arc<dyn CudaSlowOps> = Arc::new(driver);
    // SAFETY: the simulated driver defines the result of every call.
    unsafe { traces::lines(&ops, scenario) }
}

/// The content of scenarios is deterministic, so it does not depend on the seed.
#[test]
fn simulated_traces_do_not_depend_on_the_seed() {
    for scenario in traces::scenarios() {
        let first = simulate(scenario, 0);
        assert!(!first.is_empty(), "{} says nothing", scenario.name);
        for seed in 1..4 {
            assert_eq!(first, simulate(scenario, seed), "{} with seed {seed}", scenario.name);
        }
    }
}

/// No preparation of a scenario fails on the simulated driver.
#[test]
fn no_scenario_ends_early() {
    for scenario in traces::scenarios() {
        let lines = simulate(scenario, 0);
        let early: Vec<_> = lines.iter().filter(|line| line.starts_with("ended early")).collect();
        assert!(early.is_empty(), "{}: {early:?} after {lines:#?}", scenario.name);
    }
}

#[test]
fn names_are_unique() {
    let mut names: Vec<_> = traces::scenarios().map(|scenario| scenario.name).collect();
    let count = names.len();
    names.sort_unstable();
    names.dedup();
    assert_eq!(names.len(), count);
}

/// Whether a line reports a failed call.
fn is_error(line: &str) -> bool {
    line.split_once(" = ").is_some_and(|(_, result)| {
        ["CUDA_ERROR", "lost:", "compile:", "Invalid", "NotFound", "Unsupported"]
            .iter()
            .any(|e| result.starts_with(e))
    })
}

/// The difference between a recording and the simulated driver, as a text for the user. Empty if
/// they agree.
fn difference(scenario: &Scenario, recorded: &[String]) -> String {
    let simulated = simulate(scenario, 0);
    let mut out = String::new();
    let dead = |line: &String| line.starts_with("died") || line == "hung";
    let died = recorded.last().is_some_and(dead);
    for at in 0..recorded.len().max(simulated.len()) {
        let (real, sim) = (recorded.get(at), simulated.get(at));
        if real == sim {
            continue;
        }
        // Where the vendor promises nothing, the simulated driver must return an error, for every
        // answer of the real driver. The test does not compare lines after the end of the real
        // driver's process. If that process ended after the last call, the simulated driver need
        // not imitate the end.
        let after_death = died && at >= recorded.len();
        let at_the_end = sim.is_none() && real.is_some_and(dead);
        if scenario.undefined
            && (after_death || at_the_end || sim.is_some_and(|line| is_error(line)))
        {
            continue;
        }
        let (real, sim) =
            (real.map_or("(nothing)", String::as_str), sim.map_or("(nothing)", String::as_str));
        if STRICTER.iter().any(|s| s.0 == scenario.name && s.1 == real && s.2 == sim) {
            continue;
        }
        let _ = writeln!(out, "{}:{at}\n    real      {real}\n    simulated {sim}", scenario.name);
    }
    out
}

/// The comparison finds differences, and accepts the permitted ones.
#[test]
fn differences_are_found() {
    let find = |name: &str| traces::scenarios().find(|scenario| scenario.name == name).unwrap();
    let scenario = find("device_memory");
    let mut recorded = simulate(scenario, 0);
    assert_eq!(difference(scenario, &recorded), "");
    recorded[0].push('!');
    assert!(difference(scenario, &recorded).contains("device_memory:0"));
    recorded.clear();
    assert!(difference(scenario, &recorded).contains("(nothing)"));
    // The real driver ends its process where nothing is promised.
    let scenario = find("stream_after_its_end");
    let simulated = simulate(scenario, 0);
    let crash = [simulated[0].clone(), "died: signal: 11 (SIGSEGV)".to_owned()];
    assert_eq!(difference(scenario, &crash), "");
    let crash = ["died: signal: 11 (SIGSEGV)".to_owned()];
    assert!(
        difference(scenario, &crash).contains("stream_after_its_end:0"),
        "a good call must not kill"
    );
    // The process ends later, or not at all: this differs from run to run.
    let mut later = simulated;
    later.push("died: signal: 6 (SIGABRT)".to_owned());
    assert_eq!(difference(scenario, &later), "");
    let scenario = find("device_memory");
    let mut later = simulate(scenario, 0);
    later.push("died: signal: 6 (SIGABRT)".to_owned());
    assert!(
        difference(scenario, &later).contains("died"),
        "where everything is defined nothing may kill"
    );
}

#[test]
fn the_simulated_driver_answers_as_the_real_one_did() {
    let mut recorded: BTreeMap<String, Vec<String>> = BTreeMap::new();
    let text = recordings().map(|at| std::fs::read_to_string(at).unwrap()).concat();
    for line in text.lines() {
        let line: serde_json::Value = serde_json::from_str(line).unwrap();
        if let Some(name) = line["scenario"].as_str() {
            let lines =
                line["lines"].as_array().unwrap().iter().map(|l| l.as_str().unwrap().to_owned());
            recorded.insert(name.to_owned(), lines.collect());
        }
    }
    let mut wrong = String::new();
    for (scenario, real, ..) in STRICTER {
        if !recorded
            .get(*scenario)
            .is_some_and(|lines| lines.iter().any(|line| line == real) || *real == "(nothing)")
        {
            let _ = writeln!(wrong, "{scenario}: `{real}` is not recorded; strike it off the list");
        }
    }
    for scenario in traces::scenarios() {
        match recorded.remove(scenario.name) {
            Some(lines) => wrong.push_str(&difference(scenario, &lines)),
            // The recording comes from a machine with one device.
            None if scenario.devices > 1 => {}
            None => {
                let _ = writeln!(wrong, "{}: not in the recording; record it again", scenario.name);
            }
        }
    }
    for name in recorded.keys() {
        let _ = writeln!(wrong, "{name}: recorded, but there is no such scenario");
    }
    assert!(wrong.is_empty(), "\n{wrong}");
}
