//! Invalid input: one line on standard error that names the problem and its place, and the right
//! exit status.

use super::*;

#[test]
fn command_lines_that_make_no_sense() {
    let names = "write one of cpu:0, cuda:0, mps:0, sim:0";
    fails(&["replay", "t.csv", "--device", "gpu"], 2, &[&format!("{names}, or `virtual`\n")]);
    fails(&["bench", "graph", "--nodes", "0"], 2, &["--nodes"]);
    fails(&["conformance", "--filter", "999"], 2, &["999", "no such case"]);
    fails(&["conformance", "--filter", "71"], 2, &["71", "another process"]);
    fails(&["conformance", "--sim"], 2, &["--sim"]);
    fails(&["repla"], 2, &["'replay'", "; try 'leasehold-workbench --help'\n"]);
}

#[test]
fn a_command_that_wants_another_word_shows_its_help() {
    for (arguments, word) in [(&[][..], "conformance"), (&["bench"], "alloc")] {
        let output = call(arguments);
        assert_eq!(output.status.code(), Some(2), "{arguments:?}");
        assert!(output.stdout.is_empty(), "{arguments:?}");
        let text = String::from_utf8(output.stderr).unwrap();
        assert!(text.contains("Usage: leasehold-workbench") && text.contains(word), "{text}");
    }
}

#[test]
fn devices_that_are_not_there() {
    fails(&["conformance", "--device", "cuda:0"], 1, &["cuda:0"]);
    fails(&["conformance", "--device", "cpu:7"], 1, &["cpu:7"]);
}
