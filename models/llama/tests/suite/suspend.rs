//! Models whose weights leave the device between requests.

use super::{golden, model_dir, weights_of};
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::{Context, DeviceId, Error, Runtime};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_llama::{Batch, Config, DType, Decoder, Mode, Model, Sampling, Weights};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, Monitor, SimBackend};
use std::path::Path;
use std::sync::Arc;

const MODEL: &str = "grouped-heads";

fn load(runtime: &Runtime, dir: &Path) -> Model {
    let config = Config::from_dir(dir).unwrap();
    let weights: Weights = weights_of(dir, &config).unwrap();
    Model::load_suspendable(runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap()
}

fn kernels() -> KernelRegistry {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    kernels
}

fn machine(seed: u64) -> MachineConfig {
    MachineConfig::seed(seed).kernels(kernels())
}

/// The text of a prompt: by the graph, and the last of its tokens launch by launch.
fn text(
    decoder: &mut Decoder,
    graph: &leasehold::Graph,
    prompt: &[u32],
    tokens: usize,
) -> Vec<u32> {
    let mut point = decoder.prefill(prompt).unwrap();
    let mut ids = vec![decoder.token(0, point).unwrap()];
    while ids.len() < tokens {
        let last = ids.len() + 1 == tokens;
        point = if last { decoder.step().unwrap() } else { decoder.launch(graph).unwrap() };
        ids.push(decoder.token(ids.len(), point).unwrap());
    }
    ids
}

/// Suspends and resumes a model a hundred times. The graph was recorded before.
fn a_hundred_times(runtime: &Runtime) {
    let dir = model_dir(MODEL);
    let case = &golden(&dir)[0];
    let model = load(runtime, &dir);
    let tokens = case.greedy.len().min(4);
    let positions = case.prompt_ids.len() + tokens;
    let mut decoder = Decoder::new(&model, positions, tokens, Sampling::default()).unwrap();
    let graph = decoder.record().unwrap();
    let wanted = &case.greedy[..tokens];
    assert_eq!(text(&mut decoder, &graph, &case.prompt_ids, tokens), wanted);
    let reserved = model.weights_stats().unwrap().reserved;
    for round in 0..100 {
        let freed = model.suspend().unwrap();
        let stats = model.weights_stats().unwrap();
        assert!(model.is_suspended());
        assert_eq!((freed, stats.reserved), (reserved, 0), "round {round}");
        assert!(matches!(graph.launch(), Err(Error::Suspended(_))));
        model.resume().unwrap();
        let ids = text(&mut decoder, &graph, &case.prompt_ids, tokens);
        assert_eq!(ids, wanted, "round {round}");
    }
    assert_eq!(model.weights_stats().unwrap().reserved, reserved);
    runtime.synchronize().unwrap();
}

fn no_races(machine: &Monitor) {
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

#[test]
fn texts_are_the_same_after_each_of_a_hundred_rounds() {
    a_hundred_times(&Context::new().runtime(DeviceId::cpu(0)).unwrap());
}

/// With the race detector on.
#[test]
fn a_simulated_device_gives_the_same_texts() {
    let backend = Arc::new(SimBackend::new(machine(11)).unwrap());
    let machine = backend.machine().clone();
    let context = Context::with_backends(vec![backend]);
    a_hundred_times(&context.runtime("sim:0".parse().unwrap()).unwrap());
    no_races(&machine);
}

/// With the race detector on.
#[test]
fn simulated_cuda_gives_the_same_texts() {
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine(12))).unwrap());
    let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    a_hundred_times(&context.runtime("cuda:0".parse().unwrap()).unwrap());
    no_races(driver.machine());
    context.shutdown().unwrap();
    assert!(driver.census().is_nothing(), "{:?}", driver.census());
}

/// Steps are refused before anything of them is computed, so the sequence goes on where it was.
#[test]
fn a_sequence_goes_on_after_a_refused_step() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let dir = model_dir(MODEL);
    let case = &golden(&dir)[0];
    let model = load(&runtime, &dir);
    let tokens = case.greedy.len().min(5);
    let positions = case.prompt_ids.len() + tokens;
    let mut decoder = Decoder::new(&model, positions, tokens, Sampling::default()).unwrap();
    let graph = decoder.record().unwrap();
    let mut batch = Batch::new(&model, 2, positions, Mode::Graph).unwrap();
    let sequence = batch.add(&case.prompt_ids, Sampling::default()).unwrap();
    let mut together = Vec::new();
    let mut point = decoder.prefill(&case.prompt_ids).unwrap();
    let mut ids = vec![decoder.token(0, point).unwrap()];
    while ids.len().min(together.len()) < tokens {
        model.suspend().unwrap();
        for refused in [
            decoder.launch(&graph).err(),
            decoder.step().err(),
            decoder.prefill(&case.prompt_ids).err(),
            decoder.record().err(),
            batch.step().err(),
        ] {
            let text = refused.unwrap().to_string();
            assert!(text.contains("weights are suspended; call Model::resume"), "{text}");
        }
        model.resume().unwrap();
        if ids.len() < tokens {
            point = decoder.launch(&graph).unwrap();
            ids.push(decoder.token(ids.len(), point).unwrap());
        }
        if together.len() < tokens {
            for (id, drawn) in batch.step().unwrap() {
                assert_eq!(id, sequence);
                together.push(drawn.unwrap().token);
            }
        }
    }
    assert_eq!(ids, case.greedy[..tokens]);
    assert_eq!(together, case.greedy[..tokens]);
}

/// Repeats a step that is refused.
fn until_present<T>(mut step: impl FnMut() -> leasehold::Result<T>) -> T {
    loop {
        match step() {
            Ok(done) => return done,
            Err(Error::Suspended(_)) => std::thread::yield_now(),
            Err(e) => panic!("{e}"),
        }
    }
}

/// One thread decodes, the other suspends and resumes: each step runs as a whole, or not at all.
#[test]
fn a_thread_that_decodes_while_another_suspends_gets_the_same_text() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let dir = model_dir(MODEL);
    let case = &golden(&dir)[0];
    let model = load(&runtime, &dir);
    let tokens = case.greedy.len();
    let positions = case.prompt_ids.len() + tokens;
    let mut decoder = Decoder::new(&model, positions, tokens, Sampling::default()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|s| {
        s.spawn(|| {
            while !over.load(Ordering::Relaxed) {
                model.suspend().unwrap();
                std::thread::yield_now();
                model.resume().unwrap();
                std::thread::yield_now();
            }
        });
        for _ in 0..10 {
            let point = until_present(|| decoder.prefill(&case.prompt_ids));
            let mut ids = vec![decoder.token(0, point).unwrap()];
            while ids.len() < tokens {
                let point = until_present(|| decoder.step());
                ids.push(decoder.token(ids.len(), point).unwrap());
            }
            assert_eq!(ids, case.greedy);
        }
        over.store(true, Ordering::Relaxed);
    });
}

#[test]
fn a_model_in_place_says_how_it_could_be_suspended() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let dir = model_dir(MODEL);
    let config = Config::from_dir(&dir).unwrap();
    let weights = weights_of(&dir, &config).unwrap();
    let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
    for text in [model.suspend().unwrap_err(), model.resume().unwrap_err()].map(|e| e.to_string()) {
        assert!(text.contains("Model::load_suspendable"), "{text}");
    }
    assert!(!model.is_suspended() && model.weights_stats().is_none());
}
