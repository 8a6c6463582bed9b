//! The inner product that the other kernels use: rows of weights times rows of activations.
//!
//! Both operands are contiguous along the summed dimension, so no operand is packed or transposed.
//! Four rows of weights and up to [`Simd::GEMM_M`] rows of activations stay in registers. With one
//! row of activations, each row of weights has two accumulators; with more rows it has one. The
//! order of a sum depends only on the level, on `k`, and on the number of rows of activations that
//! are computed together (`Panel::m`).
//!
//! A panel takes four rows of weights side by side, which share the loads of the activations. A
//! [`Stream`](super::stream::Stream) takes them one after another. Both make each sum of one row of
//! activations in the same order, so the results are equal to the bit.

use half::bf16;

use super::dots::Dots;
use super::elem::{DType, Elem, load_part};
#[cfg(target_arch = "x86_64")]
use super::isa::Isa;
use super::simd::{MAX_LANES, Simd, Task};

/// Rows of weights that are computed together.
const R: usize = 4;
/// The maximum number of rows of activations beside 16-bit weights. More rows would leave too few
/// registers for the conversion.
const NARROW_M: usize = 4;
/// The prefetch distance of a weight in bytes: half a page keeps a core's fill buffers busy.
const AHEAD: usize = 2048;

/// `N` products for each pair of rows, added to one of the two sets of accumulators. A macro,
/// because a closure might not be inlined.
macro_rules! step {
    ($s:expr, $acc:ident, $set:expr, $w:ident, $m:ident => $x:expr) => {
        for $m in 0..M {
            let x = $x;
            for r in 0..B {
                $acc[$set][$m][r] = $s.fma($w[r], x, $acc[$set][$m][r]);
            }
        }
    };
}

/// `out[m][r] (+)= Σ_k w[r][k] · x[m][k]`, in f32.
#[derive(Debug, Clone, Copy)]
pub struct Panel<W> {
    w: *const W,
    ldw: usize,
    rows: usize,
    x: *const f32,
    ldx: usize,
    m: usize,
    k: usize,
    out: *mut f32,
    ldo: usize,
    accumulate: bool,
}

impl<W: Elem> Panel<W> {
    /// A panel of `rows` rows of `k` weights, `ldw` elements apart, from `w`, over `m` rows of `x`,
    /// `ldx` apart. Row `m` of the result starts at `out + m * ldo`. With `accumulate` the sums are
    /// added to the present contents.
    ///
    /// # Safety
    /// - The rows described are readable, `out` is writable (and initialised with `accumulate`)
    ///   until the panel has run.
    #[inline(always)]
    #[must_use]
    pub unsafe fn new(
        (w, ldw, rows): (*const W, usize, usize),
        (x, ldx, m): (*const f32, usize, usize),
        k: usize,
        (out, ldo): (*mut f32, usize),
        accumulate: bool,
    ) -> Self {
        Self { w, ldw, rows, x, ldx, m, k, out, ldo, accumulate }
    }

    /// All weights over `M` rows of activations from `m0` on.
    #[inline(always)]
    unsafe fn columns<S: Simd, const M: usize>(&self, s: S, m0: usize) {
        let whole = self.rows - self.rows % R;
        // SAFETY: all rows are within the panel.
        unsafe {
            for r in (0..whole).step_by(R) {
                self.block::<S, R, M>(s, r, m0);
            }
            for r in whole..self.rows {
                self.block::<S, 1, M>(s, r, m0);
            }
        }
    }

    /// `B` rows of weights over `M` rows of activations.
    #[inline(always)]
    unsafe fn block<S: Simd, const B: usize, const M: usize>(&self, s: S, r0: usize, m0: usize) {
        // SAFETY: the rows are within the panel, and the elements of the result too.
        unsafe {
            let sums = self.sums::<S, B, M>(s, r0, m0);
            for m in 0..M {
                let out = self.out.add((m0 + m) * self.ldo + r0);
                let sums = sums[m];
                if B == R {
                    let quad = s.reduce_add4([sums[0], sums[1 % B], sums[2 % B], sums[3 % B]]);
                    for r in 0..B {
                        self.put(out.add(r), quad[r]);
                    }
                } else {
                    for r in 0..B {
                        self.put(out.add(r), s.reduce_add(sums[r]));
                    }
                }
            }
        }
    }

    /// The sums of `B` rows of weights side by side, lane by lane.
    #[inline(always)]
    unsafe fn sums<S: Simd, const B: usize, const M: usize>(
        &self,
        s: S,
        r0: usize,
        m0: usize,
    ) -> [[S::V; B]; M] {
        // Only a single row of activations uses the second set: its chains would be too few to hide
        // the latency.
        let odd = usize::from(M == 1);
        let paired = S::PAIRED && matches!(W::DTYPE, DType::Bf16);
        let mut acc = [[[s.zero(); B]; M]; 2];
        let n = S::N;
        let mut i = 0;
        // SAFETY: at most i + 2 N, i + N or k elements of each row are read, which the panel's rows
        // have. A prefetch may use any address.
        unsafe {
            let w = self.w.add(r0 * self.ldw);
            let x = self.x.add(m0 * self.ldx);
            while i + 2 * n <= self.k {
                if M <= NARROW_M {
                    for r in 0..B {
                        s.prefetch(w.add(r * self.ldw + i).cast::<u8>().wrapping_add(AHEAD));
                    }
                }
                if paired {
                    let mut even = [s.zero(); B];
                    let mut uneven = [s.zero(); B];
                    for r in 0..B {
                        [even[r], uneven[r]] = W::load_pair(s, w.add(r * self.ldw + i));
                    }
                    for m in 0..M {
                        let p = x.add(m * self.ldx + i);
                        let pair = W::pair(s, [s.load(p), s.load(p.add(n))]);
                        for r in 0..B {
                            acc[0][m][r] = s.fma(even[r], pair[0], acc[0][m][r]);
                            acc[odd][m][r] = s.fma(uneven[r], pair[1], acc[odd][m][r]);
                        }
                    }
                } else {
                    for (half, set) in [(0, 0), (n, odd)] {
                        let mut rows = [s.zero(); B];
                        for r in 0..B {
                            rows[r] = W::load(s, w.add(r * self.ldw + i + half));
                        }
                        step!(s, acc, set, rows, m => s.load(x.add(m * self.ldx + i + half)));
                    }
                }
                i += 2 * n;
            }
            if i + n <= self.k {
                let mut rows = [s.zero(); B];
                for r in 0..B {
                    rows[r] = W::load(s, w.add(r * self.ldw + i));
                }
                step!(s, acc, 0, rows, m => s.load(x.add(m * self.ldx + i)));
                i += n;
            }
            if i < self.k {
                let mut rows = [s.zero(); B];
                for r in 0..B {
                    rows[r] = load_part(s, w.add(r * self.ldw + i), self.k - i);
                }
                step!(s, acc, odd, rows, m => load_part(s, x.add(m * self.ldx + i), self.k - i));
            }
        }
        let [mut sums, second] = acc;
        if odd == 1 {
            for m in 0..M {
                for r in 0..B {
                    sums[m][r] = s.add(sums[m][r], second[m][r]);
                }
            }
        }
        sums
    }

    #[inline(always)]
    unsafe fn put(&self, out: *mut f32, sum: f32) {
        // SAFETY: `out` is an element of the result.
        unsafe { out.write(if self.accumulate { out.read() + sum } else { sum }) }
    }
}

impl<W: Elem> Task for Panel<W> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let wide = matches!(W::DTYPE, DType::F32);
        let most = if wide { S::GEMM_M } else { S::GEMM_M.min(NARROW_M) };
        let mut m = 0;
        // SAFETY: `new`'s caller vouches for the memory; m plus the columns computed is at most
        // self.m.
        unsafe {
            while m < self.m {
                let columns = (self.m - m).min(most);
                match columns {
                    1 => self.columns::<S, 1>(s, m),
                    2 => self.columns::<S, 2>(s, m),
                    3 => self.columns::<S, 3>(s, m),
                    5 if wide => self.columns::<S, 5>(s, m),
                    6 if wide => self.columns::<S, 6>(s, m),
                    _ => self.columns::<S, 4>(s, m),
                }
                m += columns;
            }
        }
    }
}

impl Dots {
    /// All weights over `M` rows of activations from `m0` on.
    #[inline(always)]
    unsafe fn columns<S: Simd, const M: usize>(&self, s: S, m0: usize) {
        let whole = self.rows - self.rows % R;
        // SAFETY: all rows are within the operands.
        unsafe {
            for r in (0..whole).step_by(R) {
                self.block::<S, R, M>(s, r, m0);
            }
            for r in whole..self.rows {
                self.block::<S, 1, M>(s, r, m0);
            }
        }
    }

    /// `B` rows of weights over `M` rows of activations.
    #[inline(always)]
    unsafe fn block<S: Simd, const B: usize, const M: usize>(&self, s: S, r0: usize, m0: usize) {
        let mut acc = [[s.zero(); B]; M];
        let step = 2 * S::N;
        // SAFETY: the operands have the rows, and at most i + 2 N or k elements of each are read. A
        // vector of f32 has the bits of 2 N words.
        unsafe {
            let w = self.w.add(r0 * self.ldw);
            let x = self.x.add(m0 * self.ldx);
            let mut i = 0;
            while i + step <= self.k {
                let mut rows = [s.zero(); B];
                for r in 0..B {
                    rows[r] = s.load(w.add(r * self.ldw + i).cast());
                }
                for m in 0..M {
                    let x = s.load(x.add(m * self.ldx + i).cast());
                    for r in 0..B {
                        acc[m][r] = s.dot_bf16(rows[r], x, acc[m][r]);
                    }
                }
                i += step;
            }
            if i < self.k {
                let mut rows = [s.zero(); B];
                for r in 0..B {
                    rows[r] = words_part(s, w.add(r * self.ldw + i), self.k - i);
                }
                for m in 0..M {
                    let x = words_part(s, x.add(m * self.ldx + i), self.k - i);
                    for r in 0..B {
                        acc[m][r] = s.dot_bf16(rows[r], x, acc[m][r]);
                    }
                }
            }
            for m in 0..M {
                let out = self.out.add((m0 + m) * self.ldo + r0);
                if B == R {
                    let sums = [acc[m][0], acc[m][1 % B], acc[m][2 % B], acc[m][3 % B]];
                    out.cast::<[f32; R]>().write_unaligned(s.reduce_add4(sums));
                } else {
                    out.write(s.reduce_add(acc[m][0]));
                }
            }
        }
    }
}

/// The first `n < 2 N` words as the bits of a vector, the others zero.
#[inline(always)]
pub(super) unsafe fn words_part<S: Simd>(s: S, p: *const bf16, n: usize) -> S::V {
    let mut words = [bf16::ZERO; 2 * MAX_LANES];
    // SAFETY: the caller vouches for n words. The copy holds the bits of any vector.
    unsafe {
        for i in 0..n {
            words[i] = p.add(i).read();
        }
        s.load(words.as_ptr().cast())
    }
}

impl Task for Dots {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        #[cfg(target_arch = "x86_64")]
        if S::ISA == Isa::Amx {
            // SAFETY: `new`'s caller vouches for the memory. A value of the level's type exists
            // only where the level is available, and `run` is compiled for it.
            return unsafe { super::amx::multiply(&self) };
        }
        let mut m = 0;
        // SAFETY: `new`'s caller vouches for the memory; m plus the columns computed is at most
        // self.m.
        unsafe {
            while m < self.m {
                let columns = (self.m - m).min(S::GEMM_M);
                match columns {
                    1 => self.columns::<S, 1>(s, m),
                    2 => self.columns::<S, 2>(s, m),
                    3 => self.columns::<S, 3>(s, m),
                    4 => self.columns::<S, 4>(s, m),
                    5 => self.columns::<S, 5>(s, m),
                    _ => self.columns::<S, 6>(s, m),
                }
                m += columns;
            }
        }
    }
}
