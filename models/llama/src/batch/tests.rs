//! Slots of a batch: the bytes of their caches, and their independent results.

use super::pace::{Pace, SHARE, Work};
use super::*;
use crate::config::Config;
use crate::network::collected;
use crate::weights::Weights;
use leasehold::{Context, DeviceId, Runtime};
use leasehold_operators::{BufferPart, DType};
use leasehold_sim::{KernelRegistry, MachineConfig};
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

mod growth;

/// A context of more than one part on a device that splits it.
const POSITIONS: usize = 160;
/// A prompt that reaches into the second part.
const LONG: usize = 130;

fn simulated_cuda(kernels: KernelRegistry) -> (Runtime, Arc<leasehold_sim::cuda::SimDriver>) {
    use leasehold_cuda::{CudaBackend, CudaConfig};
    use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
    let config = SimDriverConfig::new(MachineConfig::seed(11).kernels(kernels));
    let driver = Arc::new(SimDriver::new(config).unwrap());
    let backend = CudaBackend::with_ops(driver.clone(), CudaConfig::default()).unwrap();
    let context = Context::with_backends(vec![Arc::new(backend)]);
    (context.runtime("cuda:0".parse().unwrap()).unwrap(), driver)
}

/// The CPU, and simulated CUDA and Metal with their own kernels, each with a check of what its
/// machine reported.
fn devices() -> Vec<(Runtime, Box<dyn Fn()>)> {
    let cpu = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let mut all: Vec<(Runtime, Box<dyn Fn()>)> = vec![(cpu, Box::new(|| ()))];
    let kernels = KernelRegistry::new();
    if leasehold_operators::emulate_cuda(&kernels).unwrap() {
        let (runtime, driver) = simulated_cuda(kernels);
        all.push((runtime, Box::new(move || assert!(driver.machine().take_reports().is_empty()))));
    }
    let kernels = KernelRegistry::new();
    if leasehold_operators::emulate_mps(&kernels).unwrap() {
        use leasehold_mps::{MpsBackend, MpsConfig};
        use leasehold_sim::mps::{SimDriver, SimDriverConfig};
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
fn caches(batch: &Batch, slot: usize) -> impl Iterator<Item = &BufferPart> {
    batch.prompts.lanes[slot].caches.iter().flat_map(|c| [Some(c.keys()), c.values()]).flatten()
}

fn bytes(batch: &Batch, part: &BufferPart) -> Vec<u8> {
    let mut bytes = vec![0u8; part.view().len() as usize];
    batch.network.model.runtime().stream().download(&mut bytes, part.view()).unwrap();
    bytes
}

/// Adds a prompt and steps until its first token is there. Other sequences have new tokens too.
fn start(batch: &mut Batch, prompt: &[u32]) -> SequenceId {
    let id = batch.add(prompt, ops::Sampling::default()).unwrap();
    while batch.step().unwrap().iter().all(|(of, _)| *of != id) {}
    id
}

/// The positions of each slot's sequence that are filled.
fn filled(batch: &Batch) -> Vec<Option<usize>> {
    batch.slots.iter().map(|slot| slot.sequence.as_ref().map(|s| s.filled)).collect()
}

#[test]
fn a_step_writes_the_next_position_of_each_sequence_and_nothing_else() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        for mode in [Mode::Eager, Mode::Graph] {
            let mut batch = Batch::new(&model, 4, POSITIONS, mode).unwrap();
            batch.set_piece(64).unwrap();
            // The second slot has had a sequence, the last one has had none.
            start(&mut batch, &prompt(LONG, 2));
            let gone = start(&mut batch, &prompt(5, 1));
            start(&mut batch, &prompt(3, 3));
            batch.remove(gone).unwrap();
            let next = filled(&batch);
            assert!(next[0] >= Some(LONG) && next[1].is_none() && next[2] >= Some(3));
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
/// positions start and end meanwhile, one of them in the middle of its prompt.
fn first_of(model: &Model, mode: Mode, others: bool) -> Vec<(u32, Vec<u32>)> {
    let mut batch = Batch::new(model, 3, POSITIONS, mode).unwrap();
    batch.set_piece(64).unwrap();
    let how = ops::Sampling::default();
    let first = batch.add(&prompt(LONG - 4, 5), how).unwrap();
    let (mut seen, mut second, mut third) = (Vec::new(), None, None);
    while seen.len() < 9 {
        match seen.len() {
            2 if others && second.is_none() => second = batch.add(&prompt(2, 6), how).ok(),
            4 if others && third.is_none() => third = batch.add(&prompt(LONG, 8), how).ok(),
            5 if others => third.take_if(|_| batch.waiting() > 0).into_iter().for_each(|id| {
                batch.remove(id).unwrap();
                batch.add(&prompt(LONG, 9), how).unwrap();
            }),
            6 => second.take().into_iter().for_each(|id| batch.remove(id).unwrap()),
            _ => (),
        }
        let tokens = batch.step().unwrap();
        let Some((_, drawn)) = tokens.into_iter().find(|(id, _)| *id == first) else { continue };
        let logits = batch.logits(first).unwrap();
        assert!(logits.iter().all(|l| l.is_finite()));
        seen.push((drawn.unwrap().token, logits.into_iter().map(f32::to_bits).collect()));
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
        batch.step.iter().filter(|t| t.operation.kernel_name() == name).count()
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

/// The limit of a step holds for whatever a step submits, but for a single operator.
#[test]
fn what_goes_beside_a_step_is_less_than_the_step() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let model = model(&runtime, 4, 2);
    let batch = Batch::new(&model, 8, POSITIONS, Mode::Eager).unwrap();
    let pace = Pace::new(&batch.step, 8);
    let (step, launches) = pace.step();
    let (product, attended) = batch.network.largest();
    for end in [1, 20, POSITIONS] {
        let rows = pace.rows(product, attended, end);
        assert!(rows.is_power_of_two());
        for rows in [1, rows, 64] {
            let rows = rows as u32;
            let scratch = Scratch::new(&model, rows).unwrap();
            let ids = runtime.alloc(256).unwrap().into();
            let table = batch.network.prompt_table(end).unwrap();
            let lane = &batch.prompts.lanes[0];
            let draw = &batch.draws.each[0];
            let tasks = collected(|to| {
                batch.network.piece(&scratch, lane, &ids, &table, to)?;
                batch.network.first_token(&scratch, draw, to)
            });
            let tasks = tasks.unwrap();
            let (mut left, mut parts) = (&tasks[..], 0);
            while !left.is_empty() {
                let (count, work) = pace.take(left, rows, end);
                let all: f64 = left[..count].iter().map(|t| pace.work(t, end).0).sum();
                assert!(count > 0 && (all - work.0).abs() <= 1e-9 * all);
                if count > 1 {
                    assert!(work.0 <= SHARE * step.0 && count <= launches, "{work:?} of {step:?}");
                } else if rows as usize <= pace.rows(product, attended, end)
                    && left[0].attended == 0
                {
                    assert!(work.0 <= SHARE * step.0, "one operator of {rows} rows: {work:?}");
                }
                (left, parts) = (&left[count..], parts + 1);
            }
            assert!(parts > 1, "a prompt has more launches than a step");
        }
    }
}

#[test]
fn the_pace_grows_slowly_and_falls_at_once() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let batch = Batch::new(&model(&runtime, 4, 2), 8, POSITIONS, Mode::Eager).unwrap();
    let mut pace = Pace::new(&batch.step, 8);
    let half = Work(pace.step().0.0 / 2.0);
    let ms = Duration::from_millis;
    pace.learn_part(16, half, ms(10));
    assert!((pace.ratio(16) - 1.0).abs() < 1e-9, "without a step it tells nothing");
    // A part with half of a step's work takes a tenth of its time: five times as fast.
    pace.learn_step(ms(100));
    pace.learn_part(16, half, ms(10));
    assert!((pace.ratio(16) - 5.0).abs() < 1e-9);
    // More rows are as fast at least; of fewer ones nothing is known.
    assert_eq!((pace.ratio(200), pace.ratio(15)), (pace.ratio(16), 1.0));
    pace.learn_part(17, half, ms(5));
    assert!((pace.ratio(16) - 6.25).abs() < 1e-9, "a quarter of the way to 10");
    pace.learn_part(31, half, ms(50));
    assert!((pace.ratio(16) - 1.0).abs() < 1e-9, "at once");
    // Clocks that stand still, and parts without work, tell nothing.
    pace.learn_part(16, half, ms(0));
    pace.learn_part(16, Work(0.0), ms(50));
    assert!((pace.ratio(16) - 1.0).abs() < 1e-9);
}

#[test]
fn a_longer_step_leaves_less_to_the_part_beside_the_next_one() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let batch = Batch::new(&model(&runtime, 4, 2), 8, POSITIONS, Mode::Eager).unwrap();
    let mut pace = Pace::new(&batch.step, 8);
    let ms = Duration::from_millis;
    let near = |share: f64, wanted: f64| assert!((share - wanted).abs() < 1e-9, "{share}");
    near(pace.share(), SHARE);
    pace.learn_step(ms(500));
    (0..5).for_each(|_| pace.learn_step(ms(100)));
    near(pace.share(), SHARE);
    pace.learn_step(ms(130));
    near(pace.share(), SHARE - 0.3);
    pace.learn_step(ms(400));
    near(pace.share(), 0.25);
    // Sequences become longer, and so do steps.
    (0..32).for_each(|_| pace.learn_step(ms(200)));
    near(pace.share(), SHARE);
}

#[test]
fn the_driver_calls_of_a_step_do_not_grow_with_its_sequences() {
    let calls = |rows: usize| {
        let kernels = KernelRegistry::new();
        leasehold_operators::simulate(&kernels).unwrap();
        let (runtime, driver) = simulated_cuda(kernels);
        let model = model(&runtime, 4, 2);
        let mut batch = Batch::new(&model, rows, 250, Mode::Graph).unwrap();
        for seed in 0..rows {
            batch.add(&prompt(1, seed as u32), ops::Sampling::default()).unwrap();
        }
        while batch.step().unwrap().len() < rows {}
        let mut steps =
            |count| (0..count).for_each(|_| assert_eq!(batch.step().unwrap().len(), rows));
        steps(4);
        let before: BTreeMap<_, _> = driver.machine().calls_by_name().into_iter().collect();
        steps(8);
        let mut calls: BTreeMap<_, _> = driver.machine().calls_by_name().into_iter().collect();
        for (name, count) in before {
            *calls.get_mut(&name).unwrap() -= count;
        }
        // How often a wait looks is a matter of time.
        calls.retain(|name, count| {
            *count > 0 && !["cuStreamQuery", "cuCtxGetCurrent"].contains(&&**name)
        });
        calls
    };
    let few = calls(2);
    assert!(few.values().sum::<u64>() >= 8, "{few:?}");
    assert_eq!(few, calls(8));
    assert_eq!(few, calls(32));
}

/// In virtual time.
#[test]
fn a_prompt_that_joins_makes_no_sequence_wait_for_two_steps() {
    const JOIN: usize = 1000;
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let (runtime, driver) = simulated_cuda(kernels);
    let config = serde_json::json!({"model_type": "llama", "hidden_act": "silu", "vocab_size": 40,
        "hidden_size": 32, "intermediate_size": 96, "num_hidden_layers": 4, "num_attention_heads": 4,
        "num_key_value_heads": 2, "max_position_embeddings": 4096});
    let config = Config::from_slice(config.to_string().as_bytes(), "a small model").unwrap();
    let weights = Weights::random(&config, DType::F32, 3).unwrap();
    let model = Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
    let mut batch = Batch::new(&model, 9, 3000, Mode::Graph).unwrap();
    for seed in 0..8 {
        start(&mut batch, &prompt(3, seed));
    }
    batch.prompts.times.clear();
    let id = start(&mut batch, &prompt(JOIN, 9));
    let times = std::mem::take(&mut batch.prompts.times);
    assert_eq!(batch.len(), 9);
    assert!(times.len() > 20, "{} parts", times.len());
    let mut steps: Vec<_> = times.iter().map(|(step, _)| *step).collect();
    steps.sort_unstable();
    let median = steps[steps.len() / 2];
    for (at, pair) in times.windows(2).enumerate() {
        let gap = pair[0].1 + pair[1].0;
        assert!(gap <= 2 * median, "part {at}: {gap:?} between two steps of {median:?}");
    }
    // It does not starve. The launches of a part are fewer than those of a step, and here the
    // caches of all sequences make the step's attention long.
    let beside: Duration = times.iter().map(|(_, beside)| *beside).sum();
    assert!(beside > median * (times.len() as u32) / 8, "{beside:?} beside {} steps", times.len());
    assert!(batch.find(id).is_ok());
    assert!(driver.machine().take_reports().is_empty());
}

/// Nobody's step would show it if each prompt failed alone.
#[test]
fn a_device_that_ends_in_a_prompt_ends_the_step() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let (runtime, driver) = simulated_cuda(kernels);
    let mut batch = Batch::new(&model(&runtime, 4, 2), 2, POSITIONS, Mode::Graph).unwrap();
    batch.add(&prompt(3, 1), ops::Sampling::default()).unwrap();
    driver.machine().lose_device(0, "unplugged");
    let why = batch.step().unwrap_err();
    assert!(why.to_string().contains("unplugged"), "{why}");
}

/// Without memory for its activations. The device stays well, and so do the others.
#[test]
fn a_prompt_that_fails_ends_alone() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let model = model(&runtime, 4, 2);
    let mut batch = Batch::new(&model, 3, POSITIONS, Mode::Graph).unwrap();
    batch.set_piece(256).unwrap();
    let how = ops::Sampling::default();
    let first = start(&mut batch, &prompt(3, 1));
    // Records the graph.
    batch.step().unwrap();
    let second = batch.add(&prompt(3, 2), how).unwrap();
    let third = batch.add(&prompt(LONG, 3), how).unwrap();
    let fourth_fits_not = batch.add(&[1], how).unwrap_err();
    assert!(fourth_fits_not.to_string().contains("3 slots"));
    runtime.allocator().set_budget(runtime.allocator().stats().reserved);
    let mut all = Vec::new();
    for bytes in [1 << 20, 1 << 16, 1 << 12, 1 << 8] {
        while let Ok(buffer) = runtime.alloc(bytes) {
            all.push(buffer);
        }
    }
    let (mut ended, mut tokens) = (Vec::new(), [0; 2]);
    while ended.is_empty() || tokens[1] < 3 {
        for (id, drawn) in batch.step().unwrap() {
            match drawn {
                Ok(_) => tokens[usize::from(id == second)] += 1,
                Err(why) => ended.push((id, why.kind())),
            }
        }
    }
    assert_eq!(ended, [(third, "OutOfMemory")]);
    assert!(tokens[0] >= tokens[1]);
    assert!(batch.remove(third).unwrap_err().to_string().contains("not in the batch"));
    assert_eq!((batch.len(), batch.waiting()), (2, 0));
    assert!(batch.has_room(first).unwrap());
    // The next prompt in that slot is computed.
    drop(all);
    runtime.allocator().set_budget(u64::MAX);
    let again = start(&mut batch, &prompt(LONG, 3));
    let mut alone = Batch::new(&model, 3, POSITIONS, Mode::Eager).unwrap();
    alone.set_piece(256).unwrap();
    let same = start(&mut alone, &prompt(LONG, 3));
    assert_eq!(batch.logits(again).unwrap(), alone.logits(same).unwrap());
}

/// The size of a lone prompt's pieces is bounded by these bytes.
#[test]
fn activations_have_the_bytes_that_rows_are_counted_with() {
    for (runtime, check) in devices() {
        for kind in ["llama", "qwen3"] {
            let config = serde_json::json!({"model_type": kind, "hidden_act": "silu", "vocab_size": 40,
                "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 1,
                "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32,
                "max_position_embeddings": 256, "tie_word_embeddings": false});
            let config = Config::from_slice(config.to_string().as_bytes(), "a config").unwrap();
            let weights = Weights::random(&config, DType::F32, 3).unwrap();
            let model =
                Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {}).unwrap();
            let (rows, before) = (256, runtime.allocator().stats().live_bytes);
            let scratch = Scratch::new(&model, rows).unwrap();
            let bytes = runtime.allocator().stats().live_bytes - before;
            // Only products of a vendor's library put `up` beside `gate`.
            let up = rows * 96 * 4;
            assert_eq!(bytes + u64::from(up), u64::from(rows) * Scratch::row_bytes(&model) as u64);
            drop(scratch);
        }
        check();
    }
}

/// Pieces of any size give the tokens of the whole prompt, and the same bits at every time.
#[test]
fn pieces_of_any_size_give_the_same_tokens() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        let text = |piece: usize, beside: bool| {
            let mut batch = Batch::new(&model, 2, POSITIONS, Mode::Graph).unwrap();
            batch.set_piece(piece).unwrap();
            assert_eq!(batch.piece(20), piece.min(256));
            if beside {
                start(&mut batch, &prompt(2, 6));
            }
            let id = batch.add(&prompt(20, 5), ops::Sampling::default()).unwrap();
            let (mut tokens, mut bits) = (Vec::new(), Vec::new());
            while tokens.len() < 4 {
                for (of, drawn) in batch.step().unwrap() {
                    if of == id {
                        tokens.push(drawn.unwrap().token);
                        bits.extend(batch.logits(id).unwrap().into_iter().map(f32::to_bits));
                    }
                }
            }
            (tokens, bits)
        };
        let whole = text(1000, false);
        for piece in [3, 8] {
            let (alone, beside) = (text(piece, false), text(piece, true));
            assert!(alone == beside, "{}: pieces of {piece}", runtime.device());
            assert_eq!(alone.0, whole.0, "{}: pieces of {piece}", runtime.device());
        }
        check();
    }
}

/// One recording serves all samplings, seeds and numbers of log-probabilities.
#[test]
fn a_batch_records_once_in_its_life() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        let text = |mode| {
            let mut batch = Batch::new(&model, 2, POSITIONS, mode).unwrap();
            let mut all = Vec::new();
            for seed in 0..6u32 {
                let how = ops::Sampling {
                    temperature: [0.0, 0.7, 1.5][seed as usize % 3],
                    top_k: 3 * (seed % 2),
                    top_p: 0.9,
                    seed: seed.into(),
                    log_probabilities: seed % 4,
                    ..ops::Sampling::default()
                };
                let id = batch.add(&prompt(3, seed), how).unwrap();
                let mut tokens = 0;
                while tokens < 3 {
                    for (_, drawn) in batch.step().unwrap() {
                        let drawn = drawn.unwrap();
                        assert_eq!(drawn.log_probability.is_some(), how.log_probabilities > 0);
                        assert_eq!(drawn.largest.len(), how.log_probabilities as usize);
                        all.push(drawn);
                        tokens += 1;
                    }
                }
                batch.remove(id).unwrap();
            }
            let recordings = batch.recordings;
            (all, recordings)
        };
        let ((eager, none), (graph, once)) = (text(Mode::Eager), text(Mode::Graph));
        assert_eq!((none, once), (0, 1), "{}", runtime.device());
        assert!(eager == graph, "{}", runtime.device());
        check();
    }
}

/// Of first tokens and of later ones: those of the logits, in double precision.
#[test]
fn log_probabilities_are_those_of_the_logits() {
    for (runtime, check) in devices() {
        let model = model(&runtime, 4, 2);
        let mut batch = Batch::new(&model, 3, POSITIONS, Mode::Graph).unwrap();
        let how = |seed, log_probabilities| ops::Sampling {
            temperature: 2.0,
            seed,
            log_probabilities,
            ..ops::Sampling::default()
        };
        let wanted = [20, 0, 3];
        let ids = [0, 1, 2].map(|i| batch.add(&prompt(4, i), how(i.into(), wanted[i as usize])));
        let ids = ids.map(|id| id.unwrap());
        let mut seen = [0; 3];
        while seen.iter().any(|&tokens| tokens < 3) {
            for (id, drawn) in batch.step().unwrap() {
                let (at, drawn) = (ids.iter().position(|of| *of == id).unwrap(), drawn.unwrap());
                seen[at] += 1;
                assert_eq!(drawn.largest.len(), wanted[at] as usize);
                assert_eq!(drawn.log_probability.is_some(), wanted[at] > 0);
                let Some(chosen) = drawn.log_probability else { continue };
                let logits = batch.logits(id).unwrap();
                let logits: Vec<f64> = logits.into_iter().map(f64::from).collect();
                let sum = logits.iter().map(|l| l.exp()).sum::<f64>().ln();
                let near = |found: f32, token: u32| {
                    let wanted = logits[token as usize] - sum;
                    assert!((f64::from(found) - wanted).abs() < 1e-4, "{found}, not {wanted}");
                };
                near(chosen, drawn.token);
                drawn.largest.iter().for_each(|&(token, value)| near(value, token));
                assert!(drawn.largest.is_sorted_by(|a, b| a.1 >= b.1));
                let most = logits.iter().copied().fold(f64::MIN, f64::max);
                assert!(logits[drawn.largest[0].0 as usize] == most);
            }
        }
        check();
    }
}

#[test]
fn a_sampling_beyond_its_limits_is_refused() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let mut batch = Batch::new(&model(&runtime, 4, 2), 2, POSITIONS, Mode::Graph).unwrap();
    let bad = [
        ops::Sampling { temperature: f32::NAN, ..ops::Sampling::default() },
        ops::Sampling { top_p: 0.0, ..ops::Sampling::default() },
        ops::Sampling { log_probabilities: 21, ..ops::Sampling::default() },
    ];
    for (how, name) in bad.into_iter().zip(["temperature", "top_p", "log_probabilities"]) {
        let error = batch.add(&[1], how).unwrap_err().to_string();
        assert!(error.contains(name), "{error}");
    }
    assert!(batch.is_empty());
}
