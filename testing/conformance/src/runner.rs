//! The runner: executes each case on its own thread, with a time limit, in every variant.
//!
//! # Protocol
//! A case runs on a new thread with a new backend. The runner waits for its result up to a limit.
//! If no result arrives, the case has failed, its thread is abandoned, and the message contains its
//! timelines and pools.
//!
//! This module must not know what a case does.

use crate::case::{Case, Outcome, Process, Stop, failed};
use crate::cases;
use crate::env::{Env, Watch};
use crate::factory::{Expectation, Factory};
use crate::filter::Filter;
use crate::isolate::{self, Isolation};
use crate::report::{CaseResult, Report, Status};
use crate::variant::{Mode, Variant, Wrap};
use libtest_mimic::{Arguments, Completion, Failed, Trial};
use std::any::Any;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::process::{Command, ExitCode};
use std::sync::{Arc, mpsc};
use std::time::Instant;

/// The cases.
#[derive(Debug)]
pub struct Suite {
    cases: Vec<Case>,
}

impl Default for Suite {
    fn default() -> Self {
        Self::new()
    }
}

impl Suite {
    /// All cases of this crate, by number.
    #[must_use]
    pub fn new() -> Self {
        let mut cases: Vec<Case> = cases::all().copied().collect();
        cases.sort_by_key(|c| (c.number, c.tier));
        Self { cases }
    }

    /// The cases.
    #[must_use]
    pub fn cases(&self) -> &[Case] {
        &self.cases
    }

    /// Each case with the variants that it runs in.
    fn runs(&self, filter: &Filter) -> Vec<(Case, Variant)> {
        let mut runs = Vec::new();
        for case in self.cases.iter().filter(|c| filter.takes(c)) {
            for wrap in [Wrap::Plain, Wrap::Validated] {
                if filter.wrap.is_some_and(|w| w != wrap) {
                    continue;
                }
                runs.push((*case, Variant { wrap, mode: Mode::Eager }));
                if case.replayed {
                    runs.push((*case, Variant { wrap, mode: Mode::Replayed }));
                }
            }
        }
        runs
    }
}

/// Runs the cases that the filter selects, one after the other.
pub fn run(factory: impl Factory, filter: &Filter) -> Report {
    run_with(factory, filter, |_| ())
}

/// The progress of a run.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Progress<'a> {
    /// A case begins.
    Begins {
        /// The case.
        case: &'a Case,
        /// The variant.
        variant: Variant,
        /// The number of completed runs.
        done: usize,
        /// The number of all runs.
        of: usize,
    },
    /// A case ended.
    Over(&'a CaseResult),
}

/// Like [`run`], with progress reports.
pub fn run_with(
    factory: impl Factory,
    filter: &Filter,
    mut tell: impl FnMut(Progress<'_>),
) -> Report {
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let runs = Suite::new().runs(filter);
    let (mut results, of) = (Vec::with_capacity(runs.len()), runs.len());
    for (done, (case, variant)) in runs.into_iter().enumerate() {
        tell(Progress::Begins { case: &case, variant, done, of });
        let result = run_case(&factory, case, variant, filter);
        tell(Progress::Over(&result));
        results.push(result);
    }
    Report { results }
}

/// The variable with the one case that [`harness`] must run for another process.
const CHILD: &str = "LEASEHOLD_CONFORMANCE_CASE";

/// The body of a `tests/conformance.rs`: every case is a named test, with the options of `cargo
/// test` (a name, `--list`, `--exact`, `--ignored`, …). `LEASEHOLD_CONFORMANCE_THOROUGH=1` runs
/// repetitions in full. Cases run one at a time unless `--test-threads` says otherwise, because
/// some of them measure. Cases that need a process of their own get the same program again.
pub fn harness(factory: impl Factory) -> ExitCode {
    let thorough = std::env::var_os("LEASEHOLD_CONFORMANCE_THOROUGH").is_some_and(|v| v != "0");
    let mut filter = Filter { thorough, ..Filter::default() };
    if let Ok(name) = std::env::var(CHILD) {
        return answer(factory, &name, &filter);
    }
    let mut arguments = Arguments::from_args();
    arguments.test_threads = arguments.test_threads.or(Some(1));
    let factory: Arc<dyn Factory> = Arc::new(factory);
    filter.isolation = std::env::current_exe().ok().map(|program| {
        Isolation::new(move |name| {
            let mut command = Command::new(&program);
            command.env(CHILD, name);
            command
        })
    });
    let filter = Arc::new(filter);
    let trials = Suite::new().runs(&filter).into_iter().map(|(case, variant)| {
        let (factory, filter) = (factory.clone(), filter.clone());
        let name = format!(
            "{}::{:03}_{}::{}",
            case.tier,
            case.number,
            case.name.replace(|c: char| !c.is_alphanumeric(), "_"),
            variant.name()
        );
        Trial::ignorable_test(name, move || {
            match run_case(&factory, case, variant, &filter).status {
                Status::Passed | Status::ExpectedFailure(_) => Ok(Completion::Completed),
                Status::Skipped(why) => Ok(Completion::ignored_with(why)),
                Status::Failed(why) | Status::UnexpectedPass(why) => Err(Failed::from(why)),
            }
        })
    });
    let trials = trials.collect();
    libtest_mimic::run(&arguments, trials).exit_code()
}

/// The child's part: runs the one case of this name (the argument of [`Isolation::new`]'s function)
/// in this process, and writes the answer to standard output. The process should end soon after;
/// its status has no meaning.
pub fn answer(factory: impl Factory, name: &str, filter: &Filter) -> ExitCode {
    let factory: Arc<dyn Factory> = Arc::new(factory);
    let suite = Suite::new();
    let found = suite
        .runs(&Filter::default())
        .into_iter()
        .find(|(case, variant)| isolate::name(case, *variant) == name);
    let outcome = match found {
        Some((case, variant)) => run_bounded(&factory, case, variant, filter),
        None => failed(format!("there is no case {name}")),
    };
    isolate::tell(outcome);
    ExitCode::SUCCESS
}

fn run_case(
    factory: &Arc<dyn Factory>,
    case: Case,
    variant: Variant,
    filter: &Filter,
) -> CaseResult {
    let start = Instant::now();
    let expectations = factory.expectations();
    let known =
        |list: &[Expectation]| list.iter().find(|e| e.case == case.number).map(|e| e.reason);
    let status = match known(expectations.unsupported) {
        Some(reason) => Status::Skipped(reason.to_owned()),
        None => {
            let apart = match case.process {
                Process::Shared => false,
                Process::Own => true,
                Process::OwnIfFatal => factory.fatal_faults(),
            };
            let outcome = match &filter.isolation {
                Some(isolation) if apart => isolation.run(&case, variant, filter.limit),
                _ => run_bounded(factory, case, variant, filter),
            };
            match (outcome, known(expectations.expected_failure)) {
                (Err(Stop::Skipped(why)), _) => Status::Skipped(why),
                (Ok(()), None) => Status::Passed,
                (Ok(()), Some(reason)) => {
                    Status::UnexpectedPass(format!("was expected to fail: {reason}"))
                }
                (Err(Stop::Failed(why)), None) => Status::Failed(why),
                (Err(Stop::Failed(why)), Some(reason)) => {
                    Status::ExpectedFailure(format!("{reason} ({why})"))
                }
            }
        }
    };
    CaseResult {
        case: case.number,
        name: case.name,
        tier: case.tier,
        variant: variant.name().to_owned(),
        status,
        ms: start.elapsed().as_secs_f64() * 1e3,
    }
}

fn run_bounded(
    factory: &Arc<dyn Factory>,
    case: Case,
    variant: Variant,
    filter: &Filter,
) -> Outcome {
    let watch = Arc::new(Watch::default());
    let (tell, told) = mpsc::channel();
    let body = {
        let (factory, filter, watch) = (factory.clone(), filter.clone(), watch.clone());
        move || {
            let outcome = Env::new(factory, &case, variant, &filter, watch).and_then(|env| {
                let tried = catch_unwind(AssertUnwindSafe(|| {
                    env.needs(case.needs).and_then(|()| (case.run)(&env))
                }));
                match tried.unwrap_or_else(|panic| Err(Stop::Failed(panic_text(&*panic)))) {
                    Ok(()) => env.finish(),
                    Err(stop) => {
                        env.abandon();
                        Err(stop)
                    }
                }
            });
            // The runner may have abandoned this case.
            let _ = tell.send(outcome);
        }
    };
    let thread = std::thread::Builder::new().name(format!("case {}", case.number)).spawn(body);
    match thread {
        Err(e) => Err(Stop::Failed(format!("no thread for the case: {e}"))),
        Ok(thread) => match told.recv_timeout(filter.limit) {
            Ok(outcome) => {
                // The thread is at its end; a panic during its unwinding has been reported already.
                let _ = thread.join();
                outcome
            }
            Err(_) => Err(Stop::Failed(format!(
                "hangs: no answer in {:?}\n{}",
                filter.limit,
                watch.dump()
            ))),
        },
    }
}

fn panic_text(panic: &(dyn Any + Send)) -> String {
    let text = panic
        .downcast_ref::<&str>()
        .copied()
        .or_else(|| panic.downcast_ref::<String>().map(String::as_str));
    format!("panicked: {}", text.unwrap_or("without a message"))
}
