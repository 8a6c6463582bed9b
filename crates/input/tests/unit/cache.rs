//! Tests of the cache of compiled kernels.

use super::*;
use std::sync::atomic::AtomicUsize;

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
fn compile(source: &str, runs: &AtomicUsize) -> Result<Vec<u8>, ()> {
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
    let failed = cache.get_or_compile(&key("s", &[]), || Err("no"));
    assert_eq!(failed, Err("no"));
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
    let made = std::process::Command::new("mkfifo").args(["-m", "600"]).arg(&file).status();
    assert!(made.unwrap().success());
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
    let (old, young) = (directory.path().join("0.1-2-3.tmp"), directory.path().join("0.1-2-4.tmp"));
    for file in [&old, &young] {
        fs::write(file, "half").unwrap();
    }
    let long_ago = SystemTime::now() - 2 * ABANDONED;
    fs::File::options().write(true).open(&old).unwrap().set_modified(long_ago).unwrap();
    let cache = CompileCache::at(directory.path());
    cache.get_or_compile(&key("s", &[]), || compile("s", &AtomicUsize::new(0))).unwrap();
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
    assert_eq!(with(&[("LEASEHOLD_CACHE_DIR", "/c"), ("HOME", "/h")]), Some("/c/kernels".into()));
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

#[test]
fn the_oldest_files_beyond_a_bound_go() {
    let directory = tempfile::tempdir().unwrap();
    let files: Vec<_> = (0u64..4).map(|i| directory.path().join(format!("{i}.bin"))).collect();
    for (file, age) in std::iter::zip(&files, [40, 10, 30, 20]) {
        fs::write(file, [0; 100]).unwrap();
        let written = fs::File::options().write(true).open(file).unwrap();
        written.set_modified(SystemTime::now() - Duration::from_secs(age)).unwrap();
    }
    tidy(directory.path(), 250);
    let there: Vec<bool> = files.iter().map(|file| file.exists()).collect();
    assert_eq!(there, [false, true, false, true]);
}
