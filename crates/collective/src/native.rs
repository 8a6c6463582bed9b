//! The life of a library's communicators: made within a limit, given back without a wait.
//!
//! A library may block as it makes or destroys its part, and may never come back. So a part has a
//! thread, which makes it, and then waits for the order to give it back. None waits behind another.
//! A drop puts the order into the world's [`Outbox`], which takes a microsecond: to wake the thread
//! would take ten.

use crate::driver::ops::Communicator;
use crate::error::timeout;
use leasehold::backend::sync::{Arc, Condvar, Mutex, thread};
use leasehold::{Error, Result, Runtime, Timepoint};
use std::any::Any;
use std::mem::ManuallyDrop;
use std::sync::mpsc;
use std::time::{Duration, Instant};

/// The time that a library gets above the limit that it knows itself.
const GRACE: Duration = Duration::from_secs(5);

/// How often a rank that waits for its part looks at the others.
const LOOK: Duration = Duration::from_millis(50);

/// A library's part of a communicator, which goes back to the library when it is dropped.
pub(crate) struct Native {
    /// Taken by the drop alone.
    part: ManuallyDrop<Arc<dyn Communicator>>,
    orders: mpsc::Sender<Order>,
    outbox: Arc<Outbox>,
}

/// Orders on their way to the threads of parts. A thread that looks often passes them on, so who
/// gives an order wakes nobody.
#[derive(Default)]
pub(crate) struct Outbox(Mutex<Waiting>);

#[derive(Default)]
struct Waiting {
    /// A thread passes orders on. Without it an order goes at once.
    served: bool,
    orders: Vec<(mpsc::Sender<Order>, Order)>,
}

impl Outbox {
    fn give(&self, to: &mpsc::Sender<Order>, order: Order) {
        let mut waiting = self.0.lock();
        if waiting.served {
            waiting.orders.push((to.clone(), order));
            return;
        }
        drop(waiting);
        send(to, order);
    }

    /// Passes on what waits. `served` says whether the caller comes again.
    pub(crate) fn pass_on(&self, served: bool) {
        let orders = {
            let mut waiting = self.0.lock();
            waiting.served = served;
            std::mem::take(&mut waiting.orders)
        };
        orders.into_iter().for_each(|(to, order)| send(&to, order));
    }
}

impl Drop for Outbox {
    fn drop(&mut self) {
        self.pass_on(false);
    }
}

fn send(to: &mpsc::Sender<Order>, order: Order) {
    if let Err(mpsc::SendError(order)) = to.send(order) {
        // Without its thread the part is leaked, which blocks nobody.
        std::mem::forget(order);
    }
}

/// The next work of a part's thread.
enum Order {
    /// Keeps a value until timepoints are over, for some time at most.
    Keep(Keep, Retiring),
    /// Gives the part back, and ends.
    Destroy(Arc<dyn Communicator>, Retiring),
}

/// A value that is kept until timepoints are over.
struct Keep {
    points: Vec<Timepoint>,
    limit: Duration,
    runtime: Runtime,
    kept: Box<dyn Any + Send>,
}

/// The end of a work, which any number of threads may wait for.
#[derive(Default)]
pub(crate) struct Done(Mutex<bool>, Condvar);

impl Done {
    fn set(&self) {
        *self.0.lock() = true;
        self.1.notify_all();
    }

    /// Waits for the end, until an instant at most. Returns whether it has come.
    pub(crate) fn wait(&self, until: Instant) -> bool {
        let mut done = self.0.lock();
        while !*done && !self.1.wait_until(&mut done, until).timed_out() {}
        *done
    }
}

/// Communicators that are being given back.
static RETIRING: (Mutex<usize>, Condvar) = (Mutex::new(0), Condvar::new());

impl Native {
    /// Makes a part on a thread of its own. Meanwhile `look` is called from time to time, and ends
    /// the wait with an error.
    ///
    /// # Errors
    /// `Timeout` if it takes longer than the limit and a grace; the error of `look`; its own.
    pub(crate) fn make(
        what: &str,
        limit: Duration,
        outbox: Arc<Outbox>,
        look: impl Fn() -> Result<()>,
        make: impl FnOnce() -> Result<Option<Arc<dyn Communicator>>> + Send + 'static,
    ) -> Result<Option<Self>> {
        let (tell, hear) = mpsc::sync_channel(1);
        thread::Builder::new().name("lh-collective".to_owned()).spawn(move || {
            let (orders, given) = mpsc::channel();
            let own = |part| Self { part: ManuallyDrop::new(part), orders, outbox };
            let made = make().map(|part| part.map(own));
            // Nobody hears it any more: its drop gives the order.
            drop(tell.send(made));
            given.into_iter().for_each(carry_out);
        })?;
        let until = Instant::now().checked_add(limit.saturating_add(GRACE));
        loop {
            let left = until.map_or(LOOK, |at| at.saturating_duration_since(Instant::now()));
            match hear.recv_timeout(left.min(LOOK)) {
                Ok(made) => return made,
                Err(mpsc::RecvTimeoutError::Disconnected) => {
                    return Err(Error::state(format!(
                        "{what}: the library panicked as it made it"
                    )));
                }
                Err(mpsc::RecvTimeoutError::Timeout) if left.is_zero() => {
                    return Err(timeout(format!(
                        "{what}: the library has not made it within {limit:?}; look at what the other ranks do"
                    )));
                }
                Err(mpsc::RecvTimeoutError::Timeout) => look()?,
            }
        }
    }

    pub(crate) fn part(&self) -> &dyn Communicator {
        &**self.part
    }

    /// Begins to end the part's work, on a thread of its own, after `before`. `done` says when that
    /// is over. Without a thread it is over at once, and the part goes on.
    pub(crate) fn abort(
        &self,
        cause: Error,
        before: impl FnOnce() + Send + 'static,
        done: Arc<Done>,
    ) {
        let (part, told) = (Arc::clone(&self.part), done.clone());
        let aborts = move || {
            before();
            part.abort(cause);
            told.set();
        };
        if thread::Builder::new().name("lh-collective".to_owned()).spawn(aborts).is_err() {
            done.set();
        }
    }

    /// Keeps a value until timepoints are over, for `limit` at most. Does not wait for that.
    pub(crate) fn keep_until(
        &self,
        points: Vec<Timepoint>,
        limit: Duration,
        runtime: &Runtime,
        kept: impl Any + Send,
    ) {
        if points.is_empty() {
            return;
        }
        let keep = Keep { points, limit, runtime: runtime.clone(), kept: Box::new(kept) };
        self.outbox.give(&self.orders, Order::Keep(keep, Retiring::begin()));
    }
}

/// Carries out an order.
fn carry_out(order: Order) {
    match order {
        Order::Keep(Keep { points, limit, runtime, kept }, retiring) => {
            // A stream that has failed is over too.
            let _ = runtime.wait_for_timeout(points, limit);
            drop(kept);
            drop((runtime, retiring));
        }
        Order::Destroy(part, retiring) => {
            if let Err(error) = part.destroy() {
                tracing::warn!(%error, "a communicator was not given back");
            }
            // The resources of the part are gone once it is seen as over.
            drop(part);
            drop(retiring);
        }
    }
}

impl Drop for Native {
    fn drop(&mut self) {
        // SAFETY: nobody uses the value after its drop.
        let part = unsafe { ManuallyDrop::take(&mut self.part) };
        self.outbox.give(&self.orders, Order::Destroy(part, Retiring::begin()));
    }
}

/// A communicator that is being given back.
struct Retiring;

impl Retiring {
    fn begin() -> Self {
        *RETIRING.0.lock() += 1;
        Self
    }
}

impl Drop for Retiring {
    fn drop(&mut self) {
        *RETIRING.0.lock() -= 1;
        RETIRING.1.notify_all();
    }
}

/// Waits until all communicators that were dropped are given back.
///
/// # Errors
/// `Timeout`.
pub(crate) fn wait_for_retired(limit: Duration) -> Result<()> {
    let until = Instant::now().checked_add(limit);
    let (count, changed) = &RETIRING;
    let mut count = count.lock();
    while *count != 0 {
        let over = match until {
            Some(until) => changed.wait_until(&mut count, until).timed_out(),
            None => {
                changed.wait(&mut count);
                false
            }
        };
        if over && *count != 0 {
            return Err(timeout(format!(
                "{} communicators were not given back within {limit:?}; wait longer, or look at what their other ranks do",
                *count
            )));
        }
    }
    Ok(())
}

#[cfg(test)]
#[path = "../tests/unit/native.rs"]
mod tests;
