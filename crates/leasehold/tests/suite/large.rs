//! Large copies of the caller's memory, which go through a ring of pinned memory: over simulated
//! devices, under their race detectors.

use crate::common::*;
use leasehold::{Context, DeviceId, Error, MemoryKind, Runtime, Stream, View};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{FaultAction, FaultRule, MachineConfig, Monitor, SimBackend, When};
use std::sync::Arc;
use std::time::Duration;
use std::time::Instant;

const MIB: usize = 1 << 20;

/// A simulated device of each backend that has pinned memory.
fn devices(seed: u64) -> Vec<(Runtime, Monitor)> {
    let config = || MachineConfig::seed(seed).devices(1, 256 << 20).poison(0xcd);
    let sim = SimBackend::new(config()).unwrap();
    let cuda = Arc::new(SimDriver::new(SimDriverConfig::new(config())).unwrap());
    let mut machines = vec![sim.machine().clone(), cuda.machine().clone()];
    let cuda = CudaBackend::with_ops(cuda, CudaConfig::default()).unwrap();
    let mut backends: Vec<Arc<dyn leasehold::backend::Backend>> =
        vec![Arc::new(sim), Arc::new(cuda)];
    let mut names = vec!["sim:0", "cuda:0"];
    #[cfg(feature = "mps")]
    {
        use leasehold_sim::mps::{SimDriver, SimDriverConfig};
        let metal = Arc::new(SimDriver::new(SimDriverConfig::new(config())).unwrap());
        machines.push(metal.machine().clone());
        let metal = leasehold_mps::MpsBackend::with_ops(metal, leasehold_mps::MpsConfig::default());
        backends.push(Arc::new(metal.unwrap()));
        names.push("mps:0");
    }
    let context = Context::with_backends(backends);
    let runtime = |name: &str| context.runtime(name.parse::<DeviceId>().unwrap()).unwrap();
    names.into_iter().map(runtime).zip(machines).collect()
}

#[track_caller]
fn check(machine: &Monitor) {
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{reports:?}");
}

fn pattern(bytes: usize, seed: u8) -> Vec<u8> {
    // A prime number of bytes repeats, so that no piece has the contents of another place.
    let once: Vec<u8> =
        (0..65_521u32).map(|i| (i.wrapping_mul(0x9E37_79B9) >> 24) as u8 ^ seed).collect();
    let mut all = Vec::with_capacity(bytes + once.len());
    while all.len() < bytes {
        all.extend_from_slice(&once);
    }
    all.truncate(bytes);
    all
}

fn pinned(runtime: &Runtime) -> u64 {
    runtime.raw_device().memory(MemoryKind::Pinned).unwrap().stats().reserved_peak
}

/// Waits until `count` values of the stream are submitted beyond `from`.
#[track_caller]
fn submitted(stream: &Stream, from: u64, count: u64) {
    let begin = Instant::now();
    while stream.now().value() < from + count {
        assert!(begin.elapsed() < LONG, "{} of {count}", stream.now().value() - from);
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn all_bytes_arrive_in_both_directions_and_no_others_change() {
    for seed in 1..3 {
        for (runtime, machine) in devices(seed) {
            let stream = runtime.create_stream().unwrap();
            for len in [8 * MIB + 1, 25 * MIB + 3] {
                let what = format!("{len} bytes on {}", runtime.device());
                let x = runtime.alloc(len as u64 + 64).unwrap();
                for (i, asynchronous) in [false, true].into_iter().enumerate() {
                    stream.fill(x.view(), 0xEEu8).unwrap();
                    let source = pattern(len, i as u8);
                    let part = x.part(17..17 + len).unwrap();
                    if asynchronous {
                        stream.synchronize().unwrap();
                        stream.upload(part, &source).unwrap();
                    } else {
                        stream.upload_blocking(part, &source).unwrap();
                    }
                    let mut got = vec![0u8; len + 64];
                    stream.download(&mut got, x.view()).unwrap();
                    assert!(got[17..17 + len] == source, "{what}");
                    assert!(got[..17] == [0xEE; 17] && got[17 + len..] == [0xEE; 47], "{what}");
                }
            }
            check(&machine);
        }
    }
}

#[test]
fn a_large_copy_pins_a_few_pieces_and_not_its_length() {
    for (runtime, machine) in devices(7) {
        let source = pattern(60 * MIB, 3);
        let x = runtime.upload(&source).unwrap();
        runtime.stream().upload_blocking(x.buffer().view(), &source).unwrap();
        assert!(runtime.to_vec(&x).unwrap() == source);
        let bytes = pinned(&runtime);
        assert!(bytes <= 40 << 20, "{} pinned {bytes} bytes", runtime.device());
        check(&machine);
    }
}

#[test]
fn a_large_copy_has_one_place_in_the_order_of_its_stream() {
    for (runtime, machine) in devices(11) {
        let len = 24 * MIB;
        let source = pattern(len, 5);
        let x = runtime.alloc(len as u64).unwrap();
        let (stream, other) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
        for up in [true, false] {
            stream.fill(x.view(), 1u8).unwrap();
            stream.synchronize().unwrap();
            let held = hold(&stream);
            let before = stream.now().value();
            std::thread::scope(|scope| {
                let copy = scope.spawn(|| {
                    let mut got = vec![0u8; if up { 0 } else { len }];
                    if up {
                        stream.upload_blocking(x.view(), &source)?;
                    } else {
                        stream.download(&mut got, x.view())?;
                    }
                    Ok::<_, Error>(got)
                });
                submitted(&stream, before, 6);
                // On the stream itself, and on another one: both come after all of the copy.
                stream.fill(x.view(), 2u8).unwrap();
                other.fill(x.part(..MIB).unwrap(), 3u8).unwrap();
                open(held);
                let got = copy.join().unwrap().unwrap();
                assert!(up || got == vec![1; len], "a later write came before a piece");
            });
            let mut after = vec![0u8; len];
            other.download(&mut after, x.view()).unwrap();
            let (first, rest) = after.split_at(MIB);
            assert!(first == vec![3; MIB] && rest == vec![2; len - MIB], "up: {up}");
        }
        check(&machine);
    }
}

#[test]
fn a_large_asynchronous_upload_does_not_wait_for_earlier_work() {
    for (runtime, machine) in devices(13) {
        let source = pattern(9 * MIB, 6);
        let x = runtime.alloc(source.len() as u64).unwrap();
        let (stream, other) = (runtime.create_stream().unwrap(), runtime.create_stream().unwrap());
        // The stream's own work, and another stream's use of the buffer.
        for busy in [&stream, &other] {
            stream.fill(x.view(), 0u8).unwrap();
            stream.synchronize().unwrap();
            let held = hold(busy);
            busy.fill(x.view(), 9u8).unwrap();
            stream.upload(x.view(), &source).unwrap();
            open(held);
            assert!(runtime.to_vec::<u8>(&x).unwrap() == source, "on {}", runtime.device());
        }
        // In a host call nobody waits.
        let (inner, target, bytes) = (stream.clone(), x.clone(), source.clone());
        stream.fill(x.view(), 0u8).unwrap();
        stream
            .host_call("uploads", move || {
                assert_eq!(kind(inner.upload_blocking(target.view(), &bytes)), "InvalidState");
                inner.upload(target.view(), &bytes)
            })
            .unwrap();
        stream.synchronize().unwrap();
        assert!(runtime.to_vec::<u8>(&x).unwrap() == source);
        check(&machine);
    }
}

#[test]
fn a_large_copy_behind_a_failure_ends_with_it_and_leaves_nothing_behind() {
    for (runtime, machine) in devices(17) {
        let mut bytes = pattern(24 * MIB, 7);
        let x = runtime.upload(&bytes).unwrap();
        for up in [true, false] {
            let stream = runtime.create_stream().unwrap();
            let held = hold(&stream);
            let before = stream.now().value();
            std::thread::scope(|scope| {
                let copy = scope.spawn(|| match up {
                    true => stream.upload_blocking(x.buffer().view(), &bytes),
                    false => stream.download(&mut bytes, x.buffer().view()),
                });
                submitted(&stream, before, 6);
                held.0.fail(Error::InvalidState("on purpose".into()));
                let error = copy.join().unwrap().unwrap_err();
                assert!(error.to_string().contains("on purpose"), "{error}");
            });
            assert!(stream.synchronize_timeout(LONG).is_err());
            // A write of the whole buffer cures it, large or not.
            runtime.stream().upload_blocking(x.buffer().view(), &bytes).unwrap();
            assert!(runtime.to_vec(&x).unwrap() == bytes);
        }
        check(&machine);
    }
}

#[test]
fn a_large_copy_whose_device_call_fails_says_so() {
    let config = MachineConfig::seed(19).devices(1, 256 << 20);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(config)).unwrap());
    let machine = driver.machine().clone();
    let cuda = CudaBackend::with_ops(driver, CudaConfig::default()).unwrap();
    let runtime = Context::with_backends(vec![Arc::new(cuda)])
        .runtime("cuda:0".parse::<DeviceId>().unwrap())
        .unwrap();
    let mut bytes = pattern(24 * MIB, 8);
    let x = runtime.upload(&bytes).unwrap();
    for (call, up) in [("cuMemcpyHtoDAsync", true), ("cuMemcpyDtoHAsync", false)] {
        for nth in [0, 2, 5] {
            // Cures what the call before has left in the buffer.
            runtime.stream().upload_blocking(x.buffer().view(), &bytes).unwrap();
            let stream = runtime.create_stream().unwrap();
            let made = machine.calls_by_name().into_iter().find(|(name, _)| name == call);
            let at = When::At(made.map_or(0, |(_, count)| count) + nth);
            machine.add_fault(FaultRule::on(call, at, FaultAction::Fail(304)));
            let outcome = match up {
                true => stream.upload_blocking(x.buffer().view(), &bytes),
                false => stream.download(&mut bytes, x.buffer().view()),
            };
            let error = outcome.unwrap_err();
            assert!(error.to_string().contains("304"), "{call} {nth}: {error}");
            // Nothing of the copy is under way, and other streams go on.
            let _ = stream.synchronize_timeout(LONG);
            assert!(stream.now().timeline().is_idle());
        }
    }
    let bytes = pattern(24 * MIB, 9);
    runtime.stream().upload_blocking(x.buffer().view(), &bytes).unwrap();
    assert!(runtime.to_vec(&x).unwrap() == bytes);
    check(&machine);
}

#[test]
fn a_large_copy_without_pinned_memory_for_it_takes_the_drivers_way() {
    let mut config = MachineConfig::seed(23).devices(1, 256 << 20);
    config.pinned = 9 << 20;
    let sim = SimBackend::new(config).unwrap();
    let machine = sim.machine().clone();
    let runtime = Context::with_backends(vec![Arc::new(sim)])
        .runtime("sim:0".parse::<DeviceId>().unwrap())
        .unwrap();
    let bytes = pattern(10 * MIB, 9);
    let x = runtime.upload(&bytes).unwrap();
    runtime.stream().upload_blocking(x.buffer().view(), &bytes).unwrap();
    assert!(runtime.to_vec(&x).unwrap() == bytes);
    check(&machine);
}

#[test]
fn a_large_upload_is_recorded_whole() {
    for (runtime, machine) in devices(29) {
        let source = pattern(9 * MIB, 4);
        let x = runtime.alloc(source.len() as u64).unwrap();
        let graph = runtime.record_graph(|r| r.stream().upload(x.view(), &source)).unwrap();
        runtime.stream().fill(x.view(), 0u8).unwrap();
        graph.launch().unwrap();
        assert!(runtime.to_vec::<u8>(&x).unwrap() == source);
        check(&machine);
    }
}
