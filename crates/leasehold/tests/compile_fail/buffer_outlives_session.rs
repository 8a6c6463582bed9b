//! A session borrows the operands that it binds until the session ends.

use leasehold::kernel::session_sync_ops;
use leasehold::{KernelBase, KernelSession, Runtime, View};

fn dangle(runtime: &Runtime, kernel: &KernelBase) {
    let session = KernelSession::begin(kernel, runtime.stream()).unwrap();
    let waited = {
        let x = runtime.alloc(16).unwrap();
        session_sync_ops::wait(session, &[x.read()]).unwrap()
    };
    drop(waited);
}

fn main() {}
