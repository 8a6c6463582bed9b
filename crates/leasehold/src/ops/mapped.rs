//! Device memory that the host reads and writes in place.

use crate::stream::{Stream, check_end, check_own, check_present};
use crate::view::{BufferView, Operand};
use leasehold_alloc::HostKind;
use leasehold_core::{Error, Result};
use leasehold_hal::Access;

/// Memory that the host touches.
impl Stream {
    /// Waits until nobody writes the part any more, and shows it to the host.
    ///
    /// # Errors
    /// `Unsupported` for memory that the host cannot touch; the cause when the last write failed;
    /// `Recording` for a recording's stream; `Suspended` for memory of a pool that is away.
    ///
    /// # Safety
    /// - While the bytes are looked at, nobody submits work that writes them, suspends their
    ///   pool, or shrinks their buffer.
    pub unsafe fn map_read<'a>(&self, slice: BufferView<'a>) -> Result<&'a [u8]> {
        let operand = slice.read();
        wait_host_visible(self, &operand)?;
        if slice.is_empty() {
            return Ok(&[]);
        }
        // SAFETY: host-visible memory of a live buffer, whose writes are complete; by the contract
        // there are no new ones.
        Ok(unsafe { std::slice::from_raw_parts(slice.addr() as *const u8, slice.len() as usize) })
    }

    /// Waits until nobody uses the part any more, and lets the host write it. The writes are seen
    /// by work submitted later.
    ///
    /// # Errors
    /// As [`map_read`](Self::map_read).
    ///
    /// # Safety
    /// - While the bytes are borrowed, nobody else touches them: no view, no submission, no
    ///   suspension of their pool, no shrinking of their buffer.
    pub unsafe fn map_write<'a>(&self, slice: BufferView<'a>) -> Result<&'a mut [u8]> {
        let operand = slice.with(Access::ReadWrite);
        wait_host_visible(self, &operand)?;
        if slice.is_empty() {
            return Ok(&mut []);
        }
        // SAFETY: host-visible memory of a live buffer, whose uses are over; by the contract there
        // is nobody else.
        Ok(unsafe { std::slice::from_raw_parts_mut(slice.addr() as *mut u8, slice.len() as usize) })
    }
}

fn wait_host_visible(stream: &Stream, operand: &Operand<'_>) -> Result<()> {
    stream.live("device memory cannot be mapped while recording; map it before or after")?;
    let runtime = &*stream.runtime;
    runtime.check_operands(std::slice::from_ref(operand))?;
    runtime.refuse_symbolic(std::slice::from_ref(operand))?;
    check_present(operand.view().buffer())?;
    let buffer = operand.view().buffer();
    check_end(operand.end(), buffer)?;
    check_own(operand.written(), buffer)?;
    if buffer.host_kind() == HostKind::None && !runtime.device.caps().host_visible {
        return Err(Error::Unsupported(
            format!("the host cannot touch the memory of {}; download it instead", runtime.id())
                .into(),
        ));
    }
    if let Some(p) = buffer.write_timepoint().timepoint() {
        runtime.wait_point(p, None)?;
    }
    let mut result = Ok(());
    if operand.access().writes() {
        buffer.for_each_read(|s| {
            if let (Ok(()), Some(p)) = (&result, s.timepoint()) {
                result = runtime.wait_point(p, None);
            }
        });
    }
    result
}
