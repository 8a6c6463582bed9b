//! Tokenization: text to token ids, ids to text, and streaming output of generated text.
//!
//! A thin wrapper of Hugging Face's `tokenizers`: no other code of the project names that crate.
//! [`TextStream`] turns ids that arrive one by one into text that can be printed at once. If a
//! character's bytes are spread over several tokens, the character appears after the last one.
//!
//! This module must not know the model. The model checks whether an id lies in its vocabulary.

use std::cell::Cell;
use std::panic::{self, AssertUnwindSafe};
use std::path::Path;
use std::sync::{Arc, Once};

use crate::{files, guess};
use leasehold::{Error, Result};
use leasehold_input::shown_within;

const NAME: &str = "tokenizer.json";
/// A decoder's replacement for bytes that are not UTF-8, or not complete yet.
const REPLACEMENT: char = char::REPLACEMENT_CHARACTER;
/// A character has at most four bytes, so at most three bytes can be pending.
const MAX_PENDING: usize = 3;
/// The window is shortened when it has this many ids …
const WINDOW: usize = 64;
/// … to about this many: more than any unfinished character, and some context for decoders that
/// depend on the previous token.
const KEPT: usize = 16;
/// The window is cut within a character if it has this many ids: no run of bytes is that long.
const MAX_WINDOW: usize = 1024;

/// The maximum size of a `tokenizer.json` in bytes; those of the largest vocabularies have about
/// thirty million.
const MAX_BYTES: u64 = 256 << 20;
/// The maximum number of characters that a message quotes from the library's error.
const QUOTED: usize = 300;

thread_local! {
    /// Says whether this thread is inside the library, whose panics become errors.
    static INSIDE: Cell<bool> = const { Cell::new(false) };
}

/// Calls the library. The library panics for some damaged files (0.23.2: an invalid character map,
/// a decoder that strips more than exists, an empty pattern). This function returns an error then,
/// and writes nothing to standard error.
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
    let failed =
        |why: &str| Error::invalid(format!("{origin}: {what}: {}", shown_within(why, QUOTED)));
    let outside = INSIDE.replace(true);
    // The call changes none of this crate's state, and the library only adds to its caches.
    let result = panic::catch_unwind(AssertUnwindSafe(f));
    INSIDE.set(outside);
    match result {
        Ok(Ok(value)) => Ok(value),
        Ok(Err(e)) => Err(failed(&e.to_string())),
        Err(panic) => {
            let text = panic
                .downcast_ref::<String>()
                .map(String::as_str)
                .or_else(|| panic.downcast_ref::<&str>().copied());
            Err(failed(&format!("its library failed: {}", text.unwrap_or("without a message"))))
        }
    }
}

/// A model's tokenizer: a handle, whose clones are the same tokenizer.
///
/// Immutable, `Send + Sync`; encoding and decoding may run on many threads.
#[derive(Clone)]
pub struct Tokenizer {
    inner: Arc<tokenizers::Tokenizer>,
    origin: Arc<str>,
}

/// The syntax check before `tokenizers` reads the text: its decoder panics on text that is not JSON
/// (0.23.2, `expect("Helper")`).
#[derive(serde::Deserialize)]
struct Syntax {
    #[serde(rename = "decoder", default)]
    _decoder: serde_json::Value,
}

impl Tokenizer {
    /// Reads `DIR/tokenizer.json`. Blocks on the file.
    ///
    /// # Errors
    /// [`Error::NotFound`] without a readable file. [`Error::InvalidArgument`] for a file that is
    /// not regular or has more than 256 MiB. Otherwise as [`from_slice`](Self::from_slice).
    pub fn from_dir(dir: &Path) -> Result<Self> {
        let bytes = files::read_in(dir, NAME, MAX_BYTES, guess::NO_TOKENIZER)?;
        Self::from_slice(&bytes, &dir.join(NAME).display().to_string())
    }

    /// Reads the text of a `tokenizer.json`; `origin` names the file in messages. Truncation and
    /// padding settings of the file are ignored: a prompt is encoded completely.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the text does not describe a tokenizer.
    pub fn from_slice(json: &[u8], origin: &str) -> Result<Self> {
        let inner = call(origin, "no valid tokenizer", || {
            let syntax = serde_json::from_slice(json);
            let _: Syntax = match (syntax, guess::seems_no_json(json)) {
                (Err(_), Some(kind)) => return Err(kind.into()),
                (syntax, _) => syntax?,
            };
            let mut inner = tokenizers::Tokenizer::from_bytes(json)?;
            inner.with_truncation(None)?.with_padding(None);
            Ok(inner)
        })?;
        Ok(Self { inner: Arc::new(inner), origin: origin.into() })
    }

    /// The ids of a prompt, with the tokenizer's special tokens (such as the beginning of text).
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tokenizer has no token for a part of the text, or is
    /// damaged.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, true)
    }

    /// The ids of a text that has its special tokens already, such as what a chat template makes:
    /// [`encode`](Self::encode) without the tokens that the tokenizer adds around a prompt.
    ///
    /// # Errors
    /// As [`encode`](Self::encode).
    pub fn encode_rendered(&self, text: &str) -> Result<Vec<u32>> {
        self.encode_with(text, false)
    }

    fn encode_with(&self, text: &str, special: bool) -> Result<Vec<u32>> {
        let encoding = call(&self.origin, "the text cannot be encoded", || {
            self.inner.encode_fast(text, special)
        })?;
        Ok(encoding.get_ids().to_vec())
    }

    /// The text of ids, without special tokens. Unknown ids have no text; bytes that are not UTF-8
    /// become U+FFFD.
    ///
    /// # Errors
    /// [`Error::InvalidArgument`] if the tokenizer's decoder refuses the ids, or is damaged.
    pub fn decode(&self, ids: &[u32]) -> Result<String> {
        call(&self.origin, "the ids cannot be decoded", || self.inner.decode(ids, true))
    }

    /// The token of an id as the vocabulary has it, special tokens too; `None` for an unknown id.
    #[must_use]
    pub fn token(&self, id: u32) -> Option<String> {
        self.inner.id_to_token(id)
    }

    /// The number of known ids, added tokens included.
    #[must_use]
    pub fn vocab_size(&self) -> usize {
        self.inner.get_vocab_size(true)
    }

    /// Starts a stream that turns ids into text as they arrive.
    #[must_use]
    pub fn stream(&self) -> TextStream {
        let tokenizer = self.clone();
        TextStream { tokenizer, window: Vec::new(), complete: 0, printed: String::new() }
    }

    /// The text of ids, such as a prompt's, and a stream of the text that follows them.
    ///
    /// The text and the stream's pieces together are [`decode`](Self::decode) of all ids. So a
    /// space at the seam stays, which a decoder strips at the beginning of a text. A character that
    /// is incomplete at the end of `ids` is left to the stream.
    ///
    /// ```
    /// # let json = r#"{"version": "1.0", "added_tokens": [],
    /// #   "model": {"type": "BPE", "vocab": {"▁a": 0, "▁b": 1}, "merges": []},
    /// #   "decoder": {"type": "Metaspace", "replacement": "▁", "prepend_scheme": "always",
    /// #               "split": true}}"#;
    /// # let json = json.as_bytes();
    /// # let tokenizer = leasehold_llama::Tokenizer::from_slice(json, "tokenizer.json")?;
    /// assert_eq!(tokenizer.decode(&[1])?, "b");
    /// let (prompt, mut text) = tokenizer.stream_after(&[0])?;
    /// assert_eq!((prompt.as_str(), text.push(1)?.as_str()), ("a", " b"));
    /// # Ok::<(), leasehold::Error>(())
    /// ```
    ///
    /// # Errors
    /// As [`decode`](Self::decode).
    pub fn stream_after(&self, ids: &[u32]) -> Result<(String, TextStream)> {
        let mut found = None;
        for pending in 0..=MAX_PENDING.min(ids.len()) {
            let complete = ids.len() - pending;
            let text = self.decode(&ids[..complete])?;
            let whole = !text.ends_with(REPLACEMENT);
            if whole || pending == 0 {
                found = Some((complete, text));
            }
            if whole {
                break;
            }
        }
        let (complete, mut text) = found.unwrap_or_default();
        text.truncate(stable_part(&text).len());
        let (tokenizer, window, printed) = (self.clone(), ids.to_vec(), text.clone());
        let mut stream = TextStream { tokenizer, window, complete, printed };
        if stream.window.len() >= WINDOW {
            stream.shorten()?;
        }
        Ok((text, stream))
    }
}

impl std::fmt::Debug for Tokenizer {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Tokenizer")
            .field("origin", &self.origin)
            .field("vocab_size", &self.vocab_size())
            .finish()
    }
}

/// Text from ids as they arrive; from [`Tokenizer::stream`]. It keeps the tokenizer.
///
/// The pieces from [`push`](Self::push), followed by the one from [`finish`](Self::finish), are
/// [`Tokenizer::decode`] of all ids. Exception: byte tokens that form no character may follow
/// tokens that do. A decoder that judges a whole run of them may then show more U+FFFD than this
/// stream, because printed text is not revoked.
///
/// ```
/// # let json = r#"{"version": "1.0", "added_tokens": [],
/// #   "model": {"type": "BPE", "vocab": {"Ã": 0, "©": 1, "a": 2}, "merges": []},
/// #   "decoder": {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true,
/// #               "use_regex": true}}"#;
/// # let tokenizer = leasehold_llama::Tokenizer::from_slice(json.as_bytes(), "tokenizer.json")?;
/// // Tokens 0 and 1 are the two bytes of one character.
/// let mut text = tokenizer.stream();
/// assert_eq!(text.push(2)?, "a");
/// assert_eq!(text.push(0)?, "");
/// assert_eq!(text.push(1)?, "é");
/// assert_eq!(text.finish()?, "");
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone)]
pub struct TextStream {
    tokenizer: Tokenizer,
    /// The last ids.
    window: Vec<u32>,
    /// The number of leading ids whose text is printed completely.
    complete: usize,
    /// The printed text of the window.
    printed: String,
}

impl TextStream {
    /// The text that the next id completes; empty while a character is incomplete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn push(&mut self, id: u32) -> Result<String> {
        self.window.push(id);
        let mut text = self.tokenizer.decode(&self.window)?;
        if !text.starts_with(&self.printed) {
            // The decoder has changed text that is printed already: continue with the later ids.
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
            self.shorten()?;
        }
        Ok(new)
    }

    /// Drops ids at the beginning of the window, if the text of the others ends as that of all. A
    /// cut within a character changes the text of the bytes behind it. Another cut is then tried,
    /// or a later call does it.
    fn shorten(&mut self) -> Result<()> {
        let all = self.tokenizer.decode(&self.window)?;
        let pending = all.get(self.printed.len()..).unwrap_or_default();
        let cuts = self.window.len() - KEPT - MAX_PENDING..=self.window.len() - KEPT;
        for dropped in cuts.rev() {
            let text = self.tokenizer.decode(&self.window[dropped..])?;
            let forced = self.window.len() >= MAX_WINDOW;
            let printed = match text.strip_suffix(pending) {
                Some(printed) if self.printed.ends_with(printed) => printed,
                _ if forced => stable_part(&text),
                _ => continue,
            };
            self.printed = printed.to_owned();
            self.window.drain(..dropped);
            self.complete = self.complete.saturating_sub(dropped);
            break;
        }
        Ok(())
    }

    /// The rest: U+FFFD for a character that stayed incomplete.
    ///
    /// # Errors
    /// As [`Tokenizer::decode`].
    pub fn finish(self) -> Result<String> {
        let text = self.tokenizer.decode(&self.window)?;
        Ok(text.strip_prefix(self.printed.as_str()).unwrap_or_default().to_owned())
    }
}

/// The text without a possible beginning of an incomplete character: up to three U+FFFD at its end.
fn stable_part(text: &str) -> &str {
    let mut stable = text;
    for _ in 0..MAX_PENDING {
        stable = stable.strip_suffix(REPLACEMENT).unwrap_or(stable);
    }
    stable
}

#[cfg(test)]
mod tests;
