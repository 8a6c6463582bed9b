//! Generated text against transformers' results in float64, eager and as a graph.

use super::{golden, model_dir, model_dirs, weights_of};
use leasehold::{BufferHandle, Context, DeviceId, Error, MemoryKind, Runtime};
use leasehold_llama::{Batch, Config, DType, Decoder, Mode, Model, Request, Sampling, generate};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

#[test]
fn tokens_and_logits_are_those_of_transformers() {
    same_as_transformers(&Context::new().runtime(DeviceId::cpu(0)).unwrap(), usize::MAX);
}

/// A device whose memory the host cannot access, with the race detector on.
#[test]
fn a_simulated_device_gives_the_same() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(5).kernels(kernels)).unwrap());
    let machine = backend.machine().clone();
    let context = Context::with_backends(vec![backend]);
    same_as_transformers(&context.runtime("sim:0".parse().unwrap()).unwrap(), usize::MAX);
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

/// Metal over the simulated driver, whose untracked memory races, with the race detector on.
#[test]
fn simulated_metal_gives_the_same() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate_mps(&kernels).unwrap();
    same_over_metal(kernels, usize::MAX);
}

/// As above. The kernels are the Metal sources, compiled for the host; their threads are slow, so
/// the generated texts are short.
#[test]
fn simulated_metal_gives_the_same_with_its_own_kernels() {
    let kernels = KernelRegistry::new();
    if leasehold_operators::emulate_mps(&kernels).unwrap() {
        same_over_metal(kernels, if std::env::var_os("LEASEHOLD_LONG").is_some() { 6 } else { 2 });
    }
}

fn same_over_metal(kernels: KernelRegistry, most: usize) {
    let machine = MachineConfig::seed(8).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let backend = MpsBackend::with_ops(driver.clone(), MpsConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    same_as_transformers(&context.runtime("mps:0".parse().unwrap()).unwrap(), most);
    let reports = driver.machine().take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
    context.shutdown().unwrap();
    assert_eq!(driver.take_broken_rules(), []);
    assert!(driver.census().is_nothing(), "{:?}", driver.census());
}

/// Weights that are NaN give no token, and the error names the place.
#[test]
fn no_token_is_chosen_where_no_logit_is_a_number() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let sim = Context::with_backends(vec![Arc::new(
        SimBackend::new(MachineConfig::seed(6).kernels(kernels)).unwrap(),
    )]);
    let runtimes = [
        Context::new().runtime(DeviceId::cpu(0)).unwrap(),
        sim.runtime("sim:0".parse().unwrap()).unwrap(),
    ];
    let from = model_dir("grouped-heads");
    let dir = tempfile::tempdir().unwrap();
    std::fs::copy(from.join("config.json"), dir.path().join("config.json")).unwrap();
    let mut bytes = std::fs::read(from.join("model.safetensors")).unwrap();
    let data = 8 + u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
    bytes[data..].fill(0xFF);
    std::fs::write(dir.path().join("model.safetensors"), bytes).unwrap();
    let config = Config::from_dir(dir.path()).unwrap();
    let weights = weights_of(dir.path(), &config).unwrap();
    for runtime in &runtimes {
        let model = Model::load(runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
        for mode in [Mode::Eager, Mode::Graph] {
            for temperature in [0.0, 1.0] {
                let sampling = Sampling { temperature, ..Sampling::default() };
                let request = Request {
                    prompt: &[1, 2],
                    tokens: 3,
                    mode,
                    sampling,
                    stop_at: &[],
                    check: false,
                };
                let text = generate(&model, &request, &mut |_| Ok(())).unwrap_err().to_string();
                assert!(text.contains("new token 1: no logit is a number"), "{text}");
            }
        }
    }
}

/// Compares all prompts of all models: the logits, and up to `most` new tokens.
fn same_as_transformers(runtime: &Runtime, most: usize) {
    for dir in model_dirs() {
        let config = Config::from_dir(&dir).unwrap();
        let weights = weights_of(&dir, &config).unwrap();
        let model = Model::load(runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
        for case in golden(&dir) {
            let run = |mode| {
                let request = Request {
                    prompt: &case.prompt_ids,
                    tokens: case.greedy.len().min(most),
                    mode,
                    sampling: Sampling::default(),
                    stop_at: &[],
                    check: false,
                };
                generate(&model, &request, &mut |_| Ok(())).unwrap()
            };
            let (eager, graph) = (run(Mode::Eager), run(Mode::Graph));
            let wanted = &case.greedy[..case.greedy.len().min(most)];
            assert_eq!(eager.ids, wanted, "{} {:?}", dir.display(), case.prompt_ids);
            assert_eq!(eager.ids, graph.ids);
            assert_eq!(eager.last_logits, graph.last_logits, "the modes agree to the bit");
            let (mut worst, mut error, mut norm) = (0f64, 0f64, 0f64);
            for (&ours, &theirs) in eager.last_logits.iter().zip(&case.last_logits) {
                let d = f64::from(ours) - theirs;
                worst = worst.max(d.abs());
                error += d * d;
                norm += theirs * theirs;
            }
            assert_eq!(eager.last_logits.len(), case.last_logits.len());
            assert!(worst < 2e-2, "{}: worst {worst}", dir.display());
            assert!(
                (error / norm).sqrt() < 1e-3,
                "{}: relative {}",
                dir.display(),
                (error / norm).sqrt()
            );
            let best = eager
                .last_logits
                .iter()
                .enumerate()
                .fold((0, f32::MIN), |b, (i, &x)| if x > b.1 { (i, x) } else { b });
            assert_eq!(Some(&(best.0 as u32)), case.argmax_per_position.last());
            assert_eq!(graph.driver_calls, 0);
            assert_eq!(graph.allocations, 0);
        }
    }
}

/// The logits after the prompt and after 23 steps, eager, replayed and beside other sequences.
/// Texts of some models cross the length that the model was trained with.
#[test]
fn the_logits_of_every_step_are_those_of_transformers() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let sim = SimBackend::new(MachineConfig::seed(9).kernels(kernels)).unwrap();
    let sim = Context::with_backends(vec![Arc::new(sim)]);
    let mut models = 0;
    for runtime in [
        Context::new().runtime(DeviceId::cpu(0)).unwrap(),
        sim.runtime("sim:0".parse().unwrap()).unwrap(),
    ] {
        for dir in model_dirs() {
            let cases = golden(&dir);
            if cases.iter().any(|case| case.final_logits.is_none()) {
                continue;
            }
            models += 1;
            let config = Config::from_dir(&dir).unwrap();
            let weights = weights_of(&dir, &config).unwrap();
            let model =
                Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
            let near = |what: &str, ours: &[f32], theirs: &[f64]| {
                let largest = theirs.iter().fold(0.0, |m: f64, x| m.max(x.abs()));
                let pairs = ours.iter().zip(theirs);
                let worst = pairs.fold(0.0, |m: f64, (&a, b)| m.max((f64::from(a) - b).abs()));
                assert!(worst <= 1e-5 * largest, "{} {what}: {worst}", dir.display());
            };
            let positions = config.context();
            let mut batch = Batch::new(&model, cases.len(), positions, Mode::Graph).unwrap();
            let mut sequences = Vec::new();
            for case in &cases {
                let steps = case.greedy.len() - 1;
                let last = case.final_logits.as_ref().unwrap();
                let mut decoder =
                    Decoder::new(&model, positions, steps + 1, Sampling::default()).unwrap();
                let graph = decoder.record().unwrap();
                for replayed in [false, true] {
                    decoder.prefill(&case.prompt_ids).unwrap();
                    near("prompt", &decoder.logits().unwrap(), &case.last_logits);
                    for _ in 0..steps {
                        match replayed {
                            true => decoder.launch(&graph).unwrap(),
                            false => decoder.step().unwrap(),
                        };
                    }
                    near("steps", &decoder.logits().unwrap(), last);
                }
                let id = batch.add(&case.prompt_ids, Sampling::default()).unwrap();
                sequences.push((id, case, Vec::new()));
            }
            while !batch.is_empty() {
                for (id, drawn) in batch.step().unwrap() {
                    let (_, case, text) = sequences.iter_mut().find(|s| s.0 == id).unwrap();
                    text.push(drawn.unwrap().token);
                    if text.len() == case.greedy.len() {
                        assert_eq!(*text, case.greedy, "{}", dir.display());
                        let last = case.final_logits.as_ref().unwrap();
                        near("batch", &batch.logits(id).unwrap(), last);
                        batch.remove(id).unwrap();
                    }
                }
            }
        }
    }
    assert_eq!(models, 2 * 7);
}

/// The host reads the ring of tokens while steps write it. No lease of it may be had by handle.
#[test]
fn a_guessed_handle_leads_to_no_ring_of_tokens() {
    const RING: u64 = 1234;
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let sim = SimBackend::new(MachineConfig::seed(7).kernels(kernels)).unwrap();
    let sim = Context::with_backends(vec![Arc::new(sim)]);
    let dir = model_dir("grouped-heads");
    let config = Config::from_dir(&dir).unwrap();
    let weights = weights_of(&dir, &config).unwrap();
    for runtime in [
        Context::new().runtime(DeviceId::cpu(0)).unwrap(),
        sim.runtime("sim:0".parse().unwrap()).unwrap(),
    ] {
        let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
        let pinned = runtime.raw_device().memory(MemoryKind::Pinned).unwrap();
        // Handles of all rows that the decoder may take.
        let mut probes = Vec::new();
        for _ in 0..200 {
            probes.push(runtime.alloc(4 * RING).unwrap());
            probes.push(runtime.alloc_pinned(4 * RING).unwrap());
        }
        let bits: Vec<u64> = probes.iter().map(|p| p.handle().to_bits().get()).collect();
        drop(probes);
        let mut decoder = Decoder::new(&model, 16, RING as usize, Sampling::default()).unwrap();
        let (mut rings, mut hidden) = (0, 0);
        for guess in bits.iter().flat_map(|b| (1..6u64).map(move |g| b + (g << 32))) {
            let guess = BufferHandle::from_bits(guess).unwrap();
            for pool in [runtime.allocator(), pinned] {
                match pool.lease(guess) {
                    Ok(found) => rings += u32::from(found.len() == 4 * RING),
                    Err(Error::Occupied { .. }) => hidden += 1,
                    Err(_) => {}
                }
            }
        }
        assert_eq!(rings, 0, "{}", runtime.device());
        assert!(hidden > 0, "{}: it is there", runtime.device());
        let point = decoder.prefill(&[1, 2]).unwrap();
        decoder.token(0, point).unwrap();
    }
}
