//! The packer: offsets for temporaries whose lifetimes are known, so that those that never live
//! together share memory.
//!
//! Pure and deterministic: equal input gives equal output.

use leasehold_core::{Error, Result};

/// A temporary: what it needs, and the first and last operation that use it (both included).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Interval {
    /// Bytes.
    pub size: u64,
    /// Alignment in bytes, a power of two.
    pub align: u64,
    /// The first operation that uses it.
    pub first: u32,
    /// The last operation that uses it; `u32::MAX` when it outlives the list.
    pub last: u32,
}

impl Interval {
    fn meets(&self, other: &Interval) -> bool {
        self.first <= other.last && other.first <= self.last
    }
}

/// Where the packer put the temporaries.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Packing {
    /// The offset of each interval in bytes, in the order given.
    pub offsets: Vec<u64>,
    /// Bytes that all of them need together.
    pub total: u64,
    /// The most bytes that live at one operation: no packing is smaller.
    pub bound: u64,
}

/// Packs `lifetimes`: the best of three greedy orders (by size, by size times duration, by
/// beginning), each placing an interval at the lowest offset that is free for as long as it lives.
///
/// ```
/// use leasehold_alloc::planner::{plan, Interval};
/// let at = |first, last| Interval { size: 1000, align: 256, first, last };
/// let packed = plan(&[at(0, 1), at(1, 2), at(2, 3)])?;
/// assert_eq!(packed.offsets[0], packed.offsets[2]);
/// assert!(packed.total < 3000);
/// # Ok::<(), leasehold_core::Error>(())
/// ```
///
/// # Errors
/// `InvalidArgument` for an alignment that is no power of two, an interval that ends before it
/// begins, or sizes that overflow.
pub fn plan(lifetimes: &[Interval]) -> Result<Packing> {
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
    let mut best: Option<Packing> = None;
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
        let packed = place(lifetimes, &ids, bound);
        if best.as_ref().is_none_or(|b| packed.total < b.total) {
            best = Some(packed);
        }
        if best.as_ref().is_some_and(|b| b.total == bound) {
            break;
        }
    }
    Ok(best.unwrap_or_default())
}

fn place(lifetimes: &[Interval], order: &[usize], bound: u64) -> Packing {
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
    Packing { offsets, total, bound }
}

/// The most bytes that live at one operation.
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
