//! Tests of errors whose parts panic.

use super::*;
use std::panic::panic_any;

/// An error that panics, or fails, wherever it can.
struct Hostile {
    fails: bool,
}

/// A payload whose own drop panics.
struct Payload;

impl Drop for Payload {
    fn drop(&mut self) {
        panic!("the drop of a payload");
    }
}

impl Hostile {
    fn show(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("half a text")?;
        if self.fails { Err(fmt::Error) } else { panic_any(Payload) }
    }
}

impl fmt::Display for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.show(f)
    }
}

impl fmt::Debug for Hostile {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.show(f)
    }
}

impl StdError for Hostile {}

impl Drop for Hostile {
    fn drop(&mut self) {
        panic_any(Payload);
    }
}

#[test]
fn a_foreign_error_is_shown_and_dropped_without_a_panic() {
    for (fails, how) in [(false, "panicked"), (true, "failed")] {
        let error = Error::other(Hostile { fails });
        assert_eq!(error.to_string(), format!("half a text (an error whose text {how})"));
        assert_eq!(format!("{error:?}"), error.to_string());
        assert!(format!("{error:#?}").contains(how));
        let source = error.source().map(|e| e.is::<Hostile>());
        assert_eq!(source, Some(true));
        drop((error.clone(), error));
    }
}

#[test]
fn a_foreign_error_can_be_downcast() {
    let Error::Other(error) = Error::from(std::io::Error::other("disk full")) else { panic!() };
    assert!(error.downcast_ref::<std::io::Error>().is_some());
}

#[test]
fn the_debug_text_is_the_text_that_a_person_reads() {
    let mut report = OutOfMemory::new("cpu:0 device memory", 4096);
    (report.reserved, report.live) = (2 * MIB, 32);
    let error = Error::from(report);
    let text = "out of memory: 4096 bytes requested from cpu:0 device memory; 2.0 MiB reserved, \
                32 bytes live, 0 free (largest 0), 0 free but still in use by a stream, 0 in graphs";
    let shown = [error.to_string(), format!("{error:?}"), format!("{error:#?}")];
    assert_eq!(shown, [text; 3]);
    let table = Error::from(OutOfMemory::new("timelines", 1));
    assert_eq!(table.to_string(), "out of memory: 1 requested from timelines");
}

#[test]
fn a_refused_budget_says_what_helps() {
    let refusal = |unit, requested, used, limit| {
        Error::OverBudget { unit, requested, used, limit }.to_string()
    };
    assert_eq!(
        refusal(Budgeted::Bytes, 65 * MIB, 64 * MIB, 64 * MIB),
        "over budget: 65.0 MiB requested, but the whole budget is 64.0 MiB; raise the budget, or ask \
         for less"
    );
    assert_eq!(
        refusal(Budgeted::Bytes, 4096, 64 * MIB, 64 * MIB),
        "over budget: 4096 bytes requested, 64.0 MiB of 64.0 MiB reserved; free some, or raise the \
         budget"
    );
    assert_eq!(
        refusal(Budgeted::Executables, 2 * MIB, 0, 1000),
        "over budget: 2.0 MiB of graph executables requested, 0 of 1000 bytes in use; raise the graph \
         budget, or record smaller graphs"
    );
    let streams = refusal(Budgeted::Streams, 1, 4, 4);
    assert!(
        streams.starts_with("over budget: 1 streams requested, 4 of 4 in use; drop"),
        "{streams}"
    );
}
