//! A store in a folder, for processes that have one in common.
//!
//! A key is a file, which is written under another name first. A rank is a locked file: the system
//! unlocks it when the process ends, however it ends.

use super::{LONGEST_VALUE, Presence, Store, check_key, check_value, late, left, sum, taken};
use crate::error::timeout;
use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Mutex, thread};
use leasehold::{Error, Result};
use leasehold_input::{Cause, Refusal};
use std::fs::{self, File, TryLockError};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// How long a wait sleeps between two looks, at the most.
const LOOK: Duration = Duration::from_millis(10);
/// How long another process may hold the lock of the numbers.
const HELD: Duration = Duration::from_secs(30);

/// A store in a folder that all ranks see. Whoever may write the folder may write the store. Each
/// run needs a folder of its own.
#[derive(Debug)]
pub struct FileStore {
    folder: PathBuf,
    /// The locked file of the rank that this process is.
    rank: Mutex<Option<(u32, File)>>,
}

/// Distinguishes the files that one process writes.
static WRITTEN: AtomicU64 = AtomicU64::new(0);

impl FileStore {
    /// A store in a folder, which is made if it is not there.
    ///
    /// # Errors
    /// `Other` with the system's error and the folder.
    pub fn open(folder: impl AsRef<Path>) -> Result<Self> {
        let folder = folder.as_ref().to_owned();
        let mut builder = fs::DirBuilder::new();
        builder.recursive(true);
        #[cfg(unix)]
        std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
        builder.create(&folder).map_err(|e| failed("made", &folder, &e))?;
        Ok(Self { folder, rank: Mutex::new(None) })
    }

    fn path(&self, key: &str) -> PathBuf {
        self.folder.join(format!("key-{}", key.replace('/', "%")))
    }

    /// Puts a value in a file that nobody sees yet, and returns its path.
    fn written(&self, value: &[u8]) -> Result<PathBuf> {
        loop {
            let serial = WRITTEN.fetch_add(1, Ordering::Relaxed);
            let path = self.folder.join(format!("new-{}-{serial}", std::process::id()));
            match File::create_new(&path).and_then(|mut file| file.write_all(value)) {
                Ok(()) => return Ok(path),
                // Of a process that has ended, or somebody else's pipe.
                Err(e) if e.kind() == ErrorKind::AlreadyExists => {}
                Err(e) => return Err(failed("written", &path, &e)),
            }
        }
    }

    fn put(&self, key: &str, value: &[u8]) -> Result<()> {
        let (new, path) = (self.written(value)?, self.path(key));
        fs::rename(&new, &path).map_err(|e| failed("renamed", &new, &e))
    }

    fn look(&self, key: &str) -> Result<Option<Vec<u8>>> {
        found(leasehold_input::read(&self.path(key), LONGEST_VALUE as u64))
    }

    /// The file whose lock is that of all numbers.
    fn lock(&self, path: &Path) -> Result<File> {
        match File::create_new(path) {
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                leasehold_input::open(path).map_err(|e| refused(&e))
            }
            made => made.map_err(|e| failed("made", path, &e)),
        }
    }

    /// Takes a file's lock, which a process may hold that was stopped.
    fn take(&self, lock: &File, path: &Path) -> Result<()> {
        let until = Instant::now().checked_add(HELD);
        loop {
            match lock.try_lock() {
                Ok(()) => return Ok(()),
                Err(TryLockError::WouldBlock) if !left(until).is_zero() => {
                    thread::sleep(Duration::from_millis(1));
                }
                Err(TryLockError::WouldBlock) => {
                    return Err(timeout(format!(
                        "{} was locked for {HELD:?}; look for a process that was stopped",
                        path.display()
                    )));
                }
                Err(TryLockError::Error(e)) => return Err(failed("locked", path, &e)),
            }
        }
    }

    fn rank_path(&self, rank: u32) -> PathBuf {
        self.folder.join(format!("rank-{rank}"))
    }
}

#[cold]
fn failed(what: &str, path: &Path, error: &std::io::Error) -> Error {
    Error::other(format!("the store's {} cannot be {what}: {error}", path.display()))
}

#[cold]
fn refused(refusal: &Refusal) -> Error {
    Error::other(format!("a file of the store: {refusal}; give each run a folder of its own"))
}

/// The contents of a file that is there. Only a regular file is opened: a pipe would not end.
fn found<T>(opened: std::result::Result<T, Refusal>) -> Result<Option<T>> {
    match opened {
        Ok(opened) => Ok(Some(opened)),
        Err(e) if e.cause == Cause::Missing => Ok(None),
        Err(e) => Err(refused(&e)),
    }
}

impl Store for FileStore {
    fn place(&self) -> String {
        format!("file:{}", self.folder.display())
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        self.put(key, value)
    }

    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        let until = Instant::now().checked_add(limit);
        let mut pause = Duration::from_micros(100);
        loop {
            if let Some(value) = self.look(key)? {
                return Ok(value);
            }
            let left = left(until);
            if left.is_zero() {
                return Err(late(key, &self.place(), limit));
            }
            thread::sleep(pause.min(left));
            pause = (2 * pause).min(LOOK);
        }
    }

    fn add(&self, key: &str, by: i64) -> Result<i64> {
        check_key(key)?;
        let path = self.folder.join("lock");
        let lock = self.lock(&path)?;
        self.take(&lock, &path)?;
        let sum = sum(key, self.look(key)?.as_deref(), by)?;
        self.put(key, sum.to_string().as_bytes())?;
        Ok(sum)
    }

    fn remove(&self, key: &str) -> Result<()> {
        check_key(key)?;
        let path = self.path(key);
        match fs::remove_file(&path) {
            Err(e) if e.kind() != ErrorKind::NotFound => Err(failed("removed", &path, &e)),
            _ => Ok(()),
        }
    }

    fn enter(&self, rank: u32) -> Result<()> {
        let mut own = self.rank.lock();
        if own.is_some() {
            return Err(taken(rank, &self.place()));
        }
        // The file has its name only once it is locked: nobody sees a rank that seems gone.
        let new = self.written(std::process::id().to_string().as_bytes())?;
        let file = File::open(&new).map_err(|e| failed("opened", &new, &e))?;
        self.take(&file, &new)?;
        let linked = fs::hard_link(&new, self.rank_path(rank));
        let _ = fs::remove_file(&new);
        match linked {
            Ok(()) => *own = Some((rank, file)),
            Err(e) if e.kind() == ErrorKind::AlreadyExists => {
                return Err(taken(rank, &self.place()));
            }
            Err(e) => return Err(failed("linked", &self.rank_path(rank), &e)),
        }
        Ok(())
    }

    fn presence(&self, rank: u32) -> Result<Presence> {
        if self.rank.lock().as_ref().is_some_and(|(own, _)| *own == rank) {
            return Ok(Presence::Here);
        }
        let path = self.rank_path(rank);
        let Some(file) = found(leasehold_input::open(&path))? else {
            return Ok(Presence::Awaited);
        };
        match file.try_lock_shared() {
            Ok(()) => Ok(Presence::Gone),
            Err(TryLockError::WouldBlock) => Ok(Presence::Here),
            Err(TryLockError::Error(e)) => Err(failed("locked", &path, &e)),
        }
    }
}
