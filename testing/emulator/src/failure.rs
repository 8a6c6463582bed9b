//! Why there is no program, and what a test makes of that.
//!
//! This module must not know compilers.

use std::fmt;

/// The variable of the environment that switches the emulator off.
pub(crate) const SWITCH: &str = "LEASEHOLD_NO_EMULATION";

/// The reason why there is no program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Failure {
    /// The compiler is not there, or the emulator is switched off; with the reason.
    Missing(String),
    /// The source is refused, with the compiler's messages.
    Refused(String),
}

impl Failure {
    /// Whether a test may be skipped: the emulator is switched off, or the compiler is not there
    /// and `LEASEHOLD_REQUIRE_TOOLS` is not in the environment.
    #[must_use]
    pub fn is_skip(&self) -> bool {
        let set = |name| std::env::var_os(name).is_some();
        matches!(self, Failure::Missing(_)) && (set(SWITCH) || !set("LEASEHOLD_REQUIRE_TOOLS"))
    }
}

impl fmt::Display for Failure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Failure::Missing(why) => write!(f, "no emulation of kernels: {why}"),
            Failure::Refused(log) => f.write_str(log),
        }
    }
}

impl std::error::Error for Failure {}
