//! Connections, and what a request goes through.
//!
//! A connection carries one request. When a client goes, hyper drops the request's future or its
//! body, and with it the receiver of the [`Job`]: that is the whole cancellation. A request holds
//! one of a fixed number of places from its prompt to its last byte, and without one it is refused.
//! Everything that a client may delay has a limit: header, body, answer, connection.

use crate::api::{Answer, Failure, Prompt, Request, Result, Stop};
use crate::engine::{Event, Job, Status};
use crate::template::Template;
use http_body_util::{BodyExt, Either, Full};
use hyper::body::{Body, Bytes, Frame, Incoming};
use hyper::header::{CONTENT_TYPE, HeaderValue, RETRY_AFTER};
use hyper::server::conn::http1;
use hyper::service::service_fn;
use hyper::{Method, Response, StatusCode};
use hyper_util::rt::{TokioIo, TokioTimer};
use leasehold_llama::{StopStrings, TextStream, Tokenizer};
use serde_json::{Value, json};
use std::collections::VecDeque;
use std::convert::Infallible;
use std::future::{Future, poll_fn};
use std::pin::{Pin, pin};
use std::sync::{Arc, mpsc};
use std::task::{Context, Poll, ready};
use std::time::{Duration, Instant};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::mpsc::{UnboundedReceiver, unbounded_channel};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, watch};
use tokio::task::{JoinSet, spawn_blocking};
use tokio::time::{sleep, timeout};

/// Bytes of a request's header, and headers, at most.
const HEADER: (usize, usize) = (16 << 10, 64);
/// New tokens of `/v1/completions` if the request names no number.
const TOKENS: usize = 16;

/// The limits of requests.
#[derive(Debug, Clone)]
pub struct Limits {
    /// Open connections.
    pub connections: usize,
    /// Bytes of a body.
    pub body: usize,
    /// The time for a header, and the time for a body.
    pub read: Duration,
    /// The time for an answer.
    pub answer: Duration,
    /// The time for the requests that are there when the server stops.
    pub drain: Duration,
}

/// What requests share.
pub struct Server {
    /// The model's name.
    pub model: String,
    /// Its tokenizer.
    pub tokenizer: Tokenizer,
    /// Its chat template.
    pub template: Option<Template>,
    /// Tokens of a sequence at most.
    pub positions: usize,
    /// Requests that may run or wait.
    pub places: Arc<Semaphore>,
    /// The engine's jobs.
    pub jobs: mpsc::Sender<Job>,
    /// The engine's status.
    pub status: watch::Receiver<Status>,
    /// The limits.
    pub limits: Limits,
}

type Answered = Response<Either<Full<Bytes>, Pieces>>;

impl Server {
    /// Serves until `stop` is ready, and then the requests that are there.
    pub async fn serve(self: Arc<Self>, listener: TcpListener, stop: impl Future<Output = ()>) {
        let mut connections = JoinSet::new();
        let mut stop = pin!(stop);
        loop {
            let free = connections.len() < self.limits.connections;
            tokio::select! {
                () = &mut stop => break,
                Some(_) = connections.join_next() => {}
                accepted = listener.accept(), if free => match accepted {
                    Ok((stream, _)) => drop(connections.spawn(self.clone().connection(stream))),
                    // Without a file descriptor, for example.
                    Err(_) => sleep(Duration::from_millis(50)).await,
                },
            }
        }
        drop(listener);
        let rest = async { while connections.join_next().await.is_some() {} };
        // What is left after the time ends with the set.
        let _ = timeout(self.limits.drain, rest).await;
    }

    async fn connection(self: Arc<Self>, stream: TcpStream) {
        // A piece is sent at once. Without the option it is sent late.
        let _ = stream.set_nodelay(true);
        let Limits { read, answer, .. } = self.limits;
        let service = service_fn(move |request| {
            let server = self.clone();
            async move { Ok::<_, Infallible>(server.answer(request).await) }
        });
        let mut http = http1::Builder::new();
        http.keep_alive(false).timer(TokioTimer::new()).header_read_timeout(read);
        http.max_buf_size(HEADER.0).max_headers(HEADER.1);
        // A client that does not read its answer has twice the time of one that does.
        let _ = timeout(2 * (read + answer), http.serve_connection(TokioIo::new(stream), service))
            .await;
    }

    async fn answer(self: Arc<Self>, request: hyper::Request<Incoming>) -> Answered {
        let known = ["/health", "/v1/models", "/v1/completions", "/v1/chat/completions"];
        let path = request.uri().path().to_owned();
        let answered = match (request.method(), path.as_str()) {
            (&Method::GET, "/health") => Ok(self.health()),
            (&Method::GET, "/v1/models") => {
                let model = json!({"id": self.model, "object": "model", "owned_by": "leasehold"});
                Ok(response(200, &json!({"object": "list", "data": [model]})))
            }
            (&Method::POST, "/v1/completions") => self.complete(request.into_body(), false).await,
            (&Method::POST, "/v1/chat/completions") => {
                self.complete(request.into_body(), true).await
            }
            (method, path) if known.contains(&path) => {
                Err(Failure::new(405, format!("{path} has no method {method}")))
            }
            (_, path) => {
                Err(Failure::new(404, format!("{path} is not there; there are {known:?}")))
            }
        };
        answered.unwrap_or_else(|why| response(why.status, &why.json()))
    }

    fn health(&self) -> Answered {
        let status = self.status.borrow();
        let (code, word) = if status.down.is_none() { (200, "ok") } else { (503, "down") };
        response(code, &json!({"status": word, "engine": *status}))
    }

    async fn complete(self: &Arc<Self>, body: Incoming, chat: bool) -> Result<Answered> {
        let body = timeout(self.limits.read, self.body(body)).await;
        let body = body.map_err(|_| Failure::new(408, "the body did not come in time"))??;
        let place = self.places.clone().try_acquire_owned();
        let place = place.map_err(|_| Failure::new(503, "the queue is full; try again later"))?;
        let server = self.clone();
        // A template and a tokenizer take their time.
        let prepared = spawn_blocking(move || server.prepare(&body, chat, place)).await;
        let (mut generation, stream, usage) =
            prepared.map_err(|e| Failure::new(500, format!("the prompt: {e}")))??;
        // The status of the answer is known with the first piece.
        let Piece { mut text, mut finish } = poll_fn(|cx| generation.poll(cx)).await?;
        if stream {
            let mut pieces = Pieces { generation, frames: VecDeque::new(), usage, ended: false };
            pieces.push(Ok(Piece { text, finish }), true);
            return Ok(answered(200, "text/event-stream", Either::Right(pieces)));
        }
        while finish.is_none() {
            let piece = poll_fn(|cx| generation.poll(cx)).await?;
            (text, finish) = (text + &piece.text, piece.finish);
        }
        let finish = finish.unwrap_or_default();
        Ok(response(200, &generation.answer.whole(&text, finish, generation.tokens)))
    }

    /// The body, within its limit.
    async fn body(&self, mut body: Incoming) -> Result<Bytes> {
        let (mut whole, limit) = (Vec::new(), self.limits.body);
        while let Some(frame) = body.frame().await {
            let frame = frame.map_err(|e| Failure::new(400, format!("the body: {e}")))?;
            whole.extend_from_slice(frame.data_ref().map_or(&[][..], |data| data));
            if whole.len() > limit {
                // A client that still sends would miss the answer: it gets a moment to finish.
                let rest = async { while let Some(Ok(_)) = body.frame().await {} };
                let _ = timeout(Duration::from_secs(1), rest).await;
                return Err(Failure::new(413, format!("the body has more than {limit} bytes")));
            }
        }
        Ok(whole.into())
    }

    /// Gives the engine the job of a request. Returns what becomes of it, whether it is to be
    /// streamed, and whether the stream ends with the numbers of tokens.
    fn prepare(
        &self,
        body: &[u8],
        chat: bool,
        place: OwnedSemaphorePermit,
    ) -> Result<(Generation, bool, bool)> {
        let invalid = |why: String| Failure::new(400, why);
        let of = |e: leasehold::Error| Failure::of(&e, 500);
        let request = Request::read(body)?;
        if let Some(model) = request.model.as_ref().filter(|name| **name != self.model) {
            let why = format!("the model {model} is not here; there is {}", self.model);
            return Err(Failure { code: Some("model_not_found"), ..Failure::new(404, why) });
        }
        let prompt = match (chat, &request.prompt, &request.messages) {
            (true, None, Some(messages)) => self.chat(messages)?,
            (false, Some(Prompt::Text(text) | Prompt::Texts([text])), None) => {
                self.tokenizer.encode(text).map_err(of)?
            }
            (false, Some(Prompt::Ids(ids)), None) => ids.clone(),
            (true, ..) => return Err(invalid("give messages, and no prompt".to_owned())),
            (false, ..) => return Err(invalid("give a prompt, and no messages".to_owned())),
        };
        // The last token needs no position.
        let room = (self.positions + 1).saturating_sub(prompt.len());
        let asked = request.max_completion_tokens.or(request.max_tokens);
        let tokens = asked.unwrap_or(if chat { room } else { room.min(TOKENS) });
        if tokens > room || room == 0 {
            let (has, most) = (prompt.len(), self.positions);
            let why = format!(
                "the prompt has {has} tokens, and {tokens} new ones are asked for; {most} are the \
                 maximum of both"
            );
            let code = Some("context_length_exceeded");
            return Err(Failure { code, ..Failure::new(400, why) });
        }
        if tokens == 0 {
            return Err(invalid("max_tokens is 0; ask for 1 at least".to_owned()));
        }
        let strings = match request.stop.as_ref() {
            None => &[][..],
            Some(Stop::One(string)) => std::slice::from_ref(string),
            Some(Stop::Many(strings)) if strings.len() <= 4 => strings,
            Some(Stop::Many(_)) => return Err(invalid("give 4 stop strings at most".to_owned())),
        };
        let stop = StopStrings::new(strings).map_err(of)?;
        let (_, text) = self.tokenizer.stream_after(&prompt).map_err(of)?;
        let (sender, events) = unbounded_channel();
        let job = Job {
            sampling: request.sampling()?,
            tokens,
            deadline: Instant::now() + self.limits.answer,
            events: sender,
            prompt,
        };
        let generation = Generation {
            answer: Answer::new(chat, &self.model),
            tokens: (job.prompt.len(), 0),
            events,
            text: Some((text, stop)),
            _place: place,
        };
        let ended = |_| Failure::new(503, "the engine has ended");
        self.jobs.send(job).map_err(ended)?;
        let usage = request.stream_options.is_some_and(|options| options.include_usage);
        Ok((generation, request.stream.unwrap_or(false), usage))
    }

    /// The prompt of a chat.
    fn chat(&self, messages: &[Value]) -> Result<Vec<u32>> {
        let none = || Failure::new(400, "the model has no chat template; use /v1/completions");
        let template = self.template.as_ref().ok_or_else(none)?;
        let text = template.render(messages)?;
        let mut ids = self.tokenizer.encode(&text).map_err(|e| Failure::of(&e, 500))?;
        // The tokenizer adds the token at the beginning that the template has written.
        let begun = template.bos.as_ref().is_some_and(|bos| text.starts_with(bos.as_str()));
        if begun && ids.len() > 1 && ids[0] == ids[1] {
            ids.remove(0);
        }
        Ok(ids)
    }
}

/// A part of a text, and why it ends if it does.
struct Piece {
    text: String,
    finish: Option<&'static str>,
}

/// The text of a job as it comes. The job ends with it.
struct Generation {
    answer: Answer,
    events: UnboundedReceiver<Event>,
    /// Until the end.
    text: Option<(TextStream, StopStrings)>,
    /// Of the prompt, and new ones.
    tokens: (usize, usize),
    _place: OwnedSemaphorePermit,
}

impl Generation {
    fn poll(&mut self, cx: &mut Context<'_>) -> Poll<Result<Piece>> {
        loop {
            let event = ready!(self.events.poll_recv(cx));
            let failed = |e: leasehold::Error| Failure::of(&e, 500);
            let ended = || Failure::new(500, "the engine has ended");
            let (text, stop) = self.text.as_mut().ok_or_else(ended)?;
            let finish = match event {
                Some(Event::Token(id)) => {
                    self.tokens.1 += 1;
                    let piece = stop.push(&text.push(id).map_err(failed)?);
                    let finish = stop.stopped().map(|_| "stop");
                    if finish.is_some() {
                        // The job ends before the next step.
                        self.events.close();
                    } else if piece.is_empty() {
                        continue;
                    }
                    return Poll::Ready(Ok(Piece { text: piece, finish }));
                }
                Some(Event::Stop) => "stop",
                Some(Event::Length) => "length",
                Some(Event::Failed(why)) => return Poll::Ready(Err(why)),
                None => return Poll::Ready(Err(ended())),
            };
            let (text, mut stop) = self.text.take().ok_or_else(ended)?;
            let mut rest = stop.push(&text.finish().map_err(failed)?);
            let finish = Some(if stop.stopped().is_some() { "stop" } else { finish });
            rest += &stop.finish();
            return Poll::Ready(Ok(Piece { text: rest, finish }));
        }
    }
}

/// The answer in pieces, as server-sent events.
pub struct Pieces {
    generation: Generation,
    frames: VecDeque<Bytes>,
    /// Whether the numbers of tokens come at the end.
    usage: bool,
    ended: bool,
}

impl Pieces {
    fn push(&mut self, piece: Result<Piece>, first: bool) {
        let answer = &self.generation.answer;
        let mut event = |data: String| self.frames.push_back(format!("data: {data}\n\n").into());
        match piece {
            Err(why) => event(why.json().to_string()),
            Ok(Piece { text, finish }) => {
                event(answer.piece(&text, first, finish).to_string());
                if finish.is_none() {
                    return;
                }
                if self.usage {
                    event(answer.usage(self.generation.tokens).to_string());
                }
                event("[DONE]".to_owned());
            }
        }
        self.ended = true;
    }
}

impl Body for Pieces {
    type Data = Bytes;
    type Error = Infallible;

    fn poll_frame(
        mut self: Pin<&mut Self>,
        cx: &mut Context<'_>,
    ) -> Poll<Option<std::result::Result<Frame<Bytes>, Infallible>>> {
        loop {
            if let Some(frame) = self.frames.pop_front() {
                return Poll::Ready(Some(Ok(Frame::data(frame))));
            }
            if self.ended {
                return Poll::Ready(None);
            }
            let piece = ready!(self.generation.poll(cx));
            self.push(piece, false);
        }
    }
}

fn answered(status: u16, kind: &'static str, body: Either<Full<Bytes>, Pieces>) -> Answered {
    let mut response = Response::new(body);
    *response.status_mut() = StatusCode::from_u16(status).unwrap_or_default();
    response.headers_mut().insert(CONTENT_TYPE, HeaderValue::from_static(kind));
    if status == 503 {
        response.headers_mut().insert(RETRY_AFTER, HeaderValue::from_static("1"));
    }
    response
}

fn response(status: u16, value: &Value) -> Answered {
    let body = Either::Left(Full::new(value.to_string().into()));
    answered(status, "application/json", body)
}
