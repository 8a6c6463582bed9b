//! The world that the environment names.

use leasehold::{Error, Result};
use leasehold_collective::{TcpStore, World};

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

#[test]
fn each_variable_that_is_missing_or_wrong_is_named() {
    let rank = ("RANK", "0");
    let size = ("WORLD_SIZE", "2");
    let cases: &[(&[(&str, &str)], &[&str])] = &[
        (&[], &["torchrun", "LEASEHOLD_RANK", "LEASEHOLD_WORLD", "LEASEHOLD_STORE"]),
        (&[("RANK", "")], &["names no rank"]),
        (&[("RANK", "one"), size], &["RANK=\"one\""]),
        (&[("RANK", "-1"), size], &["RANK=\"-1\""]),
        (&[rank], &["RANK=0", "WORLD_SIZE is not set"]),
        (&[rank, ("WORLD_SIZE", "2.5")], &["WORLD_SIZE=\"2.5\""]),
        (&[("RANK", "2"), size], &["RANK=2 and WORLD_SIZE=2"]),
        (&[rank, size, ("LOCAL_RANK", "x")], &["LOCAL_RANK=\"x\""]),
        (&[rank, size], &["LEASEHOLD_STORE", "MASTER_ADDR"]),
        (&[rank, size, ("MASTER_ADDR", "127.0.0.1")], &["LEASEHOLD_PORT", "MASTER_PORT"]),
        (
            &[rank, size, ("MASTER_ADDR", "127.0.0.1"), ("MASTER_PORT", "65535")],
            &["MASTER_PORT=\"65535\""],
        ),
        (
            &[rank, size, ("MASTER_ADDR", "127.0.0.1"), ("LEASEHOLD_PORT", "http")],
            &["LEASEHOLD_PORT=\"http\""],
        ),
        (
            &[rank, size, ("LEASEHOLD_STORE", "redis://x")],
            &["LEASEHOLD_STORE=\"redis://x\"", "file:"],
        ),
        (&[rank, size, ("LEASEHOLD_STORE", "tcp://127.0.0.1")], &["127.0.0.1", "HOST:PORT"]),
        (&[rank, size, ("LEASEHOLD_STORE", "tcp://0.0.0.0:0")], &["0.0.0.0:0", "LEASEHOLD_TOKEN"]),
        (
            &[rank, size, ("LEASEHOLD_STORE", "tcp://127.0.0.1:0"), ("LEASEHOLD_TOKEN", "short")],
            &["LEASEHOLD_TOKEN", "8 to 128"],
        ),
        (&[("PMI_RANK", "1")], &["PMI_RANK=1", "PMI_SIZE is not set"]),
        (&[("LEASEHOLD_RANK", "0"), size], &["LEASEHOLD_RANK=0", "LEASEHOLD_WORLD is not set"]),
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
