//! A kernel's key and its cache of pipelines.
//!
//! # Protocol
//! Cells belong to runtimes, by serial. A cell is filled once, under the lock: the lease first, then the serial with release; a reader that
//! finds its runtime's serial may use the lease as long as the runtime lives. Only the end of that runtime empties the cell, when
//! nobody can borrow from it any more: whoever borrows holds a stream, which holds the runtime.

use crate::runtime::{Runtime, RuntimeInner};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, OnceLock, UnsafeCell};
use leasehold_core::{Lease, Result};
use leasehold_hal::{KernelDesc, Pipeline};
use std::fmt;

const CELLS: usize = 4;

struct Cell {
    serial: AtomicU64,
    pipeline: UnsafeCell<Option<Lease<Pipeline>>>,
}

struct Block {
    cells: [Cell; CELLS],
    next: OnceLock<Box<Block>>,
}

impl Block {
    fn new() -> Self {
        Self {
            cells: std::array::from_fn(|_| Cell { serial: AtomicU64::new(0), pipeline: UnsafeCell::new(None) }),
            next: OnceLock::new(),
        }
    }
}

/// The shared part of a base.
pub(crate) struct BaseCell {
    /// One per device kind: the first whose source the device takes is used.
    descs: Vec<KernelDesc<'static>>,
    first: Block,
    fill: Mutex<()>,
}

// SAFETY: cells are written under the lock before their serial is published, and emptied when nobody can borrow from them.
unsafe impl Sync for BaseCell {}
// SAFETY: everything in it may go to another thread.
unsafe impl Send for BaseCell {}

impl BaseCell {
    #[inline]
    fn find(&self, serial: u64) -> Option<&Lease<Pipeline>> {
        let mut block = &self.first;
        loop {
            for cell in &block.cells {
                if cell.serial.load(Ordering::Acquire) == serial {
                    // SAFETY: published with this serial, and emptied only when the runtime of the serial is gone.
                    return unsafe { (*cell.pipeline.get()).as_ref() };
                }
            }
            block = block.next.get()?;
        }
    }

    /// Empties the cell of a runtime.
    ///
    /// # Safety
    /// - Nobody borrows from that cell: the runtime of the serial is gone.
    pub(crate) unsafe fn forget(&self, serial: u64) {
        let lease = {
            let _guard = self.fill.lock();
            let mut block = Some(&self.first);
            let mut found = None;
            while let Some(b) = block {
                for cell in &b.cells {
                    if cell.serial.load(Ordering::Relaxed) == serial {
                        // SAFETY: by the contract nobody reads it.
                        found = unsafe { (*cell.pipeline.get()).take() };
                        cell.serial.store(0, Ordering::Release);
                    }
                }
                block = b.next.get().map(|b| &**b);
            }
            found
        };
        drop(lease);
    }
}

/// A kernel's key and its cache of pipelines, one per device. Clones are the same base.
#[doc(alias("MpsKernelBase", "CudaKernelBase", "CpuKernelBase"))]
#[derive(Clone)]
pub struct KernelBase(Arc<BaseCell>);

impl KernelBase {
    /// A kernel with one source.
    ///
    /// # Errors
    /// `InvalidArgument` for a description beyond the limits (30 bindings, 4,096 bytes of parameters).
    pub fn new(desc: KernelDesc<'static>) -> Result<Self> {
        Self::with_sources(vec![desc])
    }

    /// A kernel with a source for each of several backends; each device uses the first that it takes.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidArgument` without any source, or when they declare different bindings or parameters.
    pub fn with_sources(descs: Vec<KernelDesc<'static>>) -> Result<Self> {
        if descs.is_empty() {
            return Err(leasehold_core::Error::invalid("a kernel needs a source"));
        }
        descs.iter().try_for_each(KernelDesc::validate)?;
        if let Some(other) = descs.iter().find(|d| d.bindings != descs[0].bindings || d.params != descs[0].params) {
            return Err(leasehold_core::Error::invalid(format!(
                "the sources of kernel {} declare different bindings or parameters than {}",
                other.name, descs[0].name
            )));
        }
        Ok(Self(Arc::new(BaseCell { descs, first: Block::new(), fill: Mutex::new(()) })))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.0.descs[0].name
    }

    /// Makes the kernel ready on a device beforehand, so that the first launch does not compile.
    ///
    /// # Errors
    /// As [`Device::pipeline`](leasehold_hal::Device::pipeline).
    pub fn prepare(&self, runtime: &Runtime) -> Result<()> {
        self.pipeline(&runtime.inner).map(drop)
    }

    /// The pipeline on a runtime's device.
    #[inline]
    pub(crate) fn pipeline(&self, runtime: &Arc<RuntimeInner>) -> Result<&Lease<Pipeline>> {
        match self.0.find(runtime.serial()) {
            Some(lease) => Ok(lease),
            None => self.pipeline_slow(runtime),
        }
    }

    #[cold]
    fn pipeline_slow(&self, runtime: &Arc<RuntimeInner>) -> Result<&Lease<Pipeline>> {
        let mut refused = None;
        let mut made = None;
        for desc in &self.0.descs {
            match runtime.device.pipeline(desc) {
                Ok(lease) => {
                    made = Some(lease);
                    break;
                }
                Err(e @ leasehold_core::Error::Unsupported(_)) => refused = Some(e),
                Err(e) => return Err(e),
            }
        }
        let Some(lease) = made else {
            return Err(refused.unwrap_or_else(|| leasehold_core::Error::invalid("a kernel without sources")));
        };
        let guard = self.0.fill.lock();
        if self.0.find(runtime.serial()).is_none() {
            let mut block = &self.0.first;
            let cell = loop {
                match block.cells.iter().find(|c| c.serial.load(Ordering::Relaxed) == 0) {
                    Some(cell) => break cell,
                    None => block = block.next.get_or_init(|| Box::new(Block::new())),
                }
            };
            // SAFETY: under the lock, and no reader looks into a cell whose serial is 0.
            unsafe { *cell.pipeline.get() = Some(lease) };
            cell.serial.store(runtime.serial(), Ordering::Release);
            drop(guard);
            runtime.adopt(&self.0);
        }
        self.0
            .find(runtime.serial())
            .ok_or_else(|| leasehold_core::Error::state("a kernel's cache was emptied meanwhile"))
    }
}

impl fmt::Debug for KernelBase {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "KernelBase({})", self.name())
    }
}
