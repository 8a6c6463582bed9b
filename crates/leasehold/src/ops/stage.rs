//! Staging memory: where the bytes of an asynchronous upload lie until the device has copied them.

use super::shapes::HostBytes;
use crate::stream::Stream;
use leasehold_alloc::{Buffer, Layout, On};
use leasehold_core::{Error, OutOfMemory, Result, Timepoint, UniqueLease, host_copy};

/// Bytes up to this many lie in ordinary memory: a driver takes them from there at once, and they
/// are copied again in less time than pinned memory takes to get.
const SMALL: usize = 1 << 10;

/// A copy of host bytes, kept by the submission that reads it.
pub(super) enum Staged {
    /// Ordinary memory.
    Pageable(Vec<u8>),
    /// Pinned memory: the driver copies from it without waiting for the stream.
    Pinned(UniqueLease<Buffer>),
}

impl Staged {
    /// Copies bytes to staging memory. `long`: they are kept for long, which pinned memory is not
    /// for.
    ///
    /// # Errors
    /// `OutOfMemory`; `DeviceLost`.
    pub(super) fn take(stream: &Stream, bytes: &[u8], long: bool) -> Result<Self> {
        if bytes.len() > SMALL && !long && stream.runtime.device.caps().pinned {
            match Self::pinned(stream, bytes) {
                Ok(Some(staged)) => return Ok(staged),
                // Then ordinary memory serves: the copy comes later, and is right.
                Ok(None) => {}
                Err(e) if e.is_out_of_memory() || matches!(e, Error::Occupied { .. }) => {}
                Err(e) => return Err(e),
            }
        }
        let mut copy = Vec::new();
        copy.try_reserve_exact(bytes.len())
            .map_err(|_| OutOfMemory::new("the host, to stage an upload", bytes.len() as u64))?;
        copy.extend_from_slice(bytes);
        Ok(Self::Pageable(copy))
    }

    /// In pinned memory that nobody uses any more; `None` when what the pool has at hand is still
    /// in use.
    fn pinned(stream: &Stream, bytes: &[u8]) -> Result<Option<Self>> {
        let pool = stream.runtime.pinned()?;
        let on = On { timeline: stream.under().timeline, source: stream.under().source() };
        // The sole lease: a lease by a guessed handle would be another writer.
        let buffer = pool.alloc_unique(Layout::new(bytes.len() as u64), on)?;
        // Memory that is free for the stream may be in use by earlier work: the host must not write
        // it yet.
        let mut over = buffer.write_timepoint().timepoint().is_none_or(Timepoint::has_passed);
        buffer.for_each_read(|s| over &= s.timepoint().is_none_or(Timepoint::has_passed));
        if !over {
            return Ok(None);
        }
        // SAFETY: pinned memory of at least as many bytes, which the host may write: the lease is
        // the only one, and every earlier use is over.
        unsafe { host_copy::copy(bytes.as_ptr(), buffer.addr() as *mut u8, bytes.len()) };
        Ok(Some(Self::Pinned(buffer)))
    }
}

// SAFETY: both kinds own their memory, which was written before the value was made, and write it no
// more. A move of the value moves neither the vector's elements nor the buffer.
unsafe impl HostBytes for Staged {
    fn bytes(&self) -> &[u8] {
        match self {
            Self::Pageable(bytes) => bytes,
            // SAFETY: host memory of that many bytes, written by `pinned`. The lease keeps it, and
            // it is the only one.
            Self::Pinned(buffer) => unsafe {
                std::slice::from_raw_parts(buffer.addr() as *const u8, buffer.len() as usize)
            },
        }
    }
}
