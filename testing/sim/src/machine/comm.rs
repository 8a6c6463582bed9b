//! Communicators: their ranks, the calls of each that have begun, and the devices' slots.
//!
//! # Protocol
//! A meeting *begins* at its own rank ([`Meetings::begin`]). Its calls wait in the communicator. A
//! call is *due* once each rank that takes part has begun it ([`Meetings::due`]). The machine runs
//! it, and tells each rank's meeting ([`Meetings::stage`]). When its calls are over or it got an
//! [`Ending`], a meeting stays until its queue notices that. Then it *leaves*
//! ([`Meetings::leave`]).
//!
//! A meeting occupies its device's slot from its begin until it leaves.
//!
//! This module must not know queues' contents, memory or time.

use super::clock::Clock;
use super::collective::CommCall;
use super::detect::Operation;
use super::ids::{CommId, QueueId, missing};
use super::space::MOST_DEVICES;
use leasehold_core::sync::Arc;
use leasehold_core::sync::thread::ThreadId;
use leasehold_core::{Error, Name, Result, Text};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;

/// The most ranks of a communicator.
const RANKS: u32 = MOST_DEVICES;

/// A command that meets other ranks' commands: the calls of one group, which end together.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Meet {
    /// The rank that calls. Its device is the queue's.
    pub comm: CommId,
    /// The calls.
    pub calls: Vec<CommCall>,
}

/// A rank that joins a communicator.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct CommJoin<'a> {
    /// The communicator's key ([`Monitor::comm_key`](super::Monitor::comm_key)), equal on all
    /// ranks.
    pub key: u64,
    /// The communicator's name in reports.
    pub name: &'a str,
    /// The number of ranks.
    pub size: u32,
    /// The rank, from 0 on.
    pub rank: u32,
    /// The rank's device, which no other rank has.
    pub device: u32,
}

/// The outcome of calls that meet and do not fit each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum OnMismatch {
    /// The calls are faults of all devices that take part
    /// ([`FaultScope`](super::FaultScope)). The error ([`Error::Mismatch`] of a queue) and the
    /// report name two of the calls.
    #[default]
    Strict,
    /// The behaviour of NCCL: most calls end with wrong numbers, others never. Nothing is reported.
    AsNccl,
}

/// The link between devices.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Link {
    /// Virtual nanoseconds from the last rank's begin to the first byte.
    pub latency: u64,
    /// Bytes of a virtual nanosecond; not zero.
    pub bytes: u64,
}

impl Default for Link {
    /// As measured between two devices with NVLink.
    fn default() -> Self {
        Self { latency: 6_000, bytes: 333 }
    }
}

/// A rank: its communicator's key, and its number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Rank {
    pub(super) key: u64,
    pub(super) rank: u32,
}

/// A meeting whose rank is known.
#[derive(Clone)]
pub(super) struct BoundMeet {
    pub(super) comm: CommId,
    pub(super) of: Rank,
    pub(super) size: u32,
    pub(super) calls: Arc<[CommCall]>,
}

impl BoundMeet {
    /// Calls `f` with each range that the meeting reads or writes.
    pub(super) fn for_each_range(&self, f: &mut dyn FnMut(Range<u64>)) {
        self.calls.iter().flat_map(|call| call.ranges(self.of.rank, self.size)).for_each(f);
    }

    /// The calls in words.
    pub(super) fn shown(&self) -> String {
        let calls: Vec<String> = self.calls.iter().map(CommCall::to_string).collect();
        calls.join(", ")
    }
}

/// A node of a queue's head: the queue, and the node's number in the launch.
pub(super) type Place = (QueueId, u32);

/// The life of a rank.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Standing {
    Joined,
    Aborted,
    Destroyed,
}

pub(super) struct Member {
    pub(super) device: u32,
    pub(super) standing: Standing,
    /// Meetings that the rank has begun.
    pub(super) begun: u64,
    /// Collective calls that have begun and wait for other ranks.
    pub(super) waiting: VecDeque<Part>,
}

/// A call of a meeting that has begun.
#[derive(Clone, Copy, PartialEq, Eq)]
pub(super) struct Part {
    pub(super) at: Place,
    pub(super) call: usize,
}

/// Transfers of one rank to another that have begun.
#[derive(Default)]
struct Pair {
    sends: VecDeque<Part>,
    receives: VecDeque<Part>,
}

pub(super) struct Comm {
    pub(super) name: Arc<str>,
    /// The ranks that have joined.
    pub(super) members: Vec<Option<Member>>,
    /// By sender and receiver.
    pairs: BTreeMap<(u32, u32), Pair>,
}

impl Comm {
    fn size(&self) -> u32 {
        self.members.len() as u32
    }

    fn withdraw(&mut self, at: Place) {
        let members = self.members.iter_mut().flatten().map(|m| &mut m.waiting);
        let pairs = self.pairs.values_mut().flat_map(|p| [&mut p.sends, &mut p.receives]);
        members.chain(pairs).for_each(|parts| parts.retain(|p| p.at != at));
    }
}

/// The end of a call, as its own rank sees it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Stage {
    Waiting,
    Over,
    /// The call has met calls that leave it waiting for ever.
    Hung,
}

/// An end of a meeting for a reason of its own.
#[derive(Clone)]
pub(super) enum Ending {
    Aborted,
    Fail(Error),
    Fault(String),
}

/// A meeting that has begun at its rank.
pub(super) struct Begun {
    pub(super) of: Rank,
    pub(super) device: u32,
    /// The communicator and the number of the meeting: `tp#5`.
    pub(super) label: String,
    pub(super) operation: Operation,
    pub(super) calls: Vec<(CommCall, Stage)>,
    /// The calls are those of a graph's node.
    pub(super) captured: bool,
    /// The queue's clock at the begin, and what it learns at the end.
    pub(super) clock: Clock,
    pub(super) learned: Clock,
    /// The virtual time of the begin, and of the end of the calls that are over.
    pub(super) began: u64,
    pub(super) end: u64,
    pub(super) ending: Option<Ending>,
}

impl Begun {
    /// The calls in words.
    pub(super) fn shown(&self) -> String {
        let calls: Vec<String> = self.calls.iter().map(|c| c.0.to_string()).collect();
        let captured = if self.captured { " in a graph" } else { "" };
        calls.join(", ") + captured
    }

    pub(super) fn is_over(&self) -> bool {
        self.ending.is_some() || self.calls.iter().all(|c| c.1 == Stage::Over)
    }
}

/// The communicators of a machine, and the meetings that have begun.
#[derive(Default)]
pub(super) struct Meetings {
    /// The devices' names in reports.
    pub(super) devices: Vec<Arc<str>>,
    pub(super) lost: BTreeSet<u32>,
    pub(super) comms: BTreeMap<u64, Comm>,
    ranks: BTreeMap<CommId, Rank>,
    pub(super) begun: BTreeMap<Place, Begun>,
    /// The meeting in each device's slot.
    pub(super) slots: BTreeMap<u32, Place>,
    /// The call in the library for each device, with its thread and scope.
    pub(super) library: BTreeMap<u32, (ThreadId, Text, Option<Name>)>,
}

impl Meetings {
    pub(super) fn new(devices: u32) -> Self {
        let devices = (0..devices).map(|i| format!("device {i}").into()).collect();
        Self { devices, ..Self::default() }
    }

    /// The name of a device in reports.
    pub(super) fn device_name(&self, device: u32) -> Result<Arc<str>> {
        self.devices.get(device as usize).cloned().ok_or_else(|| {
            Error::NotFound(format!("device {device} of {}", self.devices.len()).into())
        })
    }

    pub(super) fn rank(&self, comm: CommId) -> Result<Rank> {
        self.ranks.get(&comm).copied().ok_or_else(|| missing(comm))
    }

    pub(super) fn member(&self, of: Rank) -> Option<&Member> {
        self.comms.get(&of.key)?.members.get(of.rank as usize)?.as_ref()
    }

    fn member_mut(&mut self, of: Rank) -> Option<&mut Member> {
        self.comms.get_mut(&of.key)?.members.get_mut(of.rank as usize)?.as_mut()
    }

    /// The device of a rank.
    pub(super) fn device(&self, comm: CommId) -> Result<u32> {
        self.member(self.rank(comm)?).map(|m| m.device).ok_or_else(|| missing(comm))
    }

    /// A rank in words.
    pub(super) fn shown(&self, of: Rank) -> String {
        let name = self.comms.get(&of.key).map_or("a communicator that ended", |c| &*c.name);
        format!("rank {} of {name}", of.rank)
    }

    pub(super) fn join(&mut self, id: CommId, join: &CommJoin<'_>) -> Result<()> {
        let CommJoin { key, name, size, rank, device } = *join;
        let shown = self.device_name(device)?;
        if rank >= size || size > RANKS {
            return Err(Error::invalid(format!(
                "rank {rank} of {size} of {name}: a communicator has 1 to {RANKS} ranks, from 0 on"
            )));
        }
        let comm = self.comms.entry(key).or_insert_with(|| Comm {
            name: name.into(),
            members: (0..size).map(|_| None).collect(),
            pairs: BTreeMap::new(),
        });
        if comm.size() != size || *comm.name != *name {
            return Err(Error::invalid(format!(
                "rank {rank} joins {name} of {size} ranks; other ranks joined {} of {}",
                comm.name,
                comm.size()
            )));
        }
        if comm.members[rank as usize].is_some() {
            return Err(Error::invalid(format!("rank {rank} of {name} has joined already")));
        }
        let mut members = (0..).zip(&comm.members);
        let twice = |m: &Option<Member>| m.as_ref().is_some_and(|m| m.device == device);
        if let Some((other, _)) = members.find(|(_, m)| twice(m)) {
            return Err(Error::invalid(format!(
                "ranks {other} and {rank} of {name} are both on {shown}; give each a device"
            )));
        }
        let standing = Standing::Joined;
        comm.members[rank as usize] =
            Some(Member { device, standing, begun: 0, waiting: VecDeque::new() });
        self.ranks.insert(id, Rank { key, rank });
        Ok(())
    }

    /// Aborts a rank, and ends its meetings that have begun.
    pub(super) fn abort(&mut self, of: Rank) {
        if let Some(member) = self.member_mut(of) {
            member.standing = Standing::Aborted;
        }
        let places: Vec<Place> =
            self.begun.iter().filter(|(_, b)| b.of == of && !b.is_over()).map(|b| *b.0).collect();
        places.into_iter().for_each(|at| self.end(at, Ending::Aborted));
    }

    /// Removes a rank, and its communicator with the last one.
    pub(super) fn destroy(&mut self, comm: CommId) {
        let Some(of) = self.ranks.remove(&comm) else { return };
        if let Some(member) = self.member_mut(of) {
            member.standing = Standing::Destroyed;
        }
        let mut members = self.comms.get(&of.key).into_iter().flat_map(|c| &c.members);
        if members.all(|m| m.as_ref().is_some_and(|m| m.standing == Standing::Destroyed)) {
            self.comms.remove(&of.key);
        }
    }

    /// A rank that takes calls.
    pub(super) fn usable(&self, comm: CommId) -> Result<Rank> {
        let of = self.rank(comm)?;
        match self.member(of).map(|m| m.standing) {
            Some(Standing::Joined) => Ok(of),
            _ => Err(Error::state(format!(
                "{} was aborted and takes no calls; make a new communicator",
                self.shown(of)
            ))),
        }
    }

    /// Checks a meeting for a queue of a device, or for a node (`None`).
    pub(super) fn bind(&self, device: Option<u32>, meet: &Meet) -> Result<BoundMeet> {
        let of = self.usable(meet.comm)?;
        let own = self.device(meet.comm)?;
        if let Some(device) = device.filter(|&device| device != own) {
            return Err(Error::invalid(format!(
                "{} is on {}; a queue of {} cannot run its calls",
                self.shown(of),
                self.device_name(own)?,
                self.device_name(device)?
            )));
        }
        let size = self.comms.get(&of.key).map_or(0, Comm::size);
        meet.calls.iter().try_for_each(|call| call.check(of.rank, size))?;
        Ok(BoundMeet { comm: meet.comm, of, size, calls: meet.calls.as_slice().into() })
    }

    /// Returns whether a meeting must wait: for the slot, or for other ranks.
    pub(super) fn is_blocked(&self, at: Place, meet: &BoundMeet) -> bool {
        match self.begun.get(&at) {
            Some(begun) => !begun.is_over(),
            None => {
                let device = self.usable(meet.comm).and_then(|_| self.device(meet.comm));
                device.is_ok_and(|device| self.slots.contains_key(&device))
            }
        }
    }

    /// The label of a meeting that begins now, and whether its rank is still one. The meeting
    /// counts if so.
    ///
    /// # Errors
    /// `NotFound` for a rank that was destroyed.
    pub(super) fn count(&mut self, meet: &BoundMeet) -> Result<(String, bool)> {
        self.rank(meet.comm)?;
        let name = self.comms.get(&meet.of.key).map_or_else(|| "".into(), |c| c.name.clone());
        let member = self.member_mut(meet.of).ok_or_else(|| missing(meet.comm))?;
        let joined = member.standing == Standing::Joined;
        let label = format!("{name}#{}", member.begun);
        member.begun += u64::from(joined);
        Ok((label, joined))
    }

    /// Begins a meeting, which takes its device's slot.
    pub(super) fn begin(&mut self, at: Place, begun: Begun) {
        let of = begun.of;
        if let Some(comm) = self.comms.get_mut(&of.key) {
            for (call, (its, _)) in begun.calls.iter().enumerate() {
                let part = Part { at, call };
                match its.pair(of.rank) {
                    Some((from, to)) => {
                        let pair = comm.pairs.entry((from, to)).or_default();
                        if its.is_send() { &mut pair.sends } else { &mut pair.receives }
                            .push_back(part);
                    }
                    None => {
                        let member = comm.members[of.rank as usize].as_mut();
                        member.into_iter().for_each(|m| m.waiting.push_back(part));
                    }
                }
            }
        }
        self.slots.insert(begun.device, at);
        self.begun.insert(at, begun);
    }

    /// Takes the next call of a communicator that is due: its parts of all ranks in their order, or
    /// those of a sender and a receiver.
    pub(super) fn due(&mut self, key: u64) -> Option<Vec<Part>> {
        let comm = self.comms.get_mut(&key)?;
        let there = |m: &Option<Member>| m.as_ref().is_some_and(|m| !m.waiting.is_empty());
        if comm.members.iter().all(there) {
            let members = comm.members.iter_mut().flatten();
            return Some(members.filter_map(|m| m.waiting.pop_front()).collect());
        }
        let pairs = comm.pairs.values_mut();
        let mut there = pairs.filter(|p| !p.sends.is_empty() && !p.receives.is_empty());
        let pair = there.next()?;
        Some(pair.sends.pop_front().into_iter().chain(pair.receives.pop_front()).collect())
    }

    /// Sets the end of a call.
    pub(super) fn stage(&mut self, part: Part, stage: Stage) {
        if let Some(begun) = self.begun.get_mut(&part.at) {
            begun.calls[part.call].1 = stage;
        }
    }

    /// Ends a meeting with all its calls; the first ending stays.
    pub(super) fn end(&mut self, at: Place, ending: Ending) {
        let Some(begun) = self.begun.get_mut(&at) else { return };
        begun.ending.get_or_insert(ending);
        if let Some(comm) = self.comms.get_mut(&begun.of.key) {
            comm.withdraw(at);
        }
    }

    /// Removes a meeting, and frees its slot.
    pub(super) fn leave(&mut self, at: Place) -> Option<Begun> {
        let begun = self.begun.remove(&at)?;
        self.slots.retain(|_, holder| *holder != at);
        if let Some(comm) = self.comms.get_mut(&begun.of.key) {
            comm.withdraw(at);
        }
        Some(begun)
    }

    /// Removes the meetings of a queue whose head will not go on.
    pub(super) fn withdraw(&mut self, queue: QueueId) {
        let places: Vec<Place> =
            self.begun.range((queue, 0)..=(queue, u32::MAX)).map(|b| *b.0).collect();
        places.into_iter().for_each(|at| drop(self.leave(at)));
    }

    /// The ranks that have not joined a communicator; an error for a rank that has left it.
    pub(super) fn absent(&self, of: Rank) -> Result<Vec<u32>> {
        if self.member(of).is_none_or(|m| m.standing != Standing::Joined) {
            return Err(Error::state(format!("{} was aborted", self.shown(of))));
        }
        let members = self.comms.get(&of.key).into_iter().flat_map(|c| &c.members);
        Ok((0..).zip(members).filter(|(_, m)| m.is_none()).map(|(rank, _)| rank).collect())
    }
}
