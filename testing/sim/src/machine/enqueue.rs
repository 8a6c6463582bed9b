//! Creation of queues, events, semaphores and graphs, and the enqueue of commands.
//!
//! A command is bound when it is enqueued: a wait to the event's last record, a launch to the
//! graph's present state. While a queue captures, its commands become nodes of a graph, one after
//! the other.
//!
//! This module must not know how commands run.

use super::clock::Clock;
use super::comm::{BoundMeet, Meet};
use super::command::{Action, Command, Done, Entry, Mark, NodeAction, Running};
use super::conditional::Part;
use super::fault::Disturbance;
use super::graph::{Exec, Node, NodeId, NodeUpdate, Template, TemplateNode};
use super::ids::missing;
use super::partition::ended;
use super::rng::Rng;
use super::space::AccessScope;
use super::{
    Event, EventId, ExecId, GraphId, Machine, MachineState, PartitionId, Queue, QueueFailure,
    QueueId, Raised, Semaphore, SemaphoreId,
};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Name, Result};
use std::collections::VecDeque;
use std::ops::Range;

/// The least bytes of a node of an executable graph, and how many sizes there are.
const NODE_BYTES: u64 = 256;
const NODE_SIZES: usize = 1793;

/// The number of a semaphore's steps with a clock of their own.
const RAISED: usize = 64;

impl Machine {
    /// Makes a queue on a device.
    ///
    /// # Errors
    /// `NotFound` for a device that does not exist; `DeviceLost`; an error of the fault plan.
    pub fn queue_create(&self, device: u32) -> Result<QueueId> {
        self.queue_create_on(device, None)
    }

    /// Makes a queue whose kernels run on a partition of the device.
    ///
    /// # Errors
    /// As [`queue_create`](Self::queue_create); `NotFound` for a partition that the device has not.
    pub fn queue_create_on(&self, device: u32, partition: Option<PartitionId>) -> Result<QueueId> {
        let mut state = self.enter(device, "queue_create")?;
        if let Some(partition) = partition {
            state.units.check(device, partition)?;
        }
        let (agent, epoch) = state.agents.pop().unwrap_or_else(|| {
            state.next_agent += 1;
            (state.next_agent - 1, 0)
        });
        let id = QueueId(state.id());
        let nanos = state.host_nanos;
        state.queues.insert(
            id,
            Queue {
                device,
                agent,
                epoch,
                clock: Clock::default(),
                nanos,
                entries: VecDeque::new(),
                enqueued: 0,
                over: 0,
                busy: false,
                failure: None,
                capture: None,
                closing: false,
                partition,
                index: None,
                name: format!("queue {}", id.0).into(),
            },
        );
        Ok(id)
    }

    /// Makes a partition of the units `units` of a device. Partitions may have units in common.
    ///
    /// # Errors
    /// `InvalidArgument` for no units, or units that the device has not; `NotFound` for a device
    /// that does not exist; `DeviceLost`; an error of the fault plan.
    pub fn partition_create(&self, device: u32, units: Range<u32>) -> Result<PartitionId> {
        let mut state = self.enter(device, "partition_create")?;
        let id = PartitionId(state.id());
        state.units.add(id, device, units)?;
        Ok(id)
    }

    /// Destroys a partition. Its queues fail, since no unit runs their work any more; so do
    /// kernels of graphs on it.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn partition_destroy(&self, partition: PartitionId) -> Result<()> {
        let mut state = self.lock();
        state.units.remove(partition)?;
        let on = |(&id, q): (&QueueId, &Queue)| (q.partition == Some(partition)).then_some(id);
        let queues: Vec<QueueId> = state.queues.iter().filter_map(on).collect();
        queues.into_iter().for_each(|queue| state.fail_by_host(queue, ended()));
        Ok(())
    }

    /// Destroys a queue. Enqueued commands still run; the name is no longer valid.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_destroy(&self, queue: QueueId) -> Result<()> {
        let mut state = self.lock();
        state.queue(queue)?.closing = true;
        state.end_if_over(queue);
        Ok(())
    }

    /// The device of a queue.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_device(&self, queue: QueueId) -> Result<u32> {
        Ok(self.lock().queue(queue)?.device)
    }

    /// The cause of a queue's failure, if the queue has failed.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_failure(&self, queue: QueueId) -> Result<Option<QueueFailure>> {
        Ok(self.lock().queue(queue)?.failure.clone())
    }

    /// Fails a queue: its remaining commands do not run, except host functions with `always`. The
    /// first cause stays. A host function of the queue itself may call this.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_fail(&self, queue: QueueId, cause: Error) -> Result<()> {
        let mut state = self.lock();
        state.queue(queue)?;
        state.fail_by_host(queue, cause);
        Ok(())
    }

    /// Enqueues a command. Nothing runs.
    ///
    /// # Errors
    /// `InvalidArgument` for a command that can never run; `NotFound` for objects that do not
    /// exist; the cause of a failed queue; `DeviceLost`; an error of the fault plan. Nothing was
    /// enqueued then.
    pub fn enqueue(&self, queue: QueueId, command: Command) -> Result<()> {
        let mut state = self.enter_queue(queue, "enqueue")?;
        // The closures of a refused command are dropped after the lock is released.
        state.check(queue, &command)?;
        state.push(queue, command)
    }

    /// Enqueues several commands, all of them or none, in one call.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn submit(&self, queue: QueueId, commands: Vec<Command>) -> Result<()> {
        self.submit_all(queue, None, commands)
    }

    /// Like [`submit`](Self::submit), with an index of the caller. Reports and faults name the
    /// commands by this index instead of their place in the queue.
    ///
    /// # Errors
    /// As [`enqueue`](Self::enqueue).
    pub fn submit_as(&self, queue: QueueId, index: u64, commands: Vec<Command>) -> Result<()> {
        self.submit_all(queue, Some(index), commands)
    }

    fn submit_all(&self, queue: QueueId, index: Option<u64>, commands: Vec<Command>) -> Result<()> {
        let mut state = self.enter_queue(queue, "submit")?;
        commands.iter().try_for_each(|c| state.check(queue, c))?;
        state.queue(queue)?.index = index;
        let result = commands.into_iter().try_for_each(|c| state.push(queue, c));
        state.queue(queue)?.index = None;
        result
    }

    /// Sets the queue's name in faults and reports: `copies` instead of `queue 3`.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_set_name(&self, queue: QueueId, name: &str) -> Result<()> {
        self.lock().queue(queue)?.name = name.into();
        self.queue_report_as(queue, name, 0)
    }

    /// Sets the queue's name in reports alone. The indices of its commands begin after `first`
    /// ([`submit_as`](Self::submit_as)), and reports count from there.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_report_as(&self, queue: QueueId, name: &str, first: u64) -> Result<()> {
        let mut state = self.lock();
        state.queue(queue)?;
        state.detector.name(queue.0, name.into(), first);
        Ok(())
    }

    /// Sets the name in reports alone, and keeps the count of the indices.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn queue_rename(&self, queue: QueueId, name: &str) -> Result<()> {
        let mut state = self.lock();
        state.queue(queue)?;
        state.detector.rename(queue.0, name.into());
        Ok(())
    }

    /// Makes an event. With `timing` the event has a time.
    ///
    /// # Errors
    /// An error of the fault plan; `DeviceLost`.
    pub fn event_create(&self, device: u32, timing: bool) -> Result<EventId> {
        let mut state = self.enter(device, "event_create")?;
        let id = EventId(state.id());
        state.events.insert(id, Event { device, timing, last: None });
        Ok(id)
    }

    /// Destroys an event. Enqueued waits stay bound.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn event_destroy(&self, event: EventId) -> Result<()> {
        self.lock().events.remove(&event).map(drop).ok_or_else(|| missing(event))
    }

    /// Resets an event to the state of a new one.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn event_reset(&self, event: EventId) -> Result<()> {
        let mut state = self.lock();
        state.events.get_mut(&event).ok_or_else(|| missing(event))?.last = None;
        Ok(())
    }

    /// Returns whether a record of the event was ever enqueued.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn event_is_recorded(&self, event: EventId) -> Result<bool> {
        self.lock().events.get(&event).map(|e| e.last.is_some()).ok_or_else(|| missing(event))
    }

    /// The virtual time of an event's last record, in nanoseconds. `None` if the record has not run
    /// yet or a failed queue skipped it.
    ///
    /// # Errors
    /// `NotFound`; `InvalidArgument` for an event without timing.
    pub fn event_time(&self, event: EventId) -> Result<Option<u64>> {
        let state = self.lock();
        let event = state.events.get(&event).ok_or_else(|| missing(event))?;
        if !event.timing {
            return Err(Error::invalid("the event was made without timing"));
        }
        Ok(event.last.as_ref().and_then(|m| m.done.get()).filter(|d| !d.failed).map(|d| d.nanos))
    }

    /// Makes a semaphore of value 0.
    ///
    /// # Errors
    /// An error of the fault plan; `DeviceLost`.
    pub fn semaphore_create(&self, device: u32) -> Result<SemaphoreId> {
        let mut state = self.enter(device, "semaphore_create")?;
        let id = SemaphoreId(state.id());
        state.semaphores.insert(id, Semaphore::default());
        Ok(id)
    }

    /// Destroys a semaphore. Waits for a value that it has reached continue; waits for higher
    /// values fail.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn semaphore_destroy(&self, semaphore: SemaphoreId) -> Result<()> {
        let mut state = self.lock();
        let s = state
            .semaphores
            .get_mut(&semaphore)
            .filter(|s| !s.closing)
            .ok_or_else(|| missing(semaphore))?;
        s.closing = true;
        s.failed.get_or_insert_with(|| {
            Error::state("the semaphore was given up before it reached the value")
        });
        state.end_semaphores();
        state.progress();
        Ok(())
    }

    /// Raises a semaphore from the host. A lower value changes nothing.
    ///
    /// # Errors
    /// `NotFound`; the cause of a failed semaphore.
    pub fn semaphore_signal(&self, semaphore: SemaphoreId, value: u64) -> Result<()> {
        let mut state = self.lock();
        let (clock, nanos) = (state.host.clone(), state.host_nanos);
        let found = state.semaphores.get_mut(&semaphore).ok_or_else(|| missing(semaphore))?;
        if let Some(cause) = &found.failed {
            return Err(cause.clone());
        }
        found.signal(value, clock, nanos);
        state.host_clock();
        state.host_acts();
        state.progress();
        Ok(())
    }

    /// Fails a semaphore: queues that wait for a higher value than it has fail. The first cause
    /// stays.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn semaphore_fail(&self, semaphore: SemaphoreId, cause: Error) -> Result<()> {
        let mut state = self.lock();
        state
            .semaphores
            .get_mut(&semaphore)
            .ok_or_else(|| missing(semaphore))?
            .failed
            .get_or_insert(cause);
        state.progress();
        Ok(())
    }

    /// Makes a graph without nodes.
    ///
    /// # Errors
    /// An error of the fault plan.
    pub fn graph_create(&self) -> Result<GraphId> {
        let mut state = self.enter_host("graph_create")?;
        let id = GraphId(state.id());
        state.graphs.insert(id, Template::default());
        Ok(id)
    }

    /// Adds a node that waits for `deps`. A child graph is copied in its present state.
    ///
    /// # Errors
    /// `InvalidArgument` for invalid parameters or dependencies; `NotFound` for graphs that do not
    /// exist; an error of the fault plan.
    pub fn graph_add(&self, graph: GraphId, node: Node, deps: &[NodeId]) -> Result<NodeId> {
        self.enter_host("graph_add")?.add_node(graph, node, deps)
    }

    /// The number of nodes of a graph. A child graph counts as one node.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn graph_len(&self, graph: GraphId) -> Result<usize> {
        self.lock().graphs.get(&graph).map(Template::len).ok_or_else(|| missing(graph))
    }

    /// Destroys a graph template with its bodies. Executable graphs made from it stay.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn graph_destroy(&self, graph: GraphId) -> Result<()> {
        let mut state = self.lock();
        for graph in state.with_bodies(graph)? {
            let gone = state.graphs.remove(&graph).ok_or_else(|| missing(graph))?;
            state.trash.push(Box::new(gone));
        }
        Ok(())
    }

    /// Makes an executable graph of a device from a template. Each node takes some of the device's
    /// memory, by the seed: 256 to 2,048 bytes.
    ///
    /// # Errors
    /// `NotFound`; `OutOfMemory`; an error of the fault plan.
    pub fn instantiate(&self, device: u32, graph: GraphId) -> Result<ExecId> {
        let mut state = self.enter_host("instantiate")?;
        let flat = state.graphs.get(&graph).ok_or_else(|| missing(graph))?.flat(&state.graphs)?;
        // A generator of its own: the choices of steps stay those of the seed.
        let mut sizes = Rng::new(self.config().seed);
        let bytes = (0..flat.len()).map(|_| NODE_BYTES + sizes.below(NODE_SIZES) as u64).sum();
        state.space.charge(device, bytes)?;
        let exec = Exec::new(flat, (device, bytes));
        let id = ExecId(state.id());
        state.execs.insert(id, exec);
        Ok(id)
    }

    /// Updates nodes for later launches, all of them or none.
    ///
    /// # Errors
    /// `InvalidArgument` for nodes that do not exist, belong to child graphs, or have another kind;
    /// `NotFound`; an error of the fault plan.
    pub fn exec_update(&self, exec: ExecId, updates: &[(NodeId, NodeUpdate)]) -> Result<()> {
        let mut state = self.enter_host("exec_update")?;
        state.execs.get_mut(&exec).ok_or_else(|| missing(exec))?.update(updates)
    }

    /// The number of nodes that a launch runs, including those of child graphs.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn exec_len(&self, exec: ExecId) -> Result<usize> {
        self.lock().execs.get(&exec).map(Exec::len).ok_or_else(|| missing(exec))
    }

    /// Bytes of device memory that an executable graph takes.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn exec_bytes(&self, exec: ExecId) -> Result<u64> {
        self.lock().execs.get(&exec).map(|e| e.memory.1).ok_or_else(|| missing(exec))
    }

    /// Destroys an executable graph, and gives its memory back. Enqueued launches still run.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn exec_destroy(&self, exec: ExecId) -> Result<()> {
        let mut state = self.lock();
        let gone = state.execs.remove(&exec).ok_or_else(|| missing(exec))?;
        state.space.give_back(gone.memory);
        state.trash.push(Box::new(gone));
        Ok(())
    }

    /// Begins a capture: the queue's later commands become nodes of a new graph, each after the one
    /// before, and do not run.
    ///
    /// # Errors
    /// `InvalidState` if the queue captures already; `NotFound`; an error of the fault plan.
    pub fn capture_begin(&self, queue: QueueId) -> Result<()> {
        let mut state = self.enter_queue(queue, "capture_begin")?;
        if state.queue(queue)?.capture.is_some() {
            return Err(Error::state(format!("{queue:?} captures already")));
        }
        let id = GraphId(state.id());
        state.graphs.insert(id, Template::default());
        state.queue(queue)?.capture = Some((id, None));
        Ok(())
    }

    /// Ends a capture and returns its graph, which the caller owns.
    ///
    /// # Errors
    /// `InvalidState` if the queue does not capture; `NotFound`.
    pub fn capture_end(&self, queue: QueueId) -> Result<GraphId> {
        let mut state = self.lock();
        let capture = state.queue(queue)?.capture.take();
        capture.map(|c| c.0).ok_or_else(|| Error::state(format!("{queue:?} does not capture")))
    }

    /// Returns whether a queue captures.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn is_capturing(&self, queue: QueueId) -> Result<bool> {
        Ok(self.lock().queue(queue)?.capture.is_some())
    }
}

impl Semaphore {
    pub(super) fn signal(&mut self, value: u64, clock: Clock, nanos: u64) {
        if value > self.value && self.failed.is_none() {
            self.value = value;
            self.signalled.push_back(Raised { value, clock, nanos });
            if self.signalled.len() > RAISED {
                self.signalled.pop_front();
            }
        }
    }

    /// The clock that a wait for `value` learns, if the value is reached.
    pub(super) fn known(&self, value: u64) -> Option<&Raised> {
        self.signalled.iter().find(|r| r.value >= value)
    }
}

impl MachineState {
    /// Fails a queue; the first cause stays.
    fn fail_by_host(&mut self, queue: QueueId, cause: Error) {
        let index = self.queues.get(&queue).map_or(0, |q| q.over);
        let operation = super::Operation {
            name: "queue failed by the host".into(),
            queue: Some(queue.0),
            stream: None,
            index,
            node: None,
            scope: None,
        };
        self.fail(queue, QueueFailure { operation, cause });
    }

    /// Records a change that may end waits.
    pub(super) fn progress(&mut self) {
        self.changed = true;
        self.asked.clear();
    }

    /// A graph and the bodies in it.
    fn with_bodies(&self, graph: GraphId) -> Result<Vec<GraphId>> {
        let mut all = vec![graph];
        let mut next = 0;
        while let Some(&graph) = all.get(next) {
            all.extend(self.graphs.get(&graph).ok_or_else(|| missing(graph))?.bodies());
            next += 1;
        }
        Ok(all)
    }

    fn add_node(&mut self, graph: GraphId, node: Node, deps: &[NodeId]) -> Result<NodeId> {
        let unordered = self.disturb == Some(Disturbance::Unordered);
        let deps = if unordered { &[] } else { deps };
        if unordered {
            self.disturb = None;
        }
        if let Node::Record(e) | Node::WaitEvent(e) = &node
            && !self.events.contains_key(e)
        {
            return Err(missing(*e));
        }
        let bound = match &node {
            Node::Child(id) => {
                let flat = self.graphs.get(id).ok_or_else(|| missing(*id))?.flat(&self.graphs)?;
                Some(TemplateNode::Child(Arc::new(flat)))
            }
            Node::Conditional { kind, name, condition, body } => {
                if self.with_bodies(*body)?.contains(&graph) {
                    return Err(Error::invalid(format!("{graph:?} is a body of itself")));
                }
                let (name, condition) = ((&**name).into(), condition.clone());
                let part = Part { kind: *kind, name, condition };
                Some(TemplateNode::Conditional(Arc::new(part), *body))
            }
            Node::Meet(meet) => {
                Some(TemplateNode::Action(NodeAction::Meet(self.bind_meet(None, meet)?)))
            }
            _ => None,
        };
        self.graphs.get_mut(&graph).ok_or_else(|| missing(graph))?.add(node, deps, bound)
    }

    /// Binds a meeting; the use of a rank that was aborted or destroyed is reported.
    fn bind_meet(&mut self, device: Option<u32>, meet: &Meet) -> Result<BoundMeet> {
        if let Err(e) = self.meetings.usable(meet.comm) {
            self.detector.misused(e.to_string());
            return Err(e);
        }
        self.meetings.bind(device, meet)
    }

    /// Returns whether a command can be enqueued.
    fn check(&mut self, queue: QueueId, command: &Command) -> Result<()> {
        let q = self.queue(queue)?;
        if let Some(failure) = &q.failure {
            return Err(failure.cause.clone());
        }
        let (capturing, device) = (q.capture.is_some(), q.device);
        match command {
            Command::Kernel(k) => k.check(),
            Command::Copy(c) => c.check(),
            Command::Fill(c) => c.check(),
            Command::Record(e) | Command::WaitEvent(e) | Command::RequireEvent(e) => {
                self.events.contains_key(e).then_some(()).ok_or_else(|| missing(*e))
            }
            Command::WriteValue { addr, .. } | Command::WaitValue { addr, .. } => {
                let reached = self.space.resolve(AccessScope::Engine, *addr, 8, &mut Vec::new());
                match reached {
                    Ok(_) if addr.is_multiple_of(8) => Ok(()),
                    Ok(_) => {
                        Err(Error::invalid(format!("a word at {addr:#x} is not aligned to 8")))
                    }
                    Err(e) => Err(Error::invalid(e)),
                }
            }
            Command::Signal(s, _)
            | Command::SignalOnSuccess(s, _)
            | Command::WaitSemaphore(s, _) => {
                self.semaphores.contains_key(s).then_some(()).ok_or_else(|| missing(*s))
            }
            Command::Meet(meet) => self.bind_meet(Some(device), meet).map(drop),
            Command::Launch(e) => {
                let exec = self.execs.get(e).ok_or_else(|| missing(*e))?;
                let mut comms = exec.comms().iter();
                let used = comms.try_for_each(|&comm| self.meetings.usable(comm).map(drop));
                used.inspect_err(|e| self.detector.misused(e.to_string()))
            }
            Command::Free(addr) => self.space.allocation(*addr).map(drop),
            Command::Host { .. } | Command::Until { .. } | Command::Empty => Ok(()),
        }?;
        let stays = matches!(
            command,
            Command::Host { .. }
                | Command::Signal(..)
                | Command::SignalOnSuccess(..)
                | Command::RequireEvent(_)
                | Command::WaitSemaphore(..)
                | Command::Until { .. }
                | Command::Launch(_)
                | Command::Free(_)
        );
        if capturing && stays {
            return Err(Error::state(format!("{command:?} cannot be captured")));
        }
        Ok(())
    }

    /// Binds a command and appends it.
    pub(super) fn push(&mut self, queue: QueueId, mut command: Command) -> Result<()> {
        self.check(queue, &command)?;
        let of = self.queue(queue)?;
        if let Command::Kernel(kernel) = &mut command {
            kernel.partition = kernel.partition.or(of.partition);
        }
        if let Some((graph, last)) = of.capture {
            return self.capture(queue, graph, last, command);
        }
        let action = match command {
            Command::Kernel(k) => Action::Kernel(k),
            Command::Copy(c) => Action::Copy(c.normal()),
            Command::Fill(c) => Action::Fill(c),
            Command::Host { name, call, always } => {
                Action::Host { name: (&*name).into(), call, always }
            }
            Command::Record(e) => Action::Record(self.record(e)),
            Command::WaitEvent(e) => self.last_mark(e).map_or(Action::Empty, Action::WaitMark),
            Command::WriteValue { addr, value } => Action::WriteValue { addr, value },
            Command::WaitValue { addr, value } => Action::WaitValue { addr, value },
            Command::RequireEvent(e) => {
                self.last_mark(e).map_or(Action::Empty, Action::RequireMark)
            }
            Command::Signal(s, value) => Action::Signal(s, value),
            Command::SignalOnSuccess(s, value) => Action::SignalOnSuccess(s, value),
            Command::WaitSemaphore(s, value) => Action::WaitSemaphore(s, value),
            Command::Until { name, ready } => Action::Until { name, ready },
            Command::Meet(meet) => {
                let device = self.queue(queue)?.device;
                Action::Meet(self.bind_meet(Some(device), &meet)?)
            }
            Command::Launch(e) => Action::Graph(Box::new(self.launch(e)?)),
            Command::Free(addr) => Action::Free(addr),
            Command::Empty => Action::Empty,
        };
        self.append(queue, action)
    }

    /// Appends the mark of an allocation in the queue's order.
    pub(super) fn push_allocated(&mut self, queue: QueueId, addr: u64) -> Result<()> {
        self.check(queue, &Command::Empty)?;
        if self.queue(queue)?.capture.is_some() {
            return Err(Error::state("an allocation cannot be captured"));
        }
        self.append(queue, Action::Allocated { addr })
    }

    fn append(&mut self, queue: QueueId, action: Action) -> Result<()> {
        let regions = self.regions(&action);
        let (host, at) = (self.host_clock(), self.host_nanos);
        let is_call = matches!(action, Action::Host { .. });
        let (delay, last) = match self.disturb {
            Some(Disturbance::Delay(steps)) => (steps, false),
            Some(Disturbance::Reorder) => (0, true),
            Some(Disturbance::LateCallback(steps)) if is_call => (steps, false),
            _ => (0, false),
        };
        if delay != 0 || last {
            self.disturb = None;
        }
        let q = self.queue(queue)?;
        let index = q.index.unwrap_or(q.enqueued);
        q.enqueued += 1;
        let scope = Name::current();
        let begun = false;
        q.entries.push_back(Entry { action, index, host, at, regions, scope, delay, last, begun });
        self.progress();
        Ok(())
    }

    /// A new mark, which becomes the event's last record.
    fn record(&mut self, event: EventId) -> Arc<Mark> {
        let mark = Arc::new(Mark::default());
        if let Some(event) = self.events.get_mut(&event) {
            event.last = Some(mark.clone());
        }
        mark
    }

    fn last_mark(&self, event: EventId) -> Option<Arc<Mark>> {
        self.events.get(&event).and_then(|e| e.last.clone())
    }

    fn launch(&mut self, exec: ExecId) -> Result<Running> {
        self.launches += 1;
        let mut running = self.execs.get(&exec).ok_or_else(|| missing(exec))?.launch(self.launches);
        let nodes = running.nodes.clone();
        for (node, n) in nodes.iter().enumerate() {
            let mark = match n.action {
                NodeAction::Record(e) => Some(self.record(e)),
                NodeAction::Wait(e) => self.last_mark(e),
                _ => None,
            };
            running.marks.extend(mark.map(|m| (node as u32, m)));
        }
        Ok(running)
    }

    fn capture(
        &mut self,
        queue: QueueId,
        graph: GraphId,
        last: Option<NodeId>,
        command: Command,
    ) -> Result<()> {
        let node = match command {
            Command::Kernel(k) => Node::Kernel(k),
            Command::Copy(c) => Node::Copy(c),
            Command::Fill(c) => Node::Fill(c),
            Command::Record(e) => Node::Record(e),
            Command::WaitEvent(e) => Node::WaitEvent(e),
            Command::WriteValue { addr, value } => Node::WriteValue { addr, value },
            Command::WaitValue { addr, value } => Node::WaitValue { addr, value },
            Command::Meet(meet) => Node::Meet(meet),
            _ => Node::Empty,
        };
        let node = self.add_node(graph, node, last.as_slice())?;
        self.queue(queue)?.capture = Some((graph, Some(node)));
        Ok(())
    }

    /// Fails a queue; the first cause stays.
    pub(super) fn fail(&mut self, queue: QueueId, failure: QueueFailure) {
        if let Some(q) = self.queues.get_mut(&queue)
            && q.failure.is_none()
        {
            q.failure = Some(failure);
        }
        self.progress();
    }

    /// Removes the commands of a lost device's queue and releases the waits for them.
    pub(super) fn abandon(&mut self, queue: QueueId) {
        let Some(q) = self.queues.get_mut(&queue) else { return };
        q.over = q.enqueued;
        let entries = std::mem::take(&mut q.entries);
        for entry in &entries {
            self.let_go(queue, &entry.action);
        }
        self.trash.push(Box::new(entries));
        self.end_if_over(queue);
        self.progress();
    }

    /// Releases the waits for an action that will not run.
    pub(super) fn let_go(&mut self, queue: QueueId, action: &Action) {
        self.meetings.withdraw(queue);
        let Some(q) = self.queues.get(&queue) else { return };
        let cause =
            self.alive(q.device).err().or_else(|| q.failure.as_ref().map(|f| f.cause.clone()));
        let (nanos, clock) = (q.nanos, q.clock.clone());
        let done = |clock: Clock| Done { nanos, clock, failed: true };
        match action {
            // `set` keeps the first value, so a mark that is over stays unchanged.
            Action::Record(mark) => drop(mark.done.set(done(clock))),
            Action::Graph(g) => {
                for (node, mark) in &g.marks {
                    if matches!(g.nodes[*node as usize].action, NodeAction::Record(_)) {
                        drop(mark.done.set(done(clock.clone())));
                    }
                }
            }
            Action::Signal(s, _) => {
                if let Some(s) = self.semaphores.get_mut(s) {
                    s.failed.get_or_insert_with(|| {
                        cause.unwrap_or_else(|| Error::state("the queue has failed"))
                    });
                }
            }
            _ => {}
        }
    }

    /// Removes destroyed semaphores once no command can name them any more.
    pub(super) fn end_semaphores(&mut self) {
        if self.queues.values().all(|q| q.entries.is_empty()) {
            self.semaphores.retain(|_, s| !s.closing);
        }
    }

    /// Removes a destroyed queue once its commands are over.
    pub(super) fn end_if_over(&mut self, queue: QueueId) {
        let Some(q) = self.queues.get(&queue) else { return };
        if !q.closing || !q.entries.is_empty() || q.busy {
            return;
        }
        let agent = (q.agent, q.epoch);
        let gone = &mut self.gone[q.device as usize];
        gone.0.join(&q.clock);
        gone.1 = gone.1.max(q.nanos);
        self.agents.push(agent);
        self.queues.remove(&queue);
    }
}
