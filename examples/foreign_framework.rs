//! Somebody else's tensor type on top of the public API: what a framework's author has to write,
//! and no more.
//!
//! `cargo run --release -p leasehold --example foreign_framework`
//!
//! * A [`Tensor`] is a shape and an array. Cloning it is cloning a lease; views share the buffer
//!   and its record of uses.
//! * The device is found through the thread's current context, as frameworks do; nothing is passed
//!   along.
//! * An operation is a [`GraphOperator`]: the same code runs at once or is recorded.
//! * Kernels lie in an extension slot of the runtime, made when first asked for.

use leasehold::Current;
use leasehold::prelude::*;
use std::ops::Add;
use std::sync::Arc;
use std::time::Duration;

// ---- kernels -----------------------------------------------------------------------------------

const TILE: usize = 1024;

/// The part of the output that a tile computes.
fn tile(args: &CpuArgs<'_>, output: usize) -> std::ops::Range<usize> {
    let (_, len) = args.pointer::<f32>(output);
    let from = args.tile()[0] as usize * TILE;
    from..len.min(from + TILE)
}

unsafe fn add(args: &CpuArgs<'_>) {
    let part = tile(args, 2);
    // SAFETY: 0 and 1 are only read; each tile writes its own part of 2.
    let (a, b, c) = unsafe {
        (
            args.slice::<f32>(0),
            args.slice::<f32>(1),
            args.slice_mut::<f32>(2, part.start, part.len()),
        )
    };
    for (i, c) in part.zip(c) {
        *c = a[i] + b[i];
    }
}

unsafe fn scale(args: &CpuArgs<'_>) {
    let part = tile(args, 1);
    // SAFETY: 0 is only read; each tile writes its own part of 1.
    let (a, b) =
        unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, part.start, part.len())) };
    let by: f32 = args.params();
    for (i, b) in part.zip(b) {
        *b = by * a[i];
    }
}

/// The framework's kernels of one device.
struct Kernels {
    add: KernelBase,
    scale: KernelBase,
}

impl Kernels {
    fn of(runtime: &Runtime) -> Result<Arc<Self>> {
        const BINDINGS: [Access; 3] = [Access::Read, Access::Read, Access::Write];
        let desc = |name, function, bindings| {
            let source = KernelSource::Cpu(function);
            KernelDesc::new(name, source, bindings, KernelCheck::grid_1d()).aligned(4)
        };
        let (add, scale) =
            (desc("add", add, &BINDINGS), desc("scale", scale, &BINDINGS[1..]).params_of::<f32>());
        // SAFETY: both touch their bindings through slices, which check bounds, and a tile writes a
        // part of its own.
        let new = |desc| unsafe { KernelBase::new(desc) };
        runtime.extension(|_| Ok(Self { add: new(add)?, scale: new(scale)? }))
    }
}

// ---- operations --------------------------------------------------------------------------------

/// `out = a + b`, or `out = by * a`.
enum Elementwise<'t> {
    Add(&'t Tensor, &'t Tensor, &'t Tensor),
    Scale(&'t Tensor, f32, &'t Tensor),
}

impl GraphOperator for Elementwise<'_> {
    fn name(&self) -> &str {
        match self {
            Self::Add(..) => "add",
            Self::Scale(..) => "scale",
        }
    }

    fn accesses(&self) -> Vec<Operand<'_>> {
        match self {
            Self::Add(a, b, out) => vec![a.read(), b.read(), out.write()],
            Self::Scale(a, _, out) => vec![a.read(), out.write()],
        }
    }

    fn encode(&self, stream: &Stream) -> Result<()> {
        let kernels = Kernels::of(&stream.runtime())?;
        let tiles = |out: &Tensor| out.elements().div_ceil(TILE) as u32;
        match self {
            Self::Add(_, _, out) => stream.launch(&kernels.add, &self.accesses(), &(), tiles(out)),
            Self::Scale(_, by, out) => {
                stream.launch(&kernels.scale, &self.accesses(), by, tiles(out))
            }
        }
    }
}

// ---- the tensor --------------------------------------------------------------------------------

/// A dense tensor of `f32`, or some rows of one.
#[derive(Clone)]
struct Tensor {
    shape: Vec<usize>,
    values: Array<f32>,
    /// Elements before the first one.
    from: usize,
}

impl Tensor {
    /// Uninitialised, for the current context's stream.
    fn empty(shape: &[usize]) -> Result<Self> {
        let values = Current::get()?.runtime().alloc_array(shape.iter().product())?;
        Ok(Self { shape: shape.to_vec(), values, from: 0 })
    }

    fn from_slice(shape: &[usize], values: &[f32]) -> Result<Self> {
        let tensor = Self::empty(shape)?;
        Current::get()?.stream().upload(tensor.view(), values)?;
        Ok(tensor)
    }

    fn full(shape: &[usize], value: f32) -> Result<Self> {
        let tensor = Self::empty(shape)?;
        Current::get()?.stream().fill(tensor.view(), value)?;
        Ok(tensor)
    }

    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    /// Rows `from..to`, without a copy.
    fn rows(&self, from: usize, to: usize) -> Result<Self> {
        let rows = *self.shape.first().ok_or_else(|| Error::invalid("a scalar has no rows"))?;
        if from > to || to > rows {
            return Err(Error::invalid(format!("rows {from}..{to} of {rows}")));
        }
        let mut part = self.clone();
        part.shape[0] = to - from;
        part.from += from * self.shape[1..].iter().product::<usize>();
        Ok(part)
    }

    fn scale(&self, by: f32) -> Result<Self> {
        let out = Self::empty(&self.shape)?;
        run(&Elementwise::Scale(self, by, &out))?;
        Ok(out)
    }

    /// Another shape of the same elements.
    fn reshape(&self, shape: &[usize]) -> Result<Self> {
        if shape.iter().product::<usize>() != self.elements() {
            return Err(Error::invalid(format!(
                "{shape:?} has other elements than {:?}",
                self.shape
            )));
        }
        Ok(Self { shape: shape.to_vec(), ..self.clone() })
    }

    fn copy_from(&self, other: &Tensor) -> Result<()> {
        Current::get()?.stream().copy(self.view(), other.view())
    }

    /// The values; waits for them.
    fn to_vec(&self) -> Result<Vec<f32>> {
        Current::get()?.runtime().to_vec(self.view().values()?)
    }
}

/// With this the runtime's operations take tensors as they take buffers.
impl View for Tensor {
    fn view(&self) -> BufferView<'_> {
        self.values.slice(self.from..self.from + self.elements()).view()
    }
}

impl Add for &Tensor {
    type Output = Result<Tensor>;

    fn add(self, other: &Tensor) -> Result<Tensor> {
        if self.shape != other.shape {
            return Err(Error::invalid(format!("{:?} + {:?}", self.shape, other.shape)));
        }
        let out = Tensor::empty(&self.shape)?;
        run(&Elementwise::Add(self, other, &out))?;
        Ok(out)
    }
}

/// Runs an operation on the current stream, or records it.
fn run(operation: &Elementwise<'_>) -> Result<()> {
    operation.encode(Current::get()?.stream())
}

// ---- a program of the framework's users --------------------------------------------------------

fn main() -> Result<()> {
    let runtime = Runtime::open(DeviceId::cpu(0))?;
    let _current = runtime.enter()?;

    let a = Tensor::from_slice(&[4, 3], &(0..12).map(|i| i as f32).collect::<Vec<_>>())?;
    let b = Tensor::full(&[4, 3], 0.5)?;
    let c = (&a.scale(2.0)? + &b)?;
    assert_eq!(c.to_vec()?, (0..12).map(|i| 2.0 * i as f32 + 0.5).collect::<Vec<_>>());
    assert_eq!(c.rows(1, 3)?.reshape(&[6])?.to_vec()?, [6.5, 8.5, 10.5, 12.5, 14.5, 16.5]);
    println!("eager: {:?}", c.to_vec()?);

    // A mistake is an error of the framework's or of the runtime's, never a crash.
    let text = |mistake: Option<Error>| mistake.map_or_else(String::new, |e| e.to_string());
    println!("mistake: {}", text((&a + &c.rows(0, 1)?).err()));
    println!("mistake: {}", text(a.rows(2, 9).err()));

    // The same program, recorded. Intermediate tensors get memory of the graph's, packed by
    // liveness.
    let out = Tensor::full(&[4, 3], 0.0)?;
    let mut scaling = None;
    let graph = runtime.record_graph(|recording| {
        let _current = recording.enter()?; // where the operations take their stream from
        scaling = recording.stream().next_node();
        let scaled = a.scale(2.0)?;
        out.copy_from(&(&scaled + &b)?)
    })?;
    graph.launch()?;
    println!("a launch of {} operations: {:?}", graph.nodes(), out.to_vec()?);
    assert_eq!(out.to_vec()?, c.to_vec()?);

    // Its buffers and parameters can change without recording again.
    if let Some(node) = scaling {
        let other = Tensor::full(&[4, 3], 100.0)?;
        let updated = graph
            .update(&GraphUpdate::new().buffer(&a.values, &other.values).params(node, &0.25f32))?;
        graph.launch()?;
        println!("updated ({updated:?}): {:?}", out.to_vec()?);
        assert_eq!(out.to_vec()?, [25.5; 12]);
    }
    // Nothing waits for work that is pending when `main` returns; this does.
    runtime.close(Duration::from_secs(10))
}
