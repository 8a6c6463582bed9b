//! Numbers that nothing can be done with: errors, without an overflow.

use leasehold_alloc::{Backing, Policy};
use leasehold_sim::memory::replay::{
    Options, Player, events_to_play, find_min_budget, measure, recorded_replay, replay_virtual,
    virtual_device,
};
use leasehold_sim::memory::trace::{Event, Trace};
use leasehold_sim::memory::workload::Workload;
use leasehold_sim::memory::{FakeBacking, System};

fn trace() -> Trace {
    Trace::read(&b"0,a,1,100,0\n1,a,2,5000,1\n2,f,1,100,0\n"[..], "t").unwrap()
}

#[test]
fn every_number_of_the_options_is_played_or_refused() {
    for player in [Player::Own, Player::System] {
        for (lag, budget) in [
            (u64::MAX, None),
            (1 << 62, Some(f64::INFINITY)),
            (0, Some(f64::NAN)),
            (3, Some(-1.0)),
            (3, Some(f64::MAX)),
        ] {
            let options = Options { player, lag, budget, ..Options::default() };
            let report = replay_virtual(&trace(), &options).unwrap();
            assert_eq!(report.events, 3, "{player:?} {lag} {budget:?}");
        }
        // Sizes at the end of the numbers.
        for size in [u64::MAX, u64::MAX - 511, u64::MAX - (2 << 20), 1 << 63] {
            let text = format!("0,a,1,{size},0\n1,f,1,0,0\n");
            let trace = Trace::read(text.as_bytes(), "t").unwrap();
            let options = Options { player, ..Options::default() };
            let report = replay_virtual(&trace, &options).unwrap();
            assert_eq!(report.failed, 1, "{player:?} {size}");
        }
    }
    let options = Options { threads: u32::MAX, repeat: u32::MAX, ..Options::default() };
    assert!(events_to_play(&trace(), &options, true, 2 << 20).unwrap() > 1 << 60);
    let large = Trace { peak: u64::MAX, ..trace() };
    assert!(replay_virtual(&large, &Options { threads: 2, ..Options::default() }).is_err());
    assert!(events_to_play(&large, &Options::default(), true, 1).is_ok());
}

#[test]
fn a_trace_that_counts_less_than_it_names_is_refused() {
    let options = Options::default();
    let event = |id, stream| Event { t_us: 0, alloc: true, id, size: 8, stream };
    for bad in [event(2, 0), event(u32::MAX, 0), event(0, 2), event(0, u16::MAX)] {
        let mut trace = trace();
        trace.events.push(bad);
        let text = replay_virtual(&trace, &options).unwrap_err().to_string();
        assert!(text.contains("event 3 of a trace is") && text.contains("2 allocations"), "{text}");
        assert!(measure(&trace, &options, Some(Policy::Compact), &virtual_device).is_err());
        assert!(find_min_budget(&trace, &options).is_err());
        assert!(recorded_replay(&trace, &options, virtual_device().unwrap(), 10).is_err());
    }
}

#[test]
fn workloads_without_a_meaning_are_refused() {
    let subject = System::counting(1 << 30);
    for odd in [
        Workload::Batch { size: 8, count: 0 },
        Workload::Random { live: 0, least: 1, most: 8 },
        Workload::Random { live: 4, least: 9, most: 8 },
        Workload::Random { live: 4, least: 0, most: u64::MAX },
    ] {
        assert!(odd.run(&subject, 1, 10).is_err(), "{odd:?}");
    }
    for large in [
        Workload::Batch { size: 1 << 29, count: usize::MAX },
        Workload::Batch { size: u64::MAX, count: usize::MAX },
        Workload::Random { live: usize::MAX, least: 1 << 29, most: u64::MAX - 1 },
        Workload::PingPong { size: u64::MAX },
        Workload::ProducerConsumer { size: u64::MAX },
    ] {
        assert!(large.run(&subject, 1, 10).unwrap().is_none(), "{large:?} does not fit");
        assert!(large.live_bytes() >= 1 << 60);
    }
}

#[test]
fn addresses_and_sizes_at_the_end_of_the_numbers() {
    let fake = FakeBacking::new(u64::MAX);
    for bytes in [u64::MAX, u64::MAX - (2 << 20), 1 << 63] {
        let reserved = fake.reserve(bytes);
        assert!(reserved.is_err() || bytes == 1 << 63);
        // SAFETY: at no address in particular; the memory of a fake is nobody's.
        let committed = unsafe { fake.commit(None, bytes) };
        assert!(committed.is_err() || bytes == 1 << 63);
    }
    assert!(!fake.is_backed(u64::MAX - 7, 8) && !fake.is_backed(u64::MAX, u64::MAX));
}
