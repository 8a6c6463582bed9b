//! The process's table of names: short texts for streams, buffers and call sites.
//!
//! A [`Name`] is a counted text with a number. Timelines, buffers and events of traces keep the
//! number in a word; a [`NameCell`] keeps the text alive meanwhile.
//!
//! # Protocol
//! The table is a list of places. A place has a name, or had one: a name that nobody holds stays
//! until its place is needed, so that events of the past are still shown. Once the table has
//! `KEPT` places, a new text takes a place whose name nobody holds. If a few looks find none, the
//! table grows. So its size follows the names that are held.
//!
//! - the table: under its lock, a leaf.
//! - `HELD`: the cells that hold a place, without the lock. A thread that counts a cell holds the
//!   name otherwise too, or the count is one of a stale number, and symmetric.
//! - A place changes its name only if the table alone has the name and no cell holds the place. The
//!   number has a generation, so a stale number is no name.
//!
//! This module must not know what the names belong to.

use crate::sync::atomic::{AtomicU32, Ordering, fence};
use crate::sync::{Arc, Mutex, OnceLock};
use std::borrow::Borrow;
use std::cell::RefCell;
use std::collections::BTreeSet;
use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::panic::Location;

/// The places that keep names which nobody holds.
const KEPT: usize = (1 << 16) - 1;
/// The most places. Further texts share one name.
const MOST: usize = 1 << 20;
const PLACES_PER_CHUNK: usize = 1 << 10;
/// The places that a new text looks at for a free one.
const LOOKS: usize = 32;
/// The length of a name in bytes. Longer texts are cut.
const LONGEST: usize = 128;
/// The text of all names beyond the table.
const FULL: &str = "(the table of names is full)";
/// Set in the tag of a buffer whose tag is a name.
const TAG_IS_NAME: u32 = 1 << 31;
const PLACE_BITS: u32 = MOST.trailing_zeros();
const GENERATIONS: u32 = 1 << (31 - PLACE_BITS);

type Chunk = Box<[AtomicU32]>;

/// The number of cells that hold each place, in chunks that are never moved or freed.
static HELD: [OnceLock<Chunk>; MOST / PLACES_PER_CHUNK] =
    [const { OnceLock::new() }; MOST / PLACES_PER_CHUNK];

thread_local! {
    /// The innermost scope of this thread.
    static SCOPE: RefCell<Option<Name>> = const { RefCell::new(None) };
}

/// A text of the table.
struct Entry {
    /// Generation and place; never 0.
    number: u32,
    text: Box<str>,
}

/// A text of the table, found by its text.
struct ByText(Arc<Entry>);

impl PartialEq for ByText {
    fn eq(&self, other: &Self) -> bool {
        self.0.text == other.0.text
    }
}
impl Eq for ByText {}
impl PartialOrd for ByText {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for ByText {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.text.cmp(&other.0.text)
    }
}
impl Borrow<str> for ByText {
    fn borrow(&self) -> &str {
        &self.0.text
    }
}

/// The references that the table has to each name.
const OF_TABLE: usize = 2;

struct Table {
    texts: BTreeSet<ByText>,
    places: Vec<Arc<Entry>>,
    /// The place that the next new text looks at first.
    hand: usize,
}

impl Table {
    /// A table with one name, for the texts beyond the most. Its number is not 0, the word of no
    /// name.
    fn new() -> Self {
        let full = Arc::new(Entry { number: 1 << PLACE_BITS, text: FULL.into() });
        Self { texts: BTreeSet::from([ByText(full.clone())]), places: vec![full], hand: 0 }
    }

    /// The name of a text.
    fn name(&mut self, text: String) -> Name {
        if let Some(known) = self.texts.get(&*text) {
            return Name(known.0.clone());
        }
        let place = match self.free_place() {
            Some(place) => place,
            None if self.places.len() < MOST => self.places.len(),
            None => return Name(self.places[0].clone()),
        };
        let generation = match self.places.get(place) {
            Some(old) => {
                self.texts.remove(&*old.text);
                ((old.number >> PLACE_BITS) + 1) % GENERATIONS
            }
            None => 0,
        };
        let number = generation << PLACE_BITS | place as u32;
        let entry = Arc::new(Entry { number, text: text.into_boxed_str() });
        match self.places.get_mut(place) {
            Some(old) => *old = entry.clone(),
            None => self.places.push(entry.clone()),
        }
        self.texts.insert(ByText(entry.clone()));
        Name(entry)
    }

    /// A place whose name nobody holds, if the table is large and a few looks find one.
    fn free_place(&mut self) -> Option<usize> {
        if self.places.len() < KEPT {
            return None;
        }
        (0..LOOKS).find_map(|_| {
            let place = self.hand % self.places.len();
            self.hand = place + 1;
            let free = Arc::strong_count(&self.places[place]) == OF_TABLE;
            // A thread that made a cell hold the place has dropped its name afterwards.
            fence(Ordering::Acquire);
            let free = free && held(place).load(Ordering::Relaxed) == 0;
            (free && place != 0).then_some(place)
        })
    }

    fn of(&self, number: u32) -> Option<Name> {
        let entry = self.places.get(number as usize % MOST)?;
        (entry.number == number).then(|| Name(entry.clone()))
    }
}

fn table() -> &'static Mutex<Table> {
    static TABLE: OnceLock<Mutex<Table>> = OnceLock::new();
    TABLE.get_or_init(|| Mutex::new(Table::new()))
}

/// The number of cells that hold a place.
fn held(place: usize) -> &'static AtomicU32 {
    let chunk = HELD[place / PLACES_PER_CHUNK]
        .get_or_init(|| (0..PLACES_PER_CHUNK).map(|_| AtomicU32::new(0)).collect());
    &chunk[place % PLACES_PER_CHUNK]
}

/// A short text that reports, snapshots and traces show: the name of a stream, a buffer or a call
/// site.
///
/// Equal texts are the same name. A name has at most 128 bytes, and control characters become `?`.
/// The table forgets names that nothing has, the oldest ones first, once it has 65,535 of them. So
/// a program may name each request. Names of more than 2^20 things at a time are one name.
///
/// ```
/// use leasehold_core::Name;
/// let name = Name::new("weights");
/// assert_eq!(name, Name::new("weights"));
/// assert_eq!((name.as_str(), name.to_string().as_str()), ("weights", "\"weights\""));
/// ```
#[derive(Clone)]
pub struct Name(Arc<Entry>);

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
        table().lock().name(short)
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
    pub fn as_str(&self) -> &str {
        &self.0.text
    }

    /// The name as the tag of a buffer. Such tags have the highest bit set. The tag alone does not
    /// keep the name: a [`NameCell`] does.
    #[inline]
    #[must_use]
    pub fn tag(&self) -> u32 {
        TAG_IS_NAME | self.0.number
    }

    /// The name that a tag is, if it is one and the table still has it. Takes a lock.
    #[must_use]
    pub fn from_tag(tag: u32) -> Option<Self> {
        if tag & TAG_IS_NAME == 0 {
            return None;
        }
        table().lock().of(tag & !TAG_IS_NAME)
    }

    /// Makes this the name of what the thread calls until the guard is dropped: the call site.
    ///
    /// Race reports of simulated devices, traces, traced allocations and out-of-memory reports show
    /// the innermost scope. Backends without such reports do not read it. A scope costs two stores.
    ///
    /// ```
    /// use leasehold_core::Name;
    /// let layer = Name::new("layer 3");
    /// let scope = layer.clone().scope();
    /// assert_eq!(Name::current(), Some(layer));
    /// drop(scope);
    /// assert_eq!(Name::current(), None);
    /// ```
    #[must_use = "the scope ends when the guard is dropped"]
    pub fn scope(self) -> NameScope {
        let outer = SCOPE.try_with(|scope| scope.replace(Some(self))).unwrap_or_default();
        NameScope { outer, _of_this_thread: PhantomData }
    }

    /// The innermost [scope](Self::scope) of the calling thread.
    #[must_use]
    pub fn current() -> Option<Self> {
        SCOPE.try_with(|scope| scope.borrow().clone()).unwrap_or_default()
    }
}

impl PartialEq for Name {
    fn eq(&self, other: &Self) -> bool {
        self.0.text == other.0.text
    }
}
impl Eq for Name {}
impl Hash for Name {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.0.text.hash(state);
    }
}
impl PartialOrd for Name {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl Ord for Name {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.0.text.cmp(&other.0.text)
    }
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

impl From<&Name> for Name {
    fn from(name: &Name) -> Self {
        name.clone()
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

/// A word for a tag, which keeps the name alive that the tag is. Any thread may read and write it.
/// Takes no lock.
///
/// ```
/// use leasehold_core::{Name, NameCell};
/// let cell = NameCell::default();
/// cell.set(Name::new("weights").tag());
/// assert_eq!(Name::from_tag(cell.get()), Some(Name::new("weights")));
/// cell.set(7); // a tag that is no name
/// assert_eq!((cell.get(), Name::from_tag(7)), (7, None));
/// ```
#[derive(Default)]
pub struct NameCell(AtomicU32);

impl NameCell {
    /// A cell with the tag 0.
    #[cfg(not(loom))]
    #[must_use]
    pub const fn new() -> Self {
        Self(AtomicU32::new(0))
    }

    /// The tag. One load.
    #[inline]
    #[must_use]
    pub fn get(&self) -> u32 {
        self.0.load(Ordering::Relaxed)
    }

    /// Replaces the tag. The caller holds the [`Name`] of a tag that is one.
    pub fn set(&self, tag: u32) {
        if tag & TAG_IS_NAME != 0 {
            held(tag as usize % MOST).fetch_add(1, Ordering::Relaxed);
        }
        let old = self.0.swap(tag, Ordering::AcqRel);
        if old & TAG_IS_NAME != 0 {
            held(old as usize % MOST).fetch_sub(1, Ordering::Release);
        }
    }

    /// Keeps a name, or none.
    pub fn set_name(&self, name: Option<Name>) {
        self.set(name.as_ref().map_or(0, Name::tag));
    }

    /// The name that the cell keeps, if the tag is one.
    #[must_use]
    pub fn name(&self) -> Option<Name> {
        Name::from_tag(self.get())
    }
}

impl Drop for NameCell {
    fn drop(&mut self) {
        if self.get() != 0 {
            self.set(0);
        }
    }
}

impl fmt::Debug for NameCell {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", ShownTag(self.get()))
    }
}

/// The end of a [scope](Name::scope): the guard makes the outer scope current again. A guard that
/// is dropped out of order restores the scope that it found.
#[derive(Debug)]
pub struct NameScope {
    outer: Option<Name>,
    _of_this_thread: PhantomData<*const ()>,
}

impl Drop for NameScope {
    fn drop(&mut self) {
        let outer = self.outer.take();
        let _ = SCOPE.try_with(|scope| scope.replace(outer));
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
            None if self.0 & TAG_IS_NAME != 0 => f.write_str("a name of the past"),
            None => write!(f, "tag {}", self.0),
        }
    }
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/name.rs"]
mod tests;
