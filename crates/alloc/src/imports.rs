//! Foreign objects that a row keeps alive: somebody else's memory as a buffer, and all else that
//! must outlast the last use of a buffer.
//!
//! The allocator drops a foreign object without its lock, once nobody holds the row and the row's
//! last use is over.

use crate::buffer::{Buffer, GROWING, IMPORTED, READ_ONLY, Row};
use crate::checks::SweepScope;
use crate::core::Keep;
use crate::state::Inner;
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

impl Inner {
    /// Somebody else's memory as a buffer, by a first lease of this kind: `bytes` at `addr`,
    /// spanned by the object `native`.
    ///
    /// # Safety
    /// - As [`Allocator::import`](crate::Allocator::import).
    pub(crate) unsafe fn import(
        &self,
        (addr, native): (u64, u64),
        bytes: u64,
        protection: Protection,
        keep: Box<dyn Any + Send + Sync>,
        lease: impl FnOnce(&Row) -> Lease<Buffer>,
    ) -> Result<Lease<Buffer>> {
        if addr.checked_add(bytes).is_none() {
            return Err(Error::invalid(format!("import of {bytes} bytes at {addr:#x} wraps")));
        }
        self.sweep_retired();
        let mut core = self.core.lock();
        let row = core.take_keeping_row(&self.table)?;
        core.keep(row.header.index(), Keep::Import(keep));
        core.imported += 1;
        core.imported_bytes += bytes;
        let protected = if protection == Protection::ReadOnly { READ_ONLY } else { 0 };
        self.table.fill_special(row, (addr, native), bytes, None, IMPORTED | protected);
        Ok(lease(row))
    }

    #[cold]
    pub(crate) fn free_special(&self, row: &Row, flags: u32) -> bool {
        let (len, until) = (row.buffer.len(), row.buffer.used_until());
        let index = row.header.index();
        let mut dropped = None;
        let mut core = self.core.lock();
        if flags & IMPORTED != 0 {
            core.imported -= 1;
            core.imported_bytes -= len;
        }
        if flags & (GROWING | IMPORTED) == GROWING {
            self.add_live(-(len as i64));
        }
        let in_use = match core.keeps.get(index as usize).and_then(Option::as_ref) {
            Some(Keep::Import(_) | Keep::Growing(_)) => until != Some(PackedTimepoint::NEVER),
            Some(Keep::Member(memory)) => {
                memory.take_uses(&row.buffer);
                false
            }
            None => false,
        };
        if in_use {
            self.table.put_aside(&mut core.vacant, row);
            core.retired.append(&self.table, row);
            self.retired.fetch_add(1, Ordering::Relaxed);
        } else {
            dropped = core.end_keep(index);
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
        self.checks.sweep(&self.core, &self.supply, SweepScope::Due);
        // As many as there are now: what their destructors retire comes later.
        for _ in 0..self.retired.load(Ordering::Relaxed) {
            let mut core = self.core.lock();
            let Some(row) = core.retired.take(&self.table) else { return };
            if row.buffer.used_until() != Some(PackedTimepoint::NEVER) {
                core.retired.append(&self.table, row);
                continue;
            }
            let keep = core.end_keep(row.header.index());
            row.buffer.reset();
            self.table.restore(&mut core.vacant, row);
            self.retired.fetch_sub(1, Ordering::Relaxed);
            drop(core);
            // Foreign code: without the lock.
            drop(keep);
        }
    }
}
