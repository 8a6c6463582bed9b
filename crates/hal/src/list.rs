//! An owned list of operations: a recording, or the input of a CPU queue or of the simulated
//! device.
//!
//! The list has three flat vectors: records, bindings and parameter bytes. So a recording of
//! thousands of operations needs few allocations. A list that is cleared and refilled needs none.
//!
//! This module must not know which code runs the list.

use crate::conditional::Conditional;
use crate::copies::{Copies, Copy1d};
use crate::graph::GraphExec;
use crate::kernel::{Binding, Pipeline};
use crate::op::{
    Copy2d, Dispatch, Download, Fill, ForeignCall, HostCall, KeepAlive, Op, TimestampQuery, Upload,
};
use leasehold_core::panics::Kept;
use leasehold_core::{Error, Lease, Result, Timepoint};
use std::fmt;

#[derive(Clone)]
enum Record {
    Wait(Timepoint),
    Dispatch {
        pipeline: Lease<Pipeline>,
        grid: [u32; 3],
        block: [u32; 3],
        shared: u32,
        bindings: FlatRange,
        params: FlatRange,
    },
    Copy(Copy2d),
    Copies {
        pieces: Box<[Copy1d]>,
        settled: bool,
    },
    Fill(Fill),
    Upload {
        src: usize,
        dst: u64,
        native: u64,
        bytes: u64,
        keep: Option<Kept<KeepAlive>>,
    },
    Download {
        src: u64,
        native: u64,
        dst: usize,
        bytes: u64,
        keep: Option<Kept<KeepAlive>>,
    },
    WriteTimestamp(Lease<TimestampQuery>),
    /// In a box: it is larger than the others, and rare.
    Foreign(Box<ForeignCall>),
    Host(HostCall),
    Graph(Lease<dyn GraphExec>),
    Conditional(Box<Conditional>),
}

/// A part of one of the flat vectors.
#[derive(Clone, Copy)]
struct FlatRange {
    at: usize,
    len: u32,
}

impl FlatRange {
    fn end(self) -> usize {
        self.at + self.len as usize
    }

    fn of<T>(self, all: &[T]) -> &[T] {
        &all[self.at..self.end()]
    }

    /// Appends `new` to `all`.
    fn append<T: Copy>(all: &mut Vec<T>, new: &[T]) -> FlatRange {
        let at = all.len();
        all.extend_from_slice(new);
        FlatRange { at, len: new.len() as u32 }
    }

    /// Moves the part down to `to`, which advances past it.
    fn move_down<T: Copy>(&mut self, all: &mut [T], to: &mut usize) {
        all.copy_within(self.at..self.end(), *to);
        self.at = *to;
        *to = self.end();
    }
}

const _: () = assert!(size_of::<Record>() <= 80);

/// An owned list of operations. Its drop never panics, whatever host memory and closures do in
/// theirs.
#[derive(Clone, Default)]
pub struct OpList {
    records: Vec<Record>,
    bindings: Vec<Binding>,
    params: Vec<u8>,
}

impl OpList {
    /// An empty list.
    #[must_use]
    pub const fn new() -> Self {
        Self { records: Vec::new(), bindings: Vec::new(), params: Vec::new() }
    }

    /// The number of operations.
    #[must_use]
    pub fn len(&self) -> usize {
        self.records.len()
    }

    /// Returns whether the list is empty.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.records.is_empty()
    }

    /// Removes all operations and keeps the capacity.
    pub fn clear(&mut self) {
        self.records.clear();
        self.bindings.clear();
        self.params.clear();
    }

    /// Reserves capacity for more operations, bindings and bytes of parameters, so that pushes do
    /// not allocate.
    pub fn reserve(&mut self, ops: usize, bindings: usize, params: usize) {
        self.records.reserve(ops);
        self.bindings.reserve(bindings);
        self.params.reserve(params);
    }

    /// Drops everything that the operation at `index` holds (objects, host memory, closures) and
    /// leaves an empty copy in its place. A queue uses this to keep objects alive until their
    /// timepoint and no longer.
    pub fn vacate(&mut self, index: usize) {
        if let Some(record) = self.records.get_mut(index) {
            *record = Record::Copy(Copy2d::linear((0, 0), (0, 0), 0));
        }
    }

    /// Shortens the list to its first `len` operations, for recordings that roll back.
    pub fn truncate(&mut self, len: usize) {
        if len >= self.records.len() {
            return;
        }
        self.records.truncate(len);
        // Records keep the order of their parts, so the last remaining dispatch determines the end
        // of both vectors.
        let last = self.records.iter().rev().find_map(|r| match r {
            Record::Dispatch { bindings, params, .. } => Some((bindings.end(), params.end())),
            _ => None,
        });
        let (bindings, params) = last.unwrap_or_default();
        self.bindings.truncate(bindings);
        self.params.truncate(params);
    }

    /// Appends a copy of `op` and returns its index. Objects are leased, bytes are copied.
    pub fn push(&mut self, op: &Op<'_>) -> usize {
        let record = match *op {
            Op::Wait(p) => Record::Wait(p),
            Op::Dispatch(d) => Record::Dispatch {
                pipeline: d.pipeline.clone(),
                grid: d.grid,
                block: d.block,
                shared: d.shared,
                bindings: FlatRange::append(&mut self.bindings, d.bindings),
                params: FlatRange::append(&mut self.params, d.params),
            },
            Op::Copy(c) => Record::Copy(c),
            Op::Copies(c) => {
                Record::Copies { pieces: c.pieces().into(), settled: c.has_settled_sources() }
            }
            Op::Fill(f) => Record::Fill(f),
            Op::Upload(u) => Record::Upload {
                src: u.src as usize,
                dst: u.dst,
                native: u.native,
                bytes: u.bytes,
                keep: u.keep.cloned().map(Kept::new),
            },
            Op::Download(d) => Record::Download {
                src: d.src,
                native: d.native,
                dst: d.dst as usize,
                bytes: d.bytes,
                keep: d.keep.cloned().map(Kept::new),
            },
            Op::WriteTimestamp(t) => Record::WriteTimestamp(t.clone()),
            Op::Foreign(f) => Record::Foreign(Box::new((*f).clone())),
            Op::Host(h) => Record::Host(h.clone()),
            Op::Graph(g) => Record::Graph(g.clone()),
            Op::Conditional(c) => Record::Conditional(Box::new(c.clone())),
        };
        self.records.push(record);
        self.records.len() - 1
    }

    /// The operation at `index`.
    #[must_use]
    pub fn get(&self, index: usize) -> Option<Op<'_>> {
        self.records.get(index).map(|r| self.view(r))
    }

    /// The operations in order.
    pub fn iter(&self) -> impl ExactSizeIterator<Item = Op<'_>> + DoubleEndedIterator {
        self.records.iter().map(|r| self.view(r))
    }

    #[inline]
    fn view<'a>(&'a self, record: &'a Record) -> Op<'a> {
        match record {
            Record::Wait(p) => Op::Wait(*p),
            Record::Dispatch { pipeline, grid, block, shared, bindings, params } => {
                Op::Dispatch(Dispatch {
                    pipeline,
                    grid: *grid,
                    block: *block,
                    shared: *shared,
                    bindings: bindings.of(&self.bindings),
                    params: params.of(&self.params),
                })
            }
            Record::Copy(c) => Op::Copy(*c),
            Record::Copies { pieces, settled } => Op::Copies(Copies::again(pieces, *settled)),
            Record::Fill(f) => Op::Fill(*f),
            Record::Upload { src, dst, native, bytes, keep } => Op::Upload(Upload {
                src: *src as *const u8,
                dst: *dst,
                native: *native,
                bytes: *bytes,
                keep: keep.as_deref(),
            }),
            Record::Download { src, native, dst, bytes, keep } => Op::Download(Download {
                src: *src,
                native: *native,
                dst: *dst as *mut u8,
                bytes: *bytes,
                keep: keep.as_deref(),
            }),
            Record::WriteTimestamp(t) => Op::WriteTimestamp(t),
            Record::Foreign(f) => Op::Foreign(f),
            Record::Host(h) => Op::Host(h),
            Record::Graph(g) => Op::Graph(g),
            Record::Conditional(c) => Op::Conditional(c),
        }
    }

    /// Replaces addresses. `map` returns the new address and native word of an old address, or
    /// `None` to keep it. This turns symbolic addresses into real ones when a recording stops. Host
    /// addresses of uploads and downloads stay. The contents of a closure stay too; only the
    /// accesses that a foreign call declares are replaced.
    pub fn rebind(&mut self, mut map: impl FnMut(u64) -> Option<(u64, u64)>) {
        self.rebind_with(&mut map);
    }

    pub(crate) fn rebind_with(&mut self, map: &mut dyn FnMut(u64) -> Option<(u64, u64)>) {
        for record in &mut self.records {
            if let Record::Conditional(conditional) = record {
                conditional.rebase(map);
            }
        }
        let mut swap = |addr: &mut u64, native: &mut u64| {
            if let Some((a, n)) = map(*addr) {
                *addr = a;
                *native = n;
            }
        };
        self.bindings.iter_mut().for_each(|b| swap(&mut b.addr, &mut b.native));
        for record in &mut self.records {
            match record {
                Record::Copy(c) => {
                    swap(&mut c.src, &mut c.src_native);
                    swap(&mut c.dst, &mut c.dst_native);
                }
                Record::Copies { pieces, .. } => {
                    for piece in pieces {
                        swap(&mut piece.src, &mut piece.src_native);
                        swap(&mut piece.dst, &mut piece.dst_native);
                    }
                }
                Record::Fill(f) => swap(&mut f.dst, &mut f.native),
                Record::Upload { dst, native, .. } => swap(dst, native),
                Record::Download { src, native, .. } => swap(src, native),
                Record::Foreign(call) => {
                    call.accesses.iter_mut().for_each(|b| swap(&mut b.addr, &mut b.native));
                }
                Record::Wait(_)
                | Record::Dispatch { .. }
                | Record::WriteTimestamp(_)
                | Record::Host(_)
                | Record::Graph(_)
                | Record::Conditional(_) => {}
            }
        }
    }

    /// Changes a dispatch in place.
    ///
    /// # Errors
    /// `InvalidArgument` for an index that is not a dispatch, another number of bindings, or
    /// another size of parameters.
    pub fn patch(
        &mut self,
        index: usize,
        new_bindings: Option<&[Binding]>,
        new_params: Option<&[u8]>,
        new_grid: Option<[u32; 3]>,
    ) -> Result<()> {
        let Some(Record::Dispatch { grid, bindings, params, .. }) = self.records.get_mut(index)
        else {
            return Err(Error::invalid(format!("node {index} is not a dispatch of this graph")));
        };
        if new_bindings.is_some_and(|b| b.len() != bindings.len as usize) {
            return Err(Error::invalid(format!("node {index} has {} bindings", bindings.len)));
        }
        if new_params.is_some_and(|p| p.len() != params.len as usize) {
            return Err(Error::invalid(format!(
                "node {index} has {} bytes of parameters",
                params.len
            )));
        }
        if let Some(b) = new_bindings {
            self.bindings[bindings.at..bindings.end()].copy_from_slice(b);
        }
        if let Some(p) = new_params {
            self.params[params.at..params.end()].copy_from_slice(p);
        }
        if let Some(g) = new_grid {
            *grid = g;
        }
        Ok(())
    }

    /// Keeps the operations whose index `keep` accepts, in order. Bindings and parameters of the
    /// others are removed too.
    pub fn retain(&mut self, mut keep: impl FnMut(usize) -> bool) {
        let (mut i, mut bindings_end, mut params_end) = (0, 0, 0);
        let (all_bindings, all_params) = (&mut self.bindings, &mut self.params);
        self.records.retain_mut(|record| {
            i += 1;
            if !keep(i - 1) {
                return false;
            }
            if let Record::Dispatch { bindings, params, .. } = record {
                bindings.move_down(all_bindings, &mut bindings_end);
                params.move_down(all_params, &mut params_end);
            }
            true
        });
        self.bindings.truncate(bindings_end);
        self.params.truncate(params_end);
    }

    /// The memory of the list in bytes.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        (self.records.capacity() * size_of::<Record>()
            + self.bindings.capacity() * size_of::<Binding>()
            + self.params.capacity()) as u64
    }
}

impl fmt::Debug for OpList {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_list().entries(self.iter().map(|op| op.name())).finish()
    }
}
