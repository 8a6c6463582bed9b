//! Small tables for human readers.

use crate::style::{Tone, paint};
use leasehold_input::shown_within;
use std::fmt;

/// The maximum number of characters of a cell. Control characters are escaped, because the text may
/// come from a driver or a file.
const CELL: usize = 1000;

#[derive(Debug)]
struct Row {
    cells: Vec<String>,
    tone: Option<Tone>,
}

/// Rows of cells. The first column is left-aligned, the others right-aligned unless they are words.
#[derive(Debug, Default)]
pub struct Table {
    rows: Vec<Row>,
    words: bool,
}

impl Table {
    /// A table of words: every column is left-aligned.
    pub fn words() -> Self {
        Self { rows: Vec::new(), words: true }
    }

    pub fn row<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.toned(None, cells);
    }

    /// The names of the columns.
    pub fn head<S: Into<String>>(&mut self, cells: impl IntoIterator<Item = S>) {
        self.toned(Some(Tone::Head), cells);
    }

    /// A row in a colour.
    pub fn toned<S: Into<String>>(
        &mut self,
        tone: Option<Tone>,
        cells: impl IntoIterator<Item = S>,
    ) {
        let shown = |cell: S| shown_within(&cell.into(), CELL).to_string();
        self.rows.push(Row { cells: cells.into_iter().map(shown).collect(), tone });
    }
}

impl fmt::Display for Table {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let columns = self.rows.iter().map(|r| r.cells.len()).max().unwrap_or(0);
        let width = |c: usize| {
            let cells = self.rows.iter().filter_map(|r| r.cells.get(c));
            cells.map(|s| s.chars().count()).max().unwrap_or(0)
        };
        let widths: Vec<_> = (0..columns).map(width).collect();
        for row in &self.rows {
            let mut line = String::new();
            for (c, cell) in row.cells.iter().enumerate() {
                let pad = " ".repeat(widths[c].saturating_sub(cell.chars().count()));
                if c == 0 {
                    line = format!("{cell}{pad}");
                } else if self.words {
                    line = format!("{line}  {cell}{pad}");
                } else {
                    line = format!("{line}  {pad}{cell}");
                }
            }
            let line = line.trim_end();
            match row.tone {
                Some(tone) => writeln!(f, "{}", paint(tone, line))?,
                None => writeln!(f, "{line}")?,
            }
        }
        Ok(())
    }
}

/// A number of bytes with a unit.
pub fn bytes(n: u64) -> String {
    const UNITS: [&str; 5] = ["B", "KiB", "MiB", "GiB", "TiB"];
    let mut value = n as f64;
    let mut unit = 0;
    while value >= 1024.0 && unit + 1 < UNITS.len() {
        value /= 1024.0;
        unit += 1;
    }
    if unit == 0 { format!("{n} B") } else { format!("{value:.1} {}", UNITS[unit]) }
}
