//! A block for a request, with its row and lease: of the heap, or of what the fallback finds.

use crate::buffer::Buffer;
use crate::layout::Layout;
use crate::state::Inner;
use crate::store::Need;
use crate::stream::On;
use crate::thread_cache::Evicted;
use leasehold_core::{Lease, Result};

/// Deferred rows that one allocation looks at.
const DEFERRED_AT_ONCE: u32 = 4;

impl Inner {
    /// A block of the heap, whatever its alignment.
    pub(crate) fn alloc_block(&self, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        match Need::of(layout.size, layout.align).filter(|_| layout.align <= self.most_align) {
            Some(need) => self.alloc_in_core(need, layout, on, Evicted::NOTHING),
            None => Err(self.refuse(layout)),
        }
    }

    /// A block of the heap, once what a thread cache evicted is there.
    #[inline(always)]
    pub(crate) fn alloc_in_core(
        &self,
        need: Need,
        layout: Layout,
        on: On<'_>,
        evicted: Evicted,
    ) -> Result<Lease<Buffer>> {
        {
            let mut core = self.lock_core();
            if !evicted.is_nothing() {
                self.return_evicted_in(&mut core, evicted);
            }
            if core.deferred.any() {
                core.free_deferred(&self.table, DEFERRED_AT_ONCE);
            }
            // Two branches, so that the block's fields stay in registers.
            if let Some(class) = need.class {
                if let Some(block) = core.store.take_slot(class.into(), on.timeline)? {
                    let row = core.row_of(&self.table, block, layout.size, on.timeline)?;
                    self.add_live(layout.size as i64);
                    return Ok(row.first_lease());
                }
            } else {
                core.store.heap.extents.ensure(2)?;
                let row = self.table.take(&mut core.vacant)?;
                if let Some(extent) =
                    core.store.heap.take_extent(need.units, need.align, on.timeline)
                {
                    self.table.fill(row, core.store.block(extent), layout.size, on.timeline);
                    core.allocations += 1;
                    self.add_live(layout.size as i64);
                    return Ok(row.first_lease());
                }
                self.table.put_bumped(&mut core.vacant, row);
            }
        }
        self.issue_slow(need, layout, on)
    }

    /// As [`alloc_in_core`](Self::alloc_in_core), of what the fallback finds.
    #[cold]
    #[inline(never)]
    fn issue_slow(&self, need: Need, layout: Layout, on: On<'_>) -> Result<Lease<Buffer>> {
        let block = self.alloc_slow(need, layout, on)?;
        let mut core = self.core.lock();
        let row = core.row_of(&self.table, block, layout.size, on.timeline);
        let row = row.inspect_err(|_| self.supply.failed.add(1))?;
        self.add_live(layout.size as i64);
        Ok(row.first_lease())
    }
}
