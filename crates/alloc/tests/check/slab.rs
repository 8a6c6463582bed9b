//! The check of slabs.

use super::*;

impl Slabs {
    /// Checks the tables against themselves.
    pub(crate) fn check(&self, heap: &Heap) -> Result<(), String> {
        let mut free_bytes = 0;
        for class in 0..CLASSES {
            let (mut at, mut prev, mut empty) = (self.heads[class], NIL, 0);
            while at != NIL {
                let run = &self.runs[at as usize];
                let ones = |bits: &[u64; WORDS]| bits.iter().map(|w| w.count_ones()).sum::<u32>();
                let overlap = run.ready_bits.iter().zip(&run.pending_bits).any(|(a, b)| a & b != 0);
                let counted =
                    ones(&run.ready_bits) + ones(&run.pending_bits) == u32::from(run.free);
                if run.prev != prev
                    || !run.listed
                    || usize::from(run.class) != class
                    || run.free == 0
                {
                    return Err(format!("run {at} is badly listed"));
                }
                if overlap || !counted || heap.extents[run.extent].link[0] != at {
                    return Err(format!("run {at} miscounts its slots or has lost its extent"));
                }
                if (ones(&run.pending_bits) > 0) && run.pending == Pending::None {
                    return Err(format!("run {at} has pending slots of nobody"));
                }
                empty += u32::from(run.free == run.slots);
                free_bytes += u64::from(run.free) * class_size(class);
                prev = at;
                at = run.next;
            }
            if empty != self.empty[class] {
                let said = self.empty[class];
                return Err(format!("class {class} has {empty} empty runs, not {said}"));
            }
        }
        if free_bytes != self.free_bytes {
            return Err(format!("{free_bytes} bytes free in slabs, not {}", self.free_bytes));
        }
        Ok(())
    }
}
