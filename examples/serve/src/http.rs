//! Connections, and what a request goes through.
//!
//! A connection carries one request. When a client goes, hyper drops the request's future or its
//! body, and with it the receiver of the job: that is the whole cancellation. A request holds one
//! of a fixed number of places up to its last byte, and without one it is refused.

use crate::api::{Failure, Result, job};
use crate::engine::{Command, Engine};
use crate::{Done, template::Template};
use http_body_util::{BodyExt, Channel, Full, Limited, combinators::UnsyncBoxBody};
use hyper::body::{Bytes, Incoming};
use hyper::{Request, Response, header::CONTENT_TYPE, server::conn::http1, service::service_fn};
use hyper_util::rt::{TokioIo, TokioTimer};
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

pub struct Server {
    pub model: String,
    pub tokenizer: Tokenizer,
    pub template: Option<Template>,
    /// One for each request that may run or wait, and one for each that may run.
    places: Arc<Semaphore>,
    slots: Arc<Semaphore>,
    commands: mpsc::Sender<Command>,
}

/// Serves until `stop` is ready, and then the requests that are there.
pub fn serve(
    engine: Engine,
    model: String,
    tokenizer: Tokenizer,
    template: Option<Template>,
    address: SocketAddr,
    ready: impl FnOnce(SocketAddr),
    stop: impl Future,
) -> Done<()> {
    let [slots, places] = [1, 2].map(|n| Arc::new(Semaphore::new(n * engine.slots)));
    let (commands, receiver) = mpsc::channel();
    let server = Arc::new(Server { model, tokenizer, template, places, slots, commands });
    let engine = std::thread::spawn(move || engine.run(&receiver));
    tokio::runtime::Runtime::new()?.block_on(async move {
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
        std::io::Result::Ok(())
    })?;
    engine.join().map_err(|_| "the engine panicked".into())
}

impl Server {
    async fn connection(self: Arc<Self>, stream: TcpStream, _place: OwnedSemaphorePermit) {
        // A piece is sent at once. Without the option it is sent late.
        stream.set_nodelay(true).ok();
        let service = service_fn(|request| async {
            let late = |_| Err(Failure(504, "the time of the request is over".to_owned()));
            let answer = timeout(ANSWER_TIME, self.route(request)).await.unwrap_or_else(late);
            Ok::<_, Infallible>(answer.unwrap_or_else(|why| whole(why.0, &why.json())))
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
        match (head.method.as_str(), head.uri.path()) {
            ("GET", "/v1/models") => {
                let model = json!({"id": self.model, "object": "model"});
                Ok(whole(200, &json!({"object": "list", "data": [model]})))
            }
            ("POST", "/v1/completions") => self.complete(body, false).await,
            ("POST", "/v1/chat/completions") => self.complete(body, true).await,
            ("GET", "/health") => self.ask(|_| Ok(())).await,
            ("POST", "/sleep") => self.ask(Engine::sleep).await,
            ("POST", "/wake") => self.ask(|engine| engine.wake().map(drop)).await,
            (method, path) => Err(Failure(404, format!("there is no {method} {path}"))),
        }
    }

    async fn ask(&self, command: fn(&mut Engine) -> Result<()>) -> Result<Response<Body>> {
        let (reply, status) = oneshot::channel();
        let command = Box::new(move |engine: &mut Engine| {
            reply.send(command(engine).map(|()| engine.status())).ok();
        });
        self.commands.send(command).map_err(ended)?;
        Ok(whole(200, &status.await.map_err(ended)??))
    }

    async fn complete(&self, body: Incoming, chat: bool) -> Result<Response<Body>> {
        let body = Limited::new(body, MAX_BODY_BYTES).collect().await;
        let body = body.map_err(|e| Failure(413, format!("the body: {e}")))?.to_bytes();
        let full = |_| Failure(503, "the queue is full; try again later".to_owned());
        let place = self.places.clone().try_acquire_owned().map_err(full)?;
        // A template and a tokenizer take their time.
        let (job, mut answer) = block_in_place(|| job(self, &body, chat))?;
        let slot = self.slots.clone().acquire_owned().await.map_err(ended)?;
        self.commands.send(Box::new(|engine| engine.add(job, slot))).map_err(ended)?;
        // The status of the answer is known with the first piece.
        let first = answer.next().await?;
        if !answer.stream {
            return Ok(whole(200, &answer.json(&first)));
        }
        let (mut pieces, body) = Channel::new(1);
        spawn(timeout(ANSWER_TIME, async move {
            let (_place, mut piece) = (place, Ok(first));
            loop {
                let value = piece.as_ref().map_or_else(Failure::json, |piece| answer.json(piece));
                let last = !matches!(piece, Ok((_, None)));
                let end = if last { "data: [DONE]\n\n" } else { "" };
                let sent = pieces.send_data(format!("data: {value}\n\n{end}").into()).await;
                if last || sent.is_err() {
                    break;
                }
                piece = answer.next().await;
            }
        }));
        let response = Response::builder().header(CONTENT_TYPE, "text/event-stream");
        Ok(response.body(body.boxed_unsync()).unwrap_or_default())
    }
}

fn whole(status: u16, value: &Value) -> Response<Body> {
    let body = Full::from(value.to_string()).boxed_unsync();
    let response = Response::builder().status(status).header(CONTENT_TYPE, "application/json");
    response.body(body).unwrap_or_default()
}

fn ended(_: impl std::error::Error) -> Failure {
    Failure(503, "the engine has ended".to_owned())
}
