//! The calls of communicators.

use crate::comm::Comm;
use crate::element::{Element, Reduce};
use leasehold::{ArrayView, Result, Stream};

/// Calls. On a stream of a recording each is recorded, and the ranks' recordings are compared when
/// they stop. No call blocks the host, but for room in the stream.
///
/// Parts begin at a multiple of their elements' size, and do not overlap but where a call says so.
/// Parts without elements are allowed: such a call counts as one.
///
/// # Errors
/// All of them return:
/// - `InvalidArgument` for parts whose lengths do not fit each other, that overlap or are not
///   aligned, a root or another rank that is not there, an average of integers, and a stream or
///   memory of another device. Nothing is submitted then, and the call does not count.
/// - `InvalidState` for `send`, `recv` and `all_to_all` of a communicator without
///   [connections](crate::CommConfig::sends) for them.
/// - The communicator's first failure, and the stream's cause if it is poisoned.
///
/// An error of another rank fails the stream, later:
/// - `Mismatch` with two ranks' calls. In a recording it is the error of its stop.
/// - `Timeout` if a rank does not come within the communicator's limit, and `PeerLost` if it is
///   gone.
impl Comm {
    /// Reduces all ranks' elements, in place: every rank gets the same.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    pub fn all_reduce<'a, T: Element>(
        &self,
        stream: &Stream,
        x: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        self.group(stream, |g| g.all_reduce(x, reduce))
    }

    /// Reduces all ranks' elements into other memory of as many elements.
    ///
    /// # Errors
    /// As all calls.
    pub fn all_reduce_into<'a, T: Element>(
        &self,
        stream: &Stream,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        self.group(stream, |g| g.all_reduce_into(dst, src, reduce))
    }

    /// Gathers all ranks' elements, in the order of the ranks: `dst` has `size` times as many as
    /// `src`. `src` may be this rank's part of `dst`.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    pub fn all_gather<'a, T: Element>(
        &self,
        stream: &Stream,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
    ) -> Result<()> {
        self.group(stream, |g| g.all_gather(dst, src))
    }

    /// Reduces all ranks' elements, and gives each rank its part: `src` has `size` times as many as
    /// `dst`. `dst` may be this rank's part of `src`.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    pub fn reduce_scatter<'a, T: Element>(
        &self,
        stream: &Stream,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        self.group(stream, |g| g.reduce_scatter(dst, src, reduce))
    }

    /// Gives every rank the root's elements, in place.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclBroadcast", "ncclBcast", "MPI_Bcast"))]
    pub fn broadcast<'a, T: Element>(
        &self,
        stream: &Stream,
        x: impl Into<ArrayView<'a, T>>,
        root: u32,
    ) -> Result<()> {
        self.group(stream, |g| g.broadcast(x, root))
    }

    /// Reduces all ranks' elements into the root's. The others keep theirs.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    pub fn reduce<'a, T: Element>(
        &self,
        stream: &Stream,
        x: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
        root: u32,
    ) -> Result<()> {
        self.group(stream, |g| g.reduce(x, reduce, root))
    }

    /// Gives each rank its part of this rank's elements: part `r` of `src` goes to rank `r`, and
    /// part `r` of `dst` comes from it. Both have `size` parts.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclAlltoAll", "MPI_Alltoall"))]
    pub fn all_to_all<'a, T: Element>(
        &self,
        stream: &Stream,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
    ) -> Result<()> {
        self.group(stream, |g| g.all_to_all(dst, src))
    }

    /// Sends elements to another rank, which receives as many. It may wait for that rank; two ranks
    /// that send to each other do so in [groups](Self::group).
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclSend", "MPI_Send"))]
    pub fn send<'a, T: Element>(
        &self,
        stream: &Stream,
        src: impl Into<ArrayView<'a, T>>,
        to: u32,
    ) -> Result<()> {
        self.group(stream, |g| g.send(src, to))
    }

    /// Receives what another rank sends.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias("ncclRecv", "MPI_Recv"))]
    pub fn recv<'a, T: Element>(
        &self,
        stream: &Stream,
        dst: impl Into<ArrayView<'a, T>>,
        from: u32,
    ) -> Result<()> {
        self.group(stream, |g| g.recv(dst, from))
    }

    /// Lets the stream go on once all ranks' streams have come. The host does not wait:
    /// [`World::barrier`](crate::World::barrier) does.
    ///
    /// # Errors
    /// As all calls.
    #[doc(alias = "MPI_Barrier")]
    pub fn barrier(&self, stream: &Stream) -> Result<()> {
        self.group(stream, |g| g.barrier())
    }
}
