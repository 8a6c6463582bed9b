//! Small tables for human readers.

use leasehold_input::shown_within;
use std::fmt;

/// The maximum number of characters of a cell. Control characters are escaped, because the text may
/// come from a driver or a file.
const CELL: usize = 1000;

/// Rows of cells. The first column is left-aligned, the others right-aligned unless they are words.
#[derive(Debug, Default)]
pub(crate) struct Table {
    rows: Vec<Vec<String>>,
    words: bool,
}

impl Table {
    /// A table of words: every column is left-aligned.
    pub(crate) fn words() -> Self {
        Self { rows: Vec::new(), words: true }
    }

    pub(crate) fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        let shown = |cell: S| shown_within(&cell.into(), CELL).to_string();
        self.rows.push(cells.into_iter().map(shown).collect());
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(Vec::len).max().unwrap_or(0);
        let width = |c: usize| {
            self.rows.iter().filter_map(|r| r.get(c)).map(|s| s.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.iter().enumerate() {
                let pad = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
                if c == 0 {
                    line = format!("{cell}{pad}");
                } else if self.words {
                    line = format!("{line}  {cell}{pad}");
                } else {
                    line = format!("{line}  {pad}{cell}");
                }
            }
            writeln!(f, "{}", line.trim_end())?;
        }
        Ok(())
    }
}

/// A number of bytes with a unit.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
