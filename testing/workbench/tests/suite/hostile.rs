//! Hostile files, limits and streams: each gives one line that names the problem and its place, and
//! status 1, or 2 for the command line.

use super::*;
use std::fs;
use std::os::unix::fs::{MetadataExt, PermissionsExt};
use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::Command;

#[cfg(feature = "cuda")]
fn model() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(
            repository("models/llama/tests/models/untied-head").join(file),
            dir.path().join(file),
        )
        .unwrap();
    }
    dir
}

fn small_trace(dir: &Path) -> String {
    let path = dir.join("t.csv");
    fs::write(&path, "0,a,1,100,0\n1,a,2,5000,1\n2,f,1,100,0\n3,f,2,5000,0\n").unwrap();
    path.to_str().unwrap().to_owned()
}

#[test]
fn traces_of_many_streams_are_played_or_refused() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("t.csv");
    let at = path.to_str().unwrap();
    for (streams, status, words) in [
        (3000, 0, ""),
        (65_536, 1, "65,535 streams and host timelines are in use"),
        (65_537, 1, "line 65537: more than 65,536 streams"),
    ] {
        fs::write(&path, (0..streams).map(|i| format!("{i},a,{i},8,{i}\n")).collect::<String>())
            .unwrap();
        let output = bounded(&["replay", at, "--json"]);
        match status {
            0 => assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr)),
            _ => has(&line(&output, status), &[words]),
        }
    }
}

#[test]
fn a_trace_is_a_regular_file_or_standard_input() {
    let dir = tempfile::tempdir().unwrap();
    let fifo = dir.path().join("fifo");
    assert!(Command::new("mkfifo").arg(&fifo).status().unwrap().success());
    has(
        &line(&bounded(&["replay", fifo.to_str().unwrap()]), 1),
        &["fifo: a pipe; a regular file is expected"],
    );
    has(&line(&bounded(&["replay", "/dev/zero"]), 1), &["/dev/zero: a device"]);
    has(&line(&bounded(&["replay", "/"]), 1), &["/: a folder"]);
    let zeros = fs::File::open("/dev/zero").unwrap();
    let output = command().args(["replay", "-"]).stdin(zeros).output().unwrap();
    has(&line(&output, 1), &["standard input, line 1: longer than 256 bytes"]);
    let trace = fs::File::open(small_trace(dir.path())).unwrap();
    let output = command().args(["replay", "-", "--json"]).stdin(trace).output().unwrap();
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    // A byte order mark, which editors put before a text.
    let path = dir.path().join("mark.csv");
    fs::write(&path, "\u{feff}t_us,op,id,size,stream\r\n0,a,1,100,0\r\n").unwrap();
    assert!(bounded(&["replay", path.to_str().unwrap()]).status.success());
    fs::write(&path, "0,a\u{1b}[2J\r\u{7},1,100,0\n").unwrap();
    has(&line(&bounded(&["replay", path.to_str().unwrap()]), 1), &["op `a\\u{1b}[2J\\r\\u{7}`"]);
}

/// The system refuses threads. Limits do not apply to the superuser, so another user runs the
/// command then.
#[test]
fn no_thread_to_be_had_is_no_panic() {
    let dir = tempfile::tempdir().unwrap();
    fs::set_permissions(dir.path(), fs::Permissions::from_mode(0o755)).unwrap();
    let trace = small_trace(dir.path());
    let copy = dir.path().join("leasehold");
    fs::copy(env!("CARGO_BIN_EXE_leasehold-workbench"), &copy).unwrap();
    let root = fs::metadata("/proc/self").unwrap().uid() == 0;
    let run = |arguments: &[&str]| {
        let mut command = Command::new("bash");
        command
            .args(["-c", "ulimit -u 1; exec \"$0\" \"$@\""])
            .arg(&copy)
            .args(arguments)
            .current_dir(dir.path());
        if root {
            command.uid(65_534).gid(65_534);
        }
        command.output().unwrap()
    };
    let output = run(&["replay", &trace, "--json"]);
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
    has(
        &line(&run(&["replay", &trace, "--threads", "4"]), 1),
        &["the system gives no more threads"],
    );
    has(
        &line(&run(&["bench", "memory", "--threads", "2"]), 1),
        &["the system gives no more threads"],
    );
    let quick = [
        "bench",
        "alloc",
        "--workload",
        "ping-pong 4",
        "--rounds",
        "1",
        "--pairs",
        "100",
        "--threads",
        "2",
    ];
    has(&line(&run(&quick), 1), &["threads"]);
    let output = run(&["conformance", "--filter", "1,10"]);
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(
        output.status.code() == Some(1) && !text.contains("panicked"),
        "{:?} {text}",
        output.status
    );
}

#[cfg(feature = "cuda")]
#[test]
fn weights_that_are_no_numbers_give_no_token() {
    let dir = model();
    let path = dir.path().join("model.safetensors");
    let mut bytes = fs::read(&path).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data..].fill(0xFF);
    fs::write(&path, bytes).unwrap();
    let at = dir.path().to_str().unwrap();
    let run = ["run", "--model", at, "--prompt-ids", "1,2", "--tokens", "3"];
    let run = [&run[..], &["--device", "cuda:0", "--sim"]].concat();
    has(&line(&bounded(&run), 1), &[at, "new token 1: no logit is a number"]);
    // A check on the device names the logit, in both modes.
    for mode in ["eager", "graph"] {
        let text = line(&bounded(&[&run[..], &["--check", "--mode", mode]].concat()), 1);
        has(&text, &[at, "check logits: element 0 is NaN"]);
    }
}

#[cfg(feature = "cuda")]
#[test]
fn debug_aids_that_cannot_be_are_named_with_a_cure() {
    for debug in ["guard", "poison"] {
        let output = bounded(&[
            "run",
            "--tokens",
            "1",
            "--device",
            "cuda:0",
            "--sim",
            "--memory-debug",
            debug,
        ]);
        has(
            &line(&output, 2),
            &["--memory-debug", debug, "cuda:0", "pass-through", "the CPU has all"],
        );
    }
}

#[test]
fn memory_of_the_host_is_asked_before_it_is_taken() {
    let output = limited("ulimit -v 200000", &["conformance"]).output().unwrap();
    has(&line(&output, 1), &["the suite needs 1.8 GiB of addresses", "ulimit -v"]);
    // The available memory bounds heaps, not a constant.
    let figures = [
        "bench",
        "alloc",
        "--workload",
        "mixed, 1000 ",
        "--threads",
        "1",
        "--rounds",
        "1",
        "--pairs",
        "100",
        "--json",
    ];
    let output = limited("ulimit -v 4000000", &figures).output().unwrap();
    let text = String::from_utf8_lossy(&output.stderr);
    assert!(output.status.success(), "{text}");
    let report: serde_json::Value = serde_json::from_slice(&output.stdout).unwrap();
    let heap = report["workloads"]
        .as_array()
        .unwrap()
        .iter()
        .find(|f| f["allocator"] == "system allocator")
        .unwrap();
    assert!(heap["ns"].is_null(), "2 GiB live in a process of 4 GB of addresses: {heap}");
}
