//! Tests of the reason why a library cannot be loaded.

use super::*;

#[test]
fn what_is_missing_is_told_from_what_it_needs() {
    let name = "libcuda.so.1";
    for text in [
        "libcuda.so.1: cannot open shared object file: No such file or directory",
        "Error loading shared library libcuda.so.1: No such file or directory",
    ] {
        assert!(is_absent(name, text), "{text}");
    }
    for text in [
        "libmissing.so: cannot open shared object file: No such file or directory",
        "Error loading shared library libmissing.so: No such file or directory (needed by ./libcuda.so.1)",
        "./libcuda.so.1: file too short",
        "libcuda.so.1: wrong ELF class: ELFCLASS32",
    ] {
        assert!(!is_absent(name, text), "{text}");
    }
    assert_eq!(refusal(["libleasehold-is-not-there.so".to_owned()]), None);
}
