//! Memory that other processes may map: sealed anonymous files.
//!
//! The segments count as memory of the machine, as the pages of [`device`](super::device) do. An
//! imported segment counts in the process that made it.
//!
//! This module must not know how blocks are placed.

use crate::manager::device::DeviceState;
use leasehold_core::sync::Arc;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, OutOfMemory, Result};
use leasehold_hal::engine::shared_file::{SharedFile, SharedMapping};
use leasehold_hal::{SharedSegment, Sharing};
use std::os::fd::OwnedFd;

/// Bytes of a granule, as of the device's ordinary memory.
const GRANULE: u64 = 2 << 20;

/// The source of shareable memory of a device.
///
/// # Errors
/// `Unsupported` on a system without sealed files.
pub fn of(device: &DeviceState) -> Result<Arc<dyn Sharing>> {
    if !SharedFile::SUPPORTED {
        return Err(Error::Unsupported(
            format!("{}: this system has no sealed files to share memory by", device.id()).into(),
        ));
    }
    let physical = match device.topology().memory {
        0 => u64::MAX,
        known => known,
    };
    Ok(Arc::new(HostSharing { physical, committed: device.committed.clone() }))
}

struct HostSharing {
    physical: u64,
    /// Committed bytes, which the other sources of the machine's memory share.
    committed: Arc<AtomicU64>,
}

/// Committed bytes, which the drop subtracts.
struct Committed(Arc<AtomicU64>, u64);

impl Drop for Committed {
    fn drop(&mut self) {
        self.0.fetch_sub(self.1, Ordering::AcqRel);
    }
}

struct HostSegment {
    mapping: SharedMapping,
    file: SharedFile,
    /// `None`: another process made it.
    _committed: Option<Committed>,
}

impl HostSharing {
    fn commit(&self, bytes: u64) -> Result<Committed> {
        let fits = |used: u64| used.checked_add(bytes).filter(|&sum| sum <= self.physical);
        match self.committed.fetch_update(Ordering::AcqRel, Ordering::Relaxed, fits) {
            Ok(_) => Ok(Committed(self.committed.clone(), bytes)),
            Err(used) => Err(OutOfMemory::new("the machine's memory", bytes)
                .note(format!("{used} of {} bytes are committed", self.physical))
                .into()),
        }
    }
}

// SAFETY: each segment is a new file, or one that cannot shrink, and has a mapping of its own.
unsafe impl Sharing for HostSharing {
    fn granule(&self) -> u64 {
        GRANULE
    }

    fn create(&self, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let committed = self.commit(bytes)?;
        let file = SharedFile::new(bytes)?;
        let mapping = file.map(bytes)?;
        Ok(Arc::new(HostSegment { mapping, file, _committed: Some(committed) }))
    }

    fn import(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let file = SharedFile::open(descriptor)?;
        if file.bytes() != bytes {
            return Err(Error::invalid(format!(
                "the descriptor has {} bytes of shareable memory, and {bytes} were announced; send \
                 descriptor and description of one export",
                file.bytes()
            )));
        }
        let mapping = file.map(bytes)?;
        Ok(Arc::new(HostSegment { mapping, file, _committed: None }))
    }
}

// SAFETY: the mapping lives as long as this value.
unsafe impl SharedSegment for HostSegment {
    fn addr(&self) -> u64 {
        self.mapping.addr()
    }

    fn bytes(&self) -> u64 {
        self.mapping.bytes()
    }

    unsafe fn descriptor(&self) -> Result<OwnedFd> {
        self.file.descriptor()
    }

    fn alias(&self) -> Result<Arc<dyn SharedSegment>> {
        let file = SharedFile::open(self.file.descriptor()?)?;
        let mapping = file.map(self.mapping.bytes())?;
        Ok(Arc::new(HostSegment { mapping, file, _committed: None }))
    }
}
