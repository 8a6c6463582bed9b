//! The place of keys and values in the memory of a cache.
//!
//! A cache's memory is divided into equal parts. A part has the keys of some layers of a sequence,
//! or their values, or both. Within a part a position of a head lies at a distance of its own from
//! the next position, and so does a head from the next head. So one kernel serves caches whose
//! heads are contiguous, and caches that grow by positions.
//!
//! A part that grows has memory at its beginning alone. Words on the device say how many bytes of
//! each part have memory. A position beyond them is outside the cache. As many words behind them
//! say how many bytes at the beginning of each part are shared. A row that would write there is
//! outside the cache too.

use leasehold::kernel::CpuArgs;

use super::tile::{Extent, Launch, Refusal, params, ptr};
use std::ops::Range;

params! {
    /// The places of keys and values. Distances count heads: `head_dim` elements each.
    pub struct CacheLayout {
        /// From a position of a head to the next one.
        pub position: u32,
        /// From a head to the next one.
        pub head: u32,
        /// From a part to the next one.
        pub part: u32,
        /// From the beginning of a part to its first head.
        pub offset: u32,
        /// The part with the first sequence's keys.
        pub keys: u32,
        /// The part with the first sequence's values.
        pub values: u32,
        /// Parts from a sequence to the next one.
        pub next: u32,
        /// Parts of memory that grows: keys and values are both in the key cache, and each part
        /// has a limit. 0 for caches that have all of their memory, and are apart.
        pub limits: u32,
    }
}

/// The sizes that a layout is checked against.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Sizes {
    pub(crate) sequences: usize,
    pub(crate) kv_heads: u32,
    pub(crate) positions: u32,
    pub(crate) head_dim: u32,
    /// Bytes of an element.
    pub(crate) bytes: usize,
}

impl CacheLayout {
    /// The layout of caches `[sequence][kv_head][position][head_dim]`, keys and values apart.
    #[must_use]
    pub const fn contiguous(kv_heads: u32, positions: u32) -> Self {
        Self {
            position: 1,
            head: positions,
            part: kv_heads.wrapping_mul(positions),
            offset: 0,
            keys: 0,
            values: 0,
            next: 1,
            limits: 0,
        }
    }

    /// Heads from the beginning of a part to the end of the last head at position `at`.
    #[inline(always)]
    fn end(&self, kv_heads: u32, at: u64) -> u64 {
        let heads = u64::from(kv_heads - 1) * u64::from(self.head);
        u64::from(self.offset) + heads + at * u64::from(self.position) + 1
    }

    /// Checks that no two elements share a place. Returns the extents of the key cache, the value
    /// cache and the limits.
    pub(crate) fn extents(&self, s: Sizes) -> Result<[Extent; 3], Refusal> {
        let Self { position, head, part, keys, values, next, limits, .. } = *self;
        let [inner, outer] = match position <= head {
            true => [(position, s.positions), (head, s.kv_heads)],
            false => [(head, s.kv_heads), (position, s.positions)],
        };
        let overlap =
            |(distance, count): (u32, u32), least: u64| count > 1 && u64::from(distance) < least;
        let within = u64::from(inner.0) * u64::from(inner.1 - 1) + 1;
        if overlap(inner, 1) || overlap(outer, within) {
            return Err(format!(
                "positions of a cache overlap: {position} heads from one to the next, {head} from a head to the next"
            )
            .into());
        }
        let end = self.end(s.kv_heads, u64::from(s.positions - 1));
        if end > u64::from(part) {
            return Err(
                format!("{} positions need parts of {end} heads, not {part}", s.positions).into()
            );
        }
        let several = s.sequences > 1;
        if several && next == 0 {
            return Err("sequences share a part of the cache".into());
        }
        let last = |first: u32| {
            u128::from(first)
                + (s.sequences as u128 - 1) * u128::from(if several { next } else { 0 })
        };
        let elements = |heads: u128| {
            usize::try_from(heads.saturating_mul(s.head_dim.into()))
                .map_err(|_| Refusal::from("an operand of more than 2^64 elements"))
        };
        if limits == 0 {
            let extent = |first| {
                Ok::<_, Refusal>((
                    elements(last(first) * u128::from(part) + u128::from(end))?,
                    s.bytes,
                ))
            };
            return Ok([extent(keys)?, extent(values)?, (0, 8)]);
        }
        if last(keys).max(last(values)) >= u128::from(limits) {
            return Err(format!("parts {keys} and {values} on, of {limits} parts").into());
        }
        let shared = if several { keys % next == values % next } else { keys == values };
        if shared {
            return Err("keys and values share a part of the cache".into());
        }
        let all = elements(u128::from(limits) * u128::from(part))?;
        Ok([(all, s.bytes), (0, s.bytes), (2 * limits as usize, 8)])
    }

    /// A launch with the key cache and the limits in these operands. Memory that grows is bound as
    /// a whole: its parts and its limits say together where each part begins.
    pub(crate) fn exact(&self, launch: Launch, cache: usize, limits: usize) -> Launch {
        launch.exactly(cache, self.limits != 0).exactly(limits, self.limits != 0)
    }

    /// Elements from a position of a head to the next one.
    #[inline(always)]
    pub(crate) fn pitch(&self, head_dim: u32) -> usize {
        self.position as usize * head_dim as usize
    }

    /// The element of position 0 of a head, where the first sequence's part is `first`.
    #[inline(always)]
    pub(crate) fn at(&self, first: u32, sequence: usize, head: usize, head_dim: u32) -> usize {
        let part = first as usize + sequence * self.next as usize;
        let heads = part * self.part as usize + self.offset as usize + head * self.head as usize;
        heads * head_dim as usize
    }

    /// The operand that has the values: `keys` where both are in one memory.
    #[inline(always)]
    pub(crate) fn values_in(&self, keys: usize, values: usize) -> usize {
        if self.limits == 0 { values } else { keys }
    }

    /// The words of a sequence's keys and values: limits from word 0 on, shared bytes behind them.
    ///
    /// # Safety
    /// - The operand has two words for each part, and `extents` has accepted the sizes.
    #[inline(always)]
    unsafe fn words(
        &self,
        first: usize,
        sequence: usize,
        limits: (&CpuArgs<'_>, usize),
    ) -> [u64; 2] {
        let words = ptr::<u64>(limits.0, limits.1).cast_const();
        [self.keys, self.values].map(|of| {
            // SAFETY: the caller vouches for two words for each part.
            unsafe { words.add(first + of as usize + sequence * self.next as usize).read() }
        })
    }

    /// The positions of a sequence that have memory of its own: those before are shared with other
    /// sequences, and nobody writes them; those behind have no memory. Operand `limits` has the
    /// limits.
    ///
    /// # Safety
    /// - The operand has two words for each part, and `extents` has accepted the sizes.
    #[inline(always)]
    pub(crate) unsafe fn own(
        &self,
        s: Sizes,
        sequence: usize,
        limits: (&CpuArgs<'_>, usize),
    ) -> Range<usize> {
        if self.limits == 0 {
            return 0..s.positions as usize;
        }
        // SAFETY: by the caller's contract.
        let (memory, shared) = unsafe {
            (self.words(0, sequence, limits), self.words(self.limits as usize, sequence, limits))
        };
        let (head, position) =
            (u64::from(s.head_dim) * s.bytes as u64, u64::from(self.position.max(1)));
        let (heads, first) = (memory[0].min(memory[1]) / head, self.end(s.kv_heads, 0));
        let end = match heads.checked_sub(first) {
            Some(more) => (more / position).saturating_add(1).min(s.positions.into()),
            None => 0,
        };
        // The lowest head counts.
        let heads = shared[0].max(shared[1]).div_ceil(head);
        let begin = heads.saturating_sub(self.offset.into()).div_ceil(position);
        begin as usize..end as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: Sizes = Sizes { sequences: 3, kv_heads: 2, positions: 5, head_dim: 4, bytes: 2 };

    /// The places of all elements, by operand.
    fn places(layout: CacheLayout, s: Sizes) -> Vec<(usize, usize)> {
        let mut all = Vec::new();
        for (operand, first) in [(0, layout.keys), (layout.values_in(0, 1), layout.values)] {
            for sequence in 0..s.sequences {
                for head in 0..s.kv_heads as usize {
                    let at = layout.at(first, sequence, head, s.head_dim);
                    let dim = s.head_dim as usize;
                    let row = |p: usize| at + p * layout.pitch(s.head_dim);
                    all.extend((0..s.positions as usize).flat_map(|p| {
                        (row(p)..row(p) + dim).map(move |element| (operand, element))
                    }));
                }
            }
        }
        all
    }

    #[test]
    fn accepted_layouts_have_a_place_of_its_own_for_each_element() {
        let (mut accepted, mut refused) = (0, 0);
        for code in 0..4u32.pow(6) {
            let digit = |i: u32| code / 4u32.pow(i) % 4;
            let layout = CacheLayout {
                position: [0, 1, 2, 6][digit(0) as usize],
                head: [0, 1, 5, 10][digit(1) as usize],
                part: [9, 10, 14, 32][digit(2) as usize],
                offset: digit(3) % 2 * 3,
                keys: digit(3) / 2,
                values: [0, 1, 3, 4][digit(4) as usize],
                next: [0, 1, 2, 3][digit(5) as usize],
                limits: if digit(4) == 1 { 8 } else { 0 },
            };
            for sequences in [1, 3] {
                let s = Sizes { sequences, ..SIZES };
                let Ok([keys, values, _]) = layout.extents(s) else {
                    refused += 1;
                    continue;
                };
                accepted += 1;
                let mut all = places(layout, s);
                for &(operand, element) in &all {
                    assert!(element < [keys.0, values.0][operand], "{layout:?}");
                }
                let count = all.len();
                all.sort_unstable();
                all.dedup();
                assert_eq!(all.len(), count, "{layout:?}, {sequences} sequences");
            }
        }
        assert!(accepted > 100 && refused > 1000, "{accepted} {refused}");
    }

    #[test]
    fn positions_have_memory_up_to_the_lower_limit() {
        let layout = CacheLayout {
            position: 6,
            head: 1,
            part: 32,
            offset: 3,
            keys: 0,
            values: 1,
            next: 2,
            limits: 6,
        };
        assert!(layout.extents(SIZES).is_ok());
        for bytes in 0..=256u64 {
            let mut words = [256, 256, 256, bytes, 256, 256, 0, 0, 0, bytes, 0, 0];
            let bindings = [super::super::tile::bind(&mut words)];
            let scratch = (std::ptr::null_mut(), 0);
            // SAFETY: the words outlive the arguments; there is no scratch memory.
            let args = unsafe { CpuArgs::new(([1; 3], [1; 3]), &bindings, &[], scratch) };
            // SAFETY: two words for each part.
            let own = [0, 1].map(|i| unsafe { layout.own(SIZES, i, (&args, 0)) });
            let fits = |at: &usize| (layout.end(2, *at as u64) * 8) <= bytes;
            assert_eq!([own[0].end, own[1].end], [5, (0..5).filter(fits).count()], "{bytes}");
            let first = (0..).find(|at| (3 + at * 6) * 8 >= bytes);
            assert_eq!((own[0].start, Some(own[1].start as u64)), (0, first), "{bytes}");
        }
    }
}
