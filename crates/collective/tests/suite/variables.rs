//! The world that the environment names.

use crate::common::process;
use leasehold::{Error, Result};
use leasehold_collective::{FileStore, Presence, Store, TcpStore, World};
use std::time::{Duration, Instant};

fn world(variables: &[(&str, &str)]) -> Result<World> {
    World::from_variables(|name| {
        variables.iter().find(|(known, _)| *known == name).map(|(_, value)| (*value).to_owned())
    })
}

/// Each launcher's variables: the rank, the number of ranks, and the rank on the host.
const LAUNCHERS: [[&str; 3]; 5] = [
    ["LEASEHOLD_RANK", "LEASEHOLD_WORLD", "LOCAL_RANK"],
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    ["SLURM_PROCID", "SLURM_NTASKS", "SLURM_LOCALID"],
];

#[test]
fn every_launcher_is_understood() {
    for [rank, size, local] in LAUNCHERS {
        let folder = tempfile::tempdir().unwrap();
        let store = format!("file:{}", folder.path().display());
        let of = |own: &'static str| {
            world(&[(rank, own), (size, "4"), (local, "1"), ("LEASEHOLD_STORE", &store)]).unwrap()
        };
        let (zero, three) = (of("0"), of("3"));
        assert_eq!((zero.rank(), zero.size(), three.rank()), (0, 4, 3), "{rank}");
        assert_eq!(three.local_rank(), 1, "{rank}");
    }
}

#[test]
fn the_first_launcher_counts_and_the_store_follows_the_master() {
    let server = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let free = server.address().port();
    drop(server);
    let before = (free - 1).to_string();
    // As torchrun sets it, within Slurm: its own store has the port.
    let of = |rank: &'static str| {
        world(&[
            ("RANK", rank),
            ("WORLD_SIZE", "2"),
            ("LOCAL_RANK", rank),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", &before),
            ("SLURM_PROCID", "7"),
            ("SLURM_NTASKS", "9"),
        ])
        .unwrap()
    };
    let (zero, one) = (of("0"), of("1"));
    assert_eq!((zero.rank(), one.rank(), one.size()), (0, 1, 2));
    assert!(zero.store().place().contains(&free.to_string()), "the port after MASTER_PORT");
    drop((one, zero));
    let port = free.to_string();
    let zero = world(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "localhost"),
        ("MASTER_PORT", "1"),
        ("LEASEHOLD_PORT", &port),
    ]);
    assert!(zero.unwrap().store().place().contains(&port));
}

/// The script of a batch job has the job's variables, and runs once.
#[test]
fn a_batch_script_of_slurms_is_no_rank_and_its_steps_are() {
    const PROC: (&str, &str) = ("SLURM_PROCID", "0");
    const TASKS: (&str, &str) = ("SLURM_NTASKS", "4");
    for variables in [&[PROC, TASKS, ("SLURM_JOB_ID", "77")][..], &[PROC]] {
        let error = world(variables).unwrap_err();
        let text = error.to_string();
        assert!(matches!(error, Error::NotFound(_)), "{error:?}");
        assert!(text.contains("SLURM_PROCID=0") && text.contains("srun"), "{text}");
    }
    let step: &[_] = &[PROC, TASKS, ("SLURM_STEP_NUM_TASKS", "4")];
    for variables in [step, &[("SLURM_PROCID", "3"), TASKS]] {
        let error = world(variables).unwrap_err();
        let words = ["SLURM_PROCID=", "unset it", "SLURM_NTASKS=4", "set LEASEHOLD_STORE to"];
        let text = error.to_string();
        assert!(matches!(error, Error::InvalidArgument(_)), "{error:?}");
        assert!(words.iter().all(|word| text.contains(word)), "{text}");
    }
}

/// As in a task of Slurm's alone.
#[test]
fn one_rank_needs_no_store() {
    let alone = world(&[("SLURM_PROCID", "0"), ("SLURM_NTASKS", "1")]).unwrap();
    assert_eq!((alone.rank(), alone.size()), (0, 1));
    alone.close(Duration::from_secs(10)).unwrap();
}

/// Variables, and what the error says of them.
type Case = (&'static [(&'static str, &'static str)], &'static [&'static str]);

#[test]
fn each_variable_that_is_missing_or_wrong_is_named() {
    const RANK: (&str, &str) = ("RANK", "0");
    const SIZE: (&str, &str) = ("WORLD_SIZE", "2");
    let cases: &[Case] = &[
        (&[], &["torchrun", "LEASEHOLD_RANK", "LEASEHOLD_WORLD", "LEASEHOLD_STORE"]),
        (&[("RANK", "")], &["names no rank"]),
        (&[("RANK", "one"), SIZE], &["RANK=\"one\""]),
        (&[("RANK", "-1"), SIZE], &["RANK=\"-1\""]),
        (&[RANK], &["RANK=0", "WORLD_SIZE is not set"]),
        (&[RANK, ("WORLD_SIZE", "2.5")], &["WORLD_SIZE=\"2.5\""]),
        (&[("RANK", "2"), SIZE], &["RANK=2 and WORLD_SIZE=2"]),
        (&[RANK, SIZE, ("LOCAL_RANK", "x")], &["LOCAL_RANK=\"x\""]),
        (&[RANK, SIZE], &["LEASEHOLD_STORE", "MASTER_ADDR"]),
        (&[RANK, SIZE, ("MASTER_ADDR", "127.0.0.1")], &["LEASEHOLD_PORT", "MASTER_PORT"]),
        (
            &[RANK, SIZE, ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "65535")],
            &["MASTER_PORT=\"65535\""],
        ),
        (
            &[RANK, SIZE, ("MASTER_ADDR", "127.0.0.1"), ("LEASEHOLD_PORT", "http")],
            &["LEASEHOLD_PORT=\"http\""],
        ),
        (
            &[RANK, SIZE, ("LEASEHOLD_STORE", "redis://x")],
            &["LEASEHOLD_STORE=\"redis://x\"", "file:"],
        ),
        (&[RANK, SIZE, ("LEASEHOLD_STORE", "tcp://127.0.0.1")], &["127.0.0.1", "HOST:PORT"]),
        (&[RANK, SIZE, ("LEASEHOLD_STORE", "tcp://0.0.0.0:0")], &["0.0.0.0:0", "LEASEHOLD_TOKEN"]),
        (
            &[RANK, SIZE, ("LEASEHOLD_STORE", "tcp://127.0.0.1:0"), ("LEASEHOLD_TOKEN", "short")],
            &["LEASEHOLD_TOKEN", "8 to 128"],
        ),
        (&[("PMI_RANK", "1")], &["PMI_RANK=1", "PMI_SIZE is not set"]),
        (&[("LEASEHOLD_RANK", "0"), SIZE], &["LEASEHOLD_RANK=0", "LEASEHOLD_WORLD is not set"]),
    ];
    for (variables, words) in cases {
        let error = world(variables).unwrap_err();
        let text = error.to_string();
        assert!(words.iter().all(|word| text.contains(word)), "{variables:?}: {text}");
        let kind = matches!(error, Error::InvalidArgument(_) | Error::NotFound(_));
        assert!(kind, "{variables:?}: {error:?}");
    }
}

#[test]
fn a_taken_port_names_the_variable() {
    let taken = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let port = taken.local_addr().unwrap().port().to_string();
    let error = world(&[
        ("RANK", "0"),
        ("WORLD_SIZE", "1"),
        ("MASTER_ADDR", "127.0.0.1"),
        ("LEASEHOLD_PORT", &port),
    ])
    .unwrap_err();
    let text = error.to_string();
    assert!(
        text.contains(&port) && text.contains("LEASEHOLD_PORT") && text.contains("taken"),
        "{text}"
    );
}

/// The part of the next test's children: they come, and stay. Without a parent it ends at once.
#[test]
fn child() {
    let world = match World::from_env() {
        Err(Error::NotFound(_)) => return, // nobody's child
        world => world.unwrap(),
    };
    world.barrier("all", Duration::from_secs(60)).unwrap();
    world.store().set(&format!("said/{}", world.rank()), b"here").unwrap();
    std::thread::sleep(Duration::from_secs(120));
}

#[test]
fn a_process_that_is_killed_is_gone_at_once() {
    let folder = tempfile::tempdir().unwrap();
    let file = format!("file:{}", folder.path().display());
    let token = "a-secret-of-the-run";
    let server = TcpStore::serve("127.0.0.1:0", Some(token)).unwrap();
    let tcp = server.place();
    let stores: [(String, Box<dyn Fn() -> World>); 2] = [
        (
            file,
            Box::new(|| World::with_store(0, 2, FileStore::open(folder.path()).unwrap()).unwrap()),
        ),
        (
            tcp,
            Box::new(move || {
                // The first use is the only one.
                let at = server.address().to_string();
                World::with_store(
                    0,
                    2,
                    TcpStore::connect(&at, Some(token), Duration::from_secs(20)).unwrap(),
                )
                .unwrap()
            }),
        ),
    ];
    for (store, world) in stores {
        let mut child = process("variables::child", ["1", "2"], &store, Some(token));
        let world = world();
        world.barrier("all", Duration::from_secs(60)).unwrap();
        assert_eq!(world.store().get("said/1", Duration::from_secs(60)).unwrap(), b"here");
        assert_eq!(world.presence(1).unwrap(), Presence::Here);
        child.0.kill().unwrap();
        let killed = Instant::now();
        while world.presence(1).unwrap() != Presence::Gone {
            assert!(killed.elapsed() < Duration::from_secs(20), "{store}: it seems to be there");
            std::thread::sleep(Duration::from_millis(1));
        }
    }
}
