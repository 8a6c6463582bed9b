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
//! written only costs the compilation.
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

use leasehold_core::Result;
use leasehold_core::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::io::{Read, Write};
use std::path::{Path, PathBuf};
use std::time::{Duration, SystemTime};
use std::{env, fs, io, process};

/// The first bytes of a file. The digit is the version of the format.
const MAGIC: &[u8; 8] = b"LHKRNL1\n";
/// Bytes of the header: magic, bytes of the key, bytes of the image, checksum of both.
const HEADER: usize = 8 + 8 + 8 + 8;
/// The most bytes of a file. A kernel's image is some KiB to a few MiB.
const FILE_MAX: u64 = 64 << 20;
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
    hits: AtomicU64,
    misses: AtomicU64,
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
        Self {
            directory: None,
            hits: AtomicU64::new(0),
            misses: AtomicU64::new(0),
            serial: AtomicU64::new(0),
            warned: AtomicBool::new(false),
        }
    }

    /// The cache that the environment names. The directory is `kernels` in `LEASEHOLD_CACHE_DIR`,
    /// in `leasehold` of `XDG_CACHE_HOME`, or in `~/.cache/leasehold`. Without any of them, the
    /// cache is [off](Self::off). An empty `LEASEHOLD_CACHE_DIR` disables the cache.
    #[must_use]
    pub fn from_env() -> Self {
        directory(|name| env::var_os(name).map(PathBuf::from)).map_or_else(Self::off, Self::at)
    }

    /// The directory of the files, if the cache has one.
    #[must_use]
    pub fn directory(&self) -> Option<&Path> {
        self.directory.as_deref()
    }

    /// The number of hits and of misses.
    #[must_use]
    pub fn counts(&self) -> (u64, u64) {
        (self.hits.load(Ordering::Relaxed), self.misses.load(Ordering::Relaxed))
    }

    /// The image for this key: a stored one, or the result of `compile`. Does file I/O; blocks
    /// while it compiles.
    ///
    /// # Errors
    /// The compiler's, never the cache's own. A failure is not stored.
    pub fn get_or_compile(
        &self,
        key: &Key<'_>,
        compile: impl FnOnce() -> Result<Vec<u8>>,
    ) -> Result<Vec<u8>> {
        let Some(directory) = self.directory.as_deref().filter(|directory| self.may_use(directory))
        else {
            self.misses.fetch_add(1, Ordering::Relaxed);
            return compile();
        };
        let key = key.bytes();
        let file =
            directory.join(format!("{:016x}{:016x}.bin", hash(SEED, &key), hash(OTHER_SEED, &key)));
        match read_own(&file) {
            Ok(bytes) => match unwrap(&bytes, &key) {
                Some(image) => {
                    self.hits.fetch_add(1, Ordering::Relaxed);
                    return Ok(image.to_vec());
                }
                None => {
                    tracing::warn!(file = %file.display(), "a cached kernel is damaged; it is compiled again")
                }
            },
            Err(error) if error.kind() == io::ErrorKind::NotFound => {}
            Err(error) => {
                tracing::warn!(file = %file.display(), %error, "a cached kernel is not read; it is compiled again");
            }
        }
        self.misses.fetch_add(1, Ordering::Relaxed);
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
            remove_abandoned(directory);
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
        // SAFETY: the call has no arguments, touches no memory and cannot fail.
        let me = unsafe { libc::geteuid() };
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

/// Removes temporary files of writers that ended before they renamed them.
fn remove_abandoned(directory: &Path) {
    let Ok(files) = fs::read_dir(directory) else { return };
    let now = SystemTime::now();
    for file in files.flatten() {
        let path = file.path();
        if path.extension().is_none_or(|extension| extension != "tmp") {
            continue;
        }
        let age = file
            .metadata()
            .and_then(|data| data.modified())
            .ok()
            .and_then(|then| now.duration_since(then).ok());
        if age.is_some_and(|age| age > ABANDONED) {
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
mod tests {
    use super::*;
    use leasehold_core::Error;
    use leasehold_core::sync::atomic::AtomicUsize;

    fn key<'a>(source: &'a str, options: &'a [String]) -> Key<'a> {
        Key {
            source,
            name: "k.cu",
            options,
            architecture: "compute_90",
            compiler: "nvrtc 13.0",
            driver: 13000,
        }
    }

    /// A compiler that counts its runs. The image tells its source.
    fn compile(source: &str, runs: &AtomicUsize) -> Result<Vec<u8>> {
        runs.fetch_add(1, Ordering::Relaxed);
        Ok(format!("image of {source}").into_bytes())
    }

    fn only_file(directory: &Path) -> PathBuf {
        let files: Vec<_> = fs::read_dir(directory).unwrap().map(|f| f.unwrap().path()).collect();
        assert_eq!(files.len(), 1, "{files:?}");
        files.into_iter().next().unwrap()
    }

    #[test]
    fn the_second_time_it_is_read() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CompileCache::at(directory.path().join("a/b"));
        let runs = AtomicUsize::new(0);
        for _ in 0..3 {
            assert_eq!(
                cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap(),
                b"image of s"
            );
        }
        assert_eq!(runs.load(Ordering::Relaxed), 1);
        assert_eq!(cache.counts(), (2, 1));
        // A cache of another process in the same directory.
        let other = CompileCache::at(directory.path().join("a/b"));
        assert_eq!(
            other.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap(),
            b"image of s"
        );
        assert_eq!(runs.load(Ordering::Relaxed), 1);
    }

    #[test]
    fn every_part_of_the_key_counts() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CompileCache::at(directory.path());
        let runs = AtomicUsize::new(0);
        let (ab, a_b) = (["ab".to_owned()], ["a".to_owned(), "b".to_owned()]);
        let base = key("s", &[]);
        let keys = [
            base,
            key("t", &[]),
            key("s", &ab),
            key("s", &a_b),
            Key { name: "l.cu", ..base },
            Key { architecture: "compute_80", ..base },
            Key { compiler: "nvrtc 12.9", ..base },
            Key { driver: 12090, ..base },
        ];
        for _ in 0..2 {
            for key in &keys {
                cache.get_or_compile(key, || compile("x", &runs)).unwrap();
            }
        }
        assert_eq!(runs.load(Ordering::Relaxed), keys.len());
    }

    #[test]
    fn a_damaged_file_is_compiled_again_and_replaced() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CompileCache::at(directory.path());
        let runs = AtomicUsize::new(0);
        let get = || cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap();
        get();
        let file = only_file(directory.path());
        let good = fs::read(&file).unwrap();
        let mut expected = 1;
        let mut damage = |bytes: &[u8]| {
            fs::write(&file, bytes).unwrap();
            expected += 1;
            assert_eq!(get(), b"image of s");
            assert_eq!(runs.load(Ordering::Relaxed), expected, "not noticed");
            assert_eq!(fs::read(&file).unwrap(), good, "not replaced");
        };
        for length in [0, 1, HEADER - 1, HEADER, good.len() - 1] {
            damage(&good[..length]);
        }
        for at in 0..good.len() {
            let mut bytes = good.clone();
            bytes[at] ^= 0x20;
            damage(&bytes);
        }
        let mut longer = good.clone();
        longer.push(0);
        damage(&longer);
    }

    #[test]
    fn a_file_of_another_key_is_a_miss() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CompileCache::at(directory.path());
        let runs = AtomicUsize::new(0);
        cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap();
        let file = only_file(directory.path());
        // As if the hashes of "s" and "t" were equal: the file name of "t" holds "s".
        let other = key("t", &[]).bytes();
        let name = format!("{:016x}{:016x}.bin", hash(SEED, &other), hash(OTHER_SEED, &other));
        fs::rename(file, directory.path().join(name)).unwrap();
        assert_eq!(
            cache.get_or_compile(&key("t", &[]), || compile("t", &runs)).unwrap(),
            b"image of t"
        );
    }

    #[test]
    fn a_failure_is_not_kept() {
        let directory = tempfile::tempdir().unwrap();
        let cache = CompileCache::at(directory.path());
        let failed =
            cache.get_or_compile(&key("s", &[]), || Err(Error::Compile { log: "no".into() }));
        assert!(matches!(failed, Err(Error::Compile { .. })));
        assert!(fs::read_dir(directory.path()).unwrap().next().is_none());
    }

    #[test]
    fn without_a_writable_directory_it_still_compiles() {
        let runs = AtomicUsize::new(0);
        let directory = tempfile::tempdir().unwrap();
        // A file stands in the place of the directory: no user, not even root, can write into it.
        let file = directory.path().join("file");
        fs::write(&file, "").unwrap();
        for cache in [CompileCache::at(file.join("cache")), CompileCache::off()] {
            for _ in 0..2 {
                assert_eq!(
                    cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap(),
                    b"image of s"
                );
            }
        }
        assert_eq!(runs.load(Ordering::Relaxed), 4);
    }

    /// Checks that the compiler runs because the cache is not trusted.
    #[cfg(unix)]
    fn compiles(cache: &CompileCache, what: &str) {
        let runs = AtomicUsize::new(0);
        assert_eq!(
            cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap(),
            b"image of s",
            "{what}"
        );
        assert_eq!(runs.load(Ordering::Relaxed), 1, "{what} was taken for the compiler");
    }

    /// The path and content of a forged kernel for the key "s".
    #[cfg(unix)]
    fn forged(directory: &Path) -> (PathBuf, Vec<u8>) {
        let key = key("s", &[]).bytes();
        let name = format!("{:016x}{:016x}.bin", hash(SEED, &key), hash(OTHER_SEED, &key));
        (directory.join(name), wrap(&key, b"somebody else's image"))
    }

    #[cfg(unix)]
    #[test]
    fn a_directory_that_others_can_write_is_not_used() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let outer = tempfile::tempdir().unwrap();
        let make = |name: &str, mode: u32| {
            let directory = outer.path().join(name);
            fs::create_dir(&directory).unwrap();
            let (file, bytes) = forged(&directory);
            fs::write(&file, bytes).unwrap();
            fs::set_permissions(&file, fs::Permissions::from_mode(0o600)).unwrap();
            fs::set_permissions(&directory, fs::Permissions::from_mode(mode)).unwrap();
            directory
        };
        for mode in [0o777, 0o1777, 0o770, 0o702] {
            compiles(
                &CompileCache::at(make(&format!("{mode:o}"), mode)),
                "a directory that others can write",
            );
        }
        // The user's own directory, behind a link.
        let link = outer.path().join("link");
        symlink(make("own", 0o700), &link).unwrap();
        compiles(&CompileCache::at(&link), "a link to a directory");
        // The permissions change while the cache is in use: every look-up checks them.
        let own = outer.path().join("fresh");
        let cache = CompileCache::at(&own);
        compiles(&cache, "an empty cache");
        let runs = AtomicUsize::new(0);
        cache.get_or_compile(&key("s", &[]), || compile("s", &runs)).unwrap();
        assert_eq!(runs.load(Ordering::Relaxed), 0, "a sound one is used");
        fs::set_permissions(&own, fs::Permissions::from_mode(0o777)).unwrap();
        compiles(&cache, "a directory that was opened to others later");
        let nobody = make("nobody", 0o700);
        if chown(&nobody, Some(65534), Some(65534)).is_ok() {
            compiles(&CompileCache::at(&nobody), "a directory of another user");
        }
    }

    #[cfg(unix)]
    #[test]
    fn a_file_that_is_not_the_users_own_is_not_read() {
        use std::os::unix::fs::{PermissionsExt, chown, symlink};
        let directory = tempfile::tempdir().unwrap();
        let (file, bytes) = forged(directory.path());
        let elsewhere = directory.path().join("elsewhere");
        let plant = |to: &Path| {
            let _ = fs::remove_file(to);
            fs::write(to, &bytes).unwrap();
            fs::set_permissions(to, fs::Permissions::from_mode(0o600)).unwrap();
        };
        let cache = || CompileCache::at(directory.path());
        // A link to a valid file of the user, to an endless source, and to a missing file.
        plant(&elsewhere);
        for target in [elsewhere.as_path(), Path::new("/dev/zero"), Path::new("/nowhere")] {
            let _ = fs::remove_file(&file);
            symlink(target, &file).unwrap();
            compiles(&cache(), "a link");
            assert!(fs::symlink_metadata(&file).unwrap().is_file(), "replaced by the compiler's");
        }
        // A pipe: opening it waits for a writer.
        let _ = fs::remove_file(&file);
        let path = std::ffi::CString::new(file.to_str().unwrap()).unwrap();
        // SAFETY: the path ends with a zero and lives for the call.
        assert_eq!(unsafe { libc::mkfifo(path.as_ptr(), 0o600) }, 0);
        compiles(&cache(), "a pipe");
        // A file that others can write, or that belongs to another user.
        plant(&file);
        fs::set_permissions(&file, fs::Permissions::from_mode(0o666)).unwrap();
        compiles(&cache(), "a file that others can write");
        plant(&file);
        if chown(&file, Some(65534), Some(65534)).is_ok() {
            compiles(&cache(), "a file of another user");
        }
        // A file longer than any kernel: the cache does not read it (the file is sparse).
        plant(&file);
        fs::File::options().write(true).open(&file).unwrap().set_len(FILE_MAX + 1).unwrap();
        compiles(&cache(), "a file without an end");
    }

    #[test]
    fn what_dead_writers_left_goes() {
        let directory = tempfile::tempdir().unwrap();
        let (old, young) =
            (directory.path().join("0.1-2-3.tmp"), directory.path().join("0.1-2-4.tmp"));
        for file in [&old, &young] {
            fs::write(file, "half").unwrap();
        }
        let long_ago = SystemTime::now() - 2 * ABANDONED;
        fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
        let cache = CompileCache::at(directory.path());
        cache.get_or_compile(&key("s", &[]), || Ok(vec![1])).unwrap();
        assert!(!old.exists() && young.exists());
    }

    #[test]
    fn threads_that_write_at_once_disturb_nobody() {
        let directory = tempfile::tempdir().unwrap();
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    let cache = CompileCache::at(directory.path());
                    let runs = AtomicUsize::new(0);
                    for round in 0..60 {
                        let source = format!("kernel {}", round % 5);
                        let image = cache
                            .get_or_compile(&key(&source, &[]), || compile(&source, &runs))
                            .unwrap();
                        assert_eq!(image, format!("image of {source}").into_bytes());
                        if round % 7 == 0 {
                            // Another process clears the cache meanwhile.
                            for file in fs::read_dir(directory.path()).unwrap().flatten() {
                                let _ = fs::remove_file(file.path());
                            }
                        }
                    }
                });
            }
        });
    }

    #[test]
    fn the_directory_is_where_the_user_says() {
        let with = |set: &[(&str, &str)]| {
            directory(|name| {
                set.iter().find(|(key, _)| *key == name).map(|(_, value)| PathBuf::from(value))
            })
        };
        assert_eq!(
            with(&[("LEASEHOLD_CACHE_DIR", "/c"), ("HOME", "/h")]),
            Some("/c/kernels".into())
        );
        assert_eq!(with(&[("LEASEHOLD_CACHE_DIR", ""), ("HOME", "/h")]), None);
        assert_eq!(
            with(&[("XDG_CACHE_HOME", "/x"), ("HOME", "/h")]),
            Some("/x/leasehold/kernels".into())
        );
        assert_eq!(
            with(&[("XDG_CACHE_HOME", "relative"), ("HOME", "/h")]),
            Some("/h/.cache/leasehold/kernels".into())
        );
        assert_eq!(with(&[("HOME", "/h")]), Some("/h/.cache/leasehold/kernels".into()));
        assert_eq!(with(&[]), None);
    }
}
