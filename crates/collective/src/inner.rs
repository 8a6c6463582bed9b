//! The part of a communicator that a submitted call keeps, and its end.
//!
//! # How a communicator ends
//! The first failure stays; later calls return it and submit nothing, and graphs with calls are
//! launched no more. These steps are taken in this order:
//! 1. The failure is set.
//! 2. The submissions with calls that are not over fail, and so does what is ordered after them.
//!    A library may end its work without an error: its values must not look complete.
//! 3. The other ranks do the same, and say so. A rank waits for that, for a quarter of a second.
//! 4. The library ends its work, on a thread of its own.
//!
//! A submitter adds the call's value to those that are not over, and then looks for a failure. So
//! either the end finds the value, or the submitter finds the failure.

use crate::cycle::{Meeting, Standing};
use crate::driver::{Call, CollectiveOps};
use crate::error::{lost, timeout};
use crate::group::{Extent, Uses, check_apart};
use crate::log::{Entered, Log};
use crate::members::Members;
use crate::native::{Done, Native};
use crate::order_token::Turn;
use crate::signature::{Class, Kind, List, Signature};
use crate::store::Presence;
use crate::unfinished::{Calls, Submission, Unfinished, first_of};
use crate::watchdog::{self, Then, Watched, Watching};
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::backend::sync::{Arc, Mutex, thread};
use leasehold::backend::{Binding, Device, TimelineId};
use leasehold::graph::LaunchCheck;
use leasehold::{Error, Result, Timepoint, WeakLease};
use smallvec::SmallVec;
use std::collections::HashMap;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long ranks that exchange lists wait for each other. A rank begins so long before its limit,
/// or a quarter of the limit, so that it has the reason in time.
const TELL: Duration = Duration::from_secs(2);
/// How long a rank at its limit waits at least for the others' reports.
const ANSWER: Duration = Duration::from_millis(500);
/// How long a library that has limits of its own may take to end a call at its limit.
const OWN: Duration = Duration::from_millis(200);
/// How long a rank waits until the others have heard of an end.
const HEARD: Duration = Duration::from_millis(250);
/// How long an abort may take.
const ABORT: Duration = Duration::from_secs(5);
/// How often eager calls are compared, and the library is asked.
const COMPARED: Duration = Duration::from_millis(100);
/// The eager calls of a communicator in a report.
const SHOWN: usize = 3;
/// The steps of a chain of waits in a report.
const CHAIN: usize = 8;

/// The part of a communicator that a submitted call keeps. It must not hold the runtime: in a graph
/// that would be a cycle.
pub(crate) struct Core {
    pub(crate) members: Arc<Members>,
    pub(crate) ops: Arc<dyn CollectiveOps>,
    /// The device's lock, if the library wants one.
    pub(crate) turn: Option<Arc<Turn>>,
    pub(crate) native: Native,
    pub(crate) log: Mutex<Log>,
    pub(crate) device: WeakLease<dyn Device>,
    /// The serial of the order token that orders its calls.
    pub(crate) token: u64,
    pub(crate) unfinished: Unfinished,
    /// The calls that the host compares just now; `None` without checks of each call.
    pub(crate) checking: Option<Mutex<Calls>>,
    failed: Mutex<Failed>,
    /// There is a failure. Set in the lock of `failed`, so a sound communicator's calls take no
    /// lock for it.
    has_failed: AtomicBool,
    looked: Mutex<Looked>,
    me: Weak<Self>,
}

/// The failure of a communicator.
#[derive(Default)]
struct Failed {
    /// The first one. No call is submitted any more.
    cause: Option<Error>,
    /// Calls that were submitted end too. This says when the library has ended its work.
    end: Option<Arc<Done>>,
}

/// The watchdog's view of a communicator.
#[derive(Default)]
struct Looked {
    /// Since when the first call of a timeline that is not over waits for nothing of this rank.
    ready: HashMap<TimelineId, (u64, Instant)>,
    /// The next comparison, and the calls that there were at the last one.
    compare: Option<Instant>,
    compared: u64,
    /// A thread looks why a call is late.
    late: bool,
    /// A thread exchanges lists.
    differs: bool,
    /// The library has ended a call at its limit.
    ended: bool,
}

/// A call without its memory, and where that is among the operands.
#[derive(Clone)]
pub(crate) struct Planned {
    pub(crate) signature: Signature,
    pub(crate) src: Option<usize>,
    pub(crate) dst: Option<usize>,
}

/// The reason for an exchange of lists.
enum Reason {
    /// A call is about to have waited for as long as the limit.
    Late(Late),
    /// The hash of the calls is another than the next rank's. The text says so.
    Hash(String),
    /// Another rank exchanges lists.
    Notified,
}

/// A call that others are late for.
struct Late {
    at: Timepoint,
    /// The end of its limit, and the time up to that.
    until: Instant,
    lead: Duration,
    /// The message of that end.
    text: String,
}

/// Whom a failure concerns.
enum Others {
    /// The other ranks are notified.
    Notify,
    /// They know, or find it themselves.
    Know,
}

impl Others {
    /// Those of a failure that the library gives.
    fn of(cause: &Error) -> Self {
        match cause {
            Error::Timeout(_) | Error::PeerLost { .. } | Error::Mismatch(_) => Self::Know,
            // A failure of this rank alone: the others would wait for it.
            _ => Self::Notify,
        }
    }
}

impl Core {
    pub(crate) fn new(
        members: Arc<Members>,
        ops: Arc<dyn CollectiveOps>,
        turn: Option<Arc<Turn>>,
        native: Native,
        (device, token): (WeakLease<dyn Device>, u64),
        checks: bool,
    ) -> Result<Arc<Self>> {
        let core = Arc::new_cyclic(|me: &Weak<Self>| Self {
            members,
            ops,
            turn,
            native,
            log: Mutex::default(),
            device,
            token,
            unfinished: Unfinished::default(),
            checking: checks.then(Mutex::default),
            failed: Mutex::default(),
            has_failed: AtomicBool::new(false),
            looked: Mutex::default(),
            me: me.clone(),
        });
        let world = &core.members.world.0;
        world.watchdog().add(world, core.me.clone())?;
        Ok(core)
    }

    /// The first failure.
    #[inline]
    pub(crate) fn failure(&self) -> Option<Error> {
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        self.failed.lock().cause.clone()
    }

    /// The first failure, if it ends the calls that were submitted before.
    #[inline]
    fn ended(&self) -> Option<Error> {
        if !self.has_failed.load(Ordering::Acquire) {
            return None;
        }
        let failed = self.failed.lock();
        failed.end.as_ref().and_then(|_| failed.cause.clone())
    }

    /// Refuses later calls. Those before go on: the ranks agree on them. Returns the first failure.
    pub(crate) fn refuse(&self, cause: Error) -> Error {
        let mut failed = self.failed.lock();
        self.has_failed.store(true, Ordering::Release);
        failed.cause.get_or_insert(cause).clone()
    }

    /// Adds a submission with calls.
    pub(crate) fn submitted(&self, at: Timepoint, calls: Calls, graph: Option<Arc<List>>) {
        self.unfinished.add(Submission { at, calls, graph });
        if let Some(cause) = self.ended() {
            self.poison(at, &cause);
        }
    }

    fn poison(&self, at: Timepoint, cause: &Error) {
        if let Some(device) = self.device.upgrade() {
            device.fail(at, cause.clone());
        }
    }

    /// Ends the communicator, and returns its first failure, and the end of the library's work.
    fn end(&self, cause: Error, others: Others) -> (Error, Arc<Done>) {
        let (first, done, then) = self.fail(cause, others);
        then.into_iter().for_each(|then| then());
        (first, done)
    }

    /// Fails the communicator's calls. Returns its first failure, the end of the library's work,
    /// and what begins that end, once.
    fn fail(&self, cause: Error, others: Others) -> (Error, Arc<Done>, Option<Then>) {
        let mut failed = self.failed.lock();
        let new = failed.end.is_none();
        let done = failed.end.get_or_insert_default().clone();
        self.has_failed.store(true, Ordering::Release);
        let first = failed.cause.get_or_insert(cause).clone();
        drop(failed);
        for at in self.unfinished.first() {
            self.poison(at, &first);
        }
        let me = self.me.upgrade().filter(|_| new);
        let then = me.map(|me| -> Then {
            let (cause, over) = (first.clone(), done.clone());
            Box::new(move || {
                tracing::warn!(communicator = %me.members.name, %cause, "a communicator ends");
                let (teller, why) = (me.clone(), cause.clone());
                me.native.abort(cause, move || teller.tell_end(&why, others), over);
            })
        });
        (first, done, then)
    }

    /// Tells the other ranks of the end, and waits until their values have failed too: what the
    /// library does in an abort may complete their calls with anything.
    fn tell_end(&self, cause: &Error, others: Others) {
        let (members, world) = (&self.members, &self.members.world);
        // A store that fails is the watchdog's affair.
        let _ = members.publish("ended", b"");
        if let Others::Notify = others {
            let (rank, text) = match cause {
                Error::PeerLost { rank, why } => (*rank, why.to_string()),
                cause => (members.rank, format!("it has aborted the communicator: {cause}")),
            };
            let _ = watchdog::notify(&*world.0, "ended", &members.key, rank, &text);
        }
        let until = Instant::now() + HEARD;
        for rank in members.others() {
            while members.said("ended", rank).is_none()
                && Instant::now() < until
                && !matches!(
                    world.presence(members.ranks[rank as usize]),
                    Ok(Presence::Gone) | Err(_)
                )
            {
                thread::sleep(Duration::from_millis(1));
            }
        }
    }

    /// Ends the communicator, and waits until it is over.
    ///
    /// # Errors
    /// `Timeout` if the library does not come back.
    pub(crate) fn abort(&self, cause: Error) -> Result<()> {
        let (_, done) = self.end(cause, Others::Notify);
        self.wait_until_over(&done)
    }

    /// Waits until a communicator that has ended is over. One that goes on is not waited for.
    pub(crate) fn settle(&self) {
        let done = self.failed.lock().end.clone();
        if let Some(Err(error)) = done.map(|done| self.wait_until_over(&done)) {
            tracing::warn!(communicator = %self.members.name, %error, "a communicator is not over");
        }
    }

    /// Waits until the library has ended its work, and then until this rank's calls have passed.
    /// Until then a call of another communicator would wait for their token, and fail with them.
    fn wait_until_over(&self, done: &Done) -> Result<()> {
        let until = Instant::now() + ABORT;
        if !done.wait(until) {
            return Err(timeout(format!(
                "the library has not aborted within {ABORT:?}; it goes on to, and its memory stays taken"
            )));
        }
        // Calls behind a stream's wait may stay there: nobody is blocked for longer by them.
        while Instant::now() < until && !self.unfinished.have_passed() {
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }

    /// Gives calls to the library, with the addresses of their operands.
    pub(crate) fn enqueue(&self, word: u64, planned: &[Planned], bound: &[Binding]) -> Result<()> {
        let of = |at: Option<usize>| at.and_then(|at| bound.get(at)).copied();
        let mut calls: SmallVec<[Call<'_>; 2]> = SmallVec::new();
        for Planned { signature, src, dst } in planned {
            calls.push(Call { signature, src: of(*src), dst: of(*dst) });
        }
        // An update of a graph may have brought one buffer in several places.
        let extent = |b: Binding| Extent { space: (), from: b.addr, bytes: b.len };
        let uses = |call: usize| {
            let Call { signature, src, dst } = calls[call];
            // The token is all barriers'.
            let dst = dst.filter(|_| signature.kind != Kind::Barrier);
            Uses { kind: signature.kind, src: src.map(extent), dst: dst.map(extent) }
        };
        check_apart(calls.len(), uses, self.members.rank).map_err(|cause| self.fails(cause))?;
        if let Some(cause) = self.ended() {
            return Err(cause);
        }
        let turn = self.turn.as_ref().map(|turn| turn.0.lock());
        // SAFETY: the runtime calls this in the stream's order, with the native stream and the
        // operands' addresses, and the operands are kept and declared. The calls were checked as
        // they were made, and what may have changed above.
        let made = unsafe { self.native.part().enqueue(word, &calls) };
        drop(turn);
        made.map_err(|cause| self.fails(cause))
    }

    /// Makes a failure the communicator's. After a limit it looks whether the ranks' calls differ.
    pub(crate) fn fails(&self, cause: Error) -> Error {
        let found = match (self.ended(), &cause) {
            (None, Error::Timeout(_)) => {
                self.looked.lock().ended = true;
                let list = self.log.lock().list();
                self.members.exchange(&list, ANSWER, false)
            }
            _ => None,
        };
        let cause = found.unwrap_or(cause);
        let others = Others::of(&cause);
        self.end(cause, others).0
    }

    /// Compares the eager calls with the next rank's: each rank with one, so a difference is found
    /// by one rank at least.
    fn compare(&self, looked: &mut Looked) {
        let members = &self.members;
        let (count, hash) = self.log.lock().rolled();
        if members.size() < 2 || count == 0 {
            return;
        }
        // A store that fails is the watchdog's affair.
        if count != looked.compared
            && members.publish("rolled", format!("{count} {hash:x}").as_bytes()).is_ok()
        {
            looked.compared = count;
        }
        let next = (members.rank + 1) % members.size();
        let Some(said) = members.said("rolled", next) else { return };
        let Some((theirs, hash)) = said.split_once(' ') else { return };
        let (Ok(theirs), Ok(hash)) = (theirs.parse(), u64::from_str_radix(hash, 16)) else {
            return;
        };
        let ours = self.log.lock().rolled_at(theirs);
        if theirs > 0 && ours.is_some_and(|ours| ours != hash) && !looked.differs {
            let _ = watchdog::notify(&*members.world.0, "differ", &members.key, members.rank, "");
            looked.differs = self.look_closer(Reason::Hash(format!(
                "{}: the first {theirs} calls of ranks {} and {next} differ, and the first one that does is not kept any more; compare each call (Check::Each) to find it",
                members.name, members.rank
            )));
        }
    }

    /// Exchanges lists with the other ranks, on a thread of its own, and ends the communicator with
    /// what it finds. Returns whether there is such a thread; otherwise the next look tries again.
    fn look_closer(&self, reason: Reason) -> bool {
        let Some(me) = self.me.upgrade() else { return false };
        let looks = move || {
            let late = matches!(reason, Reason::Late(_));
            let found = match reason {
                Reason::Late(late) => me.why_late(late),
                Reason::Hash(_) | Reason::Notified => {
                    let exchange = || {
                        let list = me.log.lock().list();
                        me.members.exchange(&list, TELL, true)
                    };
                    let (mut found, until) = (exchange(), Instant::now() + TELL);
                    // This rank may have yet to come to the call that differs.
                    while matches!(reason, Reason::Notified)
                        && found.is_none()
                        && me.ended().is_none()
                        && Instant::now() < until
                    {
                        thread::sleep(COMPARED);
                        found = exchange();
                    }
                    match (found, reason) {
                        (Some(found), _) => Some((found, Others::Know)),
                        (None, Reason::Hash(differs)) => {
                            Some((Error::state(differs), Others::Notify))
                        }
                        _ => None,
                    }
                }
            };
            if let Some((cause, others)) = found {
                me.end(cause, others);
            }
            let mut looked = me.looked.lock();
            if late { looked.late = false } else { looked.differs = false }
        };
        thread::Builder::new().name("lh-collective".to_owned()).spawn(looks).is_ok()
    }

    /// The reason why a call is late, at the end of its limit; `None` if it is over by then.
    fn why_late(&self, Late { at, until, lead, text }: Late) -> Option<(Error, Others)> {
        let left = |until: Instant| until.saturating_duration_since(Instant::now());
        let (members, list, last) = (&self.members, self.log.lock().list(), lead / 2);
        let found = match members.exchange(&list, left(until).saturating_sub(last), false) {
            Some(found) => (found, Others::Know),
            None => {
                let report = watchdog::report(&*members.world.0, last.max(ANSWER));
                let report = report.unwrap_or_else(|e| format!("no report: {e}"));
                let text = format!("{text}\n{}", report.trim_end());
                (timeout(text), Others::Notify)
            }
        };
        thread::sleep(left(until + OWN));
        (waits(at) && !self.looked.lock().ended).then_some(found)
    }

    /// Looks for a call that has waited for the others for almost as long as the limit.
    fn look_for_late(&self, looked: &mut Looked, now: Instant) {
        let first = self.unfinished.first();
        looked.ready.retain(|id, _| first.iter().any(|p| p.timeline_id() == *id));
        for at in first {
            let timeline = at.timeline();
            if timeline.waits_for(at.value()).is_some() {
                looked.ready.remove(&at.timeline_id());
                continue;
            }
            let since = looked.ready.entry(at.timeline_id()).or_insert((at.value(), now));
            if since.0 != at.value() {
                *since = (at.value(), now);
            }
            let limit = self.members.limit;
            let (lead, begun) = ((limit / 4).min(TELL), since.1);
            if now.duration_since(begun) < limit - lead || looked.late {
                continue;
            }
            // A limit that no clock reaches is none.
            let Some(until) = begun.checked_add(limit) else { continue };
            if waits(at) {
                let what = match self.log.lock().last() {
                    Some(call) => format!("{} {call}", call.numbered(&self.members.name)),
                    None => self.members.name.clone(),
                };
                let text = format!(
                    "{what}: rank {} has waited for the other ranks for {limit:?}; look at what they do",
                    self.members.rank
                );
                looked.late = self.look_closer(Reason::Late(Late { at, until, lead, text }));
            }
        }
    }
}

impl Core {
    /// The ranks of the world that a call of a class needs.
    fn needed(&self, class: Class) -> Vec<u32> {
        let world = |rank: u32| self.members.ranks[rank as usize];
        match class {
            Class::To(peer) | Class::From(peer) => vec![world(peer)],
            _ => self.members.others().map(world).collect(),
        }
    }

    fn meeting(&self, log: &Log, Entered { class, seq }: Entered, order: &str) -> Meeting {
        let Members { key, name, rank, .. } = &*self.members;
        let call = [class, class.counterpart(*rank)].map(|c| format!("{key} {order}{c} {seq}"));
        let shown = log.shown(name, Entered { class, seq });
        Meeting { at: 0, call, ranks: self.needed(class), shown }
    }

    /// The calls of a launch, which has a number among those of the communicator.
    fn meetings_of_launch(&self, graph: &List, launch: u64) -> Vec<Meeting> {
        let Members { key, name, rank, .. } = &*self.members;
        let meeting = |(at, class, seq, shown): (u64, Class, u64, &str)| Meeting {
            at,
            call: [class, class.counterpart(*rank)]
                .map(|class| format!("{key} {} {launch} {class} {seq}", Class::Launches)),
            ranks: self.needed(class),
            shown: format!("{name} recorded #{seq} {shown} of launch {launch}"),
        };
        graph.calls().map(meeting).collect()
    }
}

impl Watched for Core {
    fn look(&self, now: Instant) {
        if self.ended().is_some() {
            return;
        }
        let mut looked = self.looked.lock();
        self.look_for_late(&mut looked, now);
        if looked.compare.is_some_and(|at| now < at) {
            return;
        }
        looked.compare = Some(now + COMPARED);
        self.compare(&mut looked);
        drop(looked);
        if !self.unfinished.first().is_empty()
            // A timeout is the call's own, which looks why.
            && let Some(cause) = self.native.part().failure()
            && !matches!(cause, Error::Timeout(_))
        {
            let others = Others::of(&cause);
            self.end(cause, others);
        }
    }

    fn lost(&self, rank: u32, why: &str) {
        let Some(own) = self.members.ranks.iter().position(|&r| r == rank) else { return };
        self.end(lost(own as u32, why), Others::Know);
    }

    fn standing(&self, ask: bool) -> Vec<Standing> {
        if self.ended().is_some() {
            return Vec::new();
        }
        // In this order: a call that is over between the two counts as over.
        let waiting = self.unfinished.with_calls();
        let first = first_of(waiting.iter().map(|submission| submission.at));
        let (key, log) = (&self.members.key, self.log.lock());
        let mut over = log.numbers();
        let checks = self.checking.as_ref().map(|checking| {
            let numbered = |call: &Entered| (format!("{key} each/{}", call.class), call.seq);
            let calls: Calls = checking.lock().clone();
            let meetings = calls.iter().map(|call| self.meeting(&log, *call, "each/")).collect();
            let ready = calls.first().map(|call| ((u16::MAX, call.seq), meetings));
            let over = over.iter().map(numbered).collect();
            Standing { order: (self.token, true), over, ready: ready.into_iter().collect() }
        });
        if ask && !first.iter().copied().all(waits) {
            return checks.into_iter().collect();
        }
        for call in waiting.iter().flat_map(|submission| &submission.calls) {
            let least = over.iter_mut().find(|known| known.class == call.class);
            least.into_iter().for_each(|known| known.seq = known.seq.min(call.seq));
        }
        let ready = waiting.iter().filter(|s| first.contains(&s.at) && (!ask || is_ready(s.at)));
        let ready = ready.map(|Submission { at, calls, graph }| {
            let point = (at.timeline_id().get(), at.value());
            let meetings = calls.iter().flat_map(|call| match graph {
                // The device is asked before others are told.
                Some(graph) if ask => self.meetings_of_launch(graph, call.seq),
                _ => vec![self.meeting(&log, *call, "")],
            });
            (point, meetings.collect())
        });
        let ready = ready.collect();
        let over = over.into_iter().map(|call| (format!("{key} {}", call.class), call.seq));
        let submitted = Standing { order: (self.token, false), over: over.collect(), ready };
        checks.into_iter().chain([submitted]).collect()
    }

    fn told(&self, names: &[&str], word: &str, number: u32, text: &str) -> Option<Then> {
        if !names.contains(&&*self.members.key) || self.ended().is_some() {
            return None;
        }
        match word {
            "cycle" => self.fail(Error::state(text.to_owned()), Others::Know).2,
            "ended" if number != self.members.rank => self.fail(lost(number, text), Others::Know).2,
            "differ" if number != self.members.rank => {
                let mut looked = self.looked.lock();
                if !looked.differs {
                    looked.differs = self.look_closer(Reason::Notified);
                }
                None
            }
            _ => None,
        }
    }

    fn report(&self, lines: &mut Vec<String>) {
        let name = &self.members.name;
        let log = self.log.lock();
        let count = log.rolled().0;
        let last: Vec<Signature> = log.backwards().take(SHOWN).cloned().collect();
        drop(log);
        let mut line = match &last[..] {
            [call, ..] => format!(
                "{name}: {count} calls of all ranks, the last eager call is {} {call}",
                call.numbered(name)
            ),
            [] => format!("{name}: no eager call"),
        };
        for (at, call) in last.iter().enumerate().skip(1) {
            line.push_str(if at == 1 { ", after " } else { " and " });
            line.push_str(&call.to_string());
        }
        if let Some(cause) = self.failure() {
            line.push_str(&format!("; it has ended: {cause}"));
        }
        let waiting = self.unfinished.first();
        if waiting.is_empty() {
            line.push_str("; nothing is unfinished");
        }
        for at in waiting {
            line.push_str(&format!("; {}", chain(at)));
        }
        lines.push(line.replace('\n', "; "));
    }
}

/// Returns whether a submission is not over. The known values may lag behind the device, which is
/// asked.
fn waits(at: Timepoint) -> bool {
    matches!(at.timeline().wait(at.value(), Some(Duration::ZERO)), Err(Error::Timeout(_)))
}

/// Returns whether a submission waits for nothing of its rank. The device is asked.
fn is_ready(at: Timepoint) -> bool {
    for _ in 0..CHAIN {
        match at.timeline().waits_for(at.value()) {
            None => return true,
            Some(before) if waits(before) => return false,
            Some(_) => {}
        }
    }
    false
}

/// The text of a submission, of the timepoint that it waits for, and so on.
fn chain(at: Timepoint) -> String {
    let shown = |p: Timepoint| match p.timeline().name() {
        Some(name) => format!("{} value {}", name.as_str(), p.value()),
        None => format!("{:?} value {}", p.timeline_id(), p.value()),
    };
    let (mut text, mut point) = (format!("{} is not over", shown(at)), at);
    for _ in 0..CHAIN {
        let timeline = point.timeline();
        if timeline.submitted() < point.value() {
            text.push_str(", which nobody has submitted or signalled");
            return text;
        }
        let Some(next) = timeline.waits_for(point.value()) else {
            text.push_str(", and runs, or waits for the other ranks");
            return text;
        };
        text.push_str(&format!(", waits for {}", shown(next)));
        point = next;
    }
    text
}

/// The communicators whose calls a graph has.
pub(crate) struct Launches(pub(crate) Vec<Launched>);

/// A communicator whose calls a graph has.
pub(crate) struct Launched {
    pub(crate) core: Weak<Core>,
    /// Some are calls of all ranks.
    pub(crate) of_all: bool,
    /// The calls, if the graph has those of other communicators too.
    pub(crate) list: Option<Arc<List>>,
}

impl LaunchCheck for Launches {
    fn before(&self) -> Result<()> {
        let failure = |core: &Weak<Core>| core.upgrade().and_then(|core| core.failure());
        self.0.iter().find_map(|graph| failure(&graph.core)).map_or(Ok(()), Err)
    }

    fn launched(&self, at: Timepoint) {
        for Launched { core, of_all, list } in &self.0 {
            let Some(core) = core.upgrade() else { continue };
            let call = of_all.then(|| core.log.lock().launch());
            core.submitted(at, call.into_iter().collect(), list.clone());
        }
    }
}
