//! Objects whose count has reached zero, as values.
//!
//! This module must not know how they are destroyed.

use crate::pool::TensorKey;
use crate::table::{Entry, Kind};

/// An object to be destroyed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Dead {
    pub(crate) addr: usize,
    pub(crate) generation: u64,
    pub(crate) destructor: usize,
    pub(crate) kind: Kind,
    /// A tensor that has left the quarantine.
    pub(crate) left_quarantine: bool,
    /// Left by a thread that has ended together with its scopes. So no scope remains whose end it
    /// could wait for.
    pub(crate) orphan: bool,
}

impl Dead {
    #[inline(always)]
    pub(crate) fn new(entry: &Entry) -> Self {
        let Entry { addr, generation, destructor, kind, .. } = *entry;
        Self { addr, generation, destructor, kind, left_quarantine: false, orphan: false }
    }
}

/// A tensor in quarantine.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Waiting {
    pub(crate) dead: Dead,
    pub(crate) key: Option<TensorKey>,
    pub(crate) bytes: u64,
    /// The scope in which the tensor died.
    pub(crate) depth: u32,
}
