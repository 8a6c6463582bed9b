//! Calls in stream order: functions of the host's, and library calls that enqueue work of their
//! own.
//!
//! A thread that runs one is marked ([`InCallback`]): it never waits for room in a queue, since it
//! may be what the queue waits for.

use crate::stream::{InCallback, Stream};
use crate::view::Operand;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timeline};
use leasehold_hal::{Binding, ForeignCall, HostCall, Op};
use std::panic::{AssertUnwindSafe, catch_unwind};

/// A callback for the completion of a stream's work. The callback runs once: by its call in stream
/// order, or by the drop of the completion without such a call.
struct Completion<F: FnOnce(Result<()>)> {
    timeline: &'static Timeline,
    call: Mutex<Option<F>>,
}

impl<F: FnOnce(Result<()>)> Completion<F> {
    fn tell(&self, result: Result<()>) {
        // Not in the lock: the call may be anybody's.
        let call = self.call.lock().take();
        if let Some(call) = call {
            let _inside = InCallback::enter();
            call(result);
        }
    }
}

impl<F: FnOnce(Result<()>)> Drop for Completion<F> {
    fn drop(&mut self) {
        if self.call.lock().is_none() {
            return;
        }
        let ended = || {
            Error::state(
                "the stream ended before it came to this completion; hold the stream until then",
            )
        };
        let cause = self.timeline.failure().map_or_else(ended, |(_, cause)| cause);
        // The thread that drops the completion gives up failed work, and has more to do: a panic
        // must not unwind it.
        if catch_unwind(AssertUnwindSafe(|| self.tell(Err(cause)))).is_err() {
            tracing::error!(timeline = ?self.timeline, "a completion panicked as it was told of a failure");
        }
    }
}

/// Functions in stream order.
impl Stream {
    /// Runs a function on the host, in stream order. It may submit more work, also to its own
    /// stream; it must not wait for its own stream. An error or a panic poisons the stream. In a
    /// recording: every launch of the graph runs it, so it must be `Fn`.
    ///
    /// A function behind a failure is dropped and never called: [`on_complete`](Self::on_complete)
    /// tells of failures too.
    ///
    /// The stream keeps the function until it has run (a graph, as long as the graph lives): one
    /// that holds a clone of its own [`Graph`](crate::Graph) or is kept by a graph while it holds
    /// the graph's runtime is a cycle that nothing ends.
    ///
    /// # Errors
    /// `Unsupported` on a device without host calls; the stream's cause.
    #[doc(alias = "launchHostFunc")]
    pub fn host_call(
        &self,
        name: &'static str,
        call: impl Fn() -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        self.can_call()?;
        let call = HostCall::new(name, move || {
            let _inside = InCallback::enter();
            call()
        });
        // SAFETY: a host call touches no device memory by itself, and is kept by the submission.
        unsafe { self.pass(&Op::Host(&call), &[]) }.map(drop)
    }

    /// Refuses a device without host calls.
    pub(super) fn can_call(&self) -> Result<()> {
        if self.runtime.device.caps().host_calls {
            return Ok(());
        }
        Err(Error::Unsupported(
            format!(
                "{} has no host calls in streams; synchronise the stream and call the function",
                self.runtime.id()
            )
            .into(),
        ))
    }

    /// As [`host_call`](Self::host_call), for a function that can run once only; not in a
    /// recording.
    ///
    /// # Errors
    /// `Recording` for a recording's stream; as [`host_call`](Self::host_call).
    pub fn host_call_once(
        &self,
        name: &'static str,
        call: impl FnOnce() -> Result<()> + Send + 'static,
    ) -> Result<()> {
        self.live("a function that runs once cannot be recorded; use host_call")?;
        let cell = Mutex::new(Some(call));
        self.host_call(name, move || match cell.lock().take() {
            Some(call) => call(),
            None => Ok(()),
        })
    }

    /// Runs a library call that enqueues its own work on the native stream and touches only the
    /// operands. It is given the native stream, and where the operands lie: not known before in a
    /// recording, where its temporaries get their addresses late and updates replace buffers.
    ///
    /// In a recording with CUDA it is called when the graph is instantiated, and what it enqueues
    /// is captured. No launch calls it, so it may enqueue only what a capture takes. On other
    /// backends each launch calls it.
    ///
    /// # Errors
    /// `Unsupported` on a device without foreign calls; `InvalidArgument` for memory of another
    /// device; the stream's cause.
    ///
    /// # Safety
    /// - The call touches only the operands' memory, at the addresses that it is given, as their
    ///   roles say, and only through work on the native stream that it is given.
    pub unsafe fn foreign_call(
        &self,
        name: &'static str,
        operands: &[Operand<'_>],
        call: impl Fn(u64, &[Binding]) -> Result<()> + Send + Sync + 'static,
    ) -> Result<()> {
        if !self.runtime.device.caps().foreign_calls {
            return Err(Error::Unsupported(
                format!(
                    "{} has no foreign calls; launch a kernel of your own instead",
                    self.runtime.id()
                )
                .into(),
            ));
        }
        let call = ForeignCall::with_bindings(
            name,
            operands.iter().map(Operand::binding),
            move |word, bindings| {
                let _inside = InCallback::enter();
                call(word, bindings)
            },
        );
        // SAFETY: by the contract.
        unsafe { self.pass(&Op::Foreign(&call), operands) }.map(drop)
    }

    /// Calls `call` once, when all that was submitted so far is over: with `Ok` when it completed,
    /// with the cause when it failed. The building block of futures and of queues of one's own:
    /// whatever happens to the stream, the call comes.
    ///
    /// The call comes exactly once: also when the stream has failed or fails, when the device is
    /// lost, when the stream or the runtime is dropped or closed first, in a recording (with
    /// `Recording`; nothing is recorded), and on a device without host calls (with
    /// `Unsupported`). Only the end of the process comes before it. After a failure it may come
    /// before the failed work is over: [`synchronize`](Self::synchronize) says when that is.
    ///
    /// The call runs on the thread that runs the stream's host calls. After a failure it runs on
    /// any thread that observes the failure, possibly in
    /// [`HostTimeline::signal`](crate::HostTimeline::signal),
    /// [`HostTimeline::fail`](crate::HostTimeline::fail) or the drop of a host timeline; where
    /// nothing could be submitted, on the calling thread before this returns. It must not block,
    /// and must not wait for a stream. It may submit work to sound streams and signal host
    /// timelines. A panic poisons the stream, as in [`host_call`](Self::host_call), unless it has
    /// failed already.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (tell, hear) = std::sync::mpsc::channel();
    /// runtime.stream().on_complete(move |result| tell.send(result.is_ok()).unwrap_or_default());
    /// assert_eq!(hear.recv(), Ok(true));
    /// # Ok(())
    /// # }
    /// ```
    #[doc(alias("addCompletedHandler", "cudaStreamAddCallback", "cudaLaunchHostFunc"))]
    pub fn on_complete(&self, call: impl FnOnce(Result<()>) + Send + 'static) {
        let done =
            Arc::new(Completion { timeline: self.under().timeline, call: Mutex::new(Some(call)) });
        let in_order = done.clone();
        let live = self.live("a completion runs once and cannot be recorded; use host_call");
        let submitted = live.and_then(|_| {
            self.host_call("on_complete", move || {
                in_order.tell(Ok(()));
                Ok(())
            })
        });
        if let Err(cause) = submitted {
            done.tell(Err(cause));
        }
    }
}
