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
//! This module must not know which code runs the body.

use crate::kernel::{Access, Binding};
use crate::list::OpList;
use crate::op::Op;
use crate::plan::Plan;
use leasehold_core::defects::{Defect, planted};
use leasehold_core::{Error, Name, Result};
use std::fmt;

/// How often a body runs.
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
    kind: ConditionalKind,
    name: Option<Name>,
    flag: Binding,
    body: Plan,
}

impl Conditional {
    /// A conditional node. The flag is one `u32`; the body's dependencies are derived.
    ///
    /// # Errors
    /// `InvalidArgument` for a flag that is not four aligned bytes, an empty body, and a loop whose
    /// body does not write the flag; `Unsupported` for operations that a body cannot have.
    pub fn new(
        kind: ConditionalKind,
        name: Option<Name>,
        flag: Binding,
        body: OpList,
    ) -> Result<Self> {
        let flag = Binding { access: Access::Read, ..flag };
        let new = Self { kind, name, flag, body: Plan::new(body) };
        new.check()?;
        Ok(new)
    }

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

    /// What runs under the condition.
    #[must_use]
    pub fn body(&self) -> &Plan {
        &self.body
    }

    /// Checks flag and body again, as they are now.
    ///
    /// # Errors
    /// As [`new`](Self::new).
    pub fn check(&self) -> Result<()> {
        let Binding { addr, len, .. } = self.flag;
        if len != 4 || !addr.is_multiple_of(4) {
            return Err(Error::invalid(format!(
                "the flag of a {self} is {len} bytes at {addr:#x}; give one u32 (4 bytes at a multiple of 4)"
            )));
        }
        if self.body.is_empty() {
            return Err(Error::invalid(format!(
                "the body of a {self} is empty; record at least one operation with the runtime that the body is lent"
            )));
        }
        let mut writes_flag = false;
        for op in self.body.ops.iter() {
            Self::admit(&op)?;
            if let Op::Conditional(inner) = &op {
                inner.check()?;
            }
            op.for_each_access(|at, bytes, access| {
                let touched = Binding { addr: at, len: bytes, ..self.flag };
                writes_flag |= access.writes() && touched.overlaps(&self.flag);
            });
        }
        if self.kind == ConditionalKind::While && !writes_flag {
            return Err(Error::invalid(format!(
                "nothing in the body of a {self} writes its flag, so it would never end; write the flag in the body, or record a branch"
            )));
        }
        Ok(())
    }

    /// Checks that a body can have the operation.
    ///
    /// # Errors
    /// `Unsupported` for one that it cannot have.
    pub fn admit(op: &Op<'_>) -> Result<()> {
        match op {
            Op::Dispatch(_) | Op::Copy(_) | Op::Fill(_) | Op::Foreign(_) | Op::Conditional(_) => {
                Ok(())
            }
            other => Err(Error::Unsupported(
                format!(
                    "a {} in the body of a loop or branch, which has launches, copies within the device, fills, library calls, loops and branches: \
                     record it outside the body",
                    other.kind()
                )
                .into(),
            )),
        }
    }

    /// Calls `f` with each access of the node: it reads the flag, and may leave what the body
    /// writes as it is.
    pub(crate) fn for_each_access(&self, f: &mut dyn FnMut(u64, u64, Access)) {
        f(self.flag.addr, self.flag.len, Access::Read);
        for op in self.body.ops.iter() {
            op.for_each_access(|addr, len, access| {
                let access = match access.writes() {
                    true if planted(Defect::BodyUnseen) => Access::Read,
                    true => Access::ReadWrite,
                    false => access,
                };
                f(addr, len, access);
            });
        }
    }

    /// As [`OpList::rebind`]. The body's dependencies are derived again, because buffers may share
    /// memory by now.
    pub(crate) fn rebind(&mut self, map: &mut dyn FnMut(u64) -> Option<(u64, u64)>) {
        if let Some((addr, native)) = map(self.flag.addr) {
            (self.flag.addr, self.flag.native) = (addr, native);
        }
        let mut ops = std::mem::take(&mut self.body.ops);
        ops.rebind_with(map);
        self.body = Plan::new(ops);
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
        write!(f, "Conditional({self}, flag at {:#x}, {:?})", self.flag.addr, self.body.ops)
    }
}
