//! The header: C11 and C++17, with the functions and structs of the source, and the example in C.
//!
//! If a tool is missing, a test prints a message and passes. With `LEASEHOLD_REQUIRE_TOOLS` it
//! fails.

use leasehold_capi::ffi::*;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the shared library, which is that of this test's executable.
fn library() -> PathBuf {
    let executable = std::env::current_exe().expect("a test has an executable");
    executable.parent().expect("it lies in a folder").to_path_buf()
}

/// Returns whether the tool can be started.
fn have(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        let required = std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some();
        assert!(!required, "{tool} is required and missing");
        eprintln!("skipped: no {tool}");
    }
    found
}

fn succeed(command: &mut Command) -> Output {
    let output = command.output().expect("the tool starts");
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
    let (out, err) = (text(&output.stdout), text(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
    output
}

fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    dir.join(format!("capi-{name}-{}", std::process::id()))
}

/// Compiles and links a program against the shared library.
fn build(compiler: &str, flags: &[&str], source: &Path, name: &str) -> PathBuf {
    let (program, lib) = (scratch(name), library());
    let mut command = Command::new(compiler);
    command.args(flags).args(["-Wall", "-Wextra", "-Werror", "-pedantic", "-g", "-DLEASEHOLD_SIM"]);
    command.arg(source).arg("-I").arg(root().join("include")).arg("-o").arg(&program);
    command.arg("-L").arg(&lib).arg("-lleasehold_capi");
    succeed(command.arg(format!("-Wl,-rpath,{}", lib.display())));
    program
}

#[test]
fn the_header_is_c11_and_cpp17() {
    let header = root().join("include/leasehold.h");
    for (tool, std, language) in [("gcc", "-std=c11", "c"), ("g++", "-std=c++17", "c++")] {
        if have(tool) {
            let flags = ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-x"];
            for more in [[].as_slice(), &["-DLEASEHOLD_SIM"]] {
                let mut command = Command::new(tool);
                command.arg(std).args(flags).arg(language).args(more).arg(&header);
                succeed(&mut command);
            }
        }
    }
}

/// Names of functions with their numbers of parameters. `opens`: the text before a name.
fn functions(text: &str, opens: &str) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    for (at, _) in text.match_indices("leasehold_") {
        let rest = &text[at..];
        let name: String =
            rest.chars().take_while(|c| c.is_ascii_alphanumeric() || *c == '_').collect();
        let Some(parameters) = rest[name.len()..].strip_prefix('(') else { continue };
        let line = text[..at].rsplit('\n').next().unwrap_or("");
        let declares = if opens.is_empty() {
            // A declaration begins its line with a type.
            !line.is_empty() && !line.contains(['(', '*', '/', ',', '.'])
                || line == "void *"
                || line == "const char *"
        } else {
            line.ends_with(opens)
        };
        if !declares || line.starts_with([' ', '#']) && opens.is_empty() {
            continue;
        }
        let mut depth = 0;
        let end = parameters.find(|c| {
            depth += i32::from("(<".contains(c)) - i32::from(")>".contains(c));
            depth < 0
        });
        let parameters = parameters[..end.unwrap_or(0)].trim().trim_end_matches(',');
        let mut depth = 0;
        let commas = parameters.chars().filter(|&c| {
            depth += i32::from("(<".contains(c)) - i32::from(")>".contains(c));
            c == ',' && depth == 0
        });
        let none = parameters.is_empty() || parameters == "void";
        found.push((name, if none { 0 } else { commas.count() + 1 }));
    }
    found.sort();
    found.dedup();
    found
}

#[test]
fn the_header_declares_what_the_library_exports() {
    let header = std::fs::read_to_string(root().join("include/leasehold.h")).unwrap();
    let source: String = ["ffi", "plugin", "sim"]
        .map(|file| std::fs::read_to_string(root().join(format!("src/{file}.rs"))).unwrap())
        .concat()
        .replace("extern \"C-unwind\" fn", "extern \"C\" fn");
    let declared = functions(&header, "");
    assert_eq!(declared, functions(&source, "extern \"C\" fn "));
    assert!(declared.len() >= 35, "{declared:?}");
    let library = library().join("libleasehold_capi.so");
    if library.exists() && have("nm") {
        let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output();
        let symbols = String::from_utf8(output.unwrap().stdout).unwrap();
        let exported: Vec<_> = symbols
            .lines()
            .filter_map(|line| line.split(" T ").nth(1))
            .filter(|name| name.starts_with("leasehold_"))
            .collect();
        let names: Vec<_> = declared.iter().map(|f| f.0.as_str()).collect();
        assert_eq!(exported, names);
    }
}

/// Each struct's size and the place of its last field, as Rust and C see them.
#[test]
fn structs_have_one_layout() {
    if !have("gcc") || !library().join("libleasehold_capi.so").exists() {
        return;
    }
    macro_rules! layouts {
        ($($rust:ident $c:ident $last:ident),* $(,)?) => {
            [$((
                stringify!($c),
                stringify!($last),
                size_of::<$rust>(),
                std::mem::offset_of!($rust, $last),
            )),*]
        };
    }
    let layouts = layouts! {
        LeaseholdDeviceOptions leasehold_device_options trace_events,
        LeaseholdDeviceInfo leasehold_device_info name,
        LeaseholdStats leasehold_stats metadata_bytes,
        LeaseholdBlock leasehold_block expandable,
        LeaseholdPoolOptions leasehold_pool_options flags,
    };
    let mut text = "#include \"leasehold.h\"\n#include <stddef.h>\n".to_owned();
    for (name, last, size, offset) in layouts {
        text += &format!(
            "_Static_assert(sizeof({name}) == {size} && offsetof({name}, {last}) == {offset}, \"{name}\");\n"
        );
    }
    let source = scratch("layout").with_extension("c");
    std::fs::write(&source, text + "int main(void) { return 0; }\n").unwrap();
    build("gcc", &["-std=c11"], &source, "layout");
}

/// The example, on the CPU and on a simulated device, and under valgrind where tools are mandatory.
#[test]
fn the_example_runs() {
    if !have("gcc") || !library().join("libleasehold_capi.so").exists() {
        return;
    }
    let source = root().join("../../examples/c/allocator.c");
    let program = build("gcc", &["-std=c11"], &source, "example");
    for device in ["cpu:0", "sim-cuda:0"] {
        let output = succeed(Command::new(&program).arg(device));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.trim_end().ends_with("ok"), "{text}");
    }
    if std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some() && have("valgrind") {
        let flags = ["--quiet", "--error-exitcode=9", "--leak-check=full"];
        let kinds = ["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"];
        succeed(Command::new("valgrind").args(flags).args(kinds).arg(&program).arg("cpu:0"));
    }
    if have("g++") {
        for name in ["extension", "plugin"] {
            let source = root().join(format!("tests/c/{name}.cpp"));
            succeed(&mut Command::new(build("g++", &["-std=c++17"], &source, name)));
        }
    }
}
