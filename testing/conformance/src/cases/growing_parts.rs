//! Cases of parts that grow side by side, over a runtime. One launch reaches all of them, each up
//! to its own limit.

use crate::case::{Case, Need, Outcome, check, check_eq, expect_error, failed};
use crate::env::Env;
use crate::factory::TestKernel;
use leasehold::kernel::Grid;
use leasehold::{Access, Array, Error, Graph, Growing, KernelBase, Runtime, Stream, View};
use std::ops::Range;

const NEEDS: &[Need] = &[Need::Graphs, Need::Kernel(TestKernel::Parts)];

pub(crate) const CASES: &[Case] = &[
    Case::runtime(232, "parts grow alone and keep address and bytes", NEEDS, alone),
    Case::runtime(233, "a graph of all parts is right after 1,000 growths", NEEDS, graph),
    Case::runtime(234, "a growth of parts that is refused changes nothing", NEEDS, refused),
    Case::runtime(235, "a part that was shrunk grows anew", NEEDS, anew),
];

const COUNT: usize = 4;
/// Granules of a part.
const GRANULES: usize = 3;
/// Places of a part that a launch looks at.
const LOOKS: usize = 192;
/// Added to the number of a place.
const STAMP: u32 = 0x5EED_0000;

/// Parts, what they must have, and a graph of all of them from the time without memory.
struct Parts {
    runtime: Runtime,
    parts: Growing<u8>,
    kernel: KernelBase,
    /// The findings of a replay and of an eager launch.
    out: [Array<u32>; 2],
    graph: Graph,
    addr: u64,
    /// Of each part: the bytes that have stayed since they were stamped.
    stamped: [usize; COUNT],
}

/// Elements of `u32` from a place that a launch looks at to the next.
fn step(parts: &Growing<u8>) -> u32 {
    (parts.most() / 4) as u32 / LOOKS as u32
}

/// Looks at the places of all parts, after it has stamped them.
fn look(
    stream: &Stream,
    kernel: &KernelBase,
    parts: &Growing<u8>,
    out: &Array<u32>,
    stamp: u32,
) -> leasehold::Result<()> {
    let blocks = (out.len() / TestKernel::BLOCK as usize) as u32;
    let grid = Grid::new([blocks, 1, 1]).threads([TestKernel::BLOCK, 1, 1]);
    let operands = [parts.reservation(Access::ReadWrite), parts.limit(), out.write()];
    let params = [(parts.most() / 4) as u32, step(parts), stamp];
    stream.launch(kernel, &operands, &params, grid).map(drop)
}

impl Parts {
    /// `None` on a device whose memory does not grow, which says so.
    fn new(env: &Env) -> Outcome<Option<Self>> {
        let runtime = env.runtime()?;
        let most = GRANULES * runtime.allocator().caps().granule.max(1 << 16) as usize;
        let parts = Growing::<u8>::with_parts(&runtime, COUNT, most);
        if !runtime.raw_device().caps().growing {
            expect_error(parts, "Unsupported", "parts without virtual memory")?;
            return Ok(None);
        }
        let parts = parts?;
        check_eq!((parts.count(), parts.committed()), (COUNT, 0), "of new parts");
        let kernel = TestKernel::base(env.desc(TestKernel::Parts)?)?;
        let out = [runtime.zeros(COUNT * LOOKS)?, runtime.zeros(COUNT * LOOKS)?];
        let graph = runtime.record_graph(|r| look(r.stream(), &kernel, &parts, &out[0], 0))?;
        let addr = parts.reservation(Access::Read).view().addr();
        let stamped = [0; COUNT];
        let parts = Self { runtime, parts, kernel, out, graph, addr, stamped };
        parts.check("without memory")?;
        Ok(Some(parts))
    }

    fn stream(&self) -> &Stream {
        self.runtime.stream()
    }

    fn lengths(&self) -> [usize; COUNT] {
        std::array::from_fn(|part| self.parts.parts(part..part + 1).len())
    }

    /// A replay and an eager launch find the stamps, and nothing beyond the ends.
    fn check(&self, what: &str) -> Outcome {
        self.graph.launch()?;
        look(self.stream(), &self.kernel, &self.parts, &self.out[1], 0)?;
        let addr = self.parts.reservation(Access::Read).view().addr();
        check_eq!(addr, self.addr, "{what}: the address");
        for (out, by) in self.out.iter().zip(["replayed", "eager"]) {
            for (i, &found) in self.runtime.to_vec(out)?.iter().enumerate() {
                let (part, look) = (i / LOOKS, i % LOOKS);
                let end = 4 * (look * step(&self.parts) as usize + 1);
                let len = self.parts.parts(part..part + 1).len();
                let wanted = match end {
                    end if end > len => Some(u32::MAX),
                    end if end <= self.stamped[part] => Some(STAMP + i as u32),
                    // Nobody has written here yet.
                    _ => None,
                };
                let at = end - 4;
                check!(
                    wanted.is_none_or(|wanted| found == wanted),
                    "{what}, {by}: byte {at} of part {part} of {len} is {found:#x}, not {wanted:x?}"
                );
            }
        }
        Ok(())
    }

    /// Grows parts and stamps all that there is.
    fn grow(&mut self, parts: Range<usize>, bytes: usize) -> Outcome {
        self.parts.parts(parts.clone()).grow(self.stream(), bytes)?;
        check!(
            parts.clone().all(|part| self.parts.parts(part..part + 1).len() >= bytes),
            "lengths of {parts:?}"
        );
        self.check("before the new memory is written")?;
        look(self.stream(), &self.kernel, &self.parts, &self.out[1], STAMP)?;
        self.stamped = self.lengths();
        Ok(())
    }

    fn shrink(&mut self, parts: Range<usize>, bytes: usize) -> Outcome {
        self.parts.parts(parts.clone()).shrink(self.stream(), bytes)?;
        check!(
            parts.clone().all(|part| self.parts.parts(part..part + 1).len() <= bytes),
            "lengths of {parts:?}"
        );
        self.stamped = std::array::from_fn(|part| {
            self.stamped[part].min(self.parts.parts(part..part + 1).len())
        });
        Ok(())
    }

    /// Gives memory that nobody needs to the driver, and has other memory in its place.
    fn stir(&self) -> Outcome {
        self.runtime.synchronize()?;
        self.runtime.allocator().trim(0)?;
        let other = self.runtime.alloc((self.parts.most() / GRANULES) as u64)?;
        Ok(self.stream().fill(other.view(), 0xEEu8)?)
    }
}

fn alone(env: &Env) -> Outcome {
    let Some(mut parts) = Parts::new(env)? else { return Ok(()) };
    let most = parts.parts.most();
    for (part, bytes) in [(2, 4), (0, most), (2, most / 3 + 4), (3, most - 4), (2, most), (1, 64)] {
        let mut wanted = parts.lengths();
        wanted[part] = bytes;
        parts.grow(part..part + 1, bytes)?;
        check_eq!(parts.lengths(), wanted, "lengths after a growth of part {part}");
        check_eq!(
            parts.parts.committed() as usize,
            wanted.iter().sum::<usize>(),
            "the bytes of all"
        );
        parts.check("after a growth")?;
        parts.stir()?;
        parts.check("after other memory came")?;
    }
    let whole = parts.parts.reservation(Access::ReadWrite).view();
    expect_error(parts.stream().fill(whole, 0u8), "InvalidArgument", "a fill of all parts")?;
    let limits = parts.parts.limit().view();
    expect_error(parts.stream().fill(limits, 0xFFu8), "InvalidArgument", "a fill of the limits")?;
    parts.check("after what was refused")
}

/// Numbers in no order, always the same.
fn numbers() -> impl FnMut(usize) -> usize {
    let mut state = 7u64;
    move |below| {
        state =
            state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (state >> 33) as usize % below
    }
}

fn graph(env: &Env) -> Outcome {
    let Some(mut parts) = Parts::new(env)? else { return Ok(()) };
    let (most, mut number) = (parts.parts.most(), numbers());
    for round in 0..1000 {
        let from = number(COUNT);
        let to = from + 1 + number(COUNT - from);
        let longest = parts.lengths()[from..to].iter().copied().max().unwrap_or(0);
        // Four bytes more at least.
        if longest + 4 > most {
            parts.shrink(from..to, 4 * number(most / 8))?;
            parts.check("after a shrink")?;
        }
        let bytes = 4 * (longest.min(parts.lengths()[from]) / 4 + 1 + number(most / 16));
        parts.grow(from..to, bytes.min(most))?;
        if round % 3 == 0 {
            let part = number(COUNT);
            parts.shrink(part..COUNT, 4 * number(most / 4))?;
        }
        if round % 41 == 0 {
            parts.stir()?;
        }
    }
    parts.check("at the end")
}

fn refused(env: &Env) -> Outcome {
    let Some(mut parts) = Parts::new(env)? else { return Ok(()) };
    let (runtime, most) = (parts.runtime.clone(), parts.parts.most());
    let (memory, granule) = (runtime.allocator(), most / GRANULES);
    parts.grow(0..2, granule)?;
    parts.grow(3..4, 2 * granule - 4)?;
    let wanted = parts.lengths();
    let same = |what: &str| {
        check_eq!(parts.lengths(), wanted, "lengths after {what}");
        parts.check(what)
    };
    let invalid = |grown, what| expect_error(grown, "InvalidArgument", what).map(drop);
    let (stream, all) = (parts.stream(), &parts.parts);
    invalid(all.parts(1..3).grow(stream, most + 1), "more than the maximum")?;
    invalid(all.parts(COUNT - 1..COUNT + 1).grow(stream, 4), "a part that there is not")?;
    invalid(all.parts(0..1).prepare(most + 1), "more than the maximum, ahead")?;
    same("a growth beyond the maximum")?;

    runtime.synchronize()?;
    memory.trim(0)?;
    memory.set_budget(memory.stats().reserved + 3 * granule as u64);
    let beyond = all.parts(0..COUNT).grow(stream, most);
    memory.set_budget(u64::MAX);
    let Err(e) = beyond else { return failed("a growth beyond the budget worked") };
    let expected = e.is_out_of_memory() || matches!(e, Error::OverBudget { .. });
    check!(expected, "a growth beyond the budget: {e}");
    same("a growth beyond the budget")?;

    let recorded = runtime.record_graph(|r| {
        let calls = [all.parts(0..1).grow(r.stream(), most), all.parts(0..1).shrink(r.stream(), 0)];
        match calls {
            [Err(Error::Recording { .. }), Err(Error::Recording { .. })] => Ok(()),
            calls => Err(Error::invalid(format!("calls in a recording: {calls:?}"))),
        }
    });
    recorded?;
    same("calls in a recording")?;

    // Threads take turns, and what all of them leave alone stays.
    let kept = granule / 2;
    std::thread::scope(|s| {
        let threads: Vec<_> = [0..3, 1..COUNT]
            .map(|range| {
                let (runtime, all) = (&runtime, all);
                s.spawn(move || -> leasehold::Result<()> {
                    let (stream, mut number) = (runtime.create_stream()?, numbers());
                    for _ in 0..40 {
                        let bytes = kept + 4 * number((most - kept) / 4);
                        match all.parts(range.clone()).grow(&stream, bytes) {
                            Ok(()) | Err(Error::Occupied { .. }) => {}
                            Err(e) => return Err(e),
                        }
                        all.parts(range.clone()).shrink(&stream, kept + number(granule))?;
                        runtime.allocator().trim(0)?;
                    }
                    stream.synchronize()
                })
            })
            .into();
        for _ in 0..40 {
            parts.graph.launch()?;
        }
        threads.into_iter().try_for_each(|thread| match thread.join() {
            Ok(ended) => ended,
            Err(_) => Err(Error::state("a thread panicked")),
        })
    })?;
    runtime.synchronize()?;
    parts.stamped = parts.stamped.map(|bytes| bytes.min(kept));
    parts.check("after growths of two threads")
}

fn anew(env: &Env) -> Outcome {
    let Some(mut parts) = Parts::new(env)? else { return Ok(()) };
    let most = parts.parts.most();
    parts.grow(0..COUNT, most - 400)?;
    for (round, left) in [0, 4, most / 2, 0].into_iter().enumerate() {
        parts.shrink(1..3, left)?;
        parts.check("after a shrink")?;
        if round % 2 == 0 {
            parts.stir()?;
            parts.check("after other memory came")?;
        }
        for bytes in [left + 4, most / 2 + 8, most] {
            parts.grow(1..2, bytes)?;
        }
        check_eq!(parts.lengths()[1..3], [most, left], "lengths of a part and of the next one");
        parts.grow(2..3, most - 4)?;
        parts.check("after growths anew")?;
    }
    check!(parts.lengths()[0] == most - 400, "a part that nobody changed");
    parts.parts.parts(0..COUNT).shrink(parts.stream(), 0)?;
    parts.stamped = [0; COUNT];
    check_eq!(parts.parts.committed(), 0, "bytes of empty parts");
    parts.stir()?;
    parts.check("without memory again")
}
