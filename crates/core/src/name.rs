//! The process's table of names: short texts for streams, buffers and call sites.
//!
//! A [`Name`] is the number of a text in the table. Timelines, buffers and reports keep the number,
//! so a name costs them four bytes. The table grows only: a name is valid until the process ends.
//! Readers take no lock. A new text takes a lock and an allocation.
//!
//! This module must not know what the names belong to.

use crate::sync::{Mutex, OnceLock};
use std::cell::Cell;
use std::collections::BTreeMap;
use std::fmt;
use std::marker::PhantomData;
use std::num::NonZeroU32;
use std::panic::Location;

/// The names that the table holds. Further texts share the last name.
const NAMES: usize = 1 << 16;
const NAMES_PER_CHUNK: usize = 256;
/// The length of a name in bytes. Longer texts are cut.
const LONGEST: usize = 128;
/// The number of the name that all texts get once the table is full, and its text.
const LAST: NonZeroU32 = NonZeroU32::new(NAMES as u32 - 1).unwrap();
const FULL: &str = "(the table of names is full)";
/// Set in the tag of a buffer whose tag is a name.
const TAG_IS_NAME: u32 = 1 << 31;

type Chunk = Box<[OnceLock<&'static str>]>;

/// The texts, in chunks that are never moved or freed.
static TEXTS: [OnceLock<Chunk>; NAMES / NAMES_PER_CHUNK] =
    [const { OnceLock::new() }; NAMES / NAMES_PER_CHUNK];

thread_local! {
    /// The innermost scope of this thread; 0 outside all scopes.
    static SCOPE: Cell<u32> = const { Cell::new(0) };
}

/// A short text that reports, snapshots and traces show: the name of a stream, a buffer or a call
/// site.
///
/// Equal texts are the same name. A name has at most 128 bytes, and control characters become `?`.
/// The table holds 65,535 names, and never forgets one. Programs give names to what lives long, not
/// to each request.
///
/// ```
/// use leasehold_core::Name;
/// let name = Name::new("weights");
/// assert_eq!(name, Name::new("weights"));
/// assert_eq!((name.as_str(), name.to_string().as_str()), ("weights", "\"weights\""));
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub struct Name(NonZeroU32);

impl Name {
    /// The name of this text. Takes a lock, and allocates if the text is new.
    #[must_use]
    pub fn new(text: &str) -> Self {
        let mut short = String::with_capacity(text.len().min(LONGEST));
        for c in text.chars().map(|c| if c.is_control() { '?' } else { c }) {
            if short.len() + c.len_utf8() > LONGEST {
                break;
            }
            short.push(c);
        }
        static NUMBERS: OnceLock<Mutex<BTreeMap<&'static str, NonZeroU32>>> = OnceLock::new();
        let mut numbers = NUMBERS.get_or_init(|| Mutex::new(BTreeMap::new())).lock();
        if let Some(&number) = numbers.get(&*short) {
            return Self(number);
        }
        // Numbers begin at 1.
        let number = NonZeroU32::MIN.saturating_add(numbers.len() as u32);
        if number >= LAST {
            slot(LAST).get_or_init(|| FULL);
            return Self(LAST);
        }
        let kept = *slot(number).get_or_init(|| Box::leak(short.into_boxed_str()));
        numbers.insert(kept, number);
        Self(number)
    }

    /// The name of the place in the source that calls this: `src/model.rs:120`.
    ///
    /// ```
    /// use leasehold_core::Name;
    /// assert!(Name::here().as_str().contains(".rs:"));
    /// ```
    #[must_use]
    #[track_caller]
    pub fn here() -> Self {
        let place = Location::caller();
        Self::new(&format!("{}:{}", place.file(), place.line()))
    }

    /// The text.
    #[must_use]
    pub fn as_str(self) -> &'static str {
        slot(self.0).get().copied().unwrap_or_default()
    }

    /// The name as the tag of a buffer. Such tags have the highest bit set.
    #[inline]
    #[must_use]
    pub fn tag(self) -> u32 {
        TAG_IS_NAME | self.0.get()
    }

    /// The name that a tag is, if it is one.
    #[must_use]
    pub fn from_tag(tag: u32) -> Option<Self> {
        (tag & TAG_IS_NAME != 0).then(|| Self::from_number(tag & !TAG_IS_NAME)).flatten()
    }

    /// The name as a number, to be kept in an atomic. 0 is no name.
    #[inline]
    pub(crate) fn number(name: Option<Self>) -> u32 {
        name.map_or(0, |n| n.0.get())
    }

    pub(crate) fn from_number(number: u32) -> Option<Self> {
        let number = NonZeroU32::new(number)?;
        let chunk = TEXTS.get(number.get() as usize / NAMES_PER_CHUNK)?.get()?;
        chunk[number.get() as usize % NAMES_PER_CHUNK].get().map(|_| Self(number))
    }

    /// Makes this the name of what the thread calls until the guard is dropped: the call site.
    ///
    /// Race reports of simulated devices, traces, traced allocations and out-of-memory reports show
    /// the innermost scope. Backends without such reports do not read it. A scope costs two stores.
    ///
    /// ```
    /// use leasehold_core::Name;
    /// let layer = Name::new("layer 3");
    /// let scope = layer.scope();
    /// assert_eq!(Name::current(), Some(layer));
    /// drop(scope);
    /// assert_eq!(Name::current(), None);
    /// ```
    #[must_use = "the scope ends when the guard is dropped"]
    pub fn scope(self) -> NameScope {
        NameScope { outer: SCOPE.replace(self.0.get()), _of_this_thread: PhantomData }
    }

    /// The innermost [scope](Self::scope) of the calling thread.
    #[must_use]
    pub fn current() -> Option<Self> {
        SCOPE.try_with(Cell::get).ok().and_then(Self::from_number)
    }
}

/// The place of a text, whose chunk is made if it is the first one there.
fn slot(number: NonZeroU32) -> &'static OnceLock<&'static str> {
    let at = number.get() as usize;
    let chunk = TEXTS[at / NAMES_PER_CHUNK]
        .get_or_init(|| (0..NAMES_PER_CHUNK).map(|_| OnceLock::new()).collect());
    &chunk[at % NAMES_PER_CHUNK]
}

impl From<&str> for Name {
    fn from(text: &str) -> Self {
        Self::new(text)
    }
}

impl From<String> for Name {
    fn from(text: String) -> Self {
        Self::new(&text)
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "\"{}\"", self.as_str())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Display::fmt(self, f)
    }
}

/// The end of a [scope](Name::scope): the guard makes the outer scope current again. A guard that
/// is dropped out of order restores the scope that it found.
#[derive(Debug)]
pub struct NameScope {
    outer: u32,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for NameScope {
    fn drop(&mut self) {
        SCOPE.set(self.outer);
    }
}

/// A buffer's tag for human readers: `tag 7`, or `name "weights"` if the tag is a [`Name`].
///
/// ```
/// use leasehold_core::{Name, ShownTag};
/// assert_eq!(ShownTag(7).to_string(), "tag 7");
/// assert_eq!(ShownTag(Name::new("weights").tag()).to_string(), "name \"weights\"");
/// ```
#[derive(Debug, Clone, Copy)]
pub struct ShownTag(pub u32);

impl fmt::Display for ShownTag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match Name::from_tag(self.0) {
            Some(name) => write!(f, "name {name}"),
            None => write!(f, "tag {}", self.0),
        }
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_cut_between_characters_and_has_no_control_characters() {
        let name = Name::new(&format!("a\nb\u{1b}[2J{}", "ü".repeat(100)));
        assert!(name.as_str().starts_with("a?b?[2Jüü"), "{name}");
        assert!((LONGEST - 1..=LONGEST).contains(&name.as_str().len()), "{name}");
    }

    #[test]
    fn scopes_nest_and_belong_to_their_thread() {
        let (outer, inner) = (Name::new("outer"), Name::new("inner"));
        let scope = outer.scope();
        {
            let _scope = inner.scope();
            assert_eq!(Name::current(), Some(inner));
            std::thread::scope(|s| {
                s.spawn(|| assert_eq!(Name::current(), None));
            });
        }
        assert_eq!(Name::current(), Some(outer));
        drop(scope);
        assert_eq!(Name::current(), None);
    }

    #[test]
    fn no_word_but_a_known_name_is_a_name() {
        assert_eq!(Name::from_tag(7), None);
        assert_eq!(Name::from_tag(TAG_IS_NAME), None);
        assert_eq!(Name::from_tag(u32::MAX), None);
        let name = Name::new("known");
        assert_eq!(Name::from_tag(name.tag()), Some(name));
    }

    #[test]
    fn threads_that_give_one_text_get_one_name() {
        std::thread::scope(|s| {
            let all: Vec<_> = (0..4)
                .map(|_| s.spawn(|| (0..300).map(|i| Name::new(&format!("n{i}"))).collect()))
                .collect();
            let all: Vec<Vec<Name>> = all.into_iter().map(|t| t.join().unwrap()).collect();
            assert!(all.windows(2).all(|w| w[0] == w[1]));
            assert!(all[0].iter().enumerate().all(|(i, n)| n.as_str() == format!("n{i}")));
        });
    }
}
