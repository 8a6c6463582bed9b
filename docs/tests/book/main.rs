//! The pages beside the Rust examples that `lib.rs` runs: their other blocks and their links. The
//! reference pages are compared with the sources.

mod page;
mod reference;

use page::{Page, exists, pages, read};

/// Pages whose Rust blocks are cut out of a file, word for word. The examples run as tests of this
/// package, the toy backend has tests of its own.
const EXCERPTS: [(&str, &str); 3] = [
    ("docs/tutorials/first-program.md", "examples/quickstart.rs"),
    ("docs/how-to/cuda-kernel.md", "examples/cuda_kernel.rs"),
    ("docs/how-to/write-a-backend.md", "testing/conformance/examples/toy/backend.rs"),
];

/// Panics with what was found, if anything.
fn none(rule: &str, found: Vec<String>) {
    assert!(found.is_empty(), "{rule}:\n{}", found.join("\n"));
}

fn all_pages() -> Vec<Page> {
    let book = ["concepts", "tutorials", "how-to", "reference"];
    let mut all: Vec<_> = book.iter().flat_map(|part| pages(&format!("docs/{part}"))).collect();
    all.extend(["docs/introduction.md", "README.md", "python/README.md"].map(Page::read));
    all
}

#[test]
fn every_rust_block_is_compiled() {
    let compiled = read("docs/lib.rs");
    let lost = all_pages().into_iter().filter(|page| {
        let rust = page.blocks("rust").count() > 0;
        let name = page.path.strip_prefix("docs/").unwrap_or("../README.md");
        let listed = compiled.contains(&format!("\"{name}\""));
        rust && !listed && !EXCERPTS.iter().any(|(excerpt, _)| *excerpt == page.path)
    });
    none("pages with Rust that docs/lib.rs does not compile", lost.map(|p| p.path).collect());
}

#[test]
fn excerpts_are_the_files_own_words() {
    for (page, file) in EXCERPTS {
        let (page, text) = (Page::read(page), read(file));
        assert!(page.blocks("rust").count() > 1, "{} shows nothing of {file}", page.path);
        assert!(page.text.contains(file), "{} does not lead to {file}", page.path);
        let lost = page.blocks("rust").filter(|block| !text.contains(&*block.code));
        none(&format!("not in {file}"), lost.map(|block| block.to_string()).collect());
    }
}

/// The blocks of the first tutorial, one after the other, are the whole program.
#[test]
fn the_first_program_is_the_example() {
    let (page, file) = EXCERPTS[0];
    let squeezed = |text: &str| -> Vec<String> {
        let lines = text.lines().filter(|line| !line.starts_with("//!"));
        lines.filter(|line| !line.trim().is_empty()).map(str::to_owned).collect()
    };
    let shown: String = Page::read(page).blocks("rust").map(|block| block.code.clone()).collect();
    assert_eq!(squeezed(&shown), squeezed(&read(file)));
}

/// `ci/programs.sh c-examples` compiles and runs these files.
#[test]
fn c_blocks_are_from_the_examples() {
    let runtime = ["allocator.c", "runtime.c", "ranks.c", "saxpy.cpp"]
        .map(|name| format!("examples/c/{name}"));
    let examples = runtime.into_iter().chain(["tl/examples/program.c".to_owned()]);
    let squeezed = |text: &str| text.split_whitespace().collect::<Vec<_>>().join(" ");
    let examples: Vec<String> = examples.map(|path| squeezed(&read(&path))).collect();
    let all = all_pages();
    let blocks = all.iter().flat_map(|page| page.blocks("c").chain(page.blocks("cpp")));
    let lost = blocks.filter(|block| !examples.iter().any(|e| e.contains(&squeezed(&block.code))));
    none("in no example in C", lost.map(|block| block.to_string()).collect());
}

/// A block without a checker would be one that nobody compiles.
#[test]
fn every_block_has_a_checker() {
    let python = read("ci/python.sh");
    let mut lost = Vec::new();
    for page in all_pages() {
        for block in page.all_blocks() {
            let checked = match &*block.words {
                "rust" | "c" | "cpp" | "sh" | "sh gpu" | "text" => true,
                "toml" => true,
                words if words.starts_with("python") => python.contains(&page.path),
                _ => false,
            };
            if !checked {
                lost.push(block.to_string());
            }
        }
    }
    none("blocks that nothing checks", lost);
}

/// Packages of this repository, and of the registry those that it uses itself. `ci/release.sh
/// first-steps` builds a crate with the README's lines.
#[test]
fn dependencies_are_packages() {
    let folders = ["crates", "models", "testing"].into_iter();
    let manifests = folders.flat_map(|folder| page::files(folder, &["Cargo.toml"]));
    let manifests: Vec<String> = manifests.map(|path| read(&path)).collect();
    let workspace = read("Cargo.toml");
    let mut lost = Vec::new();
    for page in all_pages() {
        for block in page.blocks("toml") {
            let mut inside = false;
            let dependencies = block.code.lines().filter(|line| {
                if line.starts_with('[') {
                    inside = line.ends_with("dependencies]");
                }
                inside
            });
            let lines = dependencies.filter_map(|line| line.split_once(" = "));
            let unknown = lines.filter(|(name, from)| {
                let own = format!("name = \"{name}\"\n");
                let used = format!("\n{name} = {from}\n");
                !manifests.iter().any(|text| text.contains(&own)) && !workspace.contains(&used)
            });
            lost.extend(unknown.map(|(name, _)| format!("{block}{name}")));
        }
    }
    none("dependencies that are no packages of this repository or of its own dependencies", lost);
}

#[test]
fn shell_blocks_name_what_exists() {
    let programs = [reference::Program::command(), reference::Program::workbench()];
    let mut lost = Vec::new();
    for page in all_pages() {
        for block in page.blocks("sh").chain(page.blocks("sh gpu")) {
            for line in block.code.lines().map(|line| line.split(" #").next().unwrap_or(line)) {
                lost.extend(wrong_words(line, &programs).map(|w| format!("{block}{w}")));
            }
        }
    }
    none("shell blocks that name what is not there", lost);
}

/// Files of the repository, and names of the command and the workbench, that a line has and nothing
/// else has.
fn wrong_words<'l>(
    line: &'l str,
    [command, workbench]: &[reference::Program; 2],
) -> impl Iterator<Item = &'l str> {
    let words: Vec<&str> = line.split_whitespace().collect();
    let ours = match words[..] {
        ["leasehold", _, ..] => Some((command, &words[1..])),
        ["leasehold-workbench", _, ..] => Some((workbench, &words[1..])),
        ["cargo", "run", "--release", "--", _, ..] => Some((command, &words[4..])),
        ["cargo", "run", "--release", "-p", "leasehold-workbench", "--", _, ..] => {
            Some((workbench, &words[6..]))
        }
        _ => None,
    };
    let mut unknown = Vec::new();
    if let Some((program, own)) = ours {
        unknown.extend(own.first().filter(|name| !program.subcommands.contains(**name)));
        if own[0] == "bench" {
            let name = own.get(1).filter(|name| !name.starts_with("--"));
            unknown.extend(name.filter(|name| !program.benchmarks.contains(**name)));
        }
        let options = own.iter().filter(|word| word.starts_with("--"));
        unknown.extend(options.filter(|word| !program.options.contains(**word)));
    }
    let places = [
        "ci/",
        "crates/",
        "models/",
        "tl/",
        "examples/",
        "bench/",
        "testing/",
        "docs/",
        "./python",
    ];
    let files = words
        .clone()
        .into_iter()
        .filter(move |word| places.iter().any(|place| word.starts_with(place)) && !exists(word));
    unknown.into_iter().chain(files)
}

#[test]
fn links_lead_to_files() {
    let mut lost = Vec::new();
    let more =
        ["ARCHITECTURE.md", "CONTRIBUTING.md", "docs/SUMMARY.md", "docs/decisions/README.md"];
    for page in all_pages().into_iter().chain(more.map(Page::read)) {
        for link in page.links() {
            let target = link.split('#').next().unwrap_or(&link);
            let here = page.path.rsplit_once('/').map_or("", |(folder, _)| folder);
            if !target.is_empty() && !exists(&format!("{here}/{target}")) {
                lost.push(format!("{}: {link}", page.path));
            }
        }
    }
    none("links to no file", lost);
}

#[test]
fn pictures_are_small() {
    let images = std::fs::read_dir(page::root().join("docs/images")).unwrap();
    let sizes = images
        .map(|file| file.unwrap())
        .map(|file| (file.file_name(), file.metadata().unwrap().len()));
    let large = sizes.filter(|(_, bytes)| *bytes > 150 * 1024);
    none("pictures above 150 KiB", large.map(|(name, n)| format!("{name:?}: {n}")).collect());
}
