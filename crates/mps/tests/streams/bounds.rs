//! Bounded objects of the driver: command buffers, encoders, fences, events.

use crate::common::*;
use leasehold_core::Result;
use leasehold_core::sync::Arc;
use leasehold_hal::{Access, Op};
use leasehold_sim::Stepping;

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
