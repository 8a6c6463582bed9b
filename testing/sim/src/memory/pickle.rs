//! Pickles of plain data, of every protocol, without running anything.
//!
//! The crates for pickles copy a value wherever the memo shares it, build what they read by
//! recursion, or know classes: a small file may then take all memory. This reader shares what the
//! file shares, recurses nowhere, and bounds its memory. It keeps of a file what its caller can
//! name: the structure, whole numbers, and the caller's words.

use std::collections::HashMap;
use std::fmt;
use std::io::{self, BufRead, BufReader, ErrorKind, Read};

/// The most bytes of a pickle.
const BYTES: u64 = 4 << 30;
/// The most bytes of memory that a pickle takes, without the free room of growing lists.
const MEMORY: usize = 2 << 30;
/// The bytes of a line or a text that are kept to be looked at.
const LOOKED_AT: usize = 256;

/// The reason why a pickle is not read. The display is one line with the place in the file.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct PickleError {
    at: u64,
    what: String,
}

impl fmt::Display for PickleError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "byte {}: {}", self.at, self.what)
    }
}

impl std::error::Error for PickleError {}

/// A value in 8 bytes, because a pickle may have many.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Item {
    /// A value that is only skipped: nothing, a truth value, a float, bytes, another text, a number
    /// below 0 or above 64 bits.
    Other,
    Small(u32),
    /// A place in `Pickle::numbers`.
    Large(u32),
    /// One of the caller's words.
    Word(u16),
    /// A place in `Pickle::lists`, of a list, a tuple or a set.
    List(u32),
    /// A place in `Pickle::dicts`.
    Dict(u32),
}

/// The meaning of the bytes of a value, before the value is kept.
enum Found {
    Number(u64),
    Word(u16),
    Other,
}

/// The plain data of a pickle: lists, tuples, dictionaries, whole numbers, and some words. Other
/// values keep their place and lose their content.
///
/// Values that the file shares are shared here, so a list may contain itself.
#[derive(Debug)]
pub(crate) struct Pickle {
    words: &'static [&'static str],
    /// The numbers of more than 32 bits.
    numbers: Vec<u64>,
    lists: Vec<Vec<Item>>,
    /// The entries whose keys are words, in the order of the file.
    dicts: Vec<Vec<(u16, Item)>>,
    root: Item,
}

impl Pickle {
    /// Reads a pickle of plain data: nothing of it is run, and no class or function is looked up.
    /// `words` are the texts that matter to the caller, at most 65,536: keys of dictionaries, and
    /// texts as values.
    ///
    /// Reads at most 4 GiB, and takes about 2 GiB of memory at most. Bytes behind the end of the
    /// pickle may be read too, and mean nothing.
    ///
    /// # Errors
    /// The place and the reason: a class, a function or another object that is no plain data;
    /// damage; too much of anything; the input's own error.
    pub(crate) fn read(
        input: impl Read,
        words: &'static [&'static str],
    ) -> Result<Pickle, PickleError> {
        Self::read_within(input, words, BYTES, MEMORY)
    }

    fn read_within(
        input: impl Read,
        words: &'static [&'static str],
        bytes: u64,
        memory: usize,
    ) -> Result<Pickle, PickleError> {
        let mut reader = Reader {
            input: BufReader::with_capacity(1 << 16, input),
            at: 0,
            bytes,
            op: 0,
            line: Vec::new(),
            pickle: Pickle {
                words,
                numbers: Vec::new(),
                lists: Vec::new(),
                dicts: Vec::new(),
                root: Item::Other,
            },
            stack: Vec::new(),
            marks: Vec::new(),
            memo: HashMap::new(),
            room: memory,
        };
        match reader.run() {
            Ok(root) => Ok(Pickle { root, ..reader.pickle }),
            Err(what) => Err(PickleError { at: reader.op, what }),
        }
    }

    /// The value of the pickle.
    #[must_use]
    pub(crate) fn root(&self) -> Node<'_> {
        Node { pickle: self, item: self.root }
    }
}

/// A value of a [`Pickle`].
#[derive(Debug, Clone, Copy)]
pub(crate) struct Node<'a> {
    pickle: &'a Pickle,
    item: Item,
}

impl<'a> Node<'a> {
    /// The value of a key, if this is a dictionary that has it and the key is one of the reader's
    /// words.
    #[must_use]
    pub(crate) fn get(self, key: &str) -> Option<Node<'a>> {
        let Item::Dict(at) = self.item else { return None };
        // The last entry of a key counts.
        let mut entries = self.pickle.dicts[at as usize].iter().rev();
        let (_, item) = entries.find(|e| self.pickle.words[usize::from(e.0)] == key)?;
        Some(Node { pickle: self.pickle, item: *item })
    }

    /// The elements of a list, a tuple or a set; nothing of another value.
    pub(crate) fn items(self) -> impl ExactSizeIterator<Item = Node<'a>> {
        let items: &'a [Item] = match self.item {
            Item::List(at) => &self.pickle.lists[at as usize],
            _ => &[],
        };
        items.iter().map(move |&item| Node { pickle: self.pickle, item })
    }

    /// Returns whether this is a list, a tuple or a set.
    #[must_use]
    pub(crate) fn is_list(self) -> bool {
        matches!(self.item, Item::List(_))
    }

    /// A whole number from 0 on.
    #[must_use]
    pub(crate) fn number(self) -> Option<u64> {
        match self.item {
            Item::Small(n) => Some(n.into()),
            Item::Large(at) => Some(self.pickle.numbers[at as usize]),
            _ => None,
        }
    }

    /// One of the reader's words.
    #[must_use]
    pub(crate) fn word(self) -> Option<&'static str> {
        match self.item {
            Item::Word(word) => Some(self.pickle.words[usize::from(word)]),
            _ => None,
        }
    }
}

/// A number of two's complement in little-endian order.
fn number(bytes: &[u8]) -> Found {
    let negative = bytes.last().is_some_and(|b| b >> 7 == 1);
    let (low, high) = bytes.split_at(bytes.len().min(8));
    if negative || high.iter().any(|&b| b != 0) {
        return Found::Other;
    }
    let mut wide = [0; 8];
    wide[..low.len()].copy_from_slice(low);
    Found::Number(u64::from_le_bytes(wide))
}

/// The machine of a pickle: a stack with marks, and a memo.
struct Reader<R: Read> {
    input: BufReader<R>,
    at: u64,
    bytes: u64,
    /// Where the current operation begins.
    op: u64,
    line: Vec<u8>,
    pickle: Pickle,
    stack: Vec<Item>,
    marks: Vec<usize>,
    memo: HashMap<u32, Item>,
    /// Bytes of memory that may still be taken.
    room: usize,
}

type Step<T = ()> = Result<T, String>;

impl<R: Read> Reader<R> {
    /// Runs all operations up to the end, and returns the value.
    fn run(&mut self) -> Step<Item> {
        loop {
            self.op = self.at;
            let [op] = self.array()?;
            match op {
                b'.' => return self.pop(),
                b'(' => {
                    self.take(size_of::<usize>())?;
                    self.marks.push(self.stack.len());
                }
                b'0' => self.discard()?,
                b'1' => {
                    let from = self.mark()?;
                    self.shorten(from);
                }
                b'2' => {
                    let item = self.top()?;
                    self.push(item)?;
                }
                b'N' | 0x88 | 0x89 => self.push(Item::Other)?,
                b'I' | b'L' | b'J' | b'K' | b'M' | 0x8A | 0x8B | b'F' | b'G' => self.number(op)?,
                b'V' | b'S' | b'X' | 0x8C | 0x8D | b'U' | b'T' => self.words(op)?,
                b'B' | b'C' | 0x8E | 0x96 => {
                    let bytes = match op {
                        b'B' => self.length::<4>()?,
                        b'C' => self.length::<1>()?,
                        _ => self.length::<8>()?,
                    };
                    self.skip(bytes)?;
                    self.push(Item::Other)?;
                }
                b']' | b')' | 0x8F | b'l' | b't' | 0x91 | 0x85..=0x87 | b'a' | b'e' | 0x90 => {
                    self.sequence(op)?;
                }
                b'}' | b'd' | b's' | b'u' => self.dictionary(op)?,
                b'p' | b'q' | b'r' | 0x94 | b'g' | b'h' | b'j' => self.memo(op)?,
                // The form of the file.
                0x80 => {
                    let [protocol] = self.array()?;
                    if protocol > 5 {
                        return Err(format!("protocol {protocol}; 0 to 5 are known"));
                    }
                }
                0x95 => self.skip(8)?,
                _ => return Err(refused(op)),
            }
        }
    }

    /// A number.
    fn number(&mut self, op: u8) -> Step {
        match op {
            b'I' | b'L' => {
                let line = self.line()?;
                let text = std::str::from_utf8(line).unwrap_or_default().trim();
                let found = match text.strip_suffix('L').unwrap_or(text) {
                    // Truth values of the first protocols.
                    "00" | "01" if op == b'I' => Found::Other,
                    _ if line.len() > LOOKED_AT => Found::Other,
                    text => match text.parse::<i128>() {
                        Ok(n) => u64::try_from(n).map_or(Found::Other, Found::Number),
                        Err(e) if is_wide(e.kind()) => Found::Other,
                        Err(_) => return Err("no number".into()),
                    },
                };
                self.keep(found)?;
            }
            b'J' => {
                let n = i32::from_le_bytes(self.array()?);
                self.push(u32::try_from(n).map_or(Item::Other, Item::Small))?;
            }
            b'K' => {
                let [n] = self.array()?;
                self.push(Item::Small(n.into()))?;
            }
            b'M' => {
                let n = u16::from_le_bytes(self.array()?);
                self.push(Item::Small(n.into()))?;
            }
            0x8A | 0x8B => {
                let bytes = if op == 0x8A { self.length::<1>()? } else { self.signed_length()? };
                let found = self.text(bytes, number)?;
                self.keep(found)?;
            }
            b'F' => {
                self.line()?;
                self.push(Item::Other)?;
            }
            _ => {
                self.skip(8)?;
                self.push(Item::Other)?;
            }
        }
        Ok(())
    }

    /// A text.
    fn words(&mut self, op: u8) -> Step {
        match op {
            b'V' | b'S' => {
                let words = self.pickle.words;
                let line = self.line()?;
                let text = match op {
                    b'V' => line,
                    _ => unquoted(line).ok_or("a text without its quotes")?,
                };
                let found = word(words, text);
                self.keep(found)?;
            }
            _ => {
                let bytes = match op {
                    b'X' => self.length::<4>()?,
                    0x8D => self.length::<8>()?,
                    b'T' => self.signed_length()?,
                    _ => self.length::<1>()?,
                };
                let words = self.pickle.words;
                let found = self.text(bytes, |text| word(words, text))?;
                self.keep(found)?;
            }
        }
        Ok(())
    }

    /// A list, a tuple or a set: an empty one, one of what is on the stack, or more elements.
    fn sequence(&mut self, op: u8) -> Step {
        match op {
            b']' | b')' | 0x8F => {
                let list = self.list(0..0)?;
                self.push(list)?;
            }
            b'l' | b't' | 0x91 => {
                let from = self.mark()?;
                self.gather(from)?;
            }
            0x85..=0x87 => {
                let from = self.stack.len().checked_sub(usize::from(op - 0x84));
                self.gather(from.filter(|&from| from >= self.floor()).ok_or(EMPTY)?)?;
            }
            b'a' => {
                let from = self.stack.len().checked_sub(1).ok_or(EMPTY)?;
                self.append(from)?;
            }
            _ => {
                let from = self.mark()?;
                self.append(from)?;
            }
        }
        Ok(())
    }

    /// A dictionary, or entries of one.
    fn dictionary(&mut self, op: u8) -> Step {
        match op {
            b'}' => {
                let dict = self.dict()?;
                self.push(dict)?;
            }
            b'd' => {
                let from = self.mark()?;
                let dict = self.dict()?;
                self.take(size_of::<Item>())?;
                self.stack.insert(from, dict);
                self.set(from + 1)?;
            }
            b's' => {
                let from = self.stack.len().checked_sub(2).ok_or(EMPTY)?;
                self.set(from)?;
            }
            _ => {
                let from = self.mark()?;
                self.set(from)?;
            }
        }
        Ok(())
    }

    /// Puts the newest value into the memo, or takes one out.
    fn memo(&mut self, op: u8) -> Step {
        match op {
            b'p' | b'q' | b'r' | 0x94 => {
                let at = match op {
                    b'p' => self.index()?,
                    b'q' => self.length::<1>()?,
                    b'r' => self.length::<4>()?,
                    _ => self.memo.len() as u64,
                };
                self.take(2 * size_of::<(u32, Item)>())?;
                let at = u32::try_from(at).map_err(|_| "the memo is too large")?;
                self.memo.insert(at, self.top()?);
            }
            _ => {
                let at = match op {
                    b'g' => self.index()?,
                    b'h' => self.length::<1>()?,
                    _ => self.length::<4>()?,
                };
                let item = u32::try_from(at).ok().and_then(|at| self.memo.get(&at).copied());
                self.push(item.ok_or_else(|| format!("the memo has no value {at}"))?)?;
            }
        }
        Ok(())
    }

    /// Takes memory.
    fn take(&mut self, bytes: usize) -> Step {
        self.room = self.room.checked_sub(bytes).ok_or("more values than memory is given to")?;
        Ok(())
    }

    fn keep(&mut self, found: Found) -> Step {
        let item = match found {
            Found::Other => Item::Other,
            Found::Word(word) => Item::Word(word),
            Found::Number(n) => match u32::try_from(n) {
                Ok(n) => Item::Small(n),
                Err(_) => {
                    self.take(size_of::<u64>())?;
                    let at = self.pickle.numbers.len();
                    self.pickle.numbers.push(n);
                    Item::Large(u32::try_from(at).map_err(|_| "too many numbers")?)
                }
            },
        };
        self.push(item)
    }

    fn push(&mut self, item: Item) -> Step {
        self.take(size_of::<Item>())?;
        self.stack.push(item);
        Ok(())
    }

    /// Where the values since the last mark begin.
    fn floor(&self) -> usize {
        self.marks.last().copied().unwrap_or(0)
    }

    fn top(&self) -> Step<Item> {
        let own = self.stack.len() > self.floor();
        Ok(*self.stack.last().filter(|_| own).ok_or(EMPTY)?)
    }

    fn pop(&mut self) -> Step<Item> {
        let item = self.top()?;
        self.shorten(self.stack.len() - 1);
        Ok(item)
    }

    /// Removes the last value, or a mark that is above it.
    fn discard(&mut self) -> Step {
        if self.marks.last() == Some(&self.stack.len()) {
            return self.mark().map(drop);
        }
        self.pop().map(drop)
    }

    fn shorten(&mut self, to: usize) {
        self.room += (self.stack.len() - to) * size_of::<Item>();
        self.stack.truncate(to);
    }

    /// Removes the last mark, and returns where the values above it begin.
    fn mark(&mut self) -> Step<usize> {
        let from = self.marks.pop().ok_or("a mark is missing")?;
        self.room += size_of::<usize>();
        Ok(from)
    }

    /// A new list of values of the stack, which stay there.
    fn list(&mut self, of: std::ops::Range<usize>) -> Step<Item> {
        self.take(size_of::<Vec<Item>>() + of.len() * size_of::<Item>())?;
        let at = u32::try_from(self.pickle.lists.len()).map_err(|_| "too many lists")?;
        self.pickle.lists.push(self.stack[of].to_vec());
        Ok(Item::List(at))
    }

    fn dict(&mut self) -> Step<Item> {
        self.take(size_of::<Vec<(u16, Item)>>())?;
        let at = u32::try_from(self.pickle.dicts.len()).map_err(|_| "too many dictionaries")?;
        self.pickle.dicts.push(Vec::new());
        Ok(Item::Dict(at))
    }

    /// Replaces the values from a place on by a list of them.
    fn gather(&mut self, from: usize) -> Step {
        let list = self.list(from..self.stack.len())?;
        self.shorten(from);
        self.push(list)
    }

    /// Moves the values from a place on to the list before them.
    fn append(&mut self, from: usize) -> Step {
        let to = from.checked_sub(1).filter(|&to| to >= self.floor()).ok_or(EMPTY)?;
        let Item::List(list) = self.stack[to] else { return Err("no list to append to".into()) };
        self.take((self.stack.len() - from) * size_of::<Item>())?;
        self.pickle.lists[list as usize].extend_from_slice(&self.stack[from..]);
        self.shorten(from);
        Ok(())
    }

    /// Moves the pairs of key and value from a place on to the dictionary before them.
    fn set(&mut self, from: usize) -> Step {
        let to = from.checked_sub(1).filter(|&to| to >= self.floor()).ok_or(EMPTY)?;
        let Item::Dict(dict) = self.stack[to] else {
            return Err("no dictionary to put an entry into".into());
        };
        if (self.stack.len() - from) % 2 == 1 {
            return Err("a key without a value".into());
        }
        self.take((self.stack.len() - from) / 2 * size_of::<(u16, Item)>())?;
        let entries = self.stack[from..].chunks_exact(2).filter_map(|pair| match pair[0] {
            Item::Word(word) => Some((word, pair[1])),
            _ => None,
        });
        self.pickle.dicts[dict as usize].extend(entries);
        self.shorten(from);
        Ok(())
    }

    /// The next bytes of the input, at least one.
    fn ahead(&mut self) -> Step<&[u8]> {
        if self.at >= self.bytes {
            return Err(format!("longer than {} bytes", self.bytes));
        }
        let left = usize::try_from(self.bytes - self.at).unwrap_or(usize::MAX);
        loop {
            match self.input.fill_buf() {
                Ok(_) => break,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(e) => return Err(unreadable(&e)),
            }
        }
        let there = self.input.buffer();
        match there.len().min(left) {
            0 => Err("the file ends here, in the middle of its data".into()),
            n => Ok(&there[..n]),
        }
    }

    fn advance(&mut self, bytes: usize) {
        self.input.consume(bytes);
        self.at += bytes as u64;
    }

    fn skip(&mut self, mut bytes: u64) -> Step {
        while bytes > 0 {
            let there = self.ahead()?.len() as u64;
            // No more than is there, so it is a length.
            let now = there.min(bytes);
            self.advance(now as usize);
            bytes -= now;
        }
        Ok(())
    }

    fn fill(&mut self, to: &mut [u8]) -> Step {
        let mut done = 0;
        while done < to.len() {
            let there = self.ahead()?;
            let now = there.len().min(to.len() - done);
            to[done..done + now].copy_from_slice(&there[..now]);
            self.advance(now);
            done += now;
        }
        Ok(())
    }

    fn array<const N: usize>(&mut self) -> Step<[u8; N]> {
        let mut bytes = [0; N];
        self.fill(&mut bytes)?;
        Ok(bytes)
    }

    /// A number without sign in `N` bytes.
    fn length<const N: usize>(&mut self) -> Step<u64> {
        let mut wide = [0; 8];
        wide[..N].copy_from_slice(&self.array::<N>()?);
        Ok(u64::from_le_bytes(wide))
    }

    fn signed_length(&mut self) -> Step<u64> {
        let length = i32::from_le_bytes(self.array()?);
        u64::try_from(length).map_err(|_| "a negative length".into())
    }

    /// Looks at so many bytes if they are few, and skips them if they are many.
    fn text(&mut self, bytes: u64, look: impl FnOnce(&[u8]) -> Found) -> Step<Found> {
        let mut text = [0; LOOKED_AT];
        match usize::try_from(bytes).ok().and_then(|n| text.get_mut(..n)) {
            Some(text) => {
                self.fill(text)?;
                Ok(look(text))
            }
            None => self.skip(bytes).map(|()| Found::Other),
        }
    }

    /// The rest of a line without its end: one byte more than are looked at, if it is longer.
    fn line(&mut self) -> Step<&[u8]> {
        self.line.clear();
        loop {
            let there = self.ahead()?;
            let end = there.iter().position(|&b| b == b'\n');
            let now = end.unwrap_or(there.len());
            let kept = there[..now.min(LOOKED_AT + 1)].to_vec();
            let room = LOOKED_AT + 1 - self.line.len();
            self.line.extend_from_slice(&kept[..kept.len().min(room)]);
            self.advance(now + usize::from(end.is_some()));
            if end.is_some() {
                return Ok(self.line.strip_suffix(b"\r").unwrap_or(&self.line));
            }
        }
    }

    /// A place of the memo, as a line.
    fn index(&mut self) -> Step<u64> {
        let text = std::str::from_utf8(self.line()?).unwrap_or_default();
        text.trim().parse().map_err(|_| "no place of the memo".into())
    }
}

const EMPTY: &str = "a value is missing";

fn unreadable(e: &io::Error) -> String {
    format!("cannot be read: {e}")
}

fn is_wide(kind: &std::num::IntErrorKind) -> bool {
    matches!(kind, std::num::IntErrorKind::PosOverflow | std::num::IntErrorKind::NegOverflow)
}

fn word(words: &[&str], text: &[u8]) -> Found {
    let at = words.iter().position(|w| w.as_bytes() == text);
    at.and_then(|at| u16::try_from(at).ok()).map_or(Found::Other, Found::Word)
}

/// The text between the quotes of a line. Escapes stay as they are.
fn unquoted(line: &[u8]) -> Option<&[u8]> {
    match line {
        // The end of a long line is not kept.
        _ if line.len() > LOOKED_AT => Some(line),
        [b'\'', text @ .., b'\''] | [b'"', text @ .., b'"'] => Some(text),
        _ => None,
    }
}

/// The reason why an operation is not done.
fn refused(op: u8) -> String {
    let name = match op {
        b'c' => "GLOBAL",
        0x93 => "STACK_GLOBAL",
        b'R' => "REDUCE",
        b'b' => "BUILD",
        b'i' => "INST",
        b'o' => "OBJ",
        0x81 => "NEWOBJ",
        0x92 => "NEWOBJ_EX",
        b'P' => "PERSID",
        b'Q' => "BINPERSID",
        0x82..=0x84 => "EXT",
        0x97 | 0x98 => "an out-of-band buffer",
        _ => return format!("{op:#04x} is no operation of a pickle"),
    };
    format!(
        "{name}: a class, a function or another object; only plain data is read, nothing is run"
    )
}

#[cfg(test)]
mod tests;
