//! A growable stack of plain values that works through `&self`.
//!
//! Destructors re-enter the per-thread state, so no borrow may last across a call. Every operation
//! here copies a value in or out. A failed growth is reported and never fatal. This module must not
//! know the values.

use std::alloc::{self, Layout};
use std::cell::Cell;
use std::ptr;

/// A stack of `Copy` values; never shared between threads (it holds `Cell`s).
#[derive(Debug)]
pub(crate) struct Stack<T: Copy> {
    base: Cell<*mut T>,
    len: Cell<u32>,
    capacity: Cell<u32>,
}

impl<T: Copy> Stack<T> {
    pub(crate) const fn new() -> Self {
        Self { base: Cell::new(ptr::null_mut()), len: Cell::new(0), capacity: Cell::new(0) }
    }

    #[inline(always)]
    pub(crate) fn len(&self) -> u32 {
        self.len.get()
    }

    /// Appends `value`; `false` without memory.
    #[inline(always)]
    #[must_use]
    pub(crate) fn push(&self, value: T) -> bool {
        let len = self.len.get();
        if len == self.capacity.get() && !self.grow() {
            return false;
        }
        // SAFETY: len < capacity, and the block holds `capacity` values.
        unsafe { self.base.get().add(len as usize).write(value) };
        self.len.set(len + 1);
        true
    }

    #[inline(always)]
    pub(crate) fn pop(&self) -> Option<T> {
        let len = self.len.get().checked_sub(1)?;
        self.len.set(len);
        // SAFETY: index len was written by a push.
        Some(unsafe { self.base.get().add(len as usize).read() })
    }

    #[inline(always)]
    pub(crate) fn last(&self) -> Option<T> {
        self.get(self.len.get().wrapping_sub(1))
    }

    #[inline(always)]
    pub(crate) fn get(&self, index: u32) -> Option<T> {
        // SAFETY: every index below len was written by a push.
        (index < self.len.get()).then(|| unsafe { self.base.get().add(index as usize).read() })
    }

    /// Overwrites the value at `index`; ignores an index out of range.
    #[inline(always)]
    pub(crate) fn set(&self, index: u32, value: T) {
        if index < self.len.get() {
            // SAFETY: the index is below len.
            unsafe { self.base.get().add(index as usize).write(value) };
        }
    }

    /// Changes the value at `index` in place; ignores an index out of range. `change` must not use
    /// this stack.
    #[inline(always)]
    pub(crate) fn update(&self, index: u32, change: impl FnOnce(&mut T)) {
        if index < self.len.get() {
            // SAFETY: the index is below len. The reference is the only one: `change` does not use
            // this stack, no other thread has it (it is not `Sync`), and no other method returns
            // references.
            change(unsafe { &mut *self.base.get().add(index as usize) });
        }
    }

    /// Reads a part of the value at `index`, without copying the whole. `part` must not use this
    /// stack.
    #[inline(always)]
    pub(crate) fn read<R>(&self, index: u32, part: impl FnOnce(&T) -> R) -> Option<R> {
        // SAFETY: the index is below len. `part` does not use this stack, so no code writes
        // meanwhile.
        (index < self.len.get()).then(|| part(unsafe { &*self.base.get().add(index as usize) }))
    }

    pub(crate) fn truncate(&self, len: u32) {
        self.len.set(self.len.get().min(len));
    }

    /// Moves the values from `from` on to the front and removes those before.
    pub(crate) fn drop_front(&self, from: u32) {
        let rest = self.len.get().saturating_sub(from);
        if rest > 0 && from > 0 {
            // SAFETY: from + rest == len, and all values below len were written. The ranges may
            // overlap, which `copy` allows.
            unsafe {
                ptr::copy(self.base.get().add(from as usize), self.base.get(), rest as usize)
            };
        }
        self.len.set(rest);
    }

    #[cold]
    fn grow(&self) -> bool {
        let old = self.capacity.get();
        let Some(new) = old.checked_mul(2).map(|n| n.max(16)) else { return false };
        let Ok(layout) = Layout::array::<T>(new as usize) else { return false };
        let base = if old == 0 {
            // SAFETY: new > 0 and no T used here is zero-sized, so the layout has a size.
            unsafe { alloc::alloc(layout) }
        } else {
            let Ok(before) = Layout::array::<T>(old as usize) else { return false };
            // SAFETY: the block was allocated here with `before`; the new size is a valid layout's.
            unsafe { alloc::realloc(self.base.get().cast(), before, layout.size()) }
        };
        if base.is_null() {
            return false;
        }
        self.base.set(base.cast());
        self.capacity.set(new);
        true
    }
}

impl<T: Copy> Drop for Stack<T> {
    fn drop(&mut self) {
        if let capacity @ 1.. = self.capacity.get()
            && let Ok(layout) = Layout::array::<T>(capacity as usize)
        {
            // SAFETY: the block was allocated by `grow` with this layout.
            unsafe { alloc::dealloc(self.base.get().cast(), layout) };
        }
    }
}

#[cfg(test)]
mod tests {
    use super::Stack;

    #[test]
    fn behaves_like_a_vector() {
        let stack = Stack::new();
        for i in 0..100u64 {
            assert!(stack.push(i));
        }
        stack.set(3, 333);
        stack.update(4, |v| *v += 1);
        stack.set(1000, 0);
        assert_eq!((stack.get(3), stack.get(4), stack.get(100)), (Some(333), Some(5), None));
        stack.drop_front(98);
        assert_eq!(
            (stack.len(), stack.pop(), stack.pop(), stack.pop(), stack.last()),
            (2, Some(99), Some(98), None, None)
        );
    }
}
