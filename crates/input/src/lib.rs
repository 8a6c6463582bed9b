//! Files and text from outside.
//!
//! [`open`] and [`read`] are how every crate opens a file that somebody else wrote: regular files
//! only, within a limit, and never waiting for a writer. [`Lines`] reads text by lines of a bounded
//! length. [`shown`] makes text fit for a message or a terminal.
//!
//! This crate must not know what a file means, and gives no crate's errors but its own.
#![forbid(unsafe_code)]

mod file;
mod lines;
mod text;

pub use file::{Cause, Refusal, open, read};
pub use lines::{LineError, Lines};
pub use text::{Shown, printable, shown, shown_within};
