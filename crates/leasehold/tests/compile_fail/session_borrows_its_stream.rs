//! A session cannot outlive its stream.

use leasehold::{KernelBase, KernelSession, Runtime};

fn dangle(runtime: &Runtime, kernel: &KernelBase) {
    let session = {
        let stream = runtime.create_stream().unwrap();
        KernelSession::begin(kernel, &stream).unwrap()
    };
    drop(session);
}

fn main() {}
