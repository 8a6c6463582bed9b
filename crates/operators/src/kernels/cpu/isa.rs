//! Instruction set levels of the CPU kernels, and the detection of the levels that this machine
//! supports.
//!
//! Each kernel exists once in the source and once for each [`Isa`] in the binary. The level is
//! selected when a kernel is resolved, never inside a kernel: a whole tile runs on one level. This
//! module must not know any kernel.

use std::fmt;
use std::str::FromStr;

/// A level of instructions. The names are those of the x86-64 psABI and of the Arm architecture.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
#[non_exhaustive]
pub enum Isa {
    /// The target's baseline, without run-time detection. The reference for the other levels.
    Generic,
    /// Advanced SIMD, 128 bits; part of every aarch64 machine.
    Neon,
    /// `x86-64-v3`: AVX2, FMA and F16C, 256 bits.
    Avx2,
    /// `x86-64-v4`: AVX-512 F, BW, DQ and VL in addition to v3, 512 bits.
    Avx512,
}

impl Isa {
    /// All levels, the most specific first, as a registry needs them.
    pub const ALL: [Isa; 4] = [Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Generic];

    /// Returns whether this machine supports the level. The standard library caches the answer; a
    /// call costs a load.
    #[must_use]
    pub fn available(self) -> bool {
        match self {
            Isa::Generic => true,
            Isa::Neon => cfg!(all(target_arch = "aarch64", target_feature = "neon")),
            Isa::Avx2 => avx2(),
            Isa::Avx512 => avx512(),
        }
    }

    /// The most specific level that this machine supports.
    #[must_use]
    pub fn best() -> Isa {
        Self::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Generic)
    }

    /// The name: `generic`, `x86-64-v3`, `x86-64-v4` or `aarch64-neon`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Isa::Generic => "generic",
            Isa::Neon => "aarch64-neon",
            Isa::Avx2 => "x86-64-v3",
            Isa::Avx512 => "x86-64-v4",
        }
    }
}

impl fmt::Display for Isa {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

impl FromStr for Isa {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, Self::Err> {
        Self::ALL.into_iter().find(|isa| isa.name() == text).ok_or_else(|| {
            format!("no instruction set is called '{text}'; there are generic, x86-64-v3, x86-64-v4 and aarch64-neon")
        })
    }
}

#[cfg(target_arch = "x86_64")]
fn avx2() -> bool {
    is_x86_feature_detected!("avx2")
        && is_x86_feature_detected!("fma")
        && is_x86_feature_detected!("f16c")
}

#[cfg(target_arch = "x86_64")]
fn avx512() -> bool {
    avx2()
        && is_x86_feature_detected!("avx512f")
        && is_x86_feature_detected!("avx512bw")
        && is_x86_feature_detected!("avx512dq")
        && is_x86_feature_detected!("avx512vl")
}

#[cfg(not(target_arch = "x86_64"))]
fn avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512() -> bool {
    false
}

#[cfg(test)]
mod tests {
    use super::Isa;

    #[test]
    fn names_parse_back_and_the_best_level_is_available() {
        for isa in Isa::ALL {
            assert_eq!(isa.name().parse::<Isa>(), Ok(isa));
        }
        assert!("x86-64-v5".parse::<Isa>().is_err());
        assert!(Isa::best().available());
        assert!(Isa::Generic.available());
    }
}
