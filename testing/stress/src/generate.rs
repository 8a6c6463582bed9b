//! Programs from seeds: the same seed gives the same program.
//!
//! This module must not know the runtime.

use crate::dice::Dice;
use crate::kernels::Kernel;
use crate::model::{Far, Model, Planned, Remains, Shape};
use crate::scenes::{Scene, Wrong};
use crate::step::{FAR, FAR_STREAM, Hand, Node, Op, PINNED, Read, Slot, Span, Step, TEMPS, Work};

/// A program: steps with the thread that each is for.
#[derive(Debug, Clone)]
pub(crate) struct Program {
    pub(crate) shape: Shape,
    pub(crate) steps: Vec<(u8, Step)>,
}

/// A program with what the model knows about it.
#[derive(Debug)]
pub(crate) struct Plan {
    pub(crate) shape: Shape,
    pub(crate) steps: Vec<Planned>,
    pub(crate) remains: Remains,
    /// How often host calls count.
    pub(crate) calls: u64,
    /// How many buffers there ever are.
    pub(crate) buffers: usize,
}

impl Program {
    /// The plan that the model makes of the program. Steps that have no meaning are left out.
    pub(crate) fn plan(&self) -> Plan {
        let mut model = Model::new(self.shape);
        let steps =
            self.steps.iter().filter_map(|(thread, step)| model.admit(*thread, step)).collect();
        finish(model, steps)
    }
}

fn finish(model: Model, steps: Vec<Planned>) -> Plan {
    Plan {
        shape: model.shape,
        steps,
        remains: model.remains(),
        calls: model.calls,
        buffers: model.buffers(),
    }
}

/// The kinds of steps that a program may contain.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Features {
    pub(crate) host_timelines: bool,
    pub(crate) graphs: bool,
    pub(crate) host_calls: bool,
    pub(crate) scenes: bool,
    /// Loops that may have no round: without the device's own, the rounds are recorded one by one.
    pub(crate) loops: bool,
    pub(crate) far: Far,
}

/// The program of a seed, with `ops` steps.
pub(crate) fn generate(seed: u64, ops: u32, threads: u8, features: Features) -> (Program, Plan) {
    let shape = Shape::new(threads, features.far);
    let mut g = Generator {
        dice: Dice::new(seed),
        model: Model::new(shape),
        features,
        due: Vec::new(),
        burst: (0, 0),
        away: false,
        thread: 0,
        fresh: 0,
    };
    let (mut steps, mut planned) = (Vec::new(), Vec::new());
    while planned.len() < ops as usize {
        g.thread = g.dice.below(shape.threads.into()) as u8;
        let step = g.step(planned.len());
        let Some(plan) = g.model.admit(g.thread, &step) else { continue };
        if let Step::Hold { host_timeline, .. } = step {
            let soon = planned.len() + 10 + g.dice.below(120) as usize;
            g.due.push((soon, host_timeline));
        }
        steps.push((g.thread, step));
        planned.push(plan);
    }
    (Program { shape, steps }, finish(g.model, planned))
}

struct Generator {
    dice: Dice,
    model: Model,
    features: Features,
    /// Host timelines that are to be signalled, and when.
    due: Vec<(usize, Slot)>,
    /// A buffer that all threads write at the same moment, and how often still.
    burst: (Slot, u32),
    /// Says whether streams and buffers are picked of the other device.
    away: bool,
    thread: u8,
    fresh: u32,
}

impl Generator {
    fn step(&mut self, now: usize) -> Step {
        if let Some(at) = self.due.iter().position(|d| d.0 <= now) {
            let host_timeline = self.due.swap_remove(at).1;
            if self.model.is_waited(host_timeline) {
                if self.features.host_calls && self.dice.chance(25) {
                    let stream = self.stream();
                    let signal = Step::CallSignal { stream, host_timeline };
                    // Only on a stream that is not held; the host timeline's turn comes again
                    // otherwise.
                    self.due.push((now + 1, host_timeline));
                    return signal;
                }
                return Step::Signal(host_timeline);
            }
        }
        if self.burst.1 > 0 {
            self.burst.1 -= 1;
            let to = self.part(self.burst.0, u32::MAX, &[]);
            let work = self.mask(Span { len: to.len - to.len % 4, ..to });
            return Step::Run(self.stream(), work);
        }
        self.away = self.features.far != Far::None && self.dice.chance(8);
        if self.away && !self.model.is_far_open() {
            return match self.dice.below(5) {
                0 => Step::Open,
                1 => Step::Drop(self.own_buffer()),
                _ => Step::Closed(self.own_buffer()),
            };
        }
        if self.away && self.dice.below(1000) < 12 {
            return Step::Close;
        }
        match self.dice.below(1000) {
            0..420 => {
                let work = self.work(&[]);
                Step::Run(self.stream(), work)
            }
            420..490 => self.session(),
            490..630 => self.check(),
            630..700 => self.allocation(),
            700..740 => Step::Drop(self.any_buffer()),
            740..765 => Step::Clone(self.any_buffer()),
            765..785 => Step::Unclone,
            785..815 => self.streams(),
            815..880 => self.events(),
            880..900 if self.features.host_timelines => self.host_timelines(),
            900..920 if self.features.host_calls => match self.dice.below(3) {
                0 => Step::Complete(self.stream()),
                n => Step::Call { stream: self.stream(), once: n == 1 },
            },
            920..975 if self.features.graphs => self.graphs(),
            975..990 => {
                if self.dice.chance(50) {
                    Step::Enter(self.stream())
                } else {
                    Step::Leave
                }
            }
            990..993 => Step::Wrong(self.dice.pick(&Wrong::ALL), self.buffer()),
            993..996 => {
                self.burst = (self.buffer(), 2 + self.dice.below(20));
                self.check()
            }
            996..997 => Step::Trim,
            997..999 if self.features.scenes => Step::Scene(self.dice.pick(&Scene::ALL)),
            _ => Step::Sync(self.stream()),
        }
    }

    fn seed(&mut self) -> u32 {
        self.fresh += 1;
        self.dice.next() as u32 ^ self.fresh
    }

    fn len(&mut self) -> u32 {
        match self.dice.below(1000) {
            0..40 => self.dice.below(9),
            40..600 => 4 + 4 * self.dice.below(255),
            600..985 => 4 + 4 * self.dice.below(1023),
            985..998 => self.dice.below(64 << 10),
            998 => (64 << 10) + self.dice.below(64 << 10),
            _ => 1 << 20,
        }
    }

    fn slot(&mut self, n: u8) -> Slot {
        self.dice.below(n.into()) as u8
    }

    fn stream(&mut self) -> Slot {
        if self.away {
            return FAR_STREAM + self.slot(2);
        }
        for _ in 0..4 {
            let s = self.slot(self.model.shape.streams);
            if self.model.has_stream(s) {
                return s;
            }
        }
        0
    }

    /// A slot of the thread's own, mostly.
    fn own(&mut self, n: u8) -> Slot {
        let t = self.model.shape.threads;
        if n <= t || self.dice.chance(15) {
            return self.slot(n);
        }
        let own = (n - self.thread % t).div_ceil(t);
        (self.slot(own) * t + self.thread % t).min(n - 1)
    }

    fn any_buffer(&mut self) -> Slot {
        if self.dice.chance(8) {
            PINNED + self.slot(self.model.shape.pinned)
        } else {
            self.own_buffer()
        }
    }

    fn own_buffer(&mut self) -> Slot {
        match self.away {
            true => FAR + self.slot(self.model.shape.far_buffers),
            false => self.own(self.model.shape.buffers),
        }
    }

    /// The result of `pick`, now and then of the other device.
    fn across<T>(&mut self, pick: impl FnOnce(&mut Self) -> T) -> T {
        let away = self.away;
        if self.features.far != Far::None
            && self.model.is_far_open()
            && self.dice.chance(if away { 30 } else { 6 })
        {
            self.away = !away;
        }
        let picked = pick(self);
        self.away = away;
        picked
    }

    /// A buffer with contents, if one is found soon.
    fn buffer(&mut self) -> Slot {
        let mut slot = 0;
        for _ in 0..6 {
            slot = self.own_buffer();
            if matches!(self.model.buffer(slot), Some((_, true))) {
                break;
            }
        }
        slot
    }

    fn pinned(&mut self) -> Slot {
        PINNED + self.slot(self.model.shape.pinned)
    }

    fn extent(&self, slot: Slot, temps: &[u32]) -> u32 {
        if slot >= TEMPS {
            return temps.get(usize::from(slot - TEMPS)).copied().unwrap_or(0);
        }
        self.model.buffer(slot).map_or(0, |b| b.0)
    }

    /// A part of `len` bytes of a buffer, where it has so many; whole words.
    fn part(&mut self, slot: Slot, len: u32, temps: &[u32]) -> Span {
        let extent = self.extent(slot, temps);
        let len = len.min(extent);
        let room = (extent - len) / 4;
        let at = if self.dice.chance(50) { 0 } else { 4 * self.dice.below(room + 1) };
        Span { slot, at, len }
    }

    /// A place that is written: all of a buffer or some of it.
    fn target(&mut self, temps: &[u32]) -> Span {
        let slot = if !temps.is_empty() && self.dice.chance(50) {
            TEMPS + self.slot(temps.len() as u8)
        } else if self.dice.chance(40) {
            self.own_buffer()
        } else {
            self.buffer()
        };
        let extent = self.extent(slot, temps);
        if self.dice.chance(60) || extent < 8 {
            return Span { slot, at: 0, len: extent };
        }
        let len = 4 * (1 + self.dice.below(extent / 4));
        self.part(slot, len, temps)
    }

    fn source(&mut self, len: u32, temps: &[u32]) -> Span {
        let temp = !temps.is_empty() && self.dice.chance(40);
        let mut slot = if temp { TEMPS + self.slot(temps.len() as u8) } else { self.buffer() };
        for _ in 0..4 {
            if self.extent(slot, temps) >= len {
                break;
            }
            slot = self.buffer();
        }
        self.part(slot, len, temps)
    }

    fn work(&mut self, temps: &[u32]) -> Work {
        match self.dice.below(100) {
            0..15 => {
                let width = self.dice.pick(&[1, 2, 4]);
                let mask = u32::MAX >> (32 - 8 * u32::from(width));
                let mut to = self.target(temps);
                to.len -= to.len % u32::from(width);
                Work { op: Op::Fill { pattern: self.seed() & mask, width }, from: Vec::new(), to }
            }
            15..30 => {
                let hand = match self.dice.below(10) {
                    0 | 1 if temps.is_empty() => Hand::Synchronous,
                    2..6 => Hand::Owned,
                    _ => Hand::Asynchronous,
                };
                Work {
                    op: Op::Upload { seed: self.seed(), hand },
                    from: Vec::new(),
                    to: self.target(temps),
                }
            }
            30..52 => {
                let mut to = self.across(|g| g.target(temps));
                let from = self.across(|g| g.source(to.len, temps));
                if self.dice.chance(70) || from.len < to.len {
                    to.len = to.len.min(from.len);
                }
                Work { op: Op::Copy, from: vec![from], to }
            }
            52..60 => self.rows(temps),
            60..67 if temps.is_empty() => self.through_pinned(),
            67..72 => self.copies(temps),
            _ => self.launch(temps),
        }
    }

    fn rows(&mut self, temps: &[u32]) -> Work {
        let (to, from) = (self.across(|g| g.target(temps)), self.across(|g| g.source(256, temps)));
        let width = 1 + self.dice.below(to.len.min(from.len).clamp(1, 64));
        let (from_pitch, to_pitch) = (width + self.dice.below(32), width + self.dice.below(32));
        let fit = |len: u32, pitch: u32| len.saturating_sub(width) / pitch + 1;
        let rows =
            1 + self.dice.below(fit(to.len, to_pitch).min(fit(from.len, from_pitch)).min(16));
        Work { op: Op::Copy2d { width, rows, from_pitch, to_pitch }, from: vec![from], to }
    }

    /// Copies to a part of memory, or to pinned memory, from parts of either.
    fn copies(&mut self, temps: &[u32]) -> Work {
        let pinned = |g: &mut Self| temps.is_empty() && g.dice.chance(40);
        let mut to = match pinned(self) {
            true => {
                let slot = self.pinned();
                self.part(slot, u32::MAX, &[])
            }
            false => self.target(temps),
        };
        let (mut from, mut bytes) = (Vec::new(), 0);
        for left in (1..=1 + self.dice.below(5)).rev() {
            let len = if left == 1 { to.len - bytes } else { (to.len - bytes) / 2 };
            let part = match pinned(self) {
                true => {
                    let slot = self.pinned();
                    self.part(slot, len, &[])
                }
                false => self.source(len, temps),
            };
            bytes += part.len;
            from.push(part);
        }
        to.len = bytes;
        Work { op: Op::Copies, from, to }
    }

    fn through_pinned(&mut self) -> Work {
        let pinned = self.pinned();
        let extent = self.extent(pinned, &[]);
        if self.dice.chance(50) {
            let from = self.source(extent, &[]);
            let mut to = self.part(pinned, from.len, &[]);
            to.len = to.len.min(from.len);
            Work { op: Op::Pinned, from: vec![from], to }
        } else {
            let mut to = self.target(&[]);
            let from = self.part(pinned, to.len, &[]);
            to.len = to.len.min(from.len);
            Work { op: Op::Pinned, from: vec![from], to }
        }
    }

    fn launch(&mut self, temps: &[u32]) -> Work {
        let kernel = self.dice.pick(&Kernel::ALL);
        let mut to = self.target(temps);
        to.len -= to.len % 4;
        let mut from: Vec<Span> = match kernel {
            Kernel::Mask => Vec::new(),
            Kernel::Scale => vec![self.source(to.len, temps)],
            Kernel::Add => vec![self.source(to.len, temps), self.source(to.len, temps)],
            Kernel::Gather => vec![self.source(64, temps), self.source(to.len, temps)],
        };
        let least = from.iter().skip(usize::from(kernel == Kernel::Gather)).map(|f| f.len).min();
        to.len = least.map_or(to.len, |l| (l - l % 4).min(to.len));
        for f in from.iter_mut().skip(usize::from(kernel == Kernel::Gather)) {
            f.len = to.len;
        }
        if kernel == Kernel::Gather {
            from[0].len -= from[0].len % 4;
        }
        let first = if kernel == Kernel::Gather { (from[0].len / 4).max(1) } else { self.seed() };
        let second = self.seed();
        Work { op: Op::Launch { kernel, words: [first, second] }, from, to }
    }

    fn mask(&mut self, to: Span) -> Work {
        let words = [self.seed(), self.seed()];
        Work { op: Op::Launch { kernel: Kernel::Mask, words }, from: Vec::new(), to }
    }

    fn session(&mut self) -> Step {
        if self.dice.chance(15) {
            let work = self.launch(&[]);
            return Step::Try(self.stream(), work);
        }
        let works = (0..1 + self.dice.below(3)).map(|_| self.launch(&[])).collect();
        Step::Session(self.stream(), works)
    }

    fn check(&mut self) -> Step {
        let slot = self.buffer();
        let extent = self.extent(slot, &[]);
        let span = if self.dice.chance(50) || extent == 0 {
            Span { slot, at: 0, len: extent }
        } else {
            let at = self.dice.below(extent);
            Span { slot, at, len: 1 + self.dice.below(extent - at) }
        };
        let read = match self.dice.below(10) {
            0 => Read::New,
            1 => Read::Again,
            2 => Read::Look(self.stream()),
            _ => Read::On(self.stream()),
        };
        Step::Check(read, span)
    }

    fn allocation(&mut self) -> Step {
        let (slot, len) = (self.own_buffer(), self.len());
        match self.dice.below(10) {
            0 => Step::Pin { slot: self.pinned(), len: self.len() },
            1..5 => Step::New { slot, len, seed: self.seed() },
            _ => Step::Alloc { slot, len, stream: self.stream() },
        }
    }

    fn streams(&mut self) -> Step {
        let slot = if self.away { self.stream() } else { self.slot(self.model.shape.streams) };
        match self.dice.below(12) {
            0..4 => Step::Stream(slot, self.dice.below(3) as i32 - 1),
            4 | 5 => Step::DropStream(slot),
            6 | 7 => Step::Query(slot),
            8 => Step::Flush(slot),
            9 => Step::WaitStream { stream: self.stream(), on: self.stream() },
            10 if self.dice.chance(20) => Step::SyncDevice,
            _ => Step::Sync(slot),
        }
    }

    fn events(&mut self) -> Step {
        let event = self.own(self.model.shape.events);
        if !self.model.has_event(event) {
            return Step::Event { slot: event, timing: self.dice.chance(50) };
        }
        let stream = self.stream();
        match self.dice.below(10) {
            0..4 => Step::Record { event, stream },
            4..6 => Step::WaitEvent { stream, event },
            6 => Step::QueryEvent(event),
            7 => Step::SyncEvent(event),
            8 => Step::Elapsed(event, self.own(self.model.shape.events)),
            _ => Step::DropEvent(event),
        }
    }

    fn host_timelines(&mut self) -> Step {
        let host_timeline = self.slot(self.model.shape.host_timelines);
        if !self.model.has_host_timeline(host_timeline) {
            return Step::HostTimeline(host_timeline);
        }
        match self.dice.below(10) {
            0 | 1 => Step::DropHostTimeline(host_timeline),
            _ => Step::Hold { stream: self.stream(), host_timeline },
        }
    }

    fn graphs(&mut self) -> Step {
        let slot = self.slot(self.model.shape.graphs);
        if !self.model.has_graph(slot) {
            return self.recording(slot);
        }
        match self.dice.below(20) {
            0 => Step::DropGraph(slot),
            1 => Step::TakeIdle,
            2..5 => {
                let launches = self.model.launches(slot);
                if launches.is_empty() {
                    return Step::DropGraph(slot);
                }
                let node = self.dice.pick(&launches);
                if self.dice.chance(40) {
                    return Step::Grid { graph: slot, node, blocks: self.dice.below(8) };
                }
                Step::Params { graph: slot, node, words: [self.seed(), self.seed()] }
            }
            5..8 => {
                let used = self.model.outside(slot);
                if used.is_empty() {
                    return Step::DropGraph(slot);
                }
                Step::Swap { graph: slot, old: self.dice.pick(&used), new: self.buffer() }
            }
            _ => Step::Launch { graph: slot, stream: self.stream() },
        }
    }

    fn recording(&mut self, slot: Slot) -> Step {
        let temps: Vec<u32> =
            (0..self.dice.below(4)).map(|_| 4 + 4 * self.dice.below(512)).collect();
        let mut nodes = Vec::new();
        for (t, &len) in temps.iter().enumerate() {
            let to = Span { slot: TEMPS + t as u8, at: 0, len };
            let op = match self.dice.below(3) {
                0 => Op::Fill { pattern: self.seed() & 0xff, width: 1 },
                1 => Op::Upload { seed: self.seed(), hand: Hand::Asynchronous },
                _ => Op::Copy,
            };
            let from = if op == Op::Copy { vec![self.source(len, &[])] } else { Vec::new() };
            self.keep(&temps, &mut nodes, Node::Work(Work { op, from, to }));
        }
        for _ in 0..1 + self.dice.below(8) {
            let node = match self.dice.below(20) {
                0 if self.features.host_calls => Node::Call,
                1 => Node::Record(self.own(self.model.shape.events)),
                2..7 => {
                    let branch = self.dice.chance(30);
                    let least = u32::from(!self.features.loops);
                    let rounds = least + self.dice.below(if branch { 2 } else { 4 } - least);
                    let of = if temps.is_empty() { &[0][..] } else { &temps };
                    let mut works: Vec<_> =
                        (0..1 + self.dice.below(3)).map(|_| self.work(of)).collect();
                    // Of this, one round more or less always shows.
                    let to = self.buffer();
                    let to = self.part(to, u32::MAX, &[]);
                    works.push(self.mask(Span { len: to.len - to.len % 4, ..to }));
                    let rounds = rounds as u8;
                    Node::Loop { rounds, branch, works }
                }
                _ => Node::Work(self.work(if temps.is_empty() { &[0] } else { &temps })),
            };
            self.keep(&temps, &mut nodes, node);
        }
        Step::Graph { slot, temps, nodes }
    }

    /// Adds a node where the graph stays one that can be recorded.
    fn keep(&mut self, temps: &[u32], nodes: &mut Vec<Node>, node: Node) {
        nodes.push(node);
        if !self.model.can_record(temps, nodes) {
            nodes.pop();
        }
    }
}
