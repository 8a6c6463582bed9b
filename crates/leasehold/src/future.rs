//! Events as futures: `(&*event).await`, or [`Event::completion`].
//!
//! The future needs no executor of its own and no thread that polls: the stream's own host calls
//! wake it. It is over when the event's last record is, with the cause when the work before the
//! record failed, also when the stream or the device ends first.

use crate::event::Event;
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::Stream;
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Result, Timepoint};
use std::fmt;
use std::future::{Future, IntoFuture};
use std::pin::Pin;
use std::task::{Context, Poll, Waker};

/// The state that the future and the call that ends it share.
#[derive(Default)]
struct Shared {
    result: Option<Result<()>>,
    waker: Option<Waker>,
}

/// Waits for an event's last record at the time of [`Event::completion`]. Dropping it gives up the
/// wait alone.
#[must_use = "futures do nothing unless they are awaited"]
pub struct EventFuture(Arc<Mutex<Shared>>);

fn tell(shared: &Mutex<Shared>, result: Result<()>) {
    let waker = {
        let mut shared = shared.lock();
        shared.result = Some(result);
        shared.waker.take()
    };
    // Without the lock: a waker may be anybody's.
    if let Some(waker) = waker {
        waker.wake();
    }
}

/// Has `call` called once the timepoint is over.
fn when_over(
    owner: &Arc<RuntimeInner>,
    point: Timepoint,
    call: impl FnOnce(Result<()>) + Send + 'static,
) {
    let own = owner.stream_of(point).map(|core| Stream::new(core, None, owner.clone()));
    if let Some(own) = &own
        && own.now() == point
    {
        return own.on_complete(call);
    }
    // The stream has gone on: a stream that does nothing else waits for the timepoint, and for no
    // more.
    let other = Runtime::from_inner(owner.clone()).create_stream();
    match (other.and_then(|other| other.wait(point).map(|()| other)), own) {
        (Ok(other), _) => other.on_complete(call),
        // Later than it might be, but as sure.
        (Err(_), Some(own)) => own.on_complete(call),
        (Err(e), None) => call(point.timeline().check(point.value()).and(Err(e))),
    }
}

impl Event {
    /// The completion of the last record, as a future. An event that was never recorded is over.
    ///
    /// ```
    /// use leasehold::prelude::*;
    /// # use std::{future::{Future, IntoFuture}, pin::pin, sync::Arc, thread};
    /// # use std::task::{Context as Cx, Poll, Wake};
    /// # struct Unpark(thread::Thread);
    /// # impl Wake for Unpark { fn wake(self: Arc<Self>) { self.0.unpark() } }
    /// # fn block_on<F: IntoFuture>(f: F) -> F::Output {
    /// #     let mut f = pin!(f.into_future());
    /// #     let waker = Arc::new(Unpark(thread::current())).into();
    /// #     loop {
    /// #         if let Poll::Ready(out) = f.as_mut().poll(&mut Cx::from_waker(&waker)) {
    /// #             return out;
    /// #         }
    /// #         thread::park()
    /// #     }
    /// # }
    /// async fn doubled(runtime: &Runtime, x: &Array<f32>) -> Result<Vec<f32>> {
    ///     let (event, y) = (runtime.create_event()?, runtime.alloc_array(x.len())?);
    ///     runtime.stream().copy(y.view(), x.view())?;
    ///     runtime.stream().record(&event)?;
    ///     (&*event).await?;
    ///     runtime.to_vec(&y)
    /// }
    /// # fn main() -> Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let x = runtime.upload(&[1.0f32, 2.0])?;
    /// assert_eq!(block_on(doubled(&runtime, &x))?, [1.0, 2.0]);
    /// # Ok(())
    /// # }
    /// ```
    pub fn completion(&self) -> EventFuture {
        let shared = Arc::new(Mutex::new(Shared::default()));
        let to = shared.clone();
        match self.last() {
            None => tell(&to, Ok(())),
            Some(point) => match (point.timeline().check(point.value()), self.owner.upgrade()) {
                (Ok(false), Some(owner)) => {
                    when_over(&owner, point, move |result| tell(&to, result))
                }
                (Ok(false), None) => tell(
                    &to,
                    Err(Error::state(
                        "the event's runtime has ended; hold the runtime while its events are used",
                    )),
                ),
                (over, _) => tell(&to, over.map(drop)),
            },
        }
        EventFuture(shared)
    }
}

impl IntoFuture for &Event {
    type Output = Result<()>;
    type IntoFuture = EventFuture;

    fn into_future(self) -> EventFuture {
        self.completion()
    }
}

impl Future for EventFuture {
    type Output = Result<()>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<()>> {
        let mut shared = self.0.lock();
        match &shared.result {
            Some(result) => Poll::Ready(result.clone()),
            None => {
                let old = shared.waker.replace(context.waker().clone());
                drop(shared);
                // Without the lock: it may be anybody's.
                drop(old);
                Poll::Pending
            }
        }
    }
}

impl fmt::Debug for EventFuture {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "EventFuture({:?})", self.0.lock().result)
    }
}
