//! The recorded traces, on a virtual device: what the allocator promises about fragmentation, and that a workload comes to rest.

use leasehold_alloc::Policy;
use leasehold_alloc::replay::{Options, find_min_budget, replay_virtual};
use leasehold_alloc::trace::Trace;
use std::path::Path;

fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("traces").join(format!("{name}.csv.gz"));
    Trace::open(&path).expect("a recorded trace")
}

/// Ratio at the default policy, least budget under the compact one, and rest.
fn holds(name: &str, ratio: f64, min_budget: f64, rests: bool) {
    let t = trace(name);
    let r = replay_virtual(&t, &Options::default()).expect("a replay");
    assert_eq!(r.failed, 0);
    assert!(r.ratio <= ratio, "{name}: {r:?}");
    let compact = Options { policy: Policy::Compact, ..Options::default() };
    let least = find_min_budget(&t, &compact).expect("a replay");
    assert!(least <= min_budget, "{name} needs {least}");
    if rests {
        let options = Options { repeat: 3, budget: Some(1.15), ..Options::default() };
        let r = replay_virtual(&t, &options).expect("a replay");
        assert_eq!((r.driver_calls.steady, r.failed), (0, 0), "{name}: {r:?}");
    }
}

#[test]
fn resnet50_train() {
    holds("resnet50_train", 1.03, 1.01, true);
}

#[test]
fn gpt2_train() {
    holds("gpt2_train", 1.03, 1.01, true);
}

#[test]
fn llama_generate() {
    holds("llama_generate", 1.05, 1.035, true);
}

#[test]
fn four_streams() {
    holds("four_streams", 1.5, 1.30, false);
}

#[test]
fn two_threads_play_copies() {
    let t = trace("resnet50_train");
    let r = replay_virtual(&t, &Options { threads: 2, ..Options::default() }).expect("a replay");
    assert_eq!((r.failed, r.events), (0, 2 * t.events.len() as u64));
}
