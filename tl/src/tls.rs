//! The thread-local word of the C ABI.
//!
//! The word needs no destructor, so it can be read at any time of a thread's life. On x86-64 Linux
//! it uses the initial-exec model, as allocators do. In a shared library the general model costs a
//! call of `__tls_get_addr` for each access, which is half the time of an empty scope. Eight bytes
//! fit into the C library's reserve for libraries that are loaded later. This module must not know
//! what the word means.

use std::ptr;

#[cfg(all(target_os = "linux", target_arch = "x86_64", not(miri)))]
mod imp {
    use std::arch::{asm, global_asm};

    global_asm!(
        ".pushsection .tbss,\"awT\",@nobits",
        ".p2align 3",
        ".globl leasehold_memory_attachment",
        ".hidden leasehold_memory_attachment",
        ".type leasehold_memory_attachment,@object",
        ".size leasehold_memory_attachment, 8",
        "leasehold_memory_attachment:",
        ".zero 8",
        ".popsection",
    );

    #[inline(always)]
    pub(super) fn get() -> usize {
        let word: usize;
        // SAFETY: reads this thread's copy of the word above. The offset comes from the linker or
        // the loader; the base is `fs`.
        unsafe {
            asm!(
                "mov {0}, qword ptr [rip + leasehold_memory_attachment@GOTTPOFF]",
                "mov {0}, qword ptr fs:[{0}]",
                out(reg) word,
                options(nostack, preserves_flags, readonly)
            );
        }
        word
    }

    pub(super) fn set(word: usize) {
        // SAFETY: writes this thread's copy of the word above, found as in `get`. No other thread
        // uses it.
        unsafe {
            asm!(
                "mov {0}, qword ptr [rip + leasehold_memory_attachment@GOTTPOFF]",
                "mov qword ptr fs:[{0}], {1}",
                out(reg) _,
                in(reg) word,
                options(nostack, preserves_flags)
            );
        }
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64", not(miri))))]
mod imp {
    use std::cell::Cell;

    thread_local! {
        static WORD: Cell<usize> = const { Cell::new(0) };
    }

    #[inline(always)]
    pub(super) fn get() -> usize {
        WORD.get()
    }

    pub(super) fn set(word: usize) {
        WORD.set(word);
    }
}

/// This thread's word; null before the first `set`.
#[inline(always)]
pub(crate) fn get() -> *const () {
    ptr::with_exposed_provenance(imp::get())
}

/// Sets this thread's word.
pub(crate) fn set(word: *const ()) {
    imp::set(word.expose_provenance());
}
