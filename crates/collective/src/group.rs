//! Calls before their submission: what they are about, and whether they can be right.
//!
//! This module must not know streams or libraries.

use crate::element::{Element, ElementType, Reduce};
use crate::signature::Kind;
use leasehold::{ArrayView, Buffer, BufferView, Error, Result};
use smallvec::SmallVec;

/// A call that was checked as far as one rank can.
#[derive(Clone, Copy)]
pub(crate) struct Draft<'a> {
    pub(crate) kind: Kind,
    pub(crate) element: ElementType,
    pub(crate) count: u64,
    pub(crate) src: Option<BufferView<'a>>,
    /// The same as `src` if the call works in place.
    pub(crate) dst: Option<BufferView<'a>>,
}

/// Calls that are submitted together: none of them waits for another one of them. Made by
/// [`Comm::group`](crate::Comm::group).
pub struct Group<'a> {
    rank: u32,
    size: u32,
    /// The most usual group has one call, and allocates nothing.
    pub(crate) drafts: SmallVec<[Draft<'a>; 1]>,
}

/// Memory of a call: bytes of a space, which is a buffer or a device's addresses.
#[derive(Clone, Copy)]
pub(crate) struct Extent<S> {
    pub(crate) space: S,
    pub(crate) from: u64,
    pub(crate) bytes: u64,
}

/// The memory that a call reads, and the memory that it writes.
pub(crate) struct Uses<S> {
    pub(crate) kind: Kind,
    pub(crate) src: Option<Extent<S>>,
    pub(crate) dst: Option<Extent<S>>,
}

impl<S: PartialEq> Extent<S> {
    fn meets(&self, other: &Self) -> bool {
        self.space == other.space
            && self.bytes != 0
            && other.bytes != 0
            && self.from < other.from + other.bytes
            && other.from < self.from + self.bytes
    }

    fn is(&self, other: &Self) -> bool {
        (self.from, self.bytes) == (other.from, other.bytes)
    }

    /// Returns whether the two are source and destination of a call that may work in place.
    fn in_place(&self, dst: &Self, kind: Kind, rank: u32) -> bool {
        let own =
            |whole: &Self, part: &Self| part.from == whole.from + u64::from(rank) * part.bytes;
        match kind {
            Kind::AllReduce(_) | Kind::Reduce { .. } => self.is(dst),
            Kind::AllGather => own(dst, self),
            Kind::ReduceScatter(_) => own(self, dst),
            _ => false,
        }
    }
}

/// Checks that no call of a group writes what another one uses, and that each uses its own memory
/// as it may. `of` gives the calls by their places.
///
/// # Errors
/// `InvalidArgument` that names both.
#[inline]
pub(crate) fn check_apart<S: PartialEq>(
    calls: usize,
    of: impl Fn(usize) -> Uses<S>,
    rank: u32,
) -> Result<()> {
    for i in 0..calls {
        let a = of(i);
        if let (Some(src), Some(dst)) = (&a.src, &a.dst)
            && src.meets(dst)
            && !src.in_place(dst, a.kind, rank)
        {
            return Err(overlap(a.kind, src, dst));
        }
        for b in (i + 1..calls).map(&of) {
            // Two sources may be the same.
            for (one, other) in [(&a.src, &b.dst), (&a.dst, &b.src), (&a.dst, &b.dst)] {
                if let (Some(one), Some(other)) = (one, other)
                    && one.meets(other)
                {
                    return Err(overlap(a.kind, one, other));
                }
            }
        }
    }
    Ok(())
}

#[cold]
fn overlap<S>(kind: Kind, a: &Extent<S>, b: &Extent<S>) -> Error {
    Error::invalid(format!(
        "{}: bytes {}..{} and {}..{} of one buffer overlap, and one of them is written; use memory of its own",
        kind.name(),
        a.from,
        a.from + a.bytes,
        b.from,
        b.from + b.bytes
    ))
}

impl<'a> Group<'a> {
    pub(crate) fn new(rank: u32, size: u32) -> Self {
        Self { rank, size, drafts: SmallVec::new() }
    }

    fn draft<T: Element>(
        &mut self,
        kind: Kind,
        count: usize,
        src: Option<ArrayView<'a, T>>,
        dst: Option<ArrayView<'a, T>>,
    ) -> Result<()> {
        let size = T::TYPE.size();
        let [src, dst] = [src, dst].map(|part| part.map(ArrayView::view));
        if let Some(part) =
            [src, dst].into_iter().flatten().find(|p| !p.offset().is_multiple_of(size))
        {
            return Err(Error::invalid(format!(
                "{}: a part that begins at byte {} is not aligned to {}; begin at a multiple of {size} bytes",
                kind.name(),
                part.offset(),
                T::TYPE
            )));
        }
        let rank = match kind {
            Kind::Broadcast { root } | Kind::Reduce { root, .. } => Some(("the root", root)),
            _ => kind.peer().map(|peer| ("the other rank", peer)),
        };
        if let Some((role, rank)) = rank
            && rank >= self.size
        {
            return Err(Error::invalid(format!(
                "{}: {role} is {rank}, and the communicator has ranks 0 to {}",
                kind.name(),
                self.size - 1
            )));
        }
        if kind.peer() == Some(self.rank) {
            return Err(Error::invalid(format!(
                "{}: the other rank is this one; copy by Stream::copy",
                kind.name()
            )));
        }
        self.drafts.push(Draft { kind, element: T::TYPE, count: count as u64, src, dst });
        Ok(())
    }

    /// Checks that no call writes what another one uses.
    pub(crate) fn check(&self) -> Result<()> {
        let extent = |view: &BufferView<'_>| Extent {
            space: std::ptr::from_ref::<Buffer>(view.buffer()),
            from: view.offset(),
            bytes: view.len(),
        };
        let uses = |call: usize| {
            let Draft { kind, src, dst, .. } = &self.drafts[call];
            Uses { kind: *kind, src: src.as_ref().map(extent), dst: dst.as_ref().map(extent) }
        };
        check_apart(self.drafts.len(), uses, self.rank)
    }

    /// The elements of each rank's part.
    fn part(&self, kind: Kind, part: usize, whole: usize) -> Result<usize> {
        if part.checked_mul(self.size as usize) != Some(whole) {
            return Err(Error::invalid(format!(
                "{}: {part} elements for each of {} ranks are not {whole}; give {} and {}",
                kind.name(),
                self.size,
                part,
                part.saturating_mul(self.size as usize)
            )));
        }
        Ok(part)
    }

    fn alike(kind: Kind, src: usize, dst: usize) -> Result<usize> {
        if src != dst {
            return Err(Error::invalid(format!(
                "{}: {src} elements do not go to {dst}; give as many",
                kind.name()
            )));
        }
        Ok(src)
    }

    /// As [`Comm::all_reduce`](crate::Comm::all_reduce).
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce<T: Element>(
        &mut self,
        x: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        let x = x.into();
        self.all_reduce_into(x, x, reduce)
    }

    /// As [`Comm::all_reduce_into`](crate::Comm::all_reduce_into).
    ///
    /// # Errors
    /// As there.
    pub fn all_reduce_into<T: Element>(
        &mut self,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        let (dst, src, kind) = (dst.into(), src.into(), Kind::AllReduce(reduce));
        reduce.check(T::TYPE)?;
        let count = Self::alike(kind, src.len(), dst.len())?;
        self.draft(kind, count, Some(src), Some(dst))
    }

    /// As [`Comm::all_gather`](crate::Comm::all_gather).
    ///
    /// # Errors
    /// As there.
    pub fn all_gather<T: Element>(
        &mut self,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
    ) -> Result<()> {
        let (dst, src) = (dst.into(), src.into());
        let count = self.part(Kind::AllGather, src.len(), dst.len())?;
        self.draft(Kind::AllGather, count, Some(src), Some(dst))
    }

    /// As [`Comm::reduce_scatter`](crate::Comm::reduce_scatter).
    ///
    /// # Errors
    /// As there.
    pub fn reduce_scatter<T: Element>(
        &mut self,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
    ) -> Result<()> {
        let (dst, src, kind) = (dst.into(), src.into(), Kind::ReduceScatter(reduce));
        reduce.check(T::TYPE)?;
        let count = self.part(kind, dst.len(), src.len())?;
        self.draft(kind, count, Some(src), Some(dst))
    }

    /// As [`Comm::broadcast`](crate::Comm::broadcast).
    ///
    /// # Errors
    /// As there.
    pub fn broadcast<T: Element>(
        &mut self,
        x: impl Into<ArrayView<'a, T>>,
        root: u32,
    ) -> Result<()> {
        let x = x.into();
        let (src, dst) = if root == self.rank { (Some(x), None) } else { (None, Some(x)) };
        self.draft(Kind::Broadcast { root }, x.len(), src, dst)
    }

    /// As [`Comm::reduce`](crate::Comm::reduce).
    ///
    /// # Errors
    /// As there.
    pub fn reduce<T: Element>(
        &mut self,
        x: impl Into<ArrayView<'a, T>>,
        reduce: Reduce,
        root: u32,
    ) -> Result<()> {
        let x = x.into();
        reduce.check(T::TYPE)?;
        let dst = (root == self.rank).then_some(x);
        self.draft(Kind::Reduce { reduce, root }, x.len(), Some(x), dst)
    }

    /// As [`Comm::all_to_all`](crate::Comm::all_to_all).
    ///
    /// # Errors
    /// As there.
    pub fn all_to_all<T: Element>(
        &mut self,
        dst: impl Into<ArrayView<'a, T>>,
        src: impl Into<ArrayView<'a, T>>,
    ) -> Result<()> {
        let (dst, src, kind) = (dst.into(), src.into(), Kind::AllToAll);
        let count = Self::alike(kind, src.len(), dst.len())?;
        let part = self.part(kind, count / self.size as usize, count)?;
        self.draft(kind, part, Some(src), Some(dst))
    }

    /// As [`Comm::send`](crate::Comm::send).
    ///
    /// # Errors
    /// As there.
    pub fn send<T: Element>(&mut self, src: impl Into<ArrayView<'a, T>>, to: u32) -> Result<()> {
        let src = src.into();
        self.draft(Kind::Send { to }, src.len(), Some(src), None)
    }

    /// As [`Comm::recv`](crate::Comm::recv).
    ///
    /// # Errors
    /// As there.
    pub fn recv<T: Element>(&mut self, dst: impl Into<ArrayView<'a, T>>, from: u32) -> Result<()> {
        let dst = dst.into();
        self.draft(Kind::Recv { from }, dst.len(), None, Some(dst))
    }

    /// As [`Comm::barrier`](crate::Comm::barrier).
    ///
    /// # Errors
    /// None.
    pub fn barrier(&mut self) -> Result<()> {
        self.draft::<u8>(Kind::Barrier, 0, None, None)
    }
}
