//! Every operator over a simulated device, with the race detector on.

use crate::device::{Bench, cases, choose};
use leasehold::{Context, DeviceId};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_mps_sim::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

#[test]
fn every_operator_over_a_simulated_device() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).expect("the kernels");
    let backend =
        Arc::new(SimBackend::new(MachineConfig::seed(3).kernels(kernels)).expect("a machine"));
    let machine = backend.machine().clone();
    let context = Context::with_backends(vec![backend]);
    let id: DeviceId = "sim:0".parse().expect("a name");
    let runtime = context.runtime(id).expect("the device");
    let mut bench = Bench::new(&runtime).expect("the library");
    cases::all(&mut bench, false);
    assert_eq!(
        bench.tallies.len(),
        leasehold_operators::kernels::cpu::KERNELS.len(),
        "a kernel has no case"
    );
    for (kernel, tally) in &bench.tallies {
        assert!(
            tally.failures.is_empty(),
            "{kernel}: {:?}",
            &tally.failures[..tally.failures.len().min(3)]
        );
    }
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{reports:?}");
}

/// The Metal sources as the kernels of simulated Metal, with the race detector on: a few cases of
/// each.
#[test]
fn every_operator_over_simulated_metal() {
    let kernels = KernelRegistry::new();
    if !leasehold_operators::emulate_mps(&kernels).expect("the Metal sources") {
        return;
    }
    let machine = MachineConfig::seed(4).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).expect("a driver"));
    let backend = MpsBackend::with_ops(driver.clone(), MpsConfig::default()).expect("a backend");
    let context = Context::with_backends(vec![Arc::new(backend)]);
    let runtime = context.runtime("mps:0".parse().expect("a name")).expect("the device");
    let mut listing = Bench::listing();
    cases::all(&mut listing, false);
    let choice = choose(&listing.catalogue, &[], true);
    let mut bench = Bench::new(&runtime).expect("the library").only(choice);
    cases::all(&mut bench, false);
    assert_eq!(bench.tallies.len(), leasehold_operators::kernels::cpu::KERNELS.len());
    for (kernel, tally) in &bench.tallies {
        assert!(tally.failures.is_empty(), "{kernel}: {:?}", tally.failures);
    }
    let reports = driver.machine().take_reports();
    assert!(reports.is_empty(), "{reports:?}");
}

#[test]
fn a_quick_choice_has_a_few_cases_of_every_kernel() {
    let mut listing = Bench::listing();
    cases::all(&mut listing, false);
    let (all, quick) =
        (choose(&listing.catalogue, &[], false), choose(&listing.catalogue, &[], true));
    assert!(
        all.iter().all(|(name, places)| places.len() == listing.catalogue[name].len()),
        "{all:?}"
    );
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
    let backend =
        Arc::new(SimBackend::new(MachineConfig::seed(5).kernels(kernels)).expect("a machine"));
    let runtime = Context::with_backends(vec![backend])
        .runtime("sim:0".parse().expect("a name"))
        .expect("the device");
    let mut listing = Bench::listing();
    cases::all(&mut listing, false);
    let choice = choose(&listing.catalogue, &[], true);
    let mut bench = Bench::new(&runtime).expect("the library").only(choice.clone());
    cases::all(&mut bench, false);
    let compared: Vec<_> =
        bench.tallies.iter().map(|(&name, t)| (name, t.cases, t.failures.clone())).collect();
    let chosen: Vec<_> =
        choice.iter().map(|(&name, places)| (name, places.len(), Vec::new())).collect();
    assert_eq!(compared, chosen);
}

#[test]
fn a_matrix_of_more_bytes_than_there_are_numbers_is_refused() {
    use leasehold_operators::{DType, Tensor};
    let runtime = Context::new().runtime(DeviceId::cpu(0)).expect("the device");
    let buffer = runtime.alloc(16).expect("memory");
    for (rows, cols) in [(1 << 31, 1 << 31), (u32::MAX, u32::MAX), (1 << 30, 1)] {
        let error = Tensor::new(&buffer, DType::F32, rows, cols)
            .expect_err("2^64 bytes are none in 64 bits");
        assert_eq!(error.kind(), "InvalidArgument");
    }
    assert_eq!(
        Tensor::alloc(&runtime, DType::F32, 1 << 31, 1 << 31).expect_err("as above").kind(),
        "InvalidArgument"
    );
}

/// Kernels write rows and leave the gaps between them. The gaps keep their contents, also in a
/// graph, whose optimiser may only omit repeated work.
#[test]
fn gaps_of_padded_rows_are_the_same_in_a_graph() {
    use leasehold::ops::Pattern;
    use leasehold::{Runtime, View};
    use leasehold_operators::kernels::cpu::elementwise::CopyParams;
    use leasehold_operators::{BufferPart, Library, Operator};
    let cpu = Context::new().runtime(DeviceId::cpu(0)).expect("the device");
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).expect("the kernels");
    let backend =
        Arc::new(SimBackend::new(MachineConfig::seed(7).kernels(kernels)).expect("a machine"));
    let simulated = Context::with_backends(vec![backend])
        .runtime("sim:0".parse().expect("a name"))
        .expect("the device");
    for runtime in [cpu, simulated] {
        let library = Library::of(&runtime).expect("the library");
        let x = runtime.upload(&[7u32; 6]).expect("rows");
        let y = runtime.alloc(3 * 16).expect("padded rows");
        let params = CopyParams { rows: 3, bytes: 8, from_pitch: 8, to_pitch: 16 };
        let parts = [Some(BufferPart::from(&x)), Some(y.part(..40).expect("rows").into())];
        let copy = Operator::new(&library, "copy_2d", &params, &parts).expect("an operator");
        let run = |runtime: &Runtime| {
            // The second fill is not a repetition of the first one, because rows were written in
            // between.
            for pattern in [1, 1, 2] {
                runtime.stream().fill(y.view(), Pattern::U32(pattern))?;
                runtime.add_graph_operator(&copy)?;
            }
            runtime.stream().fill(y.part(40..48)?, 3u32)
        };
        run(&runtime).expect("eager work");
        let eager = runtime.to_vec::<u32>(&y).expect("the rows");
        assert_eq!(eager, [7, 7, 2, 2, 7, 7, 2, 2, 7, 7, 3, 3]);
        let graph = runtime.record_graph(run).expect("a graph");
        for launch in 0..2 {
            runtime.stream().fill(y.view(), 9u32).expect("other contents");
            graph.launch().expect("a launch");
            assert_eq!(
                runtime.to_vec::<u32>(&y).expect("the rows"),
                eager,
                "{runtime:?}, launch {launch}"
            );
        }
    }
}

#[test]
fn an_operator_says_what_computes_it() {
    use leasehold::Runtime;
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_cuda_sim::{SimDriver as CudaDriver, SimDriverConfig as CudaDriverConfig};
    use leasehold_operators::{DType, Library, Tensor, ops};
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).expect("the kernels");
    let machine = MachineConfig::seed(9).kernels(kernels);
    let driver = CudaDriver::new(CudaDriverConfig::new(machine)).expect("a driver");
    let backend =
        CudaBackend::with_ops(Arc::new(driver), CudaConfig::default()).expect("a backend");
    let cuda = Context::with_backends(vec![Arc::new(backend)])
        .runtime("cuda:0".parse().expect("a name"))
        .expect("the device");
    let cpu = Context::new().runtime(DeviceId::cpu(0)).expect("the device");
    let product = |runtime: &Runtime, dtype, rows| {
        let library = Library::of(runtime).expect("the library");
        let tensor = |rows, cols| Tensor::alloc(runtime, dtype, rows, cols).expect("memory");
        let (x, weight, y) = (tensor(rows, 32), tensor(24, 32), tensor(rows, 24));
        let to = ops::Projection { weight: &weight, bias: None, y: &y };
        let product = ops::linear(&library, &x, None, to).expect("an operator");
        (product.kernel_name(), product.computed_by(), product.shape())
    };
    for (runtime, dtype, rows, entry) in [
        (&cuda, DType::Bf16, 1, "linear"),
        (&cuda, DType::Bf16, 2, "linear_tiles"),
        (&cuda, DType::F16, 40, "linear_tiles"),
        (&cuda, DType::F32, 40, "linear"),
        (&cpu, DType::Bf16, 40, "linear"),
    ] {
        let shape = format!("m {rows}, k 32, n 24");
        assert_eq!(product(runtime, dtype, rows), ("linear", entry, shape));
    }
    let library = Library::of(&cpu).expect("the library");
    let tensor = |cols| Tensor::alloc(&cpu, DType::F32, 2, cols).expect("memory");
    let weights = [5, 3, 4].map(|n| Tensor::alloc(&cpu, DType::F32, n, 8).expect("memory"));
    let outputs = [5, 3, 4].map(tensor);
    let to = std::array::from_fn(|i| ops::Projection {
        weight: &weights[i],
        bias: None,
        y: &outputs[i],
    });
    let three = ops::linear3(&library, &tensor(8), None, to).expect("an operator");
    assert_eq!(three.shape(), "m 2, k 8, n 5 + 3 + 4");
}
