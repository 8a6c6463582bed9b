//! The plug-in's functions as PyTorch calls them, from many threads with streams of their own and
//! blocks that several streams use. The race detector finds an omission.

use crate::*;
use leasehold_capi::plugin::*;
use leasehold_sim::Dice;

fn alloc(bytes: usize, stream: usize) -> *mut c_void {
    // SAFETY: the streams are the tests' own.
    unsafe { leasehold_plugin_alloc(bytes as isize, 0, stream as *mut c_void) }
}

fn free(block: *mut c_void, bytes: usize, stream: usize) {
    // SAFETY: the race detector finds work that uses the block too late.
    unsafe { leasehold_plugin_free(block, bytes as isize, 0, stream as *mut c_void) };
}

/// A thread's program. `records`: uses on the other stream are recorded.
fn play(device: Device, seed: u64, side: usize, records: bool) {
    let mut dice = Dice::new(seed);
    let stream = device.stream(0);
    let mut live: Vec<(*mut c_void, usize)> = Vec::new();
    for _ in 0..200 {
        match dice.below(6) {
            0..=2 => {
                let bytes = [900, 20_000, 600_000, 4 * MIB, 9 * MIB][dice.below(5) as usize];
                let block = alloc(bytes, stream);
                if !block.is_null() {
                    device.fill(stream, block, 1, bytes);
                    live.push((block, bytes));
                }
            }
            3 if !live.is_empty() => {
                let (block, bytes) = live[dice.below(live.len() as u64) as usize];
                assert_eq!(leasehold_sim_order(device.0, stream, side), OK);
                device.fill(side, block, 2, bytes);
                // Another thread's fill of the same block there comes in order; our own later work
                // must come after it.
                assert_eq!(leasehold_sim_order(device.0, side, stream), OK);
                device.fill(side, block, 3, 1);
                if records {
                    // SAFETY: the streams are the tests' own.
                    unsafe { leasehold_plugin_record_stream(block, side as *mut c_void) };
                }
            }
            _ if !live.is_empty() => {
                let (block, bytes) = live.swap_remove(dice.below(live.len() as u64) as usize);
                free(block, bytes, stream);
            }
            _ => {}
        }
    }
    live.into_iter().for_each(|(block, bytes)| free(block, bytes, stream));
    device.end(stream);
}

/// Threads that use one device; returns the races.
fn threads(seed: u64, records: bool) -> String {
    let device = Device::open(c"sim-cuda:0", 96 << 20, (seed % 3) as u32).unwrap();
    assert_eq!(leasehold_plugin_set_device(0, device.0), OK);
    let side = device.stream(0);
    std::thread::scope(|scope| {
        for thread in 0..6 {
            scope.spawn(move || play(device, seed * 100 + thread, side, records));
        }
    });
    device.end(side);
    device.synchronize();
    device.trim();
    let stats = device.stats();
    assert_eq!((stats.blocks, stats.allocated_bytes, stats.allocations - stats.frees), (0, 0, 0));
    assert!(!records || stats.reserved_bytes == 0, "{stats:?}");
    assert_eq!(leasehold_plugin_set_device(0, 0), OK);
    device.close();
    races()
}

#[test]
fn many_threads_share_a_device_without_a_race() {
    let _turn = turn();
    for seed in 1..=6 {
        assert_eq!(threads(seed, true), "", "seed {seed}");
    }
}

#[test]
fn a_record_stream_that_is_left_out_is_found() {
    let _turn = turn();
    assert!((1..=20).any(|seed| !threads(seed, false).is_empty()));
}

/// Records a use, and returns the text of this thread's last failure.
fn recorded(block: usize, stream: usize) -> String {
    // SAFETY: the streams are the tests' own.
    unsafe { leasehold_plugin_record_stream(block as *mut c_void, stream as *mut c_void) };
    last_error()
}

#[test]
fn wrong_calls_of_the_plug_in() {
    let _turn = turn();
    // SAFETY: wrong sizes and ordinals are refused.
    unsafe {
        assert!(leasehold_plugin_alloc(-1, 0, null_mut()).is_null());
        assert!(last_error().contains("-1 bytes"), "{}", last_error());
        assert!(leasehold_plugin_alloc(10, -1, null_mut()).is_null());
        assert!(leasehold_plugin_alloc(10, 4000, null_mut()).is_null());
        leasehold_plugin_free(8 as *mut c_void, 10, -1, null_mut());
    }
    assert_eq!(leasehold_plugin_set_device(0, 77), INVALID_ARGUMENT);
    assert_eq!(leasehold_plugin_set_device(-1, 0), INVALID_ARGUMENT);
    let wrong =
        LeaseholdDeviceOptions { size: 24, budget: 0, policy: 9, trace_events: 0, flags: 0 };
    let mut found = 1;
    // SAFETY: the pointers are null or to locals.
    unsafe {
        assert_eq!(leasehold_plugin_set_options(&wrong), INVALID_ARGUMENT);
        assert_eq!(leasehold_plugin_set_options(std::ptr::null()), OK);
        assert_eq!(leasehold_plugin_get_device(-1, 0, &mut found), INVALID_ARGUMENT);
        assert_eq!(leasehold_plugin_get_device(1, 0, null_mut()), INVALID_ARGUMENT);
        assert_eq!((leasehold_plugin_get_device(1, 0, &mut found), found), (OK, 0));
        // No machine has so many.
        assert_ne!(leasehold_plugin_get_device(1023, 1, &mut found), OK);
    }
    let device = Device::sim(64 << 20);
    assert_eq!(leasehold_plugin_set_device(1, device.0), OK);
    // SAFETY: the pointer is to a local.
    let known = unsafe { leasehold_plugin_get_device(1, 1, &mut found) };
    assert_eq!((known, found), (OK, device.0));
    let stream = device.stream(0) as *mut c_void;
    // SAFETY: the stream is the test's own.
    unsafe {
        assert!(leasehold_plugin_alloc(0, 1, stream).is_null());
        let block = leasehold_plugin_alloc(63 << 20, 1, stream);
        assert!(!block.is_null());
        assert!(leasehold_plugin_alloc(63 << 20, 1, stream).is_null(), "a failure is null");
        assert!(last_error().contains("out of memory"), "{}", last_error());
        // PyTorch does not say the block's device.
        let side = device.stream(0);
        for (inner, want) in [(0, ""), (256, "no device of PyTorch")] {
            let block = block as usize + inner;
            let error = std::thread::spawn(move || recorded(block, side)).join().unwrap();
            assert_eq!(
                (error.is_empty(), error.contains(want)),
                (want.is_empty(), true),
                "{error}"
            );
        }
        device.end(side);
        leasehold_plugin_free(block, 63 << 20, 1, stream);
        leasehold_plugin_free(null_mut(), 0, 1, stream);
    }
    assert_eq!(leasehold_plugin_set_device(1, 0), OK);
    device.end(stream as usize);
    device.close();
}
