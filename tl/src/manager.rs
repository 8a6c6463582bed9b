//! The Rust API: a value is one thread's attachment to a manager, its own or a shared one.
//!
//! This module translates; `local.rs` and its neighbours do the work.

use std::ffi::c_void;

use leasehold_core::sync::Arc;

use crate::destroy::Released;
use crate::local::{Caller, Local};
use crate::misuse::{LastError, Misuse};
use crate::pool::{OpaqueTensor, TensorDestructor, TensorKey};
use crate::record::About;
use crate::report::LeakReport;
use crate::shared::{
    Config, CustomDestructor, ScopeEnterHook, ScopeExitHook, Shared, SharedRef, TensorDescriber,
};
use crate::stats::Stats;
use crate::table::Kind;
use crate::vec_ptr::{RUST_VEC, VecOps, VecPtr};

/// Scopes, frames and counts for objects that are known by address.
///
/// Each value has its own scopes and frames. [`new`](Self::new) also makes a new object table and
/// tensor pool, which [`attach`](Self::attach) shares with another thread. A value may move between
/// threads, but serves one thread at a time. The drop of a value closes its frames and scopes,
/// including the outermost one. Methods block only on the short locks of table and pool.
///
/// [`with_global`](Self::with_global) reaches the manager behind the C functions.
///
/// The design deviates from document 004 in three points. No global mutex surrounds the manager.
/// Methods that take ownership of memory are `unsafe`. All methods take `&self`, because
/// destructors and hooks call back into the manager. A forked child must not use a manager that
/// other threads were using; the manager behind the C functions survives forks.
///
/// ```
/// use leasehold_memory::MemoryManager;
/// let mut memory = MemoryManager::new();
/// memory.enter_scope();
/// // SAFETY: the block comes from the C allocator and no other code frees it.
/// let object = unsafe {
///     let object = libc::malloc(64);
///     memory.register_struct(object);
///     object
/// };
/// assert!(memory.is_registered(object));
/// memory.acquire_ptr(object); // a second owner
/// memory.exit_scope(); // releases the first
/// assert!(memory.release_ptr(object)); // and here it is freed
/// assert_eq!(memory.object_count(), 0);
/// ```
#[repr(transparent)]
pub struct MemoryManager {
    local: Local,
}

// SAFETY: a `Local` is not tied to the thread that made it. Its pointers lead to memory that it
// owns or that its callers handed over. It is not `Sync`, so one thread at a time uses it.
unsafe impl Send for MemoryManager {}

impl Default for MemoryManager {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MemoryManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryManager")
            .field("thread", &self.local.me)
            .field("depth", &self.local.depth())
            .finish()
    }
}

impl MemoryManager {
    /// A new manager with the default [`Config`].
    pub fn new() -> Self {
        Self::with_config(Config::default())
    }

    /// A new manager.
    pub fn with_config(config: Config) -> Self {
        let shared = Shared::new(config, None).unwrap_or_else(|_| no_memory::<Shared>());
        Self::attached(SharedRef::counted(Arc::new(shared)))
    }

    /// Another attachment to the same objects and pool, with its own scopes and frames, for another
    /// thread.
    pub fn attach(&self) -> Self {
        Self::attached(self.local.shared.clone())
    }

    fn attached(shared: SharedRef) -> Self {
        Self { local: Local::new(shared).unwrap_or_else(|_| no_memory::<Local>()) }
    }

    /// Runs `f` with the calling thread's attachment to the manager behind the C functions
    /// ([`ffi`](crate::ffi)). `f` sees the scopes and frames of the calling compiled code. `None`
    /// without memory to attach, and in a thread that is ending.
    ///
    /// ```
    /// use leasehold_memory::{MemoryManager, ffi};
    /// ffi::tl_mem_enter_scope();
    /// // SAFETY: the block comes from the C allocator and no other code frees it.
    /// let object = unsafe {
    ///     let object = libc::malloc(64);
    ///     ffi::tl_mem_register_struct(object);
    ///     object
    /// };
    /// let seen = MemoryManager::with_global(|m| (m.is_registered(object), m.scope_depth()));
    /// assert_eq!(seen, Some((true, 2)));
    /// MemoryManager::with_global(MemoryManager::exit_scope);
    /// assert_eq!(ffi::tl_get_object_count(), 0);
    /// ```
    #[cfg(not(loom))]
    pub fn with_global<R>(f: impl FnOnce(&MemoryManager) -> R) -> Option<R> {
        crate::global::local().map(|local| {
            // SAFETY: a `MemoryManager` is a `Local` (`repr(transparent)`), and this one lives as
            // long as its thread is attached. The reference cannot leave this call, and so not this
            // thread.
            f(unsafe { &*std::ptr::from_ref(local).cast::<MemoryManager>() })
        })
    }

    // ---- scopes

    /// Opens a scope.
    #[doc(alias = "tl_mem_enter_scope")]
    pub fn enter_scope(&self) {
        self.local.enter_scope();
    }

    /// Closes the current scope and releases each of its records once, the newest first. Objects
    /// with other counts survive. At the outermost scope, and at a function's own scope, the call
    /// is a counted misuse without effect.
    #[doc(alias = "tl_mem_exit_scope")]
    pub fn exit_scope(&self) {
        self.local.exit_scope(0);
    }

    /// The depth of the current scope; 1 at rest.
    #[doc(alias = "tl_get_scope_depth")]
    pub fn scope_depth(&self) -> usize {
        self.local.depth() as usize
    }

    /// The present position, for [`unwind`](Self::unwind).
    pub fn mark(&self) -> i64 {
        self.local.mark()
    }

    /// Closes every frame and scope opened since `mark`, for early error returns. A mark that does
    /// not enclose the present position is a counted misuse.
    pub fn unwind(&self, mark: i64) {
        self.local.unwind(mark);
    }

    // ---- registration

    /// Registers memory from the C allocator (`malloc`): count 1 and a record in the current scope.
    /// A known object gets another count and record. The last release calls `free`; the compiler is
    /// responsible for the fields. Null has no effect.
    ///
    /// # Safety
    /// - `ptr` is null or a block of the C allocator that no other code frees.
    /// - It is not used after its last release. Any code that knows its address can release it.
    #[doc(alias = "tl_mem_register_struct")]
    pub unsafe fn register_struct(&self, ptr: *mut c_void) {
        self.local.register(ptr.expose_provenance(), About::kind(Kind::Struct));
    }

    /// Like [`register_struct`](Self::register_struct), with a name for leak reports and the size
    /// in bytes (0: unknown).
    ///
    /// # Safety
    /// - As for [`register_struct`](Self::register_struct).
    #[doc(alias = "tl_mem_register_struct_named")]
    pub unsafe fn register_struct_named(&self, ptr: *mut c_void, name: &std::ffi::CStr, size: u64) {
        // SAFETY: a `CStr` ends with a NUL.
        let name = unsafe { self.local.intern(name.as_ptr()) };
        self.local
            .register(ptr.expose_provenance(), About { name, size, ..About::kind(Kind::Struct) });
    }

    /// Registers a tensor. The last release gives it to the pool if the describer gives it a key;
    /// otherwise to the tensor destructor.
    ///
    /// # Safety
    /// - `ptr` is null or a tensor that this manager's tensor destructor may destroy, and that no
    ///   other code destroys.
    /// - It is not used after its last release.
    #[doc(alias = "tl_mem_register_tensor")]
    pub unsafe fn register_tensor(&self, ptr: *mut OpaqueTensor) {
        self.local.register(ptr.expose_provenance(), About::kind(Kind::Tensor));
    }

    /// Registers a [`VecPtr`]. The last release releases every element, then frees buffer and
    /// container.
    ///
    /// # Safety
    /// - `ptr` is null or points to a [`VecPtr`] whose two blocks come from the C allocator and
    ///   that no other code frees.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release.
    #[doc(alias = "tl_mem_register_vec_ptr")]
    pub unsafe fn register_vec_ptr(&self, ptr: *mut c_void) {
        self.local.register(ptr.cast::<VecPtr>().expose_provenance(), About::kind(Kind::VecPtr));
    }

    /// Registers a Rust vector of counted pointers. The last release releases every element, then
    /// drops the vector. Until then its owners may change it through the pointer.
    ///
    /// ```
    /// use leasehold_memory::MemoryManager;
    /// let memory = MemoryManager::new();
    /// memory.enter_scope();
    /// // SAFETY: each block comes from the C allocator and is counted once more for the vector.
    /// // The vector is boxed and given away.
    /// unsafe {
    ///     let element = libc::malloc(8);
    ///     memory.register_struct(element);
    ///     memory.acquire_ptr(element);
    ///     memory.register_vec(Box::into_raw(Box::new(vec![element])));
    /// }
    /// assert_eq!(memory.object_count(), 2);
    /// memory.exit_scope();
    /// assert_eq!(memory.object_count(), 0);
    /// ```
    ///
    /// # Safety
    /// - `vec` is null or comes from [`Box::into_raw`], and no other code frees it.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release, and no code changes it during a release.
    #[doc(alias = "tl_mem_register_vec_ptr")]
    pub unsafe fn register_vec(&self, vec: *mut Vec<*mut c_void>) {
        // SAFETY: the functions are for such a vector, which the caller gives up.
        unsafe { self.register_container(vec.cast(), &RUST_VEC) };
    }

    /// Registers a container of counted pointers with the functions for its layout. The last
    /// release releases every element, then destroys the container.
    ///
    /// # Safety
    /// - `ptr` is null or an object for which the functions of `ops` may be called, on any thread
    ///   that releases it last.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release.
    pub unsafe fn register_container(&self, ptr: *mut c_void, ops: &'static VecOps) {
        let destructor = std::ptr::from_ref(ops).expose_provenance();
        self.local
            .register(ptr.expose_provenance(), About { destructor, ..About::kind(Kind::VecPtr) });
    }

    /// Registers an object with its own destructor, which is called once, without any lock.
    ///
    /// # Safety
    /// - `ptr` is null or an object for which `destructor` may be called, on any thread that
    ///   releases it last.
    /// - It is not used after its last release.
    pub unsafe fn register_custom(&self, ptr: *mut c_void, destructor: CustomDestructor) {
        let destructor = (destructor as *mut c_void).expose_provenance();
        self.local
            .register(ptr.expose_provenance(), About { destructor, ..About::kind(Kind::Custom) });
    }

    /// Registers a known object again, with its kind. An unknown address is a counted misuse.
    #[doc(alias = "tl_mem_register_ptr")]
    pub fn register_ptr(&self, ptr: *mut c_void) {
        self.local.register_known(ptr.addr());
    }

    /// Removes the object's newest record from the **current scope** only. The count stays, and
    /// ownership moves to the caller.
    pub fn unregister(&self, ptr: *mut c_void) {
        self.local.unregister(ptr.addr(), self.local.depth());
    }

    /// Like [`unregister`](Self::unregister), in the nearest enclosing scope that has a record (the
    /// rule of the C ABI).
    #[doc(alias = "tl_mem_unregister")]
    pub fn unregister_nearest(&self, ptr: *mut c_void) {
        self.local.unregister(ptr.addr(), 0);
    }

    /// Moves the object's record from the current scope to the parent scope in one step.
    pub fn promote(&self, ptr: *mut c_void) {
        self.local.promote(ptr.addr());
    }

    /// Returns whether any scope of this attachment has a record of the object. O(1).
    pub fn is_registered(&self, ptr: *mut c_void) -> bool {
        self.local.is_registered(ptr.addr())
    }

    // ---- counts

    /// Adds a count. An unknown address becomes an untyped entry with count 1, whose last release
    /// frees nothing.
    #[doc(alias = "tl_ptr_acquire")]
    #[doc(alias = "tl_tensor_acquire")]
    pub fn acquire_ptr(&self, ptr: *mut c_void) {
        self.local.acquire(ptr.addr(), 1);
    }

    /// Removes a count; at zero the object is destroyed. Returns `true` if the object was found and
    /// released.
    #[doc(alias = "tl_ptr_release")]
    #[doc(alias = "tl_tensor_release")]
    pub fn release_ptr(&self, ptr: *mut c_void) -> bool {
        matches!(self.local.release(ptr.addr()), Released::Counted | Released::Died)
    }

    /// Adds a count. An unknown address becomes an untyped entry with count 2: the caller's and the
    /// new one.
    pub fn inc_ref(&self, ptr: *mut c_void) {
        self.local.acquire(ptr.addr(), 2);
    }

    /// Removes a count. Returns `true` if the count is zero or the address unknown. The manager has
    /// then removed the object, and the caller must free it.
    #[must_use = "on true the caller must free the object"]
    pub fn dec_ref(&self, ptr: *mut c_void) -> bool {
        self.local.dec_ref(ptr.addr())
    }

    // ---- frames

    /// Opens a scope and a frame with `num_slots` slots. More than 65,536 slots are a counted
    /// misuse, and the frame has none.
    #[doc(alias = "tl_mem_function_enter")]
    pub fn function_enter(&self, num_slots: usize) {
        self.local.function_enter(i64::try_from(num_slots).unwrap_or(i64::MAX), Caller::default());
    }

    /// Closes every scope since the newest frame was opened, then frees its buffers. A call without
    /// a frame is a counted misuse.
    #[doc(alias = "tl_mem_function_exit")]
    pub fn function_exit(&self) {
        self.local.function_exit(0);
    }

    /// A buffer of at least `min_size` bytes in a slot of the newest frame. If the present buffer
    /// is large enough, the call returns the same pointer, with its contents. Otherwise it returns
    /// a new buffer of unspecified contents; the old one stays readable until the frame ends.
    ///
    /// Without a frame, for an unknown slot, or without memory the call returns null and counts a
    /// misuse. The slot then keeps its buffer.
    #[doc(alias = "tl_mem_get_buffer")]
    pub fn get_buffer(&self, slot_id: usize, min_size: usize) -> *mut c_void {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.local.get_buffer(number(slot_id), number(min_size), 0)
    }

    // ---- hooks and limits

    /// Sets the function that destroys tensors from outside this crate. With `None` such tensors
    /// are lost, and a misuse is counted.
    ///
    /// # Safety
    /// - The function may be called with any tensor registered here, on any thread attached to this
    ///   manager.
    pub unsafe fn set_tensor_destructor(&self, hook: Option<TensorDestructor>) {
        self.local.shared.set_tensor_destructor(hook);
    }

    /// Sets the function that gives the pool a tensor's key. With `None` only tensors of this crate
    /// are pooled.
    ///
    /// # Safety
    /// - The function may be called with any tensor registered here, on any thread attached to this
    ///   manager.
    pub unsafe fn set_tensor_describer(&self, hook: Option<TensorDescriber>) {
        self.local.shared.set_tensor_describer(hook);
    }

    /// Sets the functions that run at the start of each scope and, with the returned value, at its
    /// end. Open scopes keep their hooks.
    pub fn set_scope_hooks(&self, hooks: Option<(ScopeEnterHook, ScopeExitHook)>) {
        self.local.shared.set_scope_hooks(hooks);
    }

    // ---- the pool of tensors

    /// Takes a described tensor out of the pool. The manager does not know the tensor until it is
    /// registered again.
    pub fn pool_acquire(
        &self,
        num_elements: usize,
        dtype_id: u8,
        device_id: u8,
    ) -> Option<*mut OpaqueTensor> {
        let Some(key) = TensorKey::from_ids(num_elements as u64, dtype_id, device_id) else {
            self.local.misuse(Misuse::TensorKey, 0, i64::from(dtype_id));
            return None;
        };
        self.local.shared.pool_acquire(key, self.local.me)
    }

    /// Destroys pooled tensors, of the least recently used keys first, until at most `bytes`
    /// remain. Returns the freed bytes.
    pub fn pool_trim(&self, bytes: u64) -> u64 {
        self.local.trim_pool(bytes)
    }

    /// Tensors in the pool.
    #[doc(alias = "tl_get_pool_count")]
    pub fn pool_count(&self) -> usize {
        self.local.shared.pools.tensors() as usize
    }

    // ---- figures

    /// Live tensors.
    #[doc(alias = "tl_get_refcount_count")]
    pub fn refcount_count(&self) -> usize {
        self.local.shared.table.totals().tensors as usize
    }

    /// Live objects of every kind.
    pub fn object_count(&self) -> usize {
        self.local.shared.table.totals().live as usize
    }

    /// All figures of this manager, over all its threads.
    pub fn stats(&self) -> Stats {
        self.local.report_live();
        self.local.shared.published()
    }

    /// The number of this attachment's misuses of a kind.
    pub fn misuses(&self, misuse: Misuse) -> u64 {
        self.local.misuses(misuse)
    }

    /// The newest misuse of this attachment.
    pub fn last_error(&self) -> Option<LastError> {
        self.local.last_error()
    }

    /// The live objects, by kind and name.
    pub fn leak_report(&self) -> LeakReport {
        self.local.leak_report()
    }
}

/// Ends the process as Rust does if memory is exhausted.
fn no_memory<T>() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<T>())
}
