//! `replay`, and what a run records.

use super::*;
use std::collections::BTreeSet;

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
    let snapshots = repository("testing/sim/tests/main/memory/snapshots");
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
        let output = command().args(["replay", &t]).args(arguments).output().unwrap();
        let text = String::from_utf8(output.stderr).unwrap();
        assert_eq!((output.status.code(), text.lines().count()), (Some(2), 1), "{text}");
        assert!(text.contains(word), "{word}: {text}");
    }
}

#[test]
fn what_a_run_records_replays() {
    let folder = tempfile::tempdir().unwrap();
    for name in ["t.csv", "t.csv.gz"] {
        let path = folder.path().join(name);
        let path = path.to_str().unwrap();
        json(&["run", "--json", "--tokens", "4", "--memory-trace", path]);
        let replayed = json(&["replay", path, "--json"]);
        assert_eq!(replayed["failed"], 0);
        assert!(replayed["events"].as_u64().unwrap() > 50);
    }
}

#[test]
fn a_replays_page_has_its_figures() {
    let folder = tempfile::tempdir().unwrap();
    let at = |name: &str| folder.path().join(name).to_str().unwrap().to_owned();
    let read = |path: &str| std::fs::read_to_string(path).unwrap();
    let page = at("replay.html");
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
