//! Random programs over the runtime's safe API, checked against a naive sequential model.
//!
//! # What a program does
//! Streams and events (also in graphs), host timelines that are signalled by the host and by host
//! calls, buffers and parts of them, pinned memory, uploads of every kind, copies, rows, fills,
//! launches alone and several in a session, host calls, completions, graphs with branches and
//! temporaries, their updates, current contexts, second contexts, calls that must be refused; drops
//! of all of it in any order by any thread. Threads write one buffer at the same moment where what
//! they do commutes. Another device of the context has streams and buffers too:
//! of the same backend, or of another one. Copies go between the two, in graphs as well; its
//! runtime is closed and opened again. Scenes with objects of their own fail on purpose.
//!
//! # What is checked
//! * Parts of buffers are read back at random times, and all buffers at the end: they hold what
//!   they hold when the steps run one after the other.
//! * No call fails. Host calls ran as often as they must, and each completion came once. An event
//!   that was waited for is over. A stream that is free gives its turn, and never to two.
//! * Nothing is left: no buffer of the allocator, whose tables are consistent; no lease, so that
//!   the backend shuts down; nothing of a simulated driver.
//! * Nothing hangs: where no step ends for a while, the report says where each thread is.
//! * On simulated devices the race detector reports nothing.
//!
//! With faults, calls of the simulated driver fail. Then steps may fail too, but what they say is
//! complete is right, nothing is left and nothing hangs. Every fourth seed has commands that come
//! late or in another order instead; there nothing may fail.
//!
//! # The model
//! The runtime orders two operations on one buffer, of which one writes, by their submission, on
//! whatever streams. So threads hand a buffer over when one of them writes it. They share it for
//! reading, and for launches that commute; everything else they do at any time. Which steps come in
//! order follows from the program, so the same seed gives the same program with the same contents,
//! however the threads run.
//!
//! # Ranks
//! Programs of another kind have ranks instead of threads, and calls of all of them between their
//! work: [`ranks`].
//!
//! # How to reproduce
//! `leasehold-workbench stress --seed S` with the same `--ops` and `--threads` runs the same
//! program again. Orders between threads differ from run to run, but those of a simulated device
//! follow from the seed as far as one thread uses it. The printed test needs this crate's
//! [`prelude`] and nothing else beside the runtime.
//!
//! ```
//! use leasehold_stress::{Options, Target, run};
//! let mut options = Options::new(Target::new("cpu:0".parse()?, false)?);
//! (options.ops, options.threads) = (200, 2);
//! assert_eq!(run(&options, 1), Ok(()));
//! # Ok::<(), leasehold::Error>(())
//! ```
//!
//! # The C ABI
//! With [`Border::C`] the same programs are played by calls of the C ABI, where it has the
//! function. The printed test makes the same steps by the safe API.
//!
//! This crate must not use anything of the runtime's but what every user of the crates `leasehold`
//! and `leasehold-collective` has, and the C ABI in one module; the backends under it are made in
//! another one.

mod dice;
mod generate;
pub mod kernels;
mod model;
mod options;
mod play;
pub mod prelude;
mod print;
pub mod ranks;
pub mod scenes;
mod shrink;
mod step;
mod target;
mod through;
mod work;

pub use options::{Border, Options};
pub use play::Finding;
pub use target::{Bench, Target};

use generate::{Features, Program};
use leasehold::BackendKind;
use leasehold::backend::sync::Arc;
use model::Far;
use play::Stop;
use serde::Serialize;
use std::sync::Once;
use std::time::{Duration, Instant};

/// A program that fails.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Failure {
    /// Its seed.
    pub seed: u64,
    /// A description of the failure.
    pub what: String,
    /// Says whether nothing went on.
    pub hang: bool,
    /// Where each thread was.
    pub threads: Vec<String>,
    /// Steps of the smallest program found that fails.
    pub steps: usize,
    /// That program, as a Rust test.
    pub test: String,
}

/// The report of a run.
#[derive(Debug, Clone, Serialize)]
#[non_exhaustive]
pub struct Report {
    /// The device.
    pub device: String,
    /// Says whether its driver is simulated.
    pub simulated: bool,
    /// Says whether calls were made to fail.
    pub faults: bool,
    /// The first seed.
    pub seed: u64,
    /// Seeds that were run.
    pub seeds: u64,
    /// Steps of each.
    pub ops: u32,
    /// Threads of each.
    pub threads: u8,
    /// Ranks of each, if they are programs of ranks.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ranks: Option<u8>,
    /// Seconds that it took.
    pub seconds: f64,
    /// The programs that fail.
    pub failures: Vec<Failure>,
    /// Why the run ended before its last seed: the machine has no device or thread for a program.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub unable: Option<String>,
}

fn features(options: &Options, seed: u64) -> Features {
    let far = match options.target.far(seed) {
        None => Far::None,
        Some(far) if far.backend == options.target.device.backend => Far::Peer,
        Some(_) => Far::Other,
    };
    let device = options.target.device.backend;
    // Metal has no loops, and an old driver of CUDA has none: there they would be refused.
    let loops = options.border == Border::Rust && device != BackendKind::Mps;
    Features { host_timelines: true, graphs: true, host_calls: true, scenes: true, loops, far }
}

/// Runs the program of one seed.
///
/// # Errors
/// The finding of the run. It also says so if the devices cannot be opened or a thread is refused.
pub fn run(options: &Options, seed: u64) -> Result<(), Finding> {
    played(options, seed).map_err(Stop::into_finding)
}

fn played(options: &Options, seed: u64) -> Result<(), Stop> {
    quiet();
    if let Some(n) = options.some_ranks() {
        return ranks::played(options, n, seed);
    }
    let (_, plan) = generate::generate(seed, options.ops, options.threads, features(options, seed));
    let Options { target, faults, timeout, border, .. } = options;
    play::play(target, seed, *faults, Arc::new(plan), *timeout, *border)
}

/// The program of a seed as a Rust test.
#[must_use]
pub fn program(options: &Options, seed: u64) -> String {
    if let Some(n) = options.some_ranks() {
        let program = ranks::program(options, n, seed);
        return ranks::print(options, seed, &program, "as it is generated");
    }
    let (_, plan) = generate::generate(seed, options.ops, options.threads, features(options, seed));
    print::print(&options.target, seed, options.faults, &plan, "as it is generated")
}

/// Runs all seeds, tells of each that is over, and makes the first failures small. Ends early if
/// the machine has no device or thread for a program.
pub fn stress(options: &Options, mut over: impl FnMut(u64, Option<&Failure>)) -> Report {
    let start = Instant::now();
    let mut failures: Vec<Failure> = Vec::new();
    let (mut done, mut unable) = (0, None);
    for seed in options.seed..options.seed.saturating_add(options.seeds) {
        let failure = match played(options, seed) {
            Ok(()) => None,
            Err(Stop::Unable(why)) => {
                unable = Some(format!("seed {seed}: {why}"));
                break;
            }
            Err(Stop::Found(finding)) => {
                // Threads that hang are in the way of what comes after them.
                let few = failures.len() < SHRUNK;
                let within = if few { options.shrink } else { Duration::ZERO };
                Some(failure(options, seed, finding, within))
            }
        };
        done += 1;
        over(seed, failure.as_ref());
        failures.extend(failure);
    }
    let Options { target, seed, ops, ranks, faults, .. } = *options;
    let threads = ranks.unwrap_or(options.threads);
    let seconds = start.elapsed().as_secs_f64();
    let device = target.device.to_string();
    Report {
        device,
        simulated: target.simulated,
        faults,
        seed,
        seeds: done,
        ops,
        threads,
        ranks,
        seconds,
        failures,
        unable,
    }
}

/// Failures that are made small.
const SHRUNK: usize = 3;

fn failure(options: &Options, seed: u64, finding: Finding, within: Duration) -> Failure {
    if let Some(n) = options.some_ranks() {
        let small = ranks::small(options, n, seed, within);
        let test = ranks::print(options, seed, &small, &finding.what);
        let Finding { what, hang, threads } = finding;
        return Failure { seed, what, hang, threads, steps: small.steps.len(), test };
    }
    let (program, plan) =
        generate::generate(seed, options.ops, options.threads, features(options, seed));
    // How often a program is tried before it counts as one that does not fail.
    let timeout =
        if finding.hang { options.timeout.min(Duration::from_secs(3)) } else { options.timeout };
    let mut again = |program: &Program| {
        (0..TRIES).any(|_| {
            let plan = Arc::new(program.plan());
            let Options { target, faults, border, .. } = options;
            let played = play::play(target, seed, *faults, plan, timeout, *border);
            matches!(played, Err(Stop::Found(_)))
        })
    };
    let (plan, what) = if within.is_zero() {
        (plan, finding.what.clone())
    } else {
        let small = shrink::shrink(&program, within, &mut again);
        (small.plan(), finding.what.clone())
    };
    let what = match options.border {
        Border::Rust => what,
        Border::C => format!("{what} (by calls of the C ABI, which this test does not make)"),
    };
    let test = print::print(&options.target, seed, options.faults, &plan, &what);
    Failure {
        seed,
        what,
        hang: finding.hang,
        threads: finding.threads,
        steps: plan.steps.len(),
        test,
    }
}

/// Runs of a smaller program, one of which must fail.
const TRIES: u32 = 2;

/// Host calls panic on purpose; nobody needs to read of it.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let (payload, on_purpose) = (info.payload(), scenes::ON_PURPOSE);
            let text = payload.downcast_ref::<&str>().copied();
            if text.or(payload.downcast_ref::<String>().map(String::as_str)) != Some(on_purpose) {
                loud(info);
            }
        }));
    });
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Programs of one mistake in the model: the first that shows it is found, made small and
    /// printed.
    #[test]
    #[cfg(feature = "sim")]
    fn a_failing_program_is_shrunk_to_the_steps_that_show_the_mistake() {
        for device in ["cpu:0", "sim:0"] {
            let mut options =
                Options::new(Target::new(device.parse().unwrap(), device == "sim:0").unwrap());
            (options.ops, options.threads) = (150, 3);
            (options.timeout, options.shrink) = (Duration::from_secs(120), Duration::from_secs(60));
            options.seed =
                (0..50).find(|&seed| model::mistaken(|| run(&options, seed)).is_err()).unwrap();
            let seed = options.seed;
            assert_eq!(run(&options, seed), Ok(()), "without the mistake nothing is found");
            let mut told = 0;
            let report = model::mistaken(|| {
                stress(&options, |_, failure| told += u32::from(failure.is_some()))
            });
            let [failure] = &report.failures[..] else { panic!("{report:?}") };
            assert_eq!((told, failure.seed, failure.hang), (1, seed, false));
            // Three buffers with contents, a stream, the launch.
            assert!(failure.steps <= 8, "{} steps:\n{}", failure.steps, failure.test);
            let test = &failure.test;
            assert!(test.starts_with(&format!("//! Seed {seed} on {device}: ")), "{test}");
            assert!(
                test.contains("kernels[Kernel::Gather as usize]") && test.contains("#[test]"),
                "{test}"
            );
            assert!(!test.contains("scope.spawn"), "one thread is enough: {test}");
            assert!(test.contains(&failure.what), "{test}");
        }
    }
}
