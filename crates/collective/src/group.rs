//! Calls before their submission: what they are about, and whether they can be right.
//!
//! This module must not know streams or libraries.

use crate::element::{Element, ElementType};
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
    pub(crate) rank: u32,
    pub(crate) size: u32,
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
    let [a, b] = [a, b].map(|extent| extent.from..extent.from + extent.bytes);
    let name = kind.name();
    Error::invalid(format!(
        "{name}: bytes {a:?} and {b:?} of one buffer overlap, and one of them is written; use memory of its own"
    ))
}

impl<'a> Group<'a> {
    pub(crate) fn new(rank: u32, size: u32) -> Self {
        Self { rank, size, drafts: SmallVec::new() }
    }

    pub(crate) fn draft<T: Element>(
        &mut self,
        kind: Kind,
        count: usize,
        src: Option<ArrayView<'a, T>>,
        dst: Option<ArrayView<'a, T>>,
    ) -> Result<()> {
        let (name, size) = (kind.name(), T::TYPE.size());
        let [src, dst] = [src, dst].map(|part| part.map(ArrayView::view));
        if let Some(part) =
            [src, dst].into_iter().flatten().find(|p| !p.offset().is_multiple_of(size))
        {
            let (offset, element) = (part.offset(), T::TYPE);
            return Err(Error::invalid(format!(
                "{name}: a part that begins at byte {offset} is not aligned to {element}; begin at a multiple of {size} bytes"
            )));
        }
        let rank = match kind {
            Kind::Broadcast { root } | Kind::Reduce { root, .. } => Some(("the root", root)),
            _ => kind.peer().map(|peer| ("the other rank", peer)),
        };
        if let Some((role, rank)) = rank
            && rank >= self.size
        {
            let last = self.size - 1;
            return Err(Error::invalid(format!(
                "{name}: {role} is {rank}, and the communicator has ranks 0 to {last}"
            )));
        }
        if kind.peer() == Some(self.rank) {
            return Err(Error::invalid(format!(
                "{name}: the other rank is this one; copy by Stream::copy"
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
    pub(crate) fn part(&self, kind: Kind, part: usize, whole: usize) -> Result<usize> {
        let (name, size) = (kind.name(), self.size as usize);
        if part.checked_mul(size) != Some(whole) {
            let all = part.saturating_mul(size);
            return Err(Error::invalid(format!(
                "{name}: {part} elements for each of {size} ranks are not {whole}; give {part} and {all}"
            )));
        }
        Ok(part)
    }

    pub(crate) fn alike(kind: Kind, src: usize, dst: usize) -> Result<usize> {
        if src != dst {
            return Err(Error::invalid(format!(
                "{}: {src} elements do not go to {dst}; give as many",
                kind.name()
            )));
        }
        Ok(src)
    }
}

impl Group<'_> {
    /// As [`Comm::barrier`](crate::Comm::barrier).
    ///
    /// # Errors
    /// None.
    pub fn barrier(&mut self) -> Result<()> {
        self.draft::<u8>(Kind::Barrier, 0, None, None)
    }
}
