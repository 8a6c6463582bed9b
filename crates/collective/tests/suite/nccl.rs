//! NCCL where there is no GPU: errors that say what to do.

use leasehold::{DeviceId, Error, Runtime};
use leasehold_collective::driver::{CollectiveOps, Nccl};
use leasehold_collective::{CommConfig, World};
use std::sync::Arc;

#[test]
fn a_missing_library_is_named_with_its_cure() {
    match Nccl::load() {
        Ok(library) => assert!(library.name().starts_with("NCCL 2."), "{library:?}"),
        Err(Error::Unavailable(text)) => {
            assert!(text.contains("LEASEHOLD_NCCL"), "{text}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn another_device_is_refused() {
    let Ok(library) = Nccl::load() else { return };
    let world = World::threads(1).unwrap().remove(0);
    let runtime = Runtime::open(DeviceId::cpu(0)).unwrap();
    let config = CommConfig::new("tp").ops(Arc::new(library));
    assert!(matches!(world.comm(&runtime, &config), Err(Error::Unsupported(_))));
}
