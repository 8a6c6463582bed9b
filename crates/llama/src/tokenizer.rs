//! Text to token ids and back, and text as it is generated.
//!
//! A thin wrap of Hugging Face's `tokenizers`: nothing else in the project names that crate. [`TextStream`] turns ids that
//! arrive one by one into text that can be printed at once: a character whose bytes are spread over several tokens comes when
//! its last one has arrived.
//!
//! This module must not know the model; whether an id is below the model's vocabulary is the model's check.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::Once;

use crate::files;
use leasehold_core::{Error, Result};
use leasehold_input::shown_within;

/// What a decoder puts in place of bytes that are no UTF-8, or not yet.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;
/// A character has at most four bytes, so at most three can be waiting for the rest.
const MAX_PENDING: usize = 3;
/// The window is shortened when it reaches this many ids …
const WINDOW: usize = 64;
/// … to this many: more than any unfinished character, and some context for decoders that look at the token before.
const KEPT: usize = 16;

/// Bytes of a `tokenizer.json`; those with the largest vocabularies have some thirty million.
const MAX_BYTES: u64 = 256 << 20;
/// The most characters of an error of the library's that a message quotes.
const QUOTED: usize = 300;

thread_local! {
    /// Whether this thread is inside of the library, whose panics become errors.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library. Some damaged files make it panic (0.23.2: a character map that is none, a decoder that strips more than there is,
/// an empty pattern): an error here, and nothing on standard error.
fn call<T>(origin: &str, what: &str, f: impl FnOnce() -> tokenizers::Result<T>) -> Result<T> {
    static QUIET: Once = Once::new();
    QUIET.call_once(|| {
        let loud = panic::take_hook();
        panic::set_hook(Box::new(move |info| {
            if !INSIDE.get() {
                loud(info);
            }
        }));
    });
    let failed = |why: &str| Error::invalid(format!("{origin}: {what}: {}", shown_within(why, QUOTED)));
    let outside = INSIDE.replace(true);
    // Nothing of ours is changed inside, and the library's caches are only ever added to.
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    INSIDE.set(outside);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(failed(&e.to_string())),
        Err(panic) => {
            let text =
                panic.downcast_ref::<String>().map(String::as_str).or_else(|| panic.downcast_ref::<&str>().copied());
            Err(failed(&format!("its library failed: {}", text.unwrap_or("without a message"))))
        }
    }
}

/// A model's tokenizer.
///
/// Immutable, `Send + Sync`; encoding and decoding may run on many threads.
pub struct Tokenizer {
    inner: tokenizers::Tokenizer,
    origin: String,
}

/// What is read before `tokenizers` reads: its decoder panics where the text is no JSON (0.23.2, `expect("Helper")`).
#[derive(serde::Deserialize)]
struct Syntax {
    #[serde(rename = "decoder", default)]
    _decoder: serde_json::Value,
}

impl Tokenizer {
    /// Reads `DIR/tokenizer.json`. Blocks on the file.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a readable file, [`Error::InvalidArgument`] for what is no regular file or has more than 256 MiB, else
    /// as [`from_slice`](Self::from_slice).
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = files::read(&path, MAX_BYTES)?;
        Self::from_slice(&bytes, &path.display().to_string())
    }

    /// Reads the text of a `tokenizer.json`; `origin` stands for the file in messages. Truncation and padding that the file
    /// asks for are left out: a prompt is encoded whole.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when it describes no tokenizer.
    pub fn from_slice(json: &[u8], origin: &str) -> Result<Self> {
        let inner = call(origin, "no valid tokenizer", || {
            let _: Syntax = serde_json::from_slice(json)?;
            let mut inner = tokenizers::Tokenizer::from_bytes(json)?;
            inner.with_truncation(None)?.with_padding(None);
            Ok(inner)
        })?;
        Ok(Self { inner, origin: origin.to_owned() })
    }

    /// The ids of a prompt, with the special tokens that the tokenizer puts around one (such as the beginning of text).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the tokenizer has no token for some part of the text, or is damaged.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let encoding = call(&self.origin, "the text cannot be encoded", || self.inner.encode_fast(text, true))?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of some ids, without special tokens. Ids that the tokenizer does not know have no text; bytes that are no
    /// UTF-8 become U+FFFD.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] when the tokenizer's decoder refuses them, or is damaged.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        call(&self.origin, "the ids cannot be decoded", || self.inner.decode(ids, true))
    }

    /// The number of ids it knows, added tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Begins to turn ids into text as they come.
    #[must_use]
    pub fn stream(&self) -> TextStream<'_> {
        TextStream { tokenizer: self, window: Vec::new(), complete: 0, printed: String::new() }
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer").field("origin", &self.origin).field("vocab_size", &self.vocab_size()).finish()
    }
}

/// Text as its ids arrive; from [`Tokenizer::stream`].
///
/// The pieces from [`push`](Self::push), with the one from [`finish`](Self::finish) last, are [`Tokenizer::decode`] of all ids.
/// (Where byte tokens that make no character follow others that do, a decoder that judges a whole run of them may show more
/// U+FFFD than are printed here: what is printed is not taken back.)
///
/// ```
/// # let json = r#"{"version": "1.0", "added_tokens": [], "model": {"type": "BPE", "vocab": {"Ã": 0, "©": 1, "a": 2}, "merges": []},
/// #   "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}}"#;
/// # let tokenizer = leasehold_llama::Tokenizer::from_slice(json.as_bytes(), "tokenizer.json")?;
/// // Tokens 0 and 1 are the two bytes of one character.
/// let mut text = tokenizer.stream();
/// assert_eq!(text.push(2)?, "a");
/// assert_eq!(text.push(0)?, "");
/// assert_eq!(text.push(1)?, "é");
/// assert_eq!(text.finish()?, "");
/// # Ok::<(), leasehold_core::Error>(())
/// ```
#[derive(Debug)]
pub struct TextStream<'a> {
    tokenizer: &'a Tokenizer,
    /// The latest ids.
    window: Vec<u32>,
    /// How many of them, from the first on, have all their text printed.
    complete: usize,
    /// The text of the window that has been handed out.
    printed: String,
}

impl TextStream<'_> {
    /// The text that the next id completes; empty while a character is unfinished.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let mut text = self.tokenizer.decode(&self.window)?;
        if !text.starts_with(&self.printed) {
            // The decoder has changed its mind about what is printed: go on with the ids that came after it.
            self.window.drain(..self.complete);
            self.complete = 0;
            self.printed.clear();
            text = self.tokenizer.decode(&self.window)?;
        }
        let stable = stable_part(&text);
        let new = stable.get(self.printed.len()..).unwrap_or_default().to_owned();
        self.printed.push_str(&new);
        if self.printed == text {
            self.complete = self.window.len();
        }
        if self.window.len() >= WINDOW {
            let dropped = self.window.len() - KEPT;
            self.window.drain(..dropped);
            self.complete = self.complete.saturating_sub(dropped);
            let text = self.tokenizer.decode(&self.window)?;
            self.printed = stable_part(&text).to_owned();
        }
        Ok(new)
    }

    /// The rest: U+FFFD for a character that stayed unfinished.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        Ok(text.strip_prefix(self.printed.as_str()).unwrap_or_default().to_owned())
    }
}

/// The text without what may be the beginning of an unfinished character: up to three U+FFFD at its end.
fn stable_part(text: &str) -> &str {
    let mut stable = text;
    for _ in 0..MAX_PENDING {
        stable = stable.strip_suffix(REPLACEMENT).unwrap_or(stable);
    }
    stable
}

#[cfg(test)]
mod tests;
