//! A test that the cases can fail: the suite on a backend without support for any operation, and on
//! deliberately wrong ones.
//!
//! A wrong backend is the CPU's with one defect. For each defect the test names the tried cases
//! that must fail; the others must pass.

mod defects;
mod device;
mod library;
mod stream;

use defects::Defect;
use device::{FORK, Wrong, current_device};
use leasehold::backend::{Backend, ForeignCall, KernelDesc, NullBackend};
use leasehold::{DeviceId, Result};
use leasehold_conformance::{
    ELSEWHERE, Expectation, Expectations, Factory, Faulty, Filter, Home, Isolation, Report, Status,
    Suite, TestKernel, Wrap, answer, run,
};
use std::collections::BTreeMap;
use std::path::Path;
use std::process::Command;
use std::sync::{Arc, Once};
use std::time::Duration;

struct Null;

impl Factory for Null {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
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
fn every_number_is_a_case_or_at_home_elsewhere() {
    let suite = Suite::new();
    let mut all = BTreeMap::new();
    for (number, name) in suite
        .cases()
        .iter()
        .map(|c| (c.number, c.name))
        .chain(ELSEWHERE.iter().map(|e| (e.number, e.name)))
    {
        assert!(!name.is_empty(), "{number}");
        assert!(all.insert(number, name).is_none(), "number {number} was given twice");
    }
    assert!(all.keys().copied().eq(1..=260), "{:?}", all.keys());
}

#[test]
fn tests_that_stand_for_numbers_exist() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    for elsewhere in ELSEWHERE {
        match elsewhere.home {
            Home::Tests { file, names } => {
                let text = std::fs::read_to_string(root.join(file)).expect(file);
                for name in names {
                    assert!(
                        text.contains(&format!("#[test]\nfn {name}()")),
                        "{}: no test {name} in {file}",
                        elsewhere.number
                    );
                }
                assert!(!names.is_empty());
            }
            Home::Missing(why) | Home::Measured(why) => assert!(!why.is_empty()),
            _ => {}
        }
    }
}

/// A backend with a defect, its number of devices, and its known deviations.
struct Broken {
    defect: Defect,
    devices: usize,
    expectations: Expectations,
}

impl Broken {
    fn new(defect: Defect) -> Self {
        Self { defect, devices: 1, expectations: Expectations::default() }
    }
}

impl Factory for Broken {
    fn backend(&self) -> Result<Arc<dyn Backend>> {
        Ok(Arc::new(Wrong::with_devices(self.defect, self.devices)))
    }
    fn kernel(&self, kernel: TestKernel) -> Option<KernelDesc<'static>> {
        Some(kernel.for_sim())
    }
    fn expectations(&self) -> Expectations {
        self.expectations
    }
    fn faulty(&self) -> Option<Result<Faulty>> {
        let backend = Arc::new(Wrong::new(self.defect));
        let switchboard = backend.switchboard();
        Some(Ok((backend, switchboard)))
    }
    fn without_devices(&self) -> Option<Result<Arc<dyn Backend>>> {
        Some(if self.defect == Defect::InventsDevices {
            self.backend()
        } else {
            Ok(Arc::new(NullBackend))
        })
    }
    fn peer(&self) -> Option<Result<Arc<dyn Backend>>> {
        Some(Ok(Arc::new(Wrong::new(self.defect))))
    }
    fn current_device(&self) -> Option<DeviceId> {
        current_device()
    }
    fn unjoined_fork(&self) -> Option<ForeignCall> {
        Some(ForeignCall::new(FORK, Vec::new(), |_| Ok(())))
    }
}

/// The variable by which a case in a separate process finds the defect and its name.
const CHILD: &str = "LEASEHOLD_WRONG_CASE";

fn filter(cases: &[u16], limit: Duration) -> Filter {
    Filter {
        wrap: Some(Wrap::Plain),
        timeout: Duration::from_millis(1500),
        limit,
        ..Filter::only(cases)
    }
}

fn try_out(defect: Defect, cases: &[u16], limit: Duration) -> Report {
    run(Broken::new(defect), &filter(cases, limit))
}

/// Like [`try_out`], with a separate process for cases that need one.
fn try_apart(defect: Defect, cases: &[u16], limit: Duration) -> Report {
    let program = std::env::current_exe().expect("this program");
    let isolation = Isolation::new(move |name| {
        let mut command = Command::new(&program);
        command.args(["--exact", "a_case_in_a_process_of_its_own", "--nocapture"]);
        command.env(CHILD, format!("{defect:?} {name}"));
        command
    });
    run(Broken::new(defect), &Filter { isolation: Some(isolation), ..filter(cases, limit) })
}

/// The child's part of [`try_apart`]; without the variable it does nothing.
#[test]
fn a_case_in_a_process_of_its_own() {
    let Ok(text) = std::env::var(CHILD) else { return };
    let (defect, name) = text.split_once(' ').expect("a defect and a case");
    match defect {
        "Dies" => std::process::abort(),
        "Busy" => answer(Broken::new(Defect::Busy), name, &filter(&[], Duration::from_secs(20))),
        _ => answer(Broken::new(Defect::None), name, &filter(&[], Duration::from_secs(20))),
    };
}

/// Silences panics that the cases make on purpose, on their own threads and on the backend's.
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

/// Checks that exactly the cases `wrong` of `cases` fail under the defect, and none without it.
#[track_caller]
fn finds(defect: Defect, cases: &[u16], wrong: &[u16]) {
    finds_on(1, defect, cases, wrong);
}

/// Like [`finds`], on a backend with `devices` devices.
#[track_caller]
fn finds_on(devices: usize, defect: Defect, cases: &[u16], wrong: &[u16]) {
    quiet();
    let limit = Duration::from_secs(20);
    let report = run(Broken { devices, ..Broken::new(defect) }, &filter(cases, limit));
    assert_eq!(report.failed(), wrong, "{defect:?}\n{report}");
    assert_eq!(report.skipped(), 0, "{defect:?}\n{report}");
    let right = run(Broken { devices, ..Broken::new(Defect::None) }, &filter(wrong, limit));
    assert!(right.failed().is_empty() && right.skipped() == 0, "without {defect:?}\n{right}");
}

#[test]
fn waits_that_are_dropped_are_found() {
    finds(
        Defect::DropsWaits,
        &[13, 27, 28, 33, 34, 38, 78, 94, 119, 138, 142, 220, 251],
        &[27, 28, 33, 34, 38, 78, 119, 138, 142, 220, 251],
    );
}

#[test]
fn operations_out_of_order_are_found() {
    finds(Defect::Reorders, &[1, 13, 24, 61, 117], &[13, 61]);
}

#[test]
fn completion_before_the_end_is_found() {
    finds(Defect::CompletesEarly, &[11, 17, 20, 51, 63, 81], &[17, 20, 51, 63]);
}

#[test]
fn lost_errors_are_found() {
    finds(
        Defect::LosesErrors,
        &[13, 36, 37, 46, 111, 112, 114, 117, 252],
        &[36, 37, 46, 111, 112, 114, 117, 252],
    );
}

#[test]
fn devices_that_are_another_each_time_are_found() {
    finds(Defect::OpensAnew, &[1, 4, 11, 130, 132], &[4, 130, 132]);
}

#[test]
fn kernels_that_are_made_again_are_found() {
    finds(Defect::CompilesAgain, &[79, 81, 117, 135, 137], &[81, 135]);
    finds(Defect::RemembersFailures, &[79, 81, 136], &[136]);
    finds(Defect::AnyEntry, &[79, 80, 81], &[80]);
}

#[test]
fn graphs_that_forget_their_last_node_are_found() {
    finds(
        Defect::CutsGraphs,
        &[13, 93, 94, 95, 106, 213, 222, 224, 225, 228, 229],
        &[13, 94, 95, 106, 213, 222, 224, 225, 228, 229],
    );
}

#[test]
fn shutdown_that_ignores_leases_is_found() {
    finds(Defect::IgnoresLeases, &[1, 11, 130, 131], &[130, 131]);
}

#[test]
fn leaked_streams_are_found() {
    finds(Defect::LeaksStreams, &[1, 5, 11, 13, 72], &[5, 11, 13, 72]);
    finds(Defect::KeepsForeignDrops, &[6, 11, 141], &[141]);
}

#[test]
fn unstable_enumeration_and_panics_are_found() {
    finds(Defect::Renames, &[1, 2, 11], &[1]);
    finds(Defect::PanicsOnUnknown, &[1, 2, 11, 143], &[2, 143]);
}

#[test]
fn wrong_fills_and_copies_are_found() {
    finds(Defect::FillsBytes, &[11, 13, 60], &[60]);
    finds(Defect::FillsShort, &[11, 13, 60, 151, 212], &[13, 60, 151, 212]);
    finds(Defect::CopiesShort, &[11, 60, 61, 73, 217, 219, 220], &[61, 73, 217, 219, 220]);
}

#[test]
fn time_stamps_that_stand_still_are_found() {
    finds(Defect::StopsTheClock, &[38, 39, 40, 41, 107], &[40, 107]);
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
fn memory_that_is_wasted_or_cannot_be_read_is_found() {
    finds(Defect::Wasteful, &[47, 55, 57], &[55]);
    finds(Defect::ReadsWritten, &[20, 57, 59], &[59]);
    finds(Defect::CutsOffsets, &[13, 60, 62], &[62]);
}

#[test]
fn devices_that_are_not_there_are_found() {
    finds(Defect::InventsDevices, &[1, 3], &[3]);
}

#[test]
fn forks_that_hang_are_found() {
    finds(Defect::HangsInForks, &[10, 11], &[10]);
}

#[test]
fn default_streams_and_streams_that_are_one_are_found() {
    finds(Defect::DefaultStream, &[11, 22], &[22]);
    finds(Defect::SameStream, &[9, 133], &[133]);
}

#[test]
fn lost_signals_are_found() {
    finds(Defect::LosesSignals, &[11, 23, 29], &[23, 29]);
}

#[test]
fn library_calls_that_graphs_should_refuse_are_found() {
    finds(Defect::TakesForks, &[93, 94, 101], &[101]);
}

#[test]
fn host_calls_that_cannot_work_are_found() {
    finds(Defect::RefusesNested, &[45, 46, 118], &[118]);
}

#[test]
fn peers_that_are_mixed_up_are_found() {
    finds_on(2, Defect::SkipsPeers, &[13, 75, 76, 77], &[75, 76, 77]);
    finds_on(2, Defect::PeersOnce, &[13, 76, 77], &[76]);
    finds_on(2, Defect::KeepsForeignDrops, &[76, 141], &[141]);
}

#[test]
fn devices_that_fall_with_another_are_found() {
    finds_on(2, Defect::LosesAll, &[110, 141, 142], &[110]);
}

#[test]
fn a_current_device_that_is_switched_is_found() {
    finds_on(2, Defect::SwitchesCurrent, &[142, 146], &[146]);
}

#[test]
fn threads_that_stay_awake_are_found() {
    let limit = Duration::from_secs(20);
    let report = try_apart(Defect::Busy, &[11, 121], limit);
    assert_eq!((report.failed(), report.skipped()), (vec![121], 0), "{report}");
    let right = try_apart(Defect::None, &[11, 121], limit);
    assert_eq!(right.passed(), [11, 121], "{right}");
}

#[test]
fn a_process_that_ends_without_an_answer_has_failed() {
    let program = std::env::current_exe().expect("this program");
    let isolation = Isolation::new(move |name| {
        let mut command = Command::new(&program);
        command.args(["--exact", "a_case_in_a_process_of_its_own", "--nocapture"]);
        command.env(CHILD, format!("Dies {name}"));
        command
    });
    let filter = Filter { isolation: Some(isolation), ..filter(&[121], Duration::from_secs(20)) };
    let report = run(Broken::new(Defect::None), &filter);
    assert!(
        matches!(&report.results[0].status, Status::Failed(why) if why.contains("without an answer")),
        "{report}"
    );
}

#[test]
fn a_hang_is_a_failure_with_a_dump() {
    let start = std::time::Instant::now();
    let report = try_out(Defect::Hangs, &[11, 19], Duration::from_millis(700));
    assert!(start.elapsed() < Duration::from_secs(10));
    assert_eq!(report.failed(), [19], "{report}");
    let Status::Failed(why) = &report.results[1].status else { panic!("{report}") };
    for word in ["hangs", "timeline", "pool stream: 1 live"] {
        assert!(why.contains(word), "{word} is not in {why}");
    }
}

#[test]
fn an_expectation_that_is_out_of_date_fails_the_run() {
    let filter = Filter { wrap: Some(Wrap::Plain), ..Filter::only(&[1, 11, 24]) };
    const OUT_OF_DATE: Expectations = Expectations {
        unsupported: &[Expectation { case: 24, reason: "it has no host timelines" }],
        expected_failure: &[
            Expectation { case: 11, reason: "streams are broken" },
            Expectation { case: 1, reason: "renames" },
        ],
    };
    let report = run(Broken { expectations: OUT_OF_DATE, ..Broken::new(Defect::Renames) }, &filter);
    assert!(!report.ok(), "{report}");
    let status: Vec<_> = report.results.iter().map(|r| (r.case, &r.status)).collect();
    assert!(
        matches!(status[0], (1, Status::ExpectedFailure(why)) if why.contains("renames")),
        "{report}"
    );
    assert!(matches!(status[1], (11, Status::UnexpectedPass(_))), "{report}");
    assert!(
        matches!(status[2], (24, Status::Skipped(why)) if why == "it has no host timelines"),
        "{report}"
    );
    let text = report.to_string();
    assert!(text.contains("PASSED UNEXPECTEDLY") && text.contains("1 skipped"), "{text}");
}
