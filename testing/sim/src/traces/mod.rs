//! Driver traces: the answers of the vendor's driver to small programs, mistakes included. The
//! simulated driver follows these answers, not assumptions.
//!
//! A [`Scenario`] is written once, against [`CudaSlowOps`]. It writes each call with its result,
//! without addresses. So the lines of two drivers with the same rules are equal.
//! `examples/driver_trace.rs` records the lines on a machine with a device. A test runs the
//! scenarios on the simulated driver and compares.
//!
//! # Rules for scenarios
//! * No line may depend on addresses, times or the device's size.
//! * The content of a line is deterministic. A word in pinned memory holds work back until the host
//!   writes it, or the scenario waits for the work.
//! * Calls that the vendor calls undefined are in scenarios of their own with a mark. The recorder
//!   runs each of these in a process of its own, and a crash is a result. The simulated driver must
//!   return an error there.
//!
//! # Modules
//! - [`figures`]: times of loops over the driver alone.
//! - [`raw_stream`]: a stream, memory and graphs for loops over another library of the vendor's.
//! - [`vouched`]: the driver's interface for a program that vouches once for all its handles.
//!
//! This module must not know managers.

mod capture;
mod contexts;
mod copies;
mod faults;
pub mod figures;
mod graphs;
pub mod kernels;
mod launches;
mod memory;
mod misuse;
pub mod raw_stream;
mod streams;
mod vmm;
pub mod vouched;

use crate::traces::vouched::Vouched;
use leasehold_core::sync::Mutex;
use leasehold_core::{Error, Result};
use leasehold_cuda::driver::ops::{
    CopyKind, CudaSlowOps, FunctionInfo, GraphExecUpdate, HostFlags, NativeCondition,
    NativeContext, NativeCopy, NativeEvent, NativeFunction, NativeGraph, NativeGraphExec,
    NativeMemory, NativeModule, NativeNode, NativeStream, Progress,
};
use std::fmt::Display;
use std::sync::Arc;

/// A small program for a driver.
#[derive(Debug, Clone, Copy)]
pub struct Scenario {
    /// The scenario's name, for filters and files.
    pub name: &'static str,
    /// The number of devices that the scenario needs.
    pub devices: u32,
    /// The vendor leaves the scenario's calls undefined: they may also end the process.
    pub undefined: bool,
    run: fn(&mut Trace<'_>) -> Result<()>,
}

impl Scenario {
    const fn new(name: &'static str, run: fn(&mut Trace<'_>) -> Result<()>) -> Self {
        Self { name, devices: 1, undefined: false, run }
    }

    const fn on_devices(self, devices: u32) -> Self {
        Self { devices, ..self }
    }

    const fn undefined(self) -> Self {
        Self { undefined: true, ..self }
    }
}

/// All scenarios.
pub fn scenarios() -> impl Iterator<Item = &'static Scenario> {
    [
        contexts::SCENARIOS,
        memory::SCENARIOS,
        copies::SCENARIOS,
        streams::SCENARIOS,
        launches::SCENARIOS,
        graphs::SCENARIOS,
        capture::SCENARIOS,
        vmm::SCENARIOS,
        misuse::SCENARIOS,
        faults::SCENARIOS,
    ]
    .into_iter()
    .flatten()
}

/// Runs a scenario on a started driver. `line` gets each line at once.
///
/// # Safety
/// - If the scenario is undefined, the process must bear every reaction of the driver to wrong
///   calls. The process may end.
pub unsafe fn run(ops: &Arc<dyn CudaSlowOps>, scenario: &Scenario, line: &mut dyn FnMut(String)) {
    // SAFETY: scenarios pass only their own handles and addresses, each to the calls that it is
    // made for. They keep memory until the work on it is over. The drivers are known to refuse the
    // deliberate mistakes: the traces hold the answers.
    let vouched = unsafe { Vouched::new(&**ops) };
    let mut trace =
        Trace { ops: vouched, shared: ops, line, context: NativeContext::NULL, words: 0 };
    let ended = (scenario.run)(&mut trace);
    if let Err(error) = ended {
        trace.say(format!("ended early: {}", shown_error(&error)));
    }
    trace.close();
}

/// Runs a scenario and returns its lines.
///
/// # Safety
/// - As [`run`].
pub unsafe fn lines(ops: &Arc<dyn CudaSlowOps>, scenario: &Scenario) -> Vec<String> {
    let mut lines = Vec::new();
    // SAFETY: the caller vouches for the scenario (the contract of this function).
    unsafe { run(ops, scenario, &mut |line| lines.push(line)) };
    lines
}

/// The number of words of pinned memory of a scenario.
const WORDS: u64 = 64;

/// A running scenario.
struct Trace<'a> {
    ops: Vouched<'a>,
    /// The same driver, for host functions.
    shared: &'a Arc<dyn CudaSlowOps>,
    line: &'a mut dyn FnMut(String),
    context: NativeContext,
    words: u64,
}

/// The names that host functions wrote, in their order.
type Order = Arc<Mutex<Vec<&'static str>>>;

impl<'a> Trace<'a> {
    /// Writes a line.
    fn say(&mut self, line: impl Into<String>) {
        (self.line)(line.into());
    }

    /// Writes a call and its result.
    fn tell<T: Shown>(&mut self, call: impl Display, result: Result<T>) -> Option<T> {
        match result {
            Ok(value) => {
                self.say(format!("{call} = {}", value.shown()));
                Some(value)
            }
            Err(error) => {
                self.say(format!("{call} = {}", shown_error(&error)));
                None
            }
        }
    }

    /// Makes the primary context of device 0 current on this thread, and allocates the words. The
    /// trace does not show these calls.
    fn open(&mut self) -> Result<()> {
        self.context = self.ops.primary_retain(0)?;
        self.ops.set_current(self.context)?;
        self.words = self.ops.host_alloc(WORDS * 8, HostFlags::default())?;
        for word in 0..WORDS {
            self.set_word(word, 0);
        }
        Ok(())
    }

    /// Gives back the objects of [`open`](Self::open). Calls that a lost device refuses have
    /// nothing left to free.
    fn close(&mut self) {
        if self.words != 0 {
            let _ = self.ops.set_current(self.context);
            let _ = self.ops.host_free(self.words);
            let _ = self.ops.set_current(NativeContext::NULL);
            let _ = self.ops.primary_release(0);
            (self.words, self.context) = (0, NativeContext::NULL);
        }
    }

    fn word_at(&self, word: u64) -> u64 {
        self.words + word * 8
    }

    fn set_word(&self, word: u64, value: u64) {
        // SAFETY: a word of this scenario's pinned memory.
        unsafe { self.ops.store_word(self.word_at(word), value) };
    }

    fn word(&self, word: u64) -> u64 {
        // SAFETY: a word of this scenario's pinned memory.
        unsafe { self.ops.load_word(self.word_at(word)) }
    }

    /// Holds a stream back until [`release`](Self::release).
    fn hold(&self, stream: NativeStream, word: u64) -> Result<()> {
        self.ops.stream_wait_word(stream, self.word_at(word), 1)
    }

    fn release(&self, word: u64) {
        self.set_word(word, 1);
    }

    fn stream(&self) -> Result<NativeStream> {
        self.ops.stream_create(0)
    }

    fn event(&self) -> Result<NativeEvent> {
        self.ops.event_create(leasehold_cuda::driver::ops::EventFlags::default())
    }

    /// Enqueues a host function that writes its name down.
    fn mark(&self, stream: NativeStream, order: &Order, name: &'static str) -> Result<()> {
        let order = order.clone();
        self.ops.host_function(stream, Box::new(move || order.lock().push(name)))
    }

    fn say_order(&mut self, order: &Order) {
        let names = order.lock().join(" ");
        self.say(format!("order: {names}"));
    }

    fn sync(&self, stream: NativeStream) -> Result<()> {
        self.ops.stream_synchronize(stream)
    }

    /// Allocates device memory of `words` 32-bit words and fills it.
    fn filled(&self, stream: NativeStream, words: u64, value: u32) -> Result<u64> {
        let at = self.ops.alloc(words * 4)?;
        let fill =
            leasehold_cuda::driver::ops::NativeFill { dst: at, value, width: 4, count: words };
        // SAFETY: the memory was allocated just now and lives until the stream was waited for.
        unsafe { self.ops.fill(stream, &fill)? };
        self.sync(stream)?;
        Ok(at)
    }

    /// Reads 32-bit words of device memory, after all work of the stream.
    fn read(&self, stream: NativeStream, at: u64, words: usize) -> Result<Vec<u32>> {
        let mut host = vec![0_u32; words];
        let copy = NativeCopy::linear(
            CopyKind::DeviceToHost,
            host.as_mut_ptr() as u64,
            at,
            words as u64 * 4,
        );
        // SAFETY: both ranges live until the stream was waited for.
        unsafe { self.ops.copy(stream, &copy)? };
        self.sync(stream)?;
        Ok(host)
    }

    /// Writes the content of 32-bit words of device memory.
    fn say_data(&mut self, what: &str, stream: NativeStream, at: u64, words: usize) -> Result<()> {
        let data = self.read(stream, at, words)?;
        self.say(format!("{what}: {data:?}"));
        Ok(())
    }
}

/// The text of a result in the trace: without addresses and properties of devices.
trait Shown {
    fn shown(&self) -> String;
}

macro_rules! shown {
    ($($type:ty: $self:ident => $text:expr;)*) => {
        $(impl Shown for $type {
            fn shown(&self) -> String {
                let $self = self;
                $text.to_string()
            }
        })*
    };
}

shown! {
    (): _s => "ok";
    bool: s => s;
    usize: s => s;
    u32: s => s;
    u64: s => if *s == 0 { "null" } else { "an address" };
    Progress: s => if *s == Progress::Complete { "complete" } else { "pending" };
    GraphExecUpdate: s => if *s == GraphExecUpdate::InPlace { "in place" } else { "refused" };
    NativeContext: s => if s.is_null() { "no context" } else { "a context" };
    NativeStream: s => if s.is_null() { "no stream" } else { "a stream" };
    NativeEvent: s => if s.is_null() { "no event" } else { "an event" };
    NativeModule: s => if s.is_null() { "no module" } else { "a module" };
    NativeFunction: s => if s.is_null() { "no function" } else { "a function" };
    NativeCondition: s => if s.is_null() { "no condition" } else { "a condition" };
    (NativeNode, NativeGraph): s => format!("{} with {}", s.0.shown(), s.1.shown());
    NativeGraph: s => if s.is_null() { "no graph" } else { "a graph" };
    NativeNode: s => if s.is_null() { "no node" } else { "a node" };
    NativeGraphExec: s => if s.is_null() { "no executable" } else { "an executable" };
    NativeMemory: s => if s.is_null() { "no memory" } else { "memory" };
    FunctionInfo: s => format!("blocks of up to {} threads, parameters {:?}", s.block_threads, s.params);
}

/// An error by its code, or by its kind if it has no code.
fn shown_error(error: &Error) -> String {
    let code_in = |text: &str| {
        let at = text.find("CUDA_ERROR_")?;
        let rest = &text[at..];
        let end = rest
            .find(|c: char| !c.is_ascii_uppercase() && !c.is_ascii_digit() && c != '_')
            .unwrap_or(rest.len());
        Some(rest[..end].to_owned())
    };
    match error {
        // Newer drivers say more behind the name. Traces have the name alone.
        Error::Driver { name, .. } => name.split(':').next().unwrap_or_default().to_owned(),
        Error::OutOfMemory(_) => "CUDA_ERROR_OUT_OF_MEMORY".to_owned(),
        Error::DeviceLost { cause } => format!("lost: {}", code_in(cause).unwrap_or_default()),
        Error::Compile { log } => format!("compile: {}", code_in(log).unwrap_or_default()),
        other => other.kind().to_owned(),
    }
}
