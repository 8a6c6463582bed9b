//! Ranks of a command: copies of it, threads of this process, or processes of a launcher, with a
//! device each.
//!
//! Ranks on real CUDA devices are processes, as the library of collectives wants it. Between
//! simulated devices and on the CPU they are threads.
//!
//! This module must not know what a rank does.

mod asked;

use crate::failure::Failure;
use crate::system::System;
use leasehold::backend::sync::Mutex;
use leasehold::backend::threads;
use leasehold::{BackendKind, DeviceId, Error, Runtime};
use leasehold_collective::{CollectiveOps, CommConfig, World};
use std::ffi::OsString;
use std::io::{BufRead, BufReader, Write};
use std::net::{Ipv4Addr, TcpListener};
use std::num::NonZeroU32;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::str::FromStr;
use std::sync::{Arc, mpsc};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long the other ranks have to end, once one has failed.
const LAST_WORDS: Duration = Duration::from_secs(3);
/// How long the others are looked at for a better reason, once a copy has failed.
const REASON: Duration = Duration::from_millis(200);
/// The time between two looks at the copies.
const LOOK: Duration = Duration::from_millis(5);
/// How long ranks wait for each other as they end.
pub const END: Duration = Duration::from_secs(60);
/// Variables of NCCL that copies get, unless they are set: calls in recordings leave memory alone,
/// and all connections are made with a communicator.
const NCCL: [(&str, &str); 2] = [("NCCL_GRAPH_REGISTER", "0"), ("NCCL_RUNTIME_CONNECT", "0")];
/// The beginning of a failure's line.
const FAILURE: &str = "leasehold: ";

/// A rank and the new token at which it is ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Kill {
    pub rank: u32,
    pub token: usize,
}

impl FromStr for Kill {
    type Err = String;

    fn from_str(text: &str) -> Result<Self, String> {
        let both = text.split_once('@').and_then(|(rank, token)| {
            Some(Self { rank: rank.parse().ok()?, token: token.parse().ok()? })
        });
        both.ok_or_else(|| "a rank and a token are expected, such as 1@40".to_owned())
    }
}

/// Options about ranks.
#[derive(Debug, clap::Args)]
pub struct RankArguments {
    /// Ranks that divide the model: threads on the CPU; processes on GPUs, with a device each from
    /// --device on. Those of a launcher (torchrun, mpirun, srun) when left out, and 1 without one
    #[arg(long, value_name = "N")]
    pub ranks: Option<NonZeroU32>,
    /// Tells the library of collectives that the ranks are on so many hosts, so that it takes the
    /// path between hosts; for tests on GPUs
    #[arg(long, value_name = "N", requires = "ranks")]
    hosts: Option<NonZeroU32>,
}

/// How the ranks of a command run.
pub enum Plan {
    /// One rank, in this process.
    Alone,
    /// So many threads of this process.
    Threads(u32),
    /// So many copies of this command.
    Copies(u32),
    /// This process is a rank.
    Member(World),
}

impl Plan {
    /// How many ranks there are.
    pub fn ranks(&self) -> u32 {
        match self {
            Self::Alone => 1,
            Self::Threads(ranks) | Self::Copies(ranks) => *ranks,
            Self::Member(world) => world.size(),
        }
    }

    /// The device of this process, and how many it has from there on.
    pub fn devices(&self, first: DeviceId) -> (DeviceId, u32) {
        match self {
            Self::Alone | Self::Copies(_) => (first, 1),
            Self::Threads(ranks) => (first, *ranks),
            Self::Member(world) => (device_of(first, world.local_rank()), 1),
        }
    }

    /// Returns whether this process prints the results.
    pub fn shows(&self) -> bool {
        !matches!(self, Self::Member(world) if world.rank() > 0)
    }
}

impl RankArguments {
    /// So many ranks; those of a launcher for `None`.
    pub fn of(ranks: Option<NonZeroU32>) -> Self {
        Self { ranks, hosts: None }
    }

    /// How the ranks run on devices from this one on, of which some may be simulated.
    ///
    /// # Errors
    /// Ranks that the device cannot have; as [`World::from_env`].
    pub fn plan(&self, first: DeviceId, simulated: bool) -> Result<Plan, Failure> {
        let copied = std::env::var_os("LEASEHOLD_RANK").is_some_and(|rank| !rank.is_empty());
        if self.ranks.is_some() || World::is_launched() {
            asked::listen();
        }
        let wanted = self.ranks.map(NonZeroU32::get);
        match (wanted, copied) {
            (Some(1), false) => return Ok(Plan::Alone),
            (Some(_), false) => return self.own(first, simulated),
            _ => {}
        }
        // All of this is said before anybody is waited for.
        let Some((variable, rank, ranks)) = World::launched().map_err(aside)? else {
            return Ok(Plan::Alone);
        };
        if wanted.is_some_and(|wanted| wanted != ranks) {
            return Err(Failure::misuse(format!(
                "--ranks {}: LEASEHOLD_WORLD has {ranks} ranks; leave --ranks out, or unset LEASEHOLD_RANK",
                wanted.unwrap_or(ranks)
            )));
        }
        if ranks == 1 {
            return Ok(Plan::Alone);
        }
        if simulated || first.backend != BackendKind::Cuda {
            return Err(Failure::misuse(format!(
                "rank {rank} of {ranks}: {variable}={rank} makes this process a rank; {first} is no GPU of NVIDIA's, and ranks on it are threads of one process; give --ranks {ranks} without a launcher, or --ranks 1 for a text of each process's own"
            )));
        }
        restart_with_variables()?;
        Ok(Plan::Member(World::from_env().map_err(aside)?))
    }

    /// Ranks that this command starts.
    fn own(&self, first: DeviceId, simulated: bool) -> Result<Plan, Failure> {
        let ranks = self.ranks.map_or(1, NonZeroU32::get);
        let plan = match (first.backend, simulated) {
            (BackendKind::Cuda, false) => Plan::Copies(ranks),
            (BackendKind::Cpu, _) | (BackendKind::Sim | BackendKind::Cuda, true) => {
                Plan::Threads(ranks)
            }
            _ => {
                return Err(Failure::misuse(format!(
                    "--ranks {ranks}: {first} has no collectives; take cpu:0 or cuda:0"
                )));
            }
        };
        if self.hosts.is_some() && !matches!(plan, Plan::Copies(_)) {
            return Err(Failure::misuse(format!(
                "--hosts: ranks on {first} are threads of one process; take cuda:0"
            )));
        }
        Ok(plan)
    }

    /// Starts a copy of this command for each rank, with the same arguments, and waits for them.
    /// Only rank 0 has the standard output, and prints notes.
    ///
    /// # Errors
    /// The rank that failed first, with its message.
    pub fn copies(&self, ranks: u32) -> Result<(), Failure> {
        self.copies_with(&std::env::args_os().skip(1).collect::<Vec<_>>(), ranks)
    }

    fn copies_with(&self, arguments: &[OsString], ranks: u32) -> Result<(), Failure> {
        let program = std::env::current_exe().map_err(|e| cannot(&e))?;
        // The port is free now. If another program takes it meanwhile, rank 0 says so.
        let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(|e| cannot(&e))?;
        let store = format!("tcp://{}", free.local_addr().map_err(|e| cannot(&e))?);
        drop(free);
        let mut all = Copies(Vec::new());
        for rank in 0..ranks {
            let mut copy = Command::new(&program);
            copy.args(arguments).stdin(Stdio::null()).stderr(Stdio::piped());
            copy.env("LEASEHOLD_RANK", rank.to_string()).env("LEASEHOLD_WORLD", ranks.to_string());
            copy.env("LEASEHOLD_STORE", &store).env("LOCAL_RANK", rank.to_string());
            for (name, value) in NCCL {
                set(&mut copy, name, value);
            }
            if let Some(hosts) = self.hosts {
                let host = u64::from(rank) * u64::from(hosts.get()) / u64::from(ranks);
                copy.env("NCCL_HOSTID", format!("leasehold-{host}"));
                set(&mut copy, "NCCL_SOCKET_IFNAME", "lo");
            }
            if rank > 0 {
                copy.stdout(Stdio::null());
            }
            asked::spare(&mut copy);
            all.0.push(Copy::start(&mut copy, rank)?);
        }
        all.wait()
    }
}

/// Sets a variable of a copy, unless this process has it.
fn set(copy: &mut Command, name: &str, value: &str) {
    if std::env::var_os(name).is_none() {
        copy.env(name, value);
    }
}

fn cannot(e: &std::io::Error) -> Failure {
    Failure::new(format!("the ranks cannot be started: {e}"))
}

/// Starts this process anew with the variables of NCCL, if a launcher has left them out: NCCL reads
/// them as it is loaded, and no thread may set a variable of its own process.
#[cfg(unix)]
fn restart_with_variables() -> Result<(), Failure> {
    use std::os::unix::process::CommandExt;
    if NCCL.iter().all(|(name, _)| std::env::var_os(name).is_some()) {
        return Ok(());
    }
    let mut again = Command::new(std::env::current_exe().map_err(|e| cannot(&e))?);
    again.args(std::env::args_os().skip(1));
    NCCL.iter().for_each(|(name, value)| set(&mut again, name, value));
    // It comes back only if it fails.
    Err(cannot(&again.exec()))
}

/// NCCL's variables are the user's to set here.
#[cfg(not(unix))]
fn restart_with_variables() -> Result<(), Failure> {
    Ok(())
}

/// The failure of a launcher's variables.
fn aside(e: Error) -> Failure {
    Failure::new(format!("{e}; or give --ranks 1 to leave the launcher aside"))
}

/// The device of a rank, counted from the first rank's. Ranks on the CPU share it.
pub fn device_of(first: DeviceId, rank: u32) -> DeviceId {
    match first.backend {
        BackendKind::Cpu => first,
        backend => DeviceId::new(backend, first.ordinal.saturating_add(rank)),
    }
}

/// A copy of this command.
struct Copy {
    process: Child,
    /// Its last message.
    said: Arc<Mutex<String>>,
    /// Reads its standard error.
    reader: Option<JoinHandle<()>>,
    status: Option<ExitStatus>,
}

impl Copy {
    fn start(command: &mut Command, rank: u32) -> Result<Self, Failure> {
        let mut process = command.spawn().map_err(|e| cannot(&e))?;
        let said = Arc::new(Mutex::new(String::new()));
        let (errors, last) = (process.stderr.take(), said.clone());
        let mut copy = Self { process, said, reader: None, status: None };
        let read = move || {
            let Some(errors) = errors else { return };
            for line in BufReader::new(errors).split(b'\n').map_while(Result::ok) {
                let line = String::from_utf8_lossy(&line).into_owned();
                match line.strip_prefix(FAILURE) {
                    Some(failure) => *last.lock() = failure.to_owned(),
                    // Without standard error, nobody wants to know.
                    None if rank == 0 => drop(writeln!(std::io::stderr(), "{line}")),
                    None if last.lock().is_empty() => *last.lock() = line,
                    None => {}
                }
            }
        };
        match std::thread::Builder::new().spawn(read) {
            Ok(reader) => copy.reader = Some(reader),
            Err(e) => {
                drop(Copies(vec![copy]));
                return Err(threads::refused(&e).into());
            }
        }
        Ok(copy)
    }

    /// Its failure: its own words, or how it ended.
    fn failure(&mut self, rank: usize, status: ExitStatus) -> Failure {
        if let Some(reader) = self.reader.take() {
            let _ = reader.join();
        }
        let said = std::mem::take(&mut *self.said.lock());
        match (said.is_empty() || status.code().is_none(), status.code()) {
            (true, _) => Failure::new(format!("rank {rank} ended: {status}")),
            (false, Some(2)) => Failure::misuse(said),
            (false, _) if said.starts_with("rank ") => Failure::new(said),
            (false, _) => Failure::new(format!("rank {rank}: {said}")),
        }
    }
}

/// Copies of this command. They are ended with this value.
struct Copies(Vec<Copy>);

impl Drop for Copies {
    fn drop(&mut self) {
        // One that has ended is no error.
        self.0.iter_mut().for_each(|copy| drop(copy.process.kill()));
        self.0.iter_mut().for_each(|copy| drop(copy.process.wait()));
    }
}

impl Copies {
    /// Looks which copies have ended. Returns the one that failed for the best reason: a copy that
    /// was ended from outside says nothing, and others say that they lost it. They also lose one
    /// that failed by itself, which may be seen later. Of several with a reason it is the first.
    fn look(&mut self, first: Option<usize>) -> Result<Option<(usize, ExitStatus)>, Failure> {
        for (rank, copy) in self.0.iter_mut().enumerate() {
            if copy.status.is_none() {
                let status = copy.process.try_wait();
                copy.status = status.map_err(|e| Failure::new(format!("rank {rank}: {e}")))?;
            }
        }
        let failed = |(rank, copy): (usize, &Copy)| {
            copy.status.filter(|status| !status.success()).map(|status| (rank, status))
        };
        let lost_another = |rank: usize| {
            let said = self.0[rank].said.lock();
            said.starts_with("rank ") && !said.starts_with(&format!("rank {rank}:"))
        };
        let all = self.0.iter().enumerate().filter_map(failed);
        Ok(all.min_by_key(|&(rank, status)| {
            (status.code().is_some(), lost_another(rank), Some(rank) != first)
        }))
    }

    /// Waits until all have ended, or one has failed.
    fn wait(mut self) -> Result<(), Failure> {
        let mut first: Option<(usize, Instant)> = None;
        loop {
            if let Some((rank, status)) = self.look(first.map(|(rank, _)| rank))? {
                let (_, since) = *first.get_or_insert((rank, Instant::now()));
                if since.elapsed() > REASON || status.code().is_none() {
                    return Err(self.0[rank].failure(rank, status));
                }
            } else if self.0.iter().all(|copy| copy.status.is_some()) {
                return Ok(());
            }
            if let Some(Copy { process, status: None, .. }) = self.0.first()
                && asked::take()
            {
                // Its standard error is shown.
                asked::pass_on(process);
            }
            std::thread::sleep(LOOK);
        }
    }
}

/// A rank that is a thread of this process.
pub struct Rank {
    pub world: World,
    /// The runtime of the rank's device, with a stream of its own.
    pub runtime: Runtime,
    library: Option<Arc<dyn CollectiveOps>>,
    /// Of a rank that is a process.
    _answers: Option<asked::Answers>,
}

impl Rank {
    /// This process as a rank.
    pub fn member(world: World, system: &System) -> Self {
        let answers = Some(asked::Answers::of(vec![world.reporter()]));
        Self { world, runtime: system.runtime.clone(), library: None, _answers: answers }
    }

    /// The configuration of a communicator of such ranks.
    pub fn config(&self, name: &str) -> CommConfig {
        let config = CommConfig::new(name);
        match &self.library {
            Some(library) => config.ops(library.clone()),
            None => config,
        }
    }
}

/// Runs a rank on each of so many threads, with the devices of a system from the first one on, and
/// returns what they return, in their order.
///
/// # Errors
/// That of the rank that failed first.
pub fn threads<R: Send>(
    system: &System,
    ranks: u32,
    rank: impl Fn(&Rank) -> Result<R, Failure> + Sync,
) -> Result<Vec<R>, Failure> {
    // Others fail because they lose this one.
    let first = Mutex::new(None);
    let one = |world: World| -> Option<R> {
        let number = world.rank();
        let made = || -> Result<R, Failure> {
            let device = device_of(system.device(), number);
            let runtime = system.context.runtime(device)?.create_stream()?.runtime();
            rank(&Rank { world, runtime, library: system.library(), _answers: None })
        };
        made()
            .map_err(|failure| {
                first.lock().get_or_insert(failure.at(format!("rank {number}")));
            })
            .ok()
    };
    let (one, failed) = (&one, &first);
    let (told, ends) = mpsc::channel();
    let mut all: Vec<Box<dyn FnOnce() -> Option<R> + Send + '_>> = Vec::new();
    let worlds = World::threads(ranks)?;
    let _answers = asked::Answers::of(worlds.iter().map(World::reporter).collect());
    for world in worlds {
        let told = told.clone();
        all.push(Box::new(move || {
            let made = one(world);
            // The watcher has ended only if the command ends.
            let _ = told.send(made.is_some());
            made
        }));
    }
    drop(told);
    all.push(Box::new(move || {
        watch(&ends, failed);
        None
    }));
    let made = threads::run(all)?;
    match first.into_inner() {
        Some(failure) => Err(failure),
        None => Ok(made.into_iter().flatten().collect()),
    }
}

/// Waits until all ranks have ended. Ranks that go on waiting for one that failed end with the
/// process: nobody can end a thread.
fn watch(ends: &mpsc::Receiver<bool>, failed: &Mutex<Option<Failure>>) {
    let mut until: Option<Instant> = None;
    loop {
        let end = match until {
            None => ends.recv().map_err(|_| mpsc::RecvTimeoutError::Disconnected),
            Some(until) => ends.recv_timeout(until.saturating_duration_since(Instant::now())),
        };
        match end {
            Ok(true) => {}
            Ok(false) => {
                until.get_or_insert(Instant::now() + LAST_WORDS);
            }
            Err(mpsc::RecvTimeoutError::Disconnected) => return,
            Err(mpsc::RecvTimeoutError::Timeout) => {
                if let Some(failure) = failed.lock().take() {
                    failure.report();
                }
                std::process::exit(1);
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Runs a test of this module as each rank. One test at a time: they share the signal.
    fn copies_of(test: &str, ranks: u32) -> Result<(), Failure> {
        static TURN: Mutex<()> = Mutex::new(());
        let _turn = TURN.lock();
        let test = format!("ranks::tests::{test}");
        let arguments = ["--exact".into(), test.into(), "--nocapture".into()];
        RankArguments::of(None).copies_with(&arguments, ranks)
    }

    /// Returns whether this process is a copy.
    fn copied() -> bool {
        std::env::var_os("LEASEHOLD_RANK").is_some()
    }

    #[test]
    fn copies_are_a_world_and_have_the_variables_of_the_library() {
        if copied() {
            let world = World::from_env().unwrap();
            assert_eq!((world.size(), world.local_rank()), (3, world.rank()));
            for (name, _) in NCCL {
                assert!(std::env::var_os(name).is_some(), "{name}");
            }
            world.barrier("met", END).unwrap();
            return world.close(END).unwrap();
        }
        copies_of("copies_are_a_world_and_have_the_variables_of_the_library", 3).unwrap();
    }

    /// The command passes a request on to its ranks. Rank 0 answers.
    #[test]
    #[cfg(unix)]
    fn a_request_goes_to_the_first_rank() {
        asked::listen();
        let ready = |id| std::env::temp_dir().join(format!("leasehold-asked-{id}"));
        if copied() {
            let world = World::from_env().unwrap();
            if world.rank() == 0 {
                std::fs::write(ready(std::os::unix::process::parent_id()), "").unwrap();
                let until = Instant::now() + END;
                while !asked::take() {
                    assert!(Instant::now() < until, "nobody has asked");
                    std::thread::sleep(LOOK);
                }
            }
            world.barrier("asked", 2 * END).unwrap();
            return world.close(END).unwrap();
        }
        let (id, (over, ends)) = (std::process::id(), mpsc::channel::<()>());
        std::thread::scope(|scope| {
            scope.spawn(move || {
                let runs = || ends.try_recv() == Err(mpsc::TryRecvError::Empty);
                while runs() && std::fs::remove_file(ready(id)).is_err() {
                    std::thread::sleep(LOOK);
                }
                // Ranks that are threads of another test may take a request.
                while runs() {
                    let asked = Command::new("kill").args(["-USR1", &id.to_string()]).status();
                    assert!(asked.unwrap().success());
                    std::thread::sleep(10 * LOOK);
                }
            });
            let copied = copies_of("a_request_goes_to_the_first_rank", 2);
            drop(over);
            copied.unwrap();
        });
    }

    #[test]
    fn who_fails_by_itself_is_named_and_not_who_lost_it() {
        let copy = |said: &str| {
            let mut copy = Copy::start(Command::new("false").stderr(Stdio::piped()), 1).unwrap();
            copy.process.wait().unwrap();
            copy.said = Arc::new(Mutex::new(said.to_owned()));
            copy
        };
        let mut copies =
            Copies(["rank 1 is lost", "no GPU", "no room"].map(copy).into_iter().collect());
        for (first, named) in [(0, 1), (1, 1), (2, 2)] {
            assert_eq!(copies.look(Some(first)).unwrap().unwrap().0, named);
        }
    }

    #[test]
    fn a_rank_that_fails_is_named_and_ends_the_others() {
        if copied() {
            if std::env::var("LEASEHOLD_RANK").unwrap() == "1" {
                std::process::exit(7);
            }
            std::thread::sleep(Duration::from_secs(600));
        }
        let begin = Instant::now();
        let failed = copies_of("a_rank_that_fails_is_named_and_ends_the_others", 3);
        let told = format!("{:?}", failed.unwrap_err());
        assert!(told.contains("rank 1") && told.contains("exit status: 7"), "{told}");
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    }
}
