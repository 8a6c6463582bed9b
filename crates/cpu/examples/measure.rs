//! Prints the costs of streams and graphs on this machine: `cargo run --release -p leasehold-cpu
//! --features bench --example measure`.

fn main() -> leasehold_core::Result<()> {
    println!("{:#?}", leasehold_cpu::bench::stream(None, 51)?);
    for threads in [1, 2] {
        println!("{:#?}", leasehold_cpu::bench::graph(threads, 1000, 101)?);
    }
    Ok(())
}
