//! Interned names of structs, each kept once for the life of the process.
//!
//! A thread finds a recently used name without a lock and without an allocation. Its cache is keyed
//! by the string's address and checked against its bytes. This module must not know which objects
//! have the names.

use rustc_hash::FxHashMap;
use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_char;
use std::fmt;

use crate::heap::NoMemory;
use crate::lock::SpinLock;

/// Names longer than this are cut.
pub(crate) const MAX_NAME: usize = 255;
/// The maximum number of distinct names; later names share the name "(other)".
const MAX_NAMES: usize = 1 << 16;
const CACHE: usize = 64;

/// No name.
pub(crate) const NONE: u32 = 0;
const OTHER: u32 = 1;
/// The id of the first interned name.
const FIRST: usize = 2;

pub(crate) struct Interner {
    ids: FxHashMap<&'static [u8], u32>,
    names: Vec<&'static [u8]>,
}

impl Interner {
    const fn new() -> Self {
        Self { ids: HashMap::with_hasher(rustc_hash::FxBuildHasher), names: Vec::new() }
    }
}

/// All names of the process, under their lock.
#[cfg(not(loom))]
pub(crate) fn interner() -> &'static SpinLock<Interner> {
    static INTERNER: SpinLock<Interner> = SpinLock::new(Interner::new());
    &INTERNER
}

/// Loom's atomics cannot be made in constants.
#[cfg(loom)]
pub(crate) fn interner() -> &'static SpinLock<Interner> {
    static INTERNER: leasehold_core::sync::OnceLock<SpinLock<Interner>> =
        leasehold_core::sync::OnceLock::new();
    INTERNER.get_or_init(|| SpinLock::new(Interner::new()))
}

/// The id of `name` (at most [`MAX_NAME`] bytes of it) and its permanent copy.
fn intern(name: &[u8]) -> Result<(u32, &'static [u8]), NoMemory> {
    let mut all = interner().lock();
    if let Some((&kept, &id)) = all.ids.get_key_value(name) {
        return Ok((id, kept));
    }
    if all.names.len() >= MAX_NAMES {
        return Ok((OTHER, b"(other)"));
    }
    let mut copy = Vec::new();
    copy.try_reserve_exact(name.len()).map_err(|_| NoMemory)?;
    all.names.try_reserve(1).map_err(|_| NoMemory)?;
    all.ids.try_reserve(1).map_err(|_| NoMemory)?;
    copy.extend_from_slice(name);
    let kept: &'static [u8] = copy.leak();
    let id = (all.names.len() + FIRST) as u32;
    all.names.push(kept);
    all.ids.insert(kept, id);
    Ok((id, kept))
}

/// A name. Its display replaces bytes that are not UTF-8.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) struct Name(&'static [u8]);

impl Name {
    pub(crate) fn is_empty(self) -> bool {
        self.0.is_empty()
    }
}

impl fmt::Display for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for chunk in self.0.utf8_chunks() {
            f.write_str(chunk.valid())?;
            if !chunk.invalid().is_empty() {
                f.write_str("\u{FFFD}")?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Name {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("\"")?;
        for chunk in self.0.utf8_chunks() {
            write!(f, "{}", chunk.valid().escape_debug())?;
            if !chunk.invalid().is_empty() {
                f.write_str("\u{FFFD}")?;
            }
        }
        f.write_str("\"")
    }
}

/// The name with this id; empty for [`NONE`].
pub(crate) fn name(id: u32) -> Name {
    let kept = |at: usize| interner().lock().names.get(at).copied();
    Name(match id {
        NONE => b"",
        OTHER => b"(other)",
        _ => kept(id as usize - FIRST).unwrap_or_default(),
    })
}

#[derive(Clone, Copy)]
struct Seen {
    at: *const c_char,
    name: &'static [u8],
    id: u32,
}

/// One thread's cache of names.
pub(crate) struct NameCache([Cell<Seen>; CACHE]);

impl NameCache {
    pub(crate) fn new() -> Self {
        Self([const { Cell::new(Seen { at: std::ptr::null(), name: b"", id: NONE }) }; CACHE])
    }

    /// The id of the C string `at`; [`NONE`] for null or the empty string. Fails without memory for
    /// a new name.
    ///
    /// # Safety
    /// - `at` is null or points to bytes that end with a NUL, or to at least [`MAX_NAME`] readable
    ///   bytes.
    pub(crate) unsafe fn intern(&self, at: *const c_char) -> Result<u32, NoMemory> {
        if at.is_null() {
            return Ok(NONE);
        }
        let slot = &self.0[(at.addr() >> 2) % CACHE];
        let seen = slot.get();
        // SAFETY: the comparison stops at the first difference, so it does not read beyond the
        // string's end.
        if seen.at == at && unsafe { same(at, seen.name) } {
            return Ok(seen.id);
        }
        let mut copy = [0; MAX_NAME];
        let mut len = 0;
        while len < MAX_NAME {
            // SAFETY: no byte so far was NUL, so this byte is readable by the caller's promise.
            let byte = unsafe { at.add(len).read() } as u8;
            if byte == 0 {
                break;
            }
            copy[len] = byte;
            len += 1;
        }
        if len == 0 {
            return Ok(NONE);
        }
        let (id, name) = intern(&copy[..len])?;
        if id != OTHER {
            slot.set(Seen { at, name, id });
        }
        Ok(id)
    }
}

/// Returns whether the C string `at` is `name`, cut at [`MAX_NAME`].
///
/// # Safety
/// - As for [`NameCache::intern`].
unsafe fn same(at: *const c_char, name: &[u8]) -> bool {
    for (i, &byte) in name.iter().enumerate() {
        // SAFETY: the bytes before were equal to a name's and so not NUL.
        if unsafe { at.add(i).read() } as u8 != byte {
            return false;
        }
    }
    // SAFETY: no byte so far was NUL, so the next byte is readable by the caller's promise; after
    // MAX_NAME bytes none is read.
    name.len() == MAX_NAME || unsafe { at.add(name.len()).read() } == 0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_name_is_known_by_its_bytes_not_by_its_address() {
        let cache = NameCache::new();
        let mut text = *b"Node\0";
        let intern = |t: &[u8]| {
            // SAFETY: the text ends with a NUL.
            unsafe { cache.intern(t.as_ptr().cast()) }.unwrap()
        };
        let node = intern(&text);
        assert_eq!((name(node).to_string().as_str(), intern(&text)), ("Node", node));
        text[0] = b'M';
        assert_eq!(name(intern(&text)).to_string(), "Mode");
        text[2] = 0;
        assert_eq!(name(intern(&text)).to_string(), "Mo");
        assert_eq!(intern(b"\0"), NONE);
        let long = [b'x'; MAX_NAME + 10];
        let id = intern(&long);
        assert_eq!((name(id).to_string().len(), intern(&long)), (MAX_NAME, id));
    }
}
