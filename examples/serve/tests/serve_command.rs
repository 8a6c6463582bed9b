//! The command, which `ci/serve.sh` takes from this test's build.

use std::process::Command;

#[test]
fn a_directory_without_a_model_is_an_error_that_names_it() {
    let mut command = Command::new(env!("CARGO_BIN_EXE_leasehold-serve"));
    let output = command.args(["--model", "no-such-model"]).output().unwrap();
    let why = String::from_utf8(output.stderr).unwrap();
    assert_eq!(output.status.code(), Some(1), "{why}");
    assert!(why.contains("no-such-model"), "{why}");
}
