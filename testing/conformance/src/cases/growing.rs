//! Cases of memory that grows in place, over a runtime.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error};
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::kernel::Grid;
use leasehold::pool::{Contents, Pool, PoolKind};
use leasehold::{Access, Array, Error, Growing, KernelBase, Runtime, Stream, View};

const LIMITED: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Limited)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(212, "memory that grows keeps its address and its values", &[], values)
        .sanitizer(),
    Case::runtime(213, "a graph reaches memory that grew after its recording", LIMITED, graph)
        .sanitizer(),
    Case::runtime(214, "memory beyond the end goes after its last use", &[Need::Hold], tail)
        .sanitizer(),
    Case::runtime(
        215,
        "a steady state of growing memory calls no driver for it",
        &[Need::Pooling],
        steady,
    ),
    Case::runtime(216, "growing memory is suspended and resumed under a graph", LIMITED, suspended)
        .sanitizer(),
    Case::runtime(230, "a fork of growing memory has its values, and no memory twice", &[], fork)
        .sanitizer(),
    Case::runtime(231, "shared memory stays as long as a fork has it", LIMITED, shared).sanitizer(),
];

/// Values that tell each place from every other.
fn words(from: usize, to: usize) -> Vec<u32> {
    (from as u32..to as u32).map(|i| i.wrapping_mul(2_654_435_761) ^ 91).collect()
}

/// A few granules of most devices.
const MOST: usize = 3 << 20;

fn values(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.stream();
    let cache = Growing::<u32>::new(&runtime, MOST)?;
    check_eq!((cache.len(), cache.most()), (0, MOST), "the lengths of a new one");
    let (addr, mut len) = (cache.view().addr(), 0);
    for more in [1, 63, 4096, 500_000, 1 << 20] {
        cache.grow(stream, len + more)?;
        stream.fill(cache.slice(len..).view(), 0xA5A5_A5A5u32)?;
        check_eq!(runtime.to_vec(cache.slice(len..))?, vec![0xA5A5_A5A5; more], "what was filled");
        stream.upload(cache.slice(len..).view(), &words(len, len + more))?;
        len += more;
        check_eq!((cache.len(), cache.view().addr()), (len, addr), "length and address");
        check!(runtime.to_vec(cache.as_view())? == words(0, len), "the values of {len}");
    }
    let high = cache.slice(len - 8..).view();
    cache.shrink(stream, 4000)?;
    for refused in [stream.fill(high, 1u8), stream.download(&mut [0u32; 8], high)] {
        expect_error(refused, "InvalidArgument", "work beyond the end")?;
    }
    expect_error(cache.grow(stream, MOST + 1), "InvalidArgument", "more than the maximum")?;
    let copy = runtime.zeros::<u32>(4000)?;
    stream.copy(copy.view(), cache.view())?;
    check!(runtime.to_vec(&copy)? == words(0, 4000), "the values that stay");
    Ok(())
}

/// `out[i] = cache[i]`, or all ones beyond the limit.
fn reach(
    stream: &Stream,
    kernel: &KernelBase,
    cache: &Growing<u32>,
    out: &Array<u32>,
) -> leasehold::Result<()> {
    let blocks = (out.len() / TestKernel::BLOCK as usize) as u32;
    let grid = Grid::new([blocks, 1, 1]).threads([TestKernel::BLOCK, 1, 1]);
    let operands = [cache.reservation(Access::Read), cache.limit(), out.write()];
    stream.launch(kernel, &operands, &(), grid).map(drop)
}

/// A graph that was recorded at length 0, against eager launches and the values.
struct Reach {
    runtime: Runtime,
    kernel: KernelBase,
    cache: Growing<u32>,
    out: [Array<u32>; 2],
    graph: leasehold::Graph,
}

impl Reach {
    fn new(env: &Env, runtime: &Runtime, cache: Growing<u32>) -> Outcome<Self> {
        let kernel = TestKernel::base(env.desc(TestKernel::Limited)?)?;
        let out = [runtime.zeros(MOST)?, runtime.zeros(MOST)?];
        let graph = runtime.record_graph(|r| reach(r.stream(), &kernel, &cache, &out[0]))?;
        Ok(Self { runtime: runtime.clone(), kernel, cache, out, graph })
    }

    fn check(&self, what: &str) -> Outcome {
        let stream = self.runtime.stream();
        self.graph.launch()?;
        reach(stream, &self.kernel, &self.cache, &self.out[1])?;
        let [replayed, eager] = [&self.out[0], &self.out[1]].map(|out| self.runtime.to_vec(out));
        let (replayed, len) = (replayed?, self.cache.len());
        check!(replayed == eager?, "{what}: eager and replayed differ");
        check!(replayed[..len] == words(0, len), "{what}: the values of {len}");
        check!(replayed[len..].iter().all(|&v| v == u32::MAX), "{what}: beyond {len}");
        Ok(())
    }

    fn grow(&self, len: usize) -> Outcome {
        let from = self.cache.len();
        self.cache.grow(self.runtime.stream(), len)?;
        if len > from {
            let part = self.cache.slice(from..).view();
            self.runtime.stream().upload(part, &words(from, len))?;
        }
        Ok(())
    }
}

fn graph(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let reach = Reach::new(env, &runtime, Growing::new(&runtime, MOST)?)?;
    reach.check("without memory")?;
    for len in [100, 5000, 1 << 20, MOST] {
        reach.grow(len)?;
        reach.check("after a growth")?;
    }
    reach.cache.shrink(runtime.stream(), 777)?;
    reach.check("after a shrink")?;
    runtime.synchronize()?;
    runtime.allocator().trim(0)?;
    reach.check("after a trim")?;
    reach.grow(1 << 20)?;
    reach.check("after another growth")
}

fn tail(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.create_stream()?;
    let cache = Growing::<u32>::new(&runtime, MOST)?;
    cache.grow(runtime.stream(), MOST)?;
    runtime.stream().upload(cache.view(), &words(0, MOST))?;
    let out = runtime.zeros::<u32>(MOST)?;
    runtime.synchronize()?;
    let hold = env.hold_runtime(&stream)?;
    stream.copy(out.view(), cache.view())?;
    // The copy has not begun. The shrink waits for nothing, and the trim takes nothing from it.
    cache.shrink(&stream, 10)?;
    runtime.allocator().trim(0)?;
    hold.release_late(env)?;
    check!(runtime.to_vec(&out)? == words(0, MOST), "what the copy read");
    check!(runtime.to_vec(cache.as_view())? == words(0, 10), "what stays");
    stream.synchronize()?;
    runtime.allocator().trim(0)?;
    let idle = runtime.allocator().stats().idle_in_growing;
    let granule = runtime.allocator().caps().granule;
    check!(
        idle == 0 || !runtime.raw_device().caps().growing,
        "{idle} bytes stayed after their last use, granules of {granule}"
    );
    Ok(())
}

fn steady(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let stream = runtime.stream();
    let mut calls = 0;
    for round in 0..6 {
        let cache = Growing::<u32>::new(&runtime, MOST)?;
        cache.prepare(1 << 20)?;
        for len in [1000, 1 << 19, 1 << 20] {
            check!(cache.try_grow(stream, len)?, "{len} values are mapped");
        }
        stream.fill(cache.view(), round as u8)?;
        cache.shrink(stream, 5)?;
        drop(cache);
        stream.synchronize()?;
        let now = runtime.allocator().stats().driver_calls;
        check!(round < 2 || now == calls, "round {round} made {} calls", now - calls);
        calls = now;
    }
    Ok(())
}

fn suspended(env: &Env) -> Outcome {
    let runtime = env.runtime()?;
    let pool = match Pool::new(&runtime, "caches", PoolKind::Suspendable) {
        // A device whose memory has no addresses of its own.
        Err(Error::Unsupported(_)) => return Ok(()),
        pool => pool?,
    };
    let reach = Reach::new(env, &runtime, pool.growing(1, MOST)?)?;
    for round in 1..=3 {
        reach.grow(round * 900_000)?;
        pool.suspend(Contents::Keep)?;
        check_eq!(pool.stats().reserved, 0, "bytes of a suspended pool");
        expect_error(reach.graph.launch(), "Suspended", "a launch without the memory")?;
        let growth = reach.cache.grow(runtime.stream(), MOST);
        expect_error(growth, "Suspended", "a growth without the memory")?;
        pool.resume()?;
        reach.check("after a resumption")?;
    }
    Ok(())
}

/// Memory of three granules and a bit with values, on a device whose memory can be forked.
fn forked(env: &Env) -> Outcome<Option<(Runtime, usize, Growing<u32>)>> {
    let runtime = env.runtime()?;
    let granule = runtime.allocator().caps().granule as usize / 4;
    let parent = Growing::<u32>::new(&runtime, 8 * granule)?;
    let len = 3 * granule + 1000;
    parent.grow(runtime.stream(), len)?;
    runtime.stream().upload(parent.view(), &words(0, len))?;
    if runtime.raw_device().caps().forks {
        return Ok(Some((runtime, granule, parent)));
    }
    expect_error(parent.fork(runtime.stream(), len), "Unsupported", "a fork")?;
    check!(runtime.to_vec(parent.as_view())? == words(0, len), "the values after it");
    Ok(None)
}

fn fork(env: &Env) -> Outcome {
    let Some((runtime, granule, parent)) = forked(env)? else { return Ok(()) };
    let (stream, len) = (runtime.stream(), parent.len());
    let other = runtime.create_stream()?;
    let reserved = runtime.allocator().stats().reserved;
    let fork = parent.fork(&other, len)?;
    check!(runtime.to_vec(fork.as_view())? == words(0, len), "the values of a fork");
    let (shared, now) = (fork.shared(), runtime.allocator().stats());
    check!(shared >= granule && shared == parent.shared(), "{shared} values are shared");
    check_eq!(now.shared_in_growing, 4 * shared as u64, "bytes that both have");
    // Its own granules, and the words of its limit, which may have memory of their own.
    let more = 4 * (len - shared).next_multiple_of(granule) as u64 + 16;
    check!(now.reserved <= reserved + more, "{} bytes more", now.reserved - reserved);
    // Each goes on in memory of its own.
    for (growing, word) in [(&parent, 1u32), (&fork, 2)] {
        growing.grow(stream, len + granule)?;
        stream.fill(growing.slice(len..).view(), word)?;
        let refused = stream.fill(growing.slice(shared - 1..).view(), word);
        expect_error(refused, "InvalidArgument", "a write of what is shared")?;
    }
    stream.fill(fork.slice(shared..len).view(), 3u32)?;
    for (growing, old, word) in [(&parent, len, 1), (&fork, shared, 2)] {
        let found = runtime.to_vec(growing.as_view())?;
        check!(found[..old] == words(0, old), "the values before the fork");
        check!(found[len..].iter().all(|&v| v == word), "the values after it");
    }
    Ok(())
}

fn shared(env: &Env) -> Outcome {
    let Some((runtime, granule, parent)) = forked(env)? else { return Ok(()) };
    let stream = runtime.stream();
    let fork = parent.fork(stream, parent.len())?;
    let len = fork.shared();
    fork.shrink(stream, len)?;
    let kernel = TestKernel::base(env.desc(TestKernel::Limited)?)?;
    let out = runtime.zeros::<u32>(len)?;
    let graph = runtime.record_graph(|r| reach(r.stream(), &kernel, &fork, &out))?;
    // The parent goes, and others take all memory that it leaves.
    drop(parent);
    stream.synchronize()?;
    let memory = runtime.allocator();
    let reserved = memory.stats().reserved;
    // There is room for limits, which may have memory of their own, and for no granule.
    memory.set_budget(reserved + 4096);
    let mut others = Vec::new();
    for round in 0..3u32 {
        let other = Growing::<u32>::new(&runtime, 8 * granule)?;
        let grown = (1..=4).map_while(|i| other.grow(stream, i * granule).ok()).count();
        check!(round > 0 || grown > 0, "memory of the parent's own");
        stream.fill(other.view(), round)?;
        others.push(other);
        graph.launch()?;
        check!(runtime.to_vec(&out)? == words(0, len), "round {round}: a graph's values");
        check!(runtime.to_vec(fork.as_view())? == words(0, len), "round {round}: the values");
    }
    drop((others, fork, graph));
    stream.synchronize()?;
    memory.trim(0)?;
    memory.set_budget(u64::MAX);
    let s = memory.stats();
    check_eq!(s.shared_in_growing, 0, "bytes that several have");
    let left = s.reserved + 4 * len as u64;
    check!(left <= reserved, "{} bytes of {reserved} are left after all went", s.reserved);
    Ok(())
}
