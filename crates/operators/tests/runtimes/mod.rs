//! Every operator over a simulated device, with the race detector on.

use crate::device::{Bench, cases};
use leasehold::{Context, DeviceId};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

#[test]
fn every_operator_over_a_simulated_device() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).expect("the kernels");
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(3).kernels(kernels)).expect("a machine"));
    let machine = backend.machine().clone();
    let context = Context::with_backends(vec![backend]);
    let id: DeviceId = "sim:0".parse().expect("a name");
    let runtime = context.runtime(id).expect("the device");
    let mut bench = Bench::new(&runtime).expect("the library");
    cases::all(&mut bench, false);
    assert_eq!(bench.tallies.len(), leasehold_operators::kernels::cpu::KERNELS.len(), "a kernel has no case");
    for (kernel, tally) in &bench.tallies {
        assert!(tally.failures.is_empty(), "{kernel}: {:?}", &tally.failures[..tally.failures.len().min(3)]);
    }
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{reports:?}");
}
