//! Decoding of a sequence: the closed loop from token to token, and its steps, eager or as a graph.
//!
//! A decode step reads its token and position from device memory, and writes the next token, the
//! next position and the ring of tokens. So one recording serves every token.

use crate::count::{self, OperatorCount};
use crate::model::Model;
use crate::network::{Draws, Lanes, Network, Scratch, Task, no_number, operations};
use crate::rules::TokenRules;
use leasehold::{Array, Error, Graph, Result, Stream, Timepoint, View};
use leasehold_operators::{Checks, DType, ops};

/// A sequence being decoded. It keeps the model.
pub struct Decoder {
    network: Network,
    lanes: Lanes,
    draws: Draws,
    step: Vec<Task>,
    filled: usize,
    /// New tokens since the prompt; their number in the ring.
    drawn: usize,
    ring: usize,
    checks: bool,
    rules: Option<TokenRules>,
}

impl Decoder {
    /// A sequence of at most `positions` tokens (prompt and new ones), with a ring of `ring` new
    /// tokens.
    ///
    /// # Errors
    /// `InvalidArgument` for zero positions, more positions than the model's context, a ring that
    /// is empty or has 2^32 tokens and more, or a sampling beyond its limits or with
    /// log-probabilities; `OutOfMemory`.
    pub fn new(
        model: &Model,
        positions: usize,
        ring: usize,
        sampling: ops::Sampling,
    ) -> Result<Self> {
        if ring == 0 {
            return Err(Error::invalid(
                "a sequence needs room for one new token; ask for one at least",
            ));
        }
        let network = Network::new(model, positions)?;
        if sampling.log_probabilities > 0 {
            return Err(Error::invalid(format!(
                "{} log-probabilities are asked for, and a decoder keeps none; ask for 0, or use a batch",
                sampling.log_probabilities
            )));
        }
        let record = sampling.record()?;
        let draws = Draws::new(model, 1, ring, false)?;
        model.runtime().stream().upload(draws.all.sampling.view(), &[record])?;
        let lanes = Lanes::new(model, network.heads, &draws, false)?;
        let step = network.step(&Scratch::new(model, 1)?, &lanes, &draws)?;
        Ok(Self {
            network,
            lanes,
            draws,
            step,
            filled: 0,
            drawn: 0,
            ring,
            checks: false,
            rules: None,
        })
    }

    /// Draws tokens by these rules, from the next prompt on. A graph has rules if it is recorded
    /// later. Takes memory for two bits for each token of the vocabulary.
    ///
    /// # Errors
    /// `InvalidArgument` for a penalty beyond its limits; `OutOfMemory`.
    pub fn set_rules(&mut self, rules: &TokenRules) -> Result<()> {
        if !rules.is_nothing()? || self.rules.is_some() {
            self.draws.use_rules(&self.network.model, Some(&mut self.step))?;
            self.rules = Some(rules.clone());
        }
        Ok(())
    }

    /// From now on, a prompt and each step check on the device that their logits are finite
    /// ([`Checks`]). Logits that are not fail the stream from that token on. A graph has the check
    /// if it is recorded later.
    pub fn check(&mut self) {
        self.checks = true;
    }

    fn check_on(&self, stream: &Stream) -> Result<()> {
        let logits = self.draws.each[0].logits.view();
        stream.check_finite(logits, DType::F32, "logits")
    }

    /// Runs a step on a stream, or notes it.
    fn run(&self, stream: &Stream) -> Result<()> {
        Network::run(&self.step, stream)?;
        if self.checks { self.check_on(stream) } else { Ok(()) }
    }

    /// Processes a prompt and draws the first new token. Does not wait for it. A second prompt
    /// starts a new sequence.
    ///
    /// Takes memory for the activations of a piece of the prompt, and leaves it when the piece is
    /// computed. A piece has 256 tokens, or 2,048 where a vendor's library computes products. There
    /// it has 4,096 if their activations have 256 MiB at most.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty prompt, a prompt that does not fit, or an id outside the
    /// vocabulary; `Suspended` while the model is suspended; the stream's cause.
    pub fn prefill(&mut self, prompt: &[u32]) -> Result<Timepoint> {
        let model = self.network.model.clone();
        let _present = model.present()?;
        let (lane, stream) = (&self.lanes.each[0], model.runtime().stream());
        if let Some(rules) = &self.rules {
            self.draws.each[0].set_rules(stream, rules, prompt, true)?;
        }
        let mut point = self.network.prefill(lane, &self.draws.all, prompt)?;
        if let Some(rules) = self.rules.as_ref().filter(|r| !r.begin_suppress_tokens.is_empty()) {
            self.draws.each[0].set_rules(stream, rules, prompt, false)?;
        }
        if self.checks {
            self.check_on(stream)?;
            point = stream.now();
        }
        (self.filled, self.drawn) = (prompt.len(), 1);
        Ok(point)
    }

    /// The operators of a prompt of so many tokens, counted. Computes nothing, but allocates the
    /// memory of the prompt's activations for a moment.
    ///
    /// # Errors
    /// `InvalidArgument` for a prompt without tokens or one that does not fit; `OutOfMemory`.
    pub fn prompt_operators(&self, tokens: usize) -> Result<Vec<OperatorCount>> {
        let lane = &self.lanes.each[0];
        self.network.prompt_operators(lane, &self.draws.all, tokens)
    }

    /// The operators of a step, counted.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime};
    /// use leasehold_llama::{Config, DType, Decoder, Model, Sampling, Weights};
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let root = leasehold_llama::demo_model::FOLDER;
    /// let config = Config::from_dir(root.as_ref())?;
    /// let weights = Weights::random(&config, DType::Bf16, 1)?;
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let model = Model::load(&runtime, &config, &weights, DType::Bf16, &mut |_, _| {})?;
    /// let decoder = Decoder::new(&model, 64, 1, Sampling::default())?;
    /// let layers = config.num_hidden_layers;
    /// for counts in [decoder.prompt_operators(32)?, decoder.step_operators()] {
    ///     let qkv = counts.iter().find(|c| c.name == "linear3").unwrap();
    ///     assert_eq!((qkv.computed_by, qkv.count), ("linear3", layers));
    /// }
    /// # Ok(())
    /// # }
    /// ```
    #[must_use]
    pub fn step_operators(&self) -> Vec<OperatorCount> {
        let mut counts = Vec::new();
        count::add(&mut counts, operations(&self.step), 1);
        counts
    }

    /// The logits of the last computed position: f32, one for each vocabulary entry. Waits for
    /// them.
    ///
    /// # Errors
    /// The stream's cause.
    pub fn logits(&self) -> Result<Vec<f32>> {
        self.draws.logits(self.network.model.runtime(), 0)
    }

    /// Returns whether another step fits the sequence.
    #[must_use]
    pub fn has_room(&self) -> bool {
        self.filled < self.network.heads.positions as usize
    }

    fn claim_position(&mut self) -> Result<()> {
        if !self.has_room() {
            return Err(Error::invalid(format!(
                "the sequence's {} positions are full; begin one with more positions",
                self.network.heads.positions
            )));
        }
        self.filled += 1;
        self.drawn += 1;
        Ok(())
    }

    /// Computes the next token, launch by launch. Does not wait for it.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence is full; `Suspended` while the model is suspended; the
    /// stream's cause.
    pub fn step(&mut self) -> Result<Timepoint> {
        let model = self.network.model.clone();
        let _present = model.present()?;
        self.claim_position()?;
        let stream = self.network.model.runtime().stream();
        self.run(stream)?;
        let point = stream.now();
        stream.flush()?;
        Ok(point)
    }

    /// Records one step. The graph serves every token of this sequence.
    ///
    /// # Errors
    /// As [`Runtime::record_graph`](leasehold::Runtime::record_graph).
    pub fn record(&self) -> Result<Graph> {
        let _present = self.network.model.present()?;
        self.network.model.runtime().record_graph(|runtime| self.run(runtime.stream()))
    }

    /// Computes the next token by launching the graph of [`record`](Self::record). Does not wait
    /// for it.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence is full; `Suspended` while the model is suspended; the
    /// stream's cause.
    pub fn launch(&mut self, graph: &Graph) -> Result<Timepoint> {
        let model = self.network.model.clone();
        let _present = model.present()?;
        self.claim_position()?;
        let point = graph.launch_on(model.runtime().stream())?;
        // A wait for this token must not wait for the next one, which is launched before the wait.
        self.network.model.runtime().stream().flush()?;
        Ok(point)
    }

    /// Records steps that the device repeats as long as `flag` is not zero, which it reads before
    /// each: a launch decodes until an end that the device finds. `decide` is called with a stream,
    /// before the loop and behind the step in it, and with the state there: the last token, and how
    /// many were drawn. What it records writes the flag.
    ///
    /// The graph serves every token of this sequence. A step beyond the sequence's positions has no
    /// meaning, so `decide` counts as well. The example `until_end` has such a kernel.
    ///
    /// # Errors
    /// As [`Stream::record_while`], such as `Unsupported` on a device without loops, and for a
    /// sequence whose logits are [checked](Self::check).
    pub fn record_while(
        &self,
        flag: &Array<u32>,
        mut decide: impl FnMut(&Stream, &ops::Loop) -> Result<()>,
    ) -> Result<Graph> {
        let _present = self.network.model.present()?;
        self.network.model.runtime().record_graph(|runtime| {
            let state = &self.draws.each[0].state;
            decide(runtime.stream(), state)?;
            runtime.stream().record_while(flag, |body| {
                self.run(body.stream())?;
                decide(body.stream(), state)
            })
        })
    }

    /// Launches the graph of [`record_while`](Self::record_while), waits for it, and returns the
    /// new tokens.
    ///
    /// # Errors
    /// `InvalidArgument` if the sequence is full, or if the ring does not have all the new tokens
    /// any more; `Suspended` while the model is suspended; the stream's cause.
    pub fn launch_while(&mut self, graph: &Graph) -> Result<Vec<u32>> {
        let model = self.network.model.clone();
        let _present = model.present()?;
        if !self.has_room() {
            return self.claim_position().map(|()| Vec::new());
        }
        let point = graph.launch_on(model.runtime().stream())?;
        let mut count = [0u32];
        model.runtime().stream().download(&mut count, self.draws.each[0].state.count.view())?;
        let before = self.drawn;
        self.drawn = count[0] as usize;
        self.filled += self.drawn.saturating_sub(before);
        (before..self.drawn).map(|index| self.token(index, point)).collect()
    }

    /// New token `index` of this sequence, counted from 0 at the prompt. Waits for `point`, the
    /// timepoint of the step that computed it. If the host can read the device's output in place,
    /// the call neither allocates nor copies.
    ///
    /// # Errors
    /// `InvalidArgument` for a token that no step of this decoder was submitted for, or whose place
    /// in the ring a later one has taken, or if all logits of that step are NaN. The stream's
    /// cause.
    pub fn token(&self, index: usize, point: Timepoint) -> Result<u32> {
        let Self { drawn, ring, .. } = *self;
        if index >= drawn {
            return Err(Error::invalid(format!(
                "new token {index}, counted from 0: the sequence has {drawn} new tokens; step first"
            )));
        }
        if drawn - index > ring {
            return Err(Error::invalid(format!(
                "new token {index}, counted from 0: {drawn} were drawn, and the ring keeps the \
                 newest {ring}; read tokens earlier, or make the ring larger"
            )));
        }
        let token = self.draws.token(self.network.model.runtime(), 0, index, point)?;
        token.ok_or_else(|| no_number(index.saturating_add(1)))
    }
}
