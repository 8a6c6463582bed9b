//! The leak report: what is alive, by kind, name and call site.

use std::collections::BTreeMap;
use std::fmt;

use crate::local::Local;
use crate::names;
use crate::table::{Kind, State};

/// Live objects that share kind, name and call site.
#[derive(Clone, PartialEq, Eq, Debug)]
pub struct LeakGroup {
    /// What they are.
    pub kind: Kind,
    /// Their name, empty if none was given.
    pub name: String,
    /// The call site that was current when they were registered, empty if none was set.
    pub site: String,
    /// How many there are.
    pub objects: u64,
    /// Their bytes, as far as known.
    pub bytes: u64,
    /// Sum of their counts.
    pub counts: u64,
}

/// What is alive in a manager. Displayed as one line per group, the most frequent first.
#[derive(Clone, PartialEq, Eq, Debug, Default)]
pub struct LeakReport {
    /// The groups, the most frequent first.
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
            let (name, site) =
                (if g.name.is_empty() { "-" } else { &g.name }, if g.site.is_empty() { "-" } else { &g.site });
            let LeakGroup { kind, objects, bytes, counts, .. } = g;
            writeln!(f, "{objects} x {kind:?} name={name} site={site} bytes={bytes} counts={counts}")?;
        }
        Ok(())
    }
}

impl Local {
    pub(crate) fn leak_report(&self) -> LeakReport {
        let mut groups = BTreeMap::new();
        self.shared.table.for_each(self.me, |entry| {
            if entry.state == State::Live {
                let key = (entry.kind as u8, entry.name, entry.site);
                let (_, objects, bytes, counts) = groups.entry(key).or_insert((entry.kind, 0u64, 0u64, 0u64));
                *objects += 1;
                *bytes = bytes.wrapping_add(entry.size);
                *counts += u64::from(entry.count);
            }
        });
        let group = |((_, name, site), (kind, objects, bytes, counts))| LeakGroup {
            kind,
            name: names::name(name),
            site: names::name(site),
            objects,
            bytes,
            counts,
        };
        let mut groups: Vec<_> = groups.into_iter().map(group).collect();
        groups.sort_by(|a, b| b.objects.cmp(&a.objects).then_with(|| a.name.cmp(&b.name)));
        LeakReport { groups }
    }
}
