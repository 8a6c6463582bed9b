//! The costs of a rank as ranks grow: requests to the store, host time of a call, and the time
//! until a lost rank is named. All ranks are threads of this process, each with a simulated device.
//!
//! ```text
//! cargo run --release -p leasehold-sim --example scale -- 8 64 512
//! ```
//!
//! Times of calls are processor time of the calling thread, since the ranks share the processors of
//! one machine. The time until a lost rank is named is elapsed time, and means something only where
//! the watchdogs have enough processors.

use leasehold::backend::sync::atomic::{AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Mutex};
use leasehold::{Context, Error, Result};
use leasehold_collective::store::{Presence, Store, TcpStore, ThreadStore};
use leasehold_collective::{Comm, CommConfig, Reduce, World};
use leasehold_sim::collective::SimCollectives;
use leasehold_sim::{MachineConfig, SimBackend};
use std::time::{Duration, Instant};

/// Calls whose host time is measured.
const CALLS: u32 = 200;
/// Calls of a recording.
const RECORDED: u32 = 64;
const TIMEOUT: Duration = Duration::from_secs(300);

/// Requests of all ranks by kind.
#[derive(Debug, Default)]
struct Requests {
    set: AtomicU64,
    get: AtomicU64,
    add: AtomicU64,
    presence: AtomicU64,
    bytes: AtomicU64,
}

impl Requests {
    fn all(&self) -> u64 {
        [&self.set, &self.get, &self.add, &self.presence]
            .map(|n| n.load(Ordering::Relaxed))
            .iter()
            .sum()
    }
}

/// A store that counts.
#[derive(Debug)]
struct Counting {
    store: ThreadStore,
    requests: Arc<Requests>,
}

impl Store for Counting {
    fn place(&self) -> String {
        self.store.place()
    }
    fn set(&self, key: &str, value: &[u8]) -> Result<()> {
        self.requests.set.fetch_add(1, Ordering::Relaxed);
        self.requests.bytes.fetch_add(value.len() as u64, Ordering::Relaxed);
        self.store.set(key, value)
    }
    fn get(&self, key: &str, limit: Duration) -> Result<Vec<u8>> {
        self.requests.get.fetch_add(1, Ordering::Relaxed);
        let value = self.store.get(key, limit)?;
        self.requests.bytes.fetch_add(value.len() as u64, Ordering::Relaxed);
        Ok(value)
    }
    fn add(&self, key: &str, by: i64) -> Result<i64> {
        self.requests.add.fetch_add(1, Ordering::Relaxed);
        self.store.add(key, by)
    }
    fn remove(&self, key: &str) -> Result<()> {
        self.store.remove(key)
    }
    fn enter(&self, rank: u32) -> Result<()> {
        self.store.enter(rank)
    }
    fn presence(&self, rank: u32) -> Result<Presence> {
        self.requests.presence.fetch_add(1, Ordering::Relaxed);
        self.store.presence(rank)
    }
}

/// Processor time of this thread in nanoseconds.
fn own_time() -> Result<u64> {
    let text = std::fs::read_to_string("/proc/thread-self/schedstat")?;
    let first = text.split_whitespace().next().and_then(|n| n.parse().ok());
    first.ok_or_else(|| Error::other("/proc/thread-self/schedstat has no number"))
}

/// The figures of a rank.
#[derive(Debug, Clone, Copy, Default)]
struct Figures {
    made: Duration,
    made_by: u64,
    eager: u64,
    launch: u64,
    named: Option<Duration>,
}

/// The measured part of a rank. Ranks meet at the store between the parts, uncounted.
fn rank(
    world: World,
    context: &Context,
    config: &CommConfig,
    phase: &dyn Fn(&World, &str) -> Result<()>,
) -> Result<Figures> {
    let mut figures = Figures::default();
    let runtime = context.runtime(format!("sim:{}", world.rank()).parse()?)?;
    phase(&world, "begin")?;
    let (begin, by) = (Instant::now(), own_time()?);
    let comm: Comm = world.comm(&runtime, config)?;
    (figures.made, figures.made_by) = (begin.elapsed(), own_time()? - by);
    phase(&world, "made")?;
    let x = runtime.zeros::<f32>(256)?;
    let stream = runtime.stream();
    comm.all_reduce(stream, &x, Reduce::Sum)?;
    stream.synchronize_timeout(TIMEOUT)?;
    phase(&world, "eager")?;
    let by = own_time()?;
    for _ in 0..CALLS {
        comm.all_reduce(stream, &x, Reduce::Sum)?;
    }
    figures.eager = (own_time()? - by) / u64::from(CALLS);
    stream.synchronize_timeout(TIMEOUT)?;
    let graph = runtime.record_graph(|recording| {
        (0..RECORDED).try_for_each(|_| comm.all_reduce(recording.stream(), &x, Reduce::Sum))
    })?;
    phase(&world, "recorded")?;
    let by = own_time()?;
    graph.launch_on(stream)?;
    figures.launch = (own_time()? - by) / u64::from(RECORDED);
    stream.synchronize_timeout(TIMEOUT)?;
    phase(&world, "idle")?;
    std::thread::sleep(Duration::from_secs(2));
    phase(&world, "lose")?;
    drop(graph);
    if world.rank() + 1 == world.size() {
        // As a thread that panics does: the world goes while calls of others wait.
        let end = std::panic::catch_unwind(std::panic::AssertUnwindSafe(move || {
            let (_world, _comm) = (world, comm);
            std::panic::resume_unwind(Box::new("on purpose"))
        }));
        return end.map_or(Ok(figures), |()| Ok(figures));
    }
    let begin = Instant::now();
    match comm.all_reduce(stream, &x, Reduce::Sum) {
        Ok(()) | Err(Error::PeerLost { .. }) => {}
        Err(e) => return Err(e),
    }
    while comm.failure().is_none() {
        if begin.elapsed() > TIMEOUT {
            return Err(Error::other("a lost rank was not named"));
        }
        std::thread::sleep(Duration::from_micros(200));
    }
    figures.named = Some(begin.elapsed());
    Ok(figures)
}

fn measure(ranks: u32) -> Result<()> {
    let backend = Arc::new(SimBackend::new(MachineConfig::seed(7).devices(ranks, 1 << 22))?);
    let config =
        CommConfig::new("scale").timeout(TIMEOUT).ops(Arc::new(SimCollectives::of_sim(&backend)));
    let context = Context::with_backends(vec![backend.clone()]);
    let store = ThreadStore::new();
    let requests = Arc::new(Requests::default());
    let meeting = std::sync::Barrier::new(ranks as usize);
    let counts = Mutex::new(Vec::new());
    let phase = |world: &World, name: &str| {
        if meeting.wait().is_leader() {
            let at = (
                name.to_owned(),
                Instant::now(),
                requests.all(),
                requests.bytes.load(Ordering::Relaxed),
            );
            counts.lock().push(at);
        }
        let _ = world;
        meeting.wait();
        Ok(())
    };
    let worlds = (0..ranks)
        .map(|rank| {
            let counting = Counting { store: store.share(), requests: requests.clone() };
            World::with_store(rank, ranks, counting)
        })
        .collect::<Result<Vec<_>>>()?;
    let figures: Vec<Figures> = std::thread::scope(|scope| {
        let all: Vec<_> = worlds
            .into_iter()
            .map(|world| scope.spawn(|| rank(world, &context, &config, &phase)))
            .collect();
        all.into_iter()
            .map(|rank| rank.join().map_err(|_| Error::other("a rank has panicked"))?)
            .collect::<Result<_>>()
    })?;
    let counts = counts.into_inner();
    let between = |from: &str, to: &str| {
        let at = |name: &str| counts.iter().find(|(n, ..)| n == name).cloned();
        let (from, to) = (at(from)?, at(to)?);
        Some((to.1.duration_since(from.1), to.2 - from.2, to.3 - from.3))
    };
    let (_, making, making_bytes) = between("begin", "made").unwrap_or_default();
    let (idle, looks, _) = between("idle", "lose").unwrap_or_default();
    let median = |of: &dyn Fn(&Figures) -> u64| {
        let mut all: Vec<u64> = figures.iter().map(of).collect();
        all.sort_unstable();
        all[all.len() / 2] as f64
    };
    let each = f64::from(ranks);
    println!(
        "{ranks:>5} | {:8.1} | {:7.2} | {:7.0} | {:8.2} | {:7.2} | {:9.0} | {:10.0} | {:7.1}",
        making as f64 / each,
        making_bytes as f64 / each / 1024.0,
        median(&|f| f.made.as_millis() as u64),
        median(&|f| f.made_by / 1000) / 1e3,
        median(&|f| f.eager) / 1e3,
        median(&|f| f.launch),
        looks as f64 / idle.as_secs_f64() / each,
        median(&|f| f.named.unwrap_or_default().as_micros() as u64) / 1e3,
    );
    Ok(())
}

/// Requests a second that the server of a TCP store answers to `clients` of this machine.
fn served(clients: u32) -> Result<f64> {
    let server = TcpStore::serve("127.0.0.1:0", None)?;
    let place = server.address().to_string();
    let done = AtomicU64::new(0);
    let begin = Instant::now();
    std::thread::scope(|scope| {
        let all: Vec<_> = (0..clients)
            .map(|_| {
                scope.spawn(|| -> Result<()> {
                    let store = TcpStore::connect(&place, None, TIMEOUT)?;
                    while begin.elapsed() < Duration::from_secs(2) {
                        store.presence(0)?;
                        done.fetch_add(1, Ordering::Relaxed);
                    }
                    Ok(())
                })
            })
            .collect();
        all.into_iter().try_for_each(|client| {
            client.join().map_err(|_| Error::other("a client has panicked"))?
        })
    })?;
    Ok(done.into_inner() as f64 / begin.elapsed().as_secs_f64())
}

fn main() -> Result<()> {
    println!(
        "ranks | made: requests, KiB, ms, own ms a rank | eager us a call | launch ns a call | watchdog requests/s a rank | lost rank named ms"
    );
    let sizes: Vec<u32> = std::env::args().skip(1).filter_map(|n| n.parse().ok()).collect();
    sizes.into_iter().try_for_each(measure)?;
    for clients in [1, 8, 64] {
        println!("a TCP store answers {clients} clients {:.0} requests a second", served(clients)?);
    }
    Ok(())
}
