//! The watchdog of a world: who is gone, what other ranks tell, and who waits for too long.
//!
//! A rank has one thread for it, from its first communicator on. It looks every few milliseconds:
//! - for events, which ranks put into the store under running numbers;
//! - whether its neighbour is there. A rank's neighbour is the next one that is not gone, so each
//!   rank is looked at by one other rank. Who finds one gone says so in an event;
//! - what its communicators have to look at;
//! - for ranks that wait for each other ([`cycle`]).
//!
//! A rank that is gone may have ended in order, once its calls were over on its side. So the others
//! have a grace in which theirs end too. What is not over then is lost.
//!
//! This module must not know communicators.

use crate::cycle::{self, Cycle, Standing};
use crate::native::Outbox;
use crate::store::{LONGEST_VALUE, Presence, Store};
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::backend::sync::{Arc, Mutex, thread};
use leasehold::{Error, Result};
use std::collections::{BTreeSet, HashMap};
use std::sync::Weak;
use std::time::{Duration, Instant};

/// The pause between two looks.
const LOOK: Duration = Duration::from_millis(5);
/// The time in which calls end that a rank has made before it was gone.
const GRACE: Duration = Duration::from_millis(20);
/// The same, for a thread that has dropped its world in order.
const GRACE_IN_ORDER: Duration = Duration::from_secs(1);
/// Bytes of a rank's part of a report.
const LONGEST_REPORT: usize = LONGEST_VALUE / 16;

/// The work that an event leaves until all things of its names were told of it.
pub(crate) type Then = Box<dyn FnOnce() + Send>;

/// A thing that a watchdog looks after.
pub(crate) trait Watched: Send + Sync {
    /// Looks after itself: called every few milliseconds.
    fn look(&self, now: Instant);

    /// A rank of the world is gone.
    fn lost(&self, rank: u32, why: &str);

    /// Another rank tells about things of these names: a word, a number and a text. Returns what
    /// is to be done once each of the things was told.
    fn told(&self, names: &[&str], word: &str, number: u32, text: &str) -> Option<Then>;

    /// Its calls for which other ranks may wait. If the device is asked, those submitted are left
    /// out once one has come to an end. Otherwise calls count as ready that may wait for something
    /// of the rank.
    fn standing(&self, ask: bool) -> Vec<Standing>;

    /// A line for each thing that a report should say.
    fn report(&self, lines: &mut Vec<String>);
}

/// The watchdog of a rank.
#[derive(Default)]
pub(crate) struct Watchdog {
    watched: Mutex<Vec<Weak<dyn Watched>>>,
    begun: AtomicBool,
    /// The world has ended in order.
    pub(crate) closed: AtomicBool,
    /// Orders that the watchdog's thread passes on at each look.
    outbox: Arc<Outbox>,
}

/// The state of a world that its watchdog needs.
pub(crate) trait Watching: Send + Sync {
    /// The watchdog.
    fn watchdog(&self) -> &Watchdog;
    /// The store.
    fn store(&self) -> &dyn Store;
    /// The rank, and how many there are.
    fn place(&self) -> (u32, u32);
}

impl Watchdog {
    /// Looks after something, as long as it lives.
    ///
    /// # Errors
    /// The system's, without a thread.
    pub(crate) fn add(
        &self,
        world: &Arc<impl Watching + 'static>,
        watched: Weak<dyn Watched>,
    ) -> Result<()> {
        let mut all = self.watched.lock();
        all.retain(|w| w.strong_count() != 0);
        all.push(watched);
        drop(all);
        if world.place().1 > 1 && !self.begun.swap(true, Ordering::AcqRel) {
            let (world, outbox) = (Arc::downgrade(world), self.outbox.clone());
            let spawned = thread::Builder::new().name("lh-watchdog".to_owned()).spawn(move || {
                Looker::default().run(&world, &outbox);
                outbox.pass_on(false);
            });
            if let Err(e) = spawned {
                self.begun.store(false, Ordering::Release);
                return Err(e.into());
            }
        }
        Ok(())
    }

    /// Orders that wait for the next look.
    pub(crate) fn outbox(&self) -> &Arc<Outbox> {
        &self.outbox
    }

    fn each(&self, mut f: impl FnMut(&dyn Watched)) {
        let all: Vec<_> = self.watched.lock().iter().filter_map(Weak::upgrade).collect();
        all.iter().for_each(|w| f(&**w));
    }

    /// This rank's part of a report.
    fn own_report(&self) -> String {
        let mut lines = Vec::new();
        self.each(|w| w.report(&mut lines));
        if lines.is_empty() {
            lines.push("no communicator".to_owned());
        }
        let mut text = lines.join("\n");
        if text.len() > LONGEST_REPORT {
            let end = (0..=LONGEST_REPORT).rev().find(|&at| text.is_char_boundary(at));
            text.truncate(end.unwrap_or_default());
        }
        text
    }
}

/// Notifies all ranks of something about a thing of a name, or things of names with spaces between.
///
/// # Errors
/// The store's own.
pub(crate) fn notify(
    world: &dyn Watching,
    word: &str,
    name: &str,
    number: u32,
    text: &str,
) -> Result<()> {
    let store = world.store();
    let at = store.add("events", 1)?;
    let text: String = text.chars().filter(|c| !c.is_control()).take(1000).collect();
    store.set(&format!("event/{at}"), format!("{word}\t{name}\t{number}\t{text}").as_bytes())
}

/// The activity of each rank, in a paragraph. Ranks that do not answer in time are named.
///
/// # Errors
/// The store's own.
pub(crate) fn report(world: &dyn Watching, limit: Duration) -> Result<String> {
    let (rank, size) = world.place();
    let store = world.store();
    let number = store.add("reports", 1)?;
    notify(world, "report", "-", u32::try_from(number).unwrap_or_default(), "")?;
    let until = Instant::now().checked_add(limit);
    let mut text = String::new();
    for other in 0..size {
        let said = match other == rank {
            true => world.watchdog().own_report(),
            false => {
                let left = crate::store::left(until);
                match store.get(&format!("report/{number}/{other}"), left) {
                    Ok(said) => String::from_utf8_lossy(&said).into_owned(),
                    Err(Error::Timeout(_)) => match store.presence(other)? {
                        Presence::Awaited => "it has not come".to_owned(),
                        Presence::Gone => "it is gone".to_owned(),
                        Presence::Here => format!(
                            "it does not answer within {limit:?}: it has no communicator, it was stopped, or its host is lost"
                        ),
                    },
                    Err(e) => return Err(e),
                }
            }
        };
        for line in said.lines() {
            text.push_str(&format!("rank {other}: {line}\n"));
        }
    }
    Ok(text)
}

/// The knowledge of a watchdog's thread.
#[derive(Default)]
struct Looker {
    /// Events that were read.
    read: u64,
    /// Ranks that are gone.
    gone: BTreeSet<u32>,
    /// Of these, those that still have a grace, and why they are gone.
    dying: HashMap<u32, (Instant, String)>,
    cycles: cycle::Looker,
}

impl Looker {
    fn run(mut self, world: &Weak<impl Watching>, outbox: &Outbox) {
        loop {
            outbox.pass_on(true);
            {
                // Not held over the pause: a world ends with its last holder.
                let Some(world) = world.upgrade() else { return };
                if world.watchdog().closed.load(Ordering::Acquire) {
                    return;
                }
                if let Err(e) = self.look(&*world) {
                    // The store is rank 0's, or nobody's.
                    let why = format!("its store does not answer: {e}");
                    if world.place().0 != 0 {
                        world.watchdog().each(|w| w.lost(0, &why));
                    }
                    return;
                }
            }
            thread::sleep(LOOK);
        }
    }

    fn look(&mut self, world: &dyn Watching) -> Result<()> {
        let (store, watchdog) = (world.store(), world.watchdog());
        loop {
            let event = match store.get(&format!("event/{}", self.read + 1), Duration::ZERO) {
                Ok(event) => event,
                Err(Error::Timeout(_)) => break,
                Err(e) => return Err(e),
            };
            self.read += 1;
            self.heard(world, &String::from_utf8_lossy(&event))?;
        }
        self.look_at_neighbour(world)?;
        let now = Instant::now();
        let due: Vec<u32> =
            self.dying.iter().filter(|(_, (at, _))| *at <= now).map(|(rank, _)| *rank).collect();
        for rank in due {
            if let Some((_, why)) = self.dying.remove(&rank) {
                watchdog.each(|w| w.lost(rank, &why));
            }
        }
        watchdog.each(|w| w.look(now));
        self.look_for_cycle(world, now)
    }

    fn look_for_cycle(&mut self, world: &dyn Watching, now: Instant) -> Result<()> {
        let (rank, store, watchdog) = (world.place().0, world.store(), world.watchdog());
        let standing = |ask| {
            let mut all = Vec::new();
            // A cycle needs a second communicator.
            if watchdog.watched.lock().iter().filter(|w| w.strong_count() != 0).nth(1).is_some() {
                watchdog.each(|w| all.extend(w.standing(ask)));
            }
            all
        };
        let record = |record: &str| store.set(&format!("stands/{rank}"), record.as_bytes());
        let load = |other| match store.get(&format!("stands/{other}"), Duration::ZERO) {
            Ok(record) => Ok(Some(String::from_utf8_lossy(&record).into_owned())),
            Err(Error::Timeout(_)) => Ok(None),
            Err(e) => Err(e),
        };
        match self.cycles.look(now, rank, standing, record, load)? {
            Some(Cycle { keys, text }) => {
                // In one event, so that none of them goes on where another one has ended.
                notify(world, "cycle", &Vec::from_iter(keys).join(" "), rank, &text)
            }
            None => Ok(()),
        }
    }

    fn look_at_neighbour(&mut self, world: &dyn Watching) -> Result<()> {
        let (rank, size) = world.place();
        let mut others = (1..size).map(|by| (rank + by) % size);
        let Some(next) = others.find(|other| !self.gone.contains(other)) else { return Ok(()) };
        if world.store().presence(next)? == Presence::Gone {
            let in_order = world.store().get(&format!("left/{next}"), Duration::ZERO).is_ok();
            let why = match in_order {
                true => "it has left the world",
                false => "its process has ended, or its thread has panicked",
            };
            self.lose(next, in_order, why);
            notify(world, if in_order { "left" } else { "gone" }, "-", next, why)?;
        }
        Ok(())
    }

    fn lose(&mut self, rank: u32, in_order: bool, why: &str) {
        if self.gone.insert(rank) {
            let grace = if in_order { GRACE_IN_ORDER } else { GRACE };
            self.dying.insert(rank, (Instant::now() + grace, why.to_owned()));
        }
    }

    fn heard(&mut self, world: &dyn Watching, event: &str) -> Result<()> {
        let mut parts = event.splitn(4, '\t');
        let mut next = || parts.next().unwrap_or_default();
        let (word, name, number, text) = (next(), next(), next(), next());
        let Ok(number) = number.parse::<u32>() else { return Ok(()) };
        match word {
            "report" => {
                let key = format!("report/{number}/{}", world.place().0);
                world.store().set(&key, world.watchdog().own_report().as_bytes())?;
            }
            "gone" | "left" => self.lose(number, word == "left", text),
            _ => {
                let (names, mut then) = (Vec::from_iter(name.split(' ')), Vec::new());
                world.watchdog().each(|w| then.extend(w.told(&names, word, number, text)));
                then.into_iter().for_each(|then| then());
            }
        }
        Ok(())
    }
}
