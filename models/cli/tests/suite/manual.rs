//! Completions and manual pages.

use super::*;

#[test]
fn shells_get_completions() {
    for shell in ["bash", "elvish", "fish", "powershell", "zsh"] {
        let output = call(&["completions", shell]);
        assert!(output.status.success(), "{shell}");
        let text = String::from_utf8(output.stdout).unwrap();
        for word in ["devices", "memory-snapshot", "random-weights"] {
            assert!(text.contains(word), "{shell}: {word}");
        }
    }
}

#[test]
fn every_command_has_a_manual_page() {
    let output = call(&["man"]);
    let page = String::from_utf8(output.stdout).unwrap();
    assert!(page.contains(".TH leasehold 1") && page.contains(".SH SUBCOMMANDS"), "{page}");
    let folder = tempfile::tempdir().unwrap();
    assert!(call(&["man", folder.path().to_str().unwrap()]).status.success());
    for name in ["leasehold", "leasehold-run", "leasehold-bench-decode", "leasehold-man"] {
        let page = std::fs::read_to_string(folder.path().join(format!("{name}.1"))).unwrap();
        assert!(page.contains(&format!(".TH {name} 1")), "{name}: {page}");
        assert!(name == "leasehold" || page.contains("Examples:"), "{name}: {page}");
    }
    let output = call(&["man", "no/such/folder"]);
    assert_eq!(output.status.code(), Some(1));
    let text = String::from_utf8(output.stderr).unwrap();
    assert!(text.starts_with("leasehold: no/such/folder: "), "{text}");
}

/// Each option of `run` stands in a group, and the options of ranks stand together.
#[test]
fn the_help_of_run_has_groups() {
    let text = String::from_utf8(call(&["run", "--help"]).stdout).unwrap();
    let places: Vec<usize> = [
        "Model and text:",
        "--tokens",
        "Device and execution:",
        "--dtype",
        "Choice of tokens:",
        "--stop-at-eos",
        "Output:",
        "--trace",
        "\nRanks:",
        "--hosts",
        "--kill",
        "\nMemory:",
        "--memory-events",
        "\nOptions:\n  -h, --help",
    ]
    .iter()
    .map(|word| text.find(word).unwrap_or_else(|| panic!("{word:?} is not in {text}")))
    .collect();
    assert!(places[..13].is_sorted(), "{text}");
}
