//! Rotary embedding, caches and attention.
//!
//! This module must not know matrix products.

use super::{check, part, shape, some};
use crate::cache::Cache;
use crate::kernels::cpu::attention::AttentionParams;
use crate::kernels::cpu::cache::CacheLayout;
use crate::kernels::cpu::rope::RopeParams;
use crate::library::Library;
use crate::operator::Operator;
use crate::part::BufferPart;
use crate::tensor::{DType, Tensor};
use leasehold::{Result, Runtime, View};

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
