//! Output files: refused before the work if they cannot be written or are in use, and written
//! completely or not at all.

use super::*;
use std::fs;
use std::io::Read;
use std::os::unix::fs::{PermissionsExt, symlink};
use std::path::Path;
use std::process::{Command, Output, Stdio};

const RUN: [&str; 4] = ["run", "--tokens", "2", "--json"];
const FLAGS: [&str; 4] = ["--report", "--trace", "--memory-trace", "--memory-snapshot"];

#[track_caller]
fn worked(output: &Output) {
    assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
}

fn folder() -> tempfile::TempDir {
    tempfile::tempdir().unwrap()
}

fn fifo(dir: &Path) {
    assert!(Command::new("mkfifo").arg(dir.join("fifo")).status().unwrap().success());
}

fn names(dir: &Path) -> Vec<String> {
    let mut all: Vec<_> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    all.sort();
    all
}

#[test]
fn a_pipe_that_nobody_reads_is_refused_at_once() {
    let dir = folder();
    fifo(dir.path());
    let words = ["fifo: a pipe that nobody reads; start its reader first"];
    for flag in FLAGS {
        refused(&bounded_within(dir.path(), &[&RUN[..], &[flag, "fifo"]].concat()), 1, &words);
    }
    refused(
        &bounded_within(dir.path(), &["run", "--tokens", "2", "--json", "--report", "fifo"]),
        1,
        &words,
    );
}

#[test]
fn a_pipe_with_a_reader_gets_everything_once() {
    let dir = folder();
    fifo(dir.path());
    for (arguments, begin) in [
        (&["run", "--tokens", "2", "--json", "--report", "fifo"][..], "<!DOCTYPE html>"),
        (&["run", "--tokens", "2", "--json", "--memory-trace", "fifo"], "t_us,op,id,size,stream\n"),
        (&["run", "--tokens", "2", "--json", "--trace", "fifo"], "{"),
    ] {
        let reader = Command::new("cat")
            .arg("fifo")
            .current_dir(dir.path())
            .stdout(Stdio::piped())
            .spawn()
            .unwrap();
        // The reader may not have opened the pipe yet.
        let mut output = bounded_within(dir.path(), arguments);
        while String::from_utf8_lossy(&output.stderr).contains("nobody reads") {
            output = bounded_within(dir.path(), arguments);
        }
        worked(&output);
        let text = String::from_utf8(reader.wait_with_output().unwrap().stdout).unwrap();
        assert!(text.starts_with(begin) && text.len() > 60, "{text}");
        // A writer that does not wait would leave a large page cut off.
        assert!(begin != "<!DOCTYPE html>" || text.trim_end().ends_with("</html>"), "{text}");
    }
}

#[test]
fn descriptors_of_the_process_are_written_through() {
    let dir = folder();
    let shell = |script: &str| {
        let script = format!("L={}; {script}", env!("CARGO_BIN_EXE_leasehold"));
        let output = Command::new("bash").args(["-c", &script]).current_dir(dir.path()).output();
        let output = output.unwrap();
        worked(&output);
        String::from_utf8(output.stdout).unwrap()
    };
    // A pipe, a file, and a file by another descriptor.
    let both = shell("$L run --tokens 2 --json --report /dev/stdout | cat");
    assert!(both.starts_with("<!DOCTYPE html>") && both.contains("\"output_ids\""));
    shell("$L run --tokens 2 --json --report /dev/stdout > both");
    assert_eq!(
        fs::read_to_string(dir.path().join("both")).unwrap().lines().count(),
        both.lines().count()
    );
    shell("$L run --tokens 2 --json --report /dev/fd/3 3> page > table");
    let read = |name| fs::read_to_string(dir.path().join(name)).unwrap();
    assert!(read("page").starts_with("<!DOCTYPE html>") && read("table").starts_with('{'));
    let page = shell("$L run --tokens 2 --json --report /dev/fd/3 3>&1 >/dev/null | cat");
    assert!(page.trim_end().ends_with("</html>"));
    worked(&bounded_within(
        dir.path(),
        &["run", "--tokens", "2", "--json", "--report", "/dev/null"],
    ));
    // The file of standard output under its name would be written twice.
    let to = fs::File::create(dir.path().join("out")).unwrap();
    let mut command = within(dir.path(), &["run", "--tokens", "2", "--json", "--report", "out"]);
    let output = command.stdout(to).stderr(Stdio::piped()).spawn().unwrap().wait_with_output();
    refused(&output.unwrap(), 2, &["out: --report names the file of standard output"]);
}

#[test]
fn no_output_replaces_an_input() {
    let dir = folder();
    // The files of a model, also those that are links to a store.
    let from = super::repository("models/llama/tests/models/untied-head");
    fs::create_dir(dir.path().join("model")).unwrap();
    fs::create_dir(dir.path().join("store")).unwrap();
    for file in ["config.json", "model.safetensors", "tokenizer.json"] {
        fs::copy(from.join(file), dir.path().join("store").join(file)).unwrap();
        symlink(format!("../store/{file}"), dir.path().join("model").join(file)).unwrap();
    }
    let run = ["run", "--model", "model", "--prompt-ids", "1,2", "--tokens", "2", "--json"];
    for (flag, file) in FLAGS.into_iter().zip([
        "model/config.json",
        "store/model.safetensors",
        "model/../store/tokenizer.json",
        "store/config.json",
    ]) {
        let before = fs::read(dir.path().join(file)).unwrap();
        let output = bounded_within(dir.path(), &[&run[..], &[flag, file]].concat());
        refused(&output, 2, &[file, flag, "names a file that this command reads"]);
        assert_eq!(fs::read(dir.path().join(file)).unwrap(), before);
    }
    // A new file among them is none of them.
    worked(&bounded_within(dir.path(), &[&run[..], &["--report", "model/r.html"]].concat()));
}

#[test]
fn two_outputs_are_two_files() {
    let dir = folder();
    fs::write(dir.path().join("a"), "old").unwrap();
    fs::hard_link(dir.path().join("a"), dir.path().join("b")).unwrap();
    for (one, two) in [("a", "a"), ("a", "b"), ("new", "./new"), ("new", "new/")] {
        for (first, second) in [("--report", "--trace"), ("--memory-trace", "--memory-snapshot")] {
            let output =
                bounded_within(dir.path(), &[&RUN[..], &[first, one, second, two]].concat());
            refused(&output, 2, &[first, second, "name two files"]);
        }
    }
    assert_eq!(names(dir.path()), ["a", "b"]);
    assert_eq!(fs::read_to_string(dir.path().join("a")).unwrap(), "old");
    // Several may go to one device.
    let all: Vec<_> = FLAGS.iter().flat_map(|flag| [*flag, "/dev/null"]).collect();
    worked(&bounded_within(dir.path(), &[&RUN[..], &all].concat()));
}

#[test]
fn a_run_that_fails_leaves_the_files_as_they_were() {
    let dir = folder();
    fs::write(dir.path().join("r.html"), "old").unwrap();
    fs::set_permissions(dir.path().join("r.html"), fs::Permissions::from_mode(0o640)).unwrap();
    let ids = [&RUN[..], &["--prompt-ids", "99999", "--report", "r.html"]].concat();
    refused(&bounded_within(dir.path(), &ids), 1, &["vocabulary"]);
    assert_eq!(fs::read_to_string(dir.path().join("r.html")).unwrap(), "old");
    // A file that is replaced keeps its mode, and a name may be as long as names are.
    worked(&bounded_within(dir.path(), &["run", "--tokens", "2", "--json", "--report", "r.html"]));
    assert!(fs::read_to_string(dir.path().join("r.html")).unwrap().starts_with("<!DOCTYPE"));
    let mode = fs::metadata(dir.path().join("r.html")).unwrap().permissions().mode();
    assert_eq!(mode & 0o777, 0o640);
    let long = "x".repeat(255);
    worked(&bounded_within(dir.path(), &["run", "--tokens", "2", "--json", "--report", &long]));
    assert_eq!(names(dir.path()), ["r.html", &long]);
}

#[test]
fn nothing_is_printed_before_the_request_is_known_to_be_right() {
    let dir = folder();
    let run = ["run", "--prompt-ids", "1,2"];
    let long = vec!["1"; 1100].join(",");
    for (arguments, words) in [
        (&["--tokens", "2000"][..], &["2 tokens and 2000 new ones", "1024"][..]),
        (&["--tokens", "4294967295"], &["4294967295 new ones"]),
        (&["--tokens", "3", "--device", "cpu:7"], &["cpu:7"]),
        (&["--tokens", "3", "--trace", "no/such/folder"], &["no/such/folder"]),
    ] {
        refused(&bounded_within(dir.path(), &[&run[..], arguments].concat()), 1, words);
    }
    for (ids, words) in [("4096", "vocabulary"), (&*long, "1100 tokens")] {
        refused(&bounded_within(dir.path(), &["run", "--prompt-ids", ids]), 1, &[words]);
    }
    refused(&bounded_within(dir.path(), &["run", "--prompt", ""]), 1, &["empty"]);
}

/// The reader of standard output leaves: the generation ends, instead of running to its end.
#[test]
fn a_reader_that_leaves_ends_the_generation() {
    let dir = folder();
    let mut child = command()
        .args(["run", "--tokens", "1000", "--mode", "eager"])
        .current_dir(dir.path())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut first = [0; 4];
    child.stdout.take().unwrap().read_exact(&mut first).unwrap();
    let output = child.wait_with_output().unwrap();
    refused(&output, 1, &["standard output: Broken pipe"]);
}
