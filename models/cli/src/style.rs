//! Colours of text on a terminal. Any other output gets none, nor does a terminal if `NO_COLOR` is
//! set.

use std::borrow::Cow;
use std::io::IsTerminal;

/// The meaning of a piece of text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Tone {
    /// The head of a table.
    Head,
    /// Input of the user.
    Given,
    Good,
    Bad,
    /// A row that was not tried.
    Pale,
}

impl Tone {
    /// The control sequences before and after the text.
    fn codes(self) -> (&'static str, &'static str) {
        match self {
            Tone::Head => ("\x1b[1m", "\x1b[22m"),
            Tone::Given => ("\x1b[36m", "\x1b[39m"),
            Tone::Good => ("\x1b[32m", "\x1b[39m"),
            Tone::Bad => ("\x1b[1;31m", "\x1b[22;39m"),
            Tone::Pale => ("\x1b[2m", "\x1b[22m"),
        }
    }
}

/// The text for standard output.
pub fn paint(tone: Tone, text: &str) -> Cow<'_, str> {
    let plain = std::env::var_os("NO_COLOR").is_some_and(|value| !value.is_empty());
    painted(tone, text, std::io::stdout().is_terminal() && !plain)
}

fn painted(tone: Tone, text: &str, coloured: bool) -> Cow<'_, str> {
    if !coloured || text.is_empty() {
        return text.into();
    }
    let (begin, end) = tone.codes();
    format!("{begin}{text}{end}").into()
}

#[cfg(test)]
mod tests {
    use super::{Tone, painted};

    #[test]
    fn colours_are_for_terminals() {
        assert_eq!(painted(Tone::Bad, "FAILED", false), "FAILED");
        assert_eq!(painted(Tone::Bad, "", true), "");
        for tone in [Tone::Head, Tone::Given, Tone::Good, Tone::Bad, Tone::Pale] {
            let text = painted(tone, "text", true);
            assert!(text.starts_with("\x1b[") && text.contains("mtext\x1b["), "{text:?}");
        }
    }
}
