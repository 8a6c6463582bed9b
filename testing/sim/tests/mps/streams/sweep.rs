//! A failing driver call at every index of a whole life cycle: the state stays valid, and nothing
//! leaks.

use super::common::*;
use leasehold_sim::{FaultAction, ReportKind};

#[test]
fn a_failing_call_at_every_index_leaves_a_valid_state_and_leaks_nothing() {
    for residency_sets in [true, false] {
        let sweep = faults::sweep::<Mps>(
            |config| config.residency_sets = residency_sets,
            |over| {
                assert_eq!(Mps::findings(&over.driver), [""; 0], "{}", over.at);
                if over.fault.1 != FaultAction::DeviceLost {
                    // The work of a lost device never runs, and its memory is free at once. Where a
                    // write failed, nobody wrote.
                    let mut reports = over.reports.iter();
                    let race = reports.find(|r| r.kind != ReportKind::NeverWritten);
                    assert_eq!(race, None, "{}", over.at);
                    assert!(over.driver.machine().memory_in_use().is_nothing(), "{}", over.at);
                }
            },
        );
        assert!(sweep.calls > 200 && sweep.names > 30, "{sweep:?} is no life");
        assert!(sweep.failed > 100, "{sweep:?}");
    }
}
