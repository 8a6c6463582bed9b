//! Device cases: enumeration, and the lifetime of devices and of their objects.

use crate::case::{Case, Need, Outcome, Stop, check, check_eq, expect_error, skipped};
use crate::env::{Env, direct};
use crate::factory::TestKernel;
use leasehold::backend::PoolStats;
use leasehold::backend::{Device, Fill, MemoryKind, Op};
use leasehold::{BackendKind, DeviceId, Error};
use std::collections::BTreeMap;

pub(crate) const CASES: &[Case] = &[
    Case::hal(
        1,
        "enumerating twice gives the same devices in the same order",
        &[],
        enumerate_twice,
    ),
    Case::hal(
        2,
        "devices open by id and by text and an unknown one is not found",
        &[],
        open_by_name,
    ),
    Case::hal(3, "a machine without devices has none and says so", &[], no_devices),
    Case::hal(4, "a device opened twice is one and survives the first drop", &[], open_twice),
    Case::hal(5, "opening and closing many times grows nothing", &[], open_and_close),
    Case::hal(6, "a device may be dropped before its streams and buffers", &[], drop_device_first),
    Case::hal(
        7,
        "the last lease may go while work is in flight",
        &[Need::Hold],
        drop_last_in_flight,
    ),
    Case::hal(8, "limits and capabilities are sane", &[], sane_limits),
    Case::hal(9, "attributes can be asked for by eight threads", &[], ask_from_threads),
    Case::hal(
        130,
        "shutdown with live leases is refused and changes nothing",
        &[],
        shutdown_with_leases,
    ),
    Case::hal(
        131,
        "shutdown with only weak leases is refused too",
        &[Need::Timestamps],
        shutdown_with_weak,
    ),
    Case::hal(132, "two leases share one control block", &[], one_control_block),
    Case::hal(
        134,
        "a thousand failed creations lose nothing",
        &[Need::Kernel(TestKernel::Fill)],
        failed_creations,
    ),
    Case::runtime(
        143,
        "an unknown device is refused and the current one stays",
        &[],
        unknown_device_leaves_current,
    ),
];

fn enumerate_twice(env: &Env) -> Outcome {
    let (a, b) = (env.backend().devices()?, env.backend().devices()?);
    let names = |d: &[leasehold::DeviceInfo]| {
        d.iter().map(|d| (d.id, d.name.clone(), d.uuid.clone())).collect::<Vec<_>>()
    };
    check_eq!(names(&a), names(&b), "the second enumeration");
    for (i, device) in a.iter().enumerate() {
        check_eq!(device.id.ordinal as usize, i, "the ordinal of device {i}");
        check_eq!(device.id.backend, env.backend().kind(), "the backend of device {i}");
        check!(!device.arch.is_empty(), "device {i} runs no architecture");
    }
    Ok(())
}

fn open_by_name(env: &Env) -> Outcome {
    let id = env.id();
    let device = env.backend().open(id)?;
    check_eq!(device.info().id, id, "the opened device");
    if !matches!(id.backend, BackendKind::Other(_)) {
        let by_text: DeviceId = id.to_string().parse()?;
        check!(env.backend().open(by_text)?.same(&device), "by text another device was opened");
    }
    let unknown = DeviceId::new(id.backend, 4_000_000_000);
    expect_error(env.backend().open(unknown), "NotFound", "a device number that does not exist")?;
    let foreign =
        if id.backend == BackendKind::Null { BackendKind::Cpu } else { BackendKind::Null };
    expect_error(
        env.backend().open(DeviceId::new(foreign, 0)),
        "NotFound",
        "a device of another backend",
    )?;
    Ok(())
}

fn open_twice(env: &Env) -> Outcome {
    let a = env.backend().open(env.id())?;
    let b = env.backend().open(env.id())?;
    check!(a.same(&b), "the second lease is on another resource");
    check_eq!(a.handle(), b.handle(), "the second handle");
    drop(a);
    works(env, &*b)
}

fn no_devices(env: &Env) -> Outcome {
    let Some(backend) = env.factory().without_devices() else {
        return skipped("there is no such machine without devices to be had");
    };
    let backend = backend?;
    check_eq!(backend.devices()?.len(), 0, "devices of a machine that has none");
    expect_error(
        backend.open(DeviceId::new(backend.kind(), 0)),
        "Unavailable",
        "opening a device there",
    )?;
    backend.shutdown()?;
    Ok(())
}

/// A stream, a buffer, a fill and a copy back.
fn works(env: &Env, device: &dyn Device) -> Outcome {
    let stream = device.stream(&Default::default())?;
    let buffer = env.buffer(&stream, 64)?;
    let fill =
        Fill { dst: buffer.addr(), native: buffer.native(), bytes: 64, pattern: 0x5a, width: 1 };
    direct(&stream, &[Op::Fill(fill)])?;
    check_eq!(env.read(&stream, &buffer)?, [0x5a; 64], "a fill");
    Ok(())
}

fn pools(env: &Env) -> BTreeMap<&'static str, PoolStats> {
    let mut all = BTreeMap::new();
    env.backend().pools(&mut |name, stats| _ = all.insert(name, stats));
    env.device().pools(&mut |name, stats| _ = all.insert(name, stats));
    all
}

fn open_and_close(env: &Env) -> Outcome {
    let once = || works(env, &*env.backend().open(env.id())?);
    once()?;
    let before = pools(env);
    for _ in 0..200 {
        once()?;
    }
    for (name, after) in pools(env) {
        let was = before.get(name).copied().unwrap_or_default();
        check!(after.live <= was.live, "pool {name}: {} live, {} before", after.live, was.live);
        check!(
            after.peak <= was.peak + 2,
            "pool {name}: {} at a time, {} before",
            after.peak,
            was.peak
        );
    }
    Ok(())
}

fn drop_device_first(env: &Env) -> Outcome {
    let device = env.backend().open(env.id())?;
    let stream = device.stream(&Default::default())?;
    let buffer = env.buffer(&stream, 64)?;
    drop(device);
    let fill =
        Fill { dst: buffer.addr(), native: buffer.native(), bytes: 64, pattern: 7, width: 1 };
    direct(&stream, &[Op::Fill(fill)])?;
    check_eq!(env.read(&stream, &buffer)?, [7; 64], "a fill after the device's lease was dropped");
    drop(stream);
    drop(buffer);
    Ok(())
}

fn drop_last_in_flight(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 4096)?;
    let hold = env.hold(&stream)?;
    let fill =
        Fill { dst: buffer.addr(), native: buffer.native(), bytes: 4096, pattern: 7, width: 1 };
    let point = stream.timeline().at(direct(&stream, &[Op::Fill(fill)])?);
    // SAFETY: the timepoint is that of a submission to this stream that uses the buffer, made in
    // order.
    unsafe { buffer.mark_write(point) };
    drop(buffer);
    drop(stream);
    hold.release()?;
    env.reached(point)
}

fn sane_limits(env: &Env) -> Outcome {
    let (l, info) = (env.device().limits(), env.device().info());
    check!(
        l.bindings >= 30 && l.params >= 4096,
        "fewer bindings or parameters than every backend takes: {l:?}"
    );
    check!(
        !l.grid.contains(&0) && !l.block.contains(&0) && l.block_threads > 0,
        "a limit of nothing: {l:?}"
    );
    check!(l.alignment.is_power_of_two() && l.alignment >= 64, "alignment {}", l.alignment);
    check!(l.buffer > 0 && l.streams > 0, "no buffers or no streams: {l:?}");
    check!(info.units > 0, "no units");
    check!(!info.name.is_empty(), "no name");
    let memory = env.device().memory_info()?;
    check!(memory.free <= memory.total && memory.total > 0, "memory {memory:?}");
    check_eq!(env.device().caps(), env.device().caps(), "the capabilities, asked twice");
    let caps = env.device().caps();
    check_eq!(
        env.device().host_timeline().is_ok(),
        caps.host_timelines,
        "host timelines and their capability"
    );
    check_eq!(env.device().timestamp().is_ok(), caps.timestamps, "timestamps and their capability");
    check_eq!(env.device().memory(MemoryKind::Device).is_ok(), true, "device memory");
    Ok(())
}

fn ask_from_threads(env: &Env) -> Outcome {
    let first = (env.device().info().clone(), *env.device().limits());
    let same = std::thread::scope(|scope| {
        let ask = || {
            (0..200).all(|_| {
                (env.device().info(), env.device().limits()) == (&first.0, &first.1)
                    && env.device().memory_info().is_ok()
                    && env.device().make_current().is_ok()
            })
        };
        let threads: Vec<_> = (0..8).map(|_| scope.spawn(ask)).collect();
        threads.into_iter().all(|t| t.join().unwrap_or(false))
    });
    check!(same, "the answers differ between threads");
    Ok(())
}

fn shutdown_with_leases(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let buffer = env.buffer(&stream, 64)?;
    match expect_error(
        env.backend().shutdown(),
        "LeasesOutstanding",
        "shutdown with a device, a stream and a buffer held",
    )? {
        Error::LeasesOutstanding { strong, .. } if strong > 0 => {}
        other => return Err(Stop::Failed(format!("no strong leases counted: {other}"))),
    }
    check_eq!(env.read(&stream, &buffer)?.len(), 64, "a copy after the refused shutdown");
    works(env, &**env.device())?;
    let again = env.backend().open(env.id())?;
    check!(again.same(env.device()), "after the refused shutdown the device is another one");
    // The check at the end of every case shows that the device works once they are gone.
    Ok(())
}

fn shutdown_with_weak(env: &Env) -> Outcome {
    let backend = env.backend().clone();
    let timestamp = env.device().timestamp()?;
    let weak = timestamp.downgrade();
    drop(timestamp);
    let refused = expect_error(
        backend.shutdown(),
        "LeasesOutstanding",
        "shutdown with a weak lease on a timestamp",
    )?;
    drop(weak);
    check!(
        matches!(refused, Error::LeasesOutstanding { strong, weak, .. } if strong + weak > 0),
        "{refused}"
    );
    works(env, &**env.device())
}

fn one_control_block(env: &Env) -> Outcome {
    let stream = env.stream()?;
    let second = stream.clone();
    check!(stream.same(&second), "a clone is another resource");
    check_eq!(stream.handle(), second.handle(), "the clone's handle");
    check_eq!(stream.strong_count(), 2, "the count of two leases");
    let buffer = env.buffer(&stream, 64)?;
    drop(stream);
    let fill =
        Fill { dst: buffer.addr(), native: buffer.native(), bytes: 64, pattern: 3, width: 1 };
    direct(&second, &[Op::Fill(fill)])?;
    check_eq!(env.read(&second, &buffer)?, [3; 64], "a fill through the second lease");
    let device = env.backend().open(env.id())?;
    check!(device.same(env.device()), "the device opened again has a control block of its own");
    Ok(())
}

fn failed_creations(env: &Env) -> Outcome {
    let before = pools(env);
    for _ in 0..1000 {
        let mut desc = env.desc(TestKernel::Fill)?;
        desc.bindings = vec![leasehold::Access::Read; 1000].into();
        expect_error(
            env.device().pipeline(&desc),
            "InvalidArgument",
            "a kernel of 1,000 bindings",
        )?;
    }
    for (name, after) in pools(env) {
        let was = before.get(name).copied().unwrap_or_default();
        check_eq!(
            (after.live, after.retired),
            (was.live, was.retired),
            "pool {name} after failed creations"
        );
    }
    drop(env.kernel(TestKernel::Fill)?);
    Ok(())
}

fn unknown_device_leaves_current(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let guard = runtime.enter()?;
    let unknown = DeviceId::new(env.id().backend, 4_000_000_000);
    expect_error(
        env.context().runtime(unknown),
        "NotFound",
        "a runtime on a device that does not exist",
    )?;
    let current = leasehold::Current::get()?;
    check_eq!(current.runtime().device(), env.id(), "the current device after the refusal");
    drop((current, guard));
    Ok(())
}
