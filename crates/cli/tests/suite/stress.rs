//! `leasehold stress`: the line, the JSON object, the exit statuses.

use super::{call, json};

#[test]
fn programs_are_run_and_told() {
    let output = call(&["stress", "--seeds", "2", "--ops", "300", "--threads", "3"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        text.starts_with("cpu:0: 2 seeds of 300 steps on 3 threads")
            && text.ends_with("0 failed\n"),
        "{text}"
    );
}

#[cfg(feature = "cuda")]
#[test]
fn one_object_says_what_was_run() {
    let report =
        json(&["stress", "--device", "sim:0", "--faults", "--seed", "5", "--ops", "200", "--json"]);
    assert_eq!(
        (&report["device"], &report["seed"], &report["seeds"]),
        (&"sim:0".into(), &5.into(), &1.into()),
        "{report}"
    );
    assert_eq!(
        (&report["ops"], &report["threads"], &report["faults"]),
        (&200.into(), &8.into(), &true.into()),
        "{report}"
    );
    assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{report}");
}

#[test]
fn faults_need_a_simulated_driver() {
    for arguments in
        [&["stress", "--faults"][..], &["stress", "--sim"], &["stress", "--threads", "0"]]
    {
        assert_eq!(call(arguments).status.code(), Some(2), "{arguments:?}");
    }
}
