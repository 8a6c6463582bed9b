//! The program of a suite and its answers, for the tests of this suite and of the workbench's.

use super::PROGRAM;
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

/// The command, ready for arguments.
pub fn command() -> Command {
    Command::new(PROGRAM)
}

/// Runs the command with arguments.
pub fn call(arguments: &[&str]) -> Output {
    command().args(arguments).output().expect("the command runs")
}

/// Standard output as JSON; the run must have succeeded and printed one line.
pub fn json(arguments: &[&str]) -> serde_json::Value {
    let output = call(arguments);
    assert!(output.status.success(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stderr));
    let text = String::from_utf8(output.stdout).expect("text");
    assert_eq!(text.lines().count(), 1, "exactly one object");
    serde_json::from_str(&text).expect("JSON")
}

/// A folder of the repository.
pub fn repository(path: &str) -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR")).join("../..").join(path)
}

/// Checks that the command fails with this status and one line that contains all of `words`.
pub fn fails(arguments: &[&str], status: i32, words: &[&str]) {
    let output = call(arguments);
    let text = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(status), "{arguments:?}: {text}");
    assert_eq!(text.lines().count(), 1, "{arguments:?}: {text}");
    assert!(!text.contains("panicked"), "{text}");
    for word in words {
        assert!(text.contains(word), "{arguments:?}: {word:?} is not in {text:?}");
    }
    assert!(output.stdout.is_empty(), "{arguments:?}: {}", String::from_utf8_lossy(&output.stdout));
}

/// Runs the command for at most a minute; after that it has status 137.
#[cfg(target_os = "linux")]
pub fn bounded(arguments: &[&str]) -> Output {
    Command::new("timeout").args(["-s", "KILL", "60", PROGRAM]).args(arguments).output().unwrap()
}

/// The one line of the command's message, without control characters.
#[cfg(target_os = "linux")]
pub fn line(output: &Output, status: i32) -> String {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    let line = text.strip_suffix('\n').unwrap();
    assert!(line.starts_with("leasehold: ") && !line.contains(char::is_control), "{text:?}");
    line.to_owned()
}

/// Checks that a line contains all of `words`.
#[cfg(target_os = "linux")]
pub fn has(line: &str, words: &[&str]) {
    for word in words {
        assert!(line.contains(word), "{word:?} is not in {line:?}");
    }
}

/// Runs the command in a shell that first sets a limit.
#[cfg(target_os = "linux")]
pub fn limited(limit: &str, arguments: &[&str]) -> Command {
    let mut command = Command::new("bash");
    let script = format!("{limit}; exec \"$0\" \"$@\"");
    command.args(["-c", &script, PROGRAM]).args(arguments);
    command
}

/// Checks that the command ends in time with a status and prints at most one line without control
/// characters. On success it prints one JSON object.
#[cfg(target_os = "linux")]
pub fn judged(what: &str, arguments: &[&str]) -> i32 {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "120", PROGRAM]).args(arguments).arg("--json").stdin(Stdio::null());
    let Output { status, stdout, stderr } = command.output().unwrap();
    let text = String::from_utf8(stderr).unwrap();
    let code = status.code();
    assert!(matches!(code, Some(0 | 1)), "{what}: {code:?}: {text}");
    if code == Some(0) {
        let report: serde_json::Value = serde_json::from_slice(&stdout).unwrap();
        assert!(report.is_object() && text.is_empty(), "{what}: {text}");
    } else {
        let line = text.strip_suffix('\n').unwrap();
        assert!(
            line.starts_with("leasehold: ") && !line.contains(char::is_control),
            "{what}: {text:?}"
        );
        assert!(line.len() < 20_000 && stdout.is_empty(), "{what}: {text}");
    }
    code.unwrap()
}

/// Runs the command in a folder for at most a minute; after that it has status 137.
#[cfg(target_os = "linux")]
pub fn within(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60", PROGRAM]);
    command.args(arguments).current_dir(dir);
    command
}

/// As [`within`], to its end.
#[cfg(target_os = "linux")]
pub fn bounded_within(dir: &Path, arguments: &[&str]) -> Output {
    within(dir, arguments).output().unwrap()
}

/// Checks that the command failed with one line that contains all of `words`, and printed nothing.
#[cfg(target_os = "linux")]
#[track_caller]
pub fn refused(output: &Output, status: i32, words: &[&str]) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

/// The words of the lines of a table on standard error, where standard output is one JSON object.
pub fn operators(arguments: &[&str]) -> Vec<Vec<String>> {
    let output = call(&[arguments, &["--json", "--verbose"]].concat());
    let table = String::from_utf8(output.stderr).unwrap();
    assert!(output.status.success(), "{table}");
    assert_eq!(String::from_utf8(output.stdout).unwrap().lines().count(), 1);
    table
        .lines()
        .map(|line| line.split("  ").map(str::trim).map(str::to_owned))
        .map(|cells| cells.filter(|c| !c.is_empty()).collect())
        .collect()
}

/// The one line of a failure, without what it begins with.
pub fn failure(output: &Output) -> String {
    let text = String::from_utf8_lossy(&output.stderr).into_owned();
    assert_eq!(text.lines().count(), 1, "one line: {text}");
    text.trim().strip_prefix("leasehold: ").expect("a failure").to_owned()
}

/// The prompt of a case of the demo model, and the tokens that it must give.
pub fn golden(at: usize) -> (String, serde_json::Value) {
    let text = std::fs::read_to_string(repository("models/llama/demo-model/golden.json")).unwrap();
    let golden: serde_json::Value = serde_json::from_str(&text).unwrap();
    let case = &golden["cases"][at];
    let ids: Vec<_> =
        case["prompt_ids"].as_array().unwrap().iter().map(ToString::to_string).collect();
    (ids.join(","), case["greedy_48"].clone())
}

/// A number as a page writes it.
pub fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let groups: Vec<&str> =
        digits.as_bytes().rchunks(3).rev().map(|g| std::str::from_utf8(g).unwrap()).collect();
    groups.join(",")
}
