//! The backing of device memory: pages of the system, by `mmap`.
//!
//! Addresses are reserved once and cost nothing. The backing makes granules of 2 MiB accessible,
//! advises the kernel to use huge pages, and gives granules back. If the system refuses the
//! reservation (`RLIMIT_AS`, a memory checker), the allocator asks for smaller ones. In the end it
//! works with segments.
//!
//! The system promises more memory than it has. So the backing itself refuses commitments beyond
//! the memory of the machine or of the control group. Such a refusal is an error, where otherwise
//! the out-of-memory killer would act.
//!
//! This module must not know how blocks are placed.

use crate::config::HugePages;
use crate::driver::memory;
use crate::driver::topology::Topology;
use crate::manager::device::DeviceState;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, BackingCaps, Chunk, HostKind};
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::sync::{Arc, Mutex};
use leasehold_core::{Error, OutOfMemory, Result, Text};

/// Bytes of a granule: a huge page on x86-64, and on AArch64 with 4 KiB pages.
const GRANULE: u64 = 2 << 20;

/// The allocator of the device's memory. The first call makes it.
///
/// # Errors
/// `OutOfMemory`.
pub fn of(device: &DeviceState) -> Result<&Allocator> {
    device.device_memory.get_or_make(|| make(device, "device memory"))
}

/// Makes a backing of pages of the system. All backings of a device share the machine's memory.
pub(crate) fn backing(device: &DeviceState) -> MmapBacking {
    MmapBacking::new(device.topology(), device.config().huge_pages, device.committed.clone())
}

/// Makes an allocator over pages of the system, for one kind of memory of a device.
pub(super) fn make(device: &DeviceState, what: &'static str) -> Result<Allocator> {
    let config = AllocatorConfig {
        name: Text::Owned(format!("{} {what}", device.id())),
        host_kind: HostKind::Pageable,
        debug: device.config().debug,
        trace_events: device.config().trace_events,
        ..AllocatorConfig::default()
    };
    Allocator::new(Box::new(backing(device)), config)
}

/// The backing of memory from `mmap`.
#[derive(Debug)]
pub struct MmapBacking {
    physical: u64,
    granule: u64,
    huge: bool,
    /// Committed bytes. The backings of a machine share this counter.
    committed: Arc<AtomicU64>,
    /// Address and length of each reservation.
    reservations: Mutex<Vec<(u64, u64)>>,
    calls: AtomicU64,
}

impl MmapBacking {
    /// A backing on this machine. Backings that share `committed` share the machine's memory.
    #[must_use]
    pub fn new(machine: &Topology, huge_pages: HugePages, committed: Arc<AtomicU64>) -> Self {
        let physical =
            if machine.memory == 0 { BackingCaps::default().physical } else { machine.memory };
        Self {
            physical,
            granule: GRANULE.max(machine.page),
            huge: huge_pages == HugePages::Advise,
            committed,
            reservations: Mutex::new(Vec::new()),
            calls: AtomicU64::new(0),
        }
    }

    fn call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }

    /// Counts bytes as committed, if that much memory is left.
    fn take(&self, bytes: u64) -> Result<Taken<'_>> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.physical);
        match self.committed.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Taken { backing: self, bytes }),
            Err(used) => Err(OutOfMemory::new("the machine's memory", bytes)
                .note(format!("{used} of {} bytes are committed", self.physical))
                .into()),
        }
    }

    fn is_reserved(&self, at: u64) -> bool {
        self.reservations.lock().iter().any(|&(from, len)| (from..from + len).contains(&at))
    }
}

fn heap_layout(bytes: u64, align: u64) -> Result<std::alloc::Layout> {
    std::alloc::Layout::from_size_align(bytes.max(1) as usize, align as usize)
        .map_err(|_| Error::invalid(format!("{bytes} bytes aligned to {align}")))
}

/// Bytes that are counted as committed. Unless they are kept, the drop subtracts them.
struct Taken<'a> {
    backing: &'a MmapBacking,
    bytes: u64,
}

impl Taken<'_> {
    fn keep(self) {
        std::mem::forget(self);
    }
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.backing.committed.fetch_sub(self.bytes, Ordering::AcqRel);
    }
}

// SAFETY: memory comes from `mmap` and the process's heap, which give no address twice. Commitments
// replace reserved pages only.
unsafe impl Backing for MmapBacking {
    fn caps(&self) -> BackingCaps {
        BackingCaps {
            vmm: true,
            granule: self.granule,
            physical: self.physical,
            reserve: true,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.call();
        let at = memory::reserve(bytes, self.granule)?;
        self.reservations.lock().push((at, bytes));
        Ok(at)
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        self.call();
        let taken = self.take(bytes)?;
        let addr = match at {
            Some(at) => {
                // SAFETY: the caller vouches that the range lies in a reservation of this backing
                // and that nothing is committed there.
                unsafe { memory::commit(at, bytes, self.huge) }?;
                at
            }
            None => memory::map_segment(bytes, self.granule, self.huge)?,
        };
        taken.keep();
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.call();
        // SAFETY: the caller vouches that `commit` gave the chunk, that it is given back once, and
        // that nothing uses it.
        unsafe {
            if self.is_reserved(chunk.addr) {
                memory::decommit(chunk.addr, chunk.bytes)
            } else {
                memory::unmap(chunk.addr, chunk.bytes)
            }
        }?;
        self.committed.fetch_sub(chunk.bytes, Ordering::AcqRel);
        Ok(())
    }

    unsafe fn release(&self, addr: u64, bytes: u64) {
        self.call();
        self.reservations.lock().retain(|&r| r != (addr, bytes));
        // SAFETY: the caller vouches that `reserve` gave the range and that nothing is committed in
        // it.
        if let Err(error) = unsafe { memory::unmap(addr, bytes) } {
            tracing::warn!(%error, "a reservation of addresses could not be given back");
        }
    }

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        if bytes > 0 {
            // SAFETY: the caller names committed memory of this backing, which is writable, and
            // nothing else uses it.
            unsafe { std::ptr::write_bytes(at as *mut u8, byte, bytes as usize) };
        }
        Ok(())
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        if bytes == 0 {
            return Ok(None);
        }
        // SAFETY: the caller names committed memory of this backing that was filled, so it is
        // initialised. Nothing writes it meanwhile. A program that does write it has a defect,
        // which this check is to find.
        let memory = unsafe { std::slice::from_raw_parts(at as *const u8, bytes as usize) };
        Ok(memory.iter().position(|&b| b != byte).map(|i| i as u64))
    }

    /// Allocates from the process's own heap, so that memory checkers (AddressSanitizer, valgrind)
    /// know every block.
    fn exact(&self, bytes: u64, align: u64) -> Result<Chunk> {
        self.call();
        let taken = self.take(bytes)?;
        let layout = heap_layout(bytes, align)?;
        // Zeroed: a typed read of memory that no operation wrote must see values.
        // SAFETY: the size of the layout is not 0.
        let at = unsafe { std::alloc::alloc_zeroed(layout) };
        if at.is_null() {
            return Err(OutOfMemory::new("the process's heap", bytes).into());
        }
        taken.keep();
        Ok(Chunk { addr: at.expose_provenance() as u64, bytes, native: 0 })
    }

    unsafe fn exact_free(&self, chunk: Chunk, align: u64) -> Result<()> {
        self.call();
        let layout = heap_layout(chunk.bytes, align)?;
        // SAFETY: the caller vouches that `exact` gave the chunk with this alignment, and that
        // nothing uses it.
        unsafe {
            std::alloc::dealloc(std::ptr::with_exposed_provenance_mut(chunk.addr as usize), layout)
        };
        self.committed.fetch_sub(chunk.bytes, Ordering::AcqRel);
        Ok(())
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
