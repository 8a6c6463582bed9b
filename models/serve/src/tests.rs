//! A thousand requests over a simulated CUDA driver whose calls fail, by clients of which many go.

use crate::engine::Engine;
use crate::http::{Model as Served, serve};
use leasehold::Context;
use leasehold::backend::sync::Mutex;
use leasehold_cuda::{CudaBackend, CudaConfig};
use leasehold_llama::{Batch, Config, DType, Mode, Model, Tokenizer, Weights};
use leasehold_sim::cuda::{SimDriver, SimDriverConfig};
use leasehold_sim::{FaultAction, FaultPlan, FaultRule, KernelRegistry, MachineConfig, When};
use serde_json::{Value, json};
use std::collections::BTreeMap;
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::path::Path;
use std::sync::{Arc, mpsc};
use std::thread;
use std::time::{Duration, Instant};
use tokio::sync::oneshot;

const MODEL: &str = "../../models/llama/tests/models/grouped-heads";
const REQUESTS: usize = 1000;
const CLIENTS: usize = 10;
const SLOTS: usize = 4;
const PROMPTS: usize = 10;

/// The driver of each time that the engine made its batch, and the faults of the next one.
#[derive(Default)]
struct Drivers {
    all: Vec<Arc<SimDriver>>,
    faults: Option<FaultPlan>,
}

impl Drivers {
    fn set_faults(&mut self, faults: FaultPlan) {
        self.all.last().unwrap().machine().set_faults(faults.clone());
        self.faults = Some(faults);
    }
}

fn faults() -> FaultPlan {
    let fail =
        |call: &str, p, code| FaultRule::on(call, When::Probability(p), FaultAction::Fail(code));
    FaultPlan::none()
        .with(fail("cuGraphLaunch", 0.004, 700))
        .with(fail("cuGraphInstantiate", 0.05, 1))
        .with(FaultRule::on("cuGraphLaunch", When::Probability(0.001), FaultAction::DeviceLost))
        .with(FaultRule::any(When::Probability(0.00005), FaultAction::OutOfMemory))
        .with(FaultRule::any(When::Probability(0.00005), FaultAction::Fail(719)))
}

/// Whether an error is one of those faults, or the last one of a device that a fault ended.
fn names_a_fault(why: &str) -> bool {
    let codes = [
        "(700)",
        "(719)",
        "the driver has no room",
        "cuGraphInstantiate failed with CUDA_ERROR_INVALID_VALUE (1)",
    ];
    why.contains("injected") || codes.iter().any(|code| why.contains(code))
}

fn engine(drivers: Arc<Mutex<Drivers>>) -> Engine {
    let load = move || {
        let mut drivers = drivers.lock();
        let kernels = KernelRegistry::new();
        leasehold_operators::simulate(&kernels)?;
        let machine = MachineConfig::seed(drivers.all.len() as u64).kernels(kernels);
        let driver = Arc::new(SimDriver::new(SimDriverConfig::new(machine))?);
        driver.machine().set_faults(drivers.faults.clone().unwrap_or_else(FaultPlan::none));
        drivers.all.push(driver.clone());
        drop(drivers);
        let backend = Arc::new(CudaBackend::with_ops(driver, CudaConfig::default())?);
        let runtime = Context::with_backends(vec![backend]).runtime("cuda:0".parse()?)?;
        let dir = Path::new(MODEL);
        let config = Config::from_dir(dir)?;
        let weights = Weights::read_dir(dir, &config)?;
        let dtype = DType::F32;
        let model = Model::load_suspendable(&runtime, &config, &weights, dtype, &mut |_, _| {})?;
        Batch::new(&model, SLOTS, 64, Mode::Graph)
    };
    Engine::new(Box::new(load), Vec::new(), Duration::MAX).unwrap()
}

#[derive(Debug)]
enum Outcome {
    Text(String),
    Failed(String),
    Busy,
    Left,
}

/// Sends a request, and returns its answer, or only so many bytes of it.
fn send(address: SocketAddr, head: &str, body: &str, bytes: u64) -> String {
    let mut stream = TcpStream::connect(address).unwrap();
    // Longer than any answer: what takes longer hangs.
    stream.set_read_timeout(Some(Duration::from_secs(100))).unwrap();
    let length = body.len();
    write!(stream, "{head} HTTP/1.1\r\nhost: test\r\ncontent-length: {length}\r\n\r\n{body}")
        .unwrap();
    let mut answer = Vec::new();
    let read = stream.take(bytes).read_to_end(&mut answer);
    assert!(read.is_ok() || bytes < u64::MAX, "{read:?}");
    String::from_utf8_lossy(&answer).into_owned()
}

fn complete(address: SocketAddr, body: &Value, bytes: Option<usize>) -> Outcome {
    let limit = bytes.map_or(u64::MAX, |bytes| bytes as u64);
    let answer = send(address, "POST /v1/completions", &body.to_string(), limit);
    if bytes.is_some() {
        return Outcome::Left;
    }
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

/// The engine's status after a request to this path, or the error.
fn ask(address: SocketAddr, head: &str) -> Value {
    let answer = send(address, head, "", u64::MAX);
    serde_json::from_str(answer.split_once("\r\n\r\n").unwrap().1).unwrap()
}

fn body(which: usize, stream: bool) -> Value {
    let prompt: Vec<usize> = (0..1 + which * 3).map(|at| (at * 37 + which * 11) % 200).collect();
    json!({"prompt": prompt, "max_tokens": 2 + which / 2, "stream": stream, "seed": which,
        "temperature": if which.is_multiple_of(2) { 0.0 } else { 1.0 }})
}

fn random(state: &mut u64) -> usize {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    (*state >> 33) as usize
}

#[test]
fn a_thousand_requests_of_clients_that_go_over_a_driver_that_fails() {
    let drivers = Arc::new(Mutex::new(Drivers::default()));
    let engine = engine(drivers.clone());
    let tokenizer =
        Tokenizer::from_slice(leasehold_llama::demo_model::TOKENIZER, "bundled").unwrap();
    let ((say, address), (stop, stopped)) = (mpsc::channel(), oneshot::channel::<()>());
    let server = thread::spawn(move || {
        let ready = move |address| say.send(address).unwrap();
        let model = Served {
            name: "grouped-heads".to_owned(),
            tokenizer,
            template: None,
            positions: 64,
            origin: "*".parse().unwrap(),
        };
        serve(engine, model, "127.0.0.1:0".parse().unwrap(), ready, stopped).unwrap();
    });
    let address = address.recv().unwrap();
    let text = |which| match complete(address, &body(which, false), None) {
        Outcome::Text(text) => text,
        other => panic!("{other:?}"),
    };
    let wanted: Vec<String> = (0..PROMPTS).map(text).collect();
    drivers.lock().set_faults(faults());

    let reasons = Mutex::new(BTreeMap::<String, usize>::new());
    let client = |seed: u64| {
        let (mut state, mut counts) = (seed, [0; 4]);
        for _ in 0..REQUESTS / CLIENTS {
            let (which, stream) =
                (random(&mut state) % PROMPTS, random(&mut state).is_multiple_of(2));
            let bytes = random(&mut state).is_multiple_of(3).then(|| random(&mut state) % 1000);
            let at = loop {
                match complete(address, &body(which, stream), bytes) {
                    Outcome::Text(text) => {
                        assert_eq!(text, wanted[which], "request {which}");
                        break 0;
                    }
                    Outcome::Failed(why) => {
                        assert!(names_a_fault(&why), "{why}");
                        *reasons.lock().entry(why).or_default() += 1;
                        break 1;
                    }
                    Outcome::Left => break 2,
                    Outcome::Busy => counts[3] += 1,
                }
                thread::sleep(Duration::from_millis(30));
            };
            counts[at] += 1;
            if random(&mut state).is_multiple_of(8) {
                let status = ask(address, "POST /sleep");
                let why = status["error"]["message"].as_str().unwrap_or("requests are running");
                assert!(names_a_fault(why) || why.contains("requests are running"), "{why}");
            }
        }
        counts
    };
    let all = thread::scope(|scope| {
        let clients: Vec<_> =
            (0..CLIENTS as u64).map(|seed| scope.spawn(move || client(seed))).collect();
        let counts = clients.into_iter().map(|client| client.join().unwrap());
        counts.fold([0; 4], |sum, one| std::array::from_fn(|at| sum[at] + one[at]))
    });
    let [texts, failed, left, busy] = all;
    println!("{texts} texts, {failed} failed, {busy} refused, {left} left");
    let enough = texts > 400 && failed > 3 && left > 200 && busy > 0;
    assert!(enough, "{all:?}, {:#?}", reasons.lock());

    // The clients that went leave nothing behind.
    let end = Instant::now() + Duration::from_secs(60);
    while ask(address, "GET /health")["running"] != 0 {
        assert!(Instant::now() < end, "{}", ask(address, "GET /health"));
        thread::sleep(Duration::from_millis(5));
    }
    // A request wakes the weights, with the same text.
    drivers.lock().set_faults(FaultPlan::none());
    assert!(ask(address, "POST /wake")["weight_bytes"].as_u64() > Some(0));
    for (which, wanted) in wanted.iter().enumerate() {
        assert_eq!(ask(address, "POST /sleep")["weight_bytes"], 0);
        assert_eq!(text(which), *wanted);
    }
    stop.send(()).unwrap();
    server.join().unwrap();
    let drivers = drivers.lock();
    assert!(drivers.all.len() > 3, "the engine made its batch anew");
    for driver in &drivers.all {
        assert_eq!(driver.take_leaks(), Vec::<String>::new());
        let reports = driver.machine().take_reports();
        assert!(reports.is_empty(), "{} reports, the first: {}", reports.len(), reports[0]);
    }
}
