//! Programs that must not compile.

#[path = "../../../core/tests/main/compiler.rs"]
mod compiler;

use std::path::Path;

#[test]
fn misuse_does_not_compile() {
    compiler::refuses(Path::new(env!("CARGO_MANIFEST_DIR")), "tests/compile_fail");
}
