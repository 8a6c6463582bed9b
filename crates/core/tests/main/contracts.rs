//! Checks that the table of contracts names existing tests.

use std::path::Path;

/// Returns whether a file of `folder`, named by the path's first part, has the function.
fn has_test(folder: &Path, path: &str) -> bool {
    let Some((module, name)) = path.split_once("::") else { return false };
    let file = folder.join(module).with_extension("rs");
    std::fs::read_to_string(file).is_ok_and(|text| text.contains(&format!("fn {name}(")))
}

fn any_file_has(folder: &Path, what: &str) -> bool {
    std::fs::read_dir(folder).expect("a folder of the crate").flatten().any(|entry| {
        let path = entry.path();
        if path.is_dir() {
            any_file_has(&path, what)
        } else {
            std::fs::read_to_string(&path).is_ok_and(|text| text.contains(what))
        }
    })
}

#[test]
fn every_promise_is_held_by_something_that_exists() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR"));
    let page = include_str!("../../src/contracts.md");
    let (mut promises, mut names) = (0, 0);
    for row in page.lines().filter(|line| line.starts_with("| ") && !line.starts_with("| promise"))
    {
        promises += 1;
        let held_by = row.trim_end_matches(['|', ' ']).rsplit(" | ").next().expect("a last column");
        assert!(!held_by.is_empty(), "nothing holds: {row}");
        for name in held_by.split('`').skip(1).step_by(2) {
            let exists = if let Some(model) = name.strip_prefix("loom ") {
                has_test(&root.join("tests/loom"), model)
            } else if let Some(program) = name.strip_prefix("compile_fail ") {
                root.join("tests/compile_fail").join(program).with_extension("stderr").is_file()
            } else if let Some(unit) = name.strip_prefix("unit ") {
                ["src", "tests/unit"]
                    .iter()
                    .any(|d| any_file_has(&root.join(d), &format!("fn {unit}(")))
            } else if name.starts_with(char::is_lowercase) && name.contains("::") {
                has_test(&root.join("tests/main"), name)
            } else {
                continue;
            };
            assert!(exists, "{name} does not exist");
            names += 1;
        }
    }
    assert!(promises >= 45 && names >= 100, "{promises} promises, {names} names");
}
