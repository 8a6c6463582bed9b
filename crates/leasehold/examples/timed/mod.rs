//! The times of calls, for examples that measure.

use leasehold::Result;
use std::time::Instant;

/// Prints the median and the 99th percentile of some calls, in microseconds.
pub fn timed(name: &str, count: usize, mut call: impl FnMut(usize) -> Result<()>) -> Result<()> {
    let mut times = Vec::with_capacity(count);
    for i in 0..count {
        let begun = Instant::now();
        call(i)?;
        times.push(begun.elapsed().as_secs_f64() * 1e6);
    }
    times.sort_by(f64::total_cmp);
    let [half, most] = [times.len() / 2, times.len() * 99 / 100].map(|i| times[i]);
    println!("{name:52} {half:9.1} us, p99 {most:9.1}");
    Ok(())
}
