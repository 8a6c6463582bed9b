//! Programs of ranks: one program for all of them, with collectives between work of their own.
//!
//! # What a program does
//! Each rank is a thread with a device of its own; on the CPU they share one. All make the same
//! calls in the same order: every collective, type and reduction, one by one and in groups, in
//! place and not, on any of a rank's streams. The calls go to communicators of all ranks and of
//! parts, eagerly and in recordings that are launched again and again. Between them ranks upload,
//! fill, copy, launch kernels, and free memory that is still in use; streams are held back by the
//! host, dropped and made again. Some calls are wrong and must be refused. Some communicators are
//! aborted with a call to come.
//!
//! # What is checked
//! * Parts of arrays are read back at random times, and all arrays at the end: they hold what they
//!   hold when the steps run one after the other. Numbers are chosen so that every sum is exact, so
//!   contents are compared to the bit.
//! * What depends on an aborted call fails, and nothing else does.
//! * Nothing is left, nothing hangs, and the simulated machine reports nothing: no race, no
//!   dead-lock, no calls that do not fit each other.
//!
//! With faults, commands come late or in another order, and nothing may fail.
//!
//! A failing program is made smaller, and printed as a test that plays its steps.

mod generate;
mod model;
mod numbers;
mod play;
mod shrink;
mod step;

pub use step::{At, Call, Group, Kind, Program, Step, Wrong};

use crate::options::Options;
use crate::play::{Finding, Stop};
use crate::target::Target;
use std::fmt::Write;
use std::time::Duration;

/// The items that a printed test uses.
pub mod prelude {
    pub use super::Kind::{
        AllGather, AllReduce, AllToAll, Barrier, Broadcast, Reduce, ReduceScatter, Shift,
    };
    pub use super::Step::*;
    pub use super::Wrong::{Integers, Lengths, Overlap, Root};
    pub use super::{At, Call, Group, Program};
    pub use crate::kernels::Kernel::{Add, Mask, Scale};
    pub use crate::step::Hand::{Asynchronous, Owned, Synchronous};
    pub use crate::step::Op::{Copy, Fill, Launch, Upload};
    pub use crate::step::{Span, Work};
    pub use crate::target::Target;
    pub use leasehold_collective::ElementType::*;
    pub use leasehold_collective::Reduce::{Average, Largest, Least, Product, Sum};
    pub use std::time::Duration;
}

impl Program {
    /// Plays the program on a target. The seed is the machine's, if that is simulated. With
    /// faults, commands come late. `timeout` is how long nothing may go on.
    ///
    /// # Errors
    /// The finding. It also says so if the devices cannot be opened or a thread is refused.
    pub fn run(
        &self,
        target: &Target,
        seed: u64,
        faults: bool,
        timeout: Duration,
    ) -> Result<(), Finding> {
        play::play(target, seed, faults, self.plan(), timeout).map_err(Stop::into_finding)
    }
}

/// The program of a seed.
pub(crate) fn program(options: &Options, ranks: u32, seed: u64) -> Program {
    generate::generate(seed, options.ops, ranks, &options.target.elements()).0
}

/// Plays the program of a seed.
pub(crate) fn played(options: &Options, ranks: u32, seed: u64) -> Result<(), Stop> {
    let (_, plan) = generate::generate(seed, options.ops, ranks, &options.target.elements());
    play::play(&options.target, seed, options.faults, plan, options.timeout)
}

/// The smallest program found within the time that fails, as the steps that have a meaning.
pub(crate) fn small(options: &Options, ranks: u32, seed: u64, within: Duration) -> Program {
    let program = program(options, ranks, seed);
    let timeout = options.timeout.min(Duration::from_secs(3));
    let fails = |program: &Program| {
        let played = play::play(&options.target, seed, options.faults, program.plan(), timeout);
        matches!(played, Err(Stop::Found(_)))
    };
    let small = if within.is_zero() { program } else { shrink::shrink(program, within, fails) };
    let steps = small.plan().steps.into_iter().map(|p| p.step).collect();
    Program { ranks: small.ranks, steps }
}

/// The program as a test.
pub(crate) fn print(options: &Options, seed: u64, program: &Program, why: &str) -> String {
    let mut text = String::new();
    let Target { device, simulated } = options.target;
    let Program { ranks, steps } = program;
    // Writing to a string does not fail.
    let _ = writeln!(
        text,
        "//! Seed {seed} on {device}, {ranks} ranks: {}\n\nuse leasehold_stress::ranks::prelude::*;\n",
        why.replace('\n', " ")
    );
    let _ = writeln!(text, "#[test]\nfn seed_{seed}() {{");
    let _ = writeln!(text, "    let steps = vec![");
    for step in steps {
        let _ = writeln!(text, "        {},", literal(step));
    }
    let _ = writeln!(text, "    ];\n    let program = Program {{ ranks: {ranks}, steps }};");
    let _ = writeln!(
        text,
        "    let target = Target::new(\"{device}\".parse().unwrap(), {simulated}).unwrap();"
    );
    let _ = writeln!(
        text,
        "    program.run(&target, {seed}, {}, Duration::from_secs({})).unwrap();\n}}",
        options.faults,
        options.timeout.as_secs().max(1)
    );
    text
}

/// A step as Rust. Lists are vectors.
fn literal(step: &Step) -> String {
    format!("{step:?}").replace('[', "vec![").replace("words: vec![", "words: [")
}

#[cfg(test)]
mod tests {
    use super::step::Step;
    use crate::{Options, Target, model, run, stress};
    use std::time::Duration;

    /// The first program that shows a mistake in the model is found, made small and printed.
    #[test]
    fn a_failing_program_of_ranks_is_shrunk_to_the_call_that_shows_the_mistake() {
        let mut options = Options::new(Target::new("cpu:0".parse().unwrap(), false).unwrap());
        (options.ops, options.ranks) = (120, Some(3));
        (options.timeout, options.shrink) = (Duration::from_secs(120), Duration::from_secs(60));
        options.seed =
            (0..50).find(|&seed| model::mistaken(|| run(&options, seed)).is_err()).unwrap();
        let seed = options.seed;
        assert_eq!(run(&options, seed), Ok(()), "without the mistake nothing is found");
        let report = model::mistaken(|| stress(&options, |_, _| {}));
        let [failure] = &report.failures[..] else { panic!("{report:?}") };
        assert_eq!((failure.seed, failure.hang, report.ranks), (seed, false, Some(3)));
        // Two arrays with contents, and the call.
        assert!(failure.steps <= 6, "{} steps:\n{}", failure.steps, failure.test);
        let test = &failure.test;
        assert!(test.starts_with(&format!("//! Seed {seed} on cpu:0, ")), "{test}");
        assert!(test.contains("(Largest") && test.contains("#[test]"), "{test}");
        assert!(test.contains("Program { ranks: 2, steps }"), "two ranks are enough: {test}");
    }

    /// Every kind of step is played by few programs.
    #[test]
    fn programs_have_every_kind_of_step_and_call() {
        let mut options = Options::new(Target::new("cpu:0".parse().unwrap(), false).unwrap());
        (options.ops, options.ranks) = (300, Some(4));
        let programs: Vec<_> = (0..20).map(|seed| super::program(&options, 4, seed)).collect();
        let name = |step: &Step| format!("{step:?}").split([' ', '(']).next().unwrap().to_owned();
        let mut found: Vec<String> = programs.iter().flat_map(|p| &p.steps).map(name).collect();
        let calls = programs.iter().flat_map(|p| &p.steps).filter_map(|step| match step {
            Step::Calls(group) => Some(format!("{group:?}")),
            _ => None,
        });
        let calls: String = calls.collect();
        found.sort();
        found.dedup();
        let all = "Abort Calls Check DropGraph Hold New Numbers Own Record Replay Signal Split \
                   Stream Sync Through WaitStream Wrong";
        assert_eq!(found.join(" "), all);
        for kind in ["AllReduce", "AllGather", "ReduceScatter", "Broadcast", "Reduce", "AllToAll"] {
            assert!(calls.contains(&format!("kind: {kind}")), "{kind}");
        }
        for text in ["Shift", "Barrier", "Sum", "Product", "Least", "Largest", "Average"] {
            assert!(calls.contains(text), "{text}");
        }
        let types: String =
            programs.iter().flat_map(|p| &p.steps).map(|s| format!("{s:?} ")).collect();
        for element in leasehold_collective::ElementType::ALL {
            assert!(types.contains(&format!("element: {element:?},")), "{element}");
        }
    }
}
