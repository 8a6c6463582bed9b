//! The eager calls of a rank, for reports.

use crate::signature::{Kind, List, Signature};
use std::collections::{HashMap, VecDeque};
use std::hash::{Hash, Hasher};

/// Calls that are kept.
const KEPT: usize = 1024;

/// The last eager calls of a communicator, and how many there were.
#[derive(Default)]
pub(crate) struct Log {
    /// The next number of each sequence.
    next: HashMap<Sequence, u64>,
    calls: VecDeque<Signature>,
    /// The hashes of the calls of all ranks: each of all calls up to one. The last one is of all.
    hashes: VecDeque<u64>,
}

/// The hash of no calls.
const SEED: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash of some calls and another one. Equal on all ranks of a version; 64 bits that mistakes
/// change, not those who try.
fn mixed(before: u64, call: &Signature) -> u64 {
    struct Words(u64);

    impl Words {
        fn mix(&mut self, word: u64) {
            self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
        }
    }

    impl Hasher for Words {
        fn finish(&self) -> u64 {
            self.0
        }

        fn write(&mut self, bytes: &[u8]) {
            bytes.iter().for_each(|&b| self.mix(u64::from(b)));
        }

        fn write_u32(&mut self, word: u32) {
            self.mix(u64::from(word));
        }

        fn write_u64(&mut self, word: u64) {
            self.mix(word);
        }

        fn write_isize(&mut self, word: isize) {
            self.mix(word as u64);
        }
    }

    let mut words = Words(before);
    (call.kind, call.element, call.count).hash(&mut words);
    words.finish()
}

/// Calls that are numbered together.
#[derive(Clone, Copy, PartialEq, Eq, Hash)]
enum Sequence {
    All,
    To(u32),
    From(u32),
    Recorded,
}

impl Sequence {
    fn of(signature: &Signature) -> Self {
        match signature.kind {
            _ if signature.captured => Self::Recorded,
            Kind::Send { to } => Self::To(to),
            Kind::Recv { from } => Self::From(from),
            _ => Self::All,
        }
    }
}

impl Log {
    /// Numbers a call, and keeps it if it is eager.
    pub(crate) fn enter(&mut self, signature: &mut Signature) {
        let next = self.next.entry(Sequence::of(signature)).or_default();
        signature.seq = *next;
        *next += 1;
        if Sequence::of(signature) == Sequence::All {
            let before = self.hashes.back().copied().unwrap_or(SEED);
            if self.hashes.len() == KEPT {
                self.hashes.pop_front();
            }
            self.hashes.push_back(mixed(before, signature));
        }
        if !signature.captured {
            if self.calls.len() == KEPT {
                self.calls.pop_front();
            }
            self.calls.push_back(signature.clone());
        }
    }

    /// Takes a call back that was not submitted, unless another one came after it.
    pub(crate) fn take_back(&mut self, signature: &Signature) {
        let Some(next) = self.next.get_mut(&Sequence::of(signature)) else { return };
        if *next == signature.seq + 1 {
            *next = signature.seq;
            if Sequence::of(signature) == Sequence::All {
                self.hashes.pop_back();
            }
            if !signature.captured
                && let Some(at) = self.calls.iter().rposition(|call| call == signature)
            {
                self.calls.remove(at);
            }
        }
    }

    pub(crate) fn list(&self) -> List {
        List::of(&self.calls)
    }

    /// How many calls of all ranks there were, and the hash of them.
    pub(crate) fn rolled(&self) -> (u64, u64) {
        let count = self.next.get(&Sequence::All).copied().unwrap_or_default();
        (count, self.hashes.back().copied().unwrap_or(SEED))
    }

    /// The hash of the first calls of all ranks, if it is kept.
    pub(crate) fn rolled_at(&self, count: u64) -> Option<u64> {
        let back = self.rolled().0.checked_sub(count)?;
        let at = (self.hashes.len() as u64).checked_sub(back + 1)?;
        self.hashes.get(usize::try_from(at).ok()?).copied()
    }

    /// The last eager call.
    pub(crate) fn last(&self) -> Option<&Signature> {
        self.calls.back()
    }
}
