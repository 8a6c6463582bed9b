//! The operations of streams: waits, records, copies, fills, uploads, downloads, host calls.
//!
//! The operations are methods of [`Stream`]; here are the types that they take. An operation is
//! ordered after the earlier uses of its operands, on whatever stream they were. A caller that goes
//! past them to the backend ([`Stream::raw`], [`Stream::native`],
//! [`Runtime::raw_device`](crate::Runtime::raw_device)) orders its work itself. Such work leaves no
//! mark on buffers.
//!
//! On a stream of a recording they are noted in it, and each launch of the graph runs them.

mod batch;
mod blocking_copy;
mod call;
mod check;
mod mapped;
mod peer_copy;
mod ring;
mod shapes;
mod stage;

pub use shapes::{HostBytes, Pattern, Rows};

use crate::array::ArrayView;
use crate::event::Event;
use crate::runtime::check_writable;
use crate::stream::{Stream, StreamInner};
use crate::trace::recorder::What;
use crate::view::{BufferView, Operand};
use bytemuck::{AnyBitPattern, NoUninit, Pod};
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result, Timepoint};
use leasehold_hal::{Copy2d, Download, Fill, KeepAlive, Op, TimestampQuery, Upload};
use shapes::{same_length, writing, writing_some};

#[inline(never)]
fn signal_timed(core: &StreamInner, event: &Event, time: Lease<TimestampQuery>) -> Result<()> {
    let mut submit_guard = core.submit_guard()?;
    let scratch = submit_guard.scratch();
    scratch.waits.clear();
    // SAFETY: the timestamp is of this device; it is leased by the submission.
    let value = unsafe { core.submit::<Operand<'_>>(scratch, &Op::WriteTimestamp(&time), &[])? };
    event.set_timed(core.timeline.at(value), time, None);
    drop(submit_guard);
    Ok(())
}

/// Operations. On a stream of a recording each is noted, and runs at each launch of the graph.
impl Stream {
    /// Makes later work of the stream start after a timepoint, on the device. Does not block the
    /// host. The timepoint may be another device's, or a [`HostTimeline`](crate::HostTimeline)'s
    /// that nobody has signalled yet. In a recording: each launch of the graph comes after the
    /// timepoint.
    ///
    /// # Errors
    /// `Unsupported` when the device cannot wait for that timeline
    /// ([`Runtime::wait_for`](crate::Runtime::wait_for) then blocks the host instead);
    /// `InvalidArgument` for a timepoint that is not submitted, unless a host timeline can still
    /// signal it; the stream's cause. Waiting for a failed timepoint poisons the stream.
    #[doc(alias("wait_on", "stream::wait", "execution::stream::wait"))]
    pub fn wait(&self, point: Timepoint) -> Result<()> {
        let core = self.under();
        let timeline = core.timeline;
        if point.timeline_id() == timeline.id() && point.value() > timeline.submitted() {
            return Err(Error::invalid(format!(
                "{point:?} is not submitted yet: the stream would wait for itself; wait for another stream's timepoint, or for a host timeline"
            )));
        }
        if !point.timeline().expect(point.value()) {
            return Err(Error::invalid(format!(
                "{point:?} is not submitted, and no host timeline is there to signal it: the wait would never end; take timepoints from streams, events and host timelines"
            )));
        }
        if let Some(recording) = self.recording() {
            return recording.wait_point(point);
        }
        let submit_guard = core.submit_guard()?;
        self.healthy()?;
        if timeline.knows(point.into()) || point.is_settled() {
            return Ok(());
        }
        self.runtime.traced(What::Order(point), || core.raw.wait(point))?;
        core.count(1);
        drop(submit_guard);
        Ok(())
    }

    /// Makes later work of the stream start after the event's last record, on the device. Does not
    /// block the host. A later record of the event does not disturb it, and an event that was never
    /// recorded is not waited for.
    ///
    /// # Errors
    /// As [`wait`](Self::wait).
    #[doc(alias = "streamWaitEvent")]
    pub fn wait_event(&self, event: &Lease<Event>) -> Result<()> {
        if let Some(recording) = self.recording() {
            return recording.wait_event(event);
        }
        event.last().map_or(Ok(()), |point| self.wait(point))
    }

    /// Records the event at the stream's present end. In a recording: each launch of the graph
    /// records it.
    ///
    /// # Errors
    /// The stream's cause when it is poisoned; `InvalidArgument` for an event of another device;
    /// `OutOfMemory` without a timestamp for the record; the driver's own.
    #[doc(alias("signal", "stream::signal", "recordEvent"))]
    pub fn record(&self, event: &Lease<Event>) -> Result<()> {
        if event.runtime != self.runtime.serial() {
            return Err(Error::invalid(format!(
                "an event of another runtime (of {}) cannot be recorded on {self:?}; create it on the runtime of this stream",
                event.device
            )));
        }
        let time = event.fresh_time(&*self.runtime.device)?;
        if let Some(recording) = self.recording() {
            return recording.signal(event, time);
        }
        let core = self.under();
        if let Some(time) = time {
            return signal_timed(core, event, time);
        }
        let submit_guard = core.submit_guard()?;
        self.healthy()?;
        // Marks at once: completion of everything so far becomes observable.
        let value = core.raw.signal()?;
        event.set(core.timeline.at(value));
        drop(submit_guard);
        Ok(())
    }

    /// Copies on the device, or between the stream's device and another one of its context; either
    /// side may be host memory from [`Runtime::alloc_pinned`](crate::Runtime::alloc_pinned).
    ///
    /// The copy has its place in the stream's order, wherever the other side lies: it begins after
    /// what the stream was given before and is over when the stream is. It also waits for what
    /// other streams do with both buffers, as every operation does. It never waits on the host.
    ///
    /// Two devices of one backend are the driver's affair, which uses peer access where there is
    /// any. Between backends bytes go through pinned memory, at most 64 MiB at a time; the stream
    /// then keeps a stream of the other device until it is dropped. In a recording, the other
    /// backend's part becomes host calls of the graph: barriers, so that its pieces follow one
    /// another and do not overlap.
    ///
    /// A copy between backends of more than 1 MiB, or of more than 256 rows with gaps, has several
    /// pieces. Each piece is ordered by itself after the earlier uses of both buffers. If another
    /// thread submits a write of one of them meanwhile, some pieces come before that write and some
    /// after it.
    ///
    /// Host memory of one backend reaches host memory of another only if one of the two is the
    /// CPU's.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// // Of this context, perhaps `sim:0` and `cuda:1`: the call is the same.
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (x, y) = (runtime.upload(&[1u32, 2, 3])?, runtime.alloc_pinned(8)?);
    /// runtime.stream().copy(y.view(), x.part(4..12)?)?;
    /// assert_eq!(runtime.to_vec::<u32>(&y)?, [2, 3]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ, the parts overlap, neither side is of the
    /// stream's device, or a buffer is of another context; `OutOfMemory` for staging memory;
    /// `Unsupported` between backends that cannot wait for each other, and between host memory of
    /// two backends neither of which is the CPU; the stream's cause. After an error of the other
    /// device a part may have been copied.
    #[doc(alias("memcpyD2D", "cudaMemcpyPeerAsync", "vkCmdCopyBuffer"))]
    pub fn copy(&self, dst: BufferView<'_>, src: BufferView<'_>) -> Result<()> {
        same_length(dst.len(), src.len())?;
        self.copy_2d(dst, src, Rows::new(src.len(), 1))
    }

    /// Copies rows of bytes that lie apart; between devices as [`copy`](Self::copy).
    ///
    /// Within one buffer the rows of the source may lie between those of the destination if both
    /// pitches are equal.
    ///
    /// # Errors
    /// `InvalidArgument` when a row is wider than a pitch, the rows do not lie in the parts, or
    /// source and destination overlap; as [`copy`](Self::copy).
    #[doc(alias("cudaMemcpy2DAsync"))]
    pub fn copy_2d(&self, dst: BufferView<'_>, src: BufferView<'_>, shape: Rows) -> Result<()> {
        let Rows { width, rows, src_pitch, dst_pitch } = shape;
        if rows == 0 || width == 0 {
            return Ok(());
        }
        if rows > 1 && (width > dst_pitch || width > src_pitch) {
            return Err(Error::invalid(format!(
                "rows of {width} bytes do not fit pitches of {src_pitch} and {dst_pitch}; a pitch is a row at least"
            )));
        }
        let extent = |pitch: u64| {
            (rows - 1).checked_mul(pitch).and_then(|b| b.checked_add(width)).unwrap_or(u64::MAX)
        };
        if extent(src_pitch) > src.len() || extent(dst_pitch) > dst.len() {
            return Err(Error::invalid(format!(
                "{rows} rows of {width} bytes do not lie in parts of {} and {} bytes; copy fewer rows, or give larger parts",
                src.len(),
                dst.len()
            )));
        }
        let (from, to) = (src.offset(), dst.offset());
        let beside = rows > 1 && src_pitch == dst_pitch && {
            let apart = from.abs_diff(to) % src_pitch;
            width <= apart && apart <= src_pitch - width
        };
        if src.buffer().same(dst.buffer())
            && from < to + extent(dst_pitch)
            && to < from + extent(src_pitch)
            && !beside
        {
            return Err(Error::invalid(
                "the copy overlaps itself: source and destination share bytes; copy by way of another buffer",
            ));
        }
        let copy = Copy2d {
            src: src.addr(),
            src_native: src.buffer().native(),
            src_pitch,
            dst: dst.addr(),
            dst_native: dst.buffer().native(),
            dst_pitch,
            width,
            rows,
        };
        let (from, to) = (src.read(), writing_some(dst, width * rows));
        check_writable(&to)?;
        if !(self.runtime.owns(src.buffer()) && self.runtime.owns(dst.buffer())) {
            return peer_copy::copy(self, &copy, to, from);
        }
        // SAFETY: both parts were checked to hold what is copied; they are the operands, of this
        // device.
        unsafe { self.pass_checked(&Op::Copy(copy), &[from, to]) }.map(drop)
    }

    /// Copies from or to host memory from [`Runtime::alloc_pinned`](crate::Runtime::alloc_pinned),
    /// in either direction or between two such buffers; never waits. As [`copy`](Self::copy), for
    /// callers who count on it that one side is host memory.
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ, or when neither is host memory of the stream's
    /// device; the stream's cause.
    pub fn copy_pinned(&self, dst: BufferView<'_>, src: BufferView<'_>) -> Result<()> {
        same_length(dst.len(), src.len())?;
        if dst.is_empty() {
            return Ok(());
        }
        // The allocator decides, because device memory of a CPU is host memory too.
        let device = |s: &BufferView<'_>| self.runtime.memory.owns(s.buffer());
        let (from, to) = (src.read(), writing(dst));
        let (op, host) = match (device(&dst), device(&src)) {
            (true, false) => {
                let upload = Upload {
                    src: src.addr() as *const u8,
                    dst: dst.addr(),
                    native: dst.buffer().native(),
                    bytes: src.len(),
                    keep: None,
                };
                (Op::Upload(upload), &from)
            }
            (false, true) => {
                let download = Download {
                    src: src.addr(),
                    native: src.buffer().native(),
                    dst: dst.addr() as *mut u8,
                    bytes: src.len(),
                    keep: None,
                };
                (Op::Download(download), &to)
            }
            (false, false) => return self.copy(dst, src),
            (true, true) => {
                return Err(Error::invalid(
                    "neither side of a pinned copy is host memory; allocate one by Runtime::alloc_pinned, or use Stream::copy",
                ));
            }
        };
        self.runtime.check_host(host)?;
        check_writable(&to)?;
        // SAFETY: both are operands, of this device: their memory is not reused before the copy's
        // timepoint.
        unsafe { self.pass_checked(&op, &[from, to]) }.map(drop)
    }

    /// Fills a buffer or a part of it with a number of 1, 2 or 4 bytes, again and again.
    ///
    /// # Errors
    /// `InvalidArgument` when offset or length is no multiple of the pattern's size; the stream's
    /// cause.
    #[doc(alias = "memset")]
    pub fn fill(&self, dst: BufferView<'_>, pattern: impl Into<Pattern>) -> Result<()> {
        let (pattern, width) = pattern.into().parts();
        if !dst.offset().is_multiple_of(u64::from(width))
            || !dst.len().is_multiple_of(u64::from(width))
        {
            return Err(Error::invalid(format!(
                "offset {} and length {} must be multiples of the pattern's {width} bytes",
                dst.offset(),
                dst.len()
            )));
        }
        if dst.is_empty() {
            return Ok(());
        }
        let op = Op::Fill(Fill {
            dst: dst.addr(),
            native: dst.buffer().native(),
            bytes: dst.len(),
            pattern,
            width,
        });
        // SAFETY: the operand covers what is filled.
        unsafe { self.pass(&op, &[writing(dst)]) }.map(drop)
    }

    /// Fills an array or a part of it with a value. Does not wait.
    ///
    /// A value that is no pattern of 1, 2 or 4 bytes is uploaded, and doubled on the device until
    /// the part is full: a logarithmic number of copies.
    ///
    /// # Errors
    /// As [`fill`](Self::fill) and [`copy`](Self::copy).
    pub fn fill_with<'a, T: NoUninit>(
        &self,
        dst: impl Into<ArrayView<'a, T>>,
        value: T,
    ) -> Result<()> {
        let dst = dst.into();
        if let Some(pattern) = Pattern::of(bytemuck::bytes_of(&value)) {
            return self.fill(dst.view(), pattern);
        }
        let len = dst.len();
        let mut done = len.min(FILL_FROM_HOST.div_ceil(size_of::<T>().max(1)));
        self.upload(dst.slice(..done).view(), &vec![value; done])?;
        while done < len {
            let more = done.min(len - done);
            self.copy(dst.slice(done..done + more).view(), dst.slice(..more).view())?;
            done += more;
        }
        Ok(())
    }

    /// Copies host values to the device. They are taken during the call, so the caller may change
    /// or free them right after it.
    ///
    /// The call copies them to staging memory, however many they are, and never waits for earlier
    /// work. The staging memory is pinned where the device has pinned memory, and is free again
    /// once the copy is over. Many values for an idle stream go through a few pieces of staging
    /// memory again and again, and the call waits for the device to copy them.
    /// [`upload_owned`](Self::upload_owned) and [`copy_pinned`](Self::copy_pinned) need no staging.
    /// In a recording the graph keeps the values, and its every launch copies them again.
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ; `OutOfMemory` without staging memory; the
    /// stream's cause.
    #[doc(alias = "memcpyH2D")]
    pub fn upload<T: NoUninit>(&self, dst: BufferView<'_>, src: &[T]) -> Result<()> {
        let src: &[u8] = bytemuck::cast_slice(src);
        same_length(dst.len(), src.len() as u64)?;
        if src.is_empty() {
            return Ok(());
        }
        let recording = self.is_recording();
        if !recording && ring::upload(self, dst, src, ring::WaitFor::OwnCopy)? {
            return Ok(());
        }
        // The submit path makes the same check again. Nothing is staged for a copy that would be
        // refused.
        self.runtime.check_operands(&[writing(dst)])?;
        self.upload_owned(dst, stage::Staged::take(self, src, recording)?)
    }

    /// As [`upload`](Self::upload), and waits for the copy and for all earlier work of the stream.
    ///
    /// The device copies a few values from where they lie. Many go through pinned memory, where the
    /// device has such memory: several threads fill it while the device copies from it.
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ; the stream's cause; `Recording` for a recording's
    /// stream; `InvalidState` in a host call of this stream, which would wait for itself.
    pub fn upload_blocking<T: NoUninit>(&self, dst: BufferView<'_>, src: &[T]) -> Result<()> {
        let src: &[u8] = bytemuck::cast_slice(src);
        same_length(dst.len(), src.len() as u64)?;
        if src.is_empty() {
            return Ok(());
        }
        self.live("a copy cannot be waited for while recording; `upload` stages it")?;
        if ring::upload(self, dst, src, ring::WaitFor::EarlierWork)? {
            return Ok(());
        }
        let op = Op::Upload(Upload {
            src: src.as_ptr(),
            dst: dst.addr(),
            native: dst.buffer().native(),
            bytes: dst.len(),
            keep: None,
        });
        // SAFETY: the source is borrowed for this call; the stream is not recorded, as was found
        // above.
        unsafe { blocking_copy::pass(self, &op, &[writing(dst)]) }
    }

    /// Copies host memory that the copy itself keeps alive: a vector, a boxed or shared slice.
    /// Never waits, and stages nothing.
    ///
    /// ```
    /// use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let x = runtime.alloc(12)?;
    /// runtime.stream().upload_owned(x.view(), vec![1.0f32, 2.0, 3.0])?;
    /// assert_eq!(runtime.to_vec::<f32>(&x)?, [1.0, 2.0, 3.0]);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ; the stream's cause.
    pub fn upload_owned(&self, dst: BufferView<'_>, src: impl HostBytes) -> Result<()> {
        let (address, len) = (src.bytes().as_ptr(), src.bytes().len() as u64);
        same_length(dst.len(), len)?;
        if len == 0 {
            return Ok(());
        }
        // The bytes stay where they are as the value moves: `HostBytes` vouches for that.
        let keep: KeepAlive = Arc::new(src);
        let op = Op::Upload(Upload {
            src: address,
            dst: dst.addr(),
            native: dst.buffer().native(),
            bytes: len,
            keep: Some(&keep),
        });
        // SAFETY: the submission (or the recording) keeps the value, and so the memory where it is
        // and as it is: `HostBytes` vouches for that.
        unsafe { self.pass(&op, &[writing(dst)]) }.map(drop)
    }

    /// Copies device bytes to host values and waits for them.
    ///
    /// # Errors
    /// `InvalidArgument` when the lengths differ; the stream's cause; `Recording` for a recording's
    /// stream; `InvalidState` in a host call of this stream, which would wait for itself.
    #[doc(alias = "memcpyD2H")]
    pub fn download<T: Pod>(&self, dst: &mut [T], src: BufferView<'_>) -> Result<()> {
        let dst: &mut [u8] = bytemuck::cast_slice_mut(dst);
        same_length(dst.len() as u64, src.len())?;
        // SAFETY: the destination is as long, and borrowed for this call.
        unsafe { download_to(self, dst.as_mut_ptr(), src) }
    }

    /// As [`download`](Self::download), into a vector whose room is used again. The former
    /// values are gone, also after an error, which leaves the vector empty.
    ///
    /// ```
    /// # use leasehold::{DeviceId, Runtime, View};
    /// # fn main() -> leasehold::Result<()> {
    /// # let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (first, second) = (runtime.upload(&[1u32, 2, 3])?, runtime.upload(&[4u32, 5])?);
    /// let mut values: Vec<u32> = Vec::new();
    /// runtime.stream().download_into(&mut values, first.view())?;
    /// let room = values.as_ptr();
    /// runtime.stream().download_into(&mut values, second.view())?;
    /// assert_eq!((&values[..], values.as_ptr()), (&[4, 5][..], room));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` when the length is no multiple of the type's size; `OutOfMemory` on the
    /// host; as [`download`](Self::download).
    pub fn download_into<T: AnyBitPattern>(
        &self,
        into: &mut Vec<T>,
        src: BufferView<'_>,
    ) -> Result<()> {
        into.clear();
        let count = src.values::<T>()?.len();
        let no_room = |_| Error::from(leasehold_core::OutOfMemory::new("the host", src.len()));
        into.try_reserve_exact(count).map_err(no_room)?;
        // SAFETY: there is room for as many bytes, which nobody else sees. Once they are written,
        // which the call's success says, they are values: every pattern of bytes is one of an
        // `AnyBitPattern`.
        unsafe {
            download_to(self, into.as_mut_ptr().cast(), src)?;
            into.set_len(count);
        }
        Ok(())
    }
}

/// Bytes of a value that a fill repeats on the host before it doubles them on the device.
const FILL_FROM_HOST: usize = 4096;

/// Copies device bytes to host memory, which need not be initialised, and waits for them. All of it
/// is written if the call succeeds.
///
/// # Errors
/// As [`download`].
///
/// # Safety
/// - `dst` is valid for writes of as many bytes as `src` has, and nobody else touches them
///   meanwhile.
pub(crate) unsafe fn download_to(stream: &Stream, dst: *mut u8, src: BufferView<'_>) -> Result<()> {
    stream.live(
        "device memory cannot be read back while recording; read it after a launch of the graph",
    )?;
    if src.is_empty() {
        return Ok(());
    }
    // SAFETY: by the contract.
    if unsafe { ring::download(stream, dst, src) }? {
        return Ok(());
    }
    let op = Op::Download(Download {
        src: src.addr(),
        native: src.buffer().native(),
        dst,
        bytes: src.len(),
        keep: None,
    });
    // SAFETY: by the contract; the stream is not recorded.
    unsafe { blocking_copy::pass(stream, &op, &[src.read()]) }
}
