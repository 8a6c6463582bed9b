//! The steps of a program, each by the calls of a border.

use super::{EMPTY, Outcome, Own, Raisable, Recorded, Signal, Trouble, World, get, wrong};
use crate::kernels::Params;
use crate::model::Planned;
use crate::options::Border;
use crate::prelude::{Call, open, refuses, try_launch};
use crate::scenes;
use crate::step::{
    FAR_STREAM, Node, Read, Slot, Span, Step, TEMPS, Work, count_down, is_far, is_far_stream,
    rounds_left,
};
use crate::work::{self, compare, operands};
use leasehold::backend::sync::atomic::Ordering;
use leasehold::graph::GraphBudget;
use leasehold::{Buffer, Current, Error, Lease, Operand, Result, Runtime, Stream, View};
use std::time::Duration;

impl World {
    pub(super) fn step(&self, planned: &Planned, own: &mut Own) -> Outcome {
        let (runtime, border) = (&self.runtime, self.border);
        match planned.step {
            Step::Stream(s, priority) => {
                let made = border.create_stream(&self.runtime(is_far_stream(s))?, priority)?;
                self.streams[usize::from(s)].put(made);
            }
            Step::DropStream(s) => drop(self.streams[usize::from(s)].take()),
            Step::Alloc { slot, len, stream } => {
                let made = border.alloc(&self.stream(stream)?, len.into())?;
                self.buffers[usize::from(slot)].put(made);
            }
            Step::New { slot, len, seed } => {
                let made = border.create(&self.runtime(is_far(slot))?, seed, len)?;
                self.buffers[usize::from(slot)].put(made);
            }
            Step::Pin { slot, len } => {
                let made = border.alloc_pinned(runtime, len.into())?;
                self.buffers[usize::from(slot)].put(made);
            }
            Step::Drop(slot) => drop(self.buffers[usize::from(slot)].take()),
            Step::Clone(slot) => {
                let kept = get(&self.buffers, slot).map(|buffer| border.keep(buffer));
                own.clones.push_back(kept.transpose()?);
            }
            Step::Unclone => drop(own.clones.pop_front()),
            Step::Run(stream, ref work) => {
                let stream = self.stream(stream)?;
                self.work(&stream, work, &|slot| self.buffer(slot))?;
            }
            Step::Session(stream, ref works) => self.session(&self.stream(stream)?, works)?,
            Step::Try(stream, ref work) => {
                let (stream, to) = (self.stream(stream)?, self.buffer(work.to.slot)?);
                let from = work
                    .from
                    .iter()
                    .map(|s| self.buffer(s.slot))
                    .collect::<std::result::Result<Vec<_>, _>>()?;
                let operands = operands(work, &to, &from)?;
                try_launch(&stream, self.call(work, &operands))?;
            }
            Step::Check(read, span) => self.check(read, span, planned, &mut own.bytes)?,
            Step::Sync(s) => border.synchronize(&self.stream(s)?)?,
            Step::Query(s) => drop(border.query(&self.stream(s)?)?),
            Step::Flush(s) => border.flush(&self.stream(s)?)?,
            Step::SyncDevice => border.synchronize_device(runtime)?,
            Step::Enter(s) => {
                let entered = self.stream(s).and_then(|stream| {
                    let guard = stream.enter()?;
                    Ok((guard, stream))
                });
                match entered {
                    Ok(entered) => own.entered.push(Some(entered)),
                    Err(e) => {
                        own.entered.push(None);
                        return Err(e);
                    }
                }
            }
            Step::Leave => {
                drop(own.entered.pop());
                let last = own.entered.iter().rev().flatten().next();
                match (last, Current::get()) {
                    (None, Err(_)) => {}
                    (Some((_, stream)), Ok(current)) if current.stream().same(stream) => {}
                    (_, got) => return wrong(format!("the thread's current context is {got:?}")),
                }
            }
            Step::Call { stream, once } => {
                let (stream, calls) = (self.stream(stream)?, self.calls.clone());
                let count = move || {
                    calls.fetch_add(1, Ordering::SeqCst);
                    Ok(())
                };
                border.host_call(&stream, once, count)?;
            }
            Step::Complete(s) => border.complete(&self.stream(s)?, &self.completions)?,
            Step::Open => {
                let Some(device) = self.far_device else {
                    return wrong("there is no other device");
                };
                let far = open(runtime.context(), device)?;
                self.streams[usize::from(FAR_STREAM)].put(far.stream().clone());
                self.far.put(far);
            }
            Step::Close => {
                let streams =
                    [FAR_STREAM, FAR_STREAM + 1].map(|s| self.streams[usize::from(s)].take());
                let far = self.far.take().ok_or(EMPTY)?;
                drop(streams);
                far.close(Duration::from_secs(20))?;
            }
            Step::Closed(slot) => {
                refuses(&self.stream(0)?, &get(&self.buffers, slot).ok_or(EMPTY)?)?
            }
            Step::Trim => drop(runtime.allocator().trim(0)?),
            Step::TakeIdle => drop(GraphBudget::of(runtime).take_idle()),
            Step::Wrong(kind, slot) => {
                let buffer = self.buffer(slot)?;
                scenes::refused(runtime, &self.stream(0)?, &buffer, kind).or_else(wrong)?;
            }
            Step::Scene(scene) => scenes::play(runtime, &self.kernels, scene)
                .or_else(|e| if self.strict { wrong(e) } else { Ok(()) })?,
            Step::Event { .. }
            | Step::DropEvent(_)
            | Step::Record { .. }
            | Step::WaitEvent { .. }
            | Step::WaitStream { .. }
            | Step::QueryEvent(_)
            | Step::SyncEvent(_)
            | Step::Elapsed(..) => self.events(&planned.step)?,
            Step::HostTimeline(_)
            | Step::DropHostTimeline(_)
            | Step::Hold { .. }
            | Step::Signal(_)
            | Step::CallSignal { .. } => {
                self.host_timeline(&planned.step)?;
            }
            Step::Graph { slot, ref temps, ref nodes } => {
                let recorded = self.record(temps, nodes)?;
                self.graphs[usize::from(slot)].put(recorded);
            }
            Step::DropGraph(_)
            | Step::Launch { .. }
            | Step::Params { .. }
            | Step::Grid { .. }
            | Step::Swap { .. } => self.graph_step(&planned.step)?,
        }
        Ok(())
    }

    pub(super) fn check(
        &self,
        read: Read,
        span: Span,
        planned: &Planned,
        again: &mut Vec<u8>,
    ) -> Outcome {
        let buffer = self.buffer(span.slot)?;
        let part = buffer.part(span.range())?;
        let mut new = Vec::new();
        let got = if read == Read::Again { again } else { &mut new };
        let runtime = self.runtime(is_far(span.slot))?;
        match read {
            Read::New => *got = runtime.to_vec::<u8>(part)?,
            Read::Again => runtime.stream().download_into(got, part.view())?,
            Read::On(s) => {
                got.resize(span.len as usize, 0xEE);
                self.border.download(&self.stream(s)?, got, part)?;
            }
            Read::Look(s) => *got = self.border.look(&self.stream(s)?, part)?,
        }
        let (Some(expect), Some(&b)) = (&planned.expect, planned.reads.first()) else {
            return Ok(());
        };
        if self.strict || self.trusted[b as usize].load(Ordering::Relaxed) {
            compare(got, expect).or_else(wrong)?;
        }
        Ok(())
    }

    fn events(&self, step: &Step) -> Outcome {
        let (runtime, border) = (&self.runtime, self.border);
        match *step {
            Step::Event { slot, timing } => {
                let made = border.create_event(runtime, timing)?;
                self.events[usize::from(slot)].put(made);
            }
            Step::DropEvent(slot) => drop(self.events[usize::from(slot)].take()),
            Step::Record { event, stream } => {
                border.record_event(&self.stream(stream)?, &self.event(event)?)?
            }
            Step::WaitEvent { stream, event } => {
                border.wait_event(&self.stream(stream)?, &self.event(event)?)?
            }
            Step::WaitStream { stream, on } => {
                let on = self.stream(on)?;
                border.wait_stream(&self.stream(stream)?, &on)?;
            }
            Step::QueryEvent(event) => drop(border.query_event(runtime, &self.event(event)?)?),
            Step::SyncEvent(event) => {
                let event = self.event(event)?;
                border.synchronize_event(runtime, &event)?;
                if !border.query_event(runtime, &event)? {
                    return wrong("an event is not complete after it was waited for");
                }
            }
            Step::Elapsed(a, b) => border.elapsed(runtime, &self.event(a)?, &self.event(b)?)?,
            _ => {}
        }
        Ok(())
    }

    fn host_timeline(&self, step: &Step) -> Outcome {
        match *step {
            Step::HostTimeline(slot) => {
                let host_timeline = self.border.create_host_timeline(&self.runtime)?;
                let next = host_timeline.value();
                self.host_timelines[usize::from(slot)].put(Raisable { host_timeline, next });
            }
            Step::DropHostTimeline(slot) => drop(self.host_timelines[usize::from(slot)].take()),
            Step::Hold { stream, host_timeline } => {
                let stream = self.stream(stream)?;
                let (host_timeline, next) = {
                    let mut place = self.host_timelines[usize::from(host_timeline)].lock();
                    let held = place.as_mut().ok_or(EMPTY)?;
                    held.next += 1;
                    (held.host_timeline.clone(), held.next)
                };
                self.border.wait_for(&stream, &host_timeline, host_timeline.at(next))?;
            }
            Step::Signal(host_timeline) => {
                let (host_timeline, next) = {
                    let place = self.host_timelines[usize::from(host_timeline)].lock();
                    place.as_ref().map(|r| (r.host_timeline.clone(), r.next)).ok_or(EMPTY)?
                };
                // Nothing may have come to wait, where calls fail.
                if next > host_timeline.value() {
                    self.border.signal(&host_timeline, next)?;
                }
            }
            Step::CallSignal { stream, host_timeline } => {
                // The host timeline is the call's from here: nobody else signals it, at the end
                // neither, when the call may be still to come.
                let Raisable { host_timeline, next } =
                    self.host_timelines[usize::from(host_timeline)].take().ok_or(EMPTY)?;
                let signal = Signal { host_timeline, next, always: !self.strict };
                let call = move || signal.host_timeline.signal(signal.next);
                self.stream(stream).and_then(|s| Ok(self.border.host_call(&s, true, call)?))?;
            }
            _ => {}
        }
        Ok(())
    }

    fn record(&self, temps: &[u32], nodes: &[Node]) -> std::result::Result<Recorded, Trouble> {
        let mut names = Vec::with_capacity(nodes.len());
        // An error gives it up.
        let recording = self.border.record(&self.runtime)?;
        let stream = recording.stream();
        let alloc = |len: u32| self.border.alloc(stream, len.into());
        let mut all = temps.iter().map(|&len| alloc(len)).collect::<Result<Vec<_>>>()?;
        if nodes.iter().any(|node| matches!(node, Node::Loop { .. })) {
            for _ in 0..2 * nodes.len() {
                all.push(alloc(4)?);
            }
        }
        let find = |slot: Slot| {
            if slot >= TEMPS {
                Ok(all[usize::from(slot - TEMPS)].clone())
            } else {
                self.buffer(slot)
            }
        };
        for (at, node) in nodes.iter().enumerate() {
            let elements = if let Node::Work(work) = node { work.to.len / 4 } else { 0 };
            names.push((recording.next_node()?, elements));
            match node {
                Node::Work(work) => self.work(stream, work, &find)?,
                Node::Call => {
                    let calls = self.calls.clone();
                    self.border.host_call(stream, false, move || {
                        calls.fetch_add(1, Ordering::SeqCst);
                        Ok(())
                    })?;
                }
                Node::Record(event) => self.border.record_event(stream, &self.event(*event)?)?,
                Node::Loop { rounds, branch, works } => {
                    let left = rounds_left(temps.len(), at);
                    self.repeat(stream, (*rounds, *branch, left), works, &find)?;
                }
            }
        }
        Ok(Recorded { graph: recording.end()?, nodes: names })
    }

    /// Records a loop, or its rounds one by one where there are no loops.
    fn repeat(
        &self,
        stream: &Stream,
        (rounds, branch, left): (u8, bool, Slot),
        works: &[Work],
        find: &dyn Fn(Slot) -> std::result::Result<Lease<Buffer>, Trouble>,
    ) -> Outcome {
        let caps = self.runtime.raw_device().caps();
        if self.border != Border::Rust || !caps.conditionals {
            return (0..rounds).try_for_each(|_| {
                works.iter().try_for_each(|work| self.work(stream, work, &find))
            });
        }
        let flag = find(left)?;
        stream.fill(flag.view(), u32::from(rounds))?;
        let mut trouble = None;
        let mut record = |body: &Runtime, works: &[Work]| {
            works.iter().try_for_each(|work| self.work(body.stream(), work, &find)).map_err(|e| {
                trouble = Some(e);
                Error::state("the body is not recorded")
            })
        };
        let recorded = match branch {
            true => stream.record_if(&flag, |body| record(body, works)),
            false => stream.record_while(&flag, |body| {
                record(body, works)?;
                record(body, &count_down(left))
            }),
        };
        trouble.map_or(Ok(()), Err)?;
        Ok(recorded?)
    }

    fn graph_step(&self, step: &Step) -> Outcome {
        match *step {
            Step::DropGraph(slot) => drop(self.graphs[usize::from(slot)].take()),
            Step::Launch { graph, stream } => {
                self.border.launch_graph(&self.graph(graph)?, &self.stream(stream)?)?;
            }
            Step::Params { graph, node, words } => {
                let (name, n) = {
                    let place = self.graphs[usize::from(graph)].lock();
                    place.as_ref().and_then(|r| r.nodes.get(node as usize).copied()).ok_or(EMPTY)?
                };
                let params: Params = [n, words[0], words[1]];
                let Some(name) = name else { return wrong("a recorded node without a name") };
                let updated = self.border.update_params(&self.graph(graph)?, name, &params);
                self.give_up(graph, updated.map_err(Trouble::from))?;
            }
            Step::Grid { graph, node, blocks } => {
                let name = {
                    let place = self.graphs[usize::from(graph)].lock();
                    place.as_ref().and_then(|r| r.nodes.get(node as usize).copied()).ok_or(EMPTY)?.0
                };
                let Some(name) = name else { return wrong("a recorded node without a name") };
                let updated = self.border.update_grid(&self.graph(graph)?, name, blocks);
                self.give_up(graph, updated.map_err(Trouble::from))?;
            }
            Step::Swap { graph, old, new } => {
                let swap = || -> Outcome {
                    let (old, new) = (self.buffer(old)?, self.buffer(new)?);
                    Ok(self.border.swap(&self.graph(graph)?, &old, &new)?)
                };
                self.give_up(graph, swap())?;
            }
            _ => {}
        }
        Ok(())
    }

    /// A graph that could not be changed is not what the model means.
    pub(super) fn give_up(&self, graph: Slot, result: Outcome) -> Outcome {
        if result.is_err() && !self.strict {
            drop(self.graphs[usize::from(graph)].take());
        }
        result
    }

    /// Does work on a stream.
    fn work(
        &self,
        stream: &Stream,
        work: &Work,
        find: &dyn Fn(Slot) -> std::result::Result<Lease<Buffer>, Trouble>,
    ) -> Outcome {
        let leases =
            work.from.iter().map(|s| find(s.slot)).collect::<std::result::Result<Vec<_>, _>>()?;
        let lease = find(work.to.slot)?;
        let kernels = if is_far(work.to.slot) { &self.far_kernels } else { &self.kernels };
        Ok(self.border.work(stream, kernels, work, &lease, &leases)?)
    }

    fn call<'a>(&'a self, work: &Work, operands: &'a [Operand<'a>]) -> Call<'a> {
        let kernels = if is_far(work.to.slot) { &self.far_kernels } else { &self.kernels };
        work::call(kernels, work, operands)
    }

    fn session(&self, stream: &Stream, works: &[Work]) -> Outcome {
        let mut leases = Vec::with_capacity(works.len());
        for work in works {
            let from = work
                .from
                .iter()
                .map(|s| self.buffer(s.slot))
                .collect::<std::result::Result<Vec<_>, _>>()?;
            leases.push((self.buffer(work.to.slot)?, from));
        }
        let mut staged = Vec::with_capacity(works.len());
        for (work, (to, from)) in works.iter().zip(&leases) {
            staged.push((work, operands(work, to, from)?));
        }
        let calls: Vec<_> =
            staged.iter().map(|(work, operands)| self.call(work, operands)).collect();
        Ok(self.border.launch(stream, &calls)?)
    }
}
