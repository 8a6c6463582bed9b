//! `docs/glossary.md` against the code: each row has a place, a plan or a reason; each path
//! compiles; a search finds each name.
//!
//! `paths.rs` is made from the glossary by `GLOSSARY_BLESS=1 cargo test -p leasehold-workbench
//! --test glossary`, and compiled here.

#[expect(unused_imports, reason = "that the paths resolve is what they are for")]
mod paths;

use std::collections::{BTreeSet, HashMap};
use std::fmt::Write;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// A line of one of the glossary's tables.
struct Row {
    line: usize,
    name: String,
    home: String,
    remark: String,
}

fn rows() -> Vec<Row> {
    let text = std::fs::read_to_string(root().join("docs/glossary.md")).unwrap();
    let mut rows = Vec::new();
    for (i, line) in text.lines().enumerate().filter(|(_, l)| l.starts_with('|')) {
        let cells: Vec<_> =
            line.trim_matches('|').split('|').map(|c| c.trim().to_string()).collect();
        let [name, home, remark] = <[String; 3]>::try_from(cells).unwrap_or_else(|cells| {
            panic!("docs/glossary.md:{}: {} cells instead of 3", i + 1, cells.len())
        });
        if name != "in the document" && name.contains(|c| c != '-') {
            rows.push(Row { line: i + 1, name, home, remark });
        }
    }
    assert!(rows.len() > 150, "only {} rows were found", rows.len());
    rows
}

fn code_spans(cell: &str) -> impl Iterator<Item = &str> {
    cell.split('`').skip(1).step_by(2)
}

fn paths_in(cell: &str) -> impl Iterator<Item = &str> {
    let is_path = |s: &&str| {
        let first = s.split("::").next().unwrap_or("");
        (first == "leasehold" || first.starts_with("leasehold_"))
            && s.chars().all(|c| c.is_alphanumeric() || "_:".contains(c))
    };
    code_spans(cell).filter(is_path)
}

/// Types with parameters, traits, and methods with arguments of any type: their spelling in a
/// `let`.
const SPELLINGS: [(&str, &str); 8] = [
    ("leasehold::Handle", "leasehold::Handle::<T>"),
    ("leasehold::backend::FixedSlotStore", "leasehold::backend::FixedSlotStore::<R>"),
    ("leasehold::backend::PoolManager", "leasehold::backend::PoolManager::<R, K>"),
    ("leasehold::backend::Device", "<dyn leasehold::backend::Device>"),
    ("leasehold::infini::InfiniGraph", "<leasehold::Graph as leasehold::infini::InfiniGraph>"),
    (
        "leasehold::infini::InfiniRuntime",
        "<leasehold::Runtime as leasehold::infini::InfiniRuntime>",
    ),
    ("leasehold::Runtime::extension", "|r: &leasehold::Runtime| r.extension(|_| Ok(()))"),
    ("leasehold::Stream::upload_owned", "|s: &leasehold::Stream, v| s.upload_owned(v, vec![0u8])"),
];

/// Methods that are generic over a plain type.
const GENERIC: [&str; 5] = [
    "leasehold::Stream::upload",
    "leasehold::Stream::upload_blocking",
    "leasehold::Stream::download",
    "leasehold::infini::InfiniRuntime::memcpy_h2d",
    "leasehold::infini::InfiniRuntime::memcpy_d2h",
];

/// `use` for importable items, `let` for associated ones.
fn expected() -> String {
    let rows = rows();
    let paths: BTreeSet<_> =
        rows.iter().flat_map(|r| paths_in(&r.home).chain(paths_in(&r.remark))).collect();
    let spelling = |path: &str| SPELLINGS.iter().find(|s| s.0 == path).map(|s| s.1);
    let (mut uses, mut lets) = (String::new(), String::new());
    for path in paths {
        let owner = path.rsplit_once("::").filter(|(owner, name)| {
            let is_type =
                |p: &str| p.rsplit("::").next().is_some_and(|s| s.starts_with(char::is_uppercase));
            is_type(owner) && !is_type(name)
        });
        match owner {
            None => writeln!(uses, "use {path} as _;").unwrap(),
            Some((owner, name)) => {
                let of = if GENERIC.contains(&path) { "::<u8>" } else { "" };
                let whole = format!("{}::{name}{of}", spelling(owner).unwrap_or(owner));
                writeln!(lets, "    let _ = {};", spelling(path).unwrap_or(&whole)).unwrap();
            }
        }
    }
    format!(
        "//! The paths of `docs/glossary.md`, made from it by the test beside this file. Not edited by hand.\n\n\
         {uses}\n\
         /// Methods and associated functions cannot be imported; naming them is enough.\n\
         pub fn methods<T, K, R>()\n\
         where\n    K: Eq + std::hash::Hash + Clone,\n    R: leasehold::backend::Resource,\n{{\n{lets}}}\n"
    )
}

#[test]
fn every_path_of_the_glossary_compiles() {
    let file = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/glossary/paths.rs");
    if std::env::var_os("GLOSSARY_BLESS").is_some() {
        std::fs::write(&file, expected()).unwrap();
        return;
    }
    let found = std::fs::read_to_string(&file).unwrap();
    assert!(
        found == expected(),
        "paths.rs is not what docs/glossary.md says; GLOSSARY_BLESS=1 rewrites it"
    );
    // The code with these names is compiled, but not run.
    let _ = paths::methods::<u8, u8, Nothing>;
}

/// A resource type for generic managers.
struct Nothing;

impl leasehold::backend::Resource for Nothing {
    type Payload = Payload;
    type Request<'a> = ();
    const NAME: &'static str = "nothing";

    fn create(&self, _: leasehold::Handle<u8>, (): &()) -> leasehold::Result<Payload> {
        Ok(Payload)
    }

    fn recycle(&self, _: &mut Payload) -> leasehold::backend::Recycle {
        leasehold::backend::Recycle::Destroy
    }
}

struct Payload;

impl leasehold::backend::Tagged for Payload {
    type Tag = u8;
}

#[test]
fn every_row_has_a_home_a_plan_or_a_reason() {
    for row in rows() {
        let home = row.home.as_str();
        let said = paths_in(home).next().is_some()
            || home
                .strip_prefix("planned: ")
                .or(home.strip_prefix("deviates, because "))
                .is_some_and(|why| why.len() > 5);
        assert!(said, "docs/glossary.md:{}: {} has no home: {home}", row.line, row.name);
    }
}

/// Every `doc(alias)` of the sources.
fn aliases() -> BTreeSet<String> {
    fn visit(folder: &Path, found: &mut BTreeSet<String>) {
        for entry in std::fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                visit(&path, found);
            } else if path.extension().is_some_and(|e| e == "rs") {
                let text = std::fs::read_to_string(&path).unwrap();
                for (_, rest) in
                    text.match_indices("#[doc(alias").map(|(at, s)| (at, &text[at + s.len()..]))
                {
                    let inside = rest.split(")]").next().unwrap_or("");
                    found.extend(inside.split('"').skip(1).step_by(2).map(str::to_string));
                }
            }
        }
    }
    let mut found = BTreeSet::new();
    for house in ["crates", "models"] {
        for entry in std::fs::read_dir(root().join(house)).unwrap() {
            visit(&entry.unwrap().path().join("src"), &mut found);
        }
    }
    visit(&root().join("tl/src"), &mut found);
    found
}

#[test]
fn every_name_of_the_documents_is_found_by_searching() {
    let aliases = aliases();
    let mut missing: HashMap<String, usize> = HashMap::new();
    for row in rows()
        .iter()
        .filter(|r| !r.home.starts_with("planned: ") && !r.home.starts_with("deviates, because "))
    {
        for name in code_spans(&row.name) {
            // Files and private members, whose names have no search entry.
            if name.contains(['/', '.']) || name.ends_with('_') {
                continue;
            }
            // The item's own name, perhaps with its type, is found without an alias.
            let is_its_name = |path: &str| path == name || path.ends_with(&format!("::{name}"));
            if !aliases.contains(name) && !paths_in(&row.home).any(is_its_name) {
                missing.insert(name.to_string(), row.line);
            }
        }
    }
    assert!(
        missing.is_empty(),
        "no #[doc(alias)] for these names, with their lines in docs/glossary.md: {missing:?}"
    );
}
