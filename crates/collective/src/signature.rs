//! A call of a rank, in a form that ranks can compare.
//!
//! This module must not know memory, streams or stores.

use crate::element::{ElementType, Reduce};
use leasehold::{Error, Mismatch, Name};
use std::collections::{BTreeMap, HashMap};
use std::fmt;

/// The kind of a call.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Kind {
    /// Every rank gets the reduction of all ranks' elements.
    AllReduce(Reduce),
    /// Every rank gets all ranks' elements, in the order of the ranks.
    AllGather,
    /// Every rank gets its part of the reduction of all ranks' elements.
    ReduceScatter(Reduce),
    /// Every rank gets the root's elements.
    Broadcast {
        /// The rank whose elements they are.
        root: u32,
    },
    /// The root gets the reduction of all ranks' elements.
    Reduce {
        /// The reduction.
        reduce: Reduce,
        /// The rank that gets it.
        root: u32,
    },
    /// Every rank gets its part of each rank's elements.
    AllToAll,
    /// No rank goes on before all have come.
    Barrier,
    /// One rank's elements go to another one.
    Send {
        /// The rank that gets them.
        to: u32,
    },
    /// One rank gets another one's elements.
    Recv {
        /// The rank whose elements they are.
        from: u32,
    },
}

impl Kind {
    /// The other rank of a call between two; `None` for a call of all ranks.
    #[must_use]
    pub fn peer(self) -> Option<u32> {
        match self {
            Self::Send { to: peer } | Self::Recv { from: peer } => Some(peer),
            _ => None,
        }
    }

    /// Returns whether ranks send to each other one by one in it.
    #[must_use]
    pub fn is_sent(self) -> bool {
        matches!(self, Self::Send { .. } | Self::Recv { .. } | Self::AllToAll)
    }

    /// The name of the call in messages.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::AllReduce(_) => "all_reduce",
            Self::AllGather => "all_gather",
            Self::ReduceScatter(_) => "reduce_scatter",
            Self::Broadcast { .. } => "broadcast",
            Self::Reduce { .. } => "reduce",
            Self::AllToAll => "all_to_all",
            Self::Barrier => "barrier",
            Self::Send { .. } => "send",
            Self::Recv { .. } => "recv",
        }
    }
}

/// A call as a rank made it. Two ranks' calls match if all but numbers and scopes agree.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Signature {
    /// The number of the call, counted from 0: among the communicator's eager calls of all ranks,
    /// among its eager sends or receives between the two ranks, or among its calls in recordings.
    pub seq: u64,
    /// The kind of the call.
    pub kind: Kind,
    /// The type of its elements.
    pub element: ElementType,
    /// The elements that one rank gives to one rank. Of an all_gather these are the elements of one
    /// rank; of a reduce_scatter and an all_to_all, the elements of one part.
    pub count: u64,
    /// Whether it was recorded in a graph.
    pub captured: bool,
    /// The innermost [scope](Name::scope) of the calling thread.
    pub scope: Option<Name>,
}

impl Signature {
    /// Returns whether a call of all ranks matches another rank's.
    #[must_use]
    pub fn matches(&self, other: &Self) -> bool {
        let key = |s: &Self| (s.kind, s.element, s.count, s.captured);
        key(self) == key(other)
    }

    /// The communicator and the number: `tp #183`.
    pub(crate) fn numbered(&self, name: &str) -> String {
        let recorded = if self.captured { " recorded" } else { "" };
        format!("{name}{recorded} #{}", self.seq)
    }
}

impl fmt::Display for Signature {
    /// `all_reduce 4096 bf16 Sum (layer 12)`.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.kind.name())?;
        if self.kind != Kind::Barrier {
            write!(f, " {} {}", self.count, self.element)?;
        }
        match self.kind {
            Kind::AllReduce(reduce) | Kind::ReduceScatter(reduce) => write!(f, " {reduce}")?,
            Kind::Reduce { reduce, root } => write!(f, " {reduce} root {root}")?,
            Kind::Broadcast { root } => write!(f, " root {root}")?,
            Kind::Send { to } => write!(f, " to {to}")?,
            Kind::Recv { from } => write!(f, " from {from}")?,
            Kind::AllGather | Kind::AllToAll | Kind::Barrier => {}
        }
        match &self.scope {
            Some(scope) => write!(f, " ({})", scope.as_str()),
            None => Ok(()),
        }
    }
}

/// The error of two ranks whose calls do not match.
#[cold]
pub(crate) fn mismatch(name: &str, one: (u32, &Signature), other: (u32, &Signature)) -> Error {
    let call = one.1.numbered(name);
    // The place of the call is written only if it differs.
    let shown = |s: &Signature| match one.1.captured == other.1.captured {
        true => s.to_string(),
        false => format!("{} {s}", if s.captured { "recorded" } else { "eager" }),
    };
    let side = |(rank, s): (u32, &Signature)| (rank, shown(s).into());
    Mismatch::new(call, side(one), side(other)).into()
}

/// The part of a call that ranks compare: its partner, the values that must agree, and its text.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    class: Class,
    /// The number among those of its class.
    seq: u64,
    /// The place of the submission among those of the rank's recordings.
    at: u64,
    agreed: String,
    shown: String,
}

/// The calls of a rank that are numbered together.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub(crate) enum Class {
    /// Those of all ranks, with all ranks'.
    All,
    /// The sends to a rank, with that rank's receives from this one.
    To(u32),
    /// The receives from a rank.
    From(u32),
    /// The calls in recordings.
    Recorded,
    /// The launches of graphs with calls of all ranks, with all ranks'.
    Launches,
}

impl Class {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Send { to } => Self::To(to),
            Kind::Recv { from } => Self::From(from),
            _ => Self::All,
        }
    }

    /// The class that numbers a call.
    pub(crate) fn of_call(call: &Signature) -> Self {
        if call.captured { Self::Recorded } else { Self::of(call.kind) }
    }

    /// The class of the same calls in the list of the other rank, for `own`.
    pub(crate) fn counterpart(self, own: u32) -> Self {
        match self {
            Self::To(_) => Self::From(own),
            Self::From(_) => Self::To(own),
            same => same,
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("all"),
            Self::To(rank) => write!(f, "to{rank}"),
            Self::From(rank) => write!(f, "from{rank}"),
            Self::Recorded => f.write_str("recorded"),
            Self::Launches => f.write_str("launches"),
        }
    }
}

impl std::str::FromStr for Class {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        let rank = |word| text.strip_prefix(word)?.parse().ok();
        let all = (text == "all").then_some(Self::All);
        all.or_else(|| rank("to").map(Self::To)).or_else(|| rank("from").map(Self::From)).ok_or(())
    }
}

/// The hash of nothing.
pub(crate) const FNV: u64 = 0xcbf2_9ce4_8422_2325;

/// The hash of what was hashed before and a line, by FNV-1a.
pub(crate) fn fnv(before: u64, line: &str) -> u64 {
    let mix = |hash: u64, byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
    line.bytes().chain([b'\n']).fold(before, mix)
}

/// A rank's list of calls, in a form that goes through a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct List {
    /// The place of a recording's first call, of whatever communicator. It names the recording.
    recording: u64,
    calls: Vec<Entry>,
}

impl List {
    /// Calls with the numbers that they have.
    pub(crate) fn of<'s>(calls: impl IntoIterator<Item = &'s Signature>) -> Self {
        let entry = |s: &Signature| {
            let class = Class::of(s.kind);
            let agreed = match class {
                Class::All => Signature { scope: None, ..s.clone() }.to_string(),
                _ => format!("{} {}", s.count, s.element),
            };
            Entry { class, seq: s.seq, at: 0, agreed, shown: s.to_string() }
        };
        Self { recording: 0, calls: calls.into_iter().map(entry).collect() }
    }

    /// A communicator's calls of a recording, numbered from its beginning, with their places.
    pub(crate) fn of_recording(recording: u64, calls: &[(u64, &Signature)]) -> Self {
        let mut list = Self::of(calls.iter().map(|call| call.1));
        list.recording = recording;
        let mut next: HashMap<Class, u64> = HashMap::new();
        for (entry, (at, _)) in list.calls.iter_mut().zip(calls) {
            let next = next.entry(entry.class).or_default();
            (entry.seq, entry.at) = (*next, *at);
            *next += 1;
        }
        list
    }

    /// The calls: the place of each, its class, its number and its text.
    pub(crate) fn calls(&self) -> impl Iterator<Item = (u64, Class, u64, &str)> {
        self.calls.iter().map(|e| (e.at, e.class, e.seq, &*e.shown))
    }

    /// The text of the list. Beyond `most` bytes it ends early.
    pub(crate) fn text(&self, most: usize) -> String {
        let mut text = format!("{}\n", self.recording);
        for Entry { class, seq, at, agreed, shown } in &self.calls {
            let line = format!("{class}\t{seq}\t{at}\t{agreed}\t{shown}\n");
            if text.len() + line.len() > most {
                break;
            }
            text.push_str(&line);
        }
        text
    }

    /// The list that a rank wrote.
    pub(crate) fn parse(text: &str) -> Self {
        let entry = |line: &str| {
            let mut parts = line.splitn(5, '\t');
            Some(Entry {
                class: parts.next()?.parse().ok()?,
                seq: parts.next()?.parse().ok()?,
                at: parts.next()?.parse().ok()?,
                agreed: parts.next()?.into(),
                shown: parts.next()?.into(),
            })
        };
        let (recording, calls) = text.split_once('\n').unwrap_or_default();
        let recording = recording.parse().unwrap_or_default();
        Self { recording, calls: calls.lines().filter_map(entry).collect() }
    }

    /// The number and the hash of each class. Another rank sees by them whether the lists agree.
    pub(crate) fn summary(&self) -> String {
        let mut classes: Vec<(Class, u64, u64)> = Vec::new();
        for Entry { class, agreed, .. } in &self.calls {
            let at = classes.iter().position(|c| c.0 == *class).unwrap_or_else(|| {
                classes.push((*class, 0, FNV));
                classes.len() - 1
            });
            let (_, count, hash) = &mut classes[at];
            *count += 1;
            *hash = fnv(*hash, agreed);
        }
        classes.sort_unstable_by_key(|c| c.0);
        classes.iter().map(|(class, count, hash)| format!("{class} {count} {hash:x}\n")).collect()
    }

    /// The first calls of two ranks that do not belong together. A call that one of them has not
    /// made does not belong to the other's, unless only calls count that `both` have made so far.
    pub(crate) fn difference(
        &self,
        own: u32,
        other: &Self,
        (rank, both): (u32, bool),
        name: &str,
    ) -> Option<Error> {
        for class in [Class::All, Class::To(rank), Class::From(rank)] {
            let of = |list: &Self, class: Class| -> BTreeMap<u64, Entry> {
                let own = list.calls.iter().filter(|e| e.class == class);
                own.map(|e| (e.seq, e.clone())).collect()
            };
            let (ours, theirs) = (of(self, class), of(other, class.counterpart(own)));
            // A list may have lost its beginning, and what the other has of that is not compared.
            let first = |list: &BTreeMap<u64, Entry>| list.keys().next().copied().unwrap_or(0);
            let from = first(&ours).max(first(&theirs));
            let numbers = ours.range(from..).chain(theirs.range(from..)).map(|(seq, _)| *seq);
            let agreed =
                |list: &BTreeMap<u64, Entry>, seq| list.get(&seq).map(|e| e.agreed.clone());
            let differing = numbers
                .filter(|seq| !both || ours.contains_key(seq) && theirs.contains_key(seq))
                .filter(|&seq| agreed(&ours, seq) != agreed(&theirs, seq))
                .min();
            let Some(at) = differing else { continue };
            let shown = |list: &BTreeMap<u64, Entry>| match list.get(&at) {
                Some(entry) => entry.shown.clone(),
                None => "has no such call any more".to_owned(),
            };
            let between = match class {
                Class::To(_) => format!(" from {own} to {rank}"),
                Class::From(_) => format!(" from {rank} to {own}"),
                _ => String::new(),
            };
            let call = format!("{name} #{at}{between}");
            let sides = [(own, shown(&ours).into()), (rank, shown(&theirs).into())];
            let [ours, theirs] = sides;
            return Some(Mismatch::new(call, ours, theirs).into());
        }
        None
    }

    /// The first call of this list and of another communicator's whose order is the opposite one on
    /// another rank. Each communicator has a name, both ranks' numbers and both ranks' lists of one
    /// recording.
    pub(crate) fn opposite_orders(
        [own, rank]: [u32; 2],
        communicators: &[(&str, [u32; 2], [&Self; 2])],
    ) -> Option<Error> {
        // The places of a call on both ranks, its communicator, and its text on both.
        let mut calls = Vec::new();
        for (of, (_, [me, other], [ours, theirs])) in communicators.iter().enumerate() {
            let theirs: HashMap<(Class, u64), &Entry> =
                theirs.calls.iter().map(|e| ((e.class, e.seq), e)).collect();
            let between = [Class::All, Class::To(*other), Class::From(*other)];
            for e in ours.calls.iter().filter(|e| between.contains(&e.class)) {
                if let Some(t) = theirs.get(&(e.class.counterpart(*me), e.seq)) {
                    calls.push(([e.at, t.at], of, e.seq, [&e.shown, &t.shown]));
                }
            }
        }
        calls.sort_by_key(|call| call.0);
        // Of each communicator the call so far that is the last one on the other rank.
        let mut last: HashMap<usize, usize> = HashMap::new();
        for (i, ([_, at], of, ..)) in calls.iter().enumerate() {
            let opposite = |other: &&usize| {
                let ([_, before], other, ..) = calls[**other];
                let one_recording =
                    communicators[other].2[1].recording == communicators[*of].2[1].recording;
                other != *of && before > *at && one_recording
            };
            if let Some(&other) = last.values().filter(opposite).min() {
                let shown = |call: usize, side: usize| {
                    let (_, of, seq, shown) = &calls[call];
                    format!("{} #{seq} {}", communicators[*of].0, shown[side])
                };
                let name = |call: usize| communicators[calls[call].1].0;
                let what = format!("the order of {} and {} recorded", name(other), name(i));
                let ours = format!("{} before {}", shown(other, 0), shown(i, 0));
                let theirs = format!("{} before {}", shown(i, 1), shown(other, 1));
                return Some(Mismatch::new(what, (own, ours.into()), (rank, theirs.into())).into());
            }
            let known = last.entry(*of).or_insert(i);
            if calls[*known].0[1] < *at {
                *known = i;
            }
        }
        None
    }

    /// Returns whether another rank's summary agrees with this list.
    pub(crate) fn agrees(&self, own: u32, summary: &str, rank: u32) -> bool {
        let ours = self.summary();
        let find = |text: &str, class: Class| {
            let start = format!("{class} ");
            text.lines().find_map(|line| line.strip_prefix(&start).map(str::to_owned))
        };
        [Class::All, Class::To(rank), Class::From(rank)]
            .into_iter()
            .all(|class| find(&ours, class) == find(summary, class.counterpart(own)))
    }
}

#[cfg(test)]
#[path = "../tests/unit/signature.rs"]
mod tests;
