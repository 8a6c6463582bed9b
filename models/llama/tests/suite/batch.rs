//! Sequences in a batch against the same sequences alone, over random schedules.

use super::{model_dir, weights_of};
use leasehold::{Context, DeviceId, Runtime};
use leasehold_llama::{
    Batch, Config, DType, Decoder, Mode, Model, Request, Sampling, SequenceId, TokenRules,
    footprint, generate, generate_with_rules,
};
use leasehold_mps::{MpsBackend, MpsConfig};
use leasehold_sim::mps::{SimDriver, SimDriverConfig};
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

/// A sequence in both batches, and its texts there.
struct Text {
    ids: [SequenceId; 2],
    prompt: Vec<u32>,
    sampling: Sampling,
    tokens: [Vec<u32>; 2],
}

/// Adds a prompt and steps until it has a token. Other sequences have new tokens too.
fn start(batch: &mut Batch, prompt: &[u32], sampling: Sampling) -> (SequenceId, u32) {
    let id = batch.add(prompt, sampling).unwrap();
    loop {
        if let Some((_, drawn)) = batch.step().unwrap().into_iter().find(|(of, _)| *of == id) {
            return (id, drawn.unwrap().token);
        }
    }
}

/// Compares a finished sequence, the logits of its last step too, with its text alone.
fn same_alone(model: &Model, text: &Text, tokens: &[u32], logits: &[f32]) {
    let alone = |prompt: &[u32], tokens| {
        let mode = Mode::Eager;
        let request =
            Request { prompt, tokens, mode, sampling: text.sampling, stop_at: &[], check: false };
        generate(model, &request, &mut |_| Ok(())).unwrap()
    };
    assert_eq!(alone(&text.prompt, tokens.len()).ids, tokens, "{:?}", text.prompt);
    let (_, read) = tokens.split_last().unwrap();
    let all = [&text.prompt[..], read].concat();
    for (ours, theirs) in logits.iter().zip(&alone(&all, 1).last_logits) {
        assert!((ours - theirs).abs() < 1e-3 * theirs.abs().max(1.0), "{ours} and {theirs}");
    }
}

/// Adds, steps and removes at random, eager and replayed. Also sequences whose prompts wait are
/// removed. A prompt may take more steps in one of the batches than in the other one.
fn schedules(model: &Model, slots: usize, turns: usize, seed: u64) {
    let mut state = seed;
    let vocabulary = model.config().vocab_size;
    let mut batches =
        [Mode::Eager, Mode::Graph].map(|mode| Batch::new(model, slots, POSITIONS, mode).unwrap());
    let (mut texts, mut compared): (Vec<Text>, _) = (Vec::new(), 0);
    for _ in 0..turns {
        let is_full = |b: usize, text: &Text| {
            !text.tokens[b].is_empty() && !batches[b].has_room(text.ids[b]).unwrap()
        };
        let full = |t: &Text| (0..2).find(|&b| is_full(b, t));
        let full = texts.iter().enumerate().find_map(|(at, t)| Some((at, full(t)?)));
        let choice = random(&mut state) % 8;
        if full.is_some() || (choice == 0 && !texts.is_empty()) {
            let at = full.map_or_else(|| random(&mut state) % texts.len(), |(at, _)| at);
            if let Some((_, b)) = full {
                assert!(batches[b].step().unwrap_err().to_string().contains("are full"));
            }
            let text = texts.swap_remove(at);
            let [a, b] = [0, 1].map(|b| batches[b].logits(text.ids[b]).ok());
            for (tokens, logits) in text.tokens.iter().zip([&a, &b]) {
                assert_eq!(logits.is_none(), tokens.is_empty());
                if let Some(logits) = logits {
                    same_alone(model, &text, tokens, logits);
                }
            }
            if let (Some(a), Some(b)) = (a, b)
                && text.tokens[0].len() == text.tokens[1].len()
            {
                let bits = |l: &[f32]| l.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
                assert_eq!(bits(&a), bits(&b), "the modes agree to the bit");
                compared += 1;
            }
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
            let ids = [0, 1].map(|b| batches[b].add(&prompt, sampling).unwrap());
            texts.push(Text { ids, prompt, sampling, tokens: [vec![], vec![]] });
        } else {
            for (b, batch) in batches.iter_mut().enumerate() {
                for (id, drawn) in batch.step().unwrap() {
                    let text = texts.iter_mut().find(|t| t.ids[b] == id).unwrap();
                    text.tokens[b].push(drawn.unwrap().token);
                }
                assert_eq!(batch.len(), texts.len());
            }
        }
    }
    assert!(compared > 0);
}

#[test]
fn a_batch_gives_the_texts_of_its_sequences_alone() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    for (slots, seed) in [(1, 1), (3, 2), (8, 3), (9, 4), (17, 5)] {
        with_model(&runtime, "demo-model", DType::F32, |m| schedules(m, slots, 120, seed));
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
    with_model(&runtime, "demo-model", DType::F32, |m| schedules(m, 3, 60, 8));
    let reports = machine.take_reports();
    assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
}

/// The kernels are the CUDA sources, compiled for the host.
#[test]
fn simulated_cuda_gives_the_same_batch_with_its_own_kernels() {
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
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
        let says = |wanted: &str, result: leasehold::Result<Batch>| {
            let text = result.err().unwrap().to_string();
            assert!(text.contains(wanted), "{text}");
        };
        says("0 sequences", Batch::new(model, 0, 4, Mode::Eager));
        says("at least one position", Batch::new(model, 2, 0, Mode::Eager));
        says("context", Batch::new(model, 2, 1 << 24, Mode::Eager));
        let mut batch = Batch::new(model, 2, POSITIONS, Mode::Graph).unwrap();
        assert!(batch.step().unwrap().is_empty());
        assert!(batch.set_piece(0).unwrap_err().to_string().contains("0 tokens"));
        let how = Sampling::default();
        let (first, token) = start(&mut batch, &[1, 2], how);
        let mut tokens = vec![token];
        let mut step = |batch: &mut Batch| {
            let all = batch.step().unwrap();
            tokens
                .extend(all.into_iter().filter(|(id, _)| *id == first).map(|t| t.1.unwrap().token));
        };
        let bad: [(&[u32], &str); 3] =
            [(&[], "is empty"), (&[1; POSITIONS + 1], "does not fit"), (&[u32::MAX], "vocabulary")];
        for (prompt, wanted) in bad {
            let text = batch.add(prompt, how).unwrap_err().to_string();
            assert!(text.contains(wanted), "{text}");
            assert_eq!((batch.len(), batch.waiting()), (1, 0));
            step(&mut batch);
        }
        let second = batch.add(&[3], how).unwrap();
        assert_eq!((batch.len(), batch.waiting()), (2, 1));
        for error in [batch.logits(second).unwrap_err(), batch.replace(second, 1).unwrap_err()] {
            assert!(error.to_string().contains("has no token yet"), "{error}");
        }
        assert!(batch.replace(first, u32::MAX).unwrap_err().to_string().contains("vocabulary"));
        assert!(batch.add(&[4], how).unwrap_err().to_string().contains("2 slots"));
        step(&mut batch);
        let logits = batch.logits(first).unwrap();
        let text =
            Text { ids: [first; 2], prompt: vec![1, 2], sampling: how, tokens: [vec![], vec![]] };
        same_alone(model, &text, &tokens, &logits);
    });
}

/// The text goes on as that of a prompt with the token that was given.
#[test]
fn a_token_of_the_host_takes_the_place_of_the_drawn_one() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "demo-model", DType::F32, |model| {
        for mode in [Mode::Eager, Mode::Graph] {
            let mut batch = Batch::new(model, 2, POSITIONS, mode).unwrap();
            let how = Sampling::default();
            let (id, first) = start(&mut batch, &[316, 221], how);
            let next = |batch: &mut Batch| batch.step().unwrap().remove(0).1.unwrap().token;
            // In the place of the first token of a prompt, which a step has not read yet.
            let mut text = vec![316, 221, (first + 1) % 500];
            batch.replace(id, text[2]).unwrap();
            text.push(next(&mut batch));
            let drawn = next(&mut batch);
            // In the place of a step's token, twice.
            batch.replace(id, (drawn + 1) % 500).unwrap();
            batch.replace(id, (drawn + 2) % 500).unwrap();
            text.push((drawn + 2) % 500);
            text.push(next(&mut batch));
            let alone = |prompt: &[u32]| {
                let mode = Mode::Eager;
                let request =
                    Request { prompt, tokens: 1, mode, sampling: how, stop_at: &[], check: false };
                generate(model, &request, &mut |_| Ok(())).unwrap().ids[0]
            };
            assert_eq!(text[3], alone(&text[..3]));
            assert_eq!(drawn, alone(&text[..4]));
            assert_eq!(text[5], alone(&text[..5]));
        }
    });
}

/// Ids of two batches have the same numbers, and none is taken for one of the other batch.
#[test]
fn a_sequence_belongs_to_its_batch() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        let mut batches =
            [Mode::Eager, Mode::Graph].map(|mode| Batch::new(model, 2, POSITIONS, mode).unwrap());
        let ids = batches.each_mut().map(|b| start(b, &[1, 2], Sampling::default()).0);
        assert_ne!(ids[0], ids[1]);
        for (batch, other) in batches.iter_mut().zip([ids[1], ids[0]]) {
            let refused = [
                batch.remove(other).unwrap_err(),
                batch.logits(other).unwrap_err(),
                batch.replace(other, 1).unwrap_err(),
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
            Request { prompt: &[1, 2], tokens, mode, sampling: how, stop_at: &[], check: false }
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

/// The greedy text by rules, computed on the host from the logits of each beginning, as
/// transformers does it.
fn by_rules(model: &Model, prompt: &[u32], tokens: usize, rules: &TokenRules) -> Vec<u32> {
    let mut all = prompt.to_vec();
    for n in 0..tokens {
        let request = greedy(&all, 1, Mode::Eager);
        let mut logits = generate(model, &request, &mut |_| Ok(())).unwrap().last_logits;
        for (id, x) in (0..).zip(&mut logits) {
            if all.contains(&id) {
                let penalty = rules.repetition_penalty;
                *x = if *x < 0.0 { *x * penalty } else { *x / penalty };
            }
            let first = n == 0 && rules.begin_suppress_tokens.contains(&id);
            if first || rules.suppress_tokens.contains(&id) {
                *x = f32::NEG_INFINITY;
            }
        }
        let best = (0..logits.len()).rev().max_by(|&a, &b| logits[a].total_cmp(&logits[b]));
        all.push(best.unwrap() as u32);
    }
    all.split_off(prompt.len())
}

fn greedy(prompt: &[u32], tokens: usize, mode: Mode) -> Request<'_> {
    Request { prompt, tokens, mode, sampling: Sampling::default(), stop_at: &[], check: true }
}

/// The rules of the tests: each, and all at once, for what the model would say.
fn some_rules(plain: &[u32]) -> Vec<TokenRules> {
    let none = TokenRules::default();
    let (suppress_tokens, begin_suppress_tokens) = (vec![plain[0], 1 << 30], vec![plain[0]]);
    vec![
        TokenRules { repetition_penalty: 1.7, ..none.clone() },
        TokenRules { repetition_penalty: 0.4, ..none.clone() },
        TokenRules { suppress_tokens: suppress_tokens.clone(), ..none.clone() },
        TokenRules { begin_suppress_tokens: begin_suppress_tokens.clone(), ..none },
        TokenRules { repetition_penalty: 1.3, suppress_tokens, begin_suppress_tokens },
    ]
}

/// The texts of transformers 5.24 in float64 by [`some_rules`].
const BY_TRANSFORMERS: [[u32; 8]; 5] = [
    [190, 179, 101, 148, 91, 96, 47, 149],
    [190, 190, 190, 190, 190, 190, 190, 5],
    [83, 44, 105, 80, 83, 110, 92, 184],
    [83, 44, 105, 80, 83, 110, 92, 184],
    [83, 44, 105, 80, 41, 63, 13, 8],
];

#[test]
fn rules_keep_tokens_back_eager_replayed_and_in_batches() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        const TOKENS: usize = 8;
        let prompt = [5, 9, 5];
        let plain = generate(model, &greedy(&prompt, TOKENS, Mode::Eager), &mut |_| Ok(()));
        let plain = plain.unwrap().ids;
        let all = some_rules(&plain);
        let wanted: Vec<_> = all.iter().map(|r| by_rules(model, &prompt, TOKENS, r)).collect();
        assert_eq!(wanted, BY_TRANSFORMERS);
        for (rules, wanted) in all.iter().zip(&wanted) {
            assert_ne!(wanted, &plain, "{rules:?} change the text");
            for mode in [Mode::Eager, Mode::Graph] {
                let request = greedy(&prompt, TOKENS, mode);
                let text = generate_with_rules(model, &request, rules, &mut |_| Ok(())).unwrap();
                assert_eq!(&text.ids, wanted, "{rules:?} {mode:?}");
            }
        }
        for mode in [Mode::Eager, Mode::Graph] {
            let mut batch = Batch::new(model, all.len() + 2, POSITIONS, mode).unwrap();
            // One without rules is decoded before the others come, and one comes with them.
            let (first, token) = start(&mut batch, &prompt, Sampling::default());
            let mut texts = std::collections::BTreeMap::from([(first, vec![token])]);
            let add = |batch: &mut Batch, rules| {
                batch.add_with_rules(&prompt, Sampling::default(), rules).unwrap()
            };
            let ids: Vec<_> = all.iter().map(|rules| add(&mut batch, rules)).collect();
            let last = batch.add(&prompt, Sampling::default()).unwrap();
            while !batch.is_empty() {
                for (id, drawn) in batch.step().unwrap() {
                    let text = texts.entry(id).or_insert_with(Vec::new);
                    text.push(drawn.unwrap().token);
                    if text.len() == TOKENS {
                        batch.remove(id).unwrap();
                    }
                }
            }
            for (id, wanted) in ids.iter().zip(&wanted) {
                assert_eq!(&texts[id], wanted, "{mode:?}");
            }
            assert_eq!((&texts[&first], &texts[&last]), (&plain, &plain), "{mode:?}");
            // A place that had rules has none for the next sequence.
            for _ in 0..batch.slots() {
                let id = batch.add(&prompt, Sampling::default()).unwrap();
                texts.insert(id, Vec::new());
            }
            while !batch.is_empty() {
                for (id, drawn) in batch.step().unwrap() {
                    texts.get_mut(&id).unwrap().push(drawn.unwrap().token);
                    if texts[&id].len() == TOKENS {
                        batch.remove(id).unwrap();
                        assert_eq!(texts[&id], plain, "{mode:?}");
                    }
                }
            }
        }
        for penalty in [0.0, -1.0, f32::NAN, f32::INFINITY] {
            let rules = TokenRules { repetition_penalty: penalty, ..TokenRules::default() };
            let request = greedy(&prompt, 1, Mode::Eager);
            let error = generate_with_rules(model, &request, &rules, &mut |_| Ok(())).unwrap_err();
            assert!(error.to_string().contains("repetition_penalty is"), "{error}");
        }
    });
}

/// Several sequences of one prompt and one seed, of which the first is the text of that seed.
#[test]
fn sequences_of_one_seed_have_seeds_of_their_own() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    with_model(&runtime, "grouped-heads", DType::F32, |model| {
        let sampling = Sampling { temperature: 1.5, seed: u64::MAX, ..Sampling::default() };
        let mut texts = |number| {
            let sampling = sampling.of_sequence(number);
            let request = Request { sampling, check: false, ..greedy(&[5, 9], 8, Mode::Eager) };
            generate(model, &request, &mut |_| Ok(())).unwrap().ids
        };
        let all: std::collections::BTreeSet<_> = (0..8).map(&mut texts).collect();
        assert_eq!(all.len(), 8);
        assert_eq!(sampling.of_sequence(0), sampling);
    });
}
