//! Streams of the caller: what needs no driver call, and what waits for which event.

use crate::*;
use std::time::{Duration, Instant};

#[test]
fn same_stream_reuse_makes_no_driver_call() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    for bytes in [100, 300_000, 30 * MIB] {
        let block = device.alloc(bytes, stream).unwrap();
        device.fill(stream, block, 1, bytes);
        assert_eq!(device.free(block), OK);
        let before = device.stats().driver_calls;
        let records = calls(c"cuEventRecord");
        for _ in 0..20 {
            let again = device.alloc(bytes, stream).unwrap();
            assert_eq!(again, block);
            device.fill(stream, again, 2, bytes);
            assert_eq!(device.free(again), OK);
        }
        assert_eq!((device.stats().driver_calls, calls(c"cuEventRecord")), (before, records));
    }
    device.end(stream);
    device.synchronize();
    device.trim();
    assert_eq!((device.stats().reserved_bytes, races()), (0, String::new()));
    device.close();
}

#[test]
fn memory_goes_to_another_stream_behind_an_event() {
    let _turn = turn();
    let device = Device::sim(40 << 20);
    let (a, b) = (device.stream(0), device.stream(0));
    let begin = Instant::now();
    let waits = || device.stats().stream_waits + device.stats().host_waits;
    // On a busy machine the work of many rounds may be over before the next one asks for memory.
    let mut round = 0u32;
    while round < 20 || waits() == 0 && begin.elapsed() < Duration::from_secs(60) {
        let (from, to) = if round.is_multiple_of(2) { (a, b) } else { (b, a) };
        let block = device.alloc(36 * MIB, from).unwrap();
        device.fill(from, block, round as u8, 36 * MIB);
        // Used on the other stream too, every third time.
        if round.is_multiple_of(3) {
            assert_eq!(leasehold_sim_order(device.0, from, to), OK);
            device.fill(to, block, round as u8, 36 * MIB);
            assert_eq!(device.record(block, to), OK);
        }
        assert_eq!(device.free(block), OK);
        round += 1;
    }
    assert_eq!(races(), "");
    assert!(waits() > 0, "{:?}", device.stats());
    device.end(a);
    device.end(b);
    device.close();
}

#[test]
fn default_streams_and_ended_ones() {
    let _turn = turn();
    let device = Device::sim(0);
    assert_eq!(device.stream(1), 1);
    for handle in [0, 1] {
        let block = device.alloc(MIB, handle).unwrap();
        device.fill(handle, block, 5, MIB);
        assert_eq!(device.free(block), OK);
    }
    std::thread::scope(|scope| {
        for _ in 0..3 {
            scope.spawn(|| {
                let own = device.stream(2);
                assert_eq!(own, 2);
                for _ in 0..10 {
                    let block = device.alloc(MIB, own).unwrap();
                    device.fill(own, block, 6, MIB);
                    assert_eq!(device.free(block), OK);
                }
            });
        }
    });
    // Streams that come and go, each with its owner's word.
    for _ in 0..50 {
        let stream = device.stream(0);
        let block = device.alloc(20 * MIB, stream).unwrap();
        device.fill(stream, block, 7, 20 * MIB);
        assert_eq!(device.free(block), OK);
        device.end(stream);
    }
    assert!(device.stats().reserved_bytes < 400 << 20, "{:?}", device.stats());
    device.synchronize();
    device.trim();
    assert_eq!((device.stats().reserved_bytes, races()), (0, String::new()));
    device.close();
}

/// Allocates a block on a new stream, fills and frees it there, and destroys the stream without a
/// word.
fn use_and_destroy(device: Device, bytes: usize) -> usize {
    let stream = device.stream(0);
    let block = device.alloc(bytes, stream).unwrap();
    device.fill(stream, block, 1, bytes);
    assert_eq!(device.free(block), OK);
    assert_eq!(leasehold_sim_stream_destroy(device.0, stream), OK, "{}", last_error());
    stream
}

#[test]
fn a_synchronisation_frees_the_memory_of_streams_that_are_gone() {
    let _turn = turn();
    let device = Device::sim(64 << 20);
    let own = device.stream(0);
    for streams in [2, 1, 2] {
        for _ in 0..streams {
            use_and_destroy(device, 64 * MIB / streams);
        }
        assert!(device.stats().free_pending_bytes > 0, "{:?}", device.stats());
        device.synchronize();
        let stats = device.stats();
        assert_eq!((stats.free_pending_bytes, stats.free_ready_bytes), (0, 64 << 20), "{stats:?}");
        let block = device.alloc(64 * MIB, own).unwrap();
        device.fill(own, block, 2, 64 * MIB);
        assert_eq!(device.free(block), OK);
        device.synchronize();
        device.trim();
        assert_eq!((device.stats().reserved_bytes, races()), (0, String::new()));
    }
    // A block that several streams used.
    let block = device.alloc(40 * MIB, own).unwrap();
    device.fill(own, block, 3, 40 * MIB);
    let other = device.stream(0);
    assert_eq!(leasehold_sim_order(device.0, own, other), OK);
    device.fill(other, block, 4, 40 * MIB);
    assert_eq!((device.record(block, other), device.free(block)), (OK, OK));
    assert_eq!(leasehold_sim_stream_destroy(device.0, other), OK);
    device.synchronize();
    assert_eq!(device.stats().free_pending_bytes, 0, "{:?}", device.stats());
    device.end(own);
    device.close();
}

#[test]
fn an_allocation_outlives_streams_that_are_gone() {
    let _turn = turn();
    let device = Device::sim(64 << 20);
    let own = device.stream(0);
    // A stream for each round, and never a word.
    for _ in 0..20 {
        use_and_destroy(device, 48 * MIB);
    }
    assert!(device.stats().reserved_bytes <= 64 << 20);
    // A stream in capture is not waited for. The text names a stream, and the cure.
    let captured = device.stream(0);
    let inside = device.alloc(MIB, captured).unwrap();
    let gone = use_and_destroy(device, 48 * MIB);
    assert_eq!(leasehold_sim_capture(device.0, captured, 1), OK);
    assert_eq!(device.alloc(60 * MIB, own), Err(OUT_OF_MEMORY));
    let text = last_error();
    assert!(text.contains(&format!("{gone:#x} is gone")), "{text}");
    assert!(text.contains("leasehold_stream_end"), "{text}");
    assert_eq!(leasehold_sim_capture(device.0, captured, 0), OK, "{}", last_error());
    assert_eq!(device.free(inside), OK);
    let block = device.alloc(60 * MIB, own).unwrap();
    device.fill(own, block, 3, 60 * MIB);
    assert_eq!(device.free(block), OK);
    device.end(own);
    device.end(captured);
    assert_eq!(races(), "");
    device.close();
}

/// Memory is short while streams are captured, on this thread and on another: the allocation gets
/// what other streams are done with, or fails, and the captures go on.
#[test]
fn an_allocation_that_finds_no_memory_leaves_captures_valid() {
    let _turn = turn();
    for mode in [1, 2] {
        let device = Device::sim(64 << 20);
        let movable = Pool::new(device, "graphs", LEASEHOLD_POOL_MOVABLE).unwrap();
        let (own, other, captured) = (device.stream(0), device.stream(0), device.stream(0));
        let inside = movable.alloc(4 * MIB, captured).unwrap();
        // Another stream works on memory of another pool, which was freed.
        let pending = movable.alloc(32 * MIB, other).unwrap();
        device.fill(other, pending, 1, 32 * MIB);
        assert_eq!(device.free(pending), OK);
        assert_eq!(leasehold_sim_capture(device.0, captured, mode), OK, "{}", last_error());
        device.fill(captured, inside, 2, 4 * MIB);
        let short = || {
            let block = device.alloc(48 * MIB, own);
            assert!(block.is_ok(), "{}", last_error());
            assert_eq!(device.alloc(48 * MIB, own), Err(OUT_OF_MEMORY));
            assert_eq!(device.free(block.unwrap()), OK);
        };
        short();
        std::thread::scope(|scope| scope.spawn(short).join()).unwrap();
        device.fill(captured, inside, 3, 4 * MIB);
        assert_eq!(leasehold_sim_capture(device.0, captured, 0), OK, "{}", last_error());
        assert_eq!(device.free(inside), OK);
        [own, other, captured].into_iter().for_each(|stream| device.end(stream));
        assert_eq!((leasehold_pool_release(movable.0), races()), (OK, String::new()));
        device.close();
    }
}

#[test]
fn blocks_are_found_named_and_walked() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    let blocks: Vec<_> =
        [700, 50_000, 3 * MIB].map(|bytes| (device.alloc(bytes, stream).unwrap(), bytes)).into();
    let (mut base, mut len, mut pool) = (null_mut(), 0, 9);
    for &(block, bytes) in &blocks {
        for offset in [0, bytes / 2, bytes - 1] {
            let at = block.wrapping_byte_add(offset);
            // SAFETY: the pointers are to locals.
            let found =
                unsafe { leasehold_block_find(device.0, at, &mut base, &mut len, &mut pool) };
            assert_eq!((found, base, len, pool), (OK, block, bytes, 0));
        }
        let past = block.wrapping_byte_add(bytes);
        // SAFETY: the pointers are to locals.
        let found = unsafe { leasehold_block_find(device.0, past, &mut base, &mut len, &mut pool) };
        assert_eq!(found, INVALID_ARGUMENT);
    }
    unsafe extern "C" fn sum(context: *mut c_void, block: *const LeaseholdBlock) {
        // SAFETY: the context is the sums below, and the block lives during the call.
        let (sums, block) = unsafe { (&mut *context.cast::<[u64; 3]>(), &*block) };
        assert!(block.address >= block.segment_address);
        assert!(block.address + block.bytes <= block.segment_address + block.segment_bytes);
        sums[0] += block.bytes;
        if block.state == LEASEHOLD_BLOCK_LIVE {
            sums[1] += block.requested_bytes;
            sums[2] = block.stream as u64;
        }
    }
    let mut sums = [0u64; 3];
    // SAFETY: the visitor takes this context.
    let walked = unsafe { leasehold_visit_blocks(device.0, Some(sum), (&raw mut sums).cast()) };
    assert_eq!(walked, OK);
    let stats = device.stats();
    assert_eq!(sums, [stats.reserved_bytes, stats.allocated_bytes, stream as u64]);
    let snapshot = device.snapshot();
    assert_eq!(snapshot["device"], "cuda:0");
    assert_eq!(snapshot["pools"][0]["memory"]["stats"]["live"], 3);
    assert!(snapshot["streams"].as_object().unwrap().values().any(|s| *s == stream));
    blocks.into_iter().for_each(|(block, _)| assert_eq!(device.free(block), OK));
    device.end(stream);
    device.close();
}

#[test]
fn a_peer_reaches_the_memory_of_every_pool() {
    let _turn = turn();
    let (device, peer) = (Device::sim(0), Device::open(c"sim-cuda:1", 0, 0).unwrap());
    let (stream, far) = (device.stream(0), peer.stream(0));
    let pool =
        Pool::new(device, "of the owner", LEASEHOLD_POOL_SUSPENDABLE | LEASEHOLD_POOL_MOVABLE)
            .unwrap();
    let early = device.alloc(4 * MIB, stream).unwrap();
    let mut allowed = 9;
    // SAFETY: the pointer is to a local.
    let enabled = unsafe { leasehold_device_enable_peer(peer.0, device.0, &mut allowed) };
    assert_eq!((enabled, allowed), (OK, 1), "{}", last_error());
    let late = pool.alloc(4 * MIB, stream).unwrap();
    for block in [early, late] {
        peer.fill(far, block, 8, 4 * MIB);
        // SAFETY: the stream is the test's own.
        let recorded = unsafe { leasehold_record_peer_stream(device.0, block, peer.0, far) };
        assert_eq!(recorded, OK, "{}", last_error());
    }
    peer.synchronize();
    assert!(pool.suspend(LEASEHOLD_SUSPEND_KEEP).is_ok());
    assert_eq!(pool.resume(), OK, "{}", last_error());
    peer.fill(far, late, 9, MIB);
    assert_eq!(peer.read(far, late, 2 * MIB)[MIB - 1..][..2], [9, 8]);
    let mut largest = 0;
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_largest_free(device.0, &mut largest) }, OK);
    assert_eq!((device.free(early), device.free(late)), (OK, OK));
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_largest_free(device.0, &mut largest) }, OK);
    // Memory that the peer may still use comes back once its event is over.
    peer.synchronize();
    device.trim();
    assert_eq!(device.stats().reserved_bytes, 0);
    assert_eq!(leasehold_pool_release(pool.0), OK);
    device.end(stream);
    peer.end(far);
    device.close();
    peer.close();
    assert_eq!(races(), "");
}

#[test]
fn a_report_is_a_page_about_the_devices_memory() {
    let _turn = turn();
    let options = LeaseholdDeviceOptions {
        size: size_of::<LeaseholdDeviceOptions>(),
        budget: 64 * MIB as u64,
        policy: 0,
        trace_events: 1000,
        flags: 0,
    };
    let mut handle = 0;
    // SAFETY: the pointers are to locals.
    let opened = unsafe { leasehold_device_open(c"sim-cuda:0".as_ptr(), &options, &mut handle) };
    assert_eq!(opened, OK, "{}", last_error());
    let device = Device(handle);
    let stream = device.stream(0);
    let pool = Pool::new(device, "of <a> graph", 0).unwrap();
    let block = device.alloc(5 * MIB, stream).unwrap();
    // SAFETY: the name is a C string.
    let named = unsafe { leasehold_block_set_name(device.0, block, c"<b>weights".as_ptr()) };
    assert_eq!(named, OK);
    assert_eq!(device.free(device.alloc(7 * MIB, stream).unwrap()), OK);
    assert!(device.alloc(100 * MIB, stream).is_err());
    let mut text = null_mut();
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_report(device.0, &mut text) }, OK, "{}", last_error());
    let page = taken(text);
    assert!(page.starts_with("<!DOCTYPE html>") && page.ends_with("</html>\n"));
    let handle = format!(">{stream:#x}</td>");
    for words in [
        "<h1>Memory of cuda:0</h1>",
        "Pool: of &lt;a&gt; graph",
        "&lt;b&gt;weights</td><td class=\"n\">5 MiB",
        "12 MiB (12,582,912 bytes) were live",
        "failure</td><td class=\"n\">100 MiB",
        "budget</dt><dd>64 MiB",
        &handle,
    ] {
        assert!(page.contains(words), "{words}");
    }
    let reserved = device.snapshot()["pools"][0]["memory"]["stats"]["reserved"].to_string();
    let digits = |s: &str| s.chars().filter(char::is_ascii_digit).collect::<String>();
    let row = page.split("<code>reserved</code>").next().unwrap().rsplit("<tr>").next().unwrap();
    assert!(digits(row).ends_with(&reserved), "{row}: {reserved}");
    // Without events, and of no device.
    assert_eq!(device.free(block), OK);
    assert_eq!(leasehold_pool_release(pool.0), OK);
    device.end(stream);
    device.close();
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_report(device.0, &mut text) }, INVALID_ARGUMENT);
}
