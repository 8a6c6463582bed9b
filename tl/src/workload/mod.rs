//! Programs of the kind that compilers emit, for tests and benchmarks (feature `bench`).
//!
//! [`Abi`] is the part of the C ABI that generated code uses most. [`Global`] is this crate's
//! implementation, [`Plain`] the plain design for comparison. [`generate`](program::generate) makes
//! programs; [`run`](checker::run) executes and checks them. These modules stand in the compiler's
//! place and must not know the manager's internals.

use std::ffi::c_void;

use crate::{OpaqueTensor, VecPtr, ffi};

pub mod checker;
pub mod fuzz;
mod plain;
pub mod program;

pub use plain::Plain;

/// The functions that generated code calls.
pub trait Abi: Sync {
    /// `tl_mem_enter_scope`
    fn enter_scope(&self);
    /// `tl_mem_exit_scope`
    fn exit_scope(&self);
    /// `tl_mem_function_enter`
    fn function_enter(&self, slots: i64);
    /// `tl_mem_function_exit`
    fn function_exit(&self);
    /// `tl_mem_get_buffer`
    fn get_buffer(&self, slot: i64, min: i64) -> *mut c_void;
    /// `tl_mem_register_struct`
    ///
    /// # Safety
    /// - As for [`ffi::tl_mem_register_struct`].
    unsafe fn register_struct(&self, ptr: *mut c_void);
    /// `tl_mem_register_tensor`
    ///
    /// # Safety
    /// - As for [`ffi::tl_mem_register_tensor`].
    unsafe fn register_tensor(&self, ptr: *mut OpaqueTensor);
    /// `tl_mem_unregister`
    fn unregister(&self, ptr: *mut c_void);
    /// `tl_ptr_acquire`
    fn acquire(&self, ptr: *mut c_void);
    /// `tl_ptr_release`
    fn release(&self, ptr: *mut c_void);
}

/// The manager behind the C ABI, called as generated code calls it.
#[derive(Clone, Copy, Debug)]
pub struct Global;

impl Abi for Global {
    #[inline(always)]
    fn enter_scope(&self) {
        ffi::tl_mem_enter_scope();
    }
    #[inline(always)]
    fn exit_scope(&self) {
        ffi::tl_mem_exit_scope();
    }
    #[inline(always)]
    fn function_enter(&self, slots: i64) {
        ffi::tl_mem_function_enter(slots);
    }
    #[inline(always)]
    fn function_exit(&self) {
        ffi::tl_mem_function_exit();
    }
    #[inline(always)]
    fn get_buffer(&self, slot: i64, min: i64) -> *mut c_void {
        ffi::tl_mem_get_buffer(slot, min)
    }
    #[inline(always)]
    unsafe fn register_struct(&self, ptr: *mut c_void) {
        // SAFETY: the caller's promise is the one of `tl_mem_register_struct`.
        unsafe { ffi::tl_mem_register_struct(ptr) };
    }
    #[inline(always)]
    unsafe fn register_tensor(&self, ptr: *mut OpaqueTensor) {
        // SAFETY: the caller's promise is the one of `tl_mem_register_tensor`.
        unsafe { ffi::tl_mem_register_tensor(ptr) };
    }
    #[inline(always)]
    fn unregister(&self, ptr: *mut c_void) {
        ffi::tl_mem_unregister(ptr);
    }
    #[inline(always)]
    fn acquire(&self, ptr: *mut c_void) {
        ffi::tl_ptr_acquire(ptr);
    }
    #[inline(always)]
    fn release(&self, ptr: *mut c_void) {
        ffi::tl_ptr_release(ptr);
    }
}

/// A new vector from the C allocator, without elements.
pub fn new_vector() -> *mut VecPtr {
    // SAFETY: `calloc` has no conditions, and zeros are a vector without elements.
    let vec: *mut VecPtr = unsafe { libc::calloc(1, size_of::<VecPtr>()) }.cast();
    assert!(!vec.is_null(), "no memory for a vector");
    vec
}

/// Appends `element` without counting it.
///
/// # Safety
/// - `vec` points to a vector from [`new_vector`], and no other code uses it during the call.
pub unsafe fn push(vec: *mut VecPtr, element: *mut c_void) {
    // SAFETY: by the caller's promise this is a vector that no other code uses.
    let this = unsafe { &mut *vec };
    if this.len == this.capacity {
        this.capacity = 2 * this.capacity + 1;
        let bytes = this.capacity as usize * size_of::<*mut c_void>();
        // SAFETY: `data` is null or from the C allocator.
        this.data = unsafe { libc::realloc(this.data.cast(), bytes) }.cast();
        assert!(!this.data.is_null(), "no memory for an element");
    }
    // SAFETY: 0 <= len < capacity.
    unsafe { this.data.add(this.len as usize).write(element) };
    this.len += 1;
}
