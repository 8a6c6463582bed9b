//! `leasehold run`: generates text with a model of the Llama family.
//!
//! All memory, streams, events, kernels and graphs come from the runtime.

use crate::bundled;
use crate::commands::memory::{self, MemoryArguments};
use crate::commands::{operators, percentile, print_json, timeline};
use crate::failure::Failure;
use crate::host;
use crate::output::{Inputs, Outputs};
use crate::ranks::{self, Kill, Plan, Rank, RankArguments};
use crate::style::{Tone, paint};
use crate::system::{Devices, Request as Opening};
use crate::table::{Table, bytes};
use clap::ValueEnum;
use indicatif::{ProgressBar, ProgressDrawTarget, ProgressStyle};
use leasehold::{DeviceId, Runtime};
use leasehold_collective::{Comm, World};
use leasehold_input::{printable, shown_within};
use leasehold_llama::{
    Config, DType, Decoder, Generation, GenerationConfig, Model, Part, Progress, Request, Sampling,
    TextStream, TokenRules, Tokenizer, Weights, footprint, generate_with_rules,
};
use leasehold_operators::kernels::cpu::isa::Isa;
use serde::Serialize;
use std::borrow::Cow;
use std::hash::{DefaultHasher, Hash, Hasher};
use std::io::{IsTerminal, Write};
use std::num::NonZeroU32;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// The default prompt of the bundled model.
const DEFAULT_PROMPT: &str = "def read_lines(path):\n    ";

/// The groups of options in the help.
const TEXT: &str = "Model and text";
pub const DEVICE: &str = "Device and execution";
const CHOICE: &str = "Choice of tokens";
const OUTPUT: &str = "Output";
const RANKS: &str = "Ranks";
const MEMORY: &str = "Memory";

#[derive(Debug, clap::Args)]
pub struct Arguments {
    /// A Hugging Face directory of a Llama, Mistral, Qwen2 or Qwen3 (config.json,
    /// model.safetensors, tokenizer.json); the bundled model when left out
    #[arg(long, help_heading = TEXT, value_name = "DIR")]
    model: Option<PathBuf>,
    /// The text to continue
    #[arg(long, help_heading = TEXT, value_name = "TEXT", conflicts_with = "prompt_ids")]
    prompt: Option<String>,
    /// The same as token ids, separated by commas
    #[arg(long, help_heading = TEXT, value_name = "IDS", value_delimiter = ',')]
    prompt_ids: Option<Vec<u32>>,
    /// Number of new tokens
    #[arg(long, help_heading = TEXT, default_value_t = 64, value_parser = clap::value_parser!(u32).range(1..))]
    tokens: u32,
    /// The device
    #[arg(long, help_heading = DEVICE, default_value = "cpu:0", value_parser = parse_device)]
    device: DeviceId,
    /// Threads that a kernel may use; all that this process may use when left out
    #[arg(long, help_heading = DEVICE, value_parser = clap::value_parser!(u16).range(1..=1024))]
    threads: Option<u16>,
    /// The level of the kernels' instructions on the CPU, to see what another processor would give;
    /// the best one when left out
    #[arg(long, help_heading = DEVICE, value_name = "LEVEL")]
    level: Option<Isa>,
    /// Launch by launch, recorded and replayed, or one after the other
    #[arg(long, help_heading = DEVICE, value_enum, default_value_t = Modes::Both)]
    mode: Modes,
    /// The element type of activations and KV cache
    #[arg(long, help_heading = DEVICE, value_enum, default_value_t = Activations::F32)]
    dtype: Activations,
    /// The divisor of the logits; 0, the default, selects the largest
    #[arg(long, help_heading = CHOICE, allow_negative_numbers = true, value_parser = parse_temperature)]
    temperature: Option<f32>,
    /// Number of largest logits that are candidates; 0, the default, for all
    #[arg(long, help_heading = CHOICE)]
    top_k: Option<u32>,
    /// Leaves the fewest most probable candidates whose probabilities reach this sum; 1, the
    /// default, leaves all
    #[arg(long, help_heading = CHOICE, allow_negative_numbers = true, value_parser = parse_top_p)]
    top_p: Option<f32>,
    /// Leaves the candidates with this part of the largest probability; 0, the default, leaves all
    #[arg(long, help_heading = CHOICE, allow_negative_numbers = true, value_parser = parse_min_p)]
    min_p: Option<f32>,
    /// Chooses tokens as the model's generation_config.json says, with its repetition_penalty,
    /// suppress_tokens and begin_suppress_tokens; --temperature, --top-k, --top-p and --min-p
    /// precede it
    #[arg(long, help_heading = CHOICE)]
    defaults: bool,
    /// The seed of the random numbers; the same seed gives the same text
    #[arg(long, help_heading = CHOICE, default_value_t = 0)]
    seed: u64,
    /// Ends the text at an end token of generation_config.json, or else of config.json
    #[arg(long, help_heading = CHOICE)]
    stop_at_eos: bool,
    /// Checks on the device that the logits of each token are finite; the first that are not are
    /// named by token and index, and end the command
    #[arg(long, help_heading = OUTPUT)]
    check: bool,
    /// Includes the logits after the prompt's last position in the JSON
    #[arg(long, help_heading = OUTPUT, requires = "json")]
    logits: bool,
    /// Prints one JSON object and nothing else
    #[arg(long, help_heading = OUTPUT)]
    json: bool,
    /// Also prints, to standard error, the operators of the prompt and of a step, and what computes
    /// each: the kernel, or the vendor's library
    #[arg(long, help_heading = OUTPUT)]
    verbose: bool,
    /// Writes a timeline of one token after warm-up, launch by launch: kernels and gaps on the
    /// device, submissions on the host; for ui.perfetto.dev, as JSON trace events
    #[arg(long, help_heading = OUTPUT, value_name = "FILE")]
    trace: Option<PathBuf>,
    #[command(flatten, next_help_heading = RANKS)]
    ranks: RankArguments,
    /// Ends a rank as it reaches a new token, counted from 0, to see what the others say; for tests
    #[arg(long, help_heading = RANKS, value_name = "RANK@TOKEN", requires = "ranks")]
    kill: Option<Kill>,
    #[command(flatten, next_help_heading = MEMORY)]
    memory: MemoryArguments,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Modes {
    Eager,
    Graph,
    Both,
}

impl Modes {
    fn list(self) -> &'static [leasehold_llama::Mode] {
        use leasehold_llama::Mode::{Eager, Graph};
        match self {
            Modes::Eager => &[Eager],
            Modes::Graph => &[Graph],
            Modes::Both => &[Eager, Graph],
        }
    }
}

#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub(crate) enum Activations {
    F32,
    Bf16,
}

impl From<Activations> for DType {
    fn from(a: Activations) -> Self {
        match a {
            Activations::F32 => DType::F32,
            Activations::Bf16 => DType::Bf16,
        }
    }
}

/// A device. The parser's message has the option and the value already.
pub fn parse_device(text: &str) -> Result<DeviceId, String> {
    text.parse().map_err(|e| match e {
        leasehold::Error::InvalidArgument(why) => {
            why.strip_prefix(&format!("device {text:?}: ")).unwrap_or(&why).to_owned()
        }
        other => other.to_string(),
    })
}

/// A number that is a field of a sampling.
fn parse_field(text: &str, sampling: impl Fn(f32) -> Sampling) -> Result<f32, String> {
    let value = text.parse().map_err(|_| "a number is expected".to_owned())?;
    match sampling(value).record() {
        Ok(_) => Ok(value),
        Err(leasehold::Error::InvalidArgument(why)) => Err(why.to_string()),
        Err(other) => Err(other.to_string()),
    }
}

fn parse_temperature(text: &str) -> Result<f32, String> {
    parse_field(text, |temperature| Sampling { temperature, ..Sampling::default() })
}

fn parse_top_p(text: &str) -> Result<f32, String> {
    parse_field(text, |top_p| Sampling { top_p, ..Sampling::default() })
}

fn parse_min_p(text: &str) -> Result<f32, String> {
    parse_field(text, |min_p| Sampling { min_p, ..Sampling::default() })
}

/// A model's files after all checks.
pub(crate) struct Files {
    pub(crate) name: String,
    pub(crate) config: Config,
    pub(crate) weights: Weights,
    tokenizer: Option<Tokenizer>,
    generation: Option<GenerationConfig>,
}

impl Files {
    /// Weights without a tokenizer.
    pub(crate) fn without_text(name: String, config: Config, weights: Weights) -> Self {
        Self { name, config, weights, tokenizer: None, generation: None }
    }

    /// The files of a directory, or the bundled ones. A tokenizer is required only for text.
    pub(crate) fn read(dir: Option<&Path>, tokenizer: bool) -> Result<Self, Failure> {
        let Some(dir) = dir else {
            let config = bundled::config()?;
            return Ok(Self {
                name: bundled::NAME.to_owned(),
                weights: bundled::weights(&config)?,
                config,
                tokenizer: Some(bundled::tokenizer()?),
                generation: None,
            });
        };
        let config = Config::from_dir(dir)?;
        let generation = GenerationConfig::from_dir(dir)?;
        // SAFETY: the command writes no file of a model. The user must ensure that no other program
        // changes one while the command runs.
        let weights = unsafe { Weights::from_dir(dir, &config) }?;
        weights.notices().iter().for_each(|text| note(text));
        let tokenizer = match Tokenizer::from_dir(dir) {
            Ok(t) => Some(t),
            Err(leasehold::Error::NotFound(_)) if !tokenizer => None,
            Err(e) => return Err(e.into()),
        };
        Ok(Self { name: dir.display().to_string(), config, weights, tokenizer, generation })
    }

    /// The tokens that end a text: those of `generation_config.json` replace those of
    /// `config.json`.
    fn end_tokens(&self) -> &[u32] {
        let named = self.generation.as_ref().and_then(GenerationConfig::eos_token_ids);
        named.unwrap_or(&self.config.eos_token_ids)
    }

    /// The choice of tokens according to `generation_config.json`.
    fn defaults(&self) -> Result<(Sampling, TokenRules), Failure> {
        let Some(generation) = &self.generation else {
            let why = "--defaults: the model has no generation_config.json";
            return Err(Failure::misuse(format!("{}: {why}; leave --defaults out", self.name)));
        };
        let cure = "leave --defaults out, and give --temperature and its like";
        let all = generation.sampling().and_then(|how| Ok((how, generation.rules()?)));
        all.map_err(|e| Failure::new(format!("--defaults: {e}; {cure}")))
    }
}

#[derive(Debug, Serialize)]
struct Report {
    /// The first rank's.
    device: String,
    ranks: u32,
    model: String,
    prompt_ids: Vec<u32>,
    output_ids: Vec<u32>,
    text: Option<String>,
    threads: Option<u16>,
    /// The level that was asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    level: Option<&'static str>,
    /// From the beginning of the command.
    first_token_ms: f64,
    modes: ModeReports,
    /// `null` if only one mode ran.
    modes_agree: Option<bool>,
    /// `null` for one rank.
    ranks_agree: Option<bool>,
    memory: Memory,
    #[serde(skip_serializing_if = "Option::is_none")]
    last_logits: Option<Vec<f32>>,
}

#[derive(Debug, Default, Serialize)]
struct ModeReports {
    #[serde(skip_serializing_if = "Option::is_none")]
    eager: Option<ModeReport>,
    #[serde(skip_serializing_if = "Option::is_none")]
    graph: Option<ModeReport>,
}

#[derive(Debug, Clone, Serialize)]
pub(crate) struct ModeReport {
    pub(crate) prefill_ms: f64,
    pub(crate) decode_tokens_per_s: f64,
    pub(crate) token_ms_p50: f64,
    pub(crate) token_ms_p99: f64,
}

impl From<&Generation> for ModeReport {
    fn from(g: &Generation) -> Self {
        let steps: Vec<f64> = g.steps.iter().map(|d| d.as_secs_f64() * 1e3).collect();
        let seconds = g.decode.as_secs_f64();
        Self {
            prefill_ms: g.prefill.as_secs_f64() * 1e3,
            decode_tokens_per_s: if steps.is_empty() || seconds == 0.0 {
                0.0
            } else {
                steps.len() as f64 / seconds
            },
            token_ms_p50: percentile(&steps, 0.5),
            token_ms_p99: percentile(&steps, 0.99),
        }
    }
}

#[derive(Debug, Serialize)]
struct Memory {
    live_peak_bytes: u64,
    reserved_peak_bytes: u64,
    imported_bytes: u64,
    driver_allocations_in_decode: u64,
    allocations_in_decode: u64,
}

/// Loads a model with a progress bar.
pub(crate) fn load(
    runtime: &Runtime,
    files: &Files,
    activations: DType,
    quiet: bool,
) -> Result<Model, Failure> {
    let Files { config, weights, .. } = files;
    load_by(files, quiet, |p| Model::load(runtime, config, weights, activations, p))
}

/// As [`load`], a model that can be suspended.
pub(crate) fn load_suspendable(
    runtime: &Runtime,
    files: &Files,
    activations: DType,
    quiet: bool,
) -> Result<Model, Failure> {
    let Files { config, weights, .. } = files;
    load_by(files, quiet, |p| Model::load_suspendable(runtime, config, weights, activations, p))
}

/// As [`load`], this rank's part of a model.
pub(crate) fn load_part(
    comm: &Comm,
    files: &Files,
    activations: DType,
    quiet: bool,
) -> Result<Model, Failure> {
    let Files { config, weights, .. } = files;
    load_by(files, quiet, |p| Model::load_part(comm, config, weights, activations, p))
}

fn load_by(
    files: &Files,
    quiet: bool,
    load: impl FnOnce(Progress<'_>) -> leasehold::Result<Model>,
) -> Result<Model, Failure> {
    let bar = ProgressBar::new(files.weights.total_bytes());
    if quiet {
        bar.set_draw_target(ProgressDrawTarget::hidden());
    }
    if let Ok(style) = ProgressStyle::with_template("loading {bar:32} {bytes}/{total_bytes}") {
        bar.set_style(style);
    }
    let model = load(&mut |done, total| {
        bar.set_length(total);
        bar.set_position(done);
    });
    bar.finish_and_clear();
    Ok(model?)
}

/// Prints text as it arrives.
struct Printer {
    stream: Option<TextStream>,
    print: bool,
    /// The text of the prompt, which is printed with the first token: until then, nothing is known
    /// to work.
    prompt: String,
}

/// Generated text for standard output. A terminal gets no control characters except newlines and
/// tabs, because the text may come from an untrusted model or tokenizer. Any other output gets the
/// text unchanged.
fn for_output(text: &str) -> Cow<'_, str> {
    if std::io::stdout().is_terminal() { Cow::Owned(printable(text)) } else { Cow::Borrowed(text) }
}

impl Printer {
    fn token(&mut self, id: u32) -> leasehold::Result<()> {
        let piece = match &mut self.stream {
            Some(stream) => stream.push(id)?,
            None => format!("{id} "),
        };
        self.emit(&piece)
    }

    fn emit(&mut self, piece: &str) -> leasehold::Result<()> {
        if self.print {
            let mut out = std::io::stdout().lock();
            let prompt = std::mem::take(&mut self.prompt);
            let prompt = for_output(&prompt);
            let all =
                [paint(Tone::Given, &prompt).as_bytes(), for_output(piece).as_bytes()].concat();
            let written = out.write_all(&all).and_then(|()| out.flush());
            written.map_err(|e| {
                leasehold::Error::Unavailable(format!("standard output: {e}").into())
            })?;
        }
        Ok(())
    }
}

/// The text of new ids: what they add to the prompt's text, a space at the seam included.
fn new_text(tokenizer: &Tokenizer, prompt: &[u32], new: &[u32]) -> leasehold::Result<String> {
    let all = tokenizer.decode(&[prompt, new].concat())?;
    match all.strip_prefix(tokenizer.decode(prompt)?.as_str()) {
        Some(text) => Ok(text.to_owned()),
        // The new ids complete a character that the prompt begins.
        None => {
            let (begun, _) = tokenizer.stream_after(prompt)?;
            Ok(all.strip_prefix(begun.as_str()).unwrap_or(&all).to_owned())
        }
    }
}

/// Refuses more tokens of so many sequences than the host's memory allows: its tables and lists,
/// and also the device's memory if the host shares it.
pub(crate) fn fits(
    files: &Files,
    prompt: usize,
    tokens: u32,
    sequences: NonZeroU32,
    dtype: DType,
    runtime: &Runtime,
) -> Result<(), Failure> {
    let need = footprint(&files.config, prompt, tokens as usize, dtype);
    // Lists of both modes, their report, and its text.
    let host = need.host.saturating_mul(3);
    let shared = if runtime.raw_device().caps().host_visible { need.device } else { 0 };
    let need = host.saturating_add(shared).saturating_mul(u64::from(sequences.get()));
    let (what, cure) = match sequences {
        NonZeroU32::MIN => ("a run".to_owned(), "--tokens"),
        n => (format!("{n} sequences"), "--tokens or --batch"),
    };
    let what = format!("{}: {what} of {tokens} tokens", files.name);
    host::needs(&what, need, &format!("ask for fewer with {cure}"))
}

/// Tells on standard error what the user may want to know, and is no error.
fn note(text: &str) {
    // Without standard error, nobody wants to know.
    let _ = writeln!(std::io::stderr(), "note: {}", shown_within(text, 1000));
}

/// The text that is asked for, after all checks.
struct Job<'a> {
    arguments: &'a Arguments,
    files: &'a Files,
    prompt: Vec<u32>,
    sampling: Sampling,
    rules: TokenRules,
    stop_at: &'a [u32],
    begun: Instant,
}

/// A model and the texts that it has given.
struct Done {
    model: Model,
    runs: Vec<(leasehold_llama::Mode, Generation)>,
    text: Option<String>,
    first_token: Option<Duration>,
    /// Whether all ranks have the same texts, if there are several.
    ranks_agree: Option<bool>,
}

impl<'a> Job<'a> {
    fn new(arguments: &'a Arguments, files: &'a Files, begun: Instant) -> Result<Self, Failure> {
        let prompt = match (&arguments.prompt_ids, &arguments.prompt, &files.tokenizer) {
            (Some(ids), _, _) => ids.clone(),
            (None, text, Some(tokenizer)) => {
                tokenizer.encode(text.as_deref().unwrap_or(DEFAULT_PROMPT))?
            }
            (None, _, None) => {
                return Err(Failure::new(format!(
                    "{}: no tokenizer; give --prompt-ids",
                    files.name
                )));
            }
        };
        let stop_at: &[u32] = if arguments.stop_at_eos { files.end_tokens() } else { &[] };
        if arguments.stop_at_eos && stop_at.is_empty() {
            note(&format!("--stop-at-eos: {}: the model's files name no end token", files.name));
        }
        let (named, rules) =
            if arguments.defaults { files.defaults()? } else { Default::default() };
        let sampling = Sampling {
            temperature: arguments.temperature.unwrap_or(named.temperature),
            top_k: arguments.top_k.unwrap_or(named.top_k),
            top_p: arguments.top_p.unwrap_or(named.top_p),
            min_p: arguments.min_p.unwrap_or(named.min_p),
            seed: arguments.seed,
            ..named
        };
        let job = Self { arguments, files, prompt, sampling, rules, stop_at, begun };
        job.request(leasehold_llama::Mode::Eager)
            .check(&files.config)
            .map_err(|e| Failure::from(e).at(&files.name))?;
        Ok(job)
    }

    fn request(&self, mode: leasehold_llama::Mode) -> Request<'_> {
        Request {
            prompt: &self.prompt,
            tokens: self.arguments.tokens as usize,
            mode,
            sampling: self.sampling,
            stop_at: self.stop_at,
            check: self.arguments.check,
        }
    }

    /// Checks that so many ranks divide the model, and that the options are for several ranks.
    fn check_ranks(&self, ranks: u32) -> Result<(), Failure> {
        Part::new(0, ranks)
            .and_then(|part| part.config(&self.files.config))
            .map_err(|e| Failure::misuse(e.to_string()).at(&self.files.name))?;
        if ranks > 1 && self.arguments.trace.is_some() {
            return Err(Failure::misuse(format!(
                "{}: a timeline is of one rank; leave it or --ranks out",
                timeline::TIMELINE
            )));
        }
        match self.arguments.kill {
            Some(Kill { rank, .. }) if rank >= ranks => Err(Failure::misuse(format!(
                "--kill: there is no rank {rank} of {ranks}; they are counted from 0"
            ))),
            _ => Ok(()),
        }
    }

    /// A model of one rank.
    fn alone(&self, runtime: &Runtime) -> Result<Done, Failure> {
        let model = load(runtime, self.files, self.arguments.dtype.into(), self.arguments.json)?;
        self.texts(model, true, &mut |_| Ok(()))
    }

    /// A rank's part of the model, and what it computes.
    fn rank(&self, rank: &Rank, copied: bool) -> Result<Done, Failure> {
        let (world, me) = (&rank.world, rank.world.rank());
        let comm = world.comm(&rank.runtime, &rank.config("tp").sends(false))?;
        let quiet = self.arguments.json || me > 0;
        let model = load_part(&comm, self.files, self.arguments.dtype.into(), quiet)?;
        let mut kill = |token| match self.arguments.kill {
            Some(kill) if (kill.rank, kill.token) == (me, token) && copied => std::process::abort(),
            Some(kill) if (kill.rank, kill.token) == (me, token) => {
                Err(leasehold::Error::other(format!("ended at token {token} by --kill")))
            }
            _ => Ok(()),
        };
        let mut done = self.texts(model, me == 0, &mut kill)?;
        rank.runtime.synchronize()?;
        done.ranks_agree = Some(agree(world, &done.runs)?);
        Ok(done)
    }

    /// The texts of all modes. `at` is called with the number of each new token of the first one.
    fn texts(
        &self,
        model: Model,
        shows: bool,
        at: &mut dyn FnMut(usize) -> leasehold::Result<()>,
    ) -> Result<Done, Failure> {
        let (arguments, files, prompt) = (self.arguments, self.files, &self.prompt);
        let mut runs: Vec<(leasehold_llama::Mode, Generation)> = Vec::new();
        let (mut text, mut first_token) = (None, None);
        for &mode in arguments.mode.list() {
            let first = runs.is_empty();
            let print = first && shows && !arguments.json;
            let (prompt_text, stream) = match &files.tokenizer {
                Some(tokenizer) if print => {
                    let (text, stream) = tokenizer.stream_after(prompt)?;
                    (text, Some(stream))
                }
                _ => (String::new(), None),
            };
            let mut printer = Printer { stream, print, prompt: prompt_text };
            let mut tokens = 0;
            let mut on_token = |id| {
                first_token.get_or_insert_with(|| self.begun.elapsed());
                if first {
                    at(tokens)?;
                }
                tokens += 1;
                printer.token(id)
            };
            let request = self.request(mode);
            let generation = generate_with_rules(&model, &request, &self.rules, &mut on_token)?;
            if first {
                if let Some(stream) = printer.stream.take() {
                    let rest = stream.finish()?;
                    printer.emit(&rest)?;
                }
                let new = |tokenizer| new_text(tokenizer, prompt, &generation.ids);
                text = files.tokenizer.as_ref().map(new).transpose()?;
            }
            runs.push((mode, generation));
        }
        Ok(Done { model, runs, text, first_token, ranks_agree: None })
    }
}

/// Compares this rank's texts and logits with those of the other ranks, to the bit.
fn agree(world: &World, runs: &[(leasehold_llama::Mode, Generation)]) -> Result<bool, Failure> {
    let mut own = DefaultHasher::new();
    for (_, run) in runs {
        run.ids.hash(&mut own);
        run.last_logits.iter().for_each(|logit| logit.to_bits().hash(&mut own));
    }
    let own = own.finish().to_le_bytes();
    let store = world.store();
    store.set(&format!("texts/{}", world.rank()), &own)?;
    for rank in 0..world.size() {
        if store.get(&format!("texts/{rank}"), ranks::END)? != own {
            return Ok(false);
        }
    }
    Ok(true)
}

/// Runs the command on these devices.
pub fn run(arguments: &Arguments, devices: &dyn Devices) -> Result<(), Failure> {
    let begun = Instant::now();
    let simulated = devices.simulates(arguments.device)?;
    let files = Files::read(arguments.model.as_deref(), arguments.prompt_ids.is_none())?;
    let job = Job::new(arguments, &files, begun)?;
    if arguments.trace.is_some() {
        timeline::check(&files.config).map_err(|e| e.at(&files.name))?;
    }
    let plan = arguments.ranks.plan(arguments.device, simulated)?;
    job.check_ranks(plan.ranks())?;
    match plan {
        Plan::Copies(ranks) => arguments.ranks.copies(ranks),
        Plan::Member(ref world) => {
            let (rank, world) = (world.rank(), world.clone());
            run_here(&job, plan, devices)
                .and_then(|()| Ok(world.close(ranks::END)?))
                .map_err(|failure| failure.at(format!("rank {rank}")))
        }
        _ => run_here(&job, plan, devices),
    }
}

/// The ranks of this process, and what is shown of them.
fn run_here(job: &Job<'_>, plan: Plan, devices: &dyn Devices) -> Result<(), Failure> {
    let Job { arguments, files, .. } = *job;
    let (device, number) = plan.devices(arguments.device);
    let system = devices.open(&Opening {
        device,
        threads: arguments.threads.map(usize::from),
        level: arguments.level,
        devices: number,
        memory: arguments.memory.options()?,
    })?;
    let runtime = system.runtime.clone();
    let (ranks, shows) = (plan.ranks(), plan.shows());
    let inputs = arguments.model.as_deref().map_or_else(Inputs::default, Inputs::folder);
    let [trace, snapshot, report] = arguments.memory.files();
    let timeline = (timeline::TIMELINE, arguments.trace.as_deref());
    let wanted = [trace, snapshot, report, timeline];
    let outputs = Outputs::open(if shows { &wanted } else { &[] }, &inputs)?;
    if arguments.trace.is_some() && !runtime.raw_device().caps().timestamps {
        return Err(Failure::misuse(format!("--trace: {device} has no timestamps")));
    }
    fits(
        files,
        job.prompt.len(),
        arguments.tokens,
        NonZeroU32::MIN,
        arguments.dtype.into(),
        &runtime,
    )?;
    let done = match plan {
        Plan::Member(world) => job.rank(&Rank::member(world, &system), true),
        Plan::Threads(ranks) => {
            let mut all = ranks::threads(&system, ranks, |rank| job.rank(rank, false))?;
            Ok(all.swap_remove(0))
        }
        Plan::Alone | Plan::Copies(_) => job.alone(&runtime),
    };
    let Done { model, runs, text, first_token, ranks_agree } =
        done.map_err(|e| e.at(&files.name))?;

    if arguments.trace.is_some() {
        timeline::write(&outputs, &model, &job.prompt).map_err(|e| e.at(&files.name))?;
    }

    let agree = modes_agree(&runs);
    let allocator = runtime.allocator().clone();
    memory::write(&outputs, &allocator, &device.to_string())?;
    let stats = runtime.allocator().stats();
    let memory_report = Memory {
        live_peak_bytes: stats.live_peak,
        reserved_peak_bytes: stats.reserved_peak,
        imported_bytes: stats.imported_bytes,
        driver_allocations_in_decode: runs.iter().map(|(_, g)| g.driver_calls).sum(),
        allocations_in_decode: runs.iter().map(|(_, g)| g.allocations).sum(),
    };
    let find = |mode| runs.iter().find(|(m, _)| *m == mode).map(|(_, g)| ModeReport::from(g));
    let modes = ModeReports {
        eager: find(leasehold_llama::Mode::Eager),
        graph: find(leasehold_llama::Mode::Graph),
    };
    let Some((_, first)) = runs.first() else { return Err(Failure::new("no mode ran")) };
    let report = Report {
        device: device.to_string(),
        ranks,
        model: files.name.clone(),
        prompt_ids: job.prompt.clone(),
        output_ids: first.ids.clone(),
        text,
        threads: arguments.threads,
        level: arguments.level.map(Isa::name),
        first_token_ms: first_token.unwrap_or_default().as_secs_f64() * 1e3,
        modes,
        modes_agree: agree,
        ranks_agree,
        memory: memory_report,
        last_logits: arguments.logits.then(|| first.last_logits.clone()),
    };
    if shows && arguments.json {
        print_json(&report)?
    } else if shows {
        print_table(&report, &runtime)?
    }
    if shows && arguments.verbose {
        // As many positions as `generate` has, because shapes depend on them.
        let positions = report.prompt_ids.len() + arguments.tokens as usize - 1;
        let decoder = Decoder::new(&model, positions, 1, Sampling::default())?;
        let prompt = decoder.prompt_operators(report.prompt_ids.len())?;
        operators::print(&prompt, &decoder.step_operators())?;
    }
    if agree == Some(false) {
        return Err(Failure::new(
            "eager and graph mode do not agree: this is a defect of the runtime",
        ));
    }
    if ranks_agree == Some(false) {
        return Err(Failure::new(
            "the ranks do not agree: this is a defect of the runtime, or their devices differ",
        ));
    }
    drop(model);
    runtime.synchronize()?;
    drop(runtime);
    system.check()?;
    drop(system);
    arguments.memory.verdict(&allocator)
}

/// Whether both modes gave the same tokens, and the same logits to the bit. `None` for one mode.
fn modes_agree(runs: &[(leasehold_llama::Mode, Generation)]) -> Option<bool> {
    let bits = |g: &Generation| g.last_logits.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    match runs {
        [(_, a), (_, b)] => Some(a.ids == b.ids && bits(a) == bits(b)),
        _ => None,
    }
}

fn print_table(report: &Report, runtime: &Runtime) -> Result<(), Failure> {
    let mut out = std::io::stdout().lock();
    writeln!(out, "\n")?;
    let (model, name) = (shown_within(&report.model, 1000), &runtime.info().name);
    let ranks = match report.ranks {
        1 => String::new(),
        ranks => format!(", the first of {ranks} ranks"),
    };
    writeln!(out, "{model} on {} ({}){ranks}", report.device, shown_within(name, 200))?;
    let mut table = Table::default();
    table.head(["", "prefill", "decode", "token p50", "token p99"]);
    for (name, mode) in [("eager", &report.modes.eager), ("graph", &report.modes.graph)] {
        if let Some(m) = mode {
            table.row([
                name.to_owned(),
                format!("{:.2} ms", m.prefill_ms),
                format!("{:.0} tokens/s", m.decode_tokens_per_s),
                format!("{:.3} ms", m.token_ms_p50),
                format!("{:.3} ms", m.token_ms_p99),
            ]);
        }
    }
    write!(out, "{table}")?;
    writeln!(out, "the first token came {:.0} ms after the command began", report.first_token_ms)?;
    let m = &report.memory;
    writeln!(
        out,
        "memory: peak {} live, {} reserved, {} imported; during decode {} allocations, {} driver calls",
        bytes(m.live_peak_bytes),
        bytes(m.reserved_peak_bytes),
        bytes(m.imported_bytes),
        m.allocations_in_decode,
        m.driver_allocations_in_decode
    )?;
    match report.modes_agree {
        Some(true) => {
            writeln!(out, "{}", paint(Tone::Good, "eager and graph agree to the bit"))?;
        }
        Some(false) => writeln!(out, "{}", paint(Tone::Bad, "EAGER AND GRAPH DIFFER"))?,
        None => {}
    }
    match report.ranks_agree {
        Some(true) => writeln!(out, "{}", paint(Tone::Good, "all ranks agree to the bit"))?,
        Some(false) => writeln!(out, "{}", paint(Tone::Bad, "THE RANKS DIFFER"))?,
        None => {}
    }
    Ok(())
}
