//! Failures: of each step that begins a submission, and of work at its completion.

use super::common::*;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Result};
use leasehold_hal::{Access, Backend, BackendKind, DeviceId, Op, OpList, Plan, StreamDesc};
use leasehold_sim::{FaultAction, FaultRule, When};

#[test]
fn a_submission_that_fails_as_it_begins_gives_everything_back() -> Result<()> {
    // With one command buffer, a permit that is not given back would block the next submission.
    let bench = Bench::with(driver_config(1), inline().command_buffers(1));
    let device = bench.open(0);
    for call in ["newCommandQueueWithMaxCommandBufferCount", "newSharedEvent", "newFence"] {
        bench.fail(call, FaultAction::Fail(9));
        let error = device.stream(&StreamDesc::default()).map(drop).unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
    }
    let a = stream(&device);
    let x = buffer(&device, &a, 4);
    let bump = kernel(&device, "bump");
    let bindings = [bind(&x, Access::ReadWrite)];
    submit(&a, &[fill(&x, 0)])?;
    a.wait_host(a.timeline().submitted(), None)?;
    for call in ["commandBufferWithDescriptor", "computeCommandEncoderWithDescriptor"] {
        let before = a.timeline().submitted();
        bench.fail(call, FaultAction::Fail(9));
        let error = submit(&a, &[one(&bump, &bindings)]).unwrap_err();
        assert!(error.to_string().contains(call), "{error}");
        assert_eq!(a.timeline().submitted(), before, "no value was taken");
        let census = bench.driver.census();
        assert_eq!((census.command_buffers, census.encoders), (0, 0), "{call}");
        let value = submit(&a, &[one(&bump, &bindings)])?;
        a.wait_host(value, None)?;
    }
    assert_eq!(read(&a, &x), 2_u32.to_le_bytes());
    drop((x, bump, a, device));
    bench.close();
    Ok(())
}

#[test]
fn a_submission_that_fails_half_way_poisons_and_frees() -> Result<()> {
    let bench = Bench::new(1);
    let device = bench.open(0);
    let a = stream(&device);
    let x = buffer(&device, &a, 4);
    let timestamp = device.timestamp()?;
    let host = Host::new(vec![1; 4]);
    submit(&a, &[fill(&x, 0)])?;
    a.wait_host(a.timeline().submitted(), None)?;
    // The second encoder is the timestamp's.
    bench.driver.machine().add_fault(FaultRule::on(
        "computeCommandEncoderWithDescriptor",
        When::At(bench.calls("computeCommandEncoderWithDescriptor") + 1),
        FaultAction::Fail(9),
    ));
    let value = submit(&a, &[host.up(&x), Op::WriteTimestamp(&timestamp)])?;
    let error = wait(&a, value).unwrap_err();
    assert!(error.to_string().contains("computeCommandEncoder"), "{error}");
    a.timeline().drain(value, None, || a.refresh());
    assert_eq!(Arc::strong_count(&host.keep), 1);
    drop((x, timestamp, a, device));
    bench.close();
    Ok(())
}

/// Plays work that fails at completion, beside sound work of the same queue.
fn fails_at_completion(bench: &Bench, fault: Option<FaultAction>, text: &str) -> Result<()> {
    let device = bench.open(0);
    let (a, b, c) = (stream(&device), stream(&device), stream(&device));
    let (x, y, z) = (buffer(&device, &a, 64), buffer(&device, &b, 64), buffer(&device, &c, 64));
    let fail = kernel(&device, "fail");
    let host = Host::new(vec![1; 64]);
    let sound = submit(&a, &[fill(&x, 1)])?;
    a.wait_host(sound, None)?;
    let bindings = [bind(&x, Access::ReadWrite)];
    let failed = match &fault {
        None => submit(&a, &[host.up(&x), one(&fail, &bindings)])?,
        Some(action) => {
            let failed = submit(&a, &[host.up(&x)])?;
            bench.fail("commit", action.clone());
            a.flush()?;
            failed
        }
    };
    // A stream that waits for the failed work, and one that does not.
    let waiting = submit(&b, &[Op::Wait(a.timeline().at(failed)), copy(&x, &y)])?;
    let free = submit(&c, &[fill(&z, 7)])?;
    let error = wait(&a, failed).unwrap_err();
    assert!(error.to_string().contains(text), "{error}");
    assert!(a.timeline().check(sound)?, "earlier work is sound");
    assert!(submit(&a, &[fill(&x, 1)]).is_err(), "the stream is poisoned");
    let error = wait(&b, waiting).unwrap_err();
    assert!(error.to_string().contains(text), "{error}");
    wait(&c, free)?;
    assert_eq!(read(&c, &z), vec![7; 64]);
    for stream in [&a, &b] {
        stream.timeline().drain(stream.timeline().submitted(), None, || stream.refresh());
        assert!(stream.timeline().is_idle(), "its values are over");
    }
    assert_eq!(Arc::strong_count(&host.keep), 1, "what it kept is freed");
    assert_eq!(bench.driver.census().command_buffers, 0);
    drop((a, b));
    let again = stream(&device);
    assert_eq!(read(&again, &z), vec![7; 64], "a new stream works");
    drop((x, y, z, c, again, fail, device));
    Ok(())
}

#[test]
fn an_error_at_completion_poisons_frees_and_reports() -> Result<()> {
    for seed in 0..8 {
        for threads in [false, true] {
            let config = inline().inline(!threads);
            let bench = Bench::with(driver_config(seed), config.clone());
            fails_at_completion(&bench, None, "failed on purpose")?;
            bench.close();
            let bench = Bench::with(driver_config(seed), config.clone());
            let text = "MTLCommandBufferErrorPageFault";
            fails_at_completion(&bench, Some(FaultAction::Fail(3)), text)?;
            bench.close();
            let bench = Bench::with(driver_config(seed), config);
            let text = "MTLCommandBufferErrorOutOfMemory";
            fails_at_completion(&bench, Some(FaultAction::OutOfMemory), text)?;
            bench.close();
        }
    }
    Ok(())
}

#[test]
fn a_lost_device_ends_all_work_and_says_so() -> Result<()> {
    let bench = Bench::new(4);
    let devices = [bench.open(0), bench.open(1)];
    let (a, b) = (stream(&devices[0]), stream(&devices[1]));
    let (x, y) = (buffer(&devices[0], &a, 64), buffer(&devices[1], &b, 64));
    let value = submit(&a, &[fill(&x, 1)])?;
    bench.fail("commit", FaultAction::DeviceLost);
    let error = wait(&a, value).unwrap_err();
    assert!(matches!(error, Error::DeviceLost { .. }), "{error}");
    assert!(a.timeline().is_idle());
    assert!(matches!(submit(&a, &[fill(&x, 1)]), Err(Error::DeviceLost { .. })));
    assert!(matches!(
        devices[0].stream(&StreamDesc::default()).map(drop),
        Err(Error::DeviceLost { .. })
    ));
    let value = submit(&b, &[fill(&y, 5)])?;
    wait(&b, value)?;
    assert_eq!(read(&b, &y), vec![5; 64], "another device works");
    drop((x, y, a, b, devices));
    bench.backend.shutdown()?;
    assert_eq!(bench.driver.take_broken_rules(), []);
    assert!(bench.driver.census().is_nothing(), "{:?}", bench.driver.census());
    Ok(())
}

/// Makes one of each resource, runs everything, and ends. Faults may strike anywhere.
fn life(bench: &Bench) -> Result<()> {
    let device = bench.backend.open(DeviceId::new(BackendKind::Mps, 0))?;
    let a = device.stream(&StreamDesc::default())?;
    let b = device.stream(&StreamDesc::default())?;
    let (x, y) = (try_buffer(&device, &a, 256)?, try_buffer(&device, &a, 256)?);
    let host = Host::new(vec![3; 256]);
    let value = submit(&a, &[host.up(&x), copy(&x, &y)])?;
    let mut ops = OpList::new();
    ops.push(&copy(&y, &x));
    ops.push(&host.down(&x));
    // SAFETY: the buffers and the host memory outlive the launches.
    let graph = unsafe { device.instantiate(Plan::new(ops)) }?;
    let last =
        submit(&b, &[Op::Wait(a.timeline().at(value)), Op::Graph(&graph), Op::Graph(&graph)])?;
    let outcome = wait(&b, last).and(wait(&a, value));
    for stream in [&a, &b] {
        stream.timeline().drain(stream.timeline().submitted(), None, || stream.refresh());
    }
    outcome
}

#[test]
fn a_failing_driver_call_at_every_index_of_work_leaves_nothing_behind() -> Result<()> {
    let whole = Bench::new(1);
    life(&whole)?;
    let calls = whole.driver.machine().calls();
    whole.close();
    let mut failed = 0;
    for action in [FaultAction::Fail(3), FaultAction::OutOfMemory, FaultAction::DeviceLost] {
        for index in 0..calls {
            let bench = Bench::new(1);
            let from = bench.driver.machine().calls();
            if index < from {
                continue;
            }
            let rule = FaultRule::any(When::At(index), action.clone());
            bench.driver.machine().add_fault(rule);
            failed += u32::from(life(&bench).is_err());
            bench
                .backend
                .shutdown()
                .map_err(|e| Error::state(format!("{action:?} at {index}: {e}")))?;
            assert_eq!(bench.driver.take_broken_rules(), [], "{action:?} at {index}");
            assert!(
                bench.driver.census().is_nothing(),
                "{action:?} at {index}: {:?}",
                bench.driver.census()
            );
        }
    }
    assert!(failed > 30, "{failed}");
    Ok(())
}
