//! The reference pages, beside the sources.

use crate::page::{Page, files, read};
use std::collections::{BTreeMap, BTreeSet};

/// Names in code marks in a cell: `` `a`, `b` ``.
fn marked(cell: &str) -> impl Iterator<Item = String> {
    cell.split('`').skip(1).step_by(2).map(str::to_owned)
}

fn same(what: &str, page: &BTreeSet<String>, sources: &BTreeSet<String>) {
    let missing: Vec<_> = sources.difference(page).collect();
    let left: Vec<_> = page.difference(sources).collect();
    assert!(missing.is_empty(), "{what} in the sources, and not on the page: {missing:?}");
    assert!(left.is_empty(), "{what} on the page, and in no source: {left:?}");
}

/// `LEASEHOLD_…` or `TL_…`, as the environment's variables are named.
fn is_variable(name: &str) -> bool {
    let rest = name.strip_prefix("LEASEHOLD_").or_else(|| name.strip_prefix("TL_"));
    rest.is_some_and(|rest| {
        !rest.is_empty()
            && rest.chars().all(|c| c.is_ascii_uppercase() || c.is_ascii_digit() || c == '_')
    })
}

/// Variables that sources read. Rust, Python and C name one by a string that is nothing else, the
/// shell behind a `$`. Constants of the C ABI, which error texts name, are none.
fn variables() -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    let abi: String = files("crates/capi/src", &[".rs"]).iter().map(|path| read(path)).collect();
    for folder in ["crates", "models", "tl", "testing", "python", "examples", "ci", "docs/tests"] {
        for path in files(folder, &[".rs", ".py", ".c", ".cpp", ".h", ".hpp", ".sh"]) {
            let text = read(&path);
            let names: Vec<&str> = if path.ends_with(".sh") {
                text.split(['$', ' ', '"', '\n']).map(|w| w.trim_start_matches('{')).collect()
            } else {
                text.split('"').collect()
            };
            for name in names {
                // `${NAME:-default}`; a macro of the C API is defined behind a word, not a `$`.
                let end = name.find([':', '}', '=']).unwrap_or(name.len());
                if is_variable(&name[..end])
                    && !abi.contains(&format!("pub const {}:", &name[..end]))
                {
                    found.insert(name[..end].to_owned());
                }
            }
        }
    }
    found
}

#[test]
fn variables_of_the_environment() {
    let page = Page::read("docs/reference/features.md");
    let rows =
        ["Variables for users", "Variables for the project's own tests"].map(|h| page.rows(h));
    let named = rows.iter().flatten().flat_map(|row| marked(&row[0])).collect();
    same("variables", &named, &variables());
}

/// `crate feature`, and whether it is a default.
fn features() -> BTreeMap<String, bool> {
    let mut found = BTreeMap::new();
    let manifests: Vec<_> = ["crates", "models", "tl", "testing", "python"]
        .iter()
        .flat_map(|f| files(f, &["Cargo.toml"]))
        .collect();
    for path in manifests {
        let text = read(&path);
        let name = text.lines().find_map(|line| line.strip_prefix("name = ")).unwrap_or("");
        let name = name.trim_matches('"').to_owned();
        let section = text.lines().skip_while(|line| *line != "[features]").skip(1);
        let lines = section.take_while(|line| !line.starts_with('[')).map(|l| l.split_once(" = "));
        let lines: Vec<_> = lines.flatten().collect();
        let default = lines.iter().find(|(feature, _)| *feature == "default");
        for (feature, _) in lines.iter().filter(|(f, _)| *f != "default" && !f.starts_with('#')) {
            let by_default =
                default.is_some_and(|(_, list)| list.contains(&format!("\"{feature}\"")));
            found.insert(format!("{name} {feature}"), by_default);
        }
    }
    found
}

#[test]
fn features_of_the_crates() {
    let page = Page::read("docs/reference/features.md");
    let (mut named, mut default) = (BTreeSet::new(), BTreeMap::new());
    for row in ["Features for users", "Features for the project's own tests"].map(|h| page.rows(h))
    {
        for cells in row {
            for name in marked(&cells[0]) {
                for feature in marked(&cells[1]) {
                    default.insert(format!("{name} {feature}"), cells[2] == "yes");
                    named.insert(format!("{name} {feature}"));
                }
            }
        }
    }
    let sources = features();
    same("features", &named, &sources.keys().cloned().collect());
    assert_eq!(default, sources, "what is a default");
}

/// `CamelCase` as the command line has it.
fn kebab(name: &str) -> String {
    let mut out = String::new();
    for c in name.chars() {
        if c.is_ascii_uppercase() && !out.is_empty() {
            out.push('-');
        }
        out.push(if c == '_' { '-' } else { c.to_ascii_lowercase() });
    }
    out
}

/// The variants of an enumeration that derives `Subcommand`.
fn variants(path: &str, name: &str) -> BTreeSet<String> {
    let text = read(path);
    let body = text.lines().skip_while(|line| *line != format!("enum {name} {{")).skip(1);
    let variants = body.take_while(|line| *line != "}").filter_map(|line| {
        let word = line.trim().split('(').next()?;
        word.starts_with(|c: char| c.is_ascii_uppercase()).then(|| kebab(word))
    });
    variants.collect()
}

/// A program of commands, as its sources have it.
pub(crate) struct Program {
    pub(crate) subcommands: BTreeSet<String>,
    pub(crate) benchmarks: BTreeSet<String>,
    /// Its own, in its own files.
    own: BTreeSet<String>,
    /// All.
    pub(crate) options: BTreeSet<String>,
}

impl Program {
    /// `leasehold`.
    pub(crate) fn command() -> Self {
        let path = "models/cli/src/main.rs";
        let mut own = options("models/cli/src");
        own.extend(["--help", "--version"].map(str::to_owned));
        Self {
            subcommands: variants(path, "Command"),
            benchmarks: variants(path, "What"),
            options: own.clone(),
            own,
        }
    }

    /// `leasehold-workbench`, which also has the options of what it takes from the command.
    pub(crate) fn workbench() -> Self {
        let own = options("testing/workbench/src");
        Self {
            subcommands: variants("testing/workbench/src/main.rs", "Command"),
            benchmarks: variants("testing/workbench/src/commands/bench.rs", "What"),
            options: own.union(&Self::command().options).cloned().collect(),
            own,
        }
    }
}

/// Options of a program's own files: fields with `#[arg(long …)]`.
fn options(folder: &str) -> BTreeSet<String> {
    let mut found = BTreeSet::new();
    for path in files(folder, &[".rs"]) {
        for field in read(&path).split("#[arg(long").skip(1) {
            let line = field.split_once(")]\n").map_or("", |(_, rest)| rest);
            let name = line.split(':').next().unwrap_or_default().split_whitespace().last();
            found.insert(format!("--{}", kebab(name.unwrap_or_default())));
        }
    }
    found
}

#[test]
fn subcommands_and_options() {
    let page = Page::read("docs/reference/command.md");
    let column = |heading: &str| {
        page.rows(heading).iter().flat_map(|row| marked(&row[0])).collect::<BTreeSet<_>>()
    };
    let command = Program::command();
    same("subcommands", &column("Subcommands"), &command.subcommands);
    same("benchmarks", &column("Benchmarks"), &command.benchmarks);
    same("options", &column("Options"), &command.own);
    let workbench = Program::workbench();
    same("subcommands", &column("Subcommands of the workbench"), &workbench.subcommands);
    same("benchmarks", &column("Benchmarks of the workbench"), &workbench.benchmarks);
    // `--isolated` is for its own children. Options that several commands share are the library's.
    let mut own = workbench.own;
    own.remove("--isolated");
    let page = column("Options of the workbench");
    let shared = page.intersection(&command.own).cloned();
    own.extend(shared);
    same("options", &page, &own);
}

#[test]
fn devices() {
    let text = read("crates/hal/src/id.rs");
    let names = text.lines().filter_map(|line| line.trim().strip_prefix("BackendKind::"));
    let names = names.filter_map(|line| line.split_once(" => \"")?.1.split('"').next());
    // `null` has no devices.
    let sources = names.filter(|name| *name != "null").map(str::to_owned).collect();
    let page = Page::read("docs/reference/devices.md");
    let rows = page.rows("Table");
    let row = rows.iter().find(|row| row[0] == "name").unwrap();
    let named = row[1..].iter().filter_map(|cell| marked(cell).next());
    let named = named.map(|name| name.split(':').next().unwrap().to_owned()).collect();
    same("backends", &named, &sources);
}
