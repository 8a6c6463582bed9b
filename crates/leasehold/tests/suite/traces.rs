//! Traces keep the rules of trace events, know what was done, and lose nothing of the program's.

use crate::between::World;
use crate::common::*;
use leasehold::{DeviceId, Error, KernelSession, Name, Runtime, Trace, TraceEvents, View};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

fn number(event: &Value, key: &str) -> f64 {
    event[key].as_f64().unwrap_or_else(|| panic!("{key} of {event}"))
}

fn key(event: &Value, key: &str) -> u64 {
    event[key].as_u64().unwrap_or_else(|| panic!("{key} of {event}"))
}

fn text<'e>(event: &'e Value, key: &str) -> &'e str {
    event[key].as_str().unwrap_or_else(|| panic!("{key} of {event}"))
}

/// A trace that keeps the rules of trace events: known phases, named processes and threads, times
/// in order, slices that nest, arrows in pairs.
pub struct Checked(Value);

impl Checked {
    pub fn new(json: &str) -> Self {
        let trace: Value = serde_json::from_str(json).expect("a trace is JSON");
        assert_eq!(trace["displayTimeUnit"], "ns");
        let (mut processes, mut threads) = (HashSet::new(), HashSet::new());
        let (mut last, mut timed) = (0.0, false);
        let mut open: HashMap<(u64, u64), Vec<f64>> = HashMap::new();
        let mut arrows: HashMap<u64, (u32, u32)> = HashMap::new();
        for event in trace["traceEvents"].as_array().expect("a list of events") {
            let (phase, pid) = (text(event, "ph"), key(event, "pid"));
            if phase == "M" {
                assert!(!timed, "names come first: {event}");
                assert!(!text(&event["args"], "name").is_empty());
                let tid = key(event, "tid");
                match text(event, "name") {
                    "process_name" => assert!(processes.insert(pid), "named twice: {event}"),
                    "thread_name" => assert!(threads.insert((pid, tid)), "named twice: {event}"),
                    other => panic!("{other}"),
                }
                continue;
            }
            timed = true;
            assert!(processes.contains(&pid), "{event}");
            let at = number(event, "ts");
            assert!(at >= last, "out of order: {event} after {last}");
            last = at;
            assert!(!text(event, "name").is_empty());
            if phase != "C" {
                assert!(threads.contains(&(pid, key(event, "tid"))), "no such thread: {event}");
            }
            match phase {
                "X" => {
                    assert!(!text(event, "cat").is_empty() && event["args"].is_object());
                    let (from, to) = (nanos(at), nanos(at) + nanos(number(event, "dur")));
                    let stack = open.entry((pid, key(event, "tid"))).or_default();
                    stack.retain(|&end| end > from);
                    assert!(stack.iter().all(|&end| to <= end), "a slice crosses another: {event}");
                    stack.push(to);
                }
                "s" => {
                    let arrow = arrows.entry(key(event, "id")).or_default();
                    assert_eq!(*arrow, (0, 0), "{event}");
                    arrow.0 += 1;
                }
                "f" => {
                    let arrow = arrows.entry(key(event, "id")).or_default();
                    assert_eq!((*arrow, text(event, "bp")), ((1, 0), "e"), "{event}");
                    arrow.1 += 1;
                }
                "C" => {
                    let args = event["args"].as_object().unwrap();
                    assert!(!args.is_empty() && args.values().all(Value::is_u64), "{event}");
                }
                other => panic!("phase {other}"),
            }
        }
        assert!(arrows.values().all(|&pair| pair == (1, 1)), "arrows come in pairs");
        Self(trace)
    }

    fn of(events: &TraceEvents) -> Self {
        let mut json = Vec::new();
        events.write(&mut json).unwrap();
        Self::new(std::str::from_utf8(&json).unwrap())
    }

    fn all(&self, category: &str) -> Vec<&Value> {
        let events = self.0["traceEvents"].as_array().unwrap();
        events.iter().filter(|e| e["cat"] == category).collect()
    }

    fn names(&self, category: &str) -> Vec<&str> {
        self.all(category).into_iter().map(|e| text(e, "name")).collect()
    }

    fn threads(&self, pid: u64) -> Vec<&str> {
        let events = self.0["traceEvents"].as_array().unwrap();
        let named = events.iter().filter(|e| e["name"] == "thread_name" && e["pid"] == pid);
        named.map(|e| text(&e["args"], "name")).collect()
    }

    fn counters(&self) -> Vec<&Value> {
        let events = self.0["traceEvents"].as_array().unwrap();
        events.iter().filter(|e| e["ph"] == "C").map(|e| &e["args"]).collect()
    }
}

/// Whole nanoseconds: microseconds with three digits are no whole numbers of a float.
fn nanos(us: f64) -> f64 {
    (us * 1000.0).round()
}

/// A copy, two launches, an allocation, a graph of three operations, a wait.
fn work(runtime: &Runtime) {
    let stream = runtime.create_stream().unwrap();
    stream.set_name("compute");
    let [x, y] = [(); 2].map(|()| runtime.zeros::<f32>(64).unwrap());
    x.buffer().set_name("weights");
    let axpy = axpy();
    let _scope = Name::new("layer 3").scope();
    let three = 3.0f32.to_le_bytes();
    for _ in 0..2 {
        launch(&stream, &axpy, &[x.read(), y.read_write()], &three, 16).unwrap();
    }
    stream.copy(x.view(), y.view()).unwrap();
    let graph = runtime
        .record_graph(|recording| {
            recording.stream().fill(x.view(), 0u32)?;
            launch(recording.stream(), &axpy, &[x.read(), y.read_write()], &three, 16)?;
            recording.stream().copy(x.view(), y.view())
        })
        .unwrap();
    graph.launch_on(&stream).unwrap();
    graph.launch_on(&stream).unwrap();
    stream.synchronize_timeout(LONG).unwrap();
}

#[test]
fn a_trace_has_kernels_copies_graphs_submissions_allocations_waits_and_memory() {
    let runtime = runtime();
    let trace = Trace::start(&runtime).unwrap();
    work(&runtime);
    let events = trace.stop();
    let trace = Checked::of(&events);
    assert_eq!(trace.names("kernel"), ["axpy"; 2]);
    assert_eq!(trace.names("copy"), ["copy"]);
    assert_eq!(trace.names("fill"), ["fill"; 2]);
    let graphs = trace.all("graph");
    assert_eq!(graphs.len(), 2);
    for graph in graphs {
        let nodes: Vec<_> = graph["args"]["nodes"].as_array().unwrap().iter().collect();
        assert_eq!(nodes, ["fill", "dispatch axpy", "copy"]);
    }
    assert!(trace.threads(1).contains(&"compute"), "{:?}", trace.threads(1));
    for kernel in trace.all("kernel") {
        let args = &kernel["args"];
        assert_eq!((&args["scope"], &args["grid"][0]), (&"layer 3".into(), &16.into()));
        assert_eq!(args["operands"][0], "reads weights, 256 bytes");
        assert_eq!(args["operands"][1], "reads and writes 256 bytes");
        assert!(number(kernel, "dur") > 0.0);
    }
    // Fills, launches, a copy and two graphs.
    assert_eq!(trace.all("submission").len(), 2 + 2 + 1 + 2);
    assert_eq!(trace.all("allocation").len(), 2);
    assert!(trace.all("allocation").iter().all(|e| e["args"]["bytes"] == 256));
    assert!(trace.all("allocation")[0]["args"]["grown_bytes"].as_u64().unwrap() > 0);
    assert_eq!(trace.names("wait"), ["synchronize stream"]);
    let counters = trace.counters();
    assert_eq!(counters[0]["live_bytes"], 0);
    assert!(counters.iter().any(|c| c["live_bytes"].as_u64() >= Some(512)), "{counters:?}");
    let other = &trace.0["otherData"];
    assert_eq!((&other["device"], &other["dropped_events"]), (&"cpu:0".into(), &0.into()));
    assert!(number(other, "clock_error_us") >= 0.0);
    // Each stream's gaps and busy times are those of its events.
    for stream in other["streams"].as_array().unwrap() {
        let (mut busy, mut gaps, mut operations) = (0.0, 0.0, 0);
        for category in ["kernel", "copy", "fill", "graph"] {
            for event in trace.all(category).iter().filter(|e| e["tid"] == stream["tid"]) {
                busy += nanos(number(event, "dur"));
                gaps += event["args"]["gap_before_us"].as_f64().map_or(0.0, nanos);
                operations += 1;
            }
        }
        assert_eq!(nanos(number(stream, "busy_us")), busy, "{stream}");
        assert_eq!(nanos(number(stream, "gaps_us")), gaps, "{stream}");
        assert_eq!((key(stream, "operations"), key(stream, "without_time")), (operations, 0));
    }
}

#[test]
fn traces_of_simulated_devices_have_their_times_also_of_copies_between_two() {
    let world = World::new(3);
    let other = world.runtime("cpu:0");
    for name in ["sim:0", "cuda:0"] {
        let runtime = world.runtime(name);
        let trace = Trace::start(&runtime).unwrap();
        let x = runtime.zeros::<u32>(1 << 12).unwrap();
        let y = runtime.upload(&[7u32; 1 << 10]).unwrap();
        runtime.stream().copy(x.slice(..1 << 10).view(), y.view()).unwrap();
        assert_eq!(runtime.to_vec(x.slice(..2)).unwrap(), [7, 7]);
        let z = other.alloc_array::<u32>(1 << 10).unwrap();
        runtime.stream().copy(z.view(), y.view()).unwrap();
        assert_eq!(other.to_vec(z.slice(..2)).unwrap(), [7, 7]);
        let trace = Checked::of(&trace.stop());
        assert_eq!(trace.names("fill"), ["fill"], "{name}");
        let copies = trace.names("copy");
        assert_eq!(copies[..3], ["upload", "copy", "download"], "{name}");
        assert!(copies.len() > 3, "{name}: the way to the other device");
        let streams = &trace.0["otherData"]["streams"];
        assert_eq!(streams[0]["without_time"], 0, "{name}: {streams}");
        assert!(number(&streams[0], "busy_us") > 0.0, "{name}: {streams}");
    }
    world.check();
}

#[test]
fn a_trace_that_is_on_refuses_another_one_and_goes_on() {
    let runtime = runtime();
    let trace = Trace::start(&runtime).unwrap();
    let refused = Trace::start(&runtime.clone()).unwrap_err();
    assert!(matches!(refused, Error::InvalidState(_)), "{refused}");
    assert!(refused.to_string().contains("stop or drop it"), "{refused}");
    let x = runtime.zeros::<u32>(4).unwrap();
    assert_eq!(Checked::of(&trace.stop()).names("fill"), ["fill"]);
    // The next one begins anew, and has what comes after its start alone.
    let trace = Trace::start(&runtime).unwrap();
    runtime.stream().copy(x.slice(..2).view(), x.slice(2..).view()).unwrap();
    let trace = Checked::of(&trace.stop());
    assert_eq!((trace.names("fill").len(), trace.names("copy").len()), (0, 1));
}

#[test]
fn a_dropped_trace_ends_and_leaves_nothing() {
    let context = context();
    let runtime = context.runtime(DeviceId::cpu(0)).unwrap();
    let idle = |runtime: &Runtime| {
        let pools = runtime.pools().into_iter();
        pools.map(|(name, pool)| (name, pool.live)).collect::<Vec<_>>()
    };
    let x = runtime.zeros::<u32>(4).unwrap();
    runtime.synchronize_timeout(LONG).unwrap();
    let before = idle(&runtime);
    for _ in 0..3 {
        let trace = Trace::start(&runtime).unwrap();
        runtime.stream().fill(x.view(), 3u32).unwrap();
        runtime.synchronize_timeout(LONG).unwrap();
        drop(trace);
    }
    assert_eq!(idle(&runtime), before);
    drop((x, runtime));
    context.shutdown().unwrap();
}

#[test]
fn a_session_that_is_open_here_refuses_the_start_and_stays_whole() {
    let runtime = runtime();
    let (x, y) = (runtime.zeros::<f32>(4).unwrap(), runtime.zeros::<f32>(4).unwrap());
    let axpy = axpy();
    let session = KernelSession::begin(&axpy, runtime.stream()).unwrap();
    assert!(matches!(Trace::start(&runtime), Err(Error::Occupied { .. })));
    drop(session);
    let trace = Trace::start(&runtime).unwrap();
    let operands = [x.read(), y.read_write()];
    launch(runtime.stream(), &axpy, &operands, &1.0f32.to_le_bytes(), 1).unwrap();
    assert_eq!(Checked::of(&trace.stop()).names("kernel"), ["axpy"]);
    runtime
        .record_graph(|recording| {
            assert!(matches!(Trace::start(recording), Err(Error::Recording { .. })));
            Ok(())
        })
        .unwrap();
}

#[test]
fn work_that_fails_is_in_the_trace_without_times() {
    let runtime = runtime();
    let stream = runtime.create_stream().unwrap();
    let trace = Trace::start(&runtime).unwrap();
    let x = runtime.zeros::<f32>(4).unwrap();
    launch(&stream, &trap(), &[x.read_write()], &[], 1).unwrap();
    assert!(stream.synchronize_timeout(LONG).is_err());
    assert!(stream.fill(x.view(), 1u32).is_err());
    let trace = Checked::of(&trace.stop());
    let errors: Vec<_> =
        trace.all("submission").into_iter().filter(|e| e["args"]["error"].is_string()).collect();
    let waits = trace.all("wait");
    assert!(waits[0]["args"]["error"].as_str().unwrap().contains("traps"), "{waits:?}");
    assert!(errors.len() <= 1, "{errors:?}");
}

#[test]
fn work_that_is_held_back_does_not_hold_a_stop_for_ever() {
    let runtime = runtime();
    let trace = Trace::start(&runtime).unwrap();
    let x = runtime.zeros::<u32>(4).unwrap();
    let (gate, point) = hold(runtime.stream());
    runtime.stream().fill(x.view(), 1u32).unwrap();
    let events = std::thread::scope(|s| {
        let stopped = s.spawn(|| trace.stop_within(Duration::from_millis(100)));
        let events = stopped.join().unwrap();
        gate.signal(point.value()).unwrap();
        events
    });
    let trace = Checked::of(&events);
    assert_eq!(trace.names("fill").len(), 1, "the other fill never ended");
    assert_eq!(trace.0["otherData"]["streams"][0]["without_time"], 1);
    assert_eq!(trace.names("order"), ["stream waits"]);
    assert_eq!(runtime.to_vec(&x).unwrap(), [1; 4]);
}

#[test]
fn events_beyond_the_most_are_counted() {
    let runtime = runtime();
    let trace = Trace::start(&runtime).unwrap();
    let x = runtime.zeros::<u32>(4).unwrap();
    // Two events each: a submission and its operation.
    let fills = Trace::MOST_EVENTS / 2 + 100;
    for _ in 0..fills {
        runtime.stream().fill(x.view(), 1u32).unwrap();
    }
    let events = trace.stop();
    let text = format!("{events:?}");
    let numbers = text.split(|c: char| !c.is_ascii_digit()).filter_map(|n| n.parse::<usize>().ok());
    let [kept, dropped] = numbers.collect::<Vec<_>>().try_into().unwrap();
    assert!(dropped >= 100, "{text}");
    assert!(kept <= Trace::MOST_EVENTS && kept > Trace::MOST_EVENTS - 10, "{text}");
    assert_eq!(runtime.to_vec(&x).unwrap(), [1; 4]);
}

#[test]
fn a_file_that_cannot_be_written_loses_no_events() {
    let runtime = runtime();
    let trace = Trace::start(&runtime).unwrap();
    let _x = runtime.zeros::<u32>(4).unwrap();
    let events = trace.stop();
    let error = events.save("/nowhere/trace.json").unwrap_err();
    assert!(error.to_string().contains("/nowhere/trace.json"), "{error}");
    assert!(error.to_string().contains("at another path"), "{error}");
    let full = events.write(Full).unwrap_err();
    assert!(full.to_string().contains("no room"), "{full}");
    let place = std::env::temp_dir().join(format!("leasehold-trace-{}.json", std::process::id()));
    events.save(&place).unwrap();
    let saved = std::fs::read_to_string(&place).unwrap();
    std::fs::remove_file(place).unwrap();
    assert_eq!(Checked::new(&saved).names("fill"), ["fill"]);
}

struct Full;

impl std::io::Write for Full {
    fn write(&mut self, _: &[u8]) -> std::io::Result<usize> {
        Err(std::io::Error::other("no room"))
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Threads that submit while traces start and stop: each trace keeps the rules, and the work is
/// done.
#[test]
fn traces_start_and_stop_beside_threads_that_submit() {
    let runtime = runtime();
    let rounds = 300;
    std::thread::scope(|s| {
        for worker in 0..2u32 {
            let runtime = runtime.clone();
            s.spawn(move || {
                let stream = runtime.create_stream().unwrap();
                let x = runtime.zeros::<u32>(64).unwrap();
                for round in 0..rounds {
                    stream.fill(x.view(), worker * rounds + round).unwrap();
                }
                stream.synchronize_timeout(LONG).unwrap();
                let last = worker * rounds + rounds - 1;
                assert!(runtime.to_vec(&x).unwrap().iter().all(|&value| value == last));
            });
        }
        for _ in 0..20 {
            let trace = Trace::start(&runtime).unwrap();
            let x = runtime.zeros::<u32>(4).unwrap();
            runtime.stream().fill(x.view(), 1u32).unwrap();
            assert!(Checked::of(&trace.stop()).names("fill").len() >= 2);
        }
    });
}

/// The examples as they are, in a process of their own that the environment has traced.
#[test]
fn traces_of_the_examples_keep_the_rules() {
    for (example, kernels) in [("quickstart", &["axpy"][..]), ("foreign_framework", &["add"])] {
        let folder = std::env::temp_dir();
        let file = folder.join(format!("leasehold-{example}-{}.json", std::process::id()));
        let run = |file: &Path| {
            let program = example_program(example);
            Command::new(program).env("LEASEHOLD_TRACE", file).output().unwrap()
        };
        let output = run(&file);
        assert!(output.status.success(), "{example}: {output:?}");
        let json = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(&file).unwrap();
        let trace = Checked::new(&json);
        let names: HashSet<_> = trace.names("kernel").into_iter().collect();
        assert!(kernels.iter().all(|kernel| names.contains(kernel)), "{example}: {names:?}");
        assert!(!trace.all("graph").is_empty() && !trace.all("submission").is_empty());
        assert!(!trace.all("allocation").is_empty() && !trace.counters().is_empty(), "{example}");
        // The program says so if the file cannot be written.
        let output = run(&folder.join("no/such/folder/trace.json"));
        let error = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!output.status.success() && error.contains("no/such/folder"), "{example}: {error}");
    }
}

/// The program of an example, which `cargo test` builds beside the tests unless it is told which
/// tests.
fn example_program(name: &str) -> PathBuf {
    let tests = std::env::current_exe().unwrap();
    let folder = tests.parent().and_then(Path::parent).unwrap();
    let target = folder.parent().unwrap();
    let program = folder.join("examples").join(name);
    if !program.exists() {
        // Into the same folder, without the flags of a sanitizer's build.
        let mut cargo = Command::new(env!("CARGO"));
        cargo.env_remove("RUSTFLAGS").args([
            "build",
            "--quiet",
            "-p",
            "leasehold",
            "--example",
            name,
        ]);
        let built = cargo.arg("--target-dir").arg(target);
        assert!(built.status().unwrap().success() && program.exists(), "{}", program.display());
    }
    program
}
