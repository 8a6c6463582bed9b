//! What is known of a kernel before it runs.
//!
//! This module must not know how that was found.

/// A parameter of a kernel.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Param {
    /// Its first byte in the arguments.
    pub offset: u32,
    /// Its bytes.
    pub size: u32,
    /// The parameter is a pointer.
    pub pointer: bool,
}

/// A kernel of a program.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Kernel {
    /// Its name as an entry: that of the source for `extern "C"`, a mangled one otherwise. Empty
    /// for a kernel of one file, which has no entry.
    pub name: String,
    /// The most threads of a block, if the source says so.
    pub threads: Option<u32>,
    /// What it takes. Empty for Metal.
    pub params: Vec<Param>,
}
