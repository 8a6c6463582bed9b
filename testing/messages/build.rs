//! Empty libraries in the place of the runtime and of Foundation, whose functions this package
//! defines.

use std::path::PathBuf;
use std::{env, fs};

fn main() {
    let out = PathBuf::from(env::var_os("OUT_DIR").expect("cargo names a folder"));
    for name in ["libobjc.a", "libgnustep-base.a"] {
        fs::write(out.join(name), b"!<arch>\n").expect("an empty archive");
    }
    println!("cargo:rustc-link-search=native={}", out.display());
    println!("cargo:rerun-if-changed=build.rs");
}
