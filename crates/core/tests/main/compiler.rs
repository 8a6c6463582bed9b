//! Programs that must not compile: each is given to the compiler with the libraries that this test
//! was linked with, and must have the messages of the `.stderr` file beside it.
//!
//! Cargo says in its fingerprints which libraries those are, so that nothing is built again. The
//! messages are those of one compiler; with another compiler the test says so and does nothing.
//! `LEASEHOLD_BLESS=1` writes the files.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};

const PINNED: &str = "rustc 1.95.";

/// The width of lines' numbers in messages: another file's longer ones move nothing.
const GUTTER: usize = 2;

/// Every program of the folder, which is one of the package that has this test.
pub fn refuses(package: &Path, folder: &str) {
    let compiler = std::env::var("RUSTC").unwrap_or_else(|_| "rustc".into());
    let version = Command::new(&compiler).arg("--version").output().map(|o| o.stdout);
    let version = String::from_utf8_lossy(&version.unwrap_or_default()).into_owned();
    if !version.starts_with(PINNED) || std::env::var_os("LEASEHOLD_NO_COMPILE_FAIL").is_some() {
        eprintln!("skipped: the messages are those of {PINNED}x, this is {version}");
        return;
    }
    let workspace = package.ancestors().nth(2).expect("two folders above the package");
    let own = package.strip_prefix(workspace).expect("within the workspace");
    let libraries = Libraries::of_this_test();
    let mut programs: Vec<PathBuf> = fs::read_dir(package.join(folder))
        .expect("the folder of programs")
        .map(|entry| own.join(folder).join(entry.expect("an entry").file_name()))
        .filter(|path| path.extension().is_some_and(|end| end == "rs"))
        .collect();
    programs.sort();
    assert!(!programs.is_empty(), "no programs in {folder}");
    let wrong: Vec<String> = programs
        .iter()
        .filter_map(|program| {
            let output = libraries.compile(&compiler, workspace, program);
            let said = messages(&String::from_utf8_lossy(&output.stderr), workspace, own, program);
            let file = workspace.join(program).with_extension("stderr");
            if std::env::var_os("LEASEHOLD_BLESS").is_some() {
                fs::write(&file, &said).expect("a written file");
            }
            let expected = fs::read_to_string(&file).unwrap_or_default();
            if output.status.success() {
                Some(format!("{} compiles", program.display()))
            } else if expected.is_empty() || said != expected {
                Some(format!("{}\n--- expected\n{expected}\n--- said\n{said}", program.display()))
            } else {
                None
            }
        })
        .collect();
    assert!(wrong.is_empty(), "{} of {}:\n{}", wrong.len(), programs.len(), wrong.join("\n\n"));
}

/// The libraries that this test was linked with.
struct Libraries {
    folder: PathBuf,
    /// Names and files.
    named: Vec<(String, PathBuf)>,
}

impl Libraries {
    fn of_this_test() -> Self {
        let program = std::env::current_exe().expect("this program's path");
        let folder = program.parent().expect("its folder").to_path_buf();
        let hash = hash_of(&program);
        let fingerprints = folder.parent().expect("a build's folder").join(".fingerprint");
        let all: Vec<PathBuf> = fs::read_dir(&fingerprints)
            .expect("cargo's fingerprints")
            .map(|entry| entry.expect("an entry").path())
            .collect();
        let own = all
            .iter()
            .find(|path| hash_of(path) == hash)
            .and_then(|path| {
                file_of(path, |name| name.starts_with("test-") && name.ends_with(".json"))
            })
            .expect("this test's fingerprint");
        let own = fs::read_to_string(own).expect("a text");
        // A dependency is `[package, "name", public, fingerprint]`.
        let dependencies = own.split_once("\"deps\":[").expect("dependencies").1;
        let mut named = Vec::new();
        for dependency in
            dependencies.split(']').map_while(|one| one.trim_start_matches(',').strip_prefix('['))
        {
            let fields: Vec<&str> = dependency.split(',').collect();
            let [_, name, _, print] = fields[..] else { panic!("four fields: {dependency}") };
            let name = name.trim_matches('"');
            if !name.starts_with("leasehold") {
                continue;
            }
            let print: u64 = print.parse().expect("a number");
            let print: String =
                print.to_le_bytes().iter().map(|byte| format!("{byte:02x}")).collect();
            let library = all
                .iter()
                .filter(|path| {
                    fs::read_to_string(path.join(format!("lib-{name}"))).is_ok_and(|is| is == print)
                })
                .map(|path| folder.join(format!("lib{name}-{}.rlib", hash_of(path))))
                .find(|file| file.exists());
            named.push((name.to_string(), library.unwrap_or_else(|| panic!("no library {name}"))));
        }
        assert!(!named.is_empty(), "no libraries in {own}");
        Self { folder, named }
    }

    fn compile(&self, compiler: &str, workspace: &Path, program: &Path) -> Output {
        let mut command = Command::new(compiler);
        command.current_dir(workspace).args(["--edition", "2024", "--crate-type", "bin"]);
        // Whole names of types, as no file holds them then.
        command.args(["--emit", "metadata", "--verbose", "-A", "dead_code"]);
        command.arg("--out-dir").arg(env!("CARGO_TARGET_TMPDIR"));
        command.arg("-L").arg(format!("dependency={}", self.folder.display()));
        for (name, file) in &self.named {
            command.arg("--extern").arg(format!("{name}={}", file.display()));
        }
        command.arg(program).output().expect("the compiler")
    }
}

/// What follows the last `-` of a file's name.
fn hash_of(path: &Path) -> &str {
    let stem = path.file_stem().and_then(|stem| stem.to_str()).unwrap_or_default();
    stem.rsplit_once('-').map_or("", |(_, hash)| hash)
}

fn file_of(folder: &Path, is: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let mut entries = fs::read_dir(folder).ok()?.flatten().map(|entry| entry.path());
    entries.find(|path| path.file_name().and_then(|name| name.to_str()).is_some_and(&is))
}

/// The compiler's messages, as they are on every machine and after every change elsewhere.
fn messages(output: &str, workspace: &Path, own: &Path, program: &Path) -> String {
    let workspace = format!("{}/", workspace.display());
    let own = format!("{}/", own.display());
    let program = program.display().to_string();
    let mut said = String::new();
    // Whether lines of source are the program's own.
    let mut inside = true;
    let mut gutter = 0;
    for line in output.lines() {
        let text = line.trim_start();
        let sums = [
            "error: aborting due to ",
            "For more information about ",
            "Some errors have detailed ",
        ];
        if sums.iter().any(|start| text.starts_with(start)) {
            continue;
        }
        let arrow = ["--> ", "::: "].into_iter().find(|arrow| text.starts_with(arrow));
        if let Some(arrow) = arrow {
            let place = text[arrow.len()..].replace(&workspace, "");
            inside = place.starts_with(&program);
            let file =
                if inside { place.as_str() } else { place.split(':').next().unwrap_or_default() };
            let file = elsewhere(file.strip_prefix(&own).unwrap_or(file));
            gutter = line.len() - text.len();
            said += &format!("{:GUTTER$}{arrow}{file}\n", "");
            continue;
        }
        inside |=
            !text.starts_with(|first: char| first.is_ascii_digit() || first == '|' || first == '.');
        let margin =
            line.get(..gutter).filter(|is| is.bytes().all(|byte| b" 0123456789".contains(&byte)));
        match margin {
            Some(number) if gutter > 0 => {
                let number = if inside { number.trim() } else { "" };
                said += format!("{number:>GUTTER$}{}", &line[gutter..]).trim_end();
            }
            _ => said += line.trim_end(),
        }
        said.push('\n');
    }
    let length = said.trim_end().len();
    said.truncate(length);
    said + "\n"
}

/// A file of another package by a name that is the same on every machine and for every version.
fn elsewhere(file: &str) -> String {
    if let Some((_, file)) = file.split_once("/library/") {
        return format!("$RUST/{file}");
    }
    let within = file.split_once("/registry/src/").and_then(|(_, path)| path.split_once('/'));
    match within.and_then(|(_, path)| path.split_once('/')) {
        Some((package, file)) => {
            let name = package.rsplit_once('-').map_or(package, |(name, _)| name);
            format!("$CARGO/{name}-$VERSION/{file}")
        }
        None => file.to_string(),
    }
}
