//! Sequences in a batch against the same sequences alone, over random schedules.

use super::{model_dir, weights_of};
use leasehold::{Context, DeviceId, Runtime};
use leasehold_llama::{
    Batch, Config, DType, Decoder, Mode, Model, Request, Sampling, SequenceId, footprint, generate,
};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_mps_sim::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig, SimBackend};
use std::sync::Arc;

const POSITIONS: usize = 12;

fn with_model(runtime: &Runtime, name: &str, dtype: DType, f: impl FnOnce(&Model)) {
    let dir = model_dir(name);
    let config = Config::from_dir(&dir).unwrap();
    let weights = weights_of(&dir, &config).unwrap();
    f(&Model::load(runtime, &config, &weights, dtype, &mut |_, _| {}).unwrap());
}

fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

/// A sequence in both batches, and its texts.
struct Text {
    ids: [SequenceId; 2],
    prompt: Vec<u32>,
    sampling: Sampling,
    tokens: Vec<u32>,
}

/// Compares a finished sequence, the logits of its last step too, with its text alone.
fn same_alone(model: &Model, text: &Text, logits: &[f32]) {
    let alone = |prompt: &[u32], tokens| {
        let mode = Mode::Eager;
        let request = Request { prompt, tokens, mode, sampling: text.sampling, stop_at: &[] };
        generate(model, &request, &mut |_| Ok(())).unwrap()
    };
    assert_eq!(alone(&text.prompt, text.tokens.len()).ids, text.tokens, "{:?}", text.prompt);
    let (_, read) = text.tokens.split_last().unwrap();
    let all = [&text.prompt[..], read].concat();
    for (ours, theirs) in logits.iter().zip(&alone(&all, 1).last_logits) {
        assert!((ours - theirs).abs() < 1e-3 * theirs.abs().max(1.0), "{ours} and {theirs}");
    }
}

/// Adds, steps and removes at random, eager and replayed.
fn schedules(model: &Model, slots: usize, turns: usize, seed: u64) {
    let mut state = seed;
    let vocabulary = model.config().vocab_size;
    let mut batches =
        [Mode::Eager, Mode::Graph].map(|mode| Batch::new(model, slots, POSITIONS, mode).unwrap());
    let mut texts: Vec<Text> = Vec::new();
    for _ in 0..turns {
        let full = texts.iter().position(|t| !batches[0].has_room(t.ids[0]).unwrap());
        let choice = random(&mut state) % 8;
        if full.is_some() || (choice == 0 && !texts.is_empty()) {
            let at = full.unwrap_or_else(|| random(&mut state) % texts.len());
            if full.is_some() {
                for batch in &mut batches {
                    assert!(batch.step().unwrap_err().to_string().contains("are full"));
                }
            }
            let text = texts.swap_remove(at);
            let logits = [0, 1].map(|b| batches[b].logits(text.ids[b]).unwrap());
            let bits = |l: &[f32]| l.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&logits[0]), bits(&logits[1]), "the modes agree to the bit");
            same_alone(model, &text, &logits[0]);
            for (batch, id) in batches.iter_mut().zip(text.ids) {
                batch.remove(id).unwrap();
                assert!(batch.remove(id).unwrap_err().to_string().contains("not in the batch"));
            }
        } else if choice < 4 && texts.len() < slots {
            let prompt: Vec<u32> = (0..1 + random(&mut state) % 5)
                .map(|_| (random(&mut state) % vocabulary) as u32)
                .collect();
            let temperature = if random(&mut state).is_multiple_of(8) { 0.8 } else { 0.0 };
            let sampling = Sampling { temperature, top_k: 5, seed, ..Sampling::default() };
            let [a, b] = [0, 1].map(|b| batches[b].add(&prompt, sampling).unwrap());
            assert_eq!(a.1, b.1);
            texts.push(Text { ids: [a.0, b.0], prompt, sampling, tokens: vec![a.1] });
        } else {
            let [a, b] = [0, 1].map(|b| batches[b].step().unwrap());
            assert_eq!((a.len(), b.len()), (texts.len(), texts.len()));
            for (a, b) in a.into_iter().zip(b) {
                let text = texts.iter_mut().find(|t| t.ids == [a.0, b.0]).unwrap();
                assert_eq!(a.1, b.1);
                text.tokens.push(a.1);
            }
        }
    }
}

#[test]
fn a_batch_gives_the_texts_of_its_sequences_alone() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    for (slots, seed) in [(1, 1), (3, 2), (8, 3), (9, 4), (17, 5)] {
        with_model(&runtime, "tiny-python", DType::F32, |m| schedules(m, slots, 120, seed));
    }
    for name in ["grouped-heads", "one-kv-head", "odd-sizes", "biases"] {
        with_model(&runtime, name, DType::F32, |m| schedules(m, 4, 60, 6));
    }
}

/// A device whose memory the host cannot access, with the race detector on.
#[test]
fn a_simulated_device_gives_the_same_batch() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(5).kernels(kernels)).unwrap());
    let machine = backend.machine().clone();
    let context = Context::with_backends(vec![backend]);
    let runtime = context.runtime("sim:0".parse().unwrap()).unwrap();
    with_model(&runtime, "odd-sizes", DType::F32, |m| schedules(m, 9, 60, 7));
    with_model(&runtime, "tiny-python", DType::F32, |m| schedules(m, 3, 60, 8));
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

/// The kernels are the CUDA sources, compiled for the host.
#[test]
fn simulated_cuda_gives_the_same_batch_with_its_own_kernels() {
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_cuda_sim::{SimDriver, SimDriverConfig};
    let kernels = KernelRegistry::new();
    if !leasehold_operators::emulate_cuda(&kernels).unwrap() {
        return;
    }
    let machine = MachineConfig::seed(8).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    let runtime = context.runtime("cuda:0".parse().unwrap()).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |m| schedules(m, 3, 16, 9));
    let reports = driver.machine().take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

/// The kernels are the Metal sources, compiled for the host.
#[test]
fn simulated_metal_gives_the_same_batch_with_its_own_kernels() {
    let kernels = KernelRegistry::new();
    if !leasehold_operators::emulate_mps(&kernels).unwrap() {
        return;
    }
    let machine = MachineConfig::seed(8).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let backend = MpsBackend::with_ops(driver.clone(), MpsConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    let runtime = context.runtime("mps:0".parse().unwrap()).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |m| schedules(m, 3, 16, 9));
    let reports = driver.machine().take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

#[test]
fn a_batch_refuses_what_it_cannot_hold_and_loses_nothing() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        let says = |wanted: &str, result: leasehold::Result<Batch<'_>>| {
            let text = result.err().unwrap().to_string();
            assert!(text.contains(wanted), "{text}");
        };
        says("0 sequences", Batch::new(model, 0, 4, Mode::Eager));
        says("at least one position", Batch::new(model, 2, 0, Mode::Eager));
        says("context", Batch::new(model, 2, 1 << 24, Mode::Eager));
        let mut batch = Batch::new(model, 2, POSITIONS, Mode::Graph).unwrap();
        assert_eq!(batch.step().unwrap(), []);
        let how = Sampling::default();
        let (first, token) = batch.add(&[1, 2], how).unwrap();
        let mut tokens = vec![token];
        let bad: [(&[u32], &str); 3] =
            [(&[], "is empty"), (&[1; POSITIONS + 1], "does not fit"), (&[u32::MAX], "vocabulary")];
        for (prompt, wanted) in bad {
            let text = batch.add(prompt, how).unwrap_err().to_string();
            assert!(text.contains(wanted), "{text}");
            tokens.push(batch.step().unwrap()[0].1);
        }
        batch.add(&[3], how).unwrap();
        assert_eq!(batch.len(), 2);
        assert!(batch.add(&[4], how).unwrap_err().to_string().contains("2 slots"));
        tokens.push(batch.step().unwrap()[0].1);
        let logits = batch.logits(first).unwrap();
        let text = Text { ids: [first; 2], prompt: vec![1, 2], sampling: how, tokens };
        same_alone(model, &text, &logits);
    });
}

/// Ids of two batches have the same numbers, and none is taken for one of the other batch.
#[test]
fn a_sequence_belongs_to_its_batch() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        let mut batches =
            [Mode::Eager, Mode::Graph].map(|mode| Batch::new(model, 2, POSITIONS, mode).unwrap());
        let ids = batches.each_mut().map(|b| b.add(&[1, 2], Sampling::default()).unwrap().0);
        assert_ne!(ids[0], ids[1]);
        for (batch, other) in batches.iter_mut().zip([ids[1], ids[0]]) {
            let refused = [
                batch.remove(other).unwrap_err(),
                batch.logits(other).unwrap_err(),
                batch.has_room(other).unwrap_err(),
            ];
            for error in refused {
                assert!(error.to_string().contains("belongs to another batch"), "{error}");
            }
            assert_eq!(batch.len(), 1);
        }
        for (batch, own) in batches.iter_mut().zip(ids) {
            assert!(batch.has_room(own).unwrap());
            assert_eq!(batch.step().unwrap()[0].0, own);
            batch.remove(own).unwrap();
        }
    });
}

#[test]
fn numbers_that_are_too_large_are_refused() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        let how = Sampling::default();
        for ring in [usize::MAX, usize::MAX / 4 + 1, 1 << 62, 1 << 61, 1 << 40, 1 << 32] {
            let text = Decoder::new(model, 1, ring, how).map(drop).unwrap_err().to_string();
            assert!(text.contains(&format!("rings of {ring} tokens")), "{text}");
        }
        for (sequences, positions) in [
            (usize::MAX, 8),
            (1 << 33, 8),
            (u32::MAX as usize, 8),
            (1, usize::MAX),
            (usize::MAX, usize::MAX),
        ] {
            assert!(Batch::new(model, sequences, positions, Mode::Eager).is_err());
            assert!(Decoder::new(model, positions, 1, how).is_err() || positions == 8);
        }
        // Tokens that no step computed, and those that later ones replaced.
        let mut decoder = Decoder::new(model, POSITIONS, 2, how).unwrap();
        let point = runtime.stream().now();
        for index in [0, usize::MAX] {
            let text = decoder.token(index, point).unwrap_err().to_string();
            assert!(text.contains("the sequence has 0 new tokens"), "{text}");
        }
        let first = decoder.prefill(&[1, 2]).unwrap();
        assert!(decoder.token(1, first).is_err() && decoder.token(0, first).is_ok());
        let second = decoder.step().unwrap();
        let third = decoder.step().unwrap();
        for index in [3, 1 << 32, 1 << 63, usize::MAX - 1, usize::MAX] {
            let text = decoder.token(index, third).unwrap_err().to_string();
            assert!(text.contains("the sequence has 3 new tokens"), "{text}");
        }
        let text = decoder.token(0, first).unwrap_err().to_string();
        assert!(text.contains("the ring keeps the newest 2"), "{text}");
        assert!(decoder.token(1, second).is_ok() && decoder.token(2, third).is_ok());
        assert!(decoder.prompt_operators(usize::MAX).is_err());
        // A second prompt starts from 0 again.
        decoder.prefill(&[3]).unwrap();
        assert!(decoder.token(1, third).is_err());

        let request = |tokens| {
            let mode = Mode::Eager;
            Request { prompt: &[1, 2], tokens, mode, sampling: how, stop_at: &[] }
        };
        for tokens in [usize::MAX, usize::MAX - 1, 1 << 63, 0] {
            let checked = request(tokens).check(model.config()).unwrap_err().to_string();
            let run = generate(model, &request(tokens), &mut |_| Ok(())).unwrap_err().to_string();
            assert_eq!(run, checked);
        }
        assert_eq!(request(3).check(model.config()).unwrap(), 4);
        let need = footprint(model.config(), usize::MAX, usize::MAX, DType::F32);
        assert_eq!((need.host, need.device), (u64::MAX, u64::MAX));
    });
}
