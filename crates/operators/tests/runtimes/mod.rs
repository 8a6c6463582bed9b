//! Every operator over a simulated device, with the race detector on.

use crate::device::{Bench, cases, choose};
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

#[test]
fn a_quick_choice_has_a_few_cases_of_every_kernel() {
    let mut listing = Bench::listing();
    cases::all(&mut listing, false);
    let (all, quick) = (choose(&listing.catalogue, &[], false), choose(&listing.catalogue, &[], true));
    assert!(all.iter().all(|(name, places)| places.len() == listing.catalogue[name].len()), "{all:?}");
    assert_eq!(quick.len(), leasehold_operators::kernels::cpu::KERNELS.len(), "{quick:?}");
    for (name, places) in &quick {
        assert!((1..=5).contains(&places.len()), "{name}: {places:?}");
        let odd = |&&at: &&usize| !listing.catalogue[name][at].is_multiple_of(16);
        assert!(places.iter().find(odd).is_some(), "{name}: only round sizes");
    }
    let some = choose(&listing.catalogue, &["rope".to_owned(), "softmax".to_owned()], true);
    assert_eq!(some.keys().copied().collect::<Vec<_>>(), ["rope", "rope_append", "softmax"]);
    assert!(listing.tallies.is_empty(), "a listing launches nothing");
}

#[test]
fn what_is_chosen_is_what_is_compared() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).expect("the kernels");
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(5).kernels(kernels)).expect("a machine"));
    let runtime = Context::with_backends(vec![backend]).runtime("sim:0".parse().expect("a name")).expect("the device");
    let mut listing = Bench::listing();
    cases::all(&mut listing, false);
    let choice = choose(&listing.catalogue, &[], true);
    let mut bench = Bench::new(&runtime).expect("the library").only(choice.clone());
    cases::all(&mut bench, false);
    let compared: Vec<_> = bench.tallies.iter().map(|(&name, t)| (name, t.cases, t.failures.clone())).collect();
    let chosen: Vec<_> = choice.iter().map(|(&name, places)| (name, places.len(), Vec::new())).collect();
    assert_eq!(compared, chosen);
}

#[test]
fn a_matrix_of_more_bytes_than_there_are_numbers_is_refused() {
    use leasehold_operators::{DType, Tensor};
    let runtime = Context::new().runtime(DeviceId::cpu(0)).expect("the device");
    let buffer = runtime.alloc(16).expect("memory");
    for (rows, cols) in [(1 << 31, 1 << 31), (u32::MAX, u32::MAX), (1 << 30, 1)] {
        let error = Tensor::new(buffer.clone(), 0, DType::F32, rows, cols).expect_err("2^64 bytes are none in 64 bits");
        assert_eq!(error.kind(), "InvalidArgument");
    }
    assert_eq!(Tensor::alloc(&runtime, DType::F32, 1 << 31, 1 << 31).expect_err("as above").kind(), "InvalidArgument");
}
