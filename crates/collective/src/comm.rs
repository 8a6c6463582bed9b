//! Communicators: ranks that make calls together, over a device each.
//!
//! # A call
//! It is checked as far as one rank can (`group`), numbered (`log`), and submitted as one foreign
//! call. Its operands are the memory and the order token (`order_token`). When the backend runs or
//! captures the foreign call, the library gets the call with the addresses.
//!
//! # A failure
//! The first failure of a communicator is its state from then on: later calls return it and submit
//! nothing (`inner`). Submissions with calls that are not over are poisoned, and so is what depends
//! on them. Calls of other communicators wait for the token: those that are submitted before that
//! work is over fail with it, and later ones are sound, since they overwrite the token.

use crate::driver::{self, CollectiveOps, Derived, Place};
use crate::error::{lost, timeout, unsupported};
use crate::group::{Draft, Group};
use crate::inner::{Core, Planned};
use crate::log::Entered;
use crate::members::Members;
use crate::native::{self, Native};
use crate::order_token::{OrderToken, Turn};
use crate::signature::{Class, Kind, List, Signature};
use crate::stop::{self, Recorded};
use crate::store::left;
use crate::unfinished::Calls;
use crate::watchdog::Watching;
use crate::window::{self, Registered};
use crate::world::World;
use leasehold::backend::sync::{Arc, Mutex, thread};
use leasehold::{BufferView, Error, Name, Operand, Result, Runtime, Stream, View};
use smallvec::{SmallVec, smallvec};
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// When the calls of all ranks are compared.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Check {
    /// Recordings as they stop; eager calls every 100 ms, beside the work, and when one has waited
    /// in vain. What the library compares by itself comes in addition.
    #[default]
    Recordings,
    /// In addition each eager call, before it is submitted: a round trip each. For debugging.
    Each,
}

/// How a communicator is made. The same on all ranks.
#[derive(Clone)]
pub struct CommConfig {
    pub(crate) name: String,
    timeout: Duration,
    check: Check,
    concurrent: bool,
    sends: bool,
    ops: Option<Arc<dyn CollectiveOps>>,
}

impl CommConfig {
    /// A communicator with a name, which messages show: `tp`. Letters, digits and `. _ -`.
    #[must_use]
    pub fn new(name: impl Into<String>) -> Self {
        Self {
            name: name.into(),
            timeout: Duration::from_secs(300),
            check: Check::default(),
            concurrent: false,
            sends: true,
            ops: None,
        }
    }

    /// How long a rank waits for the others, from the time on that it is ready itself: as it makes
    /// the communicator, stops a recording, or waits in a call. Five minutes by default.
    #[must_use]
    pub fn timeout(mut self, timeout: Duration) -> Self {
        self.timeout = timeout;
        self
    }

    /// When calls are compared. [`Check::Recordings`] by default.
    #[must_use]
    pub fn check(mut self, check: Check) -> Self {
        self.check = check;
        self
    }

    /// Whether the communicator has an order of its own. Off by default: the calls of all
    /// communicators of a device run one after the other, as they were submitted.
    ///
    /// Two communicators at a time may wait for each other, unless their ranks and devices are
    /// apart.
    #[must_use]
    pub fn concurrent(mut self, concurrent: bool) -> Self {
        self.concurrent = concurrent;
        self
    }

    /// Whether the ranks send to each other: `send`, `recv` and `all_to_all`. On by default.
    ///
    /// The connections are made with the communicator, which takes NCCL about as long as the
    /// communicator itself. A communicator without them refuses these calls.
    #[must_use]
    pub fn sends(mut self, sends: bool) -> Self {
        self.sends = sends;
        self
    }

    /// Another library than the device's own.
    #[must_use]
    pub fn ops(mut self, ops: Arc<dyn CollectiveOps>) -> Self {
        self.ops = Some(ops);
        self
    }
}

impl fmt::Debug for CommConfig {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CommConfig")
            .field("name", &self.name)
            .field("timeout", &self.timeout)
            .field("check", &self.check)
            .field("concurrent", &self.concurrent)
            .field("sends", &self.sends)
            .field("ops", &self.ops.as_ref().map(|ops| ops.name()))
            .finish()
    }
}

/// Ranks that make calls together, seen by one of them. Clones are the same communicator; any
/// thread may call it, and calls of two threads are ordered as they are made.
///
/// All ranks make the same calls in the same order. A call is in the order of the stream that it is
/// given, eager or recorded, and does not block the host. Its results are equal to the bit on all
/// ranks, and eager and recorded.
///
/// Its drop does not block. A communicator that a graph uses lives as long as the graph.
#[derive(Clone)]
pub struct Comm {
    shared: Arc<Shared>,
}

struct Shared {
    core: Arc<Core>,
    config: CommConfig,
    runtime: Runtime,
    token: Arc<OrderToken>,
    registered: Registered,
    /// The oldest call of each sequence that this rank still tells about, with [`Check::Each`].
    told: Mutex<HashMap<Class, u64>>,
}

impl Drop for Shared {
    fn drop(&mut self) {
        // A backend may forget a call once it is enqueued, and the device still makes it.
        let (core, limit) = (&self.core, self.config.timeout);
        core.native.keep_until(core.unfinished.all(), limit, &self.runtime, core.clone());
    }
}

impl World {
    /// A communicator of all ranks over the runtime's device. All ranks call it, with the same
    /// configuration; those of one name in the same order. Blocks until all ranks have, within the
    /// configuration's limit.
    ///
    /// # Errors
    /// `Timeout` and `PeerLost` that name a rank which has not come or is gone; `InvalidState` if
    /// ranks have other libraries or other versions of one; `InvalidArgument` for a name that is no
    /// part of a key; `Recording` for a recording's runtime; `Unsupported` for a device without a
    /// library of collectives; the library's own.
    pub fn comm(&self, runtime: &Runtime, config: &CommConfig) -> Result<Comm> {
        if config.name.contains(['/', '#']) || config.name.len() > 64 {
            return Err(Error::invalid(format!(
                "{:?} is no name of a communicator; take 1 to 64 letters, digits and . _ -",
                config.name
            )));
        }
        crate::store::check_key(&config.name)?;
        refuse_recording(runtime)?;
        let ops = match &config.ops {
            Some(ops) => ops.clone(),
            None => driver::of(runtime)?,
        };
        let key = format!("comm/{}/{}", config.name, self.0.next_of(&config.name));
        let ranks = (0..self.size()).collect();
        let name = config.name.clone();
        let members = Members::new(self.clone(), name, key, self.rank(), ranks, config.timeout);
        Comm::make(members, config.clone(), ops, runtime, None)
    }

    /// Ends this rank in order: waits until the communicators of this process that were dropped are
    /// given back, and until all ranks have come to this call, for `limit` at most. All ranks call
    /// it, once. The rank that serves the store leaves last.
    ///
    /// Without it a rank that ends is gone for the others, and with rank 0 may go their store.
    ///
    /// # Errors
    /// `Timeout`; the store's own.
    pub fn close(self, limit: Duration) -> Result<()> {
        let until = Instant::now().checked_add(limit);
        native::wait_for_retired(limit)?;
        let (store, size) = (self.store(), self.size());
        store.barrier("close", size, left(until))?;
        if self.rank() != 0 {
            // The last answer may be cut off: rank 0 leaves when all have asked.
            let _ = store.add("close/left", 1);
            return Ok(());
        }
        while store.add("close/left", 0)? < i64::from(size) - 1 {
            if left(until).is_zero() {
                return Err(timeout(format!(
                    "not all ranks have left within {limit:?}; look at what they do"
                )));
            }
            thread::sleep(Duration::from_millis(1));
        }
        Ok(())
    }
}

fn refuse_recording(runtime: &Runtime) -> Result<()> {
    if runtime.stream().is_recording() {
        return Err(Error::recording(
            "a communicator cannot be made while recording; make it before, on the runtime that the recording was begun on",
        ));
    }
    Ok(())
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn bytes_of(hex: &str) -> Option<Vec<u8>> {
    let pair = |at| u8::from_str_radix(hex.get(at..at + 2)?, 16).ok();
    (0..hex.len()).step_by(2).map(pair).collect()
}

impl Comm {
    /// Makes this rank's part, once the ranks have agreed on a library and an id.
    fn make(
        members: Members,
        config: CommConfig,
        ops: Arc<dyn CollectiveOps>,
        runtime: &Runtime,
        from: Option<(Arc<Shared>, Derived)>,
    ) -> Result<Self> {
        let members = Arc::new(members);
        let made = Self::make_part(&members, config, ops, runtime, from);
        if let Err(cause) = &made
            && !matches!(cause, Error::Timeout(_) | Error::PeerLost { .. })
        {
            // The others would wait for this rank up to their limits.
            let _ = members.tell_unmade(cause);
        }
        made
    }

    fn make_part(
        members: &Arc<Members>,
        config: CommConfig,
        ops: Arc<dyn CollectiveOps>,
        runtime: &Runtime,
        from: Option<(Arc<Shared>, Derived)>,
    ) -> Result<Self> {
        let token = match config.concurrent {
            true => OrderToken::new(runtime)?,
            false => members.world.0.tokens.of(runtime)?,
        };
        let turn = ops.takes_turns().then(|| Turn::of(runtime)).transpose()?;
        let what = format!("it has not made its part of {}", members.name);
        let id = if members.rank == 0 {
            let id = ops.unique_id();
            let said = match &id {
                Ok(id) => format!("{}\n{}", ops.name(), hex(id)),
                Err(e) => format!("\n{e}"),
            };
            members.publish("id", said.as_bytes())?;
            id?
        } else {
            let said = members.hear("id", 0, &what)?;
            let (library, id) = said.split_once('\n').unwrap_or_default();
            if library.is_empty() {
                return Err(lost(members.ranks[0], id));
            }
            if library != ops.name() {
                let (Members { name, rank, .. }, own) = (&**members, ops.name());
                return Err(Error::state(format!(
                    "{name}: rank 0 has {library}, and rank {rank} has {own}; give all ranks the same library and version"
                )));
            }
            bytes_of(id).ok_or_else(|| Error::state("an id that is no number in the store"))?
        };
        let place = Place {
            name: Name::new(&members.name),
            rank: members.rank,
            size: members.size(),
            id: id.into(),
            runtime: runtime.clone(),
            limit: config.timeout,
            sends: config.sends,
        };
        let library = ops.clone();
        let look = || members.look_for_unmade();
        let outbox = members.world.0.watchdog().outbox().clone();
        let native = Native::make(&members.name, config.timeout, outbox, look, move || {
            place.runtime.activate()?;
            match from {
                None => library.init(&place).map(Some),
                Some((old, how)) => library.derive(old.core.native.part(), how, Some(&place)),
            }
        })?;
        let native = native.ok_or_else(|| Error::state("the library made no communicator"))?;
        let device = runtime.raw_device().downgrade();
        let (place, checks) = ((device, token.serial), config.check == Check::Each);
        let core = Core::new(members.clone(), ops, turn, native, place, checks)?;
        let told = Mutex::default();
        let registered = Registered::default();
        let shared = Shared { core, config, runtime: runtime.clone(), token, registered, told };
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The parts that a registration needs, of a communicator that makes calls.
    pub(crate) fn for_registration(&self) -> Result<(&Arc<Core>, &Runtime, &Registered)> {
        let Shared { core, runtime, registered, .. } = &*self.shared;
        refuse_recording(runtime)?;
        match core.failure() {
            Some(cause) => Err(cause),
            None => Ok((core, runtime, registered)),
        }
    }

    fn core(&self) -> &Arc<Core> {
        &self.shared.core
    }

    /// The name, as messages show it.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.core().members.name
    }

    /// This rank of the communicator.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.core().members.rank
    }

    /// How many ranks it has.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.core().members.size()
    }

    /// The library that makes the calls, with its version.
    #[must_use]
    pub fn library(&self) -> &str {
        self.core().ops.name()
    }

    /// The runtime of its device, with that runtime's stream.
    #[must_use]
    pub fn runtime(&self) -> &Runtime {
        &self.shared.runtime
    }

    /// Why the communicator makes no calls any more, if so.
    #[must_use]
    pub fn failure(&self) -> Option<Error> {
        let core = self.core();
        core.failure().or_else(|| core.native.part().failure())
    }

    /// Communicators of parts: the ranks of one colour share one, in the order of their keys, and
    /// of their ranks here where keys are equal. `None` for a rank without a colour. All ranks call
    /// it. Blocks as [`World::comm`].
    ///
    /// # Errors
    /// As [`World::comm`].
    pub fn split(&self, color: Option<u32>, key: i32) -> Result<Option<Self>> {
        let Shared { core, config, runtime, .. } = &*self.shared;
        let Core { members, ops, .. } = &**core;
        refuse_recording(runtime)?;
        let number = members.next_derived();
        let subject = format!("split/{number}");
        let shown = color.map_or("-".to_owned(), |c| c.to_string());
        members.publish(&subject, format!("{shown} {key}").as_bytes())?;
        let what = format!("it has not split {}", members.name);
        let mut chosen = Vec::new();
        for rank in 0..members.size() {
            let said = match rank == members.rank {
                true => format!("{shown} {key}"),
                false => members.hear(&subject, rank, &what)?,
            };
            let (theirs, key) = said.split_once(' ').unwrap_or_default();
            if theirs == shown {
                chosen.push((key.parse::<i32>().unwrap_or_default(), rank));
            }
        }
        let how = Derived::Split { color, key };
        let Some(color) = color else {
            // A library may need all ranks.
            let (ops, old) = (ops.clone(), self.shared.clone());
            drop(Native::make(
                &members.name,
                config.timeout,
                members.world.0.watchdog().outbox().clone(),
                || Ok(()),
                move || {
                    old.runtime.activate()?;
                    ops.derive(old.core.native.part(), how, None)
                },
            )?);
            return Ok(None);
        };
        chosen.sort_unstable();
        let name = format!("{}.{color}", members.name);
        let key = format!("{}/s{number}c{color}", members.key);
        self.derive(name, key, &chosen.iter().map(|c| c.1).collect::<Vec<_>>(), how).map(Some)
    }

    /// A communicator without some ranks, which may be lost. The others call it, also after a
    /// failure. Blocks as [`World::comm`].
    ///
    /// # Errors
    /// As [`World::comm`]; `InvalidArgument` if this rank is among those that go.
    pub fn shrink(&self, lost: &[u32]) -> Result<Self> {
        let members = &self.core().members;
        refuse_recording(&self.shared.runtime)?;
        if lost.contains(&members.rank) {
            return Err(Error::invalid(format!(
                "{}: rank {} is to go, and makes no part; let the ranks that stay call it",
                members.name, members.rank
            )));
        }
        let number = members.next_derived();
        let stay: Vec<u32> = (0..members.size()).filter(|rank| !lost.contains(rank)).collect();
        let key = format!("{}/x{number}", members.key);
        self.derive(members.name.clone(), key, &stay, Derived::Shrunk)
    }

    fn derive(&self, name: String, key: String, chosen: &[u32], how: Derived) -> Result<Self> {
        let Shared { core, config, runtime, .. } = &*self.shared;
        core.settle();
        let Core { members, ops, .. } = &**core;
        let rank = chosen.iter().position(|&rank| rank == members.rank).unwrap_or_default();
        let ranks = chosen.iter().map(|&rank| members.ranks[rank as usize]).collect();
        let (world, limit) = (members.world.clone(), config.timeout);
        let members = Members::new(world, name, key, rank as u32, ranks, limit);
        let from = Some((self.shared.clone(), how));
        Self::make(members, config.clone(), ops.clone(), runtime, from)
    }

    /// Ends the communicator on all ranks: later calls return the cause, and graphs with its calls
    /// are launched no more. The first cause stays. Waits for the library and then for the calls
    /// that were submitted, for five seconds at most, also when the communicator has ended before.
    ///
    /// Submissions with calls that are not over fail, and so does what is ordered after them. The
    /// other ranks' error is `PeerLost`, which names this rank; they see it within some
    /// milliseconds.
    ///
    /// # Errors
    /// `Timeout` if the library does not come back. The communicator is over nevertheless.
    pub fn abort(&self, cause: Error) -> Result<()> {
        self.core().abort(cause)
    }

    /// Several calls as one: none of them waits for another one of them. So two ranks can send to
    /// each other. If `calls` fails, nothing is submitted.
    ///
    /// # Errors
    /// The error of `calls`; `InvalidArgument` if one of them writes what another one uses; as each
    /// call.
    pub fn group<'a>(
        &self,
        stream: &Stream,
        calls: impl FnOnce(&mut Group<'a>) -> Result<()>,
    ) -> Result<()> {
        let mut group = Group::new(self.rank(), self.size());
        calls(&mut group)?;
        group.check()?;
        if !self.shared.config.sends
            && let Some(kind) = group.drafts.iter().map(|d| d.kind).find(|kind| kind.is_sent())
        {
            let (kind, name) = (kind.name(), self.name());
            return Err(Error::state(format!(
                "{kind}: {name} has no connections for it; make the communicator with CommConfig::sends(true)"
            )));
        }
        self.submit(stream, &group.drafts)
    }

    fn submit(&self, stream: &Stream, drafts: &[Draft<'_>]) -> Result<()> {
        let (shared, core) = (&self.shared, self.core());
        if drafts.is_empty() {
            return Ok(());
        }
        if !stream.is_of(&shared.runtime) {
            let (device, name) = (shared.runtime.device(), self.name());
            return Err(Error::invalid(format!(
                "{stream:?} is not of {device}, the device of {name}; use a stream of the communicator's runtime"
            )));
        }
        if let Some(cause) = core.failure() {
            return Err(cause);
        }
        let captured = stream.is_recording();
        if captured && stream.next_node().is_none() {
            return Err(unsupported(
                "a call of a collective in the body of a loop or branch; record it outside the body",
            ));
        }
        let scope = Name::current();
        // Reads have no order among each other.
        let token = shared.token.buffer.write();
        // A usual call allocates no list.
        let mut operands: SmallVec<[Operand<'_>; 4]> = smallvec![token];
        let mut planned: SmallVec<[Planned; 1]> = SmallVec::with_capacity(drafts.len());
        for &Draft { kind, element, count, src, dst } in drafts {
            let signature =
                Signature { seq: 0, kind, element, count, captured, scope: scope.clone() };
            let at = operands.len();
            let (src, dst) = match (src, dst) {
                _ if kind == Kind::Barrier => (None, Some(0)),
                (Some(src), Some(dst)) if same(&src, &dst) => {
                    operands.push(dst.read_write());
                    (Some(at), Some(at))
                }
                (Some(src), Some(dst)) => {
                    // One may be a part of the other: then something of the destination is read.
                    let shared = src.buffer().same(dst.buffer());
                    operands.push(src.read());
                    operands.push(if shared { dst.read_write() } else { dst.write() });
                    (Some(at), Some(at + 1))
                }
                (Some(src), None) => {
                    operands.push(src.read());
                    (Some(at), None)
                }
                (None, Some(dst)) => {
                    operands.push(dst.write());
                    (None, Some(at))
                }
                (None, None) => (None, None),
            };
            planned.push(Planned { signature, src, dst });
        }
        let checking = core.checking.as_ref().filter(|_| !captured);
        let _one = checking.map(|_| shared.token.checks.lock());
        let mut entered = Calls::new();
        {
            let mut log = core.log.lock();
            planned.iter_mut().for_each(|p| entered.push(log.enter(&mut p.signature)));
        }
        let recorded = captured.then(|| planned.clone());
        let placed = if captured { shared.registered.place(core, drafts) } else { None };
        let noted = placed.clone();
        let checked = checking.map_or(Ok(()), |checking| {
            checking.lock().clone_from(&entered);
            let checked = self.check_each(&planned, &entered);
            checking.lock().clear();
            checked
        });
        let submitted = checked.and_then(|()| {
            let own = core.clone();
            // SAFETY: the library uses the operands' memory as their roles say, on the stream that
            // it is given, by the contract of `Communicator::enqueue`.
            unsafe {
                stream.foreign_call(drafts[0].kind.name(), &operands, move |word, bound| {
                    let Some(placed) = &placed else { return own.enqueue(word, &planned, bound) };
                    let bound = placed.bind(&planned, bound).map_err(|cause| own.fails(cause))?;
                    own.enqueue(word, &planned, &bound)
                })
            }
        });
        if let Err(cause) = submitted {
            let mut log = core.log.lock();
            entered.iter().rev().for_each(|&entered| log.take_back(entered));
            return Err(cause);
        }
        match recorded {
            None => core.submitted(stream.now(), entered, None),
            Some(planned) => {
                let at = stop::place();
                planned.into_iter().try_for_each(|Planned { signature, .. }| {
                    let note = Recorded { core: Arc::downgrade(core), at, signature };
                    stream.note(stop::check(), Arc::new(note))
                })?;
                if let Some(placed) = noted {
                    stream.note(window::check(), placed)?;
                }
            }
        }
        Ok(())
    }

    /// Compares eager calls with those of the other ranks.
    fn check_each(&self, planned: &[Planned], entered: &Calls) -> Result<()> {
        let (core, members) = (self.core(), &self.core().members);
        let calls = || std::iter::zip(planned, entered).map(|(p, e)| (&p.signature, e));
        for (signature, Entered { class, seq }) in calls() {
            let text = List::of([signature]).text(usize::MAX);
            members.publish(&format!("each/{class}/{seq}"), text.as_bytes())?;
        }
        for (signature, Entered { class, seq }) in calls() {
            let own = List::of([signature]);
            let what = format!("it has made no call {}", signature.numbered(&members.name));
            let subject = format!("each/{}/{seq}", class.counterpart(members.rank));
            let others: Vec<u32> = match signature.kind.peer() {
                Some(peer) => vec![peer],
                None => members.others().collect(),
            };
            for rank in others {
                let end = || core.failure();
                let theirs = members.hear_within(&subject, rank, &what, members.limit, end)?;
                let theirs = List::parse(&theirs);
                if let Some(cause) =
                    own.difference(members.rank, &theirs, (rank, false), &members.name)
                {
                    return Err(core.refuse(cause));
                }
            }
        }
        // A rank that has told of this group has heard all of the groups before.
        let mut told = self.shared.told.lock();
        for (i, Entered { class, seq }) in entered.iter().enumerate() {
            if entered[..i].iter().all(|before| before.class != *class) {
                let oldest = told.insert(*class, *seq).unwrap_or_default();
                (oldest..*seq)
                    .try_for_each(|seq| members.revoke(&format!("each/{class}/{seq}")))?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Comm {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (name, rank, size) = (self.name(), self.rank(), self.size());
        write!(f, "Comm({name}, rank {rank} of {size}, {})", self.library())
    }
}

fn same(a: &BufferView<'_>, b: &BufferView<'_>) -> bool {
    a.buffer().same(b.buffer()) && (a.offset(), a.len()) == (b.offset(), b.len())
}
