//! Foreign objects that a row keeps alive: somebody else's memory as a buffer, and all else that
//! must outlast the last use of a buffer.
//!
//! The allocator drops a foreign object without its lock, once nobody holds the row and the row's
//! last use is over.
//!
//! This module must not know where blocks lie.

use crate::allocator::Allocator;
use crate::arena::Within;
use crate::buffer::{Buffer, IMPORTED, Open, READ_ONLY, Row};
use crate::state::{Inner, kind_bits};
use crate::watch::SweepScope;
use leasehold_core::sync::atomic::Ordering;
use leasehold_core::{Error, Lease, PackedTimepoint, Result};
use std::any::Any;

/// The permitted access to imported memory.
///
/// The layers above refuse work that writes a read-only buffer, whoever submits it: a lease may be
/// had by handle.
#[doc(alias("PROT_READ", "CUmemAccess_flags"))]
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Protection {
    /// It is only read: a read-only mapping, bytes of the program, memory that others read
    /// meanwhile.
    ReadOnly,
    /// It is read and written.
    ReadWrite,
}

impl Allocator {
    /// Somebody else's memory as a buffer: `bytes` at `addr`, spanned by the native object `native`
    /// (or 0). Counted as imported, not as reserved. `keep` is dropped once nobody holds the buffer
    /// and the last use that was recorded on it is over. If that is not yet so at the last drop, a
    /// later call drops it: an import, a trim, a drain, or an allocation that takes the slow path.
    /// The call is one of this allocator, or of any other once nobody holds this one.
    ///
    /// `keep` should lead neither to this allocator nor to a lease of one of its buffers. A runtime
    /// and a context lead to it. If everything else is dropped while work is pending, only `keep`
    /// holds the allocator, nobody can call it, and both leak.
    ///
    /// # Errors
    /// `InvalidArgument` for a range that wraps; `OutOfMemory` for host memory.
    ///
    /// # Safety
    /// - `[addr, addr + bytes)` is memory that this allocator's device (or the host) may access as
    ///   `protection` says, and stays so until `keep` is dropped.
    /// - Until then nobody writes it but through this buffer; with [`Protection::ReadWrite`] nobody
    ///   else reads it either.
    pub unsafe fn import(
        &self,
        addr: u64,
        bytes: u64,
        native: u64,
        protection: Protection,
        keep: Box<dyn Any + Send + Sync>,
    ) -> Result<Lease<Buffer>> {
        if addr.checked_add(bytes).is_none() {
            return Err(Error::invalid(format!("import of {bytes} bytes at {addr:#x} wraps")));
        }
        let inner = self.inner();
        inner.sweep_retired();
        let mut core = inner.core.lock();
        let row = inner.table.take(&mut core.vacant, inner.owner_ptr())?;
        let index = row.header.index();
        if let Err(e) = core.room_to_keep(index) {
            inner.table.put(&mut core.vacant, row);
            return Err(e);
        }
        core.keep(index, keep);
        core.imported += 1;
        core.imported_bytes += bytes;
        let protected = if protection == Protection::ReadOnly { READ_ONLY } else { 0 };
        let flags = IMPORTED | protected | kind_bits(inner.config.host_kind);
        row.buffer.describe((addr, native), bytes, None, flags, PackedTimepoint::NEVER);
        Ok(inner.first_lease(row))
    }
}

impl Inner {
    #[cold]
    pub(crate) fn free_special(&self, row: &Row, flags: u32) -> bool {
        let (len, open) = (row.buffer.len(), row.buffer.open());
        let index = row.header.index();
        let mut dropped = None;
        let mut core = self.core.lock();
        if flags & IMPORTED != 0 {
            core.imported -= 1;
            core.imported_bytes -= len;
        }
        let keep = core.keeps.get(index as usize).and_then(Option::as_ref);
        let within = keep.and_then(|k| k.downcast_ref::<Within>());
        if let Some(within) = within {
            within.take_uses(&row.buffer);
        }
        if within.is_none() && keep.is_some() && open != Open::Over {
            self.put_aside(&mut core, row, |core| &mut core.retired);
            self.retired.fetch_add(1, Ordering::Relaxed);
        } else {
            dropped = core.keeps.get_mut(index as usize).and_then(Option::take);
            row.buffer.reset();
            self.table.put(&mut core.vacant, row);
        }
        let orphan = core.orphan;
        drop(core);
        // Foreign code: without the lock.
        drop(dropped);
        orphan
    }

    /// Drops what imports kept for uses that are over now.
    pub(crate) fn sweep_retired(&self) {
        if let Some(watch) = &self.watch {
            self.sweep_held(watch, SweepScope::Due);
        }
        // As many as there are now: what their destructors retire comes later.
        for _ in 0..self.retired.load(Ordering::Relaxed) {
            let mut core = self.core.lock();
            let Some(row) = self.take_aside(&mut core.retired) else { return };
            if row.buffer.open() != Open::Over {
                self.append(&mut core.retired, row);
                continue;
            }
            let keep = core.keeps.get_mut(row.header.index() as usize).and_then(Option::take);
            row.buffer.reset();
            self.table.restore(&mut core.vacant, row);
            self.retired.fetch_sub(1, Ordering::Relaxed);
            drop(core);
            // Foreign code: without the lock.
            drop(keep);
        }
    }
}
