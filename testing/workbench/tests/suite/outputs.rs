//! The page of a replay replaces no trace.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;
use std::process::{Command, Output};

const TRACE: &str = "t_us,op,id,size,stream\n0,a,1,100,0\n1,a,2,5000,1\n2,f,1,100,0\n";

/// Runs the command in a folder for at most a minute; after that it has status 137.
fn within(dir: &Path, arguments: &[&str]) -> Command {
    let mut command = Command::new("timeout");
    command.args(["-s", "KILL", "60", env!("CARGO_BIN_EXE_leasehold-workbench")]);
    command.args(arguments).current_dir(dir);
    command
}

fn bounded(dir: &Path, arguments: &[&str]) -> Output {
    within(dir, arguments).output().unwrap()
}

/// Checks that the command failed with one line that contains all of `words`, and printed nothing.
#[track_caller]
fn refused(output: &Output, status: i32, words: &[&str]) {
    let text = String::from_utf8(output.stderr.clone()).unwrap();
    assert_eq!(output.status.code(), Some(status), "{text}");
    assert_eq!(text.lines().count(), 1, "{text}");
    assert!(output.stdout.is_empty(), "{}", String::from_utf8_lossy(&output.stdout));
    for word in words {
        assert!(text.contains(word), "{word:?} is not in {text:?}");
    }
}

fn folder() -> tempfile::TempDir {
    let dir = tempfile::tempdir().unwrap();
    fs::write(dir.path().join("t.csv"), TRACE).unwrap();
    dir
}

#[test]
fn no_output_replaces_an_input() {
    let dir = folder();
    fs::hard_link(dir.path().join("t.csv"), dir.path().join("hard")).unwrap();
    symlink("t.csv", dir.path().join("soft")).unwrap();
    for (input, output) in [
        ("t.csv", "t.csv"),
        ("t.csv", "./t.csv"),
        ("t.csv", "t.csv/"),
        ("t.csv", "hard"),
        ("t.csv", "soft"),
        ("soft", "t.csv"),
        ("soft", "soft"),
        ("hard", "soft"),
    ] {
        let words = [output, ": --report names a file that this command reads; name another file"];
        refused(&bounded(dir.path(), &["replay", input, "--report", output]), 2, &words);
    }
    let input = fs::File::open(dir.path().join("t.csv")).unwrap();
    let mut command = within(dir.path(), &["replay", "-", "--report", "hard"]);
    refused(&command.stdin(input).output().unwrap(), 2, &["hard: --report names a file"]);
    assert_eq!(fs::read_to_string(dir.path().join("t.csv")).unwrap(), TRACE);
}
