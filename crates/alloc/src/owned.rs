//! Which thread owns a thing that one thread enters with plain stores: the word that says so, and
//! the owners' flags.
//!
//! The owner's plain stores and `leasehold_core::barrier` on the other side make a Dekker pair;
//! `bias` and `front` are built on it.

use leasehold_core::sync::atomic::AtomicU8;

/// The number of no thread: what everybody may enter.
const EVERYBODY: u32 = (1 << 26) - 1;

/// How many threads in turn may own a thing. Each has a flag of its own in which it says that it is
/// inside: an owner that finds out late that it is none any more takes its flag back late, and must
/// not take back its successor's.
pub(crate) const OWNERS: usize = if cfg!(loom) { 3 } else { 16 };

/// The flags of a thing: a power of two, so that the number of an ownership needs no check. Only
/// the first [`OWNERS`] are used.
pub(crate) type Inside = [AtomicU8; 32];

/// Who owns a thing, in one word: thread, which of the owners it is, one bit for the thing's own
/// use.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Owned(pub(crate) u32);

impl Owned {
    /// No owner yet.
    pub(crate) const NEW: Owned = Owned(0);
    /// Nobody in particular, for good.
    pub(crate) const SHARED: Owned = Owned(EVERYBODY << 6);

    pub(crate) fn by(thread: u32, turn: usize) -> Owned {
        Owned(thread << 6 | (turn as u32) << 1)
    }

    /// Whether `thread` owns it, and the bit is not set.
    #[inline]
    pub(crate) fn is(self, thread: u32) -> bool {
        self.0 >> 6 == thread && self.0 & 1 == 0
    }

    /// Which flag `thread` uses, if it owns it and the bit is not set.
    #[inline(always)]
    pub(crate) fn turn_of(self, thread: u32) -> Option<usize> {
        // Zero but for the turn, then.
        let rest = self.0 ^ thread << 6;
        (rest & !(31 << 1) == 0).then_some((rest >> 1) as usize)
    }

    /// Which flag the owner uses.
    #[inline]
    pub(crate) fn turn(self) -> usize {
        (self.0 >> 1) as usize & 31
    }

    /// Whether a single thread owns it.
    pub(crate) fn is_owned(self) -> bool {
        !matches!(self.0 >> 6, 0 | EVERYBODY)
    }
}
