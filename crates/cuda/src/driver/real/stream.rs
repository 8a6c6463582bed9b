//! Streams and events.
//!
//! A host function is a boxed closure behind an `extern "C"` trampoline. The driver calls each
//! function once, or never if the context failed before. In that case the closure leaks, because
//! the driver does not report that it dropped the function. A panic of the closure stops at the
//! trampoline.
//!
//! This module must not know managers.

use super::{RealDriver, drive, plausible};
use crate::conv;
use crate::driver::codes::code;
use crate::driver::ops::{
    CopyKind, EventFlags, EventOps, HostFunction, Launch, NativeBatch, NativeContext, NativeCopy,
    NativeEvent, NativeFill, NativeStream, Progress, StreamOps,
};
use crate::driver::probe;
use cudarc::driver::sys::{
    self, CUcontext, CUevent, CUfunction, CUlaunchAttribute, CUlaunchAttributeID,
    CUlaunchAttributeValue, CUlaunchAttributeValue_union__bindgen_ty_1 as ClusterDim,
    CUlaunchConfig, CUstream,
};
use leasehold_core::panics::quietly;
use leasehold_core::{Error, Result};
use leasehold_hal::Pipeline;
use std::ffi::c_void;
use std::ptr;

/// `CU_STREAM_NON_BLOCKING`: no implicit order with the legacy stream.
const NON_BLOCKING: u32 = sys::CUstream_flags::CU_STREAM_NON_BLOCKING as u32;
/// `CU_STREAM_WRITE_VALUE_DEFAULT`: after all earlier work, visible to the host.
const WRITE_DEFAULT: u32 = 0;
/// `CU_STREAM_WAIT_VALUE_GEQ`.
const WAIT_GEQ: u32 = 0;

/// The keys of an argument buffer in a launch's list: `CU_LAUNCH_PARAM_BUFFER_POINTER`, `_SIZE`,
/// `_END`.
const BUFFER_POINTER: *mut c_void = ptr::without_provenance_mut(1);
const BUFFER_SIZE: *mut c_void = ptr::without_provenance_mut(2);

/// The list that gives the driver a launch's arguments. The driver reads the arguments before a
/// launch returns, and copies them when a node is made or changed.
pub(super) struct Extra {
    bytes: usize,
    words: [*mut c_void; 5],
}

impl Extra {
    pub(super) fn new(args: &[u8]) -> Self {
        let words = [
            BUFFER_POINTER,
            args.as_ptr().cast_mut().cast(),
            BUFFER_SIZE,
            ptr::null_mut(),
            ptr::null_mut(),
        ];
        Self { bytes: args.len(), words }
    }

    /// The list for the driver, or null for a function without parameters. The list is valid while
    /// `self` does not move and the arguments live.
    pub(super) fn pointer(&mut self) -> *mut *mut c_void {
        if self.bytes == 0 {
            return ptr::null_mut();
        }
        self.words[3] = (&raw mut self.bytes).cast();
        self.words.as_mut_ptr()
    }
}

/// A launch's attributes in the driver's form.
pub(super) fn attributes(launch: &Launch<'_>) -> Vec<CUlaunchAttribute> {
    use CUlaunchAttributeID::{
        CU_LAUNCH_ATTRIBUTE_CLUSTER_DIMENSION as CLUSTER,
        CU_LAUNCH_ATTRIBUTE_COOPERATIVE as COOPERATIVE,
    };
    let mut all = Vec::new();
    let mut give = |id, value| all.push(CUlaunchAttribute { id, pad: [0; 4], value });
    if let Some(&Pipeline { cluster: [x, y, z], cooperative, .. }) = launch.attributes {
        if (x, y, z) != (1, 1, 1) {
            give(CLUSTER, CUlaunchAttributeValue { clusterDim: ClusterDim { x, y, z } });
        }
        if cooperative {
            give(COOPERATIVE, CUlaunchAttributeValue { cooperative: 1 });
        }
    }
    all
}

/// A launch in the driver's form, which is valid as long as the attributes are.
pub(super) fn config(
    launch: &Launch<'_>,
    stream: CUstream,
    attributes: &mut [CUlaunchAttribute],
) -> CUlaunchConfig {
    CUlaunchConfig {
        gridDimX: launch.grid[0],
        gridDimY: launch.grid[1],
        gridDimZ: launch.grid[2],
        blockDimX: launch.block[0],
        blockDimY: launch.block[1],
        blockDimZ: launch.block[2],
        sharedMemBytes: launch.shared,
        hStream: stream,
        attrs: attributes.as_mut_ptr(),
        numAttrs: attributes.len() as u32,
    }
}

/// Runs a closure that the driver holds.
unsafe extern "C" fn run_once(data: *mut c_void) {
    // SAFETY: `data` came from `Box::into_raw` of this type, and the driver calls each function
    // once.
    let call = unsafe { Box::from_raw(data.cast::<HostFunction>()) };
    if quietly(call).is_none() {
        tracing::error!("a host function on a CUDA stream panicked");
    }
}

/// The time between two finished records, in nanoseconds.
fn nanoseconds(milliseconds: f32) -> i64 {
    (f64::from(milliseconds) * 1e6).round() as i64
}

impl RealDriver {
    fn progress(&self, api: &'static str, code: i32) -> Result<Progress> {
        match code {
            0 => Ok(Progress::Complete),
            code::NOT_READY => Ok(Progress::Pending),
            code => Err(self.failed(api, code, 0)),
        }
    }
}

/// A 2-D copy in the driver's form.
fn two_dimensional(copy: &NativeCopy) -> sys::CUDA_MEMCPY2D {
    let (source, target) = conv::memory_types(copy.kind);
    sys::CUDA_MEMCPY2D {
        srcXInBytes: 0,
        srcY: 0,
        srcMemoryType: source,
        srcHost: copy.src as *const c_void,
        srcDevice: copy.src,
        srcArray: ptr::null_mut(),
        srcPitch: copy.src_pitch as usize,
        dstXInBytes: 0,
        dstY: 0,
        dstMemoryType: target,
        dstHost: copy.dst as *mut c_void,
        dstDevice: copy.dst,
        dstArray: ptr::null_mut(),
        dstPitch: copy.dst_pitch as usize,
        WidthInBytes: copy.width as usize,
        Height: copy.rows as usize,
    }
}

impl StreamOps for RealDriver {
    fn stream_create(&self, priority: i32) -> Result<NativeStream> {
        let mut stream: CUstream = ptr::null_mut();
        drive!(self, cuStreamCreateWithPriority(&raw mut stream, NON_BLOCKING, priority))?;
        // A null handle would be the legacy stream.
        plausible::object("cuStreamCreateWithPriority", stream).map(NativeStream)
    }

    unsafe fn stream_destroy(&self, stream: NativeStream) -> Result<()> {
        drive!(self, cuStreamDestroy_v2(stream.0 as CUstream))
    }

    unsafe fn stream_query(&self, stream: NativeStream) -> Result<Progress> {
        // SAFETY: the stream is the caller's.
        let code = self.code(|f| unsafe { (f.cuStreamQuery)(stream.0 as CUstream) })?;
        self.progress("cuStreamQuery", code)
    }

    unsafe fn stream_synchronize(&self, stream: NativeStream) -> Result<()> {
        drive!(self, cuStreamSynchronize(stream.0 as CUstream))
    }

    /// A stream is an object in memory of this process.
    fn may_be_stream(&self, stream: NativeStream) -> bool {
        stream.0.is_multiple_of(align_of::<u64>() as u64) && probe::is_readable(stream.0)
    }

    unsafe fn stream_wait_event(&self, stream: NativeStream, event: NativeEvent) -> Result<()> {
        drive!(self, cuStreamWaitEvent(stream.0 as CUstream, event.0 as CUevent, 0))
    }

    unsafe fn stream_write_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        drive!(self, cuStreamWriteValue64_v2(stream.0 as CUstream, addr, value, WRITE_DEFAULT))
    }

    unsafe fn stream_wait_word(&self, stream: NativeStream, addr: u64, value: u64) -> Result<()> {
        drive!(self, cuStreamWaitValue64_v2(stream.0 as CUstream, addr, value, WAIT_GEQ))
    }

    unsafe fn host_function(&self, stream: NativeStream, call: HostFunction) -> Result<()> {
        let data = Box::into_raw(Box::new(call));
        let accepted =
            drive!(self, cuLaunchHostFunc(stream.0 as CUstream, Some(run_once), data.cast()));
        if accepted.is_err() {
            // SAFETY: the driver refused the function, so this call owns the box.
            drop(unsafe { Box::from_raw(data) });
        }
        accepted
    }

    #[inline]
    unsafe fn launch(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()> {
        let mut extra = Extra::new(launch.args);
        let extra = extra.pointer();
        let ([gx, gy, gz], [bx, by, bz]) = (launch.grid, launch.block);
        let function = launch.function.0 as CUfunction;
        let stream = stream.0 as CUstream;
        drive!(
            self,
            cuLaunchKernel(
                function,
                gx,
                gy,
                gz,
                bx,
                by,
                bz,
                launch.shared,
                stream,
                ptr::null_mut(),
                extra
            )
        )
    }

    unsafe fn launch_ex(&self, stream: NativeStream, launch: &Launch<'_>) -> Result<()> {
        let mut extra = Extra::new(launch.args);
        let extra = extra.pointer();
        let function = launch.function.0 as CUfunction;
        let mut attributes = attributes(launch);
        let config = config(launch, stream.0 as CUstream, &mut attributes);
        drive!(self, cuLaunchKernelEx(&raw const config, function, ptr::null_mut(), extra))
    }

    unsafe fn copy(&self, stream: NativeStream, copy: &NativeCopy) -> Result<()> {
        let stream = stream.0 as CUstream;
        if copy.rows != 1 {
            let params = two_dimensional(copy);
            return drive!(self, cuMemcpy2DAsync_v2(&raw const params, stream));
        }
        let bytes = copy.width as usize;
        match copy.kind {
            CopyKind::HostToDevice => {
                drive!(
                    self,
                    cuMemcpyHtoDAsync_v2(copy.dst, copy.src as *const c_void, bytes, stream)
                )
            }
            CopyKind::DeviceToHost => {
                drive!(self, cuMemcpyDtoHAsync_v2(copy.dst as *mut c_void, copy.src, bytes, stream))
            }
            CopyKind::DeviceToDevice => {
                drive!(self, cuMemcpyDtoDAsync_v2(copy.dst, copy.src, bytes, stream))
            }
        }
    }

    unsafe fn copy_batch(&self, stream: NativeStream, batch: &NativeBatch<'_>) -> Result<()> {
        let count = batch.bytes.len();
        if batch.src.len() != count || batch.dst.len() != count {
            return Err(Error::invalid("the lists of a batch have unequal lengths"));
        }
        // The driver reads the lists during the call, and writes none of them.
        let (dst, src) = (batch.dst.as_ptr().cast_mut(), batch.src.as_ptr().cast_mut());
        let (bytes, stream) = (batch.bytes.as_ptr().cast_mut(), stream.0 as CUstream);
        let mut attributes = conv::batch_attributes(batch.order);
        // One set of attributes, from the first copy on.
        let (mut from, mut failed) = (0, 0);
        self.call("cuMemcpyBatchAsync", 0, |f| {
            let (attributes, from) = (&raw mut attributes, &raw mut from);
            match (f.cuMemcpyBatchAsync_v2, f.cuMemcpyBatchAsync) {
                // SAFETY: the lists have `count` elements each, and the other pointers are to
                // locals. The caller vouches for the memory and for the stream.
                (Some(copy), _) => unsafe {
                    copy(dst, src, bytes, count, attributes, from, 1, stream)
                },
                // SAFETY: as above.
                (None, Some(copy)) => unsafe {
                    copy(dst, src, bytes, count, attributes, from, 1, &raw mut failed, stream)
                },
                (None, None) => code::NOT_SUPPORTED,
            }
        })
    }

    unsafe fn copy_peer(
        &self,
        stream: NativeStream,
        dst: (u64, NativeContext),
        src: (u64, NativeContext),
        bytes: u64,
    ) -> Result<()> {
        let (to, from) = (dst.1.0 as CUcontext, src.1.0 as CUcontext);
        drive!(
            self,
            cuMemcpyPeerAsync(dst.0, to, src.0, from, bytes as usize, stream.0 as CUstream)
        )
    }

    unsafe fn fill(&self, stream: NativeStream, fill: &NativeFill) -> Result<()> {
        let (count, stream) = (fill.count as usize, stream.0 as CUstream);
        match fill.width {
            1 => drive!(self, cuMemsetD8Async(fill.dst, fill.value as u8, count, stream)),
            2 => drive!(self, cuMemsetD16Async(fill.dst, fill.value as u16, count, stream)),
            4 => drive!(self, cuMemsetD32Async(fill.dst, fill.value, count, stream)),
            width => {
                Err(Error::invalid(format!("a fill's pattern has 1, 2 or 4 bytes, not {width}")))
            }
        }
    }
}

impl EventOps for RealDriver {
    fn event_create(&self, flags: EventFlags) -> Result<NativeEvent> {
        let mut event: CUevent = ptr::null_mut();
        drive!(self, cuEventCreate(&raw mut event, conv::event_flags(flags)))?;
        plausible::object("cuEventCreate", event).map(NativeEvent)
    }

    unsafe fn event_destroy(&self, event: NativeEvent) -> Result<()> {
        drive!(self, cuEventDestroy_v2(event.0 as CUevent))
    }

    unsafe fn event_record(&self, event: NativeEvent, stream: NativeStream) -> Result<()> {
        drive!(self, cuEventRecord(event.0 as CUevent, stream.0 as CUstream))
    }

    unsafe fn event_query(&self, event: NativeEvent) -> Result<Progress> {
        // SAFETY: the event is the caller's.
        let code = self.code(|f| unsafe { (f.cuEventQuery)(event.0 as CUevent) })?;
        self.progress("cuEventQuery", code)
    }

    unsafe fn event_synchronize(&self, event: NativeEvent) -> Result<()> {
        drive!(self, cuEventSynchronize(event.0 as CUevent))
    }

    unsafe fn event_elapsed(&self, start: NativeEvent, end: NativeEvent) -> Result<i64> {
        let mut milliseconds = 0_f32;
        let code = self.code(|f| match (f.cuEventElapsedTime_v2, f.cuEventElapsedTime) {
            // SAFETY: the pointer is to a local, and the events are the caller's.
            (Some(elapsed), _) | (None, Some(elapsed)) => unsafe {
                elapsed(&raw mut milliseconds, start.0 as CUevent, end.0 as CUevent)
            },
            (None, None) => code::NOT_SUPPORTED,
        })?;
        match code {
            0 => Ok(nanoseconds(milliseconds)),
            code::NOT_READY => {
                Err(Error::state("the time between two events is not known before both are over"))
            }
            code => Err(self.failed("cuEventElapsedTime", code, 0)),
        }
    }
}

#[cfg(test)]
#[path = "../../../tests/unit/stream.rs"]
mod tests;
