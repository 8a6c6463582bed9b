//! `bench collective` where there is no GPU: every figure is there and has no bound.

use super::*;

/// Checks a report without a raw side, and returns the figures' names.
#[track_caller]
fn figures(report: &serde_json::Value, ranks: u64, library: &str) -> Vec<String> {
    assert_eq!(report["ranks"], ranks);
    assert!(report["library"].as_str().unwrap().contains(library), "{report}");
    assert!(report["beside"].is_null(), "{report}");
    let figures = report["figures"].as_array().unwrap();
    figures
        .iter()
        .map(|figure| {
            assert!(figure["value"].as_f64().unwrap() > 0.0, "{figure}");
            for none in ["raw", "ratio", "at_most", "at_least", "within"] {
                assert!(figure[none].is_null(), "{none}: {figure}");
            }
            figure["name"].as_str().unwrap().to_owned()
        })
        .collect()
}

const FIRST: [&str; 4] = [
    "all_reduce 8 KiB, eager",
    "all_reduce 8 KiB, eager, host",
    "all_reduce 8 KiB, in a graph of 64",
    "all_reduce 64 KiB, in a graph of 64",
];
const LAST: [&str; 3] = ["communicator made", "communicator given back", "communicator dropped"];

#[test]
fn ranks_on_the_cpu_are_threads() {
    let report = json(&[
        "bench",
        "collective",
        "--device",
        "cpu:0",
        "--ranks",
        "3",
        "--turns",
        "1",
        "--json",
    ]);
    assert_eq!(report["simulated"], false);
    let names = figures(&report, 3, "host threads");
    let middle = [
        "all_reduce 1 MiB, in a graph of 64",
        "all_reduce 16 MiB, on the bus",
        "send and recv 8 KiB in a group",
    ];
    assert_eq!(names, [&FIRST[..], &middle, &LAST].concat());
}

#[cfg(feature = "sim")]
#[test]
fn simulated_devices_also_copy_to_each_other() {
    let middle = [
        "all_reduce 1 MiB, on the bus",
        "send and recv 8 KiB in a group",
        "peer copy 1 MiB",
        "peer copy 8 KiB",
    ];
    let mut devices = vec![&["--device", "sim:0"][..]];
    if cfg!(feature = "cuda") {
        devices.push(&["--device", "cuda:0", "--sim"]);
    }
    for device in devices {
        let words = ["bench", "collective", "--turns", "1", "--json"];
        let report = json(&[&words, device].concat());
        assert_eq!(report["simulated"], true);
        assert_eq!(figures(&report, 2, "simulated"), [&FIRST[..], &middle, &LAST].concat());
    }
}

#[test]
fn a_table_has_a_row_for_each_figure() {
    let output = call(&["bench", "collective", "--device", "cpu:0", "--turns", "1"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success());
    assert!(text.starts_with("2 ranks, the first on cpu:0, host threads"), "{text}");
    for name in FIRST.iter().chain(&LAST) {
        assert!(text.lines().any(|line| line.starts_with(name)), "{name}: {text}");
    }
    assert!(!text.contains("bound") && !text.contains("raw"), "{text}");
}

#[test]
fn what_cannot_be_measured_is_refused() {
    let words = ["bench", "collective"];
    for (arguments, status, told) in [
        (&["--device", "cpu:0", "--beside", "raw"][..], 2, "--beside raw: cpu:0 has no NCCL"),
        (&["--device", "cpu:0", "--ranks", "1"], 2, "1 is not in 2..=64"),
        (&["--device", "cpu:0", "--sim"], 2, "the CPU has no driver to simulate"),
        (&["--device", "mps:0"], 2, "mps:0 has no collectives"),
        (&["--device", "cpu:0", "--turns", "0"], 2, "0 is not in 1..=1000"),
    ] {
        let output = call(&[&words, arguments].concat());
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
        assert!(text.contains(told) && text.lines().count() == 1, "{arguments:?}: {text}");
        assert!(output.stdout.is_empty());
    }
}

/// Real devices that are not there: the rank that says so first is named with its device.
#[cfg(feature = "cuda")]
#[test]
fn ranks_without_devices_fail_in_one_line() {
    let output = call(&["bench", "collective", "--device", "cuda:60", "--ranks", "4"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    let named =
        |rank: u32| text.contains(&format!("rank {rank}: unavailable: cuda:{}:", 60 + rank));
    assert!((0..4).any(named), "{text}");
}
