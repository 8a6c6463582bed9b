//! Kernels whose types say what a launch takes: one signature for the description, the check and
//! the launch.
//!
//! A signature is a tuple of bindings, such as `(Read<f32>, Write<f32>)`, and a type of parameters.
//! The accesses, the alignments and the size of the parameters of a description come from it. The
//! compiler then sees a wrong number of arguments, a wrong type of values, and other parameters.
//!
//! This module must not know sessions or sources.

use crate::array::ArrayView;
use crate::kernel::{Grid, KernelBase};
use crate::stream::Stream;
use crate::view::Operand;
use bytemuck::NoUninit;
use leasehold_core::{Error, Result};
use leasehold_hal::{Access, FromParams, KernelCheck, KernelDesc, KernelSource, LaunchInfo};
use std::borrow::Cow;
use std::fmt;
use std::marker::PhantomData;

mod sealed {
    pub trait Sealed {}
}
use sealed::Sealed;

/// A binding that the kernel reads: values of type `T`.
pub struct Read<T>(PhantomData<fn() -> T>);

/// A binding that the kernel writes, without reading it: values of type `T`.
pub struct Write<T>(PhantomData<fn() -> T>);

/// A binding that the kernel reads and writes: values of type `T`.
pub struct ReadWrite<T>(PhantomData<fn() -> T>);

/// A binding of a signature: [`Read`], [`Write`] or [`ReadWrite`].
pub trait TypedBinding: Sealed {
    /// The type of the values.
    type Value;
    /// The kernel's access.
    const ACCESS: Access;
}

macro_rules! bindings {
    ($($name:ident)*) => {$(
        impl<T> Sealed for $name<T> {}
        impl<T> TypedBinding for $name<T> {
            type Value = T;
            const ACCESS: Access = Access::$name;
        }
    )*};
}
bindings!(Read Write ReadWrite);

/// The bindings of a kernel, in their order: a tuple of one to twelve [bindings](TypedBinding).
pub trait Bindings: Sealed {
    /// The kernel's access to each.
    const ACCESS: &'static [Access];
    /// The alignment of each, in bytes.
    const ALIGN: &'static [u32];
    /// Bytes of a value of each.
    const BYTES: &'static [u64];
}

/// The arguments of a launch of a kernel with bindings `B`: a tuple of references to
/// [arrays](crate::Array), or of their [views](ArrayView).
#[diagnostic::on_unimplemented(
    message = "`{Self}` are not the arguments of a kernel with the bindings `{B}`",
    note = "give a tuple with a `&Array<T>` or an `ArrayView<T>` for each binding, in their order"
)]
pub trait Arguments<'a, B: Bindings> {
    /// The operands of the launch.
    fn operands(self) -> impl AsRef<[Operand<'a>]>;
}

macro_rules! tuples {
    ($($binding:ident $argument:ident $name:ident)*) => { tuples!(@ [] $($binding $argument $name)*); };
    (@ [$($done:ident)*]) => {};
    (@ [$($done:ident)*] $binding:ident $argument:ident $name:ident $($rest:ident)*) => {
        tuples!(% $($done)* $binding $argument $name);
        tuples!(@ [$($done)* $binding $argument $name] $($rest)*);
    };
    (% $($binding:ident $argument:ident $name:ident)*) => {
        impl<$($binding: TypedBinding),*> Sealed for ($($binding,)*) {}

        impl<$($binding: TypedBinding),*> Bindings for ($($binding,)*) {
            const ACCESS: &'static [Access] = &[$($binding::ACCESS),*];
            const ALIGN: &'static [u32] = &[$(align_of::<$binding::Value>() as u32),*];
            const BYTES: &'static [u64] = &[$(size_of::<$binding::Value>() as u64),*];
        }

        impl<'a, $($binding, $argument),*> Arguments<'a, ($($binding,)*)> for ($($argument,)*)
        where
            $($binding: TypedBinding<Value: 'a>, $argument: Into<ArrayView<'a, $binding::Value>>),*
        {
            #[inline]
            fn operands(self) -> impl AsRef<[Operand<'a>]> {
                let ($($name,)*) = self;
                [$($name.into().view().with($binding::ACCESS)),*]
            }
        }
    };
}
tuples!(A Ax a B Bx b C Cx c D Dx d E Ex e F Fx f G Gx g H Hx h I Ix i J Jx j K Kx k L Lx l);

/// A launch, as the check of a typed kernel sees it.
#[derive(Debug)]
pub struct TypedLaunch<'a, B, P> {
    /// The launch without types.
    pub info: &'a LaunchInfo<'a>,
    /// The parameters.
    pub params: P,
    _bindings: PhantomData<fn() -> B>,
}

impl<B: Bindings, P> TypedLaunch<'_, B, P> {
    /// The number of whole values of binding `i`; 0 if it does not exist.
    #[inline]
    #[must_use]
    pub fn len(&self, i: usize) -> u64 {
        B::BYTES.get(i).and_then(|&bytes| self.info.len(i).checked_div(bytes)).unwrap_or(0)
    }

    /// Returns an error if binding `i` has fewer than `values` values.
    ///
    /// # Errors
    /// `InvalidArgument`, which names the binding.
    #[inline]
    pub fn want(&self, i: usize, values: u64) -> Result<()> {
        let bytes = B::BYTES.get(i).map_or(u64::MAX, |&bytes| values.saturating_mul(bytes));
        self.info.want(i, bytes)
    }
}

/// A kernel whose type says what a launch takes: bindings `B`, and parameters `P`. Clones are the
/// same kernel.
///
/// A launch costs what one of [`KernelBase`] does. A kernel with more than twelve bindings, or
/// whose operands are [reservations](crate::Growing::reservation), is a `KernelBase`.
///
/// ```
/// use leasehold::kernel::{CpuArgs, Kernel, KernelSource, Read, Write};
/// use leasehold::{DeviceId, Error, Runtime};
///
/// /// `y = a * x`, four values a tile.
/// unsafe fn scale(args: &CpuArgs<'_>) {
///     let from = args.tile()[0] as usize * 4;
///     // SAFETY: 0 is only read; each tile writes a part of 1 of its own.
///     let (x, y) = unsafe { (args.slice::<f32>(0), args.slice_mut::<f32>(1, from, 4)) };
///     std::iter::zip(y, &x[from..]).for_each(|(y, x)| *y = args.params::<f32>() * x);
/// }
///
/// type Scale = Kernel<(Read<f32>, Write<f32>), f32>;
///
/// # fn main() -> leasehold::Result<()> {
/// let check = Scale::check(|launch| match launch.info.grid {
///     [tiles, 1, 1] if launch.len(0) == launch.len(1) => launch.want(0, u64::from(tiles) * 4),
///     _ => Err(Error::invalid("a grid of one dimension, and as many results as values")),
/// });
/// // SAFETY: it touches its bindings through slices, which check bounds. Each tile writes its
/// // own part.
/// let scale = unsafe { Scale::new("scale", KernelSource::Cpu(scale), check) }?;
///
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let (x, y) = (runtime.upload(&[1.0f32; 8])?, runtime.zeros::<f32>(8)?);
/// scale.launch(runtime.stream(), (&x, &y), &3.0, 2)?;
/// assert_eq!(runtime.to_vec(&y)?, [3.0; 8]);
/// assert!(scale.launch(runtime.stream(), (&x, y.slice(..4)), &3.0, 1).is_err());
/// # Ok(())
/// # }
/// ```
///
/// Values of another type are an error of the compiler:
///
/// ```compile_fail,E0277
/// # use leasehold::kernel::{Kernel, Read, Write};
/// # use leasehold::{Array, Stream};
/// type Scale = Kernel<(Read<f32>, Write<f32>), f32>;
/// fn wrong(scale: Scale, stream: &Stream, x: Array<f32>, y: Array<f64>) {
///     let _ = scale.launch(stream, (&x, &y), &3.0, 2);
/// }
/// ```
#[doc(alias("TypedKernel", "CudaFunction", "LaunchArgs"))]
pub struct Kernel<B, P = ()> {
    base: KernelBase,
    _signature: PhantomData<fn(B, P)>,
}

impl<B: Bindings, P: FromParams + NoUninit> Kernel<B, P> {
    /// A check of launches, which reads the parameters by their type and counts values.
    pub fn check(
        check: impl Fn(&TypedLaunch<'_, B, P>) -> Result<()> + Send + Sync + 'static,
    ) -> KernelCheck {
        KernelCheck::new(move |info| {
            check(&TypedLaunch { info, params: info.params()?, _bindings: PhantomData })
        })
    }

    /// A description with the signature's bindings, alignments and parameters. Its other fields are
    /// free: the entry, the overlap, the early reads. [`KernelBase::with_sources`] takes several,
    /// and [`try_from`](Self::try_from) makes a typed kernel of its result.
    pub fn desc(
        name: impl Into<Cow<'static, str>>,
        source: KernelSource<'static>,
        check: KernelCheck,
    ) -> KernelDesc<'static> {
        let mut desc = KernelDesc::new(name, source, B::ACCESS, check).params_of::<P>();
        desc.alignment = Cow::Borrowed(B::ALIGN);
        desc
    }

    /// A kernel with one source.
    ///
    /// # Errors
    /// `InvalidArgument` for an empty name, or more than 4,096 bytes of parameters.
    ///
    /// # Safety
    /// - As [`KernelBase::new`], with a description of this [signature](Self::desc).
    pub unsafe fn new(
        name: impl Into<Cow<'static, str>>,
        source: KernelSource<'static>,
        check: KernelCheck,
    ) -> Result<Self> {
        // SAFETY: by the caller's contract.
        let base = unsafe { KernelBase::new(Self::desc(name, source, check)) }?;
        Ok(Self { base, _signature: PhantomData })
    }

    /// Launches the kernel as one submission, as [`Stream::launch`] does. Does not wait for the
    /// launch. On a stream of a recording the launch is noted.
    ///
    /// # Errors
    /// As [`Stream::launch`].
    #[inline]
    pub fn launch<'a>(
        &self,
        stream: &Stream,
        arguments: impl Arguments<'a, B>,
        params: &P,
        grid: impl Into<Grid>,
    ) -> Result<()> {
        stream.launch(&self.base, arguments.operands().as_ref(), params, grid)
    }
}

impl<B, P> Kernel<B, P> {
    /// The kernel without its types, for sessions and graph updates.
    #[must_use]
    pub fn base(&self) -> &KernelBase {
        &self.base
    }
}

impl<B: Bindings, P: FromParams + NoUninit> TryFrom<KernelBase> for Kernel<B, P> {
    type Error = Error;

    /// The kernel with types.
    ///
    /// # Errors
    /// `InvalidArgument` if the kernel declares other accesses or another size of parameters.
    fn try_from(base: KernelBase) -> Result<Self> {
        let desc = base.desc();
        let alike = desc.bindings == B::ACCESS && desc.params as usize == size_of::<P>();
        if !alike {
            return Err(Error::invalid(format!(
                "kernel {}: it declares {:?} and {} bytes of parameters, and its type {:?} and {}; declare it by Kernel::desc",
                base.name(),
                desc.bindings,
                desc.params,
                B::ACCESS,
                size_of::<P>()
            )));
        }
        Ok(Self { base, _signature: PhantomData })
    }
}

impl<B, P> Clone for Kernel<B, P> {
    fn clone(&self) -> Self {
        Self { base: self.base.clone(), _signature: PhantomData }
    }
}

impl<B, P> fmt::Debug for Kernel<B, P> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Kernel({})", self.base.name())
    }
}
