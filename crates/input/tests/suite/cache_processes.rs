//! The compile cache under processes that write and damage it at the same time.

use leasehold_input::{CompileCache, Key};
use std::path::Path;
use std::process::{Command, Stdio};

/// The variable that marks the processes which this test starts from itself.
const DIRECTORY: &str = "LEASEHOLD_TEST_CACHE_DIRECTORY";

fn use_cache(directory: &Path, rounds: usize) {
    let cache = CompileCache::at(directory);
    for round in 0..rounds {
        let source = format!("kernel {}", round % 7).repeat(200);
        let key = Key {
            source: &source,
            name: "k.cu",
            options: &[],
            architecture: "compute_90",
            compiler: "test",
            driver: 1,
        };
        let image =
            cache.get_or_compile(&key, || Ok::<_, ()>(source.bytes().rev().collect())).unwrap();
        assert!(
            image.iter().copied().eq(source.bytes().rev()),
            "somebody else's kernel, or half of one"
        );
        if round % 11 == 0 {
            // Half of a file under a valid name, as after the end of a writer or a disk failure.
            for file in std::fs::read_dir(directory).unwrap().flatten() {
                let name = file.file_name();
                if name.to_string_lossy().ends_with(".bin")
                    && let Ok(bytes) = std::fs::read(file.path())
                {
                    let _ = std::fs::write(file.path(), &bytes[..bytes.len() / 2]);
                }
            }
        }
    }
}

#[test]
fn processes_that_write_and_damage_at_once_get_their_kernels() {
    if let Some(directory) = std::env::var_os(DIRECTORY) {
        use_cache(Path::new(&directory), 150);
        return;
    }
    let directory = tempfile::tempdir().unwrap();
    let me = std::env::current_exe().unwrap();
    let children: Vec<_> = (0..3)
        .map(|_| {
            Command::new(&me)
                .args(["processes_that_write_and_damage_at_once", "--nocapture"])
                .env(DIRECTORY, directory.path())
                .stdout(Stdio::null())
                .spawn()
                .unwrap()
        })
        .collect();
    use_cache(directory.path(), 150);
    for mut child in children {
        assert!(child.wait().unwrap().success());
    }
    // Writers that end normally leave no temporary files.
    let left = std::fs::read_dir(directory.path()).unwrap().flatten();
    assert!(left.into_iter().all(|file| file.path().extension().is_some_and(|e| e == "bin")));
}
