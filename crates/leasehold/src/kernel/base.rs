//! A kernel's key and its cache of pipelines.
//!
//! # Protocol
//! Cells belong to runtimes, by serial. A cell is filled once, under the lock: the lease first,
//! then the serial with release; a reader that finds its runtime's serial may use the lease as long
//! as the runtime lives. Only the end of that runtime empties the cell, when nobody can borrow from
//! it any more: whoever borrows holds a stream, which holds the runtime.

use crate::kernel::rules::{Rules, with_more, written};
use crate::runtime::{Forget, Runtime, RuntimeInner};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex, OnceLock, UnsafeCell};
use leasehold_core::{Lease, Result};
use leasehold_hal::{KernelDesc, Limits, Pipeline};
use std::fmt;

const CELLS: usize = 4;

/// A kernel that is ready on a device: what launches need of it.
pub(crate) struct Prepared {
    pub(crate) pipeline: Lease<Pipeline>,
    pub(crate) rules: Arc<Rules>,
    /// Which of the pipeline's bindings are written.
    pub(crate) written: u32,
}

struct Cell {
    serial: AtomicU64,
    prepared: UnsafeCell<Option<Prepared>>,
}

struct Block {
    cells: [Cell; CELLS],
    next: OnceLock<Box<Block>>,
}

impl Block {
    fn new() -> Self {
        Self {
            cells: std::array::from_fn(|_| Cell {
                serial: AtomicU64::new(0),
                prepared: UnsafeCell::new(None),
            }),
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

// SAFETY: cells are written under the lock before their serial is published, and emptied when
// nobody can borrow from them.
unsafe impl Sync for BaseCell {}
// SAFETY: everything in it may go to another thread.
unsafe impl Send for BaseCell {}

impl BaseCell {
    #[inline]
    fn find(&self, serial: u64) -> Option<&Prepared> {
        let mut block = &self.first;
        loop {
            for cell in &block.cells {
                if cell.serial.load(Ordering::Acquire) == serial {
                    // SAFETY: published with this serial, and emptied only when the runtime of the
                    // serial is gone.
                    return unsafe { (*cell.prepared.get()).as_ref() };
                }
            }
            block = block.next.get()?;
        }
    }
}

impl Forget for BaseCell {
    /// Empties the cell of a runtime.
    unsafe fn forget(&self, serial: u64) {
        let gone = {
            let _guard = self.fill.lock();
            let mut block = Some(&self.first);
            let mut found = None;
            while let Some(b) = block {
                for cell in &b.cells {
                    if cell.serial.load(Ordering::Relaxed) == serial {
                        // SAFETY: by the contract nobody reads it.
                        found = unsafe { (*cell.prepared.get()).take() };
                        cell.serial.store(0, Ordering::Release);
                    }
                }
                block = b.next.get().map(|b| &**b);
            }
            found
        };
        drop(gone);
    }
}

/// A kernel's key and its cache of pipelines, one per device. Clones are the same base.
///
/// The caller that makes a base vouches for the kernel's code; a caller that launches it need not.
/// The runtime asks the kernel's [`check`](KernelDesc::check) before every launch, every recording
/// and every update of a graph.
///
/// ```
/// use leasehold::kernel::{CpuArgs, KernelCheck, KernelDesc, KernelSource};
/// use leasehold::{Access, DeviceId, Error, KernelBase, Runtime, View};
///
/// const TILE: usize = 256;
///
/// /// Doubles `TILE` floats.
/// unsafe fn double(args: &CpuArgs<'_>) {
///     // SAFETY: the check accepts grids of one dimension only, so each tile has elements of
///     // its own.
///     let x = unsafe { args.slice_mut::<f32>(0, args.tile()[0] as usize * TILE, TILE) };
///     x.iter_mut().for_each(|x| *x *= 2.0);
/// }
///
/// # fn main() -> leasehold::Result<()> {
/// let runtime = Runtime::open(DeviceId::cpu(0))?;
/// let check = KernelCheck::new(|launch| match launch.grid {
///     [tiles, 1, 1] => launch.want(0, u64::from(tiles) * TILE as u64 * 4),
///     _ => Err(Error::invalid("a grid of one dimension")),
/// });
/// let access = [Access::ReadWrite];
/// let desc = KernelDesc::new("double", KernelSource::Cpu(double), &access, check).aligned(4);
/// // SAFETY: a launch that the check accepts touches floats of binding 0 that exist, each in
/// // one tile.
/// let kernel = unsafe { KernelBase::new(desc) }?;
/// let x = runtime.upload(&[1.0f32; 512])?;
/// let launch = |tiles| runtime.stream().launch(&kernel, &[x.read_write()], &(), tiles);
/// launch(2)?;
/// assert!(launch(3).is_err(), "768 floats of 512");
/// assert_eq!(runtime.to_vec::<f32>(&x)?, [2.0; 512]);
/// # Ok(())
/// # }
/// ```
#[doc(alias("MpsKernelBase", "CudaKernelBase", "CpuKernelBase"))]
#[derive(Clone)]
pub struct KernelBase(Arc<BaseCell>);

impl KernelBase {
    /// A kernel with one source.
    ///
    /// # Errors
    /// `InvalidArgument` for a description that [`KernelDesc::validate`] refuses: no name or entry,
    /// more than 30 bindings or 4,096 bytes of parameters, alignments that are none.
    ///
    /// # Safety
    /// The caller vouches for every launch that the description's [`check`](KernelDesc::check)
    /// accepts, and for every later launch of a graph that such a launch was recorded into:
    /// - The code touches no memory but its bindings, its parameters, its shared memory and what it
    ///   knows to be valid besides. It reads bindings that are declared
    ///   [`Read`](crate::Access::Read) or [`ReadWrite`](crate::Access::ReadWrite) only, and writes
    ///   those that are declared [`Write`](crate::Access::Write) or `ReadWrite` only.
    /// - That holds whatever the bindings' bytes are: a number that is read from memory is checked
    ///   before it is used as an index. Bytes of a `Write` binding are not specified when the
    ///   kernel begins.
    /// - Tiles or blocks run in any order and at the same time. Two of them touch the same bytes
    ///   only if both read them or both access them atomically.
    /// - Code that is declared to wait for the kernels in front of it keeps the rules of
    ///   [`KernelDesc::dependent_launch`] and [`KernelDesc::early_reads`].
    /// - The code is of the kind that the source says, is called with the declared bindings and
    ///   parameters in this order, and stays valid as long as the base and all that was recorded
    ///   with it.
    ///
    /// The runtime vouches for the rest before it asks the check: bindings of the declared number,
    /// access and alignment, in live memory of the device; none of which overlap beyond what
    /// [`KernelDesc::overlap`] allows; parameters of the declared size; a grid and a block within
    /// the device's limits.
    pub unsafe fn new(desc: KernelDesc<'static>) -> Result<Self> {
        // SAFETY: by the caller's contract, which is the same for one source.
        unsafe { Self::with_sources(vec![desc]) }
    }

    /// A kernel with a source for each of several backends; each device uses the first that it
    /// takes.
    ///
    /// # Errors
    /// As [`new`](Self::new); `InvalidArgument` without any source, or when they declare different
    /// bindings, parameters, alignments, overlaps or tensor maps, or have checks that are not
    /// clones of one.
    ///
    /// # Safety
    /// - As [`new`](Self::new), for each of the sources: they share one check.
    pub unsafe fn with_sources(descs: Vec<KernelDesc<'static>>) -> Result<Self> {
        if descs.is_empty() {
            return Err(leasehold_core::Error::invalid(
                "a kernel needs a source; describe one at least",
            ));
        }
        descs.iter().try_for_each(KernelDesc::validate)?;
        let first = &descs[0];
        let alike = |d: &KernelDesc<'_>| {
            d.bindings == first.bindings
                && d.params == first.params
                && (0..d.bindings.len()).all(|i| d.alignment_of(i) == first.alignment_of(i))
                && d.overlap == first.overlap
                && d.maps == first.maps
                && d.check.same(&first.check)
        };
        if let Some(other) = descs.iter().find(|d| !alike(d)) {
            return Err(leasehold_core::Error::invalid(format!(
                "the sources of kernel {} declare different bindings, parameters or checks than {}; make them the same",
                other.name, first.name
            )));
        }
        Ok(Self(Arc::new(BaseCell { descs, first: Block::new(), fill: Mutex::new(()) })))
    }

    /// The name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.desc().name
    }

    /// The description of the first source, whose rules are those of all.
    pub(crate) fn desc(&self) -> &KernelDesc<'static> {
        &self.0.descs[0]
    }

    /// Makes the kernel ready on a device beforehand, so that the first launch does not compile.
    ///
    /// # Errors
    /// As [`Device::pipeline`](leasehold_hal::Device::pipeline).
    pub fn prepare(&self, runtime: &Runtime) -> Result<()> {
        self.prepared(&runtime.inner).map(drop)
    }

    /// The blocks of this kernel that the runtime's device runs at the same time while nothing else
    /// runs, each with so many threads and so many bytes of shared memory. A cooperative launch has
    /// no more. Makes the kernel ready as [`prepare`](Self::prepare) does.
    ///
    /// NVIDIA: [occupancy][page].
    ///
    /// # Errors
    /// As [`prepare`](Self::prepare); `Unsupported` on devices that run blocks one by one.
    ///
    /// [page]: https://docs.nvidia.com/cuda/cuda-driver-api/group__CUDA__OCCUPANCY.html
    #[doc(alias("cuOccupancyMaxActiveBlocksPerMultiprocessor", "cuOccupancyMaxActiveClusters"))]
    pub fn resident_blocks(&self, runtime: &Runtime, threads: u32, shared: u32) -> Result<u64> {
        let prepared = self.prepared(&runtime.inner)?;
        runtime.inner.device.resident_blocks(&prepared.pipeline, threads, shared)
    }

    /// The kernel on a runtime's device.
    #[inline]
    pub(crate) fn prepared(&self, runtime: &Arc<RuntimeInner>) -> Result<&Prepared> {
        match self.0.find(runtime.serial()) {
            Some(prepared) => Ok(prepared),
            None => self.prepare_slow(runtime),
        }
    }

    #[cold]
    fn prepare_slow(&self, runtime: &Arc<RuntimeInner>) -> Result<&Prepared> {
        let mut refused = None;
        let mut made = None;
        for desc in &self.0.descs {
            match runtime.device.pipeline(desc) {
                Ok(lease) => {
                    made = Some((desc, lease));
                    break;
                }
                Err(e @ leasehold_core::Error::Unsupported(_)) => refused = Some(e),
                Err(e) => return Err(e),
            }
        }
        let Some((desc, pipeline)) = made else {
            return Err(refused
                .unwrap_or_else(|| leasehold_core::Error::invalid("a kernel without sources")));
        };
        if pipeline.bindings.len() > Limits::BINDINGS as usize {
            return Err(leasehold_core::Error::state(
                "a pipeline of more bindings than any kernel has",
            ));
        }
        let written = written(pipeline.bindings.iter().copied());
        let rules = Arc::new(Rules::of(desc, with_more(desc, &runtime.device, &pipeline)));
        let prepared = Prepared { pipeline, rules, written };
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
            unsafe { *cell.prepared.get() = Some(prepared) };
            cell.serial.store(runtime.serial(), Ordering::Release);
            drop(guard);
            runtime.adopt(Arc::downgrade(&(self.0.clone() as Arc<dyn Forget>)));
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
