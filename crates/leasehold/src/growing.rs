//! Memory that grows in place: addresses for a maximum, memory for what is in use.
//!
//! A KV cache has room for its longest text, and most texts are short. A [`Growing`] reserves the
//! addresses of the maximum, and takes memory as it grows. Its address never changes, so views and
//! recorded graphs stay valid. The memory comes from the runtime's own allocator, from under free
//! buffers first, and goes back to it.
//!
//! # Bytes beyond the end
//! Work that names bytes beyond the end is refused: a copy, a fill, a launch, and a launch of a
//! graph that was recorded when the buffer was longer. A kernel of a graph must reach bytes that
//! come later, and the host does not know how far it will read. Such a kernel binds the
//! [reservation](Growing::reservation), and the buffer's [limit](Growing::limit) beside it: 8 bytes
//! on the device with the number of bytes that have memory. It declares that it keeps to the limit
//! ([`KernelDesc::limited_by`](leasehold_hal::KernelDesc::limited_by)). A growth writes the limit
//! on a stream after the memory is there, and a shrink before the memory may go.
//!
//! # Memory that several have
//! A [fork](Growing::fork) has the first granules of another buffer, with no memory of its own.
//! From then on nobody writes these bytes. A copy, fill or launch that writes them is refused. A
//! kernel that keeps to the limit finds a second word behind it, the number of bytes that are
//! shared, and writes none below it.
//!
//! # Many that a kernel binds as one
//! A buffer [with parts](Growing::with_parts) has equal parts side by side, of which each grows by
//! itself. A kernel binds all of them at once, with a limit for each: the caches of sequences that
//! are decoded together. Each part is a block of its own, and all lie in one reservation. Work
//! names them by one buffer over that reservation, so there is one record of uses.

mod words;

use crate::array::{Array, ArrayView};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Stream, StreamInner};
use crate::view::{BufferView, Operand, View};
use leasehold_alloc::{Allocator, Buffer};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::Access;
use std::fmt;
use std::marker::PhantomData;
use std::ops::{Range, RangeBounds};
use words::{Words, core_of, in_recording, limits, write_words};

/// Values of one type in memory that grows in place, up to a maximum: one part, or several side by
/// side. Clones are the same buffer.
///
/// Any thread may grow and shrink it. Only the values up to [`len`](Self::len) have memory.
///
/// ```
/// use leasehold::Growing;
/// use leasehold::prelude::*;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let cache = Growing::<f32>::new(&runtime, 100 << 20)?;
/// assert_eq!((cache.len(), cache.most()), (0, 100 << 20));
///
/// cache.grow(runtime.stream(), 4)?;
/// runtime.stream().upload(cache.view(), &[1.0f32, 2.0, 3.0, 4.0])?;
/// let addr = cache.view().addr();
/// cache.grow(runtime.stream(), 1 << 20)?;
/// assert_eq!(cache.view().addr(), addr);
/// assert_eq!(runtime.to_vec(cache.slice(..4))?, [1.0, 2.0, 3.0, 4.0]);
///
/// cache.shrink(runtime.stream(), 2)?;
/// assert_eq!(runtime.to_vec(cache.as_view())?, [1.0, 2.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Parts
/// A kernel that keeps to the [limits](Self::limit) binds all parts at once, by their
/// [reservation](Self::reservation). No other work reaches several parts, and their view has no
/// bytes. The lengths of [some parts](Self::parts) change together.
///
/// ```
/// use leasehold::Growing;
/// use leasehold::prelude::*;
/// # fn main() -> Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// // The keys and the values of four sequences, of at most 64 MiB each.
/// let caches = Growing::<u8>::with_parts(&runtime, 8, 64 << 20)?;
/// caches.parts(2..4).grow(runtime.stream(), 1 << 20)?;
/// assert_eq!([1, 2, 3].map(|part| caches.parts(part..part + 1).len()), [0, 1 << 20, 1 << 20]);
/// assert_eq!(caches.committed(), 2 << 20);
/// caches.shrink(runtime.stream(), 0)?;
/// assert!(caches.is_empty());
/// # Ok(())
/// # }
/// ```
#[doc(alias("VirtualArray", "ExpandableSegment", "KvCache"))]
pub struct Growing<T> {
    shared: Arc<Shared>,
    /// The parts that a change of the length is for.
    parts: Range<usize>,
    _values: PhantomData<fn() -> T>,
}

/// The allocator that the memory of a growing buffer comes from.
pub(crate) trait Source: Send + Sync {
    /// Calls `f` with the allocator, while the memory is there.
    ///
    /// # Errors
    /// `Suspended` while it is away; the error of `f`.
    fn with(&self, f: &mut dyn FnMut(&Allocator) -> Result<()>) -> Result<()>;
}

struct Shared {
    /// The buffer that work uses: the only part itself, or an import over the addresses of all
    /// parts, which keeps them while work uses it.
    buffer: Lease<Buffer>,
    /// A limit for each part, and behind the limits the shared bytes of each part.
    limits: Lease<Buffer>,
    parts: Arc<[Lease<Buffer>]>,
    /// A pool's memory, if `parts` are of a pool.
    source: Option<Box<dyn Source>>,
    /// Bytes from a part to the next one, and the most that a part can have.
    each: u64,
    /// Held from a change of lengths until the limits are written. The shared bytes that the device
    /// knows of each part, once there was a fork.
    turn: Mutex<Vec<u64>>,
    runtime: Arc<RuntimeInner>,
}

/// Blocks of an allocator for so many parts, and the bytes from a part to the next one.
pub(crate) fn blocks(
    memory: &Allocator,
    count: usize,
    most: u64,
) -> Result<(Arc<[Lease<Buffer>]>, u64)> {
    if count == 1 {
        return Ok(([memory.growing(most)?].into(), most));
    }
    let parts = memory.growing_parts(count, most)?;
    Ok((parts.into(), most.next_multiple_of(memory.caps().granule)))
}

impl<T> Growing<T> {
    /// A growing buffer of at most `most` values on the runtime's device, of length 0. Blocks on
    /// the driver for the addresses, unless a buffer of the same maximum was dropped before.
    ///
    /// On a device without virtual memory management
    /// ([`Caps::growing`](leasehold_hal::Caps::growing): Metal's, for one) the memory of the
    /// maximum is taken at once, and only the length changes.
    ///
    /// # Errors
    /// `InvalidArgument` for a maximum of no bytes, or more than there are addresses;
    /// `OutOfMemory`; `OverBudget`; `Recording`; the cause of a default stream that has failed; the
    /// driver's.
    pub fn new(runtime: &Runtime, most: usize) -> Result<Self> {
        Self::with_parts(runtime, 1, most)
    }

    /// As [`new`](Self::new), with `count` parts of at most `most` values each. The bytes of one of
    /// several parts are rounded up to what the device maps at once.
    ///
    /// # Errors
    /// As [`new`](Self::new); `Unsupported` for several parts on a device without virtual memory
    /// management; `InvalidArgument` for none.
    pub fn with_parts(runtime: &Runtime, count: usize, most: usize) -> Result<Self> {
        runtime.stream().live(in_recording())?;
        if count != 1 && !runtime.raw_device().caps().growing {
            return Err(Error::Unsupported(
                format!(
                    "{} has no memory that grows; use buffers of the maximum",
                    runtime.device()
                )
                .into(),
            ));
        }
        let memory = runtime.allocator();
        let (parts, each) = blocks(memory, count, Array::<T>::bytes_of(most)?)?;
        let buffer = match &*parts {
            [part] => part.clone(),
            // SAFETY: the parts are this call's, and nobody else's while the import keeps them.
            _ => unsafe { memory.import_growing(&parts[0], Box::new(parts.clone())) }?,
        };
        Self::over(runtime, parts, each, buffer, None)
    }

    /// Parts over blocks of `each` bytes side by side, which work uses by `buffer`.
    pub(crate) fn over(
        runtime: &Runtime,
        parts: Arc<[Lease<Buffer>]>,
        each: u64,
        buffer: Lease<Buffer>,
        source: Option<Box<dyn Source>>,
    ) -> Result<Self> {
        let core = runtime.stream().live(in_recording())?;
        let count = parts.len();
        let limits = limits(runtime, core, count as u64)?;
        let (turn, runtime) = (Mutex::default(), runtime.inner.clone());
        let shared = Shared { buffer, limits, parts, source, each, turn, runtime };
        write_words(core, &[shared.words(&[])], &[])?;
        Ok(Self { shared: Arc::new(shared), parts: 0..count, _values: PhantomData })
    }

    /// The number of all parts.
    #[must_use]
    pub fn count(&self) -> usize {
        self.shared.parts.len()
    }

    /// The same buffer for changes of some parts alone, which are counted among all. Parts that
    /// there are not have no length, and each change of theirs is `InvalidArgument`.
    #[must_use]
    pub fn parts(&self, parts: Range<usize>) -> Self {
        Self { parts, ..self.clone() }
    }

    /// The number of values that have memory: those of the longest of the [parts](Self::parts).
    #[must_use]
    pub fn len(&self) -> usize {
        self.chosen().iter().map(|part| self.values_of(part.len())).max().unwrap_or(0)
    }

    /// Returns whether no part has memory.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The bytes of the [parts](Self::parts) that have memory, taken together.
    #[must_use]
    pub fn committed(&self) -> u64 {
        self.chosen().iter().map(|part| part.len()).sum()
    }

    /// The most values that a part can have. Also the number of values from a part to the next one.
    #[must_use]
    pub fn most(&self) -> usize {
        self.values_of(self.shared.each)
    }

    /// The values that have memory, of a buffer with one part.
    #[must_use]
    pub fn as_view(&self) -> ArrayView<'_, T> {
        match self.view().values() {
            Ok(view) => view,
            // The length is a number of values at all times.
            Err(e) => unreachable!("{e}"),
        }
    }

    /// Some of the values of a buffer with one part.
    ///
    /// # Panics
    /// When the range does not lie in what has memory.
    #[track_caller]
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> ArrayView<'_, T> {
        self.as_view().slice(range)
    }

    /// All parts up to the maximum, for a kernel that keeps to the [limits](Self::limit) when it
    /// touches this binding
    /// ([`KernelDesc::limited_by`](leasehold_hal::KernelDesc::limited_by)). A launch with any other
    /// kernel is refused, and so is every other operation.
    #[must_use]
    pub fn reservation(&self, access: Access) -> Operand<'_> {
        let len = self.shared.each * self.shared.parts.len() as u64;
        let view = BufferView { lease: &self.shared.buffer, offset: 0, len };
        Operand { limit: Some(&self.shared.limits), ..view.with(access) }
    }

    /// Words of 64 bits on the device, which nobody else can write: the bytes of each part that
    /// have memory, and behind these the bytes at the beginning of each part that are
    /// [shared](Self::fork). A kernel writes none of those.
    #[must_use]
    pub fn limit(&self) -> Operand<'_> {
        self.shared.limits.read()
    }

    /// Makes each of the [parts](Self::parts) at least `len` values long. Memory that lies free is
    /// taken first, then the driver's. May block on the driver, and does not wait for the device.
    /// The contents of what is new are not specified.
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
    /// `Recording` for a recording's stream; `Suspended` for a buffer of a suspended pool; the
    /// cause of a stream that has failed; the driver's.
    pub fn grow(&self, stream: &Stream, len: usize) -> Result<()> {
        let core = self.shared.core(stream)?;
        let bytes = self.bytes_of(len)?;
        self.prepare(len)?;
        let grow =
            |memory: &Allocator, part: &Lease<Buffer>| memory.grow(part, bytes).map(|()| true);
        self.shared.commit(core, self.parts.clone(), bytes, &grow).map(drop)
    }

    /// As [`grow`](Self::grow), but only with memory that is mapped there already, by
    /// [`prepare`](Self::prepare) or because the buffer or another one of its maximum was longer
    /// before. Calls no driver for memory. `false`: not so much is mapped, and nothing has changed.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn try_grow(&self, stream: &Stream, len: usize) -> Result<bool> {
        let core = self.shared.core(stream)?;
        let bytes = self.bytes_of(len)?;
        let grow = |memory: &Allocator, part: &Lease<Buffer>| memory.try_grow(part, bytes);
        self.shared.commit(core, self.parts.clone(), bytes, &grow)
    }

    /// Takes memory for the first `len` values of each of the [parts](Self::parts) without making
    /// them longer, so that [`try_grow`](Self::try_grow) finds it: from a thread beside the one
    /// that launches. Other allocations take it back before they fail.
    ///
    /// # Errors
    /// As [`grow`](Self::grow). Memory that was taken before the error stays, for the next growth.
    pub fn prepare(&self, len: usize) -> Result<()> {
        let bytes = self.bytes_of(len)?;
        self.shared.source(&mut |memory| {
            self.chosen().iter().try_for_each(|part| memory.prepare(part, bytes))
        })
    }

    /// Makes each of the [parts](Self::parts) at most `len` values long. The memory beyond goes
    /// back to the allocator after its last use, when the allocator needs it. Until then it stays
    /// mapped, and the next growth finds it. Does not wait for the device, and calls no driver for
    /// memory.
    ///
    /// # Errors
    /// `InvalidArgument` for parts that there are not, and for a stream of another device;
    /// `Occupied` while this thread has a session open on the stream; `Recording` for a recording's
    /// stream; `Suspended` for a buffer of a suspended pool; the cause of a stream that has failed;
    /// the driver's. The limits are as they were then, or all of them are shorter.
    pub fn shrink(&self, stream: &Stream, len: usize) -> Result<()> {
        let core = self.shared.core(stream)?;
        let bytes = self.bytes_of(len.min(self.most()))?;
        let _turn = self.shared.turn.lock();
        let longer = self.parts.clone().filter(|&part| self.shared.parts[part].len() > bytes);
        let longer: Vec<_> = longer.map(|part| (part as u64, bytes)).collect();
        if longer.is_empty() { Ok(()) } else { self.shared.shorten(core, &longer, true) }
    }

    /// The number of values at the beginning that are shared with a fork, or were: no operation
    /// writes them. Of several [parts](Self::parts) the largest number. 0 without a fork.
    #[must_use]
    pub fn shared(&self) -> usize {
        let size = size_of::<T>().max(1) as u64;
        let shared = |part: &Lease<Buffer>| part.shared().div_ceil(size).min(part.len() / size);
        self.chosen().iter().map(shared).max().unwrap_or(0) as usize
    }

    /// Another growing buffer of the same maximum with the first `len` values of this one. The
    /// whole granules among them are shared: both buffers have the same memory, and no operation
    /// writes it any more. The rest is memory of the fork's own, with a copy on `stream`. Work with
    /// the fork comes after the work with this buffer so far. May block on the driver, and does not
    /// wait for the device.
    ///
    /// Shared memory lives as long as one of its buffers uses it. The last one may not write it
    /// either. A buffer that is shrunk below it and grows again gets memory of its own there, but
    /// for the granule with the new length's end.
    ///
    /// ```
    /// use leasehold::prelude::*;
    /// use leasehold::Growing;
    /// # fn main() -> Result<()> {
    /// # let sim = leasehold_sim::SimBackend::new(leasehold_sim::MachineConfig::seed(1))?;
    /// # let context = leasehold::Context::with_backends(vec![std::sync::Arc::new(sim)]);
    /// # let runtime = context.runtime("sim:0".parse()?)?;
    /// let prompt = Growing::<u32>::new(&runtime, 8 << 20)?;
    /// prompt.grow(runtime.stream(), 3 << 20)?;
    /// runtime.stream().fill(prompt.view(), 7u32)?;
    /// let answer = prompt.fork(runtime.stream(), 3 << 20)?;
    /// assert_eq!((answer.len(), answer.shared()), (3 << 20, 3 << 20));
    /// answer.grow(runtime.stream(), 4 << 20)?;
    /// runtime.stream().fill(answer.slice(3 << 20..).view(), 8u32)?;
    /// assert_eq!(runtime.to_vec(answer.slice(..2))?, [7, 7]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// As [`grow`](Self::grow); `InvalidArgument` beyond the length, and for a buffer with several
    /// parts; `Unsupported` where memory has one address
    /// ([`Caps::forks`](leasehold_hal::Caps::forks)), and for a pool's buffer. After an error there
    /// is no fork. What was to be shared may stay without writes.
    pub fn fork(&self, stream: &Stream, len: usize) -> Result<Self> {
        let core = self.shared.core(stream)?;
        if self.count() != 1 {
            return Err(Error::invalid("a fork of several parts; fork one to another of them"));
        }
        if len > self.len() {
            return Err(Error::invalid(format!(
                "a fork of {len} values of a growing buffer that has {}; fork what has memory",
                self.len()
            )));
        }
        self.shared.forks()?;
        let runtime = Runtime::from_inner(self.shared.runtime.clone());
        let fork = Self::new(&runtime, self.most())?;
        self.shared.fork(core, &fork.shared, self.bytes_of(len)?)?;
        let shared = fork.len();
        fork.grow(stream, len)?;
        if shared < len {
            // (A granule is a whole number of values, or the copy begins within one.)
            let own = fork.shared.buffer.shared() as usize..len * size_of::<T>();
            stream.copy(fork.part(own.clone())?, self.part(own)?)?;
        }
        Ok(fork)
    }

    /// Gives part `to`, of length 0, the whole granules of the first `len` values of part `from`:
    /// both have the same memory, and no kernel writes it any more. Returns the new length of `to`.
    /// It is less than `len` where these end within a granule, or within several that the device
    /// maps at once. Memory that `to` had before goes. The limits are written on `stream`. May
    /// block on the driver, and does not wait for the device.
    ///
    /// Shared memory lives as long as one of its parts uses it. The last one may not write it
    /// either. A part that is shrunk below it and grows again gets memory of its own there, but for
    /// the granule with the new length's end.
    ///
    /// # Errors
    /// `InvalidArgument` for a part that there is not, one part twice, and values beyond the
    /// length; `InvalidState` if `to` has a length; `Occupied` while another thread takes memory
    /// for `to`, or work may use memory that it had, and while this thread has a session open on
    /// the stream; `Unsupported` for parts of a pool, and where memory has one address
    /// ([`Caps::forks`](leasehold_hal::Caps::forks)); `Recording` for a recording's stream; the
    /// cause of a stream that has failed; the driver's. The lengths are as they were then. What was
    /// to be shared may stay without writes.
    pub fn fork_part(&self, stream: &Stream, from: usize, to: usize, len: usize) -> Result<usize> {
        let core = self.shared.core(stream)?;
        for part in [from, to] {
            self.shared.check(&(part..part.saturating_add(1)))?;
        }
        self.shared.forks()?;
        let bytes = self.bytes_of(len.min(self.most()))?;
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
        Ok(self.values_of(len))
    }

    /// The parts that a change is for: none if not all of them are there.
    fn chosen(&self) -> &[Lease<Buffer>] {
        self.shared.parts.get(self.parts.clone()).unwrap_or_default()
    }

    /// The number of values in so many bytes.
    fn values_of(&self, bytes: u64) -> usize {
        (bytes as usize).checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// The bytes of so many values of each of the parts, if there are the parts.
    fn bytes_of(&self, len: usize) -> Result<u64> {
        self.shared.check(&self.parts)?;
        let most = self.most();
        if len > most {
            return Err(Error::invalid(format!(
                "{len} values of a growing buffer of {most} at most; make it with a larger maximum"
            )));
        }
        Ok((len * size_of::<T>()) as u64)
    }
}

impl Shared {
    fn core<'s>(&self, stream: &'s Stream) -> Result<&'s StreamInner> {
        core_of(stream, &self.runtime)
    }

    /// Calls `f` with the allocator of the parts, again where it lacked memory.
    fn source(&self, f: &mut dyn FnMut(&Allocator) -> Result<()>) -> Result<()> {
        match &self.source {
            Some(source) => source.with(f),
            None => f(&self.runtime.memory),
        }
    }

    fn check(&self, parts: &Range<usize>) -> Result<()> {
        let count = self.parts.len();
        if parts.start > parts.end || parts.end > count {
            return Err(Error::invalid(format!(
                "parts {parts:?} of {count}; end at {count} at most, and begin no later"
            )));
        }
        Ok(())
    }

    /// Refuses a fork of a pool's memory: a suspension keeps the contents of each block.
    fn forks(&self) -> Result<()> {
        match self.source {
            Some(_) => Err(Error::Unsupported(
                "a fork of memory that can be suspended; copy instead".into(),
            )),
            None => Ok(()),
        }
    }

    /// The length of an import of one part is that of the part.
    fn set_len(&self, bytes: u64) {
        if self.source.is_some() && self.parts.len() == 1 {
            // SAFETY: the part has just become as long, or as short; then the caller has locked the
            // record.
            unsafe { self.runtime.memory.set_imported_len(&self.buffer, bytes) };
        }
    }

    /// Gives another buffer of one part, of length 0, the whole granules of the first `bytes`.
    fn fork(&self, core: &StreamInner, to: &Self, bytes: u64) -> Result<()> {
        let (mut turn, mut own) = (self.turn.lock(), to.turn.lock());
        [&mut turn, &mut own].into_iter().for_each(|turn| turn.resize(1, 0));
        // SAFETY: work that writes what is shared was submitted before, and the fork comes after
        // it. Later submissions find how much is shared: the runtime in the buffers, and kernels in
        // the words, which the next submission writes.
        unsafe { self.runtime.memory.fork(&self.buffer, &to.buffer, bytes) }?;
        let (from, new) =
            ([(1, self.buffer.shared())], [(0, to.buffer.len()), (1, to.buffer.shared())]);
        let ordered =
            [self.buffer.view().narrowed(0, 0).read(), to.buffer.view().narrowed(0, 0).write()];
        write_words(core, &[self.words(&from), to.words(&new)], &ordered)?;
        (turn[0], own[0]) = (self.buffer.shared(), to.buffer.shared());
        Ok(())
    }

    fn words<'a>(&'a self, values: &'a [(u64, u64)]) -> Words<'a> {
        Words { buffer: &self.limits, values }
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
        core: &StreamInner,
        parts: Range<usize>,
        bytes: u64,
        grow: &dyn Fn(&Allocator, &Lease<Buffer>) -> Result<bool>,
    ) -> Result<bool> {
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
                self.set_len(bytes);
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
    fn shorten(&self, core: &StreamInner, parts: &[(u64, u64)], limits: bool) -> Result<()> {
        let words = self.words(if limits { parts } else { &[] });
        // A pool's state is locked before a record, as by a suspension.
        self.source(&mut |memory| {
            words::shorten(core, words, &self.buffer, || {
                let mut shrunk = Ok(());
                for &(at, bytes) in parts {
                    let part = &self.parts[at as usize];
                    // SAFETY: all work that was submitted with these bytes is in the record, which
                    // is locked. Later submissions find the limit that was just written, or the one
                    // from before the growth.
                    let one = unsafe { memory.shrink(part, bytes, &self.buffer) };
                    shrunk = shrunk.and(one.map(|()| self.set_len(bytes)));
                }
                shrunk
            })
        })
    }
}

impl<T> Clone for Growing<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), parts: self.parts.clone(), _values: PhantomData }
    }
}

impl<T> View for Growing<T> {
    /// The bytes that have memory, of a buffer with one part. No bytes of several parts.
    fn view(&self) -> BufferView<'_> {
        self.shared.buffer.view()
    }
}

impl<T> fmt::Debug for Growing<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Growing<{}>({} of {} values, parts {:?} of {}, {:?})",
            std::any::type_name::<T>(),
            self.len(),
            self.most(),
            self.parts,
            self.count(),
            self.shared.buffer.handle()
        )
    }
}
