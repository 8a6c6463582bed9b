//! Batches whose caches grow: the texts are those of caches of the maximum, memory is what the
//! texts need, and a sequence without memory is named before anything is computed.

use super::*;
use leasehold::Error;
use std::collections::BTreeMap;

/// Bytes that devices map at once.
const GRANULE: u64 = 2 << 20;
/// Positions whose keys fill a granule.
const FULL: usize = 128;
/// A maximum that takes three granules.
const MOST: usize = 3 * FULL;

/// A model of two layers with large heads, of which 128 positions fill a granule.
fn model(runtime: &Runtime) -> Model {
    let config = serde_json::json!({"model_type": "llama", "hidden_act": "silu", "vocab_size": 40,
        "hidden_size": 16, "intermediate_size": 24, "num_hidden_layers": 2, "num_attention_heads": 8,
        "num_key_value_heads": 8, "head_dim": 256, "max_position_embeddings": 1024, "tie_word_embeddings": false});
    let config =
        Config::from_slice(config.to_string().as_bytes(), "a model of large heads").unwrap();
    let weights = Weights::random(&config, DType::F32, 3).unwrap();
    Model::load(runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap()
}

/// The CPU, and simulated CUDA with the kernels of the CPU, each with a check of what its machine
/// reported. (The kernels' own tests compare CUDA's with caches that grow.)
fn devices() -> Vec<(Runtime, Box<dyn Fn()>)> {
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
    let cpu = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let config = SimDriverConfig::new(MachineConfig::seed(11).kernels(kernels));
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    let cuda = context.runtime("cuda:0".parse().unwrap()).unwrap();
    let check = move || assert!(driver.machine().take_reports().is_empty());
    vec![(cpu, Box::new(|| ())), (cuda, Box::new(check))]
}

/// Whether the caches grow on a device.
fn grows(runtime: &Runtime) -> bool {
    runtime.raw_device().caps().growing
}

/// The texts of sequences: tokens with the bits of the logits that they were drawn from.
type Texts = BTreeMap<SequenceId, Vec<(u32, Vec<u32>)>>;

/// A step, whose tokens go to the texts.
fn step(batch: &mut Batch, texts: &mut Texts) -> Result<()> {
    for (id, drawn) in batch.step()? {
        let bits = batch.logits(id)?.into_iter().map(f32::to_bits).collect();
        texts.entry(id).or_default().push((drawn?.token, bits));
    }
    Ok(())
}

/// The first tokens of a prompt. (How many steps it takes is a matter of time.)
fn text(
    batch: &mut Batch,
    texts: &mut Texts,
    id: SequenceId,
    tokens: usize,
) -> Vec<(u32, Vec<u32>)> {
    while texts.get(&id).is_none_or(|text| text.len() < tokens) {
        step(batch, texts).unwrap();
    }
    texts[&id][..tokens].to_vec()
}

#[test]
fn texts_and_recordings_are_those_of_fixed_caches_across_growths() {
    for (runtime, check) in devices() {
        if !grows(&runtime) {
            continue;
        }
        let model = model(&runtime);
        let texts_of = |mode, fixed: bool| {
            let made = if fixed { Batch::preallocated } else { Batch::new };
            let mut batch = made(&model, 2, MOST, mode).unwrap();
            assert_eq!(batch.growth.is_some(), !fixed, "{}", runtime.device());
            let how = ops::Sampling::default();
            // One sequence crosses the end of its granule, the other stays in the middle of one.
            let first = batch.add(&prompt(FULL - 4, 2), how).unwrap();
            let second = batch.add(&prompt(7, 5), how).unwrap();
            let mut texts = Texts::new();
            let mut all: Vec<_> =
                [first, second].map(|id| text(&mut batch, &mut texts, id, 9)).into();
            batch.remove(first).unwrap();
            batch.remove(second).unwrap();
            // The next text in that place finds the memory of the former one.
            let id = batch.add(&prompt(FULL - 2, 3), how).unwrap();
            all.push(text(&mut batch, &mut texts, id, 5));
            assert_eq!(batch.recordings, usize::from(mode == Mode::Graph));
            all
        };
        let fixed = texts_of(Mode::Graph, true);
        for mode in [Mode::Graph, Mode::Eager] {
            assert!(texts_of(mode, false) == fixed, "{mode:?}, {}", runtime.device());
        }
        check();
    }
}

#[test]
fn memory_is_what_the_texts_need() {
    for (runtime, check) in devices() {
        let model = model(&runtime);
        let mut batch = Batch::new(&model, 3, MOST, Mode::Graph).unwrap();
        let bytes = |granules: u64| {
            let most = 3 * 2 * 3 * GRANULE;
            let committed = if grows(&runtime) { granules * GRANULE } else { most };
            CacheBytes { committed, shared: 0, most }
        };
        assert_eq!(batch.cache_bytes(), bytes(0));
        let first = start(&mut batch, &prompt(FULL - 2, 2));
        assert_eq!(batch.cache_bytes(), bytes(2), "keys and values");
        let second = start(&mut batch, &prompt(5, 2));
        while batch.find(first).unwrap().1.filled <= FULL {
            batch.step().unwrap();
        }
        assert_eq!(batch.cache_bytes(), bytes(4 + 2));
        batch.remove(first).unwrap();
        assert_eq!(batch.cache_bytes(), bytes(2));
        let calls = runtime.allocator().stats().driver_calls;
        let again = batch.add(&prompt(FULL - 2, 2), ops::Sampling::default()).unwrap();
        assert_eq!(batch.cache_bytes(), bytes(2 + 2));
        assert_eq!(runtime.allocator().stats().driver_calls, calls, "the memory lay ready");
        assert_eq!(batch.find(again).unwrap().0, 0);
        batch.remove(again).unwrap();
        batch.remove(second).unwrap();
        assert_eq!(batch.cache_bytes(), bytes(0));
        check();
    }
}

#[test]
fn a_sequence_without_memory_is_named_and_the_others_go_on() {
    for (runtime, check) in devices() {
        if !grows(&runtime) {
            continue;
        }
        let model = model(&runtime);
        let how = ops::Sampling::default();
        let alone = {
            let mut batch = Batch::preallocated(&model, 3, MOST, Mode::Graph).unwrap();
            let id = batch.add(&prompt(FULL - 8, 2), how).unwrap();
            text(&mut batch, &mut Texts::new(), id, 14)
        };
        let mut batch = Batch::new(&model, 3, MOST, Mode::Graph).unwrap();
        let long = batch.add(&prompt(FULL - 8, 2), how).unwrap();
        let mut texts = Texts::new();
        text(&mut batch, &mut texts, long, 1);
        let short = batch.add(&prompt(3, 2), how).unwrap();
        text(&mut batch, &mut texts, short, 1);
        let memory = runtime.allocator();
        batch.growth.as_ref().unwrap().settle();
        memory.trim(0).unwrap();
        // The rest is used up, so that nothing is left for another granule.
        memory.set_budget(memory.stats().reserved);
        let mut all = Vec::new();
        for bytes in [1 << 20, 1 << 16, 1 << 12] {
            while let Ok(buffer) = runtime.alloc(bytes) {
                all.push(buffer);
            }
        }
        let starved = loop {
            match step(&mut batch, &mut texts) {
                Ok(()) => assert!(texts[&long].len() < 14, "there is no memory"),
                Err(e) => break e,
            }
        };
        let said = starved.to_string();
        assert!(matches!(starved, Error::OutOfMemory(_)), "{said}");
        assert!(said.contains("sequence 0") && said.contains("4.0 MiB"), "{said}");
        let before = filled(&batch);
        let named: Vec<_> =
            batch.grow().into_iter().map(|(id, why)| (id, why.is_out_of_memory())).collect();
        assert_eq!(named, [(long, true)]);
        assert!(batch.step().is_err());
        assert_eq!(filled(&batch), before, "nothing was computed");
        let e = batch.add(&prompt(5, 1), how).unwrap_err();
        assert!(e.is_out_of_memory() && batch.len() == 2, "{e}");
        // An evicted sequence leaves what the other one needs.
        batch.remove(short).unwrap();
        runtime.stream().synchronize().unwrap();
        let long = text(&mut batch, &mut texts, long, 14);
        assert!(long == alone, "the text goes on where it was");
        drop(all);
        memory.set_budget(u64::MAX);
        check();
    }
}

/// The bytes that the allocator has from the device.
fn reserved(runtime: &Runtime) -> u64 {
    runtime.allocator().stats().reserved
}

#[test]
fn a_common_beginning_is_stored_once_and_computed_once() {
    for (runtime, check) in devices() {
        let model = model(&runtime);
        let how = ops::Sampling::default();
        let beginning = prompt(FULL + 20, 2);
        let prompts: Vec<Vec<u32>> = (0..4)
            .map(|i| [&beginning[..FULL + 10], &prompt(3 * i, 5 + i as u32)].concat())
            .collect();
        let alone: Vec<_> = prompts
            .iter()
            .map(|prompt| {
                let mut batch = Batch::preallocated(&model, 4, 8 * FULL, Mode::Graph).unwrap();
                batch.set_piece(FULL / 2).unwrap();
                let id = batch.add(prompt, how).unwrap();
                text(&mut batch, &mut Texts::new(), id, 12)
            })
            .collect();
        let mut batch = Batch::new(&model, 4, 8 * FULL, Mode::Graph).unwrap();
        batch.set_piece(FULL / 2).unwrap();
        let mut texts = Texts::new();
        let first = batch.add(&prompts[0], how).unwrap();
        text(&mut batch, &mut texts, first, 1);
        let forks = runtime.raw_device().caps().forks;
        let before = reserved(&runtime);
        let mut ids = vec![first];
        for (others, prompt) in prompts.iter().enumerate().skip(1) {
            ids.push(batch.add(prompt, how).unwrap());
            if forks {
                // Keys and values: a granule each of the beginning, and one each of the rest.
                let CacheBytes { committed, shared, .. } = batch.cache_bytes();
                let sequences = others as u64 + 1;
                assert_eq!((committed, shared), (sequences * 4 * GRANULE, sequences * 2 * GRANULE));
                assert_eq!(batch.prompts.submitted(others), FULL);
            }
        }
        if forks {
            assert!(reserved(&runtime) - before <= 3 * 2 * GRANULE, "{before}");
        }
        // The first sequence goes, and the others keep what it had.
        text(&mut batch, &mut texts, ids[1], 4);
        batch.remove(first).unwrap();
        for (id, alone) in ids.iter().zip(&alone).skip(1) {
            assert!(&text(&mut batch, &mut texts, *id, 12) == alone, "{id:?} {}", runtime.device());
        }
        // In its place another one shares with those that are left, up to the last token.
        let again = batch.add(&prompts[0], how).unwrap();
        assert_eq!(batch.prompts.submitted(0), if forks { FULL } else { 0 });
        assert!(text(&mut batch, &mut texts, again, 12) == alone[0]);
        ids[0] = again;
        ids.into_iter().for_each(|id| batch.remove(id).unwrap());
        assert_eq!(batch.cache_bytes().shared, 0);
        check();
    }
}

#[test]
fn a_beginning_is_shared_when_it_is_computed_and_longer_than_a_granule() {
    for (runtime, check) in devices() {
        if !runtime.raw_device().caps().forks {
            continue;
        }
        let model = model(&runtime);
        let how = ops::Sampling::default();
        let mut batch = Batch::new(&model, 4, MOST, Mode::Graph).unwrap();
        batch.set_piece(FULL / 2).unwrap();
        batch.add(&prompt(2 * FULL + 1, 2), how).unwrap();
        let shared = |batch: &mut Batch, tokens: usize| {
            let id = batch.add(&prompt(tokens, 2), how).unwrap();
            let done = batch.prompts.submitted(batch.find(id).unwrap().0);
            batch.remove(id).unwrap();
            done
        };
        assert_eq!(shared(&mut batch, MOST), 0, "nothing is computed");
        (0..3).for_each(|_| drop(batch.step().unwrap()));
        assert_eq!(shared(&mut batch, MOST), FULL, "one piece and a half");
        (0..2).for_each(|_| drop(batch.step().unwrap()));
        assert_eq!(shared(&mut batch, MOST), 2 * FULL);
        assert_eq!(shared(&mut batch, 2 * FULL), FULL, "the last token is computed");
        assert_eq!(shared(&mut batch, FULL), 0, "shorter than a granule and a token");
        batch.set_piece(FULL).unwrap();
        assert_eq!(shared(&mut batch, MOST), 0, "other pieces may give other bits");
        check();
    }
}
