//! The allocator's backings: device memory as pieces that are mapped into reservations, and pinned
//! host memory as segments.
//!
//! The module fills the allocator cells of the device's state. It must not know how blocks are
//! placed.

pub mod shareable;

use crate::machine::{DEVICE_BASE, GRANULARITY, Machine, PieceId};
use crate::manager::device::DeviceState;
use leasehold_alloc::{Allocator, AllocatorConfig, Backing, BackingCaps, Chunk, HostKind};
use leasehold_core::sync::Mutex;
use leasehold_core::sync::atomic::{AtomicU64, Ordering};
use leasehold_core::{Error, Result, Text};
use leasehold_hal::MemoryKind;
use std::collections::BTreeMap;

/// The allocator of a kind of memory; the first call makes it.
///
/// # Errors
/// `Unsupported` for a kind that the device does not have; `OutOfMemory`.
pub fn of(device: &DeviceState, kind: MemoryKind) -> Result<&Allocator> {
    let (cell, what, host_kind) = match kind {
        MemoryKind::Device => (&device.device_memory, "device memory", HostKind::None),
        MemoryKind::Pinned => (&device.pinned_memory, "pinned memory", HostKind::Pinned),
        other => {
            return Err(Error::Unsupported(format!("{}: no {other:?} memory", device.id()).into()));
        }
    };
    cell.get_or_make(|| {
        let config = AllocatorConfig {
            name: Text::Owned(format!("{} {what}", device.id())),
            host_kind,
            ..AllocatorConfig::default()
        };
        Allocator::new(backing(device, kind)?, config)
    })
}

/// A source of a kind of memory.
///
/// # Errors
/// `Unsupported` for a kind that the device does not have.
pub fn backing(device: &DeviceState, kind: MemoryKind) -> Result<Box<dyn Backing>> {
    let machine = device.common.machine.clone();
    match kind {
        MemoryKind::Device => {
            let ordinal = device.id().ordinal;
            Ok(Box::new(DeviceBacking {
                machine,
                device: ordinal,
                pieces: Mutex::default(),
                calls: AtomicU64::new(0),
            }))
        }
        MemoryKind::Pinned => Ok(Box::new(PinnedBacking { machine, calls: AtomicU64::new(0) })),
        other => Err(Error::Unsupported(format!("{}: no {other:?} memory", device.id()).into())),
    }
}

/// Bytes that the debug checks write or read at once.
const PIECE: usize = 64 << 10;

fn fill(machine: &Machine, at: u64, bytes: u64, byte: u8) -> Result<()> {
    let piece = vec![byte; PIECE.min(bytes as usize)];
    let mut done = 0;
    while done < bytes {
        let n = (bytes - done).min(PIECE as u64);
        machine.poke(at + done, &piece[..n as usize])?;
        done += n;
    }
    Ok(())
}

fn verify(machine: &Machine, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
    let mut piece = vec![0; PIECE.min(bytes as usize)];
    let mut done = 0;
    while done < bytes {
        let n = (bytes - done).min(PIECE as u64);
        let part = &mut piece[..n as usize];
        machine.peek(at + done, part)?;
        if let Some(i) = part.iter().position(|&b| b != byte) {
            return Ok(Some(done + i as u64));
        }
        done += n;
    }
    Ok(None)
}

/// Memory of a device: reservations and pieces.
struct DeviceBacking {
    machine: Machine,
    device: u32,
    /// Pieces that `commit` created and mapped at an address.
    pieces: Mutex<BTreeMap<u64, PieceId>>,
    calls: AtomicU64,
}

impl DeviceBacking {
    fn call(&self) {
        self.calls.fetch_add(1, Ordering::Relaxed);
    }
}

// SAFETY: the machine gives each piece and each address range to one caller, and checks every call.
unsafe impl Backing for DeviceBacking {
    fn caps(&self) -> BackingCaps {
        let physical = self.machine.config().memory;
        BackingCaps {
            vmm: true,
            granule: GRANULARITY,
            physical,
            reserve: true,
            aliases: true,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        self.call();
        self.machine.reserve(bytes, 0)
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        let Some(at) = at else {
            self.call();
            return Ok(Chunk { addr: self.machine.alloc(self.device, bytes)?, bytes, native: 0 });
        };
        let piece = PieceId(self.create(bytes)?);
        // SAFETY: the piece is new, and the caller vouches for the range. `enable` gets a range
        // that was mapped just before.
        let mapped = unsafe {
            self.map(at, piece.0, bytes).and_then(|()| {
                self.enable(at, bytes).inspect_err(|_| {
                    // Restores the state before the call. If even this fails, the piece stays with
                    // its mapping.
                    let _ = self.machine.unmap(at, bytes);
                })
            })
        };
        if let Err(e) = mapped {
            // SAFETY: created above, and mapped nowhere.
            unsafe { self.destroy(piece.0, bytes) }?;
            return Err(e);
        }
        self.pieces.lock().insert(at, piece);
        Ok(Chunk { addr: at, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        let piece = self.pieces.lock().get(&chunk.addr).copied();
        let Some(piece) = piece else {
            self.call();
            return self.machine.free(chunk.addr);
        };
        // SAFETY: `commit` mapped this piece there, and the caller vouches that the range is not in
        // use.
        unsafe { self.unmap(chunk.addr, chunk.bytes) }?;
        self.pieces.lock().remove(&chunk.addr);
        // SAFETY: `commit` created the piece; it is unmapped and off the list.
        unsafe { self.destroy(piece.0, chunk.bytes) }
    }

    unsafe fn release(&self, addr: u64, bytes: u64) {
        self.call();
        // Nothing is committed in the range. If the machine refuses nevertheless, the addresses
        // stay reserved.
        let _ = self.machine.release(addr, bytes);
    }

    fn create(&self, bytes: u64) -> Result<u64> {
        self.call();
        Ok(self.machine.create(self.device, bytes)?.0)
    }

    unsafe fn destroy(&self, handle: u64, _: u64) -> Result<()> {
        self.call();
        self.machine.destroy(PieceId(handle))
    }

    unsafe fn map(&self, at: u64, handle: u64, _: u64) -> Result<()> {
        self.call();
        self.machine.map(at, PieceId(handle))
    }

    unsafe fn enable(&self, at: u64, bytes: u64) -> Result<()> {
        self.call();
        self.machine.set_access(self.device, at, bytes)
    }

    unsafe fn unmap(&self, at: u64, bytes: u64) -> Result<()> {
        self.call();
        self.machine.unmap(at, bytes)
    }

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        fill(&self.machine, at, bytes, byte)
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        verify(&self.machine, at, bytes, byte)
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}

/// Pinned host memory, in segments.
struct PinnedBacking {
    machine: Machine,
    calls: AtomicU64,
}

// SAFETY: each segment is host memory that the machine allocated for this call.
unsafe impl Backing for PinnedBacking {
    fn caps(&self) -> BackingCaps {
        let physical = self.machine.config().pinned;
        BackingCaps {
            granule: GRANULARITY,
            physical,
            segment: GRANULARITY,
            ..BackingCaps::default()
        }
    }

    fn reserve(&self, bytes: u64) -> Result<u64> {
        Err(Error::Unsupported(format!("pinned memory has no reservations ({bytes} bytes)").into()))
    }

    unsafe fn commit(&self, at: Option<u64>, bytes: u64) -> Result<Chunk> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        if let Some(at) = at {
            return Err(Error::Unsupported(
                format!("pinned memory cannot be committed at {at:#x}").into(),
            ));
        }
        let addr = self.machine.host_alloc(bytes)?;
        debug_assert!(addr < DEVICE_BASE);
        Ok(Chunk { addr, bytes, native: 0 })
    }

    unsafe fn decommit(&self, chunk: Chunk) -> Result<()> {
        self.calls.fetch_add(1, Ordering::Relaxed);
        self.machine.host_free(chunk.addr)
    }

    unsafe fn release(&self, _: u64, _: u64) {}

    unsafe fn fill(&self, at: u64, bytes: u64, byte: u8) -> Result<()> {
        fill(&self.machine, at, bytes, byte)
    }

    unsafe fn verify(&self, at: u64, bytes: u64, byte: u8) -> Result<Option<u64>> {
        verify(&self.machine, at, bytes, byte)
    }

    fn driver_calls(&self) -> u64 {
        self.calls.load(Ordering::Relaxed)
    }
}
