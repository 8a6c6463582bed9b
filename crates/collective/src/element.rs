//! Types of elements, and how collectives reduce them.
//!
//! This module must not know ranks.

use bytemuck::Pod;
use half::{bf16, f16};
use leasehold::{Error, Result};
use std::fmt;

mod sealed {
    pub trait Sealed {}
}

/// A type whose values collectives move and reduce: the floating-point numbers of 16 to 64 bits,
/// and the integers of 8 to 64 bits.
pub trait Element: Pod + sealed::Sealed {
    /// The type as a value.
    const TYPE: ElementType;
}

macro_rules! elements {
    ($($(#[$doc:meta])* $name:ident = $rust:ident,)*) => {
        /// The type of a collective's elements.
        #[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
        #[non_exhaustive]
        pub enum ElementType {
            $($(#[$doc])* $name,)*
        }

        impl ElementType {
            /// All types.
            pub const ALL: [Self; 12] = [$(Self::$name,)*];

            /// Bytes of an element.
            #[must_use]
            pub fn size(self) -> u64 {
                match self {
                    $(Self::$name => size_of::<$rust>() as u64,)*
                }
            }

            /// The name in messages and on the wire: `bf16`.
            #[must_use]
            pub fn name(self) -> &'static str {
                match self {
                    $(Self::$name => stringify!($rust),)*
                }
            }
        }

        $(
            impl sealed::Sealed for $rust {}
            impl Element for $rust {
                const TYPE: ElementType = ElementType::$name;
            }
        )*
    };
}
elements! {
    /// Signed, 8 bits.
    I8 = i8,
    /// Unsigned, 8 bits.
    U8 = u8,
    /// Signed, 16 bits.
    I16 = i16,
    /// Unsigned, 16 bits.
    U16 = u16,
    /// Signed, 32 bits.
    I32 = i32,
    /// Unsigned, 32 bits.
    U32 = u32,
    /// Signed, 64 bits.
    I64 = i64,
    /// Unsigned, 64 bits.
    U64 = u64,
    /// IEEE half precision.
    F16 = f16,
    /// The upper half of a single-precision number.
    Bf16 = bf16,
    /// Single precision.
    F32 = f32,
    /// Double precision.
    F64 = f64,
}

impl ElementType {
    /// Returns whether it is a floating-point type.
    #[must_use]
    pub fn is_float(self) -> bool {
        matches!(self, Self::F16 | Self::Bf16 | Self::F32 | Self::F64)
    }
}

impl fmt::Display for ElementType {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// How the elements of all ranks become one.
///
/// Sums and products of integers wrap. The least and the largest of floating-point numbers ignore
/// what is no number, unless all are.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Reduce {
    /// The sum.
    Sum,
    /// The product.
    Product,
    /// The least.
    Least,
    /// The largest.
    Largest,
    /// The sum, divided by the number of ranks. For floating-point types only.
    Average,
}

impl Reduce {
    /// All reductions.
    pub const ALL: [Self; 5] =
        [Self::Sum, Self::Product, Self::Least, Self::Largest, Self::Average];

    /// Checks that elements of this type can be reduced so.
    ///
    /// # Errors
    /// `InvalidArgument` for the average of integers.
    pub fn check(self, element: ElementType) -> Result<()> {
        if self == Self::Average && !element.is_float() {
            return Err(Error::invalid(format!(
                "the average of {element} is not defined; take Reduce::Sum, and divide"
            )));
        }
        Ok(())
    }
}

impl fmt::Display for Reduce {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        fmt::Debug::fmt(self, f)
    }
}
