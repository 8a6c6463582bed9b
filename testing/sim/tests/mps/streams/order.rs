//! The order of work on untracked memory, which races without one.

use super::common::*;
use leasehold_core::Result;
use leasehold_hal::{Access, BackendKind, DeviceId, Op};
use leasehold_mps::manager::event::EventKind;

#[test]
fn work_of_a_stream_runs_in_order_and_reads_what_it_wrote() {
    for seed in 0..12 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let a = stream(&device);
        let (x, y) = (buffer(&device, &a, 4096), buffer(&device, &a, 4096));
        let bump = kernel(&device, "bump");
        let bindings = [bind(&x, Access::ReadWrite)];
        let host = Host::new(vec![7; 4096]);
        submit(&a, &[host.up(&x), copy(&x, &y), fill(&x, 0)]).unwrap();
        for _ in 0..100 {
            submit(&a, &[one(&bump, &bindings)]).unwrap();
        }
        assert_eq!(read(&a, &y), vec![7; 4096], "seed {seed}");
        assert_eq!(read(&a, &x), 100_u32.to_le_bytes().repeat(1024), "seed {seed}");
        drop((x, y, bump, a, device));
        bench.close();
    }
}

#[test]
fn a_stream_waits_for_another_one_by_an_event_of_its_queue_or_of_another() {
    for queues in [1, 2] {
        for seed in 0..12 {
            let bench = Bench::with(driver_config(seed), inline().queues(queues));
            let device = bench.open(0);
            let (a, b) = (stream(&device), stream(&device));
            let (x, y) = (buffer(&device, &a, 4096), buffer(&device, &a, 4096));
            for byte in 1..4 {
                let value = submit(&a, &[fill(&x, byte)]).unwrap();
                let copied = submit(&b, &[Op::Wait(a.timeline().at(value)), copy(&x, &y)]).unwrap();
                submit(&a, &[Op::Wait(b.timeline().at(copied))]).unwrap();
                assert_eq!(read(&b, &y), vec![byte as u8; 4096], "seed {seed}");
            }
            drop((x, y, a, b, device));
            bench.close();
        }
    }
}

/// A token of a stream (a mark of its work) is one of its queue. On the same queue the fence's
/// stream or an event orders, on another queue only an event can.
#[test]
fn a_read_of_the_same_stream_replaces_the_last_one_and_another_queue_s_read_adds() -> Result<()> {
    let bench = Bench::with(driver_config(3), inline().queues(2));
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    assert_ne!(a.native(), b.native(), "two queues");
    let (x, y, z) = (buffer(&device, &a, 64), buffer(&device, &a, 64), buffer(&device, &b, 64));
    let written = submit(&a, &[fill(&x, 1)])?;
    let reads = || {
        let mut count = 0;
        x.for_each_read(|_| count += 1);
        count
    };
    let read_by = |stream, to| -> Result<()> {
        let wait = Op::Wait(a.timeline().at(written));
        let value = submit(stream, &[wait, copy(&x, to)])?;
        // SAFETY: the timepoint is of the submission that reads the buffer.
        unsafe { x.mark_read(stream.timeline().at(value)) };
        Ok(())
    };
    read_by(&a, &y)?;
    read_by(&a, &y)?;
    assert_eq!(reads(), 1, "the later read of a stream covers the earlier one");
    read_by(&b, &z)?;
    assert_eq!(reads(), 2, "another queue's read is another token");
    let waits: Vec<Op<'_>> =
        [a.timeline().at(a.timeline().submitted()), b.timeline().at(b.timeline().submitted())]
            .into_iter()
            .map(Op::Wait)
            .collect();
    submit(&a, &waits)?;
    submit(&a, &[fill(&x, 2)])?;
    assert_eq!((read(&a, &y), read(&b, &z)), (vec![1; 64], vec![1; 64]));
    assert_eq!(read(&a, &x), vec![2; 64]);
    drop((x, y, z, a, b, device));
    bench.close();
    Ok(())
}

#[test]
fn a_stream_of_one_device_waits_for_a_stream_of_another() -> Result<()> {
    for seed in 0..8 {
        let bench = Bench::new(seed);
        let devices = [bench.open(0), bench.open(1)];
        let (a, b) = (stream(&devices[0]), stream(&devices[1]));
        let (x, y) = (buffer(&devices[0], &a, 4096), buffer(&devices[1], &b, 4096));
        let value = submit(&a, &[fill(&x, 9)])?;
        let copied = submit(&b, &[Op::Wait(a.timeline().at(value)), copy(&x, &y)])?;
        submit(&a, &[Op::Wait(b.timeline().at(copied)), fill(&x, 0)])?;
        assert_eq!(read(&b, &y), vec![9; 4096], "seed {seed}");
        a.wait_host(a.timeline().submitted(), None)?;
        drop((x, y, a, b, devices));
        bench.close();
    }
    Ok(())
}

/// A reissued event continues from a value that nobody may have signalled.
#[test]
fn a_mark_without_work_before_it_is_over() -> Result<()> {
    let bench = Bench::new(1);
    let manager = bench.backend.manager().devices();
    let state = manager.open(DeviceId::new(BackendKind::Mps, 0))?;
    let event = state.events().acquire(EventKind::Shared)?;
    assert_eq!(event.next_value(), 1);
    drop(event);
    let device = bench.open(0);
    let (a, b) = (stream(&device), stream(&device));
    let x = buffer(&device, &b, 64);
    let nothing = submit(&a, &[])?;
    let value = submit(&b, &[Op::Wait(a.timeline().at(nothing)), fill(&x, 1)])?;
    wait(&b, value)?;
    drop((x, a, b, device, state));
    bench.close();
    Ok(())
}
