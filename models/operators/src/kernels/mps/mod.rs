//! Metal kernels: sources, and the geometry of launches.
//!
//! | file | what |
//! |---|---|
//! | `common.metal` | parameters, element types, sums; goes before each of the others |
//! | `*.metal` | the kernels, a family in each file |
//!
//! A Metal kernel has the name, the operands and the parameters of the CPU kernel
//! ([`KernelSpec`](super::cpu::tile::KernelSpec)), whose checks run before every launch. Operand
//! `i` is buffer `i`, and the parameters are the buffer after the last operand. The driver compiles
//! the sources at run time, for every family that has Metal 3.1, with arithmetic that keeps NaN and
//! infinity. The tests compile them for the host and compare them with the CPU's.
//!
//! The sources declare threadgroup memory, within 32 KiB. Sums are f32, no operation is atomic, and
//! each element is computed in a fixed order. So a result depends on the parameters alone.
//!
//! This module must not know the driver.

use super::blocks::{Blocks, from_bytes, kernel_list};
use super::cpu::tile::Refusal;
use leasehold::kernel::Grid;

/// A library of kernels.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Module {
    /// The file's name.
    pub name: &'static str,
    /// The whole text, with the common part.
    pub source: &'static str,
}

macro_rules! modules {
    ($($(#[$meta:meta])* $module:ident = $name:literal;)*) => {
        $($(#[$meta])* pub static $module: Module = Module {
            name: concat!($name, ".metal"),
            source: concat!(include_str!("common.metal"), include_str!(concat!($name, ".metal"))),
        };)*
        /// Every library.
        pub static MODULES: &[&Module] = &[$(&$module),*];
    };
}

modules! {
    /// Matrix products.
    LINEAR = "linear";
    /// Root-mean-square normalisation.
    NORM = "norm";
    /// Rotary embedding and appending to caches.
    ROPE = "rope";
    /// Attention.
    ATTENTION = "attention";
    /// Rows of a table.
    EMBEDDING = "embedding";
    /// Element by element, fills and copies.
    ELEMENTWISE = "elementwise";
    /// Sampling: from logits to the next token.
    SAMPLING = "sampling";
    /// Checks of values.
    CHECK = "check";
}

/// The registry entry of a Metal kernel.
#[derive(Debug, Clone, Copy)]
pub struct MpsSpec {
    /// The name: the CPU kernel's, and the function's in the library.
    pub name: &'static str,
    /// The library that contains the kernel.
    pub module: &'static Module,
    geometry: fn(&[u8]) -> Result<Grid, Refusal>,
}

impl MpsSpec {
    /// The kernel called `name`.
    #[must_use]
    pub fn find(name: &str) -> Option<&'static Self> {
        KERNELS.iter().find(|spec| spec.name == name)
    }

    /// Threadgroups and threads of a launch with parameters that the CPU kernel's `plan` has
    /// accepted.
    ///
    /// # Errors
    /// The reason, if the parameters exceed the limits of a launch.
    pub fn geometry(&self, params: &[u8]) -> Result<Grid, Refusal> {
        let why = |why| format!("kernel {} on Metal: {why}", self.name).into();
        (self.geometry)(params).map_err(why)
    }

    const fn of<K: Blocks>(module: &'static Module) -> Self {
        Self { name: K::NAME, module, geometry: |params| K::geometry(&from_bytes(params)?) }
    }
}

/// Every kernel.
pub static KERNELS: &[MpsSpec] = kernel_list!(MpsSpec);

#[cfg(test)]
mod tests;
