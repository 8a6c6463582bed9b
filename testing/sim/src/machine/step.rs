//! Steps: the selection and the execution of commands.
//!
//! # Protocol
//! Under the lock, the step lists the heads that can run, in the order of their queues. The seed
//! selects one, and it runs. A host function runs without the lock. Meanwhile its queue is busy, so
//! no step selects it; other threads (or the function itself) may make further steps.
//!
//! The step polls a kernel or condition that is not ready only after another change.
//!
//! This module must not know which threads wait.

use super::clock::Clock;
use super::command::{Action, Entry, HostFn, NodeAction, Running};
use super::conditional::Rounds;
use super::detect::{Actor, Ancestors, Operation};
use super::space::AccessScope;
use super::{
    FaultScope, MachineConfig, MachineState, Monitor, Queue, QueueFailure, QueueId, Ran, Stepping,
};
use leasehold_core::panics::caught;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Name};
use std::cell::Cell;

/// The virtual time of a host call, in nanoseconds.
const HOST_NANOS: u64 = 500;
/// The virtual time of the test of a condition, in nanoseconds.
const TEST_NANOS: u64 = 100;
/// The node number of a command outside a graph.
pub(super) const NO_NODE: u32 = u32::MAX;

thread_local! {
    /// The machine (its address) and the queue whose host function this thread runs.
    static CALLING: Cell<Option<(usize, QueueId)>> = const { Cell::new(None) };
    /// The depth of host functions on this thread: a host function may step, and so call another
    /// one.
    static DEPTH: Cell<usize> = const { Cell::new(0) };
}

/// The depth of host functions on this thread.
pub(super) fn depth() -> usize {
    DEPTH.get()
}

/// The result of a step.
enum Step {
    Ran,
    Nothing,
    /// A host function to be called without the lock.
    Call(QueueId, u32, HostFn),
}

/// The result of an action.
pub(super) enum Outcome {
    /// The action is over; its duration in nanoseconds.
    Done(u64),
    /// The action is not ready and is returned.
    Pending(Action),
    /// The action has begun, is not over and is returned.
    Begun(Action),
    Call(HostFn),
    /// A part of a graph is to run, or not to run.
    Tested(bool),
    /// A fault of the device.
    Fault(String),
    /// The failure of another object.
    Fail(Error),
}

/// The place of an action's execution.
#[derive(Clone)]
pub(super) struct CommandContext {
    pub(super) queue: QueueId,
    pub(super) device: u32,
    pub(super) agent: u32,
    pub(super) epoch: u64,
    pub(super) clock: Clock,
    pub(super) index: u64,
    pub(super) name: Arc<str>,
    pub(super) node: Option<(u64, u32, u32)>,
    pub(super) edges: Option<Arc<Ancestors>>,
    pub(super) rounds: Option<Rounds>,
    /// The node with which that node begins.
    pub(super) begins: u32,
    pub(super) regions: Vec<(u64, u64)>,
    pub(super) scope: Option<Name>,
}

impl CommandContext {
    pub(super) fn actor(&self) -> Actor<'_> {
        Actor {
            agent: self.agent,
            epoch: self.epoch,
            clock: &self.clock,
            name: &self.name,
            queue: Some(self.queue.0),
            index: self.index,
            node: self
                .node
                .zip(self.edges.as_deref())
                .map(|((launch, node, _), edges)| (launch, node, edges)),
            rounds: self.rounds.as_ref(),
            scope: self.scope.clone(),
        }
    }

    /// The same for what a kernel reads early. It comes after what precedes the node with which
    /// this one begins.
    pub(super) fn early_actor(&self) -> Actor<'_> {
        let mut actor = self.actor();
        if let Some((_, node, _)) = &mut actor.node {
            *node = self.begins;
        }
        actor
    }

    /// The operation, with the node's number in its own graph.
    pub(super) fn operation(&self) -> Operation {
        let node = self.node.map(|n| n.2);
        Operation {
            name: self.name.clone(),
            queue: Some(self.queue.0),
            stream: None,
            index: self.index,
            node,
            scope: self.scope.clone(),
        }
    }
}

impl Monitor {
    /// Runs one command (or one node of a graph) of one queue, selected by the seed. Returns
    /// whether a command could run.
    pub fn step(&self) -> bool {
        let mut state = self.lock();
        match state.step(&self.0.config) {
            Step::Ran => true,
            Step::Nothing => false,
            Step::Call(queue, node, call) => {
                drop(state);
                let me = Arc::as_ptr(&self.0) as usize;
                let outer = CALLING.replace(Some((me, queue)));
                DEPTH.set(DEPTH.get() + 1);
                let panic = caught(call).err();
                DEPTH.set(DEPTH.get() - 1);
                CALLING.set(outer);
                let mut state = self.lock();
                state.called(queue, node, panic);
                let owed = std::mem::take(&mut state.owed);
                drop(state);
                if owed {
                    self.run_until_idle();
                }
                true
            }
        }
    }

    /// Steps until no command can run. Returns the number of steps. With [`Stepping::Auto`], the
    /// thread of a host function that runs meanwhile does the same after the function.
    pub fn run_until_idle(&self) -> u64 {
        let mut steps = 0;
        while self.step() {
            steps += 1;
        }
        let mut state = self.lock();
        let called = state.queues.values().filter(|q| q.busy).count() > depth();
        state.owed |= called && self.0.config.stepping == Stepping::Auto;
        steps
    }

    /// Returns whether this thread runs a host function of this queue.
    #[must_use]
    pub fn is_calling(&self, queue: QueueId) -> bool {
        CALLING.get() == Some((Arc::as_ptr(&self.0) as usize, queue))
    }
}

/// The readiness of a queue's head.
#[derive(PartialEq, Eq, Clone, Copy)]
enum Ready {
    No,
    Yes,
    /// Ready if no other head can run.
    Last,
    /// Ready after some steps.
    Delayed,
}

impl MachineState {
    /// Selects a head and runs it.
    fn step(&mut self, config: &MachineConfig) -> Step {
        loop {
            let mut ready = Vec::new();
            let (mut last, mut delayed) = (Vec::new(), Vec::new());
            let ids: Vec<QueueId> = self.queues.keys().copied().collect();
            for id in ids {
                match self.ready(id) {
                    Ready::No => {}
                    Ready::Yes => ready.push(id),
                    Ready::Last => last.push(id),
                    Ready::Delayed => delayed.push(id),
                }
            }
            // Time passes for delayed heads.
            for id in &delayed {
                if let Some(head) = self.queues.get_mut(id).and_then(|q| q.entries.front_mut()) {
                    head.delay -= 1;
                }
            }
            if ready.is_empty() {
                ready = last;
            }
            while !ready.is_empty() {
                let at = self.rng.below(ready.len());
                match self.run(ready[at], config) {
                    Step::Nothing => drop(ready.swap_remove(at)),
                    step => return step,
                }
            }
            if delayed.is_empty() {
                return Step::Nothing;
            }
        }
    }

    fn ready(&mut self, id: QueueId) -> Ready {
        let Some(q) = self.queues.get_mut(&id) else { return Ready::No };
        if q.busy {
            return Ready::No;
        }
        let failed = q.failure.is_some();
        let Some(mut head) = q.entries.pop_front() else { return Ready::No };
        let ready = if failed {
            Ready::Yes
        } else if head.delay != 0 {
            Ready::Delayed
        } else {
            match &mut head.action {
                Action::Graph(g) => self.graph_ready(id, g),
                action if self.asked.contains(&(id, NO_NODE)) || self.blocked(id, action) => {
                    Ready::No
                }
                _ => Ready::Yes,
            }
        };
        let ready =
            if ready == Ready::Yes && head.last && !head.begun { Ready::Last } else { ready };
        if let Some(q) = self.queues.get_mut(&id) {
            q.entries.push_front(head);
        }
        ready
    }

    fn graph_ready(&self, id: QueueId, g: &Running) -> Ready {
        let can = g.left == 0 || g.ready.iter().any(|&n| self.node_ready(id, g, n));
        if can { Ready::Yes } else { Ready::No }
    }

    fn node_ready(&self, id: QueueId, g: &Running, node: u32) -> bool {
        if self.asked.contains(&(id, node)) {
            return false;
        }
        match &g.nodes[node as usize].action {
            NodeAction::Wait(_) => {
                g.marks.iter().find(|m| m.0 == node).is_none_or(|m| m.1.done.get().is_some())
            }
            NodeAction::WaitValue { addr, value } => {
                self.word(*addr).is_none_or(|now| now >= *value)
            }
            NodeAction::Meet(meet) => !self.meetings.is_blocked((id, node), meet),
            _ => true,
        }
    }

    /// The 64-bit word at an address; `None` without memory there (which is a fault once the action
    /// runs).
    pub(super) fn word(&self, addr: u64) -> Option<u64> {
        let at = self.space.resolve(AccessScope::Engine, addr, 8, &mut Vec::new()).ok()?;
        // SAFETY: eight aligned bytes that are mapped (checked). Other threads write them
        // atomically.
        Some(unsafe { &*at.cast::<AtomicU64>() }.load(Ordering::Acquire))
    }

    /// Returns whether an action must wait.
    fn blocked(&self, queue: QueueId, action: &Action) -> bool {
        match action {
            Action::Meet(meet) => self.meetings.is_blocked((queue, NO_NODE), meet),
            Action::WaitMark(mark) | Action::RequireMark(mark) => mark.done.get().is_none(),
            Action::WaitValue { addr, value } => self.word(*addr).is_some_and(|now| now < *value),
            Action::WaitSemaphore(s, value) => {
                self.semaphores.get(s).is_some_and(|s| s.failed.is_none() && s.value < *value)
            }
            _ => false,
        }
    }

    /// A description of the wait of a queue's head, for human readers; `None` if it does not wait.
    pub(super) fn waits_for(&self, id: QueueId, q: &Queue) -> Option<String> {
        let head = q.entries.front()?;
        let what = match &head.action {
            Action::WaitValue { addr, value } => {
                let now = self
                    .word(*addr)
                    .map_or_else(|| "which is not mapped".to_owned(), |w| format!("which is {w}"));
                format!("the word at {addr:#x}, {now}, to reach {value}")
            }
            Action::WaitSemaphore(s, value) => match self.semaphores.get(s) {
                Some(at) => format!("semaphore {} to go from {} to {value}", s.0, at.value),
                None => format!("semaphore {}, which is gone, to reach {value}", s.0),
            },
            Action::Meet(meet) => self.meetings.waits_for((id, NO_NODE), meet),
            Action::Graph(g) => {
                let mut ready = g.ready.iter().map(|&node| (node, &g.nodes[node as usize].action));
                let waits = ready.find_map(|(node, action)| match action {
                    NodeAction::Meet(meet) => Some(self.meetings.waits_for((id, node), meet)),
                    _ => None,
                });
                waits.unwrap_or_else(|| format!("{} nodes of a graph", g.left))
            }
            other => other.name().to_string(),
        };
        Some(format!("{}, submission {}, waits for {what}", q.name, head.index))
    }

    /// Runs the head of a queue.
    fn run(&mut self, id: QueueId, config: &MachineConfig) -> Step {
        let Some(q) = self.queues.get_mut(&id) else { return Step::Nothing };
        let Some(mut entry) = q.entries.pop_front() else { return Step::Nothing };
        if !entry.begun {
            entry.begun = true;
            q.epoch += 1;
            q.clock.set(q.agent, q.epoch);
            q.clock.join(&entry.host);
            q.nanos = q.nanos.max(entry.at);
        }
        if q.failure.is_some() {
            return self.skip(id, entry);
        }
        let (device, agent, epoch) = (q.device, q.agent, q.epoch);
        let mut place = CommandContext {
            queue: id,
            device,
            agent,
            epoch,
            clock: q.clock.clone(),
            index: entry.index,
            name: entry.action.name(),
            node: None,
            edges: None,
            rounds: None,
            begins: 0,
            regions: std::mem::take(&mut entry.regions),
            scope: entry.scope.clone(),
        };
        let action = std::mem::replace(&mut entry.action, Action::Empty);
        match action {
            Action::Graph(g) => self.run_graph(g, entry, place, config),
            action => match self.perform(&mut place, action) {
                Outcome::Pending(action) => {
                    entry.action = action;
                    entry.regions = place.regions;
                    self.asked.push((id, NO_NODE));
                    self.put_back(id, entry);
                    Step::Nothing
                }
                Outcome::Begun(action) => {
                    entry.action = action;
                    entry.regions = place.regions;
                    self.put_back(id, entry);
                    self.progress();
                    Step::Ran
                }
                Outcome::Call(call) => {
                    entry.action =
                        Action::Host { name: place.name, call: Box::new(|| {}), always: false };
                    self.put_back(id, entry);
                    self.busy(id);
                    Step::Call(id, NO_NODE, call)
                }
                outcome => {
                    self.settle(&place, outcome, config);
                    self.over(id);
                    Step::Ran
                }
            },
        }
    }

    fn put_back(&mut self, id: QueueId, entry: Entry) {
        if let Some(q) = self.queues.get_mut(&id) {
            q.entries.push_front(entry);
        }
    }

    /// Marks a queue whose host function is about to run. The host learns the queue's earlier work.
    fn busy(&mut self, id: QueueId) {
        let Some(q) = self.queues.get_mut(&id) else { return };
        q.busy = true;
        let (clock, nanos) = (q.clock.clone(), q.nanos);
        self.host_learns(&clock, nanos);
    }

    /// Runs one node of a graph, or ends a graph whose nodes are over.
    fn run_graph(
        &mut self,
        mut g: Box<Running>,
        mut entry: Entry,
        mut place: CommandContext,
        config: &MachineConfig,
    ) -> Step {
        let id = place.queue;
        let mut can: Vec<usize> =
            (0..g.ready.len()).filter(|&i| self.node_ready(id, &g, g.ready[i])).collect();
        while !can.is_empty() {
            let pick = self.rng.below(can.len());
            let at = can.swap_remove(pick);
            let node = g.ready[at];
            let action = g.action(node);
            place.name = action.name();
            let of = &g.nodes[node as usize];
            (place.node, place.begins) = (Some((g.launch, node, of.label)), of.begins);
            place.edges = Some(g.edges.clone());
            place.rounds = (!g.parts.is_empty()).then(|| g.rounds_of(node));
            match self.perform(&mut place, action) {
                Outcome::Pending(_) => self.asked.push((id, node)),
                Outcome::Begun(_) => {
                    entry.action = Action::Graph(g);
                    entry.regions = place.regions;
                    self.put_back(id, entry);
                    self.progress();
                    return Step::Ran;
                }
                Outcome::Call(call) => {
                    g.ready.swap_remove(at);
                    entry.action = Action::Graph(g);
                    entry.regions = place.regions;
                    self.put_back(id, entry);
                    self.busy(id);
                    return Step::Call(id, node, call);
                }
                outcome => {
                    g.ready.swap_remove(at);
                    let outcome = match outcome {
                        Outcome::Tested(go_on) => match g.tested(node, go_on, config.loop_bound) {
                            Ok(()) => Outcome::Done(TEST_NANOS),
                            Err(text) => Outcome::Fault(text),
                        },
                        outcome => {
                            g.finish(node);
                            outcome
                        }
                    };
                    self.settle(&place, outcome, config);
                    self.after_node(id, g, entry, place.regions);
                    return Step::Ran;
                }
            }
        }
        let over = g.left == 0;
        entry.action = Action::Graph(g);
        entry.regions = place.regions;
        self.put_back(id, entry);
        if !over {
            return Step::Nothing;
        }
        self.drop_head(id);
        self.over(id);
        Step::Ran
    }

    /// Returns a graph to its queue, or ends it.
    fn after_node(
        &mut self,
        id: QueueId,
        g: Box<Running>,
        mut entry: Entry,
        regions: Vec<(u64, u64)>,
    ) {
        if self.queues.get(&id).is_none_or(|q| self.lost[q.device as usize].is_some()) {
            // This node lost the device.
            self.let_go(id, &Action::Graph(g));
            return;
        }
        let over = g.left == 0;
        entry.action = Action::Graph(g);
        entry.regions = regions;
        if over {
            self.trash.push(Box::new(entry));
            self.over(id);
        } else {
            self.put_back(id, entry);
        }
    }

    fn drop_head(&mut self, id: QueueId) {
        if let Some(entry) = self.queues.get_mut(&id).and_then(|q| q.entries.pop_front()) {
            self.trash.push(Box::new(entry));
        }
    }

    /// Skips a command of a failed queue: the command does not run, but waits for it are released.
    fn skip(&mut self, id: QueueId, entry: Entry) -> Step {
        self.let_go(id, &entry.action);
        let mut entry = entry;
        match std::mem::replace(&mut entry.action, Action::Empty) {
            Action::Host { name, call, always: true } => {
                entry.action = Action::Host { name, call: Box::new(|| {}), always: false };
                self.put_back(id, entry);
                self.busy(id);
                return Step::Call(id, NO_NODE, call);
            }
            Action::Free(addr) => self.free_at(addr),
            other => self.trash.push(Box::new(other)),
        }
        self.over(id);
        Step::Ran
    }

    /// Completes a host function.
    fn called(&mut self, id: QueueId, node: u32, panic: Option<String>) {
        let Some(q) = self.queues.get_mut(&id) else { return };
        q.busy = false;
        q.nanos += HOST_NANOS;
        let (nanos, device) = (q.nanos, q.device);
        // The host's actions come before the queue's later ones.
        let host = self.host_clock();
        self.host_acts();
        self.learn(id, &host, nanos);
        if self.lost[device as usize].is_some() {
            self.end_if_over(id);
            self.progress();
            return;
        }
        let Some(mut entry) = self.queues.get_mut(&id).and_then(|q| q.entries.pop_front()) else {
            return;
        };
        let (index, scope) = (entry.index, entry.scope.clone());
        let action = std::mem::replace(&mut entry.action, Action::Empty);
        let mut name: Arc<str> = "host function".into();
        let mut label = None;
        match action {
            Action::Graph(mut g) => {
                let n = &g.nodes[node as usize];
                label = Some(n.label);
                if let NodeAction::Host { name: its, .. } = &n.action {
                    name = its.clone();
                }
                g.finish(node);
                let over = g.left == 0;
                entry.action = Action::Graph(g);
                if over {
                    self.trash.push(Box::new(entry));
                    self.over(id);
                } else {
                    self.put_back(id, entry);
                }
            }
            Action::Host { name: its, .. } => {
                name = its;
                self.over(id);
            }
            _ => self.over(id),
        }
        let operation =
            Operation { name, queue: Some(id.0), stream: None, index, node: label, scope };
        self.ran(operation.clone(), nanos);
        if let Some(text) = panic {
            let cause = self.fault(&operation, text);
            self.fail(id, QueueFailure { operation, cause });
        }
    }

    /// Completes a command.
    fn over(&mut self, id: QueueId) {
        if let Some(q) = self.queues.get_mut(&id) {
            q.over += 1;
        }
        self.end_if_over(id);
        if self.semaphores.values().any(|s| s.closing) {
            self.end_semaphores();
        }
        self.progress();
        let MachineState { detector, host, queues, .. } = self;
        detector.compact(|| {
            let mut known = host.clone();
            queues
                .values()
                .filter(|q| q.busy || !q.entries.is_empty())
                .for_each(|q| known.meet(&q.clock));
            known
        });
    }

    fn ran(&mut self, operation: Operation, nanos: u64) {
        self.steps += 1;
        self.nanos = self.nanos.max(nanos);
        self.progress();
        if self.tracing {
            self.trace.push(Ran { operation, nanos });
        }
    }

    /// Applies the result of an action.
    fn settle(&mut self, place: &CommandContext, outcome: Outcome, config: &MachineConfig) {
        let mut end = self.nanos;
        if let Some(q) = self.queues.get_mut(&place.queue) {
            if let Outcome::Done(nanos) = outcome {
                q.nanos += nanos;
            }
            end = q.nanos;
        }
        self.ran(place.operation(), end);
        match outcome {
            Outcome::Fault(text) => {
                let operation = place.operation();
                let cause = self.fault(&operation, text);
                let text = cause.to_string();
                self.fail(place.queue, QueueFailure { operation, cause });
                if config.fault_scope == FaultScope::Device {
                    self.lose(place.device, &text);
                }
            }
            Outcome::Fail(cause) => {
                // Above such a device nobody knows of failed queues.
                let lost =
                    config.fault_scope == FaultScope::Device && matches!(cause, Error::Mismatch(_));
                let text = cause.to_string();
                self.fail(place.queue, QueueFailure { operation: place.operation(), cause });
                if lost {
                    self.lose(place.device, &text);
                }
            }
            Outcome::Done(_)
            | Outcome::Pending(_)
            | Outcome::Begun(_)
            | Outcome::Call(_)
            | Outcome::Tested(_) => {}
        }
    }
}
