//! The only interface to a library of collectives.
//!
//! | a library | an id | a communicator's part | a call |
//! |---|---|---|---|
//! | NCCL | `ncclUniqueId` | `ncclComm_t`, blocking | enqueued on the native stream |
//! | host threads | a number | a place in a rendezvous | waits on the stream's worker |
//! | a simulated machine | a number | a place in the machine | a command of several queues |
//!
//! # Who calls what
//! - [`unique_id`](CollectiveOps::unique_id) on one rank. The store takes the id to the others.
//! - [`init`](CollectiveOps::init) and [`derive`](CollectiveOps::derive) on all ranks, each on a
//!   helper thread: the library may block until the last rank is there. Other functions of the
//!   library are called meanwhile.
//! - [`enqueue`](Communicator::enqueue) in stream order, as a foreign call: once for an eager
//!   submission; of a graph at each launch, or once at its instantiation, as the backend does it.
//!   The order token of the device orders the work of its communicators. The calls of a device are
//!   made one at a time, unless the library [does without](CollectiveOps::takes_turns).
//! - [`abort`](Communicator::abort) from a helper thread, at any time, also during
//!   [`enqueue`](Communicator::enqueue). Calls that come later fail with the cause.
//! - [`destroy`](Communicator::destroy) from the thread of the retire list, once, after the last
//!   call is over. Without it the communicator's part is leaked: a drop never blocks.
//!
//! # What the layer above has checked
//! Element type and reduction fit; the memory is aligned to the elements and has as many bytes as
//! the call needs; roots and peers are ranks of the communicator; the destination does not overlap
//! the source, but in the ways that [`Call`] names. It has not checked that ranks agree.
//!
//! This module must not know which library is under it.

use crate::error::unsupported;
use crate::signature::Signature;
use leasehold::backend::Binding;
use leasehold::{Error, Name, Result, Runtime};
use std::any::Any;
use std::sync::Arc;
use std::time::Duration;

/// A rank's place in a communicator that is about to be made.
#[derive(Debug, Clone)]
pub struct Place {
    /// The communicator's name in messages.
    pub name: Name,
    /// The rank.
    pub rank: u32,
    /// How many ranks there are.
    pub size: u32,
    /// The id that one rank [made](CollectiveOps::unique_id), the same on all ranks.
    pub id: Arc<[u8]>,
    /// The rank's device. It is the driver's current one on the calling thread. A communicator must
    /// not keep the runtime: graphs of the runtime keep the communicator.
    pub runtime: Runtime,
    /// Whether the ranks send to each other one by one. Otherwise no send, receive or all_to_all is
    /// called, and their connections are not needed.
    pub sends: bool,
    /// How long to wait for the other ranks: in this call, and later in each call that the host
    /// waits in.
    pub limit: Duration,
}

/// How a communicator comes from another one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Derived {
    /// By colour and key. All ranks of the old communicator call it, also those without a place.
    Split {
        /// The ranks of one colour share a new communicator; `None` for a rank without one.
        color: Option<u32>,
        /// The order of the ranks in it.
        key: i32,
    },
    /// Without some ranks, which may be lost. Only the others call it.
    Shrunk,
}

/// A call of a rank, with the memory that it is about.
///
/// | kind | `src` | `dst` |
/// |---|---|---|
/// | all_reduce, reduce | `count` | `count`; of a reduce on the root only |
/// | all_gather | `count` | `count` for each rank |
/// | reduce_scatter | `count` for each rank | `count` |
/// | broadcast | `count`, on the root only | `count`, on the other ranks only |
/// | all_to_all | `count` for each rank | `count` for each rank |
/// | send / recv | `count` / – | – / `count` |
/// | barrier | – | the order token, whose bytes nobody reads |
///
/// `src` and `dst` of an all_reduce and a reduce may be the same memory. `src` of an all_gather may
/// be its own rank's part of `dst`, and `dst` of a reduce_scatter its own rank's part of `src`.
#[derive(Debug, Clone, Copy)]
pub struct Call<'a> {
    /// The call itself. Its `count` may be 0: then no memory is touched.
    pub signature: &'a Signature,
    /// The memory that is read.
    pub src: Option<Binding>,
    /// The memory that is written.
    pub dst: Option<Binding>,
}

/// A library of collectives for one kind of devices. Any thread may call it.
pub trait CollectiveOps: Any + Send + Sync {
    /// The library in messages, with its version: `NCCL 2.28.9`.
    fn name(&self) -> &str;

    /// Whether the calls of a device must be made one at a time, also those of several
    /// communicators. Then a lock of the device is held during each. It is a leaf, so a call must
    /// not wait for another rank's call of another communicator. True by default.
    fn takes_turns(&self) -> bool {
        true
    }

    /// The id of a new communicator, at most 256 bytes. Does not wait for other ranks.
    ///
    /// # Errors
    /// `Unavailable` without the library; the library's own.
    fn unique_id(&self) -> Result<Vec<u8>>;

    /// Makes this rank's part of a new communicator. Blocks until all ranks have called it, for
    /// [`Place::limit`] at most if the library can give up. All connections are made here, so that
    /// calls do not wait for them.
    ///
    /// # Errors
    /// `Timeout` that names a rank which has not come, where the library knows; `Unsupported` for a
    /// device that is not the library's; the library's own.
    fn init(&self, place: &Place) -> Result<Arc<dyn Communicator>>;

    /// Makes this rank's part of a communicator from another one's. Blocks as
    /// [`init`](Self::init). A rank without a place gets none.
    ///
    /// The default makes a new communicator.
    ///
    /// # Errors
    /// As [`init`](Self::init).
    fn derive(
        &self,
        from: &dyn Communicator,
        how: Derived,
        place: Option<&Place>,
    ) -> Result<Option<Arc<dyn Communicator>>> {
        let _ = (from, how);
        place.map(|place| self.init(place)).transpose()
    }
}

/// A rank's part of a communicator of the library.
pub trait Communicator: Any + Send + Sync {
    /// Enqueues calls on the native stream as one group: none of them waits for another one of
    /// them. One call is a group too. `stream` is the word that the backend gives to a foreign
    /// call.
    ///
    /// A part that the library has accepted stays accepted after an error.
    ///
    /// # Errors
    /// The cause after [`abort`](Self::abort); `PeerLost`, `Mismatch` and `Timeout` where the
    /// library knows; the library's own.
    ///
    /// # Safety
    /// - `stream` is a stream of the place's device, which is the driver's current one.
    /// - The memory of the calls lies on that device. Work on the stream may read `src` and write
    ///   `dst`, and the memory stays valid until that work is over.
    /// - Each call meets what the layer above has checked (the module's documentation).
    unsafe fn enqueue(&self, stream: u64, calls: &[Call<'_>]) -> Result<()>;

    /// Ends the communicator's work: calls that wait or run end soon, with whatever results. Later
    /// calls fail with the cause. The first cause stays. May block; the caller does not wait for it
    /// without a limit.
    fn abort(&self, cause: Error);

    /// A failure that the library has noticed by itself, if any. Does not block.
    fn failure(&self) -> Option<Error> {
        None
    }

    /// Makes memory of all ranks a window of the communicator, in which calls exchange elements
    /// without copies between. Returns the window's name. All ranks call it with as many bytes, in
    /// the same order. Blocks until all have.
    ///
    /// A call uses windows if its memory lies in windows on all ranks, at the same offsets.
    ///
    /// # Errors
    /// `Unsupported` for a library without windows, which is the default; the library's own.
    ///
    /// # Safety
    /// - The range is one whole [segment](leasehold::backend::SharedSegment) of shareable memory on
    ///   the place's device. It stays mapped until the window or the communicator is given back.
    /// - A call in windows has the same offsets on all ranks.
    unsafe fn register(&self, addr: u64, bytes: u64) -> Result<u64> {
        let _ = (addr, bytes);
        Err(unsupported(
            "this library of collectives has no windows; its calls take any memory as it is",
        ))
    }

    /// Gives a window back, after the last call that used it. Does not wait for other ranks. After
    /// an abort there is nothing left to give back.
    ///
    /// # Errors
    /// The library's own.
    fn deregister(&self, window: u64) -> Result<()> {
        let _ = window;
        Ok(())
    }

    /// Gives the communicator's resources back. May block, also for other ranks.
    ///
    /// # Errors
    /// The library's own.
    fn destroy(&self) -> Result<()> {
        Ok(())
    }
}
