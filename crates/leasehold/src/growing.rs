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
//! [`GrowingParts`] are equal parts side by side, of which each grows by itself. A kernel binds all
//! of them at once, with a limit for each: the caches of sequences that are decoded together.

use crate::array::{Array, ArrayView};
use crate::runtime::{Runtime, RuntimeInner};
use crate::stream::{Locked, Scratch, Stream, StreamCore, push_waits};
use crate::view::{BufferView, Operand, View};
use leasehold_alloc::{Allocator, Buffer, Layout, MIN_ALIGN, On};
use leasehold_core::sync::atomic::{AtomicBool, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::{Access, Fill, Op};
use std::fmt;
use std::marker::PhantomData;
use std::ops::RangeBounds;

mod parts;

pub use parts::GrowingParts;

/// Bytes of a limit, and of the number of bytes that are shared.
const WORD: u64 = 8;

/// Values of one type in memory that grows in place, up to a maximum. Clones are the same buffer.
///
/// Any thread may grow and shrink it. Only the values up to [`len`](Self::len) have memory.
///
/// ```
/// use leasehold::prelude::*;
/// use leasehold::growing::Growing;
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
#[doc(alias("VirtualArray", "ExpandableSegment", "KvCache"))]
pub struct Growing<T> {
    shared: Arc<Shared>,
    _values: PhantomData<fn() -> T>,
}

/// The allocator that the memory of a growing buffer comes from.
pub(crate) trait Source: Send + Sync {
    /// Calls `f` with the block and its allocator, while the memory is there.
    ///
    /// # Errors
    /// `Suspended` while it is away; the error of `f`.
    fn with(&self, f: &mut dyn FnMut(&Allocator, &Lease<Buffer>) -> Result<()>) -> Result<()>;
}

struct Shared {
    /// The buffer that work uses: the block itself, or an import of it.
    buffer: Lease<Buffer>,
    limit: Lease<Buffer>,
    /// A pool's block, if `buffer` is an import.
    source: Option<Box<dyn Source>>,
    /// The most values.
    most: usize,
    /// The maximum is 4 GiB or more.
    large: bool,
    /// It is a fork, or has one.
    forked: AtomicBool,
    /// Held from a change of the length until the limit is written.
    turn: Mutex<()>,
    runtime: Arc<RuntimeInner>,
}

#[cold]
fn in_recording() -> &'static str {
    "memory cannot grow or shrink in a recording; do it before, or between launches of the graph"
}

/// The refusal of a fork: a suspension keeps the contents of each block.
#[cold]
fn of_a_pool() -> Error {
    Error::Unsupported("a fork of memory that can be suspended; copy instead".into())
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
        runtime.stream().live(in_recording())?;
        let buffer = runtime.allocator().growing(Array::<T>::bytes_of(most)?)?;
        Self::over(runtime, most, buffer, None)
    }

    /// A growing buffer over a block of its maximum, or over an import of one.
    pub(crate) fn over(
        runtime: &Runtime,
        most: usize,
        buffer: Lease<Buffer>,
        source: Option<Box<dyn Source>>,
    ) -> Result<Self> {
        let core = runtime.stream().live(in_recording())?;
        let limit = limits(runtime, core, 1)?;
        let turn = Mutex::default();
        let runtime = runtime.inner.clone();
        let large = Array::<T>::bytes_of(most)? > u64::from(u32::MAX);
        let forked = AtomicBool::new(false);
        let shared = Shared { buffer, limit, source, most, large, forked, turn, runtime };
        write_words(core, &[shared.words(&[])], &[])?;
        Ok(Self { shared: Arc::new(shared), _values: PhantomData })
    }

    /// The number of values that have memory.
    #[must_use]
    pub fn len(&self) -> usize {
        (self.shared.buffer.len() as usize).checked_div(size_of::<T>()).unwrap_or(0)
    }

    /// Returns whether none has.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// The most values that it can have.
    #[must_use]
    pub fn most(&self) -> usize {
        self.shared.most
    }

    /// The values that have memory.
    #[must_use]
    pub fn as_view(&self) -> ArrayView<'_, T> {
        match self.view().values() {
            Ok(view) => view,
            // The length is a number of values at all times.
            Err(e) => unreachable!("{e}"),
        }
    }

    /// Some of the values.
    ///
    /// # Panics
    /// When the range does not lie in the part that has memory.
    #[track_caller]
    #[must_use]
    pub fn slice(&self, range: impl RangeBounds<usize>) -> ArrayView<'_, T> {
        self.as_view().slice(range)
    }

    /// As [`slice`](Self::slice), which says so when the range does not lie there.
    ///
    /// # Errors
    /// `InvalidArgument` then.
    pub fn try_slice(&self, range: impl RangeBounds<usize>) -> Result<ArrayView<'_, T>> {
        self.as_view().try_slice(range)
    }

    /// All of the maximum, for a kernel that keeps to the [limit](Self::limit) when it touches this
    /// binding ([`KernelDesc::limited_by`](leasehold_hal::KernelDesc::limited_by)). A launch with
    /// any other kernel is refused, and so is every other operation.
    #[must_use]
    pub fn reservation(&self, access: Access) -> Operand<'_> {
        let len = (self.shared.most * size_of::<T>()) as u64;
        let view = BufferView { lease: &self.shared.buffer, offset: 0, len };
        Operand { limit: Some(&self.shared.limit), ..view.with(access) }
    }

    /// Two words of 64 bits on the device, which nobody else can write: the number of bytes that
    /// have memory, and the number of bytes at the beginning that are [shared](Self::fork). A
    /// kernel writes none of those.
    #[must_use]
    pub fn limit(&self) -> Operand<'_> {
        self.shared.limit.read()
    }

    /// Makes the buffer at least `len` values long. Memory that lies free is taken first, then the
    /// driver's. May block on the driver, and does not wait for the device. The contents of what is
    /// new are not specified.
    ///
    /// The limit is written on `stream`. A launch that is submitted after the call sees it, on any
    /// stream.
    ///
    /// All or nothing: after an error the buffer is as it was. Calls of several threads take turns;
    /// only one at a time can take memory for the buffer.
    ///
    /// # Errors
    /// `InvalidArgument` beyond the maximum, and for a stream of another device; `OverBudget`;
    /// `OutOfMemory` with a report; `Occupied` while another thread takes memory for the buffer,
    /// and while this thread has a session open on the stream; `Recording` for a recording's
    /// stream; `Suspended` for a buffer of a suspended pool; the cause of a stream that has failed;
    /// the driver's.
    pub fn grow(&self, stream: &Stream, len: usize) -> Result<()> {
        let bytes = self.bytes(stream, len)?;
        self.shared.prepare(bytes)?;
        match self.shared.commit(stream, bytes)? {
            true => Ok(()),
            // Another thread's allocation took what was prepared.
            false => self
                .shared
                .source(&mut |allocator, block| allocator.grow(block, bytes))
                .and_then(|()| self.shared.commit(stream, bytes).map(drop)),
        }
    }

    /// As [`grow`](Self::grow), but only with memory that is mapped there already, by
    /// [`prepare`](Self::prepare) or because the buffer or another one of its maximum was longer
    /// before. Calls no driver for memory. `false`: not so much is mapped, and nothing has changed.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn try_grow(&self, stream: &Stream, len: usize) -> Result<bool> {
        self.shared.commit(stream, self.bytes(stream, len)?)
    }

    /// Takes memory for the first `len` values without making the buffer longer, so that
    /// [`try_grow`](Self::try_grow) finds it: from a thread beside the one that launches. Other
    /// allocations take it back before they fail.
    ///
    /// # Errors
    /// As [`grow`](Self::grow).
    pub fn prepare(&self, len: usize) -> Result<()> {
        self.shared.prepare(self.bytes_of(len)?)
    }

    /// Makes the buffer at most `len` values long. The memory beyond goes back to the allocator
    /// after its last use, when the allocator needs it. Until then it stays mapped, and the next
    /// growth finds it. Does not wait for the device, and calls no driver for memory.
    ///
    /// # Errors
    /// `InvalidArgument` for a stream of another device; `Occupied` while this thread has a session
    /// open on the stream; `Recording` for a recording's stream; `Suspended` for a buffer of a
    /// suspended pool; the cause of a stream that has failed; the driver's. The buffer is as it was
    /// then.
    pub fn shrink(&self, stream: &Stream, len: usize) -> Result<()> {
        let core = self.shared.core(stream)?;
        let bytes = (len.min(self.shared.most) * size_of::<T>()) as u64;
        let _turn = self.shared.turn.lock();
        if bytes >= self.shared.buffer.len() {
            return Ok(());
        }
        self.shared.shorten(core, bytes, true)
    }

    /// The number of values at the beginning that are shared with a fork, or were: no operation
    /// writes them. 0 without a fork.
    #[must_use]
    pub fn shared(&self) -> usize {
        (self.shared.buffer.shared() as usize).div_ceil(size_of::<T>().max(1)).min(self.len())
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
    /// use leasehold::growing::Growing;
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
    /// As [`grow`](Self::grow); `InvalidArgument` beyond the length; `Unsupported` where memory has
    /// one address ([`Caps::forks`](leasehold_hal::Caps::forks)), and for a pool's buffer. After an
    /// error there is no fork. What was to be shared may stay without writes.
    pub fn fork(&self, stream: &Stream, len: usize) -> Result<Self> {
        let core = self.shared.core(stream)?;
        if len > self.len() {
            return Err(Error::invalid(format!(
                "a fork of {len} values of a growing buffer that has {}; fork what has memory",
                self.len()
            )));
        }
        if self.shared.source.is_some() {
            return Err(of_a_pool());
        }
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

    /// The bytes of so many values.
    fn bytes_of(&self, len: usize) -> Result<u64> {
        let most = self.shared.most;
        if len > most {
            return Err(Error::invalid(format!(
                "{len} values of a growing buffer of {most} at most; make it with a larger maximum"
            )));
        }
        Ok((len * size_of::<T>()) as u64)
    }

    fn bytes(&self, stream: &Stream, len: usize) -> Result<u64> {
        self.shared.core(stream)?;
        self.bytes_of(len)
    }
}

impl Shared {
    fn core<'s>(&self, stream: &'s Stream) -> Result<&'s StreamCore> {
        core_of(stream, &self.runtime)
    }

    /// Calls `f` with the block and its allocator.
    fn source(&self, f: &mut dyn FnMut(&Allocator, &Lease<Buffer>) -> Result<()>) -> Result<()> {
        match &self.source {
            Some(source) => source.with(f),
            None => f(&self.runtime.memory, &self.buffer),
        }
    }

    fn prepare(&self, bytes: u64) -> Result<()> {
        self.source(&mut |allocator, block| allocator.prepare(block, bytes))
    }

    /// Makes the buffer longer by what is mapped. `false`: not so much is.
    fn commit(&self, stream: &Stream, bytes: u64) -> Result<bool> {
        let core = self.core(stream)?;
        let _turn = self.turn.lock();
        let before = self.buffer.len();
        if bytes <= before {
            return Ok(true);
        }
        let mut fine = false;
        self.source(&mut |allocator, block| {
            fine = allocator.try_grow(block, bytes)?;
            if fine {
                self.set_len(bytes);
            }
            Ok(())
        })?;
        if !fine {
            return Ok(false);
        }
        let values = [(0, bytes), (1, self.buffer.shared())];
        // Without a fork there is nothing to say of one.
        let values = &values[..if self.forked.load(Ordering::Relaxed) { 2 } else { 1 }];
        write_words(core, &[self.words(values)], &[]).inspect_err(|_| {
            // The limit is as before. If the record cannot be locked, the buffer stays longer than
            // the limit says, which does no harm.
            let _ = self.shorten(core, before, false);
        })?;
        Ok(true)
    }

    /// Gives another buffer, of length 0, the whole granules of the first `bytes`.
    fn fork(&self, core: &StreamCore, to: &Self, bytes: u64) -> Result<()> {
        let (_turn, _own) = (self.turn.lock(), to.turn.lock());
        [self, to].iter().for_each(|shared| shared.forked.store(true, Ordering::Relaxed));
        // SAFETY: work that writes what is shared was submitted before, and the fork comes after
        // it. Later submissions find how much is shared: the runtime in the buffers, and kernels in
        // the words, which the next submission writes.
        unsafe { self.runtime.memory.fork(&self.buffer, &to.buffer, bytes) }?;
        let (own, new) =
            ([(1, self.buffer.shared())], [(0, to.buffer.len()), (1, to.buffer.shared())]);
        let ordered =
            [self.buffer.view().narrowed(0, 0).read(), to.buffer.view().narrowed(0, 0).write()];
        write_words(core, &[self.words(&own), to.words(&new)], &ordered)
    }

    /// The length of an import is that of its block.
    fn set_len(&self, bytes: u64) {
        if self.source.is_some() {
            // SAFETY: the block has just become as long, or is about to become as short; then the
            // caller has locked the record.
            unsafe { self.runtime.memory.set_imported_len(&self.buffer, bytes) };
        }
    }

    /// Makes the buffer shorter. `limit`: writes the limit first.
    fn shorten(&self, core: &StreamCore, bytes: u64, limit: bool) -> Result<()> {
        let value = [(0, bytes)];
        let words = self.words(if limit { &value } else { &[] });
        // A pool's state is locked before a record, as by a suspension.
        self.source(&mut |allocator, block| {
            shorten(core, words, &self.buffer, || {
                // SAFETY: all work that was submitted with these bytes is in the record, which is
                // locked. Later submissions find the new length, or the limit that was just
                // written.
                unsafe { allocator.shrink(block, bytes, &self.buffer) }?;
                self.set_len(bytes);
                Ok(())
            })
        })
    }

    /// Values for the limit, which is word 0, and for the shared bytes.
    fn words<'a>(&'a self, values: &'a [(u64, u64)]) -> Words<'a> {
        Words { buffer: &self.limit, values, large: self.large }
    }
}

/// The stream itself, if it is of the buffer's device.
fn core_of<'s>(stream: &'s Stream, runtime: &Arc<RuntimeInner>) -> Result<&'s StreamCore> {
    let core = stream.live(in_recording())?;
    if !Arc::ptr_eq(&stream.runtime, runtime) {
        return Err(Error::invalid(format!(
            "{stream:?} is not a stream of {}; use one of the runtime that has the buffer",
            runtime.id()
        )));
    }
    Ok(core)
}

/// Device memory for so many limits, and as many numbers of shared bytes behind them. Users only
/// read it.
fn limits(runtime: &Runtime, core: &StreamCore, count: u64) -> Result<Lease<Buffer>> {
    let on = On { timeline: core.timeline, source: core.source() };
    runtime.allocator().alloc_read_only(Layout::aligned(2 * WORD * count, MIN_ALIGN), on)
}

/// Words to write.
#[derive(Clone, Copy)]
struct Words<'a> {
    buffer: &'a Lease<Buffer>,
    /// The number of a word, and its value. None: all words become 0.
    values: &'a [(u64, u64)],
    /// A maximum is 4 GiB or more.
    large: bool,
}

/// Writes words on a stream: all of them or none. `also`: operands that the write is ordered with.
fn write_words(core: &StreamCore, words: &[Words<'_>], also: &[Operand<'_>]) -> Result<()> {
    let mut submit_guard = core.submit_guard()?;
    let scratch = submit_guard.scratch();
    scratch.waits.clear();
    let written = words.iter().map(|words| words.buffer.write());
    let operands: Vec<_> = written.chain(also.iter().copied()).collect();
    let mut locked = Locked::new(core.timeline, &operands);
    // SAFETY: the submission lock is held until the end.
    unsafe { locked.gather(&mut scratch.waits) }?;
    let point = submit_words(core, scratch, words)?;
    // SAFETY: the submission waited for what was gathered, and the submission lock is held.
    unsafe { locked.mark(point) };
    Ok(())
}

/// Has `shrink` take memory from a buffer while its record is locked, so that no submission comes
/// between. `words.values`, if there are any, are written first.
fn shorten(
    core: &StreamCore,
    words: Words<'_>,
    buffer: &Lease<Buffer>,
    shrink: impl FnOnce() -> Result<()>,
) -> Result<()> {
    let mut submit_guard = core.submit_guard()?;
    let scratch = submit_guard.scratch();
    scratch.waits.clear();
    // The limits come after the launches that read the former ones. The buffer is named to lock its
    // record: its uses so far are what the memory waits for.
    let operands = [words.buffer.write(), buffer.view().narrowed(0, 0).read()];
    let mut locked = Locked::new(core.timeline, &operands);
    // SAFETY: the submission lock is held until the end.
    unsafe { locked.gather(&mut scratch.waits) }?;
    let limit = !words.values.is_empty();
    let point = limit.then(|| submit_words(core, scratch, &[words])).transpose()?;
    let shrunk = shrink();
    if let Some(point) = point {
        // SAFETY: the submission waited for what was gathered, and the submission lock is held.
        unsafe { locked.mark(point) };
    }
    shrunk
}

/// Submits writes of words, after the scratch's waits. Their records are locked.
fn submit_words(
    core: &StreamCore,
    scratch: &mut Scratch,
    words: &[Words<'_>],
) -> Result<Timepoint> {
    let Scratch { waits, ops, .. } = scratch;
    ops.clear();
    push_waits(waits, ops)?;
    for Words { buffer, values, large } in words {
        let fill = |offset: u64, bytes: u64, pattern: u32| {
            let (dst, native) = (buffer.addr() + offset, buffer.native());
            Op::Fill(Fill { dst, native, bytes, pattern, width: 4 })
        };
        if values.is_empty() {
            ops.push(fill(0, buffer.len(), 0));
        }
        for &(at, value) in *values {
            // (On a little-endian device, as all are.)
            ops.push(fill(at * WORD, 4, value as u32));
            // A small maximum leaves the upper half 0.
            if *large || value > u64::from(u32::MAX) {
                ops.push(fill(at * WORD + 4, 4, (value >> 32) as u32));
            }
        }
    }
    // SAFETY: the words are buffers of this device, the stream's turn is held, and the records are
    // locked.
    let result = unsafe { core.raw.submit(ops) };
    let count = ops.len();
    ops.clear();
    let value = result?;
    core.count(count);
    Ok(core.timeline.at(value))
}

impl<T> Clone for Growing<T> {
    fn clone(&self) -> Self {
        Self { shared: self.shared.clone(), _values: PhantomData }
    }
}

impl<T> View for Growing<T> {
    /// The bytes that have memory.
    fn view(&self) -> BufferView<'_> {
        self.shared.buffer.view()
    }
}

impl<T> fmt::Debug for Growing<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "Growing<{}>({} of {} values, {:?})",
            std::any::type_name::<T>(),
            self.len(),
            self.most(),
            self.shared.buffer.handle()
        )
    }
}
