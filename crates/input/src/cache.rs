//! The compile cache: compiled kernels on disk, so that a process does not repeat another process's
//! compilation.
//!
//! # Layout
//! The cache is one directory with one file per kernel. A file's name is a hash of the key: source,
//! name, options, architecture, compiler's and driver's version. The file holds the key itself too.
//! So a collision of hashes is a miss and never another kernel's code.
//!
//! # Protocol
//! A writer fills a file of its own name (`….tmp`) and renames it. So readers see all of a file
//! or none of it. Of several writers of one key the last one wins, with the same content. A file
//! that is truncated, corrupted or of another format fails its checksum. The cache then compiles
//! the kernel again and replaces the file. The cache locks nothing. A directory that cannot be
//! written only costs the compilation. The first write of a process removes the oldest files beyond
//! 1 GiB.
//!
//! # Ownership and permissions
//! A cached kernel runs on the device with this user's rights, and the checksum has no key. So the
//! directory must belong to the user, and no other user may have write permission. The cache checks
//! this at every look-up. A file must be a regular file of the user, without write permission for
//! others, and of bounded size. The cache follows no links, and opens no file that could block. If
//! a directory or file fails a check, the cache leaves it alone with a warning and runs the
//! compiler.
//!
//! This module must not know compilers.

use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, SystemTime};
use std::{env, fs, io, process};

/// The first bytes of a file. The digit is the version of the format.
const MAGIC: &[u8; 8] = b"LHKRNL1\n";
/// Bytes of the header: magic, bytes of the key, bytes of the image, checksum of both.
const HEADER: usize = 8 + 8 + 8 + 8;
/// The most bytes of a file. A kernel's image is some KiB to a few MiB.
const FILE_MAX: u64 = 64 << 20;
/// The most bytes of all files, where a process begins to write.
const DIRECTORY_MAX: u64 = 1 << 30;
/// Temporary files older than this belong to writers that ended early, and are removed.
const ABANDONED: Duration = Duration::from_secs(3600);

/// All inputs of a compilation.
#[derive(Debug, Clone, Copy)]
pub struct Key<'a> {
    /// The source text.
    pub source: &'a str,
    /// The name given to the compiler.
    pub name: &'a str,
    /// The compiler's options, in order.
    pub options: &'a [String],
    /// The target architecture: `compute_90`.
    pub architecture: &'a str,
    /// The compiler: `nvrtc 13.0`.
    pub compiler: &'a str,
    /// The driver's version, as in 13000.
    pub driver: i32,
}

impl Key<'_> {
    /// The key as bytes. Each part has its length in front, so different keys have different bytes.
    fn bytes(&self) -> Vec<u8> {
        let mut bytes = Vec::with_capacity(self.source.len() + 128);
        let mut part = |text: &str| {
            bytes.extend_from_slice(&(text.len() as u64).to_le_bytes());
            bytes.extend_from_slice(text.as_bytes());
        };
        for text in [self.architecture, self.compiler, &self.driver.to_string(), self.name] {
            part(text);
        }
        part(&self.options.len().to_string());
        for option in self.options {
            part(option);
        }
        part(self.source);
        bytes
    }
}

/// FNV-1a: a change of any single byte changes the hash.
fn hash(seed: u64, bytes: &[u8]) -> u64 {
    bytes
        .iter()
        .fold(seed, |hash, &byte| (hash ^ u64::from(byte)).wrapping_mul(0x0000_0100_0000_01b3))
}

const SEED: u64 = 0xcbf2_9ce4_8422_2325;
const OTHER_SEED: u64 = 0x9e37_79b9_7f4a_7c15;

/// The cache of one directory, or none.
#[derive(Debug)]
pub struct CompileCache {
    directory: Option<PathBuf>,
    /// A serial number that makes the names of temporary files distinct within the process.
    serial: AtomicU64,
    /// Whether the user was warned that the directory is not usable.
    warned: AtomicBool,
}

impl CompileCache {
    /// A cache in this directory. The first write makes the directory.
    #[must_use]
    pub fn at(directory: impl Into<PathBuf>) -> Self {
        Self { directory: Some(directory.into()), ..Self::off() }
    }

    /// A cache that stores nothing: every kernel is compiled.
    #[must_use]
    pub fn off() -> Self {
        Self { directory: None, serial: AtomicU64::new(0), warned: AtomicBool::new(false) }
    }

    /// The cache that the environment names. The directory is `kernels` in `LEASEHOLD_CACHE_DIR`,
    /// in `leasehold` of `XDG_CACHE_HOME`, or in `~/.cache/leasehold`. Without any of them, the
    /// cache is [off](Self::off). An empty `LEASEHOLD_CACHE_DIR` disables the cache.
    #[must_use]
    pub fn from_env() -> Self {
        directory(|name| env::var_os(name).map(PathBuf::from)).map_or_else(Self::off, Self::at)
    }

    /// The image for this key: a stored one, or the result of `compile`. Does file I/O; blocks
    /// while it compiles.
    ///
    /// # Errors
    /// The compiler's, never the cache's own. A failure is not stored.
    pub fn get_or_compile<E>(
        &self,
        key: &Key<'_>,
        compile: impl FnOnce() -> Result<Vec<u8>, E>,
    ) -> Result<Vec<u8>, E> {
        let Some(directory) = self.directory.as_deref().filter(|directory| self.may_use(directory))
        else {
            return compile();
        };
        let key = key.bytes();
        let file =
            directory.join(format!("{:016x}{:016x}.bin", hash(SEED, &key), hash(OTHER_SEED, &key)));
        match read_own(&file) {
            Ok(bytes) => match unwrap(&bytes, &key) {
                Some(image) => return Ok(image.to_vec()),
                None => {
                    tracing::warn!(file = %file.display(), "a cached kernel is damaged; it is compiled again")
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "a cached kernel is not read; it is compiled again");
            }
        }
        let image = compile()?;
        if let Err(error) = self.store(directory, &file, &wrap(&key, &image)) {
            tracing::debug!(file = %file.display(), %error, "a compiled kernel cannot be cached");
        }
        Ok(image)
    }

    /// Whether the directory belongs to this user alone, or does not exist yet. Warns once.
    fn may_use(&self, directory: &Path) -> bool {
        match fs::symlink_metadata(directory) {
            Ok(data) => match check_owner(&data, data.is_dir(), "a directory") {
                Ok(()) => true,
                Err(error) => {
                    if !self.warned.swap(true, Ordering::Relaxed) {
                        tracing::warn!(directory = %directory.display(), %error, "the kernel cache is not used");
                    }
                    false
                }
            },
            Err(error) => error.kind() == io::ErrorKind::NotFound,
        }
    }

    fn store(&self, directory: &Path, file: &Path, bytes: &[u8]) -> io::Result<()> {
        if bytes.len() as u64 > FILE_MAX {
            return Err(io::Error::other("the kernel is too large to be cached"));
        }
        let serial = self.serial.fetch_add(1, Ordering::Relaxed);
        if serial == 0 {
            create_private(directory)?;
            tidy(directory, DIRECTORY_MAX);
        }
        // The directory is checked after its creation, because another user may have made it.
        let data = fs::symlink_metadata(directory)?;
        check_owner(&data, data.is_dir(), "a directory")?;
        // The address distinguishes several caches of one process.
        let temporary = file.with_extension(format!(
            "{}-{:x}-{serial}.tmp",
            process::id(),
            std::ptr::from_ref(self).addr()
        ));
        let mut options = fs::OpenOptions::new();
        // The file must be new, so a link with this name is not followed.
        options.write(true).create_new(true);
        #[cfg(unix)]
        std::os::unix::fs::OpenOptionsExt::mode(&mut options, 0o600);
        let written = options
            .open(&temporary)
            .and_then(|mut new| new.write_all(bytes))
            .and_then(|()| fs::rename(&temporary, file));
        if written.is_err() {
            let _ = fs::remove_file(&temporary);
        }
        written
    }
}

/// Refuses an entry that is not of the wanted kind, belongs to another user, or is writable by
/// others.
fn check_owner(data: &fs::Metadata, is_kind: bool, kind: &str) -> io::Result<()> {
    if !is_kind {
        return Err(io::Error::other(format!("it is not {kind}")));
    }
    #[cfg(unix)]
    {
        use std::os::unix::fs::MetadataExt;
        let me = rustix::process::geteuid().as_raw();
        if data.uid() != me {
            return Err(io::Error::other(format!(
                "it belongs to user {}, not to {me}",
                data.uid()
            )));
        }
        if data.mode() & 0o022 != 0 {
            return Err(io::Error::other(format!(
                "others may write it (mode {:o}; chmod go-w)",
                data.mode() & 0o7777
            )));
        }
    }
    Ok(())
}

/// Reads a regular file of this user, of bounded size. Does not block on other kinds of files.
fn read_own(file: &Path) -> io::Result<Vec<u8>> {
    let mut options = fs::OpenOptions::new();
    options.read(true);
    #[cfg(unix)]
    std::os::unix::fs::OpenOptionsExt::custom_flags(
        &mut options,
        libc::O_NOFOLLOW | libc::O_NONBLOCK | libc::O_NOCTTY,
    );
    let opened = options.open(file)?;
    // The check is of the opened file, because the name may mean another file by now.
    let data = opened.metadata()?;
    check_owner(&data, data.is_file(), "a regular file")?;
    if data.len() > FILE_MAX {
        return Err(io::Error::other(format!(
            "it has {} bytes; {FILE_MAX} are the most",
            data.len()
        )));
    }
    let mut bytes = Vec::with_capacity(data.len() as usize);
    // The file may grow meanwhile.
    opened.take(FILE_MAX).read_to_end(&mut bytes)?;
    Ok(bytes)
}

/// Finds the directory. `var` looks up an environment variable.
fn directory(var: impl Fn(&str) -> Option<PathBuf>) -> Option<PathBuf> {
    let base = match var("LEASEHOLD_CACHE_DIR") {
        Some(directory) if directory.as_os_str().is_empty() => return None,
        Some(directory) => directory,
        None => match var("XDG_CACHE_HOME").filter(|directory| directory.is_absolute()) {
            Some(directory) => directory.join("leasehold"),
            None => var("HOME")
                .filter(|directory| directory.is_absolute())?
                .join(".cache")
                .join("leasehold"),
        },
    };
    Some(base.join("kernels"))
}

/// Makes a directory that only this user reads, because its files will run on a device.
fn create_private(directory: &Path) -> io::Result<()> {
    let mut builder = fs::DirBuilder::new();
    builder.recursive(true);
    #[cfg(unix)]
    std::os::unix::fs::DirBuilderExt::mode(&mut builder, 0o700);
    builder.create(directory)
}

/// Removes temporary files of writers that ended before they renamed them, and the oldest kernels
/// beyond `most` bytes.
fn tidy(directory: &Path, most: u64) {
    let Ok(files) = fs::read_dir(directory) else { return };
    let now = SystemTime::now();
    let mut kept = Vec::new();
    for file in files.flatten() {
        let path = file.path();
        let Some((size, age)) = file.metadata().ok().and_then(|data| {
            Some((data.len(), now.duration_since(data.modified().ok()?).unwrap_or_default()))
        }) else {
            continue;
        };
        match path.extension().and_then(|extension| extension.to_str()) {
            Some("tmp") if age > ABANDONED => drop(fs::remove_file(path)),
            Some("bin") => kept.push((age, size, path)),
            _ => {}
        }
    }
    kept.sort_unstable();
    let mut sum = 0;
    for (_, size, path) in kept {
        sum += size;
        if sum > most {
            let _ = fs::remove_file(path);
        }
    }
}

/// A file's content.
fn wrap(key: &[u8], image: &[u8]) -> Vec<u8> {
    let mut bytes = Vec::with_capacity(HEADER + key.len() + image.len());
    bytes.extend_from_slice(MAGIC);
    bytes.extend_from_slice(&(key.len() as u64).to_le_bytes());
    bytes.extend_from_slice(&(image.len() as u64).to_le_bytes());
    let checksum = hash(hash(hash(SEED, &bytes), key), image);
    bytes.extend_from_slice(&checksum.to_le_bytes());
    bytes.extend_from_slice(key);
    bytes.extend_from_slice(image);
    bytes
}

/// The image in a file's content, if the file is complete and belongs to this key.
fn unwrap<'a>(bytes: &'a [u8], key: &[u8]) -> Option<&'a [u8]> {
    let (header, body) = bytes.split_at_checked(HEADER)?;
    let word = |at: usize| header[at..at + 8].try_into().map(u64::from_le_bytes).ok();
    if !header.starts_with(MAGIC) || word(8)? != key.len() as u64 {
        return None;
    }
    let (stored, image) = body.split_at_checked(key.len())?;
    let whole = stored == key && word(16)? == image.len() as u64;
    (whole && word(24)? == hash(hash(hash(SEED, &header[..24]), stored), image)).then_some(image)
}

#[cfg(test)]
#[path = "../tests/unit/cache.rs"]
mod tests;
