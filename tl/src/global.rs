//! The process's manager behind the C ABI: attachment of threads, their detachment, and forks.
//!
//! # Threads
//! A thread attaches at its first call. The destructor of a POSIX key detaches it when it ends. The
//! C library runs this destructor after those of all thread-local objects, and not at the exit of
//! the process. So the detachment calls no function of the program ([`Local::detach_quietly`]), and
//! at exit nothing happens.
//!
//! # Memory
//! No function here ends the process if memory is short. The call that wanted to attach has no
//! effect then, and is counted.
//!
//! # Forks
//! Before a fork every lock is taken, so that the child finds a consistent state. After the fork
//! both processes release the locks. The child has only the forking thread, with its attachment.
//! Objects in the scopes of other threads stay alive in the child.
//!
//! This module must not know what the calls do.

use std::ffi::c_void;
use std::ptr::{self, NonNull};

use leasehold_core::sync::atomic::{AtomicPtr, AtomicU32, AtomicU64, AtomicUsize, Ordering::*};

use crate::heap::Owned;
use crate::local::Local;
use crate::log::Log;
use crate::misuse::Misuse;
use crate::pool::OpaqueTensor;
use crate::shared::{Config, Shared, SharedRef};
use crate::tls;

/// The manager; null until the first call that finds memory for it. (No lock guards its creation,
/// because a forked child may find the creation half done.)
static GLOBAL: AtomicPtr<Shared> = AtomicPtr::new(ptr::null_mut());
/// Calls that found no memory to attach.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// Tensors without a destructor, from pools outside any manager.
static LOST: AtomicU64 = AtomicU64::new(0);

/// The manager; `None` without memory for it.
#[inline]
pub(crate) fn shared() -> Option<&'static Shared> {
    // SAFETY: a published manager is never freed.
    unsafe { GLOBAL.load(Acquire).as_ref() }.or_else(make)
}

#[cold]
fn make() -> Option<&'static Shared> {
    if !forks::watch() {
        return None;
    }
    threads::watch();
    let new = Owned::new(Shared::new(Config::from_env(), Log::from_env()).ok()?).ok()?.into_raw();
    match GLOBAL.compare_exchange(ptr::null_mut(), new.as_ptr(), AcqRel, Acquire) {
        // SAFETY: the manager is published now, and never freed.
        Ok(_) => Some(unsafe { new.as_ref() }),
        Err(other) => {
            // SAFETY: another thread published first, so no other code has seen this one.
            drop(unsafe { Owned::from_raw(new) });
            // SAFETY: the pointer is not null, and published managers are never freed.
            Some(unsafe { &*other })
        }
    }
}

/// The value of the thread's word (`tls.rs`) after the thread has detached; null before it
/// attaches.
const GONE: *const () = ptr::without_provenance(1);

/// This thread's attachment, made at the first call. `None` once the thread has detached, and
/// without memory (which is counted).
#[inline(always)]
pub(crate) fn local() -> Option<&'static Local> {
    present().or_else(|| attach(tls::get()))
}

/// This thread's attachment, if it exists already.
#[inline(always)]
pub(crate) fn present() -> Option<&'static Local> {
    let local = tls::get();
    // SAFETY: the word holds an attachment that `attach` made. Callers use the reference during one
    // call. The thread detaches when no call is in progress, and no other code frees the
    // attachment.
    if local.addr() > GONE.addr() { Some(unsafe { &*local.cast() }) } else { None }
}

/// Returns whether this thread has detached.
pub(crate) fn gone() -> bool {
    tls::get() == GONE
}

/// Counts a call without effect because no memory for an attachment was available.
fn refuse<T>() -> Option<T> {
    REFUSED.fetch_add(1, Relaxed);
    None
}

fn new_local() -> Option<NonNull<Local>> {
    let local = Local::new(SharedRef::global(shared()?)).ok()?;
    Some(Owned::new(local).ok()?.into_raw())
}

#[cold]
#[inline(never)]
fn attach(state: *const ()) -> Option<&'static Local> {
    if state == GONE {
        return None;
    }
    let Some(local) = new_local() else { return refuse() };
    tls::set(local.as_ptr().cast());
    if !threads::tell_end(local) {
        tls::set(ptr::null());
        // SAFETY: the attachment is new, and no other code has seen it.
        drop(unsafe { Owned::from_raw(local) });
        return refuse();
    }
    // SAFETY: the attachment is new, and is freed when the thread ends.
    Some(unsafe { &*local.as_ptr() })
}

/// Runs `f` with this thread's attachment, or with a temporary one if the thread has detached.
#[inline(always)]
pub(crate) fn with_or_briefly<R>(f: impl FnOnce(&Local) -> R) -> Option<R> {
    match local() {
        Some(local) => Some(f(local)),
        None => briefly(f),
    }
}

#[cold]
fn briefly<R>(f: impl FnOnce(&Local) -> R) -> Option<R> {
    if !gone() {
        return None;
    }
    let Some(local) = new_local() else { return refuse() };
    tls::set(local.as_ptr().cast());
    // SAFETY: the attachment is new; it is freed below.
    let result = f(unsafe { local.as_ref() });
    // SAFETY: the attachment was made above and is freed below. The program made this call, so a
    // release may call the program. Callbacks still find the attachment.
    unsafe { local.as_ref() }.detach();
    tls::set(GONE);
    // SAFETY: the attachment was made above, and the word no longer leads to it.
    drop(unsafe { Owned::from_raw(local) });
    Some(result)
}

/// Adds calls without effect for lack of memory, and lost tensors of pools outside any manager, by
/// kind of misuse.
pub(crate) fn add_uncounted(misuses: &mut [u64]) {
    misuses[Misuse::OutOfMemory as usize] += REFUSED.load(Relaxed);
    misuses[Misuse::NoDestructor as usize] += LOST.load(Relaxed);
}

/// Destroys a tensor of a pool that has no destructor of its own.
///
/// # Safety
/// - The process's tensor destructor may be called with the tensor, and no other code uses it any
///   more.
pub(crate) unsafe fn destroy_tensor(tensor: *mut OpaqueTensor) {
    match shared().and_then(Shared::tensor_destructor) {
        // SAFETY: by the caller's promise.
        Some(destroy) => unsafe { destroy(tensor) },
        None => {
            LOST.fetch_add(1, Relaxed);
        }
    }
}

/// Detaches a thread that ends.
extern "C" fn thread_ends(local: *mut c_void) {
    let Some(local) = NonNull::new(local.cast::<Local>()) else { return };
    if tls::get() != local.as_ptr().cast() {
        return;
    }
    // SAFETY: the word held an attachment that `attach` made, and only this function frees it,
    // once.
    unsafe { local.as_ref() }.detach_quietly();
    tls::set(GONE);
    // SAFETY: the attachment is detached, and the word no longer leads to it.
    drop(unsafe { Owned::from_raw(local) });
}

#[cfg(unix)]
mod threads {
    //! A POSIX key, whose destructor runs when a thread ends.
    use super::*;

    /// The key plus one; 0 before the key exists.
    static KEY: AtomicUsize = AtomicUsize::new(0);

    /// Without a key (a process has a thousand) attachments stay until the process ends.
    pub(super) fn watch() {
        let mut key = 0;
        if KEY.load(Relaxed) != 0
            // SAFETY: the key is written to a local variable, and the destructor has the right
            // type.
            || unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) } != 0
        {
            return;
        }
        if KEY.compare_exchange(0, key as usize + 1, AcqRel, Relaxed).is_err() {
            // SAFETY: the key was made above and is not in use.
            unsafe { libc::pthread_key_delete(key) };
        }
    }

    unsafe extern "C" fn ends(local: *mut c_void) {
        thread_ends(local);
    }

    /// Registers the attachment for the thread's end. `false` without memory.
    pub(super) fn tell_end(local: NonNull<Local>) -> bool {
        let key = KEY.load(Acquire);
        // SAFETY: the key was made by `watch` and is never deleted.
        key == 0
            || unsafe {
                libc::pthread_setspecific((key - 1) as libc::pthread_key_t, local.as_ptr().cast())
            } == 0
    }
}

#[cfg(not(unix))]
mod threads {
    //! A thread-local object, whose destructor runs when a thread ends.
    use super::*;
    use std::cell::Cell;

    struct AtExit(Cell<*mut Local>);

    impl Drop for AtExit {
        fn drop(&mut self) {
            thread_ends(self.0.get().cast());
        }
    }

    thread_local! {
        static AT_EXIT: AtExit = const { AtExit(Cell::new(ptr::null_mut())) };
    }

    pub(super) fn watch() {}

    pub(super) fn tell_end(local: NonNull<Local>) -> bool {
        // A thread that is ending already keeps its attachment until the process ends.
        let _ = AT_EXIT.try_with(|end| end.0.set(local.as_ptr()));
        true
    }
}

#[cfg(unix)]
mod forks {
    use super::*;

    /// 1 once the handlers are registered.
    static WATCHED: AtomicU32 = AtomicU32::new(0);

    /// Registers the fork handlers; `false` without memory for them.
    pub(super) fn watch() -> bool {
        if WATCHED.compare_exchange(0, 1, AcqRel, Acquire).is_err() {
            return true;
        }
        // SAFETY: the handlers take locks that no thread keeps, and release them.
        let told = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) } == 0;
        if !told {
            WATCHED.store(0, Release);
        }
        told
    }

    fn made() -> Option<&'static Shared> {
        // SAFETY: a published manager is never freed.
        unsafe { GLOBAL.load(Acquire).as_ref() }
    }

    /// This thread's attachment, if it has one.
    fn attached() -> Option<&'static Local> {
        let local = tls::get();
        // SAFETY: the word holds an attachment that `attach` made, which lives as long as this
        // thread is attached.
        (local.addr() > GONE.addr()).then(|| unsafe { &*local.cast() })
    }

    /// The manager whose locks the handlers after the fork must release; another thread may make a
    /// manager meanwhile. The forking thread writes and reads this word. Other forking threads wait
    /// in `hold`.
    static HELD: AtomicPtr<Shared> = AtomicPtr::new(ptr::null_mut());

    unsafe extern "C" fn before() {
        if let Some(shared) = made() {
            shared.hold();
            HELD.store(ptr::from_ref(shared).cast_mut(), Relaxed);
        }
    }

    fn release() -> Option<&'static Shared> {
        // SAFETY: `before` stored it, and it is never freed.
        let shared = unsafe { HELD.swap(ptr::null_mut(), Relaxed).as_ref() }?;
        shared.let_go();
        Some(shared)
    }

    unsafe extern "C" fn after() {
        release();
    }

    unsafe extern "C" fn in_child() {
        if let Some(shared) = release() {
            shared.only(attached().map(|local| local.published.address()));
        }
    }
}

#[cfg(not(unix))]
mod forks {
    pub(super) fn watch() -> bool {
        true
    }
}
