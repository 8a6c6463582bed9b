//! Worlds: who takes part.
//!
//! A world knows its ranks and their store, and makes communicators. It knows no device before.

use crate::error::{lost, not_found, timeout};
use crate::order_token::OrderTokens;
use crate::store::{FileStore, Presence, Store, TcpStore, ThreadStore};
use crate::watchdog::{self, Watchdog, Watching};
use leasehold::backend::sync::{Arc, Mutex};
use leasehold::{Error, Result};
use std::collections::HashMap;
use std::fmt;
use std::net::Ipv6Addr;
use std::sync::Weak;
use std::time::{Duration, Instant};

/// How long ranks wait for rank 0 at the beginning: it serves the store, and nobody else can say
/// that it has failed before.
const BEGIN: Duration = Duration::from_secs(30);
/// How long a wait for another rank goes on before it looks whether the rank is still there.
const LOOK: Duration = Duration::from_millis(50);
/// The most ranks of a world.
const MOST: u32 = 1 << 16;

/// The ranks of a run, seen by one of them: a number, the number of all, and a store. Clones are
/// the same rank.
///
/// A rank is a process ([`from_env`](Self::from_env)), or a thread ([`threads`](Self::threads)).
/// When the last clone is dropped, the rank is gone: those that wait for it get
/// [`Error::PeerLost`].
///
/// ```
/// use leasehold::{DeviceId, Runtime};
/// use leasehold_collective::{CommConfig, Reduce, World};
/// # fn main() -> leasehold::Result<()> {
/// let ranks: Vec<_> = World::threads(2)?
///     .into_iter()
///     .map(|world| {
///         std::thread::spawn(move || -> leasehold::Result<Vec<f32>> {
///             let runtime = Runtime::open(DeviceId::cpu(0))?.create_stream()?.runtime();
///             let comm = world.comm(&runtime, &CommConfig::new("data"))?;
///             let x = runtime.upload(&[world.rank() as f32 + 1.0; 2])?;
///             comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
///             runtime.to_vec(&x)
///         })
///     })
///     .collect();
/// for rank in ranks {
///     assert_eq!(rank.join().unwrap()?, [3.0, 3.0]);
/// }
/// # Ok(())
/// # }
/// ```
#[derive(Clone)]
pub struct World(pub(crate) Arc<Inner>);

pub(crate) struct Inner {
    pub(crate) rank: u32,
    pub(crate) size: u32,
    local_rank: u32,
    pub(crate) store: Box<dyn Store>,
    pub(crate) tokens: OrderTokens,
    /// How many communicators of a name there have been.
    made: Mutex<HashMap<String, u64>>,
    watchdog: Watchdog,
}

impl Watching for Inner {
    fn watchdog(&self) -> &Watchdog {
        &self.watchdog
    }

    fn store(&self) -> &dyn Store {
        &*self.store
    }

    fn place(&self) -> (u32, u32) {
        (self.rank, self.size)
    }
}

impl World {
    /// Worlds for ranks that are threads of this process, one each.
    ///
    /// # Errors
    /// `InvalidArgument` for no ranks or more than 65,536.
    pub fn threads(size: u32) -> Result<Vec<Self>> {
        let store = ThreadStore::new();
        (0..size.max(1)).map(|rank| Self::with_store(rank, size, store.share())).collect()
    }

    /// The world of a rank that shares a store with the others.
    ///
    /// # Errors
    /// `InvalidArgument` for a rank that is not below the size, no ranks or more than 65,536;
    /// `InvalidState` for a rank that is taken, and if rank 0 has another size or another version
    /// of this crate; `Timeout` if rank 0 has not come within 30 seconds; the store's own.
    pub fn with_store(rank: u32, size: u32, store: impl Store + 'static) -> Result<Self> {
        Self::enter(rank, size, rank, Box::new(store))
    }

    fn enter(rank: u32, size: u32, local_rank: u32, store: Box<dyn Store>) -> Result<Self> {
        if size == 0 || size > MOST || rank >= size {
            return Err(Error::invalid(format!(
                "rank {rank} of {size}: a world has 1 to {MOST} ranks, counted from 0"
            )));
        }
        store.enter(rank)?;
        let own = format!("{} {size}", env!("CARGO_PKG_VERSION"));
        if rank == 0 {
            store.set("world", own.as_bytes())?;
        } else {
            let first = store.get("world", BEGIN).map_err(|e| match e {
                Error::Timeout(_) => timeout(format!(
                        "rank 0 has not come to {} within {BEGIN:?}; start rank 0, and give all ranks the same store",
                        store.place()
                    )),
                e => e,
            })?;
            if first != own.as_bytes() {
                let (version, ranks) = own.split_once(' ').unwrap_or_default();
                let first = String::from_utf8_lossy(&first).into_owned();
                let (their, theirs) = first.split_once(' ').unwrap_or((&first, "?"));
                return Err(Error::state(format!(
                    "rank {rank} has version {version} and {ranks} ranks, and rank 0 has version {their} and {theirs} ranks; start all ranks alike, with a store of this run's own"
                )));
            }
        }
        let (tokens, made) = (OrderTokens::default(), Mutex::default());
        let watchdog = Watchdog::default();
        Ok(Self(Arc::new(Inner { rank, size, local_rank, store, tokens, made, watchdog })))
    }

    /// The world that the environment of this process names, as a launcher set it. The page of
    /// reference about the environment has all variables.
    ///
    /// The first group of which the rank is set counts: `LEASEHOLD_RANK` and `LEASEHOLD_WORLD`;
    /// `RANK` and `WORLD_SIZE` (torchrun); `OMPI_COMM_WORLD_RANK` and `OMPI_COMM_WORLD_SIZE`;
    /// `PMI_RANK` and `PMI_SIZE`; `SLURM_PROCID` and `SLURM_NTASKS`.
    ///
    /// The store is `LEASEHOLD_STORE`, as `tcp://HOST:PORT` or `file:FOLDER`; else rank 0 serves at
    /// `MASTER_ADDR`, on `LEASEHOLD_PORT` or on the port after `MASTER_PORT`. Beyond loopback it
    /// needs `LEASEHOLD_TOKEN`, the same secret on all ranks. One rank alone needs no store. Waits
    /// for rank 0 for 30 seconds at most.
    ///
    /// The script of a batch job of Slurm's is no rank: it has `SLURM_PROCID=0`, no
    /// `SLURM_STEP_NUM_TASKS` and no store.
    ///
    /// # Errors
    /// `NotFound` without any group; `InvalidArgument` that names a variable that is missing or
    /// wrong, and its value; as [`with_store`](Self::with_store), [`TcpStore`] and [`FileStore`].
    pub fn from_env() -> Result<Self> {
        Self::from_variables(of_process)
    }

    /// Returns whether the environment of this process names a rank, as a launcher does. Then
    /// [`from_env`](Self::from_env) finds a world, or says what is missing.
    #[must_use]
    pub fn is_launched() -> bool {
        Variables(&of_process).launcher().is_some()
    }

    /// The variable of the environment that makes this process a rank, the rank, and the number of
    /// ranks; `None` without any. Opens no store, and waits for nobody.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env), for the variables of the rank.
    pub fn launched() -> Result<Option<(&'static str, u32, u32)>> {
        let variables = Variables(&of_process);
        let Some(names) = variables.launcher() else { return Ok(None) };
        variables.ranks(names).map(|[rank, size, _]| Some((names[0], rank, size)))
    }

    /// As [`from_env`](Self::from_env), with variables from elsewhere.
    ///
    /// # Errors
    /// As [`from_env`](Self::from_env).
    pub fn from_variables(variable: impl Fn(&str) -> Option<String>) -> Result<Self> {
        let variables = Variables(&variable);
        let Some(names) = variables.launcher() else { return Err(variables.no_rank()) };
        let [rank, size, local_rank] = variables.ranks(names)?;
        let store: Result<Box<dyn Store>> = match size {
            // As in a task of Slurm's alone.
            1 if !variables.names_store() => Ok(Box::new(ThreadStore::new())),
            _ => variables.store(names, rank, size),
        };
        let world = store.and_then(|store| Self::enter(rank, size, local_rank, store));
        world.map_err(|e| match e {
            Error::Timeout(text) => {
                let why = format!("{text}; {}", no_rank_by(names[0], rank));
                timeout(why)
            }
            e => e,
        })
    }

    /// This rank, counted from 0.
    #[must_use]
    pub fn rank(&self) -> u32 {
        self.0.rank
    }

    /// How many ranks there are.
    #[must_use]
    pub fn size(&self) -> u32 {
        self.0.size
    }

    /// This rank among those of its host, as the launcher says; without that, the rank itself. The
    /// number of the device that it takes.
    #[must_use]
    pub fn local_rank(&self) -> u32 {
        self.0.local_rank
    }

    /// The store that the ranks share.
    #[must_use]
    pub fn store(&self) -> &dyn Store {
        &*self.0.store
    }

    /// Whether a rank takes part.
    ///
    /// # Errors
    /// The store's own.
    pub fn presence(&self, rank: u32) -> Result<Presence> {
        self.0.store.presence(rank)
    }

    /// The work of each rank, a line for each communicator: its last calls, and what those wait for
    /// that are not over. Any rank may ask at any time; a thread of each other rank answers, also
    /// while that rank waits in a call. A rank that does not answer within `limit` is named: it was
    /// stopped, for example. For people: the text may change between versions.
    ///
    /// # Errors
    /// The store's own.
    pub fn report(&self, limit: Duration) -> Result<String> {
        watchdog::report(&*self.0, limit)
    }

    /// Makes reports for whoever must not keep the world: for example, for a thread that waits for
    /// requests.
    #[must_use]
    pub fn reporter(&self) -> Reporter {
        Reporter(Arc::downgrade(&self.0))
    }

    /// Waits until all ranks have called it with this name, for `limit` at most. A name serves
    /// once.
    ///
    /// # Errors
    /// `Timeout` that says how many have come; the store's own.
    pub fn barrier(&self, name: &str, limit: Duration) -> Result<()> {
        self.0.store.barrier(&format!("barrier/{name}"), self.0.size, limit)
    }
}

/// Makes [reports](World::report) as long as its world lives, which it does not keep.
#[derive(Clone)]
pub struct Reporter(Weak<Inner>);

impl Reporter {
    /// As [`World::report`]; `None` once the world has ended.
    ///
    /// # Errors
    /// As there.
    pub fn report(&self, limit: Duration) -> Option<Result<String>> {
        self.0.upgrade().map(|world| watchdog::report(&*world, limit))
    }
}

impl fmt::Debug for Reporter {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Reporter({:?})", self.0.upgrade().map(World))
    }
}

impl Inner {
    /// The number of the next communicator with this name.
    pub(crate) fn next_of(&self, name: &str) -> u64 {
        let mut made = self.made.lock();
        let count = made.entry(name.to_owned()).or_default();
        *count += 1;
        *count
    }

    /// The value that another rank sets. The wait looks from time to time whether the rank is still
    /// there, and whether it has an `end` itself.
    ///
    /// # Errors
    /// That of `end`; `Timeout` and `PeerLost` that name the rank and what it should have done.
    pub(crate) fn hear(
        &self,
        rank: u32,
        key: &str,
        what: &str,
        limit: Duration,
        end: impl Fn() -> Option<Error>,
    ) -> Result<Vec<u8>> {
        let until = Instant::now().checked_add(limit);
        loop {
            if let Some(cause) = end() {
                return Err(cause);
            }
            let left = crate::store::left(until);
            match self.store.get(key, left.min(LOOK)) {
                Err(Error::Timeout(_)) => {}
                got => return got,
            }
            let presence = self.store.presence(rank)?;
            if presence == Presence::Gone {
                // It may have said so just before.
                let lost =
                    || lost(rank, format!("it is gone, and {what}; look at its last message"));
                let said = self.store.get(key, Duration::ZERO);
                return said.map_err(|_| end().unwrap_or_else(lost));
            }
            if left.is_zero() {
                let state = match presence {
                    Presence::Awaited => "it has not come",
                    _ => "it is there",
                };
                return Err(timeout(format!(
                    "rank {rank}: {state}, and {what} within {limit:?}; look at what it does"
                )));
            }
        }
    }
}

fn of_process(name: &str) -> Option<String> {
    std::env::var_os(name).map(|value| value.to_string_lossy().into())
}

/// The cure for a process that is a rank by mistake.
fn no_rank_by(name: &str, rank: u32) -> String {
    format!("{name}={rank} makes this process a rank: unset it for one that is none")
}

/// The environment.
struct Variables<'a>(&'a dyn Fn(&str) -> Option<String>);

/// Slurm's name of the rank.
const SLURM: &str = "SLURM_PROCID";
/// Names of the rank, the number of ranks, and the rank among those of a host.
const LAUNCHERS: [[&str; 3]; 5] = [
    ["LEASEHOLD_RANK", "LEASEHOLD_WORLD", "LOCAL_RANK"],
    ["RANK", "WORLD_SIZE", "LOCAL_RANK"],
    ["OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_LOCAL_RANK"],
    ["PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID"],
    [SLURM, "SLURM_NTASKS", "SLURM_LOCALID"],
];

impl Variables<'_> {
    fn text(&self, name: &str) -> Option<String> {
        (self.0)(name).filter(|value| !value.is_empty())
    }

    fn number(&self, name: &str, most: u32) -> Result<Option<u32>> {
        let Some(value) = self.text(name) else { return Ok(None) };
        match value.trim().parse() {
            Ok(n) if n <= most => Ok(Some(n)),
            _ => Err(Error::invalid(format!("{name}={value:?} is no number from 0 to {most}"))),
        }
    }

    fn names_store(&self) -> bool {
        ["LEASEHOLD_STORE", "MASTER_ADDR"].iter().any(|name| self.text(name).is_some())
    }

    /// The variables that make this process a rank.
    fn launcher(&self) -> Option<[&'static str; 3]> {
        let named = |[rank, ..]: &[&'static str; 3]| self.text(rank).is_some();
        LAUNCHERS.into_iter().find(named).filter(|names| names[0] != SLURM || !self.is_script())
    }

    /// Returns whether this is the script of a batch job of Slurm's, which runs once. srun names
    /// the tasks of a step; without one the user may name a store.
    fn is_script(&self) -> bool {
        let is = |name: &str, value: &str| self.text(name).as_deref() == Some(value);
        is(SLURM, "0")
            && self.text("SLURM_STEP_NUM_TASKS").is_none()
            && !is("SLURM_NTASKS", "1")
            && !self.names_store()
    }

    #[cold]
    fn no_rank(&self) -> Error {
        let script = match self.text(SLURM) {
            Some(_) => format!("{SLURM}=0 is a batch script's; "),
            None => String::new(),
        };
        not_found(format!(
            "{script}the environment names no rank; start the program by torchrun, mpirun or srun, or set LEASEHOLD_RANK, LEASEHOLD_WORLD and LEASEHOLD_STORE"
        ))
    }

    /// The rank, the number of ranks, and the rank on the host.
    fn ranks(&self, [rank_name, size_name, local_name]: [&str; 3]) -> Result<[u32; 3]> {
        let rank = self.number(rank_name, MOST - 1)?.unwrap_or_default();
        let Some(size) = self.number(size_name, MOST)? else {
            return Err(Error::invalid(format!(
                "{rank_name}={rank}, and {size_name} is not set; set it to the number of ranks, or unset {rank_name} for a process that is none"
            )));
        };
        if rank >= size {
            return Err(Error::invalid(format!(
                "{rank_name}={rank} and {size_name}={size}: ranks are counted from 0 and below the number of all"
            )));
        }
        Ok([rank, size, self.number(local_name, MOST - 1)?.unwrap_or(rank)])
    }

    fn store(&self, names: [&str; 3], rank: u32, size: u32) -> Result<Box<dyn Store>> {
        let token = self.text("LEASEHOLD_TOKEN");
        let tcp = |address: &str| -> Result<Box<dyn Store>> {
            Ok(Box::new(match rank {
                0 => TcpStore::serve(address, token.as_deref())?,
                _ => TcpStore::connect(address, token.as_deref(), BEGIN)?,
            }))
        };
        if let Some(place) = self.text("LEASEHOLD_STORE") {
            if let Some(folder) = place.strip_prefix("file:") {
                return Ok(Box::new(FileStore::open(folder)?));
            }
            return match place.strip_prefix("tcp://") {
                Some(address) => tcp(address),
                None => Err(Error::invalid(format!(
                    "LEASEHOLD_STORE={place:?} is no store; give tcp://HOST:PORT or file:FOLDER"
                ))),
            };
        }
        let Some(host) = self.text("MASTER_ADDR") else {
            return Err(Error::invalid(format!(
                "rank {rank} of {}={size}: neither LEASEHOLD_STORE nor MASTER_ADDR is set; set LEASEHOLD_STORE to tcp://HOST:PORT of rank 0, or to file:FOLDER; {}",
                names[1],
                no_rank_by(names[0], rank)
            )));
        };
        let port = match self.number("LEASEHOLD_PORT", 65_535)? {
            Some(port) => port,
            // The launcher's own store has that port.
            None => match self.number("MASTER_PORT", 65_534)? {
                Some(port) => port + 1,
                None => {
                    return Err(Error::invalid(format!(
                        "MASTER_ADDR={host:?}, and neither LEASEHOLD_PORT nor MASTER_PORT is set; set LEASEHOLD_PORT to a free port of that host"
                    )));
                }
            },
        };
        match host.parse::<Ipv6Addr>() {
            Ok(host) => tcp(&format!("[{host}]:{port}")),
            Err(_) => tcp(&format!("{host}:{port}")),
        }
    }
}

impl fmt::Debug for World {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "World(rank {} of {}, {})", self.0.rank, self.0.size, self.0.store.place())
    }
}
