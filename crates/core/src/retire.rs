//! Retire lists: where a drop leaves what may block.
//!
//! Dropping a lease must not block, but some driver calls do (freeing memory, destroying a stream with work pending). The drop
//! pushes the object here; the manager's next acquire, `trim` or `shutdown` ends those whose time has come, outside the lock.
//!
//! This module must not know what it holds.

use crate::sync::Mutex;
use crate::sync::atomic::{AtomicUsize, Ordering};
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

    /// Takes out those that are `ready` and hands each to `end`, outside the lock. Returns how many ended.
    pub fn drain(&self, mut ready: impl FnMut(&T) -> bool, mut end: impl FnMut(T)) -> usize {
        if self.is_empty() {
            return 0;
        }
        let due = {
            let mut waiting = self.waiting.lock();
            let mut due = Vec::new();
            let mut i = 0;
            while i < waiting.len() {
                if ready(&waiting[i]) {
                    due.push(waiting.swap_remove(i));
                } else {
                    i += 1;
                }
            }
            self.len.store(waiting.len(), Ordering::Release);
            due
        };
        let n = due.len();
        due.into_iter().for_each(&mut end);
        n
    }

    /// Takes out all of them.
    pub fn take_all(&self) -> Vec<T> {
        let mut waiting = self.waiting.lock();
        self.len.store(0, Ordering::Release);
        std::mem::take(&mut waiting)
    }
}

impl<T> fmt::Debug for RetireList<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "RetireList({})", self.len())
    }
}
