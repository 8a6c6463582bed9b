//! Instruction set levels of the CPU kernels, and the detection of the levels that this machine
//! supports.
//!
//! Each kernel exists once in the source and once for each [`Isa`] in the binary. The level is
//! selected when a kernel is resolved, never inside a kernel: a whole tile runs on one level. This
//! module must not know any kernel.

#[cfg(target_arch = "x86_64")]
use leasehold::backend::sync::OnceLock;
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
    /// `x86-64-v4-bf16`: AVX-512 BF16 in addition to v4. Products of bf16 by bf16 have an
    /// instruction.
    Avx512Bf16,
    /// `x86-64-v4-amx`: the tiles of AMX for bf16 in addition to v4-bf16. The system must permit
    /// the process to use them; Linux does, at the first question.
    Amx,
}

impl Isa {
    /// All levels, the most specific first, as a registry needs them.
    pub const ALL: [Isa; 6] =
        [Isa::Amx, Isa::Avx512Bf16, Isa::Avx512, Isa::Avx2, Isa::Neon, Isa::Generic];

    /// Returns whether this machine supports the level. The answer is cached; a call costs a load.
    #[must_use]
    pub fn available(self) -> bool {
        match self {
            Isa::Generic => true,
            Isa::Neon => cfg!(all(target_arch = "aarch64", target_feature = "neon")),
            Isa::Avx2 => avx2(),
            Isa::Avx512 => avx512(),
            Isa::Avx512Bf16 => avx512_bf16(),
            Isa::Amx => amx(),
        }
    }

    /// The most specific level that this machine supports.
    #[must_use]
    pub fn best() -> Isa {
        Self::ALL.into_iter().find(|isa| isa.available()).unwrap_or(Isa::Generic)
    }

    /// The name: `generic`, `aarch64-neon`, `x86-64-v3`, `x86-64-v4`, `x86-64-v4-bf16` or
    /// `x86-64-v4-amx`.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Isa::Generic => "generic",
            Isa::Neon => "aarch64-neon",
            Isa::Avx2 => "x86-64-v3",
            Isa::Avx512 => "x86-64-v4",
            Isa::Avx512Bf16 => "x86-64-v4-bf16",
            Isa::Amx => "x86-64-v4-amx",
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
            let names = Self::ALL.map(Self::name).join(", ");
            format!("no instruction set is called '{text}'; there are {names}")
        })
    }
}

/// Whether the processor follows one stream of addresses so well that a prefetch slows it down.
/// Measurements found this of AMD's Zen 4, and the contrary of Intel's Sapphire Rapids. The answer
/// is cached.
#[cfg(target_arch = "x86_64")]
pub(super) fn follows_streams() -> bool {
    static AMD: OnceLock<bool> = OnceLock::new();
    *AMD.get_or_init(|| {
        let id = std::arch::x86_64::__cpuid(0);
        [id.ebx, id.edx, id.ecx].map(u32::to_le_bytes).as_flattened() == b"AuthenticAMD"
    })
}

#[cfg(not(target_arch = "x86_64"))]
pub(super) fn follows_streams() -> bool {
    false
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

#[cfg(target_arch = "x86_64")]
fn avx512_bf16() -> bool {
    avx512() && is_x86_feature_detected!("avx512bf16")
}

/// Asks the system once for the permission to use tiles, which holds for the whole process.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx() -> bool {
    static PERMITTED: OnceLock<bool> = OnceLock::new();
    *PERMITTED.get_or_init(|| {
        const SYS_ARCH_PRCTL: u64 = 158;
        const ARCH_REQ_XCOMP_PERM: u64 = 0x1023;
        const XFEATURE_XTILEDATA: u64 = 18;
        const TILE: u32 = 1 << 24;
        const BF16: u32 = 1 << 22;
        if !avx512_bf16() || std::arch::x86_64::__cpuid(0).eax < 7 {
            return false;
        }
        if std::arch::x86_64::__cpuid_count(7, 0).edx & (TILE | BF16) != TILE | BF16 {
            return false;
        }
        let mut result = SYS_ARCH_PRCTL;
        // SAFETY: the call changes a permission of this process and no memory. An older system
        // refuses.
        unsafe {
            std::arch::asm!(
                "syscall",
                inout("rax") result,
                in("rdi") ARCH_REQ_XCOMP_PERM,
                in("rsi") XFEATURE_XTILEDATA,
                out("rcx") _,
                out("r11") _,
                options(nostack),
            );
        }
        result == 0
    })
}

#[cfg(not(all(target_arch = "x86_64", target_os = "linux")))]
fn amx() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn avx2() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512() -> bool {
    false
}

#[cfg(not(target_arch = "x86_64"))]
fn avx512_bf16() -> bool {
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
