//! Pieces of the page's text: escaped strings, numbers with units, tables.

use std::fmt::{self, Display, Write};

/// Text for an element or an attribute in double quotes.
pub(crate) struct Escaped<'a>(pub(crate) &'a str);

impl Display for Escaped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.chars().try_for_each(|c| match c {
            '<' => f.write_str("&lt;"),
            '>' => f.write_str("&gt;"),
            '&' => f.write_str("&amp;"),
            '"' => f.write_str("&quot;"),
            '\'' => f.write_str("&#39;"),
            // XML has no place for these; marks of direction would turn the text around them.
            c if c.is_control() => f.write_char('\u{fffd}'),
            '\u{fffe}' | '\u{ffff}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}' => {
                f.write_char('\u{fffd}')
            }
            c => f.write_char(c),
        })
    }
}

/// Bytes with a unit, to three digits.
pub(crate) fn bytes(n: u64) -> String {
    const UNITS: [&str; 7] = ["B", "KiB", "MiB", "GiB", "TiB", "PiB", "EiB"];
    let unit = (n.max(1).ilog2() / 10) as usize;
    let value = n as f64 / f64::powi(1024.0, unit as i32);
    let digits = if unit == 0 || value >= 100.0 { 0 } else { usize::from(value < 10.0) + 1 };
    let text = format!("{value:.digits$}");
    let text = if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
    format!("{text} {}", UNITS[unit])
}

/// A number with a comma between groups of three digits.
pub(crate) fn grouped(n: u64) -> String {
    let digits = n.to_string();
    let mut out = String::with_capacity(digits.len() * 4 / 3 + 1);
    for (i, c) in digits.chars().enumerate() {
        if i > 0 && (digits.len() - i).is_multiple_of(3) {
            out.push(',');
        }
        out.push(c);
    }
    out
}

/// A time of microseconds with a unit.
pub(crate) fn time(us: u64) -> String {
    let short = |value: f64, unit: &str| {
        let digits = if value >= 100.0 { 0 } else { usize::from(value < 10.0) + 1 };
        let text = format!("{value:.digits$}");
        let text =
            if digits > 0 { text.trim_end_matches('0').trim_end_matches('.') } else { &text };
        format!("{text} {unit}")
    };
    match us {
        0..1_000 => format!("{us} µs"),
        1_000..1_000_000 => short(us as f64 / 1e3, "ms"),
        1_000_000..120_000_000 => short(us as f64 / 1e6, "s"),
        120_000_000..7_200_000_000 => short(us as f64 / 6e7, "min"),
        _ => short(us as f64 / 3.6e9, "h"),
    }
}

/// A part of a whole in percent; a dash without a whole.
pub(crate) fn percent(part: u64, whole: u64) -> String {
    if whole == 0 {
        return "–".to_owned();
    }
    format!("{:.1} %", part as f64 * 100.0 / whole as f64)
}

/// A coordinate of a picture, without digits that say nothing.
pub(crate) fn coordinate(value: f64) -> String {
    let text = format!("{value:.1}");
    text.strip_suffix(".0").map_or_else(|| text.clone(), str::to_owned)
}

/// Seconds since the beginning of 1970, as a date and a time of UTC.
pub(crate) fn date(seconds: u64) -> String {
    let (days, minutes) = (seconds / 86_400, seconds % 86_400 / 60);
    // Counted from the first of March of the year 0: a leap day is the last day of its year.
    let days = days + 719_468;
    let (era, day) = (days / 146_097, days % 146_097);
    let year = (day - day / 1460 + day / 36_524 - day / 146_096) / 365;
    let day = day - (365 * year + year / 4 - year / 100);
    let month = (5 * day + 2) / 153;
    let day = day - (153 * month + 2) / 5 + 1;
    let (month, next) = if month < 10 { (month + 3, 0) } else { (month - 9, 1) };
    let year = era * 400 + year + next;
    format!("{year:04}-{month:02}-{day:02} {:02}:{:02} UTC", minutes / 60, minutes % 60)
}

/// A number of things, with their name in the singular or plural.
pub(crate) fn count(n: u64, what: &str) -> String {
    format!("{} {what}{}", grouped(n), if n == 1 { "" } else { "s" })
}

/// A table. Cells are markup already.
pub(crate) struct Table {
    out: String,
    /// The attribute of each column's cells.
    classes: Vec<&'static str>,
}

impl Table {
    /// A table with the titles of its columns. Those that begin with `#` have numbers, which stand
    /// at their right; those that begin with `~` have texts, which may take several lines.
    pub(crate) fn new(titles: &[&str]) -> Self {
        let mut out = String::from("<div class=\"scroll\"><table><thead><tr>");
        let mut classes = Vec::with_capacity(titles.len());
        for title in titles {
            let class = match title.chars().next() {
                Some('#') => " class=\"n\"",
                Some('~') => " class=\"t\"",
                _ => "",
            };
            let _ = write!(
                out,
                "<th scope=\"col\"{class}>{}</th>",
                title.trim_start_matches(['#', '~'])
            );
            classes.push(class);
        }
        out.push_str("</tr></thead><tbody>");
        Self { out, classes }
    }

    pub(crate) fn row(&mut self, cells: &[String]) {
        self.out.push_str("<tr>");
        for (cell, class) in cells.iter().zip(&self.classes) {
            let _ = write!(self.out, "<td{class}>{cell}</td>");
        }
        self.out.push_str("</tr>\n");
    }

    pub(crate) fn end(mut self) -> String {
        self.out.push_str("</tbody></table></div>\n");
        self.out
    }
}
