//! Connections, and what a request goes through.
//!
//! A connection carries one request. When a client goes, hyper drops the request's future or its
//! body, and with it the receiver of the job: that is the whole cancellation. A request holds one
//! of a fixed number of places up to its last byte, and without one it is refused.

use crate::api::{Failure, Request as Asked, Result};
use crate::engine::{Command, Engine, Job};
use crate::{Done, template::Template};
use http_body_util::{BodyExt, Channel, Full, Limited, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Incoming};
use hyper::header::{self, CONTENT_TYPE, HeaderMap, HeaderName, HeaderValue};
use hyper::{Request, Response, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
use leasehold_input::shown_within;
use leasehold_llama::Tokenizer;
use serde_json::{Value, json};
use std::sync::{Arc, mpsc};
use std::{convert::Infallible, net::SocketAddr, time::Duration};
use tokio::net::{TcpListener, TcpStream};
use tokio::sync::{OwnedSemaphorePermit, Semaphore, oneshot};
use tokio::task::{block_in_place, spawn};
use tokio::time::{sleep, timeout};

const MAX_CONNECTIONS: u32 = 256;
const MAX_HEADER_BYTES: usize = 16 << 10;
const MAX_BODY_BYTES: usize = 1 << 20;
/// The time for an answer, and for a stream after its first piece.
const ANSWER_TIME: Duration = Duration::from_secs(300);

type Body = UnsyncBoxBody<Bytes, Infallible>;

/// The model that is served, and the limits of its answers.
pub struct Model {
    pub name: String,
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    /// The most tokens of a sequence.
    pub positions: usize,
    /// The origin whose pages may call, `*` for all.
    pub origin: HeaderValue,
}

pub struct Server {
    pub model: Model,
    /// One for each request that may run or wait, and one for each that may run.
    places: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    commands: mpsc::Sender<Command>,
    /// The number of slots.
    count: usize,
}

/// Serves until `stop` is ready, and then the requests that are there.
pub fn serve(
    engine: Engine,
    model: Model,
    address: SocketAddr,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future,
) -> Done<()> {
    let count = engine.slots;
    let [slots, places] = [1, 2].map(|n| Arc::new(Semaphore::new(n * count)));
    let (commands, receiver) = mpsc::channel();
    let server = Arc::new(Server { model, places, slots, commands, count });
    let engine = std::thread::spawn(move || engine.run(&receiver));
    tokio::runtime::Runtime::new()?.block_on(async move {
        if let Some(template) = &server.model.template {
            template.check().await.map_err(|why| why.message)?;
        }
        let listener = TcpListener::bind(address).await?;
        ready(listener.local_addr()?);
        let free = Arc::new(Semaphore::new(MAX_CONNECTIONS as usize));
        let accept = async {
            while let Ok(place) = free.clone().acquire_owned().await {
                match listener.accept().await {
                    Ok((stream, _)) => drop(spawn(server.clone().connection(stream, place))),
                    Err(_) => sleep(Duration::from_millis(50)).await,
                }
            }
        };
        tokio::select! { () = accept => {}, _ = stop => {} }
        drop(listener);
        // Connections that are left after that time end with the runtime.
        let _ = timeout(Duration::from_secs(30), free.acquire_many(MAX_CONNECTIONS)).await;
        Done::Ok(())
    })?;
    engine.join().map_err(|_| "the engine panicked".into())
}

impl Server {
    async fn connection(self: Arc<Self>, stream: TcpStream, _place: OwnedSemaphorePermit) {
        // A piece is sent at once. Without the option it is sent late.
        stream.set_nodelay(true).ok();
        let service = service_fn(|request| async {
            let late = |_| Err(Failure::new(504, "the time of the request is over".to_owned()));
            let answer = timeout(ANSWER_TIME, self.route(request)).await.unwrap_or_else(late);
            let mut answer = answer.unwrap_or_else(|why| whole(why.status, &why.json()));
            let origin = self.model.origin.clone();
            answer.headers_mut().insert(header::ACCESS_CONTROL_ALLOW_ORIGIN, origin);
            Ok::<_, Infallible>(answer)
        });
        let mut http = http1::Builder::new();
        // With a timer, hyper limits a header's time too.
        http.keep_alive(false).timer(TokioTimer::new()).max_buf_size(MAX_HEADER_BYTES);
        let connection = http.serve_connection(TokioIo::new(stream), service);
        // A client may be slow to read.
        timeout(3 * ANSWER_TIME, connection).await.ok();
    }

    async fn route(&self, request: Request<Incoming>) -> Result<Response<Body>> {
        let (head, body) = request.into_parts();
        let method = head.method.as_str();
        match (method, head.uri.path()) {
            ("GET", "/v1/models") => {
                Ok(whole(200, &json!({"object": "list", "data": [self.about()]})))
            }
            ("POST", "/v1/completions") => self.complete(body, false).await,
            ("POST", "/v1/chat/completions") => self.complete(body, true).await,
            ("GET", "/health") => self.status(|_| Ok(())).await,
            ("POST", "/sleep") => self.status(Engine::sleep).await,
            ("POST", "/wake") => self.status(|engine| engine.wake().map(drop)).await,
            ("GET", "/metrics") => {
                // A request that runs or waits has a place.
                let requests = 2 * self.count - self.places.available_permits();
                let text = self.ask(move |engine| engine.metrics(requests)).await?;
                Ok(response(200, "text/plain; version=0.0.4", text))
            }
            ("OPTIONS", _) => Ok(preflight(&head.headers)),
            ("GET", path) if path.starts_with("/v1/models/") => {
                let name = decoded(&path["/v1/models/".len()..]);
                let known = name == self.model.name.as_bytes();
                let unknown = || self.no_model(&String::from_utf8_lossy(&name));
                known.then(|| whole(200, &self.about())).ok_or_else(unknown)
            }
            (method, path) => Err(Failure::new(404, format!("there is no {method} {path}"))),
        }
    }

    fn about(&self) -> Value {
        json!({"id": self.model.name, "object": "model", "created": 0, "owned_by": "leasehold",
            "max_model_len": self.model.positions})
    }

    pub fn no_model(&self, name: &str) -> Failure {
        let name = shown_within(name, 100);
        let message = format!("there is no model {name}; the only model is {}", self.model.name);
        Failure { status: 404, message, code: Some("model_not_found") }
    }

    /// The answer of the engine, between two steps.
    async fn ask<T: Send + 'static>(
        &self,
        question: impl FnOnce(&mut Engine) -> T + Send + 'static,
    ) -> Result<T> {
        let (reply, answer) = oneshot::channel();
        let command = Box::new(move |engine: &mut Engine| drop(reply.send(question(engine))));
        self.commands.send(command).map_err(ended)?;
        answer.await.map_err(ended)
    }

    async fn status(&self, command: fn(&mut Engine) -> Result<()>) -> Result<Response<Body>> {
        let status = self.ask(move |engine| command(engine).map(|()| engine.status())).await?;
        Ok(whole(200, &status?))
    }

    async fn complete(&self, body: Incoming, chat: bool) -> Result<Response<Body>> {
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
        let body = body.map_err(|e| Failure::new(413, format!("the body: {e}")))?.to_bytes();
        let full = |_| Failure::new(503, "the queue is full; try again later".to_owned());
        let place = self.places.clone().try_acquire_owned().map_err(full)?;
        let asked = Asked::from_body(self, &body, chat)?;
        let rendered = match (asked.chat()?, &self.model.template) {
            (None, _) => None,
            (Some(chat), Some(template)) => Some(template.render(chat).await?),
            (Some(_), None) => return Err(Failure::invalid("the model has no chat template")),
        };
        // A tokenizer takes its time.
        let (jobs, mut answer) = block_in_place(|| asked.jobs(self, rendered.as_deref()))?;
        self.submit(jobs);
        if !answer.stream {
            return Ok(whole(200, &answer.whole().await?));
        }
        // The status of the answer is known with the first piece.
        let first = answer.next().await?;
        let (mut pieces, body) = Channel::new(1);
        spawn(timeout(ANSWER_TIME, async move {
            let (_place, mut next) = (place, Result::Ok(first));
            loop {
                let (event, last) = match &next {
                    Ok(Some(piece)) => (answer.json(std::slice::from_ref(piece), false), false),
                    // After the last piece, the number of tokens.
                    Ok(None) if answer.usage => (answer.json(&[], true), true),
                    Ok(None) => (Value::Null, true),
                    Err(why) => (why.json(), true),
                };
                let mut text = String::new();
                if !event.is_null() {
                    text = format!("data: {event}\n\n");
                }
                if last {
                    text += "data: [DONE]\n\n";
                }
                if pieces.send_data(text.into()).await.is_err() || last {
                    break;
                }
                next = answer.next().await;
            }
        }));
        let response = Response::builder().header(CONTENT_TYPE, "text/event-stream");
        Ok(response.body(body.boxed_unsync()).unwrap_or_default())
    }

    /// Gives each job to the engine when there is a slot for it.
    fn submit(&self, jobs: Vec<Job>) {
        let (slots, commands) = (self.slots.clone(), self.commands.clone());
        spawn(async move {
            for job in jobs {
                let Ok(slot) = slots.clone().acquire_owned().await else { return };
                // A client that has gone wants none of them.
                if job.events.is_closed() {
                    return;
                }
                commands.send(Box::new(|engine| engine.add(job, slot))).ok();
            }
        });
    }
}

fn response(status: u16, kind: &str, text: String) -> Response<Body> {
    let mut response = Response::builder().status(status).header(CONTENT_TYPE, kind);
    if status == 503 {
        // Most of what lacks now is there soon.
        response = response.header(header::RETRY_AFTER, "1");
    }
    response.body(Full::from(text).boxed_unsync()).unwrap_or_default()
}

fn whole(status: u16, value: &Value) -> Response<Body> {
    response(status, "application/json", value.to_string())
}

/// The answer to a preflight: a browser asks before it sends a request of another origin's page.
fn preflight(asked: &HeaderMap) -> Response<Body> {
    let mut answer = Response::new(Full::default().boxed_unsync());
    *answer.status_mut() = hyper::StatusCode::NO_CONTENT;
    let any = HeaderValue::from_static("*");
    let headers = asked.get(header::ACCESS_CONTROL_REQUEST_HEADERS).unwrap_or(&any);
    let mut allow = |name: HeaderName, value| drop(answer.headers_mut().insert(name, value));
    allow(header::ACCESS_CONTROL_ALLOW_HEADERS, headers.clone());
    allow(header::ACCESS_CONTROL_ALLOW_METHODS, HeaderValue::from_static("GET, POST, OPTIONS"));
    allow(header::ACCESS_CONTROL_MAX_AGE, HeaderValue::from_static("600"));
    answer
}

/// The bytes of a path's part, in which `%2F` is a slash.
fn decoded(part: &str) -> Vec<u8> {
    let (mut bytes, mut rest) = (Vec::new(), part.as_bytes());
    while let Some((&first, after)) = rest.split_first() {
        let code = after.get(..2).and_then(|code| std::str::from_utf8(code).ok());
        let code = code.filter(|_| first == b'%').and_then(|c| u8::from_str_radix(c, 16).ok());
        bytes.push(code.unwrap_or(first));
        rest = if code.is_some() { &after[2..] } else { after };
    }
    bytes
}

fn ended(_: impl std::error::Error) -> Failure {
    Failure::new(503, "the engine has ended".to_owned())
}
