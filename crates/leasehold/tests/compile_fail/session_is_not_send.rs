//! A session stays on its thread: the recording that it may belong to is the thread's.

use leasehold::{KernelBase, KernelSession, Runtime};

fn send(runtime: &Runtime, kernel: &KernelBase) {
    let session = KernelSession::begin(kernel, runtime.stream()).unwrap();
    std::thread::scope(|s| {
        s.spawn(move || drop(session));
    });
}

fn main() {}
