//! Matrix products, with what is fused to them.
//!
//! This module must not know other operators than the gated product's own.

use super::{check, shape, some};
use crate::kernels::cpu::linear::{BIAS, LinearParams, NORM};
use crate::library::Library;
use crate::operator::Operator;
use crate::tensor::{DType, Tensor};
use leasehold::Result;

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
    if let (Some(gemm), None) = (library.gemm(), norm)
        && !crate::gemm::is_slower(&operator, to)
    {
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
        && !crate::gemm::is_slower(&operator, &[gate, up])
        && let Some(products) = gemm.products(x, &[gate, up], false)
    {
        let multiply = super::silu_mul(library, gate.y, up.y, gate.y)?;
        return Ok(operator.with_products(Some(products.gated(up.y.into(), multiply))));
    }
    Ok(operator)
}
