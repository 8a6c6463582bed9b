//! The encoder: translates operations to driver calls.
//!
//! One operation is one driver call. Some 2-D copies take one call per row: those between devices
//! that cannot reach each other, and those with overlapping rows. Several copies of one operation
//! take one call per [`BATCH`] pieces. They take one per piece if the driver has no such call, or
//! if a piece goes between devices that cannot reach each other.
//!
//! The encoder allocates nothing. It builds the arguments of a launch and the lists of a batch on
//! the stack.
//!
//! # Arguments of a kernel
//! The arguments are one buffer: the addresses of all bindings in order, 8 bytes each, then the
//! parameters. Parameters are aligned to 8 bytes at most. So a kernel is declared like this, or
//! with the parameters as scalars of the same layout:
//! ```text
//! extern "C" __global__ void name(T0* b0, …, Tn* bn, Params p)
//! ```
//! A kernel that can read bindings early takes a `u32` behind these, the grant of the launch.
//! Parameters with tensor maps begin where the driver says. Each map is the driver's form for the
//! binding's address.
//!
//! This module must not know what holds work back.

use crate::driver::ops::{
    CopyKind, CudaSlowOps, FunctionInfo, Launch, NativeBatch, NativeContext, NativeCopy,
    NativeEvent, NativeFill, NativeFunction, NativeStream, NativeTensorMap, SourceOrder,
};
use crate::engine::core::Core;
use crate::engine::host::HostAction;
use crate::engine::program::Program;
use crate::engine::shared::Place;
use crate::engine::stream::CudaStream;
use leasehold_alloc::Buffer;
use leasehold_core::{Error, Result, UniqueLease};
use leasehold_hal::engine::driver::Sink;
use leasehold_hal::engine::staging::HostAddress;
use leasehold_hal::{
    Copies, Copy2d, Dispatch, Download, Fill, KernelDesc, Limits, Op, Pipeline, TensorMap,
};
use std::mem::MaybeUninit;

/// Bytes of the largest argument buffer. In front of the parameters is a gap of 63 bytes at most.
pub(crate) const ARGUMENTS: usize = (Limits::BINDINGS as usize * 8)
    .next_multiple_of(TensorMap::ALIGNMENT as usize)
    + Limits::PARAMS as usize
    + size_of::<u32>();

/// Pieces of one driver call. Their three lists take 24 KiB of the stack.
const BATCH: usize = 1024;

/// A launch's arguments.
#[repr(align(16))]
pub(crate) struct Arguments([MaybeUninit<u8>; ARGUMENTS]);

impl Arguments {
    pub(crate) fn new() -> Self {
        Self([MaybeUninit::uninit(); ARGUMENTS])
    }

    /// Fills the buffer with a dispatch's arguments. `early` has the bindings that its kernel may
    /// read early.
    #[inline]
    pub(crate) fn fill(
        &mut self,
        d: &Dispatch<'_>,
        early: u32,
        ops: &dyn CudaSlowOps,
    ) -> Result<&[u8]> {
        if d.pipeline.is_given_more { self.fill_more(d, early, ops) } else { self.fill_plain(d) }
    }

    /// As [`fill`](Self::fill), for a kernel that is given no more than addresses and parameters.
    #[inline]
    fn fill_plain(&mut self, d: &Dispatch<'_>) -> Result<&[u8]> {
        let addresses = d.bindings.len() * 8;
        let len = addresses + d.params.len();
        if len > ARGUMENTS {
            return Err(too_long(len));
        }
        // SAFETY: `len` bytes fit (checked above).
        unsafe {
            self.put(d, addresses);
            Ok(self.first(len))
        }
    }

    /// As [`fill`](Self::fill), for a kernel with tensor maps or the word of its early reads.
    #[inline(never)]
    fn fill_more(&mut self, d: &Dispatch<'_>, early: u32, ops: &dyn CudaSlowOps) -> Result<&[u8]> {
        let Pipeline { maps, params_at, early_reads, .. } = &**d.pipeline;
        let from = *params_at as usize;
        let given = from + d.params.len();
        let word = if *early_reads != 0 { size_of::<u32>() } else { 0 };
        if given + word > ARGUMENTS {
            return Err(too_long(given + word));
        }
        // SAFETY: as many bytes fit (checked above). Zeros fill a gap in front of the parameters.
        // A map lies in the parameters, whose number was checked against the pipeline.
        unsafe {
            let to = self.0.as_mut_ptr().cast::<u8>();
            to.add(d.bindings.len() * 8).write_bytes(0, from - d.bindings.len() * 8);
            self.put(d, from);
            for &(binding, offset) in maps {
                let map = TensorMap::from_params(d.params, offset);
                let native = ops.tensor_map(d.bindings[binding as usize].addr, &map)?;
                to.add(from + offset as usize).cast::<NativeTensorMap>().write_unaligned(native);
            }
            if word != 0 {
                to.add(given).cast::<u32>().write_unaligned(early);
            }
            Ok(self.first(given + word))
        }
    }

    /// Writes the bindings' addresses, and the parameters at byte `from`.
    ///
    /// # Safety
    /// - Both end within the buffer.
    #[inline]
    unsafe fn put(&mut self, d: &Dispatch<'_>, from: usize) {
        let to = self.0.as_mut_ptr().cast::<u8>();
        // SAFETY: by the caller's promise. The sources are slices.
        unsafe {
            for (i, b) in d.bindings.iter().enumerate() {
                to.add(i * 8).cast::<u64>().write(b.addr);
            }
            std::ptr::copy_nonoverlapping(d.params.as_ptr(), to.add(from), d.params.len());
        }
    }

    /// The first bytes.
    ///
    /// # Safety
    /// - As many bytes were written.
    #[inline]
    unsafe fn first(&self, len: usize) -> &[u8] {
        // SAFETY: by the caller's promise.
        unsafe { std::slice::from_raw_parts(self.0.as_ptr().cast(), len) }
    }
}

#[cold]
fn too_long(len: usize) -> Error {
    Error::invalid(format!("{len} bytes of arguments; the limit is {ARGUMENTS}"))
}

/// A dispatch in the driver's form.
pub(crate) fn launch<'a>(d: &'a Dispatch<'_>, args: &'a [u8], early: u32) -> Launch<'a> {
    let kernel = &**d.pipeline;
    let has_attributes = kernel.cooperative || kernel.cluster != [1; 3];
    Launch {
        early: (kernel.early_reads != 0).then_some(early),
        attributes: has_attributes.then_some(kernel),
        ..plain(d, args)
    }
}

/// As [`launch`], for a kernel that is given no more than addresses and parameters.
fn plain<'a>(d: &'a Dispatch<'_>, args: &'a [u8]) -> Launch<'a> {
    Launch {
        function: NativeFunction(d.pipeline.native),
        grid: d.grid,
        block: d.block,
        shared: d.shared,
        args,
        bindings: d.bindings,
        early: None,
        attributes: None,
    }
}

/// A fill in the driver's form.
pub(crate) fn native_fill(f: &Fill) -> NativeFill {
    NativeFill {
        dst: f.dst,
        value: f.pattern,
        width: f.width,
        count: f.bytes / u64::from(f.width.max(1)),
    }
}

/// The driver calls that make a copy.
pub(crate) enum Route {
    /// One call.
    Direct(NativeCopy),
    /// One call per row, because the driver takes no rows that overlap.
    Rows(CopyKind),
    /// One call per row, between these contexts.
    Peer(NativeContext, NativeContext),
}

/// Chooses the driver calls for a copy between two places.
pub(crate) fn route(core: &Core, c: &Copy2d) -> Result<Route> {
    let own = core.context.ordinal();
    let at = |addr, pitch| core.shared.place(addr, c.extent(pitch)).unwrap_or(Place::Device(own));
    let (src, dst) = (at(c.src, c.src_pitch), at(c.dst, c.dst_pitch));
    let direct = |kind| {
        if c.rows == 1 {
            // Pitches have no meaning for one row, and the driver refuses some.
            return Route::Direct(NativeCopy::linear(kind, c.dst, c.src, c.width));
        }
        if c.src_pitch < c.width || c.dst_pitch < c.width {
            return Route::Rows(kind);
        }
        Route::Direct(NativeCopy {
            src: c.src,
            src_pitch: c.src_pitch,
            dst: c.dst,
            dst_pitch: c.dst_pitch,
            width: c.width,
            rows: c.rows,
            kind,
        })
    };
    let reaches = |owner: u32| owner == own || core.shared.has_access(owner, own);
    Ok(match (src, dst) {
        (Place::Pinned, Place::Device(d)) if reaches(d) => direct(CopyKind::HostToDevice),
        (Place::Device(s), Place::Pinned) if reaches(s) => direct(CopyKind::DeviceToHost),
        (Place::Pinned, Place::Pinned) => direct(CopyKind::DeviceToDevice),
        (Place::Device(s), Place::Device(d)) if reaches(s) && reaches(d) => {
            direct(CopyKind::DeviceToDevice)
        }
        (Place::Device(s), Place::Device(d)) => {
            let context = |ordinal: u32| {
                if ordinal == own {
                    return Ok(core.context.native());
                }
                core.shared.primary(ordinal).map(|c| c.context.native()).ok_or_else(|| {
                    Error::state(format!(
                        "the copy touches memory of device {ordinal}, which is not open"
                    ))
                })
            };
            Route::Peer(context(d)?, context(s)?)
        }
        (Place::Pinned, Place::Device(d)) | (Place::Device(d), Place::Pinned) => {
            return Err(Error::Unsupported(
                format!(
                    "{} cannot reach the memory of device {d}; use a stream of that device",
                    core.context.id()
                )
                .into(),
            ));
        }
    })
}

/// Whether a download needs no staging, because its destination is pinned memory or empty.
pub(crate) fn copies_directly(core: &Core, d: &Download<'_>) -> bool {
    d.bytes == 0 || core.shared.place(d.dst as u64, d.bytes) == Some(Place::Pinned)
}

/// Gives operations to the driver.
pub(crate) struct Encoder<'a, 's> {
    core: &'a Core,
    ops: &'a dyn CudaSlowOps,
    stream: NativeStream,
    sink: &'a mut Sink<'s, CudaStream>,
}

impl<'a, 's> Encoder<'a, 's> {
    #[inline]
    pub(crate) fn new(
        core: &'a Core,
        ops: &'a dyn CudaSlowOps,
        stream: NativeStream,
        sink: &'a mut Sink<'s, CudaStream>,
    ) -> Self {
        Self { core, ops, stream, sink }
    }

    /// Encodes one operation.
    ///
    /// # Safety
    /// - The memory that the operation names may be used until its submission is over.
    #[inline]
    pub(crate) unsafe fn encode(
        &mut self,
        op: &Op<'_>,
        staging: Option<UniqueLease<Buffer>>,
    ) -> Result<()> {
        match op {
            // SAFETY: the caller vouches for the bindings' memory.
            Op::Dispatch(d) => unsafe { self.dispatch(d) },
            // SAFETY: the caller vouches for both ranges.
            Op::Copy(c) => unsafe { self.copy(c) },
            // SAFETY: the caller vouches for the pieces' ranges.
            Op::Copies(c) => unsafe { self.copies(c) },
            Op::Fill(f) if f.bytes == 0 => Ok(()),
            Op::Fill(f) => {
                // SAFETY: the caller vouches for the range until the submission is over.
                self.took(unsafe { self.ops.fill(self.stream, &native_fill(f)) })
            }
            Op::Upload(u) => {
                if u.bytes != 0 {
                    let copy =
                        NativeCopy::linear(CopyKind::HostToDevice, u.dst, u.src as u64, u.bytes);
                    // SAFETY: the caller vouches for source and target until the submission is
                    // over.
                    self.took(unsafe { self.ops.copy(self.stream, &copy) })?;
                }
                if let Some(keep) = u.keep {
                    self.sink.keep(keep.clone());
                }
                Ok(())
            }
            // SAFETY: the caller vouches for source and destination.
            Op::Download(d) => unsafe { self.download(d, staging) },
            Op::WriteTimestamp(timestamp) => {
                timestamp.clear();
                // SAFETY: the event is a timestamp of this context, which the submission's promise
                // keeps alive. The stream is this one's own.
                self.took(unsafe {
                    self.ops.event_record(NativeEvent(timestamp.native()), self.stream)
                })?;
                self.sink.leave(HostAction::Timestamp((*timestamp).clone()));
                Ok(())
            }
            Op::Graph(exec) => {
                // SAFETY: graphs of a submission belong to this device (the submitter's promise),
                // so `native` is the address of a program.
                let program = unsafe { Program::of(exec) };
                if !program.is_empty() {
                    // SAFETY: the caller vouches for the graph's memory. The action below keeps the
                    // graph.
                    self.took(unsafe { program.launch(0, self.ops, self.stream) })?;
                    self.sink.leave(HostAction::Graph { exec: (*exec).clone(), segment: 0 });
                }
                Ok(())
            }
            other => Err(Error::state(format!("a {} is not given to the driver", other.kind()))),
        }
    }

    #[inline]
    fn took(&mut self, result: Result<()>) -> Result<()> {
        self.sink.took(result)
    }

    /// Not inlined: the buffer of arguments takes more than a page of the stack, which other
    /// operations do without.
    ///
    /// # Safety
    /// - As [`encode`](Self::encode).
    #[inline(never)]
    unsafe fn dispatch(&mut self, d: &Dispatch<'_>) -> Result<()> {
        if d.grid.contains(&0) {
            return Ok(());
        }
        if d.pipeline.is_given_more {
            // SAFETY: by this function's contract.
            return unsafe { self.dispatch_more(d) };
        }
        let mut arguments = Arguments::new();
        let launch = plain(d, arguments.fill_plain(d)?);
        // SAFETY: the caller vouches for the bindings' memory. Numbers and sizes were checked
        // against the pipeline, and the pipeline's own against the function.
        self.took(unsafe { self.ops.launch(self.stream, &launch) })
    }

    /// As [`dispatch`](Self::dispatch), for a kernel that is given more.
    ///
    /// # Safety
    /// - As [`encode`](Self::encode).
    #[inline(never)]
    unsafe fn dispatch_more(&mut self, d: &Dispatch<'_>) -> Result<()> {
        let mut arguments = Arguments::new();
        let launch = launch(d, arguments.fill_more(d, 0, self.ops)?, 0);
        // SAFETY: as in `dispatch`.
        self.took(unsafe {
            match launch.attributes {
                None => self.ops.launch(self.stream, &launch),
                Some(_) => self.ops.launch_ex(self.stream, &launch),
            }
        })
    }

    /// # Safety
    /// - As [`encode`](Self::encode).
    unsafe fn copy(&mut self, c: &Copy2d) -> Result<()> {
        if c.width == 0 || c.rows == 0 {
            return Ok(());
        }
        match route(self.core, c)? {
            // SAFETY: the caller vouches for both ranges until the submission is over.
            Route::Direct(copy) => self.took(unsafe { self.ops.copy(self.stream, &copy) }),
            Route::Rows(kind) => {
                for row in 0..c.rows {
                    let (to, from) = (c.dst + row * c.dst_pitch, c.src + row * c.src_pitch);
                    // SAFETY: a row of ranges that the caller vouches for.
                    self.took(unsafe {
                        self.ops.copy(self.stream, &NativeCopy::linear(kind, to, from, c.width))
                    })?;
                }
                Ok(())
            }
            Route::Peer(dst, src) => {
                for row in 0..c.rows {
                    let (to, from) = (c.dst + row * c.dst_pitch, c.src + row * c.src_pitch);
                    // SAFETY: a row of ranges that the caller vouches for. The contexts are those
                    // of the addresses' devices.
                    self.took(unsafe {
                        self.ops.copy_peer(self.stream, (to, dst), (from, src), c.width)
                    })?;
                }
                Ok(())
            }
        }
    }

    /// Not inlined: the lists take several pages of the stack.
    ///
    /// # Safety
    /// - As [`encode`](Self::encode).
    #[inline(never)]
    unsafe fn copies(&mut self, copies: &Copies<'_>) -> Result<()> {
        let mut together = self.core.properties().copy_batch;
        // All pieces are checked before the driver is given one.
        let own = self.core.context.ordinal();
        let near = |addr, bytes| match self.core.shared.place(addr, bytes) {
            None | Some(Place::Pinned) => true,
            Some(Place::Device(device)) => device == own,
        };
        for piece in copies.pieces().iter().filter(|piece| piece.bytes != 0) {
            if !(near(piece.src, piece.bytes) && near(piece.dst, piece.bytes)) {
                together &= matches!(route(self.core, &piece.alone())?, Route::Direct(_));
            }
        }
        if !together {
            // SAFETY: the caller vouches for the pieces.
            return copies.pieces().iter().try_for_each(|c| unsafe { self.copy(&c.alone()) });
        }
        let order = match copies.has_settled_sources() {
            true => SourceOrder::Any,
            false => SourceOrder::Stream,
        };
        let (mut src, mut dst, mut bytes) = ([0; BATCH], [0; BATCH], [0; BATCH]);
        for part in copies.pieces().chunks(BATCH) {
            let mut n = 0;
            for piece in part.iter().filter(|piece| piece.bytes != 0) {
                (src[n], dst[n], bytes[n]) = (piece.src, piece.dst, piece.bytes as usize);
                n += 1;
            }
            if n == 0 {
                continue;
            }
            let batch = NativeBatch { src: &src[..n], dst: &dst[..n], bytes: &bytes[..n], order };
            // A call that fails may have taken some of its pieces.
            self.took(Ok(()))?;
            // SAFETY: the caller vouches for the pieces, which the type keeps apart. Settled
            // sources are written by nobody until the copies are over.
            self.took(unsafe { self.ops.copy_batch(self.stream, &batch) })?;
        }
        Ok(())
    }

    /// # Safety
    /// - As [`encode`](Self::encode).
    #[inline(always)]
    unsafe fn download(
        &mut self,
        d: &Download<'_>,
        staging: Option<UniqueLease<Buffer>>,
    ) -> Result<()> {
        let keep = d.keep.cloned();
        if d.bytes == 0 {
            return Ok(());
        }
        match staging {
            Some(staging) => {
                let copy =
                    NativeCopy::linear(CopyKind::DeviceToHost, staging.addr(), d.src, d.bytes);
                // SAFETY: the caller vouches for the device memory. The action keeps the staging
                // memory.
                self.took(unsafe { self.ops.copy(self.stream, &copy) })?;
                self.sink.leave(HostAction::CopyOut {
                    staging,
                    dst: HostAddress(d.dst),
                    bytes: d.bytes,
                    keep,
                });
            }
            None => {
                let copy = NativeCopy::linear(CopyKind::DeviceToHost, d.dst as u64, d.src, d.bytes);
                // SAFETY: the caller vouches for the device memory and for the destination, which
                // is pinned.
                self.took(unsafe { self.ops.copy(self.stream, &copy) })?;
                if let Some(keep) = keep {
                    self.sink.keep(keep);
                }
            }
        }
        Ok(())
    }
}

/// Checks a kernel's declaration against its function's parameters, where the driver reports them.
/// Returns the first byte of the parameters in the arguments.
///
/// The driver places a parameter with tensor maps by the alignment of its address on the device,
/// which is not that of its place in the arguments.
///
/// # Errors
/// `InvalidArgument`, with the declaration and the parameters. `Unsupported` for tensor maps where
/// the driver reports no parameters.
pub(crate) fn check_function(desc: &KernelDesc<'_>, info: &FunctionInfo) -> Result<u32> {
    let (bindings, params) = (desc.bindings.len(), desc.params);
    let behind = 8 * bindings as u32;
    let Some(declared) = &info.params else {
        if desc.maps.is_empty() {
            return Ok(behind);
        }
        return Err(Error::Unsupported(
            format!(
                "kernel {}: it takes tensor maps, and the CUDA driver does not say where (before 12.4); install a newer one",
                desc.name
            )
            .into(),
        ));
    };
    let from = match declared.get(bindings) {
        Some(&(offset, _)) if !desc.maps.is_empty() => offset,
        _ => behind,
    };
    let wrong = |why: String| {
        Error::invalid(format!(
            "kernel {}: {why}; it must take {bindings} pointers and then {params} bytes of parameters{}{}, and takes {declared:?} \
             (offsets and sizes)",
            desc.name,
            if desc.maps.is_empty() {
                ""
            } else {
                ", of which the first is a map or aligned to 64,"
            },
            if desc.early_reads == 0 { "" } else { " and a word of its early reads" }
        ))
    };
    let declared = match declared.split_last() {
        _ if desc.early_reads == 0 => &declared[..],
        Some((&last, rest)) if last == (from + params, 4) => rest,
        _ => {
            return Err(wrong(format!(
                "no parameter of four bytes is at {}, behind the others",
                from + params
            )));
        }
    };
    for i in 0..bindings {
        if declared.get(i) != Some(&(8 * i as u32, 8)) {
            return Err(wrong(format!("parameter {i} of its function is no pointer in its place")));
        }
    }
    let rest = &declared[bindings..];
    let end = rest.last().map_or(from, |&(offset, size)| offset + size);
    // Scalars end with the last one. A structure of the same layout may be padded to its alignment.
    let padding = if desc.maps.is_empty() { 8 } else { TensorMap::ALIGNMENT };
    let gap = TensorMap::ALIGNMENT;
    if rest.first().is_some_and(|&(offset, _)| offset != from)
        || !(behind..behind + gap).contains(&from)
        || end > from + params
        || from + params - end >= padding
    {
        return Err(wrong(format!("the parameters end at {end} and not at {}", from + params)));
    }
    if params != 0 && rest.is_empty() {
        return Err(wrong("its function takes no parameters".to_owned()));
    }
    Ok(from)
}
