//! Instruction set extensions, and the architecture names that kernels are registered under.
//!
//! This module must not know kernels.

/// The features of this processor, the most significant first: `avx512f`, `avx2`, `fma`, ….
#[must_use]
pub fn features() -> Vec<&'static str> {
    let mut found = Vec::new();
    #[cfg(target_arch = "x86_64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => { $(if std::arch::is_x86_feature_detected!($name) { found.push($name); })* };
        }
        probe!("avx512f" "avx512bw" "avx512cd" "avx512dq" "avx512vl" "avx512vnni" "avx512bf16" "avx512fp16" "avx2" "fma" "f16c" "bmi1" "bmi2"
            "lzcnt" "movbe" "avx" "sse4.2" "sse4.1" "ssse3" "sse3" "popcnt" "aes" "sha");
        #[cfg(target_os = "linux")]
        if found.contains(&"avx512f") {
            found.extend(amx());
        }
    }
    #[cfg(target_arch = "aarch64")]
    {
        macro_rules! probe {
            ($($name:tt)*) => { $(if std::arch::is_aarch64_feature_detected!($name) { found.push($name); })* };
        }
        probe!("sve2" "sve" "bf16" "i8mm" "fhm" "fp16" "dotprod" "neon" "aes" "sha2" "lse");
    }
    found
}

/// The features of AMX, if the system permits this process to use tiles. The question gives the
/// permission, which holds for all threads.
#[cfg(all(target_arch = "x86_64", target_os = "linux"))]
fn amx() -> Vec<&'static str> {
    const ARCH_REQ_XCOMP_PERM: libc::c_int = 0x1023;
    const XFEATURE_XTILEDATA: libc::c_ulong = 18;
    const BITS: [(u32, &str); 3] = [(24, "amx-tile"), (22, "amx-bf16"), (25, "amx-int8")];
    // Every processor with AVX-512 has the leaf.
    let leaf = std::arch::x86_64::__cpuid_count(7, 0).edx;
    let has = |&(bit, _): &(u32, &str)| leaf >> bit & 1 == 1;
    if !BITS[..1].iter().all(has) {
        return Vec::new();
    }
    // SAFETY: the call changes a permission of this process and no memory. An older system refuses.
    let rc =
        unsafe { libc::syscall(libc::SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) };
    if rc != 0 {
        return Vec::new();
    }
    BITS.iter().filter(|bit| has(bit)).map(|&(_, name)| name).collect()
}

/// The architectures whose kernels run here, the most specific first and `cpu` last, from a
/// processor's features.
///
/// ```
/// use leasehold_cpu::driver::isa::architectures;
/// let v2 = architectures("x86_64", &["sse4.2", "popcnt", "ssse3"]);
/// assert_eq!(v2, ["cpu/x86-64-v2", "cpu/x86-64", "cpu"]);
/// assert_eq!(architectures("riscv64", &[]), ["cpu/riscv64", "cpu"]);
/// ```
#[must_use]
pub fn architectures(arch: &str, features: &[&str]) -> Vec<String> {
    let all = |wanted: &[&str]| wanted.iter().all(|w| features.contains(w));
    let mut names: Vec<String> = Vec::new();
    match arch {
        "x86_64" => {
            // The psABI's levels, without the features that every processor of a level has, and two
            // above them.
            let v2 = all(&["sse4.2", "ssse3", "popcnt"]);
            let v3 = v2 && all(&["avx2", "fma", "f16c", "bmi1", "bmi2", "lzcnt", "movbe"]);
            let v4 = v3 && all(&["avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"]);
            let bf16 = v4 && all(&["avx512bf16"]);
            let amx = bf16 && all(&["amx-tile", "amx-bf16"]);
            for (has, level) in
                [(amx, "v4-amx"), (bf16, "v4-bf16"), (v4, "v4"), (v3, "v3"), (v2, "v2")]
            {
                if has {
                    names.push(format!("cpu/x86-64-{level}"));
                }
            }
            names.push("cpu/x86-64".into());
        }
        "aarch64" => {
            for feature in ["sve2", "sve", "neon"] {
                if all(&[feature]) {
                    names.push(format!("cpu/aarch64-{feature}"));
                }
            }
            names.push("cpu/aarch64".into());
        }
        other => names.push(format!("cpu/{other}")),
    }
    names.push("cpu".into());
    names
}
