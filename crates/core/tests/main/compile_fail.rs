//! Programs that must not compile. The messages are those of one compiler; with another compiler
//! the test says so and does nothing.

const PINNED: &str = "rustc 1.95.";

#[test]
fn misuse_does_not_compile() {
    let rustc = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = std::process::Command::new(rustc)
        .arg("--version")
        .output()
        .map(|o| o.stdout)
        .unwrap_or_default();
    let version = String::from_utf8_lossy(&version);
    if !version.starts_with(PINNED) || std::env::var_os("LEASEHOLD_NO_COMPILE_FAIL").is_some() {
        eprintln!("skipped: the messages are those of {PINNED}x, this is {version}");
        return;
    }
    trybuild::TestCases::new().compile_fail("tests/compile_fail/*.rs");
}
