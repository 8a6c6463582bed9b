//! Runs a plan: a thread for each rank, and a watch that nothing hangs.
//!
//! Until the end ranks wait for each other where the runtime lets them, and nowhere else. The first
//! rank that finds something ends the run, and the communicators are aborted, so that the others
//! end too.

use super::model::{Plan, Planned, first};
use super::numbers::{self, typed};
use super::step::{ARRAYS, At, COMMS, Call, GRAPHS, Group, Kind, STREAMS, Step, Wrong};
use crate::play::{Finding, Stop};
use crate::step::{Slot, Span};
use crate::target::{Kernels, RankBench, Target};
use crate::work;
use leasehold::backend::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use leasehold::backend::sync::{Arc, Mutex};
use leasehold::{
    ArrayView, Buffer, Error, Graph, HostTimeline, Lease, Result, Runtime, Stream, View,
};
use leasehold_collective::{
    Check, CollectiveOps, Comm, CommConfig, Element, ElementType, Group as Calls, Reduce, World,
};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// The time that the threads of the other ranks get to end after a finding.
const LAST: Duration = Duration::from_secs(5);
/// The time that a library gets to end its work before a call that is held goes on.
const LIBRARY: Duration = Duration::from_millis(100);

/// The progress that the watch looks at.
struct Watch {
    plan: Arc<Plan>,
    /// The step that each rank is at.
    at: Vec<AtomicU32>,
    done: AtomicU64,
    /// Ranks that have compared all that is left.
    through: AtomicU32,
    stop: AtomicBool,
    finding: Mutex<Option<Finding>>,
    /// The communicators of each rank.
    comms: Vec<Mutex<Vec<Comm>>>,
}

impl Watch {
    fn find(&self, what: String, hang: bool) {
        let mut finding = self.finding.lock();
        if finding.is_none() {
            let ranks = self.at.iter().enumerate().map(|(rank, at)| {
                let at = at.load(Ordering::Relaxed) as usize;
                match self.plan.steps.get(at) {
                    Some(p) => format!("rank {rank} is in step {at}: {:?}", p.step),
                    None => format!("rank {rank} is through"),
                }
            });
            *finding = Some(Finding { what, hang, threads: ranks.collect() });
        }
        drop(finding);
        self.stop.store(true, Ordering::SeqCst);
    }
}

/// The reason why a step fails, in words.
type Outcome = std::result::Result<(), String>;

fn said(e: Error) -> String {
    e.to_string()
}

/// A rank.
struct Player {
    watch: Arc<Watch>,
    world: World,
    runtime: Runtime,
    kernels: Kernels,
    limit: Duration,
    streams: Vec<Stream>,
    arrays: Vec<Option<(ElementType, Lease<Buffer>)>>,
    comms: Vec<Option<Comm>>,
    graphs: Vec<Option<Graph>>,
    /// The timeline for which a stream waits, and the value.
    held: Option<(HostTimeline, u64)>,
    /// Communicators that were aborted.
    aborts: u32,
}

/// The place where steps run: the runtime, or its recording.
struct On<'a> {
    runtime: &'a Runtime,
    streams: &'a [Stream],
}

impl Player {
    fn new(
        watch: &Arc<Watch>,
        world: World,
        runtime: Runtime,
        kernels: Kernels,
        library: Option<Arc<dyn CollectiveOps>>,
        limit: Duration,
    ) -> Result<Self> {
        let mut comms = vec![None; COMMS.into()];
        for (slot, name, check) in [(0, "one", Check::Recordings), (1, "two", Check::Each)] {
            let mut config = CommConfig::new(name).check(check).timeout(limit);
            if let Some(library) = &library {
                config = config.ops(library.clone());
            }
            comms[slot] = Some(world.comm(&runtime, &config)?);
        }
        let mut streams = vec![runtime.stream().clone()];
        for _ in 1..STREAMS {
            streams.push(runtime.create_stream()?);
        }
        let player = Self {
            watch: watch.clone(),
            world,
            runtime,
            kernels,
            limit,
            streams,
            arrays: vec![None; ARRAYS.into()],
            comms,
            graphs: vec![None; GRAPHS.into()],
            held: None,
            aborts: 0,
        };
        player.register();
        Ok(player)
    }

    fn me(&self) -> u32 {
        self.world.rank()
    }

    /// Lets the watch abort the communicators.
    fn register(&self) {
        let all = self.comms.iter().flatten().cloned().collect();
        *self.watch.comms[self.me() as usize].lock() = all;
    }

    fn array(&self, slot: Slot) -> std::result::Result<&(ElementType, Lease<Buffer>), String> {
        self.arrays[usize::from(slot)].as_ref().ok_or_else(|| "an array is missing".to_owned())
    }

    fn comm(&self, slot: Slot) -> std::result::Result<&Comm, String> {
        self.comms[usize::from(slot)].as_ref().ok_or_else(|| "a communicator is missing".to_owned())
    }

    /// Plays all steps, and compares what is left.
    fn run(mut self) -> Outcome {
        let plan = self.watch.plan.clone();
        for (index, planned) in plan.steps.iter().enumerate() {
            if self.watch.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            if planned.step.rank().is_some_and(|rank| rank != self.me()) {
                continue;
            }
            self.watch.at[self.me() as usize].store(index as u32, Ordering::Relaxed);
            let played = catch_unwind(AssertUnwindSafe(|| self.step(planned)));
            let played = played.unwrap_or_else(|_| Err("a panic".to_owned()));
            self.watch.done.fetch_add(1, Ordering::Relaxed);
            if let Err(why) = played {
                return Err(format!("step {index}, {:?}: {why}", planned.step));
            }
        }
        self.watch.at[self.me() as usize].store(u32::MAX, Ordering::Relaxed);
        self.finish(&plan)
    }

    fn finish(mut self, plan: &Plan) -> Outcome {
        self.signal().map_err(said)?;
        for stream in &self.streams {
            stream.synchronize().map_err(|e| format!("at the end: {e}"))?;
            self.watch.done.fetch_add(1, Ordering::Relaxed);
        }
        for (slot, by_rank) in &plan.remains {
            let (_, buffer) = self.array(*slot)?;
            let got = self.runtime.to_vec::<u8>(buffer).map_err(said)?;
            work::compare(&got, &by_rank[self.me() as usize])
                .map_err(|e| format!("at the end, array {slot}: {e}"))?;
        }
        for comm in self.comms.iter().flatten() {
            if let Some(e) = comm.failure() {
                return Err(format!("at the end, {} has failed: {e}", comm.name()));
            }
        }
        // A rank that has found something does not come to the end of the world.
        self.watch.through.fetch_add(1, Ordering::SeqCst);
        while self.watch.through.load(Ordering::SeqCst) < plan.ranks {
            if self.watch.stop.load(Ordering::SeqCst) {
                return Ok(());
            }
            std::thread::sleep(Duration::from_micros(200));
        }
        self.graphs.clear();
        self.comms.clear();
        self.register();
        self.arrays.clear();
        self.streams.clear();
        let Self { world, runtime, .. } = self;
        drop(runtime);
        world.close(self.limit).map_err(|e| format!("the world cannot be closed: {e}"))
    }

    fn signal(&mut self) -> Result<()> {
        self.held.take().map_or(Ok(()), |(timeline, value)| timeline.signal(value).map(drop))
    }

    fn step(&mut self, planned: &Planned) -> Outcome {
        let me = self.me();
        match planned.step {
            Step::New { array, element, len, seed } => {
                let bytes = first(element, seed, me, len);
                let made = self.runtime.upload(&bytes).map_err(said)?.into_buffer();
                self.arrays[usize::from(array)] = Some((element, made));
            }
            Step::Numbers { .. } | Step::Own { .. } | Step::Through { .. } | Step::Calls(_) => {
                let on = On { runtime: &self.runtime, streams: &self.streams };
                self.submit(&planned.step, &on)?;
            }
            Step::Record { graph, ref steps } => {
                let made = self.record(steps)?;
                self.graphs[usize::from(graph)] = Some(made);
            }
            Step::Replay { graph, stream, turn } => {
                let graph = self.graphs[usize::from(graph)].as_ref();
                let graph = graph.ok_or("a graph is missing")?;
                let stream = &self.streams[turned(stream, turn, me)];
                graph.launch_on(stream).map_err(said)?;
            }
            Step::DropGraph(graph) => self.graphs[usize::from(graph)] = None,
            Step::Split { comm, to, ref places } => {
                let place = places[me as usize];
                let (color, key) = (place.map(|p| p.0), place.map_or(0, |p| p.1));
                let part = self.comm(comm)?.split(color, key).map_err(said)?;
                self.comms[usize::from(to)] = part;
                self.register();
            }
            Step::Stream { stream, .. } => {
                let made = self.runtime.create_stream().map_err(said)?;
                self.streams[usize::from(stream)] = made;
            }
            Step::WaitStream { stream, on, .. } => {
                let now = self.streams[usize::from(on)].now();
                self.streams[usize::from(stream)].wait(now).map_err(said)?;
            }
            Step::Hold { stream, .. } => {
                let timeline = self.runtime.create_host_timeline().map_err(said)?;
                let value = timeline.value() + 1;
                self.streams[usize::from(stream)].wait(timeline.at(value)).map_err(said)?;
                self.held = Some((timeline, value));
            }
            Step::Signal { .. } => self.signal().map_err(said)?,
            Step::Check { stream, span, .. } => {
                let got = self.read(&self.streams[usize::from(stream)], span)?;
                let expect = planned.expect.as_deref().unwrap_or_default();
                work::compare(&got, expect)?;
            }
            Step::Sync { stream, .. } => {
                self.streams[usize::from(stream)].synchronize().map_err(said)?;
            }
            Step::Wrong { wrong, .. } => self.wrong(wrong)?,
            Step::Abort { held } => self.abort(held)?,
        }
        Ok(())
    }

    fn read(&self, stream: &Stream, span: Span) -> std::result::Result<Vec<u8>, String> {
        let part = self.array(span.slot)?.1.part(span.range()).map_err(said)?;
        let mut got = vec![0xEE; span.len as usize];
        stream.download(&mut got, part).map_err(said)?;
        Ok(got)
    }

    fn record(&self, steps: &[Step]) -> std::result::Result<Graph, String> {
        let runtime = self.runtime.start_graph_recording().map_err(said)?;
        let recorded = (|| -> Outcome {
            let streams: Vec<Stream> = (0..STREAMS)
                .map(|_| runtime.create_stream())
                .collect::<Result<_>>()
                .map_err(said)?;
            let on = On { runtime: &runtime, streams: &streams };
            let own = |step: &&Step| step.rank().is_none_or(|rank| rank == self.me());
            steps.iter().filter(own).try_for_each(|step| self.submit(step, &on))
        })();
        match recorded {
            Ok(()) => runtime.stop_graph_recording().map_err(said),
            Err(why) => {
                runtime.abandon_graph_recording();
                Err(why)
            }
        }
    }

    /// Submits work or calls.
    fn submit(&self, step: &Step, on: &On<'_>) -> Outcome {
        match step {
            Step::Numbers { stream, array, seed, .. } => {
                let (element, buffer) = self.array(*array)?;
                let count = (buffer.len() / element.size()) as usize;
                let bytes = numbers::some(*element, *seed, count);
                on.streams[usize::from(*stream)].upload(buffer.view(), &bytes).map_err(said)
            }
            Step::Own { stream, work, .. } => {
                let find = |slot| self.array(slot).map(|a| a.1.clone());
                let from: Vec<_> = work
                    .from
                    .iter()
                    .map(|s| find(s.slot))
                    .collect::<std::result::Result<_, _>>()?;
                let (to, stream) = (find(work.to.slot)?, &on.streams[usize::from(*stream)]);
                work::run(stream, &self.kernels, work, &to, &from).map_err(said)
            }
            Step::Through { stream, to, from, .. } => {
                let stream = &on.streams[usize::from(*stream)];
                let (to_buffer, from_buffer) = (&self.array(to.slot)?.1, &self.array(from.slot)?.1);
                let copy = || -> Result<()> {
                    let between = on.runtime.alloc(from.len.into())?;
                    stream.copy(between.view(), from_buffer.part(from.range())?)?;
                    stream.copy(to_buffer.part(to.range())?, between.view())
                };
                copy().map_err(said)
            }
            Step::Calls(group) => self.calls(group, on),
            _ => Ok(()),
        }
    }

    fn calls(&self, group: &Group, on: &On<'_>) -> Outcome {
        // A rank without a part in a communicator makes no calls of it.
        let Some(comm) = &self.comms[usize::from(group.comm)] else { return Ok(()) };
        let stream = &on.streams[turned(group.stream, group.turn, self.me())];
        let mut arrays = Vec::new();
        for call in &group.calls {
            let barrier = call.kind == Kind::Barrier;
            arrays.push(match barrier {
                true => None,
                false => Some((self.array(call.to.array)?, self.array(call.from.array)?)),
            });
        }
        let made = comm.group(stream, |g| {
            group.calls.iter().zip(&arrays).try_for_each(|(call, arrays)| {
                let Some((to, from)) = arrays else { return g.barrier() };
                typed!(to.0, T => add::<T>(g, comm, call, &to.1, &from.1))
            })
        });
        made.map_err(said)
    }

    /// Makes a wrong call, which must be refused.
    fn wrong(&self, wrong: Wrong) -> Outcome {
        let (comm, stream) = (self.comm(0)?, &self.streams[0]);
        let n = comm.size() as usize;
        let x = self.runtime.upload(&vec![0u32; n + 2]).map_err(said)?;
        let made = match wrong {
            Wrong::Root => comm.broadcast(stream, &x, comm.size()),
            Wrong::Overlap => {
                comm.all_reduce_into(stream, x.slice(0..=n), x.slice(1..n + 2), Reduce::Sum)
            }
            Wrong::Lengths => comm.all_gather(stream, &x, x.slice(0..0)),
            Wrong::Integers => comm.all_reduce(stream, &x, Reduce::Average),
        };
        match made {
            Err(Error::InvalidArgument(_)) => Ok(()),
            other => Err(format!("a wrong call gave {other:?}")),
        }
    }

    /// Aborts a communicator while a call waits for the host or for rank 0. What depends on the
    /// call must fail.
    fn abort(&mut self, held: bool) -> Outcome {
        let (runtime, me) = (self.runtime.clone(), self.me());
        let comm = self.comm(0)?.split(Some(0), 0).map_err(said)?;
        let comm = comm.ok_or("a split without a part")?;
        self.aborts += 1;
        let (number, called) = (self.aborts, held || me != 0);
        let scene = || -> Result<std::result::Result<Vec<u32>, Error>> {
            let (stream, other) = (runtime.create_stream()?, runtime.create_stream()?);
            let (x, y) = (runtime.upload(&[me; 9])?, runtime.upload(&[7u32; 9])?);
            comm.all_reduce(&stream, &x, Reduce::Largest)?;
            stream.synchronize()?;
            let gate = runtime.create_host_timeline()?;
            let open = gate.value() + 1;
            if held {
                stream.wait(gate.at(open))?;
            }
            if called {
                comm.all_reduce(&stream, &x, Reduce::Sum)?;
            }
            other.copy(y.as_view().view(), x.as_view().view())?;
            // Until all ranks have made the call, no abort refuses it.
            self.world.barrier(&format!("abort/{number}"), self.limit)?;
            let abort = || comm.abort(Error::state("the program aborts it"));
            if held {
                // The abort waits for the call: the gate opens beside it, after the library's end.
                std::thread::scope(|scope| {
                    let aborting = scope.spawn(abort);
                    while comm.failure().is_none() {
                        std::thread::sleep(Duration::from_millis(1));
                    }
                    std::thread::sleep(LIBRARY);
                    gate.signal(open)?;
                    aborting.join().unwrap_or_else(|_| Err(Error::state("a panic")))
                })?;
            } else {
                abort()?;
            }
            let mut got = vec![0u32; 9];
            let got = other.download(&mut got, y.as_view().view()).map(|()| got);
            // Work after a failure inherits it until the failed work is over.
            let _ = stream.synchronize();
            let _ = other.synchronize();
            // A later call would wait for devices that are still in the one that is aborted.
            self.world.barrier(&format!("aborted/{number}"), self.limit)?;
            Ok(got)
        };
        match scene().map_err(said)? {
            Err(_) if called => Ok(()),
            Ok(_) if !called => Ok(()),
            Err(e) => Err(format!("what nothing failed before fails: {e}")),
            Ok(got) => Err(format!(
                "a call of an aborted communicator failed, and what depends on it gave {got:?}"
            )),
        }
    }
}

/// The stream of a rank.
fn turned(stream: Slot, turn: u8, rank: u32) -> usize {
    (u32::from(stream) + u32::from(turn) * rank) as usize % usize::from(STREAMS)
}

/// Adds a call to a group.
fn add<'a, T: Element>(
    group: &mut Calls<'a>,
    comm: &Comm,
    call: &Call,
    to_buffer: &'a Lease<Buffer>,
    from_buffer: &'a Lease<Buffer>,
) -> Result<()> {
    let Call { kind, to, from, count } = *call;
    let (n, me, count) = (comm.size(), comm.rank(), count as usize);
    let view = |buffer: &'a Lease<Buffer>, at: At, part: u32, parts: usize| {
        let from = at.at as usize + part as usize * count;
        ArrayView::<T>::try_from(buffer)?.try_slice(from..from + parts * count)
    };
    let all = n as usize;
    let one = to.array == from.array;
    match kind {
        Kind::AllReduce(how) if to == from => group.all_reduce(view(to_buffer, to, 0, 1)?, how),
        Kind::AllReduce(how) => {
            group.all_reduce_into(view(to_buffer, to, 0, 1)?, view(from_buffer, from, 0, 1)?, how)
        }
        Kind::AllGather => {
            let src = match one {
                true => view(to_buffer, to, me, 1)?,
                false => view(from_buffer, from, 0, 1)?,
            };
            group.all_gather(view(to_buffer, to, 0, all)?, src)
        }
        Kind::ReduceScatter(how) => {
            let dst = match one {
                true => view(from_buffer, from, me, 1)?,
                false => view(to_buffer, to, 0, 1)?,
            };
            group.reduce_scatter(dst, view(from_buffer, from, 0, all)?, how)
        }
        Kind::Broadcast(root) => group.broadcast(view(to_buffer, to, 0, 1)?, root % n),
        Kind::Reduce(how, root) => group.reduce(view(to_buffer, to, 0, 1)?, how, root % n),
        Kind::AllToAll => {
            group.all_to_all(view(to_buffer, to, 0, all)?, view(from_buffer, from, 0, all)?)
        }
        Kind::Shift(by) => {
            group.send(view(from_buffer, from, 0, 1)?, (me + by) % n)?;
            group.recv(view(to_buffer, to, 0, 1)?, (me + n - by % n) % n)
        }
        Kind::Barrier => group.barrier(),
    }
}

/// Runs a plan on a target. `timeout` is how long nothing may go on.
pub(super) fn play(
    target: &Target,
    seed: u64,
    faults: bool,
    plan: Plan,
    timeout: Duration,
) -> std::result::Result<(), Stop> {
    let unable = |e: Error| Stop::Unable(format!("the devices cannot be opened: {e}"));
    let ranks = plan.ranks;
    // A rank gives up before the watch does, and its error names what it waits for.
    let limit = timeout.mul_f64(0.75);
    let bench = target.open_ranks(seed, faults, ranks, limit).map_err(unable)?;
    let RankBench { under, runtimes, kernels, library } = bench;
    let worlds = World::threads(ranks).map_err(unable)?;
    let watch = Arc::new(Watch {
        plan: Arc::new(plan),
        at: (0..ranks).map(|_| AtomicU32::new(0)).collect(),
        done: AtomicU64::new(0),
        through: AtomicU32::new(0),
        stop: AtomicBool::new(false),
        finding: Mutex::new(None),
        comms: (0..ranks).map(|_| Mutex::default()).collect(),
    });
    let mut threads: Vec<JoinHandle<()>> = Vec::new();
    for (world, runtime) in worlds.into_iter().zip(&runtimes) {
        let (own, rank, runtime) = (watch.clone(), world.rank(), runtime.clone());
        let (kernels, library) = (kernels.clone(), library.clone());
        let run = move || {
            let player = Player::new(&own, world, runtime, kernels, library, limit);
            let ended = player.map_err(said).and_then(Player::run);
            if let Err(why) = ended {
                own.find(format!("rank {rank}: {why}"), false);
            }
        };
        match std::thread::Builder::new().name(format!("stress rank {rank}")).spawn(run) {
            Ok(thread) => threads.push(thread),
            Err(e) => {
                watch.stop.store(true, Ordering::SeqCst);
                return Err(Stop::Unable(format!("the system gives no more threads: {e}")));
            }
        }
    }
    let over = || threads.iter().all(JoinHandle::is_finished);
    let mut last = (0, Instant::now());
    while !over() && !watch.stop.load(Ordering::SeqCst) {
        std::thread::sleep(Duration::from_millis(1));
        let now = watch.done.load(Ordering::Relaxed);
        if now != last.0 {
            last = (now, Instant::now());
        } else if last.1.elapsed() > timeout {
            watch.find(format!("nothing went on for {timeout:?}{}", under.waits()()), true);
        }
    }
    if watch.stop.load(Ordering::SeqCst) {
        let reports = under.reports();
        // Taken away, so that a rank that has ended is seen as gone.
        let comms = watch.comms.iter().flat_map(|all| std::mem::take(&mut *all.lock()));
        for comm in comms.collect::<Vec<Comm>>() {
            // Its error says nothing about the finding.
            let _ = comm.abort(Error::state("the run ends with a finding"));
        }
        let end = Instant::now() + LAST;
        while !over() && Instant::now() < end {
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut found = watch.finding.lock().take().unwrap_or_else(|| Finding {
            what: "a panic of a rank".to_owned(),
            hang: false,
            threads: Vec::new(),
        });
        found.what = [vec![found.what], reports].concat().join("; ");
        if !over() {
            // Memory and runtimes in their use cannot be ended.
            std::mem::forget((under, runtimes));
        }
        return Err(Stop::Found(found));
    }
    for thread in threads {
        if thread.join().is_err() {
            watch.find("a panic at the end".to_owned(), false);
        }
    }
    if let Some(finding) = watch.finding.lock().take() {
        return Err(Stop::Found(finding));
    }
    drop((kernels, library, watch));
    let mut devices: Vec<Runtime> = Vec::new();
    for runtime in runtimes {
        if !devices.iter().any(|d| d.same(&runtime)) {
            devices.push(runtime);
        }
    }
    under
        .end(devices, Vec::new())
        .map_err(|what| Stop::Found(Finding { what, hang: false, threads: Vec::new() }))
}
