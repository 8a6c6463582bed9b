//! Leak report: the live objects, by kind and name.

use rustc_hash::FxHashMap;
use std::fmt;

use crate::heap::NoMemory;
use crate::local::Local;
use crate::names::{self, Name};
use crate::table::{EntryState, Kind};

/// Live objects that share kind and name.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeakGroup {
    /// The kind of the objects.
    pub kind: Kind,
    /// Their name, empty if none was given.
    pub name: String,
    /// The number of objects.
    pub objects: u64,
    /// Their bytes, as far as known.
    pub bytes: u64,
    /// Sum of their counts.
    pub counts: u64,
}

/// The live objects of a manager. Displayed as one line for each group, the largest number first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LeakReport {
    /// The groups, the largest number of objects first.
    pub groups: Vec<LeakGroup>,
}

impl LeakReport {
    /// Number of live objects.
    pub fn objects(&self) -> u64 {
        self.groups.iter().map(|g| g.objects).sum()
    }
}

impl fmt::Display for LeakReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for g in &self.groups {
            let LeakGroup { kind, objects, bytes, counts, .. } = *g;
            write_line(f, kind, shown(&g.name), Sum { objects, bytes, counts })?;
        }
        Ok(())
    }
}

#[derive(Clone, Copy, Default)]
struct Sum {
    objects: u64,
    bytes: u64,
    counts: u64,
}

/// A group, before its names are copied.
pub(crate) struct Group {
    kind: Kind,
    name: Name,
    sum: Sum,
}

fn write_line(
    f: &mut impl fmt::Write,
    kind: Kind,
    name: impl fmt::Display,
    sum: Sum,
) -> fmt::Result {
    let Sum { objects, bytes, counts } = sum;
    writeln!(f, "{objects} x {kind:?} name={name} bytes={bytes} counts={counts}")
}

/// A name, or a placeholder for none.
fn shown(name: &str) -> &str {
    if name.is_empty() { "-" } else { name }
}

impl Group {
    /// The group's line.
    pub(crate) fn write(&self, f: &mut impl fmt::Write) -> fmt::Result {
        write_line(f, self.kind, Shown(self.name), self.sum)
    }
}

struct Shown(Name);

impl fmt::Display for Shown {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if self.0.is_empty() { f.write_str("-") } else { self.0.fmt(f) }
    }
}

impl Local {
    /// The groups of live objects, the largest number first.
    pub(crate) fn leak_groups(&self) -> Result<Vec<Group>, NoMemory> {
        let mut sums: FxHashMap<(u8, u32), (Kind, Sum)> = FxHashMap::default();
        self.shared.table.for_each(|entry| {
            if entry.state == EntryState::Live {
                sums.try_reserve(1).map_err(|_| NoMemory)?;
                let key = (entry.kind as u8, entry.name);
                let (_, sum) = sums.entry(key).or_insert((entry.kind, Sum::default()));
                sum.objects += 1;
                sum.bytes = sum.bytes.wrapping_add(entry.size);
                sum.counts += u64::from(entry.count);
            }
            Ok(())
        })?;
        let mut groups = Vec::new();
        groups.try_reserve_exact(sums.len()).map_err(|_| NoMemory)?;
        for ((_, name), (kind, sum)) in sums {
            groups.push(Group { kind, name: names::name(name), sum });
        }
        // (A stable sort would allocate.)
        let order = |g: &Group| (std::cmp::Reverse(g.sum.objects), g.name, g.kind as u8);
        groups.sort_unstable_by_key(order);
        Ok(groups)
    }

    pub(crate) fn leak_report(&self) -> LeakReport {
        let group = |g: Group| LeakGroup {
            kind: g.kind,
            name: g.name.to_string(),
            objects: g.sum.objects,
            bytes: g.sum.bytes,
            counts: g.sum.counts,
        };
        LeakReport {
            groups: self.leak_groups().unwrap_or_default().into_iter().map(group).collect(),
        }
    }
}
