//! Vectors of pointers that compiled code and the manager share: this library's layout, and
//! functions for other layouts.
//!
//! The manager reads a vector only when its count has reached zero (`destroy.rs`). This module must
//! not know what the elements are.

use std::ffi::c_void;

/// A growable array of counted pointers. Container and buffer come from the C allocator (`malloc`).
///
/// The last release of a vector registered with `register_vec_ptr` releases every element once,
/// then frees both blocks. So each element holds one count.
#[derive(Debug)]
#[repr(C)]
pub struct VecPtr {
    /// The elements; null if the vector has none.
    pub data: *mut *mut c_void,
    /// The number of elements.
    pub len: i64,
    /// The number of elements that fit into the buffer.
    pub capacity: i64,
}

const _: () = assert!(size_of::<VecPtr>() == 24);

/// Functions for a container of counted pointers whose layout the manager does not know: a Rust
/// `Vec`, a `std::vector`.
#[derive(Clone, Copy, Debug)]
#[repr(C)]
pub struct VecOps {
    /// Stores the address of the elements and returns their number. The elements stay there until
    /// `destroy` is called.
    pub elements: unsafe extern "C" fn(container: *mut c_void, data: *mut *mut *mut c_void) -> i64,
    /// Destroys the container after its elements were released.
    pub destroy: unsafe extern "C" fn(container: *mut c_void),
}

/// The functions for a boxed `Vec<*mut c_void>` of this program.
pub(crate) static RUST_VEC: VecOps = VecOps { elements: rust_elements, destroy: rust_destroy };

/// # Safety
/// - `container` comes from `Box::<Vec<*mut c_void>>::into_raw`, and no other code uses it; `data`
///   may be written.
unsafe extern "C" fn rust_elements(container: *mut c_void, data: *mut *mut *mut c_void) -> i64 {
    // SAFETY: by the caller's promise this is the only use of the vector, and `data` may be
    // written.
    unsafe {
        let vec = &mut *container.cast::<Vec<*mut c_void>>();
        data.write(vec.as_mut_ptr());
        vec.len() as i64
    }
}

/// # Safety
/// - As for [`rust_elements`]; the container is not used any more.
unsafe extern "C" fn rust_destroy(container: *mut c_void) {
    // SAFETY: by the caller's promise the container came from `Box::into_raw` and is not used any
    // more.
    drop(unsafe { Box::from_raw(container.cast::<Vec<*mut c_void>>()) });
}
