//! Pools: allocations under capture, one budget for all, and memory that is suspended and resumed
//! at the same addresses.

use crate::*;

unsafe extern "C" fn is_stream(context: *mut c_void, stream: usize) -> c_int {
    c_int::from(context.addr() == stream)
}

#[test]
fn a_capture_allocates_from_its_pool() {
    let _turn = turn();
    let device = Device::sim(0);
    let (a, b) = (device.stream(0), device.stream(0));
    let pool = Pool::new(device, "graph", 0).unwrap();
    let before = device.alloc(MIB, a).unwrap();
    // SAFETY: the filter takes any context.
    let begun = unsafe { leasehold_pool_begin(pool.0, Some(is_stream), a as *mut c_void) };
    assert_eq!(begun, OK, "{}", last_error());
    // SAFETY: as above.
    let again = unsafe { leasehold_pool_begin(pool.0, None, null_mut()) };
    assert_eq!(again, INVALID_STATE);
    assert_eq!(leasehold_sim_capture(device.0, a, 1), OK, "{}", last_error());
    let (inside, beside) = (device.alloc(40 * MIB, a).unwrap(), device.alloc(MIB, b).unwrap());
    assert_eq!((Pool::of(device, inside), Pool::of(device, beside)), (pool.0, 0));
    device.fill(a, inside, 1, 40 * MIB);
    // A block that the captured graph frees goes to a later one of the graph.
    assert_eq!(device.free(inside), OK);
    let reused = device.alloc(40 * MIB, a).unwrap();
    assert_eq!(reused, inside);
    device.fill(a, reused, 2, 40 * MIB);
    // Growth, walks and trims of other threads break no capture.
    let other = device.alloc(100 * MIB, b).unwrap();
    device.fill(b, other, 3, 100 * MIB);
    assert_eq!(device.free(other), OK);
    device.trim();
    device.stats();
    assert_eq!(leasehold_stream_end(device.0, a), INVALID_STATE, "in a capture");
    assert_eq!(leasehold_sim_capture(device.0, a, 0), OK, "{}", last_error());
    assert_eq!(leasehold_pool_end(pool.0), OK);
    assert_eq!(leasehold_pool_end(pool.0), INVALID_STATE);
    let after = device.alloc(MIB, a).unwrap();
    assert_eq!(Pool::of(device, after), 0);
    // The pool's memory stays the graph's until it is released, and its blocks until they are
    // freed.
    assert_eq!(leasehold_pool_release(pool.0), OK);
    assert_eq!(pool.alloc(10, a), Err(INVALID_ARGUMENT));
    assert_eq!(Pool::of(device, reused), pool.0);
    for block in [before, beside, reused, after] {
        assert_eq!(device.free(block), OK);
    }
    device.synchronize();
    // The next slow path of any allocator notices that the pool's streams are done.
    let _ = device.alloc(200 * MIB, b).map(|block| device.free(block));
    device.synchronize();
    device.trim();
    assert_eq!((device.stats().reserved_bytes, races()), (0, String::new()));
    device.end(a);
    device.end(b);
    device.close();
}

#[test]
fn pools_share_the_budget_and_give_memory_to_each_other() {
    let _turn = turn();
    let device = Device::sim(100 << 20);
    let stream = device.stream(0);
    let pools =
        [(); 3].map(|()| Pool::new(device, "one of three", LEASEHOLD_POOL_MOVABLE).unwrap());
    for round in 0..6 {
        for pool in pools {
            // Each needs most of the budget, which lies free in another pool.
            let block = pool.alloc(90 * MIB, stream).unwrap();
            device.fill(stream, block, round, 90 * MIB);
            let stats = device.stats();
            assert!(stats.reserved_bytes <= 100 << 20 && stats.pools == 4, "{stats:?}");
            assert_eq!(device.alloc(20 * MIB, stream), Err(OUT_OF_MEMORY));
            assert_eq!(device.free(block), OK);
        }
    }
    let main = device.alloc(95 * MIB, stream).unwrap();
    assert_eq!(device.free(main), OK);
    assert!(device.stats().retries > 0);
    let mut freed = 0;
    device.synchronize();
    // SAFETY: the pointer is to a local.
    assert_eq!(unsafe { leasehold_pool_trim(pools[0].0, 0, &mut freed) }, OK);
    assert_eq!(races(), "");
    pools.into_iter().for_each(|pool| assert_eq!(leasehold_pool_release(pool.0), OK));
    device.end(stream);
    device.close();
}

#[test]
fn a_suspended_pool_comes_back_at_the_same_addresses() {
    let _turn = turn();
    let device = Device::sim(256 << 20);
    let (stream, other) = (device.stream(0), device.stream(0));
    for (keep, movable) in
        [(0, 0), (LEASEHOLD_SUSPEND_KEEP, 0), (LEASEHOLD_SUSPEND_KEEP, LEASEHOLD_POOL_MOVABLE)]
    {
        let flags = LEASEHOLD_POOL_SUSPENDABLE | movable;
        let pool =
            Pool::new(device, "weights", flags).unwrap_or_else(|e| panic!("{e}: {}", last_error()));
        let blocks: Vec<_> = (0..12usize)
            .map(|i| (pool.alloc(7 * MIB + i * 1000, stream).unwrap(), 7 * MIB + i * 1000))
            .collect();
        let small: Vec<_> = (0..50).map(|_| pool.alloc(600, stream).unwrap()).collect();
        for (i, &(block, bytes)) in blocks.iter().enumerate() {
            device.fill(stream, block, 10 + i as u8, bytes);
        }
        small.iter().for_each(|&block| device.fill(stream, block, 99, 600));
        // A stream that was never named here uses them too: a suspension waits for it.
        assert_eq!(leasehold_sim_order(device.0, stream, other), OK);
        device.fill(other, blocks[0].0, 10, blocks[0].1);
        let reserved = device.stats().reserved_bytes;
        let freed = pool.suspend(keep).unwrap_or_else(|e| panic!("{e}: {}", last_error()));
        assert!(freed >= 84 << 20, "{freed}");
        assert_eq!(device.stats().reserved_bytes, reserved - freed);
        assert_eq!(pool.suspend(keep), Err(INVALID_STATE));
        assert_eq!(pool.alloc(10, stream), Err(SUSPENDED));
        assert_eq!(device.snapshot()["pools"][1]["suspended"], true);
        // Others have the memory meanwhile, and it must be back before the pool is.
        let guest = device.alloc(240 * MIB, stream).unwrap();
        device.fill(stream, guest, 0xee, 240 * MIB);
        assert_eq!(pool.resume(), OVER_BUDGET);
        assert!(last_error().contains("over budget"), "{}", last_error());
        assert_eq!(device.free(guest), OK);
        // A block that is freed while the pool is suspended.
        assert_eq!(device.free(small[7]), OK);
        // The guest's memory lies free, and its stream may still be at work.
        assert_eq!(pool.resume(), OK, "{}", last_error());
        assert_eq!(pool.resume(), INVALID_STATE);
        for (i, &(block, bytes)) in blocks.iter().enumerate() {
            device.fill(stream, block, 10 + i as u8, 1);
            if keep != 0 {
                let all = device.read(stream, block, bytes);
                assert!(all.iter().all(|&byte| byte == 10 + i as u8), "block {i}");
            }
        }
        if keep != 0 {
            assert_eq!(device.read(stream, small[3], 600), [99; 600]);
        }
        let more = pool.alloc(20 * MIB, stream).unwrap();
        device.fill(stream, more, 1, 20 * MIB);
        assert_eq!(device.free(more), OK);
        // A suspended pool is not released before its blocks are freed; nothing is left behind.
        let freed_again = pool.suspend(0).unwrap();
        assert!(freed_again >= 84 << 20);
        assert_eq!(leasehold_pool_release(pool.0), SUSPENDED);
        assert!(last_error().contains("61 of its blocks are held"), "{}", last_error());
        for (block, _) in blocks {
            assert_eq!(device.free(block), OK);
        }
        assert_eq!(leasehold_pool_release(pool.0), SUSPENDED);
        for (i, block) in small.into_iter().enumerate() {
            assert_eq!(device.free(block), if i == 7 { INVALID_ARGUMENT } else { OK });
        }
        assert_eq!(leasehold_pool_release(pool.0), OK);
        assert_eq!(pool.resume(), INVALID_ARGUMENT);
        device.synchronize();
        let block = device.alloc(250 * MIB, stream).unwrap();
        assert_eq!(device.free(block), OK);
        device.synchronize();
        device.trim();
        // A copy of a whole range reads the parts of it that nobody wrote.
        let races = races();
        let unordered = |line: &&str| !line.starts_with("read of memory that nobody wrote");
        assert_eq!(races.lines().find(unordered), None);
        assert_eq!(device.stats().reserved_bytes, 0);
    }
    device.end(stream);
    assert_eq!(leasehold_sim_stream_destroy(device.0, other), OK);
    device.close();
}

/// A suspension copies parts while the driver takes earlier ones. Pinned memory is taken once.
#[test]
fn a_pool_of_several_parts_keeps_its_contents() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    let pool = Pool::new(device, "weights", LEASEHOLD_POOL_SUSPENDABLE).unwrap();
    let blocks = [(); 2].map(|()| pool.alloc(170 * MIB, stream).unwrap());
    let (mut registered, mut byte) = (0, 1);
    for turn in 0..2 {
        for block in blocks {
            byte += 1;
            device.fill(stream, block, byte, 170 * MIB);
        }
        assert!(pool.suspend(LEASEHOLD_SUSPEND_KEEP).unwrap() == 340 << 20);
        assert_eq!(device.stats().reserved_bytes, 0);
        let calls = calls(c"cuMemHostRegister");
        assert!(turn == 0 || calls == registered, "pinned again: {registered}, {calls}");
        registered = calls;
        assert_eq!(pool.resume(), OK, "{}", last_error());
        for (i, block) in blocks.into_iter().enumerate() {
            for place in [0, 80 * MIB, 170 * MIB - 1] {
                let found = device.read(stream, block.map_addr(|at| at + place), 1);
                assert_eq!(found, [byte - 1 + i as u8], "block {i}");
            }
        }
    }
    assert!(registered >= 2, "{registered}");
    blocks.into_iter().for_each(|block| assert_eq!(device.free(block), OK));
    assert_eq!(leasehold_pool_release(pool.0), OK);
    assert_eq!(races(), "");
    device.end(stream);
    device.close();
}

/// The ranges of a pool that have memory.
fn segments(device: Device, pool: Pool) -> Vec<(u64, u64)> {
    let snapshot = device.snapshot();
    let pools = snapshot["pools"].as_array().unwrap();
    let own = pools.iter().find(|p| p["pool"] == pool.0).unwrap();
    let segments = own["memory"]["segments"].as_array().unwrap();
    segments.iter().map(|s| (s["addr"].as_u64().unwrap(), s["bytes"].as_u64().unwrap())).collect()
}

#[test]
fn memory_that_a_captured_graph_may_use_stays_mapped() {
    let _turn = turn();
    for (flags, stays) in
        [(0, true), (LEASEHOLD_POOL_SUSPENDABLE, true), (LEASEHOLD_POOL_MOVABLE, false)]
    {
        let device = Device::sim(160 << 20);
        let stream = device.stream(0);
        let pool = Pool::new(device, "graph", flags).unwrap();
        let (mut used, mut held) = (Vec::new(), Vec::new());
        // Blocks of many sizes come and go, so that moves of granules would pay; the budget and the
        // main memory press.
        let mut random = 88172645463325252u64;
        for _ in 0..300 {
            random ^= random << 13;
            random ^= random >> 7;
            random ^= random << 17;
            let bytes = MIB + (random % 23) as usize * MIB / 2;
            if random >> 32 & 1 == 0 && !held.is_empty() {
                let (block, _) = held.swap_remove((random >> 40) as usize % held.len());
                assert_eq!(device.free(block), OK);
            } else if let Ok(block) = pool.alloc(bytes, stream) {
                device.fill(stream, block, 1, bytes);
                used.push((block as u64, bytes as u64));
                held.push((block, bytes));
            }
            if random.is_multiple_of(11) {
                let block = device.alloc(20 * MIB, stream).unwrap_or(NOTHING);
                assert_eq!(device.free(block), OK);
                device.synchronize();
                device.trim();
            }
        }
        assert!(used.len() > 100);
        held.drain(..).for_each(|(block, _)| assert_eq!(device.free(block), OK));
        device.synchronize();
        device.trim();
        let mapped = segments(device, pool);
        let within = |&(at, bytes): &(u64, u64)| {
            mapped.iter().any(|&(from, len)| at >= from && at + bytes <= from + len)
        };
        assert_eq!(used.iter().all(within), stays, "{flags}");
        if stays {
            // A launch of the graph writes to freed blocks.
            for &(at, bytes) in &used {
                device.fill(stream, at as *mut c_void, 2, bytes as usize);
            }
        }
        device.synchronize();
        let mut freed = 0;
        // SAFETY: the pointer is to a local.
        assert_eq!(unsafe { leasehold_pool_trim(pool.0, 0, &mut freed) }, OK);
        assert_eq!((segments(device, pool), freed > 0), (Vec::new(), stays));
        assert_eq!(leasehold_pool_release(pool.0), OK);
        device.end(stream);
        device.close();
        drop(races());
    }
}
