//! A kernel in Rust. It is in no build of this workspace: the target needs a nightly compiler and
//! its own `core`. In a crate of a library with this file as `src/lib.rs`:
//!
//! ```sh
//! cargo +nightly rustc --release -Zbuild-std=core --target nvptx64-nvidia-cuda -- \
//!     --emit asm -C target-cpu=sm_75 -C panic=abort
//! ```
//!
//! The `.s` file in `target/nvptx64-nvidia-cuda/release/deps` is `kernel.ptx`.

#![no_std]
#![feature(abi_ptx, stdarch_nvptx)]

use core::arch::nvptx::{_block_dim_x, _block_idx_x, _thread_idx_x};

/// The parameters of a launch, behind its bindings.
#[repr(C)]
pub struct Params {
    factor: f32,
    count: u32,
}

/// `y[i] = factor * x[i]`, one value a thread.
///
/// # Safety
/// `x` and `y` have `count` values, and nobody else uses those of `y`.
#[unsafe(no_mangle)]
pub unsafe extern "ptx-kernel" fn scale(x: *const f32, y: *mut f32, params: Params) {
    // SAFETY: these read the thread's place in the launch.
    let at = unsafe { _block_idx_x() * _block_dim_x() + _thread_idx_x() } as u32;
    if at < params.count {
        // SAFETY: both have a value there, and each thread has one of its own.
        unsafe { *y.add(at as usize) = *x.add(at as usize) * params.factor };
    }
}

#[panic_handler]
fn panic(_: &core::panic::PanicInfo<'_>) -> ! {
    loop {}
}
