//! Tests of payloads that panic.

use super::*;
use std::panic::panic_any;

/// A payload whose drop throws the next one.
struct Chain(u32);

impl Drop for Chain {
    fn drop(&mut self) {
        if self.0 > 0 {
            panic_any(Chain(self.0 - 1));
        }
    }
}

#[test]
fn no_chain_of_payloads_gets_out() {
    // The longest chain ends as a leak, which a sanitizer reports.
    let sanitized = std::env::var_os("LEASEHOLD_SANITIZED").is_some();
    let lengths: &[u32] = if sanitized { &[0, 1, 3] } else { &[0, 1, 3, 100] };
    for &length in lengths {
        assert_eq!(quietly(|| panic_any(Chain(length))), None::<()>, "{length}");
        let text = caught(|| panic_any(Chain(length))).err();
        assert_eq!(text.as_deref(), Some("panicked: without a message"), "{length}");
    }
}
