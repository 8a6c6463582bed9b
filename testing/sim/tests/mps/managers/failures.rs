//! Shutdowns with leases, and driver calls that fail.

use super::bench::*;
use leasehold_core::{Index, Result};
use leasehold_mps::manager::device::DeviceState;
use leasehold_mps::manager::event::EventKind;
use leasehold_mps::{MpsConfig, MpsExecutionManager};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, When};
use std::any::Any;

/// A lease of each kind of resource of a device.
fn leases(device: &DeviceState) -> Result<Vec<(&'static str, Box<dyn Any>)>> {
    let library = device.libraries().acquire(SOURCE, &options())?;
    let pipeline = device.libraries().pipeline(&library, "bump", &plain())?;
    let heap = device.heaps().acquire(&HEAP)?;
    let placed = device.buffers().place(&heap, 1000, Some(256))?;
    Ok(vec![
        ("command queue", Box::new(device.command_queues().acquire(Index::new(0))?)),
        ("library", Box::new(library)),
        ("compute pipeline state", Box::new(pipeline)),
        ("heap", Box::new(heap)),
        ("buffer", Box::new(placed)),
        ("buffer", Box::new(device.buffers().acquire(64, HEAP.options)?)),
        ("event", Box::new(device.events().acquire(EventKind::Shared)?)),
        ("event", Box::new(device.events().acquire(EventKind::Device)?)),
        ("fence", Box::new(device.fences().acquire()?)),
    ])
}

#[test]
fn a_live_lease_refuses_the_shutdown_and_nothing_changes() {
    let bench = Bench::new();
    let kinds = leases(&bench.open()).unwrap().len();
    for kept in 0..kinds {
        let device = bench.open();
        let mut all = leases(&device).unwrap();
        let (kind, lease) = all.swap_remove(kept);
        drop(all);
        drop(device);
        let before = bench.driver.census();
        assert_eq!(refused(bench.manager.shutdown()), kind);
        assert_eq!(bench.driver.census(), before);
        assert!(bench.manager.is_configured());
        drop(lease);
    }
    let device = bench.open();
    assert_eq!(refused(bench.manager.shutdown()), "device");
    drop(device);
    // The managers' own leases refuse no shutdown.
    let device = bench.open();
    device.command_queues().ensure_alive(Index::new(0)).unwrap();
    let library = device.libraries().acquire(SOURCE, &options()).unwrap();
    device.libraries().ensure_pipeline_alive(&library, "bump", &plain()).unwrap();
    device.heaps().ensure_alive(Index::new(0), &HEAP).unwrap();
    device.buffers().ensure_alive(64, HEAP.options).unwrap();
    device.events().ensure_alive(EventKind::Shared).unwrap();
    device.fences().ensure_alive().unwrap();
    let mut names = Vec::new();
    device.pools(&mut |name, stats| names.push((name, stats.live)));
    for (kind, _) in &leases(&device).unwrap() {
        assert!(names.iter().any(|(name, live)| name == kind && *live > 0), "{kind}: {names:?}");
    }
    drop((library, device));
    bench.close();
}

#[test]
fn a_weak_lease_refuses_the_shutdown() {
    let bench = Bench::new();
    let device = bench.open();
    let weak = device.fences().acquire().unwrap().downgrade();
    drop(device);
    assert_eq!(refused(bench.manager.shutdown()), "fence");
    drop(weak);
    bench.close();
}

/// Configures, makes every resource alive, and ends.
fn life(driver: &leasehold_core::sync::Arc<leasehold_sim::mps::SimDriver>) -> Result<()> {
    let manager = MpsExecutionManager::new();
    manager.configure(driver.clone(), MpsConfig::default().queues(2))?;
    for ordinal in 0..2 {
        let handle = manager.devices().ensure_alive(mps(ordinal))?;
        let device = manager.devices().get_state(handle)?;
        device.command_queues().ensure_alive(Index::new(0))?;
        device.command_queues().ensure_alive(Index::new(1))?;
        let library = device.libraries().ensure_alive(SOURCE, &options())?;
        let library = device.libraries().get_state(library)?;
        device.libraries().ensure_pipeline_alive(&library, "bump", &plain())?;
        library.function_names()?;
        let heap = device.heaps().ensure_alive(Index::new(0), &HEAP)?;
        let heap = device.heaps().get_state(heap)?;
        drop(device.buffers().place(&heap, 1000, Some(0))?);
        device.buffers().ensure_alive(64, HEAP.options)?;
        device.events().ensure_alive(EventKind::Shared)?;
        device.events().ensure_alive(EventKind::Device)?;
        device.fences().ensure_alive()?;
    }
    manager.shutdown()
}

#[test]
fn a_failing_driver_call_at_every_index_leaves_nothing_behind() {
    let whole = driver();
    life(&whole).unwrap();
    let calls = whole.machine().calls();
    assert!(calls > 30, "{calls}");
    for action in [FaultAction::Fail(9), FaultAction::OutOfMemory, FaultAction::DeviceLost] {
        let mut failed = 0;
        for index in 0..calls {
            let driver = driver();
            let rule = FaultRule::any(When::At(index), action.clone());
            driver.machine().set_faults(FaultPlan::none().with(rule));
            failed += u64::from(life(&driver).is_err());
            assert!(driver.census().is_nothing(), "{action:?} at {index}: {:?}", driver.census());
            assert_eq!(driver.take_broken_rules(), [], "{action:?} at {index}");
            if action != FaultAction::DeviceLost {
                assert!(driver.machine().memory_in_use().is_nothing(), "{action:?} at {index}");
                assert_eq!(driver.machine().objects(), Default::default(), "at {index}");
            }
        }
        assert!(failed > 20, "{action:?}: {failed} of {calls}");
    }
}

#[test]
fn a_failed_creation_is_tried_again() {
    let bench = Bench::new();
    let device = bench.open();
    let machine = bench.driver.machine();
    let fail = |call| machine.add_fault(FaultRule::on(call, When::Once, FaultAction::Fail(9)));
    fail("newCommandQueueWithMaxCommandBufferCount");
    device.command_queues().acquire(Index::new(0)).unwrap_err();
    drop(device.command_queues().acquire(Index::new(0)).unwrap());
    fail("newLibraryWithSource");
    device.libraries().acquire(SOURCE, &options()).unwrap_err();
    let library = device.libraries().acquire(SOURCE, &options()).unwrap();
    fail("newComputePipelineStateWithDescriptor");
    device.libraries().pipeline(&library, "bump", &plain()).unwrap_err();
    drop(device.libraries().pipeline(&library, "bump", &plain()).unwrap());
    drop((library, device));
    bench.close();
}
