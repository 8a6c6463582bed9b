//! Retire lists: deferred destruction for objects whose destruction may block.
//!
//! The drop of a lease must not block, but some driver calls do, such as freeing memory or
//! destroying a stream with pending work. The drop pushes the object onto a retire list. The
//! manager's next acquire, `trim` or `shutdown` destroys the objects that are ready, outside the
//! lock.
//!
//! This module must not know which objects it holds.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::fmt;

/// Objects that wait for destruction. `push` holds a lock for a few instructions only.
pub struct RetireList<T> {
    waiting: Mutex<Vec<T>>,
    len: AtomicUsize,
}

impl<T> Default for RetireList<T> {
    fn default() -> Self {
        Self::new()
    }
}

impl<T> RetireList<T> {
    /// An empty list.
    pub fn new() -> Self {
        Self { waiting: Mutex::new(Vec::new()), len: AtomicUsize::new(0) }
    }

    /// Adds an object. Makes no driver call. Any thread.
    pub fn push(&self, object: T) {
        let mut waiting = self.waiting.lock();
        waiting.push(object);
        self.len.store(waiting.len(), Ordering::Release);
    }

    /// The number of objects. One load.
    #[inline]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Returns whether the list is empty. One load, cheap enough for every acquire.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Removes the objects that are `ready`, in insertion order, and passes each to `end` outside
    /// the lock. Returns the number of ended objects.
    ///
    /// `ready` runs under the lock; it may read but not call a driver. If `end` panics, the objects
    /// after it return to the list.
    pub fn drain(&self, ready: impl FnMut(&T) -> bool, mut end: impl FnMut(T)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let mut due = Due { list: self, objects: VecDeque::new() };
        {
            let mut ready = ready;
            let mut waiting = self.waiting.lock();
            due.objects.extend(waiting.extract_if(.., |object| ready(object)));
            self.len.store(waiting.len(), Ordering::Release);
        }
        let mut ended = 0;
        while let Some(object) = due.objects.pop_front() {
            end(object);
            ended += 1;
        }
        ended
    }

    /// Removes all objects.
    pub fn take_all(&self) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        self.len.store(0, Ordering::Release);
        std::mem::take(&mut waiting)
    }
}

/// Removed objects that are not ended yet.
struct Due<'a, T> {
    list: &'a RetireList<T>,
    objects: VecDeque<T>,
}

impl<T> Drop for Due<'_, T> {
    fn drop(&mut self) {
        self.objects.drain(..).for_each(|object| self.list.push(object));
    }
}

impl<T> fmt::Debug for RetireList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RetireList({})", self.len())
    }
}
