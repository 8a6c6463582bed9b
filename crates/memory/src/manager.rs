//! The Rust API: one value is one thread's attachment to a manager of its own or a common one.
//!
//! It translates; what happens is in `local.rs` and its neighbours.

use std::ffi::{c_char, c_void};

use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::Ordering::Relaxed;

use crate::frame::Caller;
use crate::local::Local;
use crate::misuse::{LastError, Misuse};
use crate::pool::{OpaqueTensor, TensorDestructor, TensorKey};
use crate::record::{About, Released};
use crate::report::LeakReport;
use crate::shared::{Config, CustomDestructor, ScopeEnterHook, ScopeExitHook, Shared, SharedRef, TensorDescriber};
use crate::stats::Stats;
use crate::table::Kind;
use crate::vec_ptr::{RUST_VEC, VecOps, VecPtr};

/// Scopes, frames and counts for objects that are known by address.
///
/// Each value has its own scopes and frames; [`new`](Self::new) also makes a new object table and tensor pool, which
/// [`attach`](Self::attach) shares with another thread. A value may move between threads, but serves one at a time. Dropping it
/// closes its frames and scopes, the outermost included. No method blocks, except for the short locks of table and pool.
///
/// The manager behind the C functions is reached by [`with_global`](Self::with_global).
///
/// Deviates from document 004 in having no global mutex around it, in `unsafe` on the methods that take ownership of memory, and in
/// `&self`: destructors and hooks come back to the manager while it is at work. A child of a fork must not use a manager that other
/// threads were using; the one behind the C functions survives forks.
///
/// ```
/// use leasehold_memory::MemoryManager;
/// let mut memory = MemoryManager::new();
/// memory.enter_scope();
/// // SAFETY: the block comes from the C allocator and nobody else frees it.
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

// SAFETY: a `Local` is not tied to the thread that made it; its pointers are to memory that it owns or that its callers
// handed over, and `&self` on everything that changes it keeps it to one thread at a time.
unsafe impl Send for MemoryManager {}

impl Default for MemoryManager {
    fn default() -> Self {
        Self::new()
    }
}

impl std::fmt::Debug for MemoryManager {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("MemoryManager").field("thread", &self.local.me).field("depth", &self.local.depth()).finish()
    }
}

impl MemoryManager {
    /// A manager of its own, with the default [`Config`].
    pub fn new() -> Self {
        Self::with_config(Config::default())
    }

    /// A manager of its own.
    pub fn with_config(config: Config) -> Self {
        let shared = Shared::new(config, None).unwrap_or_else(|_| no_memory::<Shared>());
        Self::attached(SharedRef::counted(Arc::new(shared)))
    }

    /// Another attachment to the same objects and pool, with its own scopes and frames, for another thread.
    pub fn attach(&self) -> Self {
        Self::attached(self.local.shared.clone())
    }

    fn attached(shared: SharedRef) -> Self {
        Self { local: Local::new(shared).unwrap_or_else(|_| no_memory::<Local>()) }
    }

    /// Runs `f` with the calling thread's attachment to the manager behind the C functions ([`ffi`](crate::ffi)): with the very scopes and frames
    /// in which the compiled code that called is. `None` without memory to attach, and in a thread that is ending.
    ///
    /// ```
    /// use leasehold_memory::{MemoryManager, ffi};
    /// ffi::tl_mem_enter_scope();
    /// // SAFETY: the block comes from the C allocator and nobody else frees it.
    /// let object = unsafe {
    ///     let object = libc::malloc(64);
    ///     ffi::tl_mem_register_struct(object);
    ///     object
    /// };
    /// assert_eq!(MemoryManager::with_global(|m| (m.is_registered(object), m.scope_depth())), Some((true, 2)));
    /// MemoryManager::with_global(MemoryManager::exit_scope);
    /// assert_eq!(ffi::tl_get_object_count(), 0);
    /// ```
    #[cfg(not(loom))]
    pub fn with_global<R>(f: impl FnOnce(&MemoryManager) -> R) -> Option<R> {
        crate::global::local().map(|local| {
            // SAFETY: a `MemoryManager` is a `Local` (`repr(transparent)`), and this one lives as long as its thread is attached. The
            // reference cannot leave this call, and so not this thread.
            f(unsafe { &*std::ptr::from_ref(local).cast::<MemoryManager>() })
        })
    }

    // ---- scopes

    /// Opens a scope.
    #[doc(alias = "tl_mem_enter_scope")]
    pub fn enter_scope(&self) {
        self.local.enter_scope();
    }

    /// Closes the current scope: each of its records is released once, the newest first. What has other counts survives. At
    /// the outermost scope, and at a function's own, this is a counted misuse without effect.
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

    /// Closes every frame and scope opened since `mark`, as an early error return needs it. A mark that does not enclose the present
    /// position is a counted misuse.
    pub fn unwind(&self, mark: i64) {
        self.local.unwind(mark);
    }

    // ---- registration

    /// Registers memory from the C allocator (`malloc`): count 1 and a record in the current scope; if it is known, one count and
    /// one record more. Its last release is `free`; its fields are the compiler's business. Null: no effect.
    ///
    /// # Safety
    /// - `ptr` is null or a block of the C allocator that nobody else frees.
    /// - It is not used after its last release. Any code that knows its address can release it.
    #[doc(alias = "tl_mem_register_struct")]
    pub unsafe fn register_struct(&self, ptr: *mut c_void) {
        self.local.register(ptr.expose_provenance(), About::kind(Kind::Struct));
    }

    /// As [`register_struct`](Self::register_struct), with a name for leak reports and its size in bytes (0: unknown).
    ///
    /// # Safety
    /// - As for [`register_struct`](Self::register_struct).
    #[doc(alias = "tl_mem_register_struct_named")]
    pub unsafe fn register_struct_named(&self, ptr: *mut c_void, name: &std::ffi::CStr, size: u64) {
        // SAFETY: a `CStr` ends with a NUL.
        let name = unsafe { self.local.intern(name.as_ptr()) };
        self.local.register(ptr.expose_provenance(), About { name, size, ..About::kind(Kind::Struct) });
    }

    /// Registers a tensor. Its last release hands it to the pool if the describer gives it a key, else to the tensor destructor.
    ///
    /// # Safety
    /// - `ptr` is null or a tensor that this manager's tensor destructor may destroy, and that nobody else destroys.
    /// - It is not used after its last release.
    #[doc(alias = "tl_mem_register_tensor")]
    pub unsafe fn register_tensor(&self, ptr: *mut OpaqueTensor) {
        self.local.register(ptr.expose_provenance(), About::kind(Kind::Tensor));
    }

    /// Registers a [`VecPtr`]. Its last release releases every element, then frees buffer and container.
    ///
    /// # Safety
    /// - `ptr` is null or points to a [`VecPtr`] whose two blocks come from the C allocator and that nobody else frees.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release.
    #[doc(alias = "tl_mem_register_vec_ptr")]
    pub unsafe fn register_vec_ptr(&self, ptr: *mut c_void) {
        self.local.register(ptr.cast::<VecPtr>().expose_provenance(), About::kind(Kind::VecPtr));
    }

    /// Registers a Rust vector of counted pointers. Its last release releases every element, then drops the vector. Until then its owners may
    /// change it through the pointer.
    ///
    /// ```
    /// use leasehold_memory::MemoryManager;
    /// let memory = MemoryManager::new();
    /// memory.enter_scope();
    /// // SAFETY: each block comes from the C allocator and is counted once more for the vector; the vector is boxed and given away.
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
    /// - `vec` is null or comes from [`Box::into_raw`], and nobody else frees it.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release, and while it is released nobody changes it.
    #[doc(alias = "tl_mem_register_vec_ptr")]
    pub unsafe fn register_vec(&self, vec: *mut Vec<*mut c_void>) {
        // SAFETY: the functions are for such a vector, which the caller gives up.
        unsafe { self.register_container(vec.cast(), &RUST_VEC) };
    }

    /// Registers a container of counted pointers with the functions that know its layout. Its last release releases every element, then
    /// destroys the container.
    ///
    /// # Safety
    /// - `ptr` is null or something that the functions of `ops` may be called with, on whichever thread releases it last.
    /// - Each of its elements brings one count with it, or is null.
    /// - It is not used after its last release.
    pub unsafe fn register_container(&self, ptr: *mut c_void, ops: &'static VecOps) {
        let destructor = std::ptr::from_ref(ops).expose_provenance();
        self.local.register(ptr.expose_provenance(), About { destructor, ..About::kind(Kind::VecPtr) });
    }

    /// Registers an object with its own destructor, which is called once, outside every lock.
    ///
    /// # Safety
    /// - `ptr` is null or something that `destructor` may be called with, on whichever thread releases it last.
    /// - It is not used after its last release.
    pub unsafe fn register_custom(&self, ptr: *mut c_void, destructor: CustomDestructor) {
        let destructor = (destructor as *mut c_void).expose_provenance();
        self.local.register(ptr.expose_provenance(), About { destructor, ..About::kind(Kind::Custom) });
    }

    /// Registers an object that is known already once more, as what it is. Unknown: a counted misuse.
    #[doc(alias = "tl_mem_register_ptr")]
    pub fn register_ptr(&self, ptr: *mut c_void) {
        self.local.register_known(ptr.addr());
    }

    /// Removes the object's newest record from the **current scope** only; the count stays, ownership moves to the caller.
    pub fn unregister(&self, ptr: *mut c_void) {
        self.local.unregister(ptr.addr(), self.local.depth());
    }

    /// As [`unregister`](Self::unregister), in the nearest enclosing scope that has a record (the rule of the C ABI).
    #[doc(alias = "tl_mem_unregister")]
    pub fn unregister_nearest(&self, ptr: *mut c_void) {
        self.local.unregister(ptr.addr(), 0);
    }

    /// Moves the object's record from the current scope to the parent scope in one step.
    pub fn promote(&self, ptr: *mut c_void) {
        self.local.promote(ptr.addr());
    }

    /// Whether any scope of this attachment has a record of the object. O(1).
    pub fn is_registered(&self, ptr: *mut c_void) -> bool {
        self.local.is_registered(ptr.addr())
    }

    // ---- counts

    /// One count more. An unknown address becomes an untyped entry with count 1, whose last release frees nothing.
    #[doc(alias = "tl_ptr_acquire")]
    #[doc(alias = "tl_tensor_acquire")]
    pub fn acquire_ptr(&self, ptr: *mut c_void) {
        self.local.acquire(ptr.addr(), 1);
    }

    /// One count less; at zero the object is destroyed. True if it was found and released.
    #[doc(alias = "tl_ptr_release")]
    #[doc(alias = "tl_tensor_release")]
    pub fn release_ptr(&self, ptr: *mut c_void) -> bool {
        matches!(self.local.release(ptr.addr()), Released::Counted | Released::Died)
    }

    /// One count more. An unknown address becomes an untyped entry with count 2: the caller's and the new one.
    pub fn inc_ref(&self, ptr: *mut c_void) {
        self.local.acquire(ptr.addr(), 2);
    }

    /// One count less. True: the count is zero (or the address unknown), the manager has forgotten it, the caller must free it.
    #[must_use = "on true the caller must free the object"]
    pub fn dec_ref(&self, ptr: *mut c_void) -> bool {
        self.local.dec_ref(ptr.addr())
    }

    // ---- frames

    /// Opens a scope and a frame with `num_slots` slots (at most 65,536, else a counted misuse and none).
    #[doc(alias = "tl_mem_function_enter")]
    pub fn function_enter(&self, num_slots: usize) {
        self.local.function_enter(i64::try_from(num_slots).unwrap_or(i64::MAX), Caller::default());
    }

    /// Closes the newest frame: every scope opened since, then its buffers. Without a frame: a counted misuse.
    #[doc(alias = "tl_mem_function_exit")]
    pub fn function_exit(&self) {
        self.local.function_exit(0);
    }

    /// A buffer of at least `min_size` bytes in a slot of the newest frame. Enough there: the same pointer, contents kept. Too
    /// small: a new buffer of unspecified contents; the old one stays readable until the frame ends. Null, and a counted misuse,
    /// without a frame, for a slot that it does not have, or without memory; the slot then keeps its buffer.
    #[doc(alias = "tl_mem_get_buffer")]
    pub fn get_buffer(&self, slot_id: usize, min_size: usize) -> *mut c_void {
        let number = |n: usize| i64::try_from(n).unwrap_or(i64::MAX);
        self.local.get_buffer(number(slot_id), number(min_size), 0)
    }

    // ---- hooks and limits

    /// Sets what destroys tensors that are not this crate's own. `None`: such tensors are lost, and a misuse is counted.
    ///
    /// # Safety
    /// - The function may be called with any tensor registered here, on any thread attached to this manager.
    pub unsafe fn set_tensor_destructor(&self, hook: Option<TensorDestructor>) {
        self.local.shared.set_tensor_destructor(hook);
    }

    /// Sets what tells the pool a tensor's key. `None`: only tensors of this crate are pooled.
    ///
    /// # Safety
    /// - The function may be called with any tensor registered here, on any thread attached to this manager.
    pub unsafe fn set_tensor_describer(&self, hook: Option<TensorDescriber>) {
        self.local.shared.set_tensor_describer(hook);
    }

    /// Sets what runs at the start of each scope and, with the value it returned, at its end. Scopes that are open
    /// keep what they have.
    pub fn set_scope_hooks(&self, hooks: Option<(ScopeEnterHook, ScopeExitHook)>) {
        self.local.shared.set_scope_hooks(hooks);
    }

    /// Bytes of dead tensors that wait for the end of their scope; 0 turns the quarantine off.
    pub fn set_quarantine_bytes(&self, bytes: u64) {
        self.local.shared.quarantine_budget.store(bytes, Relaxed);
    }

    /// Names the place in the program to which registrations from now on belong, for leak reports; the empty string for none.
    pub fn set_call_site(&self, site: &std::ffi::CStr) {
        // SAFETY: a `CStr` ends with a NUL.
        self.local.site.set(unsafe { self.local.intern(site.as_ptr().cast::<c_char>()) });
    }

    // ---- tensors and their pool

    /// A tensor of this crate in host memory, registered in the current scope; see `lh_tensor_create`.
    pub fn create_tensor(&self, shape: &[i64], dtype_id: u8) -> Option<*mut OpaqueTensor> {
        self.local.create_tensor(shape, dtype_id)
    }

    /// The elements of a live tensor of this crate.
    pub fn tensor_data(&self, tensor: *mut OpaqueTensor) -> Option<*mut c_void> {
        self.local.tensor_data(tensor)
    }

    /// Takes a described tensor out of the pool; it is unknown to the manager until it is registered again.
    pub fn pool_acquire(&self, num_elements: usize, dtype_id: u8, device_id: u8) -> Option<*mut OpaqueTensor> {
        let Some(key) = TensorKey::from_ids(num_elements as u64, dtype_id, device_id) else {
            self.local.misuse(Misuse::TensorKey, 0, i64::from(dtype_id));
            return None;
        };
        self.local.shared.pool_acquire(key, self.local.me)
    }

    /// Destroys pooled tensors until at most `bytes` remain, the keys used longest ago first; returns the bytes freed.
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

    /// How often this attachment has done `misuse`.
    pub fn misuses(&self, misuse: Misuse) -> u64 {
        self.local.misuses(misuse)
    }

    /// The newest misuse of this attachment.
    pub fn last_error(&self) -> Option<LastError> {
        self.local.last_error()
    }

    /// What is alive, by kind, name and call site.
    pub fn leak_report(&self) -> LeakReport {
        self.local.leak_report()
    }
}

/// Ends the process as Rust does where there is no memory.
fn no_memory<T>() -> ! {
    std::alloc::handle_alloc_error(std::alloc::Layout::new::<T>())
}
