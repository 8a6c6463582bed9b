//! The resource of the models, and counters of what happened.

use leasehold_core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use leasehold_core::sync::{Arc, UnsafeCell, thread};
use leasehold_core::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// What happened, over all executions of a model.
#[derive(Clone, Default)]
pub struct Seen(std::sync::Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Seen {
    pub fn note(&self, what: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
    }
}

/// Explores `model` with at most `preemptions` preemptions, and wants all of `expected` to have happened.
pub fn explore(name: &str, preemptions: usize, expected: &[&str], model: impl Fn(&Seen) + Send + Sync + 'static) {
    let seen = Seen::default();
    let inside = seen.clone();
    let mut builder = loom::model::Builder::new();
    // `LOOM_MAX_PREEMPTIONS` makes the exploration shorter.
    builder.preemption_bound = Some(builder.preemption_bound.map_or(preemptions, |asked| asked.min(preemptions)));
    let begin = std::time::Instant::now();
    builder.check(move || {
        inside.note("executions");
        model(&inside);
    });
    let seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
    println!("{name}: {seen:?} in {:.1} s", begin.elapsed().as_secs_f32());
    for what in expected {
        assert!(seen.contains_key(what), "{name} is vacuous: {what} never happened; seen: {seen:?}");
    }
}

/// Runs `theirs` on another thread beside `mine`.
///
/// Loom 0.7 looks for a race of an operation only with the last access to the same atomic. A thread that loads a word and then
/// writes it hides the other thread's earlier load behind its own, and the order in which it goes first is never tried. A common
/// relaxed counter, which orders nothing, makes loom try both.
pub fn side_by_side<T: 'static, U>(theirs: impl FnOnce() -> T + 'static, mine: impl FnOnce() -> U) -> (T, U) {
    let start = std::sync::Arc::new(AtomicU32::new(0));
    let there = start.clone();
    let other = thread::spawn(move || {
        there.fetch_add(1, Relaxed);
        theirs()
    });
    start.fetch_add(1, Relaxed);
    let mine = mine();
    (other.join().unwrap(), mine)
}

pub struct Item {
    cell: UnsafeCell<u32>,
    /// Loom reports a count that leaks, and so a payload that is lost.
    _alive: Arc<()>,
}

// SAFETY: the cell is written only through `&mut`, as loom checks.
unsafe impl Sync for Item {}

impl Item {
    pub fn read(&self) -> u32 {
        // SAFETY: a holder of a shared lease; loom checks that nobody writes.
        self.cell.with(|p| unsafe { *p })
    }

    pub fn write(&mut self) {
        // SAFETY: exclusive; loom checks that nobody else looks.
        self.cell.with_mut(|p| unsafe { *p += 1 });
    }
}

impl Tagged for Item {
    type Tag = tags::Event;
}

/// Makes items; idle ones are recycled or, with `destroy`, ended at once.
pub struct Items {
    pub alive: Arc<()>,
    pub destroy: bool,
    /// Looked at by every last drop and ended with the pool: a pool that is freed too early, or without an order, is found.
    pub pool: UnsafeCell<()>,
}

// SAFETY: the cell is written only by the drop, as loom checks.
unsafe impl Sync for Items {}

impl Drop for Items {
    fn drop(&mut self) {
        self.pool.with_mut(|_| ());
    }
}

impl Resource for Items {
    type Payload = Item;
    type Request<'a> = ();
    const NAME: &'static str = "item";

    fn create(&self, _: EventHandle, (): &()) -> Result<Item> {
        Ok(Item { cell: UnsafeCell::new(0), _alive: self.alive.clone() })
    }

    fn fits(&self, idle: &mut Item, (): &()) -> bool {
        idle.write();
        true
    }

    fn recycle(&self, item: &mut Item) -> Fate {
        item.write();
        self.pool.with(|_| ());
        if self.destroy { Fate::Destroy } else { Fate::Keep }
    }
}

pub fn config(thread_cells: bool) -> PoolConfig {
    PoolConfig { block: 1, thread_cells, ..PoolConfig::default() }
}

pub fn items(alive: &Arc<()>, destroy: bool) -> Items {
    Items { alive: alive.clone(), destroy, pool: UnsafeCell::new(()) }
}

/// A pool, and what counts its payloads (and the pool's traits type).
pub fn pool(config: PoolConfig, destroy: bool) -> (Arc<SlotPool<Items>>, Arc<()>) {
    let alive = Arc::new(());
    let pool = SlotPool::new(items(&alive, destroy), config).ok().expect("a valid configuration");
    (Arc::new(pool), alive)
}

/// Payloads that exist while the pool does.
pub fn existing(alive: &Arc<()>) -> usize {
    Arc::strong_count(alive) - 2
}

pub fn ok<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}
