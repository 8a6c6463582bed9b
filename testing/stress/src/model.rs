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

mod apply;
pub(crate) mod effect;
mod graphs;
mod order;

use crate::kernels::Kernel;
use crate::step::{FAR, FAR_STREAM, Node, Op, PINNED, Slot, Step, TEMPS, Work};
use graphs::outside;

#[cfg(test)]
pub(crate) use effect::mistaken;

/// Host timelines that hold something, a bit each.
type Held = u64;

/// Steps after which threads that are two such lengths behind are waited for.
const SKEW: u32 = 400;

/// The other device beside the one that is tried, if there is one.
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
    /// The work copies from or to the other device.
    far: bool,
}

#[derive(Debug, Default)]
struct Stream {
    held: Held,
}

/// The last users of an object.
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
    /// The bytes that the step reads back.
    pub(crate) expect: Option<Box<[u8]>>,
    /// Buffers whose contents it reads, by number.
    pub(crate) reads: Vec<u32>,
    /// Buffers that it writes, and whether nothing of what was there stays.
    pub(crate) writes: Vec<(u32, bool)>,
    /// Events that it records.
    pub(crate) records: Vec<Slot>,
}

/// The buffers that are left at the end: slots with the buffers' numbers and contents.
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
    pub(crate) fn is_waited(&self, host_timeline: Slot) -> bool {
        matches!(self.host_timelines.get(usize::from(host_timeline)), Some(Some(g)) if g.waited && !g.called)
    }

    pub(crate) fn is_far_open(&self) -> bool {
        self.far_open
    }

    /// Returns whether a graph can be recorded now.
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

    /// Drops a host timeline's bit everywhere. A step that uses a held object comes after this
    /// step. Otherwise that step would wait for the host timeline too early, and so would each step
    /// before this one that may block.
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
}
