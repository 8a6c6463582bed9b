//! Memory that other machines may map, also those of other processes.
//!
//! This module must not know how blocks are placed.

use crate::machine::{GRANULARITY, Machine, PieceId};
use crate::manager::device::DeviceState;
use leasehold_core::{Error, Result};
use leasehold_hal::{SharedSegment, Sharing};
use std::os::fd::OwnedFd;
use std::sync::Arc;

/// The source of a device's shareable memory.
pub fn of(device: &DeviceState) -> Arc<dyn Sharing> {
    Arc::new(SimSharing { machine: device.common.machine.clone(), device: device.id().ordinal })
}

#[derive(Clone)]
struct SimSharing {
    machine: Machine,
    device: u32,
}

impl SimSharing {
    /// Maps a piece for the device. Takes the piece, also on an error.
    fn map(&self, piece: PieceId, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let source = self.clone();
        let mut segment = SimSegment { source, piece, addr: None, bytes, mapped: false };
        let addr = self.machine.reserve(bytes, 0)?;
        segment.addr = Some(addr);
        self.machine.map(addr, piece)?;
        segment.mapped = true;
        self.machine.set_access(self.device, addr, bytes)?;
        Ok(Arc::new(segment))
    }
}

// SAFETY: the machine gives each piece and each address range to one caller, and checks every call.
unsafe impl Sharing for SimSharing {
    fn granule(&self) -> u64 {
        GRANULARITY
    }

    fn create(&self, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        self.map(self.machine.create_shared(self.device, bytes)?, bytes)
    }

    fn import(&self, descriptor: OwnedFd, bytes: u64) -> Result<Arc<dyn SharedSegment>> {
        let (piece, has) = self.machine.import(self.device, descriptor)?;
        if has != bytes {
            self.machine.destroy(piece)?;
            return Err(Error::invalid(format!(
                "the descriptor has {has} bytes of shareable memory, and {bytes} were announced; \
                 send descriptor and description of one export"
            )));
        }
        self.map(piece, bytes)
    }
}

struct SimSegment {
    source: SimSharing,
    piece: PieceId,
    addr: Option<u64>,
    bytes: u64,
    mapped: bool,
}

// SAFETY: the range is mapped for the device until the segment is dropped.
unsafe impl SharedSegment for SimSegment {
    fn addr(&self) -> u64 {
        self.addr.unwrap_or(0)
    }

    fn bytes(&self) -> u64 {
        self.bytes
    }

    unsafe fn descriptor(&self) -> Result<OwnedFd> {
        self.source.machine.export(self.piece)
    }

    fn alias(&self) -> Result<Arc<dyn SharedSegment>> {
        self.source.import(self.source.machine.export(self.piece)?, self.bytes)
    }
}

impl Drop for SimSegment {
    fn drop(&mut self) {
        let machine = &self.source.machine;
        // A mapping that the machine refuses to end stays: its addresses are not reserved anew.
        if let Some(addr) = self.addr
            && (!self.mapped || machine.unmap(addr, self.bytes).is_ok())
        {
            let _ = machine.release(addr, self.bytes);
        }
        let _ = machine.destroy(self.piece);
    }
}
