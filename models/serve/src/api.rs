//! Requests and answers in the shapes of OpenAI's API.
//!
//! A field that the server does not have is an error, unless its value changes nothing: to ignore
//! it would give another text than asked.

use crate::engine::{Event, Job};
use crate::http::Server;
use leasehold_llama::{Drawn, Sampling, StopStrings, TextStream, Tokenizer};
use minijinja::value::{Value, ValueKind, merge_maps};
use serde::Deserialize;
use serde_json::{Map, Value as Json, json};
use std::num::NonZeroUsize;
use std::task::Poll;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// The most texts of one request.
const MAX_CHOICES: usize = 128;
/// The most tokens with a log-probability beside the chosen one.
const MAX_LOGPROBS: u32 = 20;

/// Why a request has no answer, or not all of it: an HTTP status, a reason, and OpenAI's code.
#[derive(Debug, Clone)]
pub struct Failure {
    pub status: u16,
    pub message: String,
    pub code: Option<&'static str>,
}

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), code: None }
    }

    /// The request is wrong.
    pub fn invalid(message: impl Into<String>) -> Self {
        Self::new(400, message)
    }

    pub fn json(&self) -> Json {
        let kind = if self.status < 500 { "invalid_request_error" } else { "server_error" };
        let (message, code) = (&self.message, self.code);
        json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
    }
}

/// An argument that was never valid is the client's.
impl From<leasehold::Error> for Failure {
    fn from(why: leasehold::Error) -> Self {
        let client = matches!(why, leasehold::Error::InvalidArgument(_));
        Self::new(if client { 400 } else { 500 }, why.to_string())
    }
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected a prompt: a text, token ids, or a list of these")]
enum Prompt {
    Text(String),
    Tokens(Vec<u32>),
    Texts(Vec<String>),
    TokenLists(Vec<Vec<u32>>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected stop: a text, or a list of texts")]
enum Stop {
    One(String),
    Many(Vec<String>),
}

#[derive(Deserialize)]
#[serde(untagged, expecting = "expected logprobs: a number, or true or false for a chat")]
enum LogProbs {
    Wanted(bool),
    Largest(u32),
}

#[derive(Deserialize, Default)]
struct StreamOptions {
    include_usage: Option<bool>,
    #[serde(flatten)]
    rest: Map<String, Json>,
}

#[derive(Deserialize)]
pub struct Request {
    model: Option<String>,
    prompt: Option<Prompt>,
    messages: Option<Value>,
    tools: Option<Value>,
    tool_choice: Option<Value>,
    documents: Option<Value>,
    chat_template_kwargs: Option<Value>,
    max_tokens: Option<NonZeroUsize>,
    max_completion_tokens: Option<NonZeroUsize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    top_k: Option<i64>,
    min_p: Option<f32>,
    seed: Option<i64>,
    n: Option<NonZeroUsize>,
    stop: Option<Stop>,
    stream: Option<bool>,
    stream_options: Option<StreamOptions>,
    logprobs: Option<LogProbs>,
    top_logprobs: Option<u32>,
    #[serde(flatten)]
    rest: Map<String, Json>,
}

/// Whether a field that the server does not have asks for nothing with this value.
fn asks_nothing(name: &str, value: &Json) -> bool {
    match name {
        "user" | "metadata" | "safety_identifier" | "prompt_cache_key" | "parallel_tool_calls" => {
            true
        }
        "presence_penalty" | "frequency_penalty" | "min_tokens" => value.as_f64() == Some(0.0),
        "repetition_penalty" | "length_penalty" | "best_of" => value.as_f64() == Some(1.0),
        "echo"
        | "store"
        | "ignore_eos"
        | "use_beam_search"
        | "continuous_usage_stats"
        | "include_obfuscation"
        | "include_stop_str_in_output"
        | "continue_final_message" => value == false,
        "skip_special_tokens" | "add_generation_prompt" => value == true,
        "logit_bias" => value.as_object().is_some_and(Map::is_empty),
        "functions" => value.as_array().is_some_and(Vec::is_empty),
        "suffix" => value == "",
        "response_format" => value["type"] == "text",
        "modalities" => *value == json!(["text"]),
        "service_tier" | "function_call" => {
            ["auto", "default", "none"].iter().any(|neutral| value == neutral)
        }
        _ => value.is_null(),
    }
}

impl Request {
    /// Reads a request's body.
    pub fn from_body(server: &Server, body: &[u8], chat: bool) -> Result<Self> {
        let wrong = |e| Failure::invalid(format!("the body is no request: {e}"));
        let request: Self = serde_json::from_slice(body).map_err(wrong)?;
        if let Some(name) = request.model.as_ref().filter(|name| **name != server.model.name) {
            return Err(server.no_model(name));
        }
        let options = request.stream_options.iter().flat_map(|options| &options.rest);
        for (name, value) in request.rest.iter().chain(options) {
            if !value.is_null() && !asks_nothing(name, value) {
                let shown = leasehold_input::shown_within(&value.to_string(), 100).to_string();
                let why = format!("{name}: {shown} is not supported; leave it out");
                return Err(Failure::invalid(why));
            }
        }
        match (chat, &request.prompt, &request.messages) {
            (true, None, Some(_)) | (false, Some(_), None) => Ok(request),
            (true, ..) => Err(Failure::invalid("give messages, and no prompt")),
            (false, ..) => Err(Failure::invalid("give a prompt, and no messages")),
        }
    }

    /// The input of the chat template; `None` if this is no chat.
    pub fn chat(&self) -> Result<Option<Value>> {
        let tools = self.tools.as_ref().is_some_and(Value::is_true);
        let choice = self.tool_choice.as_ref().map(|choice| choice.as_str().unwrap_or("a tool"));
        if !matches!((tools, choice), (false, None | Some("auto")) | (_, Some("none"))) {
            return Err(Failure::invalid(
                "tools: no calls are read from a text; give tool_choice \"none\", and a chat's \
                 template gets the tools",
            ));
        }
        let none = Value::from(());
        let of = |value: &Option<Value>| value.clone().unwrap_or_else(|| none.clone());
        let all = [&self.tools, &self.documents, &self.chat_template_kwargs];
        let [tools, documents, more] = all.map(of);
        let Some(messages) = &self.messages else {
            let given = tools.is_true() || documents.is_true() || more.is_true();
            let why = "tools, documents and chat_template_kwargs are for chats";
            return if given { Err(Failure::invalid(why)) } else { Ok(None) };
        };
        if !more.is_none() && more.kind() != ValueKind::Map {
            return Err(Failure::invalid("chat_template_kwargs: give an object"));
        }
        let fixed = minijinja::context! { messages, tools, documents };
        Ok(Some(merge_maps([more, fixed])))
    }

    /// The jobs of a request, and its answer. A chat's prompt is `rendered`.
    pub fn jobs(self, server: &Server, rendered: Option<&str>) -> Result<(Vec<Job>, Answer)> {
        let (tokenizer, chat) = (&server.model.tokenizer, rendered.is_some());
        let prompts = match (rendered, self.prompt) {
            (Some(text), _) => vec![tokenizer.encode_rendered(text)?],
            (_, None) => Vec::new(),
            (_, Some(Prompt::Text(text))) => vec![tokenizer.encode(&text)?],
            (_, Some(Prompt::Tokens(ids))) => vec![ids],
            (_, Some(Prompt::Texts(texts))) => {
                texts.iter().map(|text| Ok(tokenizer.encode(text)?)).collect::<Result<_>>()?
            }
            (_, Some(Prompt::TokenLists(lists))) => lists,
        };
        let n = self.n.map_or(1, usize::from);
        if n.saturating_mul(prompts.len()) > MAX_CHOICES {
            let why =
                format!("{n} texts of {} prompts; ask for {MAX_CHOICES} at most", prompts.len());
            return Err(Failure::invalid(why));
        }
        let asked = self.max_completion_tokens.or(self.max_tokens).map(usize::from);
        for prompt in &prompts {
            check_context(prompt.len(), asked, server.model.positions)?;
        }
        let stop = match self.stop {
            None => Vec::new(),
            Some(Stop::One(string)) => vec![string],
            Some(Stop::Many(strings)) => strings,
        };
        if stop.len() > 4 {
            return Err(Failure::invalid("give 4 stop strings at most"));
        }
        let temperature = self.temperature.unwrap_or(1.0);
        if n > 1 && temperature == 0.0 {
            return Err(Failure::invalid("n: the texts are equal at temperature 0; give n 1"));
        }
        let top_k = u32::try_from(self.top_k.filter(|&k| k != -1).unwrap_or(0));
        let top_k =
            top_k.map_err(|_| Failure::invalid("top_k: give a number of tokens, or -1 for all"))?;
        let logprobs = log_probabilities(chat, self.logprobs, self.top_logprobs)?;
        let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let (mut jobs, mut choices) = (Vec::new(), Vec::new());
        for (at, prompt) in prompts.iter().flat_map(|prompt| (0..n).map(move |at| (at, prompt))) {
            let (sender, events) = unbounded_channel();
            // Each text of a prompt has a seed of its own.
            let own = |seed: i64| seed.cast_unsigned().wrapping_add(at as u64);
            let sampling = Sampling {
                temperature,
                top_p: self.top_p.unwrap_or(1.0),
                top_k,
                min_p: self.min_p.unwrap_or(0.0),
                seed: self.seed.map_or(now.as_nanos() as u64 + jobs.len() as u64, own),
                log_probabilities: logprobs.map_or(0, |largest| largest.max(1)),
            };
            let tokens = asked.unwrap_or(if chat { usize::MAX } else { 16 });
            let next = (Vec::new(), Instant::now());
            jobs.push(Job { prompt: prompt.clone(), sampling, tokens, events: sender, next });
            choices.push(Choice {
                events,
                tokenizer: tokenizer.clone(),
                text: tokenizer.stream_after(prompt)?.1,
                stop: StopStrings::new(&stop)?,
                last: prompt.last().copied(),
                tokens: 0,
                characters: 0,
                ended: false,
            });
        }
        let options = self.stream_options.unwrap_or_default();
        let answer = Answer {
            chat,
            stream: self.stream.unwrap_or(false),
            usage: options.include_usage.unwrap_or(false),
            logprobs,
            head: json!({"id": format!("cmpl-{}", now.as_nanos()), "created": now.as_secs(),
                "model": server.model.name}),
            prompt_tokens: prompts.iter().map(Vec::len).sum(),
            choices,
        };
        Ok((jobs, answer))
    }
}

/// Refuses what does not fit. Without a number of new tokens, a text ends where the context does.
fn check_context(prompt: usize, asked: Option<usize>, positions: usize) -> Result<()> {
    let new = asked.unwrap_or(0);
    if prompt.saturating_add(new) <= positions {
        return Ok(());
    }
    Err(Failure {
        status: 400,
        message: format!(
            "This model's maximum context length is {positions} tokens. However, you requested {} \
             tokens ({prompt} in the prompt, {new} in the completion). Shorten the prompt, or ask \
             for fewer tokens.",
            prompt.saturating_add(new)
        ),
        code: Some("context_length_exceeded"),
    })
}

/// The number of largest log-probabilities that are asked for; `None` without any.
fn log_probabilities(chat: bool, asked: Option<LogProbs>, top: Option<u32>) -> Result<Option<u32>> {
    let number = match (chat, asked, top) {
        (_, None | Some(LogProbs::Wanted(false)), None) => None,
        (true, Some(LogProbs::Wanted(true)), top) => Some(top.unwrap_or(0)),
        (false, Some(LogProbs::Largest(number)), None) => Some(number),
        (true, ..) => {
            return Err(Failure::invalid("give logprobs true, and top_logprobs a number"));
        }
        (false, ..) => return Err(Failure::invalid("give logprobs a number")),
    };
    match number {
        Some(more) if more > MAX_LOGPROBS => {
            let why = format!("logprobs: {more}; ask for {MAX_LOGPROBS} at most");
            Err(Failure::invalid(why))
        }
        number => Ok(number),
    }
}

/// A part of a choice's text with its tokens, and why it ends.
#[derive(Default)]
struct Part {
    text: String,
    drawn: Vec<Drawn>,
    finish: Option<&'static str>,
}

/// A part of the choice `index`, and its log-probabilities in OpenAI's shape.
pub struct Piece {
    index: usize,
    part: Part,
    logprobs: Json,
}

/// A text as it comes. Its job ends with it.
struct Choice {
    events: UnboundedReceiver<Event>,
    tokenizer: Tokenizer,
    text: TextStream,
    stop: StopStrings,
    /// The token before the next one.
    last: Option<u32>,
    tokens: usize,
    /// Of the tokens with log-probabilities.
    characters: usize,
    ended: bool,
}

impl Choice {
    /// The text of a token after the last one, which keeps a space at the seam.
    fn name(&self, id: u32) -> Result<String> {
        let (_, mut stream) = self.tokenizer.stream_after(self.last.as_slice())?;
        let text = stream.push(id)? + &stream.finish()?;
        let special = || self.tokenizer.token(id).unwrap_or_default();
        Ok(if text.is_empty() { special() } else { text })
    }

    /// The log-probabilities of new tokens in OpenAI's shape: the chosen and the `largest` ones.
    fn logprobs(&mut self, part: &Part, chat: bool, largest: usize) -> Result<Json> {
        let entry = |text: &str, value: f32| {
            let bytes = text.as_bytes();
            json!({"token": text, "logprob": value, "bytes": bytes})
        };
        let (mut content, mut all) = (Vec::new(), [const { Vec::new() }; 4]);
        for drawn in &part.drawn {
            let text = self.name(drawn.token)?;
            let value = drawn.log_probability.unwrap_or_default();
            let others = drawn.largest.iter().take(largest);
            let others = others.map(|&(id, value)| Ok((self.name(id)?, value)));
            let others = others.collect::<Result<Vec<_>>>()?;
            if chat {
                let mut token = entry(&text, value);
                token["top_logprobs"] = others.iter().map(|(t, v)| entry(t, *v)).collect();
                content.push(token);
            } else {
                let chosen = (text.clone(), value);
                let top: Json =
                    others.into_iter().chain([chosen]).map(|(t, v)| (t, json!(v))).collect();
                let new = [json!(text), json!(value), top, json!(self.characters)];
                all.iter_mut().zip(new).for_each(|(all, new)| all.push(new));
            }
            self.characters += text.chars().count();
            self.last = Some(drawn.token);
        }
        let [tokens, values, top, offsets] = all;
        Ok(match chat {
            true => json!({"content": content, "refusal": null}),
            false => json!({"tokens": tokens, "token_logprobs": values, "top_logprobs": top,
                "text_offset": offsets}),
        })
    }

    /// The addition of an event. `None` is the engine's end.
    fn take(&mut self, event: Option<Event>, part: &mut Part) -> Result<()> {
        match event {
            None => return Err(Failure::new(503, "the engine has ended")),
            Some(Event::Tokens(drawn)) => {
                for drawn in drawn {
                    self.tokens += 1;
                    part.text += &self.stop.push(&self.text.push(drawn.token)?);
                    part.drawn.push(drawn);
                    if self.stop.stopped().is_some() {
                        part.finish = Some("stop");
                        break;
                    }
                }
            }
            Some(Event::End(how)) => {
                part.text += &self.stop.push(&self.text.clone().finish()?);
                part.text += &self.stop.clone().finish();
                part.finish = Some(self.stop.stopped().map_or(how?, |_| "stop"));
            }
        }
        if part.finish.is_some() {
            self.ended = true;
            self.events.close();
        }
        Ok(())
    }
}

/// An answer as it comes.
pub struct Answer {
    chat: bool,
    pub stream: bool,
    /// A stream ends with the number of tokens.
    pub usage: bool,
    logprobs: Option<u32>,
    head: Json,
    prompt_tokens: usize,
    choices: Vec<Choice>,
}

impl Answer {
    /// Waits for the next piece; `None` when all texts have ended.
    pub async fn next(&mut self) -> Result<Option<Piece>> {
        loop {
            let event = std::future::poll_fn(|context| {
                let mut open = self.choices.iter_mut().enumerate().filter(|(_, c)| !c.ended);
                let mut waits = false;
                let ready = open.find_map(|(index, choice)| {
                    waits = true;
                    match choice.events.poll_recv(context) {
                        Poll::Ready(event) => Some((index, event)),
                        Poll::Pending => None,
                    }
                });
                if ready.is_some() || !waits { Poll::Ready(ready) } else { Poll::Pending }
            });
            let Some((index, event)) = event.await else { return Ok(None) };
            let (choice, mut part) = (&mut self.choices[index], Part::default());
            choice.take(event, &mut part)?;
            let largest = self.logprobs.map(|largest| largest as usize);
            let logprobs = largest.map(|largest| choice.logprobs(&part, self.chat, largest));
            let logprobs = logprobs.transpose()?.unwrap_or_default();
            if part.finish.is_some() || !part.text.is_empty() || !logprobs.is_null() {
                return Ok(Some(Piece { index, part, logprobs }));
            }
        }
    }

    /// Waits for all texts.
    pub async fn whole(&mut self) -> Result<Json> {
        let mut all: Vec<Piece> = Vec::new();
        while let Some(piece) = self.next().await? {
            match all.iter_mut().find(|whole| whole.index == piece.index) {
                None => all.push(piece),
                Some(whole) => {
                    whole.part.text += &piece.part.text;
                    whole.part.finish = piece.part.finish;
                    extend(&mut whole.logprobs, piece.logprobs);
                }
            }
        }
        all.sort_by_key(|piece| piece.index);
        Ok(self.json(&all, true))
    }

    /// Pieces in OpenAI's shape.
    pub fn json(&self, pieces: &[Piece], usage: bool) -> Json {
        let (object, key) = match (self.chat, self.stream) {
            (false, _) => ("text_completion", "text"),
            (true, false) => ("chat.completion", "message"),
            (true, true) => ("chat.completion.chunk", "delta"),
        };
        let choice = |Piece { index, part, logprobs }: &Piece| {
            let content = match self.chat {
                true => json!({"role": "assistant", "content": part.text}),
                false => json!(part.text),
            };
            json!({"index": index, key: content, "finish_reason": part.finish,
                "logprobs": logprobs})
        };
        let mut answer = self.head.clone();
        answer["object"] = object.into();
        answer["choices"] = pieces.iter().map(choice).collect();
        if usage {
            let new: usize = self.choices.iter().map(|choice| choice.tokens).sum();
            answer["usage"] = json!({"prompt_tokens": self.prompt_tokens,
                "completion_tokens": new, "total_tokens": self.prompt_tokens + new});
        }
        answer
    }
}

/// Adds what the lists of an object have at more places.
fn extend(all: &mut Json, more: Json) {
    match (all, more) {
        (Json::Array(all), Json::Array(more)) => all.extend(more),
        (Json::Object(all), Json::Object(more)) => {
            more.into_iter().for_each(|(key, more)| extend(&mut all[&key], more));
        }
        _ => {}
    }
}
