//! Snapshots, the trace ring and the leak report: they say what is, and a recorded run replays.

use crate::model::Rng;
use crate::{Bench, MIB};
use leasehold_alloc::{
    AllocatorConfig, BlockState, Buffer, CrossStream, EventKind, GraphArena, Layout, Lifetime, On,
    Policy, Snapshot,
};
use leasehold_core::{Lease, Name, TimelineSource};
use leasehold_sim::memory::FakeBacking;
use leasehold_sim::memory::memory_viz;
use leasehold_sim::memory::replay::{Options, replay_virtual};
use leasehold_sim::memory::trace::Trace;
use leasehold_sim::memory::{VirtualStream, pass};
use std::collections::HashMap;

fn traced(fake: FakeBacking, trace_events: usize) -> Bench {
    Bench::with(
        fake,
        AllocatorConfig { trace_events, policy: Policy::Compact, ..AllocatorConfig::default() },
    )
}

/// The segments' blocks tile them, the live ones are the leases, everything reserved lies in a
/// segment or is cached.
fn agrees(b: &Bench, live: &[Lease<Buffer>]) -> Snapshot {
    let s = b.allocator.snapshot();
    let mut found: HashMap<u64, (u64, u32, u16)> = HashMap::new();
    let (mut bytes, mut end) = (0, 0);
    for segment in &s.segments {
        assert!(segment.addr >= end, "segments are in order and apart");
        assert!(b.fake.is_backed(segment.addr, segment.bytes));
        let mut at = segment.addr;
        for block in &segment.blocks {
            assert_eq!(block.addr, at, "{segment:?}");
            assert!(block.bytes > 0 && block.requested <= block.bytes);
            assert_eq!(block.state == BlockState::Live, block.requested > 0);
            if block.state == BlockState::Live {
                assert!(
                    found.insert(block.addr, (block.requested, block.tag, block.stream)).is_none()
                );
            }
            at += block.bytes;
        }
        end = segment.addr + segment.bytes;
        assert_eq!(at, end, "{segment:?}");
        bytes += segment.bytes;
    }
    assert_eq!(bytes + s.stats.cached_pieces, s.stats.reserved);
    for lease in live {
        let want = (lease.len(), lease.tag(), lease.home_timeline().get());
        assert_eq!(found.remove(&lease.addr()), Some(want), "{lease:?}");
    }
    assert!(found.is_empty(), "{found:?}");
    s
}

/// Random work; `check` now and then.
fn work(b: &Bench, steps: usize, mut check: impl FnMut(&[Lease<Buffer>])) {
    let others =
        [VirtualStream::new().expect("a timeline"), VirtualStream::new().expect("a timeline")];
    let mut rng = Rng(0xABCD);
    let mut held: Vec<Lease<Buffer>> = Vec::new();
    for i in 0..steps {
        let streams = [&b.stream, &others[0], &others[1]];
        let stream = streams[rng.below(3) as usize];
        if rng.below(100) < 55 && held.len() < 400 || held.is_empty() {
            let size = 1 + match rng.below(4) {
                0 => rng.below(5 * MIB),
                1 => rng.below(100_000),
                _ => rng.below(5000),
            };
            let buffer =
                b.allocator.alloc(Layout::new(size), On::new(stream)).expect("an allocation");
            buffer.set_tag(rng.below(5) as u32);
            // SAFETY: nothing uses the memory behind a fake backing, so nothing can use it too
            // early.
            unsafe { buffer.mark_write(stream.submit().expect("a value")) };
            held.push(buffer);
        } else {
            let at = rng.below(held.len() as u64) as usize;
            let buffer = held.swap_remove(at);
            buffer.used_on(stream.submit().expect("a value"));
        }
        if rng.below(10) == 0 {
            pass(stream.timeline().now());
        }
        if i % (steps / 10).max(1) == 7 {
            check(&held);
        }
    }
    held.clear();
    streams_done(&[&b.stream, &others[0], &others[1]]);
    check(&held);
}

fn streams_done(streams: &[&VirtualStream]) {
    streams.iter().for_each(|s| pass(s.timeline().now()));
}

#[test]
fn snapshots_say_where_everything_is() {
    for fake in [FakeBacking::new(1 << 32), FakeBacking::segments(1 << 32)] {
        // With thread caches too.
        for b in [traced(fake.clone(), 16), Bench::with(fake.clone(), AllocatorConfig::default())] {
            work(&b, 2000, |held| {
                agrees(&b, held);
            });
            b.allocator.trim(0).expect("a trim");
            assert_eq!(agrees(&b, &[]).segments, []);
        }
    }
}

#[test]
fn snapshots_show_aids_graphs_and_thread_caches() {
    let b = Bench::new(1 << 30);
    // The first free of a shard only finds its owner.
    (0..4).for_each(|_| drop(b.take(500)));
    let states = |s: &Snapshot| -> Vec<BlockState> {
        s.segments.iter().flat_map(|s| &s.blocks).map(|b| b.state).collect()
    };
    assert!(states(&b.allocator.snapshot()).contains(&BlockState::Cached), "in a thread cache");
    let config = AllocatorConfig {
        debug: "quarantine=1M".parse().expect("debug checks"),
        ..AllocatorConfig::default()
    };
    let b = Bench::with(FakeBacking::new(1 << 30), config);
    drop(b.take(500));
    drop(b.take(100_000));
    let held =
        states(&b.allocator.snapshot()).iter().filter(|&&s| s == BlockState::HeldBack).count();
    assert_eq!(held, 2);
    let config = AllocatorConfig {
        debug: "guard".parse().expect("debug checks"),
        ..AllocatorConfig::default()
    };
    let b = Bench::with(FakeBacking::new(1 << 30), config);
    let x = b.take(1000);
    agrees(&b, &[x]);

    let b = Bench::new(1 << 30);
    let arena: GraphArena = b.allocator.arena().expect("an arena");
    let x = arena.alloc(Layout::new(3 * MIB)).expect("a symbol");
    let used = Lifetime { symbol: x.addr(), first: 0, last: 1, live_at_end: false };
    // SAFETY: the backing is a fake, whose memory nobody uses.
    unsafe { arena.seal(&[used], On::new(&b.stream)) }.expect("seals");
    let graph = |b: &Bench| -> u64 {
        let s = b.allocator.snapshot();
        s.segments.iter().flat_map(|s| &s.blocks).filter(|b| b.graph).map(|b| b.requested).sum()
    };
    assert_eq!(graph(&b), b.allocator.stats().in_graphs);
    assert!(graph(&b) >= 3 * MIB);
    drop((x, arena));
    assert_eq!(graph(&b), 0);
}

#[test]
fn a_recorded_run_replays() {
    let b = traced(FakeBacking::new(1 << 32), 1 << 16);
    let keep = b.take(12_345);
    work(&b, 3000, |_| {});
    let s = agrees(&b, std::slice::from_ref(&keep));
    assert_eq!(s.events_lost, 0);
    // Written and read again.
    let trace = Trace::recorded(&s).expect("read");
    let allocs = trace.events.iter().filter(|e| e.alloc).count();
    assert_eq!((allocs as u64, trace.events.len()), (s.stats.allocations, 2 * allocs - 1));
    assert_eq!((trace.streams, trace.peak), (3, s.stats.live_peak));
    // It plays.
    let report = replay_virtual(&trace, &Options::default()).expect("a replay");
    assert_eq!((report.events, report.failed), (trace.events.len() as u64, 0));
    // Memory events balance what is mapped.
    let sum = |kind| s.events.iter().filter(|e| e.kind == kind).map(|e| e.size).sum::<u64>();
    let mapped = sum(EventKind::Map) - sum(EventKind::Unmap);
    assert_eq!(mapped + s.stats.cached_pieces, s.stats.reserved);
    // So do growths and trims what is reserved; and each remap and wait that is counted is there.
    let count = |kind| s.events.iter().filter(|e| e.kind == kind).count() as u64;
    assert_eq!(sum(EventKind::Growth) - sum(EventKind::Trim), s.stats.reserved);
    assert_eq!(count(EventKind::Growth), s.stats.growths);
    assert_eq!(count(EventKind::Remap), s.stats.remaps);
    assert!(s.stats.remaps > 0);
    b.allocator.trim(0).expect("a trim");
    let s = b.allocator.snapshot();
    let sum = |kind| s.events.iter().filter(|e| e.kind == kind).map(|e| e.size).sum::<u64>();
    assert!(sum(EventKind::Trim) > 0);
    assert_eq!(sum(EventKind::Growth) - sum(EventKind::Trim), s.stats.reserved);
}

#[test]
fn waits_are_recorded_with_the_stream_that_was_waited_for() {
    for cross_stream in [CrossStream::IfReady, CrossStream::Never] {
        let config = AllocatorConfig {
            cross_stream,
            budget: 24 * MIB,
            trace_events: 64,
            ..AllocatorConfig::default()
        };
        let b = Bench::with(FakeBacking::new(64 * MIB), config);
        let other = VirtualStream::new().expect("a timeline");
        b.freed_in_use(&other, 20 * MIB);
        drop(b.take(20 * MIB));
        let s = b.allocator.snapshot();
        let of = |kind| -> Vec<u16> {
            s.events.iter().filter(|e| e.kind == kind).map(|e| e.stream).collect()
        };
        let waits = (of(EventKind::StreamWait), of(EventKind::HostWait));
        let id = vec![other.timeline().id().get()];
        let want = if s.stats.inserted_waits == 1 { (id, vec![]) } else { (vec![], id) };
        assert_eq!(waits, want);
        assert_eq!(s.stats.inserted_waits + s.stats.host_waits, 1);
        assert_eq!(s.stats.host_waits == 1, cross_stream == CrossStream::Never);
    }
}

#[test]
fn a_ring_that_is_too_small_keeps_the_newest_and_the_trace_is_whole() {
    let b = traced(FakeBacking::new(1 << 32), 100);
    let keep = b.take(7 * MIB);
    work(&b, 2000, |_| {});
    let s = agrees(&b, std::slice::from_ref(&keep));
    assert_eq!(s.events.len(), 100);
    assert!(s.events_lost > 1000);
    // The reader refuses a free without its allocation.
    let trace = Trace::recorded(&s).expect("read");
    assert!(
        trace.events.iter().any(|e| e.alloc && e.size == 7 * MIB),
        "what was held all the time is there"
    );
}

#[test]
fn failures_are_recorded_and_nothing_is_when_it_is_off() {
    let b = traced(FakeBacking::new(4 * MIB), 16);
    assert!(b.alloc(5 * MIB).is_err());
    let s = b.allocator.snapshot();
    let last = s.events.last().expect("an event");
    assert_eq!((last.kind, last.size, last.addr), (EventKind::OutOfMemory, 5 * MIB, 0));
    let b = Bench::new(1 << 30);
    drop(b.take(100));
    let s = b.allocator.snapshot();
    assert_eq!((s.events.len(), s.events_lost), (0, 0));
}

#[test]
fn the_leak_report_names_tags_and_is_silent_without_leaks() {
    let b = Bench::new(1 << 30);
    assert_eq!(b.allocator.leak_report().to_string(), "no buffer is held");
    let held: Vec<_> = (0..10).map(|i| b.take(1000 * (i + 1))).collect();
    held.iter().enumerate().for_each(|(i, h)| h.set_tag(i as u32 % 3));
    let second = held[9].clone();
    let report = b.allocator.leak_report();
    assert_eq!(report.buffers.len(), 10);
    assert_eq!((report.buffers[0].len, report.buffers[0].leases), (10_000, 2));
    let sums: Vec<_> = report.by_tag().iter().map(|t| (t.tag, t.count, t.bytes)).collect();
    assert_eq!(sums, [(0, 4, 22_000), (2, 3, 18_000), (1, 3, 15_000)]);
    let line = b.stream.timeline().id().get();
    assert_eq!(
        report.to_string(),
        format!(
            "10 buffers of 55000 bytes are held: tag 0: 4 of 22000 bytes, tag 2: 3 of 18000 bytes, tag 1: 3 of 15000 bytes; \
             the largest: 10000 bytes at {:#x} (tag 0, allocated on timeline {line})",
            held[9].addr()
        )
    );
    drop((held, second));
    assert!(b.allocator.leak_report().is_empty());
}

#[test]
fn reports_and_snapshots_say_the_names_of_buffers_streams_and_call_sites() {
    let b = traced(FakeBacking::new(64 * MIB), 16);
    b.stream.timeline().set_name(Some("decode".into()));
    let weights = b.take(MIB);
    weights.set_name("weights");
    let scope = Name::new("layer 3").scope();
    let activations = b.take(2 * MIB);
    let refused = b.alloc(80 * MIB).expect_err("more than there is").to_string();
    drop(scope);
    let timeline = b.stream.timeline().id();
    for part in [
        "live with name \"weights\" (1 buffers)",
        "live with name \"layer 3\" (1 buffers)",
        "requested in scope \"layer 3\"",
    ] {
        assert!(refused.contains(part), "{refused}");
    }
    let leaks = b.allocator.leak_report().to_string();
    let largest =
        format!("(name \"layer 3\", allocated on timeline {} \"decode\")", timeline.get());
    assert!(leaks.ends_with(&largest), "{leaks}");
    let s = b.allocator.snapshot();
    assert_eq!(s.names.values().map(String::as_str).collect::<Vec<_>>(), ["weights", "layer 3"]);
    assert_eq!(s.streams.get(&timeline.get()).map(String::as_str), Some("decode"));
    assert!(format!("{weights:?}").contains("\"weights\""), "{weights:?}");
    drop((weights, activations));
    assert_eq!(b.take(MIB).name(), None, "a name goes with the last lease");
}

/// Python loads the pickles and checks every block and event, and that the viewer can play the
/// trace backwards.
#[test]
fn python_and_the_viewer_read_the_pickles() {
    let script = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../ci/memory_viz.py");
    let there = std::process::Command::new("python3")
        .arg("--version")
        .output()
        .is_ok_and(|o| o.status.success());
    if !there || !script.exists() {
        assert!(
            std::env::var_os("LEASEHOLD_REQUIRE_TOOLS").is_none(),
            "python3 or ci/memory_viz.py is missing"
        );
        eprintln!("skipped: no python3");
        return;
    }
    let folder = std::env::temp_dir().join(format!("leasehold-memory-viz-{}", std::process::id()));
    std::fs::create_dir_all(&folder).expect("a folder");
    let mut files = Vec::new();
    let mut write = |b: &Bench, name: &str| {
        let path = folder.join(format!("{name}.pickle"));
        let file = std::fs::File::create(&path).expect("a file");
        memory_viz::write(&b.allocator.snapshot(), file).expect("written");
        files.push(path);
    };
    for (kind, fake) in
        [("vmm", FakeBacking::new(1 << 32)), ("segments", FakeBacking::segments(1 << 32))]
    {
        for events in [1 << 16, 300] {
            let b = traced(fake.clone(), events);
            let mut n = 0;
            work(&b, 1500, |_| {
                n += 1;
                if n % 4 == 1 {
                    write(&b, &format!("{kind}-{events}-{n}"));
                }
            });
            assert!(b.alloc(1 << 50).is_err());
            b.allocator.trim(MIB).expect("a trim");
            write(&b, &format!("{kind}-{events}-end"));
        }
    }
    let debug = "pass-through,quarantine=1M".parse().expect("debug checks");
    let b = Bench::with(
        FakeBacking::new(1 << 32),
        AllocatorConfig { debug, trace_events: 999, ..Default::default() },
    );
    let held = b.take(5000);
    work(&b, 300, |_| {});
    write(&b, "pass-through");
    drop(held);
    let run = std::process::Command::new("python3")
        .arg(script)
        .args(&files)
        .output()
        .expect("python3 runs");
    let text =
        String::from_utf8_lossy(&run.stdout).into_owned() + &String::from_utf8_lossy(&run.stderr);
    assert!(run.status.success(), "{text}");
    assert_eq!(text.lines().count(), files.len());
    // Where the check fails the files stay, for whoever wants to see them.
    std::fs::remove_dir_all(folder).expect("its own folder");
}

#[test]
fn pickles_have_the_opcodes_that_the_viewer_knows() {
    let b = traced(FakeBacking::new(1 << 32), 1 << 12);
    let held = b.take(3 * MIB);
    held.set_tag(9);
    work(&b, 500, |_| {});
    assert!(b.alloc(1 << 40).is_err());
    let mut out = Vec::new();
    memory_viz::write(&b.allocator.snapshot(), &mut out).expect("written");
    // Walks the opcodes; Python's own check is ci/memory_viz.py.
    let (mut at, mut depth, mut words) = (0usize, 0i64, Vec::new());
    while out[at] != b'.' {
        let (len, grows) = match out[at] {
            0x80 => (2, 0),
            b'}' | b']' | 0x88 | 0x89 => (1, 1),
            b'(' | b'e' | b'u' | 0x86 => (1, 0),
            b'K' | b'h' => (2, 1),
            b'q' => (2, 0),
            b'M' => (3, 1),
            b'J' => (5, 1),
            0x8A => (2 + usize::from(out[at + 1]), 1),
            b'X' => {
                let n = u32::from_le_bytes(out[at + 1..at + 5].try_into().expect("four bytes"))
                    as usize;
                words.push(String::from_utf8(out[at + 5..at + 5 + n].to_vec()).expect("text"));
                (5 + n, 1)
            }
            other => panic!("opcode {other:#x} at {at}"),
        };
        at += len;
        depth += grows;
    }
    assert_eq!(at + 1, out.len());
    assert!(depth > 1000);
    for word in [
        "segments",
        "device_traces",
        "segment_map",
        "free_completed",
        "oom",
        "active_allocated",
        "tag 9",
    ] {
        assert!(words.iter().any(|w| w == word), "{word}");
    }
}
