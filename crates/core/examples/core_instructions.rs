//! Runs one operation of `leasehold_core::bench` a number of times, for `ci/instructions.sh` to
//! count. Without arguments, prints all figures.
//!
//! `cargo run --release -p leasehold-core --features bench --example core_instructions [-- NAME
//! TIMES]`

use leasehold_core::bench::{Bench, run};
use std::process::ExitCode;

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match (args.next(), args.next().and_then(|n| n.parse().ok())) {
        (Some(name), Some(times)) => {
            let (Ok(bench), Some(body)) = (Bench::new(), Bench::body(&name)) else {
                eprintln!("no operation {name}");
                return ExitCode::from(2);
            };
            body(&bench, times);
        }
        (None, None) => match run() {
            Ok(figures) => {
                for f in figures {
                    let held = if f.holds() { "" } else { "  over" };
                    let (ns, peer, peer_ns) = (f.ns, f.peer, f.peer_ns);
                    println!(
                        "{:42} {ns:6.1} ns  {peer:16} {peer_ns:6.1} ns  ratio {:.2}  limit {}{held}",
                        f.name, f.ratio, f.limit
                    );
                }
            }
            Err(e) => {
                eprintln!("{e}");
                return ExitCode::FAILURE;
            }
        },
        _ => {
            eprintln!("usage: core_instructions [NAME TIMES]");
            return ExitCode::from(2);
        }
    }
    ExitCode::SUCCESS
}
