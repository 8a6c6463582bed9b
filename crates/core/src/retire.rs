//! Retire lists: where a drop leaves what may block.
//!
//! Dropping a lease must not block, but some driver calls do (freeing memory, destroying a stream with work pending). The drop
//! pushes the object here; the manager's next acquire, `trim` or `shutdown` ends those whose time has come, outside the lock.
//!
//! This module must not know what it holds.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
use std::collections::VecDeque;
use std::fmt;

/// Objects that wait for their end. `push` holds a lock for a few instructions only.
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

    /// Leaves an object. Never blocks on a driver; any thread.
    pub fn push(&self, object: T) {
        let mut waiting = self.waiting.lock();
        waiting.push(object);
        self.len.store(waiting.len(), Ordering::Release);
    }

    /// How many wait: one load.
    #[inline]
    pub fn len(&self) -> usize {
        self.len.load(Ordering::Acquire)
    }

    /// Whether none waits: one load, cheap enough for every acquire.
    #[inline]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Takes out those that are `ready`, in the order in which they came, and hands each to `end`, outside the lock. Returns how many
    /// ended. `ready` runs under the lock: it may read, not call a driver. If `end` panics, those after it are back on the list.
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

    /// Takes out all of them.
    pub fn take_all(&self) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        self.len.store(0, Ordering::Release);
        std::mem::take(&mut waiting)
    }
}

/// Objects that were taken out and not ended yet.
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
