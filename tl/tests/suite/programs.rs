//! Compiler-like programs, checked step by step; a short run of the fuzzer; the failures of the
//! plain design.

use leasehold_core::sync::thread;
use leasehold_memory::workload::program::{Op, Pattern, Program, What, generate};
use leasehold_memory::workload::{checker, fuzz};
use leasehold_memory::{Config, MemoryManager, Misuse, bench};

fn prepared(quarantine_bytes: u64) -> MemoryManager {
    let mut m = MemoryManager::with_config(Config { quarantine_bytes, ..Config::default() });
    checker::prepare(&mut m);
    m
}

fn check(manager: &MemoryManager, program: &Program, quarantined: bool, name: &str) {
    let outcome = checker::run(manager, program, quarantined);
    assert!(outcome.faults.is_empty(), "{name}: {:#?}", outcome.faults);
    assert_eq!(outcome.operations, program.ops.len());
    let stats = manager.stats();
    let left =
        [stats.live_objects, stats.slot_bytes, stats.deferred_bytes, stats.quarantined_bytes];
    assert_eq!(left, [0; 4], "{name}");
}

#[test]
fn every_pattern_alone_and_all_together() {
    for quarantine in [64 << 20, 0] {
        let m = prepared(quarantine);
        for (i, pattern) in Pattern::ALL.into_iter().enumerate() {
            let program = generate(i as u64, 3_000, &[pattern], false);
            check(&m, &program, quarantine > 0, &format!("{pattern:?}"));
        }
        for seed in 0..40 {
            let program = generate(seed, 4_000, &Pattern::ALL, false);
            check(&m, &program, quarantine > 0, &format!("seed {seed}"));
        }
        let repairs = m.stats().misuse(Misuse::ScopeRepaired);
        assert!(repairs > 0, "early returns leave scopes to function_exit");
        assert_eq!(
            m.stats().total_misuses(),
            repairs,
            "right programs do nothing else wrong: {:?}",
            m.last_error()
        );
    }
}

#[test]
fn programs_with_a_compilers_bugs() {
    for quarantine in [64 << 20, 0] {
        let m = prepared(quarantine);
        for seed in 0..100 {
            let program = generate(seed, 3_000, &Pattern::ALL, true);
            check(&m, &program, quarantine > 0, &format!("seed {seed}"));
        }
        let stats = m.stats();
        for misuse in [
            Misuse::ExitScope,
            Misuse::FunctionExit,
            Misuse::SlotIndex,
            Misuse::Size,
            Misuse::ReleaseUnknown,
        ] {
            assert!(stats.misuse(misuse) > 0, "{misuse:?} never happened: {stats:?}");
        }
    }
}

/// The checker must be able to fail: without quarantine it detects an error in a program that
/// relies on it.
#[test]
fn the_checker_sees_a_use_after_a_double_release() {
    let ops = vec![
        Op::Enter,
        Op::New(0, What::Tensor),
        Op::Release(0),
        Op::New(1, What::Tensor),
        Op::Release(0),
        Op::Use(1),
        Op::Exit,
    ];
    let program = Program { ops, vars: 2, marks: 0 };
    assert!(checker::run(&prepared(64 << 20), &program, true).faults.is_empty());
    assert!(!checker::run(&prepared(0), &program, true).faults.is_empty());
}

#[test]
fn threads_with_programs_of_their_own() {
    let m = MemoryManager::new();
    let handles: Vec<_> = (0..4u64)
        .map(|t| {
            let mut m = m.attach();
            thread::spawn(move || {
                checker::prepare(&mut m);
                for seed in 0..10 {
                    let program = generate(100 * t + seed, 2_000, &Pattern::ALL, seed % 2 == 1);
                    let outcome = checker::run(&m, &program, true);
                    assert!(
                        outcome.faults.is_empty(),
                        "thread {t} seed {seed}: {:#?}",
                        outcome.faults
                    );
                }
            })
        })
        .collect();
    for handle in handles {
        handle.join().unwrap();
    }
    assert_eq!(m.stats().threads, 1);
}

#[test]
fn a_slice_of_the_fuzzer() {
    let summary = thread::spawn(|| fuzz::fuzz(11, 150_000)).join().unwrap();
    assert!(summary.calls >= 150_000 && summary.misuses > 0);
}

#[test]
fn the_benchmark_runs_and_is_serialisable() {
    let report = bench::run(bench::Options::quick()).unwrap();
    assert!(report.figures.iter().all(|f| f.leasehold_ns > 0.0 && f.plain_ns > 0.0), "{report}");
    let json = serde_json::to_value(&report).unwrap();
    assert_eq!(json["figures"].as_array().unwrap().len(), report.figures.len());
    assert!(report.to_string().contains("get_buffer"));
}
