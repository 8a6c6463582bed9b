//! The operators of prompts and steps, and what computes them.

use leasehold::{Context, DeviceId, Runtime};
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_llama::{
    Batch, Config, DType, Decoder, Mode, Model, OperatorCount, Sampling, Weights,
};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{KernelRegistry, MachineConfig};
use std::sync::Arc;

const LAYERS: usize = 2;

/// A model with heads that the tensor cores' attention takes.
fn model(runtime: &Runtime, dtype: DType) -> Model {
    let config = br#"{"model_type": "llama", "vocab_size": 64, "hidden_size": 128,
        "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2,
        "num_key_value_heads": 1, "max_position_embeddings": 1024, "hidden_act": "silu"}"#;
    let config = Config::from_slice(config, "config.json").unwrap();
    let weights = Weights::random(&config, dtype, 1).unwrap();
    Model::load(runtime, &config, &weights, dtype, &mut |_, _| {}).unwrap()
}

/// The number of operators called `name` with `rows` rows, and what computes them.
fn of<'a>(counts: &'a [OperatorCount], name: &str, rows: &str) -> Option<(&'a str, usize)> {
    let rows = format!("m {rows}, ");
    let mut found = counts.iter().filter(|c| c.name == name && c.shape.starts_with(&rows));
    let first = found.next()?;
    Some((first.computed_by, first.count + found.map(|c| c.count).sum::<usize>()))
}

#[test]
fn a_long_prompt_has_the_operators_of_its_pieces() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).unwrap();
    let model = model(&runtime, DType::F32);
    let decoder = Decoder::new(&model, 600, 1, Sampling::default()).unwrap();
    let prompt = decoder.prompt_operators(600).unwrap();
    assert_eq!(of(&prompt, "attention", "256"), Some(("attention", 2 * LAYERS)));
    assert_eq!(of(&prompt, "attention", "88"), Some(("attention", LAYERS)));
    assert_eq!(of(&prompt, "linear_add", "256"), Some(("linear_add", 2 * 2 * LAYERS)));
    assert_eq!(of(&prompt, "linear", "1"), Some(("linear", 1)));
    let whole = decoder.prompt_operators(512).unwrap();
    assert_eq!(of(&whole, "attention", "256"), Some(("attention", 2 * LAYERS)));
    assert_eq!(of(&whole, "attention", "88"), None);
    assert_eq!(of(&whole, "linear", "1"), Some(("linear", 1)));
    for tokens in [0, 601] {
        let error = decoder.prompt_operators(tokens).unwrap_err();
        assert_eq!(error.kind(), "InvalidArgument");
    }
}

#[test]
fn tensor_cores_compute_prompts_and_batches() {
    let kernels = KernelRegistry::new();
    leasehold_operators::simulate(&kernels).unwrap();
    let machine = MachineConfig::seed(3).kernels(kernels);
    let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine)).unwrap());
    let backend = CudaBackend::with_ops(driver, CudaConfig::default()).unwrap();
    let runtime =
        Context::with_backends(vec![Arc::new(backend)]).runtime("cuda:0".parse().unwrap()).unwrap();
    let model = model(&runtime, DType::Bf16);
    let decoder = Decoder::new(&model, 40, 1, Sampling::default()).unwrap();
    let (prompt, step) = (decoder.prompt_operators(40).unwrap(), decoder.step_operators());
    assert_eq!(of(&prompt, "linear3", "40"), Some(("linear3_boxes", LAYERS)));
    assert_eq!(of(&step, "linear3", "1"), Some(("linear3", LAYERS)));
    let (attention, count) = of(&prompt, "attention", "40").unwrap();
    assert!(
        attention == "attention_tiles" || attention.starts_with("attention_warpgroups"),
        "{attention}"
    );
    assert_eq!(count, LAYERS);
    let batch = Batch::new(&model, 3, 40, Mode::Eager).unwrap().step_operators();
    assert_eq!(of(&batch, "linear3", "3"), Some(("linear3_boxes", LAYERS)));
    assert_eq!(of(&batch, "linear", "3"), Some(("linear_boxes", 1)));
}
