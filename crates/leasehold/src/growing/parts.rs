//! Growing parts side by side, which a kernel binds as one.
//!
//! Each part is a growing block of its own, and all lie in one reservation. Work names them by one
//! buffer over that reservation, so there is one record of uses, and one binding.

use super::{Source, Words, core_of, in_recording, limits, write_words};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Stream, StreamCore};
use crate::view::{BufferView, Operand, View};
use leasehold_alloc::{Allocator, Buffer};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::Access;
use std::fmt;
use std::ops::Range;

/// Equal parts side by side, each in memory that grows in place. Clones are the same parts.
///
/// A kernel that keeps to [limits](Self::limits) binds all parts at once, by their
/// [reservation](Self::reservation). No other work reaches them. All lengths are bytes. Any thread
/// may grow and shrink parts.
///
/// ```
/// use leasehold::prelude::*;
/// use leasehold::growing::GrowingParts;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// // The keys and the values of four sequences, of at most 64 MiB each.
/// let parts = GrowingParts::new(&runtime, 8, 64 << 20)?;
/// parts.grow(runtime.stream(), 2..4, 1 << 20)?;
/// assert_eq!([1, 2, 3].map(|part| parts.len(part)), [0, 1 << 20, 1 << 20]);
/// assert!(parts.committed() < parts.most() * 8);
/// parts.shrink(runtime.stream(), 2..4, 0)?;
/// assert_eq!(parts.committed(), 0);
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct GrowingParts {
    shared: Arc<Shared>,
}

struct Shared {
    /// The buffer that work uses: the addresses of all parts. It keeps them while work uses it.
    buffer: Lease<Buffer>,
    /// A limit for each part, and behind the limits the shared bytes of each part.
    limits: Lease<Buffer>,
    parts: Arc<[Lease<Buffer>]>,
    /// A pool's memory, if `parts` are of a pool.
    source: Option<Box<dyn Source>>,
    /// Bytes from a part to the next one.
    each: u64,
    /// Held from a change of lengths until the limits are written. The shared bytes that the device
    /// knows of each part, once there was a fork.
    turn: Mutex<Vec<u64>>,
    runtime: Arc<RuntimeInner>,
}

impl GrowingParts {
    /// `count` parts of at most `most` bytes each, rounded up to what the device maps at once.
    /// All of them have length 0. Blocks on the driver for the addresses.
    ///
    /// # Errors
    /// `Unsupported` on a device without virtual memory management
    /// ([`Caps::growing`](leasehold_hal::Caps::growing)); `InvalidArgument` for no bytes, or more
    /// than there are addresses; `OutOfMemory`; `OverBudget`; `Recording`; the cause of a default
    /// stream that has failed; the driver's.
    pub fn new(runtime: &Runtime, count: usize, most: u64) -> Result<Self> {
        runtime.stream().live(in_recording())?;
        if !runtime.raw_device().caps().growing {
            return Err(Error::Unsupported(
                format!(
                    "{} has no memory that grows; use buffers of the maximum",
                    runtime.device()
                )
                .into(),
            ));
        }
        let memory = runtime.allocator();
        let parts: Arc<[_]> = memory.growing_parts(count, most)?.into();
        // SAFETY: the parts are this call's, and nobody else's while the import keeps them.
        let buffer = unsafe { memory.import_growing(&parts[0], Box::new(parts.clone())) }?;
        Self::over(runtime, parts, most.next_multiple_of(memory.caps().granule), buffer, None)
    }

    /// Growing parts over blocks of `each` bytes side by side, which work uses by an import.
    pub(crate) fn over(
        runtime: &Runtime,
        parts: Arc<[Lease<Buffer>]>,
        each: u64,
        buffer: Lease<Buffer>,
        source: Option<Box<dyn Source>>,
    ) -> Result<Self> {
        let core = runtime.stream().live(in_recording())?;
        let count = parts.len() as u64;
        let limits = limits(runtime, core, count)?;
        let (turn, runtime) = (Mutex::default(), runtime.inner.clone());
        let shared = Shared { buffer, limits, parts, source, each, turn, runtime };
        write_words(core, &[shared.words(&[])], &[])?;
        Ok(Self { shared: Arc::new(shared) })
    }

    /// The number of parts.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.parts.len()
    }

    /// The most bytes that a part can have. Also the bytes from a part to the next one.
    #[must_use]
    pub fn most(&self) -> u64 {
        self.shared.each
    }

    /// The bytes of a part that have memory.
    ///
    /// # Panics
    /// When there is no such part.
    #[must_use]
    #[track_caller]
    pub fn len(&self, part: usize) -> u64 {
        self.shared.parts[part].len()
    }

    /// Returns whether no part has memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.committed() == 0
    }

    /// The bytes of all parts that have memory.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.shared.parts.iter().map(|part| part.len()).sum()
    }

    /// All parts, for a kernel that keeps to the [limits](Self::limits) when it touches this
    /// binding ([`KernelDesc::limited_by`](leasehold_hal::KernelDesc::limited_by)). A launch with
    /// any other kernel is refused, and so is every other operation.
    #[must_use]
    pub fn reservation(&self, access: Access) -> Operand<'_> {
        let len = self.shared.each * self.shared.parts.len() as u64;
        let view = BufferView { lease: &self.shared.buffer, offset: 0, len };
        Operand { limit: Some(&self.shared.limits), ..view.with(access) }
    }

    /// Words of 64 bits on the device, which nobody else can write: the bytes of each part that
    /// have memory, and behind these the bytes of each part that are [shared](Self::fork). A kernel
    /// writes none of those.
    #[must_use]
    pub fn limits(&self) -> Operand<'_> {
        self.shared.limits.read()
    }

    /// Makes each of some parts at least `bytes` long. Memory that lies free is taken first, then
    /// the driver's. May block on the driver, and does not wait for the device. The contents of
    /// what is new are not specified.
    ///
    /// The limits are written on `stream`. A launch that is submitted after the call sees them, on
    /// any stream.
    ///
    /// All or nothing: after an error all parts are as they were. Calls of several threads take
    /// turns; only one at a time can take memory for a part.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the maximum, for parts that there are not, and for a stream of
    /// another device; `OverBudget`; `OutOfMemory` with a report; `Occupied` while another thread
    /// takes memory for one of the parts, and while this thread has a session open on the stream;
    /// `Recording` for a recording's stream; `Suspended` for parts of a suspended pool; the cause
    /// of a stream that has failed; the driver's.
    pub fn grow(&self, stream: &Stream, parts: Range<usize>, bytes: u64) -> Result<()> {
        self.shared.core(stream)?;
        self.prepare(parts.clone(), bytes)?;
        let grow =
            |memory: &Allocator, part: &Lease<Buffer>| memory.grow(part, bytes).map(|()| true);
        self.shared.commit(stream, parts, bytes, &grow).map(drop)
    }

    /// As [`grow`](Self::grow), but only with memory that is mapped there already, by
    /// [`prepare`](Self::prepare) or because the parts were longer before. Calls no driver for
    /// memory. `false`: not so much is mapped, and nothing has changed.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn try_grow(&self, stream: &Stream, parts: Range<usize>, bytes: u64) -> Result<bool> {
        self.shared.core(stream)?;
        self.shared.check(&parts, bytes)?;
        let grow = |memory: &Allocator, part: &Lease<Buffer>| memory.try_grow(part, bytes);
        self.shared.commit(stream, parts, bytes, &grow)
    }

    /// Takes memory for the first `bytes` of each of some parts without making them longer, so
    /// that [`try_grow`](Self::try_grow) finds it: from a thread beside the one that launches.
    /// Other allocations take it back before they fail.
    ///
    /// # Errors
    /// As [`grow`](Self::grow). Memory that was taken before the error stays, for the next growth.
    pub fn prepare(&self, parts: Range<usize>, bytes: u64) -> Result<()> {
        self.shared.check(&parts, bytes)?;
        let parts = &self.shared.parts[parts];
        self.shared
            .source(&mut |memory| parts.iter().try_for_each(|part| memory.prepare(part, bytes)))
    }

    /// Makes each of some parts at most `bytes` long. The memory beyond goes back to the allocator
    /// after its last use, when the allocator needs it. Until then it stays mapped, and the next
    /// growth finds it. Does not wait for the device, and calls no driver for memory.
    ///
    /// # Errors
    /// `InvalidArgument` for parts that there are not, and for a stream of another device;
    /// `Occupied` while this thread has a session open on the stream; `Recording` for a recording's
    /// stream; `Suspended` for parts of a suspended pool; the cause of a stream that has failed;
    /// the driver's. The limits are as they were then, or all of them are shorter.
    pub fn shrink(&self, stream: &Stream, parts: Range<usize>, bytes: u64) -> Result<()> {
        let core = self.shared.core(stream)?;
        self.shared.check(&parts, 0)?;
        let _turn = self.shared.turn.lock();
        let longer = parts.filter(|&part| self.shared.parts[part].len() > bytes);
        let longer: Vec<_> = longer.map(|part| (part as u64, bytes)).collect();
        if longer.is_empty() { Ok(()) } else { self.shared.shorten(core, &longer, true) }
    }

    /// The bytes at the beginning of a part that are shared with others, or were: no kernel writes
    /// them. 0 without a [fork](Self::fork). They may be more than the length.
    ///
    /// # Panics
    /// When there is no such part.
    #[must_use]
    #[track_caller]
    pub fn shared(&self, part: usize) -> u64 {
        self.shared.parts[part].shared()
    }

    /// Gives part `to`, of length 0, the whole granules of the first `bytes` of part `from`: both
    /// have the same memory, and no kernel writes it any more. Returns the new length of `to`. It
    /// is less than `bytes` where these end within a granule, or within several that the device
    /// maps at once. Memory that `to` had before goes. The limits are written on `stream`. May
    /// block on the driver, and does not wait for the device.
    ///
    /// Shared memory lives as long as one of its parts uses it. The last one may not write it
    /// either. A part that is shrunk below it and grows again gets memory of its own there, but for
    /// the granule with the new length's end.
    ///
    /// # Errors
    /// `InvalidArgument` for a part that there is not, one part twice, and bytes beyond the length;
    /// `InvalidState` if `to` has a length; `Occupied` while another thread takes memory for `to`,
    /// or work may use memory that it had, and while this thread has a session open on the stream;
    /// `Unsupported` for parts of a pool, and where memory has one address
    /// ([`Caps::forks`](leasehold_hal::Caps::forks)); `Recording` for a recording's stream; the
    /// cause of a stream that has failed; the driver's. The lengths are as they were then. What was
    /// to be shared may stay without writes.
    pub fn fork(&self, stream: &Stream, from: usize, to: usize, bytes: u64) -> Result<u64> {
        let core = self.shared.core(stream)?;
        for part in [from, to] {
            self.shared.check(&(part..part.saturating_add(1)), 0)?;
        }
        if self.shared.source.is_some() {
            return Err(super::of_a_pool());
        }
        let mut turn = self.shared.turn.lock();
        let (memory, parts) = (&self.shared.runtime.memory, &self.shared.parts);
        turn.resize(parts.len(), 0);
        // SAFETY: work that writes what is shared was submitted before, and is in the record that
        // all parts have. Later submissions find how much is shared in the words, which the next
        // submission writes.
        let len = unsafe { memory.fork(&parts[from], &parts[to], bytes) }?;
        let mut values = vec![(to as u64, len)];
        self.shared.note_shared(&turn, [from, to].into_iter(), &mut values);
        write_words(core, &[self.shared.words(&values)], &[]).inspect_err(|_| {
            // If the record cannot be locked, the part stays longer than its limit says, which does
            // no harm.
            let _ = self.shared.shorten(core, &[(to as u64, 0)], false);
        })?;
        [from, to].into_iter().for_each(|part| turn[part] = parts[part].shared());
        Ok(len)
    }
}

impl Shared {
    fn core<'s>(&self, stream: &'s Stream) -> Result<&'s StreamCore> {
        core_of(stream, &self.runtime)
    }

    /// Calls `f` with the allocator of the parts, again where it lacked memory.
    fn source(&self, f: &mut dyn FnMut(&Allocator) -> Result<()>) -> Result<()> {
        match &self.source {
            Some(source) => source.with(&mut |allocator, _| f(allocator)),
            None => f(&self.runtime.memory),
        }
    }

    fn check(&self, parts: &Range<usize>, bytes: u64) -> Result<()> {
        let count = self.parts.len();
        if parts.start > parts.end || parts.end > count {
            return Err(Error::invalid(format!(
                "parts {parts:?} of {count}; end at {count} at most, and begin no later"
            )));
        }
        if bytes > self.each {
            return Err(Error::invalid(format!(
                "{bytes} bytes of parts of {} at most; make them with a larger maximum",
                self.each
            )));
        }
        Ok(())
    }

    fn words<'a>(&'a self, values: &'a [(u64, u64)]) -> Words<'a> {
        Words { buffer: &self.limits, values, large: self.each > u64::from(u32::MAX) }
    }

    /// Adds the shared bytes of those parts of which the device knows another number.
    fn note_shared(
        &self,
        known: &[u64],
        parts: impl Iterator<Item = usize>,
        values: &mut Vec<(u64, u64)>,
    ) {
        let now = |part: usize| (part, self.parts[part].shared());
        let differs =
            |&(part, shared): &(usize, u64)| known.get(part).is_some_and(|k| *k != shared);
        let word = |part: usize| (self.parts.len() + part) as u64;
        values.extend(parts.map(now).filter(differs).map(|(part, own)| (word(part), own)));
    }

    /// Makes parts longer by what `grow` does. `false`: it did not, and all are as they were.
    fn commit(
        &self,
        stream: &Stream,
        parts: Range<usize>,
        bytes: u64,
        grow: &dyn Fn(&Allocator, &Lease<Buffer>) -> Result<bool>,
    ) -> Result<bool> {
        let core = self.core(stream)?;
        let mut turn = self.turn.lock();
        let mut before = Vec::with_capacity(parts.len());
        let mut fine = true;
        let grown = self.source(&mut |memory| {
            for at in parts.clone() {
                let (part, len) = (&self.parts[at], self.parts[at].len());
                if len >= bytes {
                    continue;
                }
                fine = grow(memory, part)?;
                if !fine {
                    break;
                }
                before.push((at as u64, len));
            }
            Ok(())
        });
        let mut result = grown.map(|()| fine);
        if matches!(result, Ok(true)) && !before.is_empty() {
            let mut values: Vec<_> = before.iter().map(|(at, _)| (*at, bytes)).collect();
            let grown = || before.iter().map(|(at, _)| *at as usize);
            self.note_shared(&turn, grown(), &mut values);
            result = write_words(core, &[self.words(&values)], &[]).map(|()| true);
            if result.is_ok() && !turn.is_empty() {
                grown().for_each(|part| turn[part] = self.parts[part].shared());
            }
        }
        if !matches!(result, Ok(true)) {
            // If the record cannot be locked, the parts stay longer than their limits say, which
            // does no harm.
            let _ = self.shorten(core, &before, false);
        }
        result
    }

    /// Makes parts as short as they are to be. `limits`: writes that first.
    fn shorten(&self, core: &StreamCore, parts: &[(u64, u64)], limits: bool) -> Result<()> {
        let words = self.words(if limits { parts } else { &[] });
        // A pool's state is locked before a record, as by a suspension.
        self.source(&mut |memory| {
            super::shorten(core, words, &self.buffer, || {
                let mut shrunk = Ok(());
                for &(at, bytes) in parts {
                    let part = &self.parts[at as usize];
                    // SAFETY: all work that was submitted with these bytes is in the record, which
                    // is locked. Later submissions find the limit that was just written, or the one
                    // from before the growth.
                    let one = unsafe { memory.shrink(part, bytes, &self.buffer) };
                    shrunk = shrunk.and(one);
                }
                shrunk
            })
        })
    }
}

impl fmt::Debug for GrowingParts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "GrowingParts({} of {} bytes at most, {} in all, {:?})",
            self.count(),
            self.most(),
            self.committed(),
            self.shared.buffer.handle()
        )
    }
}
