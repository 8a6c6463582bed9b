//! The vendor's own objects under a runtime.

use crate::common::*;
use leasehold::backend::Backend;
use leasehold::cuda::{CudaConfig, raw_context, raw_pointer, raw_stream};
use leasehold::{BackendKind, Context, DeviceId, View};
use leasehold_sim::cuda::SimDriverConfig;
use std::sync::Arc;

#[test]
fn other_libraries_get_the_drivers_own_objects() {
    let simulated =
        leasehold_sim::cuda::backend(SimDriverConfig::default(), CudaConfig::default()).unwrap();
    let cuda: Arc<dyn Backend> = Arc::new(simulated);
    let runtime =
        Context::with_backends(vec![cuda]).runtime(DeviceId::new(BackendKind::Cuda, 0)).unwrap();
    let x = runtime.upload(&[1u32; 64]).unwrap();
    assert_eq!(raw_pointer(&runtime, x.slice(4..).view()).unwrap(), x.addr() + 16);
    assert!(raw_context(&runtime).unwrap() != 0 && raw_stream(runtime.stream()).unwrap() != 0);
    let other = runtime.create_stream().unwrap();
    assert_ne!(raw_stream(&other).unwrap(), raw_stream(runtime.stream()).unwrap());
    let cpu = crate::common::runtime();
    let own = cpu.alloc(16).unwrap();
    assert_eq!(
        kind(raw_pointer(&runtime, own.view())),
        "InvalidArgument",
        "memory of another device"
    );
    assert_eq!(
        [
            kind(raw_context(&cpu)),
            kind(raw_stream(cpu.stream())),
            kind(raw_pointer(&cpu, own.view()))
        ],
        ["InvalidArgument"; 3]
    );
    runtime
        .record_graph(|r| {
            assert_eq!(
                kind(raw_pointer(r, r.alloc(16)?.view())),
                "Recording",
                "it has no address yet"
            );
            Ok(())
        })
        .unwrap();
}
