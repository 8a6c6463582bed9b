//! The random numbers of programs that tests make.
//!
//! This module must not know what they choose.

/// A small generator of the xorshift kind: the same numbers for the same seed.
#[derive(Debug, Clone)]
pub struct Dice(u64);

impl Dice {
    /// The generator of a seed.
    #[must_use]
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9E37_79B9_7F4A_7C15) | 1)
    }

    /// A number below `n`, which is not zero.
    #[inline]
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0.wrapping_mul(0x2545_F491_4F6C_DD1D)) * u128::from(n)) >> 64) as u64
    }
}
