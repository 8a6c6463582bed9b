//! Programs of ranks of a few seeds on every kind of device that has collectives, and a printed
//! test that compiles and passes.

#[rustfmt::skip]
#[path = "../printed/ranks.rs"]
mod printed;

use crate::common::clean;
use leasehold_stress::{Options, Target, program, run};
use std::time::Duration;

fn options(device: &str, simulated: bool, ranks: u8) -> Options {
    let mut options = Options::new(Target::new(device.parse().unwrap(), simulated).unwrap());
    options.timeout = Duration::from_secs(120);
    (options.ops, options.ranks) = (300, Some(ranks));
    options
}

#[test]
fn ranks_on_a_cpu_do_what_the_model_says() {
    for ranks in 1..=5 {
        clean(&options("cpu:0", false, ranks), 0..4);
    }
}

#[test]
fn ranks_on_simulated_devices_do_what_the_model_says() {
    for ranks in [1, 2, 4] {
        clean(&options("sim:0", true, ranks), 0..4);
    }
}

#[test]
fn ranks_on_simulated_cuda_do_what_the_model_says() {
    for ranks in [1, 3, 4] {
        clean(&options("cuda:0", true, ranks), 0..4);
    }
}

#[test]
fn many_ranks_do_what_the_model_says() {
    let mut options = options("sim:0", true, 16);
    options.ops = 60;
    clean(&options, 0..2);
}

#[test]
fn late_commands_change_nothing() {
    for device in ["sim:0", "cuda:0"] {
        let mut options = options(device, true, 4);
        options.faults = true;
        clean(&options, 0..4);
    }
}

#[test]
fn ranks_need_a_library_of_collectives() {
    let options = options("mps:0", true, 2);
    let finding = run(&options, 0).unwrap_err();
    assert!(finding.what.contains("no library of collectives for Metal"), "{finding:?}");
}

#[test]
fn a_seed_gives_the_same_program_of_ranks() {
    let options = options("cpu:0", false, 4);
    let first = program(&options, 7);
    assert_eq!(program(&options, 7), first);
    assert_ne!(program(&options, 8), first);
}

/// The text is checked in, and runs as a test beside this one. A change of programs or of
/// their text takes the new text.
#[test]
fn a_printed_program_of_ranks_is_the_one_that_is_checked_in() {
    let mut options = options("sim:0", true, 3);
    options.ops = 80;
    let text = program(&options, 21);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/printed/ranks.rs");
    if std::env::var_os("LEASEHOLD_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(path).unwrap(),
        text,
        "LEASEHOLD_BLESS=1 writes the new text"
    );
}
