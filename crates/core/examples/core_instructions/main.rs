//! Runs one operation on handles and leases a number of times, for `ci/instructions.sh` to count.
//! Without arguments, prints all figures.
//!
//! `cargo run --release -p leasehold-core --example core_instructions [-- NAME TIMES]`

mod leases;

use leases::{Bench, Body, run};
use std::process::ExitCode;

/// The operation of this name.
fn body(name: &str) -> Option<Body> {
    Some(match name {
        "acquire_release" => Bench::acquire_release,
        "acquire_handle_release" => Bench::acquire_handle_release,
        "acquire_release_cells" => Bench::acquire_release_cells,
        "clone_drop" => Bench::clone_drop,
        "lease_handle_drop" => Bench::lease_handle_drop,
        "is_alive" => Bench::is_alive,
        "arc_new_drop" => Bench::arc_new_drop,
        "arc_clone_drop" => Bench::arc_clone_drop,
        _ => return None,
    })
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    match (args.next(), args.next().and_then(|n| n.parse().ok())) {
        (Some(name), Some(times)) => {
            let (Ok(bench), Some(body)) = (Bench::new(), body(&name)) else {
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
