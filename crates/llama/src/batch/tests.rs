//! Slots of a batch: the bytes of their caches, and their independent results.

use super::*;
use crate::config::Config;
use crate::weights::Weights;
use leasehold::{Context, DeviceId, Runtime};
use leasehold_operators::BufferPart;
use leasehold_sim::{KernelRegistry, MachineConfig};
use std::sync::Arc;

/// A context of more than one part on a device that splits it.
const POSITIONS: usize = 160;
/// A prompt that reaches into the second part.
const LONG: usize = 130;

/// The CPU, and simulated CUDA and Metal with their own kernels, each with a check of what its
/// machine reported.
fn devices() -> Vec<(Runtime, Box<dyn Fn()>)> {
    let cpu = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let mut all: Vec<(Runtime, Box<dyn Fn()>)> = vec![(cpu, Box::new(|| ()))];
    let kernels = KernelRegistry::new();
    if leasehold_operators::emulate_cuda(&kernels).unwrap() {
        use leasehold_cuda::{CudaBackend, CudaConfig};
        use leasehold_cuda_sim::{SimDriver, SimDriverConfig};
        let config = SimDriverConfig::new(MachineConfig::seed(11).kernels(kernels));
        let driver = Arc::new(SimDriver::new(config).unwrap());
        let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
        let context = Context::with_backends(vec![Arc::new(backend)]);
        let runtime = context.runtime("cuda:0".parse().unwrap()).unwrap();
        all.push((runtime, Box::new(move || assert!(driver.machine().take_reports().is_empty()))));
    }
    let kernels = KernelRegistry::new();
    if leasehold_operators::emulate_mps(&kernels).unwrap() {
        use leasehold_mps::{MpsBackend, MpsConfig};
        use leasehold_mps_sim::{SimDriver, SimDriverConfig};
        let config = SimDriverConfig::new(MachineConfig::seed(12).kernels(kernels));
        let driver = Arc::new(SimDriver::new(config).unwrap());
        let backend = MpsBackend::with_ops(driver.clone(), MpsConfig::default()).unwrap();
        let context = Context::with_backends(vec![Arc::new(backend)]);
        let runtime = context.runtime("mps:0".parse().unwrap()).unwrap();
        all.push((runtime, Box::new(move || assert!(driver.machine().take_reports().is_empty()))));
    }
    all
}

/// A small model, with heads of 8 elements.
fn model(runtime: &Runtime, heads: usize, kv_heads: usize) -> Model {
    let config = serde_json::json!({"model_type": "llama", "hidden_act": "silu", "vocab_size": 40,
        "hidden_size": 8 * heads, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": heads,
        "num_key_value_heads": kv_heads, "max_position_embeddings": 256, "tie_word_embeddings": false});
    let config = Config::from_slice(config.to_string().as_bytes(), "a small model").unwrap();
    let weights = Weights::random(&config, DType::F32, 3).unwrap();
    Model::load(runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap()
}

fn prompt(tokens: usize, seed: u32) -> Vec<u32> {
    (0..tokens as u32).map(|i| (i * 7 + seed) % 40).collect()
}

/// The caches of a slot: keys and values of each layer.
fn caches<'b>(batch: &'b Batch<'_>, slot: usize) -> impl Iterator<Item = &'b BufferPart> {
    batch.lanes.each[slot].caches.iter().flat_map(|c| [&c.keys, &c.values])
}

fn bytes(batch: &Batch<'_>, part: &BufferPart) -> Vec<u8> {
    let mut bytes = vec![0u8; part.view().len() as usize];
    batch.network.model.runtime().stream().download(&mut bytes, part.view()).unwrap();
    bytes
}

#[test]
fn a_step_writes_the_next_position_of_each_sequence_and_nothing_else() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        for mode in [Mode::Eager, Mode::Graph] {
            let mut batch = Batch::new(&model, 4, POSITIONS, mode).unwrap();
            let mut add = |tokens, seed| {
                batch.add(&prompt(tokens, seed), ops::Sampling::default()).unwrap().0
            };
            // The first slot has had a sequence, the last one has had none.
            let (gone, _, _) = (add(5, 1), add(LONG, 2), add(3, 3));
            batch.remove(gone).unwrap();
            let next = [None, Some(LONG), Some(3), None];
            for slot in 0..4 {
                for cache in caches(&batch, slot) {
                    runtime.stream().fill(cache.view(), 0xA5u8).unwrap();
                }
            }
            let steps = 3;
            for _ in 0..steps {
                assert_eq!(batch.step().unwrap().len(), 2);
            }
            for (slot, next) in next.into_iter().enumerate() {
                for (i, cache) in caches(&batch, slot).enumerate() {
                    let (all, head_dim) = (bytes(&batch, cache), 8);
                    assert_eq!(all.len(), 2 * POSITIONS * head_dim * 4);
                    for (row, bytes) in all.chunks(head_dim * 4).enumerate() {
                        let position = row % POSITIONS;
                        let own = next.is_some_and(|at| (at..at + steps).contains(&position));
                        let kept = bytes.iter().all(|&b| b == 0xA5);
                        assert_eq!(
                            kept,
                            !own,
                            "{mode:?} {}: slot {slot}, cache {i}, position {position}",
                            runtime.device()
                        );
                    }
                }
            }
        }
        check();
    }
}

/// The tokens and the bits of the logits of the first sequence. With `others`, sequences at other
/// positions start and end meanwhile.
fn first_of(model: &Model, mode: Mode, others: bool) -> Vec<(u32, Vec<u32>)> {
    let mut batch = Batch::new(model, 3, POSITIONS, mode).unwrap();
    let how = ops::Sampling::default();
    let (first, token) = batch.add(&prompt(LONG - 4, 5), how).unwrap();
    let (mut seen, mut second) = (vec![(token, Vec::new())], None);
    for step in 0..8 {
        match step {
            1 if others => second = Some(batch.add(&prompt(2, 6), how).unwrap().0),
            3 if others => drop(batch.add(&prompt(LONG, 8), how).unwrap()),
            5 => second.into_iter().for_each(|id| batch.remove(id).unwrap()),
            _ => (),
        }
        let tokens = batch.step().unwrap();
        assert_eq!(tokens.len(), batch.len());
        let (_, token) = tokens.into_iter().find(|(id, _)| *id == first).unwrap();
        let logits = batch.logits(first).unwrap();
        assert!(logits.iter().all(|l| l.is_finite()));
        seen.push((token, logits.into_iter().map(f32::to_bits).collect()));
    }
    seen
}

/// Groups that are too wide for the fused attention have a launch of each sequence.
#[test]
fn a_wide_group_gives_the_same_bits_whatever_the_others_are() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let model = model(&runtime, 17, 1);
    let alone = first_of(&model, Mode::Eager, false);
    assert!(first_of(&model, Mode::Graph, true) == alone);
}

#[test]
fn a_step_launches_each_operator_once_for_all_sequences() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let count = |model: &Model, slots, name: &str| {
        let batch = Batch::new(model, slots, POSITIONS, Mode::Eager).unwrap();
        batch.step.iter().filter(|o| o.kernel_name() == name).count()
    };
    let (fused, wide) = (model(&runtime, 4, 2), model(&runtime, 17, 1));
    for slots in [1, 5] {
        assert_eq!(count(&fused, slots, "embedding"), 1);
        assert_eq!(count(&fused, slots, "decode_attention"), 2, "one for each layer");
        assert_eq!(count(&fused, slots, "next_token"), 1);
        assert_eq!(count(&wide, slots, "attention"), 2 * slots);
    }
}

#[test]
fn a_sequence_gives_the_same_bits_whatever_the_others_are() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        let alone = first_of(&model, Mode::Eager, false);
        for mode in [Mode::Eager, Mode::Graph] {
            for others in [false, true] {
                assert!(
                    first_of(&model, mode, others) == alone,
                    "{mode:?} {}, others: {others}",
                    runtime.device()
                );
            }
        }
        check();
    }
}
