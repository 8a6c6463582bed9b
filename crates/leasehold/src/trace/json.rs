//! A trace as JSON: Chrome's trace events, as ui.perfetto.dev reads them.
//!
//! The events are in the order of their times. Process 1 is the device, with a thread for each
//! stream; process 2 is the host. An arrow (a pair `s` and `f` of one number) leads from each
//! submission to its first operation.
//!
//! This module must not know who made the notes.

use crate::trace::recorder::{Call, Sample, What};
use crate::trace::track::{NotedOperand, Operation, Submission, Time};
use leasehold_core::Name;
use leasehold_hal::Access;
use std::fmt::{self, Display, Write as _};
use std::io::{self, Write};

const DEVICE: u32 = 1;
const HOST: u32 = 2;
/// The events of the metadata that name a process and its threads.
const PROCESSES: [(u32, &str); 2] = [(DEVICE, "streams"), (HOST, "host")];

/// A stream, with what it did.
pub(crate) struct Lane {
    pub(crate) name: String,
    pub(crate) submissions: Vec<Submission>,
    pub(crate) operations: Vec<Operation>,
}

/// All that is written.
pub(crate) struct Page {
    pub(crate) device: String,
    pub(crate) product: String,
    pub(crate) lanes: Vec<Lane>,
    pub(crate) threads: Vec<String>,
    pub(crate) calls: Vec<Call>,
    pub(crate) samples: Vec<Sample>,
    pub(crate) dropped: u64,
    /// The largest error of the device's times on the host's clock, in nanoseconds; `None` if the
    /// device has no times.
    pub(crate) clock_error: Option<u64>,
}

/// An event that has a time.
#[derive(Clone, Copy)]
enum Event<'p> {
    Operation { lane: usize, index: usize, gap: Option<u64> },
    Submission { lane: usize, index: usize },
    ArrowBegin { number: u64, thread: u32 },
    ArrowEnd { number: u64, lane: usize },
    Call(&'p Call),
    Sample(&'p Sample),
}

/// The sums of a lane, in nanoseconds.
#[derive(Default)]
struct Sums {
    operations: u64,
    untimed: u64,
    busy: u64,
    gaps: u64,
}

impl Page {
    /// The number of submissions, operations, calls of the host and samples.
    pub(crate) fn events(&self) -> usize {
        let of_lane = |lane: &Lane| lane.submissions.len() + lane.operations.len();
        self.lanes.iter().map(of_lane).sum::<usize>() + self.calls.len() + self.samples.len()
    }

    /// Writes everything as one JSON object.
    pub(crate) fn write(&self, to: &mut dyn Write) -> io::Result<()> {
        let (events, sums) = self.sorted();
        write!(
            to,
            "{{\"displayTimeUnit\":\"ns\",\"otherData\":{{\"device\":{},\"product\":{},\"dropped_events\":{}",
            Text(&self.device),
            Text(&self.product),
            self.dropped
        )?;
        match self.clock_error {
            Some(error) => write!(to, ",\"clock_error_us\":{}", Micros(error))?,
            None => write!(to, ",\"clock_error_us\":null")?,
        }
        to.write_all(b",\"streams\":[")?;
        for (i, (lane, sums)) in std::iter::zip(&self.lanes, &sums).enumerate() {
            let comma = if i == 0 { "" } else { "," };
            let Sums { operations, untimed, busy, gaps } = sums;
            write!(
                to,
                "{comma}{{\"tid\":{},\"name\":{},\"operations\":{operations},\"without_time\":{untimed},\"busy_us\":{},\"gaps_us\":{}}}",
                i + 1,
                Text(&lane.name),
                Micros(*busy),
                Micros(*gaps)
            )?;
        }
        to.write_all(b"]},\"traceEvents\":[\n")?;
        for (i, line) in self.names().into_iter().enumerate() {
            write!(to, "{}{line}", if i == 0 { "" } else { ",\n" })?;
        }
        for (at, event) in events {
            to.write_all(b",\n")?;
            self.event(to, at, event)?;
        }
        to.write_all(b"\n]}\n")
    }

    /// The events in the order of their times, and each lane's sums.
    fn sorted(&self) -> (Vec<(u64, Event<'_>)>, Vec<Sums>) {
        let (mut events, mut all) = (Vec::new(), Vec::new());
        let mut number = 0;
        for (lane, Lane { submissions, operations, .. }) in self.lanes.iter().enumerate() {
            let mut sums = Sums::default();
            events.extend(
                submissions.iter().enumerate().map(|(index, submission)| {
                    (submission.begun, Event::Submission { lane, index })
                }),
            );
            let (mut end, mut arrow) = (None, None);
            for (index, operation) in operations.iter().enumerate() {
                sums.operations += 1;
                let Time::Known(begun, ended) = operation.time else {
                    sums.untimed += 1;
                    continue;
                };
                let gap = end.map(|end: u64| begun.saturating_sub(end));
                sums.busy += ended - begun;
                sums.gaps += gap.unwrap_or(0);
                end = end.max(Some(ended));
                events.push((begun, Event::Operation { lane, index, gap }));
                let submission = &submissions[operation.submission];
                // The clocks agree to a microsecond or some; an arrow never leads back.
                if arrow.replace(operation.submission) != Some(operation.submission)
                    && submission.begun <= begun
                {
                    number += 1;
                    let thread = submission.thread;
                    events.push((submission.begun, Event::ArrowBegin { number, thread }));
                    events.push((begun, Event::ArrowEnd { number, lane }));
                }
            }
            all.push(sums);
        }
        events.extend(self.calls.iter().map(|call| (call.begun, Event::Call(call))));
        events.extend(self.samples.iter().map(|sample| (sample.at, Event::Sample(sample))));
        // The sort is stable: an arrow stays behind the slice that it begins or ends at.
        events.sort_by_key(|(at, _)| *at);
        (events, all)
    }

    /// The metadata: names of processes and threads.
    fn names(&self) -> Vec<String> {
        let label = |pid: u32, tid: usize, what: &str, name: &str| {
            format!(
                "{{\"ph\":\"M\",\"pid\":{pid},\"tid\":{tid},\"name\":\"{what}\",\"args\":{{\"name\":{}}}}}",
                Text(name)
            )
        };
        let device = format!("{} ({})", self.device, self.product);
        let mut lines = Vec::new();
        for (pid, name) in PROCESSES {
            let name = if pid == DEVICE { &device } else { name };
            lines.push(label(pid, 0, "process_name", name));
        }
        let lanes = self.lanes.iter().map(|lane| &lane.name).enumerate();
        lines.extend(lanes.map(|(i, name)| label(DEVICE, i + 1, "thread_name", name)));
        let threads = self.threads.iter().enumerate();
        lines.extend(threads.map(|(i, name)| label(HOST, i + 1, "thread_name", name)));
        lines
    }

    fn event(&self, to: &mut dyn Write, at: u64, event: Event<'_>) -> io::Result<()> {
        let ts = Micros(at);
        match event {
            Event::Operation { lane, index, gap } => self.operation(to, ts, lane, index, gap),
            Event::Submission { lane, index } => self.submission(to, ts, lane, index),
            Event::ArrowBegin { number, thread } => {
                write!(
                    to,
                    "{{\"ph\":\"s\",\"pid\":{HOST},\"tid\":{thread},\"name\":\"submits\",\"cat\":\"arrow\",\"id\":{number},\"ts\":{ts}}}"
                )
            }
            Event::ArrowEnd { number, lane } => {
                write!(
                    to,
                    "{{\"ph\":\"f\",\"bp\":\"e\",\"pid\":{DEVICE},\"tid\":{},\"name\":\"submits\",\"cat\":\"arrow\",\"id\":{number},\"ts\":{ts}}}",
                    lane + 1
                )
            }
            Event::Call(call) => {
                let mut args = Args::default();
                let (name, category) = match &call.what {
                    What::Allocation { bytes, grown, host_waits, inserted_waits } => {
                        args.put("bytes", bytes);
                        for (name, number) in [
                            ("grown_bytes", grown),
                            ("host_waits", host_waits),
                            ("inserted_waits", inserted_waits),
                        ] {
                            if *number > 0 {
                                args.put(name, number);
                            }
                        }
                        ("allocate", "allocation")
                    }
                    What::Wait(name) => (*name, "wait"),
                    What::Order(point) => {
                        args.put("for", Text(&format!("{point:?}")));
                        ("stream waits", "order")
                    }
                };
                args.scope(call.scope.as_ref());
                args.error(call.error.as_ref());
                write!(
                    to,
                    "{{\"ph\":\"X\",\"pid\":{HOST},\"tid\":{},\"name\":\"{name}\",\"cat\":\"{category}\",\"ts\":{ts},\"dur\":{},\"args\":{args}}}",
                    call.thread,
                    Micros(call.ended - call.begun)
                )
            }
            Event::Sample(Sample { live, reserved, .. }) => {
                // Bytes that leases hold, and the rest of what was taken from the driver: the page
                // stacks the two.
                let free = reserved.saturating_sub(*live);
                write!(
                    to,
                    "{{\"ph\":\"C\",\"pid\":{DEVICE},\"name\":\"memory\",\"ts\":{ts},\"args\":{{\"live_bytes\":{live},\"free_bytes\":{free}}}}}"
                )
            }
        }
    }

    fn operation(
        &self,
        to: &mut dyn Write,
        ts: Micros,
        lane: usize,
        index: usize,
        gap: Option<u64>,
    ) -> io::Result<()> {
        let lane_number = lane + 1;
        let lane = &self.lanes[lane];
        let operation = &lane.operations[index];
        let submission = &lane.submissions[operation.submission];
        let took = if let Time::Known(begun, ended) = operation.time { ended - begun } else { 0 };
        let mut args = Args::default();
        args.put("value", submission.value.unwrap_or(0));
        if let Some(gap) = gap {
            args.put("gap_before_us", Micros(gap));
        }
        args.of_operation(operation);
        args.scope(submission.scope.as_ref());
        let (name, category) = (Text(&operation.name), category(operation.kind));
        write!(
            to,
            "{{\"ph\":\"X\",\"pid\":{DEVICE},\"tid\":{lane_number},\"name\":{name},\"cat\":\"{category}\",\"ts\":{ts},\"dur\":{},\"args\":{args}}}",
            Micros(took)
        )
    }

    fn submission(
        &self,
        to: &mut dyn Write,
        ts: Micros,
        lane: usize,
        index: usize,
    ) -> io::Result<()> {
        let Lane { name, submissions, operations } = &self.lanes[lane];
        let submission = &submissions[index];
        let first = operations.partition_point(|o| o.submission < index);
        let own = operations[first..].iter().take_while(|o| o.submission == index).count();
        let called = match own {
            0 => "order".to_owned(),
            1 => operations[first].name.clone(),
            n => format!("{} and {} more", operations[first].name, n - 1),
        };
        let mut args = Args::default();
        args.put("stream", Text(name));
        if let Some(value) = submission.value {
            args.put("value", value);
        }
        if !submission.waits.is_empty() {
            let waits = submission.waits.iter().map(|point| format!("{point:?}"));
            args.put("waits_for", List(waits.collect()));
        }
        args.scope(submission.scope.as_ref());
        args.error(submission.error.as_ref());
        write!(
            to,
            "{{\"ph\":\"X\",\"pid\":{HOST},\"tid\":{},\"name\":{},\"cat\":\"submission\",\"ts\":{ts},\"dur\":{},\"args\":{args}}}",
            submission.thread,
            Text(&called),
            Micros(submission.ended - submission.begun)
        )
    }
}

/// The category of an operation.
fn category(kind: &str) -> &'static str {
    match kind {
        "dispatch" => "kernel",
        "copy" | "upload" | "download" => "copy",
        "fill" => "fill",
        "graph" => "graph",
        _ => "call",
    }
}

/// The arguments of an event.
#[derive(Default)]
struct Args(String);

impl Args {
    fn put(&mut self, name: &str, value: impl Display) {
        let comma = if self.0.is_empty() { "" } else { "," };
        // A string takes all that is written.
        let _ = write!(self.0, "{comma}\"{name}\":{value}");
    }

    fn scope(&mut self, scope: Option<&Name>) {
        if let Some(scope) = scope {
            self.put("scope", Text(scope.as_str()));
        }
    }

    fn error(&mut self, error: Option<&String>) {
        if let Some(error) = error {
            self.put("error", Text(error));
        }
    }

    fn of_operation(&mut self, operation: &Operation) {
        if let Some((grid, block)) = operation.shape {
            self.put("grid", Numbers(grid));
            self.put("block", Numbers(block));
        }
        if let Some(bytes) = operation.bytes {
            self.put("bytes", bytes);
        }
        if !operation.operands.is_empty() {
            self.put("operands", List(operation.operands.iter().map(shown).collect()));
        }
        if let Some(nodes) = &operation.nodes {
            self.put("nodes", List(nodes.iter().cloned().collect()));
        }
    }
}

/// `reads "weights", 4096 bytes`.
fn shown(operand: &NotedOperand) -> String {
    let does = match operand.access {
        Access::Read => "reads",
        Access::Write => "writes",
        Access::ReadWrite => "reads and writes",
    };
    match &operand.name {
        Some(name) => format!("{does} {}, {} bytes", name.as_str(), operand.bytes),
        None => format!("{does} {} bytes", operand.bytes),
    }
}

impl Display for Args {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{{{}}}", self.0)
    }
}

/// Nanoseconds as microseconds.
#[derive(Clone, Copy)]
struct Micros(u64);

impl Display for Micros {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{:03}", self.0 / 1000, self.0 % 1000)
    }
}

struct Numbers([u32; 3]);

impl Display for Numbers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let [x, y, z] = self.0;
        write!(f, "[{x},{y},{z}]")
    }
}

struct List(Vec<String>);

impl Display for List {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('[')?;
        for (i, text) in self.0.iter().enumerate() {
            write!(f, "{}{}", if i == 0 { "" } else { "," }, Text(text))?;
        }
        f.write_char(']')
    }
}

/// A text in quotation marks.
struct Text<'t>(&'t str);

impl Display for Text<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_char('"')?;
        for c in self.0.chars() {
            match c {
                '"' => f.write_str("\\\"")?,
                '\\' => f.write_str("\\\\")?,
                c if c.is_control() => write!(f, "\\u{:04x}", u32::from(c))?,
                c => f.write_char(c)?,
            }
        }
        f.write_char('"')
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn texts_and_numbers_are_json() {
        assert_eq!(Text("a \"b\" \\ \n ü").to_string(), r#""a \"b\" \\ \u000a ü""#);
        assert_eq!(Micros(1_002_003).to_string(), "1002.003");
        assert_eq!(List(vec!["a".into(), "b".into()]).to_string(), r#"["a","b"]"#);
    }
}
