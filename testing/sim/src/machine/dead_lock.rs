//! The waits of meetings, in words, and the cycles of meetings that wait for each other.
//!
//! A meeting waits for ranks that have not begun its call. A rank cannot begin a call while another
//! meeting is in its device's slot. In a cycle of devices, each slot holds a meeting that waits for
//! the next device. Such a cycle never ends by itself.
//!
//! This module must not know queues' contents, memory or time.

use super::comm::{Begun, BoundMeet, Meetings, Place, Rank, Stage, Standing};
use leasehold_core::{Error, Mismatch, Text};

impl Meetings {
    /// The ranks for which a meeting waits.
    fn awaited(&self, begun: &Begun) -> Vec<Rank> {
        let key = begun.of.key;
        let Some(comm) = self.comms.get(&key) else { return Vec::new() };
        let mut ranks = Vec::new();
        for (call, _) in begun.calls.iter().filter(|c| c.1 == Stage::Waiting) {
            match call.peer() {
                Some(peer) => ranks.push(peer),
                None => ranks.extend((0..).zip(&comm.members).filter_map(|(rank, member)| {
                    member.as_ref().is_none_or(|m| m.waiting.is_empty()).then_some(rank)
                })),
            }
        }
        ranks.sort_unstable();
        ranks.dedup();
        ranks.into_iter().map(|rank| Rank { key, rank }).collect()
    }

    /// The devices for which the meeting in a device's slot waits.
    fn awaited_by(&self, device: u32) -> Vec<u32> {
        let begun = self.slots.get(&device).and_then(|at| self.begun.get(at));
        let ranks = begun.filter(|b| !b.is_over()).map_or(Vec::new(), |b| self.awaited(b));
        ranks.into_iter().filter_map(|of| self.member(of)).map(|m| m.device).collect()
    }

    /// A cycle of meetings from the one in a device's slot on: each waits for a device whose slot
    /// the next one holds.
    pub(super) fn cycle(&self, from: u32) -> Option<Vec<&Begun>> {
        // The devices of the path, each with those that it waits for and that were not tried.
        let mut path = vec![(from, self.awaited_by(from))];
        let mut seen = vec![from];
        while let Some((_, next)) = path.last_mut() {
            match next.pop() {
                None => drop(path.pop()),
                Some(device) if device == from => {
                    let holders = path.iter().filter_map(|(device, _)| self.slots.get(device));
                    return Some(holders.filter_map(|at| self.begun.get(at)).collect());
                }
                Some(device) if seen.contains(&device) => {}
                Some(device) => {
                    seen.push(device);
                    path.push((device, self.awaited_by(device)));
                }
            }
        }
        None
    }

    fn place(&self, begun: &Begun) -> &str {
        &self.devices[begun.device as usize]
    }

    /// A cycle of meetings in words, if there is one.
    pub(super) fn dead_lock(&self) -> Option<String> {
        let cycle = self.slots.keys().find_map(|&device| self.cycle(device))?;
        let (first, others) = cycle.split_first()?;
        let mut text = format!("{} {} waits for ", self.place(first), first.label);
        for begun in others {
            let (device, label) = (self.place(begun), &begun.label);
            text += &format!("{device}, whose slot {label} holds, which waits for ");
        }
        Some(text + self.place(first))
    }

    /// The wait of a meeting, in words.
    pub(super) fn waits_for(&self, at: Place, meet: &BoundMeet) -> String {
        let Some(begun) = self.begun.get(&at) else {
            let holder = self.device(meet.comm).ok().and_then(|device| self.slots.get(&device));
            return match holder.and_then(|at| self.begun.get(at)) {
                Some(other) => {
                    format!(
                        "the slot of {}, which {} holds",
                        self.place(other),
                        other.operation.name
                    )
                }
                None => "its turn".to_owned(),
            };
        };
        let waiting = begun.calls.iter().find(|c| c.1 != Stage::Over);
        let Some((call, _)) = waiting else { return "its end".to_owned() };
        let label = &begun.label;
        let ranks: Vec<String> =
            self.awaited(begun).into_iter().map(|of| self.absence(of)).collect();
        if ranks.is_empty() {
            return format!("{label}: {call}, which has met calls that do not fit");
        }
        format!("{label}: {call} waits for {}", ranks.join(", "))
    }

    /// A rank, and why it has not begun a call.
    fn absence(&self, of: Rank) -> String {
        let Some(member) = self.member(of) else {
            return format!("rank {}, which has not joined", of.rank);
        };
        let holder = self.slots.get(&member.device).and_then(|at| self.begun.get(at));
        let why = match holder {
            _ if self.lost.contains(&member.device) => "which is lost".to_owned(),
            _ if member.standing != Standing::Joined => "which has left".to_owned(),
            Some(other) => format!("whose slot {} holds", other.operation.name),
            None => format!("which has begun {} calls and not this one", member.begun),
        };
        format!("rank {} ({}), {why}", of.rank, self.devices[member.device as usize])
    }

    /// The error of calls of two ranks that do not fit each other.
    pub(super) fn mismatch(&self, first: &Begun, other: &Begun) -> Error {
        let named = |begun: &Begun| {
            let shown = match &begun.operation.scope {
                Some(scope) => format!("{} ({})", begun.shown(), scope.as_str()),
                None => begun.shown(),
            };
            (begun.of.rank, Text::from(format!("on {} {shown}", self.place(begun))))
        };
        Mismatch::new(first.label.clone(), named(first), named(other)).into()
    }
}
