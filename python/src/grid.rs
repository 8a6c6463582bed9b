//! Elements of host memory that lie at strides, and copies between them and elements without gaps.

/// Where elements lie in host memory.
pub(crate) struct Grid {
    pub(crate) first: *mut u8,
    pub(crate) shape: Vec<i64>,
    /// In bytes.
    pub(crate) strides: Vec<i64>,
    /// Bytes of an element.
    pub(crate) size: i64,
}

/// Copies elements of a row, each of `N` bytes.
///
/// # Safety
/// - The source has `count` elements at its stride, and the target has room for them at its own.
/// - They have no byte in common.
unsafe fn copy_each<const N: usize>(
    (mut from, from_stride): (*const u8, i64),
    (mut to, to_stride): (*mut u8, i64),
    count: i64,
) {
    for _ in 0..count {
        // SAFETY: the caller vouches for both elements.
        unsafe { to.copy_from_nonoverlapping(from, N) };
        // The last step leads out of the array.
        from = from.wrapping_offset(from_stride as isize);
        to = to.wrapping_offset(to_stride as isize);
    }
}

/// Copies elements of a row, each of `size` bytes.
///
/// # Safety
/// - As for [`copy_each`].
unsafe fn copy_row(size: i64, from: (*const u8, i64), to: (*mut u8, i64), count: i64) {
    // SAFETY: the caller vouches for all elements.
    unsafe {
        match size {
            _ if (from.1, to.1) == (size, size) => {
                to.0.copy_from_nonoverlapping(from.0, (count * size) as usize);
            }
            1 => copy_each::<1>(from, to, count),
            2 => copy_each::<2>(from, to, count),
            4 => copy_each::<4>(from, to, count),
            8 => copy_each::<8>(from, to, count),
            16 => copy_each::<16>(from, to, count),
            _ => unreachable!("no type has elements of {size} bytes"),
        }
    }
}

impl Grid {
    /// The dimensions of several elements with their strides. Those that continue one another are
    /// one. The grid is not empty.
    fn folded(&self) -> Vec<(i64, i64)> {
        let mut folded: Vec<(i64, i64)> = Vec::new();
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            match folded.last_mut() {
                _ if n == 1 => {}
                Some(last) if stride.checked_mul(n) == Some(last.1) => {
                    *last = (last.0 * n, stride);
                }
                _ => folded.push((n, stride)),
            }
        }
        folded
    }

    fn is_empty(&self) -> bool {
        self.shape.contains(&0)
    }

    /// Whether the elements follow one another without gaps, the last dimension fastest.
    pub(crate) fn is_dense(&self) -> bool {
        self.is_empty()
            || match self.folded()[..] {
                [] => true,
                [(_, stride)] => stride == self.size,
                _ => false,
            }
    }

    /// Whether two elements may have a byte in common: a stride does not step over all that smaller
    /// strides reach.
    pub(crate) fn may_overlap(&self) -> bool {
        if self.is_empty() {
            return false;
        }
        let mut steps = self.folded();
        steps.sort_by_key(|&(_, stride)| stride.unsigned_abs());
        let mut reach = self.size.unsigned_abs();
        steps.into_iter().any(|(n, stride)| {
            let stride = stride.unsigned_abs();
            let over = stride >= reach;
            reach = reach.saturating_add(stride.saturating_mul(n.unsigned_abs() - 1));
            !over
        })
    }

    /// Whether all elements lie in so many bytes, with the first one at an offset.
    pub(crate) fn lies_in(&self, offset: i64, bytes: u64) -> bool {
        let (mut low, mut high) = (i128::from(offset), i128::from(offset) + i128::from(self.size));
        for (&n, &stride) in self.shape.iter().zip(&self.strides) {
            let reach = i128::from(n - 1) * i128::from(stride);
            low += reach.min(0);
            high += reach.max(0);
        }
        self.is_empty() || (low >= 0 && high <= i128::from(bytes))
    }

    /// Calls for each row of elements at one stride, in the order of the elements.
    fn rows(&self, mut row: impl FnMut(*mut u8, i64, i64)) {
        if self.is_empty() {
            return;
        }
        let mut outer = self.folded();
        let (count, stride) = outer.pop().unwrap_or((1, self.size));
        let mut at = vec![0; outer.len()];
        let mut offset = 0;
        loop {
            row(self.first.wrapping_offset(offset as isize), count, stride);
            // The next row: one step of the last dimension that has one, and the later ones anew.
            let Some(next) = (0..outer.len()).rev().find(|&d| at[d] + 1 < outer[d].0) else {
                return;
            };
            for d in next + 1..outer.len() {
                offset -= at[d] * outer[d].1;
                at[d] = 0;
            }
            at[next] += 1;
            offset += outer[next].1;
        }
    }

    /// Copies the elements to memory where they have no gaps.
    ///
    /// # Safety
    /// - The elements can be read, `to` has room for all of them, and both are apart.
    pub(crate) unsafe fn gather(&self, mut to: *mut u8) {
        let size = self.size;
        self.rows(|from, count, stride| {
            // SAFETY: the rows have as many elements as there is room for; the caller vouches.
            unsafe {
                copy_row(size, (from, stride), (to, size), count);
                to = to.add((count * size) as usize);
            }
        });
    }

    /// Copies elements without gaps here.
    ///
    /// # Safety
    /// - The elements here can be written, `from` has as many, and both are apart.
    pub(crate) unsafe fn scatter(&self, mut from: *const u8) {
        let size = self.size;
        self.rows(|to, count, stride| {
            // SAFETY: the rows have as many elements as the source; the caller vouches.
            unsafe {
                copy_row(size, (from, size), (to, stride), count);
                from = from.add((count * size) as usize);
            }
        });
    }

    /// Sets all elements to one.
    ///
    /// # Safety
    /// - The elements can be written, and `element` has their size.
    pub(crate) unsafe fn fill(&self, element: &[u8]) {
        self.rows(|to, count, stride| {
            // SAFETY: the same element is read for each; the caller vouches.
            unsafe { copy_row(self.size, (element.as_ptr(), 0), (to, stride), count) };
        });
    }
}
