//! Makes a failing program of ranks smaller: fewer ranks, steps, calls.
//!
//! This module must not know why a program fails.

use super::step::{Program, Step};
use crate::shrink::without_runs;
use std::time::{Duration, Instant};

/// The smallest program found within the time that `fails`; the program itself where nothing
/// smaller does.
pub(super) fn shrink(
    program: Program,
    within: Duration,
    fails: impl Fn(&Program) -> bool,
) -> Program {
    let end = Instant::now().checked_add(within);
    let late = || end.is_some_and(|end| Instant::now() >= end);
    let fails = |ranks, steps: &[Step]| !late() && fails(&Program { ranks, steps: steps.to_vec() });
    let Program { mut ranks, mut steps } = program;
    loop {
        let before = (ranks, size(&steps));
        for fewer in 2..ranks {
            if fails(fewer, &steps) {
                ranks = fewer;
                break;
            }
        }
        without_runs(&mut steps, &late, |steps| fails(ranks, steps));
        for at in 0..steps.len() {
            let mut part = 0;
            while let Some(smaller) = without(&steps[at], part) {
                let mut fewer = steps.clone();
                fewer[at] = smaller;
                if fails(ranks, &fewer) {
                    steps = fewer;
                } else {
                    part += 1;
                }
                if late() {
                    return Program { ranks, steps };
                }
            }
        }
        if before == (ranks, size(&steps)) || late() {
            return Program { ranks, steps };
        }
    }
}

fn size(steps: &[Step]) -> usize {
    let of = |step: &Step| match step {
        Step::Calls(group) => group.calls.len(),
        Step::Record { steps, .. } => 1 + size(steps),
        _ => 1,
    };
    steps.iter().map(of).sum()
}

/// A step without one of its calls or recorded steps.
fn without(step: &Step, part: usize) -> Option<Step> {
    let mut step = step.clone();
    match &mut step {
        Step::Calls(group) if part < group.calls.len() && group.calls.len() > 1 => {
            group.calls.remove(part);
        }
        Step::Record { steps, .. } if part < steps.len() && steps.len() > 1 => {
            steps.remove(part);
        }
        _ => return None,
    }
    Some(step)
}
