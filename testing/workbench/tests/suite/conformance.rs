//! `leasehold-workbench conformance`: the table, the JSON object, the exit statuses.

use super::*;

#[test]
fn cases_are_tried_and_told() {
    let output = call(&["conformance", "--filter", "1,10-13,peer access"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    let lines: Vec<&str> = text.lines().collect();
    assert_eq!(lines.len(), 7, "{text}");
    assert!(lines[0].starts_with("1 ") && lines[0].contains("passed"), "{text}");
    // A case in a separate process.
    assert!(lines[1].starts_with("10 ") && lines[1].contains("passed"), "{text}");
    assert!(
        lines[5].contains("skipped") && lines[5].contains("only device of its backend"),
        "{text}"
    );
    assert!(lines[6].contains("6 cases in 7 runs: 6 passed, 0 failed, 1 skipped"), "{text}");
}

#[test]
fn one_object_has_every_run_and_every_number_that_is_no_case() {
    let report = json(&["conformance", "--json", "--validated", "--filter", "13"]);
    assert_eq!((&report["ok"], &report["passed"]), (&true.into(), &4.into()), "{report}");
    assert_eq!(report["device"], "cpu:0");
    let variants: Vec<_> =
        report["runs"].as_array().unwrap().iter().map(|r| r["variant"].as_str().unwrap()).collect();
    assert_eq!(variants, ["plain", "plain+replayed", "validated", "validated+replayed"]);
    assert!(report["elsewhere"]["70"].as_str().unwrap().contains("DLPack"), "{report}");
}

/// The tests of `leasehold-sim` run the whole suite over both simulated drivers.
#[cfg(all(feature = "cuda", feature = "mps"))]
#[test]
fn simulated_drivers_are_devices_too() {
    for device in ["cuda:0", "mps:0"] {
        let report =
            json(&["conformance", "--device", device, "--sim", "--json", "--filter", "1-40"]);
        assert_eq!(
            (&report["ok"], &report["memory_debug"]),
            (&true.into(), &"".into()),
            "{report}"
        );
        assert!(report["passed"].as_u64() > Some(30), "{report}");
    }
}

#[cfg(feature = "cuda")]
#[test]
fn with_each_buffer_straight_from_the_driver_everything_passes_or_says_why_not() {
    let command = ["conformance", "--device", "cuda:0", "--sim", "--json"];
    let report = json(&[&command[..], &["--memory-debug", "pass-through"]].concat());
    assert_eq!(
        (&report["ok"], &report["memory_debug"]),
        (&true.into(), &"pass-through".into()),
        "{report}"
    );
    let runs = report["runs"].as_array().unwrap();
    let trim = runs.iter().find(|r| r["case"] == 54).unwrap();
    assert_eq!(trim["why"], "each buffer of cuda:0 comes straight from the driver", "{trim}");
    // The subset for sanitizers, selected by the environment.
    let output = super::command()
        .args(command)
        .args(["--tag", "sanitizer"])
        .env("LEASEHOLD_MEMORY_DEBUG", "pass-through")
        .output();
    let output = output.unwrap();
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    assert_eq!((&report["failed"], &report["skipped"]), (&0.into(), &0.into()), "{report}");
    assert_eq!(report["memory_debug"], "pass-through");
    let tagged = report["runs"].as_array().unwrap();
    assert!(
        tagged.len() > 40 && tagged.len() < runs.len() / 2,
        "{} of {}",
        tagged.len(),
        runs.len()
    );
}

#[test]
fn what_a_device_has_not_got_is_said() {
    let output = call(&["conformance", "--tag", "quick"]);
    assert_eq!(output.status.code(), Some(2));
    #[cfg(feature = "cuda")]
    {
        let debug =
            "leasehold: memory debug checks (pass-through): sim:0 has none; cuda:0 --sim has\n";
        let records = "leasehold: sim:0 records no memory trace or snapshot; cuda:0 --sim does\n";
        for (command, wish, value, message) in [
            ("conformance", "--memory-debug", "pass-through", debug),
            ("run", "--memory-debug", "pass-through", debug),
            ("run", "--memory-trace", "no/such/directory/t.csv", records),
            ("run", "--memory-snapshot", "no/such/directory/s.json", records),
            ("run", "--report", "no/such/directory/r.html", records),
        ] {
            let output = call(&[command, "--device", "sim:0", wish, value]);
            let text = String::from_utf8(output.stderr).unwrap();
            assert_eq!(
                (output.status.code(), text.as_str()),
                (Some(2), message),
                "{command} {wish}"
            );
        }
    }
}
