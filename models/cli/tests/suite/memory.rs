//! Memory options of `run`: records, debug checks.

use super::*;
use std::path::Path;
use std::process::Command;

fn fails(arguments: &[&str], status: i32, message: &str) {
    let output = call(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.as_str()), (Some(status), message), "{arguments:?}");
}

#[test]
fn what_a_run_records_is_written_and_python_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (csv, pickle, text) = (at("t.csv.gz"), at("s.pickle"), at("s.json"));
    let run = ["run", "--json", "--tokens", "4"];
    let plain = json(&run);
    let report =
        json(&[&run[..], &["--memory-trace", &csv, "--memory-snapshot", &pickle]].concat());
    assert_eq!(report["output_ids"], plain["output_ids"]);
    assert_eq!(std::fs::read(&csv).unwrap()[..2], [0x1F, 0x8B], "gzip");
    json(&[&run[..], &["--memory-snapshot", &text, "--memory-events", "20"]].concat());
    let snapshot: serde_json::Value =
        serde_json::from_str(&std::fs::read_to_string(text).unwrap()).unwrap();
    assert_eq!(snapshot["events"].as_array().unwrap().len(), 20);
    assert!(snapshot["events_lost"].as_u64().unwrap() > 0);
    assert_eq!(snapshot["name"], "cpu:0 device memory");
    let segments = snapshot["segments"].as_array().unwrap();
    let reserved: u64 = segments.iter().map(|s| s["bytes"].as_u64().unwrap()).sum();
    assert_eq!(snapshot["stats"]["reserved"], reserved);
    python(Path::new(&pickle));
    let message = "/nowhere/t.csv: No such file or directory (os error 2)";
    fails(
        &[&run[..], &["--memory-trace", "/nowhere/t.csv"]].concat(),
        1,
        &format!("leasehold: {message}\n"),
    );
}

#[test]
fn reports_are_pages_with_the_runs_figures() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let (page, text) = (at("run.html"), at("s.json"));
    json(&["run", "--json", "--tokens", "3", "--report", &page, "--memory-snapshot", &text]);
    let (html, snapshot) = (read(&page), read(&text));
    let snapshot: serde_json::Value = serde_json::from_str(&snapshot).unwrap();
    assert!(html.starts_with("<!DOCTYPE html>") && html.contains("<h1>Memory of cpu:0</h1>"));
    for (name, value) in snapshot["stats"].as_object().unwrap() {
        if name != "limit" {
            let cell = format!("<td class=\"n\">{}</td>", grouped(value.as_u64().unwrap()));
            assert!(html.contains(&format!("{cell}<td><code>{name}</code>")), "{name}: {cell}");
        }
    }
    assert!(html.contains(">kv cache</td>") && html.contains("<path class=\"live line\""));
    // Weights where they lie in the file, and equal buffers in one row.
    assert!(html.contains("56 buffers of others' memory") && html.contains("12 × kv cache of "));
}

fn python(pickle: &Path) {
    match Command::new("python3").arg(repository("ci/memory_viz.py")).arg(pickle).output() {
        Ok(run) => assert!(run.status.success(), "{}", String::from_utf8_lossy(&run.stderr)),
        Err(e) => {
            assert!(std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none(), "python3: {e}");
            eprintln!("skipped: no python3");
        }
    }
}

#[test]
fn debug_aids_are_silent_where_nothing_is_wrong() {
    let plain = json(&["run", "--json", "--tokens", "3"]);
    for debug in ["all", "guard", "pass-through,red-zone=64,quarantine=1M"] {
        let report = json(&["run", "--json", "--tokens", "3", "--memory-debug", debug]);
        assert_eq!(report["output_ids"], plain["output_ids"], "{debug}");
        assert_eq!(report["modes_agree"], true);
    }
    let output = command()
        .args(["run", "--tokens", "1", "--json"])
        .env("LEASEHOLD_MEMORY_DEBUG", "all")
        .output()
        .unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

#[test]
fn debug_aids_that_make_no_sense_are_refused() {
    let names =
        "want some of poison, red-zone[=BYTES], quarantine[=BYTES], guard, pass-through, all";
    let message = format!("invalid argument: debug check `posion`: {names}");
    let output = call(&["run", "--memory-debug", "posion"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(&message), "{text}");
    let output = command().arg("run").env("LEASEHOLD_MEMORY_DEBUG", "posion").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), text),
        (Some(2), format!("leasehold: LEASEHOLD_MEMORY_DEBUG: {message}\n"))
    );
}
