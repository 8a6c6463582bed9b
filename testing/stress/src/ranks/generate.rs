//! Programs of ranks from seeds: the same seed gives the same program.
//!
//! This module must not know the runtime.

use super::model::{Model, Plan, Planned};
use super::step::{ARRAYS, At, COMMS, Call, GRAPHS, Group, Kind, Program, STREAMS, Step, Wrong};
use crate::dice::Dice;
use crate::kernels::Kernel;
use crate::step::{Hand, Op, Slot, Span, Work};
use leasehold_collective::{ElementType, Reduce};

impl Program {
    /// The plan that the model makes of the program. Steps that have no meaning are left out.
    pub(super) fn plan(&self) -> Plan {
        let mut model = Model::new(self.ranks);
        let steps = self.steps.iter().filter_map(|step| model.admit(step)).collect();
        finish(&model, steps)
    }
}

fn finish(model: &Model, steps: Vec<Planned>) -> Plan {
    Plan { ranks: model.ranks, steps, remains: model.remains() }
}

/// The program of a seed, with `ops` steps. Calls are of these types of elements.
pub(super) fn generate(
    seed: u64,
    ops: u32,
    ranks: u32,
    elements: &[ElementType],
) -> (Program, Plan) {
    let mut dice = Dice::new(seed ^ 0x0072_616E_6B73);
    // Few types: calls need two arrays of one.
    let palette = (0..3).map(|_| dice.pick(elements)).collect();
    let model = Model::new(ranks);
    let mut g = Generator { dice, model, palette, ranks, due: Vec::new(), fresh: 0 };
    let (mut steps, mut planned) = (Vec::new(), Vec::new());
    while planned.len() < ops as usize {
        let step = match planned.len() {
            n if n < usize::from(ARRAYS) => g.new_array(n as Slot),
            now => g.step(now),
        };
        let Some(plan) = g.model.admit(&step) else { continue };
        if let Step::Hold { rank, .. } = step {
            g.due.push((planned.len() + 2 + g.dice.below(12) as usize, rank));
        }
        steps.push(step);
        planned.push(plan);
    }
    let plan = finish(&g.model, planned);
    (Program { ranks, steps }, plan)
}

struct Generator {
    dice: Dice,
    model: Model,
    palette: Vec<ElementType>,
    ranks: u32,
    /// Ranks that are to signal, and when.
    due: Vec<(usize, u32)>,
    fresh: u32,
}

impl Generator {
    fn step(&mut self, now: usize) -> Step {
        if let Some(at) = self.due.iter().position(|d| d.0 <= now) {
            return Step::Signal { rank: self.due.swap_remove(at).1 };
        }
        let (rank, stream) = (self.dice.below(self.ranks), self.slot(STREAMS));
        match self.dice.below(1000) {
            0..340 => Step::Calls(self.group()),
            340..570 => self.own(rank, stream),
            570..620 => self.numbers(rank, stream),
            620..660 => self.through(rank, stream),
            660..720 => {
                let array = self.slot(ARRAYS);
                self.new_array(array)
            }
            720..790 => Step::Check { rank, stream, span: self.any_span() },
            790..805 => Step::Sync { rank, stream },
            805..840 => self.record(),
            840..900 => {
                let turn = self.slot(STREAMS);
                Step::Replay { graph: self.slot(GRAPHS), stream, turn }
            }
            900..905 => Step::DropGraph(self.slot(GRAPHS)),
            905..920 => self.split(),
            920..935 => Step::Stream { rank, stream },
            935..950 => Step::WaitStream { rank, stream, on: self.slot(STREAMS) },
            950..975 => Step::Hold { rank, stream },
            975..992 => Step::Wrong { rank, wrong: self.dice.pick(&Wrong::ALL) },
            _ => Step::Abort { held: self.dice.chance(50) },
        }
    }

    fn slot(&mut self, n: u8) -> Slot {
        self.dice.below(n.into()) as u8
    }

    fn seed(&mut self) -> u32 {
        self.fresh += 1;
        self.dice.next() as u32 ^ self.fresh
    }

    fn new_array(&mut self, array: Slot) -> Step {
        let element = self.palette[self.dice.below(self.palette.len() as u32) as usize];
        let part = match self.dice.below(100) {
            0..3 => 0,
            3..90 => 1 + self.dice.below(24),
            _ => 1 + self.dice.below(300),
        };
        let len = part * self.ranks + self.dice.below(3);
        Step::New { array, element, len, seed: self.seed() }
    }

    fn numbers(&mut self, rank: u32, stream: Slot) -> Step {
        Step::Numbers { rank, stream, array: self.slot(ARRAYS), seed: self.seed() }
    }

    fn bytes(&self, slot: Slot) -> u32 {
        self.model.array(slot).map_or(0, |(element, len)| element.size() as u32 * len)
    }

    fn any_span(&mut self) -> Span {
        let slot = self.slot(ARRAYS);
        let bytes = self.bytes(slot);
        let at = if self.dice.chance(50) { 0 } else { self.dice.below(bytes) };
        Span { slot, at, len: bytes - at }
    }

    /// A part of so many bytes at most, in units that fit its elements and words.
    fn span(&mut self, slot: Slot, most: u32) -> Span {
        let unit = 8;
        let bytes = self.bytes(slot);
        let len = most.min(bytes);
        let len = if len < unit { len } else { len - len % unit };
        let at = unit * self.dice.below((bytes - len) / unit + 1);
        Span { slot, at, len }
    }

    fn own(&mut self, rank: u32, stream: Slot) -> Step {
        let to = self.slot(ARRAYS);
        let float = self.model.array(to).is_some_and(|a| a.0.is_float());
        let whole = self.dice.chance(50);
        let most = if whole { u32::MAX } else { 8 + self.dice.below(64) };
        let mut to = self.span(to, most);
        let other = self.partner(to.slot);
        let work = match self.dice.below(100) {
            0..15 => {
                let width = self.dice.pick(&[1, 2, 4]);
                to.len -= to.len % u32::from(width);
                let mask = u32::MAX >> (32 - 8 * u32::from(width));
                let pattern = if float { 0 } else { self.seed() & mask };
                Work { op: Op::Fill { pattern, width }, from: Vec::new(), to }
            }
            15..30 if !float => {
                let hand = self.dice.pick(&[Hand::Asynchronous, Hand::Owned, Hand::Synchronous]);
                Work { op: Op::Upload { seed: self.seed(), hand }, from: Vec::new(), to }
            }
            30..100 if !float => self.launch(to),
            _ => {
                let from = self.span(other, to.len);
                to.len = from.len;
                Work { op: Op::Copy, from: vec![from], to }
            }
        };
        Step::Own { rank, stream, work }
    }

    fn launch(&mut self, mut to: Span) -> Work {
        let kernel = self.dice.pick(&[Kernel::Mask, Kernel::Scale, Kernel::Add]);
        let reads = match kernel {
            Kernel::Add => 2,
            Kernel::Scale => 1,
            _ => 0,
        };
        let mut from = Vec::new();
        for _ in 0..reads {
            let slot = self.slot(ARRAYS);
            from.push(self.span(slot, to.len));
        }
        to.len = from.iter().map(|f| f.len).fold(to.len, u32::min);
        to.len -= to.len % 4;
        from.iter_mut().for_each(|f| f.len = to.len);
        let words = [self.seed(), self.seed()];
        Work { op: Op::Launch { kernel, words }, from, to }
    }

    fn through(&mut self, rank: u32, stream: Slot) -> Step {
        let to = self.slot(ARRAYS);
        let from = self.partner(to);
        let mut to = self.span(to, u32::MAX);
        let from = self.span(from, to.len);
        to.len = from.len;
        Step::Through { rank, stream, to, from }
    }

    /// Another array of the same type, if one is found soon.
    fn partner(&mut self, of: Slot) -> Slot {
        let element = self.model.array(of).map(|a| a.0);
        let mut slot = of;
        for _ in 0..8 {
            slot = self.slot(ARRAYS);
            if slot != of && self.model.array(slot).map(|a| a.0) == element {
                break;
            }
        }
        slot
    }

    fn group(&mut self) -> Group {
        let (comm, stream) = (self.slot(COMMS), self.slot(STREAMS));
        let turn = self.slot(STREAMS);
        let calls = if self.dice.chance(70) { 1 } else { 2 + self.dice.below(2) };
        Group { comm, stream, turn, calls: (0..calls).map(|_| self.call()).collect() }
    }

    fn call(&mut self) -> Call {
        let to = self.slot(ARRAYS);
        let (other, how) = (self.partner(to), self.dice.pick(&Reduce::ALL));
        let (some, alone) = (self.dice.below(self.ranks), self.dice.chance(30));
        let (kind, parts, alone) = match self.dice.below(24) {
            0..5 => (Kind::AllReduce(how), 1, alone),
            5..8 => (Kind::AllGather, self.ranks, alone),
            8..11 => (Kind::ReduceScatter(how), self.ranks, alone),
            11..14 => (Kind::Broadcast(some), 1, true),
            14..17 => (Kind::Reduce(how, some), 1, true),
            17..20 => (Kind::AllToAll, self.ranks, false),
            20..23 => (Kind::Shift(1 + some), 1, false),
            _ => (Kind::Barrier, 1, true),
        };
        let from = if alone { to } else { other };
        let room = |g: &Self, slot| g.model.array(slot).map_or(0, |a| a.1);
        // The side that has one part only holds more than it needs to, mostly.
        let most = room(self, to).min(room(self, from)) / parts;
        let count = match self.dice.below(20) {
            0 => 0,
            1..10 => most,
            _ => self.dice.below(most + 1),
        };
        let place = |g: &mut Self, array| {
            let free = room(g, array).saturating_sub(parts * count);
            At { array, at: if g.dice.chance(50) { 0 } else { g.dice.below(free + 1) } }
        };
        let to = place(self, to);
        let from = if alone { to } else { place(self, from) };
        Call { kind, to, from, count }
    }

    fn record(&mut self) -> Step {
        let steps = 1 + self.dice.below(8);
        let steps = (0..steps).map(|_| {
            let (rank, stream) = (self.dice.below(self.ranks), self.slot(STREAMS));
            match self.dice.below(10) {
                0..5 => Step::Calls(self.group()),
                5..9 => self.own(rank, stream),
                _ => self.through(rank, stream),
            }
        });
        let steps = steps.collect();
        Step::Record { graph: self.slot(GRAPHS), steps }
    }

    fn split(&mut self) -> Step {
        let colors = 1 + self.dice.below(self.ranks.min(3));
        let places = (0..self.ranks).map(|_| {
            let key = self.dice.below(3) as i32 - 1;
            (!self.dice.chance(10)).then_some((self.dice.below(colors), key))
        });
        let places = places.collect();
        Step::Split { comm: self.slot(2), to: 2 + self.slot(COMMS - 2), places }
    }
}
