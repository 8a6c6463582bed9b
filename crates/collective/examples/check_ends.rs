//! Checks on real GPUs how communicators end: ranks whose calls differ, a rank that is late, and
//! one that is killed. Each rank is a process, started as those of `check_ranks`. Rank 0 prints a
//! table; what is not as it should be ends the program with status 1. The last rank kills itself.

use leasehold::{DeviceId, Error, Result, Runtime, Stream, View};
use leasehold_collective::{Comm, CommConfig, Reduce, World};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const N: usize = 1 << 20;
/// The limit for a call whose other ranks do not come.
const LIMIT: Duration = Duration::from_secs(2);
/// How long the program waits for what must happen.
const TIMEOUT: Duration = Duration::from_secs(60);

fn main() -> Result<()> {
    let world = World::from_env()?;
    let runtime = Runtime::open(DeviceId::cuda(world.local_rank()))?;
    differ(&world, &runtime)?;
    late(&world, &runtime)?;
    graphs(&world, &runtime)?;
    killed(&world, &runtime)
}

fn show(world: &World, line: &str) {
    if world.rank() == 0 {
        println!("{line}");
    }
}

fn expect(right: bool, what: &str, found: &dyn std::fmt::Display) -> Result<()> {
    match right {
        true => Ok(()),
        false => Err(Error::other(format!("{what}: {found}"))),
    }
}

/// The failure of a communicator, and how long it took.
fn failure(comm: &Comm) -> Result<(Error, Duration)> {
    let begun = Instant::now();
    loop {
        if let Some(cause) = comm.failure() {
            return Ok((cause, begun.elapsed()));
        }
        expect(begun.elapsed() < TIMEOUT, "a communicator has no failure", &comm.name())?;
        std::thread::sleep(Duration::from_micros(100));
    }
}

/// Whether work of the rank that depends on no other rank gives what it should.
fn alone(runtime: &Runtime) -> Result<()> {
    let failed = |what: &str| {
        let what = what.to_owned();
        move |e: Error| Error::other(format!("{what}, of work that depends on nobody: {e}"))
    };
    let own = runtime.create_stream().map_err(failed("a stream"))?.runtime();
    let x = own.upload(&[7u32; 1000]).map_err(failed("an upload"))?;
    let got: Vec<u32> = own.to_vec(&x).map_err(failed("a download"))?;
    expect(got == [7; 1000], "work that depends on nobody", &"it is wrong")
}

fn end_of(stream: &Stream) -> Result<Result<()>> {
    let end = stream.synchronize_timeout(TIMEOUT);
    let hangs = matches!(&end, Err(Error::Timeout(text)) if text.contains("60"));
    expect(!hangs, "a stream hangs", &"after the end of its communicator")?;
    Ok(end)
}

/// NCCL takes calls of different counts, and completes them with wrong numbers.
fn differ(world: &World, runtime: &Runtime) -> Result<()> {
    let comm = world.comm(runtime, &CommConfig::new("differ").timeout(TIMEOUT))?;
    let x = runtime.upload(&vec![1.0f32; N])?;
    comm.all_reduce(runtime.stream(), &x, Reduce::Sum)?;
    world.barrier("differ", TIMEOUT)?;
    let part = if world.rank() == 0 { x.slice(..N / 2) } else { x.slice(..) };
    comm.all_reduce(runtime.stream(), part, Reduce::Sum)?;
    let (cause, after) = failure(&comm)?;
    let text = cause.to_string();
    expect(text.contains("#1: rank 0 all_reduce 524288 f32 Sum"), "a mismatch", &text)?;
    show(world, &format!("eager calls that differ: named after {after:.0?}: {text}"));
    let end = end_of(runtime.stream())?;
    show(
        world,
        &format!("  the stream of the calls: {}", if end.is_ok() { "sound" } else { "failed" }),
    );
    alone(runtime)?;
    world.barrier("differed", TIMEOUT)
}

/// A rank that does not call.
fn late(world: &World, runtime: &Runtime) -> Result<()> {
    let own = runtime.create_stream()?.runtime();
    let comm = world.comm(&own, &CommConfig::new("late").timeout(LIMIT))?;
    let last = world.rank() + 1 == world.size();
    let x = own.upload(&vec![1.0f32; N])?;
    own.stream().synchronize()?;
    world.barrier("late", TIMEOUT)?;
    if last {
        let (cause, _) = failure(&comm)?;
        expect(matches!(cause, Error::PeerLost { .. }), "a rank that is late", &cause)?;
        return world.barrier("was-late", TIMEOUT);
    }
    let begun = Instant::now();
    comm.all_reduce(own.stream(), &x, Reduce::Sum)?;
    let end = end_of(own.stream())?;
    let after = begun.elapsed();
    let cause = comm.failure().map_or_else(|| "no failure".to_owned(), |e| e.to_string());
    expect(end.is_err(), "a call that was given up looks complete", &cause)?;
    expect(cause.contains("late: no eager call"), "the report", &cause)?;
    alone(runtime)?;
    show(
        world,
        &format!("a rank that does not call: after {after:.2?} (limit {LIMIT:?}): {cause}"),
    );
    world.barrier("was-late", TIMEOUT)
}

/// A graph whose communicator ends: launches that run fail, later ones are refused, and the driver
/// keeps what the graph uses.
fn graphs(world: &World, runtime: &Runtime) -> Result<()> {
    let own = runtime.create_stream()?.runtime();
    let comm = world.comm(&own, &CommConfig::new("graph").timeout(TIMEOUT))?;
    let x = own.upload(&vec![1.0f32; N])?;
    let graph = own.record_graph(|recording| {
        (0..16).try_for_each(|_| comm.all_reduce(recording.stream(), &x, Reduce::Average))
    })?;
    graph.launch_on(own.stream())?;
    own.stream().synchronize()?;
    world.barrier("graph", TIMEOUT)?;
    if world.rank() == 0 {
        // The others do not launch.
        (0..3).try_for_each(|_| graph.launch_on(own.stream()).map(drop))?;
        std::thread::sleep(Duration::from_millis(50));
        let begun = Instant::now();
        comm.abort(Error::other("on purpose"))?;
        let aborted = begun.elapsed();
        let end = end_of(own.stream())?;
        expect(end.is_err(), "a launch that was given up looks complete", &"no error")?;
        println!(
            "a graph's communicator is ended: abort {aborted:.1?}, its launches over after {:.1?}",
            begun.elapsed()
        );
    }
    let (cause, _) = failure(&comm)?;
    let refused = graph.launch_on(own.stream());
    expect(refused.is_err(), "a launch after the end", &cause)?;
    alone(runtime)?;
    drop((graph, comm));
    alone(runtime)?;
    world.barrier("graphs", TIMEOUT)
}

fn now() -> u128 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |t| t.as_micros())
}

/// The last rank is killed while the others wait for it.
fn killed(world: &World, runtime: &Runtime) -> Result<()> {
    let own = runtime.create_stream()?.runtime();
    let comm = world.comm(&own, &CommConfig::new("killed").timeout(TIMEOUT))?;
    let x = own.upload(&vec![1.0f32; N])?;
    let (other, y) = (own.create_stream()?, own.upload(&vec![1.0f32; N])?);
    comm.all_reduce(own.stream(), &x, Reduce::Sum)?;
    own.stream().synchronize()?;
    world.barrier("killed", TIMEOUT)?;
    let last = world.size() - 1;
    if world.rank() == last {
        std::thread::sleep(Duration::from_millis(300));
        world.store().set("killed-at", now().to_string().as_bytes())?;
        let id = std::process::id().to_string();
        let _ = std::process::Command::new("kill").args(["-9", &id]).status();
        std::thread::sleep(TIMEOUT);
    }
    comm.all_reduce(own.stream(), &x, Reduce::Sum)?;
    other.copy(y.view(), x.view())?; // depends on the call
    let (cause, _) = failure(&comm)?;
    let named = now();
    let rank = matches!(cause, Error::PeerLost { rank, .. } if rank == last);
    expect(rank, "a rank that was killed", &cause)?;
    let at = world.store().get("killed-at", TIMEOUT)?;
    let at: u128 = String::from_utf8_lossy(&at).parse().unwrap_or_default();
    let failed = own.stream().now().timeline().failure().is_some();
    let begun = Instant::now();
    let (ends, dependent) = (end_of(own.stream())?, end_of(&other)?);
    let over = begun.elapsed();
    expect(failed && ends.is_err(), "the call that was given up looks complete", &cause)?;
    expect(dependent.is_err(), "a copy of what the call did not give looks complete", &cause)?;
    alone(runtime)?;
    let rest = comm.shrink(&[last])?;
    let fresh = runtime.create_stream()?.runtime();
    let z = fresh.upload(&[rest.size()])?;
    rest.all_reduce(fresh.stream(), &z, Reduce::Sum)?;
    let sum = fresh.to_vec(&z)?;
    expect(sum == [rest.size() * rest.size()], "a sum of the others", &format!("{sum:?}"))?;
    show(
        world,
        &format!(
            "a killed rank: named after {:.1} ms, its calls over {over:.1?} later, the process goes on, {} ranks are left: {cause}",
            named.saturating_sub(at) as f64 / 1e3,
            rest.size()
        ),
    );
    Ok(())
}
