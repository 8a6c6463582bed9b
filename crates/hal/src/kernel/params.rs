//! Types of parameters that a kernel reads.
//!
//! This module must not know where the bytes lie.

use bytemuck::AnyBitPattern;

/// A type as which a kernel reads its parameters: every type that implements
/// [`bytemuck::AnyBitPattern`], and no other.
#[diagnostic::on_unimplemented(
    message = "`{Self}` cannot be the parameters of a kernel",
    label = "not made of bytes alone",
    note = "give one `#[repr(C)]` struct with `#[derive(Clone, Copy, bytemuck::Pod, bytemuck::Zeroable)]` (crate `bytemuck`, feature `derive`), a number or an array; a tuple has no defined layout"
)]
pub trait FromParams: AnyBitPattern {}

#[diagnostic::do_not_recommend]
impl<T: AnyBitPattern> FromParams for T {}
