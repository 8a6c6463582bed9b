//! Element-wise kernels: sums, products, SiLU·mul, casts; also fills and strided copies of bytes.

use std::marker::PhantomData;
use std::mem::MaybeUninit;

use leasehold::kernel::CpuArgs;

use super::elem::{DType, load_at, store_at, with_elem};
use super::math::silu;
use super::rope::extent;
use super::row;
use super::simd::{Simd, Task};
use super::tile::{
    Extent, Kernel, Launch, Operand, Refusal, accepted, dtype, params, positive, ptr, read, update,
    write,
};

/// Elements of a tile.
const TILE: usize = 8192;
/// Elements on the stack in f32 at a time.
const CHUNK: usize = 1024;
/// Bytes of a tile of a fill or a copy.
const BYTES: usize = 64 << 10;

params! {
    /// Parameters of [`Add`], [`Mul`], [`SiluMul`] and [`Cast`].
    pub struct ElementwiseParams {
        /// Rows.
        pub rows: u32,
        /// Elements of a row.
        pub k: u32,
        /// Elements from one row to the next, for the operands in their order.
        pub ld: [u32; 3],
        /// Element type of the inputs.
        pub x: u32,
        /// Element type of the output.
        pub y: u32,
    }
}

params! {
    /// Parameters of [`Fill`].
    pub struct FillParams {
        /// Bytes to fill: low word, high word; a multiple of `width`.
        pub bytes: [u32; 2],
        /// Bytes of the pattern: 1, 2 or 4.
        pub width: u32,
        /// The pattern, in the lowest bytes.
        pub pattern: u32,
    }
}

params! {
    /// Parameters of [`Copy2d`], in bytes.
    pub struct CopyParams {
        /// Rows.
        pub rows: u32,
        /// Bytes of a row.
        pub bytes: u32,
        /// Bytes from one row of the source to the next.
        pub from_pitch: u32,
        /// Bytes from one row of the destination to the next.
        pub to_pitch: u32,
    }
}

/// `y = a + b`; `y` may be one of them with the same layout.
pub struct Add;
/// `y = a · b`; `y` may be one of them with the same layout.
pub struct Mul;
/// `y = silu(a) · b`; `y` may be one of them with the same layout.
pub struct SiluMul;
/// `y = x` in another element type, rounded to nearest even.
pub struct Cast;
/// Fills a range with a pattern of 1, 2 or 4 bytes; the range may begin at any address.
pub struct Fill;
/// Copies rows of bytes; the ranges must not overlap.
pub struct Copy2d;

/// Tiles along a row and rows of a tile.
fn cut(k: usize) -> (usize, usize) {
    (k.div_ceil(TILE), (TILE / k).max(1))
}

/// The grid, and the extents of the three operands.
fn shape(p: &ElementwiseParams, operands: usize) -> Result<([usize; 3], [Extent; 3]), Refusal> {
    let (rows, k) = (positive("the number of rows", p.rows)?, positive("the width", p.k)?);
    let (x, y) = (dtype("the inputs", p.x)?.bytes(), dtype("the output", p.y)?.bytes());
    let (along, down) = cut(k);
    let mut extents = [(0, 1); 3];
    for i in 0..operands {
        extents[i] = (extent(rows, k, p.ld[i])?, if i + 1 == operands { y } else { x });
    }
    Ok(([along, rows.div_ceil(down), 1], extents))
}

/// The pieces of a tile, of at most [`CHUNK`] elements: (row, first element, elements).
fn pieces(p: &ElementwiseParams, t: &CpuArgs<'_>) -> impl Iterator<Item = (usize, usize, usize)> {
    let (_, down) = cut(p.k as usize);
    let (first, from) = (t.tile()[1] as usize * down, t.tile()[0] as usize * TILE);
    let to = (from + TILE).min(p.k as usize);
    let rows = first..(first + down).min(p.rows as usize);
    rows.flat_map(move |r| (from..to).step_by(CHUNK).map(move |at| (r, at, CHUNK.min(to - at))))
}

/// A function of two elements.
trait Binary: 'static {
    /// Applies the function, lane by lane.
    fn apply<S: Simd>(s: S, a: S::V, b: S::V) -> S::V;
}

/// `y = f(a, b)` for `n` f32.
struct Apply<F> {
    a: *mut f32,
    b: *const u8,
    dtype: DType,
    at: usize,
    n: usize,
    f: PhantomData<F>,
}

impl<F: Binary> Task for Apply<F> {
    type Out = ();
    #[inline(always)]
    fn run<S: Simd>(self, s: S) {
        let Self { a, b, dtype, at, n, .. } = self;
        // SAFETY: only `binary` makes this value, from a piece of its tile.
        with_elem!(dtype, T => unsafe {
            let b = b.cast::<T>().add(at);
            for i in (0..n).step_by(S::N) {
                store_at(s, a, i, n, F::apply(s, load_at(s, a, i, n), load_at(s, b, i, n)));
            }
        });
    }
}

/// A tile of a kernel of two inputs.
#[inline(always)]
unsafe fn binary<S: Simd, F: Binary>(s: S, p: &ElementwiseParams, t: &CpuArgs<'_>) {
    let mut buffer = MaybeUninit::<[f32; CHUNK]>::uninit();
    let buffer = buffer.as_mut_ptr().cast::<f32>();
    let dtype = accepted(p.x);
    for (r, at, n) in pieces(p, t) {
        let [a, b, y] = p.ld.map(|ld| r * ld as usize + at);
        // SAFETY: `plan` requires the rows. A piece has at most CHUNK elements, and is read
        // completely before it is written.
        unsafe {
            row::widen(s, (dtype, ptr(t, 0), a), buffer, n, 1.0);
            s.run(Apply { a: buffer, b: ptr(t, 1), dtype, at: b, n, f: PhantomData::<F> });
            row::narrow(s, buffer, (accepted(p.y), ptr(t, 2), y), n);
        }
    }
}

macro_rules! binary_kernel {
    ($kernel:ident, $name:literal, |$s:ident, $a:ident, $b:ident| $f:expr) => {
        impl Binary for $kernel {
            #[inline(always)]
            fn apply<S: Simd>($s: S, $a: S::V, $b: S::V) -> S::V {
                $f
            }
        }

        impl Kernel for $kernel {
            const NAME: &'static str = $name;
            const OPERANDS: &'static [Operand] = &[read("a"), read("b"), write("y")];
            type Params = ElementwiseParams;
            const IN_PLACE: bool = true;

            fn plan(p: &ElementwiseParams) -> Result<Launch, Refusal> {
                let (grid, extents) = shape(p, 3)?;
                let alike = |i: usize| p.x == p.y && p.ld[i] == p.ld[2];
                Ok(Launch::new(grid, &extents)?.or_in_place(0, alike(0)).or_in_place(1, alike(1)))
            }

            #[inline(always)]
            unsafe fn tile<S: Simd>(s: S, p: &ElementwiseParams, t: &CpuArgs<'_>) {
                // SAFETY: the caller keeps the conditions of `Kernel::tile`.
                unsafe { binary::<S, $kernel>(s, p, t) }
            }
        }
    };
}

binary_kernel!(Add, "add", |s, a, b| s.add(a, b));
binary_kernel!(Mul, "mul", |s, a, b| s.mul(a, b));
binary_kernel!(SiluMul, "silu_mul", |s, a, b| s.mul(silu(s, a), b));

impl Kernel for Cast {
    const NAME: &'static str = "cast";
    const OPERANDS: &'static [Operand] = &[read("x"), write("y")];
    type Params = ElementwiseParams;

    fn plan(p: &ElementwiseParams) -> Result<Launch, Refusal> {
        let (grid, [x, y, _]) = shape(p, 2)?;
        Launch::new(grid, &[x, y])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(s: S, p: &ElementwiseParams, t: &CpuArgs<'_>) {
        let mut buffer = MaybeUninit::<[f32; CHUNK]>::uninit();
        let buffer = buffer.as_mut_ptr().cast::<f32>();
        for (r, at, n) in pieces(p, t) {
            let [x, y, _] = p.ld.map(|ld| r * ld as usize + at);
            // SAFETY: `plan` requires the rows; a piece has at most CHUNK elements.
            unsafe {
                row::widen(s, (accepted(p.x), ptr(t, 0), x), buffer, n, 1.0);
                row::narrow(s, buffer, (accepted(p.y), ptr(t, 1), y), n);
            }
        }
    }
}

impl FillParams {
    fn len(&self) -> u64 {
        u64::from(self.bytes[0]) | (u64::from(self.bytes[1]) << 32)
    }
}

impl Kernel for Fill {
    const NAME: &'static str = "fill";
    const OPERANDS: &'static [Operand] = &[write("y")];
    type Params = FillParams;

    fn plan(p: &FillParams) -> Result<Launch, Refusal> {
        if !matches!(p.width, 1 | 2 | 4) || !p.len().is_multiple_of(u64::from(p.width)) {
            return Err(
                format!("a pattern of {} bytes does not fill {} bytes", p.width, p.len()).into()
            );
        }
        let bytes = usize::try_from(p.len()).map_err(|_| "more bytes than there are addresses")?;
        Launch::new([bytes.div_ceil(BYTES), 1, 1], &[(bytes, 1)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &FillParams, t: &CpuArgs<'_>) {
        let first = t.tile()[0] as usize * BYTES;
        let n = BYTES.min(p.len() as usize - first);
        let pattern = p.pattern.to_le_bytes();
        // SAFETY: `plan` requires `len` bytes; a tile begins at a multiple of the pattern.
        unsafe {
            let y = ptr::<u8>(t, 0).add(first);
            match p.width {
                1 => y.write_bytes(pattern[0], n),
                2 => (0..n / 2)
                    .for_each(|i| y.cast::<[u8; 2]>().add(i).write([pattern[0], pattern[1]])),
                _ => (0..n / 4).for_each(|i| y.cast::<[u8; 4]>().add(i).write(pattern)),
            }
        }
    }
}

/// Tiles along a row and rows of a tile of a copy.
fn copy_cut(bytes: usize) -> (usize, usize) {
    (bytes.div_ceil(BYTES), (BYTES / bytes).max(1))
}

impl Kernel for Copy2d {
    const NAME: &'static str = "copy_2d";
    const OPERANDS: &'static [Operand] = &[read("from"), update("to")];
    type Params = CopyParams;

    fn plan(p: &CopyParams) -> Result<Launch, Refusal> {
        let (rows, bytes) =
            (positive("the number of rows", p.rows)?, positive("the length of a row", p.bytes)?);
        let (along, down) = copy_cut(bytes);
        let (from, to) = (extent(rows, bytes, p.from_pitch)?, extent(rows, bytes, p.to_pitch)?);
        Launch::new([along, rows.div_ceil(down), 1], &[(from, 1), (to, 1)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &CopyParams, t: &CpuArgs<'_>) {
        let (_, down) = copy_cut(p.bytes as usize);
        let (first, at) = (t.tile()[1] as usize * down, t.tile()[0] as usize * BYTES);
        let n = BYTES.min(p.bytes as usize - at);
        for r in first..(first + down).min(p.rows as usize) {
            // SAFETY: `plan` requires the rows; the ranges do not overlap.
            unsafe {
                let from = ptr::<u8>(t, 0).add(r * p.from_pitch as usize + at).cast_const();
                let to = ptr::<u8>(t, 1).add(r * p.to_pitch as usize + at);
                to.copy_from_nonoverlapping(from, n);
            }
        }
    }
}
