//! The execution manager and the devices: life cycle, names, architecture.

use super::bench::*;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Index};
use leasehold_hal::{Device, DeviceId};
use leasehold_mps::driver::ops::MpsSlowOps;
use leasehold_mps::manager::buffer::BufferManager;
use leasehold_mps::manager::command_queue::CommandQueueManager;
use leasehold_mps::manager::compute_pipeline_state::ComputePipelineStateManager;
use leasehold_mps::manager::device::DeviceManager;
use leasehold_mps::manager::event::EventManager;
use leasehold_mps::manager::fence::FenceManager;
use leasehold_mps::manager::heap::HeapManager;
use leasehold_mps::manager::library::LibraryManager;
use leasehold_mps::{MpsConfig, MpsExecutionManager};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};

#[test]
fn the_execution_manager_is_configured_once_and_ends_once() {
    let bench = Bench::new();
    assert!(bench.manager.is_configured() && !bench.manager.is_configured_for_test());
    let again = bench.manager.configure(bench.driver.clone(), MpsConfig::default());
    assert!(matches!(again, Err(Error::InvalidState(_))), "{again:?}");
    bench.manager.shutdown().unwrap();
    bench.manager.shutdown().unwrap();
    assert!(!bench.manager.is_configured());
    let again = bench.manager.configure(bench.driver.clone(), MpsConfig::default());
    assert!(matches!(again, Err(Error::InvalidState(_))), "{again:?}");
    assert!(bench.manager.devices().describe().unwrap().is_empty());
    bench.manager.devices().open(mps(0)).unwrap_err();
    bench.close();
    // A manager that was never configured.
    let manager = MpsExecutionManager::new();
    assert!(matches!(manager.devices().open(mps(0)), Err(Error::InvalidState(_))));
    manager.shutdown().unwrap();
    for config in [
        MpsConfig::default().queues(0),
        MpsConfig::default().queues(9),
        MpsConfig::default().command_buffers(0),
        MpsConfig::default().command_buffers(5000),
    ] {
        let refused = MpsExecutionManager::new().configure(driver(), config);
        assert!(matches!(refused, Err(Error::InvalidArgument(_))), "{refused:?}");
    }
}

#[test]
fn a_device_is_opened_once_and_shared() {
    let bench = Bench::new();
    let devices = bench.manager.devices();
    assert_eq!(devices.device_count(), 2);
    for unknown in [mps(2), DeviceId::cpu(0), DeviceId::cuda(0)] {
        assert!(matches!(devices.open(unknown), Err(Error::NotFound(_))), "{unknown}");
    }
    let handle = devices.ensure_alive(mps(1)).unwrap();
    let (a, b) = (devices.open(mps(1)).unwrap(), devices.get_state(handle).unwrap());
    assert!(a.same(&b) && a.handle() == handle && a.id() == mps(1));
    assert_eq!((devices.stats().live, devices.stats().created), (1, 1));
    devices.release(handle).unwrap();
    assert!(devices.is_alive(handle), "other holders are untouched");
    drop((a, b));
    assert!(!devices.is_alive(handle));
    assert_eq!(devices.get_state(handle).map(drop).unwrap_err().kind(), "StaleHandle");
    let second = devices.ensure_alive(mps(1)).unwrap();
    assert_ne!(second, handle);
    bench.close();
}

#[test]
fn a_device_tells_its_architecture() {
    let bench = Bench::new();
    let device = bench.open();
    let info = device.info();
    assert_eq!(info.arch.first().unwrap(), "mps/apple9");
    assert_eq!(info.arch.last().unwrap(), "mps");
    let properties = device.properties();
    assert!(properties.unified_memory && properties.metal_family == 3);
    assert_eq!(info.memory.total, properties.recommended_working_set);
    let detail = |label: &str| {
        let found = info.details.iter().find(|(l, _)| l == label);
        found.map(|(_, value)| value.as_str())
    };
    assert_eq!(detail("unified memory"), Some("yes"));
    assert_eq!(detail("Apple family"), Some("9"));
    assert_eq!(detail("architecture"), Some("applegpu_g15s"));
    let limits = device.limits();
    assert_eq!((limits.buffer, limits.block_threads), (properties.max_buffer, 1024));
    assert_eq!(limits.shared, properties.max_threadgroup_memory);
    let listed = bench.manager.devices().describe().unwrap();
    assert_eq!(listed[0].arch, info.arch);
    assert_ne!(listed[0].uuid, listed[1].uuid);
    let before = device.info().memory.free;
    let buffer = device.buffers().acquire(1 << 20, HEAP.options).unwrap();
    bench.manager.devices().release(device.handle()).unwrap();
    drop((buffer, device));
    assert_eq!(bench.open().info().memory.free, before, "the device's memory was given back");
    bench.close();
    // A virtual machine's device has a null architecture.
    let mut config = SimDriverConfig::default();
    (config.architecture, config.paravirtual) = (None, true);
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let manager = MpsExecutionManager::new();
    manager.configure_for_test(driver).unwrap();
    let device = manager.devices().open(mps(0)).unwrap();
    assert!(device.info().details.contains(&("architecture".to_owned(), "unknown".to_owned())));
    assert!(!device.properties().has_safe_indirect());
}

#[test]
fn a_driver_with_implausible_answers_is_refused() {
    let mut config = SimDriverConfig::default();
    config.apple_family = 1000;
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let refused = MpsExecutionManager::new().configure(driver.clone(), MpsConfig::default());
    assert!(matches!(refused, Err(Error::Unavailable(_))), "{refused:?}");
    assert!(driver.census().is_nothing());
}

#[test]
fn each_manager_can_be_configured_for_a_test() {
    let sim = driver();
    let ops = || -> Arc<dyn MpsSlowOps> { sim.clone() };
    let manager = MpsExecutionManager::new();
    manager.configure_for_test(ops()).unwrap();
    assert!(manager.is_configured_for_test());
    manager.shutdown().unwrap();
    let devices = DeviceManager::new();
    assert!(!devices.is_configured_for_test());
    devices.configure_for_test(ops()).unwrap();
    assert!(devices.is_configured_for_test() && devices.device_count() == 2);
    devices.shutdown().unwrap();
    let queues = CommandQueueManager::configure_for_test(ops(), mps(1)).unwrap();
    queues.ensure_alive(Index::new(0)).unwrap();
    let libraries = LibraryManager::configure_for_test(ops(), mps(1)).unwrap();
    libraries.ensure_alive(SOURCE, &options()).unwrap();
    let pipelines = ComputePipelineStateManager::configure_for_test(ops(), mps(1)).unwrap();
    let heaps = HeapManager::configure_for_test(ops(), mps(1)).unwrap();
    heaps.ensure_alive(Index::new(0), &HEAP).unwrap();
    let buffers = BufferManager::configure_for_test(ops(), mps(1)).unwrap();
    buffers.ensure_alive(64, HEAP.options).unwrap();
    let events = EventManager::configure_for_test(ops(), mps(1)).unwrap();
    events.ensure_alive(Default::default()).unwrap();
    let fences = FenceManager::configure_for_test(ops(), mps(1)).unwrap();
    fences.ensure_alive().unwrap();
    assert!(queues.is_configured_for_test() && libraries.is_configured_for_test());
    assert!(pipelines.is_configured_for_test() && heaps.is_configured_for_test());
    assert!(buffers.is_configured_for_test() && events.is_configured_for_test());
    assert!(fences.is_configured_for_test());
    queues.shutdown().unwrap();
    libraries.shutdown().unwrap();
    pipelines.shutdown().unwrap();
    heaps.shutdown().unwrap();
    buffers.shutdown().unwrap();
    events.shutdown().unwrap();
    fences.shutdown().unwrap();
    drop((queues, libraries, pipelines, heaps, buffers, events, fences));
    assert!(sim.census().is_nothing(), "{:?}", sim.census());
    let missing = FenceManager::configure_for_test(ops(), mps(2));
    assert!(matches!(missing, Err(Error::NotFound(_))));
}
