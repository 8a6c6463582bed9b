//! Constructors of operators: shapes in, checked launches out.
//!
//! Each constructor documents the computation and its operands; the accesses are the kernels' own
//! declarations. Rows of `x` are rows of the batch (tokens). Weights are stored as [out, in], as in
//! Hugging Face files.

mod attention;
mod linear;
mod sampling;

pub use self::attention::*;
pub use self::linear::*;
pub use self::sampling::*;
pub use crate::cache::Cache;
use crate::kernels::cpu::attention::QUERIES;
use crate::kernels::cpu::elementwise::{CopyParams, ElementwiseParams, FillParams};
use crate::kernels::cpu::embedding::EmbeddingParams;
use crate::kernels::cpu::linear::FEW;
use crate::kernels::cpu::norm::NormParams;
use crate::library::Library;
use crate::operator::Operator;
use crate::part::BufferPart;
use crate::tensor::Tensor;
use leasehold::{Error, Result, View};

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
