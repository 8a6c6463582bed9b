//! Futures of a stream's work, of timepoints, events and downloads, for any executor.
//!
//! A future needs no executor of its own and no thread that polls: a host call of the stream wakes
//! it, once what it waits for is over. It says the cause if that failed, also if the stream or the
//! device ends first. A waker is called where [`Stream::on_complete`] calls: mostly on the thread
//! that runs the stream's host calls.
//!
//! Dropping a future gives up the wait alone: the work goes on, and keeps the memory that it uses.

use crate::array::ArrayView;
use crate::event::Event;
use crate::pinned::PinnedArray;
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::Stream;
use crate::view::View;
use bytemuck::Pod;
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

/// The end of a timepoint. Dropping it gives up the wait alone.
#[must_use = "futures do nothing unless they are awaited"]
pub struct Completion(Arc<Mutex<Shared>>);

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
    let of = |owner: &Arc<RuntimeInner>| {
        owner.stream_of(point).map(|core| Stream::new(core, None, owner.clone()))
    };
    // The timepoint may be another device's of the context.
    let own = of(owner).or_else(|| owner.context.open_runtimes().find_map(|other| of(&other)));
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
    pub fn completion(&self) -> Completion {
        match (self.last(), self.owner.upgrade()) {
            (None, _) => Completion::over(Ok(())),
            (Some(point), Some(owner)) => Completion::begin(&owner, point),
            (Some(point), None) => match point.timeline().check(point.value()) {
                Ok(false) => Completion::over(Err(Error::state(
                    "the event's runtime has ended; hold the runtime while its events are used",
                ))),
                over => Completion::over(over.map(drop)),
            },
        }
    }
}

impl Completion {
    /// The end of a timepoint: of any stream of the runtime's context, or of a host timeline that
    /// nobody has signalled yet.
    ///
    /// ```
    /// use leasehold::future::Completion;
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
    /// # fn main() -> Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let gate = runtime.create_host_timeline()?;
    /// let open = gate.next();
    /// let opened = Completion::of(&runtime, open);
    /// gate.signal(open.value())?;
    /// block_on(opened)
    /// # }
    /// ```
    pub fn of(runtime: &Runtime, point: Timepoint) -> Self {
        Self::begin(&runtime.inner, point)
    }

    fn begin(owner: &Arc<RuntimeInner>, point: Timepoint) -> Self {
        match point.timeline().check(point.value()) {
            Ok(false) => {
                let shared = Arc::new(Mutex::new(Shared::default()));
                let to = shared.clone();
                when_over(owner, point, move |result| tell(&to, result));
                Self(shared)
            }
            over => Self::over(over.map(drop)),
        }
    }

    /// A wait that is over already.
    fn over(result: Result<()>) -> Self {
        Self(Arc::new(Mutex::new(Shared { result: Some(result), waker: None })))
    }
}

/// Values that a download brings: the future of [`Stream::download_async`].
#[must_use = "futures do nothing unless they are awaited"]
#[derive(Debug)]
pub struct Download<T>(State<T>);

#[derive(Debug)]
enum State<T> {
    Pending(PinnedArray<T>, Completion),
    Failed(Error),
    Over,
}

// It holds no value of its own, and nothing of it is pinned.
impl<T> Unpin for Download<T> {}

impl Stream {
    /// The end of everything that was submitted to the stream so far.
    ///
    /// Work that is submitted later is not waited for. Of a recording's stream the future is an
    /// error at once: `Recording`.
    pub fn completion(&self) -> Completion {
        match self.live("a recording's stream completes nothing; await a launch of the graph") {
            Ok(_) => Completion::begin(&self.runtime, self.now()),
            Err(e) => Completion::over(Err(e)),
        }
    }

    /// Copies values to the host without blocking: the copy is submitted by this call, and the
    /// future has the values. It is ordered as [`download`](Self::download) is.
    ///
    /// The copy goes by pinned memory that the future owns. A future that is dropped leaves the
    /// memory to the copy, until that is over.
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
    /// async fn first(runtime: &Runtime, x: &Array<f32>) -> Result<f32> {
    ///     Ok(runtime.stream().download_async(x.slice(..1)).await?[0])
    /// }
    /// # fn main() -> Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let x = runtime.upload(&[1.0f32, 2.0])?;
    /// assert_eq!(block_on(first(&runtime, &x))?, 1.0);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// The future has them: as [`download`](Self::download), and as
    /// [`Runtime::alloc_pinned_array`].
    pub fn download_async<'a, T: Pod>(
        &self,
        from: impl TryInto<ArrayView<'a, T>, Error: Into<Error>>,
    ) -> Download<T> {
        let submit = || {
            let from = from.try_into().map_err(Into::into)?;
            let to = self.runtime().alloc_pinned_array(from.len())?.unlisted()?;
            self.copy_pinned(to.view(), from.view())?;
            Ok((to, self.completion()))
        };
        Download(match submit() {
            Ok((to, completion)) => State::Pending(to, completion),
            Err(e) => State::Failed(e),
        })
    }
}

impl<T: Pod> Future for Download<T> {
    type Output = Result<Vec<T>>;

    fn poll(mut self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Result<Vec<T>>> {
        let ended = match &mut self.0 {
            State::Pending(_, completion) => match Pin::new(completion).poll(context) {
                Poll::Pending => return Poll::Pending,
                Poll::Ready(ended) => ended,
            },
            State::Failed(_) | State::Over => Ok(()),
        };
        Poll::Ready(match std::mem::replace(&mut self.0, State::Over) {
            // The copy is over, so the loan of the values waits for nothing.
            State::Pending(mut values, _) => {
                ended.and_then(|()| values.map().map(|values| values.to_vec()))
            }
            State::Failed(e) => Err(e),
            State::Over => Err(Error::state("the values were taken; download them again")),
        })
    }
}

impl IntoFuture for &Event {
    type Output = Result<()>;
    type IntoFuture = Completion;

    fn into_future(self) -> Completion {
        self.completion()
    }
}

impl Future for Completion {
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

impl fmt::Debug for Completion {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Completion({:?})", self.0.lock().result)
    }
}
