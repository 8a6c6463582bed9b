//! Ranks as threads.

use leasehold::{DeviceId, Result, Runtime};
use leasehold_collective::{Comm, CommConfig, World};
use std::process::{Child, Command, Stdio};
use std::time::Duration;

/// A rank of a test: its world, a runtime with a stream of its own, and a communicator.
pub struct Rank {
    pub world: World,
    pub runtime: Runtime,
    pub comm: Comm,
}

impl Rank {
    pub fn me(&self) -> u32 {
        self.world.rank()
    }

    /// The configuration of another communicator.
    pub fn config(&self, name: &str) -> CommConfig {
        CommConfig::new(name)
    }
}

/// A runtime with a stream of its own.
pub fn runtime() -> Result<Runtime> {
    Ok(Runtime::open(DeviceId::cpu(0))?.create_stream()?.runtime())
}

/// A configuration for ranks that come soon.
pub fn config() -> CommConfig {
    CommConfig::new("tp").timeout(Duration::from_secs(60))
}

/// Runs a function as each rank of a world, and gives what each returned.
pub fn worlds<T: Send>(size: u32, rank: impl Fn(World) -> T + Sync) -> Vec<T> {
    std::thread::scope(|scope| {
        let rank = &rank;
        let worlds = World::threads(size).unwrap();
        let threads: Vec<_> =
            worlds.into_iter().map(|world| scope.spawn(move || rank(world))).collect();
        threads.into_iter().map(|thread| thread.join().unwrap()).collect()
    })
}

/// As [`worlds`], with a communicator.
pub fn ranks_with<T: Send>(
    size: u32,
    config: &CommConfig,
    rank: impl Fn(&Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    worlds(size, |world| {
        let runtime = runtime()?;
        let comm = world.comm(&runtime, config)?;
        rank(&Rank { world, runtime, comm })
    })
}

/// As [`ranks_with`], for ranks that wait for each other.
pub fn ranks_that_wait<T: Send>(
    size: u32,
    config: &CommConfig,
    rank: impl Fn(&Rank) -> Result<T> + Sync,
) -> Vec<Result<T>> {
    ranks_with(size, config, rank)
}

/// As [`ranks_with`], with the tests' configuration; all must succeed.
pub fn ranks<T: Send>(size: u32, rank: impl Fn(&Rank) -> Result<T> + Sync) -> Vec<T> {
    ranks_with(size, &config(), rank).into_iter().map(|result| result.unwrap()).collect()
}

/// A process, which is killed with this value.
pub struct Killed(pub Child);

impl Drop for Killed {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A rank that is a process: a test of this program, which finds its world in the environment.
pub fn process(test: &str, [rank, size]: [&str; 2], store: &str, token: Option<&str>) -> Killed {
    let child = Command::new(std::env::current_exe().unwrap())
        .args(["--exact", test])
        .envs([("LEASEHOLD_RANK", rank), ("LEASEHOLD_WORLD", size), ("LEASEHOLD_STORE", store)])
        .envs(token.map(|token| ("LEASEHOLD_TOKEN", token)))
        .stdout(Stdio::null())
        .spawn();
    Killed(child.unwrap())
}
