//! The packer: offsets for temporaries whose lifetimes are known, so that those that never live
//! together share memory.
//!
//! Pure and deterministic: equal input gives equal output.

use leasehold_core::{Error, Result};

/// A temporary: what it needs, and the first and last operation that use it (both included).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub(crate) struct Interval {
    /// Bytes.
    pub(crate) size: u64,
    /// Alignment in bytes, a power of two.
    pub(crate) align: u64,
    /// The first operation that uses it.
    pub(crate) first: u32,
    /// The last operation that uses it; `u32::MAX` when it outlives the list.
    pub(crate) last: u32,
}

impl Interval {
    fn meets(&self, other: &Interval) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Packs `lifetimes`: the best of three greedy orders (by size, by size times duration, by
/// beginning), each placing an interval at the lowest offset that is free for as long as it lives.
/// Returns the offset of each in bytes, in the order given, and the bytes that all need together.
///
/// # Errors
/// `InvalidArgument` for an alignment that is no power of two, an interval that ends before it
/// begins, or sizes that overflow.
pub(crate) fn plan(lifetimes: &[Interval]) -> Result<(Vec<u64>, u64)> {
    let mut sum = 0u64;
    for (i, l) in lifetimes.iter().enumerate() {
        if !l.align.is_power_of_two() || l.first > l.last {
            return Err(Error::invalid(format!("lifetime {i} is malformed: {l:?}")));
        }
        sum = l
            .size
            .checked_add(l.align)
            .and_then(|s| sum.checked_add(s))
            .ok_or_else(|| Error::invalid(format!("the sizes up to lifetime {i} overflow")))?;
    }
    let bound = bound(lifetimes);
    let mut best: Option<(Vec<u64>, u64)> = None;
    for order in 0..3 {
        let mut ids: Vec<usize> = (0..lifetimes.len()).collect();
        ids.sort_by_key(|&i| {
            let l = &lifetimes[i];
            let length = u128::from(l.last - l.first) + 1;
            let key = match order {
                0 => u128::from(l.size),
                1 => u128::from(l.size) * length,
                _ => u128::from(u32::MAX - l.first),
            };
            (std::cmp::Reverse(key), std::cmp::Reverse(l.size), l.first, i)
        });
        let packed = place(lifetimes, &ids);
        if best.as_ref().is_none_or(|best| packed.1 < best.1) {
            best = Some(packed);
        }
        if best.as_ref().is_some_and(|best| best.1 == bound) {
            break;
        }
    }
    Ok(best.unwrap_or_default())
}

fn place(lifetimes: &[Interval], order: &[usize]) -> (Vec<u64>, u64) {
    let mut offsets = vec![0u64; lifetimes.len()];
    let mut placed: Vec<usize> = Vec::with_capacity(order.len());
    let mut total = 0;
    for &i in order {
        let l = &lifetimes[i];
        if l.size == 0 {
            continue;
        }
        // `placed` is sorted by offset: the first gap that is wide enough, free for the whole
        // lifetime.
        let mut at = 0u64;
        for &j in &placed {
            let other = &lifetimes[j];
            if !l.meets(other) {
                continue;
            }
            if at + l.size <= offsets[j] {
                break;
            }
            at = at.max((offsets[j] + other.size).next_multiple_of(l.align));
        }
        offsets[i] = at;
        total = total.max(at + l.size);
        let slot = placed.partition_point(|&j| offsets[j] <= at);
        placed.insert(slot, i);
    }
    (offsets, total)
}

/// The most bytes that live at one operation: no packing is smaller.
fn bound(lifetimes: &[Interval]) -> u64 {
    let mut edges: Vec<(u64, i128)> = Vec::with_capacity(lifetimes.len() * 2);
    for l in lifetimes {
        edges.push((u64::from(l.first) * 2, i128::from(l.size)));
        edges.push((u64::from(l.last) * 2 + 1, -i128::from(l.size)));
    }
    edges.sort_unstable();
    let (mut now, mut most) = (0i128, 0i128);
    for (_, by) in edges {
        now += by;
        most = most.max(now);
    }
    u64::try_from(most).unwrap_or(u64::MAX)
}

#[cfg(all(test, not(loom)))]
#[path = "../tests/unit/planner.rs"]
mod tests;
