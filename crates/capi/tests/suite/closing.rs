//! Devices and pools that are closed while other threads use them: one of the calls fails, and a
//! block that was given has memory.

use crate::*;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use std::sync::Barrier;

/// Runs `user` beside this thread, which calls `close` until it succeeds.
fn beside(user: impl FnOnce() + Send, close: impl Fn() -> c_int) {
    let barrier = Barrier::new(2);
    std::thread::scope(|scope| {
        scope.spawn(|| {
            barrier.wait();
            user();
        });
        barrier.wait();
        loop {
            match close() {
                OK => break,
                IN_USE => std::thread::yield_now(),
                status => panic!("{status}: {}", last_error()),
            }
        }
    });
}

#[test]
fn a_block_of_a_device_that_is_closed_meanwhile_has_memory() {
    let _turn = turn();
    let (mut given, mut refused) = (0, 0);
    for round in 0..400 {
        let device = Device::open(c"cpu:0", 0, 0).unwrap();
        let bytes = [4 << 20, 300, 70_000][round % 3];
        let user = || {
            loop {
                match device.alloc(bytes, 0) {
                    Ok(block) => {
                        given += 1;
                        // SAFETY: the block is host memory of this size.
                        unsafe { block.cast::<u8>().write_bytes(7, bytes) };
                        assert_eq!(
                            device.free(block),
                            OK,
                            "closed under a block: {}",
                            last_error()
                        );
                    }
                    Err(status) => {
                        assert_eq!(status, INVALID_ARGUMENT, "{}", last_error());
                        refused += 1;
                        break;
                    }
                }
            }
        };
        beside(user, || leasehold_device_close(device.0));
        assert_eq!(leasehold_device_close(device.0), INVALID_ARGUMENT);
    }
    assert!(given > 0 && refused == 400, "{given} {refused}");
}

#[test]
fn a_pool_of_a_device_that_is_closed_meanwhile_is_not_made() {
    let _turn = turn();
    let mut made = 0;
    for round in 0..200 {
        let device = Device::open(c"cpu:0", 0, 0).unwrap();
        let user = || {
            while let Ok(pool) = Pool::new(device, "late", round % 2 * LEASEHOLD_POOL_MOVABLE) {
                made += 1;
                let block = pool.alloc(1000, 0).unwrap_or_else(|e| panic!("{e}: {}", last_error()));
                assert_eq!(leasehold_pool_release(pool.0), OK);
                assert_eq!(device.free(block), OK, "closed under a pool: {}", last_error());
            }
        };
        beside(user, || leasehold_device_close(device.0));
    }
    assert!(made > 0);
}

static ASKED: AtomicU64 = AtomicU64::new(0);

unsafe extern "C" fn all(_: *mut c_void, _: usize) -> c_int {
    ASKED.fetch_add(1, Ordering::Relaxed);
    1
}

#[test]
fn a_pool_that_is_released_meanwhile_takes_no_allocations_and_is_not_suspended() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    for _ in 0..200 {
        let pool = Pool::new(device, "short", LEASEHOLD_POOL_SUSPENDABLE).unwrap();
        let block = pool.alloc(1000, stream).unwrap();
        let user = || {
            loop {
                // SAFETY: the filter takes any context.
                let begun = unsafe { leasehold_pool_begin(pool.0, Some(all), null_mut()) };
                let ended = leasehold_pool_end(pool.0);
                // The resumption may come after the release only if nothing is suspended.
                let suspended = pool.suspend(LEASEHOLD_SUSPEND_KEEP).is_ok();
                if suspended {
                    assert_eq!(pool.resume(), OK, "{}", last_error());
                }
                if [begun, ended] == [INVALID_ARGUMENT; 2] {
                    assert!(!suspended);
                    break;
                }
            }
        };
        let release = || match leasehold_pool_release(pool.0) {
            SUSPENDED => IN_USE,
            status => status,
        };
        beside(user, release);
        assert_eq!(leasehold_pool_release(pool.0), INVALID_ARGUMENT);
        // Nobody asks a filter whose pool is gone.
        let asked = ASKED.load(Ordering::Relaxed);
        let main = device.alloc(1000, stream).unwrap();
        assert_eq!((Pool::of(device, main), ASKED.load(Ordering::Relaxed)), (0, asked));
        device.fill(stream, block, 1, 1000);
        assert_eq!((device.free(main), device.free(block)), (OK, OK));
    }
    device.end(stream);
    device.close();
    drop(races());
}

#[test]
fn a_pool_that_is_released_in_its_sleep_gives_no_block_without_memory() {
    let _turn = turn();
    let device = Device::sim(0);
    let stream = device.stream(0);
    for _ in 0..300 {
        let pool = Pool::new(device, "asleep", LEASEHOLD_POOL_SUSPENDABLE).unwrap();
        let block = pool.alloc(5000, stream).unwrap();
        assert_eq!(device.free(block), OK);
        pool.suspend(0).unwrap();
        let user = || {
            loop {
                match pool.alloc(1000, stream) {
                    Ok(block) => {
                        device.fill(stream, block, 1, 1000);
                        assert_eq!(device.free(block), OK);
                    }
                    Err(SUSPENDED) => {}
                    Err(status) => break assert_eq!(status, INVALID_ARGUMENT),
                }
            }
        };
        beside(user, || leasehold_pool_release(pool.0));
    }
    device.end(stream);
    device.close();
}

#[test]
fn of_two_threads_that_close_a_device_one_does() {
    let _turn = turn();
    for _ in 0..300 {
        let device = Device::open(c"cpu:0", 0, 0).unwrap();
        let closed = AtomicU64::new(0);
        let barrier = Barrier::new(2);
        let close = || {
            barrier.wait();
            match leasehold_device_close(device.0) {
                OK => {
                    closed.fetch_add(1, Ordering::Relaxed);
                }
                status => assert_eq!(status, INVALID_ARGUMENT),
            }
        };
        std::thread::scope(|scope| {
            scope.spawn(close);
            scope.spawn(close);
        });
        assert_eq!(closed.into_inner(), 1);
    }
}
