//! One row of activations over many rows of weights that come from memory: a [`Stream`] reads the
//! weights in the order of their addresses, which processors prefetch best. Its loop does nothing
//! beside the products: the activations are brought into the order of the weights once
//! ([`arrange`]). Each sum has the order of a [`Panel`](super::dot::Panel) of one row, so that both
//! give the same bits.

use super::elem::{DType, Elem, load_part};
use super::isa::follows_streams;
use super::simd::{Simd, Task};

/// The prefetch distance of a weight in bytes, where the program prefetches.
const AHEAD: usize = 4096;
/// Steps of the loop that stand in its body.
const UNROLL: usize = 8;

/// Whether the level reads weights of the type in its pair order.
#[inline(always)]
fn paired<S: Simd>(weights: DType) -> bool {
    S::PAIRED && weights == DType::Bf16
}

/// Brings `k` activations into the order in which the level reads weights of the type.
///
/// # Safety
/// - `x` is readable and writable for `k` elements.
#[inline(always)]
pub unsafe fn arrange<S: Simd>(s: S, weights: DType, x: *mut f32, k: usize) {
    if paired::<S>(weights) {
        s.run(Arrange { x, k });
    }
}

struct Arrange {
    x: *mut f32,
    k: usize,
}

impl Task for Arrange {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let n = S::N;
        let mut i = 0;
        while i + 2 * n <= self.k {
            // SAFETY: `arrange`'s caller vouches for k elements; the two vectors are among them.
            unsafe {
                let p = self.x.add(i);
                let [first, second] = s.pair_bf16([s.load(p), s.load(p.add(n))]);
                s.store(p, first);
                s.store(p.add(n), second);
            }
            i += 2 * n;
        }
    }
}

/// `out[r] = Σ_k w[r][k] · x[k]`, in f32.
#[derive(Debug, Clone, Copy)]
pub struct Stream<W> {
    w: *const W,
    rows: usize,
    x: *const f32,
    k: usize,
    out: *mut f32,
}

impl<W: Elem> Stream<W> {
    /// `rows` rows of `k` weights each from `w`, over the row `x`, which [`arrange`] has ordered.
    ///
    /// # Safety
    /// - The weights and the row are readable, `out` is writable for `rows` elements until the
    ///   stream has run.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(
        (w, rows): (*const W, usize),
        (x, k): (*const f32, usize),
        out: *mut f32,
    ) -> Self {
        Self { w, rows, x, k, out }
    }

    /// The sums of row `r`, lane by lane.
    #[inline(always)]
    unsafe fn sums<S: Simd, const PREFETCH: bool>(&self, s: S, r: usize) -> S::V {
        let n = S::N;
        let (mut even, mut odd) = (s.zero(), s.zero());
        // SAFETY: at most i + 2 N, i + N or k elements of the row are read. A prefetch may use any
        // address.
        unsafe {
            let w = self.w.add(r * self.k);
            // Few instructions for a line of weights: the more lines a core has in its window, the
            // more it asks memory for at once.
            let (mut p, mut x) = (w, self.x);
            let whole = self.k / (2 * n * UNROLL) * UNROLL;
            for _ in 0..whole / UNROLL {
                for j in 0..UNROLL {
                    let p = p.add(2 * n * j);
                    if PREFETCH {
                        s.prefetch(p.cast::<u8>().wrapping_add(AHEAD));
                    }
                    let [a, b] = W::load_pair(s, p);
                    even = s.fma(a, s.load(x.add(2 * n * j)), even);
                    odd = s.fma(b, s.load(x.add(2 * n * j + n)), odd);
                }
                p = p.add(2 * n * UNROLL);
                x = x.add(2 * n * UNROLL);
            }
            let mut i = whole * 2 * n;
            while i + 2 * n <= self.k {
                let [a, b] = W::load_pair(s, w.add(i));
                even = s.fma(a, s.load(self.x.add(i)), even);
                odd = s.fma(b, s.load(self.x.add(i + n)), odd);
                i += 2 * n;
            }
            if i + n <= self.k {
                even = s.fma(W::load(s, w.add(i)), s.load(self.x.add(i)), even);
                i += n;
            }
            if i < self.k {
                let left = self.k - i;
                odd = s.fma(load_part(s, w.add(i), left), load_part(s, self.x.add(i), left), odd);
            }
        }
        s.add(even, odd)
    }

    #[inline(always)]
    unsafe fn all<S: Simd, const PREFETCH: bool>(&self, s: S) {
        // SAFETY: all rows are within the operands.
        unsafe {
            for r in 0..self.rows {
                self.out.add(r).write(s.reduce_add(self.sums::<S, PREFETCH>(s, r)));
            }
        }
    }
}

impl<W: Elem> Task for Stream<W> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        // SAFETY: `new`'s caller vouches for the memory.
        unsafe { if follows_streams() { self.all::<S, false>(s) } else { self.all::<S, true>(s) } }
    }
}
