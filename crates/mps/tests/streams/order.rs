//! The order of work on untracked memory, which races without one.

use crate::common::*;
use leasehold_hal::{Access, Op};

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
