//! Safe input: files and text from outside the program, read within bounds and shown without
//! control characters.
//!
//! Every crate opens an external file with [`open`] or [`read`]: regular files only, within a
//! limit, without a wait for a writer. [`Lines`] reads text by lines of a bounded length.
//! [`shown`] makes text safe for a message or a terminal. A [`CompileCache`] keeps what compilers
//! made, in a directory of the user.
//!
//! ```
//! let text = leasehold_input::shown("two\u{1b}[2J").to_string();
//! assert!(!text.contains('\u{1b}'), "no control characters");
//! ```
//!
//! This crate must not know what a file means, and returns only its own errors.
#![forbid(unsafe_code)]

mod cache;
mod file;
mod lines;
mod text;

pub use cache::{CompileCache, Key};
pub use file::{Cause, Refusal, open, read};
pub use lines::{LineError, Lines};
pub use text::{Shown, printable, shown, shown_within};
