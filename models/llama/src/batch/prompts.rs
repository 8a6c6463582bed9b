//! The prompts of a batch: they wait in the order of their arrival, and are computed piece by
//! piece, each piece in one or several parts.
//!
//! A piece is a number of tokens, and its operators compute them together. How many is a matter of
//! the batch and of the prompt alone, so the bits of a prompt are the same at every time. A part is
//! a number of operators that follow each other. How many is a matter of the pace.
//!
//! A prompt has its own loop, beside that of the steps: the steps leave its token and its logits
//! alone until the host has read them.

use super::pace::{Pace, Work};
use crate::network::{Draws, Lane, Network, Scratch, Task, collected, has_tensor_products};
use crate::rules::TokenRules;
use leasehold::backend::sync::Arc;
use leasehold::ops::Pattern;
use leasehold::{Event, Lease, Name, Result, Runtime, Timepoint, View};
use leasehold_operators::{BufferPart, ops};
use std::collections::VecDeque;
use std::ops::Range;
use std::time::Duration;

/// Rows that products on tensor cores compute in the time of one row, at least: the tile of their
/// kernels.
const TENSOR_ROWS: u32 = 64;

/// The number of steps without a prompt of which one is timed.
const PLAIN: u32 = 4;

/// A prompt that is not computed yet, or not all of it.
struct Waiting {
    slot: usize,
    prompt: Arc<[u32]>,
    sampling: ops::SamplingRecord,
    rules: Arc<TokenRules>,
    /// The rotary table, once the prompt has begun.
    table: Option<BufferPart>,
    /// The tokens that another sequence had, and those of the pieces that are submitted as a whole.
    done: usize,
    piece: Option<Piece>,
}

/// Tokens of a prompt that are computed together.
struct Piece {
    tokens: Range<usize>,
    tasks: Vec<Task>,
    /// The operators that are submitted.
    submitted: usize,
}

/// The part of the first prompt that a call submitted.
pub(super) struct Submitted {
    pub(super) slot: usize,
    /// The end of the stream, after the prompt's last operator; `None` if there are more.
    pub(super) drawn: Option<Timepoint>,
}

/// The prompts of a batch.
pub(super) struct Prompts {
    waiting: VecDeque<Waiting>,
    /// The caches of each slot, with the position of the piece that is computed.
    pub(super) lanes: Vec<Lane>,
    /// The first token of each slot's prompt.
    pub(super) draws: Draws,
    /// The activations of a piece, and its ids: of the largest one that there was.
    memory: Option<(Scratch, BufferPart)>,
    pub(super) pace: Pace,
    /// The most tokens of a piece, if the user has set it.
    pub(super) piece: Option<usize>,
    clock: Clock,
    /// The end of the last part.
    end: Option<Timepoint>,
    /// Of each step that was measured, and of the part after it.
    #[cfg(test)]
    pub(super) times: Vec<(Duration, Duration)>,
}

impl Prompts {
    /// For the slots of `lanes`, whose steps have these operators.
    pub(super) fn new(network: &Network, lanes: &[Lane], step: &[Task]) -> Result<Self> {
        let model = &network.model;
        let draws = Draws::new(model, lanes.len() as u32, 1, true)?;
        let position: BufferPart = model.runtime().alloc(4)?.into();
        let lane = |lane: &Lane| Lane { caches: lane.caches.clone(), position: position.clone() };
        let floor = if has_tensor_products(model) { TENSOR_ROWS } else { 1 };
        Ok(Self {
            waiting: VecDeque::new(),
            lanes: lanes.iter().map(lane).collect(),
            draws,
            memory: None,
            pace: Pace::new(step, floor.max(lanes.len() as u32)),
            piece: None,
            clock: Clock::default(),
            end: None,
            #[cfg(test)]
            times: Vec::new(),
        })
    }

    /// Adds a prompt, of which so many tokens are in the caches already.
    pub(super) fn push(
        &mut self,
        slot: usize,
        prompt: Arc<[u32]>,
        (sampling, rules): (ops::SamplingRecord, Arc<TokenRules>),
        done: usize,
    ) {
        let (table, piece) = (None, None);
        self.waiting.push_back(Waiting { slot, prompt, sampling, rules, table, done, piece });
    }

    /// The tokens of the prompt of a slot whose computation is submitted.
    pub(super) fn submitted(&self, slot: usize) -> usize {
        self.waiting.iter().find(|w| w.slot == slot).map_or(0, |w| w.done)
    }

    /// Forgets the prompt of a slot. What is submitted of it goes on.
    pub(super) fn remove(&mut self, slot: usize) {
        self.waiting.retain(|w| w.slot != slot);
    }

    pub(super) fn len(&self) -> usize {
        self.waiting.len()
    }

    /// The tokens of a piece of a prompt with so many.
    pub(super) fn piece_of(&self, network: &Network, tokens: usize) -> usize {
        // Nothing waits for the prompt of the only slot.
        let lone = self.lanes.len() == 1;
        let most =
            if lone { network.lone_prompt_rows(tokens) } else { network.prompt_rows(tokens) };
        let rows = match self.piece {
            Some(piece) => piece,
            None if lone => most,
            None => {
                let (product, attended) = network.largest();
                self.pace.rows(product, attended, tokens)
            }
        };
        rows.min(most)
    }

    /// Submits operators of the first prompt. As many as the pace allows `beside` a step, and else
    /// the rest of a piece. Does not wait. A prompt that fails leaves the others alone.
    pub(super) fn submit(
        &mut self,
        network: &Network,
        beside: bool,
    ) -> Option<std::result::Result<Submitted, (usize, leasehold::Error)>> {
        let mut first = self.waiting.pop_front()?;
        let slot = first.slot;
        match self.part(network, &mut first, beside) {
            Err(why) => Some(Err((slot, why))),
            Ok(point) => {
                self.end = Some(point);
                let drawn = (first.done == first.prompt.len()).then_some(point);
                if drawn.is_none() {
                    self.waiting.push_front(first);
                }
                Some(Ok(Submitted { slot, drawn }))
            }
        }
    }

    fn part(
        &mut self,
        network: &Network,
        waiting: &mut Waiting,
        beside: bool,
    ) -> Result<Timepoint> {
        let stream = network.model.runtime().stream();
        let before = waiting.piece.take_if(|piece| piece.submitted == piece.tasks.len());
        let piece = match &mut waiting.piece {
            Some(piece) => piece,
            None => {
                let piece = self.begin(network, waiting, before)?;
                waiting.piece.insert(piece)
            }
        };
        let (tasks, rows) = (&piece.tasks[piece.submitted..], piece.tokens.len() as u32);
        let (count, work) = self.pace.take(tasks, rows, piece.tokens.end);
        let count = if beside { count } else { tasks.len() };
        Network::run(&tasks[..count], stream)?;
        piece.submitted += count;
        if piece.submitted == piece.tasks.len() {
            waiting.done = piece.tokens.end;
        }
        if beside {
            self.clock.submitted(rows, work);
        }
        Ok(stream.now())
    }

    /// The next piece of a prompt: its ids and its position in device memory, and its operators,
    /// which are those of the piece `before` if they are the same.
    fn begin(
        &mut self,
        network: &Network,
        waiting: &mut Waiting,
        before: Option<Piece>,
    ) -> Result<Piece> {
        let (model, prompt) = (&network.model, &waiting.prompt);
        let stream = model.runtime().stream();
        let _named = Name::new("prompt").scope();
        let rows = self.piece_of(network, prompt.len()).min(prompt.len() - waiting.done);
        let tokens = waiting.done..waiting.done + rows;
        let last = tokens.end == prompt.len();
        let table = match &waiting.table {
            Some(table) => table,
            None => waiting.table.insert(network.prompt_table(prompt.len())?),
        };
        let kept = self.memory.take().filter(|(scratch, _)| scratch.h.rows() as usize >= rows);
        let (scratch, ids) = match kept {
            Some(kept) => kept,
            None => {
                let rows = rows.next_power_of_two();
                let ids = model.runtime().alloc(4 * rows as u64)?;
                (Scratch::new(model, rows as u32)?, ids.into())
            }
        };
        let (scratch, ids) = self.memory.insert((scratch, ids));
        let ids = ids.slice(0, 4 * rows as u64)?;
        let scratch = scratch.first(model, rows as u32)?;
        stream.upload(ids.view(), &prompt[tokens.clone()])?;
        let lane = &self.lanes[waiting.slot];
        stream.fill(lane.position.view(), Pattern::U32(tokens.start as u32))?;
        let mut tasks = match before {
            Some(piece) if piece.tokens.len() == rows => piece.tasks,
            _ => collected(|to| network.piece(&scratch, lane, &ids, table, to))?,
        };
        if last {
            let draw = &self.draws.each[waiting.slot];
            stream.upload(draw.sampling.view(), &[waiting.sampling])?;
            draw.set_rules(stream, &waiting.rules, prompt, true)?;
            stream.fill(draw.state.position.view(), Pattern::U32(prompt.len() as u32 - 1))?;
            stream.fill(draw.state.count.view(), 0u32)?;
            tasks.extend(collected(|to| network.first_token(&scratch, draw, to))?);
        }
        Ok(Piece { tokens, tasks, submitted: 0 })
    }

    /// The end of the last part.
    pub(super) fn end(&self) -> Option<Timepoint> {
        self.end
    }

    /// Marks a time on the stream: 0 before a step, 1 after it, 2 after the part beside it.
    pub(super) fn mark(&mut self, runtime: &Runtime, at: usize) {
        self.clock.mark(runtime, at);
    }

    /// Returns whether the time of the next step is wanted: beside a prompt always, and else now
    /// and then.
    pub(super) fn wants_time(&mut self) -> bool {
        self.clock.steps = self.clock.steps.wrapping_add(1);
        !self.waiting.is_empty() || self.clock.steps.is_multiple_of(PLAIN)
    }

    /// Learns from the marked step before the last one, which is over. `marked` says whether the
    /// last one has marks, and is the next one to learn from.
    pub(super) fn learn(&mut self, marked: bool) {
        if let Some(Measured { step, part }) = self.clock.read() {
            self.pace.learn_step(step);
            if let Some((rows, work, beside)) = part {
                self.pace.learn_part(rows, work, beside);
                #[cfg(test)]
                self.times.push((step, beside));
            }
        }
        if marked {
            self.clock.turn ^= 1;
        }
    }
}

/// The times of steps and of what runs beside them, by timestamps on the stream. A measurement is
/// read one step later, so that nobody waits for it.
#[derive(Default)]
struct Clock {
    steps: u32,
    turn: usize,
    turns: [Turn; 2],
}

#[derive(Default)]
struct Turn {
    events: Vec<Lease<Event>>,
    /// The rows and the work of the part between the last two marks.
    part: Option<(u32, Work)>,
    /// The number of marks; 0 if one has failed, or once they were read.
    marks: usize,
}

/// The time of a step, and the rows, the work and the time of the part beside it.
struct Measured {
    step: Duration,
    part: Option<(u32, Work, Duration)>,
}

impl Clock {
    /// A mark that fails costs the measurement only.
    fn mark(&mut self, runtime: &Runtime, at: usize) {
        let turn = &mut self.turns[self.turn];
        if at == 0 {
            (turn.part, turn.marks) = (None, 0);
        }
        let mut record = || {
            while turn.events.len() <= at {
                turn.events.push(runtime.create_event()?);
            }
            runtime.stream().record(&turn.events[at])
        };
        let failed = record().is_err();
        turn.marks = if failed || turn.marks != at { 0 } else { at + 1 };
    }

    fn submitted(&mut self, rows: u32, work: Work) {
        self.turns[self.turn].part = Some((rows, work));
    }

    /// The time of the step of the turn before this one, and that of the part beside it. Once.
    fn read(&mut self) -> Option<Measured> {
        let turn = &mut self.turns[self.turn ^ 1];
        let marks = std::mem::take(&mut turn.marks);
        let [begin, between] = turn.events[..marks].first_chunk()?;
        let step = between.elapsed_since(begin).ok()?;
        let beside = turn.events[..marks].get(2).and_then(|end| end.elapsed_since(between).ok());
        let part = turn.part.take().zip(beside);
        Some(Measured { step, part: part.map(|((rows, work), beside)| (rows, work, beside)) })
    }
}
