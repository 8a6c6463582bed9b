//! Tensor maps: how the boxes of a buffer lie that a kernel copies.

use crate::arguments::{list, optional, value};
use crate::dtype;
use crate::errors::{invalid, raise};
use leasehold::kernel::{Interleave, MapElement, Swizzle, TensorMap};
use pyo3::prelude::*;

/// The types of elements, by their names.
const ELEMENTS: [(&str, MapElement); 13] = [
    ("uint8", MapElement::U8),
    ("uint16", MapElement::U16),
    ("uint32", MapElement::U32),
    ("int32", MapElement::I32),
    ("uint64", MapElement::U64),
    ("int64", MapElement::I64),
    ("float16", MapElement::F16),
    ("float32", MapElement::F32),
    ("float64", MapElement::F64),
    ("bfloat16", MapElement::Bf16),
    ("float32_ftz", MapElement::F32Ftz),
    ("tfloat32", MapElement::Tf32),
    ("tfloat32_ftz", MapElement::Tf32Ftz),
];

/// A tensor of one to five dimensions in a buffer, and the box that one instruction of a kernel
/// copies (Hopper's TMA). Dimension 0 is the innermost.
///
/// It is an argument of a launch, for a kernel that takes `"tensor_map:0"`: a map of buffer 0. It
/// has no address: a launch, a graph and an update make CUDA's `CUtensorMap` of the buffer that
/// they have then. The rules are those of `cuTensorMapEncodeTiled`.
///
/// Parameters
/// ----------
/// element
///     The elements' type: a name such as `"bfloat16"`, or `"tfloat32"`, `"float32_ftz"`,
///     `"tfloat32_ftz"`.
/// sizes
///     Elements of each dimension.
/// box
///     Elements of the box in each dimension, 256 at most.
/// strides
///     Bytes from an element to the next one in each dimension but the first; without gaps by
///     default.
/// steps
///     From one element that the box takes to the next one, in each dimension.
/// swizzle
///     Bytes of the inner dimension within which pieces change places: 0, 32, 64 or 128.
/// interleave
///     Bytes of slices of channels: 0, 16 or 32.
/// l2_promotion
///     Bytes that a read brings into the L2 cache at least: 0, 64, 128 or 256.
/// fill_nan
///     Elements out of bounds are not-a-number in place of zero.
///
/// Examples
/// --------
/// >>> import leasehold
/// >>> leasehold.TensorMap("bfloat16", [512, 1000], [64, 128], swizzle=128)
/// TensorMap(Some(Bf16) [512, 1000], strides [1024], box [64, 128])
#[pyclass(frozen, name = "TensorMap", module = "leasehold")]
pub(crate) struct TensorMapObject(pub(crate) TensorMap);

#[pymethods]
impl TensorMapObject {
    #[new]
    #[pyo3(
        signature = (element, sizes, r#box, *, strides=None, steps=None, swizzle=None, interleave=None, l2_promotion=None, fill_nan=None),
        text_signature = "(element, sizes, box, *, strides=None, steps=None, swizzle=0, interleave=0, l2_promotion=0, fill_nan=False)"
    )]
    #[expect(clippy::too_many_arguments, reason = "keywords of Python")]
    fn new(
        element: &Bound<'_, PyAny>,
        sizes: &Bound<'_, PyAny>,
        r#box: &Bound<'_, PyAny>,
        strides: Option<&Bound<'_, PyAny>>,
        steps: Option<&Bound<'_, PyAny>>,
        swizzle: Option<&Bound<'_, PyAny>>,
        interleave: Option<&Bound<'_, PyAny>>,
        l2_promotion: Option<&Bound<'_, PyAny>>,
        fill_nan: Option<&Bound<'_, PyAny>>,
    ) -> PyResult<Self> {
        const MOST: (usize, &str) = (5, "dimensions");
        let name = match element.extract::<String>() {
            Ok(name) if ELEMENTS.iter().any(|(known, _)| *known == name) => name,
            _ => dtype::parse(element)?.name.to_owned(),
        };
        let Some((_, element)) = ELEMENTS.iter().find(|(known, _)| *known == name) else {
            return Err(invalid(format!("tensor maps have no elements of type {name}")));
        };
        let sizes: Vec<u64> = list(sizes, "sizes are numbers", MOST)?;
        let boxes: Vec<u32> = list(r#box, "a box is numbers", MOST)?;
        let mut map = TensorMap::new(*element, &sizes, &boxes);
        if let Some(strides) = strides {
            map = map.strides(&list::<u64>(strides, "strides are numbers of bytes", MOST)?);
        }
        if let Some(steps) = steps {
            map = map.steps(&list::<u32>(steps, "steps are numbers", MOST)?);
        }
        map = map.swizzle(match optional::<u32>(swizzle, "a swizzle is a number of bytes")? {
            None | Some(0) => Swizzle::None,
            Some(32) => Swizzle::B32,
            Some(64) => Swizzle::B64,
            Some(128) => Swizzle::B128,
            Some(other) => return Err(invalid(format!("no swizzle of {other}: 0, 32, 64 or 128"))),
        });
        map = map.interleave(match optional::<u32>(interleave, "slices are a number of bytes")? {
            None | Some(0) => Interleave::None,
            Some(16) => Interleave::B16,
            Some(32) => Interleave::B32,
            Some(other) => return Err(invalid(format!("no slices of {other} bytes: 0, 16 or 32"))),
        });
        let l2 = optional(l2_promotion, "l2_promotion is a number of bytes")?;
        map = map.l2_promotion(l2.unwrap_or(0));
        if fill_nan.map_or(Ok(false), |fill| value(fill, "fill_nan is a bool"))? {
            map = map.fill_nan();
        }
        map.validate().map_err(raise)?;
        Ok(Self(map))
    }

    fn __repr__(&self) -> String {
        format!("{:?}", self.0)
    }
}
