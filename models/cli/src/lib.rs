//! The `leasehold` command: devices, run, bench decode, bench suspend.
//!
//! An error is one line on standard error that names the problem and its place. The exit status is
//! 2 for an invalid command line and 1 for every other failure. Results go to standard output,
//! progress to standard error.
//!
//! This library is for the programs of the repository alone: `leasehold`, and the workbench, which
//! gives the same commands simulated devices. It is no interface, and may change with any version.

mod bundled;
#[doc(hidden)]
pub mod commands;
#[doc(hidden)]
pub mod examples;
#[doc(hidden)]
pub mod failure;
#[doc(hidden)]
pub mod host;
#[doc(hidden)]
pub mod output;
#[doc(hidden)]
pub mod program;
#[doc(hidden)]
pub mod ranks;
#[doc(hidden)]
pub mod style;
#[doc(hidden)]
pub mod system;
#[doc(hidden)]
pub mod table;
