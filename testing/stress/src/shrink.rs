//! Makes a failing program smaller: fewer threads, fewer steps, fewer nodes.
//!
//! This module must not know why a program fails.

use crate::generate::Program;
use crate::step::{Node, Step};
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

/// The smallest program found within the time that `fails`; the program itself where nothing
/// smaller does.
pub(crate) fn shrink(
    program: &Program,
    within: Duration,
    mut fails: impl FnMut(&Program) -> bool,
) -> Program {
    let mut search = Search {
        best: program.clone(),
        end: Instant::now().checked_add(within),
        fails: &mut fails,
    };
    search.one_thread();
    loop {
        let before = search.best.size();
        search.steps();
        search.threads();
        search.parts();
        if search.best.size() == before || search.is_late() {
            return search.best;
        }
    }
}

impl Program {
    fn size(&self) -> usize {
        let of = |step: &Step| match step {
            Step::Graph { nodes, .. } => 1 + nodes.len(),
            Step::Session(_, works) => 1 + works.len(),
            _ => 1,
        };
        let threads: BTreeSet<u8> = self.steps.iter().map(|s| s.0).collect();
        threads.len() + self.steps.iter().map(|(_, s)| of(s)).sum::<usize>()
    }
}

/// Takes ever smaller runs away, from the end to the beginning, as long as the rest fails.
pub(crate) fn without_runs<T: Clone>(
    steps: &mut Vec<T>,
    late: &dyn Fn() -> bool,
    mut fails: impl FnMut(&[T]) -> bool,
) {
    let mut size = steps.len().div_ceil(2);
    while size > 0 && !late() {
        let mut end = steps.len();
        while end > 0 {
            let from = end.saturating_sub(size);
            let mut rest = steps.clone();
            rest.drain(from..end);
            if fails(&rest) {
                *steps = rest;
            }
            end = from;
            if late() {
                return;
            }
        }
        size = if size == 1 { 0 } else { size.div_ceil(2) };
    }
}

struct Search<'a> {
    best: Program,
    /// `None`: beyond what the clock can say.
    end: Option<Instant>,
    fails: &'a mut dyn FnMut(&Program) -> bool,
}

impl Search<'_> {
    fn is_late(&self) -> bool {
        self.end.is_some_and(|end| Instant::now() >= end)
    }

    /// Keeps a program if it fails.
    fn take(&mut self, steps: Vec<(u8, Step)>) -> bool {
        let program = Program { shape: self.best.shape, steps };
        let fails = !self.is_late() && (self.fails)(&program);
        if fails {
            self.best = program;
        }
        fails
    }

    fn one_thread(&mut self) {
        let steps = self.best.steps.iter().map(|(_, s)| (0, s.clone())).collect();
        self.take(steps);
    }

    /// Without one thread's steps, or with them on another thread.
    fn threads(&mut self) {
        let threads: BTreeSet<u8> = self.best.steps.iter().map(|s| s.0).collect();
        if threads.len() < 2 {
            return;
        }
        for t in threads {
            let without = self.best.steps.iter().filter(|s| s.0 != t).cloned().collect();
            if !self.take(without) {
                let other = if t == 0 { 1 } else { 0 };
                let merged = self
                    .best
                    .steps
                    .iter()
                    .map(|(u, s)| (if *u == t { other } else { *u }, s.clone()))
                    .collect();
                self.take(merged);
            }
        }
    }

    /// Without ever smaller runs of steps, from the end to the beginning.
    fn steps(&mut self) {
        let mut steps = self.best.steps.clone();
        let end = self.end;
        let late = || end.is_some_and(|end| Instant::now() >= end);
        without_runs(&mut steps, &late, |steps| self.take(steps.to_vec()));
    }

    /// Without nodes of graphs and launches of sessions.
    fn parts(&mut self) {
        for at in (0..self.best.steps.len()).rev() {
            let mut part = 0;
            while !self.is_late() {
                let Some((thread, step)) = self.best.steps.get(at).cloned() else { break };
                let smaller = match step {
                    Step::Graph { slot, temps, mut nodes }
                        if part < nodes.len() && nodes.len() > 1 =>
                    {
                        nodes.remove(part);
                        Step::Graph { slot, temps, nodes }
                    }
                    Step::Session(stream, mut works) if part < works.len() && works.len() > 1 => {
                        works.remove(part);
                        Step::Session(stream, works)
                    }
                    Step::Graph { slot, mut temps, nodes }
                        if !temps.is_empty() && part == nodes.len() =>
                    {
                        // Only the last: the others' numbers stay.
                        temps.pop();
                        let used = |n: &Node| {
                            n.works().iter().any(|w| {
                                w.from.iter().chain([&w.to]).any(|s| {
                                    usize::from(s.slot)
                                        == temps.len() + usize::from(crate::step::TEMPS)
                                })
                            })
                        };
                        if nodes.iter().any(used) {
                            break;
                        }
                        Step::Graph { slot, temps, nodes }
                    }
                    _ => break,
                };
                let mut steps = self.best.steps.clone();
                steps[at] = (thread, smaller);
                if !self.take(steps) {
                    part += 1;
                }
            }
        }
    }
}
