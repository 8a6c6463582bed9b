//! `leasehold-workbench stress`: the line, the JSON object, the exit statuses.

use super::*;
#[cfg(all(target_os = "linux", feature = "sim"))]
use std::process::Command;

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

#[test]
fn programs_of_ranks_are_run_and_told() {
    let output = call(&["stress", "--ranks", "3", "--seeds", "2", "--ops", "100"]);
    let text = String::from_utf8(output.stdout).unwrap();
    assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
    assert!(
        text.starts_with("cpu:0: 2 seeds of 100 steps on 3 ranks") && text.ends_with("0 failed\n"),
        "{text}"
    );
}

#[cfg(feature = "cuda")]
#[test]
fn ranks_have_devices_of_one_simulated_machine() {
    for device in [&["--device", "sim:0"][..], &["--device", "cuda:0", "--sim", "--faults"]] {
        let report = json(&[&["stress", "--ranks", "4", "--json"], device].concat());
        assert_eq!((&report["ranks"], &report["ops"]), (&4.into(), &300.into()), "{report}");
        assert_eq!(report["failures"].as_array().map(Vec::len), Some(0), "{report}");
    }
    let threads = json(&["stress", "--ops", "50", "--json"]);
    assert!(threads.get("ranks").is_none(), "{threads}");
}

#[cfg(feature = "mps")]
#[test]
fn ranks_need_a_library_of_collectives() {
    let output = call(&["stress", "--device", "mps:0", "--sim", "--ranks", "2"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("--ranks") && text.contains("sim:0"), "{text}");
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
fn a_program_that_fits_no_memory_is_refused() {
    let output = call(&["stress", "--ops", "4294967295"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{text}");
    assert!(text.contains("4294967295 steps") && text.contains("--ops"), "{text}");
    assert!(output.stdout.is_empty() && text.lines().count() == 1, "{text}");
}

#[test]
fn faults_need_a_simulated_driver() {
    for arguments in [
        &["stress", "--faults"][..],
        &["stress", "--sim"],
        &["stress", "--threads", "0"],
        &["stress", "--ranks", "0"],
        &["stress", "--ranks", "2", "--threads", "2"],
    ] {
        assert_eq!(call(arguments).status.code(), Some(2), "{arguments:?}");
    }
}

/// A limit of addresses, which the machine of a simulated device does not fit into: that is no
/// failure of a program.
#[cfg(all(target_os = "linux", feature = "sim"))]
#[test]
fn a_device_that_cannot_be_opened_is_one_line() {
    let program = env!("CARGO_BIN_EXE_leasehold-workbench");
    for device in [&["cpu:0"][..], &["sim:0", "--json"], &["cuda:0", "--sim", "--faults"]] {
        let stress = ["stress", "--seed", "3", "--seeds", "2", "--ops", "50", "--device"];
        let output = Command::new("bash")
            .args(["-c", "ulimit -v 8388608; exec \"$0\" \"$@\"", program])
            .args([&stress[..], device].concat())
            .output()
            .unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!(output.status.code(), Some(1), "{text}");
        assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
        let begin = format!("leasehold: {}: seed 3: the devices cannot be opened: ", device[0]);
        assert!(text.starts_with(&begin) && text.lines().count() == 1, "{text}");
    }
}
