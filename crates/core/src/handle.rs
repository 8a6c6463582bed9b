//! Typed, generation-checked names of resources.
//!
//! A handle is a name and holds nothing: it keeps no resource alive and is `Copy`. A handle is
//! valid only in the pool that made it. Pools start their generations at different offsets, so a
//! pool refuses another pool's handle like a stale one.
//!
//! This module must not know which resources the handles name.

use std::fmt;
use std::hash::{Hash, Hasher};
use std::marker::PhantomData;
use std::num::NonZeroU64;

/// Names a resource of kind `Tag`: 32 bits of index and 32 bits of generation, never zero.
///
/// `Option<Handle<_>>` has the size of a handle. A handle is `Copy`, always `Send + Sync`, and
/// holds nothing.
///
/// ```
/// use leasehold_core::{Handle, tags};
/// assert_eq!(size_of::<Handle<tags::Stream>>(), 8);
/// assert_eq!(size_of::<Option<Handle<tags::Stream>>>(), 8);
/// ```
pub struct Handle<Tag: ?Sized> {
    raw: NonZeroU64,
    _tag: PhantomData<fn() -> *const Tag>,
}

impl<Tag: ?Sized> Handle<Tag> {
    /// Makes a handle. `generation` must not be zero: pools never use generation zero.
    #[inline]
    pub(crate) fn new(index: u32, generation: u32) -> Self {
        debug_assert!(generation != 0);
        let raw = (u64::from(generation.max(1)) << 32) | u64::from(index);
        Self { raw: NonZeroU64::new(raw).unwrap_or(NonZeroU64::MIN), _tag: PhantomData }
    }

    /// The slot that the handle names, for reports and tables. Two resources may have the same
    /// index at different times.
    #[inline]
    #[must_use]
    pub fn index(self) -> u32 {
        self.raw.get() as u32
    }

    /// The number of reuses of the slot before the handle was made, plus the pool's offset.
    #[inline]
    #[must_use]
    pub fn generation(self) -> u32 {
        (self.raw.get() >> 32) as u32
    }

    /// The 64 bits for a C interface. [`Handle::from_bits`] is the inverse.
    #[inline]
    #[must_use]
    pub fn to_bits(self) -> NonZeroU64 {
        self.raw
    }

    /// A handle from its 64 bits. `None` for bits that no pool makes (generation zero). Other
    /// invalid bits are safe, because every use checks the handle.
    #[inline]
    #[must_use]
    pub fn from_bits(bits: u64) -> Option<Self> {
        if bits >> 32 == 0 {
            return None;
        }
        NonZeroU64::new(bits).map(|raw| Self { raw, _tag: PhantomData })
    }
}

/// The number of an object among the objects of kind `Tag`, such as a device of a machine. An index
/// names no slot and has no generation. An index of another kind is another type.
///
/// ```
/// use leasehold_core::{Index, tags};
/// let second: Index<tags::Device> = Index::new(1);
/// assert_eq!(second.get(), 1);
/// ```
pub struct Index<Tag: ?Sized> {
    number: u32,
    _tag: PhantomData<fn() -> *const Tag>,
}

impl<Tag: ?Sized> Index<Tag> {
    /// The object with this number, counted from 0.
    #[inline]
    #[must_use]
    pub fn new(number: u32) -> Self {
        Self { number, _tag: PhantomData }
    }

    /// The number.
    #[inline]
    #[must_use]
    pub fn get(self) -> u32 {
        self.number
    }
}

impl<Tag: ?Sized> Clone for Index<Tag> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Tag: ?Sized> Copy for Index<Tag> {}
impl<Tag: ?Sized> PartialEq for Index<Tag> {
    fn eq(&self, other: &Self) -> bool {
        self.number == other.number
    }
}
impl<Tag: ?Sized> Eq for Index<Tag> {}
impl<Tag: ?Sized> Hash for Index<Tag> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.number.hash(state);
    }
}
impl<Tag: ?Sized> fmt::Debug for Index<Tag> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.number.fmt(f)
    }
}

impl<Tag: ?Sized> Clone for Handle<Tag> {
    fn clone(&self) -> Self {
        *self
    }
}
impl<Tag: ?Sized> Copy for Handle<Tag> {}
impl<Tag: ?Sized> PartialEq for Handle<Tag> {
    fn eq(&self, other: &Self) -> bool {
        self.raw == other.raw
    }
}
impl<Tag: ?Sized> Eq for Handle<Tag> {}
impl<Tag: ?Sized> PartialOrd for Handle<Tag> {
    fn partial_cmp(&self, other: &Self) -> Option<std::cmp::Ordering> {
        Some(self.cmp(other))
    }
}
impl<Tag: ?Sized> Ord for Handle<Tag> {
    fn cmp(&self, other: &Self) -> std::cmp::Ordering {
        self.raw.cmp(&other.raw)
    }
}
impl<Tag: ?Sized> Hash for Handle<Tag> {
    fn hash<H: Hasher>(&self, state: &mut H) {
        self.raw.hash(state);
    }
}
impl<Tag: ?Sized> fmt::Debug for Handle<Tag> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let name = std::any::type_name::<Tag>();
        let short = name.rsplit("::").next().unwrap_or(name);
        write!(f, "{short}#{}.{:08x}", self.index(), self.generation())
    }
}

const _: () = assert!(size_of::<Handle<u8>>() == 8 && size_of::<Option<Handle<u8>>>() == 8);

/// The kind of resource of a payload. Handles of one kind have one type on every backend.
pub trait Tagged {
    /// The kind; one of [`tags`] for the runtime's resources.
    type Tag: ?Sized;
}

/// The kinds of resources. These types have no values; they only make handle types distinct.
pub mod tags {
    macro_rules! tags {
        ($($(#[$doc:meta])* $name:ident / $handle:ident;)*) => {
            $($(#[$doc])* #[derive(Debug, Clone, Copy, PartialEq, Eq)] pub enum $name {})*
        };
    }
    tags! {
        /// A device that was opened.
        Device / DeviceHandle;
        /// A driver's context.
        Context / ContextHandle;
        /// An ordered queue of work.
        Stream / StreamHandle;
        /// A timepoint in a stream, with or without a timestamp.
        Event / EventHandle;
        /// A block of memory.
        Buffer / BufferHandle;
        /// A range of memory that buffers are placed in.
        Heap / HeapHandle;
        /// Loaded code with several entry points.
        Library / LibraryHandle;
        /// One entry point, ready for dispatch.
        Pipeline / PipelineHandle;
        /// A recorded list of work, instantiated on a device.
        Graph / GraphHandle;
        /// Metal's fence between encoders.
        Fence / FenceHandle;
        /// A native queue that streams share.
        CommandQueue / CommandQueueHandle;
        /// A timeline that the host signals.
        HostTimeline / HostTimelineHandle;
        /// A device timestamp.
        TimestampQuery / TimestampHandle;
        /// Multiprocessors of a device.
        Partition / PartitionHandle;
    }
}

macro_rules! handles {
    ($($(#[$doc:meta])* $handle:ident = $tag:ident;)*) => { $($(#[$doc])* pub type $handle = Handle<tags::$tag>;)* };
}
handles! {
    /// Names an opened device.
    DeviceHandle = Device;
    /// Names a driver's context.
    ContextHandle = Context;
    /// Names a stream.
    StreamHandle = Stream;
    /// Names an event.
    EventHandle = Event;
    /// Names a buffer.
    BufferHandle = Buffer;
    /// Names a heap.
    HeapHandle = Heap;
    /// Names a library (a CUDA module, a Metal library).
    LibraryHandle = Library;
    /// Names a pipeline (a CUDA function, a Metal compute pipeline state).
    PipelineHandle = Pipeline;
    /// Names an instantiated graph.
    GraphHandle = Graph;
    /// Names a fence.
    FenceHandle = Fence;
    /// Names a command queue.
    CommandQueueHandle = CommandQueue;
    /// Names a host timeline.
    HostTimelineHandle = HostTimeline;
    /// Names a timestamp.
    TimestampHandle = TimestampQuery;
    /// Names a partition.
    PartitionHandle = Partition;
}
