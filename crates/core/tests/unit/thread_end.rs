//! Tests of what runs when a thread ends.

use super::*;
use crate::sync::atomic::AtomicU32;

#[test]
fn the_function_runs_once_for_each_thread_that_asked() {
    static RUNS: AtomicU32 = AtomicU32::new(0);
    fn run() {
        RUNS.fetch_add(1, Ordering::Relaxed);
    }
    static END: ThreadEnd = ThreadEnd::new(run);
    let thread = |asks: u32| std::thread::spawn(move || (0..asks).all(|_| END.watch()));
    for asks in [0, 1, 3] {
        let before = RUNS.load(Ordering::Relaxed);
        assert!(thread(asks).join().unwrap());
        assert_eq!(RUNS.load(Ordering::Relaxed) - before, asks.min(1));
    }
}
