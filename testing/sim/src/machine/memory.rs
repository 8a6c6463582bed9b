//! Memory functions of the machine: allocation, mapping, host memory and peer access.
//!
//! Device memory has addresses from [`DEVICE_BASE`](super::DEVICE_BASE) on, in one space for all
//! devices. An allocation has both addresses and memory. Reservations, pieces and mappings separate
//! the two. Devices access pinned or registered host memory at its own address; only copies access
//! other host memory.
//!
//! The machine reports memory that is freed while no order exists after its last use, or while a
//! pending command names it. The memory is freed nevertheless.

use super::detect::{Actor, HOST, Operation, ReportKind};
use super::space::{AccessPart, AccessScope, Gone};
use super::{Machine, MachineState, Monitor, PieceId, QueueId};
use leasehold_core::{Error, Name, Result};
use leasehold_hal::Access;
use std::os::fd::OwnedFd;

impl Machine {
    /// Allocates `bytes` of a device's memory.
    ///
    /// # Errors
    /// `OutOfMemory`; `InvalidArgument` for zero bytes; `DeviceLost`; an error of the fault plan.
    pub fn alloc(&self, device: u32, bytes: u64) -> Result<u64> {
        self.enter(device, "alloc")?.space.alloc(device, bytes)
    }

    /// Frees an allocation.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is not an allocation; `DeviceLost`; an error of the
    /// fault plan. Nothing has changed then.
    pub fn free(&self, addr: u64) -> Result<()> {
        let device = self.lock().space.owner(addr).unwrap_or(0);
        let mut state = self.enter(device, "free")?;
        let gone = state.space.allocation(addr)?;
        state.is_gone(&gone, "free", ReportKind::UseAfterFree, true);
        state.space.free(addr)?;
        state.detector.forget(gone.key, gone.bytes);
        Ok(())
    }

    /// Allocates memory in queue order: the address is known at once, and later work on the queue
    /// may use it.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn alloc_async(&self, queue: QueueId, bytes: u64) -> Result<u64> {
        let mut state = self.enter_queue(queue, "alloc_async")?;
        let device = state.queue(queue)?.device;
        let addr = state.space.alloc(device, bytes)?;
        if let Err(e) = state.push_allocated(queue, addr) {
            state.space.free(addr)?;
            return Err(e);
        }
        Ok(addr)
    }

    /// Frees an allocation in queue order.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is not an allocation; `DeviceLost`; an error of the
    /// fault plan.
    pub fn free_async(&self, queue: QueueId, addr: u64) -> Result<()> {
        let mut state = self.enter_queue(queue, "free_async")?;
        state.push(queue, super::Command::Free(addr))
    }

    /// Reserves addresses. `align` is a power of two, or 0 for [`GRANULARITY`](super::GRANULARITY).
    /// `bytes` is a multiple of `GRANULARITY`.
    ///
    /// # Errors
    /// `InvalidArgument`; `OutOfMemory` without addresses; an error of the fault plan.
    pub fn reserve(&self, bytes: u64, align: u64) -> Result<u64> {
        self.enter_host("reserve")?.space.reserve(bytes, align)
    }

    /// Releases a whole reservation, in which no mapping is left.
    ///
    /// # Errors
    /// `InvalidArgument`; an error of the fault plan.
    pub fn release(&self, addr: u64, bytes: u64) -> Result<()> {
        self.enter_host("release")?.space.release(addr, bytes)
    }

    /// Creates memory without addresses, a multiple of [`GRANULARITY`](super::GRANULARITY).
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn create(&self, device: u32, bytes: u64) -> Result<PieceId> {
        self.enter(device, "create")?.space.create(device, bytes)
    }

    /// Creates a piece that other machines, also of other processes, may map.
    ///
    /// # Errors
    /// As [`create`](Self::create); `Unsupported` on a system without sealed files.
    pub fn create_shared(&self, device: u32, bytes: u64) -> Result<PieceId> {
        self.enter(device, "create_shared")?.space.create_shared(device, bytes)
    }

    /// A new descriptor of a shared piece.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist or was not made to be shared; an error of
    /// the fault plan; the system's.
    pub fn export(&self, piece: PieceId) -> Result<OwnedFd> {
        let device = self.lock().space.piece_owner(piece).unwrap_or(0);
        self.enter(device, "export")?.space.export(piece)
    }

    /// A name for the piece of a descriptor, and its bytes. Memory that this machine has already is
    /// the same piece, so the detector knows it. Each name is [destroyed](Self::destroy) once.
    ///
    /// # Errors
    /// `InvalidArgument` for a descriptor that is no shared piece; an error of the fault plan.
    pub fn import(&self, device: u32, descriptor: OwnedFd) -> Result<(PieceId, u64)> {
        let mut state = self.enter(device, "import")?;
        let piece = state.space.import(device, descriptor)?;
        Ok((piece, state.space.piece_bytes(piece).unwrap_or(0)))
    }

    /// Destroys a piece. It cannot be mapped any more; its memory is freed with its last mapping.
    ///
    /// # Errors
    /// `InvalidArgument` for a piece that does not exist; an error of the fault plan.
    pub fn destroy(&self, piece: PieceId) -> Result<()> {
        let device = self.lock().space.piece_owner(piece).unwrap_or(0);
        let mut state = self.enter(device, "destroy")?;
        if let Some(gone) = state.space.destroy(piece)? {
            state.detector.forget(gone.key, gone.bytes);
        }
        Ok(())
    }

    /// Maps a piece at an unmapped address inside a reservation. No device has access before
    /// [`set_access`](Self::set_access).
    ///
    /// # Errors
    /// `InvalidArgument`; an error of the fault plan.
    pub fn map(&self, addr: u64, piece: PieceId) -> Result<()> {
        let device = self.lock().space.piece_owner(piece).unwrap_or(0);
        self.enter(device, "map")?.space.map(addr, piece)
    }

    /// Gives a device access to a range of whole mappings.
    ///
    /// # Errors
    /// `InvalidArgument`; an error of the fault plan.
    pub fn set_access(&self, device: u32, addr: u64, bytes: u64) -> Result<()> {
        self.enter(device, "set_access")?.space.set_access(device, addr, bytes)
    }

    /// Unmaps a range of whole mappings. Of a piece that stays mapped elsewhere, only commands that
    /// are pending at this address are reported: accesses go by the memory.
    ///
    /// # Errors
    /// `InvalidArgument`; an error of the fault plan.
    pub fn unmap(&self, addr: u64, bytes: u64) -> Result<()> {
        let device = self.lock().space.owner(addr).unwrap_or(0);
        let mut state = self.enter(device, "unmap")?;
        for (gone, alone) in state.space.mapped(addr, bytes)? {
            state.is_gone(&gone, "unmap", ReportKind::UseAfterFree, alone);
        }
        for gone in state.space.unmap(addr, bytes)? {
            state.detector.forget(gone.key, gone.bytes);
        }
        Ok(())
    }

    /// Allocates zeroed host memory that all devices can access, at a host address.
    ///
    /// # Errors
    /// As [`alloc`](Self::alloc).
    pub fn host_alloc(&self, bytes: u64) -> Result<u64> {
        let addr = self.enter_host("host_alloc")?.space.host_alloc(bytes)?;
        Ok(addr)
    }

    /// Frees pinned host memory.
    ///
    /// # Errors
    /// `InvalidArgument` for an address that is not pinned memory; an error of the fault plan.
    pub fn host_free(&self, addr: u64) -> Result<()> {
        let mut state = self.enter_host("host_free")?;
        let mut gone = state.space.host_free(addr)?;
        state.host_is_gone(&mut gone, "host free");
        Ok(())
    }

    /// Gives devices access to existing host memory.
    ///
    /// # Errors
    /// `InvalidArgument`; `InvalidState` if a part of the memory is registered already; an error of
    /// the fault plan.
    ///
    /// # Safety
    /// - The range is memory of this process that may be read and written. It stays so until it is
    ///   unregistered and no work uses it. While work uses it, no code holds a reference to it.
    pub unsafe fn host_register(&self, addr: u64, bytes: u64) -> Result<()> {
        self.enter_host("host_register")?.space.host_register(addr, bytes)
    }

    /// Unregisters memory of [`host_register`](Self::host_register).
    ///
    /// # Errors
    /// `InvalidArgument`; an error of the fault plan.
    pub fn host_unregister(&self, addr: u64) -> Result<()> {
        let mut state = self.enter_host("host_unregister")?;
        let mut gone = state.space.host_unregister(addr)?;
        state.host_is_gone(&mut gone, "host unregister");
        Ok(())
    }

    /// Gives kernels of `from` access to allocations of `to`. Returns `true` if they had no access
    /// before.
    ///
    /// # Errors
    /// `NotFound` for a device that does not exist; an error of the fault plan.
    pub fn enable_peer(&self, from: u32, to: u32) -> Result<bool> {
        let mut state = self.enter(from, "enable_peer")?;
        if to >= self.config().devices {
            return Err(Error::NotFound(
                format!("device {to} of {}", self.config().devices).into(),
            ));
        }
        Ok(state.space.enable_peer(from, to))
    }

    /// Reverts [`enable_peer`](Self::enable_peer). Returns `true` if the kernels had access before.
    ///
    /// # Errors
    /// As [`enable_peer`](Self::enable_peer).
    pub fn disable_peer(&self, from: u32, to: u32) -> Result<bool> {
        let mut state = self.enter(from, "disable_peer")?;
        if to >= self.config().devices {
            return Err(Error::NotFound(
                format!("device {to} of {}", self.config().devices).into(),
            ));
        }
        Ok(state.space.disable_peer(from, to))
    }

    /// Reads the present content of memory without any order, for tests and reports. The detector
    /// ignores the access.
    ///
    /// # Errors
    /// `InvalidArgument` for an address without memory.
    pub fn peek(&self, addr: u64, to: &mut [u8]) -> Result<()> {
        let state = self.lock();
        let from = state.space.resolve(AccessScope::Engine, addr, to.len() as u64, &mut Vec::new());
        let from = from.map_err(Error::invalid)?;
        // SAFETY: the lock keeps the mapping, and the machine's memory has this many bytes at the
        // address.
        unsafe { std::ptr::copy(from, to.as_mut_ptr(), to.len()) };
        Ok(())
    }

    /// Writes memory without any order, for tests and debug checks. For the detector the memory
    /// stays unwritten.
    ///
    /// # Errors
    /// `InvalidArgument` for an address without memory.
    pub fn poke(&self, addr: u64, from: &[u8]) -> Result<()> {
        let state = self.lock();
        let to = state.space.resolve(AccessScope::Engine, addr, from.len() as u64, &mut Vec::new());
        let to = to.map_err(Error::invalid)?;
        // SAFETY: the lock keeps the mapping, and the machine's memory has this many bytes at the
        // address.
        unsafe { std::ptr::copy(from.as_ptr(), to, from.len()) };
        Ok(())
    }
}

impl Monitor {
    /// Returns whether the whole range is pinned or registered host memory. Does not count as a
    /// call.
    #[must_use]
    pub fn is_pinned(&self, addr: u64, bytes: u64) -> bool {
        self.lock().space.is_pinned(addr, bytes)
    }

    /// Bytes in use of a device's memory, and its total bytes. Does not count as a call.
    ///
    /// # Errors
    /// `NotFound`.
    pub fn device_memory(&self, device: u32) -> Result<(u64, u64)> {
        if device >= self.0.config.devices {
            return Err(Error::NotFound(
                format!("device {device} of {}", self.0.config.devices).into(),
            ));
        }
        Ok(self.lock().space.device(device))
    }

    /// The device whose memory contains an address; `None` for other memory. Does not count as a
    /// call.
    #[must_use]
    pub fn owner(&self, addr: u64) -> Option<u32> {
        self.lock().space.owner(addr)
    }

    /// Returns whether a range is one whole mapping of a piece that other machines may map. Does
    /// not count as a call.
    #[must_use]
    pub fn is_shared(&self, addr: u64, bytes: u64) -> bool {
        self.lock().space.is_shared(addr, bytes)
    }

    /// Tells the detector that the host reads host memory now. A range that reaches beyond the
    /// address space ends with it.
    pub fn host_read(&self, addr: u64, bytes: u64) {
        self.lock().host_access(addr, bytes, Access::Read);
    }

    /// Tells the detector that the host writes host memory now. The range is as for
    /// [`host_read`](Self::host_read).
    pub fn host_write(&self, addr: u64, bytes: u64) {
        self.lock().host_access(addr, bytes, Access::Write);
    }

    /// Tells the detector that pageable host memory is freed. A pending copy that uses it is
    /// reported. The range is as for [`host_read`](Self::host_read).
    pub fn host_gone(&self, addr: u64, bytes: u64) {
        let mut state = self.lock();
        let bytes = bytes_from(addr, bytes);
        let mut gone = Gone { region: 0, key: addr, addr, bytes, pages: None };
        state.host_is_gone(&mut gone, "host memory's end");
    }
}

/// The bytes of a range that lie in the address space.
fn bytes_from(addr: u64, bytes: u64) -> u64 {
    bytes.min(u64::MAX - addr)
}

impl MachineState {
    /// Records an access of the host to its own memory.
    fn host_access(&mut self, addr: u64, bytes: u64, access: Access) {
        if !self.detector.on {
            return;
        }
        self.host_acts();
        self.host_accesses += 1;
        let name = if access.writes() { "host write" } else { "host read" }.into();
        let (clock, index) = (self.host.clone(), self.host_accesses);
        let who = Actor {
            agent: HOST,
            epoch: self.host_epoch,
            clock: &clock,
            name: &name,
            queue: None,
            index,
            node: None,
            rounds: None,
            scope: Name::current(),
        };
        self.detector.access(&who, addr, addr, bytes_from(addr, bytes), access);
    }

    /// Reports remaining users of memory that is freed now: accesses that the host does not know to
    /// be over, and pending commands.
    fn is_gone(&mut self, gone: &Gone, by: &str, kind: ReportKind, accesses: bool) {
        if !self.detector.on {
            return;
        }
        self.host_accesses += 1;
        let second = Operation {
            name: by.into(),
            queue: None,
            stream: None,
            index: self.host_accesses,
            node: None,
            scope: Name::current(),
        };
        let mut first = Vec::new();
        if accesses {
            first = self.detector.unknown(&self.host, gone.key, gone.addr, gone.bytes);
        }
        let end = gone.addr + gone.bytes;
        for (id, q) in &self.queues {
            for entry in &q.entries {
                let mut touches =
                    gone.region != 0 && entry.regions.iter().any(|r| r.1 == gone.region);
                if gone.region == 0 {
                    entry.action.for_each_range(|r| touches |= r.start < end && gone.addr < r.end);
                }
                if touches {
                    first.push(entry.operation(*id));
                }
            }
        }
        for operation in first {
            self.detector.report(kind, Some(operation), second.clone(), gone.addr, gone.bytes);
        }
    }

    /// Handles freed host memory: pending commands are reported, and the record of its accesses is
    /// removed.
    fn host_is_gone(&mut self, gone: &mut Gone, by: &str) {
        self.is_gone(gone, by, ReportKind::HostGone, true);
        self.detector.forget(gone.key, gone.bytes);
        self.words.retain(|&at, _| at < gone.addr || at >= gone.addr + gone.bytes);
        if let Some(pages) = gone.pages.take() {
            self.trash.push(Box::new(pages));
        }
    }

    /// The present regions of an action's addresses.
    pub(super) fn regions(&self, action: &super::command::Action) -> Vec<(u64, u64)> {
        let mut regions = Vec::new();
        if self.detector.on {
            let mut parts: Vec<AccessPart> = Vec::new();
            action.for_each_range(|r| {
                parts.clear();
                if r.start < r.end
                    && self
                        .space
                        .resolve(AccessScope::Engine, r.start, r.end - r.start, &mut parts)
                        .is_ok()
                {
                    regions
                        .extend(parts.iter().filter(|p| p.region != 0).map(|p| (p.addr, p.region)));
                }
            });
            regions.sort_unstable();
            regions.dedup();
        }
        regions
    }
}
