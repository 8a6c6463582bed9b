//! Names of structs and of call sites, each kept once and for good.
//!
//! A name that this thread has seen lately is found without a lock and without an allocation: the cache is keyed by
//! the string's address and checked against its bytes. It must not know what is named.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_char;

use leasehold_core::sync::{Mutex, OnceLock};

/// Names longer than this are cut.
pub(crate) const MAX_NAME: usize = 255;
/// Distinct names kept; later ones share the name "(other)".
const MAX_NAMES: usize = 1 << 16;
const CACHE: usize = 64;

/// No name.
pub(crate) const NONE: u32 = 0;
const OTHER: u32 = 1;

struct Interner {
    ids: HashMap<&'static [u8], u32>,
    names: Vec<&'static [u8]>,
}

fn interner() -> &'static Mutex<Interner> {
    static INTERNER: OnceLock<Mutex<Interner>> = OnceLock::new();
    INTERNER.get_or_init(|| Mutex::new(Interner { ids: HashMap::new(), names: vec![b"", b"(other)"] }))
}

/// The id of `name` (at most [`MAX_NAME`] bytes of it) and its permanent copy.
fn intern(name: &[u8]) -> (u32, &'static [u8]) {
    let mut all = interner().lock();
    if let Some((&kept, &id)) = all.ids.get_key_value(name) {
        return (id, kept);
    }
    if all.names.len() >= MAX_NAMES {
        return (OTHER, b"(other)");
    }
    let kept: &'static [u8] = Box::leak(name.into());
    let id = all.names.len() as u32;
    all.names.push(kept);
    all.ids.insert(kept, id);
    (id, kept)
}

/// The name with this id; empty for [`NONE`].
pub(crate) fn name(id: u32) -> String {
    let all = interner().lock();
    all.names.get(id as usize).map_or_else(String::new, |n| String::from_utf8_lossy(n).into_owned())
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

    /// The id of the C string `at`; [`NONE`] for null or the empty string.
    ///
    /// # Safety
    /// - `at` is null or points to bytes that end with a NUL, or to at least [`MAX_NAME`] readable bytes.
    pub(crate) unsafe fn intern(&self, at: *const c_char) -> u32 {
        if at.is_null() {
            return NONE;
        }
        let slot = &self.0[(at.addr() >> 2) % CACHE];
        let seen = slot.get();
        // SAFETY: the comparison stops at the first difference, so it reads no further than the string's end.
        if seen.at == at && unsafe { same(at, seen.name) } {
            return seen.id;
        }
        let mut copy = [0; MAX_NAME];
        let mut len = 0;
        while len < MAX_NAME {
            // SAFETY: no NUL has been met so far, so by the caller's promise this byte is readable.
            let byte = unsafe { at.add(len).read() } as u8;
            if byte == 0 {
                break;
            }
            copy[len] = byte;
            len += 1;
        }
        if len == 0 {
            return NONE;
        }
        let (id, name) = intern(&copy[..len]);
        if id != OTHER {
            slot.set(Seen { at, name, id });
        }
        id
    }
}

/// Whether the C string `at` is `name`, cut at [`MAX_NAME`].
///
/// # Safety
/// - As for [`NameCache::intern`].
unsafe fn same(at: *const c_char, name: &[u8]) -> bool {
    for (i, &byte) in name.iter().enumerate() {
        // SAFETY: the bytes before were equal to a name's and thus not NUL.
        if unsafe { at.add(i).read() } as u8 != byte {
            return false;
        }
    }
    // SAFETY: as above; at MAX_NAME bytes there is nothing more to read.
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
            unsafe { cache.intern(t.as_ptr().cast()) }
        };
        let node = intern(&text);
        assert_eq!((name(node).as_str(), intern(&text)), ("Node", node));
        text[0] = b'M';
        assert_eq!(name(intern(&text)), "Mode");
        text[2] = 0;
        assert_eq!(name(intern(&text)), "Mo");
        assert_eq!(intern(b"\0"), NONE);
        let long = [b'x'; MAX_NAME + 10];
        let id = intern(&long);
        assert_eq!((name(id).len(), intern(&long)), (MAX_NAME, id));
    }
}
