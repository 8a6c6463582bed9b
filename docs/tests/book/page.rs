//! A page: its blocks and its links.

use std::fmt;
use std::fs;
use std::path::{Path, PathBuf};

/// The repository.
pub(crate) fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).parent().unwrap().to_owned()
}

/// The text of a file of the repository.
pub(crate) fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// Whether the repository has this file or folder.
pub(crate) fn exists(path: &str) -> bool {
    root().join(path.trim_start_matches('/')).exists()
}

/// The files below a folder of the repository with one of these endings, but for what cargo made.
pub(crate) fn files(folder: &str, endings: &[&str]) -> Vec<String> {
    let mut found = Vec::new();
    let mut folders = vec![root().join(folder)];
    while let Some(folder) = folders.pop() {
        for entry in fs::read_dir(&folder).unwrap_or_else(|e| panic!("{}: {e}", folder.display())) {
            let path = entry.unwrap().path();
            let name = path.file_name().unwrap().to_string_lossy().into_owned();
            if path.is_dir() {
                if name != "target" {
                    folders.push(path);
                }
            } else if endings.iter().any(|ending| name.ends_with(ending)) {
                let inside = path.strip_prefix(root()).unwrap();
                found.push(inside.to_string_lossy().replace('\\', "/"));
            }
        }
    }
    found.sort();
    found
}

/// The pages of a folder.
pub(crate) fn pages(folder: &str) -> Vec<Page> {
    files(folder, &[".md"]).iter().map(|path| Page::read(path)).collect()
}

/// A page of Markdown.
pub(crate) struct Page {
    pub(crate) path: String,
    pub(crate) text: String,
    blocks: Vec<Block>,
}

/// A fenced block.
pub(crate) struct Block {
    page: String,
    line: usize,
    /// What stands behind the fence: `rust`, `python gpu`.
    pub(crate) words: String,
    pub(crate) code: String,
}

impl fmt::Display for Block {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        writeln!(f, "{}:{} ({})\n{}", self.page, self.line, self.words, self.code)
    }
}

impl Page {
    pub(crate) fn read(path: &str) -> Self {
        let text = read(path);
        let mut blocks = Vec::new();
        let mut open: Option<Block> = None;
        for (number, line) in text.lines().enumerate() {
            match (line.trim_start().strip_prefix("```"), open.take()) {
                (Some(_), Some(block)) => blocks.push(block),
                (Some(words), None) => {
                    let (words, code) = (words.trim().to_owned(), String::new());
                    open = Some(Block { page: path.to_owned(), line: number + 1, words, code });
                }
                (None, Some(mut block)) => {
                    block.code.push_str(line);
                    block.code.push('\n');
                    open = Some(block);
                }
                (None, None) => {}
            }
        }
        assert!(open.is_none(), "{path}: a block does not end");
        Self { path: path.to_owned(), text, blocks }
    }

    pub(crate) fn all_blocks(&self) -> &[Block] {
        &self.blocks
    }

    /// The blocks in a language.
    pub(crate) fn blocks(&self, language: &str) -> impl Iterator<Item = &Block> {
        self.blocks.iter().filter(move |block| block.words == language)
    }

    /// Links to files, but for those to the web and to places on the page.
    pub(crate) fn links(&self) -> Vec<String> {
        let mut found = Vec::new();
        for part in self.text.split("](").skip(1) {
            let target = part.split(')').next().unwrap_or_default();
            if !target.contains("://") && !target.starts_with('#') && !target.contains(['<', ' ']) {
                found.push(target.to_owned());
            }
        }
        found
    }

    /// The rows of the tables below a heading, up to the next one. A cell's code marks stay.
    pub(crate) fn rows(&self, heading: &str) -> Vec<Vec<String>> {
        let lines =
            self.text.lines().skip_while(|line| line.trim_start_matches('#').trim() != heading);
        let rows: Vec<Vec<String>> = lines
            .skip(1)
            .take_while(|line| !line.starts_with('#'))
            .filter(|line| line.starts_with('|') && !line.starts_with("|---"))
            .map(|line| line.trim_matches('|').split(" | ").map(|c| c.trim().to_owned()).collect())
            .collect();
        assert!(rows.len() > 1, "{}: no table below {heading:?}", self.path);
        rows[1..].to_vec()
    }
}
