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
        assert_eq!(format!("{error:?}"), format!("Other(half a text (an error whose text {how}))"));
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
