//! The effect of a step on the model: each kind of step changes objects and bytes.

use super::effect::{compute, part, sensible, whole};
use super::{Event, Far, Held, HostTimeline, Model, Planned, Stream};
use crate::kernels::Kernel;
use crate::prelude::bytes;
use crate::scenes::Scene;
use crate::step::{
    FAR, FAR_STREAM, Hand, Op, PINNED, Read, Slot, Span, Step, Work, default_of, is_far,
    is_far_stream,
};

impl Model {
    /// Returns whether some thread may block for this: nothing of it is held.
    fn may_wait(&self, held: Held) -> Option<()> {
        (held == 0).then_some(())
    }

    pub(super) fn apply(&mut self, thread: u8, step: &Step, planned: &mut Planned) -> Option<()> {
        let me = usize::from(thread);
        match *step {
            Step::Stream(s, _) => {
                (!is_far_stream(s) || self.far_open).then_some(())?;
                let at = self.streams.get_mut(usize::from(s)).filter(|at| at.is_none())?;
                *at = Some(Stream::default());
                self.exclusive.push(Self::on_stream(s));
                if is_far_stream(s) {
                    self.shared.push(self.on_far());
                }
            }
            Step::DropStream(s) => {
                // The work of a held stream is still to come when the stream is gone.
                self.stream(s).filter(|_| s != 0 && s != FAR_STREAM)?;
                self.streams[usize::from(s)] = None;
                self.exclusive.push(Self::on_stream(s));
            }
            Step::Alloc { slot, len, stream } => {
                self.free_slot(slot, false)?;
                (is_far(slot) == is_far_stream(stream)).then_some(())?;
                let held = self.stream(stream)?;
                self.shared.push(Self::on_stream(stream));
                self.new_buffer(slot, vec![0; len as usize], true, held);
            }
            Step::New { slot, len, seed } => {
                self.free_slot(slot, false)?;
                let held = self.stream(default_of(slot))?;
                // Larger ones are waited for.
                if len > 64 << 10 {
                    self.may_wait(held)?;
                }
                self.shared.push(Self::on_stream(default_of(slot)));
                let b = self.new_buffer(slot, bytes(seed, len as usize), false, held);
                planned.writes.push((b, true));
            }
            Step::Pin { slot, len } => {
                self.free_slot(slot, true)?;
                let held = self.stream(0)?;
                self.shared.push(Self::on_stream(0));
                self.new_buffer(slot, vec![0; len as usize], true, held);
            }
            Step::Drop(slot) => {
                let b = self.slots.get_mut(usize::from(slot))?.take()?;
                self.exclusive.push(self.on_slot(slot));
                self.release(b);
            }
            Step::Clone(slot) => {
                let b = (*self.slots.get(usize::from(slot))?)?;
                self.shared.push(self.on_slot(slot));
                self.clones[me].push(b);
            }
            Step::Unclone => {
                (!self.clones[me].is_empty()).then(|| self.clones[me].remove(0))?;
            }
            Step::Run(stream, ref work) => self.run(stream, std::slice::from_ref(work), planned)?,
            Step::Try(stream, ref work) => {
                matches!(work.op, Op::Launch { .. }).then_some(())?;
                self.run(stream, std::slice::from_ref(work), planned)?;
                // Nobody else has the turn.
                self.exclusive.push(Self::on_stream(stream));
            }
            Step::Session(stream, ref works) => {
                if works.is_empty() || !works.iter().all(|w| matches!(w.op, Op::Launch { .. })) {
                    return None;
                }
                self.run(stream, works, planned)?;
            }
            Step::Check(read, span) => {
                let stream = match read {
                    Read::On(s) | Read::Look(s) => s,
                    Read::New | Read::Again => default_of(span.slot),
                };
                if span.slot >= PINNED || is_far(span.slot) != is_far_stream(stream) {
                    return None;
                }
                let b = self.span(span)?;
                let buf = &self.bufs[b as usize];
                if buf.raw {
                    return None;
                }
                self.may_wait(self.stream(stream)? | buf.held_write)?;
                planned.expect = Some(buf.data[span.at as usize..][..span.len as usize].into());
                planned.reads.push(b);
                self.shared.push(Self::on_stream(stream));
                self.shared.push(self.on_slot(span.slot));
                self.shared.push(self.on_buffer(b));
            }
            Step::Sync(s) => {
                self.may_wait(self.stream(s)?)?;
                self.shared.push(Self::on_stream(s));
            }
            Step::Query(s) | Step::Flush(s) => {
                self.stream(s)?;
                self.shared.push(Self::on_stream(s));
            }
            Step::SyncDevice => {
                if self.host_timelines.iter().flatten().any(|g| g.waited) {
                    return None;
                }
                self.shared.push(self.on_holds());
                self.exclusive.push(self.on_scenes());
            }
            Step::Scene(scene) => {
                // The step takes much memory. If none is free, the step waits for memory in use.
                if scene == Scene::Common {
                    if self.host_timelines.iter().flatten().any(|g| g.waited) {
                        return None;
                    }
                    self.shared.push(self.on_holds());
                }
                self.shared.push(self.on_scenes());
            }
            Step::Enter(s) => {
                self.stream(s).filter(|_| self.entered[me] < 8 && !is_far_stream(s))?;
                self.entered[me] += 1;
                self.shared.push(Self::on_stream(s));
            }
            Step::Leave => {
                self.entered[me] = self.entered[me].checked_sub(1)?;
            }
            Step::Call { stream, .. } => {
                let held = self.stream(stream)?;
                self.hold(stream, held);
                self.calls += 1;
            }
            Step::Complete(stream) => {
                let held = self.stream(stream)?;
                self.hold(stream, held);
            }
            Step::Trim | Step::TakeIdle => {}
            Step::Open => {
                (self.shape.far != Far::None && !self.far_open).then_some(())?;
                self.far_open = true;
                self.streams[usize::from(FAR_STREAM)] = Some(Stream::default());
                self.exclusive.push(Self::on_stream(FAR_STREAM));
                self.exclusive.push(self.on_far());
            }
            Step::Close => {
                // Its streams may work for others, which are held.
                if !self.far_open || self.host_timelines.iter().flatten().any(|g| g.waited) {
                    return None;
                }
                self.far_open = false;
                self.shared.push(self.on_holds());
                self.exclusive.push(self.on_far());
                for s in [FAR_STREAM, FAR_STREAM + 1] {
                    self.streams[usize::from(s)] = None;
                    self.exclusive.push(Self::on_stream(s));
                }
            }
            Step::Closed(slot) => {
                self.buffer(slot).filter(|b| is_far(slot) && b.0 > 0)?;
                (self.shape.far == Far::Other && !self.far_open && !self.far_kept).then_some(())?;
                self.shared.push(self.on_slot(slot));
                self.shared.push(Self::on_stream(0));
                self.shared.push(self.on_far());
            }
            Step::Wrong(_, slot) => {
                self.buffer(slot).filter(|b| slot < FAR && b.0 >= 8 && b.1)?;
                self.shared.push(self.on_slot(slot));
                self.shared.push(Self::on_stream(0));
            }
            Step::Event { .. }
            | Step::DropEvent(_)
            | Step::Record { .. }
            | Step::WaitEvent { .. }
            | Step::WaitStream { .. }
            | Step::QueryEvent(_)
            | Step::SyncEvent(_)
            | Step::Elapsed(..) => self.events(step, planned)?,
            Step::HostTimeline(_)
            | Step::DropHostTimeline(_)
            | Step::Hold { .. }
            | Step::Signal(_)
            | Step::CallSignal { .. } => {
                self.host_timeline(step)?;
            }
            Step::Graph { .. }
            | Step::DropGraph(_)
            | Step::Launch { .. }
            | Step::Params { .. }
            | Step::Grid { .. }
            | Step::Swap { .. } => self.graph(step, planned)?,
        }
        Some(())
    }

    /// The buffer of a part that lies in it.
    pub(super) fn span(&self, span: Span) -> Option<u32> {
        let b = (*self.slots.get(usize::from(span.slot))?)?;
        let len = self.bufs[b as usize].data.len() as u64;
        (u64::from(span.at) + u64::from(span.len) <= len).then_some(b)
    }

    /// Returns whether work may run on a stream of its device. `None` when not; else whether
    /// another device's memory is part of it.
    pub(super) fn crosses(&self, far: bool, work: &Work) -> Option<bool> {
        let mut others = work.from.iter().chain([&work.to]).map(|s| is_far(s.slot) != far);
        let copies = matches!(work.op, Op::Copy | Op::Copy2d { .. }) && self.far_open;
        match others.clone().any(|other| other) {
            false => Some(false),
            true => (copies && !others.all(|other| other)).then_some(true),
        }
    }

    fn run(&mut self, stream: Slot, works: &[Work], planned: &mut Planned) -> Option<()> {
        let mut need = self.stream(stream)?;
        let mut uses = Vec::with_capacity(works.len());
        let mut written: Vec<u32> = Vec::new();
        let mut crosses = false;
        for work in works {
            crosses |= self.crosses(is_far_stream(stream), work)?;
            let from = work.from.iter().map(|&s| self.span(s)).collect::<Option<Vec<_>>>()?;
            let to = self.span(work.to)?;
            if from.iter().any(|b| self.bufs[*b as usize].raw && !written.contains(b)) {
                return None;
            }
            let len = self.bufs[to as usize].data.len() as u32;
            if self.bufs[to as usize].raw && !written.contains(&to) && !whole(work, len) {
                return None;
            }
            sensible(work, &from, to)?;
            for &b in &from {
                need |= self.bufs[b as usize].held_write;
            }
            need |= self.bufs[to as usize].held_write | self.bufs[to as usize].held_read;
            written.push(to);
            uses.push((from, to));
        }
        // These wait for the stream.
        let waits = works.iter().any(|w| match w.op {
            Op::Upload { hand: Hand::Synchronous, .. } => true,
            Op::Upload { hand: Hand::Asynchronous, .. } => w.to.len > 64 << 10,
            _ => false,
        });
        if waits {
            self.may_wait(need)?;
        }
        self.hold(stream, need);
        if crosses {
            self.shared.push(self.on_far());
        }
        // Held work keeps the program's order. Otherwise it would hold other work too.
        let commutes = need == 0
            && matches!(works, [Work { op: Op::Launch { kernel: Kernel::Mask, .. }, .. }]);
        let on_buffer = self.on_buffer(0);
        for (work, (from, to)) in works.iter().zip(uses) {
            for (span, b) in work.from.iter().zip(&from) {
                self.shared.push(self.on_slot(span.slot));
                self.shared.push(self.on_buffer(*b));
                self.bufs[*b as usize].held_read |= need;
                planned.reads.push(*b);
            }
            self.shared.push(self.on_slot(work.to.slot));
            if commutes { &mut self.commuting } else { &mut self.exclusive }
                .push(on_buffer + to as usize);
            let buf = &mut self.bufs[to as usize];
            let all = whole(work, buf.data.len() as u32);
            planned.writes.push((to, all));
            buf.held_write = need;
            buf.raw = false;
            let inputs: Vec<Vec<u8>> = work
                .from
                .iter()
                .zip(&from)
                .map(|(s, b)| part(&self.bufs[*b as usize].data, *s).to_vec())
                .collect();
            compute(work, None, &inputs, &mut self.bufs[to as usize].data);
        }
        Some(())
    }

    fn events(&mut self, step: &Step, planned: &mut Planned) -> Option<()> {
        match *step {
            Step::Event { slot, timing } => {
                let at = self.events.get_mut(usize::from(slot)).filter(|at| at.is_none())?;
                self.event_ids += 1;
                *at = Some(Event { timing, recorded: false, held: 0, id: self.event_ids });
                self.exclusive.push(self.on_event(slot));
            }
            Step::DropEvent(slot) => {
                self.events.get_mut(usize::from(slot))?.take()?;
                self.exclusive.push(self.on_event(slot));
            }
            Step::Record { event, stream } => {
                let held = self.stream(stream).filter(|_| !is_far_stream(stream))?;
                let e = self.events.get_mut(usize::from(event))?.as_mut()?;
                (e.recorded, e.held) = (true, held);
                self.hold(stream, held);
                self.exclusive.push(self.on_event(event));
                planned.records.push(event);
            }
            Step::WaitEvent { stream, event } => {
                let held = self.event(event)? | self.stream(stream)?;
                self.hold(stream, held);
                self.shared.push(self.on_event(event));
            }
            Step::WaitStream { stream, on } => {
                let held = self.stream(on)? | self.stream(stream)?;
                self.shared.push(Self::on_stream(on));
                self.hold(stream, held);
            }
            Step::QueryEvent(event) => {
                self.event(event)?;
                self.shared.push(self.on_event(event));
            }
            Step::SyncEvent(event) => {
                self.may_wait(self.event(event)?)?;
                self.shared.push(self.on_event(event));
            }
            Step::Elapsed(a, b) => {
                for e in [a, b] {
                    self.may_wait(self.event(e)?)?;
                    self.events[usize::from(e)].as_ref().filter(|e| e.timing)?;
                    self.shared.push(self.on_event(e));
                }
            }
            _ => return None,
        }
        Some(())
    }

    /// The host timelines that hold the record of an event.
    fn event(&self, event: Slot) -> Option<Held> {
        self.events.get(usize::from(event))?.as_ref().filter(|e| e.recorded).map(|e| e.held)
    }

    /// Returns whether a host timeline may be waited for and signalled on a stream. A simulated
    /// device runs host calls only during a wait for that device. A wait for another backend's host
    /// timeline is not one.
    fn near(&self, stream: Slot) -> bool {
        self.shape.far != Far::Other || !is_far_stream(stream)
    }

    fn host_timeline(&mut self, step: &Step) -> Option<()> {
        match *step {
            Step::HostTimeline(slot) => {
                let at =
                    self.host_timelines.get_mut(usize::from(slot)).filter(|at| at.is_none())?;
                *at = Some(HostTimeline::default());
                self.exclusive.push(self.on_host_timeline(slot));
            }
            Step::DropHostTimeline(slot) => {
                let at = self.host_timelines.get_mut(usize::from(slot))?;
                at.as_ref().filter(|g| !g.waited)?;
                *at = None;
                self.exclusive.push(self.on_host_timeline(slot));
            }
            Step::Hold { stream, host_timeline } => {
                let held = self.stream(stream).filter(|_| self.near(stream))?;
                let g = self
                    .host_timelines
                    .get_mut(usize::from(host_timeline))?
                    .as_mut()
                    .filter(|g| !g.called)?;
                g.waited = true;
                self.exclusive.push(self.on_host_timeline(host_timeline));
                self.hold(stream, held | 1 << host_timeline);
            }
            Step::Signal(host_timeline) => {
                let g = self
                    .host_timelines
                    .get_mut(usize::from(host_timeline))?
                    .as_mut()
                    .filter(|g| g.waited && !g.called)?;
                g.waited = false;
                self.exclusive.push(self.on_host_timeline(host_timeline));
                self.lift(host_timeline);
            }
            Step::CallSignal { stream, host_timeline } => {
                // Only where nothing holds the call: the host timeline then is as good as
                // signalled, but for those who block.
                let held = self.stream(stream).filter(|_| self.near(stream))?;
                let g = self
                    .host_timelines
                    .get_mut(usize::from(host_timeline))?
                    .as_mut()
                    .filter(|g| g.waited && held == 0)?;
                (g.waited, g.called) = (false, true);
                self.exclusive.push(self.on_host_timeline(host_timeline));
                self.shared.push(Self::on_stream(stream));
                self.lift(host_timeline);
            }
            _ => return None,
        }
        Some(())
    }
}
