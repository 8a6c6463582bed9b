//! Constructors of operators: shapes in, checked launches out.
//!
//! Each constructor documents the computation and its operands; the accesses are the kernels' own
//! declarations. Rows of `x` are rows of the batch (tokens). Weights are stored as [out, in], as in
//! Hugging Face files.

pub use crate::cache::Cache;
use crate::kernels::cpu::attention::{AttentionParams, QUERIES};
use crate::kernels::cpu::cache::CacheLayout;
use crate::kernels::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use crate::kernels::cpu::embedding::EmbeddingParams;
use crate::kernels::cpu::linear::{BIAS, FEW, LinearParams, NORM};
use crate::kernels::cpu::norm::NormParams;
use crate::kernels::cpu::rope::RopeParams;
use crate::kernels::cpu::sampling::{AdvanceParams, NextTokenParams, RowParams};
use crate::library::Library;
use crate::operator::Operator;
use crate::part::BufferPart;
use crate::tensor::{DType, Tensor};
use leasehold::{Error, Result, Runtime, View};

/// The maximum number of rows that a product can normalise itself, on every device.
pub const NORM_ROWS: u32 = FEW as u32;
/// The maximum number of query heads for each key and value head in [`decode_attention`], on every
/// device.
pub const DECODE_GROUP: u32 = QUERIES as u32;

fn some(t: &Tensor) -> Option<BufferPart> {
    Some(t.into())
}

fn part(part: &BufferPart) -> Option<BufferPart> {
    Some(part.clone())
}

fn check(ok: bool, what: impl FnOnce() -> String) -> Result<()> {
    if ok { Ok(()) } else { Err(Error::invalid(what())) }
}

fn shape(t: &Tensor) -> String {
    format!("{}×{} {}", t.rows(), t.cols(), t.dtype().name())
}

/// `y[i] = table[ids[i]]`; ids are i32. An id outside the table gives a row of NaN.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn embedding(
    library: &Library,
    ids: &BufferPart,
    table: &Tensor,
    y: &Tensor,
) -> Result<Operator> {
    check(table.cols() == y.cols(), || {
        format!("embedding: table {}, y {}; give both as many columns", shape(table), shape(y))
    })?;
    let params = EmbeddingParams {
        m: y.rows(),
        vocabulary: table.rows(),
        k: table.cols(),
        ldy: y.ld(),
        table: table.dtype() as u32,
        y: y.dtype() as u32,
    };
    Operator::new(library, "embedding", &params, &[part(ids), some(table), some(y)])
}

/// `y = x / sqrt(mean(x²) + eps) · weight`, row by row.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn rms_norm(
    library: &Library,
    x: &Tensor,
    weight: &Tensor,
    eps: f32,
    y: &Tensor,
) -> Result<Operator> {
    check(
        x.cols() == y.cols()
            && x.rows() == y.rows()
            && weight.cols() == x.cols()
            && x.dtype() == y.dtype(),
        || {
            format!(
                "rms_norm: x {}, weight {}, y {}; give x and y one shape and type, and weight as many columns",
                shape(x),
                shape(weight),
                shape(y)
            )
        },
    )?;
    let params = norm_params(x, weight, eps, y);
    Operator::new(library, "rms_norm", &params, &[some(x), some(weight), some(y)])
}

/// `h += delta`, then `y = rms_norm(h)`.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn add_rms_norm(
    library: &Library,
    h: &Tensor,
    delta: &Tensor,
    weight: &Tensor,
    eps: f32,
    y: &Tensor,
) -> Result<Operator> {
    let alike = |a: &Tensor| a.rows() == h.rows() && a.cols() == h.cols() && a.dtype() == h.dtype();
    check(alike(delta) && alike(y) && delta.ld() == h.ld() && weight.cols() == h.cols(), || {
        format!(
            "add_rms_norm: h {}, delta {}, weight {}, y {}; give h, delta and y one shape and type, h and delta one distance of rows, and the weight as many columns",
            shape(h),
            shape(delta),
            shape(weight),
            shape(y)
        )
    })?;
    let params = norm_params(h, weight, eps, y);
    Operator::new(library, "add_rms_norm", &params, &[some(h), some(delta), some(weight), some(y)])
}

fn norm_params(x: &Tensor, weight: &Tensor, eps: f32, y: &Tensor) -> NormParams {
    NormParams {
        rows: x.rows(),
        k: x.cols(),
        ldx: x.ld(),
        ldy: y.ld(),
        eps,
        x: x.dtype() as u32,
        weight: weight.dtype() as u32,
    }
}

/// A weight matrix with its bias, and the destination of its product.
#[derive(Debug, Clone, Copy)]
pub struct Projection<'a> {
    /// Weights, [out, in].
    pub weight: &'a Tensor,
    /// One element per output, of the norm's type.
    pub bias: Option<&'a Tensor>,
    /// The product, a row per row of `x`.
    pub y: &'a Tensor,
}

/// A normalisation that a product applies to its input.
#[derive(Debug, Clone, Copy)]
pub struct Norm<'a> {
    /// One element per column.
    pub weight: &'a Tensor,
    /// Added to the mean square.
    pub eps: f32,
}

fn linear_params(
    what: &str,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    to: &[Projection<'_>],
) -> Result<LinearParams> {
    let first = to[0];
    for p in to {
        check(
            p.weight.cols() == x.cols()
                && p.y.rows() == x.rows()
                && p.y.cols() == p.weight.rows()
                && p.weight.ld() == p.weight.cols()
                && p.weight.dtype() == first.weight.dtype()
                && p.y.dtype() == first.y.dtype()
                && p.bias.is_some() == first.bias.is_some()
                && p.bias.is_none_or(|b| b.cols() == p.weight.rows()),
            || {
                format!(
                    "{what}: x {}, weight {}, bias {}, y {}; weights are [out, in]: give x of [rows, in], y of [rows, out], a bias of [1, out] to all or to none, dense weights, and one type to all weights and one to all y",
                    shape(x),
                    shape(p.weight),
                    p.bias.map_or_else(|| "none".to_owned(), shape),
                    shape(p.y)
                )
            },
        )?;
    }
    let mut vectors =
        to.iter().filter_map(|p| p.bias).chain(norm.map(|n| n.weight)).map(Tensor::dtype);
    let vector = vectors.next().unwrap_or(DType::F32);
    check(vectors.all(|v| v == vector), || {
        format!("{what}: norm and biases are of several element types; cast them to one")
    })?;
    check(norm.is_none_or(|n| n.weight.cols() == x.cols()), || {
        format!(
            "{what}: the norm has another width than x; give it one element for each column of x"
        )
    })?;
    let (mut n, mut ldy) = ([0; 3], [0; 3]);
    for (i, p) in to.iter().enumerate() {
        n[i] = p.weight.rows();
        ldy[i] = p.y.ld();
    }
    let mut flags = 0;
    if norm.is_some() {
        flags |= NORM;
    }
    if first.bias.is_some() {
        flags |= BIAS;
    }
    Ok(LinearParams {
        m: x.rows(),
        k: x.cols(),
        n,
        ldx: x.ld(),
        ldy,
        eps: norm.map_or(0.0, |n| n.eps),
        x: x.dtype() as u32,
        w: first.weight.dtype() as u32,
        y: first.y.dtype() as u32,
        vector: vector as u32,
        flags,
    })
}

/// `y = norm(x) · Wᵀ + bias`.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
#[doc(alias = "matmul")]
pub fn linear(
    library: &Library,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    to: Projection<'_>,
) -> Result<Operator> {
    let params = linear_params("linear", x, norm, &[to])?;
    let weight = norm.and_then(|n| some(n.weight));
    Operator::new(
        library,
        "linear",
        &params,
        &[some(x), weight, some(to.weight), to.bias.and_then(some), some(to.y)],
    )
    .map(|operator| by_vendor(library, operator, x, norm, &[to], false))
}

/// The operator with the products of a vendor's library, if the library computes them.
fn by_vendor(
    library: &Library,
    operator: Operator,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    to: &[Projection<'_>],
    add: bool,
) -> Operator {
    #[cfg(feature = "cuda")]
    if let (Some(gemm), None) = (library.gemm(), norm) {
        return operator.with_products(gemm.products(x, to, add));
    }
    #[cfg(not(feature = "cuda"))]
    let _ = (library, x, norm, to, add);
    operator
}

/// `y += norm(x) · Wᵀ + bias`: a projection back into the residual stream.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn linear_add(
    library: &Library,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    to: Projection<'_>,
) -> Result<Operator> {
    let params = linear_params("linear_add", x, norm, &[to])?;
    let weight = norm.and_then(|n| some(n.weight));
    Operator::new(
        library,
        "linear_add",
        &params,
        &[some(x), weight, some(to.weight), to.bias.and_then(some), some(to.y)],
    )
    .map(|operator| by_vendor(library, operator, x, norm, &[to], true))
}

/// Three products of one normalised `x`: queries, keys and values.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn linear3(
    library: &Library,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    to: [Projection<'_>; 3],
) -> Result<Operator> {
    let params = linear_params("linear3", x, norm, &to)?;
    let mut operands = vec![some(x), norm.and_then(|n| some(n.weight))];
    for p in to {
        operands.extend([some(p.weight), p.bias.and_then(some), some(p.y)]);
    }
    Operator::new(library, "linear3", &params, &operands)
        .map(|operator| by_vendor(library, operator, x, norm, &to, false))
}

/// `y = silu(norm(x) · Gᵀ + bias) · (norm(x) · Uᵀ + bias)`. The `y` is that of `gate`.
///
/// The `y` of `up` is the same, or scratch memory of its shape and type. With scratch memory a
/// vendor's library can compute the products, if it computes such
/// ([`Library::has_vendor_products`]); a kernel leaves that memory alone.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn linear_gated(
    library: &Library,
    x: &Tensor,
    norm: Option<Norm<'_>>,
    gate: Projection<'_>,
    up: Projection<'_>,
) -> Result<Operator> {
    linear_params("linear_gated", x, norm, &[gate, up])?;
    let params = linear_params("linear_gated", x, norm, &[gate])?;
    check(gate.weight.rows() == up.weight.rows(), || {
        "linear_gated: gate and up have other shapes; give them the same".to_owned()
    })?;
    let weight = norm.and_then(|n| some(n.weight));
    let operator = Operator::new(
        library,
        "linear_gated",
        &params,
        &[
            some(x),
            weight,
            some(gate.weight),
            gate.bias.and_then(some),
            some(up.weight),
            up.bias.and_then(some),
            some(gate.y),
        ],
    )?;
    #[cfg(feature = "cuda")]
    if let (Some(gemm), None) = (library.gemm(), norm)
        && let Some(products) = gemm.products(x, &[gate, up], false)
    {
        let multiply = silu_mul(library, gate.y, up.y, gate.y)?;
        return Ok(operator.with_products(Some(products.gated(up.y.into(), multiply))));
    }
    Ok(operator)
}

/// The heads of an attention layer.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Heads {
    /// Heads of queries.
    pub heads: u32,
    /// Heads of keys and values; divides `heads`.
    pub kv_heads: u32,
    /// Elements of a head.
    pub head_dim: u32,
    /// Positions of a cache and of the rotary table.
    pub positions: u32,
}

impl Heads {
    /// Columns of queries, and of their results.
    fn columns(self) -> u64 {
        u64::from(self.heads) * u64::from(self.head_dim)
    }

    /// Columns of keys, and of values.
    fn kv_columns(self) -> u64 {
        u64::from(self.kv_heads) * u64::from(self.head_dim)
    }
}

/// The positions of rows: the rotary table, and the device-side position of the first row or of
/// each.
#[derive(Debug, Clone, Copy)]
pub struct RowPositions<'a> {
    /// cos and sin per position ([`rope::table`](crate::kernels::cpu::rope::table)), f32.
    pub table: &'a BufferPart,
    /// An i32 in device memory, or one for each row in [`decode_attention`].
    pub position: &'a BufferPart,
}

/// Rotates the heads of `x` in place (rotate-half, as in Hugging Face models). Row `i` is at the
/// first row's position plus `i`.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn rope(library: &Library, x: &Tensor, heads: Heads, at: RowPositions<'_>) -> Result<Operator> {
    check(u64::from(x.cols()) == heads.columns(), || {
        let Heads { heads: n, head_dim, .. } = heads;
        format!("rope: x {}; give x {n} heads · {head_dim} = {} columns", shape(x), heads.columns())
    })?;
    let params = RopeParams {
        m: x.rows(),
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        rotary: heads.head_dim,
        positions: heads.positions,
        ld: [x.ld(), 0, 0],
        x: x.dtype() as u32,
        cache: 0,
        layout: CacheLayout::default(),
    };
    Operator::new(library, "rope", &params, &[some(x), part(at.table), part(at.position)])
}

/// Copies rows of keys or values into a cache at their positions, without rotating them.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn cache_append(
    library: &Library,
    x: &Tensor,
    heads: Heads,
    cache: (&BufferPart, DType),
    position: &BufferPart,
) -> Result<Operator> {
    check(u64::from(x.cols()) == heads.kv_columns(), || {
        let (x, columns) = (shape(x), heads.kv_columns());
        let Heads { kv_heads, head_dim, .. } = heads;
        format!("cache_append: x {x}; give x {kv_heads} heads · {head_dim} = {columns} columns")
    })?;
    let params = RopeParams {
        m: x.rows(),
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        rotary: 0,
        positions: heads.positions,
        ld: [x.ld(), 0, 0],
        x: x.dtype() as u32,
        cache: cache.1 as u32,
        layout: CacheLayout::contiguous(heads.kv_heads, heads.positions),
    };
    Operator::new(library, "cache_append", &params, &[some(x), part(cache.0), part(position)])
}

/// Rotates queries in place and appends rotated keys, and values, to the caches.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn rope_append(
    library: &Library,
    qkv: [&Tensor; 3],
    heads: Heads,
    cache: &Cache,
    at: RowPositions<'_>,
) -> Result<Operator> {
    let [q, k, v] = qkv;
    check_qkv("rope_append", q, k, v, heads)?;
    let params = RopeParams {
        m: q.rows(),
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        rotary: heads.head_dim,
        positions: heads.positions,
        ld: [q.ld(), k.ld(), v.ld()],
        x: q.dtype() as u32,
        cache: cache.dtype as u32,
        layout: cache.layout,
    };
    let operands = [
        some(q),
        some(k),
        some(v),
        part(at.table),
        part(&cache.keys),
        cache.values.clone(),
        part(at.position),
        cache.limits.clone(),
    ];
    Operator::new(library, "rope_append", &params, &operands)
}

fn check_qkv(what: &str, q: &Tensor, k: &Tensor, v: &Tensor, heads: Heads) -> Result<()> {
    let (columns, kv) = (heads.columns(), heads.kv_columns());
    check(
        u64::from(q.cols()) == columns
            && u64::from(k.cols()) == kv
            && u64::from(v.cols()) == kv
            && q.rows() == k.rows()
            && q.rows() == v.rows()
            && q.dtype() == k.dtype()
            && q.dtype() == v.dtype(),
        || {
            format!(
                "{what}: q {}, k {}, v {}; give q {columns} columns (heads · head_dim), k and v {kv} (kv_heads · head_dim), and all as many rows and one type",
                shape(q),
                shape(k),
                shape(v)
            )
        },
    )
}

/// Causal attention of rotated queries over a cache that holds their keys and values already.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn attention(
    library: &Library,
    q: &Tensor,
    heads: Heads,
    cache: &Cache,
    position: &BufferPart,
    y: &Tensor,
) -> Result<Operator> {
    check(
        u64::from(q.cols()) == heads.columns() && y.cols() == q.cols() && y.rows() == q.rows(),
        || {
            format!(
                "attention: q {}, y {}; give both {} columns (heads · head_dim) and as many rows",
                shape(q),
                shape(y),
                heads.columns()
            )
        },
    )?;
    let params = attention_params(q, heads, cache, y, 0);
    let operands = [
        some(q),
        part(&cache.keys),
        cache.values.clone(),
        part(position),
        some(y),
        cache.limits.clone(),
    ];
    Operator::new(library, "attention", &params, &operands)
}

/// The scratch memory of [`decode_attention`] for so many rows. Launches that may overlap need one
/// each.
///
/// # Errors
/// `OutOfMemory`; the driver's.
pub fn decode_scratch(runtime: &Runtime, heads: Heads, rows: u32) -> Result<BufferPart> {
    let Heads { heads, kv_heads, head_dim, positions } = heads;
    let params =
        AttentionParams { m: rows, heads, kv_heads, head_dim, positions, ..Default::default() };
    let scratch = runtime.alloc(params.scratch_bytes())?;
    runtime.stream().fill(scratch.view(), 0u8)?;
    Ok(scratch.into())
}

/// Attention for a row of each of several sequences after the projections: rotates queries and
/// keys, appends keys and values to the caches, and attends. Each row has its own position and
/// caches. A row at a position outside its cache writes nothing to it and gives NaN. A device may
/// split a long context over its processors, and keep what the parts give in
/// [`scratch`](decode_scratch).
///
/// # Errors
/// `InvalidArgument` for shapes that do not meet, or memory that is too small for all rows.
pub fn decode_attention(
    library: &Library,
    qkv: [&Tensor; 3],
    heads: Heads,
    cache: &Cache,
    at: RowPositions<'_>,
    scratch: &BufferPart,
    y: &Tensor,
) -> Result<Operator> {
    let [q, k, v] = qkv;
    check_qkv("decode_attention", q, k, v, heads)?;
    let dense = |t: &Tensor| t.rows() == 1 || t.ld() == t.cols();
    check(y.rows() == q.rows() && y.cols() == q.cols() && dense(k) && dense(v), || {
        format!(
            "decode_attention: q {}, k {}, v {}, y {}; give y the shape of q, and k and v rows that follow each other",
            shape(q),
            shape(k),
            shape(v),
            shape(y)
        )
    })?;
    let params = attention_params(q, heads, cache, y, heads.head_dim);
    let operands = [
        some(q),
        some(k),
        some(v),
        part(at.table),
        part(&cache.keys),
        cache.values.clone(),
        part(at.position),
        some(y),
        part(scratch),
        cache.limits.clone(),
    ];
    Operator::new(library, "decode_attention", &params, &operands)
}

fn attention_params(
    q: &Tensor,
    heads: Heads,
    cache: &Cache,
    y: &Tensor,
    rotary: u32,
) -> AttentionParams {
    AttentionParams {
        m: q.rows(),
        heads: heads.heads,
        kv_heads: heads.kv_heads,
        head_dim: heads.head_dim,
        positions: heads.positions,
        ldq: q.ld(),
        ldo: y.ld(),
        scale: (heads.head_dim as f32).sqrt().recip(),
        x: q.dtype() as u32,
        cache: cache.dtype as u32,
        rotary,
        layout: cache.layout,
    }
}

fn elementwise(
    library: &Library,
    name: &str,
    a: &Tensor,
    b: &Tensor,
    y: &Tensor,
) -> Result<Operator> {
    let alike = |t: &Tensor| t.rows() == a.rows() && t.cols() == a.cols() && t.dtype() == a.dtype();
    check(alike(b) && alike(y), || {
        format!(
            "{name}: a {}, b {}, y {}; give the three one shape and type",
            shape(a),
            shape(b),
            shape(y)
        )
    })?;
    let params = ElementwiseParams {
        rows: a.rows(),
        k: a.cols(),
        ld: [a.ld(), b.ld(), y.ld()],
        x: a.dtype() as u32,
        y: y.dtype() as u32,
    };
    Operator::new(library, name, &params, &[some(a), some(b), some(y)])
}

/// `y = a + b`.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn add(library: &Library, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<Operator> {
    elementwise(library, "add", a, b, y)
}

/// `y = a · b`, element by element.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn mul(library: &Library, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<Operator> {
    elementwise(library, "mul", a, b, y)
}

/// `y = silu(a) · b`.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn silu_mul(library: &Library, a: &Tensor, b: &Tensor, y: &Tensor) -> Result<Operator> {
    elementwise(library, "silu_mul", a, b, y)
}

/// `y = x` in `y`'s element type, rounded to nearest even.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn cast(library: &Library, x: &Tensor, y: &Tensor) -> Result<Operator> {
    check(x.rows() == y.rows() && x.cols() == y.cols(), || {
        format!("cast: x {}, y {}; give both one shape", shape(x), shape(y))
    })?;
    let params = ElementwiseParams {
        rows: x.rows(),
        k: x.cols(),
        ld: [x.ld(), y.ld(), 0],
        x: x.dtype() as u32,
        y: y.dtype() as u32,
    };
    Operator::new(library, "cast", &params, &[some(x), some(y)])
}

/// Fills memory with a pattern of `width` (1, 2 or 4) bytes.
///
/// # Errors
/// `InvalidArgument` if its length is not a multiple of the pattern.
pub fn fill(library: &Library, y: &BufferPart, pattern: u32, width: u32) -> Result<Operator> {
    let bytes = y.view().len();
    let params = FillParams { bytes: [bytes as u32, (bytes >> 32) as u32], width, pattern };
    Operator::new(library, "fill", &params, &[part(y)])
}

/// Copies rows between matrices of one shape and element type.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn copy(library: &Library, from: &Tensor, to: &Tensor) -> Result<Operator> {
    check(
        from.rows() == to.rows() && from.cols() == to.cols() && from.dtype() == to.dtype(),
        || format!("copy: from {}, to {}; give both one shape and type", shape(from), shape(to)),
    )?;
    let size = from.dtype().bytes() as u32;
    let params = CopyParams {
        rows: from.rows(),
        bytes: from.cols() * size,
        from_pitch: from.ld() * size,
        to_pitch: to.ld() * size,
    };
    Operator::new(library, "copy_2d", &params, &[some(from), some(to)])
}

/// Softmax, row by row. A row with a NaN or +∞, or of −∞ only, is all NaN.
///
/// # Errors
/// `InvalidArgument` for shapes that do not match.
pub fn softmax(library: &Library, x: &Tensor, y: &Tensor) -> Result<Operator> {
    check(x.rows() == y.rows() && x.cols() == y.cols(), || {
        format!("softmax: x {}, y {}; give both one shape", shape(x), shape(y))
    })?;
    let params = RowParams {
        rows: x.rows(),
        n: x.cols(),
        ldx: x.ld(),
        ldy: y.ld(),
        x: x.dtype() as u32,
        y: y.dtype() as u32,
    };
    Operator::new(library, "softmax", &params, &[some(x), some(y)])
}

/// The index of the largest element of each row, as i32. Of equal elements the first; −1 if all
/// are NaN.
///
/// # Errors
/// `InvalidArgument` if `ids` is too short.
pub fn argmax(library: &Library, x: &Tensor, ids: &BufferPart) -> Result<Operator> {
    let params =
        RowParams { rows: x.rows(), n: x.cols(), ldx: x.ld(), ldy: 0, x: x.dtype() as u32, y: 0 };
    Operator::new(library, "argmax", &params, &[some(x), part(ids)])
}

pub use crate::kernels::cpu::sampling::{LogProbabilities, MAX_LOG_PROBABILITIES, SamplingRecord};

/// The rule that chooses the next token of a sequence; greedy by default.
///
/// The candidates are cut in the order of the fields, as in Hugging Face's transformers.
///
/// ```
/// use leasehold_operators::ops::Sampling;
/// let sampling = Sampling { temperature: 0.6, top_k: 20, top_p: 0.95, ..Sampling::default() };
/// assert_eq!(sampling.record()?.top_k, 20);
/// let error = Sampling { top_p: 1.5, ..sampling }.record().unwrap_err().to_string();
/// assert!(error.contains("top_p"));
/// # Ok::<(), leasehold::Error>(())
/// ```
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Sampling {
    /// The divisor of the logits, finite; 0 selects the largest logit, the first of equal ones.
    pub temperature: f32,
    /// The number of largest logits that are candidates, of equal logits the first ones; 0 for all.
    pub top_k: u32,
    /// Leaves the smallest number of the most probable candidates, of equal ones the first, whose
    /// probabilities reach this sum. Above 0, and at most 1, which leaves all.
    pub top_p: f32,
    /// Leaves the candidates that have at least this part of the largest probability, from 0 to 1;
    /// 0 leaves all.
    pub min_p: f32,
    /// The seed. The same seed, position and logits give the same token.
    pub seed: u64,
    /// The number of largest logits whose log-probabilities a step writes, beside the token's: at
    /// most [`MAX_LOG_PROBABILITIES`]; 0 for none, the token's neither.
    pub log_probabilities: u32,
}

impl Default for Sampling {
    fn default() -> Self {
        Self { temperature: 0.0, top_k: 0, top_p: 1.0, min_p: 0.0, seed: 0, log_probabilities: 0 }
    }
}

impl Sampling {
    /// The words of a row for [`next_token`].
    ///
    /// # Errors
    /// `InvalidArgument` for a field beyond its limits, and for one that is no number.
    pub fn record(&self) -> Result<SamplingRecord> {
        let Self { temperature, top_k, top_p, min_p, seed, log_probabilities } = *self;
        let number = |ok: bool, name: &str, value: f32, limits: &str| {
            check(ok, || format!("{name} is {value}; give a number {limits}"))
        };
        let warm = temperature >= 0.0 && temperature.is_finite();
        number(warm, "temperature", temperature, "from 0 up, which is finite")?;
        number(top_p > 0.0 && top_p <= 1.0, "top_p", top_p, "above 0 and at most 1")?;
        number((0.0..=1.0).contains(&min_p), "min_p", min_p, "from 0 to 1")?;
        check(log_probabilities as usize <= MAX_LOG_PROBABILITIES, || {
            format!(
                "log_probabilities is {log_probabilities}; give {MAX_LOG_PROBABILITIES} at most"
            )
        })?;
        let seed = [seed as u32, (seed >> 32) as u32];
        Ok(SamplingRecord {
            temperature,
            top_k,
            top_p,
            min_p,
            seed,
            log_probabilities,
            reserved: 0,
        })
    }
}

/// The state of decode loops in device memory: a row for each sequence.
///
/// A row whose position is negative is idle: [`next_token`] and [`advance`] leave it as it is.
#[derive(Debug, Clone)]
pub struct Loop {
    /// The input token of the next step: an i32 for each row.
    pub token: BufferPart,
    /// Its position: an i32 for each row.
    pub position: BufferPart,
    /// The drawn tokens, in a ring of i32 for each row, one behind the other.
    pub ring: BufferPart,
    /// The number of drawn tokens: a u32 for each row.
    pub count: BufferPart,
}

impl Loop {
    /// The number of rows.
    fn rows(&self) -> u32 {
        u32::try_from(self.token.view().len() / 4).unwrap_or(u32::MAX)
    }

    /// The ids of a row's ring.
    fn ring_len(&self) -> u32 {
        entries(&self.ring, 4, self.rows())
    }
}

/// The number of entries of `bytes` bytes that each of `rows` rows has in a part.
fn entries(part: &BufferPart, bytes: u64, rows: u32) -> u32 {
    u32::try_from(part.view().len() / bytes / u64::from(rows.max(1))).unwrap_or(u32::MAX)
}

/// For each row: `position += step`; the token goes to the ring; the count grows by one.
///
/// # Errors
/// `InvalidArgument` for a state without rows, or one whose parts have fewer rows than tokens.
pub fn advance(library: &Library, state: &Loop, step: u32) -> Result<Operator> {
    let params = AdvanceParams { rows: state.rows(), step, ring: state.ring_len() };
    let operands =
        [part(&state.token), part(&state.position), part(&state.ring), part(&state.count)];
    Operator::new(library, "advance", &params, &operands)
}

/// Draws the next token of each row of f32 logits, and advances the row by one. This is the end of
/// a decode step: one launch for all sequences.
///
/// `sampling` has a [`SamplingRecord`] for each row. They are data: another record needs no other
/// operator, and no other recording. Any words are taken; [`SamplingRecord`] says what they mean. A
/// NaN is not a candidate; the token is −1 if all logits are NaN. The position is the counter of
/// the random numbers.
///
/// `log_probabilities` has a ring of [`LogProbabilities`] for each row, one behind the other. A row
/// whose record asks for some writes entry `count mod size`, with the count before the step. So
/// their place is the token's, if both rings have one size. A row that asks for none makes no pass
/// over its logits for them, and leaves its ring as it is. The same is true of all rows without a
/// ring.
///
/// # Errors
/// `InvalidArgument` for logits that are not f32, for another number of rows in the state, and for
/// a part that is too short for the rows.
pub fn next_token(
    library: &Library,
    logits: &Tensor,
    sampling: &BufferPart,
    state: &Loop,
    log_probabilities: Option<&BufferPart>,
) -> Result<Operator> {
    let rows = logits.rows();
    check(logits.dtype() == DType::F32 && state.rows() == rows, || {
        format!(
            "next_token: logits {}, {} tokens; give logits of F32, and a token for each row",
            shape(logits),
            state.rows()
        )
    })?;
    let params = NextTokenParams {
        rows,
        n: logits.cols(),
        ld: logits.ld(),
        ring: state.ring_len(),
        log_ring: log_probabilities
            .map_or(0, |logs| entries(logs, size_of::<LogProbabilities>() as u64, rows)),
    };
    let operands = [
        some(logits),
        part(sampling),
        part(&state.token),
        part(&state.position),
        part(&state.ring),
        part(&state.count),
        log_probabilities.and_then(part),
    ];
    Operator::new(library, "next_token", &params, &operands)
}
