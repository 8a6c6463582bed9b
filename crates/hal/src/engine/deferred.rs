//! Deferred submissions: work that the host holds back, and how it is resumed.
//!
//! A submission is kept as a [`Job`] from its first operation that needs the host. Such an
//! operation is one of these:
//! - a wait for a host timeline, for another backend's timeline, or for a value that its own stream
//!   holds back
//! - a host call
//! - a foreign call with other operations behind it in its submission
//! - a graph with host calls
//!
//! Every later submission on the stream queues behind the job, until the stream holds nothing back.
//! The driver never gets work that waits for the host.
//!
//! # Protocol
//! One thread at a time resumes a stream (`PumpState::Pumping`). The thread works without the lock,
//! and takes the lock for each driver call. Another thread that comes meanwhile sets `again` and
//! returns. A host call runs on a thread of the backend (`PumpState::Calling`). The call starts
//! once the device and the host's part are done with all before it.
//!
//! The thread that has the turn drops a submission that is over or has failed. So a thread that
//! observes the value finds everything released.
//!
//! A wait is recorded in [`Timelines`] *before* the job is examined, so no
//! wake-up is lost.
//!
//! This module must not know threads.

use crate::engine::driver::{CompletionAction, DriverDevice, DriverStream, GraphSteps, Sink};
use crate::engine::prepared::{Preparation, Ready};
use crate::engine::state::{BlockedOn, Job, PumpState, State, StreamCore};
use crate::engine::steps::Step;
use crate::engine::timelines::{Origin, Timelines};
use crate::{HostCall, Op, OpList};
use leasehold_core::panics::quietly;
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, MutexGuard};
use leasehold_core::{Error, Result, TimelineId, Timepoint, VALUE_LIMIT};
use std::time::Duration;

/// Resumes the streams that wait for `timeline` up to `value`. The caller holds no stream's lock.
pub(crate) fn resume_waiting<N: DriverStream>(
    timelines: &Timelines<StreamCore<N>>,
    timeline: TimelineId,
    value: u64,
) {
    while timelines.has_waiting() {
        let some = timelines.take_waiting(timeline, value);
        if some[0].is_none() {
            return;
        }
        for stream in some.into_iter().flatten() {
            if let Some(stream) = stream.upgrade() {
                stream.pump();
            }
        }
    }
}

/// Takes an operation's preparation.
fn take_prepared<N: DriverStream>(
    prepared: &mut Vec<(usize, N::Preparation)>,
    index: usize,
) -> Option<Preparation<N>> {
    let at = prepared.iter().position(|(i, _)| *i == index)?;
    Some(Preparation::Driver(prepared.swap_remove(at).1))
}

/// The outcome of running a job.
enum Outcome {
    Done,
    Blocked,
    Call,
    Failed(Error),
}

/// The next step of the host with an operation.
enum Next<N: DriverStream> {
    /// The operation can be given to the driver, with this preparation if it needs one.
    Give(Option<Preparation<N>>),
    /// The timepoint that the operation waits for has failed.
    Failed(Error),
    /// The operation is a host call, and everything before it is over.
    Call,
    /// The operation must wait.
    Blocked,
    /// The operation is done.
    Over,
    /// A graph's step is done.
    Step,
}

impl<N: DriverStream> StreamCore<N> {
    /// Defers a whole submission behind those that are deferred already.
    pub(crate) fn defer(
        &self,
        mut state: MutexGuard<'_, State<N>>,
        ops: &[Op<'_>],
        prepared: Vec<(usize, N::Preparation)>,
    ) -> Result<u64> {
        let value = self.owner.advance()?;
        let job = self.job(value, ops, prepared);
        state.deferred.push_back(job);
        Ok(value)
    }

    /// Defers the rest of a submission whose value was taken.
    pub(crate) fn defer_rest(
        &self,
        mut state: MutexGuard<'_, State<N>>,
        value: u64,
        ops: &[Op<'_>],
        prepared: Vec<(usize, N::Preparation)>,
    ) -> u64 {
        let job = self.job(value, ops, prepared);
        state.deferred.push_back(job);
        value
    }

    fn job(&self, value: u64, ops: &[Op<'_>], prepared: Vec<(usize, N::Preparation)>) -> Job<N> {
        let mut list = OpList::new();
        for op in ops {
            list.push(op);
            match op {
                Op::Wait(p) => self.note_wait(*p),
                Op::Graph(exec) => {
                    // SAFETY: graphs of a submission belong to this device (the submitter's
                    // promise).
                    unsafe { N::graph(exec) }.steps().for_each_wait(|p| self.note_wait(p));
                }
                _ => {}
            }
        }
        Job { value, ops: list, prepared, next: 0, step: 0 }
    }

    /// Records that this stream waits for a timepoint.
    pub(crate) fn note_wait(&self, point: Timepoint) {
        self.owner.learn(point);
        if matches!(point.timeline().check(point.value()), Ok(false)) {
            let over = self.core.tables.note_wait(point, &self.me);
            over.iter().for_each(|stream| stream.enlist());
        }
    }

    /// Resumes the deferred submissions, as far as possible. The caller holds no lock. The call
    /// never blocks on the device.
    pub(crate) fn pump(&self) {
        let mut progressed = false;
        let mut attention = false;
        let mut state = self.state.lock();
        loop {
            if state.pump != PumpState::Idle {
                state.again = true;
                break;
            }
            let Some(mut job) = state.deferred.pop_front() else { break };
            state.pump = PumpState::Pumping;
            state.again = false;
            state.blocked_on = BlockedOn::Backend;
            drop(state);
            let (outcome, value) = (self.run(&mut job), job.value);
            if let Outcome::Failed(cause) = &outcome {
                // The poison comes before the turn is free: the thread that takes the turn next
                // must not run later jobs.
                self.owner.poison(value, cause.clone());
            }
            let rest = match outcome {
                Outcome::Blocked | Outcome::Call => Some(job),
                Outcome::Done | Outcome::Failed(_) => {
                    self.release(value, job);
                    None
                }
            };
            state = self.state.lock();
            state.pump = PumpState::Idle;
            match outcome {
                Outcome::Done => {
                    self.issued.store(value, Ordering::Release);
                    progressed = true;
                }
                Outcome::Blocked => {
                    rest.into_iter().for_each(|job| state.deferred.push_front(job));
                    if !state.again && !self.timeline().failed(value) {
                        attention = state.needs_completion_thread();
                        break;
                    }
                }
                Outcome::Call => {
                    state.pump = PumpState::Calling;
                    drop(state);
                    self.progress(progressed);
                    if let (Some(stream), Some(job)) = (self.me.upgrade(), rest) {
                        self.core.threads.call(stream, job);
                    }
                    return;
                }
                Outcome::Failed(cause) => {
                    drop(state);
                    self.progress(progressed);
                    self.fail(value, cause);
                    return;
                }
            }
        }
        let signalled =
            if progressed && self.wanted.load(Ordering::Acquire) > self.timeline().completed() {
                attention = true;
                self.signal_locked(&mut state)
            } else {
                Ok(())
            };
        drop(state);
        self.note_unsignalled(signalled);
        self.progress(progressed);
        if attention {
            self.enlist();
        }
        if self.timeline().failed(VALUE_LIMIT) {
            self.finish_failed();
        }
    }

    /// Drops submissions from `value` on, which may hold user objects. The caller has the turn, so
    /// that no thread publishes their values before. A destructor that waits for them gets an
    /// error.
    pub(crate) fn release<T>(&self, value: u64, held: T) {
        quietly(|| self.timeline().run_call(value, || drop(held)));
    }

    /// Resumes the streams that wait for values which the driver has got by now.
    fn progress(&self, progressed: bool) {
        if progressed {
            let issued = self.issued.load(Ordering::Acquire);
            resume_waiting(&self.core.tables, self.timeline().id(), issued);
        }
    }

    /// Runs a job as far as possible.
    fn run(&self, job: &mut Job<N>) -> Outcome {
        loop {
            if self.timeline().failed(job.value) {
                return Outcome::Failed(Error::state("failed before"));
            }
            let Some(op) = job.ops.get(job.next) else { return Outcome::Done };
            let next = match &op {
                Op::Foreign(call) => self.foreign(call, job.value).map(|()| Next::Over),
                Op::Host(_) => self.at_host_call(job.value),
                Op::Graph(exec) => {
                    // SAFETY: graphs of a submission belong to this device (the submitter's
                    // promise).
                    let program = unsafe { N::graph(exec) };
                    if program.steps().is_plain() {
                        Ok(Next::Give(None))
                    } else {
                        self.next_step(job, program)
                    }
                }
                other => self.prepare(other).map(|ready| match ready {
                    Ready::Blocked => Next::Blocked,
                    Ready::Failed(cause) => Next::Failed(cause),
                    Ready::Now(None) => Next::Give(take_prepared(&mut job.prepared, job.next)),
                    Ready::Now(wait) => Next::Give(wait),
                }),
            };
            match next {
                Ok(Next::Over) => {}
                Ok(Next::Step) => {
                    job.step += 1;
                    continue;
                }
                Ok(Next::Blocked) => {
                    self.note_blocked(&op);
                    return Outcome::Blocked;
                }
                Ok(Next::Call) => return Outcome::Call,
                Ok(Next::Failed(cause)) => {
                    return Outcome::Failed(self.inherited(&op, job.value, cause));
                }
                Ok(Next::Give(preparation)) => {
                    let mut state = self.state.lock();
                    if !self.native().reserve() {
                        // The completion thread tries again. A wait is resolved again then.
                        state.blocked_on = BlockedOn::Room;
                        drop(state);
                        if let Some(Preparation::Driver(own)) = preparation {
                            job.prepared.push((job.next, own));
                        }
                        return Outcome::Blocked;
                    }
                    if let Op::Graph(exec) = &op
                        // SAFETY: graphs of a submission belong to this device (the submitter's
                        // promise).
                        && let program = unsafe { N::graph(exec) }
                        && !program.steps().is_plain()
                    {
                        let given = self.give_step(&mut state, job, exec, program, preparation);
                        drop(state);
                        if let Err(e) = given {
                            return Outcome::Failed(self.failure(&op, job.value, e));
                        }
                        job.step += 1;
                        continue;
                    }
                    let ops = std::iter::once((&op, preparation));
                    // SAFETY: an operation of a submission that is not over, for which its
                    // submitter vouched.
                    let given = unsafe { self.issue(&mut state, job.value, ops, true) };
                    drop(state);
                    if let Err(refusal) = given {
                        return Outcome::Failed(self.failure(&op, job.value, refusal.error));
                    }
                }
                Err(e) => return Outcome::Failed(self.failure(&op, job.value, e)),
            }
            job.next += 1;
            job.step = 0;
        }
    }

    /// Records whether the blocked operation waits for a timeline that nothing of this backend
    /// advances. The call asks the owner of such a timeline to publish: another backend may make
    /// progress only when it is asked.
    fn note_blocked(&self, op: &Op<'_>) {
        let foreign = |p: Timepoint| {
            let is = match self.core.tables.origin(p.timeline_id()) {
                Some(Origin::HostTimeline) => false,
                Some(Origin::Stream(source)) => source.strong_count() == 0,
                None => true,
            };
            if is {
                // The timeline shows the outcome, and the completion thread checks the timeline
                // again.
                let _ = p.timeline().wait(p.value(), Some(Duration::ZERO));
            }
            is
        };
        let is = match op {
            Op::Wait(p) => foreign(*p),
            Op::Graph(exec) => {
                let mut any = false;
                // SAFETY: graphs of a submission belong to this device (the submitter's promise).
                unsafe { N::graph(exec) }.steps().for_each_wait(|p| any |= foreign(p));
                any
            }
            _ => false,
        };
        self.state.lock().blocked_on = if is { BlockedOn::Others } else { BlockedOn::Backend };
    }

    /// Whether everything before a host call is over, on the device and on the host.
    fn at_host_call(&self, value: u64) -> Result<Next<N>> {
        let mut state = self.state.lock();
        if state.dirty {
            let flagged = state.fence.as_ref().is_some_and(|f| f.load(Ordering::Acquire));
            let over = if flagged { self.native().is_done_at_call()? } else { self.query()? };
            if !over {
                if state.fence.is_none() {
                    let flag = Arc::new(AtomicBool::new(false));
                    let (set, waker) = (flag.clone(), self.core.threads.waker());
                    let call = Box::new(move || {
                        set.store(true, Ordering::Release);
                        waker.wake();
                    });
                    match self.native().host_function(call) {
                        Ok(()) => {}
                        // The set flag makes the completion thread look again soon.
                        Err(Error::Occupied { .. }) => flag.store(true, Ordering::Release),
                        Err(e) => return Err(e),
                    }
                    state.fence = Some(flag);
                }
                return Ok(Next::Blocked);
            }
            state.dirty = false;
        }
        drop(state);
        let issued = self.issued.load(Ordering::Acquire);
        self.note_failure();
        match self.run_host_part(value, issued) {
            Some(publish) => {
                self.owner.complete(publish);
                self.state.lock().fence = None;
                match self.timeline().check(value) {
                    Err(cause) => Ok(Next::Failed(cause)),
                    Ok(_) => Ok(Next::Call),
                }
            }
            None => {
                // Another thread is running the actions, and does not know that this job waits for
                // them. Or a wait for another stream is not over. The set flag makes the completion
                // thread check again soon.
                self.state.lock().fence = Some(Arc::new(AtomicBool::new(true)));
                Ok(Next::Blocked)
            }
        }
    }

    /// Runs a library's call without a lock.
    fn foreign(&self, call: &crate::ForeignCall, value: u64) -> Result<()> {
        self.state.lock().dirty = true;
        self.native().run_foreign(call, value)
    }

    /// The preparation of a graph's next step.
    fn next_step(&self, job: &Job<N>, program: &N::Graph) -> Result<Next<N>> {
        match program.steps().step(job.step) {
            None => Ok(Next::Over),
            Some(Step::Run(_) | Step::Copy(_)) => Ok(Next::Give(None)),
            Some(Step::Call(_)) => self.at_host_call(job.value),
            Some(Step::Foreign(call)) => self.foreign(&call, job.value).map(|()| Next::Step),
            Some(Step::Wait(point)) => self.resolve(point).map(|ready| match ready {
                Ready::Blocked => Next::Blocked,
                Ready::Failed(cause) => Next::Failed(cause),
                Ready::Now(wait) => Next::Give(wait),
            }),
        }
    }

    /// Gives a graph's next step to the driver, in the lock.
    fn give_step(
        &self,
        state: &mut State<N>,
        job: &Job<N>,
        exec: &leasehold_core::Lease<dyn crate::GraphExec>,
        program: &N::Graph,
        preparation: Option<Preparation<N>>,
    ) -> Result<()> {
        let step = program.steps().step(job.step);
        if let Some(Step::Copy(copy)) = step {
            let op = Op::Copy(copy);
            let ops = std::iter::once((&op, None));
            // SAFETY: a node of a plan whose maker vouched for it whenever the graph runs.
            let given = unsafe { self.issue(state, job.value, ops, true) };
            return given.map_err(|r| r.error);
        }
        let mut sink = Sink { value: job.value, host: &self.host, accepted: true };
        let mut passed = None;
        let given = self.native().enter().and_then(|mut entry| {
            let given = match (step, preparation) {
                (Some(Step::Run(segment)), _) => {
                    state.dirty = true;
                    // SAFETY: the submission, which is not over, keeps the graph and the memory of
                    // its nodes.
                    unsafe { self.native().launch(&mut entry, exec, segment, &mut sink) }
                }
                (_, Some(Preparation::Wait(wait))) => {
                    state.dirty = true;
                    let given = self.native().encode_wait(&mut entry, &wait.mark);
                    passed = given.is_ok().then_some(wait);
                    given
                }
                _ => Ok(()),
            };
            // Also after an error: a submission that was begun is ended.
            given.and(self.native().leave(entry))
        });
        if let Some(passed) = passed.and_then(|wait| wait.passed) {
            self.host.leave(job.value, CompletionAction::Passed(passed));
        }
        given.map_err(|e| self.core.device.note(e))
    }

    /// Runs the host call at the front of a job, then resumes the stream. A thread of the backend
    /// calls this function, without any lock.
    pub(crate) fn run_call(&self, mut job: Job<N>) {
        let (_id, value) = (self.timeline().id(), job.value);
        let found = match job.ops.get(job.next) {
            Some(Op::Host(call)) => Some((call.clone(), false)),
            Some(Op::Graph(exec)) => {
                // SAFETY: graphs of a submission belong to this device (the submitter's promise).
                match unsafe { N::graph(exec) }.steps().step(job.step) {
                    Some(Step::Call(call)) => Some((call, true)),
                    _ => None,
                }
            }
            _ => None,
        };
        let result = match &found {
            Some((call, _)) => {
                // An error is foreign code too: its text and its drop do not unwind.
                self.timeline().run_call(value, || call.run())
            }
            None => Err(Error::state("no host call where one was")),
        };
        let failed = match (result, &found) {
            (Ok(()), Some((_, true))) => {
                job.step += 1;
                None
            }
            (Ok(()), _) => {
                job.next += 1;
                job.step = 0;
                None
            }
            (Err(e), call) => {
                let name = call
                    .as_ref()
                    .map_or_else(String::new, |(call, _): &(HostCall, bool)| Op::Host(call).name());
                Some(self.fault(name, value, &e))
            }
        };
        drop(found);
        let rest = match &failed {
            None => Some(job),
            Some(cause) => {
                // The poison comes before the turn is free: the thread that takes the turn next
                // must not run later jobs.
                self.owner.poison(value, cause.clone());
                self.release(value, job);
                None
            }
        };
        let mut state = self.state.lock();
        state.pump = PumpState::Idle;
        // The work still moves: this thread resumes it below.
        state.again = true;
        rest.into_iter().for_each(|job| state.deferred.push_front(job));
        drop(state);
        if let Some(cause) = failed {
            self.fail(value, cause);
        }
        self.pump();
        self.finish_failed();
    }

    /// Serves a stream on behalf of the completion thread: resumes its jobs and publishes its
    /// values. Returns whether the stream made progress.
    pub(crate) fn serve(&self, look: bool) -> bool {
        let timeline = self.timeline();
        let before = (timeline.completed(), self.issued.load(Ordering::Acquire));
        self.pump();
        let aim = self.wanted.load(Ordering::Acquire).min(self.issued.load(Ordering::Acquire));
        if timeline.completed() < aim {
            self.poll();
            if look && timeline.completed() < aim {
                // A loss is settled within the call. Any other error shows again at the next query.
                let _ = self.look();
            }
        }
        self.finish_failed();
        before != (timeline.completed(), self.issued.load(Ordering::Acquire))
    }
}
