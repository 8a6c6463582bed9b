//! Prints a program as a Rust test that uses the public API.

use crate::generate::Plan;
use crate::kernels::Kernel;
use crate::model::Planned;
use crate::prelude::digest;
use crate::step::{
    FAR_STREAM, Hand, Node, Op, PINNED, Read, Slot, Span, Step, TEMPS, Work, count_down, is_far,
    is_far_stream, rounds_left,
};
use crate::target::Target;
use std::collections::BTreeMap;
use std::fmt::{self, Write};

/// The text of a test that does what the plan says, and fails as it does.
pub(crate) fn print(target: &Target, seed: u64, faults: bool, plan: &Plan, why: &str) -> String {
    let mut text = String::new();
    // Writing to a string does not fail.
    let _ = write(&mut text, target, seed, faults, plan, why);
    text
}

fn write(
    to: &mut String,
    target: &Target,
    seed: u64,
    faults: bool,
    plan: &Plan,
    why: &str,
) -> fmt::Result {
    let Target { device, simulated } = target;
    let mut threads: BTreeMap<u8, Vec<&Planned>> = BTreeMap::new();
    plan.steps.iter().for_each(|p| threads.entry(p.thread).or_default().push(p));
    let rank = |t: u8| threads.keys().position(|k| *k == t).unwrap_or(0);
    writeln!(to, "//! Seed {seed} on {device}: {}", why.replace('\n', " "))?;
    writeln!(to, "\nuse leasehold_stress::prelude::*;\n")?;
    writeln!(to, "#[test]\nfn seed_{seed}() -> Result<()> {{")?;
    writeln!(to, "    let target = Target::new(\"{device}\".parse()?, {simulated})?;")?;
    writeln!(to, "    let bench = target.open({seed}, {faults})?;")?;
    writeln!(
        to,
        "    let (runtime, kernels) = (bench.runtime().clone(), bench.kernels().clone());"
    )?;
    let shape = plan.shape;
    for (name, n, of) in [
        ("s", shape.stream_places(), "Stream"),
        ("b", PINNED + shape.pinned, "Lease<Buffer>"),
        ("e", shape.events, "Lease<Event>"),
        ("g", shape.host_timelines, "(HostTimeline, u64)"),
        ("graphs", shape.graphs, "(Graph, Vec<(NodeId, u32)>)"),
    ] {
        let n = last(plan, name).map_or(0, |l| usize::from(l) + 1).min(usize::from(n));
        if n > 0 {
            writeln!(to, "    let {name} = Place::<{of}>::several({n});")?;
        }
    }
    if last(plan, "s").is_some() {
        writeln!(to, "    s[0].put(runtime.stream().clone());")?;
    }
    let far = plan.steps.iter().any(|p| {
        let mut text = String::new();
        step(&mut text, "", p).is_ok() && text.contains("far")
    }) || last(plan, "s") >= Some(FAR_STREAM)
        || plan.remains.iter().any(|r| is_far(r.0));
    if far {
        writeln!(to, "    let (far, far_kernels) = (Place::new(), bench.far_kernels().clone());")?;
        writeln!(to, "    far.put(bench.far().expect(\"another device\")?);")?;
        if last(plan, "s") >= Some(FAR_STREAM) {
            writeln!(to, "    s[{FAR_STREAM}].put(far.the().stream().clone());")?;
        }
    }
    let calls = plan.steps.iter().any(|p| match &p.step {
        Step::Call { .. } => true,
        Step::Graph { nodes, .. } => nodes.contains(&Node::Call),
        _ => false,
    });
    if calls {
        writeln!(to, "    let calls = Arc::new(AtomicU64::new(0));")?;
    }
    let completions = plan.steps.iter().any(|p| matches!(p.step, Step::Complete(_)));
    if completions {
        writeln!(to, "    let completions = Completions::default();")?;
    }
    if threads.len() == 1 {
        for steps in threads.values() {
            own(to, "    ", steps)?;
            steps.iter().try_for_each(|p| step(to, "    ", p))?;
        }
    } else if !threads.is_empty() {
        writeln!(to, "    let order = Order::new({});", threads.len())?;
        writeln!(to, "    std::thread::scope(|scope| {{")?;
        for (t, steps) in &threads {
            writeln!(to, "        scope.spawn(|| {{")?;
            writeln!(to, "            let run = || -> Result<()> {{")?;
            own(to, "                ", steps)?;
            for p in steps {
                for (on, count) in &p.after {
                    writeln!(to, "                order.after({}, {count});", rank(*on))?;
                }
                step(to, "                ", p)?;
                writeln!(to, "                order.done({});", rank(*t))?;
            }
            writeln!(to, "                Ok(())\n            }};")?;
            writeln!(to, "            run().expect(\"thread {}\");\n        }});", rank(*t))?;
        }
        writeln!(to, "    }});")?;
    }
    finish(to, plan, calls, completions, far)
}

/// The highest slot of a kind that is used.
fn last(plan: &Plan, kind: &str) -> Option<Slot> {
    let mut most = None;
    let mut see = |k: &str, slot: Slot| {
        if k == kind && slot < TEMPS {
            most = most.max(Some(slot));
        }
    };
    for p in &plan.steps {
        let mut text = String::new();
        let _ = step(&mut text, "", p);
        for place in ["s", "b", "e", "g", "graphs"] {
            for (at, _) in text.match_indices(&format!("{place}[")) {
                let own =
                    text[..at].chars().next_back().is_none_or(|c| !c.is_alphanumeric() && c != '_');
                let number: String =
                    text[at + place.len() + 1..].chars().take_while(char::is_ascii_digit).collect();
                if own && let Ok(slot) = number.parse() {
                    see(place, slot);
                }
            }
        }
    }
    if kind == "s" && (most.is_none() && !plan.remains.is_empty()) { Some(0) } else { most }
}

/// The variables that a thread keeps for itself.
fn own(to: &mut String, pad: &str, steps: &[&Planned]) -> fmt::Result {
    if steps.iter().any(|p| matches!(p.step, Step::Clone(_) | Step::Unclone)) {
        writeln!(to, "{pad}let mut clones = Vec::new();")?;
    }
    if steps.iter().any(|p| matches!(p.step, Step::Enter(_) | Step::Leave)) {
        writeln!(to, "{pad}let mut entered = Vec::new();")?;
    }
    if steps.iter().any(|p| matches!(p.step, Step::Check(Read::Again, _))) {
        writeln!(to, "{pad}let mut again = Vec::<u8>::new();")?;
    }
    Ok(())
}

fn finish(to: &mut String, plan: &Plan, calls: bool, completions: bool, far: bool) -> fmt::Result {
    if last(plan, "g").is_some() {
        writeln!(to, "    for (host_timeline, next) in g.iter().filter_map(Place::take) {{")?;
        writeln!(to, "        let _ = host_timeline.signal(next);\n    }}")?;
    }
    writeln!(to, "    runtime.synchronize()?;")?;
    if plan.remains.iter().any(|r| is_far(r.0)) {
        writeln!(to, "    if far.get().is_none() {{")?;
        writeln!(to, "        far.put(bench.far().expect(\"another device\")?);\n    }}")?;
    }
    for (slot, _, bytes) in &plan.remains {
        let runtime = runtime(is_far(*slot));
        writeln!(
            to,
            "    assert_eq!(digest(&{runtime}.to_vec::<u8>(&b[{slot}].the())?), {:#x});",
            digest(bytes)
        )?;
    }
    if calls {
        writeln!(to, "    assert_eq!(calls.load(Ordering::SeqCst), {});", plan.calls)?;
    }
    if completions {
        writeln!(to, "    assert_eq!(completions.check(true), Ok(()));")?;
    }
    let places: Vec<&str> =
        ["s", "b", "e", "graphs"].into_iter().filter(|k| last(plan, k).is_some()).collect();
    let far = if far { "far, far_kernels, " } else { "" };
    let places = places.iter().map(|p| format!("{p}, ")).collect::<String>();
    writeln!(to, "    drop(({places}{far}runtime, kernels));")?;
    writeln!(to, "    assert_eq!(bench.close(), Ok(()));\n    Ok(())\n}}")
}

fn runtime(far: bool) -> &'static str {
    if far { "far.the()" } else { "runtime" }
}

fn part(span: &Span) -> String {
    let place = if span.slot >= TEMPS {
        format!("t{}", span.slot - TEMPS)
    } else {
        format!("b[{}].the()", span.slot)
    };
    format!("{place}.part({}..{})?", span.at, span.at + span.len)
}

/// One statement or more for a step.
fn step(to: &mut String, pad: &str, planned: &Planned) -> fmt::Result {
    let the = |s: &Slot| format!("s[{s}].the()");
    let line = match &planned.step {
        Step::Stream(s, priority) => {
            let runtime = runtime(is_far_stream(*s));
            format!("s[{s}].put({runtime}.create_stream_with(&StreamDesc::priority({priority}))?);")
        }
        Step::DropStream(s) => format!("drop(s[{s}].take());"),
        Step::Alloc { slot, len, stream } => {
            format!("b[{slot}].put(s[{stream}].the().runtime().alloc({len})?);")
        }
        Step::New { slot, len, seed } => {
            format!(
                "b[{slot}].put({}.upload(&bytes({seed}, {len}))?.into_buffer());",
                runtime(is_far(*slot))
            )
        }
        Step::Pin { slot, len } => format!("b[{slot}].put(runtime.alloc_pinned({len})?);"),
        Step::Drop(slot) => format!("drop(b[{slot}].take());"),
        Step::Clone(slot) => format!("clones.push(b[{slot}].the());"),
        Step::Unclone => "drop(clones.remove(0));".into(),
        Step::Run(stream, w) => work(&the(stream), w),
        Step::Session(stream, works) => {
            let calls: String = works.iter().map(|w| call(w) + ", ").collect();
            format!("launch(&{}, &[{}])?;", the(stream), calls.trim_end_matches(", "))
        }
        Step::Try(stream, w) => format!("try_launch(&{}, {})?;", the(stream), call(w)),
        Step::Check(read, span) => {
            let hash = digest(planned.expect.as_deref().unwrap_or_default());
            let runtime = runtime(is_far(span.slot));
            match read {
                Read::New => format!(
                    "assert_eq!(digest(&{runtime}.to_vec::<u8>({})?), {hash:#x});",
                    part(span)
                ),
                Read::Again => format!(
                    "{runtime}.stream().download_into(&mut again, {}.view())?;\n{pad}assert_eq!(digest(&again), {hash:#x});",
                    part(span)
                ),
                Read::Look(s) => {
                    format!("assert_eq!(digest(&look(&{}, {})?), {hash:#x});", the(s), part(span))
                }
                Read::On(s) => {
                    format!("assert_eq!(digest(&read(&{}, {})?), {hash:#x});", the(s), part(span))
                }
            }
        }
        Step::Sync(s) => format!("s[{s}].the().synchronize()?;"),
        Step::Query(s) => format!("s[{s}].the().query()?;"),
        Step::Flush(s) => format!("s[{s}].the().flush()?;"),
        Step::SyncDevice => "runtime.synchronize()?;".into(),
        Step::Event { slot, timing } => {
            let flags = if *timing { "TIMING" } else { "DISABLE_TIMING" };
            format!("e[{slot}].put(runtime.create_event_with(EventFlags::{flags})?);")
        }
        Step::DropEvent(slot) => format!("drop(e[{slot}].take());"),
        Step::Record { event, stream } => format!("{}.record(&e[{event}].the())?;", the(stream)),
        Step::WaitEvent { stream, event } => {
            format!("{}.wait_event(&e[{event}].the())?;", the(stream))
        }
        Step::WaitStream { stream, on } => format!("{}.wait(s[{on}].the().now())?;", the(stream)),
        Step::QueryEvent(event) => format!("e[{event}].the().query()?;"),
        Step::SyncEvent(event) => {
            format!("e[{event}].the().synchronize()?;\n{pad}assert!(e[{event}].the().query()?);")
        }
        Step::Elapsed(a, b) => format!("e[{b}].the().elapsed_since(&e[{a}].the())?;"),
        Step::HostTimeline(slot) => {
            format!(
                "let host_timeline = runtime.create_host_timeline()?;\n{pad}let value = host_timeline.value();\n{pad}g[{slot}].put((host_timeline, value));"
            )
        }
        Step::DropHostTimeline(slot) => format!("drop(g[{slot}].take());"),
        Step::Hold { stream, host_timeline } => format!(
            "let (host_timeline, value) = g[{host_timeline}].the();\n{pad}{}.wait(host_timeline.at(value + 1))?;\n{pad}g[{host_timeline}].put((host_timeline, value + 1));",
            the(stream)
        ),
        Step::Signal(host_timeline) => format!(
            "let (host_timeline, value) = g[{host_timeline}].the();\n{pad}host_timeline.signal(value)?;"
        ),
        Step::CallSignal { stream, host_timeline } => format!(
            "let (host_timeline, value) = g[{host_timeline}].take().expect(\"a host timeline that is waited for\");\n{pad}\
             {}.host_call_once(\"signal\", move || host_timeline.signal(value))?;",
            the(stream)
        ),
        Step::Call { stream, once } => {
            let function = if *once { "host_call_once" } else { "host_call" };
            format!(
                "{}\n{pad}{}.{function}(\"count\", count)?;",
                COUNT.replace('\n', &format!("\n{pad}")),
                the(stream)
            )
        }
        Step::Complete(stream) => format!("completions.ask(&{})?;", the(stream)),
        Step::Graph { slot, temps, nodes } => return graph(to, pad, *slot, temps, nodes),
        Step::DropGraph(slot) => format!("drop(graphs[{slot}].take());"),
        Step::Launch { graph, stream } => {
            format!("graphs[{graph}].the().0.launch_on(&{})?;", the(stream))
        }
        Step::Params { graph, node, words: [first, second] } => format!(
            "let (graph, nodes) = graphs[{graph}].the();\n{pad}let (node, n) = nodes[{node}];\n{pad}let _ = graph.update(&GraphUpdate::new().params(node, &[n, {first}, {second}]))?;"
        ),
        Step::Grid { graph, node, blocks } => format!(
            "let (graph, nodes) = graphs[{graph}].the();\n{pad}let _ = graph.update(&GraphUpdate::new().grid(nodes[{node}].0, [{blocks}, 1, 1]))?;"
        ),
        Step::Swap { graph, old, new } => {
            format!(
                "let _ = graphs[{graph}].the().0.update(&GraphUpdate::new().buffer(&b[{old}].the(), &b[{new}].the()))?;"
            )
        }
        Step::Enter(s) => format!("entered.push({}.enter()?);", the(s)),
        Step::Leave => "drop(entered.pop());".into(),
        Step::Open => format!(
            "far.put(open(runtime.context(), bench.far().expect(\"another device\")?.device())?);\n{pad}s[{FAR_STREAM}].put(far.the().stream().clone());"
        ),
        Step::Close => format!(
            "let far_runtime = far.take().expect(\"an open runtime\");\n{pad}drop(s[{FAR_STREAM}..].iter().filter_map(Place::take).collect::<Vec<_>>());\n{pad}far_runtime.close(Duration::from_secs(20))?;"
        ),
        Step::Closed(slot) => format!("refuses(&s[0].the(), &b[{slot}].the())?;"),
        Step::Trim => "runtime.allocator().trim(0)?;".into(),
        Step::TakeIdle => "GraphBudget::of(&runtime).take_idle();".into(),
        Step::Wrong(wrong, slot) => {
            format!(
                "assert_eq!(scenes::refused(&runtime, &s[0].the(), &b[{slot}].the(), Wrong::{wrong:?}), Ok(()));"
            )
        }
        Step::Scene(scene) => {
            format!("assert_eq!(scenes::play(&runtime, &kernels, Scene::{scene:?}), Ok(()));")
        }
    };
    writeln!(to, "{pad}{line}")
}

const COUNT: &str = "let count = { let calls = calls.clone(); move || { calls.fetch_add(1, Ordering::SeqCst); Ok(()) } };";

fn graph(to: &mut String, pad: &str, slot: Slot, temps: &[u32], nodes: &[Node]) -> fmt::Result {
    let (mutable, runtime) = (
        if nodes.is_empty() { "" } else { "mut " },
        if nodes.is_empty() && temps.is_empty() { "_" } else { "runtime" },
    );
    writeln!(to, "{pad}let {mutable}nodes = Vec::new();")?;
    writeln!(to, "{pad}let graph = runtime.record_graph(|{runtime}| {{")?;
    for (t, len) in temps.iter().enumerate() {
        let used = nodes
            .iter()
            .flat_map(Node::works)
            .flat_map(|w| w.from.iter().chain([&w.to]))
            .any(|s| usize::from(s.slot) == usize::from(TEMPS) + t);
        writeln!(to, "{pad}    let {}t{t} = runtime.alloc({len})?;", if used { "" } else { "_" })?;
    }
    for (at, node) in nodes.iter().enumerate() {
        let elements = if let Node::Work(w) = node { w.to.len / 4 } else { 0 };
        writeln!(to, "{pad}    nodes.push((name(runtime)?, {elements}u32));")?;
        let stream = "runtime.stream()";
        let line = match node {
            Node::Work(w) => work(stream, w),
            Node::Call => format!("{COUNT}\n{pad}    {stream}.host_call(\"count\", count)?;"),
            Node::Record(e) => format!("{stream}.record(&e[{e}].the())?;"),
            Node::Loop { rounds, branch, works } => {
                let left = rounds_left(temps.len(), at);
                let t = left - TEMPS;
                writeln!(to, "{pad}    let t{t} = runtime.alloc(4)?;")?;
                if !branch {
                    writeln!(to, "{pad}    let t{} = runtime.alloc(4)?;", t + 1)?;
                }
                writeln!(to, "{pad}    {stream}.fill(t{t}.view(), {rounds}u32)?;")?;
                let call = if *branch { "record_if" } else { "record_while" };
                writeln!(to, "{pad}    {stream}.{call}(&t{t}, |runtime| {{")?;
                let end = if *branch { Vec::new() } else { count_down(left).into() };
                for w in works.iter().chain(&end) {
                    writeln!(to, "{pad}        {}", work(stream, w))?;
                }
                format!("    Ok(())\n{pad}    }})?;")
            }
        };
        writeln!(to, "{pad}    {line}")?;
    }
    writeln!(to, "{pad}    Ok(())\n{pad}}})?;")?;
    writeln!(to, "{pad}graphs[{slot}].put((graph, nodes));")
}

fn work(stream: &str, work: &Work) -> String {
    let to = part(&work.to);
    match work.op {
        Op::Fill { pattern, width } => {
            format!("{stream}.fill({to}, {pattern:#x}u{})?;", u32::from(width) * 8)
        }
        Op::Upload { seed, hand } => {
            let bytes = format!("bytes({seed}, {})", work.to.len);
            match hand {
                Hand::Asynchronous => format!("{stream}.upload({to}, &{bytes})?;"),
                Hand::Synchronous => format!("{stream}.upload_blocking({to}, &{bytes})?;"),
                Hand::Owned => format!("{stream}.upload_owned({to}, {bytes})?;"),
            }
        }
        Op::Copy => format!("{stream}.copy({to}, {})?;", part(&work.from[0])),
        Op::Copy2d { width, rows, from_pitch, to_pitch } => format!(
            "{stream}.copy_2d({to}, {}, ops::Rows::new({width}, {rows}).src_pitch({from_pitch}).dst_pitch({to_pitch}))?;",
            part(&work.from[0])
        ),
        Op::Copies => {
            let piece = |(to, from): (Span, &Span)| format!("({}, {})", part(&to), part(from));
            let mut pieces: Vec<_> = work.places().zip(&work.from).map(piece).collect();
            pieces.reverse();
            format!("{stream}.copy_batch(&[{}])?;", pieces.join(", "))
        }
        Op::Pinned => format!("{stream}.copy_pinned({to}, {})?;", part(&work.from[0])),
        Op::Launch { .. } => {
            let borrow = if stream.starts_with("s[") { "&" } else { "" };
            format!("launch({borrow}{stream}, &[{}])?;", call(work))
        }
    }
}

fn call(work: &Work) -> String {
    let Op::Launch { kernel, words: [first, second] } = work.op else { return String::new() };
    let mut operands: Vec<String> = work.from.iter().map(|s| part(s) + ".read()").collect();
    operands
        .push(part(&work.to) + if kernel == Kernel::Mask { ".read_write()" } else { ".write()" });
    format!(
        "Call {{ kernel: &{}kernels[Kernel::{kernel:?} as usize], operands: &[{}], params: [{}, {first}, {second}] }}",
        if is_far(work.to.slot) { "far_" } else { "" },
        operands.join(", "),
        work.to.len / 4
    )
}
