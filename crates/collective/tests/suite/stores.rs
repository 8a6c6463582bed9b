//! Stores, each in the same way, and the server against strangers.

use leasehold::Error;
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold_collective::store::{LONGEST_KEY, LONGEST_VALUE};
use leasehold_collective::{FileStore, Presence, Store, TcpStore, ThreadStore, World};
use std::io::{Read, Write};
use std::net::{SocketAddr, TcpStream};
use std::time::{Duration, Instant};

const NOW: Duration = Duration::ZERO;
const SOON: Duration = Duration::from_secs(20);

/// The rules of every store, seen by two of its users.
fn behaves(one: &dyn Store, two: &dyn Store) {
    assert!(matches!(one.get("a/b", NOW), Err(Error::Timeout(text)) if text.contains("a/b")));
    one.set("a/b", b"first").unwrap();
    one.set("a/b", b"second\0\n").unwrap();
    assert_eq!(two.get("a/b", NOW).unwrap(), b"second\0\n");
    one.set("empty", b"").unwrap();
    assert_eq!(two.get("empty", NOW).unwrap(), b"");
    two.remove("a/b").unwrap();
    two.remove("a/b").unwrap();
    assert!(one.get("a/b", Duration::from_millis(20)).is_err());

    let large = vec![7u8; LONGEST_VALUE];
    two.set("large", &large).unwrap();
    assert_eq!(one.get("large", SOON).unwrap(), large);
    let larger = vec![7u8; LONGEST_VALUE + 1];
    assert!(matches!(two.set("large", &larger), Err(Error::InvalidArgument(_))));
    for key in ["", "a b", "a\nb", "ä", "../a%", &"k".repeat(LONGEST_KEY + 1)] {
        assert!(matches!(one.set(key, b""), Err(Error::InvalidArgument(_))), "{key:?}");
        assert!(two.get(key, NOW).is_err() && two.add(key, 1).is_err(), "{key:?}");
    }
    one.set(&"k".repeat(LONGEST_KEY), b"x").unwrap();

    assert_eq!((one.add("n", 2).unwrap(), two.add("n", -5).unwrap()), (2, -3));
    assert_eq!(one.get("n", NOW).unwrap(), b"-3");
    one.set("n", i64::MAX.to_string().as_bytes()).unwrap();
    assert!(two.add("n", 1).is_err());
    one.set("text", b"no number").unwrap();
    assert!(two.add("text", 1).is_err());

    std::thread::scope(|scope| {
        let waits = scope.spawn(|| two.wait(&["x", "y"], SOON));
        one.set("x", b"").unwrap();
        std::thread::sleep(Duration::from_millis(20));
        one.set("y", b"").unwrap();
        waits.join().unwrap().unwrap();
        // All sums are returned once.
        let adds = |store: &dyn Store| -> Vec<i64> {
            (0..50).map(|_| store.add("turns", 1).unwrap()).collect()
        };
        let threads = [one, two, one].map(|store| scope.spawn(move || adds(store)));
        let mut sums: Vec<i64> = threads.into_iter().flat_map(|t| t.join().unwrap()).collect();
        sums.sort_unstable();
        assert_eq!(sums, (1..=150).collect::<Vec<_>>());

        let open = scope.spawn(|| two.barrier("b", 2, SOON));
        one.barrier("b", 2, SOON).unwrap();
        open.join().unwrap().unwrap();
    });
    let late = one.barrier("c", 3, Duration::from_millis(20)).unwrap_err();
    assert!(late.to_string().contains("1 of 3 have come"), "{late}");

    assert_eq!(two.presence(4).unwrap(), Presence::Awaited);
    one.enter(4).unwrap();
    assert_eq!(two.presence(4).unwrap(), Presence::Here);
    assert_eq!(one.presence(4).unwrap(), Presence::Here);
    let taken = two.enter(4).unwrap_err();
    assert!(taken.to_string().contains("rank 4 is taken"), "{taken}");
    two.enter(5).unwrap();
    assert!(!format!("{one:?} {}", one.place()).is_empty());
}

/// Waits until a rank is gone.
fn goes(store: &dyn Store, rank: u32) {
    let until = Instant::now() + SOON;
    while store.presence(rank).unwrap() != Presence::Gone {
        assert!(Instant::now() < until, "rank {rank} stays");
        std::thread::sleep(Duration::from_millis(2));
    }
    assert!(store.enter(rank).is_err(), "a rank that is gone is not taken again");
}

#[test]
fn a_store_of_threads() {
    let one = ThreadStore::new();
    let two = one.share();
    behaves(&one, &two);
    drop(one);
    goes(&two.share(), 4);
}

#[test]
fn a_store_in_a_folder() {
    let folder = tempfile::tempdir().unwrap();
    let open = || FileStore::open(folder.path().join("store")).unwrap();
    let (one, two) = (open(), open());
    behaves(&one, &two);
    drop(one);
    goes(&open(), 4);
    drop(two);
    let file = folder.path().join("file");
    std::fs::write(&file, b"").unwrap();
    assert!(FileStore::open(&file).unwrap_err().to_string().contains("file"));
}

#[test]
#[cfg(unix)]
fn a_pipe_in_a_stores_folder_keeps_nobody() {
    let folder = tempfile::tempdir().unwrap();
    let store = FileStore::open(folder.path()).unwrap();
    store.set("sound", b"yes").unwrap();
    for pipe in ["key-a", "lock", "rank-3"] {
        let made = std::process::Command::new("mkfifo").arg(folder.path().join(pipe)).status();
        assert!(made.unwrap().success());
    }
    let (tell, hear) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let get = store.get("a", Duration::from_millis(100)).map(drop);
        tell.send([get, store.add("n", 1).map(drop), store.presence(3).map(drop)]).unwrap();
        tell.send([store.enter(3), store.get("sound", NOW).map(drop), Ok(())]).unwrap();
    });
    for error in hear.recv_timeout(SOON).expect("a pipe is waited for").map(Result::unwrap_err) {
        assert!(error.to_string().contains("a pipe"), "{error}");
    }
    let [taken, sound, _] = hear.recv_timeout(SOON).unwrap();
    assert!(taken.unwrap_err().to_string().contains("rank 3 is taken"));
    sound.unwrap();
}

#[test]
fn a_store_over_tcp() {
    for token in [None, Some("a-secret-of-the-run")] {
        let server = TcpStore::serve("127.0.0.1:0", token).unwrap();
        let at = server.address().to_string();
        let client = || TcpStore::connect(&at, token, SOON).unwrap();
        let one = client();
        behaves(&one, &client());
        behaves_again(&server, &client());
        drop(one);
        goes(&server, 4);
        drop(server);
    }
}

/// The server's own side, with other keys.
fn behaves_again(server: &dyn Store, client: &dyn Store) {
    server.set("own", b"1").unwrap();
    assert_eq!(client.get("own", SOON).unwrap(), b"1");
    client.set("other", b"2").unwrap();
    assert_eq!(server.get("other", SOON).unwrap(), b"2");
    server.enter(9).unwrap();
    assert_eq!(client.presence(9).unwrap(), Presence::Here);
    std::thread::scope(|scope| {
        let waits = scope.spawn(|| client.get("later", SOON));
        std::thread::sleep(Duration::from_millis(20));
        server.set("later", b"now").unwrap();
        assert_eq!(waits.join().unwrap().unwrap(), b"now");
    });
}

#[test]
fn a_server_that_comes_late_is_found_and_one_that_goes_is_missed() {
    let first = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let at = first.address().to_string();
    drop(first);
    let late = TcpStore::connect(&at, None, Duration::from_millis(120)).unwrap_err();
    let text = late.to_string();
    assert!(matches!(late, Error::Timeout(_)) && text.contains(&at), "{text}");
    std::thread::scope(|scope| {
        let client = scope.spawn(|| TcpStore::connect(&at, None, SOON).unwrap());
        std::thread::sleep(Duration::from_millis(100));
        let server = TcpStore::serve(&at, None).unwrap();
        let client = client.join().unwrap();
        client.set("a", b"b").unwrap();
        assert_eq!(server.get("a", NOW).unwrap(), b"b");
        let taken = TcpStore::serve(&at, None).unwrap_err().to_string();
        assert!(taken.contains("taken") && taken.contains("LEASEHOLD_PORT"), "{taken}");
        drop(server);
        let lost = client.get("a", SOON).unwrap_err();
        assert!(matches!(lost, Error::PeerLost { rank: 0, .. }), "{lost}");
    });
}

#[test]
fn a_token_is_needed_beyond_loopback_and_must_be_the_same() {
    for far in [TcpStore::serve("0.0.0.0:0", None), TcpStore::connect("192.0.2.1:9", None, NOW)] {
        let text = far.unwrap_err().to_string();
        assert!(text.contains("LEASEHOLD_TOKEN"), "{text}");
    }
    assert!(TcpStore::serve("0.0.0.0:0", Some("a-secret-of-the-run")).is_ok());
    let bad = ["short", "with a space in it", "with\na-line", &"x".repeat(129)];
    for token in bad {
        let text = TcpStore::serve("127.0.0.1:0", Some(token)).unwrap_err().to_string();
        assert!(text.contains("8 to 128") && !text.contains(token), "{text}");
    }
    let server = TcpStore::serve("127.0.0.1:0", Some("a-secret-of-the-run")).unwrap();
    let at = server.address().to_string();
    for token in [None, Some("a-secret-of-the-rum"), Some("a-secret-of-the-run-2")] {
        let text = TcpStore::connect(&at, token, SOON).unwrap_err().to_string();
        assert!(text.contains("another token") && text.contains("LEASEHOLD_TOKEN"), "{text}");
        assert!(!text.contains("of-the-ru"), "{text}");
    }
    assert!(TcpStore::serve("no such host:1", None).is_err());
}

/// Says something to a server, and reads until it ends the connection.
fn says(at: &str, what: &[u8]) -> String {
    let mut stream = TcpStream::connect(at).unwrap();
    stream.set_read_timeout(Some(SOON)).unwrap();
    let _ = stream.write_all(what);
    let _ = stream.shutdown(std::net::Shutdown::Write);
    let mut said = Vec::new();
    let _ = stream.read_to_end(&mut said);
    String::from_utf8_lossy(&said).into_owned()
}

#[test]
fn a_port_scan_does_not_disturb_the_store() {
    let token = Some("a-secret-of-the-run");
    let server = TcpStore::serve("127.0.0.1:0", token).unwrap();
    let at = server.address().to_string();
    let client = TcpStore::connect(&at, token, SOON).unwrap();
    client.enter(1).unwrap();
    // Half open and silent connections stay while the others come.
    let silent: Vec<TcpStream> = (0..20).map(|_| TcpStream::connect(&at).unwrap()).collect();
    let mut half = TcpStream::connect(&at).unwrap();
    half.write_all(b"leasehold-sto").unwrap();

    let hello = "leasehold-store 1 a-secret-of-the-run\n";
    assert!(says(&at, b"GET / HTTP/1.1\r\nHost: x\r\n\r\n").starts_with("no "));
    assert!(says(&at, b"leasehold-store 1 -\nset a 1\nx").starts_with("no "));
    assert_eq!(says(&at, &[0xff; 5000]), "");
    assert_eq!(says(&at, &vec![b'x'; 1 << 20]), "");
    assert_eq!(says(&at, b""), "");
    // Somebody who knows the token, and no request.
    for wrong in
        ["what\n", "set a\n", "set a -1\n", "set a 99999999999\n", "get a b\n", "enter x\n", "\n"]
    {
        let said = says(&at, format!("{hello}{wrong}").as_bytes());
        assert_eq!(said, "ok\n", "{wrong:?}");
    }
    let said = says(&at, format!("{hello}set a{} 1\nx", "k".repeat(LONGEST_KEY)).as_bytes());
    assert!(said.starts_with("ok\nno "), "{said}");
    assert!(says(&at, format!("{hello}set half 10\nabc").as_bytes()).starts_with("ok\n"));
    assert!(server.get("half", NOW).is_err(), "half a value is none");

    client.set("sound", b"yes").unwrap();
    assert_eq!(server.get("sound", NOW).unwrap(), b"yes");
    assert_eq!(server.presence(1).unwrap(), Presence::Here);
    drop((silent, half));
    // More strangers than there may be: some are sent away, and the store goes on.
    let many: Vec<_> = (0..100).filter_map(|_| TcpStream::connect(&at).ok()).collect();
    client.set("sound", b"still").unwrap();
    assert_eq!(server.get("sound", NOW).unwrap(), b"still");
    drop(many);
    let again = TcpStore::connect(&at, token, SOON).unwrap();
    assert_eq!(again.get("sound", SOON).unwrap(), b"still");
}

/// Keeps so many connections that say nothing: for each that ends, another one.
fn crowd(at: SocketAddr, size: usize, over: &AtomicBool) {
    let mut all: Vec<TcpStream> = Vec::new();
    let is_there = |stream: &mut TcpStream| match stream.peek(&mut [0]) {
        Ok(n) => n != 0,
        Err(e) => e.kind() == std::io::ErrorKind::WouldBlock,
    };
    while !over.load(Ordering::Relaxed) {
        all.retain_mut(is_there);
        while all.len() < size
            && let Ok(stream) = TcpStream::connect_timeout(&at, Duration::from_millis(200))
        {
            stream.set_nonblocking(true).unwrap();
            all.push(stream);
        }
        std::thread::sleep(Duration::from_millis(1));
    }
}

#[test]
fn strangers_who_come_again_and_again_keep_no_member_out() {
    let token = Some("a-secret-of-the-run");
    let server = TcpStore::serve("127.0.0.1:0", token).unwrap();
    let at = server.address();
    let client = TcpStore::connect(&at.to_string(), token, SOON).unwrap();
    client.enter(1).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for _ in 0..8 {
            scope.spawn(|| crowd(at, 12, &over));
        }
        std::thread::sleep(Duration::from_millis(300));
        // Requests at a time need connections of their own.
        let waits = [0, 1, 2, 3].map(|i| {
            let client = &client;
            scope.spawn(move || client.get(&format!("never/{i}"), Duration::from_millis(500)))
        });
        let answers = waits.map(|wait| wait.join().unwrap());
        let late = TcpStore::connect(&at.to_string(), token, SOON).map(|late| late.enter(2));
        over.store(true, Ordering::Relaxed);
        for answer in answers {
            assert!(matches!(answer, Err(Error::Timeout(_))), "{answer:?}");
        }
        assert!(matches!(late, Ok(Ok(()))), "{late:?}");
    });
    assert_eq!(server.presence(1).unwrap(), Presence::Here);
}

#[test]
fn something_else_on_the_port_is_told() {
    let listener = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
    let at = listener.local_addr().unwrap().to_string();
    std::thread::scope(|scope| {
        scope.spawn(move || {
            let (mut stream, _) = listener.accept().unwrap();
            let mut line = [0; 64];
            let _ = stream.read(&mut line);
            let _ = stream.write_all(b"HTTP/1.1 400 Bad Request\r\n\r\n");
        });
        let text = TcpStore::connect(&at, None, SOON).unwrap_err().to_string();
        assert!(text.contains("something else listens") && text.contains(&at), "{text}");
    });
}

#[test]
fn worlds_over_each_store_know_their_ranks() {
    let folder = tempfile::tempdir().unwrap();
    let server = TcpStore::serve("127.0.0.1:0", None).unwrap();
    let at = server.address().to_string();
    let open = || FileStore::open(folder.path()).unwrap();
    let zero = [World::with_store(0, 2, server), World::with_store(0, 2, open())];
    let one = [
        World::with_store(1, 2, TcpStore::connect(&at, None, SOON).unwrap()),
        World::with_store(1, 2, open()),
    ];
    for (zero, one) in std::iter::zip(zero, one) {
        let (zero, one) = (zero.unwrap(), one.unwrap());
        assert_eq!((zero.rank(), one.rank(), one.size(), one.local_rank()), (0, 1, 2, 1));
        std::thread::scope(|scope| {
            scope.spawn(|| zero.barrier("both", SOON).unwrap());
            one.barrier("both", SOON).unwrap();
        });
        assert_eq!(one.presence(0).unwrap(), Presence::Here);
        drop(one);
        goes(zero.store(), 1);
    }
}

#[test]
fn ranks_that_count_otherwise_are_told() {
    let store = ThreadStore::new();
    let (share, again) = (store.share(), store.share());
    let zero = World::with_store(0, 3, store).unwrap();
    let text = World::with_store(1, 2, share).unwrap_err().to_string();
    assert!(text.contains("2 ranks, and rank 0") && text.contains("3 ranks"), "{text}");
    let text = World::with_store(0, 3, again).unwrap_err().to_string();
    assert!(text.contains("rank 0 is taken"), "{text}");
    drop(zero);
    for (rank, size) in [(0, 0), (2, 2), (0, 1 << 17)] {
        assert!(World::with_store(rank, size, ThreadStore::new()).is_err());
    }
    assert!(World::threads(0).is_err());
}
