//! Whether the cases can fail: the suite on a backend that supports nothing, and on ones that are wrong on purpose.
//!
//! A wrong backend is the CPU's with one defect. For each defect the test says which of the tried cases must fail; the others must pass.

mod defects;

use defects::{Defect, Wrong};
use leasehold::hal::{Backend, KernelDesc, KernelSource, NullBackend};
use leasehold_conformance::{Expectation, Expectations, Factory, Filter, Report, Status, Suite, TestKernel, Wrap, run};
use std::sync::{Arc, Once};
use std::time::Duration;

struct Null;

impl Factory for Null {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(NullBackend))
    }
    fn kernel(&self, _: TestKernel) -> Option<KernelDesc<'static>> {
        None
    }
}

#[test]
fn on_the_null_backend_every_case_is_skipped_and_says_why() {
    let report = run(Null, &Filter::default());
    assert!(report.ok() && report.failed().is_empty() && report.passed().is_empty());
    assert_eq!(report.skipped(), report.results.len());
    let mut numbers: Vec<u16> = report.results.iter().map(|r| r.case).collect();
    numbers.dedup();
    assert_eq!(numbers, Suite::new().cases().iter().map(|c| c.number).collect::<Vec<_>>());
    for r in &report.results {
        assert!(matches!(&r.status, Status::Skipped(why) if why.contains("no devices")), "{r:?}");
    }
}

#[test]
fn numbers_are_given_once_and_the_first_twenty_are_there() {
    let suite = Suite::new();
    let numbers: Vec<u16> = suite.cases().iter().map(|c| c.number).collect();
    assert!(numbers.is_sorted_by(|a, b| a < b), "a number was given twice: {numbers:?}");
    for first in [1, 2, 5, 11, 13, 17, 20, 38, 40, 50, 51, 53, 61, 81, 94, 99, 117, 129, 130, 132] {
        assert!(numbers.contains(&first), "case {first} is not stated");
    }
    assert!(suite.cases().iter().all(|c| !c.name.is_empty() && c.number <= 150));
}

/// A backend with a defect, and what is said about it.
struct Broken(Defect, Expectations);

impl Factory for Broken {
    fn backend(&self) -> leasehold::Result<Arc<dyn Backend>> {
        Ok(Arc::new(Wrong::new(self.0)))
    }
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.with_source(KernelSource::Cpu(kernel.function())))
    }
    fn expectations(&self) -> Expectations {
        self.1
    }
}

fn try_out(defect: Defect, cases: &[u16], limit: Duration) -> Report {
    let filter =
        Filter { wrap: Some(Wrap::Plain), patience: Duration::from_millis(1500), limit, ..Filter::only(cases) };
    run(Broken(defect, Expectations::default()), &filter)
}

/// Panics that the cases make on purpose are not printed: those of their own threads and of the backend's.
fn quiet() {
    static ONCE: Once = Once::new();
    ONCE.call_once(|| {
        let loud = std::panic::take_hook();
        std::panic::set_hook(Box::new(move |info| {
            let name = std::thread::current().name().unwrap_or_default().to_owned();
            if !name.starts_with("case ") && !name.starts_with("lh-") {
                loud(info);
            }
        }));
    });
}

/// Of `cases`, exactly `wrong` fail under the defect, and none without it.
#[track_caller]
fn finds(defect: Defect, cases: &[u16], wrong: &[u16]) {
    quiet();
    let report = try_out(defect, cases, Duration::from_secs(20));
    assert_eq!(report.failed(), wrong, "{defect:?}\n{report}");
    assert_eq!(report.skipped(), 0, "{defect:?}\n{report}");
    let right = try_out(Defect::None, wrong, Duration::from_secs(20));
    assert!(right.failed().is_empty() && right.skipped() == 0, "without {defect:?}\n{right}");
}

#[test]
fn waits_that_are_dropped_are_found() {
    finds(Defect::DropsWaits, &[13, 27, 28, 33, 34, 38, 78, 94], &[27, 28, 33, 34, 38, 78]);
}

#[test]
fn operations_out_of_order_are_found() {
    finds(Defect::Reorders, &[1, 13, 24, 61, 117], &[13, 61]);
}

#[test]
fn completion_before_the_end_is_found() {
    finds(Defect::CompletesEarly, &[11, 17, 20, 51, 81], &[17, 20, 51]);
}

#[test]
fn lost_errors_are_found() {
    finds(Defect::LosesErrors, &[13, 36, 37, 46, 112, 114, 117], &[36, 37, 46, 112, 114, 117]);
}

#[test]
fn devices_that_are_another_each_time_are_found() {
    finds(Defect::OpensAnew, &[1, 4, 11, 130, 132], &[4, 130, 132]);
}

#[test]
fn kernels_that_are_made_again_are_found() {
    finds(Defect::CompilesAgain, &[79, 81, 117, 137], &[81]);
}

#[test]
fn graphs_that_forget_their_last_node_are_found() {
    finds(Defect::CutsGraphs, &[13, 93, 94, 95, 106], &[13, 94, 95, 106]);
}

#[test]
fn shutdown_that_ignores_leases_is_found() {
    finds(Defect::IgnoresLeases, &[1, 11, 130, 131], &[130, 131]);
}

#[test]
fn leaked_streams_are_found() {
    finds(Defect::LeaksStreams, &[1, 5, 11, 13], &[5, 11, 13]);
}

#[test]
fn unstable_enumeration_and_panics_are_found() {
    finds(Defect::Renames, &[1, 2, 11], &[1]);
    finds(Defect::PanicsOnUnknown, &[1, 2, 11, 143], &[2, 143]);
}

#[test]
fn wrong_fills_and_copies_are_found() {
    finds(Defect::FillsBytes, &[11, 13, 60], &[60]);
    finds(Defect::CopiesShort, &[11, 60, 61, 73], &[61, 73]);
}

#[test]
fn time_stamps_that_stand_still_are_found() {
    finds(Defect::StopsTheClock, &[38, 39, 40, 41], &[40]);
}

#[test]
fn submissions_that_block_are_found() {
    finds(Defect::BlocksInSubmit, &[11, 13, 14, 19], &[14]);
}

#[test]
fn memory_that_runs_out_for_ever_is_found() {
    finds(Defect::StaysEmpty, &[50, 57], &[50]);
}

#[test]
fn a_hang_is_a_failure_with_a_dump() {
    let start = std::time::Instant::now();
    let report = try_out(Defect::Hangs, &[11, 19], Duration::from_millis(700));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(report.failed(), [19], "{report}");
    let Status::Failed(why) = &report.results[1].status else { panic!("{report}") };
    for word in ["hangs", "line", "pool stream: 1 live"] {
        assert!(why.contains(word), "{word} is not in {why}");
    }
}

#[test]
fn an_expectation_that_is_out_of_date_fails_the_run() {
    let filter = Filter { wrap: Some(Wrap::Plain), ..Filter::only(&[1, 11, 24]) };
    const OUT_OF_DATE: Expectations = Expectations {
        unsupported: &[Expectation { case: 24, reason: "it has no gates" }],
        expected_failure: &[
            Expectation { case: 11, reason: "streams are broken" },
            Expectation { case: 1, reason: "renames" },
        ],
    };
    let report = run(Broken(Defect::Renames, OUT_OF_DATE), &filter);
    assert!(!report.ok(), "{report}");
    let status: Vec<_> = report.results.iter().map(|r| (r.case, &r.status)).collect();
    assert!(matches!(status[0], (1, Status::ExpectedFailure(why)) if why.contains("renames")), "{report}");
    assert!(matches!(status[1], (11, Status::UnexpectedPass(_))), "{report}");
    assert!(matches!(status[2], (24, Status::Skipped(why)) if why == "it has no gates"), "{report}");
    let text = report.to_string();
    assert!(text.contains("PASSED UNEXPECTEDLY") && text.contains("1 skipped"), "{text}");
}
