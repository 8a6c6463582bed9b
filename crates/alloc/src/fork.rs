//! Forks of growing blocks: memory that several blocks have at their beginnings.
//!
//! A fork maps the first pieces of a block in another block too. A piece counts its further
//! mappings, and goes with the last of them. Budget and reserved bytes count it once. From then on
//! nobody writes it: the allocator knows how much of each block is shared, and its caller keeps to
//! that.

use crate::allocator::Allocator;
use crate::buffer::Buffer;
use crate::core::Core;
use crate::idle::empty_tail;
use crate::ranges::Busy;
use leasehold_core::{Error, Lease, Result};

impl Allocator {
    /// Gives `to`, of length 0, the memory at the beginning of `from`: the first pieces that lie
    /// within `bytes`. A piece is what the driver made at once: a granule, or several. Returns the
    /// new length of `to`. Memory that `to` had before goes first. May block on the driver; does
    /// not wait for a device. All or nothing: after an error both blocks are as they were, but
    /// that memory may be gone.
    ///
    /// # Errors
    /// `InvalidArgument` for one block twice, for bytes beyond the length of `from` or the maximum
    /// of `to`, and for a buffer that does not grow; `InvalidState` if `to` has a length;
    /// `Occupied` while another thread maps memory for `to`, and while work may use memory that it
    /// had; `Unsupported` without [`aliases`](crate::BackingCaps::aliases); `DeviceLost` and the
    /// driver's.
    ///
    /// # Safety
    /// - From the call on, no work writes the first [`shared`](Buffer::shared) bytes of a block.
    pub unsafe fn fork(&self, from: &Lease<Buffer>, to: &Lease<Buffer>, bytes: u64) -> Result<u64> {
        let inner = self.inner();
        let (core, supply) = (&inner.core, &inner.supply);
        let places = (self.growing_at(from)?, self.growing_at(to)?);
        supply.check_lost()?;
        if places.0 == places.1 {
            return Err(Error::invalid("a growing block cannot be a fork of itself; name another"));
        }
        if !(supply.caps.vmm && supply.caps.aliases) {
            return Err(Error::Unsupported(
                format!(
                    "{}: memory has one address here; copy instead of a fork",
                    self.config().name
                )
                .into(),
            ));
        }
        if bytes > from.len() {
            return Err(Error::invalid(format!(
                "a fork of {bytes} bytes of a growing block that has {}; fork what has memory",
                from.len()
            )));
        }
        if !to.is_empty() {
            return Err(Error::state(format!(
                "the block has {} bytes of its own; shrink it to 0 before it becomes a fork",
                to.len()
            )));
        }
        if let Some(range) = core.lock().ranges.get(places.1) {
            range.within(bytes, supply.caps.granule)?;
        }
        empty_tail(core, supply, places.1)?;
        let (mut plan, before) = {
            let Core { ranges, store, .. } = &mut *core.lock();
            ranges.plan_fork(&mut store.heap, places, (from, to), bytes)?
        };
        let result = supply.run(&mut plan);
        let Core { ranges, store, .. } = &mut *core.lock();
        plan.steps.iter().for_each(|step| _ = store.heap.end_step(step));
        if let Some(range) = ranges.get_mut(places.0) {
            if result.is_err() {
                range.shared = before.max(range.end_of_forks(&store.heap.res));
            }
            from.set_shared(range.shared);
        }
        let Some(range) = ranges.get_mut(places.1) else { return Ok(0) };
        range.take_pieces(&plan.steps, result.is_ok());
        range.busy = Busy::No;
        result.inspect_err(|e| supply.note_failure(e))?;
        (range.committed, range.shared) = (range.mapped, range.mapped);
        to.set_shared(range.shared);
        to.set_len(range.mapped);
        inner.add_live(range.mapped as i64);
        Ok(range.mapped)
    }
}
