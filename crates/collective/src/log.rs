//! The eager calls of a rank, for reports.

use crate::signature::{Kind, List, Signature};
use std::collections::{HashMap, VecDeque};

/// Calls that are kept.
const KEPT: usize = 1024;

/// The last eager calls of a communicator, and how many there were.
#[derive(Default)]
pub(crate) struct Log {
    /// The next number of each sequence.
    next: HashMap<Sequence, u64>,
    calls: VecDeque<Signature>,
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
}
