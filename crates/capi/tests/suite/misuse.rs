//! Wrong calls: each has a status and a text, and changes nothing.

use crate::*;
use std::ptr::null;

#[test]
fn wrong_handles_and_pointers_are_refused() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    let block = device.alloc(1000, stream).unwrap();
    let pool = Pool::new(device, "a pool", 0).unwrap();
    for wrong in [0, 1, device.0 + 1, device.0 ^ 1 << 32, pool.0, u64::MAX] {
        assert_eq!(Device(wrong).alloc(10, stream), Err(INVALID_ARGUMENT));
        let text = if wrong == 0 { "no device was given" } else { "no device that is open" };
        assert!(last_error().contains(text), "{}", last_error());
        assert_eq!(last_error().contains("(kind: pool)"), wrong == pool.0);
        assert_eq!(Device(wrong).free(block), INVALID_ARGUMENT);
        assert_eq!(leasehold_device_close(wrong), INVALID_ARGUMENT);
    }
    for wrong in [0, device.0, pool.0 + 1] {
        assert_eq!(Pool(wrong).alloc(10, stream), Err(INVALID_ARGUMENT));
        assert_eq!(leasehold_pool_release(wrong), INVALID_ARGUMENT);
        assert_eq!(Pool(wrong).resume(), INVALID_ARGUMENT);
    }
    let mut local = 0u64;
    let foreign: [*mut c_void; 4] = [
        (&raw mut local).cast(),
        block.wrapping_byte_add(256),
        usize::MAX as *mut c_void,
        8 as *mut c_void,
    ];
    for wrong in foreign {
        assert_eq!(device.free(wrong), INVALID_ARGUMENT);
        assert!(last_error().contains("is no block of this device"), "{}", last_error());
        assert_eq!(device.record(wrong, stream), INVALID_ARGUMENT);
    }
    let other = Device::open(c"sim-cuda:1", 0, 0).unwrap();
    assert_eq!(other.free(block), INVALID_ARGUMENT, "a block of another device");
    assert_eq!(device.free(block), OK);
    assert_eq!(device.free(block), INVALID_ARGUMENT, "a block that was freed already");
    assert_eq!((device.free(NOTHING), device.record(NOTHING, stream)), (OK, OK));

    // Null where something is wanted.
    // SAFETY: null is refused.
    unsafe {
        assert_eq!(leasehold_malloc(device.0, 10, stream, null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_device_open(null(), null(), &mut local), INVALID_ARGUMENT);
        assert_eq!(leasehold_device_open(c"cpu:0".as_ptr(), null(), null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_stats_get(device.0, null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_snapshot(device.0, null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_report(device.0, null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_visit_blocks(device.0, None, null_mut()), INVALID_ARGUMENT);
        assert_eq!(leasehold_block_set_name(device.0, block, null()), INVALID_ARGUMENT);
        leasehold_text_free(null_mut());
    }
    // Structs without a size.
    let mut stats = LeaseholdStats::default();
    // SAFETY: the struct begins with its size, which is 0.
    assert_eq!(unsafe { leasehold_stats_get(device.0, &mut stats) }, INVALID_ARGUMENT);
    assert_eq!(Device::open(c"sim-cuda:0", 0, 3).err(), Some(INVALID_ARGUMENT));
    assert_eq!(Device::open(c"tpu:0", 0, 0).err(), Some(INVALID_ARGUMENT));
    assert_eq!(Device::open(c"sim-cuda:9", 0, 0).err(), Some(4));
    assert_eq!(Pool::new(device, "flags", 4).err(), Some(INVALID_ARGUMENT));
    assert_eq!(pool.suspend(0), Err(UNSUPPORTED), "it was not made to be suspended");
    assert_eq!(pool.suspend(4), Err(INVALID_ARGUMENT));

    // A pool or a block that the caller holds keeps its device open.
    assert_eq!(leasehold_device_close(device.0), IN_USE, "a pool");
    assert_eq!(leasehold_pool_release(pool.0), OK);
    let block = device.alloc(10, stream).unwrap();
    assert_eq!(leasehold_device_close(device.0), IN_USE, "a block");
    assert_eq!(device.free(block), OK);
    device.end(stream);
    device.close();
    other.close();
    assert_eq!(Device(device.0).alloc(10, 0), Err(INVALID_ARGUMENT), "a device that was closed");
}

#[test]
fn zero_huge_and_exhausted() {
    let _turn = turn();
    let device = Device::sim(64 << 20);
    let stream = device.stream(0);
    assert_eq!(device.alloc(0, stream), Ok(NOTHING));
    for huge in [usize::MAX, usize::MAX / 2, 1 << 50] {
        let refused = device.alloc(huge, stream).unwrap_err();
        assert!([OUT_OF_MEMORY, OVER_BUDGET].contains(&refused), "{refused}: {}", last_error());
    }
    let mut blocks = Vec::new();
    let status = loop {
        match device.alloc(8 * MIB, stream) {
            Ok(block) => blocks.push(block),
            Err(status) => break status,
        }
    };
    assert_eq!((status, blocks.len()), (OUT_OF_MEMORY, 8));
    let name = CString::new("weights").unwrap();
    for &block in &blocks {
        // SAFETY: the name is a C string.
        assert_eq!(unsafe { leasehold_block_set_name(device.0, block, name.as_ptr()) }, OK);
    }
    assert_eq!(device.alloc(8 * MIB, stream), Err(OUT_OF_MEMORY));
    let report = last_error();
    for part in ["8.0 MiB", "64.0 MiB", "budget", "weights"] {
        assert!(report.contains(part), "{part}: {report}");
    }
    let stats = device.stats();
    assert_eq!((stats.allocated_bytes, stats.blocks, stats.budget_bytes), (64 << 20, 8, 64 << 20));
    assert!(stats.failures >= 4 && stats.reserved_bytes <= stats.budget_bytes);
    // More budget, more memory; and down to the device's own limit.
    assert_eq!(leasehold_set_budget(device.0, 0), OK);
    blocks.push(device.alloc(8 * MIB, stream).unwrap());
    while let Ok(block) = device.alloc(128 * MIB, stream) {
        blocks.push(block);
    }
    assert!(last_error().contains("out of memory"), "{}", last_error());
    blocks.into_iter().for_each(|block| assert_eq!(device.free(block), OK));
    device.synchronize();
    assert!(device.trim() > 0);
    let stats = device.stats();
    assert_eq!((stats.allocated_bytes, stats.reserved_bytes, stats.blocks), (0, 0, 0));
    assert!(stats.allocated_bytes_peak >= 72 << 20);
    assert_eq!(stats.allocated_bytes_total, stats.freed_bytes_total);
    assert_eq!(leasehold_stats_reset_peaks(device.0), OK);
    assert_eq!(device.stats().allocated_bytes_peak + device.stats().reserved_bytes_peak, 0);
    device.end(stream);
    device.close();
}

#[test]
fn the_text_of_a_failure_is_written_to_a_buffer() {
    let _turn = turn();
    assert_eq!(Device(7).free(NOTHING), INVALID_ARGUMENT);
    let full = last_error();
    let text = |size: usize| {
        let mut buffer = vec![0x55u8; size + 1];
        // SAFETY: the buffer has room.
        let length = unsafe { leasehold_error_text(buffer.as_mut_ptr().cast(), size) };
        assert_eq!((length, buffer[size]), (full.len(), 0x55), "of {size} bytes");
        buffer
    };
    for size in [1, 2, full.len(), full.len() + 1, full.len() + 50] {
        let kept = full.len().min(size - 1);
        let written = text(size);
        assert_eq!((&written[..kept], written[kept]), (&full.as_bytes()[..kept], 0));
    }
    text(0);
    // SAFETY: null is written nothing to.
    assert_eq!(unsafe { leasehold_error_text(null_mut(), 100) }, full.len());
    // Between two letters, never within one.
    assert_eq!(Device::open(c"\u{e9}\u{4e16}\u{1f980}:0", 0, 0).err(), Some(INVALID_ARGUMENT));
    let full = last_error();
    assert!(full.contains('\u{1f980}'), "{full}");
    for size in 1..full.len() + 2 {
        let mut buffer = vec![0x55u8; size];
        // SAFETY: the buffer has room.
        let length = unsafe { leasehold_error_text(buffer.as_mut_ptr().cast(), size) };
        let written = CStr::from_bytes_until_nul(&buffer).unwrap().to_str().unwrap();
        assert!(full.starts_with(written) && size - written.len() <= 4, "{size}: {written}");
        assert_eq!(length, full.len());
    }
}

#[test]
fn a_trace_without_room_is_refused() {
    let _turn = turn();
    for device in [c"cpu:0", c"sim-cuda:0"] {
        for trace_events in [(1 << 24) + 1, u32::MAX] {
            let size = size_of::<LeaseholdDeviceOptions>();
            let options =
                LeaseholdDeviceOptions { size, budget: 0, policy: 0, trace_events, flags: 0 };
            let mut opened = 0;
            // SAFETY: the pointers are to locals.
            let status = unsafe { leasehold_device_open(device.as_ptr(), &options, &mut opened) };
            assert_eq!((status, opened), (INVALID_ARGUMENT, 0));
            assert!(last_error().contains("16777216"), "{}", last_error());
        }
    }
}

#[test]
fn without_a_driver_a_cuda_device_says_so() {
    let _turn = turn();
    // On a machine with a GPU the device opens.
    match Device::open(c"cuda:0", 0, 0) {
        Ok(device) => device.close(),
        Err(status) => assert!(status == UNAVAILABLE && last_error().contains("CUDA"), "{status}"),
    }
}

#[test]
fn the_memory_of_a_cpu_device_needs_no_stream() {
    let _turn = turn();
    let device = Device::open(c"cpu:0", 0, 0).unwrap();
    let block = device.alloc(5 * MIB, 77).unwrap();
    // SAFETY: the block is host memory of this size.
    unsafe { block.cast::<u8>().write_bytes(3, 5 * MIB) };
    assert_eq!((device.record(block, 78), device.free(block)), (OK, OK));
    let again = device.alloc(5 * MIB, 79).unwrap();
    assert_eq!(again, block, "free at once, for every stream");
    assert_eq!((device.free(again), leasehold_stream_end(device.0, 77)), (OK, OK));
    device.synchronize();
    device.close();
}
