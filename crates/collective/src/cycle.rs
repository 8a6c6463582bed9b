//! Cycles of ranks that wait for each other in calls of several communicators.
//!
//! An order token gives the calls of a device one order, and a lock its checked calls
//! ([`Check::Each`](crate::Check::Each)), which wait for each other on the host. So a rank *stands*
//! in the first submission of an order that is not over, and comes to no later one before. A graph
//! is one submission of several places, each with a call or a group, which follow each other. What
//! waits for a call of a rank waits for the rank's places before it. In a cycle of such waits
//! nobody goes on.
//!
//! # How one is found
//! A rank that stands for some time tells so in a record, again and again. It says which calls it
//! stands in, whom these need, and up to which number the calls of each communicator are over. Each
//! rank that stands follows the records from its own one on. Records are of different times, so a
//! cycle is one only when it is seen twice: all of its ranks have to stand where they stood, in
//! records that they began after the first time. Then all of them stood there at one time.
//!
//! # What is not found
//! A rank without a second communicator in an order tells nothing. Neither does one whose call
//! waits for something else than a call, nor one whose calls have no order. Of a graph the first
//! places count, and those of communicators with calls of all ranks in it.
//!
//! This module must not know communicators.

use leasehold::Result;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::fmt::Write;
use std::time::{Duration, Instant};

/// The pause between two looks, and between two looks for a cycle where there was none.
const LOOK: Duration = Duration::from_millis(20);
const LONGEST: Duration = Duration::from_secs(1);
/// The least part of that pause for each record that was read, so that many ranks leave the store
/// its time.
const READ: Duration = Duration::from_millis(10);
/// The ranks of a cycle in its text, and the characters of each call.
const SHOWN: usize = 6;
const CALL: usize = 100;
/// The places of a graph in a record.
const PLACES: usize = 256;

/// A communicator's calls of one order, as far as others may wait for them.
#[derive(PartialEq, Eq)]
pub(crate) struct Standing {
    /// The serial of the order token, and whether the order is that of checks on the host.
    pub(crate) order: (u64, bool),
    /// By `KEY CLASS`, the number up to which calls are over.
    pub(crate) over: Vec<(String, u64)>,
    /// Submissions that wait for nothing of this rank, as timelines and values, with their calls.
    pub(crate) ready: Vec<((u16, u64), Vec<Meeting>)>,
}

/// A call that waits for other ranks.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Meeting {
    /// The place in its submission.
    pub(crate) at: u64,
    /// The call on this rank and on those that it waits for: `KEY CLASS NUMBER`, and for one of
    /// several in a launch ` CLASS NUMBER` in the graph.
    pub(crate) call: [String; 2],
    /// The ranks of the world that it needs.
    pub(crate) ranks: Vec<u32>,
    pub(crate) shown: String,
}

/// The class and the number of a call, and its name without the place in a graph.
fn class(call: &str) -> Option<(&str, u64, &str)> {
    let end = call.match_indices(' ').nth(1)?.0;
    let number = call[end + 1..].split(' ').next()?;
    Some((&call[..end], number.parse().ok()?, &call[..end + 1 + number.len()]))
}

/// An order of a rank, in whose first submission the rank stands.
#[derive(Default)]
struct Stand {
    over: BTreeMap<String, u64>,
    /// The calls by places, and the places by names of calls and launches.
    places: Vec<Vec<Meeting>>,
    place_of: HashMap<String, usize>,
}

impl Stand {
    fn new(over: BTreeMap<String, u64>, calls: &[Meeting]) -> Self {
        let places = calls.chunk_by(|a, b| a.at == b.at).take(PLACES).map(<[_]>::to_vec);
        let mut stand = Self { over, places: places.collect(), place_of: HashMap::new() };
        for (place, call) in
            (0..).zip(&stand.places).flat_map(|(i, p)| p.iter().map(move |c| (i, c)))
        {
            let launch = class(&call.call[0]).map_or("", |class| class.2);
            for name in [&call.call[0], launch] {
                stand.place_of.entry(name.to_owned()).or_insert(place);
            }
        }
        stand
    }

    /// The stands that others may wait for: in orders of several communicators, with one submission
    /// that is ready.
    fn all(all: &[Standing]) -> Vec<Self> {
        let orders: BTreeSet<_> = all.iter().map(|s| s.order).collect();
        let stand = |order| {
            let own = || all.iter().filter(move |s| s.order == order);
            let ready = || own().flat_map(|s| &s.ready);
            let first = ready().next()?.0;
            // Several are ready where there is no order.
            if own().count() < 2 || ready().any(|other| other.0 != first) {
                return None;
            }
            let mut calls: Vec<Meeting> = ready().flat_map(|r| r.1.iter().cloned()).collect();
            calls.sort_by_key(|call| call.at);
            Some(Self::new(own().flat_map(|s| s.over.iter().cloned()).collect(), &calls))
        };
        orders.into_iter().filter_map(stand).collect()
    }

    /// The place that is over before the rank comes to a call of another rank's.
    fn before(&self, call: &Meeting) -> Option<usize> {
        let name = &call.call[1];
        let (class, number, launch) = class(name)?;
        if self.over.get(class)? > &number {
            return None;
        }
        let place = self.place_of.get(name).or_else(|| self.place_of.get(launch));
        place.copied().unwrap_or(self.places.len()).checked_sub(1)
    }

    /// A line for each class that is over, and for each call.
    fn text(&self) -> String {
        let mut text = String::new();
        for (class, over) in &self.over {
            let _ = writeln!(text, "{class}\t{over}");
        }
        for Meeting { at, call: [own, other], ranks, shown } in self.places.iter().flatten() {
            let ranks: String = ranks.iter().map(|rank| format!("{rank} ")).collect();
            let shown: String = shown.chars().filter(|c| !c.is_control()).take(CALL).collect();
            let _ = writeln!(text, "{at}\t{own}\t{other}\t{ranks}\t{shown}");
        }
        text
    }

    fn parse(text: &str) -> Option<Self> {
        let (mut over, mut calls) = (BTreeMap::new(), Vec::new());
        for line in text.lines() {
            match line.split('\t').collect::<Vec<_>>()[..] {
                [class, number] => drop(over.insert(class.to_owned(), number.parse().ok()?)),
                [at, own, other, ranks, shown] => calls.push(Meeting {
                    at: at.parse().ok()?,
                    call: [own.to_owned(), other.to_owned()],
                    ranks: ranks
                        .split_terminator(' ')
                        .map(|r| r.parse().ok())
                        .collect::<Option<_>>()?,
                    shown: shown.to_owned(),
                }),
                _ => return None,
            }
        }
        Some(Self::new(over, &calls))
    }
}

/// The number of a rank's record, and the stands in it, each behind an empty line.
type Record = (u64, Vec<Stand>);

fn record(stamp: u64, stands: &[Stand]) -> String {
    let stands = stands.iter().map(|stand| format!("\n\n{}", stand.text().trim_end_matches('\n')));
    format!("{stamp}{}", stands.collect::<String>())
}

fn parse(text: &str) -> Option<Record> {
    let mut parts = text.split("\n\n");
    Some((parts.next()?.parse().ok()?, parts.map(Stand::parse).collect::<Option<_>>()?))
}

/// A rank of a cycle, the call in which it waits for the next one, and the stamp of its record.
struct Step {
    rank: u32,
    call: Meeting,
    stamp: u64,
}

/// The records of ranks, each of which is read once.
struct Records<'a> {
    read: HashMap<u32, Option<Record>>,
    load: &'a mut dyn FnMut(u32) -> Result<Option<String>>,
}

/// A rank, one of its stands, and a place of that.
type Place = (u32, usize, usize);
/// A place that another one waits for, with the call of the wait; without one it is the place
/// before.
type Wait = (Option<Meeting>, Place);

impl Records<'_> {
    fn of(&mut self, rank: u32) -> Result<Option<&Record>> {
        if !self.read.contains_key(&rank) {
            let record = (self.load)(rank)?.and_then(|text| parse(&text));
            self.read.insert(rank, record);
        }
        Ok(self.read.get(&rank).and_then(Option::as_ref))
    }

    /// The places that must be over before this one can be.
    fn awaited(&mut self, (rank, stand, place): Place) -> Result<Vec<Wait>> {
        let known = self.of(rank)?.and_then(|record| record.1.get(stand)?.places.get(place));
        let calls = known.map_or(Vec::new(), Clone::clone);
        let mut found = Vec::new();
        for call in calls {
            for &other in &call.ranks {
                let Some((_, stands)) = self.of(other)? else { continue };
                let before = |(i, stand): (usize, &Stand)| Some((other, i, stand.before(&call)?));
                let held = stands.iter().enumerate().find_map(before);
                found.extend(held.map(|place| (Some(call.clone()), place)));
            }
        }
        // Tried first, as waits of a graph's first places are the plainest.
        found.extend(place.checked_sub(1).map(|before| (None, (rank, stand, before))));
        Ok(found)
    }

    /// A cycle of waits that a rank waits for, or is a part of.
    fn cycle(&mut self, rank: u32) -> Result<Option<Vec<Step>>> {
        let own = self.of(rank)?.map_or(&[][..], |record| &record.1);
        let last = |(i, s): (usize, &Stand)| Some((rank, i, s.places.len().checked_sub(1)?));
        let begins: Vec<Place> = own.iter().enumerate().filter_map(last).collect();
        // Whether a place that was seen is in the path.
        let mut seen: HashMap<Place, bool> = HashMap::new();
        for from in begins {
            // The places of the path, each with the waits that were not tried, and the last one.
            let mut path = vec![(from, self.awaited(from)?, None)];
            seen.insert(from, true);
            while let Some((place, waits, tried)) = path.last_mut() {
                let Some((call, next)) = waits.pop() else {
                    seen.insert(*place, false);
                    path.pop();
                    continue;
                };
                *tried = call;
                match seen.get(&next) {
                    Some(true) => {
                        let mut steps = Vec::new();
                        let cycle = path.into_iter().skip_while(|(place, ..)| *place != next);
                        for ((rank, ..), _, call) in cycle {
                            let stamp = self.of(rank)?.map_or(0, |record| record.0);
                            steps.extend(call.map(|call| Step { rank, call, stamp }));
                        }
                        // The same words on all ranks.
                        let least = (0..steps.len()).min_by_key(|&i| steps[i].rank);
                        steps.rotate_left(least.unwrap_or_default());
                        return Ok(Some(steps));
                    }
                    Some(false) => {}
                    None => {
                        seen.insert(next, true);
                        let waits = self.awaited(next)?;
                        path.push((next, waits, None));
                    }
                }
            }
        }
        Ok(None)
    }
}

/// A cycle of ranks that wait for each other.
pub(crate) struct Cycle {
    /// The communicators.
    pub(crate) keys: BTreeSet<String>,
    pub(crate) text: String,
}

impl Cycle {
    fn of(steps: &[Step]) -> Self {
        let mut text = "dead-lock, as ranks call several communicators in different orders; let all ranks call them in one order, or make these calls in one communicator: ".to_owned();
        for (i, Step { rank, call, .. }) in steps.iter().enumerate().take(SHOWN) {
            let _ = match i {
                0 => write!(text, "rank {rank} waits in {}", call.shown),
                _ => write!(text, " for rank {rank}, which waits in {}", call.shown),
            };
        }
        if steps.len() > SHOWN {
            let _ = write!(text, " for {} more ranks, one for the other", steps.len() - SHOWN);
        }
        let _ = write!(text, " for rank {}", steps[0].rank);
        let key = |step: &Step| Some(step.call.call[0].split_once(' ')?.0.to_owned());
        Self { keys: steps.iter().filter_map(key).collect(), text }
    }
}

/// A cycle that was seen once.
struct Suspect {
    steps: Vec<Step>,
    /// The stamps at the look after that.
    stamps: Option<Vec<u64>>,
}

impl Suspect {
    fn is(&self, steps: &[Step]) -> bool {
        self.steps.len() == steps.len()
            && std::iter::zip(&self.steps, steps).all(|(a, b)| a.rank == b.rank && a.call == b.call)
    }
}

/// A rank's look at the waits of its world.
#[derive(Default)]
pub(crate) struct Looker {
    next: Option<Instant>,
    /// The communicators at the last look, as far as it was known without the device.
    known: Vec<Standing>,
    stamp: u64,
    /// The next look for a cycle, and the pause after it.
    follow: Option<Instant>,
    pause: Duration,
    suspect: Option<Suspect>,
}

impl Looker {
    /// Looks at a time. `standing` gives the communicators' states, and asks the device if it is
    /// told to. `tell` sets this rank's record, and `load` gets another one's. Returns a cycle that
    /// this rank is a part of, or waits for.
    ///
    /// # Errors
    /// Those of `tell` and `load`.
    pub(crate) fn look(
        &mut self,
        now: Instant,
        rank: u32,
        standing: impl Fn(bool) -> Vec<Standing>,
        tell: impl FnOnce(&str) -> Result<()>,
        mut load: impl FnMut(u32) -> Result<Option<String>>,
    ) -> Result<Option<Cycle>> {
        if self.next.is_some_and(|next| now < next) {
            return Ok(None);
        }
        self.next = Some(now + LOOK);
        let known = standing(false);
        // The device is not asked while the rank goes on.
        let stays = known == self.known && known.iter().any(|s| !s.ready.is_empty());
        let stands = if stays { Stand::all(&standing(true)) } else { Vec::new() };
        if stands.is_empty() {
            *self = Self { next: self.next, stamp: self.stamp, known, ..Self::default() };
            return Ok(None);
        }
        self.stamp += 1;
        let own = record(self.stamp, &stands);
        tell(&own)?;
        if self.follow.is_some_and(|at| now < at) {
            return Ok(None);
        }
        let mut load = |other| if other == rank { Ok(Some(own.clone())) } else { load(other) };
        let mut records = Records { read: HashMap::new(), load: &mut load };
        let cycle = records.cycle(rank)?;
        let Some(steps) = cycle else {
            self.suspect = None;
            let least = READ.saturating_mul(records.read.len() as u32);
            self.pause = (2 * self.pause).clamp(LOOK, LONGEST).max(least);
            self.follow = Some(now + self.pause);
            return Ok(None);
        };
        self.pause = Duration::ZERO;
        let stamps = steps.iter().map(|step| step.stamp).collect();
        match self.suspect.take().filter(|suspect| suspect.is(&steps)) {
            None => self.suspect = Some(Suspect { steps, stamps: None }),
            Some(Suspect { stamps: None, .. }) => {
                self.suspect = Some(Suspect { steps, stamps: Some(stamps) });
            }
            // A rank begins the second record after the one that was seen has been told.
            Some(Suspect { stamps: Some(seen), .. })
                if std::iter::zip(&seen, &stamps).all(|(seen, now)| *now >= seen + 2) =>
            {
                return Ok(Some(Cycle::of(&steps)));
            }
            again => self.suspect = again,
        }
        Ok(None)
    }
}

#[cfg(test)]
#[path = "../tests/unit/cycle.rs"]
mod tests;
