//! A guard restores the context of the thread that made it.

fn elsewhere<T: Send>(_: T) {}

fn send(runtime: &leasehold::Runtime) {
    elsewhere(runtime.enter().unwrap());
}

fn main() {}
