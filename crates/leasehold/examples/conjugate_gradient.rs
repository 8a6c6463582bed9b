//! A solver by conjugate gradients as one graph: the device decides when it is through.
//!
//! `cargo run --release -p leasehold --example conjugate_gradient`
//!
//! The further argument is the number of unknowns (1,000). The kernels are the CPU's.

use leasehold::kernel::{CpuFn, Grid, KernelCheck, KernelDesc, KernelSource};
use leasehold::prelude::*;
use std::time::Instant;

/// A row of the matrix is `-1 D -1`.
const D: f32 = 2.01;
/// The solver goes on while the square of the residual is above this.
const ENOUGH: f32 = 1e-6;

/// `q = A p`.
unsafe fn product(args: &CpuArgs<'_>) {
    let n = args.params::<u32>() as usize;
    // SAFETY: the only tile has both bindings, of `n` elements.
    let (p, q) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, 0, n)) };
    let at = |i: usize| p.get(i).copied().unwrap_or(0.0);
    q.iter_mut().enumerate().for_each(|(i, q)| *q = D * at(i) - at(i.wrapping_sub(1)) - at(i + 1));
}

/// A step along `p`: changes `x`, `r` and `p`, and says whether to go on. `state` has the square of
/// the residual.
unsafe fn step(args: &CpuArgs<'_>) {
    let n = args.params::<u32>() as usize;
    // SAFETY: the only tile has all bindings: vectors of `n` elements, and single ones.
    let (q, x, r, p, square, go_on, steps) = unsafe {
        (
            args.slice::<f32>(0),
            args.slice_mut::<f32>(1, 0, n),
            args.slice_mut::<f32>(2, 0, n),
            args.slice_mut::<f32>(3, 0, n),
            args.slice_mut::<f32>(4, 0, 1),
            args.slice_mut::<u32>(5, 0, 1),
            args.slice_mut::<u32>(6, 0, 1),
        )
    };
    let dot = |a: &[f32], b: &[f32]| std::iter::zip(a, b).map(|(a, b)| a * b).sum::<f32>();
    let along = square[0] / dot(p, q);
    for i in 0..n {
        x[i] += along * p[i];
        r[i] -= along * q[i];
    }
    let now = dot(r, r);
    let turn = now / square[0];
    std::iter::zip(p, r).for_each(|(p, r)| *p = *r + turn * *p);
    (square[0], go_on[0], steps[0]) = (now, u32::from(now > ENOUGH), steps[0] + 1);
}

/// A kernel of one tile, whose bindings are vectors but for the last `single` ones.
fn kernel(name: &'static str, run: CpuFn, access: &[Access], single: usize) -> Result<KernelBase> {
    let vectors = access.len() - single;
    let check = KernelCheck::new(move |launch| {
        if (launch.grid, launch.block) != ([1; 3], [1; 3]) {
            return Err(Error::invalid("one block of one thread"));
        }
        let bytes = 4 * u64::from(launch.params::<u32>()?);
        (0..launch.bindings()).try_for_each(|i| launch.want(i, if i < vectors { bytes } else { 4 }))
    });
    let desc = KernelDesc::new(name, KernelSource::Cpu(run), access, check);
    // SAFETY: a launch that the check accepts has one tile, and bindings of the kernel's lengths.
    unsafe { KernelBase::new(desc.aligned(4).params_of::<u32>()) }
}

/// The system, and the solver's state.
struct Solver {
    product: KernelBase,
    step: KernelBase,
    n: u32,
    x: Array<f32>,
    r: Array<f32>,
    p: Array<f32>,
    square: Array<f32>,
    go_on: Array<u32>,
    steps: Array<u32>,
}

impl Solver {
    fn new(runtime: &Runtime, n: u32) -> Result<Self> {
        use Access::{Read, ReadWrite, Write};
        let changes = [Read, ReadWrite, ReadWrite, ReadWrite, ReadWrite, Write, ReadWrite];
        let len = n as usize;
        Ok(Self {
            product: kernel("product", product, &[Read, Write], 0)?,
            step: kernel("step", step, &changes, 3)?,
            n,
            x: runtime.zeros(len)?,
            r: runtime.zeros(len)?,
            p: runtime.zeros(len)?,
            square: runtime.zeros(1)?,
            go_on: runtime.zeros(1)?,
            steps: runtime.zeros(1)?,
        })
    }

    /// Begins with the right side, at `x = 0`.
    fn begin(&self, stream: &Stream, right: &[f32]) -> Result<()> {
        stream.fill(self.x.view(), 0u32)?;
        stream.upload(self.r.view(), right)?;
        stream.copy(self.p.view(), self.r.view())?;
        let square: f32 = right.iter().map(|v| v * v).sum();
        stream.upload(self.square.view(), &[square])?;
        stream.fill(self.steps.view(), 0u32)?;
        stream.fill(self.go_on.view(), u32::from(square > ENOUGH))
    }

    /// The loop: the same call, eager and recorded.
    fn solve(&self, stream: &Stream) -> Result<()> {
        stream.record_while(&self.go_on, |body| {
            let (on, one) = (body.stream(), || Grid::new([1; 3]).threads([1; 3]));
            let q = body.alloc_array::<f32>(self.n as usize)?; // the graph's temporary
            on.launch(&self.product, &[self.p.read(), q.write()], &self.n, one())?;
            let operands = [
                q.read(),
                self.x.read_write(),
                self.r.read_write(),
                self.p.read_write(),
                self.square.read_write(),
                self.go_on.write(),
                self.steps.read_write(),
            ];
            on.launch(&self.step, &operands, &self.n, one()).map(drop)
        })
    }
}

fn main() -> Result<()> {
    let n = std::env::args().nth(1).map_or(Ok(1_000), |n| n.parse::<u32>());
    let n = n.map_err(|e| Error::invalid(format!("the number of unknowns: {e}")))?.max(1);
    let runtime = Runtime::open(DeviceId::cpu(0))?;
    let stream = runtime.stream();
    let solver = Solver::new(&runtime, n)?;
    let graph = runtime.record_graph(|r| solver.solve(r.stream()))?;
    let right: Vec<f32> = (0..n).map(|i| (i % 7) as f32 - 3.0).collect();

    let mut solutions = Vec::new();
    for replayed in [false, true] {
        solver.begin(stream, &right)?;
        runtime.synchronize()?;
        let begun = Instant::now();
        match replayed {
            true => drop(graph.launch()?), // one submission
            false => solver.solve(stream)?,
        }
        runtime.synchronize()?;
        let time = begun.elapsed();
        let (steps, square) = (runtime.to_vec(&solver.steps)?, runtime.to_vec(&solver.square)?);
        println!(
            "{}: {} steps, residual {:.1e}, {time:.1?}",
            if replayed { "graph" } else { "eager" },
            steps[0],
            square[0].sqrt()
        );
        solutions.push(runtime.to_vec(&solver.x)?);
    }
    let bits = |x: &[f32]| x.iter().map(|v| v.to_bits()).collect::<Vec<_>>();
    if bits(&solutions[0]) != bits(&solutions[1]) {
        return Err(Error::state("the graph and the host's loop differ"));
    }
    Ok(())
}
