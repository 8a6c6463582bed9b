//! The page of a replay replaces no trace.

use super::*;
use std::fs;
use std::os::unix::fs::symlink;

const TRACE: &str = "t_us,op,id,size,stream\n0,a,1,100,0\n1,a,2,5000,1\n2,f,1,100,0\n";

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
        refused(&bounded_within(dir.path(), &["replay", input, "--report", output]), 2, &words);
    }
    let input = fs::File::open(dir.path().join("t.csv")).unwrap();
    let mut command = within(dir.path(), &["replay", "-", "--report", "hard"]);
    refused(&command.stdin(input).output().unwrap(), 2, &["hard: --report names a file"]);
    assert_eq!(fs::read_to_string(dir.path().join("t.csv")).unwrap(), TRACE);
}
