//! Bounded objects of the driver: command buffers, encoders, fences, events.

use super::common::*;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Index, Result};
use leasehold_hal::{Access, BackendKind, DeviceId, Op};
use leasehold_mps::MpsConfig;
use leasehold_sim::Stepping;
use std::time::Duration;

#[test]
fn a_hundred_thousand_dispatches_take_a_bounded_number_of_objects() -> Result<()> {
    const BUFFERS: u32 = 16;
    let config = inline().queues(2).command_buffers(BUFFERS);
    let bench = Bench::with(driver_config(1), config);
    let device = bench.open(0);
    let streams = [stream(&device), stream(&device)];
    let buffers = [buffer(&device, &streams[0], 4), buffer(&device, &streams[1], 4)];
    let bump = kernel(&device, "bump");
    let mut most = bench.driver.census();
    for turn in 0..50_000_u32 {
        for (stream, x) in streams.iter().zip(&buffers) {
            submit(stream, &[one(&bump, &[bind(x, Access::ReadWrite)])])?;
        }
        if turn % 100 == 0 {
            // A mark of one stream, for which the other one waits.
            let point = streams[0].timeline().at(streams[0].timeline().submitted());
            submit(&streams[1], &[Op::Wait(point)])?;
            let now = bench.driver.census();
            most.command_buffers = most.command_buffers.max(now.command_buffers);
            most.encoders = most.encoders.max(now.encoders);
            most.fences = most.fences.max(now.fences);
            most.events = most.events.max(now.events);
        }
    }
    for (stream, x) in streams.iter().zip(&buffers) {
        assert_eq!(read(stream, x), 50_000_u32.to_le_bytes());
    }
    assert!(most.command_buffers <= 2 * BUFFERS as usize, "{most:?}");
    assert!(most.encoders <= 2 && most.fences == 2 && most.events == 2, "{most:?}");
    drop((buffers, streams, bump, device));
    bench.close();
    Ok(())
}

#[test]
fn of_three_command_buffers_in_flight_the_two_that_are_done_are_released() -> Result<()> {
    for seed in 0..8 {
        let mut driver = driver_config(seed);
        driver.machine = driver.machine.stepping(Stepping::Manual);
        let bench = Bench::with(driver, inline().batch(1, u64::MAX));
        let device = bench.open(0);
        let a = stream(&device);
        let (x, y) = (buffer(&device, &a, 64), buffer(&device, &a, 64));
        let hold = kernel(&device, "hold");
        let hosts = [Host::new(vec![1; 64]), Host::new(vec![2; 64]), Host::new(vec![3; 64])];
        submit(&a, &[hosts[0].up(&x)])?;
        let second = submit(&a, &[hosts[1].up(&x)])?;
        let held = [bind(&y, Access::ReadWrite)];
        let third = submit(&a, &[one(&hold, &held), hosts[2].up(&x)])?;
        assert_eq!(bench.driver.census().command_buffers, 3);
        let kept = || hosts.each_ref().map(|host| Arc::strong_count(&host.keep) > 1);
        assert_eq!(kept(), [true; 3]);
        bench.driver.machine().run_until_idle();
        a.refresh()?;
        assert_eq!(a.timeline().completed(), second, "seed {seed}");
        assert_eq!(kept(), [false, false, true], "seed {seed}");
        assert_eq!(bench.driver.census().command_buffers, 1, "seed {seed}");
        bench.let_go();
        bench.driver.machine().run_until_idle();
        a.wait_host(third, None)?;
        assert_eq!((kept(), bench.driver.census().command_buffers), ([false; 3], 0));
        drop((x, y, hold, a, device));
        bench.close();
    }
    Ok(())
}

/// A thread that waits for room holds no lock, so that other streams go on.
#[test]
fn streams_that_share_the_only_command_buffer_take_turns() -> Result<()> {
    for (seed, most) in [(1, 1), (2, 1), (3, 2)] {
        let bench = Bench::with(driver_config(seed), inline().command_buffers(most));
        let device = bench.open(0);
        let streams = [stream(&device), stream(&device), stream(&device)];
        let buffers = streams.each_ref().map(|s| buffer(&device, s, 4));
        let bump = kernel(&device, "bump");
        for turn in 0..20 {
            for (stream, x) in streams.iter().zip(&buffers) {
                submit(stream, &[one(&bump, &[bind(x, Access::ReadWrite)])])?;
            }
            if turn == 10 {
                let point = streams[0].timeline().at(streams[0].timeline().submitted());
                submit(&streams[1], &[Op::Wait(point)])?;
            }
        }
        for (stream, x) in streams.iter().zip(&buffers) {
            assert_eq!(read(stream, x), 20_u32.to_le_bytes());
        }
        drop((buffers, streams, bump, device));
        bench.close();
    }
    Ok(())
}

#[test]
fn work_that_the_host_resumes_waits_for_room_without_blocking() -> Result<()> {
    let bench = Bench::with(driver_config(5), inline().command_buffers(1));
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let (x, y) = (buffer(&device, &a, 64), buffer(&device, &b, 64));
    let hold = kernel(&device, "hold");
    let gate = device.host_timeline()?;
    let next = gate.timeline().at(gate.timeline().submitted() + 1);
    let last = submit(&b, &[Op::Wait(next), fill(&y, 4)])?;
    // The only command buffer is in flight.
    let first = submit(&a, &[one(&hold, &[bind(&x, Access::ReadWrite)])])?;
    gate.signal_host(next.value())?;
    assert_eq!(bench.driver.census().command_buffers, 1);
    assert!(b.wait_host(last, Some(std::time::Duration::from_millis(20))).is_err());
    bench.let_go();
    b.wait_host(last, None)?;
    a.wait_host(first, None)?;
    assert_eq!(read(&b, &y), vec![4; 64]);
    drop((x, y, hold, gate, a, b, device));
    bench.close();
    Ok(())
}

#[test]
fn a_stream_commits_by_dispatches_by_bytes_and_for_observers() -> Result<()> {
    let bench = Bench::with(driver_config(1), inline().batch(10, 1 << 20));
    let device = bench.open(0);
    let a = stream(&device);
    let (x, large) = (buffer(&device, &a, 64), buffer(&device, &a, 1 << 19));
    let commits = || bench.calls("commit");
    let before = commits();
    for _ in 0..25 {
        submit(&a, &[fill(&x, 1)])?;
    }
    assert_eq!(commits() - before, 2, "by dispatches");
    a.flush()?;
    assert_eq!(commits() - before, 3, "by a flush");
    a.flush()?;
    assert_eq!(commits() - before, 3, "without work there is nothing to commit");
    for _ in 0..4 {
        submit(&a, &[fill(&large, 1)])?;
    }
    assert_eq!(commits() - before, 5, "by bytes");
    let value = submit(&a, &[fill(&x, 1)])?;
    assert_eq!(commits() - before, 5);
    a.wait_host(value, None)?;
    assert_eq!(commits() - before, 6, "by a wait");
    drop((x, large, a, device));
    bench.close();
    Ok(())
}

#[test]
fn a_stream_takes_its_turn_on_the_queue_to_encode_and_to_commit() -> Result<()> {
    for config in [inline(), MpsConfig::default(), MpsConfig::default().batch(1, u64::MAX)] {
        let bench = Bench::with(driver_config(9), config);
        let device = bench.open(0);
        let state = bench.backend.manager().devices().open(DeviceId::new(BackendKind::Mps, 0))?;
        let queue = state.command_queues().acquire(Index::new(0))?;
        let (a, b) = (stream(&device), stream(&device));
        let (x, y) = (buffer(&device, &a, 64), buffer(&device, &a, 64));
        // Encoded and perhaps not committed.
        let first = submit(&a, &[fill(&x, 1)])?;
        let claim = queue.claim()?;
        // A holder that keeps the claim refuses the submission as a whole.
        let before = b.timeline().submitted();
        let refused = submit(&b, &[fill(&y, 2)]).unwrap_err();
        assert!(matches!(refused, Error::Occupied { .. }), "{refused}");
        assert_eq!(b.timeline().submitted(), before);
        // A waiting thread gets an error too, or the work was committed before.
        match a.wait_host(first, Some(Duration::from_secs(5))) {
            Ok(()) | Err(Error::Occupied { .. }) => {}
            Err(other) => panic!("{other}"),
        }
        // A claim that comes back in time is waited for.
        std::thread::scope(|scope| {
            let waits = scope.spawn(|| submit(&b, &[fill(&y, 3)]));
            std::thread::sleep(Duration::from_millis(50));
            assert!(!waits.is_finished(), "encoded without the queue's turn");
            drop(claim);
            waits.join().unwrap()
        })?;
        // Nothing is lost.
        assert_eq!((read(&a, &x), read(&b, &y)), (vec![1; 64], vec![3; 64]));
        drop(queue.claim()?);
        drop((queue, state, x, y, a, b, device));
        bench.close();
    }
    Ok(())
}

#[test]
fn streams_of_one_queue_take_turns_on_many_threads() -> Result<()> {
    let bench = Bench::with(driver_config(10), MpsConfig::default().command_buffers(4));
    let device = bench.open(0);
    std::thread::scope(|scope| {
        for n in 1..=4_u8 {
            let device = &device;
            scope.spawn(move || {
                let stream = stream(device);
                let x = buffer(device, &stream, 64);
                for i in 0..200 {
                    submit(&stream, &[fill(&x, n.into()), fill(&x, n.wrapping_add(i).into())])
                        .unwrap();
                    if i % 16 == 0 {
                        assert_eq!(read(&stream, &x), [n.wrapping_add(i); 64]);
                    }
                }
            });
        }
    });
    drop(device);
    bench.close();
    Ok(())
}
