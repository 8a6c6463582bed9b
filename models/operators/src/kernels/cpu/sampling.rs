//! Sampling kernels, from logits to the next token: softmax, argmax, and the step that draws a
//! token and closes the loop on the device.
//!
//! A draw takes its rule from a [`SamplingRecord`] in device memory, so a recorded step serves
//! every rule. The candidates are cut in this order: temperature, top-k, top-p, min-p. Weights are
//! `e^((x − max x) / temperature)` in f32. Top-p adds them as whole numbers of small units, so
//! every device finds the same cut.
//!
//! Random numbers are counter-based: Philox4x32 with ten rounds (Salmon et al., "Parallel Random
//! Numbers: As Easy as 1, 2, 3", 2011), with the seed as key and the position as counter. So a
//! token depends on (logits, record, position) alone. A replayed graph draws a new number at every
//! position without a change of parameters.
//!
//! A NaN is not a candidate. If all logits are NaN, the result is −1, which is not a token.

use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold::kernel::CpuArgs;

use super::elem::{DType, Elem, load_at, store_at, with_elem};
use super::math::exp;
use super::rope::extent;
use super::row;
use super::simd::{MAX_LANES, Simd, Task};
use super::tile::{
    Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, times, update,
    write,
};

params! {
    /// Parameters of [`Softmax`] and [`Argmax`].
    pub struct RowParams {
        /// Rows.
        pub rows: u32,
        /// Elements of a row.
        pub n: u32,
        /// Elements from one row of the input to the next.
        pub ldx: u32,
        /// Elements from one row of the output to the next ([`Softmax`] only).
        pub ldy: u32,
        /// Element type of the input.
        pub x: u32,
        /// Element type of the output ([`Softmax`] only).
        pub y: u32,
    }
}

/// The maximum number of [`SamplingRecord::log_probabilities`].
pub const MAX_LOG_PROBABILITIES: usize = 20;

params! {
    /// The sampling of a row, in device memory. Zeros are a greedy choice.
    ///
    /// A kernel takes any words. Each field says what its other values mean.
    pub struct SamplingRecord {
        /// The divisor of the logits. The largest logit is chosen, the first of equal ones, without
        /// a random number, unless this value and its inverse are positive and finite.
        pub temperature: f32,
        /// The number of largest logits that are candidates; 0 for all. Of equal logits the first
        /// ones are.
        pub top_k: u32,
        /// The part of the candidates' weights that the largest of them must reach; those are left.
        /// Any value but those between 0 and 1 leaves all.
        pub top_p: f32,
        /// The smallest weight of a candidate, as a part of the largest one's. Any value but those
        /// above 0 and up to 1 leaves all.
        pub min_p: f32,
        /// The seed: low word, high word.
        pub seed: [u32; 2],
        /// The number of largest logits whose log-probabilities are wanted; 0 for none. Larger
        /// values than [`MAX_LOG_PROBABILITIES`] are that one.
        pub log_probabilities: u32,
        /// Zero.
        pub reserved: u32,
    }
}

params! {
    /// The log-probabilities of a row's step, in device memory: `ln softmax` of the logits as they
    /// are, without temperature and cuts. A NaN among the logits has no part in the sum.
    ///
    /// All are NaN if the largest logit is infinite.
    pub struct LogProbabilities {
        /// The chosen token's; NaN without a token.
        pub chosen: f32,
        /// The ids of the largest logits, in falling order, equal logits in the order of ids. −1
        /// in the places that were not asked for, or that no logit is left for.
        pub ids: [i32; 20],
        /// Their log-probabilities; NaN where the id is −1.
        pub values: [f32; 20],
    }
}

params! {
    /// Parameters of [`NextToken`].
    pub struct NextTokenParams {
        /// Rows, each a sequence of its own.
        pub rows: u32,
        /// Logits of a row, f32.
        pub n: u32,
        /// Elements from one row of logits to the next.
        pub ld: u32,
        /// Capacity of a row's ring in ids.
        pub ring: u32,
        /// Capacity of a row's ring in [`LogProbabilities`].
        pub log_ring: u32,
    }
}

params! {
    /// Parameters of [`Advance`].
    pub struct AdvanceParams {
        /// Rows, each a sequence of its own.
        pub rows: u32,
        /// The increment of the position.
        pub step: u32,
        /// Capacity of a row's ring in ids.
        pub ring: u32,
    }
}

const _: () = assert!(size_of::<SamplingRecord>() == 32);
const _: () = assert!(size_of::<LogProbabilities>() == 4 * (1 + 2 * MAX_LOG_PROBABILITIES));

/// `y = exp(x − max x) / Σ exp(x − max x)`, row by row. A row with a NaN or +∞, or of −∞
/// only, is all NaN.
pub struct Softmax;
/// The index of the largest element of each row, as i32. Of equal elements the first; −1 if all
/// are NaN.
pub struct Argmax;
/// Row by row: `position += step`; the token goes to `ring[count mod size]`; `count += 1`. A row
/// whose position is negative stays as it is.
pub struct Advance;
/// Draws a token for each row, by the row's [`SamplingRecord`], and [`Advance`]s the row by one.
/// This is the end of a decode step. The token is −1 if all logits are NaN. The
/// [`LogProbabilities`] that the record asks for go to entry `count mod size` of the row's ring,
/// with the count before the step. A row whose position is negative stays as it is.
pub struct NextToken;

/// Changes the f32 logits of each row, before a token is drawn from them: those of the tokens that
/// the row has seen by its penalty, and those of its banned tokens to the lowest finite number.
///
/// Both sets are bits, in as many words as a row's bits take. The row's token joins those that were
/// seen, if it is one. A penalty divides logits above zero and multiplies others. It changes
/// nothing unless it is positive and finite. A row whose position is negative stays as it is.
pub struct Penalise;

/// The first of four words of Philox4x32-10 for `counter` under `key`.
#[must_use]
pub fn philox(key: [u32; 2], counter: u64) -> u32 {
    let [mut k0, mut k1] = key;
    let mut c = [counter as u32, (counter >> 32) as u32, 0, 0];
    for _ in 0..10 {
        let p0 = u64::from(c[0]) * 0xD251_1F53;
        let p1 = u64::from(c[2]) * 0xCD9E_8D57;
        c = [(p1 >> 32) as u32 ^ c[1] ^ k0, p1 as u32, (p0 >> 32) as u32 ^ c[3] ^ k1, p0 as u32];
        k0 = k0.wrapping_add(0x9E37_79B9);
        k1 = k1.wrapping_add(0xBB67_AE85);
    }
    c[0]
}

/// The largest of `n` elements without NaN, and its first index; (−∞, `usize::MAX`) if no
/// element is left. As an i32 that index is −1.
///
/// # Safety
/// - `x` is readable for `n` elements of the type.
#[inline(always)]
pub unsafe fn largest<S: Simd>(s: S, dtype: DType, x: *const u8, n: usize) -> (f32, usize) {
    s.run(Largest { dtype, x, n })
}

struct Largest {
    dtype: DType,
    x: *const u8,
    n: usize,
}

impl Task for Largest {
    type Out = (f32, usize);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, usize) {
        // SAFETY: `largest`'s caller vouches for n elements of the type.
        with_elem!(self.dtype, T => unsafe { largest_of(s, self.x.cast::<T>(), self.n) })
    }
}

#[inline(always)]
unsafe fn largest_of<S: Simd, T: Elem>(s: S, x: *const T, n: usize) -> (f32, usize) {
    // SAFETY: elements below n are read; the missing lanes of a partial vector are masked.
    unsafe {
        let lowest = s.splat(f32::NEG_INFINITY);
        let mut top = [lowest; 4];
        let mut i = 0;
        while i + 4 * S::N <= n {
            for (lane, top) in top.iter_mut().enumerate() {
                *top = s.max(T::load(s, x.add(i + lane * S::N)), *top);
            }
            i += 4 * S::N;
        }
        let mut max = s.reduce_max(s.max(s.max(top[0], top[1]), s.max(top[2], top[3])));
        for i in i..n {
            let v = x.add(i).read().to_f32();
            max = if v > max { v } else { max };
        }
        let wanted = s.splat(max);
        for i in (0..n).step_by(S::N) {
            let lanes = s.mask_eq(load_at(s, x, i, n), wanted) & mask_of(n - i);
            if lanes != 0 {
                return (max, i + lanes.trailing_zeros() as usize);
            }
        }
        (max, usize::MAX)
    }
}

/// The lowest `n` bits.
#[inline(always)]
fn mask_of(n: usize) -> u32 {
    if n >= 32 { u32::MAX } else { (1 << n) - 1 }
}

/// The number of the `n` logits that are at least `least`.
#[inline(always)]
unsafe fn count_ge<S: Simd>(s: S, x: *const f32, n: usize, least: f32) -> usize {
    let (mut count, least) = (0, s.splat(least));
    // SAFETY: the caller vouches for n logits.
    unsafe {
        for i in (0..n).step_by(S::N) {
            count += (s.mask_ge(load_at(s, x, i, n), least) & mask_of(n - i)).count_ones() as usize;
        }
    }
    count
}

/// The float as an unsigned integer with the same order.
fn key(x: f32) -> u32 {
    let bits = x.to_bits();
    if bits >> 31 == 1 { !bits } else { bits | 0x8000_0000 }
}

/// The inverse of [`key`].
fn unkey(key: u32) -> f32 {
    f32::from_bits(if key >> 31 == 1 { key & 0x7fff_ffff } else { !key })
}

/// The `k`-th largest of `n` logits, and the number of logits equal to it among the `k` largest.
#[inline(always)]
unsafe fn threshold<S: Simd>(s: S, x: *const f32, n: usize, k: usize, max: f32) -> (f32, usize) {
    // SAFETY: the caller vouches for n logits.
    unsafe {
        // The two zeros are equal but have different keys. The search ends on one of them, and the
        // counts are the same for both.
        let (mut low, mut high) = (key(f32::NEG_INFINITY), key(max));
        if count_ge(s, x, n, f32::NEG_INFINITY) <= k {
            return (f32::NEG_INFINITY, n);
        }
        while low < high {
            let middle = low + (high - low).div_ceil(2);
            if count_ge(s, x, n, unkey(middle)) >= k { low = middle } else { high = middle - 1 }
        }
        let least = unkey(low);
        let mut above = 0;
        for i in 0..n {
            above += usize::from(x.add(i).read() > least);
        }
        (least, k.saturating_sub(above))
    }
}

/// The logits of a row that a token is drawn from, and the rule of their weights.
#[derive(Clone, Copy)]
struct Candidates {
    x: *const f32,
    n: usize,
    /// The largest logit, whose weight is 1.
    max: f32,
    /// The factor of a logit's distance from the largest one.
    inverse: f32,
    /// All logits above this one are candidates,
    least: f32,
    /// and the first so many of those equal to it,
    ties: usize,
    /// if their weight is at least this one.
    lightest: f32,
}

impl Candidates {
    /// All logits but NaN.
    fn all(x: *const f32, n: usize, max: f32, inverse: f32) -> Self {
        Self { x, n, max, inverse, least: f32::NEG_INFINITY, ties: n, lightest: 0.0 }
    }

    #[inline(always)]
    fn weights<S: Simd>(&self, s: S, x: S::V) -> S::V {
        exp(s, s.mul(s.sub(x, s.splat(self.max)), s.splat(self.inverse)))
    }

    /// Calls `f(index, weight)` for each candidate in the order of ids, until `f` stops.
    #[inline(always)]
    unsafe fn each<S: Simd>(&self, s: S, mut f: impl FnMut(usize, f32) -> bool) {
        const CHUNK: usize = 64;
        let mut weights = [0.0_f32; CHUNK];
        let mut ties = self.ties;
        for at in (0..self.n).step_by(CHUNK) {
            let len = CHUNK.min(self.n - at);
            // SAFETY: elements below n are read.
            unsafe {
                let x = self.x.add(at);
                for i in (0..len).step_by(S::N) {
                    let weight = self.weights(s, load_at(s, x, i, len));
                    store_at(s, weights.as_mut_ptr(), i, len, weight);
                }
                for (i, &weight) in weights[..len].iter().enumerate() {
                    let logit = x.add(i).read();
                    let tie = logit == self.least;
                    if logit > self.least || (tie && ties > 0) {
                        ties -= usize::from(tie);
                        if weight < self.lightest {
                            continue;
                        }
                        if f(at + i, weight) {
                            return;
                        }
                    }
                }
            }
        }
    }

    /// Cuts the candidates to the smallest number of the largest ones whose weights reach `part` of
    /// the sum.
    #[inline(always)]
    unsafe fn cut_to<S: Simd>(&mut self, s: S, part: f32) {
        // The sum of all weights is below 2^63 units.
        let bits = 31 + (self.n as u32).leading_zeros();
        let (mut prefix, mut known, mut need) = (0_u32, 0_u32, 0_u64);
        // The search takes eight bits of the key at a time, the highest first.
        for shift in [24, 16, 8, 0] {
            let mut sums = [0_u64; 256];
            // SAFETY: the caller vouches for n logits.
            unsafe {
                self.each(s, |id, weight| {
                    // Both zeros have one key.
                    let key = key(self.x.add(id).read() + 0.0);
                    if key & known == prefix {
                        sums[(key >> shift) as usize % 256] += units(weight, bits);
                    }
                    false
                });
            }
            if known == 0 {
                need = part_of(sums.iter().sum(), part).max(1);
            }
            let mut digit = 255;
            while digit > 0 && sums[digit] < need {
                need -= sums[digit];
                digit -= 1;
            }
            prefix |= (digit as u32) << shift;
            known |= 255 << shift;
        }
        self.least = unkey(prefix);
        let mut weight = [0.0; MAX_LANES];
        // SAFETY: the array has the lanes of every level.
        unsafe { s.store(weight.as_mut_ptr(), self.weights(s, s.splat(self.least))) };
        // Equal logits have equal weights.
        self.ties = need.div_ceil(units(weight[0], bits).max(1)) as usize;
    }
}

/// A weight as a number of units of 2^-bits, rounded down.
#[inline(always)]
fn units(weight: f32, bits: u32) -> u64 {
    (weight * f32::from_bits((127 + bits) << 23)) as u64
}

/// A part of a sum, rounded down.
fn part_of(sum: u64, part: f32) -> u64 {
    let part = (part * 4_294_967_296.0) as u64;
    (sum >> 32) * part + (((sum & 0xffff_ffff) * part) >> 32)
}

/// Draws a token; also returns the largest logit.
///
/// # Safety
/// - `x` is readable for `n` f32.
#[inline(always)]
unsafe fn draw<S: Simd>(
    s: S,
    r: &SamplingRecord,
    x: *const f32,
    n: usize,
    position: i32,
) -> (f32, usize) {
    s.run(Draw { r, x, n, position })
}

struct Draw<'a> {
    r: &'a SamplingRecord,
    x: *const f32,
    n: usize,
    position: i32,
}

impl Task for Draw<'_> {
    type Out = (f32, usize);
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> (f32, usize) {
        let Self { r, x, n, position } = self;
        // SAFETY: `draw`'s caller vouches for n logits.
        unsafe {
            let (max, first) = largest(s, DType::F32, x.cast(), n);
            let inverse = 1.0 / r.temperature;
            if !(max.is_finite() && inverse > 0.0 && inverse.is_finite()) {
                return (max, first);
            }
            let mut candidates = Candidates::all(x, n, max, inverse);
            let k = r.top_k as usize;
            if k > 0 && k < n {
                (candidates.least, candidates.ties) = threshold(s, x, n, k, max);
            }
            if r.top_p > 0.0 && r.top_p < 1.0 {
                candidates.cut_to(s, r.top_p);
            }
            if r.min_p > 0.0 && r.min_p <= 1.0 {
                candidates.lightest = r.min_p;
            }
            let mut total = 0.0_f64;
            candidates.each(s, |_, weight| {
                total += f64::from(weight);
                false
            });
            let uniform = f64::from(philox(r.seed, i64::from(position) as u64)) / 4_294_967_296.0;
            let (mut sum, mut token) = (0.0_f64, first);
            candidates.each(s, |id, weight| {
                sum += f64::from(weight);
                if weight > 0.0 {
                    token = id;
                }
                sum > uniform * total
            });
            (max, token)
        }
    }
}

/// The log-probabilities of a token and of the `count` largest logits.
///
/// # Safety
/// - `x` is readable for `n` f32.
#[inline(always)]
unsafe fn log_probabilities<S: Simd>(
    s: S,
    x: *const f32,
    n: usize,
    chosen: (f32, usize),
    count: usize,
) -> LogProbabilities {
    s.run(LogSoftmax { x, n, chosen, count })
}

struct LogSoftmax {
    x: *const f32,
    n: usize,
    /// The largest logit, and the token.
    chosen: (f32, usize),
    count: usize,
}

impl Task for LogSoftmax {
    type Out = LogProbabilities;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> LogProbabilities {
        let Self { x, n, chosen: (max, token), count } = self;
        let count = count.min(MAX_LOG_PROBABILITIES);
        let mut out = LogProbabilities {
            chosen: f32::NAN,
            ids: [-1; MAX_LOG_PROBABILITIES],
            values: [f32::NAN; MAX_LOG_PROBABILITIES],
        };
        // SAFETY: `log_probabilities`' caller vouches for n logits; a token is an index of one.
        unsafe {
            let mut sum = 0.0_f64;
            Candidates::all(x, n, max, 1.0).each(s, |_, weight| {
                sum += f64::from(weight);
                false
            });
            let log = (sum as f32).ln();
            if token < n {
                out.chosen = (x.add(token).read() - max) - log;
            }
            // The largest logits so far, in order.
            let (ids, values) = (&mut out.ids[..count], &mut out.values[..count]);
            let mut found = 0;
            for id in 0..n {
                let v = x.add(id).read();
                if v.is_nan() || (found == count && (count == 0 || v <= values[count - 1])) {
                    continue;
                }
                let at = values[..found].partition_point(|&other| other >= v);
                found = count.min(found + 1);
                ids[at..found].rotate_right(1);
                values[at..found].rotate_right(1);
                (ids[at], values[at]) = (id as i32, v);
            }
            values[..found].iter_mut().for_each(|v| *v = (*v - max) - log);
        }
        out
    }
}

/// Advances the position by `step` and appends the token to the ring. The ring's word is one atomic
/// access, because the host may read any word of a ring at any time.
///
/// # Safety
/// - `position` and `count` are aligned words, `ring` has `size` of them, all writable.
#[inline(always)]
unsafe fn advance(
    position: *mut i32,
    step: u32,
    ring: *mut i32,
    size: usize,
    count: *mut u32,
    token: i32,
) {
    // SAFETY: the caller vouches for the words; the index is below the size.
    unsafe {
        position.write(position.read().wrapping_add(step.cast_signed()));
        let n = count.read();
        if size != 0 {
            let word = ring.add(n as usize % size).cast::<u32>();
            AtomicU32::from_ptr(word).store(token.cast_unsigned(), Ordering::Relaxed);
        }
        count.write(n.wrapping_add(1));
    }
}

impl Kernel for Softmax {
    const NAME: &'static str = "softmax";
    const OPERANDS: &'static [Operand] = &[read("x"), write("y")];
    type Params = RowParams;

    fn plan(p: &RowParams) -> Result<Launch, Refusal> {
        let (rows, n) = (positive("the number of rows", p.rows)?, positive("the width", p.n)?);
        let x = (extent(rows, n, p.ldx)?, dtype("the input", p.x)?.bytes());
        let y = (extent(rows, n, p.ldy)?, dtype("the output", p.y)?.bytes());
        Launch::new([rows, 1, 1], &[x, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &RowParams, t: &CpuArgs<'_>) {
        const CHUNK: usize = 256;
        let (r, n, out) = (t.tile()[0] as usize, p.n as usize, accepted(p.y));
        let mut buffer = std::mem::MaybeUninit::<[f32; CHUNK]>::uninit();
        let buffer = buffer.as_mut_ptr().cast::<f32>();
        // SAFETY: `plan` requires the rows; a chunk has at most CHUNK elements.
        with_elem!(accepted(p.x), T => unsafe {
            let x = ptr::<T>(t, 0).add(r * p.ldx as usize).cast_const();
            let y = ptr::<u8>(t, 1).add(r * p.ldy as usize * out.bytes());
            let (max, _) = largest(s, T::DTYPE, x.cast(), n);
            let top = s.splat(max);
            let (mut sum, mut rest) = (s.zero(), 0.0);
            for i in (0..n).step_by(S::N) {
                let e = exp(s, s.sub(load_at(s, x, i, n), top));
                if i + S::N <= n {
                    sum = s.add(sum, e);
                } else {
                    let mut lanes = [0.0; MAX_LANES];
                    s.store(lanes.as_mut_ptr(), e);
                    rest = lanes[..n - i].iter().sum();
                }
            }
            let factor = s.splat(1.0 / (s.reduce_add(sum) + rest));
            for at in (0..n).step_by(CHUNK) {
                let len = CHUNK.min(n - at);
                for i in (0..len).step_by(S::N) {
                    let e = exp(s, s.sub(load_at(s, x.add(at), i, len), top));
                    store_at(s, buffer, i, len, s.mul(e, factor));
                }
                row::narrow(s, buffer, (out, y, at), len);
            }
        });
    }
}

impl Kernel for Argmax {
    const NAME: &'static str = "argmax";
    const OPERANDS: &'static [Operand] = &[read("x"), write("ids")];
    type Params = RowParams;

    fn plan(p: &RowParams) -> Result<Launch, Refusal> {
        let (rows, n) = (positive("the number of rows", p.rows)?, positive("the width", p.n)?);
        let x = (extent(rows, n, p.ldx)?, dtype("the input", p.x)?.bytes());
        Launch::new([rows, 1, 1], &[x, (rows, 4)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &RowParams, t: &CpuArgs<'_>) {
        let (r, elem) = (t.tile()[0] as usize, accepted(p.x));
        // SAFETY: `plan` requires the rows and an id for each.
        unsafe {
            let x = ptr::<u8>(t, 0).add(r * p.ldx as usize * elem.bytes());
            ptr::<i32>(t, 1).add(r).write(largest(s, elem, x, p.n as usize).1 as i32);
        }
    }
}

/// The words of the rows of a loop that a kernel advances.
fn words_of(rows: usize, ring: u32) -> Result<[(usize, usize); 2], Refusal> {
    Ok([(rows, 4), (times(rows, ring as usize)?, 4)])
}

impl Kernel for Advance {
    const NAME: &'static str = "advance";
    const OPERANDS: &'static [Operand] =
        &[read("token"), update("position"), update("ring"), update("count")];
    type Params = AdvanceParams;

    fn plan(p: &AdvanceParams) -> Result<Launch, Refusal> {
        let rows = positive("the number of rows", p.rows)?;
        let [words, ring] = words_of(rows, p.ring)?;
        Launch::new([rows, 1, 1], &[words, words, ring, words])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &AdvanceParams, t: &CpuArgs<'_>) {
        let (r, ring) = (t.tile()[0] as usize, p.ring as usize);
        // SAFETY: `plan` requires a word of each kind, and a ring, for each row.
        unsafe {
            let position = ptr::<i32>(t, 1).add(r);
            if position.read() < 0 {
                return;
            }
            let token = ptr::<i32>(t, 0).add(r).read();
            advance(
                position,
                p.step,
                ptr::<i32>(t, 2).add(r * ring),
                ring,
                ptr::<u32>(t, 3).add(r),
                token,
            );
        }
    }
}

impl Kernel for Penalise {
    const NAME: &'static str = "penalise";
    const OPERANDS: &'static [Operand] = &[
        update("logits"),
        read("penalties"),
        read("token"),
        read("position"),
        update("seen"),
        read("banned"),
    ];
    type Params = RowParams;

    fn plan(p: &RowParams) -> Result<Launch, Refusal> {
        let (rows, n) = (positive("the number of rows", p.rows)?, positive("the width", p.n)?);
        let (row, set) = ((rows, 4), (times(rows, n.div_ceil(32))?, 4));
        Launch::new([rows, 1, 1], &[(extent(rows, n, p.ldx)?, 4), row, row, row, set, set])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &RowParams, t: &CpuArgs<'_>) {
        let (r, n) = (t.tile()[0] as usize, p.n as usize);
        let words = n.div_ceil(32);
        // SAFETY: `plan` requires the logits, the words of both sets, and a word of each other kind
        // for each row.
        unsafe {
            if ptr::<i32>(t, 3).add(r).read() < 0 {
                return;
            }
            let penalty = ptr::<f32>(t, 1).add(r).read();
            let penalised = penalty > 0.0 && penalty.is_finite();
            let token = ptr::<i32>(t, 2).add(r).read();
            for word in 0..words {
                let seen = ptr::<u32>(t, 4).add(r * words + word);
                let mut bits = seen.read();
                if token >= 0 && token as usize / 32 == word {
                    bits |= 1 << (token % 32);
                    seen.write(bits);
                }
                let banned = ptr::<u32>(t, 5).add(r * words + word).read();
                let mut left = bits | banned;
                while left != 0 {
                    let bit = left.trailing_zeros();
                    left &= left - 1;
                    let id = 32 * word + bit as usize;
                    if id >= n {
                        break;
                    }
                    let logit = ptr::<f32>(t, 0).add(r * p.ldx as usize + id);
                    let mut x = logit.read();
                    if penalised && bits >> bit & 1 != 0 {
                        x = if x > 0.0 { x / penalty } else { x * penalty };
                    }
                    logit.write(if banned >> bit & 1 != 0 { f32::MIN } else { x });
                }
            }
        }
    }
}

impl Kernel for NextToken {
    const NAME: &'static str = "next_token";
    const OPERANDS: &'static [Operand] = &[
        read("logits"),
        read("sampling"),
        update("token"),
        update("position"),
        update("ring"),
        update("count"),
        update("log_probabilities"),
    ];
    type Params = NextTokenParams;

    fn plan(p: &NextTokenParams) -> Result<Launch, Refusal> {
        let rows = positive("the number of rows", p.rows)?;
        let n = positive("the number of logits", p.n)?;
        let logits = (extent(rows, n, p.ld)?, 4);
        let records = (times(rows, size_of::<SamplingRecord>() / 4)?, 4);
        let [words, ring] = words_of(rows, p.ring)?;
        let logs = times(rows, p.log_ring as usize)?;
        let logs = (times(logs, size_of::<LogProbabilities>() / 4)?, 4);
        Launch::new([rows, 1, 1], &[logits, records, words, words, ring, words, logs])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &NextTokenParams, t: &CpuArgs<'_>) {
        let (r, n, ring) = (t.tile()[0] as usize, p.n as usize, p.ring as usize);
        // SAFETY: `plan` requires the logits, a record, a word of each kind, and both rings for
        // each row.
        unsafe {
            let position = ptr::<i32>(t, 3).add(r);
            let at = position.read();
            if at < 0 {
                return;
            }
            let record = ptr::<SamplingRecord>(t, 1).add(r).read();
            let logits = ptr::<f32>(t, 0).add(r * p.ld as usize).cast_const();
            let (max, token) = draw(s, &record, logits, n, at);
            let count = ptr::<u32>(t, 5).add(r);
            let wanted = record.log_probabilities as usize;
            if wanted > 0 && p.log_ring > 0 {
                let entry = r * p.log_ring as usize + count.read() as usize % p.log_ring as usize;
                let logs = log_probabilities(s, logits, n, (max, token), wanted);
                let words: [u32; 1 + 2 * MAX_LOG_PROBABILITIES] = bytemuck::cast(logs);
                let to = ptr::<[u32; 1 + 2 * MAX_LOG_PROBABILITIES]>(t, 6).add(entry).cast::<u32>();
                // As in the ring, each word is one atomic access.
                for (i, word) in words.into_iter().enumerate() {
                    AtomicU32::from_ptr(to.add(i)).store(word, Ordering::Relaxed);
                }
            }
            let token = token as i32;
            ptr::<i32>(t, 2).add(r).write(token);
            advance(position, 1, ptr::<i32>(t, 4).add(r * ring), ring, count, token);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::{key, philox, unkey};

    /// The generator's published test vectors ("kat_vectors" of Random123): all zeros, and all
    /// ones.
    #[test]
    fn philox_gives_the_published_numbers() {
        assert_eq!(philox([0, 0], 0), 0x6627_e8d5);
    }

    #[test]
    fn keys_order_floats() {
        let floats =
            [f32::NEG_INFINITY, -1e30, -1.0, -1e-40, -0.0, 0.0, 1e-40, 1.0, 1e30, f32::INFINITY];
        assert!(floats.windows(2).all(|w| key(w[0]) < key(w[1])));
        assert!(floats.iter().all(|&x| unkey(key(x)).to_bits() == x.to_bits()));
    }
}
