//! The amount of a prompt's work that goes beside a step, so that no sequence waits long for it.
//!
//! The bound needs no clock. A product of many rows takes at most as long for a row as one of few
//! rows does. So operators with fewer multiplications than a step, and fewer launches, take less
//! time than the step. Where weights are read from slow memory, they may take much less. A measured
//! ratio then allows more of them, and as many more launches.
//!
//! The aim is a time between two steps of less than two usual steps. The median of the last steps
//! is a usual one. A step that takes longer leaves less to the next part.
//!
//! This module must not know the device, nor what the operators compute.

use crate::network::Task;
use std::collections::VecDeque;
use std::time::Duration;

/// The part of a step's time that may pass beside it: the rest is for what no one foresees.
pub(super) const SHARE: f64 = 0.75;
/// The least share, so that a prompt goes on beside steps that take longer than usual.
const LEAST: f64 = 0.25;
/// The time from one step to the next one that is aimed at, in usual steps.
const AIM: f64 = 1.0 + SHARE;
/// The number of last steps that say what is usual.
const STEPS: usize = 32;
/// An attention's multiplication takes as long as so many of a product, about.
const ATTENTION: f64 = 2.0;
/// The limits of the measured ratio, for clocks that tell little of short times.
const RATIOS: (f64, f64) = (1.0 / 16.0, 64.0);

/// Multiplications of operators, as a product has them.
#[derive(Debug, Clone, Copy, PartialEq, PartialOrd)]
pub(super) struct Work(pub(super) f64);

/// The work that may go beside a step.
#[derive(Debug)]
pub(super) struct Pace {
    /// Fewer rows are counted as so many: a product of them takes as long, at most.
    floor: u32,
    /// Of a step.
    work: Work,
    /// Of a step.
    tasks: usize,
    /// The last times of steps, in seconds, the newest one at the end.
    times: VecDeque<f64>,
    /// For operators of 2^i rows: their work in a time, over that of a step.
    ratios: [Option<f64>; 32],
}

impl Pace {
    /// For steps of these operators, whose products take as long as those of `floor` rows, at
    /// least.
    pub(super) fn new(step: &[Task], floor: u32) -> Self {
        let weights: u64 = step.iter().map(|task| task.weights).sum();
        let work = Work(f64::from(floor) * weights as f64);
        Self { floor, work, tasks: step.len(), times: VecDeque::new(), ratios: [None; 32] }
    }

    /// The work of an operator for rows of a sequence that end at position `end`.
    pub(super) fn work(&self, task: &Task, end: usize) -> Work {
        let product = f64::from(task.rows.max(self.floor)) * task.weights as f64;
        Work(product + self.attention(task.rows, task.attended, end))
    }

    fn attention(&self, rows: u32, attended: u64, end: usize) -> f64 {
        ATTENTION * f64::from(rows) * attended as f64 * end as f64
    }

    /// The largest power of two of rows whose operators are each allowed beside a step, but not
    /// fewer than those of a step. The largest product has so many `weights`, and attention so many
    /// elements, in a sequence of `end` positions.
    pub(super) fn rows(&self, weights: u64, attended: u64, end: usize) -> usize {
        let row = (weights as f64).max(self.attention(1, attended, end)).max(1.0);
        // With the rows of a step, each operator is one of the step's.
        let rows = (SHARE * self.work.0 / row).max(f64::from(self.floor)) as u32;
        1 << rows.ilog2()
    }

    /// How many of the tasks may go beside a step, and their work: one at least. Their rows end at
    /// position `end`, and their products have `rows` rows.
    pub(super) fn take(&self, tasks: &[Task], rows: u32, end: usize) -> (usize, Work) {
        let share = self.share();
        let ratio = self.ratio(rows);
        let allowed = share * self.work.0 * ratio;
        let launches = (share * self.tasks as f64 * ratio.max(1.0)) as usize;
        let (mut count, mut work) = (0, 0.0);
        for task in tasks {
            let more = work + self.work(task, end).0;
            if count > 0 && (more > allowed || count >= launches) {
                break;
            }
            (count, work) = (count + 1, more);
        }
        (count, Work(work))
    }

    /// The measured ratio for so many rows, or that for the next fewer ones. More rows do more
    /// work in a time.
    pub(super) fn ratio(&self, rows: u32) -> f64 {
        let known = self.ratios[..=rows.max(1).ilog2() as usize].iter().rev();
        known.copied().flatten().next().unwrap_or(1.0)
    }

    /// The median of the last steps.
    fn usual(&self) -> Option<f64> {
        let mut times: Vec<f64> = self.times.iter().copied().collect();
        times.sort_unstable_by(f64::total_cmp);
        times.get(times.len().checked_sub(1)? / 2).copied()
    }

    /// The share of a usual step that may go beside the next one, which is expected to take as long
    /// as the last one.
    pub(super) fn share(&self) -> f64 {
        match (self.usual(), self.times.back()) {
            (Some(time), Some(last)) if time > 0.0 => (AIM - last / time).clamp(LEAST, SHARE),
            _ => SHARE,
        }
    }

    /// Learns the time of a step.
    pub(super) fn learn_step(&mut self, step: Duration) {
        if self.times.len() == STEPS {
            self.times.pop_front();
        }
        self.times.push_back(step.as_secs_f64());
    }

    /// Learns from operators of `rows` rows that ran beside a step.
    pub(super) fn learn_part(&mut self, rows: u32, work: Work, beside: Duration) {
        let (Some(time), beside) = (self.usual(), beside.as_secs_f64()) else { return };
        if time <= 0.0 || beside <= 0.0 || work.0 <= 0.0 {
            return;
        }
        let ratio = ((work.0 / self.work.0) / (beside / time)).clamp(RATIOS.0, RATIOS.1);
        let at = &mut self.ratios[rows.max(1).ilog2() as usize];
        // Less is allowed at once, and more after several times.
        *at = Some(at.map_or(ratio, |before| ratio.min(0.75 * before + 0.25 * ratio)));
    }

    /// The work and the launches of a step.
    #[cfg(test)]
    pub(super) fn step(&self) -> (Work, usize) {
        (self.work, self.tasks)
    }
}
