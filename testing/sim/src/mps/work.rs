//! Command buffers as commands of the machine.
//!
//! # Queues of the machine
//! - front, one for each Metal queue. Commands: waits for events. Order: in the order of the
//!   commits.
//! - a lane for each encoder. Commands: its work, or its groups of overlapping dispatches. Order:
//!   after the front's earlier waits, and after fences.
//! - a lane for each overlapping dispatch. Commands: the dispatch. Order: after its group's start,
//!   before its end.
//! - tail, one for each command buffer. Commands: signals, the end, the handlers. Order: after the
//!   tail before it, and after the lanes.
//!
//! A lane that fails makes its tail fail, and a failed tail skips its signals. The lanes live until
//! the host has seen the end of their command buffer. So no two accesses of different encoders have
//! an order by accident.
//!
//! This module must not know the driver's interface.

use super::memory::Memory;
use super::tables::{Object, PipelineState, Tables};
use super::{Effect, broken};
use crate::{Command, EventId, FillCall, KernelCall, Machine, QueueId, SemaphoreId, Transfer};
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::{Error, Result};
use leasehold_mps::driver::ops::{CommandBufferDesc, CompletedHandler, Completion, code};
use std::collections::{BTreeMap, BTreeSet};

/// One piece of work of an encoder.
#[derive(Clone)]
pub(super) enum Work {
    Kernel(KernelCall),
    Copy(Transfer),
    Fill(FillCall),
}

impl Work {
    fn command(self) -> Command {
        match self {
            Work::Kernel(call) => Command::Kernel(call),
            Work::Copy(copy) => Command::Copy(copy),
            Work::Fill(fill) => Command::Fill(fill),
        }
    }
}

/// An encoder.
#[derive(Default)]
pub(super) struct EncoderState {
    pub(super) device: u32,
    /// The number of its command buffer.
    pub(super) command: u64,
    pub(super) name: String,
    pub(super) ended: bool,
    pub(super) blit: bool,
    pub(super) concurrent: bool,
    pub(super) pipeline: Option<PipelineState>,
    /// Number, address and remaining bytes of the bound buffers.
    pub(super) bound: BTreeMap<u32, (u64, u64, u64)>,
    pub(super) bytes: BTreeMap<u32, Vec<u8>>,
    pub(super) shared: BTreeMap<u32, u32>,
    /// Debug groups that are open.
    pub(super) depth: u32,
    pub(super) plan: Plan,
}

/// The work of an encoder.
#[derive(Default, Clone)]
pub(super) struct Plan {
    pub(super) name: String,
    /// Work of one group overlaps. Groups run one after the other.
    pub(super) groups: Vec<Vec<Work>>,
    pub(super) waits: Vec<u64>,
    pub(super) updates: Vec<u64>,
    pub(super) samples: Option<(EventId, EventId)>,
    /// Addresses of memory that the encoder makes resident.
    pub(super) resident: BTreeSet<u64>,
    /// Addresses of memory that indirect commands need to be resident.
    pub(super) needed: BTreeSet<u64>,
}

/// A part of a command buffer, in its order.
pub(super) enum Part {
    Encoder(Plan),
    Wait(SemaphoreId, u64),
    Signal(SemaphoreId, u64),
}

/// A command buffer.
pub(super) struct CommandState {
    pub(super) device: u32,
    /// The number of its queue.
    pub(super) queue: u64,
    /// Its number in the order of their creation, from 1.
    pub(super) index: u64,
    /// Its number in the order of the queue's commits, from 1; 0 before its commit.
    pub(super) order: u64,
    pub(super) name: String,
    pub(super) desc: CommandBufferDesc,
    /// The number of the open encoder.
    pub(super) open: Option<u64>,
    /// Encoders so far.
    pub(super) encoders: u32,
    pub(super) committed: bool,
    pub(super) parts: Vec<Part>,
    pub(super) handlers: Vec<CompletedHandler>,
    /// The numbers of the objects that the work uses.
    pub(super) uses: BTreeSet<u64>,
    /// Memory that retained references keep.
    pub(super) keeps: Vec<Arc<Memory>>,
    /// Address and bytes of each memory that the work uses.
    pub(super) working_set: BTreeMap<u64, u64>,
    lanes: Vec<QueueId>,
    events: Vec<EventId>,
    tail: Option<QueueId>,
    begun: Option<EventId>,
    pub(super) done: Option<EventId>,
    /// An error that was decided at the commit.
    failure: Option<(i32, String)>,
    /// The handlers were called.
    pub(super) called: Arc<AtomicBool>,
    /// The outcome, once the host has seen the end.
    pub(super) outcome: Option<Completion>,
}

impl CommandState {
    pub(super) fn new(
        device: u32,
        queue: u64,
        index: u64,
        label: &str,
        desc: CommandBufferDesc,
    ) -> Self {
        Self {
            device,
            queue,
            index,
            order: 0,
            name: format!("command buffer {index} of queue {label}"),
            desc,
            open: None,
            encoders: 0,
            committed: false,
            parts: Vec::new(),
            handlers: Vec::new(),
            uses: BTreeSet::new(),
            keeps: Vec::new(),
            working_set: BTreeMap::new(),
            lanes: Vec::new(),
            events: Vec::new(),
            tail: None,
            begun: None,
            done: None,
            failure: None,
            called: Arc::new(AtomicBool::new(false)),
            outcome: None,
        }
    }

    /// Notes the use of an object, and of its memory.
    pub(super) fn uses(&mut self, number: u64, memory: Option<&Arc<Memory>>) {
        self.uses.insert(number);
        let Some(memory) = memory else { return };
        if self.working_set.insert(memory.addr, memory.bytes).is_none() && self.desc.retained {
            self.keeps.push(memory.clone());
        }
    }

    /// Whether the machine has ended the work. The host learns nothing.
    pub(super) fn is_over(&self, machine: &Machine) -> bool {
        let (Some(done), Some(tail)) = (self.done, self.tail) else {
            return self.outcome.is_some();
        };
        // The lane and the event exist until the host has seen the end.
        self.outcome.is_some()
            || machine.event_time(done).is_ok_and(|time| time.is_some())
            || machine.queue_failure(tail).is_ok_and(|failure| failure.is_some())
            || machine.device_status(self.device).is_err()
    }

    /// Whether uncompleted work may use an object that nothing retains.
    pub(super) fn may_use(&self, machine: &Machine, number: u64) -> bool {
        self.committed
            && !self.desc.retained
            && self.uses.contains(&number)
            && !self.is_over(machine)
    }

    /// The outcome of work that is over.
    fn judge(&self, machine: &Machine) -> Completion {
        let failure = |lane: &QueueId| machine.queue_failure(*lane).ok().flatten();
        let text = |error: &Error| {
            let text = error.to_string();
            let fault =
                if text.contains("illegal address") { code::PAGE_FAULT } else { code::INTERNAL };
            (fault, text)
        };
        let lost = || machine.device_status(self.device).err();
        let error = self
            .failure
            .clone()
            .or_else(|| self.lanes.iter().find_map(failure).map(|f| text(&f.cause)))
            .or_else(|| lost().map(|e| (code::DEVICE_REMOVED, e.to_string())));
        let time = |event: Option<EventId>| {
            event.and_then(|e| machine.event_time(e).ok().flatten()).unwrap_or(0)
        };
        let ended = time(self.done);
        Completion { error, started: time(self.begun).min(ended), ended }
    }

    /// Gives the lanes and events back to the machine. Enqueued work still runs.
    pub(super) fn let_go(&mut self, machine: &Machine) {
        for lane in self.lanes.drain(..).chain(self.tail.take()) {
            drop(machine.queue_destroy(lane));
        }
        let ends = self.events.drain(..).chain(self.begun.take()).chain(self.done.take());
        ends.for_each(|event| drop(machine.event_destroy(event)));
        self.keeps.clear();
    }

    /// Ends with an outcome.
    fn end(&mut self, machine: &Machine) {
        if self.outcome.is_none() {
            self.outcome = Some(self.judge(machine));
            self.let_go(machine);
        }
    }
}

impl Tables {
    /// Notes that the host knows the end of a command buffer, and so of the earlier ones of its
    /// queue.
    pub(super) fn observe(&mut self, machine: &Machine, number: u64) {
        let Some((queue, order)) = self.work(number).map(|c| (c.queue, c.order)) else { return };
        let Ok(state) = self.queue(queue) else {
            if let Some(command) = self.work_mut(number) {
                command.end(machine);
            }
            return;
        };
        for other in state.in_flight.clone() {
            let Some(command) = self.work_mut(other) else { continue };
            if !command.committed || command.order > order {
                continue;
            }
            let done = command.done;
            command.end(machine);
            if let Ok(state) = self.queue_mut(queue) {
                state.in_flight.retain(|b| *b != other);
                state.last = state.last.filter(|last| Some(*last) != done);
            }
            self.remove_released(other);
        }
    }

    /// Removes a command buffer without a handle, once its handlers were called.
    fn remove_released(&mut self, number: u64) {
        if let Some(Object::Ghost(command)) = self.objects.get(&number)
            && command.outcome.is_some()
            && command.handlers.is_empty()
        {
            self.objects.remove(&number);
        }
    }

    /// The reason why a command buffer fails as a whole, if it does.
    fn refusal(&self, command: &CommandState, physical: u64) -> Option<(i32, String)> {
        let sets = self.queue(command.queue).map(|q| q.sets.clone()).unwrap_or_default();
        let members = sets.iter().filter_map(|set| self.set(*set).ok()).flat_map(|s| &s.committed);
        let set: BTreeMap<u64, u64> =
            members.filter_map(|m| self.memory_of(*m)).map(|m| (m.addr, m.bytes)).collect();
        for part in &command.parts {
            let Part::Encoder(plan) = part else { continue };
            let missing = |at: &&u64| !plan.resident.contains(at) && !set.contains_key(at);
            if let Some(at) = plan.needed.iter().find(missing) {
                let text = format!("an indirect command touches {at:#x}, which is not resident");
                return Some((code::PAGE_FAULT, text));
            }
        }
        let mut all = set;
        all.extend(&command.working_set);
        let bytes: u64 = all.values().sum();
        (bytes > physical).then(|| {
            let text = format!("the working set has {bytes} bytes, and the device {physical}");
            (code::OUT_OF_MEMORY, text)
        })
    }

    /// Commits a command buffer. `injected` is a failure of the fault plan. Returns whether the
    /// machine has the work.
    pub(super) fn commit(
        &mut self,
        machine: &Machine,
        physical: u64,
        number: u64,
        injected: Option<(i32, String)>,
        completed: impl FnOnce() + Send + 'static,
    ) -> Result<bool> {
        let command = self.command_mut(number)?;
        if command.committed || command.open.is_some() {
            let what = if command.committed { "a second time" } else { "with an open encoder" };
            let text = format!("commit of {} {what}", command.name);
            return Err(broken(self, Effect::Abort, text));
        }
        let gone = self.command(number)?.uses.iter().find(|o| !self.objects.contains_key(o));
        if gone.is_some() {
            let text = format!("{} uses a released object", self.command(number)?.name);
            return Err(broken(self, Effect::Undefined, text));
        }
        let refusal = injected.or_else(|| self.refusal(self.command(number).ok()?, physical));
        let command = self.command_mut(number)?;
        command.committed = true;
        command.failure = refusal;
        let (queue, handled) = (command.queue, !command.handlers.is_empty());
        if let Ok(state) = self.queue_mut(queue) {
            state.commits += 1;
            let order = state.commits;
            self.command_mut(number)?.order = order;
        }
        let command = self.command_mut(number)?;
        command.called.store(!handled, Ordering::Release);
        let mut parts = std::mem::take(&mut command.parts);
        if command.failure.is_some() {
            parts.clear();
        }
        match self.enqueue(machine, number, queue, parts, handled, completed) {
            Ok(()) => Ok(true),
            Err(error) => {
                // The device is lost: no work runs.
                let command = self.command_mut(number)?;
                command.failure.get_or_insert((code::DEVICE_REMOVED, error.to_string()));
                self.observe(machine, number);
                Ok(false)
            }
        }
    }

    fn enqueue(
        &mut self,
        machine: &Machine,
        number: u64,
        queue: u64,
        parts: Vec<Part>,
        handled: bool,
        completed: impl FnOnce() + Send + 'static,
    ) -> Result<()> {
        let (device, name) = self.command(number).map(|c| (c.device, c.name.clone()))?;
        let state = self.queue(queue)?;
        let (front, passed, last) = (state.front, state.passed, state.last);
        let tail = machine.queue_create(device)?;
        machine.queue_set_name(tail, &name)?;
        self.command_mut(number)?.tail = Some(tail);
        let timed = |tables: &mut Self| -> Result<EventId> {
            let event = machine.event_create(device, true)?;
            tables.command_mut(number)?.events.push(event);
            Ok(event)
        };
        let begun = timed(self)?;
        let done = timed(self)?;
        let mut ends: Vec<Command> = last.into_iter().map(Command::WaitEvent).collect();
        ends.push(Command::Record(begun));
        if self.command(number)?.failure.is_some() {
            let refused = || Some(Err(Error::state("the command buffer was refused")));
            ends.push(Command::Until { name: "a command buffer", ready: Box::new(refused) });
        }
        for part in parts {
            match part {
                Part::Wait(semaphore, value) => {
                    let wait = Command::WaitSemaphore(semaphore, value);
                    machine.submit(front, vec![wait, Command::Record(passed)])?;
                    ends.push(Command::WaitEvent(passed));
                }
                Part::Signal(semaphore, value) => {
                    ends.push(Command::SignalOnSuccess(semaphore, value));
                }
                Part::Encoder(plan) => {
                    let end = timed(self)?;
                    self.enqueue_encoder(machine, number, queue, plan, passed, end)?;
                    ends.push(Command::RequireEvent(end));
                }
            }
            // Each wait is bound to the last record that is enqueued before it.
            machine.submit(tail, std::mem::take(&mut ends))?;
        }
        ends.push(Command::Record(done));
        if handled {
            let call = Box::new(completed);
            ends.push(Command::Host { name: "completed handler".into(), call, always: true });
        }
        machine.submit(tail, ends)?;
        let command = self.command_mut(number)?;
        command.events.retain(|e| *e != begun && *e != done);
        (command.begun, command.done) = (Some(begun), Some(done));
        self.queue_mut(queue)?.last = Some(done);
        Ok(())
    }

    /// Enqueues the work of an encoder, which records `end`.
    fn enqueue_encoder(
        &mut self,
        machine: &Machine,
        number: u64,
        queue: u64,
        plan: Plan,
        passed: EventId,
        end: EventId,
    ) -> Result<()> {
        let device = self.command(number)?.device;
        let lane = |tables: &mut Self| -> Result<QueueId> {
            let lane = machine.queue_create(device)?;
            tables.command_mut(number)?.lanes.push(lane);
            machine.queue_set_name(lane, &plan.name)?;
            Ok(lane)
        };
        let main = lane(self)?;
        let mut commands = vec![Command::WaitEvent(passed)];
        for &fence in &plan.waits {
            let fence = *self.fence(fence)?;
            match fence.updated_in {
                Some(other) if other != queue => {
                    let text = format!("{} waits for a fence of another queue", plan.name);
                    broken(self, Effect::Undefined, text);
                }
                Some(_) => commands.push(Command::WaitEvent(fence.event)),
                // The driver waits for committed updates only.
                None => {}
            }
        }
        commands.extend(plan.samples.map(|(start, _)| Command::Record(start)));
        machine.submit(main, commands)?;
        for group in plan.groups {
            if group.len() < 2 {
                machine.submit(main, group.into_iter().map(Work::command).collect())?;
                continue;
            }
            let from = machine.event_create(device, false)?;
            self.command_mut(number)?.events.push(from);
            machine.enqueue(main, Command::Record(from))?;
            for work in group {
                let (side, over) = (lane(self)?, machine.event_create(device, false)?);
                self.command_mut(number)?.events.push(over);
                let work = vec![Command::RequireEvent(from), work.command(), Command::Record(over)];
                machine.submit(side, work)?;
                machine.enqueue(main, Command::RequireEvent(over))?;
            }
        }
        let mut commands = Vec::new();
        for &fence in &plan.updates {
            let fence = self.fence_mut(fence)?;
            fence.updated_in = Some(queue);
            commands.push(Command::Record(fence.event));
        }
        commands.extend(plan.samples.map(|(_, end)| Command::Record(end)));
        commands.push(Command::Record(end));
        machine.submit(main, commands)
    }

    /// Takes the handlers of a command buffer whose work is over, with its outcome. The host knows
    /// the end from now on.
    pub(super) fn take_handlers(&mut self, machine: &Machine, number: u64) -> Option<Handlers> {
        self.observe(machine, number);
        let command = self.work_mut(number)?;
        let handlers = std::mem::take(&mut command.handlers);
        let taken = Some(Handlers {
            outcome: command.outcome.clone()?,
            called: command.called.clone(),
            handlers,
        });
        self.remove_released(number);
        taken
    }

    /// The numbers of committed command buffers of a device whose handlers were not called.
    pub(super) fn uncalled(&self, device: u32) -> Vec<u64> {
        let each = self.objects.iter().filter_map(|(number, object)| match object {
            Object::Command(c) | Object::Ghost(c)
                if c.committed && c.device == device && !c.handlers.is_empty() =>
            {
                Some(*number)
            }
            _ => None,
        });
        each.collect()
    }
}

/// The handlers of a command buffer that is over.
pub(super) struct Handlers {
    handlers: Vec<CompletedHandler>,
    outcome: Completion,
    called: Arc<AtomicBool>,
}

impl Handlers {
    pub(super) fn call(self) {
        for handler in self.handlers {
            super::call_back(|| handler(&self.outcome));
        }
        self.called.store(true, Ordering::Release);
    }
}
