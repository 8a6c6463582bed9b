//! NCCL where there is no GPU: errors that say what to do, and calls over an imitation of the
//! library (`stub_nccl.rs`).

use leasehold::{DeviceId, Error, Runtime};
use leasehold_collective::driver::{CollectiveOps, Nccl};
use leasehold_collective::{CommConfig, World};
use std::sync::Arc;

#[test]
fn a_missing_library_is_named_with_its_cure() {
    match Nccl::load() {
        Ok(library) => assert!(library.name().starts_with("NCCL 2."), "{library:?}"),
        Err(Error::Unavailable(text)) => {
            assert!(text.contains("LEASEHOLD_NCCL"), "{text}");
        }
        Err(other) => panic!("{other}"),
    }
}

#[test]
fn another_device_is_refused() {
    let Ok(library) = Nccl::load() else { return };
    let world = World::threads(1).unwrap().remove(0);
    let runtime = Runtime::open(DeviceId::cpu(0)).unwrap();
    let config = CommConfig::new("tp").ops(Arc::new(library));
    assert!(matches!(world.comm(&runtime, &config), Err(Error::Unsupported(_))));
}

/// The variable that names the case in a process that was started for it.
const CASE: &str = "LEASEHOLD_TEST_NCCL_CASE";

/// A case: its name, the stub's environment, and the check.
type Case = (&'static str, &'static [(&'static str, &'static str)], fn());

const CASES: &[Case] = &[
    ("its version is shown", &[], || {
        assert_eq!(Nccl::load().unwrap().name(), "NCCL 2.28.9");
    }),
    ("an old version is refused", &[("STUB_VERSION", "21806")], || match Nccl::load() {
        Err(Error::Unavailable(why)) => {
            assert!(why.contains("21806") && why.contains("2.19"), "{why}");
        }
        other => panic!("{other:?}"),
    }),
    #[cfg(feature = "bench")]
    ("raw calls", &[], raw_calls),
    #[cfg(feature = "bench")]
    ("a raw call that fails", &[("STUB_CODE", "5")], raw_failure),
];

/// NCCL's functions get what a raw call is given, in their order.
#[cfg(feature = "bench")]
fn raw_calls() {
    use leasehold_collective::bench::RawNccl;
    let id = Nccl::load().unwrap().unique_id().unwrap();
    assert!(matches!(RawNccl::init(&id[1..], 3, 1), Err(Error::InvalidArgument(_))));
    let comm = RawNccl::init(&id, 3, 1).unwrap();
    // SAFETY: the library of this test uses no address.
    unsafe {
        comm.all_reduce(0x51, 0x1000, 5).unwrap();
        comm.exchange(0x51, (0x2000, 2), (0x3000, 0), 6).unwrap();
    }
    comm.destroy().unwrap();
    let log = std::fs::read_to_string(std::env::var_os("STUB_LOG").unwrap()).unwrap();
    let wanted = [
        "init 3 1 0 127",
        "all_reduce 0x1000 0x1000 5 7 0 0x77 0x51",
        "ncclGroupStart",
        "send 0x2000 6 7 2 0x77 0x51",
        "recv 0x3000 6 7 0 0x77 0x51",
        "ncclGroupEnd",
        "ncclCommDestroy",
    ];
    assert_eq!(log.lines().collect::<Vec<_>>(), wanted);
}

#[cfg(feature = "bench")]
fn raw_failure() {
    use leasehold_collective::bench::RawNccl;
    let id = Nccl::load().unwrap().unique_id().unwrap();
    let comm = RawNccl::init(&id, 2, 0).unwrap();
    // SAFETY: the library of this test uses no address.
    match unsafe { comm.all_reduce(0, 0, 0) } {
        Err(Error::Driver { api: "ncclAllReduce", code: 5, name }) => {
            assert_eq!(&*name, "invalid usage: a detail");
        }
        other => panic!("{other:?}"),
    }
}

/// The test compiles the library. Each case runs in a process of its own, which loads it.
#[cfg(target_os = "linux")]
#[test]
fn nccl_over_a_library_of_our_own() {
    use std::path::Path;
    use std::process::Command;
    if let Ok(name) = std::env::var(CASE) {
        return CASES.iter().find(|case| case.0 == name).unwrap().2();
    }
    let directory = tempfile::tempdir().unwrap();
    let library = directory.path().join("libnccl.so.2");
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/suite/stub_nccl.rs");
    let compiler = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let built = Command::new(compiler)
        .args(["--edition", "2024", "--crate-type", "cdylib", "--crate-name", "nccl"])
        .arg(source)
        .arg("-o")
        .arg(&library)
        .status();
    assert!(built.unwrap().success(), "the library does not compile");
    for (name, environment, _) in CASES {
        let log = directory.path().join(name.replace(' ', "-"));
        let output = Command::new(std::env::current_exe().unwrap())
            .args(["nccl_over_a_library_of_our_own", "--nocapture"])
            .env("LEASEHOLD_NCCL", &library)
            .env("STUB_LOG", log)
            .env(CASE, name)
            .envs(environment.iter().copied())
            .output()
            .unwrap();
        assert!(output.status.success(), "{name}:\n{}", String::from_utf8_lossy(&output.stderr));
        let told = String::from_utf8_lossy(&output.stdout);
        assert!(told.contains("1 passed"), "{name} has not run:\n{told}");
    }
}
