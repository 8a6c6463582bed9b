//! Work by the calls of the safe API.
//!
//! This module must not know programs.

use crate::kernels::Kernel;
use crate::prelude::{Call, bytes, launch};
use crate::step::{Hand, Op, Work};
use crate::target::Kernels;
use leasehold::{Buffer, BufferView, Lease, Operand, Result, Stream, View, ops};

/// Does work on a stream. `to` and `from` are the buffers of its parts.
pub(crate) fn run(
    stream: &Stream,
    kernels: &Kernels,
    work: &Work,
    to: &Lease<Buffer>,
    from: &[Lease<Buffer>],
) -> Result<()> {
    let into = to.part(work.to.range())?;
    let source = |i: usize| from[i].part(work.from[i].range());
    match work.op {
        Op::Fill { pattern, width } => {
            let pattern = match width {
                1 => ops::Pattern::U8(pattern as u8),
                2 => ops::Pattern::U16(pattern as u16),
                _ => ops::Pattern::U32(pattern),
            };
            stream.fill(into, pattern)
        }
        Op::Upload { seed, hand } => {
            let bytes = bytes(seed, work.to.len as usize);
            match hand {
                Hand::Asynchronous => stream.upload(into, &bytes),
                Hand::Synchronous => stream.upload_blocking(into, &bytes),
                Hand::Owned => stream.upload_owned(into, bytes),
            }
        }
        Op::Copy => stream.copy(into, source(0)?),
        Op::Copy2d { width, rows, from_pitch, to_pitch } => stream.copy_2d(
            into,
            source(0)?,
            ops::Rows::new(width.into(), rows.into())
                .src_pitch(from_pitch.into())
                .dst_pitch(to_pitch.into()),
        ),
        Op::Copies => stream.copy_batch(&pieces(work, to, from)?),
        Op::Pinned => stream.copy_pinned(into, source(0)?),
        Op::Launch { .. } => {
            let operands = operands(work, to, from)?;
            launch(stream, &[call(kernels, work, &operands)])
        }
    }
}

/// The pieces of several copies, the last one first.
pub(crate) fn pieces<'a>(
    work: &Work,
    to: &'a Lease<Buffer>,
    from: &'a [Lease<Buffer>],
) -> Result<Vec<(BufferView<'a>, BufferView<'a>)>> {
    let mut pieces = Vec::with_capacity(from.len());
    for ((part, span), lease) in work.places().zip(&work.from).zip(from) {
        pieces.push((to.part(part.range())?, lease.part(span.range())?));
    }
    pieces.reverse();
    Ok(pieces)
}

/// The launch of work, with its operands.
pub(crate) fn call<'a>(kernels: &'a Kernels, work: &Work, operands: &'a [Operand<'a>]) -> Call<'a> {
    let (kernel, words) = match work.op {
        Op::Launch { kernel, words } => (kernel, words),
        _ => (Kernel::Mask, [0; 2]),
    };
    let kernel = &kernels[kernel as usize];
    Call { kernel, operands, params: [work.to.len / 4, words[0], words[1]] }
}

/// A launch's operands, with the roles that its kernel declares.
pub(crate) fn operands<'a>(
    work: &Work,
    to: &'a Lease<Buffer>,
    from: &'a [Lease<Buffer>],
) -> Result<Vec<Operand<'a>>> {
    let mut operands = Vec::with_capacity(from.len() + 1);
    for (span, lease) in work.from.iter().zip(from) {
        operands.push(lease.part(span.range())?.read());
    }
    let part = to.part(work.to.range())?;
    let role = if matches!(work.op, Op::Launch { kernel: Kernel::Mask, .. }) {
        part.read_write()
    } else {
        part.write()
    };
    operands.push(role);
    Ok(operands)
}

/// Compares bytes with those that the model expects.
///
/// # Errors
/// The first byte that differs, and how many do.
pub(crate) fn compare(got: &[u8], expect: &[u8]) -> std::result::Result<(), String> {
    if got == expect {
        return Ok(());
    }
    if got.len() != expect.len() {
        return Err(format!("{} bytes came back, not {}", got.len(), expect.len()));
    }
    let differ = got.iter().zip(expect).filter(|(g, e)| g != e).count();
    let at = got.iter().zip(expect).position(|(g, e)| g != e).unwrap_or(0);
    Err(format!(
        "byte {at} is {:#04x} and not {:#04x}; {differ} of {} bytes differ",
        got[at],
        expect[at],
        got.len()
    ))
}
