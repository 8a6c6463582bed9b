//! The ranks of a communicator, and what they tell each other through the store.

use crate::error::lost;
use crate::signature::List;
use crate::store::{LONGEST_VALUE, Presence, left};
use crate::world::World;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::{Error, Result};
use std::time::{Duration, Instant};

/// The ranks of a communicator, seen by one of them.
pub(crate) struct Members {
    pub(crate) world: World,
    /// The name in messages.
    pub(crate) name: String,
    /// The beginning of the communicator's keys.
    pub(crate) key: String,
    /// This rank of the communicator.
    pub(crate) rank: u32,
    /// The ranks of the world, by ranks of the communicator.
    pub(crate) ranks: Vec<u32>,
    /// How long to wait for another rank.
    pub(crate) limit: Duration,
    /// Recordings that were compared, and times that a rank was derived from these.
    stops: AtomicU64,
    derived: AtomicU64,
}

impl Members {
    pub(crate) fn new(
        world: World,
        name: String,
        key: String,
        rank: u32,
        ranks: Vec<u32>,
        limit: Duration,
    ) -> Self {
        let (stops, derived) = (AtomicU64::new(0), AtomicU64::new(0));
        Self { world, name, key, rank, ranks, limit, stops, derived }
    }

    pub(crate) fn size(&self) -> u32 {
        self.ranks.len() as u32
    }

    /// The other ranks of the communicator.
    pub(crate) fn others(&self) -> impl Iterator<Item = u32> + '_ {
        (0..self.size()).filter(|&rank| rank != self.rank)
    }

    /// Publishes what this rank says of a subject to the others.
    pub(crate) fn publish(&self, subject: &str, value: &[u8]) -> Result<()> {
        self.world.0.store.set(&format!("{}/{subject}/{}", self.key, self.rank), value)
    }

    /// Revokes it.
    pub(crate) fn revoke(&self, subject: &str) -> Result<()> {
        self.world.0.store.remove(&format!("{}/{subject}/{}", self.key, self.rank))
    }

    /// The value that another rank tells about a subject. `what` names the missing act in messages.
    ///
    /// # Errors
    /// `Timeout`, `PeerLost`; the store's own.
    pub(crate) fn hear(&self, subject: &str, rank: u32, what: &str) -> Result<String> {
        self.hear_within(subject, rank, what, self.limit, || None)
    }

    /// As [`hear`](Self::hear), within another limit, and until there is an `end`.
    pub(crate) fn hear_within(
        &self,
        subject: &str,
        rank: u32,
        what: &str,
        limit: Duration,
        end: impl Fn() -> Option<Error>,
    ) -> Result<String> {
        let key = format!("{}/{subject}/{rank}", self.key);
        let said = self.world.0.hear(self.ranks[rank as usize], &key, what, limit, end)?;
        String::from_utf8(said).map_err(|_| {
            Error::state(format!("{key} is no text; give this run a store of its own"))
        })
    }

    /// Tells the others that this rank could not make its part.
    pub(crate) fn tell_unmade(&self, cause: &Error) -> Result<()> {
        let cause: String = cause.to_string().chars().take(1000).collect();
        let said = format!("{}\t{cause}", self.rank);
        self.world.0.store.set(&format!("{}/unmade", self.key), said.as_bytes())
    }

    /// Looks whether another rank cannot make its part: it has said so, or it is gone. A rank looks
    /// for the next one only, and one that finds it gone says so.
    ///
    /// # Errors
    /// `PeerLost`; the store's own.
    pub(crate) fn look_for_unmade(&self) -> Result<()> {
        let store = &self.world.0.store;
        match store.get(&format!("{}/unmade", self.key), Duration::ZERO) {
            Ok(said) => {
                let said = String::from_utf8_lossy(&said).into_owned();
                let (rank, cause) = said.split_once('\t').unwrap_or(("", &said));
                let rank = rank.parse().unwrap_or_default();
                let why = format!("it could not make its part of {}: {cause}", self.name);
                return Err(lost(rank, why));
            }
            Err(Error::Timeout(_)) => {}
            Err(e) => return Err(e),
        }
        let next = (self.rank + 1) % self.size();
        if next != self.rank && store.presence(self.ranks[next as usize])? == Presence::Gone {
            let why = "it is gone; look at its last message";
            let said = format!("{next}\t{why}");
            store.set(&format!("{}/unmade", self.key), said.as_bytes())?;
            return Err(lost(next, why));
        }
        Ok(())
    }

    /// The value that another rank has told about a subject, if it has.
    pub(crate) fn said(&self, subject: &str, rank: u32) -> Option<String> {
        let key = format!("{}/{subject}/{rank}", self.key);
        String::from_utf8(self.world.0.store.get(&key, Duration::ZERO).ok()?).ok()
    }

    /// The number of the next communicator that comes from this one.
    pub(crate) fn next_derived(&self) -> u64 {
        self.derived.fetch_add(1, Ordering::Relaxed)
    }

    /// Compares a list of calls with the other ranks' lists. All ranks call it.
    ///
    /// # Errors
    /// `Mismatch` with the first calls of two ranks that do not belong together; `Timeout` and
    /// `PeerLost` for a rank that does not compare.
    pub(crate) fn begin_comparison(&self, list: &List) -> Result<Comparison<'_>> {
        let number = self.stops.fetch_add(1, Ordering::Relaxed);
        let subject = format!("stop/{number}");
        self.publish(&format!("{subject}/list"), list.text(LONGEST_VALUE).as_bytes())?;
        self.publish(&subject, list.summary().as_bytes())?;
        Ok(Comparison { members: self, number })
    }

    /// Looks whether ranks have made other calls: all that they have made, as this one waits at its
    /// limit, or those that `both` have made so far. The others wait too and tell, or they say
    /// nothing: so this takes no longer than `limit`.
    pub(crate) fn exchange(&self, list: &List, limit: Duration, both: bool) -> Option<Error> {
        let until = Instant::now().checked_add(limit);
        let subject = if both { "so-far" } else { "limit" };
        self.publish(subject, list.text(LONGEST_VALUE).as_bytes()).ok()?;
        self.others().find_map(|rank| {
            let theirs =
                self.hear_within(subject, rank, "it tells nothing", left(until), || None).ok()?;
            list.difference(self.rank, &List::parse(&theirs), (rank, both), &self.name)
        })
    }
}

/// A comparison that this rank has begun.
#[must_use]
pub(crate) struct Comparison<'a> {
    members: &'a Members,
    number: u64,
}

impl Comparison<'_> {
    fn hear(&self, subject: &str, rank: u32) -> Result<String> {
        let Self { members, number } = self;
        let what = format!(
            "it has stopped no recording with calls of {} (comparison {number})",
            members.name
        );
        members.hear(&format!("stop/{number}{subject}"), rank, &what)
    }

    /// The list of another rank.
    pub(crate) fn list_of(&self, rank: u32) -> Result<List> {
        Ok(List::parse(&self.hear("/list", rank)?))
    }

    /// Waits for the other ranks' lists, and compares.
    pub(crate) fn end(&self, list: &List) -> Result<()> {
        let Self { members, number } = self;
        for rank in members.others() {
            let summary = self.hear("", rank)?;
            if list.agrees(members.rank, &summary, rank) {
                continue;
            }
            let theirs = self.list_of(rank)?;
            let found = list.difference(
                members.rank,
                &theirs,
                (rank, false),
                &format!("{} recorded", members.name),
            );
            return Err(found.unwrap_or_else(|| {
                Error::state(format!(
                    "{}: the recordings of ranks {} and {rank} differ beyond the {LONGEST_VALUE} bytes that are compared call by call; record less in one graph",
                    members.name, members.rank
                ))
            }));
        }
        // A rank that has heard all of this comparison has no use for the one before.
        if let Some(before) = number.checked_sub(1) {
            members.revoke(&format!("stop/{before}"))?;
            members.revoke(&format!("stop/{before}/list"))?;
        }
        Ok(())
    }
}
