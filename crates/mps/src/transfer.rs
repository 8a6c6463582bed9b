//! Copies and fills as dispatches of built-in kernels.
//!
//! A blit wants offsets and sizes that are multiples of 4, fills with one byte only, and needs an
//! encoder of its own. So the backend has kernels: they take every offset, size, pattern and pitch,
//! and go into the encoder that is open.
//!
//! | kernel | used for |
//! |---|---|
//! | `leasehold_copy_16`, `leasehold_copy_1` | bytes without a gap |
//! | `leasehold_rows_16`, `leasehold_rows_1` | rows with gaps |
//! | `leasehold_fill_16`, `leasehold_fill_1` | patterns of 1, 2 or 4 bytes |
//!
//! The number is the bytes that a thread moves: 16 if all addresses and pitches are aligned to 16.
//!
//! This module must not know who encodes.

use crate::driver::ops::{
    CompileOptions, Dispatch, MpsSlowOps, NativeBuffer, NativeComputeEncoder, NativePipeline,
    PipelineDesc,
};
use crate::manager::compute_pipeline_state::ComputePipelineState;
use crate::manager::library::LibraryManager;
use crate::manager::opened::OpenedDevice;
use leasehold_core::sync::Arc;
use leasehold_core::{Error, Lease, Result};
use leasehold_hal::{Access, Binding, Copy2d, Fill};
use std::fmt;

/// The kernels' source.
const SOURCE: &str = include_str!("transfer.metal");
/// Threads of a threadgroup.
const THREADS: u32 = 256;
/// The bytes that a thread of an aligned transfer moves.
const VECTOR: u64 = 16;

/// The kernels' names, in the order of [`Kernel`].
pub(crate) const NAMES: [&str; 6] = [
    "leasehold_copy_16",
    "leasehold_copy_1",
    "leasehold_rows_16",
    "leasehold_rows_1",
    "leasehold_fill_16",
    "leasehold_fill_1",
];

#[derive(Debug, Clone, Copy)]
enum Kernel {
    Copy16,
    Copy1,
    Rows16,
    Rows1,
    Fill16,
    Fill1,
}

/// The built-in kernels of a device.
pub struct Transfers {
    opened: Arc<OpenedDevice>,
    pipelines: [Lease<ComputePipelineState>; NAMES.len()],
}

/// One side of a transfer: a binding, and the buffer and offset where it is bound.
#[derive(Debug, Clone, Copy)]
struct Side {
    buffer: NativeBuffer,
    offset: u64,
    binding: Binding,
}

/// A transfer that is ready to be encoded.
#[derive(Debug, Clone, Copy)]
pub struct Transfer {
    pipeline: NativePipeline,
    /// The source of a copy comes first, the target last.
    sides: [Side; 2],
    /// The first side that counts: 0 for a copy, 1 for a fill.
    first: usize,
    params: [u64; 3],
    /// Bytes of the parameters.
    len: usize,
    groups: [u32; 3],
    /// Dispatches in turn, and the bytes by which the sides move between two.
    turns: (u64, [u64; 2]),
}

impl Transfers {
    /// Compiles the kernels. Blocks on the compiler.
    ///
    /// # Errors
    /// A driver error.
    pub(crate) fn new(opened: &Arc<OpenedDevice>, libraries: &LibraryManager) -> Result<Self> {
        let library = libraries.acquire(SOURCE, &CompileOptions::default())?;
        let make = |name: &str| {
            let desc = PipelineDesc {
                label: name.to_owned(),
                indirect: opened.properties.has_safe_indirect(),
                max_threads: THREADS,
            };
            libraries.pipeline(&library, name, &desc)
        };
        let [a, b, c, d, e, f] = NAMES.map(make);
        let pipelines = [a?, b?, c?, d?, e?, f?];
        for (pipeline, name) in pipelines.iter().zip(NAMES) {
            opened.shared.name_function(pipeline.native().0, name);
        }
        Ok(Self { opened: opened.clone(), pipelines })
    }

    /// The number of pipelines that the device's transfers hold.
    pub(crate) const PIPELINES: u64 = NAMES.len() as u64;

    fn side(&self, native: u64, addr: u64, len: u64, access: Access) -> Result<Side> {
        let (buffer, offset) = self.opened.reach(native, addr, len)?;
        Ok(Side { buffer, offset, binding: Binding { addr, len, native: buffer.0, access } })
    }

    fn grid(bytes: u64, each: u64, rows: u64) -> Result<[u32; 3]> {
        let groups = bytes.div_ceil(each).div_ceil(u64::from(THREADS));
        match (u32::try_from(groups), u32::try_from(rows)) {
            (Ok(groups), Ok(rows)) => Ok([groups, rows, 1]),
            _ => Err(Error::invalid(format!("a transfer of {rows} rows of {bytes} bytes"))),
        }
    }

    fn native(&self, kernel: Kernel) -> NativePipeline {
        self.pipelines[kernel as usize].native()
    }

    /// A copy; `None` without bytes. Another device's memory gets an alias at its first use.
    ///
    /// # Errors
    /// `Unsupported` for memory that the device does not reach; `InvalidArgument` for more rows
    /// than a grid has; a driver error.
    pub fn copy(&self, c: &Copy2d) -> Result<Option<Transfer>> {
        if c.width == 0 || c.rows == 0 {
            return Ok(None);
        }
        // Rows without gaps are one row. Rows of the target that overlap are copied in turn.
        let dense = c.src_pitch == c.width && c.dst_pitch == c.width;
        let (width, rows) = if dense { (c.width * c.rows, 1) } else { (c.width, c.rows) };
        let in_turn = rows > 1 && c.dst_pitch < width;
        let src = self.side(c.src_native, c.src, c.extent(c.src_pitch), Access::Read)?;
        let dst = self.side(c.dst_native, c.dst, c.extent(c.dst_pitch), Access::Write)?;
        let aligned = [src.offset, dst.offset]
            .into_iter()
            .chain((rows > 1).then_some(c.src_pitch | c.dst_pitch));
        let vector = { aligned }.all(|n| n.is_multiple_of(VECTOR));
        let each = if vector { VECTOR } else { 1 };
        let kernel = match (rows == 1 || in_turn, vector) {
            (true, true) => Kernel::Copy16,
            (true, false) => Kernel::Copy1,
            (false, true) => Kernel::Rows16,
            (false, false) => Kernel::Rows1,
        };
        let mut transfer = Transfer {
            pipeline: self.native(kernel),
            sides: [src, dst],
            first: 0,
            params: [width, c.src_pitch, c.dst_pitch],
            len: 24,
            groups: Self::grid(width, each, if in_turn { 1 } else { rows })?,
            turns: (1, [0, 0]),
        };
        if in_turn {
            transfer.turns = (rows, [c.src_pitch, c.dst_pitch]);
            transfer.sides.iter_mut().for_each(|side| side.binding.len = width);
        }
        Ok(Some(transfer))
    }

    /// A fill; `None` without bytes.
    ///
    /// # Errors
    /// As [`copy`](Self::copy).
    pub fn fill(&self, f: &Fill) -> Result<Option<Transfer>> {
        if f.bytes == 0 {
            return Ok(None);
        }
        let dst = self.side(f.native, f.dst, f.bytes, Access::Write)?;
        let pattern = match f.width {
            1 => (f.pattern & 0xff) * 0x0101_0101,
            2 => (f.pattern & 0xffff) * 0x0001_0001,
            _ => f.pattern,
        };
        let (kernel, each) = match dst.offset.is_multiple_of(VECTOR) {
            true => (Kernel::Fill16, VECTOR),
            false => (Kernel::Fill1, 1),
        };
        Ok(Some(Transfer {
            pipeline: self.native(kernel),
            sides: [dst, dst],
            first: 1,
            params: [f.bytes, u64::from(pattern), 0],
            len: 16,
            groups: Self::grid(f.bytes, each, 1)?,
            turns: (1, [0, 0]),
        }))
    }
}

impl Transfer {
    /// Encodes the transfer. Does not block.
    ///
    /// # Errors
    /// A driver error.
    ///
    /// # Safety
    /// - The encoder is live, open, serial, and of the transfers' device.
    /// - The memory of both sides may be used until the encoder's work is over, and so long the
    ///   device is open.
    pub unsafe fn encode(&self, ops: &dyn MpsSlowOps, encoder: NativeComputeEncoder) -> Result<()> {
        let mut bytes = [0; 24];
        for (to, from) in bytes.chunks_exact_mut(8).zip(self.params) {
            to.copy_from_slice(&from.to_ne_bytes());
        }
        let sides = &self.sides[self.first..];
        let (turns, steps) = self.turns;
        // SAFETY: the device holds the pipelines. The caller vouches for the encoder and for the
        // sides' memory. The sides lie in their buffers, as `reach` found.
        unsafe {
            ops.set_pipeline(encoder, self.pipeline)?;
            ops.set_bytes(encoder, &bytes[..self.len], sides.len() as u32)?;
            for turn in 0..turns {
                let mut bindings = [self.sides[0].binding, self.sides[1].binding];
                let bindings = &mut bindings[self.first..];
                for (i, side) in (0_u32..).zip(sides) {
                    let moved = turn * steps[i as usize];
                    ops.set_buffer(encoder, side.buffer, side.offset + moved, i)?;
                    bindings[i as usize].addr += moved;
                }
                let dispatch = Dispatch { groups: self.groups, threads: [THREADS, 1, 1], bindings };
                ops.dispatch(encoder, &dispatch)?;
            }
        }
        Ok(())
    }
}

impl fmt::Debug for Transfers {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Transfers of {}", self.opened.id)
    }
}
