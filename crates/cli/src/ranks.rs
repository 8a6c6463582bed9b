//! Ranks of a command: copies of it, or threads of this process, with a device each.
//!
//! Ranks on real CUDA devices are processes, as the library of collectives wants it. Between
//! simulated devices and on the CPU they are threads.
//!
//! This module must not know what a rank does.

use crate::failure::Failure;
use leasehold::{BackendKind, Context, DeviceId, Error, Runtime};
use leasehold_collective::{CollectiveOps, CommConfig, World};
use leasehold_core::sync::Mutex;
use std::ffi::OsString;
use std::net::{Ipv4Addr, TcpListener};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// How long the other ranks have to say why they end, once one has failed.
const LAST_WORDS: Duration = Duration::from_secs(2);
/// The time between two looks at the ranks.
const LOOK: Duration = Duration::from_millis(5);
/// Variables of NCCL that copies get, unless they are set: calls in recordings leave memory alone,
/// and all connections are made with a communicator.
const NCCL: [(&str, &str); 2] = [("NCCL_GRAPH_REGISTER", "0"), ("NCCL_RUNTIME_CONNECT", "0")];

/// The world that a launcher has put this process into; `None` without a launcher.
pub(crate) fn launched() -> Result<Option<World>, Failure> {
    match World::from_env() {
        Ok(world) => Ok(Some(world)),
        Err(Error::NotFound(_)) => Ok(None),
        Err(e) => Err(Failure::from(e)),
    }
}

/// The device of a rank, counted from the first rank's. Ranks on the CPU share it.
pub(crate) fn device_of(first: DeviceId, rank: u32) -> DeviceId {
    match first.backend {
        BackendKind::Cpu => first,
        backend => DeviceId::new(backend, first.ordinal.saturating_add(rank)),
    }
}

/// Copies of this command. They are ended with this value.
struct Copies(Vec<Child>);

impl Drop for Copies {
    fn drop(&mut self) {
        // One that has ended is no error.
        self.0.iter_mut().for_each(|copy| drop(copy.kill()));
        self.0.iter_mut().for_each(|copy| drop(copy.wait()));
    }
}

impl Copies {
    /// The first copy that failed, if one has, and whether all have ended.
    fn look(&mut self) -> Result<(Option<(usize, ExitStatus)>, bool), Failure> {
        let (mut failed, mut all) = (None, true);
        for (rank, copy) in self.0.iter_mut().enumerate() {
            match copy.try_wait().map_err(|e| Failure::new(format!("rank {rank}: {e}")))? {
                None => all = false,
                Some(status) if status.success() => {}
                Some(status) => {
                    failed.get_or_insert((rank, status));
                }
            }
        }
        Ok((failed, all))
    }
}

/// Starts a copy of this command for each rank, with the same arguments, and waits for them. Only
/// rank 0 has the standard output. If one fails, the others are ended.
///
/// # Errors
/// The first rank that failed, by its number and status.
pub(crate) fn copies(ranks: u32) -> Result<(), Failure> {
    let arguments: Vec<_> = std::env::args_os().skip(1).collect();
    copies_with(&arguments, ranks)
}

fn copies_with(arguments: &[OsString], ranks: u32) -> Result<(), Failure> {
    let cannot = |e: std::io::Error| Failure::new(format!("the ranks cannot be started: {e}"));
    let program = std::env::current_exe().map_err(cannot)?;
    // The port is free now. If another program takes it meanwhile, rank 0 says so.
    let free = TcpListener::bind((Ipv4Addr::LOCALHOST, 0)).map_err(cannot)?;
    let store = format!("tcp://{}", free.local_addr().map_err(cannot)?);
    drop(free);
    let mut all = Copies(Vec::new());
    for rank in 0..ranks {
        let mut copy = Command::new(&program);
        copy.args(arguments).stdin(Stdio::null());
        copy.env("LEASEHOLD_RANK", rank.to_string()).env("LEASEHOLD_WORLD", ranks.to_string());
        copy.env("LEASEHOLD_STORE", &store).env_remove("LOCAL_RANK");
        for (name, value) in NCCL {
            if std::env::var_os(name).is_none() {
                copy.env(name, value);
            }
        }
        if rank != 0 {
            copy.stdout(Stdio::null());
        }
        all.0.push(copy.spawn().map_err(cannot)?);
    }
    let mut failed: Option<(usize, ExitStatus, Instant)> = None;
    loop {
        let (first, ended) = all.look()?;
        if let (None, Some((rank, status))) = (&failed, first) {
            failed = Some((rank, status, Instant::now()));
        }
        match failed {
            None if ended => return Ok(()),
            Some((rank, status, since)) if ended || since.elapsed() > LAST_WORDS => {
                return Err(Failure::new(format!(
                    "rank {rank} of {ranks} failed ({status}); its own message is above"
                )));
            }
            _ => std::thread::sleep(LOOK),
        }
    }
}

/// A rank that is a thread of this process.
pub(crate) struct Rank {
    pub(crate) world: World,
    pub(crate) context: Context,
    /// The runtime of the rank's device, with a stream of its own.
    pub(crate) runtime: Runtime,
    library: Option<Arc<dyn CollectiveOps>>,
}

impl Rank {
    /// A rank with a device of a context.
    pub(crate) fn new(world: World, context: Context, device: DeviceId) -> Result<Self, Failure> {
        let runtime = context.runtime(device)?.create_stream()?.runtime();
        Ok(Self { world, context, runtime, library: None })
    }

    /// The configuration of a communicator of such ranks.
    pub(crate) fn config(&self, name: &str) -> CommConfig {
        let config = CommConfig::new(name);
        match &self.library {
            Some(library) => config.ops(library.clone()),
            None => config,
        }
    }
}

/// Devices for ranks that are threads of this process.
pub(crate) struct Threads {
    first: DeviceId,
    ranks: u32,
    context: Context,
    library: Option<Arc<dyn CollectiveOps>>,
    #[cfg(feature = "sim")]
    machine: Option<leasehold_sim::Monitor>,
}

impl Threads {
    /// The devices from this one on: the CPU, or simulated ones. `sim` is the seed of a simulated
    /// driver, and `memory` the bytes of each simulated device.
    ///
    /// # Errors
    /// A device whose ranks are no threads.
    pub(crate) fn new(
        first: DeviceId,
        sim: Option<u64>,
        ranks: u32,
        memory: u64,
    ) -> Result<Self, Failure> {
        match (first.backend, sim) {
            (BackendKind::Cpu, Some(_)) => {
                Err(Failure::misuse("--sim: the CPU has no driver to simulate"))
            }
            (BackendKind::Cpu, None) => Ok(Self {
                first,
                ranks,
                context: Context::new(),
                library: None,
                #[cfg(feature = "sim")]
                machine: None,
            }),
            #[cfg(feature = "sim")]
            _ => Self::simulated(first, sim, ranks, memory),
            #[cfg(not(feature = "sim"))]
            _ => {
                let _ = memory;
                Err(none(first))
            }
        }
    }

    #[cfg(feature = "sim")]
    fn simulated(
        first: DeviceId,
        sim: Option<u64>,
        ranks: u32,
        memory: u64,
    ) -> Result<Self, Failure> {
        use crate::system::simulated;
        use leasehold::backend::Backend;
        use leasehold_collective_sim::SimCollectives;
        let devices = first.ordinal.saturating_add(ranks);
        let machine = simulated::machine(sim.unwrap_or(simulated::SEED), simulated::operators()?)
            .devices(devices, memory);
        let (backend, machine, library): (Arc<dyn Backend>, _, _) = match (first.backend, sim) {
            (BackendKind::Sim, _) => {
                let backend = leasehold_sim::SimBackend::new(machine)?;
                let library = SimCollectives::of_sim(&backend);
                let machine = backend.machine().clone();
                (Arc::new(backend), machine, library)
            }
            #[cfg(feature = "cuda")]
            (BackendKind::Cuda, Some(_)) => {
                let config = leasehold_cuda::CudaConfig::default();
                let (backend, driver) = simulated::cuda(machine, config)?;
                let library = SimCollectives::of_cuda(&driver);
                (Arc::new(backend), driver.machine().clone(), library)
            }
            _ => return Err(none(first)),
        };
        Ok(Self {
            first,
            ranks,
            context: Context::with_backends(vec![backend]),
            library: Some(Arc::new(library)),
            machine: Some(machine),
        })
    }

    /// Runs a rank on each thread, and returns what they return, in their order.
    ///
    /// # Errors
    /// That of the rank that failed first; reports of the race detector.
    pub(crate) fn run<R: Send>(
        &self,
        rank: impl Fn(&Rank) -> Result<R, Failure> + Sync,
    ) -> Result<Vec<R>, Failure> {
        // Others fail because they lose this one.
        let first = Mutex::new(None);
        let one = |world: World| -> Option<R> {
            let number = world.rank();
            let made = Rank::new(world, self.context.clone(), device_of(self.first, number));
            made.and_then(|made| rank(&Rank { library: self.library.clone(), ..made }))
                .map_err(|failure| {
                    first.lock().get_or_insert(failure.at(format!("rank {number}")));
                })
                .ok()
        };
        let one = &one;
        let worlds = World::threads(self.ranks)?;
        let made = leasehold_core::crew::run(worlds.into_iter().map(|world| move || one(world)))?;
        if let Some(failure) = first.into_inner() {
            return Err(failure);
        }
        #[cfg(feature = "sim")]
        if let Some(machine) = &self.machine {
            crate::system::clean(machine)?;
        }
        Ok(made.into_iter().flatten().collect())
    }
}

fn none(device: DeviceId) -> Failure {
    Failure::misuse(format!("{device} has no collectives here; take cuda:0, or cpu:0 for threads"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn copies_of(test: &str, ranks: u32) -> Result<(), Failure> {
        let test = format!("ranks::tests::{test}");
        copies_with(&["--exact".into(), test.into(), "--nocapture".into()], ranks)
    }

    /// Whether this process is a copy.
    fn copied() -> bool {
        std::env::var_os("LEASEHOLD_RANK").is_some()
    }

    #[test]
    fn copies_are_a_world_and_have_the_librarys_variables() {
        if copied() {
            let world = launched().unwrap().unwrap();
            assert_eq!((world.size(), world.local_rank()), (3, world.rank()));
            for (name, _) in NCCL {
                assert!(std::env::var_os(name).is_some(), "{name}");
            }
            world.barrier("met", Duration::from_secs(60)).unwrap();
            return world.close(Duration::from_secs(60)).unwrap();
        }
        copies_of("copies_are_a_world_and_have_the_librarys_variables", 3).unwrap();
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
        let failure = copies_of("a_rank_that_fails_is_named_and_ends_the_others", 3).unwrap_err();
        let told = format!("{failure:?}");
        assert!(told.contains("rank 1 of 3 failed (exit status: 7)"), "{told}");
        assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    }

    #[test]
    fn without_a_launcher_there_is_no_world() {
        if !copied() {
            assert!(launched().unwrap().is_none());
        }
    }

    #[test]
    fn the_first_failure_of_threads_is_told_and_not_those_that_follow() {
        let threads = Threads::new(DeviceId::cpu(0), None, 3, 1 << 20).unwrap();
        let failed = threads.run(|rank| -> Result<(), Failure> {
            if rank.world.rank() == 1 {
                return Err(Failure::new("broken"));
            }
            let config = rank.config("c").timeout(Duration::from_secs(2));
            Ok(rank.world.comm(&rank.runtime, &config).map(drop)?)
        });
        let told = format!("{:?}", failed.unwrap_err());
        assert!(told.contains("rank 1: broken"), "{told}");
    }
}
