//! The parts that tests of programs share.

use leasehold_stress::{Options, run};

/// Plays programs of these seeds, of which none may fail.
#[track_caller]
pub fn clean(options: &Options, seeds: std::ops::Range<u64>) {
    for seed in seeds {
        if let Err(finding) = run(options, seed) {
            panic!("seed {seed}: {finding:#?}");
        }
    }
}
