//! `leasehold conformance`: the table, the object, the statuses.

use super::{call, json};

#[test]
fn cases_are_tried_and_told() {
    let output = call(&["conformance", "--filter", "1,10-13,peer access"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 7, "{text}");
    assert!(lines[0].starts_with("1 ") && lines[0].contains("passed"), "{text}");
    // In a process of its own.
    assert!(lines[1].starts_with("10 ") && lines[1].contains("passed"), "{text}");
    assert!(lines[5].contains("skipped") && lines[5].contains("only device of its backend"), "{text}");
    assert!(lines[6].contains("6 cases in 7 runs: 6 passed, 0 failed, 1 skipped"), "{text}");
}

#[test]
fn one_object_has_every_run_and_every_number_that_is_no_case() {
    let report = json(&["conformance", "--json", "--validated", "--filter", "13"]);
    assert_eq!((&report["ok"], &report["passed"]), (&true.into(), &4.into()), "{report}");
    assert_eq!(report["device"], "cpu:0");
    let variants: Vec<_> = report["runs"].as_array().unwrap().iter().map(|r| r["variant"].as_str().unwrap()).collect();
    assert_eq!(variants, ["plain", "plain+replayed", "validated", "validated+replayed"]);
    assert!(report["elsewhere"]["70"].as_str().unwrap().contains("DLPack"), "{report}");
}
