//! Loom's models of the [`Jobs`]. Every tile runs once, no helper sleeps through a wake-up, and no
//! call outlives its owner.
//!
//! Run with `RUSTFLAGS="--cfg loom" cargo test --release -p leasehold-cpu --lib`.

use super::jobs::Jobs;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use leasehold_core::sync::{Arc, UnsafeCell, thread};

/// The results of tiles. Loom's cell detects two threads that run the same tile, and a read that is
/// not ordered after the write.
struct Cells(Vec<UnsafeCell<u32>>);

// SAFETY: the models check this claim; loom checks each access.
unsafe impl Sync for Cells {}

impl Cells {
    fn new(n: usize) -> Self {
        Self((0..n).map(|_| UnsafeCell::new(0)).collect())
    }

    fn bump(&self, from: u64, to: u64) {
        for tile in from..to {
            // SAFETY: loom checks the access.
            self.0[tile as usize].with_mut(|c| unsafe { *c += 1 });
        }
    }

    fn expect(&self, value: u32) {
        for cell in &self.0 {
            // SAFETY: loom checks the access.
            assert_eq!(cell.with(|c| unsafe { *c }), value);
        }
    }
}

fn helper(jobs: &Arc<Jobs>) -> thread::JoinHandle<()> {
    let jobs = jobs.clone();
    thread::spawn(move || {
        loop {
            if !jobs.help(0) && !jobs.sleep() {
                return;
            }
        }
    })
}

/// Runs a job whose owner and helpers call the same function.
fn run(jobs: &Jobs, tiles: u64, ring: u32, body: impl Fn(u64, u64) + Sync) {
    jobs.run(tiles, u64::MAX, ring, &body, &body).unwrap();
}

fn model(preemptions: usize, f: impl Fn() + Sync + Send + 'static) {
    let mut builder = loom::model::Builder::new();
    // `LOOM_MAX_PREEMPTIONS` makes the exploration shorter.
    builder.preemption_bound =
        Some(builder.preemption_bound.map_or(preemptions, |asked| asked.min(preemptions)));
    builder.check(f);
}

/// One helper runs two jobs of the same owner in the same slot. The second job has another
/// function: the stack frame of the first is gone.
#[test]
fn tiles_run_once_and_calls_do_not_outlive_their_owner() {
    model(3, || {
        let jobs = Arc::new(Jobs::new());
        let helper = helper(&jobs);
        for tiles in [2, 1] {
            let cells = Cells::new(tiles);
            let alive = AtomicBool::new(true);
            run(&jobs, tiles as u64, 1, |from, to| {
                assert!(alive.load(Ordering::Relaxed), "called after its owner left");
                cells.bump(from, to);
            });
            alive.store(false, Ordering::Relaxed);
            cells.expect(1);
        }
        jobs.dismiss();
        helper.join().unwrap();
    });
}

/// Two helpers and an owner.
#[test]
fn two_helpers_share() {
    model(2, || {
        let jobs = Arc::new(Jobs::new());
        let helpers = [helper(&jobs), helper(&jobs)];
        let cells = Cells::new(3);
        run(&jobs, 3, 2, |from, to| cells.bump(from, to));
        cells.expect(1);
        jobs.dismiss();
        for h in helpers {
            h.join().unwrap();
        }
    });
}

/// Two owners want the model's one slot: the owner that finds it taken runs its job alone.
#[test]
fn two_owners_and_one_slot() {
    model(2, || {
        let jobs = Arc::new(Jobs::new());
        let helper = helper(&jobs);
        let other = {
            let jobs = jobs.clone();
            thread::spawn(move || {
                let cells = Cells::new(2);
                run(&jobs, 2, 1, |from, to| cells.bump(from, to));
                cells.expect(1);
            })
        };
        let cells = Cells::new(2);
        run(&jobs, 2, 1, |from, to| cells.bump(from, to));
        cells.expect(1);
        other.join().unwrap();
        jobs.dismiss();
        helper.join().unwrap();
    });
}

/// The job needs its helper: its first tile waits until the second has begun. If the helper can
/// sleep through the wake-up, loom reports a dead-lock.
#[test]
fn nobody_sleeps_through_the_bell() {
    model(3, || {
        let jobs = Arc::new(Jobs::new());
        let helper = helper(&jobs);
        let arrived = AtomicU32::new(0);
        run(&jobs, 2, 1, |_, _| {
            arrived.fetch_add(1, Ordering::AcqRel);
            while arrived.load(Ordering::Acquire) < 2 {
                thread::yield_now();
            }
        });
        jobs.dismiss();
        helper.join().unwrap();
    });
}
