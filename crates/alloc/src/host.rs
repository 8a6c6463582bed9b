//! Host memory for the allocator's own tables and reports: taken in steps that may fail, before
//! anything is changed.
//!
//! Nothing in this crate takes host memory in a free (but the debug checks, which keep lists). What
//! an allocation, an import, a trim or a suspension takes may be refused: an error, and nothing is
//! changed. Two things still end the process without host memory: the error, which is a box, and
//! the record of a buffer that three or more streams use at once.

use leasehold_core::{Error, OutOfMemory, Result, Text};
use std::fmt::{self, Write};

/// That the host has no memory.
#[cold]
pub(crate) fn none(bytes: usize) -> Error {
    OutOfMemory::new("host memory for the allocator's tables", bytes as u64).into()
}

/// Makes room for `n` more entries.
pub(crate) fn room<T>(list: &mut Vec<T>, n: usize) -> Result<()> {
    list.try_reserve(n).map_err(|_| none(n * size_of::<T>()))
}

/// Adds an entry if there is room. `false`: it was dropped.
pub(crate) fn push<T>(list: &mut Vec<T>, entry: T) -> bool {
    let fine = list.try_reserve(1).is_ok();
    if fine {
        list.push(entry);
    }
    fine
}

/// A text. `None`: there is no room for it.
pub(crate) fn text(what: fmt::Arguments<'_>) -> Option<Text> {
    struct Buffer(String);
    impl Write for Buffer {
        fn write_str(&mut self, s: &str) -> fmt::Result {
            self.0.try_reserve(s.len()).map_err(|_| fmt::Error)?;
            self.0.push_str(s);
            Ok(())
        }
    }
    if let Some(text) = what.as_str() {
        return Some(text.into());
    }
    let mut buffer = Buffer(String::new());
    buffer.write_fmt(what).ok()?;
    Some(buffer.0.into())
}

/// Adds a text, if there is room for it.
pub(crate) fn note(notes: &mut Vec<Text>, what: fmt::Arguments<'_>) {
    if let Some(text) = self::text(what) {
        push(notes, text);
    }
}

/// Tells the processor that an entry will be needed. A hint: any index does.
#[inline]
pub(crate) fn fetch_entry<T>(list: &[T], at: usize) {
    let at = list.as_ptr().wrapping_add(at);
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::{_MM_HINT_T0, _mm_prefetch};
        // SAFETY: every x86-64 processor has it, and it reads nothing, whatever the address.
        unsafe { _mm_prefetch::<_MM_HINT_T0>(at.cast()) };
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    let _ = at;
}
