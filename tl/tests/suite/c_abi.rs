//! The C ABI from other languages: the header, and C, C++ and LLVM IR programs against the shared
//! library.
//!
//! If a tool is missing, a test prints a message and passes. With `LEASEHOLD_REQUIRE_TOOLS`
//! (as `ci/all.sh` sets it) it fails.

use std::path::{Path, PathBuf};
use std::process::Command;

fn root() -> PathBuf {
    PathBuf::from(env!("CARGO_MANIFEST_DIR"))
}

/// The folder of the shared library, which is that of this test's executable.
fn library() -> PathBuf {
    let executable = std::env::current_exe().expect("a test has an executable");
    let deps = executable.parent().expect("it lies in a folder").to_path_buf();
    assert!(
        deps.join("libleasehold_memory.so").exists(),
        "no shared library in {}",
        deps.display()
    );
    deps
}

fn scratch(name: &str) -> PathBuf {
    let dir = PathBuf::from(env!("CARGO_TARGET_TMPDIR"));
    dir.join(format!("{name}-{}", std::process::id()))
}

/// A program without a sanitizer cannot load a library with one.
fn sanitized() -> bool {
    let sanitized = option_env!("RUSTFLAGS").is_some_and(|flags| flags.contains("sanitizer"));
    if sanitized {
        eprintln!("skipped: the library is built with a sanitizer");
    }
    sanitized
}

/// Returns whether the tool can be started. If not, prints a message, or fails if tools are
/// mandatory.
fn have(tool: &str) -> bool {
    let found = Command::new(tool).arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        assert!(
            std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none(),
            "{tool} is required and missing"
        );
        eprintln!("skipped: no {tool}");
    }
    found
}

fn succeed(command: &mut Command) {
    let output = command.output().expect("the tool starts");
    let (out, err) =
        (String::from_utf8_lossy(&output.stdout), String::from_utf8_lossy(&output.stderr));
    assert!(output.status.success(), "{command:?}: {}\n{out}{err}", output.status);
}

fn link(compiler: &str, input: &Path, output: &Path) -> Command {
    let lib = library();
    let mut command = Command::new(compiler);
    command.arg(input).arg("-o").arg(output).arg("-L").arg(&lib).arg("-lleasehold_memory");
    command.arg(format!("-Wl,-rpath,{}", lib.display()));
    command
}

#[test]
fn the_header_is_c11_and_cpp17() {
    let header = root().join("include/leasehold_memory.h");
    for (tool, std, language) in [("gcc", "-std=c11", "c"), ("g++", "-std=c++17", "c++")] {
        if have(tool) {
            let flags =
                ["-Wall", "-Wextra", "-Werror", "-pedantic", "-fsyntax-only", "-x", language];
            succeed(Command::new(tool).arg(std).args(flags).arg(&header));
        }
    }
}

/// Function names with their numbers of parameters, in a header and in the Rust source.
fn functions(text: &str, rust: bool) -> Vec<(String, usize)> {
    let mut found = Vec::new();
    let is_name = |c: char| c.is_ascii_alphanumeric() || c == '_';
    for (at, _) in text.match_indices("tl_") {
        let before = &text[..at];
        let name: String = text[at..].chars().take_while(|&c| is_name(c)).collect();
        let Some(rest) = text[at + name.len()..].strip_prefix('(') else { continue };
        let declares = if rust {
            before.ends_with("extern \"C\" fn ") || before.ends_with("    ") && rest.contains(" = ")
        } else {
            before.ends_with([' ', '*']) && !before.ends_with("  ") && !before.ends_with("* ")
        };
        let mut level = 1;
        let end = rest.find(|c| {
            level += i32::from(c == '(') - i32::from(c == ')');
            level == 0
        });
        let parameters = &rest[..end.unwrap_or(0)];
        let ends_declaration = rust || rest[parameters.len()..].starts_with(");");
        if !declares || !ends_declaration || before.ends_with(is_name) {
            continue;
        }
        let mut depth = 0;
        let commas = parameters.trim_end_matches([',', '\n', ' ']).chars().filter(|&c| {
            depth += i32::from("(<".contains(c)) - i32::from(")>".contains(c));
            c == ',' && depth == 0
        });
        let none = parameters.trim().is_empty() || parameters == "void";
        found.push((name, if none { 0 } else { commas.count() + 1 }));
    }
    found.sort();
    found.dedup();
    found
}

#[test]
fn the_header_declares_what_the_library_exports() {
    let header = std::fs::read_to_string(root().join("include/leasehold_memory.h")).unwrap();
    let source = std::fs::read_to_string(root().join("src/ffi.rs")).unwrap();
    let (declared, defined) = (functions(&header, false), functions(&source, true));
    assert_eq!(declared, defined);
    assert!(declared.len() >= 40, "{declared:?}");
    if have("nm") {
        let output = Command::new("nm")
            .args(["-D", "--defined-only"])
            .arg(library().join("libleasehold_memory.so"))
            .output();
        let symbols = String::from_utf8(output.unwrap().stdout).unwrap();
        let exported: Vec<_> = symbols.lines().filter_map(|l| l.split(" T ").nth(1)).collect();
        for (name, _) in &declared {
            assert!(exported.contains(&name.as_str()), "{name} is not exported");
        }
        let ours = exported.iter().filter(|s| s.starts_with("tl_"));
        assert_eq!(
            ours.count(),
            declared.len(),
            "something is exported that the header does not declare"
        );
    }
}

/// Runs a program under valgrind, if tools are mandatory.
fn check_memory(program: &Path, words: &[&str]) {
    if std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some() && have("valgrind") {
        let leaks =
            ["--leak-check=full", "--errors-for-leak-kinds=definite", "--show-leak-kinds=definite"];
        succeed(
            Command::new("valgrind")
                .args(["-q", "--error-exitcode=9"])
                .args(leaks)
                .arg(program)
                .args(words),
        );
    }
}

#[test]
fn c_programs_run_against_the_shared_library() {
    if sanitized() || !have("gcc") {
        return;
    }
    let source = root().join("tests/c/abi.c");
    for level in ["-O0", "-O2"] {
        let program = scratch(&format!("abi{level}"));
        let mut gcc = link("gcc", &source, &program);
        gcc.args(["-std=c11", level, "-Wall", "-Wextra", "-Werror", "-I"])
            .arg(root().join("include"));
        succeed(&mut gcc);
        succeed(&mut Command::new(&program));
        succeed(Command::new(&program).env("TL_MEM_QUARANTINE_BYTES", "0"));
        if level == "-O2" {
            check_memory(&program, &[]);
        }
        let _ = std::fs::remove_file(program);
    }
}

/// Builds `tests/c/NAME` (`.cpp`: as C++17) with `flags` against the shared library.
fn build(name: &str, flags: &[&str]) -> PathBuf {
    let source = root().join("tests/c").join(name);
    let (compiler, std) =
        if name.ends_with(".cpp") { ("g++", "-std=c++17") } else { ("gcc", "-std=gnu11") };
    static BUILT: leasehold_core::sync::atomic::AtomicU32 =
        leasehold_core::sync::atomic::AtomicU32::new(0);
    let number = BUILT.fetch_add(1, leasehold_core::sync::atomic::Ordering::Relaxed);
    let program = scratch(&format!("{name}-{number}"));
    let mut command = link(compiler, &source, &program);
    command
        .args([std, "-O1", "-g", "-Wall", "-Wextra", "-Werror", "-pthread", "-I"])
        .arg(root().join("include"));
    succeed(command.args(flags));
    program
}

/// Runs a program that `build` made, with the options of the address sanitizer.
fn run(program: &Path) -> Command {
    let mut command = Command::new(program);
    // The library's own blocks of threads that still exist at the end are not leaks.
    command.env(
        "ASAN_OPTIONS",
        "detect_leaks=0:allocator_may_return_null=1:max_allocation_size_mb=1024",
    );
    command
}

const ASAN: &[&str] = &["-fsanitize=address", "-fno-omit-frame-pointer"];

#[test]
fn a_tensor_that_dies_twice_is_described_and_destroyed_once() {
    if sanitized() || !have("gcc") {
        return;
    }
    for flags in [&[], ASAN] {
        let program = build("revive.c", flags);
        succeed(&mut run(&program));
        for bytes in ["0", "100"] {
            succeed(
                run(&program).env("TL_MEM_QUARANTINE_BYTES", bytes).env("TL_MEM_POOL_BYTES", "0"),
            );
        }
        let _ = std::fs::remove_file(program);
    }
}

#[test]
fn random_calls_of_threads_that_come_and_go() {
    if sanitized() || !have("gcc") {
        return;
    }
    for (flags, calls, seeds) in
        [(&[][..], "300000", ["1", "2", "3"]), (ASAN, "90000", ["4", "5", "6"])]
    {
        let program = build("fuzz.c", flags);
        for seed in seeds {
            succeed(run(&program).args([calls, "6", seed]));
        }
        let _ = std::fs::remove_file(program);
    }
}

#[test]
#[cfg(target_os = "linux")]
fn children_of_a_process_with_busy_threads_are_usable() {
    if sanitized() || !have("gcc") {
        return;
    }
    let program = build("forks.c", &[]);
    succeed(&mut run(&program));
    let _ = std::fs::remove_file(program);
}

/// Without memory no call has an effect, and none ends the process.
#[test]
#[cfg(target_os = "linux")]
fn no_memory_is_never_the_end() {
    if sanitized() || !have("gcc") {
        return;
    }
    let (allocator, program) = (scratch("oom.so"), build("oom.c", &["-ldl"]));
    let source = root().join("tests/c/oom.c");
    let mut gcc = Command::new("gcc");
    gcc.args(["-shared", "-fPIC", "-O1", "-fno-builtin", "-DPRELOAD", "-ldl", "-o"])
        .arg(&allocator)
        .arg(source);
    succeed(&mut gcc);
    succeed(run(&program).env("LD_PRELOAD", &allocator));
    let _ = (std::fs::remove_file(program), std::fs::remove_file(allocator));
}

#[test]
fn nothing_of_the_programs_is_called_when_a_thread_or_the_process_ends() {
    if sanitized() || !have("g++") {
        return;
    }
    for flags in [&[], ASAN] {
        let program = build("exit.cpp", flags);
        for word in ["return", "exit", "exit-in-thread", "thread", "close"] {
            for bytes in ["0", "1000"] {
                succeed(run(&program).arg(word).env("TL_MEM_QUARANTINE_BYTES", bytes));
            }
        }
        let _ = std::fs::remove_file(program);
    }
}

/// Repeated loading and closing of the library costs nothing, because the library stays loaded.
#[test]
#[cfg(target_os = "linux")]
fn closing_the_library_loses_nothing() {
    if sanitized() || !have("gcc") {
        return;
    }
    let program = build("dl.c", &["-ldl"]);
    succeed(run(&program).arg(library().join("libleasehold_memory.so")));
    let _ = std::fs::remove_file(program);
}

#[test]
fn frames_belong_to_who_uses_them() {
    if sanitized() || !have("gcc") {
        return;
    }
    for flags in [&["-O0"][..], &["-O2"], &["-O1", "-fsanitize=address"]] {
        let program = build("frames.c", flags);
        succeed(&mut run(&program));
        if flags == ["-O2"] {
            check_memory(&program, &[]);
        }
        let _ = std::fs::remove_file(program);
    }
}

/// A function may forget its frame again and again, in any form. What stays open is bounded.
#[test]
#[cfg(unix)]
fn forgotten_frames_do_not_pile_up() {
    if sanitized() || !have("gcc") {
        return;
    }
    for flags in [&["-O0", "-pthread"][..], &["-O2", "-pthread"]] {
        let program = build("forgotten.c", flags);
        succeed(&mut run(&program));
        let _ = std::fs::remove_file(program);
    }
}

/// A last call becomes a jump. A function's exit then must not end the frame of its caller.
#[test]
#[cfg(unix)]
fn an_exit_by_a_jump_ends_no_other_frame() {
    if sanitized() || !have("gcc") {
        return;
    }
    for flags in [&["-O0"][..], &["-O2"], &["-O2", "-DPLAIN"]] {
        let program = build("jumps.c", flags);
        succeed(&mut run(&program));
        let _ = std::fs::remove_file(program);
    }
}

/// An exception that leaves a destructor ends the process, as the header says, because the
/// interrupted operation cannot continue.
#[test]
#[cfg(unix)]
fn an_exception_out_of_a_destructor_ends_the_process() {
    use std::os::unix::process::ExitStatusExt;
    if sanitized() || !have("g++") {
        return;
    }
    let program = build("throw.cpp", &[]);
    let caught = run(&program).arg("inside").output().expect("the program starts");
    assert!(caught.status.success(), "{caught:?}");
    let thrown = run(&program).arg("out").output().expect("the program starts");
    assert_eq!(thrown.status.signal(), Some(libc::SIGABRT), "{thrown:?}");
    let _ = std::fs::remove_file(program);
}

#[test]
fn ir_programs_run_against_the_shared_library() {
    if sanitized() {
        return;
    }
    let compiled = have("llc") && have("gcc");
    // Any interpreter that can import llvmlite; `ci/test.sh` makes one.
    let python = std::env::var("LEASEHOLD_LLVMLITE_PYTHON").unwrap_or_else(|_| "python3".into());
    let jit = Command::new(&python)
        .args(["-c", "import llvmlite"])
        .output()
        .is_ok_and(|o| o.status.success());
    assert!(
        jit || std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none(),
        "llvmlite is required and missing"
    );
    if !jit {
        eprintln!("skipped the JIT: no llvmlite");
    }
    for (name, right_without_quarantine) in [("halves", false), ("frames", true)] {
        let source = root().join(format!("tests/ir/{name}.ll"));
        let mut programs = Vec::new();
        let (object, program) = (scratch(name).with_extension("o"), scratch(name));
        if compiled {
            let llc = |flags: &[&str]| {
                let pic = ["-filetype=obj", "-relocation-model=pic"];
                Command::new("llc")
                    .args(flags)
                    .args(pic)
                    .arg(&source)
                    .arg("-o")
                    .arg(&object)
                    .output()
            };
            // LLVM 14 needs an option for opaque pointers; later versions have only these.
            if !llc(&[]).is_ok_and(|o| o.status.success()) {
                let output = llc(&["-opaque-pointers"]).unwrap();
                assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
            }
            succeed(&mut link("gcc", &object, &program));
            programs.push(vec![program.clone().into_os_string()]);
        }
        if jit {
            let script = root().join("tests/ir/jit.py").into_os_string();
            let library = library().join("libleasehold_memory.so").into_os_string();
            programs.push(vec![
                python.clone().into(),
                script,
                library,
                source.clone().into_os_string(),
            ]);
        }
        for command in programs {
            succeed(Command::new(&command[0]).args(&command[1..]));
            // The test can detect the defect: with the quarantine off, the result is wrong.
            let plain = Command::new(&command[0])
                .args(&command[1..])
                .env("TL_MEM_QUARANTINE_BYTES", "0")
                .status();
            assert_eq!(
                plain.unwrap().success(),
                right_without_quarantine,
                "{command:?} without quarantine"
            );
        }
        let _ = (std::fs::remove_file(object), std::fs::remove_file(program));
    }
}

#[test]
fn the_log_has_a_line_per_event() {
    if sanitized() || !have("gcc") {
        return;
    }
    let (program, log) = (scratch("log"), scratch("log.txt"));
    let mut gcc = link("gcc", &root().join("tests/c/abi.c"), &program);
    succeed(gcc.args(["-std=c11", "-I"]).arg(root().join("include")));
    succeed(Command::new(&program).env("TL_MEM_LOG", &log));
    let text = std::fs::read_to_string(&log).unwrap();
    for line in text.lines() {
        let fields: Vec<_> = line.split(' ').collect();
        assert!(
            fields[0] == "tlmem" && fields[1].starts_with("ns=") && fields[4].starts_with("op="),
            "{line}"
        );
    }
    for op in [
        "enter_scope",
        "function_enter",
        "register kind=Struct",
        "quarantine",
        "frame_repaired",
        "thread_exit",
    ] {
        assert!(text.contains(&format!("op={op} ")), "no {op} in the log");
    }
    let _ = (std::fs::remove_file(program), std::fs::remove_file(log));
}
