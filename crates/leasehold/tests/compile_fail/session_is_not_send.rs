//! A session stays on its thread: the recording that it may belong to is the thread's.

use leasehold::{KernelBase, KernelSession, Runtime};

fn elsewhere<T: Send>(_: T) {}

fn send(runtime: &Runtime, kernel: &KernelBase) {
    elsewhere(KernelSession::begin(kernel, runtime.stream()).unwrap());
}

fn main() {}
