//! Conditional nodes: a part of a plan that runs if a flag in memory is set, or as long as it is.
//!
//! The device reads the flag, and the host takes no part. The body is a plan of its own. To the
//! nodes around it the whole is one node, which reads the flag and what the body reads, and may
//! write what the body writes.
//!
//! # Order
//! The flag is read after everything that the node waits for. In a loop it is read again after the
//! whole body, and before the body's next run.
//!
//! This module must not know operations, nor which code runs the body.

use crate::kernel::{Access, Binding};
use leasehold_core::Name;
use std::any::Any;
use std::fmt;
use std::sync::Arc;

/// The kind of a condition: it says how often a body runs.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
#[non_exhaustive]
pub enum ConditionalKind {
    /// Once if the flag is not zero, else not at all.
    If,
    /// As long as the flag is not zero: none, one or many times.
    While,
}

impl ConditionalKind {
    /// The name in reports.
    #[must_use]
    pub fn name(self) -> &'static str {
        match self {
            Self::If => "branch",
            Self::While => "loop",
        }
    }
}

/// A part of a plan under a condition; [`Op::Conditional`](crate::Op::Conditional).
#[derive(Clone)]
pub struct Conditional {
    pub(crate) kind: ConditionalKind,
    pub(crate) name: Option<Name>,
    pub(crate) flag: Binding,
    pub(crate) body: Arc<dyn Body>,
}

/// A body, as an operation sees it. It is always a [`Plan`](crate::Plan), which has operations
/// itself.
pub(crate) trait Body: Any + Send + Sync + fmt::Debug {
    /// Calls `f` with each access of the operations.
    fn touches(&self, f: &mut dyn FnMut(u64, u64, Access));

    /// The body with replaced addresses.
    fn rebased(&self, map: &mut dyn FnMut(u64) -> Option<(u64, u64)>) -> Arc<dyn Body>;
}

impl Conditional {
    /// The kind.
    #[must_use]
    pub fn kind(&self) -> ConditionalKind {
        self.kind
    }

    /// The name in reports, if it has one.
    #[must_use]
    pub fn name(&self) -> Option<&Name> {
        self.name.as_ref()
    }

    /// The flag: four bytes, which are read as a `u32`.
    #[must_use]
    pub fn flag(&self) -> &Binding {
        &self.flag
    }

    /// Calls `f` with each access of the node: it reads the flag, and may leave what the body
    /// writes as it is.
    pub(crate) fn accesses(&self, f: &mut dyn FnMut(u64, u64, Access)) {
        f(self.flag.addr, self.flag.len, Access::Read);
        self.body.touches(&mut |addr, len, access| {
            f(addr, len, if access.writes() { Access::ReadWrite } else { access });
        });
    }

    /// As [`OpList::rebind`](crate::OpList::rebind). The body's dependencies are derived again,
    /// because buffers may share memory by now.
    pub(crate) fn rebase(&mut self, map: &mut dyn FnMut(u64) -> Option<(u64, u64)>) {
        if let Some((addr, native)) = map(self.flag.addr) {
            (self.flag.addr, self.flag.native) = (addr, native);
        }
        self.body = self.body.rebased(map);
    }
}

impl fmt::Display for Conditional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.name {
            Some(name) => write!(f, "{} {name}", self.kind.name()),
            None => f.write_str(self.kind.name()),
        }
    }
}

impl fmt::Debug for Conditional {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "Conditional({self}, flag at {:#x}, {:?})", self.flag.addr, self.body)
    }
}
