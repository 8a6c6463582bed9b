//! Stores: keys and values that the ranks of a world share.
//!
//! | store | for | a rank is gone when |
//! |---|---|---|
//! | [`ThreadStore`] | threads of one process | its [`World`](crate::World) is dropped |
//! | [`FileStore`] | processes with a common folder | its process has ended |
//! | [`TcpStore`] | processes of several hosts; rank 0 serves | its connection is closed |
//!
//! A store is for small values at times when nothing is urgent: ids, lists, comparisons. It moves
//! no elements.
//!
//! This module must not know worlds or communicators.

mod file;
mod tcp;
mod threads;

pub use file::FileStore;
pub use tcp::TcpStore;
pub use threads::ThreadStore;

use crate::error::timeout;
use leasehold::{Error, Result};
use std::fmt;
use std::time::{Duration, Instant};

/// The most bytes of a key. Keys are letters, digits and `/ . _ - #`.
pub const LONGEST_KEY: usize = 200;
/// The most bytes of a value.
pub const LONGEST_VALUE: usize = 1 << 20;

/// Whether a rank takes part.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Presence {
    /// It has not come yet.
    Awaited,
    /// It is there.
    Here,
    /// It was there, and is gone.
    Gone,
}

/// Keys and values that ranks share. Any thread may call it.
pub trait Store: Send + Sync + fmt::Debug {
    /// Where the store is, for messages: `tcp://127.0.0.1:29501`.
    fn place(&self) -> String;

    /// Sets a key, which may have a value.
    ///
    /// # Errors
    /// `InvalidArgument` for a key or a value that is too long; the store's own.
    fn set(&self, key: &str, value: &[u8]) -> Result<()>;

    /// The value of a key, as soon as it has one: waits for `limit` at most. Zero looks once.
    ///
    /// # Errors
    /// `Timeout` that names the key; the store's own.
    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>>;

    /// Adds to a key's number, which is 0 at first, and returns the sum. Each sum is returned once.
    ///
    /// # Errors
    /// `InvalidState` for a key whose value is no number; the store's own.
    fn add(&self, key: &str, by: i64) -> Result<i64>;

    /// Removes a key, if it is there.
    ///
    /// # Errors
    /// The store's own.
    fn remove(&self, key: &str) -> Result<()>;

    /// Says that this process or thread is a rank, until the store's value is dropped.
    ///
    /// # Errors
    /// `InvalidState` for a rank that is taken; the store's own.
    fn enter(&self, rank: u32) -> Result<()>;

    /// Whether a rank takes part.
    ///
    /// # Errors
    /// The store's own.
    fn presence(&self, rank: u32) -> Result<Presence>;

    /// Waits until all keys have values, for `limit` at most.
    ///
    /// # Errors
    /// As [`get`](Self::get), for the first key that has none.
    fn wait(&self, keys: &[&str], limit: Duration) -> Result<()> {
        let until = Instant::now().checked_add(limit);
        keys.iter().try_for_each(|key| self.get(key, left(until)).map(drop))
    }

    /// Waits until `size` callers have called it with this key, for `limit` at most. A key serves
    /// once.
    ///
    /// # Errors
    /// `Timeout` that says how many have come.
    fn barrier(&self, key: &str, size: u32, limit: Duration) -> Result<()> {
        let open = format!("{key}/open");
        let come = self.add(key, 1)?;
        if come == i64::from(size) {
            return self.set(&open, b"");
        }
        match self.get(&open, limit) {
            Err(Error::Timeout(_)) => Err(timeout(format!(
                "barrier {key}: {} of {size} have come to {} within {limit:?}; look at what the others do",
                self.add(key, 0)?,
                self.place()
            ))),
            got => got.map(drop),
        }
    }
}

/// The time that is left until a deadline; without one, for ever.
pub(crate) fn left(until: Option<Instant>) -> Duration {
    until.map_or(Duration::MAX, |until| until.saturating_duration_since(Instant::now()))
}

/// Checks a key.
pub(crate) fn check_key(key: &str) -> Result<()> {
    let fits = |c: char| c.is_ascii_alphanumeric() || "/._-#".contains(c);
    if key.is_empty() || key.len() > LONGEST_KEY || !key.chars().all(fits) {
        return Err(Error::invalid(format!(
            "{:?} is no key of a store; take 1 to {LONGEST_KEY} letters, digits and / . _ - #",
            key.chars().take(LONGEST_KEY).collect::<String>()
        )));
    }
    Ok(())
}

/// Checks a value.
pub(crate) fn check_value(key: &str, value: &[u8]) -> Result<()> {
    if value.len() > LONGEST_VALUE {
        return Err(Error::invalid(format!(
            "the value of {key} has {} bytes, and a store takes {LONGEST_VALUE}; cut it into several keys",
            value.len()
        )));
    }
    Ok(())
}

/// A key that got no value in time.
#[cold]
pub(crate) fn late(key: &str, place: &str, limit: Duration) -> Error {
    timeout(format!(
        "{key} was not set in {place} within {limit:?}; look at what the rank does that sets it"
    ))
}

/// A rank that somebody else is.
#[cold]
pub(crate) fn taken(rank: u32, place: &str) -> Error {
    Error::state(format!(
        "rank {rank} is taken in {place}; give each process a rank of its own, and each run a store of its own"
    ))
}

/// The sum of a key's number and another one.
pub(crate) fn sum(key: &str, value: Option<&[u8]>, by: i64) -> Result<i64> {
    let old = value.map_or(Ok(0), |value| number(key, value))?;
    old.checked_add(by).ok_or_else(|| {
        Error::invalid(format!("{key} has {old}, and {by} more is no 64-bit number"))
    })
}

/// A number as a value of a store.
pub(crate) fn number(key: &str, value: &[u8]) -> Result<i64> {
    let text = std::str::from_utf8(value).ok();
    text.and_then(|text| text.parse().ok())
        .ok_or_else(|| Error::state(format!("the value of {key} is no number; add to another key")))
}
