//! A store in the memory of the process, for ranks that are threads.

use super::{Presence, Store, check_key, check_value, late, left, sum, taken};
use leasehold::backend::sync::{Arc, Condvar, Mutex};
use leasehold::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::time::{Duration, Instant};

/// Keys, values and ranks. Also what rank 0 of a TCP store serves.
#[derive(Default)]
pub(super) struct Table {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    values: HashMap<String, Vec<u8>>,
    /// The bytes of all keys and values.
    bytes: usize,
    ranks: HashMap<u32, Presence>,
}

/// The most bytes of all keys and values.
const MOST: usize = 1 << 30;

impl Table {
    pub(super) fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        let mut state = self.state.lock();
        if state.bytes + key.len() + value.len() > MOST {
            return Err(Error::state(format!("the store is full: {MOST} bytes; remove keys")));
        }
        state.bytes += key.len() + value.len();
        if let Some(old) = state.values.insert(key.to_owned(), value.to_vec()) {
            state.bytes -= key.len() + old.len();
        }
        drop(state);
        self.changed.notify_all();
        Ok(())
    }

    /// The value of a key, once it has one, or nothing after the limit.
    pub(super) fn get(&self, key: &str, limit: Duration) -> Result<Option<Vec<u8>>> {
        check_key(key)?;
        let until = Instant::now().checked_add(limit);
        let mut state = self.state.lock();
        loop {
            if let Some(value) = state.values.get(key) {
                return Ok(Some(value.clone()));
            }
            match until {
                Some(until) => {
                    if self.changed.wait_until(&mut state, until).timed_out() {
                        return Ok(state.values.get(key).cloned());
                    }
                }
                None => self.changed.wait(&mut state),
            }
        }
    }

    pub(super) fn add(&self, key: &str, by: i64) -> Result<i64> {
        check_key(key)?;
        let mut state = self.state.lock();
        let sum = sum(key, state.values.get(key).map(Vec::as_slice), by)?;
        let text = sum.to_string().into_bytes();
        state.bytes += text.len();
        match state.values.insert(key.to_owned(), text) {
            Some(old) => state.bytes -= old.len(),
            None => state.bytes += key.len(),
        }
        drop(state);
        self.changed.notify_all();
        Ok(sum)
    }

    pub(super) fn remove(&self, key: &str) -> Result<()> {
        check_key(key)?;
        let mut state = self.state.lock();
        if let Some(old) = state.values.remove(key) {
            state.bytes -= key.len() + old.len();
        }
        Ok(())
    }

    /// Takes a rank; `false` if somebody has or had it.
    pub(super) fn enter(&self, rank: u32) -> bool {
        let mut state = self.state.lock();
        let free = !state.ranks.contains_key(&rank);
        if free {
            state.ranks.insert(rank, Presence::Here);
        }
        free
    }

    pub(super) fn leave(&self, rank: u32) {
        self.state.lock().ranks.insert(rank, Presence::Gone);
    }

    pub(super) fn presence(&self, rank: u32) -> Presence {
        self.state.lock().ranks.get(&rank).copied().unwrap_or(Presence::Awaited)
    }
}

/// A store for ranks that are threads of one process. Each rank has its own value, from
/// [`share`](Self::share).
#[derive(Default)]
pub struct ThreadStore {
    table: Arc<Table>,
    rank: Mutex<Option<u32>>,
}

impl ThreadStore {
    /// A store without keys.
    #[must_use]
    pub fn new() -> Self {
        Self::default()
    }

    /// The same store, for another rank.
    #[must_use]
    pub fn share(&self) -> Self {
        Self { table: self.table.clone(), rank: Mutex::new(None) }
    }
}

impl Store for ThreadStore {
    fn place(&self) -> String {
        "the store of this process's threads".to_owned()
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.table.set(key, value)
    }

    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.table.get(key, limit)?.ok_or_else(|| late(key, &self.place(), limit))
    }

    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.table.add(key, by)
    }

    fn remove(&self, key: &str) -> Result<()> {
        self.table.remove(key)
    }

    fn enter(&self, rank: u32) -> Result<()> {
        let mut own = self.rank.lock();
        if own.is_some() || !self.table.enter(rank) {
            return Err(taken(rank, &self.place()));
        }
        *own = Some(rank);
        Ok(())
    }

    fn presence(&self, rank: u32) -> Result<Presence> {
        Ok(self.table.presence(rank))
    }
}

impl Drop for ThreadStore {
    fn drop(&mut self) {
        if let Some(rank) = *self.rank.lock() {
            if !std::thread::panicking() {
                // Read by the other ranks' watchdogs. A full table loses the word alone.
                let _ = self.table.set(&format!("left/{rank}"), b"");
            }
            self.table.leave(rank);
        }
    }
}

impl fmt::Debug for ThreadStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("ThreadStore")
    }
}

/// The rest of a wait, in a slice.
pub(super) fn slice(until: Option<Instant>, most: Duration) -> Duration {
    left(until).min(most)
}
