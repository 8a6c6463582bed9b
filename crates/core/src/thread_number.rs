//! The numbers of threads: small, and nobody else's while the thread runs.
//!
//! Shards, cells and lists go by them. A thread gives its number back at its end, and the next one
//! to come has the lowest there is: threads that come and go find what those before them left.
//! A structure that is indexed by the number may treat both threads as one. Every use by the
//! earlier thread happens before the later thread takes the number.
//!
//! Must not know what goes by the numbers.

use crate::sync::atomic::{AtomicU32, AtomicU64, Ordering};
#[cfg(not(loom))]
use crate::thread_end::ThreadEnd;
#[cfg(not(loom))]
use std::cell::Cell;

/// The number of every thread that has none of its own, because it comes after the first 2^26 or is
/// at its end. Under loom everybody's; models number their threads.
pub const NOBODY: u32 = (1 << 26) - 2;

const WORDS: usize = if cfg!(loom) { 1 } else { 64 };
/// Numbers up to here are given again. (Where there are more threads at a time, theirs are not.)
const AGAIN: u32 = WORDS as u32 * u64::BITS;

/// Which numbers are taken, from 1.
#[derive(Debug)]
pub struct Numbers {
    /// A bit for each that is given again.
    taken: [AtomicU64; WORDS],
    /// The last of the others.
    next: AtomicU32,
}

impl Numbers {
    #[cfg(not(loom))]
    const fn new() -> Self {
        Self { taken: [const { AtomicU64::new(0) }; WORDS], next: AtomicU32::new(AGAIN) }
    }

    /// Numbers of its own for a model.
    #[cfg(loom)]
    #[must_use]
    pub fn for_model() -> Self {
        Self { taken: std::array::from_fn(|_| AtomicU64::new(0)), next: AtomicU32::new(AGAIN) }
    }

    /// The lowest free one, or [`NOBODY`].
    pub fn take(&self) -> u32 {
        for (word, taken) in self.taken.iter().enumerate() {
            let mut bits = taken.load(Ordering::Relaxed);
            while bits != u64::MAX {
                let bit = bits.trailing_ones();
                // `Acquire` makes all that the number's last owner did visible here.
                bits = taken.fetch_or(1 << bit, Ordering::Acquire);
                if bits & 1 << bit == 0 {
                    return word as u32 * u64::BITS + bit + 1;
                }
            }
        }
        let more = |n: u32| (n < NOBODY - 1).then_some(n + 1);
        self.next
            .fetch_update(Ordering::Relaxed, Ordering::Relaxed, more)
            .map_or(NOBODY, |last| last + 1)
    }

    /// Takes one back.
    pub fn put(&self, number: u32) {
        // From 1 on.
        let at = number - 1;
        if let Some(taken) = self.taken.get((at / u64::BITS) as usize) {
            taken.fetch_and(!(1 << (at % u64::BITS)), Ordering::Release);
        }
    }
}

#[cfg(not(loom))]
static NUMBERS: Numbers = Numbers::new();

#[cfg(not(loom))]
thread_local! {
    static NUMBER: Cell<u32> = const { Cell::new(NOBODY) };
}

/// Gives the thread's number back.
#[cfg(not(loom))]
static END: ThreadEnd = ThreadEnd::new(|| match NUMBER.replace(NOBODY) {
    NOBODY => {}
    number => NUMBERS.put(number),
});

/// This thread's number.
#[cfg(not(loom))]
#[inline]
pub fn thread_number() -> u32 {
    #[cold]
    fn fresh() -> u32 {
        // Without memory nobody would give a number back.
        let number = if END.watch() { NUMBERS.take() } else { NOBODY };
        NUMBER.set(number);
        number
    }
    let number = NUMBER.get();
    if number != NOBODY { number } else { fresh() }
}

/// This thread's number, or [`NOBODY`] if nobody has asked for it yet.
#[cfg(not(loom))]
#[inline(always)]
pub fn thread_number_there() -> u32 {
    NUMBER.get()
}

/// As in the ordinary build.
#[cfg(loom)]
pub fn thread_number_there() -> u32 {
    NOBODY
}

/// As in the ordinary build.
#[cfg(loom)]
pub fn thread_number() -> u32 {
    NOBODY
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/thread_number.rs"]
mod tests;
