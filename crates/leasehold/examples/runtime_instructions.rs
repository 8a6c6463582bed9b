//! Runs one of the runtime's hot paths a number of times, for `ci/instructions.sh` to count;
//! without arguments names them and their times.
//!
//! `cargo run --release -p leasehold --example runtime_instructions [-- NAME TIMES]`
//!
//! The backend accepts everything and does nothing, at once, so what is counted is the public path
//! alone and the same every time.

use leasehold::backend::{
    Description, Device, GraphExec, MemoryInfo, NodePatch, Op, Pipeline, Plan, Stream, StreamDesc,
    TimestampQuery,
};
use leasehold::backend::{
    Handle, PoolConfig, Recycle, Resource, SlotPool, Tagged, Timeline, TimelineOwner,
    TimelineSource, tags,
};
use leasehold::kernel::{KernelCheck, KernelDesc, KernelSource, session_ops, session_sync_ops};
use leasehold::{
    Access, Allocator, Backend, BackendKind, Context, DeviceId, DeviceInfo, Error, Graph,
    KernelBase, KernelSession, Lease, MemoryKind, PoolStats, Result, Runtime, Timepoint, View,
};
use leasehold_alloc::AllocatorConfig;
use leasehold_alloc_bench::FakeBacking;
use std::process::ExitCode;
use std::sync::Arc;
use std::time::{Duration, Instant};

/// A stream whose work is over as soon as it is submitted.
struct IdleStream(TimelineOwner);

// SAFETY: nothing that is submitted touches memory, so every value is over when it is taken.
unsafe impl TimelineSource for IdleStream {
    fn timeline(&self) -> &'static Timeline {
        self.0.timeline()
    }
    fn signal(&self) -> Result<u64> {
        Ok(self.timeline().submitted())
    }
    fn refresh(&self) -> Result<u64> {
        Ok(self.timeline().completed())
    }
    fn wait(&self, _: Timepoint) -> Result<()> {
        Ok(())
    }
    fn wait_host(&self, value: u64, timeout: Option<Duration>) -> Result<()> {
        self.timeline().wait(value, timeout)
    }
}

// SAFETY: it runs nothing.
unsafe impl Stream for IdleStream {
    unsafe fn submit(&self, ops: &[Op<'_>]) -> Result<u64> {
        std::hint::black_box(ops);
        let value = self.0.advance()?;
        self.0.complete(value);
        Ok(value)
    }
    fn flush(&self) -> Result<()> {
        Ok(())
    }
    fn native(&self) -> u64 {
        0
    }
}

struct IdleGraph(usize);

// SAFETY: a launch runs nothing.
unsafe impl GraphExec for IdleGraph {
    fn nodes(&self) -> usize {
        self.0
    }
    fn bytes(&self) -> u64 {
        0
    }
    unsafe fn update(&self, _: &[NodePatch<'_>]) -> Result<()> {
        Ok(())
    }
    fn native(&self) -> u64 {
        0
    }
}

struct IdleDevice {
    description: Description,
    memory: Allocator,
    pinned: Allocator,
    streams: SlotPool<Make<IdleStream>>,
    graphs: SlotPool<Make<IdleGraph>>,
    pipelines: SlotPool<Make<Pipeline>>,
}

macro_rules! tagged {
    ($($payload:ty => $tag:ty),*) => { $(impl Tagged for $payload { type Tag = $tag; })* };
}
tagged!(IdleStream => tags::Stream, IdleGraph => tags::Graph, IdleDevice => tags::Device);

/// Makes payloads by asking for them.
struct Make<T>(std::marker::PhantomData<fn() -> T>);

impl<T: Tagged + Send + Sync + 'static> Resource for Make<T> {
    type Payload = T;
    type Request<'a> = &'a dyn Fn() -> Result<T>;
    const NAME: &'static str = "idle";
    fn create(&self, _: Handle<T::Tag>, make: &&dyn Fn() -> Result<T>) -> Result<T> {
        make()
    }
    fn recycle(&self, _: &mut T) -> Recycle {
        Recycle::Destroy
    }
}

fn allocator() -> Result<Allocator> {
    Allocator::new(Box::new(FakeBacking::new(1 << 30)), AllocatorConfig::default())
}

fn pool<T: Tagged + Send + Sync + 'static>() -> Result<SlotPool<Make<T>>> {
    SlotPool::new(Make(std::marker::PhantomData), PoolConfig::default())
}

// SAFETY: its memory is a fake backing's, it is not visible to the host, and nothing runs on it.
unsafe impl Device for IdleDevice {
    fn description(&self) -> &Description {
        &self.description
    }
    fn memory_info(&self) -> Result<MemoryInfo> {
        Ok(MemoryInfo::default())
    }
    fn make_current(&self) -> Result<()> {
        Ok(())
    }
    fn memory(&self, kind: MemoryKind) -> Result<&Allocator> {
        Ok(if kind == MemoryKind::Pinned { &self.pinned } else { &self.memory })
    }
    fn stream(&self, _: &StreamDesc) -> Result<Lease<dyn Stream>> {
        let make = || Ok(IdleStream(TimelineOwner::take()?));
        Ok(Lease::map(self.streams.acquire(&(&make as _))?, |s| s as &dyn Stream))
    }
    fn pipeline(&self, desc: &KernelDesc<'_>) -> Result<Lease<Pipeline>> {
        let make = || Ok(Pipeline::new(desc, 0, 1024));
        self.pipelines.acquire(&(&make as _))
    }
    fn timestamp(&self) -> Result<Lease<TimestampQuery>> {
        Err(Error::Unsupported("no time".into()))
    }
    unsafe fn elapsed(&self, _: &TimestampQuery, _: &TimestampQuery) -> Result<Duration> {
        Err(Error::Unsupported("no time".into()))
    }
    unsafe fn instantiate(&self, plan: Plan) -> Result<Lease<dyn GraphExec>> {
        let make = || Ok(IdleGraph(plan.len()));
        Ok(Lease::map(self.graphs.acquire(&(&make as _))?, |g| g as &dyn GraphExec))
    }
    fn peer_access(&self, _: DeviceId) -> Result<bool> {
        Ok(false)
    }
    fn synchronize(&self, _: Option<Duration>) -> Result<()> {
        Ok(())
    }
    fn pools(&self, _: &mut dyn FnMut(&'static str, PoolStats)) {}
}

struct Idle(SlotPool<Make<IdleDevice>>);

// SAFETY: it has one device.
unsafe impl Backend for Idle {
    fn kind(&self) -> BackendKind {
        BackendKind::Null
    }
    fn devices(&self) -> Result<Vec<DeviceInfo>> {
        Ok(Vec::new())
    }
    fn open(&self, id: DeviceId) -> Result<Lease<dyn Device>> {
        let make = || {
            let info = DeviceInfo::new(id, "a device that does nothing");
            let mut description = Description::new(info);
            description.caps.graphs = true;
            Ok(IdleDevice {
                description,
                memory: allocator()?,
                pinned: allocator()?,
                streams: pool()?,
                graphs: pool()?,
                pipelines: pool()?,
            })
        };
        Ok(Lease::map(self.0.acquire(&(&make as _))?, |d| d as &dyn Device))
    }
    fn shutdown(&self) -> Result<()> {
        Ok(())
    }
}

struct Bench {
    runtime: Runtime,
    kernel: KernelBase,
    operands: [Lease<leasehold::Buffer>; 3],
    pinned: Lease<leasehold::Buffer>,
    graph: Graph,
}

impl Bench {
    fn new() -> Result<Self> {
        let context = Context::with_backends(vec![Arc::new(Idle(pool()?))]);
        let runtime = context.runtime(DeviceId::new(BackendKind::Null, 0))?;
        let roles = [Access::Read, Access::Read, Access::Write];
        // A kernel over rows asks for as many bytes of each operand as its parameters say.
        let check = KernelCheck::new(|launch| {
            let [rows, ..] = launch.params::<[u32; 4]>()?;
            (0..3).try_for_each(|i| launch.want(i, u64::from(rows) * 4))
        });
        let desc = KernelDesc::new("k", KernelSource::Registered("k".into()), &roles, check)
            .params_of::<[u32; 4]>();
        // SAFETY: the device runs nothing.
        let kernel = unsafe { KernelBase::new(desc.aligned(4)) }?;
        let operands = [runtime.alloc(4096)?, runtime.alloc(4096)?, runtime.alloc(4096)?];
        let pinned = runtime.alloc_pinned(4096)?;
        let graph = runtime.record_graph(|r| session(r, &kernel, &operands))?;
        Ok(Self { runtime, kernel, operands, pinned, graph })
    }
}

fn session(
    runtime: &Runtime,
    kernel: &KernelBase,
    [a, b, c]: &[Lease<leasehold::Buffer>; 3],
) -> Result<()> {
    let operands = [a.read(), b.read(), c.write()];
    let session = KernelSession::begin(kernel, runtime.stream())?;
    let session = session_sync_ops::wait(session, &operands)?;
    let session = session_ops::bind(session)?;
    let session = session_ops::params(session, &[0u32; 4])?;
    let session = session_ops::dispatch_1d(session, 8, 64)?;
    session_sync_ops::update_tokens(session).finish().map(drop)
}

type Body = fn(&Bench) -> Result<()>;

/// The paths, by the names of the table.
const PATHS: [(&str, Body); 6] = [
    ("runtime_alloc_drop", |b| b.runtime.alloc(4096).map(drop)),
    ("runtime_alloc_drop_large", |b| b.runtime.alloc(1 << 20).map(drop)),
    ("session_begin_finish", |b| session(&b.runtime, &b.kernel, &b.operands)),
    ("graph_launch", |b| b.graph.launch().map(drop)),
    ("copy_pinned_up", |b| b.runtime.stream().copy_pinned(b.operands[0].view(), b.pinned.view())),
    ("copy_pinned_down", |b| b.runtime.stream().copy_pinned(b.pinned.view(), b.operands[0].view())),
];

fn run(name: Option<String>, times: Option<u32>) -> Result<ExitCode> {
    let bench = Bench::new()?;
    match (name, times) {
        (Some(name), Some(times)) => {
            let Some((_, body)) = PATHS.iter().find(|p| p.0 == name) else {
                eprintln!("no path {name}");
                return Ok(ExitCode::from(2));
            };
            (0..times).try_for_each(|_| body(&bench))?;
        }
        (None, _) => {
            for (name, body) in PATHS {
                let mut rounds: Vec<Duration> = Vec::new();
                for _ in 0..31 {
                    let start = Instant::now();
                    (0..10_000).try_for_each(|_| body(&bench))?;
                    rounds.push(start.elapsed());
                }
                rounds.sort();
                println!("{name:26} {:6.1} ns", rounds[15].as_secs_f64() * 1e9 / 10_000.0);
            }
        }
        _ => {
            eprintln!("usage: runtime_instructions [NAME TIMES]");
            return Ok(ExitCode::from(2));
        }
    }
    Ok(ExitCode::SUCCESS)
}

fn main() -> ExitCode {
    let mut args = std::env::args().skip(1);
    run(args.next(), args.next().and_then(|n| n.parse().ok())).unwrap_or_else(|e| {
        eprintln!("{e}");
        ExitCode::FAILURE
    })
}
