//! A backend that accepts everything and does nothing, at once. What is counted over it is the
//! public path alone, and the same every time.

use leasehold::backend::{
    Description, Device, GraphExec, MemoryInfo, NodePatch, Op, Pipeline, Plan, Stream, StreamDesc,
    TimestampQuery,
};
use leasehold::backend::{
    Handle, PoolConfig, Recycle, Resource, SlotPool, Tagged, Timeline, TimelineOwner,
    TimelineSource, tags,
};
use leasehold::kernel::{KernelCheck, KernelDesc, KernelSource};
use leasehold::{
    Access, Allocator, Backend, BackendKind, Context, DeviceId, DeviceInfo, Error, KernelBase,
    Lease, MemoryKind, PoolStats, Result, Runtime, Timepoint,
};
use leasehold_alloc::AllocatorConfig;
use leasehold_sim::memory::FakeBacking;
use std::sync::Arc;
use std::time::Duration;

/// A runtime of the backend's device.
pub fn runtime() -> Result<Runtime> {
    let context = Context::with_backends(vec![Arc::new(Idle(pool()?))]);
    context.runtime(DeviceId::new(BackendKind::Null, 0))
}

/// A kernel of three operands. One over rows asks for as many bytes of each operand as its
/// parameters say.
pub fn kernel() -> Result<KernelBase> {
    let roles = [Access::Read, Access::Read, Access::Write];
    let check = KernelCheck::new(|launch| {
        let [rows, ..] = launch.params::<[u32; 4]>()?;
        (0..3).try_for_each(|i| launch.want(i, u64::from(rows) * 4))
    });
    let desc = KernelDesc::new("k", KernelSource::Registered("k".into()), &roles, check)
        .params_of::<[u32; 4]>();
    // SAFETY: the device runs nothing.
    unsafe { KernelBase::new(desc.aligned(4)) }
}

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
