//! Cycles of ranks that wait for each other in calls of several communicators.
//!
//! A line gives the calls of a device one order. So a rank *stands* in the first submission of a
//! line that is not over, and comes to no later one before. Another rank that waits for a later one
//! waits for the rank that stands. In a cycle of such waits nobody goes on.
//!
//! # How one is found
//! A rank that stands for some time tells so in a record, again and again. It says which calls it
//! stands in, whom these need, and up to which number the calls of each communicator are over. Each
//! rank that stands follows the records from its own one on. Records are of different times, so a
//! cycle is one only when it is seen twice: all of its ranks have to stand where they stood, in
//! records that they began after the first time. Then all of them stood there at one time.
//!
//! # What is not found
//! A rank without a second communicator on its line tells nothing. Neither does one whose call
//! waits for something else than a call, nor one whose line has no order.
//!
//! This module must not know communicators.

use leasehold::Result;
use std::collections::{BTreeSet, HashMap};
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

/// A communicator of a rank, as far as others may wait for it.
#[derive(PartialEq, Eq)]
pub(crate) struct Standing {
    /// The line that its calls are on.
    pub(crate) line: u64,
    pub(crate) key: String,
    /// By classes, the number up to which calls are over.
    pub(crate) over: Vec<(String, u64)>,
    /// Submissions that wait for nothing of this rank, as timelines and values, with their calls.
    pub(crate) ready: Vec<((u16, u64), Vec<Meeting>)>,
}

/// A call that waits for other ranks.
#[derive(Clone, PartialEq, Eq)]
pub(crate) struct Meeting {
    pub(crate) key: String,
    /// Its class on this rank, and on those that it waits for.
    pub(crate) class: [String; 2],
    pub(crate) seq: u64,
    /// The ranks of the world that it needs.
    pub(crate) ranks: Vec<u32>,
    pub(crate) shown: String,
}

/// A line of a rank, in whose first submission the rank stands.
#[derive(Default)]
#[cfg_attr(test, derive(PartialEq))]
struct Stand {
    /// The number up to which calls are over, by communicators and classes.
    over: HashMap<(String, String), u64>,
    meetings: Vec<Meeting>,
}

impl Stand {
    /// Returns whether a rank that stands here has yet to come to a call of another rank's.
    fn holds_up(&self, call: &Meeting) -> bool {
        let Meeting { key, class: [_, class], seq, .. } = call;
        let is = |own: &Meeting| own.key == *key && own.class[0] == *class && own.seq == *seq;
        let over = self.over.get(&(key.clone(), class.clone()));
        over.is_some_and(|over| over <= seq) && !self.meetings.iter().any(is)
    }
}

/// A rank's lines, as it tells others about them.
#[derive(Default)]
struct Record {
    /// Counts the rank's records.
    stamp: u64,
    stands: Vec<Stand>,
}

impl Record {
    /// The lines that others may wait for: those of several communicators, with one submission that
    /// is ready.
    fn stands_of(all: Vec<Standing>) -> Vec<Stand> {
        let lines: BTreeSet<u64> = all.iter().map(|s| s.line).collect();
        let stand = |line: u64| {
            let own = || all.iter().filter(move |s| s.line == line);
            let mut ready = own().flat_map(|s| s.ready.iter().map(|r| r.0));
            let first = ready.next()?;
            // Several are ready where the line has no order.
            if own().count() < 2 || ready.any(|other| other != first) {
                return None;
            }
            let over = own().flat_map(|s| {
                s.over.iter().map(|(class, over)| ((s.key.clone(), class.clone()), *over))
            });
            let meetings = own().flat_map(|s| s.ready.iter().flat_map(|r| r.1.iter().cloned()));
            Some(Stand { over: over.collect(), meetings: meetings.collect() })
        };
        lines.into_iter().filter_map(stand).collect()
    }

    fn text(stamp: u64, stands: &[Stand]) -> String {
        let mut text = format!("{stamp}\n");
        for Stand { over, meetings } in stands {
            text.push_str("line\n");
            for ((key, class), over) in over {
                let _ = writeln!(text, "over\t{key}\t{class}\t{over}");
            }
            for Meeting { key, class: [own, other], seq, ranks, shown } in meetings {
                let ranks: Vec<String> = ranks.iter().map(u32::to_string).collect();
                let ranks = ranks.join(" ");
                let shown: String = shown.chars().filter(|c| !c.is_control()).take(CALL).collect();
                let _ = writeln!(text, "in\t{key}\t{own}\t{other}\t{seq}\t{ranks}\t{shown}");
            }
        }
        text
    }

    fn parse(text: &str) -> Option<Self> {
        let mut lines = text.lines();
        let mut record = Self { stamp: lines.next()?.parse().ok()?, stands: Vec::new() };
        for line in lines {
            let parts: Vec<&str> = line.split('\t').collect();
            match parts[..] {
                ["line"] => record.stands.push(Stand::default()),
                ["over", key, class, over] => {
                    let key = (key.to_owned(), class.to_owned());
                    record.stands.last_mut()?.over.insert(key, over.parse().ok()?);
                }
                ["in", key, own, other, seq, ranks, shown] => {
                    let ranks = ranks.split(' ').filter(|rank| !rank.is_empty());
                    record.stands.last_mut()?.meetings.push(Meeting {
                        key: key.to_owned(),
                        class: [own.to_owned(), other.to_owned()],
                        seq: seq.parse().ok()?,
                        ranks: ranks.map(str::parse).collect::<std::result::Result<_, _>>().ok()?,
                        shown: shown.to_owned(),
                    });
                }
                _ => return None,
            }
        }
        Some(record)
    }
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

impl Records<'_> {
    fn of(&mut self, rank: u32) -> Result<Option<&Record>> {
        if !self.read.contains_key(&rank) {
            let record = (self.load)(rank)?.and_then(|text| Record::parse(&text));
            self.read.insert(rank, record);
        }
        Ok(self.read.get(&rank).and_then(Option::as_ref))
    }

    /// The lines for which a rank waits that stands in this one, each with the call of the wait.
    fn awaited(&mut self, (rank, line): (u32, usize)) -> Result<Vec<(Meeting, (u32, usize))>> {
        let stand = self.of(rank)?.and_then(|record| record.stands.get(line));
        let meetings = stand.map_or(Vec::new(), |stand| stand.meetings.clone());
        let mut found = Vec::new();
        for call in meetings {
            for &other in &call.ranks {
                let Some(record) = self.of(other)? else { continue };
                let held = record.stands.iter().position(|stand| stand.holds_up(&call));
                found.extend(held.map(|line| (call.clone(), (other, line))));
            }
        }
        Ok(found)
    }

    /// A cycle of waits through a rank.
    fn cycle(&mut self, rank: u32) -> Result<Option<Vec<Step>>> {
        let lines = self.of(rank)?.map_or(0, |record| record.stands.len());
        for from in (0..lines).map(|line| (rank, line)) {
            // The lines of the path, each with the waits that were not tried, and the last one.
            let mut path = vec![(from, self.awaited(from)?, None)];
            let mut seen = vec![from];
            while let Some((_, waits, tried)) = path.last_mut() {
                let Some((call, next)) = waits.pop() else {
                    path.pop();
                    continue;
                };
                *tried = Some(call);
                if next == from {
                    let mut steps = Vec::new();
                    for ((rank, _), _, call) in path {
                        let stamp = self.of(rank)?.map_or(0, |record| record.stamp);
                        steps.extend(call.map(|call| Step { rank, call, stamp }));
                    }
                    // The same words on all ranks.
                    let least = (0..steps.len()).min_by_key(|&i| steps[i].rank);
                    steps.rotate_left(least.unwrap_or_default());
                    return Ok(Some(steps));
                }
                if !seen.contains(&next) {
                    seen.push(next);
                    let waits = self.awaited(next)?;
                    path.push((next, waits, None));
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
        Self { keys: steps.iter().map(|step| step.call.key.clone()).collect(), text }
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
    /// this rank is a part of.
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
        let stands = if stays { Record::stands_of(standing(true)) } else { Vec::new() };
        if stands.is_empty() {
            *self = Self { next: self.next, stamp: self.stamp, known, ..Self::default() };
            return Ok(None);
        }
        self.stamp += 1;
        let own = Record::text(self.stamp, &stands);
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
mod tests {
    use super::*;
    use std::cell::RefCell;
    use std::collections::BTreeMap;

    /// The communicators `a` and `b` of two ranks on one line: so many of their calls are over, and
    /// the rank stands in the next one of the last communicator.
    fn standing(other: u32, calls: [(&str, u64); 2]) -> Vec<Standing> {
        let state = |(i, (key, over)): (usize, (&str, u64))| {
            let meeting = Meeting {
                key: key.to_owned(),
                class: ["*".to_owned(), "*".to_owned()],
                seq: over,
                ranks: vec![other],
                shown: format!("{key} #{over} barrier"),
            };
            let ready = if i == 1 { vec![((i as u16, over), vec![meeting])] } else { Vec::new() };
            Standing { line: 5, key: key.to_owned(), over: vec![("*".to_owned(), over)], ready }
        };
        calls.into_iter().enumerate().map(state).collect()
    }

    /// Two ranks that look in turn, and their records.
    struct Two {
        lookers: [Looker; 2],
        told: RefCell<BTreeMap<u32, String>>,
        now: Instant,
    }

    impl Two {
        fn new() -> Self {
            let (lookers, told) = (Default::default(), RefCell::default());
            Self { lookers, told, now: Instant::now() }
        }

        fn look(&mut self, rank: u32, calls: [(&str, u64); 2]) -> Option<Cycle> {
            self.now += LONGEST;
            let told = &self.told;
            let tell = |text: &str| {
                told.borrow_mut().insert(rank, text.to_owned());
                Ok(())
            };
            let load = |other| Ok(told.borrow().get(&other).cloned());
            let state = |_| standing(1 - rank, calls);
            self.lookers[rank as usize].look(self.now, rank, state, tell, load).unwrap()
        }
    }

    #[test]
    fn ranks_that_stand_crosswise_are_a_cycle_once_both_have_said_so_again() {
        let mut two = Two::new();
        let mut found = None;
        let (mut rounds, crossed) = (0, [[("b", 3), ("a", 7)], [("a", 7), ("b", 3)]]);
        while found.is_none() {
            rounds += 1;
            assert!(rounds < 10, "no cycle");
            found = two.look(0, crossed[0]).or_else(|| two.look(1, crossed[1]));
        }
        assert!(rounds > 3, "records of one time were taken for those of two");
        let Cycle { keys, text } = found.unwrap();
        assert_eq!(keys.into_iter().collect::<Vec<_>>(), ["a", "b"]);
        let chain =
            "rank 0 waits in a #7 barrier for rank 1, which waits in b #3 barrier for rank 0";
        assert!(text.contains(chain), "{text}");
    }

    #[test]
    fn a_record_of_a_rank_that_has_gone_on_is_no_part_of_a_cycle() {
        let mut two = Two::new();
        for _ in 0..3 {
            two.look(0, [("b", 3), ("a", 7)]);
        }
        // Rank 0 has gone on since, and says nothing.
        for _ in 0..20 {
            assert!(two.look(1, [("a", 7), ("b", 3)]).is_none());
        }
    }

    #[test]
    fn a_rank_that_has_made_the_call_holds_nobody_up() {
        let mut two = Two::new();
        for _ in 0..20 {
            // Rank 1's part of rank 0's call is over.
            assert!(two.look(0, [("b", 3), ("a", 7)]).is_none());
            assert!(two.look(1, [("a", 8), ("b", 3)]).is_none());
        }
        for _ in 0..20 {
            // Both stand in one call.
            assert!(two.look(0, [("a", 8), ("b", 3)]).is_none());
            assert!(two.look(1, [("a", 8), ("b", 3)]).is_none());
        }
    }

    #[test]
    fn records_survive_the_store() {
        let stands = Record::stands_of(standing(1, [("b", 3), ("a", 7)]));
        let record = Record::parse(&Record::text(9, &stands)).unwrap();
        assert!(record.stamp == 9 && record.stands == stands && stands.len() == 1);
        // A line with two submissions that are ready has no order.
        let mut loose = standing(1, [("b", 3), ("a", 7)]);
        loose[0].ready = vec![((8, 8), Vec::new())];
        assert!(Record::stands_of(loose).is_empty());
    }
}
