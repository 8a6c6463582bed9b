//! The model of all ranks: what their arrays hold when the steps run one after the other.
//!
//! This module must not know the runtime.

use super::numbers;
use super::step::{ARRAYS, At, COMMS, Call, GRAPHS, Group, Kind, STREAMS, Step};
use crate::model::effect::{compute, sensible};
use crate::step::{Hand, Op, Slot, Span, Work};
use leasehold_collective::ElementType;
use std::rc::Rc;

/// A step with what is read in it.
#[derive(Debug)]
pub(super) struct Planned {
    pub(super) step: Step,
    pub(super) expect: Option<Vec<u8>>,
}

/// A program with what the model knows about it.
#[derive(Debug)]
pub(super) struct Plan {
    pub(super) ranks: u32,
    pub(super) steps: Vec<Planned>,
    /// What the arrays hold at the end: the slot, and the bytes by rank.
    pub(super) remains: Vec<(Slot, Vec<Vec<u8>>)>,
}

/// An array of each rank.
#[derive(Debug, Clone)]
struct Array {
    element: ElementType,
    len: u32,
    /// By rank.
    data: Vec<Vec<u8>>,
}

/// The ranks of a communicator, in its order; by rank, as splits give each one of several.
type Members = Rc<Vec<Option<Rc<Vec<u32>>>>>;

/// What lies in the slots.
#[derive(Debug, Clone)]
struct Slots {
    arrays: [Option<usize>; ARRAYS as usize],
    comms: [Option<Members>; COMMS as usize],
}

/// A recording, with the objects that it uses.
#[derive(Debug)]
struct Graph {
    steps: Vec<Step>,
    slots: Slots,
}

pub(super) struct Model {
    pub(super) ranks: u32,
    slots: Slots,
    arrays: Vec<Array>,
    graphs: [Option<Graph>; GRAPHS as usize],
    /// The stream of a rank that waits for a signal.
    held: Vec<bool>,
}

impl Model {
    pub(super) fn new(ranks: u32) -> Self {
        let all: Rc<Vec<u32>> = Rc::new((0..ranks).collect());
        let all: Members = Rc::new((0..ranks).map(|_| Some(all.clone())).collect());
        let mut comms = [const { None }; COMMS as usize];
        comms[..2].fill(Some(all));
        Self {
            ranks,
            slots: Slots { arrays: [None; ARRAYS as usize], comms },
            arrays: Vec::new(),
            graphs: [const { None }; GRAPHS as usize],
            held: vec![false; ranks as usize],
        }
    }

    /// The type and the number of an array's elements.
    pub(super) fn array(&self, slot: Slot) -> Option<(ElementType, u32)> {
        let array = &self.arrays[(*self.slots.arrays.get(usize::from(slot))?)?];
        Some((array.element, array.len))
    }

    /// Plays a step. `None` when it has no meaning now, might wait for ever, or would give numbers
    /// that are not exact; then nothing has changed.
    pub(super) fn admit(&mut self, step: &Step) -> Option<Planned> {
        let rank = step.rank().unwrap_or_default() as usize;
        if rank >= self.ranks as usize {
            return None;
        }
        let held = self.held.contains(&true);
        let mut expect = None;
        match *step {
            Step::New { array, element, len, seed } => {
                let place = self.slots.arrays.get_mut(usize::from(array))?;
                let data = (0..self.ranks).map(|r| first(element, seed, r, len)).collect();
                *place = Some(self.arrays.len());
                self.arrays.push(Array { element, len, data });
                self.clear();
            }
            Step::Numbers { .. } | Step::Own { .. } | Step::Through { .. } | Step::Calls(_) => {
                if held && waits(step) {
                    return None;
                }
                let slots = self.slots.clone();
                self.play(step, &slots)?;
            }
            Step::Record { graph, ref steps } => {
                // It is a recording of something, and all of it has a meaning.
                let sound = |s: &Step| match s {
                    Step::Numbers { .. } | Step::Own { .. } | Step::Through { .. } => {
                        { !waits(s) && s.rank()? < self.ranks }.then_some(())
                    }
                    Step::Calls(group) => self.group(group, &self.slots).map(drop),
                    _ => None,
                };
                steps.first()?;
                steps.iter().try_for_each(sound)?;
                self.trial(steps, &self.slots.clone())?;
                let recorded = Graph { steps: steps.clone(), slots: self.slots.clone() };
                *self.graphs.get_mut(usize::from(graph))? = Some(recorded);
                self.clear();
            }
            Step::Replay { graph, stream, .. } => {
                let graph = self.graphs.get_mut(usize::from(graph))?.take()?;
                let played = (stream < STREAMS).then(|| self.trial(&graph.steps, &graph.slots));
                let played = played.flatten();
                if let Some(arrays) = &played {
                    self.arrays.clone_from(arrays);
                }
                let Step::Replay { graph: slot, .. } = *step else { return None };
                self.graphs[usize::from(slot)] = Some(graph);
                played?;
            }
            Step::DropGraph(graph) => drop(self.graphs.get_mut(usize::from(graph))?.take()?),
            Step::Split { comm, to, ref places } => {
                if held
                    || comm >= 2
                    || !(2..COMMS).contains(&to)
                    || places.len() < self.ranks as usize
                {
                    return None;
                }
                self.slots.comms[usize::from(to)] = Some(split(&places[..self.ranks as usize]));
            }
            Step::Stream { stream, .. } | Step::Sync { stream, .. } => {
                let waits = matches!(step, Step::Sync { .. });
                (stream < STREAMS && !(waits && held)).then_some(())?;
            }
            Step::WaitStream { stream, on, .. } => {
                (stream < STREAMS && on < STREAMS && stream != on).then_some(())?;
            }
            Step::Hold { stream, .. } => {
                (stream < STREAMS && !self.held[rank]).then_some(())?;
                self.held[rank] = true;
            }
            Step::Signal { .. } => {
                self.held[rank].then_some(())?;
                self.held[rank] = false;
            }
            Step::Check { stream, span, .. } => {
                (stream < STREAMS && !held).then_some(())?;
                expect = Some(self.part(&self.slots, rank, &span)?.to_vec());
            }
            Step::Wrong { .. } => {}
            Step::Abort { .. } => (!held).then_some(())?,
        }
        Some(Planned { step: step.clone(), expect })
    }

    /// What the arrays hold now.
    pub(super) fn remains(&self) -> Vec<(Slot, Vec<Vec<u8>>)> {
        let all = (0..ARRAYS).zip(self.slots.arrays);
        all.filter_map(|(slot, at)| Some((slot, self.arrays[at?].data.clone()))).collect()
    }

    /// Forgets what lies in arrays that nobody can use any more.
    fn clear(&mut self) {
        let graphs = self.graphs.iter().flatten().map(|g| &g.slots);
        let used: Vec<usize> =
            graphs.chain([&self.slots]).flat_map(|s| s.arrays).flatten().collect();
        for (at, array) in self.arrays.iter_mut().enumerate() {
            if !used.contains(&at) {
                array.data.clear();
            }
        }
    }

    /// The arrays after some steps, whose objects lie in these slots.
    fn trial(&mut self, steps: &[Step], slots: &Slots) -> Option<Vec<Array>> {
        let before = self.arrays.clone();
        let played = steps.iter().try_for_each(|step| self.play(step, slots));
        let after = std::mem::replace(&mut self.arrays, before);
        played.map(|()| after)
    }

    fn id(slots: &Slots, slot: Slot) -> Option<usize> {
        *slots.arrays.get(usize::from(slot))?
    }

    fn part(&self, slots: &Slots, rank: usize, span: &Span) -> Option<&[u8]> {
        self.arrays[Self::id(slots, span.slot)?].data[rank].get(span.range())
    }

    /// Work and calls on the arrays of some slots.
    fn play(&mut self, step: &Step, slots: &Slots) -> Option<()> {
        match step {
            Step::Numbers { rank, stream, array, seed } => {
                let array = &mut self.arrays[Self::id(slots, *array)?];
                (*stream < STREAMS).then_some(())?;
                array.data[*rank as usize] =
                    numbers::some(array.element, *seed, array.len as usize);
            }
            Step::Own { rank, stream, work } => {
                (*stream < STREAMS).then_some(())?;
                self.own(*rank as usize, work, slots)?;
            }
            Step::Through { rank, stream, to, from } => {
                (*stream < STREAMS && from.len > 0).then_some(())?;
                let work = Work { op: Op::Copy, from: vec![*from], to: *to };
                self.own(*rank as usize, &work, slots)?;
            }
            Step::Calls(group) => {
                let effects = self.group(group, slots)?;
                for Effect { array, rank, at, bytes } in effects {
                    self.arrays[array].data[rank][at..][..bytes.len()].copy_from_slice(&bytes);
                }
            }
            _ => return None,
        }
        Some(())
    }

    fn own(&mut self, rank: usize, work: &Work, slots: &Slots) -> Option<()> {
        let to = Self::id(slots, work.to.slot)?;
        let from: Vec<usize> =
            work.from.iter().map(|s| Self::id(slots, s.slot)).collect::<Option<_>>()?;
        let ids: Vec<u32> = from.iter().map(|id| *id as u32).collect();
        sensible(work, &ids, to as u32)?;
        let element = self.arrays[to].element;
        if element.is_float() {
            // Other bytes are no small numbers.
            let size = element.size() as u32;
            let whole = |s: &Span| s.at.is_multiple_of(size) && s.len.is_multiple_of(size);
            let alike = |id: &usize| self.arrays[*id].element == element;
            let kept = match work.op {
                Op::Fill { pattern, .. } => pattern == 0 && whole(&work.to),
                Op::Copy => whole(&work.to) && whole(&work.from[0]) && from.iter().all(alike),
                _ => false,
            };
            kept.then_some(())?;
        }
        let inputs: Vec<Vec<u8>> = work
            .from
            .iter()
            .map(|s| self.part(slots, rank, s).map(<[u8]>::to_vec))
            .collect::<Option<_>>()?;
        self.part(slots, rank, &work.to)?;
        compute(work, None, &inputs, &mut self.arrays[to].data[rank]);
        Some(())
    }

    /// The effects of calls on all ranks' arrays.
    fn group(&self, group: &Group, slots: &Slots) -> Option<Vec<Effect>> {
        let members = slots.comms.get(usize::from(group.comm))?.as_ref()?;
        (group.stream < STREAMS && !group.calls.is_empty()).then_some(())?;
        let mut all = Vec::new();
        for (at, call) in group.calls.iter().enumerate() {
            // Nobody uses what another call writes.
            let used = |c: &Call| match c.kind {
                Kind::Barrier => vec![],
                _ => vec![c.to.array, c.from.array],
            };
            let ids = |c: &Call| used(c).into_iter().map(|a| Self::id(slots, a));
            for other in group.calls.iter().skip(at + 1) {
                if ids(call).any(|a| ids(other).any(|b| a == b)) {
                    return None;
                }
            }
            let mut done: Vec<&Rc<Vec<u32>>> = Vec::new();
            for part in members.iter().flatten() {
                if !done.iter().any(|d| Rc::ptr_eq(d, part)) {
                    done.push(part);
                    self.call(call, part, slots, &mut all)?;
                }
            }
        }
        Some(all)
    }

    /// The effects of a call of these ranks.
    fn call(&self, call: &Call, ranks: &[u32], slots: &Slots, all: &mut Vec<Effect>) -> Option<()> {
        let Call { kind, to, from, count } = *call;
        if kind == Kind::Barrier {
            return Some(());
        }
        let n = ranks.len();
        let (to_id, from_id) = (Self::id(slots, to.array)?, Self::id(slots, from.array)?);
        let (array, other) = (&self.arrays[to_id], &self.arrays[from_id]);
        let element = array.element;
        (element == other.element).then_some(())?;
        let one = to_id == from_id;
        let (size, count) = (element.size() as usize, count as usize);
        // So many parts of an array from a place on, at a part.
        let within = |array: &Array, at: At, parts: usize| {
            (at.at as usize + parts * count <= array.len as usize).then_some(())
        };
        let read = |at: At, part: usize, parts: usize| -> Vec<&[u8]> {
            let from = (at.at as usize + part * count) * size;
            let data = &self.arrays[from_id].data;
            ranks.iter().map(|r| &data[*r as usize][from..][..parts * count * size]).collect()
        };
        let mut write = |rank: usize, at: At, part: usize, bytes: Vec<u8>| {
            let at = (at.at as usize + part * count) * size;
            all.push(Effect { array: to_id, rank: ranks[rank] as usize, at, bytes });
        };
        let own_place = one && to == from;
        match kind {
            Kind::AllReduce(how) => {
                (!one || own_place).then_some(())?;
                within(array, to, 1).and(within(other, from, 1))?;
                let sum = numbers::reduce(element, how, &read(from, 0, 1))?;
                (0..n).for_each(|r| write(r, to, 0, sum.clone()));
            }
            Kind::AllGather => {
                within(array, to, n)?;
                within(other, from, if one { n } else { 1 })?;
                let own = |r| if one { read(to, r, 1)[r] } else { read(from, 0, 1)[r] };
                let gathered: Vec<u8> = (0..n).flat_map(own).copied().collect();
                (0..n).for_each(|r| write(r, to, 0, gathered.clone()));
            }
            Kind::ReduceScatter(how) => {
                within(other, from, n)?;
                within(array, to, if one { n } else { 1 })?;
                for r in 0..n {
                    let part = numbers::reduce(element, how, &read(from, r, 1))?;
                    if one { write(r, from, r, part) } else { write(r, to, 0, part) }
                }
            }
            Kind::Broadcast(root) => {
                own_place.then_some(())?;
                within(array, to, 1)?;
                let sent = read(to, 0, 1)[root as usize % n].to_vec();
                (0..n).for_each(|r| write(r, to, 0, sent.clone()));
            }
            Kind::Reduce(how, root) => {
                own_place.then_some(())?;
                within(array, to, 1)?;
                let sum = numbers::reduce(element, how, &read(to, 0, 1))?;
                write(root as usize % n, to, 0, sum);
            }
            Kind::AllToAll => {
                (!one).then_some(())?;
                within(array, to, n).and(within(other, from, n))?;
                for r in 0..n {
                    let got = read(from, r, 1).concat();
                    write(r, to, 0, got);
                }
            }
            Kind::Shift(by) => {
                (!one && !(by as usize).is_multiple_of(n)).then_some(())?;
                within(array, to, 1).and(within(other, from, 1))?;
                let sent = read(from, 0, 1);
                for r in 0..n {
                    let from = (r + n - by as usize % n) % n;
                    write(r, to, 0, sent[from].to_vec());
                }
            }
            Kind::Barrier => {}
        }
        Some(())
    }
}

/// Bytes that a call writes.
struct Effect {
    array: usize,
    rank: usize,
    at: usize,
    bytes: Vec<u8>,
}

/// Whether the host waits in a step for its stream.
fn waits(step: &Step) -> bool {
    matches!(
        step,
        Step::Own { work: Work { op: Op::Upload { hand: Hand::Synchronous, .. }, .. }, .. }
    )
}

/// A rank's elements of a new array.
pub(super) fn first(element: ElementType, seed: u32, rank: u32, len: u32) -> Vec<u8> {
    numbers::some(element, seed.wrapping_add(rank.wrapping_mul(0x9E37)), len as usize)
}

/// The communicators of parts.
fn split(places: &[Option<(u32, i32)>]) -> Members {
    let mut parts: Vec<(u32, Rc<Vec<u32>>)> = Vec::new();
    let of = |place: &Option<(u32, i32)>| {
        let color = place.as_ref()?.0;
        if let Some(part) = parts.iter().find(|p| p.0 == color) {
            return Some(part.1.clone());
        }
        let own = (0..).zip(places).filter_map(|(rank, p)| {
            let (theirs, key) = (*p)?;
            (theirs == color).then_some((key, rank))
        });
        let mut own: Vec<(i32, u32)> = own.collect();
        own.sort_unstable();
        let part = Rc::new(own.into_iter().map(|o| o.1).collect());
        parts.push((color, Rc::clone(&part)));
        Some(part)
    };
    Rc::new(places.iter().map(of).collect())
}
