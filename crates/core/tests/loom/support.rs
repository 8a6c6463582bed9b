//! The resource of the models, and counters of observed events.

use leasehold_core::sync::atomic::{AtomicU32, Ordering::Relaxed};
use leasehold_core::sync::{Arc, UnsafeCell, thread};
use leasehold_core::*;
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};

/// The events over all executions of a model.
#[derive(Clone, Default)]
pub struct Seen(std::sync::Arc<Mutex<BTreeMap<&'static str, u64>>>);

impl Seen {
    pub fn note(&self, what: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
    }
}

/// Explores `model` with at most `preemptions` preemptions, and requires that all of `expected`
/// occurred.
pub fn explore(
    name: &str,
    preemptions: usize,
    expected: &[&str],
    model: impl Fn(&Seen) + Send + Sync + 'static,
) {
    let seen = Seen::default();
    let inside = seen.clone();
    let mut builder = loom::model::Builder::new();
    // `LOOM_MAX_PREEMPTIONS` makes the exploration shorter.
    builder.preemption_bound =
        Some(builder.preemption_bound.map_or(preemptions, |asked| asked.min(preemptions)));
    let begin = std::time::Instant::now();
    builder.check(move || {
        inside.note("executions");
        model(&inside);
    });
    let seen = seen.0.lock().unwrap_or_else(PoisonError::into_inner);
    println!("{name}: {seen:?} in {:.1} s", begin.elapsed().as_secs_f32());
    for what in expected {
        assert!(
            seen.contains_key(what),
            "{name} is vacuous: {what} never happened; seen: {seen:?}"
        );
    }
}

/// Runs `theirs` on another thread beside `mine`.
///
/// Loom 0.7 checks an operation for races only with the last access to the same atomic. A thread
/// that loads a word and then writes it hides the other thread's earlier load behind its own. Loom
/// then never tries the order in which that load comes first. A common relaxed counter, which
/// orders nothing, makes loom try both orders.
pub fn side_by_side<T: 'static, U>(
    theirs: impl FnOnce() -> T + 'static,
    mine: impl FnOnce() -> U,
) -> (T, U) {
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
    /// Loom reports a leaked count, and so a lost payload.
    _alive: Arc<()>,
}

// SAFETY: the cell is written only through `&mut`, as loom checks.
unsafe impl Sync for Item {}

impl Item {
    pub fn read(&self) -> u32 {
        // SAFETY: the caller holds a shared lease; loom checks that no thread writes.
        self.cell.with(|p| unsafe { *p })
    }

    pub fn write(&mut self) {
        // SAFETY: the access is exclusive; loom checks that no other thread reads.
        self.cell.with_mut(|p| unsafe { *p += 1 });
    }
}

impl Tagged for Item {
    type Tag = tags::Event;
}

/// Makes items. Idle ones are recycled or, with `destroy`, destroyed at once.
pub struct Items {
    pub alive: Arc<()>,
    pub destroy: bool,
    /// Every last drop reads it, and the pool's destruction writes it. So loom finds a pool that is
    /// freed too early, or without an order.
    pub pool: UnsafeCell<()>,
}

// SAFETY: only the drop writes the cell, as loom checks.
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

    fn recycle(&self, item: &mut Item) -> Recycle {
        item.write();
        self.pool.with(|_| ());
        if self.destroy { Recycle::Destroy } else { Recycle::Keep }
    }
}

pub fn config(thread_cells: bool) -> PoolConfig {
    PoolConfig { block: 1, thread_cells, ..PoolConfig::default() }
}

pub fn items(alive: &Arc<()>, destroy: bool) -> Items {
    Items { alive: alive.clone(), destroy, pool: UnsafeCell::new(()) }
}

/// A pool, and the count of its payloads (and of the pool's resource type).
pub fn pool(config: PoolConfig, destroy: bool) -> (Arc<SlotPool<Items>>, Arc<()>) {
    let alive = Arc::new(());
    let pool = SlotPool::new(items(&alive, destroy), config).ok().expect("a valid configuration");
    (Arc::new(pool), alive)
}

/// The number of payloads while the pool exists.
pub fn existing(alive: &Arc<()>) -> usize {
    Arc::strong_count(alive) - 2
}

pub fn ok<T>(result: Result<T>) -> T {
    result.unwrap_or_else(|e| panic!("{e}"))
}
