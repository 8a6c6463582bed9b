//! A function that runs in stream order must own what it uses.

fn dangle(stream: &leasehold::Stream) {
    let local = 5;
    leasehold::ops::host_call(stream, "dangles", || {
        assert_eq!(local, 5);
        Ok(())
    })
    .unwrap();
}

fn main() {}
