//! The C ABI: the functions `tl_*` of the header `leasehold_memory.h`, which documents them.
//!
//! This module translates between C types and the process's manager (`global.rs`). Each thread
//! attaches at its first call and detaches when it ends. The module must not decide anything.
//!
//! # Rules for all functions
//! - No function panics, unwinds or aborts. A misuse is counted and has no effect, and so is a call
//!   that finds no memory.
//! - Any thread may call any function at any time, also from destructors and hooks, but not from
//!   signal handlers.
//! - A thread that has detached (destructors of its POSIX keys are running) may still acquire and
//!   release. Its other calls have no effect.

use std::ffi::{CStr, c_char, c_void};
use std::fmt::Write;
use std::ptr;

use crate::destroy::Released;
use crate::global::{self, local, present, shared, with_or_briefly};
use crate::local::{Caller, Local};
use crate::log::Cut;
use crate::misuse::{LastError, Misuse};
use crate::pool::{OpaqueTensor, TensorDestructor, TensorKey};
use crate::record::About;
use crate::shared::{CustomDestructor, ScopeEnterHook, ScopeExitHook, TensorDescriber};
use crate::stats::Stats;
use crate::table::Kind;
use crate::vec_ptr::VecOps;

// ---- scopes and frames. Functions that may find an abandoned frame pass on their caller's
// position (forgotten.rs).

/// Opens a scope.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_enter_scope() {
    match present() {
        Some(local) => local.enter_scope(),
        None => attached(Local::enter_scope),
    }
}

/// The slow path: the first call of a thread. (Separate, so that other calls test for nothing
/// else.)
#[cold]
#[inline(never)]
fn attached(f: impl FnOnce(&Local)) {
    if let Some(local) = local() {
        f(local);
    }
}

extern "C" fn exit_scope_at(sp: usize) {
    match present() {
        Some(local) => local.exit_scope(sp),
        None => attached(|local| local.exit_scope(sp)),
    }
}

extern "C" fn function_enter_at(num_slots: i64, sp: usize, pc: usize) {
    if let Some(local) = local() {
        local.function_enter(num_slots, Caller { sp, pc });
    }
}

extern "C" fn function_exit_at(sp: usize) {
    if let Some(local) = local() {
        local.function_exit(sp);
    }
}

extern "C" fn get_buffer_at(slot_id: i64, min_size: i64, sp: usize) -> *mut c_void {
    local().map_or(ptr::null_mut(), |local| local.get_buffer(slot_id, min_size, sp))
}

/// Defines the four functions that know their caller's position.
macro_rules! positioned {
    ($($(#[$doc:meta])* $name:ident($($arg:ident: $ty:ty),*) $(-> $ret:ty)? = $at:ident,
        x86_64 $x86:tt, aarch64 $arm:tt, else ($($rest:expr),*);)*) => { $(
        $(#[$doc])*
        #[cfg(all(unix, not(miri), target_arch = "x86_64"))]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            positioned!(@asm $x86, $at)
        }
        $(#[$doc])*
        #[cfg(all(unix, not(miri), target_arch = "aarch64"))]
        #[unsafe(no_mangle)]
        #[unsafe(naked)]
        pub extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            positioned!(@asm $arm, $at)
        }
        $(#[$doc])*
        #[cfg(not(all(unix, not(miri), any(target_arch = "x86_64", target_arch = "aarch64"))))]
        #[unsafe(no_mangle)]
        pub extern "C" fn $name($($arg: $ty),*) $(-> $ret)? {
            $at($($arg,)* $($rest),*)
        }
    )* };
    (@asm ($($line:literal),*), $at:ident) => { std::arch::naked_asm!($($line,)* at = sym $at) };
}

positioned! {
    /// Closes the current scope and releases what is registered in it.
    tl_mem_exit_scope() = exit_scope_at,
        x86_64 ("mov rdi, rsp", "jmp {at}"), aarch64 ("mov x0, sp", "b {at}"), else (0);
    /// Opens a scope and a frame with `num_slots` slots.
    tl_mem_function_enter(num_slots: i64) = function_enter_at,
        x86_64 ("mov rsi, rsp", "mov rdx, [rsp]", "jmp {at}"), aarch64 ("mov x1, sp", "mov x2, x30", "b {at}"), else (0, 0);
    /// As [`tl_mem_function_exit`], by a call that the compiler makes no jump of.
    tl_mem_function_exit_notail() = function_exit_at,
        x86_64 ("mov rdi, rsp", "jmp {at}"), aarch64 ("mov x0, sp", "b {at}"), else (0);
    /// A buffer of at least `min_size` bytes in a slot of the current frame.
    tl_mem_get_buffer(slot_id: i64, min_size: i64) -> *mut c_void = get_buffer_at,
        x86_64 ("mov rdx, rsp", "jmp {at}"), aarch64 ("mov x2, sp", "b {at}"), else (0);
}

/// Closes the newest frame with every scope left open in it, and frees its buffers. Compilers make
/// a jump of a function's last call. So the position says nothing here.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_function_exit() {
    function_exit_at(0);
}

/// The present position, for [`tl_mem_unwind`]; 0 when the thread has detached.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_mark() -> i64 {
    local().map_or(0, Local::mark)
}

/// Closes every frame and scope opened since the mark.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_unwind(mark: i64) {
    if let Some(local) = local() {
        local.unwind(mark);
    }
}

/// Closes every frame and scope of this thread, including the content of the outermost one. A
/// program must call it before its thread-local objects are destroyed. Within a destructor or hook
/// the call is a misuse.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_close_thread() {
    if let Some(local) = local() {
        local.close_all();
    }
}

// ---- registration

#[inline(always)]
fn register(ptr: *mut c_void, about: About) {
    if let Some(local) = local() {
        local.register(ptr.expose_provenance(), about);
    }
}

/// Registers memory from `malloc`. See
/// [`MemoryManager::register_struct`](crate::MemoryManager::register_struct).
///
/// # Safety
/// - `ptr` is null or a block of the C allocator that no other code frees.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_struct(ptr: *mut c_void) {
    register(ptr, About::kind(Kind::Struct));
}

/// As [`tl_mem_register_struct`], with a name for leak reports.
///
/// # Safety
/// - As for [`tl_mem_register_struct`].
/// - `name` is null or a C string.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_struct_named(ptr: *mut c_void, name: *const c_char) {
    if let Some(local) = local() {
        // SAFETY: by the caller's promise.
        let name = unsafe { local.intern(name) };
        local.register(ptr.expose_provenance(), About { name, ..About::kind(Kind::Struct) });
    }
}

/// As [`tl_mem_register_struct_named`], with the size in bytes, so that live bytes and leak reports
/// know it.
///
/// # Safety
/// - As for [`tl_mem_register_struct_named`].
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_struct_sized(
    ptr: *mut c_void,
    name: *const c_char,
    size: i64,
) {
    if let Some(local) = local() {
        if size < 0 {
            local.misuse(Misuse::Size, ptr.addr(), size);
        }
        // SAFETY: by the caller's promise.
        let name = unsafe { local.intern(name) };
        let size = u64::try_from(size).unwrap_or(0);
        local.register(ptr.expose_provenance(), About { name, size, ..About::kind(Kind::Struct) });
    }
}

/// Registers a tensor.
///
/// # Safety
/// - `ptr` is null or a tensor that the tensor destructor may destroy and that no other code
///   destroys.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_tensor(ptr: *mut OpaqueTensor) {
    register(ptr.cast(), About::kind(Kind::Tensor));
}

/// Registers a vector of pointers ([`VecPtr`](crate::VecPtr)).
///
/// # Safety
/// - As for [`MemoryManager::register_vec_ptr`](crate::MemoryManager::register_vec_ptr).
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_vec_ptr(ptr: *mut c_void) {
    register(ptr, About::kind(Kind::VecPtr));
}

/// Registers a container of pointers that `ops` handles. If `ops` is null, the call has no effect.
///
/// # Safety
/// - `ptr` is null or a container for which the functions of `ops` may be called, on any thread
///   that releases it last.
/// - `ops` is null or points to functions that are never changed or moved.
/// - Each element brings one count with it, or is null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_container(ptr: *mut c_void, ops: *const VecOps) {
    if !ops.is_null() {
        register(ptr, About { destructor: ops.expose_provenance(), ..About::kind(Kind::VecPtr) });
    }
}

/// Registers an object with its own destructor. If the destructor is null, the call has no effect.
///
/// # Safety
/// - `ptr` is null or an object for which `destructor` may be called, on any thread that releases
///   it last.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_register_custom(
    ptr: *mut c_void,
    destructor: Option<CustomDestructor>,
) {
    if let Some(destructor) = destructor {
        let destructor = (destructor as *mut c_void).expose_provenance();
        register(ptr, About { destructor, ..About::kind(Kind::Custom) });
    }
}

/// Registers a known object again, with its kind.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_register_ptr(ptr: *mut c_void) {
    if let Some(local) = local() {
        local.register_known(ptr.addr());
    }
}

/// Removes the newest record in the nearest enclosing scope that has one; the count stays.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_unregister(ptr: *mut c_void) {
    if let Some(local) = local() {
        local.unregister(ptr.addr(), 0);
    }
}

/// Moves a record from the current scope to its parent.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_promote(ptr: *mut c_void) {
    if let Some(local) = local() {
        local.promote(ptr.addr());
    }
}

/// 1 if a scope of this thread has a record of the object.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_is_registered(ptr: *mut c_void) -> i32 {
    local().is_some_and(|local| local.is_registered(ptr.addr())).into()
}

// ---- counts

/// Adds a count.
#[unsafe(no_mangle)]
pub extern "C" fn tl_ptr_acquire(ptr: *mut c_void) {
    with_or_briefly(|local| local.acquire(ptr.addr(), 1));
}

/// Removes a count; the last one destroys the object.
#[unsafe(no_mangle)]
pub extern "C" fn tl_ptr_release(ptr: *mut c_void) {
    with_or_briefly(|local| local.release(ptr.addr()));
}

/// As [`tl_ptr_acquire`].
#[unsafe(no_mangle)]
pub extern "C" fn tl_tensor_acquire(ptr: *mut OpaqueTensor) {
    with_or_briefly(|local| local.acquire(ptr.addr(), 1));
}

/// As [`tl_ptr_release`].
#[unsafe(no_mangle)]
pub extern "C" fn tl_tensor_release(ptr: *mut OpaqueTensor) {
    with_or_briefly(|local| local.release(ptr.addr()));
}

/// Adds a count; an unknown object gets two.
#[unsafe(no_mangle)]
pub extern "C" fn tl_ptr_inc_ref(ptr: *mut c_void) {
    with_or_briefly(|local| local.acquire(ptr.addr(), 2));
}

/// Removes a count. 1: the caller must free the object.
#[unsafe(no_mangle)]
pub extern "C" fn tl_ptr_dec_ref(ptr: *mut c_void) -> i32 {
    with_or_briefly(|local| local.dec_ref(ptr.addr())).unwrap_or(false).into()
}

/// As [`tl_ptr_release`]; 1 if the object was found and released.
#[unsafe(no_mangle)]
pub extern "C" fn tl_ptr_release_bool(ptr: *mut c_void) -> i32 {
    with_or_briefly(|local| matches!(local.release(ptr.addr()), Released::Counted | Released::Died))
        .unwrap_or(false)
        .into()
}

// ---- hooks and limits

/// Sets the function that destroys tensors; null: none.
///
/// # Safety
/// - The function may be called with any tensor registered, on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_set_tensor_destructor(hook: Option<TensorDestructor>) {
    if let Some(shared) = shared() {
        shared.set_tensor_destructor(hook);
    }
}

/// Sets the function that gives a tensor's pool key; null: none.
///
/// # Safety
/// - The function may be called with any tensor registered, on any thread.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_set_tensor_describer(hook: Option<TensorDescriber>) {
    if let Some(shared) = shared() {
        shared.set_tensor_describer(hook);
    }
}

/// Sets the functions that run when a scope opens and closes. If one is null, no hooks run.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_set_scope_hooks(
    enter: Option<ScopeEnterHook>,
    exit: Option<ScopeExitHook>,
) {
    if let Some(shared) = shared() {
        shared.set_scope_hooks(enter.zip(exit));
    }
}

// ---- pool

/// Takes a described tensor out of the pool; null if the pool has none.
#[unsafe(no_mangle)]
pub extern "C" fn tl_pool_acquire(
    num_elements: i64,
    dtype_id: u8,
    device_id: u8,
) -> *mut OpaqueTensor {
    let Some(local) = local() else { return ptr::null_mut() };
    let elements = u64::try_from(num_elements).ok();
    let Some(key) = elements.and_then(|n| TensorKey::from_ids(n, dtype_id, device_id)) else {
        local.misuse(Misuse::TensorKey, 0, num_elements);
        return ptr::null_mut();
    };
    local.shared.pool_acquire(key, local.me).unwrap_or(ptr::null_mut())
}

/// Destroys pooled tensors until at most `bytes` remain; returns the bytes freed.
#[unsafe(no_mangle)]
pub extern "C" fn tl_pool_trim(bytes: i64) -> i64 {
    let Some(local) = local() else { return 0 };
    local.trim_pool(u64::try_from(bytes).unwrap_or(0)) as i64
}

// ---- figures

/// Tensors in the pool.
#[unsafe(no_mangle)]
pub extern "C" fn tl_get_pool_count() -> i64 {
    shared().map_or(0, |shared| shared.pools.tensors()) as i64
}

/// Live tensors with a count.
#[unsafe(no_mangle)]
pub extern "C" fn tl_get_refcount_count() -> i64 {
    shared().map_or(0, |shared| shared.table.totals().tensors) as i64
}

/// Live objects with a count, of every kind.
#[unsafe(no_mangle)]
pub extern "C" fn tl_get_object_count() -> i64 {
    shared().map_or(0, |shared| shared.table.totals().live) as i64
}

/// This thread's depth; 1 at rest, 0 after the thread has detached.
#[unsafe(no_mangle)]
pub extern "C" fn tl_get_scope_depth() -> i64 {
    local().map_or(0, |local| i64::from(local.depth()))
}

/// Fills in the figures. `stats->size` is the size of the caller's struct. Returns 0, or -1 for
/// null or a size under 8.
///
/// # Safety
/// - `stats` is null or points to `stats->size` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_stats(stats: *mut Stats) -> i32 {
    if stats.is_null() {
        return -1;
    }
    // SAFETY: the caller's struct starts with its size.
    let size = unsafe { (*stats).size };
    if size < 8 {
        return -1;
    }
    if let Some(local) = local() {
        local.report_live();
    }
    let mut now = Stats { size, ..shared().map(|shared| shared.published()).unwrap_or_default() };
    global::add_uncounted(&mut now.misuses);
    let bytes = size.min(size_of::<Stats>() as u64) as usize;
    // SAFETY: both have at least that many bytes, and `Stats` is plain numbers without padding.
    unsafe { ptr::copy_nonoverlapping((&raw const now).cast::<u8>(), stats.cast::<u8>(), bytes) };
    0
}

/// The number of this thread's misuses of a kind (`TL_MISUSE_*`); -1 for an unknown kind.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_misuses(kind: i32) -> i64 {
    let misuse = usize::try_from(kind).ok().and_then(|i| Misuse::ALL.get(i).copied());
    misuse.zip(local()).map_or(-1, |(misuse, local)| local.misuses(misuse) as i64)
}

/// Writes the text of `write` to `buf` as a C string, cut to fit. Returns the full length.
/// Allocates nothing.
///
/// # Safety
/// - `buf` is null or has `len` writable bytes.
unsafe fn hand_out(buf: *mut c_char, len: usize, write: impl FnOnce(&mut Cut<'_>)) -> usize {
    if buf.is_null() || len == 0 {
        let mut measured = Cut::new(&mut []);
        write(&mut measured);
        return measured.length;
    }
    // SAFETY: `buf` has `len` writable bytes, by the caller's promise. Old contents are overwritten
    // before any read.
    unsafe { buf.write_bytes(0, len) };
    // SAFETY: `len` bytes that have just been written, of which the last stays 0.
    let mut text = Cut::new(unsafe { std::slice::from_raw_parts_mut(buf.cast(), len - 1) });
    write(&mut text);
    text.length
}

/// Writes the description of this thread's last misuse. Returns the length of the full text, 0
/// without one.
///
/// # Safety
/// - `buf` is null or has `len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_last_error(buf: *mut c_char, len: usize) -> usize {
    let error = match local() {
        Some(local) => local.last_error(),
        None if global::gone() => None,
        None => Some(LastError { misuse: Misuse::OutOfMemory, address: 0, value: 0 }),
    };
    let write = |text: &mut Cut<'_>| {
        if let Some(error) = error {
            // The text is cut to the buffer.
            let _ = write!(text, "{error}");
        }
    };
    // SAFETY: by the caller's promise.
    unsafe { hand_out(buf, len, write) }
}

/// Writes the live objects, one line for each kind and name. Returns the length of the full text.
///
/// # Safety
/// - `buf` is null or has `len` writable bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn tl_mem_leak_report(buf: *mut c_char, len: usize) -> usize {
    let groups = local()
        .map(|local| local.leak_groups().map_err(|_| local.misuse(Misuse::OutOfMemory, 0, 0)));
    let write = |text: &mut Cut<'_>| {
        for group in groups.into_iter().flatten().flatten() {
            // The text is cut to the buffer.
            let _ = group.write(text);
        }
    };
    // SAFETY: by the caller's promise.
    unsafe { hand_out(buf, len, write) }
}

/// The version of the library.
#[unsafe(no_mangle)]
pub extern "C" fn tl_mem_version() -> *const c_char {
    const VERSION: &CStr =
        match CStr::from_bytes_with_nul(concat!(env!("CARGO_PKG_VERSION"), "\0").as_bytes()) {
            Ok(version) => version,
            Err(_) => panic!("a version has no NUL"),
        };
    VERSION.as_ptr()
}
