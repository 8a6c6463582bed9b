//! The floating-point state of threads that run kernels.
//!
//! A thread inherits its state from whoever started it. So that a result depends neither on the
//! thread that computes a tile nor on what the application did before, every thread of this backend
//! sets the same state when it starts and after each call of foreign code: rounding to nearest,
//! exceptions masked, subnormal results and operands are zero (x86: `FTZ` and `DAZ`; AArch64:
//! `FZ`). Subnormal numbers appear in the tails of exponentials, where they cost a hundred cycles
//! and more on some processors and carry no information. The application's own threads are never
//! touched: host code that wants to repeat a kernel to the bit must treat subnormal numbers alike.
//!
//! Calls of the program's run in the state that threads start with: safe code may count on it
//! ([`apart`]).
//!
//! On other architectures the state is left as it is.

/// Runs code that is not this backend's, in the state that threads start with. A panic leaves that
/// state: [`set`] follows then.
pub(super) fn apart<T>(call: impl FnOnce() -> T) -> T {
    reset();
    let result = call();
    set();
    result
}

/// Sets the state for kernels on this thread.
pub(super) fn set() {
    write(KERNELS);
}

/// Sets the state that threads start with.
fn reset() {
    write(START);
}

/// `MXCSR`: exceptions masked, rounding to nearest; then flush to zero, denormals are zero.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
const START: u32 = 0x1f80;
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
const KERNELS: u32 = START | 0x8000 | 0x0040;

/// Sets the control word, unless it is set.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
fn write(state: u32) {
    let mut now = 0u32;
    // SAFETY: stores the control word to a local.
    unsafe { std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags)) };
    if now & !0x3f != state {
        // SAFETY: loads a valid control word (no reserved bit). All exceptions stay masked, so
        // nothing can trap; only this thread is concerned, which runs kernels, and what it calls
        // else it calls apart. The optimiser may evaluate subnormal constants as if the flags were
        // not set, which changes no result but those that the module's documentation gives up.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags, readonly))
        };
    }
}

/// `FPCR`: rounding to nearest, no traps; then flush to zero.
#[cfg(target_arch = "aarch64")]
const START: u64 = 0;
#[cfg(target_arch = "aarch64")]
const KERNELS: u64 = 1 << 24;

/// Sets the control word.
#[cfg(target_arch = "aarch64")]
fn write(state: u64) {
    // SAFETY: a valid control word, without traps; only this thread is concerned, which runs
    // kernels, and what it calls else it calls apart.
    unsafe { std::arch::asm!("msr fpcr, {}", in(reg) state, options(nomem, nostack, preserves_flags)) };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
const START: () = ();
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
const KERNELS: () = ();

/// Leaves the state as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
fn write((): ()) {}
