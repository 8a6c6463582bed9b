//! Fallible allocations from Rust's allocator: the C ABI's own memory must not end the process.
//!
//! This module must not know the contents of the blocks.

use std::alloc::{self, Layout};
use std::fmt;
use std::ops::Deref;
use std::ptr::NonNull;

/// The error of a refused allocation.
#[derive(Clone, Copy, Debug)]
pub(crate) struct NoMemory;

/// A value in a block of its own with a stable address. Unlike a `Box` it allows access through raw
/// pointers meanwhile.
pub(crate) struct Owned<T>(NonNull<T>);

// SAFETY: the type owns its value, as a `Box` does.
unsafe impl<T: Send> Send for Owned<T> {}
// SAFETY: a shared reference to it gives shared references to the value only.
unsafe impl<T: Sync> Sync for Owned<T> {}

impl<T> Owned<T> {
    /// Moves `value` into a new block.
    pub(crate) fn new(value: T) -> Result<Self, NoMemory> {
        const { assert!(size_of::<T>() > 0) };
        // SAFETY: the type has a size.
        let block = NonNull::new(unsafe { alloc::alloc(Layout::new::<T>()) }.cast::<T>())
            .ok_or(NoMemory)?;
        // SAFETY: the block is new, and of the type's layout.
        unsafe { block.write(value) };
        Ok(Self(block))
    }

    /// The address of the value, which stays valid until this is dropped.
    pub(crate) fn address(&self) -> NonNull<T> {
        self.0
    }

    /// Gives the block up, for [`from_raw`](Self::from_raw).
    pub(crate) fn into_raw(self) -> NonNull<T> {
        let block = self.0;
        std::mem::forget(self);
        block
    }

    /// Takes a block back.
    ///
    /// # Safety
    /// - `block` comes from [`into_raw`](Self::into_raw) and was not taken back yet. No other code
    ///   uses it any more.
    pub(crate) unsafe fn from_raw(block: NonNull<T>) -> Self {
        Self(block)
    }
}

impl<T> Deref for Owned<T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the block holds a value until this is dropped, and only shared references can
        // change the value.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: this object owns the value and the block, and is dropped once.
        unsafe {
            self.0.drop_in_place();
            alloc::dealloc(self.0.as_ptr().cast(), Layout::new::<T>());
        }
    }
}

impl<T: fmt::Debug> fmt::Debug for Owned<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        (**self).fmt(f)
    }
}

/// `n` values in one block.
pub(crate) fn slice<T>(n: usize, mut make: impl FnMut() -> T) -> Result<Box<[T]>, NoMemory> {
    let mut all = Vec::new();
    all.try_reserve_exact(n).map_err(|_| NoMemory)?;
    (0..n).for_each(|_| all.push(make()));
    Ok(all.into_boxed_slice())
}
