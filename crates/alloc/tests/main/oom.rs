//! Running out: the report says where the memory is; reclaimers run by priority, no more of them
//! than needed; `trim` keeps what it is told.

use crate::{Bench, MIB};
use leasehold_alloc::{AllocatorConfig, CrossStream, Layout, On};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, OutOfMemory, TimelineSource};
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::{VirtualStream, pass};

fn budget(budget: u64, cross_stream: CrossStream) -> Bench {
    let config = AllocatorConfig {
        budget,
        cross_stream,
        name: "cpu:0 memory".into(),
        ..AllocatorConfig::default()
    };
    Bench::with(FakeBacking::new(1 << 30), config)
}

fn refused(b: &Bench, bytes: u64) -> OutOfMemory {
    match b.alloc(bytes) {
        Err(Error::OutOfMemory(report)) => *report,
        other => panic!("{other:?}"),
    }
}

fn place(report: &OutOfMemory, name: &str) -> u64 {
    report
        .places
        .iter()
        .find(|p| p.0 == name)
        .unwrap_or_else(|| panic!("no `{name}` in {report}"))
        .1
}

#[test]
fn the_report_says_where_the_memory_is() {
    let b = budget(64 * MIB, CrossStream::Never);
    let side = VirtualStream::new().expect("a timeline");
    let held: Vec<_> = (0..10).map(|_| b.take(3 * MIB)).collect();
    held.iter().take(4).for_each(|h| h.set_tag(7));
    let small: Vec<_> = (0..3).map(|_| b.take(1000)).collect();
    let other = b.allocator.alloc(Layout::new(20 * MIB), On::new(&side)).expect("an allocation");
    // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too early.
    unsafe { other.mark_write(side.submit().expect("a value")) };
    drop(other);
    // Nothing completes the side stream, and nobody can wait for it.
    side.on_wait(Some(Arc::new(|_, _| Err(Error::Timeout("the side stream".into())))));
    let report = refused(&b, 40 * MIB);
    assert_eq!(
        (report.requested, report.limit, report.live),
        (40 * MIB, 64 * MIB, 30 * MIB + 3000)
    );
    assert_eq!(place(&report, "live with tag 7 (4 buffers)"), 12 * MIB);
    assert_eq!(place(&report, "live with tag 0 (9 buffers)"), 18 * MIB + 3000);
    assert!(place(&report, "free slots of slabs") > 0);
    let timeline = format!("free once timeline {} is done", side.timeline().id().get());
    assert_eq!(place(&report, &timeline), report.free_not_ready);
    assert!(report.free_not_ready >= 20 * MIB);
    assert!(report.places.is_sorted_by_key(|p| std::cmp::Reverse(p.1)), "{report}");
    let hint = "the budget allows no more: raise it, or free something";
    assert!(report.notes.iter().any(|n| n == hint), "{report}");
    let text = report.to_string();
    assert!(text.starts_with("40.0 MiB requested from cpu:0 memory; "), "{text}");
    assert!(
        text.contains("; of it: ") && text.contains(" 12.0 MiB live with tag 7 (4 buffers)"),
        "{text}"
    );
    pass(side.timeline().now());
    drop((held, small));
    drop(b.take(40 * MIB));
}

#[test]
fn the_report_tells_fragmentation_from_want() {
    let b = budget(16 * MIB, CrossStream::IfReady);
    let mut held: Vec<_> = (0..32).map(|_| b.take(MIB / 2)).collect();
    let mut i = 0;
    held.retain(|_| {
        i += 1;
        i % 2 == 0
    });
    let report = refused(&b, 6 * MIB);
    let note = "enough is free, but in pieces that live blocks hold apart";
    assert!(report.notes.iter().any(|n| n == note), "{report}");
    assert!(report.free_ready >= 6 * MIB && report.largest_free < MIB);
    // A small one needs no word of it.
    held.push(b.take(MIB / 2));
}

#[test]
fn reclaimers_run_by_priority_until_it_fits() {
    let b = budget(16 * MIB, CrossStream::IfReady);
    let called = Arc::new(Mutex::new(Vec::new()));
    let cache = |bytes: &[u64]| {
        Arc::new(Mutex::new(bytes.iter().map(|&n| b.take(n)).collect::<Vec<Lease<_>>>()))
    };
    let caches = [cache(&[2 * MIB, 2 * MIB]), cache(&[4 * MIB]), cache(&[6 * MIB])];
    for (i, priority) in [(1usize, 5), (0, -1), (2, 9)] {
        let (cache, called) = (caches[i].clone(), called.clone());
        let freed = move |_| {
            called.lock().push(priority);
            cache.lock().pop().map_or(0, |h| h.len())
        };
        b.allocator.add_reclaimer(priority, Box::new(freed));
    }
    // Six are free or can be taken after the first two caches are empty; the last is left alone.
    let got = b.take(8 * MIB);
    assert_eq!(*called.lock(), [-1, -1, -1, 5]);
    assert_eq!(caches[2].lock().len(), 1);
    drop(got);
    b.check();
    // The allocator holds the reclaimers, and these hold leases of it.
    caches.iter().for_each(|c| c.lock().clear());
}

#[test]
fn trim_keeps_what_it_is_told() {
    let b = Bench::new(1 << 30);
    let held: Vec<_> = (0..8).map(|_| b.take(4 * MIB)).collect();
    let keep = b.take(MIB);
    drop(held);
    pass(b.stream.timeline().now());
    let before = b.allocator.stats().reserved;
    let freed = b.allocator.trim(10 * MIB).expect("a trim");
    let stats = b.allocator.stats();
    assert_eq!(stats.reserved, before - freed);
    let free = stats.free_ready + stats.free_not_ready + stats.cached_pieces;
    assert!((8 * MIB..=12 * MIB).contains(&free), "to a granule: {stats:?}");
    assert_eq!(b.allocator.trim(u64::MAX).expect("a trim"), 0);
    drop(keep);
    b.allocator.trim(0).expect("a trim");
    assert_eq!(b.allocator.stats().reserved, 0);
}

/// Without virtual memory a cached segment serves what fits it only: the fallback ended with an
/// error while all of the memory lay free.
#[test]
fn free_segments_go_back_before_memory_runs_out() {
    let b = Bench::with(FakeBacking::segments(64 * MIB), AllocatorConfig::default());
    let small: Vec<_> = (0..4).map(|_| b.take(12 * MIB)).collect();
    drop(small);
    let large = b.take(60 * MIB);
    assert_eq!(b.allocator.stats().reserved, 60 * MIB);
    b.check();
    let Err(Error::OutOfMemory(report)) = b.alloc(10 * MIB) else { panic!("there is no memory") };
    assert_eq!(report.reserved, 60 * MIB);
    drop(large);
    drop(b.take(10 * MIB));
    b.check();
}
