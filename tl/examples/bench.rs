//! `cargo run --release -p leasehold-memory --features bench --example bench`, with `--threads N`
//! or `--json` after `--`.
fn main() {
    let mut options = leasehold_memory::bench::Options::default();
    let mut args = std::env::args().skip(1);
    let mut json = false;
    while let Some(arg) = args.next() {
        match arg.as_str() {
            "--threads" => options.threads = args.next().and_then(|n| n.parse().ok()).unwrap_or(0),
            "--json" => json = true,
            "--quick" => options = leasehold_memory::bench::Options::quick(),
            other => {
                eprintln!("unknown argument {other}");
                std::process::exit(2);
            }
        }
    }
    let report = leasehold_memory::bench::run(options).expect("threads");
    if json {
        println!("{}", serde_json::to_string_pretty(&report).expect("plain data"));
    } else {
        print!("{report}");
    }
}
