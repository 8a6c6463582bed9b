//! Requests and answers in the shapes of OpenAI's API.
//!
//! A field that is not known is an error, because to ignore it would give another text than asked.

use crate::engine::{Event, Job};
use crate::http::Server;
use leasehold_llama::{Sampling, StopStrings, TextStream};
use serde::Deserialize;
use serde_json::{Value, json};
use std::num::NonZeroUsize;
use std::time::{Instant, SystemTime, UNIX_EPOCH};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};

/// Why a request has no answer, or not all of it: an HTTP status and a reason.
#[derive(Debug, Clone)]
pub struct Failure(pub u16, pub String);

pub type Result<T> = std::result::Result<T, Failure>;

impl Failure {
    pub fn json(&self) -> Value {
        let kind = if self.0 < 500 { "invalid_request_error" } else { "server_error" };
        json!({"error": {"message": self.1, "type": kind, "param": null, "code": null}})
    }
}

/// An argument that was never valid is the client's.
impl From<leasehold::Error> for Failure {
    fn from(why: leasehold::Error) -> Self {
        let client = matches!(why, leasehold::Error::InvalidArgument(_));
        Self(if client { 400 } else { 500 }, why.to_string())
    }
}

#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Request {
    model: Option<String>,
    prompt: Option<Value>,
    messages: Option<Vec<Value>>,
    #[serde(alias = "max_completion_tokens")]
    max_tokens: Option<NonZeroUsize>,
    temperature: Option<f32>,
    top_p: Option<f32>,
    seed: Option<i64>,
    stop: Option<Value>,
    stream: Option<bool>,
    #[serde(rename = "stream_options")]
    _stream_options: Option<Value>,
}

/// The job of a request's body, and its answer.
pub fn job(server: &Server, body: &[u8], chat: bool) -> Result<(Job, Answer)> {
    let invalid = |why: &str| Failure(400, why.to_owned());
    let wrong = |e: serde_json::Error| Failure(400, format!("the body is no request: {e}"));
    let request: Request = serde_json::from_slice(body).map_err(wrong)?;
    if request.model.is_some_and(|name| name != server.model) {
        return Err(Failure(404, format!("the only model is {}", server.model)));
    }
    let prompt = match (request.prompt, request.messages, &server.template) {
        (Some(Value::String(text)), None, _) if !chat => server.tokenizer.encode(&text)?,
        (Some(ids), None, _) if !chat => serde_json::from_value(ids).map_err(wrong)?,
        (None, Some(messages), Some(template)) if chat => {
            server.tokenizer.encode_rendered(&template.render(&messages)?)?
        }
        (None, Some(_), None) => return Err(invalid("the model has no chat template")),
        _ if chat => return Err(invalid("give messages, and no prompt")),
        _ => return Err(invalid("give a prompt, and no messages")),
    };
    let stop: Vec<String> = match request.stop {
        None => Vec::new(),
        Some(Value::String(string)) => vec![string],
        Some(strings) => serde_json::from_value(strings).map_err(wrong)?,
    };
    if stop.len() > 4 {
        return Err(invalid("give 4 stop strings at most"));
    }
    let now = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
    let (sender, events) = unbounded_channel();
    let answer = Answer {
        chat,
        stream: request.stream.unwrap_or(false),
        head: json!({"id": format!("cmpl-{}", now.as_nanos()), "created": now.as_secs(),
            "model": server.model}),
        events,
        text: server.tokenizer.stream_after(&prompt)?.1,
        stop: StopStrings::new(stop)?,
        tokens: (prompt.len(), 0),
    };
    let sampling = Sampling {
        temperature: request.temperature.unwrap_or(1.0),
        top_p: request.top_p.unwrap_or(1.0),
        seed: request.seed.map_or(now.as_nanos() as u64, i64::cast_unsigned),
        ..Sampling::default()
    };
    let tokens = request.max_tokens.map_or(if chat { usize::MAX } else { 16 }, usize::from);
    let next = (Vec::new(), Instant::now());
    Ok((Job { prompt, sampling, tokens, events: sender, next }, answer))
}

/// A part of a text, and why it ends.
pub type Piece = (String, Option<&'static str>);

/// An answer as it comes. Its job ends with it.
pub struct Answer {
    chat: bool,
    pub stream: bool,
    head: Value,
    events: UnboundedReceiver<Event>,
    text: TextStream,
    stop: StopStrings,
    tokens: (usize, usize), // of the prompt, and new ones
}

impl Answer {
    /// Waits for the next piece; for all of the text unless it is streamed.
    pub async fn next(&mut self) -> Result<Piece> {
        let mut text = String::new();
        loop {
            match self.events.recv().await {
                None => return Err(Failure(503, "the engine has ended".to_owned())),
                Some(Event::Tokens(tokens)) => {
                    for token in tokens {
                        self.tokens.1 += 1;
                        text += &self.stop.push(&self.text.push(token)?);
                        if self.stop.stopped().is_some() {
                            return Ok((text, Some("stop")));
                        }
                    }
                }
                Some(Event::End(how)) => {
                    text += &self.stop.push(&self.text.clone().finish()?);
                    text += &self.stop.clone().finish();
                    return Ok((text, Some(self.stop.stopped().map_or(how?, |_| "stop"))));
                }
            }
            if self.stream && self.events.is_empty() {
                return Ok((text, None));
            }
        }
    }

    /// A piece in OpenAI's shape.
    pub fn json(&self, (text, finish): &Piece) -> Value {
        let message = json!({"role": "assistant", "content": text});
        let (object, key, content) = match (self.chat, self.stream) {
            (false, _) => ("text_completion", "text", json!(text)),
            (true, false) => ("chat.completion", "message", message),
            (true, true) => ("chat.completion.chunk", "delta", message),
        };
        let mut answer = self.head.clone();
        answer["object"] = object.into();
        answer["choices"] = json!([{"index": 0, key: content, "finish_reason": finish}]);
        if finish.is_some() {
            let (prompt, new) = self.tokens;
            answer["usage"] = json!({"prompt_tokens": prompt, "completion_tokens": new,
                "total_tokens": prompt + new});
        }
        answer
    }
}
