//! The floating-point state of threads that run kernels.
//!
//! A thread inherits its state from the thread that started it. A result must depend neither on the
//! thread that computes a tile nor on earlier calls of the application. So every thread of this
//! backend sets the same state when it starts, and again after each call of foreign code. In this
//! state, rounding is to nearest, exceptions are masked, and subnormal results and operands are
//! zero (x86: `FTZ` and `DAZ`; AArch64: `FZ`). Subnormal numbers appear in the tails of
//! exponentials, where they carry no information. On some processors they cost a hundred cycles and
//! more. The application's own threads are never touched. Host code that wants to repeat a kernel
//! to the bit must treat subnormal numbers alike.
//!
//! Calls of the program's code run in the state that threads start with: safe code may count on
//! that state ([`apart`]).
//!
//! On other architectures the state is left as it is.

/// Runs code of the program in the state that threads start with. If the code panics, the state
/// remains, and the caller must call [`set`].
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

/// `MXCSR`: `START` masks exceptions and rounds to nearest. `KERNELS` also flushes to zero and
/// treats denormals as zero.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
const START: u32 = 0x1f80;
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
const KERNELS: u32 = START | 0x8000 | 0x0040;

/// Sets the control word, unless it has this value.
#[cfg(any(target_arch = "x86_64", target_arch = "x86"))]
fn write(state: u32) {
    let mut now = 0u32;
    // SAFETY: the instruction stores the control word to a local.
    unsafe {
        std::arch::asm!("stmxcsr [{}]", in(reg) &raw mut now, options(nostack, preserves_flags))
    };
    if now & !0x3f != state {
        // SAFETY: the instruction loads a valid control word (no reserved bit). All exceptions stay
        // masked, so nothing can trap. Only this thread is concerned. This thread runs kernels, and
        // calls all other code through `apart`. The optimiser may evaluate subnormal constants as
        // if the flags were not set. This changes only results for which the module's documentation
        // promises nothing.
        unsafe {
            std::arch::asm!("ldmxcsr [{}]", in(reg) &raw const state, options(nostack, preserves_flags, readonly))
        };
    }
}

/// `FPCR`: `START` rounds to nearest without traps. `KERNELS` also flushes to zero.
#[cfg(target_arch = "aarch64")]
const START: u64 = 0;
#[cfg(target_arch = "aarch64")]
const KERNELS: u64 = 1 << 24;

/// Sets the control word.
#[cfg(target_arch = "aarch64")]
fn write(state: u64) {
    // SAFETY: the control word is valid and has no traps. Only this thread is concerned, which runs
    // kernels and calls all other code through `apart`.
    unsafe {
        std::arch::asm!("msr fpcr, {}", in(reg) state, options(nomem, nostack, preserves_flags))
    };
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
const START: () = ();
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
const KERNELS: () = ();

/// Leaves the state as it is.
#[cfg(not(any(target_arch = "x86_64", target_arch = "x86", target_arch = "aarch64")))]
fn write((): ()) {}
