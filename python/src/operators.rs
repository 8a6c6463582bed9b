//! Operators of decoders: the crate `leasehold-operators`, under one function for all that take
//! matrices and numbers. `leasehold.ops` has their names, their arguments and their texts.

use crate::arguments;
use crate::buffer::Base;
use crate::errors::{Class, invalid};
use crate::kernel::items;
use crate::layout::Layout;
use crate::memory::Block;
use crate::stream::argument;
use leasehold::{Access, Error, GraphOperator, Result};
use leasehold_core::sync::Arc;
use leasehold_operators::ops::{self, Projection};
use leasehold_operators::{BufferPart, DType, Library, Operator, Tensor};
use pyo3::prelude::*;

/// A matrix that an argument is.
struct Matrix {
    block: Arc<Block>,
    range: (u64, u64),
    rows: u32,
    columns: u32,
    /// `None` for indices of `int32`.
    dtype: Option<DType>,
}

impl Matrix {
    /// A buffer of one or two dimensions; one is a row.
    fn of(of: &Bound<'_, PyAny>, what: &str) -> PyResult<Self> {
        let refuse = |_| {
            let kind = of.get_type();
            let cure = "Device.upload and from_dlpack make one of an array";
            Class::ArgumentType.error(format!("{what} takes Buffers, not {kind}; {cure}"))
        };
        let buffer = of.cast::<Base>().map_err(refuse)?.get();
        let (block, range) = buffer.range()?;
        let layout = buffer.layout();
        let dtype = match layout.dtype.name {
            "float32" => Some(DType::F32),
            "bfloat16" => Some(DType::Bf16),
            "float16" => Some(DType::F16),
            "int32" => None,
            other => {
                return Err(invalid(format!(
                    "{what}: elements are float32, bfloat16 or float16, and indices int32, not \
                     {other}"
                )));
            }
        };
        let size = |n: i64| {
            u32::try_from(n).map_err(|_| invalid(format!("{what}: a dimension of {n} elements")))
        };
        let (rows, columns) = match layout.shape[..] {
            [columns] => (1, size(columns)?),
            [rows, columns] => (size(rows)?, size(columns)?),
            _ => {
                let shape = Layout::shown(&layout.shape);
                return Err(invalid(format!("{what} takes one or two dimensions, not {shape}")));
            }
        };
        Ok(Self { block, range, rows, columns, dtype })
    }

    fn part(&self) -> Result<BufferPart> {
        Ok(self.block.operand(self.range, Access::Read)?.view().into())
    }

    fn tensor(&self) -> Result<Tensor> {
        let dtype = self.dtype.ok_or_else(|| {
            Error::invalid("int32 in the place of elements; they are float32, bfloat16 or float16")
        })?;
        Tensor::new(self.part()?, dtype, self.rows, self.columns)
    }

    /// Numbers of `int32`, at least as many as there are `rows`.
    fn indices(&self, rows: u32) -> Result<BufferPart> {
        match self.dtype {
            None if u64::from(self.rows) * u64::from(self.columns) >= u64::from(rows) => {
                self.part()
            }
            None => Err(Error::invalid(format!(
                "{} indices for {rows} rows; give one for each",
                u64::from(self.rows) * u64::from(self.columns)
            ))),
            Some(dtype) => Err(Error::invalid(format!("indices are int32, not {}", dtype.name()))),
        }
    }
}

/// The operator of a name. `given` are its matrices, in the order of `leasehold.ops`.
fn operator(
    library: &Library,
    name: &str,
    given: &[Option<Matrix>],
    number: f32,
) -> Result<Operator> {
    let need = |i: usize| {
        let matrix = given.get(i).and_then(Option::as_ref);
        matrix.ok_or_else(|| Error::invalid(format!("{name} without its operand {i}")))
    };
    let tensor = |i: usize| need(i)?.tensor();
    match name {
        "add" => ops::add(library, &tensor(0)?, &tensor(1)?, &tensor(2)?),
        "mul" => ops::mul(library, &tensor(0)?, &tensor(1)?, &tensor(2)?),
        "silu_mul" => ops::silu_mul(library, &tensor(0)?, &tensor(1)?, &tensor(2)?),
        "cast" => ops::cast(library, &tensor(0)?, &tensor(1)?),
        "softmax" => ops::softmax(library, &tensor(0)?, &tensor(1)?),
        "argmax" => {
            let x = tensor(0)?;
            ops::argmax(library, &x, &need(1)?.indices(x.rows())?)
        }
        "embedding" => {
            let y = tensor(2)?;
            ops::embedding(library, &need(0)?.indices(y.rows())?, &tensor(1)?, &y)
        }
        "rms_norm" => ops::rms_norm(library, &tensor(0)?, &tensor(1)?, number, &tensor(2)?),
        "add_rms_norm" => {
            let (h, delta, weight) = (tensor(0)?, tensor(1)?, tensor(2)?);
            ops::add_rms_norm(library, &h, &delta, &weight, number, &tensor(3)?)
        }
        "linear" | "linear_add" => {
            let (x, weight, y) = (tensor(0)?, tensor(1)?, tensor(3)?);
            let bias = given[2].as_ref().map(Matrix::tensor).transpose()?;
            let to = Projection { weight: &weight, bias: bias.as_ref(), y: &y };
            match name {
                "linear" => ops::linear(library, &x, None, to),
                _ => ops::linear_add(library, &x, None, to),
            }
        }
        other => Err(Error::invalid(format!("{other:?} is no operator"))),
    }
}

/// Gives a stream the operator of a name. `matrices` are Buffers, or `None` for those left out.
#[pyfunction]
pub(crate) fn run_operator(
    stream: &Bound<'_, PyAny>,
    name: &str,
    matrices: &Bound<'_, PyAny>,
    number: Option<&Bound<'_, PyAny>>,
) -> PyResult<()> {
    let number = arguments::optional(number, "eps is a number")?.unwrap_or(0.0);
    let mut given = Vec::new();
    for matrix in items(matrices, "matrices")? {
        let matrix = if matrix.is_none() { None } else { Some(Matrix::of(&matrix, name)?) };
        given.push(matrix);
    }
    let blocks: Vec<_> = given.iter().flatten().map(|matrix| matrix.block.clone()).collect();
    argument(stream)?.submit(stream.py(), &blocks, None, |stream| {
        let library = Library::of(&stream.runtime())?;
        operator(&library, name, &given, number)?.encode(stream)
    })
}
