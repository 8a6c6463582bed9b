//! Memory options of the command line: `replay`, the records of `run`, debug aids.

use super::{call, json, leasehold, repository};
use std::collections::BTreeSet;
use std::path::Path;
use std::process::Command;

fn trace(name: &str) -> String {
    repository("testing/alloc-bench/traces")
        .join(format!("{name}.csv.gz"))
        .to_str()
        .unwrap()
        .to_owned()
}

fn fails(arguments: &[&str], status: i32, message: &str) {
    let output = call(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.as_str()), (Some(status), message), "{arguments:?}");
}

fn keys(value: &serde_json::Value) -> BTreeSet<&str> {
    value.as_object().unwrap().keys().map(String::as_str).collect()
}

#[test]
fn a_replay_reports_exactly_its_keys() {
    let report = json(&["replay", &trace("gpt2_train"), "--json"]);
    let want = "events peak_requested peak_reserved ratio min_budget ns_per_op driver_calls remaps host_waits failed";
    assert_eq!(keys(&report), want.split(' ').collect());
    assert_eq!(keys(&report["ns_per_op"]), "mean p50 p99 p999".split(' ').collect());
    assert_eq!(keys(&report["driver_calls"]), "total steady".split(' ').collect());
    assert!(report["min_budget"].is_null());
    assert_eq!(report["failed"], 0);
    let ns = |key: &str| report["ns_per_op"][key].as_f64().unwrap();
    assert!(
        ns("mean") > 0.0 && ns("p50") > 0.0 && ns("p50") <= ns("p99") && ns("p99") <= ns("p999")
    );
}

#[test]
fn a_replay_looks_for_the_least_budget_and_comes_to_rest() {
    let report = json(&["replay", &trace("resnet50_train"), "--json", "--find-min-budget"]);
    assert!(report["min_budget"].as_f64().unwrap() <= 1.01, "{report}");
    let report =
        json(&["replay", &trace("resnet50_train"), "--json", "--repeat", "3", "--budget", "1.15"]);
    assert_eq!((&report["driver_calls"]["steady"], &report["failed"]), (&0.into(), &0.into()));
    let report = json(&["replay", &trace("resnet50_train"), "--json", "--budget", "0.9"]);
    assert!(report["failed"].as_u64().unwrap() > 0);
}

#[test]
fn a_replay_runs_on_devices_with_threads_and_on_the_heap() {
    let t = trace("resnet50_train");
    let one = json(&["replay", &t, "--json"]);
    let two =
        json(&["replay", &t, "--json", "--threads", "2", "--policy", "fastest", "--lag", "100"]);
    assert_eq!(two["events"].as_u64(), one["events"].as_u64().map(|n| 2 * n));
    // The copies need not reach their peaks at the same time.
    let (alone, both) =
        (one["peak_requested"].as_u64().unwrap(), two["peak_requested"].as_u64().unwrap());
    assert!(
        both >= alone - alone / 4096 && both <= 2 * alone && two["ratio"].as_f64() >= Some(1.0),
        "{one} {two}"
    );
    // A trace that fits any machine, on real memory.
    let folder = tempfile::tempdir().unwrap();
    let small = folder.path().join("small.csv");
    let mut text = "t_us,op,id,size,stream\n".to_owned();
    for i in 0..2000 {
        text += &format!("{i},a,{i},{},{}\n", 1 + i * 7919 % 300_000, i % 3);
        if i >= 100 {
            text += &format!("{i},f,{},0,{}\n", i - 100, i % 2);
        }
    }
    std::fs::write(&small, text).unwrap();
    let small = small.to_str().unwrap();
    let report = json(&["replay", small, "--json", "--device", "cpu:0", "--peer", "system"]);
    assert_eq!((&report["events"], &report["failed"]), (&3900.into(), &0.into()));
    assert!(report["ratio"].as_f64().unwrap() >= 1.0, "{report}");
    let report = json(&["replay", small, "--json", "--device", "cpu:0"]);
    assert!(report["driver_calls"]["total"].as_u64().unwrap() > 0);
    assert_eq!(report["failed"], 0);
    let table = call(&["replay", small, "--find-min-budget"]);
    let text = String::from_utf8(table.stdout).unwrap();
    for word in ["peak requested", "smallest budget", "driver calls", "p50, p99, p99.9"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn a_snapshot_of_pytorch_replays_like_its_trace() {
    let snapshots = repository("testing/alloc-bench/tests/snapshots");
    let at = |name: &str| snapshots.join(name).to_str().unwrap().to_owned();
    let expect = json(&["replay", &at("trace.csv"), "--json"]);
    for protocol in ["protocol0.pickle", "protocol4.pickle"] {
        let output = call(&["replay", &at(protocol), "--json"]);
        let told = String::from_utf8(output.stderr).unwrap();
        assert!(output.status.success(), "{told}");
        let line = "left out: 1 events of device 1; another one: --snapshot-device\n";
        assert!(told.lines().count() == 1 && told.ends_with(line), "{told}");
        let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
        for key in ["events", "peak_requested", "failed"] {
            assert_eq!(report[key], expect[key], "{protocol}: {key}");
        }
    }
    let other = json(&["replay", &at("protocol4.pickle"), "--json", "--snapshot-device", "1"]);
    assert_eq!(other["peak_requested"], 64 << 20);
    let output = call(&["replay", &at("trace.csv"), "--snapshot-device", "1"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.code() == Some(1) && text.contains("has no device 1"), "{text}");
}

#[test]
fn bad_traces_and_command_lines_are_one_line_that_says_where() {
    let folder = tempfile::tempdir().unwrap();
    let write = |name: &str, bytes: &[u8]| -> String {
        let path = folder.path().join(name);
        std::fs::write(&path, bytes).unwrap();
        path.to_str().unwrap().to_owned()
    };
    let at = write("t.csv", b"t_us,op,id,size,stream\n0,a,1,100,0\n1,a,two,100,0\n");
    fails(
        &["replay", &at],
        1,
        &format!("leasehold: invalid argument: {at}, line 3: id `two` is not a number\n"),
    );
    let at = write("u.csv", b"0,a,1,100,0\n1,f,2,100,0\n");
    fails(
        &["replay", &at],
        1,
        &format!("leasehold: invalid argument: {at}, line 2: free of id 2, never allocated\n"),
    );
    let at = write("v.csv", b"0,a,1,100,0\n1,f,1,100,0\n2,f,1,100,0\n");
    fails(
        &["replay", &at],
        1,
        &format!("leasehold: invalid argument: {at}, line 3: id 1 is freed twice\n"),
    );
    let whole = std::fs::read(trace("gpt2_train")).unwrap();
    let at = write("w.csv.gz", &whole[..whole.len() / 2]);
    let output = call(&["replay", &at]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!((output.status.code(), text.lines().count()), (Some(1), 1), "{text}");
    let rest = text
        .strip_prefix(&format!("leasehold: invalid argument: {at}, line "))
        .unwrap_or_else(|| panic!("{text}"));
    assert!(rest.contains(": cannot be read: "), "{text}");
    let missing = folder.path().join("none.csv");
    let missing = missing.to_str().unwrap();
    let text = format!("leasehold: not found: {missing}: No such file or directory (os error 2)\n");
    fails(&["replay", missing], 1, &text);

    let t = trace("gpt2_train");
    let text = "leasehold: --peer system is the host's memory, not cuda:0's\n";
    fails(&["replay", &t, "--device", "cuda:0", "--peer", "system"], 2, text);
    for (arguments, word) in [
        (&["--device", "tape"][..], "`virtual`"),
        (&["--budget=-1"], "--budget"),
        (&["--threads", "0"], "--threads"),
        (&["--peer", "jemalloc"], "jemalloc"),
        (&["--peer", "system", "--policy", "compact"], "--policy"),
        (&["--lag", "x"], "--lag"),
    ] {
        let output = leasehold().args(["replay", &t]).args(arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn what_a_run_records_replays_and_python_reads_it() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let (csv, pickle, text) = (at("t.csv.gz"), at("s.pickle"), at("s.json"));
    let run = ["run", "--json", "--tokens", "4"];
    let plain = json(&run);
    let report =
        json(&[&run[..], &["--memory-trace", &csv, "--memory-snapshot", &pickle]].concat());
    assert_eq!(report["output_ids"], plain["output_ids"]);
    let replayed = json(&["replay", &csv, "--json"]);
    assert_eq!(replayed["failed"], 0);
    assert!(replayed["events"].as_u64().unwrap() > 50);
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
    // A number as the page writes it.
    let grouped = |n: u64| {
        let digits = n.to_string();
        let groups: Vec<&str> =
            digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap()).collect();
        groups.join(",")
    };
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

    // A replay, whose peak is the trace's own; and one that does not fit.
    let t = trace("resnet50_train");
    let plain = json(&["replay", &t, "--json"]);
    let report = json(&["replay", &t, "--json", "--report", &page]);
    assert_eq!((&report["events"], &report["failed"]), (&plain["events"], &plain["failed"]));
    let html = read(&page);
    let peak = grouped(plain["peak_requested"].as_u64().unwrap());
    assert!(html.contains("<h1>Memory of a replay of resnet50_train.csv.gz</h1>"));
    assert!(html.contains(&format!("({peak} bytes) were live at")), "{peak}");
    assert!(html.len() < 3_000_000, "{}", html.len());
    json(&["replay", &t, "--json", "--budget", "0.9", "--report", &page]);
    let html = read(&page);
    assert!(html.contains("class=\"failure line\"") && html.contains("class=\"budget line\""));

    let bad = at("no/such/folder/r.html");
    let message = format!("leasehold: {bad}: No such file or directory (os error 2)\n");
    fails(&["replay", &t, "--report", &bad], 1, &message);
    let output = call(&["replay", &t, "--peer", "system", "--report", &page]);
    assert_eq!(output.status.code(), Some(2));
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
    for aids in ["all", "guard", "pass-through,red-zone=64,quarantine=1M"] {
        let report = json(&["run", "--json", "--tokens", "3", "--memory-debug", aids]);
        assert_eq!(report["output_ids"], plain["output_ids"], "{aids}");
        assert_eq!(report["modes_agree"], true);
    }
    let output = leasehold()
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
    let message = format!("invalid argument: debug aid `posion`: {names}");
    let output = call(&["run", "--memory-debug", "posion"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains(&message), "{text}");
    let output = leasehold().arg("run").env("LEASEHOLD_MEMORY_DEBUG", "posion").output().unwrap();
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(
        (output.status.code(), text),
        (Some(2), format!("leasehold: LEASEHOLD_MEMORY_DEBUG: {message}\n"))
    );
}

#[test]
fn the_allocators_benchmark_reports_every_peer() {
    let quick = ["bench", "alloc", "--json", "--rounds", "1", "--pairs", "100", "--threads", "1,2"];
    let report = json(&[&quick[..], &["--workload", "64 live"]].concat());
    assert_eq!(report["threads"], serde_json::json!([1, 2]));
    let figures = report["workloads"].as_array().unwrap();
    let names: BTreeSet<&str> = figures.iter().map(|f| f["allocator"].as_str().unwrap()).collect();
    for name in ["leasehold", "leasehold, Runtime::alloc", "system allocator"] {
        assert!(names.contains(name), "{names:?}");
    }
    for f in figures {
        let own = f["allocator"].as_str().unwrap().starts_with("leasehold");
        assert_eq!(f["kind"], if own { "own" } else { "peer" }, "{f}");
        let whole = f["ns"].is_null() && f["slower"].is_null();
        assert!(
            whole || f["ns"].as_f64().unwrap() > 0.0 && f["slower"].as_f64().unwrap() > 0.0,
            "{f}"
        );
    }
    assert_eq!(figures.len(), 3 * 2 * names.len());
    assert_eq!(report["growth"]["small"]["64 live"], 1.0);
    assert!(report["speedup"]["small, 64 live"].as_f64().unwrap() > 0.0);
    assert_eq!(report["replays"], serde_json::json!([]));
    let report = json(
        &[&quick[..], &["--workload", "ping-pong 4", "--trace", &trace("gpt2_train")]].concat(),
    );
    let replays = report["replays"].as_array().unwrap();
    assert_eq!(replays.len(), 1);
    assert!(
        replays
            .iter()
            .all(|r| r["ns_per_op"].as_f64().unwrap() > 0.0 && r["ratio"].as_f64().unwrap() >= 1.0)
    );
    let output = call(&["bench", "alloc", "--workload", "tango"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2));
    assert!(text.starts_with("leasehold: --workload tango: none of ping-pong 4 KiB, "), "{text}");
}

#[test]
fn benchmarks_with_a_device_run_over_simulated_drivers() {
    let decode = ["bench", "decode", "--tokens", "2", "--repeat", "1", "--sim", "--json"];
    let copy = ["bench", "copy", "--kib", "4", "--rounds", "1", "--sim", "--json"];
    for device in ["cuda:0", "mps:0"] {
        for what in [&decode, &copy] {
            let report = json(&[&what[..], &["--device", device]].concat());
            assert_eq!((&report["device"], &report["simulated"]), (&device.into(), &true.into()));
        }
    }
    let suspend = ["bench", "suspend", "--tokens", "3", "--rounds", "2", "--json", "--sim"];
    for device in ["cuda:0", "sim:0"] {
        let report = json(&[&suspend[..], &["--device", device]].concat());
        assert_eq!((&report["rounds"], &report["texts_equal"]), (&2.into(), &2.into()));
        let number = |name: &str| report[name].as_u64().unwrap();
        assert!(number("bytes") > 0, "{report}");
        assert_eq!(number("free_before") + number("bytes"), number("free_suspended"), "{report}");
    }
    let text = String::from_utf8(
        call(&["bench", "suspend", "--device", "mps:0", "--sim", "--rounds", "1"]).stderr,
    )
    .unwrap();
    assert!(text.contains("mps:0 cannot be suspended"), "{text}");
    let output = call(&["bench", "decode", "--sim"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(2), "{text}");
    assert!(text.contains("the CPU has no driver to simulate"), "{text}");
}

#[test]
fn the_benchmark_of_copies_reports_every_size_and_offset() {
    let report =
        json(&["bench", "copy", "--kib", "4,64", "--rounds", "2", "--threads", "1", "--json"]);
    let figures = report["figures"].as_array().unwrap();
    let places: Vec<_> = figures
        .iter()
        .map(|f| (f["bytes"].as_u64().unwrap(), f["offset"].as_u64().unwrap()))
        .collect();
    let expect = [4096, 65536]
        .map(|bytes| [0, 1, 16, 32, 64, 128, 2048].map(|offset| (bytes, offset)))
        .concat();
    assert_eq!(places, expect);
    for f in figures {
        let all = ["download", "upload", "plain", "download_by_plain"]
            .map(|name| f[name].as_f64().unwrap());
        assert!(all.iter().all(|&v| v > 0.0), "{f}");
    }
    let fresh = report["fresh"].as_array().unwrap();
    assert!(fresh.len() == 2 && fresh.iter().all(|f| f["new"].as_f64().unwrap() > 0.0), "{report}");
    let output = call(&["bench", "copy", "--kib", "1", "--rounds", "1"]);
    assert!(
        output.status.success()
            && String::from_utf8(output.stdout).unwrap().contains("copy_from_slice")
    );
}
