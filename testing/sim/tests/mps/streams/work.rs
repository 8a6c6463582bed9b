//! Work of every kind: graphs, timestamps, host calls, library calls, host timelines.

use super::common::*;
use leasehold_alloc::Buffer;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, ForeignCall, HostCall, NodePatch, Op, OpList, Pipeline, Plan};
use leasehold_mps::driver::ops::*;
use leasehold_sim::FaultAction;

#[test]
fn a_graph_replays_uploads_launches_and_downloads_and_takes_patches() -> Result<()> {
    for seed in 0..8 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let a = stream(&device);
        let (x, y, z) = (buffer(&device, &a, 64), buffer(&device, &a, 64), buffer(&device, &a, 64));
        let bump = kernel(&device, "bump");
        let (up, down) = (Host::new(vec![1; 64]), Host::new(vec![0; 64]));
        let bindings = [bind(&x, Access::ReadWrite)];
        let mut ops = OpList::new();
        ops.push(&up.up(&x));
        ops.push(&one(&bump, &bindings));
        ops.push(&copy(&x, &y));
        ops.push(&down.down(&y));
        // SAFETY: the buffers and the host memory outlive the launches.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
        assert_eq!(graph.nodes(), 4);
        submit(&a, &[fill(&z, 0)])?;
        for _ in 0..3 {
            let value = submit(&a, &[Op::Graph(&graph)])?;
            wait(&a, value)?;
            assert_eq!(down.bytes(), 0x0101_0102_u32.to_le_bytes().repeat(16), "seed {seed}");
        }
        let other = [bind(&z, Access::ReadWrite)];
        let patch = NodePatch { node: 1, bindings: Some(&other), params: None, grid: None };
        // SAFETY: no launch is in flight, and the patch names memory that outlives the launches.
        unsafe { graph.update(&[patch])? };
        let value = submit(&a, &[Op::Graph(&graph)])?;
        wait(&a, value)?;
        assert_eq!(down.bytes(), vec![1; 64], "seed {seed}: the patched node uses other memory");
        assert_eq!(read(&a, &z), 1_u32.to_le_bytes().repeat(16));
        drop((x, y, z, bump, graph, a, device));
        bench.close();
    }
    Ok(())
}

#[test]
fn timestamps_are_of_the_device_and_in_order() -> Result<()> {
    let bench = Bench::new(1);
    let device = bench.open(0);
    assert!(device.caps().timestamps);
    let a = stream(&device);
    let x = buffer(&device, &a, 1 << 20);
    let times = [device.timestamp()?, device.timestamp()?, device.timestamp()?];
    // SAFETY: both timestamps are leased from this device.
    let elapsed = |i: usize, j: usize| unsafe { device.elapsed(&times[i], &times[j]) };
    assert!(elapsed(0, 1).is_err(), "not written yet");
    let mut ops = vec![Op::WriteTimestamp(&times[0])];
    ops.extend([fill(&x, 1), Op::WriteTimestamp(&times[1])]);
    ops.extend([fill(&x, 2), fill(&x, 3), Op::WriteTimestamp(&times[2])]);
    let value = submit(&a, &ops)?;
    wait(&a, value)?;
    let (short, long) = (elapsed(0, 1)?, elapsed(0, 2)?);
    assert!(!short.is_zero() && long > short, "{short:?} {long:?}");
    assert!(elapsed(2, 0)?.is_zero(), "the end came first");
    drop((x, times, a, device));
    bench.close();
    Ok(())
}

#[test]
fn a_device_without_counters_says_so() -> Result<()> {
    let mut driver = driver_config(1);
    driver.stage_counters = false;
    let bench = Bench::with(driver, inline());
    let device = bench.open(0);
    assert!(!device.caps().timestamps);
    assert!(matches!(device.timestamp(), Err(Error::Unsupported(_))));
    drop(device);
    bench.close();
    Ok(())
}

#[test]
fn a_host_call_sees_the_work_before_it_and_precedes_the_work_behind_it() -> Result<()> {
    for seed in 0..8 {
        for threads in [false, true] {
            let bench = Bench::with(driver_config(seed), inline().inline(!threads));
            let device = bench.open(0);
            let a = stream(&device);
            let x = buffer(&device, &a, 4);
            let seen = Arc::new(Mutex::new(0_u32));
            let (addr, note) = (x.addr() as usize, seen.clone());
            let call = HostCall::new("look", move || {
                let at = std::ptr::with_exposed_provenance_mut::<u32>(addr);
                // SAFETY: the memory is in shared storage, and no work touches it meanwhile.
                unsafe {
                    *note.lock() = *at;
                    *at += 100;
                }
                Ok(())
            });
            let bump = kernel(&device, "bump");
            let bindings = [bind(&x, Access::ReadWrite)];
            submit(&a, &[fill(&x, 0), one(&bump, &bindings)])?;
            let last = submit(&a, &[Op::Host(&call), one(&bump, &bindings)])?;
            wait(&a, last)?;
            assert_eq!((*seen.lock(), read(&a, &x)), (1, 102_u32.to_le_bytes().to_vec()));
            drop((x, bump, a, device));
            bench.close();
        }
    }
    Ok(())
}

/// A call of a library that runs `bump` over 4 bytes, in a pass that knows no fence.
fn library(bench: &Bench, bump: &Lease<Pipeline>, x: &Lease<Buffer>) -> ForeignCall {
    let (driver, addr) = (bench.driver.clone(), x.addr());
    let (pipeline, native) = (NativePipeline(bump.native), NativeBuffer(x.native()));
    ForeignCall::new("library", vec![bind(x, Access::ReadWrite)], move |command| {
        // SAFETY: the test keeps the pipeline and the buffer, and the stream the command
        // buffer. The encoder ends here.
        unsafe {
            let command = NativeCommandBuffer(command);
            let encoder = driver.compute_encoder(command, &ComputeDesc::default())?;
            driver.set_pipeline(encoder, pipeline)?;
            let offset = addr - driver.buffer_address(native)?;
            driver.set_buffer(encoder, native, offset, 0)?;
            let part =
                [leasehold_hal::Binding { addr, len: 4, native: 0, access: Access::ReadWrite }];
            let launch = Dispatch { groups: [1; 3], threads: [1; 3], bindings: &part };
            driver.dispatch(encoder, &launch)?;
            driver.end_encoding(encoder.into())?;
            driver.release(encoder.into());
        }
        Ok(())
    })
}

#[test]
fn a_library_encodes_into_a_command_buffer_behind_and_before_the_stream_s_work() -> Result<()> {
    for seed in 0..12 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let a = stream(&device);
        let x = buffer(&device, &a, 4);
        let bump = kernel(&device, "bump");
        let bindings = [bind(&x, Access::ReadWrite)];
        let call = library(&bench, &bump, &x);
        submit(
            &a,
            &[fill(&x, 0), one(&bump, &bindings), Op::Foreign(&call), one(&bump, &bindings)],
        )?;
        let mut ops = OpList::new();
        ops.push(&one(&bump, &bindings));
        ops.push(&Op::Foreign(&call));
        ops.push(&one(&bump, &bindings));
        // SAFETY: the buffer outlives the launches.
        let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
        submit(&a, &[Op::Graph(&graph)])?;
        assert_eq!(read(&a, &x), 6_u32.to_le_bytes(), "seed {seed}");
        drop((x, bump, graph, a, device));
        bench.close();
    }
    Ok(())
}

/// The command buffer behind the library's skips its wait when it fails. The one after it must come
/// behind the library's passes all the same.
#[test]
fn work_behind_a_failed_command_buffer_still_comes_after_a_library_s() -> Result<()> {
    for seed in 0..24 {
        let bench = Bench::new(seed);
        let device = bench.open(0);
        let a = stream(&device);
        let x = buffer(&device, &a, 4);
        let bump = kernel(&device, "bump");
        let bindings = [bind(&x, Access::ReadWrite)];
        let call = library(&bench, &bump, &x);
        submit(&a, &[fill(&x, 0), Op::Foreign(&call), one(&bump, &bindings)])?;
        bench.fail("commit", FaultAction::Fail(3));
        a.flush()?;
        let last = submit(&a, &[one(&bump, &bindings)])?;
        assert!(wait(&a, last).is_err(), "seed {seed}: the stream is poisoned");
        a.timeline().drain(last, None, || a.refresh());
        drop((x, bump, a, device));
        bench.close();
    }
    Ok(())
}
