//! Calls before their submission: what they are about, and whether they can be right.
//!
//! This module must not know streams or libraries.

use crate::element::{Element, ElementType, Reduce};
use crate::signature::Kind;
use leasehold::{ArrayView, BufferView, Error, Result};

/// A call that was checked as far as one rank can.
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
    pub(crate) drafts: Vec<Draft<'a>>,
}

/// A part of a buffer, to be compared with others.
struct Extent<'a, 'b> {
    view: &'b BufferView<'a>,
    writes: bool,
    draft: usize,
}

impl Extent<'_, '_> {
    fn meets(&self, other: &Self) -> bool {
        let (a, b) = (self.view, other.view);
        a.buffer().same(b.buffer())
            && !a.is_empty()
            && !b.is_empty()
            && a.offset() < b.offset() + b.len()
            && b.offset() < a.offset() + a.len()
    }

    fn is(&self, other: &Self) -> bool {
        (self.view.offset(), self.view.len()) == (other.view.offset(), other.view.len())
    }
}

impl<'a> Group<'a> {
    pub(crate) fn new(rank: u32, size: u32) -> Self {
        Self { rank, size, drafts: Vec::new() }
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

    /// Checks that no call writes what another one uses, and that each uses its own memory as it
    /// may.
    pub(crate) fn check(&self) -> Result<()> {
        let extents: Vec<Extent<'a, '_>> = std::iter::zip(0.., &self.drafts)
            .flat_map(|(draft, d)| {
                let part = move |view, writes| Extent { view, writes, draft };
                [d.src.as_ref().map(|v| part(v, false)), d.dst.as_ref().map(|v| part(v, true))]
            })
            .flatten()
            .collect();
        for (i, a) in extents.iter().enumerate() {
            for b in &extents[i + 1..] {
                if (a.writes || b.writes) && a.meets(b) && !self.in_place(a, b) {
                    let kind = self.drafts[a.draft].kind.name();
                    return Err(Error::invalid(format!(
                        "{kind}: bytes {}..{} and {}..{} of one buffer overlap, and one of them is written; use memory of its own",
                        a.view.offset(),
                        a.view.offset() + a.view.len(),
                        b.view.offset(),
                        b.view.offset() + b.view.len()
                    )));
                }
            }
        }
        Ok(())
    }

    /// Returns whether the two are source and destination of a call that may work in place.
    fn in_place(&self, src: &Extent<'_, '_>, dst: &Extent<'_, '_>) -> bool {
        let draft = &self.drafts[src.draft];
        let own = |whole: &BufferView<'_>, part: &BufferView<'_>| {
            part.offset() == whole.offset() + u64::from(self.rank) * part.len()
        };
        src.draft == dst.draft
            && match draft.kind {
                Kind::AllReduce(_) | Kind::Reduce { .. } => src.is(dst),
                Kind::AllGather => own(dst.view, src.view),
                Kind::ReduceScatter(_) => own(src.view, dst.view),
                _ => false,
            }
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
