//! Stop strings: texts that end a generation, cut from its output.
//!
//! Each string has the automaton of Knuth, Morris and Pratt over its bytes. Its state is how much
//! of the string the text ends with. So a text is read once, whatever its pieces are, and what may
//! be the beginning of a stop string is known.
//!
//! This module must not know tokens. Strings and pieces are UTF-8, so a match begins and ends with
//! a character.

use leasehold::{Error, Result};

/// A stop string, and how much of it the text ends with.
#[derive(Debug, Clone)]
struct Stop {
    string: Box<str>,
    /// For each number of matched bytes: how many still match if the next one does not.
    fallback: Box<[usize]>,
    matched: usize,
}

impl Stop {
    fn new(string: &str) -> Self {
        let bytes = string.as_bytes();
        let mut fallback = vec![0; bytes.len()];
        let mut matched = 0;
        for at in 1..bytes.len() {
            while matched > 0 && bytes[at] != bytes[matched] {
                matched = fallback[matched - 1];
            }
            matched += usize::from(bytes[at] == bytes[matched]);
            fallback[at] = matched;
        }
        Self { string: string.into(), fallback: fallback.into(), matched: 0 }
    }

    /// Reads a byte. Returns whether the text now ends with the string.
    fn read(&mut self, byte: u8) -> bool {
        let bytes = self.string.as_bytes();
        while self.matched > 0 && bytes[self.matched] != byte {
            self.matched = self.fallback[self.matched - 1];
        }
        self.matched += usize::from(bytes[self.matched] == byte);
        self.matched == bytes.len()
    }
}

/// Strings that end a text, searched in its pieces as they arrive.
///
/// The text ends where the first stop string is complete, and is cut where that string begins. Of
/// several that end at one place, the longest counts. Text that may be the beginning of a stop
/// string is held back until that is decided. How the text is divided makes no difference, so a
/// stop string may lie in several tokens.
///
/// ```
/// use leasehold_llama::StopStrings;
/// let mut stop = StopStrings::new(["\nUser:", "</s>"])?;
/// assert_eq!(stop.push("Hello <"), "Hello ");
/// assert_eq!(stop.push("3 you\nUs"), "<3 you");
/// assert_eq!(stop.push("er: and"), "");
/// assert_eq!(stop.stopped(), Some("\nUser:"));
/// # Ok::<(), leasehold::Error>(())
/// ```
///
/// The pieces come from a [`TextStream`](crate::TextStream). When the generation ends for another
/// reason, its rest goes through here, and then [`finish`](Self::finish) gives what was held back.
#[derive(Debug, Clone)]
pub struct StopStrings {
    stops: Vec<Stop>,
    held: String,
    /// The stop string that was found.
    found: Option<usize>,
}

impl StopStrings {
    /// For a text that any of these strings ends. Without strings, nothing ends it.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] for an empty string.
    pub fn new(strings: impl IntoIterator<Item: AsRef<str>>) -> Result<Self> {
        let stop = |string: &str| match string {
            "" => Err(Error::invalid("a stop string is empty; leave it out")),
            string => Ok(Stop::new(string)),
        };
        let stops = strings.into_iter().map(|s| stop(s.as_ref())).collect::<Result<_>>()?;
        Ok(Self { stops, held: String::new(), found: None })
    }

    /// Adds a piece of the text. Returns the text that cannot belong to a stop string any more;
    /// nothing once one was found.
    pub fn push(&mut self, piece: &str) -> String {
        if self.found.is_some() {
            return String::new();
        }
        let begin = self.held.len();
        self.held.push_str(piece);
        for (at, byte) in piece.bytes().enumerate() {
            let mut longest = 0;
            for (i, stop) in self.stops.iter_mut().enumerate() {
                if stop.read(byte) && stop.string.len() > longest {
                    (longest, self.found) = (stop.string.len(), Some(i));
                }
            }
            if longest > 0 {
                let mut text = std::mem::take(&mut self.held);
                text.truncate(begin + at + 1 - longest);
                return text;
            }
        }
        let undecided = self.stops.iter().map(|stop| stop.matched).max().unwrap_or(0);
        let rest = self.held.split_off(self.held.len() - undecided);
        std::mem::replace(&mut self.held, rest)
    }

    /// The stop string that was found.
    #[must_use]
    pub fn stopped(&self) -> Option<&str> {
        self.found.map(|at| &*self.stops[at].string)
    }

    /// The text that was held back, when no more text comes. It contains no stop string.
    #[must_use]
    pub fn finish(self) -> String {
        self.held
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    /// The output, the stop string, and the longest text that was ever held back.
    fn run(strings: &[String], pieces: &[&str]) -> (String, Option<String>, usize) {
        let mut stop = StopStrings::new(strings).unwrap();
        let (mut text, mut held) = (String::new(), 0);
        for piece in pieces {
            text.push_str(&stop.push(piece));
            held = held.max(stop.held.len());
        }
        let found = stop.stopped().map(str::to_owned);
        text.push_str(&stop.finish());
        (text, found, held)
    }

    /// At each end of a character, from the first one on, each string is compared.
    fn naive(strings: &[String], text: &str) -> (String, Option<String>) {
        for (at, c) in text.char_indices() {
            let read = &text[..at + c.len_utf8()];
            let ending = strings.iter().filter(|s| read.ends_with(s.as_str()));
            if let Some(longest) = ending.max_by_key(|s| s.len()) {
                return (read[..read.len() - longest.len()].to_owned(), Some(longest.clone()));
            }
        }
        (text.to_owned(), None)
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(2000))]
        #[test]
        fn any_division_of_a_text_gives_what_a_search_in_all_of_it_gives(
            strings in prop::collection::vec("[abé€]{1,4}", 0..4),
            text in "[abcé€]{0,24}",
            cuts in prop::collection::vec(any::<prop::sample::Index>(), 0..8),
        ) {
            let ends: Vec<usize> =
                text.char_indices().map(|(at, _)| at).chain([text.len()]).collect();
            let mut cuts: Vec<usize> = cuts.iter().map(|cut| *cut.get(&ends)).collect();
            cuts.extend([0, text.len()]);
            cuts.sort_unstable();
            let pieces: Vec<&str> = cuts.windows(2).map(|w| &text[w[0]..w[1]]).collect();
            let (output, found, held) = run(&strings, &pieces);
            prop_assert_eq!((output, found), naive(&strings, &text));
            // Never more than a string that lacks its last byte.
            let longest = strings.iter().map(String::len).max().unwrap_or(1);
            prop_assert!(held < longest.max(1));
        }
    }

    #[test]
    fn beginnings_are_held_back_and_given_again() {
        let mut stop = StopStrings::new(["aab"]).unwrap();
        // "aab" in "aaab": after the third "a", two are still the beginning.
        assert_eq!(["a", "a", "a"].map(|piece| stop.push(piece)), ["", "", "a"]);
        assert_eq!((stop.push("b x"), stop.stopped()), (String::new(), Some("aab")));
        assert_eq!((stop.push("more"), stop.finish()), (String::new(), String::new()));
        let mut stop = StopStrings::new(["END"]).unwrap();
        assert_eq!((stop.push("so EN"), stop.finish()), ("so ".to_owned(), "EN".to_owned()));
    }

    #[test]
    fn the_first_string_that_is_complete_ends_the_text() {
        let two = ["abcd".to_owned(), "bc".to_owned()];
        assert_eq!(run(&two, &["xabcd"]).0, "xa");
        // Of those that end at one place, the longest.
        let two = ["b".to_owned(), "ab".to_owned()];
        assert_eq!(run(&two, &["xa", "b"]), ("x".to_owned(), Some("ab".to_owned()), 1));
    }

    #[test]
    fn no_strings_hold_nothing_back_and_empty_ones_are_refused() {
        assert_eq!(run(&[], &["a", "", "b"]), ("ab".to_owned(), None, 0));
        let error = StopStrings::new(["a", ""]).unwrap_err();
        assert!(error.to_string().contains("a stop string is empty"), "{error}");
    }
}
