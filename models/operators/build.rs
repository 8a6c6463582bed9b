//! Unpacks the images of `kernels.lock` into `OUT_DIR`, and writes a module for each source.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs::{self, File};
use std::io::BufReader;
use std::path::PathBuf;

fn main() {
    println!("cargo::rerun-if-changed=kernels.lock");
    println!("cargo::rerun-if-changed=images");
    let out = PathBuf::from(std::env::var_os("OUT_DIR").expect("cargo sets OUT_DIR"));
    let lock = fs::read_to_string("kernels.lock").expect("kernels.lock");
    // By source: the architectures.
    let mut sources = BTreeMap::<&str, Vec<&str>>::new();
    for line in lock.lines() {
        let mut words = line.split(' ');
        let (Some(name), Some(architecture)) = (words.next(), words.next()) else {
            panic!("kernels.lock: `{line}` names no image");
        };
        sources.entry(name).or_default().push(architecture);
        let path = format!("images/{name}.{architecture}.xz");
        let packed = File::open(&path).unwrap_or_else(|error| panic!("{path}: {error}"));
        let mut image = Vec::new();
        if let Err(error) = lzma_rs::xz_decompress(&mut BufReader::new(packed), &mut image) {
            panic!("{path} is damaged: {error}");
        }
        fs::write(out.join(format!("{name}.{architecture}")), image).expect("a file in OUT_DIR");
    }
    let mut code = String::new();
    for (name, architectures) in sources {
        let _ = writeln!(code, "/// The images of `{name}.cu`.\npub mod {name} {{");
        for architecture in &architectures {
            let file = format!("concat!(env!(\"OUT_DIR\"), \"/{name}.{architecture}\")");
            let _ = if architecture.starts_with("compute_") {
                writeln!(
                    code,
                    "    /// PTX for `{architecture}` and later.\n    pub static PTX: &str = include_str!({file});"
                )
            } else {
                let constant = architecture.to_uppercase();
                writeln!(
                    code,
                    "    /// Machine code for `{architecture}`.\n    pub static {constant}: &[u8] = include_bytes!({file});"
                )
            };
        }
        if !architectures.iter().any(|name| name.starts_with("compute_")) {
            code.push_str("    /// Empty: one architecture alone has the instructions.\n");
            code.push_str("    pub static PTX: &str = \"\";\n");
        }
        code.push_str("}\n");
    }
    fs::write(out.join("images.rs"), code).expect("a file in OUT_DIR");
}
