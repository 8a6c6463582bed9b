//! Sampling kernels, from logits to the next token: softmax, argmax, sampling, and the step that
//! closes the loop on the device.
//!
//! Random numbers are counter-based: Philox4x32 with ten rounds (Salmon et al., "Parallel Random
//! Numbers: As Easy as 1, 2, 3", 2011), with the seed as key and the position as counter. So a
//! token depends on (logits, seed, position) alone. A replayed graph draws a new number at every
//! position without a change of parameters.
//!
//! A NaN is not a candidate. If all logits are NaN, the result is −1, which is not a token.

use leasehold::backend::sync::atomic::{AtomicU32, Ordering};
use leasehold_hal::kernel::CpuArgs;

use super::elem::{DType, Elem, load_at, store_at, with_elem};
use super::math::exp;
use super::rope::extent;
use super::row;
use super::simd::{MAX_LANES, Simd, Task};
use super::tile::{
    Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, update, write,
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

params! {
    /// Parameters of [`Sample`] and [`NextToken`].
    pub struct SampleParams {
        /// Logits, f32.
        pub n: u32,
        /// The number of largest logits that are candidates; 0 for all. Of equal logits the first
        /// ones are.
        pub top_k: u32,
        /// The divisor of the logits; 0 selects the largest logit, the first of equal ones, without
        /// a random number.
        pub temperature: f32,
        /// The seed: low word, high word.
        pub seed: [u32; 2],
        /// Capacity of the ring in ids ([`NextToken`] only).
        pub ring: u32,
    }
}

params! {
    /// Parameters of [`Advance`].
    pub struct AdvanceParams {
        /// The increment of the position.
        pub step: u32,
        /// Capacity of the ring in ids.
        pub ring: u32,
    }
}

/// `y = exp(x − max x) / Σ exp(x − max x)`, row by row. A row with a NaN or +∞, or of −∞
/// only, is all NaN.
pub struct Softmax;
/// The index of the largest element of each row, as i32. Of equal elements the first; −1 if all
/// are NaN.
pub struct Argmax;
/// Draws a token from the logits at a temperature, among the `top_k` largest; −1 if all are NaN.
pub struct Sample;
/// `position += step`; the token goes to `ring[count mod size]`; `count += 1`.
pub struct Advance;
/// [`Sample`] and [`Advance`] by one, in one kernel. This is the end of a decode step.
pub struct NextToken;

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

/// Calls `f(index, weight)` for each candidate in the order of ids, until `f` stops.
#[inline(always)]
unsafe fn candidates<S: Simd>(
    s: S,
    x: *const f32,
    n: usize,
    (max, least, mut ties): (f32, f32, usize),
    temperature: f32,
    mut f: impl FnMut(usize, f32) -> bool,
) {
    const CHUNK: usize = 64;
    let mut weights = [0.0_f32; CHUNK];
    let inverse = s.splat(1.0 / temperature);
    for at in (0..n).step_by(CHUNK) {
        let len = CHUNK.min(n - at);
        // SAFETY: elements below n are read.
        unsafe {
            let x = x.add(at);
            for i in (0..len).step_by(S::N) {
                let v = s.mul(s.sub(load_at(s, x, i, len), s.splat(max)), inverse);
                store_at(s, weights.as_mut_ptr(), i, len, exp(s, v));
            }
            for (i, &weight) in weights[..len].iter().enumerate() {
                let logit = x.add(i).read();
                let tie = logit == least;
                if logit > least || (tie && ties > 0) {
                    ties -= usize::from(tie);
                    if f(at + i, weight) {
                        return;
                    }
                }
            }
        }
    }
}

/// Draws a token.
///
/// # Safety
/// - `x` is readable for `p.n` f32.
#[inline(always)]
unsafe fn draw<S: Simd>(s: S, p: &SampleParams, x: *const f32, position: i32) -> usize {
    s.run(Draw { p, x, position })
}

struct Draw<'a> {
    p: &'a SampleParams,
    x: *const f32,
    position: i32,
}

impl Task for Draw<'_> {
    type Out = usize;
    #[inline(always)]
    fn run<S: Simd>(self, s: S) -> usize {
        let Self { p, x, position } = self;
        let n = p.n as usize;
        // SAFETY: `draw`'s caller vouches for n logits.
        unsafe {
            let (max, first) = largest(s, DType::F32, x.cast(), n);
            if p.temperature == 0.0 || !max.is_finite() {
                return first;
            }
            let k = if p.top_k == 0 { n } else { p.top_k as usize };
            let (least, ties) =
                if k < n { threshold(s, x, n, k, max) } else { (f32::NEG_INFINITY, n) };
            let mut total = 0.0_f64;
            candidates(s, x, n, (max, least, ties), p.temperature, |_, weight| {
                total += f64::from(weight);
                false
            });
            let uniform = f64::from(philox(p.seed, i64::from(position) as u64)) / 4_294_967_296.0;
            let (mut sum, mut token) = (0.0_f64, first);
            candidates(s, x, n, (max, least, ties), p.temperature, |id, weight| {
                sum += f64::from(weight);
                if weight > 0.0 {
                    token = id;
                }
                sum > uniform * total
            });
            token
        }
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

/// Checks the parameters that [`Sample`] and [`NextToken`] share; returns the number of logits.
fn sample_shape(p: &SampleParams) -> Result<usize, Refusal> {
    if !(p.temperature >= 0.0 && p.temperature.is_finite()) {
        return Err(
            format!("a temperature of {} is not a number from zero up", p.temperature).into()
        );
    }
    positive("the number of logits", p.n)
}

impl Kernel for Sample {
    const NAME: &'static str = "sample";
    const OPERANDS: &'static [Operand] = &[read("logits"), read("position"), write("token")];
    type Params = SampleParams;

    fn plan(p: &SampleParams) -> Result<Launch, Refusal> {
        Launch::new([1, 1, 1], &[(sample_shape(p)?, 4), (1, 4), (1, 4)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &SampleParams, t: &CpuArgs<'_>) {
        // SAFETY: `plan` requires the logits and the two words.
        unsafe { ptr::<i32>(t, 2).write(draw(s, p, ptr(t, 0), ptr::<i32>(t, 1).read()) as i32) }
    }
}

impl Kernel for Advance {
    const NAME: &'static str = "advance";
    const OPERANDS: &'static [Operand] =
        &[read("token"), update("position"), update("ring"), update("count")];
    type Params = AdvanceParams;

    fn plan(p: &AdvanceParams) -> Result<Launch, Refusal> {
        Launch::new([1, 1, 1], &[(1, 4), (1, 4), (p.ring as usize, 4), (1, 4)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &AdvanceParams, t: &CpuArgs<'_>) {
        // SAFETY: `plan` requires the words and the ring.
        unsafe {
            advance(
                ptr(t, 1),
                p.step,
                ptr(t, 2),
                p.ring as usize,
                ptr(t, 3),
                ptr::<i32>(t, 0).read(),
            )
        }
    }
}

impl Kernel for NextToken {
    const NAME: &'static str = "next_token";
    const OPERANDS: &'static [Operand] =
        &[read("logits"), write("token"), update("position"), update("ring"), update("count")];
    type Params = SampleParams;

    fn plan(p: &SampleParams) -> Result<Launch, Refusal> {
        Launch::new(
            [1, 1, 1],
            &[(sample_shape(p)?, 4), (1, 4), (1, 4), (p.ring as usize, 4), (1, 4)],
        )
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &SampleParams, t: &CpuArgs<'_>) {
        // SAFETY: `plan` requires the logits, the words and the ring.
        unsafe {
            let token = draw(s, p, ptr(t, 0), ptr::<i32>(t, 2).read()) as i32;
            ptr::<i32>(t, 1).write(token);
            advance(ptr(t, 2), 1, ptr(t, 3), p.ring as usize, ptr(t, 4), token);
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
