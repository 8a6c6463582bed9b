//! Meetings: commands of several devices' queues that run together.
//!
//! # A meeting
//! A [`Meet`](super::Meet) begins at its own rank when it is the head of its queue and the device's
//! *slot* is free. From there on it occupies the slot: a kernel that waits for its peers occupies a
//! real device so. Its ranges count as used from its begin on, and the bytes that it will write are
//! poisoned.
//!
//! The ranks of a communicator meet in the order of their calls: the first call of one with the
//! first call of each other. Transfers between two ranks meet by pair. A call runs when each rank
//! that takes part has begun it. It moves the bytes, and takes virtual time from the last begin on.
//! Each rank learns the clocks of those whose data it got. When the queue has noticed the end, the
//! slot is free again.
//!
//! # Ends without the others
//! A queue that fails, a device that is lost and a rank that aborts withdraw their calls. The other
//! ranks are not told, and wait. After an abort the queue goes on as if the call were over. The
//! bytes stay poisoned, and no code may use them.
//!
//! # Reports
//! Calls that do not fit each other ([`OnMismatch`]), and a cycle of meetings that wait for each
//! other's slots.
//!
//! This module must not know how commands are picked.

use super::MachineState;
use super::collective::{CommCall, Output, results};
use super::comm::{Begun, BoundMeet, Ending, OnMismatch, Part, Place, Stage};
use super::command::Action;
use super::detect::{ReportKind, Unwritten};
use super::space::AccessScope;
use super::step::{CommandContext, NO_NODE, Outcome};
use leasehold_core::Error;
use leasehold_hal::Access;

/// The host address of a range, and its bytes.
type Reached = (*mut u8, usize);

impl MachineState {
    /// Begins a meeting, or ends one that is over.
    pub(super) fn meet(&mut self, place: &mut CommandContext, meet: BoundMeet) -> Outcome {
        let at = (place.queue, place.node.map_or(NO_NODE, |n| n.1));
        let Some(begun) = self.meetings.begun.get(&at) else {
            return self.begin_meeting(at, place, meet);
        };
        place.name = begun.operation.name.clone();
        if !begun.is_over() {
            return Outcome::Pending(Action::Meet(meet));
        }
        let Some(begun) = self.meetings.leave(at) else { return Outcome::Done(0) };
        match begun.ending {
            None => {
                self.learn(place.queue, &begun.learned, begun.end);
                Outcome::Done(0)
            }
            Some(Ending::Aborted) => Outcome::Done(0),
            Some(Ending::Fail(cause)) => Outcome::Fail(cause),
            Some(Ending::Fault(text)) => Outcome::Fault(text),
        }
    }

    fn begin_meeting(&mut self, at: Place, place: &mut CommandContext, meet: BoundMeet) -> Outcome {
        let (label, joined) = match self.meetings.count(&meet) {
            Ok(counted) => counted,
            Err(cause) => {
                self.detector.misused(cause.to_string());
                return Outcome::Fail(cause);
            }
        };
        place.name = format!("{label} {}", meet.shown()).into();
        if let Err(text) = self.use_ranges(place, &meet) {
            return Outcome::Fault(text);
        }
        if !joined {
            return Outcome::Done(0);
        }
        let began = self.queues.get(&place.queue).map_or(0, |q| q.nanos);
        let key = meet.of.key;
        let begun = Begun {
            of: meet.of,
            device: place.device,
            label,
            operation: place.operation(),
            calls: meet.calls.iter().map(|&call| (call, Stage::Waiting)).collect(),
            captured: place.node.is_some(),
            clock: place.clock.clone(),
            learned: place.clock.clone(),
            began,
            end: began,
            ending: None,
        };
        self.meetings.begin(at, begun);
        while let Some(parts) = self.meetings.due(key) {
            self.come_together(&parts);
        }
        if let Some(cycle) = self.meetings.cycle(place.device) {
            let operation = |begun: Option<&&Begun>| begun.map(|b| b.operation.clone());
            if let (first, Some(second)) = (operation(cycle.first()), operation(cycle.last())) {
                self.detector.report(ReportKind::DeadLock, first, second, 0, 0);
            }
        }
        Outcome::Begun(Action::Meet(meet))
    }

    /// Notes the accesses of a meeting, and poisons what it will write and does not send.
    fn use_ranges(&mut self, place: &CommandContext, meet: &BoundMeet) -> Result<(), String> {
        let mut used = Vec::new();
        for call in meet.calls.iter() {
            let ranges = call.ranges(meet.of.rank, meet.size);
            for (range, access) in ranges.into_iter().zip([Access::Read, Access::Write]) {
                if !range.is_empty() {
                    let (mut parts, bytes) = (Vec::new(), range.end - range.start);
                    let who = AccessScope::Kernel(place.device);
                    let found = self.reach(place, who, range.start, bytes, &mut parts)?;
                    used.push((range, access, found, parts));
                }
            }
        }
        for (_, access, _, parts) in &used {
            self.note_access(place, parts, *access, Unwritten::Any);
        }
        if !self.detector.on {
            return Ok(());
        }
        for (range, _, found, _) in used.iter().filter(|u| u.1 == Access::Write) {
            for (i, at) in range.clone().enumerate() {
                if !used.iter().any(|u| u.1 == Access::Read && u.0.contains(&at)) {
                    // SAFETY: the range was resolved to this many mapped bytes just now, and the
                    // lock keeps the mapping. Queues run one at a time.
                    unsafe { found.add(i).write(self.detector.poison) };
                }
            }
        }
        Ok(())
    }

    /// Runs a call that is due.
    fn come_together(&mut self, parts: &[Part]) {
        let begun: Vec<&Begun> =
            parts.iter().filter_map(|p| self.meetings.begun.get(&p.at)).collect();
        let calls: Vec<CommCall> =
            begun.iter().zip(parts).map(|(b, p)| b.calls[p.call].0).collect();
        let (Some(&first), Some(&call)) = (begun.first(), calls.first()) else { return };
        let mut pairs = begun.iter().zip(&calls);
        let odd = pairs.find(|(b, c)| b.captured != first.captured || !call.fits(c));
        if let Some((odd, _)) = odd {
            if self.on_mismatch == OnMismatch::Strict {
                let cause = self.meetings.mismatch(first, odd);
                let (a, b) = (first.operation.clone(), odd.operation.clone());
                self.detector.report(ReportKind::Mismatch, Some(a), b, 0, 0);
                return self.end_all(parts, &cause);
            }
            if odd.captured != first.captured {
                // The library's rules make this a hang.
                return parts.iter().for_each(|&p| self.meetings.stage(p, Stage::Hung));
            }
        }
        let size = self.meetings.comms.get(&first.of.key).map_or(1, |c| c.members.len()) as u32;
        let Some(reached) = self.reach_all(parts, size) else { return };
        let inputs: Vec<Vec<u8>> = reached
            .iter()
            .map(|&[(at, bytes), _]| match bytes {
                0 => Vec::new(),
                // SAFETY: the range was resolved to this many mapped bytes just now, and the lock
                // keeps the mapping. No reference to these bytes exists elsewhere.
                _ => unsafe { std::slice::from_raw_parts(at, bytes) }.to_vec(),
            })
            .collect();
        let outputs = match call.peer() {
            None => results(&calls, &inputs),
            Some(_) => vec![Some(Vec::new()), Some(vec![(0, inputs[0].clone())])],
        };
        let ends = outputs.iter().map(Option::is_some).collect::<Vec<bool>>();
        for (output, [_, to]) in outputs.into_iter().zip(reached) {
            write_all(to, output.unwrap_or_default());
        }
        self.end_calls(parts, &calls, &ends, size);
    }

    /// Resolves the ranges of a call, because memory may be gone since the begin. If it is, its
    /// rank's meeting ends with a fault, the other ranks wait for ever, and the result is `None`.
    fn reach_all(&mut self, parts: &[Part], size: u32) -> Option<Vec<[Reached; 2]>> {
        let mut all = Vec::with_capacity(parts.len());
        let mut faults = Vec::new();
        for part in parts {
            let begun = self.meetings.begun.get(&part.at)?;
            let mut reached = [(std::ptr::null_mut(), 0); 2];
            let ranges = begun.calls[part.call].0.ranges(begun.of.rank, size);
            for (range, to) in ranges.into_iter().zip(&mut reached) {
                let bytes = range.end - range.start;
                let who = AccessScope::Kernel(begun.device);
                if bytes == 0 {
                    continue;
                }
                match self.space.resolve(who, range.start, bytes, &mut Vec::new()) {
                    Ok(at) => *to = (at, bytes as usize),
                    Err(text) => faults.push((part.at, text)),
                }
            }
            all.push(reached);
        }
        if faults.is_empty() {
            return Some(all);
        }
        parts.iter().for_each(|&p| self.meetings.stage(p, Stage::Hung));
        faults.into_iter().for_each(|(at, text)| self.meetings.end(at, Ending::Fault(text)));
        None
    }

    fn end_all(&mut self, parts: &[Part], cause: &Error) {
        parts.iter().for_each(|p| self.meetings.end(p.at, Ending::Fail(cause.clone())));
    }

    /// Ends the calls of the ranks that do not hang: each rank knows the past of those whose data
    /// it got.
    fn end_calls(&mut self, parts: &[Part], calls: &[CommCall], ends: &[bool], size: u32) {
        let begun = |p: &Part| {
            let begun = self.meetings.begun.get(&p.at)?;
            Some((begun.of.rank, begun.clock.clone(), begun.end))
        };
        let ranks: Vec<_> = parts.iter().filter_map(begun).collect();
        let start = ranks.iter().map(|r| r.2).max().unwrap_or(0);
        for (((part, call), end), (rank, _, _)) in parts.iter().zip(calls).zip(ends).zip(&ranks) {
            if !end {
                self.meetings.stage(*part, Stage::Hung);
                continue;
            }
            self.meetings.stage(*part, Stage::Over);
            if let Some(begun) = self.meetings.begun.get_mut(&part.at) {
                let heard = ranks.iter().filter(|(other, _, _)| call.hears(*rank, *other));
                heard.for_each(|(_, clock, _)| begun.learned.join(clock));
                // A group waits for the link once.
                let latency = if begun.end == begun.began { self.link.latency } else { 0 };
                begun.end = start + latency + call.moved(size) / self.link.bytes.max(1);
            }
        }
    }
}

/// Writes what a rank receives, as far as it fits.
fn write_all((to, room): Reached, output: Output) {
    for (offset, bytes) in output {
        let offset = offset as usize;
        let fits = bytes.len().min(room.saturating_sub(offset));
        if fits != 0 {
            // SAFETY: the range was resolved to `room` mapped bytes under the lock that is held,
            // and these are a part of them.
            unsafe { std::ptr::copy_nonoverlapping(bytes.as_ptr(), to.add(offset), fits) };
        }
    }
}
