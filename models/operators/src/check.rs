//! Checks of values on a stream.
//!
//! A kernel looks at all values on the device, and leaves the first bad one of each of its parts.
//! The host takes the first of those, in the stream's order ([`Stream::inspect`]).

use crate::kernels::cpu::check::{Found, NotFiniteParams};
use crate::kernels::cpu::elem::DType;
use crate::library::Library;
use crate::operator::Operator;
use half::{bf16, f16};
use leasehold::{BufferView, Error, Finding, GraphOperator, Result, Stream, View, bytemuck};
use std::borrow::Cow;

/// The element type of checked values.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum Float {
    /// IEEE half precision.
    F16,
    /// The upper half of a single.
    Bf16,
    /// IEEE single precision.
    F32,
    /// IEEE double precision.
    F64,
}

impl From<DType> for Float {
    fn from(dtype: DType) -> Self {
        match dtype {
            DType::F32 => Self::F32,
            DType::Bf16 => Self::Bf16,
            DType::F16 => Self::F16,
        }
    }
}

impl Float {
    /// Bytes of an element.
    fn bytes(self) -> u32 {
        match self {
            Self::F16 | Self::Bf16 => 2,
            Self::F32 => 4,
            Self::F64 => 8,
        }
    }

    /// The bits of the exponent, in the highest 16 or 32 bits of an element.
    fn exponent(self) -> u32 {
        match self {
            Self::F16 => 0x7c00,
            Self::Bf16 => 0x7f80,
            Self::F32 => 0x7f80_0000,
            Self::F64 => 0x7ff0_0000,
        }
    }

    fn value(self, bits: u64) -> f64 {
        match self {
            Self::F16 => f16::from_bits(bits as u16).into(),
            Self::Bf16 => bf16::from_bits(bits as u16).into(),
            Self::F32 => f32::from_bits(bits as u32).into(),
            Self::F64 => f64::from_bits(bits),
        }
    }
}

/// Checks of values by a kernel of the [`Library`], for any [`Stream`].
pub trait Checks {
    /// Checks that all values are finite: no NaN, no infinity. Does not block. A finding poisons
    /// the stream from here on with [`Error::Check`]: the name, the index of the first such value
    /// and the value. The context lives, and other streams go on. In a recording: each launch of
    /// the graph checks, and one with a finding poisons its stream from that launch on.
    ///
    /// The cost is one launch, which reads the values once, a copy of at most 4 KiB to the host,
    /// and a host call: on CUDA later work of the stream is given to the driver after that call.
    /// So check the results of a step, not of each operator.
    ///
    /// ```
    /// use leasehold::{DeviceId, Error, Runtime, View};
    /// use leasehold_operators::{Checks, Float};
    /// # fn main() -> leasehold::Result<()> {
    /// let runtime = Runtime::open(DeviceId::cpu(0))?;
    /// let (good, bad) = (runtime.upload(&[0.5f32; 9])?, runtime.upload(&[1.0, f32::NAN])?);
    /// let stream = runtime.create_stream()?;
    /// stream.check_finite(good.view(), Float::F32, "activations")?;
    /// stream.synchronize()?;
    /// stream.check_finite(bad.view(), Float::F32, "logits")?;
    /// let error = stream.synchronize().unwrap_err();
    /// assert!(error.to_string().contains("logits: element 1 is NaN"), "{error}");
    /// assert!(matches!(error, Error::Check(finding) if finding.index == 1));
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// `InvalidArgument` for no values, for bytes that are no whole number of values or not
    /// aligned to them, and for memory of another device; `OutOfMemory`; `Unsupported` on a device
    /// without host calls or kernels; the stream's cause. After an error nothing is checked.
    #[doc(alias("isfinite", "detect_anomaly", "_assert_async"))]
    fn check_finite(
        &self,
        values: BufferView<'_>,
        float: impl Into<Float>,
        name: impl Into<Cow<'static, str>>,
    ) -> Result<()>;
}

impl Checks for Stream {
    fn check_finite(
        &self,
        values: BufferView<'_>,
        float: impl Into<Float>,
        name: impl Into<Cow<'static, str>>,
    ) -> Result<()> {
        let (float, name) = (float.into(), name.into());
        let (bytes, width) = (values.len(), float.bytes());
        if bytes == 0 || !bytes.is_multiple_of(width.into()) {
            return Err(Error::invalid(format!(
                "check {name}: {bytes} bytes are no whole number of values of {width} bytes, one at least; take a part that is, or another type"
            )));
        }
        let runtime = self.runtime();
        let params = NotFiniteParams::new(bytes / u64::from(width), width, float.exponent());
        let found = runtime.alloc(u64::from(params.parts()) * size_of::<Found>() as u64)?;
        let operands = [Some(values.into()), Some((&found).into())];
        let library = Library::of(&runtime)?;
        Operator::new(&library, "not_finite", &params, &operands)?.encode(self)?;
        self.inspect("check_finite", found.view(), move |bytes| {
            let mut parts = bytes.chunks_exact(size_of::<Found>());
            match parts.find_map(|part| bytemuck::pod_read_unaligned::<Found>(part).get()) {
                Some((index, bits)) => {
                    Err(Finding::new(name.clone(), index, float.value(bits)).into())
                }
                None => Ok(()),
            }
        })
    }
}
