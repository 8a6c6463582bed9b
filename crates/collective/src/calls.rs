//! The calls of communicators, and of groups of calls.

use crate::comm::Comm;
use crate::element::{Element, Reduce};
use crate::group::Group;
use crate::signature::Kind;
use leasehold::{ArrayView, Result, Stream};

/// Declares the calls with elements: their memory, their other arguments, and what a group does.
macro_rules! calls {
    (
        $(#[$calls:meta])* impl Comm:
        $($(#[$doc:meta])* $name:ident[$($view:ident),*]($($of:ident: $type:ty),*) |$g:ident| $do:block)*
    ) => {
        $(#[$calls])*
        impl Comm {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// As all calls.
                pub fn $name<'a, T: Element>(
                    &self,
                    stream: &Stream,
                    $($view: impl Into<ArrayView<'a, T>>,)*
                    $($of: $type),*
                ) -> Result<()> {
                    self.group(stream, |g| g.$name($($view,)* $($of),*))
                }
            )*
        }

        /// The calls of a group.
        impl<'a> Group<'a> {
            $(
                $(#[$doc])*
                ///
                /// # Errors
                /// As that of a communicator.
                pub fn $name<T: Element>(
                    &mut self,
                    $($view: impl Into<ArrayView<'a, T>>,)*
                    $($of: $type),*
                ) -> Result<()> {
                    let $g = self;
                    $(let $view: ArrayView<'a, T> = $view.into();)*
                    $do
                }
            )*
        }
    };
}

calls! {
    /// Calls. On a stream of a recording each is recorded, and the ranks' recordings are compared
    /// when they stop. No call blocks the host, but for room in the stream.
    ///
    /// Parts begin at a multiple of their elements' size, and do not overlap but where a call says
    /// so. Parts without elements are allowed: such a call counts as one.
    ///
    /// # Errors
    /// All of them return:
    /// - `InvalidArgument` for parts whose lengths do not fit each other, that overlap or are not
    ///   aligned, a root or another rank that is not there, an average of integers, and a stream
    ///   or memory of another device. Nothing is submitted then, and the call does not count.
    /// - `InvalidState` for `send`, `recv` and `all_to_all` of a communicator without
    ///   [connections](crate::CommConfig::sends) for them.
    /// - The communicator's first failure, and the stream's cause if it is poisoned.
    ///
    /// An error of another rank fails the stream, later:
    /// - `Mismatch` with two ranks' calls. In a recording it is the error of its stop.
    /// - `Timeout` if a rank does not come within the communicator's limit, and `PeerLost` if it
    ///   is gone.
    impl Comm:

    /// Reduces all ranks' elements, in place: every rank gets the same.
    #[doc(alias("ncclAllReduce", "MPI_Allreduce"))]
    all_reduce[x](reduce: Reduce) |g| { g.all_reduce_into(x, x, reduce) }

    /// Reduces all ranks' elements into other memory of as many elements.
    all_reduce_into[dst, src](reduce: Reduce) |g| {
        let kind = Kind::AllReduce(reduce);
        reduce.check(T::TYPE)?;
        g.draft(kind, Group::alike(kind, src.len(), dst.len())?, Some(src), Some(dst))
    }

    /// Gathers all ranks' elements, in the order of the ranks: `dst` has `size` times as many as
    /// `src`. `src` may be this rank's part of `dst`.
    #[doc(alias("ncclAllGather", "MPI_Allgather"))]
    all_gather[dst, src]() |g| {
        let count = g.part(Kind::AllGather, src.len(), dst.len())?;
        g.draft(Kind::AllGather, count, Some(src), Some(dst))
    }

    /// Reduces all ranks' elements, and gives each rank its part: `src` has `size` times as many
    /// as `dst`. `dst` may be this rank's part of `src`.
    #[doc(alias("ncclReduceScatter", "MPI_Reduce_scatter_block"))]
    reduce_scatter[dst, src](reduce: Reduce) |g| {
        let kind = Kind::ReduceScatter(reduce);
        reduce.check(T::TYPE)?;
        g.draft(kind, g.part(kind, dst.len(), src.len())?, Some(src), Some(dst))
    }

    /// Gives every rank the root's elements, in place.
    #[doc(alias("ncclBroadcast", "ncclBcast", "MPI_Bcast"))]
    broadcast[x](root: u32) |g| {
        let (src, dst) = if root == g.rank { (Some(x), None) } else { (None, Some(x)) };
        g.draft(Kind::Broadcast { root }, x.len(), src, dst)
    }

    /// Reduces all ranks' elements into the root's. The others keep theirs.
    #[doc(alias("ncclReduce", "MPI_Reduce"))]
    reduce[x](reduce: Reduce, root: u32) |g| {
        reduce.check(T::TYPE)?;
        let dst = (root == g.rank).then_some(x);
        g.draft(Kind::Reduce { reduce, root }, x.len(), Some(x), dst)
    }

    /// Gives each rank its part of this rank's elements: part `r` of `src` goes to rank `r`, and
    /// part `r` of `dst` comes from it. Both have `size` parts.
    #[doc(alias("ncclAlltoAll", "MPI_Alltoall"))]
    all_to_all[dst, src]() |g| {
        let count = Group::alike(Kind::AllToAll, src.len(), dst.len())?;
        let part = g.part(Kind::AllToAll, count / g.size as usize, count)?;
        g.draft(Kind::AllToAll, part, Some(src), Some(dst))
    }

    /// Sends elements to another rank, which receives as many. It may wait for that rank; two
    /// ranks that send to each other do so in [groups](Comm::group).
    #[doc(alias("ncclSend", "MPI_Send"))]
    send[src](to: u32) |g| { g.draft(Kind::Send { to }, src.len(), Some(src), None) }

    /// Receives what another rank sends.
    #[doc(alias("ncclRecv", "MPI_Recv"))]
    recv[dst](from: u32) |g| { g.draft(Kind::Recv { from }, dst.len(), None, Some(dst)) }
}

impl Comm {
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
