//! The header: C11 and C++17, with the functions and structs of the source, and the example in C.
//!
//! If a tool is missing, a test prints a message and passes. With `LEASEHOLD_REQUIRE_TOOLS` it
//! fails.

use leasehold::kernel::TensorMap;
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
    // Cargo names another folder first, in which an older build's library may lie.
    let output = command.env_remove("LD_LIBRARY_PATH").output().expect("the tool starts");
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
    command.args(flags).args(["-Wall", "-Wextra", "-Wshadow", "-Werror", "-pedantic", "-g"]);
    command.arg("-DLEASEHOLD_SIM");
    command.arg(source).arg("-I").arg(root().join("include")).arg("-o").arg(&program);
    command.arg("-L").arg(&lib).arg("-lleasehold_capi_sim");
    succeed(command.arg(format!("-Wl,-rpath,{}", lib.display())));
    program
}

/// The headers of C.
const HEADERS: [&str; 2] = ["include/leasehold.h", "include/leasehold_runtime.h"];

/// The texts of both headers.
fn headers() -> String {
    HEADERS.map(|header| std::fs::read_to_string(root().join(header)).unwrap()).concat()
}

#[test]
fn the_headers_are_c11_and_cpp17() {
    let languages = [("gcc", "clang", "-std=c11", "c"), ("g++", "clang++", "-std=c++17", "c++")];
    for (one, other, std, language) in languages {
        for tool in [one, other].into_iter().filter(|tool| have(tool)) {
            let flags =
                ["-Wall", "-Wextra", "-Wshadow", "-Werror", "-pedantic", "-fsyntax-only", "-x"];
            let cpp = (language == "c++").then_some("include/leasehold.hpp");
            for header in HEADERS.into_iter().chain(cpp) {
                for more in [[].as_slice(), &["-DLEASEHOLD_SIM"]] {
                    let mut command = Command::new(tool);
                    command.arg(std).args(flags).arg(language).args(more);
                    succeed(command.arg(root().join(header)));
                }
            }
        }
    }
}

/// The source of the ABI, without documentation.
fn source() -> String {
    let read = |file: PathBuf| std::fs::read_to_string(file).unwrap();
    let files =
        ["src/plugin.rs", "../../testing/capi-sim/src/lib.rs", "src/status.rs", "src/callback.rs"];
    let rooms = std::fs::read_dir(root().join("src/ffi")).unwrap().map(|room| room.unwrap().path());
    let text: String =
        files.map(|file| root().join(file)).into_iter().chain(rooms).map(read).collect();
    let code = text.lines().filter(|line| !line.trim_start().starts_with("//"));
    code.collect::<Vec<_>>().join("\n").replace("\"C-unwind\"", "\"C\"")
}

/// The parts of a text between commas that no bracket encloses.
fn split(text: &str) -> Vec<&str> {
    let (mut parts, mut depth, mut from) = (Vec::new(), 0, 0);
    for (at, c) in text.char_indices() {
        depth += i32::from("(<[".contains(c)) - i32::from(")]".contains(c));
        // The arrow of a function's type closes nothing.
        depth -= i32::from(c == '>' && !text[..at].ends_with('-'));
        if c == ',' && depth == 0 {
            parts.push(text[from..at].trim());
            from = at + 1;
        }
    }
    parts.push(text[from..].trim());
    parts.retain(|part| !part.is_empty());
    parts
}

/// The parameters' types and the result's of a text that begins behind the opening bracket.
fn signature<'a>(text: &'a str, end: &str) -> (Vec<&'a str>, &'a str) {
    let mut depth = 1;
    let close = text.find(|c| {
        depth += i32::from(c == '(') - i32::from(c == ')');
        depth == 0
    });
    let (parameters, rest) = text.split_at(close.expect("the bracket is closed"));
    let types = split(parameters).into_iter().map(|p| p.split_once(": ").map_or(p, |(_, t)| t));
    let result = rest[1..].split(end).next().unwrap().trim();
    (types.collect(), result.strip_prefix("-> ").unwrap_or("()"))
}

/// The type of C with the layout of a type of the source.
fn c_type(source: &str, rust: &str) -> String {
    let c = |rust: &str| c_type(source, rust.trim());
    if let Some(to) = rust.strip_prefix("*const ") {
        return c(to) + " const *";
    }
    if let Some(to) = rust.strip_prefix("*mut ") {
        return c(to) + " *";
    }
    if let Some(inner) = rust.strip_prefix("Option<").and_then(|t| t.strip_suffix('>')) {
        return c(inner);
    }
    if let Some(function) = rust.strip_prefix("unsafe extern \"C\" fn(") {
        let (parameters, result) = signature(function, ";");
        let parameters: Vec<_> = parameters.into_iter().map(c).collect();
        return format!("__typeof__({} (*)({}))", c(result), parameters.join(", "));
    }
    if let Some((_, alias)) = source.split_once(&format!("pub type {rust} =")) {
        return c(alias.split(';').next().unwrap());
    }
    let plain = match rust {
        "()" | "c_void" => "void",
        "c_char" => "char",
        "c_int" => "int",
        "i32" => "int32_t",
        "u8" => "uint8_t",
        "u32" => "uint32_t",
        "u64" => "uint64_t",
        "usize" => "size_t",
        "isize" => "ptrdiff_t",
        // A struct: its name in C.
        other => return snake(other),
    };
    plain.to_owned()
}

/// `LeaseholdDeviceInfo` as `leasehold_device_info`.
fn snake(name: &str) -> String {
    let words = name.chars().flat_map(|c| {
        let begins = c.is_ascii_uppercase().then_some('_');
        begins.into_iter().chain([c.to_ascii_lowercase()])
    });
    words.skip(1).collect()
}

/// The functions of the source by name, as prototypes of C.
fn prototypes(source: &str) -> Vec<(String, String)> {
    let mut found = Vec::new();
    for (_, text) in
        source.match_indices("extern \"C\" fn ").map(|(at, m)| source.split_at(at + m.len()))
    {
        let (name, rest) = text.split_once('(').unwrap();
        let (parameters, result) = signature(rest, "{");
        let parameters: Vec<_> = parameters.into_iter().map(|p| c_type(source, p)).collect();
        let parameters = if parameters.is_empty() { "void".into() } else { parameters.join(", ") };
        found
            .push((name.to_owned(), format!("{} {name}({parameters});\n", c_type(source, result))));
    }
    found.retain(|(name, _)| name.starts_with("leasehold_"));
    found.sort();
    found
}

/// Names that the header declares: each is followed by a bracket, at the begin of a line.
fn declared(header: &str) -> Vec<String> {
    let lines = header.lines().filter(|line| line.starts_with(|c: char| c.is_ascii_lowercase()));
    let name = |line: &str| {
        let (before, _) = line.split_once('(')?;
        let name = before.rsplit([' ', '*']).next()?;
        name.starts_with("leasehold_").then(|| name.to_owned())
    };
    let mut names: Vec<_> = lines.filter_map(name).collect();
    names.sort();
    names
}

#[test]
fn the_header_declares_what_the_library_exports() {
    let (declared, source) = (declared(&headers()), source());
    let names: Vec<_> = prototypes(&source).into_iter().map(|(name, _)| name).collect();
    assert_eq!(declared, names);
    assert!(declared.len() >= 100, "{declared:?}");
    let plain: Vec<_> =
        names.iter().filter(|n| !n.starts_with("leasehold_sim_")).cloned().collect();
    for (library, names) in [("leasehold_capi", plain), ("leasehold_capi_sim", names)] {
        let library = self::library().join(format!("lib{library}.so"));
        if library.exists() && have("nm") {
            let output = Command::new("nm").args(["-D", "--defined-only"]).arg(library).output();
            let symbols = String::from_utf8(output.unwrap().stdout).unwrap();
            let exported: Vec<_> = symbols
                .lines()
                .filter_map(|line| line.split(" T ").nth(1))
                .filter(|name| name.starts_with("leasehold_"))
                .collect();
            assert_eq!(exported, names);
        }
    }
}

/// A C compiler compares the source with the header: the type of every function, the place of every
/// field, and every number.
#[test]
fn functions_structs_and_numbers_are_those_of_the_header() {
    if !have("gcc") {
        return;
    }
    let source = source();
    let mut text = "#define LEASEHOLD_SIM\n#include \"leasehold_runtime.h\"\n".to_owned();
    // A declaration of another type is an error.
    prototypes(&source).iter().for_each(|(_, prototype)| text += prototype);
    let mut structs = 0;
    for (_, definition) in
        source.match_indices("pub struct ").map(|(at, m)| source.split_at(at + m.len()))
    {
        let (rust, fields) = definition.split_once(" {").unwrap();
        let (rust, name) = (rust.to_owned(), snake(rust));
        let fields = fields.split('}').next().unwrap();
        let mut sum = String::new();
        text += &format!("struct rust_{name} {{\n");
        for field in split(fields) {
            let (field, kind) = field.strip_prefix("pub ").unwrap().split_once(": ").unwrap();
            let (kind, length) = match kind.strip_prefix('[').and_then(|k| k.strip_suffix(']')) {
                Some(array) => {
                    let (kind, length) = array.split_once("; ").unwrap();
                    (kind, format!("[{length}]"))
                }
                None => (kind, String::new()),
            };
            text += &format!("    {} {field}{length};\n", c_type(&source, kind));
            sum += &format!(
                "_Static_assert(__builtin_types_compatible_p(__typeof__((({name} *)0)->{field}), \
                 __typeof__(((struct rust_{name} *)0)->{field})) && offsetof({name}, {field}) == \
                 offsetof(struct rust_{name}, {field}), \"{rust}::{field}\");\n"
            );
        }
        text += &format!(
            "}};\n{sum}_Static_assert(sizeof({name}) == sizeof(struct rust_{name}), \"{rust}\");\n"
        );
        structs += 1;
    }
    let mut numbers = 0;
    for line in source.lines().filter_map(|line| line.strip_prefix("pub const ")) {
        let (name, number) = line.split_once(": ").unwrap();
        let number = number.split_once("= ").unwrap().1.trim_end_matches(';');
        let number = number.replace("u64::MAX", "UINT64_MAX").replace("u32::MAX", "UINT32_MAX");
        let prefix = if name.starts_with("LEASEHOLD_") { "" } else { "LEASEHOLD_" };
        text += &format!("_Static_assert({prefix}{name} == {number}, \"{name}\");\n");
        numbers += 1;
    }
    // The library reads a tensor map as its own type.
    let elements = "U8 U16 U32 I32 U64 I64 F16 F32 F64 BF16 F32_FTZ TF32 TF32_FTZ";
    for (number, name) in elements.split(' ').enumerate() {
        let mut map = [0; TensorMap::BYTES as usize];
        map[112] = number as u8;
        let map = TensorMap::from_params(&map, 0);
        let own = map.element().map(|e| format!("{e:?}").to_uppercase());
        assert_eq!(own, Some(name.replace('_', "")), "{name}");
        text += &format!("_Static_assert(LEASEHOLD_MAP_{name} == {number}, \"{name}\");\n");
    }
    text += "_Static_assert(sizeof(leasehold_tensor_map) == 128, \"\");\n";
    for (field, at) in
        [("strides", 40), ("box", 72), ("steps", 92), ("element", 112), ("reserved", 118)]
    {
        text +=
            &format!("_Static_assert(offsetof(leasehold_tensor_map, {field}) == {at}, \"\");\n");
    }
    let defined = headers();
    let defined = defined.lines().filter(|l| l.starts_with("#define LEASEHOLD_")).count();
    // The include guards are names too.
    assert_eq!((structs, numbers), (26, defined - HEADERS.len()));
    let file = scratch("header").with_extension("c");
    std::fs::write(&file, text).unwrap();
    let flags = ["-std=c11", "-Wall", "-Werror", "-fsyntax-only"];
    succeed(Command::new("gcc").args(flags).arg("-I").arg(root().join("include")).arg(file));
}

/// Runs a program without an invalid access, and with nothing lost.
fn valgrind(program: &Path, argument: &str) {
    let flags = ["--quiet", "--error-exitcode=9", "--leak-check=full"];
    let kinds = ["--show-leak-kinds=definite", "--errors-for-leak-kinds=definite"];
    succeed(Command::new("valgrind").args(flags).args(kinds).arg(program).arg(argument));
}

/// The example, on the CPU and on a simulated device; and programs that use the library harder,
/// each of which says what is wrong.
#[test]
fn programs_in_c_run() {
    if !have("gcc") || !library().join("libleasehold_capi_sim.so").exists() {
        return;
    }
    let source = root().join("../../examples/c/allocator.c");
    let program = build("gcc", &["-std=c11"], &source, "example");
    for device in ["cpu:0", "sim-cuda:0"] {
        let output = succeed(Command::new(&program).arg(device));
        let text = String::from_utf8(output.stdout).unwrap();
        assert!(text.trim_end().ends_with("ok"), "{text}");
    }
    for name in ["streams", "wake", "fork", "oom"] {
        let source = root().join(format!("tests/c/{name}.c"));
        let program = build("gcc", &["-std=c11", "-pthread"], &source, name);
        succeed(&mut Command::new(program));
    }
    let source = root().join("tests/c/fuzz.c");
    let program = build("gcc", &["-std=c11", "-pthread", "-O1"], &source, "fuzz");
    for arguments in [["20000", "6", "1", "cpu:0"], ["6000", "4", "1", "sim-cuda:0"]] {
        succeed(Command::new(&program).args(arguments));
    }
    let source = root().join("tests/c/fuzz_runtime.c");
    let program = build("gcc", &["-std=c11", "-pthread", "-O1"], &source, "fuzz_runtime");
    for arguments in [["20000", "6", "1", "cpu:0"], ["10000", "4", "1", "sim-cuda:0"]] {
        succeed(Command::new(&program).args(arguments));
    }
    if have("g++") {
        for name in ["extension", "plugin"] {
            let source = root().join(format!("tests/c/{name}.cpp"));
            succeed(&mut Command::new(build("g++", &["-std=c++17"], &source, name)));
        }
    }
}

/// The runtime's functions, from C and C++ by two compilers each, on the CPU and on a simulated
/// device.
#[test]
fn programs_of_the_runtime_run() {
    if !library().join("libleasehold_capi_sim.so").exists() {
        return;
    }
    let (c, cpp) = ("-std=c11", "-std=c++17");
    let compilers = [("gcc", c), ("clang", c), ("g++", cpp), ("clang++", cpp)];
    for (compiler, standard) in compilers.into_iter().filter(|(compiler, _)| have(compiler)) {
        let (tests, examples) = match standard == c {
            true => (
                &["runtime.c", "runtime_misuse.c", "ranks.c", "ranks_misuse.c"][..],
                &["runtime.c", "ranks.c"][..],
            ),
            false => (&["runtime.cpp"][..], &["mlp.cpp", "saxpy.cpp"][..]),
        };
        let tests = tests.iter().map(|name| root().join("tests/c").join(name));
        let examples = examples.iter().map(|name| root().join("../../examples/c").join(name));
        for source in tests.chain(examples) {
            let name = format!("{compiler}-{}", source.file_name().unwrap().to_string_lossy());
            let program = build(compiler, &[standard, "-pthread"], &source, &name);
            let simulated = match source.file_name().and_then(|name| name.to_str()) {
                // Each rank of the example takes the device of its own number.
                Some("ranks.c") if source.ends_with("examples/c/ranks.c") => "sim-cuda",
                // Its kernel is for the CPU.
                Some("saxpy.cpp") => "cpu:0",
                _ => "sim-cuda:0",
            };
            for device in ["cpu:0", simulated] {
                let output = succeed(Command::new(&program).arg(device));
                let text = String::from_utf8(output.stdout).unwrap();
                assert!(text.trim_end().ends_with("ok"), "{name}: {text}");
            }
            let strict = std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_some();
            // `ci/programs.sh c-examples` gives the examples to valgrind.
            let mine = source.starts_with(root().join("tests"));
            if strict && mine && compiler.starts_with('g') && have("valgrind") {
                valgrind(&program, "cpu:0");
            }
        }
    }
}

#[test]
fn each_function_of_the_runtime_is_used_rightly_and_wrongly() {
    let read = |file: &str| std::fs::read_to_string(root().join(file)).unwrap();
    let functions = declared(&read("include/leasehold_runtime.h"));
    assert!(functions.len() > 60, "{functions:?}");
    for kind in ["", "_misuse"] {
        let text =
            ["runtime", "ranks"].map(|name| read(&format!("tests/c/{name}{kind}.c"))).concat();
        let unused: Vec<_> =
            functions.iter().filter(|name| !text.contains(&format!("{name}("))).collect();
        assert!(unused.is_empty(), "programs{kind}: {unused:?}");
    }
    let (random, wrapper) = (read("tests/c/fuzz_runtime.c"), read("include/leasehold.hpp"));
    let called = |name: &&String| {
        let short = name.strip_prefix("leasehold_").unwrap();
        random.contains(&format!("({short},"))
    };
    assert_eq!(functions.iter().filter(|name| !called(name)).count(), 0);
    // The blocking upload, retains and releases are in other words there.
    let wrapped = functions.iter().filter(|name| wrapper.contains(&***name)).count();
    assert!(wrapped + 3 >= functions.len(), "{wrapped} of {}", functions.len());
}
