//! No launch accesses memory beyond its operands. Random parameters, most of them near valid ones
//! and some far from them, are either refused or computed within the operands' memory. An access
//! outside hits an inaccessible page, which ends the process, or bytes that are compared.

mod guarded;
mod words;

use crate::kernels::{Level, levels};
use guarded::Guarded;
use leasehold::graph::NodeId;
use leasehold::kernel::Binding;
use leasehold::kernel::LaunchInfo;
use leasehold::{Buffer, Context, DeviceId, Error, GraphUpdate, Lease, Operand, Runtime, View};
use leasehold_operators::Library;
use leasehold_operators::kernels::cpu::KERNELS;
use leasehold_operators::kernels::cpu::tile::KernelSpec;
use words::{Words, params};

/// Launches that need more bytes are checked but not run.
const MOST: u64 = 1 << 19;

/// The numbers of a kernel's executed and refused launches.
#[derive(Default)]
struct Tally {
    run: u32,
    refused: u32,
}

/// Runs one launch of `spec` in guarded memory, if the kernel accepts its parameters.
fn guarded(level: Level, spec: &KernelSpec, words: &mut Words, tally: &mut Tally) {
    let params = params(spec.name, words);
    let Ok(launch) = spec.plan(&params) else {
        tally.refused += 1;
        return;
    };
    let sizes = &launch.bytes[..spec.operands.len()];
    // With one byte less than required, for any operand, the launch is refused.
    for (i, &bytes) in sizes.iter().enumerate().filter(|(_, b)| **b > 0) {
        let at = |j: usize| (j as u64 + 1) << 48;
        let bound: Vec<Binding> = sizes
            .iter()
            .enumerate()
            .map(|(j, &len)| Binding {
                addr: at(j),
                len,
                native: 0,
                access: spec.operands[j].access,
            })
            .collect();
        let fits = |bindings: &[Binding]| {
            spec.check_bound(&launch, &LaunchInfo::new((launch.grid, [1; 3], 0), &params, bindings))
        };
        let mut short = bound.clone();
        short[i].len = bytes - 1;
        fits(&short).expect_err("an operand that is a byte too short");
        if sizes.iter().any(|&b| b >= 1 << 47) {
            continue;
        }
        fits(&bound).unwrap_or_else(|why| panic!("{why}"));
        let mut odd = bound.clone();
        odd[i].addr += 1;
        assert_eq!(
            fits(&odd).is_err(),
            launch.align[i] > 1,
            "{}: operand {i} at an odd address",
            spec.name
        );
        for j in (0..bound.len()).filter(|&j| j != i && sizes[j] > 0) {
            let mut over = bound.clone();
            over[j].addr = over[i].addr + u64::from(launch.align[i].max(launch.align[j]));
            let meet = over[j].overlaps(&over[i]);
            let written = spec.operands[i].access.writes() || spec.operands[j].access.writes();
            assert_eq!(
                fits(&over).is_err(),
                meet && written,
                "{}: operands {i} and {j} overlap",
                spec.name
            );
        }
    }
    let bytes = sizes.iter().fold(0, |all: u64, &b| all.saturating_add(b));
    let tiles = launch.grid.iter().fold(1, |all: u64, &g| all.saturating_mul(g.into()));
    if bytes > MOST || tiles > 1 << 14 {
        return;
    }
    let mut memory: Vec<Guarded> =
        sizes.iter().map(|&b| Guarded::new(b as usize, words.coin())).collect();
    for m in &mut memory {
        words.fill(m.bytes_mut());
    }
    let before: Vec<Vec<u8>> = memory.iter().map(|m| m.bytes().to_vec()).collect();
    let bindings: Vec<Binding> =
        std::iter::zip(&memory, spec.operands).map(|(m, o)| m.binding(o.access)).collect();
    match level {
        Level::Cpu(isa) => {
            // SAFETY: the memory is mapped, and exclusively this test's.
            unsafe { spec.run(Some(isa), &params, &bindings) }.expect("operands that it takes");
        }
        device => {
            if device.emulate(spec.name, &params, &bindings, words.coin()) == Some(false) {
                tally.refused += 1;
                return;
            }
        }
    }
    for (i, m) in memory.iter().enumerate().filter(|(i, _)| !spec.operands[*i].access.writes()) {
        assert!(
            m.bytes() == before[i],
            "{} wrote operand {}, which it reads",
            spec.name,
            spec.operands[i].name
        );
    }
    tally.run += 1;
}

fn cases(level: Level) -> u32 {
    if matches!(level, Level::Cpu(_)) { 120 } else { 24 }
}

#[test]
fn a_launch_that_is_taken_touches_its_operands_alone() {
    for level in levels() {
        for (k, spec) in KERNELS.iter().enumerate() {
            let (mut words, mut tally) = (Words::new(k as u64 + 1), Tally::default());
            (0..cases(level)).for_each(|_| guarded(level, spec, &mut words, &mut tally));
            let Tally { run, refused } = tally;
            assert!(
                run >= cases(level) / 5,
                "{} at {level}: only {run} launches were run, {refused} refused",
                spec.name
            );
            // This kernel accepts any ring and any step, and few of these launches have no rows.
            let some = refused > 0 || spec.name == "advance";
            assert!(some, "{} at {level}: nothing was refused", spec.name);
        }
    }
}

/// A buffer whose parts are operands, with bytes between them that no kernel may write.
struct Ground {
    runtime: Runtime,
    buffer: Lease<Buffer>,
    bytes: Vec<u8>,
}

const PART: u64 = 4096;
const GAP: u64 = 256;

impl Ground {
    fn new(runtime: Runtime, words: &mut Words, parts: usize) -> Self {
        let mut bytes = vec![0; parts * (PART + GAP) as usize];
        words.fill(&mut bytes);
        let buffer = runtime.upload(&bytes).expect("a buffer").into_buffer();
        Self { runtime, buffer, bytes }
    }

    /// Operands of random lengths; some overlap their neighbour or begin at an odd byte.
    fn operands(&self, spec: &KernelSpec, words: &mut Words) -> Vec<Operand<'_>> {
        let part = |(i, o): (usize, &leasehold_operators::kernels::cpu::tile::Operand)| {
            let at = i as u64 * (PART + GAP)
                + if words.below(8) == 0 { u64::from(words.below(16)) } else { 0 };
            let len = if words.below(12) == 0 {
                PART + 2 * GAP
            } else {
                u64::from(words.below(PART as u32 / 4)) * 4
            };
            let len = len.min(self.buffer.len() - at);
            self.buffer.view().narrowed(at, len).with(o.access)
        };
        spec.operands.iter().enumerate().map(part).collect()
    }

    /// Compares all bytes except those of written operands.
    fn compare(&mut self, name: &str, operands: &[(u64, u64, bool)]) {
        let now: Vec<u8> = self.runtime.to_vec(&self.buffer).expect("the bytes");
        for (i, (now, was)) in std::iter::zip(&now, &self.bytes).enumerate() {
            let own = operands
                .iter()
                .any(|&(at, len, writes)| writes && (at..at + len).contains(&(i as u64)));
            assert!(own || now == was, "{name} wrote byte {i}, which is none of {operands:?}");
        }
        self.bytes = now;
    }
}

/// Checks that a refusal is an `InvalidArgument`, which leaves the stream unchanged.
fn taken<T>(result: Result<T, Error>) -> bool {
    match result {
        Ok(_) => true,
        Err(e) => {
            assert_eq!(e.kind(), "InvalidArgument", "{e}");
            false
        }
    }
}

#[test]
fn a_kernel_of_the_library_may_be_launched_and_updated_with_anything() {
    let runtime = Context::new().runtime(DeviceId::cpu(0)).expect("the CPU");
    let library = Library::of(&runtime).expect("the library");
    for (k, spec) in KERNELS.iter().enumerate() {
        let mut words = Words::new(1000 + k as u64);
        let kernel = library.kernel(spec.name).expect("the kernel");
        let mut ground = Ground::new(runtime.clone(), &mut words, spec.operands.len());
        let (mut launched, mut updated) = (0, 0);
        for _ in 0..150 {
            let old = params(spec.name, &mut words);
            let grid = |params: &[u8], words: &mut Words| match kernel.plan(params) {
                Ok((_, geometry)) if words.below(8) != 0 => geometry.blocks,
                _ => [words.below(4) + 1, words.below(2) + 1, 1],
            };
            let shape = grid(&old, &mut words);
            let operands = ground.operands(spec, &mut words);
            let written: Vec<_> = operands
                .iter()
                .map(|o| (o.view().offset(), o.view().len(), o.access().writes()))
                .collect();
            let launch = |runtime: &Runtime| {
                runtime.stream().launch(kernel.base(), &operands, &old[..], shape)
            };
            let graph = if words.coin() {
                let recorded = runtime.record_graph(|rt| launch(rt));
                taken(recorded.as_ref().map_err(Clone::clone)).then(|| recorded.expect("a graph"))
            } else {
                launched += u32::from(taken(launch(&runtime)));
                None
            };
            if let Some(graph) = graph {
                let new = params(spec.name, &mut words);
                let mut update = GraphUpdate::new().grid(NodeId::new(0), grid(&new, &mut words));
                update = update.params_bytes(NodeId::new(0), &new);
                updated += u32::from(taken(graph.update(&update)));
                graph.launch().expect("a launch of what was accepted");
            }
            ground.compare(spec.name, &written);
        }
        runtime.stream().synchronize().expect("a stream that nothing poisoned");
        assert!(launched + updated > 0, "{}: nothing was accepted", spec.name);
    }
}
