//! The variants in which a case runs.
//!
//! This module must not know cases.

/// The wrapper around the backend.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Wrap {
    /// No wrapper.
    Plain,
    /// [`Validated`](leasehold::backend::Validated).
    Validated,
}

/// The way of a case's work to the device.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Mode {
    /// Submitted directly.
    Eager,
    /// Recorded, planned, instantiated and launched.
    Replayed,
}

/// One variant of a case's run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Variant {
    /// The wrapper.
    pub wrap: Wrap,
    /// The mode.
    pub mode: Mode,
}

impl Variant {
    /// `plain`, `plain+replayed`, `validated`, `validated+replayed`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match (self.wrap, self.mode) {
            (Wrap::Plain, Mode::Eager) => "plain",
            (Wrap::Plain, Mode::Replayed) => "plain+replayed",
            (Wrap::Validated, Mode::Eager) => "validated",
            (Wrap::Validated, Mode::Replayed) => "validated+replayed",
        }
    }
}
