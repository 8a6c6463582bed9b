//! Operations: the units of work of a stream. An [`Op`] is a borrowed view; an
//! [`OpList`](crate::OpList) owns operations.
//!
//! This module must not know which code runs them.

use crate::conditional::Conditional;
use crate::copies::{Copies, Copy1d};
use crate::graph::GraphExec;
use crate::kernel::{Access, Binding, Pipeline};
use leasehold_core::panics::{Kept, caught};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Lease, Result, Tagged, Timepoint, tags};
use smallvec::SmallVec;
use std::any::Any;
use std::fmt;
use std::marker::PhantomPinned;
use std::sync::Arc;
use std::time::Duration;

/// Keeps host memory (or any other object) alive until a timepoint has passed.
///
/// A backend drops the object just before it publishes the timepoint, on any thread that observes
/// the stream. The destructor must not wait for this timepoint, nor for a stream that waits for it,
/// nor shut the backend down. Such a wait never ends.
pub type KeepAlive = Arc<dyn Any + Send + Sync>;

/// One kernel launch.
#[derive(Debug, Clone, Copy)]
pub struct Dispatch<'a> {
    /// The kernel.
    pub pipeline: &'a Lease<Pipeline>,
    /// Blocks in each direction. If one is zero, nothing runs, and the submission still counts.
    pub grid: [u32; 3],
    /// Threads of a block in each direction.
    pub block: [u32; 3],
    /// Bytes of shared memory of a block.
    pub shared: u32,
    /// Memory, in the order that the kernel declares.
    pub bindings: &'a [Binding],
    /// Parameters, of the size that the kernel declares.
    pub params: &'a [u8],
}

/// A copy within the device's memory, `rows` rows of `width` bytes. A plain copy has one row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Copy2d {
    /// The source address.
    pub src: u64,
    /// Metal's spanning buffer of the source.
    pub src_native: u64,
    /// Bytes from one source row to the next.
    pub src_pitch: u64,
    /// The destination address. The destination must not overlap the source.
    pub dst: u64,
    /// Metal's spanning buffer of the destination.
    pub dst_native: u64,
    /// Bytes from one destination row to the next.
    pub dst_pitch: u64,
    /// Bytes of a row.
    pub width: u64,
    /// Rows.
    pub rows: u64,
}

impl Copy2d {
    /// A plain copy of `bytes` bytes.
    #[must_use]
    pub fn linear(src: (u64, u64), dst: (u64, u64), bytes: u64) -> Self {
        Self {
            src: src.0,
            src_native: src.1,
            src_pitch: bytes,
            dst: dst.0,
            dst_native: dst.1,
            dst_pitch: bytes,
            width: bytes,
            rows: 1,
        }
    }

    /// Bytes from the first accessed byte to the last one, at a pitch.
    #[must_use]
    pub fn extent(&self, pitch: u64) -> u64 {
        if self.rows == 0 || self.width == 0 {
            0
        } else {
            (self.rows - 1).saturating_mul(pitch).saturating_add(self.width)
        }
    }
}

impl Copy1d {
    /// The piece as a copy of its own.
    #[must_use]
    pub fn alone(&self) -> Copy2d {
        Copy2d::linear((self.src, self.src_native), (self.dst, self.dst_native), self.bytes)
    }
}

/// Fills memory with a pattern of 1, 2 or 4 bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Fill {
    /// The destination address, aligned to the pattern.
    pub dst: u64,
    /// Metal's spanning buffer.
    pub native: u64,
    /// Bytes to fill; a multiple of the pattern's size.
    pub bytes: u64,
    /// The pattern, little-endian.
    pub pattern: u32,
    /// Bytes of the pattern: 1, 2 or 4.
    pub width: u8,
}

/// A copy from host memory.
#[derive(Debug, Clone, Copy)]
pub struct Upload<'a> {
    /// Host address.
    pub src: *const u8,
    /// Device address.
    pub dst: u64,
    /// Metal's spanning buffer.
    pub native: u64,
    /// Bytes.
    pub bytes: u64,
    /// Keeps the host memory alive until the copy is over. Without it the caller must.
    pub keep: Option<&'a KeepAlive>,
}

/// A copy to host memory.
#[derive(Debug, Clone, Copy)]
pub struct Download<'a> {
    /// Device address.
    pub src: u64,
    /// Metal's spanning buffer.
    pub native: u64,
    /// Host address.
    pub dst: *mut u8,
    /// Bytes.
    pub bytes: u64,
    /// Keeps the host memory alive until the copy is over. Without it the caller must.
    pub keep: Option<&'a KeepAlive>,
}

/// A host function that runs in stream order. It may submit more work, also to its own stream; it
/// must not wait for its own stream.
#[derive(Clone)]
pub struct HostCall {
    /// The name in reports.
    pub name: &'static str,
    call: Arc<dyn Fn() -> Result<()> + Send + Sync>,
}

impl HostCall {
    /// Wraps a function. An error or a panic poisons the stream. A panic of the function's
    /// destructor has no effect.
    pub fn new(name: &'static str, call: impl Fn() -> Result<()> + Send + Sync + 'static) -> Self {
        let call = Kept::new(call);
        Self { name, call: Arc::new(move || (*call)()) }
    }

    /// Calls the function; for backends. Never unwinds.
    ///
    /// # Errors
    /// The function's own error, or the text of its panic.
    pub fn run(&self) -> Result<()> {
        caught(|| (self.call)()).unwrap_or_else(|text| Err(Error::other(text)))
    }
}

impl fmt::Debug for HostCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "HostCall({})", self.name)
    }
}

/// A call with the library's word and the call's operands.
type Foreign = dyn Fn(u64, &[Binding]) -> Result<()> + Send + Sync;

/// A library call that enqueues its own work in stream order (cuBLAS, Metal's matrix kernels, a
/// BLAS on the CPU).
///
/// Its argument is the word that the backend's libraries take. If the driver has streams, this is
/// the stream (the same word as [`Stream::native`](crate::Stream::native)). On Metal it is the open
/// command buffer, between encoders, which the call must neither commit nor keep. On the CPU it is
/// 0, and the call does the work itself.
#[derive(Clone)]
pub struct ForeignCall {
    /// The name in reports.
    pub name: &'static str,
    call: Arc<Foreign>,
    /// The memory that the call reads and writes.
    pub accesses: SmallVec<[Binding; 3]>,
}

impl ForeignCall {
    /// Wraps a call that takes the library's word and touches only `accesses`. An error poisons the
    /// stream.
    pub fn new(
        name: &'static str,
        accesses: Vec<Binding>,
        call: impl Fn(u64) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        Self::with_bindings(name, accesses, move |word, _| call(word))
    }

    /// Like [`new`](Self::new), for a call that receives the addresses of its operands when it
    /// runs. In a graph the operands get their addresses late, and updates may change them.
    pub fn with_bindings(
        name: &'static str,
        accesses: impl IntoIterator<Item = Binding>,
        call: impl Fn(u64, &[Binding]) -> Result<()> + Send + Sync + 'static,
    ) -> Self {
        let call = Kept::new(call);
        let call = Arc::new(move |word, accesses: &[Binding]| (*call)(word, accesses));
        // For a few of them, this is half of what `collect` does.
        let mut kept = SmallVec::new();
        accesses.into_iter().for_each(|access| kept.push(access));
        Self { name, call, accesses: kept }
    }

    /// Calls the library; for backends. Never unwinds.
    ///
    /// # Errors
    /// The library's own error, or the text of its panic.
    pub fn run(&self, native_stream: u64) -> Result<()> {
        caught(|| (self.call)(native_stream, &self.accesses))
            .unwrap_or_else(|text| Err(Error::other(text)))
    }
}

impl fmt::Debug for ForeignCall {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "ForeignCall({})", self.name)
    }
}

/// A device timestamp: the device writes it when the stream reaches it.
pub struct TimestampQuery {
    native: u64,
    nanos: AtomicU64,
    /// A timestamp must not be moved out of its pool.
    _place: PhantomPinned,
}

impl TimestampQuery {
    /// A timestamp without a time.
    #[must_use]
    pub fn new(native: u64) -> Self {
        Self { native, nanos: AtomicU64::new(0), _place: PhantomPinned }
    }

    /// The backend's object (a `CUevent`); 0 if the time is stored here. Only unsafe calls look it
    /// up.
    #[inline]
    #[must_use]
    pub fn native(&self) -> u64 {
        self.native
    }

    /// Writes the time, in nanoseconds of the backend's own clock; never 0.
    pub fn set(&self, nanos: u64) {
        self.nanos.store(nanos.max(1), Ordering::Release);
    }

    /// The time, if it was stored here.
    #[must_use]
    pub fn get(&self) -> Option<u64> {
        match self.nanos.load(Ordering::Acquire) {
            0 => None,
            n => Some(n),
        }
    }

    /// The time since an earlier timestamp, if both are stored here. Zero if this one was written
    /// first.
    ///
    /// # Errors
    /// `InvalidState` for a timestamp that was not written.
    pub fn since(&self, start: &Self) -> Result<Duration> {
        match (start.get(), self.get()) {
            (Some(from), Some(to)) => Ok(Duration::from_nanos(to.saturating_sub(from))),
            _ => Err(Error::state("a timestamp that was not written yet")),
        }
    }

    /// Removes the time, for recycling.
    pub fn clear(&self) {
        self.nanos.store(0, Ordering::Release);
    }
}

impl Tagged for TimestampQuery {
    type Tag = tags::TimestampQuery;
}

impl fmt::Debug for TimestampQuery {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Timestamp({:?})", self.get())
    }
}

/// One operation, as a view of its parts.
#[derive(Debug, Clone, Copy)]
#[non_exhaustive]
pub enum Op<'a> {
    /// Later operations start after the timepoint. A wait for a failed timepoint poisons the
    /// stream.
    Wait(Timepoint),
    /// A kernel launch.
    Dispatch(Dispatch<'a>),
    /// A copy within the device, or from or to a peer.
    Copy(Copy2d),
    /// Several copies, as [`Copy`](Self::Copy) or from or to the device's own pinned memory, in any
    /// order. Plans have single copies instead: `instantiate` answers `Unsupported`.
    Copies(Copies<'a>),
    /// A fill.
    Fill(Fill),
    /// A copy from the host.
    Upload(Upload<'a>),
    /// A copy to the host.
    Download(Download<'a>),
    /// Writes the time.
    WriteTimestamp(&'a Lease<TimestampQuery>),
    /// A library call.
    Foreign(&'a ForeignCall),
    /// A call of a host function.
    Host(&'a HostCall),
    /// A whole graph.
    Graph(&'a Lease<dyn GraphExec>),
    /// A loop or a branch. Only plans have it: a submission of it is refused.
    Conditional(&'a Conditional),
}

impl Op<'_> {
    /// The name in reports: `dispatch rms_norm`, `copy`, ….
    #[must_use]
    pub fn name(&self) -> String {
        match self {
            Op::Dispatch(d) => format!("dispatch {}", d.pipeline.name),
            Op::Host(h) => format!("host call {}", h.name),
            Op::Foreign(f) => format!("foreign call {}", f.name),
            Op::Conditional(c) => c.to_string(),
            other => other.kind().to_owned(),
        }
    }

    /// The kind of operation.
    #[must_use]
    pub fn kind(&self) -> &'static str {
        match self {
            Op::Wait(_) => "wait",
            Op::Dispatch(_) => "dispatch",
            Op::Copy(_) => "copy",
            Op::Copies(_) => "copies",
            Op::Fill(_) => "fill",
            Op::Upload(_) => "upload",
            Op::Download(_) => "download",
            Op::WriteTimestamp(_) => "timestamp",
            Op::Foreign(_) => "foreign call",
            Op::Host(_) => "host call",
            Op::Graph(_) => "graph",
            Op::Conditional(c) => c.kind().name(),
        }
    }

    /// Returns whether the operation is ordered after all earlier and before all later operations,
    /// because its accesses are not declared.
    #[must_use]
    pub fn is_barrier(&self) -> bool {
        matches!(self, Op::Host(_) | Op::WriteTimestamp(_) | Op::Wait(_) | Op::Graph(_))
    }

    /// Calls `f` with address, length and access of each range that the operation accesses. Host
    /// memory is included: if a backend has separate host addresses, an accidental match costs only
    /// an edge.
    pub fn for_each_access(&self, mut f: impl FnMut(u64, u64, Access)) {
        match self {
            Op::Dispatch(d) => d.bindings.iter().for_each(|b| f(b.addr, b.len, b.access)),
            Op::Copy(c) => {
                f(c.src, c.extent(c.src_pitch), Access::Read);
                f(
                    c.dst,
                    c.extent(c.dst_pitch),
                    if c.rows > 1 { Access::ReadWrite } else { Access::Write },
                );
            }
            Op::Copies(copies) => {
                for piece in copies.pieces() {
                    f(piece.src, piece.bytes, Access::Read);
                    f(piece.dst, piece.bytes, Access::Write);
                }
            }
            Op::Fill(x) => f(x.dst, x.bytes, Access::Write),
            Op::Upload(u) => {
                f(u.src as u64, u.bytes, Access::Read);
                f(u.dst, u.bytes, Access::Write);
            }
            Op::Download(d) => {
                f(d.src, d.bytes, Access::Read);
                f(d.dst as u64, d.bytes, Access::Write);
            }
            Op::Foreign(call) => call.accesses.iter().for_each(|b| f(b.addr, b.len, b.access)),
            Op::Conditional(c) => c.accesses(&mut f),
            Op::Wait(_) | Op::WriteTimestamp(_) | Op::Host(_) | Op::Graph(_) => {}
        }
    }
}
