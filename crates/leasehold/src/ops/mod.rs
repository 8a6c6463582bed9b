//! Operations: waits, signals, copies, fills, host calls, and the thread's current context.
//!
//! An operation is ordered after the earlier uses of its operands, on whatever stream they were. What goes past this module to the backend
//! ([`Stream::raw`], [`Stream::native`], [`Runtime::raw_device`]) is ordered by whoever does it, and leaves no mark on buffers.
//!
//! All of them go to the recording when the calling thread records on the stream's device.

mod between;
mod borrow;
pub(crate) mod call;
mod gate;
mod stage;

pub(crate) use borrow::may_wait;
pub(crate) use call::on_complete;
pub use call::{foreign_call, host_call, host_call_once};
pub use gate::{fail, raise};

use crate::context::ContextGuard;
use crate::event::Event;
use crate::graph::NodeId;
use crate::graph::recorder;
use crate::runtime::{Runtime, check_writable};
use crate::stream::{Stream, StreamCore};
use crate::view::{Operand, Slice};
use bytemuck::{NoUninit, Pod};
use leasehold_core::defects::{Defect, planted};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Point, Result};
use leasehold_hal::{Access, Copy2d, Download, Fill, Keep, Op, Timestamp, Upload};

/// Makes a runtime (and a stream, the default one for `None`) the thread's current context until the guard is dropped.
///
/// # Errors
/// `InvalidArgument` for a stream of another device; `DeviceLost`; the driver's own.
#[doc(alias = "setCurrent")]
pub fn set_context(runtime: &Runtime, stream: Option<&Stream>) -> Result<ContextGuard> {
    ContextGuard::enter(runtime, runtime.or_default(stream)?)
}

/// Makes later work of the stream start after a point, on the device. Does not block the host. The point may be another device's, or a
/// [`Gate`](crate::Gate)'s that nobody has raised yet. While recording: each launch of the graph comes after the point.
///
/// # Errors
/// `Unsupported` when the device cannot wait for that line ([`Runtime::wait_for`] then blocks the host instead); `InvalidArgument` for a point
/// of this very stream that is not submitted yet; the stream's cause. Waiting for a failed point poisons the stream.
#[doc(alias("wait_on", "stream::wait", "execution::stream::wait"))]
pub fn wait(stream: &Stream, point: Point) -> Result<()> {
    let core = &*stream.core;
    let line = core.line;
    if point.line_id() == line.id() && point.value() > line.submitted() {
        return Err(Error::invalid(format!("{point:?} is not submitted yet: {stream:?} would wait for itself")));
    }
    if recorder::is_active()
        && let Some(result) = recorder::wait_point(&stream.runtime, point)
    {
        return result;
    }
    let turn = core.turn()?;
    healthy(stream)?;
    if line.knows(point.into()) || point.is_settled() {
        return Ok(());
    }
    core.raw.wait(point)?;
    core.count(1);
    drop(turn);
    Ok(())
}

/// The stream's cause, if it is poisoned.
fn healthy(stream: &Stream) -> Result<()> {
    let line = stream.core.line;
    if line.failed(line.submitted() + 1) { stream.failure().map_or(Ok(()), Err) } else { Ok(()) }
}

/// Makes later work of the stream start after the event's last record. A later record of the event does not disturb it.
///
/// # Errors
/// `InvalidState` for an event that was never recorded; as [`wait`].
pub fn wait_event(stream: &Stream, event: &Lease<Event>) -> Result<()> {
    if recorder::is_active()
        && let Some(result) = recorder::wait_event(&stream.runtime, event)
    {
        return result;
    }
    wait(stream, event.point()?)
}

/// Records the event at the stream's present end. While recording: each launch of the graph records it.
///
/// # Errors
/// The stream's cause when it is poisoned; `InvalidArgument` for an event of another device; `OutOfMemory` without a time stamp for
/// the record; the driver's own.
#[doc(alias = "stream::signal")]
pub fn signal(stream: &Stream, event: &Lease<Event>) -> Result<()> {
    if event.runtime != stream.runtime.serial() {
        return Err(Error::invalid(format!(
            "an event of another runtime (of {}) cannot be recorded on {stream:?}",
            event.device
        )));
    }
    if recorder::is_active()
        && let Some(result) = recorder::signal(&stream.runtime, event)
    {
        return result;
    }
    let core = &*stream.core;
    if let Some(time) = event.fresh_time(&*stream.runtime.device)? {
        return signal_timed(core, event, time);
    }
    let turn = core.turn()?;
    healthy(stream)?;
    // Marks at once: completion of everything so far becomes observable.
    let value = core.raw.signal()?;
    event.set(core.line.at(value));
    drop(turn);
    Ok(())
}

#[inline(never)]
fn signal_timed(core: &StreamCore, event: &Event, time: Lease<Timestamp>) -> Result<()> {
    let mut turn = core.turn()?;
    let frame = turn.frame();
    frame.waits.clear();
    // SAFETY: the time stamp is of this device; it is leased by the submission.
    let value = unsafe { core.submit(frame, &Op::Stamp(&time))? };
    event.set_timed(core.line.at(value), time, None);
    drop(turn);
    Ok(())
}

fn same_length(dst: u64, src: u64) -> Result<()> {
    if dst == src {
        Ok(())
    } else {
        Err(Error::invalid(format!("a copy from {src} to {dst} bytes; they must be equal")))
    }
}

fn writing(slice: Slice<'_>) -> Operand<'_> {
    let bytes = slice.len();
    writing_some(slice, bytes)
}

/// A slice of which `bytes` bytes are written. What else the buffer holds stays, with the failure of whoever
/// was to write it: the record is the buffer's, so less than all of it counts as read too.
fn writing_some(slice: Slice<'_>, bytes: u64) -> Operand<'_> {
    let whole = bytes == slice.buffer().len();
    Operand { slice, access: if whole { Access::Write } else { Access::ReadWrite } }
}

/// Copies on the device, or between the stream's device and another one of its context; either side
/// may be host memory from [`Runtime::alloc_pinned`].
///
/// The copy has its place in the stream's order, wherever the other side lies: it begins after what the
/// stream was given before and is over when the stream is. It also waits for what other streams do with
/// both buffers, as every operation does. It never waits on the host.
///
/// Two devices of one backend are the driver's affair, which uses peer access where there is any.
/// Between backends bytes go through pinned memory, at most 64 MiB at a time; the stream then keeps a
/// stream of the other device until it is dropped. While recording, the other backend's part becomes host
/// calls of the graph: barriers, so that its pieces follow one another and do not overlap.
///
/// Host memory of one backend reaches host memory of another only if one of the two is the CPU's.
///
/// ```
/// use leasehold::{Context, DeviceId, View, ops};
/// # fn main() -> leasehold::Result<()> {
/// // Of this context, perhaps `sim:0` and `cuda:1`: the call is the same.
/// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
/// let (x, y) = (runtime.upload(&[1u32, 2, 3])?, runtime.alloc_pinned(8)?);
/// ops::copy(runtime.stream(), y.view(), x.part(4, 8)?)?;
/// assert_eq!(runtime.download::<u32>(&y)?, [2, 3]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `InvalidArgument` when the lengths differ, the parts overlap, neither side is of the stream's device,
/// or a buffer is of another context; `OutOfMemory` for staging memory; `Unsupported` between backends
/// that cannot wait for each other, and between host memory of two backends neither of which is the CPU;
/// the stream's cause. After an error of the other device a part may have
/// been copied.
#[doc(alias("cudaMemcpyPeerAsync", "vkCmdCopyBuffer"))]
pub fn copy(stream: &Stream, dst: Slice<'_>, src: Slice<'_>) -> Result<()> {
    same_length(dst.len(), src.len())?;
    copy_2d(stream, dst, src.len(), src, src.len(), src.len(), 1)
}

/// Copies `rows` rows of `width` bytes, `src_pitch` and `dst_pitch` bytes from row to row; between devices
/// as [`copy`].
///
/// Within one buffer the rows of the source may lie between those of the destination if both pitches are equal.
///
/// # Errors
/// `InvalidArgument` when a row is wider than a pitch, the rows do not lie in the parts, or source and
/// destination overlap; as [`copy`].
pub fn copy_2d(
    stream: &Stream,
    dst: Slice<'_>,
    dst_pitch: u64,
    src: Slice<'_>,
    src_pitch: u64,
    width: u64,
    rows: u64,
) -> Result<()> {
    if rows == 0 || width == 0 {
        return Ok(());
    }
    if rows > 1 && (width > dst_pitch || width > src_pitch) {
        return Err(Error::invalid(format!("rows of {width} bytes do not fit pitches of {src_pitch} and {dst_pitch}")));
    }
    let extent = |pitch: u64| (rows - 1).checked_mul(pitch).and_then(|b| b.checked_add(width)).unwrap_or(u64::MAX);
    if extent(src_pitch) > src.len() || extent(dst_pitch) > dst.len() {
        return Err(Error::invalid(format!(
            "{rows} rows of {width} bytes do not lie in parts of {} and {} bytes",
            src.len(),
            dst.len()
        )));
    }
    let (from, to) = (src.offset(), dst.offset());
    let beside = rows > 1 && src_pitch == dst_pitch && {
        let apart = from.abs_diff(to) % src_pitch;
        width <= apart && apart <= src_pitch - width
    };
    if src.buffer().same(dst.buffer()) && from < to + extent(dst_pitch) && to < from + extent(src_pitch) && !beside {
        return Err(Error::invalid("source and destination of a copy overlap"));
    }
    let copy = Copy2d {
        src: src.addr(),
        src_native: src.buffer().native(),
        src_pitch,
        dst: dst.addr(),
        dst_native: dst.buffer().native(),
        dst_pitch: if planted(Defect::SmallerPitch) { dst_pitch.min(src_pitch) } else { dst_pitch },
        width,
        rows,
    };
    let (from, to) = (src.read(), writing_some(dst, width * rows));
    check_writable(&to)?;
    if !(stream.runtime.owns(src.buffer()) && stream.runtime.owns(dst.buffer())) {
        return between::copy(stream, &copy, to, from);
    }
    // SAFETY: both parts were checked to hold what is copied; they are the operands, of this device.
    unsafe { stream.pass_checked(&Op::Copy(copy), &[from, to]) }.map(drop)
}

/// What a fill writes, again and again.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Pattern {
    /// One byte.
    U8(u8),
    /// Two bytes, little-endian.
    U16(u16),
    /// Four bytes, little-endian.
    U32(u32),
}

impl Pattern {
    /// The four bytes of an `f32`.
    #[must_use]
    pub fn f32(value: f32) -> Self {
        Self::U32(value.to_bits())
    }

    fn parts(self) -> (u32, u8) {
        match self {
            Pattern::U8(b) => (u32::from(b), 1),
            Pattern::U16(h) => (u32::from(h), 2),
            Pattern::U32(w) => (w, 4),
        }
    }
}

/// Fills a part of a buffer with a pattern.
///
/// # Errors
/// `InvalidArgument` when offset or length is no multiple of the pattern's size; the stream's cause.
#[doc(alias = "memset")]
pub fn fill(stream: &Stream, dst: Slice<'_>, pattern: Pattern) -> Result<()> {
    let (pattern, width) = pattern.parts();
    if !dst.offset().is_multiple_of(u64::from(width)) || !dst.len().is_multiple_of(u64::from(width)) {
        return Err(Error::invalid(format!(
            "offset {} and length {} must be multiples of the pattern's {width} bytes",
            dst.offset(),
            dst.len()
        )));
    }
    if dst.is_empty() {
        return Ok(());
    }
    let op = Op::Fill(Fill { dst: dst.addr(), native: dst.buffer().native(), bytes: dst.len(), pattern, width });
    // SAFETY: the operand covers what is filled.
    unsafe { stream.pass(&op, &[writing(dst)]) }.map(drop)
}

/// Copies host values to the device. They are taken during the call, so the caller may change or free them right after it.
///
/// With `asynchronous` the call copies them to staging memory, however many they are, and never waits for the stream: the staging
/// memory is pinned where the device has pinned memory, and is free again once the copy is over. Without `asynchronous` the device
/// copies them from where they lie, and the call waits for that and for all earlier work of the stream. [`upload_owned`] and
/// [`copy_pinned`] neither stage nor wait. While recording the graph keeps the values, and its every launch copies them again.
///
/// # Errors
/// `InvalidArgument` when the lengths differ; `OutOfMemory` without staging memory; the stream's cause; with `asynchronous` false also
/// `Recording` while recording, and `InvalidState` in a host call of this stream, which would wait for itself.
pub fn upload<T: NoUninit>(stream: &Stream, dst: Slice<'_>, src: &[T], asynchronous: bool) -> Result<()> {
    let src: &[u8] = bytemuck::cast_slice(src);
    same_length(dst.len(), src.len() as u64)?;
    if src.is_empty() {
        return Ok(());
    }
    if !asynchronous {
        recorder::refuse(&stream.runtime, "a copy cannot be waited for while recording; make it asynchronous")?;
    }
    let recording = recorder::is_active() && recorder::is_recording(&stream.runtime);
    if recording || asynchronous {
        // The door says again what is wrong with the buffer; nothing is staged for what it would refuse.
        stream.runtime.check_operands(&[writing(dst)])?;
        return upload_owned(stream, dst, Arc::new(stage::Staged::take(stream, src, recording)?));
    }
    let op = Op::Upload(Upload {
        src: src.as_ptr(),
        dst: dst.addr(),
        native: dst.buffer().native(),
        bytes: dst.len(),
        keep: None,
    });
    // SAFETY: the source is borrowed for this call; the stream is not recorded, as was found above.
    unsafe { borrow::pass(stream, &op, &[writing(dst)]) }
}

/// Host memory that an asynchronous copy keeps alive by itself: vectors, boxed, shared and `'static` slices of plain data.
///
/// # Safety
/// - While the value lives, [`bytes`](Self::bytes) is always the same memory, wherever the value is moved. The memory is valid for
///   reads on any thread.
/// - All of its bytes are initialised, and nobody writes them while the value is shared.
pub unsafe trait HostBytes: Send + Sync + 'static {
    /// The bytes; the same address for the life of the value.
    fn bytes(&self) -> &[u8];
}

// SAFETY: the elements lie on the heap. Whoever writes them, or makes them move, needs the vector's `&mut`. They have no padding and
// no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Vec<T> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: the elements lie on the heap. Whoever writes them needs the box's `&mut`. They have no padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Box<[T]> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: the count, which the value is one of, keeps the elements where they are, and nobody has `&mut` to them while it is
// shared. They have no padding and no interior mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for Arc<[T]> {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

// SAFETY: a shared borrow for the rest of the process: the elements neither move nor change. They have no padding and no interior
// mutability.
unsafe impl<T: NoUninit + Send + Sync> HostBytes for &'static [T] {
    fn bytes(&self) -> &[u8] {
        bytemuck::cast_slice(self)
    }
}

/// Copies host memory that the copy itself keeps alive; never waits.
///
/// ```
/// use leasehold::{Context, DeviceId, View, ops};
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Context::new().runtime(DeviceId::cpu(0))?;
/// let x = runtime.alloc(12)?;
/// ops::upload_owned(runtime.stream(), x.view(), std::sync::Arc::new(vec![1.0f32, 2.0, 3.0]))?;
/// assert_eq!(runtime.download::<f32>(&x)?, [1.0, 2.0, 3.0]);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// `InvalidArgument` when the lengths differ; the stream's cause.
pub fn upload_owned<H: HostBytes>(stream: &Stream, dst: Slice<'_>, src: Arc<H>) -> Result<()> {
    let bytes = src.bytes();
    same_length(dst.len(), bytes.len() as u64)?;
    if bytes.is_empty() {
        return Ok(());
    }
    let (address, len) = (bytes.as_ptr(), bytes.len() as u64);
    let keep: Keep = src;
    let op = Op::Upload(Upload {
        src: address,
        dst: dst.addr(),
        native: dst.buffer().native(),
        bytes: len,
        keep: Some(&keep),
    });
    // SAFETY: the submission (or the recording) keeps the value, and so the memory where it is and as it is: `HostBytes` vouches for that.
    unsafe { stream.pass(&op, &[writing(dst)]) }.map(drop)
}

/// Copies device bytes to host values and waits for them.
///
/// # Errors
/// `InvalidArgument` when the lengths differ; the stream's cause; `Recording` while recording; `InvalidState` in a host call of this
/// stream, which would wait for itself.
pub fn download<T: Pod>(stream: &Stream, dst: &mut [T], src: Slice<'_>) -> Result<()> {
    let dst: &mut [u8] = bytemuck::cast_slice_mut(dst);
    same_length(dst.len() as u64, src.len())?;
    // SAFETY: the destination is as long, and borrowed for this call.
    unsafe { download_to(stream, dst.as_mut_ptr(), src) }
}

/// Copies device bytes to host memory, which need not be initialised, and waits for them. All of it is
/// written if the call succeeds.
///
/// # Errors
/// As [`download`].
///
/// # Safety
/// - `dst` is valid for writes of as many bytes as `src` has, and nobody else touches them meanwhile.
pub(crate) unsafe fn download_to(stream: &Stream, dst: *mut u8, src: Slice<'_>) -> Result<()> {
    recorder::refuse(&stream.runtime, "device memory cannot be read back while recording")?;
    if src.is_empty() {
        return Ok(());
    }
    let op =
        Op::Download(Download { src: src.addr(), native: src.buffer().native(), dst, bytes: src.len(), keep: None });
    // SAFETY: by the contract; the stream is not recorded.
    unsafe { borrow::pass(stream, &op, &[src.read()]) }
}

/// Copies from or to host memory from [`Runtime::alloc_pinned`], in either direction or between two such
/// buffers; never waits. As [`copy`], for callers who count on it that one side is host memory.
///
/// # Errors
/// `InvalidArgument` when the lengths differ, or when neither is host memory of the stream's device; the
/// stream's cause.
pub fn copy_pinned(stream: &Stream, dst: Slice<'_>, src: Slice<'_>) -> Result<()> {
    same_length(dst.len(), src.len())?;
    if dst.is_empty() {
        return Ok(());
    }
    // By its allocator: on a CPU device memory is host memory too. That it is one of this device's is checked by the door.
    let host = |s: &Slice<'_>| !stream.runtime.memory.owns(s.buffer());
    let op = match (host(&dst), host(&src)) {
        (false, true) => Op::Upload(Upload {
            src: src.addr() as *const u8,
            dst: dst.addr(),
            native: dst.buffer().native(),
            bytes: src.len(),
            keep: None,
        }),
        (true, false) => Op::Download(Download {
            src: src.addr(),
            native: src.buffer().native(),
            dst: dst.addr() as *mut u8,
            bytes: src.len(),
            keep: None,
        }),
        (true, true) => return copy(stream, dst, src),
        (false, false) => return Err(Error::invalid("neither side of a pinned copy is host memory")),
    };
    // SAFETY: both are operands: their memory is not reused before the copy's point.
    unsafe { stream.pass(&op, &[src.read(), writing(dst)]) }.map(drop)
}

/// Waits until nobody writes the part any more, and shows it to the host.
///
/// # Errors
/// `Unsupported` for memory that the host cannot touch; the cause when the last write failed; `Recording`.
///
/// # Safety
/// - While the bytes are looked at, nobody submits work that writes them.
pub unsafe fn map_read<'a>(runtime: &Runtime, slice: Slice<'a>) -> Result<&'a [u8]> {
    let operand = slice.read();
    wait_host_visible(runtime, &operand)?;
    if slice.is_empty() {
        return Ok(&[]);
    }
    // SAFETY: host-visible memory of a live buffer, whose writes are complete; by the contract there are no new ones.
    Ok(unsafe { std::slice::from_raw_parts(slice.addr() as *const u8, slice.len() as usize) })
}

/// Waits until nobody uses the part any more, and lets the host write it. The writes are seen by work submitted later.
///
/// # Errors
/// As [`map_read`].
///
/// # Safety
/// - While the bytes are borrowed, nobody else touches them: no view, no submission.
pub unsafe fn map_write<'a>(runtime: &Runtime, slice: Slice<'a>) -> Result<&'a mut [u8]> {
    let operand = Operand { slice, access: Access::ReadWrite };
    wait_host_visible(runtime, &operand)?;
    if slice.is_empty() {
        return Ok(&mut []);
    }
    // SAFETY: host-visible memory of a live buffer, whose uses are over; by the contract there is nobody else.
    Ok(unsafe { std::slice::from_raw_parts_mut(slice.addr() as *mut u8, slice.len() as usize) })
}

fn wait_host_visible(runtime: &Runtime, operand: &Operand<'_>) -> Result<()> {
    use leasehold_alloc::HostKind;
    recorder::refuse(&runtime.inner, "device memory cannot be mapped while recording")?;
    runtime.inner.check_operands(std::slice::from_ref(operand))?;
    runtime.inner.refuse_symbolic(std::slice::from_ref(operand))?;
    let buffer = operand.slice().buffer();
    if buffer.host_kind() == HostKind::None && !runtime.raw_device().caps().host_visible {
        return Err(Error::Unsupported(
            format!("the host cannot touch the memory of {}; download it instead", runtime.device()).into(),
        ));
    }
    if let Some(p) = buffer.write_stamp().point() {
        runtime.inner.wait_point(p, None)?;
    }
    let mut result = Ok(());
    if operand.access().writes() {
        buffer.for_each_read(|s| {
            if let (Ok(()), Some(p)) = (&result, s.point()) {
                result = runtime.inner.wait_point(p, None);
            }
        });
    }
    result
}

/// The number of operations that the calling thread has recorded on the runtime's device so far. `None` when it does not record.
#[must_use]
pub fn recorded_nodes(runtime: &Runtime) -> Option<u32> {
    recorder::nodes(&runtime.inner)
}

/// What the next operation that the calling thread records will be called in [`Graph::update`](crate::Graph::update). `None` when it does not
/// record.
#[must_use]
pub fn next_node(runtime: &Runtime) -> Option<NodeId> {
    recorded_nodes(runtime).map(NodeId::new)
}
