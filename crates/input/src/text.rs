//! External text in a form that is safe for messages and terminals.

use std::fmt::{self, Write};

/// The maximum number of characters that a message quotes from a value.
const VALUE: usize = 120;

/// Text for a message: at most 120 characters, with control characters as escapes.
///
/// ```
/// assert_eq!(leasehold_input::shown("a\u{1b}[2Jb").to_string(), "a\\u{1b}[2Jb");
/// let text = leasehold_input::shown(&"x".repeat(1 << 20)).to_string();
/// assert!(text.ends_with("xx… (1048576 bytes)"));
/// ```
#[must_use]
pub fn shown(text: &str) -> Shown<'_> {
    shown_within(text, VALUE)
}

/// Like [`shown`], with at most `most` characters.
#[must_use]
pub fn shown_within(text: &str, most: usize) -> Shown<'_> {
    Shown { text, most }
}

/// Displays text without its control characters; from [`shown`].
#[derive(Debug, Clone, Copy)]
pub struct Shown<'a> {
    text: &'a str,
    most: usize,
}

impl fmt::Display for Shown<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (n, c) in self.text.chars().enumerate() {
            if n == self.most {
                return write!(f, "… ({} bytes)", self.text.len());
            }
            show(c, f)?;
        }
        Ok(())
    }
}

/// Text for a terminal: control characters other than newline and tab as escapes, without a limit.
#[must_use]
pub fn printable(text: &str) -> String {
    let mut out = String::with_capacity(text.len());
    for c in text.chars() {
        // A write to a string does not fail.
        let _ = if matches!(c, '\n' | '\t') { out.write_char(c) } else { show(c, &mut out) };
    }
    out
}

fn show(c: char, to: &mut impl Write) -> fmt::Result {
    if commands(c) { write!(to, "{}", c.escape_default()) } else { to.write_char(c) }
}

/// Returns whether a terminal may interpret the character: control characters, line separators, and
/// characters that change the writing direction.
fn commands(c: char) -> bool {
    c.is_control()
        || matches!(c, '\u{2028}' | '\u{2029}' | '\u{200e}' | '\u{200f}' | '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}')
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_control_character_is_left() {
        let all: String = ('\0'..='\u{9f}').chain(['\u{2028}', '\u{202e}', '\u{2066}']).collect();
        let text = shown_within(&all, usize::MAX).to_string();
        assert!(!text.chars().any(commands), "{text:?}");
        assert!(
            text.contains("\\u{7}") && text.contains("\\r\\n") || text.contains("\\n"),
            "{text}"
        );
        assert_eq!(printable("a\tb\n\r\u{7}é"), "a\tb\n\\r\\u{7}é");
    }

    #[test]
    fn what_is_short_stays_and_what_is_long_is_cut_between_characters() {
        assert_eq!(shown("llama").to_string(), "llama");
        assert_eq!(shown_within("äöü", 3).to_string(), "äöü");
        assert_eq!(shown_within("äöüß", 3).to_string(), "äöü… (8 bytes)");
    }
}
