//! Programs of a few seeds on every kind of device, the same program for the same seed, and a
//! printed test that compiles and passes.

#[rustfmt::skip]
#[path = "../printed/mod.rs"]
mod printed;

use crate::common::clean;
use leasehold_stress::{Border, Options, Target, program};
use std::time::Duration;

fn options(device: &str, simulated: bool) -> Options {
    let mut options = Options::new(Target::new(device.parse().unwrap(), simulated).unwrap());
    options.timeout = Duration::from_secs(120);
    options
}

#[test]
fn programs_on_a_cpu_do_what_the_model_says() {
    let mut options = options("cpu:0", false);
    options.ops = 2_000;
    clean(&options, 0..4);
    options.threads = 1;
    clean(&options, 4..6);
}

#[test]
fn programs_on_a_simulated_device_do_what_the_model_says() {
    let mut options = options("sim:0", true);
    options.ops = 1_500;
    clean(&options, 0..4);
}

#[test]
fn programs_on_simulated_metal_do_what_the_model_says() {
    let mut options = options("mps:0", true);
    options.ops = 1_500;
    clean(&options, 0..12);
}

#[test]
fn programs_on_simulated_cuda_do_what_the_model_says() {
    let mut options = options("cuda:0", true);
    options.ops = 1_500;
    clean(&options, 0..4);
}

#[test]
fn what_is_reported_as_complete_is_right_when_calls_fail() {
    for device in ["sim:0", "cuda:0", "mps:0"] {
        let mut options = options(device, true);
        (options.ops, options.faults) = (400, true);
        clean(&options, 0..8);
    }
}

#[test]
fn programs_by_c_calls_do_what_the_model_says() {
    for device in ["cpu:0", "sim:0", "cuda:0", "mps:0"] {
        let mut options = options(device, device != "cpu:0");
        (options.ops, options.threads, options.border) = (800, 4, Border::C);
        clean(&options, 0..3);
        if device != "cpu:0" {
            (options.ops, options.faults) = (300, true);
            clean(&options, 0..4);
        }
    }
}

#[test]
fn a_seed_gives_the_same_program() {
    let mut options = options("cpu:0", false);
    options.ops = 3_000;
    let first = program(&options, 7);
    assert_eq!(program(&options, 7), first);
    assert_ne!(program(&options, 8), first);
    assert!(first.lines().count() > 3_000);
}

/// The text is checked in, and runs as a test beside this one. A change of programs or of
/// their text takes the new text.
#[test]
fn a_printed_program_is_the_one_that_is_checked_in() {
    let mut options = options("sim:0", true);
    (options.ops, options.threads) = (160, 2);
    let text = program(&options, 21);
    let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/printed/mod.rs");
    if std::env::var_os("LEASEHOLD_BLESS").is_some() {
        std::fs::write(path, &text).unwrap();
    }
    assert_eq!(
        std::fs::read_to_string(path).unwrap(),
        text,
        "LEASEHOLD_BLESS=1 writes the new text"
    );
}
