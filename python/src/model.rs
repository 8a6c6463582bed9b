//! Language models: a directory of Hugging Face's, and texts that continue prompts.
//!
//! A model has a stream of its own. Its files are read, not mapped, so no other program can change
//! them under it.

use crate::arguments;
use crate::device::{Device, State, state};
use crate::errors::{Class, invalid, raise};
use crate::fork::Own;
use crate::waits::look;
use leasehold::{Error, Result};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_llama::{
    Batch, Config, DType, GenerationConfig, Mode, Model, Request, Sampling, SequenceId,
    StopStrings, TextStream, Tokenizer, Weights,
};
use pyo3::prelude::*;
use pyo3::types::{PyDict, PyString};
use std::collections::{BTreeMap, VecDeque};
use std::path::Path;

/// Sequences that are decoded together unless the caller says how many.
const LARGEST_BATCH: usize = 16;

/// Tokens of a text, at the most.
const MOST_TOKENS: usize = 1 << 22;

/// Prompts of a generation, and texts that end it, at the most.
const MOST_TEXTS: usize = 1 << 20;

/// A model on a device.
struct Loaded {
    device: Arc<State>,
    name: String,
    model: Model,
    tokenizer: Tokenizer,
    generation: Option<GenerationConfig>,
}

impl Loaded {
    fn read(device: &Arc<State>, dir: &Path, activations: DType) -> Result<Self> {
        let config = Config::from_dir(dir)?;
        let generation = GenerationConfig::from_dir(dir)?;
        let tokenizer = Tokenizer::from_dir(dir)?;
        let weights = Weights::read_dir(dir, &config)?;
        device.use_streams()?;
        let runtime = device.runtime.create_stream()?.runtime();
        let model = Model::load(&runtime, &config, &weights, activations, &mut |_, _| {})?;
        let (device, name) = (device.clone(), dir.display().to_string());
        Ok(Self { device, name, model, tokenizer, generation })
    }

    /// The tokens that end a text: those of `generation_config.json` replace those of
    /// `config.json`.
    fn end_tokens(&self) -> &[u32] {
        let named = self.generation.as_ref().and_then(GenerationConfig::eos_token_ids);
        named.unwrap_or(&self.model.config().eos_token_ids)
    }

    /// The choice of tokens that the model's makers say.
    fn defaults(&self) -> Result<Sampling> {
        match &self.generation {
            Some(generation) => generation.sampling(),
            None => Err(Error::invalid(format!(
                "defaults: {} has no generation_config.json; leave defaults out, and give \
                 temperature and its like",
                self.name
            ))),
        }
    }
}

/// A decoder of the Llama family (Llama, Mistral, Qwen2, Qwen3) on a device.
///
/// Parameters
/// ----------
/// path
///     A directory of Hugging Face's: `config.json`, `model.safetensors` (or its shards),
///     `tokenizer.json`, perhaps `generation_config.json`. The files are read into memory.
/// device
///     The device, or its name.
/// dtype
///     The type of activations and KV cache: `"float32"` or `"bfloat16"`.
///
/// Raises `UnavailableError` for a missing file, `UnsupportedError` for an architecture or weights
/// that are unknown here, `InvalidArgumentError` for damaged files. Each names the file.
#[pyclass(frozen, weakref, name = "Model", module = "leasehold")]
pub(crate) struct ModelObject(Own<Arc<Loaded>>);

/// A sequence that is decoded.
struct Live {
    prompt: usize,
    text: TextStream,
    stops: StopStrings,
    left: usize,
}

/// The arguments of a generation.
struct Run {
    loaded: Arc<Loaded>,
    batch: Batch,
    /// The prompts that no slot has yet, by their number.
    waiting: VecDeque<(usize, Vec<u32>)>,
    live: BTreeMap<SequenceId, Live>,
    /// Pieces that nobody has taken.
    pieces: VecDeque<(usize, String)>,
    tokens: usize,
    sampling: Sampling,
    ends: Vec<u32>,
    stop: Vec<String>,
}

impl Run {
    /// The next piece of a text, and the number of its prompt.
    fn next(&mut self) -> Result<Option<(usize, String)>> {
        self.loaded.device.check_process()?;
        loop {
            if let Some(piece) = self.pieces.pop_front() {
                return Ok(Some(piece));
            }
            while self.batch.len() < self.batch.slots()
                && let Some((prompt, ids)) = self.waiting.pop_front()
            {
                let (_, text) = self.loaded.tokenizer.stream_after(&ids)?;
                let stops = StopStrings::new(&self.stop)?;
                let id = self.batch.add(&ids, self.sampling)?;
                self.live.insert(id, Live { prompt, text, stops, left: self.tokens });
            }
            if self.live.is_empty() {
                return Ok(None);
            }
            look()?;
            for (id, drawn) in self.batch.step()? {
                let token = drawn?.token;
                let Some(live) = self.live.get_mut(&id) else { continue };
                let (prompt, is_end) = (live.prompt, self.ends.contains(&token));
                let piece = if is_end { String::new() } else { live.text.push(token)? };
                let mut text = live.stops.push(&piece);
                live.left -= 1;
                if is_end || live.left == 0 || live.stops.stopped().is_some() {
                    self.batch.remove(id)?;
                    if let Some(Live { text: rest, mut stops, .. }) = self.live.remove(&id)
                        && stops.stopped().is_none()
                    {
                        text += &stops.push(&rest.finish()?);
                        if stops.stopped().is_none() {
                            text += &stops.finish();
                        }
                    }
                }
                if !text.is_empty() {
                    self.pieces.push_back((prompt, text));
                }
            }
        }
    }
}

/// The pieces of the texts that continue prompts, as they come.
#[pyclass(frozen, name = "_Pieces", module = "leasehold")]
pub(crate) struct Pieces(Mutex<Option<Own<Run>>>);

#[pymethods]
impl Pieces {
    fn __iter__(slf: Bound<'_, Self>) -> Bound<'_, Self> {
        slf
    }

    fn __next__(&self, py: Python<'_>) -> PyResult<Option<(usize, String)>> {
        let next = || {
            let mut run = self.0.lock();
            let next = run.as_mut().map_or(Ok(None), |run| run.next());
            if !matches!(next, Ok(Some(_))) {
                // It is over, or has failed: the memory goes.
                *run = None;
            }
            next
        };
        py.detach(next).map_err(raise)
    }
}

/// An option of a generation.
fn option<'py, T: pyo3::conversion::FromPyObjectOwned<'py>>(
    options: &Bound<'py, PyDict>,
    name: &str,
    what: &str,
) -> PyResult<Option<T>> {
    let given = options.get_item(name)?.filter(|value| !value.is_none());
    given.map(|value| arguments::value(&value, &format!("{name} is {what}"))).transpose()
}

#[pymethods]
impl ModelObject {
    #[new]
    #[pyo3(
        signature = (path, *, device=None, dtype=None),
        text_signature = "(path, *, device='cpu:0', dtype='float32')"
    )]
    fn new(
        path: &Bound<'_, PyAny>,
        device: Option<&Bound<'_, PyAny>>,
        dtype: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        let py = path.py();
        let path: String = arguments::value(
            &py.import("os")?.call_method1("fspath", (path,)).map_err(|error| {
                let text = "a model is the path of a directory";
                arguments::because(py, Class::ArgumentType.error(text), error)
            })?,
            "a model is the path of a directory",
        )?;
        let activations = match dtype.map(crate::dtype::parse).transpose()?.map(|row| row.name) {
            None | Some("float32") => DType::F32,
            Some("bfloat16") => DType::Bf16,
            Some(other) => {
                return Err(invalid(format!("activations are float32 or bfloat16, not {other}")));
            }
        };
        let device = match device {
            Some(device) => state(device)?,
            None => State::host(py).map_err(raise)?,
        };
        let loaded = py.detach(|| Loaded::read(&device, Path::new(&path), activations));
        Ok(Self(Own::new(Arc::new(loaded.map_err(raise)?))))
    }

    /// The device.
    #[getter]
    fn device(&self) -> Device {
        Device(self.0.device.clone())
    }

    /// Tokens of a prompt and its text together, at most.
    #[getter]
    fn context(&self) -> usize {
        self.0.model.config().context()
    }

    /// The number of tokens in the vocabulary.
    #[getter]
    fn vocabulary(&self) -> usize {
        self.0.model.config().vocab_size
    }

    /// The tokens of a text, as numbers.
    fn encode(&self, text: &Bound<'_, PyAny>) -> PyResult<Vec<u32>> {
        let given: String = arguments::value(text, "a prompt is a text")?;
        text.py().detach(|| self.0.tokenizer.encode(&given)).map_err(raise)
    }

    /// The text of tokens.
    fn decode(&self, tokens: &Bound<'_, PyAny>) -> PyResult<String> {
        let ids: Vec<u32> =
            arguments::list(tokens, "tokens are a list of numbers", (MOST_TOKENS, "tokens"))?;
        tokens.py().detach(|| self.0.tokenizer.decode(&ids)).map_err(raise)
    }

    /// Begins the texts that continue prompts. `options` are those of `leasehold.generate`.
    #[pyo3(signature = (prompts, **options))]
    fn _pieces(
        &self,
        prompts: &Bound<'_, PyAny>,
        options: Option<&Bound<'_, PyDict>>,
    ) -> PyResult<Pieces> {
        let py = prompts.py();
        let options = options.cloned().unwrap_or_else(|| PyDict::new(py));
        let texts: Vec<String> =
            arguments::list(prompts, "prompts are a list of texts", (MOST_TEXTS, "prompts"))?;
        let tokens = option::<usize>(&options, "tokens", "a number")?.unwrap_or(64);
        let slots = option::<usize>(&options, "batch", "a number")?;
        let (temperature, top_k) = (
            option::<f32>(&options, "temperature", "a number")?,
            option::<u32>(&options, "top_k", "a number")?,
        );
        let (top_p, min_p) = (
            option::<f32>(&options, "top_p", "a number")?,
            option::<f32>(&options, "min_p", "a number")?,
        );
        let seed = option::<u64>(&options, "seed", "a number from 0 on")?;
        let defaults = option::<bool>(&options, "defaults", "True or False")?.unwrap_or(false);
        let at_eos = option::<bool>(&options, "stop_at_eos", "True or False")?.unwrap_or(true);
        let stop = options.get_item("stop")?.filter(|stop| !stop.is_none());
        let stop: Vec<String> = match stop {
            Some(stop) => arguments::list(&stop, "stop is a list of texts", (MOST_TEXTS, "stops"))?,
            None => Vec::new(),
        };
        let loaded = Arc::clone(&self.0);
        let begin = || {
            loaded.device.check_process()?;
            let base = if defaults { loaded.defaults()? } else { Sampling::default() };
            let sampling = Sampling {
                temperature: temperature.unwrap_or(base.temperature),
                top_k: top_k.unwrap_or(base.top_k),
                top_p: top_p.unwrap_or(base.top_p),
                min_p: min_p.unwrap_or(base.min_p),
                seed: seed.unwrap_or(base.seed),
                ..base
            };
            sampling.record()?;
            StopStrings::new(&stop)?;
            let (mut waiting, mut positions) = (VecDeque::new(), 0);
            for (i, text) in texts.iter().enumerate() {
                let ids = loaded.tokenizer.encode(text)?;
                let request = Request {
                    prompt: &ids,
                    tokens,
                    mode: Mode::Graph,
                    sampling,
                    stop_at: &[],
                    check: false,
                };
                let needs = request.check(loaded.model.config());
                let needs = needs.map_err(|error| match error {
                    Error::InvalidArgument(text) => Error::invalid(format!("prompt {i}: {text}")),
                    other => other,
                })?;
                positions = positions.max(needs);
                waiting.push_back((i, ids));
            }
            if waiting.is_empty() {
                return Ok(None);
            }
            let slots = slots.unwrap_or(LARGEST_BATCH).min(waiting.len());
            let graphs = loaded.model.runtime().raw_device().caps().graphs;
            let mode = if graphs { Mode::Graph } else { Mode::Eager };
            let batch = Batch::preallocated(&loaded.model, slots, positions, mode)?;
            let ends = if at_eos { loaded.end_tokens().to_vec() } else { Vec::new() };
            let (live, pieces) = (BTreeMap::new(), VecDeque::new());
            let run = Run { loaded, batch, waiting, live, pieces, tokens, sampling, ends, stop };
            Ok(Some(Own::new(run)))
        };
        py.detach(begin).map(|run| Pieces(Mutex::new(run))).map_err(raise)
    }

    fn __repr__(&self, py: Python<'_>) -> PyResult<String> {
        let name = PyString::new(py, &self.0.name).repr()?;
        Ok(format!("Model({name}, device='{}')", self.0.device.name))
    }
}
