//! A store that rank 0 serves over TCP.
//!
//! # Protocol
//! A client says `leasehold-store 1 TOKEN` (`-` for none), and hears `ok` or `no REASON`. Each
//! request is a line, of which `set` has bytes behind it:
//!
//! | request | answer |
//! |---|---|
//! | `set KEY BYTES`, bytes | `ok` |
//! | `get KEY MILLISECONDS` | `ok BYTES` and bytes, or `none` |
//! | `add KEY NUMBER` | `ok SUM` |
//! | `remove KEY` | `ok` |
//! | `enter RANK` | `ok`; the rank is gone when this connection ends |
//! | `presence RANK` | `ok awaited`, `ok here`, `ok gone` |
//!
//! `no REASON` answers what is refused. What is no request ends the connection.
//!
//! # What strangers can do
//! Connect, and be sent away. A connection has a few seconds to name the token. Only some may be
//! doing so at a time: for a new one, the oldest stranger is sent away, once it had the time for a
//! line. Each may send one short line. Nothing is allocated by what a stranger says. So strangers
//! delay members, who try again, and keep none out. Without a token the store listens on loopback
//! only.

use super::threads::{Table, slice};
use super::{
    LONGEST_KEY, LONGEST_VALUE, Presence, Store, check_key, check_value, late, left, taken,
};
use crate::error::{lost, not_found, timeout, unavailable};
use leasehold::backend::sync::atomic::{AtomicBool, Ordering};
use leasehold::backend::sync::{Arc, Mutex, thread};
use leasehold::{Error, Result};
use std::fmt;
use std::io::{self, ErrorKind, Read, Write};
use std::net::{SocketAddr, TcpListener, TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// The first words of a client.
const GREETING: &str = "leasehold-store 1";
/// The most bytes of a line.
const LONGEST_LINE: usize = LONGEST_KEY + 56;
/// How long a connection may take to name the token, and to end a request that it has begun.
const HANDSHAKE: Duration = Duration::from_secs(5);
const REQUEST: Duration = Duration::from_secs(30);
/// The time that a stranger has for its line, however many come after it.
const LINE: Duration = Duration::from_millis(100);
/// Connections that have not named the token, and connections in all.
const STRANGERS: usize = 64;
const CONNECTIONS: usize = 4096;
/// How long the server waits for a key in one request.
const WAIT: Duration = Duration::from_secs(1);
/// The pause between two attempts to connect.
const AGAIN: Duration = Duration::from_millis(50);
/// The length of a token.
const TOKEN: std::ops::RangeInclusive<usize> = 8..=128;

/// A connection, which reads by lines.
struct Framed {
    stream: TcpStream,
    read: Vec<u8>,
}

impl Framed {
    fn new(stream: TcpStream) -> io::Result<Self> {
        stream.set_nodelay(true)?;
        stream.set_write_timeout(Some(REQUEST))?;
        Ok(Self { stream, read: Vec::new() })
    }

    /// Reads more bytes, until the deadline.
    fn more(&mut self, until: Option<Instant>) -> io::Result<()> {
        let left = left(until);
        if left.is_zero() {
            return Err(ErrorKind::TimedOut.into());
        }
        self.stream.set_read_timeout((left != Duration::MAX).then_some(left))?;
        let mut piece = [0; 4096];
        let n = loop {
            match self.stream.read(&mut piece) {
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                // The system's word for a time that is over.
                Err(e) if e.kind() == ErrorKind::WouldBlock => {
                    return Err(ErrorKind::TimedOut.into());
                }
                other => break other?,
            }
        };
        if n == 0 {
            return Err(ErrorKind::UnexpectedEof.into());
        }
        self.read.extend_from_slice(&piece[..n]);
        Ok(())
    }

    /// The next line. Its first byte may come at any time before `first`, its end within `rest`.
    fn line(&mut self, first: Option<Instant>, rest: Duration) -> io::Result<String> {
        if self.read.is_empty() {
            self.more(first)?;
        }
        let until = Instant::now().checked_add(rest);
        loop {
            if let Some(end) = self.read.iter().position(|&b| b == b'\n') {
                let line: Vec<u8> = self.read.drain(..=end).collect();
                let text = String::from_utf8(line).map_err(|_| ErrorKind::InvalidData)?;
                return Ok(text.trim_end().to_owned());
            }
            if self.read.len() > LONGEST_LINE {
                return Err(ErrorKind::InvalidData.into());
            }
            self.more(until)?;
        }
    }

    /// The next bytes, at most as many as a value has.
    fn bytes(&mut self, n: usize) -> io::Result<Vec<u8>> {
        if n > LONGEST_VALUE {
            return Err(ErrorKind::InvalidData.into());
        }
        let until = Instant::now().checked_add(REQUEST);
        while self.read.len() < n {
            self.more(until)?;
        }
        Ok(self.read.drain(..n).collect())
    }

    fn say(&mut self, line: &str, bytes: &[u8]) -> io::Result<()> {
        let mut all = Vec::with_capacity(line.len() + 1 + bytes.len());
        all.extend_from_slice(line.as_bytes());
        all.push(b'\n');
        all.extend_from_slice(bytes);
        self.stream.write_all(&all)
    }
}

/// The state that the threads of a server share.
struct Server {
    table: Table,
    address: SocketAddr,
    token: Option<String>,
    ending: AtomicBool,
    /// The connections, the oldest first, to be closed at the end.
    open: Mutex<Vec<Connection>>,
}

struct Connection {
    serial: u64,
    stream: TcpStream,
    /// It came at this time, and has not named the token.
    stranger: Option<Instant>,
}

impl Server {
    fn accept(self: &Arc<Self>, listener: &TcpListener) {
        let mut serial = 0;
        while !self.ending.load(Ordering::Acquire) {
            let stream = match listener.accept() {
                Ok((stream, _)) => stream,
                Err(_) => {
                    // No descriptor is free, or the stranger has gone already.
                    thread::sleep(Duration::from_millis(10));
                    continue;
                }
            };
            if !self.make_room() {
                continue;
            }
            let Ok(copy) = stream.try_clone() else { continue };
            serial += 1;
            let stranger = Some(Instant::now());
            let mut open = self.open.lock();
            // In the lock: the end closes what is there.
            if self.ending.load(Ordering::Acquire) {
                return;
            }
            open.push(Connection { serial, stream: copy, stranger });
            drop(open);
            let (server, own) = (self.clone(), serial);
            let started = thread::Builder::new().name("lh-store".to_owned()).spawn(move || {
                // The connection's end is the client's affair.
                let _ = server.serve(own, stream);
                server.forget(own);
            });
            if started.is_err() {
                self.forget(serial);
            }
        }
    }

    /// Sends strangers away until another one may come. Returns whether it may: members alone may
    /// be as many as connections.
    fn make_room(&self) -> bool {
        loop {
            let open = self.open.lock();
            let strangers = || open.iter().filter_map(|c| Some((c, c.stranger?)));
            if strangers().count() < STRANGERS {
                return open.len() < CONNECTIONS;
            }
            if let Some((oldest, came)) = strangers().next()
                && came.elapsed() >= LINE
            {
                let _ = oldest.stream.shutdown(std::net::Shutdown::Both);
            }
            drop(open);
            if self.ending.load(Ordering::Acquire) {
                return false;
            }
            // Its thread ends now.
            thread::sleep(Duration::from_millis(1));
        }
    }

    fn forget(&self, serial: u64) {
        self.open.lock().retain(|c| c.serial != serial);
    }

    fn serve(&self, serial: u64, stream: TcpStream) -> io::Result<()> {
        let Some(mut framed) = self.meet(serial, Framed::new(stream)?)? else { return Ok(()) };
        let mut own = None;
        let ended = loop {
            match self.request(&mut framed, &mut own) {
                Ok(()) => {}
                Err(e) => break e,
            }
        };
        if let Some(rank) = own {
            self.table.leave(rank);
        }
        Err(ended)
    }

    /// Lets a client in that knows the token.
    fn meet(&self, serial: u64, mut framed: Framed) -> io::Result<Option<Framed>> {
        let until = Instant::now().checked_add(HANDSHAKE);
        let said = framed.line(until, HANDSHAKE)?;
        let Some(token) = said.strip_prefix(GREETING).and_then(|rest| rest.strip_prefix(' '))
        else {
            framed.say("no this is a store of another kind", &[])?;
            return Ok(None);
        };
        let expected = self.token.as_deref().unwrap_or("-");
        // Without a shorter way for a wrong beginning.
        let differ = std::iter::zip(token.bytes(), expected.bytes()).fold(0, |d, (a, b)| d | a ^ b);
        if token.len() != expected.len() || differ != 0 {
            framed.say("no wrong token", &[])?;
            return Ok(None);
        }
        // Before it hears so: a member is not sent away.
        if let Some(own) = self.open.lock().iter_mut().find(|c| c.serial == serial) {
            own.stranger = None;
        }
        framed.say("ok", &[])?;
        Ok(Some(framed))
    }

    fn request(&self, framed: &mut Framed, own: &mut Option<u32>) -> io::Result<()> {
        let said = framed.line(None, REQUEST)?;
        let mut words = said.split(' ');
        let (what, key, more) = (words.next(), words.next().unwrap_or(""), words.next());
        let number = |word: Option<&str>| word.and_then(|w| w.parse::<i64>().ok());
        let answer = match (what, number(more)) {
            (Some("set"), Some(n)) => {
                let n = usize::try_from(n).map_err(|_| ErrorKind::InvalidData)?;
                let value = framed.bytes(n)?;
                self.table.set(key, &value).map(|()| "ok".to_owned())
            }
            (Some("get"), Some(ms)) => {
                let wait = Duration::from_millis(ms.max(0) as u64).min(WAIT);
                match self.table.get(key, wait) {
                    Ok(Some(value)) => return framed.say(&format!("ok {}", value.len()), &value),
                    Ok(None) => Ok("none".to_owned()),
                    Err(e) => Err(e),
                }
            }
            (Some("add"), Some(by)) => self.table.add(key, by).map(|sum| format!("ok {sum}")),
            (Some("remove"), _) => self.table.remove(key).map(|()| "ok".to_owned()),
            (Some("enter"), _) => {
                let rank: u32 = key.parse().map_err(|_| ErrorKind::InvalidData)?;
                if own.is_none() && self.table.enter(rank) {
                    *own = Some(rank);
                    Ok("ok".to_owned())
                } else {
                    Ok("taken".to_owned())
                }
            }
            (Some("presence"), _) => {
                let rank: u32 = key.parse().map_err(|_| ErrorKind::InvalidData)?;
                Ok(match self.table.presence(rank) {
                    Presence::Awaited => "ok awaited",
                    Presence::Here => "ok here",
                    Presence::Gone => "ok gone",
                }
                .to_owned())
            }
            _ => return Err(ErrorKind::InvalidData.into()),
        };
        match answer {
            Ok(text) => framed.say(&text, &[]),
            Err(e) => framed.say(&format!("no {}", e.to_string().replace('\n', " ")), &[]),
        }
    }

    /// Ends the threads. Waits for the one that accepts, so that the port is free.
    fn end(&self, accepts: Option<thread::JoinHandle<()>>) {
        self.ending.store(true, Ordering::Release);
        for connection in self.open.lock().iter() {
            let _ = connection.stream.shutdown(std::net::Shutdown::Both);
        }
        // The thread that accepts sees the flag.
        let woken = TcpStream::connect_timeout(&self.address, Duration::from_secs(1));
        if let (Ok(_), Some(accepts)) = (woken, accepts) {
            drop(accepts.join());
        }
    }
}

/// A store that one process serves, rank 0 of a world, and others connect to.
pub struct TcpStore {
    address: SocketAddr,
    side: Side,
}

enum Side {
    Server(Serving),
    Client(Client),
}

/// A server, as its own process uses it.
struct Serving {
    server: Arc<Server>,
    accepts: Option<thread::JoinHandle<()>>,
    rank: Mutex<Option<u32>>,
}

impl TcpStore {
    /// Serves a store at an address. Port 0 takes a free one, which [`place`](Store::place) names.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is not loopback without a token, and for a token that
    /// has not 8 to 128 visible characters; `Unavailable` for a port that is taken; `NotFound` for
    /// a host that has no address.
    pub fn serve(address: &str, token: Option<&str>) -> Result<Self> {
        check_token(token)?;
        let all = resolved(address)?;
        check_reach(address, &all, token)?;
        let listener = TcpListener::bind(&all[..]).map_err(|e| {
            let cure = match e.kind() {
                ErrorKind::AddrInUse => {
                    "the port is taken, perhaps by a launcher's own store; give all ranks another one, for example by LEASEHOLD_PORT"
                }
                _ => "give all ranks an address of rank 0's host",
            };
            unavailable(format!("rank 0 cannot serve the store at {address}: {e}; {cure}"))
        })?;
        let address = listener.local_addr()?;
        let server = Arc::new(Server {
            table: Table::default(),
            address,
            token: token.map(str::to_owned),
            ending: AtomicBool::new(false),
            open: Mutex::new(Vec::new()),
        });
        let accepting = server.clone();
        let accepts = thread::Builder::new()
            .name("lh-store".to_owned())
            .spawn(move || accepting.accept(&listener))?;
        let serving = Serving { server, accepts: Some(accepts), rank: Mutex::new(None) };
        Ok(Self { address, side: Side::Server(serving) })
    }

    /// Connects to a store, within a limit: the server may come later.
    ///
    /// # Errors
    /// `Timeout` if nobody serves there; `Unavailable` if something else does, or for a wrong
    /// token; as [`serve`](Self::serve).
    pub fn connect(address: &str, token: Option<&str>, limit: Duration) -> Result<Self> {
        check_token(token)?;
        let until = Instant::now().checked_add(limit);
        let mut last = String::new();
        loop {
            match resolved(address) {
                Ok(all) => {
                    check_reach(address, &all, token)?;
                    for at in all {
                        let client = Client::new(at, token);
                        match client.open(until) {
                            Ok(framed) => {
                                client.idle.lock().push(framed);
                                return Ok(Self { address: at, side: Side::Client(client) });
                            }
                            Err(Refusal::Io(e)) => last = e.to_string(),
                            Err(refusal) => {
                                let why = format!("the store at {address}: {refusal}");
                                return Err(unavailable(why));
                            }
                        }
                    }
                }
                Err(e) => last = e.to_string(),
            }
            if left(until).is_zero() {
                return Err(timeout(format!(
                    "rank 0's store at {address} was not there within {limit:?} ({last}); start rank 0, and give all ranks its address and port"
                )));
            }
            thread::sleep(slice(until, AGAIN));
        }
    }

    /// The address, with the port that was taken.
    #[must_use]
    pub fn address(&self) -> SocketAddr {
        self.address
    }
}

fn resolved(address: &str) -> Result<Vec<SocketAddr>> {
    let all: Vec<_> = address
        .to_socket_addrs()
        .map_err(|e| {
            not_found(format!("{address:?} is no address of a store: {e}; give HOST:PORT"))
        })?
        .collect();
    if all.is_empty() {
        return Err(not_found(format!("{address:?} has no address; give HOST:PORT")));
    }
    Ok(all)
}

fn check_token(token: Option<&str>) -> Result<()> {
    match token {
        Some(token)
            if !TOKEN.contains(&token.len()) || !token.bytes().all(|b| b.is_ascii_graphic()) =>
        {
            // The token itself is nobody's to read.
            Err(Error::invalid(
                "the store's token (LEASEHOLD_TOKEN) must have 8 to 128 visible ASCII characters; take for example 32 random hexadecimal digits",
            ))
        }
        _ => Ok(()),
    }
}

/// Refuses an address that others than this host reach, without a token.
fn check_reach(address: &str, all: &[SocketAddr], token: Option<&str>) -> Result<()> {
    if token.is_none() && !all.iter().all(|at| at.ip().is_loopback()) {
        return Err(Error::invalid(format!(
            "the store at {address} is not on loopback, so it needs a token; set LEASEHOLD_TOKEN to the same secret on all ranks, or take 127.0.0.1"
        )));
    }
    Ok(())
}

/// The connections of a client.
struct Client {
    at: SocketAddr,
    token: String,
    idle: Mutex<Vec<Framed>>,
    /// The connection that stands for a rank.
    rank: Mutex<Option<Framed>>,
}

enum Refusal {
    Io(io::Error),
    /// The listener there has answered nothing in time.
    Silent,
    Wrong(String),
}

/// The word for what listens and is no store.
const NO_STORE: &str = "what listens there does not answer as a store; give all ranks a free port";

impl fmt::Display for Refusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Io(e) => e.fmt(f),
            Self::Silent => f.write_str(NO_STORE),
            Self::Wrong(why) => f.write_str(why),
        }
    }
}

impl From<io::Error> for Refusal {
    fn from(error: io::Error) -> Self {
        Refusal::Io(error)
    }
}

impl Client {
    fn new(at: SocketAddr, token: Option<&str>) -> Self {
        let token = token.unwrap_or("-").to_owned();
        Self { at, token, idle: Mutex::default(), rank: Mutex::default() }
    }

    fn open(&self, until: Option<Instant>) -> Result<Framed, Refusal> {
        let timeout = slice(until, HANDSHAKE).max(Duration::from_millis(100));
        let mut framed = Framed::new(TcpStream::connect_timeout(&self.at, timeout)?)?;
        framed.say(&format!("{GREETING} {}", self.token), &[])?;
        let until = Instant::now().checked_add(HANDSHAKE);
        match framed.line(until, HANDSHAKE) {
            Ok(said) if said == "ok" => Ok(framed),
            Ok(said) if said == "no wrong token" => Err(Refusal::Wrong(
                "it has another token; set LEASEHOLD_TOKEN to the same secret on all ranks".to_owned(),
            )),
            Ok(_) => Err(Refusal::Wrong(
                "something else listens there, or a store of another version; give all ranks the same version and a free port".to_owned(),
            )),
            Err(e) if e.kind() == ErrorKind::InvalidData => Err(Refusal::Wrong(NO_STORE.to_owned())),
            Err(e) if e.kind() == ErrorKind::TimedOut => Err(Refusal::Silent),
            Err(e) => Err(Refusal::Io(e)),
        }
    }

    fn lost(&self, why: impl fmt::Display) -> Error {
        lost(
            0,
            format!(
                "its store at tcp://{} does not answer ({why}); look at what became of rank 0",
                self.at
            ),
        )
    }

    /// Another connection, within a limit. While strangers crowd the server, it may send a client
    /// away too.
    fn another(&self, limit: Duration) -> Result<Framed> {
        let until = Instant::now().checked_add(limit);
        loop {
            let why = match self.open(until) {
                Ok(framed) => return Ok(framed),
                Err(Refusal::Wrong(why)) => return Err(self.lost(why)),
                // Nobody listens where the server has ended.
                Err(Refusal::Io(e)) if e.kind() == ErrorKind::ConnectionRefused => {
                    return Err(self.lost(e));
                }
                Err(Refusal::Io(e)) => e,
                Err(Refusal::Silent) => ErrorKind::TimedOut.into(),
            };
            if left(until).is_zero() {
                return Err(self.lost(why));
            }
            thread::sleep(slice(until, AGAIN));
        }
    }

    /// Makes a request and gives the answer, with the bytes behind it, for a request's limit.
    fn ask(&self, request: &str, bytes: &[u8], limit: Duration) -> Result<(String, Vec<u8>)> {
        let idle = self.idle.lock().pop();
        let mut framed = idle.map_or_else(|| self.another(limit.max(HANDSHAKE)), Ok)?;
        let answer = Self::exchange(&mut framed, request, bytes).map_err(|e| self.lost(e))?;
        self.idle.lock().push(framed);
        match answer.0.strip_prefix("no ") {
            Some(why) => Err(Error::state(why.to_owned())),
            None => Ok(answer),
        }
    }

    fn exchange(framed: &mut Framed, request: &str, bytes: &[u8]) -> io::Result<(String, Vec<u8>)> {
        framed.say(request, bytes)?;
        let until = Instant::now().checked_add(WAIT + REQUEST);
        let answer = framed.line(until, REQUEST)?;
        let is_get = request.starts_with("get ");
        let n = is_get.then(|| answer.strip_prefix("ok ")?.parse::<usize>().ok()).flatten();
        let bytes = n.map_or(Ok(Vec::new()), |n| framed.bytes(n))?;
        Ok((answer, bytes))
    }
}

impl Store for TcpStore {
    fn place(&self) -> String {
        format!("tcp://{}", self.address)
    }

    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        check_key(key)?;
        check_value(key, value)?;
        match &self.side {
            Side::Server(Serving { server, .. }) => server.table.set(key, value),
            Side::Client(client) => {
                client.ask(&format!("set {key} {}", value.len()), value, REQUEST).map(drop)
            }
        }
    }

    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        check_key(key)?;
        let client = match &self.side {
            Side::Server(Serving { server, .. }) => {
                return server
                    .table
                    .get(key, limit)?
                    .ok_or_else(|| late(key, &self.place(), limit));
            }
            Side::Client(client) => client,
        };
        let until = Instant::now().checked_add(limit);
        loop {
            let wait = slice(until, WAIT);
            let (answer, value) =
                client.ask(&format!("get {key} {}", wait.as_millis()), &[], left(until))?;
            if answer != "none" {
                return Ok(value);
            }
            if left(until).is_zero() {
                return Err(late(key, &self.place(), limit));
            }
        }
    }

    fn add(&self, key: &str, by: i64) -> Result<i64> {
        check_key(key)?;
        match &self.side {
            Side::Server(Serving { server, .. }) => server.table.add(key, by),
            Side::Client(client) => {
                let (answer, _) = client.ask(&format!("add {key} {by}"), &[], REQUEST)?;
                super::number(key, answer.strip_prefix("ok ").unwrap_or("").as_bytes())
            }
        }
    }

    fn remove(&self, key: &str) -> Result<()> {
        check_key(key)?;
        match &self.side {
            Side::Server(Serving { server, .. }) => server.table.remove(key),
            Side::Client(client) => client.ask(&format!("remove {key}"), &[], REQUEST).map(drop),
        }
    }

    fn enter(&self, rank: u32) -> Result<()> {
        let entered = match &self.side {
            Side::Server(Serving { server, rank: own, .. }) => {
                let mut own = own.lock();
                let free = own.is_none() && server.table.enter(rank);
                if free {
                    *own = Some(rank);
                }
                free
            }
            Side::Client(client) => {
                let mut own = client.rank.lock();
                let mut framed = client.another(REQUEST)?;
                let (answer, _) = Client::exchange(&mut framed, &format!("enter {rank}"), &[])
                    .map_err(|e| client.lost(e))?;
                let free = own.is_none() && answer == "ok";
                if free {
                    *own = Some(framed);
                }
                free
            }
        };
        if entered { Ok(()) } else { Err(taken(rank, &self.place())) }
    }

    fn presence(&self, rank: u32) -> Result<Presence> {
        match &self.side {
            Side::Server(Serving { server, .. }) => Ok(server.table.presence(rank)),
            Side::Client(client) => {
                let (answer, _) = client.ask(&format!("presence {rank}"), &[], REQUEST)?;
                Ok(match answer.as_str() {
                    "ok here" => Presence::Here,
                    "ok gone" => Presence::Gone,
                    _ => Presence::Awaited,
                })
            }
        }
    }
}

impl Drop for TcpStore {
    fn drop(&mut self) {
        if let Side::Server(serving) = &mut self.side {
            serving.server.end(serving.accepts.take());
        }
    }
}

impl fmt::Debug for TcpStore {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let side = match self.side {
            Side::Server(_) => "serves",
            Side::Client(_) => "client",
        };
        write!(f, "TcpStore({}, {side})", self.place())
    }
}
