//! Matrix products of many rows by cuBLASLt, NVIDIA's library of matrix products.
//!
//! The library is loaded at the first product that it can compute, if the machine has it: its file
//! is large, and most work needs none of its products. A product is a foreign call on the stream:
//! the runtime orders the call by its operands, as it orders a launch. All products of a
//! [`Library`](crate::Library) share one workspace, so products on two streams follow each other.
//! The library's heuristic selects an algorithm once for each shape.
//!
//! Two products of one `x` and one shape that follow each other are one call: a batch of two, whose
//! matrices lie as far apart as their addresses say. It fills the processors better than two calls.
//! The second weight, bias and `y` must all lie behind the first ones, or all before them.
//!
//! Row-major `y[m,n] = x[m,k] · W[n,k]ᵀ` is column-major `yᵀ[n,m] = W · xᵀ`.

use crate::kernels::cpu::elem::DType;
use crate::kernels::cuda::STREAMED;
use crate::operator::Operator;
use crate::ops::Projection;
use crate::part::BufferPart;
use crate::tensor::Tensor;
use cudarc::cublaslt::result::{self as lt, CublasError};
use cudarc::cublaslt::sys;
use leasehold::backend::sync::{Mutex, OnceLock};
use leasehold::kernel::Binding;
use leasehold::{
    Access, Buffer, Error, GraphOperator, Lease, Operand, Result, Runtime, Stream, View,
};
use std::collections::HashMap;
use std::collections::hash_map::Entry;
use std::ffi::c_void;
use std::sync::Arc;

/// Bytes of the workspace: what NVIDIA recommends for its Hopper devices.
const WORKSPACE: u64 = 32 << 20;
/// The fewest rows of a product that the library computes.
const ROWS: u32 = 17;
/// The fewest elements of a matrix that the library multiplies by as many rows as kernels of this
/// crate stream it for, or take it for by tensor maps. Smaller ones are as fast there, and begin
/// early in a graph.
const LARGE: u64 = 1 << 25;
/// Bytes to which matrices and rows are aligned for the library's fast algorithms.
const ALIGN: u64 = 16;
/// Products whose operands lie so many elements apart, or more, are no pair. Kernels describe
/// distances in few bits.
const FAR: i64 = 1 << 31;
/// A name in the environment that keeps the library from being used.
const REFUSAL: &str = "LEASEHOLD_NO_CUBLASLT";

/// The shape of a product, which selects its algorithm.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
struct Shape {
    m: u32,
    n: u32,
    k: u32,
    ldx: u32,
    ldy: u32,
    /// The element type of x and the weights, and that of y.
    types: [DType; 2],
    bias: bool,
    add: bool,
    /// Whether it is a batch of two products of this shape.
    pair: bool,
}

/// Elements from the first to the second weight, bias and `y` of a pair.
type Distances = [i64; 3];

impl Shape {
    /// The distances between the operands of two products, if the second ones lie behind the first
    /// ones, and not too far.
    fn distances(&self, first: &[Binding], second: &[Binding]) -> Option<Distances> {
        let [read, written] = self.types.map(|t| t.bytes() as u64);
        let distance = |i: usize, size: u64| {
            let elements = second[i].addr.checked_sub(first[i].addr)? / size;
            i64::try_from(elements).ok().filter(|&elements| elements < FAR)
        };
        let bias = if self.bias { distance(1, read)? } else { 0 };
        Some([distance(0, read)?, bias, distance(2, written)?])
    }
}

/// The calls for these products: the shape, weight, bias and `y`, and the distances to those of the
/// second product of a pair.
fn calls<'a>(
    shapes: &[Shape],
    products: &'a [Binding],
) -> Vec<(Shape, &'a [Binding], Option<Distances>)> {
    let mut all = Vec::with_capacity(shapes.len());
    let mut left = shapes.iter().zip(products.chunks_exact(3)).peekable();
    while let Some((&shape, one)) = left.next() {
        let other = left.peek().filter(|(other, _)| **other == shape);
        let pair = other.and_then(|&(_, other)| {
            let ahead = shape.distances(one, other).map(|d| (one, d));
            ahead.or_else(|| Some((other, shape.distances(other, one)?)))
        });
        match pair {
            Some((first, distances)) => {
                left.next();
                all.push((Shape { pair: true, ..shape }, first, Some(distances)));
            }
            None => all.push((shape, one, None)),
        }
    }
    all
}

/// Returns whether the library is the faster one for a product of `rows` rows with a matrix of
/// `elements`.
pub(crate) fn is_faster(rows: u32, elements: u64) -> bool {
    rows > STREAMED || (rows >= ROWS && elements >= LARGE)
}

/// Returns whether the kernel of `operator` is faster than the library for products with these
/// weights: one that takes them by tensor maps is, but for large matrices.
pub(crate) fn is_slower(operator: &Operator, to: &[Projection<'_>]) -> bool {
    let is_large = |t: &Tensor| u64::from(t.rows()) * u64::from(t.cols()) >= LARGE;
    operator.has_maps() && !to.iter().any(|p| is_large(p.weight))
}

fn native(dtype: DType) -> sys::cudaDataType {
    match dtype {
        DType::Bf16 => sys::cudaDataType_t::CUDA_R_16BF,
        DType::F16 => sys::cudaDataType_t::CUDA_R_16F,
        DType::F32 => sys::cudaDataType_t::CUDA_R_32F,
    }
}

fn said(what: &'static str) -> impl Fn(CublasError) -> Error {
    move |e| Error::other(format!("cuBLASLt: {what}: {e}"))
}

/// An object of the library, destroyed with this value.
struct Owned<T: Copy>(T, unsafe fn(T) -> std::result::Result<(), CublasError>);

impl<T: Copy> Drop for Owned<T> {
    fn drop(&mut self) {
        // SAFETY: the library made the object for this value, which alone destroys it, with the
        // function for its type.
        let _ = unsafe { self.1(self.0) };
    }
}

type Matrix = Owned<sys::cublasLtMatrixLayout_t>;
type Operation = Owned<sys::cublasLtMatmulDesc_t>;

/// A description of a column-major matrix.
fn matrix(dtype: DType, rows: u32, cols: u32, ld: u32) -> Result<Matrix> {
    lt::create_matrix_layout(native(dtype), rows.into(), cols.into(), ld.into())
        .map(|made| Owned(made, lt::destroy_matrix_layout))
        .map_err(said("a matrix's description"))
}

impl Matrix {
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatrixLayoutAttribute_t,
        value: &T,
    ) -> Result<()> {
        let from = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the description lives, and the value has the size that is given.
        unsafe { lt::set_matrix_layout_attribute(self.0, attribute, from, size_of::<T>()) }
            .map_err(said("an attribute of a matrix"))
    }

    /// Makes it two matrices, whose first elements are so many elements apart.
    fn pair(&self, distance: i64) -> Result<()> {
        use sys::cublasLtMatrixLayoutAttribute_t as Attribute;
        self.set(Attribute::CUBLASLT_MATRIX_LAYOUT_BATCH_COUNT, &2i32)?;
        self.set(Attribute::CUBLASLT_MATRIX_LAYOUT_STRIDED_BATCH_OFFSET, &distance)
    }
}

impl Operation {
    fn set<T: Copy>(
        &self,
        attribute: sys::cublasLtMatmulDescAttributes_t,
        value: &T,
    ) -> Result<()> {
        let from = std::ptr::from_ref(value).cast::<c_void>();
        // SAFETY: the description lives, and the value has the size that is given.
        unsafe { lt::set_matmul_desc_attribute(self.0, attribute, from, size_of::<T>()) }
            .map_err(said("an attribute of a product"))
    }
}

/// A product of one shape with its algorithm.
struct Plan {
    operation: Operation,
    weight: Matrix,
    x: Matrix,
    y: Matrix,
    algorithm: sys::cublasLtMatmulAlgo_t,
}

impl Plan {
    fn new(handle: sys::cublasLtHandle_t, s: Shape) -> Result<Self> {
        use sys::cublasLtMatmulDescAttributes_t as Attribute;
        use sys::cublasLtMatmulPreferenceAttributes_t as Condition;
        let operation = lt::create_matmul_desc(
            sys::cublasComputeType_t::CUBLAS_COMPUTE_32F,
            sys::cudaDataType_t::CUDA_R_32F,
        )
        .map(|made| Owned(made, lt::destroy_matmul_desc))
        .map_err(said("a product's description"))?;
        // CUBLAS_OP_T.
        let transposed = 1i32;
        operation.set(Attribute::CUBLASLT_MATMUL_DESC_TRANSA, &transposed)?;
        if s.bias {
            let epilogue = sys::cublasLtEpilogue_t::CUBLASLT_EPILOGUE_BIAS;
            operation.set(Attribute::CUBLASLT_MATMUL_DESC_EPILOGUE, &epilogue)?;
        }
        let [read, written] = s.types;
        let weight = matrix(read, s.k, s.n, s.k)?;
        let x = matrix(read, s.k, s.m, s.ldx)?;
        let y = matrix(written, s.n, s.m, s.ldy)?;
        if s.pair {
            // As if they were neighbours: the algorithm must not depend on where they lie.
            weight.pair(i64::from(s.n) * i64::from(s.k))?;
            x.pair(0)?;
            y.pair(i64::from(s.m) * i64::from(s.ldy))?;
        }
        let preference = lt::create_matmul_pref()
            .map(|made| Owned(made, lt::destroy_matmul_pref))
            .map_err(said("a search's conditions"))?;
        let (workspace, align) = (WORKSPACE, ALIGN as u32);
        let workspace = ((&raw const workspace).cast::<c_void>(), size_of::<u64>());
        let align = ((&raw const align).cast::<c_void>(), size_of::<u32>());
        for (condition, (value, bytes)) in [
            (Condition::CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, workspace),
            (Condition::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, align),
            (Condition::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, align),
            (Condition::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, align),
            (Condition::CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, align),
        ] {
            // SAFETY: the preference lives, and so does a value of that many bytes.
            unsafe { lt::set_matmul_pref_attribute(preference.0, condition, value, bytes) }
                .map_err(said("a condition of an algorithm"))?;
        }
        // SAFETY: handle, descriptions and preference live.
        let found = unsafe {
            lt::get_matmul_algo_heuristic(
                handle,
                operation.0,
                weight.0,
                x.0,
                y.0,
                y.0,
                preference.0,
            )
        }
        .map_err(said("no algorithm"))?;
        Ok(Self { operation, weight, x, y, algorithm: found.algo })
    }
}

/// The library's handle, and the plans of the shapes that were met.
#[derive(Default)]
struct State {
    handle: Option<sys::cublasLtHandle_t>,
    plans: HashMap<Shape, Plan>,
}

// SAFETY: the library's objects belong to no thread, and the mutex around the state serialises
// their use.
unsafe impl Send for State {}

impl Drop for State {
    fn drop(&mut self) {
        self.plans.clear();
        if let Some(handle) = self.handle.take() {
            // SAFETY: made by `lt::create_handle`, and destroyed here alone.
            let _ = unsafe { lt::destroy_handle(handle) };
        }
    }
}

/// cuBLASLt for one runtime.
pub(crate) struct Gemm {
    workspace: Lease<Buffer>,
    /// Whether the machine has the library, once somebody asked.
    present: OnceLock<bool>,
    state: Mutex<State>,
}

impl Gemm {
    /// The library for a runtime's device, which is not loaded yet; `None` for a device that the
    /// library does not support, and if the environment refuses it.
    pub(crate) fn new(runtime: &Runtime) -> Result<Option<Arc<Self>>> {
        let device = runtime.raw_device();
        let caps = device.caps();
        // Tensor cores that add in f32 and read bf16 came with compute capability 8.0.
        let able = runtime.info().arch.first().is_some_and(|arch| {
            let number = arch.strip_prefix("cuda/sm_").and_then(|n| n.parse::<u32>().ok());
            number.is_some_and(|n| n >= 80)
        });
        if !able || !caps.vendor_libraries || std::env::var_os(REFUSAL).is_some() {
            return Ok(None);
        }
        let workspace = runtime.alloc(WORKSPACE)?.unlisted()?;
        Ok(Some(Arc::new(Self { workspace, present: OnceLock::new(), state: Mutex::default() })))
    }

    /// Returns whether the machine has the library. The first call loads it.
    pub(crate) fn is_present(&self) -> bool {
        // SAFETY: the library's initialisers do not use this program's state.
        *self.present.get_or_init(|| unsafe { sys::is_culib_present() })
    }

    /// The products of `x` and each weight, if the library computes all of them.
    pub(crate) fn products(
        self: &Arc<Self>,
        x: &Tensor,
        to: &[Projection<'_>],
        add: bool,
    ) -> Option<Products> {
        let elements = |t: &Tensor| u64::from(t.rows()) * u64::from(t.cols());
        let faster = to.iter().all(|p| is_faster(x.rows(), elements(p.weight)));
        if !faster || x.dtype() == DType::F32 {
            return None;
        }
        let aligned = |t: &Tensor| {
            let row = u64::from(t.ld()) * t.dtype().bytes() as u64;
            t.view().addr().is_multiple_of(ALIGN) && row.is_multiple_of(ALIGN)
        };
        // The kernel refuses a `y` that shares memory with another operand.
        let range = |t: &Tensor| {
            let from = t.view().addr();
            from..from + t.bytes()
        };
        let read = to.iter().flat_map(|p| [Some(p.weight), p.bias]).flatten().chain([x]);
        let ranges: Vec<_> = read.chain(to.iter().map(|p| p.y)).map(range).collect();
        let written = ranges.len() - to.len();
        let shared = (written..ranges.len()).any(|y| {
            let others = ranges.iter().enumerate().filter(|&(i, _)| i != y);
            others.into_iter().any(|(_, r)| r.start < ranges[y].end && ranges[y].start < r.end)
        });
        if shared {
            return None;
        }
        let all = to
            .iter()
            .map(|p| {
                let half = p.y.dtype() == x.dtype();
                // With sums in f32 the library adds no bias of another type.
                let y = half || (p.y.dtype() == DType::F32 && p.bias.is_none());
                let alike = p.weight.dtype() == x.dtype();
                let bias = p.bias.is_none_or(|b| b.dtype() == x.dtype() && aligned(b));
                let all = [x, p.weight, p.y].iter().all(|t| aligned(t));
                (alike && y && bias && all).then(|| Shape {
                    m: x.rows(),
                    n: p.weight.rows(),
                    k: x.cols(),
                    ldx: x.ld(),
                    ldy: p.y.ld(),
                    types: [x.dtype(), p.y.dtype()],
                    bias: p.bias.is_some(),
                    add,
                    pair: false,
                })
            })
            .collect::<Option<Vec<_>>>()?;
        self.is_present().then(|| Products { gemm: self.clone(), shapes: all.into(), gated: None })
    }

    /// Enqueues products on a native stream: for each shape, a weight, a bias and a `y`.
    ///
    /// # Safety
    /// - `stream` is a stream of the device whose context is current, and the operands lie in its
    ///   memory and have the shapes: `x`, weights and biases may be read, `y` and the workspace
    ///   written by work on the stream.
    unsafe fn enqueue_all(
        &self,
        stream: u64,
        shapes: &[Shape],
        [x, workspace]: [&Binding; 2],
        products: &[Binding],
    ) -> Result<()> {
        // An update of a graph may have brought other buffers.
        if let Some(b) = products.iter().chain([x]).find(|b| !b.addr.is_multiple_of(ALIGN)) {
            return Err(Error::invalid(format!(
                "an operand of a product lies at {:#x}, not aligned to {ALIGN}",
                b.addr
            )));
        }
        for (shape, operands, distances) in calls(shapes, products) {
            let [w, bias, y] = operands else { continue };
            // SAFETY: this function's own conditions. The distances lead to the second operands.
            unsafe { self.enqueue(stream, shape, [x, w, bias, y, workspace], distances) }?;
        }
        Ok(())
    }

    /// Enqueues a product, or a pair of them of which the operands are the first ones.
    ///
    /// # Safety
    /// - As [`enqueue_all`](Self::enqueue_all), also for the operands at the `distances`, which a
    ///   pair has.
    unsafe fn enqueue(
        &self,
        stream: u64,
        shape: Shape,
        [x, w, bias, y, workspace]: [&Binding; 5],
        distances: Option<Distances>,
    ) -> Result<()> {
        let mut state = self.state.lock();
        let handle = match state.handle {
            Some(handle) => handle,
            None => *state.handle.insert(lt::create_handle().map_err(said("its handle"))?),
        };
        let plan = match state.plans.entry(shape) {
            Entry::Occupied(found) => found.into_mut(),
            Entry::Vacant(place) => place.insert(Plan::new(handle, shape)?),
        };
        if shape.bias {
            use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_POINTER;
            plan.operation.set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, &bias.addr)?;
        }
        if let Some([w, bias, y]) = distances {
            use sys::cublasLtMatmulDescAttributes_t::CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE;
            plan.weight.pair(w)?;
            plan.y.pair(y)?;
            if shape.bias {
                plan.operation.set(CUBLASLT_MATMUL_DESC_BIAS_BATCH_STRIDE, &bias)?;
            }
        }
        let (alpha, beta) = (1.0f32, if shape.add { 1.0f32 } else { 0.0 });
        let at = |b: &Binding| b.addr as usize as *mut c_void;
        // SAFETY: handle and descriptions live, the descriptions have the operands' shapes, and the
        // caller vouches for stream and operands.
        unsafe {
            lt::matmul(
                handle,
                plan.operation.0,
                (&raw const alpha).cast(),
                (&raw const beta).cast(),
                at(w),
                plan.weight.0,
                at(x),
                plan.x.0,
                at(y),
                plan.y.0,
                at(y),
                plan.y.0,
                &raw const plan.algorithm,
                at(workspace),
                WORKSPACE as usize,
                stream as usize as sys::cudaStream_t,
            )
        }
        .map_err(said("a product"))
    }
}

/// Products of one `x`, in the place of a kernel of linear layers: the operands are `x`, the norm's
/// weight (which no product has), and then weight, bias and `y` of each product.
pub(crate) struct Products {
    gemm: Arc<Gemm>,
    shapes: Arc<[Shape]>,
    gated: Option<Gated>,
}

/// The rest of a gated layer, whose operands have one `y` behind the others.
struct Gated {
    /// The `y` of the second product.
    up: BufferPart,
    /// Multiplies the first one by it.
    multiply: Box<Operator>,
}

impl Products {
    /// Two products for a gated layer. The second one goes to `up`, by which `multiply` multiplies
    /// the layer's `y`.
    pub(crate) fn gated(self, up: BufferPart, multiply: Operator) -> Self {
        Self { gated: Some(Gated { up, multiply: Box::new(multiply) }), ..self }
    }

    /// The operands of the products beside the kernel's.
    pub(crate) fn own_operands(&self) -> impl Iterator<Item = Operand<'_>> {
        let up = self.gated.as_ref().map(|gated| gated.up.operand(Access::ReadWrite));
        up.into_iter().chain([self.gemm.workspace.read_write()])
    }

    /// Submits the products as one foreign call, and the kernel behind those of a gated layer.
    pub(crate) fn encode(
        &self,
        stream: &Stream,
        name: &'static str,
        operands: &[Operand<'_>],
    ) -> Result<()> {
        let (gemm, shapes) = (self.gemm.clone(), self.shapes.clone());
        let mut all = operands.to_vec();
        if self.gated.is_some()
            && let Some(y) = all.pop()
        {
            // Behind `x`, the norm, and weight and bias of the first product.
            all.insert(4, y);
        }
        all.extend(self.own_operands());
        let call = move |native: u64, bound: &[Binding]| {
            let [x, _, products @ .., workspace] = bound else {
                return Err(Error::state("a product without operands"));
            };
            // SAFETY: the runtime calls this with the device's context current, its native stream,
            // and the operands' addresses. The operator has checked the operands' sizes against
            // these shapes, and declares their accesses.
            unsafe { gemm.enqueue_all(native, &shapes, [x, workspace], products) }
        };
        // SAFETY: the products read and write their operands and the workspace alone, through work
        // on the native stream.
        unsafe { stream.foreign_call(name, &all, call) }?;
        self.gated.as_ref().map_or(Ok(()), |gated| gated.multiply.encode(stream))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SHAPE: Shape = Shape {
        m: 64,
        n: 32,
        k: 16,
        ldx: 16,
        ldy: 32,
        types: [DType::Bf16, DType::Bf16],
        bias: true,
        add: false,
        pair: false,
    };

    /// Whether each call is a pair, its first weight, and the distances.
    fn called(shapes: &[Shape], addresses: &[[u64; 3]]) -> Vec<(bool, u64, Option<Distances>)> {
        let access = Access::Read;
        let binding = |&addr: &u64| Binding { addr, len: 1 << 10, native: 0, access };
        let products: Vec<_> = addresses.iter().flatten().map(binding).collect();
        let calls = calls(shapes, &products);
        calls.iter().map(|(shape, first, d)| (shape.pair, first[0].addr, *d)).collect()
    }

    #[test]
    fn products_of_one_shape_are_a_pair_if_all_second_operands_lie_on_one_side() {
        let [a, b] = [[0x1000, 0x100, 0x9000], [0x1400, 0x140, 0xa000]];
        let pair = (true, 0x1000, Some([0x200, 0x20, 0x800]));
        assert_eq!(called(&[SHAPE; 2], &[a, b]), [pair]);
        assert_eq!(called(&[SHAPE; 2], &[b, a]), [pair]);
        for i in 0..3 {
            let (mut a, mut b) = (a, b);
            std::mem::swap(&mut a[i], &mut b[i]);
            let apart = [(false, a[0], None), (false, b[0], None)];
            assert_eq!(called(&[SHAPE; 2], &[a, b]), apart, "operand {i} lies on the other side");
        }
        let far = [a[0] + 2 * FAR as u64, b[1], b[2]];
        assert_eq!(called(&[SHAPE; 2], &[a, far]).len(), 2);
    }

    #[test]
    fn keys_and_values_are_a_pair_behind_queries() {
        let query = Shape { n: 128, ldy: 128, ..SHAPE };
        let [q, k, v] = [[0, 0, 0], [0x1000, 0x100, 0x9000], [0x1400, 0x140, 0xa000]];
        let calls = called(&[query, SHAPE, SHAPE], &[q, k, v]);
        assert_eq!(calls, [(false, 0, None), (true, 0x1000, Some([0x200, 0x20, 0x800]))]);
        // Of three of one shape, the last one is alone.
        let calls = called(&[SHAPE; 3], &[q, k, v]);
        assert_eq!(calls.iter().map(|c| c.0).collect::<Vec<_>>(), [true, false]);
    }
}
