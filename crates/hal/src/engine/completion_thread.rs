//! The threads of a context: one that watches streams in need of attention, and a few for host
//! calls. The threads start at their first use. Without work they are parked.
//!
//! # Protocol
//! A stream that needs attention is put on the list once (`listed`). The completion thread serves
//! each stream of the list and keeps those that need more attention. A thread that puts a stream on
//! the list unparks the completion thread; a park token ensures that no wake-up is lost. The
//! driver's own callbacks only wake the completion thread.
//!
//! A completion thread that closes serves the list as long as the work of a stream on it continues
//! by itself. It does not wait for a host timeline or for another backend.
//!
//! Without threads (`inline`), a thread that waits or queries makes a round and runs host calls
//! itself.
//!
//! This module must not know what is done for a stream.

use crate::engine::driver::DriverStream;
use crate::engine::state::{Job, StreamCore};
use crate::engine::threads::{List, Threads};
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::sync::{Arc, thread};
use std::time::Duration;

/// The most host calls that run at a time.
const CALLERS_MAX: u32 = 8;
/// Rounds without progress before the completion thread sleeps.
const EAGER: u32 = 200;
/// The longest sleep.
const NAP_MAX: Duration = Duration::from_micros(500);
/// In every round of this number without progress, the completion thread queries the driver, which
/// finds a lost context.
const LOOK_EVERY: u32 = 16;

impl<N: DriverStream> Threads<StreamCore<N>, Job<N>> {
    /// Puts a stream on the list, unless the stream is on it.
    pub(crate) fn add(self: &Arc<Self>, stream: &Arc<StreamCore<N>>) {
        if stream.listed.swap(true, Ordering::AcqRel) {
            return;
        }
        {
            let mut list = self.list.lock();
            list.streams.push(stream.clone());
            if !self.inline && !list.started {
                self.start(&mut list);
            }
        }
        self.waker.wake();
    }

    fn start(self: &Arc<Self>, list: &mut List<StreamCore<N>>) {
        let threads = self.clone();
        let name = format!("lh-{}-watch", self.id.to_string().replace(':', ""));
        match thread::Builder::new().name(name).spawn(move || threads.completion_loop()) {
            Ok(handle) => {
                let _ = self.waker.0.set(handle.thread().clone());
                list.thread = Some(handle);
                list.started = true;
            }
            Err(error) => {
                // A waiting thread makes progress by itself. The next stream that needs attention
                // tries again.
                tracing::error!(%error, "the completion thread of {} could not be started", self.id);
            }
        }
    }

    /// Serves every stream of the list once. Returns whether a stream remains, and whether one made
    /// progress.
    fn pass(&self, look: bool) -> (bool, bool) {
        let mut streams = std::mem::take(&mut self.list.lock().streams);
        if streams.is_empty() {
            return (false, false);
        }
        let mut news = false;
        streams.retain(|stream| {
            news |= stream.serve(look);
            if stream.needs_attention() {
                return true;
            }
            stream.listed.store(false, Ordering::Release);
            // Another thread may have asked for attention just before.
            stream.needs_attention() && !stream.listed.swap(true, Ordering::AcqRel)
        });
        let any = !streams.is_empty();
        let mut list = self.list.lock();
        std::mem::swap(&mut list.streams, &mut streams);
        list.streams.append(&mut streams);
        (any || !list.streams.is_empty(), news)
    }

    /// The completion thread's main loop.
    fn completion_loop(self: Arc<Self>) {
        let mut quiet = 0u32;
        let mut nap = self.interval.max(Duration::from_micros(20));
        loop {
            let (any, news) = self.pass(quiet % LOOK_EVERY == LOOK_EVERY - 1);
            if !any {
                if self.closing.load(Ordering::Acquire) {
                    return;
                }
                thread::park();
                quiet = 0;
                continue;
            }
            if news {
                quiet = 0;
                nap = self.interval.max(Duration::from_micros(20));
                continue;
            }
            quiet = quiet.saturating_add(1);
            if self.closing.load(Ordering::Acquire) && !self.is_moving() {
                // The remaining streams wait for a host timeline or another backend. Their work
                // fails when the streams are dropped.
                self.drop_streams();
                continue;
            }
            if quiet < EAGER {
                thread::yield_now();
            } else {
                thread::park_timeout(nap);
                nap = (nap * 2).min(NAP_MAX.max(self.interval));
            }
        }
    }

    /// Runs a host call on a thread of the backend. Without threads, the next round runs the call.
    pub(crate) fn call(self: &Arc<Self>, stream: Arc<StreamCore<N>>, job: Job<N>) {
        let mut calls = self.calls.lock();
        calls.tasks.push_back((stream, job));
        if self.inline {
            return;
        }
        if (calls.tasks.len() as u32) > calls.idle && calls.threads < CALLERS_MAX {
            let threads = self.clone();
            let name = format!("lh-{}-call{}", self.id.to_string().replace(':', ""), calls.threads);
            match thread::Builder::new().name(name).spawn(move || threads.call_loop()) {
                Ok(handle) => {
                    calls.threads += 1;
                    calls.handles.push(handle);
                }
                Err(error) if calls.threads == 0 => {
                    tracing::error!(%error, "no thread for host calls; one runs here");
                    drop(calls);
                    self.run_calls();
                    return;
                }
                Err(_) => {}
            }
        }
        drop(calls);
        self.bell.notify_one();
    }

    /// The main loop of a thread for host calls.
    fn call_loop(&self) {
        let mut calls = self.calls.lock();
        loop {
            if let Some((stream, job)) = calls.tasks.pop_front() {
                drop(calls);
                stream.run_call(job);
                drop(stream);
                calls = self.calls.lock();
            } else if self.closing.load(Ordering::Acquire) {
                return;
            } else {
                calls.idle += 1;
                self.bell.wait(&mut calls);
                calls.idle -= 1;
            }
        }
    }

    fn run_calls(&self) {
        loop {
            let task = self.calls.lock().tasks.pop_front();
            let Some((stream, job)) = task else { return };
            stream.run_call(job);
        }
    }

    /// Without threads: serves every stream once, and runs the host calls that are due.
    pub(crate) fn round(&self) {
        self.pass(false);
        self.run_calls();
    }

    /// Waits for the end of the threads after [`close`](Self::close); see `Engine::join`.
    pub(crate) fn join(&self) {
        let mut handles = std::mem::take(&mut self.calls.lock().handles);
        handles.extend(self.list.lock().thread.take());
        for handle in handles {
            if handle.thread().id() != thread::current().id() {
                // The threads catch the panics of their work, so the result says nothing.
                drop(handle.join());
            }
        }
        if self.inline {
            self.round();
        }
        // A host call that ended last may have put its stream on the list after the completion
        // thread ended.
        while self.drop_streams() {}
    }

    /// Whether work of a stream of the list continues by itself.
    fn is_moving(&self) -> bool {
        let streams = self.list.lock().streams.clone();
        streams.iter().any(|stream| stream.is_moving())
    }

    /// Drops the streams of the list, and returns whether it had any. A stream that ends drops user
    /// objects, which may put other streams on the list. So it ends without the lock.
    fn drop_streams(&self) -> bool {
        let streams = std::mem::take(&mut self.list.lock().streams);
        !streams.is_empty()
    }
}

impl<N: DriverStream> StreamCore<N> {
    /// Puts the stream on the completion thread's list. The completion thread serves the stream as
    /// long as it needs attention.
    pub(crate) fn enlist(&self) {
        if let Some(stream) = self.me.upgrade() {
            self.core.threads.add(&stream);
        }
    }
}
