//! The plain design: one mutex around a hash map of counts and a stack of scopes.
//!
//! This manager is the peer of the benchmarks and the negative example of the tests. Its flaws are
//! those that the manager avoids: one set of scopes for all threads, no generations, O(n)
//! unregister, destructors under the lock. Do not mend it.

use std::collections::HashMap;
use std::ffi::c_void;
use std::ptr;

use leasehold_core::sync::Mutex;
use leasehold_core::sync::thread::{self, ThreadId};

use super::Abi;
use crate::{OpaqueTensor, TensorDestructor};

#[derive(Default)]
struct Stacks {
    scopes: Vec<Vec<usize>>,
    frames: Vec<Vec<(usize, usize)>>,
    deferred: Vec<Vec<usize>>,
}

#[derive(Default)]
struct State {
    counts: HashMap<usize, (usize, bool)>,
    common: Stacks,
    by_thread: HashMap<ThreadId, Stacks>,
}

/// The plain design; see the module's documentation.
pub struct Plain {
    state: Mutex<State>,
    destructor: TensorDestructor,
    by_thread: bool,
}

impl Plain {
    /// An empty manager whose tensors `destructor` destroys. The plain design has one stack of
    /// scopes for all threads, so threads free each other's objects. `by_thread` corrects only this
    /// flaw, for measurements that must not crash.
    pub fn new(destructor: TensorDestructor, by_thread: bool) -> Self {
        Self { state: Mutex::default(), destructor, by_thread }
    }

    fn stacks<'a>(&self, state: &'a mut State) -> &'a mut Stacks {
        if self.by_thread {
            state.by_thread.entry(thread::current().id()).or_default()
        } else {
            &mut state.common
        }
    }

    fn drop_one(&self, state: &mut State, addr: usize) {
        if let Some((count, tensor)) = state.counts.get_mut(&addr) {
            *count -= 1;
            if *count == 0 {
                let pointer = ptr::with_exposed_provenance_mut::<c_void>(addr);
                if *tensor {
                    // SAFETY: registered as a tensor, and counted down to zero.
                    unsafe { (self.destructor)(pointer.cast()) };
                } else {
                    // SAFETY: registered as a struct from the C allocator, and counted down to
                    // zero.
                    unsafe { libc::free(pointer) };
                }
                state.counts.remove(&addr);
            }
        }
    }

    fn register(&self, addr: usize, tensor: bool) {
        if addr != 0 {
            let mut state = self.state.lock();
            state.counts.entry(addr).or_insert((0, tensor)).0 += 1;
            let scopes = &mut self.stacks(&mut state).scopes;
            if scopes.is_empty() {
                scopes.push(Vec::new());
            }
            if let Some(scope) = scopes.last_mut() {
                scope.push(addr);
            }
        }
    }
}

impl Abi for Plain {
    fn enter_scope(&self) {
        self.stacks(&mut self.state.lock()).scopes.push(Vec::new());
    }
    fn exit_scope(&self) {
        let mut state = self.state.lock();
        let scope = self.stacks(&mut state).scopes.pop().unwrap_or_default();
        for addr in scope.into_iter().rev() {
            self.drop_one(&mut state, addr);
        }
    }
    fn function_enter(&self, slots: i64) {
        let mut state = self.state.lock();
        self.stacks(&mut state).frames.push(vec![(0, 0); usize::try_from(slots).unwrap_or(0)]);
        self.stacks(&mut state).deferred.push(Vec::new());
        self.stacks(&mut state).scopes.push(Vec::new());
    }
    fn function_exit(&self) {
        self.exit_scope();
        let mut state = self.state.lock();
        let slots = self.stacks(&mut state).frames.pop().unwrap_or_default();
        let deferred = self.stacks(&mut state).deferred.pop().unwrap_or_default();
        for at in slots.into_iter().map(|(at, _)| at).chain(deferred) {
            // SAFETY: null or a buffer that `get_buffer` got from `malloc`.
            unsafe { libc::free(ptr::with_exposed_provenance_mut(at)) };
        }
    }
    fn get_buffer(&self, slot: i64, min: i64) -> *mut c_void {
        let mut state = self.state.lock();
        let Stacks { frames, deferred, .. } = self.stacks(&mut state);
        let Some((at, capacity)) =
            frames.last_mut().and_then(|f| f.get_mut(usize::try_from(slot).ok()?))
        else {
            return ptr::null_mut();
        };
        let min = usize::try_from(min).unwrap_or(0);
        if *capacity < min {
            if let (true, Some(list)) = (*at != 0, deferred.last_mut()) {
                list.push(*at);
            }
            // SAFETY: `malloc` has no conditions.
            *at = unsafe { libc::malloc(min) }.expose_provenance();
            *capacity = min;
        }
        ptr::with_exposed_provenance_mut(*at)
    }
    unsafe fn register_struct(&self, ptr: *mut c_void) {
        self.register(ptr.expose_provenance(), false);
    }
    unsafe fn register_tensor(&self, ptr: *mut OpaqueTensor) {
        self.register(ptr.expose_provenance(), true);
    }
    fn unregister(&self, ptr: *mut c_void) {
        let mut state = self.state.lock();
        for scope in self.stacks(&mut state).scopes.iter_mut().rev() {
            if let Some(i) = scope.iter().rposition(|&a| a == ptr.addr()) {
                scope.remove(i);
                return;
            }
        }
    }
    fn acquire(&self, ptr: *mut c_void) {
        self.state.lock().counts.entry(ptr.addr()).or_insert((0, false)).0 += 1;
    }
    fn release(&self, ptr: *mut c_void) {
        let mut state = self.state.lock();
        self.drop_one(&mut state, ptr.addr());
    }
}
