//! A thousand requests over a simulated CUDA driver whose calls fail, by clients of which many go:
//! each text is the one without faults, or ends with an error that names the fault.

use leasehold::Context;
use leasehold::backend::sync::Mutex;
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_cuda_sim::{SimDriver, SimDriverConfig};
use leasehold_llama::{Config, DType, Model, Tokenizer, Weights};
use leasehold_serve::engine::{Engine, Settings, Status};
use leasehold_serve::http::{Limits, Server};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, KernelRegistry, MachineConfig, When};
use serde_json::{Value, json};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};
use tokio::sync::{Semaphore, oneshot, watch};

const MODEL: &str = "../../crates/llama/tests/models/grouped-heads";
const REQUESTS: usize = 1000;
const CLIENTS: usize = 12;
const SLOTS: usize = 4;
const PROMPTS: usize = 10;

/// The driver of each time that the engine made its model.
type Drivers = Arc<Mutex<Vec<Arc<SimDriver>>>>;

fn faults() -> FaultPlan {
    let fail =
        |call: &str, p, code| FaultRule::on(call, When::Probability(p), FaultAction::Fail(code));
    FaultPlan::none()
        .with(fail("cuGraphLaunch", 0.01, 700))
        .with(fail("cuGraphInstantiate", 0.05, 1))
        .with(FaultRule::on("cuGraphLaunch", When::Probability(0.003), FaultAction::DeviceLost))
        .with(FaultRule::any(When::Probability(0.00005), FaultAction::OutOfMemory))
        .with(FaultRule::any(When::Probability(0.00005), FaultAction::Fail(719)))
}

fn start(drivers: &Drivers) -> Engine {
    let drivers = drivers.clone();
    let load = move || {
        let mut drivers = drivers.lock();
        let kernels = KernelRegistry::new();
        leasehold_operators::simulate(&kernels)?;
        let machine = MachineConfig::seed(drivers.len() as u64).kernels(kernels);
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        if !drivers.is_empty() {
            driver.machine().set_faults(faults());
        }
        drivers.push(driver.clone());
        drop(drivers);
        let backend = Arc::new(CudaBackend::with_ops(driver, CudaConfig::default())?);
        let runtime = Context::with_backends(vec![backend]).runtime("cuda:0".parse()?)?;
        let dir = Path::new(MODEL);
        let config = Config::from_dir(dir)?;
        let weights = Weights::read_dir(dir, &config)?;
        Model::load(&runtime, &config, &weights, DType::F32, &mut |_, _| {})
    };
    let settings = Settings { slots: SLOTS, positions: 64, end_tokens: Vec::new() };
    Engine::start(Box::new(load), settings).unwrap()
}

/// A server that is told to end when the sender is used.
struct Running {
    address: SocketAddr,
    status: watch::Receiver<Status>,
    stop: oneshot::Sender<()>,
    threads: [JoinHandle<()>; 2],
}

fn serve(engine: Engine) -> Running {
    let status = engine.status.clone();
    let limits = Limits {
        connections: 64,
        body: 1 << 16,
        read: Duration::from_secs(10),
        answer: Duration::from_secs(120),
        drain: Duration::from_secs(30),
    };
    let server = Server {
        model: "grouped-heads".to_owned(),
        tokenizer: Tokenizer::from_slice(leasehold_tiny_python::TOKENIZER, "bundled").unwrap(),
        template: None,
        positions: 64,
        places: Arc::new(Semaphore::new(SLOTS + 6)),
        jobs: engine.jobs,
        status: engine.status,
        limits,
    };
    let (stop, stopped) = oneshot::channel::<()>();
    let (say, address) = std::sync::mpsc::channel();
    let thread = thread::spawn(move || {
        let threads =
            tokio::runtime::Builder::new_multi_thread().worker_threads(2).enable_all().build();
        threads.unwrap().block_on(async move {
            let listener = tokio::net::TcpListener::bind("127.0.0.1:0").await.unwrap();
            say.send(listener.local_addr().unwrap()).unwrap();
            Arc::new(server).serve(listener, async move { drop(stopped.await) }).await;
        });
    });
    let address = address.recv().unwrap();
    Running { address, status, stop, threads: [thread, engine.thread] }
}

#[derive(Debug)]
enum Outcome {
    Text(String),
    Failed(String),
    Busy,
    Left,
}

/// Sends a request, and reads its answer, or only so many bytes of it.
fn request(address: SocketAddr, body: &Value, bytes: Option<usize>) -> Outcome {
    let body = body.to_string();
    let mut stream = TcpStream::connect(address).unwrap();
    // Longer than any answer: what takes longer hangs.
    stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: test\r\ncontent-length:";
    write!(stream, "{head} {}\r\n\r\n{body}", body.len()).unwrap();
    let mut answer = Vec::new();
    if let Some(bytes) = bytes {
        let _ = stream.take(bytes as u64).read_to_end(&mut answer);
        return Outcome::Left;
    }
    stream.read_to_end(&mut answer).unwrap();
    let answer = String::from_utf8(answer).unwrap();
    let (head, body) = answer.split_once("\r\n\r\n").unwrap();
    let mut text = String::new();
    // A chunk of an answer in pieces has one event, in a line of its own.
    let events = body.lines().map(|line| line.strip_prefix("data: ").unwrap_or(line));
    for event in events.filter(|line| line.starts_with('{')) {
        let event: Value = serde_json::from_str(event).unwrap();
        if let Some(why) = event["error"]["message"].as_str() {
            let busy = head.contains(" 503 ") && why.contains("queue is full");
            return if busy { Outcome::Busy } else { Outcome::Failed(why.to_owned()) };
        }
        assert!(head.contains(" 200 "), "{head}");
        text += event["choices"][0]["text"].as_str().unwrap();
        if event["choices"][0]["finish_reason"] == "length" {
            return Outcome::Text(text);
        }
    }
    panic!("an answer without an end: {answer}");
}

fn body(which: usize, stream: bool) -> Value {
    let prompt: Vec<usize> = (0..1 + which * 3).map(|at| (at * 37 + which * 11) % 200).collect();
    json!({"prompt": prompt, "max_tokens": 2 + which, "stream": stream, "seed": which,
        "temperature": if which.is_multiple_of(2) { 0.0 } else { 1.0 }})
}

fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

#[test]
fn a_thousand_requests_of_clients_that_go_over_a_driver_that_fails() {
    let drivers = Drivers::default();
    let Running { address, status, stop, threads } = serve(start(&drivers));
    let wanted: Vec<String> = (0..PROMPTS)
        .map(|which| match request(address, &body(which, false), None) {
            Outcome::Text(text) => text,
            other => panic!("{other:?}"),
        })
        .collect();
    assert_eq!(status.borrow().finished, PROMPTS as u64);
    drivers.lock()[0].machine().set_faults(faults());

    let client = |seed: u64| {
        let (mut state, mut counts) = (seed, [0; 4]);
        for _ in 0..REQUESTS.div_ceil(CLIENTS) {
            let (which, stream) = (random(&mut state) % PROMPTS, random(&mut state) % 2 == 0);
            let bytes = (random(&mut state) % 3 == 0).then(|| random(&mut state) % 1000);
            let outcome = request(address, &body(which, stream), bytes);
            let at = match outcome {
                Outcome::Text(text) => {
                    assert_eq!(text, wanted[which], "request {which}");
                    0
                }
                Outcome::Failed(why) => {
                    assert!(why.contains("injected"), "{why}");
                    1
                }
                Outcome::Busy => {
                    thread::sleep(Duration::from_millis(2));
                    2
                }
                Outcome::Left => 3,
            };
            counts[at] += 1;
        }
        counts
    };
    let all = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS as u64).map(|seed| scope.spawn(move || client(seed))).collect();
        let counts = clients.into_iter().map(|client| client.join().unwrap());
        counts.fold([0; 4], |sum, one| std::array::from_fn(|at| sum[at] + one[at]))
    });
    let [texts, failed, busy, left] = all;
    println!("{texts} texts, {failed} failed, {busy} refused, {left} left; {:?}", *status.borrow());
    assert!(texts > 200 && failed > 3 && left > 200, "{all:?}");

    // The clients that went leave nothing behind.
    let end = Instant::now() + Duration::from_secs(60);
    while (status.borrow().running, status.borrow().waiting) != (0, 0) {
        assert!(Instant::now() < end, "{:?}", *status.borrow());
        thread::sleep(Duration::from_millis(5));
    }
    let last = status.borrow().clone();
    assert!(last.restarts > 0 && last.left > 0 && last.failed >= failed, "{last:?}");
    stop.send(()).unwrap();
    threads.into_iter().for_each(|thread| thread.join().unwrap());
    for driver in drivers.lock().drain(..) {
        assert_eq!(driver.take_leaks(), Vec::<String>::new());
        let reports = driver.machine().take_reports();
        assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
    }
}
