//! Completion words: 8 bytes of pinned memory per stream, each in a cache line of its own. The
//! device writes the words and the host reads them. Reading a word makes no driver call.
//!
//! This module must not know what the values mean.

use super::driver_context::DriverContext;
use crate::driver::ops::HostFlags;
use leasehold_core::Result;
use leasehold_core::sync::{Arc, Mutex};
use std::fmt;

/// Bytes of a page of words.
const PAGE: u64 = 4096;
/// Bytes from word to word. No two streams share a cache line or a pair of adjacent lines.
const STRIDE: u64 = 128;

#[derive(Default)]
struct Pages {
    pages: Vec<u64>,
    free: Vec<u64>,
}

/// The words of a context. The drop of the last user frees the pages.
pub struct Words {
    context: Arc<DriverContext>,
    pages: Mutex<Pages>,
}

impl Words {
    /// Makes an empty set of words.
    #[must_use]
    pub fn new(context: Arc<DriverContext>) -> Self {
        Self { context, pages: Mutex::new(Pages::default()) }
    }

    /// Takes a word and stores `value` in it. May block on the driver.
    ///
    /// # Errors
    /// `OutOfMemory`, or a driver error.
    pub fn take(self: &Arc<Self>, value: u64) -> Result<Word> {
        let free = self.pages.lock().free.pop();
        let addr = match free {
            Some(addr) => addr,
            None => {
                let page = self.context.within(|ops| ops.host_alloc(PAGE, HostFlags::default()))?;
                let mut pages = self.pages.lock();
                pages.pages.push(page);
                pages.free.extend((1..PAGE / STRIDE).map(|i| page + i * STRIDE));
                page
            }
        };
        let word = Word { words: self.clone(), addr };
        // SAFETY: the word is in a live page, and no work uses the word.
        unsafe { self.context.ops().store_word(addr, value) };
        Ok(word)
    }
}

impl Drop for Words {
    fn drop(&mut self) {
        for page in std::mem::take(&mut self.pages.get_mut().pages) {
            // SAFETY: the page came from `host_alloc`. Each word of the page held these pages and
            // is gone.
            self.context.release_or_log(|ops| unsafe { ops.host_free(page) });
        }
    }
}

impl fmt::Debug for Words {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let pages = self.pages.lock();
        f.debug_struct("Words")
            .field("pages", &pages.pages.len())
            .field("free", &pages.free.len())
            .finish()
    }
}

/// One word. Dropping the word makes it free again; before the drop, the owner ensures that no work
/// writes it any more.
pub struct Word {
    words: Arc<Words>,
    addr: u64,
}

impl Word {
    /// The word's device address.
    #[inline]
    #[must_use]
    pub fn addr(&self) -> u64 {
        self.addr
    }

    /// The word's value.
    #[inline]
    #[must_use]
    pub fn load(&self) -> u64 {
        // SAFETY: the word lives as long as its page, which `words` keeps.
        unsafe { self.words.context.ops().load_word(self.addr) }
    }
}

impl Drop for Word {
    fn drop(&mut self) {
        self.words.pages.lock().free.push(self.addr);
    }
}

impl fmt::Debug for Word {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Word({:#x})", self.addr)
    }
}
