//! Decoding until the end token as one graph: the device decides when the text is over. The host
//! submits once, and reads the tokens at the end.
//!
//! `cargo run --release -p leasehold-llama --example until_end`
//!
//! The further argument is the device (`cpu:0`). CUDA needs the features `leasehold/cuda` and
//! `leasehold-operators/cuda`.

use leasehold::kernel::{Grid, Kernel, KernelSource, Read, Write};
use leasehold::prelude::*;
use leasehold::{Context, Timepoint};
use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
use std::time::{Duration, Instant};

/// The prompt's tokens, and the most new ones.
const PROMPT: [u32; 3] = [1, 2, 3];
const MOST: u32 = 40;

/// The token that was drawn, how many were, and the flag. The parameters are the end token, and how
/// many tokens there may be.
type GoOn = Kernel<(Read<u32>, Read<u32>, Write<u32>), [u32; 2]>;

const CUDA: &str = r#"
extern "C" __global__ void go_on(const unsigned* token, const unsigned* count, unsigned* flag,
                                 unsigned end, unsigned most) {
    *flag = *token != end && *count < most;
}
"#;

unsafe fn go_on(args: &CpuArgs<'_>) {
    let [end, most] = args.params();
    // SAFETY: the only tile has one word of each binding.
    let (drawn, count, flag) = unsafe {
        (args.slice::<u32>(0)[0], args.slice::<u32>(1)[0], args.slice_mut::<u32>(2, 0, 1))
    };
    flag[0] = u32::from(drawn != end && count < most);
}

fn kernel() -> Result<GoOn> {
    let check = GoOn::check(|launch| match (launch.info.grid, launch.info.block) {
        ([1, 1, 1], [1, 1, 1]) => (0..3).try_for_each(|binding| launch.want(binding, 1)),
        _ => Err(Error::invalid("one block of one thread")),
    });
    let cuda = KernelSource::CudaC { source: CUDA.into(), options: vec![].into() };
    let describe = |source| GoOn::desc("go_on", source, check.clone());
    let sources = vec![describe(cuda), describe(KernelSource::Cpu(go_on))];
    // SAFETY: a launch that the check accepts has one thread, which uses one word of each array.
    unsafe { KernelBase::with_sources(sources) }?.try_into()
}

/// The tokens up to `end`, each of them looked at by the host, and the time of the steps.
fn by_host(model: &Model, end: Option<u32>) -> Result<(Vec<u32>, Duration)> {
    let mut decoder = Decoder::new(model, 128, MOST as usize, Sampling::default())?;
    let mut point: Timepoint = decoder.prefill(&PROMPT)?;
    let step = decoder.record()?;
    let mut tokens = vec![decoder.token(0, point)?];
    let began = Instant::now();
    while tokens.len() < MOST as usize && tokens.last().copied() != end {
        point = decoder.launch(&step)?;
        tokens.push(decoder.token(tokens.len(), point)?);
    }
    Ok((tokens, began.elapsed()))
}

/// The same, where the device looks.
fn by_device(model: &Model, end: u32) -> Result<(Vec<u32>, Duration)> {
    let mut decoder = Decoder::new(model, 128, MOST as usize, Sampling::default())?;
    let point = decoder.prefill(&PROMPT)?;
    let (kernel, runtime) = (kernel()?, model.runtime());
    let flag = runtime.zeros::<u32>(1)?;
    let graph = decoder.record_while(&flag, |stream, state| {
        let operands = (state.token.view().values()?, state.count.view().values()?, &flag);
        kernel.launch(stream, operands, &[end, MOST], Grid::from(([1; 3], [1; 3]))).map(drop)
    })?;
    let mut tokens = vec![decoder.token(0, point)?];
    let began = Instant::now();
    tokens.extend(decoder.launch_while(&graph)?);
    Ok((tokens, began.elapsed()))
}

fn main() -> Result<()> {
    let device = std::env::args().nth(1).unwrap_or_else(|| "cpu:0".to_owned());
    let runtime = Context::new().runtime(device.parse()?)?;
    let config = Config::from_dir(leasehold_llama::demo_model::FOLDER.as_ref())?;
    let weights = Weights::read_dir(leasehold_llama::demo_model::FOLDER.as_ref(), &config)?;
    let model = Model::load(&runtime, &config, &weights, DType::Bf16, &mut |_, _| {})?;
    // The last word that is new in the text is taken for the end token.
    let (text, _) = by_host(&model, None)?;
    let new = |at: &usize| !text[..*at].contains(&text[*at]);
    let end = text[(0..text.len()).rev().find(new).unwrap_or_default()];
    let (wanted, host) = by_host(&model, Some(end))?;
    let (tokens, alone) = by_device(&model, end)?;
    println!("{} tokens; by the host {host:?}, by the device {alone:?}", tokens.len());
    assert_eq!(tokens, wanted);
    assert_eq!(tokens.last(), Some(&end));
    Ok(())
}
