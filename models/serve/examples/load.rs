//! Measures the server: some clients at once, each with a greedy request, streamed. Prints the
//! tokens per second of all of them together, as JSON.
//!
//! ```sh
//! cargo run --release -p leasehold-serve --example load -- ADDRESS [CLIENTS [TOKENS [ROUNDS]]]
//! ```

use serde_json::{Value, json};
use std::error::Error;
use std::io::{BufRead, BufReader, Write};
use std::net::TcpStream;
use std::thread;
use std::time::{Duration, Instant};

type Done<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// The times of one answer.
struct Times {
    begin: Instant,
    first: Instant,
    end: Instant,
    tokens: u64,
}

/// One request of two tokens, which `bench decode` has as well.
fn request(address: &str, client: u64, tokens: u64) -> Done<Times> {
    let body = json!({"prompt": [1 + client, 2], "max_tokens": tokens, "temperature": 0,
        "stream": true, "stream_options": {"include_usage": true}});
    let body = body.to_string();
    let mut stream = TcpStream::connect(address)?;
    stream.set_read_timeout(Some(Duration::from_secs(600)))?;
    let begin = Instant::now();
    let head = "POST /v1/completions HTTP/1.1\r\nhost: load\r\ncontent-length:";
    write!(stream, "{head} {}\r\n\r\n{body}", body.len())?;
    let (mut first, mut usage) = (None, None);
    for line in BufReader::new(stream).lines() {
        let line = line?;
        let Some(data) = line.strip_prefix("data: ").filter(|data| data.starts_with('{')) else {
            if line.starts_with('{') {
                return Err(line.into());
            }
            continue;
        };
        first.get_or_insert_with(Instant::now);
        let event: Value = serde_json::from_str(data)?;
        if event["error"].is_object() {
            return Err(data.into());
        }
        usage = event["usage"]["completion_tokens"].as_u64().or(usage);
    }
    let (Some(first), Some(tokens)) = (first, usage) else { return Err("no answer".into()) };
    Ok(Times { begin, first, end: Instant::now(), tokens })
}

fn main() -> Done<()> {
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    let address = arguments.first().ok_or("usage: load ADDRESS [CLIENTS [TOKENS [ROUNDS]]]")?;
    let number =
        |at: usize, default: u64| arguments.get(at).map_or(Ok(default), |text| text.parse::<u64>());
    let (clients, tokens, rounds) = (number(1, 8)?, number(2, 200)?, number(3, 5)?);
    // Records the graph, and makes the memory of prompts.
    request(address, 0, tokens)?;
    let (mut rates, mut firsts) = (Vec::new(), Vec::new());
    for _ in 0..rounds {
        let all = thread::scope(|scope| -> Done<Vec<Times>> {
            let start = |client| scope.spawn(move || request(address, client, tokens));
            let threads: Vec<_> = (0..clients).map(start).collect();
            threads.into_iter().map(|t| t.join().map_err(|_| "a client panicked")?).collect()
        })?;
        let begin = all.iter().map(|t| t.begin).min().ok_or("no clients")?;
        let end = all.iter().map(|t| t.end).max().ok_or("no clients")?;
        let sum: u64 = all.iter().map(|t| t.tokens).sum();
        rates.push(sum as f64 / (end - begin).as_secs_f64());
        firsts.extend(all.iter().map(|t| (t.first - t.begin).as_secs_f64() * 1e3));
    }
    rates.sort_by(f64::total_cmp);
    firsts.sort_by(f64::total_cmp);
    let median = |all: &[f64]| all.get(all.len() / 2).copied();
    let report = json!({"clients": clients, "tokens": tokens, "rounds": rounds,
        "tokens_per_s": median(&rates), "tokens_per_s_of_rounds": rates,
        "first_token_ms_p50": median(&firsts)});
    println!("{report:#}");
    Ok(())
}
