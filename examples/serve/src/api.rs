//! Requests and answers in the shapes of OpenAI's API.
//!
//! A field that is not known is an error, because to ignore it would give another text than asked.
//!
//! This module must not know how tokens are made.

use leasehold::Error;
use leasehold_llama::Sampling;
use serde::Deserialize;
use serde_json::{Value, json};
use std::hash::{BuildHasher, RandomState};
use std::time::{SystemTime, UNIX_EPOCH};

/// Why a request has no answer, or not all of it.
#[derive(Debug, Clone)]
pub struct Failure {
    /// The HTTP status.
    pub status: u16,
    /// The reason, with its cure if there is one.
    pub message: String,
    /// OpenAI's word for the reason.
    pub code: Option<&'static str>,
}

impl Failure {
    /// A failure without a code.
    pub fn new(status: u16, message: impl Into<String>) -> Self {
        Self { status, message: message.into(), code: None }
    }

    /// A failure of the runtime: the client's if an argument was never valid, else of this status.
    #[must_use]
    pub fn of(error: &Error, status: u16) -> Self {
        let client = matches!(error, Error::InvalidArgument(_));
        Self::new(if client { 400 } else { status }, error.to_string())
    }

    /// OpenAI's shape.
    #[must_use]
    pub fn json(&self) -> Value {
        let kind = if self.status < 500 { "invalid_request_error" } else { "server_error" };
        let (message, code) = (&self.message, self.code);
        json!({"error": {"message": message, "type": kind, "param": null, "code": code}})
    }
}

/// The result of what a request asks for.
pub type Result<T> = std::result::Result<T, Failure>;

/// A prompt of `/v1/completions`.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Prompt {
    /// A text.
    Text(String),
    /// Its tokens.
    Ids(Vec<u32>),
    /// A list of one text.
    Texts([String; 1]),
}

/// Strings that end a text.
#[derive(Debug, Deserialize)]
#[serde(untagged)]
pub enum Stop {
    /// A string.
    One(String),
    /// Several.
    Many(Vec<String>),
}

/// `stream_options`.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct StreamOptions {
    /// Whether the last chunk has the numbers of tokens.
    #[serde(default)]
    pub include_usage: bool,
}

/// The body of a request. A field that is `null` is a field that is absent.
#[derive(Debug, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Request {
    /// The model's name.
    pub model: Option<String>,
    /// The prompt of `/v1/completions`.
    pub prompt: Option<Prompt>,
    /// The messages of `/v1/chat/completions`.
    pub messages: Option<Vec<Value>>,
    /// New tokens at most.
    pub max_tokens: Option<usize>,
    /// The newer name of the same.
    pub max_completion_tokens: Option<usize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    /// Strings that end the text.
    pub stop: Option<Stop>,
    /// Whether the answer comes in pieces.
    pub stream: Option<bool>,
    /// What the pieces have.
    pub stream_options: Option<StreamOptions>,
    n: Option<u32>,
    /// Who asks: not used.
    #[serde(rename = "user")]
    _user: Option<String>,
}

impl Request {
    /// The body of a request.
    ///
    /// # Errors
    /// For a body that is no such JSON.
    pub fn read(body: &[u8]) -> Result<Self> {
        let read: Self = serde_json::from_slice(body)
            .map_err(|e| Failure::new(400, format!("the body is no request: {e}")))?;
        match read.n {
            None | Some(1) => Ok(read),
            Some(n) => Err(Failure::new(400, format!("n is {n}; ask for 1, several times"))),
        }
    }

    /// The choice of tokens. Without a seed it is another one each time.
    ///
    /// # Errors
    /// For a number beyond its limits.
    pub fn sampling(&self) -> Result<Sampling> {
        let temperature = self.temperature.unwrap_or(1.0);
        if !(0.0..=2.0).contains(&temperature) {
            let why = format!("temperature is {temperature}; give a number from 0 to 2");
            return Err(Failure::new(400, why));
        }
        let top_p = self.top_p.unwrap_or(1.0);
        if !(top_p > 0.0 && top_p <= 1.0) {
            let why = format!("top_p is {top_p}; give a number above 0 and at most 1");
            return Err(Failure::new(400, why));
        }
        let random = || RandomState::new().hash_one(0);
        let seed = self.seed.map_or_else(random, i64::cast_unsigned);
        Ok(Sampling { temperature, top_p, seed, ..Sampling::default() })
    }
}

/// What the answers to a request have in common.
#[derive(Debug)]
pub struct Answer {
    chat: bool,
    id: String,
    created: u64,
    model: String,
}

impl Answer {
    /// For a request to the chat endpoint or the other one.
    #[must_use]
    pub fn new(chat: bool, model: &str) -> Self {
        let prefix = if chat { "chatcmpl" } else { "cmpl" };
        let id = format!("{prefix}-{:016x}", RandomState::new().hash_one(0));
        let created = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs();
        Self { chat, id, created, model: model.to_owned() }
    }

    fn with(&self, object: &str, choices: &Value, usage: Option<Value>) -> Value {
        let Self { id, created, model, .. } = self;
        let mut value = json!({"id": id, "object": object, "created": created, "model": model,
            "choices": choices});
        if let Some(usage) = usage {
            value["usage"] = usage;
        }
        value
    }

    /// The whole answer.
    #[must_use]
    pub fn whole(&self, text: &str, finish: &str, tokens: (usize, usize)) -> Value {
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        let object = if self.chat {
            choice["message"] = json!({"role": "assistant", "content": text});
            "chat.completion"
        } else {
            choice["text"] = text.into();
            "text_completion"
        };
        self.with(object, &json!([choice]), Some(usage(tokens)))
    }

    /// A piece of the answer.
    #[must_use]
    pub fn piece(&self, text: &str, first: bool, finish: Option<&str>) -> Value {
        let mut choice = json!({"index": 0, "logprobs": null, "finish_reason": finish});
        if self.chat {
            choice["delta"] = json!({"content": text});
            if first {
                choice["delta"]["role"] = "assistant".into();
            }
        } else {
            choice["text"] = text.into();
        }
        self.with(self.object(), &json!([choice]), None)
    }

    /// The piece with the numbers of tokens.
    #[must_use]
    pub fn usage(&self, tokens: (usize, usize)) -> Value {
        self.with(self.object(), &json!([]), Some(usage(tokens)))
    }

    fn object(&self) -> &'static str {
        if self.chat { "chat.completion.chunk" } else { "text_completion" }
    }
}

fn usage((prompt, new): (usize, usize)) -> Value {
    json!({"prompt_tokens": prompt, "completion_tokens": new, "total_tokens": prompt + new})
}
