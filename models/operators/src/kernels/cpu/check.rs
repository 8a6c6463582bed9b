//! The check of values: where an element is NaN or infinite.

use std::ops::{BitAnd, Range};

use leasehold::kernel::CpuArgs;

use super::simd::Simd;
use super::tile::{Kernel, Launch, Operand, Refusal, params, ptr, read, write};

/// Elements that are looked at before the first of them is looked for.
const CHUNK: usize = 512;
/// The fewest elements of a part, unless there is only one part.
const PART: u64 = 4096;
/// The maximum number of parts.
pub const MAX_PARTS: u64 = 256;

params! {
    /// Parameters of [`NotFinite`].
    pub struct NotFiniteParams {
        /// Elements: low word, high word.
        pub count: [u32; 2],
        /// Bytes of an element: 2, 4 or 8.
        pub width: u32,
        /// The bits of the exponent, in the highest 16 or 32 bits of an element. An element that
        /// has all of them set is NaN or infinite.
        pub exponent: u32,
    }
}

impl NotFiniteParams {
    /// The check of `count` elements.
    #[must_use]
    pub fn new(count: u64, width: u32, exponent: u32) -> Self {
        Self { count: [count as u32, (count >> 32) as u32], width, exponent }
    }

    fn len(&self) -> u64 {
        u64::from(self.count[0]) | (u64::from(self.count[1]) << 32)
    }

    /// The number of parts of equal length, of which each has a [`Found`].
    #[must_use]
    pub fn parts(&self) -> u32 {
        self.len().div_ceil(PART).clamp(1, MAX_PARTS) as u32
    }
}

params! {
    /// The first element of a part that is NaN or infinite.
    pub struct Found {
        /// Its index among all elements: low word, high word. All ones if there is none.
        pub index: [u32; 2],
        /// Its bits: low word, high word.
        pub bits: [u32; 2],
    }
}

impl Found {
    fn new(index: u64, bits: u64) -> Self {
        let words = |word: u64| [word as u32, (word >> 32) as u32];
        Self { index: words(index), bits: words(bits) }
    }

    /// The index and the bits, if there is such an element.
    #[must_use]
    pub fn get(self) -> Option<(u64, u64)> {
        let word = |[low, high]: [u32; 2]| u64::from(low) | (u64::from(high) << 32);
        (word(self.index) != u64::MAX).then(|| (word(self.index), word(self.bits)))
    }
}

/// The first element of each part of `x` that is NaN or infinite, as a [`Found`].
pub struct NotFinite;

/// The first of these elements whose bits have all of `mask`, and its bits.
///
/// # Safety
/// - `x` is readable for the elements.
#[inline(always)]
unsafe fn first<T>(x: *const T, within: Range<usize>, mask: T) -> Option<(usize, u64)>
where
    T: Copy + PartialEq + BitAnd<Output = T> + Into<u64>,
{
    let mut at = within.start;
    while at < within.end {
        let end = (at + CHUNK).min(within.end);
        // SAFETY: the caller vouches for the elements.
        let element = |i: usize| unsafe { x.add(i).read() };
        let mut any = false;
        for i in at..end {
            any |= element(i) & mask == mask;
        }
        if any {
            return (at..end).find(|&i| element(i) & mask == mask).map(|i| (i, element(i).into()));
        }
        at = end;
    }
    None
}

impl Kernel for NotFinite {
    const NAME: &'static str = "not_finite";
    const OPERANDS: &'static [Operand] = &[read("x"), write("found")];
    type Params = NotFiniteParams;

    fn plan(p: &NotFiniteParams) -> Result<Launch, Refusal> {
        let bits = if p.width == 2 { 16 } else { 32 };
        if !matches!(p.width, 2 | 4 | 8)
            || p.exponent == 0
            || p.exponent.checked_shr(bits).unwrap_or(0) != 0
        {
            return Err(format!(
                "{:#x} is no exponent of elements of {} bytes",
                p.exponent, p.width
            )
            .into());
        }
        let count =
            usize::try_from(p.len()).map_err(|_| "more elements than there are addresses")?;
        if count == 0 {
            return Err("no element is checked".into());
        }
        let parts = p.parts() as usize;
        Launch::new([parts, 1, 1], &[(count, p.width as usize), (4 * parts, 4)])
    }

    #[inline(always)]
    unsafe fn tile<S: Simd>(_: S, p: &NotFiniteParams, t: &CpuArgs<'_>) {
        let (part, count) = (t.tile()[0] as usize, p.len() as usize);
        let length = count.div_ceil(p.parts() as usize);
        let from = (part * length).min(count);
        let within = from..(from + length).min(count);
        // SAFETY: `plan` requires the elements, aligned, and an entry for each part.
        unsafe {
            let found = match p.width {
                2 => first(ptr::<u16>(t, 0), within, p.exponent as u16),
                4 => first(ptr::<u32>(t, 0), within, p.exponent),
                _ => first(ptr::<u64>(t, 0), within, u64::from(p.exponent) << 32),
            };
            let found =
                found.map_or(Found::new(u64::MAX, 0), |(i, bits)| Found::new(i as u64, bits));
            ptr::<Found>(t, 1).add(part).write(found);
        }
    }
}
