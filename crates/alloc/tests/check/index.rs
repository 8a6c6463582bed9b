//! The check of an index.

use super::*;

impl Index {
    /// Checks the index against itself; `each` is told every extent.
    pub(crate) fn check(
        &self,
        extents: &[Extent],
        mut each: impl FnMut(u32),
    ) -> Result<(), String> {
        let (mut units, mut count) = (0u64, 0u32);
        for (leaf, &head) in self.heads.iter().enumerate() {
            let (mut at, mut prev, mut max) = (head, NIL, 0);
            while at != NIL {
                let extent = &extents[at as usize];
                if self.leaf_of(extent.end()) != leaf || extent.link[0] != prev {
                    return Err(format!("extent {at} is in the wrong leaf or badly linked"));
                }
                max = max.max(extent.units);
                units += u64::from(extent.units);
                count += 1;
                each(at);
                prev = at;
                at = extent.link[1];
            }
            if self.rows[0][leaf / WIDE].0[leaf % WIDE] != code(max) {
                return Err(format!("leaf {leaf}: its maximum is {max}"));
            }
        }
        for row in 1..=self.top {
            for (i, below) in self.rows[row - 1].iter().enumerate() {
                let max = below.max();
                if self.rows[row][i / WIDE].0[i % WIDE] != max {
                    return Err(format!("row {row}, entry {i}: its maximum is {max}"));
                }
            }
        }
        if (units, count) != (self.units, self.count) {
            let (all, of) = (self.units, self.count);
            return Err(format!("index counts {all}/{of} but holds {units}/{count}"));
        }
        Ok(())
    }
}
