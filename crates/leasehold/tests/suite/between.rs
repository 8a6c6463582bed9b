//! Copies between devices: of one backend and of two, eager and recorded, under the race detector
//! where a device is simulated.

use crate::common::*;
use leasehold::cpu::CpuBackend;
use leasehold::{Buffer, Context, Error, GraphUpdate, Lease, Runtime, Stream, View, ops};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{MachineConfig, Monitor, SimBackend};
use std::sync::Arc;
use std::time::Duration;

/// A context with `cpu:0`, two simulated devices and two of the CUDA backend over a simulated
/// driver.
pub struct World {
    context: Context,
    machines: [Monitor; 2],
}

impl World {
    pub fn new(seed: u64) -> Self {
        Self::with_peers(seed, true)
    }

    /// With or without peer access between the CUDA devices.
    fn with_peers(seed: u64, peers: bool) -> Self {
        let config = || MachineConfig::seed(seed).devices(2, 256 << 20).poison(0xcd);
        let sim = SimBackend::new(config()).unwrap();
        let mut driver = SimDriverConfig::new(config());
        driver.peers = peers;
        let driver = Arc::new(SimDriver::new(driver).unwrap());
        let machines = [sim.machine().clone(), driver.machine().clone()];
        let cuda = CudaBackend::with_ops(driver, CudaConfig::default()).unwrap();
        let context = Context::with_backends(vec![
            Arc::new(CpuBackend::new()),
            Arc::new(sim),
            Arc::new(cuda),
        ]);
        Self { context, machines }
    }

    pub fn runtime(&self, name: &str) -> Runtime {
        self.context.runtime(name.parse().unwrap()).unwrap()
    }

    /// Both runtimes of each pair, in both directions.
    fn pairs(&self) -> Vec<[Runtime; 2]> {
        let pairs = [
            ["cpu:0", "sim:0"],
            ["sim:0", "sim:1"],
            ["cuda:0", "cuda:1"],
            ["cpu:0", "cuda:0"],
            ["sim:1", "cuda:1"],
        ];
        pairs
            .into_iter()
            .flat_map(|[a, b]| [[a, b], [b, a]])
            .map(|p| p.map(|name| self.runtime(name)))
            .collect()
    }

    /// Nothing ran in an order that was not asked for.
    #[track_caller]
    pub fn check(&self) {
        for machine in &self.machines {
            let reports = machine.take_reports();
            assert!(reports.is_empty(), "{reports:?}");
        }
    }
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    (0..bytes).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 13) as u8 ^ seed).collect()
}

fn bytes(runtime: &Runtime, buffer: &Lease<Buffer>) -> Vec<u8> {
    runtime.to_vec::<u8>(buffer).unwrap()
}

#[test]
fn bytes_arrive_between_every_two_devices_on_the_stream_of_either() {
    let world = World::new(1);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            for (i, len) in [0, 1, 4095, 70_000, (2 << 20) + 77].into_iter().enumerate() {
                let what = format!(
                    "{len} bytes from {} to {} by {}",
                    a.device(),
                    b.device(),
                    owner.device()
                );
                let source = pattern(len + 64, i as u8);
                let (x, y) =
                    (a.upload(&source).unwrap(), b.upload(&vec![0xEEu8; len + 64]).unwrap());
                let (from, to) = (x.part(3..3 + len).unwrap(), y.part(17..17 + len).unwrap());
                owner.stream().copy(to, from).unwrap();
                let got = bytes(&b, &y);
                assert!(got[17..17 + len] == source[3..3 + len], "{what}");
                assert!(
                    got[..17].iter().chain(&got[17 + len..]).all(|&b| b == 0xEE),
                    "beside {what}"
                );
                assert!(bytes(&a, &x) == source, "{what}: the source");
            }
        }
    }
    world.check();
}

#[test]
fn without_peer_access_the_driver_still_has_a_way() {
    let world = World::with_peers(2, false);
    let (a, b) = (world.runtime("cuda:0"), world.runtime("cuda:1"));
    let source = pattern(100_000, 5);
    let (x, y) = (a.upload(&source).unwrap(), b.alloc(100_000).unwrap());
    a.stream().copy(y.view(), x.view()).and_then(|()| a.stream().synchronize()).unwrap();
    assert!(bytes(&b, &y) == source);
    let graph = a.record_graph(|a| a.stream().copy(x.view(), y.view())).unwrap();
    a.stream().fill(x.view(), 0u8).unwrap();
    graph.launch().unwrap();
    assert!(bytes(&a, &x) == source);
    world.check();
}

#[test]
fn rows_are_copied_between_devices_at_their_pitches() {
    let world = World::new(3);
    let source = pattern(5000, 9);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            for (width, rows, from, to) in
                [(7u64, 300u64, 16u64, 9u64), (16, 300, 16, 16), (10, 1, 0, 0), (1, 400, 3, 2)]
            {
                let (x, y) = (a.upload(&source).unwrap(), b.upload(&[0xEEu8; 5000]).unwrap());
                owner
                    .stream()
                    .copy_2d(
                        y.view(),
                        x.part(5..5000).unwrap(),
                        ops::Rows::new(width, rows).src_pitch(from).dst_pitch(to),
                    )
                    .unwrap();
                let mut expect = vec![0xEEu8; 5000];
                for r in 0..rows {
                    for i in 0..width {
                        expect[(r * to + i) as usize] = source[(5 + r * from + i) as usize];
                    }
                }
                assert!(
                    bytes(&b, &y) == expect,
                    "{width} by {rows} from {} to {}",
                    a.device(),
                    b.device()
                );
            }
        }
    }
    world.check();
}

#[test]
fn host_memory_of_either_device_takes_part() {
    let world = World::new(4);
    let source = pattern(200_000, 1);
    for [a, b] in world.pairs() {
        let (x, y) = (a.upload(&source).unwrap(), b.alloc(200_000).unwrap());
        let (near, far) = (a.alloc_pinned(200_000).unwrap(), b.alloc_pinned(200_000).unwrap());
        let what = format!("{} and {}", a.device(), b.device());
        a.stream().copy(near.view(), x.view()).unwrap();
        b.stream().copy(y.view(), near.view()).unwrap();
        assert!(bytes(&b, &y) == source, "{what}: from the other's host memory");
        b.stream().fill(y.view(), 0u8).unwrap();
        a.stream().copy(far.view(), x.view()).unwrap();
        b.stream().copy_pinned(y.view(), far.view()).unwrap();
        assert!(bytes(&b, &y) == source, "{what}: to the other's host memory");
        // Between two of one device.
        let twin = a.alloc_pinned(200_000).unwrap();
        a.stream().copy_pinned(twin.view(), near.view()).unwrap();
        a.stream().fill(x.view(), 0u8).unwrap();
        a.stream().copy_pinned(x.view(), twin.view()).unwrap();
        assert!(bytes(&a, &x) == source, "{what}: between host memories");
    }
    world.check();
}

#[test]
fn a_copy_has_its_place_in_the_order_of_its_stream_and_of_both_buffers() {
    let world = World::new(5);
    const LEN: usize = 1_300_000;
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let (x, y) = (a.alloc(LEN as u64).unwrap(), b.alloc(LEN as u64).unwrap());
            let fill = |r: &Runtime, buffer: &Lease<Buffer>, value| {
                r.stream().fill(buffer.view(), ops::Pattern::U8(value)).unwrap();
            };
            // Each device's own stream, and no wait of the program's.
            fill(&a, &x, 1);
            fill(&b, &y, 2);
            owner.stream().copy(y.view(), x.view()).unwrap();
            fill(&a, &x, 3);
            let z = b.alloc(LEN as u64).unwrap();
            b.stream().copy(z.view(), y.view()).unwrap();
            fill(&b, &y, 4);
            owner.stream().copy(x.view(), y.view()).unwrap();
            owner.stream().synchronize().unwrap();
            let last = |r: &Runtime, buffer: &Lease<Buffer>| {
                let got = bytes(r, buffer);
                (got[0], got[LEN / 2], got[LEN - 1])
            };
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            assert_eq!(
                (last(&a, &x), last(&b, &y), last(&b, &z)),
                ((4, 4, 4), (4, 4, 4), (1, 1, 1)),
                "{what}"
            );
        }
    }
    world.check();
}

#[test]
fn a_source_that_is_held_back_holds_the_copy_and_not_the_caller() {
    let world = World::new(6);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) =
                (a.upload(&[1u8; 2_500_000]).unwrap(), b.upload(&[2u8; 2_500_000]).unwrap());
            let (writer, copier) = (a.create_stream().unwrap(), owner.create_stream().unwrap());
            let held = hold(&writer);
            writer.fill(x.view(), 7u8).unwrap();
            copier.copy(y.view(), x.view()).unwrap();
            let end = copier.now();
            std::thread::sleep(Duration::from_millis(2));
            assert!(
                !copier.query().unwrap() && !end.is_settled(),
                "{what}: it is over before its source is written"
            );
            open(held);
            copier.synchronize_timeout(LONG).unwrap();
            assert!(bytes(&b, &y).iter().all(|&v| v == 7), "{what}");
        }
    }
    world.check();
}

#[test]
fn a_stream_that_is_held_back_holds_the_other_device_too() {
    let world = World::new(7);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) = (a.upload(&[1u8; 70_000]).unwrap(), b.upload(&[2u8; 70_000]).unwrap());
            [&a, &b].iter().for_each(|r| r.synchronize().unwrap());
            let stream = owner.create_stream().unwrap();
            let held = hold(&stream);
            stream.copy(y.view(), x.view()).unwrap();
            // Comes after the copy, since that reads what it writes.
            let later = a.create_stream().unwrap();
            later.fill(x.view(), 9u8).unwrap();
            std::thread::sleep(Duration::from_millis(2));
            assert!(!later.query().unwrap(), "{what}: a write overtook the copy that reads");
            open(held);
            later.synchronize_timeout(LONG).unwrap();
            stream.synchronize_timeout(LONG).unwrap();
            assert_eq!((bytes(&a, &x)[0], bytes(&b, &y)[0]), (9, 1), "{what}");
        }
    }
    world.check();
}

#[test]
fn memory_that_is_dropped_in_flight_is_lent_to_nobody_before_the_copy_is_over() {
    let world = World::new(8);
    const LEN: u64 = 3 << 20;
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) = (
                a.upload(&vec![1u8; LEN as usize]).unwrap(),
                b.upload(&vec![2u8; LEN as usize]).unwrap(),
            );
            [&a, &b].iter().for_each(|r| r.synchronize().unwrap());
            let stream = owner.create_stream().unwrap();
            let held = hold(&stream);
            stream.copy(y.view(), x.view()).unwrap();
            drop((x, y, stream));
            // Of the same size, first used on streams that know nothing of the copy.
            let fresh = |r: &Runtime, value| -> Vec<(Stream, Lease<Buffer>)> {
                let one = |_| {
                    let s = r.create_stream().unwrap();
                    let z = s.runtime().alloc(LEN).unwrap();
                    s.fill(z.view(), ops::Pattern::U8(value)).unwrap();
                    (s, z)
                };
                (0..3).map(one).collect()
            };
            let (in_a, in_b) = (fresh(&a, 3), fresh(&b, 4));
            in_a.iter().chain(&in_b).for_each(|(s, _)| s.synchronize_timeout(LONG).unwrap());
            open(held);
            [&a, &b].iter().for_each(|r| r.synchronize().unwrap());
            for (r, all, value) in [(&a, &in_a, 3), (&b, &in_b, 4)] {
                assert!(
                    all.iter().all(|(_, z)| bytes(r, z).iter().all(|&v| v == value)),
                    "{what}: on {}",
                    r.device()
                );
            }
        }
    }
    world.check();
}

#[test]
fn a_failure_of_the_source_reaches_the_copy_and_whoever_reads_the_destination() {
    let world = World::new(9);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) = (a.upload(&[1u8; 70_000]).unwrap(), b.upload(&[2u8; 70_000]).unwrap());
            let (writer, copier) = (a.create_stream().unwrap(), owner.create_stream().unwrap());
            let held = hold(&writer);
            writer.host_call("fails", || Err(Error::state("on purpose"))).unwrap();
            writer.fill(x.view(), 7u8).unwrap();
            let submitted = copier.copy(y.view(), x.view());
            open(held);
            assert!(
                submitted.is_err() || copier.synchronize_timeout(LONG).is_err(),
                "{what}: the copy did not fail"
            );
            assert!(copier.failure().is_some(), "{what}");
            assert_eq!(kind(copier.copy(y.view(), x.view())), "Fault", "{what}: a poisoned stream");
            // Once both are overwritten they are as good as new.
            let _ = writer.synchronize_timeout(LONG);
            let _ = (a.synchronize(), b.synchronize());
            drop((writer, copier));
            let fresh = owner.create_stream().unwrap();
            a.stream().fill(x.view(), 8u8).unwrap();
            fresh.copy(y.view(), x.view()).unwrap();
            fresh.synchronize_timeout(LONG).unwrap();
            assert!(bytes(&b, &y).iter().all(|&v| v == 8), "{what}: after the failure");
        }
    }
    world.check();
}

#[test]
fn a_recorded_copy_takes_what_is_there_at_each_launch() {
    let world = World::new(10);
    const LEN: usize = 1_100_000;
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) = (a.alloc(LEN as u64).unwrap(), b.alloc(LEN as u64).unwrap());
            let graph = owner.record_graph(|r| r.stream().copy(y.view(), x.view())).unwrap();
            for round in 0..3 {
                // Written on the source's own stream, read on the destination's own one.
                a.stream().fill(x.view(), ops::Pattern::U8(10 + round)).unwrap();
                b.stream().fill(y.view(), 0u8).unwrap();
                graph.launch().unwrap();
                let got = bytes(&b, &y);
                assert!(
                    got.iter().all(|&v| v == 10 + round),
                    "{what}, launch {round}: {} {}",
                    got[0],
                    got[LEN - 1]
                );
            }
            let last = pattern(LEN, 3);
            a.stream().upload_blocking(x.view(), &last).unwrap();
            graph.launch().unwrap();
            assert!(bytes(&b, &y) == last, "{what}");
        }
    }
    world.check();
}

#[test]
fn a_recorded_copy_comes_between_what_is_recorded_before_and_after_it() {
    let world = World::new(11);
    const LEN: u64 = 70_000;
    for [here, there] in world.pairs() {
        let what = format!("{} with {}", here.device(), there.device());
        let (far, result) =
            (there.upload(&vec![5u8; LEN as usize]).unwrap(), here.alloc(LEN).unwrap());
        // Down into a temporary, changed in part, and up again.
        let graph = here
            .record_graph(|r| {
                let temporary = r.alloc(LEN)?;
                r.stream().fill(temporary.view(), 1u8)?;
                r.stream().copy(temporary.view(), far.view())?;
                r.stream().copy(result.view(), temporary.view())?;
                r.stream().fill(temporary.part(100..300)?, 6u8)?;
                r.stream().copy(far.view(), temporary.view())
            })
            .unwrap();
        for round in 0..2 {
            graph.launch().unwrap();
            let expect = |i: usize| if (100..300).contains(&i) { 6 } else { 5 };
            let up = bytes(&there, &far);
            assert!(
                up.iter().enumerate().all(|(i, &v)| v == expect(i)),
                "{what}, launch {round}: up"
            );
            let down = bytes(&here, &result);
            let expect = |i: usize| if round == 0 { 5 } else { expect(i) };
            assert!(
                down.iter().enumerate().all(|(i, &v)| v == expect(i)),
                "{what}, launch {round}: down"
            );
        }
    }
    world.check();
}

#[test]
fn a_graph_with_a_copy_may_go_while_it_runs() {
    let world = World::new(12);
    for [a, b] in world.pairs() {
        for owner in [&a, &b] {
            let what = format!("{} to {} by {}", a.device(), b.device(), owner.device());
            let (x, y) = (a.upload(&[4u8; 70_000]).unwrap(), b.upload(&[0u8; 70_000]).unwrap());
            let stream = owner.create_stream().unwrap();
            let held = hold(&stream);
            let graph = owner.record_graph(|r| r.stream().copy(y.view(), x.view())).unwrap();
            graph.launch_on(&stream).unwrap();
            drop((graph, x));
            let noise = a.alloc(70_000).unwrap();
            a.stream().fill(noise.view(), 9u8).unwrap();
            a.stream().synchronize().unwrap();
            open(held);
            assert!(bytes(&b, &y).iter().all(|&v| v == 4), "{what}");
            assert!(bytes(&a, &noise).iter().all(|&v| v == 9), "{what}");
        }
    }
    world.check();
}

#[test]
fn buffers_of_recorded_copies_are_replaced_by_their_own_kind_or_refused() {
    let world = World::new(13);
    let (a, b) = (world.runtime("sim:0"), world.runtime("sim:1"));
    let (x, y, z) =
        (a.alloc(64).unwrap(), b.upload(&[1u8; 64]).unwrap(), b.upload(&[2u8; 64]).unwrap());
    let graph = a.record_graph(|a| a.stream().copy(x.view(), y.view())).unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(&y, &z)).unwrap();
    graph.launch().unwrap();
    assert_eq!(bytes(&a, &x), [2; 64]);
    let cpu = world.runtime("cpu:0");
    let host = cpu.upload(&[3u8; 64]).unwrap();
    assert_eq!(kind(graph.update(&GraphUpdate::new().buffer(&z, &host))), "InvalidArgument");
    assert_eq!(kind(graph.update(&GraphUpdate::new().buffer(&x, &y))), "InvalidArgument");

    let graph = a.record_graph(|a| a.stream().copy(x.view(), host.view())).unwrap();
    let other = cpu.upload(&[4u8; 64]).unwrap();
    assert_eq!(kind(graph.update(&GraphUpdate::new().buffer(&host, &other))), "Unsupported");
    let own = a.alloc(64).unwrap();
    let _ = graph.update(&GraphUpdate::new().buffer(&x, &own)).unwrap();
    graph.launch().unwrap();
    assert_eq!((bytes(&a, &own), bytes(&a, &x)), (vec![3; 64], vec![2; 64]));
    world.check();
}

#[test]
fn what_is_of_neither_device_or_of_another_context_is_refused() {
    let (world, strangers) = (World::new(14), World::new(14));
    let (cpu, sim, other) =
        (world.runtime("cpu:0"), world.runtime("sim:0"), world.runtime("sim:1"));
    let (x, y) = (sim.alloc(64).unwrap(), other.alloc(64).unwrap());
    assert_eq!(kind(cpu.stream().copy(x.view(), y.view())), "InvalidArgument");
    let stranger = strangers.runtime("sim:0");
    let strange = stranger.alloc(64).unwrap();
    assert_eq!(kind(sim.stream().copy(x.view(), strange.view())), "InvalidArgument");
    let mine = cpu.alloc(64).unwrap();
    assert_eq!(kind(cpu.stream().copy(mine.view(), strange.view())), "InvalidArgument");
    // A recording's temporary has no address for the other device.
    let error = sim.record_graph(|sim| {
        let temporary = sim.alloc(64)?;
        assert_eq!(kind(cpu.stream().copy(mine.view(), temporary.view())), "Recording");
        assert_eq!(kind(other.stream().copy(y.view(), temporary.view())), "Recording");
        sim.stream().copy(temporary.view(), mine.view())
    });
    error.unwrap();
    world.check();
}

#[test]
fn the_stream_that_works_for_another_ends_with_it() {
    let world = World::new(15);
    let (cpu, sim) = (world.runtime("cpu:0"), world.runtime("sim:0"));
    let (x, y) = (cpu.upload(&[1u8; 64]).unwrap(), sim.alloc(64).unwrap());
    let live =
        |r: &Runtime| r.pools().iter().find(|(name, _)| *name == "stream").map_or(0, |p| p.1.live);
    let before = live(&sim);
    let stream = cpu.create_stream().unwrap();
    for _ in 0..100 {
        stream.copy(y.view(), x.view()).unwrap();
    }
    stream.synchronize().unwrap();
    assert_eq!(live(&sim), before + 1);
    drop(stream);
    assert_eq!(live(&sim), before);
    world.check();
}

#[test]
fn threads_copy_back_and_forth() {
    let world = World::new(16);
    let pairs = world.pairs();
    std::thread::scope(|scope| {
        for (i, [a, b]) in pairs.iter().enumerate() {
            scope.spawn(move || {
                let (s, t) = (a.create_stream().unwrap(), b.create_stream().unwrap());
                let (x, y) = (a.alloc(5000).unwrap(), b.alloc(5000).unwrap());
                for round in 0..20u32 {
                    let value = (i as u32 * 20 + round) as u8;
                    s.fill(x.view(), ops::Pattern::U8(value)).unwrap();
                    (if round % 2 == 0 { &s } else { &t }).copy(y.view(), x.view()).unwrap();
                    s.fill(x.view(), 0u8).unwrap();
                    (if round % 3 == 0 { &s } else { &t }).copy(x.view(), y.view()).unwrap();
                    let got = bytes(a, &x);
                    let what = format!("{} and {}, round {round}", a.device(), b.device());
                    assert!(
                        got.iter().all(|&v| v == value),
                        "{what}: {} {} and not {value}",
                        got[0],
                        got[4999]
                    );
                }
            });
        }
    });
    world.check();
}
