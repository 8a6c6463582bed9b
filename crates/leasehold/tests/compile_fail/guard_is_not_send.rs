//! A guard restores the context of the thread that made it.

fn send(runtime: &leasehold::Runtime) {
    let guard = leasehold::ops::set_context(runtime, None).unwrap();
    std::thread::scope(|s| {
        s.spawn(move || drop(guard));
    });
}

fn main() {}
