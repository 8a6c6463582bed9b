//! The process's one manager, the one behind the C ABI: how threads attach to it and leave, and
//! what happens when the process forks.
//!
//! # Threads
//! A thread attaches at its first call. When it ends, the destructor of a POSIX key detaches it;
//! the C library runs that after the destructors of all thread-local objects, and does not run it
//! when the process exits. So nothing of the program's is called there ([`Local::detach_quietly`]),
//! and at exit nothing happens at all.
//!
//! # Memory
//! Nothing here ends the process where there is no memory: the call that wanted to attach is then
//! without effect, and is counted.
//!
//! # Forks
//! Before a fork every lock is taken, so that the child finds everything whole; after it both
//! processes let go. The child has one thread, the one that forked, with its attachment; what the
//! others' scopes held stays alive there.
//!
//! It must not know what the calls do.

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

/// The manager; null until the first call that finds memory for it. (No lock guards its making: a
/// child of a fork may find that half done.)
static GLOBAL: AtomicPtr<Shared> = AtomicPtr::new(ptr::null_mut());
/// Calls that found no memory to attach.
static REFUSED: AtomicU64 = AtomicU64::new(0);
/// Tensors of pools of no manager for which there was no destructor.
static LOST: AtomicU64 = AtomicU64::new(0);

/// The manager; `None` without memory for it.
#[inline]
pub(crate) fn shared() -> Option<&'static Shared> {
    // SAFETY: what is published is never taken back.
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
        // SAFETY: it is published now, and never taken back.
        Ok(_) => Some(unsafe { new.as_ref() }),
        Err(other) => {
            // SAFETY: another thread was faster, and nobody has seen this one.
            drop(unsafe { Owned::from_raw(new) });
            // SAFETY: not null, and published.
            Some(unsafe { &*other })
        }
    }
}

/// What the thread's word (`tls.rs`) holds once the thread has detached; null before it attaches.
const GONE: *const Local = ptr::without_provenance(1);

/// This thread's attachment, made at the first call. `None` once the thread has detached, and
/// without memory (which is counted).
#[inline(always)]
pub(crate) fn local() -> Option<&'static Local> {
    present().or_else(|| attach(tls::get()))
}

/// This thread's attachment, if it is there already.
#[inline(always)]
pub(crate) fn present() -> Option<&'static Local> {
    let local = tls::get();
    // SAFETY: the word holds what `attach` made. Callers use the reference during one call; the
    // thread detaches when none is in progress, and nobody else frees it.
    if local.addr() > GONE.addr() { Some(unsafe { &*local }) } else { None }
}

/// Whether this thread has detached.
pub(crate) fn gone() -> bool {
    tls::get() == GONE
}

/// A call was without effect for want of memory to attach.
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
fn attach(state: *const Local) -> Option<&'static Local> {
    if state == GONE {
        return None;
    }
    let Some(local) = new_local() else { return refuse() };
    tls::set(local.as_ptr());
    if !threads::tell_end(local) {
        tls::set(ptr::null());
        // SAFETY: just made, and nobody has seen it.
        drop(unsafe { Owned::from_raw(local) });
        return refuse();
    }
    // SAFETY: just made, and freed when the thread ends.
    Some(unsafe { &*local.as_ptr() })
}

/// Runs `f` with this thread's attachment, or with one for just this call if the thread has
/// detached.
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
    tls::set(local.as_ptr());
    // SAFETY: just made; freed below.
    let result = f(unsafe { local.as_ref() });
    // SAFETY: the program made this call, so that what it releases may call the program. Callbacks
    // still find the attachment.
    unsafe { local.as_ref() }.detach();
    tls::set(GONE);
    // SAFETY: made above, and the word no longer leads to it.
    drop(unsafe { Owned::from_raw(local) });
    Some(result)
}

/// Calls that were without effect for want of memory, and tensors lost in pools of no manager, by
/// kind of misuse.
pub(crate) fn add_uncounted(misuses: &mut [u64]) {
    misuses[Misuse::OutOfMemory as usize] += REFUSED.load(Relaxed);
    misuses[Misuse::NoDestructor as usize] += LOST.load(Relaxed);
}

/// Destroys a tensor of a pool that has no destructor of its own.
///
/// # Safety
/// - The process's tensor destructor may be called with it, and nobody uses it any more.
pub(crate) unsafe fn destroy_tensor(tensor: *mut OpaqueTensor) {
    match shared().and_then(Shared::tensor_destructor) {
        // SAFETY: by the caller's promise.
        Some(destroy) => unsafe { destroy(tensor) },
        None => {
            LOST.fetch_add(1, Relaxed);
        }
    }
}

/// The thread ends.
extern "C" fn thread_ends(local: *mut c_void) {
    let Some(local) = NonNull::new(local.cast::<Local>()) else { return };
    if tls::get() != local.as_ptr() {
        return;
    }
    // SAFETY: the word held what `attach` made, and only this function frees it, once.
    unsafe { local.as_ref() }.detach_quietly();
    tls::set(GONE);
    // SAFETY: the word no longer leads to it.
    drop(unsafe { Owned::from_raw(local) });
}

#[cfg(unix)]
mod threads {
    //! A POSIX key, whose destructor is called when a thread ends.
    use super::*;

    /// The key and one; 0 before there is one.
    static KEY: AtomicUsize = AtomicUsize::new(0);

    /// Without a key (a process has a thousand) attachments stay until the process ends.
    pub(super) fn watch() {
        let mut key = 0;
        // SAFETY: the key is written to a variable of ours, and the destructor has the right type.
        if KEY.load(Relaxed) != 0 || unsafe { libc::pthread_key_create(&raw mut key, Some(ends)) } != 0 {
            return;
        }
        if KEY.compare_exchange(0, key as usize + 1, AcqRel, Relaxed).is_err() {
            // SAFETY: the key was made above and is not used.
            unsafe { libc::pthread_key_delete(key) };
        }
    }

    unsafe extern "C" fn ends(local: *mut c_void) {
        thread_ends(local);
    }

    /// False without memory.
    pub(super) fn tell_end(local: NonNull<Local>) -> bool {
        let key = KEY.load(Acquire);
        // SAFETY: the key was made by `watch` and is never deleted.
        key == 0 || unsafe { libc::pthread_setspecific((key - 1) as libc::pthread_key_t, local.as_ptr().cast()) } == 0
    }
}

#[cfg(not(unix))]
mod threads {
    //! A thread-local object, whose destructor is called when a thread ends.
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

    /// Whether forks are told of; false without memory for that.
    pub(super) fn watch() -> bool {
        if WATCHED.compare_exchange(0, 1, AcqRel, Acquire).is_err() {
            return true;
        }
        // SAFETY: the handlers take locks that no thread keeps, and let go of them.
        let told = unsafe { libc::pthread_atfork(Some(before), Some(after), Some(in_child)) } == 0;
        if !told {
            WATCHED.store(0, Release);
        }
        told
    }

    fn made() -> Option<&'static Shared> {
        // SAFETY: what is published is never taken back.
        unsafe { GLOBAL.load(Acquire).as_ref() }
    }

    /// This thread's attachment, if it has one.
    fn attached() -> Option<&'static Local> {
        let local = tls::get();
        // SAFETY: the word holds what `attach` made, which lives as long as this thread is
        // attached.
        (local.addr() > GONE.addr()).then(|| unsafe { &*local })
    }

    /// Whether the handlers after the fork have something to let go: a manager may be made
    /// meanwhile. Written by the thread that forks, read by the same one; others that fork too wait
    /// in `hold`.
    static HELD: AtomicPtr<Shared> = AtomicPtr::new(ptr::null_mut());

    unsafe extern "C" fn before() {
        if let Some(shared) = made() {
            shared.hold(attached().map_or(0, |local| local.me));
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
