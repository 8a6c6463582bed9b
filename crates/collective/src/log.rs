//! The eager calls of a rank, for reports.

use crate::signature::{Class, FNV, List, Signature};
use std::collections::VecDeque;
use std::hash::{Hash, Hasher};

/// Calls that are kept.
const KEPT: usize = 1024;

/// The last eager calls of a communicator, and how many there were.
#[derive(Default)]
pub(crate) struct Log {
    /// The next numbers of the calls of all ranks, of the calls in recordings, and of the launches.
    all: u64,
    recorded: u64,
    launched: u64,
    /// The next numbers of the sends to a rank, and of the receives from it, by ranks.
    peers: Vec<[u64; 2]>,
    calls: VecDeque<Signature>,
    /// The hashes of the calls of all ranks: each of all calls up to one. The last one is of all.
    hashes: VecDeque<u64>,
}

/// The hash of some calls and another one. Equal on all ranks of a version; 64 bits that mistakes
/// change, not those who try.
fn mixed(before: u64, call: &Signature) -> u64 {
    struct Words(u64);

    impl Hasher for Words {
        fn finish(&self) -> u64 {
            self.0
        }

        fn write(&mut self, bytes: &[u8]) {
            for part in bytes.chunks(8) {
                let mut word = [0; 8];
                word[..part.len()].copy_from_slice(part);
                let word = u64::from_le_bytes(word);
                self.0 = (self.0.rotate_left(23) ^ word).wrapping_mul(0x9e37_79b9_7f4a_7c15);
            }
        }
    }

    let mut words = Words(before);
    (call.kind, call.element, call.count).hash(&mut words);
    words.finish()
}

/// A call that was numbered, among those of its class.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(crate) struct Entered {
    pub(crate) class: Class,
    pub(crate) seq: u64,
}

impl Entered {
    fn is(self, call: &Signature) -> bool {
        Class::of_call(call) == self.class && call.seq == self.seq
    }
}

impl Log {
    /// The next number of a class.
    fn next(&mut self, class: Class) -> &mut u64 {
        let (peer, from) = match class {
            Class::All => return &mut self.all,
            Class::Recorded => return &mut self.recorded,
            Class::Launches => return &mut self.launched,
            Class::To(peer) => (peer as usize, 0),
            Class::From(peer) => (peer as usize, 1),
        };
        if self.peers.len() <= peer {
            self.peers.resize(peer + 1, [0, 0]);
        }
        &mut self.peers[peer][from]
    }

    /// Numbers a call, and keeps it if it is eager.
    pub(crate) fn enter(&mut self, signature: &mut Signature) -> Entered {
        let entered = self.number(Class::of_call(signature));
        signature.seq = entered.seq;
        if entered.class == Class::All {
            let before = self.hashes.back().copied().unwrap_or(FNV);
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
        entered
    }

    /// Numbers a launch of a graph with calls of all ranks.
    pub(crate) fn launch(&mut self) -> Entered {
        self.number(Class::Launches)
    }

    fn number(&mut self, class: Class) -> Entered {
        let next = self.next(class);
        *next += 1;
        Entered { class, seq: *next - 1 }
    }

    /// The next number of each class whose calls are awaited.
    pub(crate) fn numbers(&self) -> Vec<Entered> {
        let peers = (0..)
            .zip(&self.peers)
            .flat_map(|(peer, [to, from])| [(Class::To(peer), *to), (Class::From(peer), *from)]);
        let all = [(Class::All, self.all), (Class::Launches, self.launched)];
        all.into_iter().chain(peers).map(|(class, seq)| Entered { class, seq }).collect()
    }

    /// The text of a call that was numbered, as far as it is kept.
    pub(crate) fn shown(&self, name: &str, entered: Entered) -> String {
        let call = self.calls.iter().rev().find(|call| entered.is(call));
        match call {
            Some(call) => format!("{} {call}", call.numbered(name)),
            None if entered.class == Class::Launches => {
                format!("launch {} of graphs with calls of {name}", entered.seq)
            }
            None => format!("{name} #{}", entered.seq),
        }
    }

    /// Takes a call back that was not submitted, unless another one came after it.
    pub(crate) fn take_back(&mut self, entered: Entered) {
        let next = self.next(entered.class);
        if *next == entered.seq + 1 {
            *next = entered.seq;
            if entered.class == Class::All {
                self.hashes.pop_back();
            }
            if let Some(at) = self.calls.iter().rposition(|call| entered.is(call)) {
                self.calls.remove(at);
            }
        }
    }

    pub(crate) fn list(&self) -> List {
        List::of(&self.calls)
    }

    /// How many calls of all ranks there were, and the hash of them.
    pub(crate) fn rolled(&self) -> (u64, u64) {
        (self.all, self.hashes.back().copied().unwrap_or(FNV))
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

    /// The eager calls, from the last one on.
    pub(crate) fn backwards(&self) -> impl Iterator<Item = &Signature> {
        self.calls.iter().rev()
    }
}
