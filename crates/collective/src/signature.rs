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
    agreed: String,
    shown: String,
}

/// The calls of a list that must agree with those of another rank's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
enum Class {
    /// Those of all ranks, with all ranks'.
    All,
    /// The sends to a rank, with that rank's receives from this one.
    To(u32),
    /// The receives from a rank.
    From(u32),
}

impl Class {
    fn of(kind: Kind) -> Self {
        match kind {
            Kind::Send { to } => Self::To(to),
            Kind::Recv { from } => Self::From(from),
            _ => Self::All,
        }
    }

    /// The class of the same calls in the list of the other rank, for `own`.
    fn counterpart(self, own: u32) -> Self {
        match self {
            Self::All => Self::All,
            Self::To(_) => Self::From(own),
            Self::From(_) => Self::To(own),
        }
    }
}

impl fmt::Display for Class {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::All => f.write_str("*"),
            Self::To(rank) => write!(f, ">{rank}"),
            Self::From(rank) => write!(f, "<{rank}"),
        }
    }
}

impl std::str::FromStr for Class {
    type Err = ();

    fn from_str(text: &str) -> Result<Self, ()> {
        match text.split_at_checked(1).ok_or(())? {
            ("*", "") => Ok(Self::All),
            (">", rank) => rank.parse().map(Self::To).map_err(drop),
            ("<", rank) => rank.parse().map(Self::From).map_err(drop),
            _ => Err(()),
        }
    }
}

/// A rank's list of calls, in a form that goes through a store.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(crate) struct List(Vec<Entry>);

impl List {
    /// Calls with the numbers that they have.
    pub(crate) fn of<'s>(calls: impl IntoIterator<Item = &'s Signature>) -> Self {
        let entry = |s: &Signature| {
            let class = Class::of(s.kind);
            let agreed = match class {
                Class::All => Signature { scope: None, ..s.clone() }.to_string(),
                _ => format!("{} {}", s.count, s.element),
            };
            Entry { class, seq: s.seq, agreed, shown: s.to_string() }
        };
        Self(calls.into_iter().map(entry).collect())
    }

    /// The calls of a recording, numbered from its beginning.
    pub(crate) fn of_recording<'s>(calls: impl IntoIterator<Item = &'s Signature>) -> Self {
        let mut list = Self::of(calls);
        let mut next: HashMap<Class, u64> = HashMap::new();
        for entry in &mut list.0 {
            let next = next.entry(entry.class).or_default();
            entry.seq = *next;
            *next += 1;
        }
        list
    }

    /// The text of the list. Beyond `most` bytes it ends early.
    pub(crate) fn text(&self, most: usize) -> String {
        let mut text = String::new();
        for Entry { class, seq, agreed, shown } in &self.0 {
            let line = format!("{class}\t{seq}\t{agreed}\t{shown}\n");
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
            let mut parts = line.splitn(4, '\t');
            Some(Entry {
                class: parts.next()?.parse().ok()?,
                seq: parts.next()?.parse().ok()?,
                agreed: parts.next()?.into(),
                shown: parts.next()?.into(),
            })
        };
        Self(text.lines().filter_map(entry).collect())
    }

    /// The number and the hash of each class. Another rank sees by them whether the lists agree.
    pub(crate) fn summary(&self) -> String {
        let mut classes: Vec<(Class, u64, u64)> = Vec::new();
        for Entry { class, agreed, .. } in &self.0 {
            let at = classes.iter().position(|c| c.0 == *class).unwrap_or_else(|| {
                classes.push((*class, 0, 0xcbf2_9ce4_8422_2325));
                classes.len() - 1
            });
            let (_, count, hash) = &mut classes[at];
            *count += 1;
            for byte in agreed.bytes().chain([b'\n']) {
                *hash = (*hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3);
            }
        }
        classes.sort_unstable_by_key(|c| c.0);
        classes.iter().map(|(class, count, hash)| format!("{class} {count} {hash:x}\n")).collect()
    }

    /// The first calls of two ranks that do not belong together. A call that one of them has not
    /// made does not belong to the other's.
    pub(crate) fn difference(
        &self,
        own: u32,
        other: &Self,
        rank: u32,
        name: &str,
    ) -> Option<Error> {
        self.first_difference(own, other, rank, name, |_, _| true)
    }

    /// As [`difference`](Self::difference), among the calls that both ranks have made so far.
    pub(crate) fn difference_so_far(
        &self,
        own: u32,
        other: &Self,
        rank: u32,
        name: &str,
    ) -> Option<Error> {
        self.first_difference(own, other, rank, name, |ours, theirs| ours && theirs)
    }

    /// `counts` says whether a call counts that is in one of the lists, or in both.
    fn first_difference(
        &self,
        own: u32,
        other: &Self,
        rank: u32,
        name: &str,
        counts: fn(bool, bool) -> bool,
    ) -> Option<Error> {
        for class in [Class::All, Class::To(rank), Class::From(rank)] {
            let of = |list: &Self, class: Class| -> BTreeMap<u64, Entry> {
                let own = list.0.iter().filter(|e| e.class == class);
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
                .filter(|seq| counts(ours.contains_key(seq), theirs.contains_key(seq)))
                .filter(|&seq| agreed(&ours, seq) != agreed(&theirs, seq))
                .min();
            let Some(at) = differing else { continue };
            let shown = |list: &BTreeMap<u64, Entry>| match list.get(&at) {
                Some(entry) => entry.shown.clone(),
                None => "has no such call any more".to_owned(),
            };
            let between = match class {
                Class::All => String::new(),
                Class::To(_) => format!(" from {own} to {rank}"),
                Class::From(_) => format!(" from {rank} to {own}"),
            };
            let call = format!("{name} #{at}{between}");
            let sides = [(own, shown(&ours).into()), (rank, shown(&theirs).into())];
            let [ours, theirs] = sides;
            return Some(Mismatch::new(call, ours, theirs).into());
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
mod tests {
    use super::*;

    fn call(kind: Kind, count: u64, scope: &str) -> Signature {
        let element = ElementType::F32;
        Signature { seq: 0, kind, element, count, captured: true, scope: Some(Name::new(scope)) }
    }

    #[test]
    fn lists_agree_by_class_and_survive_the_store() {
        let sum = Kind::AllReduce(Reduce::Sum);
        let zero = [call(sum, 8, "a"), call(Kind::Send { to: 1 }, 3, "b"), call(sum, 9, "c")];
        let one = [call(Kind::Recv { from: 0 }, 3, "x"), call(sum, 8, "y"), call(sum, 9, "z")];
        let two = [call(sum, 8, "y"), call(sum, 9, "z")];
        let [zero, one, two] =
            [List::of_recording(&zero), List::of_recording(&one), List::of_recording(&two)];
        for (own, list, rank, other) in
            [(0, &zero, 1, &one), (1, &one, 0, &zero), (0, &zero, 2, &two), (2, &two, 1, &one)]
        {
            assert_eq!(List::parse(&other.text(usize::MAX)), *other);
            assert!(list.agrees(own, &other.summary(), rank), "{own} and {rank}");
            assert!(list.difference(own, other, rank, "t").is_none(), "{own} and {rank}");
        }
        assert!(!two.agrees(1, &zero.summary(), 0), "rank 1 has not received");
        let lost = two.difference(1, &zero, 0, "t").unwrap().to_string();
        assert!(
            lost.contains("t #0 from 0 to 1: rank 0 send 3 f32 to 1 (b); rank 1 has no"),
            "{lost}"
        );
        assert_eq!(zero.text(30).lines().count(), 0, "a line is whole or not there");
    }
}
