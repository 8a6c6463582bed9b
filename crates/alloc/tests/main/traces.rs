//! The recorded traces, on a virtual device: what the allocator promises about fragmentation, and
//! that a workload comes to rest.

use leasehold_alloc::Policy;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_sim::memory::replay::{
    Options, Progress, events_to_play, find_min_budget, measure, replay_virtual, virtual_device,
};
use leasehold_sim::memory::trace::{Event, Trace};
use std::path::Path;

fn trace(name: &str) -> Trace {
    let path = Path::new(env!("CARGO_MANIFEST_DIR"))
        .join("../../testing/sim/workloads")
        .join(format!("{name}.csv.gz"));
    Trace::open(&path).expect("a recorded trace")
}

fn compact() -> Options {
    Options { policy: Policy::Compact, ..Options::default() }
}

/// Ratio at the default policy, least budget under the compact one, and rest.
fn holds(name: &str, ratio: f64, min_budget: f64, rests: bool) {
    let t = trace(name);
    let r = replay_virtual(&t, &Options::default()).expect("a replay");
    assert_eq!(r.failed, 0);
    assert!(r.ratio <= ratio, "{name}: {r:?}");
    let least = find_min_budget(&t, &compact()).expect("a replay");
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
    let compact = replay_virtual(&trace("llama_generate"), &compact()).expect("a replay");
    assert!(compact.ratio <= 1.03 && compact.failed == 0, "{compact:?}");
}

/// How densely large blocks lie used to depend on a few bytes at the beginning, and on how late a
/// stream's work completes.
#[test]
fn a_little_difference_makes_little_difference() {
    let mut t = trace("llama_generate");
    // Up to its peak.
    t.events.truncate(64_000);
    let lags = [0, 8, 100, 512, 2_000].map(|lag| (0, lag));
    for (first, lag) in (0..=20).map(|i| (i * 100_000, 32)).chain(lags) {
        let mut t = t.clone();
        if first > 0 {
            let event = Event { id: t.allocations, size: first, ..t.events[0] };
            t.events.insert(0, event);
            t.allocations += 1;
            t.peak += first;
        }
        let r = replay_virtual(&t, &Options { lag, ..compact() }).expect("a replay");
        assert!(
            r.ratio <= 1.03 && r.failed == 0,
            "{first} bytes first, completed {lag} operations later: {r:?}"
        );
    }
}

/// The same trace of a model of another width: how much of its last granule a block fills is
/// another fraction for each.
#[test]
fn other_widths_take_little_more() {
    let mut t = trace("llama_generate");
    t.events.truncate(64_000);
    let (mut sum, mut worst) = (0.0, 0.0f64);
    for width in 0..60 {
        let mut t = t.clone();
        let (mut live, mut peak) = (0, 0);
        for e in &mut t.events {
            if e.size > 4096 {
                e.size = (e.size * (700 + 10 * width) / 1000).next_multiple_of(64);
            }
            live = if e.alloc { live + e.size } else { live - e.size };
            peak = peak.max(live);
        }
        t.peak = peak;
        let r = replay_virtual(&t, &compact()).expect("a replay");
        assert_eq!(r.failed, 0);
        sum += r.ratio / 60.0;
        worst = worst.max(r.ratio);
    }
    assert!(sum <= 1.035 && worst <= 1.07, "{sum:.4} on average, {worst:.4} at worst");
}

/// A trace whose sizes are each up to 2 % off, the same ones alike.
fn near(t: &Trace, seed: u64) -> Trace {
    let mut t = t.clone();
    let (mut live, mut peak) = (0, 0);
    for e in &mut t.events {
        let off = (e.size ^ seed << 40).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 32;
        e.size = (e.size * (980 + off % 41) / 1000).max(1);
        live = if e.alloc { live + e.size } else { live - e.size };
        peak = peak.max(live);
    }
    t.peak = peak;
    t
}

/// Of 116 variants of gpt2_train 17 grew in the third repetition, within a budget of 1.15: what
/// came to rest had nothing to spare.
#[test]
fn neighbours_of_a_training_come_to_rest_within_a_budget() {
    for (name, restless) in [("gpt2_train", 1), ("resnet50_train", 0)] {
        let t = trace(name);
        let moved = (0..10).filter(|&seed| {
            let options = Options { repeat: 3, budget: Some(1.15), ..Options::default() };
            let r = replay_virtual(&near(&t, seed), &options).expect("a replay");
            assert_eq!(r.failed, 0, "{name} {seed}");
            r.driver_calls.steady > 0
        });
        let moved = moved.count();
        assert!(
            moved <= restless,
            "{moved} of ten neighbours of {name} make driver calls in the third repetition"
        );
    }
}

/// How often free granules may be moved grew with what was there only slowly: of neighbours of the
/// trace one in seven took more than 1.5.
#[test]
fn neighbours_of_four_streams_keep_the_bound() {
    let t = trace("four_streams");
    let ratios: Vec<f64> = (0..20)
        .map(|seed| {
            let r = replay_virtual(&near(&t, seed), &Options::default()).expect("a replay");
            assert_eq!(r.failed, 0, "{seed}");
            r.ratio
        })
        .collect();
    let (over, mean) =
        (ratios.iter().filter(|&&r| r > 1.5).count(), ratios.iter().sum::<f64>() / 20.0);
    assert!(over <= 1 && mean <= 1.42, "{over} of twenty over 1.5, {mean:.3} in the mean");
}

/// The recorded sizes are no accident: how much of its last granule a block fills is another
/// fraction for each neighbour.
#[test]
fn neighbours_of_a_decoding_take_little_more() {
    let t = trace("llama_generate");
    for policy in [Policy::Compact, Policy::Balanced] {
        let ratios: Vec<f64> = (0..20)
            .map(|seed| {
                let r = replay_virtual(&near(&t, seed), &Options { policy, ..Options::default() })
                    .expect("a replay");
                assert_eq!(r.failed, 0, "{seed}");
                r.ratio
            })
            .collect();
        let (over, mean) =
            (ratios.iter().filter(|&&r| r > 1.05).count(), ratios.iter().sum::<f64>() / 20.0);
        let worst = ratios.iter().copied().fold(0.0, f64::max);
        assert!(
            over <= 1 && mean <= 1.036 && worst <= 1.06,
            "{policy:?}: {over} over 1.05, {mean:.4} in the mean, {worst:.4}"
        );
    }
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

/// A copy's peak lasts for a moment: copies that do not meet there have less live together, and
/// what was reserved is never below.
#[test]
fn what_threads_request_is_counted_where_they_meet() {
    for text in [
        "0,a,1,2097152,0\n1,f,1,2097152,0\n",
        "0,a,1,7,0\n0,a,2,4194305,0\n1,f,2,0,0\n2,a,3,2097152,1\n",
    ] {
        let t = Trace::read(text.as_bytes(), "t").expect("a trace");
        for threads in [1, 2, 3] {
            let options = Options { threads, repeat: 50, ..Options::default() };
            let r = replay_virtual(&t, &options).expect("a replay");
            assert!(
                r.peak_requested >= t.peak - t.peak / 4096
                    && r.peak_requested <= t.peak * u64::from(threads),
                "{r:?}"
            );
            assert!(r.ratio >= 1.0, "{r:?}");
        }
    }
    // Failed allocations were never live.
    let t = trace("resnet50_train");
    let r =
        replay_virtual(&t, &Options { budget: Some(0.9), ..Options::default() }).expect("a replay");
    assert!(r.failed > 0 && r.peak_requested < t.peak && r.ratio >= 1.0, "{r:?}");
}

#[test]
fn copies_that_no_number_holds_are_refused() {
    let t = Trace::read(&b"0,a,1,9223372036854775808,0\n"[..], "t").expect("a trace");
    for budget in [None, Some(1.0)] {
        let err = replay_virtual(&t, &Options { threads: 2, budget, ..Options::default() })
            .expect_err("too much")
            .to_string();
        assert!(
            err.contains(
                "2 copies of a trace with 9223372036854775808 live bytes have more than 2^64"
            ),
            "{err}"
        );
    }
    let err = find_min_budget(&t, &Options::default()).expect_err("no memory").to_string();
    assert!(err.contains("does not complete with four times its peak"), "{err}");
    let r = replay_virtual(&t, &Options::default()).expect("a replay");
    assert_eq!((r.failed, r.peak_requested), (1, 0));
}

/// The events that a progress callback hears of add up to at most the announced number. The trials
/// of a search may play fewer, but the sum is at least three quarters.
#[test]
fn progress_comes_to_what_was_announced() {
    let t = trace("resnet50_train");
    for (threads, search) in [(1, false), (2, true)] {
        let played = Arc::new(AtomicU64::new(0));
        let sum = played.clone();
        let progress = Progress::new(move |n| {
            sum.fetch_add(n, Ordering::Relaxed);
        });
        let options =
            Options { threads, repeat: 2, progress: Some(progress), ..Options::default() };
        let announced = events_to_play(&t, &options, search, 2 << 20).expect("a number");
        measure(&t, &options, search.then_some(Policy::Compact), &virtual_device)
            .expect("a replay");
        let played = played.load(Ordering::Relaxed);
        // A search may end a trial early.
        assert!(played <= announced && played >= announced / 4 * 3, "{played} of {announced}");
    }
}

/// A budget below a player's least fails, with it nothing does.
#[test]
fn every_player_bears_the_traces() {
    use leasehold_sim::memory::replay::{Player, measure, virtual_device};
    let t = trace("gpt2_train");
    for player in [Player::Own, Player::System] {
        let options = Options { player, ..Options::default() };
        let r = measure(&t, &options, Some(Policy::Compact), &virtual_device).expect("a replay");
        assert_eq!((r.failed, r.events), (0, t.events.len() as u64), "{player:?}");
        assert!(
            r.ns_per_op.p50 > 0.0
                && r.ns_per_op.p50 <= r.ns_per_op.p99
                && r.ns_per_op.p99 <= r.ns_per_op.p999
        );
        let least = r.min_budget.expect("it was looked for");
        let with = |budget| {
            let options = Options {
                budget: Some(budget),
                policy: Policy::Compact,
                stop_at_failure: true,
                ..options.clone()
            };
            replay_virtual(&t, &options).expect("a replay").failed
        };
        assert_eq!(with(least + 1e-9), 0, "{player:?} at {least}");
        assert!(with(0.9) > 0, "{player:?}");
        assert!(least <= r.ratio + 0.01, "{player:?}: {least} {}", r.ratio);
    }
}

#[test]
fn a_replay_tells_how_far_it_is_and_can_end_early() {
    use leasehold_core::sync::Arc;
    use leasehold_core::sync::atomic::{AtomicU64, Ordering};
    use leasehold_sim::memory::replay::Progress;
    let t = trace("resnet50_train");
    let told = Arc::new(AtomicU64::new(0));
    let to = told.clone();
    let count = move |n| {
        to.fetch_add(n, Ordering::Relaxed);
    };
    let progress = Some(Progress::new(count));
    let r = replay_virtual(&t, &Options { repeat: 2, progress, ..Options::default() })
        .expect("a replay");
    assert_eq!(told.load(Ordering::Relaxed), r.events);
    let early =
        Options { budget: Some(0.5), repeat: 5, stop_at_failure: true, ..Options::default() };
    let r = replay_virtual(&t, &early).expect("a replay");
    assert!(r.failed > 0 && r.events == t.events.len() as u64, "{r:?}");
}
