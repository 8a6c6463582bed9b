//! Every operator over a simulated device, with the race detector on.

use crate::device::{Bench, cases, choose};
use leasehold::{Context, DeviceId};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
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
    use leasehold_operators::{DType, Library, Tensor, ops};
    use leasehold_sim::cuda::{SimDriver as CudaDriver, SimDriverConfig as CudaDriverConfig};
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

/// The CPU, a simulated device, and simulated CUDA and Metal with the kernels' sources, where a
/// compiler is there.
fn devices() -> Vec<leasehold::Runtime> {
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_sim::cuda::{SimDriver as CudaDriver, SimDriverConfig as CudaDriverConfig};
    let (plain, cuda, metal) =
        (KernelRegistry::new(), KernelRegistry::new(), KernelRegistry::new());
    leasehold_operators::simulate(&plain).expect("the kernels");
    let cuda_there = leasehold_operators::emulate_cuda(&cuda).expect("the CUDA sources");
    let metal_there = leasehold_operators::emulate_mps(&metal).expect("the Metal sources");
    let machine = |kernels| MachineConfig::seed(11).kernels(kernels);
    let sim = SimBackend::new(machine(plain)).expect("a machine");
    let driver = CudaDriver::new(CudaDriverConfig::new(machine(cuda))).expect("a driver");
    let cuda = CudaBackend::with_ops(Arc::new(driver), CudaConfig::default()).expect("a backend");
    let driver = SimDriver::new(SimDriverConfig::new(machine(metal))).expect("a driver");
    let metal = MpsBackend::with_ops(Arc::new(driver), MpsConfig::default()).expect("a backend");
    let of = |backend: Arc<dyn leasehold::Backend>, id: &str| {
        let context = Context::with_backends(vec![backend]);
        context.runtime(id.parse().expect("a name")).expect("the device")
    };
    let mut devices = vec![Context::new().runtime(DeviceId::cpu(0)).expect("the device")];
    devices.push(of(Arc::new(sim), "sim:0"));
    devices.extend(cuda_there.then(|| of(Arc::new(cuda), "cuda:0")));
    devices.extend(metal_there.then(|| of(Arc::new(metal), "mps:0")));
    devices
}

/// Fails a stream by a check of these values, and returns what it found.
fn finding<T: leasehold::bytemuck::NoUninit>(
    runtime: &leasehold::Runtime,
    values: &[T],
    float: leasehold_operators::Float,
) -> (String, u64, f64) {
    use leasehold::{Error, View};
    use leasehold_operators::Checks;
    let stream = runtime.create_stream().expect("a stream");
    let values = runtime.upload(values).expect("values");
    stream.check_finite(values.slice(..5).view(), float, "the head").expect("a check");
    stream.check_finite(values.view(), float, format!("all {float:?}")).expect("a check");
    match stream.synchronize() {
        Err(Error::Check(found)) => (found.name.to_string(), found.index, found.value),
        other => panic!("{runtime:?}: {other:?}"),
    }
}

#[test]
fn values_that_are_not_finite_are_named_and_the_next_stream_works() {
    use half::{bf16, f16};
    use leasehold::Runtime;
    use leasehold_operators::Float::{Bf16, F16, F32, F64};
    let infinity = |at: usize, sign: f64| -> Vec<f64> {
        (0..20_000).map(|i| if i % 10_000 == at { sign * f64::INFINITY } else { 1.5 }).collect()
    };
    for runtime in devices() {
        let find = |runtime: &Runtime, at, sign| {
            let wide = infinity(at, sign);
            let single: Vec<f32> = wide.iter().map(|&v| v as f32).collect();
            let half: Vec<f16> = wide.iter().map(|&v| f16::from_f64(v)).collect();
            let brain: Vec<bf16> = wide.iter().map(|&v| bf16::from_f64(v)).collect();
            let bits = |half: &[f16]| half.iter().map(|v| v.to_bits()).collect::<Vec<u16>>();
            let brain_bits: Vec<u16> = brain.iter().map(|v| v.to_bits()).collect();
            [
                finding(runtime, &wide, F64),
                finding(runtime, &single, F32),
                finding(runtime, &bits(&half), F16),
                finding(runtime, &brain_bits, Bf16),
            ]
        };
        for (at, sign) in [(5, 1.0), (9_999, -1.0)] {
            for (found, float) in find(&runtime, at, sign).into_iter().zip([F64, F32, F16, Bf16]) {
                let wanted = (format!("all {float:?}"), at as u64, sign * f64::INFINITY);
                assert_eq!(found, wanted, "{runtime:?}");
            }
        }
        let (name, index, value) = finding(&runtime, &[1.0, 2.0, 3.0, 4.0, 5.0, f32::NAN], F32);
        assert_eq!((&*name, index, value.is_nan()), ("all F32", 5, true), "{runtime:?}");
    }
}

#[test]
fn a_graph_finds_the_launch_whose_values_are_not_finite() {
    use leasehold::{Error, View};
    use leasehold_operators::{Checks, Float};
    for runtime in devices() {
        let source = runtime.zeros::<f32>(9000).expect("values");
        let out = runtime.zeros::<f32>(9000).expect("values");
        let graph = runtime
            .record_graph(|r| {
                let between = r.alloc_array::<f32>(9000)?;
                r.stream().copy(between.view(), source.view())?;
                r.stream().check_finite(between.view(), Float::F32, "a step's result")?;
                r.stream().copy(out.view(), between.view())
            })
            .expect("a graph");
        let stream = runtime.create_stream().expect("a stream");
        let step = |stream: &leasehold::Stream, value: f32| {
            stream.fill(source.slice(7000..7001).view(), value)?;
            graph.launch_on(stream).map(drop)
        };
        for value in [1.0, 2.0, f32::INFINITY] {
            step(&stream, value).expect("a launch");
        }
        match stream.synchronize() {
            Err(Error::Check(found)) => {
                assert_eq!((&*found.name, found.index), ("a step's result", 7000), "{runtime:?}");
            }
            other => panic!("{runtime:?}: {other:?}"),
        }
        let next = runtime.create_stream().expect("a stream");
        next.fill(out.view(), 0.0f32).expect("a fill");
        step(&next, 3.0).expect("a launch");
        next.synchronize().expect("the next stream");
        let got = next.runtime().to_vec::<f32>(&out).expect("the result");
        assert_eq!(got[6999..7002], [0.0, 3.0, 0.0], "{runtime:?}");
    }
}

#[test]
fn a_check_of_wrong_values_is_refused() {
    use leasehold::View;
    use leasehold_operators::{Checks, Float};
    let [cpu, sim] = devices().try_into().unwrap_or_else(|mut all: Vec<_>| {
        all.truncate(2);
        all.try_into().expect("two devices")
    });
    let (bytes, strange) =
        (cpu.zeros::<u8>(16).expect("values"), sim.zeros::<f32>(4).expect("values"));
    let stream = cpu.create_stream().expect("a stream");
    for (values, what) in [
        (bytes.slice(..0).view(), "no values"),
        (bytes.slice(..6).view(), "half a value"),
        (bytes.slice(2..6).view(), "a value that is not aligned"),
        (strange.view(), "another device's values"),
    ] {
        let error = stream.check_finite(values, Float::F32, "x").expect_err(what);
        assert_eq!(error.kind(), "InvalidArgument", "{what}: {error}");
    }
    stream.synchronize().expect("a sound stream");
}
