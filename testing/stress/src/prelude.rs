//! The items that a printed test uses beside the runtime itself.

pub use crate::kernels::{BLOCK, Kernel, Params};
pub use crate::scenes::{self, Scene, Wrong};
pub use crate::target::{Bench, Target};
pub use leasehold::backend::StreamDesc;
pub use leasehold::backend::sync::atomic::{AtomicU32, AtomicU64, Ordering};
pub use leasehold::backend::sync::{Arc, Mutex, MutexGuard};
pub use leasehold::graph::{GraphBudget, NodeId};
pub use leasehold::ops::{self, Pattern};
pub use leasehold::{
    Buffer, BufferView, Context, Current, DeviceId, Error, Event, EventFlags, Graph, GraphUpdate,
    HostTimeline, KernelBase, Layout, Lease, Operand, Result, Runtime, Stream, View,
};

use crate::dice::Dice;
use leasehold::KernelSession;
use leasehold::kernel::{session_ops, session_sync_ops};
pub use std::time::Duration;
use std::time::Instant;

/// The bytes that follow from a seed: what uploads write.
#[must_use]
pub fn bytes(seed: u32, len: usize) -> Vec<u8> {
    let mut dice = Dice::new(u64::from(seed));
    let mut bytes = Vec::with_capacity(len + 8);
    while bytes.len() < len {
        bytes.extend_from_slice(&dice.next().to_le_bytes());
    }
    bytes.truncate(len);
    bytes
}

/// A number that tells bytes from others (FNV-1a).
#[must_use]
pub fn digest(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, &b| {
        (hash ^ u64::from(b)).wrapping_mul(0x0100_0000_01b3)
    })
}

/// A place for something that several threads use, or nothing.
#[derive(Debug)]
pub struct Place<T>(Mutex<Option<T>>);

impl<T> Default for Place<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> Place<T> {
    /// With nothing.
    #[must_use]
    pub fn new() -> Self {
        Self(Mutex::new(None))
    }

    /// So many of them.
    #[must_use]
    pub fn several(n: usize) -> Vec<Self> {
        (0..n).map(|_| Self::new()).collect()
    }

    /// Puts something there.
    pub fn put(&self, value: T) {
        let old = self.lock().replace(value);
        drop(old);
    }

    /// Takes it away.
    pub fn take(&self) -> Option<T> {
        self.lock().take()
    }

    /// The value that is there, under a lock.
    pub fn lock(&self) -> MutexGuard<'_, Option<T>> {
        self.0.lock()
    }

    /// A clone of what is there.
    pub fn get(&self) -> Option<T>
    where
        T: Clone,
    {
        self.lock().clone()
    }

    /// A clone of what is there.
    ///
    /// # Panics
    /// When nothing is.
    pub fn the(&self) -> T
    where
        T: Clone,
    {
        self.get().expect("a place that was filled before")
    }
}

/// A launch.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The kernel.
    pub kernel: &'a KernelBase,
    /// Its operands.
    pub operands: &'a [Operand<'a>],
    /// The number of elements, and two words.
    pub params: Params,
}

/// Launches kernels as one submission.
///
/// # Errors
/// The session's.
pub fn launch(stream: &Stream, calls: &[Call<'_>]) -> Result<()> {
    let mut session = None;
    for &Call { kernel, operands, params } in calls {
        let begun = match session.take() {
            None => KernelSession::begin(kernel, stream)?,
            Some(session) => KernelSession::kernel(session, kernel)?,
        };
        let ready = session_sync_ops::wait(begun, operands)?;
        let bound = session_ops::bind(ready)?;
        let set = session_ops::params(bound, &params)?;
        let staged = session_ops::dispatch_1d(set, params[0].div_ceil(BLOCK), BLOCK)?;
        session = Some(session_sync_ops::update_tokens(staged));
    }
    session.map_or(Ok(()), |s| s.finish().map(drop))
}

/// Launches a kernel on a stream whose turn nobody has, without waiting for it. While its session
/// is open nobody else gets one.
///
/// # Errors
/// `Occupied` when somebody has the turn after all; `InvalidState` when two have it; the session's.
pub fn try_launch(stream: &Stream, call: Call<'_>) -> Result<()> {
    let Call { kernel, operands, params } = call;
    let session = KernelSession::try_begin(kernel, stream)?;
    let refused =
        |session: Result<KernelSession<'_>>| matches!(session, Err(Error::Occupied { .. }));
    let other = std::thread::scope(|scope| {
        scope.spawn(|| refused(KernelSession::try_begin(kernel, stream))).join().unwrap_or(false)
    });
    if !(other
        && refused(KernelSession::try_begin(kernel, stream))
        && refused(KernelSession::begin(kernel, stream)))
    {
        return Err(Error::invalid("a stream has two sessions at a time"));
    }
    let bound = session_ops::bind(session_sync_ops::wait(session, operands)?)?;
    let set = session_ops::params(bound, &params)?;
    let staged = session_ops::dispatch_1d(set, params[0].div_ceil(BLOCK), BLOCK)?;
    session_sync_ops::update_tokens(staged).finish().map(drop)
}

#[derive(Debug, Default)]
struct Heard {
    asked: AtomicU64,
    told: AtomicU64,
    failed: AtomicU64,
    early: AtomicU64,
}

/// A function that a completion must not come before.
pub(crate) type Before = Box<dyn Fn() -> Result<()> + Send + Sync>;
/// A function that is called at a completion.
pub(crate) type After = Box<dyn FnOnce(Result<()>) + Send>;

/// Completions of streams that were asked for, and those that came.
#[derive(Debug, Default, Clone)]
pub struct Completions(Arc<Heard>);

impl Completions {
    /// Asks for a stream's completion, behind a host call that it must not come before.
    ///
    /// # Errors
    /// The host call's; the completion is told of it.
    pub fn ask(&self, stream: &Stream) -> Result<()> {
        self.ask_by(
            |before| stream.host_call_once("comes before", before),
            |told| stream.on_complete(told),
        )
    }

    /// As [`ask`](Self::ask), by a host call and a completion of one stream.
    ///
    /// # Errors
    /// The host call's; the completion is told of it.
    pub(crate) fn ask_by(
        &self,
        host_call: impl FnOnce(Before) -> Result<()>,
        on_complete: impl FnOnce(After),
    ) -> Result<()> {
        let ran = Arc::new(AtomicU32::new(0));
        let (runs, heard) = (ran.clone(), self.0.clone());
        let called = host_call(Box::new(move || {
            runs.store(1, Ordering::SeqCst);
            Ok(())
        }));
        heard.asked.fetch_add(1, Ordering::SeqCst);
        let submitted = called.is_ok();
        on_complete(Box::new(move |result| {
            let early = result.is_ok() && submitted && ran.load(Ordering::SeqCst) == 0;
            heard.early.fetch_add(early.into(), Ordering::SeqCst);
            heard.failed.fetch_add(result.is_err().into(), Ordering::SeqCst);
            heard.told.fetch_add(1, Ordering::SeqCst);
        }));
        called
    }

    /// Returns whether each has come, and where nothing may fail without a failure.
    ///
    /// # Errors
    /// A description of the wrong counts.
    pub fn check(&self, strict: bool) -> std::result::Result<(), String> {
        let now = |count: &AtomicU64| count.load(Ordering::SeqCst);
        let Heard { asked, told, failed, early } = &*self.0;
        // A thread of the backend may still have to give up failed work.
        let end = Instant::now() + Duration::from_secs(10);
        while now(told) < now(asked) && Instant::now() < end {
            std::thread::yield_now();
        }
        if now(told) != now(asked) || now(early) > 0 || strict && now(failed) > 0 {
            return Err(format!(
                "of {} completions {} came, {} with a failure, {} before what they follow",
                now(asked),
                now(told),
                now(failed),
                now(early)
            ));
        }
        Ok(())
    }
}

/// The bytes of a part.
///
/// # Errors
/// The stream's.
pub fn read(stream: &Stream, part: BufferView<'_>) -> Result<Vec<u8>> {
    let mut got = vec![0xEE; part.len() as usize];
    stream.download(&mut got, part)?;
    Ok(got)
}

/// The bytes of a part, as a check in the stream's order sees them.
///
/// # Errors
/// The stream's.
pub fn look(stream: &Stream, part: BufferView<'_>) -> Result<Vec<u8>> {
    if part.is_empty() {
        return read(stream, part);
    }
    let seen = Arc::new(Mutex::new(Vec::new()));
    let to = seen.clone();
    stream.inspect("look", part, move |bytes| {
        *to.lock() = bytes.to_vec();
        Ok(())
    })?;
    stream.synchronize()?;
    let got = std::mem::take(&mut *seen.lock());
    Ok(got)
}

/// Steps that are over, by thread: how the threads of a printed test come in order.
#[derive(Debug)]
pub struct Order(Vec<AtomicU32>);

impl Order {
    /// Of so many threads.
    #[must_use]
    pub fn new(threads: usize) -> Self {
        Self((0..threads).map(|_| AtomicU32::new(0)).collect())
    }

    /// Waits until a thread is through with so many steps.
    ///
    /// # Panics
    /// When that takes a minute: it has failed, or hangs.
    pub fn after(&self, thread: usize, steps: u32) {
        let end = Instant::now() + Duration::from_secs(60);
        while self.0[thread].load(Ordering::Acquire) < steps {
            assert!(Instant::now() < end, "thread {thread} is not through with {steps} steps");
            std::thread::yield_now();
        }
    }

    /// A thread is through with a step.
    pub fn done(&self, thread: usize) {
        self.0[thread].fetch_add(1, Ordering::Release);
    }
}

/// The name of the node that is recorded next.
///
/// # Errors
/// `Recording` for a runtime that is no recording's.
pub fn name(runtime: &Runtime) -> Result<NodeId> {
    runtime.stream().next_node().ok_or_else(|| Error::recording("the runtime is no recording's"))
}

/// Opens a device's runtime, which is one however often it is opened.
///
/// # Errors
/// The context's; `InvalidArgument` when there are two.
pub fn open(context: &Context, device: DeviceId) -> Result<Runtime> {
    let (first, second) = (context.runtime(device)?, context.runtime(device)?);
    if !first.same(&second) { Err(Error::invalid("a device has two runtimes")) } else { Ok(first) }
}

/// Sees that no copy is made from a buffer whose runtime is closed, to a stream's device.
///
/// # Errors
/// The allocation's; `InvalidArgument` when it was.
pub fn refuses(stream: &Stream, buffer: &Lease<Buffer>) -> Result<()> {
    let into = stream.runtime().alloc(buffer.len())?;
    // A thread that waits for a timepoint looks at all runtimes, and holds them for a moment.
    let end = Instant::now() + Duration::from_secs(5);
    while stream.copy(into.view(), buffer.view()).is_ok() {
        if Instant::now() > end {
            return Err(Error::invalid("a closed runtime's buffer was used"));
        }
        std::thread::sleep(Duration::from_millis(1));
    }
    Ok(())
}
