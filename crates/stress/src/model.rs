//! The naive sequential model: what every buffer holds after each step, and what a step must wait
//! for.
//!
//! # What order the API guarantees
//! The runtime orders two operations on one buffer, of which one writes, by the order in which they
//! were submitted, on whatever streams. So the model runs the program's steps one after the other.
//! Threads may run their steps at any time, except that two steps come in the program's order when
//! they touch one buffer (and one of them writes) or one object (and one of them changes it). Two
//! launches of [`Kernel::Mask`] on one buffer come in any order, at the same moment too: what they
//! do commutes.
//!
//! # What must not block
//! A stream that waits for a host timeline is *held*, and so is everything that comes after its
//! work. A step that blocks its thread is left out while what it waits for is held, and a step that
//! makes a stream held comes in order with all others on the stream. So a program that ends when
//! its steps run one after the other ends on any number of threads.
//!
//! This module must not know the runtime.

mod effect;
mod graphs;

use crate::kernels::Kernel;
use crate::prelude::bytes;
use crate::scenes::Scene;
use crate::step::{
    FAR, FAR_STREAM, Hand, Node, Op, PINNED, Read, Slot, Span, Step, TEMPS, Work, default_of,
    is_far, is_far_stream,
};
use effect::{compute, part, sensible, whole};
use graphs::outside;

#[cfg(test)]
pub(crate) use effect::mistaken;

/// Host timelines that hold something, a bit each.
type Held = u64;

/// Steps after which threads that are two such lengths behind are waited for.
const SKEW: u32 = 400;

/// What another device there is beside the one that is tried.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Far {
    /// None.
    None,
    /// One of the same backend.
    Peer,
    /// One of another backend.
    Other,
}

/// How many objects there may be at a time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Shape {
    pub(crate) threads: u8,
    pub(crate) buffers: u8,
    pub(crate) pinned: u8,
    pub(crate) streams: u8,
    pub(crate) events: u8,
    pub(crate) host_timelines: u8,
    pub(crate) graphs: u8,
    pub(crate) far: Far,
    /// Buffers of the other device.
    pub(crate) far_buffers: u8,
}

impl Shape {
    pub(crate) fn new(threads: u8, far: Far) -> Self {
        let t = threads.clamp(1, 64);
        Self {
            threads: t,
            buffers: (8 + 4 * t).min(FAR),
            far,
            far_buffers: if far == Far::None { 0 } else { (3 + t / 2).min(PINNED - FAR) },
            pinned: (2 + t / 2).min(TEMPS - PINNED),
            streams: (3 + t / 2).min(FAR_STREAM),
            events: 4 + t,
            host_timelines: 4,
            graphs: 2 + t / 2,
        }
    }

    /// Places for streams, the other device's too.
    pub(crate) fn stream_places(self) -> u8 {
        if self.far == Far::None { self.streams } else { FAR_STREAM + 2 }
    }
}

/// A buffer's contents and who uses it.
#[derive(Debug, Default)]
struct Buf {
    data: Vec<u8>,
    /// Nothing was written to it yet.
    raw: bool,
    held_write: Held,
    held_read: Held,
    /// Slots and graphs that have it.
    refs: u32,
}

#[derive(Debug)]
struct Event {
    timing: bool,
    recorded: bool,
    held: Held,
    /// Tells it from others of the slot.
    id: u32,
}

#[derive(Debug, Default)]
struct HostTimeline {
    /// Something waits for it.
    waited: bool,
    /// A host call will signal it.
    called: bool,
}

/// A node with what its slots named when it was recorded.
#[derive(Debug, Clone)]
struct Bound {
    node: Node,
    /// Buffers of `from`, then of `to`; `TEMP` and a number for temporaries.
    uses: Vec<u32>,
    event: u32,
    /// A launch's grid, once an update has changed it.
    blocks: Option<u32>,
}

const TEMP: u32 = 1 << 31;

#[derive(Debug)]
struct Graph {
    nodes: Vec<Bound>,
    temps: Vec<u32>,
    held: Held,
    suspended: bool,
    /// It copies from or to the other device.
    far: bool,
}

#[derive(Debug, Default)]
struct Stream {
    held: Held,
}

/// Who used something last.
#[derive(Debug, Default, Clone)]
struct Track {
    exclusive: Option<(u8, u32)>,
    /// For each thread the steps since, the last one.
    shared: Vec<(u8, u32)>,
    /// The same, of those that come in any order among themselves.
    commuting: Vec<(u8, u32)>,
}

/// A step that can run, with all that is known about it beforehand.
#[derive(Debug, Clone)]
pub(crate) struct Planned {
    pub(crate) thread: u8,
    pub(crate) step: Step,
    /// Steps of other threads that must be over: for each thread, how many.
    pub(crate) after: Vec<(u8, u32)>,
    /// What is read back.
    pub(crate) expect: Option<Box<[u8]>>,
    /// Buffers whose contents it reads, by number.
    pub(crate) reads: Vec<u32>,
    /// Buffers that it writes, and whether nothing of what was there stays.
    pub(crate) writes: Vec<(u32, bool)>,
    /// Events that it records.
    pub(crate) records: Vec<Slot>,
}

/// What is left at the end: slots with their buffers' numbers and contents.
pub(crate) type Remains = Vec<(Slot, u32, Box<[u8]>)>;

/// The state after some steps.
#[derive(Debug)]
pub(crate) struct Model {
    pub(crate) shape: Shape,
    bufs: Vec<Buf>,
    slots: Vec<Option<u32>>,
    streams: Vec<Option<Stream>>,
    events: Vec<Option<Event>>,
    host_timelines: Vec<Option<HostTimeline>>,
    graphs: Vec<Option<Graph>>,
    /// For each thread its clones and how many streams it entered.
    clones: Vec<Vec<u32>>,
    entered: Vec<u32>,
    tracks: Vec<Track>,
    /// For each thread, how many steps of each other one are known to be over.
    known: Vec<Vec<u32>>,
    counts: Vec<u32>,
    steps: u32,
    /// The steps of each thread at the last two times that they were counted.
    last: Vec<u32>,
    floor: Vec<u32>,
    event_ids: u32,
    /// The other device's runtime is open.
    far_open: bool,
    /// A graph was recorded that may keep it open.
    far_kept: bool,
    /// How often host calls count.
    pub(crate) calls: u64,
    shared: Vec<usize>,
    commuting: Vec<usize>,
    exclusive: Vec<usize>,
}

impl Model {
    pub(crate) fn new(shape: Shape) -> Self {
        let t = usize::from(shape.threads);
        let empty = |n: u8| usize::from(n);
        let mut model = Self {
            shape,
            bufs: Vec::new(),
            slots: vec![None; usize::from(PINNED) * 2],
            streams: (0..empty(shape.stream_places())).map(|_| None).collect(),
            events: (0..empty(shape.events)).map(|_| None).collect(),
            host_timelines: (0..empty(shape.host_timelines)).map(|_| None).collect(),
            graphs: (0..empty(shape.graphs)).map(|_| None).collect(),
            clones: vec![Vec::new(); t],
            entered: vec![0; t],
            tracks: Vec::new(),
            known: vec![vec![0; t]; t],
            counts: vec![0; t],
            steps: 0,
            last: vec![0; t],
            floor: vec![0; t],
            event_ids: 0,
            far_open: shape.far != Far::None,
            far_kept: false,
            calls: 0,
            shared: Vec::new(),
            commuting: Vec::new(),
            exclusive: Vec::new(),
        };
        // The default stream is always there.
        model.streams[0] = Some(Stream::default());
        if model.far_open {
            model.streams[usize::from(FAR_STREAM)] = Some(Stream::default());
        }
        model.tracks = vec![Track::default(); model.first_buffer()];
        model
    }

    // ---- objects that steps come in order for
    // -----------------------------------------------------------------------

    fn on_stream(s: Slot) -> usize {
        usize::from(s)
    }
    fn on_slot(&self, s: Slot) -> usize {
        self.streams.len() + usize::from(s)
    }
    fn on_event(&self, s: Slot) -> usize {
        self.streams.len() + self.slots.len() + usize::from(s)
    }
    fn on_host_timeline(&self, s: Slot) -> usize {
        self.on_event(0) + self.events.len() + usize::from(s)
    }
    fn on_graph(&self, s: Slot) -> usize {
        self.on_host_timeline(0) + self.host_timelines.len() + usize::from(s)
    }
    /// Whether any stream is held.
    fn on_holds(&self) -> usize {
        self.on_graph(0) + self.graphs.len()
    }
    /// Streams that fail on purpose.
    fn on_scenes(&self) -> usize {
        self.on_holds() + 1
    }
    /// The other device's runtime.
    fn on_far(&self) -> usize {
        self.on_scenes() + 1
    }
    fn first_buffer(&self) -> usize {
        self.on_far() + 1
    }
    fn on_buffer(&self, b: u32) -> usize {
        self.first_buffer() + b as usize
    }

    // ---- what generators ask
    // ----------------------------------------------------------------------------------------

    /// Bytes of the buffer in a slot, and whether it was ever written.
    pub(crate) fn buffer(&self, s: Slot) -> Option<(u32, bool)> {
        let b = &self.bufs[(*self.slots.get(usize::from(s))?)? as usize];
        Some((b.data.len() as u32, !b.raw))
    }
    pub(crate) fn has_stream(&self, s: Slot) -> bool {
        self.streams.get(usize::from(s)).is_some_and(Option::is_some)
    }
    pub(crate) fn has_event(&self, s: Slot) -> bool {
        self.events.get(usize::from(s)).is_some_and(Option::is_some)
    }
    pub(crate) fn has_host_timeline(&self, s: Slot) -> bool {
        self.host_timelines.get(usize::from(s)).is_some_and(Option::is_some)
    }
    pub(crate) fn has_graph(&self, s: Slot) -> bool {
        self.graphs.get(usize::from(s)).is_some_and(Option::is_some)
    }
    /// The launches of a graph, by node.
    pub(crate) fn launches(&self, s: Slot) -> Vec<u32> {
        let Some(Some(g)) = self.graphs.get(usize::from(s)) else { return Vec::new() };
        (0..g.nodes.len() as u32)
            .filter(|&i| matches!(&g.nodes[i as usize].node, Node::Work(Work { op: Op::Launch { kernel, .. }, .. }) if *kernel != Kernel::Gather))
            .collect()
    }
    /// Slots whose buffers a graph uses.
    pub(crate) fn outside(&self, s: Slot) -> Vec<Slot> {
        let Some(Some(g)) = self.graphs.get(usize::from(s)) else { return Vec::new() };
        let used = outside(g);
        (0..PINNED)
            .filter(|&s| self.slots[usize::from(s)].is_some_and(|b| used.iter().any(|u| u.0 == b)))
            .collect()
    }
    pub(crate) fn is_suspended(&self, s: Slot) -> bool {
        matches!(self.graphs.get(usize::from(s)), Some(Some(g)) if g.suspended)
    }
    pub(crate) fn is_waited(&self, host_timeline: Slot) -> bool {
        matches!(self.host_timelines.get(usize::from(host_timeline)), Some(Some(g)) if g.waited && !g.called)
    }

    pub(crate) fn is_far_open(&self) -> bool {
        self.far_open
    }

    /// Whether a graph can be recorded now.
    pub(crate) fn can_record(&mut self, temps: &[u32], nodes: &[Node]) -> bool {
        self.record(temps, nodes).is_some()
    }

    // ---- steps
    // ---------------------------------------------------------------------------------------------

    /// Runs a step in the model. `None` when it has no meaning now, or might block for ever; then
    /// nothing has changed.
    pub(crate) fn admit(&mut self, thread: u8, step: &Step) -> Option<Planned> {
        self.shared.clear();
        self.commuting.clear();
        self.exclusive.clear();
        let mut planned = Planned {
            thread,
            step: step.clone(),
            after: Vec::new(),
            expect: None,
            reads: Vec::new(),
            writes: Vec::new(),
            records: Vec::new(),
        };
        self.apply(thread, step, &mut planned)?;
        self.order(thread, &mut planned.after);
        Some(planned)
    }

    /// The buffers that are left, all of them with contents.
    pub(crate) fn remains(&self) -> Remains {
        let all = (0..PINNED).filter_map(|s| Some((s, self.slots[usize::from(s)]?)));
        all.filter(|&(_, b)| !self.bufs[b as usize].raw)
            .map(|(s, b)| (s, b, self.bufs[b as usize].data.clone().into_boxed_slice()))
            .collect()
    }

    /// How many buffers there ever were.
    pub(crate) fn buffers(&self) -> usize {
        self.bufs.len()
    }

    fn order(&mut self, thread: u8, after: &mut Vec<(u8, u32)>) {
        let me = usize::from(thread);
        let index = self.counts[me];
        let mut need = |who: (u8, u32), known: &mut [u32]| {
            let (t, count) = (usize::from(who.0), who.1 + 1);
            if t != me && known[t] < count {
                known[t] = count;
                match after.iter_mut().find(|a| a.0 == who.0) {
                    Some(a) => a.1 = count,
                    None => after.push((who.0, count)),
                }
            }
        };
        let known = &mut self.known[me];
        let most = self
            .shared
            .iter()
            .chain(&self.commuting)
            .chain(&self.exclusive)
            .max()
            .map_or(0, |m| m + 1);
        if self.tracks.len() < most {
            self.tracks.resize(most, Track::default());
        }
        for &r in &self.exclusive {
            let track = &mut self.tracks[r];
            let Track { exclusive, shared, commuting } = track;
            exclusive
                .iter()
                .copied()
                .chain(shared.drain(..))
                .chain(commuting.drain(..))
                .for_each(|w| need(w, known));
            track.exclusive = Some((thread, index));
        }
        let together = self
            .shared
            .iter()
            .map(|r| (*r, true))
            .chain(self.commuting.iter().map(|r| (*r, false)));
        for (r, reads) in together {
            let track = &mut self.tracks[r];
            if track.exclusive == Some((thread, index)) {
                continue;
            }
            let Track { exclusive, shared, commuting } = track;
            let (mine, others) = if reads { (shared, commuting) } else { (commuting, shared) };
            exclusive.iter().chain(others.iter()).for_each(|w| need(*w, known));
            match mine.iter_mut().find(|s| s.0 == thread) {
                Some(s) => s.1 = index,
                None => mine.push((thread, index)),
            }
        }
        // No thread runs far ahead of another.
        if self.steps.is_multiple_of(SKEW) {
            self.floor = std::mem::replace(&mut self.last, self.counts.clone());
        }
        self.steps += 1;
        for (t, &count) in self.floor.iter().enumerate().filter(|(_, count)| **count > 0) {
            need((t as u8, count - 1), known);
        }
        self.counts[me] += 1;
    }

    fn stream(&self, s: Slot) -> Option<Held> {
        self.streams.get(usize::from(s))?.as_ref().map(|s| s.held)
    }

    /// A stream comes to wait for `held` as well.
    fn hold(&mut self, s: Slot, held: Held) {
        let on = Self::on_stream(s);
        if let Some(Some(stream)) = self.streams.get_mut(usize::from(s)) {
            if held & !stream.held == 0 {
                self.shared.push(on);
            } else {
                self.exclusive.push(on);
                self.exclusive.push(self.on_holds());
                if let Some(Some(stream)) = self.streams.get_mut(usize::from(s)) {
                    stream.held |= held;
                }
            }
        }
    }

    fn new_buffer(&mut self, slot: Slot, data: Vec<u8>, raw: bool, held: Held) -> u32 {
        let raw = raw && !data.is_empty();
        self.bufs.push(Buf { data, raw, held_write: held, held_read: 0, refs: 1 });
        let id = self.bufs.len() as u32 - 1;
        self.slots[usize::from(slot)] = Some(id);
        self.exclusive.push(self.on_slot(slot));
        self.exclusive.push(self.on_buffer(id));
        id
    }

    fn free_slot(&self, slot: Slot, pinned: bool) -> Option<()> {
        let kind = if pinned { (PINNED..TEMPS).contains(&slot) } else { slot < PINNED };
        (kind && self.slots[usize::from(slot)].is_none()).then_some(())
    }

    fn release(&mut self, b: u32) {
        let buf = &mut self.bufs[b as usize];
        buf.refs -= 1;
        if buf.refs == 0 {
            buf.data = Vec::new();
        }
    }

    /// Drops a host timeline's bit everywhere. Who uses what was held comes after this step: else
    /// it would wait for the host timeline before its time, and with it whoever comes before this
    /// step and may block.
    fn lift(&mut self, host_timeline: Slot) {
        let bit = 1 << host_timeline;
        let (on_event, on_graph, on_buffer) =
            (self.on_event(0), self.on_graph(0), self.on_buffer(0));
        let exclusive = &mut self.exclusive;
        let mut lift = |held: &mut Held, on: usize| {
            if *held & bit != 0 {
                *held &= !bit;
                exclusive.push(on);
            }
        };
        for (i, s) in self.streams.iter_mut().enumerate() {
            s.iter_mut().for_each(|s| lift(&mut s.held, i));
        }
        for (i, e) in self.events.iter_mut().enumerate() {
            e.iter_mut().for_each(|e| lift(&mut e.held, on_event + i));
        }
        for (i, g) in self.graphs.iter_mut().enumerate() {
            g.iter_mut().for_each(|g| lift(&mut g.held, on_graph + i));
        }
        for (i, b) in self.bufs.iter_mut().enumerate() {
            lift(&mut b.held_write, on_buffer + i);
            lift(&mut b.held_read, on_buffer + i);
        }
    }

    /// Whether some thread may block for this: nothing of it is held.
    fn may_wait(&self, held: Held) -> Option<()> {
        (held == 0).then_some(())
    }

    fn apply(&mut self, thread: u8, step: &Step, planned: &mut Planned) -> Option<()> {
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
                // What a held stream does is still to come when it is gone.
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
                    Read::On(s) => s,
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
                // It takes much memory. Where there is none, it waits for what streams use.
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
            Step::Trim => {}
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
            | Step::Swap { .. }
            | Step::Suspend { .. }
            | Step::Resume(_) => self.graph(step, planned)?,
        }
        Some(())
    }

    /// The buffer of a part that lies in it.
    fn span(&self, span: Span) -> Option<u32> {
        let b = (*self.slots.get(usize::from(span.slot))?)?;
        let len = self.bufs[b as usize].data.len() as u64;
        (u64::from(span.at) + u64::from(span.len) <= len).then_some(b)
    }

    /// Whether work may run on a stream of its device. `None` when not; else whether another
    /// device's memory is part of it.
    fn crosses(&self, far: bool, work: &Work) -> Option<bool> {
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
        // What is held comes in the program's order: else others would come to be held with it.
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

    /// What an event that was recorded is held by.
    fn event(&self, event: Slot) -> Option<Held> {
        self.events.get(usize::from(event))?.as_ref().filter(|e| e.recorded).map(|e| e.held)
    }

    /// Whether a host timeline may be waited for and signalled on a stream. A simulated device runs
    /// host calls only while somebody waits for the device, and who waits for a host timeline of
    /// another backend's does not.
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
