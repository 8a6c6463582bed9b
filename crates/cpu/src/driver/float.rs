//! The floating-point state of threads that run kernels.
//!
//! A thread inherits its state from whoever started it. So that a result depends neither on the thread that computes a tile nor on what the
//! application did before, every thread of this backend sets the same state when it starts and after each call of foreign code: rounding to
//! nearest, exceptions masked, subnormal results and operands are zero (x86: `FTZ` and `DAZ`; AArch64: `FZ`). Subnormal numbers appear in the
//! tails of exponentials, where they cost a hundred cycles and more on some processors and carry no information. The application's own threads
//! are never touched: host code that wants to repeat a kernel to the bit must treat subnormal numbers alike.
//!
//! On other architectures the state is left as it is.

/// `MXCSR`: exceptions masked, rounding to nearest, flush to zero, denormals are zero.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
const STATE: u32 = 0x1f80 | 0x8000 | 0x0040;

/// Sets the state for kernels on this thread, unless it is set.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
pub fn set() {
    let mut now = 0u32;
    // SAFETY: stores the control word to a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags)) };
    if now & !0x3f != STATE {
        let state = STATE;
        // SAFETY: loads a valid control word (no reserved bit). All exceptions stay masked, so nothing can trap; only this thread is
        // concerned, which runs kernels and nothing else and never gives the state back. The optimiser may evaluate subnormal constants
        // as if the flags were not set, which changes no result but those that the module's documentation gives up.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags, readonly))
        };
    }
}

/// Sets the state for kernels on this thread.
#[cfg(target_arch = "aarch64")]
pub fn set() {
    const FZ: u64 = 1 << 24;
    // SAFETY: a valid control word: flush to zero, rounding to nearest, no traps; only this thread is concerned, which runs kernels and
    // nothing else and never gives the state back.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) FZ, options(nomem, nostack, preserves_flags)) };
}

/// Leaves the state as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
pub fn set() {}
