//! The command against its output: results, one-line errors, exit statuses.

mod bench;
mod collective;
#[path = "../../../../models/cli/tests/suite/common.rs"]
mod common;
mod conformance;
#[cfg(target_os = "linux")]
#[path = "../../../../models/cli/tests/suite/dice.rs"]
mod dice;
mod errors;
#[cfg(target_os = "linux")]
mod hostile;
mod maps;
#[cfg(target_os = "linux")]
mod mutations;
#[cfg(target_os = "linux")]
mod outputs;
mod ranks;
mod replay;
mod run;
mod stress;

use common::*;

/// The program that is tested.
const PROGRAM: &str = env!("CARGO_BIN_EXE_leasehold-workbench");

/// A recorded trace.
fn trace(name: &str) -> String {
    let path = repository("testing/sim/workloads").join(format!("{name}.csv.gz"));
    path.to_str().unwrap().to_owned()
}
