//! A function that runs in stream order must own what it uses.

fn dangle(stream: &leasehold::Stream) {
    let local = 5;
    stream.host_call("dangles", || {
        assert_eq!(local, 5);
        Ok(())
    })
    .unwrap();
}

fn main() {}
